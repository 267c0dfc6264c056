"""Engines and front ends that packages of others add, and our own, which are registered in the same way."""

from __future__ import annotations

import asyncio
import re
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, NoReturn

import pytest
from support.commands import run_command, run_here, running
from support.raw_http import call

from omni_ws.cli import main
from omni_ws.client import connect
from omni_ws.config import (
    ConfigurationError,
    EngineName,
    ServerConfig,
    check_available,
    load,
    parts,
)
from omni_ws.config.parts import (
    ENGINES,
    FRONTS,
    OWN,
)
from omni_ws.engine.fake import EchoEngine
from omni_ws.engine_choice import create_engine, wanted_weights
from omni_ws.server import create_app

ROOT = Path(__file__).parents[1]
SHOUT = ROOT / "tests" / "data" / "plugin"


@pytest.fixture
def shout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SHOUT)


def package(folder: Path, name: str, *, source: str | None = None, engine: str = "", front: str = "") -> None:
    """A package in a folder of ``sys.path``; ``engine`` and ``front`` are its entry points."""
    information = folder / f"{name}-1.0.dist-info"
    information.mkdir(parents=True)
    information.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    information.joinpath("entry_points.txt").write_text(f"[{ENGINES}]\n{engine}\n[{FRONTS}]\n{front}\n")
    if source is not None:
        folder.joinpath(f"{name}.py").write_text(source)


def refusal(*argv: str) -> str:
    """The one line with which the command refuses to start."""
    ended = run_here(main, "serve", "--port", "0", *argv)
    assert (ended.status, ended.output) == (2, "")
    (line,) = ended.errors.splitlines()
    return line.removeprefix("omni-ws serve: error: ")


# Our own


def test_our_own_are_registered_as_those_of_others_are() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"] == OWN
    assert set(OWN[ENGINES]) == set(EngineName)
    for group, entries in OWN.items():
        for name, value in entries.items():
            assert callable(EntryPoint(name, value, group).load())


def test_our_own_need_nothing_of_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The installation may be older than the code, and takes time to read."""

    def read(**parameters: Any) -> NoReturn:
        raise AssertionError("what is installed was read")

    monkeypatch.setattr(parts, "entry_points", read)
    config = load(["--engine", "fake", "--port", "0", "--fronts", "demo"]).config
    assert config.engine is EngineName.FAKE
    app = create_app(create_engine(config), config)
    assert len(app.front_ends) == len(OWN[FRONTS])


# Those of others


@pytest.mark.slow
@pytest.mark.real_time
async def test_a_package_adds_an_engine_and_a_route(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SHOUT))
    file = tmp_path / "omni.toml"
    file.write_text('port = 0\nfronts = ["loudness"]\n[plugins.shout]\nmark = "?!"\n', encoding="utf-8")
    command = (sys.executable, "-m", "omni_ws", "serve", "--engine", "shout", "--config", str(file))
    async with running(*command, stderr=asyncio.subprocess.PIPE) as process:
        assert process.stderr is not None
        said: list[str] = []
        while not said or "in a browser" not in said[-1]:
            said.append((await process.stderr.readline()).decode())
            assert said[-1], said
        (port,) = map(int, re.findall(r":(\d+) in a browser", said[-1]))
        assert any(line.endswith(f"listens on http://127.0.0.1:{port} (engine shout)\n") for line in said)
        assert any("shouts with ?!" in line for line in said)
        async with connect(f"ws://127.0.0.1:{port}/v1/streaming_input") as session:
            assert (await session.ask_text("hello there")).text == "HELLO THERE?!"
        assert (await call(port, "GET", "/v1/loudness")).json() == {"engine": "shout", "loudness": 11}
        process.terminate()
        rest = await process.stderr.read()
        assert (await process.wait(), b"Traceback" in rest) == (0, False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "imported"),
    [
        (("--engine", "fake"), "omni_ws.engine.fake"),
        (("--engine", "shout"), "omni_ws_shout"),
        (("--engine", "fake", "--fronts", "loudness"), "omni_ws.engine.fake omni_ws_shout"),
    ],
)
async def test_only_what_was_named_is_imported(
    argv: tuple[str, ...], imported: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SHOUT))
    program = f"""if True:
        import sys
        from omni_ws.config import load
        from omni_ws.engine_choice import create_engine
        from omni_ws.server import create_app
        config = load({argv!r}).config
        create_app(create_engine(config), config)
        names = ["omni_ws.engine." + one for one in ("fake", "remote.engine", "composed.engine", "vllm.engine")]
        print(*(name for name in (*names, "omni_ws_shout") if name in sys.modules))
    """
    ended = await run_command(sys.executable, "-c", program)
    assert (ended.output.strip(), ended.errors) == (imported, "")


@pytest.mark.usefixtures("shout")
def test_an_unknown_name_is_refused_with_those_that_are_known() -> None:
    known = "unknown; known are embedded, vllm, remote, fake, shout"
    assert refusal("--engine", "shuot") == f"engine = 'shuot' (command line --engine): {known}; did you mean shout?"
    assert refusal("--engine", "whisper") == f"engine = 'whisper' (command line --engine): {known}"
    assert refusal("--fronts", "demo,loudnes").endswith("demo, loudness; did you mean loudness?")
    with pytest.raises(ConfigurationError, match=r"engine = 3 .*: unknown; known are"):
        load(toml="engine = 3")


@pytest.mark.usefixtures("shout")
def test_settings_of_a_plugin_are_free_and_its_secrets_masked() -> None:
    file = '[plugins.shout]\nmark = "?"\napi_key = "one"\nin = {depth = 1, more = [{token = "two"}]}\n'
    loaded = load(["--plugins.shout.mark", "!!", "--engine", "shout"], {"OMNI_WS_PLUGINS__SHOUT__IN__DEPTH": "2"}, file)
    assert loaded.config.plugins == {
        "shout": {"mark": "!!", "api_key": "one", "in": {"depth": 2, "more": [{"token": "two"}]}}
    }
    lines = [re.sub(" {2,}", " ", line) for line in loaded.render().splitlines() if "plugins." in line]
    assert lines == [
        'plugins.shout.mark = "!!" # command line --plugins.shout.mark',
        "# plugins.shout.api_key = ******** # configuration file",
        "plugins.shout.in.depth = 2 # environment variable OMNI_WS_PLUGINS__SHOUT__IN__DEPTH",
        'plugins.shout.in.more = [{"token" = "********"}] # configuration file',
    ]
    whole = load((), {"OMNI_WS_PLUGINS": '{"shout": {"password": "three"}}'})
    assert "three" not in whole.render()
    for name in ("api-key", "apikey", "apiKey", "API_KEY", "access-token", "dbPassword"):
        assert "hush" not in load(toml=f'[plugins.shout]\n{name} = "hush"\nin = [{{{name} = "hush"}}]').render()
    assert 'tts.lexicon.Mickey = "micky"' in load(["--tts.lexicon.Mickey", "micky"]).render()
    with pytest.raises(ConfigurationError, match=r"plugins\.shout = 3 \(command line --plugins\.shout\): input should"):
        load(["--plugins.shout", "3"])


@pytest.mark.usefixtures("shout")
def test_whether_an_engine_of_others_has_token_sessions_is_known_once_it_has_started() -> None:
    check_available(ServerConfig.model_validate({"engine": "shout", "grpc": {"port": 0}}))


@pytest.mark.usefixtures("shout")
def test_nothing_is_fetched_for_parts_that_an_engine_of_others_does_not_use() -> None:
    assert {one.name for one in wanted_weights(ServerConfig(engine="shout"))} <= {"smart-turn"}


# What goes wrong


def test_two_packages_with_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one_voice", "other_voice"):
        package(tmp_path / name, name, engine="voice = nowhere:engine")
        monkeypatch.syspath_prepend(tmp_path / name)
    assert refusal("--engine", "voice") == (
        "engine = 'voice' (command line --engine): one_voice and other_voice both have this name: uninstall one of them"
    )


def test_a_name_of_ours_stays_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path, "false_fake", engine="fake = nowhere:engine")
    monkeypatch.syspath_prepend(tmp_path)
    assert isinstance(create_engine(load(["--engine", "fake"]).config), EchoEngine)


@pytest.mark.parametrize(
    ("name", "source", "reason"),
    [
        (
            *("imports_nothing", "import lacking_package"),
            "(imports_nothing:engine) cannot be made: ModuleNotFoundError: No module named 'lacking_package'",
        ),
        (
            *("divides", "def engine(config): 1 / 0"),
            "(divides:engine) cannot be made: ZeroDivisionError: division by zero",
        ),
        (
            *("has_none", ""),
            "(has_none:engine) cannot be made: AttributeError: module 'has_none' has no attribute 'engine'",
        ),
        ("returns_text", "def engine(config): return 'me'", "(returns_text:engine) returned str, which is no Engine"),
    ],
)
def test_an_engine_that_cannot_be_made(
    name: str, source: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(tmp_path, name, source=source, engine=f"broken = {name}:engine")
    monkeypatch.syspath_prepend(tmp_path)
    assert refusal("--engine", "broken") == f"engine broken of {name} {reason}"


@pytest.mark.parametrize(
    ("name", "source", "reason"),
    [
        (
            "returns_app",
            "def front(app): return app",
            "broken of returns_app (returns_app:front) returned App, which is no FrontEnd",
        ),
        (
            "refuses",
            "def front(app): raise ValueError('no loudspeaker')",
            "broken of refuses (refuses:front) cannot be made: ValueError: no loudspeaker",
        ),
        (
            "takes_a_route",
            "from omni_ws.transport.http.application import FrontEnd\n"
            "class front(FrontEnd):\n"
            "    def __init__(self, app): pass\n"
            "    def register(self, router): router.add('GET', '/health', print)\n",
            "front: GET /health already has a handler",
        ),
    ],
)
def test_a_front_end_that_cannot_be_made(
    name: str, source: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(tmp_path, name, source=source, front=f"broken = {name}:front")
    monkeypatch.syspath_prepend(tmp_path)
    assert refusal("--engine", "fake", "--fronts", "broken") == f"front end {reason}"


# What is written of them


def test_the_document_shows_the_plugin_that_is_tested() -> None:
    sources = [(SHOUT / "omni_ws_shout" / f"{name}.py").read_text(encoding="utf-8") for name in ("engine", "front")]
    points = (SHOUT / "omni_ws_shout-1.0.dist-info" / "entry_points.txt").read_text(encoding="utf-8")
    document = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
    assert re.findall(r"```python\n(.*?)```", document, re.DOTALL) == sources
    (project,) = re.findall(r"```toml\n(\[project.entry.*?)```", document, re.DOTALL)
    written = tomllib.loads(project)["project"]["entry-points"]
    assert written == {
        group: dict(line.split(" = ") for line in lines.strip().splitlines())
        for group, lines in re.findall(r"\[(.+?)\]\n([^\[]+)", points)
    }

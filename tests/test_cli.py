"""The command ``omni-ws``: flags, messages, exit status."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import pytest
import uvloop
from support.patience import PATIENCE_SEC

from omni_ws import __version__
from omni_ws.cli import main
from omni_ws.config import ServerConfig
from omni_ws.config.loading import SETTINGS
from omni_ws.errors import EngineFailed


def run(*argv: str, environ: Mapping[str, str] | None = None) -> int:
    try:
        return main(argv, environ or {})
    except SystemExit as end:
        return int(end.code or 0)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"omni-ws {__version__}\n"


def test_help_lists_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    shown = capsys.readouterr().out
    assert "serve" in shown
    assert "replay" in shown
    assert "bench" in shown
    assert "vllm-node" in shown


def test_serve_help_is_what_most_people_need(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("serve", "--help") == 0
    shown = capsys.readouterr().out
    for flag in ("--config", "--port", "--engine", "--model", "--api-key", "--ssl-certfile", "--help-all"):
        assert f" {flag}" in shown
    assert "--streaming-input.start-policy" not in shown
    assert all((f" {setting.flag}" in shown) == setting.often for setting in SETTINGS.values())


def test_serve_help_all_lists_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("serve", "--help-all") == 0
    shown = capsys.readouterr().out
    assert all(f" {setting.flag}" in shown for setting in SETTINGS.values())
    for flag in (
        "--config",
        "--print-config",
        "--port",
        "--grpc-port",
        "--streaming-input.start-policy",
        "--vllm.args",
    ):
        assert flag in shown


@pytest.mark.parametrize("argv", [("nonsense",), ("nonsense", "--port", "1")])
def test_bad_commands(argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*argv) == 2
    assert "usage: omni-ws" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [(), ("--port", "9000"), ("serve", "--fetch", "--port", "9000")])
def test_without_a_command_weights_are_fetched_and_the_default_parts_served(
    argv: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched, served = list[ServerConfig](), list[ServerConfig]()
    monkeypatch.setattr("omni_ws.tools.weights.fetch_for_start", fetched.append)

    async def serve(config: ServerConfig, **_: object) -> int:
        served.append(config)
        return 0

    server_module(monkeypatch, serve)
    assert run(*argv) == 0
    (config,) = served
    assert fetched == [config.model_copy(update={"llm": fetched[0].llm})]
    assert (config.engine_name, config.chooses_llm, config.llm.fetch) == ("embedded", True, True)
    assert config.port == (9000 if argv else 8080)


def test_print_config_shows_values_and_origins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "omni.toml"
    file.write_text("port = 9000", encoding="utf-8")
    argv = ("serve", "--config", str(file), "--print-config", "--engine", "fake", "--host", "0.0.0.0")
    assert run(*argv, environ={"OMNI_WS_LOG_LEVEL": "debug"}) == 0
    lines = {line.split(" = ")[0]: " ".join(line.split()) for line in capsys.readouterr().out.splitlines()}
    assert lines["port"] == f"port = 9000 # {file}"
    assert lines["engine"] == 'engine = "fake" # command line --engine'
    assert lines["log_level"] == 'log_level = "debug" # environment variable OMNI_WS_LOG_LEVEL'
    assert lines["drain_timeout_sec"] == "drain_timeout_sec = 30 # default"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--prot", "1"), "unknown flag --prot; did you mean --port?"),
        (("--port", "x"), "port = 'x' (command line --port): "),
        (("--host", "0.0.0.0"), "refusing to listen on 0.0.0.0"),
        (("--engine", "vllm"), "the vllm engine needs "),
        (("--model", "some/model"), "--model is for the vllm engine, and this is the embedded engine"),
        (("--engine", "fake", "--vllm.talker", "x"), "--vllm.talker is for the vllm engine"),
        (("--remote.upstreams", "http://127.0.0.1:1/v1"), "remote.upstreams is for the remote engine"),
        (("--grpc-port", "50051"), "the embedded engine has no token sessions"),
        (("--keys-file", "/nonexistent/keys.toml"), "cannot read /nonexistent/keys.toml"),
        (("--config", "/nonexistent/omni.toml"), "cannot read /nonexistent/omni.toml"),
    ],
)
def test_a_bad_configuration_is_a_line_and_status_2(
    argv: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("serve", *argv) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"omni-ws serve: error: {message}")
    assert shown.err.count("\n") == 1


def test_python_m_is_the_command() -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OMNI_WS_")}
    ended = subprocess.run(
        [sys.executable, "-m", "omni_ws", "serve", "--prot=1"],
        env=environ, capture_output=True, text=True, timeout=PATIENCE_SEC, check=False,
    )  # fmt: skip
    assert ended.returncode == 2
    assert ended.stderr == "omni-ws serve: error: unknown flag --prot; did you mean --port?\n"


def server_module(monkeypatch: pytest.MonkeyPatch, serve: Callable[[ServerConfig], Awaitable[int]]) -> None:
    """Put ``serve`` in the server's place, so that what the command makes of its end can be seen."""
    monkeypatch.setattr("omni_ws.server.serve", serve)


async def listen(config: ServerConfig, **_: object) -> int:
    server = await asyncio.start_server(lambda reader, writer: writer.close(), config.host, config.port)
    server.close()
    return 0


def test_a_taken_port_is_an_error_and_never_another_port(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server_module(monkeypatch, listen)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run("serve", "--port", str(port)) == 1
    shown = capsys.readouterr().err
    assert shown.startswith(f"omni-ws serve: error: port {port} on 127.0.0.1 is already in use")
    assert shown.count("\n") == 1


def test_a_free_port_is_served_under_uvloop(monkeypatch: pytest.MonkeyPatch) -> None:
    loops = []

    async def serve(config: ServerConfig, **_: object) -> int:
        loops.append(type(asyncio.get_running_loop()))
        return await listen(config)

    server_module(monkeypatch, serve)
    assert run("serve", "--port", "0") == 0
    assert loops == [uvloop.Loop]


@pytest.mark.parametrize(
    ("raised", "status", "message"),
    [
        (EngineFailed("the model is not there"), 1, "omni-ws serve: error: the model is not there\n"),
        (KeyboardInterrupt(), 130, ""),
        (
            OSError(errno.EADDRNOTAVAIL, "x"),
            1,
            "cannot listen on 127.0.0.1, port 8080: Cannot assign requested address\n",
        ),
        (FileNotFoundError(2, "No such file or directory", "cert.pem"), 1, "No such file or directory: 'cert.pem'\n"),
    ],
)
def test_how_the_server_ends_is_the_exit_status(
    raised: BaseException,
    status: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def serve(config: ServerConfig, **_: object) -> int:
        raise raised

    server_module(monkeypatch, serve)
    assert run("serve") == status
    assert capsys.readouterr().err.endswith(message)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "ssl_certfile: cannot read {file}: No such file"), ("text", "must contain a PEM certificate")],
)
def test_a_certificate_that_cannot_be_used_is_named(
    content: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cert.pem"
    if content is not None:
        file.write_text(content)
    assert run("serve", "--engine", "fake", "--port", "0", "--ssl-certfile", str(file)) == 2
    assert message.format(file=file) in capsys.readouterr().err


@pytest.mark.parametrize("module", ["omni_ws", "omni_ws.profiler"])
def test_a_python_without_the_packages_says_which_one_has_them(module: str, tmp_path: Path) -> None:
    """As where the system's Python is called in the project's folder."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.modules.update(dict.fromkeys(('msgspec', 'websockets', 'pydantic')))\n"
    )
    root = Path(__file__).parents[1]
    ended = subprocess.run(
        [sys.executable, "-m", module, "serve"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{root}"}, capture_output=True, text=True,
        timeout=PATIENCE_SEC, check=False,
    )  # fmt: skip
    assert ended.returncode == 1
    assert "use the project's own" in ended.stderr
    assert f".venv/bin/python -m {module}" in ended.stderr
    assert ended.stderr.count("\n") == 1

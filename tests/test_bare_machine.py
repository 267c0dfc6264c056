"""A run that hides what a machine has by luck really does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import bare_machine

from omni_ws.config.model import VoiceChoice
from omni_ws.engine.tts.voice import WORKER_MODULE
from omni_ws.engine.tts.voice_pipe import HEAD, decode_object

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only the loader of Linux lets libraries be hidden")


def run_bare(*command: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "support.bare_machine", *command],
        env={**os.environ, "PYTHONPATH": f"{Path(__file__).parent}:{Path(__file__).parents[1]}"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )


@pytest.mark.parametrize("voice_choice", [VoiceChoice.FLITE], indirect=True, ids=str)
def test_a_voice_that_speaks_here_is_not_found(voice_choice: VoiceChoice) -> None:
    worker = run_bare(sys.executable, "-m", WORKER_MODULE, voice_choice.value)
    assert decode_object(worker.stdout[HEAD.size :]) == {"reason": "libflite is not installed"}, worker.stderr


def test_a_program_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ffmpeg", "grep"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("OMNI_WS_PORT", "1")
    script = "import os, shutil; print(shutil.which('ffmpeg'), os.path.realpath(shutil.which('grep')))"
    found = run_bare(sys.executable, "-c", f"{script}; print(os.environ.get('OMNI_WS_PORT'))")
    assert found.stdout.decode().split() == ["None", str(tmp_path / "grep"), "None"], found.stderr


def test_the_command_tells_how_it_ended() -> None:
    assert run_bare(sys.executable, "-c", "raise SystemExit(7)").returncode == 7


def test_nothing_starts_where_hiding_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bare_machine, "PROGRAMS", (*bare_machine.PROGRAMS, "ffmpeg"))
    (tmp_path / "ffmpeg").write_text("#!/bin/sh\n")
    (tmp_path / "ffmpeg").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert bare_machine.main([sys.executable, "-c", "print('it ran')"]) == 1
    told = capfd.readouterr()
    assert (told.out, told.err) == ("", "ffmpeg can still be found\n")

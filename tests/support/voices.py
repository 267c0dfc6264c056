"""The spare voice, espeak-ng, for tests of what concerns every voice, and whether a voice can be had here.

A machine without it skips its tests, each by name; under CI that is a failure.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache

import pytest
from support.commands import read_message
from support.real_models import fetched

from omni_ws.config.model import VoiceChoice
from omni_ws.engine.tts.synthesiser import FromWorker, VoiceReady
from omni_ws.engine.tts.voice_process import WORKER_MODULE


@cache
def _missing(choice: VoiceChoice) -> str:
    """Why the voice's own worker does not speak here; empty where it does."""
    command = [sys.executable, "-m", WORKER_MODULE, choice.value]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        said, _ = read_message(worker.stdout, FromWorker)
    return said.reason if isinstance(said, VoiceReady) else ""


def need(choice: VoiceChoice) -> VoiceChoice:
    """``choice``; skips the test, or fails it under CI, where this machine does not have it."""
    if choice is VoiceChoice.HIBARI:
        fetched("hibari")
    reason = _missing(choice)
    if reason and os.environ.get("CI"):
        pytest.fail(f"{reason}, and under CI nothing is skipped")
    if reason:
        pytest.skip(f"no voice {choice}: {reason}")
    return choice


@pytest.fixture(scope="session")
def voice_choice() -> VoiceChoice:
    return need(VoiceChoice.ESPEAK)

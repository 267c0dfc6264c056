"""The spare voice, espeak-ng, for tests of what concerns every voice, and whether a voice can be had here.

A machine without it skips its tests, each by name; under CI that is a failure.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache

import pytest

from omni_ws.config.model import VoiceChoice
from omni_ws.engine.tts.synthesis_engine import WORKER_MODULE
from omni_ws.engine.tts.synthesiser import HEAD, decode_object


@cache
def _missing(choice: VoiceChoice) -> str:
    """Why the voice's own worker does not speak here; empty where it does."""
    worker = subprocess.run(
        [sys.executable, "-m", WORKER_MODULE, choice.value], stdin=subprocess.DEVNULL, capture_output=True, check=True
    )
    return str(decode_object(worker.stdout[HEAD.size :]).get("reason", ""))


def need(choice: VoiceChoice) -> VoiceChoice:
    """``choice``; skips the test, or fails it under CI, where this machine does not have it."""
    reason = _missing(choice)
    if reason and os.environ.get("CI"):
        pytest.fail(f"{reason}, and under CI nothing is skipped")
    if reason:
        pytest.skip(f"no voice {choice}: {reason}")
    return choice


@pytest.fixture(scope="session")
def voice_choice() -> VoiceChoice:
    return need(VoiceChoice.ESPEAK)

"""Every voice of the embedded engine, for the tests of speech.

A voice that this machine does not have skips its tests, each by name; under CI that is a failure. Those of a voice that
is hidden from the whole run (support/bare_machine.py) are left out.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from typing import Final

import pytest
from support.bare_machine import VOICES_VARIABLE

from omni_ws.config.model import VoiceChoice
from omni_ws.engine.tts.voice import WORKER_MODULE
from omni_ws.engine.tts.voice_pipe import HEAD, decode_object

#: Names of voices that this run hides.
HIDDEN: Final = frozenset(os.environ.get(VOICES_VARIABLE, "").split())
VOICES: Final = (VoiceChoice.FLITE, VoiceChoice.ESPEAK)


@cache
def missing(choice: VoiceChoice) -> str:
    """Why the voice's own worker does not speak here; empty where it does."""
    worker = subprocess.run(
        [sys.executable, "-m", WORKER_MODULE, choice.value], stdin=subprocess.DEVNULL, capture_output=True, check=True
    )
    return str(decode_object(worker.stdout[HEAD.size :]).get("reason", ""))


def need(choice: VoiceChoice) -> VoiceChoice:
    """``choice``; skips the test, or fails it under CI, where this machine does not have it."""
    reason = missing(choice)
    if reason and os.environ.get("CI"):
        pytest.fail(f"{reason}, and under CI nothing is skipped")
    if reason:
        pytest.skip(f"no voice {choice}: {reason}")
    return choice


@pytest.fixture(scope="module", params=VOICES, ids=str)
def voice_choice(request: pytest.FixtureRequest) -> VoiceChoice:
    """Each voice in turn."""
    return need(request.param)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    def hidden(item: pytest.Item) -> bool:
        return (
            isinstance(item, pytest.Function)
            and hasattr(item, "callspec")
            and (item.callspec.params.get("voice_choice") in HIDDEN)
        )

    left_out = [item for item in items if hidden(item)]
    if left_out:
        items[:] = [item for item in items if not hidden(item)]
        config.hook.pytest_deselected(items=left_out)


def pytest_sessionstart() -> None:
    """What counts as hidden must be: nothing that such a run shows would be worth anything."""
    for name in HIDDEN:
        if not missing(VoiceChoice(name)):
            raise pytest.UsageError(f"{name} speaks, although {VOICES_VARIABLE} says that it is hidden")

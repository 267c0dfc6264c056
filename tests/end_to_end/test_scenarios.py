"""The scenarios of examples/scenarios: all have the form, and five of them hold in calls to a server that is started.

Without bounds of time: what is checked is order, content, and time in audio, which no busy machine changes.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from support.commands import run_command
from support.real_models import fetched

from omni_ws.scenarios.command import read_files

FILES = sorted((Path(__file__).parents[2] / "examples" / "scenarios").glob("*.yaml"))
GATE = {
    "capital-of-france",
    "interrupted-in-the-first-second",
    "kept-of-an-interrupted-answer",
    "end-of-a-turn-by-silence",
    "silence",
}


def test_thirty_have_the_form_and_the_gate_is_of_five() -> None:
    scenarios = [one.scenario for file in read_files(FILES) for one in file.scenarios]
    assert len({one.name for one in scenarios}) == 30
    assert {one.name for one in scenarios if "gate" in one.tags} == GATE


@pytest.mark.slow
async def test_the_gate(tmp_path: Path) -> None:
    fetched("whisper-tiny-en")
    fetched("hibari")
    # A recogniser hears as many speakers at once as there are cores.
    patient = ("--no-times", "--patience", "120", "--jobs", str(min(2, os.cpu_count() or 1)))
    options = ("--only", "gate", *patient, "--format", "json", "--save", str(tmp_path))
    ended = await run_command(sys.executable, "-m", "omni_ws", "test", *options, *map(str, FILES))
    assert ended.status == 0, ended.output + ended.errors
    assert {one["name"] for one in json.loads(ended.output)["scenarios"]} == GATE

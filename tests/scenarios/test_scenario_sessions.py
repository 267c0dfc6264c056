"""What of a session's settings the Realtime API can have, and what they mean for the caller's loudspeaker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from omni_ws.scenarios.form import PlacedScenario, parse
from omni_ws.scenarios.servers import (
    NotHere,
    wire_of,
)

FILE = b"scenarios: [{name: one, caller: [{say: Hello.}, {hear: {}}]}]"


@pytest.fixture(scope="module")
def scenario() -> PlacedScenario:
    (one,) = parse(FILE, Path("one.yaml")).scenarios
    return one


@pytest.mark.parametrize("name", ["duck", "interrupt_resume", "backchannel"])
def test_what_the_realtime_api_never_does_may_be_off_there_but_not_on(scenario: PlacedScenario, name: str) -> None:
    def turns(value: bool) -> dict[str, Any] | None:
        session = {"turn_detection": {"type": "server_vad", name: value}}
        return wire_of(scenario, session, protocol="realtime").turns

    assert turns(False) == {"type": "server_vad"}
    with pytest.raises(NotHere, match=f"needs: native .*{name}"):
        turns(True)


@pytest.mark.parametrize("protocol", ["native", "realtime"])
def test_speech_stops_the_loudspeaker_unless_it_may_not_interrupt(scenario: PlacedScenario, protocol: str) -> None:
    def is_interruptible(**turns: bool) -> bool:
        return wire_of(scenario, {"turn_detection": turns}, protocol=protocol).is_interruptible

    assert is_interruptible()
    assert is_interruptible(interrupt_response=True)
    assert not is_interruptible(interrupt_response=False)

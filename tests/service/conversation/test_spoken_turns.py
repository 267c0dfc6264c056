"""What a conversation makes of speech that its turn listener hears."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from omni_ws.audio.sound_levels import SpeechLull
from omni_ws.service.conversation.onsets import (
    SpokenTurns,
    _Speech,
)


def test_a_voice_that_goes_on_makes_the_measures_of_its_beginning_void() -> None:
    hum = SpeechLull(320, True, 600, probability=1.0)
    conversation: Any = SimpleNamespace(ledger=SimpleNamespace(last_said=str), engine=None)
    lulls: list[SpeechLull | None] = []
    request: Any = SimpleNamespace(lull=hum, note_lull=lulls.append)
    turns = SpokenTurns(conversation, lambda: 0.0)
    turns.current = _Speech("turn_1", "req_1", request)
    turns.lulls(hum)
    turns.sounds(320, clear=True)
    assert lulls == [hum]
    turns.sounds(352, clear=True)
    assert lulls == [hum, None]

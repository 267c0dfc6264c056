"""The transcripts of a Live session: nothing that was told is taken back, or told again."""

from __future__ import annotations

import pytest

from omni_ws.transport.realtime.live_transcripts import HeardText


@pytest.mark.parametrize(
    ("interims", "told"),
    [
        (["go forward"], ["", "go forward ten"]),
        (["go forward", "ten"], ["", "", "go forward ten"]),
        (["go", "go forward", "go forward ten"], ["", "", "go", " forward ten"]),
        (["go forward now", "go forward now", "go back"], ["", "go forward", "", " ten"]),
    ],
)
def test_only_words_that_two_interim_texts_agree_on_are_told(interims: list[str], told: list[str]) -> None:
    heard = HeardText()
    deltas = [heard.hear(text, interim=True) for text in interims]
    assert [*deltas, heard.hear("go forward ten", interim=False)] == told

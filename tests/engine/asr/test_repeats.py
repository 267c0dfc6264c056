"""Words that Whisper wrote down twice, with the times that tiny.en gave them, and words that were said twice."""

from __future__ import annotations

import pytest

from omni_ws.core.chunks import Word
from omni_ws.engine.asr.whisper import (
    copied_at_end,
    without_repeats,
)


def scored(text: str, times: list[int]) -> list[Word]:
    """Words that begin at ``times``, each until the next begins; the last of ``times`` is the end."""
    words = text.split()
    return [Word(word, times[at], times[at + 1]) for at, word in enumerate(words)]


@pytest.mark.parametrize(
    ("text", "times", "said"),
    [
        ("Location Location Location Location", [0, 700, 700, 1180, 1180], 1),
        ("Login incorrect. Login incorrect.", [0, 620, 1100, 1100, 1440], 2),
        # The last copy is cut short.
        ("Press 4. Press 4. Press", [0, 300, 600, 600, 900, 900], 2),
        ("Go home. Press 4. press 4", [0, 300, 600, 900, 1200, 1200, 1200], 4),
        # Its end was read again, and then the end of that.
        ("Press 7. Press 8. Press 7. Press 8. Press 8.", [0, 300, 600, 900, *[1200] * 7], 4),
        # Said twice: it takes time.
        ("No no no no", [0, 200, 400, 600, 800], 4),
        ("Knock, knock.", [0, 300, 600], 2),
        # The same, but not at the end.
        ("Bye bye, Sam", [0, 300, 300, 600], 3),
        ("Press 4 now", [0, 0, 0, 600], 3),
        ("Stop.", [0, 0], 1),
        ("", [0], 0),
    ],
)
def test_copies_that_take_no_time_were_not_said(text: str, times: list[int], said: int) -> None:
    words = scored(text, times)
    assert without_repeats(words) == words[:said]


@pytest.mark.parametrize(
    ("text", "copied"),
    [
        ("10 of clubs 10 of clubs 10 of", 5),
        ("Location. location", 1),
        ("no no yes", 0),
        ("10 of clubs 10 of", 0),
        ("", 0),
    ],
)
def test_copies_are_counted_whole_or_cut_short(text: str, copied: int) -> None:
    assert copied_at_end(text.split()) == copied

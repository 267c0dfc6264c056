"""What Whisper writes down twice though it was said once: told by the words' times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omni_ws.engine.asr.whisper_model import ScoredWord


def without_repeats(words: Sequence[ScoredWord]) -> Sequence[ScoredWord]:
    """Return the words without the copies at their end that take no time.

    Short audio the model sometimes reads again ("Location. Location."), or its end, and then the end of that: copies
    are removed until none is left. The alignment has no audio left for such words: half of them or more begin and end
    at one moment. What a person says twice takes time, and stays.
    """
    while copied := copied_at_end([word.text for word in words]):
        untimed = sum(word.start_ms == word.end_ms for word in words[len(words) - copied :])
        if 2 * untimed < copied:
            break
        words = words[:-copied]
    return words


def copied_at_end(words: Sequence[str]) -> int:
    """Return how many words at the end repeat those before, whole or cut short; case and punctuation aside.

    Time is at most square in the number of words, of which half a minute has some hundred.
    """
    texts = ["".join(filter(str.isalnum, word)).lower() for word in words]
    for period in range(1, len(texts) // 2 + 1):
        copied = 0
        while copied < len(texts) - period and texts[-1 - copied] == texts[-1 - copied - period]:
            copied += 1
        if copied >= period:
            return copied
    return 0

"""What Whisper writes down twice though it was said once: told by the words' times."""

from __future__ import annotations

from collections.abc import Sequence

from omni_ws.engine.asr.whisper_model import ScoredWord


def without_repeats(words: Sequence[ScoredWord]) -> Sequence[ScoredWord]:
    """Return the words without the copies at their end that take no time.

    Short audio the model sometimes reads again ("Location. Location."). The alignment has no audio left for such words:
    half of them or more begin and end at one moment. What a person says twice takes time, and stays. Time is at most
    square in the number of words, of which half a minute has some hundred.
    """
    texts = ["".join(filter(str.isalnum, word.text)).lower() for word in words]
    for period in range(1, len(words) // 2 + 1):
        copied = 0
        while copied < len(words) - period and texts[-1 - copied] == texts[-1 - copied - period]:
            copied += 1
        if copied >= period:
            copies = words[-copied:]
            if 2 * sum(word.start_ms == word.end_ms for word in copies) >= copied:
                return words[:-copied]
            return words
    return words

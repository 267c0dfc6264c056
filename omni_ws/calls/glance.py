"""What a list of calls says of each beside its first line: the first words, and the number of turns.

The whole file is looked through, but only the few lines that tell are decoded: sound takes most of it.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple

from omni_ws.calls.lines import parsed_text, raw_lines
from omni_ws.wire.recording import ReceivedLine, SentLine, ToldLine, decode_event

#: Characters of the first words that are kept, and calls that are remembered.
MAX_LETTERS: Final = 160
_REMEMBERED: Final = 2048
#: What lines have that tell of a turn, of what was said, and of what was typed: frames are JSON within JSON.
_TURN: Final = b'\\"response_started\\"'
_SAID: Final = b'\\"transcript\\"'
_TYPED: Final = (b'\\"input_chunk\\"', b'\\"text\\"')


class Glance(NamedTuple):
    """The first words of the user, None without any, and the number of turns."""

    first_words: str | None
    turns: int


@lru_cache(maxsize=_REMEMBERED)
def glance(path: Path, size: int) -> Glance:
    """Look through the first ``size`` bytes of a recording. Blocks; a file that is gone has no words and no turns."""
    words, turns, read = None, 0, 0
    try:
        with path.open("rb", buffering=1 << 20) as file:
            for line in raw_lines(file):
                read += len(line)
                if read > size:
                    break
                turns += _TURN in line
                if words is None and (_SAID in line or all(part in line for part in _TYPED)):
                    words = _words(line)
    except OSError:
        return Glance(None, 0)
    return Glance(words, turns)


def _words(line: bytes) -> str | None:
    try:
        event = decode_event(line)
    except ValueError:
        return None
    if not isinstance(event, ReceivedLine | SentLine | ToldLine) or event.text is None:
        return None
    frame = parsed_text(event.text)
    said, typed = frame.get("modality") == "transcript", frame.get("type") == "input_chunk"
    text = frame.get("text")
    if not (said or typed) or frame.get("interim") or not isinstance(text, str) or not text.strip():
        return None
    return text.strip()[:MAX_LETTERS]

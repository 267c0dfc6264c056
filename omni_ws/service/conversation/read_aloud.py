"""Which pieces of a text voices read: the measure by which a text is shared out over its sound."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from omni_ws.core.heard_text import SpokenSpan, read_all
from omni_ws.engine.spoken.speakable_text import spoken_form

#: A longer text is measured by its own length: to find out what is read of it would take too long.
MAX_MEASURED_CHARACTERS: Final = 1 << 15


def read_aloud(text: str) -> Sequence[SpokenSpan]:
    """The pieces of a text that a voice reads. Code and addresses take no time."""
    if len(text) > MAX_MEASURED_CHARACTERS:
        return read_all(text)
    return [SpokenSpan(piece.start, piece.end, len(piece.text)) for piece in spoken_form(text, language="")]

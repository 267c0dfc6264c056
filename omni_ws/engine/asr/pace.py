"""AudioPace: whether the audio of a request comes as it is spoken, or faster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

#: Audio that is so many milliseconds ahead of the clock comes from a file. More than the jitter of a network, less than
#: it takes to have a first interim text.
AHEAD_MS: Final = 700

#: So much audio at once, in milliseconds, has waited somewhere, if only for an overloaded machine: no time for interim
#: texts.
BACKLOG_MS: Final = 1500


class AudioPace:
    """Compares the length of the audio with the clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lead_ms = 0.0
        self._fed_at = clock()

    def is_live(self, audio_ms: float) -> bool:
        """Whether the audio, ``audio_ms`` more of it included, comes as it is spoken and is dealt with in time."""
        now = self._clock()
        self._lead_ms = max(0.0, self._lead_ms - (now - self._fed_at) * 1000 + audio_ms)
        self._fed_at = now
        return self._lead_ms < AHEAD_MS and audio_ms < BACKLOG_MS

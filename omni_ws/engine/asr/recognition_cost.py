"""RecognitionCost: what recognition takes on this machine, and how many talkers that leaves room for."""

from __future__ import annotations

import threading
from typing import Final

#: The interim texts of a talker come at most and at least so far apart, in seconds.
SHORTEST_GAP_SEC: Final = 0.5
LONGEST_GAP_SEC: Final = 1.5
#: The part of its time that a request's interim texts may keep a worker busy, waiting for one included.
_INTERIM_SHARE: Final = 0.3
#: How often an utterance is settled on average: at its end, and at pauses before that turned out not to be the end.
_SETTLED_TIMES: Final = 1.5
#: The part of the workers' time that talkers may take.
_BUSY: Final = 0.9
#: How much of what was measured counts after each further measurement.
_KEPT: Final = 0.9


class RecognitionCost:
    """Learns from the work itself, over about ten utterances. Thread-safe.

    A machine that is busy with other things takes longer, and carries fewer.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._lock = threading.Lock()
        self._settled_sec = 0.0
        self._settled_audio_sec = 0.0
        self._interim_sec = 0.0
        self._interims = 0.0

    def note_settled(self, took_sec: float, audio_sec: float) -> None:
        """A settled text of so much audio took so long."""
        with self._lock:
            self._settled_sec = _KEPT * self._settled_sec + took_sec
            self._settled_audio_sec = _KEPT * self._settled_audio_sec + audio_sec

    def note_interim(self, took_sec: float) -> None:
        """An interim text took so long."""
        with self._lock:
            self._interim_sec = _KEPT * self._interim_sec + took_sec
            self._interims = _KEPT * self._interims + 1

    def talkers(self, interims: bool = True) -> int:
        """How many may talk without a pause; one for each worker at least.

        With ``interims``, each has interim texts at the longest gap.

        As many as workers before anything was measured.
        """
        with self._lock:
            settled = self._settled_sec / self._settled_audio_sec if self._settled_audio_sec else 0.0
            interim = self._interim_sec / self._interims if interims and self._interims else 0.0
        share = _SETTLED_TIMES * settled + interim / LONGEST_GAP_SEC
        return max(self._workers, int(_BUSY * self._workers / share)) if share else self._workers


def interim_gap_sec(took_sec: float) -> float:
    """How long after an interim text the next one may come, if that took so long, with its time in the queue."""
    return min(max(SHORTEST_GAP_SEC, took_sec / _INTERIM_SHARE), LONGEST_GAP_SEC)

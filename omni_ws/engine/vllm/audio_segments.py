"""AudioSegmenter: cuts speech in progress into segments that a model can process before the speech ends.

The cuts depend on the samples alone, not on how they arrive: a recording sent at once is cut like the same audio spoken
live, so that both get the same answer. Models of the Whisper family silently drop audio beyond 30 seconds; no segment
is longer.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from omni_ws.audio.samples import Samples

FRAME_MS: Final = 20
#: The maximum length of a segment.
LONGEST_MS: Final = 30_000
#: A pause has at least this length …
PAUSE_MS: Final = 300
#: … and its amplitude (RMS) is at most this fraction, -30 dB, of the loudest frame's in the segment.
PAUSE_RATIO: Final = 10 ** (-30 / 20)


class AudioSegmenter:
    """Cuts one part of the input: mono samples at ``sample_rate`` Hz.

    A segment ends in the middle of the first pause after ``shortest_ms``, or without one after ``longest_ms``.
    """

    def __init__(self, sample_rate: int, *, shortest_ms: int, longest_ms: int) -> None:
        self._frame = sample_rate * FRAME_MS // 1000
        self._shortest = max(shortest_ms, PAUSE_MS) // FRAME_MS
        self._longest = max(longest_ms // FRAME_MS, self._shortest + 1)
        self._pause = PAUSE_MS // FRAME_MS
        self._blocks: list[Samples] = []
        #: Samples that do not fill a frame yet.
        self._rest: Samples = np.zeros(0, np.float32)
        self._frames = 0
        self._loudest = 0.0
        self._quiet_frames = 0

    def feed(self, samples: Samples) -> list[Samples]:
        """Return the segments that ``samples`` complete."""
        samples = np.concatenate([self._rest, samples]) if len(self._rest) else samples
        count = len(samples) // self._frame
        frames = samples[: count * self._frame].reshape(count, self._frame)
        self._rest = samples[count * self._frame :].copy()
        closed: list[Samples] = []
        begin = 0
        for index, level in enumerate(np.sqrt(np.mean(frames * frames, axis=1, dtype=np.float64)).tolist()):
            self._measure(level)
            cut = self._cut()
            if cut is None:
                continue
            self._blocks.append(frames[begin : index + 1].reshape(-1))
            segment = np.concatenate(self._blocks)
            kept = len(segment) - cut * self._frame
            closed.append(segment[:kept].copy())
            self._restart(segment[kept:])
            begin = index + 1
        if begin < count:
            self._blocks.append(frames[begin:].reshape(-1).copy())
        return closed

    def finish(self) -> Samples | None:
        """End the part; returns its last segment, or None."""
        segment = np.concatenate([*self._blocks, self._rest])
        self._rest = np.zeros(0, np.float32)
        self._restart(self._rest)
        return segment if len(segment) else None

    def _measure(self, level: float) -> None:
        self._frames += 1
        self._loudest = max(self._loudest, level)
        self._quiet_frames = self._quiet_frames + 1 if level <= self._loudest * PAUSE_RATIO else 0

    def _cut(self) -> int | None:
        """Return None, or, if the segment ends here, how many of its last frames belong to the next one."""
        if self._frames >= self._longest:
            return 0
        # Leading digital silence is not a pause: nothing has been said yet.
        if self._frames >= self._shortest and self._quiet_frames >= self._pause and self._loudest > 0:
            return self._pause // 2
        return None

    def _restart(self, begun: Samples) -> None:
        self._blocks = [begun] if len(begun) else []
        self._frames = self._quiet_frames = len(begun) // self._frame
        self._loudest = 0.0

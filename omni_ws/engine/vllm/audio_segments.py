"""Cuts speech that is still going on into segments that a model can hear already.

The cuts depend on the samples alone, not on how they arrive: a recording that is sent at once is cut like the same
recording that is spoken live, so that both get the same answer. Models of the Whisper family hear 30 seconds at most
and drop the rest silently; nothing is longer here.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from omni_ws.audio.samples import Samples

FRAME_MS: Final = 20
#: No segment is longer.
LONGEST_MS: Final = 30_000
#: A pause is this long …
PAUSE_MS: Final = 300
#: … and this much weaker than the segment's loudest frame (30 dB).
PAUSE_RATIO: Final = 10 ** (-30 / 20)


class AudioSegmenter:
    """Segments of one part of the input. ``feed`` returns those that are closed: at the middle of the first pause after
    ``shortest_ms``, or after ``longest_ms`` where nobody pauses.
    """

    def __init__(self, sample_rate: int, *, shortest_ms: int, longest_ms: int) -> None:
        self._frame = sample_rate * FRAME_MS // 1000
        self._shortest = max(shortest_ms, PAUSE_MS) // FRAME_MS
        self._longest = max(longest_ms // FRAME_MS, self._shortest + 1)
        self._pause = PAUSE_MS // FRAME_MS
        self._blocks: list[Samples] = []
        #: Samples that are no whole frame yet.
        self._rest: Samples = np.zeros(0, np.float32)
        self._frames = 0
        self._loudest = 0.0
        self._quiet_frames = 0

    def feed(self, samples: Samples) -> list[Samples]:
        samples = np.concatenate([self._rest, samples]) if len(self._rest) else samples
        count = len(samples) // self._frame
        frames = samples[: count * self._frame].reshape(count, self._frame)
        self._rest = samples[count * self._frame :].copy()
        closed: list[Samples] = []
        begin = 0
        for index, level in enumerate(np.sqrt(np.mean(frames * frames, axis=1, dtype=np.float64)).tolist()):
            self._hear(level)
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
        """What is left at the end of the part, if anything."""
        segment = np.concatenate([*self._blocks, self._rest])
        self._rest = np.zeros(0, np.float32)
        self._restart(self._rest)
        return segment if len(segment) else None

    def _hear(self, level: float) -> None:
        self._frames += 1
        self._loudest = max(self._loudest, level)
        self._quiet_frames = self._quiet_frames + 1 if level <= self._loudest * PAUSE_RATIO else 0

    def _cut(self) -> int | None:
        """Frames that belong to the next segment already, when this one is closed."""
        if self._frames >= self._longest:
            return 0
        # A part that begins with silence has not been spoken in yet.
        if self._frames >= self._shortest and self._quiet_frames >= self._pause and self._loudest > 0:
            return self._pause // 2
        return None

    def _restart(self, begun: Samples) -> None:
        self._blocks = [begun] if len(begun) else []
        self._frames = self._quiet_frames = len(begun) // self._frame
        self._loudest = 0.0

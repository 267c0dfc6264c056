"""Buffer between the event loop, where audio arrives in bursts, and a sound device, which reads it evenly."""

from __future__ import annotations

import threading
from collections import deque


class PlaybackBuffer:
    """Bytes of raw samples. Call ``read`` from the thread of the sound device, everything else on the loop.

    Playback starts once ``prefill_bytes`` are buffered or the answer has ended, which hides gaps between the first
    chunks. Where a read finds less than it wants, an underrun unless the answer has ended, the buffer fills up again
    first.
    """

    def __init__(self, *, prefill_bytes: int, silence: bytes = b"\0") -> None:
        self.prefill_bytes = prefill_bytes
        #: Bytes of audio read since ``clear``.
        self.played_bytes = 0
        #: Underruns within answers.
        self.underruns = 0
        self._silence = silence
        self._chunks: deque[memoryview] = deque()
        self._buffered = 0
        self._filling = True
        self._ended = True
        self._lock = threading.Lock()

    @property
    def buffered_bytes(self) -> int:
        return self._buffered

    @property
    def idle(self) -> bool:
        """Whether all audio has been read, and no more is expected."""
        return self._buffered == 0 and self._ended

    def write(self, audio: bytes) -> None:
        """Appends audio."""
        with self._lock:
            if audio:
                self._chunks.append(memoryview(audio))
                self._buffered += len(audio)
                self._ended = False

    def end(self) -> None:
        """Marks the end of an answer: what is buffered is played without waiting for more."""
        with self._lock:
            self._ended = True

    def clear(self) -> None:
        """Drops everything that is buffered, for a barge-in."""
        with self._lock:
            self._chunks.clear()
            self._buffered = self.played_bytes = 0
            self._filling = self._ended = True

    def read(self, size: int) -> bytes:
        """Returns exactly ``size`` bytes, padded with silence. Blocks no longer than a copy takes."""
        with self._lock:
            if self._filling and self._buffered and (self._ended or self._buffered >= self.prefill_bytes):
                self._filling = False
            audio = b"" if self._filling else self._take(size)
            if len(audio) < size and not self._filling:
                self._filling = True
                self.underruns += not self._ended
        return audio + self._silence * (size - len(audio))

    def _take(self, size: int) -> bytes:
        taken: list[memoryview] = []
        wanted = size
        while wanted and self._chunks:
            chunk = self._chunks.popleft()
            if len(chunk) > wanted:
                self._chunks.appendleft(chunk[wanted:])
                chunk = chunk[:wanted]
            taken.append(chunk)
            wanted -= len(chunk)
        self._buffered -= size - wanted
        self.played_bytes += size - wanted
        return b"".join(taken)

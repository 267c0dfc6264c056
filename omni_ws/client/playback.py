"""PlaybackBuffer: audio between the event loop, which gets it in bursts, and a sound card, which wants it evenly."""

from __future__ import annotations

import threading
from collections import deque


class PlaybackBuffer:
    """Bytes of bare samples. ``write`` and the rest are called on the loop, ``read`` from the sound card's thread.

    Playing starts when ``prefill_bytes`` are there, or the end is, so that the gaps between the first chunks are not
    heard; once the buffer has run dry it fills up again before it goes on.
    """

    def __init__(self, *, prefill_bytes: int, silence: bytes = b"\0") -> None:
        self.prefill_bytes = prefill_bytes
        #: Bytes that were played since ``clear``.
        self.played_bytes = 0
        #: How often the sound card wanted more than there was, in the middle of an answer.
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
        """Whether everything there was has been handed over, and no more is expected."""
        return self._buffered == 0 and self._ended

    def write(self, audio: bytes) -> None:
        with self._lock:
            if audio:
                self._chunks.append(memoryview(audio))
                self._buffered += len(audio)
                self._ended = False

    def end(self) -> None:
        """No more comes of this answer: what is there is played, however little it is."""
        with self._lock:
            self._ended = True

    def clear(self) -> None:
        """Silence, now: the listener has begun to speak."""
        with self._lock:
            self._chunks.clear()
            self._buffered = self.played_bytes = 0
            self._filling = self._ended = True

    def read(self, size: int) -> bytes:
        """Exactly this much, silence where there is nothing. Does not block for longer than a copy takes."""
        with self._lock:
            if self._filling and self._buffered and (self._ended or self._buffered >= self.prefill_bytes):
                self._filling = False
            audio = b"" if self._filling else self._take(size)
            if not self._buffered and not self._filling:
                self._filling = True
                self.underruns += not self._ended and len(audio) < size
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

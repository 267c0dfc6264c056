"""AudioRing: the latest audio of a stream, buffered until turn detection assigns it to a turn."""

from __future__ import annotations

from collections import deque

from msgspec.structs import replace

from omni_ws.core.chunks import SAMPLE_BYTES, AudioFormat, InputChunk


class AudioRing:
    """A queue of raw audio that can be cut at any sample, regardless of chunk boundaries.

    Times are milliseconds on the stream's time line; ``start_ms`` is the time of the first sample. ``audio`` must be a
    raw format. A cut is rounded down to a whole frame (one sample of each channel).
    """

    def __init__(self, audio: AudioFormat, *, start_ms: float = 0) -> None:
        self.audio = audio
        self._start_ms = start_ms
        self._frame_bytes = SAMPLE_BYTES[audio.encoding] * audio.channels
        self._pieces: deque[InputChunk] = deque()
        #: The stream offsets, in bytes, of the first byte held and of the byte after the last.
        self._begin = 0
        self._end = 0
        #: How many of the next bytes are dropped as they arrive: the rest of a frame whose beginning was dropped.
        self._dropped = 0

    @property
    def held_bytes(self) -> int:
        return self._end - self._begin

    @property
    def chunks(self) -> list[InputChunk]:
        """All audio that is buffered."""
        return list(self._pieces)

    def append(self, chunk: InputChunk) -> int:
        """Add ``chunk`` at the end of the stream. Return how many of its bytes were dropped (see ``drop``)."""
        dropped = min(self._dropped, len(chunk.payload))
        if dropped:
            self._dropped -= dropped
            self._begin += dropped
            self._end += dropped
            chunk = replace(chunk, payload=chunk.payload[dropped:])
        if chunk.payload:
            self._pieces.append(chunk)
            self._end += len(chunk.payload)
        return dropped

    def cut(self) -> int:
        """Discard an incomplete frame at the end, so that the next chunk begins a whole one. Return its size."""
        incomplete = self._end % self._frame_bytes
        removed = 0
        while self._pieces and removed < incomplete:
            last = self._pieces.pop()
            kept = last.payload[: max(0, len(last.payload) - (incomplete - removed))]
            removed += len(last.payload) - len(kept)
            if kept:
                self._pieces.append(replace(last, payload=kept))
        self._end -= incomplete
        self._begin = min(self._begin, self._end)
        self._dropped = 0
        return removed

    def drop(self) -> int:
        """Discard all audio; also, as it arrives, the rest of a frame that is incomplete now.

        Returns the number of bytes that were discarded now.
        """
        size = self.forget()
        self._dropped = -self._end % self._frame_bytes
        return size

    def take(self, until_ms: float | None = None) -> list[InputChunk]:
        """Remove and return the audio before ``until_ms``, or all of it if that is None.

        The two parts of a chunk that is cut keep its fields, but the second gets a later ``timestamp_ms`` and no
        ``ref``: the first has named the request already.
        """
        taken = self._remove(until_ms)
        rest = self._pieces[0] if taken and self._pieces else None
        if rest is not None and rest.ref is not None and rest.sequence_id == taken[-1].sequence_id:
            self._pieces[0] = replace(rest, ref=None)
        return taken

    def _remove(self, until_ms: float | None) -> list[InputChunk]:
        until = self._end if until_ms is None else min(self._end, self._offset(until_ms))
        taken: list[InputChunk] = []
        while self._pieces and self._begin < until:
            piece = self._pieces.popleft()
            wanted = until - self._begin
            if len(piece.payload) > wanted:
                piece, rest = self._cut(piece, wanted)
                self._pieces.appendleft(rest)
            taken.append(piece)
            self._begin += len(piece.payload)
        return taken

    def forget(self, until_ms: float | None = None) -> int:
        """Discard the audio before ``until_ms``, or all of it if that is None; return its size in bytes."""
        return sum(len(piece.payload) for piece in self._remove(until_ms))

    def _offset(self, time_ms: float) -> int:
        frames = int(max(0.0, time_ms - self._start_ms) * self.audio.sample_rate / 1000)
        return frames * self._frame_bytes

    def _cut(self, piece: InputChunk, size: int) -> tuple[InputChunk, InputChunk]:
        later = piece.timestamp_ms
        if later is not None:
            later += round(self.audio.duration_ms(size))
        return replace(piece, payload=piece.payload[:size]), replace(
            piece, payload=piece.payload[size:], timestamp_ms=later
        )

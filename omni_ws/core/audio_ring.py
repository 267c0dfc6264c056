"""AudioRing: the newest audio of a stream, held until it is known whether it belongs to a turn."""

from __future__ import annotations

from collections import deque

from msgspec.structs import replace

from omni_ws.core.audio_format import SAMPLE_BYTES, AudioFormat
from omni_ws.core.chunks import InputChunk


class AudioRing:
    """Chunks of bare samples, one stream whatever their borders are, that can be cut at any sample.

    ``start_ms`` is where the stream begins; all times are on its time line.
    """

    def __init__(self, audio: AudioFormat, *, start_ms: float = 0) -> None:
        self.audio = audio
        self._start_ms = start_ms
        self._frame_bytes = SAMPLE_BYTES[audio.encoding] * audio.channels
        self._pieces: deque[InputChunk] = deque()
        #: Bytes of the stream before what is held, and with it.
        self._begin = 0
        self._end = 0

    @property
    def held_bytes(self) -> int:
        return self._end - self._begin

    def append(self, chunk: InputChunk) -> None:
        if chunk.payload:
            self._pieces.append(chunk)
            self._end += len(chunk.payload)

    def take(self, until_ms: float | None = None) -> list[InputChunk]:
        """Hand over what is held of the time before ``until_ms``; None for everything."""
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
        """Drop what is held of the time before ``until_ms``; returns how many bytes that were."""
        return sum(len(piece.payload) for piece in self.take(until_ms))

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

"""InputAccumulator: the input of a request that has not started, and the totals that start policies test."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from omni_ws.core.audio_format import AudioFormat
from omni_ws.core.chunks import InputChunk, Modality
from omni_ws.core.start_policy import InputSummary

#: Nearly all chunks are audio; a module global is faster to look up than an enum member.
_AUDIO: Final = Modality.AUDIO
#: The bytes that never begin a UTF-8 character: deleting them leaves one byte a character.
_CONTINUATION_BYTES: Final = bytes(range(0x80, 0xC0))


class Alignment(StrEnum):
    """How buffered chunks of different modalities are ordered: by sequence number or by ``timestamp_ms``."""

    ARRIVAL = "arrival"
    TIMESTAMP = "timestamp"


class InputAccumulator:
    """Buffers the chunks of one request in sequence order and keeps their totals in ``summary``.

    A *part* is a run of consecutive chunks of one modality. ``audio`` is the format by which bytes of audio are
    converted to milliseconds; for compressed audio these are nominal (``AudioFormat.bytes_per_second``).
    """

    def __init__(self, *, audio: AudioFormat, alignment: Alignment = Alignment.ARRIVAL) -> None:
        self.summary = InputSummary()
        self._bytes_per_ms = audio.bytes_per_second / 1000
        self._alignment = alignment
        self._chunks: list[InputChunk] = []

    def append(self, chunk: InputChunk, *, keep: bool = True) -> None:
        """Add ``chunk`` to the summary and, with ``keep``, to the buffer; a chunk without content is ignored."""
        size = len(chunk.payload)
        if not size and not chunk.has_content:
            return
        summary = self.summary
        summary.chunks += 1
        summary.bytes += size
        if keep:
            self._chunks.append(chunk)
        modality = chunk.modality
        if modality is not summary.open_part:
            self._open_part(modality)
        if modality is _AUDIO:
            duration = size / self._bytes_per_ms
            summary.audio_ms += duration
            summary.open_part_audio_ms += duration
            return
        match modality:
            case Modality.TEXT:
                summary.text_chars += len(chunk.payload.translate(None, _CONTINUATION_BYTES))
                summary.tool_results += chunk.tool_call_id is not None
            case Modality.IMAGE:
                summary.images += 1
            case Modality.VIDEO:  # pragma: no branch
                summary.video_chunks += 1

    def take(self) -> tuple[InputChunk, ...]:
        """Return the buffered chunks in the order of the alignment, and empty the buffer. The summary stays."""
        chunks, self._chunks = self._chunks, []
        if self._alignment is Alignment.TIMESTAMP:
            return by_timestamp(chunks)
        return tuple(chunks)

    def _open_part(self, modality: Modality) -> None:
        if self.summary.open_part is not None:
            self.summary.closed_parts.add(self.summary.open_part)
        self.summary.open_part = modality
        self.summary.open_part_audio_ms = 0


def by_timestamp(chunks: list[InputChunk]) -> tuple[InputChunk, ...]:
    """Return ``chunks`` sorted by ``timestamp_ms``.

    The sort is stable. A chunk without a timestamp sorts as if it had that of the chunk before it, or 0.
    """
    latest = 0
    keyed: list[tuple[int, InputChunk]] = []
    for chunk in chunks:
        if chunk.timestamp_ms is not None:
            latest = chunk.timestamp_ms
        keyed.append((latest, chunk))
    return tuple(chunk for _, chunk in sorted(keyed, key=lambda pair: pair[0]))

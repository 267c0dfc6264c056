"""Holds the input of one request until the engine takes it over."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from omni_ws.core.audio_format import AudioFormat
from omni_ws.core.chunks import InputChunk, Modality
from omni_ws.core.start_policy import InputSummary

#: A name of the module is found faster than a member of an enum, and nearly all chunks are audio.
_AUDIO: Final = Modality.AUDIO
#: Every byte of UTF-8 that does not begin a character.
_CONTINUATION_BYTES: Final = bytes(range(0x80, 0xC0))


class Alignment(StrEnum):
    """The order in which parts of different modalities reach the engine."""

    ARRIVAL = "arrival"
    TIMESTAMP = "timestamp"


class InputAccumulator:
    """Chunks in sequence order, with the running summary that start policies look at.

    A *part* is a run of chunks of one modality. ``audio`` is the format that lengths of audio are computed with.
    """

    def __init__(self, *, audio: AudioFormat, alignment: Alignment = Alignment.ARRIVAL) -> None:
        self.summary = InputSummary()
        self._bytes_per_ms = audio.bytes_per_second / 1000
        self._alignment = alignment
        self._chunks: list[InputChunk] = []

    def append(self, chunk: InputChunk, *, keep: bool = True) -> None:
        """Without ``keep`` a chunk is only noted in the summary."""
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
            case Modality.IMAGE:
                summary.images += 1
            case Modality.VIDEO:  # pragma: no branch
                summary.video_chunks += 1

    def take(self) -> tuple[InputChunk, ...]:
        """Hand over everything that is held, in the order of the alignment."""
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
    """Stable order by ``timestamp_ms``; a chunk without one stays behind the chunk that it followed."""
    latest = 0
    keyed: list[tuple[int, InputChunk]] = []
    for chunk in chunks:
        if chunk.timestamp_ms is not None:
            latest = chunk.timestamp_ms
        keyed.append((latest, chunk))
    return tuple(chunk for _, chunk in sorted(keyed, key=lambda pair: pair[0]))

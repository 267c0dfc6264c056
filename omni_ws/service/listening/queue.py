"""ListeningQueue: ordered input that waits for turn detection."""

from __future__ import annotations

import asyncio
import enum
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from msgspec.structs import replace

from omni_ws.audio.container import parse_audio_format
from omni_ws.core.chunks import AudioFormat, InputChunk, Modality
from omni_ws.service.listening.workers import ROUND_SEC, SpeechWorkers
from omni_ws.wire.session_config import TurnDetectionConfig

_AUDIO: Final = Modality.AUDIO  # compared for every chunk: found faster than a member of an enum

#: Charged for an item besides its payload.
ITEM_OVERHEAD_BYTES: Final = 128
#: Input that has waited less than this when a round begins joins the next round, which finds more audio to process.
MIN_WAIT_SEC: Final = ROUND_SEC / 2

#: A longer chunk is cut, so that no session occupies a thread for long.
MAX_PIECE_BYTES: Final = 64 * 1024


class Mark(enum.Enum):
    CANCEL = "the input before this mark is cancelled"


@dataclass(frozen=True, slots=True)
class ListeningSettings:
    """How to detect turns, and the default format of the audio. ``turns`` is None while turn detection is off."""

    turns: TurnDetectionConfig | None
    audio: AudioFormat


#: Input, settings that apply from here on, a mark, or None for an end of input without a chunk.
Item: TypeAlias = InputChunk | ListeningSettings | Mark | None


@dataclass(frozen=True, slots=True)
class AudioPiece:
    """Consecutive audio of one format, and with one name of the client for its request, to be judged at once."""

    source: AudioFormat
    payload: bytes
    first: InputChunk
    last: InputChunk
    #: Where chunks of the client begin in it, and their numbers.
    borders: tuple[int, ...]
    numbers: tuple[int | None, ...]

    def number_at(self, position: int) -> int | None:
        """The number of the chunk that the byte at this position came with."""
        behind = bisect_right(self.borders, position)
        return self.numbers[behind - 1] if behind else self.first.sequence_id

    def as_chunk(self) -> InputChunk:
        """One chunk with the number of the last, with which all of it has arrived, and the time of the first."""
        first = self.first
        return replace(
            self.last, payload=self.payload, timestamp_ms=first.timestamp_ms, format=first.format, end_of_input=False
        )


class ListeningQueue:
    """Holds input in order and counts its bytes and its milliseconds of audio.

    A session that stops sending in the middle of a window must not wait forever: the queue joins the rounds of
    ``workers`` while it holds audio. When a round finds that the oldest item has waited for ``MIN_WAIT_SEC``, it sets
    ``overdue`` and calls ``on_overdue``.
    """

    def __init__(self, workers: SpeechWorkers, on_overdue: Callable[[], None]) -> None:
        self._workers = workers
        self._on_overdue = on_overdue
        #: Whether the first item has waited long enough to be processed, however little audio there is.
        self.overdue = False
        #: On the loop's clock.
        self._waiting_since = 0.0
        self._in_round = False
        #: The format of chunks that name none. The length of all audio is computed in it.
        self.audio = AudioFormat()
        #: Payloads and overhead of all items.
        self.waiting_bytes = 0
        #: Length of all audio.
        self.waiting_ms = 0.0
        #: Items that make the audio before them urgent: anything but audio, and audio that ends the input.
        self.urgent = 0
        self._items: deque[Item] = deque()

    def __len__(self) -> int:
        return len(self._items)

    @property
    def audio_is_next(self) -> bool:
        return bool(self._items) and _is_audio(self._items[0])

    def ends_file(self, source: AudioFormat | None) -> bool:
        """Whether the next item ends a stream of ``source``: an end of the input, or audio of another format."""
        if not self._items:
            return False
        item = self._items[0]
        if not isinstance(item, InputChunk):
            return item is None
        return self._source_of(item) != source if item.modality is _AUDIO else item.end_of_input

    def put(self, item: Item) -> None:
        """Append an item. An audio chunk of more than ``MAX_PIECE_BYTES`` becomes several."""
        if not isinstance(item, InputChunk) or len(item.payload) <= MAX_PIECE_BYTES or not _is_audio(item):
            self._append(item)
            return
        payload = item.payload
        for end in range(MAX_PIECE_BYTES, len(payload), MAX_PIECE_BYTES):
            piece, begins = payload[end - MAX_PIECE_BYTES : end], end == MAX_PIECE_BYTES
            self._append(replace(item, payload=piece, end_of_input=False, continues=item.continues or not begins))
        self._append(replace(item, payload=payload[end:], continues=True))

    def _append(self, item: Item) -> None:
        if not self._items:
            self._waiting_since = asyncio.get_running_loop().time()
        self._items.append(item)
        self._count(item, 1)
        if self.waiting_ms and not self._in_round:
            self._join_round()

    def take(self) -> Item:
        """Remove the next item and return it. Raises IndexError where the queue is empty."""
        item = self._items.popleft()
        self.overdue = False
        self._count(item, -1)
        if not self._items:
            self.waiting_ms = 0.0  # items counted before ``audio`` changed leave a difference
        return item

    def take_piece(self) -> AudioPiece:
        """Remove the audio at the head of the queue and return it.

        A piece is of one format, ends with a chunk that ends the input, and has less than twice ``MAX_PIECE_BYTES``.
        """
        first = self._items[0]
        assert isinstance(first, InputChunk)
        source = self._source_of(first)
        chunks: list[InputChunk] = []
        borders: list[int] = []
        numbers: list[int | None] = []
        size = 0
        while self._items and size < MAX_PIECE_BYTES:
            chunk = self._items[0]
            if not isinstance(chunk, InputChunk) or chunk.modality is not _AUDIO:
                break
            if chunk.format != first.format and self._source_of(chunk) != source:
                break
            if chunk.ref != first.ref:
                break
            self.take()
            chunks.append(chunk)
            if not chunk.continues:
                borders.append(size)
                numbers.append(chunk.sequence_id)
            size += len(chunk.payload)
            if chunk.end_of_input:
                break
        payload = first.payload if len(chunks) == 1 else b"".join(chunk.payload for chunk in chunks)
        return AudioPiece(source, payload, first, chunks[-1], tuple(borders), tuple(numbers))

    def _source_of(self, chunk: InputChunk) -> AudioFormat:
        return self.audio if chunk.format is None else parse_audio_format(chunk.format, self.audio)

    def withdraw(self) -> int:
        """Remove all input that is not audio, and return the bytes of its payloads."""
        items, size = [self.take() for _ in range(len(self))], 0
        for item in items:
            if item is None or (isinstance(item, InputChunk) and not _is_audio(item)):
                size += 0 if item is None else len(item.payload)
            else:
                self.put(item)
        return size

    def clear(self) -> None:
        while self._items:
            self.take()

    def _join_round(self) -> None:
        self._in_round = True
        self._workers.join_round(self._round_begins)

    def _round_begins(self) -> None:
        self._in_round = False
        if not self._items:
            return
        if asyncio.get_running_loop().time() < self._waiting_since + MIN_WAIT_SEC:
            self._join_round()
            return
        self.overdue = True
        self._on_overdue()

    def _count(self, item: Item, sign: int) -> None:
        size = len(item.payload) if isinstance(item, InputChunk) else 0
        self.waiting_bytes += sign * (size + ITEM_OVERHEAD_BYTES)
        if isinstance(item, InputChunk) and item.modality is _AUDIO and not item.end_of_input:
            self.waiting_ms = max(0.0, self.waiting_ms + sign * self.audio.duration_ms(size))
        else:
            self.urgent += sign


def _is_audio(item: Item) -> bool:
    return isinstance(item, InputChunk) and item.modality is _AUDIO

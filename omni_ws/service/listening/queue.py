"""ListeningQueue: what has come and was not listened to yet, in order, and how much that is."""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from omni_ws.core.audio_format import AudioFormat
from omni_ws.core.chunks import InputChunk, Modality
from omni_ws.service.listening.workers import ROUND_SEC, SpeechWorkers
from omni_ws.wire.session_config import TurnDetectionConfig

#: What an item costs to hold besides its payload.
ITEM_OVERHEAD_BYTES: Final = 128
#: Audio that has waited less when a round begins waits for the next one: it is too little to be worth a look.
SHORTEST_WAIT_SEC: Final = ROUND_SEC / 2


class Mark(enum.Enum):
    CANCEL = "what came before this was cancelled"


@dataclass(frozen=True, slots=True)
class Listening:
    """How audio in ``audio`` is listened to for turns; with ``turns`` None not at all."""

    turns: TurnDetectionConfig | None
    audio: AudioFormat


#: Input, another way to listen from here on, a mark, or with None a bare end of input.
Item: TypeAlias = InputChunk | Listening | Mark | None


class ListeningQueue:
    """Lengths of audio are computed with ``audio``. ``on_overdue`` is called when something has waited long enough."""

    def __init__(self, workers: SpeechWorkers, on_overdue: Callable[[], None]) -> None:
        self._workers = workers
        self._on_overdue = on_overdue
        #: Whether what waits has waited long enough, however little it is: a client may send no more.
        self.overdue = False
        #: On the loop's clock.
        self._waiting_since = 0.0
        self._in_round = False
        self.audio = AudioFormat()
        self.waiting_bytes = 0
        #: Length of the audio.
        self.waiting_ms = 0.0
        #: Items that want to be looked at however little audio there is before them.
        self.urgent = 0
        self._items: deque[Item] = deque()

    def __len__(self) -> int:
        return len(self._items)

    @property
    def first(self) -> Item:
        return self._items[0]

    def put(self, item: Item) -> None:
        if not self._items:
            self._waiting_since = asyncio.get_running_loop().time()
        self._items.append(item)
        self._count(item, 1)
        if self.waiting_ms and not self._in_round:
            self._join_round()

    def take(self) -> Item:
        item = self._items.popleft()
        self.overdue = False
        self._count(item, -1)
        if not self._items:
            self.waiting_ms = 0.0  # whatever was counted in another format
        return item

    def withdraw(self) -> int:
        """Take out the input that is no audio; returns how many bytes of it there were."""
        items, size = [self.take() for _ in range(len(self))], 0
        for item in items:
            if item is None or (isinstance(item, InputChunk) and item.modality is not Modality.AUDIO):
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
        if asyncio.get_running_loop().time() < self._waiting_since + SHORTEST_WAIT_SEC:
            self._join_round()
            return
        self.overdue = True
        self._on_overdue()

    def _count(self, item: Item, sign: int) -> None:
        size = len(item.payload) if isinstance(item, InputChunk) else 0
        self.waiting_bytes += sign * (size + ITEM_OVERHEAD_BYTES)
        if isinstance(item, InputChunk) and item.modality is Modality.AUDIO and not item.end_of_input:
            self.waiting_ms = max(0.0, self.waiting_ms + sign * self.audio.duration_ms(size))
        else:
            self.urgent += sign

"""SentFrames: what was sent and may not have arrived, to be sent again where the session is resumed. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple


class SentKind(Enum):
    CHUNK = "input_chunk"
    CONFIG = "session_config"
    FINISH = "finish"
    CANCEL_BY_ID = "cancel with a request_id"
    CANCEL = "cancel of whatever runs"


class SentFrame(NamedTuple):
    #: The number of the chunk; for any other frame, that of the chunk that comes next.
    place: int
    kind: SentKind
    frame: bytes
    is_text: bool


class SentFrames:
    """In their order. What is accepted is forgotten, and with it all that was sent before."""

    def __init__(self) -> None:
        self._frames: deque[SentFrame] = deque()

    def add(self, frame: SentFrame) -> None:
        self._frames.append(frame)

    def accepted(self, next_sequence_id: int) -> None:
        while self._frames and self._frames[0].place < next_sequence_id:
            self._frames.popleft()

    def again(self, next_sequence_id: int, wanted: Callable[[SentKind], bool]) -> list[SentFrame]:
        """From the first chunk on that did not arrive. What has no number may have arrived; ``wanted`` decides."""
        self.accepted(next_sequence_id)
        self._frames = deque(frame for frame in self._frames if frame.kind is SentKind.CHUNK or wanted(frame.kind))
        return list(self._frames)

    def clear(self) -> None:
        self._frames.clear()

"""Frames that may not have arrived, kept to be sent again after a resume. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple


class SentKind(Enum):
    """What a frame is, which decides whether it may be sent twice."""

    CHUNK = "input_chunk"
    CONFIG = "session_config"
    FINISH = "finish"
    CANCEL_BY_ID = "cancel with a request_id"
    CANCEL = "cancel of the running request"
    TRUNCATE = "history_truncate"


class SentFrame(NamedTuple):
    """A frame that was sent."""

    #: Number of the chunk; for any other frame, that of the next chunk.
    place: int
    kind: SentKind
    frame: bytes
    is_text: bool


class SentFrames:
    """Holds the frames after the last acknowledged chunk, in their order."""

    def __init__(self) -> None:
        self._frames: deque[SentFrame] = deque()

    def add(self, frame: SentFrame) -> None:
        self._frames.append(frame)

    def accepted(self, next_sequence_id: int) -> None:
        """Forgets what was sent before the chunk ``next_sequence_id``."""
        while self._frames and self._frames[0].place < next_sequence_id:
            self._frames.popleft()

    def to_resend(self, next_sequence_id: int, wanted: Callable[[SentFrame], bool]) -> list[SentFrame]:
        """Returns the frames from the first chunk on that did not arrive.

        A frame without a number may have arrived: ``wanted`` decides about it.
        """
        self.accepted(next_sequence_id)
        self._frames = deque(frame for frame in self._frames if frame.kind is SentKind.CHUNK or wanted(frame))
        return list(self._frames)

    def clear(self) -> None:
        self._frames.clear()

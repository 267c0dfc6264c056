"""SentSound: the sound that was sent to a client, kept for the canceller of its echo until that has taken it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from omni_ws.core.chunks import AudioFormat
from omni_ws.core.quota import ByteBudget

#: What one talker's canceller holds: 0.4 MB of a library, and samples.
HELD_BYTES: Final = 1 << 20
#: What is kept at most while no audio of the microphone arrives: five seconds of 16-bit samples at 48 kHz.
MAX_SENT_BYTES: Final = 480_000


@dataclass(frozen=True, slots=True)
class SentPiece:
    """Raw audio of an answer, which begins at ``start_ms`` of the answer."""

    answer_id: str
    start_ms: float
    audio: AudioFormat
    payload: bytes


@dataclass(frozen=True, slots=True)
class Playing:
    """What the client plays at the time ``at_ms``, at which a piece of its microphone's audio ends.

    The client is at ``position_ms`` of the answer; None: it has played nothing yet. ``sounds``: it plays on, as the
    answer is neither cut nor held. ``moves``: it has sound to play, as far as is known. ``sent`` is what was sent since
    the piece before.
    """

    at_ms: float
    answer_id: str | None
    position_ms: float
    sounds: bool
    moves: bool
    sent: tuple[SentPiece, ...]


class SentSound:
    """A queue of what was sent, of MAX_SENT_BYTES at most; older pieces are dropped.

    Its bytes are charged, and HELD_BYTES for the canceller.
    """

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self._pieces: deque[SentPiece] = deque()
        self._held = 0
        budget.charge(HELD_BYTES)

    def close(self) -> None:
        """Drop everything, and refund what was charged."""
        self.take()
        self._budget.give(HELD_BYTES)

    def add(self, piece: SentPiece) -> None:
        """Add what is sent now."""
        self._pieces.append(piece)
        self._hold(len(piece.payload))
        while self._held > MAX_SENT_BYTES:
            self._hold(-len(self._pieces.popleft().payload))

    def take(self) -> tuple[SentPiece, ...]:
        """Remove and return all pieces, in the order in which they were sent."""
        pieces = tuple(self._pieces)
        self._pieces.clear()
        self._hold(-self._held)
        return pieces

    def _hold(self, size: int) -> None:
        self._held += size
        self._budget.charge(size)

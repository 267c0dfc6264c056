"""Loudspeaker: what a client is playing just now, as far as a server can know."""

from __future__ import annotations

from collections import deque

from omni_ws.service.conversation.history import History
from omni_ws.service.conversation.request import Request


class Loudspeaker:
    """Follows the answer under way and the one before it, whose end may still be heard.

    An answer that had its final before it was heard to its end stays in ``history`` as far as it was heard.
    """

    def __init__(self, history: History) -> None:
        self._history = history
        self._turns: deque[Request] = deque(maxlen=2)

    @property
    def playing(self) -> bool:
        return any(turn.playback.playing for turn in self._turns)

    def answering(self, turn: Request) -> None:
        """Work on this answer begins."""
        self._turns.append(turn)

    def report(self, sequence_id: int, played_ms: float) -> None:
        """The client says how much it has played of the answer that output ``sequence_id`` belongs to."""
        for turn in reversed(self._turns):
            first = turn.playback.first_sequence_id
            if first is not None and first <= sequence_id:
                turn.playback.report(played_ms)
                return

    def silence(self) -> None:
        """The client is interrupted, and plays nothing more of what it has."""
        for turn in self._turns:
            if turn.playback.playing and turn.finished and turn.playback.reported_ms is not None:
                before = turn.answer_message
                turn.interrupted = True
                self._history.replace(before, turn.answer_message)
            turn.playback.stop()

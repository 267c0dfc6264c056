"""Loudspeaker: what a client is playing just now, as far as a server can know."""

from __future__ import annotations

from collections import deque

from omni_ws.service.conversation.history import History
from omni_ws.service.conversation.request import Request, RequestState


class Loudspeaker:
    """Follows the answer under way and the one before it, whose end may still be heard.

    An answer that had its final before it was heard to its end stays in ``history`` as far as it was heard.
    """

    def __init__(self, history: History) -> None:
        self._history = history
        self._requests: deque[Request] = deque(maxlen=2)

    @property
    def playing(self) -> bool:
        return any(request.playback.playing for request in self._requests)

    def answering(self, request: Request) -> None:
        """Work on this answer begins."""
        self._requests.append(request)

    def report(self, sequence_id: int, played_ms: float) -> None:
        """The client says how much it has played of the answer that output ``sequence_id`` belongs to."""
        for request in reversed(self._requests):
            first = request.playback.first_sequence_id
            if first is not None and first <= sequence_id:
                request.playback.report(played_ms)
                return

    def silence(self) -> None:
        """The client is interrupted, and plays nothing more of what it has."""
        for request in self._requests:
            playback = request.playback
            heard_in_part = playback.playing and playback.reported_ms is not None
            playback.stop()
            if heard_in_part and request.state is RequestState.FINISHED:
                self._history.revise_answer(request.request_id, request.answer_message)

"""Loudspeaker: what a client is playing, as far as its server knows."""

from __future__ import annotations

from omni_ws.service.conversation.history import History
from omni_ws.service.conversation.request import Request
from omni_ws.service.conversation.request_state import RequestState


class Loudspeaker:
    """Follows the playback of the current answer and of the one before it, which may still be playing.

    An answer that is interrupted after its final is cut in ``history`` to the part that was heard.
    """

    def __init__(self, history: History) -> None:
        self._history = history
        self._requests: tuple[Request, ...] = ()

    @property
    def playing(self) -> bool:
        """Whether any audio that was sent is not played yet."""
        return any(request.playback.playing for request in self._requests)

    def answering(self, request: Request) -> None:
        """The engine starts on this request: its audio is what plays next."""
        self._requests = (*self._requests[-1:], request)

    def report(self, sequence_id: int, played_ms: float) -> None:
        """The client reports that it has played ``played_ms`` of the answer that output ``sequence_id`` belongs to."""
        for request in reversed(self._requests):
            first = request.playback.first_sequence_id
            if first is not None and first <= sequence_id:
                request.playback.report(played_ms)
                return

    def cut(self, request_id: str, heard_ms: float) -> str | None:
        """The client has played ``heard_ms`` of this answer, and plays nothing more of it.

        Returns the text that it heard; None where the answer is not over, or too long ago.
        """
        for request in self._requests:
            if request.request_id == request_id:
                request.playback.report(heard_ms)
                request.playback.stop()
                if request.state is RequestState.FINISHED:
                    answer = request.answer_message
                    self._history.revise_answer(request_id, answer)
                    return answer.text
        return None

    def silence(self, *, only: str | None = None, spared: Request | None = None) -> None:
        """Playback is interrupted: the client drops the audio that it has not played.

        With ``only``, that is the audio of the request with this id. That of ``spared`` may go on.
        """
        for request in self._requests:
            if request is spared or only not in (None, request.request_id):
                continue
            playback = request.playback
            heard_in_part = playback.playing and (playback.assumed or playback.reported_ms is not None)
            playback.stop()
            if heard_in_part and request.state is RequestState.FINISHED:
                self._history.revise_answer(request.request_id, request.answer_message)

"""Dictation, whose audio is heard as it arrives; and the order of audio and the events that end it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from omni_ws.core.chunks import InputChunk
from omni_ws.errors import OmniError
from omni_ws.service.conversation.conversation import Conversation
from omni_ws.transport.realtime.items import Turn, spoken_item


class AfterAudio:
    """The events of a client that wait until turn detection has heard the audio before them.

    Else a commit would find that nobody speaks, while the speech before it is still judged. ``handle`` gets the type
    and the id of an event: at once without turn detection, otherwise after an InputHeard (``go_on``).
    """

    def __init__(self, conversation: Conversation, handle: Callable[[str, str | None], None]) -> None:
        self._conversation = conversation
        self._handle = handle
        #: The type and the id of each event.
        self.waiting = deque[tuple[str, str | None]]()

    def put(self, kind: str, event_id: str | None) -> None:
        """Take the next event. Raises what ``handle`` raises."""
        self.waiting.append((kind, event_id))
        self._wait()

    def go_on(self) -> None:
        """Handle the next event, as the audio before it was heard. Raises what ``handle`` raises."""
        self._handle(*self.waiting.popleft())

    def _wait(self) -> None:
        listener = self._conversation.listener
        if listener is not None and self._conversation.configuration.effective.turn_detection is not None:
            listener.mark()
        else:
            self.go_on()


class Dictation:
    """The utterance that a client dictates: all audio since its last commit, as the input of one request.

    The request opens with the first audio and hears the rest as it comes, so its transcript is nearly complete when the
    client commits. It may end before that, by an error; the client is told at the commit.
    """

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        #: The open utterance; None before its first audio.
        self.turn: Turn | None = None
        #: Bytes of its audio.
        self.size = 0
        #: Whether its request has ended, and the error that ended it.
        self.ended = False
        self.error: OmniError | None = None

    def append(self, chunk: InputChunk, now: float) -> Turn | None:
        """Add audio. Returns the turn if this opened one. Raises what ``Conversation.receive_chunk`` raises."""
        self._conversation.receive_chunk(chunk, now=now)
        if not chunk.payload:
            return None
        self.size += len(chunk.payload)
        if self.turn is not None:
            return None
        self.turn = turn = Turn(spoken_item(), answered=False)
        request = self._conversation.receiving
        if request is None:  # it was refused as it opened
            self.ended = True
        else:
            turn.item.asked(request.request_id)
        return turn

    def end(self, error: OmniError | None) -> None:
        """Note that the request has ended before the commit."""
        self.ended, self.error = True, error

    def finish(self) -> None:
        """End the utterance: what is appended next is another one."""
        self._conversation.finish()
        self.turn, self.size, self.ended, self.error = None, 0, False, None

    def clear(self) -> None:
        """Discard the utterance."""
        turn = self.turn
        if turn is not None:
            turn.clear()
            if turn.item.request_id is not None:
                self._conversation.cancel(turn.item.request_id)
            self.finish()

"""Flow control of the input of a conversation: pauses in reading, and credit in acknowledgements."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_ws.engine.threads import Lane
from omni_ws.service.conversation.request import INPUT_QUEUE_BYTES, Request
from omni_ws.service.observing.observer import InputAcknowledged, ObservedSession
from omni_ws.wire.server_frames import InputAckFrame

if TYPE_CHECKING:
    from omni_ws.core.input_stream import InputStream
    from omni_ws.service.conversation.conversation import Conversation


class InputFlow:
    """The flow control of one conversation's input: decides when a transport pauses, and what it acknowledges."""

    def __init__(self, stream: InputStream, observed: ObservedSession, conversation: Conversation) -> None:
        #: The place of the session in the threads that decode its audio and detect the speech in it.
        self.lane = Lane()
        self._stream = stream
        self._observed = observed
        self._conversation = conversation
        #: Whether the transport waits for ``offer_input``; and whether the credit that the client knows of is less than
        #: a whole chunk.
        self._wanted = False
        self._credit_was_low = False

    def is_full(self) -> bool:
        """Return whether the engine is behind with the request that receives input, or the listener with its audio."""
        if self.engine_is_behind():
            return True
        listener = self._conversation.listener
        if listener is None or not listener.full:
            return False
        self._wanted = True
        return True

    def engine_is_behind(self) -> bool:
        """Return whether the engine is behind with the request that receives input. If so, ``offer`` follows later."""
        receiving = self._conversation.receiving
        if receiving is None or not receiving.answering or not receiving.input_full:
            return False
        self._wanted = True
        return True

    def take_ack(self) -> InputAckFrame:
        """Return an acknowledgement of the input so far, with the credit in bytes."""
        ack, receiving = self._stream.received(), self._conversation.receiving
        self.notify_observers()
        credit = self._credit
        self._credit_was_low = credit < self._whole_chunk
        if receiving is not None and receiving.answering:
            # A client that respects its credit may wait for more now.
            self._wanted = self._wanted or receiving.queued_bytes > INPUT_QUEUE_BYTES / 2
        return InputAckFrame(
            next_sequence_id=ack.next_sequence_id,
            buffered_chunks=ack.buffered_chunks,
            received_bytes=ack.received_bytes,
            credit_bytes=max(0, credit),
        )

    @property
    def _credit(self) -> int:
        receiving, limits = self._conversation.receiving, self._stream.limits
        credit = limits.max_held_bytes - self._stream.held_bytes
        if receiving is not None and receiving.answering:
            # The chunk that makes the queue full still fits, whatever its size.
            credit = min(credit, INPUT_QUEUE_BYTES + limits.max_chunk_bytes - int(receiving.queued_bytes))
        return credit

    @property
    def _whole_chunk(self) -> int:
        """The size of the largest chunk: a client with less credit may have to wait before it sends a chunk."""
        return min(self._stream.limits.max_chunk_bytes, self._stream.limits.max_held_bytes)

    def notify_observers(self) -> None:
        """Report how much input was accepted. Also called as a request or session ends, when no ack may follow."""
        if not self._observed.observers.listening:
            return
        stream, reorder = self._stream, self._stream.reorder
        self._observed.notify(
            InputAcknowledged(reorder.next_sequence_id, stream.received_bytes, stream.duplicates, reorder.statistics)
        )

    def taken(self, request: Request, size: float) -> None:
        """Note that the engine has taken ``size`` bytes of a request's input."""
        if request.given is None:  # else it is held to the end of the request
            self._stream.taken(request.session, int(size))
        if self._wanted and request.queued_bytes <= INPUT_QUEUE_BYTES / 2:
            self.offer()
        elif self._credit_was_low:
            self.renew_credit()

    def offer(self) -> None:
        """Let the input continue, if the transport waits for that."""
        if self._wanted:
            self._wanted = False
            if (listener := self._conversation.listener) is not None:
                listener.go_on()
            self._conversation.offer_input()
        elif self._credit_was_low:
            self.renew_credit()

    def renew_credit(self) -> None:
        """Have the input acknowledged if there is credit for a whole chunk again, and the client knows of less."""
        if self._credit_was_low and self._credit >= self._whole_chunk:
            self._credit_was_low = False
            self._conversation.offer_input()

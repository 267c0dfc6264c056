"""The interfaces by which a conversation and its outbox notify those that use them.

A conversation has one owner at a time: the connection of a live session, a Mode B session, or an HTTP request. It
is set by ``Conversation.attach`` and cleared by ``Conversation.detach``; in between nobody is notified of anything.
No method may raise.
"""

from __future__ import annotations

from typing import Final, Protocol

from omni_ws.core.chunks import OutputChunk


class OutboxReader(Protocol):
    """Takes the messages of an outbox."""

    def write_now(self, output: OutputChunk) -> bool:
        """Write an output that found the outbox empty. Returns False, and the outbox queues it, where that must wait.

        It is called inside the call of the engine, and spares the queue: nothing is done twice for a piece that can go
        straight to the socket.
        """

    def output_ready(self) -> None:
        """The outbox was empty and has a message, which may be taken at once."""

    def output_has_room(self) -> None:
        """The outbox was full and has room again."""


class OutboxWriter(Protocol):
    """Fills an outbox."""

    def output_full(self) -> None:
        """The outbox has become full, and its ``get_timer`` earlier."""

    def output_stalled(self, seconds: float) -> None:
        """The outbox has room again after it was full for ``seconds``."""


class ConversationOwner(OutboxReader, Protocol):
    """Feeds a conversation with input and time, and takes its output."""

    def input_may_continue(self) -> None:
        """Input that was held back (see ``Conversation.input_full``) may be received again."""

    def timer_changed(self) -> None:
        """``Conversation.get_timer`` has become earlier, outside of a method that takes input."""


class Nobody:
    """Stands in for any of these where there is none."""

    def write_now(self, output: OutputChunk) -> bool:
        return False

    def output_ready(self) -> None:
        pass

    def output_has_room(self) -> None:
        pass

    def output_full(self) -> None:
        pass

    def output_stalled(self, seconds: float) -> None:
        pass

    def input_may_continue(self) -> None:
        pass

    def timer_changed(self) -> None:
        pass


NOBODY: Final = Nobody()

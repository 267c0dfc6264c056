"""The interface by which a connection hands messages to the session behind it."""

from __future__ import annotations

from typing import Protocol

from omni_ws.errors import OmniError


class FrameReceiver(Protocol):
    """The session behind a connection. Its methods are called from socket callbacks and may not raise."""

    def receive_message(self, data: bytes | bytearray | memoryview, *, is_text: bool) -> None:
        """One whole message."""

    def receive_pong(self, data: bytes) -> None: ...

    def reading_changed(self) -> None:
        """The connection has begun to rest from reading, or reads again: see its ``is_reading``."""

    def resume_output(self) -> None:
        """The write buffer is below its low-water mark again."""

    def input_refused(self, error: OmniError) -> None:
        """No more input is received: a message is too long, there is no room for it, or the peer does not read."""

    def connection_closing(self) -> None:
        """Nothing can be sent any more: the peer closed, broke the protocol, or is gone. May be called repeatedly."""

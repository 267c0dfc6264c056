"""FrameReceiver: what a connection tells the session behind it."""

from __future__ import annotations

from typing import Protocol

from omni_ws.errors import EngineOverloaded


class FrameReceiver(Protocol):
    """The session behind a connection. None of its methods may raise."""

    def receive_message(self, data: bytes | bytearray | memoryview, *, is_text: bool) -> None: ...

    def input_refused(self, error: EngineOverloaded) -> None:
        """There is no room for the message under way: nothing of the input is looked at from here on."""

    def connection_closing(self) -> None:
        """Nothing can be sent any more: the peer closed the connection, broke the protocol, or is gone."""

    def receive_pong(self, data: bytes) -> None: ...

    def resume_output(self) -> None:
        """The socket takes bytes again."""

    def pace_kept(self) -> None:
        """The socket was not read for a while, for the pace of the input, and is read again."""

"""StreamConnection: websockets' connection, with a way around its queue for whole data frames."""

from __future__ import annotations

from collections import deque
from typing import Any, Final, Protocol

from websockets.asyncio.server import ServerConnection
from websockets.frames import Frame, Opcode

_DATA: Final = frozenset({Opcode.TEXT, Opcode.BINARY, Opcode.CONT})


class FrameReceiver(Protocol):
    """The session behind a connection. None of its methods may raise."""

    def receive_message(self, data: bytes | bytearray | memoryview, *, is_text: bool) -> None: ...

    def receive_anything(self) -> None:
        """A control frame or a fragment: the peer is alive."""

    def resume_output(self) -> None:
        """The socket takes bytes again."""


class StreamConnection(ServerConnection):
    """Hands whole TEXT and BINARY frames to the session from inside ``data_received``: no task switch a frame.

    Everything else stays the library's: the handshake, control frames, the closing handshake. A client that ever sends
    a fragmented message is served through the library's queue from then on (``recv``), so that order is kept.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._receiver: FrameReceiver | None = None
        #: Whole frames that came before there was a session.
        self._early: deque[Frame] = deque()
        self._fragmenting = False

    def attach(self, receiver: FrameReceiver) -> None:
        """From here on frames go to ``receiver``, beginning with those that came already."""
        self._receiver = receiver
        while self._early:
            self._hand_over(receiver, self._early.popleft())

    def process_event(self, event: Any) -> None:
        if self.request is None or not isinstance(event, Frame):
            super().process_event(event)
            return
        if event.opcode in _DATA:
            if not event.fin or event.opcode is Opcode.CONT:
                self._fragmenting = True
            if not self._fragmenting:
                if self._receiver is None:
                    self._early.append(event)
                else:
                    self._hand_over(self._receiver, event)
                return
        if self._receiver is not None:
            self._receiver.receive_anything()
        super().process_event(event)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._receiver is not None:
            self._receiver.resume_output()

    @staticmethod
    def _hand_over(receiver: FrameReceiver, frame: Frame) -> None:
        receiver.receive_message(frame.data, is_text=frame.opcode is Opcode.TEXT)

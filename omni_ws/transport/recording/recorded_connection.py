"""Connections whose messages are recorded: as they came in, before anything looks at them, and as they go out."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl, urlencode

from websockets.frames import CloseCode

from omni_ws.service.recording.recorder import ConnectionRecording, SessionRecording
from omni_ws.transport.native.connection import StreamConnection
from omni_ws.transport.native.frame_receiver import FrameReceiver


class RecordedConnection(StreamConnection):
    """To be mixed into a kind of connection. Nothing is recorded before ``record``, nor without it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.recording: ConnectionRecording | None = None

    def record(self, recording: SessionRecording | None, *, last_output: int | None = None) -> None:
        """From here on. ``last_output`` is for a client that comes back."""
        if recording is None or self.request is None:
            return
        self.recording = recording.connection()
        self.recording.opened(_target(self.request.path), subprotocol=self.subprotocol, last_output=last_output)

    def attach(self, receiver: FrameReceiver) -> None:
        super().attach(receiver if self.recording is None else _RecordedReceiver(receiver, self.recording))

    def write_message(self, data: bytes, *, is_text: bool) -> None:
        if self.recording is not None:
            self.recording.sent(data, is_text=is_text)
        super().write_message(data, is_text=is_text)

    async def send(self, message: Any, *, text: bool | None = None) -> None:
        if self.recording is not None:
            self.recording.sent(message, is_text=bool(text))
        await super().send(message, text=text)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.recording is None:
            return
        protocol = self.protocol
        received, sent = protocol.close_rcvd, protocol.close_sent
        if received is not None and (sent is None or protocol.close_rcvd_then_sent):
            self.recording.closed("client", received.code)
        elif sent is not None:
            self.recording.closed("server", sent.code)
        else:
            self.recording.closed("lost", CloseCode.ABNORMAL_CLOSURE)


class _RecordedReceiver:
    """A FrameReceiver in front of the real one."""

    def __init__(self, receiver: FrameReceiver, recording: ConnectionRecording) -> None:
        self._recording = recording
        self._receive_message = receiver.receive_message
        self.input_refused = receiver.input_refused
        self.connection_closing = receiver.connection_closing
        self.receive_pong = receiver.receive_pong
        self.resume_output = receiver.resume_output
        self.pace_kept = receiver.pace_kept

    def receive_message(self, data: bytes | bytearray | memoryview, *, is_text: bool) -> None:
        self._recording.received(bytes(data), is_text=is_text)
        self._receive_message(data, is_text=is_text)


def _target(target: str) -> str:
    """Without what only a client that comes back says, and its token among it."""
    path, _, query = target.partition("?")
    fields = [(name, value) for name, value in parse_qsl(query) if name == "session_id"]
    return f"{path}?{urlencode(fields)}" if fields and "resume_token" not in query else path

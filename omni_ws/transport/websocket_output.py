"""What a session says, written to its WebSocket a piece at a time."""

from __future__ import annotations

from typing import Final

from omni_ws.core.output import AnyOutput
from omni_ws.service.observer import ObservedSession, OutputWritten
from omni_ws.service.outbox import Outbox
from omni_ws.transport.output_frames import encode_message
from omni_ws.transport.websocket_connection import StreamConnection

#: Output is given to the socket in pieces of about this size, looking in between whether it still takes any, and after
#: the other connections.
WRITE_BATCH_BYTES: Final = 64 * 1024
WRITE_BATCH_MESSAGES: Final = 128


def write_some(connection: StreamConnection, outbox: Outbox, observed: ObservedSession, *, binary_audio: bool) -> None:
    """As much as may be written at a stretch. The connection must be open."""
    size = 0
    for _ in range(WRITE_BATCH_MESSAGES):
        if size >= WRITE_BATCH_BYTES or (message := outbox.take()) is None:
            return
        data, is_binary = encode_message(message, binary_audio=binary_audio)
        connection.write_message(data, is_text=not is_binary)
        size += len(data)
        if observed.listening_to_outputs and isinstance(message, AnyOutput):
            observed.tell(OutputWritten(message))

"""What a session tells a connection of another protocol, recorded as frames of the native WebSocket."""

from __future__ import annotations

from msgspec import structs

from omni_ws.core.chunks import OutputChunk, OutputModality
from omni_ws.service.conversation.messages import InputHeard, ServerMessage
from omni_ws.service.recording.recorder import SessionRecording
from omni_ws.transport.native.session import encode_message
from omni_ws.wire.server_frames import BackchannelFrame


def record_message(recording: SessionRecording | None, message: ServerMessage) -> None:
    """Record a message of a session that is recorded. The sound in it is left out: the connection's own has it."""
    if recording is None or isinstance(message, InputHeard | BackchannelFrame):
        return
    if isinstance(message, OutputChunk) and message.modality is OutputModality.AUDIO:
        message = structs.replace(message, payload=b"")
    recording.told(encode_message(message, binary_audio=False)[0])

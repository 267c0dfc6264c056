"""ServerMessage: what a session can say, and what holding it costs."""

from __future__ import annotations

from typing import Final, TypeAlias

from omni_ws.core.output import FinalChunk, OutputChunk
from omni_ws.errors import OmniError
from omni_ws.wire.server_frames import (
    HistoryTruncatedFrame,
    InputAckFrame,
    PongFrame,
    ResponseStartedFrame,
    SessionClosingFrame,
    SessionCreatedFrame,
    SessionUpdatedFrame,
    SpeechStartedFrame,
    SpeechStoppedFrame,
    encode_frame,
)

ServerMessage: TypeAlias = (
    OutputChunk
    | FinalChunk
    | OmniError
    | ResponseStartedFrame
    | SessionCreatedFrame
    | SessionUpdatedFrame
    | InputAckFrame
    | HistoryTruncatedFrame
    | SpeechStartedFrame
    | SpeechStoppedFrame
    | SessionClosingFrame
    | PongFrame
)

#: What has a number of its own, by which a client says how far it has heard.
OUTPUTS: Final = frozenset({OutputChunk, FinalChunk})
#: What is said to one connection and means nothing to the next.
OF_THE_MOMENT: Final = frozenset({InputAckFrame, PongFrame, SessionClosingFrame, SessionCreatedFrame})

#: What a message costs besides its content: the frame around it.
MESSAGE_OVERHEAD_BYTES: Final = 128
#: A token with its log-probability.
LOGPROB_BYTES: Final = 128
#: An exception weighs more.
ERROR_OVERHEAD_BYTES: Final = 512


def message_cost(message: ServerMessage) -> int:
    """Bytes."""
    match message:
        case OutputChunk():
            size = MESSAGE_OVERHEAD_BYTES + len(message.payload) + 4 * len(message.text)
            if message.logprobs:
                size += LOGPROB_BYTES * sum(1 + len(one.top) for one in message.logprobs)
            return size
        case OmniError():
            return ERROR_OVERHEAD_BYTES + len(message.message)
        case PongFrame() | SessionUpdatedFrame():
            # These give back what the client sent, however much that was. They are rare.
            return MESSAGE_OVERHEAD_BYTES + len(encode_frame(message))
    return MESSAGE_OVERHEAD_BYTES

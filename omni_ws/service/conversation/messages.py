"""What a session sends, what each message costs, and the limits of a conversation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

from msgspec import Struct

from omni_ws.core.chunks import FinalChunk, OutputChunk
from omni_ws.core.input_stream import StreamLimits
from omni_ws.core.quota import memory_of
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

#: Chunks of one request that may wait for the engine: 87 minutes of speech in pieces of 20 ms. The limit in bytes
#: leaves out the overhead of a chunk, and chunks may be tiny.
MAX_WAITING_CHUNKS: Final = 1 << 18
#: Results of tools in one request, which are kept by their ids until it ends, also where they are empty.
MAX_TOOL_RESULTS: Final = 1 << 10
#: How long a turn whose answer was cut off may be written down.
ASR_TIMEOUT_SEC: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationLimits:
    """The limits of one conversation; those of its input stream are in ``stream``."""

    stream: StreamLimits
    #: Requests that may wait behind the one that is being answered.
    max_pending_requests: int = 4
    #: Tokens, by ``estimate_tokens`` and a rate of speech, of the history that the engine gets; 0 for none.
    max_history_tokens: int = 4096
    #: Seconds that recognition of a turn may take whose answer was cut off.
    asr_timeout_sec: float = ASR_TIMEOUT_SEC


# Messages, and what each costs while it is held.


class RequestWarning(Struct, frozen=True):
    """An error that does not end its request: a part of the engine failed, and the answer goes on without it."""

    error: OmniError


ServerMessage: TypeAlias = (
    OutputChunk
    | FinalChunk
    | OmniError
    | RequestWarning
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

#: Messages with a ``sequence_id``, by which a client acknowledges what it has received.
OUTPUTS: Final = frozenset({OutputChunk, FinalChunk})
#: Messages that concern one connection only, and are not sent again over the next.
OF_THE_MOMENT: Final = frozenset({InputAckFrame, PongFrame, SessionClosingFrame, SessionCreatedFrame})

#: Bytes of a message besides its content: the frame around it.
MESSAGE_OVERHEAD_BYTES: Final = 128
#: Bytes of a token with its log-probability.
LOGPROB_BYTES: Final = 128
#: Bytes of an exception besides its message.
ERROR_OVERHEAD_BYTES: Final = 512


def message_cost(message: ServerMessage) -> int:
    """The bytes that a message is charged with while it is held; an estimate, cheap to make."""
    if type(message) is OutputChunk:
        size = MESSAGE_OVERHEAD_BYTES + len(message.payload) + 4 * len(message.text)
        if message.logprobs:
            size += LOGPROB_BYTES * sum(1 + len(one.top) for one in message.logprobs)
        return size
    if isinstance(message, RequestWarning):
        message = message.error
    if isinstance(message, OmniError):
        return ERROR_OVERHEAD_BYTES + len(message.message)
    if isinstance(message, SessionUpdatedFrame):
        return MESSAGE_OVERHEAD_BYTES + memory_of(message)
    if isinstance(message, PongFrame):
        # It repeats what the client sent, which may be long; it is rare enough to be encoded for this.
        return MESSAGE_OVERHEAD_BYTES + len(encode_frame(message))
    return MESSAGE_OVERHEAD_BYTES

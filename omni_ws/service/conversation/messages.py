"""The messages that a session sends, their cost in bytes, their saved form, and the limits of a conversation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec
from msgspec import Struct

from omni_ws.core.chunks import AnswerWarning, FinalChunk, FinishReason, OutputChunk, UrlCitation, Usage, WordsKnown
from omni_ws.core.input_stream import StreamLimits
from omni_ws.core.quota import memory_of
from omni_ws.errors import EngineFailed, OmniError
from omni_ws.wire.server_frames import (
    BackchannelFrame,
    HistoryItemsFrame,
    HistoryTruncatedFrame,
    InputAckFrame,
    PongFrame,
    ResponseStartedFrame,
    SessionClosingFrame,
    SessionCreatedFrame,
    SessionKeptFrame,
    SessionUpdatedFrame,
    SpeechConfirmedFrame,
    SpeechDismissedFrame,
    SpeechStartedFrame,
    SpeechStoppedFrame,
    encode_frame,
)

if TYPE_CHECKING:
    from omni_ws.service.conversation.conversation import Conversation

#: Chunks of one request that may wait for the engine: 87 minutes of speech in pieces of 20 ms. The limit in bytes does
#: not count the overhead of a chunk, and chunks may be tiny.
MAX_WAITING_CHUNKS: Final = 1 << 18
#: Tool results that one request may have. Their ids are kept until it ends, so that even empty results take memory.
MAX_TOOL_RESULTS: Final = 1 << 10
#: Seconds that speech recognition of a turn may take after the answer to the turn was cut off.
ASR_TIMEOUT_SEC: Final = 30.0


class SumsUp:
    """What sums up long talks in the background, see ``sessions.summaries``. This one does nothing."""

    def disturb(self, conversation: Conversation) -> None:
        """Give way: in this conversation somebody speaks, or an answer is due."""

    def note_quiet(self, conversation: Conversation) -> None:
        """Note that in this conversation nobody speaks, and no answer is due."""

    def forget(self, conversation: Conversation) -> None:
        """Do nothing more for a conversation, which ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationLimits:
    """The limits of one conversation; those of its input stream are in ``stream``."""

    stream: StreamLimits
    #: Whether the session is one request over HTTP.
    single_request: bool = False
    #: Requests that may wait behind the one that is being answered.
    max_pending_requests: int = 4
    #: Tokens, by ``estimate_tokens`` and a rate of speech, of the history that the engine gets; 0 for none.
    max_history_tokens: int = 4096
    #: See ASR_TIMEOUT_SEC.
    asr_timeout_sec: float = ASR_TIMEOUT_SEC
    #: Whether requests keep their input to their end, so that the session can be saved at any time.
    keeps_input: bool = False
    #: What sums up long talks; otherwise the oldest turns are dropped.
    summaries: SumsUp = field(default_factory=SumsUp)


# Messages, and what each costs while it is held.


class RequestWarning(Struct, frozen=True):
    """An error that does not end its request: a part of the engine failed, and the answer goes on without it."""

    error: OmniError


class InputHeard(Struct, frozen=True):
    """All input before a position has been heard, and what that led to was sent: see ``TurnListener.mark``."""


ServerMessage: TypeAlias = (
    OutputChunk
    | FinalChunk
    | OmniError
    | RequestWarning
    | InputHeard
    | ResponseStartedFrame
    | SessionCreatedFrame
    | SessionUpdatedFrame
    | InputAckFrame
    | HistoryTruncatedFrame
    | HistoryItemsFrame
    | SpeechStartedFrame
    | SpeechConfirmedFrame
    | SpeechDismissedFrame
    | SpeechStoppedFrame
    | BackchannelFrame
    | SessionClosingFrame
    | PongFrame
)

#: Messages with a ``sequence_id``, by which a client acknowledges what it has received.
OUTPUTS: Final = frozenset({OutputChunk, FinalChunk})
#: Messages that concern one connection only, and are not sent again over the next.
OF_THE_MOMENT: Final = frozenset(
    {InputHeard, InputAckFrame, PongFrame, BackchannelFrame, SessionClosingFrame, SessionCreatedFrame, SessionKeptFrame}
)

#: Messages that are never kept in a store: those of the moment, except the one that tells a client its first token.
UNKEPT: Final = OF_THE_MOMENT - {SessionCreatedFrame}

#: Bytes of a message besides its content: the frame around it.
MESSAGE_OVERHEAD_BYTES: Final = 128
#: Bytes of a token with its log-probability.
LOGPROB_BYTES: Final = 128
#: Bytes of a moment in a final's times.
MOMENT_BYTES: Final = 64
#: Bytes of an exception besides its message.
ERROR_OVERHEAD_BYTES: Final = 512


def message_cost(message: ServerMessage) -> int:
    """Return the bytes that a message is charged with while it is held: an estimate that is cheap to make."""
    if type(message) is OutputChunk:
        size = MESSAGE_OVERHEAD_BYTES + len(message.payload) + 4 * len(message.text)
        if message.logprobs:
            size += LOGPROB_BYTES * sum(1 + len(one.top) for one in message.logprobs)
        return size
    if isinstance(message, FinalChunk):
        size = MESSAGE_OVERHEAD_BYTES + MOMENT_BYTES * len(message.times)
        return size + sum(4 * (len(one.title) + len(one.url)) for one in message.citations)
    if isinstance(message, RequestWarning):
        message = message.error
    if isinstance(message, OmniError):
        return ERROR_OVERHEAD_BYTES + len(message.message)
    if isinstance(message, SessionUpdatedFrame | HistoryItemsFrame):
        return MESSAGE_OVERHEAD_BYTES + memory_of(message)
    if isinstance(message, BackchannelFrame):
        return MESSAGE_OVERHEAD_BYTES + len(message.payload)
    if isinstance(message, PongFrame):
        # It repeats what the client sent, which may be long; it is rare enough to be encoded for this.
        return MESSAGE_OVERHEAD_BYTES + len(encode_frame(message))
    return MESSAGE_OVERHEAD_BYTES


# Messages in a form that can be written to bytes.


class SavedError(Struct):
    """An error in a form that can be written to bytes: its code, and the attributes of the exception."""

    code: str
    fields: dict[str, Any]

    @classmethod
    def of(cls, error: OmniError) -> SavedError:
        """Return the saved form of ``error``, without its cause and without the details that only the operator sees."""
        fields = vars(error).copy()
        if isinstance(error, EngineFailed):
            fields |= {"private": "", "logged": None}
        return cls(error.code, fields)

    def restored(self) -> OmniError:
        """Return the error. Raises KeyError for a code that this server does not know."""
        kind = _KINDS_OF_ERRORS[self.code]
        error = kind.__new__(kind, self.fields["message"])
        vars(error).update(self.fields)
        return error


class _SavedFinal(Struct, kw_only=True, omit_defaults=True):
    request_id: str
    sequence_id: int
    finish_reason: FinishReason
    usage: Usage
    finish_reasons: tuple[FinishReason, ...]
    foreign_reasons: tuple[str | None, ...]
    citations: tuple[UrlCitation, ...] = ()
    words: WordsKnown
    ref: str | None
    turn_id: str | None
    times: dict[str, int] = {}


class SavedMessage(Struct, omit_defaults=True):
    """A message of the server in a form that can be written to bytes.

    ``kind`` is the name of its class, ``content`` has its fields in MessagePack. ``errors`` has the error that the
    message is, or its warnings in order, with None in place of each one that is in ``warnings`` instead.
    """

    kind: str
    content: bytes = b""
    errors: list[SavedError | None] = []
    warnings: list[AnswerWarning] = []

    @classmethod
    def of(cls, message: ServerMessage) -> SavedMessage:
        """Return the saved form of ``message``."""
        kind = type(message).__name__
        match message:
            case OmniError():
                return cls("OmniError", errors=[SavedError.of(message)])
            case RequestWarning(error=error):
                return cls(kind, errors=[SavedError.of(error)])
            case FinalChunk():
                fields = {name: getattr(message, name) for name in _SavedFinal.__struct_fields__}
                content = msgspec.msgpack.encode(_SavedFinal(**fields))
                errors = [SavedError.of(one) if isinstance(one, OmniError) else None for one in message.warnings]
                return cls(kind, content, errors, [one for one in message.warnings if isinstance(one, AnswerWarning)])
        return cls(kind, msgspec.msgpack.encode(message))

    def restored(self) -> ServerMessage:
        """Return the message. Raises LookupError, ValueError or msgspec.DecodeError if it did not come from ``of``."""
        if self.kind == "OmniError":
            (error,) = self._errors()
            return error
        if self.kind == "RequestWarning":
            (error,) = self._errors()
            return RequestWarning(error)
        if self.kind == "FinalChunk":
            final = msgspec.msgpack.decode(self.content, type=_SavedFinal)
            warnings = [*self.warnings]
            told = tuple(warnings.pop(0) if one is None else one.restored() for one in self.errors)
            return FinalChunk(**msgspec.structs.asdict(final), warnings=told)
        message: ServerMessage = msgspec.msgpack.decode(self.content, type=_KINDS[self.kind])
        return message

    def _errors(self) -> Iterator[OmniError]:
        return (one.restored() for one in self.errors if one is not None)


_KINDS: Final[dict[str, Any]] = {
    kind.__name__: kind
    for kind in (
        OutputChunk,
        ResponseStartedFrame,
        SessionUpdatedFrame,
        HistoryTruncatedFrame,
        HistoryItemsFrame,
        SpeechStartedFrame,
        SpeechConfirmedFrame,
        SpeechDismissedFrame,
        SpeechStoppedFrame,
    )
}


def _leaves(kind: type[OmniError]) -> Iterator[type[OmniError]]:
    for below in kind.__subclasses__():
        yield from _leaves(below)
        if "wire" in vars(below):
            yield below


_KINDS_OF_ERRORS: Final = {kind.wire.code: kind for kind in _leaves(OmniError)}

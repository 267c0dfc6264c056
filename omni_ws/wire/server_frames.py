"""The server's messages: JSON frames of the native WebSocket, and server-sent events as in OpenAI's API.

Fields of frames that are not set are omitted.
"""

from __future__ import annotations

from typing import Any, Final, Literal, TypeAlias, TypeVar, get_args

import msgspec
import orjson
from msgspec import UNSET, Struct, UnsetType

from omni_ws.core.chunks import AudioEncoding, OutputChunk, OutputModality, heard_language
from omni_ws.errors import InvalidFrame, OmniError
from omni_ws.wire.session_config import (
    InputAudioConfig,
    OutputAudioConfig,
    SessionConfig,
    StartPolicyConfig,
    StartPolicyName,
)

T = TypeVar("T")

# Frames of the native WebSocket.


class _ServerFrame(Struct, frozen=True, kw_only=True, tag_field="type"):
    pass


class Capabilities(Struct, frozen=True, kw_only=True):
    """What the engine and the server support."""

    input_modalities: list[str]
    output_modalities: list[str]
    tasks: list[str]
    voices: list[str]
    voice_languages: dict[str, str] | UnsetType = UNSET
    languages: list[str] | UnsetType = UNSET
    speech_languages: list[str] | UnsetType = UNSET
    speed: bool
    sampling: list[str]
    sampling_no_ops: list[str]
    extend: bool
    tools: bool
    logprobs: bool
    structured_output: bool
    turn_detection: bool
    turn_detection_types: list[str] = msgspec.field(default_factory=list)
    duck: bool | UnsetType = UNSET
    backchannel: bool | UnsetType = UNSET
    resume: bool
    transcripts: bool
    keywords: bool | UnsetType = UNSET
    lexicon: bool | UnsetType = UNSET
    webrtc: bool | UnsetType = UNSET


class Part(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One part of the engine: the name of what does its work, and of its model.

    ``hosts`` are the names of the other machines that the part sends its input to. The frame has
    no such field where there are none.
    """

    name: str
    model: str
    hosts: tuple[str, ...] = ()


class Parts(Struct, frozen=True, kw_only=True):
    """The parts of the engine; null where there is none, or the LLM does that work itself."""

    asr: Part | None = None
    llm: Part | None = None
    tts: Part | None = None


class SessionLimits(Struct, frozen=True, kw_only=True):
    """The limits of the session."""

    max_chunk_bytes: int
    max_payload_per_session: int
    reorder_window_chunks: int
    reorder_timeout_sec: float
    max_pending_requests: int


class SessionCreatedFrame(_ServerFrame, frozen=True, kw_only=True, tag="session_created"):
    """The session has begun. ``resume_token`` is null if it cannot be resumed.

    ``advice`` is one line for the operator: which other parts would hear, answer or speak better. ``recorded`` is true
    if the server records what is said and heard, and absent otherwise.
    """

    session_id: str
    resume_token: str | None
    expires_in: float
    model: str
    input_audio: InputAudioConfig
    output_audio: OutputAudioConfig
    start_policy: StartPolicyName | StartPolicyConfig
    after_start: str
    parts: Parts = Parts()
    advice: str | None = None
    recorded: bool | UnsetType = UNSET
    capabilities: Capabilities
    limits: SessionLimits


class SessionResumedFrame(_ServerFrame, frozen=True, kw_only=True, tag="session_resumed"):
    """The session continues with input chunk ``next_sequence_id``; ``replayed`` outputs are sent again, or late."""

    session_id: str
    resume_token: str
    next_sequence_id: int
    replayed: int


class SessionUpdatedFrame(SessionConfig, frozen=True, kw_only=True, tag_field="type", tag="session_updated"):
    """The effective configuration, from the next request on.

    If the frame comes unasked, as the engine has changed, it also has the ``parts``, ``advice`` and ``capabilities`` of
    ``session_created``, as they are now.
    """

    parts: Parts | UnsetType = UNSET
    advice: str | UnsetType | None = UNSET
    capabilities: Capabilities | UnsetType = UNSET
    #: Whether the session can be kept in the server's store: sent as that changes.
    resumable: bool | UnsetType = UNSET

    @property
    def is_unasked(self) -> bool:
        """Whether the server sends this frame by itself, not as the reply to a ``session_config``."""
        return self.capabilities is not UNSET or self.resumable is not UNSET


class SessionKeptFrame(SessionUpdatedFrame, frozen=True, kw_only=True, tag_field="type", tag="session_updated"):
    """A ``session_updated`` with ``resumable``: about this connection only, so not sent again over the next one."""


class InputAckFrame(_ServerFrame, frozen=True, kw_only=True, tag="input_ack"):
    """All chunks below ``next_sequence_id`` were accepted; the client may send ``credit_bytes`` more.

    ``resumable`` is false while the server's store is out of order: the chunks are not kept beyond the server's life.
    """

    next_sequence_id: int
    buffered_chunks: int
    received_bytes: int
    credit_bytes: int
    resumable: bool | UnsetType = UNSET


class ResponseStartedFrame(_ServerFrame, frozen=True, kw_only=True, tag="response_started"):
    """The work on a request has started; ``sequence_id`` is the chunk that triggered it."""

    request_id: str
    trigger: str
    sequence_id: int | None
    input_mode: str
    # The client's name for the request, and the id of the speech turn that opened or joined it.
    ref: str | UnsetType = UNSET
    turn_id: str | UnsetType = UNSET


class HistoryTruncatedFrame(_ServerFrame, frozen=True, kw_only=True, tag="history_truncated"):
    """``request_id`` and all later requests, ``dropped_requests`` in total, were removed from the history."""

    request_id: str
    dropped_requests: int
    ref: str | UnsetType = UNSET


class CallFunction(Struct, frozen=True):
    """The function that a call names, with its arguments as JSON."""

    name: str
    arguments: str


class HistoryCall(Struct, frozen=True, kw_only=True):
    """A call of a tool, in the form of OpenAI's chat bodies."""

    id: str
    type: Literal["function"] = "function"
    function: CallFunction


class HistoryItemFields(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A message of the history, in the form that ``history_items`` of a ``session_config`` takes.

    The role ``summary`` is that of notes that stand in place of older messages; they are the first item.
    """

    role: Literal["summary", "user", "assistant", "tool"]
    content: str | UnsetType = UNSET
    tool_calls: list[HistoryCall] | UnsetType = UNSET
    tool_call_id: str | UnsetType = UNSET


class HistoryItemsFrame(_ServerFrame, frozen=True, kw_only=True, tag="history_items"):
    """The history, oldest first."""

    items: list[HistoryItemFields]


class SpeechStartedFrame(_ServerFrame, frozen=True, kw_only=True, tag="speech_started"):
    """Speech started at ``audio_ms`` of the audio that turn detection received.

    ``request_id`` is the request that it opens or joins; null where it belongs to none, and where ``certain`` is false:
    the sound may be no turn. A SpeechConfirmedFrame or a SpeechDismissedFrame follows then.
    """

    audio_ms: int
    turn_id: str | UnsetType = UNSET
    request_id: str | None = None
    certain: bool | UnsetType = UNSET


class SpeechConfirmedFrame(_ServerFrame, frozen=True, kw_only=True, tag="speech_confirmed"):
    """The uncertain speech that began at ``audio_ms`` interrupts the answer; ``request_id`` is what it opens."""

    turn_id: str
    request_id: str
    audio_ms: int


class SpeechDismissedFrame(_ServerFrame, frozen=True, kw_only=True, tag="speech_dismissed"):
    """The uncertain sound that began at ``audio_ms`` is no turn: nothing more is sent about it."""

    turn_id: str
    audio_ms: int


class SpeechStoppedFrame(_ServerFrame, frozen=True, kw_only=True, tag="speech_stopped"):
    """Speech stopped at ``audio_ms`` of the audio that turn detection received.

    ``request_id`` is the request that it opened or joined; null where no answer to that will come.
    """

    audio_ms: int
    turn_id: str | UnsetType = UNSET
    request_id: str | None = None


class BackchannelFrame(_ServerFrame, frozen=True, kw_only=True, tag="backchannel"):
    """A soft "mm-hm" of the server in a pause of the user, to be played at once beside everything else.

    ``payload`` is all of its sound, raw samples, lowered by 12 dB. It belongs to no request.
    """

    turn_id: str
    text: str
    payload: bytes
    format: AudioEncoding
    sample_rate: int


class WordTime(Struct, frozen=True):
    """A word and its time in the audio."""

    text: str
    start_ms: int
    end_ms: int


class UsageFields(Struct, frozen=True, kw_only=True):
    """What a request used. ``cached_tokens`` is absent where the engine does not report it."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_audio_ms: int
    output_audio_ms: int
    input_after_start_bytes: int
    cached_tokens: int | UnsetType = UNSET


class WarningFields(Struct, frozen=True, kw_only=True):
    """What was done otherwise than asked in an answer that has not failed."""

    code: str
    message: str
    param: str | None = None


class UrlCitationFields(Struct, frozen=True, kw_only=True, tag_field="type", tag="url_citation"):
    """A web page that an answer is taken from: the text from ``start_index`` to ``end_index``, in characters."""

    title: str
    url: str
    start_index: int
    end_index: int
    license: str | UnsetType = UNSET


class OutputChunkFrame(_ServerFrame, frozen=True, kw_only=True, tag="output_chunk"):
    """A piece of the answer or, with ``final``, its end."""

    request_id: str
    sequence_id: int
    modality: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    # Of a tool call: ``index`` is in each piece, ``id`` and ``name`` in the first; ``arguments`` are to be
    # concatenated.
    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    payload: bytes | UnsetType = UNSET
    format: str | UnsetType = UNSET
    sample_rate: int | UnsetType = UNSET
    start_ms: int | UnsetType = UNSET
    interim: bool | UnsetType = UNSET
    # Of a transcript: that it follows the final of its request, with words that were recognised after it.
    late: bool | UnsetType = UNSET
    # Of a settled transcript: the language that was detected in the speech (RFC 5646).
    language: str | UnsetType = UNSET
    words: list[WordTime] | UnsetType = UNSET
    final: bool | UnsetType = UNSET
    finish_reason: str | UnsetType = UNSET
    usage: UsageFields | UnsetType = UNSET
    # Of a final: the deviations from what was asked.
    warnings: list[WarningFields] | UnsetType = UNSET
    # Of a final: the pages that the answer is taken from.
    annotations: list[UrlCitationFields] | UnsetType = UNSET
    # ``ref`` is in finals: the client's name for the request. ``turn_id`` is in finals and transcripts: the speech
    # turn.
    ref: str | UnsetType = UNSET
    turn_id: str | UnsetType = UNSET
    # Of a final: milliseconds from the end of the speech (without speech, of the input) to each step of the answer.
    times: dict[str, int] | UnsetType = UNSET


class _TextFrame(Struct, frozen=True, tag_field="type", tag="output_chunk"):
    """An OutputChunkFrame with text only.

    It is encoded in half the time of an OutputChunkFrame; nearly all frames are of this class or an _AudioFrame.
    """

    request_id: str
    sequence_id: int
    modality: str
    text: str


class _AudioFrame(Struct, frozen=True, tag_field="type", tag="output_chunk"):
    """An OutputChunkFrame with audio that has no word times."""

    request_id: str
    sequence_id: int
    modality: str
    payload: bytes
    format: str
    sample_rate: int
    start_ms: int


class ErrorFields(Struct, frozen=True, kw_only=True):
    """What went wrong."""

    code: str
    message: str
    param: str | None = None
    sequence_id: int | None = None
    request_id: str | None = None
    retryable: bool = False
    retry_after_ms: int | None = None
    ref: str | UnsetType = UNSET


class ErrorFrame(_ServerFrame, frozen=True, kw_only=True, tag="error"):
    """An error of a chunk, of a request, or of the session."""

    error: ErrorFields


class SessionClosingFrame(_ServerFrame, frozen=True, kw_only=True, tag="session_closing"):
    """The server will close the session in ``time_left_ms``.

    ``resume`` is ``now`` if the session was handed over: its client resumes it at once, at another server.
    """

    reason: str
    retryable: bool
    time_left_ms: int
    resume: str | UnsetType = UNSET


class PongFrame(_ServerFrame, frozen=True, kw_only=True, tag="pong"):
    """The answer to a ping."""

    t: Any
    server_time_ms: int


ServerFrame: TypeAlias = (
    SessionCreatedFrame
    | SessionResumedFrame
    | SessionUpdatedFrame
    | InputAckFrame
    | ResponseStartedFrame
    | OutputChunkFrame
    | HistoryTruncatedFrame
    | HistoryItemsFrame
    | SpeechStartedFrame
    | SpeechConfirmedFrame
    | SpeechDismissedFrame
    | SpeechStoppedFrame
    | BackchannelFrame
    | ErrorFrame
    | SessionClosingFrame
    | PongFrame
)
SERVER_FRAMES: Final[tuple[type[Struct], ...]] = get_args(ServerFrame)

_encoder: Final = msgspec.json.Encoder()
_decoder: Final[msgspec.json.Decoder[ServerFrame]] = msgspec.json.Decoder(ServerFrame)


def encode_frame(frame: ServerFrame) -> bytes:
    """Encode a frame as JSON, with bytes as base64."""
    return _encoder.encode(frame)


def encode_output(chunk: OutputChunk) -> bytes:
    """Encode an output as the JSON of its frame, with audio as base64."""
    if not chunk.words:
        if chunk.modality is OutputModality.TEXT:
            return _encoder.encode(_TextFrame(chunk.request_id, chunk.sequence_id, "text", chunk.text))
        if chunk.modality is OutputModality.AUDIO and chunk.format is not None and chunk.start_ms is not None:
            return _encoder.encode(
                _AudioFrame(
                    chunk.request_id,
                    chunk.sequence_id,
                    "audio",
                    chunk.payload,
                    chunk.format.encoding,
                    chunk.format.sample_rate,
                    chunk.start_ms,
                )
            )
    return _encoder.encode(_output_frame(chunk))


def _output_frame(chunk: OutputChunk) -> OutputChunkFrame:
    fields: dict[str, Any] = {}
    if chunk.modality is OutputModality.AUDIO:
        fields["payload"] = chunk.payload
        if chunk.format is not None:
            fields["format"] = chunk.format.encoding
            fields["sample_rate"] = chunk.format.sample_rate
    elif (call := chunk.tool_call) is not None:
        fields["index"] = call.index
        fields["arguments"] = call.arguments
        if call.id is not None:
            fields["id"] = call.id
        if call.name is not None:
            fields["name"] = call.name
    else:
        fields["text"] = chunk.text
    if chunk.start_ms is not None:
        fields["start_ms"] = chunk.start_ms
    if chunk.interim:
        fields["interim"] = True
    if chunk.late:
        fields["late"] = True
    if chunk.turn_id is not None:
        fields["turn_id"] = chunk.turn_id
    if (language := heard_language(chunk.hearing)) is not None:
        fields["language"] = language
    if chunk.words:
        fields["words"] = [WordTime(word.text, word.start_ms, word.end_ms) for word in chunk.words]
    return OutputChunkFrame(
        request_id=chunk.request_id, sequence_id=chunk.sequence_id, modality=chunk.modality, **fields
    )


def unset(value: T | None) -> T | UnsetType:
    """Return ``value``; for None, UNSET, so that the frame omits the field."""
    return UNSET if value is None else value


def decode_server_frame(data: bytes | str) -> ServerFrame:
    """Decode a frame of the server, for clients. Raises InvalidFrame."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidFrame(str(error)) from None


def error_frame(error: OmniError) -> ErrorFrame:
    """Return the frame that reports ``error``."""
    return ErrorFrame(
        error=ErrorFields(
            code=error.code,
            message=error.message,
            param=error.param,
            sequence_id=error.sequence_id,
            request_id=error.request_id,
            retryable=error.wire.retryable,
            retry_after_ms=error.retry_after_ms,
            ref=unset(error.ref),
        )
    )


# Server-sent events

DONE: Final = b"data: [DONE]\n\n"
#: A comment, which clients ignore, and which keeps proxies from timing out. Between events with ids it is a line before
#: the next event: some readers apply an id to every later event, and would take an empty line for an event without
#: data.
HEARTBEAT: Final = b": keep-alive\n"
#: The same as a block of its own, for readers that look at the text between empty lines.
HEARTBEAT_BLOCK: Final = HEARTBEAT + b"\n"


def event(data: Any, *, name: str | None = None) -> bytes:
    """Encode a server-sent event; ``data`` is a JSON object, or its encoded bytes.

    Only errors have a ``name``.
    """
    line = b"data: %b\n\n" % (data if type(data) is bytes else orjson.dumps(data))
    return line if name is None else b"event: %b\n%b" % (name.encode(), line)

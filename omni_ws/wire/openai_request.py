"""Request bodies of ``/v1/chat/completions`` and ``/v1/audio/speech``.

Unknown fields are ignored. A known field with a value that the server cannot honour is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct

from omni_ws.core.chunks import InputChunk
from omni_ws.errors import EmptyInput, InvalidValue, UnsupportedParameter
from omni_ws.wire.openai_fields import (
    NEVER_AVAILABLE,
    CommonBody,
    ConfigurationPatch,
    StreamOptions,
    configuration_patch,
    convert_body,
    object_field,
    refuse_unavailable,
    usage_places,
)
from omni_ws.wire.openai_media import MEDIA_FIELDS, NamedMedia, audio_encoding, read_media
from omni_ws.wire.openai_media_limits import MediaLimitFields
from omni_ws.wire.openai_messages import HistoryMessage, Messages, read_messages
from omni_ws.wire.openai_options import (
    MAX_TOP_LOGPROBS,
    AnswerFields,
    Choices,
    Priority,
    ResponseFormatBody,
    Word,
    answer_form,
    chat_logprobs,
    template_arguments,
    upstream_fields,
    with_format_hint,
)

#: Fields that speech does not support: besides those of all routes, chat fields that do not apply to reading aloud.
_NOT_AVAILABLE_IN_SPEECH: Final[Mapping[str, tuple[Any, ...]]] = {
    **NEVER_AVAILABLE,
    "logit_bias": ({},),
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    **dict.fromkeys(MEDIA_FIELDS, ([],)),
    **dict.fromkeys(MediaLimitFields.__struct_fields__, ()),
}


class AudioOptions(Struct, frozen=True, kw_only=True):
    """OpenAI's ``audio``."""

    voice: str | None = None
    format: str | None = None


class ChatBody(CommonBody, frozen=True, kw_only=True):
    """The fields of a chat body that are validated one by one; the others are those of ``session_config``."""

    messages: list[dict[str, Any]] | None = None
    modalities: list[Literal["text", "audio"]] | None = None
    audio: AudioOptions | None = None
    stream_options: StreamOptions | None = None
    usage_on_final_chunk: bool | None = None
    input_transcript: bool | None = None
    n: Choices | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    response_format: ResponseFormatBody | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    priority: Priority | None = None
    reasoning_effort: Word | None = None
    verbosity: Word | None = None
    service_tier: Word | None = None


class SpeechBody(CommonBody, frozen=True, kw_only=True):
    """The fields of a speech body that are validated one by one."""

    input: str | None = None
    voice: str | dict[str, Any] | None = None
    response_format: str | None = None
    speed: float | None = None
    stream_format: Literal["sse", "audio"] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A parsed chat body.

    ``input`` holds the media and the content of the last message, in order. ``stream`` is None where the body does not
    set it. For ``role``, ``role_at`` and ``tools_at`` see ``Messages``.
    """

    patch: ConfigurationPatch
    answer: AnswerFields = field(default_factory=AnswerFields)
    history: tuple[HistoryMessage, ...] = ()
    input: tuple[InputChunk | NamedMedia, ...] = ()
    role: str = "user"
    role_at: str | None = None
    tools_at: str | None = None
    stream: bool | None = None
    request_id: str | None = None
    wants_text: bool = True
    wants_audio: bool = False
    include_usage: bool = False
    usage_on_final_chunk: bool = False
    input_transcript: bool = True


class SpeechDialect(Enum):
    """The form of a ``/v1/audio/speech`` response.

    - WHOLE: one audio file.
    - RAW: audio bytes as they are produced.
    - EVENTS: OpenAI's typed server-sent events.
    - CHUNKS: ``audio.speech.chunk`` objects as server-sent events.
    """

    WHOLE = "whole"
    RAW = "raw"
    EVENTS = "events"
    CHUNKS = "chunks"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechRequest:
    """A parsed speech body. ``text`` is None where chunks bring it; ``response_format`` is as the client named it."""

    patch: ConfigurationPatch
    text: str | None
    dialect: SpeechDialect
    response_format: str
    request_id: str | None = None


def chat_wants_events(body: Mapping[str, Any]) -> bool:
    """Whether a chat body, valid or not, asks for server-sent events: errors take the same form."""
    return body.get("stream") is True


def speech_wants_events(body: Mapping[str, Any]) -> bool:
    """Whether a speech body, valid or not, asks for server-sent events."""
    wanted = body.get("stream_format")
    return wanted == "sse" or (wanted is None and body.get("stream") is True)


def read_chat(body: Mapping[str, Any], *, input_follows: bool) -> ChatRequest:
    """Parse a chat body; with ``input_follows`` (streaming input) the messages are history and chunks bring the input.

    Raises InvalidValue, UnsupportedParameter or UnsupportedFormat, naming the field.
    """
    refuse_unavailable(body, NEVER_AVAILABLE)
    try:
        fields = convert_body(body, ChatBody)
    except InvalidValue as error:
        raise with_format_hint(error) from None
    brought = next((name for name in MEDIA_FIELDS if body.get(name)), "messages")
    patch = configuration_patch(body, fields, input_field=None if input_follows else brought)
    audio = fields.audio or AudioOptions()
    wants_audio = fields.modalities is not None and "audio" in fields.modalities
    if fields.modalities == []:
        raise InvalidValue("modalities must have at least one of text and audio", param="modalities")
    # Text is always generated: a spoken answer has it as its transcript.
    patch.fields["modalities"] = ["text", "audio"] if wants_audio else ["text"]
    if audio.voice is not None:
        patch.fields["voice"] = audio.voice
        patch.names["voice"] = "audio.voice"
    if wants_audio:
        streamed = input_follows if fields.stream is None else fields.stream
        _set_output_format(patch, body, audio.format, param="audio.format", default="pcm" if streamed else "wav")
    messages = read_messages(fields.messages or [], input_follows=input_follows)
    media = tuple(read_media(body))
    _check_media_place(media, messages, input_follows=input_follows)
    if messages.system:
        own = patch.fields.get("instructions")
        if own is not None and not isinstance(own, str):
            raise InvalidValue("instructions must be a string", param="instructions")
        patch.fields["instructions"] = "\n\n".join([*messages.system, *filter(None, [own])])
    own_chunk, final_chunk = usage_places(fields.stream_options, on_final_chunk=fields.usage_on_final_chunk)
    return ChatRequest(
        patch=patch,
        answer=_answer_fields(fields, convert_body(body, MediaLimitFields), wants_audio=wants_audio),
        history=messages.history,
        input=(*media, *messages.input),
        role=messages.role,
        role_at=messages.role_at,
        tools_at=messages.tools_at,
        stream=fields.stream,
        request_id=fields.request_id,
        wants_text=fields.modalities is None or "text" in fields.modalities,
        wants_audio=wants_audio,
        include_usage=own_chunk,
        usage_on_final_chunk=final_chunk,
        input_transcript=fields.input_transcript is not False,
    )


def _answer_fields(fields: ChatBody, limits: MediaLimitFields, *, wants_audio: bool) -> AnswerFields:
    choices = fields.n or 1
    if choices > 1 and wants_audio:
        raise UnsupportedParameter("n must be 1 for audio output", param="n")
    return AnswerFields(
        choices=choices,
        logprobs=chat_logprobs(fields.logprobs, fields.top_logprobs),
        form=answer_form(fields.response_format),
        priority=fields.priority or 0,
        parallel_tool_calls=fields.parallel_tool_calls is not False,
        template_arguments=template_arguments(fields.chat_template_kwargs),
        media_limits=limits.given,
        upstream=upstream_fields(fields),
    )


def _check_media_place(media: tuple[InputChunk | NamedMedia, ...], messages: Messages, *, input_follows: bool) -> None:
    """Check that media belong to a message of the user that this body contains."""
    if not media:
        return
    first = media[0]
    name = next(name for name, modality in MEDIA_FIELDS.items() if modality is first.modality)
    if input_follows:
        raise UnsupportedParameter(f"{name} is not supported in a streamed body; send the media as chunks", param=name)
    if messages.role != "user" or any(
        isinstance(item, InputChunk) and item.tool_call_id is not None for item in messages.input
    ):
        raise InvalidValue(f"{name} requires a last message with role user", param=name)


def read_speech(body: Mapping[str, Any], *, input_follows: bool) -> SpeechRequest:
    """Parse a speech body. Raises as ``read_chat`` does, and EmptyInput for blank text."""
    refuse_unavailable(body, _NOT_AVAILABLE_IN_SPEECH)
    fields = convert_body(body, SpeechBody)
    if input_follows and fields.input:
        raise InvalidValue("input is not allowed in a streamed body; send the text as chunks", param="input")
    if not input_follows and fields.input is None:
        raise InvalidValue("input is required: the text to speak", param="input")
    if not input_follows and not (fields.input or "").strip():
        raise EmptyInput("input is empty", param="input")
    dialect = _dialect(fields, input_follows=input_follows)
    default = "mp3" if dialect is SpeechDialect.WHOLE else "pcm"
    patch = configuration_patch(body, fields, input_field=None if input_follows else "input")
    patch.fields.update({"task": "speech", "modalities": ["audio"], "voice": fields.voice})
    if isinstance(fields.voice, dict):
        patch.fields["voice"] = fields.voice.get("id")
        patch.names["voice"] = "voice.id"
    return SpeechRequest(
        patch=patch,
        text=fields.input,
        dialect=dialect,
        request_id=fields.request_id,
        response_format=_set_output_format(
            patch, body, fields.response_format, param="response_format", default=default
        ),
    )


def _dialect(fields: SpeechBody, *, input_follows: bool) -> SpeechDialect:
    if fields.stream_format == "sse":
        return SpeechDialect.EVENTS
    if fields.stream_format == "audio":
        return SpeechDialect.RAW
    if fields.stream:
        return SpeechDialect.CHUNKS
    return SpeechDialect.RAW if input_follows and fields.stream is None else SpeechDialect.WHOLE


def _set_output_format(
    patch: ConfigurationPatch, body: Mapping[str, Any], wanted: str | None, *, param: str, default: str
) -> str:
    """Set and return the format of the audio: ``wanted``, else that of ``output_audio``, else the default.

    ``param`` is the name of the field that ``wanted`` is from.
    """
    group = object_field(body, "output_audio")
    if wanted is not None:
        group = {**group, "format": audio_encoding(wanted, param).value}
        patch.names["output_audio.format"] = param
    patch.fields["output_audio"] = {"format": audio_encoding(default, param).value, **group}
    return wanted or group.get("format") or default

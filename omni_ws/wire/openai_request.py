"""Bodies of the OpenAI-compatible routes, read into what the rest of the server speaks of.

Unknown fields are ignored; a known field that cannot be honoured here is refused by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from omni_ws.core.chunks import InputChunk
from omni_ws.errors import EmptyInput, InvalidValue, UnsupportedParameter
from omni_ws.wire.openai_messages import HistoryMessage, audio_encoding, read_messages
from omni_ws.wire.session_config import FIELDS, SamplingConfig, invalid_value

Body = TypeVar("Body", bound=Struct)

#: Fields of OpenAI's bodies, and of ours, that no engine of this version can honour, unless they say nothing.
_NOT_AVAILABLE: Final[Mapping[str, tuple[Any, ...]]] = {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "prediction": (),
    "web_search_options": (),
    "images": ([],),
    "audios": ([],),
    "videos": ([],),
    "video_fps": (),
    "video_min_frames": (),
    "video_max_frames": (),
    "video_min_pixels": (),
    "video_max_pixels": (),
    "video_total_pixels": (),
    "image_min_pixels": (),
    "image_max_pixels": (),
}
#: The same of chat alone: a field of this name is the audio format of a speech body.
_NOT_AVAILABLE_IN_CHAT: Final = {**_NOT_AVAILABLE, "response_format": ({"type": "text"},)}

#: The fields of a body that are ``stage_sampling.talker``, and their names there.
_TALKER_SAMPLING: Final = {
    f"talker_{name}": name for name in ("temperature", "top_p", "top_k", "repetition_penalty", "max_tokens", "seed")
}

#: Values that say nothing; clients send them to engines that do not know the parameter.
_NEUTRAL_SAMPLING: Final = {
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "min_p": 0,
    "top_k": -1,
}


class StreamOptions(Struct, frozen=True, kw_only=True):
    include_usage: bool | None = None


class AudioOptions(Struct, frozen=True, kw_only=True):
    voice: str | None = None
    format: str | None = None


class _Common(Struct, frozen=True, kw_only=True):
    stream: bool | None = None
    model: str | None = None
    request_id: Annotated[str, Meta(max_length=128)] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None


class ChatBody(_Common, frozen=True, kw_only=True):
    """The fields of a chat body that are looked at one by one; the rest is that of ``session_config``."""

    messages: list[dict[str, Any]] | None = None
    modalities: list[Literal["text", "audio"]] | None = None
    audio: AudioOptions | None = None
    stream_options: StreamOptions | None = None
    usage_on_final_chunk: bool | None = None
    input_transcript: bool | None = None


class SpeechBody(_Common, frozen=True, kw_only=True):
    input: str | None = None
    voice: str | dict[str, Any] | None = None
    response_format: str | None = None
    speed: float | None = None
    stream_format: Literal["sse", "audio"] | None = None


@dataclass(frozen=True, slots=True)
class ConfigurationPatch:
    """``fields`` are those of ``session_config``; ``names`` says what the body calls those that it calls otherwise."""

    fields: dict[str, Any]
    names: dict[str, str] = field(default_factory=dict)

    def name_in_body(self, param: str | None) -> str | None:
        """What an error's ``param`` is called in the body: ``sampling.stop[0]`` is ``stop[0]`` there."""
        for ours, theirs in self.names.items():
            if param is not None and (param == ours or param.startswith((f"{ours}.", f"{ours}["))):
                return theirs + param.removeprefix(ours)
        return param


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """``input`` holds the parts of the last user message, in order. ``stream`` is None where the body does not say."""

    patch: ConfigurationPatch
    history: tuple[HistoryMessage, ...] = ()
    input: tuple[InputChunk, ...] = ()
    stream: bool | None = None
    request_id: str | None = None
    wants_text: bool = True
    wants_audio: bool = False
    include_usage: bool = False
    usage_on_final_chunk: bool = False
    input_transcript: bool = True


class SpeechDialect(Enum):
    """How ``/v1/audio/speech`` gives its answer: as one file, as bare bytes, or as one of two kinds of events."""

    WHOLE = "whole"
    RAW = "raw"
    EVENTS = "events"
    CHUNKS = "chunks"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechRequest:
    patch: ConfigurationPatch
    text: str | None
    dialect: SpeechDialect
    response_format: str


def chat_wants_events(body: Mapping[str, Any]) -> bool:
    """Whether an ordinary body, right or wrong otherwise, asks for an answer in events."""
    return body.get("stream") is True


def speech_wants_events(body: Mapping[str, Any]) -> bool:
    """As ``chat_wants_events``."""
    wanted = body.get("stream_format")
    return wanted == "sse" or (wanted is None and body.get("stream") is True)


def read_chat(body: Mapping[str, Any], *, input_follows: bool) -> ChatRequest:
    """A chat body. With ``input_follows`` (streaming input) the messages are history and chunks bring the input.

    Raises InvalidValue, UnsupportedParameter or UnsupportedFormat, naming the field.
    """
    _refuse_unavailable(body, _NOT_AVAILABLE_IN_CHAT)
    fields = _convert(body, ChatBody)
    patch = _patch(body, fields)
    audio = fields.audio or AudioOptions()
    wants_audio = fields.modalities is not None and "audio" in fields.modalities
    if fields.modalities == []:
        raise InvalidValue("name at least one of text and audio", param="modalities")
    # The text of a spoken answer goes out as its transcript, so it is always made.
    patch.fields["modalities"] = ["text", "audio"] if wants_audio else ["text"]
    if audio.voice is not None:
        patch.fields["voice"] = audio.voice
        patch.names["voice"] = "audio.voice"
    if wants_audio:
        streamed = input_follows if fields.stream is None else fields.stream
        _set_output_format(patch, body, audio.format, param="audio.format", default="pcm" if streamed else "wav")
    messages = read_messages(fields.messages or [], input_follows=input_follows)
    if messages.system:
        own = patch.fields.get("instructions")
        if own is not None and not isinstance(own, str):
            raise InvalidValue("instructions are a text", param="instructions")
        patch.fields["instructions"] = "\n\n".join([*messages.system, *filter(None, [own])])
    options = fields.stream_options or StreamOptions()
    return ChatRequest(
        patch=patch,
        history=messages.history,
        input=messages.input,
        stream=fields.stream,
        request_id=fields.request_id,
        wants_text=fields.modalities is None or "text" in fields.modalities,
        wants_audio=wants_audio,
        include_usage=options.include_usage is True,
        usage_on_final_chunk=fields.usage_on_final_chunk is True,
        input_transcript=fields.input_transcript is not False,
    )


def read_speech(body: Mapping[str, Any], *, input_follows: bool) -> SpeechRequest:
    """A speech body; raises as ``read_chat`` does, and EmptyInput where there is nothing to say."""
    _refuse_unavailable(body, _NOT_AVAILABLE)
    fields = _convert(body, SpeechBody)
    if fields.speed not in (None, 1):
        raise UnsupportedParameter("this engine speaks at its own speed only", param="speed")
    if input_follows and fields.input:
        raise InvalidValue("the text comes as chunks", param="input")
    if not input_follows and fields.input is None:
        raise InvalidValue("input is the text to speak", param="input")
    if not input_follows and not (fields.input or "").strip():
        raise EmptyInput("there is nothing to speak", param="input")
    dialect = _dialect(fields, input_follows=input_follows)
    default = "mp3" if dialect is SpeechDialect.WHOLE else "pcm"
    patch = _patch(body, fields)
    patch.fields.update({"task": "speech", "modalities": ["audio"], "voice": fields.voice})
    if isinstance(fields.voice, dict):
        patch.fields["voice"] = fields.voice.get("id")
        patch.names["voice"] = "voice.id"
    return SpeechRequest(
        patch=patch,
        text=fields.input,
        dialect=dialect,
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


def _convert(body: Mapping[str, Any], kind: type[Body]) -> Body:
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise invalid_value(error) from None


def _refuse_unavailable(body: Mapping[str, Any], unavailable: Mapping[str, tuple[Any, ...]]) -> None:
    for name, harmless in unavailable.items():
        value = body.get(name)
        if value is not None and not any(value == one and type(value) is type(one) for one in harmless):
            raise UnsupportedParameter(f"{name} is not available here", param=name)


def _patch(body: Mapping[str, Any], fields: _Common) -> ConfigurationPatch:
    """The ``session_config`` fields of a body, those that OpenAI keeps at the top level among them."""
    patch = {name: body[name] for name in FIELDS if name in body}
    patch.pop("max_lead_ms", None)  # answers over HTTP are never paced
    names = {name: name for name in SamplingConfig.__struct_fields__ if body.get(name) is not None}
    sampling = {name: body[name] for name in names}
    # 0 means "not given" to the clients that send it.
    limit = fields.max_completion_tokens or fields.max_tokens
    sampling.pop("max_tokens", None)
    if limit:
        sampling["max_tokens"] = limit
        names["max_tokens"] = "max_completion_tokens" if fields.max_completion_tokens else "max_tokens"
    for name, neutral in _NEUTRAL_SAMPLING.items():
        if sampling.get(name) == neutral and type(sampling[name]) in (int, float):
            del sampling[name]
    patch["sampling"] = {**_group(body, "sampling"), **sampling}
    talker = {field: name for field, name in _TALKER_SAMPLING.items() if body.get(field) is not None}
    if talker:
        stages = _group(patch, "stage_sampling")
        given = {name: body[field] for field, name in talker.items()}
        patch["stage_sampling"] = {**stages, "talker": {**_group(stages, "talker"), **given}}
    fields_of = {f"sampling.{ours}": theirs for ours, theirs in names.items()}
    fields_of |= {f"stage_sampling.talker.{ours}": theirs for theirs, ours in talker.items()}
    return ConfigurationPatch(patch, fields_of)


def _set_output_format(
    patch: ConfigurationPatch, body: Mapping[str, Any], wanted: str | None, *, param: str, default: str
) -> str:
    """The format that the body names as OpenAI does, else that of its ``output_audio``, else ``default``."""
    group = _group(body, "output_audio")
    if wanted is not None:
        group = {**group, "format": audio_encoding(wanted, param).value}
        patch.names["output_audio.format"] = param
    patch.fields["output_audio"] = {"format": audio_encoding(default, param).value, **group}
    return wanted or group.get("format") or default


def _group(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = body.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise InvalidValue(f"{name} is an object", param=name)
    return value or {}

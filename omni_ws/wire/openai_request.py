"""Bodies of the OpenAI-compatible routes, read into what the rest of the server speaks of.

Unknown fields are ignored; a known field that cannot be honoured here is refused by its name.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from omni_ws.core.audio_format import AudioEncoding
from omni_ws.core.chunks import InputChunk, Modality
from omni_ws.errors import InvalidValue, UnsupportedFormat, UnsupportedParameter
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

#: What OpenAI calls an audio format, and what it is here.
_AUDIO_FORMATS: Final = {
    "pcm": AudioEncoding.PCM16,
    "g711_ulaw": AudioEncoding.PCMU,
    "g711_alaw": AudioEncoding.PCMA,
    "ogg": AudioEncoding.OGG,
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
class HistoryMessage:
    role: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """``patch`` holds the ``session_config`` fields; ``input`` the parts of the last user message, in order.

    ``stream`` is None where the body does not say.
    """

    patch: dict[str, Any]
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
    patch: dict[str, Any]
    text: str | None
    dialect: SpeechDialect
    encoding: AudioEncoding
    response_format: str


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
    patch["modalities"] = ["text", "audio"] if wants_audio else ["text"]
    if audio.voice is not None:
        patch["voice"] = audio.voice
    if wants_audio:
        fallback = AudioEncoding.WAV if fields.stream is False or not (fields.stream or input_follows) else None
        encoding = _encoding(audio.format, "audio.format") if audio.format else (fallback or AudioEncoding.PCM16)
        patch["output_audio"] = {"format": encoding.value, **_mapping(body.get("output_audio"))}
    system, history, last = _split_messages(fields.messages or [], input_follows=input_follows)
    if system:
        patch["instructions"] = "\n\n".join([*system, *filter(None, [patch.get("instructions")])])
    if last is None and not input_follows:
        raise InvalidValue("messages must hold at least one message", param="messages")
    options = fields.stream_options or StreamOptions()
    return ChatRequest(
        patch=patch,
        history=history,
        input=() if last is None else tuple(_content_chunks(last.content, last.place)),
        stream=fields.stream,
        request_id=fields.request_id,
        wants_text=fields.modalities is None or "text" in fields.modalities,
        wants_audio=wants_audio,
        include_usage=options.include_usage is True,
        usage_on_final_chunk=fields.usage_on_final_chunk is True,
        input_transcript=fields.input_transcript is not False,
    )


def read_speech(body: Mapping[str, Any], *, input_follows: bool) -> SpeechRequest:
    """A speech body; raises as ``read_chat`` does."""
    _refuse_unavailable(body, _NOT_AVAILABLE)
    fields = _convert(body, SpeechBody)
    if fields.speed not in (None, 1):
        raise UnsupportedParameter("this engine speaks at its own speed only", param="speed")
    if not input_follows and not (fields.input or "").strip():
        raise InvalidValue("input is the text to speak", param="input")
    if fields.stream_format == "sse":
        dialect = SpeechDialect.EVENTS
    elif fields.stream and fields.stream_format is None:
        dialect = SpeechDialect.CHUNKS
    elif fields.stream_format == "audio" or input_follows:
        dialect = SpeechDialect.RAW
    else:
        dialect = SpeechDialect.WHOLE
    response_format = fields.response_format or ("mp3" if dialect is SpeechDialect.WHOLE else "pcm")
    encoding = _encoding(response_format, "response_format")
    patch = _patch(body, fields)
    voice = fields.voice.get("id") if isinstance(fields.voice, dict) else fields.voice
    patch |= {"task": "speech", "modalities": ["audio"], "voice": voice}
    patch["output_audio"] = {"format": encoding.value, **_mapping(body.get("output_audio"))}
    return SpeechRequest(
        patch=patch,
        text=fields.input,
        dialect=dialect,
        encoding=encoding,
        response_format=response_format,
    )


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


def _patch(body: Mapping[str, Any], fields: _Common) -> dict[str, Any]:
    """The ``session_config`` fields of a body, those that OpenAI keeps at the top level among them."""
    patch = {name: body[name] for name in FIELDS if name in body}
    sampling = {name: body[name] for name in SamplingConfig.__struct_fields__ if body.get(name) is not None}
    # 0 means "not given" to the clients that send it.
    limit = fields.max_completion_tokens or fields.max_tokens
    sampling.pop("max_tokens", None)
    if limit is not None and limit != 0:
        sampling["max_tokens"] = limit
    patch["sampling"] = {**_mapping(body.get("sampling")), **sampling}
    for penalty in ("presence_penalty", "frequency_penalty"):
        if patch["sampling"].get(penalty) == 0:
            del patch["sampling"][penalty]
    talker = {name: body[field] for field, name in _TALKER_SAMPLING.items() if body.get(field) is not None}
    if talker:
        stages = _mapping(patch.get("stage_sampling"))
        patch["stage_sampling"] = {**stages, "talker": {**_mapping(stages.get("talker")), **talker}}
    return patch


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _encoding(name: str, param: str) -> AudioEncoding:
    try:
        return _AUDIO_FORMATS.get(name) or AudioEncoding(name)
    except ValueError:
        raise UnsupportedFormat(f"audio in {name[:32]!r} is not served here", param=param) from None


# --- messages


@dataclass(frozen=True, slots=True)
class _UserMessage:
    content: Any
    place: str


def _split_messages(
    messages: list[dict[str, Any]], *, input_follows: bool
) -> tuple[list[str], tuple[HistoryMessage, ...], _UserMessage | None]:
    """System texts, earlier messages, and the last one, which is the input unless that follows as chunks."""
    system: list[str] = []
    history: list[HistoryMessage] = []
    last: _UserMessage | None = None
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        role, content = message.get("role"), message.get("content")
        if role in ("system", "developer"):
            system.append(_text(content, place))
        elif role in ("user", "assistant"):
            if role == "user" and index == len(messages) - 1 and not input_follows:
                last = _UserMessage(content, place)
            else:
                history.append(HistoryMessage(role, _text(content, place, optional=role == "assistant")))
        elif role in ("tool", "function"):
            raise UnsupportedParameter("this engine has no tools", param=f"{place}.role")
        else:
            raise InvalidValue("role is one of system, developer, user and assistant", param=f"{place}.role")
    if messages and last is None and not input_follows:
        raise InvalidValue("the last message must be the user's", param=f"messages[{len(messages) - 1}].role")
    return system, tuple(history), last


def _text(content: Any, place: str, *, optional: bool = False) -> str:
    """The text of a message that is not the input: anything else in it would be lost without a word."""
    if content is None and optional:
        return ""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise InvalidValue("content is a text or a list of parts", param=f"{place}.content")
    texts: list[str] = []
    for index, part in enumerate(parts):
        where = f"{place}.content[{index}]"
        if not isinstance(part, Mapping) or part.get("type") not in ("text", "input_text", "output_text"):
            raise UnsupportedParameter("only the last message may hold anything but text", param=where)
        texts.append(_string(part, "text", where))
    return "".join(texts)


def _content_chunks(content: Any, place: str) -> Iterable[InputChunk]:
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise InvalidValue("content is a text or a list of parts", param=f"{place}.content")
    for index, part in enumerate(parts):
        where = f"{place}.content[{index}]"
        if not isinstance(part, Mapping):
            raise InvalidValue("a part is an object", param=where)
        yield _part_chunk(part, where)


def _part_chunk(part: Mapping[str, Any], where: str) -> InputChunk:
    match part.get("type"):
        case "text" | "input_text":
            return InputChunk(Modality.TEXT, _string(part, "text", where).encode("utf-8", "surrogatepass"))
        case "input_audio":
            audio = _object(part, "input_audio", where)
            name = audio.get("format", "wav")
            encoding = _encoding(name, f"{where}.input_audio.format") if isinstance(name, str) else None
            if encoding is None:
                raise InvalidValue("format is a string", param=f"{where}.input_audio.format")
            data = _string(audio, "data", f"{where}.input_audio")
            return InputChunk(Modality.AUDIO, _base64(data, f"{where}.input_audio.data"), format=encoding.value)
        case "image_url" | "video_url" as kind:
            url = part.get(kind)
            if isinstance(url, Mapping):
                url = url.get("url")
            modality = Modality.IMAGE if kind == "image_url" else Modality.VIDEO
            return _data_url(url, modality, f"{where}.{kind}.url")
        case other:
            raise InvalidValue(f"unknown part type {str(other)[:64]!r}", param=f"{where}.type")


def _data_url(url: Any, modality: Modality, where: str) -> InputChunk:
    if not isinstance(url, str):
        raise InvalidValue("url is a string", param=where)
    if not url.startswith("data:"):
        raise UnsupportedParameter("nothing is fetched from elsewhere; send a data: URL", param=where)
    head, comma, data = url.removeprefix("data:").partition(",")
    mime, *attributes = head.split(";")
    if not comma or "base64" not in attributes:
        raise InvalidValue("a data: URL in base64 is needed", param=where)
    if not mime.startswith(f"{modality}/"):
        raise UnsupportedFormat(f"{mime[:64]!r} is no {modality}", param=where)
    return InputChunk(modality, _base64(data, where), format=mime)


def _string(part: Mapping[str, Any], name: str, where: str) -> str:
    value = part.get(name)
    if not isinstance(value, str):
        raise InvalidValue(f"{name} is a string", param=f"{where}.{name}")
    return value


def _object(part: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    value = part.get(name)
    if not isinstance(value, Mapping):
        raise InvalidValue(f"{name} is an object", param=f"{where}.{name}")
    return value


def _base64(data: str, where: str) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidValue("not base64", param=where) from None

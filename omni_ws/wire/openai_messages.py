"""The messages of a chat body: instructions, earlier turns, and the last user message, which is the input."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from omni_ws.core.audio_format import AudioEncoding
from omni_ws.core.chunks import InputChunk, Modality
from omni_ws.errors import InvalidValue, UnsupportedFormat, UnsupportedParameter

#: What OpenAI calls an audio format, and what it is here.
_AUDIO_FORMATS: Final = {
    "pcm": AudioEncoding.PCM16,
    "g711_ulaw": AudioEncoding.PCMU,
    "g711_alaw": AudioEncoding.PCMA,
}
#: Of an earlier assistant message: what would be lost without a word.
_LOST: Final = ("tool_calls", "function_call", "audio")


@dataclass(frozen=True, slots=True)
class HistoryMessage:
    role: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """``input`` holds the parts of the last user message, in order."""

    system: tuple[str, ...]
    history: tuple[HistoryMessage, ...]
    input: tuple[InputChunk, ...]


def read_messages(messages: list[dict[str, Any]], *, input_follows: bool) -> Messages:
    """With ``input_follows`` all messages are earlier ones. Raises InvalidValue, UnsupportedParameter or
    UnsupportedFormat, naming the place."""
    if not messages and not input_follows:
        raise InvalidValue("messages must hold at least one message", param="messages")
    system: list[str] = []
    history: list[HistoryMessage] = []
    chunks: tuple[InputChunk, ...] = ()
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        last = index == len(messages) - 1 and not input_follows
        role, content = message.get("role"), message.get("content")
        match role:
            case "user" if last:
                chunks = tuple(_content_chunks(content, place))
            case "system" | "developer" | "user" | "assistant" if last:
                raise InvalidValue("the last message must be the user's", param=f"{place}.role")
            case "system" | "developer":
                system.append(_text(content, place))
            case "user":
                history.append(HistoryMessage("user", _text(content, place)))
            case "assistant":
                _refuse_lost(message, place)
                history.append(HistoryMessage("assistant", "" if content is None else _text(content, place)))
            case "tool" | "function":
                raise UnsupportedParameter("this engine has no tools", param=f"{place}.role")
            case _:
                raise InvalidValue("role is one of system, developer, user and assistant", param=f"{place}.role")
    return Messages(system=tuple(system), history=tuple(history), input=chunks)


def audio_encoding(name: str, param: str) -> AudioEncoding:
    """An audio format by OpenAI's name or ours. Raises UnsupportedFormat."""
    try:
        return _AUDIO_FORMATS.get(name) or AudioEncoding(name)
    except ValueError:
        raise UnsupportedFormat(f"audio in {name[:32]!r} is not served here", param=param) from None


def _refuse_lost(message: Mapping[str, Any], place: str) -> None:
    for name in _LOST:
        if message.get(name):
            raise UnsupportedParameter(f"{name} of earlier messages are not available here", param=f"{place}.{name}")


def _parts(content: Any, place: str) -> Iterator[tuple[Mapping[str, Any], str]]:
    """The parts of a message, and where each stands. A text is one part."""
    if isinstance(content, str):
        yield {"type": "text", "text": content}, f"{place}.content"
        return
    if not isinstance(content, list):
        raise InvalidValue("content is a text or a list of parts", param=f"{place}.content")
    for index, part in enumerate(content):
        where = f"{place}.content[{index}]"
        if not isinstance(part, Mapping):
            raise InvalidValue("a part is an object", param=where)
        yield part, where


def _text(content: Any, place: str) -> str:
    """The text of a message that is not the input: anything else in it would be lost without a word."""
    texts: list[str] = []
    for part, where in _parts(content, place):
        if part.get("type") not in ("text", "input_text", "output_text"):
            raise UnsupportedParameter("only the last message may hold anything but text", param=where)
        texts.append(_string(part, "text", where))
    return "".join(texts)


def _content_chunks(content: Any, place: str) -> Iterator[InputChunk]:
    for part, where in _parts(content, place):
        yield _part_chunk(part, where)


def _part_chunk(part: Mapping[str, Any], where: str) -> InputChunk:
    match part.get("type"):
        case "text" | "input_text":
            return InputChunk(Modality.TEXT, _string(part, "text", where).encode())
        case "input_audio":
            return _audio_chunk(part.get("input_audio"), f"{where}.input_audio")
        case "image_url" | "video_url" as kind:
            url = part.get(kind)
            if isinstance(url, Mapping):
                url = url.get("url")
            modality = Modality.IMAGE if kind == "image_url" else Modality.VIDEO
            return _data_url(url, modality, f"{where}.{kind}.url")
        case other:
            raise InvalidValue(f"unknown part type {str(other)[:64]!r}", param=f"{where}.type")


def _audio_chunk(audio: Any, where: str) -> InputChunk:
    if not isinstance(audio, Mapping):
        raise InvalidValue("input_audio is an object", param=where)
    encoding = audio_encoding(_string({"format": "wav", **audio}, "format", where), f"{where}.format")
    data = _base64(_string(audio, "data", where), f"{where}.data")
    return InputChunk(Modality.AUDIO, data, format=encoding.value)


def _data_url(url: Any, modality: Modality, where: str) -> InputChunk:
    if not isinstance(url, str):
        raise InvalidValue("url is a string", param=where)
    if url[:5].lower() != "data:":
        raise UnsupportedParameter("nothing is fetched from elsewhere; send a data: URL", param=where)
    head, comma, data = url[5:].partition(",")
    mime, *attributes = head.lower().split(";")
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


def _base64(data: str, where: str) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidValue("not base64", param=where) from None

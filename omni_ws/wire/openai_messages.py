"""The messages of a chat body: instructions, history, and the last message, which is the input."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeGuard

from omni_ws.core.chunks import InputChunk, Modality, ToolCall
from omni_ws.errors import InvalidValue, UnsupportedParameter
from omni_ws.wire.openai_media import MediaUrl, audio_chunk, media_by_url

#: The longest conversation. Each message is read, and counted for the history, on its own; OpenAI takes half as many.
MAX_MESSAGES: Final = 4096
#: Fields of earlier assistant messages that no engine uses: refused rather than ignored.
_UNSUPPORTED = ("function_call",)
#: The longest id of audio that is looked for.
_MAX_ID_CHARACTERS: Final = 256


@dataclass(frozen=True, slots=True)
class HistoryMessage:
    """A message before the input.

    ``parts`` are what it consists of where that is not ``text`` alone. ``audio_id`` is a spoken answer that an
    assistant message stands for. ``tool_calls`` are those of an assistant message, ``tool_call_id`` the call that a
    tool message answers. ``place`` is its JSON path.
    """

    role: str
    text: str
    parts: tuple[InputChunk | MediaUrl, ...] = ()
    audio_id: str | None = None
    place: str = field(default="", compare=False)
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """The parsed messages.

    ``input`` holds the parts of the last message or, if the messages end with tool results, all of these. ``role`` is
    the role of the last message: ``user`` (also for tool results), ``system`` or ``assistant``. ``role_at`` is the JSON
    path of that role where it is not ``user``, ``tools_at`` that of the first field that requires an engine with tools.
    """

    system: tuple[str, ...]
    history: tuple[HistoryMessage, ...]
    input: tuple[InputChunk | MediaUrl, ...]
    role: str = "user"
    role_at: str | None = None
    tools_at: str | None = None


def read_messages(messages: Sequence[Mapping[str, Any]], *, input_follows: bool) -> Messages:
    """Parse ``messages``; with ``input_follows`` all of them are history, and chunks bring the input.

    Raises InvalidValue, UnsupportedParameter or UnsupportedFormat, naming the JSON path.
    """
    if not messages and not input_follows:
        raise InvalidValue("messages must hold at least one message", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise InvalidValue(f"at most {MAX_MESSAGES} messages, got {len(messages)}", param="messages")
    reader = _Reader()
    input_from = len(messages) if input_follows else _input_from(messages)
    for index, message in enumerate(messages):
        reader.read(message, f"messages[{index}]", is_input=index >= input_from)
    return Messages(
        system=tuple(reader.system),
        history=tuple(reader.history),
        input=(*reader.input, *reader.pictures),
        role=reader.role,
        role_at=reader.role_at,
        tools_at=reader.tools_at,
    )


def _input_from(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return the index of the first input message: the last one, or the first of the tool results at the end."""
    start = len(messages) - 1
    while start > 0 and messages[start].get("role") == messages[start - 1].get("role") == "tool":
        start -= 1
    return start


class _Reader:
    """Collects the fields of ``Messages``, message by message."""

    def __init__(self) -> None:
        self.system: list[str] = []
        self.history: list[HistoryMessage] = []
        self.input: list[InputChunk | MediaUrl] = []
        self.role = "user"
        self.role_at: str | None = None
        self.tools_at: str | None = None
        #: Media of the tool results that are the input; they stand behind the results.
        self.pictures: list[InputChunk | MediaUrl] = []
        self._calls: set[str] = set()

    def read(self, message: Mapping[str, Any], place: str, *, is_input: bool) -> None:
        content = message.get("content")
        match message.get("role"):
            case "user" if is_input:
                self.input += (_part_chunk(part, where) for part, where in _parts(content, place))
            case "tool":
                self._tool_result(message, place, is_input=is_input)
            case "system" | "developer" | "assistant" if is_input:
                self._last_of_other_role(message, place)
            case "system" | "developer":
                self.system.append(_text(content, place))
            case "user":
                text, parts = _content(content, place)
                self.history.append(HistoryMessage("user", text, parts, place=place))
            case "assistant":
                self._assistant(message, place)
            case "function":
                raise UnsupportedParameter("role function is not supported; use role tool", param=f"{place}.role")
            case _:
                raise InvalidValue("role must be system, developer, user, assistant or tool", param=f"{place}.role")

    def _last_of_other_role(self, message: Mapping[str, Any], place: str) -> None:
        """Read a last message that is not the user's: text for the assistant to continue, or instructions alone."""
        if message.get("tool_calls"):
            raise InvalidValue("the last message must have role user or tool", param=f"{place}.role")
        self.role = "assistant" if message.get("role") == "assistant" else "system"
        self.role_at = f"{place}.role"
        self.input.append(InputChunk(Modality.TEXT, _text(message.get("content"), place).encode()))

    def _assistant(self, message: Mapping[str, Any], place: str) -> None:
        for name in _UNSUPPORTED:
            if message.get(name):
                raise UnsupportedParameter(f"{name} in earlier messages is not supported", param=f"{place}.{name}")
        content = message.get("content")
        calls = tuple(_tool_calls(message.get("tool_calls"), f"{place}.tool_calls"))
        if calls:
            self.tools_at = self.tools_at or f"{place}.tool_calls"
            self._calls.update(call.id for call in calls)
        text, parts = ("", ()) if content is None else _content(content, place)
        audio_id = None if text or parts else _audio_id(message.get("audio"), f"{place}.audio")
        self.history.append(HistoryMessage("assistant", text, parts, audio_id, place, tool_calls=calls))

    def _tool_result(self, message: Mapping[str, Any], place: str, *, is_input: bool) -> None:
        self.tools_at = self.tools_at or f"{place}.role"
        call = _string(message, "tool_call_id", place)
        if call not in self._calls:
            raise InvalidValue(f"no earlier message has the tool call {call[:64]!r}", param=f"{place}.tool_call_id")
        text, parts = _content(message.get("content"), place)
        if not is_input:
            self.history.append(HistoryMessage("tool", text, parts, place=place, tool_call_id=call))
            return
        text = "".join(part.payload.decode() for part in parts if _is_text(part)) if parts else text
        self.input.append(InputChunk(Modality.TEXT, text.encode(), tool_call_id=call))
        self.pictures += (part for part in parts if not _is_text(part))


def _tool_calls(calls: Any, place: str) -> Iterator[ToolCall]:
    if calls is None:
        return
    if not isinstance(calls, list):
        raise InvalidValue("tool_calls must be a list", param=place)
    for index, call in enumerate(calls):
        where = f"{place}[{index}]"
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or call.get("type", "function") != "function":
            raise InvalidValue("a tool call must be an object of type function", param=where)
        yield ToolCall(
            _string(call, "id", where),
            _string(function, "name", f"{where}.function"),
            _string(function, "arguments", f"{where}.function"),
        )


def _parts(content: Any, place: str) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yield the parts of a message with their JSON paths. Plain text is one part."""
    if isinstance(content, str):
        yield {"type": "text", "text": content}, f"{place}.content"
        return
    if not isinstance(content, list):
        raise InvalidValue("content must be a string or a list of parts", param=f"{place}.content")
    for index, part in enumerate(content):
        where = f"{place}.content[{index}]"
        if not isinstance(part, Mapping):
            raise InvalidValue("a part must be an object", param=where)
        yield part, where


def _content(content: Any, place: str) -> tuple[str, tuple[InputChunk | MediaUrl, ...]]:
    """The text of an earlier message or, if it is not text alone, its parts."""
    parts = tuple(_part_chunk(part, where) for part, where in _parts(content, place))
    if all(map(_is_text, parts)):
        return "".join(part.payload.decode() for part in parts if isinstance(part, InputChunk)), ()
    return "", parts


def _is_text(part: InputChunk | MediaUrl) -> TypeGuard[InputChunk]:
    return isinstance(part, InputChunk) and part.modality is Modality.TEXT


def _audio_id(audio: Any, place: str) -> str | None:
    if audio is None:
        return None
    if not isinstance(audio, Mapping):
        raise InvalidValue("audio must be an object", param=place)
    audio_id = _string(audio, "id", place)
    if len(audio_id) > _MAX_ID_CHARACTERS:
        raise InvalidValue("there is no audio of this id", param=f"{place}.id")
    return audio_id


def _text(content: Any, place: str) -> str:
    """Return the text of a message that can be nothing else.

    Raises UnsupportedParameter for other content, which would be lost.
    """
    texts: list[str] = []
    for part, where in _parts(content, place):
        if part.get("type") not in ("text", "input_text", "output_text"):
            raise UnsupportedParameter("this message may contain nothing other than text", param=where)
        texts.append(_string(part, "text", where))
    return "".join(texts)


def _part_chunk(part: Mapping[str, Any], where: str) -> InputChunk | MediaUrl:
    match part.get("type"):
        case "text" | "input_text" | "output_text":
            return InputChunk(Modality.TEXT, _string(part, "text", where).encode())
        case "input_audio":
            return audio_chunk(part.get("input_audio"), f"{where}.input_audio")
        case "image_url" | "video_url" | "audio_url" as kind:
            url = part.get(kind)
            if isinstance(url, Mapping):
                url = url.get("url")
            return media_by_url(url, Modality(kind.removesuffix("_url")), f"{where}.{kind}.url")
        case other:
            raise InvalidValue(f"unknown part type {str(other)[:64]!r}", param=f"{where}.type")


def _string(part: Mapping[str, Any], name: str, where: str) -> str:
    value = part.get(name)
    if not isinstance(value, str):
        raise InvalidValue(f"{name} must be a string", param=f"{where}.{name}")
    return value

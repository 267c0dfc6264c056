"""Parsers of the request bodies of chat, speech, completions and transcriptions.

Each ``read_…`` parses the body of one route. Unknown fields are ignored; a known field with a value that the server
cannot honour is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from operator import itemgetter
from pathlib import PurePath
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeGuard, cast

import msgspec
import orjson
from msgspec import UNSET, Meta, Struct

from omni_ws.core.chunks import AudioEncoding, InputChunk, Modality, ToolCall
from omni_ws.core.file_heads import encoding_by_head
from omni_ws.core.history import Message
from omni_ws.core.json_values import language_code, primary_subtag
from omni_ws.errors import EmptyInput, InvalidRequest, InvalidValue, UnsupportedFormat, UnsupportedParameter
from omni_ws.wire.openai_fields import (
    MAX_CHOICES,
    MAX_TOP_LOGPROBS,
    MEDIA_FIELDS,
    NEVER_AVAILABLE,
    AnswerFields,
    Choices,
    CommonBody,
    ConfigurationPatch,
    MediaLimitFields,
    MediaUrl,
    NamedMedia,
    Priority,
    ResponseFormatBody,
    StreamOptions,
    Word,
    answer_form,
    audio_chunk,
    audio_encoding,
    chat_logprobs,
    completion_logprobs,
    configuration_patch,
    media_by_url,
    object_field,
    read_media,
    refuse_unavailable,
    template_arguments,
    upstream_fields,
    usage_places,
    wants_times,
    with_format_hint,
)
from omni_ws.wire.server_frames import CallFunction, HistoryCall, HistoryItemFields, HistoryItemsFrame
from omni_ws.wire.session_config import converted

# ``/v1/chat/completions``


class AudioOptions(Struct, frozen=True, kw_only=True):
    """The fields of OpenAI's ``audio``."""

    voice: str | None = None
    format: str | None = None


class ChatBody(CommonBody, frozen=True, kw_only=True):
    """The fields of a chat body that are validated here; the other fields are those of ``session_config``."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A parsed chat body.

    ``input`` has the media and the content of the last message, in order. ``stream`` is None if the body has no such
    field. For ``role``, ``role_at`` and ``tools_at`` see ``Messages``.
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
    include_times: bool = False
    input_transcript: bool = True


def chat_wants_events(body: Mapping[str, Any]) -> bool:
    """Return whether a chat body, valid or not, asks for server-sent events: errors are then sent as events, too."""
    return body.get("stream") is True


def read_chat(body: Mapping[str, Any], *, input_follows: bool) -> ChatRequest:
    """Parse a chat body. ``input_follows``: all its messages are history, and later chunks bring the input.

    Raises InvalidValue, UnsupportedParameter or UnsupportedFormat, naming the field.
    """
    refuse_unavailable(body, NEVER_AVAILABLE)
    try:
        fields = converted(body, ChatBody)
    except InvalidValue as error:
        raise with_format_hint(error) from None
    brought = next((name for name in MEDIA_FIELDS if body.get(name)), "messages")
    patch = configuration_patch(body, fields, input_field=None if input_follows else brought)
    audio = fields.audio or AudioOptions()
    wants_audio = fields.modalities is not None and "audio" in fields.modalities
    if fields.modalities == []:
        raise InvalidValue("modalities must have at least one of text and audio", param="modalities")
    # Text is always generated: it is the transcript of a spoken answer.
    patch.fields["modalities"] = ["text", "audio"] if wants_audio else ["text"]
    if audio.voice is not None:
        patch.fields["voice"] = audio.voice
        patch.names["voice"] = "audio.voice"
    if wants_audio:
        streamed = input_follows if fields.stream is None else fields.stream
        _set_output_format(patch, body, audio.format, param="audio.format", default="pcm" if streamed else "wav")
    messages = Messages(fields.messages or [], input_follows=input_follows)
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
        answer=_answer_fields(fields, converted(body, MediaLimitFields), wants_audio=wants_audio),
        history=tuple(messages.history),
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
        include_times=wants_times(fields.stream_options),
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
    """Raise an error for media fields if the input follows, or if the last message is not the user's."""
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


def _set_output_format(
    patch: ConfigurationPatch, body: Mapping[str, Any], wanted: str | None, *, param: str, default: str
) -> str:
    """Set the format of ``output_audio`` in ``patch`` and return it.

    It is ``wanted``, or else the format in the body's ``output_audio``, or else ``default``. ``param`` is the name of
    the body's field with ``wanted``, for errors.
    """
    group = object_field(body, "output_audio")
    if wanted is not None:
        group = {**group, "format": audio_encoding(wanted, param).value}
        patch.names["output_audio.format"] = param
    patch.fields["output_audio"] = {"format": audio_encoding(default, param).value, **group}
    return wanted or group.get("format") or default


# The messages of a chat body: instructions, history, and the input, which is the last message.

#: The most messages. Each is read, and measured for the history, by itself. OpenAI's limit is half of this.
MAX_MESSAGES: Final = 4096
#: Fields of earlier assistant messages that no engine uses: refused rather than ignored.
_UNSUPPORTED_IN_HISTORY = ("function_call",)
#: The longest audio id that is looked up.
_MAX_AUDIO_ID_CHARACTERS: Final = 256


@dataclass(frozen=True, slots=True)
class HistoryMessage:
    """One message of the history, before the input.

    A message has either ``text`` or, if it has more than text, ``parts``. ``audio_id`` is the id of the earlier spoken
    answer for which an assistant message stands. ``tool_calls`` are the calls that an assistant message makes,
    ``tool_call_id`` the call that a tool message answers. ``place`` is the JSON path of the message.
    """

    role: str
    text: str
    parts: tuple[InputChunk | MediaUrl, ...] = ()
    audio_id: str | None = None
    place: str = field(default="", compare=False)
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None


class Messages:
    """The messages of a chat body: instructions, history, and the input.

    The input is the content of the last message or, if the messages end with tool results, all of these results.
    ``role`` is the role of the last message: ``user`` (also for tool results), ``system`` or ``assistant``. ``role_at``
    is the JSON path of that role if it is not ``user``; ``tools_at`` is the path of the first field that requires an
    engine with tools.

    ``input_follows``: all messages are history, and later chunks bring the input. Raises InvalidValue,
    UnsupportedParameter or UnsupportedFormat, naming the JSON path.
    """

    def __init__(self, messages: Sequence[Mapping[str, Any]], *, input_follows: bool) -> None:
        if not messages and not input_follows:
            raise InvalidValue("messages must hold at least one message", param="messages")
        if len(messages) > MAX_MESSAGES:
            raise InvalidValue(f"at most {MAX_MESSAGES} messages, got {len(messages)}", param="messages")
        self.system: list[str] = []
        self.history: list[HistoryMessage] = []
        self.input: list[InputChunk | MediaUrl] = []
        self.role = "user"
        self.role_at: str | None = None
        self.tools_at: str | None = None
        #: Media in those tool results that are the input; they follow the results.
        self._pictures: list[InputChunk | MediaUrl] = []
        self._calls: set[str] = set()
        input_from = len(messages) if input_follows else _input_from(messages)
        for index, message in enumerate(messages):
            self._read(message, f"messages[{index}]", is_input=index >= input_from)
        self.input += self._pictures

    def _read(self, message: Mapping[str, Any], place: str, *, is_input: bool) -> None:
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
        """Read a last message that is not the user's: an answer for the model to continue, or instructions."""
        if message.get("tool_calls"):
            raise InvalidValue("the last message must have role user or tool", param=f"{place}.role")
        self.role = "assistant" if message.get("role") == "assistant" else "system"
        self.role_at = f"{place}.role"
        self.input.append(InputChunk(Modality.TEXT, _text(message.get("content"), place).encode()))

    def _assistant(self, message: Mapping[str, Any], place: str) -> None:
        for name in _UNSUPPORTED_IN_HISTORY:
            if message.get(name):
                raise UnsupportedParameter(f"{name} in earlier messages is not supported", param=f"{place}.{name}")
        content = message.get("content")
        calls = tuple(_tool_calls(message.get("tool_calls"), f"{place}.tool_calls"))
        if calls:
            self.tools_at = self.tools_at or f"{place}.tool_calls"
            self._calls.update(call.id for call in calls)
        text, parts = ("", ()) if content is None else _content(content, place)
        if content is None and message.get("refusal") is not None:
            text = _string(message, "refusal", place)
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
        self._pictures += (part for part in parts if not _is_text(part))


def _input_from(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return the index of the first input message: the first tool result at the end, or else the last message."""
    start = len(messages) - 1
    while start > 0 and messages[start].get("role") == messages[start - 1].get("role") == "tool":
        start -= 1
    return start


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
    """Return an earlier message's text and no parts; or, if the message has more than text, "" and its parts."""
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
    if len(audio_id) > _MAX_AUDIO_ID_CHARACTERS:
        raise InvalidValue("there is no audio of this id", param=f"{place}.id")
    return audio_id


def _text(content: Any, place: str) -> str:
    """Return the text of a message that must be text only. Raises UnsupportedParameter for other content."""
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


# ``/v1/audio/speech``

#: The fields that speech does not support: those of all routes, and chat fields that do not apply to reading aloud.
_NOT_AVAILABLE_IN_SPEECH: Final[Mapping[str, tuple[Any, ...]]] = {
    **NEVER_AVAILABLE,
    "logit_bias": ({},),
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    **dict.fromkeys(MEDIA_FIELDS, ([],)),
    **dict.fromkeys(MediaLimitFields.__struct_fields__, ()),
}


class SpeechBody(CommonBody, frozen=True, kw_only=True):
    """The fields of a speech body that are validated here."""

    input: str | None = None
    voice: str | dict[str, Any] | None = None
    response_format: str | None = None
    speed: float | None = None
    stream_format: Literal["sse", "audio"] | None = None


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
    """A parsed speech body. ``text`` is None if chunks bring it; ``response_format`` is as the client wrote it."""

    patch: ConfigurationPatch
    text: str | None
    dialect: SpeechDialect
    response_format: str
    request_id: str | None = None


def speech_wants_events(body: Mapping[str, Any]) -> bool:
    """Return whether a speech body, valid or not, asks for server-sent events."""
    wanted = body.get("stream_format")
    return wanted == "sse" or (wanted is None and body.get("stream") is True)


def read_speech(body: Mapping[str, Any], *, input_follows: bool) -> SpeechRequest:
    """Parse a speech body. ``input_follows``: chunks bring the text, and ``input`` must be absent.

    Raises as ``read_chat`` does, and EmptyInput for blank text.
    """
    refuse_unavailable(body, _NOT_AVAILABLE_IN_SPEECH)
    fields = converted(body, SpeechBody)
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


# ``/v1/completions``: bare prompts, as text or token IDs, without a chat template.

#: OpenAI's default.
DEFAULT_MAX_TOKENS: Final = 16
#: More than the context of any model; the engine checks the limit of its own model.
MAX_PROMPT_TOKENS: Final = 1 << 20
#: More than any vocabulary has; the engine checks the limit of its own model.
MAX_TOKEN_ID: Final = 1 << 31

_NOT_AVAILABLE_IN_COMPLETIONS: Final[Mapping[str, tuple[Any, ...]]] = {**NEVER_AVAILABLE, "suffix": ("",)}
#: The fields of ``session_config`` that apply to completions.
_COMPLETION_CONFIG: Final = frozenset({"model", "sampling", "stage_sampling", "stage_params"})


#: One prompt: text, or token IDs.
CompletionPrompt: TypeAlias = str | tuple[int, ...]


class CompletionBody(CommonBody, frozen=True, kw_only=True):
    """The fields of a completion body that are validated here."""

    prompt: str | list[Any] | None = None
    n: Choices | None = None
    best_of: int | None = None
    echo: bool | None = None
    logprobs: bool | int | None = None
    stream_options: StreamOptions | None = None
    usage_on_final_chunk: bool | None = None
    priority: Priority | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """A parsed completion body: each of ``prompts`` gets ``answer.choices`` answers.

    ``only_echo`` asks for the prompt and its log-probabilities without generation (``echo`` with ``max_tokens`` 0).
    """

    patch: ConfigurationPatch
    prompts: tuple[CompletionPrompt, ...]
    #: The JSON path of each prompt.
    places: tuple[str, ...]
    answer: AnswerFields
    echo: bool
    only_echo: bool
    stream: bool
    request_id: str | None
    include_usage: bool
    usage_on_final_chunk: bool
    include_times: bool


def read_completion(body: Mapping[str, Any]) -> CompletionRequest:
    """Parse a completion body. Raises InvalidValue, UnsupportedParameter or EmptyInput, naming the field."""
    refuse_unavailable(body, _NOT_AVAILABLE_IN_COMPLETIONS)
    fields = converted(body, CompletionBody)
    choices = fields.n or 1
    if fields.best_of not in (None, choices):
        raise UnsupportedParameter("best_of must be equal to n", param="best_of")
    places, prompts = zip(*_prompts(fields.prompt), strict=True)
    if len(prompts) * choices > MAX_CHOICES:
        raise InvalidValue(f"at most {MAX_CHOICES} answers per request", param="prompt")
    patch = configuration_patch(body, fields, input_field="prompt")
    for name in patch.fields.keys() - _COMPLETION_CONFIG:
        del patch.fields[name]
    patch.fields["modalities"] = ["text"]
    patch.fields["sampling"] = {"max_tokens": DEFAULT_MAX_TOKENS, **patch.fields["sampling"]}
    own_chunk, final_chunk = usage_places(fields.stream_options, on_final_chunk=fields.usage_on_final_chunk)
    echo = fields.echo is True
    return CompletionRequest(
        patch=patch,
        prompts=prompts,
        places=places,
        answer=AnswerFields(
            choices=choices,
            logprobs=completion_logprobs(fields.logprobs),
            priority=fields.priority or 0,
        ),
        echo=echo,
        only_echo=echo and fields.max_tokens == 0 and not fields.max_completion_tokens,
        stream=fields.stream is True,
        request_id=fields.request_id,
        include_usage=own_chunk,
        usage_on_final_chunk=final_chunk,
        include_times=wants_times(fields.stream_options),
    )


def _prompts(prompt: str | list[Any] | None) -> list[tuple[str, CompletionPrompt]]:
    """Return pairs of a JSON path and the prompt there. A list of numbers is one prompt of token IDs."""
    if not prompt and prompt != "":
        raise InvalidValue("prompt must be a string, a list of token ids, or a list of either", param="prompt")
    if isinstance(prompt, str) or _is_number(prompt[0]):
        return [("prompt", _prompt(prompt, "prompt"))]
    if len(prompt) > MAX_CHOICES:
        raise InvalidValue(f"at most {MAX_CHOICES} answers per request", param="prompt")
    places = [f"prompt[{index}]" for index in range(len(prompt))]
    return [(place, _prompt(one, place)) for place, one in zip(places, prompt, strict=True)]


def _prompt(prompt: Any, place: str) -> CompletionPrompt:
    if not isinstance(prompt, (str, list)):
        raise InvalidValue("a prompt must be a string or a list of token ids", param=place)
    if not prompt:
        raise EmptyInput("the prompt is empty", param=place)
    if isinstance(prompt, str):
        return prompt
    if len(prompt) > MAX_PROMPT_TOKENS:
        raise InvalidValue(f"at most {MAX_PROMPT_TOKENS} token ids per prompt, got {len(prompt)}", param=place)
    for index, one in enumerate(prompt):
        if not _is_number(one) or not 0 <= one < MAX_TOKEN_ID:
            raise InvalidValue(
                f"a token id must be a whole number from 0 to {MAX_TOKEN_ID - 1}", param=f"{place}[{index}]"
            )
    return tuple(prompt)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# ``/v1/audio/transcriptions``: form fields, and the parameters of a streamed body.

ResponseFormat = Literal["json", "text", "verbose_json", "srt", "vtt"]
Granularity = Literal["word", "segment"]

#: Formats that need the times of words.
TIMED_FORMATS: Final = frozenset({"verbose_json", "srt", "vtt"})

#: The fields that transcription does not support, with the values that are accepted because they change nothing.
_NOT_AVAILABLE_IN_TRANSCRIPTION: Final[Mapping[str, tuple[Any, ...]]] = {
    "include": ([],),
    "chunking_strategy": ("auto",),
    "known_speaker_names": ([],),
    "known_speaker_references": ([],),
}
#: Fields that are lists even without brackets in their names.
_LISTS: Final = frozenset({"timestamp_granularities", "include", "known_speaker_names", "known_speaker_references"})
_INDEX: Final = re.compile(r"[0-9]{1,9}")
#: Several words, as in the English name of a language; a language tag has no spaces.
_SEVERAL_WORDS: Final = re.compile(r"\s*\w+(?:[ ,()']+\w+)+\)?\s*")


class TranscriptionBody(Struct, frozen=True, kw_only=True):
    """The fields of a transcription body."""

    model: str | None = None
    language: str | None = None
    prompt: str | None = None
    response_format: ResponseFormat = "json"
    temperature: float | None = None
    timestamp_granularities: list[Granularity] | None = None
    stream: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptionRequest:
    """A parsed transcription body.

    ``language`` is the primary subtag (RFC 5646) of the requested language; ``stream`` is None if the body has no such
    field.
    """

    patch: ConfigurationPatch
    language: str | None
    response_format: ResponseFormat
    granularities: frozenset[Granularity]
    stream: bool | None


def form_fields(pairs: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Convert form fields to the fields of a body.

    An empty field counts as absent. Names that end with ``[]`` or ``[0]`` are elements of a list, in the order of their
    indexes, and take precedence over the name without brackets; names with another key in brackets are members of an
    object. Of other repeated fields the last one counts.
    """
    fields: dict[str, Any] = {}
    lists: dict[str, list[tuple[int, str]]] = {}
    objects: dict[str, dict[str, str]] = {}
    for name, value in pairs:
        if not value:
            continue
        root, bracket, key = name.removesuffix("]").partition("[") if name.endswith("]") else (name, "", "")
        if bracket and key and not _INDEX.fullmatch(key):
            objects.setdefault(root, {})[key] = value
        elif bracket or name in _LISTS:
            lists.setdefault(root, []).append((int(key or 0), value))
        else:
            fields[name] = value
    ordered = {name: [value for _, value in sorted(items, key=itemgetter(0))] for name, items in lists.items()}
    return fields | objects | ordered


def read_transcription(body: Mapping[str, Any], *, input_field: str | None = None) -> TranscriptionRequest:
    """Parse a transcription body. ``input_field`` is the field with the audio; None if chunks bring the audio.

    Raises InvalidValue or UnsupportedParameter, naming the field.
    """
    refuse_unavailable(body, _NOT_AVAILABLE_IN_TRANSCRIPTION)
    fields = converted(body, TranscriptionBody, strict=False)
    granularities = frozenset(fields.timestamp_granularities or ())
    if granularities and fields.response_format != "verbose_json":
        raise InvalidValue(
            "timestamp_granularities requires response_format verbose_json", param="timestamp_granularities"
        )
    if fields.stream and fields.response_format not in ("json", "text"):
        raise UnsupportedParameter("response_format must be json or text for a stream", param="response_format")
    language = _language(fields.language)
    patch: dict[str, Any] = {"task": "transcribe", "modalities": ["text"], "model": fields.model}
    if fields.temperature is not None:
        patch["sampling"] = {"temperature": fields.temperature}
    if "input_audio" in body:
        patch["input_audio"] = body["input_audio"]
    names = {"sampling.temperature": "temperature"}
    audio = patch.get("input_audio", {})
    spoken = {name: value for name, value in (("language", language), ("prompt", fields.prompt)) if value}
    if spoken and isinstance(audio, Mapping):
        patch["input_audio"] = {**audio, **spoken}
        names |= {f"input_audio.{name}": name for name in spoken}
    return TranscriptionRequest(
        patch=ConfigurationPatch(patch, names, frozenset(body), input_field),
        language=None if language is None else primary_subtag(language),
        response_format=fields.response_format,
        granularities=granularities or frozenset({"segment"}),
        stream=fields.stream,
    )


def audio_file(data: bytes, *, filename: str, content_type: str) -> InputChunk:
    """Return the chunk for an uploaded file.

    The format is known by the first bytes, or else by ``content_type``, or else by the suffix of ``filename``.

    Raises InvalidValue for an empty file, UnsupportedFormat for an unknown format.
    """
    if not data:
        raise InvalidValue("the file is empty", param="file")
    if (found := encoding_by_head(data)) is not None:
        return InputChunk(Modality.AUDIO, data, format=found.value)
    if content_type.lower().startswith("audio/"):
        return InputChunk(Modality.AUDIO, data, format=content_type)
    suffix = PurePath(filename).suffix.removeprefix(".").lower()
    try:
        encoding = {"pcm": AudioEncoding.PCM16, "raw": AudioEncoding.PCM16}.get(suffix) or AudioEncoding(suffix)
    except ValueError:
        raise UnsupportedFormat(
            "unsupported audio file; supported: wav, mp3, m4a, mp4, mov, aac, flac, ogg, opus, webm", param="file"
        ) from None
    return InputChunk(Modality.AUDIO, data, format=encoding.value)


def _language(wanted: str | None) -> str | None:
    """Return the tag of the requested language, given as a tag or by its English name; None to detect the language.

    Raises UnsupportedParameter for several words that are no known name.
    """
    if wanted is None or not wanted.strip() or wanted.strip().lower() == "auto":
        return None
    tag = language_code(wanted)
    if _SEVERAL_WORDS.fullmatch(tag[:64]):
        raise UnsupportedParameter(f"language {wanted[:64]!r} is not known", param="language")
    return tag


# The history on the wire: ``history_items`` of a client's first ``session_config``, and of the reply to a
# ``history_get``.


#: The most items, and the most bytes of their JSON.
MAX_HISTORY_ITEMS: Final = 1024
MAX_HISTORY_BYTES: Final = 1 << 20
FIELD: Final = "history_items"
#: The fields of an item by its role: those of a message in a chat body, with text as the content.
FIELDS_OF_ROLE: Final = {
    "user": frozenset({"role", "content"}),
    "assistant": frozenset({"role", "content", "tool_calls"}),
    "tool": frozenset({"role", "content", "tool_call_id"}),
}
#: The role of the first item if it stands in place of older messages.
SUMMARY: Final = "summary"


def read_history_items(items: Any) -> tuple[Messages, str]:
    """Parse ``history_items``. Return the messages, and the summary of the conversation before them, or "".

    Raises InvalidValue and UnsupportedParameter, naming the JSON path.
    """
    if not isinstance(items, list):
        raise InvalidValue("history_items must be a list of messages", param=FIELD)
    if len(items) > MAX_HISTORY_ITEMS:
        raise InvalidValue(f"at most {MAX_HISTORY_ITEMS} history_items, got {len(items)}", param=FIELD)
    summary = _summary(items[0]) if items else ""
    for index, item in enumerate(items):
        if index or not summary:
            _check(item, f"{FIELD}[{index}]")
    if len(orjson.dumps(items)) > MAX_HISTORY_BYTES:
        raise InvalidValue(f"history_items must not exceed {MAX_HISTORY_BYTES} bytes", param=FIELD)
    if summary:  # its place stays, for the places in errors
        items = [{"role": "system", "content": summary}, *items[1:]]
    try:
        return Messages(items, input_follows=True), summary
    except InvalidRequest as error:
        error.about(param=placed(error.param))
        raise


def placed(param: str | None) -> str | None:
    """Translate an error's JSON path: ``messages[0].role`` of a chat body to ``history_items[0].role``."""
    return None if param is None else FIELD + param.removeprefix("messages")


def told_items(messages: Iterable[Message], summary: str) -> HistoryItemsFrame:
    """Return the reply to a ``history_get``, without the oldest messages if they exceed the limits of history_items.

    A tool result whose call is left out is left out as well.
    """
    items = [HistoryItemFields(role=SUMMARY, content=summary)] if summary else []
    found: list[HistoryItemFields] = []
    size = sum(map(_size, items)) + 1
    left = list(messages)
    while left and len(items) + len(found) < MAX_HISTORY_ITEMS:
        item = _item(left[-1])
        size += _size(item)
        if size > MAX_HISTORY_BYTES:
            break
        found.append(item)
        left.pop()
    found.reverse()
    calls = {call.id for item in found for call in item.tool_calls or ()}
    # A result whose call was left out would be refused.
    items += (item for item in found if item.tool_call_id is UNSET or item.tool_call_id in calls)
    return HistoryItemsFrame(items=items)


def _item(message: Message) -> HistoryItemFields:
    calls = [HistoryCall(id=call.id, function=CallFunction(call.name, call.arguments)) for call in message.tool_calls]
    return HistoryItemFields(
        role=cast("Any", message.role),
        content=UNSET if calls and not message.text else message.text,
        tool_calls=calls or UNSET,
        tool_call_id=UNSET if message.tool_call_id is None else message.tool_call_id,
    )


def _size(item: HistoryItemFields) -> int:
    return len(msgspec.json.encode(item)) + 1


def _summary(item: Any) -> str:
    """Return the text of ``item``, the first one, if it is a summary; otherwise "". Raises InvalidValue."""
    if not isinstance(item, dict) or item.get("role") != SUMMARY:
        return ""
    if unknown := sorted(item.keys() - {"role", "content"}):
        raise InvalidValue(f"an item with role {SUMMARY} has no such field", param=f"{FIELD}[0].{unknown[0][:64]}")
    text = item.get("content")
    if not isinstance(text, str) or not text.strip():
        raise InvalidValue("the content of a summary must be a text", param=f"{FIELD}[0].content")
    return text


def _check(item: Any, place: str) -> None:
    if not isinstance(item, dict):
        raise InvalidValue("an item of the history must be an object", param=place)
    role = item.get("role")
    known = FIELDS_OF_ROLE.get(role) if isinstance(role, str) else None
    if known is None:
        raise InvalidValue("role must be user, assistant or tool; rules belong in instructions", param=f"{place}.role")
    if unknown := sorted(item.keys() - known):
        raise InvalidValue(f"an item with role {role} has no such field", param=f"{place}.{unknown[0][:64]}")
    if item.get("content") is None and not item.get("tool_calls"):
        raise InvalidValue("content must be a string or a list of parts", param=f"{place}.content")

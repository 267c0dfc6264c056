"""The common parts of the request bodies of all OpenAI-compatible routes: fields, options, tools, media."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Annotated, Any, Final, Literal, TypeAlias
from urllib.parse import unquote_to_bytes, urlsplit

import msgspec
from msgspec import Meta, Struct

from omni_ws.core.chunks import MAX_FORMAT_CHARACTERS, AudioEncoding, InputChunk, Modality
from omni_ws.core.file_heads import encoding_by_head, sniff_image
from omni_ws.errors import InvalidValue, UnsupportedFormat, UnsupportedParameter
from omni_ws.wire.session_config import FIELDS, MAX_DEPTH, SamplingConfig, converted

# Fields, and their conversion to a ``session_config``.

#: The OpenAI fields that the server does not support, with the values that are accepted because they change nothing.
NEVER_AVAILABLE: Final[Mapping[str, tuple[Any, ...]]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "prediction": (),
    "web_search_options": (),
}

#: The top-level fields that set ``stage_sampling.talker``, and the names that they have there.
_TALKER_SAMPLING: Final = {
    f"talker_{name}": name for name in ("temperature", "top_p", "top_k", "repetition_penalty", "max_tokens", "seed")
}

#: The default values of sampling parameters. Clients send them to any engine, so they are dropped, not refused.
_NEUTRAL_SAMPLING: Final[Mapping[str, Any]] = {
    "logit_bias": {},
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "min_p": 0,
    "top_k": -1,
}


class StreamOptions(Struct, frozen=True, kw_only=True):
    """OpenAI's ``stream_options``, with our ``include_times``: whether the answer includes the times of its steps."""

    include_usage: bool | None = None
    include_times: bool | None = None


class CommonBody(Struct, frozen=True, kw_only=True):
    """The fields that all OpenAI-compatible routes share."""

    stream: bool | None = None
    model: str | None = None
    request_id: Annotated[str, Meta(max_length=128)] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None


def usage_places(options: StreamOptions | None, *, on_final_chunk: bool | None) -> tuple[bool, bool]:
    """Return whether a stream reports usage in a chunk of its own, and whether on its final chunk.

    A chunk of its own is OpenAI's way, for clients that set ``include_usage``; clients that say nothing get the usage
    on the final chunk. ``on_final_chunk`` is the field ``usage_on_final_chunk``: true asks for that place, false
    excludes it. With ``include_usage`` false, no usage is reported.
    """
    wanted = None if options is None else options.include_usage
    if wanted is False:
        return False, False
    if on_final_chunk or (wanted is None and on_final_chunk is None):
        return False, True
    return wanted is True, False


def wants_times(options: StreamOptions | None) -> bool:
    """Return whether the answer is to include the times of its steps."""
    return options is not None and options.include_times is True


#: The fields of a chunk of input.
_CHUNK_FIELDS: Final = frozenset(
    {"sequence_id", "offset", "modality", "payload", "text", "url", "format", "timestamp_ms", "end_of_input"}
    | {"role", "tool_call_id"}
)
_ROOT: Final = re.compile(r"[^.\[]*")


@dataclass(frozen=True, slots=True)
class ConfigurationPatch:
    """The ``session_config`` fields that the body of one request sets.

    ``fields`` are in the form of ``session_config``; ``names`` maps their paths, if the body has other names for them,
    to these names. ``sent`` are the names of all fields of the body. ``input`` is the name of the field that contains
    the input; None if chunks bring the input.
    """

    fields: dict[str, Any]
    names: dict[str, str] = field(default_factory=dict)
    sent: frozenset[str] = frozenset()
    input: str | None = None

    def name_in_body(self, param: str | None) -> str | None:
        """Translate an error's ``param`` to the body's name: ``sampling.stop[0]`` to ``stop[0]``.

        Returns None for a field that the client did not send, which an error must not name.
        """
        if param is None:
            return None
        for ours, theirs in self.names.items():
            if param == ours or param.startswith((f"{ours}.", f"{ours}[")):
                return theirs + param.removeprefix(ours)
        root = _ROOT.match(param)
        if root is not None and root[0] in _CHUNK_FIELDS:
            return self.input or param
        return param if root is not None and root[0] in self.sent else None


def refuse_unavailable(body: Mapping[str, Any], unavailable: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise UnsupportedParameter for the first of the ``unavailable`` fields that is set to more than a harmless value.

    ``unavailable`` maps the names of the fields to their harmless values; null is always harmless.
    """
    for name, harmless in unavailable.items():
        value = body.get(name)
        if value is not None and not any(value == one and type(value) is type(one) for one in harmless):
            raise UnsupportedParameter(f"{name} is not supported here", param=name)


def configuration_patch(body: Mapping[str, Any], fields: CommonBody, *, input_field: str | None) -> ConfigurationPatch:
    """Return the ``session_config`` fields of a body, given by our names or as OpenAI's top-level fields.

    ``input_field`` is the field that contains the input; None if chunks bring the input. The values are not checked,
    but InvalidValue is raised if a field that must be merged is not an object.
    """
    patch = {name: body[name] for name in FIELDS if name in body}
    patch.pop("max_lead_ms", None)  # for sessions only: HTTP responses are not paced
    names = {name: name for name in SamplingConfig.__struct_fields__ if body.get(name) is not None}
    sampling = {name: body[name] for name in names}
    # Clients that send 0 mean "no limit".
    limit = fields.max_completion_tokens or fields.max_tokens
    sampling.pop("max_tokens", None)
    if limit:
        sampling["max_tokens"] = limit
        names["max_tokens"] = "max_completion_tokens" if fields.max_completion_tokens else "max_tokens"
    for name, neutral in _NEUTRAL_SAMPLING.items():
        if sampling.get(name) == neutral and not isinstance(sampling[name], bool):
            del sampling[name]
    patch["sampling"] = {**object_field(body, "sampling"), **sampling}
    talker = {field: name for field, name in _TALKER_SAMPLING.items() if body.get(field) is not None}
    if talker:
        stages = object_field(patch, "stage_sampling")
        given = {name: body[field] for field, name in talker.items()}
        patch["stage_sampling"] = {**stages, "talker": {**object_field(stages, "talker"), **given}}
    fields_of = {f"sampling.{ours}": theirs for ours, theirs in names.items()}
    fields_of |= {f"stage_sampling.talker.{ours}": theirs for theirs, ours in talker.items()}
    return ConfigurationPatch(patch, fields_of, frozenset(body), input_field)


def object_field(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the object in the field ``name``, empty if the field is absent or null. Raises InvalidValue."""
    value = body.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise InvalidValue(f"{name} must be an object", param=name)
    return value or {}


# Options of an answer besides sampling: choices, log-probabilities, JSON schemas, priority.

#: OpenAI's limits.
MAX_CHOICES: Final = 128
MAX_TOP_LOGPROBS: Final = 20
MAX_COMPLETION_LOGPROBS: Final = 5

_RESPONSE_FORMATS: Final = (
    'response_format must be {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": '
    '{"name": "…", "schema": {…}}}'
)

#: The arguments of chat templates that the server sets itself, and those that would replace them.
_NO_TEMPLATE_ARGUMENTS: Final = frozenset(
    {
        "messages",
        "conversation",
        "tools",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "return_dict",
        "return_tensors",
        "padding",
        "truncation",
        "max_length",
        "tokenizer_kwargs",
    }
)

#: The fields of chat that only a remote server may honour, with the values that change nothing for other engines.
UPSTREAM_FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "service_tier": ("auto", "default"),
}

Word = Annotated[str, Meta(pattern=r"^[a-z_]{1,32}$")]
Choices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
Priority = Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)]


class JsonSchemaBody(Struct, frozen=True, kw_only=True):
    """The fields of OpenAI's ``response_format.json_schema``."""

    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormatBody(Struct, frozen=True, kw_only=True):
    """The fields of OpenAI's ``response_format``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaBody | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerForm:
    """A constraint on the answer's form: JSON that matches ``schema``, or any JSON object if ``schema`` is None."""

    schema: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFields:
    """Options of the answer that OpenAI bodies set outside ``session_config``.

    ``logprobs`` is the number of most probable tokens to report besides each sampled one; None reports none at all. A
    request with a lower ``priority`` runs first.
    """

    choices: int = 1
    logprobs: int | None = None
    form: AnswerForm | None = None
    priority: int = 0
    parallel_tool_calls: bool = True
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    #: Keyed by the field names of ``MediaLimitFields``.
    media_limits: Mapping[str, float] = field(default_factory=dict)
    #: Those of ``UPSTREAM_FIELDS`` that the client sent.
    upstream: Mapping[str, str] = field(default_factory=dict)


def upstream_fields(body: Struct) -> Mapping[str, str]:
    """Return the value for ``AnswerFields.upstream`` from a chat body."""
    given = {name: getattr(body, name) for name in UPSTREAM_FIELDS}
    return {name: value for name, value in given.items() if value is not None}


def chat_logprobs(wanted: bool | None, top: int | None) -> int | None:
    """Return ``AnswerFields.logprobs`` from ``logprobs`` and ``top_logprobs`` of a chat body. Raises InvalidValue."""
    if top and not wanted:
        raise InvalidValue("top_logprobs requires logprobs: true", param="top_logprobs")
    return (top or 0) if wanted else None


def completion_logprobs(wanted: bool | int | None) -> int | None:
    """Return ``AnswerFields.logprobs`` from ``logprobs`` of a completion body; true means 1. Raises InvalidValue."""
    if wanted is None or wanted is False:
        return None
    if wanted is True:
        return 1
    if not 0 <= wanted <= MAX_COMPLETION_LOGPROBS:
        raise InvalidValue(f"logprobs must be a number from 0 to {MAX_COMPLETION_LOGPROBS}", param="logprobs")
    return wanted


def with_format_hint(error: InvalidValue) -> InvalidValue:
    """Return ``error``. If it is about ``response_format``, its message names the valid forms, too."""
    if error.param is not None and error.param.partition(".")[0] == "response_format":
        error.reword(f"{error.message}; {_RESPONSE_FORMATS}")
    return error


def template_arguments(given: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return ``chat_template_kwargs`` of a chat body, empty for None.

    Raises InvalidValue for arguments that a client must not set, and for deep nesting.
    """
    given = given or {}
    for name in _NO_TEMPLATE_ARGUMENTS & given.keys():
        raise InvalidValue(f"{name} cannot be set here", param=f"chat_template_kwargs.{name}")
    check_depth(given, "chat_template_kwargs")
    return given


def answer_form(wanted: ResponseFormatBody | None) -> AnswerForm | None:
    """Return the constraint that ``response_format`` sets; None for plain text.

    Raises InvalidValue, and UnsupportedParameter for a ``$ref`` to another document, naming the field.
    """
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return AnswerForm()
    if wanted.json_schema is None:
        raise with_format_hint(InvalidValue("json_schema is missing", param="response_format.json_schema"))
    place = "response_format.json_schema.schema"
    check_depth(wanted.json_schema.schema, place)
    _check_references(wanted.json_schema.schema, place)
    return AnswerForm(schema=wanted.json_schema.schema)


def check_depth(value: Any, param: str) -> None:
    """Raise InvalidValue for a value that is nested so deeply that recursion might exhaust the stack."""
    level = [value]
    for _ in range(2 * MAX_DEPTH):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return
    raise InvalidValue(f"nested more than {2 * MAX_DEPTH} deep", param=param)


def _check_references(schema: Any, param: str) -> None:
    """Raise UnsupportedParameter for a ``$ref`` to another document: engines would silently ignore it."""
    if isinstance(schema, Mapping):
        reference = schema.get("$ref")
        if isinstance(reference, str) and not reference.startswith("#"):
            raise UnsupportedParameter(
                "external references are not supported: $ref must begin with #", param=f"{param}.$ref"
            )
    for inner in _inside(schema):
        _check_references(inner, param)


def _inside(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, list) else []


# Tools in the form of OpenAI's chat API, and the tool choice.

MAX_TOOLS = 128


class FunctionBody(Struct, frozen=True, kw_only=True):
    """OpenAI's ``function`` of a tool; ``parameters`` is a JSON Schema."""

    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(Struct, frozen=True, kw_only=True):
    """A tool of OpenAI's ``tools``. ``async`` is an extension: the conversation continues while the tool works."""

    type: Literal["function"]
    function: FunctionBody
    async_: bool = msgspec.field(default=False, name="async")


class _NamedFunction(Struct, frozen=True, kw_only=True):
    name: str


class _NamedTool(Struct, frozen=True, kw_only=True):
    type: Literal["function"]
    function: _NamedFunction


def check_tools(tools: Sequence[Mapping[str, Any]], choice: str | Mapping[str, Any] | None) -> None:
    """Validate ``tools`` and ``tool_choice``. Raises InvalidValue or UnsupportedParameter, naming the JSON path."""
    if len(tools) > MAX_TOOLS:
        raise InvalidValue(f"at most {MAX_TOOLS} tools per request, got {len(tools)}", param="tools")
    names: set[str] = set()
    for index, tool in enumerate(tools):
        place = f"tools[{index}]"
        check_depth(tool, place)
        name = converted(tool, ToolBody, place=place).function.name
        if name in names:
            raise InvalidValue(f"duplicate tool {name!r}", param=f"{place}.function.name")
        names.add(name)
    _check_choice(choice, names)


def _check_choice(choice: str | Mapping[str, Any] | None, names: set[str]) -> None:
    if choice in (None, "none", "auto"):
        return
    if choice == "required":
        if not names:
            raise InvalidValue("tool_choice required needs at least one tool", param="tool_choice")
        return
    if not isinstance(choice, Mapping):
        raise InvalidValue("tool_choice must be none, auto, required or a function", param="tool_choice")
    if choice.get("type") in ("allowed_tools", "custom", "mcp"):
        raise UnsupportedParameter(
            "tool_choice must name one function; other types are not supported", param="tool_choice.type"
        )
    wanted = converted(choice, _NamedTool, place="tool_choice").function.name
    if wanted not in names:
        raise InvalidValue(f"unknown tool {wanted[:64]!r}", param="tool_choice.function.name")


# Media: base64, ``data:`` URLs, and references to files and URLs that the server fetches.

#: The fields of a chat body with media outside the messages, in the order in which the media precede the text.
MEDIA_FIELDS: Final = {"images": Modality.IMAGE, "audios": Modality.AUDIO, "videos": Modality.VIDEO}

#: OpenAI's names of audio formats, if they differ from the server's.
_AUDIO_FORMATS: Final = {
    "pcm": AudioEncoding.PCM16,
    "g711_ulaw": AudioEncoding.PCMU,
    "g711_alaw": AudioEncoding.PCMA,
}
#: The scheme of a URL has at least two letters here: one letter is a drive of Windows.
_URL: Final = re.compile(r"[\0-\x20]*[a-zA-Z][a-zA-Z0-9+.-]+:")
#: The characters that the URL standard strips off a URL, and those that it drops anywhere in it and in base64.
_STRIPPED: Final = "".join(map(chr, range(0x21)))
_DROPPED: Final = dict.fromkeys(map(ord, "\t\r\n"))
_BLANKS: Final = re.compile(rb"[\t\n\f\r ]+")


@dataclass(frozen=True, slots=True)
class MediaFile:
    """A reference to a file in the server's media folder. ``place`` is the JSON path of the reference."""

    path: str
    modality: Modality
    place: str

    def chunk(self, data: bytes) -> InputChunk:
        """Return the input chunk with the file's content. Raises UnsupportedFormat."""
        if self.modality is Modality.AUDIO:
            suffix = PurePath(self.path).suffix.removeprefix(".").lower()
            encoding = encoding_by_head(data) or audio_encoding(suffix, self.place)
            return InputChunk(Modality.AUDIO, data, format=encoding.value)
        return _checked_image(InputChunk(self.modality, data), self.place)


@dataclass(frozen=True, slots=True)
class MediaUrl:
    """A reference to an ``http:`` or ``https:`` URL. ``place`` is the JSON path of the reference."""

    url: str
    modality: Modality
    place: str

    def chunk(self, data: bytes, media_type: str) -> InputChunk:
        """Return the input chunk with the content of the URL.

        The format of audio is known by the first bytes or else, as that of other media, by ``media_type``, the type of
        the HTTP response. If that is "" or of another kind of media, the suffix of the URL's path decides. Raises
        UnsupportedFormat.
        """
        kind = media_type.strip().lower()
        if self.modality is Modality.AUDIO and (encoding := encoding_by_head(data)):
            return InputChunk(Modality.AUDIO, data, format=encoding.value)
        if kind.startswith(f"{self.modality}/"):
            return _checked_image(InputChunk(self.modality, data, format=kind), self.place)
        return MediaFile(urlsplit(self.url).path, self.modality, self.place).chunk(data)


NamedMedia: TypeAlias = MediaFile | MediaUrl


def read_media(body: Mapping[str, Any]) -> Iterator[InputChunk | NamedMedia]:
    """Yield the media in ``images``, ``audios`` and ``videos``. Raises an InvalidRequest that names the JSON path."""
    for name, modality in MEDIA_FIELDS.items():
        value = body.get(name)
        if value is None:
            continue
        if not isinstance(value, list):
            raise InvalidValue(f"{name} must be a list of data: URLs or paths", param=name)
        for index, item in enumerate(value):
            place = f"{name}[{index}]"
            if isinstance(item, str) and item and not _URL.match(item):
                yield MediaFile(item, modality, place)
            else:
                yield media_by_url(item, modality, place)


def audio_encoding(name: str, param: str) -> AudioEncoding:
    """Return the encoding for a name of an audio format, OpenAI's or the server's. Raises UnsupportedFormat."""
    try:
        return _AUDIO_FORMATS.get(name) or AudioEncoding(name)
    except ValueError:
        known = ", ".join(sorted({*AudioEncoding, *_AUDIO_FORMATS}))
        raise UnsupportedFormat(f"unsupported audio format {name[:32]!r}; supported: {known}", param=param) from None


def audio_chunk(audio: Any, where: str) -> InputChunk:
    """Return the chunk for an ``input_audio`` part at the JSON path ``where``.

    Raises InvalidValue or UnsupportedFormat.
    """
    if not isinstance(audio, Mapping):
        raise InvalidValue("input_audio must be an object", param=where)
    kind, data = audio.get("format", "wav"), audio.get("data")
    for name, value in (("format", kind), ("data", data)):
        if not isinstance(value, str):
            raise InvalidValue(f"{name} must be a string", param=f"{where}.{name}")
    content = _base64(str(data), f"{where}.data")
    encoding = encoding_by_head(content) or audio_encoding(kind, f"{where}.format")
    return InputChunk(Modality.AUDIO, content, format=encoding.value)


def media_by_url(url: Any, modality: Modality, where: str) -> InputChunk | MediaUrl:
    """Return the content of a ``data:`` URL as a chunk, or a reference to any other URL.

    Raises InvalidValue, UnsupportedParameter or UnsupportedFormat, naming ``where``.
    """
    if not isinstance(url, str):
        raise InvalidValue("url must be a string", param=where)
    url = url.strip(_STRIPPED)
    scheme = url[:8].partition(":")[0].lower()
    if scheme in ("https", "http"):
        return MediaUrl(url, modality, where)
    if scheme != "data":
        raise UnsupportedParameter("media must be given as data:, https: or http: URLs", param=where)
    return _data_url(url[5:], modality, where)


def _data_url(rest: str, modality: Modality, where: str) -> InputChunk:
    """Return the content of a ``data:`` URL. ``rest`` is the URL without the scheme."""
    head, comma, data = rest.partition("#")[0].partition(",")
    if not comma:
        raise InvalidValue("a data: URL must have a comma before its data", param=where)
    mime, *attributes = (one.strip() for one in _without_line_ends(head).lower().split(";"))
    content = _base64_of_url(data, where) if "base64" in attributes else _unquoted(_without_line_ends(data))
    if modality is Modality.AUDIO and (encoding := encoding_by_head(content)):
        return InputChunk(Modality.AUDIO, content, format=encoding.value)
    if not mime.startswith(f"{modality}/"):
        raise UnsupportedFormat(f"expected media type {modality}/*, got {mime[:64]!r}", param=where)
    if modality is Modality.AUDIO:  # the sample rate of a raw format is one of the parameters
        mime = ";".join([mime, *(one for one in attributes if one and one != "base64")])
    if len(mime) > MAX_FORMAT_CHARACTERS:
        raise UnsupportedFormat(f"a media type has at most {MAX_FORMAT_CHARACTERS} characters", param=where)
    return _checked_image(InputChunk(modality, content, format=mime), where)


def _unquoted(text: str) -> bytes:
    return unquote_to_bytes(text.encode("utf-8", "replace"))


def _without_line_ends(text: str) -> str:
    """Return a URL without the characters that the URL standard drops anywhere in it."""
    return text.translate(_DROPPED) if any(one in text for one in "\t\r\n") else text


def _base64_of_url(data: str, where: str) -> bytes:
    """Decode base64 as the URL standard does: percent-encoding, white space and missing padding are no errors."""
    if len(data) % 4 == 0:
        with suppress(ValueError):
            return base64.b64decode(data, validate=True)
    encoded = _BLANKS.sub(b"", _unquoted(data))
    if len(encoded) % 4 == 0:
        encoded = encoded[:-4] + encoded[-4:].removesuffix(b"=").removesuffix(b"=")
    if b"=" in encoded:
        raise InvalidValue("not base64", param=where)
    return _base64(encoded + b"=" * (-len(encoded) % 4), where)


def _checked_image(chunk: InputChunk, where: str) -> InputChunk:
    if chunk.modality is Modality.IMAGE and sniff_image(chunk.payload) is None:
        raise UnsupportedFormat("unsupported image format; supported: png, jpeg, webp, gif, bmp", param=where)
    return chunk


def _base64(data: str | bytes, where: str) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidValue("not base64", param=where) from None


# Limits of a chat body on the size of images, and on the size and frame rate of videos.

MAX_FRAMES: Final = 4096
ImagePixels = Annotated[int, Meta(ge=1, le=32 * 1024 * 1024)]
FramePixels = Annotated[int, Meta(ge=1, le=4096 * 2160)]
Frames = Annotated[int, Meta(ge=1, le=MAX_FRAMES)]


class MediaLimitFields(Struct, frozen=True, kw_only=True):
    """Fields that override how the engine scales images and samples videos.

    Pixel counts are of a whole image or frame; ``video_total_pixels`` is the sum over all frames of a video.
    """

    image_min_pixels: ImagePixels | None = None
    image_max_pixels: ImagePixels | None = None
    video_min_pixels: FramePixels | None = None
    video_max_pixels: FramePixels | None = None
    video_fps: Annotated[float, Meta(gt=0, le=240)] | None = None
    video_min_frames: Frames | None = None
    video_max_frames: Frames | None = None
    video_total_pixels: Annotated[int, Meta(ge=1, le=MAX_FRAMES * 4096 * 2160)] | None = None

    @property
    def given(self) -> dict[str, float]:
        """The limits that are set, by field name. Raises InvalidValue for a minimum above its maximum."""
        for kind, unit in (("image", "pixels"), ("video", "pixels"), ("video", "frames")):
            least, most = getattr(self, f"{kind}_min_{unit}"), getattr(self, f"{kind}_max_{unit}")
            if least is not None and most is not None and least > most:
                raise InvalidValue(f"{kind}_min_{unit} must not exceed {kind}_max_{unit}", param=f"{kind}_min_{unit}")
        names = MediaLimitFields.__struct_fields__
        return {name: value for name in names if (value := getattr(self, name)) is not None}

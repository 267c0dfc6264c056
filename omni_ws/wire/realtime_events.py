"""Codecs of the events and items of OpenAI's Realtime API.

Each message is one event, a JSON object with a ``type``. The structs have only the fields that have an effect.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from sys import getsizeof
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct

from omni_ws.core.chunks import CHUNK_OVERHEAD_BYTES, MAX_ID_CHARACTERS, InputChunk, Modality, Usage
from omni_ws.core.json_values import check_values
from omni_ws.core.quota import memory_of
from omni_ws.errors import (
    Busy,
    EngineError,
    InvalidFrame,
    InvalidRequest,
    InvalidValue,
    OmniError,
    UnsupportedParameter,
)
from omni_ws.wire.openai_fields import MediaUrl, check_depth, media_by_url
from omni_ws.wire.session_config import place_and_text

# From JSON to structs.

#: OpenAI's limit on the entries of ``metadata``.
MAX_METADATA: Final = 16

Kind = TypeVar("Kind")
#: The id of an item, a response, an event or a call, and the name of a function.
Id: TypeAlias = Annotated[str, Meta(max_length=MAX_ID_CHARACTERS)]

_decoder: Final = msgspec.json.Decoder()

#: For error messages: what a value must be, by the name that msgspec gives the type.
_MUST_BE: Final = {
    "object": "an object",
    "array": "a list",
    "str": "a string",
    "bytes": "a string",
    "float": "a number, 0 or more",
}
#: For error messages: what certain fields must be, by their names, if more than the type is to be said.
_TEXTS: Final = {
    "role": "{path} must be system, user or assistant",
    "audio.input.turn_detection.idle_timeout_ms": "{path} must be a number from 5000 to 30000",
    "audio.output.speed": "{path} must be a number from 0.25 to 1.5",
    "reasoning.effort": "{path} must be minimal, low, medium, high or xhigh",
    "parallel_tool_calls": "{path} must be true or false",
    "truncation.retention_ratio": "{path} must be a number from 0 to 1",
    "truncation.token_limits.post_instructions": "{path} must be a whole number, 1 or more",
    "truncation.type": "{path} must be retention_ratio",
    "truncation": "{path} must be auto, disabled or an object of the type retention_ratio",
    "output_modalities": "output_modalities must be a list of text or audio",
    "tools": "tools must be a list of objects",
    "input": "response.input must be a list of items",
    "metadata": f"metadata must be an object of at most {MAX_METADATA} strings of at most 512 characters under names "
    "of 64",
}
_EXPECTED: Final = re.compile("Expected `(?P<types>[^`]+)`(?: of length <= (?P<length>[0-9]+))?")


def decode_event(data: bytes | bytearray | memoryview) -> dict[str, Any]:
    """Parse an event to its fields, for ``check_event``. Raises InvalidFrame for anything but a JSON object."""
    try:
        check_values(data)
        event = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise InvalidFrame("the message is not valid JSON") from None
    if not isinstance(event, dict):
        raise InvalidFrame("the message must be a JSON object")
    return event


def check_event(event: Mapping[str, Any]) -> None:
    """Raise InvalidFrame for an event without a ``type``, and InvalidValue for one that is nested too deeply."""
    if not isinstance(event.get("type"), str):
        raise InvalidFrame("the event has no type", param="type")
    for name, value in event.items():
        if isinstance(value, dict | list):
            check_depth(value, name)


def read(value: Any, kind: type[Kind], place: str = "") -> Kind:
    """Convert ``value``, found at the path ``place``, to the type ``kind``. Raises InvalidValue, naming the field."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        name, text = place_and_text(error)
        is_missing = text.startswith("Object missing")
        if is_missing and "." not in name:  # null is treated as a missing object
            return read({**value, name: None}, kind, place)
        whole = name.partition("[")[0]
        if whole in _TEXTS:
            path = f"{place}.{whole}".strip(".")
            raise InvalidValue(_TEXTS[whole].format(path=path), param=path) from None
        path = f"{place}.{name}".strip(".")
        raise InvalidValue(f"{path} {'is missing' if is_missing else _wrong(text)}", param=path) from None


def optional_id(value: Any, place: str) -> str | None:
    """Return ``value`` as an id; None if it is null or empty. Raises InvalidValue, naming the field ``place``."""
    return read(value, Id, place) if value else None


def _wrong(text: str) -> str:
    """Reword msgspec's message about an invalid value."""
    if text.startswith("Invalid base64"):
        return "is not base64"
    if (expected := _EXPECTED.match(text)) is None:
        return "must be a number, 0 or more"  # a number beyond the range of any type
    if expected["length"] is not None:
        return f"is too long: at most {expected['length']} characters"
    types = expected["types"].split(" | ")
    return f"must be {_MUST_BE['object' if 'object' in types else types[0]]}"


#: A time in milliseconds, or an index, in an event of a client.
Number: TypeAlias = Annotated[float, Meta(ge=0, lt=1 << 53)]


# Items: messages, calls of functions and their outputs.

#: The memory that an item takes besides its content, and that each part of it takes.
ITEM_OVERHEAD_BYTES: Final = 1024
PART_OVERHEAD_BYTES: Final = 256
# Tuples and no sets, because the value that is looked up may be any JSON value, also an unhashable one.
_WRITTEN: Final = ("input_text", "output_text", "text")
_SPOKEN: Final = ("output_audio", "audio")


class PartFields(Struct, frozen=True, kw_only=True):
    """A part of a message; ``type`` determines which of the fields it needs."""

    type: Any = None
    text: Any = None
    audio: Any = None
    transcript: Any = None
    image_url: Any = None


class MessageFields(Struct, frozen=True, kw_only=True):
    """An item of the kind ``message``."""

    role: Literal["system", "developer", "user", "assistant"]
    content: list[PartFields]


class CallFields(Struct, frozen=True, kw_only=True):
    """An item of the kind ``function_call``."""

    call_id: Id
    name: Id
    arguments: str


class CallOutputFields(Struct, frozen=True, kw_only=True):
    """An item of the kind ``function_call_output``. An ``output`` that is not text is replaced by its JSON."""

    call_id: Id
    output: Any = None


ItemKind: TypeAlias = (
    Literal["message", "function_call", "function_call_output"]
    | Literal["mcp_list_tools", "mcp_call", "mcp_approval_request", "mcp_approval_response"]
)


@dataclass(slots=True, kw_only=True)
class Item:
    """One item of a conversation.

    ``content`` is the content of a message as clients see it. ``chunks`` is the item's content as input for the engine:
    empty for items of the assistant, and once a request has taken the input.
    """

    item_id: str
    kind: ItemKind = "message"
    role: str = ""
    status: str = "completed"
    content: list[dict[str, Any]] = field(default_factory=list)
    call_id: str = ""
    name: str = ""
    #: The arguments of a call, or the output of a function.
    text: str = ""
    chunks: list[InputChunk] = field(default_factory=list)
    #: The request to which it belongs, if any.
    request_id: str | None = None
    #: The fields of an item of MCP, as clients see them.
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """The bytes that are charged for the item: its size in memory."""
        texts = [value for part in self.content for value in part.values() if isinstance(value, str)]
        return (
            ITEM_OVERHEAD_BYTES
            + sum(map(getsizeof, (self.text, self.call_id, self.name, *texts)))
            + PART_OVERHEAD_BYTES * len(self.content)
            + (memory_of(self.extra) if self.extra else 0)
            + sum(CHUNK_OVERHEAD_BYTES + len(chunk.payload) for chunk in self.chunks)
        )

    @property
    def message_text(self) -> str:
        """The words of a message: its texts, and the transcripts of its audio."""
        return " ".join(filter(None, (part.get("text") or part.get("transcript") for part in self.content)))

    @property
    def is_answer(self) -> bool:
        """Whether the item is of the model: a message of the assistant, or a function call."""
        return self.role == "assistant" or self.kind == "function_call"

    def begin_again(self) -> None:
        """Prepare the item for another session: it belongs to no request; if it was in progress, it is incomplete."""
        self.request_id = None
        if self.status == "in_progress":
            self.status = "incomplete"

    def asked(self, request_id: str) -> list[InputChunk]:
        """Assign the item to the request that answers it. Remove and return the item's input chunks."""
        self.request_id = request_id
        return self.take_chunks()

    def take_chunks(self) -> list[InputChunk]:
        """Remove and return the input chunks."""
        taken, self.chunks = self.chunks, []
        return taken

    def wait(self, chunks: list[InputChunk]) -> None:
        """Set the item's input chunks, which it keeps until a response is requested; it belongs to no request."""
        self.request_id, self.chunks = None, chunks

    def complete(self, status: str, *, content: Iterable[dict[str, Any]] = (), text: str = "") -> None:
        """Complete an item of the assistant: set its status, and its content and text."""
        self.status, self.content, self.text = status, list(content), text

    def cut(self, heard: str) -> None:
        """Shorten the text of an answer to ``heard``."""
        for part in self.content:
            part["transcript" if "transcript" in part else "text"] = heard

    def shown(self) -> dict[str, Any]:
        """Return the item in the form that clients see."""
        common = {"id": self.item_id, "object": "realtime.item", "type": self.kind, "status": self.status}
        match self.kind:
            case "message":
                return {**common, "role": self.role, "content": [dict(part) for part in self.content]}
            case "function_call":
                return {**common, "call_id": self.call_id, "name": self.name, "arguments": self.text}
            case kind if self.extra:
                return {"id": self.item_id, "type": kind, **self.extra}
        return {**common, "call_id": self.call_id, "output": self.text}


def read_item(fields: Mapping[str, Any], new_id: str, *, place: str = "item") -> Item:
    """Parse the item of a ``conversation.item.create``. An item without an id gets ``new_id``.

    Raises InvalidValue, UnsupportedParameter or UnsupportedFormat, naming the field.
    """
    item_id = optional_id(fields.get("id"), f"{place}.id") or new_id
    match fields.get("type"):
        case "message":
            return _message(read(fields, MessageFields, place), item_id, place)
        case "function_call" as kind:
            call = read(fields, CallFields, place)
            return Item(item_id=item_id, kind=kind, call_id=call.call_id, name=call.name, text=call.arguments)
        case "function_call_output" as kind:
            result = read(fields, CallOutputFields, place)
            text = result.output if isinstance(result.output, str) else msgspec.json.encode(result.output).decode()
            chunk = InputChunk(Modality.TEXT, text.encode(), tool_call_id=result.call_id)
            return Item(item_id=item_id, kind=kind, call_id=result.call_id, text=text, chunks=[chunk])
        case str(other):
            raise UnsupportedParameter(f"items of type {other[:64]!r} are not supported here", param=f"{place}.type")
    raise InvalidValue(f"{place}.type must be a string", param=f"{place}.type")


def _message(fields: MessageFields, item_id: str, place: str) -> Item:
    item = Item(item_id=item_id, role="system" if fields.role == "developer" else fields.role)
    for index, part in enumerate(fields.content):
        _add_part(item, part, f"{place}.content[{index}]")
    return item


def _add_part(item: Item, part: PartFields, where: str) -> None:
    if part.type in _WRITTEN:
        text = read(part.text, str, f"{where}.text")
        shown = "output_text" if item.role == "assistant" else "input_text"
        item.content.append({"type": shown, "text": text})
        if item.role != "assistant":
            # A line break keeps two parts from running together.
            item.chunks.append(InputChunk(Modality.TEXT, (("\n" if item.chunks else "") + text).encode()))
    elif part.type in _SPOKEN and item.role == "assistant":
        item.content.append({"type": "output_audio", "transcript": str(part.transcript or "")})
    elif part.type == "input_audio" and item.role == "user":
        item.chunks.append(InputChunk(Modality.AUDIO, read(part.audio, bytes, f"{where}.audio")))
        transcript = part.transcript if isinstance(part.transcript, str) else None
        item.content.append({"type": "input_audio", "transcript": transcript})
    elif part.type == "input_image" and item.role == "user":
        image = media_by_url(part.image_url, Modality.IMAGE, f"{where}.image_url")
        if isinstance(image, MediaUrl):
            raise UnsupportedParameter("images must be data: URLs here", param=f"{where}.image_url")
        item.chunks.append(image)
        item.content.append({"type": "input_image"})
    else:
        kind = str(part.type)[:64]
        raise InvalidValue(f"{where}.type {kind!r} does not fit the role {item.role}", param=f"{where}.type")


def items_in(event: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of each field of an event that should hold an item; values are not checked."""
    yield "item", event.get("item")
    response = event.get("response")
    given = response.get("input") if isinstance(response, Mapping) else None
    if isinstance(given, list):
        yield from ((f"response.input[{index}]", one) for index, one in enumerate(given))


# Events of the server

_encoder: Final = msgspec.json.Encoder()

#: OpenAI's error codes that differ from ours.
_CODES: Final = {
    "rate_limited": "rate_limit_exceeded",
    "invalid_frame": "invalid_event",
    "unknown_type": "invalid_event",
}


class RealtimeRefusal(InvalidRequest):
    """A refusal with an error code that only OpenAI's API has. Other front ends never see it."""

    def __init__(self, code: str, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self._code = code

    @property
    def code(self) -> str:
        return self._code


def encode_event(event: dict[str, Any]) -> bytes:
    """Encode the event as JSON, with bytes as base64."""
    return _encoder.encode(event)


def error_event(error: OmniError, *, event_id: str | None = None) -> dict[str, Any]:
    """Return the event that reports an error. ``event_id`` is the id of the client's event that caused it."""
    return {"type": "error", "error": error_fields(error, event_id=event_id)}


def item_event(step: Literal["added", "done"], item: Item, *, previous: str | None) -> dict[str, Any]:
    """Return the event ``conversation.item.added`` or ``.done``; ``previous`` is the id of the item before."""
    return {"type": f"conversation.item.{step}", "previous_item_id": previous, "item": item.shown()}


def error_fields(error: OmniError, *, event_id: str | None = None) -> dict[str, Any]:
    """Return OpenAI's error object. ``event_id`` is the id of the client's event that caused the error."""
    kind = "invalid_request_error"
    if isinstance(error, EngineError):
        kind = "server_error"
    elif isinstance(error, Busy):
        kind = "rate_limit_error" if error.code == "rate_limited" else "server_error"
    return {
        "type": kind,
        "code": _CODES.get(error.code, error.code),
        "message": error.message,
        "param": error.param,
        "event_id": event_id,
    }


def usage_fields(usage: Usage) -> dict[str, Any]:
    """Return the usage of a response. All tokens count as text: the engines do not count audio in tokens."""
    cached = usage.cached_tokens or 0
    return {
        "total_tokens": usage.total_tokens,
        "input_tokens": usage.input_tokens,
        "output_tokens": usage.output_tokens,
        "input_token_details": {
            "text_tokens": usage.input_tokens,
            "audio_tokens": 0,
            "image_tokens": 0,
            "cached_tokens": cached,
            "cached_tokens_details": {"text_tokens": cached, "audio_tokens": 0, "image_tokens": 0},
        },
        "output_token_details": {"text_tokens": usage.output_tokens, "audio_tokens": 0},
    }


# The verdicts on OpenAI's Realtime API: for every name in it, whether this server acts on it.
#
# ``realtime_parity.toml`` has the table; docs/realtime-parity.md is generated from it. A test compares it with the
# types of the ``openai`` package.


#: The section of names that are not OpenAI's. They are written whole.
EXTENSION: Final = "extension"
_BRACES: Final = re.compile(r"^(?P<begin>.*)\{(?P<ends>[^{}]+)\}$")


class ParityVerdict(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The effect of one field or event of OpenAI's Realtime API here: one row of ``realtime_parity.toml``.

    Exactly one of ``acts``, ``not_in_effect`` and ``refused`` is set. ``acts`` names the test that would fail if the
    server only echoed the value; ``otherwise`` then says which engines lack the ability for it. ``not_in_effect`` and
    ``refused`` are reasons.
    """

    acts: str = ""
    otherwise: str = ""
    not_in_effect: str = ""
    refused: str = ""
    #: Whether the name is not OpenAI's.
    extension: bool = False

    @property
    def reason(self) -> str:
        """Why the value has no effect, or is refused; empty if it always acts."""
        return self.otherwise or self.not_in_effect or self.refused


@cache
def verdicts() -> dict[str, ParityVerdict]:
    """Return the verdicts by name, in the order of the table: ``session.audio.output.speed``.

    A verdict other than ``acts`` also applies to all names below the name.
    """
    text = resources.files("omni_ws.wire").joinpath("realtime_parity.toml").read_text(encoding="utf-8")
    found: dict[str, ParityVerdict] = {}
    for section, rows in tomllib.loads(text).items():
        for key, row in rows.items():
            verdict = msgspec.convert({**row, "extension": section == EXTENSION}, ParityVerdict)
            for name in _names(section, key):
                if name in found:
                    raise ValueError(f"realtime_parity.toml: {name} has two verdicts")
                found[name] = verdict
    return found


def verdict_of(name: str) -> ParityVerdict | None:
    """Return the verdict on a name: its own row, or the row of an object around it; None for an unknown name."""
    table = verdicts()
    if (own := table.get(name)) is not None:
        return own
    while "." in name:
        name = name.rpartition(".")[0]
        if (above := table.get(name)) is not None:
            return None if above.acts else above
    return None


@cache
def _with_fields() -> frozenset[str]:
    return frozenset(name.rpartition(".")[0] for name in verdicts())


def with_fields(name: str) -> bool:
    """Return whether the table has rows for the fields of the object, or list of objects, ``name``."""
    return name in _with_fields()


def _names(section: str, key: str) -> Iterator[str]:
    """Yield the names of one row: ``begin.one`` and ``begin.two`` for the key ``begin.{one,two}``."""
    begin = "" if section == EXTENSION else f"{section}."
    if (braces := _BRACES.match(key)) is None:
        yield f"{begin}{key}"
        return
    for end in braces["ends"].split(","):
        yield f"{begin}{braces['begin']}{end}"


def parity_lines() -> Iterator[str]:
    """Yield the rows of docs/realtime-parity.md, a table for each section."""
    section = ""
    for name, verdict in verdicts().items():
        place, _, rest = (EXTENSION, "", name) if verdict.extension else name.partition(".")
        if place != section:
            section = place
            yield from ("", f"## {_TITLES[section]}", "", "| name | verdict | |", "|---|---|---|")
        yield f"| `{rest}` | {_words(verdict)} |"


_TITLES: Final = {
    "query": "The URL",
    "client": "Client events",
    "session": "The session: `session.update` and client secrets",
    "response": "The response: `response.create`",
    "item": "Items: `conversation.item.create`, and the `input` of a response",
    "server": "Server events, and the response object in them (`response.…`)",
    EXTENSION: "Extensions, which OpenAI does not have",
}


def _words(verdict: ParityVerdict) -> str:
    if verdict.acts:
        return f"acts | {f'otherwise not in effect: {verdict.otherwise}' if verdict.otherwise else ''}".rstrip()
    if verdict.not_in_effect:
        return f"not in effect | {verdict.not_in_effect}"
    return f"refused | {verdict.refused}"

"""Events and items of OpenAI's Realtime API.

An event is one JSON object in each message, of the kind that ``type`` names.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from sys import getsizeof
from typing import Any, Final, Literal

import msgspec

from omni_ws.core.chunks import CHUNK_OVERHEAD_BYTES, MAX_ID_CHARACTERS, InputChunk, Modality, Usage
from omni_ws.core.json_values import check_values
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

# Events of clients, and the values of their fields.

#: OpenAI's limit for the entries of ``metadata``.
MAX_METADATA: Final = 16

_decoder: Final = msgspec.json.Decoder()


def decode_event(data: bytes | bytearray | memoryview) -> dict[str, Any]:
    """The fields of an event, for ``check_event``. Raises InvalidFrame for what is no JSON object."""
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


def text_field(fields: Mapping[str, Any], name: str, *, place: str = "") -> str:
    """The string in this field. Raises InvalidValue where there is none."""
    value = fields.get(name)
    if not isinstance(value, str):
        raise InvalidValue(f"{place}{name} must be a string", param=f"{place}{name}")
    return value


def id_field(fields: Mapping[str, Any], name: str, *, place: str = "") -> str:
    """The id or name in this field. Raises InvalidValue where there is none, or one that is too long."""
    value = text_field(fields, name, place=place)
    if len(value) > MAX_ID_CHARACTERS:
        raise InvalidValue(f"{place}{name} is too long: at most {MAX_ID_CHARACTERS} characters", param=f"{place}{name}")
    return value


def optional_id(fields: Mapping[str, Any], name: str, *, place: str = "") -> str | None:
    """The id in this field; None where it is absent, null or empty. Raises InvalidValue."""
    return id_field(fields, name, place=place) if fields.get(name) else None


def number_field(fields: Mapping[str, Any], name: str, *, default: float | None = None) -> float:
    """The number in this field, which is not negative. Raises InvalidValue."""
    value = fields.get(name, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1 << 53:
        raise InvalidValue(f"{name} must be a number, 0 or more", param=name)
    return value


def metadata_field(fields: Mapping[str, Any]) -> dict[str, str] | None:
    """The ``metadata`` of a response, names with short texts. Raises InvalidValue."""
    value = fields.get("metadata")
    if value is None:
        return None
    texts = isinstance(value, Mapping) and all(
        len(name) <= 64 and isinstance(one, str) and len(one) <= 512 for name, one in value.items()
    )
    if not texts or len(value) > MAX_METADATA:
        raise InvalidValue(
            f"metadata must be an object of at most {MAX_METADATA} strings of at most 512 characters under names of 64",
            param="response.metadata",
        )
    return dict(value)


def base64_field(fields: Mapping[str, Any], name: str, *, place: str = "") -> bytes:
    """The bytes in this field. Raises InvalidValue where it is not base64."""
    try:
        return base64.b64decode(text_field(fields, name, place=place), validate=True)
    except (binascii.Error, ValueError):
        raise InvalidValue(f"{place}{name} is not base64", param=f"{place}{name}") from None


# Items: messages, calls of functions and their outputs.

#: What an item costs besides its content, and of that each part.
ITEM_OVERHEAD_BYTES: Final = 1024
PART_OVERHEAD_BYTES: Final = 256
# Tuples, because what is looked for may be anything that JSON has.
_ROLES: Final = ("system", "user", "assistant")
_TEXTS: Final = ("input_text", "output_text", "text")
_SPOKEN: Final = ("output_audio", "audio")


@dataclass(slots=True, kw_only=True)
class Item:
    """One item of a conversation.

    ``content`` is what a client is shown of a message. ``chunks`` is the input that it is for the engine: empty for
    what the assistant said, and for items whose request has been answered.
    """

    item_id: str
    kind: Literal["message", "function_call", "function_call_output"] = "message"
    role: str = ""
    status: str = "completed"
    content: list[dict[str, Any]] = field(default_factory=list)
    call_id: str = ""
    name: str = ""
    #: The arguments of a call, or the output of a function.
    text: str = ""
    chunks: list[InputChunk] = field(default_factory=list)
    #: The request that it belongs to, where it has one.
    request_id: str | None = None

    @property
    def size(self) -> int:
        """The bytes that it is charged with: the memory that it takes."""
        texts = [value for part in self.content for value in part.values() if isinstance(value, str)]
        return (
            ITEM_OVERHEAD_BYTES
            + sum(map(getsizeof, (self.text, self.call_id, self.name, *texts)))
            + PART_OVERHEAD_BYTES * len(self.content)
            + sum(CHUNK_OVERHEAD_BYTES + len(chunk.payload) for chunk in self.chunks)
        )

    @property
    def message_text(self) -> str:
        """The words of a message: its texts, and the transcripts of its audio."""
        return " ".join(filter(None, (part.get("text") or part.get("transcript") for part in self.content)))

    def shown(self) -> dict[str, Any]:
        """The item as a client is shown it."""
        common = {"id": self.item_id, "object": "realtime.item", "type": self.kind, "status": self.status}
        match self.kind:
            case "message":
                return {**common, "role": self.role, "content": [dict(part) for part in self.content]}
            case "function_call":
                return {**common, "call_id": self.call_id, "name": self.name, "arguments": self.text}
        return {**common, "call_id": self.call_id, "output": self.text}


def read_item(fields: Mapping[str, Any], new_id: str, *, place: str = "item") -> Item:
    """The item of ``conversation.item.create``, under its own id or else ``new_id``.

    Raises InvalidValue, UnsupportedParameter or UnsupportedFormat, naming the field.
    """
    item_id = optional_id(fields, "id", place=f"{place}.") or new_id
    kind = fields.get("type")
    if kind == "message":
        return _message(fields, item_id, place)
    if kind == "function_call":
        call_id, name = (id_field(fields, one, place=f"{place}.") for one in ("call_id", "name"))
        arguments = text_field(fields, "arguments", place=f"{place}.")
        return Item(item_id=item_id, kind=kind, call_id=call_id, name=name, text=arguments)
    if kind == "function_call_output":
        call_id = id_field(fields, "call_id", place=f"{place}.")
        output = fields.get("output")
        output = output if isinstance(output, str) else json.dumps(output)
        chunk = InputChunk(Modality.TEXT, output.encode(), tool_call_id=call_id)
        return Item(item_id=item_id, kind=kind, call_id=call_id, text=output, chunks=[chunk])
    if isinstance(kind, str):
        raise UnsupportedParameter(f"items of type {kind[:64]!r} are not supported here", param=f"{place}.type")
    raise InvalidValue(f"{place}.type must be a string", param=f"{place}.type")


def _message(fields: Mapping[str, Any], item_id: str, place: str) -> Item:
    role = fields.get("role")
    role = "system" if role == "developer" else role
    if role not in _ROLES:
        raise InvalidValue(f"{place}.role must be system, user or assistant", param=f"{place}.role")
    content = fields.get("content")
    if not isinstance(content, list):
        raise InvalidValue(f"{place}.content must be a list", param=f"{place}.content")
    item = Item(item_id=item_id, role=str(role))
    for index, part in enumerate(content):
        where = f"{place}.content[{index}]"
        if not isinstance(part, Mapping):
            raise InvalidValue(f"{where} must be an object", param=where)
        _add_part(item, part, where)
    return item


def _add_part(item: Item, part: Mapping[str, Any], where: str) -> None:
    kind = part.get("type")
    if kind in _TEXTS:
        text = text_field(part, "text", place=f"{where}.")
        shown = "output_text" if item.role == "assistant" else "input_text"
        item.content.append({"type": shown, "text": text})
        if item.role != "assistant":
            # A line break keeps two parts from running together.
            item.chunks.append(InputChunk(Modality.TEXT, (("\n" if item.chunks else "") + text).encode()))
    elif kind in _SPOKEN and item.role == "assistant":
        item.content.append({"type": "output_audio", "transcript": str(part.get("transcript") or "")})
    elif kind == "input_audio" and item.role == "user":
        audio = base64_field(part, "audio", place=f"{where}.")
        transcript = part.get("transcript")
        item.content.append({"type": "input_audio", "transcript": transcript if isinstance(transcript, str) else None})
        item.chunks.append(InputChunk(Modality.AUDIO, audio))
    elif kind == "input_image" and item.role == "user":
        image = media_by_url(part.get("image_url"), Modality.IMAGE, f"{where}.image_url")
        if isinstance(image, MediaUrl):
            raise UnsupportedParameter("images must be data: URLs here", param=f"{where}.image_url")
        item.content.append({"type": "input_image"})
        item.chunks.append(image)
    else:
        raise InvalidValue(f"{where}.type {str(kind)[:64]!r} does not fit the role {item.role}", param=f"{where}.type")


# Events of the server.

_encoder: Final = msgspec.json.Encoder()

#: The codes of OpenAI where they differ.
_CODES: Final = {
    "rate_limited": "rate_limit_exceeded",
    "invalid_frame": "invalid_event",
    "unknown_type": "invalid_event",
}


class RealtimeRefusal(InvalidRequest):
    """A refusal with a code of OpenAI's, which only its own API has. Never reaches another front end."""

    def __init__(self, code: str, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self._code = code

    @property
    def code(self) -> str:
        return self._code


def encode_event(event: dict[str, Any]) -> bytes:
    """The event as JSON, with bytes as base64."""
    return _encoder.encode(event)


def error_fields(error: OmniError, *, event_id: str | None = None) -> dict[str, Any]:
    """OpenAI's error object. ``event_id`` is that of the client's event that caused it."""
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
    """The usage of a response. All its tokens are those of text: the engines do not count audio in tokens."""
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

"""The client events of OpenAI's Realtime API: one JSON object in each message, of the kind that ``type`` names."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from omni_ws.core.chunks import MAX_ID_CHARACTERS
from omni_ws.core.json_values import check_values
from omni_ws.errors import InvalidFrame, InvalidValue
from omni_ws.wire.openai_options import check_depth

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


def mapping_field(fields: Mapping[str, Any], name: str, *, place: str = "") -> Mapping[str, Any]:
    """The object in this field; an empty one where it is absent or null. Raises InvalidValue."""
    value = fields.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidValue(f"{place}{name} must be an object", param=f"{place}{name}")
    return value


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

"""Types of configuration values, and their text forms."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr

MIB: Final = 1024**2

_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)
_SIZE_UNITS: Final = {
    "": 1,
    "b": 1,
    "kb": 1000,
    "mb": 1000**2,
    "gb": 1000**3,
    "kib": 1024,
    "mib": 1024**2,
    "gib": 1024**3,
}


def parse_size(value: object) -> object:
    """Parses a number of bytes: a number, or text such as ``65536``, ``64KiB`` or ``1.5MB``.

    Returns a value of another type unchanged, for the type check that follows. Raises ValueError for bad text.
    """
    if not isinstance(value, str):
        return _not_a_switch(value)
    match = _SIZE.fullmatch(value)
    factor = _SIZE_UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ValueError(
            "is not a size: a number of bytes, or a number with KiB, MiB, GiB, KB, MB or GB, such as 64MiB"
        )
    size = float(match[1]) * factor if "." in match[1] else int(match[1]) * factor
    if size != int(size):
        raise ValueError("is not a whole number of bytes")
    return int(size)


def format_size(size: int) -> str:
    """Returns the shortest exact text that ``parse_size`` reads."""
    for unit, factor in (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if size and size % factor == 0:
            return f"{size // factor}{unit}"
    return str(size)


def parse_list(text: str) -> list[Any]:
    """Parses ``a,b`` or a JSON list; empty text is the empty list. Raises ValueError."""
    if text.lstrip().startswith("["):
        parsed = json.loads(text)
        if isinstance(parsed, list):
            return parsed
    return [item.strip() for item in text.split(",") if item.strip()]


def parse_free_form(text: str) -> Any:
    """Parses a value for another program: JSON if it is JSON, otherwise the text itself.

    ``4096`` is a number, ``true`` a boolean, ``{"a": 1}`` an object; ``bfloat16`` and ``"4096"`` in quotes are text.
    """
    try:
        return json.loads(text, parse_constant=_no_constant)
    except ValueError:
        return text


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _not_a_switch(value: object) -> object:
    # bool is a subclass of int: true would be accepted as 1.
    if isinstance(value, bool):
        raise ValueError("is a boolean; a number is needed")
    return value


class SizeMark:
    """Marks fields that hold a number of bytes, for help and rendering."""


_number = BeforeValidator(_not_a_switch)

#: Bytes, above 0.
Size = Annotated[int, BeforeValidator(parse_size), Field(gt=0), SizeMark()]
#: A whole number, at least 1.
Count = Annotated[int, _number, Field(ge=1)]
#: A whole number, at least 0.
Whole = Annotated[int, _number, Field(ge=0)]
Port = Annotated[int, _number, Field(ge=0, le=65535)]
#: Seconds, above 0.
Seconds = Annotated[float, _number, Field(gt=0, allow_inf_nan=False)]
#: Seconds; 0 turns the feature off.
SecondsOrOff = Annotated[float, _number, Field(ge=0, allow_inf_nan=False)]
Text = Annotated[str, Field(min_length=1)]


def _not_empty(key: SecretStr) -> SecretStr:
    if not key.get_secret_value():
        raise ValueError("the key is empty; remove the setting to have none")
    return key


Key = Annotated[SecretStr, AfterValidator(_not_empty)]

"""API keys: the names, limits and permissions of clients."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from omni_ws.config.loading import hint, read_toml
from omni_ws.config.model import ServerConfig
from omni_ws.config.values import ConfigurationError, parse_size

_SHA256: Final = re.compile(r"[0-9a-fA-F]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """An API key, stored as its SHA-256 digest, with its limits; None for no limit."""

    name: str
    key_sha256: bytes = field(repr=False)
    #: The most concurrent sessions.
    max_sessions: int | None = None
    requests_per_sec: float | None = None
    #: The most requests in a burst above ``requests_per_sec``; default: the requests of one second, at least 1.
    burst: int | None = None
    #: Bytes of input of all connections of the key together, as received.
    input_bytes_per_sec: int | None = None
    #: Tokens of input and output, in a day (UTC).
    tokens_per_day: int | None = None
    #: Seconds of audio, heard and spoken, in a day (UTC).
    audio_seconds_per_day: float | None = None
    #: The longest duration of a session.
    max_session_sec: float | None = None
    #: Whether the key gives access to the profiling routes.
    admin: bool = False
    #: Whether requests may have a priority below 0, and so precede those of other keys.
    priority: bool = False


def key_name(key: ApiKey | None) -> str | None:
    """Return the name of a client's key; None without a key, as when none are configured."""
    return None if key is None else key.name


def digest(key: str) -> bytes:
    """Return the 32 bytes of the SHA-256 digest of the key's UTF-8 text."""
    return hashlib.sha256(key.encode()).digest()


def configured_keys(config: ServerConfig) -> tuple[ApiKey, ...]:
    """Return the single key, named ``api_key``, and those of the keys file.

    Raises ConfigurationError if the file is invalid.
    """
    single = (
        ()
        if config.api_key is None
        else (ApiKey(name="api_key", key_sha256=digest(config.api_key.get_secret_value())),)
    )
    return single + (() if config.auth.keys_file is None else load_keys(config.auth.keys_file, beside=single))


def load_keys(path: Path, *, beside: tuple[ApiKey, ...] = ()) -> tuple[ApiKey, ...]:
    """Read a keys file, which holds at least one key, and none of the keys and names of those ``beside`` it.

    Raises ConfigurationError with every problem in the file.
    """
    document = read_toml(path, name=str(path))
    problems = [f"{path}: unknown key {name}{hint(name, ['keys'])}" for name in document if name != "keys"]
    entries = document.get("keys", [])
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigurationError([*problems, f"{path}: holds no key; each key starts with [[keys]]"])
    keys: list[ApiKey] = []
    for number, entry in enumerate(entries, start=1):
        name = entry.get("name")
        place = f"{path}: keys entry {number}" + (f" ({name})" if isinstance(name, str) else "")
        found = list(_problems(entry))
        if not found:
            key = _key(entry)
            if any(other.name == key.name for other in keys):
                found.append("an earlier key has the same name")
            if any(other.key_sha256 == key.key_sha256 for other in keys):
                found.append("an earlier entry has the same key")
            if any(key.name == other.name or key.key_sha256 == other.key_sha256 for other in beside):
                found.append("the setting api_key holds the same key, or a key of this name: remove one of them")
            keys.append(key)
        problems += [f"{place}: {problem}" for problem in found]
    if problems:
        raise ConfigurationError(problems)
    return tuple(keys)


def _key(entry: Mapping[str, Any]) -> ApiKey:
    """Build the key from an entry of the keys file that has no problems."""
    limits = {name: value for name, value in entry.items() if name not in ("key", "key_sha256")}
    if "input_bytes_per_sec" in limits:
        limits["input_bytes_per_sec"] = parse_size(limits["input_bytes_per_sec"])
    hashed = entry.get("key_sha256")
    return ApiKey(key_sha256=digest(entry["key"]) if hashed is None else bytes.fromhex(hashed), **limits)


def _problems(entry: Mapping[str, Any]) -> Iterator[str]:
    """Yield the problems of an entry of the keys file. The keys themselves never appear in a message."""
    known = [*(f.name for f in fields(ApiKey)), "key"]
    for name, value in entry.items():
        if name not in known:
            yield f"unknown key {name}{hint(name, known)}"
        elif (wanted := _wanted(name, value)) is not None:
            yield f"{name} must be {wanted}"
    if "burst" in entry and "requests_per_sec" not in entry:
        yield "burst needs requests_per_sec, which is missing"
    if "name" not in entry:
        yield "name is missing"
    if ("key" in entry) == ("key_sha256" in entry):
        yield "exactly one of key and key_sha256 is needed"


def _wanted(name: str, value: object) -> str | None:
    """Describe the valid values of the field ``name``, for an error message; None if ``value`` is valid."""
    match name:
        case "name" | "key":
            return None if isinstance(value, str) and value.strip() else "a non-empty text"
        case "key_sha256":
            return None if isinstance(value, str) and _SHA256.fullmatch(value) else "64 hexadecimal digits"
        case "admin" | "priority":
            return None if isinstance(value, bool) else "true or false"
        case "requests_per_sec" | "audio_seconds_per_day" | "max_session_sec":
            return None if _is_positive(value, int | float) else "a number above 0"
        case "input_bytes_per_sec":
            return None if _is_size(value) else "a size above 0, such as 65536 or 64KiB"
        case _:
            return None if _is_positive(value, int) else "a whole number above 0"


def _is_positive(value: object, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool) and 0 < value <= sys.float_info.max


def _is_size(value: object) -> bool:
    try:
        return _is_positive(parse_size(value), int)
    except ValueError:
        return False

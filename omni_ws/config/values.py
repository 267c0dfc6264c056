"""The building blocks of the table of settings: groups, fields, types of values and their text forms."""

from __future__ import annotations

import ipaddress
import os
import re
import tempfile
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias
from urllib.parse import parse_qsl, urlsplit

import msgspec
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr
from pydantic.fields import FieldInfo


class ConfigurationError(ValueError):
    """The configuration is invalid, so the server cannot start.

    The error never reaches a client: the command prints it and exits with status 2. ``problems`` has one sentence for
    each mistake.
    """

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


class Section(BaseModel):
    """Base of a group of settings: immutable, and strict about unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, hide_input_in_errors=True)

    @property
    def changed(self) -> frozenset[str]:
        """The names of settings whose values differ from the defaults: a file may also set a default explicitly."""
        fields = type(self).model_fields
        return frozenset(name for name, field in fields.items() if getattr(self, name) != field.get_default())

    def meaningless(self, engine: str) -> list[str]:
        """Return the names of changed settings that have no effect with the engine, or part, of this name."""
        of = {name: mark(field, "of") for name, field in type(self).model_fields.items()}
        return [name for name in sorted(self.changed) if of[name] is not None and engine not in of[name]]


def setting(
    meaning: str,
    default: object = None,
    *,
    short: str | None = None,
    often: bool = False,
    of: Collection[str] | None = None,
    words: Collection[str] = (),
    **bounds: Any,
) -> Any:
    """Return the field for a setting: its description for help and docs/configuration.md, default and bounds.

    ``short`` is a shorter flag; ``often`` puts the setting into the short help. ``of`` names the engines or parts for
    which the setting has an effect, ``words`` the values that a list may contain; both are checked when the engine is
    known.
    """
    marks: Any = {"short": short, "often": often, "of": of, "words": words}
    return Field(default=default, description=meaning, json_schema_extra=marks, **bounds)


def mark(field: FieldInfo, name: str) -> Any:
    """Return an argument that a field's ``setting(...)`` call was given; ``name`` is ``short``, for example."""
    extra = field.json_schema_extra
    return extra.get(name) if isinstance(extra, dict) else None


# Text forms

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
    """Parse a number of bytes: a number, or text such as ``65536``, ``64KiB`` or ``1.5MB``.

    Return a value of another type unchanged, for the type check that follows. Raises ValueError for bad text, and for
    a boolean.
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
    """Return the shortest exact text that ``parse_size`` reads."""
    for unit, factor in (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if size and size % factor == 0:
            return f"{size // factor}{unit}"
    return str(size)


def parse_list(text: str) -> list[Any]:
    """Parse ``a,b`` or a JSON list; empty text is the empty list. Raises ValueError."""
    if text.lstrip().startswith("["):
        parsed = msgspec.json.decode(text)
        if isinstance(parsed, list):
            return parsed
    return [item.strip() for item in text.split(",") if item.strip()]


def parse_free_form(text: str) -> Any:
    """Parse the value of another program's option: as JSON if it is valid JSON, otherwise as text.

    ``4096`` is a number, ``true`` a boolean, ``{"a": 1}`` an object; ``bfloat16`` and ``"4096"`` in quotes are text.
    """
    try:
        return msgspec.json.decode(text)
    except ValueError:
        return text


# Types


def _not_a_switch(value: object) -> object:
    # bool is a subclass of int: true would be accepted as 1.
    if isinstance(value, bool):
        raise ValueError("is a boolean; a number is needed")
    return value


class SizeMark:
    """Marks a field whose value is a number of bytes, for the help and for formatting."""


_number = BeforeValidator(_not_a_switch)

#: A number of bytes, above 0.
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


def _usable(key: SecretStr) -> SecretStr:
    if not key.get_secret_value():
        raise ValueError("the key is empty; remove the setting to have none")
    try:
        key.get_secret_value().encode()
    except UnicodeEncodeError:  # of an environment variable that is not UTF-8
        raise ValueError("the key is not UTF-8 text") from None
    return key


Key = Annotated[SecretStr, AfterValidator(_usable)]


# Addresses and folders

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network


@lru_cache(maxsize=1024)
def literal_address(text: str) -> Address | None:
    """Parse an address, with or without brackets and zone; return None for a host name.

    An IPv4-mapped IPv6 address is returned as IPv4.
    """
    try:
        address = ipaddress.ip_address(text.strip("[]").partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def user_cache_folder() -> Path:
    """Return ``omni_ws`` in the user's cache folder (XDG Base Directory Specification), for replaceable data.

    For a user without a home, as in some containers, the folder is below ``/``.
    """
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(cache):
        return Path(cache) / "omni_ws"
    home = os.path.expanduser("~")
    return Path(home if os.path.isabs(home) else "/") / ".cache" / "omni_ws"


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file atomically, or create it, so that only its owner may read it.

    The folder must exist. Raises OSError.
    """
    descriptor, name = tempfile.mkstemp(dir=path.parent)  # created with mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise


# Where sessions are stored: the forms of ``sessions.store``.


MEMORY: Final = "memory"
_FORMS: Final = "memory, sqlite:PATH, or a URL with redis://, rediss://, valkey:// or valkeys://"
#: Valkey speaks the protocol of Redis; the client library knows the names of the latter.
_SCHEMES: Final[Mapping[str, str]] = {
    "redis": "redis",
    "rediss": "rediss",
    "valkey": "redis",
    "valkeys": "rediss",
}
#: Options of the URL that the client library takes, none of which is a secret.
_TLS_OPTIONS: Final = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname")
_OWN_OPTIONS: Final = ("cluster", "sentinel", "sentinel_auth")
_REDIS_PORT: Final = 6379
_SENTINEL_PORT: Final = 26379


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """The parsed value of the setting ``sessions.store``."""

    kind: Literal["memory", "sqlite", "redis"]
    # sqlite
    path: Path = field(default_factory=Path)
    fsync: bool = False
    # redis
    #: For the client library, with the first host alone; may contain a password.
    url: str = field(default="", repr=False)
    hosts: tuple[tuple[str, int], ...] = ()
    cluster: bool = False
    #: The name of the service that ``hosts``, sentinels, know; None: they are the servers themselves.
    sentinel: str | None = None
    #: Whether the sentinels want the same user and password.
    sentinel_auth: bool = False

    @classmethod
    def parse(cls, text: str) -> StoreAddress:
        """Parse a value of ``sessions.store``.

        Raises ValueError without repeating the text, which may contain a password.
        """
        scheme, separator, rest = text.partition(":")
        if text == MEMORY:
            return cls("memory")
        if scheme == "sqlite" and separator:
            path, _, query = rest.partition("?")
            options = _options(query, ("fsync",))
            if not path:
                raise ValueError("sqlite: names no file; write sqlite:PATH")
            return cls("sqlite", path=Path(path).expanduser(), fsync=_flag(options, "fsync"))
        if scheme in _SCHEMES and rest.startswith("//"):
            return cls._redis(text)
        raise ValueError(f"is not a store: {_FORMS}")

    @classmethod
    def _redis(cls, text: str) -> StoreAddress:
        try:
            parts = urlsplit(text)
        except ValueError:
            raise ValueError("is not a URL") from None
        options = _options(parts.query, (*_OWN_OPTIONS, *_TLS_OPTIONS))
        sentinel = options.get("sentinel")
        user, at, listed = parts.netloc.rpartition("@")
        port = _REDIS_PORT if sentinel is None else _SENTINEL_PORT
        hosts = tuple(_host(one, port) for one in listed.split(","))
        cluster = _flag(options, "cluster")
        if cluster and sentinel is not None:
            raise ValueError("cluster and sentinel exclude each other")
        if len(hosts) > 1 and not cluster and sentinel is None:
            raise ValueError("several hosts need ?cluster=1, or ?sentinel=NAME")
        if parts.path.strip("/") and not parts.path.strip("/").isdigit():
            raise ValueError("the path is the number of a database, such as /0")
        query = "&".join(f"{name}={value}" for name, value in options.items() if name in _TLS_OPTIONS)
        host, port = hosts[0]
        url = f"{_SCHEMES[parts.scheme]}://{user}{at}{f'[{host}]' if ':' in host else host}:{port}{parts.path}"
        return cls(
            "redis",
            url=f"{url}?{query}" if query else url,
            hosts=hosts,
            cluster=cluster,
            sentinel=sentinel,
            sentinel_auth=_flag(options, "sentinel_auth"),
        )


def _host(text: str, default_port: int) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    try:
        port = parts.port
    except ValueError:
        port = 0
    if not parts.hostname or port == 0 or parts.path:
        raise ValueError("a host of the URL is not HOST or HOST:PORT")
    return parts.hostname, port or default_port


def _options(query: str, known: tuple[str, ...]) -> dict[str, str]:
    options = dict(parse_qsl(query, keep_blank_values=True))
    if unknown := sorted(options.keys() - set(known)):
        if "@" in unknown[0]:  # the rest of a password, which must not be shown
            raise ValueError("has an @ behind its ?: percent-encode what is special in a password")
        raise ValueError(f"has the unknown option {unknown[0]}; known are {', '.join(known)}")
    return options


def _flag(options: Mapping[str, str], name: str) -> bool:
    value = options.get(name, "0").lower()
    if value not in ("0", "1", "true", "false"):
        raise ValueError(f"option {name} is 0 or 1")
    return value in ("1", "true")

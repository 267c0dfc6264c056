"""Where sessions are stored: the forms of ``sessions.store``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal
from urllib.parse import parse_qsl, urlsplit

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
    """A parsed ``sessions.store``."""

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
        """Parse a store. Raises ValueError, which does not repeat the text."""
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
        raise ValueError(f"has the unknown option {unknown[0]}; known are {', '.join(known)}")
    return options


def _flag(options: Mapping[str, str], name: str) -> bool:
    value = options.get(name, "0").lower()
    if value not in ("0", "1", "true", "false"):
        raise ValueError(f"option {name} is 0 or 1")
    return value in ("1", "true")

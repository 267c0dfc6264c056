"""Address of the server that a replay talks to."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class Target:
    """Address and key of a server."""

    host: str
    port: int
    secure: bool
    api_key: str | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, url: str, *, api_key: str | None = None) -> Self:
        """Parses an address with the scheme ws, wss, http or https, a host, and an optional port.

        Raises ValueError.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("ws", "wss", "http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not an address such as ws://127.0.0.1:8080")
        if parts.path not in ("", "/", "/v1/streaming_input") or parts.query or parts.fragment or parts.username:
            raise ValueError("the address must not have a path, query or user: paths come from the recording")
        secure = parts.scheme in ("wss", "https")
        return cls(parts.hostname, parts.port or (443 if secure else 80), secure, api_key)

    @property
    def authority(self) -> str:
        """Host and port, as in a URL."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def headers(self) -> dict[str, str]:
        """Headers that authenticate."""
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}

    @property
    def tls(self) -> ssl.SSLContext | None:
        """TLS context; None for a plain connection."""
        return ssl.create_default_context() if self.secure else None

    def websocket(self, target: str) -> str:
        """URL of a WebSocket at a path."""
        return f"{'wss' if self.secure else 'ws'}://{self.authority}{target}"

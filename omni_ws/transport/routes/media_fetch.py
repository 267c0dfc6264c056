"""MediaFetcher: media by URL, from listed hosts alone.

The risk is a server-side request forgery: a client names a URL, and this server, which reaches more than the client
does, reads it. So a URL must be listed, its host is resolved once, the connection goes to that very address, which must
be public or listed itself, and the same holds for each redirect. Proxies and credentials of the environment, cookies
and URLs with user names are never used.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import SplitResult, urljoin, urlsplit

from omni_ws import __version__
from omni_ws.config.media_domains import DEFAULT_PORTS, MediaDomains
from omni_ws.errors import InvalidValue, PayloadTooLarge, UnsupportedParameter

if TYPE_CHECKING:
    import httpcore

MAX_REDIRECTS: Final = 3
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_CONNECT_SEC: Final = 5.0
#: What httpcore reads at a time, at most.
_PIECE_BYTES: Final = 64 * 1024

#: Called with the bytes to be held in all, before so many are; raises EngineOverloaded where there is no room.
Keep = Callable[[int], None]


class MediaFetcher:
    """``tls`` is the context of https connections; None: the system's certificates."""

    def __init__(self, domains: MediaDomains, *, tls: ssl.SSLContext | None = None) -> None:
        self._domains = domains
        self._tls = tls

    async def fetch(self, url: str, *, max_bytes: int, keep: Keep) -> tuple[bytes, str]:
        """The content and its media type ("" where the server names none).

        Raises UnsupportedParameter for a URL that may not be fetched, InvalidValue for one that cannot be,
        PayloadTooLarge, EngineOverloaded. The caller limits the time.
        """
        import httpcore

        for _ in range(MAX_REDIRECTS + 1):
            self._check(url)
            try:
                async with httpcore.AsyncConnectionPool(
                    ssl_context=self._context(), max_keepalive_connections=0, network_backend=_backend(self._domains)
                ) as pool:
                    target = await _get(pool, url, max_bytes=max_bytes, keep=keep)
            except (httpcore.TimeoutException, httpcore.NetworkError, httpcore.ProtocolError, OSError):
                # The reason could tell a client what stands in this server's network.
                raise InvalidValue("the media could not be fetched: no usable answer from its host") from None
            if not isinstance(target, str):
                return target
            url = urljoin(url, target)
        raise InvalidValue(f"the media could not be fetched: more than {MAX_REDIRECTS} redirects")

    def _check(self, url: str) -> None:
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port or DEFAULT_PORTS.get(parts.scheme, 0)
        except ValueError:
            raise InvalidValue("this is no URL") from None
        if parts.username is not None or parts.password is not None:
            raise InvalidValue("a URL with a user name is not fetched")
        if not url.isascii() or not url.isprintable() or " " in url:
            raise InvalidValue("this is no URL: percent-encode what is not ASCII")
        if not host or not self._domains.allow_url(parts.scheme, host, port):
            raise _not_listed(parts)

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls


def _not_listed(parts: SplitResult) -> UnsupportedParameter:
    return UnsupportedParameter(
        f"this server does not fetch from {f'{parts.scheme}://{parts.netloc}'[:128]!r}; send a data: URL "
        "(its operator lists hosts with http.media_domains)"
    )


async def _get(pool: httpcore.AsyncConnectionPool, url: str, *, max_bytes: int, keep: Keep) -> tuple[bytes, str] | str:
    """The content and its type, or where the answer redirects to."""
    headers = [("Host", urlsplit(url).netloc), ("Accept", "*/*"), ("Accept-Encoding", "identity")]
    headers.append(("User-Agent", f"omni_ws/{__version__}"))
    timeout = {"connect": _CONNECT_SEC}
    async with pool.stream("GET", url, headers=headers, extensions={"timeout": timeout}) as response:
        fields = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in response.headers}
        if response.status in _REDIRECTS and "location" in fields:
            return fields["location"]
        if response.status != 200:
            raise InvalidValue(f"the media could not be fetched: status {response.status}")
        if fields.get("content-encoding", "identity").lower() != "identity":
            raise InvalidValue("the media could not be fetched: it comes compressed, unasked")
        length = fields.get("content-length", "")
        if length.isdecimal() and int(length) > max_bytes:
            raise _too_large(max_bytes)
        content = bytearray()
        keep(int(length) if length.isdecimal() else _PIECE_BYTES)
        async for piece in response.aiter_stream():
            content += piece
            if len(content) > max_bytes:
                raise _too_large(max_bytes)
            if not length.isdecimal():
                keep(len(content) + _PIECE_BYTES)
        return bytes(content), fields.get("content-type", "")


def _too_large(max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the media of this request have more than {max_bytes} bytes")


def _backend(domains: MediaDomains) -> httpcore.AsyncNetworkBackend:
    """Connects to checked addresses alone."""
    import httpcore

    class CheckedAddresses(httpcore.AnyIOBackend):
        async def connect_tcp(
            self,
            host: str,
            port: int,
            timeout: float | None = None,
            local_address: str | None = None,
            socket_options: Iterable[Any] | None = None,
        ) -> httpcore.AsyncNetworkStream:
            address = await _resolve(host, port, domains)
            return await super().connect_tcp(address, port, timeout, local_address, socket_options)

    return CheckedAddresses()


async def _resolve(host: str, port: int, domains: MediaDomains) -> str:
    """The first address of ``host`` that may be connected to. Raises OSError where there is none."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, proto=6)
    for *_, address in found:
        if domains.allow_address(str(address[0])):
            return str(address[0])
    raise OSError("the host has no address that may be connected to")

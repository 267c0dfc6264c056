"""Reading of media that a request body refers to: files below one folder, and URLs of hosts that the operator lists.

The risk of URLs is server-side request forgery: a client names a URL, and the server, which reaches more hosts than the
client does, reads it. Therefore:

- The scheme, host and port of the URL must be listed in ``http.media_domains``.
- The host is resolved once, and the connection goes to that very address, so that DNS cannot change in between.
- The address must be public, or listed itself.
- All of this applies to every redirect.
- Proxies and credentials of the environment, cookies and URLs with user names are never used.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final
from urllib.parse import SplitResult, urljoin, urlsplit

from omni_ws import __version__
from omni_ws.config.model import DEFAULT_PORTS, HttpConfig, MediaDomains
from omni_ws.core.chunks import InputChunk
from omni_ws.engine.threads import Work, run_work
from omni_ws.errors import InvalidValue, OmniError, PayloadTooLarge, UnsupportedParameter
from omni_ws.wire.openai_fields import MediaFile, MediaUrl, NamedMedia

if TYPE_CHECKING:
    import httpcore


#: A function that is called with the total bytes to be held, before they are read. Raises EngineOverloaded.
Charge = Callable[[int], None]


class MediaReader:
    """A reader of media that request bodies refer to, from files and URLs.

    For each request, ``http.max_body_bytes`` limits all media together, and ``http.media_timeout_sec`` the time to
    fetch URLs.
    """

    def __init__(self, config: HttpConfig, fetcher: MediaFetcher | None = None) -> None:
        self._config = config
        self._fetcher = fetcher or MediaFetcher(MediaDomains(config.media_domains))

    async def read(self, items: Sequence[InputChunk | NamedMedia], charge: Charge) -> list[InputChunk]:
        """Return ``items`` with each reference replaced by its media. Raises an OmniError that names the field.

        ``charge`` is called with the total bytes held, before these bytes are read.
        """
        chunks: list[InputChunk] = []
        held = 0

        def charge_more(size: int) -> None:
            charge(held + size)

        deadline = asyncio.get_running_loop().time() + self._config.media_timeout_sec
        for item in items:
            if isinstance(item, InputChunk):
                chunks.append(item)
                continue
            room = self._config.max_body_bytes - held
            try:
                match item:
                    case MediaFile():
                        chunk = item.chunk(await self._file(item.path, room, charge_more))
                    case MediaUrl():
                        chunk = item.chunk(*await self._fetched(item.url, room, charge_more, deadline))
            except OmniError as error:
                error.about(param=item.place)
                raise
            held += len(chunk.payload)
            charge(held)
            chunks.append(chunk)
        return chunks

    async def _file(self, path: str, room: int, charge: Charge) -> bytes:
        with await run_work(Work.FILES, _open_below, self._config.media_root, path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > room:
                raise PayloadTooLarge(f"the file exceeds {room} bytes")
            charge(size)
            return await run_work(Work.FILES, file.read, size)

    async def _fetched(self, url: str, room: int, charge: Charge, deadline: float) -> tuple[bytes, str]:
        try:
            async with asyncio.timeout_at(deadline):
                return await self._fetcher.fetch(url, max_bytes=room, charge=charge)
        except TimeoutError:
            limit = self._config.media_timeout_sec
            raise InvalidValue(f"fetching the media took more than {limit:g} s") from None


def _open_below(root: Path | None, path: str) -> BinaryIO:
    """Open the file at ``path``, absolute or relative to ``root``; after resolving links it must be inside ``root``.

    Raises UnsupportedParameter if ``root`` is None, and InvalidValue if the file cannot be read; for a path outside
    ``root`` the error does not depend on whether the file exists. The caller closes the file.
    """
    if root is None:
        raise UnsupportedParameter("file paths are not supported on this server; send a data: URL")
    try:
        folder = root.resolve()
        place = (folder / path).resolve()
        if not place.is_relative_to(folder):
            raise InvalidValue("the path is outside the folder of allowed files")
        if not place.is_file():  # reading a pipe might block forever
            raise InvalidValue("file not found")
        return open(place, "rb", opener=_open_without_links)  # the caller closes it
    except (OSError, ValueError, RuntimeError):
        raise InvalidValue("file not found") from None


def _open_without_links(path: str, flags: int) -> int:
    """Open a resolved path, and return the descriptor. Refuses a link: it was created after the path was resolved."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


# Media by URL

MAX_REDIRECTS: Final = 3
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_CONNECT_SEC: Final = 5.0
#: Bytes that httpcore reads at once at most.
_PIECE_BYTES: Final = 64 * 1024


class MediaFetcher:
    """A client that fetches media from the hosts in ``domains`` only.

    ``tls`` is the context of https connections; None for the system's.
    """

    def __init__(self, domains: MediaDomains, *, tls: ssl.SSLContext | None = None) -> None:
        self._domains = domains
        self._tls = tls

    async def fetch(self, url: str, *, max_bytes: int, charge: Charge) -> tuple[bytes, str]:
        """Fetch ``url``. Returns the content and its media type; the type is "" if the host names none.

        Raises UnsupportedParameter for a URL that is not allowed, InvalidValue if the URL is malformed or fetching
        fails, PayloadTooLarge, and what ``charge`` raises. There is no time-out: the caller sets one.
        """
        import httpcore

        for _ in range(MAX_REDIRECTS + 1):
            self._check(url)
            try:
                async with httpcore.AsyncConnectionPool(
                    ssl_context=self._context(), max_keepalive_connections=0, network_backend=_backend(self._domains)
                ) as pool:
                    target = await _get(pool, url, max_bytes=max_bytes, charge=charge)
                if not isinstance(target, str):
                    return target
                url = urljoin(url, target)
            # ValueError: a host name with an empty label, a redirect to what is no URL.
            except (httpcore.TimeoutException, httpcore.NetworkError, httpcore.ProtocolError, OSError, ValueError):
                # The reason would let clients explore the server's network.
                raise InvalidValue("fetching the media failed: the host sent no valid response") from None
        raise InvalidValue(f"fetching the media failed: more than {MAX_REDIRECTS} redirects")

    def _check(self, url: str) -> None:
        """Raise InvalidValue for a malformed URL, and UnsupportedParameter for a URL whose host is not listed."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port or DEFAULT_PORTS.get(parts.scheme, 0)
        except ValueError:
            raise InvalidValue("invalid URL") from None
        if parts.username is not None or parts.password is not None:
            raise InvalidValue("a URL with a user name or password is not supported")
        if not url.isascii() or not url.isprintable() or " " in url:
            raise InvalidValue("invalid URL: percent-encode spaces and non-ASCII characters")
        if not host or not self._domains.allow_url(parts.scheme, host, port):
            raise _not_listed(parts)

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls


def _not_listed(parts: SplitResult) -> UnsupportedParameter:
    return UnsupportedParameter(
        f"fetching is not allowed from {f'{parts.scheme}://{parts.netloc}'[:128]!r}; send a data: URL "
        "(the operator can allow hosts with http.media_domains)"
    )


async def _get(
    pool: httpcore.AsyncConnectionPool, url: str, *, max_bytes: int, charge: Charge
) -> tuple[bytes, str] | str:
    """Send one request. Returns the content and its media type, or for a redirect its location."""
    headers = [("Host", urlsplit(url).netloc), ("Accept", "*/*"), ("Accept-Encoding", "identity")]
    headers.append(("User-Agent", f"omni_ws/{__version__}"))
    timeout = {"connect": _CONNECT_SEC}
    async with pool.stream("GET", url, headers=headers, extensions={"timeout": timeout}) as response:
        fields = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in response.headers}
        if response.status in _REDIRECTS and "location" in fields:
            return fields["location"]
        if response.status != 200:
            raise InvalidValue(f"fetching the media failed: status {response.status}")
        if fields.get("content-encoding", "identity").lower() != "identity":
            raise InvalidValue("fetching the media failed: the host sent a Content-Encoding that was not requested")
        length = fields.get("content-length", "")
        if length.isdecimal() and int(length) > max_bytes:
            raise _too_large(max_bytes)
        content = bytearray()
        charge(int(length) if length.isdecimal() else _PIECE_BYTES)
        async for piece in response.aiter_stream():
            content += piece
            if len(content) > max_bytes:
                raise _too_large(max_bytes)
            if not length.isdecimal():
                charge(len(content) + _PIECE_BYTES)
        return bytes(content), fields.get("content-type", "")


def _too_large(max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the media of this request exceed {max_bytes} bytes")


def _backend(domains: MediaDomains) -> httpcore.AsyncNetworkBackend:
    """Return a network backend that connects to allowed addresses only."""
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
    """Resolve ``host`` to its first allowed address. Raises OSError if no address is allowed."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, proto=6)
    for *_, address in found:
        if domains.allow_address(str(address[0])):
            return str(address[0])
    raise OSError("the host has no allowed address")

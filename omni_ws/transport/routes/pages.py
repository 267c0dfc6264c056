"""The pages that the server shows, and the files that they load: the demo page, and those of recorded calls."""

from __future__ import annotations

import gzip
import hashlib
import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Final
from urllib.parse import quote

from omni_ws.engine.threads import Work, run_work
from omni_ws.errors import NotFound, OriginNotAllowed
from omni_ws.transport.http.access import is_allowed_origin, presented_key
from omni_ws.transport.http.application import Application, FrontEnd, Router, shown_path
from omni_ws.transport.http.exchange import HttpExchange
from omni_ws.web import folders
from omni_ws.web.one_file import one_file, shared_page

#: Content types of the files by suffix; others are not served.
MEDIA_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "png": "image/png",
    "webmanifest": "application/manifest+json",
}

#: Scripts, styles and connections from this server only, nothing inline; images and media also from blobs.
CONTENT_SECURITY_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' blob:",
        "media-src 'self' blob:",
        "connect-src 'self'",
        "manifest-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    )
)
_PAGE_HEADERS: Final = (
    ("Content-Security-Policy", CONTENT_SECURITY_POLICY),
    ("Permissions-Policy", "microphone=(self), camera=(self), display-capture=(self)"),
    ("Referrer-Policy", "no-referrer"),
    ("X-Content-Type-Options", "nosniff"),
    ("Cache-Control", "no-cache"),
)


#: Media types of files that become smaller by compression.
_COMPRESSED: Final = frozenset(MEDIA_TYPES[suffix] for suffix in ("html", "css", "js", "svg", "webmanifest"))


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file of the page, with its headers."""

    content: bytes
    media_type: str
    entity_tag: str
    #: The same file by gzip, with an entity tag of its own; None if that is not smaller.
    compressed: PageFile | None = None

    @classmethod
    def of(cls, content: bytes, media_type: str) -> PageFile:
        """Return a file of this content."""
        tag = hashlib.sha256(content).hexdigest()[:32]
        plain = cls(content, media_type, f'"{tag}"')
        if media_type not in _COMPRESSED:
            return plain
        smaller = gzip.compress(content, mtime=0)
        if len(smaller) >= len(content):
            return plain
        return replace(plain, compressed=cls(smaller, media_type, f'"{tag}-gzip"'))


class DemoRoutes(FrontEnd):
    """The demo page at ``/``, the files of all pages, and the client library for browsers at ``/client.js``.

    They need no key, since the page asks the user for it. ``/widget.js`` is for pages of any origin. ``/phone`` is the
    address of the page for a phone, with the key of who asks: nobody learns a key from it.
    """

    def __init__(self, app: Application) -> None:
        super().__init__(app)
        self._phone_url = self._config.http.phone_url

    def register(self, router: Router) -> None:
        router.add("GET", "/", self.page)
        router.add("GET", "/browser/{name}", self.file)
        router.add("GET", "/browser/calls/{name}", self.file)
        router.add("GET", "/client.js", self.file)
        router.add("GET", "/client/{name}", self.file)
        router.add("GET", "/widget.js", self.widget)
        router.add("GET", "/widget/{name}", self.file)
        router.add("GET", "/phone", self.phone)

    async def page(self, exchange: HttpExchange) -> None:
        """Respond with the page."""
        await send_page_file(exchange, "browser/index.html")

    async def file(self, exchange: HttpExchange) -> None:
        """Respond with a file that the page loads."""
        await send_page_file(exchange, "/".join(exchange.request.segments))

    async def widget(self, exchange: HttpExchange) -> None:
        """Respond with the element ``<voice-chat>``, which a page of any origin may load.

        What it does there is another matter: a page that is not allowed gets no session.
        """
        exchange.allow_origin(True)
        await send_page_file(exchange, "widget.js", (("Cross-Origin-Resource-Policy", "cross-origin"),))

    async def phone(self, exchange: HttpExchange) -> None:
        """Respond with a QR code of the page (``{"svg": …}``), or null without ``http.phone_url`` or segno."""
        request = exchange.request
        exchange.allow_origin(False)  # no response has CORS fields
        if not is_allowed_origin(request, ()):
            raise OriginNotAllowed("no page but the server's own can read the code for a phone")
        self._authenticator.authenticate(request)
        url = self._phone_url
        if url is not None and self._authenticator.has_keys and (key := presented_key(request)) is not None:
            url += f"#key={quote(key, safe='', encoding='latin-1')}"
        svg = None if url is None else await run_work(Work.BODIES, _qr_code, url)
        await exchange.respond_json(200, {"svg": svg}, [("Cache-Control", "no-store")])


def _qr_code(url: str) -> str | None:
    """Return the code as SVG, black on white in any theme; None without the package segno (extra ``lan``)."""
    try:
        import segno
    except ImportError:
        return None
    drawn = io.BytesIO()
    segno.make_qr(url, error="l").save(drawn, kind="svg", scale=8, border=4, light="#fff", dark="#000")
    return drawn.getvalue().decode()


async def send_page_file(exchange: HttpExchange, name: str, headers: Iterable[tuple[str, str]] = ()) -> None:
    """Respond with a file of a page, such as ``browser/calls/call.html``, or with 304 if the client has it.

    ``headers`` are sent besides the usual ones. Raises NotFound.
    """
    file = (await run_work(Work.FILES, page_files)).get(name)
    if file is None:
        raise NotFound(f"{shown_path(exchange.request.segments)} not found")
    fields = [*_PAGE_HEADERS, *headers]
    encoding: list[tuple[str, str]] = []
    if file.compressed is not None:
        fields.append(("Vary", "Accept-Encoding"))
        if _takes_gzip(exchange.request.headers.tokens("accept-encoding")):
            file = file.compressed
            encoding = [("Content-Encoding", "gzip")]
    fields.append(("ETag", file.entity_tag))
    # If-None-Match compares weakly, that is, without W/ (RFC 9110, section 13.1.2).
    known = {entry.removeprefix("W/") for entry in exchange.request.headers.tokens("if-none-match")}
    if file.entity_tag in known:
        await exchange.respond(304, fields)
    else:
        await exchange.respond(200, [("Content-Type", file.media_type), *encoding, *fields], file.content)


def _takes_gzip(accepted: Iterable[str]) -> bool:
    """Whether ``Accept-Encoding`` names gzip, and not with the weight 0 (RFC 9110, section 12.5.3)."""
    for entry in accepted:
        coding, _, weight = entry.partition(";")
        if coding.strip().lower() == "gzip":
            return weight.replace(" ", "").lower() not in {"q=0", "q=0.0", "q=0.00", "q=0.000"}
    return False


@cache
def page_files() -> Mapping[str, PageFile]:
    """Return all files of the pages, by path. Blocks the first time: they are read and compressed."""
    page, library = folders()
    entries = {f"browser/{entry.name}": entry for entry in page.iterdir()}
    entries |= {f"browser/calls/{entry.name}": entry for entry in page.joinpath("calls").iterdir()}
    for part in ("client", "widget"):
        entries |= {f"{part}/{entry.name}": entry for entry in library.joinpath(part).iterdir()}
    entries |= {name: library.joinpath(name) for name in ("client.js", "widget.js")}
    contents = {path: entry.read_bytes() for path, entry in entries.items() if _suffix(path) in MEDIA_TYPES}

    def read(path: str) -> str:
        return contents[path].decode()

    contents["widget.js"] = one_file(read, "widget.js").encode()
    contents["browser/calls/shared.html"] = shared_page(read).encode()
    return {path: PageFile.of(content, MEDIA_TYPES[_suffix(path)]) for path, content in contents.items()}


def _suffix(path: str) -> str:
    return path.rpartition(".")[2]

"""The demo page at ``/``, and the client library for browsers at ``/client.js`` that it is built on.

The files are those of ``examples/browser`` and ``clients/js``, which the wheel installs below ``web``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Final

from omni_ws.errors import NotFound
from omni_ws.transport.http.application import FrontEnd, Router, shown_path
from omni_ws.transport.http.exchange import HttpExchange

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
_HEADERS: Final = (
    ("Content-Security-Policy", CONTENT_SECURITY_POLICY),
    ("Permissions-Policy", "microphone=(self), camera=(self), display-capture=(self)"),
    ("Referrer-Policy", "no-referrer"),
    ("X-Content-Type-Options", "nosniff"),
    ("Cache-Control", "no-cache"),
)


@dataclass(frozen=True, slots=True)
class _File:
    """One file of the page, with its headers."""

    content: bytes
    media_type: str
    entity_tag: str


class DemoRoutes(FrontEnd):
    """The handlers of the page's paths. They need no key, since the page asks the user for it."""

    def register(self, router: Router) -> None:
        router.add("GET", "/", self.page)
        router.add("GET", "/browser/{name}", self.file)
        router.add("GET", "/client.js", self.file)
        router.add("GET", "/client/{name}", self.file)

    async def page(self, exchange: HttpExchange) -> None:
        """Respond with the page."""
        await _send(exchange, "browser/index.html")

    async def file(self, exchange: HttpExchange) -> None:
        """Respond with a file that the page loads."""
        await _send(exchange, "/".join(exchange.request.segments))


async def _send(exchange: HttpExchange, name: str) -> None:
    """Respond with a file, or with 304 where the client has it. Raises NotFound."""
    file = _files().get(name)
    if file is None:
        raise NotFound(f"{shown_path(exchange.request.segments)} not found")
    tag = ("ETag", file.entity_tag)
    # If-None-Match compares weakly, that is, without W/ (RFC 9110, section 13.1.2).
    known = {entry.removeprefix("W/") for entry in exchange.request.headers.tokens("if-none-match")}
    if file.entity_tag in known:
        await exchange.respond(304, [*_HEADERS, tag])
    else:
        await exchange.respond(200, [("Content-Type", file.media_type), *_HEADERS, tag], file.content)


@cache
def _files() -> Mapping[str, _File]:
    """All files of the page, by path. Cached, because reading blocks the event loop."""
    page, library = _folders()
    entries = {f"browser/{entry.name}": entry for entry in page.iterdir()}
    entries |= {f"client/{entry.name}": entry for entry in library.joinpath("client").iterdir()}
    entries["client.js"] = library.joinpath("client.js")
    found = {}
    for path, entry in entries.items():
        media_type = MEDIA_TYPES.get(path.rpartition(".")[2])
        if media_type is not None:
            content = entry.read_bytes()
            found[path] = _File(content, media_type, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
    return found


def _folders() -> tuple[Traversable, Traversable]:
    """The folders of the page and of the library: in the installed package, or in the repository."""
    packaged = resources.files("omni_ws").joinpath("web")
    if packaged.joinpath("browser").is_dir():
        return packaged.joinpath("browser"), packaged
    repository = Path(__file__).parents[3]
    return repository / "examples" / "browser", repository / "clients" / "js"

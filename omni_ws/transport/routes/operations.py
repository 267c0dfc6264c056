"""Routes for operators (health, metrics, models, profiles), and routes of the server's own web pages."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import io
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import resources
from itertools import chain
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import msgspec

from omni_ws import __version__
from omni_ws.engine.base import EngineState
from omni_ws.engine.composed.parts import growing_llm, shown_parts
from omni_ws.engine.threads import Work, run_work
from omni_ws.errors import (
    InvalidValue,
    ModelNotFound,
    NotFound,
    OriginNotAllowed,
    SessionConflict,
    Unauthenticated,
)
from omni_ws.metrics import rendered
from omni_ws.service.observing.accounts import is_near
from omni_ws.service.observing.profiling import FinishedProfile, ProfileKind, ProfileRequest
from omni_ws.service.sessions.shared_counts import START_PROFILE, STOP_PROFILE, WorkerGroup
from omni_ws.service.store.session_store import SessionStore
from omni_ws.transport.http.access import NATIVE, Authenticator, is_allowed_origin, presented_key
from omni_ws.transport.http.application import Application, FrontEnd, Router, shown_path
from omni_ws.transport.http.exchange import HttpExchange, read_json_object
from omni_ws.transport.http.request import HttpRequest
from omni_ws.web import (
    folders,
    one_file,
    shared_page,
)

#: The path at which a person at this machine has a language model fetched.
FETCH_PATH: Final = "/fetch_llm"
#: The states that ``/health`` reports with status 200; others with 503.
_SERVING: Final = ("ok", "degraded")


class OperationsRoutes(FrontEnd):
    """The handlers of ``/health``, ``/metrics``, ``/openapi.json``, ``/v1/models`` and ``/fetch_llm``.

    ``/health`` and ``/openapi.json`` need no key; ``/metrics`` and ``/v1/models`` do if keys are configured. To list
    models, a client secret of the native WebSocket suffices: a page whose handshake was refused learns the reason
    there.
    """

    def __init__(self, app: Application) -> None:
        super().__init__(app)
        self._started = int(time.time())

    def register(self, router: Router) -> None:
        router.add("GET", "/health", self.health)
        router.add("GET", "/metrics", self.metrics)
        router.add("GET", "/openapi.json", self.openapi)
        router.add("GET", "/v1/models", self.models)
        router.add("GET", "/v1/models/{id:path}", self.model)
        router.add("POST", FETCH_PATH, self.fetch_llm)

    async def health(self, exchange: HttpExchange) -> None:
        """Respond with 200 if the server accepts new sessions, else with 503. The body describes the state."""
        status = self._status()
        engine, group = self._sessions.engine, self._sessions.group
        # Without their hosts, of which only clients with a session may know.
        parts = shown_parts(engine)
        llm = growing_llm(engine)
        if llm is not None and llm.coming is not None:
            parts["llm"]["coming"] = coming = msgspec.to_builtins(llm.coming)
            # It names commands and folders of this machine.
            if self._authenticator.has_keys or not is_near(exchange.request.client, exchange.request.headers.get):
                del coming["why"]
        await exchange.respond_json(
            200 if status in _SERVING else 503,
            {
                "status": status,
                "engine": engine.name,
                "parts": parts,
                "model": self._sessions.model.names[0],
                "sessions": self._sessions.admission.all_sessions,
                "stages": list(engine.capabilities.stages) or [engine.name],
                "request_states": {"running": engine.active_requests if group is None else group.engine_requests},
                "version": __version__,
                **({} if group is None else {"workers": _workers(group)}),
                **({} if self._sessions.store is None else {"store": _store(self._sessions.store)}),
            },
            () if status in _SERVING else [("Retry-After", "1")],
        )

    async def fetch_llm(self, exchange: HttpExchange) -> None:
        """Begin to fetch the language model of ``--llm auto``, and respond with the progress.

        Allowed only on a server without keys, for a client on the server's own machine, and only for the server's own
        pages, whatever ``--allow-origin`` says. Raises Unauthenticated or OriginNotAllowed for others, and
        SessionConflict if there is nothing to fetch, or this machine does not allow it.
        """
        request = exchange.request
        if self._authenticator.has_keys:
            raise Unauthenticated("with API keys configured, no client can have a model fetched")
        if not is_near(request.client, request.headers.get):
            raise Unauthenticated("a model is only fetched for a client on the server's own machine")
        if not is_allowed_origin(request, ()):
            raise OriginNotAllowed("no page but the server's own can have a model fetched")
        if (llm := growing_llm(self._sessions.engine)) is None:
            raise SessionConflict("this server chooses no language model by itself (--llm auto)")
        await exchange.respond_json(202, {"coming": msgspec.to_builtins(await llm.fetch())})

    async def metrics(self, exchange: HttpExchange) -> None:
        """Respond with the metrics, in the exposition format that ``Accept`` prefers."""
        self._authenticator.authenticate(exchange.request)
        accept = ",".join(exchange.request.headers.get_all("accept"))
        group, own = self._sessions.group, self._sessions.metrics
        families = own.families() if group is None else await group.all_metrics(own.families())
        text, media_type = await run_work(Work.FILES, rendered(families, accept))
        await exchange.respond(200, [("Content-Type", media_type), ("Cache-Control", "no-store")], text)

    async def models(self, exchange: HttpExchange) -> None:
        """Respond with a list of models that has an entry for each name of the served model."""
        secret = self._secrets.find(presented_key(exchange.request), asyncio.get_running_loop().time())
        if secret is None or secret.kind != NATIVE:
            self._authenticator.authenticate(exchange.request)
        data = [self._model(name) for name in self._sessions.model.names]
        await exchange.respond_json(200, {"object": "list", "data": data})

    async def model(self, exchange: HttpExchange) -> None:
        """Respond with the entry of the served model under the name in the path. Raises ModelNotFound."""
        self._authenticator.authenticate(exchange.request)
        name = exchange.path_parameters["id"]
        try:
            self._sessions.model.check(name)
        except ModelNotFound as error:
            error.about(param="id")
            raise
        await exchange.respond_json(200, self._model(name))

    async def openapi(self, exchange: HttpExchange) -> None:
        """Respond with the OpenAPI document."""
        await exchange.respond(200, [("Content-Type", "application/json")], _web("openapi.json"))

    def _status(self) -> str:
        """Return "draining", or the state of the engine or workers; "degraded" if that is "ok" but the store fails."""
        if self._sessions.admission.draining:
            return "draining"
        store, status = self._sessions.store, self._engine_status()
        return "degraded" if status == "ok" and store is not None and store.degraded else status

    def _engine_status(self) -> str:
        group = self._sessions.group
        if group is not None and group.ready:  # a worker that is not ready restarts, and gets no new sessions
            if not group.counts.started:
                return "starting"
            return "degraded" if group.hung else "ok"
        return {
            EngineState.STARTING: "starting",
            EngineState.OK: "ok",
            EngineState.UNHEALTHY: "unhealthy",
        }[self._sessions.engine.state]

    def _model(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "omni_ws",
            "transcripts": self._sessions.engine.capabilities.transcripts,
        }


def _store(store: SessionStore) -> dict[str, Any]:
    reason = {"reason": store.reason} if store.degraded else {}
    return {"kind": store.name, "status": "degraded" if store.degraded else "ok", **reason}


def _workers(group: WorkerGroup) -> dict[str, Any]:
    hung = group.hung
    return {"ready": group.ready, "wanted": group.wanted, **({"hung": hung} if hung else {})}


@cache
def _web(name: str) -> bytes:
    """Return the file ``name`` of the folder ``web``. Cached, because reading blocks the event loop."""
    return resources.files("omni_ws").joinpath("web", name).read_bytes()


# Profiles

_MAX_BODY_BYTES: Final = 64 * 1024
#: A run id becomes part of file names.
_RUN_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class ProfilingRoutes(FrontEnd):
    """The handlers of ``/start_profile``, ``/start_request_profile`` and the routes that stop these profiles.

    The client needs the key of an administrator or, if no keys are configured, must be on the server's own machine.
    """

    def __init__(self, app: Application) -> None:
        super().__init__(app)
        self._profiling = app.profiling
        self._group = app.sessions.group
        if self._group is not None:
            self._group.on(START_PROFILE, self._start_too)
            self._group.on(STOP_PROFILE, self._stop_too)

    async def _start_too(self, asked: ProfileRequest) -> tuple[Path, ...]:
        """Start, in this worker too, a profile that another worker has started. Returns the event files."""
        return (await self._profiling.start(asked)).recorder.paths

    async def _stop_too(self, asked: tuple[ProfileKind, str | None]) -> FinishedProfile | None:
        """Stop, in this worker too, a profile that another worker has stopped. ``asked`` is its kind and run id."""
        return await self._profiling.stop(*asked)

    def register(self, router: Router) -> None:
        router.add("POST", "/start_profile", self.start_profile)
        router.add("POST", "/start_request_profile", self.start_request_profile)
        router.add("POST", "/stop_profile", partial(self._stop, ProfileKind.WHOLE))
        router.add("POST", "/stop_request_profile", partial(self._stop, ProfileKind.REQUESTS))

    async def start_profile(self, exchange: HttpExchange) -> None:
        """Record events in files and, unless ``enable_torch`` is false, a trace if the engine supports that.

        A running profile of this kind is stopped first, unless it is the same run. Responds with the run id and the
        files. Raises Unauthenticated and InvalidValue.
        """
        fields = await self._fields(exchange)
        trace = _flag(fields, "enable_torch", default=True)
        await self._start(exchange, fields, kind=ProfileKind.WHOLE, trace=trace)

    async def start_request_profile(self, exchange: HttpExchange) -> None:
        """Record events in files, without a trace; otherwise as ``start_profile``."""
        await self._start(exchange, await self._fields(exchange), kind=ProfileKind.REQUESTS, trace=False)

    async def _stop(self, kind: ProfileKind, exchange: HttpExchange) -> None:
        """Stop the profile of this kind; if the body has a ``run_id``, only that run. Responds with its files."""
        fields = await self._fields(exchange)
        run_id = _run_id(fields)
        finished = await self._profiling.stop(kind, run_id)
        if self._group is not None:
            finished = _together([finished, *await self._group.ask_others(STOP_PROFILE, (kind, run_id))])
        report: dict[str, Any] = {"run_id": run_id, "stopped": finished is not None}
        if finished is not None:
            report |= {
                "run_id": finished.run_id,
                **_event_files(finished.event_files),
                "dropped_events": finished.dropped_events,
                "trace_files": [str(path) for path in finished.traces],
            }
        await exchange.respond_json(200, report)

    async def _start(self, exchange: HttpExchange, fields: dict[str, Any], *, kind: ProfileKind, trace: bool) -> None:
        asked = ProfileRequest(
            kind=kind,
            run_id=_run_id(fields),
            event_dir=_text(fields, "event_dir"),
            trace_path_template=_text(fields, "trace_path_template"),
            trace=trace,
        )
        running = await self._profiling.start(asked)
        paths = running.recorder.paths
        if self._group is not None:
            others = await self._group.ask_others(START_PROFILE, replace(asked, run_id=running.run_id))
            paths = (*paths, *chain.from_iterable(filter(None, others)))
        await exchange.respond_json(
            200,
            {
                "run_id": running.run_id,
                **_event_files(paths),
                "enable_torch": running.template is not None,
                "trace_path_template": None if running.template is None else str(running.template),
            },
        )

    async def _fields(self, exchange: HttpExchange) -> dict[str, Any]:
        """Check that the client may profile, and return the fields of the body; {} if there is none."""
        check_operator(self._authenticator, exchange.request, "profiles")
        if not exchange.request.has_body:
            return {}
        fields, _ = await read_json_object(exchange, _MAX_BODY_BYTES, may_be_empty=True)
        return fields


def check_operator(authenticator: Authenticator, request: HttpRequest, what: str) -> None:
    """Raise Unauthenticated unless the client is an operator. ``what`` names what the client asks for, as a plural."""
    key = authenticator.authenticate(request)
    if authenticator.has_keys:
        if key is None or not key.admin:
            raise Unauthenticated(f"{what} require an API key with admin = true")
    elif not is_near(request.client, request.headers.get):
        raise Unauthenticated(f"without API keys, {what} are only for the server's own machine")


def _together(parts: Sequence[FinishedProfile | None]) -> FinishedProfile | None:
    """Merge the workers' reports on the profile that they stopped; None if no worker had a profile."""
    found = [part for part in parts if part is not None]
    if not found:
        return None
    return FinishedProfile(
        found[0].run_id,
        tuple(chain.from_iterable(part.event_files for part in found)),
        sum(part.dropped_events for part in found),
        tuple(chain.from_iterable(part.traces for part in found)),
    )


def _event_files(paths: tuple[Path, ...]) -> dict[str, Any]:
    """Return the response fields that name the event files; the first file has the events of whole requests."""
    return {"event_file": str(paths[0]), "event_files": [str(path) for path in paths]}


def _run_id(fields: dict[str, Any]) -> str | None:
    run_id = _text(fields, "run_id")
    if run_id is not None and not _RUN_ID.fullmatch(run_id):
        raise InvalidValue(
            "run_id must have 1 to 128 letters, digits, '.', '_' or '-', starting with a letter or digit",
            param="run_id",
        )
    return run_id


def _text(fields: dict[str, Any], name: str) -> str | None:
    value = fields.get(name)
    if value is None or (isinstance(value, str) and value):
        return value
    raise InvalidValue(f"{name} must be a non-empty string", param=name)


def _flag(fields: dict[str, Any], name: str, *, default: bool) -> bool:
    value = fields.get(name)
    if value is None:
        return default
    if isinstance(value, bool):
        return value
    raise InvalidValue(f"{name} must be true or false", param=name)


# The pages that the server shows, and the files that they load: the demo page, and those of recorded calls.


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
    """One file of the server's web pages, with its headers."""

    content: bytes
    media_type: str
    entity_tag: str
    #: The same file by gzip, with an entity tag of its own; None if that is not smaller.
    compressed: PageFile | None = None

    @classmethod
    def of(cls, content: bytes, media_type: str) -> PageFile:
        """Return a file with this content, and its compressed form."""
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

    They need no key, since the page asks the user for one. Pages of any origin may load ``/widget.js``. ``/phone``
    responds with the address at which a phone opens the page. The address contains the key that the request presents,
    so nobody learns a key from it.
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
        """Respond with the demo page."""
        await send_page_file(exchange, "browser/index.html")

    async def file(self, exchange: HttpExchange) -> None:
        """Respond with a file that the page loads."""
        await send_page_file(exchange, "/".join(exchange.request.segments))

    async def widget(self, exchange: HttpExchange) -> None:
        """Respond with the script of the element ``<voice-chat>``, which a page of any origin may load.

        Loading it grants nothing: a page whose origin is not allowed gets no session.
        """
        exchange.allow_origin(True)
        await send_page_file(exchange, "widget.js", (("Cross-Origin-Resource-Policy", "cross-origin"),))

    async def phone(self, exchange: HttpExchange) -> None:
        """Respond with a QR code of the page's address (``{"svg": …}``); null without ``http.phone_url`` or segno.

        Raises OriginNotAllowed for pages of other origins, and Unauthenticated.
        """
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
    """Return the QR code of ``url`` as SVG, black on white in any theme; None without segno (extra ``lan``)."""
    try:
        import segno
    except ImportError:
        return None
    drawn = io.BytesIO()
    segno.make_qr(url, error="l").save(drawn, kind="svg", scale=8, border=4, light="#fff", dark="#000")
    return drawn.getvalue().decode()


async def send_page_file(exchange: HttpExchange, name: str, headers: Iterable[tuple[str, str]] = ()) -> None:
    """Respond with a file of a page, such as ``browser/calls/call.html``, or with 304 if the client has it.

    ``headers`` are sent in addition to those of all page files. Raises NotFound.
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
    """Return whether ``Accept-Encoding`` names gzip, with a weight above 0 (RFC 9110, section 12.5.3)."""
    for entry in accepted:
        coding, _, weight = entry.partition(";")
        if coding.strip().lower() == "gzip":
            return weight.replace(" ", "").lower() not in {"q=0", "q=0.0", "q=0.00", "q=0.000"}
    return False


@cache
def page_files() -> Mapping[str, PageFile]:
    """Return all files of the pages, by path. The first call blocks while it reads and compresses them."""
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

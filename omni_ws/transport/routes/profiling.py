"""Routes that start and stop profiles.

They need the key of an administrator; where no keys are configured, a client on the server's own machine.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final

from omni_ws.config.startup import is_loopback
from omni_ws.errors import InvalidValue, Unauthenticated
from omni_ws.service.observing.profiling import FinishedProfile, ProfileKind, ProfileRequest, ProfileStop, Profiling
from omni_ws.service.sessions.shared_counts import START_PROFILE, STOP_PROFILE, WorkerGroup
from omni_ws.transport.http.access import Authenticator
from omni_ws.transport.http.application import FrontEnd, Router
from omni_ws.transport.http.exchange import HttpExchange, HttpRequest, read_json_object

_MAX_BODY_BYTES: Final = 64 * 1024
#: A run id becomes part of file names.
_RUN_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

#: Header fields that proxies add; behind one, the peer's address is not that of the client.
_FORWARDING: Final = ("forwarded", "x-forwarded-for")


class ProfilingRoutes(FrontEnd):
    """The handlers of ``/start_profile``, ``/start_request_profile`` and the routes that stop them."""

    def __init__(self, profiling: Profiling, authenticator: Authenticator, group: WorkerGroup | None = None) -> None:
        self._profiling = profiling
        self._authenticator = authenticator
        self._group = group
        if group is not None:
            group.on(START_PROFILE, self._start_too)
            group.on(STOP_PROFILE, profiling.stop)

    async def _start_too(self, asked: ProfileRequest) -> tuple[Path, ...]:
        """Start the profile that another worker has started. Returns the files of this one."""
        return (await self._profiling.start(asked)).recorder.paths

    def register(self, router: Router) -> None:
        router.add("POST", "/start_profile", self.start_profile)
        router.add("POST", "/start_request_profile", self.start_request_profile)
        router.add("POST", "/stop_profile", partial(self._stop, ProfileKind.WHOLE))
        router.add("POST", "/stop_request_profile", partial(self._stop, ProfileKind.REQUESTS))

    async def start_profile(self, exchange: HttpExchange) -> None:
        """Start recording events and, unless ``enable_torch`` is false, a trace if the engine supports that."""
        fields = await self._fields(exchange)
        trace = _flag(fields, "enable_torch", default=True)
        await self._start(exchange, fields, kind=ProfileKind.WHOLE, trace=trace)

    async def start_request_profile(self, exchange: HttpExchange) -> None:
        """Start recording events only."""
        await self._start(exchange, await self._fields(exchange), kind=ProfileKind.REQUESTS, trace=False)

    async def _stop(self, kind: ProfileKind, exchange: HttpExchange) -> None:
        """Stop the run of this kind; where the body has an id, only the run with that."""
        fields = await self._fields(exchange)
        run_id = _run_id(fields)
        asked = ProfileStop(kind, run_id)
        finished = await self._profiling.stop(asked)
        if self._group is not None:
            finished = _together([finished, *await self._group.ask_others(STOP_PROFILE, asked)])
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
        """Check that the client may profile, and read the body's object; a body is optional."""
        check_may_profile(self._authenticator, exchange.request)
        if not exchange.request.has_body:
            return {}
        fields, _ = await read_json_object(exchange, _MAX_BODY_BYTES, may_be_empty=True)
        return fields


def check_may_profile(authenticator: Authenticator, request: HttpRequest) -> None:
    """Raise Unauthenticated for a client that may not profile."""
    key = authenticator.authenticate(request)
    if authenticator.has_keys:
        if key is None or not key.admin:
            raise Unauthenticated("profiling requires an API key with admin = true")
    elif not is_loopback(request.client) or any(name in request.headers for name in _FORWARDING):
        raise Unauthenticated("without API keys, profiling is only allowed from the server's own machine")


def _together(parts: Sequence[FinishedProfile | None]) -> FinishedProfile | None:
    """What the workers of a server report of the profile that they stopped; None if none of them had it."""
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
    """Fields that name the event files; the first one is the coordinator's, with the events of whole requests."""
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

"""The real server on a free port, what it tells Prometheus, and the proof that nothing of it is left after a test."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from prometheus_client.parser import text_string_to_metric_families
from support.patience import PATIENCE_SEC, until
from support.raw_http import RawResponse, call
from support.virtual_clock import VirtualClockLoop

from omni_ws.config.keys import ApiKey
from omni_ws.config.model import ServerConfig
from omni_ws.engine.base import Engine
from omni_ws.engine.fake import EchoEngine
from omni_ws.metrics import rendered
from omni_ws.server import App, RunningServer, create_app, listen
from omni_ws.transport.native.connection import StreamConnection
from omni_ws.transport.native.endpoint import StreamingInput

#: By the virtual clock, which waits for no processor.
VIRTUAL_PATIENCE_SEC = 60.0
#: Less than ``session_timeout_sec``, after which a session that was left behind is gone, too.
LEFTOVERS_GONE_SEC = 250.0
#: Clocks of the product that are about its clients' machine, not about a test that shares its processor with them.
PATIENT_SETTINGS: dict[str, dict[str, Any]] = {
    "sessions": {"store_slow_sec": PATIENCE_SEC},
    "http": {
        "header_timeout_sec": PATIENCE_SEC,
        "body_timeout_sec": PATIENCE_SEC,
        "keepalive_timeout_sec": PATIENCE_SEC,
        "media_timeout_sec": PATIENCE_SEC,
    },
    "streaming_input": {"ping_timeout_sec": PATIENCE_SEC, "write_timeout_sec": PATIENCE_SEC},
}
FrontEnd = TypeVar("FrontEnd")
_LOGGERS = ("omni_ws", "websockets", "asyncio")


@dataclass(frozen=True)
class LiveServer:
    """A server that listens, over ``engine``."""

    app: App
    engine: Engine
    running: RunningServer

    @property
    def port(self) -> int:
        return self.running.port

    @property
    def native(self) -> StreamingInput:
        """The front end of the native WebSocket."""
        return self.front_end(StreamingInput)

    def front_end(self, kind: type[FrontEnd]) -> FrontEnd:
        (found,) = (one for one in self.app.front_ends if isinstance(one, kind))
        return found

    @property
    def websocket_url(self) -> str:
        return f"ws://127.0.0.1:{self.port}/v1/streaming_input"

    @property
    def sessions(self) -> int:
        return self.app.sessions.admission.sessions

    @property
    def held_bytes(self) -> int:
        return self.app.sessions.budget.held

    @property
    def connections(self) -> list[StreamConnection]:
        """The WebSocket connections that are open."""
        return [one for one in self.running._server.all_connections if isinstance(one, StreamConnection)]

    async def until(self, condition: Callable[[], bool], what: str = "the condition") -> None:
        """Waits for a state of the server that no event announces."""
        assert await _came_about(condition, PATIENCE_SEC), f"{what} did not come about"

    async def check_empty(self) -> None:
        """No session, no engine request and no byte of input is left."""

        def leftovers() -> dict[str, int]:
            found = {
                "sessions": self.sessions,
                "engine requests": self.engine.active_requests,
                "held bytes": self.held_bytes,
            }
            return {name: count for name, count in found.items() if count}

        assert await _came_about(lambda: not leftovers(), LEFTOVERS_GONE_SEC), f"left behind: {leftovers()}"

    async def check_answers(self) -> None:
        """The server still does its work: /health says so."""
        answer = await call(self.port, "GET", "/health")
        assert (answer.status, answer.json()["status"], answer.json()["sessions"]) == (200, "ok", 0)


class _Complaints(logging.Handler):
    """What the server logged as errors, and what went wrong where nobody waits for it."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if hasattr(record, "facts"):
            return  # what became of a request; if it became an error, its client was told
        self.lines.append(f"{record.name}: {self.format(record)}")

    def on_loop_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.lines.append(f"event loop: {context.get('message')}: {context.get('exception')!r}")


@contextlib.contextmanager
def _listening_for_complaints() -> Any:
    complaints = _Complaints()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(complaints.on_loop_exception)
    for name in _LOGGERS:
        logging.getLogger(name).addHandler(complaints)
    try:
        yield complaints
    finally:
        loop.set_exception_handler(None)
        for name in _LOGGERS:
            logging.getLogger(name).removeHandler(complaints)


@contextlib.asynccontextmanager
async def live_server(
    engine: Engine | None = None,
    *,
    keys: tuple[ApiKey, ...] = (),
    expect_errors: bool = False,
    still_answers: bool = True,
    stops_engine: bool = True,
    **fields: Any,
) -> AsyncIterator[LiveServer]:
    """A server over ``engine`` (an EchoEngine by default), configured by ``fields`` of ServerConfig.

    When the block was left without an exception nothing may be left: no session, no engine request, no held byte, no
    task, and no error in the log (unless ``expect_errors``); and the server must still answer (unless not
    ``still_answers``, for tests that drain it or break its engine). An engine that others use too goes on (not
    ``stops_engine``).

    Sessions end with their connections, unless ``streaming_input`` says otherwise: that is what can be waited for.
    In real time the server has patience with its clients (PATIENT_SETTINGS), unless ``fields`` say otherwise.
    """
    engine = engine or EchoEngine()
    fields["streaming_input"] = {"resume_grace_sec": 0, **fields.get("streaming_input", {})}
    if not isinstance(asyncio.get_running_loop(), VirtualClockLoop):
        for part, settings in PATIENT_SETTINGS.items():
            fields[part] = {**settings, **fields.get(part, {})}
    config = ServerConfig(**{"host": "127.0.0.1", "port": 0, "engine": "fake", **fields})
    before = asyncio.all_tasks()
    with _listening_for_complaints() as complaints:
        await engine.start()
        try:
            async with listen(create_app(engine, config, keys)) as running:
                server = LiveServer(running.app, engine, running)
                yield server
                await server.check_empty()
                if still_answers:
                    await server.check_answers()
        finally:
            if stops_engine:
                await engine.stop()
        await _no_tasks_but(before)
    assert expect_errors or not complaints.lines, "\n".join(complaints.lines)


async def _no_tasks_but(before: set[asyncio.Task[Any]]) -> None:
    def left() -> set[asyncio.Task[Any]]:
        return asyncio.all_tasks() - before - {asyncio.current_task()}

    assert await _came_about(lambda: not left(), LEFTOVERS_GONE_SEC), f"tasks left behind: {left()}"


async def _came_about(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether ``condition`` holds within so many seconds, or VIRTUAL_PATIENCE_SEC on a virtual clock."""
    virtual = isinstance(asyncio.get_running_loop(), VirtualClockLoop)
    with contextlib.suppress(TimeoutError):
        await until(condition, seconds=VIRTUAL_PATIENCE_SEC if virtual else seconds, moves=True)
    return condition()


class Scrape:
    """Samples of one moment. What was never counted is 0."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        self._samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in self.families.values()
            for sample in family.samples
        }

    def value(self, name: str, **labels: str) -> float:
        return self._samples.get((f"omni_ws_{name}", frozenset(labels.items())), 0)

    def labels(self, name: str) -> list[dict[str, str]]:
        return [dict(labels) for found, labels in self._samples if found == f"omni_ws_{name}"]


async def metrics_answer(server: LiveServer, *headers: str) -> RawResponse:
    return await call(server.port, "GET", "/metrics", None, *headers)


async def scrape(server: LiveServer) -> Scrape:
    answer = await metrics_answer(server)
    assert answer.status == 200, answer
    return Scrape(answer.body.decode())


def read(server: LiveServer) -> Scrape:
    """The same without asking over HTTP, which needs threads: for a clock that jumps."""
    text, _ = rendered(server.app.sessions.metrics.families(), "")()
    return Scrape(text.decode())


def routes_of(app: App) -> dict[str, set[str]]:
    """The methods of each route, by its template."""
    return {route.template: set(route.methods) for route in app._router._ordered}

"""How a server starts, drains and ends: in this process with its engine held up, and as the process that it is."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.http_server import tls_contexts
from support.live_server import LiveServer, live_server
from support.native_client import NativeClient, native_client, raw_websocket, text
from support.patience import PATIENCE_SEC
from support.raw_http import raw_client, request
from websockets.asyncio.client import connect

from omni_ws import server as server_module
from omni_ws.config.model import EngineName, ServerConfig
from omni_ws.engine.base import EngineState, TextOutput
from omni_ws.engine.fake import EchoEngine, ScriptedEngine
from omni_ws.errors import EngineFailed
from omni_ws.server import serve


def now() -> float:
    return asyncio.get_running_loop().time()


async def health(port: int) -> tuple[int, dict[str, Any]]:
    async with raw_client(port) as client:
        await client.send(request("GET", "/health", "Connection: close"))
        answer = await client.response()
        return answer.status, answer.json()


async def test_health() -> None:
    engine = EchoEngine()
    async with live_server(engine) as server:
        async with native_client(server) as client:
            status, body = await health(server.port)
            assert (status, body["status"], body["engine"], body["model"]) == (200, "ok", "fake", "fake")
            assert (body["sessions"], body["request_states"]) == (1, {"running": 0})
            await client.chunk("hello")
            await client.until("output_chunk")
            assert (await health(server.port))[1]["request_states"] == {"running": 1}
            await client.send("cancel")
            await client.answer()
        for state in (EngineState.STARTING, EngineState.UNHEALTHY):
            engine.state = state
            status, body = await health(server.port)
            assert (status, body["status"]) == (503, state.value)
        engine.state = EngineState.OK


# draining


def draining(server: LiveServer, timeout: float = 30) -> asyncio.Task[None]:
    return asyncio.create_task(server.running.drain(timeout))


@pytest.mark.virtual_clock
async def test_idle_sessions_are_closed_at_once() -> None:
    async with live_server(still_answers=False) as server, native_client(server) as client:
        await client.say("hello")
        await client.answer()
        drain = draining(server)
        closing = await client.until("session_closing")
        assert (closing["reason"], closing["retryable"], closing["time_left_ms"]) == ("shutting_down", True, 0)
        assert await client.closed() == 1012
        await drain
        assert now() < 1


@pytest.mark.virtual_clock
async def test_running_answers_finish_first() -> None:
    gate = asyncio.Event()
    engine = ScriptedEngine([gate.wait, TextOutput("answer")])
    async with live_server(engine, still_answers=False) as server, native_client(server) as client:
        await client.say("running")
        await client.say("waiting")
        await client.barrier()
        drain = draining(server, 20)
        closing = await client.until("session_closing")
        assert closing["time_left_ms"] == 20_000
        await asyncio.sleep(10)
        gate.set()
        answers = [await client.answer() for _ in range(2)]
        assert [answer.reason for answer in answers] == ["stop", "stop"]
        assert await client.closed() == 1012
        assert len(client.seen("session_closing")) == 1
        await drain
        assert 10 <= now() < 11


@pytest.mark.virtual_clock
async def test_input_that_is_open_may_end_while_draining() -> None:
    async with live_server(still_answers=False) as server, native_client(server) as client:
        await client.chunk("hello ")
        await client.until("output_chunk")
        drain = draining(server)
        await client.until("session_closing")
        await client.chunk("world", end=True)
        assert (await client.answer()).reason == "stop"
        assert await client.closed() == 1012
        await drain


@pytest.mark.virtual_clock
async def test_new_sessions_and_requests_are_refused_while_draining() -> None:
    gate = asyncio.Event()
    engine = ScriptedEngine([gate.wait])
    async with live_server(engine, still_answers=False) as server, native_client(server) as client:
        port = server.port
        await client.say("running")
        await client.until("response_started")
        drain = draining(server)
        await client.until("session_closing")
        async with native_client(server, greeted=False) as late:
            error = await late.error()
            assert (error["code"], error["retryable"], error["retry_after_ms"]) == ("shutting_down", True, 1000)
            assert await late.closed() == 1012
        async with raw_client(server.port) as http:
            await http.send(request("POST", "/v1/chat/completions", "Content-Type: application/json", body=b"{}"))
            answer = await http.response()
            assert (answer.status, answer.error["code"], answer.headers["retry-after"]) == (503, "shutting_down", "1")
        status, body = await health(server.port)
        assert (status, body["status"], body["sessions"]) == (503, "draining", 1)
        await client.say("too late")
        refused = await client.answer()
        assert (refused.errors[0]["code"], refused.reason) == ("shutting_down", "error")
        gate.set()
        assert (await client.answer()).reason == "stop"
        assert await client.closed() == 1012
        await drain
        with pytest.raises(ConnectionRefusedError):
            await health(port)


@pytest.mark.virtual_clock
@pytest.mark.parametrize("owed", ["an open input", "an answer"])
async def test_what_does_not_finish_in_time_is_cut_short(owed: str) -> None:
    engine = ScriptedEngine([asyncio.Event().wait])
    async with live_server(engine, still_answers=False) as server, native_client(server) as client:
        await client.chunk("hello", end=owed == "an answer")
        await client.until("response_started")
        drain = draining(server, 20)
        await client.until("session_closing")
        await drain
        assert now() == pytest.approx(20, abs=0.2)
        close = asyncio.create_task(server.running.close())
        assert (await client.answer()).reason == "cancelled"
        assert await client.closed() == 1012
        await close
        assert now() < 21


@pytest.mark.virtual_clock
async def test_http_answer_finishes_while_draining() -> None:
    gate = asyncio.Event()
    engine = ScriptedEngine([gate.wait, TextOutput("answer")])
    async with live_server(engine, still_answers=False) as server, raw_client(server.port) as client:
        body = b'{"messages":[{"role":"user","content":"hi"}]}'
        await client.send(request("POST", "/v1/chat/completions", "Content-Type: application/json", body=body))
        await server.until(lambda: engine.active_requests == 1)
        drain = draining(server)
        await asyncio.sleep(5)
        gate.set()
        answer = await client.response()
        assert (answer.status, answer.json()["choices"][0]["message"]["content"]) == (200, "answer")
        assert answer.headers["connection"] == "close"
        await drain
        assert now() < 6


@pytest.mark.virtual_clock
async def test_connections_without_a_request_do_not_hold_up_the_end() -> None:
    async with live_server(still_answers=False) as server, raw_client(server.port), raw_client(server.port) as idle:
        await idle.send(request("GET", "/health"))
        await idle.response()
        await server.running.drain(30)
        assert now() < 1


@pytest.mark.virtual_clock
async def test_clients_that_do_not_read_do_not_hold_up_the_end() -> None:
    script: list[Any] = [TextOutput("x" * 1_000_000)] * 100
    async with (
        live_server(ScriptedEngine(script), still_answers=False) as server,
        raw_websocket(server, read_ahead=1024) as peer,
        raw_websocket(server) as deaf,
    ):
        for one in (peer, deaf):
            await one.until("session_created")
        await peer.send(text("input_chunk", sequence_id=0, text="go", end_of_input=True))
        await server.until(lambda: server.held_bytes > 1_000_000)
        await server.running.drain(3)
        begin = now()
        await server.running.close()
        assert now() - begin < 11
        assert server.sessions == 0


# serve(), with an engine that a test holds up


class HeldUp(EchoEngine):
    """Starts, and stops, when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.may_start = asyncio.Event()
        self.failure: Exception | None = None
        self.stopped = 0

    async def start(self) -> None:
        await self.may_start.wait()
        if self.failure is not None:
            raise self.failure
        await super().start()

    async def stop(self) -> None:
        self.stopped += 1
        await super().stop()


@contextlib.asynccontextmanager
async def serving(
    engine: HeldUp, monkeypatch: pytest.MonkeyPatch, **fields: Any
) -> AsyncIterator[tuple[asyncio.Task[int], int]]:
    """``serve`` in a task of this process, and the port that it listens on."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    monkeypatch.setattr(server_module, "create_engine", lambda config: engine)
    monkeypatch.setattr(server_module, "configure_logging", lambda *arguments: None)
    config = ServerConfig(host="127.0.0.1", port=port, engine=EngineName.FAKE, **fields)
    task = asyncio.create_task(serve(config))
    try:
        for _ in range(500):
            with contextlib.suppress(ConnectionRefusedError):
                await health(port)
                break
            await asyncio.sleep(0.01)
        yield task, port
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    for number in (signal.SIGTERM, signal.SIGINT):
        assert signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)


def kill(number: signal.Signals = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


async def test_port_answers_while_the_engine_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = HeldUp()
    async with serving(engine, monkeypatch) as (task, port):
        assert (await health(port))[1]["status"] == "starting"
        async with connect(f"ws://127.0.0.1:{port}/v1/streaming_input", compression=None, proxy=None) as early:
            client = NativeClient(early)
            assert (await client.error())["code"] == "engine_overloaded"
            assert await client.closed() == 1013
        engine.may_start.set()
        while (await health(port))[0] != 200:
            pass
        kill()
        assert await asyncio.wait_for(task, PATIENCE_SEC) == 0
        assert engine.stopped == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_stopped_while_the_engine_starts(monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    engine = HeldUp()
    async with serving(engine, monkeypatch) as (task, _):
        kill(number)
        assert await asyncio.wait_for(task, PATIENCE_SEC) == 0
        assert engine.stopped == 1


@pytest.fixture
def heeds_sighup() -> Iterator[None]:
    """Also where the tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("heeds_sighup")
async def test_sighup_drains_and_is_no_first_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal that closes may send it twice, and one SIGTERM behind it waits for the answers, too."""
    engine = HeldUp()
    engine.may_start.set()
    async with serving(engine, monkeypatch) as (task, port):
        async with connect(f"ws://127.0.0.1:{port}/v1/streaming_input", compression=None, proxy=None) as connection:
            client = NativeClient(connection)
            await client.until("session_created")
            await client.chunk("hello")
            await client.until("output_chunk")
            kill(signal.SIGHUP)
            assert (await client.until("session_closing"))["reason"] == "shutting_down"
            for number in (signal.SIGHUP, signal.SIGTERM):
                kill(number)
                assert (await health(port))[1]["status"] == "draining"
            await client.chunk(" there", end=True)
            answer = await client.answer()
            assert (answer.text, answer.reason) == (" there", "stop")
            assert await client.closed() == 1012
        assert await asyncio.wait_for(task, PATIENCE_SEC) == 0
        assert engine.stopped == 1
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


@pytest.mark.usefixtures("heeds_sighup")
async def test_a_sighup_that_is_ignored_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under nohup."""
    engine = HeldUp()
    engine.may_start.set()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    async with serving(engine, monkeypatch) as (task, port):
        kill(signal.SIGHUP)
        while (await health(port))[0] != 200:
            pass
        kill()
        assert await asyncio.wait_for(task, PATIENCE_SEC) == 0
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


async def test_engine_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = HeldUp()
    engine.failure = EngineFailed("no model")
    async with serving(engine, monkeypatch) as (task, port):
        engine.may_start.set()
        with pytest.raises(EngineFailed, match="no model"):
            await asyncio.wait_for(task, PATIENCE_SEC)
        assert engine.stopped == 1
        with pytest.raises(ConnectionRefusedError):
            await health(port)


async def test_serve_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an embedding program does it: everything ends, and nothing is left."""
    engine = HeldUp()
    engine.may_start.set()
    before = asyncio.all_tasks()
    async with serving(engine, monkeypatch) as (task, port):
        async with connect(f"ws://127.0.0.1:{port}/v1/streaming_input", compression=None, proxy=None) as connection:
            client = NativeClient(connection)
            await client.until("session_created")
            await client.chunk("hello")
            await client.until("output_chunk")
            task.cancel()
            assert (await client.answer()).reason == "cancelled"
            assert await client.closed() == 1012
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.stopped == 1
        assert engine.active_requests == 0
    for _ in range(100):
        await asyncio.sleep(0)
    assert asyncio.all_tasks() == before


# the process


class Process:
    """``omni-ws serve`` with the fake engine on a free port."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []
        self.address = ""

    async def started(self) -> None:
        assert self.process.stderr is not None
        while not self.address:
            line = (await asyncio.wait_for(self.process.stderr.readline(), PATIENCE_SEC)).decode()
            assert line, "".join(self.lines)
            self.lines.append(line)
            if (found := re.search(r"listens on https?://(\S+)", line)) is not None:
                self.address = found[1]

    async def ended(self) -> int:
        """Its exit status; everything that it said is in ``lines``."""
        assert self.process.stderr is not None
        rest = await asyncio.wait_for(self.process.stderr.read(), PATIENCE_SEC)
        self.lines.append(rest.decode())
        return await asyncio.wait_for(self.process.wait(), PATIENCE_SEC)

    def said_last(self, *, before: str) -> str:
        """The last line in front of one with these words."""
        lines = "".join(self.lines).splitlines()
        place = next(place for place, line in enumerate(lines) if before in line)
        return lines[place - 1]

    @contextlib.asynccontextmanager
    async def client(self, scheme: str = "ws", **options: Any) -> AsyncIterator[NativeClient]:
        url = f"{scheme}://{self.address}/v1/streaming_input"
        async with connect(url, compression=None, proxy=None, ping_interval=None, **options) as connection:
            client = NativeClient(connection)
            await client.until("session_created")
            yield client


@contextlib.asynccontextmanager
async def process(*flags: str) -> AsyncIterator[Process]:
    started = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "omni_ws", "serve", "--engine", "fake", "--port", "0", *flags),
        stderr=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
    )
    found = Process(started)
    try:
        yield found
    finally:
        if started.returncode is None:
            started.kill()
            await started.wait()
        # The pipe's transport goes away in a later pass of the loop.
        started._transport.close()  # type: ignore[attr-defined]
        await asyncio.sleep(0)


SLOW_ANSWER = ("--fake.chunk-interval-ms", "100")


@pytest.mark.slow
@pytest.mark.real_time
async def test_process_drains() -> None:
    async with process(*SLOW_ANSWER) as server:
        await server.started()
        async with server.client() as client:
            await client.say("one two three four five")
            await client.until("output_chunk")
            server.process.send_signal(signal.SIGTERM)
            closing = await client.until("session_closing")
            assert closing["reason"] == "shutting_down"
            assert 0 < closing["time_left_ms"] <= 30_000
            answer = await client.answer()
            assert (answer.text.split()[-1], answer.reason) == ("five", "stop")
            assert await client.closed() == 1012
        assert await server.ended() == 0
        assert "Traceback" not in "".join(server.lines)


@pytest.mark.slow
@pytest.mark.real_time
async def test_second_signal_ends_at_once() -> None:
    """The answer would take ten minutes, and the drain an hour."""
    async with process("--fake.first-chunk-delay-ms", "600000", "--drain-timeout-sec", "3600") as server:
        await server.started()
        async with server.client() as client:
            await client.say("hello")
            await client.until("response_started")
            server.process.send_signal(signal.SIGTERM)
            await client.until("session_closing")
            server.process.send_signal(signal.SIGTERM)
            assert (await client.answer()).reason == "cancelled"
            assert await client.closed() == 1012
        assert await server.ended() == 0


@pytest.mark.slow
@pytest.mark.real_time
async def test_drain_timeout() -> None:
    async with process("--fake.first-chunk-delay-ms", "600000", "--drain-timeout-sec", "0.5") as server:
        await server.started()
        async with server.client() as client:
            await client.say("hello")
            await client.until("response_started")
            server.process.send_signal(signal.SIGTERM)
            assert (await client.until("session_closing"))["time_left_ms"] <= 500
            assert (await client.answer()).reason == "cancelled"
            assert await client.closed() == 1012
        assert await server.ended() == 0


@pytest.mark.slow
@pytest.mark.real_time
async def test_taken_port_is_an_error_and_never_another_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        async with process("--port", port) as server:
            assert await server.ended() == 1
            said = "".join(server.lines)
            assert port in said
            assert "Traceback" not in said
            assert "open http" not in said


@pytest.mark.slow
@pytest.mark.real_time
async def test_wss_and_https_on_one_port(tmp_path: Path) -> None:
    _, client_context = tls_contexts(tmp_path)
    files = ("--ssl-certfile", str(tmp_path / "certificate.pem"), "--ssl-keyfile", str(tmp_path / "certificate.pem"))
    async with process(*files) as server:
        await server.started()
        port = int(server.address.rpartition(":")[2])
        async with server.client("wss", ssl=client_context) as client:
            await client.say("hello over TLS")
            assert (await client.answer()).text == "hello over TLS"
            async with raw_client(port, tls=client_context) as http:
                await http.send(request("GET", "/health", "Connection: close"))
                assert (await http.response()).json()["sessions"] == 1
            untrusting = ssl.create_default_context()
            with pytest.raises(ssl.SSLCertVerificationError):
                async with server.client("wss", ssl=untrusting):
                    pass
            async with raw_client(port) as plain:
                await plain.send(request("GET", "/health"))
                assert b"200" not in await plain.rest()
            server.process.send_signal(signal.SIGTERM)
            assert await client.closed() == 1012
        assert await server.ended() == 0
        assert f"to try it, open https://127.0.0.1:{port} in a browser\n" in "".join(server.lines)


@pytest.mark.slow
@pytest.mark.real_time
@pytest.mark.parametrize(
    ("host", "page"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("localhost", "localhost")]
)
async def test_the_last_line_of_the_start_says_what_to_open(host: str, page: str) -> None:
    async with process("--host", host, "--insecure-no-auth") as server:
        await server.started()
        port = server.address.rpartition(":")[2]
        server.process.send_signal(signal.SIGTERM)
        assert await server.ended() == 0
    assert server.said_last(before="shutting down").endswith(f"to try it, open http://{page}:{port} in a browser")


def test_complaints_are_heard(caplog: pytest.LogCaptureFixture) -> None:
    """The proof that nothing went wrong stands on the errors in the log: they must reach it."""

    async def run(complain: Callable[[], None]) -> None:
        async with live_server():
            complain()

    def lost_task() -> None:
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)

    for complain in (lambda: logging.getLogger("omni_ws.x").error("oh"), lost_task):
        with pytest.raises(AssertionError):
            asyncio.run(run(complain))

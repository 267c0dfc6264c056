"""The end of a server, whatever its clients do, and what an answer that is cut then says."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import socket
import struct
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from support.live_server import live_server
from support.mode_b_client import EVENTS, create, text
from support.patience import PATIENCE_SEC
from support.raw_http import chunked, raw_client, request, websocket_upgrade

from omni_ws.engine.base import TextOutput
from omni_ws.engine.fake import EchoEngine, ScriptedEngine
from omni_ws.generated import salience_pb2 as messages
from omni_ws.generated.salience_pb2_grpc import SalienceStub

CHAT = "/v1/chat/completions"
STREAMING = "X-Streaming-Input: true"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}
TESTS = str(Path(__file__).parents[2])

#: ``omni-ws serve`` over an engine with token sessions, which never finishes a generation.
SERVE = f"""
import sys, time
sys.path.insert(0, {TESTS!r})
from support.token_engine import TokenEngine
from omni_ws import server
from omni_ws.cli import main

class Stuck(TokenEngine):
    async def stop(self):
        if "--stuck" in sys.argv:
            time.sleep(3600)
        await super().stop()

def create_engine(config):
    engine = Stuck()
    engine.gate.clear()
    return engine

server.create_engine = create_engine
sys.exit(main(["serve", "--engine", "fake", "--port", "0", *(one for one in sys.argv[1:] if one != "--stuck")]))
"""


@dataclass
class Process:
    process: asyncio.subprocess.Process
    port: int = 0
    grpc_port: int = 0

    async def says(self, words: str) -> str:
        """Its next line with these words."""
        said = ""
        assert self.process.stderr is not None
        while words not in (line := (await asyncio.wait_for(self.process.stderr.readline(), PATIENCE_SEC)).decode()):
            assert line, said
            said += line
        return line

    async def started(self) -> None:
        while not (self.port and self.grpc_port):
            line = await self.says("listens on")
            if (found := re.search(r"listens on (?:http://)?127\.0\.0\.1:(\d+)", line)) is not None:
                if "gRPC" in line:
                    self.grpc_port = int(found[1])
                else:
                    self.port = int(found[1])

    async def ends_by(self, number: signal.Signals) -> bool:
        """Whether this signal ends it, with the exit status 0. (benchmarks/gate.py says how soon.)"""
        self.process.send_signal(number)
        return await asyncio.wait_for(self.process.wait(), PATIENCE_SEC) == 0

    async def drains(self) -> None:
        """Waits until it says so; a connection that is there without a request when it begins to is only closed."""
        while True:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                async with raw_client(self.port) as client:
                    await client.send(request("GET", "/health", "Connection: close"))
                    if (await client.response()).json()["status"] == "draining":
                        return


@contextlib.asynccontextmanager
async def process(*flags: str) -> AsyncIterator[Process]:
    started = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SERVE, *flags), stderr=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL
    )
    server = Process(started)
    try:
        await server.started()
        yield server
    finally:
        if started.returncode is None:
            started.kill()
            await started.wait()
        started._transport.close()  # type: ignore[attr-defined]
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def holding_everything(server: Process) -> AsyncIterator[None]:
    """Clients that have begun everything that there is, finish nothing, and read nothing."""
    async with contextlib.AsyncExitStack() as clients:

        async def client(*sent: bytes) -> None:
            raw = await clients.enter_async_context(raw_client(server.port, read_ahead=1024))
            raw.writer.write(b"".join(sent))

        large = json.dumps({"messages": [{"role": "user", "content": "x " * 500_000}], "stream": True}).encode()
        frame = b"\x81\x80\0\0\0\0"
        await client(
            websocket_upgrade("/v1/streaming_input"), _text_frame(b'{"type":"input_chunk","sequence_id":0,"text":"a"}')
        )
        await client(websocket_upgrade("/v1/streaming_input"), frame[:1])
        await client(
            request("POST", CHAT, STREAMING, "Transfer-Encoding: chunked"), chunked(b'{"text":"a"}\n', end=False)
        )
        await client(request("POST", CHAT, "Content-Type: application/json", body=large))
        await client(request("POST", CHAT, "Content-Length: 100"), b"{")
        await client(b"GET / HT")
        async with raw_client(server.port) as asking:
            body = b'{"chunk":{"text":"a"},"start_policy":"on_first_chunk"}'
            await asking.send(request("POST", "/v1/streaming_input/sessions", body=body))
            path = (await asking.response()).headers["location"]
        await client(request("GET", f"{path}/result?wait=60"))
        await client(request("GET", f"{path}/result", EVENTS))
        channel = await clients.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}"))
        stub = SalienceStub(channel)
        session = await stub.OpenSession(messages.OpenSessionRequest(model="local-model"))
        call = stub.Generate(
            messages.GenerateRequest(session_id=session.session_id, append_tokens=[1, 2, 3], max_tokens=9)
        )
        await call.read()
        try:
            yield
        finally:
            call.cancel()


def _text_frame(data: bytes) -> bytes:
    assert len(data) < 126
    return bytes((0x81, 0x80 | len(data), 0, 0, 0, 0)) + data


@pytest.mark.slow
@pytest.mark.real_time
@pytest.mark.parametrize(
    ("number", "flags"),
    [(signal.SIGINT, ()), (signal.SIGTERM, ("--stuck",))],
    ids=["", "engine that does not stop"],
)
async def test_a_second_signal_ends_it(number: signal.Signals, flags: tuple[str, ...]) -> None:
    async with process("--drain-timeout-sec", "3600", *flags) as server, holding_everything(server):
        server.process.send_signal(number)
        await server.drains()
        assert await server.ends_by(number)


@pytest.mark.slow
@pytest.mark.real_time
async def test_a_second_signal_while_it_ends() -> None:
    """The drain is over, and its end takes too long."""
    async with process("--drain-timeout-sec", "0.01") as server, holding_everything(server):
        server.process.send_signal(signal.SIGTERM)
        await server.says("cancelling the rest")
        assert await server.ends_by(signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.real_time
async def test_an_idle_server_stops() -> None:
    async with process() as server, raw_client(server.port), raw_client(server.port) as kept:
        await kept.send(request("GET", "/health"))
        await kept.response()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
            await SalienceStub(channel).OpenSession(messages.OpenSessionRequest(model="local-model"))
            assert await server.ends_by(signal.SIGTERM)


# what an answer says that is cut


async def forever() -> None:
    await asyncio.Event().wait()


@pytest.mark.virtual_clock
@pytest.mark.parametrize("route", ["chat", "completions", "mode a", "mode b"])
async def test_events_that_the_end_cuts_end_with_an_error(route: str) -> None:
    engine = EchoEngine() if route.startswith("mode") else ScriptedEngine([TextOutput("a"), forever])
    async with live_server(engine, still_answers=False) as server, raw_client(server.port) as client:
        match route:
            case "chat":
                body = json.dumps({**HELLO, "stream": True}).encode()
                await client.send(request("POST", CHAT, "Content-Type: application/json", body=body))
            case "completions":
                body = b'{"prompt":["a","b"],"stream":true}'
                await client.send(request("POST", "/v1/completions", "Content-Type: application/json", body=body))
            case "mode a":
                await client.send(request("POST", CHAT, STREAMING, "Transfer-Encoding: chunked"))
                await client.send(chunked(b'{"text":"a"}\n', end=False))
            case _:
                session = await create(server, {"chunk": text("a", 0), "start_policy": "on_first_chunk"})
                await client.send(request("GET", f"{session.path}/result", EVENTS))
        if route == "completions":  # which keeps a piece back until the next is there
            await server.until(lambda: server.engine.active_requests == 2)
        else:
            await client.reader.readuntil(b'"content":"a"')
        cut = asyncio.create_task(client.reader.read(-1))
        await server.running.drain(3)
        await server.running.close()
        rest = await cut
        if route == "completions":
            assert b"shutting_down" in rest
            return
        assert b"event: error\n" in rest
        assert b'"code":"shutting_down"' in rest
        assert rest.endswith(b"0\r\n\r\n")  # whole, as HTTP has it
        assert b"[DONE]" not in rest


@pytest.mark.virtual_clock
async def test_a_whole_answer_that_the_end_cuts_is_a_503() -> None:
    engine = ScriptedEngine([TextOutput("a"), forever])
    async with live_server(engine, still_answers=False) as server, raw_client(server.port) as client:
        await client.send(request("POST", CHAT, "Content-Type: application/json", body=json.dumps(HELLO).encode()))
        await server.until(lambda: server.engine.active_requests == 1)
        answering = asyncio.create_task(client.response())
        await server.running.drain(3)
        await server.running.close()
        answer = await answering
        assert (answer.status, answer.error["code"]) == (503, "shutting_down")


# what the system gives


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the length of a backlog")
@pytest.mark.parametrize("connections", [7, 300])
async def test_as_many_connections_may_wait_as_may_be_open(connections: int) -> None:
    async with live_server(limits={"max_connections": connections}) as server:
        (listening,) = server.running._server.sockets
        info = listening.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
        assert struct.unpack_from("I", info, 28)[0] == connections


@pytest.mark.slow
@pytest.mark.real_time
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the limits of another process")
@pytest.mark.parametrize(("connections", "warned"), [(384, False), (385, True)])
async def test_the_limit_of_open_files_is_raised_and_one_that_is_too_low_is_told(
    connections: int, warned: bool
) -> None:
    serve = f"exec {sys.executable} -m omni_ws serve --engine fake --port 0 --limits.max-connections {connections}"
    server = await asyncio.create_subprocess_exec(
        *("bash", "-c", f"ulimit -Sn 64; ulimit -Hn 512; {serve}"), stderr=asyncio.subprocess.PIPE
    )
    try:
        said = ""
        assert server.stderr is not None
        while "listens on" not in said:
            said += (await asyncio.wait_for(server.stderr.readline(), PATIENCE_SEC)).decode()
        limits = await asyncio.to_thread(Path(f"/proc/{server.pid}/limits").read_text)
        assert re.search(r"Max open files +512 +512 ", limits), limits
        assert ("limits.max_connections is 385, but this process can open only 512 files" in said) == warned, said
    finally:
        server.kill()
        await server.communicate()

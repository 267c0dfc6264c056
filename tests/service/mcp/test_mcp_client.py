"""The connection to MCP servers: what may be reached, and what a server may send."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import msgspec
import pytest
from support.mcp_server import McpUnderTest, mcp_server
from support.patience import PATIENCE_SEC

from omni_ws.config.model import RealtimeConfig
from omni_ws.core.json_values import MAX_MESSAGE_VALUES
from omni_ws.errors import InvalidValue, UnsupportedParameter
from omni_ws.service.mcp import (
    MAX_RESPONSE_BYTES,
    MAX_STREAM_BYTES,
    BoundedBody,
    McpFailure,
    McpLink,
    McpReach,
)
from omni_ws.wire.session_config import McpServer


@pytest.fixture(scope="module")
def reference() -> Iterator[McpUnderTest]:
    with mcp_server() as server:
        yield server


def named(url: str, **fields: str) -> McpServer:
    return McpServer(type="mcp", server_label="one", server_url=url, **fields)  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def linked(url: str, *hosts: str, seconds: float = 30) -> AsyncIterator[McpLink]:
    link = McpLink(named(url), McpReach(RealtimeConfig(mcp_servers=hosts, mcp_timeout_sec=seconds)))
    yield link
    task = link._task
    link.close()
    if task is not None:
        await asyncio.wait([task])


@contextlib.asynccontextmanager
async def answering(respond: Callable[[asyncio.StreamWriter], None]) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server that gives each request the same bytes. Yields its address, and the heads that it got."""
    heads: list[bytes] = []
    serving: list[asyncio.Task[None]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        serving.append(task)
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                heads.append(await reader.readuntil(b"\r\n\r\n"))
                respond(writer)
                await writer.drain()
                await reader.read()
        finally:
            writer.transport.abort()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", heads
    for task in serving:
        task.cancel()
    await asyncio.gather(*serving, return_exceptions=True)


async def test_tools_are_listed_and_called(reference: McpUnderTest) -> None:
    async with linked(reference.url, reference.host) as link:
        assert [tool.name for tool in await link.tools()] == ["add", "fail", "hang", "long"]
        assert await link.call("add", {"a": 1, "b": 2}) == "3"
        with pytest.raises(McpFailure) as told:
            await link.call("nothing", {})
        assert told.value.kind in ("protocol_error", "tool_execution_error")
        assert await link.call("add", {"a": 1, "b": 3}) == "4"


async def test_a_name_must_not_lead_to_a_private_address(reference: McpUnderTest) -> None:
    url = f"http://localhost:{reference.port}/mcp"
    async with linked(url, f"http://localhost:{reference.port}") as link:
        with pytest.raises(McpFailure, match="could not be reached"):
            await link.tools()
    async with linked(url, f"http://localhost:{reference.port}", "127.0.0.0/8") as link:
        assert await link.tools()


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1:1/mcp", "http://127.0.0.1:8081/mcp", "http://127.0.0.1.example:8080/mcp", "file:///etc", "mcp"],
)
def test_only_listed_hosts_are_reached(url: str) -> None:
    reach = McpReach(RealtimeConfig(mcp_servers=("http://127.0.0.1:8080",)))
    reach.check(named("http://127.0.0.1:8080/mcp"))
    with pytest.raises(UnsupportedParameter, match=r"realtime\.mcp_servers"):
        reach.check(named(url))


@pytest.mark.parametrize("url", ["http://a:b@127.0.0.1:8080/", "http://127.0.0.1:8080/#x", "http://127.0.0.1:8080/ä"])
def test_urls_are_plain(url: str) -> None:
    with pytest.raises(InvalidValue, match="server_url"):
        McpReach(RealtimeConfig(mcp_servers=("http://127.0.0.1:8080",))).check(named(url))


async def test_without_the_package_it_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnsupportedParameter, match=r"omni-ws\[mcp\]"):
        McpReach(RealtimeConfig(mcp_servers=("http://127.0.0.1",))).check(named("http://127.0.0.1/"))


async def test_proxies_of_the_environment_are_not_used(
    reference: McpUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with linked(reference.url, reference.host) as link:
        assert await link.tools()


async def test_redirects_are_not_followed(reference: McpUnderTest) -> None:
    head = b"HTTP/1.1 307 Elsewhere\r\nLocation: /other\r\nContent-Length: 0\r\n\r\n"
    async with answering(lambda writer: writer.write(head)) as (host, heads), linked(f"{host}/mcp", host) as link:
        with pytest.raises(McpFailure) as told:
            await link.tools()
        assert told.value.shown() == {
            "type": "http_error",
            "code": 307,
            "message": "the server answered with status 307",
        }
        assert all(one.startswith(b"POST /mcp ") for one in heads)


async def test_a_server_that_hangs_is_given_up() -> None:
    async with answering(lambda writer: None) as (host, _), linked(f"{host}/mcp", host, seconds=0.2) as link:
        with pytest.raises(McpFailure, match=r"within 0\.2 s"):
            await link.tools()


@pytest.mark.parametrize("extra", [b"", b"Content-Encoding: gzip\r\n"])
async def test_what_a_server_sends_is_bounded(extra: bytes) -> None:
    size = MAX_RESPONSE_BYTES + 1
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n" + extra + b"Content-Length: %d\r\n\r\n" % size

    def respond(writer: asyncio.StreamWriter) -> None:
        writer.write(head + b" " * size)

    async with answering(respond) as (host, _), linked(f"{host}/mcp", host) as link:
        with pytest.raises(McpFailure, match="no valid response"):
            await link.tools()


@contextlib.asynccontextmanager
async def speaking(
    tools: list[dict[str, Any]],
    result: dict[str, Any] | None,
    *,
    hung: asyncio.Event | None = None,
    begin: bytes = b"",
    in_events: bool = False,
) -> AsyncIterator[tuple[str, asyncio.Queue[bytes]]]:
    """A server with these tools and one result, whose streams of events end at once. Yields the heads of their GETs.

    Without a result, a call gets no more than ``begin``; ``hung`` is set when the client has closed its connection.
    With ``in_events`` each response is an event.
    """
    opened: asyncio.Queue[bytes] = asyncio.Queue()
    about = {
        "protocolVersion": "2025-06-18",
        "capabilities": {"tools": {}},
        "serverInfo": {"name": "x", "version": "1"},
    }
    results = {"initialize": about, "tools/list": {"tools": tools}, "tools/call": result}
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while head := (await reader.readuntil(b"\r\n\r\n")).lower():
                if head.startswith(b"get"):
                    opened.put_nowait(head)
                    events = b"Content-Type: text/event-stream\r\nConnection: close\r\n\r\nid: 1\nretry: 0\ndata:\n\n"
                    writer.write(b"HTTP/1.1 200 OK\r\n" + events)
                    break
                length = int(head.partition(b"content-length:")[2].split()[0])
                asked = msgspec.json.decode(await reader.readexactly(length))
                if "id" not in asked:
                    writer.write(b"HTTP/1.1 202 Accepted\r\nContent-Length: 0\r\n\r\n")
                    continue
                if (answer := results[asked["method"]]) is None:
                    writer.write(begin)
                    with contextlib.suppress(OSError):
                        await reader.read()
                    assert hung is not None
                    hung.set()
                    break
                found = {"jsonrpc": "2.0", "id": asked["id"], "result": answer}
                body, kind = msgspec.json.encode(found), b"application/json"
                if in_events:
                    body, kind = b"data: " + body + b"\r\n\r\n", b"text/event-stream"
                fields = b"Content-Type: " + kind + b"\r\nMcp-Session-Id: s\r\nContent-Length: %d" % len(body)
                writer.write(b"HTTP/1.1 200 OK\r\n" + fields + b"\r\n\r\n" + body)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", opened
        for writer in writers:
            writer.transport.abort()


async def test_the_schema_of_a_result_is_not_run() -> None:
    """The steps that its pattern takes for this result double with each "a"."""
    properties = {"a": {"type": "string", "pattern": "^(a+)+$"}}
    tool: dict[str, Any] = {"name": "t", "inputSchema": {"type": "object"}}
    tool["outputSchema"] = {"type": "object", "properties": properties}
    result = {"content": [{"type": "text", "text": "done"}], "structuredContent": {"a": "a" * 20 + "!"}}
    async with speaking([tool], result) as (host, _), linked(f"{host}/mcp", host) as link:
        assert [one.name for one in await link.tools()] == ["t"]
        assert await link.call("t", {}) == "done"


async def test_a_stream_that_ends_at_once_is_not_opened_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omni_ws.service.mcp._STREAM_INTERVAL_SEC", 3600)
    async with speaking([], {}) as (host, opened), linked(f"{host}/mcp", host) as link:
        await link.tools()
        async with asyncio.timeout(PATIENCE_SEC):
            await opened.get()
        for _ in range(20):
            await link.tools()
        assert opened.empty()


BEGUN = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("begin", [b"", BEGUN, BEGUN + b"7\r\ndata: {\r\n", BEGUN + b"e\r\nid: 1\ndata: \n\n\r\n"])
async def test_the_request_of_a_call_that_is_given_up_is_closed(begin: bytes) -> None:
    """Also if the server has begun to answer, or says how to go on with the answer; and other requests go on."""
    hung = asyncio.Event()
    async with (
        speaking([], None, hung=hung, begin=begin) as (host, _),
        linked(f"{host}/mcp", host) as link,
    ):
        await link.tools()
        task = link._task
        patience = link.timeout_sec
        link.timeout_sec = link._reach.timeout_sec = 0.3
        with pytest.raises(McpFailure, match=r"within 0\.3 s"):
            await link.call("t", {})
        link.timeout_sec = link._reach.timeout_sec = patience
        async with asyncio.timeout(PATIENCE_SEC):
            await hung.wait()
        assert await link.tools() == []
        assert link._task is task  # the same connection


@pytest.mark.parametrize("events", [False, True])
async def test_what_is_parsed_has_as_many_values_as_a_message_may_have(events: bool) -> None:
    tool: dict[str, Any] = {"name": "t", "inputSchema": {"type": "object"}}
    for count, fits in ((MAX_MESSAGE_VALUES - 100, True), (MAX_MESSAGE_VALUES + 1, False)):
        schema = {"type": "object", "enum": [0] * count}
        async with (
            speaking([{**tool, "inputSchema": schema}], {}, in_events=events) as (host, _),
            linked(f"{host}/mcp", host) as link,
        ):
            if fits:
                assert [one.name for one in await link.tools()] == ["t"]
                continue
            with pytest.raises(McpFailure):
                await link.tools()


@pytest.mark.virtual_clock
async def test_the_pace_of_a_stream_without_end() -> None:
    """Its first MAX_STREAM_BYTES come at once, and the rest at 256 KiB a second."""
    event, loop = b"data: " + b" " * (64 * 1024 - 8) + b"\n\n", asyncio.get_running_loop()

    async def stream() -> AsyncIterator[bytes]:
        for _ in range(MAX_STREAM_BYTES // len(event) + 8):
            yield event

    body = BoundedBody(stream(), events=True, posted=False, ends_at=None)
    began = loop.time()
    waited = [loop.time() - began async for _ in body]
    assert waited[-9:] == pytest.approx([0, *(number / 4 for number in range(1, 9))])

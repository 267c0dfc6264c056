"""Servers of models on this machine are found without waiting for them, and named, and nothing else."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from support.patience import PATIENCE_SEC

from omni_ws.config import EngineName, ServerConfig
from omni_ws.config.parts import AsrConfig, LlmConfig
from omni_ws.engine_choice import available
from omni_ws.engine_choice.available import LocalServer, suggestions

OLLAMA = b'{"object":"list","data":[{"id":"llama3.2:latest","owned_by":"library"},{"id":"other"}]}'
OPEN = ServerConfig(port=0)


def response(body: bytes, status: str = "200 OK") -> bytes:
    return f"HTTP/1.0 {status}\r\nContent-Type: application/json\r\n\r\n".encode() + body


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def place(handler: Handler, monkeypatch: pytest.MonkeyPatch, *, more: int | None = None) -> AsyncIterator[int]:
    """The one place to look at, with a server; ``more`` is the port of another place."""
    server = await asyncio.start_server(handler, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    places = (LocalServer("Ollama", port, "ollama"), *([LocalServer("LM Studio", more, "lmstudio")] if more else []))
    monkeypatch.setattr(available, "LOCAL_SERVERS", places)
    try:
        yield port
    finally:
        server.close()
        await server.wait_closed()


def says(content: bytes) -> Handler:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"GET /v1/models HTTP/1.0\r\nHost: 127.0.0.1:")
        writer.write(content)
        writer.close()

    return handler


async def test_a_server_is_named_with_its_first_model_and_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        nobody = free.getsockname()[1]
    async with place(says(response(OLLAMA)), monkeypatch, more=nobody):
        line = "Ollama on this machine serves llama3.2:latest: to talk with it, start with --llm ollama"
        assert await suggestions(OPEN, timeout=30) == (line,)
        # Parts around it may be named.
        assert await suggestions(ServerConfig(port=0, asr=AsrConfig(use="none")), timeout=30) == (line,)


async def test_nothing_is_looked_at_where_the_llm_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    async with place(says(response(OLLAMA)), monkeypatch) as port:
        for config in (
            ServerConfig(llm=LlmConfig(use="rules")),
            ServerConfig(engine=EngineName.EMBEDDED),
            ServerConfig(port=port),  # that is this server itself
        ):
            assert await suggestions(config, timeout=30) == ()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        response(b"<html>"),
        response(b"[]"),
        response(b'{"data":[]}'),
        response(b'{"data":null}'),
        response(b'{"data":[{"id":5}]}'),
        response(b'{"data":[{"id":"two\\nlines"}]}'),
        response(b'{"data":[{"id":"omni-embedded","owned_by":"omni_ws"}]}'),
        response(OLLAMA, "401 Unauthorized"),
        response(b'{"data":[{"id":"' + b"x" * available._MOST_BYTES + b'"}]}'),
    ],
)
async def test_what_is_no_server_of_models_is_not_named(content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    async with place(says(content), monkeypatch):
        assert await suggestions(OPEN, timeout=30) == ()


async def test_a_server_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        gone.set()
        writer.close()

    async with place(silent, monkeypatch):
        assert await suggestions(OPEN, timeout=0.01) == ()
        await asyncio.wait_for(gone.wait(), PATIENCE_SEC)


async def test_a_long_name_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    async with place(says(response(b'{"data":[{"id":"' + b"x" * 300 + b'"}]}')), monkeypatch):
        (line,) = await suggestions(OPEN, timeout=30)
        assert f" {'x' * 100}: " in line

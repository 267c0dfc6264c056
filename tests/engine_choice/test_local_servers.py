"""Servers of models on this machine are found without waiting for them; only ours, with a model that chats, is used."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.patience import PATIENCE_SEC

from omni_ws import engine_choice as module
from omni_ws.engine_choice import (
    FoundServer,
    LocalServer,
    listener_owners,
    local_servers,
)

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

VLLM = "http://127.0.0.1:8000/v1"
USES = {"ollama": "Ollama", "lmstudio": "LM Studio", VLLM: "a server like vLLM", "llamacpp": "llama.cpp"}


def response(body: bytes, status: str = "200 OK") -> bytes:
    return f"HTTP/1.0 {status}\r\nContent-Type: application/json\r\n\r\n".encode() + body


def serving(pages: Mapping[str, Any]) -> Handler:
    """Answers JSON by path, and 404 at any other; what is asked holds no key."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, path, _ = head.split(" ", 2)
        assert method == "GET"
        assert "authorization" not in head.lower()
        found = pages.get(path)
        writer.write(response(b"", "404 Not Found") if found is None else response(json.dumps(found).encode()))
        writer.close()

    return handler


ON_LINUX = pytest.mark.skipif(
    sys.platform != "linux" or sys.byteorder != "little", reason="only Linux tells in /proc/net/tcp who listens"
)


class Ours(dict[int, set[int]]):
    """Each port is that of a server of ours."""

    def get(self, port: int, default: Any = None) -> Any:
        return {os.getuid()}


@pytest.fixture(autouse=True)
def _ours(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose a server is, only the tests about that look up."""
    if not any(mark is ON_LINUX.mark for mark in request.node.iter_markers("skipif")):
        monkeypatch.setattr(module, "listener_owners", Ours)


@asynccontextmanager
async def place(handler: Handler, monkeypatch: pytest.MonkeyPatch, *, use: str = "ollama") -> AsyncIterator[int]:
    """The one place to look at, with a server."""
    server = await asyncio.start_server(handler, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    monkeypatch.setattr(module, "LOCAL_SERVERS", (LocalServer(USES[use], port, use),))
    try:
        yield port
    finally:
        server.close()
        await server.wait_closed()


async def found(pages: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch, use: str) -> FoundServer | None:
    async with place(serving(pages), monkeypatch, use=use):
        servers = await local_servers(0, timeout=PATIENCE_SEC)
    return servers[0] if servers else None


def ollama(*there: dict[str, Any], loaded: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    return {"/api/tags": {"models": list(there)}, "/api/ps": {"models": list(loaded)}}


LLAMA = {"name": "llama3.2:latest", "details": {"family": "llama"}}
EMBEDDER = {"name": "nomic-embed-text:latest", "details": {"family": "nomic-bert"}}
UNNAMED_EMBEDDER = {"name": "arctic:latest", "details": {"family": "bert"}}
QWEN = {"name": "qwen3:4b"}
CLOUD = {"name": "gpt-oss:120b-cloud"}
FORWARDED = {"name": "mine:latest", "remote_host": "https://ollama.com"}


@pytest.mark.parametrize(
    ("use", "pages", "model"),
    [
        ("ollama", ollama(EMBEDDER, UNNAMED_EMBEDDER, CLOUD, FORWARDED, LLAMA), "llama3.2:latest"),
        ("ollama", ollama(LLAMA, QWEN, loaded=(EMBEDDER, QWEN)), "qwen3:4b"),
        # What is loaded says less of itself than the list of all.
        ("ollama", ollama(LLAMA, FORWARDED, loaded=({"name": "mine:latest"},)), "llama3.2:latest"),
        ("ollama", {"/api/tags": {"models": [LLAMA]}}, "llama3.2:latest"),
        (
            "lmstudio",
            {
                "/api/v0/models": {
                    "data": [
                        {"id": "text-embedding-nomic", "type": "embeddings", "state": "loaded"},
                        {"id": "one", "type": "llm", "state": "not-loaded"},
                        {"id": "two", "type": "vlm", "state": "loaded"},
                    ]
                }
            },
            "two",
        ),
        ("lmstudio", {"/api/v0/models": {"data": [{"id": "one", "type": "llm", "state": "not-loaded"}]}}, "one"),
        (VLLM, {"/v1/models": {"data": [{"id": "Qwen/Qwen3-8B", "owned_by": "vllm"}]}}, "Qwen/Qwen3-8B"),
        ("llamacpp", {"/v1/models": {"data": [{"id": "model.gguf", "owned_by": "llamacpp"}]}}, "model.gguf"),
    ],
)  # fmt: skip
async def test_a_server_of_ours_is_used_with_a_model_that_chats(
    use: str, pages: Mapping[str, Any], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = await found(pages, monkeypatch, use)
    assert one is not None
    assert (one.server.use, one.model, one.why_not) == (use, model, "")
    assert one.suggestion == f"{USES[use]} on this machine serves {model}: to talk with it, start with --llm {use}"


@pytest.mark.parametrize(
    ("use", "pages"),
    [
        ("ollama", ollama()),
        ("ollama", ollama(EMBEDDER, CLOUD, FORWARDED)),
        ("ollama", ollama({"name": "two\nlines"}, {"name": 5}, {})),
        ("ollama", ollama({"name": "x" * 201})),
        ("ollama", {"/v1/models": {"data": [{"id": "omni-embedded", "owned_by": "omni_ws"}]}}),
        ("lmstudio", {"/v1/models": {"data": [{"id": "omni-embedded", "owned_by": "omni_ws"}]}}),
        (VLLM, {"/v1/models": {"data": [{"id": "omni-embedded", "owned_by": "omni_ws"}]}}),
        (VLLM, {"/v1/models": {"data": [{"id": "openai/whisper-base", "owned_by": "vllm"}]}}),
        ("llamacpp", {"/v1/models": []}),
        ("llamacpp", {"/v1/models": {"data": None}}),
    ],
)  # fmt: skip
async def test_what_has_no_model_that_chats_here_is_not_found(
    use: str, pages: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await found(pages, monkeypatch, use) is None


@pytest.mark.parametrize("use", ["ollama", "lmstudio", VLLM, "llamacpp"])
async def test_what_does_not_tell_what_it_is_is_only_named(use: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = await found({"/v1/models": {"data": [{"id": "some", "owned_by": "somebody"}]}}, monkeypatch, use)
    assert one is not None
    assert one.why_not
    assert one.suggestion.endswith(f"({one.why_not}): to talk with it, start with --llm {use}")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        response(b"<html>"),
        response(b'{"data":[{"id":"a"}]}', "401 Unauthorized"),
        response(b'{"data":[{"id":"' + b"x" * module._MOST_BYTES + b'"}]}'),
        response(b"[" * 100_000),
    ],
)
async def test_what_is_no_server_of_models_is_not_found(content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(content)
        writer.close()

    for use in ("ollama", "llamacpp"):
        async with place(handler, monkeypatch, use=use):
            assert await local_servers(0, timeout=PATIENCE_SEC) == ()


async def test_a_server_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        gone.set()
        writer.close()

    async with place(silent, monkeypatch, use="llamacpp"):
        assert await local_servers(0, timeout=0.01) == ()
        await asyncio.wait_for(gone.wait(), PATIENCE_SEC)


async def test_a_server_that_says_nothing_makes_no_other_unusable(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is silent until somebody asks whose the ports are."""
    asked, loop = asyncio.Event(), asyncio.get_running_loop()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asked.wait()
        writer.close()

    def owners() -> dict[int, set[int]]:
        loop.call_soon_threadsafe(asked.set)
        return {port: {os.getuid()}}

    monkeypatch.setattr(module, "listener_owners", owners)
    async with (
        place(silent, monkeypatch, use="lmstudio") as quiet,
        place(serving(ollama(LLAMA)), monkeypatch) as port,
    ):
        places = (LocalServer("LM Studio", quiet, "lmstudio"), LocalServer("Ollama", port, "ollama"))
        monkeypatch.setattr(module, "LOCAL_SERVERS", places)
        (one,) = await local_servers(0, timeout=PATIENCE_SEC)
    assert (one.server.kind, one.why_not) == ("Ollama", "")


async def test_the_port_of_this_server_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    async with place(serving(ollama(LLAMA)), monkeypatch) as port:
        assert await local_servers(port, timeout=PATIENCE_SEC) == ()
        assert len(await local_servers(0, timeout=PATIENCE_SEC)) == 1


# Whose it is


async def test_a_server_of_another_user_is_named_and_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async with place(serving(ollama(LLAMA)), monkeypatch) as port:
        for owners, why in (
            ({port: {os.getuid() + 1}}, "another user of this machine runs it"),
            ({port: {os.getuid(), os.getuid() + 1}}, "another user of this machine runs it"),
            ({port: {0}}, ""),
            ({port + 1: {0}}, "it cannot be told whose it is"),
            (None, "it cannot be told whose it is"),
        ):
            monkeypatch.setattr(module, "listener_owners", lambda owners=owners: owners)
            (one,) = await local_servers(0, timeout=PATIENCE_SEC)
            assert one.why_not == why


@ON_LINUX
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::", "::ffff:127.0.0.1"])
def test_the_system_tells_who_listens(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listening:
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            listening.bind((host, 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
        listening.listen()
        owners = listener_owners()
        assert owners is not None
        assert owners[listening.getsockname()[1]] == {os.getuid()}


@ON_LINUX
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
async def test_a_listener_that_another_user_opened_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        os.seteuid(65534)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EPERM):
            raise
        pytest.skip("this container has no other user")
    try:
        server = await asyncio.start_server(serving(ollama(LLAMA)), "127.0.0.1", 0)
    finally:
        os.seteuid(0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        monkeypatch.setattr(module, "LOCAL_SERVERS", (LocalServer("Ollama", port, "ollama"),))
        (one,) = await local_servers(0, timeout=PATIENCE_SEC)
    assert one.why_not == "another user of this machine runs it"


def test_connections_and_listeners_elsewhere_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "tcp"
    line = "   0: {address}:2CAA 00000000:0000 {state} 00000000:00000000 00:00000000 00000000  1000        0 1 1\n"
    table.write_text(
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid\n"
        + line.format(address="0100007F", state="01")
        + line.format(address="0200A8C0", state="0A")
        + "   1: nonsense\n"
    )
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(sys, "byteorder", "little")
    assert listener_owners((table,)) == {}
    assert listener_owners((tmp_path / "absent",)) is None

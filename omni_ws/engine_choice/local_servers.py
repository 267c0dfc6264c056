"""Servers of models that run on this machine: whether one answers, and the line that would use it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import orjson

from omni_ws.config.model import ServerConfig
from omni_ws.config.parts import LOCAL_PORTS
from omni_ws.core.json_values import check_values
from omni_ws.errors import InvalidFrame

#: The time for all of them together.
LOOK_SEC: Final = 0.3
_MOST_BYTES: Final = 1 << 20
#: Of a model's name.
_MOST_CHARACTERS: Final = 100
#: The owner that our own servers name for their models.
_OWN_KIND: Final = "omni_ws"


@dataclass(frozen=True, slots=True)
class LocalServer:
    """A place where a server of models may listen, and what ``--llm`` calls it."""

    kind: str
    port: int
    use: str


#: In the order in which they are told.
LOCAL_SERVERS: Final = (
    LocalServer("Ollama", LOCAL_PORTS["ollama"], "ollama"),
    LocalServer("LM Studio", LOCAL_PORTS["lmstudio"], "lmstudio"),
    LocalServer("a server like vLLM", 8000, "http://127.0.0.1:8000/v1"),
    LocalServer("llama.cpp", LOCAL_PORTS["llamacpp"], "llamacpp"),
)


async def suggestions(config: ServerConfig, *, timeout: float = LOOK_SEC) -> tuple[str, ...]:
    """Return a line for each server that answers on loopback, if the configuration leaves the LLM open.

    Takes ``timeout`` seconds at most, and uses none of them.
    """
    if config.engine is not None or config.llm.use is not None:
        return ()
    places = [server for server in LOCAL_SERVERS if server.port != config.port]
    found = await asyncio.gather(*(_first_model(server.port, timeout) for server in places))
    return tuple(
        f"{server.kind} on this machine serves {model}: to talk with it, start with --llm {server.use}"
        for server, model in zip(places, found, strict=True)
        if model is not None
    )


async def _first_model(port: int, timeout: float) -> str | None:
    """The first model that the server at ``port`` lists; None where there is no such server."""
    with suppress(OSError, TimeoutError, ValueError, InvalidFrame):
        async with asyncio.timeout(timeout):
            return _first_listed(await _get_models(port))
    return None


async def _get_models(port: int) -> bytes:
    """The body of ``/v1/models``, without the packages that a remote LLM needs. Raises OSError and ValueError."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        # HTTP/1.0 asks for a body that ends with the connection.
        writer.write(f"GET /v1/models HTTP/1.0\r\nHost: 127.0.0.1:{port}\r\nAccept: application/json\r\n\r\n".encode())
        received = bytearray()
        while piece := await reader.read(1 << 16):
            received += piece
            if len(received) > _MOST_BYTES:
                raise ValueError("no list of models is as long")
    finally:
        writer.transport.abort()
    head, _, body = received.partition(b"\r\n\r\n")
    if head[:5] != b"HTTP/" or head.split(None, 2)[1:2] != [b"200"]:
        raise ValueError("no list of models")
    return bytes(body)


def _first_listed(body: bytes) -> str | None:
    """Raises ValueError or InvalidFrame for what is no list of models."""
    check_values(body)
    content: Any = orjson.loads(body)
    listed = content.get("data") if isinstance(content, dict) else None
    first = listed[0] if isinstance(listed, list) and listed else None
    if not isinstance(first, dict) or first.get("owned_by") == _OWN_KIND:
        return None
    model = first.get("id")
    return model[:_MOST_CHARACTERS] if isinstance(model, str) and model.isprintable() else None

"""The reference MCP server of the package ``mcp``, in a thread of its own; and an engine that calls tools."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.transport_security import TransportSecuritySettings
from support.patience import PATIENCE_SEC
from support.scripted_engines import PlayingEngine

from omni_ws.core.chunks import FinishReason, InputChunk, Modality, ToolCallFragment, Usage
from omni_ws.engine.base import Finished, GenerationRequest, TextOutput, ToolCallOutput

#: A credential that must be found nowhere.
SECRET = "sekrit-0f8a31c2"


@dataclass
class McpUnderTest:
    """A running server. ``calls`` are the names of the tools that were called, ``headers`` those of their requests."""

    port: int
    path: str
    calls: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    @property
    def host(self) -> str:
        """The entry of ``realtime.mcp_servers`` for it."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return self.host + self.path

    def tool(self, label: str = "sums", **fields: Any) -> dict[str, Any]:
        """The entry of ``tools`` for it."""
        return {
            "type": "mcp",
            "server_label": label,
            "server_url": self.url,
            "require_approval": "never",
            **fields,
        }


def _tools(server: McpUnderTest) -> MCPServer[Any]:
    made: MCPServer[Any] = MCPServer("reference")

    def note(context: Context[Any], name: str) -> None:
        server.calls.append(name)
        request = context.request_context.request
        if request is not None:
            server.headers.append(dict(request.headers))

    @made.tool(annotations={"readOnlyHint": True})  # type: ignore[arg-type]
    async def add(a: int, b: int, context: Context[Any]) -> str:
        """Add two numbers."""
        note(context, "add")
        return str(a + b)

    @made.tool()
    async def fail(context: Context[Any]) -> str:
        """Fail."""
        note(context, "fail")
        raise ValueError("the tool is broken")

    @made.tool()
    async def hang(context: Context[Any]) -> str:
        """Never answer."""
        note(context, "hang")
        await asyncio.Event().wait()
        return ""

    @made.tool()
    async def long(size: int, context: Context[Any]) -> str:
        """Answer with a long text."""
        note(context, "long")
        return "x" * size

    return made


@contextlib.contextmanager
def mcp_server(*, sse: bool = False, port: int = 0) -> Iterator[McpUnderTest]:
    """A server over streamable HTTP, or over server-sent events."""
    with socket.create_server(("127.0.0.1", port)) as listening:
        server = McpUnderTest(listening.getsockname()[1], "/sse" if sse else "/mcp")
        made, safe = _tools(server), TransportSecuritySettings(enable_dns_rebinding_protection=False)
        app = made.sse_app(transport_security=safe) if sse else made.streamable_http_app(transport_security=safe)
        config = uvicorn.Config(app, log_config=None, loop="asyncio", timeout_graceful_shutdown=0, lifespan="on")
        running = uvicorn.Server(config)
        # Connections wait in the socket until it serves.
        thread = threading.Thread(target=running.run, args=([listening],), name="MCP server")
        thread.start()
        try:
            yield server
        finally:
            running.should_exit = running.force_exit = True
            thread.join(PATIENCE_SEC)


class CallingEngine(PlayingEngine):
    """Calls the tools that its input names, one a line: "call NAME ARGUMENTS"; tells results, and echoes the rest.

    NAME is the end of the name under which the tool is offered.
    """

    def __init__(self, **changes: Any) -> None:
        super().__init__(**{"tools": True, **changes})

    @property
    def offered(self) -> list[str]:
        """The names of the tools that the latest request had."""
        return [tool["function"]["name"] for tool in self.requests[-1].tools]

    def lines(self, told: list[str]) -> list[str]:
        """Lines in place of those of the input, for these results of tools."""
        return []

    def steps(self, request: GenerationRequest, taken: list[InputChunk]) -> Iterable[Any]:
        names = [tool["function"]["name"] for tool in request.tools]
        told = [chunk.payload.decode() for chunk in taken if chunk.tool_call_id is not None]
        texts = [chunk for chunk in taken if chunk.modality is Modality.TEXT and chunk.tool_call_id is None]
        lines = self.lines(told) or b"\n".join(chunk.payload for chunk in texts).decode().splitlines()
        wanted = [line.split(" ", 2)[1:] for line in lines if line.startswith("call ")]
        for number, (end, *arguments) in enumerate(wanted):
            name = next((one for one in names if one.endswith(end)), end)
            call_id = f"call_{len(self.requests)}_{number}"
            yield ToolCallOutput(ToolCallFragment(number, id=call_id, name=name))
            yield ToolCallOutput(ToolCallFragment(number, arguments="".join(arguments) or "{}"))
        if not wanted:
            yield TextOutput("; ".join(told)[:200] if told else " ".join(lines))
        yield Finished(FinishReason.TOOL_CALLS if wanted else FinishReason.STOP, Usage(input_tokens=1, output_tokens=1))

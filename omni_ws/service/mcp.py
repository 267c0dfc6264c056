"""MCP servers of a session: connections to them, the tools that the model is offered, and calls of these tools.

McpLink is the connection to one server, over streamable HTTP or server-sent events, by the package ``mcp``. As a client
names the server, the rules are those for media by URL (``transport.http.media_fetch``). The operator has to list the
server's host (``realtime.mcp_servers``). The host is resolved once for each connection, which uses exactly that
address; the address must be public or listed itself. Redirects are not followed, and neither proxies nor credentials of
the environment are used. The size of a response and of each event is bounded.
"""

from __future__ import annotations

import asyncio
import importlib.util
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar
from urllib.parse import urlsplit

import msgspec

from omni_ws.config.model import DEFAULT_PORTS, MediaDomains, RealtimeConfig
from omni_ws.core.chunks import ToolCall
from omni_ws.core.json_values import check_values
from omni_ws.core.quota import TokenBucket, keep_newest
from omni_ws.engine.threads import Work, run_work
from omni_ws.errors import InvalidFrame, InvalidValue, OmniError, UnsupportedParameter
from omni_ws.installing import install_command
from omni_ws.service import unexpected
from omni_ws.wire.openai_fields import MAX_TOOLS, check_depth
from omni_ws.wire.session_config import (
    McpServer,
    is_mcp,
    offered_name,
    read_servers,
    without_credentials,
)

if TYPE_CHECKING:
    import httpx2
    from mcp import ClientSession


#: The most bytes of one HTTP response that is no stream of events, and of one event.
MAX_RESPONSE_BYTES: Final = 1024 * 1024
#: The most bytes of a stream of events that answers one call.
MAX_STREAM_BYTES: Final = 8 * 1024 * 1024
#: Bytes a second of a stream of events that is open as long as the session, behind its first MAX_STREAM_BYTES: its
#: events are parsed on the loop.
_STREAM_RATE: Final = 256 * 1024
#: The marks that end an event of a stream.
_EVENT_ENDS: Final = (b"\n\n", b"\r\n\r\n", b"\r\r")
#: Longer JSON is examined in a thread.
_INLINE_BYTES: Final = 64 * 1024


def _end_of_events(data: bytearray, start: int) -> int:
    """Return the position in ``data`` after its last complete event, searching from ``start``; 0 if there is none."""
    return max((at + len(end) for end in _EVENT_ENDS if (at := data.rfind(end, start)) >= 0), default=0)


async def _check(data: bytes) -> None:
    """Raise InvalidFrame for JSON with too many values: the package parses it on the event loop."""
    if len(data) <= _INLINE_BYTES:
        check_values(data)
    else:
        await run_work(Work.BODIES, check_values, data)


class BoundedBody:
    """The body of a response, bounded in bytes and time; iterating it yields checked pieces.

    ``events``: the body is a stream of events. ``ends_at`` is a time of the loop's clock; None for a stream that lasts
    as long as the session, of which not the size but the rate is bounded. At ``ends_at`` nobody waits for the response
    to a POST (``posted``) any more. Its body then ends without an error, because an error would close the connection,
    on which other calls run.

    Raises httpx2.ReadTimeout for any other body at ``ends_at``, and httpx2.ReadError for a body that is too long or
    has too many JSON values.
    """

    def __init__(self, stream: Any, *, events: bool, posted: bool, ends_at: float | None) -> None:
        self._stream, self._events, self._posted, self._ends_at = stream, events, posted, ends_at
        self._left = MAX_STREAM_BYTES if events else MAX_RESPONSE_BYTES
        self._pace = TokenBucket(rate=_STREAM_RATE, capacity=MAX_STREAM_BYTES, now=asyncio.get_running_loop().time())

    async def __aiter__(self) -> AsyncIterator[bytes]:
        import httpx2

        pieces, held = aiter(self._stream), bytearray()
        while True:
            try:
                async with asyncio.timeout_at(self._ends_at):
                    piece = await anext(pieces, None)
            except TimeoutError:
                if self._posted:
                    return
                raise httpx2.ReadTimeout("the stream was open for too long") from None
            if piece is None:
                break
            await self._count(len(piece))
            before = len(held)
            held += piece
            if self._events and (end := _end_of_events(held, max(0, before - 3))):
                yield await self._checked(bytes(held[:end]))
                del held[:end]
            if len(held) > MAX_RESPONSE_BYTES:
                raise httpx2.ReadError("the response is too long")
        if held:
            yield await self._checked(bytes(held))

    async def _count(self, size: int) -> None:
        import httpx2

        if self._ends_at is None:
            await asyncio.sleep(self._pace.spend(size, now=asyncio.get_running_loop().time()))
            return
        self._left -= size
        if self._left < 0:
            raise httpx2.ReadError("the response is too long")

    async def _checked(self, data: bytes) -> bytes:
        import httpx2

        try:
            await _check(data)
        except InvalidFrame as error:
            raise httpx2.ReadError(error.message) from None
        return data

    async def aclose(self) -> None:
        await self._stream.aclose()


#: The most bytes of text that the model gets of a result.
MAX_RESULT_BYTES: Final = 256 * 1024
#: The least time between the starts of two streams of events: one that has ended is opened again, as often as it ends.
_STREAM_INTERVAL_SEC: Final = 1.0
#: How long a POST is open after its call was given up, so that the call is never told that of the POST.
_LATE_SEC: Final = 0.5
#: Pages of the tools of one server.
_MAX_PAGES: Final = 16


@dataclass(frozen=True, slots=True)
class McpTool:
    """A tool of an MCP server. ``schema`` is the JSON Schema of its arguments."""

    name: str
    description: str
    schema: Mapping[str, Any]
    annotations: Mapping[str, Any] | None = None

    @property
    def reads_only(self) -> bool:
        """Whether the server says that the tool changes nothing."""
        return bool((self.annotations or {}).get("readOnlyHint"))


_Result = TypeVar("_Result")


class McpFailure(Exception):
    """A failed listing or call.

    ``kind`` is a name from OpenAI's API: protocol_error, tool_execution_error or http_error. ``code`` is the HTTP
    status, or the error code that the server gave; None without one.
    """

    def __init__(self, kind: str, message: str, *, code: int | None = None) -> None:
        super().__init__(message)
        self.kind, self.message, self.code = kind, message, code

    def shown(self) -> dict[str, Any]:
        """Return the error as clients see it."""
        code = {} if self.kind == "tool_execution_error" else {"code": self.code or 0}
        return {"type": self.kind, **code, "message": self.message}


class McpReach:
    """The MCP servers that this server may reach, and how long it waits for them."""

    def __init__(self, config: RealtimeConfig) -> None:
        self.timeout_sec = config.mcp_timeout_sec
        self._domains = MediaDomains(config.mcp_servers)
        self._tls: ssl.SSLContext | None = None

    def check(self, server: McpServer, place: str = "tools") -> None:
        """Raise an error if an MCP server may not be reached, with ``place`` as its ``param``. Connects to nothing.

        UnsupportedParameter if the operator does not list its host, or the extra ``mcp`` is not installed; InvalidValue
        for a URL that is malformed, or has a user name or a fragment.
        """
        if importlib.util.find_spec("mcp") is None:
            raise UnsupportedParameter(
                f"MCP servers need the extra mcp on this server: {install_command('mcp')}", param=place
            )
        url = server.server_url or ""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port or DEFAULT_PORTS.get(parts.scheme, 0)
        except ValueError:
            raise InvalidValue("invalid server_url", param=place) from None
        if parts.username is not None or parts.password is not None or parts.fragment:
            raise InvalidValue("a server_url must have neither a user name nor a fragment", param=place)
        if not url.isascii() or not url.isprintable() or " " in url:
            raise InvalidValue("invalid server_url: percent-encode spaces and non-ASCII characters", param=place)
        if not host or not self._domains.allow_url(parts.scheme, host, port):
            origin = f"{parts.scheme}://{parts.netloc}"[:128]
            raise UnsupportedParameter(
                f"the MCP server {origin!r} may not be reached (the operator can allow hosts with "
                "realtime.mcp_servers)",
                param=place,
            )

    async def address(self, host: str, port: int) -> str:
        """Resolve ``host`` to its first allowed address. Raises OSError if there is none."""
        found = await asyncio.get_running_loop().getaddrinfo(host, port, proto=6)
        for *_, address in found:
            if self._domains.allow_address(str(address[0])):
                return str(address[0])
        raise OSError("the host has no allowed address")

    def tls(self) -> ssl.SSLContext:
        """Return the TLS context for https connections."""
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls


class McpLink:
    """The connection to one MCP server, opened at its first use, and again after a failure.

    A task of its own holds the connection, until ``close``.
    """

    def __init__(self, server: McpServer, reach: McpReach) -> None:
        self._server = server
        self._reach = reach
        #: How long a listing or a call may take.
        self.timeout_sec = reach.timeout_sec
        self._task: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[ClientSession] | None = None
        #: The latest status of the server that was no success; None after a success.
        self._status: int | None = None
        #: When the next stream of events may be opened, by the clock of the loop.
        self._next_stream = 0.0

    async def tools(self) -> list[McpTool]:
        """Return the tools of the server. Raises McpFailure."""
        from mcp_types import PaginatedRequestParams

        async def listed() -> list[McpTool]:
            session, found, cursor = await self._session(), [], None
            for _ in range(_MAX_PAGES):
                page = await session.list_tools(params=PaginatedRequestParams(cursor=cursor) if cursor else None)
                for tool in page.tools:
                    notes = (
                        None
                        if tool.annotations is None
                        else tool.annotations.model_dump(mode="json", by_alias=True, exclude_none=True)
                    )
                    found.append(McpTool(tool.name, tool.description or "", tool.input_schema, notes))
                if len(found) > MAX_TOOLS:
                    raise McpFailure("protocol_error", f"the server has more than {MAX_TOOLS} tools")
                if (cursor := page.next_cursor) is None:
                    return found
            raise McpFailure("protocol_error", f"the server lists its tools on more than {_MAX_PAGES} pages")

        return await self._guarded(listed)

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool, and return its result as text.

        Raises McpFailure, also for a result that is an error or has more than MAX_RESULT_BYTES.
        """

        async def called() -> str:
            session = await self._session()
            result = await session.call_tool(name, arguments)
            text = _text_of(result.content, result.structured_content)
            if len(text.encode()) > MAX_RESULT_BYTES:
                raise McpFailure("tool_execution_error", f"the result exceeds {MAX_RESULT_BYTES} bytes")
            if result.is_error:
                raise McpFailure("tool_execution_error", text or "the tool failed")
            return text

        return await self._guarded(called)

    def close(self) -> None:
        """Close the connection, and fail the calls that wait for it. The next use opens it again. Idempotent."""
        if self._task is not None:
            self._task.cancel()
        self._task = self._ready = None

    async def _guarded(self, work: Callable[[], Awaitable[_Result]]) -> _Result:
        """Await ``work`` with a time-out, and raise its errors as McpFailure. Most errors also close the connection.

        An error of the tool and a time-out of a call leave an open connection open.
        """
        from mcp import MCPError

        try:
            async with asyncio.timeout(self.timeout_sec):
                return await work()
        except McpFailure:
            raise
        except TimeoutError:
            if self._ready is not None and not self._ready.done():
                self.close()
            message = f"the server did not answer within {self.timeout_sec:g} s"
            raise McpFailure("protocol_error", message) from None
        except MCPError as error:
            self._raise_status()
            if error.code == -32602:  # arguments that the tool does not take
                raise McpFailure("protocol_error", error.message[:1024], code=error.code) from None
            self.close()
            raise McpFailure("protocol_error", error.message[:1024], code=error.code) from None
        except Exception:
            self._raise_status()
            self.close()
            # The reason would let clients explore the server's network.
            raise McpFailure("protocol_error", "the server could not be reached, or sent no valid response") from None

    def _raise_status(self) -> None:
        """Close the connection and raise McpFailure, if the server has answered with an HTTP error status."""
        status, self._status = self._status, None
        if status is not None:
            self.close()
            raise McpFailure("http_error", f"the server answered with status {status}", code=status) from None

    async def _session(self) -> ClientSession:
        if self._ready is None or self._task is None or self._task.done():
            loop = asyncio.get_running_loop()
            self._ready = loop.create_future()
            self._task = loop.create_task(self._hold(self._ready), name=f"MCP server {self._server.server_label}")
        return await asyncio.shield(self._ready)

    async def _hold(self, ready: asyncio.Future[ClientSession]) -> None:
        """Open the connection, set its session as the result of ``ready``, and hold it until this task is cancelled."""
        from mcp.client.sse import sse_client
        from mcp.client.streamable_http import streamable_http_client

        try:
            async with AsyncExitStack() as stack:
                url, client = self._server.server_url or "", await self._client()
                if urlsplit(url).path.rstrip("/").endswith("/sse"):

                    def made(headers: Any = None, timeout: Any = None, auth: Any = None) -> httpx2.AsyncClient:
                        return client  # which the transport enters and closes

                    streams = await stack.enter_async_context(
                        sse_client(url, httpx_client_factory=made, timeout=self.timeout_sec)
                    )
                else:
                    await stack.enter_async_context(client)
                    # A server that hangs would hold the end of the session up with the request that takes leave.
                    streams = await stack.enter_async_context(
                        streamable_http_client(
                            url, http_client=client, terminate_on_close=False, max_sse_event_size=MAX_RESPONSE_BYTES
                        )
                    )
                session = await stack.enter_async_context(_plain_session(*streams))
                await session.initialize()
                if not ready.done():
                    ready.set_result(session)
                await asyncio.Event().wait()
        except Exception as error:
            _fail(ready, error)
        finally:
            _fail(ready, ConnectionError("the connection was given up"))

    async def _client(self) -> httpx2.AsyncClient:
        import httpx2

        parts = urlsplit(self._server.server_url or "")
        host = parts.hostname or ""
        address = await self._reach.address(host, parts.port or DEFAULT_PORTS[parts.scheme])
        timeout = self.timeout_sec
        return httpx2.AsyncClient(
            headers={**self._server.request_headers, "Accept-Encoding": "identity"},
            # Streams of events may be silent; each call has a time limit of its own.
            timeout=httpx2.Timeout(timeout, read=None),
            transport=_transport(self, host, address, self._reach.tls() if parts.scheme == "https" else None),
            trust_env=False,
            follow_redirects=False,
            max_redirects=0,
        )

    async def may_stream(self) -> None:
        """Wait until another stream of events may be opened."""
        now = asyncio.get_running_loop().time()
        opens = max(now, self._next_stream)
        self._next_stream = opens + _STREAM_INTERVAL_SEC
        await asyncio.sleep(opens - now)

    def answered(self, status: int) -> None:
        """Note the HTTP status of a response."""
        self._status = None if status < 300 else status


def _fail(ready: asyncio.Future[Any], error: Exception) -> None:
    if not ready.done():
        ready.set_exception(error)
        ready.exception()  # nobody may wait any more


def _plain_session(*streams: Any) -> ClientSession:
    """Return a session that does not validate results.

    The package would validate structured results by the server's own schema, whose patterns can block the loop for
    hours.
    """
    from mcp import ClientSession

    class _Plain(ClientSession):
        async def validate_tool_result(self, name: str, result: Any) -> None:
            pass

    return _Plain(*streams)


def _transport(link: McpLink, host: str, address: str, tls: ssl.SSLContext | None) -> httpx2.AsyncBaseTransport:
    """Return a transport that sends every request for ``host`` to ``address``, and bounds the responses.

    When nobody waits for the response to a POST any more, the response ends without an error: an error would close the
    connection, on which other calls run.
    """
    import httpx2

    loop = asyncio.get_running_loop()

    class _Body(BoundedBody, httpx2.AsyncByteStream):
        pass

    class _ToAddress(httpx2.AsyncHTTPTransport):
        async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
            if request.url.host.strip("[]") != host:
                raise httpx2.ConnectError("another host")
            posted = request.method != "GET"
            if not posted:
                await link.may_stream()
            # A stream that goes on with the answer to a POST ends as the POST does.
            stays = not posted and "last-event-id" not in request.headers
            ends_at = None if stays else loop.time() + link.timeout_sec + _LATE_SEC
            moved = httpx2.Request(
                request.method,
                request.url.copy_with(host=address),
                headers=request.headers,  # with the Host of the URL
                stream=request.stream,
                extensions={**request.extensions, "sni_hostname": host},
            )
            try:
                async with asyncio.timeout_at(ends_at):
                    response = await super().handle_async_request(moved)
            except TimeoutError:
                if posted:
                    return httpx2.Response(504)  # to nobody
                raise httpx2.ReadTimeout("the stream was not opened in time") from None
            link.answered(response.status_code)
            if response.headers.get("content-encoding", "identity").lower() != "identity":
                await response.aclose()
                raise httpx2.ReadError("a Content-Encoding that was not requested")
            events = response.headers.get("content-type", "").startswith("text/event-stream")
            if not events and ends_at is None:
                ends_at = loop.time() + link.timeout_sec
            response.stream = _Body(response.stream, events=events, posted=posted, ends_at=ends_at)
            return response

    return _ToAddress(verify=tls if tls is not None else False, trust_env=False)


def _text_of(content: list[Any], structured: Any) -> str:
    """Return a tool's result as text for the model: its texts, or else its structured content.

    Parts of other types are named, such as "[image/png: not shown]".
    """
    parts = []
    for one in content:
        match one.type:
            case "text":
                parts.append(one.text)
            case "resource" if getattr(one.resource, "text", None) is not None:
                parts.append(one.resource.text)
            case kind:
                parts.append(f"[{getattr(one, 'mime_type', None) or kind}: not shown]")
    if not parts and structured is not None:
        return msgspec.json.encode(structured).decode()
    return "\n".join(parts)


# ToolServers: the MCP servers of one session, what the model is offered of them, and the calls that it makes.
#
# **Tools.** The client's ``tools`` are split: functions stay in the configuration, entries of MCP servers come here. A
# task lists the tools of each server; then they are in the configuration as functions, under names that no other tool
# has. So a request that opens before that does not have them.
#
# **Calls.** When an answer has ended with calls of such functions, a task makes each call that needs no approval. The
# owner of the session, a ``CallKeeper``, is told of each result, and gives it to the model as the result of a tool.
#
# **Credentials** are in the McpServer of the open connection and nowhere else: neither in the configuration nor in a
# saved session. A session that another server goes on with has no MCP servers until its client names them again.


#: The most calls that the server makes in one turn of the user; further ones fail immediately.
MAX_CALLS: Final = 8
#: Rounds of further calls in one turn that the model is told have failed; those of later rounds are dropped.
MAX_REFUSED_ROUNDS: Final = 2
#: Calls that may wait for approval; older ones are forgotten.
MAX_ASKED: Final = 64
#: Names that are known after the tools have changed, for answers that are still being made.
_MAX_NAMES: Final = 1024

TOO_MANY: Final = f"at most {MAX_CALLS} calls may be made in one turn: answer without further calls"


@dataclass(slots=True, eq=False)
class ToolServer:
    """One MCP server of a session. ``tools`` is empty until they have been listed."""

    settings: McpServer
    link: McpLink
    #: Whether its tools are still to be listed.
    pending: bool = True
    tools: list[McpTool] = field(default_factory=list)
    failure: McpFailure | None = None
    listing: asyncio.Task[None] | None = None

    @property
    def label(self) -> str:
        return self.settings.server_label

    def list_by(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work``, which lists the tools, as a task."""
        self.pending, self.failure = True, None
        self.listing = asyncio.create_task(work, name=f"tools of {self.label}")

    def know(self, tools: Sequence[McpTool] = (), *, failure: McpFailure | None = None) -> None:
        """Note the listed tools, or why they could not be listed."""
        self.pending, self.tools, self.failure = False, list(tools), failure

    def configured(self, settings: McpServer) -> None:
        """Replace the settings, by others with the same URL and credentials."""
        self.settings = settings

    def allows(self, tool: McpTool) -> bool:
        """Return whether the model may call a tool."""
        return self.settings.allows(tool.name, reads_only=tool.reads_only)

    def allowed(self) -> list[McpTool]:
        """Return the tools that the model may call."""
        return [one for one in self.tools if self.allows(one)]

    def close(self) -> None:
        """Stop the listing of tools, and close the connection to the MCP server."""
        if self.listing is not None:
            self.listing.cancel()
        self.link.close()


@dataclass(slots=True, eq=False)
class McpCall:
    """A call of an MCP tool that this server makes. ``output`` and ``failure`` are None until the call has ended."""

    call_id: str
    request_id: str
    label: str
    tool: str
    arguments: str
    output: str | None = None
    failure: McpFailure | None = None
    #: Whether the result is no longer wanted: then the model is not told it.
    dropped: bool = False

    @property
    def result(self) -> str:
        """The result as the model sees it; a failure is a JSON object with its message as ``error``."""
        if self.failure is not None:
            return msgspec.json.encode({"error": self.failure.message}).decode()
        return self.output or ""

    def ended(self, output: str | None, failure: McpFailure | None = None) -> None:
        """Note the end of the call, with its output or its failure."""
        self.output, self.failure = output, failure

    def drop(self) -> None:
        """End the call without a result, as the result is no longer wanted."""
        self.dropped = True
        self.ended(None, McpFailure("tool_execution_error", "the call was cancelled"))


class CallKeeper(Protocol):
    """Receives the news of MCP servers and calls: tells the client of them, and gives results to the model."""

    def listing(self, server: ToolServer) -> None:
        """Note that the listing of a server's tools has begun or ended."""

    def begun(self, call: McpCall) -> None:
        """Note that a call has begun."""

    def over(self, request_id: str, calls: Sequence[McpCall]) -> None:
        """Receive all results of one answer's calls, in order, once the last has ended; dropped calls are left out."""

    def one_over(self, call: McpCall) -> None:
        """Note that one call has ended."""


@dataclass(frozen=True, slots=True)
class ToolChange:
    """A checked change of ``tools``: the tools for the configuration, the client's functions, and the MCP servers.

    ``names`` has the tools of MCP servers by the names under which they are offered.
    """

    tools: list[Any]
    functions: list[Any]
    servers: list[McpServer]
    names: Mapping[str, tuple[ToolServer, McpTool]]


class ToolServers:
    """The MCP servers of one session.

    ``apply`` is called with new tools for the configuration of the session. It raises an InvalidRequest, or
    EngineOverloaded.
    """

    def __init__(self, reach: McpReach, *, apply: Callable[[list[Any]], object]) -> None:
        self._reach = reach
        self._keeper: CallKeeper | None = None
        #: Whether the client can approve calls; if not, ``require_approval`` has to be "never".
        self._approvals = False
        self._apply = apply
        self._servers: dict[str, ToolServer] = {}
        self._functions: list[Any] = []
        self._names: dict[str, tuple[ToolServer, McpTool]] = {}
        #: By request id, the calls of an answer, until all of them have ended.
        self._open: dict[str, list[McpCall]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        #: Calls that wait for approval, by call id.
        self._asked: dict[str, McpCall] = {}
        self._calls_in_turn = 0
        self._refused_rounds = 0
        self._closed = False

    def __bool__(self) -> bool:
        return bool(self._servers)

    def keep_with(self, keeper: CallKeeper, *, approvals: bool = False) -> None:
        """Tell ``keeper`` of servers and calls from now on. ``approvals``: its client can approve calls.

        Without ``approvals``, ``change`` refuses servers whose calls need approval.
        """
        self._keeper, self._approvals = keeper, approvals

    # tools

    @property
    def servers(self) -> Iterable[ToolServer]:
        """The servers, in the client's order."""
        return self._servers.values()

    def change(self, tools: Any) -> ToolChange | None:
        """Check new ``tools`` of the client. Returns the change for ``commit``; None if it does not concern MCP.

        Raises an InvalidRequest that names the field.
        """
        given = tools if isinstance(tools, list) else []
        if not self._servers and not any(map(is_mcp, given)):
            return None
        functions = [one for one in given if not is_mcp(one)]
        places = (f"tools[{index}]" for index, one in enumerate(given) if is_mcp(one))
        wanted: dict[str, McpServer] = {}
        kept: list[ToolServer] = []
        for place, server in zip(places, read_servers(given, known=self._servers), strict=True):
            wanted[server.server_label] = server
            if (known := self._kept(server)) is None:
                self._reach.check(server, f"{place}.server_url")
            else:
                kept.append(known)
                wanted[server.server_label] = _completed(server, known.settings)
            if not self._approvals and server.require_approval != "never":
                raise UnsupportedParameter(
                    "calls cannot be approved here: require_approval has to be never", param=f"{place}.require_approval"
                )
        names = self._named(functions, kept, wanted)
        tools = [*functions, *map(_function, names, names.values())]
        return ToolChange(tools, functions, [*wanted.values()], names)

    def _kept(self, wanted: McpServer) -> ToolServer | None:
        """Return the server that has the label of ``wanted``; None if its URL or credentials are different."""
        known = self._servers.get(wanted.server_label)
        if known is None:
            return None
        url = known.settings.server_url or ""
        same = wanted.server_url in (None, url, without_credentials({"server_url": url})["server_url"])
        return known if same and wanted.request_headers in ({}, known.settings.request_headers) else None

    def commit(self, change: ToolChange) -> None:
        """Apply a change: list the tools of servers that are new or could not be listed, and close those left out.

        The caller puts ``change.tools`` into the configuration. As listings end, ``apply`` is called with more.
        """
        kept = [self._kept(settings) for settings in change.servers]
        gone = [server for server in self._servers.values() if server not in kept]
        self._functions, self._servers = change.functions, {}
        for settings, known in zip(change.servers, kept, strict=True):
            server = known or ToolServer(settings, McpLink(settings, self._reach))
            server.configured(settings)
            self._servers[server.label] = server
        for server in gone:
            server.close()
        self._remember(change.names)
        for server in self._servers.values():
            if server.listing is None or server.failure is not None:  # the server may be back
                server.list_by(self._list(server))

    def _named(
        self,
        functions: Sequence[Any],
        servers: Iterable[ToolServer],
        settings: Mapping[str, McpServer] | None = None,
    ) -> dict[str, tuple[ToolServer, McpTool]]:
        """Return the tools of ``servers`` by the names under which they are offered."""
        taken = {_name_of(one) for one in functions}
        names: dict[str, tuple[ToolServer, McpTool]] = {}
        for server in servers:
            rules = server.settings if settings is None else settings[server.label]
            for tool in server.tools:
                if rules.allows(tool.name, reads_only=tool.reads_only):
                    name = offered_name(server.label, tool.name, taken)
                    taken.add(name)
                    names[name] = server, tool
        return names

    def _remember(self, names: Mapping[str, tuple[ToolServer, McpTool]]) -> None:
        for function in self._functions:
            self._names.pop(_name_of(function), None)
        self._names |= names
        keep_newest(self._names, _MAX_NAMES)

    async def _list(self, server: ToolServer) -> None:
        self._tell_listing(server)
        try:
            tools = await server.link.tools()
            await run_work(Work.BODIES, _check_tools, tools)  # up to some megabytes of schemas
            server.know(tools)
            self._offer()
        except McpFailure as failure:
            server.know(failure=failure)
        except OmniError as error:
            server.know(failure=McpFailure("protocol_error", error.message))
        self._tell_listing(server)

    def _offer(self) -> None:
        """Apply the client's functions and the listed tools of all servers to the configuration.

        Raises what ``apply`` raises.
        """
        names = self._named(self._functions, self._servers.values())
        if len(self._functions) + len(names) > MAX_TOOLS:
            raise InvalidValue(f"there are more than {MAX_TOOLS} tools with those of MCP servers")
        self._apply([*self._functions, *map(_function, names, names.values())])
        self._remember(names)

    def _tell_listing(self, server: ToolServer) -> None:
        if self._keeper is not None and not self._closed and self._servers.get(server.label) is server:
            self._keeper.listing(server)

    async def listed(self) -> None:
        """Wait until the tools of all servers are listed. Raises InvalidValue if a listing failed."""
        for server in [*self._servers.values()]:
            if server.listing is not None:
                await asyncio.wait([server.listing])
            if server.failure is not None:
                why = f"the tools of the MCP server {server.label!r} are not known: {server.failure.message}"
                raise InvalidValue(why, param="tools")

    def expanded(self, tools: Any) -> Any:
        """Return the ``tools`` of one response, with each MCP server, named by its label, replaced by its tools.

        Raises UnsupportedParameter for a server that the session does not have.
        """
        if not isinstance(tools, list) or not any(map(is_mcp, tools)):
            return tools
        found: list[Any] = []
        for index, one in enumerate(tools):
            if not is_mcp(one):
                found.append(one)
                continue
            label = one.get("server_label")
            known = isinstance(label, str) and label in self._servers
            if not known or one.keys() - {"type", "server_label"}:
                raise UnsupportedParameter(
                    "an MCP server of one response has to be a server_label of the session, and nothing else",
                    param=f"tools[{index}]",
                )
            found += [
                _function(name, (server, tool))
                for name, (server, tool) in self._names.items()
                if server is self._servers[label] and server.allows(tool)
            ]
        return found

    def without(self, tools: Sequence[Any]) -> list[Any]:
        """Return the tools of a configuration except those of MCP servers."""
        return [one for one in tools if _name_of(one) not in self._names]

    def shown(self) -> list[dict[str, Any]]:
        """Return the servers as the client sees them: without credentials."""
        return [without_credentials(msgspec.to_builtins(one.settings)) for one in self._servers.values()]

    # calls

    def find(self, name: str | None) -> tuple[ToolServer, McpTool] | None:
        """Return the server and the tool that are, or lately were, offered as ``name``; None for other functions."""
        return self._names.get(name or "")

    def asks(self, name: str) -> bool:
        """Return whether a call of the tool that is offered as ``name`` has to be approved."""
        server, tool = self._names[name]
        return server.settings.asks(tool.name, reads_only=tool.reads_only)

    def new_turn(self) -> None:
        """Note that the user has asked something: the limit on calls starts over."""
        self._calls_in_turn = self._refused_rounds = 0

    def make(self, request_id: str, calls: Sequence[ToolCall]) -> None:
        """Begin those calls of an ended answer that are calls of MCP tools; calls that need approval wait for it.

        Beyond MAX_CALLS in one turn, calls fail immediately; after MAX_REFUSED_ROUNDS such answers, they are dropped.
        """
        ours = [(call, *offered) for call in calls if (offered := self.find(call.name)) is not None]
        if not ours or self._closed:
            return
        if self._calls_in_turn >= MAX_CALLS:
            self._refused_rounds += 1
            if self._refused_rounds > MAX_REFUSED_ROUNDS:
                return
        found: list[McpCall] = []
        for call, server, tool in ours:
            made = McpCall(call.id, request_id, server.label, tool.name, call.arguments)
            if self.asks(call.name):
                self._asked[call.id] = made
                continue
            found.append(made)
        keep_newest(self._asked, MAX_ASKED)
        if found:
            self._begin(found)

    def approve(self, call_id: str, *, approved: bool, reason: str | None) -> McpCall:
        """Begin a call that waited for approval or, if it is not approved, tell the model so.

        Raises KeyError if no such call waits.
        """
        call = self._asked.pop(call_id)
        why = f": {reason}" if reason else ""
        denied = None if approved else McpFailure("tool_execution_error", f"the user did not approve the call{why}")
        self._begin([call], failure=denied)
        return call

    def _begin(self, calls: list[McpCall], *, failure: McpFailure | None = None) -> None:
        self._open.setdefault(calls[0].request_id, []).extend(calls)
        for call in calls:
            self._calls_in_turn += failure is None
            refusal = failure
            if self._calls_in_turn > MAX_CALLS:
                refusal = McpFailure("tool_execution_error", TOO_MANY)
            if self._keeper is not None and failure is None:
                self._keeper.begun(call)
            work = self._call(call, refusal)
            self._tasks[call.call_id] = asyncio.create_task(work, name=f"call of {call.label}")

    async def _call(self, call: McpCall, refusal: McpFailure | None) -> None:
        try:
            if refusal is not None:
                raise refusal
            server = self._servers.get(call.label)
            if server is None:
                raise McpFailure("protocol_error", "the session has no such MCP server any more")
            call.ended(await server.link.call(call.tool, _arguments(call.arguments)))
        except McpFailure as failure:
            call.ended(None, failure)
        try:
            self._ended(call)
        except Exception as error:
            unexpected(error, where="the end of a call of an MCP tool")

    def _ended(self, call: McpCall) -> None:
        self._tasks.pop(call.call_id, None)
        calls = self._open.get(call.request_id, [])
        if self._keeper is None or self._closed or call not in calls:
            return
        self._keeper.one_over(call)
        if all(one.output is not None or one.failure is not None for one in calls):
            del self._open[call.request_id]
            self._keeper.over(call.request_id, [one for one in calls if not one.dropped])

    def working(self, request_id: str) -> bool:
        """Return whether calls of the answer to this request are still in progress."""
        return request_id in self._open

    def has(self, call_id: str) -> bool:
        """Return whether a call is in progress or waits for approval here: then clients may not send its result."""
        return call_id in self._tasks or call_id in self._asked

    def drop(self, call_ids: Iterable[str]) -> None:
        """Cancel calls, also those that wait for approval: the model gets no results of them."""
        for call_id in call_ids:
            self._asked.pop(call_id, None)
            task = self._tasks.get(call_id)
            call = next((one for calls in self._open.values() for one in calls if one.call_id == call_id), None)
            if task is None or call is None:
                continue
            task.cancel()
            call.drop()
            self._ended(call)

    def close(self) -> None:
        """End all connections and calls. Idempotent."""
        self._closed, self._keeper = True, None
        for task in self._tasks.values():
            task.cancel()
        for server in self._servers.values():
            server.close()
        for held in (self._servers, self._names, self._open, self._tasks, self._asked):
            held.clear()


def _completed(wanted: McpServer, known: McpServer) -> McpServer:
    """Return ``wanted`` with the URL and the credentials of ``known``, which the client need not repeat."""
    kept = {name: getattr(known, name) for name in ("server_url", "authorization", "headers")}
    return msgspec.structs.replace(wanted, **kept)


def _name_of(tool: Any) -> str:
    """Return the name of a function in the form of the chat API; "" for an invalid tool, which is refused later."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else ""


def _function(name: str, offered: tuple[ToolServer, McpTool]) -> dict[str, Any]:
    """Return a tool as a function in the form of the chat API."""
    server, tool = offered
    about = server.settings.server_description
    text = tool.description if about is None else f"{tool.description}\n({about})".strip()
    return {"type": "function", "function": {"name": name, "description": text, "parameters": dict(tool.schema)}}


def _check_tools(tools: Iterable[McpTool]) -> None:
    """Raise McpFailure if one of the tools cannot be offered."""
    for tool in tools:
        try:
            check_depth(tool.schema, "")
        except InvalidValue as error:
            raise McpFailure("protocol_error", f"the schema of a tool is {error.message}") from None
        if not tool.name or len(tool.name) > 256 or len(tool.description) > 1 << 16:
            raise McpFailure("protocol_error", "a tool has an invalid name or too long a description")


def _arguments(text: str) -> dict[str, Any]:
    """Parse the arguments that the model has written. Raises McpFailure."""
    try:
        check_values(text or "{}")
        found = msgspec.json.decode(text or "{}")
    except (InvalidFrame, msgspec.DecodeError, UnicodeError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise McpFailure("tool_execution_error", "the arguments are no JSON object")
    return found

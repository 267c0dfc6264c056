"""McpLink: the connection to one MCP server, over streamable HTTP or server-sent events, by the package ``mcp``.

The rules are those for media by URL (``transport.http.media_fetch``), as a client names the server: the operator has
to list its host (``realtime.mcp_servers``), the host is resolved once for a connection, which goes to that very
address, the address is public or listed itself, redirects are not followed, and neither proxies nor credentials of the
environment are used. What a server sends is bounded: the bytes of a response, and each event.
"""

from __future__ import annotations

import asyncio
import importlib.util
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import urlsplit

import msgspec

from omni_ws.config.model import DEFAULT_PORTS, MediaDomains, RealtimeConfig
from omni_ws.core.json_values import check_values
from omni_ws.core.quota import TokenBucket
from omni_ws.engine.threads import Work, run_work
from omni_ws.errors import InvalidFrame, InvalidValue, UnsupportedParameter
from omni_ws.installing import install_command
from omni_ws.wire.mcp_servers import McpServer
from omni_ws.wire.openai_fields import MAX_TOOLS

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
#: What ends an event of a stream.
_EVENT_ENDS: Final = (b"\n\n", b"\r\n\r\n", b"\r\r")
#: Longer JSON is examined in a thread.
_INLINE_BYTES: Final = 64 * 1024


def _end_of_events(data: bytearray, start: int) -> int:
    """Return the end of the last whole event in ``data``, of which none ends before ``start``; 0 if there is none."""
    return max((at + len(end) for end in _EVENT_ENDS if (at := data.rfind(end, start)) >= 0), default=0)


async def _check(data: bytes) -> None:
    """Raise InvalidFrame for JSON of more values than are parsed on the loop, as the package does."""
    if len(data) <= _INLINE_BYTES:
        check_values(data)
    else:
        await run_work(Work.BODIES, check_values, data)


class BoundedBody:
    """The body of a response. Without ``ends_at``, a stream of events that may be open as long as the session.

    The one to a POST (``posted``) ends at ``ends_at``, by the clock of the loop, when nobody waits for it any more: to
    raise an error then would end the connection, and with it other calls. Raises errors of httpx2.
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
    """A tool of a server. ``schema`` is the JSON Schema of its arguments."""

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
    """A failed listing or call. ``kind`` is OpenAI's: protocol_error, tool_execution_error or http_error."""

    def __init__(self, kind: str, message: str, *, code: int | None = None) -> None:
        super().__init__(message)
        self.kind, self.message, self.code = kind, message, code

    def shown(self) -> dict[str, Any]:
        """Return the error as clients see it."""
        code = {} if self.kind == "tool_execution_error" else {"code": self.code or 0}
        return {"type": self.kind, **code, "message": self.message}


class McpReach:
    """What this server may reach of MCP servers, and how long it waits for them."""

    def __init__(self, config: RealtimeConfig) -> None:
        self.timeout_sec = config.mcp_timeout_sec
        self._domains = MediaDomains(config.mcp_servers)
        self._tls: ssl.SSLContext | None = None

    def check(self, server: McpServer, place: str = "tools") -> None:
        """Raise UnsupportedParameter if a server may not be reached, and InvalidValue for a malformed URL."""
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
        """Return the context of https connections."""
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls


class McpLink:
    """The connection to one server, which is opened when it is first used, and again after a failure.

    A task of its own holds it, until ``close``.
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
        """Call a tool, and return its result as text. Raises McpFailure, also for a result that is an error."""

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
        """Close the connection, and give up what waits for it. Idempotent."""
        if self._task is not None:
            self._task.cancel()
        self._task = self._ready = None

    async def _guarded(self, work: Callable[[], Awaitable[_Result]]) -> _Result:
        """Do ``work`` in the time allowed, and translate its errors; only an error of the tool leaves it connected."""
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
        """Raise McpFailure if the server has answered with a status that is no success."""
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
        """Open the connection, tell ``ready``, and hold it until this task is cancelled."""
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
        """Note the status of a response."""
        self._status = None if status < 300 else status


def _fail(ready: asyncio.Future[Any], error: Exception) -> None:
    if not ready.done():
        ready.set_exception(error)
        ready.exception()  # nobody may wait any more


def _plain_session(*streams: Any) -> ClientSession:
    """Return a session that takes results as they are.

    The package checks structured results by the server's own schema, whose patterns can hold the loop up for hours.
    """
    from mcp import ClientSession

    class _Plain(ClientSession):
        async def validate_tool_result(self, name: str, result: Any) -> None:
            pass

    return _Plain(*streams)


def _transport(link: McpLink, host: str, address: str, tls: ssl.SSLContext | None) -> httpx2.AsyncBaseTransport:
    """Return a transport that sends every request for ``host`` to ``address``, and bounds the responses.

    The response to a POST ends when nobody waits for it any more. To raise an error then would end the connection, and
    with it other calls.
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
    """Return a result as the text for the model: its texts, else its structured content; other parts are named."""
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

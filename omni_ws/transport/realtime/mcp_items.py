"""MCP in the Realtime API: the events and items of servers, calls and approvals, and the answers to results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from omni_ws.core.ledger import Ledger
from omni_ws.core.quota import keep_newest
from omni_ws.errors import OmniError
from omni_ws.service.conversation.server_results import result_chunk
from omni_ws.service.failure import new_id
from omni_ws.service.mcp.servers import CallKeeper, McpCall, ToolServer, ToolServers
from omni_ws.transport.realtime.items import ConversationItems, Event, RealtimeResponse
from omni_ws.wire.mcp_servers import is_mcp, without_credentials
from omni_ws.wire.realtime_events import Id, Item, RealtimeRefusal, error_event, item_event, read
from omni_ws.wire.realtime_session import SessionFields

#: Calls whose items are known.
_MAX_CALLS: Final = 256


class _ApprovalFields(Struct, frozen=True, kw_only=True):
    """An item of the kind ``mcp_approval_response``."""

    approval_request_id: Id
    approve: bool
    reason: str | None = None


class McpItems(CallKeeper):
    """The CallKeeper of a Realtime session.

    A response with calls that are being made is *held*: it is done when the calls are, or another response begins.
    Then the results wait as pending items, and ``answer`` makes a response to them as soon as ``may_answer``.
    """

    def __init__(
        self,
        mcp: ToolServers | None,
        items: ConversationItems,
        ledger: Ledger,
        *,
        send: Callable[[Iterable[Event]], None],
        may_answer: Callable[[], bool],
        answer: Callable[[], None],
        forget: Callable[[str], object],
    ) -> None:
        """``forget`` is called with the request id of a response that was held and is done."""
        self._mcp = mcp
        self._items = items
        self._ledger = ledger
        self._send = send
        self._may_answer = may_answer
        self._answer = answer
        self._forget = forget
        #: The item of each server's tools that are being listed, by label.
        self._listings: dict[str, str] = {}
        #: The item of each call, or of the refusal of a call.
        self._calls: dict[str, Item] = {}
        #: The responses that are held, by request id, and those that were, whose calls go on.
        self._held: dict[str, RealtimeResponse] = {}
        self._earlier: dict[str, RealtimeResponse] = {}
        #: Calls that were over before the end of their response was rendered, by request id.
        self._early: dict[str, list[McpCall]] = {}
        #: Results that no response has answered, by call id.
        self._unanswered: dict[str, Item] = {}
        if mcp is not None:
            mcp.keep_with(self, approvals=True)

    # the session

    def shown(self, session: dict[str, Any]) -> dict[str, Any]:
        """Return the session object with the servers in place of their tools."""
        if not self._mcp or "tools" not in session:
            return session
        own = [one for one in session["tools"] if self._mcp.find(one.get("name")) is None]
        return {**session, "tools": [*own, *self._mcp.shown()]}

    @staticmethod
    def kept(session: SessionFields) -> SessionFields:
        """Return the session as it may be kept: without the credentials of servers."""
        if not session.tools or not any(map(is_mcp, session.tools)):
            return session
        tools = [without_credentials(one) if is_mcp(one) else one for one in session.tools]
        return msgspec.structs.replace(session, tools=tools)

    def listing(self, server: ToolServer) -> None:
        item_id = self._listings.setdefault(server.label, new_id("mcpl_"))
        if server.pending:
            self._send([{"type": "mcp_list_tools.in_progress", "item_id": item_id}])
            return
        del self._listings[server.label]
        if server.failure is not None:
            error = server.failure.shown()  # an extension
            self._send([{"type": "mcp_list_tools.failed", "item_id": item_id, "error": error}])
            return
        tools = [
            {
                "name": tool.name,
                "description": tool.description or None,
                "input_schema": dict(tool.schema),
                "annotations": tool.annotations,
            }
            for tool in server.allowed()
        ]
        item = Item(item_id=item_id, kind="mcp_list_tools", extra={"server_label": server.label, "tools": tools})
        try:
            events = [*self._added(item)]
        except OmniError as error:  # there is no room for the item; the tools themselves are in effect
            events = [error_event(error)]
        self._send([*events, {"type": "mcp_list_tools.completed", "item_id": item_id}])

    def _added(self, item: Item) -> Iterator[Event]:
        previous = self._items.add(item)
        yield item_event("added", item, previous=previous)
        yield item_event("done", item, previous=previous)

    # calls

    def item_of(self, request_id: str, call_id: str, name: str) -> Item | None:
        """Return the item for a call of the model's: of an MCP tool, or of the approval that it needs; else None."""
        if self._mcp is None or (found := self._mcp.find(name)) is None:
            return None
        server, tool = found
        asks = self._mcp.asks(name)
        item = Item(
            item_id=new_id("mcpr_" if asks else "mcp_"),
            kind="mcp_approval_request" if asks else "mcp_call",
            call_id=call_id,
            request_id=request_id,
            extra={"server_label": server.label, "name": tool.name, "arguments": ""},
        )
        if not asks:
            self._know(call_id, item)
        return item

    def _know(self, call_id: str, item: Item) -> None:
        self._calls[call_id] = item
        keep_newest(self._calls, _MAX_CALLS)

    def hold(self, response: RealtimeResponse) -> Iterator[Event]:
        """Hold a response of which the end was rendered but for its calls, unless they are over."""
        self._held[response.request_id] = response
        for call in self._early.pop(response.request_id, ()):
            yield from self._over(call)
        if self._mcp is None or not self._mcp.working(response.request_id):
            yield from self._release(response)

    def release(self) -> Iterator[Event]:
        """End all responses that are held, as another one begins. Their calls go on."""
        for response in [*self._held.values()]:
            yield from self._release(response)

    def _release(self, response: RealtimeResponse) -> Iterator[Event]:
        del self._held[response.request_id]
        if self._mcp is not None and self._mcp.working(response.request_id):
            self._earlier[response.request_id] = response
        self._forget(response.request_id)
        yield from response.done()

    def cancel(self, response: RealtimeResponse) -> None:
        """Give up the calls of a held response, which ends as cancelled."""
        if self._mcp is not None and response.request_id in self._held:
            self._mcp.drop([item.call_id for item in response.items if item.kind == "mcp_call"])

    def begun(self, call: McpCall) -> None:
        pass  # the end of the response tells it

    def one_over(self, call: McpCall) -> None:
        if call.call_id not in self._calls:
            return
        owner = self._held.get(call.request_id) or self._earlier.get(call.request_id)
        if owner is None and "approval_request_id" not in self._calls[call.call_id].extra:
            self._early.setdefault(call.request_id, []).append(call)
            return
        self._send(self._over(call))

    def _over(self, call: McpCall) -> Iterator[Event]:
        """Render the end of a call, in the response that has it, or after its approval."""
        item = self._calls[call.call_id]
        if item.kind != "mcp_call":  # a call that was not approved
            return
        error = None if call.failure is None else call.failure.shown()
        item.extra.update(output=call.output, error=error)
        self._items.have_grown([item])
        kind: Literal["completed", "failed"] = "completed" if error is None else "failed"
        response = self._held.get(call.request_id) or self._earlier.get(call.request_id)
        if response is None or item not in response.items:
            yield {"type": f"response.mcp_call.{kind}", "item_id": item.item_id, "output_index": 0}
            yield item_event("done", item, previous=None)
        else:
            yield from response.call_over(item, kind)

    def over(self, request_id: str, calls: Sequence[McpCall]) -> None:
        for call in calls:
            item = self._calls.get(call.call_id)
            if item is not None and self._items.get(item.item_id) is not None:
                self._items.told(item, result_chunk(call))
                self._unanswered[call.call_id] = item
        if (response := self._held.get(request_id)) is not None:
            self._send(self._release(response))
        self._earlier.pop(request_id, None)
        self.flush()

    def flush(self) -> None:
        """Answer the results that wait, if nothing else is being answered, and no function of the client is awaited."""
        for call_id, item in [*self._unanswered.items()]:
            if not item.chunks:  # a response has it
                del self._unanswered[call_id]
        ready = [one for one in self._unanswered if all(map(self._ledger.knows_result, self._ledger.calls_beside(one)))]
        if not ready or not self._may_answer():
            return
        self._unanswered.clear()
        try:
            self._answer()
        except OmniError as error:
            self._send([error_event(error)])

    def approve(self, item_id: str, fields: Mapping[str, Any]) -> None:
        """Take a client's item that approves a call, or does not. Raises an InvalidRequest."""
        given = read(fields, _ApprovalFields, "item")
        asked = self._items.get(given.approval_request_id)
        if (
            asked is None
            or self._mcp is None
            or not self._mcp.has(asked.call_id)
            or asked.kind != "mcp_approval_request"
        ):
            raise RealtimeRefusal(
                "item_create_invalid_approval_request_id",
                "no call waits for approval under this id",
                param="item.approval_request_id",
            )
        extra = {"approval_request_id": asked.item_id, "approve": given.approve, "reason": given.reason}
        answer = Item(item_id=item_id, kind="mcp_approval_response", call_id=asked.call_id, extra=extra)
        self._send(self._added(answer))
        if given.approve:
            call = {**asked.extra, "approval_request_id": asked.item_id}
            answer = Item(item_id=new_id("mcp_"), kind="mcp_call", call_id=asked.call_id, extra=call)
            previous = self._items.add(answer)
            begun = {"type": "response.mcp_call.in_progress", "item_id": answer.item_id, "output_index": 0}
            self._send([item_event("added", answer, previous=previous), begun])
        self._know(asked.call_id, answer)
        self._mcp.approve(asked.call_id, approved=given.approve, reason=given.reason)

    def close(self) -> None:
        """Refund what held responses have charged."""
        for response in (*self._held.values(), *self._earlier.values()):
            response.close()

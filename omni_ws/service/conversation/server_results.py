"""Gives the results of MCP tools, which the server itself calls, to the model of a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from omni_ws.core.chunks import InputChunk, Modality
from omni_ws.core.history import Message
from omni_ws.errors import InvalidValue
from omni_ws.service.mcp.servers import CallKeeper, McpCall, ToolServer

if TYPE_CHECKING:
    from omni_ws.service.conversation.conversation import Conversation


def result_chunk(call: McpCall) -> InputChunk:
    """Return the result of a call as input."""
    return InputChunk(Modality.TEXT, call.result.encode(), tool_call_id=call.call_id)


class ServerResults(CallKeeper):
    """The CallKeeper of a conversation whose client is told of calls as of those of its own functions."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation

    def listing(self, server: ToolServer) -> None:
        """Tell the client the tools that the model has now, or that they could not be listed."""
        if not server.pending and server.failure is None:
            self._conversation.followed(self._conversation.configuration.effective)
        # A single request fails by itself.
        if server.failure is not None and not self._conversation.stream.single_request:
            message = f"the tools of the MCP server {server.label!r} are not known: {server.failure.message}"
            self._conversation.outbox.put_nowait(InvalidValue(message, param="tools"))

    def begun(self, call: McpCall) -> None:
        pass  # the call itself was told

    def one_over(self, call: McpCall) -> None:
        pass  # the answer to the results of all follows

    def over(self, request_id: str, calls: Sequence[McpCall]) -> None:
        """Open a request of the results; if the answer also called functions of the client, theirs are awaited."""
        if not calls:
            return
        conversation = self._conversation
        ledger, beside = conversation.ledger, conversation.ledger.calls_beside(calls[0].call_id)
        single = conversation.stream.single_request
        if single or {call.call_id for call in calls}.issuperset(beside):
            chunks = [result_chunk(call) for call in calls]
            conversation.respond(chunks, conversation.configuration.effective, results_wait=not single)
            return
        for call in calls:
            ledger.place([Message("tool", call.result, tool_call_id=call.call_id)], item_id=call.call_id)
        ledger.weigh()
        request = conversation.receiving
        if request is not None and request.session.only_results and conversation.unasked.no_results_awaited(beside):
            conversation.finish()

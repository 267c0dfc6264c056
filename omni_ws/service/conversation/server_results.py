"""Gives the results of MCP tools, which the server itself calls, to the model of a conversation."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from omni_ws.core.chunks import InputChunk, Modality
from omni_ws.errors import InvalidValue, OmniError
from omni_ws.service.mcp.servers import CallKeeper, ListingState, McpCall, ToolServer

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
        if server.state is ListingState.LISTED:
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
        """Give the results to the model as those of the client's own functions, which are awaited if there are any."""
        conversation = self._conversation
        chunks = [result_chunk(call) for call in calls]
        if conversation.stream.single_request:
            conversation.respond(chunks, conversation.configuration.effective)
            return
        try:
            for chunk in chunks:
                conversation.receive_chunk(chunk, now=asyncio.get_running_loop().time())
        except OmniError as error:
            conversation.outbox.put_nowait(error)

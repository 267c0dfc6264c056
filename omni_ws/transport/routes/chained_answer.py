"""ChainedAnswer: makes one answer of those that end with calls of MCP tools and those to the results."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from omni_ws.core.chunks import FinalChunk, FinishReason, OutputChunk, Usage
from omni_ws.service.conversation.conversation import Conversation
from omni_ws.service.conversation.messages import ServerMessage
from omni_ws.service.mcp.servers import ToolServers


class ChainedAnswer:
    """A filter of the messages of one HTTP request: its client gets one answer, and no calls but of its functions.

    The conversation ends with the answer that is the last.
    """

    def __init__(self, conversation: Conversation, mcp: ToolServers) -> None:
        self._conversation = conversation
        self._mcp = mcp
        #: The indices that the client sees, of the calls of its functions, by request id and index.
        self._shown: dict[tuple[str, int], int] = {}
        self._usage = Usage()
        self._finals = 0

    def passes(self, message: ServerMessage) -> ServerMessage | None:
        """Return the message as the client gets it; None if it does not."""
        if isinstance(message, OutputChunk):
            return self._call(message) if message.tool_call is not None else message
        if not isinstance(message, FinalChunk):
            return message
        self._usage = _sum(self._usage, message.usage)
        self._finals += 1
        if self._mcp.working(message.request_id):
            return None
        self._conversation.close()
        own = any(request_id == message.request_id for request_id, _ in self._shown)
        called = message.finish_reason is FinishReason.TOOL_CALLS
        reason = FinishReason.STOP if called and not own else message.finish_reason
        reasons = (reason,) * len(message.finish_reasons)
        times = message.times if self._finals == 1 else {}  # of several, they are those of the last answer alone
        return replace(message, usage=self._usage, finish_reason=reason, finish_reasons=reasons, times=times)

    def _call(self, chunk: OutputChunk) -> OutputChunk | None:
        fragment = chunk.tool_call
        assert fragment is not None
        key = chunk.request_id, fragment.index
        if fragment.name is not None and self._mcp.find(fragment.name) is None:
            self._shown.setdefault(key, sum(request_id == chunk.request_id for request_id, _ in self._shown))
        if key not in self._shown:
            return None
        return msgspec.structs.replace(chunk, tool_call=replace(fragment, index=self._shown[key]))


def _sum(one: Usage, other: Usage) -> Usage:
    cached = (
        None
        if one.cached_tokens is None and other.cached_tokens is None
        else ((one.cached_tokens or 0) + (other.cached_tokens or 0))
    )
    return Usage(
        input_tokens=one.input_tokens + other.input_tokens,
        output_tokens=one.output_tokens + other.output_tokens,
        input_audio_ms=one.input_audio_ms + other.input_audio_ms,
        output_audio_ms=one.output_audio_ms + other.output_audio_ms,
        input_after_start_bytes=one.input_after_start_bytes + other.input_after_start_bytes,
        cached_tokens=cached,
    )

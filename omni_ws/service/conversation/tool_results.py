"""Which results of tools a session takes, and when the input that answers calls is complete."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from omni_ws.core.chunks import InputChunk
from omni_ws.core.input_stream import SavedInput
from omni_ws.core.ledger import Ledger
from omni_ws.core.request_input import InputState, RequestInput
from omni_ws.errors import SessionConflict
from omni_ws.service.conversation.request import Request

#: Where the input of a request is lost, and its results with it.
_LOST: Final = frozenset({InputState.CANCELLED, InputState.FAILED, InputState.EXPIRED})


class ToolResults:
    """Takes the results of one session, by what its ledger has of their calls.

    A request of nothing but results starts when its input ends, and that is at the latest when every call of the answer
    has its result. Other input that joins it makes it a request like any other.

    A result may wait for its place in the order of the input: behind a gap, or behind audio that is still being judged.
    """

    __slots__ = ("_joined", "_ledger", "_waiting")

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        #: Calls whose results were taken and wait for their place.
        self._waiting: dict[str, None] = {}
        #: Calls whose results have joined an input, as long as the ledger may not know of them.
        self._joined: dict[str, RequestInput] = {}

    def take(self, chunk: InputChunk) -> bool:
        """Take a result that has arrived. Returns False for a second one of its call.

        Raises SessionConflict where the call is not in the history of the session.
        """
        call_id = chunk.tool_call_id
        assert call_id is not None
        if not self._ledger.knows_call(call_id):
            raise SessionConflict(
                f"the tool call {call_id[:64]!r} is not in the history of this session",
                param="tool_call_id",
                sequence_id=chunk.sequence_id,
            )
        if call_id in self._waiting or self._has(call_id):
            return False
        self._waiting[call_id] = None
        return True

    def refused(self, chunk: InputChunk) -> None:
        """A result that was taken is refused after all: it may come again."""
        self._waiting.pop(chunk.tool_call_id or "", None)

    def cancelled(self) -> None:
        """What waits is dropped."""
        self._waiting.clear()

    def restore(self, requests: Iterable[Request], stream: SavedInput) -> None:
        """Go on with the results in these requests, and those that wait behind a gap."""
        for request in requests:
            for chunk in (*(request.given or ()), *request.session.saved().buffered):
                if chunk.tool_call_id is not None:
                    self._joined[chunk.tool_call_id] = request.session
        waiting = (chunk.tool_call_id for _, chunk in stream.waiting if chunk is not None)
        self._waiting = dict.fromkeys(one for one in waiting if one is not None)

    def complete(self, chunk: InputChunk, request_input: RequestInput) -> bool:
        """A result has joined this input. Returns whether that is all that the input waits for."""
        call_id = chunk.tool_call_id
        assert call_id is not None
        self._waiting.pop(call_id, None)
        for known in [one for one in self._joined if self._ledger.knows_result(one)]:
            del self._joined[known]
        self._joined[call_id] = request_input
        return request_input.only_results and all(map(self._has, self._ledger.calls_beside(call_id)))

    def _has(self, call_id: str) -> bool:
        joined = self._joined.get(call_id)
        return self._ledger.knows_result(call_id) or (joined is not None and joined.state not in _LOST)

"""Tool results: which ones a session accepts, and when an input has the results of all calls of an answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from omni_ws.core.chunks import InputChunk, ToolCall
from omni_ws.core.input_stream import SavedInput
from omni_ws.core.ledger import Ledger
from omni_ws.core.request_input import InputState, RequestInput
from omni_ws.errors import SessionConflict
from omni_ws.service.conversation.request import Request

#: States in which the input of a request is lost, and the tool results in it.
_LOST: Final = frozenset({InputState.CANCELLED, InputState.FAILED, InputState.EXPIRED})
#: Calls that are remembered as withdrawn.
MAX_WITHDRAWN: Final = 256


class ToolResults:
    """The tool results of one session, matched with the calls in its ledger.

    A result of a call that was ``withdrawn`` is dropped.

    A request that has nothing but tool results starts when its input ends: at the latest when every call of the answer
    has its result. If other input joins it, it is a request like any other.

    A result may wait for its place in the order of the input: behind a gap, or behind audio that is still being judged.
    """

    __slots__ = ("_joined", "_ledger", "_waiting", "_withdrawn", "reserved")

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        #: Whether the server itself makes a call, or waits for its approval: no client gives its result.
        self.reserved: Callable[[str], bool] = lambda call_id: False
        #: Calls whose results were taken and wait for their place.
        self._waiting: dict[str, None] = {}
        #: By call id, the input that the call's result has joined, until the ledger knows the result.
        self._joined: dict[str, RequestInput] = {}
        #: Calls whose results nobody wants any more.
        self._withdrawn: dict[str, None] = {}

    def take(self, chunk: InputChunk) -> bool:
        """Accept a result that has arrived. Returns False if its call has one already, or was withdrawn.

        Raises SessionConflict if the call is not in the history of the session.
        """
        call_id = chunk.tool_call_id
        assert call_id is not None
        if self.reserved(call_id):
            raise SessionConflict(
                f"the tool call {call_id[:64]!r} is made by the server",
                param="tool_call_id",
                sequence_id=chunk.sequence_id,
            )
        if not self._ledger.knows_call(call_id):
            raise SessionConflict(
                f"the tool call {call_id[:64]!r} is not in the history of this session",
                param="tool_call_id",
                sequence_id=chunk.sequence_id,
            )
        if self.done(call_id):
            return False
        self._waiting[call_id] = None
        return True

    def withdraw(self, calls: Iterable[ToolCall]) -> None:
        """Want no results of these calls any more, as their request was cancelled."""
        self._withdrawn.update(dict.fromkeys(call.id for call in calls))
        for forgotten in [*self._withdrawn][:-MAX_WITHDRAWN]:
            del self._withdrawn[forgotten]

    def done(self, call_id: str) -> bool:
        """Return whether no result of a call is awaited: it has arrived, if not at its place, or was withdrawn."""
        return call_id in self._withdrawn or call_id in self._waiting or self._has(call_id)

    def refused(self, chunk: InputChunk) -> None:
        """Forget a result that was accepted and then refused for another reason: it may be sent again."""
        self._waiting.pop(chunk.tool_call_id or "", None)

    def cancelled(self) -> None:
        """Forget the results that wait, which a cancel has dropped."""
        self._waiting.clear()

    def restore(self, requests: Iterable[Request], stream: SavedInput) -> None:
        """Take over the results in restored requests, and those that wait in ``stream`` behind a gap."""
        for request in requests:
            for chunk in (*(request.given or ()), *request.session.saved().buffered):
                if chunk.tool_call_id is not None:
                    self._joined[chunk.tool_call_id] = request.session
        waiting = (chunk.tool_call_id for _, chunk in stream.waiting if chunk is not None)
        self._waiting = dict.fromkeys(one for one in waiting if one is not None)

    def complete(self, chunk: InputChunk, request_input: RequestInput) -> bool:
        """Note that a result has joined an input. Returns whether the input is complete with it.

        That is: it has nothing but results, and every call of the same answer has one.
        """
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

"""Tool results: which of them a session accepts, and when an input has the results of all calls of an answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from omni_ws.core.chunks import InputChunk, Modality, ToolCall
from omni_ws.core.history import PLACED, Message
from omni_ws.core.input_stream import InputStream, SavedInput
from omni_ws.core.ledger import Ledger
from omni_ws.core.quota import keep_newest
from omni_ws.core.reorder import StreamEvent, TextRefused
from omni_ws.core.request_input import InputState, RequestInput
from omni_ws.errors import EngineOverloaded, InvalidValue, OmniError, SessionConflict
from omni_ws.service import new_id
from omni_ws.service.conversation.request import Request
from omni_ws.service.mcp import (
    CallKeeper,
    McpCall,
    ToolServer,
)

if TYPE_CHECKING:
    from omni_ws.service.conversation.conversation import Conversation


#: States in which the input of a request is lost, and the tool results in it.
_LOST: Final = frozenset({InputState.CANCELLED, InputState.FAILED, InputState.EXPIRED})
#: Calls that are remembered of each kind: those that were withdrawn, those of async tools that work, and so on.
MAX_CALLS: Final = 256


class ToolResults:
    """The tool results of one session, matched with the calls in its ledger.

    A result of a call that was ``withdrawn`` is dropped. ``reserved`` returns whether the server itself makes a call,
    or waits for its approval: clients may not send the result of such a call.

    A request that has only tool results starts when its input ends, at the latest when every call of the answer has its
    result. If other input joins it, it is a request like any other.

    A result may wait for its place in the order of the input: behind a gap, or behind audio that is still being judged.
    """

    __slots__ = (
        "_early",
        "_is_async",
        "_joined",
        "_ledger",
        "_reserved",
        "_tell",
        "_waiting",
        "_withdrawn",
        "_working",
    )

    def __init__(self, ledger: Ledger, *, reserved: Callable[[str], bool]) -> None:
        self._ledger = ledger
        self._reserved = reserved
        #: See ``watch``.
        self._is_async: Callable[[str], bool] = lambda call_id: False
        self._tell: Callable[[str, str, str | None], None] = lambda call_id, text, ref: None
        #: Calls of async tools that have no result yet, and calls whose result came before the end of the answer.
        self._working: dict[str, None] = {}
        self._early: dict[str, None] = {}
        #: Calls whose results were taken and wait for their place.
        self._waiting: dict[str, None] = {}
        #: By call id, the input that the call's result has joined, until the ledger knows the result.
        self._joined: dict[str, RequestInput] = {}
        #: Calls whose results nobody wants any more.
        self._withdrawn: dict[str, None] = {}

    def receive(
        self, chunk: InputChunk, stream: InputStream, *, now: float, refuse: Callable[[OmniError], None]
    ) -> Sequence[StreamEvent]:
        """Handle a result that a client has sent. Returns the events of the input stream that follow.

        If the result is not wanted, only its sequence number and its ``end_of_input`` count; if it is that of an async
        tool, only the number. ``refuse`` is called with the error of a refused result. Raises what
        ``stream.receive_chunk`` raises.
        """
        number = chunk.sequence_id
        if number is not None and number < stream.reorder.next_sequence_id:
            return stream.receive_chunk(chunk, now=now)  # a duplicate
        late = False
        try:
            late = self.take_late(chunk)
            wanted = not late and self._take(chunk)
        except (SessionConflict, EngineOverloaded, InvalidValue) as refusal:  # the first two end a session elsewhere
            refuse(refusal.about(ref=chunk.ref))
            wanted = False
        if late or (not wanted and not (chunk.end_of_input and stream.had_request)):
            return stream.refuse(number, now=now) if number is not None else ()
        taken = chunk if wanted else replace(InputChunk.end(), sequence_id=number)
        try:
            events = stream.receive_chunk(taken, now=now)
        except OmniError:
            self.refused(taken)
            raise
        if any(isinstance(event, TextRefused) for event in events):
            self.refused(taken)
        return events

    def _take(self, chunk: InputChunk) -> bool:
        """Accept a result that has arrived. Returns False if its call has a result already, or was withdrawn.

        Raises SessionConflict if the server makes the call, or the call is not in the history of the session.
        """
        call_id = chunk.tool_call_id
        assert call_id is not None
        if self._reserved(call_id):
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

    def take_late(self, chunk: InputChunk) -> bool:
        """If the result is that of an async tool, queue it as a telling, unless its call has one or was withdrawn.

        Returns False if the tool is not async. Raises EngineOverloaded; InvalidValue if the result is not UTF-8.
        """
        call_id = chunk.tool_call_id
        assert call_id is not None
        if call_id not in self._working and not self._is_async(call_id):
            return False
        if call_id in self._early or call_id in self._withdrawn:
            return True
        try:
            text = chunk.payload.decode()
        except UnicodeDecodeError:
            raise InvalidValue("a tool result must be UTF-8", sequence_id=chunk.sequence_id) from None
        self._tell(call_id, text, chunk.ref)
        if call_id in self._working:
            del self._working[call_id]
        else:
            _note(self._early, call_id)
        return True

    # calls of async tools

    def watch(self, is_async: Callable[[str], bool], tell: Callable[[str, str, str | None], None]) -> None:
        """Have ``tell`` called for each result of an async tool: with the call's id, the text and the client's ``ref``.

        ``is_async`` returns whether the call of this id is one to an async tool, in an answer that is still being made.
        ``tell`` may raise EngineOverloaded.
        """
        self._is_async, self._tell = is_async, tell

    def work(self, call_id: str) -> None:
        """Note that an answer has ended with this call of an async tool: the result is awaited from now on.

        If the result has come already, nothing is awaited.
        """
        if call_id in self._early:
            del self._early[call_id]
            return
        _note(self._working, call_id)

    def works(self, call_id: str) -> bool:
        """Return whether this call is to an async tool whose result is still awaited."""
        return call_id in self._working

    def withdrew(self, call_id: str) -> bool:
        """Return whether the result of this call is no longer wanted."""
        return call_id in self._withdrawn

    def async_calls(self) -> tuple[list[str], list[str], list[str]]:
        """Return the ids of three kinds of calls.

        Calls whose results are awaited, those whose results came before the answer ended, and withdrawn ones.
        """
        return [*self._working], [*self._early], [*self._withdrawn]

    def go_on(self, working: Iterable[str], early: Iterable[str], withdrawn: Iterable[str]) -> None:
        """Restore the three lists that ``async_calls`` returned."""
        self._working, self._early = dict.fromkeys(working), dict.fromkeys(early)
        self._withdrawn = dict.fromkeys(withdrawn)

    def withdraw(self, calls: Iterable[ToolCall]) -> None:
        """Note that results of these calls are no longer wanted, as their request was cancelled."""
        for call in calls:
            _note(self._withdrawn, call.id)

    def done(self, call_id: str) -> bool:
        """Return whether a call's result is no longer awaited: it has arrived, maybe behind a gap, or was withdrawn."""
        return call_id in self._withdrawn or call_id in self._waiting or self._has(call_id)

    def refused(self, chunk: InputChunk) -> None:
        """Forget a result that was accepted here but refused by the input stream: it may be sent again."""
        self._waiting.pop(chunk.tool_call_id or "", None)

    def cancelled(self) -> None:
        """Forget the results that wait for their place, as a cancel has dropped them."""
        self._waiting.clear()

    def failed(self, request_input: RequestInput) -> None:
        """Forget the results in the input of a request that has failed, unless it is kept: they may be sent again."""
        for call_id in [one for one, joined in self._joined.items() if joined is request_input]:
            del self._joined[call_id]

    def restore(self, requests: Iterable[Request], stream: SavedInput) -> None:
        """Take over the results in restored requests, and those that wait in ``stream`` behind a gap."""
        for request in requests:
            for chunk in (*(request.given or ()), *request.session.saved().buffered):
                if chunk.tool_call_id is not None:
                    self._joined[chunk.tool_call_id] = request.session
        waiting = (chunk.tool_call_id for _, chunk in stream.waiting if chunk is not None)
        self._waiting = dict.fromkeys(one for one in waiting if one is not None)

    def complete(self, chunk: InputChunk, request_input: RequestInput) -> bool:
        """Note that a result has joined an input. Returns whether the input is now complete.

        An input is complete if it has only results, and every call of the same answer has its result.
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


def _note(calls: dict[str, None], call_id: str) -> None:
    calls.pop(call_id, None)
    calls[call_id] = None
    keep_newest(calls, MAX_CALLS)


# Gives the results of MCP tools, which the server itself calls, to the model of a conversation.


def result_chunk(call: McpCall) -> InputChunk:
    """Return the result of an MCP call as an input chunk."""
    return InputChunk(Modality.TEXT, call.result.encode(), tool_call_id=call.call_id)


class ServerResults(CallKeeper):
    """The CallKeeper of a conversation whose client is told of MCP calls as if they were calls of its own functions."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation

    def listing(self, server: ToolServer) -> None:
        """Tell the client that the tools of an MCP server are available, or that they could not be listed."""
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
        """Open a request with the results; if the answer also called functions of the client, await their results."""
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
            ledger.place([Message("tool", call.result, tool_call_id=call.call_id)], item_id=new_id(PLACED))
        ledger.weigh()
        request = conversation.receiving
        if request is not None and request.session.only_results and conversation.unasked.no_results_awaited(beside):
            conversation.finish()

"""ToolResults: which results of tools a conversation takes, and when a request of results alone has them all."""

from __future__ import annotations

import dataclasses

from omni_ws.core.chunks import InputChunk
from omni_ws.core.ledger import Ledger
from omni_ws.core.request_input import InputSettings
from omni_ws.core.start_policy import OnEndOnly
from omni_ws.errors import SessionConflict
from omni_ws.service.conversation.request import Request


class ToolResults:
    """Takes the results of one session, by what its ledger has of their calls.

    A request of nothing but results starts when its input ends, and that is at the latest when every call of the answer
    has its result. Other input that joins it makes it a request like any other.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        #: Whether the chunk that is being taken is a result.
        self._taking = False
        #: The request that has nothing but results so far, and how its input would be processed without them.
        self._alone: tuple[Request, InputSettings] | None = None
        #: The calls of the same answer whose results it waits for; None before its first.
        self._missing: set[str] | None = None
        #: The calls whose results the open request has, which may not have started.
        self._given: dict[str, None] = {}

    def check(self, chunk: InputChunk) -> bool:
        """Whether this result is new. Raises SessionConflict where its call is not in the history of the session."""
        call_id = chunk.tool_call_id
        assert call_id is not None
        if call_id in self._given or self._ledger.knows_result(call_id):
            return False
        if not self._ledger.knows_call(call_id):
            raise SessionConflict(
                f"the tool call {call_id[:64]!r} is not in the history of this session",
                param="tool_call_id",
                sequence_id=chunk.sequence_id,
            )
        return True

    def taking(self, chunk: InputChunk, receiving: Request | None) -> None:
        """This chunk joins the request whose input is open, or opens one."""
        self._taking = chunk.tool_call_id is not None
        if chunk.tool_call_id is not None:
            self._given[chunk.tool_call_id] = None
        if self._alone is not None and (self._alone[0] is not receiving or (chunk.has_content and not self._taking)):
            request, settings = self._alone
            request.session.settings = settings
            self._alone = None

    def opening(self, settings: InputSettings) -> InputSettings:
        """How the input of a request is processed that opens now."""
        return dataclasses.replace(settings, start_policy=OnEndOnly()) if self._taking else settings

    def opened(self, request: Request, settings: InputSettings) -> bool:
        """A request has opened, whose input would be processed so. Returns whether it answers calls."""
        if self._taking:
            self._alone, self._missing = (request, settings), None
        return self._taking

    def taken(self) -> None:
        """The chunk was taken."""
        self._taking = False

    def closed(self) -> None:
        """No input is open any more."""
        self._given.clear()

    def complete(self, chunk: InputChunk, receiving: Request | None) -> bool:
        """Whether the open request, which ``chunk`` has joined, has nothing but results, and those of all calls."""
        if self._alone is None or self._alone[0] is not receiving or chunk.tool_call_id is None:
            return False
        if self._missing is None:
            calls = self._ledger.calls_beside(chunk.tool_call_id)
            self._missing = {call for call in calls if not self._ledger.knows_result(call)}
        self._missing.difference_update(self._given)
        return not self._missing

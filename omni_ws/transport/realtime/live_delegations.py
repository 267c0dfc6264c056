"""Delegations: who does the work that the voice of a Live session hands over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol

from omni_ws.core.quota import keep_newest
from omni_ws.errors import InvalidValue, UnsupportedParameter
from omni_ws.transport.realtime.items import Event
from omni_ws.wire.live_session import ClientDelegation, Delegation
from omni_ws.wire.realtime_events import RealtimeRefusal

if TYPE_CHECKING:
    from omni_ws.transport.realtime.live import LiveDialect

#: The function by which the model hands work over. The session does not wait for its result.
DELEGATE: Final = "delegate"
DELEGATE_TOOL: Final[Mapping[str, Any]] = {
    "type": "function",
    "async": True,
    "function": {
        "name": DELEGATE,
        "description": "Hands over what needs data, tools or work outside of this talk. Its result comes later.",
        "parameters": {
            "type": "object",
            "properties": {"task": {"type": "string", "description": "What is to be done, in one sentence."}},
            "required": ["task"],
        },
    },
}
#: What the model is told of it, behind the client's instructions.
DELEGATE_RULE: Final = (
    "When the user wants something that you cannot know or do in this talk, say in a few words that you look into it, "
    "and call delegate once for it. Its result is told to you later; until then go on talking, and never make it up. "
    "Do not call it for what you can answer, nor a second time for the same thing."
)
#: Delegations of a session that are remembered; to append to an earlier one is an error.
MAX_DELEGATIONS: Final = 256


class Delegations(Protocol):
    """What a kind of delegation does. Methods raise an InvalidRequest for what is refused."""

    @property
    def shown(self) -> Delegation:
        """The settings in effect, as the client sees them."""
        ...

    def opened(self, call_id: str, arguments: str) -> None:
        """Begin the work of a call that the model has made: it has handed work over."""
        ...

    def receive(self, event: Mapping[str, Any]) -> None:
        """Handle a ``response.create`` or a ``response.item.create`` of the client."""
        ...

    def update(self, given: Delegation) -> None:
        """Apply the ``delegation`` of a ``session.update``, which is of this kind."""
        ...

    def check(self, delegation_id: str) -> None:
        """Raise an InvalidRequest unless the client may append context to this delegation."""
        ...

    def close(self) -> None:
        """End all work, with the session."""
        ...


def delegation_created(call_id: str, target: str, offset_ms: int, **fields: Any) -> Event:
    """Return the event that tells that work was handed over. It has no text of the task, as at OpenAI."""
    delegation = {"id": call_id, "type": "delegation", "target": target, **fields}
    return {"type": "session.delegation.created", "offset_ms": offset_ms, "delegation": delegation}


class ClientDelegations:
    """The application does the work, and tells about it by appended context."""

    def __init__(self, dialect: LiveDialect, settings: ClientDelegation) -> None:
        self.shown: Delegation = settings
        self._dialect = dialect
        self._open: dict[str, None] = {}

    def opened(self, call_id: str, arguments: str) -> None:
        self._open[call_id] = None
        keep_newest(self._open, MAX_DELEGATIONS)
        self._dialect.send([delegation_created(call_id, "client", self._dialect.now_ms)])

    def receive(self, event: Mapping[str, Any]) -> None:
        raise UnsupportedParameter(f"{event['type']} needs delegation to responses", param="type")

    def update(self, given: Delegation) -> None:
        if not isinstance(given, ClientDelegation):
            param = "session.delegation.type"
            raise RealtimeRefusal("immutable_field_update", f"'{param}' cannot change after the start.", param=param)
        if given.acknowledgement_delay_ms is not None:
            self.shown = given

    def check(self, delegation_id: str) -> None:
        if delegation_id not in self._open:
            raise InvalidValue("Unknown client delegation.", param="delegation_id")

    def close(self) -> None:
        self._open.clear()

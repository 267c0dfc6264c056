"""RequestState: where a request stands."""

from __future__ import annotations

from enum import Enum
from typing import Final


class RequestState(Enum):
    """Where a request stands; see ``Request`` for the transitions."""

    #: Collects input; its start policy has not fired.
    OPEN = "open"
    #: Its policy has fired; earlier requests are answered first.
    WAITING = "waiting"
    #: The engine works on it.
    ANSWERING = "answering"
    #: Speech has interrupted the answer, and it is not known yet whether it had words.
    HELD = "held"
    #: The engine is done with frozen input, and the rest of the input has not ended.
    ANSWERED = "answered"
    #: ``error`` is known, and its final is not written yet.
    FAILED = "failed"
    #: Cancelled or interrupted, and its final is not written yet.
    CANCELLED = "cancelled"
    #: Its final is in the outbox.
    FINISHED = "finished"

    def check(self, after: RequestState) -> None:
        """Raise RuntimeError where ``after`` may not follow this state."""
        if after not in _TRANSITIONS[self]:
            raise RuntimeError(f"illegal transition from {self.name} to {after.name}")


#: Those in which its answer is being made and sent.
ANSWERING_STATES: Final = frozenset({RequestState.ANSWERING, RequestState.ANSWERED})
_TRANSITIONS: Final[dict[RequestState, frozenset[RequestState]]] = {
    RequestState.OPEN: frozenset(
        {RequestState.WAITING, RequestState.FAILED, RequestState.CANCELLED, RequestState.FINISHED}
    ),
    RequestState.WAITING: frozenset(
        {RequestState.ANSWERING, RequestState.FAILED, RequestState.CANCELLED, RequestState.FINISHED}
    ),
    RequestState.ANSWERING: frozenset(
        {
            RequestState.HELD,
            RequestState.ANSWERED,
            RequestState.FAILED,
            RequestState.CANCELLED,
            RequestState.FINISHED,
        }
    ),
    RequestState.HELD: frozenset({RequestState.ANSWERING, RequestState.CANCELLED, RequestState.FINISHED}),
    RequestState.ANSWERED: frozenset({RequestState.FAILED, RequestState.CANCELLED, RequestState.FINISHED}),
    RequestState.FAILED: frozenset({RequestState.CANCELLED, RequestState.FINISHED}),
    RequestState.CANCELLED: frozenset({RequestState.FINISHED}),
    RequestState.FINISHED: frozenset(),
}

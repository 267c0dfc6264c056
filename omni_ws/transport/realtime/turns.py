"""The spoken turns of a session: each is an item, and the request that its audio became."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from omni_ws.service.identifiers import new_id
from omni_ws.wire.realtime_items import Item


@dataclass(slots=True, eq=False)
class Turn:
    """What was spoken between ``speech_started`` and ``speech_stopped``, or committed by the client."""

    item: Item
    #: Whether the request is answered. Otherwise it is transcribed, and the item waits for a response.
    answered: bool
    start_ms: int = 0
    end_ms: int = 0
    #: Whether it is an item of the conversation.
    committed: bool = False
    #: Whether the client took back what was spoken.
    cleared: bool = False
    #: Whether the engine works on it.
    started: bool = False
    #: Whether its transcript is complete, or failed.
    transcribed: bool = False
    #: Its settled pieces, each with the white space before it.
    transcript: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.transcript)


class Turns:
    """Finds the turn of a request.

    Most are bound as they begin, by the requests that are open then. Otherwise the first request that is not known
    belongs to the oldest turn without one, as turns become requests in their order; one that is refused as it opens is
    that of the newest.
    """

    def __init__(self) -> None:
        self._unbound: deque[Turn] = deque()
        self._by_request: dict[str, Turn] = {}
        #: The turn that is being spoken.
        self.speaking: Turn | None = None

    def begin(self, *, answered: bool, start_ms: int) -> Turn:
        """Speech has begun."""
        item = Item(item_id=new_id("item_"), role="user", content=[{"type": "input_audio", "transcript": None}])
        turn = self.speaking = Turn(item, answered, start_ms)
        self._unbound.append(turn)
        return turn

    def bind(self, turn: Turn, request_id: str) -> None:
        """This turn is the input of this request."""
        self._by_request[request_id] = turn
        turn.item.request_id = request_id
        if turn in self._unbound:
            self._unbound.remove(turn)

    def unbound(self, turn: Turn) -> bool:
        """Whether the request of a turn is not known yet."""
        return turn in self._unbound

    def drop_unbound(self) -> None:
        """No request is open, and none has anything to say any more: what is left became none."""
        self._unbound.clear()

    def knows(self, request_id: str) -> bool:
        """Whether the request is known to have a turn."""
        return request_id in self._by_request

    def find(self, request_id: str, *, newest: bool = False) -> Turn | None:
        """The turn of a request; None where it has none."""
        turn = self._by_request.get(request_id)
        if turn is None and self._unbound:
            turn = self._unbound[-1 if newest else 0]
            self.bind(turn, request_id)
        return turn

    def end(self, request_id: str) -> None:
        """The request has ended."""
        self._by_request.pop(request_id, None)

    @property
    def transcribing(self) -> bool:
        """Whether a turn that waits for a response is still being transcribed."""
        turns = [*self._unbound, *self._by_request.values()]
        return any(turn.committed and not turn.answered for turn in turns)

"""The spoken turns of a session: each is an item, and the request that its audio became."""

from __future__ import annotations

from dataclasses import dataclass, field

from omni_ws.service.failure import new_id
from omni_ws.wire.realtime_events import Item


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
    """The turns of requests that have not ended."""

    def __init__(self) -> None:
        self._by_request: dict[str, Turn] = {}
        #: The turn that is being spoken.
        self.speaking: Turn | None = None

    def begin(self, *, answered: bool, start_ms: int, request_id: str | None) -> Turn:
        """Speech has begun, and is the input of this request, or of none."""
        item = Item(item_id=new_id("item_"), role="user", content=[{"type": "input_audio", "transcript": None}])
        turn = self.speaking = Turn(item, answered, start_ms)
        if request_id is not None:
            self.bind(turn, request_id)
        return turn

    def bind(self, turn: Turn, request_id: str) -> None:
        """This turn is the input of this request."""
        self._by_request[request_id] = turn
        turn.item.request_id = request_id

    def find(self, request_id: str) -> Turn | None:
        """The turn of a request; None where it has none."""
        return self._by_request.get(request_id)

    def end(self, request_id: str) -> None:
        """The request has ended."""
        self._by_request.pop(request_id, None)

    @property
    def transcribing(self) -> bool:
        """Whether a turn that waits for a response is still being transcribed."""
        return any(turn.committed and not turn.answered for turn in self._by_request.values())

"""OutgoingInput: the numbers of what is sent, what the server said about it, what would be sent again. No I/O."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from msgspec.structs import replace

from omni_ws.core.chunks import InputChunk, Modality
from omni_ws.errors import EmptyInput
from omni_ws.wire.session_config import OutputAudioConfig


@dataclass(slots=True, eq=False)
class OutgoingRequest:
    """A request that the server has not finished."""

    first_sequence_id: int
    #: What was in effect when it began: binary frames of its answer say neither format nor rate.
    output_audio: OutputAudioConfig
    request_id: str | None = None
    input_open: bool = True
    cancelled: bool = False
    #: Its user has gone: nobody wants its events.
    muted: bool = False
    #: The server has finished it; where its input is open, the rest is swallowed there.
    finished: bool = False
    #: Its connection is gone, and it will not be sent again: what comes of its input goes nowhere.
    orphaned: bool = False
    #: Chunks sent that the server has not refused.
    live_chunks: int = 0
    last_sequence_id: int = -1
    #: The chunk that carried the end of its input, if one did.
    end_sequence_id: int | None = None
    #: Its input so far, or None where that became too much to keep.
    kept: dict[int, InputChunk] | None = field(default_factory=dict)
    kept_bytes: int = 0


class OutgoingInput:
    """Numbers chunks, groups them into requests, counts what is unacknowledged against window and credit.

    With ``keep_bytes`` above 0 the input of unfinished requests is kept, acknowledged or not: a fresh session knows
    nothing of what an earlier one had accepted, so half a request would be answered as if it were whole.
    """

    def __init__(self, *, window_bytes: int, keep_bytes: int) -> None:
        self.window_bytes = window_bytes
        self.keep_bytes = keep_bytes
        self.next_sequence_id = 0
        self.acknowledged_sequence_id = 0
        self.unacknowledged_bytes = 0
        #: How much more than what is acknowledged may be sent; None until the server has said so.
        self.credit_bytes: int | None = None
        #: In the order of their opening, which is that of their answers.
        self.requests: deque[OutgoingRequest] = deque()
        self.receiving: OutgoingRequest | None = None
        #: With turn detection audio opens no request here: the server finds out which it belongs to.
        self.open_microphone = False
        #: Requests that the server opened.
        self._opened_there: set[str] = set()
        self._unacknowledged: deque[tuple[int, int]] = deque()

    # room

    def has_room(self, size: int) -> bool:
        if self.credit_bytes is not None and self.unacknowledged_bytes + size > self.credit_bytes:
            return False
        return not self._unacknowledged or self.unacknowledged_bytes + size <= self.window_bytes

    @property
    def starved(self) -> bool:
        """Whether no acknowledgement is under way that could bring new credit."""
        return not self._unacknowledged

    # what is sent

    def add(self, chunk: InputChunk, *, output_audio: OutputAudioConfig) -> InputChunk | None:
        """The chunk with its number; None where it belongs to a request that no server works on any more."""
        request = self.receiving
        if request is None and self.open_microphone and chunk.modality is Modality.AUDIO:
            numbered = replace(chunk, sequence_id=self.next_sequence_id)
            self._count(len(chunk.payload))
            return numbered
        if request is None:
            request = self.receiving = OutgoingRequest(self.next_sequence_id, output_audio)
            self.requests.append(request)
        if chunk.end_of_input:
            request.input_open = False
            self.receiving = None
        if request.orphaned:
            return None
        numbered = replace(chunk, sequence_id=self.next_sequence_id)
        self._place(request, numbered)
        return numbered

    def _place(self, request: OutgoingRequest, chunk: InputChunk) -> None:
        size = len(chunk.payload)
        number = self._count(size)
        request.live_chunks += 1
        request.last_sequence_id = number
        request.end_sequence_id = number if chunk.end_of_input else None
        if not request.finished and request.kept is not None:
            request.kept[number] = chunk
            request.kept_bytes += size
            self._stay_within_bounds()

    def _count(self, size: int) -> int:
        """The number of the next chunk, which is on its way from here on."""
        number = self.next_sequence_id
        self.next_sequence_id += 1
        self._unacknowledged.append((number, size))
        self.unacknowledged_bytes += size
        return number

    def _stay_within_bounds(self) -> None:
        """The longest request is the one that is given up."""
        while sum(request.kept_bytes for request in self.requests) > self.keep_bytes:
            longest = max(self.requests, key=lambda request: request.kept_bytes)
            longest.kept, longest.kept_bytes = None, 0

    def finish(self) -> bool:
        """The input ends without another chunk. False where none is open that the server can know of.

        Raises EmptyInput where the server refused all there was: it will not answer.
        """
        request, self.receiving = self.receiving, None
        if request is None:
            return self.open_microphone
        request.input_open = False
        if request in self.requests and request.live_chunks == 0:
            self.requests.remove(request)
            raise EmptyInput("everything of this input was refused")
        if request.kept:
            # A fresh session is told by the last chunk.
            last = max(request.kept)
            request.kept[last] = replace(request.kept[last], end_of_input=True)
        return not request.orphaned

    def cancel(self, request_id: str | None) -> None:
        """As the server does it: the named request, or the one that is being answered, or the one that is open."""
        target: OutgoingRequest | None
        if request_id is not None:
            target = self.find(request_id)
        else:
            started = (request for request in self.requests if request.request_id is not None)
            target = next(started, self.requests[-1] if self.requests else self.receiving)
        if target is None:
            return
        target.cancelled = True
        target.input_open = False
        if target.live_chunks == 0 and target in self.requests:
            self.requests.remove(target)  # the server never saw it, and will not end it
        if target is self.receiving:
            self.receiving = None

    # what the server says

    def acknowledge(self, next_sequence_id: int, credit_bytes: int) -> None:
        while self._unacknowledged and self._unacknowledged[0][0] < next_sequence_id:
            self.unacknowledged_bytes -= self._unacknowledged.popleft()[1]
        self.acknowledged_sequence_id = max(self.acknowledged_sequence_id, next_sequence_id)
        self.credit_bytes = credit_bytes

    def started(self, request_id: str, sequence_id: int | None) -> OutgoingRequest | None:
        """Which of the requests it is that the server now has a name for."""
        unnamed = [request for request in self.requests if request.request_id is None]
        if sequence_id is not None:
            unnamed = [request for request in unnamed if request.first_sequence_id <= sequence_id][-1:]
        if not unnamed:
            self._opened_there.add(request_id)
            return None
        unnamed[0].request_id = request_id
        return unnamed[0]

    def find(self, request_id: str) -> OutgoingRequest | None:
        return next((request for request in self.requests if request.request_id == request_id), None)

    def final(self, request_id: str) -> OutgoingRequest | None:
        """A request is over. One that never started has no name: answers come in order."""
        request = self.find(request_id)
        if request_id in self._opened_there:
            self._opened_there.discard(request_id)
        elif request is None:
            request = next((request for request in self.requests if request.request_id is None), None)
        if request is not None:
            request.finished = True
            request.kept, request.kept_bytes = None, 0
            self.requests.remove(request)
        return request

    def refused(self, sequence_id: int) -> bool:
        """A chunk was refused and its number used up. True if no Final will come of its request as things stand."""
        request = next((r for r in reversed(self.requests) if r.first_sequence_id <= sequence_id), None)
        if request is None or sequence_id > request.last_sequence_id:
            return False
        request.live_chunks -= 1
        if request.kept is not None and (gone := request.kept.pop(sequence_id, None)) is not None:
            request.kept_bytes -= len(gone.payload)
        if request.input_open:
            return False
        if request.live_chunks == 0:
            self.requests.remove(request)  # the server never saw it, and will not end it
            return not request.cancelled
        if sequence_id != request.end_sequence_id or request.cancelled:
            return False
        if self.receiving is None:
            # The end was on the chunk that was refused: for the server this input is still open.
            request.input_open = True
            self.receiving = request
        return True

    # a fresh session

    @property
    def lost(self) -> list[OutgoingRequest]:
        """Requests that could not be sent again as a whole."""
        return [request for request in self.requests if request.kept is None and not request.cancelled]

    def restart(self) -> tuple[list[InputChunk], list[OutgoingRequest]]:
        """Numbering from 0: the chunks to send again, and the requests that are over because they were cancelled."""
        self.next_sequence_id = self.acknowledged_sequence_id = self.unacknowledged_bytes = 0
        self.credit_bytes = None
        self._unacknowledged.clear()
        self._opened_there.clear()
        if self.receiving is not None and self.receiving.finished:
            self.receiving.orphaned = True
        cancelled = [request for request in self.requests if request.cancelled]
        again = [request for request in self.requests if not request.cancelled]
        self.requests = deque(again)
        chunks: list[InputChunk] = []
        for request in again:
            kept = list((request.kept or {}).values())
            request.kept, request.kept_bytes, request.live_chunks = {}, 0, 0
            request.first_sequence_id, request.request_id = self.next_sequence_id, None
            for chunk in kept:
                numbered = replace(chunk, sequence_id=self.next_sequence_id)
                self._place(request, numbered)
                chunks.append(numbered)
        return chunks, cancelled

"""Answers over HTTP: what a session says, written the way a route's clients read it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol

from omni_ws.core.chunks import OutputModality
from omni_ws.core.output import FinalChunk, OutputChunk
from omni_ws.core.quota import ByteBudget, Share
from omni_ws.errors import EngineFailed, OmniError
from omni_ws.service.conversation.messages import ServerMessage, message_cost
from omni_ws.transport.http.error_response import error_object
from omni_ws.transport.http.exchange import HttpExchange
from omni_ws.wire import sse
from omni_ws.wire.openai_chat_response import finished_well
from omni_ws.wire.server_frames import ResponseStartedFrame

SSE_HEADERS: Final = (
    ("Content-Type", "text/event-stream; charset=utf-8"),
    ("Cache-Control", "no-cache"),
    # Asks proxies not to collect the events before passing them on.
    ("X-Accel-Buffering", "no"),
)

#: Events are written at the latest when they are so many.
WRITE_BATCH_EVENTS: Final = 64
#: One that is so large does not wait for others.
LARGE_EVENT_BYTES: Final = 1024


class EventEncoder(Protocol):
    """Makes the JSON objects of a stream out of outputs; one may come as its JSON already."""

    def output(self, chunk: OutputChunk) -> Iterable[dict[str, Any] | bytes]: ...

    def final(self, chunk: FinalChunk) -> Iterator[dict[str, Any]]: ...


class Answering(Protocol):
    """Who has something to say; see ``HttpSession``."""

    def take(self) -> ServerMessage | None:
        """The next message, if there is one. Raises what went wrong."""
        ...

    async def wait(self, *, idle_sec: float | None = None, meanwhile: Callable[[], bool] | None = None) -> bool:
        """Until there may be something to take; False where for ``idle_sec`` seconds there was not. Raises as ``take``.

        ``meanwhile`` may be called instead of ending the wait, and says whether to go on waiting: to wake a task up
        costs as much as all that it does for a token. What it raises ends the wait.
        """
        ...

    def written(self) -> None:
        """What was taken so far has been written."""


async def receive(session: Answering) -> ServerMessage:
    """The next message, once there is one."""
    while (message := session.take()) is None:
        await session.wait()
    return message


class EventSink(Protocol):
    """Where events go: an HttpExchange, or what stands in front of one."""

    #: What was told as an event, for the account of the request.
    error: OmniError | None

    @property
    def head_sent(self) -> bool: ...

    async def start(self, status: int, headers: Iterable[tuple[str, str]] = (), *, filler: bytes = b"") -> None: ...

    async def write(self, data: bytes) -> None: ...

    async def write_all(self, parts: Sequence[bytes]) -> None: ...

    def try_write(self, parts: Sequence[bytes]) -> bool:
        """Write several parts where that needs no waiting; False where it does, and nothing was written."""
        ...

    async def end(self) -> None: ...


async def write_events(
    exchange: EventSink,
    session: Answering,
    encoder: EventEncoder,
    *,
    done: bool = True,
    head_at_start: bool,
    head_by_heartbeat: bool = False,
    heartbeat_sec: float,
) -> None:
    """An answer as server-sent events.

    ``head_at_start`` sends the 200 when work starts, for input that is still on its way; otherwise it waits for the
    first output, so that whatever fails before is told by its status. An error after the head becomes an
    ``event: error``, and the stream ends there, without [DONE]. A comment goes out after ``heartbeat_sec`` without an
    event, once the head is out, or, with ``head_by_heartbeat``, with it; 0 means never. Events that are there together
    are written together.
    """
    events = _Events(exchange, session, encoder, head_at_start=head_at_start)
    try:
        while True:
            events.gather()
            if events.complete:
                break
            if events.waiting or events.head_due:
                await events.write()
            elif not await session.wait(idle_sec=heartbeat_sec or None, meanwhile=events.pass_on):
                if head_by_heartbeat and not exchange.head_sent:
                    await events.write()
                if exchange.head_sent:
                    await exchange.write(sse.HEARTBEAT)
        if done:
            events.waiting.append(sse.DONE)
    except OmniError as error:
        if not exchange.head_sent and not events.waiting:
            raise
        exchange.error = error
        events.waiting.append(error_event(error))
    await events.write()
    await exchange.end()


class _Events:
    """The events of one answer, on their way from a session to a client."""

    def __init__(self, sink: EventSink, session: Answering, encoder: EventEncoder, *, head_at_start: bool) -> None:
        #: Those that are not written yet.
        self.waiting: list[bytes] = []
        #: Whether the answer is to begin, with or without them, before anything else is taken, which may be an error.
        self.head_due = False
        #: Whether the session has said its last.
        self.complete = False
        self._sink = sink
        self._session = session
        self._encoder = encoder
        self._head_at_start = head_at_start

    def gather(self) -> bool:
        """Make events of what there is to take, up to what is written at a stretch. Whether that was all for now."""
        waiting = self.waiting
        while not (self.complete or self.head_due):
            if len(waiting) >= WRITE_BATCH_EVENTS or (waiting and len(waiting[-1]) >= LARGE_EVENT_BYTES):
                return False
            match self._session.take():
                case OutputChunk() as message:
                    for event in self._encoder.output(message):
                        waiting.append(sse.event(event))
                case FinalChunk() as message:
                    waiting += map(sse.event, self._encoder.final(_checked(message)))
                    self.complete = True
                case ResponseStartedFrame() if self._head_at_start:
                    self.head_due = True
                case None:
                    return True
        return False

    def pass_on(self) -> bool:
        """Write what has come, if nothing has to be waited for and more is to come; whether it was so."""
        if not self.gather() or not self._sink.try_write(self.waiting):
            return False
        self.waiting.clear()
        self._session.written()
        return True

    async def write(self) -> None:
        self.head_due = False
        if not self._sink.head_sent:
            await _start(self._sink)
        await self._sink.write_all(self.waiting)
        self.waiting.clear()
        self._session.written()


async def _start(exchange: EventSink) -> None:
    await exchange.start(200, SSE_HEADERS, filler=sse.HEARTBEAT)


async def write_error_event(exchange: HttpExchange, error: OmniError) -> None:
    """An answer of events that went wrong before its first one."""
    exchange.error = error
    await exchange.start(200, SSE_HEADERS)
    await exchange.write(error_event(error))
    await exchange.end()


def error_event(error: OmniError) -> bytes:
    """Both shapes that readers look for: the fields at the top level, and OpenAI's object under ``error``."""
    fields = error_object(error)
    return sse.event({**fields, "error": fields}, name="error")


async def write_raw_audio(exchange: HttpExchange, session: Answering, media_type: str, *, head_at_start: bool) -> None:
    """The bytes of the audio as they are made. An error after the head can only cut the answer short."""

    async def start() -> None:
        if not exchange.head_sent:
            await exchange.start(200, [("Content-Type", media_type)])

    final = False
    while not final:
        match await receive(session):
            case ResponseStartedFrame() if head_at_start:
                await start()
            case OutputChunk(modality=OutputModality.AUDIO, payload=payload):
                await start()
                await exchange.write(payload)
                session.written()
            case FinalChunk() as message:
                final = True
                _checked(message)
                await start()
    await exchange.end()


@contextmanager
def held_answer(budget: ByteBudget) -> Iterator[Callable[[int], None]]:
    """Counts the bytes of an answer that is kept to be sent whole against what the server may hold."""
    share = Share(budget)
    try:
        yield lambda size: share.resize(share.size + size)
    finally:
        share.resize(0)


async def gather(session: Answering, hold: Callable[[int], None]) -> tuple[list[OutputChunk], FinalChunk]:
    """Everything that a session says to its one request. Raises EngineOverloaded where it is too much to hold."""
    outputs: list[OutputChunk] = []
    while True:
        match await receive(session):
            case OutputChunk() as message:
                hold(message_cost(message))
                outputs.append(message)
            case FinalChunk() as message:
                return outputs, _checked(message)


def _checked(final: FinalChunk) -> FinalChunk:
    """HTTP has no way to say "cancelled": a request that was cut short is an error."""
    if not finished_well(final):
        raise EngineFailed("the request was ended before its answer was complete")
    return final

"""Answers as HTTP responses: server-sent events, raw audio, or outputs collected for a whole response."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol

from omni_ws.core.chunks import FinalChunk, OutputChunk, OutputModality
from omni_ws.core.quota import ByteBudget, Share
from omni_ws.errors import EngineFailed, OmniError
from omni_ws.service.conversation.messages import ServerMessage, message_cost
from omni_ws.transport.http.exchange import HttpExchange
from omni_ws.transport.http.request import error_object
from omni_ws.wire import server_frames as sse
from omni_ws.wire.openai_responses import ended_normally
from omni_ws.wire.server_frames import ResponseStartedFrame

SSE_HEADERS: Final = (
    ("Content-Type", "text/event-stream; charset=utf-8"),
    ("Cache-Control", "no-cache"),
    # Keeps nginx and others from buffering the events.
    ("X-Accel-Buffering", "no"),
)

#: Events that are written together, at most.
WRITE_BATCH_EVENTS: Final = 64
#: An event of this size ends its batch.
LARGE_EVENT_BYTES: Final = 1024


class EventEncoder(Protocol):
    """Turns outputs into the data of events: JSON objects, or their JSON."""

    def output(self, chunk: OutputChunk) -> Iterable[dict[str, Any] | bytes]:
        """Encode one output, as any number of events."""
        ...

    def final(self, chunk: FinalChunk) -> Iterator[dict[str, Any]]:
        """Encode the end of the answer."""
        ...


class PromptWriter(Protocol):
    """Writes outputs inside the call that brings them. Neither method waits, and what they raise ends the wait."""

    def write_now(self, output: OutputChunk) -> bool:
        """Write the next output. Returns False, and nothing is done, where the waiting task has to do it."""
        ...

    def write_available(self) -> bool:
        """Write what ``take`` returns. Returns False where the waiting task has to do the rest."""
        ...


class AnswerSource(Protocol):
    """Where the messages of an answer are read from: one session, several, or the output log of a Mode B session."""

    def take(self) -> ServerMessage | None:
        """Return the next message, None where there is none yet. Raises the error that ended the answer."""
        ...

    async def wait(self, *, idle_sec: float | None = None, meanwhile: PromptWriter | None = None) -> bool:
        """Wait until there may be a message to take. Returns False after ``idle_sec`` seconds without one.

        ``meanwhile`` may handle messages without waking the waiting task, which costs as much as all other work on a
        token. Raises as ``take`` does.
        """
        ...

    def written(self) -> None:
        """Mark the messages taken so far as written to the client."""


async def next_message(source: AnswerSource) -> ServerMessage:
    """Wait for the next message and return it."""
    while (message := source.take()) is None:
        await source.wait()
    return message


class EventSink(Protocol):
    """Where events are written to: an HttpExchange, or a wrapper of one."""

    #: An error that was sent as an event, for the access log.
    error: OmniError | None

    @property
    def head_sent(self) -> bool:
        """Whether errors can no longer be sent with a status of their own."""
        ...

    async def start(self, status: int, headers: Iterable[tuple[str, str]] = (), *, filler: bytes = b"") -> None:
        """Send the head of the response; see ``HttpExchange.start``."""

    @property
    def startable(self) -> bool:
        """Whether ``start_now`` may be called: the head is not sent, and the peer reads."""
        ...

    def start_now(
        self, status: int, headers: Iterable[tuple[str, str]] = (), *, filler: bytes = b"", content: bytes = b""
    ) -> None:
        """Send the head and the first events without waiting."""
        ...

    async def write(self, data: bytes) -> None:
        """Write one event, and wait while the peer does not read."""

    async def write_all(self, parts: Sequence[bytes]) -> None:
        """Write several events, and wait while the peer does not read."""

    @property
    def writable(self) -> bool:
        """Whether ``write_now`` may be called: the head is sent, and the peer reads."""
        ...

    def write_now(self, data: bytes) -> None:
        """Write one or several events without waiting."""

    async def end(self) -> None:
        """End the response."""


async def write_events(
    sink: EventSink,
    source: AnswerSource,
    encoder: EventEncoder,
    *,
    done: bool = True,
    head_at_start: bool,
    head_by_heartbeat: bool = False,
    heartbeat_sec: float,
) -> None:
    """Write an answer as server-sent events.

    Events that are available together are written together. An error before the head is raised; after it, it is sent
    as an ``event: error``, which ends the stream without ``[DONE]``.

    Args:
        done: Whether ``data: [DONE]`` ends the stream.
        head_at_start: Whether the 200 is sent when work starts, for input that is still arriving. Otherwise the head
            waits for the first output, so that failures before it get their status.
        head_by_heartbeat: Whether a heartbeat may send the head.
        heartbeat_sec: Seconds without an event after which a comment is sent, once the head is; 0 for never.
    """
    events = _EventBatch(sink, source, encoder, head_at_start=head_at_start)
    try:
        while True:
            events.encode_available()
            if events.complete:
                break
            if events.waiting or events.head_due:
                await events.write()
            elif not await source.wait(idle_sec=heartbeat_sec or None, meanwhile=events):
                if head_by_heartbeat and not sink.head_sent:
                    await events.write()
                if sink.head_sent:
                    await sink.write(sse.HEARTBEAT_BLOCK)
        if done:
            events.waiting.append(sse.DONE)
    except OmniError as error:
        if not sink.head_sent and not events.waiting:
            raise
        sink.error = error
        events.waiting.append(error_event(error))
    await events.write()
    await sink.end()


class _EventBatch:
    """The events of one answer that have been encoded and not written yet."""

    def __init__(self, sink: EventSink, source: AnswerSource, encoder: EventEncoder, *, head_at_start: bool) -> None:
        self.waiting: list[bytes] = []
        #: Whether the head must be sent before the next message is taken, which may be an error.
        self.head_due = False
        #: Whether the final has been encoded.
        self.complete = False
        self._sink = sink
        self._source = source
        self._encoder = encoder
        self._head_at_start = head_at_start

    def encode_available(self) -> bool:
        """Take messages and encode them, up to a full batch. Returns whether none is left for now."""
        waiting = self.waiting
        while not (self.complete or self.head_due):
            if len(waiting) >= WRITE_BATCH_EVENTS or (waiting and len(waiting[-1]) >= LARGE_EVENT_BYTES):
                return False
            match self._source.take():
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

    def write_now(self, output: OutputChunk) -> bool:
        """See PromptWriter."""
        sink = self._sink
        if self.waiting or self.head_due or not (sink.writable or sink.startable):
            return False
        if data := b"".join(map(sse.event, self._encoder.output(output))):
            self._send(data)
        return True

    def write_available(self) -> bool:
        """See PromptWriter."""
        if not self.encode_available():
            return False
        if self.waiting:
            if not (self._sink.writable or self._sink.startable):
                return False
            self._send(b"".join(self.waiting))
            self.waiting.clear()
        self._source.written()
        return True

    def _send(self, data: bytes) -> None:
        """Send events without waiting, the first ones with the head."""
        if self._sink.head_sent:
            self._sink.write_now(data)
        else:
            self._sink.start_now(200, SSE_HEADERS, filler=sse.HEARTBEAT_BLOCK, content=data)

    async def write(self) -> None:
        """Write the batch, behind the head where that has not been sent."""
        self.head_due = False
        if not self._sink.head_sent:
            await _start(self._sink)
        await self._sink.write_all(self.waiting)
        self.waiting.clear()
        self._source.written()


async def _start(sink: EventSink) -> None:
    await sink.start(200, SSE_HEADERS, filler=sse.HEARTBEAT_BLOCK)


async def respond_error_event(exchange: HttpExchange, error: OmniError) -> None:
    """Respond with a stream of one ``event: error``, for clients that read errors from events only."""
    exchange.error = error
    await exchange.start(200, SSE_HEADERS)
    await exchange.write(error_event(error))
    await exchange.end()


def error_event(error: OmniError) -> bytes:
    """An ``event: error`` in both shapes that clients read: fields at the top level, and OpenAI's ``error`` object."""
    fields = error_object(error)
    return sse.event({**fields, "error": fields}, name="error")


async def write_raw_audio(
    exchange: HttpExchange, source: AnswerSource, media_type: str, *, head_at_start: bool
) -> None:
    """Write the bytes of the audio as they are produced. After the head, an error cuts the response short."""

    async def start() -> None:
        if not exchange.head_sent:
            await exchange.start(200, [("Content-Type", media_type)])

    final = False
    while not final:
        match await next_message(source):
            case ResponseStartedFrame() if head_at_start:
                await start()
            case OutputChunk(modality=OutputModality.AUDIO, payload=payload):
                await start()
                await exchange.write(payload)
                source.written()
            case FinalChunk() as message:
                final = True
                _checked(message)
                await start()
    await exchange.end()


@contextmanager
def charging(budget: ByteBudget) -> Iterator[Callable[[int], None]]:
    """Charge the bytes of a collected answer to ``budget`` until the block ends.

    Yields a function that charges more bytes; it raises EngineOverloaded where the budget is exhausted.
    """
    share = Share(budget)
    try:
        yield lambda size: share.resize(share.size + size)
    finally:
        share.resize(0)


async def collect_answer(source: AnswerSource, charge: Callable[[int], None]) -> tuple[list[OutputChunk], FinalChunk]:
    """Collect all outputs of an answer, and its final. Raises as ``source`` and ``charge`` do."""
    outputs: list[OutputChunk] = []
    while True:
        match await next_message(source):
            case OutputChunk() as message:
                charge(message_cost(message))
                outputs.append(message)
            case FinalChunk() as message:
                return outputs, _checked(message)


def _checked(final: FinalChunk) -> FinalChunk:
    """Raise EngineFailed for an answer that was cancelled: HTTP has no other way to express that."""
    if not ended_normally(final):
        raise EngineFailed("the request ended before its answer was complete")
    return final

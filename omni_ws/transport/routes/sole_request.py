"""SoleRequest, which runs a conversation for a single HTTP request; and writers of answers as HTTP responses."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial, reduce
from typing import Any, Final, Protocol, TypeAlias

from msgspec.structs import replace

from omni_ws.core.chunks import (
    AnswerWarning,
    AnyOutput,
    FinalChunk,
    FinishReason,
    InputChunk,
    OutputChunk,
    OutputModality,
    UrlCitation,
    Usage,
)
from omni_ws.core.file_heads import without_head
from omni_ws.core.quota import ByteBudget, Share
from omni_ws.errors import EngineFailed, OmniError
from omni_ws.service import unexpected
from omni_ws.service.conversation.conversation import Conversation
from omni_ws.service.conversation.output_log import (
    Attachment,
    ServerMessage,
    message_cost,
)
from omni_ws.service.mcp import ToolServers
from omni_ws.service.observing.observer import OutputWritten
from omni_ws.transport.http.connections import (
    Deadline,
    PeerGone,
)
from omni_ws.transport.http.exchange import HttpExchange
from omni_ws.transport.http.request import error_object
from omni_ws.wire import server_frames
from omni_ws.wire.openai_responses import ended_normally
from omni_ws.wire.server_frames import ResponseStartedFrame


class ChainedAnswer:
    """A filter of the messages of an HTTP request with MCP servers, whose client gets a single answer.

    For this one answer, the conversation may give several, one after each round of MCP calls. The filter drops the MCP
    calls, keeps the calls of the client's own functions, sets the texts of the answers apart, makes one file of their
    sound, gathers the usage, the warnings and the citations, and closes the conversation at the last answer.
    """

    def __init__(self, conversation: Conversation, mcp: ToolServers) -> None:
        self._conversation = conversation
        self._mcp = mcp
        #: The indices of function calls as the client sees them, by request id and the engine's index.
        self._shown: dict[tuple[str, int], int] = {}
        self._usage = Usage()
        self._warnings: list[OmniError | AnswerWarning] = []
        self._citations: list[UrlCitation] = []
        self._finals = 0
        #: The length of the text that the client has, the request that its last part answers, where this part begins,
        #: and whether it ends in white space.
        self._length = 0
        self._speaking, self._begins_at = "", 0
        self._ends_blank = True
        #: The request whose answer the last sound is of; None before the first.
        self._sounding: str | None = None

    def passes(self, message: ServerMessage) -> ServerMessage | None:
        """Return the message to send to the client; None for a message that the client does not get."""
        if isinstance(message, OutputChunk):
            if message.tool_call is not None:
                return self._call(message)
            if message.modality is OutputModality.AUDIO:
                return self._audio(message)
            is_text = message.modality is OutputModality.TEXT and message.text and not message.refusal
            return self._text(message) if is_text else message
        if not isinstance(message, FinalChunk):
            return message
        self._usage = _sum(self._usage, message.usage)
        self._warnings += message.warnings
        at = self._begins_at
        self._citations += (replace(one, start=one.start + at, end=one.end + at) for one in message.citations)
        self._finals += 1
        if self._mcp.working(message.request_id):
            return None
        self._conversation.close()
        own = any(request_id == message.request_id for request_id, _ in self._shown)
        called = message.finish_reason is FinishReason.TOOL_CALLS
        reason = FinishReason.STOP if called and not own else message.finish_reason
        reasons = (reason,) * len(message.finish_reasons)
        times = message.times if self._finals == 1 else {}  # of several, they are those of the last answer alone
        return dataclasses.replace(
            message,
            usage=self._usage,
            finish_reason=reason,
            finish_reasons=reasons,
            times=times,
            warnings=tuple(self._warnings),
            citations=tuple(self._citations),
        )

    def _text(self, chunk: OutputChunk) -> OutputChunk:
        """Return a piece of an answer's text, the first one after what sets it apart from the answer before."""
        text = chunk.text
        if chunk.request_id != self._speaking:
            apart = "" if self._ends_blank or text[0].isspace() else "\n\n"
            self._speaking, self._begins_at = chunk.request_id, self._length + len(apart)
            text = apart + text
        self._length += len(text)
        self._ends_blank = text[-1].isspace()
        return chunk if text == chunk.text else replace(chunk, text=text)

    def _audio(self, chunk: OutputChunk) -> OutputChunk:
        """Return a piece of an answer's sound, without the head of a second file."""
        before, self._sounding = self._sounding, chunk.request_id
        if before in (None, chunk.request_id) or chunk.format is None:
            return chunk
        return replace(chunk, payload=without_head(chunk.payload, chunk.format.encoding))

    def _call(self, chunk: OutputChunk) -> OutputChunk | None:
        fragment = chunk.tool_call
        assert fragment is not None
        key = chunk.request_id, fragment.index
        if fragment.name is not None and self._mcp.find(fragment.name) is None:
            self._shown.setdefault(key, sum(request_id == chunk.request_id for request_id, _ in self._shown))
        if key not in self._shown:
            return None
        return replace(chunk, tool_call=dataclasses.replace(fragment, index=self._shown[key]))


def _sum(one: Usage, other: Usage) -> Usage:
    cached = (
        None
        if one.cached_tokens is None and other.cached_tokens is None
        else ((one.cached_tokens or 0) + (other.cached_tokens or 0))
    )
    return Usage(
        input_tokens=one.input_tokens + other.input_tokens,
        output_tokens=one.output_tokens + other.output_tokens,
        input_audio_ms=one.input_audio_ms + other.input_audio_ms,
        output_audio_ms=one.output_audio_ms + other.output_audio_ms,
        input_after_start_bytes=one.input_after_start_bytes + other.input_after_start_bytes,
        cached_tokens=cached,
    )


#: The input of a SoleRequest: all of its chunks, or a function that feeds them as they arrive, and ends the input.
InputSource: TypeAlias = "Iterable[InputChunk] | Callable[[SoleRequest], Awaitable[None]]"
#: Chunks of one body that are fed in one pass of the event loop; others' audio must not wait for all of them.
_CHUNKS_AT_A_TIME: Final = 64


class SoleRequest(Attachment):
    """The Attachment of a conversation to one HTTP request, which runs the conversation and is its AnswerSource.

    There is no Session: nothing outlives the HTTP request.

    Inside ``running``, a task runs the conversation. Input that is available is fed immediately, as far as the engine
    keeps up; a second task feeds the rest. If the input is still to arrive, that task calls ``feed`` and ``end_input``.
    The handler's own task reads the answer with ``take`` and ``wait``; it gets an error of the two tasks, or a
    time-out, as the last message of the outbox.
    """

    def __init__(self, conversation: Conversation) -> None:
        self.conversation = conversation
        self._outbox = conversation.outbox
        self._observed = conversation.observed
        self._loop = asyncio.get_running_loop()
        #: The call of ``wait`` in progress, with its arguments.
        self._waiting: asyncio.Future[bool] | None = None
        self._meanwhile: EventBatch | None = None
        self._idle_sec: float | None = None
        #: When ``meanwhile`` last wrote what was queued, on the loop's clock.
        self._delivered_at = -math.inf
        self._idle = Deadline(self._loop, self._idle_expired)
        #: Outputs taken and not yet marked as written; collected only while observers listen to outputs.
        self._unwritten: list[AnyOutput] = []
        self._input_room = asyncio.Event()
        mcp = conversation.configuration.mcp
        #: None without MCP servers.
        self._chain = ChainedAnswer(conversation, mcp) if mcp else None
        conversation.attach(self)

    async def feed(self, chunk: InputChunk) -> None:
        """Feed one chunk, and wait while the engine is behind. Raises the error of a refused chunk."""
        self._receive(chunk)
        await self._room()

    def _receive(self, chunk: InputChunk) -> None:
        try:
            self.conversation.configuration.check_chunk(chunk)
            self.conversation.receive_chunk(chunk, now=self._loop.time())
        except OmniError as error:
            error.about(param=self.conversation.field_names(error.param))
            raise

    async def _room(self) -> None:
        """Wait while the engine is behind."""
        if not self.conversation.input_full():
            return
        self.hold_clocks(True)
        try:
            while self.conversation.input_full():
                self._input_room.clear()
                await self._input_room.wait()
        finally:
            self.hold_clocks(False)

    def hold_clocks(self, held: bool) -> None:
        """Stop the time-outs of silence and gaps while the server delays the input (``held``), or resume them."""
        self.conversation.hold_time(held, now=self._loop.time())

    def interrupt(self, error: OmniError) -> None:
        """End the answer with ``error``, after the messages that are in the outbox."""
        self._outbox.put_nowait(copy.copy(error))

    def touch(self) -> None:
        """Restart the time-out of silence, since bytes of an incomplete chunk have arrived."""
        self.conversation.stream.touch(now=self._loop.time())

    def end_input(self) -> None:
        """End the input at the end of the body. Raises SequenceGap if chunks are missing: none can arrive any more."""
        stream = self.conversation.stream
        if stream.gap_since is not None:
            raise stream.gap_error()
        self.conversation.finish()
        if self._chain is None:
            self.conversation.close()

    @asynccontextmanager
    async def running(self, source: InputSource) -> AsyncIterator[None]:
        """Run the conversation, fed by ``source``, until the block ends. Raises InvalidValue if an MCP server fails."""
        tasks: list[asyncio.Task[None]] = []
        try:
            if mcp := self.conversation.configuration.mcp:
                await mcp.listed()
            tasks.append(asyncio.create_task(self._guard(self.conversation.run), name="request over http: answers"))
            feed: Callable[[], Awaitable[None]] | None = None
            if callable(source):
                feed = partial(source, self)
            elif not self._feed_some(chunks := iter(source)):
                feed = partial(self._feed_rest, chunks)
            if feed is not None:
                tasks.append(asyncio.create_task(self._guard(feed), name="request over http: input"))
            yield
        finally:
            self._idle.disarm()
            for task in tasks:
                task.cancel()
            try:
                if pending := [task for task in tasks if not task.done()]:
                    await asyncio.wait(pending)
            finally:
                self.conversation.end()  # a task cancelled before its first step has not done so
                self.written()
                self._outbox.close()
                self.conversation.observed.ended()

    def _feed_some(self, chunks: Iterator[InputChunk]) -> bool:
        """Feed chunks until the engine is behind or other tasks must have a turn. Returns whether feeding is done.

        The error of a refused chunk ends the feeding; ``take`` raises it.
        """
        try:
            for _ in range(_CHUNKS_AT_A_TIME):
                if (chunk := next(chunks, None)) is None:
                    self.end_input()
                    return True
                self._receive(chunk)
                if self.conversation.input_full():
                    break
        except OmniError as error:
            self._outbox.put_nowait(error)
            return True
        return False

    async def _feed_rest(self, chunks: Iterator[InputChunk]) -> None:
        while True:
            await asyncio.sleep(0)
            await self._room()
            if self._feed_some(chunks):
                return

    def take(self) -> ServerMessage | None:
        """Return the next message; None if there is none yet. Raises the error that ended the answer."""
        message = self._outbox.take()
        if self._chain is not None:
            while message is not None and (passed := self._chain.passes(message)) is None:
                message = self._outbox.take()
            message = None if message is None else passed
        if message is None:
            return None
        if isinstance(message, OmniError):
            raise message
        if self._observed.observers.listening_to_outputs and isinstance(message, AnyOutput):
            self._unwritten.append(message)
        return message

    async def wait(self, *, idle_sec: float | None = None, meanwhile: EventBatch | None = None) -> bool:
        """Wait for a message; see ``AnswerSource``. ``idle_sec`` counts from the last write of ``meanwhile``."""
        if self._outbox:
            return True
        self._waiting = self._loop.create_future()
        self._meanwhile, self._idle_sec = meanwhile, idle_sec
        self._idle.arm(idle_sec)
        try:
            return await self._waiting
        finally:
            self._waiting = None

    # Attachment

    def input_may_continue(self) -> None:
        self._input_room.set()

    def time_is_up(self, error: OmniError) -> None:
        self._outbox.put_nowait(error)

    def write_now(self, output: OutputChunk) -> bool:
        waiting, writer = self._waiting, self._meanwhile
        if waiting is None or writer is None or waiting.done() or self._chain is not None:
            return False
        try:
            if not writer.write_now(output):
                return False
        except Exception as error:
            waiting.set_exception(error)
            return True
        if self._observed.observers.listening_to_outputs:
            self._observed.notify(OutputWritten(output))
        return True

    def output_ready(self) -> None:
        if self._waiting is not None:
            self._loop.call_soon(self._deliver)  # later outputs of this pass are written together with it

    def _deliver(self) -> None:
        """Let ``meanwhile`` write the messages of the outbox; if that is not possible, wake the waiting task."""
        waiting = self._waiting
        if waiting is None or waiting.done():
            return
        try:
            if self._meanwhile is not None and self._meanwhile.write_available():
                self._delivered_at = self._loop.time()
            else:
                waiting.set_result(True)
        except Exception as error:
            waiting.set_exception(error)

    def _idle_expired(self) -> None:
        if self._waiting is None or self._waiting.done() or self._idle_sec is None:
            return
        # Nothing is done for each output but to note its time.
        silent = self._loop.time() - max(self._delivered_at, self._outbox.written_at)
        if silent >= self._idle_sec:
            self._waiting.set_result(False)
        else:
            self._idle.arm(self._idle_sec - silent)

    def written(self) -> None:
        """Notify observers that the outputs taken so far have been written."""
        if not self._unwritten:
            return
        for message in self._unwritten:
            self._observed.notify(OutputWritten(message))
        self._unwritten.clear()

    async def _guard(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run ``work``. Put an error that it raises into the outbox, from which ``take`` raises it."""
        try:
            await work()
        except OmniError as error:
            self._outbox.put_nowait(error)
        except PeerGone:
            pass  # the connection cancels the handler's task
        except Exception as error:
            self._outbox.put_nowait(unexpected(error, where="a request over HTTP"))


# Answers as HTTP responses: server-sent events, raw audio, or outputs collected for a whole response

SSE_HEADERS: Final = (
    ("Content-Type", "text/event-stream; charset=utf-8"),
    ("Cache-Control", "no-cache"),
    # Keeps nginx and others from buffering the events.
    ("X-Accel-Buffering", "no"),
)

#: Events that are written together at most.
WRITE_BATCH_EVENTS: Final = 64
#: An event of this size ends its batch.
LARGE_EVENT_BYTES: Final = 1024


class EventEncoder(Protocol):
    """Encodes outputs as the data of server-sent events: as JSON objects, or as JSON text already."""

    def output(self, chunk: OutputChunk) -> Iterable[dict[str, Any] | bytes]:
        """Encode one output, as any number of events."""
        ...

    def final(self, chunk: FinalChunk) -> Iterator[dict[str, Any]]:
        """Encode the end of the answer."""
        ...


class AnswerSource(Protocol):
    """The source of an answer's messages: one session, several, or the output log of a Mode B session."""

    def take(self) -> ServerMessage | None:
        """Return the next message; None if there is none yet. Raises the error that ended the answer."""
        ...

    async def wait(self, *, idle_sec: float | None = None, meanwhile: EventBatch | None = None) -> bool:
        """Wait until there may be a message to take. Returns False after ``idle_sec`` seconds without one.

        ``meanwhile`` may write messages without waking the waiting task: to wake it costs as much as all other work on
        a token. An exception in ``meanwhile`` ends the wait, and is raised. Also raises what ``take`` raises.
        """
        ...

    def written(self) -> None:
        """Mark the messages taken so far as written to the client."""


async def next_message(source: AnswerSource) -> ServerMessage:
    """Wait for the next message and return it. Raises the error that ended the answer."""
    while (message := source.take()) is None:
        await source.wait()
    return message


class EventSink(Protocol):
    """The destination of server-sent events: an HttpExchange, or a wrapper of one."""

    def tell_error(self, error: OmniError) -> None:
        """Note, for the access log, an error that is sent as an event."""

    @property
    def head_sent(self) -> bool:
        """Whether the head was sent, so that an error can no longer have a status of its own."""
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

    async def end(self, parts: Sequence[bytes] = ()) -> None:
        """Write the last events, and end the response."""


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

    Events that are available together are written together. An error is raised if there is neither a head nor an event
    before it; otherwise it is sent as an ``event: error``, which ends the stream without ``[DONE]``.

    Args:
        done: Whether ``data: [DONE]`` ends the stream.
        head_at_start: Whether the 200 is sent when work starts, for input that is still arriving. Otherwise the head
            waits for the first output, so that failures before it get their status.
        head_by_heartbeat: Whether a heartbeat may send the head.
        heartbeat_sec: Seconds without an event after which a comment is sent, if the head was sent; 0 for never.
    """
    events = EventBatch(sink, source, encoder, head_at_start=head_at_start)
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
                    await sink.write(server_frames.HEARTBEAT_BLOCK)
        if done:
            events.waiting.append(server_frames.DONE)
    except OmniError as error:
        if not sink.head_sent and not events.waiting:
            raise
        sink.tell_error(error)
        events.waiting.append(error_event(error))
    await events.write(end=True)


class EventBatch:
    """The events of one answer that have been encoded and not written yet.

    ``write_now`` and ``write_available`` are called while the handler's task waits in ``AnswerSource.wait``. Neither
    method waits; an exception in one of them ends the wait of the handler's task.
    """

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
        """Encode messages that the source has, up to a full batch. Returns whether the source has no more for now."""
        waiting = self.waiting
        while not (self.complete or self.head_due):
            if len(waiting) >= WRITE_BATCH_EVENTS or (waiting and len(waiting[-1]) >= LARGE_EVENT_BYTES):
                return False
            match self._source.take():
                case OutputChunk() as message:
                    for event in self._encoder.output(message):
                        waiting.append(server_frames.event(event))
                case FinalChunk() as message:
                    waiting += map(server_frames.event, self._encoder.final(_checked(message)))
                    self.complete = True
                case ResponseStartedFrame() if self._head_at_start:
                    self.head_due = True
                case None:
                    return True
        return False

    def write_now(self, output: OutputChunk) -> bool:
        """Write ``output``, the next one. Returns False, and writes nothing, if the waiting task has to write it."""
        sink = self._sink
        if self.waiting or self.head_due or not (sink.writable or sink.startable):
            return False
        if data := b"".join(map(server_frames.event, self._encoder.output(output))):
            self._send(data)
        return True

    def write_available(self) -> bool:
        """Write the messages that the source has. Returns False if the waiting task has to write the rest."""
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
        """Send events without waiting. The first events are sent together with the head."""
        if self._sink.head_sent:
            self._sink.write_now(data)
        else:
            self._sink.start_now(200, SSE_HEADERS, filler=server_frames.HEARTBEAT_BLOCK, content=data)

    async def write(self, *, end: bool = False) -> None:
        """Write the batch, after the head if that has not been sent; with ``end``, end the response."""
        self.head_due = False
        if not self._sink.head_sent:
            await self._sink.start(200, SSE_HEADERS, filler=server_frames.HEARTBEAT_BLOCK)
        await (self._sink.end if end else self._sink.write_all)(self.waiting)
        self.waiting.clear()
        self._source.written()


async def respond_error_event(exchange: HttpExchange, error: OmniError) -> None:
    """Respond with 200 and a stream of one ``event: error``, for clients that read errors only from events."""
    exchange.tell_error(error)
    await exchange.start(200, SSE_HEADERS)
    await exchange.end([error_event(error)])


def error_event(error: OmniError) -> bytes:
    """Return an ``event: error``. Its fields are at the top level and in an object ``error``, as clients differ."""
    fields = error_object(error)
    return server_frames.event({**fields, "error": fields}, name="error")


async def write_raw_audio(
    exchange: HttpExchange, source: AnswerSource, media_type: str, *, head_at_start: bool
) -> None:
    """Write the bytes of the audio as they are produced. Raises the error that ends the answer.

    ``head_at_start`` is that of ``write_events``.
    """

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

    Yields a function that charges more bytes; it raises EngineOverloaded if the budget is exhausted.
    """
    share = Share(budget)
    try:
        yield lambda size: share.resize(share.size + size)
    finally:
        share.resize(0)


async def collect_answer(source: AnswerSource, charge: Callable[[int], None]) -> tuple[list[OutputChunk], FinalChunk]:
    """Wait for a whole answer. Returns its outputs and its final. Raises what ``source`` and ``charge`` raise."""
    outputs: list[OutputChunk] = []
    while True:
        match await next_message(source):
            case OutputChunk() as message:
                charge(message_cost(message))
                outputs.append(message)
            case FinalChunk() as message:
                return outputs, _checked(message)


def _checked(final: FinalChunk) -> FinalChunk:
    """Return ``final``. Raises EngineFailed if the answer was cancelled, which HTTP can only express as an error."""
    if not ended_normally(final):
        raise EngineFailed("the request ended before its answer was complete")
    return final


class MergedAnswers:
    """An AnswerSource that merges several others: their answers become the choices of one response.

    Each session has ``choices`` choices. They are renumbered in the order of the sessions: with 2 choices each, the
    second session has the numbers 2 and 3. Outputs arrive in any order. One final, with the sum of the usage, follows
    the last final of the sessions.
    """

    def __init__(self, sessions: Sequence[AnswerSource], *, choices: int) -> None:
        self._sessions = sessions
        self._choices = choices
        self._finals: dict[int, FinalChunk] = {}
        #: One task for the next message of each session without a final, by the index of the session.
        self._receiving: dict[int, asyncio.Task[ServerMessage]] = {}

    @asynccontextmanager
    async def receiving(self) -> AsyncIterator[None]:
        """Allow calls of ``wait`` within the block. The tasks that ``wait`` creates are cancelled at its end."""
        try:
            yield
        finally:
            for task in self._receiving.values():
                task.cancel()
            await asyncio.gather(*self._receiving.values(), return_exceptions=True)

    def take(self) -> ServerMessage | None:
        """Return the next message of any session; None if there is none yet. Raises the error of any session."""
        for index, task in tuple(self._receiving.items()):
            if task.done() and (message := self._received(index)) is not None:
                return message
        return None

    async def wait(self, *, idle_sec: float | None = None, meanwhile: EventBatch | None = None) -> bool:
        """Wait for a message of any session; see ``AnswerSource``."""
        for index, session in enumerate(self._sessions):
            if index not in self._finals and index not in self._receiving:
                self._receiving[index] = asyncio.create_task(next_message(session), name=f"prompt {index}")
        done, _ = await asyncio.wait(self._receiving.values(), timeout=idle_sec, return_when=asyncio.FIRST_COMPLETED)
        return bool(done)

    def _received(self, index: int) -> ServerMessage | None:
        """Return a session's message as a message of the merged answer; None for a final that is not the last."""
        message = self._receiving.pop(index).result()
        if isinstance(message, OutputChunk):
            return replace(message, choice=index * self._choices + message.choice)
        if not isinstance(message, FinalChunk):
            return message
        if message.finish_reason in (FinishReason.CANCELLED, FinishReason.ERROR):
            return message
        self._finals[index] = message
        return self._final(message) if len(self._finals) == len(self._sessions) else None

    def written(self) -> None:
        """Mark the messages of all sessions as written."""
        for session in self._sessions:
            session.written()

    def _final(self, last: FinalChunk) -> FinalChunk:
        """Return the merged final, with all finish reasons and the sum of the usage."""
        finals = [self._finals[index] for index in range(len(self._sessions))]
        reasons = [reason for final in finals for reason in self._reasons(final)]
        usage = reduce(_sum, (final.usage for final in finals))
        foreign = [reason for final in finals for reason in final.foreign_reasons or (None,) * self._choices]
        return dataclasses.replace(
            last,
            finish_reasons=tuple(reasons),
            foreign_reasons=tuple(foreign),
            warnings=tuple(warning for final in finals for warning in final.warnings),
            citations=tuple(
                replace(one, choice=index * self._choices + one.choice)
                for index, final in enumerate(finals)
                for one in final.citations
            ),
            usage=usage,
            times={},  # of one of several answers
        )

    def _reasons(self, final: FinalChunk) -> Sequence[FinishReason]:
        """Return the finish reason of each choice of a session."""
        reasons = final.finish_reasons
        return reasons if len(reasons) == self._choices else (final.finish_reason,) * self._choices

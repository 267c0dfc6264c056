"""Results of Mode B sessions over HTTP: as events that can be resumed, or as one JSON object."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterable, Sequence
from typing import Final

from omni_ws.audio.container import wav_header
from omni_ws.core.chunks import AudioEncoding, AudioFormat, FinalChunk, OutputChunk
from omni_ws.core.quota import ByteBudget
from omni_ws.errors import InvalidValue, OmniError
from omni_ws.service.conversation.messages import ServerMessage
from omni_ws.service.sessions.mode_b_session import ModeBSession, ResultForm
from omni_ws.service.sessions.output_log import LoggedMessage
from omni_ws.transport.http.exchange import HttpExchange, to_thread_if_large
from omni_ws.transport.routes.response_stream import SSE_HEADERS, PromptWriter, charging, write_events
from omni_ws.wire import server_frames as sse
from omni_ws.wire.openai_responses import ChatCompletion, ChatStream, ended_normally

#: Events encoded for a client that has them already, after which the event loop gets a pass.
_SKIPPED_AT_A_STRETCH: Final = 64


async def write_result_events(exchange: HttpExchange, session: ModeBSession, *, heartbeat_sec: float) -> None:
    """Write the result as events, all of them or those behind the ``Last-Event-ID`` of the request.

    Encoding is deterministic: each reader gets the same events with the same numbers.
    """
    events = NumberedEvents(exchange, _last_event_id(exchange))
    reader = ResultReader(session, events)
    await write_events(
        events,
        reader,
        ChatStream(session.form.options),
        head_at_start=True,
        head_by_heartbeat=True,
        heartbeat_sec=heartbeat_sec,
    )


async def write_result(exchange: HttpExchange, session: ModeBSession, *, budget: ByteBudget) -> None:
    """Respond with the result of a finished session as one object.

    Raises EngineOverloaded where ``budget`` has no room for it.
    """
    size = session.output.size
    with charging(budget) as charge:
        charge(2 * size)  # the outputs, and their base64
        # Taken now, since the session may be deleted or expire during the write.
        messages = session.output.messages
        await exchange.respond_json(200, await to_thread_if_large(size, lambda: result_object(session.form, messages)))


class ResultReader:
    """An AnswerSource over the output log of a session, from its beginning."""

    def __init__(self, session: ModeBSession, events: NumberedEvents) -> None:
        self._session = session
        self._events = events
        self._position = 0

    def take(self) -> ServerMessage | None:
        """Return the next message of the log. Raises the error that ended the session."""
        found = self._session.output.find(self._position)
        return None if found is None else self._read(*found)

    async def wait(self, *, idle_sec: float | None = None, meanwhile: PromptWriter | None = None) -> bool:
        """Wait for the log to grow; see ``AnswerSource``."""
        if self._position >= self._session.output.end:
            await self._events.caught_up()
        try:
            async with asyncio.timeout(idle_sec):
                found = await self._session.output.get(self._position)
        except TimeoutError:
            return False
        if found is None:
            raise self._session.failure()
        return True

    def _read(self, position: int, message: LoggedMessage) -> ServerMessage:
        self._position = position
        if isinstance(message, OmniError):
            raise copy.copy(message)
        if isinstance(message, FinalChunk) and not ended_normally(message):
            raise self._session.failure()
        return message

    def written(self) -> None:
        """Do nothing: only live answers report what is written."""


class NumberedEvents:
    """An EventSink that numbers events from 1 on and skips those that the client has received.

    The head of the response is deferred until an event follows: behind the last event the response is a 204, and an
    unknown ``Last-Event-ID`` is refused with a status.
    """

    def __init__(self, exchange: HttpExchange, last_event_id: int) -> None:
        self._exchange = exchange
        self._last_event_id = last_event_id
        self._number = 0
        #: Whether an event was written to this connection.
        self._written = False
        self._started = False

    @property
    def error(self) -> OmniError | None:
        return self._exchange.error

    @error.setter
    def error(self, error: OmniError | None) -> None:
        self._exchange.error = error

    @property
    def head_sent(self) -> bool:
        """Whether the response has started, on this connection or on an earlier one of the same client."""
        return self._started or self._exchange.head_sent

    async def start(self, status: int, headers: Iterable[tuple[str, str]] = (), *, filler: bytes = b"") -> None:
        """Defer the head until there is an event to write."""
        self._started = True

    async def write_all(self, parts: Sequence[bytes]) -> None:
        for part in parts:
            await self.write(part)

    @property
    def startable(self) -> bool:
        return False  # skipping has to yield to the event loop

    def start_now(
        self, status: int, headers: Iterable[tuple[str, str]] = (), *, filler: bytes = b"", content: bytes = b""
    ) -> None:
        raise RuntimeError("never startable")

    @property
    def writable(self) -> bool:
        return False

    def write_now(self, data: bytes) -> None:
        raise RuntimeError("never writable")

    async def write(self, data: bytes) -> None:
        """Write an event with its number, behind the head, unless the client has it; heartbeats have none."""
        if data != sse.HEARTBEAT_BLOCK:
            self._number += 1
            if self._number <= self._last_event_id:
                if self._number % _SKIPPED_AT_A_STRETCH == 0:
                    await asyncio.sleep(0)
                return
            self._written = True
            data = b"id: %d\n%b" % (self._number, data)
        elif self._written:
            data = sse.HEARTBEAT
        await self._send_head()
        await self._exchange.write(data)

    async def caught_up(self) -> None:
        """Send the head: all events so far are written, and more may follow."""
        if self._started:
            self._check_number()
            await self._send_head()

    async def end(self) -> None:
        """End the response; respond with 204 where no event followed ``Last-Event-ID``."""
        if self._exchange.head_sent:
            await self._exchange.end()
            return
        self._check_number()
        # Stops an EventSource from reconnecting (HTML standard, section 9.2.3).
        await self._exchange.respond(204)

    async def _send_head(self) -> None:
        if not self._exchange.head_sent:
            await self._exchange.start(200, SSE_HEADERS, filler=sse.HEARTBEAT_BLOCK)

    def _check_number(self) -> None:
        """Raise InvalidValue for a ``Last-Event-ID`` beyond the events that exist."""
        if self._number < self._last_event_id:
            self._started = False
            self._last_event_id = 0  # the error event itself must not be skipped
            raise InvalidValue("Last-Event-ID is greater than the last event of this answer", param="Last-Event-ID")


def _last_event_id(exchange: HttpExchange) -> int:
    """The number of the last event that the client has; 0 for none. Raises InvalidValue."""
    text = exchange.request.headers.get("last-event-id")
    if not text:
        return 0
    if not (text.isascii() and text.isdecimal() and len(text) < 16):
        raise InvalidValue("Last-Event-ID must be the id of an event of this answer", param="Last-Event-ID")
    return int(text)


def result_object(form: ResultForm, messages: Iterable[LoggedMessage]) -> dict[str, object]:
    """Build the JSON object of a finished session from all of its messages."""
    completion = ChatCompletion(form.options)
    final: FinalChunk | None = None
    for message in messages:
        match message:
            case OutputChunk():
                completion.output(message)
            case FinalChunk():
                final = message
    assert final is not None, "a finished session must have a final"
    return completion.final(final, audio=_file(completion.audio, form.audio))


def _file(audio: bytes, target: AudioFormat) -> bytes:
    """Turn an audio stream into a file: the header of a WAV stream does not know the length."""
    if target.encoding is not AudioEncoding.WAV or not audio:
        return audio
    header = wav_header(sample_rate=target.sample_rate, channels=target.channels, data_bytes=None)
    samples = audio.removeprefix(header)
    return wav_header(sample_rate=target.sample_rate, channels=target.channels, data_bytes=len(samples)) + samples

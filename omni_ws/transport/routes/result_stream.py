"""The answer of a registered session over HTTP: as events that can be resumed, or whole."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from omni_ws.audio.wav import wav_header
from omni_ws.core.audio_format import AudioEncoding, AudioFormat
from omni_ws.core.output import FinalChunk, OutputChunk
from omni_ws.core.quota import ByteBudget
from omni_ws.errors import InvalidValue, OmniError
from omni_ws.service.conversation.messages import ServerMessage
from omni_ws.service.sessions.output_log import AnswerMessage
from omni_ws.service.sessions.registered import RegisteredSession, ResultForm
from omni_ws.transport.http.exchange import HttpExchange
from omni_ws.transport.http.json_body import to_thread_if_large
from omni_ws.transport.routes.event_output import SSE_HEADERS, held_answer, write_events
from omni_ws.wire import sse
from omni_ws.wire.openai_chat_response import ChatCompletion, ChatStream, finished_well

#: Events that are made again for a client that has them, between two looks at the other connections.
_SKIPPED_AT_A_STRETCH: Final = 64


async def write_answer_events(exchange: HttpExchange, session: RegisteredSession, *, heartbeat_sec: float) -> None:
    """From the beginning, or after the event that ``Last-Event-ID`` names.

    Made again from what was said, an answer has the same events each time.
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


async def write_whole_answer(exchange: HttpExchange, session: RegisteredSession, *, budget: ByteBudget) -> None:
    """The session must be finished. Raises EngineOverloaded where the server holds too much to write it now."""
    size = session.answer.size
    with held_answer(budget) as hold:
        hold(2 * size)  # gathered, and in base64
        # Taken now: the session may be deleted, or expire, while it is written.
        messages = session.answer.messages
        await exchange.respond_json(200, await to_thread_if_large(size, lambda: whole_answer(session.form, messages)))


class ResultReader:
    """Reads what a session says from its beginning, for a writer of events."""

    def __init__(self, session: RegisteredSession, events: NumberedEvents) -> None:
        self._session = session
        self._events = events
        self._position = 0

    def take(self) -> ServerMessage | None:
        """Raises why there is no whole answer."""
        found = self._session.answer.find(self._position)
        return None if found is None else self._read(*found)

    async def wait(self, *, idle_sec: float | None = None, meanwhile: Callable[[], bool] | None = None) -> bool:
        """See ``Answering``. Raises why there is no whole answer."""
        if self._position >= self._session.answer.end:
            await self._events.caught_up()
        try:
            async with asyncio.timeout(idle_sec):
                found = await self._session.answer.get(self._position)
        except TimeoutError:
            return False
        if found is None:
            raise self._session.failure()
        return True

    def _read(self, position: int, message: AnswerMessage) -> ServerMessage:
        self._position = position
        if isinstance(message, OmniError):
            raise copy.copy(message)
        if isinstance(message, FinalChunk) and not finished_well(message):
            raise self._session.failure()
        return message

    def written(self) -> None:
        """Nobody counts how often an answer is read."""


class NumberedEvents:
    """Gives each event its number, from 1 on, and leaves out those that the client has: an EventSink."""

    def __init__(self, exchange: HttpExchange, last_event_id: int) -> None:
        self._exchange = exchange
        self._last_event_id = last_event_id
        self._number = 0
        self._started = False

    @property
    def error(self) -> OmniError | None:
        return self._exchange.error

    @error.setter
    def error(self, error: OmniError | None) -> None:
        self._exchange.error = error

    @property
    def head_sent(self) -> bool:
        """Whether the answer began, for this client or for the one that it was before."""
        return self._started or self._exchange.head_sent

    async def start(self, status: int, headers: Iterable[tuple[str, str]] = (), *, filler: bytes = b"") -> None:
        """The head waits until it is known that there is anything to say."""
        self._started = True

    async def write_all(self, parts: Sequence[bytes]) -> None:
        for part in parts:
            await self.write(part)

    def try_write(self, parts: Sequence[bytes]) -> bool:
        return False  # what the client has is passed over with pauses

    async def write(self, data: bytes) -> None:
        if data != sse.HEARTBEAT:
            self._number += 1
            if self._number <= self._last_event_id:
                if self._number % _SKIPPED_AT_A_STRETCH == 0:
                    await asyncio.sleep(0)
                return
            data = b"id: %d\n%b" % (self._number, data)
        await self._send_head()
        await self._exchange.write(data)

    async def caught_up(self) -> None:
        """Everything was written that there is so far."""
        if self._started:
            self._check_number()
            await self._send_head()

    async def end(self) -> None:
        if self._exchange.head_sent:
            await self._exchange.end()
            return
        self._check_number()
        # What an EventSource that comes back after the end understands as: do not come back.
        await self._exchange.respond(204)

    async def _send_head(self) -> None:
        if not self._exchange.head_sent:
            await self._exchange.start(200, SSE_HEADERS, filler=sse.HEARTBEAT)

    def _check_number(self) -> None:
        if self._number < self._last_event_id:
            self._started = False
            self._last_event_id = 0  # which is to be told, and not passed over
            raise InvalidValue("there was no such event", param="Last-Event-ID")


def _last_event_id(exchange: HttpExchange) -> int:
    text = exchange.request.headers.get("last-event-id")
    if not text:
        return 0
    if not (text.isascii() and text.isdecimal() and len(text) < 16):
        raise InvalidValue("the id of an event of this answer", param="Last-Event-ID")
    return int(text)


def whole_answer(form: ResultForm, messages: Iterable[AnswerMessage]) -> dict[str, object]:
    """``messages`` are all of a session that is finished."""
    completion = ChatCompletion(form.options)
    final: FinalChunk | None = None
    for message in messages:
        match message:
            case OutputChunk():
                completion.output(message)
            case FinalChunk():
                final = message
    assert final is not None, "a session is finished by its final"
    return completion.final(final, audio=_file(completion.audio, form.audio))


def _file(audio: bytes, target: AudioFormat) -> bytes:
    """The stream of audio as a file: a wav stream does not know its length when it begins."""
    if target.encoding is not AudioEncoding.WAV or not audio:
        return audio
    header = wav_header(sample_rate=target.sample_rate, channels=target.channels, data_bytes=None)
    samples = audio.removeprefix(header)
    return wav_header(sample_rate=target.sample_rate, channels=target.channels, data_bytes=len(samples)) + samples

"""RegisteredSession: one conversation of one request whose input and answer outlive the connections that carry them."""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from omni_ws.core.audio_format import AudioFormat
from omni_ws.core.chunks import FinishReason, InputChunk
from omni_ws.core.output import FinalChunk, OutputChunk
from omni_ws.core.session import SessionState
from omni_ws.errors import (
    ORDERLY_ENDS,
    EngineFailed,
    InvalidRequest,
    OmniError,
    PayloadTooLarge,
    RateLimited,
    ReorderWindowExceeded,
    SessionConflict,
    SessionTimeout,
)
from omni_ws.service.answer_journal import AnswerJournal
from omni_ws.service.conversation import Conversation
from omni_ws.service.input_progress import InputProgress
from omni_ws.wire.append_body import BodyChunk
from omni_ws.wire.frames import RefusedChunk
from omni_ws.wire.openai_answer import ChatOptions, finished_well
from omni_ws.wire.server_frames import ResponseStarted

#: Who reads the answer of one session at a time.
MAX_READERS: Final = 16

#: Chunks of one body that are taken between two looks at the other connections.
_CHUNKS_AT_A_STRETCH: Final = 16

#: FINISHED means that the answer is complete. What has ended is kept for a while, and expires then.
_TRANSITIONS: Final = {
    SessionState.OPEN: frozenset(set(SessionState) - {SessionState.OPEN, SessionState.FINISHED}),
    SessionState.STARTED: frozenset(set(SessionState) - {SessionState.OPEN, SessionState.STARTED}),
    SessionState.FINISHED: frozenset({SessionState.CANCELLED, SessionState.EXPIRED}),
    SessionState.FAILED: frozenset({SessionState.CANCELLED, SessionState.EXPIRED}),
    SessionState.CANCELLED: frozenset({SessionState.EXPIRED}),
    SessionState.EXPIRED: frozenset[SessionState](),
}


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """How the client that opened a session wants its answer: ``events`` where a reader does not say otherwise."""

    options: ChatOptions
    audio: AudioFormat
    events: bool


class RegisteredSession:
    """Runs from ``begin`` to its end without any reader; ``answer`` is what readers read."""

    def __init__(
        self, session_id: str, conversation: Conversation, answer: AnswerJournal, form: AnswerForm, *, created_at: int
    ) -> None:
        self.id = session_id
        self.created_at = created_at
        self.form = form
        self.answer = answer
        self.state = SessionState.OPEN
        #: Whether work has started, ever.
        self.started = False
        self.error: OmniError | None = None
        #: Set once a final state is reached.
        self.ended = asyncio.Event()
        #: Until when what is left of it is kept, on the loop's clock; set by the registry.
        self.kept_until: float | None = None
        #: None when the work is over.
        self._conversation: Conversation | None = conversation
        self._progress = InputProgress()
        #: Whether the chunks come without numbers.
        self._unnumbered = False
        self._readers = 0
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        #: Until when a gap may be open, once the end of the input was announced.
        self._gap_deadline = math.inf
        self._room = asyncio.Event()
        #: Bodies that are on their way, or wait for the engine.
        self._held_up = 0
        self._place = ExitStack()
        self._on_end: Callable[[RegisteredSession], None] = _nothing
        self._task: asyncio.Task[None] | None = None

    def begin(self, place: ExitStack, on_end: Callable[[RegisteredSession], None]) -> None:
        """``place`` is given back when the work is over; ``on_end`` is called whenever a final state is reached."""
        conversation = self._conversation
        assert conversation is not None
        self._place, self._on_end = place, on_end
        stream = conversation.stream
        # Chunks come in requests of their own, any of which may be late, or repeated: see _end_announced.
        stream.limits = replace(stream.limits, reorder_timeout=math.inf)
        conversation.outbox.on_ready = partial(self._collect, conversation)
        conversation.on_input_room = self._room.set
        conversation.on_timer = self._arm
        self._task = asyncio.create_task(conversation.run(), name=f"session {self.id}")
        self._task.add_done_callback(partial(self._wind_up, conversation))
        self._arm()

    # what is asked of it

    @property
    def live(self) -> bool:
        return self.state in (SessionState.OPEN, SessionState.STARTED)

    @property
    def expired(self) -> bool:
        return self.state is SessionState.EXPIRED

    @property
    def has_input(self) -> bool:
        """Whether any chunk has come."""
        progress = self.progress
        return bool(progress.next_sequence_id or progress.buffered_chunks)

    @property
    def progress(self) -> InputProgress:
        conversation = self._conversation
        if not self.live or conversation is None:
            return self._progress
        stream = conversation.stream
        ack = stream.take_ack()  # which HTTP has no other words for
        return InputProgress(
            next_sequence_id=ack.next_sequence_id,
            buffered_chunks=ack.buffered_chunks,
            received_bytes=ack.received_bytes,
            duplicates=stream.duplicates,
            ended=stream.opened and stream.current is None,
        )

    @property
    def expires_at(self) -> float | None:
        """On the loop's clock; None while an answer is owed."""
        if self.live and self._conversation is not None:
            self._conversation.stream.take_ack()  # which would have a time of its own
            return self._get_timer(self._conversation)
        return self.kept_until

    def failure(self) -> OmniError:
        """Why there is no whole answer. A copy, since whoever raises an exception changes it."""
        return copy.copy(self.error) if self.error is not None else SessionConflict("the session was cancelled")

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Raises RateLimited where enough others read already."""
        if self._readers >= MAX_READERS:
            raise RateLimited(f"{MAX_READERS} readers wait for this answer already", retry_after_ms=1000)
        self._readers += 1
        try:
            yield
        finally:
            self._readers -= 1

    # input

    async def feed(self, chunks: Iterable[BodyChunk]) -> None:
        """Takes chunks as if each had come alone, waiting while the engine is behind.

        Raises what the first of them is refused for; the others are taken all the same, as far as the session lives.
        """
        refusal: OmniError | None = None
        for index, chunk in enumerate(chunks, 1):
            if self.error is not None and not self.live:
                raise self.failure()
            try:
                self._take(chunk)
            except OmniError as error:
                error.param = chunk.name(error.param)
                if isinstance(error, PayloadTooLarge | ReorderWindowExceeded):
                    self.fail(error)
                if not isinstance(error, InvalidRequest):
                    raise
                refusal = refusal or error
            self._input_taken()
            if index % _CHUNKS_AT_A_STRETCH == 0:
                await asyncio.sleep(0)  # the others share the loop, and the engine cannot fall behind before it begins
            await self._input_room()
        if refusal is not None:
            raise refusal

    def finish(self) -> None:
        """The end of the input; where a gap is open, behind it. Idempotent, also when everything is over."""
        conversation = self._conversation
        if not self.live or conversation is None:
            self._progress.ended = True
            return
        if conversation.stream.opened or conversation.stream.has_gap:
            conversation.finish()
        else:
            # Nothing at all came: a request with an end and no input says so by itself.
            conversation.receive_chunk(InputChunk.end())
        self._end_announced(conversation)
        self._input_taken()

    @contextmanager
    def incoming(self) -> Iterator[None]:
        """While a body is on its way the client is not silent, however long that takes."""
        self._held_up += 1
        try:
            yield
        finally:
            self._held_up -= 1
            if self.live and self._conversation is not None:
                self._conversation.stream.touch(now=self._loop.time())

    def _take(self, chunk: BodyChunk) -> None:
        conversation = self._conversation
        if not self.live or conversation is None:
            self._progress.take_late(chunk.content)
            return
        match chunk.content:
            case RefusedChunk(sequence_id=sequence_id, error=error):
                self._use_up(conversation, sequence_id)
                raise error
            case InputChunk(sequence_id=number) as content:
                try:
                    conversation.configuration.check_chunk(content)
                except InvalidRequest:
                    self._use_up(conversation, number)
                    raise
                conversation.receive_chunk(content)
                self._unnumbered = number is None
                if content.end_of_input:
                    self._end_announced(conversation)
            case error:
                raise error

    def _end_announced(self, conversation: Conversation) -> None:
        if conversation.stream.has_gap and self._gap_deadline == math.inf:
            self._gap_deadline = self._loop.time() + conversation.limits.stream.reorder_timeout

    def _use_up(self, conversation: Conversation, number: int | None) -> None:
        """The number of a chunk that was refused, unless chunks have none here, and so no gaps."""
        if number is not None and not self._unnumbered:
            conversation.refuse_chunk(number)

    def _input_taken(self) -> None:
        if not self.live or self._conversation is None:
            return
        stream = self._conversation.stream
        current = stream.current
        # Told at once, before the engine has said anything; the end of an input starts what has not started.
        if stream.received_bytes if current is None else current.state is SessionState.STARTED:
            self._start()
        stream.take_ack()
        self._arm()

    async def _input_room(self) -> None:
        self._held_up += 1
        try:
            while self.live and self._conversation is not None and self._conversation.input_full:
                self._room.clear()
                await self._room.wait()
        finally:
            self._held_up -= 1

    # the end

    def fail(self, error: OmniError) -> None:
        """End it because of ``error``, and hold nothing of it any more."""
        if self.live and self._conversation is not None:
            self._conversation.finish_reason_at_end = FinishReason.ERROR
            self._stop(SessionState.FAILED, error)

    def cancel(self) -> None:
        """Idempotent. What has ended already loses its answer."""
        if self.state is not SessionState.CANCELLED:
            self._stop(SessionState.CANCELLED, None)

    def expire(self) -> None:
        """It was kept long enough."""
        self._stop(SessionState.EXPIRED, SessionTimeout("the answer is not kept any longer"))

    async def over(self) -> None:
        """Waits until the engine, too, has let go of it."""
        if self._task is not None:
            await asyncio.wait([self._task])

    def _stop(self, state: SessionState, error: OmniError | None) -> None:
        was_live = self.live
        self.error = error
        self.answer.clear()
        if was_live and error is not None and not isinstance(error, ORDERLY_ENDS):
            self.answer.remember(error)
        self._set_state(state)
        if was_live and self._task is not None:
            self._task.cancel()

    def _start(self) -> None:
        if self.state is SessionState.OPEN:
            self.started = True
            self._set_state(SessionState.STARTED)

    def _set_state(self, state: SessionState) -> None:
        if state not in _TRANSITIONS[self.state]:
            raise RuntimeError(f"illegal transition from {self.state.name} to {state.name}")
        progress = self.progress
        self.state = state
        if not self.live:
            self._progress = replace(progress, buffered_chunks=0, closed=state is not SessionState.FINISHED)
            self.ended.set()
            self._room.set()
            self._on_end(self)

    # work

    def _wind_up(self, conversation: Conversation, task: asyncio.Task[None]) -> None:
        """Runs when the task is done, also when it was cancelled before it began."""
        if not task.cancelled():
            task.exception()  # which was told
        conversation.end()
        if self.live:
            self._answered(conversation, None)
        if self._timer is not None:
            self._timer.cancel()
        self._conversation = None
        self.answer.close()
        self._place.close()

    def _collect(self, conversation: Conversation) -> None:
        """Takes over what the conversation says, as it says it."""
        while (message := conversation.outbox.take()) is not None:
            match message:
                case FinalChunk() if self.live:
                    self.answer.append(message)
                    self._answered(conversation, message)
                case FinalChunk():
                    self.answer.remember(message)
                case ResponseStarted() | OutputChunk() | OmniError() if self.live:
                    try:
                        self._hear(message)
                    except OmniError as error:
                        self.fail(error)

    def _hear(self, message: ResponseStarted | OutputChunk | OmniError) -> None:
        self.answer.append(message)
        if isinstance(message, ResponseStarted):
            self._start()
        elif isinstance(message, OmniError):
            self.error = message

    def _answered(self, conversation: Conversation, final: FinalChunk | None) -> None:
        """The work is done, for better or worse."""
        conversation.close()
        self._place.close()
        if final is not None and finished_well(final):
            self._set_state(SessionState.FINISHED)
            return
        self.error = self.error or EngineFailed("the request was ended before its answer was complete")
        self._set_state(SessionState.FAILED)

    # time

    def _get_timer(self, conversation: Conversation) -> float | None:
        gap = self._gap_deadline if conversation.stream.has_gap else math.inf
        when = min(gap, conversation.get_timer() or math.inf)
        return None if when == math.inf else when

    def _arm(self) -> None:
        if not self.live or self._conversation is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        when = self._get_timer(self._conversation)
        self._timer = None if when is None else self._loop.call_at(when, self._on_timer, self._conversation, when)

    def _on_timer(self, conversation: Conversation, when: float) -> None:
        # Loops round: a timer that fires a little early would be armed again and again until its time has come.
        now = max(self._loop.time(), when)
        if self._held_up:
            conversation.stream.touch(now=now)  # the engine is behind, and not the client
        try:
            if conversation.stream.has_gap and now >= self._gap_deadline:
                raise conversation.stream.gap_error()
            conversation.handle_timer(now)
        except SessionTimeout as error:
            self._stop(SessionState.EXPIRED, error)
        except OmniError as error:
            self.fail(error)
        else:
            conversation.stream.take_ack()
            self._arm()


def _nothing(session: RegisteredSession) -> None:
    pass

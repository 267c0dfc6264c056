"""RegisteredSession: one conversation of one request whose input and answer outlive the connections that carry them."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from omni_ws.core.audio_format import AudioFormat
from omni_ws.core.chunks import FinishReason, InputChunk
from omni_ws.core.output import AnyOutput, FinalChunk, OutputChunk
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
from omni_ws.service.conversation.conversation import Conversation
from omni_ws.service.observing.observer import OutputWritten
from omni_ws.service.sessions.chunk_intake import ChunkIntake
from omni_ws.service.sessions.input_progress import InputProgress
from omni_ws.service.sessions.output_log import OutputLog
from omni_ws.wire.append_body import BodyChunk
from omni_ws.wire.openai_chat_response import ChatOptions, ended_normally
from omni_ws.wire.server_frames import ResponseStartedFrame

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
class ResultForm:
    """How the client that opened a session wants its answer: ``events`` where a reader does not say otherwise."""

    options: ChatOptions
    audio: AudioFormat
    events: bool


class RegisteredSession:
    """Runs from ``begin`` to its end without any reader; ``answer`` is what readers read."""

    def __init__(
        self, session_id: str, conversation: Conversation, answer: OutputLog, form: ResultForm, *, created_at: int
    ) -> None:
        self.id = session_id
        self.created_at = created_at
        self.form = form
        self.answer = answer
        self.state = SessionState.OPEN
        #: Whether work has started, ever.
        self.started = False
        self.error: OmniError | None = None
        self.expired_because = "the session has expired"
        #: Set once a final state is reached.
        self.ended = asyncio.Event()
        #: Until when what is left of it is kept, on the loop's clock; set by the registry.
        self.kept_until: float | None = None
        #: Both let go of when the work is over, with all that they hold; of no use from the session's end on.
        self._conversation: Conversation | None = conversation
        self._intake = ChunkIntake(conversation, now=asyncio.get_running_loop().time)
        self._progress = InputProgress()
        self._readers = 0
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
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
        conversation.attach(self)
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
    def has_content(self) -> bool:
        """Whether any byte of input has come."""
        return self._intake.has_content if self.live else self._progress.received_bytes > 0

    @property
    def progress(self) -> InputProgress:
        return self._intake.progress if self.live else self._progress

    @property
    def expires_at(self) -> float | None:
        """On the loop's clock; None while an answer is owed."""
        return self._intake.get_timer() if self.live else self.kept_until

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
            bare_end = isinstance(chunk.content, InputChunk) and chunk.content.is_bare_end
            if self.error is not None and not self.live and not bare_end:
                raise self.failure()
            try:
                if self.live:
                    self._intake.take(chunk.content)
                else:
                    self._progress.take_late(chunk.content)
            except OmniError as error:
                if error.sequence_id in (None, _number(chunk)):
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
        await self.settled()
        if refusal is not None:
            raise refusal

    async def settled(self) -> None:
        """Waits for the end of a request that was refused, which is then no secret: it comes in a moment."""
        if self.live and self._intake.refused:
            await self.ended.wait()

    def finish(self) -> None:
        """The end of the input; where a gap is open, behind it. Idempotent, also when everything is over."""
        if self.live:
            try:
                self._intake.finish()
            finally:
                self._input_taken()
        else:
            self._progress.ended = True

    @contextmanager
    def incoming(self) -> Iterator[None]:
        """While a body is on its way the client is not silent, however long that takes."""
        self._held_up += 1
        try:
            yield
        finally:
            self._held_up -= 1
            if self.live:
                self._intake.touch()

    def _input_taken(self) -> None:
        if self.live:
            if self._intake.started:
                self._start()
            self._arm()

    async def _input_room(self) -> None:
        self._held_up += 1
        try:
            while self.live and self._intake.full:
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

    def make_room(self) -> None:
        """It has had no input, and another needs its place, which is free at once."""
        self.expired_because = "all sessions were taken, and this one, without any input yet, had to make room"
        self._stop(SessionState.EXPIRED, SessionTimeout(self.expired_because))
        self._place.close()

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
        conversation.observed.ended()
        if self.live:
            self._answered(conversation, None)
        if self._timer is not None:
            self._timer.cancel()
        self._conversation = None
        del self._intake
        self._task = None  # a task that was cancelled keeps its traceback
        self.answer.close()
        self._place.close()

    # the conversation's owner

    def output_ready(self) -> None:
        """Moves the conversation's messages to the output log as they are made."""
        conversation = self._conversation
        assert conversation is not None
        while (message := conversation.outbox.take()) is not None:
            if isinstance(message, AnyOutput):
                conversation.observed.notify(OutputWritten(message))  # from here on whoever asks may read it
            match message:
                case FinalChunk() if self.live:
                    self.answer.append(message)
                    self._answered(conversation, message)
                case FinalChunk():
                    self.answer.remember(message)
                case ResponseStartedFrame() | OutputChunk() | OmniError() if self.live:
                    try:
                        self._hear(message)
                    except OmniError as error:
                        self.fail(error)

    def _hear(self, message: ResponseStartedFrame | OutputChunk | OmniError) -> None:
        self.answer.append(message)
        if isinstance(message, ResponseStartedFrame):
            self._start()
        elif isinstance(message, OmniError):
            self.error = message

    def _answered(self, conversation: Conversation, final: FinalChunk | None) -> None:
        """The work is done, for better or worse."""
        conversation.close()
        self._place.close()
        if final is not None and ended_normally(final):
            self._set_state(SessionState.FINISHED)
            return
        self.error = self.error or EngineFailed("the request was ended before its answer was complete")
        self._set_state(SessionState.FAILED)

    def output_has_room(self) -> None:
        pass  # no output ever waits here

    def input_may_continue(self) -> None:
        self._room.set()

    # time

    def timer_changed(self) -> None:
        self._arm()

    def _arm(self) -> None:
        if not self.live:
            return
        if self._timer is not None:
            self._timer.cancel()
        when = self._intake.get_timer()
        self._timer = None if when is None else self._loop.call_at(when, self._on_timer, when)

    def _on_timer(self, when: float) -> None:
        if self._held_up:
            self._intake.touch()  # it is not the client that is silent
        try:
            # Loops round: a timer that fires a little early would be armed again and again until its time has come.
            self._intake.handle_timer(max(self._loop.time(), when))
        except SessionTimeout as error:
            self._stop(SessionState.EXPIRED, error)
        except OmniError as error:
            self.fail(error)
        else:
            self._arm()


def _nothing(session: RegisteredSession) -> None:
    pass


def _number(chunk: BodyChunk) -> int | None:
    return None if isinstance(chunk.content, InvalidRequest) else chunk.content.sequence_id

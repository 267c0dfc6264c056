"""ModeBSession: a Mode B session, whose input and result outlive the HTTP connections that carry them."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from omni_ws.core.chunks import AnyOutput, AudioFormat, FinalChunk, FinishReason, InputChunk, OutputChunk
from omni_ws.core.request_input import SessionState
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
from omni_ws.service.conversation.messages import RequestWarning
from omni_ws.service.observing.observer import OutputWritten
from omni_ws.service.sessions.admission import WHY_EVICTED, session_too_long
from omni_ws.service.sessions.mode_b_intake import ChunkIntake
from omni_ws.service.sessions.mode_b_progress import InputProgress
from omni_ws.service.sessions.output_log import OutputLog
from omni_ws.wire.openai_responses import ChatOptions, ended_normally
from omni_ws.wire.server_frames import ResponseStartedFrame
from omni_ws.wire.streaming_body import BodyChunk

#: How many readers may wait for the result of one session.
MAX_READERS: Final = 16

#: How many chunks of a body are accepted before other tasks have a turn on the event loop.
_CHUNKS_AT_A_TIME: Final = 16

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
    """The form in which the client that opened a session wants its result.

    ``events`` says whether readers receive an event stream unless they ask for one or the other.
    """

    options: ChatOptions
    audio: AudioFormat
    events: bool


class ModeBSession:
    """Runs a conversation of a single request, with or without readers, and stores its output.

    ``slot`` is its slot in admission, released when the work on it is done. ``on_end`` is called in each change to a
    state other than OPEN and STARTED. Only ``_set_state`` changes the state::

        OPEN -> STARTED             work on the request begins
        STARTED -> FINISHED         the answer is complete
        OPEN, STARTED -> FAILED     the request fails, or the server ends the session
        OPEN, STARTED, FINISHED, FAILED -> CANCELLED    the client cancels the session, or deletes its result
        OPEN, STARTED -> EXPIRED    the client is silent for too long, or an empty session loses its slot to another
        FINISHED, FAILED, CANCELLED -> EXPIRED          the result is no longer kept

    OPEN and STARTED are *live*: the session takes input. A session that ends with its answer keeps its output, also of
    an answer that failed; ``fail``, ``cancel``, ``expire`` and ``evict`` clear it.
    """

    def __init__(
        self,
        session_id: str,
        conversation: Conversation,
        output: OutputLog,
        form: ResultForm,
        *,
        created_at: int,
        slot: ExitStack,
        on_end: Callable[[ModeBSession], None],
    ) -> None:
        self.id = session_id
        #: Unix time in seconds.
        self.created_at = created_at
        self.form = form
        self.output = output
        self.state = SessionState.OPEN
        #: Whether work on the request ever started.
        self.started = False
        #: Why the result is incomplete.
        self.error: OmniError | None = None
        self.expired_because = "the session has expired"
        #: Set while the session is not live.
        self.ended = asyncio.Event()
        #: When the registry expires or forgets the ended session, on the loop's clock; None once it is forgotten.
        self.kept_until: float | None = None
        #: Dropped when the work is done, together with ``_intake``, since they hold memory.
        self._conversation: Conversation | None = conversation
        self._intake = ChunkIntake(conversation, now=asyncio.get_running_loop().time)
        #: Replaces ``_intake`` once the session has ended.
        self._progress = InputProgress()
        self._readers = 0
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._length_timer: asyncio.TimerHandle | None = None
        self._input_room = asyncio.Event()
        #: Bodies that are being received, or wait for the engine.
        self._bodies = 0
        #: Those of them that wait for room.
        self._waiting_bodies = 0
        self._slot = slot
        self._on_end = on_end
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Start to answer the request."""
        conversation = self._conversation
        assert conversation is not None
        conversation.attach(self)
        self._task = asyncio.create_task(conversation.run(), name=f"session {self.id}")
        self._task.add_done_callback(partial(self._work_done, conversation))
        self._arm()

    # status

    @property
    def live(self) -> bool:
        """Whether the session has not ended."""
        return self.state in (SessionState.OPEN, SessionState.STARTED)

    @property
    def expired(self) -> bool:
        return self.state is SessionState.EXPIRED

    @property
    def has_input(self) -> bool:
        """Whether any chunk has arrived."""
        progress = self.progress
        return bool(progress.next_sequence_id or progress.buffered_chunks)

    @property
    def has_content(self) -> bool:
        """Whether any byte of input has arrived."""
        return self._intake.has_content if self.live else self._progress.received_bytes > 0

    @property
    def progress(self) -> InputProgress:
        return self._intake.progress if self.live else self._progress

    @property
    def expires_at(self) -> float | None:
        """When the session or its result expires, on the loop's clock; None while the engine is answering."""
        return self._intake.get_timer() if self.live else self.kept_until

    def failure(self) -> OmniError:
        """Return the error to raise to a reader of an incomplete result: a copy, since raising changes an exception."""
        return copy.copy(self.error) if self.error is not None else SessionConflict("the session was cancelled")

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Count a reader for the block. Raises RateLimited beyond ``MAX_READERS``."""
        if self._readers >= MAX_READERS:
            raise RateLimited(f"at most {MAX_READERS} readers per answer", retry_after_ms=1000)
        self._readers += 1
        try:
            yield
        finally:
            self._readers -= 1

    # input

    async def feed(self, chunks: Iterable[BodyChunk]) -> None:
        """Accept the chunks of a body one by one, waiting while the engine is behind.

        A chunk that is refused does not affect the others; the first refusal is raised at the end. Raises at once an
        error that ends the session or that concerns its state.
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
            self._input_accepted()
            if index % _CHUNKS_AT_A_TIME == 0:
                await asyncio.sleep(0)  # also lets the engine begin: before that, no input counts as waiting for it
            await self._wait_for_room()
        await self.wait_if_refused()
        if refusal is not None:
            raise refusal

    async def wait_if_refused(self) -> None:
        """Wait for the end of the session if its request was refused, so that the response can report the failure."""
        if self.live and self._intake.refused:
            await self.ended.wait()

    def finish(self) -> None:
        """End the input, behind the gap if one is open. Idempotent, and allowed after the end of the session."""
        if self.live:
            try:
                self._intake.finish()
            finally:
                self._input_accepted()
        else:
            self._progress.ended = True

    @contextmanager
    def incoming(self) -> Iterator[None]:
        """Suspend the session time-out for the block, in which a body is received and its chunks are fed.

        A body without a chunk does not restart the time-out, which may end the session after the block.
        """
        self._bodies += 1
        self._suspend_timeout()
        try:
            yield
        finally:
            self._bodies -= 1
            self._suspend_timeout()

    def _touch(self) -> None:
        if self.live:
            self._intake.touch()

    def _suspend_timeout(self) -> None:
        if self.live:
            self._intake.suspend_timeout(suspended=self._bodies > 0)
            self._arm()

    def _input_accepted(self) -> None:
        if self.live:
            if self._intake.started:
                self._start()
            self._arm()

    async def _wait_for_room(self) -> None:
        if not self._is_full():
            return
        with self.incoming():
            self._hold_clocks(held=True)
            try:
                while self._is_full():
                    self._input_room.clear()
                    await self._input_room.wait()
            finally:
                self._hold_clocks(held=False)
            self._touch()  # the client was not silent: it had to wait

    def _hold_clocks(self, *, held: bool) -> None:
        """The time of a gap stands still while bodies that may fill it wait for room."""
        self._waiting_bodies += 1 if held else -1
        if self.live:
            self._intake.hold_clocks(held=self._waiting_bodies > 0)
            self._arm()

    def _is_full(self) -> bool:
        return self.live and self._intake.full

    # the end

    def limit(self, seconds: float) -> None:
        """Let the session fail if it is still live after so many seconds."""
        self._length_timer = self._loop.call_later(seconds, self.fail, session_too_long(seconds))

    def fail(self, error: OmniError) -> None:
        """End a live session with ``error`` and clear its output."""
        if self.live and self._conversation is not None:
            self._conversation.finish_reason_at_end = FinishReason.ERROR
            self._stop(SessionState.FAILED, error)

    def cancel(self) -> None:
        """End a live session, or delete a stored result. Idempotent."""
        if self.state is not SessionState.CANCELLED:
            self._stop(SessionState.CANCELLED, None)

    def expire(self) -> None:
        """Delete a stored result that is no longer kept."""
        self._stop(SessionState.EXPIRED, SessionTimeout("the stored answer has expired"))

    def evict(self) -> None:
        """End a session without input, and release its slot at once for another."""
        self.expired_because = WHY_EVICTED
        self._stop(SessionState.EXPIRED, SessionTimeout(self.expired_because))
        self._slot.close()

    async def wait_released(self) -> None:
        """Wait until the engine has released an ended session."""
        if self._task is not None:
            await asyncio.wait([self._task])

    def _stop(self, state: SessionState, error: OmniError | None) -> None:
        was_live = self.live
        self.error = error
        self.output.clear()
        if was_live and error is not None and not isinstance(error, ORDERLY_ENDS):
            self.output.append_end(error)
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
            self._input_room.set()
            if self._length_timer is not None:
                self._length_timer.cancel()
            self._on_end(self)

    # the work

    def _work_done(self, conversation: Conversation, task: asyncio.Task[None]) -> None:
        """Release everything when the task is done, which includes a task cancelled before it began."""
        if not task.cancelled():
            task.exception()  # retrieved, so that it is not logged: the conversation has reported it
        conversation.end()
        conversation.observed.ended()
        if self.live:
            self._complete(conversation, None)
        if self._timer is not None:
            self._timer.cancel()
        self._conversation = None
        del self._intake
        self._task = None  # the traceback of a cancelled task holds references
        self.output.close()
        self._slot.close()

    # ConversationOwner

    def write_now(self, output: OutputChunk) -> bool:
        return False  # the log keeps it, and is charged for it

    def output_ready(self) -> None:
        """Move the conversation's messages to the output log."""
        conversation = self._conversation
        assert conversation is not None
        while (message := conversation.outbox.take()) is not None:
            if isinstance(message, AnyOutput):
                conversation.observed.notify(OutputWritten(message))  # readers can read it from here on
            match message:
                case FinalChunk() if self.live:
                    self.output.append(message)
                    self._complete(conversation, message)
                case FinalChunk():
                    self.output.append_end(message)
                case ResponseStartedFrame() | OutputChunk() | RequestWarning() | OmniError() if self.live:
                    try:
                        self._log(message)
                    except OmniError as error:
                        self.fail(error)

    def _log(self, message: ResponseStartedFrame | OutputChunk | RequestWarning | OmniError) -> None:
        self.output.append(message)
        if isinstance(message, ResponseStartedFrame):
            self._start()
        elif isinstance(message, OmniError):
            self.error = message

    def _complete(self, conversation: Conversation, final: FinalChunk | None) -> None:
        """End the session with its answer; ``final`` is None where the answer has none."""
        conversation.close()
        self._slot.close()
        if final is not None and ended_normally(final):
            self._set_state(SessionState.FINISHED)
            return
        self.error = self.error or EngineFailed("the request ended before its answer was complete")
        self._set_state(SessionState.FAILED)

    def output_has_room(self) -> None:
        pass  # output never waits: each message is moved at once

    def input_may_continue(self) -> None:
        self._input_room.set()

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
        try:
            # A loop may call a timer slightly early; ``when`` keeps it from being armed again for the same time.
            self._intake.handle_timer(max(self._loop.time(), when))
        except SessionTimeout as error:
            self._stop(SessionState.EXPIRED, error)
        except OmniError as error:
            self.fail(error)
        else:
            self._arm()


def _number(chunk: BodyChunk) -> int | None:
    return None if isinstance(chunk.content, InvalidRequest) else chunk.content.sequence_id

"""Sessions of Mode B, whose input and result outlive the HTTP requests that carry them, and their registry."""

from __future__ import annotations

import asyncio
import copy
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, Self

import msgspec

from omni_ws.config.keys import ApiKey, key_name
from omni_ws.core.chunks import AnyOutput, AudioFormat, FinalChunk, InputChunk
from omni_ws.core.input_stream import InputStream
from omni_ws.core.reorder import offset_end
from omni_ws.core.request_input import InputState
from omni_ws.errors import (
    ORDERLY_ENDS,
    EngineFailed,
    InvalidRequest,
    OmniError,
    PayloadTooLarge,
    RateLimited,
    ReorderWindowExceeded,
    SessionConflict,
    SessionExpired,
    SessionNotFound,
    SessionTimeout,
)
from omni_ws.service.conversation.conversation import Conversation
from omni_ws.service.conversation.output_log import Attachment, OutputLog, SavedError, SavedOutput, StoredBytes
from omni_ws.service.observing.observer import Origin, OutputWritten
from omni_ws.service.sessions.admission import WHY_EVICTED, session_too_long
from omni_ws.service.sessions.factory import FILE_FORMATS, SessionFactory
from omni_ws.service.sessions.session import SavedSession, Session, refused_as_not_found, restore
from omni_ws.wire.frames import RefusedChunk
from omni_ws.wire.openai_fields import ConfigurationPatch
from omni_ws.wire.openai_responses import ResponseOptions, ended_normally
from omni_ws.wire.server_frames import ResponseStartedFrame
from omni_ws.wire.streaming_body import BodyChunk, ChunkOrRefusal

#: How many readers may wait for the result of one session.
MAX_READERS: Final = 16

#: How many chunks of a body are accepted before other tasks have a turn on the event loop.
_CHUNKS_AT_A_TIME: Final = 16

#: The states of a session that has not ended.
LIVE: Final = (InputState.OPEN, InputState.STARTED)
_TRANSITIONS: Final = {
    InputState.OPEN: frozenset(set(InputState) - {InputState.OPEN, InputState.FINISHED}),
    InputState.STARTED: frozenset(set(InputState) - {InputState.OPEN, InputState.STARTED}),
    InputState.FINISHED: frozenset({InputState.CANCELLED, InputState.EXPIRED}),
    InputState.FAILED: frozenset({InputState.CANCELLED, InputState.EXPIRED}),
    InputState.CANCELLED: frozenset({InputState.EXPIRED}),
    InputState.EXPIRED: frozenset[InputState](),
}


@dataclass(frozen=True, slots=True)
class ResultForm:
    """The form in which the client that opened a session wants its result.

    ``events``: readers receive an event stream, unless they ask for another form. ``names`` gives for each field of the
    configuration its name in the body that opened the session, for error messages.
    """

    options: ResponseOptions
    audio: AudioFormat
    events: bool
    names: ConfigurationPatch = field(default_factory=lambda: ConfigurationPatch({}))


class SavedModeB(msgspec.Struct, kw_only=True):
    """A session of Mode B, live or ended, in a form that can be encoded as bytes."""

    session_id: str
    #: Name of the key that opened the session.
    key_name: str | None
    created_at: int
    form: ResultForm
    state: InputState
    started: bool
    error: SavedError | None
    expired_because: str
    progress: InputProgress
    #: The session while it is live, else None; and after its end, its stored output, else None.
    session: SavedSession | None
    output: SavedOutput | None


class ModeBSession(Attachment):
    """A session of Mode B: the Attachment of a Session with a single request, whose output it stores for readers.

    ``slot`` holds the session's slot in admission, and is closed when the work on the session is done. ``on_end`` is
    called at each change to a state other than OPEN and STARTED. Only ``_set_state`` changes the state::

        OPEN -> STARTED             work on the request begins
        STARTED -> FINISHED         the answer is complete
        OPEN, STARTED -> FAILED     the request fails, or the server ends the session
        OPEN, STARTED, FINISHED, FAILED -> CANCELLED    the client cancels the session, or deletes its result
        OPEN, STARTED -> EXPIRED    the client is silent for too long, or an empty session loses its slot to another
        FINISHED, FAILED, CANCELLED -> EXPIRED          the result is no longer kept

    OPEN and STARTED are *live*: the session takes input. A session that ends with its answer keeps its output, even if
    the answer failed; ``fail``, ``cancel``, ``expire`` and ``evict`` clear it.
    """

    def __init__(
        self,
        session_id: str,
        output: OutputLog,
        form: ResultForm,
        *,
        session: Session | None,
        created_at: int,
        slot: ExitStack,
        on_end: Callable[[ModeBSession], None],
    ) -> None:
        """``session`` is None for a session that ended at another server. ``created_at`` is Unix time in seconds."""
        self.id = session_id
        #: Unix time in seconds.
        self.created_at = created_at
        self.form = form
        self.output = output
        self.state = InputState.OPEN
        #: Whether work on the request ever started.
        self.started = False
        #: Why the result is incomplete.
        self.error: OmniError | None = None
        self.expired_because = "the session has expired"
        #: Set while the session is not live.
        self.ended = asyncio.Event()
        #: When the registry expires, or then forgets, the ended session (loop's clock); None once it is forgotten.
        self.kept_until: float | None = None
        #: For how long the ended session was in the store alone.
        self._rested_sec = 0.0
        #: None once the work is done: it would hold memory.
        self._session = session
        if session is not None:
            # Each HTTP request may be delayed or repeated: a gap may stay open until the end of the input is announced.
            session.conversation.stream.leave_gaps()
        #: How much input had arrived when the session ended, and how much has arrived since.
        self._progress = InputProgress()
        self._readers = 0
        self._loop = asyncio.get_running_loop()
        self._length_timer: asyncio.TimerHandle | None = None
        self._input_room = asyncio.Event()
        #: How many bodies are being received, or wait for the engine.
        self._bodies = 0
        #: How many of these bodies wait for room.
        self._waiting_bodies = 0
        self._slot = slot
        self._on_end = on_end
        self._task: asyncio.Task[None] | None = None
        #: See ``tell``.
        self._done: Callable[[], None] | None = None
        self._forgotten: Callable[[], None] | None = None

    def tell(self, *, done: Callable[[], None] | None, forgotten: Callable[[], None] | None) -> None:
        """Set two callbacks; None for none.

        ``done`` is called once the work is done and all is released, ``forgotten`` when the registry forgets the
        session.
        """
        self._done, self._forgotten = done, forgotten

    def begin(self) -> None:
        """Start to answer the request."""
        session = self._session
        assert session is not None
        session.attach(self)
        self._task = asyncio.create_task(session.run(), name=f"session {self.id}")
        self._task.add_done_callback(partial(self._work_done, session))
        if self.output:  # messages of a session that was restored
            self.output_ready()

    # saved

    def saved_for(self, owner: str | None) -> SavedModeB:
        """Return the session as a SavedModeB. ``owner`` is the name of the key that opened the session."""
        session = self._session if self.live else None
        return SavedModeB(
            session_id=self.id,
            key_name=owner,
            created_at=self.created_at,
            form=self.form,
            state=self.state,
            started=self.started,
            error=None if self.error is None else SavedError.of(self.error),
            expired_because=self.expired_because,
            progress=self.progress,
            session=None if session is None else session.saved(),
            output=self.output.saved() if session is None else None,
        )

    def restore(self, saved: SavedModeB) -> None:
        """Take over the state of a saved session. Call ``begin`` afterwards if the session is live.

        Raises what ``Session.restore`` and ``OutputLog.restore`` raise; then the session cannot be used.
        """
        self.state, self.started, self.expired_because = saved.state, saved.started, saved.expired_because
        self.error = None if saved.error is None else saved.error.restored()
        if self._session is not None and saved.session is not None:
            self._session.conversation.field_names = self.form.names.name_in_body
            restore(self._session, saved.session)
        elif saved.output is not None:
            self._progress = saved.progress
            self.output.restore(saved.output)
            self.output.finish()
            self.ended.set()

    def was_at_rest(self, seconds: float) -> None:
        """Note that the session, which was restored, was at rest for so long, and that its time-outs went on."""
        if self.live:
            self._live_conversation.stream.was_at_rest(seconds)
            self._live_conversation.watch_time()
        else:
            self._rested_sec = seconds

    # status

    @property
    def conversation(self) -> Conversation | None:
        """The conversation, which answers the request; None when the work is done."""
        return None if self._session is None else self._session.conversation

    @property
    def _live_conversation(self) -> Conversation:
        """The conversation of a live session."""
        assert self._session is not None
        return self._session.conversation

    @property
    def live(self) -> bool:
        """Whether the session has not ended."""
        return self.state in LIVE

    @property
    def busy(self) -> bool:
        """Whether a body is being received, the engine answers, or work on an ended session is not finished."""
        return (self._bodies > 0 or self.state is InputState.STARTED) if self.live else self._session is not None

    @property
    def expired(self) -> bool:
        return self.state is InputState.EXPIRED

    @property
    def has_input(self) -> bool:
        """Whether any chunk has arrived."""
        progress = self.progress
        return bool(progress.next_sequence_id or progress.buffered_chunks)

    @property
    def has_content(self) -> bool:
        """Whether any byte of input has arrived, even if it waits behind a gap."""
        if not self.live:
            return self._progress.received_bytes > 0
        stream = self._live_conversation.stream
        return bool(stream.received_bytes or stream.held_bytes)

    @property
    def progress(self) -> InputProgress:
        """How much input has arrived. For a live session, each call returns a new record."""
        return InputProgress.of(self._live_conversation.stream) if self.live else self._progress

    @property
    def expires_at(self) -> float | None:
        """When the session or its result expires, on the loop's clock; None while the engine is answering."""
        if self.live:
            return self._live_conversation.get_timer()
        return None if self.kept_until is None else self.kept_until - self._rested_sec

    def failure(self) -> OmniError:
        """Return the error to raise to a reader of an incomplete result: a copy, as raising changes an exception."""
        return copy.copy(self.error) if self.error is not None else SessionConflict("the session was cancelled")

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Count one reader while the block runs. Raises RateLimited beyond ``MAX_READERS``."""
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

        A chunk that is refused does not affect the others; the first refusal is raised at the end. An error that ends
        the session or that concerns its state is raised immediately, and the rest of the body is not fed.
        """
        refusal: OmniError | None = None
        for index, chunk in enumerate(chunks, 1):
            bare_end = isinstance(chunk.content, InputChunk) and chunk.content.is_bare_end
            if self.error is not None and not self.live and not bare_end:
                raise self.failure()
            try:
                if self.live:
                    self._take(chunk.content)
                else:
                    self._progress.take_late(chunk.content)
            except OmniError as error:
                number = None if isinstance(chunk.content, InvalidRequest) else chunk.content.sequence_id
                if error.sequence_id in (None, number):
                    error.about(param=chunk.name(error.param))
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
        if self.live and self._live_conversation.refused:
            await self.ended.wait()

    def finish(self) -> None:
        """End the input, even if it has a gap. Idempotent, and allowed after the end of the session."""
        if self.live:
            try:
                self._live_conversation.finish()
                self._live_conversation.time_gaps()
            finally:
                self._input_accepted()
        else:
            self._progress.end()

    @contextmanager
    def incoming(self) -> Iterator[None]:
        """Suspend the session time-out while the block receives a body and feeds its chunks.

        A body without a chunk does not restart the time-out, which may end the session after the block.
        """
        self._bodies += 1
        self._suspend_timeout()
        try:
            yield
        finally:
            self._bodies -= 1
            self._suspend_timeout()

    def _take(self, content: ChunkOrRefusal) -> None:
        """Accept a chunk. Raises the error of a refused chunk, whose number counts as received: it leaves no gap."""
        conversation, now = self._live_conversation, self._loop.time()
        conversation.stream.touch(now=now)
        match content:
            case RefusedChunk(sequence_id=sequence_id, error=error):
                self._use_up(sequence_id)
                raise error
            case InputChunk(sequence_id=number):
                try:
                    conversation.configuration.check_chunk(content)
                except InvalidRequest:
                    self._use_up(number)
                    raise
                conversation.receive_chunk(content, now=now)
                if content.end_of_input:
                    conversation.time_gaps()
            case error:
                raise error

    def _use_up(self, number: int | None) -> None:
        # Without numbers there are no gaps to leave.
        if number is not None and self._live_conversation.stream.numbered is not False:
            self._live_conversation.refuse_chunk(number)

    def _suspend_timeout(self) -> None:
        if self.live:
            self._live_conversation.suspend_time(self._bodies > 0)

    def _input_accepted(self) -> None:
        """Change to STARTED if work on the request has begun, or its input has ended and is not empty."""
        if self.live:
            stream = self._live_conversation.stream
            current = stream.current
            if stream.received_bytes > 0 if current is None else current.state is InputState.STARTED:
                self._start()

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
            if self.live:  # the client was not silent: it had to wait
                self._live_conversation.stream.touch(now=self._loop.time())

    def _hold_clocks(self, *, held: bool) -> None:
        """Count a body that waits for room (``held``), or no longer waits.

        While any body waits, gaps do not time out: the body may fill them.
        """
        self._waiting_bodies += 1 if held else -1
        if self.live:
            self._live_conversation.hold_time(self._waiting_bodies > 0, now=self._loop.time())

    def _is_full(self) -> bool:
        return self.live and self._live_conversation.input_full()

    # the end

    def limit(self, seconds: float) -> None:
        """Fail the session if it is still live ``seconds`` after its creation, whether here or at another server."""
        assert self._session is not None
        left = max(0.0, seconds - self._session.age_at_restore)
        self._length_timer = self._loop.call_later(left, self.fail, session_too_long(seconds))

    def fail(self, error: OmniError) -> None:
        """End a live session with ``error`` and clear its output. Does nothing if the session has ended."""
        if self.live and self._session is not None:
            self._session.conversation.end_in_error(error)
            self._stop(InputState.FAILED, error)

    def cancel(self) -> None:
        """End a live session, or delete a stored result. Idempotent. Raises RuntimeError for an expired session."""
        if self.state is not InputState.CANCELLED:
            self._stop(InputState.CANCELLED, None)

    def expire(self) -> None:
        """Delete a stored result that is no longer kept. Raises RuntimeError for an expired session."""
        self._stop(InputState.EXPIRED, SessionTimeout("the stored answer has expired"))

    def keep(self, until: float) -> None:
        """Set when (loop's clock) the registry expires the ended session or, if it is expired already, forgets it."""
        self.kept_until = until

    def forget(self) -> None:
        """Discard the result. The registry calls this when it forgets the session."""
        self.kept_until = None
        self.output.discard()
        if self._forgotten is not None:
            self._forgotten()

    def evict(self) -> None:
        """End a session without input, and release its slot immediately to another session."""
        self.expired_because = WHY_EVICTED
        self._stop(InputState.EXPIRED, SessionTimeout(self.expired_because))
        self._slot.close()

    async def wait_released(self) -> None:
        """Wait until the engine has released an ended session."""
        if self._task is not None:
            await asyncio.wait([self._task])

    def _stop(self, state: InputState, error: OmniError | None) -> None:
        was_live = self.live
        self.error = error
        self.output.discard()
        if was_live and error is not None and not isinstance(error, ORDERLY_ENDS):
            self.output.store_end(error)
        self._set_state(state)
        if was_live and self._task is not None:
            self._task.cancel()

    def _start(self) -> None:
        if self.state is InputState.OPEN:
            self.started = True
            self._set_state(InputState.STARTED)

    def _set_state(self, state: InputState) -> None:
        if state not in _TRANSITIONS[self.state]:
            raise RuntimeError(f"illegal transition from {self.state.name} to {state.name}")
        progress = self.progress
        self.state = state
        if not self.live:
            self._progress = replace(progress, buffered_chunks=0, closed=state is not InputState.FINISHED)
            self.ended.set()
            self._input_room.set()
            if self._length_timer is not None:
                self._length_timer.cancel()
            self._on_end(self)

    # the work

    def _work_done(self, session: Session, task: asyncio.Task[None]) -> None:
        """Release everything when ``task`` is done, even if it was cancelled before it began."""
        if not task.cancelled():
            task.exception()  # retrieved, so that it is not logged: the conversation has reported it
        if not session.has_ended:
            session.conversation.end()
            session.conversation.observed.ended()
        if self.live:
            self._complete(session.conversation, None)
        self._session = None
        self._task = None  # the traceback of a cancelled task holds references
        self.output.finish()
        self._slot.close()
        if self._done is not None:
            self._done()

    # Attachment

    def output_ready(self) -> None:
        """Store the messages that are ready in the output log, and change the state accordingly."""
        assert self._session is not None
        conversation = self._session.conversation
        while self.output.ready:
            try:
                message = self.output.take()
            except OmniError as error:
                self.fail(error)
                continue
            if isinstance(message, AnyOutput):
                conversation.observed.notify(OutputWritten(message))  # readers can read it from here on
            match message:
                case FinalChunk() if self.live:
                    self._complete(conversation, message)
                case FinalChunk():
                    self.output.store_end(message)
                case ResponseStartedFrame() if self.live:
                    self._start()
                case OmniError() if self.live:
                    self.error = message

    def _complete(self, conversation: Conversation, final: FinalChunk | None) -> None:
        """End the session as its answer ends; ``final`` is None if the answer has no final."""
        conversation.close()
        self._slot.close()
        if final is not None and ended_normally(final):
            self._set_state(InputState.FINISHED)
            return
        self.error = self.error or EngineFailed("the request ended before its answer was complete")
        self._set_state(InputState.FAILED)

    def session_over(self, error: OmniError | None) -> None:
        if self._session is not None:
            self._session.detach(self)

    def input_may_continue(self) -> None:
        self._input_room.set()

    def time_is_up(self, error: OmniError) -> None:
        if isinstance(error, SessionTimeout) and self.live:
            self._stop(InputState.EXPIRED, error)
        else:
            self.fail(error)


# The registry.

#: How many ended sessions are known; beyond that, those that ended first are forgotten.
MAX_REMEMBERED: Final = 16_384
#: The share of the server's byte budget that output logs may hold.
OUTPUT_SHARE: Final = 1 / 4
#: Eviction ends when logs hold this share of their budget, so that it is rare.
LOW_WATER_SHARE: Final = 3 / 4


class ModeBRegistry:
    """The Mode B sessions of a server, and the stored results of those that have ended.

    The registry finds sessions by id, each only for the key that opened it.

    A session passes through these stages::

        live       it takes input and produces output                       until it ends
        stored     its state and its result, if any, can be read            for the session time-out, or until evicted
        expired    its id is known, and answered with ``session_expired``   for another session time-out
        forgotten  its id is unknown

    A live session that times out or is evicted from its slot skips the stage *stored*.

    Stored and expired sessions leave their stage in the order in which they entered it, because both stages last
    equally long: one queue and one timer serve them all.
    """

    def __init__(self, sessions: SessionFactory, *, survive: bool = False) -> None:
        """``survive``: sessions keep the data needed to save them at any time, as they do with a store."""
        config = sessions.config
        self._survive = survive or sessions.store is not None
        self._sessions = sessions
        self.timeout: float = config.streaming_input.session_timeout_sec
        #: The byte budget of the server.
        self.budget = sessions.budget
        self.stored = StoredBytes(
            sessions.budget, int(sessions.budget.capacity * OUTPUT_SHARE), evict=self._evict_results
        )
        self._by_id: dict[str, tuple[str | None, ModeBSession]] = {}
        self._admission = sessions.admission
        #: Ended sessions with the times at which their stage ends. An entry is stale if its time is not ``kept_until``
        #: any more.
        self._due: deque[tuple[float, ModeBSession]] = deque()
        self._sweep: asyncio.TimerHandle | None = None
        self._ending: list[ModeBSession] = []

    def __len__(self) -> int:
        """Return the number of known sessions, including ended ones."""
        return len(self._by_id)

    def knows(self, session_id: str) -> bool:
        """Return whether a session is known here, be it live or ended."""
        return session_id in self._by_id

    def open(self, key: ApiKey | None, *, session_id: str | None = None) -> Conversation:
        """Open a conversation for a session, to be configured and added. ``session_id`` is set for a restored one."""
        return self._sessions.open(
            output_formats=FILE_FORMATS,
            single_request=True,
            any_model=True,
            streamed_body=True,
            owner=key_name(key),
            origin=Origin.SESSIONS,
            stored=self.stored,
            survives=self._survive,
            session_id=session_id,
        )

    def add(self, conversation: Conversation, form: ResultForm, *, key: ApiKey | None, slot: ExitStack) -> ModeBSession:
        """Register and start a session, under the id with which its conversation was opened.

        ``slot`` holds the session's slot in admission, and is closed when the session has ended.
        """
        session = self._session_of(conversation, form, int(time.time()), slot)
        self._begin(session, key)
        return session

    def _session_of(
        self, conversation: Conversation, form: ResultForm, created_at: int, slot: ExitStack
    ) -> ModeBSession:
        session_id, outbox = conversation.observed.identity.session_id, conversation.outbox
        session = Session(session_id, conversation, outbox, grace=0)
        return ModeBSession(
            session_id, outbox, form, session=session, created_at=created_at, slot=slot, on_end=self._ended
        )

    def _begin(self, session: ModeBSession, key: ApiKey | None) -> None:
        self._by_id[session.id] = (key_name(key), session)
        self._admission.opened_empty(session, patience=0)  # no connection waits for anything
        session.begin()
        if key is not None and key.max_session_sec is not None:
            session.limit(key.max_session_sec)

    def save(self, session: ModeBSession) -> bytes:
        """Return a session as bytes, from which ``restore`` continues it. Live sessions require ``survive``."""
        owner, _ = self._by_id[session.id]
        return msgspec.msgpack.encode(session.saved_for(owner))

    def restore(self, data: bytes, key: ApiKey | None, *, client: str = "") -> ModeBSession:
        """Continue a saved session. ``key`` must be the one that opened it.

        An ended session is stored for the whole session time-out again. Raises what ``Sessions.restore`` raises.
        """
        with refused_as_not_found():
            saved = msgspec.msgpack.decode(data, type=SavedModeB)
        return self.restored(saved, key, client=client)

    def restored(self, saved: SavedModeB, key: ApiKey | None, *, client: str = "") -> ModeBSession:
        """Continue a saved session, as ``restore`` does, from its decoded form."""
        slot = ExitStack()
        try:
            with refused_as_not_found():
                session = self._restored(saved, key, client, slot)
        except BaseException:
            slot.close()
            raise
        if session.live:
            self._begin(session, key)
        else:
            self._by_id[session.id] = (key_name(key), session)
            self._ended(session)
        return session

    def _restored(self, saved: SavedModeB, key: ApiKey | None, client: str, slot: ExitStack) -> ModeBSession:
        live = saved.state in LIVE
        if saved.key_name != key_name(key) or saved.session_id in self._by_id or live is (saved.session is None):
            raise KeyError(saved.session_id)
        if live:
            slot.enter_context(self._admission.session(key, client=client, many_requests=True))
            conversation = self.open(key, session_id=saved.session_id)
            session = self._session_of(conversation, saved.form, saved.created_at, slot)
        else:
            session = ModeBSession(
                saved.session_id,
                OutputLog(0, write_timeout=0, now=self._now, stored=self.stored),
                saved.form,
                session=None,
                created_at=saved.created_at,
                slot=slot,
                on_end=self._ended,
            )
        try:
            session.restore(saved)
        except BaseException:
            session.output.discard()
            raise
        return session

    def get(self, session_id: str, key: ApiKey | None) -> ModeBSession:
        """Return a live or stored session of ``key``. Raises SessionExpired, or SessionNotFound for any other id."""
        owner, session = self._by_id.get(session_id, (None, None))
        if session is None or owner != key_name(key):
            raise SessionNotFound("session not found", param="session_id")
        if session.expired:
            raise SessionExpired(session.expired_because, param="session_id")
        return session

    def discard(self, session: ModeBSession) -> None:
        """End and forget a session whose client does not know its id, or that another server continues."""
        if session.live:
            session.cancel()
        self._forget(session)

    def drain(self, error: OmniError) -> None:
        """End the sessions without any input; the others continue to their end."""
        for _, session in tuple(self._by_id.values()):
            if session.live and not session.has_input:
                session.fail(error)

    def end_all(self, error: OmniError) -> None:
        """End and forget every session."""
        for _, session in tuple(self._by_id.values()):
            session.fail(error)
            self._ending.append(session)
            self._forget(session)
        self._due.clear()
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None

    async def wait_released(self) -> None:
        """Wait until the engine has released all sessions that ``end_all`` ended."""
        while self._ending:
            await self._ending.pop().wait_released()

    # ended sessions

    def _ended(self, session: ModeBSession) -> None:
        self._admission.ended(session)
        until = self._now() + self.timeout
        session.keep(until)
        self._due.append((until, session))
        while len(self._due) > MAX_REMEMBERED:
            when, oldest = self._due.popleft()
            if oldest.kept_until == when:
                self._forget(oldest)
        self._arm()

    def _forget(self, session: ModeBSession) -> None:
        session.forget()
        self._by_id.pop(session.id, None)

    def _arm(self) -> None:
        if self._sweep is None and self._due:
            self._sweep = asyncio.get_running_loop().call_at(self._due[0][0], self._on_timer, self._due[0][0])

    def _on_timer(self, when: float) -> None:
        self._sweep = None
        # A loop may call a timer slightly early.
        now = max(self._now(), when)
        while self._due and self._due[0][0] <= now:
            when, session = self._due.popleft()
            if session.kept_until != when:
                continue
            if session.expired:
                self._forget(session)
            else:
                session.expire()
        self._arm()

    def _evict_results(self, wanted: int) -> None:
        """Expire results to make room for ``wanted`` bytes.

        Repeatedly expires the oldest result of the key whose results are largest in total.
        """
        kept: dict[str | None, deque[ModeBSession]] = defaultdict(deque)
        sizes: Counter[str | None] = Counter()
        for when, session in self._due:
            if session.kept_until == when and session.output.held:
                owner, _ = self._by_id[session.id]
                kept[owner].append(session)
                sizes[owner] += session.output.held
        while sizes and self.stored.used + wanted > self.stored.capacity * LOW_WATER_SHARE:
            ((owner, _),) = sizes.most_common(1)
            session = kept[owner].popleft()
            sizes[owner] -= session.output.held
            if not kept[owner]:
                del sizes[owner]
            session.expire()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


# The input.


@dataclass(slots=True)
class InputProgress:
    """A record of how much input has arrived. After the end of the session it counts late chunks."""

    #: All chunks with lower numbers have arrived.
    next_sequence_id: int = 0
    #: Chunks behind a gap.
    buffered_chunks: int = 0
    received_bytes: int = 0
    duplicates: int = 0
    #: Whether the end of the input has arrived.
    ended: bool = False
    #: Whether no more input is accepted, ended or not.
    closed: bool = False
    #: The limit of ``received_bytes``; None for no limit.
    max_total_bytes: int | None = None
    #: The offset that follows the input, if chunks have offsets instead of numbers; else None.
    next_offset: int | None = None

    @classmethod
    def of(cls, stream: InputStream) -> Self:
        """Return the record of a live session's input."""
        return cls(
            next_sequence_id=stream.reorder.next_sequence_id,
            buffered_chunks=stream.buffered_chunks,
            received_bytes=stream.received_bytes,
            duplicates=stream.duplicates,
            ended=stream.opened and stream.current is None,
            next_offset=None if stream.offsets is None else stream.offsets.next_offset,
            max_total_bytes=stream.limits.max_total_bytes,
        )

    def end(self) -> None:
        """Note the end of the input."""
        self.ended = True

    def take_late(self, content: ChunkOrRefusal) -> None:
        """Count a chunk that arrives after the session has ended.

        A repeated chunk counts as a duplicate, and another end of input is ignored. If the answer was complete before
        its input had ended, the rest of the input is accepted up to its end, and discarded.

        Raises the error of a chunk that was refused, SessionConflict for input that is not accepted any more, and
        PayloadTooLarge beyond ``max_total_bytes``.
        """
        if isinstance(content, InvalidRequest):
            raise content
        number = content.sequence_id
        if self._is_duplicate(content):
            self.duplicates += 1
            return
        if self.ended or self.closed:
            if isinstance(content, InputChunk) and content.is_bare_end:
                return
            by_offset = isinstance(content, InputChunk) and content.offset is not None
            raise SessionConflict(
                "the session has already ended", param="offset" if by_offset else "sequence_id", sequence_id=number
            )
        size = 0 if isinstance(content, RefusedChunk) else len(content.payload)
        if self.max_total_bytes is not None and self.received_bytes + size > self.max_total_bytes:
            raise PayloadTooLarge(f"the input exceeds {self.max_total_bytes} bytes in total", param="payload")
        if isinstance(content, InputChunk) and content.offset is not None:
            self.next_offset = offset_end(content)
        self.next_sequence_id = (self.next_sequence_id if number is None else number) + 1
        if isinstance(content, RefusedChunk):
            raise content.error
        self.received_bytes += size
        self.ended = content.end_of_input

    def _is_duplicate(self, content: InputChunk | RefusedChunk) -> bool:
        if isinstance(content, InputChunk) and content.offset is not None:
            return bool(content.payload) and offset_end(content) <= (self.next_offset or 0)
        number = content.sequence_id
        return number is not None and number < self.next_sequence_id

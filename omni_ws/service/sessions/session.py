"""Sessions: conversations that outlive their connections.

**Connections.** A session sends through one connection at a time, its Attachment. ``attach`` hands the conversation to
a connection: from then on the connection is notified of output, of room, and of time-outs. ``detach`` takes the
conversation back when the connection is lost. While a session is disconnected its requests are still answered, up to
what the output log holds. No time-out of the client runs except the grace period, at whose end the session ends.

**Resume.** A client that lost its connection opens another, and names its session, a token, and the last output that it
received. ``resume`` rewinds the output log to that output. If the old connection is still there, because the server has
not noticed its loss, it is replaced: the new one sends what the old one has not sent. Silence and gaps are timed from
the resume.

**Tokens.** Each connection is given a token for the next one. Resuming spends the token, and the new token is in the
first frame over the new connection, which may be lost before that frame arrives. So the spent token is accepted until
the client is heard over the new connection. The session keeps digests of both, never the tokens.

With a store, a client with a spent token has to answer a ping first. Such an attempt may be stale: a slow server may
see it only after the client has given it up and resumed over another connection. Without the ping, the stale attempt
would take the session away from its client.

**The end.** ``end`` sets the reason; ``run`` then stops the answers, lets the connection send what is left, and waits
until it is gone. ``drain`` ends the session in order: open requests get their answers first, and a disconnected client
may come back for them within its grace period. Draining is no state of its own, as connections still come and go: it is
a deadline, and a conversation that is closing.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final
from weakref import WeakValueDictionary

import msgspec

from omni_ws.config.keys import ApiKey, key_name
from omni_ws.errors import (
    ORDERLY_ENDS,
    InvalidRequest,
    OmniError,
    SessionNotFound,
    SessionTimeout,
    ShuttingDown,
)
from omni_ws.service.conversation.begun_answer import (
    ToldOutput,
    tell_again,
)
from omni_ws.service.conversation.conversation import Conversation, SavedConversation
from omni_ws.service.conversation.output_log import Attachment, OutputLog
from omni_ws.service.conversation.request_queue import WakeUp
from omni_ws.service.recording import SessionRecording
from omni_ws.service.sessions.admission import CLOSING_NOTICE_SEC, WHY_EVICTED, Slot, session_too_long
from omni_ws.service.sessions.factory import STREAM_FORMATS, SessionFactory
from omni_ws.service.sessions.keeper import (
    Keeper,
    ReceivedFrame,
    admits,
    is_spent,
    read_entries,
    store_errors,
    token_digest,
)
from omni_ws.service.store.records import ClearPart
from omni_ws.service.store.session_store import Lease, SessionStore
from omni_ws.wire.server_frames import InputAckFrame, SessionClosingFrame, SessionResumedFrame


class SavedSession(msgspec.Struct, kw_only=True):
    """A session in a form that can be written to bytes: all that another server needs to continue it."""

    session_id: str
    #: The name of the API key that opened it.
    key_name: str | None
    #: Digests of the newest token and of the spent one, see Session.
    token: bytes
    spent_token: bytes | None
    conversation: SavedConversation
    #: Always empty; earlier versions, which may share the store, expect the field.
    attachment: bytes = b""
    #: When it was opened; Unix time in seconds. None in records of earlier servers.
    opened_at: float | None = None


class Session:
    """A conversation that outlives its connections, of which it has one at a time; see the module docstring.

    A session is open, with a connection or without, until its answers are stopped. Then its last messages are sent; it
    has ended once everything is released.

    ``grace`` is the time in seconds that a client has to come back; with 0 a session ends with its connection.
    """

    #: The keeper that writes it to the store; None without a store.
    keeper: Keeper | None = None

    def __init__(self, session_id: str, conversation: Conversation, outbox: OutputLog, *, grace: float) -> None:
        self.session_id = session_id
        #: When it was opened, here or at another server; Unix time in seconds.
        self.opened_at = time.time()
        #: How many seconds before it came here it was opened; 0 if it was opened here.
        self.age_at_restore = 0.0
        self.conversation = conversation
        self.outbox = outbox
        self.recording: SessionRecording | None = None
        #: Whether input is taken, and connections may come and go: until the answers are stopped. Read for each frame.
        self.is_open = True
        #: Whether everything is released.
        self.has_ended = False
        #: Digest of the token with which the client resumed, until it is heard over the new connection.
        self.spent_token: bytes | None = None
        self._grace = grace
        self._loop = asyncio.get_running_loop()
        #: Digest of the token of the newest connection.
        self._token = b""
        self._attachment: Attachment | None = None
        #: Set while there is no attachment, also when the session is ending.
        self._detached = WakeUp(is_set=True)
        self._grace_timer: asyncio.TimerHandle | None = None
        #: Done when the session is no longer open. Its result is the reason to close with; None if nobody can read it.
        self._reason: asyncio.Future[OmniError | None] = self._loop.create_future()
        #: When a drain ends at the latest, on the loop's clock; None without a drain.
        self._drained_by: float | None = None
        self._closing_announced = False
        #: Fires when the end by the key's time limit is to be announced, and then at that limit.
        self._length_timer: asyncio.TimerHandle | None = None
        self._too_long: OmniError | None = None

    @property
    def disconnected(self) -> bool:
        """Whether the session has no connection."""
        return self._attachment is None

    @property
    def ended_by(self) -> OmniError | None:
        """The reason with which the session is closed; None while it is open, or if no client could read the reason."""
        return self._reason.result() if self._reason.done() and not self._reason.cancelled() else None

    def _stop_grace(self) -> None:
        if self._grace_timer is not None:
            self._grace_timer.cancel()
            self._grace_timer = None

    # tokens

    @property
    def resumable(self) -> bool:
        """Whether the client may come back after it has lost its connection."""
        return self._grace > 0 and self.is_open

    def new_token(self) -> str | None:
        """Return a token for the next connection, in place of the previous one; None if the client may not resume."""
        if not self.resumable:
            return None
        token = secrets.token_urlsafe(24)
        self._token = token_digest(token)
        return token

    def admits(self, token: str) -> bool:
        """Return whether a client with this token may take over the session.

        The check takes the same time for any token.
        """
        presented = token_digest(token)
        current = hmac.compare_digest(presented, self._token)
        spent = self.spent_token is not None and hmac.compare_digest(presented, self.spent_token)
        return self.resumable and (current or spent)

    def has_spent(self, token: str) -> bool:
        """Return whether this token was used for the newest connection, over which the client is still to be heard."""
        spent = self.spent_token if self.resumable else None
        return spent is not None and hmac.compare_digest(token_digest(token), spent)

    def spend(self, token: str) -> None:
        """Note that the token was used. The module docstring explains why it is still accepted for a while."""
        self.spent_token = token_digest(token)

    def confirm_token(self) -> None:
        """Note that the client was heard over its newest connection, and therefore has its new token."""
        if self.keeper is not None and self.spent_token is not None:
            self.keeper.mark()
        self.spent_token = None

    @property
    def digests(self) -> tuple[bytes, ...]:
        """Digests of the tokens with which the client may come back."""
        return (self._token,) if self.spent_token is None else (self._token, self.spent_token)

    # kept and recorded

    def keep_in(self, store: SessionStore, lease: Lease) -> None:
        """Keep the session in a store from now on."""
        self.keeper = Keeper(self, store, lease)
        self.keeper.mark()

    def record(self, recording: SessionRecording | None) -> None:
        """Record the session with ``recording``; None: the session is not recorded."""
        self.recording = recording

    @property
    def owner(self) -> str | None:
        """The name of the API key that opened the session."""
        return self.conversation.observed.identity.owner

    def saved(self) -> SavedSession:
        """Return the whole session in its saved form."""
        return SavedSession(
            session_id=self.session_id,
            key_name=self.owner,
            token=self._token,
            spent_token=self.spent_token,
            conversation=self.conversation.saved(),
            opened_at=self.opened_at,
        )

    def restore(self, saved: SavedSession) -> None:
        """Take over the state of a saved session. The client has the grace period to come back.

        If the grace period is 0, the session must be attached within this pass of the event loop, or it ends. Raises
        what ``Conversation.restore`` raises.
        """
        self._token, self.spent_token = saved.token, saved.spent_token
        if saved.opened_at is not None:
            self.opened_at, self.age_at_restore = saved.opened_at, max(0.0, time.time() - saved.opened_at)
        self.conversation.restore(saved.conversation)
        self._grace_timer = self._loop.call_later(self._grace, self.end, None)

    # connections

    def attach(self, attachment: Attachment) -> None:
        """Send through this connection from now on.

        Raises RuntimeError if another is attached, or the session is not open.
        """
        if not self.is_open or self._attachment is not None:
            raise RuntimeError("a session is attached to one connection at a time, and only while it is open")
        self._stop_grace()
        self._attachment = attachment
        self._detached.clear()
        self.conversation.attach(attachment)

    def can_resume(self, last_output: int) -> bool:
        """Return whether all outputs after ``last_output`` are still in the output log."""
        return self.outbox.can_rewind(last_output)

    def resume(self, attachment: Attachment, last_output: int) -> tuple[SessionResumedFrame, InputAckFrame]:
        """Attach another connection, in place of any present one. Its client has the outputs up to ``last_output``.

        ``can_resume`` and ``resumable`` must be true. Returns the frames to send before any others.
        """
        self.release()
        conversation = self.conversation
        replayed = self.outbox.rewind(last_output)
        conversation.stream.unheard(now=self._loop.time())
        token = self.new_token()
        assert token is not None
        self.attach(attachment)
        if self.keeper is not None:
            self.keeper.mark()
        if self._drained_by is not None:
            self._announce_drain()
        self._announce_length()
        if self._answered_all:
            self._loop.call_soon(self.end, ShuttingDown("the server is shutting down"))
        ack = conversation.take_ack()
        resumed = SessionResumedFrame(
            session_id=self.session_id,
            resume_token=token,
            next_sequence_id=ack.next_sequence_id,
            replayed=replayed,
        )
        return resumed, ack

    def release(self, *, deleted: bool = False) -> None:
        """Detach the connection, if any, and tell it that the session was ``deleted``, or else that another has it."""
        if (attachment := self._attachment) is not None:
            self._part()
            if deleted:
                attachment.deleted()
            else:
                attachment.replaced()

    def detach(self, attachment: Attachment) -> None:
        """Detach a connection that is gone: the grace period begins or, without one, the session ends.

        Does nothing if the session has another connection by now.
        """
        if self._attachment is not attachment:
            return
        self._part()
        if not self.resumable:
            self.end(None)
            return
        self.outbox.drop_of_the_moment()
        self._grace_timer = self._loop.call_later(self._grace, self.end, None)
        if self.keeper is not None:
            self.keeper.mark()  # since its client is away
        self._end_if_complete()

    def _part(self) -> None:
        self._attachment = None
        self._closing_announced = False
        self._detached.set()
        self.conversation.detach()

    # life

    async def run(self) -> None:
        """Run the session. Returns when it has ended and its last connection is gone."""
        answers = asyncio.create_task(self.conversation.run(), name=f"conversation {self.session_id}")
        answers.add_done_callback(self._answers_ended)
        try:
            error = await self._reason
            if self.keeper is not None and self.keeper.handed_over:  # its client need not wait for the engine
                await self.keeper.settled()
                if self._attachment is not None:
                    self._attachment.session_over(error)
            await self._stop(answers)
            if self._attachment is not None:
                self._attachment.session_over(error)
                await self._detached.wait()
        finally:
            self.is_open, self.has_ended = False, True
            self._stop_grace()
            if self._length_timer is not None:
                self._length_timer.cancel()
            await self._stop(answers)
            if self.keeper is not None:
                self.keeper.end()
            self.outbox.close()
            self.conversation.observed.ended()

    async def _stop(self, answers: asyncio.Task[None]) -> None:
        answers.cancel()
        await asyncio.gather(answers, return_exceptions=True)
        self.conversation.end()

    def end(self, error: OmniError | None) -> None:
        """End the session in the next pass of the loop. Only the first reason counts.

        ``error`` is the reason to close with; None if no client is connected that would read it.
        """
        if not self.is_open:
            return
        self._end_with(error)
        if error is not None and not isinstance(error, ORDERLY_ENDS):
            # Before the finals of the requests that end with the session.
            self.conversation.end_in_error(error)
            self.outbox.put_nowait(error)

    def _end_with(self, error: OmniError | None) -> None:
        self.is_open = False
        self._stop_grace()
        if self._length_timer is not None:
            self._length_timer.cancel()
        if not self._reason.done():  # which is cancelled with ``run``
            self._reason.set_result(error)

    def hand_over(self) -> bool:
        """Leave the session in the store, and end it here: its client continues it with another server.

        Returns False if the session is not open or not kept in a store, or the store does not work: it stays here.
        """
        if self.keeper is None or not self.is_open or not self.keeper.resumable or not self.keeper.hand_over():
            return False
        self._count_elsewhere()
        self._end_with(ShuttingDown("the server is shutting down"))
        return True

    def _count_elsewhere(self) -> None:
        """Have the open requests count only where the session goes on, which knows all of their input and answers."""
        self.conversation.observed.timeline.goes_elsewhere()
        for request in self.conversation.queue.requests:
            request.timeline.note_counted(request.input_usage.input_audio_ms)

    @property
    def is_kept_here(self) -> bool:
        """Whether this process has the session's record in the store: it was neither handed over nor lost."""
        return self.keeper is not None and not self.keeper.has_left

    async def is_still_kept_here(self) -> bool:
        """Write the session to the store. Returns whether this process still has the record, and the store works."""
        return self.keeper is not None and await self.keeper.still_writes()

    def lose(self, *, deleted: bool) -> None:
        """End the session here, as another server has taken it, or has ``deleted`` it. Only a deletion is reported."""
        if not deleted and self.is_open:
            self._count_elsewhere()
        self.release(deleted=deleted)
        self.end(None)

    def drain(self, time_left: float) -> None:
        """Refuse new requests, answer those that are open, and then end the session.

        ``time_left`` (seconds) is only announced to the client: the caller calls ``end`` after it. A client that is
        disconnected keeps its grace period while there is something to send to it.
        """
        if not self.is_open:
            return
        self._drained_by = self._loop.time() + time_left
        if self._attachment is not None:
            self._announce_drain()
        self.conversation.drain()
        self.conversation.close()

    def limit(self, seconds: float) -> None:
        """End the session ``seconds`` after it was opened. The client is told some time before."""
        error = session_too_long(seconds)
        left = max(0.0, seconds - self.age_at_restore)
        notice = min(CLOSING_NOTICE_SEC, seconds / 2, left)

        def announce() -> None:
            self._too_long = error
            self._length_timer = self._loop.call_later(notice, self.end, error)
            if self._attachment is not None:
                self._announce_length()

        self._length_timer = self._loop.call_later(left - notice, announce)

    def _announce_length(self) -> None:
        if self._too_long is not None and self._length_timer is not None:
            self.announce_closing(self._too_long, max(0.0, self._length_timer.when() - self._loop.time()))

    def announce_closing(self, error: OmniError, time_left: float) -> None:
        """Send ``session_closing``, once for each connection: the session will end in ``time_left`` seconds."""
        if not self._closing_announced:
            self._closing_announced = True
            self.outbox.put_nowait(
                SessionClosingFrame(
                    reason=error.code, retryable=error.wire.retryable, time_left_ms=round(time_left * 1000)
                )
            )

    def _announce_drain(self) -> None:
        assert self._drained_by is not None
        time_left = max(0, self._drained_by - self._loop.time()) if self.conversation.busy else 0
        self.announce_closing(ShuttingDown("the server is shutting down"), time_left)

    def _answers_ended(self, answers: asyncio.Task[None]) -> None:
        if answers.cancelled() or not self.is_open:
            return
        failure = answers.exception()
        assert failure is None or isinstance(failure, OmniError)
        if failure is not None:
            self._end_with(failure)  # its error frame is in the outbox already
        elif self._attachment is not None:
            drained = self._drained_by is not None
            self._end_with(ShuttingDown("the server is shutting down") if drained else None)
        else:
            self._end_if_complete()

    @property
    def _answered_all(self) -> bool:
        return self.conversation.closing and not self.conversation.busy

    def _end_if_complete(self) -> None:
        """End a drained session whose client is disconnected, if all is answered and nothing is left to send."""
        if self._answered_all and not self.outbox:
            self.end(None)


@contextmanager
def refused_as_not_found() -> Iterator[None]:
    """Turn errors of the block, which restores saved data that may be invalid here, into SessionNotFound."""
    try:
        yield
    except (LookupError, ValueError, RecursionError, msgspec.DecodeError, InvalidRequest) as error:
        raise SessionNotFound("this session cannot be resumed here", param="session_id") from error


def restore(session: Session, saved: SavedSession, told: Sequence[ToldOutput] = (), last_output: int = -1) -> None:
    """Restore a saved session into a new one. On failure, end the new session, and raise the error.

    ``told`` are the outputs made after it was saved, and ``last_output`` is the last that its client has received; see
    ``tell_again``.
    """
    try:
        session.restore(saved)
        if told or last_output >= 0:
            tell_again(session.conversation, told, last_output)
    except BaseException:
        session.conversation.end()
        session.outbox.close()
        session.conversation.observed.ended()
        raise


_NO_SESSION: Final = "no session to resume with this session_id and resume_token"
_NO_ANSWER: Final = "the client does not answer, or has come over another connection meanwhile"


@dataclass(frozen=True, slots=True, eq=False)
class _Living:
    """An open session, the task that runs it, and its slot. To admission it is an EmptySession."""

    session: Session
    life: asyncio.Task[None]
    slot: Slot

    @property
    def has_content(self) -> bool:
        return self.session.conversation.has_content

    def evict(self) -> None:
        """End a session without content; see EmptySession."""
        self.session.end(SessionTimeout(WHY_EVICTED))
        self.slot.release()


class Sessions:
    """The sessions of one front end, connected or not: opens and runs them, and finds them by id."""

    def __init__(
        self,
        factory: SessionFactory,
        *,
        origin: str,
        grace: float,
        any_model: bool = False,
        survive: bool = False,
        store: SessionStore | None = None,
    ) -> None:
        """``origin`` labels the sessions in metrics and logs; ``grace`` is in seconds, see Session.

        ``any_model``: clients may use any name for the model, see SessionFactory. ``survive``: sessions can be saved at
        any time. ``store`` keeps sessions for other servers; it requires a ``grace`` above 0.
        """
        self._store = store if grace else None
        self._survive = survive or self._store is not None
        #: A lock for each session that is being taken over, by session id.
        self._taking: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._factory = factory
        self._origin = origin
        self._grace = grace
        self._any_model = any_model
        self._living: dict[str, _Living] = {}

    async def admit(self, key: ApiKey | None, *, client: str = "", session_id: str | None = None) -> Session:
        """Wait for a slot, as ``Admission.room`` does, and then ``open`` a session. Raises what these two raise."""
        await self._factory.admission.room(key, client=client)
        return self.open(key, client=client, session_id=session_id)

    def save(self, session: Session) -> bytes:
        """Return a session as bytes, from which ``restore`` continues it in any server. Requires ``survive``."""
        return msgspec.msgpack.encode(session.saved())

    def restore(self, data: bytes, key: ApiKey | None, *, client: str = "") -> Session:
        """Continue a saved session, for ``key``, which opened it. Its client may then ``claim`` it.

        Raises SessionNotFound if ``data`` is no saved session, belongs to another key, is open here already, or needs
        anything that this server does not support; PayloadTooLarge and EngineOverloaded if there is no room for it; and
        what ``open`` raises. After an error, nothing of the session is left here.
        """
        with refused_as_not_found():
            saved = msgspec.msgpack.decode(data, type=SavedSession)
            if saved.key_name != key_name(key) or saved.session_id in self._living:
                raise KeyError(saved.session_id)
            return self.open(key, client=client, saved=saved)

    @property
    def has_store(self) -> bool:
        """Whether sessions are kept in a store, so that clients of other servers may continue theirs here."""
        return self._store is not None

    async def take_over(
        self,
        session_id: str,
        token: str,
        key: ApiKey | None,
        *,
        last_output: int,
        answers: Callable[[], Awaitable[bool]],
        client: str = "",
    ) -> tuple[Session, list[ReceivedFrame]]:
        """Continue a session of another server, whose client has received the outputs up to ``last_output``.

        ``answers`` pings the client, and returns whether it has answered: see Tokens in the module docstring.

        Returns the session, and the frames that the client sent to the other server and that the snapshot does not
        include. Hand these frames to the session within this pass of the event loop, before anything else; then
        ``spend`` the token. Raises SessionNotFound as ``claim`` does, and if the session cannot be continued here;
        SessionTimeout if the client does not answer; EngineOverloaded if the store does not; and what ``admit`` raises.
        """
        if self._store is None:
            raise SessionNotFound(_NO_SESSION, param="session_id")
        # First, since who waits long for room may have gone on elsewhere meanwhile.
        await self._factory.admission.room(key, client=client)
        lock = self._taking.setdefault(session_id, asyncio.Lock())
        async with lock:
            living = self._living.get(session_id)
            # Another connection was faster, or what the store has is of a session that ends.
            if living is not None and living.session.is_kept_here:
                try:
                    return await self.claim_alive(session_id, token, key, answers=answers), []
                except SessionNotFound:
                    # Or this process slept: another one has the session, and gave its client this token.
                    if living.session.owner != key_name(key) or await living.session.is_still_kept_here():
                        raise

            async def may_have(clear: ClearPart) -> bool:
                if clear.kind != self._origin or not admits(clear, key, token):
                    return False
                if is_spent(clear, token) and not await answers():
                    raise SessionTimeout(_NO_ANSWER)
                return True

            with store_errors():
                taken = await self._store.take(session_id, force=True, admits=may_have)
            if taken is None:
                raise SessionNotFound(_NO_SESSION, param="session_id")
            if (living := self._living.pop(session_id, None)) is not None:  # it was lost, and comes back
                self._factory.admission.ended(living)
            try:
                with refused_as_not_found():
                    saved = msgspec.msgpack.decode(taken.snapshot, type=SavedSession)
                    told, frames = read_entries(taken.entries)
                    session = self.open(key, client=client, saved=saved, taken=(taken.lease, told, last_output))
            except BaseException:
                self._store.release(taken.lease, delete=False)
                raise
            return session, frames

    def open(
        self,
        key: ApiKey | None,
        *,
        client: str = "",
        saved: SavedSession | None = None,
        taken: tuple[Lease, list[ToldOutput], int] | None = None,
        session_id: str | None = None,
    ) -> Session:
        """Open and run a session, to be attached to a connection: a new one, or one that continues ``saved``.

        ``client`` is the address of the client. ``session_id`` is given if the new session takes the id of an earlier
        one. ``taken``, for a session from the store, has its lease, the outputs made after it was saved, and the number
        of the last output that its client received. Raises ShuttingDown, EngineOverloaded, RateLimited or EngineFailed;
        with ``saved`` also what ``Session.restore`` and ``tell_again`` raise.
        """
        slot = self._factory.admission.take(key, client=client, many_requests=True)
        try:
            self._factory.check_ready()
            conversation = self._factory.open(
                output_formats=STREAM_FORMATS,
                any_model=self._any_model,
                origin=self._origin,
                resumable=self._grace > 0,
                survives=self._survive,
                session_id=session_id if saved is None else saved.session_id,
                owner=key_name(key),
                admit=partial(self._factory.admission.request, key),
            )
            session_id = conversation.observed.identity.session_id
            session = Session(session_id, conversation, conversation.outbox, grace=self._grace)
            if saved is not None:
                restore(session, saved, () if taken is None else taken[1], -1 if taken is None else taken[2])
            if self._store is not None:
                lease = taken[0] if taken else self._begin(session_id, key)
                session.keep_in(self._store, lease)
        except BaseException:
            slot.release()
            raise
        if key is not None and key.max_session_sec is not None:
            session.limit(key.max_session_sec)
        life = asyncio.create_task(self._run(session, slot), name=f"session {session.session_id}")
        living = self._living[session.session_id] = _Living(session, life, slot)
        self._factory.admission.opened_empty(living)
        return session

    def _begin(self, session_id: str, key: ApiKey | None) -> Lease:
        assert self._store is not None
        return self._store.begin(session_id, kind=self._origin, owner=key_name(key))

    async def _run(self, session: Session, slot: Slot) -> None:
        try:
            await session.run()
        finally:
            living = self._living.get(session.session_id)
            if living is not None and living.session is session:
                self._factory.admission.ended(self._living.pop(session.session_id))
            slot.release()
            if session.recording is not None:
                session.recording.finish()

    def claim(self, session_id: str, token: str, key: ApiKey | None) -> Session:
        """Return the session that a client may resume with this token, and spend the token.

        Raises SessionNotFound in all other cases, without the cause: only its own client may learn that a session
        exists.
        """
        living = self._living.get(session_id)
        if living is not None and living.session.owner == key_name(key) and living.session.admits(token):
            living.session.spend(token)
            return living.session
        raise SessionNotFound(_NO_SESSION, param="session_id")

    async def claim_alive(
        self, session_id: str, token: str, key: ApiKey | None, *, answers: Callable[[], Awaitable[bool]]
    ) -> Session:
        """Do as ``claim`` does; with a store, a client with a spent token must answer a ping first, see ``take_over``.

        Raises SessionTimeout if the client does not answer, or has come over another connection meanwhile.
        """
        living = self._living.get(session_id)
        if self._store is not None and living is not None and living.session.owner == key_name(key):
            session, before = living.session, None
            # Again if another connection came meanwhile: then this one may be what its client gave up.
            while session.has_spent(token) and session.digests != before:
                before = session.digests
                if not await answers() or (session.resumable and not session.has_spent(token)):  # or was heard over it
                    raise SessionTimeout(_NO_ANSWER)
        return self.claim(session_id, token, key)

    async def delete(self, session_id: str, token: str | None, key: ApiKey | None) -> None:
        """End a session, wherever it is open, and delete its record from the store.

        The key must be the owner's. On a server without keys, the token must be one that admits the client. Raises
        SessionNotFound in all other cases, without the cause; EngineOverloaded if the store does not answer.
        """
        owner = key_name(key)
        if (living := self._living.get(session_id)) is not None:
            session = living.session
            if session.owner == owner and (key is not None or (token is not None and session.admits(token))):
                await self.end(session, deleted=True)
                if session.keeper is None or await session.keeper.settled():
                    return
                # Another server had it already, and this one did not know.
        if self._factory.store is not None and await self._delete_kept(self._factory.store, session_id, token, key):
            return  # of any kind
        raise SessionNotFound(_NO_SESSION, param="session_id")

    async def _delete_kept(self, store: SessionStore, session_id: str, token: str | None, key: ApiKey | None) -> bool:
        if key is None and token is None:
            return False
        with store_errors():
            found = await store.peek(session_id)
            if found is None or not admits(found.clear, key, token if key is None else None):
                return False
            return await store.delete(session_id, owner=key_name(key))

    async def end(self, session: Session, *, deleted: bool = False) -> None:
        """End a session that its client cannot resume, or that is ``deleted``, and wait until its slot is free.

        Its connection, if any, is told that the session was deleted, or else that another has it.
        """
        session.release(deleted=deleted)
        session.end(None)
        living = self._living.get(session.session_id)
        if living is not None:
            await asyncio.wait([living.life])

    def has_open(self, session_id: str) -> bool:
        """Return whether a session is open here: it has neither ended nor been handed over."""
        living = self._living.get(session_id)
        return living is not None and living.session.is_open

    @property
    def disconnected(self) -> int:
        """The number of sessions without a connection."""
        return sum(living.session.disconnected for living in self._living.values())

    def drain(self, time_left: float) -> None:
        """Hand over the sessions that a store keeps; let the others end when their open requests are answered.

        The clients of the others are told that they have ``time_left`` seconds; call ``end_all`` after that.
        """
        for living in tuple(self._living.values()):
            if not living.session.hand_over():
                living.session.drain(time_left)

    def end_all(self, error: OmniError) -> None:
        """End all sessions now, with ``error`` as the reason. Sessions that a store keeps are handed over instead."""
        for living in tuple(self._living.values()):
            if not living.session.hand_over():
                living.session.end(error)

    async def wait_closed(self) -> None:
        """Wait until the sessions that are open now have ended."""
        lives = [living.life for living in self._living.values()]
        if lives:
            await asyncio.wait(lives)

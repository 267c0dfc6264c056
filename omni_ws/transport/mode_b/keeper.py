"""ModeBKeeper: finds Mode B sessions in this process or in the store, so that any server of the store serves them.

**Which server has a session.** A session is in this process while work is done for it: a request is served, or an
answer is made. Meanwhile this server holds the lease of the record, and other servers answer ``session_conflict``. A
session is *at rest* if it has ended, or if it waits for input and nothing of its answer was made. A session at rest is
given back: it is removed from this process's memory and its lease is released; the next server that is asked for it
takes it. A session with much input, or on which work has begun, is given back ``LINGER_SEC`` later, since taking it
again costs time in proportion to its input.

**What is in the record.** A snapshot, and a log of what happened since: the bodies that were fed, and the outputs of
the running answer. Appending an entry costs only its own bytes, however long the log is. The response to a request
waits until the changes that the request made are settled, and readers see an output only once it is settled. So another
server that goes on with an answer begins after everything that a reader has seen.

**Ended sessions** never change, except that they are deleted. Any number of servers read them simultaneously, without a
lease. If a session has ended, the clear part of its record has ``away`` set to the time of the end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final, TypeAlias

import msgspec

from omni_ws.config.keys import ApiKey, key_name
from omni_ws.core.chunks import SAMPLE_BYTES, AudioEncoding, OutputChunk, OutputModality, heard_language
from omni_ws.core.request_input import InputState
from omni_ws.errors import EngineFailed, InvalidRequest, OmniError, SessionExpired, SessionNotFound, ShuttingDown
from omni_ws.service.conversation.begun_answer import ToldOutput
from omni_ws.service.conversation.output_log import Gate, ServerMessage
from omni_ws.service.conversation.request import Request
from omni_ws.service.sessions.keeper import (
    find_record,
    held_elsewhere,
    store_errors,
    take_record,
)
from omni_ws.service.sessions.session import refused_as_not_found
from omni_ws.service.store.session_store import Lease, LeaseHolder, SessionStore
from omni_ws.transport.http.exchange import to_thread_if_large
from omni_ws.transport.mode_b.session import LIVE, ModeBRegistry, ModeBSession, SavedModeB
from omni_ws.wire.streaming_body import read_append

#: The encodings of audio in which the bytes of a piece tell its duration, so that an answer can go on after it.
_CAN_BE_CUT: Final = frozenset(SAMPLE_BYTES) | {AudioEncoding.WAV}
#: The kind of these records.
MODE_B_KIND: Final = "mode_b"
#: A session with more input than ``SMALL_BYTES``, or on which work has begun, is given back when no request has come
#: for ``LINGER_SEC``.
SMALL_BYTES: Final = 64 * 1024
LINGER_SEC: Final = 0.5


class KeptModeB(msgspec.Struct, kw_only=True):
    """The snapshot of a Mode B session in its record."""

    #: When the snapshot was written; Unix time in seconds.
    at: float
    session: SavedModeB


class _Fed(msgspec.Struct, array_like=True, tag="fed"):
    """An entry of the log: a ``body`` that was fed at the Unix time ``at``; None is the end of the input."""

    at: float
    body: dict[str, Any] | None


class _Made(msgspec.Struct, array_like=True, tag="made"):
    """An entry of the log: an output of the running answer."""

    output: OutputChunk


class _Said(msgspec.Struct, array_like=True, tag="said"):
    """An entry of the log: text of an answer that is sent as speech only, so that no output has the text."""

    request_id: str
    text: str


_Entry: TypeAlias = _Fed | _Made | _Said
_decoder: Final = msgspec.msgpack.Decoder(_Entry)
_encode: Final = msgspec.msgpack.Encoder().encode


class _Held(LeaseHolder, Gate):
    """A session in this process, and the lease of its record. Without a lease, the session is a read-only copy."""

    def __init__(
        self, keeper: ModeBKeeper, store: SessionStore, session: ModeBSession, owner: str | None, lease: Lease | None
    ) -> None:
        self.session, self.owner = session, owner
        self.lease: Lease | None = None
        #: The number of requests and readers that use the session.
        self.users = 0
        #: Held while a body is fed, so that the log has the bodies in the order in which they were fed.
        self._feeding = asyncio.Lock()
        #: Whether a snapshot was written while a body was being fed, and so contains a part of the body.
        self._mixed = False
        #: Whether the record is out of date, since the store has failed or does not keep a session of this size.
        self.behind = False
        self._resting: asyncio.TimerHandle | None = None
        #: Whether the answer has any output yet.
        self.made = any(isinstance(one, OutputChunk) for one in session.output.messages)
        self._keeper = keeper
        self._store = store
        #: The newest ticket, see Gate.
        self._ticket = 0
        #: Whether a snapshot will be written in the next pass of the event loop. Until then, nothing is written to the
        #: log.
        self._marked = False
        session.tell(done=self._snapshot_and_rest, forgotten=partial(keeper.drop, self))
        if lease is not None:
            self.write_by(lease)

    def write_by(self, lease: Lease) -> None:
        """Write the record with this lease from now on."""
        self.lease, lease.holder, self.session.output.gate = lease, self, self

    @property
    def works(self) -> bool:
        """Whether work keeps the session in this process.

        It does while a body is received before work begins, once output was made or all input has arrived, and until
        the engine has released an ended session.
        """
        session = self.session
        if session.state is InputState.STARTED:
            return self.made or session.progress.ended
        return session.busy

    @property
    def waits(self) -> bool:
        """Whether a snapshot is due, the record is out of date, or outputs wait until they are settled."""
        return self._marked or self.behind or bool(self.session.output)

    def snapshot(self) -> None:
        """Replace the contents of the record by a snapshot of the session as it is now.

        Once the snapshot is settled, a session at rest is given back. While the store fails, the record is only marked
        as out of date. Does nothing without a lease.
        """
        if self.lease is None:
            return
        self._marked, self.behind, self._mixed = False, self._store.degraded, True
        session = self.session
        if not self.behind:
            data = _encode(KeptModeB(at=time.time(), session=session.saved_for(self.owner)))
            self._store.snapshot(self.lease, data, tokens=(), away=not session.live)
        self._open_when_settled(self.lease)
        self._store.when_settled(self.lease, partial(self._keeper.rest, self))

    @asynccontextmanager
    async def fed(self, body: Mapping[str, Any] | None, size: int) -> AsyncIterator[None]:
        """Feed ``body`` to the session in the block and write it to the log; see ``ModeBKeeper.feeding``."""
        session = self.session
        async with self._feeding:
            self._mixed = self.lease is not None and not self.lease.whole
            before, fed = session.progress, False
            try:
                yield
                fed = True
            except InvalidRequest:  # some chunks are refused, wherever they are fed
                fed = True
                raise
            finally:
                self._mixed = self._mixed or not fed  # the log has whole bodies only
                if session.live and (fed or session.progress != before):
                    entry = _Fed(time.time(), None if body is None else dict(body))
                    encoded = b""
                    try:
                        encoded = await to_thread_if_large(size, partial(_encode, entry))
                    except RecursionError:  # what is nested so deep, and means nothing here, has no place in a log
                        self._mixed = True
                    if self._mixed and not self.behind:
                        self.snapshot()
                    elif encoded:
                        self.append(encoded)
                await self._keeper.settled(session)

    def append(self, entry: bytes) -> None:
        """Append an entry to the log of the record."""
        if self.lease is not None:
            self._store.append(self.lease, entry)

    async def settled(self) -> None:
        """Wait until everything so far is settled in the record."""
        if self.lease is not None:
            if self._marked:
                self.snapshot()
            await self._store.settle(self.lease)

    def use(self, users: int = 1) -> None:
        """Add ``users`` requests and readers to those that use the session, and keep the session in this process."""
        self.users += users
        self.stay()

    def unuse(self) -> None:
        """Remove one request or reader from those that use the session."""
        self.users -= 1

    def linger(self, give_back: Callable[[_Held], None]) -> None:
        """Call ``give_back`` after ``LINGER_SEC``, unless ``stay`` is called before."""
        self._resting = asyncio.get_running_loop().call_later(LINGER_SEC, give_back, self)

    def stay(self) -> None:
        """Keep the session in this process until ``ModeBKeeper.rest`` is called again."""
        if self._resting is not None:
            self._resting.cancel()
            self._resting = None

    def release(self, *, delete: bool) -> None:
        """Stop writing the record, and release its lease to other servers, or delete the record."""
        self.session.tell(done=None, forgotten=None)
        self.session.output.gate = None
        self.stay()
        if self.lease is not None and not self.lease.lost:
            self._store.release(self.lease, delete=delete)
        self.lease = None

    def _open_when_settled(self, lease: Lease) -> None:
        self._store.when_settled(lease, partial(self.session.output.open, self._ticket))

    def _take_marked(self) -> None:
        if self._marked:
            self._snapshot_and_rest()

    def _snapshot_and_rest(self) -> None:
        self.snapshot()
        self._keeper.rest(self)

    # the gate of the output

    def admit(self, message: ServerMessage) -> int:
        if self.lease is None or not self.session.live:  # what follows the end is in the last snapshot
            return 0
        self._ticket += 1
        self.made = self.made or type(message) is OutputChunk
        if not self._marked:
            if type(message) is OutputChunk and (self.lease.whole or self.behind):
                self.append(_encode(_Made(message)))
                self._open_when_settled(self.lease)
            else:
                self.changed()
        return self._ticket

    def said(self, request_id: str, text: str) -> None:
        if not self._marked:
            self.append(_encode(_Said(request_id, text)))

    def changed(self) -> None:
        if self.lease is not None and not self._marked:
            self._marked = True
            asyncio.get_running_loop().call_soon(self._take_marked)

    # the store

    def lease_lost(self, *, deleted: bool) -> None:
        self._keeper.lose(self, SessionNotFound("the session was deleted") if deleted else held_elsewhere())

    def store_degraded(self) -> None:
        self.behind = True

    def store_wants_snapshot(self) -> None:
        self._snapshot_and_rest()


class _Fetch:
    """A search for a session in the store, shared by all requests that look for it with the same key."""

    def __init__(self, fetched: Callable[[_Fetch], Coroutine[Any, Any, _Held | OmniError]], *, name: str) -> None:
        """``fetched`` finds the session; it runs in a task of this ``name``."""
        #: The number of requests that wait for the session.
        self.users = 0
        #: Done when the session's input begins to be fed again, as fast as the engine takes it.
        self.feeds = asyncio.get_running_loop().create_future()
        #: Ends with the session, or with the error why there is none.
        self.task = asyncio.create_task(fetched(self), name=name)

    def join(self) -> None:
        """Count one more request that waits for the session."""
        self.users += 1

    def leave(self) -> None:
        """Count one request less."""
        self.users -= 1


class ModeBKeeper:
    """Finds the sessions of ``registry``, and keeps them in ``store``, if there is a store; see the module."""

    def __init__(self, registry: ModeBRegistry, store: SessionStore | None = None) -> None:
        self.registry = registry
        self._store = store
        self._held: dict[str, _Held] = {}
        #: The sessions that are sought in the store, by id and the name of the key that asks.
        self._fetches: dict[tuple[str, str | None], _Fetch] = {}
        #: The ids of sessions whose input is fed again, as fast as the engine takes it.
        self._returning: set[str] = set()
        self._leaving = False

    # requests

    @asynccontextmanager
    async def opened(self, session: ModeBSession, owner: str | None) -> AsyncIterator[None]:
        """Keep a new session, which is first used in the block.

        ``owner`` is the name of its key. If the block raises, the session ends, and its record is deleted.
        """
        held: _Held | None = None
        if self._store is not None:
            lease = self._store.begin(session.id, kind=MODE_B_KIND, owner=owner)
            held = self._held[session.id] = _Held(self, self._store, session, owner, lease)
            held.use()
        try:
            yield
        except BaseException:
            self.drop(held, delete=True)
            self.registry.discard(session)
            raise
        self._unuse(held)

    @asynccontextmanager
    async def using(
        self, session_id: str, key: ApiKey | None, *, client: str, patience: float | None = None
    ) -> AsyncIterator[ModeBSession]:
        """Find a session, here or in the store, for use in the block.

        If the input of a restored session is being fed to the engine again, wait until the engine has taken all of it.
        After ``patience`` seconds, yield the session anyway: while ``is_returning``, the block may only read its state.

        ``client`` is the address of the client, for the limits of a session that is restored. Raises what
        ``ModeBRegistry.get`` and ``restored`` raise, SessionConflict if another server has the session,
        EngineOverloaded if the store does not answer, and ShuttingDown if this one ends.
        """
        held = self._held.get(session_id)
        if held is not None:
            held.use()
        elif self._store is not None:
            held = await self._sought(self._fetch(session_id, key, client, self._store), patience)
        try:
            yield self.registry.get(session_id, key)
        finally:
            self._unuse(held)

    @asynccontextmanager
    async def feeding(self, session: ModeBSession, body: Mapping[str, Any] | None, size: int) -> AsyncIterator[None]:
        """Feed ``body`` (``size`` bytes; None ends the input) to a session in the block; then wait until it is settled.

        Input that the session accepted is kept even if the block raises.
        """
        held = self._held.get(session.id)
        if held is None or held.lease is None:
            yield
            return
        async with held.fed(body, size):
            yield

    def stop_returning(self, session_id: str, key: ApiKey | None) -> None:
        """Cancel a session that is being restored (the engine gets its stored input again), without waiting for that.

        Does nothing for any other session.
        """
        if session_id in self._returning:
            self.registry.get(session_id, key).cancel()

    async def cancel(self, session: ModeBSession) -> None:
        """Cancel a session, and wait until the engine has stopped and the cancellation is settled.

        Raises what ``take_record`` raises, and SessionExpired if a session that has ended expires meanwhile.
        """
        held = self._held.get(session.id)
        if held is not None and held.lease is None and self._store is not None:  # it has ended
            lease = (await take_record(self._store, session.id)).lease
            if session.expired:
                self._store.release(lease, delete=True)
                raise SessionExpired(session.expired_because, param="session_id")
            held.write_by(lease)
        was_live = session.live
        session.cancel()
        if not was_live and held is not None:
            held.snapshot()
        await self.settled(session)

    async def settled(self, session: ModeBSession) -> None:
        """Wait until the state of the session is settled in the store.

        If the session has ended, also wait until the engine has released it.
        """
        if not session.live:
            await session.wait_released()
        if (held := self._held.get(session.id)) is not None:
            await held.settled()

    # in whose hands

    def rest(self, held: _Held) -> None:
        """Give a session back, now or after ``LINGER_SEC``, if it is at rest."""
        held.stay()
        session = held.session
        leaves = self._leaving and session.live and not held.behind
        if held.users or self._store is None or self._store.degraded or (not leaves and (held.works or held.waits)):
            return
        if self._held.get(session.id) is not held:  # it was given back meanwhile
            return
        begun = session.live and (session.started or session.progress.received_bytes > SMALL_BYTES)
        if begun and not leaves:
            held.linger(self._give_back)
        else:
            self._give_back(held)

    def lose(self, held: _Held, error: OmniError) -> None:
        """End a session whose record another server has taken or deleted. Readers get ``error``."""
        self.drop(held, delete=isinstance(error, SessionNotFound))
        held.session.fail(error)
        self.registry.discard(held.session)

    def _give_back(self, held: _Held) -> None:
        self.drop(held)
        self.registry.discard(held.session)

    def drop(self, held: _Held | None, *, delete: bool = False) -> None:
        """Stop writing the record of a session, and release its lease to other servers, or delete the record."""
        if held is not None and self._held.pop(held.session.id, None) is not None:
            conversation = held.session.conversation
            if conversation is not None and not delete and not held.behind:
                conversation.observed.timeline.goes_elsewhere()
            held.release(delete=delete)

    def _unuse(self, held: _Held | None) -> None:
        if held is not None:
            held.unuse()
            if self._held.get(held.session.id) is held:
                self.rest(held)

    # taking

    def is_returning(self, session: ModeBSession) -> bool:
        """Whether the input of a restored session is still being fed to the engine again."""
        return session.id in self._returning

    def _fetch(self, session_id: str, key: ApiKey | None, client: str, store: SessionStore) -> _Fetch:
        """Return the search for a session in the store: the running one, which all requests share, or a new one."""
        name = session_id, key_name(key)
        if (fetch := self._fetches.get(name)) is None or fetch.task.done():  # what it found may have been given back
            fetched = partial(self._fetch_for_all, session_id=session_id, key=key, client=client, store=store)
            fetch = self._fetches[name] = _Fetch(fetched, name=f"fetch of {session_id}")
            fetch.task.add_done_callback(partial(self._forget_fetch, name))
        return fetch

    def _forget_fetch(self, name: tuple[str, str | None], task: asyncio.Task[_Held | OmniError]) -> None:
        if self._fetches[name].task is task:
            del self._fetches[name]

    async def _fetch_for_all(
        self, fetch: _Fetch, *, session_id: str, key: ApiKey | None, client: str, store: SessionStore
    ) -> _Held | OmniError:
        try:
            held = await self._fetched(fetch, session_id, key, client, store)
        except OmniError as error:  # nobody may be left who waits
            return error
        held.use(fetch.users - 1)
        if not held.users:
            self.rest(held)
        return held

    async def _sought(self, fetch: _Fetch, patience: float | None) -> _Held | None:
        """Return the session that ``fetch`` finds, and count its caller as a user.

        Returns None if the session's input is still being fed again after ``patience`` seconds.
        """
        fetch.join()
        try:
            await asyncio.wait([fetch.task, fetch.feeds], return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait([fetch.task], timeout=patience)
        except BaseException:
            self._leave(fetch)
            raise
        if not fetch.task.done():
            self._leave(fetch)
            return None
        if fetch.task.cancelled():
            raise ShuttingDown("the server is shutting down")
        found = fetch.task.result()
        if isinstance(found, OmniError):
            raise found
        return found

    def _leave(self, fetch: _Fetch) -> None:
        """Stop waiting for ``fetch``; if it has found its session already, stop using the session."""
        fetch.leave()
        task = fetch.task
        if (
            task.done()
            and not task.cancelled()
            and task.exception() is None
            and isinstance(held := task.result(), _Held)
        ):
            self._unuse(held)

    async def _fetched(
        self, fetch: _Fetch, session_id: str, key: ApiKey | None, client: str, store: SessionStore
    ) -> _Held:
        """Take a session from the store and restore it. The caller counts as its first user."""
        found = await find_record(store, session_id, kind=MODE_B_KIND, key=key, token=None)
        if found.away_sec is not None:
            self._check_age(found.away_sec)
            with store_errors():
                contents = await store.read(session_id)
            if contents is None:  # deleted meanwhile
                raise SessionNotFound("session not found", param="session_id")
            held = await self._restored(fetch, store, contents[0], (), None, key, client)
            held.session.was_at_rest(found.away_sec)
            return held
        taken = await take_record(store, session_id)
        try:
            return await self._restored(fetch, store, taken.snapshot, taken.entries, taken.lease, key, client)
        except BaseException:
            store.release(taken.lease, delete=False)
            raise

    async def _restored(
        self,
        fetch: _Fetch,
        store: SessionStore,
        snapshot: bytes,
        entries: tuple[bytes, ...],
        lease: Lease | None,
        key: ApiKey | None,
        client: str,
    ) -> _Held:
        size = len(snapshot) + sum(map(len, entries))
        with refused_as_not_found():
            kept, log = await to_thread_if_large(size, lambda: _decoded(snapshot, entries))
            age = time.time() - max([kept.at, *(one.at for one in log if isinstance(one, _Fed))])
            if kept.session.state in LIVE:
                self._check_age(age)
            session = self.registry.restored(kept.session, key, client=client)
        self._returning.add(session.id)
        fetch.feeds.set_result(None)
        try:
            held = await self._fed_again(store, session, log, kept.session.key_name, lease)
            if session.live:
                session.was_at_rest(max(0.0, age))
            return held
        finally:
            self._returning.discard(session.id)

    async def _fed_again(
        self, store: SessionStore, session: ModeBSession, log: Sequence[_Entry], owner: str | None, lease: Lease | None
    ) -> _Held:
        try:
            with refused_as_not_found():
                await _go_through(session, log)
            if session.conversation is not None:  # the input of the log has counted elsewhere, too
                session.conversation.observed.timeline.goes_on()
                for request in session.conversation.queue.requests:
                    request.timeline.note_counted(request.usage(None).input_audio_ms)
            if lease is not None and lease.lost:  # meanwhile
                raise held_elsewhere()
        except BaseException:
            self.registry.discard(session)
            raise
        held = self._held[session.id] = _Held(self, store, session, owner, lease)
        held.use()
        if session.started or not session.live:  # what was made meanwhile is in no record
            held.snapshot()
            try:
                await held.settled()
                if lease is not None and lease.lost:
                    raise held_elsewhere()
            except BaseException:
                self._give_back(held)
                raise
        return held

    def _check_age(self, age: float) -> None:
        """Raise SessionExpired or SessionNotFound if a session that was at rest for ``age`` seconds is too old.

        The ages are those at which ``ModeBRegistry`` expires and forgets a session in this process.
        """
        if age >= 2 * self.registry.timeout:
            raise SessionNotFound("session not found", param="session_id")
        if age >= self.registry.timeout:
            raise SessionExpired("the session has expired", param="session_id")

    # the server

    def drain(self, error: OmniError) -> None:
        """Give each session back to the store as soon as nobody uses it; end the sessions that have no input yet."""
        self._leaving = True
        for held in [*self._held.values()]:
            self.rest(held)
        self.registry.drain(error)

    def end_all(self, error: OmniError) -> None:
        """End every session in this process. Their records stay as they were last written."""
        for fetch in self._fetches.values():
            fetch.task.cancel()
        for held in [*self._held.values()]:
            self.drop(held)
        self.registry.end_all(error)


def _decoded(snapshot: bytes, entries: tuple[bytes, ...]) -> tuple[KeptModeB, list[_Entry]]:
    return msgspec.msgpack.decode(snapshot, type=KeptModeB), [*map(_decoder.decode, entries)]


async def _go_through(session: ModeBSession, log: Sequence[_Entry]) -> None:
    """Bring a session that was restored from a snapshot up to date by the entries of its log.

    The outputs are noted first, before anything is awaited: the answer, which begins anew, must continue after them.

    Raises LookupError if the log does not fit the session, and what ``ModeBSession.feed`` raises, except for errors
    that the client has received already.
    """
    for one in log:
        match one:
            case _Made(output=output):
                _tell_again(session, output)
            case _Said(request_id=request_id, text=text):
                _open_request(session, request_id).entry.say(text)
    for one in log:
        match one:
            case _Fed(body=None):
                session.finish()
            case _Fed(body=dict(body)):
                try:
                    await session.feed(read_append(body))
                except OmniError as error:
                    if session.live and not isinstance(error, InvalidRequest):  # of which the client was told
                        raise


def _open_request(session: ModeBSession, request_id: str) -> Request:
    request = None if session.conversation is None else session.conversation.queue.find(request_id)
    if request is None:
        raise LookupError(request_id)
    return request


def _tell_again(session: ModeBSession, output: OutputChunk) -> None:
    """Note an output of a restored session's answer, and store it. Readers may have seen the output already.

    If the answer cannot go on after it, fail the session.
    """
    request = _open_request(session, output.request_id)
    entry, conversation = request.entry, session.conversation
    assert conversation is not None
    coding = None if output.format is None else output.format.encoding
    if output.choice or (coding is not None and coding not in _CAN_BE_CUT):
        session.fail(EngineFailed("the server that made this answer was lost, and this kind of answer cannot go on"))
        return
    match output.modality:
        case OutputModality.TEXT:
            entry.say(output.text)
        case OutputModality.AUDIO:
            told = ToldOutput.of(output, entry.sent_ms)
            assert told is not None
            conversation.ledger.send(entry, output.sequence_id, told.start_ms, told.end_ms, request.timeline.now())
        case OutputModality.TRANSCRIPT if not output.interim:
            conversation.ledger.hear(entry, output.text, language=heard_language(output.hearing))
        case OutputModality.TOOL_CALL if output.tool_call is not None:
            entry.call(output.tool_call)
    conversation.queue.number_from(output.sequence_id + 1)
    conversation.outbox.put_nowait(output)

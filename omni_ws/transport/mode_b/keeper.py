"""ModeBKeeper: finds Mode B sessions here and, with a store, in there; any server of the store can serve them.

**In whose hands.** A session is here while something is done for it: a request is served, an answer is made. The record
is held then, and other servers answer ``session_conflict``. A session at rest (its answer has not begun, or has ended)
is given back: it is gone from this server's memory, and whichever server is asked next takes it. One with much input
is given back a moment later, since to take it again costs as much as it has.

**What is in the record.** A snapshot, and the bodies that were fed since: a body costs as much as it has, however much
came before. No request is answered before what it brought is settled.

**Ended sessions** never change, except that they are deleted. They are read without being held, by any number of
servers at once. The clear part of a record has ``away`` set if its session has ended, and since when.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Final
from weakref import WeakValueDictionary

import msgspec

from omni_ws.config.keys import ApiKey
from omni_ws.errors import OmniError, SessionExpired, SessionNotFound
from omni_ws.service.sessions.records import find_record, held_elsewhere, store_errors, take_record
from omni_ws.service.sessions.session import refused_as_not_found
from omni_ws.service.store.session_store import Lease, LeaseHolder, SessionStore
from omni_ws.transport.http.exchange import to_thread_if_large
from omni_ws.transport.mode_b.session import ModeBRegistry, ModeBSession, SavedModeB
from omni_ws.wire.streaming_body import read_append

#: The kind of these records.
MODE_B_KIND: Final = "mode_b"
#: A session with more input than this is given back when no request has come for so many seconds.
SMALL_BYTES: Final = 64 * 1024
LINGER_SEC: Final = 0.5


class KeptModeB(msgspec.Struct, kw_only=True):
    """The snapshot of a record."""

    #: When it was written; Unix time in seconds.
    at: float
    session: SavedModeB


class _Fed(msgspec.Struct, array_like=True):
    """An entry of the log: a body that was fed at the time ``at``; without ``body``, the end of the input."""

    at: float
    body: dict[str, Any] | None


class _Held(LeaseHolder):
    """A session that is here, and the right to write its record; without a ``lease`` it is a copy to be read."""

    def __init__(self, keeper: ModeBKeeper, session: ModeBSession, owner: str | None, lease: Lease | None) -> None:
        self.session, self.owner, self.lease = session, owner, lease
        #: Requests and readers that use it.
        self.users = 0
        #: Held while a body is fed, so that the log has bodies in the order in which they were.
        self.feeding = asyncio.Lock()
        #: Whether the record has that work on the request has begun.
        self.begun = session.started
        #: Whether the store has failed since the record was written.
        self.behind = False
        self.resting: asyncio.TimerHandle | None = None
        self._keeper = keeper
        session.when_done = self._done
        if lease is not None:
            lease.holder = self

    def snapshot(self) -> bytes:
        """Return what the record is to have of the session as it is."""
        self.begun, self.behind = self.session.started, False
        return msgspec.msgpack.encode(KeptModeB(at=time.time(), session=self.session.saved_for(self.owner)))

    def _done(self, session: ModeBSession) -> None:
        self._keeper.write(self)
        self._keeper.rest(self)

    def lease_lost(self) -> None:
        self._keeper.lose(self)

    def store_degraded(self) -> None:
        self.behind = True

    def store_wants_snapshot(self) -> None:
        if not self.feeding.locked():  # else one is written when the body is fed
            self._keeper.write(self)
            self._keeper.rest(self)


class ModeBKeeper:
    """Finds the sessions of ``registry``, and keeps them in ``store``, if there is one: see the module."""

    def __init__(self, registry: ModeBRegistry, store: SessionStore | None = None) -> None:
        self.registry = registry
        self._store = store
        self._held: dict[str, _Held] = {}
        #: By id, held while a session is sought in the store.
        self._seeking: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._leaving = False

    # requests

    @asynccontextmanager
    async def opened(self, session: ModeBSession, owner: str | None) -> AsyncIterator[None]:
        """Keep a new session, which is created and used in the block. If the block raises, nothing is left of it."""
        held: _Held | None = None
        if self._store is not None:
            lease = self._store.begin(session.id, kind=MODE_B_KIND, owner=owner)
            held = self._held[session.id] = _Held(self, session, owner, lease)
            held.users = 1
        try:
            yield
        except BaseException:
            self._drop(held, delete=True)
            self.registry.discard(session)
            raise
        self._unuse(held)

    @asynccontextmanager
    async def using(self, session_id: str, key: ApiKey | None, *, client: str) -> AsyncIterator[ModeBSession]:
        """Find a session, here or in the store, for the block.

        Raises what ``ModeBRegistry.get`` and ``restored`` raise; SessionConflict if another server has it, and
        EngineOverloaded if the store does not answer.
        """
        held: _Held | None = None
        if self._store is not None:
            async with self._seeking.setdefault(session_id, asyncio.Lock()):
                held = self._held.get(session_id) or await self._fetched(session_id, key, client, self._store)
                held.users += 1
        try:
            yield self.registry.get(session_id, key)
        finally:
            self._unuse(held)

    @asynccontextmanager
    async def feeding(self, session: ModeBSession, body: Mapping[str, Any] | None, size: int) -> AsyncIterator[None]:
        """Feed ``body`` of ``size`` bytes to a session in the block, or end its input; then wait until that is settled.

        What is accepted is kept even if the block raises.
        """
        held = self._held.get(session.id)
        if held is None or held.lease is None:
            yield
            return
        async with held.feeding:
            try:
                yield
            finally:
                if session.live and held.lease.whole and held.begun is session.started:
                    encode = partial(msgspec.msgpack.encode, _Fed(time.time(), None if body is None else dict(body)))
                    self._append(held, await to_thread_if_large(size, encode))
                elif session.live:
                    self.write(held)
                await self.settled(session)

    async def cancel(self, session: ModeBSession) -> None:
        """Cancel a session, and wait until the engine has stopped, and until that is settled.

        Raises SessionConflict if another server has it.
        """
        held = self._held.get(session.id)
        if held is not None and held.lease is None and self._store is not None:  # it has ended
            taken = await take_record(self._store, session.id)
            held.lease, taken.lease.holder = taken.lease, held
        was_live = session.live
        session.cancel()
        if not was_live and held is not None:
            self.write(held)
        await self.settled(session)

    async def settled(self, session: ModeBSession) -> None:
        """Wait until the store has the session as it is. If it has ended, wait until the engine has released it."""
        if not session.live:
            await session.wait_released()
        held = self._held.get(session.id)
        if self._store is not None and held is not None and held.lease is not None:
            await self._store.settle(held.lease)

    # the record

    def write(self, held: _Held) -> None:
        """Replace the record by the session as it is."""
        if self._store is not None and held.lease is not None:
            self._store.snapshot(held.lease, held.snapshot(), tokens=(), away=not held.session.live)

    def _append(self, held: _Held, entry: bytes) -> None:
        if self._store is not None and held.lease is not None:
            self._store.append(held.lease, entry)

    def rest(self, held: _Held) -> None:
        """Give a session back, now or a moment later, if nothing is done for it."""
        if held.resting is not None:
            held.resting.cancel()
            held.resting = None
        session = held.session
        busy = session.busy and not (self._leaving and session.live)
        if held.users or busy or held.behind or self._store is None or self._store.degraded:
            return
        if session.live and not self._leaving and session.progress.received_bytes > SMALL_BYTES:
            held.resting = asyncio.get_running_loop().call_later(LINGER_SEC, self._give_back, held)
        else:
            self._give_back(held)

    def lose(self, held: _Held) -> None:
        """End a session that another server has taken."""
        self._drop(held)
        held.session.fail(held_elsewhere())
        self.registry.discard(held.session)

    def _give_back(self, held: _Held) -> None:
        self._drop(held)
        self.registry.discard(held.session)

    def _drop(self, held: _Held | None, *, delete: bool = False) -> None:
        """Write no more of a session, and leave its record to others, or delete it."""
        if held is None or self._held.pop(held.session.id, None) is None:
            return
        held.session.when_done = None
        if held.resting is not None:
            held.resting.cancel()
        if self._store is not None and held.lease is not None and not held.lease.lost:
            self._store.release(held.lease, delete=delete)

    def _unuse(self, held: _Held | None) -> None:
        if held is not None:
            held.users -= 1
            if self._held.get(held.session.id) is held:
                self.rest(held)

    # taking

    async def _fetched(self, session_id: str, key: ApiKey | None, client: str, store: SessionStore) -> _Held:
        found = await find_record(store, session_id, kind=MODE_B_KIND, key=key, token=None)
        if found.away_sec is not None:
            self._check_age(found.away_sec)
            with store_errors():
                contents = await store.read(session_id)
            if contents is None:  # deleted meanwhile
                raise SessionNotFound("session not found", param="session_id")
            return await self._restored(contents[0], (), None, key, client)
        taken = await take_record(store, session_id)
        try:
            return await self._restored(taken.snapshot, taken.entries, taken.lease, key, client)
        except BaseException:
            store.release(taken.lease, delete=False)
            raise

    async def _restored(
        self, snapshot: bytes, entries: tuple[bytes, ...], lease: Lease | None, key: ApiKey | None, client: str
    ) -> _Held:
        size = len(snapshot) + sum(map(len, entries))
        with refused_as_not_found():
            kept, fed = await to_thread_if_large(size, lambda: _decoded(snapshot, entries))
            if kept.session.live:
                self._check_age(time.time() - (fed[-1].at if fed else kept.at))
            session = self.registry.restored(kept.session, key, client=client)
        try:
            with refused_as_not_found():
                for one in fed:
                    with suppress(OmniError):  # which its client was told
                        if one.body is None:
                            session.finish()
                        else:
                            await session.feed(read_append(one.body))
        except BaseException:
            self.registry.discard(session)
            raise
        held = self._held[session.id] = _Held(self, session, kept.session.key_name, lease)
        if kept.session.live and not session.live and not session.busy:  # it has ended while it was fed
            self.write(held)
        return held

    def _check_age(self, age: float) -> None:
        """Raise SessionExpired or SessionNotFound for a session at rest for ``age`` seconds, as if it had been here."""
        if age >= 2 * self.registry.timeout:
            raise SessionNotFound("session not found", param="session_id")
        if age >= self.registry.timeout:
            raise SessionExpired("the session has expired", param="session_id")

    # the server

    def drain(self, error: OmniError) -> None:
        """Give back the sessions that nobody uses, and each other one when nobody does; end those without any input."""
        self._leaving = True
        for held in [*self._held.values()]:
            self.rest(held)
        self.registry.drain(error)

    def end_all(self, error: OmniError) -> None:
        """End every session here. Their records are as they were last written."""
        for held in [*self._held.values()]:
            self._drop(held)
        self.registry.end_all(error)


def _decoded(snapshot: bytes, entries: tuple[bytes, ...]) -> tuple[KeptModeB, list[_Fed]]:
    fed = [msgspec.msgpack.decode(entry, type=_Fed) for entry in entries]
    return msgspec.msgpack.decode(snapshot, type=KeptModeB), fed

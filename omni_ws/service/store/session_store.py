"""The only writer of a process to a store of sessions: queues, group commits, leases, and recovery from failures.

**Writing.** ``append`` and ``snapshot`` queue data and return. One task commits what is queued, of all sessions
together, as soon as there is something and the previous commit is done; no timer delays it. What is committed is
*settled*.

**Leases.** A process writes to a record by its Lease. Whoever takes the record raises its fence number, and the next
commit of the previous holder finds its lease lost: the session ends there, and its client is told nothing.

**Degraded.** If a commit takes longer than ``slow_sec``, the store is full, or it is gone, nothing waits for it any
more: what is queued is dropped, everything counts as settled, and further entries are not kept. Records stay as they
were: a client that resumes from one of them finds less than it was told. The store is tried again and again; once it
works, each session is asked for a snapshot, a few at a time.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Final, Protocol, TypeAlias, TypeVar

import msgspec

from omni_ws.config.values import ConfigurationError
from omni_ws.core.quota import ByteBudget
from omni_ws.engine.threads import Work, run_work
from omni_ws.metrics import Metrics
from omni_ws.service.store.records import (
    FULL,
    GONE,
    SLOW,
    SNAPSHOT_PLACE,
    Change,
    ChangeOutcome,
    ClearPart,
    Contents,
    FoundRecord,
    Seal,
    Sealer,
    StoreBackend,
    StoreEnd,
    StoreError,
    StoreSize,
    Unreadable,
    packed,
    unpacked,
)

T = TypeVar("T")

logger = logging.getLogger(__name__)

#: The longest commit that is allowed if the loop itself is busy, in seconds; and the number of checks within
#: ``slow_sec`` whether it is busy.
_BUSY_SEC: Final = 2.0
_TICKS: Final = 5
#: Time for an answer of the store to a question: ``peek``, ``take``, ``read``, ``delete``. Few run simultaneously, as
#: commits must not wait behind a thousand clients that come back.
ANSWER_SEC: Final = 5.0
_QUESTIONS: Final = 4
#: Time between two tries while the store is degraded: it doubles, up to the second.
RETRY_SEC: Final = (0.25, 2.0)
#: If a store fails again within the first number of seconds, the time before the next try doubles, up to the second
#: number: writing all sessions anew is much work.
_RELAPSE_SEC: Final = (30.0, 30.0)
#: Time for the last commits of ``stop``.
STOP_SEC: Final = 5.0
#: Time between two signs of life of this process, and between two looks for what is too old or too much.
BEAT_SEC: Final = 1.5
PRUNE_SEC: Final = 60.0
#: A commit has at most so many records, and ends with the one that goes beyond so many bytes, written or overwritten.
MAX_CHANGES: Final = 256
_MAX_COMMIT_BYTES: Final = 1 << 20
#: Bytes that may be queued; beyond them the store counts as slow.
MAX_QUEUED_BYTES: Final = 64 << 20
#: A session whose snapshot is larger is not kept.
MAX_SNAPSHOT_BYTES: Final = 32 << 20
#: Bytes that are compressed and encrypted, or the reverse, on the loop; more in a thread.
_SEALED_HERE_BYTES: Final = 64 << 10
#: Sessions that are told something, or asked for a snapshot, in one pass of the loop.
_SLICE: Final = 16
#: Deletions that are remembered while the store is degraded.
_MAX_ENDS: Final = 10_000
#: How often ``take`` looks again after another process took the record, or let other tokens in, in between.
_TRIES: Final = 3

#: The snapshot of a record, and the entries of its log, in the clear.
_Opened: TypeAlias = tuple[bytes, tuple[bytes, ...]]

_entries = msgspec.msgpack.Decoder(list[bytes])


class LeaseHolder(Protocol):
    """The session behind a lease. Its methods are called on the loop, and must neither wait nor raise."""

    def lease_lost(self, *, deleted: bool) -> None:
        """Called when this process has lost the session, which must end here. No other method is called after this.

        Another process has taken the session, and the client is told nothing; or another process has ``deleted`` it.
        """

    def store_degraded(self) -> None:
        """Called when the session is no longer kept: settled data is lost if this process ends.

        The client must be told once. Called before the callbacks that wait for settled data.
        """

    def store_wants_snapshot(self) -> None:
        """Called when the store works, but the record of the session is out of date, or its log is long or old.

        Call ``snapshot`` in this pass of the loop. When that snapshot is settled and the lease is ``whole``, a session
        that was not kept (``store_degraded``) can be resumed again.
        """


class _Queued:
    """The data that is queued for one record, and goes into one commit."""

    __slots__ = ("away", "calls", "end", "entries", "size", "snapshot", "tokens", "waiters")

    def __init__(self) -> None:
        self.snapshot: bytes | None = None
        self.tokens: tuple[bytes, ...] = ()
        self.away = False
        #: Entries for the log after the snapshot.
        self.entries: list[bytes] = []
        self.end: StoreEnd | None = None
        self.calls: list[Callable[[], None]] = []
        #: Futures that are done in any case, even if the lease is lost.
        self.waiters: list[asyncio.Future[None]] = []
        #: The bytes of ``snapshot`` and ``entries``, which are charged.
        self.size = 0

    def replace(self, snapshot: bytes, tokens: tuple[bytes, ...], *, away: bool) -> None:
        """Set the snapshot, after ``drop``."""
        self.snapshot, self.tokens, self.away, self.end = snapshot, tokens, away, None

    def drop(self) -> int:
        """Drop snapshot and entries. Returns the size that was charged for them."""
        size, self.size = self.size, 0
        self.snapshot, self.entries = None, []
        return size

    def part(self, end: StoreEnd | None) -> None:
        """Set whether the commit ends by releasing the record (``RELEASE``), deleting it, or neither (None)."""
        self.end = end

    def settle(self, *, lost: bool = False) -> None:
        """Call ``calls`` and wake ``waiters``, as the data was committed or dropped; if ``lost``, only wake them."""
        calls, self.calls = self.calls, []
        waiters, self.waiters = self.waiters, []
        if not lost:
            for call in calls:
                _guarded(call)
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


class Lease:
    """The right to write to one record; ``SessionStore.begin`` and ``take`` make it."""

    __slots__ = (
        *("ended", "fence", "flying", "holder", "kind", "logged", "lost", "owner", "place", "queued"),
        *("seal", "serial", "session_id", "snapped_at", "whole"),
    )

    def __init__(self, session_id: str, kind: str, owner: str | None, fence: int, seal: Seal) -> None:
        self.session_id = session_id
        self.kind = kind
        self.owner = owner
        self.fence = fence
        #: The holder must be set right after ``begin`` or ``take``. None: nobody is notified.
        self.holder: LeaseHolder | None = None
        #: Whether the lease was lost; everything done with it is ignored then.
        self.lost = False
        #: Whether the record is up to date with what was queued; False before the first snapshot and after a failure.
        #: While it is False, entries are not kept.
        self.whole = False

        # The rest is the store's.
        self.ended = False
        self.seal = seal
        #: The number of the newest snapshot, and the elements behind it.
        self.serial = 0
        self.place = 0
        #: The approximate bytes of these elements.
        self.logged = 0
        self.snapped_at = 0.0
        self.queued: _Queued | None = None
        #: What the current commit contains.
        self.flying: _Queued | None = None

    def fall_behind(self) -> None:
        """Note that the record is out of date: no entries are kept until there is a new snapshot."""
        self.whole = False

    def end(self) -> None:
        """Note that the session has ended, or that this process gives the record up."""
        self.ended = True

    def queue(self, queued: _Queued) -> _Queued:
        """Set the data for the next commit, and return it."""
        self.queued = queued
        return queued

    def unqueue(self) -> _Queued | None:
        """Remove and return the data for the next commit; None if there is none."""
        queued, self.queued = self.queued, None
        return queued

    def take_off(self) -> int | None:
        """Move the queued data into a commit. Returns its bytes, with those of the log elements that it replaces.

        Returns None if nothing is queued, or the lease is lost; what is queued is then dropped.
        """
        queued = self.unqueue()
        if queued is None or self.lost:
            return None
        self.flying = queued
        overwritten = 0
        if queued.snapshot is not None or queued.end is StoreEnd.DELETE:
            overwritten, self.logged = self.logged, 0
        else:
            self.logged += queued.size
        return queued.size + overwritten

    def number(self, now: float) -> int:
        """Number the change that is about to be committed; return the place of its element in the log."""
        flying = self.flying
        assert flying is not None
        if flying.snapshot is not None:
            self.serial += 1
            self.place = 0
            self.snapped_at = now
        place = self.place
        self.place += bool(flying.entries)
        return place

    def land(self) -> _Queued:
        """Remove and return the data of a commit that has ended."""
        flying, self.flying = self.flying, None
        assert flying is not None
        return flying

    def lose(self) -> None:
        """Note that the lease is lost."""
        self.lost, self.whole = True, False

    def renew_if_older(self, oldest: float, now: float) -> bool:
        """Return whether the newest snapshot was taken before ``oldest``; if so, count it as taken ``now``."""
        is_old = self.serial > 0 and self.snapped_at < oldest and not self.ended
        if is_old:
            self.snapped_at = now
        return is_old


@dataclass(slots=True, frozen=True)
class Taken:
    """A record that was taken over. The log's entries are in the order in which they were appended."""

    lease: Lease
    found: FoundRecord
    snapshot: bytes
    entries: tuple[bytes, ...]


class SessionStore:
    """The only writer of a process to the store of sessions; see the module docstring.

    ``max_age_sec`` and ``max_bytes`` limit the records of sessions that no living process has. The store is degraded if
    it takes longer than ``slow_sec`` for a commit.
    """

    def __init__(
        self,
        backend: StoreBackend,
        *,
        sealer: Sealer,
        budget: ByteBudget,
        metrics: Metrics,
        max_age_sec: float,
        max_bytes: int,
        slow_sec: float = 0.25,
    ) -> None:
        self._backend = backend
        self._sealer = sealer
        self._budget = budget
        self._metrics = metrics
        self._max_age_sec = max_age_sec
        self._max_bytes = max_bytes
        self._slow_sec = slow_sec
        #: The id of this process among those that share the store.
        self.process = secrets.token_hex(8)
        #: Whether nothing is kept now, see Degraded in the module docstring; and why, in a word.
        self.degraded = False
        self.reason = ""
        self._leases: dict[str, Lease] = {}
        #: The records that are being taken.
        self._taking: set[str] = set()
        #: The leases with something queued, and those that the store wants a snapshot of.
        self._queue: deque[Lease] = deque()
        self._wanting: dict[Lease, None] = {}
        self._queued_bytes = 0
        self._size = StoreSize(0, 0)
        self._first_retry_sec = RETRY_SEC[0]
        self._mended_at = float("-inf")
        self._questions = asyncio.Semaphore(_QUESTIONS)
        self._wake = asyncio.Event()
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []
        metrics.store_up.labels(backend.name).set_function(lambda: not self.degraded)
        metrics.store_queued_bytes.set_function(lambda: self._queued_bytes)
        metrics.store_leases.set_function(lambda: len(self._leases))
        metrics.store_records.set_function(lambda: self._size.records)
        metrics.store_bytes.set_function(lambda: self._size.bytes)

    # life

    @property
    def name(self) -> str:
        """The kind of the store, for people."""
        return self._backend.name

    async def start(self) -> None:
        """Open the store. If it cannot be reached, it is tried again. Raises ConfigurationError for a bad setting."""
        try:
            await self._backend.open()
            await self._give_sign()
        except StoreError as error:
            self._degrade(error.reason, str(error))
        except ConfigurationError:
            await self._backend.close()
            raise
        self._tasks = [
            asyncio.create_task(self._write(), name="writer of the session store"),
            asyncio.create_task(self._beat(), name="heartbeat of the session store"),
            asyncio.create_task(self._prune(), name="pruning of the session store"),
        ]

    async def stop(self) -> None:
        """Commit what is queued, within a few seconds, and close the store.

        Leases are not released one by one: once this process has left the store, others may take their records.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_SEC):
                for lease in tuple(self._leases.values()):
                    await self.settle(lease)
        self._stopping = True
        pending = set(self._tasks)
        while pending:  # the client library of a store may take a cancellation for a lost connection
            for task in pending:
                task.cancel()
            _, pending = await asyncio.wait(pending, timeout=self._slow_sec)
        with suppress(TimeoutError, StoreError):
            async with asyncio.timeout(STOP_SEC):
                await self._backend.leave(self.process)
        with suppress(StoreError):
            await self._backend.close()

    # leases

    def begin(self, session_id: str, *, kind: str, owner: str | None) -> Lease:
        """Return the lease of a new session. Nothing is written before its first ``snapshot``.

        ``kind`` is the kind of session (``native``, ``mode_b``, …); ``owner`` is the name of its API key.
        """
        lease = self._leases[session_id] = Lease(session_id, kind, owner, 1, self._sealer.seal(session_id))
        return lease

    async def peek(self, session_id: str) -> FoundRecord | None:
        """Return the clear part of a record, who holds the record, and for how long its client has been away.

        Check that before ``take``. Returns None if there is no record, or none that this process can read. Raises
        StoreError if the store does not answer.
        """
        if (lease := self._leases.get(session_id)) is not None and lease.ended:
            await self.settle(lease)
        found = await self._answer(self._backend.find, session_id)
        return found if found is not None and self._sealer.reads(found.clear.form) else None

    async def take(
        self, session_id: str, *, force: bool, admits: Callable[[ClearPart], Awaitable[bool]] | None = None
    ) -> Taken | None:
        """Take over a record: from now on, no other process can write to it.

        Returns None if there is no record that this process can read and that ``admits`` accepts; if the record is
        damaged, or others keep changing it; without ``force`` also if a living process has it. ``admits`` may take
        long: if the clear part is replaced meanwhile, it is asked again.

        If this process had a lease of the record, that lease is lost. The new one is not ``whole``: write a snapshot,
        then append. Raises StoreError if the store does not answer, and what ``admits`` raises.
        """
        for _ in range(_TRIES):
            found = await self.peek(session_id)
            if found is None or (admits is not None and not await admits(found.clear)):
                self._metrics.store_takes.labels("absent").inc()
                return None
            if found.held and not force and not self._is_astray(session_id, found):
                break
            self._taking.add(session_id)
            try:
                contents = await self._answer(
                    self._backend.take, session_id, fence=found.fence, holder=self.process, clear=found.clear
                )
                opened = None if contents is None else await self._opened(session_id, found, contents)
            except BaseException:
                self._give_back(session_id, found)
                raise
            finally:
                self._taking.discard(session_id)
            if contents is not None:
                return self._taken(session_id, found, opened)
        self._metrics.store_takes.labels("held").inc()
        return None

    def _is_astray(self, session_id: str, found: FoundRecord) -> bool:
        """Return whether this process holds a record without a lease, as the call that took it was cut short."""
        known = session_id in self._leases or session_id in self._taking
        return found.holder == self.process and not known

    def _taken(self, session_id: str, found: FoundRecord, opened: _Opened | None) -> Taken | None:
        if (before := self._leases.get(session_id)) is not None:
            self._lose(before)
        if opened is None:
            self._metrics.store_takes.labels("unreadable").inc()
            return None
        self._metrics.store_takes.labels("taken").inc()
        seal = self._sealer.seal(session_id)
        lease = Lease(session_id, found.clear.kind, found.clear.owner, found.fence + 1, seal)
        self._leases[session_id] = lease
        return Taken(lease, found, *opened)

    def _give_back(self, session_id: str, found: FoundRecord) -> None:
        """Release a record that a failed call may have taken: else it would be held until this process ends."""
        seal = self._sealer.seal(session_id)
        lease = Lease(session_id, found.clear.kind, found.clear.owner, found.fence + 1, seal)
        lease.end()
        self._queued(lease).part(StoreEnd.RELEASE)

    async def read(self, session_id: str) -> _Opened | None:
        """Return snapshot and entries of a record without taking it; None in the cases of ``peek``, or if damaged.

        Raises StoreError.
        """
        found = await self.peek(session_id)
        contents = None if found is None else await self._answer(self._backend.read, session_id)
        if found is None or contents is None:
            return None
        return await self._opened(session_id, found, contents)

    async def _opened(self, session_id: str, found: FoundRecord, contents: Contents) -> _Opened | None:
        """Return snapshot and entries, decrypted and unpacked; None if they are damaged."""
        if len(contents.snapshot) + sum(map(len, contents.log)) > _SEALED_HERE_BYTES:
            return await run_work(Work.FILES, self._unsealed, session_id, found.clear.form, contents)
        return self._unsealed(session_id, found.clear.form, contents)

    def _unsealed(self, session_id: str, form: str, contents: Contents) -> _Opened | None:
        try:
            snapshot = unpacked(self._sealer.open(form, session_id, contents.snapshot, SNAPSHOT_PLACE))
            log = [unpacked(self._sealer.open(form, session_id, one, place)) for place, one in enumerate(contents.log)]
            return snapshot, tuple(entry for element in log for entry in _entries.decode(element))
        except (Unreadable, msgspec.DecodeError):
            logger.warning("the record of session %s in the store is damaged", session_id)
            return None

    def release(self, lease: Lease, *, delete: bool) -> None:
        """Give up a record: delete it with its session, or leave it for others, in the state that is queued now.

        A record that is out of date is deleted in any case. After this, only ``when_settled`` and ``settle`` may be
        called with the lease.
        """
        if lease.lost or lease.ended:
            return
        lease.end()
        self._wanting.pop(lease, None)
        never_written = not lease.serial and lease.queued is None and lease.fence == 1
        if never_written or (self.degraded and len(self._queue) >= _MAX_ENDS):
            self._forget(lease)
            return
        queued = self._queued(lease)
        as_taken = not lease.serial and queued.snapshot is None
        queued.part(StoreEnd.RELEASE if not delete and (lease.whole or as_taken) else StoreEnd.DELETE)
        if queued.end is StoreEnd.DELETE:
            self._drop_data(queued)
        lease.fall_behind()

    async def delete(self, session_id: str, *, owner: str | None) -> bool:
        """Delete the record of a session of this owner, wherever the session is open; it ends there a moment later.

        Returns whether there was one. Check the tokens before (``peek``). Raises StoreError.
        """
        found = await self._answer(self._backend.find, session_id)  # also one that cannot be read here
        if found is None or found.clear.owner != owner:
            return False
        deleted = await self._answer(self._backend.erase, session_id)
        if (lease := self._leases.get(session_id)) is not None:
            self._lose(lease, deleted=True)
        return deleted

    async def _answer(self, question: Callable[..., Awaitable[T]], *arguments: str, **options: object) -> T:
        async with self._questions:
            if self.degraded:
                raise StoreError(self.reason, f"the store of sessions is {self.reason}")
            try:
                async with asyncio.timeout(ANSWER_SEC):
                    return await question(*arguments, **options)
            except TimeoutError:
                raise StoreError(SLOW, "the store of sessions does not answer") from None

    # writing

    def append(self, lease: Lease, entry: bytes) -> None:
        """Queue an entry for the log. Does nothing while the lease is not ``whole``."""
        if not lease.whole:
            return
        queued = lease.queued or self._queued(lease)
        queued.entries.append(entry)
        self._charge(queued, len(entry))

    def snapshot(self, lease: Lease, data: bytes, *, tokens: tuple[bytes, ...], away: bool) -> None:
        """Queue a snapshot, which replaces the previous snapshot and its log.

        ``tokens`` are the digests that now admit a client; ``away``: whether the session has no client. Does nothing
        if the lease is lost or given up, nor while the store is degraded: ``store_wants_snapshot`` asks for another.
        If the snapshot is larger than ``MAX_SNAPSHOT_BYTES``, the store is degraded for this session alone, until a
        smaller one comes.
        """
        if lease.lost or lease.ended or self.degraded:
            return
        queued = self._queued(lease)
        self._drop_data(queued)
        if len(data) > MAX_SNAPSHOT_BYTES:
            lease.fall_behind()
            queued.part(StoreEnd.DELETE)  # what is in the store is not the session any more
            if lease.holder is not None:
                _guarded(lease.holder.store_degraded)
            return
        queued.replace(data, tokens, away=away)
        lease.whole = True
        self._wanting.pop(lease, None)
        self._charge(queued, len(data))

    def want_snapshot(self, lease: Lease) -> None:
        """Have ``store_wants_snapshot`` called, as the log is long, once the snapshots of other sessions leave room."""
        if lease.whole:
            self._wanting[lease] = None

    def when_settled(self, lease: Lease, call: Callable[[], None]) -> None:
        """Call ``call`` once all that was queued for this lease so far is committed. Calls are made in order.

        If nothing is queued or the store is degraded, ``call`` is called before this returns; never, if the lease is
        lost.
        """
        pending = lease.queued or lease.flying
        if lease.lost:
            return
        if pending is None or self.degraded:
            call()
        else:
            pending.calls.append(call)

    async def settle(self, lease: Lease) -> None:
        """Wait until all queued data of this lease is committed, the lease is lost, or the store is degraded."""
        pending = lease.queued or lease.flying
        if pending is not None and not self.degraded:
            done = asyncio.get_running_loop().create_future()
            pending.waiters.append(done)
            await done

    def _queued(self, lease: Lease) -> _Queued:
        if lease.queued is not None:
            return lease.queued
        self._queue.append(lease)
        self._wake.set()
        return lease.queue(_Queued())

    def _charge(self, queued: _Queued, size: int) -> None:
        queued.size += size
        self._queued_bytes += size
        self._budget.charge(size)
        if self._queued_bytes > MAX_QUEUED_BYTES and not self.degraded:
            self._degrade(SLOW, f"{self._queued_bytes} bytes are queued")

    def _drop_data(self, queued: _Queued) -> None:
        size = queued.drop()
        self._queued_bytes -= size
        self._budget.give(size)

    async def _write(self) -> None:
        while True:
            if self.degraded:
                await self._mend()
            while not self.degraded and (batch := self._next_batch()):
                await self._commit(batch)
                self._ask_for_snapshots()
            if not self.degraded and not self._wanting:
                self._wake.clear()
                await self._wake.wait()
            else:
                await asyncio.sleep(0)
                self._ask_for_snapshots()

    def _next_batch(self) -> list[Lease]:
        batch: list[Lease] = []
        size = 0
        while self._queue and len(batch) < MAX_CHANGES and size < _MAX_COMMIT_BYTES:
            lease = self._queue.popleft()
            if (written := lease.take_off()) is not None:
                size += written
                batch.append(lease)
        return batch

    async def _commit(self, batch: Sequence[Lease]) -> None:
        now = asyncio.get_running_loop().time()
        places = [lease.number(now) for lease in batch]
        try:
            if self._sealed_bytes(batch) > _SEALED_HERE_BYTES:
                changes = await run_work(Work.FILES, self._changes, batch, places)
            else:
                changes = self._changes(batch, places)
            with self._watched() as took:
                outcomes: Sequence[ChangeOutcome | None] = await self._backend.commit(changes)
            self._metrics.store_commit_seconds.observe(took())
            self._metrics.store_written_bytes.inc(sum(len(c.snapshot or b"") + len(c.element or b"") for c in changes))
        except Exception as error:
            self._failed(error)
            outcomes = [None] * len(batch)
        for lease, outcome in zip(batch, outcomes, strict=True):
            self._committed(lease, outcome)

    def _sealed_bytes(self, batch: Sequence[Lease]) -> int:
        """Return how many bytes of a commit must be compressed or encrypted."""
        flying = [lease.flying for lease in batch if lease.flying is not None]
        if self._sealer.encrypts:
            return sum(one.size for one in flying)
        return sum(len(one.snapshot) for one in flying if one.snapshot is not None)

    def _changes(self, batch: Sequence[Lease], places: Sequence[int]) -> list[Change]:
        return [self._change(lease, place) for lease, place in zip(batch, places, strict=True)]

    def _change(self, lease: Lease, place: int) -> Change:
        flying = lease.flying
        assert flying is not None
        clear = snapshot = element = None
        if flying.snapshot is not None:
            clear = ClearPart(self._sealer.form, lease.kind, lease.owner, flying.tokens, flying.away)
            snapshot = lease.seal(packed(flying.snapshot), SNAPSHOT_PLACE)
        if flying.entries:
            # It is short, or has sound, and a snapshot takes its place soon.
            element = lease.seal(packed(msgspec.msgpack.encode(flying.entries), compress=False), place)
        return Change(
            session_id=lease.session_id,
            fence=lease.fence,
            holder=self.process,
            serial=lease.serial,
            clear=clear,
            snapshot=snapshot,
            element=element,
            place=place,
            end=flying.end,
        )

    def _committed(self, lease: Lease, outcome: ChangeOutcome | None) -> None:
        """Act on the outcome of a change. None: the outcome is not known, and the store is degraded."""
        flying = lease.land()
        self._drop_data(flying)
        if lease.lost or outcome in (ChangeOutcome.LOST, ChangeOutcome.DELETED):
            self._lose(lease, deleted=outcome is ChangeOutcome.DELETED)
            flying.settle(lost=True)
            return
        if outcome is ChangeOutcome.GAP and not lease.ended and not self.degraded:
            self._mend_gap(lease, flying)
            return
        if lease.ended and lease.queued is None:
            if outcome is ChangeOutcome.KEPT:
                self._forget(lease)
            else:
                self._queued(lease).part(_repeated(lease, flying))
        flying.settle()

    def _mend_gap(self, lease: Lease, flying: _Queued) -> None:
        """Ask for a snapshot to replace the data that the store lost; waiting callers then wait for that snapshot."""
        if lease.queued is None or lease.queued.snapshot is None:
            lease.fall_behind()
            if lease.queued is not None:
                self._drop_data(lease.queued)
            _ask(lease)
        if lease.queued is None:
            flying.settle()
        else:
            lease.queued.calls[:0] = flying.calls
            lease.queued.waiters.extend(flying.waiters)

    def _lose(self, lease: Lease, *, deleted: bool = False) -> None:
        """Note that the lease is lost, and tell its holder. Only the first call has an effect."""
        if lease.lost:
            return
        lease.lose()
        self._metrics.store_lost.inc()
        self._wanting.pop(lease, None)
        self._forget(lease)
        if (queued := lease.unqueue()) is not None:
            self._drop_data(queued)
            queued.settle(lost=True)
        if lease.holder is not None:
            _guarded(partial(lease.holder.lease_lost, deleted=deleted))

    def _forget(self, lease: Lease) -> None:
        if self._leases.get(lease.session_id) is lease:
            del self._leases[lease.session_id]

    # failure and recovery

    @contextmanager
    def _watched(self) -> Iterator[Callable[[], float]]:
        """Degrade the store if the block takes longer than ``slow_sec``.

        Yields a function that returns the time so far.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        tick_sec = self._slow_sec / _TICKS
        quiet = 0.0
        timer: asyncio.TimerHandle

        def tick(due: float) -> None:
            """Count only time in which the loop could have received an answer: a busy loop is not the store's fault."""
            nonlocal timer, quiet
            if loop.time() - due < tick_sec / 5:
                quiet += tick_sec
            if quiet < self._slow_sec and loop.time() - began < max(_BUSY_SEC, self._slow_sec):
                timer = loop.call_later(tick_sec, tick, loop.time() + tick_sec)
            else:
                self._degrade(SLOW, f"no answer within {self._slow_sec:g} s")

        timer = loop.call_later(tick_sec, tick, began + tick_sec)
        try:
            yield lambda: loop.time() - began
        finally:
            timer.cancel()

    def _failed(self, error: Exception) -> None:
        """Degrade the store, as it raised ``error``.

        Any exception does so, not only StoreError, so that the store's tasks go on.
        """
        if isinstance(error, StoreError):
            self._degrade(error.reason, str(error))
        else:
            logger.error("a defect in the store of sessions", exc_info=error)
            self._degrade(GONE, type(error).__name__)

    def _degrade(self, reason: str, message: str) -> None:
        self.reason = reason
        if self.degraded or self._stopping:
            return
        self.degraded = True
        logger.warning(
            "the store of sessions (%s) is %s, so sessions are not kept until it works again: %s",
            *(self._backend.name, reason, message),
        )
        self._metrics.store_failures.labels(reason).inc()
        self._wanting.clear()
        for lease in self._leases.values():
            lease.fall_behind()
        waiting = [lease for lease in self._leases.values() if lease.queued is not None or lease.flying is not None]
        others = [lease for lease in self._leases.values() if lease.queued is None and lease.flying is None]
        for lease in waiting:
            self._give_up(lease)
        self._tell_degraded(iter(others))
        self._wake.set()

    def _give_up(self, lease: Lease) -> None:
        """Drop the queued data of a lease and stop waiting for it, except for the end of the record."""
        if lease.holder is not None and not lease.ended:
            _guarded(lease.holder.store_degraded)
        flying, queued = lease.flying, lease.queued
        if flying is not None:
            flying.settle()
        if queued is not None:
            if lease.ended:
                queued.part(_repeated(lease, queued))
            else:
                lease.unqueue()
            self._drop_data(queued)
            queued.settle()

    def _tell_degraded(self, leases: Iterator[Lease]) -> None:
        """Call ``store_degraded`` of the sessions behind ``leases``, a few in each pass of the loop."""
        if not self.degraded:
            return
        some = tuple(islice(leases, _SLICE))
        for lease in some:
            if lease.holder is not None and not lease.ended and not lease.lost:
                _guarded(lease.holder.store_degraded)
        if some:
            asyncio.get_running_loop().call_soon(self._tell_degraded, leases)

    async def _mend(self) -> None:
        """Try the store until it works again and is fast enough."""
        loop = asyncio.get_running_loop()
        relapse, longest = _RELAPSE_SEC
        again = loop.time() - self._mended_at < relapse
        delay = self._first_retry_sec = min(2 * self._first_retry_sec, longest) if again else RETRY_SEC[0]
        while True:
            await asyncio.sleep(delay)
            delay = max(delay, min(2 * delay, RETRY_SEC[1]))
            began = loop.time()
            try:
                await self._backend.open()
                if self.reason == FULL:  # what nobody has any more makes room for those who talk
                    room = min(self._max_bytes, self._size.bytes * 9 // 10)
                    self._size = await self._backend.prune(max_age_sec=self._max_age_sec, max_bytes=room)
                await self._backend.probe()
                await self._give_sign()
            except Exception as error:
                self.reason = error.reason if isinstance(error, StoreError) else GONE
                logger.debug("the store of sessions", exc_info=error)
            else:
                if loop.time() - began < self._slow_sec:
                    break
                self.reason = SLOW
        self.degraded, self.reason, self._mended_at = False, "", loop.time()
        logger.info("the store of sessions (%s) works again", self._backend.name)
        self._wanting = dict.fromkeys(lease for lease in self._leases.values() if not lease.ended)

    def _ask_for_snapshots(self) -> None:
        """Ask a few sessions whose records are out of date for snapshots."""
        for lease in tuple(islice(self._wanting, _SLICE)):
            if self._queued_bytes > MAX_QUEUED_BYTES // 4:
                break
            del self._wanting[lease]
            _ask(lease)

    async def _give_sign(self) -> None:
        """Write the heartbeat of this process, and end the sessions whose records another process has deleted."""
        for session_id in await self._backend.beat(self.process):
            if (lease := self._leases.get(session_id)) is not None:
                self._lose(lease, deleted=True)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_SEC)
            if not self.degraded:
                try:
                    with self._watched():
                        await self._give_sign()
                except Exception as error:
                    self._failed(error)

    async def _prune(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if not self.degraded:
                try:
                    self._size = await self._backend.prune(max_age_sec=self._max_age_sec, max_bytes=self._max_bytes)
                except Exception as error:
                    self._failed(error)
                # What lives longer than records may, is written anew.
                old = loop.time() - self._max_age_sec / 2
                for lease in self._leases.values():
                    if lease.renew_if_older(old, loop.time()):
                        self._wanting[lease] = None
                        self._wake.set()
            await asyncio.sleep(PRUNE_SEC)


def _repeated(lease: Lease, failed: _Queued) -> StoreEnd | None:
    """Return how to give up a record after the first attempt failed: a record that is out of date is deleted."""
    as_taken = not lease.serial and failed.snapshot is None
    return failed.end if as_taken else StoreEnd.DELETE


def _ask(lease: Lease) -> None:
    if lease.holder is not None and not lease.ended and not lease.lost:
        _guarded(lease.holder.store_wants_snapshot)


def _guarded(call: Callable[[], None]) -> None:
    """Call ``call``, and log any exception: a defect of one session must not end the writer of all sessions."""
    try:
        call()
    except Exception:
        logger.exception("a defect in a session that is kept")

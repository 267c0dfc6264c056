"""The process's one writer to a store of sessions: queues, group commits, leases, and what happens when it fails.

**Writing.** ``append`` and ``snapshot`` queue and return. One task commits what is queued, of all sessions together, as
soon as there is something and the commit before is done; no timer delays it. What is committed is *settled*.

**Leases.** A process writes to a record by its Lease. Whoever takes the record raises its fence number, and the next
commit of the holder before finds its lease lost: the session ends there, without a word to anybody.

**Degraded.** If no commit succeeds for ``SLOW_SEC``, the store is full, or it is gone, nothing waits any more: what is
queued is dropped, everything counts as settled, and further entries are not kept. Records stay as they were: a client that
resumes from one of them finds less than it was told. The store is tried again by itself; once it works, each session
is asked for a snapshot, a few at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from omni_ws.service.store.records import Found


class LeaseHolder(Protocol):
    """The session behind a lease. Its methods are called on the loop, and must neither wait nor raise."""

    def lease_lost(self) -> None:
        """Another process has the session, or it was deleted: end it, and tell nobody. Called once; nothing follows."""

    def store_degraded(self) -> None:
        """The session is not kept from now on, and what is settled is lost with this process: tell the client once."""

    def store_wants_snapshot(self) -> None:
        """The store works, but its record is behind the session: call ``snapshot``, now or in this pass of the loop.

        Called after ``store_degraded``, and also without it. When that snapshot is settled and the store is not
        degraded, the session can be resumed again.
        """


class Lease:
    """The right to write to one record; made by ``SessionStore.begin`` and ``take``."""

    session_id: str
    #: Set it right after ``begin`` or ``take``. None: nobody is told.
    holder: LeaseHolder | None
    #: Whether the lease was lost; everything done with it is ignored then.
    lost: bool
    #: Whether the record is up to date with what was queued; False before the first snapshot and after a failure.
    #: While it is False, entries are not kept.
    whole: bool


@dataclass(slots=True, frozen=True)
class Taken:
    """A record that was taken over. The log's entries are in the order in which they were appended."""

    lease: Lease
    found: Found
    snapshot: bytes
    entries: tuple[bytes, ...]


class SessionStore:
    """The process's one writer to the store of sessions; the module describes it."""

    #: Whether nothing is kept now; see the module.
    degraded: bool

    async def start(self) -> None:
        """Open the store. One that cannot be reached is tried again; raises ConfigurationError for a bad setting."""

    async def stop(self) -> None:
        """Commit what is queued, within a few seconds, and close the store. Leases are left as they are."""

    def begin(self, session_id: str, *, kind: str, owner: str | None) -> Lease:
        """Return the lease of a new session. Nothing is written before its first ``snapshot``.

        ``kind`` tells what kind of session it is (``native``, ``mode_b``, …); ``owner`` is the name of its key.
        """
        raise NotImplementedError

    async def peek(self, session_id: str) -> Found | None:
        """Return the clear part of a record (kind, owner, digests of tokens, holder, how long it is away).

        To be compared before ``take``. None if there is none, or none that this process can read. Raises StoreError
        if the store cannot be asked.
        """
        raise NotImplementedError

    async def take(self, session_id: str, *, force: bool) -> Taken | None:
        """Take over a record: from now on, nobody else can write to it.

        Returns None if there is none that this process can read or, without ``force``, if a living process has it.
        The new lease is not ``whole``: write a snapshot, then append. Raises StoreError if the store cannot be asked.
        """
        raise NotImplementedError

    async def read(self, session_id: str) -> tuple[bytes, tuple[bytes, ...]] | None:
        """Return snapshot and entries of a record without taking it; None as ``peek``. Raises StoreError."""
        raise NotImplementedError

    def append(self, lease: Lease, entry: bytes) -> None:
        """Queue an entry of the log. Does nothing while the lease is not ``whole``."""

    def snapshot(self, lease: Lease, data: bytes, *, tokens: tuple[bytes, ...], away: bool) -> None:
        """Queue a snapshot, which replaces the snapshot and the log before it.

        ``tokens`` are the digests that admit a client now; ``away``: whether the session has no client. Does nothing
        while the store is degraded; ``store_wants_snapshot`` asks for another later.
        """

    def when_settled(self, lease: Lease, call: Callable[[], None]) -> None:
        """Call ``call`` once all that was queued for this lease so far is committed, in the order of these calls.

        At once, within this call, if nothing is queued or the store is degraded. Never, if the lease is or gets lost.
        """

    async def settle(self, lease: Lease) -> None:
        """Wait until all that was queued for this lease so far is committed, or the store is degraded, or it is lost."""

    def release(self, lease: Lease, *, delete: bool) -> None:
        """Part with a record: delete it with its session, or leave it, as it will be when this is settled, for others.

        The lease is of no more use afterwards, but for ``when_settled`` and ``settle``.
        """

    async def delete(self, session_id: str, *, owner: str | None) -> bool:
        """Delete the record of a session of this owner, wherever it is open; it ends there without a word.

        Returns whether there was one. Compare tokens before (``peek``). Raises StoreError.
        """
        raise NotImplementedError

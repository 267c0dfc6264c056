"""Keepers, each of which writes one session to the store; and the rules who may have the record of a session.

A keeper writes its session to the store, and holds back output until the store has it.

**A record** is a snapshot, the SavedSession, and a log of what happened since, in order: the client's frames as they
arrived, and the outputs of the running answer (ToldOutput).

**Input.** A frame takes effect on arrival. Chunks are appended to the log together, when they are to be acknowledged,
and are acknowledged once they are settled; until then the client would send them again. Every other frame is appended
on arrival.

**Output.** The keeper is the Gate of the session's OutputLog. Text of an answer and fragments of tool calls are
appended, and sent once they are settled. Audio is appended, and sent without waiting. Messages that concern one
connection are not kept. Every other message makes the keeper take a snapshot in the next pass of the loop, which has
the message among those that wait; the message is sent once the snapshot is settled. So the store has everything that a
client has, except the newest audio, and a process whose lease is lost can tell its client nothing.

**Another process** that takes the session restores the snapshot, replays the outputs of the log (``tell_again``), and
receives the frames of the log as if the client had just sent them.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import concat
from typing import TYPE_CHECKING, Final

import msgspec

from omni_ws.config.keys import ApiKey, key_name
from omni_ws.core.chunks import OutputChunk, OutputModality
from omni_ws.errors import EngineOverloaded, SessionConflict, SessionNotFound
from omni_ws.service import unexpected
from omni_ws.service.conversation.begun_answer import ToldOutput
from omni_ws.service.conversation.output_log import (
    UNKEPT,
    Gate,
    ServerMessage,
)
from omni_ws.service.store.records import ClearPart, FoundRecord, StoreError
from omni_ws.service.store.session_store import Lease, LeaseHolder, SessionStore, Taken

if TYPE_CHECKING:
    from omni_ws.service.sessions.session import Session


#: The first byte of an entry of the log: frames of the client, or an output; and of a frame, that it is text or binary.
_FRAMES, _OUTPUT = b"f", b"o"
_TEXT, _BINARY = b"t", b"b"
#: Bytes of frames that wait to be appended.
_MOST_WAITING: Final = 64 * 1024
_AUDIO: Final = OutputModality.AUDIO  # found faster than a member of an enum
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(ToldOutput).decode
_decode_frames: Final = msgspec.msgpack.Decoder(list[bytes]).decode
#: Bytes of a log after which a snapshot replaces it; the size of the snapshot, if that is larger. So at most twice the
#: necessary bytes are written.
LOG_BYTES: Final = 1024 * 1024
#: The ticket of a message that is never sent.
_NEVER: Final = 1 << 62


class ReceivedFrame(msgspec.Struct, frozen=True):
    """A client's frame in the log of a record."""

    data: bytes
    is_text: bool


def read_entries(entries: Iterable[bytes]) -> tuple[list[ToldOutput], list[ReceivedFrame]]:
    """Return the outputs and the frames of a log, each in order. Raises ValueError or msgspec.DecodeError."""
    told: list[ToldOutput] = []
    frames: list[ReceivedFrame] = []
    for entry in entries:
        kind, content = entry[:1], entry[1:]
        if kind == _OUTPUT:
            told.append(_decode(content))
        elif kind == _FRAMES:
            frames += (ReceivedFrame(one[1:], one[:1] == _TEXT) for one in _decode_frames(content))
        else:
            raise ValueError(f"a log has no entries of the kind {kind!r}")
    return told, frames


class Keeper(Gate, LeaseHolder):
    """The keeper of one session: writes it to the store, and is the gate of its output.

    The module docstring explains how.
    """

    def __init__(self, session: Session, store: SessionStore, lease: Lease) -> None:
        self._session = session
        self._store = store
        self._lease = lease
        lease.holder = session.outbox.gate = self
        #: See ``tell``; None before the first client.
        self._kept: Callable[[bool], None] | None = None
        #: The newest ticket, see Gate.
        self._ticket = 0
        #: Whether a snapshot is to be taken in the next pass. What happens until then is in it, and not in the log.
        self._marked = False
        #: Frames that wait to be appended, the kind of each, and their bytes.
        self._frames: list[bytes] = []
        self._kinds: list[bytes] = []
        self._frame_bytes = 0
        #: Bytes of the log, and the number of bytes at which a snapshot replaces it.
        self._logged = 0
        self._most_logged = LOG_BYTES
        #: Called when the marked snapshot is settled.
        self._after: list[Callable[[], None]] = []
        #: Whether the client was told that the session is not kept, and not yet that it is again; and whether it was
        #: ever told so.
        self._told_degraded = self._ever_told = False
        #: Whether nothing is written and sent any more, as another process has the session.
        self._sealed = False
        #: Whether the session was left in the store, for another process.
        self.handed_over = False

    @property
    def resumable(self) -> bool:
        """Whether another process could continue the session."""
        return not self._store.degraded and not self._told_degraded

    @property
    def has_left(self) -> bool:
        """Whether this process no longer has the record: it was handed over, or another process took it."""
        return self.handed_over or self._lease.lost

    # output, see Gate

    def admit(self, message: ServerMessage) -> int:
        if self._sealed:
            return _NEVER
        if type(message) is OutputChunk:
            speaks = message.modality is _AUDIO
            entry = self._session.conversation.ledger.find(message.request_id) if speaks else None
            if (told := ToldOutput.of(message, 0 if entry is None else entry.sent_ms)) is not None:
                return self._tell(told, waits=not speaks)
        if type(message) in UNKEPT:
            return 0
        self._ticket += 1
        self.mark()
        return self._ticket

    def _tell(self, told: ToldOutput, *, waits: bool) -> int:
        if self._marked:
            self._ticket += waits
            return self._ticket if waits else 0
        self._append(_OUTPUT + _encode(told))
        if not waits:
            return 0
        self._ticket += 1
        self._store.when_settled(self._lease, partial(self._session.outbox.open, self._ticket))
        return self._ticket

    def said(self, request_id: str, text: str) -> None:
        if not self._sealed and not self._marked:
            self._append(_OUTPUT + _encode(ToldOutput(None, request_id, text)))

    def changed(self) -> None:
        self.mark()

    def _append(self, entry: bytes) -> None:
        self._store.append(self._lease, entry)
        self._logged += len(entry)
        if self._logged > self._most_logged:
            self._store.want_snapshot(self._lease)

    # input

    def receive(self, data: bytes, *, is_text: bool, again: bool) -> None:
        """Keep a frame of the client, which takes effect in this pass of the loop.

        ``again``: if the frame is lost before it is acknowledged, the client sends it again.
        """
        if self._marked:
            return
        self._frames.append(data)
        self._kinds.append(_TEXT if is_text else _BINARY)
        self._frame_bytes += len(data)
        if not again or self._frame_bytes > _MOST_WAITING:
            self._append_frames()

    def _append_frames(self) -> None:
        if self._frames:
            entry = _FRAMES + _encode([*map(concat, self._kinds, self._frames)])
            self._drop_frames()
            self._append(entry)

    def _drop_frames(self) -> None:
        self._frames.clear()
        self._kinds.clear()
        self._frame_bytes = 0

    def when_settled(self, call: Callable[[], None]) -> None:
        """Call ``call`` once everything so far is in the store; immediately if it is, or if the store is degraded.

        It is never called if the lease is lost.
        """
        self._append_frames()
        if self._marked:
            self._after.append(call)
        else:
            self._store.when_settled(self._lease, call)

    async def settled(self) -> bool:
        """Wait until everything so far is in the store, or the store is degraded.

        Returns False if the lease was lost.
        """
        self._append_frames()
        if self._marked:
            self._snapshot()
        await self._store.settle(self._lease)
        return not self._lease.lost

    async def still_writes(self) -> bool:
        """Write a snapshot.

        Returns whether it is in the store: False if the lease was lost or the store is degraded.
        """
        self.mark()
        return await self.settled() and self._lease.whole

    # snapshots

    def mark(self) -> None:
        """Have a snapshot taken in the next pass of the loop."""
        if not self._marked and not self._sealed:
            self._marked = True
            asyncio.get_running_loop().call_soon(self._take_marked)

    def _take_marked(self) -> None:
        if self._marked:
            self._snapshot()

    def _snapshot(self) -> None:
        self._marked = False
        self._drop_frames()
        session, store, lease = self._session, self._store, self._lease
        after, self._after = self._after, []
        if session.is_open and not store.degraded and not lease.lost:
            try:
                data = msgspec.msgpack.encode(session.saved())
            except Exception as error:
                session.end(unexpected(error, where="the record of a session"))
            else:
                store.snapshot(lease, data, tokens=session.digests, away=session.disconnected)
                self._logged, self._most_logged = 0, max(LOG_BYTES, len(data))
        store.when_settled(lease, partial(session.outbox.open, self._ticket))
        for call in after:
            store.when_settled(lease, call)
        if self._told_degraded:
            store.when_settled(lease, self._recovered)

    def hand_over(self) -> bool:
        """Leave the session in the store for another process. From now on nothing is written, and nothing is sent.

        Returns False if the store cannot take the session now, which then stays here.
        """
        self._snapshot()
        if not self._lease.whole:
            return False
        self._sealed = self.handed_over = True
        self._store.release(self._lease, delete=False)
        return True

    def end(self) -> None:
        """Delete the record, as the session has ended, unless the session was handed over."""
        self._sealed = True
        if not self.handed_over:
            self._store.release(self._lease, delete=True)

    # what the store tells, see LeaseHolder

    def tell(self, kept: Callable[[bool], None]) -> None:
        """Have ``kept`` called with False when the store fails, and with True when it works again.

        ``kept`` is called immediately if the store has failed. So it is for a client that comes back, if the store ever
        failed: an earlier message may have been lost with the client's connection.
        """
        self._kept = kept
        if self._ever_told:
            kept(not self._told_degraded)
        if self._store.degraded:
            self.store_degraded()

    def lease_lost(self, *, deleted: bool) -> None:
        self._sealed = True
        self._session.lose(deleted=deleted)

    def store_degraded(self) -> None:
        if self._kept is not None and not self._told_degraded and not self._sealed:
            self._told_degraded = self._ever_told = True
            self._kept(False)

    def store_wants_snapshot(self) -> None:
        if not self._sealed:
            self._snapshot()  # now: what waits for a record that was lost, waits for this

    def _recovered(self) -> None:
        if self._kept is not None and self._told_degraded and self._lease.whole:
            self._told_degraded = False
            self._kept(True)


# Records of the store that are compared before they are read: who may have which, and what is said if not.


#: A process tells the store that it has given a record back only after it has answered, and later if it is busy. For
#: how many seconds another process waits for that, and how often it looks.
GIVING_BACK_SEC: Final = 0.5
_LOOKS: Final = 10
#: When a client may ask again for a session that another process has.
HELD_RETRY_MS: Final = 1000


def token_digest(token: str) -> bytes:
    """Return the digest of a token, which records contain in place of the token."""
    return hashlib.sha256(token.encode("utf-8", "replace")).digest()


def admits(clear: ClearPart, key: ApiKey | None, token: str | None) -> bool:
    """Return whether a client with this key may have the record; a ``token`` that is not None must be the record's."""
    if clear.owner != key_name(key):
        return False
    presented = None if token is None else token_digest(token)
    return presented is None or any([hmac.compare_digest(presented, one) for one in clear.tokens])


def is_spent(clear: ClearPart, token: str) -> bool:
    """Return whether another connection has already used this token to resume."""
    return any([hmac.compare_digest(token_digest(token), one) for one in clear.tokens[1:]])


@contextmanager
def store_errors() -> Iterator[None]:
    """Turn a StoreError of the block into EngineOverloaded."""
    try:
        yield
    except StoreError as error:
        raise EngineOverloaded("the store of sessions does not answer now", retry_after_ms=HELD_RETRY_MS) from error


async def find_record(
    store: SessionStore, session_id: str, *, kind: str, key: ApiKey | None, token: str | None
) -> FoundRecord:
    """Return the clear part of the record of a session, if this client may have it.

    The client must have the key that opened the session and, unless ``token`` is None, one of its tokens. Raises
    SessionNotFound if it may not, or there is no such record of ``kind``, without saying which; EngineOverloaded if the
    store does not answer.
    """
    with store_errors():
        found = await store.peek(session_id)
    if found is not None and found.clear.kind == kind and admits(found.clear, key, token):
        return found
    raise SessionNotFound("session not found", param="session_id")


async def take_record(store: SessionStore, session_id: str) -> Taken:
    """Take over a record that ``find_record`` found. If its holder is just giving it back, wait for that.

    Raises SessionNotFound if it was deleted meanwhile; SessionConflict if a living process still has it after
    GIVING_BACK_SEC, or it is damaged; EngineOverloaded if the store does not answer.
    """
    for wait in (*[GIVING_BACK_SEC / _LOOKS] * _LOOKS, 0):
        with store_errors():
            if (taken := await store.take(session_id, force=False)) is not None:
                return taken
            if await store.peek(session_id) is None:
                raise SessionNotFound("session not found", param="session_id")
        await asyncio.sleep(wait)
    raise held_elsewhere()


def held_elsewhere() -> SessionConflict:
    """Return the error for a session that another process of this store has."""
    return SessionConflict("another server has this session now; try again", retry_after_ms=HELD_RETRY_MS)

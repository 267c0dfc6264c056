"""The records of Realtime and Live sessions in the store, from which another session continues their conversations.

A record has no log: the whole record is written as each answer ends. The events that end an answer are sent once the
record is settled, so a record lacks nothing of the conversation that the client has seen. Audio is not in it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar

from msgspec import Struct, msgpack

from omni_ws.config.keys import ApiKey, key_name
from omni_ws.core.history import WORDS_UNKNOWN, Message
from omni_ws.errors import SessionNotFound, UnsupportedParameter
from omni_ws.service import unexpected
from omni_ws.service.sessions.keeper import (
    find_record,
    held_elsewhere,
    store_errors,
    take_record,
    token_digest,
)
from omni_ws.service.sessions.session import Session, refused_as_not_found
from omni_ws.service.store.session_store import Lease, LeaseHolder, SessionStore
from omni_ws.transport.http.exchange import to_thread_if_large
from omni_ws.wire.live_session import MediaStart
from omni_ws.wire.realtime_events import Item
from omni_ws.wire.realtime_session import SessionFields

#: The kinds of these records.
REALTIME_KIND: Final = "realtime"
LIVE_KIND: Final = "live"
#: The query parameters with the id of the session to continue, and the token of its client.
SESSION: Final = "session"
TOKEN: Final = "resume_token"
Content = TypeVar("Content")


class KeptRealtime(Struct, kw_only=True):
    """The snapshot of a session of the Realtime API."""

    conversation_id: str
    session: SessionFields
    items: list[Item]


class KeptLive(Struct, kw_only=True):
    """The snapshot of a session of the Live API: its settings, and its history as text."""

    start: MediaStart
    messages: list[Message]


def as_text(message: Message) -> Message:
    """Return the message as text, without its audio and images. Speech without text becomes WORDS_UNKNOWN."""
    parts = [replace(part, speech=None, picture=None, more=()) for part in message.parts]
    text = " ".join(filter(None, (part.text for part in parts)))
    if not text and message.speech is not None:
        text = WORDS_UNKNOWN
    return replace(parts[0], text=text)


class ConversationRecord(LeaseHolder):
    """The record of an open session. ``content`` returns the snapshot to write.

    ``tokens`` are digests of resume tokens. A client must present one of these tokens if it does not use the session's
    key.
    """

    def __init__(
        self,
        store: SessionStore,
        lease: Lease,
        session: Session,
        content: Callable[[], Any],
        *,
        tokens: tuple[bytes, ...],
    ) -> None:
        self._store, self._lease = store, lease
        self._session = session
        self._content = content
        self._tokens = tokens
        lease.holder = self

    def write(self, *, away: bool = False) -> None:
        """Replace the contents of the record by a snapshot of the session as it is now.

        ``away``: whether the session has ended. If the snapshot cannot be made, the session ends.
        """
        try:
            data = msgpack.encode(self._content())
        except Exception as error:
            self._session.end(unexpected(error, where="the record of a session"))
        else:
            self._store.snapshot(self._lease, data, tokens=self._tokens, away=away)

    def when_settled(self, call: Callable[[], None]) -> None:
        """Call ``call`` once all that was written is settled; immediately if the store is out of order."""
        self._store.when_settled(self._lease, call)

    def end(self) -> None:
        """Write a last snapshot, and release the lease of the record: the session has ended."""
        if not self._lease.lost:
            self.write(away=True)
            self._store.release(self._lease, delete=False)

    def drop(self) -> None:
        """Delete the record."""
        self._store.release(self._lease, delete=True)

    # what the store tells, see LeaseHolder

    def lease_lost(self, *, deleted: bool) -> None:
        self._session.lose(deleted=deleted)

    def store_degraded(self) -> None:
        pass  # these clients are told nothing of what is kept

    def store_wants_snapshot(self) -> None:
        self.write()


def new_token() -> str:
    """Return a new token, with which a client without a key may continue its session."""
    return secrets.token_urlsafe(24)


class KeptConversation(Struct, frozen=True):
    """A stored conversation that a new session continues, with the lease of its record."""

    content: KeptRealtime
    lease: Lease
    tokens: tuple[bytes, ...]


def check_kept(store: SessionStore | None, param: str) -> SessionStore:
    """Return the store. Raises UnsupportedParameter, which names ``param``, if there is no store."""
    if store is None:
        raise UnsupportedParameter("sessions are not kept here: there is no sessions.store", param=param)
    return store


async def take_realtime(
    store: SessionStore | None, session_id: str, key: ApiKey | None, token: str | None
) -> KeptConversation:
    """Take a session of the Realtime API from the store, for a client with this key and token.

    ``token`` is None if the key suffices. Raises UnsupportedParameter without a store, SessionNotFound, SessionConflict
    if the session is open, and EngineOverloaded.
    """
    store = check_kept(store, SESSION)
    found = await find_record(store, session_id, kind=REALTIME_KIND, key=key, token=token)
    taken = await take_record(store, session_id)
    try:
        content = await _decoded(taken.snapshot, KeptRealtime)
    except BaseException:
        store.release(taken.lease, delete=False)
        raise
    return KeptConversation(content, taken.lease, found.clear.tokens)


async def read_live(store: SessionStore | None, session_id: str, key: ApiKey | None, token: str | None) -> KeptLive:
    """Return the snapshot of a Live session that is not open. Raises as ``take_realtime`` does."""
    store = check_kept(store, "session_id")
    found = await find_record(store, session_id, kind=LIVE_KIND, key=key, token=token)
    if found.held:
        raise held_elsewhere()
    with store_errors():
        contents = await store.read(session_id)
    if contents is None:
        raise SessionNotFound("session not found", param="session_id")
    return await _decoded(contents[0], KeptLive)


async def _decoded(snapshot: bytes, kind: type[Content]) -> Content:
    with refused_as_not_found():
        return await to_thread_if_large(len(snapshot), partial(msgpack.decode, snapshot, type=kind))


def begin_record(
    store: SessionStore, session: Session, kind: str, key: ApiKey | None, content: Callable[[], Any], token: str
) -> ConversationRecord:
    """Begin the record of a new session. ``token`` is "" if the client's key suffices.

    ``kind`` is REALTIME_KIND or LIVE_KIND; ``content`` returns the snapshot to write.
    """
    tokens = (token_digest(token),) if token else ()
    lease = store.begin(session.session_id, kind=kind, owner=key_name(key))
    return ConversationRecord(store, lease, session, content, tokens=tokens)

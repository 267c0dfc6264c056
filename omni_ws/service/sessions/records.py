"""Records of the store that are compared before they are read: who may have which, and what is said if not."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from omni_ws.config.keys import ApiKey, key_name
from omni_ws.errors import EngineOverloaded, SessionConflict, SessionNotFound
from omni_ws.service.store.records import ClearPart, FoundRecord, StoreError
from omni_ws.service.store.session_store import SessionStore, Taken

#: A process writes that it has given a record back after it has answered, and a busy one later: so long another waits
#: for that, and so often it looks.
GIVING_BACK_SEC: Final = 0.5
_LOOKS: Final = 10
#: When a client may ask again for a session that another process has.
HELD_RETRY_MS: Final = 1000


def token_digest(token: str) -> bytes:
    """Return what a record has in place of a token."""
    return hashlib.sha256(token.encode("utf-8", "replace")).digest()


def admits(clear: ClearPart, key: ApiKey | None, token: str | None) -> bool:
    """Return whether a client with this key may have a record; with ``token`` not None, that must be one of its own."""
    if clear.owner != key_name(key):
        return False
    presented = None if token is None else token_digest(token)
    return presented is None or any([hmac.compare_digest(presented, one) for one in clear.tokens])


def is_spent(clear: ClearPart, token: str) -> bool:
    """Return whether another connection has come back with this token already."""
    return any([hmac.compare_digest(token_digest(token), one) for one in clear.tokens[1:]])


@contextmanager
def store_errors() -> Iterator[None]:
    """Raise EngineOverloaded in place of a StoreError of the block."""
    try:
        yield
    except StoreError as error:
        raise EngineOverloaded("the store of sessions does not answer now", retry_after_ms=HELD_RETRY_MS) from error


async def find_record(
    store: SessionStore, session_id: str, *, kind: str, key: ApiKey | None, token: str | None
) -> FoundRecord:
    """Return the clear part of a record of ``kind`` that this client may have.

    It may with the key that opened the session. ``token``: what it must present besides; None for nothing. Raises
    SessionNotFound, whatever is wrong, and EngineOverloaded if the store does not answer.
    """
    with store_errors():
        found = await store.peek(session_id)
    if found is not None and found.clear.kind == kind and admits(found.clear, key, token):
        return found
    raise SessionNotFound("session not found", param="session_id")


async def take_record(store: SessionStore, session_id: str) -> Taken:
    """Take a record that ``find_record`` found; one that is being given back is waited for.

    Raises SessionConflict if a living process has it, and EngineOverloaded if the store does not answer.
    """
    for wait in (*[GIVING_BACK_SEC / _LOOKS] * _LOOKS, 0):
        with store_errors():
            if (taken := await store.take(session_id, force=False)) is not None:
                return taken
        await asyncio.sleep(wait)
    raise held_elsewhere()


def held_elsewhere() -> SessionConflict:
    """Return the error for a session that another process of this store has."""
    return SessionConflict("another server has this session now; try again", retry_after_ms=HELD_RETRY_MS)

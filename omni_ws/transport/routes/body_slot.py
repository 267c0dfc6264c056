"""Admission of a session whose first input is the body of a request."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass

from omni_ws.config.keys import ApiKey
from omni_ws.errors import SessionTimeout
from omni_ws.service.sessions.admission import WHY_EVICTED, Admission, Slot
from omni_ws.transport.http.exchange import HttpExchange


@dataclass(frozen=True, slots=True, eq=False)
class _LiveBody:
    """A body that is a session's live input; an EmptySession."""

    exchange: HttpExchange
    slot: Slot

    @property
    def has_content(self) -> bool:
        return self.exchange.has_content

    def evict(self) -> None:
        self.exchange.end_body(SessionTimeout(WHY_EVICTED))
        self.slot.release()


@asynccontextmanager
async def slot_for_body(
    exchange: HttpExchange, admission: Admission, key: ApiKey | None, *, live: bool = False
) -> AsyncIterator[ExitStack]:
    """Take a session's slot when the body of ``exchange`` begins to arrive; a head alone takes none.

    The slot is released with the yielded stack, at the end of the block unless the caller has moved it elsewhere.

    Until an ordinary body is complete its slot is lent: another session may take it, so that slow uploads block
    nobody. ``live`` bodies keep theirs from the start, since they are slow by nature; without content they may be
    evicted as other sessions. Waits as ``Admission.room``. Raises as ``Admission.session`` does, here and in
    ``exchange.read``.
    """
    slot: Slot | None = None
    client = exchange.request.client
    await admission.room(key, client=client)
    with ExitStack() as held:

        def body_received(data: bytes) -> None:
            nonlocal slot
            if slot is None:
                slot = held.enter_context(admission.session(key, client=client, lent=not live))
                if live and data:
                    body = _LiveBody(exchange, slot)
                    admission.opened_empty(body)
                    held.callback(admission.ended, body)
            if not data:
                exchange.has_content = True
                slot.keep()

        if exchange.request.has_body:
            exchange.on_body = body_received
        else:
            body_received(b"")
        yield held

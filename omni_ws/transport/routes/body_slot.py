"""Admission of a session whose first input is the body of a request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from omni_ws.config.keys import ApiKey
from omni_ws.service.sessions.admission import Admission, Slot
from omni_ws.transport.http.exchange import HttpExchange


@contextmanager
def slot_for_body(
    exchange: HttpExchange, admission: Admission, key: ApiKey | None, *, live: bool = False
) -> Iterator[ExitStack]:
    """Take a session's slot when the body of ``exchange`` begins to arrive; a head alone takes none.

    The slot is released with the yielded stack, at the end of the block unless the caller has moved it elsewhere.

    Until an ordinary body is complete its slot is lent: another session may take it, so that slow uploads block
    nobody. ``live`` bodies keep theirs from the start, since they are slow by nature. Raises as ``Admission.session``
    does, here and in ``exchange.read``.
    """
    slot: Slot | None = None
    client = exchange.request.client
    admission.check(key, client=client)
    with ExitStack() as held:

        def body_received(data: bytes) -> None:
            nonlocal slot
            if slot is None:
                slot = held.enter_context(admission.session(key, client=client, lent=not live))
            if not data:
                slot.keep()

        if exchange.request.has_body:
            exchange.on_body = body_received
        else:
            body_received(b"")
        yield held

"""The place of a session whose first input is the body of a request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from omni_ws.config.keys import ApiKey
from omni_ws.service.sessions.admission import Admission, Place
from omni_ws.transport.http.exchange import HttpExchange


@contextmanager
def slot_for_body(
    exchange: HttpExchange, admission: Admission, key: ApiKey | None, *, live: bool = False
) -> Iterator[ExitStack]:
    """A place from when the body begins to come, given back by what is yielded: a head alone takes none.

    An ordinary body has its place lent until it is whole, so that a slow one keeps nobody out; ``live`` input is not
    slow by its own fault. Raises as ``Admission.session``: here, and in ``exchange.read``.
    """
    place: Place | None = None
    client = exchange.request.client
    admission.check(key, client=client)
    with ExitStack() as held:

        def came(data: bytes) -> None:
            nonlocal place
            if place is None:
                place = held.enter_context(admission.session(key, client=client, lent=not live))
            if not data:
                place.keep()

        if exchange.request.has_body:
            exchange.on_body = came
        else:
            came(b"")
        yield held

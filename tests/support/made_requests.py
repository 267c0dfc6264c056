"""Requests of a conversation, made without one, and what a conversation is charged for its history."""

from __future__ import annotations

import time
from collections.abc import Callable

from omni_ws.core.chunks import InputChunk, InputMode, Modality
from omni_ws.core.ledger import Ledger
from omni_ws.core.quota import ByteBudget, beyond_ordinary
from omni_ws.core.request_input import GenerationStarted, InputSettings, RequestInput
from omni_ws.core.start_policy import ON_END_ONLY
from omni_ws.engine.threads import MediaRoom
from omni_ws.service.conversation.request import Request
from omni_ws.service.observing.observer import ObservedSession
from omni_ws.wire.session_config import SessionConfig


def make_request(
    request_id: str = "req_1",
    *,
    mode: InputMode = InputMode.EXTEND,
    by_speech: bool = False,
    observed: ObservedSession | None = None,
    config: SessionConfig | None = None,
    now: Callable[[], float] = time.monotonic,
    ledger: Ledger | None = None,
) -> Request:
    """A request that has just opened, and whose policy fires at the end of its input."""
    config = config or SessionConfig()
    ledger = ledger or Ledger(4096, ByteBudget(1 << 24))
    session = RequestInput(InputSettings(start_policy=ON_END_ONLY, mode=mode))
    timeline = (observed or ObservedSession.unobserved(now)).open_request(
        request_id, task=config.task, input_mode=mode, by_speech=by_speech
    )
    return Request(request_id, session, config, timeline, lambda request, size: None, ledger, MediaRoom())


def give_input(request: Request, text: str) -> None:
    """Give the request its whole input, as a conversation does."""
    for event in request.session.receive_chunk(InputChunk(Modality.TEXT, text.encode(), 0, end_of_input=True)):
        if isinstance(event, GenerationStarted):
            request.timeline.mark_policy_fired(event)
            request.start(event)
    end_input(request)


def end_input(request: Request) -> None:
    """The end of input, after ``request.start``."""
    request.timeline.mark_input_ended()
    request.input.close()
    request.input_ended.set()


def weighed(ledger: Ledger) -> int:
    """What texts, marks and ids take now, beyond what any session has: computed anew, not what is charged."""
    return beyond_ordinary(ledger.history.memory + sum(entry.memory for entry in ledger._entries.values()))

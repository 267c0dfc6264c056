"""The gauges of a server: read at each scrape, and free otherwise."""

from __future__ import annotations

from collections.abc import Callable

from omni_ws import __version__
from omni_ws.engine.base import EngineState
from omni_ws.service.conversation.conversation import Conversation
from omni_ws.service.sessions.factory import SessionFactory


def connect_gauges(sessions: SessionFactory) -> None:
    metrics, engine, admission, budget = sessions.metrics, sessions.engine, sessions.admission, sessions.budget
    metrics.sessions_active.set_function(lambda: admission.sessions)
    metrics.sessions_limit.set(admission.max_sessions)
    metrics.draining.set_function(lambda: admission.draining)
    metrics.held_bytes.set_function(lambda: budget.held)
    metrics.held_bytes_limit.set(budget.capacity)
    metrics.engine_up.labels(engine.name).set_function(lambda: engine.state is EngineState.OK)
    metrics.engine_active.labels(engine.name).set_function(lambda: engine.active_requests)
    metrics.info.labels(__version__, engine.name).set(1)

    def connect(hop: str, *, size: Callable[[Conversation], int]) -> None:
        metrics.queue_bytes.labels(hop).set_function(lambda: sum(map(size, sessions.conversations)))

    connect("input", size=lambda one: one.stream.held_bytes)
    connect("outbox", size=lambda one: one.outbox.queued)
    connect("journal", size=lambda one: one.outbox.journaled)
    connect("history", size=lambda one: one.history.held_bytes)
    metrics.queue_items.labels("reorder").set_function(
        lambda: sum(one.stream.buffered_chunks for one in sessions.conversations)
    )
    metrics.queue_items.labels("outbox").set_function(lambda: sum(len(one.outbox) for one in sessions.conversations))

"""The SessionStore of one more server that shares a FakeStore."""

from __future__ import annotations

import sys

from support.fake_store import FakeBackend, FakeStore

from omni_ws.core.quota import ByteBudget
from omni_ws.metrics import Metrics
from omni_ws.service.store.sealing import Sealer
from omni_ws.service.store.session_store import SessionStore


def kept_by(shared: FakeStore) -> SessionStore:
    """It is to be started."""
    return SessionStore(
        FakeBackend(shared),
        sealer=Sealer(),
        budget=ByteBudget(sys.maxsize),
        metrics=Metrics(),
        max_age_sec=86_400,
        max_bytes=sys.maxsize,
    )

"""What the tests of the store share."""

from __future__ import annotations

import pytest

from omni_ws.service.store import redis_backend


@pytest.fixture(autouse=True)
def _signs_of_life_do_not_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis counts real seconds, and five of them pass within a test on a busy machine."""
    monkeypatch.setattr(redis_backend, "HOLDER_EXPIRY_SEC", 3600.0)

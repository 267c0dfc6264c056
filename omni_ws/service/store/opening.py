"""Makes the configured store of sessions."""

from __future__ import annotations

from omni_ws.config.model import SessionsConfig
from omni_ws.core.quota import ByteBudget
from omni_ws.metrics import Metrics
from omni_ws.service.store.records import StoreBackend
from omni_ws.service.store.sealing import Sealer, load_keys_of_store
from omni_ws.service.store.session_store import SessionStore


def configured_store(config: SessionsConfig, *, budget: ByteBudget, metrics: Metrics) -> SessionStore | None:
    """Return the store of ``sessions.store``, which is to be started; None for ``memory``.

    Raises ConfigurationError for a key that cannot be read.
    """
    if config.address.kind == "memory":
        return None
    key = config.store_key
    return SessionStore(
        _backend(config),
        sealer=Sealer([] if key is None else load_keys_of_store(key.get_secret_value())),
        budget=budget,
        metrics=metrics,
        max_age_sec=config.store_max_age_sec,
        max_bytes=config.store_max_bytes,
        slow_sec=config.store_slow_sec,
    )


def _backend(config: SessionsConfig) -> StoreBackend:
    address = config.address
    if address.kind == "sqlite":
        from omni_ws.service.store.sqlite_backend import SqliteBackend

        return SqliteBackend(address.path, max_bytes=config.store_max_bytes, fsync=address.fsync)
    from omni_ws.service.store.redis_backend import RedisBackend

    return RedisBackend(address, max_age_sec=config.store_max_age_sec)

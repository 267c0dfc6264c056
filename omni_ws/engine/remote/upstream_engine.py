"""UpstreamEngine: what the remote engines have in common, a pool of upstreams and threads for large work."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import ClassVar, Final, TypeVar
from urllib.parse import urlsplit

from omni_ws.config.startup import is_loopback
from omni_ws.engine.base import EngineState
from omni_ws.engine.remote.pool import Pool
from omni_ws.engine.remote.settings import UpstreamSettings
from omni_ws.engine.remote.upstream import Timeouts, Upstream
from omni_ws.engine.threads import run_in_thread
from omni_ws.errors import EngineFailed

T = TypeVar("T")

#: Threads that decode audio, and write and read large JSON.
_THREADS: Final = 4
#: More than this, in bytes, is written and read in a thread: less takes less time than the way there.
_INLINE_BYTES: Final = 256 * 1024


class UpstreamEngine:
    """The life of an engine whose work is done by other servers."""

    name = "remote"
    #: Begins the operator's lines about the upstreams.
    line_prefix: ClassVar[str] = ""
    #: Whether the context of the model matters.
    reads_context: ClassVar[bool] = False

    def __init__(self, settings: UpstreamSettings) -> None:
        #: The upstreams' own name for it; where the settings name none it is known after the start.
        self.model = settings.model or self.name
        self.active_requests = 0
        self._upstream_settings = settings
        self._running_pool: Pool | None = None
        self._running_threads: ThreadPoolExecutor | None = None

    @property
    def state(self) -> EngineState:
        if self._running_pool is None:
            return EngineState.STARTING
        return EngineState.OK if self._running_pool.available else EngineState.UNHEALTHY

    @property
    def upstreams(self) -> tuple[Upstream, ...]:
        """Those of a running engine."""
        return () if self._running_pool is None else self._running_pool.upstreams

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names of the machines of the upstreams, without this one: of their URLs the host alone."""
        names = [urlsplit(url).hostname or "" for url in self._upstream_settings.urls]
        return tuple(dict.fromkeys(name for name in names if not is_loopback(name)))

    def describe(self) -> tuple[str, ...]:
        lines = () if self._running_pool is None else self._running_pool.describe()
        return tuple(self.line_prefix + line for line in lines)

    async def start(self) -> None:
        """Returns when at least one upstream can be used. Idempotent."""
        if self._running_pool is not None:
            return
        async with AsyncExitStack() as undo:
            pool = self._new_pool()
            undo.push_async_callback(pool.stop)
            await pool.start()
            self._check_started(pool)
            undo.pop_all()
        self._running_threads = ThreadPoolExecutor(_THREADS, thread_name_prefix=self.name)
        self._running_pool = pool
        self.model = pool.model or self.model

    async def stop(self) -> None:
        pool, self._running_pool = self._running_pool, None
        threads, self._running_threads = self._running_threads, None
        if pool is not None:
            await pool.stop()
        if threads is not None:
            threads.shutdown(wait=False, cancel_futures=True)

    def _check_started(self, pool: Pool) -> None:
        """Raises EngineFailed where these upstreams cannot be used after all."""

    @property
    def _pool(self) -> Pool:
        if self._running_pool is None:
            raise EngineFailed("the engine is not running", fatal=True)
        return self._running_pool

    @property
    def _threads(self) -> ThreadPoolExecutor:
        if self._running_threads is None:
            raise EngineFailed("the engine is not running", fatal=True)
        return self._running_threads

    async def _run(self, size: int, work: Callable[[], T]) -> T:
        """Work on ``size`` bytes: here where they are few, else in a thread."""
        if size <= _INLINE_BYTES:
            return work()
        return await run_in_thread(self._threads, work)

    def _new_pool(self) -> Pool:
        settings = self._upstream_settings
        timeouts = Timeouts(
            connect=settings.connect_timeout, first_byte=settings.first_byte_timeout, idle=settings.idle_timeout
        )
        ca_file = None if settings.ca_file is None else str(settings.ca_file)
        variable = settings.key_variable or f"OMNI_WS_{settings.section.upper()}__API_KEY"
        key = settings.api_key
        return Pool(
            [
                Upstream(
                    url,
                    key=key,
                    timeouts=timeouts,
                    ca_file=ca_file,
                    key_variable=variable,
                    log_content=settings.log_content,
                )
                for url in settings.urls
            ],
            model=settings.model,
            retries=settings.retries,
            health_interval=settings.health_interval,
            start_timeout=settings.start_timeout,
            reads_context=self.reads_context,
        )

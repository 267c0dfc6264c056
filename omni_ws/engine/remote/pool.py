"""Several upstreams that serve one model: who is well, who has the least to do, and who is asked next."""

from __future__ import annotations

import asyncio
import difflib
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Final

from omni_ws.engine.remote.dialect import is_for_chat
from omni_ws.engine.remote.upstream import NotTaken, Unusable, Upstream, UpstreamAnswer, UpstreamState
from omni_ws.errors import EngineFailed

logger = logging.getLogger(__name__)

#: Seconds before an upstream that was lost is looked at again: doubled each time, up to the longest.
FIRST_BACKOFF: Final = 0.5
LONGEST_BACKOFF: Final = 30.0
#: Seconds before the second try at the same upstream, doubled for each further one.
RETRY_DELAY: Final = 0.2
#: An upstream that asks for more patience than this, in seconds, is not waited for: its client is told instead.
LONGEST_WAIT: Final = 5.0
#: Checks in a row that may come back too late before an upstream counts as lost: it may only be busy.
SLOW_CHECKS: Final = 2
#: Of a model's name in messages, and of models among which one is looked for that was meant.
_MOST_CHARACTERS: Final = 100
_MOST_MODELS: Final = 1000


class Pool:
    """``start`` … ``post`` … ``stop``. ``model`` is None until ``start`` unless it is given."""

    def __init__(
        self,
        upstreams: Sequence[Upstream],
        *,
        model: str | None,
        retries: int,
        health_interval: float,
        start_timeout: float,
        reads_context: bool = False,
    ) -> None:
        """``reads_context``: whether the context of the model matters, and is asked for."""
        self.upstreams = tuple(upstreams)
        self.model = model
        self._retries = retries
        self._health_interval = health_interval
        self._start_timeout = start_timeout
        self._reads_context = reads_context
        self._watchers: list[asyncio.Task[None]] = []
        self._troubled = {upstream: asyncio.Event() for upstream in self.upstreams}
        self._slow_checks = dict.fromkeys(self.upstreams, 0)
        self._turns = count()
        self._last_turn = dict.fromkeys(self.upstreams, -1)
        #: Until when, in the loop's time, an upstream asked to be left alone.
        self._rests_until = dict.fromkeys(self.upstreams, 0.0)

    @property
    def available(self) -> bool:
        return any(upstream.state is UpstreamState.UP for upstream in self.upstreams)

    @property
    def context(self) -> int | None:
        """The smallest context that the upstreams tell, in tokens; None where none does."""
        return min((one.context for one in self.upstreams if _is_up(one) and one.context is not None), default=None)

    def describe(self) -> tuple[str, ...]:
        return tuple(
            f"upstream {upstream.name} {f'serves {self.model}' if _is_up(upstream) else f'is lost: {upstream.problem}'}"
            for upstream in self.upstreams
        )

    # life

    async def start(self) -> None:
        """Returns when at least one upstream can be used. Raises EngineFailed when none can, or none in time."""
        deadline = asyncio.get_running_loop().time() + self._start_timeout
        backoff, told = FIRST_BACKOFF, ""
        while not await self._look_at_all():
            now = asyncio.get_running_loop().time()
            if now >= deadline:
                raise EngineFailed(f"no upstream can be used: {'; '.join(self._problems())}", fatal=True)
            if (problems := "; ".join(self._problems())) != told:
                logger.info("waiting for an upstream: %s", problems)
                told = problems
            await asyncio.sleep(min(backoff, deadline - now))
            backoff = min(2 * backoff, LONGEST_BACKOFF)
        for upstream in self.upstreams:
            self._watchers.append(asyncio.create_task(self._watch(upstream), name=f"watch {upstream.name}"))

    async def stop(self) -> None:
        """Idempotent."""
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)
        for upstream in self.upstreams:
            await upstream.close()

    async def _look_at_all(self) -> bool:
        """Whether any can be used. Raises EngineFailed where waiting helps none of them."""
        failures = await asyncio.gather(*(self._look_at(upstream) for upstream in self.upstreams))
        if self.model is None:
            listed = (model for upstream in self.upstreams if _is_up(upstream) for model in upstream.models)
            self.model = next(filter(is_for_chat, listed), None)
            for upstream in self.upstreams:
                self._judge_model(upstream)
            await asyncio.gather(*(self._read_context(upstream) for upstream in self.upstreams))
        if not self.available and all(failure is not None and failure.lasting for failure in failures):
            raise EngineFailed(f"no upstream can be used: {'; '.join(self._problems())}", fatal=True)
        return self.available

    def _problems(self) -> list[str]:
        return [f"{upstream.name}: {upstream.problem}" for upstream in self.upstreams]

    # health

    async def _watch(self, upstream: Upstream) -> None:
        """Looks at it every now and then, at once when it made trouble, and ever less often while it is lost."""
        backoff = FIRST_BACKOFF
        while True:
            lost = upstream.state is not UpstreamState.UP
            try:
                async with asyncio.timeout(backoff if lost else self._health_interval):
                    await self._troubled[upstream].wait()
                self._troubled[upstream].clear()
                if upstream.state is not UpstreamState.UP:
                    continue  # lost just now: give it a moment
            except TimeoutError:
                pass
            await self._look_at(upstream)
            backoff = min(2 * backoff, LONGEST_BACKOFF) if lost else FIRST_BACKOFF

    async def _look_at(self, upstream: Upstream) -> Unusable | None:
        try:
            await upstream.check()
        except Unusable as problem:
            self._slow_checks[upstream] += 1
            if not problem.slow or not _is_up(upstream) or self._slow_checks[upstream] >= SLOW_CHECKS:
                self._lose(upstream, str(problem))
            return problem
        self._slow_checks[upstream] = 0
        was_up, was = _is_up(upstream), upstream.state
        upstream.state, upstream.problem = UpstreamState.UP, ""
        wrong_model = self._judge_model(upstream, tell=was_up)
        if not was_up and wrong_model is None and was is not UpstreamState.UNKNOWN:
            logger.info("upstream %s is back", upstream.name)
        await self._read_context(upstream)
        return wrong_model

    async def _read_context(self, upstream: Upstream) -> None:
        if self._reads_context and _is_up(upstream) and self.model is not None:
            await upstream.read_context(self.model)

    def _judge_model(self, upstream: Upstream, *, tell: bool = True) -> Unusable | None:
        """A server that lists models must list ours; one that lists none is believed.

        ``tell``: whether the loss of one with other models is news.
        """
        if not _is_up(upstream) or self.model is None or not upstream.models or upstream.serves(self.model):
            return None
        listed = [name[:_MOST_CHARACTERS] for name in upstream.models[:_MOST_MODELS]]
        near = difflib.get_close_matches(self.model[:_MOST_CHARACTERS], listed, n=3)
        known = ", ".join(near or listed[:8])
        meant = f"did you mean {known}?" if near else f"it serves {known}"
        problem = Unusable(f"it does not serve {self.model}; {meant}", lasting=True)
        self._lose(upstream, str(problem), tell=tell)
        return problem

    def _lose(self, upstream: Upstream, problem: str, *, tell: bool = True) -> None:
        if tell and _is_up(upstream):
            logger.warning("upstream %s is lost: %s", upstream.name, problem)
        upstream.state, upstream.problem = UpstreamState.DOWN, problem

    # requests

    @asynccontextmanager
    async def post(
        self, path: str, body: bytes, *, headers: Mapping[str, str] | None = None
    ) -> AsyncGenerator[UpstreamAnswer, None]:
        """An answer that has begun. Leaving the block closes it, and its connection if it is not at its end.

        Only what an upstream did no work on is tried again. Raises what the last refusal means.
        """
        tried: list[Upstream] = []
        for attempt in count():
            upstream = self._choose(tried)
            tried.append(upstream)
            self._last_turn[upstream] = next(self._turns)
            upstream.active += 1
            try:
                try:
                    answer = await upstream.post(path, body, headers=headers or {})
                except NotTaken as refused:
                    self._note(upstream, refused)
                    delay = self._delay_before_next(attempt, tried, refused)
                    if delay is None:
                        raise refused.error from None
                except EngineFailed:
                    self._troubled[upstream].set()
                    raise
                else:
                    try:
                        yield answer
                    except EngineFailed:
                        self._troubled[upstream].set()
                        raise
                    finally:
                        await answer.aclose()
                    return
            finally:
                upstream.active -= 1
            await asyncio.sleep(delay)

    def _choose(self, tried: Sequence[Upstream]) -> Upstream:
        """One that is well; of these one not tried yet, not resting, with the fewest requests, idle for longest."""
        now = asyncio.get_running_loop().time()
        # Where none is well the ones that this very request lost may have another chance.
        candidates = [upstream for upstream in self.upstreams if _is_up(upstream)] or tried
        if not candidates:
            raise EngineFailed("no upstream can be reached")
        return min(
            candidates,
            key=lambda upstream: (
                upstream in tried,
                self._rests_until[upstream] > now,
                upstream.active,
                self._last_turn[upstream],
            ),
        )

    def _note(self, upstream: Upstream, refused: NotTaken) -> None:
        if refused.unreachable:
            self._lose(upstream, "it cannot be reached")
            self._troubled[upstream].set()
        elif refused.status == 502:
            self._troubled[upstream].set()
        elif refused.delay is not None:
            self._rests_until[upstream] = asyncio.get_running_loop().time() + refused.delay

    def _delay_before_next(self, attempt: int, tried: Sequence[Upstream], refused: NotTaken) -> float | None:
        """Seconds until the next try; None where there is none."""
        if attempt >= self._retries:
            return None
        now = asyncio.get_running_loop().time()
        if any(
            _is_up(upstream) and upstream not in tried and self._rests_until[upstream] <= now
            for upstream in self.upstreams
        ):
            return 0.0
        if refused.status == 429 and refused.delay is None:
            return None
        delay = RETRY_DELAY * 2**attempt if refused.delay is None else refused.delay
        return delay if delay <= LONGEST_WAIT else None


def _is_up(upstream: Upstream) -> bool:
    return upstream.state is UpstreamState.UP

"""ModelOutputs: what vLLM generates for one prompt, taken from where vLLM's own loop leaves it.

``AsyncLLM`` reads the outputs of its process in one task, which puts each into the ``RequestOutputCollector`` of its
request and so wakes the task that waits there. With eight answers, waking these tasks takes as much time as all else
that happens to an output. So a consumer may ask to be called by ``put`` itself.

A model that makes more tokens a second than anybody reads, hears or plays makes them for several answers at once. Then
sending each by itself costs more than making it, so tokens that follow others within GROUP_SEC are taken together.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias

if TYPE_CHECKING:
    from vllm import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

#: How long an output may wait for those that follow it. One that comes later than this after the last is taken at once:
#: all of those of a model that makes up to 200 tokens a second for each answer.
GROUP_SEC: Final = 0.005

#: Consumes an output, without waiting; returns False if that is impossible now.
Take: TypeAlias = "Callable[[RequestOutput], bool]"


class ModelOutputs(AsyncIterator["RequestOutput"]):
    """Iterates over vLLM's outputs for one prompt, which is submitted with the first of them.

    ``submit`` calls ``AsyncLLM.add_request``, ``translate`` maps what vLLM raises, and ``on_end`` is awaited at the end
    of a request that was submitted, with whether any output arrived. ``aclose`` aborts a request that still runs; it
    has to be called also when the iteration was cancelled.

    While the iteration waits, outputs go to ``take``, if that is set, inside vLLM's own loop. Those that come in quick
    succession are merged, as vLLM does for a consumer that is slow. What ``take`` refuses, the last output, and errors
    go to the iteration, so the order is kept. What ``take`` raises, the iteration raises.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        submit: Callable[[], Awaitable[Any]],
        *,
        translate: Callable[[Exception], Exception],
        on_end: Callable[[bool], Awaitable[None]],
        groups: OutputGroups,
    ) -> None:
        self.take: Take | None = None
        #: Whether any output arrived since this was last set to False.
        self.arrived = False
        self._llm = llm
        self._submit = submit
        self._translate = translate
        self._on_end = on_end
        self._groups = groups
        self._submitted = False
        self._ended = False
        self._waiting = False
        #: What waits for further outputs, to be taken with them; only while the iteration waits.
        self._held: Any = None
        #: When outputs were last taken, on the loop's clock.
        self._taken_at = -math.inf
        self._failure: Exception | None = None
        #: vLLM's RequestOutputCollector, and its own ``put``.
        self._collector: Any = None
        self._collect: Callable[[Any], None]

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._ended:
            raise StopAsyncIteration
        try:
            output = await self._next()
        except Exception as error:
            from vllm.v1.engine.exceptions import EngineDeadError

            await self._end(running=not isinstance(error, EngineDeadError))
            if error is self._failure:
                raise
            raise self._translate(error) from error
        self.arrived = True
        if output.finished:
            await self._end(running=False)
            if not output.outputs:  # the end of a streamed prompt, after its last output
                raise StopAsyncIteration
        return output

    async def aclose(self) -> None:
        """Abort the request, unless it has ended. Idempotent."""
        await self._end()

    async def _next(self) -> RequestOutput:
        if self._collector is None:
            self._submitted = True
            self._collector = await self._submit()
            self._collect = self._collector.put
            self._collector.put = self._put
        output: RequestOutput | None = self._collector.get_nowait()
        if output is not None:
            return output
        self._waiting = True
        try:
            output = await self._collector.get()
        finally:
            self._waiting = False
            if self._held is not None:  # cancelled
                self._collect(self._held)
                self._held = None
        assert output is not None
        return output

    def _put(self, output: Any) -> None:
        """Stand in for ``RequestOutputCollector.put``. An exception in here would end vLLM's loop, for all requests."""
        if not self._waiting or self.take is None or getattr(output, "finished", True):
            self.take_held()
            self._waiting = False
            self._collect(output)
        elif self._held is not None:
            self._held.add(output, aggregate=self._collector.aggregate)
        elif self._groups.now() - self._taken_at < GROUP_SEC:
            self._held = output
            self._groups.hold(self)
        else:
            self._take(output)

    def take_held(self) -> None:
        """Take what waits for further outputs. Raises nothing."""
        held, self._held = self._held, None
        if held is not None:
            self._take(held)

    def _take(self, output: Any) -> None:
        assert self.take is not None
        self._taken_at = self._groups.now()
        try:
            if self.take(output):
                self.arrived = True
                return
        except Exception as error:
            self._failure = output = error
        self._waiting = False
        self._collect(output)

    async def _end(self, *, running: bool = True) -> None:
        """Release what vLLM holds for the request, which is aborted if it is ``running``."""
        if self._ended:
            return
        self._ended = True
        self.take = self._held = None
        try:
            if self._collector is not None:
                await self._release(running=running)
        finally:
            if self._submitted:
                await self._on_end(self.arrived)

    async def _release(self, *, running: bool) -> None:
        collector, self._collector = self._collector, None
        del collector.put
        try:
            if running:
                await self._llm.abort(collector.request_id, internal=True)
        except Exception as error:
            raise self._translate(error) from error
        finally:
            collector.close()


class OutputGroups:
    """Lets outputs of all requests to a model wait for those that follow, with one timer.

    A model computes all its requests in the same steps, so their outputs come at the same times.
    """

    def __init__(self) -> None:
        self._holding: list[ModelOutputs] = []

    @staticmethod
    def now() -> float:
        """The time of the event loop."""
        return asyncio.get_running_loop().time()

    def hold(self, outputs: ModelOutputs) -> None:
        """Call ``outputs.take_held`` soon: GROUP_SEC after the first that was held."""
        self._holding.append(outputs)
        if len(self._holding) == 1:
            asyncio.get_running_loop().call_later(GROUP_SEC, self._release)

    def _release(self) -> None:
        holding, self._holding = self._holding, []
        for outputs in holding:
            outputs.take_held()

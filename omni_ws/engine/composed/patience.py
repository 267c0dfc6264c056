"""Patience: how long a part may do nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Final, TypeVar

from omni_ws.engine.base import Engine, EngineOutput, GenerationRequest, OutputSink
from omni_ws.engine.composed.parts import Role, failures_of
from omni_ws.errors import EngineFailed

T = TypeVar("T")

#: How long an ASR or a TTS may take for one step. Long: an ASR may work on a whole recording before it says anything.
STALLED_SEC: Final = 300.0


class Patience:
    """Ends the work of a part that neither takes input nor makes output for ``seconds``; with None, of none.

    The time stands still while the part waits for input, and between ``rest`` and ``wait``. It is looked at by one
    timer, so that a part that works costs two assignments for each item.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        #: Whether the part waits for input.
        self.reading = False
        #: Since when the part has something to do; None while it has nothing.
        self._since: float | None = None
        self._timeout: asyncio.Timeout | None = None
        self._timer: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def limiting(self, role: Role, engine: Engine) -> AsyncIterator[None]:
        """Cancel the block when the time is over, which raises EngineFailed."""
        try:
            async with asyncio.timeout(None) as self._timeout:
                self._look()
                yield
        except TimeoutError:
            failure = f"{role.upper()} ({engine.name}): nothing came within {self._seconds:g} seconds"
            raise EngineFailed(failure, param=role.value) from None
        finally:
            self.stop()

    def wait(self) -> None:
        """The part has something to do."""
        self._since = self._loop.time()

    def rest(self) -> None:
        """The part has shown that it works, and need not do anything for now."""
        self._since = None

    def stop(self) -> None:
        """Limit nothing any more. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._timeout = None

    def _look(self) -> None:
        """End the part, or look again when its time may be over."""
        if self._seconds is None or self._timeout is None:
            return
        now = self._loop.time()
        since = now if self.reading or self._since is None else self._since
        left = since + self._seconds - now
        if left <= 0:
            self._timeout.reschedule(now)
        else:
            self._timer = self._loop.call_later(left, self._look)

    def watched(self, source: AsyncIterator[T]) -> AsyncIterator[T]:
        """Return ``source`` for the part to read from."""
        return _Watched(source, self)


class _Watched(AsyncIterator[T]):
    def __init__(self, source: AsyncIterator[T], patience: Patience) -> None:
        self._source = source
        self._patience = patience

    async def __anext__(self) -> T:
        self._patience.reading = True
        try:
            return await anext(self._source)
        finally:
            self._patience.reading = False
            self._patience.wait()


async def run_part(role: Role, part: Engine, request: GenerationRequest) -> AsyncGenerator[EngineOutput, None]:
    """Yield the outputs of an ASR or a TTS. Its failures have its name, and so has it if it stalls."""
    patience = Patience(STALLED_SEC)
    asked = replace(request, input=patience.watched(aiter(request.input)))
    async with patience.limiting(role, part):
        with failures_of(role, part, request_id=request.request_id):
            async with aclosing(part.generate(asked)) as outputs:  # type: ignore[type-var]
                async for output in outputs:
                    patience.rest()
                    yield output
                    patience.wait()


class FirstOutputSink:
    """A sink that stops ``patience`` at the first output, and costs nothing from then on."""

    __slots__ = ("_patience", "_sink", "offer")

    def __init__(self, sink: OutputSink, patience: Patience) -> None:
        self._sink = sink
        self._patience = patience
        self.offer = self._offer_first

    def _offer_first(self, output: EngineOutput) -> bool:
        self._patience.stop()
        self.offer = self._sink.offer
        return self._sink.offer(output)

"""DecodeQueue: batches the codec decoding of all requests in one worker thread."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from omni_ws.audio.samples import Samples
from omni_ws.engine.vllm.snac_stream import CodecWindow
from omni_ws.errors import EngineFailed

#: The weight of the latest measurement in the moving average.
_SMOOTHING = 0.1


class DecodeQueue:
    """Decodes windows in batches. All methods belong to one event loop; ``decode`` runs in the queue's thread.

    ``decode`` gets up to ``batch`` windows at once. A request submits one window at a time, so the queue has no limit
    of its own.

    ``ms_per_frame`` is the average time from submission to result per frame of a window, in milliseconds; 0 before the
    first measurement.
    """

    def __init__(self, decode: Callable[[Sequence[CodecWindow]], list[Samples]], *, batch: int = 16) -> None:
        self._decode_windows = decode
        self._batch = batch
        self._waiting: deque[tuple[CodecWindow, asyncio.Future[Samples]]] = deque()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="code2wav")
        self._work: asyncio.Task[None] | None = None
        self._closed = False
        self.ms_per_frame = 0.0

    async def decode(self, window: CodecWindow) -> Samples:
        """Return the samples that ``window`` asks for.

        Raises EngineFailed on a closed queue, and what the decoder raises. Cancelling drops the window if it has not
        started.
        """
        if self._closed:
            raise EngineFailed("the decoder is closed")
        done: asyncio.Future[Samples] = asyncio.get_running_loop().create_future()
        self._waiting.append((window, done))
        if self._work is None:
            self._work = asyncio.create_task(self._drain(), name="code2wav decoding")
        began = time.perf_counter()
        samples = await done
        took = (time.perf_counter() - began) * 1000 / len(window.codes)
        self.ms_per_frame += _SMOOTHING * (took - self.ms_per_frame) if self.ms_per_frame else took
        return samples

    async def close(self) -> None:
        """Wait for the current batch; the windows behind it fail. Idempotent."""
        self._closed = True
        while self._waiting:
            _, done = self._waiting.popleft()
            if not done.done():
                done.set_exception(EngineFailed("the decoder is closed"))
        if self._work is not None:
            await asyncio.wait([self._work])
        self._executor.shutdown()

    async def _drain(self) -> None:
        """Decode batch after batch until no window waits."""
        loop = asyncio.get_running_loop()
        try:
            while batch := self._next_batch():
                windows = [window for window, _ in batch]
                try:
                    decoded = await loop.run_in_executor(self._executor, self._decode_windows, windows)
                except Exception as error:
                    for _, done in batch:
                        if not done.done():
                            done.set_exception(error)
                else:
                    for (_, done), samples in zip(batch, decoded, strict=True):
                        if not done.done():
                            done.set_result(samples)
        finally:
            self._work = None

    def _next_batch(self) -> list[tuple[CodecWindow, asyncio.Future[Samples]]]:
        """Return the next windows whose requests still wait for them."""
        batch: list[tuple[CodecWindow, asyncio.Future[Samples]]] = []
        while self._waiting and len(batch) < self._batch:
            window, done = self._waiting.popleft()
            if not done.done():
                batch.append((window, done))
        return batch

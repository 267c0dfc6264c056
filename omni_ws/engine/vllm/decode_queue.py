"""One worker thread that decodes for all sessions, and takes together what waits together."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from omni_ws.audio.samples import Samples
from omni_ws.engine.vllm.snac_stream import CodecWindow
from omni_ws.errors import EngineFailed

#: Weight of the newest measurement.
_SMOOTHING = 0.1


class DecodeQueue:
    """``decode`` is called in the worker thread with 1 … ``batch`` windows. Belongs to one event loop.

    ``ms_per_frame`` is how long a window takes at the moment, from being handed in to being done, for each of its
    frames; 0 as long as nobody knows. A session waits for its window before it hands in the next, so that there are
    never more than there are sessions.
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
        """Raises EngineFailed once the queue is closed, and what decoding raises. Cancelling it drops the window."""
        if self._closed:
            raise EngineFailed("the decoder has been closed")
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
        """Waits for what is being decoded; what still waits fails. Idempotent."""
        self._closed = True
        while self._waiting:
            _, done = self._waiting.popleft()
            if not done.done():
                done.set_exception(EngineFailed("the decoder has been closed"))
        if self._work is not None:
            await asyncio.wait([self._work])
        self._executor.shutdown()

    async def _drain(self) -> None:
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
        """The next windows whose sessions still want them."""
        batch: list[tuple[CodecWindow, asyncio.Future[Samples]]] = []
        while self._waiting and len(batch) < self._batch:
            window, done = self._waiting.popleft()
            if not done.done():
                batch.append((window, done))
        return batch

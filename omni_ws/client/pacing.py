"""Recorded audio in real time, as a microphone delivers it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator

from omni_ws.client.wav import Pcm16


def pieces(audio: Pcm16, *, piece_ms: int = 20) -> Iterator[bytes]:
    """Splits audio into pieces of ``piece_ms``, on frame boundaries. The last one may be shorter."""
    size = max(1, audio.sample_rate * piece_ms // 1000) * 2 * audio.channels
    for start in range(0, len(audio.samples), size):
        yield audio.samples[start : start + size]


async def paced(items: Iterable[bytes], *, interval: float) -> AsyncGenerator[bytes, None]:
    """Yields one item every ``interval`` seconds, the first after one interval, as a microphone records before it
    delivers.

    Due times count from the start, so delays do not accumulate: after a hold-up, the late items follow at once.
    """
    loop = asyncio.get_running_loop()
    start = loop.time()
    for number, item in enumerate(items, 1):
        await asyncio.sleep(max(0.0, start + number * interval - loop.time()))
        yield item

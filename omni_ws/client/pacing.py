"""Audio as a microphone gives it: small pieces, each at its time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator

from omni_ws.client.wav import Pcm16


def pieces(audio: Pcm16, *, piece_ms: int = 20) -> Iterator[bytes]:
    """Whole frames of all channels; the last piece may be shorter."""
    size = max(1, audio.sample_rate * piece_ms // 1000) * 2 * audio.channels
    for start in range(0, len(audio.samples), size):
        yield audio.samples[start : start + size]


async def paced(items: Iterable[bytes], *, interval: float) -> AsyncGenerator[bytes, None]:
    """One item every ``interval`` seconds, the first after one interval: a microphone first has to hear it.

    Times are counted from the start, so that delays do not add up: after a hold-up, the late ones follow at once.
    """
    loop = asyncio.get_running_loop()
    start = loop.time()
    for number, item in enumerate(items, 1):
        await asyncio.sleep(max(0.0, start + number * interval - loop.time()))
        yield item

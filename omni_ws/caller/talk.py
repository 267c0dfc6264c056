"""Speaking into a session of the client library, while something else listens to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final

import numpy as np

from omni_ws.caller.script import PIECE_MS, PIECE_SEC
from omni_ws.client import ClientSession
from omni_ws.client.audio import Pcm16, paced, pieces

#: The level of speech, relative to the loudest piece; what is softer counts as the noise of a recording.
SPEECH_LEVEL: Final = 10 ** (-26 / 20)


def speech_of(audio: Pcm16) -> tuple[int, int]:
    """The pieces in which speech begins, and behind which it has ended: those within 26 dB of the loudest.

    Raises ValueError for a recording without any sound.
    """
    samples = [np.frombuffer(piece, "<i2").astype(np.float64) for piece in pieces(audio, piece_ms=PIECE_MS)]
    levels = np.array([np.sqrt(np.mean(np.square(piece))) for piece in samples])
    if not levels.any():
        raise ValueError("the recording has no sound")
    loud = np.flatnonzero(levels > SPEECH_LEVEL * levels.max())
    return int(loud[0]), int(loud[-1]) + 1


async def say(session: ClientSession, audio: Pcm16) -> None:
    """Send audio in real time."""
    async for piece in paced(pieces(audio, piece_ms=PIECE_MS), interval=PIECE_SEC):
        await session.send_audio(piece)


@asynccontextmanager
async def beside(activity: Coroutine[Any, Any, None]) -> AsyncIterator[asyncio.Task[None]]:
    """Run something beside the block, and no longer than that; raise what went wrong in it."""
    task = asyncio.create_task(activity)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()

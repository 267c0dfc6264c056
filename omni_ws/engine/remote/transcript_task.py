"""TranscriptTask: a transcript that is made whether or not anybody reads it yet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from omni_ws.engine.remote.transcription import TranscriptText


class TranscriptTask:
    """Iterating gives the texts that replace one another, the newest of those that were not read, and last the settled.

    ``length`` is that of the utterance, in samples. Iterating raises what making the transcript raised. Whoever made it
    has to close it.
    """

    def __init__(self, texts: AsyncGenerator[TranscriptText, None], *, length: int) -> None:
        self.length = length
        self._newest: TranscriptText | None = None
        self._changed = asyncio.Event()
        self._task = asyncio.create_task(self._run(texts), name="transcript")

    def __aiter__(self) -> TranscriptTask:
        return self

    async def __anext__(self) -> TranscriptText:
        while self._newest is None:
            if self._task.done():
                self._task.result()
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        newest, self._newest = self._newest, None
        return newest

    @property
    def settled(self) -> TranscriptText | None:
        """The settled text, before anybody reads it; None while there is none, or where making it failed."""
        newest = self._newest
        return newest if newest is not None and newest.settled else None

    async def aclose(self) -> None:
        """Withdraw the request of one that is not finished. Idempotent."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, texts: AsyncGenerator[TranscriptText, None]) -> None:
        try:
            async with aclosing(texts):
                async for text in texts:
                    self._newest = text
                    self._changed.set()
        finally:
            # The task is done only in a later pass of the loop than this.
            asyncio.get_running_loop().call_soon(self._changed.set)

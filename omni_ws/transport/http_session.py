"""One request over HTTP as a conversation of one turn: its input fed in, its outputs handed to an encoder."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager

from omni_ws.core.chunks import InputChunk
from omni_ws.errors import OmniError
from omni_ws.service.conversation import Conversation
from omni_ws.service.failure import unexpected
from omni_ws.service.outbox import Message, Outbox


class HttpSession:
    """``outputs`` runs everything; ``feed`` and ``end_input`` are for the source of the input."""

    def __init__(self, conversation: Conversation, outbox: Outbox) -> None:
        self.conversation = conversation
        self._outbox = outbox
        self._loop = asyncio.get_running_loop()
        self._output = asyncio.Event()
        self._input_room = asyncio.Event()
        outbox.on_ready = self._output.set
        conversation.on_input_room = self._input_room.set

    async def feed(self, chunk: InputChunk) -> None:
        """Waits while the engine is behind. Raises what the chunk is refused for."""
        self.conversation.configuration.check_chunk(chunk)
        self.conversation.receive_chunk(chunk)
        while self.conversation.input_full:
            self._input_room.clear()
            await self._input_room.wait()

    def end_input(self) -> None:
        """The end of the body ends the input. Raises SequenceGap for chunks that can no longer come."""
        stream = self.conversation.stream
        if stream.has_gap:
            raise stream.gap_error()
        if not stream.opened:
            # Nothing at all came: a request with an end and no input says so by itself.
            self.conversation.receive_chunk(InputChunk.end())
        self.conversation.finish()
        self.conversation.close()

    @asynccontextmanager
    async def outputs(self, source: Callable[[], Awaitable[None]]) -> AsyncIterator[AsyncIterator[Message]]:
        """Runs ``source``, which feeds the input, and the conversation beside whoever reads the outputs.

        Reading raises the error of the source, of the clock, or of the request.
        """
        tasks = (
            asyncio.create_task(self._guard(self.conversation.run())),
            asyncio.create_task(self._guard(source())),
            asyncio.create_task(self._guard(self._watch_the_clock())),
        )
        try:
            yield self._read()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self) -> AsyncIterator[Message]:
        while True:
            while (message := self._outbox.take()) is not None:
                if isinstance(message, OmniError):
                    raise message
                yield message
            self._output.clear()
            await self._output.wait()

    async def _guard(self, work: Awaitable[None]) -> None:
        """What goes wrong beside the reader reaches it as a message."""
        try:
            await work
        except OmniError as error:
            self._outbox.put_nowait(error)
        except Exception as error:
            self._outbox.put_nowait(unexpected(error, where="a request over HTTP"))

    async def _watch_the_clock(self) -> None:
        while True:
            deadline = self.conversation.get_timer()
            now = self._loop.time()
            # Looks again at least once a second: a nearer deadline may have come up meanwhile.
            await asyncio.sleep(min(1.0, max(0.01, (deadline or now + 1) - now)))
            self.conversation.handle_timer()
            self.conversation.take_ack()


async def feed_all(session: HttpSession, chunks: Iterable[InputChunk]) -> None:
    """The source of a request whose input is at hand."""
    for chunk in chunks:
        await session.feed(chunk)
    session.end_input()

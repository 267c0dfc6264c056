"""HttpSession: the conversation behind one HTTP request, between the source of its input and its response."""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Final

from omni_ws.core.chunks import AnyOutput, InputChunk, OutputChunk
from omni_ws.errors import OmniError
from omni_ws.service.conversation.conversation import Conversation
from omni_ws.service.conversation.messages import Outbox, ServerMessage
from omni_ws.service.failure import unexpected
from omni_ws.service.observing.observer import OutputWritten
from omni_ws.transport.http.hang_up import Deadline, PeerGone
from omni_ws.transport.routes.response_stream import PromptWriter

#: Chunks of one body that are fed in one pass of the event loop; others' audio must not wait for all of them.
_CHUNKS_AT_A_TIME: Final = 64


class HttpSession:
    """Runs a conversation of one request, as its owner.

    Three tasks run inside ``running``: the conversation, the source of the input, which calls ``feed`` and
    ``end_input``, and the session's clock. The handler's own task reads the answer with ``take`` and ``wait``, as from
    any AnswerSource. An error of the three reaches it as the last message of the outbox.
    """

    def __init__(self, conversation: Conversation, outbox: Outbox) -> None:
        self.conversation = conversation
        self._outbox = outbox
        self._observed = conversation.observed
        self._loop = asyncio.get_running_loop()
        #: The wait in progress, with its ``meanwhile`` and its ``idle_sec``.
        self._waiting: asyncio.Future[bool] | None = None
        self._meanwhile: PromptWriter | None = None
        self._idle_sec: float | None = None
        #: When ``meanwhile`` last wrote what was queued, on the loop's clock.
        self._delivered_at = -math.inf
        self._idle = Deadline(self._loop, self._idle_expired)
        #: Outputs taken and not yet marked as written; collected only while observers listen to outputs.
        self._unwritten: list[AnyOutput] = []
        self._input_room = asyncio.Event()
        self._timer_changed = asyncio.Event()
        conversation.attach(self)

    async def feed(self, chunk: InputChunk) -> None:
        """Feed one chunk, and wait while the engine is behind. Raises the error that the chunk is refused with."""
        try:
            self.conversation.configuration.check_chunk(chunk)
            self.conversation.receive_chunk(chunk, now=self._loop.time())
        except OmniError as error:
            error.param = self.conversation.field_names(error.param)
            raise
        if self.conversation.stream.gap_since is not None:
            self._timer_changed.set()
        if not self.conversation.input_full():
            return
        self.hold_clocks(True)
        try:
            while self.conversation.input_full():
                self._input_room.clear()
                await self._input_room.wait()
        finally:
            self.hold_clocks(False)

    def hold_clocks(self, held: bool) -> None:
        """Let the times of silence and gap stand still, or go on: the server holds the input back."""
        stream, now = self.conversation.stream, self._loop.time()
        if held:
            stream.hold_clocks(now=now)
        else:
            stream.release_clocks(now=now)
        self._timer_changed.set()

    def interrupt(self, error: OmniError) -> None:
        """End the answer with ``error``, behind the messages that are in the outbox."""
        self._outbox.put_nowait(copy.copy(error))

    def touch(self) -> None:
        """Restart the time of the client's silence: bytes of an incomplete chunk have arrived."""
        self.conversation.stream.touch(now=self._loop.time())

    def end_input(self) -> None:
        """End the input with the body. Raises SequenceGap where chunks are missing, which can no longer arrive."""
        stream = self.conversation.stream
        if stream.gap_since is not None:
            raise stream.gap_error()
        self.conversation.finish()
        self.conversation.close()

    @asynccontextmanager
    async def running(self, source: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
        """Run the conversation, with ``source`` feeding its input, until the block ends."""
        tasks = [
            asyncio.create_task(self._guard(work), name=f"http session: {name}")
            for name, work in (
                ("answers", self.conversation.run),
                ("input", source),
                ("clock", self._run_clock),
            )
        ]
        try:
            yield
        finally:
            self._idle.disarm()
            for task in tasks:
                task.cancel()
            try:
                await asyncio.gather(*tasks, return_exceptions=True)
            finally:
                self.conversation.end()  # a task cancelled before its first step has not done so
                self.written()
                self._outbox.close()
                self.conversation.observed.ended()

    def take(self) -> ServerMessage | None:
        """Return the next message, None where there is none yet. Raises an error of the input, clock or request."""
        message = self._outbox.take()
        if message is None:
            return None
        if isinstance(message, OmniError):
            raise message
        if self._observed.listening_to_outputs and isinstance(message, AnyOutput):
            self._unwritten.append(message)
        return message

    async def wait(self, *, idle_sec: float | None = None, meanwhile: PromptWriter | None = None) -> bool:
        """Wait for output; see ``AnswerSource``. The time ``idle_sec`` restarts whenever ``meanwhile`` writes."""
        if self._outbox:
            return True
        self._waiting = self._loop.create_future()
        self._meanwhile, self._idle_sec = meanwhile, idle_sec
        self._idle.arm(idle_sec)
        try:
            return await self._waiting
        finally:
            self._waiting = None

    # ConversationOwner

    def output_has_room(self) -> None:
        pass  # answer writers wait for room themselves

    def input_may_continue(self) -> None:
        self._input_room.set()

    def timer_changed(self) -> None:
        self._timer_changed.set()

    def write_now(self, output: OutputChunk) -> bool:
        waiting, writer = self._waiting, self._meanwhile
        if waiting is None or writer is None or waiting.done():
            return False
        try:
            if not writer.write_now(output):
                return False
        except Exception as error:
            waiting.set_exception(error)
            return True
        if self._observed.listening_to_outputs:
            self._observed.notify(OutputWritten(output))
        return True

    def output_ready(self) -> None:
        if self._waiting is not None:
            self._loop.call_soon(self._deliver)  # later outputs of this pass are written together with it

    def _deliver(self) -> None:
        """Let ``meanwhile`` handle the output in this callback, or wake the waiting task."""
        waiting = self._waiting
        if waiting is None or waiting.done():
            return
        try:
            if self._meanwhile is not None and self._meanwhile.write_available():
                self._delivered_at = self._loop.time()
            else:
                waiting.set_result(True)
        except Exception as error:
            waiting.set_exception(error)

    def _idle_expired(self) -> None:
        if self._waiting is None or self._waiting.done() or self._idle_sec is None:
            return
        # Nothing is done for each output but to note its time.
        silent = self._loop.time() - max(self._delivered_at, self._outbox.written_at)
        if silent >= self._idle_sec:
            self._waiting.set_result(False)
        else:
            self._idle.arm(self._idle_sec - silent)

    def written(self) -> None:
        """Notify observers that the outputs taken so far have been written."""
        if not self._unwritten:
            return
        for message in self._unwritten:
            self._observed.notify(OutputWritten(message))
        self._unwritten.clear()

    async def _guard(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run ``work``; put its error into the outbox, from which the handler's task raises it."""
        try:
            await work()
        except OmniError as error:
            self._outbox.put_nowait(error)
        except PeerGone:
            pass  # the connection cancels the handler's task
        except Exception as error:
            self._outbox.put_nowait(unexpected(error, where="a request over HTTP"))

    async def _run_clock(self) -> None:
        """Give the conversation its time."""
        while True:
            self._timer_changed.clear()
            try:
                async with asyncio.timeout_at(self.conversation.get_timer()):
                    await self._timer_changed.wait()
            except TimeoutError:
                self.conversation.handle_timer()


async def feed_all(session: HttpSession, chunks: Iterable[InputChunk]) -> None:
    """Feed ``session`` with all of its input: the source of a request whose input is complete."""
    for index, chunk in enumerate(chunks, 1):
        await session.feed(chunk)
        if index % _CHUNKS_AT_A_TIME == 0:
            await asyncio.sleep(0)
    session.end_input()

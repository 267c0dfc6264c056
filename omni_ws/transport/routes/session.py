"""One request over HTTP as a conversation with a single request: its input fed in, its outputs handed to an encoder."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager

from omni_ws.core.chunks import InputChunk
from omni_ws.core.output import AnyOutput
from omni_ws.errors import OmniError
from omni_ws.service.conversation.conversation import Conversation
from omni_ws.service.conversation.messages import ServerMessage
from omni_ws.service.conversation.outbox import Outbox
from omni_ws.service.failure import unexpected
from omni_ws.service.observing.observer import OutputWritten
from omni_ws.transport.http.deadline import Deadline
from omni_ws.transport.http.hang_up import PeerGone


class HttpSession:
    """``running`` runs everything; ``feed`` and ``end_input`` are for the source of the input, ``take`` and ``wait``
    for the writer of the answer."""

    def __init__(self, conversation: Conversation, outbox: Outbox) -> None:
        self.conversation = conversation
        self._outbox = outbox
        self._loop = asyncio.get_running_loop()
        #: Of the writer that waits for output, with what is called first when some is there.
        self._waiting: asyncio.Future[bool] | None = None
        self._meanwhile: Callable[[], bool] | None = None
        self._idle_sec: float | None = None
        #: One timer that is moved: a new one for each output would cost as much as the output.
        self._idle = Deadline(self._loop, self._idle_expired)
        #: Outputs that were received and, as far as is known, not written yet; kept while anybody wants to know.
        self._unwritten: list[AnyOutput] = []
        self._input_room = asyncio.Event()
        self._timer_changed = asyncio.Event()
        #: Whether it is the server that does not read, and not the client that is silent.
        self._held_up = False
        #: Whether what the client sends is not being read; for the source of the input to say.
        self.is_unread: Callable[[], bool] = lambda: False
        conversation.attach(self)

    async def feed(self, chunk: InputChunk) -> None:
        """Waits while the engine is behind. Raises what the chunk is refused for."""
        try:
            self.conversation.configuration.check_chunk(chunk)
            self.conversation.receive_chunk(chunk, now=self._loop.time())
        except OmniError as error:
            error.param = self.conversation.field_names(error.param)
            raise
        self.conversation.stream.take_ack()  # which HTTP has no words for
        if self.conversation.stream.gap_since is not None:
            self._timer_changed.set()
        while self.conversation.input_full():
            self._held_up = True
            self._input_room.clear()
            await self._input_room.wait()
        self._held_up = False

    def interrupt(self, error: OmniError) -> None:
        """Its answer ends with ``error``, behind what is there to be written already."""
        self._outbox.put_nowait(copy.copy(error))

    def touch(self) -> None:
        """A sign of life of the client: bytes that are no whole chunk yet."""
        self.conversation.stream.touch(now=self._loop.time())

    def end_input(self) -> None:
        """The end of the body ends the input. Raises SequenceGap for chunks that can no longer come."""
        stream = self.conversation.stream
        if stream.gap_since is not None:
            raise stream.gap_error()
        self.conversation.finish()
        self.conversation.close()

    @asynccontextmanager
    async def running(self, source: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
        """Runs ``source``, which feeds the input, and the conversation, for whoever receives the outputs meanwhile."""
        tasks = [
            asyncio.create_task(self._guard(work), name=f"http session: {name}")
            for name, work in (
                ("answers", self.conversation.run),
                ("input", source),
                ("clock", self._watch_the_clock),
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
                self.conversation.end()  # which a task that was cancelled before its first step has not done
                self.written()
                self._outbox.close()
                self.conversation.observed.ended()

    def take(self) -> ServerMessage | None:
        """The next message, if there is one. Raises the error of the input, of the clock, or of the request."""
        message = self._outbox.take()
        if message is None:
            return None
        if isinstance(message, OmniError):
            raise message
        if self.conversation.observed.listening_to_outputs and isinstance(message, AnyOutput):
            self._unwritten.append(message)
        return message

    async def wait(self, *, idle_sec: float | None = None, meanwhile: Callable[[], bool] | None = None) -> bool:
        """See ``Answering``. ``meanwhile`` is called when output has come, and begins the time of silence anew."""
        if self._outbox:
            return True
        self._waiting = self._loop.create_future()
        self._meanwhile, self._idle_sec = meanwhile, idle_sec
        self._idle.arm(idle_sec)
        try:
            return await self._waiting
        finally:
            self._waiting = None

    # the conversation's owner

    def output_has_room(self) -> None:
        pass  # the writers of answers wait for it themselves

    def input_may_continue(self) -> None:
        self._input_room.set()

    def timer_changed(self) -> None:
        self._timer_changed.set()

    def output_ready(self) -> None:
        if self._waiting is not None:
            self._loop.call_soon(self._output_came)  # by then there may be more, which is written together with it

    def _output_came(self) -> None:
        waiting = self._waiting
        if waiting is None or waiting.done():
            return
        try:
            if self._meanwhile is not None and self._meanwhile():
                self._idle.arm(self._idle_sec)
            else:
                waiting.set_result(True)
        except Exception as error:
            waiting.set_exception(error)

    def _idle_expired(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(False)

    def written(self) -> None:
        """What was received has been written."""
        if not self._unwritten:
            return
        for message in self._unwritten:
            self.conversation.observed.notify(OutputWritten(message))
        self._unwritten.clear()

    async def _guard(self, work: Callable[[], Awaitable[None]]) -> None:
        """What goes wrong beside the receiver reaches it as a message."""
        try:
            await work()
        except OmniError as error:
            self._outbox.put_nowait(error)
        except PeerGone:
            pass  # nobody is left to tell; the connection cancels the receiver
        except Exception as error:
            self._outbox.put_nowait(unexpected(error, where="a request over HTTP"))

    async def _watch_the_clock(self) -> None:
        while True:
            self._timer_changed.clear()
            try:
                async with asyncio.timeout_at(self.conversation.get_timer()):
                    await self._timer_changed.wait()
            except TimeoutError:
                if self._held_up or self.is_unread():
                    self.conversation.stream.unheard(now=self._loop.time())
                self.conversation.handle_timer()


async def feed_all(session: HttpSession, chunks: Iterable[InputChunk]) -> None:
    """The source of a request whose input is at hand."""
    for chunk in chunks:
        await session.feed(chunk)
    session.end_input()

"""RealtimeConnection: a WebSocket of the Realtime API, and the session that it drives."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

from websockets.frames import CloseCode

from omni_ws.core.chunks import AnyOutput
from omni_ws.errors import (
    InvalidRequest,
    OmniError,
    RateLimited,
    SlowConsumer,
    websocket_close_code,
)
from omni_ws.service.failure import new_id, unexpected
from omni_ws.service.observing.observer import OutputWritten
from omni_ws.service.sessions.live_session import LiveSession
from omni_ws.transport.native.connection import SoleConnection, SoleLink
from omni_ws.transport.native.keep_alive import KeepAliveSettings
from omni_ws.transport.realtime.commands import Commands
from omni_ws.transport.realtime.response import Event
from omni_ws.transport.realtime.vllm_dialect import VllmDialect, begins_vllm_dialect
from omni_ws.wire.realtime_events import check_event, decode_event, encode_event

#: Messages of the session that are written in one pass of the event loop.
WRITE_BATCH_MESSAGES: Final = 128
#: How long a client may take to read the last events.
GOODBYE_TIMEOUT_SEC: Final = 5.0


def close_code(error: OmniError) -> int:
    """The code that a connection is closed with: OpenAI's clients reconnect on 1012 and 1013, not on codes of ours."""
    if isinstance(error, RateLimited):
        return CloseCode.TRY_AGAIN_LATER
    return websocket_close_code(error) or CloseCode.INTERNAL_ERROR


def write_event(connection: SoleLink, event: Event) -> int:
    """Send an event with an id of its own. Returns its size."""
    data = encode_event({"event_id": new_id("event_"), **event})
    connection.write_message(data, is_text=True)
    return len(data)


class RealtimeConnection(SoleConnection):
    """Events in, events out, and the timers of the connection; see FrameReceiver and Attachment.

    A session of the Realtime API cannot be resumed: it ends with its connection.
    """

    def __init__(
        self, connection: SoleLink, session: LiveSession, commands: Commands, *, keep_alive: KeepAliveSettings
    ) -> None:
        super().__init__(connection, session, keep_alive=keep_alive)
        self._created = commands.created()
        self._commands: Commands | VllmDialect = commands
        self._dialect_known = False
        self._observed = session.conversation.observed
        #: Set when everything is written, or nothing can be written any more.
        self._emptied = asyncio.Event()
        commands.send = self._send

    async def run(self) -> None:
        """Serve the session to its end, and close the connection. The session must be attached to this."""
        try:
            self._send(self._created)
            self._connection.attach(self, self._conversation.account)
            self.timer_changed()
            error = await self._over
            if error is not None:
                await self._say_goodbye(error)
                await self._connection.close_in_time(close_code(error), error.message)
            else:
                await self._connection.close_in_time(CloseCode.NORMAL_CLOSURE, "")
        finally:
            self._disarm()
            self._commands.close()
            self._session.detach(self)

    async def _say_goodbye(self, error: OmniError) -> None:
        """Write what is left, and why the session is over."""
        if isinstance(error, SlowConsumer):
            self._outbox.clear()
        self._emptied.clear()
        self._flush()
        if self._connection.is_open:
            try:
                async with asyncio.timeout(GOODBYE_TIMEOUT_SEC):
                    await self._emptied.wait()
            except TimeoutError:
                return
        if not self._commands.reported(error):
            self._send([self._commands.error(error)])

    def connection_closing(self) -> None:
        self._emptied.set()
        self._session.end(None)

    # input

    def receive_message(self, data: bytes | bytearray | memoryview, *, is_text: bool) -> None:
        if not self._listening:
            return
        event_id: str | None = None
        try:
            event = decode_event(data)
            event_id = event["event_id"] if isinstance(event.get("event_id"), str) else None
            check_event(event)
            if not self._dialect_known:
                self._dialect_known = True
                if begins_vllm_dialect(event):
                    self._commands.close()
                    self._commands = VllmDialect(self._conversation, self._send)
            self._commands.receive(event, now=self._connection.heard_at)
            if event["type"] != "input_audio_buffer.append":
                self._connection.end_pass()
        except InvalidRequest as error:
            self._send([self._commands.error(error, event_id=event_id)])
        except OmniError as error:
            self._session.end(error)
        except Exception as error:
            self._session.end(unexpected(error, where="the input of a Realtime session"))
        self._conversation.stream.touch(now=self._connection.heard_at)
        self._conversation.take_ack()  # there are no acknowledgements; the metrics count input by them
        self._pause_if_blocked()
        self._arm(self._connection.heard_at)

    @property
    def _input_blocked(self) -> bool:
        return self._connection.paused or super()._input_blocked

    # output

    def resume_output(self) -> None:
        self.output_ready()
        self.input_may_continue()

    def _flush(self) -> None:
        """Write a batch of what the outbox holds, as long as the socket takes it."""
        self._flush_scheduled = False
        try:
            for _ in range(WRITE_BATCH_MESSAGES):
                if not self._connection.is_open or self._connection.paused:
                    break
                if (message := self._outbox.take()) is None:
                    break
                self._send(self._commands.render(message))
                if self._observed.listening_to_outputs and isinstance(message, AnyOutput):
                    self._observed.notify(OutputWritten(message))
        except OmniError as error:
            self._loop.call_soon(self._session.end, error)
            return
        except Exception as error:
            self._loop.call_soon(self._session.end, unexpected(error, where="the output of a Realtime session"))
            return
        if not self._outbox:
            self._emptied.set()
        elif self._connection.is_open and not self._connection.paused:
            self.output_ready()

    def _send(self, events: Iterable[Event]) -> None:
        """Write events without waiting. All of them are made, also where the connection is gone."""
        for event in events:
            if self._connection.is_open:
                self._write(event)

    def _write(self, event: Event) -> None:
        write_event(self._connection, event)

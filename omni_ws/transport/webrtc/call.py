"""RealtimeCall: a session of the Realtime API whose speech goes by tracks, and whose events by a data channel."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from omni_ws.core.reorder import PacketOutcome
from omni_ws.errors import InvalidRequest, OmniError
from omni_ws.metrics import Metrics
from omni_ws.service.failure import unexpected
from omni_ws.service.sessions.live_session import LiveSession
from omni_ws.transport.native.keep_alive import KeepAliveSettings
from omni_ws.transport.realtime.commands import Commands
from omni_ws.transport.realtime.response import Event
from omni_ws.transport.realtime.session import RealtimeConnection
from omni_ws.transport.webrtc.channel import CallChannel
from omni_ws.transport.webrtc.microphone import CallMicrophone
from omni_ws.transport.webrtc.speaker import CallSpeaker

#: How long a caller may take from the answer to its offer to the open data channel.
SETUP_TIMEOUT_SEC: Final = 30.0
#: A track has no pings; see CallChannel.
_NO_PINGS: Final = KeepAliveSettings(ping_interval=None, ping_timeout=None)


class RealtimeCall(RealtimeConnection):
    """Speech of the caller in, answers out by the speaker, events by the channel; see RealtimeConnection.

    The server plays the answers itself. So it tells when the audio of one begins and ends, and drops what was not
    heard when the caller speaks or a response is cancelled.
    """

    def __init__(self, channel: CallChannel, session: LiveSession, commands: Commands, metrics: Metrics) -> None:
        super().__init__(channel, session, commands, keep_alive=_NO_PINGS)
        self._channel = channel
        self._commands: Commands = commands
        self._dialect_known = True  # vLLM's clients do not call
        self._dropped = metrics.webrtc_packets.labels(PacketOutcome.DROPPED.value)
        self.microphone = CallMicrophone(self.hear, metrics)
        self.speaker = CallSpeaker(self._audio_started, self._audio_stopped)
        #: The response that was cut short: audio of it that is still to come is not played.
        self._cut: str | None = None
        commands.output_cleared = self._silence

    async def run(self) -> None:
        """Waits for the data channel, and serves the call to its end."""
        timer = self._loop.call_later(SETUP_TIMEOUT_SEC, self._session.end, None)
        try:
            first: list[asyncio.Future[Any]] = [self._channel.opened, self._over]
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            timer.cancel()
            await super().run()
        finally:
            timer.cancel()
            self.release()

    def release(self) -> None:
        """Stop the tracks, and release what the session object holds. May be called repeatedly."""
        self.speaker.stop()
        self.microphone.close()
        self._commands.close()

    def hear(self, audio: bytes) -> None:
        """Speech of the caller, in the format of the session."""
        if not self._listening or not self._channel.heard(len(audio)):
            self._dropped.inc()
            return
        now = self._channel.heard_at
        try:
            self._commands.append(audio, now)
        except InvalidRequest as error:
            self._send([self._commands.error(error)])
        except OmniError as error:
            self._session.end(error)
        except Exception as error:
            self._session.end(unexpected(error, where="the audio of a call"))
        self._conversation.stream.touch(now=now)
        self._conversation.take_ack()
        self._pause_if_blocked()
        self._arm(now)

    # output

    def _write(self, event: Event) -> None:
        match event["type"]:
            case "response.output_audio.delta":
                if event["response_id"] != self._cut:
                    self.speaker.say(event["response_id"], event["delta"])
                return
            case "response.output_audio.done":
                self.speaker.finish(event["response_id"])
        super()._write(event)
        match event["type"]:
            case "input_audio_buffer.speech_started" if self._commands.speech_interrupts:
                self._silence(None)
            case "response.done" if event["response"]["status"] == "cancelled":
                self._silence(event["response"]["id"])

    def _silence(self, response_id: str | None) -> None:
        """Drop what was not heard. ``response_id`` is that of the response that was cut short, if there is one."""
        heard = self.speaker.clear()
        self._cut = response_id or (heard[-1] if heard else self._cut)
        self._send({"type": "output_audio_buffer.cleared", "response_id": one} for one in heard)

    def _audio_started(self, response_id: str) -> None:
        self._send([{"type": "output_audio_buffer.started", "response_id": response_id}])

    def _audio_stopped(self, response_id: str) -> None:
        self._send([{"type": "output_audio_buffer.stopped", "response_id": response_id}])

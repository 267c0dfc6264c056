"""LiveCall: a session of the Live API over WebRTC. Importing it loads aiortc, slowly."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from websockets.frames import CloseCode

from omni_ws.errors import InvalidValue
from omni_ws.metrics import Metrics
from omni_ws.service.failure import new_id
from omni_ws.service.sessions.session import Session
from omni_ws.transport.realtime.items import Event
from omni_ws.transport.realtime.live import LiveDialect
from omni_ws.transport.realtime.live_endpoint import LiveConnection
from omni_ws.transport.realtime.session import write_event
from omni_ws.transport.realtime.sideband import MIRRORED_AUDIO
from omni_ws.transport.webrtc.call import Call, CallChannel
from omni_ws.wire.live_session import DataChannel

_BY_TRACK: Final = "the audio of a call comes by its track: events cannot append any"
#: What a sideband may not send, and why.
_REFUSED_IN_LIVE: Final = {
    "session.input_audio.append": _BY_TRACK,
    "session.start": "the session has already started",
}
#: What only a sideband may send.
_FIXTURE: Final = "session.output_audio.fixture.play"
#: The name of all that is played, in the speaker.
_VOICE: Final = "voice"


class LiveCall(Call, LiveConnection):
    """A call of the Live API.

    The data channel carries the events that the session's ``client.data_channel`` permits, and no audio. Sidebands see
    everything, with the audio of both sides: what is heard before it is muted, and what is said with its place on the
    time line.
    """

    def __init__(self, channel: CallChannel, session: Session, dialect: LiveDialect, metrics: Metrics) -> None:
        super().__init__(channel, session, dialect, metrics, refused=_REFUSED_IN_LIVE)
        self._permissions = DataChannel()
        self._check_kind = self._check_own

    def _blocks_output(self) -> bool:
        return False  # the track goes on while the page leaves events unread

    def start(self, fields: Mapping[str, Any]) -> None:
        """Start the session, with the object ``session`` of the offer. Raises what ``LiveDialect.start`` raises."""
        self._live.start(fields)
        start = self._live.start_fields
        if start is not None and start.client is not None:
            self._permissions = start.client.data_channel

    def hang_up(self) -> None:
        self._live.end("close_requested")

    def connection_closing(self) -> None:
        self._live.end("connection_lost" if self._channel.lost else "remote_hangup")
        super().connection_closing()

    def _opened(self) -> None:
        super()._opened()
        if self._permissions.restricted:
            message = "This data channel has the event permissions of the session's client.data_channel."
            first = [*self._live.greeting(), {"type": "info", "code": "data_channel_permissions", "message": message}]
        else:
            first = self._live.greeting()
        for event in first:
            self._write(event)

    def _closing(self, code: int, reason: str) -> None:
        if code == CloseCode.NORMAL_CLOSURE:  # nobody has said why
            self._live.end("connection_lost")
        super()._closing(code, reason)

    def hear(self, audio: bytes) -> None:
        self.sidebands.write({"type": "session.input_audio.append", "audio": audio})
        super().hear(audio)

    def _check_own(self, kind: str) -> None:
        """Raise InvalidValue for an event that the page may not send over the data channel."""
        if kind in _REFUSED_IN_LIVE:
            raise InvalidValue(_REFUSED_IN_LIVE[kind], param="type")
        if kind == _FIXTURE or not self._permissions.may_send(kind):
            raise InvalidValue(f"the data channel of this session may not send {kind[:64]}", param="type")

    def _send(self, events: Iterable[Event]) -> None:
        for event in events:
            if event["type"] not in MIRRORED_AUDIO:
                event = {"event_id": new_id("event_"), **event}
            self.sidebands.write(event)
            self._write(event)

    def _write(self, event: Event) -> None:
        if event["type"] == "session.output_audio.delta":
            self._say(event["delta"], event["end_ms"])
        elif self._connection.is_open and (event["type"] == "info" or self._permissions.may_get(event)):
            write_event(self._connection, event)

    def _say(self, audio: bytes, end_ms: int) -> None:
        """Play what is said. The silence between answers, which is sent once it is over, is left out."""
        if end_ms > self._live.now_ms or audio.count(0) < len(audio):
            self.speaker.say(_VOICE, audio)
            self.speaker.finish(_VOICE)  # so that a part of a packet does not wait for more

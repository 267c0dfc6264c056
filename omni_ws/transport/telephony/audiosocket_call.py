"""AudioSocketCall: a call from Asterisk over AudioSocket."""

from __future__ import annotations

from typing import Final

from websockets.frames import CloseCode

from omni_ws.errors import OmniError
from omni_ws.service.failure import unexpected
from omni_ws.service.sessions.live_session import LiveSession
from omni_ws.transport.native.keep_alive import KeepAliveSettings
from omni_ws.transport.telephony.audiosocket_link import (
    AUDIO,
    FAILURE,
    HANG_UP,
    HEADER_BYTES,
    KEY,
    AudioSocketLink,
    encode_frame,
)
from omni_ws.transport.telephony.call import PhoneCall
from omni_ws.transport.telephony.paced_playout import PacedPlayout

_NO_PINGS: Final = KeepAliveSettings(ping_interval=None, ping_timeout=None)


class AudioSocketCall(PhoneCall):
    """Frames of audio and keys in, frames of audio out, in real time. The call ends with a hang-up, too."""

    def __init__(self, link: AudioSocketLink, session: LiveSession) -> None:
        super().__init__(link, session, keep_alive=_NO_PINGS)
        self._link = link
        link.refused = session.end
        self._playout = PacedPlayout(self._send, self._report, self.output_ready)

    async def serve(self) -> None:
        """Serves the call to its end, and hangs up."""
        try:
            await self.run()
        finally:
            self._playout.close()

    def _close_code(self, error: OmniError) -> int:
        return CloseCode.NORMAL_CLOSURE  # a hang-up has none

    @property
    def _unplayed(self) -> bool:
        return self._playout.unplayed

    # input

    def receive_message(self, data: bytes | bytearray | memoryview, *, is_text: bool) -> None:
        if not self._listening:
            return
        kind, payload = data[0], bytes(data[HEADER_BYTES:])
        try:
            if kind == AUDIO:
                self._hear(payload)
            elif kind == KEY:
                self._press(payload.decode("latin-1"))
            elif kind in (HANG_UP, FAILURE):
                self._session.end(None)
        except OmniError as error:
            self._session.end(error)
        except Exception as error:
            self._session.end(unexpected(error, where="the input of a call"))

    # output

    def resume_output(self) -> None:
        self._playout.resume()
        self.output_ready()

    def _send(self, audio: bytes) -> bool:
        self._link.write_message(encode_frame(AUDIO, audio), is_text=False)
        return not self._link.paused

    def _clear(self) -> None:
        self._playout.clear()

    def _flush(self) -> None:
        """Have the playout say what the outbox holds, for as long as it has room."""
        self._flush_scheduled = False
        while self._link.is_open and not self._playout.full and (message := self._outbox.take()) is not None:
            self._playout.take(message)
        self._check_silent()

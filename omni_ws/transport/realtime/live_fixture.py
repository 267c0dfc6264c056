"""LiveFixture: ready-made sound that the application plays in a Live session, such as a jingle or a legal notice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from omni_ws.audio.codec import AudioEncoder
from omni_ws.core.chunks import AudioFormat
from omni_ws.core.quota import Share
from omni_ws.errors import EngineOverloaded, InvalidValue
from omni_ws.transport.realtime.items import Event
from omni_ws.transport.realtime.live_player import Heard
from omni_ws.wire.live_session import invalid_audio, read_audio

if TYPE_CHECKING:
    from omni_ws.transport.realtime.live import LiveDialect

#: The format of the sound, whatever that of the session is.
FIXTURE_FORMAT: Final = AudioFormat(sample_rate=24_000)
MAX_FIXTURE_SEC: Final = 30
MAX_FIXTURE_BYTES: Final = MAX_FIXTURE_SEC * FIXTURE_FORMAT.bytes_per_second
#: The name of the sound among the answers in the player.
FIXTURE: Final = "fixture"


class LiveFixture:
    """The fixture of one session, at most one at a time. It interrupts speech, and nothing is heard meanwhile.

    It is not in the history: the model does not know of it.
    """

    def __init__(self, dialect: LiveDialect, audio: AudioFormat) -> None:
        """``audio`` is the format of the session."""
        self._dialect = dialect
        self._audio = audio
        self._share = Share(dialect.conversation.account)
        self._event_id: str | None = None
        #: Whether one is being played.
        self.playing = False

    def play(self, fields: Mapping[str, Any], event_id: str | None) -> None:
        """Play the sound of an event. Raises an InvalidRequest, and nothing is interrupted then."""
        if self.playing:
            raise InvalidValue("a fixture is being played already", param="type")
        audio = _checked(fields)
        dialect = self._dialect
        try:
            self._share.resize(len(audio))
        except EngineOverloaded as error:
            dialect.send([dialect.error(error, event_id=event_id)])
            return
        self.playing, self._event_id = True, event_id
        dialect.conversation.cancel()
        player = dialect.player
        player.kept = FIXTURE
        player.cut()
        player.say(FIXTURE, self._converted(audio), 0.0)
        player.finish(FIXTURE)
        self._tell("playing")
        player.pump(dialect.now_ms)

    def passed(self, heard: Heard) -> bool:
        """Return whether ``heard`` is of the fixture. At its end the client is told."""
        if heard.answer_id != FIXTURE:
            return False
        if heard.ended:
            self.playing = False
            self.close()
            self._tell("played")
        return True

    def close(self) -> None:
        """Release what is charged to the session."""
        self._share.resize(0)

    def _tell(self, step: str) -> None:
        event: Event = {"type": f"session.output_audio.fixture.{step}"}
        if self._event_id is not None:
            event["client_event_id"] = self._event_id
        self._dialect.send([event])

    def _converted(self, audio: bytes) -> bytes:
        if self._audio == FIXTURE_FORMAT:
            return audio
        encoder = AudioEncoder(self._audio, source_rate=FIXTURE_FORMAT.sample_rate)
        return encoder.encode(np.frombuffer(audio, "<i2")) + encoder.flush()


def _checked(fields: Mapping[str, Any]) -> bytes:
    audio = read_audio(fields)
    if not audio or len(audio) % 2:
        raise invalid_audio("audio must be whole samples, and not empty")
    if len(audio) > MAX_FIXTURE_BYTES:
        raise invalid_audio(f"a fixture lasts at most {MAX_FIXTURE_SEC} s")
    return audio

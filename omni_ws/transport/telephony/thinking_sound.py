"""The soft sound that a caller hears while an answer is long in coming."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import lru_cache
from typing import Final

import numpy as np

from omni_ws.audio.codec import AudioEncoder
from omni_ws.audio.pcm import Samples
from omni_ws.core.chunks import AudioFormat, FinalChunk, OutputChunk, OutputModality, StartTrigger
from omni_ws.service.conversation.messages import ServerMessage
from omni_ws.wire.server_frames import (
    ResponseStartedFrame,
    SpeechConfirmedFrame,
    SpeechStartedFrame,
    SpeechStoppedFrame,
)

#: From the end of the caller's turn to the first sound, and from one sound to the next.
BEGINS_SEC: Final = 2.0
EVERY_SEC: Final = 1.5
#: The peak of the sound: -40 dB of full scale.
PEAK: Final = 0.01
#: Two notes, the second lower (Hz), each so long.
NOTES: Final = (311.0, 233.0)
NOTE_SEC: Final = 0.1
#: Sound is sent in packets of the telephone network.
PACKET_SEC: Final = 0.02
#: Answers that nobody waits for.
_UNASKED: Final = (StartTrigger.GREETING, StartTrigger.FILLER, StartTrigger.IDLE, StartTrigger.TELLING)


def notes(sample_rate: int) -> Samples:
    """Return the sound: each note swells and fades, so that nothing clicks."""
    time = np.arange(round(NOTE_SEC * sample_rate)) / sample_rate
    swell = PEAK * np.sin(np.pi * time / NOTE_SEC) ** 2
    return np.concatenate([swell * np.sin(2 * np.pi * note * time) for note in NOTES]).astype(np.float32)


@lru_cache(maxsize=4)
def packets(audio: AudioFormat) -> tuple[bytes, ...]:
    """Return the sound in a raw format, in packets of PACKET_SEC."""
    encoder = AudioEncoder(audio, source_rate=audio.sample_rate)
    sound = encoder.encode(notes(audio.sample_rate)) + encoder.flush()
    size = round(audio.bytes_per_second * PACKET_SEC)
    return tuple(sound[start : start + size] for start in range(0, len(sound), size))


class ThinkingSound:
    """Plays the sound from BEGINS_SEC after the caller's turn on, until there is audio, a final, or speech.

    ``play`` is called with each packet when it is due.
    """

    def __init__(self, audio: AudioFormat, play: Callable[[bytes], None]) -> None:
        self._packets = packets(audio)
        self._play = play
        self._loop = asyncio.get_running_loop()
        #: The request whose answer is awaited.
        self._request_id: str | None = None
        self._speaking = False
        self._timer: asyncio.TimerHandle | None = None

    def hear(self, message: ServerMessage) -> None:
        """Learn from one of the session's messages whether an answer is awaited."""
        match message:
            case SpeechStartedFrame(certain=False):
                pass  # an answer is heard, and this may be no turn
            case SpeechStartedFrame() | SpeechConfirmedFrame():
                self._speaking = True
                self.stop()
            case SpeechStoppedFrame(request_id=request_id):
                self._speaking = False
                self._wait_for(request_id)
            case ResponseStartedFrame(request_id=request_id, trigger=trigger) if not self._speaking:
                if trigger not in _UNASKED and request_id != self._request_id:
                    self._wait_for(request_id)
            case OutputChunk(modality=OutputModality.AUDIO):
                self.stop()
            case FinalChunk(request_id=request_id) if request_id == self._request_id:
                self.stop()

    def stop(self) -> None:
        """Play nothing more until the next turn. Idempotent."""
        self._request_id = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait_for(self, request_id: str | None) -> None:
        self.stop()
        if request_id is not None:
            self._request_id = request_id
            self._play_at(self._loop.time() + BEGINS_SEC, 0)

    def _play_at(self, when: float, place: int) -> None:
        self._timer = self._loop.call_at(when, self._play_packet, when, place)

    def _play_packet(self, when: float, place: int) -> None:
        self._play(self._packets[place])
        if place + 1 < len(self._packets):
            self._play_at(when + PACKET_SEC, place + 1)
        else:
            self._play_at(when - place * PACKET_SEC + EVERY_SEC, 0)

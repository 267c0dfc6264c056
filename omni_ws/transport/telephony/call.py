"""Base classes of telephone calls, for each protocol that carries them; and the sound while a caller waits."""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, Final

import numpy as np
from websockets.frames import CloseCode

from omni_ws.audio.codec import AudioEncoder
from omni_ws.audio.pcm import Samples
from omni_ws.config.keys import ApiKey
from omni_ws.core.chunks import AudioFormat, FinalChunk, InputChunk, Modality, OutputChunk, OutputModality, StartTrigger
from omni_ws.errors import ORDERLY_ENDS, OmniError, ShuttingDown
from omni_ws.service.conversation.output_log import ServerMessage
from omni_ws.service.sessions.session import Session, Sessions
from omni_ws.transport.http.application import Application, SessionFrontEnd
from omni_ws.transport.native.connection import Pause, SoleConnection, SoleLink
from omni_ws.transport.native.endpoint import record_message
from omni_ws.transport.native.keep_alive import PeerRounds
from omni_ws.transport.native.tcp_link import Playout
from omni_ws.wire.server_frames import (
    ResponseStartedFrame,
    SpeechConfirmedFrame,
    SpeechStartedFrame,
    SpeechStoppedFrame,
)

logger = logging.getLogger(__name__)

#: From the end of the caller's turn to the first sound, and from one sound to the next.
BEGINS_SEC: Final = 2.0
EVERY_SEC: Final = 1.5
#: The peak of the sound: -40 dB of full scale.
PEAK: Final = 0.01
#: The frequencies of the two notes in Hz, and the length of each.
NOTES: Final = (311.0, 233.0)
NOTE_SEC: Final = 0.1
#: Sound is sent in packets of the telephone network.
PACKET_SEC: Final = 0.02
#: The triggers of answers that nobody waits for.
_UNASKED: Final = (StartTrigger.GREETING, StartTrigger.FILLER, StartTrigger.IDLE, StartTrigger.TELLING)


def notes(sample_rate: int) -> Samples:
    """Return the thinking sound as samples: two notes that swell and fade, so that nothing clicks."""
    time = np.arange(round(NOTE_SEC * sample_rate)) / sample_rate
    swell = PEAK * np.sin(np.pi * time / NOTE_SEC) ** 2
    return np.concatenate([swell * np.sin(2 * np.pi * note * time) for note in NOTES]).astype(np.float32)


@lru_cache(maxsize=4)
def packets(audio: AudioFormat) -> tuple[bytes, ...]:
    """Return the thinking sound in a raw format, in packets of PACKET_SEC."""
    encoder = AudioEncoder(audio, source_rate=audio.sample_rate)
    sound = encoder.encode(notes(audio.sample_rate)) + encoder.flush()
    size = round(audio.bytes_per_second * PACKET_SEC)
    return tuple(sound[start : start + size] for start in range(0, len(sound), size))


class ThinkingSound:
    """Plays a soft sound while the caller waits for an answer, from BEGINS_SEC after the turn on.

    It stops at the answer's first audio or its final, or when the caller speaks. ``play`` is called with each packet
    when the packet is due.
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
        """Take one of the session's messages, and start or stop the sound accordingly."""
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
        """Stop the sound until the next turn. Idempotent."""
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


#: Label of the sessions in metrics, logs and recordings.
TELEPHONY_ORIGIN: Final = "telephony"
#: How long an answer may take to be played to its end, beyond the audio that is sent ahead.
PLAYOUT_MARGIN_SEC: Final = 1.0


#: The keys of a telephone (RFC 4733, section 3.2).
KEYS: Final = frozenset("0123456789*#ABCD")
#: The key that completes an entry: a series of keys that belong together.
END: Final = "#"
#: An entry is also complete this many seconds after its last key.
PAUSE_SEC: Final = 2.0
#: The longest entry: a credit card has 19 digits.
MAX_KEYS: Final = 32


class PhoneCalls(SessionFrontEnd):
    """Base class of front ends for phone calls. Each call has a session of its own, which cannot be resumed."""

    def __init__(self, app: Application) -> None:
        super().__init__(app, Sessions(app.sessions, origin=TELEPHONY_ORIGIN, grace=0))
        #: For each connection that waits for its call to begin, the function that refuses it.
        self._openings: set[Callable[[OmniError], None]] = set()

    async def _open(self, key: ApiKey | None, client: str, audio: Mapping[str, Any], **given: str) -> Session:
        """Open the session of a call, with turn detection. Raises an OmniError if the call is refused.

        ``audio`` is the audio format in both directions. ``given`` are other fields of ``session_config``.
        """
        session = await self._live.admit(key, client=client)
        try:
            session.conversation.configure(
                {
                    "input_audio": {**audio, "echo": "server" if self._config.telephony.cancel_echo else None},
                    "output_audio": audio,
                    "modalities": ["text", "audio"],  # the text is for the history
                    "turn_detection": {**self._turns, "duck": True},
                    **given,
                }
            )
        except OmniError:
            session.end(None)
            raise
        return session

    @property
    def _turns(self) -> dict[str, Any]:
        murmurs = self._config.telephony.backchannel
        if murmurs and "semantic_vad" in self._sessions.speech_workers.turn_detection_types:
            return {"type": "semantic_vad", "backchannel": True}
        return {"type": "server_vad"}

    def drain(self, time_left: float) -> None:
        self._refuse_openings(ShuttingDown("the server is shutting down"))
        super().drain(time_left)

    def end_all(self, error: OmniError) -> None:
        self._refuse_openings(error)
        super().end_all(error)

    def _refuse_openings(self, error: OmniError) -> None:
        for refuse in self._openings:
            refuse(error)


class PhoneCall(SoleConnection):
    """Base class of phone calls: receives speech and keys, sends answers. A FrameReceiver and an Attachment.

    The call ends when its session does: after an error, a hang-up or the loss of the connection, or when the server
    ends. After an orderly end (``ORDERLY_ENDS``), the caller hears the answer to its end.
    """

    _playout: Playout

    def __init__(self, connection: SoleLink, session: Session, *, rounds: PeerRounds, thinking_sound: bool) -> None:
        """``thinking_sound``: whether to play the caller a soft sound while an answer takes long."""
        super().__init__(connection, session, rounds=rounds)
        sound_format = self._conversation.configuration.effective.output_audio.encoded
        self._thinking = ThinkingSound(sound_format, self._sound) if thinking_sound else None
        #: The keys of the entry in progress, and the timer that completes it.
        self._keys = ""
        self._pause: asyncio.TimerHandle | None = None
        #: Set when everything is sent and played, or nothing can be sent any more.
        self._silent = asyncio.Event()

    @abstractmethod
    def receive_message(self, data: bytes | bytearray | memoryview, *, is_text: bool) -> None:
        """Receive one whole message; see FrameReceiver."""

    @abstractmethod
    def _send(self, audio: bytes) -> bool:
        """Send audio that the caller hears immediately. Returns whether the connection takes more."""

    @abstractmethod
    def _clear(self) -> None:
        """Drop audio that the caller has not heard yet, even if it was sent."""

    @abstractmethod
    def _close_code(self, error: OmniError) -> int:
        """Return the code with which to close the connection after ``error`` has ended the session."""

    async def run(self, behind: Iterable[tuple[bytes, bool]] = ()) -> None:
        """Serve the call to its end, and close the connection. Call ``session.attach`` with this object before.

        ``behind`` are the messages received before ``run``, each with whether it is text.
        """
        try:
            self._connection.attach(self, self._conversation.account)
            for data, is_text in behind:
                self.receive_message(data, is_text=is_text)
            self._connection.resume_reading(Pause.SESSION)
            self._watch_peer()
            error = await self._over
            self._connection.resume_reading(Pause.SESSION)  # for what is due from the peer before it closes
            self._flush()
            if isinstance(error, ORDERLY_ENDS):
                await self._played()
            code = CloseCode.NORMAL_CLOSURE if error is None else self._close_code(error)
            await self._connection.close_in_time(code, "" if error is None else error.message)
        finally:
            self._end_pause()
            if self._thinking is not None:
                self._thinking.stop()
            self._ignore_peer()
            self._session.detach(self)

    async def _played(self) -> None:
        """Wait until the caller has heard all audio."""
        lead_ms = self._conversation.configuration.effective.max_lead_ms or 0
        try:
            async with asyncio.timeout(lead_ms / 1000 + PLAYOUT_MARGIN_SEC):
                await self._silent.wait()
        except TimeoutError:
            logger.debug("an answer was not played to its end")

    def connection_closing(self) -> None:
        self._silent.set()
        self._session.end(None)

    # input

    def _hear(self, audio: bytes, timestamp_ms: int | None = None) -> None:
        """Pass audio of the caller, in the session's format, to the conversation."""
        if audio:
            chunk = InputChunk(Modality.AUDIO, audio, timestamp_ms=timestamp_ms)
            self._conversation.receive_chunk(chunk, now=self._connection.heard_at)
        self._pause_if_blocked()

    def _press(self, key: str) -> None:
        """Handle a key that the caller pressed. Characters other than KEYS are ignored.

        Keys form an entry, which ends with the key END (not part of it), after MAX_KEYS, or after PAUSE_SEC. The first
        key of an entry silences the answer.
        """
        self._conversation.stream.touch(now=self._connection.heard_at)
        self._conversation.note_given()
        if key not in KEYS:
            return
        if not self._keys and key != END and self._playout.unplayed:
            self._silence()
        self._end_pause()
        if key != END:
            self._keys += key
            self._conversation.note_keys(True)
        if key == END or len(self._keys) == MAX_KEYS:
            self._keys_entered()
        else:
            self._pause = self._loop.call_later(PAUSE_SEC, self._keys_entered)

    def _end_pause(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None

    def _silence(self) -> None:
        """Cancel the answer. Also cancels speech that may not be a turn; a turn that the caller is speaking goes on."""
        self._clear()
        if self._conversation.receiving is None or self._conversation.spoken.onset is not None:
            self._conversation.cancel()

    def _keys_entered(self) -> None:
        """End an entry of keys. The entry is a turn of its own, or a part of the turn that the caller is speaking."""
        self._end_pause()
        keys, self._keys = self._keys, ""
        if not keys or not self._listening:
            return
        conversation = self._conversation
        conversation.note_keys(False)
        self._silence()
        text = InputChunk(Modality.TEXT, f"(On the telephone's keys: {' '.join(keys)})".encode())
        try:
            if conversation.receiving is not None:
                conversation.receive_chunk(text, now=self._loop.time())
                return
            conversation.respond([text], conversation.configuration.effective)
        except OmniError as error:
            self._session.end(error)

    # output

    def _sound(self, audio: bytes) -> None:
        """Play audio that belongs to no answer, if no answer is being played."""
        if self._connection.is_open and not self._connection.paused and not self._playout.unplayed:
            self._send(audio)

    def _take_message(self) -> ServerMessage | None:
        """Take the next message from the outbox; None while there is none."""
        message = self._outbox.take()
        if message is not None:
            record_message(self._session.recording, message)
        if message is not None and self._thinking is not None:
            self._thinking.hear(message)
        return message

    def _report(self, request_id: str, played_ms: float) -> None:
        """Report to the conversation how much of an answer the caller has heard."""
        self._conversation.report_playback(played_ms, request_id=request_id)
        if self._session.recording is not None:
            self._session.recording.played(request_id, played_ms)

    resume_output = SoleConnection.output_ready

    def _check_silent(self) -> None:
        if not self._outbox and not self._playout.unplayed:
            self._silent.set()
        elif self._connection.is_open:
            self._silent.clear()

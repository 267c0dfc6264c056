"""Says "mm-hm" in pauses of the user's long turns, to show that somebody listens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import numpy as np

from omni_ws.audio.codec import AudioEncoder
from omni_ws.audio.pcm import Samples, as_samples
from omni_ws.core.chunks import AudioFormat, InputMode, OutputModality, Task
from omni_ws.engine.base import AudioOutput, EngineOutput, GenerationRequest
from omni_ws.errors import OmniError
from omni_ws.service.conversation.remarks import phrases
from omni_ws.service.conversation.request import Request
from omni_ws.service.conversation.request_queue import text_input
from omni_ws.service.failure import new_id, unexpected
from omni_ws.wire.server_frames import BackchannelFrame
from omni_ws.wire.session_config import SessionConfig

if TYPE_CHECKING:
    from omni_ws.service.conversation.conversation import Conversation

logger = logging.getLogger(__name__)

#: How long the user has spoken at least before the server says "mm-hm", and the least time between two.
LEAST_SPEECH_MS: Final = 4000
EVERY_SEC: Final = 8.0
#: The level of "mm-hm" beside that of answers: 12 dB below.
MURMURED: Final = 10 ** (-12 / 20)
#: The longest "mm-hm": a voice that takes longer for it does not say it well.
LONGEST_MURMUR_SEC: Final = 1.5


class Murmurs:
    """Says "mm-hm" in the pauses of the user's long turns, with ``turn_detection.backchannel``.

    ``language`` returns that of the talk (primary subtag of RFC 5646); None if the voice does not speak it.

    It is no request, and in no history or usage. The sounds of the latest voice are kept; one that is made too late for
    its pause waits for the next.
    """

    def __init__(self, conversation: Conversation, language: Callable[[SessionConfig], str | None]) -> None:
        self._conversation = conversation
        self._language = language
        #: The sound of each text, and the language, voice, speed and format that they are in.
        self._sounds: dict[str, bytes] = {}
        self._made_for: tuple[object, ...] = ()
        self._making: asyncio.Task[None] | None = None
        #: When the next may be said, and where the last was, in milliseconds of the session's audio.
        self._next_at = 0.0
        self._said_ms = 0
        self._said = 0

    def close(self) -> None:
        """Say nothing more."""
        if self._making is not None:
            self._making.cancel()
        self._forget()

    def take_breath(self, turn_id: str, began_ms: int, audio_ms: int) -> None:
        """Say something in the pause at ``audio_ms`` of the turn that began at ``began_ms``, if it is time to.

        Only once the listener has applied the rest of the piece: the speaker may go on in it.
        """
        asyncio.get_running_loop().call_soon(self._look, turn_id, began_ms, audio_ms)

    def _look(self, turn_id: str, began_ms: int, audio_ms: int) -> None:
        conversation = self._conversation
        if (
            audio_ms - max(began_ms, self._said_ms) < LEAST_SPEECH_MS
            or asyncio.get_running_loop().time() < self._next_at
        ):
            return
        request = conversation.receiving
        if request is None or not self._may_speak(turn_id):
            return
        config = request.config
        language = self._language(config)
        known = phrases().get(language or "")
        if known is None or not _wanted(config) or Task.SPEECH not in conversation.engine.capabilities.tasks:
            return
        text = known.murmur[self._said % len(known.murmur)]
        made_for = (language, config.voice, config.speed, config.output_audio)
        if made_for != self._made_for:
            self._forget()
            self._made_for = made_for
        if text in self._sounds:
            self._say(turn_id, text, config, audio_ms)
        elif self._making is None:
            making = self._make(turn_id, text, request, language, audio_ms)
            self._making = asyncio.create_task(making, name="a backchannel")

    def _may_speak(self, turn_id: str) -> bool:
        """Return whether the user is silent in this turn, nothing is played, and no answer is due."""
        conversation, current = self._conversation, self._conversation.spoken.current
        silent = conversation.listener is not None and conversation.listener.pausing
        listens = current is not None and current.turn_id == turn_id and conversation.spoken.onset is None
        busy = conversation.detached or conversation.is_playing or conversation.is_answering
        return silent and listens and not busy

    def _say(self, turn_id: str, text: str, config: SessionConfig, audio_ms: int) -> None:
        payload = self._sounds[text]
        if not payload:  # the voice does not say it well
            self._said += 1
            return
        audio = _raw_format(config)
        frame = BackchannelFrame(
            turn_id=turn_id, text=text, payload=payload, format=audio.encoding, sample_rate=audio.sample_rate
        )
        self._conversation.outbox.put_nowait(frame)
        self._next_at, self._said_ms = asyncio.get_running_loop().time() + EVERY_SEC, audio_ms
        self._said += 1

    async def _make(self, turn_id: str, text: str, request: Request, language: str | None, audio_ms: int) -> None:
        conversation, config, made_for = self._conversation, request.config, self._made_for
        able = conversation.engine.capabilities
        out = _Collected()
        wanted = GenerationRequest(
            request_id=new_id("req_"),
            task=Task.SPEECH,
            input=text_input(text),
            input_mode=InputMode.SNAPSHOT,
            input_audio=AudioFormat(),
            modalities=frozenset({OutputModality.AUDIO}),
            voice=config.voice,
            voice_named=request.voice_named,
            speed=config.speed,
            speech_language=language if language in able.speech_languages else None,
            owner=request.owner,
            near=request.near,
            conversation=request.conversation,
            media_room=request.media_room,
            lane=request.lane,
        )
        try:
            await conversation.engine.generate(wanted, out)
            if made_for != self._made_for:
                return
            sound = out.encoded(_raw_format(config))
            conversation.account.take(len(sound))
            self._sounds[text] = sound
            if self._may_speak(turn_id):
                self._say(turn_id, text, config, audio_ms)
        except Exception as error:
            failure = error if isinstance(error, OmniError) else unexpected(error, where="a backchannel")
            logger.debug("nothing is said in the user's pause: %s", failure.message)
            self._next_at = asyncio.get_running_loop().time() + EVERY_SEC
        finally:
            self._making = None

    def _forget(self) -> None:
        self._conversation.account.give(sum(map(len, self._sounds.values())))
        self._sounds.clear()


def _wanted(config: SessionConfig) -> bool:
    """Whether a request's configuration wants it. Not where the server takes its echo out: it would stay there."""
    turns = config.turn_detection
    return (
        turns is not None and turns.backchannel and "audio" in config.modalities and config.input_audio.echo != "server"
    )


def _raw_format(config: SessionConfig) -> AudioFormat:
    """Return the format of the session's output if it is raw, otherwise pcm16 at its rate."""
    audio = config.output_audio.encoded
    return audio if audio.is_raw else AudioFormat(sample_rate=audio.sample_rate)


class _Collected:
    """An OutputWriter that keeps the sound."""

    full = False

    def __init__(self) -> None:
        self._pieces: list[Samples] = []
        self._rate = 0

    def write(self, output: EngineOutput) -> None:
        if isinstance(output, AudioOutput) and sum(map(len, self._pieces)) <= LONGEST_MURMUR_SEC * output.sample_rate:
            self._pieces.append(as_samples(output.samples))
            self._rate = output.sample_rate

    async def drain(self) -> None:
        pass

    def encoded(self, audio: AudioFormat) -> bytes:
        """Return the sound, lowered; empty if it is too long."""
        samples = np.concatenate([*self._pieces, np.zeros(0, np.float32)])
        if not len(samples) or len(samples) > LONGEST_MURMUR_SEC * self._rate:
            return b""
        encoder = AudioEncoder(audio, source_rate=self._rate)
        return encoder.encode(samples * np.float32(MURMURED)) + encoder.flush()

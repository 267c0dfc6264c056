"""Playout: the audio of answers, cut into packets, for calls, in which the server decides when it is played."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from omni_ws.audio.ducking import Ducker
from omni_ws.core.chunks import AudioFormat, FinalChunk, FinishReason, OutputChunk, OutputModality
from omni_ws.service.conversation.messages import ServerMessage
from omni_ws.wire.server_frames import BackchannelFrame, SpeechConfirmedFrame, SpeechDismissedFrame, SpeechStartedFrame


class Played(NamedTuple):
    """A packet of an answer's audio that is to be played now; empty ``audio`` stands for the end of the answer.

    ``position`` is where the packet begins in the answer's audio, in bytes.
    """

    answer_id: str
    position: int
    audio: bytes


@dataclass(slots=True)
class _Answer:
    """An answer in a Playout, with the audio that was not taken yet."""

    answer_id: str
    audio: bytearray = field(default_factory=bytearray)
    #: Bytes of audio taken so far.
    taken: int = 0
    ended: bool = False

    def end(self) -> None:
        """Note that no more audio of the answer follows."""
        self.ended = True

    def take(self, size: int) -> bytes:
        """Remove and return audio: ``size`` bytes, or what is left."""
        audio = bytes(self.audio[:size])
        del self.audio[:size]
        self.taken += len(audio)
        return audio


class Playout:
    """A queue of answers' audio, which is taken packet by packet. Has no socket and no clock.

    The audio is pcm16 or mu-law in the format ``audio``. The last packet of an answer is filled up with ``silence``,
    which is one byte. Packets are lowered while it is not known whether what the caller says interrupts the answer.
    """

    def __init__(self, packet_bytes: int, audio: AudioFormat, *, silence: bytes = b"\0") -> None:
        #: Bytes of audio that were not taken.
        self.waiting = 0
        self._ducker = Ducker(audio)
        self._packet_bytes = packet_bytes
        self._silence = silence
        self._answers: deque[_Answer] = deque()

    @property
    def unplayed(self) -> bool:
        """Whether any answer has not been taken to its end."""
        return bool(self._answers)

    @property
    def ready(self) -> bool:
        """Whether ``take`` would return a whole packet of audio, the last one of an answer, or the end of an answer."""
        return bool(self._answers) and (self._answers[0].ended or len(self._answers[0].audio) >= self._packet_bytes)

    def hear(self, message: ServerMessage) -> bool:
        """Queue the audio of one of the session's messages, if the message has any.

        Returns whether ``clear`` must be called, as the message silences the audio that was not played yet.
        """
        match message:
            case OutputChunk(modality=OutputModality.AUDIO):
                self.say(message.request_id, message.payload)
            case FinalChunk(finish_reason=FinishReason.CANCELLED):
                return any(answer.answer_id == message.request_id for answer in self._answers)
            case FinalChunk():
                self.finish(message.request_id)
            case BackchannelFrame(turn_id=turn_id, payload=payload):
                self.say(turn_id, payload)
                self.finish(turn_id)
            case SpeechStartedFrame(certain=False):
                self.duck(True)
            case SpeechDismissedFrame():
                self.duck(False)
            case SpeechStartedFrame() | SpeechConfirmedFrame():  # the caller interrupts
                self.duck(False)
                return True
        return False

    def duck(self, lowered: bool) -> None:
        """Lower the packets that are taken from now on, or raise them to their full level."""
        self._ducker.duck(lowered)
        if not self._answers:
            self._ducker.settle()

    def say(self, answer_id: str, audio: bytes) -> None:
        """Queue audio of an answer after all earlier audio."""
        if not self._answers or self._answers[-1].answer_id != answer_id:
            if self._answers:
                self._answers[-1].end()
            self._answers.append(_Answer(answer_id))
        self._answers[-1].audio.extend(audio)
        self.waiting += len(audio)

    def finish(self, answer_id: str) -> None:
        """Note that no more audio of an answer follows."""
        for answer in self._answers:
            if answer.answer_id == answer_id:
                answer.end()

    def take(self, most: int | None = None) -> Played | None:
        """Remove and return the next packet; None while there is none.

        With ``most``, several whole packets are returned as one, of at most so many bytes.
        """
        if not self.ready:
            return None
        answer = self._answers[0]
        if not answer.audio:
            self._answers.popleft()
            return Played(answer.answer_id, answer.taken, b"")
        whole = len(answer.audio) // self._packet_bytes * self._packet_bytes
        position = answer.taken
        audio = answer.take(min(whole, most or self._packet_bytes) or self._packet_bytes)
        self.waiting -= len(audio)
        packet = self._ducker.apply(audio.ljust(self._packet_bytes, self._silence))
        return Played(answer.answer_id, position, packet)

    def clear(self) -> list[str]:
        """Discard the audio that was not taken. Returns the ids of the answers of which some audio was taken before."""
        heard = [answer.answer_id for answer in self._answers if answer.taken]
        self._answers.clear()
        self._ducker.settle()
        self.waiting = 0
        return heard

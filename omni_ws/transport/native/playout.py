"""What a caller hears, where the server plays it: the audio of answers, cut into packets."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from omni_ws.core.chunks import FinalChunk, FinishReason, OutputChunk, OutputModality
from omni_ws.service.conversation.messages import ServerMessage
from omni_ws.wire.server_frames import SpeechStartedFrame


class Played(NamedTuple):
    """Audio of an answer that is to be heard now, or with none, the end of the answer.

    ``position`` is where it begins on the answer's time line, in bytes.
    """

    answer_id: str
    position: int
    audio: bytes


@dataclass(slots=True)
class _Answer:
    """An answer until its end was taken, with the audio that was not."""

    answer_id: str
    audio: bytearray = field(default_factory=bytearray)
    taken: int = 0
    ended: bool = False


class Playout:
    """Answers behind one another, taken packet by packet. Has no socket and no clock.

    The last packet of an answer is completed with ``silence``, which is one byte.
    """

    def __init__(self, packet_bytes: int, *, silence: bytes = b"\0") -> None:
        #: Bytes of audio that were not taken.
        self.waiting = 0
        self._packet_bytes = packet_bytes
        self._silence = silence
        self._answers: deque[_Answer] = deque()

    @property
    def unplayed(self) -> bool:
        """Whether there is an answer whose end was not taken."""
        return bool(self._answers)

    @property
    def ready(self) -> bool:
        """Whether there is a packet to take, or an end."""
        return bool(self._answers) and (self._answers[0].ended or len(self._answers[0].audio) >= self._packet_bytes)

    def hear(self, message: ServerMessage) -> bool:
        """One of the session's messages: text, transcripts and errors are not heard.

        Returns whether what was not played is not to be heard any more, so that ``clear`` is to follow.
        """
        match message:
            case OutputChunk(modality=OutputModality.AUDIO):
                self.say(message.request_id, message.payload)
            case FinalChunk(finish_reason=FinishReason.CANCELLED):
                return any(answer.answer_id == message.request_id for answer in self._answers)
            case FinalChunk():
                self.finish(message.request_id)
            case SpeechStartedFrame():  # the caller interrupts
                return True
        return False

    def say(self, answer_id: str, audio: bytes) -> None:
        """Audio of an answer, behind what was said before."""
        if not self._answers or self._answers[-1].answer_id != answer_id:
            if self._answers:
                self._answers[-1].ended = True
            self._answers.append(_Answer(answer_id))
        self._answers[-1].audio += audio
        self.waiting += len(audio)

    def finish(self, answer_id: str) -> None:
        """There is no more audio of this answer."""
        for answer in self._answers:
            answer.ended = answer.ended or answer.answer_id == answer_id

    def take(self, most: int | None = None) -> Played | None:
        """The next packet, or with ``most`` as many whole ones as have no more bytes; None while there is nothing."""
        if not self.ready:
            return None
        answer = self._answers[0]
        if not answer.audio:
            self._answers.popleft()
            return Played(answer.answer_id, answer.taken, b"")
        whole = len(answer.audio) // self._packet_bytes * self._packet_bytes
        audio = bytes(answer.audio[: min(whole, most or self._packet_bytes) or self._packet_bytes])
        del answer.audio[: len(audio)]
        self.waiting -= len(audio)
        played = Played(answer.answer_id, answer.taken, audio.ljust(self._packet_bytes, self._silence))
        answer.taken += len(audio)
        return played

    def clear(self) -> list[str]:
        """What was not taken is not to be heard. Returns the answers that were being heard."""
        heard = [answer.answer_id for answer in self._answers if answer.taken]
        self._answers.clear()
        self.waiting = 0
        return heard

"""LivePlayer: the endless output of a Live session, in which answers and silence have their places on one time line."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from omni_ws.audio.ducking import Ducker
from omni_ws.core.chunks import SAMPLE_BYTES, AudioEncoding, AudioFormat

#: The length of a frame, which is also the interval of ``tick``.
FRAME_MS: Final = 100
#: How far ahead of the time line sound is sent. Clients play what they have got to its end, also when interrupted.
LEAD_MS: Final = 200
#: The byte that is silence, by encoding.
SILENCE: Final = {AudioEncoding.PCM16: b"\0", AudioEncoding.PCMU: b"\xff", AudioEncoding.PCMA: b"\xd5"}


class Heard(NamedTuple):
    """How far an answer has been heard: up to ``position_ms`` of it, which was at ``line_ms`` of the time line.

    ``ended``: that was its end.
    """

    answer_id: str
    position_ms: float
    line_ms: float
    ended: bool


class _Piece(NamedTuple):
    """Sound on the time line: from ``line_ms`` on for ``lasts_ms``, of the answer from ``position_ms`` on."""

    line_ms: float
    lasts_ms: float
    answer_id: str
    position_ms: float
    ended: bool = False


class _Answer:
    """An answer with its sound that was not sent yet."""

    __slots__ = ("answer_id", "audio", "ended", "sent_ms")

    def __init__(self, answer_id: str, sent_ms: float) -> None:
        self.answer_id = answer_id
        self.audio = bytearray()
        #: Up to where in the answer its sound was sent.
        self.sent_ms = sent_ms
        self.ended = False


class LivePlayer:
    """Sends the sound of answers in real time, and exact silence between them. Has no clock: times are arguments.

    The time line begins at 0 ms, when the session starts. ``play`` is called with each frame and its interval on the
    line. Sound is sent as soon as there is any, at most LEAD_MS ahead of the line, and silence once its time has
    passed: so an answer waits for nothing, and what was sent is as long as the line. Without ``silence`` only sound is
    sent. ``heard`` is called with what the line has passed.
    """

    def __init__(
        self,
        audio: AudioFormat,
        play: Callable[[bytes, float, float], None],
        heard: Callable[[Heard], None],
        *,
        silence: bool = True,
    ) -> None:
        self._play = play
        self._heard = heard
        self._silence = SILENCE[audio.encoding] if silence else b""
        self._sample = SAMPLE_BYTES[audio.encoding]
        self._bytes_per_ms = audio.bytes_per_second // 1000
        self._ducker = None if audio.encoding is AudioEncoding.PCMA else Ducker(audio)
        self._answers: deque[_Answer] = deque()
        #: What was sent and not passed yet.
        self._ahead: deque[_Piece] = deque()
        #: The id of an answer that is never cut.
        self.kept: str | None = None
        #: Up to where on the line something was sent.
        self.sent_ms = 0.0
        #: Of the answer that was cut last, up to where it was sent: what is sent again before that is left out.
        self._cut: tuple[str, float] = ("", 0.0)

    @property
    def sounding(self) -> bool:
        """Whether any sound waits, or was sent and is not passed."""
        return bool(self._answers or self._ahead)

    def say(self, answer_id: str, audio: bytes, start_ms: float | None = None) -> None:
        """Queue sound of an answer, which begins at ``start_ms`` of it, after all earlier sound."""
        if not self._answers or self._answers[-1].answer_id != answer_id:
            if self._answers:
                self._answers[-1].ended = True
            sent_ms = self._cut[1] if self._cut[0] == answer_id else 0.0
            self._answers.append(_Answer(answer_id, max(sent_ms, start_ms or 0.0)))
        answer = self._answers[-1]
        expected_ms = answer.sent_ms + len(answer.audio) / self._bytes_per_ms
        if start_ms is not None and start_ms < expected_ms - 1:  # it was sent before the answer was held
            skipped = int((expected_ms - start_ms) * self._bytes_per_ms)
            audio = audio[skipped - skipped % self._sample :]
        answer.audio += audio

    def finish(self, answer_id: str) -> None:
        """Note that no more sound of an answer follows."""
        for answer in self._answers:
            answer.ended = answer.ended or answer.answer_id == answer_id

    def has(self, answer_id: str) -> bool:
        """Whether any sound of the answer waits, or was sent and is not passed."""
        waits = any(one.answer_id == answer_id for one in self._answers)
        return waits or any(one.answer_id == answer_id for one in self._ahead)

    def duck(self, lowered: bool) -> None:
        """Lower what is sent from now on, or raise it to its full level."""
        if self._ducker is not None:
            self._ducker.duck(lowered)
            if not self._answers:
                self._ducker.settle()

    def cut(self) -> list[str]:
        """Drop all sound that was not sent, but that of ``kept``.

        Returns the answers that had no more to come, of which some is dropped.
        """
        ended = [answer.answer_id for answer in self._answers if answer.ended and answer.answer_id != self.kept]
        if self._answers:
            first = self._answers[0]
            if first.answer_id != self.kept:
                self._cut = (first.answer_id, first.sent_ms)
            self._answers = deque(one for one in self._answers if one.answer_id == self.kept)
        if self._ducker is not None:
            self._ducker.settle()
        return ended

    def pump(self, now_ms: float) -> None:
        """Send sound, as far as it is there and may be sent at ``now_ms`` of the line."""
        while self._answers and self.sent_ms + FRAME_MS <= now_ms + LEAD_MS:
            answer = self._answers[0]
            if not answer.audio:
                if not answer.ended:
                    return
                self._ahead.append(_Piece(self.sent_ms, 0, answer.answer_id, answer.sent_ms, ended=True))
                self._answers.popleft()
                continue
            frame = FRAME_MS * self._bytes_per_ms
            if len(answer.audio) < frame and not answer.ended and self.sent_ms > now_ms:
                return  # more may come in time
            self._send_sound(answer, frame, now_ms)

    def _send_sound(self, answer: _Answer, most: int, now_ms: float) -> None:
        audio = bytes(answer.audio[:most])
        del answer.audio[: len(audio)]
        if not self._silence and self.sent_ms < now_ms:
            self.sent_ms = now_ms
        lasts_ms = len(audio) / self._bytes_per_ms
        begin_ms, self.sent_ms = self.sent_ms, self.sent_ms + lasts_ms
        self._ahead.append(_Piece(begin_ms, lasts_ms, answer.answer_id, answer.sent_ms))
        answer.sent_ms += lasts_ms
        self._play(audio if self._ducker is None else self._ducker.apply(audio), begin_ms, self.sent_ms)

    def tick(self, now_ms: float, *, blocked: bool = False) -> None:
        """Send what is due at ``now_ms``, the end of a frame: sound or, where there is none, silence.

        While the client does not read (``blocked``) nothing is sent, and its silence is left out.
        """
        self._pass(now_ms)
        if blocked:
            self.sent_ms = max(self.sent_ms, now_ms)
            return
        self.pump(now_ms)
        missing = int((now_ms - self.sent_ms) * self._bytes_per_ms)
        missing -= missing % self._sample
        if missing <= 0:
            return
        begin_ms = self.sent_ms
        if self._silence:
            self.sent_ms += missing / self._bytes_per_ms
            self._play(self._silence * missing, begin_ms, self.sent_ms)
        else:
            self.sent_ms = now_ms

    def _pass(self, now_ms: float) -> None:
        """Tell what the line has passed by now."""
        while self._ahead:
            piece = self._ahead[0]
            passed_ms = min(piece.lasts_ms, now_ms - piece.line_ms)
            if passed_ms < 0 or (not passed_ms and not piece.ended):
                return
            if passed_ms == piece.lasts_ms:
                self._ahead.popleft()
            position_ms, line_ms = piece.position_ms + passed_ms, piece.line_ms + passed_ms
            self._heard(Heard(piece.answer_id, position_ms, line_ms, piece.ended))
            if passed_ms < piece.lasts_ms:
                return

"""The output of a Live session: answers, ready-made sound and transcripts on one time line."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from omni_ws.audio.codec import AudioEncoder
from omni_ws.audio.ducking import Ducker
from omni_ws.core.chunks import SAMPLE_BYTES, AudioEncoding, AudioFormat, Word
from omni_ws.core.history import UNSPACED
from omni_ws.core.ledger_entry import Clause, LedgerEntry, end_of_clauses, end_of_words, read_all
from omni_ws.core.quota import Share
from omni_ws.errors import EngineOverloaded, InvalidValue
from omni_ws.transport.realtime.items import Event
from omni_ws.wire.live_session import invalid_audio, read_audio

if TYPE_CHECKING:
    from omni_ws.transport.realtime.live import LiveDialect


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
        #: Whether no more sound follows.
        self.ended = False

    def end(self) -> None:
        """Note that no more sound follows."""
        self.ended = True

    def take(self, most: int, bytes_per_ms: int) -> bytes:
        """Remove and return the next sound, which is sent now."""
        taken = bytes(self.audio[:most])
        del self.audio[: len(taken)]
        self.sent_ms += len(taken) / bytes_per_ms
        return taken


#: The name of a fixture among the answers in the player, which is never cut.
FIXTURE: Final = "fixture"


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
        silence: bool,
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
                self._answers[-1].end()
            sent_ms = self._cut[1] if self._cut[0] == answer_id else 0.0
            self._answers.append(_Answer(answer_id, max(sent_ms, start_ms or 0.0)))
        answer = self._answers[-1]
        expected_ms = answer.sent_ms + len(answer.audio) / self._bytes_per_ms
        if start_ms is not None and start_ms < expected_ms - 1:  # it was sent before the answer was held
            skipped = int((expected_ms - start_ms) * self._bytes_per_ms)
            audio = audio[skipped - skipped % self._sample :]
        answer.audio.extend(audio)

    def finish(self, answer_id: str) -> None:
        """Note that no more sound of an answer follows."""
        for answer in self._answers:
            if answer.answer_id == answer_id:
                answer.end()

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
        """Drop all sound that was not sent, but that of a fixture.

        Returns the answers that had no more to come, of which some is dropped.
        """
        dropped = [answer for answer in self._answers if answer.answer_id != FIXTURE]
        if dropped and dropped[0] is self._answers[0]:
            self._cut = (dropped[0].answer_id, dropped[0].sent_ms)
        self._answers = deque(one for one in self._answers if one.answer_id == FIXTURE)
        if self._ducker is not None:
            self._ducker.settle()
        return [answer.answer_id for answer in dropped if answer.ended]

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
        position_ms, audio = answer.sent_ms, answer.take(most, self._bytes_per_ms)
        if not self._silence and self.sent_ms < now_ms:
            self.sent_ms = now_ms
        lasts_ms = len(audio) / self._bytes_per_ms
        begin_ms, self.sent_ms = self.sent_ms, self.sent_ms + lasts_ms
        self._ahead.append(_Piece(begin_ms, lasts_ms, answer.answer_id, position_ms))
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


#: The format of the sound, whatever that of the session is.
FIXTURE_FORMAT: Final = AudioFormat(sample_rate=24_000)
MAX_FIXTURE_SEC: Final = 30
MAX_FIXTURE_BYTES: Final = MAX_FIXTURE_SEC * FIXTURE_FORMAT.bytes_per_second


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


#: A word with the blanks before it; in scripts without blanks, a character.
_WORD: Final = re.compile(rf"\s*(?:[{UNSPACED}]|[^\s{UNSPACED}]+)")
#: The most text that is looked through for a word or a clause.
_WINDOW: Final = 4096


class Delta(NamedTuple):
    """New text of a transcript, and its interval in milliseconds."""

    text: str
    start_ms: float
    end_ms: float


class TranscriptLine:
    """The order of one direction's deltas: their times never go back, and none is in the future."""

    def __init__(self) -> None:
        self._begun = False
        self._start_ms = 0
        self._end_ms = 0

    def place(self, text: str, start_ms: float, end_ms: float, *, now_ms: int, joins: bool) -> Delta:
        """Return the delta of ``text``; ``joins``: it continues the text before, so no blank is put between."""
        if self._begun and not joins and not text[:1].isspace():
            text = f" {text}"
        self._begun = True
        self._start_ms = min(max(round(start_ms), self._start_ms), now_ms)
        self._end_ms = min(max(round(end_ms), self._start_ms, self._end_ms), now_ms)
        return Delta(text, self._start_ms, self._end_ms)

    @property
    def end_ms(self) -> int:
        """The end of the latest delta."""
        return self._end_ms


class HeardText:
    """The words of one request's speech: of interim texts, which the next one replaces, those that two agree on.

    What was told is never taken back: if the settled text corrects it, only the words behind it are told.
    """

    def __init__(self) -> None:
        #: Whether anything of the request was told.
        self.begun = False
        self._told = 0
        self._last: list[str] = []

    def hear(self, text: str, *, interim: bool) -> str:
        """Take a transcript of what follows the settled ones. Return the text to tell now; it may be empty."""
        words = _WORD.findall(text)
        stable = len(words)
        if interim:
            agreed = 0
            for word, before in zip(words, self._last, strict=False):
                if word.strip() != before.strip():
                    break
                agreed += 1
            stable = max(0, agreed - 1)  # the last one may not be spoken to its end
        new = "".join(words[self._told : stable])
        self._told, self._last = (max(self._told, stable), words) if interim else (0, [])
        self.begun = self.begun or bool(new)
        return new


class SpokenText:
    """The text of one answer, told as far as its sound was heard: by words, or by the place in a clause."""

    def __init__(self) -> None:
        #: Whether any of it was told.
        self.begun = False
        #: Text that was not told yet, except what ``_window`` has.
        self._pieces: deque[str] = deque()
        #: The text from ``_start`` on, as far as it was needed; and where in the text telling has come to.
        self._window = ""
        self._start = 0
        self._told = 0
        self._words: deque[Word] = deque()
        self._timed = False
        #: Up to where in the answer its sound was heard, and up to where its words were told, in milliseconds.
        self._heard_ms = 0.0
        self._told_ms = 0.0

    def begin(self) -> bool:
        """Note that some of it is told now. Return whether some was told before."""
        begun, self.begun = self.begun, True
        return begun

    def write(self, text: str) -> None:
        """Add text of the answer."""
        self._pieces.append(text)

    def pronounce(self, words: Sequence[Word]) -> None:
        """Add words of its sound. Those that were told are left out: the answer was held, and is sent again."""
        self._timed = self._timed or bool(words)
        last_ms = self._words[-1].end_ms if self._words else self._heard_ms
        self._words.extend(word for word in words if word.end_ms > last_ms)

    def heard(self, position_ms: float, entry: LedgerEntry | None) -> Delta | None:
        """Return the text that was heard up to this position and not told yet, with times in the answer."""
        self._heard_ms = max(self._heard_ms, position_ms)
        return self._words_until(position_ms) if self._timed else self._clauses_until(position_ms, entry)

    def rest(self) -> str:
        """Return all text that was not told, which is told then: the answer was heard to its end."""
        rest = self._window[self._told - self._start :] + "".join(self._pieces)
        self._pieces.clear()
        self._window, self._start, self._told = "", self._told + len(rest), self._told + len(rest)
        return rest

    def _words_until(self, position_ms: float) -> Delta | None:
        words = []
        while self._words and self._words[0].end_ms <= position_ms:
            words.append(self._words.popleft())
        if not words:
            return None
        self._see(max((word.text_end or 0 for word in words), default=0), self._told)
        rebased = [
            word if word.text_end is None else replace(word, text_end=max(0, word.text_end - self._start))
            for word in words
        ]
        end = self._start + end_of_words(self._window, rebased, begin=self._told - self._start)
        return self._tell(end, words[0].start_ms, words[-1].end_ms)

    def _clauses_until(self, position_ms: float, entry: LedgerEntry | None) -> Delta | None:
        clauses = entry.clauses if entry is not None else []
        first = len(clauses)
        while first and clauses[first - 1].end > self._told:
            first -= 1
        end = self._told
        for index, clause in enumerate(clauses[first:], first):
            if clause.start_ms >= position_ms:
                break
            complete = index + 1 < len(clauses) or (entry is not None and entry.finished)
            self._see(clause.end, clause.start)
            text = self._window[max(0, clause.start - self._start) : clause.end - self._start]
            part = Clause(clause.start_ms, clause.end_ms, 0, len(text))
            spoken = end_of_clauses(text, [part], position_ms, whole=complete, pace=None, read=read_all)
            end = max(end, clause.start + spoken)
        return self._tell(end, self._told_ms, position_ms)

    def _see(self, end: int, start: int) -> None:
        """Let the window reach from ``start``, or where telling has come to, to ``end`` and somewhat further."""
        start = min(start, self._told)
        self._window = self._window[max(0, start - self._start) :]
        self._start = max(self._start, start)
        while self._pieces and self._start + len(self._window) < max(end, self._told + _WINDOW):
            self._window += self._pieces.popleft()

    def _tell(self, end: int, start_ms: float, end_ms: float) -> Delta | None:
        text = self._window[self._told - self._start : end - self._start].rstrip()  # blanks are told with what follows
        self._told += len(text)
        if not text:
            return None
        self._told_ms = end_ms
        return Delta(text, start_ms, end_ms)

"""The parts of a Live session: its output on a time line, its transcripts, and the work that its model delegates."""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import numpy as np
import orjson
from msgspec import structs

from omni_ws.audio.codec import AudioEncoder
from omni_ws.audio.pcm import Ducker
from omni_ws.core.chunks import (
    SAMPLE_BYTES,
    AudioEncoding,
    AudioFormat,
    FinalChunk,
    FinishReason,
    InputChunk,
    Modality,
    ToolCall,
    Usage,
    Word,
)
from omni_ws.core.history import UNSPACED
from omni_ws.core.ledger_entry import Clause, LedgerEntry, end_of_clauses, end_of_words, read_all
from omni_ws.core.quota import Share, keep_newest
from omni_ws.engine.base import AnswerOptions
from omni_ws.errors import EngineOverloaded, InvalidRequest, InvalidValue, OmniError, UnsupportedParameter
from omni_ws.service import new_id
from omni_ws.service.conversation.output_log import ServerMessage
from omni_ws.service.conversation.unasked import Telling
from omni_ws.service.sessions.factory import Chat
from omni_ws.transport.realtime.items import Event, as_input
from omni_ws.wire.live_session import (
    ClientDelegation,
    Delegation,
    ResponsesConfig,
    ResponsesDelegation,
    immutable,
    invalid_audio,
    read_audio,
)
from omni_ws.wire.openai_fields import check_tools, object_field
from omni_ws.wire.realtime_events import Item, RealtimeRefusal, read_item
from omni_ws.wire.realtime_session import tool_choice, tools

if TYPE_CHECKING:
    from omni_ws.transport.realtime.live import LiveDialect


#: The length of a frame, which is also the interval of ``tick``.
FRAME_MS: Final = 100
#: How far ahead of the time line audio is sent. Clients play all that they have received, even if it was interrupted.
LEAD_MS: Final = 200
#: The byte that is silence, by encoding.
SILENCE: Final = {AudioEncoding.PCM16: b"\0", AudioEncoding.PCMU: b"\xff", AudioEncoding.PCMA: b"\xd5"}


class Heard(NamedTuple):
    """How far an answer has been heard: up to ``position_ms`` in the answer, played at ``line_ms`` on the time line.

    ``ended``: whether that is the end of the answer.
    """

    answer_id: str
    position_ms: float
    line_ms: float
    ended: bool


class _Piece(NamedTuple):
    """A piece of audio on the time line: it begins at ``line_ms`` and lasts ``lasts_ms``.

    In the answer it begins at ``position_ms``. ``ended`` marks the end of the answer; such a piece has no audio.
    """

    line_ms: float
    lasts_ms: float
    answer_id: str
    position_ms: float
    ended: bool = False


class _Answer:
    """An answer in the player, with its audio that was not sent yet."""

    __slots__ = ("answer_id", "audio", "ended", "sent_ms")

    def __init__(self, answer_id: str, sent_ms: float) -> None:
        self.answer_id = answer_id
        self.audio = bytearray()
        #: Up to where in the answer its sound was sent.
        self.sent_ms = sent_ms
        #: Whether no more sound follows.
        self.ended = False

    def end(self) -> None:
        """Note that no more audio of the answer follows."""
        self.ended = True

    def take(self, most: int, bytes_per_ms: int) -> bytes:
        """Remove and return up to ``most`` bytes of audio, to be sent now."""
        taken = bytes(self.audio[:most])
        del self.audio[: len(taken)]
        self.sent_ms += len(taken) / bytes_per_ms
        return taken


#: The name of a fixture among the answers in the player, which is never cut.
FIXTURE: Final = "fixture"


class LivePlayer:
    """Sends the audio of answers in real time, and digital silence between answers. Has no clock: times are arguments.

    The session's time begins at 0 ms, when the session starts. ``play`` is called with each frame of audio and its
    interval in this time. An answer's audio is sent as soon as it is there, but at most LEAD_MS ahead of its time;
    silence is sent once its time has passed. So no answer waits, and the audio sent is as long as the session. Without
    ``silence`` only the audio of answers is sent. ``heard`` is called as the time of the sent audio passes.
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
        #: The pieces that were sent, and whose time has not passed.
        self._ahead: deque[_Piece] = deque()
        #: The time of the session, in milliseconds, up to which audio was sent.
        self.sent_ms = 0.0
        #: The id of the answer that was cut last, and the position up to which it was sent: audio before that is not
        #: sent again.
        self._cut: tuple[str, float] = ("", 0.0)

    @property
    def sounding(self) -> bool:
        """Whether any audio of answers is queued, or was sent and is not yet played to its end."""
        return bool(self._answers or self._ahead)

    @property
    def lasts_ms(self) -> float:
        """How long the audio of answers lasts that is queued, or was sent and is not yet played to its end."""
        queued = sum(len(answer.audio) for answer in self._answers)
        return queued / self._bytes_per_ms + sum(piece.lasts_ms for piece in self._ahead)

    def say(self, answer_id: str, audio: bytes, start_ms: float | None = None) -> None:
        """Queue ``audio``, which begins at ``start_ms`` of the answer, after all audio queued before.

        Audio of an answer that was sent before a cut is left out.
        """
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
        """Note that no more audio of an answer follows."""
        for answer in self._answers:
            if answer.answer_id == answer_id:
                answer.end()

    def has(self, answer_id: str) -> bool:
        """Whether any audio of the answer is queued, or was sent and is not yet played to its end."""
        waits = any(one.answer_id == answer_id for one in self._answers)
        return waits or any(one.answer_id == answer_id for one in self._ahead)

    def duck(self, lowered: bool) -> None:
        """Lower the volume of the audio sent from now on, or restore its full volume. A-law keeps its volume."""
        if self._ducker is not None:
            self._ducker.duck(lowered)
            if not self._answers:
                self._ducker.settle()

    def cut(self) -> list[str]:
        """Drop the queued audio of all answers, but not of a fixture (audio that the client has played to the user).

        Returns the ids of the answers that were complete, and of which audio was dropped.
        """
        dropped = [answer for answer in self._answers if answer.answer_id != FIXTURE]
        if dropped and dropped[0] is self._answers[0]:
            self._cut = (dropped[0].answer_id, dropped[0].sent_ms)
        self._answers = deque(one for one in self._answers if one.answer_id == FIXTURE)
        if self._ducker is not None:
            self._ducker.settle()
        return [answer.answer_id for answer in dropped if answer.ended]

    def pump(self, now_ms: float) -> None:
        """Send queued audio, as far as LEAD_MS allows at ``now_ms``, in milliseconds of the session."""
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
        """Send the audio that is due at ``now_ms``, the end of a frame, and silence where there is none.

        While the client does not read (``blocked``), nothing is sent, and the silence of that time is left out.
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
        """Call ``heard`` for the sent audio that is played by ``now_ms``, in milliseconds of the session."""
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
    """The fixture of a session: audio that the client has played to the user. Only one is played at a time.

    A fixture interrupts speech, and the user is not heard meanwhile. It is not in the history: the model does not know
    of it.
    """

    def __init__(self, dialect: LiveDialect, audio: AudioFormat) -> None:
        """``audio`` is the format of the session."""
        self._dialect = dialect
        self._audio = audio
        self._share = Share(dialect.conversation.account)
        self._event_id: str | None = None
        #: Whether a fixture is being played.
        self.playing = False

    def play(self, fields: Mapping[str, Any], event_id: str | None) -> None:
        """Play the audio in the client's event: the answer is cancelled, and its audio dropped.

        If it raises an InvalidRequest, or the client gets an error as there is no room, nothing was interrupted.
        """
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
        """Return whether ``heard`` is about the fixture. If that is its end, tell the client."""
        if heard.answer_id != FIXTURE:
            return False
        if heard.ended:
            self.playing = False
            self.close()
            self._tell("played")
        return True

    def close(self) -> None:
        """Refund the bytes that are charged to the session."""
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
    """The deltas of one direction's transcript, in order: times never go back, and none is in the future."""

    def __init__(self) -> None:
        self._begun = False
        self._start_ms = 0
        self._end_ms = 0

    def place(self, text: str, start_ms: float, end_ms: float, *, now_ms: int, joins: bool) -> Delta:
        """Return the delta for ``text``, with its times moved into order.

        If it ``joins``, it continues the text before; otherwise a blank separates the two.
        """
        if self._begun and not joins and not text[:1].isspace():
            text = f" {text}"
        self._begun = True
        self._start_ms = min(max(round(start_ms), self._start_ms), now_ms)
        self._end_ms = min(max(round(end_ms), self._start_ms, self._end_ms), now_ms)
        return Delta(text, self._start_ms, self._end_ms)

    @property
    def end_ms(self) -> int:
        """The end of the latest delta, in milliseconds of the time line."""
        return self._end_ms


class HeardText:
    """The transcript of one request's speech, released to the client word by word.

    An interim text releases the words on which it agrees with the interim text before, except the last of them; a
    settled text releases all its words. Released words are never taken back: if the settled text corrects them, only
    the words behind them are released.
    """

    def __init__(self) -> None:
        #: Whether any words of the request were sent.
        self.begun = False
        self._told = 0
        self._last: list[str] = []

    def hear(self, text: str, *, interim: bool) -> str:
        """Take a transcript of the speech since the last settled text. Return the text to send now; it may be ""."""
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
    """The transcript of one answer, released as far as its audio was heard.

    The position in the text follows from the times of words, if the voice gives them, else from the times of clauses.
    """

    def __init__(self) -> None:
        #: Whether any of the text was sent.
        self.begun = False
        #: Text that was not sent yet, except the text in ``_window``.
        self._pieces: deque[str] = deque()
        #: A stretch of the text, from ``_start`` on; and the position up to which the text was sent.
        self._window = ""
        self._start = 0
        self._told = 0
        self._words: deque[Word] = deque()
        self._timed = False
        #: The position in the answer up to which its audio was heard, and up to which its words were sent, in
        #: milliseconds.
        self._heard_ms = 0.0
        self._told_ms = 0.0

    def begin(self) -> bool:
        """Note that text is sent to the client now. Return whether any was sent before."""
        begun, self.begun = self.begun, True
        return begun

    def write(self, text: str) -> None:
        """Add text of the answer."""
        self._pieces.append(text)

    def pronounce(self, words: Sequence[Word]) -> None:
        """Add words with their times in the audio. Ignores those added before, as when a held answer is sent again."""
        self._timed = self._timed or bool(words)
        last_ms = self._words[-1].end_ms if self._words else self._heard_ms
        self._words.extend(word for word in words if word.end_ms > last_ms)

    def heard(self, position_ms: float, entry: LedgerEntry | None) -> Delta | None:
        """Release the text heard up to ``position_ms``, with times in the answer; None if there is no new text.

        ``entry`` is the answer in the ledger, which has the times of its clauses; None if it is not there.
        """
        self._heard_ms = max(self._heard_ms, position_ms)
        return self._words_until(position_ms) if self._timed else self._clauses_until(position_ms, entry)

    def rest(self) -> str:
        """Release all text that is left: the answer was heard to its end."""
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
        """Make ``_window`` hold the text from ``start`` to ``end``, and the next _WINDOW characters not told yet."""
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


# Delegation of a Live session: who does the work that its voice hands over.
#
# With delegation to ``client`` it is the application, with delegation to ``responses`` a second chat of the session.
#
# That chat has instructions, tools and a history of its own. Each piece of work is a response in it, whose events the
# client gets inside of ``response.event``; the client runs the functions that the chat calls, and the talk goes on
# meanwhile. The text of a response without calls is the result, told at the next pause (see ``Tellings``).
#
# The client's items wait in a buffer for ``response.create``. That goes on with every response whose calls all have
# their outputs: two simultaneous pieces of work do not wait for each other. Messages begin a response of no delegation.


#: The function by which the model hands work over. The session does not wait for its result.
DELEGATE: Final = "delegate"
DELEGATE_TOOL: Final[Mapping[str, Any]] = {
    "type": "function",
    "async": True,
    "function": {
        "name": DELEGATE,
        "description": "Hands over what needs data, tools or work outside of this talk. Its result comes later.",
        "parameters": {
            "type": "object",
            "properties": {"task": {"type": "string", "description": "What is to be done, in one sentence."}},
            "required": ["task"],
        },
    },
}
#: The instructions about ``delegate`` for the model, after the client's instructions.
DELEGATE_RULE: Final = (
    "When the user wants something that you cannot know or do in this talk, say in a few words that you look into it, "
    "and call delegate once for it. Its result is told to you later; until then go on talking, and never make it up. "
    "Do not call it for what you can answer, nor a second time for the same thing."
)
#: Delegations of a session that are remembered; to append to an earlier one is an error.
MAX_DELEGATIONS: Final = 256


class Delegations(ABC):
    """Base class of the two kinds of delegation: work that the model of a Live session hands over.

    Methods raise an InvalidRequest to refuse an event of the client.
    """

    def __init__(self, dialect: LiveDialect, settings: Delegation) -> None:
        self._dialect = dialect
        #: The settings in effect, as the client sees them.
        self.shown = settings

    @abstractmethod
    def opened(self, call_id: str, arguments: str) -> None:
        """Begin the work that the model has delegated by a call, whose ``arguments`` are JSON."""

    @abstractmethod
    def receive(self, event: Mapping[str, Any]) -> None:
        """Handle a ``response.create`` or a ``response.item.create`` of the client."""

    @abstractmethod
    def update(self, given: Delegation) -> None:
        """Apply the ``delegation`` of a ``session.update``. Fields that it leaves out do not change.

        Raises an InvalidRequest if it is of another kind.
        """

    def check(self, delegation_id: str) -> None:
        """Raise an InvalidRequest unless the client may append context to this delegation."""
        raise InvalidValue("Unknown client delegation.", param="delegation_id")

    @abstractmethod
    def close(self) -> None:
        """End all work, as the session ends. May be called repeatedly."""


def delegation_created(call_id: str, target: str, offset_ms: int, **fields: Any) -> Event:
    """Return the event that reports a delegation. As in OpenAI's API, it does not contain the task.

    ``target`` is the worker, "client" or "responses"; ``offset_ms`` is a position on the session's time line.
    """
    delegation = {"id": call_id, "type": "delegation", "target": target, **fields}
    return {"type": "session.delegation.created", "offset_ms": offset_ms, "delegation": delegation}


class ClientDelegations(Delegations):
    """Delegations of the type ``client``: the application does the work, and appends the results to the context."""

    def __init__(self, dialect: LiveDialect, settings: ClientDelegation) -> None:
        super().__init__(dialect, settings)
        self._open: dict[str, None] = {}

    def opened(self, call_id: str, arguments: str) -> None:
        self._open[call_id] = None
        keep_newest(self._open, MAX_DELEGATIONS)
        self._dialect.send([delegation_created(call_id, "client", self._dialect.now_ms)])

    def receive(self, event: Mapping[str, Any]) -> None:
        raise UnsupportedParameter(f"{event['type']} needs delegation to responses", param="type")

    def update(self, given: Delegation) -> None:
        if not isinstance(given, ClientDelegation):
            raise immutable("session.delegation.type")
        if given.acknowledgement_delay_ms is not None:
            self.shown = given

    def check(self, delegation_id: str) -> None:
        if delegation_id not in self._open:
            super().check(delegation_id)

    def close(self) -> None:
        self._open.clear()


#: The input of the chat that may wait for ``response.create``: items, and the bytes of their JSON.
MAX_BUFFERED_ITEMS: Final = 128
MAX_BUFFERED_BYTES: Final = 32 << 10
#: Responses whose calls may wait for outputs; beyond that the oldest is given up.
MAX_WAITING: Final = 64
#: The most characters of the conversation that the chat sees with its task, and of a result that is told.
TALK_CHARACTERS: Final = 4000
RESULT_CHARACTERS: Final = 16_000
#: The place of the settings, for errors.
_PLACE: Final = "session.delegation.responses"
#: What the chat is told if the client gives no instructions.
INSTRUCTIONS: Final = (
    "You do the work that the assistant of a spoken talk hands over to you. Use your tools for it, and make nothing "
    "up. Answer with the result alone, briefly and in plain words: it is told by voice."
)
#: Told by the voice in place of a result.
FAILED: Final = "The work could not be completed."
NOTHING: Final = "The work has ended without a result."


@dataclass(slots=True)
class _Response:
    """One response of the chat. ``delegation_id`` is None if the client asked for the response."""

    response_id: str
    delegation_id: str | None
    model: str
    parallel: bool
    created_at: int = field(default_factory=lambda: int(time.time()))
    #: The calls that wait for their outputs, by id, and the outputs that the client has sent.
    calls: dict[str, Item | None] = field(default_factory=dict)
    _events: int = 0

    def wait_for(self, call_ids: Iterable[str]) -> None:
        """Set the ids of the calls with which the response has ended."""
        self.calls = dict.fromkeys(call_ids)

    @property
    def ready(self) -> bool:
        """Whether the client has sent the outputs of all calls."""
        return None not in self.calls.values()

    def event(self, kind: str, **fields: Any) -> Event:
        """Return an event of the Responses API, wrapped in the Live API's ``response.event``."""
        nested = {"type": kind, "sequence_number": self._events, **fields}
        self._events += 1
        return {"type": "response.event", "event": nested, "delegation_id": self.delegation_id}

    def lifecycle(self, status: str, *, usage: Usage | None = None, error: OmniError | None = None) -> Event:
        """Return the event for a change to ``status``, with a snapshot of the response but not of its output."""
        snapshot = {
            "id": self.response_id,
            "object": "response",
            "created_at": self.created_at,
            "status": status,
            "model": self.model,
            "instructions": None,
            "output": [],
            "tools": [],
            "tool_choice": "auto",
            "parallel_tool_calls": self.parallel,
            "metadata": {},
            "error": None if error is None else {"code": "server_error", "message": error.message},
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "usage": None if usage is None else _usage(usage),
        }
        return self.event("response.created" if status == "in_progress" else f"response.{status}", response=snapshot)


class ResponsesDelegations(Delegations):
    """Delegations of the type ``responses``: a second chat does the work, and its answers are the results.

    Raises an InvalidRequest for wrong settings. The chat opens with the first work, and opens anew if it has ended by a
    failure of its engine.
    """

    def __init__(self, dialect: LiveDialect, settings: ResponsesDelegation) -> None:
        super().__init__(dialect, settings)
        self._settings = settings.responses or ResponsesConfig()
        self._check(self._settings)
        self._chat: Chat | None = None
        self._share = Share(dialect.conversation.account)
        #: The responses that are being made, by the ids of the chat's requests; and those that wait for outputs.
        self._running: dict[str, _Response] = {}
        self._waiting: dict[str, _Response] = {}
        self._errors: dict[str, OmniError] = {}
        #: The messages that wait for ``response.create``; outputs wait in their responses. Their number and size.
        self._messages: list[Item] = []
        self._buffered = 0

    # the settings

    def _check(self, settings: ResponsesConfig) -> dict[str, Any]:
        """Return the chat's settings as fields of ``session_config``. Raises an InvalidRequest that names the field."""
        chosen = tool_choice(settings.tool_choice)
        try:
            given = tools(settings.tools)
            check_tools(given, chosen)
            self._dialect.factory.any_model.check(settings.model)
        except InvalidRequest as error:
            raise error.about(param=f"{_PLACE}.{error.param or 'model'}") from None
        return {
            "instructions": settings.instructions or INSTRUCTIONS,
            "tools": given,
            "tool_choice": chosen,
            "sampling": {"max_tokens": settings.max_output_tokens},
        }

    def _configure(self, chat: Chat) -> None:
        able, settings = chat.conversation.engine.capabilities, self._settings
        fields = self._check(settings)
        if "max_tokens" not in able.sampling:
            del fields["sampling"]
        chat.configure(**fields)
        wanted = {
            "reasoning_effort": (settings.reasoning or {}).get("effort"),
            "verbosity": (settings.text or {}).get("verbosity"),
            "service_tier": settings.service_tier,
        }
        upstream = {name: value for name, value in wanted.items() if name in able.upstream and isinstance(value, str)}
        parallel = settings.parallel_tool_calls is not False
        chat.conversation.answer_with(AnswerOptions(parallel_tool_calls=parallel, upstream=upstream))

    def update(self, given: Delegation) -> None:
        if not isinstance(given, ResponsesDelegation):
            raise immutable("session.delegation.type")
        changes = {} if given.responses is None else _set_fields(given.responses)
        settings = structs.replace(self._settings, **changes)
        self._check(settings)
        before, self._settings = self._settings, settings
        if self._chat is not None and not self._chat.has_ended:
            try:
                self._configure(self._chat)
            except OmniError as error:
                self._settings = before
                raise _as_refusal(error) from None
        shown = structs.replace(self.shown, **_set_fields(given))
        self.shown = structs.replace(shown, responses=settings)

    # work

    def opened(self, call_id: str, arguments: str) -> None:
        response_id = new_id("resp_")
        created = delegation_created(call_id, "responses", self._dialect.now_ms, response_id=response_id)
        self._dialect.send([created])
        text = f"{self._talk()}The task: {_task(arguments)}"
        self._ask([InputChunk(Modality.TEXT, text.encode())], call_id, response_id)

    def _talk(self) -> str:
        """Return the end of the spoken conversation as text, so that the chat understands the task."""
        lines: list[str] = []
        size = 0
        for message in reversed(self._dialect.conversation.ledger.history.messages()):
            if message.role in ("user", "assistant") and message.text.strip():
                lines.append(f"{message.role.capitalize()}: {message.text.strip()}")
                size += len(lines[-1])
            if size > TALK_CHARACTERS:
                break
        talk = "\n".join(reversed(lines))[-TALK_CHARACTERS:]
        return f"The talk so far:\n{talk}\n\n" if talk else ""

    def _ask(self, chunks: Iterable[InputChunk], delegation_id: str | None, response_id: str | None = None) -> None:
        """Begin a response of the chat to ``chunks``. ``delegation_id`` is None if the client asked for it."""
        parallel = self._settings.parallel_tool_calls is not False
        response = _Response(response_id or new_id("resp_"), delegation_id, self._settings.model or "", parallel)
        self._dialect.send([response.lifecycle("in_progress")])
        try:
            chat = self._open_chat()
            request_id = chat.conversation.respond([*chunks], chat.conversation.configuration.effective)
        except OmniError as error:
            self._fail(response, error)
            return
        self._running[request_id] = response  # if it was refused, its final is on its way

    def _open_chat(self) -> Chat:
        if self._chat is None or self._chat.has_ended:
            chat = self._dialect.factory.chats.open(self._dialect.conversation, self._received)
            try:
                self._configure(chat)
            except BaseException:
                chat.close()
                raise
            self._chat = chat
            self._waiting.clear()
        return self._chat

    def close(self) -> None:
        if self._chat is not None:
            self._chat.close()
        self._running.clear()
        self._waiting.clear()
        self._messages.clear()
        self._share.resize(0)

    # events of the client

    def receive(self, event: Mapping[str, Any]) -> None:
        if event["type"] == "response.item.create":
            self._buffer(object_field(event, "item"))
        else:
            self._create()

    def _buffer(self, fields: Mapping[str, Any]) -> None:
        size = self._share.size + len(orjson.dumps(fields))
        if self._buffered >= MAX_BUFFERED_ITEMS or size > MAX_BUFFERED_BYTES:
            raise _buffer_full()
        if isinstance(fields.get("content"), str):  # the short form of the Responses API
            fields = {**fields, "content": [{"type": "input_text", "text": fields["content"]}]}
        item = read_item({"type": "message", **fields}, new_id("item_"))
        if item.kind == "function_call_output":
            response = next((one for one in self._waiting.values() if item.call_id in one.calls), None)
            if response is None or response.calls[item.call_id] is not None:
                raise InvalidValue("no call of this id waits for an output", param="item.call_id")
            self._hold(size)
            response.calls[item.call_id] = item
        elif not item.chunks or any(chunk.modality is not Modality.TEXT for chunk in item.chunks):
            raise UnsupportedParameter("only texts of the user, and outputs of functions, are taken here", param="item")
        else:
            self._hold(size)
            self._messages.append(item)

    def _hold(self, size: int) -> None:
        try:
            self._share.resize(size)
        except EngineOverloaded:  # which would end the session
            raise _buffer_full() from None
        self._buffered += 1

    def _create(self) -> None:
        ready = [one for one in self._waiting.values() if one.ready]
        if not ready and self._waiting:
            message = "every call needs its output before the response can go on"
            raise RealtimeRefusal("function_call_outputs_required", message)
        if not ready and not self._messages:
            raise InvalidValue("there is nothing to respond to", param="type")
        messages, self._messages = self._messages, []
        kept = (item for one in self._waiting.values() if not one.ready for item in one.calls.values() if item)
        left = [len(item.text) for item in kept]
        self._buffered = len(left)
        self._share.resize(min(self._share.size, sum(left)))
        for one in ready:  # the first may open a new chat, and then none waits any more
            self._waiting.pop(one.response_id, None)
            self._ask(as_input(item for item in one.calls.values() if item is not None), one.delegation_id)
        if messages:
            self._ask(as_input(messages), None)

    # messages of the chat

    def _received(self, message: ServerMessage) -> None:
        match message:
            case OmniError(request_id=str(request_id)):
                self._errors[request_id] = message
            case FinalChunk(request_id=request_id) if request_id in self._running:
                error = self._errors.pop(request_id, None)
                self._finish(self._running.pop(request_id), message, error)
            case _:
                pass  # the ledger of the chat has what its answers say

    def _finish(self, response: _Response, final: FinalChunk, error: OmniError | None) -> None:
        assert self._chat is not None
        entry = self._chat.conversation.ledger.find(final.request_id)
        if error is not None or entry is None or final.finish_reason in (FinishReason.ERROR, FinishReason.CANCELLED):
            self._fail(response, error)
            return
        text, calls = entry.answer_text, [call for call in entry.tool_calls if call.is_whole]
        items = [*([_message(text)] if text.strip() else []), *map(_function_call, calls)]
        for index, item in enumerate(items):
            self._dialect.send([response.event("response.output_item.done", output_index=index, item=item)])
        status = "incomplete" if final.finish_reason is FinishReason.LENGTH else "completed"
        self._dialect.send([response.lifecycle(status, usage=final.usage)])
        if not calls:
            self._tell(text.strip() or NOTHING, response)
            return
        response.wait_for(call.id for call in calls)
        self._waiting[response.response_id] = response
        keep_newest(self._waiting, MAX_WAITING)

    def _fail(self, response: _Response, error: OmniError | None) -> None:
        failure = error or EngineOverloaded("the work was given up")
        self._dialect.send([response.lifecycle("failed", error=failure)])
        self._tell(FAILED, response)

    def _tell(self, text: str, response: _Response) -> None:
        if self._dialect.closed:
            return
        try:
            self._dialect.conversation.tell(Telling(text[:RESULT_CHARACTERS], about=response.delegation_id))
        except EngineOverloaded as error:
            self._dialect.send([self._dialect.error(error)])


def _buffer_full() -> RealtimeRefusal:
    message = f"at most {MAX_BUFFERED_ITEMS} items and {MAX_BUFFERED_BYTES} bytes may wait for response.create"
    return RealtimeRefusal("response_input_buffer_full", message, param="item")


def _task(arguments: str) -> str:
    """Return the field ``task`` of a call's arguments, which are JSON; without it, the arguments themselves."""
    try:
        found = msgspec.json.decode(arguments, type=dict[str, Any]).get("task")
    except (msgspec.DecodeError, RecursionError):
        return arguments
    return found if isinstance(found, str) and found.strip() else arguments


def _set_fields(given: msgspec.Struct) -> dict[str, Any]:
    """Return the fields of an update that are not None."""
    return {name: value for name, value in structs.asdict(given).items() if value is not None}


def _as_refusal(error: OmniError) -> OmniError:
    """Return an error of the chat as an InvalidRequest, which refuses the event but does not end the session."""
    return error if isinstance(error, InvalidRequest) else InvalidValue(error.message, param=_PLACE)


def _message(text: str) -> dict[str, Any]:
    content = {"type": "output_text", "text": text, "annotations": []}
    return {"id": new_id("msg_"), "type": "message", "role": "assistant", "status": "completed", "content": [content]}


def _function_call(call: ToolCall) -> dict[str, Any]:
    return {
        "id": new_id("fc_"),
        "type": "function_call",
        "status": "completed",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
    }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.input_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens or 0, "cache_write_tokens": 0},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.input_tokens + usage.output_tokens,
    }

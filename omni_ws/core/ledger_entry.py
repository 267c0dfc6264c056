"""LedgerEntry: one request and its answer, with what was said, made, sent and played of the answer. See Ledger.

The functions at the end compute which part of a spoken text was heard, from how much of its sound was played.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from sys import getsizeof
from typing import Final, NamedTuple, TypeAlias

import msgspec

from omni_ws.core.chunks import SAMPLE_BYTES, OutputChunk, OutputModality, ToolCall, ToolCallFragment, Word
from omni_ws.core.history import UNSPACED, Speech

#: The text of an entry that is kept for the history, in characters or bytes of input; the history holds no more.
MAX_KEPT_TEXT: Final = 1 << 18
#: The words or clauses of an answer whose times are kept: an hour of speech.
MAX_MARKS: Final = 1 << 14
#: The size of a word or a clause, as it counts against MAX_DETAIL.
MARK_SIZE: Final = 16
#: The memory that an entry takes, and that each word, clause and fragment of a call takes.
ENTRY_BYTES: Final = 1024
MARK_BYTES: Final = 160
#: The most pieces in which the text of an answer is kept; more are joined.
MAX_PIECES: Final = 256


class Clause(NamedTuple):
    """A piece of an answer: its text from ``start`` to ``end``, and its sound from ``start_ms`` to ``end_ms``."""

    start_ms: float
    end_ms: float
    start: int
    end: int


class BoundedText(msgspec.Struct, omit_defaults=True):
    """The pieces of a text, up to MAX_KEPT_TEXT characters together; ``length`` counts the rest, too."""

    pieces: list[str] = []
    length: int = 0

    def append(self, piece: str) -> None:
        self.length += len(piece)
        if self.length > MAX_KEPT_TEXT:
            piece = piece[: max(0, MAX_KEPT_TEXT - self.length + len(piece))]
        if piece:
            self.pieces.append(piece)

    def joined(self) -> str:
        return "".join(self.pieces)

    def join(self) -> None:
        """Join all pieces into one."""
        self.pieces = [self.joined()]


class SentCall(msgspec.Struct):
    """The fragments of a tool call that were sent."""

    id: str = ""
    name: str = ""
    arguments: list[str] = []
    length: int = 0

    def append(self, fragment: ToolCallFragment) -> None:
        self.id, self.name = fragment.id or self.id, fragment.name or self.name
        self.arguments.append(fragment.arguments[: max(0, MAX_KEPT_TEXT - self.length)])
        self.length += len(fragment.arguments)

    def take_back(self, fragment: ToolCallFragment) -> None:
        """Remove the latest fragment, which was not sent after all."""
        self.arguments.pop()
        self.length -= len(fragment.arguments)


class SentAudio(msgspec.Struct, frozen=True):
    """Audio that was sent, its interval on the answer's time line, and the bytes that are charged for it."""

    chunk: OutputChunk
    start_ms: float
    end_ms: float
    cost: int


class Unheard(msgspec.Struct):
    """The part of an answer that the client has not heard, kept to be sent again when its playback resumes.

    It has the newest audio that was sent, and the unsent outputs that are set aside while the answer is held. Both are
    charged to a budget. The oldest audio beyond MAX_UNHEARD_BYTES is dropped; all audio is dropped while more than half
    of the server's budget is used.
    """

    kept: list[SentAudio] = []
    charged: int = 0
    #: The end of the newest audio that was dropped unheard.
    missing_ms: float = 0
    aside: list[OutputChunk] = []
    aside_cost: int = 0

    def keep(self, audio: SentAudio) -> None:
        self.kept.append(audio)
        self.charged += audio.cost

    def drop_oldest(self, *, missing: bool = False) -> int:
        """Drop the oldest audio and return its bytes. ``missing``: it was not heard, and now cannot be sent again."""
        oldest = self.kept.pop(0)
        self.charged -= oldest.cost
        if missing:
            self.missing_ms = oldest.end_ms
        return oldest.cost

    def behind(self, position_ms: float) -> list[OutputChunk]:
        """Return the audio after this position, then the outputs that were set aside.

        A chunk of raw samples around the position is cut there; other formats are returned whole.
        """
        # What was set aside was never sent, wherever the clock says that playback was, and is returned, too.
        unsent_ms = min((one.start_ms for one in self.aside if one.start_ms is not None), default=float("inf"))
        sent = [one for one in self.kept if one.end_ms > position_ms]
        sent = [one for one in sent if round(max(one.start_ms, position_ms)) < unsent_ms]
        return [*(_behind(one, position_ms) for one in sent), *self.aside]

    def set_aside(self, outputs: Sequence[OutputChunk] = (), cost: int = 0) -> int:
        """Set ``outputs`` aside, in place of those set aside before; return the bytes charged for the latter."""
        before, self.aside, self.aside_cost = self.aside_cost, list(outputs), cost
        return before


class LedgerEntry(msgspec.Struct, kw_only=True, eq=False, omit_defaults=True):
    """One request and its answer. Changed only by its methods, which the ledger and the writer of the answer call."""

    request_id: str
    #: Whether the answer is to be spoken, and whether its text is sent.
    speaks: bool = False
    writes: bool = True
    #: Text of the input, and results of tools by call id; and how many bytes of both may still be kept.
    typed: bytearray = msgspec.field(default_factory=bytearray)
    results: dict[str, bytearray] = {}
    input_room: int = MAX_KEPT_TEXT
    #: The settled transcripts of the input.
    heard: BoundedText = msgspec.field(default_factory=BoundedText)
    #: The language of the latest of them (primary subtag of RFC 5646), if it is known.
    language: str | None = None
    #: The answer's text as the engine said it, and how many characters of it were sent as text.
    said: BoundedText = msgspec.field(default_factory=BoundedText)
    shown: int = 0
    calls: dict[int, SentCall] = {}
    #: The words of the audio with their times, or the clauses if the engine reports no words. Those before ``base_ms``
    #: are dropped; the text up to ``base_end`` corresponds to them.
    words: list[Word] = []
    clauses: list[Clause] = []
    base_ms: float = 0
    base_end: int = 0
    #: The number of the first audio output, and when it was sent; None before.
    first_number: int | None = None
    first_sent: float = 0
    #: The end of the audio that was made, and of the audio that was sent.
    made_ms: float = 0
    sent_ms: float = 0
    #: The position of the client's latest report; None without a report.
    reported_ms: float | None = None
    #: The position at which the client stopped playing; None if the answer is not cut.
    cut_ms: float | None = None
    #: Whether the answer was cut because the speaker continued before any of its audio could be heard.
    unheard: bool = False
    #: Whether a request has read the history since the cut.
    read: bool = False
    #: The position at which the answer is held, and the end of the audio sent by then; None if it is not held.
    held_ms: float | None = None
    sent_before_hold_ms: float = 0
    kept: Unheard | None = None
    #: Whether the final was sent; whether the engine completed the answer; whether the answer was cancelled.
    finished: bool = False
    whole: bool = False
    cancelled: bool = False
    #: Whether the history keeps the input, and the answer.
    input_kept: bool = True
    answer_kept: bool = True
    speech: Speech | None = None
    words_unknown: bool = False
    #: How often a client that reports had played everything before more was sent, and for how many seconds in all.
    underruns: int = 0
    underrun_sec: float = 0
    #: The least audio that was sent and not played, at any report. None without reports.
    least_lead_ms: float | None = None

    # what was said

    def take_text(self, payload: bytes, call_id: str | None = None) -> None:
        """Add text of the input, or of the result of the tool call ``call_id``, as far as there is ``input_room``."""
        kept = self.typed if call_id is None else self.results.setdefault(call_id, bytearray())
        piece = payload[: self.input_room]
        kept += piece
        self.input_room -= len(piece)

    def hear(self, transcript: str, *, language: str | None = None) -> None:
        """Add a settled transcript of the input, in ``language`` if that is known."""
        self.heard.append(transcript)
        self.language = language or self.language

    def say(self, text: str) -> None:
        """Add text of the answer."""
        self.said.append(text)
        if len(self.said.pieces) > MAX_PIECES:  # small pieces take more memory than their text
            self.said.join()
        if self.writes:
            self.shown = self.said.length

    def call(self, fragment: ToolCallFragment) -> None:
        """Add a fragment of a tool call, which was sent."""
        self.calls.setdefault(fragment.index, SentCall()).append(fragment)

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls that were sent, in the order of their beginnings; one that was cut off has only what was sent."""
        return tuple(self.calls_by_index.values())

    @property
    def calls_by_index(self) -> dict[int, ToolCall]:
        """The calls that were sent, by their indices in the answer."""
        return {index: ToolCall(one.id, one.name, "".join(one.arguments)) for index, one in self.calls.items()}

    @property
    def user_text(self) -> str:
        """The words of the user, typed and spoken."""
        heard = (piece.strip() for piece in self.heard.pieces)  # a piece may begin with a blank, or have no words
        return " ".join(filter(None, [self.typed.decode("utf-8", "replace"), *heard]))

    @property
    def answer_text(self) -> str:
        """The text of the answer that was sent or, of an answer that is only spoken, all text that the engine made."""
        text = self.said.joined()
        return text[: self.shown] if self.writes else text

    def pronounce(self, words: Sequence[Word]) -> None:
        """Add words of the audio, with their times."""
        self.words += words
        if len(self.words) > MAX_MARKS:
            self._sum_up()

    @property
    def read_end(self) -> int:
        """The index in the text at which the last clause of the audio ends."""
        return self.clauses[-1].end if self.clauses else self.base_end

    def read_to(self, text_end: int, start_ms: float, end_ms: float) -> None:
        """Add the audio from ``start_ms`` to ``end_ms`` to the clause that ends at index ``text_end`` of the text.

        The clause begins where the one before ends.
        """
        last = self.clauses[-1] if self.clauses else Clause(start_ms, start_ms, self.base_end, self.base_end)
        if self.clauses and text_end <= last.end:
            self.clauses[-1] = last._replace(end_ms=end_ms)
        else:
            self.clauses.append(Clause(start_ms, end_ms, last.end, text_end))
        if len(self.clauses) > MAX_MARKS:
            self._sum_up()

    def _sum_up(self) -> None:
        """Drop the older half of the words or clauses; keep the position of their end in the audio and in the text."""
        old = self.words[: MAX_MARKS // 2]
        if old and len(self.words) > MAX_MARKS:
            self.base_end = end_of_words(self.said.joined(), old, begin=self.base_end)
            self.base_ms = old[-1].start_ms
            del self.words[: MAX_MARKS // 2]
        else:
            last = self.clauses[MAX_MARKS // 2 - 1]
            self.base_ms, self.base_end = last.end_ms, last.end
            del self.clauses[: MAX_MARKS // 2]

    @property
    def size(self) -> int:
        """The size of the text, words and clauses that are kept, in characters."""
        return min(self.said.length, MAX_KEPT_TEXT) + MARK_SIZE * (len(self.words) + len(self.clauses))

    @property
    def memory(self) -> int:
        """The bytes of the entry without speech and audio, which are charged as they arrive."""
        texts = sum(map(getsizeof, (*self.said.pieces, *self.heard.pieces)))
        calls = sum(MARK_BYTES * len(one.arguments) + one.length for one in self.calls.values())
        marks = len(self.words) + len(self.clauses) + len(self.results)
        return ENTRY_BYTES + MAX_KEPT_TEXT - self.input_room + texts + calls + MARK_BYTES * marks

    # The end of the answer, and its playback

    def end(self, *, whole: bool, cancelled: bool, speech: Speech | None, words_unknown: bool) -> None:
        """End the entry after its final output: see ``Ledger.finish``."""
        self.finished, self.whole, self.cancelled = True, whole, cancelled
        self.speech, self.words_unknown = speech, words_unknown

    def hear_late(self, transcript: str) -> None:
        """Add the transcript of speech whose words were not known; its audio is dropped."""
        self.hear(transcript)
        self.speech, self.words_unknown = None, False

    def leave_out(self, roles: Container[str]) -> None:
        """Exclude the entry's messages of these roles from what the ledger writes into the history from now on."""
        self.input_kept = self.input_kept and "user" not in roles
        self.answer_kept = self.answer_kept and "assistant" not in roles

    def begin_to_play(self, number: int, now: float) -> None:
        """Record that the first audio is sent, as output ``number``, at the time ``now``."""
        self.first_number, self.first_sent = number, now

    def move(self, later: float) -> None:
        """Convert the times to another clock, which is ``later`` seconds ahead."""
        self.first_sent += later

    def send_to(self, end_ms: float) -> None:
        """Record that the audio up to ``end_ms`` was sent."""
        self.sent_ms = end_ms
        if end_ms > self.made_ms:
            self.made_ms = end_ms

    def run_dry(self, late_sec: float) -> None:
        """Count an underrun: audio was sent ``late_sec`` after the client had played all audio before it.

        Not counted before the client's first report of this answer.
        """
        if self.reported_ms is not None:
            self.underruns += 1
            self.underrun_sec += late_sec

    def report(self, played_ms: float) -> None:
        """Record that the client has played ``played_ms`` of the answer."""
        self.reported_ms = played_ms
        lead_ms = self.sent_ms - played_ms
        self.least_lead_ms = lead_ms if self.least_lead_ms is None else min(lead_ms, self.least_lead_ms)

    def report_whole(self) -> None:
        """Record that all audio that was sent is played, since the client plays a later answer.

        Does nothing if the client never reported this answer, or if the answer is cut.
        """
        if self.reported_ms is not None and self.cut_ms is None:
            self.reported_ms = self.sent_ms

    def report_cut(self, played_ms: float) -> None:
        """Record the client's report of the position at which it stopped playing the answer."""
        self.reported_ms = self.cut_ms = played_ms

    def cut(self, at_ms: float) -> None:
        """Cut the answer at ``at_ms``, or at the end of the sent audio if that is earlier."""
        self.cut_ms = min(at_ms, self.sent_ms)

    def cut_first(self, at_ms: float, *, unheard: bool) -> None:
        """Cut an answer that is not cut yet. ``unheard``: see ``Ledger.cut``."""
        unheard = unheard or self.held_ms is not None  # it is held because the speaker continued
        self.held_ms = None
        self.cut(at_ms)
        self.unheard = unheard and self.speaks and not self.sent_ms

    def settle_cut(self) -> None:
        """Fix where the answer was cut, since a request reads the history: no later playback report moves the place."""
        self.read = self.read or self.cut_ms is not None

    def withdraw(self, chunks: Sequence[OutputChunk]) -> None:
        """Remove the latest outputs of the answer, which were not sent after all."""
        for chunk in reversed(chunks):
            if chunk.modality is OutputModality.AUDIO and chunk.start_ms is not None:
                self.sent_ms = min(self.sent_ms, chunk.start_ms)
            elif chunk.modality is OutputModality.TEXT:
                self.shown -= len(chunk.text)
            elif chunk.tool_call is not None:
                _take_back(self.calls, chunk.tool_call)
        if self.cut_ms is not None:
            self.cut(self.cut_ms)

    def hold(self, position_ms: float) -> Unheard:
        """Hold the answer at ``position_ms``. Return the part that was not heard, which is kept to be sent again."""
        self.held_ms, self.sent_before_hold_ms = position_ms, self.sent_ms
        return self.resumable()

    def go_on(self, outputs: Iterable[OutputChunk]) -> None:
        """Resume a held answer; ``outputs`` are sent first."""
        for chunk in outputs:
            if chunk.modality is OutputModality.TEXT:
                self.shown += len(chunk.text)
            elif chunk.tool_call is not None:
                self.call(chunk.tool_call)
        self.held_ms, self.sent_ms = None, self.sent_before_hold_ms

    def resumable(self) -> Unheard:
        """Return the part of the answer that was not heard; begin to keep it if it was not kept so far."""
        if self.kept is None:
            self.kept = Unheard()
        return self.kept

    def keep_no_audio(self) -> int:
        """Drop the kept part of the answer that was not heard. Return the bytes that were charged for this part."""
        kept, self.kept = self.kept, None
        return 0 if kept is None else kept.charged + kept.aside_cost

    def forget(self) -> None:
        """Drop texts, calls, words and clauses: the history has all that is still needed."""
        self.said, self.heard = BoundedText(), BoundedText()
        self.typed, self.results, self.calls, self.speech = bytearray(), {}, {}, None
        self.words, self.clauses = [], []


def _take_back(calls: dict[int, SentCall], fragment: ToolCallFragment) -> None:
    """Remove the latest fragment of a call, and the call if no fragment is left."""
    call = calls.get(fragment.index)
    if call is None:
        return
    call.take_back(fragment)
    if not call.arguments:
        del calls[fragment.index]


def _behind(sent: SentAudio, position_ms: float) -> OutputChunk:
    chunk, audio = sent.chunk, sent.chunk.format
    if position_ms <= sent.start_ms or audio is None or not audio.is_raw:
        return chunk
    samples = int((position_ms - sent.start_ms) * audio.sample_rate / 1000)
    return msgspec.structs.replace(
        chunk,
        payload=chunk.payload[samples * SAMPLE_BYTES[audio.encoding] :],
        start_ms=round(sent.start_ms + samples * 1000 / audio.sample_rate),
        words=tuple(word for word in chunk.words if word.end_ms > position_ms),
    )


# Which part of a spoken text was heard.

#: The most characters between two words that a voice pronounced: a voice skips what it cannot pronounce.
MAX_SKIPPED_CHARACTERS: Final = 200
#: The assumed pace of a voice in characters a second, for scripts with blanks, and for those without.
USUAL_PACE: Final = 12.0
USUAL_PACE_UNSPACED: Final = 4.5

_UNSPACED: Final = re.compile(f"[{UNSPACED}]")


class SpokenSpan(NamedTuple):
    """A piece of a text that is read aloud, from ``start`` to ``end``; ``length`` is the length of its spoken form."""

    start: int
    end: int
    length: int


#: Returns the pieces of a text that a voice reads, in order. Code, addresses and markup may be in none of them.
Read: TypeAlias = Callable[[str], Sequence[SpokenSpan]]


def read_all(text: str) -> Sequence[SpokenSpan]:
    """Return the whole text as one piece: everything is read aloud as it is written."""
    return [SpokenSpan(0, len(text), len(text))]


def usual_pace(text: str) -> float:
    """Return the assumed pace of an unknown voice for this text, in characters a second."""
    unspaced = sum(1 for _ in _UNSPACED.finditer(text))
    return USUAL_PACE_UNSPACED if unspaced * 2 > len(text) else USUAL_PACE


def end_of_words(text: str, words: Iterable[Word], *, begin: int = 0) -> int:
    """Return the index in ``text``, which is searched from ``begin`` on, at which the last of ``words`` ends.

    Words that are not found are skipped. Punctuation after the last word is included, unless the voice reported the
    index.
    """
    end, exact = begin, False
    for end, exact in ends_of_words(text, words, begin=begin):  # noqa: B007
        pass
    if not exact and end > begin:
        end = _behind_marks(text, end)
    return end


def ends_of_words(text: str, words: Iterable[Word], *, begin: int = 0) -> Iterator[tuple[int, bool]]:
    """Yield, for each of ``words``, the index in ``text`` at which it ends, and whether the voice reported this index.

    A word without a reported index is searched for in ``text``, from ``begin`` on; if it is not found, the index of
    the word before is yielded again.
    """
    lowered, end, exact = _lowered(text), begin, False
    for word in words:
        if word.text_end is not None:
            end, exact = max(end, min(word.text_end, len(text))), True
        else:
            spoken = _lowered(word.text.strip())
            found = lowered.find(spoken, end, end + MAX_SKIPPED_CHARACTERS + len(spoken)) if spoken else -1
            if found >= 0:
                end, exact = found + len(spoken), False
        yield end, exact


def end_of_clauses(
    text: str, clauses: Sequence[Clause], heard_ms: float, *, whole: bool, pace: float | None, read: Read
) -> int:
    """Return the index in ``text`` up to which ``clauses``, in order, were heard, rounded down to whole words.

    ``whole``: the audio of the last clause is complete. Otherwise the clause is assumed to last at least as long as its
    text takes at ``pace``, in characters a second; None for an unknown pace. ``read`` returns the pieces of a text that
    the voice reads aloud.
    """
    end = clauses[0].start if clauses else 0
    for number, clause in enumerate(clauses):
        complete = whole or number < len(clauses) - 1
        if complete and clause.end_ms <= heard_ms:
            end = clause.end
            continue
        if clause.start_ms >= heard_ms:
            break
        piece = text[clause.start : clause.end]
        pieces = read(piece)
        length = sum(one.length for one in pieces)
        lasts = clause.end_ms - clause.start_ms
        if not complete:
            lasts = max(lasts, length * 1000 / (pace or usual_pace(piece)))
        share = min(1.0, (heard_ms - clause.start_ms) / lasts) if lasts > 0 else 1.0
        return clause.start + _whole_words(piece, _index_of(piece, pieces, int(length * share)))
    return end


def audible(part: str) -> str:
    """Return ``part`` up to its last word, with the punctuation that closes it: what follows has no sound.

    Empty if ``part`` has no word at all.
    """
    last = len(part)
    while last and not part[last - 1].isalnum():
        last -= 1
    return part[: _behind_marks(part, last)].rstrip(_OPENING_AT_END).rstrip() if last else ""


#: Brackets and quotation marks that only open: what they would enclose was not heard.
_OPENING_AT_END: Final = "([{<¿¡“‘«„‚「『（【《"


def _index_of(text: str, pieces: Sequence[SpokenSpan], length: int) -> int:
    """Return the index in ``text`` that is reached when ``length`` characters of its spoken form have been read."""
    end = 0
    for piece in pieces:
        if length < piece.length:
            # In a piece whose read form is longer or shorter than its text, the length counts in proportion.
            return piece.start + (piece.end - piece.start) * length // piece.length if length else end
        length -= piece.length
        end = piece.end
    return len(text)


def _whole_words(text: str, index: int) -> int:
    """Return ``index``, or the beginning of the word if ``index`` is inside a word."""
    if index >= len(text):
        return len(text)
    end = index
    while end < len(text) and not text[end].isspace():  # is any of the word after the index?
        if text[end].isalnum():
            break
        end += 1
    else:
        return end
    if _UNSPACED.match(text[index]) or (index and _UNSPACED.match(text[index - 1])):
        return index
    while index and not text[index - 1].isspace() and not _UNSPACED.match(text[index - 1]):
        index -= 1
    return index


def _behind_marks(text: str, end: int) -> int:
    """Return the index after the punctuation that directly follows ``end``; ``end`` if none does."""
    while end < len(text) and not text[end].isspace() and not text[end].isalnum():
        end += 1
    return end


def _lowered(text: str) -> str:
    """Return the text in lower case with the same length, so that indices stay valid: "i" replaces "İ"."""
    return text.replace("İ", "i").lower()

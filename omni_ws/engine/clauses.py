"""Text as engines process it: earlier parts of the user's message, notes on the language, pieces and clauses."""

from __future__ import annotations

import asyncio
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Final, NamedTuple

from msgspec import structs

from omni_ws.core.chunks import InputChunk, Modality
from omni_ws.core.history import Message, Speech
from omni_ws.core.json_values import language_name
from omni_ws.engine.base import Engine, GenerationRequest, HeardLanguage, InputSource
from omni_ws.engine.channel import Channel
from omni_ws.engine.spoken.languages import PhraseWords, abbreviations_of
from omni_ws.engine.threads import end_tasks


class EarlierParts(ABC):
    """The earlier parts of a user message: turns whose answers were cut off before the user heard any of them."""

    @property
    @abstractmethod
    def known(self) -> bool:
        """Whether ``chunks`` returns without waiting: the speech of all earlier parts is transcribed."""

    @abstractmethod
    async def chunks(self) -> tuple[InputChunk, ...]:
        """Wait for the transcripts, and return the parts in order: as text, or as audio if there is no transcript."""


class ContinuedInput:
    """The input of a request that continues a message: an InputSource of the ``earlier`` parts and the ``own`` input.

    A blank separates the two texts, unless white space does. An engine that can process ``own`` before the earlier
    parts are known reads the two attributes instead of iterating.
    """

    def __init__(self, earlier: EarlierParts, own: InputSource) -> None:
        self.earlier = earlier
        self.own = own

    def __aiter__(self) -> AsyncIterator[InputChunk]:
        return _Continued(self.earlier, aiter(self.own))


def own_part(source: InputSource) -> InputSource:
    """Return the input of a request without the earlier parts of its message, for engines that ignore these parts."""
    return source.own if isinstance(source, ContinuedInput) else source


class _Continued(AsyncIterator[InputChunk]):
    def __init__(self, earlier: EarlierParts, own: AsyncIterator[InputChunk]) -> None:
        self._earlier: EarlierParts | None = earlier
        self._own = own
        self._before: list[InputChunk] = []
        #: The last chunk of the earlier parts, until the first of the own ones.
        self._last: InputChunk | None = None

    async def __anext__(self) -> InputChunk:
        if self._earlier is not None:
            self._before = [*await self._earlier.chunks()]
            self._earlier = None
        if self._before:
            self._last = self._before.pop(0)
            return self._last
        chunk = await anext(self._own)
        last, self._last = self._last, None
        return chunk if last is None else apart(last, chunk)


def apart(before: InputChunk, chunk: InputChunk) -> InputChunk:
    """Return ``chunk``, with a blank before its text if no white space separates it from the text of ``before``."""
    texts = before.modality is Modality.TEXT and chunk.modality is Modality.TEXT and chunk.tool_call_id is None
    if not texts or not chunk.payload or before.payload[-1:].isspace() or chunk.payload[:1].isspace():
        return chunk
    return structs.replace(chunk, payload=b" " + chunk.payload)


# The turns of a history.


def whole_turns(history: Sequence[Message]) -> list[tuple[Message, ...]]:
    """Return the turns of a history; an engine may drop the oldest turns to fit its context window.

    A turn begins with a user message, and includes the answer with its tool calls and their results: a tool call must
    not be separated from its result.
    """
    turns: list[list[Message]] = []
    for message in history:
        if message.role == "user" or not turns:
            turns.append([])
        turns[-1].append(message)
    return [tuple(turn) for turn in turns]


def earlier_speech(history: Sequence[Message]) -> list[Speech]:
    """Return the speech in ``history`` that has no transcript, newest first."""
    return [part.speech for message in reversed(history) for part in reversed(message.parts) if part.speech is not None]


def unanswered(history: Sequence[Message]) -> str:
    """Return the text of the user messages at the end of ``history``, to which there is no answer."""
    texts: list[str] = []
    for message in reversed(history):
        if message.role != "user":
            break
        texts.append(message.text)
    return " ".join(filter(None, reversed(texts)))


# Notes on the language: a line at the end of a spoken message tells a text model which language the user speaks.
#
# The note stands where the language changes, English being the first, and stands there again whenever the message comes
# back in the history. So the prompt only grows at its end, and what the model has computed of it stays good; and a
# model needs nothing to read it but text. A conversation in English has no notes.

#: The language of a conversation before anybody speaks: nothing is said of it until it changes.
_FIRST: Final = "en"


def told_language(request: GenerationRequest, llm: Engine) -> GenerationRequest:
    """Return ``request`` with notes that tell ``llm`` the user's language, if ``llm`` would not know it otherwise.

    An LLM that takes audio, or reads ``GenerationRequest.heard_language``, gets no notes. Nor does a request to
    interpret.
    """
    able = llm.capabilities
    if able.reads_language or Modality.AUDIO in able.input_modalities or request.options.interprets_into:
        return request
    history, told = _noted(request.history)
    source = _NotedInput(aiter(request.input), request.heard_language, told=told)
    return replace(request, input=source, history=history)


def language_note(language: str) -> str:
    """Return a line such as "(The user speaks German.)"; ``language`` is a primary subtag of RFC 5646."""
    return f"\n(The user speaks {language_name(language).title()}.)"


def _noted(history: tuple[Message, ...]) -> tuple[tuple[Message, ...], str]:
    """Return ``history`` with a note wherever the spoken language changes, and the last language that was noted."""
    noted, told = [], _FIRST
    for message in history:
        spoken_in = message.parts[-1].language
        if spoken_in is not None and spoken_in != told:
            told = spoken_in
            message = _with_note(message, language_note(told))
        noted.append(message)
    return tuple(noted), told


def _with_note(message: Message, note: str) -> Message:
    if not message.more:
        return replace(message, text=message.text + note)
    last = message.more[-1]
    return replace(message, more=(*message.more[:-1], replace(last, text=last.text + note)))


class _NotedInput(AsyncIterator[InputChunk]):
    """The input of a request, with a note at its end if the user speaks another language than ``told``."""

    def __init__(self, source: AsyncIterator[InputChunk], heard: HeardLanguage, *, told: str) -> None:
        self._source = source
        self._heard = heard
        self._told = told

    async def __anext__(self) -> InputChunk:
        try:
            return await anext(self._source)
        except StopAsyncIteration:
            spoken_in = self._heard.code
            if spoken_in is None or spoken_in == self._told:
                raise
        self._told = spoken_in
        return InputChunk(Modality.TEXT, language_note(spoken_in).encode())


# Cuts long texts into pieces, and text that arrives in pieces into clauses.


# Pieces, so short that work on one of them does not block the event loop.

#: The length of a piece, in characters. Cutting it into clauses or searching it for stop strings takes a few
#: milliseconds at most.
PIECE_CHARACTERS: Final = 4096


def pieces_of(text: str, length: int = PIECE_CHARACTERS) -> Iterator[str]:
    """Yield ``text`` in pieces of ``length`` characters; none for an empty text."""
    for start in range(0, len(text), length):
        yield text[start : start + length]


# Clauses, which are synthesised while the rest of the text is still being generated.

#: How long, in seconds, to wait for more text after what looks like a complete sentence.
SENTENCE_GRACE = 0.15

#: How long, in seconds, to wait for more at the beginning of a text that a client is writing, before the words that
#: have arrived are spoken.
BEGIN_AFTER: Final = 0.4

#: How long, in seconds, to wait for more of an answer's first sentence before its first phrase is spoken: a model that
#: is no faster writes a long sentence in seconds.
PHRASE_GRACE: Final = 0.03

#: The least number of words of a first phrase, one less before a link such as "by which".
PHRASE_WORDS: Final = 5

#: Marks behind which a phrase ends, and the sentence goes on.
PHRASE_MARKS: Final = frozenset(",;:—–")

#: From this length on, in characters, a clause may also end at a comma, colon, semicolon or dash.
COMMA_AFTER = 60

#: The maximum length of a clause, in characters: about 20 s of speech, which bounds the memory for its audio.
MAX_CLAUSE = 300

_INITIALS: Final = re.compile(r"(?:[a-z]\.)+[a-z]")
_NUMBERING: Final = re.compile(r"\d{1,3}")

#: The marks at which a clause may end. White space has to follow the marks of the first two groups, after closing
#: quotes or brackets, if any; the marks of the other two groups need no white space.
_MARK: Final = re.compile(
    r"(?P<sentence>[.!?…])|(?P<clause>[,;:—–])|(?P<sentence_end>[。！？\n])|(?P<clause_end>[，、；：])"
)
_MORE_MARKS: Final = {"sentence": re.compile(r"[.!?…]*"), "clause": re.compile(r"[,;:—–]*")}
_MORE_CLOSERS: Final = re.compile(r"[\"'”’)\]]*")
_SPACE: Final = re.compile(r"\s*")
_BORDER: Final = re.compile(r"(?<=\S)\s")
_WHOLE_WORD: Final = re.compile(r"\S+(?=\s)")
_CLOSERS: Final = "\"'”’)]"
_SENTENCE_MARKS: Final = ".!?…"
_SENTENCE_ENDS: Final = ("。", "！", "？")


class TextClause(NamedTuple):
    """A clause without white space around it, and the index in the whole text at which it ends."""

    text: str
    end: int


class Phrase(TextClause):
    """The first phrase of a sentence whose rest has not been yielded yet."""


class ClauseSplitter:
    """A splitter of text that arrives in pieces into clauses, at positions that further text cannot change.

    The *text in progress* is the text since the last clause. When no more text arrives for a while, ``looks_complete``
    says whether the text in progress looks like a whole sentence, and ``rest`` returns it as a clause.

    To start speech early, the first clause may have its own limits, in characters: it may end at any comma after
    ``first_comma_after``, and ends before the word that would exceed ``first_longest``.

    ``language`` (RFC 5646) selects the abbreviations whose full stop ends no sentence; with "" there are none.

    The clauses do not depend on how the text is cut into pieces. Time is linear in the length of the text; memory is
    limited to the clause in progress.
    """

    def __init__(
        self, *, language: str = "en", first_comma_after: int = COMMA_AFTER, first_longest: int = MAX_CLAUSE
    ) -> None:
        self._abbreviations, self._before_numbers = abbreviations_of(language)
        #: The clause in progress; its length may exceed the limit by one character.
        self._waiting = ""
        #: The length of the whole text so far.
        self._fed = 0
        self._comma_after = first_comma_after
        self._longest = first_longest
        #: The position up to which ``_waiting`` has been examined.
        self._read = 0
        #: The start and the kind of a run of marks that may continue at ``_read``.
        self._marks: tuple[int, str] | None = None
        #: The end of the clause, provided that no number follows; only white space has arrived after it so far.
        self._end_unless_number: int | None = None

    def feed(self, text: str) -> list[TextClause]:
        """Add ``text``, the next piece, and return the clauses that it completes."""
        clauses: list[TextClause] = []
        taken = 0
        while taken < len(text):
            piece = text[taken : taken + self._longest + 1 - len(self._waiting)]
            taken += len(piece)
            self._fed += len(piece)
            self._waiting = self._waiting + piece if self._waiting else piece.lstrip()
            while (end := self._next_end()) is not None:
                clauses.append(self._clause(self._waiting[:end], self._fed - len(self._waiting)))
                self._begin(self._waiting[end:].lstrip())
                self._comma_after, self._longest = COMMA_AFTER, MAX_CLAUSE
        return clauses

    @property
    def looks_complete(self) -> bool:
        """Whether the text in progress ends like a sentence, and no further word has arrived after this end."""
        text = self._waiting.rstrip()
        if text.endswith(_SENTENCE_ENDS):
            return True
        text = text.rstrip(_CLOSERS)
        end = len(text.rstrip(_SENTENCE_MARKS))
        return end < len(text) and not _is_abbreviation(_word_before(text, end), self._abbreviations)

    def rest(self) -> TextClause:
        """Remove the text in progress, and return it as a clause, which may be empty."""
        rest = self._clause(self._waiting, self._fed - len(self._waiting))
        self._begin("")
        if rest.text:
            self._comma_after, self._longest = COMMA_AFTER, MAX_CLAUSE
        return rest

    def words(self) -> TextClause:
        """Remove and return the text in progress without its last word, which may be incomplete. May be empty."""
        end = last_border(self._waiting)
        words = self._clause(self._waiting[:end], self._fed - len(self._waiting))
        if words.text:
            self._begin(self._waiting[end:].lstrip())
            self._comma_after, self._longest = COMMA_AFTER, MAX_CLAUSE
        return words

    def phrase_end(self, words: PhraseWords) -> int:
        """Return the index at which the first phrase of the text in progress ends; 0 if the end has not arrived.

        The phrase has at least about PHRASE_WORDS words. It ends after a comma, colon, semicolon or dash that follows
        no digit, or before one of ``words.starts`` and the ``words.links`` directly before it.
        """
        link: int | None = None
        for number, word in enumerate(_WHOLE_WORD.finditer(self._waiting)):
            written = word[0].lower()
            starts = written in words.starts
            if starts and number >= PHRASE_WORDS:
                return word.start() if link is None else link
            mark = written.rstrip(_CLOSERS)
            if number >= PHRASE_WORDS - 1 and mark[-1:] in PHRASE_MARKS and not mark[-2:-1].isdigit():
                return word.end()
            link = (word.start() if link is None else link) if starts or written in words.links else None
        return 0

    def phrase(self, end: int) -> Phrase:
        """Remove and return the text in progress up to ``end``, an index that ``phrase_end`` returned."""
        phrase = Phrase(*self._clause(self._waiting[:end], self._fed - len(self._waiting)))
        self._begin(self._waiting[end:].lstrip())
        self._comma_after, self._longest = COMMA_AFTER, MAX_CLAUSE
        return phrase

    @staticmethod
    def _clause(text: str, start: int) -> TextClause:
        stripped = text.rstrip()
        return TextClause(stripped, start + len(stripped))

    def _begin(self, waiting: str) -> None:
        self._waiting = waiting
        self._read = 0
        self._marks = self._end_unless_number = None

    def _next_end(self) -> int | None:
        """Return the length of the first clause in progress; None while more text could change this length."""
        while True:
            end = self._end_unless_number
            if end is None:
                if (ending := self._next_ending()) is None:
                    break
                start, end, kind = ending
                if not self._may_end(start, kind):
                    continue
                if _word_before(self._waiting, start) not in self._before_numbers:
                    return end
                self._end_unless_number = end
            self._read = _end_of(_SPACE, self._waiting, self._read)
            if self._read < len(self._waiting) and self._waiting[self._read].isdigit():
                # An abbreviation. The white space before the number may contain a line break, which ends a clause.
                self._read, self._end_unless_number = end, None
            elif self._read < len(self._waiting) or self._read > self._longest:
                return end
            else:
                return None
        if len(self._waiting) <= self._longest:
            return None
        space = self._waiting.rfind(" ", 1, self._longest + 1)
        return space if space > 0 else self._longest

    def _may_end(self, marks: int, kind: str) -> bool:
        """Whether the marks at index ``marks`` end a clause rather than an abbreviation or a list item's number."""
        if kind.startswith("clause"):
            return marks >= self._comma_after
        if _NUMBERING.fullmatch(self._waiting, 0, marks):
            return False
        return not _is_abbreviation(_word_before(self._waiting, marks), self._abbreviations)

    def _next_ending(self) -> tuple[int, int, str] | None:
        """Return start, end (after closing quotes) and kind of the next punctuation, one mark or several in a row.

        Returns None if there is none, or if further marks may follow. The kinds are the groups of ``_MARK``.
        """
        text = self._waiting
        while True:
            if self._marks is None:
                mark = _MARK.search(text, self._read, self._longest)
                if mark is None:
                    self._read = min(len(text), self._longest)
                    return None
                self._read, kind = mark.end(), mark.lastgroup or ""
                if kind not in _MORE_MARKS:
                    return mark.start(), mark.end(), kind
                self._marks = (mark.start(), kind)
            start, kind = self._marks
            if text[self._read - 1] not in _CLOSERS:
                self._read = _end_of(_MORE_MARKS[kind], text, self._read, self._longest)
            self._read = _end_of(_MORE_CLOSERS, text, self._read, self._longest)
            if self._read == len(text):
                return None
            self._marks = None
            if text[self._read].isspace():
                return start, self._read, kind


def _end_of(pattern: re.Pattern[str], text: str, position: int, limit: int = sys.maxsize) -> int:
    """Return the end of the match of ``pattern`` at ``position``, or ``position`` if nothing matches."""
    found = pattern.match(text, position, limit)
    return position if found is None else found.end()


def is_being_written(source: InputSource) -> bool:
    """Whether the client is still sending this input. Speech then begins early, with shorter clauses."""
    own = own_part(source)
    return isinstance(own, Channel) and not own.closed


async def clauses_as_they_come(
    source: AsyncIterator[str],
    splitter: ClauseSplitter,
    *,
    grace_sec: float = SENTENCE_GRACE,
    begin_after_sec: float | None = None,
    phrase_words: PhraseWords | None = None,
) -> AsyncGenerator[TextClause, None]:
    """Yield the clauses of a text; ``source`` yields the text in pieces, and at its end the last clause is yielded.

    Clauses are also yielded when no more text arrives for a while: text that looks like a whole sentence after
    ``grace_sec``; before the first clause, whole words after ``begin_after_sec`` (None: never) or, with
    ``phrase_words``, the first phrase after PHRASE_GRACE. All times are in seconds. A caller that stops early has to
    close the generator.
    """
    begun = False

    def phrase_end() -> int:
        return 0 if begun or phrase_words is None else splitter.phrase_end(phrase_words)

    def longest_wait() -> float | None:
        if splitter.looks_complete:
            return grace_sec
        return PHRASE_GRACE if phrase_end() else None if begun else begin_after_sec

    async with aclosing(with_pauses(source, longest_wait)) as pieces:
        async for text in pieces:
            if text is None:
                if splitter.looks_complete:
                    clause = splitter.rest()
                else:
                    clause = splitter.phrase(end) if (end := phrase_end()) else splitter.words()
                if clause.text:
                    yield clause
                    begun = begun or is_speakable(clause.text)
                continue
            for number, piece in enumerate(pieces_of(text)):
                if number:
                    await asyncio.sleep(0)  # let other tasks run between the pieces of a long text
                for clause in splitter.feed(piece):
                    yield clause
                    begun = begun or is_speakable(clause.text)
    if (rest := splitter.rest()).text:
        yield rest


def first_clause_of(source: InputSource) -> tuple[int, float | None]:
    """Return ``first_comma_after`` for a ClauseSplitter and ``begin_after_sec`` for ``clauses_as_they_come``.

    Speech of input that the client is still writing begins early, with a short clause.
    """
    return (0, BEGIN_AFTER) if is_being_written(source) else (COMMA_AFTER, None)


async def with_pauses(
    source: AsyncIterator[str], longest_wait: Callable[[], float | None]
) -> AsyncGenerator[str | None, None]:
    """Yield the pieces of a text, and one None whenever the wait for a piece exceeds ``longest_wait()`` seconds.

    If ``longest_wait`` returns None, there is no limit. A caller that stops early has to close the generator.
    """
    reading: asyncio.Task[str | None] | None = None
    paused = False
    try:
        while True:
            if reading is None:
                reading = asyncio.create_task(_next(source), name="reading text")
            await asyncio.wait([reading], timeout=None if paused else longest_wait())
            paused = not reading.done()
            if paused:
                yield None
                continue
            text, reading = reading.result(), None
            if text is None:
                return
            yield text
    finally:
        await end_tasks(reading)


async def _next(source: AsyncIterator[str]) -> str | None:
    return await anext(source, None)


def last_border(text: str) -> int:
    """Return the end of the last word in ``text`` that is followed by white space; 0 if there is none."""
    last = 0
    for found in _BORDER.finditer(text):
        last = found.start()
    return last


def is_speakable(clause: str) -> bool:
    """Whether the clause contains a letter or digit of any script."""
    return any(character.isalnum() for character in clause)


def _word_before(text: str, end: int) -> str:
    """Return the word before the full stop at ``end``, in lower case; "" for any other mark."""
    if text[end : end + 1] != ".":
        return ""
    before = text[max(0, end - 20) : end]
    if not before or before[-1].isspace():
        return ""
    return before.split()[-1].lstrip("\"'“‘([").lower()


def _is_abbreviation(word: str, abbreviations: frozenset[str]) -> bool:
    """Whether ``word`` is usually written with a full stop."""
    if word in abbreviations or _INITIALS.fullmatch(word):
        return True
    return len(word) == 1 and word.isalpha() and word not in ("i", "a")

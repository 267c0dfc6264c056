"""The words of the current turn, for turn detection: whether a speaker who pauses has more to say."""

from __future__ import annotations

import asyncio
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Final

from omni_ws.audio.speech_watch import PauseWords, Unfinished
from omni_ws.core.chunks import other_readings
from omni_ws.engine.base import EngineCapabilities, TranscriptGuess, TranscriptOutput

#: After this many interim transcripts without a new word, over this many seconds, no more words are expected.
_STALE_INTERIMS: Final = 3
_STALE_SEC: Final = 3.0
#: Typed text does not wait for the end of a turn that has lasted this long without a recognised word.
_WORDLESS_SEC: Final = 2.0


class TurnWords(PauseWords):
    """The words of the current turn so far, from the recogniser, for turn detection.

    ``able`` returns the engine's capabilities, ``heard`` whether the engine has the request of the turn, and ``asked``
    the assistant's last sentence. ``on_told`` is called each time new words arrive. ``now`` is the clock. Changed on
    the event loop; other threads read.
    """

    def __init__(
        self,
        able: Callable[[], EngineCapabilities],
        *,
        heard: Callable[[], bool] = lambda: True,
        asked: Callable[[], str] = str,
        on_told: Callable[[], None] = lambda: None,
        now: Callable[[], float] = lambda: asyncio.get_running_loop().time(),
    ) -> None:
        self._able = able
        self._heard = heard
        self._asked = asked
        self._on_told = on_told
        self._now = now
        self._settled = ""
        #: When the turn began, and whether the recogniser has read it and has found a word.
        self._began_at = 0.0
        self._has_word: bool | None = None
        #: The most words of an interim transcript, when it first had them, and how many were no longer since then.
        self._most_words = 0
        self._news_at = 0.0
        self._without_news = 0

    @property
    def expected(self) -> bool:
        """See ``PauseWords``; called by other threads."""
        return self._heard() and self._able().transcript_guesses

    def begin(self) -> None:
        """Forget all words, as another turn begins."""
        now = self._now()
        self._settled, self.in_groups = "", False
        self._began_at, self._has_word = now, None
        self._expect_news(now)

    def wordless(self) -> bool:
        """Return whether the turn has lasted for _WORDLESS_SEC and the recogniser has found no word in it."""
        return self._has_word is False and self._now() - self._began_at >= _WORDLESS_SEC

    def hear(self, words: TranscriptOutput | TranscriptGuess, *, language: str | None) -> None:
        """Note words from the recogniser; ``language`` is their language, None if it is not known."""
        now, text = self._now(), words.text
        if isinstance(words, TranscriptOutput) and words.interim:
            self._take_interim(len(text.split()), now)
        elif text.strip():  # otherwise a guess is withdrawn
            languages = self._able().languages
            code = language or (next(iter(languages)) if len(languages) == 1 else "")
            said = f"{self._settled} {text}"[-READ:]
            asked = self._asked()
            open_ = any(goes_on(other, code) for other in other_readings(words.hearing))
            # At once: another thread may look between two steps.
            self.unfinished = Unfinished.YES if open_ else how_unfinished(said, code, asked=asked)
            self.in_groups = self.in_groups or dictates(said, code, asked=asked)
            self._has_word = True
            if isinstance(words, TranscriptOutput):
                self._settled = said
                self._expect_news(now)
            self.told += 1  # last, as other threads look at this first
            self._on_told()

    def _take_interim(self, words: int, now: float) -> None:
        self._has_word = self._has_word or words > 0
        if words > self._most_words:
            self._expect_news(now)
            self._most_words = words
            return
        self._without_news += 1
        self.stalled = self._without_news >= _STALE_INTERIMS and now - self._news_at >= _STALE_SEC

    def _expect_news(self, now: float) -> None:
        self._most_words, self._news_at, self._without_news, self.stalled = 0, now, 0, False


# Tells by the words whether the speaker of a turn, who pauses, has more to say.
#
# Turn detection asks two models: one that hears the sound, and the recogniser, whose words are read here. "Set a timer
# for" goes on, however finished it sounds, and a number that is dictated in groups sounds finished after each of them.


#: The languages of which there are lists of words.
LANGUAGES: Final = ("en", "es", "fr", "it", "pt", "de")
#: How much of the end of a text is read, in characters.
READ: Final = 300
#: A row of digits and letters has at least so many words, and so many digits and letters.
_LEAST_WORDS: Final = 2
_LEAST_SIGNS: Final = 3
#: How far before a row the word may be that names it: "my number is 415".
_NAMED_WITHIN: Final = 3
#: At most so many words that end in one of ``named`` only name what follows: "order number".
_MOST_NAMING: Final = 3
#: How far before a day and a month the word may be after which a year follows: "the date is the ninth of May".
_DATED_WITHIN: Final = 6
#: How many of the last words may hold the question that a copula ends.
_ASKED_WITHIN: Final = 5
#: How many words are compared with the phrases.
_LONGEST_PHRASE: Final = 4

_WORD: Final = re.compile(
    r"(?P<plain>\d{1,3}(?:[.,]\d{3})+(?![\d-])|\d+[.,:]\d+(?![\d-]|[.,:]\d))|[^\W_]+(?:'[^\W_]+)*|(?<=\s)-(?=\s)|[+*/=%×÷&$€£@]"
)
#: A part of a code: "B2", "LK12".
_CODE: Final = re.compile(r"[^\W\d_]{1,3}\d{1,4}|\d{1,4}[^\W\d_]")
#: No number is written like that, unless it is dictated: "079".
_LEADING_ZERO: Final = re.compile(r"0\d\d+")
#: Letters that a recogniser has put together: "SMI".
_CAPITALS: Final = re.compile(r"\b[A-Z]{2,5}\b")
#: After these signs a text goes on in every language.
_OPEN_SIGNS: Final = frozenset("+*=×÷@")
#: How many words name the receiver of "that": "tell my sister that".
_MOST_TOLD: Final = 2
#: The longest word that a recogniser writes for a letter: "are".
_MOST_OF_A_LETTER: Final = 3
#: So many words has a clause that waits for the main one, "If it rains tomorrow."; a longer one may hold both.
_CLAUSE: Final = range(3, 6)
#: Stands for a number that is no row of digits, unless others come before it.
_PLAIN: Final = "0.0"
_QUESTION: Final = re.compile(r"[?？]['\"”»)]*\s*$")
_ENDS: Final = re.compile(r"[.!?…。？！]['\"”»)]*\s*$")
_TRAILS_OFF: Final = re.compile(r"(?:\.\.+|…|,|:|-|–|—)['\"”»)]*\s*$")
_LAST_SENTENCE: Final = re.compile(r"[^.!?…。？！]*[.!?…。？！\s]*$")


@dataclass(frozen=True, slots=True)
class _Lists:
    """The word lists of one language, from ``unfinished_words``. Most examples are in English.

    Ends of a sentence:

    - ``open``: a sentence goes on after these, unless the word before is in ``finished_after``: "tell me what it is".
    - ``stranded``: as ``open``, but a text that begins with a word of ``asks`` (a question or command) may end in them:
      "what is this for", "mach das Licht aus".
    - ``copulas``: as ``open``, but a question, or a sentence that contains one, may end in them: "dime qué hora es".
    - ``phrases``: a text goes on after these, but a question that begins before the phrase may end in it: "how many
      continents are there?".
    - ``to``, ``takers``: a verb of ``takers`` directly after ``to`` lacks its object: "to call".
    - ``before_to``: after one of these, ``to`` goes on even in a question: "what's the best way to".
    - ``particles``: these may end a question, a sentence with a word of ``separable`` ("can you turn it off"), and a
      sentence with a word of ``before_particles`` directly before them ("the light is on").
    - ``that``, ``says``, ``receivers``: a ``that`` begins a clause after ``says`` and a person: "tell my sister that".
      After one of ``receivers`` it may be an object instead: "tell him that".
    - ``introduces``: a ``that`` directly after one of these begins a clause, too: "the reason is that".
    - ``clauses``, ``ends_clause``: a text that begins with one of ``clauses`` waits for its main clause, "if it rains",
      unless it ends in one of ``ends_clause``, "if you like".

    Dictation:

    - ``digits``, ``numbers``: spoken digits, and greater numbers.
    - ``words_that_are_letters``: single letters that do not count as letters in a row, as they are words: "a".
    - ``times``, ``months``: a number directly after one of these is a time or a date, not a row of digits.
    - ``dates``: after one of these, a date that ends in its month lacks its year.
    - ``named``: a number after one of these is dictated; a short text that ends in one lacks it: "order number".
    - ``dictated``: with one of these, the assistant's last sentence asks the user to dictate.
    - ``lists``, ``introduces``: items follow one of ``lists``, "the guests are", and one of ``introduces`` after one of
      ``named``, "my plate is".
    - ``spelled``: letters follow, and capitals are letters: "spelled SMI".
    - ``alphabet``: links a letter to its name: "as in" in "B as in Bravo".
    - ``plus``: begins a telephone number.
    """

    open: frozenset[str]
    stranded: frozenset[str]
    copulas: frozenset[str]
    finished_after: frozenset[str]
    asks: frozenset[str]
    phrases: frozenset[tuple[str, ...]]
    to: frozenset[str]
    takers: frozenset[str]
    digits: frozenset[str]
    numbers: frozenset[str]
    words_that_are_letters: frozenset[str]
    times: frozenset[str]
    named: frozenset[str]
    months: frozenset[str]
    dates: frozenset[str]
    dictated: frozenset[str]
    particles: frozenset[str]
    separable: frozenset[str]
    before_particles: frozenset[str]
    before_to: frozenset[str]
    that: frozenset[str]
    says: frozenset[str]
    receivers: frozenset[str]
    clauses: frozenset[tuple[str, ...]]
    ends_clause: frozenset[str]
    introduces: frozenset[str]
    lists: frozenset[str]
    alphabet: frozenset[tuple[str, ...]]
    plus: frozenset[str]
    spelled: frozenset[str]


def how_unfinished(text: str, language: str, *, asked: str = "") -> Unfinished:
    """Return whether the speaker of ``text``, who pauses, has more to say, as far as the words show.

    ``language`` is a primary subtag of RFC 5646. ``asked`` is the assistant's last sentence: if it asks for a number,
    an address or a spelling, every digit or letter counts as a part of that.
    """
    if language not in LANGUAGES:
        return Unfinished.PERHAPS
    lists = _lists(language)
    text = text[-READ:]
    asked_to = bool(asked) and _asks_to_dictate(asked, lists)
    words = _spelled_out(text, lists, asked=asked_to)
    if not words:
        return Unfinished.PERHAPS
    if _in_a_row(words, lists, asked=asked_to) or _spells(words, lists) or _TRAILS_OFF.search(text):
        return Unfinished.YES
    question = _QUESTION.search(text) is not None
    if not question and (_only_names(words, lists) or _lacks_a_year(words, lists)):
        return Unfinished.YES
    if not _QUESTION.search(asked) and _is_clause(text, words, lists):  # "When did you go?" "When I was ten."
        return Unfinished.YES
    open_ = _is_open(words, lists, question=question)
    if open_ is not Unfinished.NO:
        return open_
    return Unfinished.NO if _ENDS.search(text) else Unfinished.PERHAPS


def dictates(text: str, language: str, *, asked: str = "") -> bool:
    """Return whether the speaker of ``text``, who pauses, is dictating: a number, a spelling, or a list of items."""
    if language not in LANGUAGES:
        return False
    lists, text = _lists(language), text[-READ:]
    asked_to = bool(asked) and _asks_to_dictate(asked, lists)
    words = _spelled_out(text, lists, asked=asked_to)
    if not words or _QUESTION.search(text):
        return False
    return _in_a_row(words, lists, asked=asked_to) or _spells(words, lists) or _begins_groups(words, lists)


def goes_on(text: str, language: str) -> bool:
    """Return whether a sentence must go on after the last word of ``text``, such as "the", whatever its punctuation.

    Used for alternatives that the recogniser finds less likely: its first choice is often a whole sentence, "Tell me
    about that.", where the speaker has only said "Tell me about the".
    """
    if language not in LANGUAGES or not (words := _words(text[-READ:])):
        return False
    return _is_open(words, _lists(language), question=_QUESTION.search(text) is not None) is Unfinished.YES


def _is_open(words: list[str], lists: _Lists, *, question: bool) -> Unfinished:
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    for length in range(1, _LONGEST_PHRASE + 1):
        if tuple(words[-length:]) in lists.phrases:
            # "how many continents are there?"
            asks = question and not lists.asks.isdisjoint(words[:-length])
            return Unfinished.PERHAPS if asks else Unfinished.YES
    if last in lists.open or last in _OPEN_SIGNS:
        may_end = before in lists.finished_after or (question and last in lists.asks)  # "perché?"
        return Unfinished.PERHAPS if may_end else Unfinished.YES
    if last in lists.copulas:
        asks = question or not lists.asks.isdisjoint(words[-_ASKED_WITHIN:])
        return Unfinished.PERHAPS if asks or before in lists.finished_after else Unfinished.YES
    if last in lists.particles and not lists.separable.isdisjoint(words):
        return Unfinished.NO
    if last in lists.to and before in lists.before_to:
        return Unfinished.YES
    if _is_told_that(words, lists, question=question):
        return Unfinished.PERHAPS if before in lists.receivers else Unfinished.YES
    if last in lists.stranded:
        # "what is this for", "who did you give it to", "is the radio on?", "the radio is on"
        is_on = question or words[0] in lists.introduces or before in lists.before_particles
        may_end = words[0] in lists.asks or (last in lists.particles and is_on)
        return Unfinished.PERHAPS if may_end else Unfinished.YES
    return Unfinished.YES if last in lists.takers and before in lists.to else Unfinished.NO


def _only_names(words: list[str], lists: _Lists) -> bool:
    """Return whether a text only announces what will follow: "Order number.", "He spells it."."""
    if words[-1] in lists.spelled & lists.introduces:
        return lists.asks.isdisjoint(words)  # not: "tell me how it is spelled"
    if len(words) == _MOST_NAMING and words[1] in lists.spelled and words[0] in lists.finished_after:
        return words[2] in lists.finished_after
    commands = words[0] in lists.asks or (len(words) == _MOST_NAMING and words[0] in lists.takers)
    return 1 < len(words) <= _MOST_NAMING and words[-1] in lists.named and not commands


def _lacks_a_year(words: list[str], lists: _Lists) -> bool:
    """Return whether the words end in a month, and the date is one that needs a year, such as a date of birth."""
    return words[-1] in lists.months and not lists.dates.isdisjoint(words[-_DATED_WITHIN:])


def _is_told_that(words: list[str], lists: _Lists, *, question: bool) -> bool:
    """Return whether the last word, "that", begins a clause: "tell my sister that", "the reason is that"."""
    if words[-1] not in lists.that or len(words) <= _MOST_TOLD:
        return False
    if words[-2] in lists.introduces:
        return not question and words[0] not in lists.asks
    # "who told you that", "tell me about that", "remind me of that"
    if words[-2] in lists.finished_after | lists.stranded | lists.open:
        return False
    return not lists.says.isdisjoint(words[-_MOST_TOLD - 2 : -2])


def _is_clause(text: str, words: list[str], lists: _Lists) -> bool:
    """Return whether a text is only a subordinate clause, which waits for its main clause: "If it rains tomorrow."."""
    # Without a full stop the recogniser writes no commas either: "if it rains call me".
    if len(words) not in _CLAUSE or words[-1] in lists.ends_clause or "," in text or not _ENDS.search(text):
        return False
    if _QUESTION.search(text) or _LAST_SENTENCE.sub("", text).strip():  # "Yes, please. If you don't mind."
        return False
    return any(tuple(words[:length]) in lists.clauses for length in range(1, _LONGEST_PHRASE + 1))


def _begins_groups(words: list[str], lists: _Lists) -> bool:
    """Return whether a statement announces a list, "the guests are", or something dictated, "my plate is"."""
    if len(words) <= _MOST_TOLD or not lists.asks.isdisjoint(words):
        return False
    if words[-1] in lists.lists:
        return words[-2] not in lists.finished_after | lists.open  # not: "you are", "tal como son"
    return words[-1] in lists.introduces and words[-2] in lists.named


def _spells(words: list[str], lists: _Lists) -> bool:
    """Return whether the text ends in a letter with a word that names it: "B as in Bravo", "A wie Anton"."""
    for link in lists.alphabet:
        place = len(words) - len(link) - 2
        if place < 0 or tuple(words[place + 1 : -1]) != link or not words[place].isalpha():
            continue
        letter, before = words[place], words[max(0, place - 1)]
        # "340 m de metal" spells nothing, nor does "plan B for Monday".
        is_letter = len(letter) == 1 and letter.isascii() and letter not in lists.words_that_are_letters
        if is_letter and not before.isdecimal() and words[-1].startswith(letter):
            return True
        # Of a letter with two words behind it a recogniser makes "be" and "are". "It is as in Rome" spells nothing.
        if len(link) > 1 and len(letter) <= _MOST_OF_A_LETTER and (not place or words[-1][0] in letter):
            return True
    return False


def _spelled_out(text: str, lists: _Lists, *, asked: bool) -> list[str]:
    """Return the words of a text. If the speaker spells, capitals are split into letters: "It's spelled SMI.".

    The speaker spells if the text says so, or if the assistant has asked for it (``asked``).
    """
    words = _words(text)
    if not asked and lists.spelled.isdisjoint(words):
        return words
    return _words(_CAPITALS.sub(lambda found: " ".join(found[0]), text))


def _in_a_row(words: list[str], lists: _Lists, *, asked: bool) -> bool:
    """Return whether a text ends in a row of digits or letters, so that more of them may follow.

    ``asked``: the assistant has asked the user to dictate, so that fewer of them suffice.
    """
    begin, signs = len(words), 0
    while begin > 1 and words[begin - 1] == _PLAIN:
        begin -= 1
    if begin < len(words):  # "3.30" behind another group
        return asked or _dictated(words[:begin], lists) or _is_plus(words[:begin], lists)
    spelled = all(len(word) == 1 and word.isalpha() for word in words[-2:])
    while begin and (found := _signs(words[begin - 1], lists, all_letters=asked or spelled or signs > 0)):
        begin, signs = begin - 1, signs + found
    length = len(words) - begin
    if not length:
        return False
    if asked or _names_a_row(words[:begin], lists):
        return True
    if _is_plus(words[:begin], lists) and (signs > 1 or words[0] in lists.open | _OPEN_SIGNS):
        return True  # where the word means "more" as well, two digits: "mais dois" is whole
    if signs < _LEAST_SIGNS or (begin and words[begin - 1] in lists.times | lists.months):
        return False
    return length >= _LEAST_WORDS or not begin or _LEADING_ZERO.fullmatch(words[-1]) is not None


def _dictated(words: list[str], lists: _Lists) -> bool:
    """Return whether digits after ``words`` are dictated, as ``words`` end in digits, too, or announce them."""
    return _names_a_row(words, lists) or _signs(words[-1], lists, all_letters=False) > 0


def _is_plus(words: list[str], lists: _Lists) -> bool:
    """Return whether the words are only "plus", which begins a telephone number, and not a plus between two numbers."""
    return len(words) == 1 and words[0] in lists.plus


def _names_a_row(words: list[str], lists: _Lists) -> bool:
    """Return whether one of the last words announces a row of digits or letters: "my number is"."""
    named = words[-_NAMED_WITHIN:]
    if not lists.spelled.isdisjoint(named):
        return words[-1] not in lists.open - lists.introduces  # not: "spelled with a K"
    return not lists.named.isdisjoint(named)


def _signs(word: str, lists: _Lists, *, all_letters: bool) -> int:
    """Return how many digits or letters a word stands for as part of a row; 0 if it cannot be part of one.

    ``all_letters``: single letters that are also words, such as "a", count as letters.
    """
    if word.isdecimal() or _CODE.fullmatch(word):
        return len(word)
    if word in lists.digits or word in lists.numbers:
        return 1
    if len(word) == 1 and word.isalpha():
        return int(all_letters or word not in lists.words_that_are_letters)
    return 0


def _asks_to_dictate(asked: str, lists: _Lists) -> bool:
    found = _LAST_SENTENCE.search(asked[-READ:].rstrip(".!?… "))
    return found is not None and any(word in lists.dictated for word in _words(found[0]))


def _words(text: str) -> list[str]:
    """Return the words of a text in lower case.

    Numbers such as 3.5, 10:30 or 1,000, which are no rows, become _PLAIN.
    """
    found = _WORD.finditer(text.replace("_", " ").replace("’", "'").lower())
    return [_PLAIN if one["plain"] else one[0] for one in found]


@cache
def _lists(language: str) -> _Lists:
    read = files(__package__).joinpath("unfinished_words", f"{language}.toml").read_text(encoding="utf-8")
    lists = tomllib.loads(read)
    return _Lists(**{name: _known(words) for name, words in lists.items()})


def _known(words: str | list[str]) -> frozenset[Any]:
    """Return the words of a string as a set, or the phrases of a list as a set of tuples of words."""
    return frozenset(words.split() if isinstance(words, str) else (tuple(_words(phrase)) for phrase in words))

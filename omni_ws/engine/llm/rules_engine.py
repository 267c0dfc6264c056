"""RulesEngine and RulesFirst: answers by rules, alone or in front of a model.

An Intent is something that people say in several ways, and the answer to it; the files in ``intents/`` list all
intents, and Matcher finds the intent of a request. If no intent fits, the answer admits this in one sentence. Pictures
are described by size, colour and motion (Sights).
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, fields, replace
from datetime import datetime
from difflib import get_close_matches
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from msgspec import structs

from omni_ws.core.chunks import FinishReason, InputChunk, Modality, OutputModality, Task, UrlCitation, Usage
from omni_ws.core.history import Message, in_order
from omni_ws.engine.answer_limit import (
    AnswerText,
    count_history,
    count_words,
    go_on,
    rest_of,
)
from omni_ws.engine.base import (
    NOTHING_SAID,
    Cut,
    Engine,
    EngineCapabilities,
    EngineState,
    Finished,
    GenerationRequest,
    OutputWriter,
    TextOutput,
    TurnTimes,
    Unread,
    UsageMeter,
)
from omni_ws.engine.clauses import (
    PIECE_CHARACTERS,
    told_language,
    unanswered,
)
from omni_ws.engine.composed.parts import RULES
from omni_ws.engine.decoding import DECODING_THREADS, Chunks, ImagePart, TextPart, VideoPart, decode_request
from omni_ws.engine.llm import (
    computed,
    questions,
)
from omni_ws.engine.llm.computed import (
    REPEAT,
    SPELL,
    TELLINGS,
    UNKNOWN,
    kind_of,
    name_told,
    repeated,
    solved,
    spelled,
)
from omni_ws.engine.llm.questions import (
    CREDIT,
    LICENSE,
    WORDS,
    Asked,
    Cited,
    Encyclopedia,
    Slots,
    Talk,
    courtesies,
    expanded,
    inserted,
    load_encyclopedia,
    plain_words,
    read,
    requests,
)
from omni_ws.engine.threads import MediaShare, end_tasks, run_in_thread
from omni_ws.errors import EmptyInput, EngineFailed, OmniError
from omni_ws.media import (
    ImageFacts,
    MediaLimits,
    Pixels,
    describe_image,
)
from omni_ws.media.video import VideoFacts, VideoFrame, VideoObserver
from omni_ws.profiler import events

logger = logging.getLogger(__name__)

#: A sentence, several of them, or None where the intent does not fit after all.
Reply: TypeAlias = Callable[[Asked, Slots], str | Iterator[str] | None]

#: Their order counts: where two intents fit a request equally well, the first one is meant.
_FILES: Final = (
    *("greetings", "controls", "about_me", "feelings", "told", "fun", "clock", "letters", "sums", "facts"),
    *("encyclopedia", "limits"),
)
#: Where the functions are that tables name as their ``reply``.
_MODULES: Final = (computed, questions)
#: Names in the wordings → what makes their values: a part of a sentence, or None where it is not known.
_VALUES: Final = computed.TIMES | TELLINGS
_PATTERNS: Final = ("phrases", "keys", "slots", "written")
_NAME: Final = re.compile(r"{([a-z_]+)}")


@dataclass(frozen=True, kw_only=True)
class Intent:
    """Something that people say, and the answer to it: one table of a file in ``intents/``.

    The head of ``intents/greetings.toml`` explains the fields.
    """

    name: str
    phrases: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    slots: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    unless: str = ""
    after: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    otherwise: tuple[str, ...] = ()
    table: Mapping[str, str] | None = None
    reply: Reply | None = None
    given: Slots | None = None
    sightless: bool = False
    drawn: bool = False
    light: bool = False
    first: bool = False
    exact: bool = False
    renews: bool = False

    def answer(self, asked: Asked, slots: Slots) -> Iterator[str] | None:
        """Return the sentences of the answer; None if the intent does not fit ``asked`` after all."""
        slots = {**(self.given or {}), **slots}
        if self.reply is not None:
            said = self.reply(asked, slots)
            return iter((said,)) if isinstance(said, str) else said
        if self.sightless and asked.pictured:
            return iter(())
        if self.drawn:
            return iter((asked.chance.choice(self.says),))
        if self.table is not None:
            return iter((self.table[key],)) if (key := "".join(slots.values())) in self.table else None
        names = {name for wording in self.says for name in _NAME.findall(wording)}
        values = {name: slots[name] if name in slots else _VALUES[name](asked, slots) for name in names}
        wordings = [wording.format_map(values) for wording in self.says]
        if None in values.values() and not self.otherwise:
            return None
        told = asked.talk.fresh(self.otherwise if None in values.values() else wordings)
        return iter((told[:1].upper() + told[1:] if slots else told,))


@cache
def catalogue() -> tuple[Intent, ...]:
    """Return all intents, in order of precedence. The first call reads the files in ``intents/``."""
    return tuple(intent for file in _FILES for intent in _intents(read(file)))


def _intents(tables: dict[str, Any]) -> Iterator[Intent]:
    """Yield the intents of a file.

    Names in braces are replaced by entries of the table ``words``; the table ``all`` has fields for all intents.
    """
    words = tables.get("words", {}) | {"unit": "|".join(sorted(computed.units(), key=len, reverse=True))}
    for name, table in tables["intents"].items():
        fields: dict[str, Any] = tables.get("all", {}) | table
        for key, given in fields.items():
            if isinstance(given, list):
                fields[key] = tuple(inserted(text, words) for text in given) if key in _PATTERNS else tuple(given)
        if "reply" in fields:
            fields["reply"] = next(found for one in _MODULES if (found := getattr(one, fields["reply"], None)))
        fields["unless"] = inserted(fields.get("unless", ""), words)
        yield Intent(name=name, **fields)


_NO_SLOTS: Final[Slots] = {}


class Understood(NamedTuple):
    """A match: the intent of a request, and the sentences of its answer."""

    intent: Intent
    sentences: Iterator[str]


class Matcher:
    """A search for the intent of a sentence, by the patterns of intents (see ``intents/greetings.toml``).

    The order is: keys of intents that are ``first``, whole phrases, slots, other keys, misspelled phrases. Raises
    ValueError if two intents have the same phrase.
    """

    def __init__(self, intents: Sequence[Intent]) -> None:
        self._phrases: dict[str, Intent] = {}
        self._after = [intent for intent in intents if intent.after]
        for intent in intents:
            for sentence in _sentences(intent) if not intent.after else ():
                if self._phrases.setdefault(sentence, intent) is not intent:
                    raise ValueError(f"{sentence!r} is {self._phrases[sentence].name} and {intent.name}")
        self._slots = [(re.compile(slot), intent) for intent in intents for slot in intent.slots]
        written = [(slot, intent) for intent in intents for slot in intent.written if not intent.after]
        self._written = [(re.compile(slot, re.I), intent) for slot, intent in written]
        keys = [(_runs(key), intent) for intent in intents for written in intent.keys for key in expanded(written)]
        self._urgent = [key for key in keys if key[1].first]
        #: By their first words, with their ranks: those that tell most, in letters, come first.
        self._keys: dict[str, list[tuple[int, tuple[str, ...], Intent]]] = {}
        for rank, (runs, intent) in enumerate(sorted(keys, key=lambda key: -sum(map(len, key[0])))):
            self._keys.setdefault(runs[0].split()[0], []).append((rank, runs, intent))
        self._misspelled = Misspelled(self._phrases)

    def find(self, asked: Asked) -> Understood | None:
        """Return the match of any kind; None if nothing fits."""
        if (fitting := self.exactly(asked)) is not None or not (asks := asked.asks):
            return fitting
        meant = self._by_key(asks[-1], asks) or self._by_key(asks[0], asks) or self._misspelt(asks)
        return _answered((meant,), asked)

    def exactly(self, asked: Asked) -> Understood | None:
        """Return the match of a key of an intent marked ``first``, of a phrase or of slots; None if nothing fits."""
        urgent = (intent for runs, intent in self._urgent if _stand_in(f" {asked.words} ", runs))
        return _answered(urgent, asked) or self.fitting(asked)

    def fitting(self, asked: Asked) -> Understood | None:
        """Return the match of a phrase or of slots, which match the whole sentence; None if nothing fits."""
        if (phrase := self.phrase(asked)) is not None:
            return phrase
        for texts, patterns in ((reversed(asked.asks), self._slots), ((asked.request,), self._written)):
            for text in texts:
                for pattern, intent in patterns:
                    if (match := pattern.fullmatch(text)) is not None:
                        slots = {name: words for name, words in match.groupdict().items() if words}
                        if (understood := _answered((intent,), asked, slots)) is not None:
                            return understood
        return None

    def phrase(self, asked: Asked) -> Understood | None:
        """Return the match if the whole sentence, without courtesies, is one phrase; else None."""
        return _answered((self._phrases.get(ask) for ask in asked.asks), asked)

    def following(self, asked: Asked) -> Understood | None:
        """Return the match of an intent that fits only after the last answer (``Intent.after``); else None.

        A sentence that is a request of its own does not count as such a reply.
        """
        for intent in self._after:
            if asked.talk.last_answer.endswith(intent.after):
                if asked.words in _sentences(intent):
                    return _answered((intent,), asked)
                match = next(filter(None, (re.fullmatch(form, asked.text) for form in intent.written)), None)
                if match is not None and ((other := self.find(asked)) is None or other.intent.light):
                    return _answered((intent,), asked, match.groupdict())
        return None

    def _by_key(self, words: str, asks: Sequence[str]) -> Intent | None:
        """Return the intent with the longest key in ``words``, but none whose ``unless`` matches one of ``asks``."""
        found = [
            (rank, intent)
            for word in dict.fromkeys(words.split(" "))
            for rank, runs, intent in self._keys.get(word, ())
            if _stand_in(f" {words} ", runs)
            and not (intent.unless and any(re.fullmatch(intent.unless, ask) for ask in asks))
        ]
        return min(found, key=lambda one: one[0])[1] if found else None

    def _misspelt(self, asks: Sequence[str]) -> Intent | None:
        """Return the intent with a phrase of which one of ``asks`` is a misspelling; None if there is none."""
        near = filter(None, map(self._misspelled.nearest, dict.fromkeys((asks[-1], asks[0]))))
        return next((self._phrases[phrase] for phrase in near), None)


def _answered(intents: Iterable[Intent | None], asked: Asked, slots: Slots = _NO_SLOTS) -> Understood | None:
    """Return the match of the first of ``intents`` that has an answer; None if none has."""
    for intent in intents:
        if intent is not None and (sentences := intent.answer(asked, slots)) is not None:
            return Understood(intent, sentences)
    return None


def _sentences(intent: Intent) -> list[str]:
    return [sentence for phrase in intent.phrases for sentence in expanded(phrase)]


# Keys, and misspelled phrases


def _runs(key: str) -> tuple[str, ...]:
    """Return the parts of a key between its asterisks, each with a space at both ends."""
    return tuple(f" {run.strip()} " for run in key.split("*") if run.strip())


def _stand_in(words: str, runs: Sequence[str]) -> bool:
    """Whether ``words``, which have a space at both ends, contain all ``runs``, one after the other."""
    position = 1
    for run in runs:
        position = words.find(run, position - 1) + len(run)
        if position < len(run):
            return False
    return True


#: Letters that often stand for one another; vowels are in every second place, and tell little.
_ALIKE: Final = str.maketrans("bfvdgcqjszxnrl", "ppptkkkkkkkmll", "aeiouyhw' ")
_WHAT_IS: Final = re.compile(r"(?:what|who) (?:is|was) (?:an? |the )?(.+)")
_DENIALS: Final = frozenset(("not", "never", "no"))
_DOUBLE: Final = re.compile(r"(.)\1+")
#: How much of two sentences has to be the same, where all their consonants are alike, and where those of a half are.
_SAME: Final = 0.8
_SAME_OF_HALF: Final = 0.88
#: How much longer or shorter one of them may be, in letters.
_MORE: Final = 2
_FEWEST_LETTERS: Final = 5


class Misspelled:
    """An index of phrases by their consonants, which finds the phrase that misspelled words mean.

    Words with one wrong letter still agree with the phrase in their first half or in their last half.
    """

    def __init__(self, phrases: Iterable[str]) -> None:
        self._phrases: dict[str, list[str]] = {}
        for phrase in phrases:
            letters = _consonants(phrase)
            for key in (letters, *_halves(letters, len(letters) // 2)):
                self._phrases.setdefault(key, []).append(phrase)

    def nearest(self, words: str) -> str | None:
        """Return the phrase whose spelling is nearest to ``words``; None if none is near, or if a digit is in them."""
        letters = _consonants(words)
        if len(words) < _FEWEST_LETTERS or any(map(str.isdigit, words)):
            return None
        halves = {key for length in range(len(letters) - 1, len(letters) + 2) for key in _halves(letters, length // 2)}
        for keys, same in (((letters,), _SAME), (halves, _SAME_OF_HALF)):
            phrases = (phrase for key in keys for phrase in self._phrases.get(key, ()))
            near = [phrase for phrase in phrases if abs(len(phrase) - len(words)) <= _MORE]
            if (found := get_close_matches(words, near, 1, same)) and not _means_another(words, found[0]):
                return found[0]
        return None


def _means_another(words: str, phrase: str) -> bool:
    """Whether two sentences with a similar spelling differ in meaning.

    Either only one of them is negated ("I am not sad", "I am sad"), or both ask what something is, but for different
    things ("what is a gnome", "what is my name").
    """
    if len(_DENIALS & {*words.split()}) != len(_DENIALS & {*phrase.split()}):
        return True
    asked, known = (_WHAT_IS.fullmatch(one) for one in (words, phrase))
    return asked is not None and known is not None and not get_close_matches(asked[1], [known[1]], 1, _SAME)


def _consonants(words: str) -> str:
    return _DOUBLE.sub(r"\1", words.translate(_ALIKE))


def _halves(letters: str, length: int) -> tuple[str, ...]:
    """Return the first and the last ``length`` letters, with a hyphen in place of the others; () for one letter."""
    return (f"{letters[:length]}-", f"-{letters[-length:]}") if length > 1 else ()


#: Longer texts, in characters, are at most something to repeat or to spell.
MAX_REQUEST: Final = 4096
#: Of longer texts, single sentences are not looked at.
_MAX_SENTENCES_LETTERS: Final = 400
_MAX_SENTENCES: Final = 5
_MAX_ANSWERED: Final = 2

NOTHING_HEARD: Final = "I did not hear anything."
NOTHING_WRITTEN: Final = "The message is empty."
#: By the language (RFC 5646): that rules answer in English alone, and that nothing was heard.
ONLY_ENGLISH: Final[Mapping[str, str]] = {code: said["only_english"] for code, said in read("elsewhere").items()}
NOTHING_HEARD_IN: Final[Mapping[str, str]] = {code: said["nothing_heard"] for code, said in read("elsewhere").items()}
TOO_LONG: Final = "That is more than I can follow."

_SPACE: Final = re.compile(r"\s+")
_SENTENCE_END: Final = re.compile(r"(?<=[.!?;])\s+(?=\S)")
_JOINED: Final = re.compile(rf",? and (?:then |also |please )*(?=(?:{'|'.join(WORDS['requests']['joined'])}) )", re.I)
_ANOTHER: Final = frozenset(expanded(WORDS["requests"]["another"]))
#: A follow-up: the last question, asked about something else.
_FOLLOWING: Final = re.compile(r"(?:and what about|and how about|what about|how about|and|or) (?P<rest>.+)")
_PREPOSITIONS: Final = frozenset(("in", "at", "on", "for"))


@cache
def _matcher() -> Matcher:
    return Matcher(catalogue())


def prepare() -> None:
    """Read the intents and build the Matcher, so that the first answer need not wait for them."""
    _matcher()


def answer(
    text: str,
    history: Sequence[Message],
    now: datetime,
    *,
    seed: object = None,
    pictured: bool = False,
    encyclopedia: Encyclopedia | None = None,
) -> Iterator[str]:
    """Return an iterator over the sentences of the answer to ``text``: a long answer is spoken while it is made.

    Random choices depend on ``seed`` (None: on ``now``), on the text, and on its place in the conversation.
    ``pictured``: the text came with pictures, which were described already. Facts are looked up in ``encyclopedia``.
    """
    plain = _SPACE.sub(" ", text).strip()
    if not plain:
        return iter((NOTHING_WRITTEN,))
    if len(plain) > MAX_REQUEST:
        return iter((_long_answer(plain) or TOO_LONG,))
    return _short_answer(
        replace(_asked(plain, Talk(history), now, seed=seed), pictured=pictured, encyclopedia=encyclopedia)
    )


def answer_in_english_alone(language: str) -> str:
    """Return the sentence "I only speak English" in ``language`` (RFC 5646) if it is known, else in English."""
    return ONLY_ENGLISH.get(language, UNKNOWN["foreign"][0])


def exact_answer(
    text: str,
    history: Sequence[Message],
    now: datetime,
    *,
    seed: object = None,
    of_itself: bool = True,
    encyclopedia: Encyclopedia | None = None,
) -> Iterator[str] | None:
    """Return the sentences of the answer if all requests in ``text`` have ``exact`` intents; else None.

    Greetings and the like (``Intent.light``) may be among the requests, and get no answer. Keys and misspelled phrases,
    which are guesses, do not count, except keys of ``first`` intents. ``of_itself``: whether the rules may answer
    questions about the assistant itself; instructions may describe it otherwise. ``seed`` and ``encyclopedia`` are as
    for ``answer``.
    """
    plain = _SPACE.sub(" ", text).strip()
    if not plain or len(plain) > _MAX_SENTENCES_LETTERS:
        return None
    asked = replace(_asked(plain, Talk(history), now, seed=seed), encyclopedia=encyclopedia)
    parts = _parts(plain)
    parts = (parts if len(parts) > 1 else _joined(asked)) or [plain]
    found = [_matcher().exactly(_with_text(asked, part)) for part in parts]
    exact = [match for match in found if match is not None and match.intent.exact]
    known = all(match is not None and (match.intent.exact or match.intent.light) for match in found)
    if not of_itself and any(match.intent.name == "who are you" for match in exact):
        return None
    if not exact or not known or (exact[0].intent.name == "what is my name" and name_told(asked.talk) is None):
        return None
    return _each_once(exact[:_MAX_ANSWERED])


def _asked(plain: str, talk: Talk, now: datetime, *, seed: object) -> Asked:
    drawn_from = f"{now.isoformat() if seed is None else seed} {len(talk.history)} {plain}"
    chance = Random(drawn_from.encode("utf-8", "surrogatepass"))
    return Asked(text=plain, talk=talk, now=now, chance=chance)


def _with_text(asked: Asked, text: str) -> Asked:
    return replace(asked, text=_SPACE.sub(" ", text).strip())


def _short_answer(asked: Asked) -> Iterator[str]:
    if (line := _in_play(asked)) is not None:
        return line
    if (renewed := _renewed(asked)) is not None:
        return renewed.sentences
    parts = _parts(asked.text)
    if len(parts) < 2:
        parts = _joined(asked)
    if len(parts) > 1:
        return _answered_in_parts(asked, parts)
    match = _matcher().find(asked) or _followed_up(asked)
    return match.sentences if match is not None else _unknown(asked)


def _answered_in_parts(asked: Asked, parts: Sequence[str]) -> Iterator[str]:
    """Return the answer to a message of several sentences, ``parts``.

    If the whole message is one phrase, its answer counts. Otherwise an urgent sentence (``Intent.first``) gets the only
    answer; without one, the first two known sentences do, except greetings and the like (``Intent.light``). If this
    leaves none, the message is matched as a whole; failing that, the first unknown or else the last sentence counts.
    """
    if (phrase := _matcher().phrase(asked)) is not None:
        return phrase.sentences
    # A speaker who gets no answer at once says the sentence again.
    first_said: dict[str, Asked] = {}
    for place, part in enumerate(parts):
        one = _with_text(replace(asked, talk=Talk(asked.talk.history, said=parts[:place])), part)
        first_said.setdefault(one.words, one)
    found = [(one, _matcher().find(one)) for one in first_said.values()]
    known = [match for _, match in found if match is not None]
    if urgent := [match for match in known if match.intent.first]:
        return urgent[0].sentences
    if heavy := [match for match in known if not match.intent.light]:
        return _each_once(heavy[:_MAX_ANSWERED])
    if (whole := _matcher().find(asked)) is not None:
        return whole.sentences
    unknown = [one for one, match in found if match is None]
    return _unknown(unknown[0]) if unknown else known[-1].sentences


def _each_once(found: Sequence[Understood]) -> Iterator[str]:
    """Yield the sentences of several answers, without those that an earlier answer contained."""
    said: set[str] = set()
    for match in found:
        here: list[str] = []
        for sentence in match.sentences:
            if sentence not in said:
                here.append(sentence)
                yield sentence
        said.update(here)


def _in_play(asked: Asked) -> Iterator[str] | None:
    """Return the next line of a joke or riddle, or the reply to the user's answer to a question of the last answer."""
    if (following := _matcher().following(asked)) is not None:
        return following.sentences
    line = solved(asked)
    return None if line is None else iter((line,))


def _renewed(asked: Asked) -> Understood | None:
    """Return a new match of the last request, if ``asked`` is "another one" and the request may be repeated."""
    if asked.words in _ANOTHER:
        for heard in reversed(asked.talk.heard):
            one = _with_text(asked, heard)
            match = _matcher().find(one) if one.words not in _ANOTHER else None
            if one.words not in _ANOTHER and (match is None or not match.intent.light):
                return match if match is not None and match.intent.renews else None
    return None


def _joined(asked: Asked) -> list[str]:
    """Return the two requests that "and" joins, if each fits an intent and the whole does not; else []."""
    parts = _JOINED.split(asked.text)
    if len(parts) != _MAX_ANSWERED or _matcher().fitting(asked) is not None:
        return []
    both = [_matcher().fitting(_with_text(asked, part)) for part in parts]
    return parts if all(match is not None and not match.intent.light for match in both) else []


def _followed_up(asked: Asked) -> Understood | None:
    """Return the match of a follow-up question, such as "And tomorrow?" after "What day is it?"; else None."""
    following = _FOLLOWING.fullmatch(asked.words)
    if following is None:
        return None
    before = (plain_words(heard) for heard in reversed(asked.talk.heard))
    *_, request = requests(next((words for words in before if _FOLLOWING.fullmatch(words) is None), ""))
    question = request.split()
    other = following["rest"].split()
    # As many words at its end are replaced first, then one more, then fewer, and at last none.
    for replaced in (len(other), len(other) + 1, *range(len(other) - 1, -1, -1)):
        if replaced < len(question):
            whole = _with_text(asked, " ".join((*question[: len(question) - replaced], *other)))
            find = _matcher().find if not replaced and other[0] in _PREPOSITIONS else _matcher().fitting
            if (match := find(whole)) is not None and not match.intent.light:
                return match
    return None


def _unknown(asked: Asked) -> Iterator[str]:
    """Yield the sentence for a request that no rule fits; nothing if pictures came with the request."""
    if not asked.pictured:  # otherwise the description of the pictures is the answer
        yield asked.talk.fresh(UNKNOWN[kind_of(asked.text)])


def _parts(text: str) -> list[str]:
    """Return the sentences of a text. A long text, or a text to repeat or spell, is not divided."""
    request = text[courtesies(text) :]
    if len(text) > _MAX_SENTENCES_LETTERS or REPEAT.match(request) is not None or SPELL.match(request) is not None:
        return [text]
    parts = [part for part in _SENTENCE_END.split(text) if any(map(str.isalnum, part))]
    return parts if len(parts) <= _MAX_SENTENCES else [text]


def _long_answer(plain: str) -> str | None:
    start = courtesies(plain[:MAX_REQUEST])
    if (repeat := REPEAT.match(plain, start, MAX_REQUEST)) is not None:
        return repeated(plain[repeat.end() :])
    spell = SPELL.match(plain, start, MAX_REQUEST)
    return None if spell is None else spelled(plain[spell.end() :])


F = TypeVar("F", ImageFacts, VideoFacts)

#: The end of each description.
UNSEEN: Final = "No model looks at pictures here, so I can't tell what they show."
#: Further pictures are only counted.
MAX_DESCRIBED: Final = 8


class Sights:
    """A description of successive pictures by size, colour and motion. It recognises no objects and keeps no pixels."""

    def __init__(self) -> None:
        self._images: list[ImageFacts] = []
        self._image_count = 0
        self._videos: list[VideoFacts] = []
        self._observer: VideoObserver | None = None
        self._video_number = -1

    def look_at_image(self, pixels: Pixels) -> None:
        """Add an image. Blocks for some milliseconds."""
        self._image_count += 1
        if self._image_count <= MAX_DESCRIBED:
            self._images.append(describe_image(pixels))

    def look_at_frames(self, frames: Sequence[VideoFrame], number: int) -> None:
        """Add frames of the video with this ``number``. Blocks for some milliseconds a frame."""
        if self._observer is None or number != self._video_number:
            self._end_video()
            self._observer, self._video_number = VideoObserver(), number
        for frame in frames:
            self._observer.add(frame)

    def sentences(self) -> tuple[str, ...]:
        """End the current video, and return the sentences of the description; () if there are no pictures."""
        self._end_video()
        described = [facts.sentence(name) for name, facts in _named("image", self._image_count, self._images)]
        if self._image_count > len(self._images):
            described.append(f"There are {self._image_count} images in all.")
        described += [facts.sentence(name) for name, facts in _named("video", len(self._videos), self._videos)]
        return (*described, UNSEEN) if described else ()

    def _end_video(self) -> None:
        observer, self._observer = self._observer, None
        if observer is not None and (facts := observer.facts()) is not None:
            self._videos.append(facts)


def _named(kind: str, count: int, all_facts: Sequence[F]) -> Iterator[tuple[str, F]]:
    """Yield a name for each picture ("The image"; "Image 2" if ``count`` is larger than 1), and the picture's facts."""
    for place, facts in enumerate(all_facts, 1):
        yield (f"The {kind}" if count == 1 else f"{kind.capitalize()} {place}"), facts


# Requests, and the rules that answer them.

T = TypeVar("T")


#: How long after an answer by rules the model begins to compute it: the voice begins to speak first.
SPOKEN_SEC: Final = 1.0
#: So many words are computed at a time: what is heard first comes first, and an answer does not wait long for the rest.
COMPUTED_WORDS: Final = 12

TAKES: Final = frozenset({Modality.TEXT, Modality.IMAGE, Modality.VIDEO})


class RulesEngine:
    """An engine that answers text by rules, and describes pictures by size, colour and motion, without a model.

    The engine is deterministic: the same conversation at the same time gives the same text. ``now`` returns the time,
    which also seeds random choices unless the request has a ``seed``. ``summaries`` is the downloaded file of the
    encyclopedia.
    """

    name = RULES

    def __init__(self, *, summaries: Path | None = None, now: Callable[[], datetime] = datetime.now) -> None:
        self.model = RULES
        self.active_requests = 0
        self._now = now
        self._summaries = summaries
        #: What was read of ``summaries`` at the start.
        self.encyclopedia: Encyclopedia | None = None
        self._threads: ThreadPoolExecutor | None = None

    @property
    def state(self) -> EngineState:
        return EngineState.STARTING if self._threads is None else EngineState.OK

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(
            input_modalities=TAKES,
            pictures_in_history=TAKES & {Modality.IMAGE, Modality.VIDEO},
            output_modalities=frozenset({OutputModality.TEXT}),
            tasks=frozenset({Task.CHAT}),
            extend=True,
            sampling=frozenset({"max_tokens", "seed", "stop"}),
            sampling_no_ops=frozenset({"temperature", "top_p"}),
            raw_prompts=True,  # there is no template that could stand around them
            media_limits=frozenset(field.name for field in fields(MediaLimits)),
            nothing_heard=NOTHING_HEARD,
            nothing_heard_in=NOTHING_HEARD_IN,
            reads_language=True,
        )

    @property
    def credited(self) -> str:
        """The name of the model for descriptions, with the credit for the text of the encyclopedia, if one is used."""
        return _credited(self.model, self.encyclopedia)

    def describe(self) -> tuple[str, ...]:
        return ()

    async def start(self) -> None:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(DECODING_THREADS, thread_name_prefix="rules")
            await run_in_thread(self._threads, prepare)
            self.encyclopedia = await run_in_thread(self._threads, load_encyclopedia, self._summaries)

    async def stop(self) -> None:
        threads, self._threads = self._threads, None
        if threads is not None:
            await asyncio.to_thread(threads.shutdown)

    async def generate(self, request: GenerationRequest, out: OutputWriter) -> None:
        if self._threads is None:
            raise EngineFailed("the engine is not running", fatal=True)
        self.active_requests += 1
        try:
            with request.media_room.share() as share:
                question = _Question(request, self._threads, share)
                await question.read()
                await self._answer(request, out, question)
        finally:
            self.active_requests -= 1

    async def _answer(self, request: GenerationRequest, out: OutputWriter, question: _Question) -> None:
        sentences = question.answer(self._now(), request.sampling.get("seed"), self.encyclopedia)
        await _write(lambda: question.worked_on(next, sentences, None), request, out, input_words=question.words)


async def _write(
    next_sentence: Callable[[], Awaitable[str | None]],
    request: GenerationRequest,
    out: OutputWriter,
    *,
    input_words: int,
) -> None:
    """Write each sentence of an answer as soon as it is made, and a Finished with citations of the articles used."""
    text = AnswerText(request.sampling)
    writes = request.tells_text
    separator, length, written = "", 0, 0
    citations: list[UrlCitation] = []
    while text.reached is None and (sentence := await next_sentence()) is not None:
        start, length = length + len(separator), length + len(separator) + len(sentence)
        if isinstance(sentence, Cited):
            page = sentence.article
            citations.append(UrlCitation(page.title, page.url, start, length, LICENSE))
        async for piece in text.add(separator + sentence):
            written += len(piece)
            if writes:
                out.write(TextOutput(piece))
                await out.drain()
        separator = " "
    rest = text.finish()
    if rest and writes:
        out.write(TextOutput(rest))
    written += len(rest)
    usage = Usage(input_tokens=input_words, output_tokens=text.words)
    cited = tuple(structs.replace(one, end=min(one.end, written)) for one in citations if one.start < written)
    out.write(Finished(text.reached or FinishReason.STOP, usage, citations=cited))


class _Question:
    """The input of one request: its text, and facts about its pictures."""

    def __init__(self, request: GenerationRequest, threads: ThreadPoolExecutor, share: MediaShare) -> None:
        self.words = 0
        self._request = request
        self._threads = threads
        self._share = share
        self._sights = Sights()
        #: The texts in the order in which they came, each in pieces.
        self._texts: list[list[str]] = []
        self._characters = sum(len(message.text) for message in request.history)

    async def read(self) -> None:
        """Read the input to its end. Raises EmptyInput if there is none."""
        self.words = await self.worked_on(count_history, self._request.history)
        decoded = decode_request(self._request, TAKES, executor=self._threads, share=self._share)
        number: int | None = None
        async with aclosing(decoded) as parts:
            async for part in parts:
                if isinstance(part, TextPart):
                    if part.part != number:
                        self._texts.append([])
                    self._texts[-1].append(part.text)
                    self._characters += len(part.text)
                elif isinstance(part, (ImagePart, VideoPart)):
                    modality = Modality.IMAGE if isinstance(part, ImagePart) else Modality.VIDEO
                    with events.span("sights", "encoder_start", "encoder_end", modality=modality.value):
                        if isinstance(part, ImagePart):
                            await run_in_thread(self._threads, self._sights.look_at_image, part.pixels)
                        else:
                            await run_in_thread(self._threads, self._sights.look_at_frames, part.frames, part.part)
                number = part.part
        if number is None:
            raise EmptyInput("the request has no input")
        for pieces in self._texts:
            self.words += await self.worked_on(count_words, "".join(pieces))

    def answer(self, now: datetime, seed: object, encyclopedia: Encyclopedia | None) -> Iterator[str]:
        """Yield the sentences of the answer."""
        described = self._sights.sentences()
        yield from described
        text = " ".join(text for pieces in self._texts if (text := "".join(pieces).strip()))
        if text and (before := unanswered(self._request.history)):
            text = f"{before} {text}"
        if text and (language := self._request.heard_language.code) not in (None, "en"):
            yield answer_in_english_alone(language)
        elif text or not described:
            history, pictured = self._request.history, bool(described)
            yield from answer(text, history, now, seed=seed, pictured=pictured, encyclopedia=encyclopedia)

    async def worked_on(self, call: Callable[..., T], *arguments: object) -> T:
        """Return ``call(*arguments)``, run in a thread if text and history are long, else on the event loop."""
        with events.span("rules"):
            if self._characters <= PIECE_CHARACTERS:
                return call(*arguments)
            return await run_in_thread(self._threads, call, *arguments)


class RulesFirst:
    """A wrapper of the engine ``llm`` that answers questions by rules where small models are often wrong.

    Such questions ask for the time, dates, sums, units, spelling and plain facts. Rules answer a request only if it is
    all text, in English, without tools, JSON or other features of the model, and without instructions other than
    ``own_instructions``, those of the operator. ``of_itself``: whether the rules may answer questions about the
    assistant itself. If another server began an answer and the rules' answer differs, the model answers.
    ``encyclopedia`` is called in a thread at the start, and returns the Encyclopedia for the rules.

    If the model shares the machine's cores, it processes each answer of the rules while the answer is spoken.
    Otherwise it would have to process this part of the history before its own next answer.
    """

    def __init__(
        self,
        llm: Engine,
        *,
        own_instructions: str = "",
        of_itself: bool = True,
        encyclopedia: Callable[[], Encyclopedia | None] = lambda: None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.name = llm.name
        self.model = llm.model
        self.llm = llm
        self._own_instructions = own_instructions
        self.of_itself = of_itself
        self._now = now
        self._read_encyclopedia = encyclopedia
        self._encyclopedia: Encyclopedia | None = None
        #: What the model computes, by conversation; and the conversations in which it begins no further piece.
        self._ahead: dict[str, asyncio.Task[None]] = {}
        self._enough: set[str] = set()

    @property
    def active_requests(self) -> int:
        return self.llm.active_requests

    @property
    def credited(self) -> str:
        """The name of the model for descriptions, with the credit for the text of the encyclopedia, if one is used."""
        return _credited(str(getattr(self.llm, "credited", self.llm.model)), self._encyclopedia)

    @property
    def capabilities(self) -> EngineCapabilities:
        return replace(self.llm.capabilities, reads_language=True, continues=frozenset({OutputModality.TEXT}))

    @property
    def state(self) -> EngineState:
        return self.llm.state

    def describe(self) -> tuple[str, ...]:
        return self.llm.describe()

    async def start(self) -> None:
        await asyncio.to_thread(prepare)
        self._encyclopedia = await asyncio.to_thread(self._read_encyclopedia)
        await self.llm.start()
        self.model = self.llm.model

    async def stop(self) -> None:
        await end_tasks(*self._ahead.values())
        await self.llm.stop()

    async def generate(self, request: GenerationRequest, out: OutputWriter) -> None:
        if self._may_answer(request):
            if (conversation := request.conversation) is not None and conversation in self._ahead:
                self._enough.add(conversation)  # the answer may be interrupted: no more of it was heard
            taken = [chunk async for chunk in request.input]
            request = replace(request, input=Chunks(tuple(taken)))
            if (before := self._ahead.get(request.conversation or "")) is not None:
                before.cancel()
            if (sentences := self._exact(request, taken)) is not None:
                words = count_history(request.history) + sum(count_words(chunk.payload.decode()) for chunk in taken)
                if not request.begun or " ".join(sentences).startswith(request.begun):
                    exact = partial(_write, partial(_next, iter(sentences)), input_words=words)
                    await rest_of(exact, request, out)
                    self._compute_ahead(request, taken, sentences)
                    return
        await go_on(self.llm, told_language(request, self.llm), out)

    def _compute_ahead(self, request: GenerationRequest, taken: list[InputChunk], answered: list[str]) -> None:
        conversation = request.conversation
        if conversation is None or not self.llm.capabilities.shares_cores:
            return
        later = replace(
            told_language(request, self.llm),
            sampling={"max_tokens": 1},
            computes_only=True,
            begun="",
            meter=UsageMeter(),
            cut=Cut(),
            times=TurnTimes(),
            warn=lambda error: None,
        )
        said = b"".join(chunk.payload for chunk in taken).decode()
        computing = self._compute(later, conversation, Message("user", said), " ".join(answered).split(" "))
        task = asyncio.create_task(computing, name="what rules have answered, ahead")
        self._ahead[conversation] = task
        self._enough.discard(conversation)
        task.add_done_callback(partial(self._computed, conversation))

    def _computed(self, conversation: str, task: asyncio.Task[None]) -> None:
        if self._ahead.get(conversation) is task:
            del self._ahead[conversation]
            self._enough.discard(conversation)

    async def _compute(self, later: GenerationRequest, conversation: str, asked: Message, words: list[str]) -> None:
        await asyncio.sleep(SPOKEN_SEC)
        try:
            for end in range(COMPUTED_WORDS, len(words) + COMPUTED_WORDS, COMPUTED_WORDS):
                turn = (asked, Message("assistant", " ".join(words[:end])))
                nothing = Chunks((InputChunk(Modality.TEXT, NOTHING_SAID.encode()),))
                history = in_order((*later.history, *turn))
                await self.llm.generate(replace(later, input=nothing, history=history), Unread())
                if conversation in self._enough:
                    break
        except OmniError as error:
            logger.debug("the model did not compute ahead: %s", error.message)

    def _may_answer(self, request: GenerationRequest) -> bool:
        if request.computes_only:
            return False
        return is_plain(request) and request.instructions in ("", self._own_instructions)

    def _exact(self, request: GenerationRequest, taken: list[InputChunk]) -> list[str] | None:
        if not taken or any(chunk.modality is not Modality.TEXT or chunk.tool_call_id is not None for chunk in taken):
            return None
        if any(message.role == "system" for message in request.history):
            return None
        if sum(len(chunk.payload) for chunk in taken) > MAX_REQUEST:
            return None  # to look through megabytes would block the event loop
        if request.heard_language.code not in (None, "en"):
            return None  # the rules are English
        said = b"".join(chunk.payload for chunk in taken).decode()
        before = unanswered(request.history)
        sentences = exact_answer(
            f"{before} {said}".strip(),
            request.history,
            self._now(),
            seed=request.sampling.get("seed"),
            of_itself=self.of_itself,
            encyclopedia=self._encyclopedia,
        )
        return None if sentences is None else list(sentences)


async def _next(sentences: Iterator[str]) -> str | None:
    return next(sentences, None)


def _credited(model: str, encyclopedia: Encyclopedia | None) -> str:
    return model if encyclopedia is None else f"{model} and {CREDIT}"


def is_plain(request: GenerationRequest) -> bool:
    """Whether ``request`` is a user message that asks for one text, without tools, JSON, a raw prompt and the like."""
    wanted = request.options
    plain = wanted.structure is None and wanted.logprobs is None and wanted.choices == 1 and not wanted.interprets_into
    return plain and not wanted.raw_prompt and wanted.input_role == "user" and not request.tools

"""What somebody said, as rules read it: in plain words, after the talk so far, as arithmetic, and by its sound."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from fractions import Fraction
from functools import lru_cache
from typing import Final, Generic, TypeAlias, TypeVar

import numpy as np

from omni_ws.core.history import Message

# Plain words: what was written or heard, in one spelling, and without courtesies around it

_QUOTES: Final = str.maketrans("’‘ʼ`´", "'''''")
_SIGNS: Final = re.compile(r"°\s?[cf]\b|[%°&]")
_SIGN_WORDS: Final = {"%": " percent ", "°": " degrees ", "&": " and ", "°c": " celsius ", "°f": " fahrenheit "}
_MINUS: Final = re.compile(r"(?<![\w)])[-−](?=\d)")
_IS: Final = re.compile(
    r"\b(what|who|where|when|why|how|it|that|there|here|he|she|name|time|weather|everything|"
    r"life|birthday|color|favourite|favorite)'s\b"
)
_CONTRACTED: Final = re.compile(r"\bwon't\b|\bcan't\b|\blet's\b|n't\b|'re\b|'ve\b|'ll\b|'m\b|'d\b")
_FULL: Final = {
    "won't": "will not", "can't": "can not", "let's": "let us", "n't": " not",
    "'re": " are", "'ve": " have", "'ll": " will", "'m": " am", "'d": " would",
}  # fmt: skip
_TOKEN: Final = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?|[^\W\d_]+(?:'[^\W\d_]+)*")

#: One spelling for words that have several, and for those that are written as they are said.
_SPELLINGS: Final = {
    "whats": "what is", "whos": "who is", "wheres": "where is", "hows": "how is", "thats": "that is", "im": "i am",
    "ive": "i have", "dont": "do not", "cant": "can not", "cannot": "can not", "isnt": "is not", "arent": "are not",
    "didnt": "did not", "doesnt": "does not", "youre": "you are", "theres": "there is", "lets": "let us",
    "ya": "you", "u": "you", "ur": "your", "wanna": "want to", "gonna": "going to", "gotta": "got to",
    "gimme": "give me", "lemme": "let me", "ok": "okay", "k": "okay", "yeah": "yes", "yep": "yes", "yup": "yes",
    "nope": "no", "nah": "no", "thanx": "thanks", "thx": "thanks", "goodbye": "good bye", "alright": "all right",
    "favourite": "favorite", "colour": "color", "colours": "colors", "grey": "gray", "mum": "mom",
    "metre": "meter", "metres": "meters", "kilometre": "kilometer", "kilometres": "kilometers", "litre": "liter",
    "litres": "liters", "centimetre": "centimeter", "centimetres": "centimeters", "mr": "mister",
    "dr": "doctor", "somebody": "someone", "everybody": "everyone", "anybody": "anyone", "tv": "television",
}  # fmt: skip

#: What may stand before a request, or alone. The longest comes first.
_BEFORE: Final = (
    "okay google|hey google|hey siri|hey alexa|siri|alexa|would you be so kind and|do you happen to know|is it "
    "possible to|i would like you to|i would like to know|i would like to hear|can you please|could you please|"
    "would you please|will you please|would you mind|i want you to|i want to know|i want to hear|i would like|can "
    "you tell|are you able to|let me know|let me hear|do you know|do you have|have you got|can i hear|how about|"
    "tell us|read me|good afternoon|good morning|good evening|excuse me|thank you|tell me|give me|can you|could you|"
    "would you|will you|may i ask|i said|go on and|my friend|all right|i want|please|hello|thanks|okay|sorry|well|"
    "great|cool|nice|good|then|just|also|hmm|hey|and|but|now|yes|umm|uhm|hi|oh|ah|um|uh|er|hm|so|no|computer|"
    "assistant|robot|omni|there|again|actually|listen|i think that|i think|"
    # "Um" is heard as "I'm".
    "i am(?= (?:who|what|where|when|why|how|can|could|tell|do|hello|hi|hey)\\b)"
)
#: What may stand behind a request.
_BEHIND: Final = (
    "if you can|if you please|my dear|dear|sir|madam|darling|honey|sweetheart|mate|bro|pal|if you do not mind|thank "
    "you very much|thank you|right now|my friend|for me|please|"
    "thanks|computer|assistant|robot|omni|today|buddy|dude|then|now|man|again|will you|would you|can you|okay|"
    "(?:do you|can you|if you|you do|did you) (?:still |even )?(?:know|remember|recall)|(?:can|could|would|will) you "
    "(?:please )?tell me|do you have any idea|any idea|any ideas"
)
_LEADING: Final = re.compile(rf"^(?:{_BEFORE}) (?=.)")
_TRAILING: Final = re.compile(rf"(?<=.) (?:{_BEHIND})$")
#: Courtesies that are taken away at most, before and behind.
_MOST_COURTESIES: Final = 6


def listed(words: str) -> tuple[str, ...]:
    """The words of a list that is written as a sentence."""
    return tuple(words.split())


def plain_words(text: str) -> str:
    """``text`` in small letters, without punctuation and contractions, a space between words: "what's" → "what is"."""
    text = unicodedata.normalize("NFKC", text).translate(_QUOTES).lower()
    text = _MINUS.sub(" minus ", text)
    text = _SIGNS.sub(lambda sign: _SIGN_WORDS[sign[0].replace(" ", "")], text)
    text = _CONTRACTED.sub(lambda found: _FULL[found[0]], _IS.sub(r"\1 is", text))
    return " ".join(_SPELLINGS.get(word, word) for word in _TOKEN.findall(text))


def requests(words: str) -> Iterator[str]:
    """Yield plain ``words``, and what is left of them with fewer and fewer courtesies; what has none comes last."""
    yield words
    yield from _stripped(_LEADING, words)
    for shorter in _stripped(_TRAILING, words):
        yield shorter
        words = shorter
    yield from _stripped(_LEADING, words)


def _stripped(courtesy: re.Pattern[str], words: str) -> Iterator[str]:
    """Yield ``words`` without the first courtesy, without the second one too, and so on."""
    for _ in range(_MOST_COURTESIES):
        shorter = courtesy.sub("", words, count=1)
        if shorter == words:
            return
        yield shorter
        words = shorter


# The conversation so far

#: Of how many messages of each side the texts are looked at, and how many characters of each.
RECENT: Final = 64
_LOOKED_AT: Final = 2048


class Talk:
    """What both sides said, as answers by rules need it: the newest last."""

    def __init__(self, history: Sequence[Message]) -> None:
        self._history = history
        answers, heard = _said(history, "assistant"), _said(history, "user")
        #: The last answer, whole; empty before the first. The same of what was heard.
        self.last_answer = answers[-1].strip() if answers else ""
        self.last_heard = heard[-1].strip() if heard else ""
        self.answers = tuple(answer[:_LOOKED_AT] for answer in answers)
        self.heard = tuple(words[:_LOOKED_AT] for words in heard)

    def going_on(self, said: Sequence[str]) -> Talk:
        """The same, a few sentences later in the message that is being answered."""
        talk = copy(self)
        talk.heard = (*self.heard, *(sentence[:_LOOKED_AT] for sentence in said))
        return talk

    @property
    def position(self) -> int:
        """The number of messages before this one."""
        return len(self._history)

    def all_heard(self) -> list[str]:
        """What was heard in the whole conversation, without empty texts: the oldest first."""
        texts = (message.text.strip()[:_LOOKED_AT] for message in self._history if message.role == "user")
        return [text for text in texts if text]

    def has_said(self, sentence: str) -> bool:
        """Whether any answer contained ``sentence``."""
        return any(message.role == "assistant" and sentence in message.text for message in self._history)

    def fresh(self, wordings: Sequence[str]) -> str:
        """Return the first of ``wordings`` that was not said yet; where all were, the one said longest ago."""
        return min(wordings, key=self._last_said)

    def _last_said(self, wording: str) -> int:
        """The place of the newest answer with ``wording``; -1 for none."""
        return max((place for place, answer in enumerate(self.answers) if wording in answer), default=-1)


def _said(history: Sequence[Message], role: str) -> list[str]:
    """The newest texts of one side, whole, in their order."""
    texts: list[str] = []
    for message in reversed(history):
        if len(texts) == RECENT:
            break
        if message.role == role and message.text and not message.text.isspace():
            texts.append(message.text)
    return texts[::-1]


# Arithmetic as people say and write it: "two plus three times four", "12 / (3 + 1)"

_SMALL = listed(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
_UNITS = {word: value for value, word in enumerate(_SMALL)}
_TENS = {
    word: 10 * (place + 2) for place, word in enumerate(listed("twenty thirty forty fifty sixty seventy eighty ninety"))
}
_BELOW_HUNDRED = _UNITS | _TENS
_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9}
_MULTIPLIERS = frozenset({"hundred", *_SCALES})
_FRACTIONS = {"half": 2, "third": 3, "quarter": 4}
_NUMBER_WORDS = frozenset({*_BELOW_HUNDRED, *_MULTIPLIERS})

_OPERATORS = {
    "+": "+", "plus": "+", "and": "+",
    "-": "-", "−": "-", "minus": "-", "less": "-", "negative": "-",
    "*": "*", "×": "*", "x": "*", "times": "*", "multiplied": "*",
    "/": "/", "÷": "/", "divided": "/", "over": "/",
    "(": "(", ")": ")",
}  # fmt: skip
_ARITHMETIC_TOKEN = re.compile(r"\d+(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|[a-z]+|[-+*/()×÷−]")
_BLANK = re.compile(r"[\s=?.!]*")

#: Longer ones are not what anybody says, and would only keep a thread busy.
MAX_CHARACTERS = 1000
MAX_TOKENS = 60
MAX_DIGITS = 15
MAX_RESULT = 10**30

_Token: TypeAlias = Fraction | str


class NotArithmetic(Exception):
    """The text is no arithmetic expression."""


def parse_number(text: str) -> int | None:
    """A whole number in words or digits ("one hundred and five", "20"), or None."""
    try:
        tokens = _tokens(text.lower())
    except NotArithmetic:
        return None
    if len(tokens) == 1 and isinstance(tokens[0], Fraction) and tokens[0].denominator == 1:
        return int(tokens[0])
    return None


def parse_value(text: str) -> Fraction | None:
    """Any number in words or digits ("minus two point five", "1,000"), or None."""
    try:
        tokens = _tokens(text.lower())
    except NotArithmetic:
        return None
    if len(tokens) == 2 and tokens[0] == "-" and isinstance(tokens[1], Fraction):
        return -tokens[1]
    return tokens[0] if len(tokens) == 1 and isinstance(tokens[0], Fraction) else None


def evaluate(text: str) -> Fraction:
    """The value. Raises NotArithmetic for what is no calculation, ZeroDivisionError where there is no value."""
    tokens = _tokens(text.lower())
    if len(tokens) < 2:
        raise NotArithmetic
    parser = _Parser(tokens)
    value = parser.sum()
    if parser.position != len(tokens):
        raise NotArithmetic
    if abs(value) > MAX_RESULT or value.denominator > MAX_RESULT:
        raise NotArithmetic
    return value


def in_digits(value: Fraction) -> str:
    """``value`` for reading and for speaking, rounded to six places where it has more."""
    sign = "minus " if value < 0 else ""
    value = abs(value)
    if value.denominator == 1:
        return f"{sign}{value.numerator}"
    rounded = round(value, 6)
    about = "about " if rounded != value else ""
    whole, decimals = divmod(int(rounded * 10**6), 10**6)
    return f"{about}{sign}{whole}.{f'{decimals:06d}'.rstrip('0') or '0'}"


def _tokens(text: str) -> list[_Token]:
    if len(text) > MAX_CHARACTERS:
        raise NotArithmetic
    words = _words(text.replace("-", " - ") if not any(ten + "-" in text for ten in _TENS) else _unhyphenated(text))
    tokens: list[_Token] = []
    position = 0
    while position < len(words):
        word = words[position]
        if word[0].isdigit():
            fraction, position = _fraction(words, position + 1)
            tokens.append(_written(word) + fraction)
        elif word in _NUMBER_WORDS or (word in ("a", "an") and words[position + 1 : position + 2] == ["hundred"]):
            value, position = _spoken(words, position)
            fraction, position = _fraction(words, position)
            tokens.append(value + fraction)
        elif word in _OPERATORS:
            tokens.append(_OPERATORS[word])
            position += 2 if words[position : position + 2] in (["multiplied", "by"], ["divided", "by"]) else 1
        else:
            raise NotArithmetic
    return tokens


def _unhyphenated(text: str) -> str:
    """ "twenty-three" is one number, not a subtraction."""
    return re.sub(rf"({'|'.join(_TENS)})-(?=[a-z])", r"\1 ", text)


def _words(text: str) -> list[str]:
    words: list[str] = []
    position = _BLANK.match(text).end()  # type: ignore[union-attr]
    while position < len(text):
        token = _ARITHMETIC_TOKEN.match(text, position)
        if token is None or len(words) >= MAX_TOKENS:
            raise NotArithmetic
        words.append(token[0])
        position = _BLANK.match(text, token.end()).end()  # type: ignore[union-attr]
    return words


def _written(digits: str) -> Fraction:
    if len(digits) > MAX_DIGITS:
        raise NotArithmetic
    return Fraction(digits.replace(",", ""))


def _fraction(words: list[str], position: int) -> tuple[Fraction, int]:
    """The fraction at ``position``, behind a number ("and a half"), 0 for none; and the position behind it."""
    match words[position : position + 3]:
        case ["and", "a", name] if name in _FRACTIONS:
            return Fraction(1, _FRACTIONS[name]), position + 3
    return Fraction(0), position


def _spoken(words: list[str], position: int) -> tuple[Fraction, int]:
    """The number in words that starts at ``position``, and where it ends."""
    total, group = 0, 0
    while position < len(words):
        word = words[position]
        if word in _BELOW_HUNDRED:
            end = position + 1
            while end < len(words) and words[end] in _BELOW_HUNDRED:
                end += 1
            number, is_whole = _run(words[position:end])
            if is_whole and (total or group or not _MULTIPLIERS.isdisjoint(words[end : end + 1])):
                raise NotArithmetic
            group += number
            position = end
            continue
        if word in ("a", "an"):
            group += 1
        elif word == "hundred":
            group = max(group, 1) * 100
        elif word in _SCALES:
            total, group = total + max(group, 1) * _SCALES[word], 0
        elif not (word == "and" and group % 100 == 0 and words[position - 1] in ("hundred", *_SCALES)):
            break
        position += 1
    value = Fraction(total + group)
    if position < len(words) - 1 and words[position] == "point":
        decimals = []
        while position + 1 < len(words) and _UNITS.get(words[position + 1], 10) < 10:
            decimals.append(str(_UNITS[words[position + 1]]))
            position += 1
        if not decimals or len(decimals) > MAX_DIGITS:
            raise NotArithmetic
        value += Fraction(int("".join(decimals)), 10 ** len(decimals))
        position += 1
    return value, position


def _run(words: list[str]) -> tuple[int, bool]:
    """The number that words below a hundred name, and whether it is more than a part: a year, or digit by digit."""
    parts: list[int] = []
    for before, word in zip(["", *words], words, strict=False):
        value = _BELOW_HUNDRED[word]
        if before in _TENS and 0 < value < 10:
            parts[-1] += value
        else:
            parts.append(value)
    if len(parts) == 1:
        return parts[0], False
    if len(parts) == 2 and min(parts) >= 10:
        return 100 * parts[0] + parts[1], True
    if max(parts) < 10 and len(parts) <= MAX_DIGITS:
        return int("".join(map(str, parts))), True
    raise NotArithmetic


class _Parser:
    """Recursive descent: sum → product → signed value."""

    def __init__(self, tokens: list[_Token]) -> None:
        self.position = 0
        self._tokens = tokens

    def sum(self) -> Fraction:
        value = self._product()
        while (operator := self._take("+", "-")) is not None:
            right = self._product()
            value = value + right if operator == "+" else value - right
        return value

    def _product(self) -> Fraction:
        value = self._signed()
        while (operator := self._take("*", "/")) is not None:
            right = self._signed()
            value = value * right if operator == "*" else value / right
        return value

    def _signed(self) -> Fraction:
        if self._take("-") is not None:
            return -self._signed()
        if self._take("(") is not None:
            value = self.sum()
            if self._take(")") is None:
                raise NotArithmetic
            return value
        token = self._tokens[self.position] if self.position < len(self._tokens) else None
        if not isinstance(token, Fraction):
            raise NotArithmetic
        self.position += 1
        return token

    def _take(self, *operators: str) -> str | None:
        token = self._tokens[self.position] if self.position < len(self._tokens) else None
        if isinstance(token, str) and token in operators:
            self.position += 1
            return token
        return None


# How English words sound, roughly, and how far two sentences are apart: "hell are you" is close to "how are you".
#
# A sound is one character; the sounds of a sentence have no gaps, because recognition misplaces them.

T = TypeVar("T")

#: Words that are not spoken as they are spelled, and are in every second sentence.
_IRREGULAR: Final = {
    "you": "ju", "your": "jor", "are": "ar", "who": "hu", "how": "hW", "one": "wan", "two": "tu", "to": "tu",
    "too": "tu", "do": "du", "does": "daz", "done": "dan", "the": "Da", "is": "iz", "was": "waz", "what": "wat",
    "here": "hir", "hear": "hir", "there": "Der", "their": "Der", "where": "wer", "know": "no", "no": "no",
    "have": "hav", "give": "giv", "some": "sam", "come": "kam", "time": "tIm", "my": "mI", "by": "bI", "bye": "bI",
    "buy": "bI", "why": "wI", "i": "I", "eye": "I", "said": "sed", "says": "sez", "of": "av", "four": "for",
    "eight": "et", "ate": "et", "hi": "hI", "high": "hI", "he": "hi", "she": "Si", "we": "wi", "me": "mi",
    "be": "bi", "so": "so", "go": "go", "love": "lav", "a": "a", "right": "rIt", "write": "rIt", "mother": "maDR",
    "other": "aDR", "love's": "lavz", "any": "eni", "many": "meni", "people": "pipl", "friend": "frend",
    "great": "gret", "good": "gud", "would": "wud", "could": "kud",
}  # fmt: skip
_SPELLED: Final = (
    ("eigh", "e"), ("ough", "o"), ("augh", "o"), ("tion", "San"), ("sion", "San"), ("igh", "I"), ("tch", "C"),
    ("dge", "J"), ("sch", "sk"), ("ch", "C"), ("sh", "S"), ("th", "D"), ("ph", "f"), ("gh", ""), ("ck", "k"),
    ("qu", "kw"), ("wh", "w"), ("wr", "r"), ("kn", "n"), ("ng", "n"), ("ce", "se"), ("ci", "si"), ("cy", "sI"),
    ("ee", "i"), ("ea", "i"), ("ie", "i"), ("ei", "i"), ("oo", "u"), ("ew", "u"), ("ue", "u"), ("ui", "u"), ("ou", "W"),
    ("ow", "W"), ("oa", "o"), ("oe", "o"), ("ai", "e"), ("ay", "e"), ("ey", "i"), ("au", "o"), ("aw", "o"), ("oi", "Y"),
    ("oy", "Y"), ("er", "R"), ("ir", "R"), ("ur", "R"), ("x", "ks"), ("c", "k"), ("q", "k"), ("j", "J"), ("y", "i"),
)  # fmt: skip
_LETTERS: Final = re.compile("|".join([spelled for spelled, _ in _SPELLED] + ["."]))
_SOUNDS: Final = dict(_SPELLED)
_LONG: Final = re.compile(r"([aiou])([bcdfgklmnprstvz])e$")
_LONG_VOWELS: Final = {"a": "ay", "i": "igh", "o": "oa", "u": "oo"}
_DOUBLE: Final = re.compile(r"(.)\1+")

VOWELS: Final = "aeiouIWYR"
#: Sounds within a class are often taken for one another.
_CLASSES: Final = (VOWELS, "pb", "td", "kg", "fv", "szSCJ", "mn", "lr", "jw", "h", "D")
_CLASS: Final = {sound: number for number, sounds in enumerate(_CLASSES) for sound in sounds}
_KIN: Final = 0.4
_OTHER: Final = 1.0
_LOST_WEAK: Final = 0.5
_LOST_FIRM: Final = 0.8
_IS_WEAK: Final = tuple(sounds in (VOWELS, "jw", "h") for sounds in _CLASSES)
_LOST: Final = {
    sound: _LOST_WEAK if weak else _LOST_FIRM
    for sounds, weak in zip(_CLASSES, _IS_WEAK, strict=True)
    for sound in sounds
}
#: Classes as factors of the number of sounds in each.
_WEAK: Final = np.array(_IS_WEAK, np.int16)
_FIRM: Final = 1 - _WEAK
#: Added costs may differ by so much from those in another order.
_ROUNDING: Final = 1e-9
#: How much two sentences that count as one may differ, for each sound and at most; in short ones, a little is much.
NEAR: Final = 0.18
_MOST_APART: Final = 1.6
_FEW_SOUNDS: Final = 6
_MOST_APART_IN_FEW: Final = 0.35
#: In fewer sounds than these, too much of a sentence would have to be guessed. Longer ones are seldom misheard whole.
MIN_SOUNDS: Final = 4
MAX_SOUNDS: Final = 30
_MAX_LETTERS: Final = 30


@lru_cache(maxsize=4096)
def sounds_of_word(word: str) -> str:
    """The sounds of an English word in small letters; letters of other alphabets have none."""
    if word in _IRREGULAR:
        return _IRREGULAR[word]
    word = word[:_MAX_LETTERS]
    word = _LONG.sub(lambda found: _LONG_VOWELS[found[1]] + found[2], word)
    if len(word) > 3 and word[-1] == "e" and word[-2] not in "aeiouy":
        word = word[:-1]
    start = {"y": "j"}.get(word[0], "")
    sounds = start + "".join(_SOUNDS.get(found, found) for found in _LETTERS.findall(word[len(start) :]))
    return _DOUBLE.sub(r"\1", "".join(sound for sound in sounds if sound in _CLASS))


def sounds_of(words: str) -> str:
    """The sounds of plain words."""
    return "".join(map(sounds_of_word, words.split()))


class SoundIndex(Generic[T]):
    """Sentences by their sounds.

    Few are compared sound by sound: how many sounds of each class a sentence has already tells for most that they are
    too far.
    """

    def __init__(self, sentences: Iterable[tuple[str, T]]) -> None:
        kept: dict[str, tuple[int, T]] = {}
        for order, (words, found) in enumerate(sentences):
            sounds = sounds_of(words)
            if MIN_SOUNDS <= len(sounds) <= MAX_SOUNDS:
                kept.setdefault(sounds, (order, found))
        #: The shortest first.
        self._sentences = sorted(kept, key=len)
        #: For each of them its place among all that were added, and what belongs to it.
        self._found = [kept[sounds] for sounds in self._sentences]
        self._lengths = np.array([len(sounds) for sounds in self._sentences], np.int16)
        self._counts = np.array([_counts(sounds) for sounds in self._sentences], np.int16).reshape(-1, len(_CLASSES))

    def nearest(self, words: str) -> tuple[float, T] | None:
        """How far the sentence is that sounds most like ``words``, for each sound of these, and what belongs to it.

        None where none is near, and for digits, which have no sounds here. Of several sentences that are as far, the
        first one that was added is found.
        """
        sounds = sounds_of(words)
        if not MIN_SOUNDS <= len(sounds) <= MAX_SOUNDS or any(map(str.isdigit, words)):
            return None
        limit = _MOST_APART_IN_FEW if len(sounds) < _FEW_SOUNDS else min(_MOST_APART, NEAR * len(sounds))
        best: tuple[float, int, T] | None = None
        for least, place in self.candidates(sounds, limit):
            if least > limit:
                break
            far = distance(self._sentences[place], sounds, limit)
            if far is not None and (best is None or (far, self._found[place][0]) < best[:2]):
                best = (far, *self._found[place])
                limit = far
        return None if best is None else (best[0] / len(sounds), best[2])

    def candidates(self, sounds: str, limit: float) -> list[tuple[float, int]]:
        """At least how far each sentence is that may be as near as ``limit``, and its place: the nearest first."""
        longest_gap = int(limit / min(_LOST.values()))
        start, end = np.searchsorted(self._lengths, [len(sounds) - longest_gap, len(sounds) + longest_gap + 1])
        more = self._counts[start:end] - np.array(_counts(sounds), np.int16)
        missing, surplus = np.maximum(-more, 0), np.maximum(more, 0)
        # By class at best: two firm sounds for one another, then a firm and a weak one; the rest is lost.
        weak_missing, weak_surplus = missing @ _WEAK, surplus @ _WEAK
        firm_missing, firm_surplus = missing @ _FIRM, surplus @ _FIRM
        firm_left = firm_surplus - firm_missing
        mixed = np.minimum(np.abs(firm_left), np.where(firm_left > 0, weak_missing, weak_surplus))
        least = _LOST_WEAK * (weak_missing + weak_surplus) + _LOST_FIRM * (firm_missing + firm_surplus)
        least -= (2 * _LOST_FIRM - _OTHER) * np.minimum(firm_missing, firm_surplus)
        least -= (_LOST_FIRM + _LOST_WEAK - _OTHER) * mixed + _ROUNDING
        places = np.flatnonzero(least <= limit)
        nearest_first = places[np.argsort(least[places], kind="stable")]
        return list(zip(least[nearest_first].tolist(), (nearest_first + int(start)).tolist(), strict=True))


def _counts(sounds: str) -> list[int]:
    """How many of ``sounds`` belong to each class."""
    counts = [0] * len(_CLASSES)
    for sound in sounds:
        counts[_CLASS[sound]] += 1
    return counts


def distance(sentence: str, sounds: str, limit: float) -> float | None:
    """What it costs to turn ``sounds`` into those of a ``sentence``; None for more than ``limit``."""
    row = [0.0]
    for sound in sounds:
        row.append(row[-1] + _LOST[sound])
    for sound in sentence:
        row = _next_row(row, sounds, sound)
        if min(row) > limit:
            return None
    return row[-1] if row[-1] <= limit else None


def _next_row(row: list[float], sounds: str, sound: str) -> list[float]:
    """What each beginning of ``sounds`` costs against a sentence that goes on with ``sound`` where ``row`` was."""
    lost, kind = _LOST[sound], _CLASS[sound]
    costs = [row[0] + lost]
    for place, heard in enumerate(sounds):
        changed = row[place]
        if heard != sound:
            changed += _KIN if kind == _CLASS[heard] else _OTHER
        costs.append(min(changed, row[place + 1] + lost, costs[place] + _LOST[heard]))
    return costs

"""Answers by rules: no model, the same answer to the same question.

It says what it can do when asked, does that exactly, and otherwise repeats what it understood. It never pretends to
have understood more.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from itertools import islice

from omni_ws.engine.base import Message
from omni_ws.engine.llm.arithmetic import NotArithmetic, evaluate, in_digits, parse_number
from omni_ws.engine.text_pieces import pieces_of

MAX_COUNT = 1000
NUMBERS_PER_SENTENCE = 10
MAX_SPELLED_LETTERS = 200
#: Longer texts, in characters, are not compared with the rules.
MAX_REQUEST = 4096

NOTHING_HEARD = "I did not hear anything."
NOTHING_WRITTEN = "The message is empty."

HELP = (
    "I am the built-in demonstration engine: I answer by rules, not with a language model.",
    "Ask me for the time or the date.",
    "Ask me to add, subtract, multiply or divide.",
    "Say: count to twenty, spell a word, or repeat after me.",
    "Anything else I say back to you as I understood it.",
)

_Rule = Callable[[re.Match[str], Sequence[Message], datetime], Iterator[str] | None]

_POLITE = re.compile(r"(?:please|hey|okay|ok|so|(?:can|could|would|will) you(?: please)?|(?:tell|give) me)[\s,]+", re.I)
_POLITE_END = re.compile(r"[\s,](?:please|thank you|thanks|for me)$", re.I)
_LONGEST_POLITE_END = len(", thank you")
_REPEAT = re.compile(r"(?:repeat after me|repeat|say after me|say)[\s,:]+(?!(?:that|it|again)\b)", re.I)
_SPELL = re.compile(r"(?:how do you )?spell(?: the word| out)?[\s,:]+", re.I)
_TRAILING = " \t\r\n.!?,;"


def answer(text: str, history: Sequence[Message], now: datetime) -> Iterator[str]:
    """The sentences of the answer to ``text``, one at a time, so that a long one can be spoken while it is made.

    A text longer than ``MAX_REQUEST`` is at most something to repeat or to spell.
    """
    plain = _single_spaced(text)
    if not plain:
        yield NOTHING_WRITTEN
        return
    sentences = _short_answer(plain, history, now) if len(plain) <= MAX_REQUEST else _long_answer(plain)
    yield from sentences or (_ended(f"You said: {plain}"),)


def _short_answer(plain: str, history: Sequence[Message], now: datetime) -> Iterator[str] | None:
    request = _without_courtesy(plain)
    for pattern, rule in _RULES:
        match = pattern.fullmatch(request)
        if match is not None and (sentences := rule(match, history, now)) is not None:
            return sentences
    return None


def _long_answer(plain: str) -> Iterator[str] | None:
    start = _courtesy(plain[:MAX_REQUEST])
    if (repeat := _REPEAT.match(plain, start, MAX_REQUEST)) is not None:
        return _repeated(plain[repeat.end() :])
    if (spell := _SPELL.match(plain, start, MAX_REQUEST)) is not None:
        return _spelled(plain[spell.end() :])
    return None


def _single_spaced(text: str) -> str:
    """``text`` with each run of white space made one space, and none at its ends."""
    parts: list[str] = []
    space = False
    for piece in pieces_of(text):
        words = " ".join(piece.split())
        space = space or piece[0].isspace()
        if words:
            parts.append(f" {words}" if space and parts else words)
            space = False
        space = space or piece[-1].isspace()
    return "".join(parts)


def _without_courtesy(text: str) -> str:
    request = text.strip(_TRAILING)
    request = request[_courtesy(request) :]
    while (end := _POLITE_END.search(request, max(0, len(request) - _LONGEST_POLITE_END))) is not None:
        before = request[: end.start()].rstrip(" ,")
        if not before:
            break
        request = before.strip(_TRAILING)
    return request


def _courtesy(text: str) -> int:
    """Length of the courtesies that begin ``text``; something is left behind them."""
    length = 0
    while (match := _POLITE.match(text, length)) is not None and match.end() < len(text):
        length = match.end()
    return length


def _ended(sentence: str) -> str:
    return sentence if sentence[-1] in ".!?…" else f"{sentence}."


def _saying(*sentences: str) -> _Rule:
    return lambda match, history, now: iter(sentences)


def _time(match: re.Match[str], history: Sequence[Message], now: datetime) -> Iterator[str]:
    yield f"It is {now.hour % 12 or 12}:{now.minute:02d} {'AM' if now.hour < 12 else 'PM'}."


def _date(match: re.Match[str], history: Sequence[Message], now: datetime) -> Iterator[str]:
    yield f"Today is {now:%A}, {now:%B} {now.day}, {now.year}."


def _calculate(match: re.Match[str], history: Sequence[Message], now: datetime) -> Iterator[str] | None:
    try:
        return iter((f"That makes {in_digits(evaluate(match['expression']))}.",))
    except ZeroDivisionError:
        return iter(("Nothing can be divided by zero.",))
    except NotArithmetic:
        return None


def _count(match: re.Match[str], history: Sequence[Message], now: datetime) -> Iterator[str] | None:
    first = parse_number(match["first"]) if match["first"] else 1
    last = parse_number(match["last"])
    if first is None or last is None:
        return None
    if max(first, last) > MAX_COUNT:
        return iter((f"I count to {MAX_COUNT} at most.",))
    return _counted(first, last)


def _counted(first: int, last: int) -> Iterator[str]:
    step = 1 if last >= first else -1
    numbers = range(first, last + step, step)
    for start in range(0, len(numbers), NUMBERS_PER_SENTENCE):
        yield ", ".join(map(str, numbers[start : start + NUMBERS_PER_SENTENCE])) + "."


def _repeat(match: re.Match[str], history: Sequence[Message], now: datetime) -> Iterator[str] | None:
    return _repeated(match["words"])


def _repeated(words: str) -> Iterator[str] | None:
    words = words.strip(" ,:")
    return iter((_ended(words),)) if words else None


def _spell(match: re.Match[str], history: Sequence[Message], now: datetime) -> Iterator[str] | None:
    return _spelled(match["words"])


def _spelled(words: str) -> Iterator[str] | None:
    letters = list(islice(filter(str.isalnum, words), MAX_SPELLED_LETTERS + 1))
    if not letters:
        return None
    if len(letters) > MAX_SPELLED_LETTERS:
        return iter((f"I spell up to {MAX_SPELLED_LETTERS} letters.",))
    return iter((", ".join(letter.upper() for letter in letters) + ".",))


def _again(match: re.Match[str], history: Sequence[Message], now: datetime) -> Iterator[str]:
    said = [message.text for message in history if message.role == "assistant" and message.text.strip()]
    yield said[-1] if said else "I have not said anything yet."


def _what_i_said(match: re.Match[str], history: Sequence[Message], now: datetime) -> Iterator[str]:
    said = [message.text.strip() for message in history if message.role == "user" and message.text.strip()]
    yield f"You said: {said[-1].rstrip('.')}." if said else "You have not said anything before."


def _greet(match: re.Match[str], history: Sequence[Message], now: datetime) -> Iterator[str]:
    yield "Hello."
    yield "How can I help you?"


_RULES: tuple[tuple[re.Pattern[str], _Rule], ...] = tuple(
    (re.compile(pattern, re.I), rule)
    for pattern, rule in (
        (r"(?:what(?:'s| is)? (?:the )?(?:current )?time(?: is it)?(?: now)?|the (?:current )?time)", _time),
        (r"(?:what time (?:is it|it is)(?: now)?|do you (?:know|have) the time)", _time),
        (r"(?:what(?:'s| is) )?(?:the date|today's date|the date today|the date of today|today)", _date),
        (r"(?:what|which) (?:day|date) (?:is (?:it|today)|it is)(?: today)?", _date),
        (r"count (?:(?:up |down )?from (?P<first>.+?) )?(?:up |down )?to (?P<last>.+)", _count),
        (rf"{_REPEAT.pattern}(?P<words>.+)", _repeat),
        (rf"{_SPELL.pattern}(?P<words>.+)", _spell),
        (r"(?:(?:say|repeat) (?:that|it)(?: again)?|say again|again|pardon|what did you say)", _again),
        (r"what did i (?:just )?say", _what_i_said),
        (
            r"(?:help|help me|what can (?:you do|i say|i ask)|how does this work|who are you|what are you)",
            _saying(*HELP),
        ),
        (r"(?:stop|stop it|stop that|be quiet|quiet|silence|never ?mind|cancel|shut up)", _saying("Okay.")),
        (r"(?:hello|hi|hey|hello there|hi there|good (?:morning|afternoon|evening)|greetings)", _greet),
        (r"how are you(?: doing)?(?: today)?", _saying("I am running, thank you.")),
        (r"(?:thank you|thanks|thank you very much|thanks a lot)", _saying("You are welcome.")),
        (r"(?:bye|goodbye|good bye|bye bye|good night|see you)", _saying("Goodbye.")),
        (
            r"(?:what(?:'s| is)|what does|how much is|how much|calculate|compute|work out)?\s*(?P<expression>.+?)"
            r"(?: make| equal| equals| make together)?",
            _calculate,
        ),
    )
)

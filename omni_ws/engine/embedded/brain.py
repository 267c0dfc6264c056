"""The answers of the embedded engine: rules, no model, the same answer to the same question.

It says what it can do when asked, does that exactly, and otherwise repeats what it understood. It never pretends to
have understood more.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime

from omni_ws.engine.base import Message
from omni_ws.engine.embedded.arithmetic import NotArithmetic, evaluate, in_digits, parse_number

MAX_COUNT = 1000
NUMBERS_PER_SENTENCE = 10
MAX_SPELLED_LETTERS = 200

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

_POLITE = re.compile(
    r"^(?:please|hey|okay|ok|so|(?:can|could|would|will) you(?: please)?|(?:tell|give) me)[\s,]+", re.I
)
_POLITE_END = re.compile(r"[\s,]+(?:please|thank you|thanks|for me)$", re.I)
_TRAILING = " \t\r\n.!?,;"


def answer(text: str, history: Sequence[Message], now: datetime) -> Iterator[str]:
    """The sentences of the answer to ``text``, one at a time, so that a long one can be spoken while it is made."""
    plain = " ".join(text.split())
    if not plain:
        yield NOTHING_WRITTEN
        return
    request = _without_courtesy(plain)
    for pattern, rule in _RULES:
        match = pattern.fullmatch(request)
        if match is not None and (sentences := rule(match, history, now)) is not None:
            yield from sentences
            return
    yield f"You said: {plain}" if plain[-1] in ".!?…" else f"You said: {plain}."


def _without_courtesy(text: str) -> str:
    request = text.strip(_TRAILING)
    while (match := _POLITE.match(request)) is not None and match.end() < len(request):
        request = request[match.end() :]
    while (match := _POLITE_END.search(request)) is not None and match.start() > 0:
        request = request[: match.start()].strip(_TRAILING)
    return request


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


def _repeat(match: re.Match[str], history: Sequence[Message], now: datetime) -> Iterator[str]:
    words = match["words"].strip(" ,:")
    yield words if words[-1] in ".!?…" else f"{words}."


def _spell(match: re.Match[str], history: Sequence[Message], now: datetime) -> Iterator[str] | None:
    letters = [letter for letter in match["words"].strip("\"'“”") if letter.isalnum()]
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
        (r"(?:repeat after me|repeat|say after me|say)[\s,:]+(?P<words>(?!that\b|it\b|again\b).+)", _repeat),
        (r"(?:how do you )?spell(?: the word| out)?[\s,:]+(?P<words>.+)", _spell),
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

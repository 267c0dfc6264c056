"""Counting, spelling and repeating: what rules do exactly."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from typing import Final

from omni_ws.engine.llm.arithmetic import parse_number
from omni_ws.engine.llm.intents.intent import Asked, Intent, Slots

MAX_COUNT: Final = 1000
NUMBERS_PER_SENTENCE: Final = 10
MAX_SPELLED_LETTERS: Final = 200

REPEAT: Final = re.compile(
    r"(?:repeat after me|repeat|say after me|say)[\s,:]+(?!(?:that|it|this|again|the (?:question|"
    r"answer|last|joke|riddle))\b)",
    re.I,
)
SPELL: Final = re.compile(r"(?:how do (?:you|i) )?spell(?: the word| out)?[\s,:]+", re.I)
#: "Say yes or no: is the earth flat?" wants one of the words, not all.
_CHOICE: Final = re.compile(
    r"(?:(?:only|just|either|simply) )?(?:(?:yes or no|no or yes|true or false|right or wrong)\W+\w|"
    r"[\w'’-]{1,20}(?:,? [\w'’-]{1,20}){0,3},? or [\w'’-]{1,20}\s?[:;,.?!]\s?\w)",
    re.I,
)
#: Words that stand for the word that was spelled last.
_THAT: Final = "it|that|this|that word|the word"
_SPELLED: Final = re.compile(rf"\b{SPELL.pattern}(?!(?:{_THAT})\b)(.{{1,60}})", re.I)


def repeated(words: str) -> Iterator[str] | None:
    """The words once more, as a sentence; None where there are none."""
    words = words.strip(' ,:"“”')
    if _CHOICE.match(words) is not None:
        return None
    if not any(map(str.isalnum, words)):
        return None
    return iter((words if words[-1] in ".!?…" else f"{words}.",))


def spelled(words: str) -> Iterator[str] | None:
    """The letters one by one; None where there are none."""
    letters = list(islice(filter(str.isalnum, words), MAX_SPELLED_LETTERS + 1))
    if not letters:
        return None
    if len(letters) > MAX_SPELLED_LETTERS:
        return iter((f"I spell up to {MAX_SPELLED_LETTERS} letters.",))
    return iter((", ".join(letter.upper() for letter in letters) + ".",))


def _count(asked: Asked, slots: Slots) -> Iterator[str] | None:
    first = parse_number(slots["first"]) if "first" in slots else 1
    last = parse_number(slots["last"])
    if first is None or last is None:
        return None
    if max(first, last) > MAX_COUNT:
        return iter((f"I count to {MAX_COUNT} at most.",))
    return _counted(first, last)


def _count_down(asked: Asked, slots: Slots) -> Iterator[str] | None:
    first = parse_number(slots["first"])
    if first is None:
        return None
    return _counted(first, 0) if first <= MAX_COUNT else iter((f"I count from {MAX_COUNT} at most.",))


def _counted(first: int, last: int) -> Iterator[str]:
    step = 1 if last >= first else -1
    numbers = range(first, last + step, step)
    for start in range(0, len(numbers), NUMBERS_PER_SENTENCE):
        yield ", ".join(map(str, numbers[start : start + NUMBERS_PER_SENTENCE])) + "."


def _backwards(asked: Asked, slots: Slots) -> Iterator[str] | None:
    words = slots["words"]
    if words.lower() in _THAT.split("|"):
        words = next((found[1] for heard in reversed(asked.talk.heard) if (found := _SPELLED.search(heard))), words)
    return spelled(words[::-1])


def _how_many_letters(asked: Asked, slots: Slots) -> Iterator[str] | None:
    word = "".join(letter for letter in slots["word"] if letter.isalnum())
    letter = slots.get("letter", "").casefold()
    number = word.casefold().count(letter) if letter else len(word)
    if not word:
        return None
    if letter:
        times = {0: "is not", 1: "is once"}.get(number, f"is {number} times")
        return iter((f"The letter {letter.upper()} {times} in {slots['word'].strip()}.",))
    return iter((f"{slots['word'].strip().capitalize()} has {number} letter{'s' if number != 1 else ''}.",))


def _greeted(asked: Asked, slots: Slots) -> Iterator[str]:
    """The greeting that somebody wants to be said to somebody."""
    whom = re.sub(r"^my\b", "your", slots["whom"])
    return iter((f"{slots['greeting'][:1].upper()}{slots['greeting'][1:]} to {whom}.",))


LETTERS = (
    Intent(
        name="greet somebody",
        slots=(
            r"(?:say )(?P<greeting>hello|hi|hey|good morning|good evening|good night) to "
            r"(?P<whom>(?:my|the|our) [a-z]+(?: [a-z]+)?|every(?:one|body)|all of us|us)",
        ),
        reply=_greeted,
    ),
    Intent(
        name="alphabet",
        phrases=(
            "(say|recite|tell me|spell|give me|do you know|what is|repeat|sing) the (alphabet|abc)",
            "(the alphabet|alphabet|abc|a b c|say the a b c)",
        ),
        says=("A, B, C, D, E, F, G, H, I, J, K, L, M, N, O, P, Q, R, S, T, U, V, W, X, Y, Z.",),
    ),
    Intent(
        name="alphabet backwards",
        phrases=("[(say|recite|tell me|do you know)] the (alphabet|abc) (backwards|backward|in reverse)",),
        says=("Z, Y, X, W, V, U, T, S, R, Q, P, O, N, M, L, K, J, I, H, G, F, E, D, C, B, A.",),
    ),
    Intent(
        name="spell my name",
        phrases=(
            "(spell my name|how do you spell my name|can you spell|can you spell words|spell|spell something|spell "
            "a word|how do you spell it|how do you spell that|spell it|spell that)",
        ),
        says=("Tell me which word. For example: spell rhythm.", "Which word? Say: spell, and then the word."),
    ),
    Intent(
        name="count",
        phrases=("(count|count for me|can you count for me|count something)",),
        reply=lambda asked, slots: _counted(1, 10),
    ),
    Intent(
        name="count to",
        slots=(
            r"count (?:(?:up |down )?from (?P<first>.+?) )?(?:up |down )?to (?P<last>.+)",
            r"(?:count|counter) (?P<last>.+)",
        ),
        reply=_count,
    ),
    Intent(
        name="count down",
        slots=(r"count (?:down |backwards )?(?:down |backwards )from (?P<first>.+?)(?: to zero| to 0)?",),
        reply=_count_down,
    ),
    Intent(
        name="backwards", written=(r"(?:spell|say) (?P<words>.{1,60}) (?:backwards?|in reverse)",), reply=_backwards
    ),
    Intent(
        name="how many letters",
        written=(
            r"how many letters (?:are (?:there )?in|does|has|in|are) (?:the word )?(?P<word>\w{1,60}?)(?: have| got)?",
            r"how many (?:times is (?:the letter )?)?(?P<letter>\w)['’]?s? (?:are (?:there )?|is (?:there "
            r")?)?in (?:the word )?(?P<word>\w{2,60})",
        ),
        reply=_how_many_letters,
    ),
    Intent(
        name="spell", written=(rf"{SPELL.pattern}(?P<words>.+)",), reply=lambda asked, slots: spelled(slots["words"])
    ),
    Intent(
        name="repeat after me",
        phrases=("(repeat after me|say after me|say|repeat what i say|can you repeat what i say|repeat my words)",),
        says=("Tell me what to say.", "Go on. Say: repeat after me, and then the words."),
    ),
    Intent(
        name="repeat words",
        written=(rf"{REPEAT.pattern}(?P<words>.+)",),
        reply=lambda asked, slots: repeated(slots["words"]),
    ),
)

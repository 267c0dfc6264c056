"""Spelling, repeating and counting, and what chance decides: coins, dice and choices."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from typing import Final

from omni_ws.engine.llm.intents.sums import parse_number
from omni_ws.engine.llm.plain_words import Asked, Slots, inserted, read
from omni_ws.engine.spoken.english_numbers import SMALL_NUMBERS

MAX_COUNT: Final = 1000
NUMBERS_PER_SENTENCE: Final = 10
MAX_SPELLED_LETTERS: Final = 200
MAX_DICE: Final = 20
MAX_SIDES: Final = 1000
_MAX_NUMBER: Final = 10**12

_WORDS: Final[dict[str, str]] = read("letters")["words"]
REPEAT: Final = re.compile(inserted(_WORDS["repeat"], {}), re.I)
SPELL: Final = re.compile(_WORDS["spell"], re.I)
#: "Say yes or no: is the earth flat?" wants one of the words, not all.
_CHOICE: Final = re.compile(inserted(_WORDS["one_of_these"], {}), re.I)
_SPELLED: Final = re.compile(rf"\b{SPELL.pattern}(?!(?:{_WORDS['last_word']})\b)(.{{1,60}})", re.I)


def repeated(words: str) -> str | None:
    """The words once more, as a sentence; None where there are none."""
    words = words.strip(' ,:"“”')
    if _CHOICE.match(words) is not None or not any(map(str.isalnum, words)):
        return None
    return words if words[-1] in ".!?…" else f"{words}."


def spelled(words: str) -> str | None:
    """The letters one by one; None where there are none."""
    letters = list(islice(filter(str.isalnum, words), MAX_SPELLED_LETTERS + 1))
    if len(letters) > MAX_SPELLED_LETTERS:
        return f"I spell up to {MAX_SPELLED_LETTERS} letters."
    return ", ".join(letter.upper() for letter in letters) + "." if letters else None


def repeat(asked: Asked, slots: Slots) -> str | None:
    return repeated(slots["words"])


def spell(asked: Asked, slots: Slots) -> str | None:
    return spelled(slots["words"])


def backwards(asked: Asked, slots: Slots) -> str | None:
    words = slots["words"]
    if words.lower() in _WORDS["last_word"].split("|"):
        words = next((found[1] for heard in reversed(asked.talk.heard) if (found := _SPELLED.search(heard))), words)
    return spelled(words[::-1])


def how_many_letters(asked: Asked, slots: Slots) -> str | None:
    word, letter = "".join(filter(str.isalnum, slots["word"])), slots.get("letter", "")
    if not word:
        return None
    if letter:
        number = word.casefold().count(letter.casefold())
        times = {0: "is not", 1: "is once"}.get(number, f"is {number} times")
        return f"The letter {letter.upper()} {times} in {slots['word'].strip()}."
    return f"{slots['word'].strip().capitalize()} has {len(word)} letter{'s' if len(word) != 1 else ''}."


def count(asked: Asked, slots: Slots) -> str | Iterator[str] | None:
    """The numbers from ``first`` (1) to ``last`` (0)."""
    first, last = parse_number(slots.get("first", "1")), parse_number(slots.get("last", "0"))
    if first is None or last is None:
        return None
    if max(first, last) > MAX_COUNT:
        return f"I count {'to' if 'last' in slots else 'from'} {MAX_COUNT} at most."
    numbers = range(first, last + 1) if last >= first else range(first, last - 1, -1)
    parts = range(0, len(numbers), NUMBERS_PER_SENTENCE)
    return (", ".join(map(str, numbers[part : part + NUMBERS_PER_SENTENCE])) + "." for part in parts)


def coins(asked: Asked, slots: Slots) -> str | None:
    number = parse_number(slots["number"])
    if number is None or number < 1:
        return None
    heads = sum(asked.chance.choice((0, 1)) for _ in range(min(number, MAX_DICE)))
    return f"{heads} heads, and {number - heads} tails." if number <= MAX_DICE else f"I toss {MAX_DICE} coins at most."


def dice(asked: Asked, slots: Slots) -> str | None:
    number, sides = parse_number(slots.get("number", "one")), parse_number(slots.get("sides", "six"))
    if slots.get("number") in ("a", "an", "the", "some"):
        number = 1
    if number is None or sides is None or number < 1 or sides < 2:
        return None
    if number > MAX_DICE or sides > MAX_SIDES:
        return f"I roll {MAX_DICE} dice at most, with {MAX_SIDES} sides."
    *others, last = [asked.chance.randint(1, sides) for _ in range(number)]
    if not others:
        return f"It's {'an' if str(last)[0] == '8' or last in (11, 18) else 'a'} {last}."
    return f"{', '.join(map(str, others))} and {last}. That makes {sum(others) + last}."


def card(asked: Asked, slots: Slots) -> str:
    rank = asked.chance.choice(("ace", *SMALL_NUMBERS[2:11], "jack", "queen", "king"))
    return f"The {rank} of {asked.chance.choice(('clubs', 'diamonds', 'hearts', 'spades'))}."


def number(asked: Asked, slots: Slots) -> str | None:
    first, last = parse_number(slots.get("first", "1")), parse_number(slots.get("last", "100"))
    if first is None or last is None or max(first, last) > _MAX_NUMBER:
        return None
    return f"{asked.chance.randint(min(first, last), max(first, last))}."


def choice(asked: Asked, slots: Slots) -> str | None:
    parts = re.split(r",\s*(?:or\s+|and\s+)?|\s+(?:or|and)\s+", slots["things"])
    things = [thing for part in parts if (thing := part.strip(" ,?.!"))]
    if not 2 <= len(things) <= 20 or max(map(len, things)) > 60:
        return None
    chosen = asked.chance.choice(things)
    return f"{chosen[:1].upper()}{chosen[1:]}."


def hand(asked: Asked, slots: Slots) -> str:
    """Rock, paper, scissors."""
    beats = {"rock": "scissors", "scissors": "paper", "paper": "rock"}
    mine, yours = asked.chance.choice(tuple(beats)), slots.get("hand")
    if yours is None:
        return f"I take {mine}."
    return (
        f"I take {mine}{', too. Nobody wins' if mine == yours else '. I win' if beats[mine] == yours else '. You win'}."
    )

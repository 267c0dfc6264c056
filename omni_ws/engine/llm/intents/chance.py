"""Coins, dice and choices: drawn from the chance of the request."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from omni_ws.engine.llm.arithmetic import parse_number
from omni_ws.engine.llm.intents.intent import Asked, Intent, Slots
from omni_ws.engine.llm.plain_words import listed

MAX_DICE: Final = 20
MAX_SIDES: Final = 1000
_MAX_NUMBER: Final = 10**12
_SUITS: Final = ("clubs", "diamonds", "hearts", "spades")
_HANDS: Final = {"rock": "scissors", "scissors": "paper", "paper": "rock"}


def _coin(asked: Asked, slots: Slots) -> Iterator[str]:
    return iter((asked.chance.choice(("Heads.", "Tails.")),))


def _coins(asked: Asked, slots: Slots) -> Iterator[str] | None:
    number = parse_number(slots["number"])
    if number is None or number < 1:
        return None
    if number > MAX_DICE:
        return iter((f"I toss {MAX_DICE} coins at most.",))
    heads = sum(asked.chance.choice((0, 1)) for _ in range(number))
    return iter((f"{heads} heads, and {number - heads} tails.",))


def _dice(asked: Asked, slots: Slots) -> Iterator[str] | None:
    number, sides = parse_number(slots.get("number", "one")), parse_number(slots.get("sides", "six"))
    if slots.get("number") in ("a", "an", "the", "some"):
        number = 1
    if number is None or sides is None or number < 1 or sides < 2:
        return None
    if number > MAX_DICE or sides > MAX_SIDES:
        return iter((f"I roll {MAX_DICE} dice at most, with {MAX_SIDES} sides.",))
    rolled = [asked.chance.randint(1, sides) for _ in range(number)]
    if number == 1:
        return iter((f"It's {_article(rolled[0])} {rolled[0]}.",))
    listed = ", ".join(map(str, rolled[:-1]))
    return iter((f"{listed} and {rolled[-1]}. That makes {sum(rolled)}.",))


def _article(number: int) -> str:
    """That of a number up to 1000: a 7, an 8, an 18."""
    return "an" if str(number)[0] == "8" or number in (11, 18) else "a"


def _card(asked: Asked, slots: Slots) -> Iterator[str]:
    ranks = ("ace", *listed("two three four five six seven eight nine ten jack queen king"))
    return iter((f"The {asked.chance.choice(ranks)} of {asked.chance.choice(_SUITS)}.",))


def _number(asked: Asked, slots: Slots) -> Iterator[str] | None:
    first, last = (parse_number(slots.get(name, default)) for name, default in (("first", "1"), ("last", "100")))
    if first is None or last is None or max(first, last) > _MAX_NUMBER:
        return None
    return iter((f"{asked.chance.randint(min(first, last), max(first, last))}.",))


def _choice(asked: Asked, slots: Slots) -> Iterator[str] | None:
    parts = [part.strip(" ,?.!") for part in re.split(r",\s*(?:or\s+|and\s+)?|\s+(?:or|and)\s+", slots["things"])]
    things = [part for part in parts if part]
    if not 2 <= len(things) <= 20 or max(map(len, things)) > 60:
        return None
    chosen = asked.chance.choice(things)
    return iter((f"{chosen[:1].upper()}{chosen[1:]}.",))


def _hand(asked: Asked, slots: Slots) -> Iterator[str]:
    mine, yours = asked.chance.choice(tuple(_HANDS)), slots.get("hand")
    if yours is None:
        return iter((f"I take {mine}.",))
    if mine == yours:
        return iter((f"I take {mine}, too. Nobody wins.",))
    return iter((f"I take {mine}. {'I win.' if _HANDS[mine] == yours else 'You win.'}",))


_DIE: Final = r"(?:die|dice|dices|dies)"

CHANCE = (
    Intent(
        name="coin",
        phrases=(
            "(flip|toss|throw|spin) (a|the|one|your) coin [for me]",
            "(flip|toss) it",
            "(heads or tails|head or tail|coin toss|coin flip|flip coin|toss coin|coin|let us flip a coin|can you "
            "flip coins)",
        ),
        reply=_coin,
        renews=True,
    ),
    Intent(name="coins", slots=(r"(?:flip|toss|throw) (?P<number>[a-z0-9 -]{1,20}) coins",), reply=_coins, renews=True),
    Intent(
        name="dice",
        phrases=(
            "(roll|throw) (a|the|one|some|your) (die|dice)",
            "(roll it|dice|roll the dice for me|roll dice|let us roll dice|can you roll dice|roll)",
        ),
        slots=(
            rf"(?:roll|throw) (?P<number>[a-z0-9 ]{{1,20}}?) (?P<sides>[a-z0-9]{{1,12}})(?: |-)sided {_DIE}",
            rf"(?:roll|throw) (?P<number>[a-z0-9 ]{{1,20}}?) {_DIE}(?: with (?P<sides>[a-z0-9 ]{{1,20}}) sides)?",
            r"(?:roll|throw) (?P<number>a|an|one) d (?P<sides>\d{1,4})",
        ),
        reply=_dice,
        renews=True,
    ),
    Intent(
        name="card",
        phrases=("(pick|draw|choose|take) (a|any|one) card [(any card|for me)]",),
        reply=_card,
        renews=True,
    ),
    Intent(
        name="number",
        phrases=(
            "(pick|choose|say|give me|tell me|think of) (a|any|a random|some) number",
            "(random number|a number|number|a random number)",
            "(give me|pick|generate|i need) a random number",
        ),
        slots=(
            r"(?:pick |choose |say |think of |generate )?(?:a |any )?(?:random )?number (?:between|from) "
            r"(?P<first>[a-z0-9 ,]{1,40}?) (?:and|to) (?P<last>[a-z0-9 ,]{1,40})",
        ),
        reply=_number,
        renews=True,
    ),
    Intent(
        name="choice",
        written=(
            r"(?:choose|pick|decide|select)(?: one)?(?: of| from| between)?:? (?P<things>.{3,200})",
            r"(?:should|shall) i (?:have|take|eat|drink|wear|choose|pick|get|buy|watch|read|play) "
            r"(?P<things>.{1,100} or .{1,100})",
        ),
        reply=_choice,
        renews=True,
    ),
    Intent(
        name="yes or no",
        phrases=("(yes or no|say yes or no)",),
        reply=lambda asked, slots: iter((asked.chance.choice(("Yes.", "No.")),)),
        renews=True,
    ),
    Intent(
        name="rock paper scissors",
        phrases=("[let us play] rock paper scissors", "(rock paper scissors shoot|play rock paper scissors [with me])"),
        slots=(r"(?:i take |i choose )?(?P<hand>rock|paper|scissors)",),
        reply=_hand,
        renews=True,
    ),
)

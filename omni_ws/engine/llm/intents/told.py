"""What the conversation so far tells: names and favorites, earlier words, and riddles that are under way."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, Final, TypeAlias

from omni_ws.engine.llm.intents.sums import parse_number
from omni_ws.engine.llm.plain_words import Asked, Slots, Talk, inserted, plain_words, read, requests

Value: TypeAlias = Callable[[Asked, Slots], str | None]

_TELLING: Final = read("told")
#: Words with which a name ends, and with which none begins.
_NO_NAME: Final = frozenset(_TELLING["no_names"].split())
_DAY_NAMES: Final = frozenset(_TELLING["weekdays"].split())
#: Written with a capital, too, and no names of people.
_NOBODY: Final = _NO_NAME | _DAY_NAMES | frozenset(_TELLING["nations"].split())
_MOST_NAMES: Final = 3
_MOST_LETTERS: Final = 40
_MOST_VALUE_WORDS: Final = 8
_NAMED: Final = re.compile(rf"\b{_TELLING['words']['named']}")
_WRITTEN_NAME: Final = re.compile(inserted(_TELLING["words"]["written_name"], {}))
#: What is told → its form.
_FACTS: Final = {name: re.compile(inserted(form, _TELLING["words"])) for name, form in _TELLING["facts"].items()}
_OLDEST: Final = 130
#: Where a sentence goes on with another fact, as in "I'm Ann and my dog is called Rex".
_NEXT_FACT: Final = re.compile(r" and (?=(?:my|i (?:live|am)) )")
_MOST_FACTS: Final = 8


# Names and facts


def name_told(talk: Talk) -> str | None:
    """The name that somebody gave themselves last."""
    return next((name for heard in reversed(talk.heard) if (name := _own_name(heard)) is not None), None)


def age(asked: Asked, slots: Slots) -> str | None:
    number = parse_number(slots["age"])
    return asked.talk.fresh(_TELLING["ages"]) if number is not None and 0 < number <= _OLDEST else None


def _own_name(text: str) -> str | None:
    if (found := _NAMED.search(plain_words(text))) is not None:
        if found[0].startswith("call me") and found["name"].split()[0] in _DAY_NAMES:
            return None  # it is when to call
        return _name(found["name"], text)
    written = _WRITTEN_NAME.fullmatch(text.strip())
    return None if written is None or written["name"].split()[0].lower() in _NOBODY else written["name"]


def _name(words: str, text: str) -> str | None:
    """The name with which plain ``words`` begin, with the capitals that it has in ``text``, or its own."""
    name: list[str] = []
    for word in words.split()[:_MOST_NAMES]:
        if word in _NO_NAME or not word[0].isalpha() or len(word) > _MOST_LETTERS:
            break
        written = re.search(rf"\b{re.escape(word)}\b", text, re.I)
        name.append(word.capitalize() if written is None or written[0] == word else written[0])
    return " ".join(name) or None


def _facts(text: str) -> Iterator[tuple[str, str]]:
    """What somebody tells of themselves, such as ("favorite color", "blue"), as it was written."""
    clauses = _NEXT_FACT.split(plain_words(text), maxsplit=_MOST_FACTS)
    for words in chain.from_iterable(reversed([*requests(clause)]) for clause in clauses):
        for name, form in _FACTS.items():
            if (found := form.fullmatch(words)) is not None and found["value"].count(" ") < _MOST_VALUE_WORDS:
                what, value = _what(found.groupdict()) or name, found["value"]
                if what.endswith(" name"):
                    value = _name(value, text) or ""
                elif (written := re.search(r"\W*".join(map(re.escape, value.split())), text, re.I)) is not None:
                    value = written[0]
                if value:
                    yield what, value


def _what(slots: Slots) -> str:
    return slots.get("what") or (f"{slots['pet']}'s name" if slots.get("pet") else "")


def _noted(asked: Asked, slots: Slots) -> str | None:
    return next((f"{what} is {value}" for what, value in _facts(asked.text)), None)


def _told(asked: Asked, slots: Slots) -> str | None:
    """The value of what is asked for, as it was told last."""
    facts = (fact for heard in reversed(asked.talk.heard) for fact in _facts(heard))
    return next((value for what, value in facts if what == (_what(slots) or slots["fact"])), None)


# What was said

_ASKING: Final = frozenset(_TELLING["asking"].split())
_DOING: Final = frozenset(_TELLING["doing"].split())
UNKNOWN: Final[dict[str, list[str]]] = _TELLING["unknown"]


def sorry(asked: Asked, slots: Slots) -> str:
    """ "Sorry?" asks for the last answer again, "sorry" excuses."""
    again = asked.text.endswith("?") and asked.talk.last_answer
    return again or asked.talk.fresh(_TELLING["excused"])


def _which_heard(asked: Asked, slots: Slots) -> str | None:
    """The first, second … thing that was said; where it is what was asked, of the questions, if there are any."""
    said = asked.talk.all_heard
    if "ask" in slots:
        said = [words for words in said if is_question(words)] or said
    place = _TELLING["places"][slots["place"]]
    if place < len(said):
        return _quoted(said[place])
    return "I haven't heard that many from you." if said else None


def is_question(text: str) -> bool:
    """Whether something is asked, by its first word or its mark; recognition may leave that out."""
    return text.rstrip().endswith("?") or _first_word(text) in _ASKING


def kind_of(text: str) -> str:
    """Return the kind of a text that no rule fits, which is a key of ``UNKNOWN``, such as "question" or "foreign"."""
    letters = [letter for letter in text[:200] if letter.isalpha()]
    if not any(map(str.isalnum, text)):
        return "wordless"
    if sum(letter.isascii() for letter in letters) < len(letters) / 2:
        return "foreign"
    if is_question(text):
        return "question"
    return "command" if _first_word(text) in _DOING else "statement"


def _first_word(text: str) -> str:
    """The first one behind courtesies."""
    *_, request = requests(plain_words(text))
    return request.split(" ", 1)[0]


def _quoted(heard: str) -> str | None:
    if not heard:
        return None
    return f"You asked: {heard.rstrip('.!?')}?" if is_question(heard) else f"I heard: {heard.rstrip('.!')}."


# Riddles and jokes that are under way

SAYINGS: Final[dict[str, Any]] = _TELLING["sayings"]
RIDDLES: Final[dict[str, list[str]]] = SAYINGS["riddle"]


def solution(asked: Asked, slots: Slots) -> str | None:
    """The solution of the riddle in the last answer."""
    return next((words[0] for riddle, words in RIDDLES.items() if asked.talk.last_answer.endswith(riddle)), None)


def solved(asked: Asked) -> str | None:
    """What is said to the solution of a riddle, if the request is one."""
    right = next((words for riddle, (_, *words) in RIDDLES.items() if asked.talk.last_answer.endswith(riddle)), ())
    if any(f" {word} " in f" {asked.words} " for word in right):
        return "Right! Well done."
    if right and asked.words in _TELLING["given_up"]:
        return f"It is {solution(asked, {})}."
    is_guess = asked.words.count(" ") < 3 and asked.words.split(" ")[0] in ("a", "an", "the", "is", "your", "it")
    return f"A good try. It is {solution(asked, {})}." if right and is_guess else None


def _saying(wordings: Iterable[str]) -> Value:
    return lambda asked, slots: asked.talk.fresh(tuple(wordings))


TELLINGS: Final[dict[str, Value]] = {
    "name": lambda asked, slots: name_told(asked.talk),
    "new_name": lambda asked, slots: _own_name(asked.text),
    "known_name": lambda asked, slots: name if (name := _own_name(asked.text)) == name_told(asked.talk) else None,
    "noted": _noted,
    "told": _told,
    "what": lambda asked, slots: _what(slots),
    "solution": solution,
    "last_answer": lambda asked, slots: asked.talk.last_answer or None,
    "all_said": lambda asked, slots: "That's all that I had to say." if asked.talk.last_answer else None,
    "last_heard": lambda asked, slots: _quoted(asked.talk.last_heard),
    "which_heard": _which_heard,
    **{name: _saying(wordings) for name, wordings in SAYINGS.items()},
}

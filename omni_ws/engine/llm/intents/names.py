"""Names and favourites that somebody tells, which are remembered for as long as the conversation is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from omni_ws.engine.llm.intents.matcher import Asked, Intent, Reply, Slots
from omni_ws.engine.llm.plain_words import Talk, listed, plain_words, requests

#: Words with which a name ends, and with which none begins.
_NO_NAME: Final = frozenset(
    listed(
        "a an the not no nothing none nobody and but i is it what who my your his her our in on at of from for to "
        "so very really just also still too that this because if or you me we they he she please okay thanks secret "
        "important like going getting here there sorry fine good great well tired back how am do can tell names "
        "later hello hi hey bye yes today tonight tomorrow yesterday when whenever while until till once before after "
        "again now then soon every next anytime sometime"
    )
)
_WEEKDAYS: Final = frozenset(listed("monday tuesday wednesday thursday friday saturday sunday"))
#: Written with a capital, too, and no names of people.
_NATIONS: Final = _WEEKDAYS | frozenset(
    listed(
        "american british english german french spanish italian polish chinese indian japanese irish scottish "
        "canadian australian mexican brazilian russian turkish greek dutch swedish danish christian muslim jewish "
        "god christmas"
    )
)
_MOST_WORDS: Final = 3
_MOST_LETTERS: Final = 40
_MOST_VALUE_WORDS: Final = 8
_NOT_TOLD: Final = "You haven't told me."

_NAMED = re.compile(
    r"\b(?:my (?:first |full |real )?name is|call me|they call me|people call me|i am called) "
    r"(?P<name>.+)"
)
#: "I'm Ann" names somebody where it is written so; "I'm tired" does not.
_WRITTEN_NAME = re.compile(
    r"(?:(?:Hello|Hi|Hey|Hello there|Hi there|Good \w{1,9})[,.!]? )?(?:I am|[Ii]['’]m|This is) "
    r"(?P<name>[A-Z][\w'’-]{0,39}(?: [A-Z][\w'’-]{0,39}){0,2})"
    r"(?:,? (?:and )?(?:it['’]s |I['’]m )?(?:nice|pleased|good|glad|great) to meet you| [Ss]peaking| [Hh]ere)?[.!]?"
)
_THING: Final = (
    r"(?P<what>favorite [a-z]+(?: [a-z]+)?|[a-z]+'s name|birthday|job|hobby|home town|hometown|lucky "
    r"number)"
)
_PET: Final = r"(?P<pet>dog|cat|horse|wife|husband|son|daughter|brother|sister|mother|father|friend)"
_FACT = re.compile(rf"my {_THING} is (?P<value>[^ ].*)")
_CALLED = re.compile(rf"(?:my|i have a) {_PET} (?:is )?(?:called|named) (?P<value>.+)")
#: What is answered to these stands in feelings.py. Here they are only remembered.
_HOME = re.compile(r"i (?:live|am living) in (?P<value>[^ ].*)")
_AGE = re.compile(r"i am (?P<value>[a-z0-9 ]+?)(?: years old| today)+")


_ASKS_BACK = re.compile(r" (?:what is your name|what is yours|who are you|and you|and yours)$")


#: What is behind the first "is", as it was written.
_WRITTEN_VALUE = re.compile(r"\bis\s+(?P<value>\S.*)", re.I | re.S)


def name_told(talk: Talk) -> str | None:
    """The name that somebody gave themselves last."""
    return next((name for heard in reversed(talk.heard) if (name := _own_name(heard)) is not None), None)


def _own_name(text: str) -> str | None:
    if (found := _NAMED.search(plain_words(text))) is not None:
        if found[0].startswith("call me") and found["name"].split()[0] in _WEEKDAYS:
            return None  # it is when to call
        return _name(found["name"], text)
    written = _WRITTEN_NAME.fullmatch(text.strip())
    if written is None or written["name"].split()[0].lower() in _NATIONS | _NO_NAME:
        return None
    return written["name"]


def _name(words: str, text: str) -> str | None:
    """The name with which plain ``words`` begin, with the capitals that it has in ``text``, or its own."""
    name: list[str] = []
    for word in words.split()[:_MOST_WORDS]:
        if word in _NO_NAME or not word[0].isalpha() or len(word) > _MOST_LETTERS:
            break
        written = re.search(rf"\b{re.escape(word)}\b", text, re.I)
        name.append(word.capitalize() if written is None or written[0] == word else written[0])
    return " ".join(name) or None


def _fact(text: str) -> tuple[str, str] | None:
    """What somebody tells of themselves, such as ("favorite color", "blue")."""
    for words in requests(plain_words(text)):
        if (found := _CALLED.fullmatch(words) or _FACT.fullmatch(words)) is not None:
            break
    else:
        return None
    what = found.groupdict().get("what") or f"{found['pet']}'s name"
    value: str | None = found["value"]
    if what.endswith(" name"):
        value = _name(found["value"], text)
    elif (written := _WRITTEN_VALUE.search(text.rstrip(" .,!"))) is not None and plain_words(written["value"]) == value:
        value = written["value"]
    return (what, value) if value and value.count(" ") < _MOST_VALUE_WORDS else None


def _introduced(asked: Asked, slots: Slots) -> Iterator[str] | None:
    name = _own_name(asked.text)
    if name is None:
        return None
    if name == name_told(asked.talk):
        return iter((asked.talk.fresh((f"Yes, {name}. I remember.", f"I know, {name}.")),))
    greeting = asked.talk.fresh((f"Nice to meet you, {name}.", f"All right, {name} it is."))
    return iter((greeting, "I have no name.") if _ASKS_BACK.search(asked.words) else (greeting,))


def _tell_name(asked: Asked, slots: Slots) -> Iterator[str]:
    name = name_told(asked.talk)
    if name is None:
        return iter(
            (asked.talk.fresh(("You haven't told me your name yet.", "I don't know your name yet. What is it?")),)
        )
    return iter((asked.talk.fresh((f"Your name is {name}.", f"You are {name}.")),))


def _noted(asked: Asked, slots: Slots) -> Iterator[str] | None:
    told = _fact(asked.text)
    return None if told is None else iter((f"I'll remember that your {told[0]} is {told[1]}.",))


def _tell_fact(asked: Asked, slots: Slots) -> Iterator[str]:
    what = slots.get("what") or f"{slots['pet']}'s name"
    for heard in reversed(asked.talk.heard):
        told = _fact(heard)
        if told is not None and told[0] == what:
            return iter((f"Your {told[0]} is {told[1]}.",))
    return iter((_NOT_TOLD,))


def _tell_of(told: re.Pattern[str], verb: str) -> Reply:
    """A reply with the value of the last sentence like ``told``: "You told me that you live in Berlin."."""

    def tell(asked: Asked, slots: Slots) -> Iterator[str]:
        for heard in reversed(asked.talk.heard):
            *_, words = requests(plain_words(heard))
            if (found := told.fullmatch(words)) is not None:
                written = re.search(rf"\b{re.escape(found['value'])}\b", heard, re.I)
                value = found["value"] if written is None else written[0]
                return iter((f"You told me that you {verb} {value}.",))
        return iter((_NOT_TOLD,))

    return tell


NAMES = (
    Intent(
        name="what is my name",
        phrases=(
            "(what is|what|say|do you [still] (know|remember)|can you [still] remember|did i tell you|have i told you) "
            "my name",
            "(who am i|do you (know|remember) (me|who i am)|what am i called|what do you know about me|remember me)",
            "(do you know|say) what my name is",
        ),
        reply=_tell_name,
    ),
    Intent(
        name="what is my favourite",
        slots=(
            rf"(?:what|who|when|which) (?:is|was) my {_THING}",
            rf"what is my {_PET} (?:called|named)",
            rf"what is the name of my {_PET}",
        ),
        reply=_tell_fact,
    ),
    Intent(
        name="where do I live",
        phrases=("(where do i live|do you (know|remember) where i live|what city do i live in)",),
        reply=_tell_of(_HOME, "live in"),
    ),
    Intent(
        name="how old am I",
        phrases=("(how old am i|what is my age|do you (know|remember) (how old i am|my age))",),
        reply=_tell_of(_AGE, "are"),
    ),
    Intent(name="user's favourite", slots=(_FACT.pattern, _CALLED.pattern), reply=_noted),
    Intent(
        name="user's name",
        slots=(rf"(?:.* )?{_NAMED.pattern.removeprefix(chr(92) + 'b')}",),
        written=(rf"(?-i:{_WRITTEN_NAME.pattern})",),
        reply=_introduced,
    ),
)

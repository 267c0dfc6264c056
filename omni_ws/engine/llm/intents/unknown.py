"""What is said where no rule fits: one short sentence, and once in a conversation that a model would know more.

No command is said: nobody types what a voice tells them. The page and the log show one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from omni_ws.engine.llm.intents.matcher import Asked
from omni_ws.engine.llm.plain_words import listed, plain_words, requests

#: Said once in a conversation.
CONNECT: Final = "With a language model I would know more. Whoever runs this server can connect one."

_QUESTION: Final = (
    "I don't know that.",
    "I have no answer to that.",
    "Sorry, that's more than I know.",
    "My rules have no answer to that one.",
)
_COMMAND: Final = ("I can't do that.", "I don't know how to do that.", "Sorry, my rules don't cover that.")
_STATEMENT: Final = (
    "I don't know what to say to that.",
    "Sorry, I don't follow.",
    "I'm afraid that I didn't understand that.",
    "That's beyond my rules. You can ask me what I can do.",
)
_FOREIGN: Final = ("I only understand English.", "Sorry, I don't know any language but English.")
_WORDLESS: Final = ("I don't find any words in that.", "There are no words in that, I think.")

_ASKING: Final = frozenset(
    listed(
        "who what when where why how which whose whom is are am was were do does did can could will would should "
        "shall may might must has have had"
    )
)
_DOING: Final = frozenset(
    listed(
        "play open close turn call send find search show write translate explain describe make create draw set add "
        "buy order book go move put take get bring start run read give tell help list compare check change let "
        "remember solve sort define name recommend suggest convert calculate count spell say repeat roll flip toss "
        "choose pick look do stop try"
    )
)


def unknown(asked: Asked) -> Iterator[str]:
    """The sentences for a request that no rule fits."""
    wordings = _wordings(asked)
    yield asked.talk.fresh(wordings)
    if wordings is not _WORDLESS and not asked.talk.has_said(CONNECT):
        yield CONNECT


def _wordings(asked: Asked) -> tuple[str, ...]:
    letters = [letter for letter in asked.text[:200] if letter.isalpha()]
    if not any(map(str.isalnum, asked.text)):
        return _WORDLESS
    if letters and sum(letter.isascii() for letter in letters) < len(letters) / 2:
        return _FOREIGN
    if is_question(asked.text):
        return _QUESTION
    return _COMMAND if _first_word(asked.text) in _DOING else _STATEMENT


def is_question(text: str) -> bool:
    """Whether something is asked, by its first word or its mark; recognition may leave that out."""
    return text.rstrip().endswith("?") or _first_word(text) in _ASKING


def _first_word(text: str) -> str:
    *_, request = requests(plain_words(text))
    return request.split(" ", 1)[0]

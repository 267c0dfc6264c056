"""What is summed up of a long talk, when, and how: by rules, or with which words a model is asked for it.

Notes have one fact a line. They stay as they are, so that what was said at the beginning is not told over and over;
only if they have become too long, they are made shorter. Their last line names topics, of which the newest are kept.

**By rules** (``selected``), for a model that shares the cores of one machine: the user's own sentences that are worth
keeping stand in quotation marks, and those with the least weight go when there are too many.

**By a model**, in portions of a few turns, in which it finds more than in a long text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from omni_ws.core.history import CHARACTERS_PER_TOKEN, WORDS_UNKNOWN, HistoryItem, HistoryItems, estimate_tokens
from omni_ws.service.conversation.worth_keeping import (
    KEPT_FROM,
    asks,
    is_open_question,
    is_readable,
    remarks,
    says,
    sentences_of,
    weight,
)

if TYPE_CHECKING:
    from omni_ws.service.conversation.conversation import Conversation

#: How many words, by ``estimate_tokens``, a token of the model is taken for: instructions, notes and the answer are in
#: its context, too, and few languages have words as short as English.
_WORDS_PER_TOKEN: Final = 0.5
#: For instructions, which may be long and are looked at often.
_CHARACTERS_PER_WORD: Final = 4
#: The shares of the room for a history: from which on it is summed up, what stays word by word, what notes may take.
#: Beside the longest notes requests see at least half of the room (``history.STRIDE``), so that a talk is summed up
#: before its oldest turns are left out.
_SUMMED_FROM: Final = 0.5
_KEPT: Final = 0.25
_NOTED: Final = 0.25
#: The least room that is summed up at all.
_LEAST_ROOM: Final = 64
#: The words of a portion, those of one message of the user, and of one of the assistant or a tool that are shown.
_PORTION: Final = 400
_SHOWN_OF_USER: Final = 240
_SHOWN: Final = 16
#: The tokens that the model may write, and the lines and the characters of a line that are taken of them.
MAX_TOKENS: Final = 220
_MAX_LINES: Final = 16
_MAX_LINE: Final = 240
#: The words of the topics that are kept, and those of a question that stands for its topic.
_TOPICS: Final = 48
_TOPIC: Final = 8
#: The words that are kept of the user's sentence, and of the assistant's question that it answers; and those of an
#: answer that says little without its question: "blue".
_QUOTED: Final = 48
_ANSWERED: Final = 24
_BRIEF: Final = 5
#: The sentences of one message that are weighed: this is done on the event loop, in some 10 us for each.
MAX_WEIGHED: Final = 512

INSTRUCTIONS: Final = (
    "You keep notes of what a user says in a long talk, for somebody who must still know it hours later. You are shown "
    "a part of the talk. For each line in which the user tells something of himself, of people, animals and things in "
    "his life, of plans, wishes and appointments, write one short note with every name, number, date and place in it, "
    "such as '- The user lives in …'. Lines that only ask about the world get no note. Invent nothing. The last line "
    "is 'Topics:' and what was talked about, in a few words. Write in the language of the talk."
)
#: What follows where the lines of the assistant are shown.
OF_BOTH: Final = (
    " Also note what the assistant has promised, what was decided, and questions that are still open, but nothing else "
    "of what the assistant says."
)
CONDENSING: Final = (
    "You are shown the notes of a long talk. Write them again, shorter: join what belongs together, and leave out what "
    "was corrected later or matters least. Keep every name, number, date and place, promises and open questions. One "
    "short sentence a line, each beginning with '- '. Invent nothing. Write in the language of the notes."
)
#: A small model heeds the last words most.
_ASKED: Final = (
    "The part of the talk:\n\n{talk}\n\nWrite one note for each of the user's lines above that is not a question, from "
    "the first to the last, none left out. The last line is 'Topics:'. The notes:"
)
_ASKED_SHORTER: Final = "The notes:\n\n{notes}\n\nThe same notes with at most {words} words:"

_BULLET: Final = re.compile(r"^(?:[-*\u2022\u2013]+|\(?\d{1,2}[.)])\s*")
#: Not a quotation, in which the user may have said it.
_TOPICS_LINE: Final = re.compile(r'^[^\w"]*topics?\W*:\W*', re.IGNORECASE)
_QUOTED_LINE: Final = re.compile(r'^- (?P<asked>asked "[^"]*": )?"(?P<said>.*)"$')
#: Small models repeat the user's questions among the notes.
_ECHO: Final = re.compile(r"^(?!open:).*[?\uff1f\u061f]$", re.IGNORECASE)
_NOTHING: Final = re.compile(r"^\W*(?:none|nothing|n/a|no notes)\b[^:]{0,40}$", re.IGNORECASE)


class SumsUp(Protocol):
    """What sums up long talks in the background, see ``sessions.summaries``."""

    def disturb(self, conversation: Conversation) -> None:
        """Give way: in this conversation somebody speaks, or an answer is due."""

    def note_quiet(self, conversation: Conversation) -> None:
        """Note that in this conversation nobody speaks, and no answer is due."""

    def forget(self, conversation: Conversation) -> None:
        """Do nothing more for a conversation, which ends."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a history that is summed up, in words by ``estimate_tokens``."""

    #: What requests see at most, once there are notes: engines leave out what exceeds the context at its beginning.
    room: int
    #: The history without notes from which on it is summed up.
    longest: int
    #: What of it stays without notes.
    kept: int
    #: The notes.
    notes: int


def sizes(history: HistoryItems, *, context: int | None, instructions: str) -> Sizes | None:
    """Return the sizes for a model with a context of so many tokens; None if nothing is summed up."""
    room = history.max_tokens
    if context is not None:
        other = len(instructions) // _CHARACTERS_PER_WORD
        room = min(room, int(max(context * _WORDS_PER_TOKEN - other, context / 4)))
    if room < _LEAST_ROOM or not history.may_be_cut:
        return None
    return Sizes(room, int(room * _SUMMED_FROM), int(room * _KEPT), int(room * _NOTED))


def next_portion(history: HistoryItems, size: Sizes, *, behind: int = 0) -> tuple[HistoryItem, ...]:
    """Return the oldest items that are to be summed up, ``behind`` so many that are being summed up; none: all are."""
    return history.older(behind=behind, keep=size.kept, most=_PORTION)


# By rules.


def may_select(items: Iterable[HistoryItem]) -> bool:
    """Whether the rules can read what the user said."""
    return all(is_readable(item.message) for item in items if item.role == "user")


def selected(items: Iterable[HistoryItem]) -> str:
    """Return notes on ``items``: what the user said that is worth keeping, and the topics of questions."""
    notes: list[str] = []
    topics: list[str] = []
    answered = ""
    for item in items:
        text = " ".join(" ".join(part.text for part in item.message.parts).split()).replace('"', "'")
        sentences = list(sentences_of("" if text == WORDS_UNKNOWN else text))
        if item.role == "user":
            for sentence in sentences[:MAX_WEIGHED]:
                if line := _noted(sentence, answered):
                    notes.append(line)
                elif asks(sentence):
                    topics.append(_first_words(says(sentence).rstrip(" ?.!"), _TOPIC).replace(";", ","))
                answered = ""
        elif item.role == "assistant" and sentences:
            answered = sentences[-1] if is_open_question(sentences[-1]) else ""
    return merged(["\n".join([*notes, *_newest(topics, _TOPICS)])])


def _noted(sentence: str, answered: str) -> str:
    """Return a note of what the user said, perhaps to a question of the assistant; empty if it is not worth one."""
    answers = bool(answered) and 0 < estimate_tokens(says(sentence)) <= _BRIEF
    answers = answers and not asks(sentence) and not remarks(sentence)
    if weight(sentence) < KEPT_FROM and not answers:
        return ""
    asked = f'asked "{_first_words(answered, _ANSWERED)}": ' if answers else ""
    return f'- {asked}"{_first_words(sentence, _QUOTED)}"'


def lightened(notes: str, size: Sizes) -> str:
    """Return notes without what is too much: the oldest topics, then the lines of least weight, the oldest first."""
    topics = _newest(_topics(notes), size.notes // 4)
    facts = _facts(notes)
    excess = _words(facts) + _words(topics) - size.notes
    gone = set()
    for at in sorted(range(len(facts)), key=lambda at: _weight_of(facts[at])):
        if excess <= 0:
            break
        gone.add(at)
        excess -= estimate_tokens(facts[at])
    return "\n".join([*(line for at, line in enumerate(facts) if at not in gone), *topics])


def _weight_of(line: str) -> int:
    found = _QUOTED_LINE.match(line)
    if found is None:
        return weight(line)
    return max(weight(found["said"]), KEPT_FROM) + bool(found["asked"])


# By a model.


def question(items: Iterable[HistoryItem], *, of_both: bool = True) -> str:
    """Return what a model is asked for notes on ``items``. With ``of_both`` false it is shown what the user said alone.

    That is less work, and small models take what the assistant says for facts about the user.
    """
    shown = (item for item in items if of_both or item.role in ("user", "tool"))
    return _ASKED.format(talk="\n".join(filter(None, map(_line, shown))))


def shorter(notes: str, size: Sizes) -> str:
    """Return what a model is asked for shorter notes."""
    return _ASKED_SHORTER.format(notes="\n".join(_facts(notes)), words=size.notes // 2)


def _line(item: HistoryItem) -> str:
    """Return what is shown of an item."""
    message = item.message
    text = " ".join(" ".join(part.text for part in message.parts).split())
    if message.tool_calls:
        text = " ".join([text, *(f"[calls {call.name} with {call.arguments}]" for call in message.tool_calls)]).strip()
    if not text or text == WORDS_UNKNOWN:
        return ""
    most = _SHOWN_OF_USER if message.role == "user" else _SHOWN
    return f"{message.role.capitalize()}: {_first_words(text, most)}"


def _first_words(text: str, most: int) -> str:
    """Return the beginning of a text with at most so many words, or characters of scripts without blanks."""
    taken: list[str] = []
    for word in text[: most * CHARACTERS_PER_TOKEN].split(" "):
        size = max(1, estimate_tokens(word))
        if size > most:
            taken += filter(None, (word[: len(word) * most // size], "…"))
            break
        taken.append(word)
        most -= size
    else:
        return text if len(" ".join(taken)) == len(text) else " ".join([*taken, "…"])
    return " ".join(taken)


def read_notes(answer: str) -> str:
    """Return the notes in a model's answer: one a line, the topics last. Empty if it noted nothing."""
    facts: list[str] = []
    topics: list[str] = []
    for line in answer[: _MAX_LINES * _MAX_LINE].splitlines():
        text = " ".join(line.split())
        if found := _TOPICS_LINE.match(text):
            topics.append(text[found.end() :])
        elif (text := _BULLET.sub("", text)) and not _NOTHING.match(text) and not _ECHO.match(text):
            facts.append(f"- {text[:_MAX_LINE]}")
    about = "; ".join(filter(None, topics)).strip(" .")[:_MAX_LINE]
    return "\n".join([*facts[:_MAX_LINES], *([f"Topics: {about}"] if about else [])])


def merged(notes: Sequence[str]) -> str:
    """Return notes of several portions as one: each fact once, and the newest topics."""
    facts: dict[str, str] = {}
    for one in notes:
        for line in _facts(one):
            facts.setdefault(line.casefold().rstrip(" ."), line)
    topics = [topic for one in notes for topic in _topics(one)]
    return "\n".join([*facts.values(), *_newest(topics, _TOPICS)])


def _topics(notes: str) -> list[str]:
    """Return the topics that notes name."""
    lines = ((line, _TOPICS_LINE.match(line)) for line in notes.splitlines())
    return [topic for line, found in lines if found for topic in line[found.end() :].split("; ")]


def _newest(topics: Sequence[str], most: int) -> list[str]:
    """Return a line with the newest topics, of at most so many words; none if there is no topic."""
    newest: list[str] = []
    for topic in reversed(list(dict.fromkeys(topics))):
        if estimate_tokens(" ".join((topic, *newest))) > most:
            break
        newest.insert(0, topic)
    return [f"Topics: {'; '.join(newest)}"] if newest else []


def fitted(notes: str, answer: str, size: Sizes) -> str:
    """Return shorter notes: the model's ``answer`` with the topics, or the newest of ``notes`` if it is no shorter."""
    facts = _facts(notes)
    rewritten = _facts(read_notes(answer))
    taken = rewritten if rewritten and _words(rewritten) < _words(facts) else facts
    topics = [line for line in notes.splitlines() if _TOPICS_LINE.match(line)]
    while taken and _words(taken) + _words(topics) > size.notes:
        taken = taken[1:]
    return "\n".join([*taken, *topics])


def _facts(notes: str) -> list[str]:
    return [line for line in notes.splitlines() if line.strip() and not _TOPICS_LINE.match(line)]


def _words(lines: Iterable[str]) -> int:
    return sum(map(estimate_tokens, lines))

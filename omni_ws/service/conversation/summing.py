"""Notes that sum up the older part of a long conversation: when they are due, and how they are made.

Notes have one fact a line. A line stays as it is, since repeated rewriting would garble what was said at the beginning;
only when the notes are too long are they shortened. The last line names topics, of which the newest are kept.

**By rules** (``selected``), for a model that shares the cores of one machine: the user's own sentences that are worth
keeping are quoted, and those with the least weight are dropped when there are too many. (A small model that is asked to
choose lines takes all of them, and one that writes notes loses facts as it rewrites.) A sentence has more weight if it
is about the user, about lasting things (family, work, health, appointments, wishes, promises, corrections), or has
numbers, dates and names; less if it asks something, or only comments on an answer. The words are in
``worth_keeping.toml``, in one list for all languages, as the language of typed text is not known.

**By a model**: it is asked for notes on portions of a few turns, in which it finds more than in a long text.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Final

from omni_ws.core.history import (
    CHARACTERS_PER_TOKEN,
    WORDS_UNKNOWN,
    HistoryItem,
    HistoryItems,
    Message,
    estimate_tokens,
)

#: The languages whose words are known.
LANGUAGES: Final = frozenset({"en", "de", "es", "fr", "it", "pt"})
#: From this weight on a sentence is kept.
KEPT_FROM: Final = 1
#: How often lasting words, numbers and names count at most.
_MOST: Final = 2
#: What a question loses, which may tell something before it asks; what it loses besides if it begins with "what"; and
#: what a remark loses.
_ASKS: Final = 2
_ASKS_ONLY: Final = 2
_REMARKS: Final = 2
#: The longest text that is weighed, in characters.
_LONGEST: Final = 240

#: Behind these marks a sentence ends, unless they follow an initial or a short title: "Dr. Osei".
_END: Final = re.compile(r"(?:(?<!\b[A-Z])(?<!\b[A-Z][a-z])(?<!\bMrs)\.|[!?…])[\"'”»)]*\s+|(?<=[。？！])")
_QUESTION: Final = re.compile(r"[?？؟]['\"”»)]*\s*$|^¿")
_WORD: Final = re.compile(r"[^\W\d_]+(?:['-][^\W\d_]+)*|\d+(?:[.,:]\d+)*")
_LETTER: Final = re.compile(r"[^\W\d_]")
#: The last letter of the Latin script, without the rarest.
_LATIN: Final = "\u024f"


def is_readable(message: Message) -> bool:
    """Whether the rules can read a message: they know the heard language, or typed text is mostly in Latin script."""
    if message.language is not None:
        return message.language in LANGUAGES
    letters: list[str] = _LETTER.findall(message.text[:_LONGEST])
    return 2 * sum(letter <= _LATIN for letter in letters) >= len(letters)


def sentences_of(text: str) -> Iterator[str]:
    """Yield the sentences of a text, each with its punctuation mark."""
    start = 0
    for end in _END.finditer(text):
        if sentence := text[start : end.end()].strip():
            yield sentence
        start = end.end()
    if rest := text[start:].strip():
        yield rest


def says(sentence: str) -> str:
    """Return a sentence, cut after _LONGEST characters, without empty words at its beginning: "oh, well"."""
    said = sentence.replace("’", "'")[:_LONGEST]
    lead = _leads().match(said)
    return said if lead is None else said[lead.end() :]


def asks(sentence: str) -> bool:
    """Whether a sentence is a question or a request."""
    return _QUESTION.search(sentence) is not None or any(_begins(says(sentence), name) for name in ("open", "asking"))


def is_open_question(sentence: str) -> bool:
    """Whether a sentence is a question that cannot be answered with "yes"."""
    said = says(sentence).lstrip("¿¡")
    return _QUESTION.search(sentence) is not None and _begins(said, "open")


def remarks(sentence: str) -> bool:
    """Whether a sentence only comments on an answer."""
    return _begins(says(sentence), "remarks")


def weight(sentence: str) -> int:
    """Return how much a sentence is worth keeping; below KEPT_FROM it is not kept."""
    words: list[str] = _WORD.findall(sentence.replace("’", "'")[:_LONGEST])
    low = [word.casefold() for word in words]
    numbers, dates = _listed("numbers"), _listed("dates")
    found = int(not _listed("oneself").isdisjoint(low))
    found += min(_MOST, sum(word in _listed("lasting") for word in low))
    found += min(_MOST, sum(word[0].isdigit() or word in numbers or word in dates for word in low))
    found += min(_MOST, _names(words))
    found -= _ASKS_ONLY * is_open_question(sentence)
    return found - _ASKS * asks(sentence) - _REMARKS * remarks(sentence)


def _names(words: list[str]) -> int:
    """Return how many words look like names: those with a capital letter, except the first word.

    German nouns count, too.
    """
    return sum(word[0].isupper() and word != "I" and not word.startswith("I'") for word in words[1:])


@cache
def _tables() -> dict[str, str]:
    return tomllib.loads(files(__package__).joinpath("worth_keeping.toml").read_text(encoding="utf-8"))


@cache
def _listed(name: str) -> frozenset[str]:
    return frozenset(_tables()[name].casefold().split())


def _begins(sentence: str, name: str) -> bool:
    return _beginnings(name).match(sentence) is not None


@cache
def _beginnings(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?:{_one_of(name)})(?![\w'])", re.IGNORECASE)


@cache
def _leads() -> re.Pattern[str]:
    return re.compile(rf"(?:(?:{_one_of('leads')})\b[\s,.!]*)+", re.IGNORECASE)


def _one_of(name: str) -> str:
    return "|".join(map(re.escape, _tables()[name].strip().replace("\n", "|").split("|")))


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


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes by which a history is summed up, in words as ``estimate_tokens`` counts them."""

    #: What requests see at most, once there are notes: engines leave out what exceeds the context at its beginning.
    room: int
    #: The history without notes from which on it is summed up.
    longest: int
    #: What of it stays without notes.
    kept: int
    #: The notes.
    notes: int


def sizes(history: HistoryItems, *, context: int | None, instructions: str) -> Sizes | None:
    """Return the sizes for a model with a context of ``context`` tokens; None if the history is not to be summed up."""
    room = history.max_tokens
    if context is not None:
        other = len(instructions) // _CHARACTERS_PER_WORD
        room = min(room, int(max(context * _WORDS_PER_TOKEN - other, context / 4)))
    if room < _LEAST_ROOM or not history.may_be_cut:
        return None
    return Sizes(room, int(room * _SUMMED_FROM), int(room * _KEPT), int(room * _NOTED))


def next_portion(history: HistoryItems, size: Sizes, *, behind: int = 0) -> tuple[HistoryItem, ...]:
    """Return the oldest items to sum up next; none if all are.

    The first ``behind`` items are being summed up already.
    """
    return history.older(behind=behind, keep=size.kept, most=_PORTION)


# By rules.


def may_select(items: Iterable[HistoryItem]) -> bool:
    """Whether the rules can read what the user said."""
    return all(is_readable(item.message) for item in items if item.role == "user")


def selected(items: Iterable[HistoryItem]) -> str:
    """Return notes on ``items``: the user's sentences that are worth keeping, and the topics of questions."""
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
                elif asks(sentence) and (topic := says(sentence).rstrip(" ?.!")):  # "Oh?" names none
                    topics.append(_first_words(topic, _TOPIC).replace(";", ","))
                answered = ""
        elif item.role == "assistant" and sentences:
            answered = sentences[-1] if is_open_question(sentences[-1]) else ""
    return merged(["\n".join([*notes, *_newest(topics, _TOPICS)])])


def _noted(sentence: str, answered: str) -> str:
    """Return a line that quotes the user's ``sentence``; "" if it is not worth a note.

    ``answered`` is the assistant's question that the sentence may answer; a short answer is quoted with the question.
    """
    answers = bool(answered) and 0 < estimate_tokens(says(sentence)) <= _BRIEF
    answers = answers and not asks(sentence) and not remarks(sentence)
    if weight(sentence) < KEPT_FROM and not answers:
        return ""
    asked = f'asked "{_first_words(answered, _ANSWERED)}": ' if answers else ""
    return f'- {asked}"{_first_words(sentence, _QUOTED)}"'


def lightened(notes: str, size: Sizes) -> str:
    """Return the notes cut to ``size``: without the oldest topics, then without the lines of least weight."""
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
    """Return the prompt that asks a model for notes on ``items``.

    Without ``of_both`` it has no messages of the assistant. That is less work, and small models take the assistant's
    words for facts about the user.
    """
    shown = (item for item in items if of_both or item.role in ("user", "tool"))
    return _ASKED.format(talk="\n".join(filter(None, map(_line, shown))))


def shorter(notes: str, size: Sizes) -> str:
    """Return the prompt that asks a model to shorten ``notes``."""
    return _ASKED_SHORTER.format(notes="\n".join(_facts(notes)), words=size.notes // 2)


def _line(item: HistoryItem) -> str:
    """Return the line that stands for an item in a prompt; "" if it has no text."""
    message = item.message
    text = " ".join(" ".join(part.text for part in message.parts).split())
    if message.tool_calls:
        text = " ".join([text, *(f"[calls {call.name} with {call.arguments}]" for call in message.tool_calls)]).strip()
    if not text or text == WORDS_UNKNOWN:
        return ""
    most = _SHOWN_OF_USER if message.role == "user" else _SHOWN
    return f"{message.role.capitalize()}: {_first_words(text, most)}"


def _first_words(text: str, most: int) -> str:
    """Return the first ``most`` words of a text. In scripts without spaces, that many characters."""
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
    """Return the notes in a model's answer: one a line, the topics last; "" if the model noted nothing."""
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
    """Return the notes of several portions as one text: each fact once, and the newest topics."""
    facts: dict[str, str] = {}
    for one in notes:
        for line in _facts(one):
            facts.setdefault(line.casefold().rstrip(" ."), line)
    topics = [topic for one in notes for topic in _topics(one)]
    return "\n".join([*facts.values(), *_newest(topics, _TOPICS)])


def _topics(notes: str) -> list[str]:
    """Return the topics that the notes list in their last line."""
    lines = ((line, _TOPICS_LINE.match(line)) for line in notes.splitlines())
    return [topic for line, found in lines if found for topic in line[found.end() :].split("; ")]


def _newest(topics: Sequence[str], most: int) -> list[str]:
    """Return a list with one line, which names the newest topics in at most ``most`` words; [] if there is no topic."""
    newest: list[str] = []
    for topic in reversed(list(dict.fromkeys(topics))):
        if estimate_tokens(" ".join((topic, *newest))) > most:
            break
        newest.insert(0, topic)
    return [f"Topics: {'; '.join(newest)}"] if newest else []


def fitted(notes: str, answer: str, size: Sizes) -> str:
    """Return notes cut to ``size``: the facts of the model's ``answer`` if that is shorter, else those of ``notes``.

    The topics are those of ``notes``. If still too long, the oldest facts are dropped.
    """
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

"""Messages of a conversation, what they count in a history, and how they are put in the order that models take."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import reduce
from itertools import chain, groupby
from operator import attrgetter
from sys import getsizeof
from typing import Final

from omni_ws.core.audio_format import AudioFormat
from omni_ws.core.chunks import InputChunk, ToolCall

#: The text in the history for speech that has no transcript and cannot be passed on as audio either.
WORDS_UNKNOWN: Final = "[spoken; the words are not known]"
#: What a second of speech counts in a history. Qwen2-Audio and Qwen2.5-Omni read one token for 40 ms.
TOKENS_PER_SEC: Final = 25
#: What an image counts there, or a video. Models read some hundreds of tokens for one.
PICTURE_TOKENS: Final = 256
#: What a run of audio of one format costs to hold besides its bytes.
RUN_OVERHEAD_BYTES: Final = 256
#: What a message, or a call in it, takes besides its text.
MESSAGE_OVERHEAD_BYTES: Final = 512
#: Characters that count as a token even where they are one word, or blank. Few languages have longer words.
CHARACTERS_PER_TOKEN: Final = 16
#: The longest text whose words are counted, in characters.
MAX_COUNTED_TEXT: Final = 1 << 18

#: Characters of scripts that are written without blanks: Thai to Tibetan, Burmese, Khmer, kana, Bopomofo and Han.
UNSPACED: Final = (
    "\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u19e0-\u19ff\u3005-\u3007\u3021-\u3029\u3040-\u312f\u31a0-\u31bf\u31f0-\u31ff"
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9f\U0001b000-\U0001b16f\U00020000-\U0003ffff"
)
_ROLE_OF: Final = attrgetter("role")
_TOKENS: Final = re.compile(rf"[{UNSPACED}]|[^\s{UNSPACED}]+")


@dataclass(frozen=True, slots=True, eq=False)
class Speech:
    """Audio of an earlier user message, as the chunks that the client sent. Compared by identity."""

    chunks: tuple[InputChunk, ...]
    #: The format of chunks whose own ``format`` is None.
    format: AudioFormat
    #: The duration; for compressed audio possibly an estimate.
    audio_ms: float

    @property
    def held_bytes(self) -> int:
        """What is charged for it."""
        return sum(len(chunk.payload) + RUN_OVERHEAD_BYTES for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class Message:
    """An earlier message of the conversation; ``role`` is ``system``, ``user``, ``assistant`` or ``tool``.

    ``tool_calls`` are those of an assistant message, ``tool_call_id`` is the call that a tool message answers. A user
    message has ``speech``, after its text, if that has no transcript and the capabilities allow it; and what the user
    said behind that in the same message, if anything, as ``more``. A message over HTTP may have a ``picture`` there, an
    image or a video, whoever's it is.
    """

    role: str
    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    speech: Speech | None = None
    picture: InputChunk | None = None
    more: tuple[Message, ...] = ()

    @property
    def parts(self) -> tuple[Message, ...]:
        """The message itself, and ``more``."""
        return (self, *self.more)

    @property
    def says_something(self) -> bool:
        """Whether it is more than its role. An empty result counts: it says that the tool returned nothing."""
        has_media = self.speech is not None or self.picture is not None
        return bool(self.text.strip() or self.tool_calls) or self.tool_call_id is not None or has_media


def estimate_tokens(text: str) -> int:
    """Return about what a tokenizer makes of ``text``: each word, and of scripts without blanks each character.

    It is never less than one for each CHARACTERS_PER_TOKEN, so that text that counts little is not long. Words are
    counted on the event loop: in a text of more than MAX_COUNTED_TEXT characters, four count as one.
    """
    if len(text) > MAX_COUNTED_TEXT:
        return len(text) // 4
    words = len(text.split()) if text.isascii() else sum(1 for _ in _TOKENS.finditer(text))
    return max(words, len(text) // CHARACTERS_PER_TOKEN)


def message_bytes(message: Message) -> int:
    """What a message takes in memory, without its speech."""
    size = MESSAGE_OVERHEAD_BYTES + getsizeof(message.text)
    for call in message.tool_calls:
        size += MESSAGE_OVERHEAD_BYTES + getsizeof(call.id) + getsizeof(call.name) + getsizeof(call.arguments)
    return size + sum(map(message_bytes, message.more)) if message.more else size


def message_tokens(message: Message) -> int:
    """What a message counts in a history: words, and a rate of speech."""
    calls = sum(1 + estimate_tokens(call.arguments) + _long(call.id + call.name) for call in message.tool_calls)
    speech = 0 if message.speech is None else math.ceil(message.speech.audio_ms * TOKENS_PER_SEC / 1000)
    pictures = PICTURE_TOKENS * sum(part.picture is not None for part in message.parts)
    return max(1, estimate_tokens(message.text) + calls + _long(message.tool_call_id or "") + speech + pictures)


def _long(name: str) -> int:
    """What an id or a name counts: nothing, unless it is longer than engines make them."""
    return len(name) // 128


def in_order(messages: Iterable[Message], *, answering: Collection[str] = ()) -> tuple[Message, ...]:
    """The messages as a model takes them.

    Results stand behind their calls: a call whose result comes behind another answer moves to right before it, into the
    assistant's message there; a result whose call is not among the messages is left out, and so is a second one.
    ``answering`` are the calls that the input of the request answers: their results follow the last message.

    No message of the user or the assistant is empty, and no two of one of them stand in a row: they are joined by a
    blank.
    """
    joined: list[Message] = []
    said = (message for message in _calls_moved(list(messages), answering) if message.says_something)
    for role, group in groupby(said, key=_ROLE_OF):
        if role in ("user", "assistant"):
            joined.append(reduce(_joined, _runs(group)))
        else:
            joined += group
    return tuple(joined)


def _runs(messages: Iterable[Message]) -> Iterator[Message]:
    """Messages of one role, each run of them that is nothing but text and calls as one: there may be thousands."""
    for plain, group in groupby(messages, key=lambda one: one.speech is None and not one.more):
        run = list(group)
        if not plain or len(run) == 1:
            yield from run
            continue
        text = " ".join(one.text for one in run if one.text)
        yield replace(run[0], text=text, tool_calls=tuple(chain.from_iterable(one.tool_calls for one in run)))


def _calls_moved(messages: list[Message], answering: Collection[str]) -> list[Message]:
    if not answering and not any(message.tool_call_id is not None for message in messages):
        return messages
    moved: list[Message] = []
    #: Where each call that has no result yet stands in ``moved``, and the results that were seen.
    places: dict[str, tuple[int, ToolCall]] = {}
    answered: set[str] = set()
    results_from = 0
    for message in messages:
        call_id = message.tool_call_id
        if call_id is None:
            moved.append(message)
            results_from = len(moved)
            for call in message.tool_calls:  # some engines give the same ids again
                places[call.id] = (len(moved) - 1, call)
                answered.discard(call.id)
        elif call_id in places and call_id not in answered:
            answered.add(call_id)
            results_from += _bring(moved, places.pop(call_id), before=results_from)
            moved.append(message)
    for call_id in answering:
        if call_id in places:
            results_from += _bring(moved, places.pop(call_id), before=results_from)
    return moved


def _bring(moved: list[Message], place: tuple[int, ToolCall], *, before: int) -> int:
    """Have the call stand in the assistant's message that ends at ``before``. Returns how many messages that adds."""
    index, call = place
    if index == before - 1:
        return 0
    giver = moved[index]
    moved[index] = replace(giver, tool_calls=tuple(one for one in giver.tool_calls if one is not call))
    taker = moved[before - 1]
    if taker.role == "assistant":
        moved[before - 1] = replace(taker, tool_calls=(*taker.tool_calls, call))
        return 0
    moved.insert(before, Message("assistant", "", tool_calls=(call,)))
    return 1


def _joined(first: Message, second: Message) -> Message:
    last = first.parts[-1]
    if last.speech is not None or last.picture is not None:  # behind which nothing fits into the same part
        return replace(first, more=(*first.more, *second.parts))
    both = replace(
        last,
        text=" ".join(filter(None, (last.text, second.text))),
        tool_calls=(*last.tool_calls, *second.tool_calls),
        speech=second.speech,
        picture=second.picture,
    )
    if first.more:
        return replace(first, more=(*first.more[:-1], both, *second.more))
    return replace(both, more=second.more)

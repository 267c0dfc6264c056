"""History: what earlier requests of a conversation left for the engine, as items with ids."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Container, Iterable
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Final

from omni_ws.core.audio_format import AudioFormat
from omni_ws.core.quota import ByteBudget
from omni_ws.engine.base import WORDS_UNKNOWN, Message
from omni_ws.errors import InvalidValue
from omni_ws.service.conversation.kept_speech import MAX_SPEECH_BYTES, KeptSpeech, held_bytes, tokens_of
from omni_ws.service.identifiers import new_id

#: Items are kept up to this multiple of what a request sees, so that a truncation brings earlier turns back.
KEPT_MULTIPLE: Final = 2
#: What the engine sees is shortened by this share of its limit at a time.
_STRIDE: Final = 0.25
#: Requests that can be named, with or without items; and, beside them, ids of requests that were truncated.
MAX_REQUESTS: Final = 1 << 14
#: Characters that count as a token even where they are one word, or blank. Few languages have longer words.
CHARACTERS_PER_TOKEN: Final = 16
#: The longest text whose words are counted, in characters.
MAX_COUNTED_TEXT: Final = 1 << 18
#: Who a message may be of.
ALL_ROLES: Final = frozenset({"system", "user", "assistant", "tool"})
#: The place of messages that belong to no request: those of an HTTP body, before all requests.
_BEFORE_ALL: Final = -1

#: Characters of scripts that are written without blanks: Thai to Tibetan, Burmese, Khmer, kana, Bopomofo and Han.
_UNSPACED: Final = (
    "\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u19e0-\u19ff\u3005-\u3007\u3021-\u3029\u3040-\u312f\u31a0-\u31bf\u31f0-\u31ff"
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9f\U0001b000-\U0001b16f\U00020000-\U0003ffff"
)
_TOKENS: Final = re.compile(rf"[{_UNSPACED}]|[^\s{_UNSPACED}]+")

#: Thousands of items are read for each request.
_MESSAGE_OF: Final = attrgetter("message")


@dataclass(frozen=True, slots=True, eq=False)
class HistoryItem:
    """One message of a request: a role with its text, kept speech, tool calls or the result of a tool.

    ``request_id`` is None for messages that a client sent as history; ``place`` counts requests in the order of their
    opening. Its size is ``tokens``, which are words and a rate of speech, and ``speech_bytes``.
    """

    item_id: str
    request_id: str | None
    place: int
    message: Message
    tokens: int
    speech_bytes: int

    @property
    def role(self) -> str:
        return self.message.role


@dataclass(slots=True)
class _Window:
    """The newest items that fit into a limit: from ``first`` on, with their sizes together.

    ``asked``: whether the items before it, which are still kept, have a question; ``said``: whether the last of them is
    one, which is one message with another behind it.
    """

    tokens: int = 0
    speech_bytes: int = 0
    first: int = 0
    asked: bool = False
    said: bool = False


class History:
    """The items of a conversation, in the order in which their requests opened.

    ``messages`` is a copy for the engine: the latest turns, up to ``max_tokens`` by ``estimate_tokens``: a session
    does not know the tokens of its engine, which may leave out more. The copy begins at a multiple of a quarter of
    ``max_tokens``, counted over the whole conversation: engines reuse what they computed for a prompt that began alike,
    and a copy that moved on with every turn would never begin like the one before.

    The history keeps ``KEPT_MULTIPLE`` times as much text, but speech only within that copy: an item that is older has
    ``WORDS_UNKNOWN`` in the place of its speech.

    Speech is charged to ``budget`` before it is added, and given back when it is dropped.
    """

    def __init__(self, max_tokens: int, budget: ByteBudget) -> None:
        self.max_tokens = max_tokens
        #: Bytes of speech, with their overhead.
        self.held_bytes = 0
        self._budget = budget
        self._items: list[HistoryItem] = []
        self._tokens = 0
        #: Of the items that are not kept any more because others came.
        self._left_behind = 0
        #: Of all speech that was added, also where it is not held any more: an item keeps its size.
        self._speech_bytes = 0
        #: What a request sees. It moves on as items are added, and is sought anew only where items go or shrink.
        self._seen = _Window()
        #: The place of each request that can be named, in that order.
        self._places: dict[str, int] = {}
        self._opened = 0
        #: Ids of truncated requests, the oldest first.
        self._truncated: dict[str, None] = {}

    @property
    def items(self) -> tuple[HistoryItem, ...]:
        """All that is kept, the oldest first."""
        return tuple(self._items)

    @property
    def messages(self) -> tuple[Message, ...]:
        """What a request that is answered now sees: without two messages in a row of the user, or of the assistant.

        Those that a client sent as history stand as they were sent.
        """
        seen = self._items[self._first_seen() :]
        sent = next((index for index, item in enumerate(seen) if item.request_id is not None), len(seen))
        return (*map(_MESSAGE_OF, seen[:sent]), *joined(map(_MESSAGE_OF, seen[sent:])))

    def new_speech(self, audio: AudioFormat, *, unwanted: str | None) -> KeptSpeech | None:
        """A place for the speech of a request, for ``add``. None where nothing is kept; see KeptSpeech for the rest."""
        return (
            KeptSpeech(audio, self._budget, max_tokens=self.max_tokens, unwanted=unwanted) if self.max_tokens else None
        )

    def open(self, request_id: str) -> None:
        """A request opens. What it leaves has its place behind all requests before it, whichever ends first."""
        self._places[request_id] = self._opened
        self._opened += 1
        _keep_newest(self._places)

    def add(self, messages: Iterable[Message], *, request_id: str | None = None) -> None:
        """What a request leaves. Messages without content are left out, and the oldest turns make room.

        Nothing is kept of a request that was truncated before.
        """
        if request_id in self._truncated:
            for message in messages:
                self._budget.give(_speech_bytes(message))
            return
        place = _BEFORE_ALL if request_id is None else self._places.get(request_id, self._opened)
        behind_all = not self._items or self._items[-1].place <= place
        for message in messages:
            text = message.text if request_id is None else message.text.strip()
            if text or message.tool_calls or message.tool_call_id is not None or message.speech is not None:
                tokens, speech_bytes = _count(message), _speech_bytes(message)
                item = HistoryItem(new_id("item_"), request_id, place, message, tokens, speech_bytes)
                self._items.append(item)
                self._tokens += tokens
                self._speech_bytes += speech_bytes
                self._seen.tokens += tokens
                self._seen.speech_bytes += speech_bytes
                self.held_bytes += speech_bytes
        if not behind_all:  # it was cancelled while it waited for the one before it
            self._items.sort(key=lambda item: item.place)
            self._seek()
        self._advance_seen()
        self._make_room()

    def revise_answer(self, request_id: str, answer: Message) -> None:
        """Less of an answer was heard than had been sent. Nothing happens where it is not kept any more."""
        for index in reversed(range(len(self._items))):
            item = self._items[index]
            if item.request_id == request_id and item.role == "assistant":
                if answer.text.strip() or answer.tool_calls:
                    self._items[index] = replace(item, message=answer, tokens=_count(answer))
                    self._tokens += self._items[index].tokens - item.tokens
                else:
                    self._drop(index, index + 1)
                self._seek()
                return

    def truncate(self, request_id: str) -> int:
        """Drops a request and all later ones; returns how many these are.

        What the user said before in the same message, in requests to which nothing was heard as an answer, goes with
        it. Idempotent: for a request that an earlier truncation dropped nothing happens, and 0 is returned. Raises
        InvalidValue for any other id that is not, or no longer, that of a request here.
        """
        first = self._places.get(request_id)
        if first is None:
            if request_id in self._truncated:
                return 0
            raise InvalidValue(f"request {request_id[:64]!r} is not in the history", param="request_id")
        first = self._begin_of_message(first)
        dropped = [known for known, place in self._places.items() if place >= first]
        for known in dropped:
            del self._places[known]
        self._truncated |= dict.fromkeys(dropped)
        _keep_newest(self._truncated)
        self._drop(bisect_left(self._items, first, key=lambda item: item.place), len(self._items))
        self._seek()
        return len(dropped)

    def _begin_of_message(self, place: int) -> int:
        """The place of the request with which the message begins that the user says in the first from ``place`` on."""
        index = bisect_left(self._items, place, key=lambda item: item.place)
        if index == len(self._items) or self._items[index].role not in ("user", "assistant"):
            return place
        while index and self._items[index - 1].role == "user" and self._items[index - 1].request_id is not None:
            index -= 1
            place = self._items[index].place
        return place

    def remove(self, request_id: str, *, roles: Container[str] = ALL_ROLES) -> None:
        """Drops the items of these roles that a request, or an item that was placed like one, has left."""
        if (place := self._places.get(request_id)) is None:
            return
        first, end = (bisect_left(self._items, one, key=lambda item: item.place) for one in (place, place + 1))
        for index in reversed(range(first, end)):
            if self._items[index].role in roles:
                self._drop(index, index + 1)
        self._seek()

    def close(self) -> None:
        """Drops everything, and keeps nothing of what is added later. Idempotent."""
        self.max_tokens = 0
        self._advance_seen()
        self._make_room()

    def _first_seen(self) -> int:
        """The index of the first item that a request sees."""
        first = self._seen.first
        while first < len(self._items) and self._items[first].role == "tool":  # without the call that it answers
            first += 1
        return first

    def _advance(self, window: _Window, max_tokens: int, *, max_speech_bytes: int) -> None:
        """Shrink the window until it fits.

        A question goes with its answer: chat templates want turns that alternate.
        """
        items = self._items
        while window.first < len(items):
            item = items[window.first]
            fits = window.tokens <= max_tokens and window.speech_bytes <= max_speech_bytes
            whole = window.said and item.role == "user" and item.request_id is not None
            if fits and not whole and not (window.asked and item.role != "user"):
                break
            window.asked = window.asked or item.role == "user"
            window.said = item.role == "user"
            window.tokens -= item.tokens
            window.speech_bytes -= item.speech_bytes
            window.first += 1

    def _seek(self) -> None:
        """Find what a request sees from all that is kept: it may be more than before."""
        self._seen = _Window(self._tokens, self._speech_bytes)
        self._advance_seen()

    def _advance_seen(self) -> None:
        """Move what a request sees on, and drop the speech of the items that it leaves behind."""
        before = self._seen.first
        self._advance(self._seen, self._seen_tokens(), max_speech_bytes=MAX_SPEECH_BYTES)
        for index in range(before, self._seen.first):
            item = self._items[index]
            if item.message.speech is not None:
                self._release(item)
                text = " ".join(filter(None, [item.message.text, WORDS_UNKNOWN]))
                self._items[index] = replace(item, message=replace(item.message, text=text, speech=None))

    def _seen_tokens(self) -> int:
        """The tokens from the first stride that fits on."""
        total = self._left_behind + self._tokens
        stride = max(1, int(self.max_tokens * _STRIDE))
        strides = max(0, math.ceil((total - self.max_tokens) / stride))
        return total - strides * stride

    def _make_room(self) -> None:
        """Drop the oldest items beyond what is kept. A request sees none of them."""
        kept = _Window(self._tokens, self._speech_bytes)
        self._advance(kept, KEPT_MULTIPLE * self.max_tokens, max_speech_bytes=self._speech_bytes)
        if kept.first:
            place = self._items[kept.first - 1].place
            self._left_behind += self._tokens - kept.tokens
            self._drop(0, kept.first)
            while self._places and (oldest := next(iter(self._places.items())))[1] <= place:
                del self._places[oldest[0]]
            self._seen.first -= kept.first
            self._seen.asked = self._seen.asked and self._seen.first > 0
            self._seen.said = self._seen.said and self._seen.first > 0

    def _drop(self, start: int, end: int) -> None:
        for item in self._items[start:end]:
            self._tokens -= item.tokens
            self._speech_bytes -= item.speech_bytes
            self._release(item)
        del self._items[start:end]

    def _release(self, item: HistoryItem) -> None:
        if item.message.speech is not None:
            self.held_bytes -= item.speech_bytes
            self._budget.give(item.speech_bytes)


def joined(messages: Iterable[Message]) -> tuple[Message, ...]:
    """The messages without those that have no content, and with neighbours of one role joined by a blank."""
    kept: list[Message] = []
    for message in messages:
        if not (message.text.strip() or message.tool_calls or message.tool_call_id is not None or message.speech):
            continue
        if kept and message.role in ("user", "assistant") and kept[-1].role == message.role:
            kept[-1] = _joined(kept[-1], message)
        else:
            kept.append(message)
    return tuple(kept)


def _joined(first: Message, second: Message) -> Message:
    last = first.parts[-1]
    if last.speech is not None:  # behind which nothing fits into the same part
        return replace(first, more=(*first.more, *second.parts))
    both = replace(
        last,
        text=" ".join(filter(None, (last.text, second.text))),
        tool_calls=(*last.tool_calls, *second.tool_calls),
        speech=second.speech,
    )
    if first.more:
        return replace(first, more=(*first.more[:-1], both, *second.more))
    return replace(both, more=second.more)


def estimate_tokens(text: str) -> int:
    """Return about what a tokenizer makes of ``text``: each word, and of scripts without blanks each character.

    It is never less than one for each CHARACTERS_PER_TOKEN, so that text that counts little is not long. Words are
    counted on the event loop: in a text of more than MAX_COUNTED_TEXT characters, four count as one.
    """
    if len(text) > MAX_COUNTED_TEXT:
        return len(text) // 4
    words = len(text.split()) if text.isascii() else sum(1 for _ in _TOKENS.finditer(text))
    return max(words, len(text) // CHARACTERS_PER_TOKEN)


def _count(message: Message) -> int:
    calls = sum(1 + estimate_tokens(call.arguments) + _long(call.id + call.name) for call in message.tool_calls)
    speech = 0 if message.speech is None else tokens_of(message.speech)
    return max(1, estimate_tokens(message.text) + calls + _long(message.tool_call_id or "") + speech)


def _long(name: str) -> int:
    """What an id or a name counts: nothing, unless it is longer than engines make them."""
    return len(name) // 128


def _speech_bytes(message: Message) -> int:
    return 0 if message.speech is None else held_bytes(message.speech)


def _keep_newest(ids: dict[str, int] | dict[str, None]) -> None:
    while len(ids) > MAX_REQUESTS:
        del ids[next(iter(ids))]

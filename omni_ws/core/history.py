"""The history of a conversation: the messages that earlier requests left, which the engine is given as context.

Part of the ledger (``core/ledger.py``). A Message is what one side said. ``HistoryItems`` keeps messages as items with
ids, bounded in tokens and in bytes of speech; ``in_order`` sorts the messages that a request sees into the order that
models expect.

The oldest messages of a long talk can be summarised: the requests that follow then see a summary, Notes, in their
place. The messages themselves are kept as long as they would be without notes.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import chain, groupby
from operator import attrgetter, is_
from sys import getsizeof
from typing import Final

import msgspec

from omni_ws.core.chunks import AudioFormat, InputChunk, ToolCall
from omni_ws.core.quota import ByteBudget, keep_newest
from omni_ws.errors import InvalidValue

# Messages, and their sizes.

#: The text in the history for speech that has no transcript and cannot be passed on as audio either.
WORDS_UNKNOWN: Final = "[spoken; the words are not known]"
#: The tokens that a second of speech counts. Qwen2-Audio and Qwen2.5-Omni use one token for 40 ms.
TOKENS_PER_SEC: Final = 25
#: The tokens that an image or a video counts. Models use some hundreds for one.
PICTURE_TOKENS: Final = 256
#: The memory that a run of audio chunks of one format takes besides its bytes.
RUN_OVERHEAD_BYTES: Final = 256
#: The memory that a message, or a tool call in it, takes besides its text.
MESSAGE_OVERHEAD_BYTES: Final = 512
#: This many characters count as one token even if they are one word, or blank. Few languages have longer words.
CHARACTERS_PER_TOKEN: Final = 16
#: The longest text whose words are counted, in characters.
MAX_COUNTED_TEXT: Final = 1 << 18

#: Characters of scripts that are written without blanks: Thai to Tibetan, Burmese, Khmer, kana, Bopomofo and Han.
UNSPACED: Final = (
    "\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u19e0-\u19ff\u3005-\u3007\u3021-\u3029\u3040-\u312f\u31a0-\u31bf\u31f0-\u31ff"
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9f\U0001b000-\U0001b16f\U00020000-\U0003ffff"
)
_TOKENS: Final = re.compile(rf"[{UNSPACED}]|[^\s{UNSPACED}]+")


@dataclass(frozen=True, slots=True, eq=False)
class Speech:
    """The audio of an earlier user message, as the chunks that the client sent. Compared by identity."""

    chunks: tuple[InputChunk, ...]
    #: The format of chunks whose own ``format`` is None.
    format: AudioFormat
    #: The duration; for compressed audio possibly an estimate.
    audio_ms: float

    @property
    def held_bytes(self) -> int:
        """The bytes that are charged to the budget for the speech."""
        return sum(len(chunk.payload) + RUN_OVERHEAD_BYTES for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class Message:
    """An earlier message of the conversation; ``role`` is ``system``, ``user``, ``assistant`` or ``tool``.

    ``tool_calls`` are the calls that an assistant message makes; ``tool_call_id`` is the call that a tool message
    answers. ``speech`` is audio of the user that has no transcript and that the engine can take; it follows ``text``.
    ``more`` is what the same user message says after the speech, if anything. ``picture`` is an image or a video, in a
    message that came over HTTP, of any role. ``language`` is the language in which the user spoke it (primary subtag of
    RFC 5646), as far as that is known.
    """

    role: str
    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    speech: Speech | None = None
    picture: InputChunk | None = None
    more: tuple[Message, ...] = ()
    language: str | None = None

    @property
    def parts(self) -> tuple[Message, ...]:
        """The message itself, followed by the further parts of the same turn in ``more``."""
        return (self, *self.more)

    @property
    def has_speech(self) -> bool:
        """Whether the message, or one of its parts, is speech whose words are not known."""
        return any(part.speech is not None for part in self.parts)

    @property
    def says_something(self) -> bool:
        """Whether the message has content. An empty tool result counts: it says that the tool returned nothing."""
        has_media = self.speech is not None or self.picture is not None
        return bool(self.text.strip() or self.tool_calls) or self.tool_call_id is not None or has_media


def estimate_tokens(text: str) -> int:
    """Return roughly how many tokens ``text`` has: one a word or, in scripts without blanks, one a character.

    The result is at least one for each CHARACTERS_PER_TOKEN characters, which bounds the length of a text with few
    words. Words are counted on the event loop: in a text of more than MAX_COUNTED_TEXT characters, four characters
    count as one token.
    """
    if len(text) > MAX_COUNTED_TEXT:
        return len(text) // 4
    words = len(text.split()) if text.isascii() else sum(1 for _ in _TOKENS.finditer(text))
    return max(words, len(text) // CHARACTERS_PER_TOKEN)


def message_bytes(message: Message) -> int:
    """Return the bytes that a message takes in memory, without its speech."""
    size = MESSAGE_OVERHEAD_BYTES + getsizeof(message.text)
    for call in message.tool_calls:
        size += MESSAGE_OVERHEAD_BYTES + getsizeof(call.id) + getsizeof(call.name) + getsizeof(call.arguments)
    return size + sum(map(message_bytes, message.more)) if message.more else size


def speech_bytes(message: Message) -> int:
    """Return the bytes that are charged to the budget for the speech of a message, with that of its parts."""
    return sum(part.speech.held_bytes for part in message.parts if part.speech is not None)


def message_tokens(message: Message) -> int:
    """Return the size of a message in tokens, at least 1, with that of its parts in ``more``.

    Text and the arguments of calls count by ``estimate_tokens``, speech TOKENS_PER_SEC, a picture PICTURE_TOKENS.
    """
    calls = sum(1 + estimate_tokens(call.arguments) + _long(call.id + call.name) for call in message.tool_calls)
    speech = 0 if message.speech is None else math.ceil(message.speech.audio_ms * TOKENS_PER_SEC / 1000)
    picture = 0 if message.picture is None else PICTURE_TOKENS
    own = max(1, estimate_tokens(message.text) + calls + _long(message.tool_call_id or "") + speech + picture)
    return own + sum(map(message_tokens, message.more)) if message.more else own


def _long(name: str) -> int:
    """Return how many tokens an id or a name counts as: one for each 128 characters, so 0 for those of engines."""
    return len(name) // 128


# The order that models expect.

_ROLE_OF: Final = attrgetter("role")


def in_order(messages: Iterable[Message], *, answering: Collection[str] = ()) -> tuple[Message, ...]:
    """Return the messages in the order that models expect.

    Each tool result directly follows the assistant message with its call. A call whose result comes after a later
    answer moves to just before the result. A result without a call, or a second result of a call, is dropped.
    ``answering`` are the calls whose results the request itself brings as its input: these calls move to the end.

    Empty messages are dropped. Consecutive messages of the user are joined by a blank, and so are those of the
    assistant.
    """
    joined: list[Message] = []
    said = (message for message in _calls_moved(list(messages), answering) if message.says_something)
    for role, group in groupby(said, key=_ROLE_OF):
        if role in ("user", "assistant"):
            joined.append(reduce(_joined, _runs(group)))
        else:
            joined += group
    return tuple(joined)


def _is_plain(message: Message) -> bool:
    return message.speech is None and message.picture is None and not message.more


def _runs(messages: Iterable[Message]) -> Iterator[Message]:
    """Join each run of messages that have only text and calls, and yield all others unchanged.

    All messages have the same role. There may be thousands, so runs are joined whole, not message by message.
    """
    for plain, group in groupby(messages, key=_is_plain):
        run = list(group)
        if not plain or len(run) == 1:
            yield from run
            continue
        text = " ".join(one.text for one in run if one.text)
        calls = tuple(chain.from_iterable(one.tool_calls for one in run))
        languages = [one.language for one in run if one.language is not None]
        yield replace(run[0], text=text, tool_calls=calls, language=languages[-1] if languages else None)


def _calls_moved(messages: list[Message], answering: Collection[str]) -> list[Message]:
    if not answering and not any(message.tool_call_id is not None for message in messages):
        return messages
    moved: list[Message] = []
    #: The index in ``moved`` of each call that has no result yet, and the calls whose results were seen.
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
    """Move a tool call to the assistant message right before the index ``before``, or to a new message there.

    ``place`` is the index in ``moved`` of the message that makes the call, and the call. Returns the number of
    messages that were added.
    """
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
    if last.speech is not None or last.picture is not None:  # no text can follow these in one message
        return replace(first, more=(*first.more, *second.parts))
    both = replace(
        last,
        text=" ".join(filter(None, (last.text, second.text))),
        tool_calls=(*last.tool_calls, *second.tool_calls),
        speech=second.speech,
        picture=second.picture,
        language=second.language or last.language,
    )
    if first.more:
        return replace(first, more=(*first.more[:-1], both, *second.more))
    return replace(both, more=second.more)


# Items: messages with ids and places.

#: The history keeps this multiple of what a request sees, so that a truncation brings earlier turns back.
KEPT_MULTIPLE: Final = 2
#: What a request sees is shortened by this share of its limit at a time.
STRIDE: Final = 0.25
#: The requests that the history remembers by id, with or without items; as many ids of truncated requests besides.
MAX_REQUESTS: Final = 1 << 14
#: The most bytes of speech of one request, and of a history. At 25 tokens a second a history of 4096 tokens takes 5 MB
#: of 16 kHz pcm16; other formats take more.
MAX_SPEECH_BYTES: Final = 16 << 20
#: The memory that the place of a request, its ref, and the id of a call take.
_PLACE_BYTES: Final = 256
_REF_BYTES: Final = 512
#: The beginning of the ids under which the server places messages of its own between requests.
PLACED: Final = "item_"
#: The roles that a message may have.
ALL_ROLES: Final = frozenset({"system", "user", "assistant", "tool"})
#: The place of messages that belong to no request: those of an HTTP body, which precede all requests.
_BEFORE_ALL: Final = -1
#: A compiled getter, since thousands of items are read for each request.
_MESSAGE_OF: Final = attrgetter("message")


@dataclass(frozen=True, slots=True, eq=False)
class HistoryItem:
    """One message of the history, with its id and the request that it is from.

    ``request_id`` is None for messages that a client sent as history. ``place`` numbers requests in the order in which
    they opened. The size of the item is ``tokens``, for text and speech, and ``speech_bytes``.
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


#: What the model reads before the notes, and after them. The next message of the user follows in the same message.
NOTES_HEAD: Final = (
    "[These are notes of the earlier part of this talk, which is too long to be shown whole. They are not from the "
    "user. What they say is so, unless it was corrected later.]\n"
)
NOTES_END: Final = "\n[The talk goes on:]\n"


class Notes(msgspec.Struct):
    """A summary of consecutive messages, its size in tokens, and the number of their items that are still kept."""

    text: str
    items: int
    tokens: int

    @classmethod
    def of(cls, text: str, items: int) -> Notes:
        """Return ``text`` as notes on ``items`` items."""
        return cls(text, items, estimate_tokens(text))


class _Window(msgspec.Struct):
    """The newest items that fit into a limit: those from the index ``first`` on, with the sum of their sizes.

    ``asked`` says whether a user message is among the items before ``first``, ``said`` whether the item right before
    ``first`` is one. Consecutive user messages form one message.
    """

    tokens: int = 0
    speech_bytes: int = 0
    first: int = 0
    asked: bool = False
    said: bool = False

    def grow(self, item: HistoryItem) -> None:
        """Add the size of an item that was appended."""
        self.tokens += item.tokens
        self.speech_bytes += item.speech_bytes

    def shrink(self, items: Sequence[HistoryItem], max_tokens: int, *, max_speech_bytes: int) -> None:
        """Increase ``first`` until the items from there on fit.

        A user message is dropped together with its answer: chat templates expect alternating turns.
        """
        while self.first < len(items):
            item = items[self.first]
            fits = self.tokens <= max_tokens and self.speech_bytes <= max_speech_bytes
            whole = self.said and item.role == "user" and item.request_id is not None
            if fits and not whole and not (self.asked and item.role != "user"):
                break
            self.asked = self.asked or item.role == "user"
            self.said = item.role == "user"
            self.tokens -= item.tokens
            self.speech_bytes -= item.speech_bytes
            self.first += 1

    def pass_over(self, items: Sequence[HistoryItem]) -> None:
        """Move ``first`` behind ``items``, the oldest ones, in whose place requests see notes."""
        self.tokens -= sum(item.tokens for item in items)
        self.speech_bytes -= sum(item.speech_bytes for item in items)
        self.first = len(items)

    def renumber(self, dropped: int) -> None:
        """Adjust ``first`` after the oldest ``dropped`` items, all before ``first``, were removed."""
        self.first -= dropped
        self.asked = self.asked and self.first > 0
        self.said = self.said and self.first > 0


class HistoryState(msgspec.Struct, kw_only=True):
    """The contents of a HistoryItems, for serialisation."""

    max_tokens: int
    stride: float = STRIDE
    items: list[HistoryItem]
    left_behind: int
    made: int
    seen: _Window
    places: dict[str, int]
    opened: int
    truncated: list[str]
    results: list[str]
    refs: dict[str, str]
    notes: tuple[Notes, ...] = ()
    lost: list[str] = []


class HistoryItems:
    """The items of a conversation, in the order in which their requests opened.

    ``messages`` returns the latest messages, up to ``max_tokens`` by ``estimate_tokens``; the engine, which counts in
    its own tokens, may drop more. The oldest messages are left out in steps of a quarter of ``max_tokens``: engines
    reuse what they computed for a prompt with the same beginning, and a beginning that moved with every request would
    never be the same.

    The history keeps ``KEPT_MULTIPLE`` times as much text, but speech only in the items that ``messages`` returns:
    older items have ``WORDS_UNKNOWN`` in place of their speech.

    After ``sum_up``, ``messages`` returns notes in place of the oldest items. If an item that notes cover is changed,
    these and all later notes are dropped, and requests see the covered items again, as far as they are still kept.

    Speech is charged to ``budget`` before it is added, and released when it is dropped.
    """

    __slots__ = (
        "_calls",
        "_items",
        "_left_behind",
        "_lost",
        "_made",
        "_notes",
        "_opened",
        "_places",
        "_refs",
        "_results",
        "_seen",
        "_speech_bytes",
        "_stride",
        "_text_bytes",
        "_tokens",
        "_truncated",
        "budget",
        "held_bytes",
        "max_tokens",
    )

    def __init__(self, max_tokens: int, budget: ByteBudget) -> None:
        self.max_tokens = max_tokens
        self._stride = STRIDE
        #: The bytes of speech, with their overhead.
        self.held_bytes = 0
        self.budget = budget
        self._items: list[HistoryItem] = []
        self._tokens = 0
        self._text_bytes = 0
        #: The tokens of the items that were dropped to make room.
        self._left_behind = 0
        #: What was dropped to make room while nothing may be left out: the role and request of each item.
        self._lost: dict[str, None] = {}
        #: The number of items that were ever made; their ids count them.
        self._made = 0
        #: The place of each call in the items; and the ids of calls whose results are in the items.
        self._calls: dict[str, int] = {}
        self._results: dict[str, None] = {}  # smaller than a set, while it is empty
        #: The sum of ``speech_bytes`` of all items, also of those whose speech was dropped.
        self._speech_bytes = 0
        #: What a request sees. Advanced as items are added, and recomputed only if items are removed or shrink.
        self._seen = _Window()
        #: The place of each request that is remembered, in that order.
        self._places: dict[str, int] = {}
        self._opened = 0
        #: Ids of truncated requests, the oldest first.
        self._truncated: dict[str, None] = {}
        #: The client's names for requests.
        self._refs: dict[str, str] = {}
        #: The notes on the oldest items, in order.
        self._notes: tuple[Notes, ...] = ()

    @property
    def memory(self) -> int:
        """The bytes of the history without its speech, which is charged as it arrives."""
        known = len(self._places) + len(self._truncated) + len(self._lost)
        ids = known + len(self._calls) + len(self._results)
        notes = sum(MESSAGE_OVERHEAD_BYTES + getsizeof(one.text) for one in self._notes)
        return self._text_bytes + _PLACE_BYTES * ids + _REF_BYTES * len(self._refs) + notes

    @property
    def items(self) -> tuple[HistoryItem, ...]:
        """All items that are kept, the oldest first."""
        return tuple(self._items)

    def messages(self, answering: Collection[str] = (), *, more: Iterable[Message] = ()) -> tuple[Message, ...]:
        """Return the messages that a request sees if it is answered now, followed by ``more``.

        ``answering`` are calls whose results are in the input of the request. Messages that a client sent as history,
        at the beginning, keep their order.
        """
        items, first = self._items, self._seen.first
        given = first
        while given < len(items) and items[given].place == _BEFORE_ALL:
            given += 1
        while first < given and items[first].role == "tool":  # its call is no longer seen
            first += 1
        before = [*map(_MESSAGE_OF, items[first:given])]
        seen = chain(map(_MESSAGE_OF, items[given:]), more)
        if notes := self.notes:
            noted = Message("user", f"{NOTES_HEAD}{notes}{NOTES_END}")
            if not before:
                seen = chain((noted,), seen)
            elif before[0].role == "user":
                before[0] = _joined(noted, before[0])
            else:
                before.insert(0, noted)
        return (*before, *in_order(seen, answering=answering))

    # notes

    @property
    def notes(self) -> str:
        """The text of the notes that requests see in place of the oldest items; empty if there are none."""
        return "\n".join(one.text for one in self._notes if one.text)

    @property
    def notes_tokens(self) -> int:
        """The size of the notes in tokens."""
        return sum(one.tokens for one in self._notes)

    @property
    def summed(self) -> int:
        """The number of kept items that notes cover."""
        return sum(one.items for one in self._notes)

    @property
    def first_seen(self) -> int:
        """The index of the first item that a request sees."""
        return self._seen.first

    def is_longer_than(self, tokens: int) -> bool:
        """Whether the kept items that no notes cover have more than ``tokens`` tokens."""
        return self._tokens > tokens and sum(item.tokens for item in self._items[self.summed :]) > tokens

    @property
    def may_be_cut(self) -> bool:
        """Whether the oldest messages may be left out in steps: false for a stride of 0, see ``keep_within``."""
        return self._stride > 0

    def older(self, *, behind: int, keep: int, most: int) -> tuple[HistoryItem, ...]:
        """Return the oldest items that no notes cover, to be summarised; none if there are too few.

        The first ``behind`` of them are skipped: these are being summarised already. The next item after the returned
        ones is a user message, and at least ``keep`` tokens follow them. They have at most ``most`` tokens, unless they
        are one message of the user with its answer. An item that requests see is included only if its words, and the
        results of its calls, are known.
        """
        items, start = self._items, self.summed + behind
        newest, end = 0, len(items)
        while end > start and newest < keep:
            end -= 1
            newest += items[end].tokens
        tokens, found = 0, start
        for index in range(start, end):
            if index >= self._seen.first and self._is_open(items[index].message):
                break
            tokens += items[index].tokens
            if self._begins_turn(index + 1):
                if tokens > most and found > start:
                    break
                found = index + 1
        return tuple(items[start:found])

    def _is_open(self, message: Message) -> bool:
        """Return whether a message is incomplete: its words, or the results of some of its calls, are not known."""
        return message.has_speech or any(call.id not in self._results for call in message.tool_calls)

    def _begins_turn(self, index: int) -> bool:
        items = self._items
        return index < len(items) and items[index].role == "user" and items[index - 1].role != "user"

    def sum_up(self, items: Sequence[HistoryItem], text: str) -> bool:
        """Let requests see the notes ``text`` in place of ``items``, which ``older`` has returned.

        Returns False, and changes nothing, if these are no longer the oldest items that no notes cover.
        """
        if not items or not self.is_next(items):
            return False
        self._notes = (*self._notes, Notes.of(text, len(items)))
        self._seek()
        return True

    def is_next(self, items: Sequence[HistoryItem]) -> bool:
        """Return whether ``items`` are still the oldest items that no notes cover."""
        start = self.summed
        now = self._items[start : start + len(items)]
        return len(now) == len(items) and all(map(is_, now, items))

    def condense(self, text: str) -> None:
        """Replace all notes by one, ``text``."""
        self._notes = (Notes.of(text, self.summed),)
        self._seek()

    def _uncover(self, dropped: int) -> None:
        """After the oldest ``dropped`` items were dropped, lower the number of items that notes cover."""
        notes = []
        for one in self._notes:
            gone = min(dropped, one.items)
            dropped -= gone
            notes.append(Notes(one.text, one.items - gone, one.tokens))
        self._notes = tuple(notes)

    def _changed(self, index: int) -> None:
        """Drop the notes on the item at ``index``, which changes, and all later notes."""
        while self._notes and self.summed > index:
            self._notes = self._notes[:-1]

    def keep_within(self, max_tokens: int, *, stride: float = STRIDE) -> None:
        """Set the limit ``max_tokens`` of what a request sees, and the step by which the oldest messages are left out.

        ``stride`` is the step as a share of ``max_tokens``. With 0, only as many messages are left out as necessary,
        one by one; an owner that wants none left out has to refuse requests once ``is_cut`` is true.
        """
        if (max_tokens, stride) != (self.max_tokens, self._stride):
            self.max_tokens, self._stride = max_tokens, stride
            if stride:
                self._lost = {}
            self._seek()
            self._make_room()

    def shorten(self, max_tokens: int) -> None:
        """Lower the limit of what a request sees to ``max_tokens``, unless it is lower already."""
        self.keep_within(min(max_tokens, self.max_tokens), stride=self._stride)

    @property
    def is_cut(self) -> bool:
        """Whether a request that is answered now does not see all items: the oldest, or those that notes cover.

        Of items that are no longer kept, those count that were dropped under a stride of 0, until they are removed.
        """
        return self._seen.first > 0 or bool(self._lost)

    def sees_call(self, call_id: str) -> bool:
        """Return whether a request that is answered now sees the call with this id."""
        place = self._calls.get(call_id)
        first = self._seen.first
        return place is not None and first < len(self._items) and place >= self._items[first].place

    def calls_beside(self, call_id: str) -> tuple[str, ...]:
        """Return the ids of all tool calls in the answer that has this call; empty if the call is unknown."""
        if (place := self._calls.get(call_id)) is None:
            return ()
        return tuple(call.id for index in range(*self._range(place)) for call in self._items[index].message.tool_calls)

    def sees_result(self, call_id: str) -> bool:
        """Return whether the history has the result of this call."""
        return call_id in self._results

    def open(self, request_id: str) -> None:
        """Give a request its place, in the order of opening: requests may end in another order."""
        self._places[request_id] = self._opened
        self._opened += 1
        keep_newest(self._places, MAX_REQUESTS)

    def withdraw(self, request_id: str) -> None:
        """Forget a request that leaves no messages."""
        self._places.pop(request_id, None)

    def name(self, request_id: str, ref: str) -> None:
        """Remember the client's name for a request."""
        self._refs[request_id] = ref
        keep_newest(self._refs, MAX_REQUESTS)

    def name_of(self, request_id: str) -> str | None:
        """Return the client's name for a request; None if it has none, or the request is no longer remembered."""
        return self._refs.get(request_id)

    def add(self, messages: Iterable[Message], *, request_id: str | None = None) -> None:
        """Add the messages of a request, without empty ones, and drop the oldest turns to make room.

        Without ``request_id``, the messages precede all requests, and blank texts among them are kept. For a request
        that was truncated before, nothing is added, and the bytes that were charged for its speech are released.
        """
        if request_id in self._truncated:
            for message in messages:
                self.budget.give(speech_bytes(message))
            return
        place = _BEFORE_ALL if request_id is None else self._places.get(request_id, self._opened)
        behind_all = not self._items or self._items[-1].place <= place
        for message in messages:
            if message.says_something or (request_id is None and message.text):
                item = self._new_item(message, request_id, place)
                self._items.append(item)
                self._seen.grow(item)
        if not behind_all:  # the request was cancelled while it waited for an earlier one
            self._items.sort(key=lambda item: item.place)
            self._changed(self._range(place)[0])
            self._seek()
        self._advance_seen()
        self._make_room()

    def insert(self, messages: Iterable[Message], *, item_id: str, before: str, answer: bool) -> None:
        """Insert the messages of a client's item in front of the items of ``before``, a request or a client's item.

        ``item_id`` is the id by which the inserted messages are known, as those of a request are by the request's.

        ``answer``: insert them between the input and the answer of that request. If the history has forgotten
        ``before``, nothing is inserted.
        """
        if (place := self._places.get(before)) is None:
            return
        self._places[item_id] = place
        first, end = self._range(place)
        those = (i for i in range(first, end) if self._items[i].request_id == before)
        index = next((i for i in those if not answer or self._items[i].role == "assistant"), end)
        for message in filter(lambda one: one.says_something, messages):
            self._insert(index, self._new_item(message, item_id, place, counted=False))
            index += 1
        self._seek()
        self._make_room()

    def revise(self, request_id: str, message: Message) -> bool:
        """Replace a request's message of the role of ``message``. Return False if the request is forgotten.

        If the request has no message of this role, ``message`` is added at the place of the request. An empty
        ``message`` only removes the old one.
        """
        if (place := self._places.get(request_id)) is None:
            return False
        first, end = self._range(place)
        own = [one for one in range(first, end) if self._items[one].request_id == request_id]
        index = next((one for one in own if self._items[one].role == message.role), None)
        if index is not None and message.says_something:
            item = self._items[index]
            changed = replace(item, message=message, tokens=message_tokens(message), speech_bytes=speech_bytes(message))
            self.budget.charge(changed.speech_bytes)  # released by the old item
            ids = [call.id for call in message.tool_calls]
            places = {one: self._calls[one] for one in ids if one in self._calls}
            results = [one for one in ids if one in self._results]
            self._drop(index, index + 1)
            self._insert(index, changed)
            # The calls are not new: a call may have its result, or its id may be that of a later call, too.
            self._calls |= places
            self._results |= dict.fromkeys(results)
        elif index is not None:
            self._drop(index, index + 1)
        elif message.says_something:
            answers = [one for one in own if self._items[one].role == "assistant"]
            behind = end if message.role == "assistant" else next(iter(answers), end)
            self._insert(behind, self._new_item(message, request_id, place, counted=False))
        self._seek()
        self._make_room()
        return True

    def truncate(self, request_id: str) -> int:
        """Drop the items of a request and of all later ones; return how many requests were dropped.

        Messages of the server's own (PLACED) are dropped with them, and not counted. Requests that the user sent
        without an answer between them form one message, and are dropped together.

        Idempotent: returns 0 for a request that an earlier truncation dropped. Raises InvalidValue for any other id
        that is unknown, or no longer remembered.
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
        keep_newest(self._truncated, MAX_REQUESTS)
        self._drop(bisect_left(self._items, first, key=lambda item: item.place), len(self._items))
        self._seek()
        return sum(not known.startswith(PLACED) for known in dropped)

    def remove(self, *request_ids: str, roles: Container[str] = ALL_ROLES) -> None:
        """Drop the items in ``roles`` of these requests. An id may also be that of an item that a client sent."""
        places = {self._places[one] for one in request_ids if one in self._places}
        for lost in [f"{role} {one}" for one in request_ids for role in ALL_ROLES if role in roles]:
            self._lost.pop(lost, None)
        if not places:
            return
        start, end = self._range(min(places))[0], self._range(max(places))[1]
        stay: list[HistoryItem] = []
        go: list[HistoryItem] = []
        for index, item in enumerate(self._items[start:end], start):
            if item.request_id in request_ids and item.role in roles:
                self._changed(index)
                go.append(item)
            else:
                stay.append(item)
        self._let_go(go)
        self._items[start:end] = stay
        self._seek()

    def close(self) -> None:
        """Drop everything, and keep nothing that is added later. Idempotent."""
        self.max_tokens = 0
        self._notes = ()
        self._advance_seen()
        self._make_room()

    def state(self) -> HistoryState:
        """Return the whole history in the form that ``restored`` takes.

        The result shares objects with the history: serialise it before the history changes.
        """
        return HistoryState(
            max_tokens=self.max_tokens,
            stride=self._stride,
            items=list(self._items),
            left_behind=self._left_behind,
            made=self._made,
            seen=self._seen,
            places=self._places,
            opened=self._opened,
            truncated=list(self._truncated),
            results=sorted(self._results),
            refs=self._refs,
            notes=self._notes,
            lost=list(self._lost),
        )

    @classmethod
    def restored(cls, state: HistoryState, budget: ByteBudget) -> HistoryItems:
        """Return a history with the contents of ``state``; its speech is charged to ``budget``."""
        new = cls(state.max_tokens, budget)
        new._restore(state)
        return new

    def _restore(self, state: HistoryState) -> None:
        self._stride = state.stride
        for item in state.items:
            self._insert(len(self._items), item)
            self.budget.charge(item.speech_bytes)
        self._left_behind, self._made, self._seen = state.left_behind, state.made, state.seen
        self._places, self._opened = state.places, state.opened
        self._refs, self._notes = state.refs, state.notes
        self._truncated, self._results = dict.fromkeys(state.truncated), dict.fromkeys(state.results)
        self._lost = dict.fromkeys(state.lost)

    def _range(self, place: int) -> tuple[int, int]:
        """Return the range [first, end) of the indices of the items with this place."""
        first, end = (bisect_left(self._items, one, key=lambda item: item.place) for one in (place, place + 1))
        return first, end

    def _begin_of_message(self, place: int) -> int:
        """Return the place of the first request of the user message that the request at ``place`` is part of."""
        index = bisect_left(self._items, place, key=lambda item: item.place)
        if index == len(self._items) or self._items[index].role not in ("user", "assistant"):
            return place
        while index and self._items[index - 1].role == "user" and self._items[index - 1].place != _BEFORE_ALL:
            index -= 1
            place = self._items[index].place
        return place

    def _new_item(self, message: Message, request_id: str | None, place: int, *, counted: bool = True) -> HistoryItem:
        self._made += 1
        tokens, held = message_tokens(message), speech_bytes(message)
        item = HistoryItem(f"item_{self._made}", request_id, place, message, tokens, held)
        if counted:
            self._count(item)
        return item

    def _count(self, item: HistoryItem) -> None:
        self._tokens += item.tokens
        self._text_bytes += message_bytes(item.message)
        self._speech_bytes += item.speech_bytes
        self.held_bytes += item.speech_bytes
        for call in item.message.tool_calls:  # some engines reuse ids
            self._calls[call.id] = item.place
            self._results.pop(call.id, None)
        if item.message.tool_call_id is not None:
            self._results[item.message.tool_call_id] = None

    def _insert(self, index: int, item: HistoryItem) -> None:
        self._changed(index)
        self._items.insert(index, item)
        self._count(item)

    def _seek(self) -> None:
        """Determine anew, from all items, which of them a request sees: after a removal it may see more."""
        self._seen = _Window(self._tokens, self._speech_bytes)
        if summed := self.summed:
            self._seen.pass_over(self._items[:summed])
        self._advance_seen(since=0)

    def _advance_seen(self, *, since: int | None = None) -> None:
        """Leave out the oldest items that no longer fit into what a request sees, and drop their speech.

        ``since`` is the index of the first item to check for speech; None: the first item that a request saw so far.
        """
        before = self._seen.first if since is None else since
        self._seen.shrink(self._items, self._seen_tokens(), max_speech_bytes=MAX_SPEECH_BYTES)
        for index in range(before, self._seen.first):
            item = self._items[index]
            if item.message.has_speech:
                self._release(item)
                first, *more = map(_without_speech, item.message.parts)
                said = replace(first, more=tuple(more))
                self._text_bytes += message_bytes(said) - message_bytes(item.message)
                self._speech_bytes -= item.speech_bytes
                self._items[index] = replace(item, message=said, speech_bytes=0)

    def _seen_tokens(self) -> int:
        """Return how many tokens a request may see: all, less as many whole steps as it takes to fit ``max_tokens``."""
        total = self._left_behind + self._tokens
        stride = max(1, int(self.max_tokens * self._stride))
        strides = max(0, math.ceil((total + self.notes_tokens - self.max_tokens) / stride))
        return total - strides * stride

    def _make_room(self) -> None:
        """Drop the oldest items beyond the limit of the history. No request sees them."""
        kept = _Window(self._tokens, self._speech_bytes)
        kept.shrink(self._items, KEPT_MULTIPLE * self.max_tokens, max_speech_bytes=self._speech_bytes)
        if kept.first:
            place = self._items[kept.first - 1].place
            self._left_behind += self._tokens - kept.tokens
            if not self._stride:
                self._lost |= dict.fromkeys(f"{one.role} {one.request_id}" for one in self._items[: kept.first])
                keep_newest(self._lost, MAX_REQUESTS)
            self._let_go(self._items[: kept.first])
            del self._items[: kept.first]
            self._uncover(kept.first)
            while self._places and (oldest := next(iter(self._places.items())))[1] <= place:
                del self._places[oldest[0]]
                self._refs.pop(oldest[0], None)
            if kept.first <= self._seen.first:
                self._seen.renumber(kept.first)
            else:  # without a message of the user behind its notes, what a request sees is dropped, too
                self._seek()

    def _drop(self, start: int, end: int) -> None:
        self._changed(start)
        self._let_go(self._items[start:end])
        del self._items[start:end]

    def _let_go(self, items: Iterable[HistoryItem]) -> None:
        for item in items:
            self._tokens -= item.tokens
            self._text_bytes -= message_bytes(item.message)
            self._speech_bytes -= item.speech_bytes
            self._release(item)
            for call in item.message.tool_calls:
                if self._calls.get(call.id) == item.place:
                    del self._calls[call.id]
            self._results.pop(item.message.tool_call_id or "", None)

    def _release(self, item: HistoryItem) -> None:
        self.held_bytes -= item.speech_bytes
        self.budget.give(item.speech_bytes)


def _without_speech(part: Message) -> Message:
    if part.speech is None:
        return part
    return replace(part, text=" ".join(filter(None, [part.text, WORDS_UNKNOWN])), speech=None)

"""The base class of Realtime dialects, and the parts of a Realtime conversation: items, turns and responses."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import takewhile
from sys import getsizeof
from typing import Any, Final, Literal, TypeAlias

from omni_ws.core.chunks import (
    CONTENT_FILTER,
    FinalChunk,
    FinishReason,
    InputChunk,
    Modality,
    OutputChunk,
    OutputModality,
    ToolCall,
    ToolCallFragment,
)
from omni_ws.core.history import ALL_ROLES, Message
from omni_ws.core.ledger import Ledger
from omni_ws.core.quota import ByteBudget, Share
from omni_ws.errors import OmniError, PayloadTooLarge
from omni_ws.service import new_id
from omni_ws.service.conversation.conversation import Conversation
from omni_ws.service.conversation.output_log import ServerMessage
from omni_ws.wire.realtime_events import Item, RealtimeRefusal, error_event, error_fields, item_event, usage_fields
from omni_ws.wire.realtime_session import shown_audio_output
from omni_ws.wire.session_config import SessionConfig

#: A server event, without its id.
Event: TypeAlias = dict[str, Any]


class SessionDialect(ABC):
    """Base class of dialects: they translate between a client's events and the messages of its conversation.

    Has no socket. ``receive`` raises an InvalidRequest for an event that is refused, and any other OmniError to end the
    session.
    """

    #: Whether the client's first event may show that it speaks vLLM's dialect instead.
    may_be_vllm = False
    #: The error for which the session ends, once the client has been sent it.
    _reported: OmniError | None = None

    def __init__(self) -> None:
        self._send: Callable[[Iterable[Event]], None] = lambda events: None

    def connect(
        self, send: Callable[[Iterable[Event]], None], output_cleared: Callable[[str | None], None]
    ) -> list[Event]:
        """Set the functions that reach the client. Returns the first events to send.

        ``send`` sends events immediately. ``output_cleared`` is called after ``output_audio_buffer.clear``, with the id
        of the response that the event cancelled; None if it cancelled none.
        """
        self._send = send
        return []

    @abstractmethod
    def receive(self, fields: Mapping[str, Any], *, now: float) -> None:
        """Handle one event of the client, which arrived at the time ``now``."""

    @abstractmethod
    def render(self, message: ServerMessage) -> Iterator[Event]:
        """Render a message of the conversation as events; no events if the API has none for it."""

    def error(self, error: OmniError, *, event_id: str | None = None) -> Event:
        """Return the event that reports an error; ``event_id`` is the id of the client's event that caused it."""
        return error_event(error, event_id=event_id)

    def reported(self, error: OmniError) -> bool:
        """Return whether the client has been sent this error."""
        return error.reports_same(self._reported)

    @abstractmethod
    def close(self) -> None:
        """Refund the bytes that are charged to the session. May be called repeatedly."""


# Items.

#: Items that a client may refer to by id; the oldest items make room for new ones.
MAX_ITEMS: Final = 1024
#: In place of an item's id: the place before all items of the conversation.
ROOT: Final = "root"


class ConversationItems:
    """The items of one session in order, kept in step with the messages of its history.

    The items are charged to ``budget``; none is added beyond ``max_bytes``. The text of an item that a client creates
    is in the history from its creation on. An item that no response has answered is *pending*: ``take_pending`` removes
    it from the history, and returns it as the input of a request. The request puts it back into the history, with its
    answer.
    """

    def __init__(self, ledger: Ledger, budget: ByteBudget, *, max_bytes: int) -> None:
        self._ledger = ledger
        self._items: dict[str, Item] = {}
        #: The pending items by id, in order.
        self._pending: dict[str, Item] = {}
        self._share = Share(budget)
        #: The bytes charged for each item, by id.
        self._charged: dict[str, int] = {}
        self._max_bytes = max_bytes
        #: The items that are the input of each open request, with their chunks, by request id.
        self._asked: dict[str, list[tuple[Item, list[InputChunk]]]] = {}
        #: The open requests of whose input an item was deleted.
        self._parted: set[str] = set()
        #: What was heard of answers that were cut, by item id, when ``kept`` was last called.
        self._heard: dict[str, str] = {}

    def get(self, item_id: str) -> Item | None:
        """Return the item with this id; None if there is none."""
        return self._items.get(item_id)

    def add(self, item: Item) -> str | None:
        """Append an item, without adding it to the history. Returns the id of the item before it, None for the first.

        An item with input for the engine is pending from now on. Beyond MAX_ITEMS, the oldest items are forgotten.
        Raises PayloadTooLarge and EngineOverloaded.
        """
        previous = next(reversed(self._items), None)
        if self._share.size + item.size > self._max_bytes:
            raise PayloadTooLarge(f"the items of a session may hold {self._max_bytes} bytes")
        self._charge(item)
        self._items[item.item_id] = item
        if item.chunks:
            self._pending[item.item_id] = item
        while len(self._items) > MAX_ITEMS:
            self._forget(next(iter(self._items)))
        return previous

    def place_of(self, previous_id: str | None) -> str | None:
        """Return ``previous_id`` if it is the id of an item, ROOT or None. Raises RealtimeRefusal otherwise."""
        if previous_id in (None, ROOT) or previous_id in self._items:
            return previous_id
        raise RealtimeRefusal(
            "item_create_invalid_previous_item_id", "there is no item of this id", param="previous_item_id"
        )

    def create(self, item: Item, *, after: str | None = None) -> str | None:
        """Add an item that the client creates, also to the history. Returns and raises what ``add`` does.

        The item is placed behind the item with the id ``after``; ROOT means at the beginning, and None at the end.
        """
        last = next(reversed(self._items), None)
        previous = self.add(item)
        if after is not None and last is not None and after != last:
            begins = after == ROOT or after not in self._items  # which has made room for this one
            self._move(item, None if begins else after)
            return None if begins else after
        if item.is_answer:
            self.seen()
        self._remember(item)
        return previous

    def _move(self, item: Item, after: str | None) -> None:
        """Move the last item behind the item ``after``; None for the beginning.

        There the item is pending only if all items behind it are pending.
        """
        items = [one for one in self._items.values() if one is not item]
        index = 0 if after is None else 1 + next(i for i, one in enumerate(items) if one.item_id == after)
        if any(not one.chunks for one in items[index:]):
            item.take_chunks()
            self._charge(item)
        elif item.is_answer:
            for one in items[:index]:
                one.take_chunks()
                self._charge(one)
        following = items[index]
        items.insert(index, item)
        self._items = {one.item_id: one for one in items}
        self._find_pending()
        before = (following.request_id or following.item_id, following.is_answer)
        self._ledger.place(messages_of([item]), item_id=item.item_id, before=before)
        self._ledger.weigh()

    def pending(self) -> list[Item]:
        """Return the items that no response has answered, in order of the conversation."""
        return list(self._pending.values())

    def take_pending(self) -> tuple[list[Item], list[InputChunk]]:
        """Remove from the history the items that the next request is to answer. Returns them, and their input chunks.

        A system message is context of the request, unless no other item is pending.
        """
        pending = self.pending()
        asked = [item for item in pending if item.role != "system"] or pending[-1:]
        self._ledger.remove(*(item.item_id for item in asked))
        chunks = list(as_input(asked))
        return asked, chunks

    def asked(self, items: Iterable[Item], request_id: str) -> None:
        """Note that ``items`` are the input of a request. All other pending items become its context."""
        self._asked[request_id] = [(item, item.asked(request_id)) for item in items]
        for item in items:
            self._pending.pop(item.item_id, None)
        self.seen()

    def seen(self) -> None:
        """Note that a request has all pending items as context. No item is pending any more."""
        for item in self.pending():
            item.take_chunks()
            self._charge(item)
        self._pending.clear()

    def answered(self, request_id: str, *, failed: bool) -> None:
        """Note the end of a request. If it ``failed``, its items return to the history and are pending again."""
        for item, chunks in self._asked.pop(request_id, ()):
            if item.item_id not in self._items:
                continue
            if failed:
                item.wait(chunks)
                self._remember(item)
            self._charge(item)
        if failed:
            self._find_pending()
        elif request_id in self._parted:
            self._part(request_id)
        self._parted.discard(request_id)

    def heard(self, item: Item, transcript: str) -> None:
        """Set the transcript of a spoken turn's item. The item is pending: the next response has it as input.

        If ``transcript`` is empty, the next response gets the item's audio. Does nothing if the item was deleted.
        """
        if item.item_id not in self._items:
            return
        item.wait([InputChunk(Modality.TEXT, transcript.encode())] if transcript else item.chunks)
        if transcript:
            self._remember(item)
        self._charge(item)
        self._find_pending()

    def told(self, item: Item, result: InputChunk) -> None:
        """Set the result of ``item``, a call that the server has made. The item is pending from now on."""
        item.wait([result])
        self._remember(item)
        self._charge(item)
        self._find_pending()

    def feed(self) -> Iterator[InputChunk]:
        """Make the pending items with images part of the turn being spoken: remove them, and yield their chunks."""
        shown = [item for item in self.pending() if any(one.modality is Modality.IMAGE for one in item.chunks)]
        self._ledger.remove(*(item.item_id for item in shown))
        for item in shown:
            del self._pending[item.item_id]
            chunks = item.take_chunks()
            self._charge(item)
            yield from chunks

    def cut(self, item: Item, heard: str) -> None:
        """Shorten the text of an answer's item to ``heard``, the part that the user heard."""
        item.cut(heard)
        self._charge(item)

    def have_grown(self, items: Iterable[Item]) -> None:
        """Charge the budget for the bytes by which these items have grown."""
        for item in items:
            if item.item_id in self._items:
                self._charge(item)

    def delete(self, item: Item) -> None:
        """Delete an item from the conversation and from the history."""
        answer = {"assistant"}
        if item.request_id is None:
            self._ledger.remove(item.item_id)
        elif not item.extra:  # of MCP the history keeps the call with its result
            self._ledger.remove(item.request_id, roles=answer if item.is_answer else ALL_ROLES - answer)
        self._forget(item.item_id)
        if item.request_id is None or item.is_answer or item.extra:
            return
        if item.request_id in self._asked:
            self._parted.add(item.request_id)
        else:
            self._part(item.request_id)

    def _part(self, request_id: str) -> None:
        """Put the input of a request, of which an item was deleted, back into the history, item by item."""
        rest = [one for one in self._items.values() if one.request_id == request_id and not one.is_answer]
        for item in rest:
            if not item.extra:
                item.request_id = None
                self._ledger.place(messages_of([item]), item_id=item.item_id, before=(request_id, True))
        if rest:
            self._ledger.weigh()

    def kept(self, speaking: Iterable[Turn]) -> Iterator[Item]:
        """Yield the items, in order, with which a later session begins.

        The input of a request that is not over is pending, also the words of the turns ``speaking``, as far as they are
        known; the items of its answer are left out. Of an answer that was cut, what was heard is left, as far as the
        ledger knows that now, or knew it at an earlier call.
        """
        self._note_heard()
        spoken = [turn for turn in speaking if turn.text]
        unanswered = {*self._asked, *(turn.item.request_id for turn in spoken)}
        chunks = {turn.item.item_id: [InputChunk(Modality.TEXT, turn.text.encode())] for turn in spoken}
        chunks |= {item.item_id: given for asked in self._asked.values() for item, given in asked}
        for item in self._items.values():
            if item.is_answer and item.request_id is not None and item.request_id in unanswered:
                continue
            if item.item_id in self._heard:
                item = replace(item, content=[dict(part) for part in item.content])
                item.cut(self._heard[item.item_id])
            yield replace(item, chunks=chunks.get(item.item_id, item.chunks))

    def _note_heard(self) -> None:
        for item in self._items.values():
            entry = None if item.request_id is None else self._ledger.find(item.request_id)
            if item.role == "assistant" and entry is not None and entry.finished and entry.cut_ms is not None:
                self._heard[item.item_id] = self._ledger.heard_text(entry)

    def go_on(self, items: Iterable[Item]) -> None:
        """Add the items of an earlier session, also to the history. Call it before any other item is added.

        Raises EngineOverloaded.
        """
        for item in items:
            item.begin_again()
            self._items[item.item_id] = item
            self._charge(item)
            self._ledger.place(messages_of([item]), item_id=item.item_id)
        self._ledger.weigh()
        self._find_pending()

    def close(self) -> None:
        """Drop all items, and refund their bytes."""
        self._items.clear()
        self._pending.clear()
        self._charged.clear()
        self._asked.clear()
        self._share.resize(0)

    def _charge(self, item: Item) -> None:
        """Charge the budget for the current size of an item."""
        size = item.size
        self._share.resize(self._share.size - self._charged.get(item.item_id, 0) + size)
        self._charged[item.item_id] = size

    def _find_pending(self) -> None:
        """Collect the pending items (those that no response has answered) anew: an earlier one may be pending again."""
        self._pending = {item_id: item for item_id, item in self._items.items() if item.chunks}

    def _forget(self, item_id: str) -> None:
        del self._items[item_id]
        self._pending.pop(item_id, None)
        self._heard.pop(item_id, None)
        self._share.resize(self._share.size - self._charged.pop(item_id))

    def _remember(self, item: Item) -> None:
        self._ledger.place(messages_of([item]), item_id=item.item_id)
        self._ledger.weigh()


def as_new(item: Item) -> Item:
    """Return a message of the user or the system with its text as unanswered input; any other item unchanged."""
    if item.chunks or item.role not in ("user", "system") or not item.message_text:
        return item
    return replace(item, chunks=[InputChunk(Modality.TEXT, item.message_text.encode())])


def as_input(items: Iterable[Item]) -> Iterator[InputChunk]:
    """Yield the input chunks of these items, in order, with line breaks between texts."""
    for index, item in enumerate(items):
        if index and item.chunks[0].modality is Modality.TEXT and item.chunks[0].tool_call_id is None:
            yield InputChunk(Modality.TEXT, b"\n")
        yield from item.chunks


def messages_of(items: Iterable[Item]) -> Iterator[Message]:
    """Yield the messages of a history that represent these items."""
    for item in items:
        match item.kind:
            case "message":
                yield Message(item.role, item.message_text)
            case "function_call":
                yield Message("assistant", "", tool_calls=(ToolCall(item.call_id, item.name, item.text),))
            case "function_call_output":
                yield Message("tool", item.text, tool_call_id=item.call_id)
            case "mcp_call" if item.request_id is None and not item.chunks and "output" in item.extra:  # of before
                call = ToolCall(item.item_id, item.extra.get("name", ""), item.extra.get("arguments", ""))
                yield Message("assistant", "", tool_calls=(call,))
                yield Message("tool", str(item.extra["output"] or item.extra.get("error") or ""), tool_call_id=call.id)
            case "mcp_call" | "mcp_approval_response":  # the answer that made the call has it in the history
                for chunk in item.chunks:
                    yield Message("tool", chunk.payload.decode(), tool_call_id=item.call_id)


# Spoken turns.

_WORD: Final = re.compile(r"\s*\S+")


@dataclass(slots=True, eq=False)
class Turn:
    """A spoken turn: speech between ``speech_started`` and ``speech_stopped``, or audio that the client committed.

    A turn has an item in the conversation; ``item.request_id`` is the request that answers or transcribes its audio.
    """

    item: Item
    #: Whether its request is to be answered. Otherwise it is only transcribed, and the item waits for a response.
    answered: bool
    start_ms: int = 0
    end_ms: int = 0
    #: Whether its item is part of the conversation.
    committed: bool = False
    #: Whether the client has discarded the speech (``input_audio_buffer.clear``).
    cleared: bool = False
    #: Whether the engine has begun to work on the request.
    started: bool = False
    #: Whether its transcript is complete, or failed.
    transcribed: bool = False
    #: The settled pieces of the transcript, each with the white space before it.
    transcript: list[str] = field(default_factory=list)
    #: The language of the latest piece (RFC 5646), if it was detected.
    language: str | None = None
    #: The words of the newest interim text of the piece that is being recognised, and how many of them were sent.
    newest: list[str] = field(default_factory=list)
    told: int = 0

    @property
    def text(self) -> str:
        return "".join(self.transcript)

    def start(self) -> None:
        """Note that the engine has begun to work on the request."""
        self.started = True

    def preview(self, text: str) -> str:
        """Take the newest interim text of a piece of the transcript, and return the words to send to the client now.

        Words are sent once two interim texts in a row begin with them. The last word is not sent, as it may be
        incomplete.
        """
        before, self.newest = self.newest, _words(text)
        stable = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, self.newest[:-1], strict=False)))
        told, self.told = self.told, max(self.told, stable)
        return "".join(self.newest[told : self.told])

    def hear(self, text: str, *, language: str | None) -> str:
        """Add a settled piece of the transcript, and return those of its words that ``preview`` has not returned."""
        self.transcript.append(text)
        self.language = language or self.language
        told, self.told, self.newest = self.told, 0, []
        return "".join(_words(text)[told:]) if told else text

    def end(self, at_ms: int) -> None:
        """Note that the speech ended at ``at_ms``, in milliseconds of the input."""
        self.end_ms = at_ms

    def commit(self) -> bool:
        """Make the turn part of the conversation. Returns False if it was committed or cleared before."""
        taken = not (self.committed or self.cleared)
        self.committed = self.committed or taken
        return taken

    def clear(self) -> None:
        """Note that the client has discarded the speech."""
        self.cleared = True

    def settle(self) -> None:
        """Note that the transcript is complete, or has failed, and write it into the item."""
        self.transcribed = True
        self.item.content[0]["transcript"] = self.text


def _words(text: str) -> list[str]:
    """Return the words of a text, each with the white space before it."""
    return _WORD.findall(text)


def transcription_event(turn: Turn, kind: str, **fields: Any) -> Event:
    """Return an event about the transcript of a turn; ``kind`` is "delta", "completed" or "failed"."""
    return {
        "type": f"conversation.item.input_audio_transcription.{kind}",
        "item_id": turn.item.item_id,
        "content_index": 0,
        **fields,
    }


def empty_buffer() -> RealtimeRefusal:
    """Return the error for a commit when there is no audio."""
    return RealtimeRefusal("input_audio_buffer_commit_empty", "there is no audio to commit")


def spoken_item(*chunks: InputChunk) -> Item:
    """Return a new item for a spoken turn, with the transcript still unknown."""
    content = [{"type": "input_audio", "transcript": None}]
    return Item(item_id=new_id("item_"), role="user", content=content, chunks=list(chunks))


# Responses.

_STATUS: Final = {
    FinishReason.STOP: "completed",
    FinishReason.TOOL_CALLS: "completed",
    FinishReason.LENGTH: "incomplete",
    FinishReason.CANCELLED: "cancelled",
    FinishReason.ERROR: "failed",
}


@dataclass(slots=True)
class _Output:
    """One item of a response, with its index in the response, and the pieces of its text."""

    item: Item
    index: int
    text: list[str] = field(default_factory=list)


def response_id_of(request_id: str) -> str:
    """Return the id of the response to a request: "resp_…" for "req_…", as logs, metrics and recordings name it."""
    return "resp_" + request_id.removeprefix("req_")


def request_id_of(response_id: str) -> str:
    """Return the id of the request that a response answers: "req_…" for "resp_…"."""
    return "req_" + response_id.removeprefix("resp_")


class RealtimeResponse:
    """A response of the Realtime API: renders one answer as events, from ``response.created`` to ``response.done``.

    The answer's message and each of its calls are items. ``server_call`` returns the item for a call that the server
    makes (None for another call), given the request id, the call id and the tool's name. ``add`` puts an item into the
    conversation, and returns the id of the item before it; ``add`` is None for a response out of band. The text of the
    answer is charged to ``account``; ``metadata`` is the client's.
    """

    def __init__(
        self,
        request_id: str,
        config: SessionConfig,
        *,
        conversation_id: str,
        account: ByteBudget,
        add: Callable[[Item], str | None] | None,
        metadata: Mapping[str, str] | None,
        server_call: Callable[[str, str, str], Item | None],
    ) -> None:
        self.response_id = response_id_of(request_id)
        self.request_id = request_id
        self._conversation_id = conversation_id
        self._add = add
        #: The id of the item before each own item in the conversation, by item id.
        self._previous: dict[str, str | None] = {}
        self._cancel_reason: str | None = "turn_detected"
        self._config = config
        self._metadata = metadata
        self._speaks = "audio" in config.modalities
        self._outputs: list[_Output] = []
        self._message: _Output | None = None
        self._calls: dict[int, _Output] = {}
        self._server_call = server_call
        #: The fields of the finished response; None before its end. It is done when the calls that the server makes are
        #: over.
        self._ended: dict[str, Any] | None = None
        #: Charged for the text of the answer so far.
        self._share = Share(account)

    @property
    def in_conversation(self) -> bool:
        """Whether the response is part of the conversation, and not out of band (``conversation: "none"``)."""
        return self._add is not None

    @property
    def items(self) -> list[Item]:
        """The items of the response so far."""
        return [output.item for output in self._outputs]

    def cancel(self) -> None:
        """Note that the client cancels the response. Without this, a cancelled response was interrupted by speech."""
        self._cancel_reason = "client_cancelled"

    def begin(self) -> Iterator[Event]:
        """Render the beginning of the response."""
        yield {"type": "response.created", "response": self._shown("in_progress")}
        yield {"type": "rate_limits.updated", "rate_limits": []}  # limits of a key are not those of tokens

    # outputs

    def render(self, chunk: OutputChunk) -> Iterator[Event]:
        """Render one output of the engine as events."""
        match chunk.modality:
            case OutputModality.TEXT:
                yield from self._text(chunk.text)
            case OutputModality.AUDIO:
                yield from self._audio(chunk.payload)
            case OutputModality.TOOL_CALL if chunk.tool_call is not None:
                yield from self._call(chunk.tool_call)

    def _text(self, text: str) -> Iterator[Event]:
        yield from self._open_message()
        assert self._message is not None
        self._say(self._message, text)
        kind = "response.output_audio_transcript.delta" if self._speaks else "response.output_text.delta"
        yield {"type": kind, **self._place(self._message), "content_index": 0, "delta": text}

    def _audio(self, payload: bytes) -> Iterator[Event]:
        yield from self._open_message()
        assert self._message is not None
        yield {
            "type": "response.output_audio.delta",
            **self._place(self._message),
            "content_index": 0,
            "delta": payload,
        }

    def _call(self, fragment: ToolCallFragment) -> Iterator[Event]:
        output = self._calls.get(fragment.index)
        if output is None:
            call_id, name = fragment.id or new_id("call_"), fragment.name or ""
            item = self._server_call(self.request_id, call_id, name) or Item(
                item_id=new_id("item_"),
                kind="function_call",
                status="in_progress",
                call_id=call_id,
                name=name,
                request_id=self.request_id,
            )
            output = self._calls[fragment.index] = self._open(item)
            yield from self._added(output)
        if fragment.arguments:
            self._say(output, fragment.arguments)
            if output.item.kind == "mcp_call":
                yield {"type": "response.mcp_call_arguments.delta", **self._place(output), "delta": fragment.arguments}
            elif output.item.kind == "function_call":
                yield {
                    "type": "response.function_call_arguments.delta",
                    **self._place(output),
                    "call_id": output.item.call_id,
                    "delta": fragment.arguments,
                }

    def _say(self, output: _Output, text: str) -> None:
        output.text.append(text)
        self._share.force(self._share.size + getsizeof(text))

    def close(self) -> None:
        """Refund the bytes charged for the text of the answer."""
        self._share.resize(0)

    def _open_message(self) -> Iterator[Event]:
        if self._message is None:
            item = Item(item_id=new_id("item_"), role="assistant", status="in_progress", request_id=self.request_id)
            self._message = self._open(item)
            yield from self._added(self._message)
            yield {
                "type": "response.content_part.added",
                **self._place(self._message),
                "content_index": 0,
                "part": self._part(""),
            }

    def _open(self, item: Item) -> _Output:
        output = _Output(item, len(self._outputs))
        self._outputs.append(output)
        return output

    def _added(self, output: _Output) -> Iterator[Event]:
        yield self._item_event("added", output)
        if self._add is not None:
            self._previous[output.item.item_id] = previous = self._add(output.item)
            yield item_event("added", output.item, previous=previous)

    # the end

    def finish(self, final: FinalChunk, error: OmniError | None, *, cut_off: bool = False) -> Iterator[Event]:
        """Render the end of the response: the last events of its items, then ``response.done``.

        ``cut_off``: the session ends before the answer does, which then has no reason: nobody has interrupted it.
        If the response ``waits`` for calls of MCP tools, the last events of these calls and ``response.done`` are
        rendered later, by ``call_over`` and ``done``.
        """
        if cut_off and self._cancel_reason == "turn_detected":
            self._cancel_reason = None
        status, reason = _STATUS[final.finish_reason], "max_output_tokens"
        if CONTENT_FILTER in final.foreign_reasons:
            status, reason = "incomplete", CONTENT_FILTER
        self._ended = {
            "status": status,
            "status_details": self._details(status, reason, error),
            "usage": usage_fields(final.usage),
            **({"times": final.times} if final.times else {}),
        }
        for output in self._outputs:
            if output.item.kind in ("mcp_call", "mcp_approval_request"):
                output.item.extra["arguments"] = "".join(output.text)
            if output.item.kind == "mcp_call":
                yield from self._begin_call(output, made=status == "completed")
                if status == "completed":
                    continue
            elif output.item.kind != "mcp_approval_request":
                ended = self._end_message if output is self._message else self._end_call
                yield from ended(output, "completed" if status == "completed" else "incomplete")
            yield from self._item_done(output)
        if not self.waits:
            yield from self.done()

    @property
    def waits(self) -> bool:
        """Whether the answer is complete, but the response has calls of MCP tools, which the server makes."""
        ended = self._ended is not None and self._ended["status"] == "completed"
        return ended and any(output.item.kind == "mcp_call" for output in self._outputs)

    def _begin_call(self, output: _Output, *, made: bool) -> Iterator[Event]:
        arguments = output.item.extra["arguments"]
        yield {"type": "response.mcp_call_arguments.done", **self._place(output), "arguments": arguments}
        if made:
            place = {"item_id": output.item.item_id, "output_index": output.index}
            yield {"type": "response.mcp_call.in_progress", **place}

    def call_over(self, item: Item, kind: Literal["completed", "failed"]) -> Iterator[Event]:
        """Render the end of a call of an MCP tool."""
        output = next(one for one in self._outputs if one.item is item)
        yield {"type": f"response.mcp_call.{kind}", "item_id": item.item_id, "output_index": output.index}
        yield from self._item_done(output)

    def _item_done(self, output: _Output) -> Iterator[Event]:
        yield self._item_event("done", output)
        if self.in_conversation:
            yield item_event("done", output.item, previous=self._previous.get(output.item.item_id))

    def done(self) -> Iterator[Event]:
        """Render ``response.done``, after ``finish``."""
        ended = dict(self._ended or {})
        if self.waits and self._cancel_reason == "client_cancelled":
            ended |= {"status": "cancelled", "status_details": self._details("cancelled", "", None)}
        yield {"type": "response.done", "response": {**self._shown(ended.get("status", "failed")), **ended}}
        self.close()  # the items are charged with what they say

    def _end_message(self, output: _Output, status: str) -> Iterator[Event]:
        text, place = "".join(output.text), {**self._place(output), "content_index": 0}
        part = self._part(text)
        output.item.complete(status, content=[{**part, "type": f"output_{part['type']}"}])  # its name there
        if self._speaks:
            yield {"type": "response.output_audio.done", **place}
            yield {"type": "response.output_audio_transcript.done", **place, "transcript": text}
        else:
            yield {"type": "response.output_text.done", **place, "text": text}
        yield {"type": "response.content_part.done", **place, "part": part}

    def _end_call(self, output: _Output, status: str) -> Iterator[Event]:
        item = output.item
        item.complete(status, text="".join(output.text))
        yield {
            "type": "response.function_call_arguments.done",
            **self._place(output),
            "call_id": item.call_id,
            "name": item.name,
            "arguments": item.text,
        }

    def _details(self, status: str, reason: str, error: OmniError | None) -> dict[str, Any] | None:
        match status:
            case "cancelled":
                return {"type": "cancelled", **({"reason": self._cancel_reason} if self._cancel_reason else {})}
            case "incomplete":
                return {"type": "incomplete", "reason": reason}
            case "failed" if error is not None:
                fields = error_fields(error)
                return {"type": "failed", "error": {name: fields[name] for name in ("type", "code", "message")}}
            case "failed":
                return {"type": "failed"}
        return None

    def _item_event(self, step: Literal["added", "done"], output: _Output) -> Event:
        place = {"response_id": self.response_id, "output_index": output.index}
        return {"type": f"response.output_item.{step}", **place, "item": output.item.shown()}

    def _place(self, output: _Output) -> dict[str, Any]:
        return {"response_id": self.response_id, "item_id": output.item.item_id, "output_index": output.index}

    def _part(self, text: str) -> dict[str, Any]:
        """Return a content part of the response with ``text``."""
        return {"type": "audio", "transcript": text} if self._speaks else {"type": "text", "text": text}

    def _shown(self, status: str) -> dict[str, Any]:
        limit = self._config.sampling.max_tokens
        return {
            "object": "realtime.response",
            "id": self.response_id,
            "status": status,
            "status_details": None,
            "output": [output.item.shown() for output in self._outputs],
            "conversation_id": self._conversation_id if self.in_conversation else None,
            "output_modalities": ["audio"] if self._speaks else ["text"],
            "max_output_tokens": "inf" if limit is None else limit,
            "audio": {"output": shown_audio_output(self._config)},
            "usage": None,
            "metadata": self._metadata,
        }


class AfterAudio:
    """Delays commits and clears of a client until turn detection has heard all audio that was sent before them.

    Otherwise a commit would find no speech while earlier audio is still being judged. ``handle`` gets the type and the
    id of an event: immediately without turn detection, otherwise when ``go_on`` is called for an InputHeard.
    """

    def __init__(self, conversation: Conversation, handle: Callable[[str, str | None], None]) -> None:
        self._conversation = conversation
        self._handle = handle
        #: The type and the id of each event.
        self._waiting = deque[tuple[str, str | None]]()

    def put(self, kind: str, event_id: str | None) -> None:
        """Handle an event now, or queue it until its audio was heard. Raises what ``handle`` raises."""
        self._waiting.append((kind, event_id))
        listener = self._conversation.listener
        if listener is not None and self._conversation.configuration.effective.turn_detection is not None:
            listener.mark()
        else:
            self.go_on()

    def go_on(self) -> None:
        """Handle the next queued event: the audio before it was heard. Raises what ``handle`` raises."""
        self._handle(*self._waiting.popleft())


class Dictation:
    """The utterance that a client dictates: all audio since its last commit, which is the input of one request.

    The request opens with the first audio and gets further audio as it comes, so the transcript is nearly complete when
    the client commits. If the request fails before the commit, the client is told at the commit.
    """

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        #: The open utterance; None before its first audio.
        self.turn: Turn | None = None
        #: Bytes of its audio.
        self.size = 0
        #: Whether its request has ended, and the error that ended it.
        self.ended = False
        self.error: OmniError | None = None

    def append(self, chunk: InputChunk, now: float) -> Turn | None:
        """Add audio. Returns the turn if the audio opened it. Raises what ``Conversation.receive_chunk`` raises."""
        self._conversation.receive_chunk(chunk, now=now)
        if not chunk.payload:
            return None
        self.size += len(chunk.payload)
        if self.turn is not None:
            return None
        self.turn = turn = Turn(spoken_item(), answered=False)
        request = self._conversation.receiving
        if request is None:  # it was refused as it opened
            self.ended = True
        else:
            turn.item.asked(request.request_id)
        return turn

    def end(self, error: OmniError | None) -> None:
        """Note that the request has ended before the commit, and the error that ended it."""
        self.ended, self.error = True, error

    def finish(self) -> None:
        """End the utterance; audio that is appended later begins another utterance."""
        self._conversation.finish()
        self.turn, self.size, self.ended, self.error = None, 0, False, None

    def clear(self) -> None:
        """Discard the utterance, and cancel its request."""
        turn = self.turn
        if turn is not None:
            turn.clear()
            if turn.item.request_id is not None:
                self._conversation.cancel(turn.item.request_id)
            self.finish()

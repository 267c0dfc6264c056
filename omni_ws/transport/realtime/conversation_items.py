"""ConversationItems: the items of one session, and what of them waits for a response."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

from omni_ws.core.chunks import InputChunk, Modality, ToolCall
from omni_ws.core.history import ALL_ROLES, Message
from omni_ws.core.ledger import Ledger
from omni_ws.core.quota import ByteBudget, Share
from omni_ws.errors import PayloadTooLarge
from omni_ws.wire.realtime_events import Item

#: Items that a client may name. The oldest that wait for nothing make room.
MAX_ITEMS: Final = 1024


class ConversationItems:
    """The items in their order, and the history behind them.

    An item of a client is in the history from its creation on, as far as it is text. One that no response has answered
    is *pending*: ``take_pending`` takes it out of the history again, and returns it as the input of a request, which
    brings it back into the history with its answer.
    """

    def __init__(self, ledger: Ledger, budget: ByteBudget, *, max_bytes: int) -> None:
        self._ledger = ledger
        self._items: dict[str, Item] = {}
        #: Those that no response has answered, in order.
        self._pending: dict[str, Item] = {}
        self._share = Share(budget)
        #: The bytes that each is charged with.
        self._charged: dict[str, int] = {}
        self._max_bytes = max_bytes
        #: Items that were taken as the input of a request, until its end.
        self._asked: dict[str, list[tuple[Item, list[InputChunk]]]] = {}

    def get(self, item_id: str) -> Item | None:
        return self._items.get(item_id)

    def add(self, item: Item) -> str | None:
        """Append an item that is in the history already, or will be. Returns the id of the one before it.

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

    def create(self, item: Item) -> str | None:
        """Append an item of the client's. Returns and raises as ``add`` does."""
        previous = self.add(item)
        if item.role == "assistant" or item.kind == "function_call":
            self.seen()
        self._remember(item)
        return previous

    def pending(self) -> list[Item]:
        """The items that no response has answered, in order."""
        return list(self._pending.values())

    def take_pending(self) -> tuple[list[Item], list[InputChunk]]:
        """What is to be answered now, and its input.

        A system message is context, unless nothing else is pending.
        """
        pending = self.pending()
        asked = [item for item in pending if item.role != "system"] or pending[-1:]
        self._ledger.remove(*(item.item_id for item in asked))
        chunks = list(as_input(asked))
        return asked, chunks

    def asked(self, items: Iterable[Item], request_id: str) -> None:
        """These items are the input of this request, to which all others that are pending are context."""
        self._asked[request_id] = [(item, item.chunks) for item in items]
        for item in items:
            item.request_id, item.chunks = request_id, []
            self._pending.pop(item.item_id, None)
        self.seen()

    def seen(self) -> None:
        """A request has what is pending as context: none of it is pending any more."""
        for item in self.pending():
            item.chunks = []
            self._charge(item)
        self._pending.clear()

    def answered(self, request_id: str, *, failed: bool) -> None:
        """A request has ended. Where it failed, its input is pending as before, since the history has it not."""
        for item, chunks in self._asked.pop(request_id, ()):
            if item.item_id not in self._items:
                continue
            if failed:
                item.chunks, item.request_id = chunks, None
                self._remember(item)
            self._charge(item)
        if failed:
            self._find_pending()

    def heard(self, item: Item, transcript: str) -> None:
        """The words of a spoken turn that waits for a response are known."""
        item.request_id = None
        if transcript:
            item.chunks = [InputChunk(Modality.TEXT, transcript.encode())]
            self._remember(item)
        self._charge(item)
        self._find_pending()

    def feed(self) -> Iterator[InputChunk]:
        """The input that pending items with images are: it joins the turn that is being spoken."""
        shown = [item for item in self.pending() if any(one.modality is Modality.IMAGE for one in item.chunks)]
        self._ledger.remove(*(item.item_id for item in shown))
        for item in shown:
            chunks, item.chunks = item.chunks, []
            del self._pending[item.item_id]
            self._charge(item)
            yield from chunks

    def cut(self, item: Item, heard: str) -> None:
        """Of what the assistant said, only this was heard."""
        for part in item.content:
            part["transcript" if "transcript" in part else "text"] = heard
        self._charge(item)

    def have_grown(self, items: Iterable[Item]) -> None:
        """Charge the budget for what has been said since these items were added."""
        for item in items:
            if item.item_id in self._items:
                self._charge(item)

    def delete(self, item: Item) -> None:
        """Drop an item, and what the history has of it."""
        answer = {"assistant"}
        if item.request_id is None:
            self._ledger.remove(item.item_id)
        elif item.role == "assistant" or item.kind == "function_call":
            self._ledger.remove(item.request_id, roles=answer)
        else:
            self._ledger.remove(item.request_id, roles=ALL_ROLES - answer)
        self._forget(item.item_id)

    def close(self) -> None:
        """Release everything."""
        self._items.clear()
        self._pending.clear()
        self._charged.clear()
        self._asked.clear()
        self._share.resize(0)

    def _charge(self, item: Item) -> None:
        """Charge the budget for an item as it is now."""
        size = item.size
        self._share.resize(self._share.size - self._charged.get(item.item_id, 0) + size)
        self._charged[item.item_id] = size

    def _find_pending(self) -> None:
        """An item that is not the last may be pending again."""
        self._pending = {item_id: item for item_id, item in self._items.items() if item.chunks}

    def _forget(self, item_id: str) -> None:
        del self._items[item_id]
        self._pending.pop(item_id, None)
        self._share.resize(self._share.size - self._charged.pop(item_id))

    def _remember(self, item: Item) -> None:
        self._ledger.place(messages_of([item]), item_id=item.item_id)
        self._ledger.weigh()


def as_new(item: Item) -> Item:
    """The item as if it were created again: with input, where it is a message of the user or the system."""
    if item.chunks or item.role not in ("user", "system") or not item.message_text:
        return item
    return replace(item, chunks=[InputChunk(Modality.TEXT, item.message_text.encode())])


def as_input(items: Iterable[Item]) -> Iterator[InputChunk]:
    """The input that these items are, one behind the other."""
    for index, item in enumerate(items):
        if index and item.chunks[0].modality is Modality.TEXT and item.chunks[0].tool_call_id is None:
            yield InputChunk(Modality.TEXT, b"\n")
        yield from item.chunks


def messages_of(items: Iterable[Item]) -> Iterator[Message]:
    """The messages that these items are in a history."""
    for item in items:
        match item.kind:
            case "message":
                yield Message(item.role, item.message_text)
            case "function_call":
                yield Message("assistant", "", tool_calls=(ToolCall(item.call_id, item.name, item.text),))
            case "function_call_output":
                yield Message("tool", item.text, tool_call_id=item.call_id)

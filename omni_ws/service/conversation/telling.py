"""What an application gives a conversation to tell: results of tools that work meanwhile, and other news.

A Telling waits for the next pause of both sides: nobody speaks, not even perhaps, no request is open, and nothing
sounds. Then it is a request of its own, which interrupts nothing: the model puts the text into its own words. If that
answer ends before anything of it was heard, as the user interrupts it, the telling leaves the history and waits
again. One telling is told at a time.

A tool with ``async: true`` works while the talk goes on. As its call is made, the model is given WORKING as the
result; the client's result is a Telling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec.structs import replace

from omni_ws.core.chunks import InputChunk, Modality, StartTrigger, ToolCall
from omni_ws.core.history import Message
from omni_ws.core.quota import Share, keep_newest
from omni_ws.errors import EngineOverloaded
from omni_ws.service.conversation.request import Request, RequestState
from omni_ws.service.conversation.tool_results import MAX_CALLS, ToolResults
from omni_ws.service.failure import new_id
from omni_ws.wire.session_config import SessionConfig

if TYPE_CHECKING:
    from omni_ws.service.conversation.conversation import Conversation

#: Tellings that may wait in a session, and the bytes of all their texts.
MAX_TELLINGS: Final = 64
MAX_TELLING_BYTES: Final = 1 << 20
#: The pause after which something is told, in seconds from the last sound of either side.
PAUSE_SEC: Final = 0.3
#: How often a telling is tried if its requests fail, and the seconds between two tries.
MAX_TRIES: Final = 3
RETRY_SEC: Final = 5.0
#: The memory that a telling takes besides its text.
_TELLING_BYTES: Final = 512
#: The characters of a call's arguments by which the model recognises the call.
_TITLE_CHARACTERS: Final = 200

#: The result that the model sees of a call to an async tool until the client's result is told.
WORKING: Final = (
    "Still working. The result is not known yet and will come later by itself. "
    "Do not guess it, and do not call the tool again for it. Meanwhile answer whatever the user asks."
)
#: What precedes a fact that the model is to know.
FACT: Final = (
    "[This is not from the user, who does not see it. Know it, and do not speak of it unless it is asked for.]\n"
)
_NEWS: Final = (
    "[This is not from the user, who does not see it. Tell the user the following now, once, in your own words and in "
    "the language of the talk. If it is an instruction, follow it, and do not read it out.]\n"
)
_RESULT: Final = (
    "[This is not from the user, who does not see it. There is news of the work that was begun earlier with {title}. "
    "Tell the user now, once, briefly, in your own words and in the language of the talk. If the talk has moved on "
    "since, say in a few words what it is about. Do not say again that you are looking or that it takes a moment, and "
    "do not begin the same work again.]\n"
)


def _unheeded(*_: str) -> None:
    """Do nothing, as nobody wants to know what becomes of a telling."""


@dataclass(slots=True, eq=False)
class Telling:
    """Something that the assistant is to tell: a fact or an instruction to put into its own words.

    ``about`` is the id of the tool call whose result it is; None for other news. ``entered`` is called when the text
    has entered the model's context, ``told`` with the id of the request once some of the answer was heard, ``dropped``
    if it will not be told, as the call was withdrawn.
    """

    text: str
    about: str | None = None
    entered: Callable[[], None] = _unheeded
    told: Callable[[str], None] = _unheeded
    dropped: Callable[[], None] = _unheeded
    #: The client's name for the request that tells it.
    ref: str | None = None
    #: The requests for it that have failed.
    tries: int = 0
    #: Whether a client has cancelled it: then it waits until the user has said something else.
    stopped: bool = False

    @property
    def size(self) -> int:
        """The bytes that are charged for it."""
        return len(self.text.encode()) + _TELLING_BYTES

    def stop(self, stopped: bool) -> None:
        """Note that a client has cancelled it, or that the user has said something else since."""
        self.stopped = stopped

    def fail(self) -> bool:
        """Note that a request for it has failed. Return whether it is tried again."""
        self.tries += 1
        return self.tries < MAX_TRIES


class SavedTelling(msgspec.Struct, frozen=True):
    """A Telling in a form that can be written to bytes: nobody is called for it any more."""

    text: str
    about: str | None
    tries: int
    stopped: bool
    ref: str | None = None

    @classmethod
    def of(cls, telling: Telling) -> SavedTelling:
        """Return a telling as a value."""
        return cls(telling.text, telling.about, telling.tries, telling.stopped, telling.ref)

    def restored(self) -> Telling:
        """Return the telling again."""
        return Telling(self.text, self.about, ref=self.ref, tries=self.tries, stopped=self.stopped)


class SavedTellings(msgspec.Struct, kw_only=True):
    """Tellings in a form that can be written to bytes.

    ``current`` is the one being told, by the request ``request_id``; ``calls`` are from ``ToolResults.async_calls``.
    """

    waiting: list[SavedTelling] = []
    current: SavedTelling | None = None
    request_id: str | None = None
    due: float | None = None
    not_before: float = 0.0
    titles: dict[str, str] = {}
    calls: tuple[list[str], list[str], list[str]] = msgspec.field(default_factory=lambda: ([], [], []))


class Tellings:
    """The tellings of one conversation, in the order in which they came."""

    def __init__(self, conversation: Conversation, results: ToolResults) -> None:
        self._conversation = conversation
        self._results = results
        results.watch(self._is_async, self._result)
        self._share = Share(conversation.account)
        self._waiting: list[Telling] = []
        #: The telling that a request tells, and the id of that request.
        self._current: Telling | None = None
        self._request_id: str | None = None
        #: Whether the model has the text of the current one.
        self._entered = False
        #: When the pause is long enough; None while anybody speaks, or an answer is due.
        self._due: float | None = None
        self._not_before = 0.0
        #: What the model called, by call id.
        self._titles: dict[str, str] = {}

    def put(self, telling: Telling) -> None:
        """Queue a telling. One about a call whose request was cancelled is dropped.

        Raises EngineOverloaded if too much waits.
        """
        if telling.about is not None and self._results.withdrew(telling.about):
            telling.dropped()
            return
        size = self._share.size + telling.size
        if len(self._waiting) >= MAX_TELLINGS or size > MAX_TELLING_BYTES:
            raise EngineOverloaded("too much waits to be told in this session", retry_after_ms=1000)
        self._share.resize(size)
        self._waiting.append(telling)

    def know(self, text: str, role: str = "user") -> None:
        """Put a message into the history that no request has."""
        self._conversation.ledger.place([Message(role, text)], item_id=new_id("item_"))
        self._conversation.ledger.weigh()

    def close(self) -> None:
        """Drop all tellings. Idempotent."""
        self._waiting.clear()
        self._current = None
        self._share.resize(0)

    # async tools

    def _is_async(self, call_id: str) -> bool:
        """Return whether an answer that is being made has called an async tool by this id."""
        return any(call.id == call_id for one in self._conversation.queue.requests for call in async_calls(one))

    def _result(self, call_id: str, text: str, ref: str | None) -> None:
        self._conversation.tell(Telling(text, about=call_id, ref=ref))

    def note_calls(self, request: Request) -> list[ToolCall]:
        """Note that an answer is over. Returns its calls to async tools, which work from now on."""
        found = [one for one in async_calls(request) if one.is_whole and not self._results.withdrew(one.id)]
        for call in found:
            arguments = call.arguments
            shown = arguments if len(arguments) <= _TITLE_CHARACTERS else f"{arguments[:_TITLE_CHARACTERS]}…"
            self._titles[call.id] = f"{call.name}({shown})"
            self._results.work(call.id)
            working = Message("tool", WORKING, tool_call_id=call.id)
            self._conversation.ledger.place([working], item_id=new_id("item_"))
        keep_newest(self._titles, MAX_CALLS)
        return found

    def withdraw(self, calls: Iterable[ToolCall]) -> None:
        """Tell nothing about these calls any more, as their request was cancelled."""
        ids = {call.id for call in calls}
        for dropped in [one for one in self._waiting if one.about in ids]:
            self._waiting.remove(dropped)
            self._release(dropped)
            dropped.dropped()

    # when

    def note_quiet(self, since: float | None, now: float, *, by_user: bool) -> None:
        """Note since when nobody speaks and no answer is due; None if anybody does. ``by_user``: as the user spoke."""
        self._look(now)
        if by_user:
            for one in self._waiting:
                one.stop(False)
        if since is None:
            self._due = None
        elif self._due is None or since > now:  # it is longer ago otherwise
            self._due = since + PAUSE_SEC

    def cancelled(self, request_id: str | None, named: Request | None) -> None:
        """Note a cancel of a client, before it takes effect: a telling that it stops waits for the user's next turn.

        ``named`` is the unfinished request that it means.
        """
        meant = request_id if named is None else named.request_id
        if self._current is not None and meant in (None, self._request_id):
            self._current.stop(True)

    def get_timer(self) -> float | None:
        """Return when ``speak`` may have something to do; None if nothing depends on time."""
        if self._due is None:
            return None
        if self._current is not None:
            return self._due
        return None if self._next() is None else max(self._due, self._not_before)

    def _next(self) -> Telling | None:
        return next((one for one in self._waiting if not one.stopped), None)

    def tells(self, request: Request) -> bool:
        """Return whether a request is a telling."""
        if self._current is not None and self._request_id is None:  # it is just opening, and nothing else is open
            return True
        return request.tells

    def speak(self, now: float) -> bool:
        """Begin with the next telling, if its time has come. Returns whether it has."""
        self._look(now)
        when = self.get_timer()
        if when is None or now < when or self._current is not None:
            return False
        conversation, telling = self._conversation, self._next()
        assert telling is not None
        self._waiting.remove(telling)
        self._current, self._entered = telling, False
        chunk = InputChunk(Modality.TEXT, self._prompt(telling).encode(), ref=telling.ref)
        config = _free_choice(conversation.configuration.effective)
        self._request_id = conversation.respond([chunk], config, trigger=StartTrigger.TELLING)
        self._look(now)  # it may have been refused
        return True

    def _prompt(self, telling: Telling) -> str:
        if telling.about is None:
            return _NEWS + telling.text
        return _RESULT.format(title=self._titles.get(telling.about, "a tool")) + telling.text

    # what becomes of it

    def _look(self, now: float) -> None:
        """Find out whether the current telling has entered the context, was heard, or must wait again."""
        telling, request_id = self._current, self._request_id
        if telling is None or request_id is None:
            return
        conversation = self._conversation
        request, entry = conversation.queue.find(request_id), conversation.ledger.find(request_id)
        if not self._entered and (request is None or request.state not in (RequestState.OPEN, RequestState.WAITING)):
            self._entered = entry is not None and entry.input_kept
            if self._entered:
                telling.entered()
        if entry is not None and conversation.ledger.has_heard(entry, now):
            self._over(telling)
            telling.told(request_id)
        elif request is not None:
            return
        elif entry is None or not entry.input_kept:
            self._failed(telling, now)
        elif entry.cancelled or entry.cut_ms is not None:
            conversation.ledger.remove(request_id)
            self._wait_again(telling)
        elif not entry.sent_ms or not conversation.ledger.playing(now):
            self._over(telling)  # the model had nothing to say

    def _over(self, telling: Telling) -> None:
        self._current = self._request_id = None
        self._release(telling)

    def _wait_again(self, telling: Telling) -> None:
        self._current = self._request_id = None
        self._waiting.insert(0, telling)

    def _failed(self, telling: Telling, now: float) -> None:
        """Try a telling whose request has failed later again; in the end only let the model know it."""
        if telling.fail():
            self._not_before = now + RETRY_SEC
            self._wait_again(telling)
            return
        self.know(self._prompt(telling))
        if not self._entered:
            telling.entered()
        self._over(telling)

    def _release(self, telling: Telling) -> None:
        self._share.resize(max(0, self._share.size - telling.size))

    # saved

    def saved(self) -> SavedTellings:
        """Return all tellings as a value."""
        return SavedTellings(
            waiting=list(map(SavedTelling.of, self._waiting)),
            current=None if self._current is None else SavedTelling.of(self._current),
            request_id=self._request_id,
            due=self._due,
            not_before=self._not_before,
            titles=self._titles,
            calls=self._results.async_calls(),
        )

    def restore(self, saved: SavedTellings, *, later: float) -> None:
        """Continue from what ``saved`` returned. The requests of the queue must be restored before.

        ``later`` is how many seconds the clock shows more than that of the other.
        """
        self._due = None if saved.due is None else saved.due + later
        self._not_before = saved.not_before + later
        self._waiting = [one.restored() for one in saved.waiting]
        self._current = None if saved.current is None else saved.current.restored()
        self._request_id, self._titles = saved.request_id, saved.titles
        self._results.go_on(*saved.calls)
        held = [*self._waiting, *(() if self._current is None else (self._current,))]
        self._share.force(sum(one.size for one in held))


def async_calls(request: Request) -> list[ToolCall]:
    """Return the calls of a request's answer to tools with ``async: true``."""
    if not request.tool_calls:
        return []
    names = {tool["function"]["name"] for tool in request.config.tools if tool.get("async")}
    return [call for call in request.tool_calls if call.name in names]


def _free_choice(config: SessionConfig) -> SessionConfig:
    """Return the configuration with which something is told: no call is forced."""
    free = config.tool_choice in (None, "none", "auto")
    return config if free else replace(config, tool_choice="auto")

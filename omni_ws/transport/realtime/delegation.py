"""Delegation of a Live session: who does the work that its voice hands over.

With delegation to ``client`` it is the application, with delegation to ``responses`` a second chat of the session.

That chat has instructions, tools and a history of its own. Each piece of work is a response in it, whose events the
client gets inside of ``response.event``; the client runs the functions that the chat calls, and the talk goes on
meanwhile. The text of a response without calls is the result: the voice tells it at the next pause (``telling``).

The client's items wait in a buffer for ``response.create``. That goes on with every response whose calls all have
their outputs: two pieces of work at once do not wait for each other. Messages begin a response of no delegation.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec
import orjson
from msgspec import structs

from omni_ws.core.chunks import FinalChunk, FinishReason, InputChunk, Modality, ToolCall, Usage
from omni_ws.core.quota import Share, keep_newest
from omni_ws.engine.base import AnswerOptions
from omni_ws.errors import EngineOverloaded, InvalidRequest, InvalidValue, OmniError, UnsupportedParameter
from omni_ws.service.conversation.messages import ServerMessage
from omni_ws.service.conversation.telling import Telling
from omni_ws.service.failure import new_id
from omni_ws.service.sessions.factory import Chat
from omni_ws.transport.realtime.items import Event, as_input
from omni_ws.wire.live_session import ClientDelegation, Delegation, ResponsesConfig, ResponsesDelegation, immutable
from omni_ws.wire.openai_fields import check_tools, object_field
from omni_ws.wire.realtime_events import Item, RealtimeRefusal, read_item
from omni_ws.wire.realtime_session import tool_choice, tools

if TYPE_CHECKING:
    from omni_ws.transport.realtime.live import LiveDialect


#: The function by which the model hands work over. The session does not wait for its result.
DELEGATE: Final = "delegate"
DELEGATE_TOOL: Final[Mapping[str, Any]] = {
    "type": "function",
    "async": True,
    "function": {
        "name": DELEGATE,
        "description": "Hands over what needs data, tools or work outside of this talk. Its result comes later.",
        "parameters": {
            "type": "object",
            "properties": {"task": {"type": "string", "description": "What is to be done, in one sentence."}},
            "required": ["task"],
        },
    },
}
#: What the model is told of it, behind the client's instructions.
DELEGATE_RULE: Final = (
    "When the user wants something that you cannot know or do in this talk, say in a few words that you look into it, "
    "and call delegate once for it. Its result is told to you later; until then go on talking, and never make it up. "
    "Do not call it for what you can answer, nor a second time for the same thing."
)
#: Delegations of a session that are remembered; to append to an earlier one is an error.
MAX_DELEGATIONS: Final = 256


class Delegations(ABC):
    """What a kind of delegation does. Methods raise an InvalidRequest for what is refused."""

    def __init__(self, dialect: LiveDialect, settings: Delegation) -> None:
        self._dialect = dialect
        #: The settings in effect, as the client sees them.
        self.shown = settings

    @abstractmethod
    def opened(self, call_id: str, arguments: str) -> None:
        """Begin the work of a call that the model has made: it has handed work over."""

    @abstractmethod
    def receive(self, event: Mapping[str, Any]) -> None:
        """Handle a ``response.create`` or a ``response.item.create`` of the client."""

    @abstractmethod
    def update(self, given: Delegation) -> None:
        """Apply the ``delegation`` of a ``session.update``, which is of this kind: what it leaves out stays."""

    def check(self, delegation_id: str) -> None:
        """Raise an InvalidRequest unless the client may append context to this delegation."""
        raise InvalidValue("Unknown client delegation.", param="delegation_id")

    @abstractmethod
    def close(self) -> None:
        """End all work, with the session. May be called repeatedly."""


def delegation_created(call_id: str, target: str, offset_ms: int, **fields: Any) -> Event:
    """Return the event that tells that work was handed over. It has no text of the task, as at OpenAI."""
    delegation = {"id": call_id, "type": "delegation", "target": target, **fields}
    return {"type": "session.delegation.created", "offset_ms": offset_ms, "delegation": delegation}


class ClientDelegations(Delegations):
    """The application does the work, and tells about it by appended context."""

    def __init__(self, dialect: LiveDialect, settings: ClientDelegation) -> None:
        super().__init__(dialect, settings)
        self._open: dict[str, None] = {}

    def opened(self, call_id: str, arguments: str) -> None:
        self._open[call_id] = None
        keep_newest(self._open, MAX_DELEGATIONS)
        self._dialect.send([delegation_created(call_id, "client", self._dialect.now_ms)])

    def receive(self, event: Mapping[str, Any]) -> None:
        raise UnsupportedParameter(f"{event['type']} needs delegation to responses", param="type")

    def update(self, given: Delegation) -> None:
        if not isinstance(given, ClientDelegation):
            raise immutable("session.delegation.type")
        if given.acknowledgement_delay_ms is not None:
            self.shown = given

    def check(self, delegation_id: str) -> None:
        if delegation_id not in self._open:
            super().check(delegation_id)

    def close(self) -> None:
        self._open.clear()


#: The input of the chat that may wait for ``response.create``: items, and the bytes of their JSON.
MAX_BUFFERED_ITEMS: Final = 128
MAX_BUFFERED_BYTES: Final = 32 << 10
#: Responses whose calls may wait for outputs; beyond that the oldest is given up.
MAX_WAITING: Final = 64
#: The characters of the talk that the chat is shown with a piece of work, and of a result that are told.
TALK_CHARACTERS: Final = 4000
RESULT_CHARACTERS: Final = 16_000
#: The place of the settings, for errors.
_PLACE: Final = "session.delegation.responses"
#: What the chat is told if the client gives no instructions.
INSTRUCTIONS: Final = (
    "You do the work that the assistant of a spoken talk hands over to you. Use your tools for it, and make nothing "
    "up. Answer with the result alone, briefly and in plain words: it is told by voice."
)
#: What is told of work without a result.
FAILED: Final = "The work could not be completed."
NOTHING: Final = "The work has ended without a result."


@dataclass(slots=True)
class _Response:
    """One response of the chat. ``delegation_id`` is None if the client began it."""

    response_id: str
    delegation_id: str | None
    model: str
    parallel: bool
    created_at: int = field(default_factory=lambda: int(time.time()))
    #: The calls that wait for their outputs, by id, and the outputs that the client has sent.
    calls: dict[str, Item | None] = field(default_factory=dict)
    _events: int = 0

    def wait_for(self, call_ids: Iterable[str]) -> None:
        """Note the calls that it has ended with."""
        self.calls = dict.fromkeys(call_ids)

    @property
    def ready(self) -> bool:
        """Whether all its calls have their outputs."""
        return None not in self.calls.values()

    def event(self, kind: str, **fields: Any) -> Event:
        """Return an event of the Responses API, inside of one of the Live API."""
        nested = {"type": kind, "sequence_number": self._events, **fields}
        self._events += 1
        return {"type": "response.event", "event": nested, "delegation_id": self.delegation_id}

    def lifecycle(self, status: str, *, usage: Usage | None = None, error: OmniError | None = None) -> Event:
        """Return the event that tells its status, with a snapshot that leaves out what other events have told."""
        snapshot = {
            "id": self.response_id,
            "object": "response",
            "created_at": self.created_at,
            "status": status,
            "model": self.model,
            "instructions": None,
            "output": [],
            "tools": [],
            "tool_choice": "auto",
            "parallel_tool_calls": self.parallel,
            "metadata": {},
            "error": None if error is None else {"code": "server_error", "message": error.message},
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "usage": None if usage is None else _usage(usage),
        }
        return self.event("response.created" if status == "in_progress" else f"response.{status}", response=snapshot)


class ResponsesDelegations(Delegations):
    """A second chat does the work, and all results come from it. Raises an InvalidRequest for wrong settings.

    The chat opens with the first work, and opens again if its engine has failed for good.
    """

    def __init__(self, dialect: LiveDialect, settings: ResponsesDelegation) -> None:
        super().__init__(dialect, settings)
        self._settings = settings.responses or ResponsesConfig()
        self._check(self._settings)
        self._chat: Chat | None = None
        self._share = Share(dialect.conversation.account)
        #: The responses that are being made, by the ids of the chat's requests; and those that wait for outputs.
        self._running: dict[str, _Response] = {}
        self._waiting: dict[str, _Response] = {}
        self._errors: dict[str, OmniError] = {}
        #: The messages that wait for ``response.create``; outputs wait in their responses. Their number and size.
        self._messages: list[Item] = []
        self._buffered = 0

    # the settings

    def _check(self, settings: ResponsesConfig) -> dict[str, Any]:
        """Return the settings as fields of ``session_config``. Raises an InvalidRequest that names the field."""
        chosen = tool_choice(settings.tool_choice)
        try:
            given = tools(settings.tools)
            check_tools(given, chosen)
            self._dialect.factory.any_model.check(settings.model)
        except InvalidRequest as error:
            raise error.about(param=f"{_PLACE}.{error.param or 'model'}") from None
        return {
            "instructions": settings.instructions or INSTRUCTIONS,
            "tools": given,
            "tool_choice": chosen,
            "sampling": {"max_tokens": settings.max_output_tokens},
        }

    def _configure(self, chat: Chat) -> None:
        able, settings = chat.conversation.engine.capabilities, self._settings
        fields = self._check(settings)
        if "max_tokens" not in able.sampling:
            del fields["sampling"]
        chat.configure(**fields)
        wanted = {
            "reasoning_effort": (settings.reasoning or {}).get("effort"),
            "verbosity": (settings.text or {}).get("verbosity"),
            "service_tier": settings.service_tier,
        }
        upstream = {name: value for name, value in wanted.items() if name in able.upstream and isinstance(value, str)}
        parallel = settings.parallel_tool_calls is not False
        chat.conversation.answer_with(AnswerOptions(parallel_tool_calls=parallel, upstream=upstream))

    def update(self, given: Delegation) -> None:
        if not isinstance(given, ResponsesDelegation):
            raise immutable("session.delegation.type")
        changes = {} if given.responses is None else _set_fields(given.responses)
        settings = structs.replace(self._settings, **changes)
        self._check(settings)
        before, self._settings = self._settings, settings
        if self._chat is not None and not self._chat.has_ended:
            try:
                self._configure(self._chat)
            except OmniError as error:
                self._settings = before
                raise _as_refusal(error) from None
        shown = structs.replace(self.shown, **_set_fields(given))
        self.shown = structs.replace(shown, responses=settings)

    # work

    def opened(self, call_id: str, arguments: str) -> None:
        response_id = new_id("resp_")
        created = delegation_created(call_id, "responses", self._dialect.now_ms, response_id=response_id)
        self._dialect.send([created])
        text = f"{self._talk()}The task: {_task(arguments)}"
        self._ask([InputChunk(Modality.TEXT, text.encode())], call_id, response_id)

    def _talk(self) -> str:
        """Return the end of the talk, for the chat to understand the task by."""
        lines: list[str] = []
        size = 0
        for message in reversed(self._dialect.conversation.ledger.history.messages()):
            if message.role in ("user", "assistant") and message.text.strip():
                lines.append(f"{message.role.capitalize()}: {message.text.strip()}")
                size += len(lines[-1])
            if size > TALK_CHARACTERS:
                break
        talk = "\n".join(reversed(lines))[-TALK_CHARACTERS:]
        return f"The talk so far:\n{talk}\n\n" if talk else ""

    def _ask(self, chunks: Iterable[InputChunk], delegation_id: str | None, response_id: str | None = None) -> None:
        """Begin a response of the chat to this input."""
        parallel = self._settings.parallel_tool_calls is not False
        response = _Response(response_id or new_id("resp_"), delegation_id, self._settings.model or "", parallel)
        self._dialect.send([response.lifecycle("in_progress")])
        try:
            chat = self._open_chat()
            request_id = chat.conversation.respond([*chunks], chat.conversation.configuration.effective)
        except OmniError as error:
            self._fail(response, error)
            return
        self._running[request_id] = response  # if it was refused, its final is on its way

    def _open_chat(self) -> Chat:
        if self._chat is None or self._chat.has_ended:
            chat = self._dialect.factory.chats.open(self._dialect.conversation, self._received)
            try:
                self._configure(chat)
            except BaseException:
                chat.close()
                raise
            self._chat = chat
            self._waiting.clear()
        return self._chat

    def close(self) -> None:
        if self._chat is not None:
            self._chat.close()
        self._running.clear()
        self._waiting.clear()
        self._messages.clear()
        self._share.resize(0)

    # events of the client

    def receive(self, event: Mapping[str, Any]) -> None:
        if event["type"] == "response.item.create":
            self._buffer(object_field(event, "item"))
        else:
            self._create()

    def _buffer(self, fields: Mapping[str, Any]) -> None:
        size = self._share.size + len(orjson.dumps(fields))
        if self._buffered >= MAX_BUFFERED_ITEMS or size > MAX_BUFFERED_BYTES:
            raise _buffer_full()
        if isinstance(fields.get("content"), str):  # the short form of the Responses API
            fields = {**fields, "content": [{"type": "input_text", "text": fields["content"]}]}
        item = read_item({"type": "message", **fields}, new_id("item_"))
        if item.kind == "function_call_output":
            response = next((one for one in self._waiting.values() if item.call_id in one.calls), None)
            if response is None or response.calls[item.call_id] is not None:
                raise InvalidValue("no call of this id waits for an output", param="item.call_id")
            self._hold(size)
            response.calls[item.call_id] = item
        elif not item.chunks or any(chunk.modality is not Modality.TEXT for chunk in item.chunks):
            raise UnsupportedParameter("only texts of the user, and outputs of functions, are taken here", param="item")
        else:
            self._hold(size)
            self._messages.append(item)

    def _hold(self, size: int) -> None:
        try:
            self._share.resize(size)
        except EngineOverloaded:  # which would end the session
            raise _buffer_full() from None
        self._buffered += 1

    def _create(self) -> None:
        ready = [one for one in self._waiting.values() if one.ready]
        if not ready and self._waiting:
            message = "every call needs its output before the response can go on"
            raise RealtimeRefusal("function_call_outputs_required", message)
        if not ready and not self._messages:
            raise InvalidValue("there is nothing to respond to", param="type")
        messages, self._messages = self._messages, []
        kept = (item for one in self._waiting.values() if not one.ready for item in one.calls.values() if item)
        left = [len(item.text) for item in kept]
        self._buffered = len(left)
        self._share.resize(min(self._share.size, sum(left)))
        for one in ready:
            del self._waiting[one.response_id]
            self._ask(as_input(item for item in one.calls.values() if item is not None), one.delegation_id)
        if messages:
            self._ask(as_input(messages), None)

    # messages of the chat

    def _received(self, message: ServerMessage) -> None:
        match message:
            case OmniError(request_id=str(request_id)):
                self._errors[request_id] = message
            case FinalChunk(request_id=request_id) if request_id in self._running:
                error = self._errors.pop(request_id, None)
                self._finish(self._running.pop(request_id), message, error)
            case _:
                pass  # the ledger of the chat has what its answers say

    def _finish(self, response: _Response, final: FinalChunk, error: OmniError | None) -> None:
        assert self._chat is not None
        entry = self._chat.conversation.ledger.find(final.request_id)
        if error is not None or entry is None or final.finish_reason in (FinishReason.ERROR, FinishReason.CANCELLED):
            self._fail(response, error)
            return
        text, calls = entry.answer_text, [call for call in entry.tool_calls if call.is_whole]
        items = [*([_message(text)] if text.strip() else []), *map(_function_call, calls)]
        for index, item in enumerate(items):
            self._dialect.send([response.event("response.output_item.done", output_index=index, item=item)])
        status = "incomplete" if final.finish_reason is FinishReason.LENGTH else "completed"
        self._dialect.send([response.lifecycle(status, usage=final.usage)])
        if not calls:
            self._tell(text.strip() or NOTHING, response)
            return
        response.wait_for(call.id for call in calls)
        self._waiting[response.response_id] = response
        keep_newest(self._waiting, MAX_WAITING)

    def _fail(self, response: _Response, error: OmniError | None) -> None:
        failure = error or EngineOverloaded("the work was given up")
        self._dialect.send([response.lifecycle("failed", error=failure)])
        self._tell(FAILED, response)

    def _tell(self, text: str, response: _Response) -> None:
        if self._dialect.closed:
            return
        try:
            self._dialect.conversation.tell(Telling(text[:RESULT_CHARACTERS], about=response.delegation_id))
        except EngineOverloaded as error:
            self._dialect.send([self._dialect.error(error)])


def _buffer_full() -> RealtimeRefusal:
    message = f"at most {MAX_BUFFERED_ITEMS} items and {MAX_BUFFERED_BYTES} bytes may wait for response.create"
    return RealtimeRefusal("response_input_buffer_full", message, param="item")


def _task(arguments: str) -> str:
    """Return the task in the arguments of a call; the arguments themselves if they have none."""
    try:
        found = msgspec.json.decode(arguments, type=dict[str, Any]).get("task")
    except (msgspec.DecodeError, RecursionError):
        return arguments
    return found if isinstance(found, str) and found.strip() else arguments


def _set_fields(given: msgspec.Struct) -> dict[str, Any]:
    """Return the fields of an update that are set."""
    return {name: value for name, value in structs.asdict(given).items() if value is not None}


def _as_refusal(error: OmniError) -> OmniError:
    """Return an error of the chat as one of the event, which does not end the session."""
    return error if isinstance(error, InvalidRequest) else InvalidValue(error.message, param=_PLACE)


def _message(text: str) -> dict[str, Any]:
    content = {"type": "output_text", "text": text, "annotations": []}
    return {"id": new_id("msg_"), "type": "message", "role": "assistant", "status": "completed", "content": [content]}


def _function_call(call: ToolCall) -> dict[str, Any]:
    return {
        "id": new_id("fc_"),
        "type": "function_call",
        "status": "completed",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
    }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.input_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens or 0, "cache_write_tokens": 0},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.input_tokens + usage.output_tokens,
    }

"""Parts of a Realtime session besides its conversation: effects of its fields, images named by URL, and MCP calls."""

from __future__ import annotations

import asyncio
import base64
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from omni_ws.config.model import HttpConfig
from omni_ws.core.chunks import InputChunk, Modality, OutputModality
from omni_ws.core.file_heads import sniff_image
from omni_ws.core.history import STRIDE
from omni_ws.core.json_values import primary_subtag
from omni_ws.core.ledger import Ledger
from omni_ws.core.quota import ByteBudget, Share, keep_newest, memory_of
from omni_ws.engine.base import AnswerOptions
from omni_ws.engine.threads import Work, run_work
from omni_ws.errors import InvalidRequest, InvalidValue, OmniError
from omni_ws.service import new_id, unexpected
from omni_ws.service.conversation.conversation import Conversation
from omni_ws.service.conversation.tool_results import result_chunk
from omni_ws.service.mcp import (
    CallKeeper,
    McpCall,
    ToolServer,
    ToolServers,
)
from omni_ws.service.sessions.factory import SessionFactory
from omni_ws.transport.http.media_fetch import MediaReader
from omni_ws.transport.realtime.items import ConversationItems, Event, RealtimeResponse
from omni_ws.wire.openai_fields import MediaUrl
from omni_ws.wire.realtime_events import (
    Id,
    Item,
    RealtimeRefusal,
    error_event,
    item_event,
    items_in,
    read,
    verdict_of,
    with_fields,
)
from omni_ws.wire.realtime_session import (
    WITHOUT_TURNS,
    CommonFields,
    RealtimeAbilities,
    RetentionRatio,
    SessionFields,
    current_names,
)
from omni_ws.wire.session_config import (
    is_mcp,
    without_credentials,
)

#: The path of each field of ``session_config`` in OpenAI's session object, for errors.
_FIELDS: Final = {
    "voice": "audio.output.voice",
    "speed": "audio.output.speed",
    "modalities": "output_modalities",
    "sampling.max_tokens": "max_output_tokens",
    "sampling.temperature": "temperature",
    "input_audio.sample_rate": "audio.input.format.rate",
    "input_audio.prompt": "audio.input.transcription.prompt",
    "input_audio.keywords": "audio.input.transcription.keywords",
    "input_audio.languages": "audio.input.transcription.languages",
    "input_audio.echo": "audio.input.echo",
    "input_audio.noise_reduction": "audio.input.noise_reduction.type",
    "output_audio.sample_rate": "audio.output.format.rate",
    "idle_prompt": "audio.input.turn_detection.idle_timeout_ms",
    "output_audio.format": "audio.output.format.type",
    "task": "audio.input.turn_detection.create_response",
    **{
        f"turn_detection.{name}": f"audio.input.turn_detection.{name}"
        for name in (
            "threshold",
            "prefix_padding_ms",
            "silence_duration_ms",
            "interrupt_response",
            "eagerness",
            "duck",
            "backchannel",
        )
    },
}


@contextmanager
def naming(place: str) -> Iterator[None]:
    """Inside the block, let errors name fields as OpenAI does, below ``place``: "session" or "response"."""
    try:
        yield
    except InvalidRequest as error:
        if error.param is not None and not error.param.startswith(f"{place}."):
            name, bracket, rest = error.param.partition("[")
            error.about(param=f"{place}.{_FIELDS.get(name, name)}{bracket}{rest}")
        raise


#: The most warnings for one event. A client that leaves out these fields is warned of the others.
MAX_WARNINGS: Final = 32
#: Fields that every event has, and objects whose fields have names of their own in warnings.
_NAMED_APART: Final = ("type", "event_id", "session", "response", "item")
#: The fields of a session and of a response that a transport decides with fields of ``session_config``.
_OF_MEDIA: Final = {"input_audio": "audio.input.format", "output_audio": "audio.output.format"}


def abilities_of(factory: SessionFactory) -> RealtimeAbilities:
    """Return what the engine of this server can do in a Realtime session."""
    able = factory.engine.capabilities
    hears = Modality.AUDIO in able.input_modalities
    sampling = able.sampling | able.sampling_no_ops
    return RealtimeAbilities(
        audio_output=OutputModality.AUDIO in able.output_modalities,
        text_output=OutputModality.TEXT in able.output_modalities,
        turn_detection_types=tuple(factory.speech_workers.turn_detection_types) if hears else (),
        languages=frozenset(able.languages),
        keywords=able.keywords,
        cleans_audio=factory.speech_workers.cleans_audio,
        temperature="temperature" in sampling,
        max_tokens="max_tokens" in sampling,
    )


class Effects:
    """Applies those fields of a session that ``session_config`` lacks, and warns of fields without effect."""

    def __init__(self, conversation: Conversation, media: Collection[str]) -> None:
        """``media`` names the fields of ``session_config`` that the transport decides, such as "input_audio"."""
        self._conversation = conversation
        self._decided = [path for name, path in _OF_MEDIA.items() if name in media]
        self._max_tokens = conversation.limits.max_history_tokens
        self._session = SessionFields()

    def apply(self, session: SessionFields) -> None:
        """Apply the fields of ``session`` to the history, and to all answers from now on."""
        self._session = session
        self._conversation.answer_with(self._options(session))
        wanted, tokens, stride = session.truncation, self._max_tokens, STRIDE
        if isinstance(wanted, RetentionRatio):
            limit = None if wanted.token_limits is None else wanted.token_limits.post_instructions
            tokens, stride = min(tokens, limit or tokens), 1 - wanted.retention_ratio
        elif wanted == "disabled":
            stride = 0
        self._conversation.ledger.history.keep_within(tokens, stride=stride)

    @contextmanager
    def answering(self, response: CommonFields) -> Iterator[None]:
        """Inside the block, give new requests the options of ``response``; an option that it lacks is the session's."""
        conversation = self._conversation
        before = conversation.options
        conversation.answer_with(self._options(response, self._session))
        try:
            yield
        finally:
            conversation.answer_with(before)

    def _options(self, *wanted: CommonFields) -> AnswerOptions:
        """Return the options for answers: each from the first of ``wanted`` that sets it, if the engine supports it."""
        able = self._conversation.engine.capabilities
        parallel = next((one.parallel_tool_calls for one in wanted if one.parallel_tool_calls is not None), True)
        efforts = (one.reasoning.effort for one in wanted if one.reasoning is not None)
        effort = next(filter(None, efforts), None)
        upstream = {} if effort is None or "reasoning_effort" not in able.upstream else {"reasoning_effort": effort}
        return replace(self._conversation.options, parallel_tool_calls=parallel, upstream=upstream)

    @property
    def overflow(self) -> RealtimeRefusal | None:
        """The error for a new response if the history was cut although truncation is disabled; else None."""
        history = self._conversation.ledger.history
        if self._session.truncation != "disabled" or not history.is_cut:
            return None
        return RealtimeRefusal(
            "context_length_exceeded",
            f"the conversation exceeds {history.max_tokens} tokens, and session.truncation is disabled",
            param="session.truncation",
        )

    # warnings

    def warnings(self, event: Mapping[str, Any], session: SessionFields) -> dict[str, list[Event]]:
        """Return the field ``warnings`` for the server's answer to ``event``; an empty dict if there are no warnings.

        The warnings name the fields of ``event`` that have no effect in a session with the fields ``session``, with the
        reason, and the fields that the API does not have.
        """
        found = islice(self._found(event, session), MAX_WARNINGS)
        warnings = [{"code": code, "message": message, "param": param} for code, message, param in found]
        return {"warnings": warnings} if warnings else {}

    def session_warnings(self, session: SessionFields) -> dict[str, list[Event]]:
        """Return the field ``warnings`` for the fields with which a session begins."""
        return self.warnings({"type": "session.update", "session": msgspec.to_builtins(session)}, session)

    def _found(self, event: Mapping[str, Any], session: SessionFields) -> Iterator[tuple[str, str, str]]:
        own = {name: value for name, value in event.items() if name not in _NAMED_APART}
        kind = event["type"].removeprefix("transcription_")
        yield from _walk(own, f"client.{kind}", "", frozenset())
        for place in ("session", "response"):
            if isinstance(sent := event.get(place), Mapping):
                given = current_names(sent)
                yield from _walk(given, place, place, self._lacking(given, place))
        for path, item in items_in(event):
            if isinstance(item, Mapping):
                yield from _walk(item, f"item.{item.get('type')}", path, _lacking_of_item(item), without=("type",))

    def _lacking(self, given: Mapping[str, Any], place: str) -> frozenset[str]:
        """Return the paths of fields that have no effect with this engine and these settings, whether given or not."""
        conversation = self._conversation
        able, config = conversation.engine.capabilities, conversation.configuration.effective
        audio = _inner(given, "audio")
        heard, spoken = _inner(audio, "input"), _inner(audio, "output")
        detection, transcription = _inner(heard, "turn_detection"), _inner(heard, "transcription")
        language, voice = transcription.get("language"), spoken.get("voice")
        voice = voice.get("id") if isinstance(voice, Mapping) else voice
        limit = _inner(_inner(given, "truncation"), "token_limits").get("post_instructions")
        found = {
            "model": given.get("model") != config.model,
            "parallel_tool_calls": not able.tools,
            "reasoning.effort": "reasoning_effort" not in able.upstream,
            "max_output_tokens": "max_tokens" not in able.sampling | able.sampling_no_ops,
            "temperature": "temperature" not in able.sampling | able.sampling_no_ops,
            "output_modalities": given.get("output_modalities") == ["audio"]
            and OutputModality.AUDIO not in able.output_modalities,
            "audio.input.noise_reduction": config.input_audio.noise_reduction is msgspec.UNSET,
            "audio.input.transcription.language": config.input_audio.language != language,
            "audio.input.transcription.prompt": not able.keywords,
            "audio.input.transcription.keywords": not able.keywords,
            "audio.input.transcription.languages": not able.languages.issuperset(
                map(primary_subtag, transcription.get("languages") or ())
            ),
            "audio.input.transcription.model": not str(transcription.get("model")).startswith(WITHOUT_TURNS),
            "audio.input.turn_detection": config.turn_detection is None,
            "audio.input.turn_detection.type": config.turn_detection is not None
            and config.turn_detection.type != detection.get("type"),
            "audio.input.turn_detection.eagerness": detection.get("type") != "semantic_vad",
            "audio.input.turn_detection.backchannel": detection.get("backchannel") is True
            and (config.turn_detection is None or not config.turn_detection.backchannel),
            "audio.output.voice": place == "session" and voice != config.voice,
            "audio.output.speed": spoken.get("speed") != config.speed,
            "truncation.token_limits.post_instructions": isinstance(limit, int) and limit > self._max_tokens,
        }
        names = {name for name, is_lacking in found.items() if is_lacking} | set(self._decided)
        return frozenset(f"{place}.{name}" for name in names)


def _lacking_of_item(item: Mapping[str, Any]) -> frozenset[str]:
    place, found = f"item.{item.get('type')}", set()
    if item.get("status") != "completed":
        found.add(f"{place}.status")
    if item.get("object") != "realtime.item":
        found.add(f"{place}.object")
    if item.get("role") == "assistant":
        found.add(f"{place}.content.audio")
    return frozenset(found)


def _walk(
    given: Any, name: str, path: str, lacking: Collection[str], *, without: Collection[str] = ()
) -> Iterator[tuple[str, str, str]]:
    """Yield a code, a message and the path for each field below ``given`` that has no effect, or is unknown.

    ``name`` is the name of ``given`` in realtime_parity.toml. ``lacking`` names fields for which the engine lacks the
    ability. The fields ``without`` are skipped.
    """
    if isinstance(given, list):
        for index, one in enumerate(given):
            yield from _walk(one, name, f"{path}[{index}]", lacking)
        return
    if not isinstance(given, Mapping):
        return
    for key, value in given.items():
        if key in without or value is None or value == [] or value == {}:
            continue
        inner, where = f"{name}.{key}", f"{path}.{key}".removeprefix(".")
        verdict = None if "." in key else verdict_of(inner)  # with dots it might be long, and name another field
        if verdict is None:
            yield "unknown_parameter", f"unknown parameter: {where[:128]}", where[:128]
        elif verdict.not_in_effect or (verdict.otherwise and inner in lacking):
            yield "not_in_effect", f"{where} has no effect: {verdict.reason}", where
        elif with_fields(inner):
            yield from _walk(value, inner, where, lacking)


def _inner(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    inner = fields.get(name)
    return inner if isinstance(inner, Mapping) else {}


# UrlImages: fetches the images that client events name by URL, while the events that depend on them wait.


#: The events that wait while an earlier event waits for its image. All other events overtake it.
WAITING_KINDS: Final = frozenset(
    {"conversation.item.create", "conversation.item.retrieve", "conversation.item.delete", "response.create"}
)
#: How many events may wait, and how many images one event may name.
MAX_WAITING: Final = 64
MAX_IMAGES: Final = 16
#: The memory that an image takes while it becomes a data: URL, as a multiple of its size.
_COPIES: Final = 3


class UrlImages:
    """Holds client events that name images by URL, and later events that depend on them, until the images are fetched.

    It then replaces the URLs by the images and calls ``handle`` with each event and the time of its arrival, in order.
    Until then, the events and images are charged to ``account``. ``refuse`` gets the error and the event if an event is
    refused or its images cannot be fetched; ``end`` gets an error that ends the session.
    """

    def __init__(
        self,
        config: HttpConfig,
        account: ByteBudget,
        handle: Callable[[Mapping[str, Any], float], None],
        refuse: Callable[[OmniError, Mapping[str, Any]], None],
        end: Callable[[OmniError], None],
    ) -> None:
        self._reader = MediaReader(config)
        self._handle, self._refuse, self._end = handle, refuse, end
        #: The events in order, each with its arrival and its size.
        self._waiting: deque[tuple[dict[str, Any], float, int]] = deque()
        self._share = Share(account)
        self._task: asyncio.Task[None] | None = None

    def holds(self, event: Mapping[str, Any], *, now: float) -> bool:
        """Hold an event if it has to wait; return whether it is held. Raises InvalidValue and EngineOverloaded."""
        if event["type"] not in WAITING_KINDS or not (self._waiting or any(True for _ in _named(event))):
            return False
        if len(self._waiting) >= MAX_WAITING:
            raise InvalidValue(f"at most {MAX_WAITING} events may wait for images", param="type")
        size = memory_of(event)
        self._share.resize(self._share.size + size)
        self._waiting.append((dict(event), now, size))
        if self._task is None:
            self._task = asyncio.create_task(self._read(), name="images of a Realtime session")
        return True

    def close(self) -> None:
        """Drop all events that are held."""
        if self._task is not None:
            self._task.cancel()
        self._waiting.clear()
        self._share.resize(0)

    async def _read(self) -> None:
        try:
            while self._waiting:
                event, now, _ = self._waiting[0]
                error: OmniError | None = None
                try:
                    await self._fetch(event)
                except OmniError as refusal:
                    error = refusal
                self._waiting.popleft()
                self._share.resize(sum(size for _, _, size in self._waiting))
                if error is not None:
                    self._refuse(error, event)
                else:
                    self._pass_on(event, now)
        except Exception as failure:
            self._end(unexpected(failure, where="the images of a Realtime session"))
        finally:
            self._task = None

    def _pass_on(self, event: Mapping[str, Any], now: float) -> None:
        try:
            self._handle(event, now)
        except InvalidRequest as error:
            self._refuse(error, event)
        except OmniError as error:
            self._end(error)

    async def _fetch(self, event: Mapping[str, Any]) -> None:
        """Replace the URLs of images in ``event`` by ``data:`` URLs. Raises an OmniError that names the field."""
        named = list(_named(event))
        if len(named) > MAX_IMAGES:
            raise InvalidValue(f"at most {MAX_IMAGES} images may be named by URL", param=named[MAX_IMAGES][1].place)
        size = self._share.size
        images = await self._reader.read(
            [url for _, url in named], lambda held: self._share.resize(size + _COPIES * held)
        )
        for (part, _), image in zip(named, images, strict=True):
            part["image_url"] = await run_work(Work.BODIES, _data_url, image)


def _data_url(image: InputChunk) -> str:
    return f"data:{sniff_image(image.payload)};base64,{base64.b64encode(image.payload).decode()}"


def _named(event: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], MediaUrl]]:
    """Yield the parts of messages in ``event`` that name an image by URL, each with the URL."""
    for place, item in items_in(event):
        content = item.get("content") if isinstance(item, dict) else None
        for index, part in enumerate(content if isinstance(content, list) else ()):
            url = part.get("image_url") if isinstance(part, dict) and part.get("type") == "input_image" else None
            if isinstance(url, str) and url[:16].strip().lower().startswith(("http:", "https:")):
                yield part, MediaUrl(url.strip(), Modality.IMAGE, f"{place}.content[{index}].image_url")


# MCP in the Realtime API: the events and items of servers, calls and approvals, and the answers to results.


#: Calls whose items are known.
_MAX_CALLS: Final = 256


class _ApprovalFields(Struct, frozen=True, kw_only=True):
    """An item of the kind ``mcp_approval_response``."""

    approval_request_id: Id
    approve: bool
    reason: str | None = None


class McpItems(CallKeeper):
    """The items and events for MCP calls of a Realtime session. A CallKeeper.

    A response whose MCP calls are still running is *held*: it is done when they have ended, or another response begins.
    The results are then pending items; ``answer`` is called to make a response to them, as soon as ``may_answer``
    returns True.
    """

    def __init__(
        self,
        mcp: ToolServers | None,
        items: ConversationItems,
        ledger: Ledger,
        *,
        send: Callable[[Iterable[Event]], None],
        may_answer: Callable[[], bool],
        answer: Callable[[], None],
        forget: Callable[[str], object],
    ) -> None:
        """``forget`` is called with the request id of each held response when the response is done."""
        self._mcp = mcp
        self._items = items
        self._ledger = ledger
        self._send = send
        self._may_answer = may_answer
        self._answer = answer
        self._forget = forget
        #: The id of the item ``mcp_list_tools`` for each server whose tools are being listed, by label.
        self._listings: dict[str, str] = {}
        #: The item of each call, or of the client's refusal of it, by call id.
        self._calls: dict[str, Item] = {}
        #: The held responses, by request id; and the responses that were held before, whose calls go on.
        self._held: dict[str, RealtimeResponse] = {}
        self._earlier: dict[str, RealtimeResponse] = {}
        #: Calls that were over before the end of their response was rendered, by request id.
        self._early: dict[str, list[McpCall]] = {}
        #: Results that no response has answered, by call id.
        self._unanswered: dict[str, Item] = {}
        if mcp is not None:
            mcp.keep_with(self, approvals=True)

    # the session

    def shown(self, session: dict[str, Any]) -> dict[str, Any]:
        """Return the session object with MCP servers in place of the tools that they offer."""
        if not self._mcp or "tools" not in session:
            return session
        own = [one for one in session["tools"] if self._mcp.find(one.get("name")) is None]
        return {**session, "tools": [*own, *self._mcp.shown()]}

    @staticmethod
    def kept(session: SessionFields) -> SessionFields:
        """Return the session without the credentials of MCP servers, as it may be stored."""
        if not session.tools or not any(map(is_mcp, session.tools)):
            return session
        tools = [without_credentials(one) if is_mcp(one) else one for one in session.tools]
        return msgspec.structs.replace(session, tools=tools)

    def listing(self, server: ToolServer) -> None:
        item_id = self._listings.setdefault(server.label, new_id("mcpl_"))
        if server.pending:
            self._send([{"type": "mcp_list_tools.in_progress", "item_id": item_id}])
            return
        del self._listings[server.label]
        if server.failure is not None:
            error = server.failure.shown()  # an extension
            self._send([{"type": "mcp_list_tools.failed", "item_id": item_id, "error": error}])
            return
        tools = [
            {
                "name": tool.name,
                "description": tool.description or None,
                "input_schema": dict(tool.schema),
                "annotations": tool.annotations,
            }
            for tool in server.allowed()
        ]
        item = Item(item_id=item_id, kind="mcp_list_tools", extra={"server_label": server.label, "tools": tools})
        try:
            events = [*self._added(item)]
        except OmniError as error:  # there is no room for the item; the tools themselves are in effect
            events = [error_event(error)]
        self._send([*events, {"type": "mcp_list_tools.completed", "item_id": item_id}])

    def _added(self, item: Item) -> Iterator[Event]:
        previous = self._items.add(item)
        yield item_event("added", item, previous=previous)
        yield item_event("done", item, previous=previous)

    # calls

    def item_of(self, request_id: str, call_id: str, name: str) -> Item | None:
        """Return a new item for a call that the model has made; None if ``name`` is not that of an MCP tool.

        The item is the MCP call itself or, if the call needs the client's approval, the request for it.
        """
        if self._mcp is None or (found := self._mcp.find(name)) is None:
            return None
        server, tool = found
        asks = self._mcp.asks(name)
        item = Item(
            item_id=new_id("mcpr_" if asks else "mcp_"),
            kind="mcp_approval_request" if asks else "mcp_call",
            call_id=call_id,
            request_id=request_id,
            extra={"server_label": server.label, "name": tool.name, "arguments": ""},
        )
        if not asks:
            self._know(call_id, item)
        return item

    def _know(self, call_id: str, item: Item) -> None:
        self._calls[call_id] = item
        keep_newest(self._calls, _MAX_CALLS)

    def hold(self, response: RealtimeResponse) -> Iterator[Event]:
        """Hold a response whose end was rendered except for its MCP calls; end it if these are over already."""
        self._held[response.request_id] = response
        for call in self._early.pop(response.request_id, ()):
            yield from self._over(call)
        if self._mcp is None or not self._mcp.working(response.request_id):
            yield from self._release(response)

    def release(self) -> Iterator[Event]:
        """End all held responses, since another response begins. Their calls go on."""
        for response in [*self._held.values()]:
            yield from self._release(response)

    def _release(self, response: RealtimeResponse) -> Iterator[Event]:
        del self._held[response.request_id]
        if self._mcp is not None and self._mcp.working(response.request_id):
            self._earlier[response.request_id] = response
        self._forget(response.request_id)
        yield from response.done()

    def cancel(self, response: RealtimeResponse) -> None:
        """Drop the running calls of a held response, which then ends as cancelled."""
        if self._mcp is not None and response.request_id in self._held:
            self._mcp.drop([item.call_id for item in response.items if item.kind == "mcp_call"])

    def begun(self, call: McpCall) -> None:
        pass  # the end of the response tells it

    def one_over(self, call: McpCall) -> None:
        if call.call_id not in self._calls:
            return
        owner = self._held.get(call.request_id) or self._earlier.get(call.request_id)
        if owner is None and "approval_request_id" not in self._calls[call.call_id].extra:
            self._early.setdefault(call.request_id, []).append(call)
            return
        self._send(self._over(call))

    def _over(self, call: McpCall) -> Iterator[Event]:
        """Render the end of a call, within its response or, if it was approved later, on its own."""
        item = self._calls[call.call_id]
        if item.kind != "mcp_call":  # a call that was not approved
            return
        error = None if call.failure is None else call.failure.shown()
        item.extra.update(output=call.output, error=error)
        self._items.have_grown([item])
        kind: Literal["completed", "failed"] = "completed" if error is None else "failed"
        response = self._held.get(call.request_id) or self._earlier.get(call.request_id)
        if response is None or item not in response.items:
            yield {"type": f"response.mcp_call.{kind}", "item_id": item.item_id, "output_index": 0}
            yield item_event("done", item, previous=None)
        else:
            yield from response.call_over(item, kind)

    def over(self, request_id: str, calls: Sequence[McpCall]) -> None:
        for call in calls:
            item = self._calls.get(call.call_id)
            if item is not None and self._items.get(item.item_id) is not None:
                self._items.told(item, result_chunk(call))
                self._unanswered[call.call_id] = item
        if (response := self._held.get(request_id)) is not None:
            self._send(self._release(response))
        self._earlier.pop(request_id, None)
        self.flush()

    def flush(self) -> None:
        """Have the waiting results answered, if ``may_answer`` and the client owes no function's output."""
        for call_id, item in [*self._unanswered.items()]:
            if not item.chunks:  # a response has it
                del self._unanswered[call_id]
        ready = [one for one in self._unanswered if all(map(self._ledger.knows_result, self._ledger.calls_beside(one)))]
        if not ready or not self._may_answer():
            return
        self._unanswered.clear()
        try:
            self._answer()
        except OmniError as error:
            self._send([error_event(error)])

    def approve(self, item_id: str, fields: Mapping[str, Any]) -> None:
        """Handle a client's item that approves or rejects a call. Raises an InvalidRequest."""
        given = read(fields, _ApprovalFields, "item")
        asked = self._items.get(given.approval_request_id)
        if (
            asked is None
            or self._mcp is None
            or not self._mcp.has(asked.call_id)
            or asked.kind != "mcp_approval_request"
        ):
            raise RealtimeRefusal(
                "item_create_invalid_approval_request_id",
                "no call waits for approval under this id",
                param="item.approval_request_id",
            )
        extra = {"approval_request_id": asked.item_id, "approve": given.approve, "reason": given.reason}
        answer = Item(item_id=item_id, kind="mcp_approval_response", call_id=asked.call_id, extra=extra)
        self._send(self._added(answer))
        if given.approve:
            call = {**asked.extra, "approval_request_id": asked.item_id}
            answer = Item(item_id=new_id("mcp_"), kind="mcp_call", call_id=asked.call_id, extra=call)
            previous = self._items.add(answer)
            begun = {"type": "response.mcp_call.in_progress", "item_id": answer.item_id, "output_index": 0}
            self._send([item_event("added", answer, previous=previous), begun])
        self._know(asked.call_id, answer)
        self._mcp.approve(asked.call_id, approved=given.approve, reason=given.reason)

    def close(self) -> None:
        """Refund the bytes that held responses have charged."""
        for response in (*self._held.values(), *self._earlier.values()):
            response.close()

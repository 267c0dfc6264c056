"""Clients of ``/v1/realtime`` and ``/v1/live/sessions`` that hold every event to the types of OpenAI's library.

That of Live holds them to the rules of its API, too: what comes first and last, ids, and times. By those types there
are also the names of the Realtime API that ``realtime_parity.toml`` must judge.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final, get_args

import orjson
import yaml
from jsonschema import Draft202012Validator
from openai.types.beta.realtime import TranscriptionSessionUpdatedEvent
from openai.types.live import ServerEvent
from openai.types.realtime import (
    ConversationItem,
    RealtimeClientEvent,
    RealtimeConnectParams,
    RealtimeResponse,
    RealtimeResponseCreateParams,
    RealtimeServerEvent,
    RealtimeSessionCreateRequest,
    RealtimeSessionCreateResponse,
    RealtimeTranscriptionSessionCreateRequest,
    RealtimeTranscriptionSessionCreateResponse,
    ResponseItemReference,
)
from pydantic import BaseModel
from support.inline_workers import loud_24k, quiet_24k
from support.live_server import LiveServer
from support.native_client import FrameClient
from support.patience import PATIENCE_SEC
from websockets.asyncio.client import ClientConnection, connect
from websockets.typing import Subprotocol


def by_type(union: Any) -> dict[str, Any]:
    """The classes in a union of events of OpenAI's library, by the ``type`` of their events."""
    return {
        one: event for event in get_args(get_args(union)[0]) for one in get_args(event.model_fields["type"].annotation)
    }


_EVENTS = {**by_type(RealtimeServerEvent), "transcription_session.updated": TranscriptionSessionUpdatedEvent}
#: The types of the events of a response of one text, those that repeat told once.
TEXT_RESPONSE = (
    "response.created",
    "rate_limits.updated",
    "response.output_item.added",
    "conversation.item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "conversation.item.done",
    "response.done",
)
#: Events of this server's own, which only a client that asked for them gets.
_EXTENSIONS = frozenset({"input_audio_buffer.backchannel"})


def check(event: dict[str, Any]) -> None:
    """The event is one that OpenAI's library knows, with all its fields, or one of an extension."""
    if event["type"] == "transcription_session.updated":  # of the beta; a secret is in the answers of HTTP alone
        event = {**event, "session": {"client_secret": {"expires_at": 0, "value": ""}, **event["session"]}}
    if event["type"] not in _EXTENSIONS:
        _EVENTS[event["type"]].model_validate(event)


class _Speaking(FrameClient):
    #: The event with audio of a microphone.
    APPEND: str
    closed = FrameClient.close_of_server

    async def append(self, audio: bytes, *, size: int = 4800) -> None:
        for position in range(0, len(audio), size):
            piece = base64.b64encode(audio[position : position + size]).decode()
            await self.send(self.APPEND, audio=piece)


class RealtimeClient(_Speaking):
    """One connection. ``received`` has all events, the first among them."""

    APPEND = "input_audio_buffer.append"

    async def receive(self) -> dict[str, Any]:
        event: dict[str, Any] = orjson.loads(await self.message())
        check(event)
        assert event["event_id"] not in {earlier["event_id"] for earlier in self.received}
        self.received.append(event)
        return event

    def kinds(self, *, since: int = 0) -> list[str]:
        """The types of the events, those that repeat told once."""
        kinds = [event["type"] for event in self.received[since:]]
        return [kind for index, kind in enumerate(kinds) if not index or kinds[index - 1] != kind]

    # what clients do

    async def update(self, **session: Any) -> dict[str, Any]:
        """Changes the session. Returns what is in effect."""
        await self.send("session.update", session={"type": "realtime", **session})
        updated: dict[str, Any] = (await self.until("session.updated"))["session"]
        return updated

    async def say(self, text: str, *, role: str = "user", **item: Any) -> dict[str, Any]:
        """Creates a message. Returns it as the server shows it."""
        kind = "output_text" if role == "assistant" else "input_text"
        content = [{"type": kind, "text": text}]
        await self.send("conversation.item.create", item={"type": "message", "role": role, "content": content, **item})
        shown: dict[str, Any] = (await self.until("conversation.item.done"))["item"]
        return shown

    async def respond(self, **response: Any) -> dict[str, Any]:
        """Asks for a response. Returns it when it is done."""
        await self.send("response.create", response=response)
        return await self.response()

    async def response(self) -> dict[str, Any]:
        """The next response, when it is done."""
        done: dict[str, Any] = (await self.until("response.done"))["response"]
        return done

    def heard(self, response_id: str) -> bytes:
        """The audio of a response."""
        deltas = self.seen("response.output_audio.delta")
        return b"".join(base64.b64decode(one["delta"]) for one in deltas if one["response_id"] == response_id)


def text_of(response: dict[str, Any]) -> str:
    """The words of a response, written or spoken."""
    parts = [part for item in response["output"] if item["type"] == "message" for part in item["content"]]
    return "".join(part.get("text") or part.get("transcript") or "" for part in parts)


async def failed(client: RealtimeClient, kind: str, **fields: Any) -> dict[str, Any]:
    """The error that an event is refused with."""
    await client.send(kind, **fields)
    error: dict[str, Any] = (await client.until("error"))["error"]
    return error


@contextlib.asynccontextmanager
async def realtime_client(
    server: LiveServer, *, model: str = "gpt-realtime", query: str = "", created: bool = True, **options: Any
) -> AsyncIterator[RealtimeClient]:
    """A connection, whose session has been created unless not ``created``.

    It tries again, as it is told to, while the server that had the session is late to give it back.
    """
    subprotocols = [Subprotocol(name) for name in options.pop("subprotocols", ())] or None
    url = f"ws://127.0.0.1:{server.port}/v1/realtime?{query or f'model={model}'}"
    end = time.monotonic() + PATIENCE_SEC
    while True:
        async with connect(url, max_size=None, subprotocols=subprotocols, ping_interval=None, **options) as connection:
            client = RealtimeClient(connection)
            if created:
                first = await client.receive()
                if first.get("error", {}).get("code") == "session_conflict" and time.monotonic() < end:
                    continue
                assert first["type"] == "session.created"
            yield client
            return


#: By ``type``, the class of each event.
EVENTS = by_type(ServerEvent)
_LIVE = Path(__file__).parents[2] / "protocol" / "live.asyncapi.yaml"
AUDIO = "session.output_audio.delta"


@cache
def _schemas() -> dict[str, Draft202012Validator]:
    messages = yaml.safe_load(_LIVE.read_text(encoding="utf-8"))["components"]["messages"]
    return {kind: Draft202012Validator(message["payload"]) for kind, message in messages.items()}


def check_live(event: dict[str, Any]) -> None:
    """The event is one that OpenAI's library and our document know, with all its fields."""
    kind = event["type"]
    EVENTS[kind].model_validate(event)
    if kind in _schemas():
        _schemas()[kind].validate(event)


class LiveClient(_Speaking):
    """One connection. ``received`` has all events but the audio, which is in ``sound``."""

    APPEND = "session.input_audio.append"

    def __init__(self, connection: ClientConnection) -> None:
        super().__init__(connection)
        #: The audio of all deltas, and the length of each.
        self.sound = bytearray()
        self.deltas: list[int] = []
        self._starts: dict[str, int] = {}

    async def receive(self) -> dict[str, Any]:
        """The next event. Audio is taken on the way."""
        while (event := await self.take())["type"] == AUDIO:
            pass
        return event

    async def take(self) -> dict[str, Any]:
        """The next event, which may be audio."""
        event: dict[str, Any] = orjson.loads(await self.message())
        self._check(event)
        if event["type"] == AUDIO:
            audio = base64.b64decode(event["delta"])
            self.sound += audio
            self.deltas.append(len(audio))
        else:
            self.received.append(event)
        return event

    def _check(self, event: dict[str, Any]) -> None:
        kind = event["type"]
        check_live(event)
        assert "session.closed" not in {one["type"] for one in self.received}, "an event after the last"
        if kind == AUDIO:
            assert event.keys() == {"type", "delta"}
        else:
            assert event["event_id"] not in {one["event_id"] for one in self.received}
        if not self.received:
            assert kind in ("session.started", "error"), "an event before the first"
        if kind.endswith("_transcript.delta"):
            assert self._starts.get(kind, 0) <= event["start_ms"] <= event["end_ms"], "time goes back"
            self._starts[kind] = event["start_ms"]
        if kind == "error":
            assert isinstance(event["error"]["code"], str)

    def said(self) -> str:
        """The output transcript so far."""
        return "".join(one["delta"] for one in self.seen("session.output_transcript.delta"))

    def heard(self) -> str:
        """The input transcript so far."""
        return "".join(one["delta"] for one in self.seen("session.input_transcript.delta"))

    async def start(self, **session: Any) -> dict[str, Any]:
        """Starts the session. Returns it as the server shows it."""
        await self.send("session.start", event_id="start", session={"model": "gpt-live-1", **session})
        started = await self.until("session.started")
        assert started["client_event_id"] == "start"
        shown: dict[str, Any] = started["session"]
        return shown

    async def speak(self, *, ms: int = 320) -> None:
        """Says something in real time, at 24 kHz."""
        audio = quiet_24k(96) + loud_24k(ms) + quiet_24k(640)
        for position in range(0, len(audio), 4800):  # 100 ms
            await self.append(audio[position : position + 4800])
            await asyncio.sleep(0.1)

    async def until_said(self, text: str) -> None:
        """Waits until these words are the end of what was said."""
        while not self.said().endswith(text):
            await self.receive()

    async def take_for(self, seconds: float) -> None:
        """Takes what comes in so many seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while True:
                    await self.take()

    async def failed(self, kind: str, **fields: Any) -> dict[str, Any]:
        """The error that an event is refused with."""
        await self.send(kind, event_id="wrong", **fields)
        error: dict[str, Any] = (await self.until("error"))["error"]
        assert error["client_event_id"] == "wrong"
        return error

    async def end(self) -> dict[str, Any]:
        """Closes the session. Returns its last event, behind which the server has closed."""
        await self.send("session.close", event_id="close")
        closed = await self.until("session.closed")
        assert closed["client_event_id"] == "close"
        assert (await self.closed())[0] == 1000
        return closed


@contextlib.asynccontextmanager
async def live_client(server: LiveServer, *, query: str = "", **options: Any) -> AsyncIterator[LiveClient]:
    """A connection, whose session is not started."""
    url = f"ws://127.0.0.1:{server.port}/v1/live/sessions{query}"
    async with connect(url, max_size=None, ping_interval=None, **options) as connection:
        yield LiveClient(connection)


#: Fields of every event; they are judged once.
_ENVELOPE: Final = ("type", "event_id")
#: Objects that are judged in a section of their own, by the classes that describe them.
_ITEMS: Final = (*get_args(get_args(ConversationItem)[0]), ResponseItemReference)
_OF_OWN: Final = {
    "session": (
        RealtimeSessionCreateRequest,
        RealtimeTranscriptionSessionCreateRequest,
        RealtimeSessionCreateResponse,
        RealtimeTranscriptionSessionCreateResponse,
    ),
    "response": (RealtimeResponseCreateParams,),
    "server.response": (RealtimeResponse,),
}
_ELSEWHERE: Final = {one for classes in _OF_OWN.values() for one in classes} | set(_ITEMS)


def openai_names() -> set[str]:
    """Return all names: ``client.EVENT.FIELD``, ``session.FIELD``, ``response.FIELD``, ``item.TYPE.FIELD`` ….

    The fields of a list's elements follow its name, and the fields of several forms of one object are joined.
    """
    names = {f"query.{name}" for name in RealtimeConnectParams.__annotations__}
    for side, union in (("client", RealtimeClientEvent), ("server", RealtimeServerEvent)):
        names |= {f"{side}.{name}" for name in _ENVELOPE}
        for kind, event in by_type(union).items():
            names |= {f"{side}.{kind}", *_fields(event, f"{side}.{kind}", without=_ENVELOPE)}
    for place, classes in _OF_OWN.items():
        for one in classes:
            names |= set(_fields(one, place))
    for one in _ITEMS:
        (kind,) = get_args(one.model_fields["type"].annotation) or get_args(
            get_args(one.model_fields["type"].annotation)[0]
        )
        names |= {f"item.{kind}", *_fields(one, f"item.{kind}", without=("type",))}
    return names


def _fields(model: type[BaseModel], place: str, *, without: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the names of the model's fields, and of the fields of the objects in them."""
    for name, field in model.model_fields.items():
        if name in without:
            continue
        path = f"{place}.{field.alias or name}"
        yield path
        for inner in _models(field.annotation):
            if inner not in _ELSEWHERE:
                yield from _fields(inner, path)


def _models(kind: Any) -> Iterator[type[BaseModel]]:
    """Yield the classes of objects in an annotation: an alternative, an element, or the type itself."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
    for inner in get_args(kind):
        yield from _models(inner)

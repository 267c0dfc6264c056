"""A client of ``/v1/realtime`` that holds every event to the types of OpenAI's library."""

from __future__ import annotations

import base64
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any, get_args

import orjson
from openai.types.beta.realtime import TranscriptionSessionUpdatedEvent
from openai.types.realtime import RealtimeServerEvent
from support.live_server import LiveServer
from support.native_client import FrameClient
from support.patience import PATIENCE_SEC
from websockets.asyncio.client import connect
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


class RealtimeClient(FrameClient):
    """One connection. ``received`` has all events, the first among them."""

    closed = FrameClient.close_of_server

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

    async def append(self, audio: bytes, *, size: int = 4800) -> None:
        for position in range(0, len(audio), size):
            piece = base64.b64encode(audio[position : position + size]).decode()
            await self.send("input_audio_buffer.append", audio=piece)

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

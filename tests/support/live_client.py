"""A client of ``/v1/live/sessions`` that holds every event to the types of OpenAI's library, and to the rules of its
API: what comes first and last, ids, and times."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import yaml
from jsonschema import Draft202012Validator
from openai.types.live import ServerEvent
from support.inline_workers import loud_24k, quiet_24k
from support.live_server import LiveServer
from support.native_client import FrameClient
from support.realtime_client import by_type
from websockets.asyncio.client import ClientConnection, connect

#: By ``type``, the class of each event.
EVENTS = by_type(ServerEvent)
_DOCUMENT = Path(__file__).parents[2] / "protocol" / "live.asyncapi.yaml"
_MESSAGES = yaml.safe_load(_DOCUMENT.read_text(encoding="utf-8"))["components"]["messages"]
_SCHEMAS = {kind: Draft202012Validator(message["payload"]) for kind, message in _MESSAGES.items()}
AUDIO = "session.output_audio.delta"


def check_live(event: dict[str, Any]) -> None:
    """The event is one that OpenAI's library and our document know, with all its fields."""
    kind = event["type"]
    EVENTS[kind].model_validate(event)
    if kind in _SCHEMAS:
        _SCHEMAS[kind].validate(event)


class LiveClient(FrameClient):
    """One connection. ``received`` has all events but the audio, which is in ``sound``."""

    closed = FrameClient.close_of_server

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

    async def append(self, audio: bytes, *, size: int = 4800) -> None:
        for position in range(0, len(audio), size):
            piece = base64.b64encode(audio[position : position + size]).decode()
            await self.send("session.input_audio.append", audio=piece)

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

"""A client that comes back until its conversation is through, as protocol/README.md ("Resuming") tells clients to."""

from __future__ import annotations

import asyncio
import base64
import random
from collections.abc import Sequence
from typing import Any

import orjson
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from omni_ws.core.chunks import InputChunk, Modality
from omni_ws.wire.binary import decode_output_audio, encode_input

#: What is about one connection only.
_PASSING = frozenset({"session_created", "session_resumed", "input_ack", "pong", "session_closing"})
_TRIES = 20


class ResumingClient:
    """``turns``: the chunks of each request, text or audio; the next begins when the one before has its final.

    ``view`` is what it has seen in the end, without what is about one connection: outputs, starts, errors and
    configurations, in their order, request ids replaced by the order of their appearance.
    """

    def __init__(self, port: int, turns: Sequence[Sequence[str | bytes]], *, rng: random.Random, **config: Any) -> None:
        self._url = f"ws://127.0.0.1:{port}/v1/streaming_input"
        self._rng = rng
        self._config = config
        self._chunks: list[str | bytes] = [chunk for turn in turns for chunk in turn]
        #: Up to which chunk each turn goes.
        self._ends = [sum(map(len, turns[: index + 1])) for index in range(len(turns))]
        self.view: list[dict[str, Any]] = []
        self.connections = 0
        self.resumed = 0
        self.session_id: str | None = None
        self.token = ""
        self._next = 0
        self._last_output = -1
        #: How much of the view came up to the last output.
        self._settled = 0
        self._configured = False
        self._came_back = False
        self._request_ids: dict[str, int] = {}

    async def converse(self) -> None:
        for _ in range(_TRIES):
            try:
                async with asyncio.timeout(10):
                    if await self._connection():
                        return
            except (ConnectionClosed, ConnectionError, InvalidHandshake, EOFError):
                pass
        raise AssertionError("it took too many connections")

    async def _connection(self) -> bool:
        url = self._url
        if self.session_id is not None:
            url += f"?session_id={self.session_id}&resume_token={self.token}&last_output={self._last_output}"
        binary = self._rng.random() < 0.5
        async with connect(
            url,
            subprotocols=["omni.v1+binary"] if binary else None,  # type: ignore[list-item]
            compression=None,
            ping_interval=None,
            proxy=None,
            close_timeout=2,
        ) as connection:
            self.connections += 1
            await self._greet(connection)
            if not self._configured and self._came_back:
                # Whether the configuration had arrived shows in what is told again, which is over with the pong.
                await connection.send('{"type":"ping"}')
                while orjson.loads(message := await connection.recv())["type"] != "pong":
                    self._take(message)
            if not self._configured:
                await connection.send(orjson.dumps({"type": "session_config", **self._config}).decode())
                while not self._configured:
                    self._take(await connection.recv())
            while (turn := self._finals) < len(self._ends):
                await self._send(connection, self._ends[turn])
                self._take(await connection.recv())
                if self._rng.random() < 0.2 and self._last_output >= 0:
                    ack = {"type": "output_ack", "sequence_id": self._last_output}
                    await connection.send(orjson.dumps(ack).decode())
        return True

    async def _greet(self, connection: ClientConnection) -> None:
        frame = orjson.loads(await connection.recv())
        self.token = frame["resume_token"]
        if self.session_id is None:
            assert frame["type"] == "session_created"
            self.session_id = frame["session_id"]
            return
        assert frame["type"] == "session_resumed", frame
        assert frame["session_id"] == self.session_id
        self.resumed += 1
        self._came_back = True
        self._next = frame["next_sequence_id"]
        del self.view[self._settled :]
        self._configured = any(seen["type"] == "session_updated" for seen in self.view)

    async def _send(self, connection: ClientConnection, end: int) -> None:
        while self._next < end:
            content, number = self._chunks[self._next], self._next
            last = number + 1 in self._ends
            if isinstance(content, bytes):
                await connection.send(encode_input(InputChunk(Modality.AUDIO, content, number, None, None, last)))
            else:
                frame = {"type": "input_chunk", "sequence_id": number, "text": content, "end_of_input": last}
                await connection.send(orjson.dumps(frame).decode())
            self._next += 1

    @property
    def _finals(self) -> int:
        return sum(frame.get("final", False) for frame in self.view)

    def _take(self, message: str | bytes) -> None:
        if isinstance(message, bytes):
            audio = decode_output_audio(message)
            frame: dict[str, Any] = {
                "type": "output_chunk",
                "sequence_id": audio.sequence_id,
                "modality": "audio",
                "start_ms": audio.start_ms,
                "audio": audio.payload,
            }
        else:
            frame = orjson.loads(message)
            if "payload" in frame:
                frame["audio"] = base64.b64decode(frame.pop("payload"))
                for said_by_the_session in ("request_id", "format", "sample_rate"):
                    del frame[said_by_the_session]
        if frame["type"] in _PASSING:
            return
        if frame["type"] == "session_updated":
            self._configured = True
        if "request_id" in frame:
            frame["request_id"] = self._request_ids.setdefault(frame["request_id"], len(self._request_ids))
        self.view.append(frame)
        if frame["type"] == "output_chunk":
            assert frame["sequence_id"] == self._last_output + 1, "outputs are contiguous, and none comes twice"
            self._last_output += 1
            self._settled = len(self.view)

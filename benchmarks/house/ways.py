"""Five ways through a real server, by real sockets, with a trace of each.

The server, its sessions and its engines are those that ``omni-ws serve`` runs, in this process; the client is
``websockets`` alone, so that nothing of the package runs for it. Each way is gone several times, and what it touches is
what each of these times touches.

- *Chunk in*: one JSON ``input_chunk`` of 20 ms of audio, from the socket to the engine that reads it, and its ack.
- *Output out*: 20 ms of audio, from an engine that has it to the JSON ``output_chunk`` on the socket, and the
  ``output_ack`` that the client returns.
- *Spoken turn*: a recording into an open microphone, with the parts that the server has by default: the detector,
  Whisper, the rules and a voice. From the first chunk to the final of the answer, whose audio the client acknowledges.
- *Interruption*: speech while a scripted answer plays, up to the final of that answer.
- *Resume*: a second connection to a session whose first one broke in an answer, up to the outputs that are sent anew.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
from websockets.asyncio.client import ClientConnection, connect

from benchmarks.embedded import Clip
from benchmarks.house.traces import Call, Trace, Way, way_of
from omni_ws.config.model import ServerConfig
from omni_ws.engine.base import AudioOutput, Engine, TextOutput
from omni_ws.engine.fake import ScriptedEngine
from omni_ws.engine_choice import create_engine, turn_model
from omni_ws.server import create_app, listen

#: So often each way is gone, after once that loads what is loaded late.
TIMES: Final = 3
RATE: Final = 16_000
FRAME_BYTES: Final = 2 * RATE * 20 // 1000
SPOKEN: Final = "goforward"
INTERRUPTING: Final = "cards_001"
_OUTPUT: Final = {"format": "pcm16", "sample_rate": RATE}
#: Guards against what hangs, on a busy machine too.
_LONGEST_SEC: Final = 300.0
#: Passes of the event loop after which nothing of a frame is left to be done.
_PASSES: Final = 50
#: Thirty seconds of audio: so long an answer is still being played when it is interrupted.
_ANSWER: Final = tuple(AudioOutput(np.full(RATE // 50, 0.1, np.float32), RATE) for _ in range(30 * 50))


class _Client:
    """A client in JSON that numbers its chunks."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection
        self.frames: list[dict[str, Any]] = []
        self._number = 0

    async def send(self, kind: str, **fields: object) -> None:
        await self.connection.send(json.dumps({"type": kind, **fields}))

    async def audio(self, payload: bytes, *, end: bool = False) -> None:
        fields = {"modality": "audio", "payload": base64.b64encode(payload).decode(), "end_of_input": end}
        await self.send("input_chunk", sequence_id=self._number, **fields)
        self._number += 1

    async def text(self, text: str) -> None:
        await self.send("input_chunk", sequence_id=self._number, modality="text", text=text, end_of_input=True)
        self._number += 1

    async def stream(self, audio: bytes) -> None:
        for start in range(0, len(audio), FRAME_BYTES):
            await self.audio(audio[start : start + FRAME_BYTES])

    async def until(self, kind: str, **fields: object) -> dict[str, Any]:
        """The next frame of this kind with these fields."""
        while True:
            frame: dict[str, Any] = json.loads(await self.connection.recv())
            self.frames.append(frame)
            if frame["type"] == "error":
                raise RuntimeError(f"the server reports {frame}")
            if frame["type"] == kind and fields.items() <= frame.items():
                return frame

    async def played(self, output: dict[str, Any]) -> None:
        """Tells that this output was heard to its end."""
        milliseconds = output["start_ms"] + len(base64.b64decode(output["payload"])) * 500 // RATE
        await self.send("output_ack", sequence_id=output["sequence_id"], played_ms=milliseconds)

    async def hear(self) -> dict[str, Any]:
        """Plays an answer, and returns its final."""
        while not (frame := await self.until("output_chunk")).get("final"):
            if frame["modality"] == "audio":
                await self.played(frame)
        return frame


async def ways(package: Path) -> dict[str, Way]:
    """The five ways, by name."""
    trace = Trace(package)
    found: dict[str, Way] = {}
    with trace.watching():
        async with asyncio.timeout(_LONGEST_SEC):
            for name, go in WAYS.items():
                found[name] = way_of((await go(trace))[1:])
    return found


async def _chunk_in(trace: Trace) -> list[list[Call]]:
    """The engine goes on reading its input, since the client never ends it."""
    traces = []
    async with _server(ScriptedEngine([])) as port, _client(port) as client:
        await client.send("session_config", start_policy="on_first_chunk")
        await client.audio(bytes(FRAME_BYTES))
        await client.until("input_ack")
        for _ in range(TIMES + 1):
            await _rest()
            trace.begin()
            await client.audio(bytes(FRAME_BYTES))
            await client.until("input_ack")
            await _rest()
            traces.append(trace.end())
    return traces


async def _output_out(trace: Trace) -> list[list[Call]]:
    """The engine makes one output each time that a gate opens."""
    gates = [asyncio.Event() for _ in range(TIMES + 2)]
    script: list[Any] = []
    for gate, output in zip(gates, _ANSWER, strict=False):
        script += [gate.wait, output]
    traces = []
    async with _server(ScriptedEngine(script)) as port, _client(port) as client:
        await client.send("session_config", output_audio=_OUTPUT)
        await client.text("speak")
        for gate in gates[:-1]:
            await _rest()
            trace.begin()
            gate.set()
            await client.played(await client.until("output_chunk", modality="audio"))
            await _rest()
            traces.append(trace.end())
        gates[-1].set()
        await client.hear()
    return traces


async def _spoken_turn(trace: Trace) -> list[list[Call]]:
    traces = []
    spoken = bytes(RATE) + Clip.load(SPOKEN).samples + bytes(2 * RATE)  # beforehand: it is read by the package
    async with _server(None) as port, _client(port) as client:
        await _open_microphone(client)
        for _ in range(TIMES + 1):
            await _rest()
            trace.begin()
            await client.stream(spoken)
            await client.hear()
            await _rest()
            traces.append(trace.end())
    return traces


async def _interruption(trace: Trace) -> list[list[Call]]:
    traces = []
    interrupting = Clip.load(INTERRUPTING).samples + bytes(2 * RATE)
    async with _server(ScriptedEngine([TextOutput("a long answer"), *_ANSWER])) as port:
        for _ in range(TIMES + 1):
            async with _client(port) as client:
                await _open_microphone(client)
                await client.text("speak")
                await client.until("output_chunk", modality="audio")
                await client.stream(bytes(RATE))
                await _rest()
                trace.begin()
                await client.stream(interrupting)
                await client.until("output_chunk", final=True, finish_reason="cancelled")
                await _rest()
                traces.append(trace.end())
    return traces


async def _resume(trace: Trace) -> list[list[Call]]:
    traces = []
    for _ in range(TIMES + 1):
        gate = asyncio.Event()
        async with _server(ScriptedEngine([*_ANSWER[:5], gate.wait])) as port:
            async with _client(port) as client:
                created = await client.until("session_created")
                await client.send("session_config", output_audio=_OUTPUT)
                await client.text("speak")
                last = await client.until("output_chunk", modality="audio")
                for _ in range(2):
                    await client.until("output_chunk", modality="audio")
                client.connection.transport.abort()
            await _rest()
            trace.begin()
            query = f"?session_id={created['session_id']}&resume_token={created['resume_token']}"
            async with _client(port, f"{query}&last_output={last['sequence_id']}") as client:
                await client.until("session_resumed")
                await client.until("output_chunk", modality="audio")
                await _rest()
                traces.append(trace.end())
                gate.set()
                await client.hear()
    return traces


WAYS: Final[dict[str, Callable[[Trace], Awaitable[list[list[Call]]]]]] = {
    "one chunk in": _chunk_in,
    "one output out": _output_out,
    "one spoken turn": _spoken_turn,
    "an interruption": _interruption,
    "a resume": _resume,
}


@asynccontextmanager
async def _server(engine: Engine | None) -> AsyncIterator[int]:
    """The port of a server over ``engine``; without one, over the engine that a server has by default."""
    fields: dict[str, Any] = {"host": "127.0.0.1", "port": 0}
    if engine:
        fields["engine"] = "fake"
    config = ServerConfig(**fields)
    model = None if engine else await asyncio.to_thread(turn_model, config)
    engine = engine or create_engine(config)
    await engine.start()
    try:
        async with listen(create_app(engine, config, turn_model=model)) as running:
            yield running.port
    finally:
        await engine.stop()


@asynccontextmanager
async def _client(port: int, query: str = "") -> AsyncIterator[_Client]:
    url = f"ws://127.0.0.1:{port}/v1/streaming_input{query}"
    async with connect(url, compression=None, max_size=None, ping_interval=None) as connection:
        yield _Client(connection)


async def _open_microphone(client: _Client) -> None:
    await client.send("session_config", turn_detection={"type": "server_vad"}, output_audio=_OUTPUT)
    await client.until("session_updated")


async def _rest() -> None:
    """Lets the event loop do what is left to do."""
    for _ in range(_PASSES):
        await asyncio.sleep(0)

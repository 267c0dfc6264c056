"""A voice server on LiveKit's agents: a session of an agent per connection, with binary messages of samples both ways.

LiveKit's own server, which carries audio by WebRTC, is a program in Go and not part of this: the session takes audio
from the WebSocket, and a loudspeaker at the other end is simulated by the clock. All sessions are in one process,
where LiveKit's workers have one for each. Speech recognition, answers and voice come from servers with OpenAI's API
(``--speech``, ``--model``), by LiveKit's own plug-in. ``--turns judged`` ends turns by LiveKit's detector, as it
recommends; ``silence`` by half a second of silence.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import suppress

import uvloop
from livekit import rtc
from livekit.agents import Agent, AgentSession, inference, io, utils
from livekit.plugins import openai
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

SILENCE_SEC = 0.5
RATE_IN, RATE_OUT = 16_000, 24_000


class Microphone(io.AudioInput):
    """What a connection sends."""

    def __init__(self, connection: ServerConnection) -> None:
        super().__init__(label="websocket")
        self._messages = self._frames(connection)

    async def _frames(self, connection: ServerConnection) -> AsyncIterator[rtc.AudioFrame]:
        with suppress(ConnectionClosed):
            async for message in connection:
                yield rtc.AudioFrame(message, RATE_IN, 1, len(message) // 2)

    async def __anext__(self) -> rtc.AudioFrame:
        return await anext(self._messages)


class Loudspeaker(io.AudioOutput):
    """Sends audio at once, and tells that it was played when it will have been."""

    def __init__(self, connection: ServerConnection) -> None:
        capabilities = io.AudioOutputCapabilities(pause=False)
        super().__init__(label="websocket", capabilities=capabilities, sample_rate=RATE_OUT)
        self._connection = connection
        self._began = 0.0
        self._seconds = 0.0
        self._playing: asyncio.TimerHandle | None = None

    async def capture_frame(self, frame: rtc.AudioFrame) -> None:
        await super().capture_frame(frame)
        if not self._seconds:
            self._began = time.time()
            self.on_playback_started(created_at=self._began)
        self._seconds += frame.duration
        with suppress(ConnectionClosed):
            await self._connection.send(bytes(frame.data))

    def flush(self) -> None:
        super().flush()
        if self._seconds and self._playing is None:
            left = max(0.0, self._began + self._seconds - time.time())
            self._playing = asyncio.get_running_loop().call_later(left, self._finish, self._seconds, False)

    def clear_buffer(self) -> None:
        """The client is not told: these talkers never interrupt."""
        if self._seconds:
            self._finish(min(self._seconds, time.time() - self._began), True)

    def _finish(self, position: float, interrupted: bool) -> None:
        if self._playing is not None:
            self._playing.cancel()
        self._playing, self._seconds = None, 0.0
        self.on_playback_finished(playback_position=position, interrupted=interrupted)


async def converse(connection: ServerConnection, options: argparse.Namespace) -> None:
    speech = {"api_key": "not-needed", "base_url": options.speech}
    session: AgentSession = AgentSession(
        stt=openai.STT(model="whisper-1", **speech),
        vad=inference.VAD(),
        llm=openai.LLM(model="fake", api_key="not-needed", base_url=options.model),
        tts=openai.TTS(model="tts-1", voice="alloy", response_format="pcm", **speech),
        turn_handling={} if options.turns == "judged" else vad_alone(),
    )
    session.input.audio = Microphone(connection)
    session.output.audio = Loudspeaker(connection)
    async with utils.http_context.open():
        await session.start(Agent(instructions=""), record=False)
        try:
            await connection.wait_closed()
        finally:
            await session.aclose()


def vad_alone() -> dict[str, object]:
    return {"turn_detection": "vad", "endpointing": {"min_delay": SILENCE_SEC}}


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--speech", required=True, help="the base URL of the server that hears and speaks")
    parser.add_argument("--model", required=True, help="the base URL of the server that answers")
    parser.add_argument("--turns", choices=("silence", "judged"), default="silence")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)

    async def handle(connection: ServerConnection) -> None:
        await converse(connection, options)

    async with serve(handle, "127.0.0.1", options.port, compression=None) as server:
        await server.serve_forever()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())

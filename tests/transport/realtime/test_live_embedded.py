"""A Live session with OpenAI's own client: real speech, a real voice, and a language model by URL."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from openai import AsyncOpenAI
from support.embedded_engine import EmbeddedEngine, ears
from support.live_server import live_server
from support.patience import PATIENCE_SEC
from support.realtime_client import live_client
from support.scripted_upstream import delta, finish, remote_llm, says, streams, upstream
from support.speech_clips import WORDS, at_24k, clip_bytes, silence
from support.voices import need

from omni_ws.config.model import VoiceChoice
from omni_ws.engine.composed.engine import ComposedEngine
from omni_ws.engine.tts.speech_engine import SpeechEngine
from omni_ws.engine.tts.voice_process import VoiceProcess

pytestmark = [pytest.mark.slow, pytest.mark.real_time]

FRAME = 4800
CALL = {"index": 0, "id": "call_7", "type": "function", "function": {"name": "delegate", "arguments": '{"task": "x"}'}}


class Caller:
    """OpenAI's client, which speaks and listens at the same time."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.sound = bytearray()
        self.transcripts = {"input": "", "output": ""}
        self.delegations: list[str] = []
        self.changed = asyncio.Event()

    async def speak(self, first: bytes) -> None:
        """Sends this audio, and then silence for ever, at the pace of a microphone."""
        audio, position = at_24k(first), 0
        while True:
            piece = audio[position : position + FRAME].ljust(FRAME, b"\0")
            position += FRAME
            await self.connection.session.input_audio.append(audio=base64.b64encode(piece).decode())
            await asyncio.sleep(0.1)

    async def listen(self) -> None:
        async for event in self.connection:
            match event.type:
                case "session.output_audio.delta":
                    self.sound += base64.b64decode(event.delta)
                case "session.input_transcript.delta" | "session.output_transcript.delta":
                    self.transcripts[event.type.split(".")[1].partition("_")[0]] += event.delta
                case "session.delegation.created":
                    self.delegations.append(event.delegation.id)
                case "error":
                    raise AssertionError(event.error)
            self.changed.set()

    async def until_said(self, end: str) -> None:
        while not self.transcripts["output"].endswith(end):
            self.changed.clear()
            await self.changed.wait()


@asynccontextmanager
async def caller(port: int, first: bytes) -> AsyncIterator[Caller]:
    address = f"://127.0.0.1:{port}/v1"
    client = AsyncOpenAI(base_url=f"http{address}", websocket_base_url=f"ws{address}", api_key="none")
    async with client, client.live.connect() as connection, asyncio.timeout(PATIENCE_SEC):
        await connection.session.start(session={"model": "gpt-live-1", "instructions": "Be brief."})
        talk = Caller(connection)
        tasks = [asyncio.create_task(talk.listen()), asyncio.create_task(talk.speak(first))]
        try:
            yield talk
            await connection.session.close()
            await tasks[0]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def test_openais_client_talks_and_has_work_done() -> None:
    answers = [
        streams(delta(role="assistant", content="One moment."), delta(tool_calls=[CALL]), finish("tool_calls")),
        says("It is ", "in Lisbon."),
    ]
    async with upstream(*answers) as model, remote_llm(model, options=("tools",)) as llm:
        voice = SpeechEngine(VoiceProcess(need(VoiceChoice.ESPEAK)))
        engine = ComposedEngine(llm, asr=ears(), tts=voice)
        async with live_server(engine) as server, caller(server.port, silence(0.5) + clip_bytes("goforward")) as talk:
            await talk.until_said("One moment.")
            assert talk.transcripts["input"] == WORDS["goforward"]
            while not talk.delegations:
                talk.changed.clear()
                await talk.changed.wait()
            await talk.connection.session.commentary.append(
                content="The parcel is in Lisbon.", delegation_id=talk.delegations[0]
            )
            await talk.until_said("It is in Lisbon.")
            assert talk.transcripts["output"] == "One moment. It is in Lisbon."
            assert any(talk.sound)
            assert "The parcel is in Lisbon." in str(model.requests[-1]["messages"][-1])


async def test_rules_alone_are_refused_with_the_flag_that_gives_a_model() -> None:
    engine = EmbeddedEngine(voice=need(VoiceChoice.ESPEAK))
    async with live_server(engine) as server, live_client(server) as client:
        error = await client.failed("session.start", session={"model": "gpt-live-1"})
        assert (error["code"], error["param"]) == ("invalid_model", "session.model")
        assert "--llm" in error["message"]

"""Conversations at random: whatever a client does, the guarantees hold at every frame, and nothing is left behind."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
from support.inline_workers import InlineWorkers
from support.live_server import live_server
from support.wandering_client import WanderingClient

from omni_ws.core.chunks import ToolCallFragment, Word
from omni_ws.engine.base import AudioOutput, Engine, EngineOutput, TextOutput, ToolCallOutput
from omni_ws.engine.fake import EchoEngine, EchoSettings, ScriptedEngine

STEPS = 120


def _speech() -> list[EngineOutput]:
    script: list[EngineOutput] = [TextOutput("these are some words ")]
    for number in range(12):
        words = (Word("words", number * 100, number * 100 + 90),)
        script.append(AudioOutput(np.zeros(2400, np.float32), 24_000, words))
    script.append(ToolCallOutput(ToolCallFragment(0, "call_1", "look", '{"a":')))
    script.append(ToolCallOutput(ToolCallFragment(0, arguments="1}")))
    return script


def _long_speech() -> list[EngineOutput]:
    """More than a socket takes before it is read."""
    script: list[EngineOutput] = []
    for number in range(100):
        script.append(TextOutput(f"word{number} "))
        words = (Word(f"word{number}", number * 500, number * 500 + 490),)
        script.append(AudioOutput(np.zeros(12_000, np.float32), 24_000, words))
    return script


async def _a_while() -> None:
    await asyncio.sleep(0.2)


def _engine(name: str) -> Engine:
    match name:
        case "echo":
            return EchoEngine()
        case "slow echo":
            return EchoEngine(EchoSettings(chunk_ms=40, chunk_interval_ms=30, first_chunk_delay_ms=100))
        case "talks long":
            return ScriptedEngine(_long_speech())
        case "talks":
            return ScriptedEngine(_speech())
        case _:
            return ScriptedEngine([_a_while, *_speech()[:5], _a_while, *_speech()[5:], _a_while])


ENGINES = ["echo", "slow echo", "talks", "talks long", "talks slowly"]


async def converse(engine: Engine, seed: int, *, steps: int = STEPS) -> None:
    async with live_server(engine, streaming_input={"resume_grace_sec": 30, "ping_interval_sec": 0}) as server:
        server.app.sessions.speech_workers = InlineWorkers()
        client = WanderingClient(server, random.Random(seed))
        await client.begin()
        try:
            for _ in range(steps):
                await client.wander()
            await client.settle()
            await server.until(lambda: engine.active_requests == 0, "an engine that is free")
            (living,) = server.app.native._live._living.values()
            session = living.session
            assert session.conversation.stream.held_bytes == 0
            assert not session.conversation.busy
            assert server.held_bytes == session.outbox.journaled
        except BaseException as failure:
            failure.add_note(f"seed {seed}: {' '.join(client.story)}")
            raise
        await client.end()


@pytest.mark.virtual_clock
@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("seed", range(3))
async def test_any_conversation(name: str, seed: int) -> None:
    await converse(_engine(name), seed)

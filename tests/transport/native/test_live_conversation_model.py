"""Conversations at random: whatever a client does, the guarantees hold at every frame, and nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import random
from contextlib import aclosing
from itertools import cycle

import numpy as np
import pytest
from support.capable_engine import HearingEngine
from support.inline_workers import InlineWorkers
from support.live_server import live_server
from support.wandering_client import WanderingClient
from support.weighed import weighed

from omni_ws.core.chunks import ToolCallFragment, Word
from omni_ws.engine.base import AudioOutput, Engine, EngineOutput, TextOutput, ToolCallOutput, TranscriptOutput
from omni_ws.engine.fake import EchoEngine, EchoSettings, ScriptedEngine
from omni_ws.service.conversation.conversation import MAX_CONFIGURATIONS

pytestmark = pytest.mark.slow

STEPS = 120
#: What texts, marks and ids of a history of 200 tokens, and of the answers kept beside it, take at most.
MOST_WEIGHED = 256 << 10
#: Where the types of a history's items are from: how many a history of 200 tokens has depends on their lengths.
OF_HISTORY = ("omni_ws.core.history", "omni_ws.core.history", "omni_ws.core.chunks", "omni_ws.core.chunks")


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


def _hearing_engine() -> Engine:
    """It takes a while to hear whether anything was said, which is the case every other time."""
    words = [_a_while, TranscriptOutput("some", interim=True), _a_while, TranscriptOutput("some words"), *_speech()]
    engine = HearingEngine([*_speech()[:5], _a_while, *_speech()[5:]])
    engine.heard_in_turn = cycle([(_a_while,), words, (), words])
    return engine


def _engine(name: str) -> Engine:
    match name:
        case "hears":
            return _hearing_engine()
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


ENGINES = ["hears", "echo", "slow echo", "talks", "talks long", "talks slowly"]


async def converse(engine: Engine, seed: int, *, kept_bytes: int = 8 << 20, drain: bool = False) -> None:
    fields = {"resume_grace_sec": 30, "ping_interval_sec": 0, "max_output_bytes": kept_bytes}
    async with (
        live_server(engine, streaming_input=fields, still_answers=not drain) as server,
        aclosing(WanderingClient(server, random.Random(seed), may_lose=kept_bytes < 8 << 20)) as client,
    ):
        server.app.sessions.speech_workers = InlineWorkers()
        await client.begin()
        try:
            for _ in range(STEPS):
                await client.wander()
            if drain:
                draining = asyncio.create_task(server.running.drain(60))
                await client.hear_the_end()
                await draining
                return
            await client.settle()
            await server.until(lambda: engine.active_requests == 0, "an engine that is free")
            (living,) = server.native._live._living.values()
            session = living.session
            assert session.conversation.stream.held_bytes == 0
            assert not session.conversation.busy
            ledger = session.conversation.ledger
            assert server.held_bytes == session.outbox.journaled + ledger.history.held_bytes + weighed(ledger)
        except BaseException as failure:
            failure.add_note(f"seed {seed}: {' '.join(client.story)}")
            raise
        await client.end()


@pytest.mark.virtual_clock
@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("seed", range(2))
async def test_any_conversation(name: str, seed: int) -> None:
    await converse(_engine(name), seed)


@pytest.mark.virtual_clock
@pytest.mark.parametrize("name", ENGINES)
async def test_any_conversation_of_which_little_is_kept(name: str) -> None:
    await converse(_engine(name), 0, kept_bytes=5000)


@pytest.mark.virtual_clock
@pytest.mark.parametrize("name", ENGINES)
async def test_any_conversation_that_is_drained(name: str) -> None:
    await converse(_engine(name), 0, drain=True)


@pytest.mark.slow
@pytest.mark.virtual_clock
async def test_a_long_conversation_of_any_kind_grows_no_memory() -> None:
    """Turns, interruptions, gaps and broken connections, all at once."""
    engine = _engine("talks slowly")
    assert isinstance(engine, ScriptedEngine)
    fields = {"resume_grace_sec": 30, "ping_interval_sec": 0}
    async with (
        live_server(engine, streaming_input=fields, limits={"max_history_tokens": 200}) as server,
        aclosing(WanderingClient(server, random.Random(4))) as client,
    ):
        server.app.sessions.speech_workers = InlineWorkers()
        await client.begin()

        async def talk(*, until: float) -> tuple[int, int, int]:
            """What is held at its end: a history's objects, others of this project, and bytes besides the history."""
            while asyncio.get_running_loop().time() < until:
                await client.wander()
                await asyncio.sleep(2)
                engine.requests.clear()
            await client.settle()
            await client.acknowledge_all()
            engine.requests.clear()
            gc.collect()
            (living,) = server.native._live._living.values()
            # Those of the latest requests are kept, so many at most: few of them are different at first.
            kept = living.session.conversation._configurations
            assert len(kept) <= MAX_CONFIGURATIONS
            kept.clear()
            modules = [str(type(one).__module__) for one in gc.get_objects()]
            of_history = sum(module in OF_HISTORY for module in modules)
            ours = sum(module.startswith("omni_ws") for module in modules)
            ledger = living.session.conversation.ledger
            assert ledger.history.held_bytes <= 2 * (8 * 32_000 + 8 * 256)  # 200 tokens, and the latest turn
            assert weighed(ledger) <= MOST_WEIGHED
            return of_history, ours - of_history, server.held_bytes - ledger.history.held_bytes - weighed(ledger)

        of_history, others, held = await talk(until=300)
        assert held == 0
        later_of_history, later_others, later_held = await talk(until=1500)
        assert later_others <= others + 20
        assert later_of_history <= of_history + 200
        assert later_held == 0
        assert client.connections > 20
        await client.end()

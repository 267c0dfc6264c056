"""Replicas that share a store, and die: no conversation loses a word.

The long form is ``python -m benchmarks fleet``.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.live_server import live_server

from benchmarks.fleet.chaos import Chaos, Plan
from benchmarks.fleet.processes import fleet_of, missing
from benchmarks.fleet.talkers import Talker, Tally
from omni_ws.engine.fake import EchoEngine, EchoSettings

WORD_MS = 50
KINDS = ("kill", "stop", "restart", "store")


async def tally_of(plan: Plan, folder: Path, *, store: str, replicas: int = 3, seed: int = 1) -> Tally:
    async with fleet_of(replicas, folder, store=store, word_ms=WORD_MS) as (processes, own):
        return await Chaos(plan, processes, own, seed=seed).run()


@pytest.mark.slow
@pytest.mark.real_time
async def test_no_word_is_lost_when_replicas_and_their_store_die(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if (why := missing()) is not None:
        pytest.skip(why)
    plan = Plan(conversations=8, kills=2, stops=1, restarts=2, store_restarts=1, word_ms=WORD_MS)
    tally = await tally_of(plan, tmp_path, store="redis")
    with capsys.disabled():
        print(f"\n{dict(tally.counts)}; seconds to the next word: {tally.gaps}")
    assert tally.wrong == []
    assert [tally.counts[f"fault: {kind}"] for kind in KINDS] == [2, 1, 2, 1]
    assert tally.counts["resumed"] >= 4
    assert tally.counts["conversations"] == 8


@pytest.mark.slow
@pytest.mark.real_time
async def test_no_word_is_lost_when_the_only_server_is_killed_and_starts_again(tmp_path: Path) -> None:
    plan = Plan(conversations=4, kills=2, stops=0, restarts=1, store_restarts=0, word_ms=WORD_MS)
    tally = await tally_of(plan, tmp_path, store=f"sqlite:{tmp_path / 'store' / 'sessions.db'}", replicas=1)
    assert tally.wrong == []
    assert tally.counts["resumed"] >= 3 * 4


@pytest.mark.slow
@pytest.mark.real_time
async def test_a_conversation_that_begins_anew_is_found(tmp_path: Path) -> None:
    plan = Plan(conversations=4, kills=1, stops=0, restarts=0, store_restarts=0, word_ms=WORD_MS)
    tally = await tally_of(plan, tmp_path, store="memory", replicas=1)
    assert tally.wrong
    assert all("a new session in place of" in line for line in tally.wrong)


async def test_a_word_that_was_not_said_is_found() -> None:
    heard = asyncio.Event()
    tally = Tally()
    async with live_server(EchoEngine(EchoSettings(reply="nobody said this"))) as server:
        talker = Talker("t0", [server.websocket_url], tally, seed=1, word_sec=0, heard=heard.set)
        talking = asyncio.create_task(talker.run())
        await heard.wait()
        talker.stop = True
        await talking
    assert any("heard b'nobody" in line for line in tally.wrong)

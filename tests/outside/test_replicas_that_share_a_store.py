"""Three replicas that share a store, behind nginx and HAProxy, as ``deploy/fleet`` configures them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from support.mode_b_client import JSON, SESSIONS, text
from support.outside import FRONTS, front, tool
from support.raw_http import call

from benchmarks.fleet.chaos import Chaos, Plan
from benchmarks.fleet.processes import fleet_of, missing

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("kind", FRONTS)]

WORD_MS = 50


@pytest.fixture(autouse=True)
def _outside() -> None:
    """They are long, and need not run with all others again."""
    tool("OUTSIDE_PYTHON")
    if (why := missing()) is not None:
        pytest.skip(why)


@pytest.mark.real_time
async def test_no_word_is_lost_behind_a_front(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = Plan(conversations=8, kills=2, stops=1, restarts=3, store_restarts=0, word_ms=WORD_MS)
    async with (
        fleet_of(3, tmp_path, store="redis", word_ms=WORD_MS) as (replicas, store),
        front(f"fleet/{kind}", tmp_path, [one.port for one in replicas]) as port,
    ):
        urls = [f"ws://127.0.0.1:{port}/v1/streaming_input"]
        tally = await Chaos(plan, replicas, store, urls=urls, seed=1).run()
    with capsys.disabled():
        print(f"\n{kind}: {dict(tally.counts)}; seconds to the next word: {tally.gaps}")
    assert tally.wrong == []
    assert tally.counts["resumed"] >= 8


async def test_a_session_over_several_requests_stays_at_its_replica(kind: str, tmp_path: Path) -> None:
    holders = Counter[str]()
    async with (
        fleet_of(3, tmp_path, store="redis", word_ms=0) as (replicas, _),
        front(f"fleet/{kind}", tmp_path, [one.port for one in replicas]) as port,
    ):
        ids: list[str] = []
        for _ in range(9):
            created = await call(port, "POST", SESSIONS, {"start_policy": "on_first_chunk"})
            assert created.status == 201, created.body
            ids.append(created.json()["session_id"])
            holders[ids[-1][0]] += 1
        for one in ids:
            for number, word in enumerate(("one", " two")):
                answer = await call(port, "POST", f"{SESSIONS}/{one}/chunks", text(word, number))
                assert answer.status == 202, answer.body
            assert (await call(port, "POST", f"{SESSIONS}/{one}/finish")).status == 200
            whole = await call(port, "GET", f"{SESSIONS}/{one}/result?wait=15", None, JSON)
            assert whole.json()["choices"][0]["message"]["content"] == "one two"
    assert set(holders) == {"a", "b", "c"}, holders

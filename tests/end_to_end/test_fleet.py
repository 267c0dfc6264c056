"""Replicas that share a store, and die: no conversation loses a word.

The long form is ``python -m benchmarks fleet``.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.commands import running
from support.live_server import live_server
from support.outside import node_command

from benchmarks.fleet.chaos import Chaos, Plan
from benchmarks.fleet.processes import Replica, fleet_of, missing
from benchmarks.fleet.talkers import Talker, Tally
from omni_ws.engine.fake import EchoEngine, EchoSettings

PACKAGE = Path(__file__).parents[2] / "clients" / "js"
#: Asks three things, and says when half of an answer is there, and how each answer ended.
ASK = """
import { VoiceClient } from "PACKAGE/client.js";
const client = new VoiceClient({ url: process.argv[2] });
let told = -1;
client.session.addEventListener("resumed", () => console.log("resumed"));
const created = new Promise((resolve) => client.session.addEventListener("created", ({ detail }) => {
  console.log(detail.lost ? "lost" : "created");
  resolve();
}));
client.addEventListener("turn", ({ detail: { turn } }) => {
  if (turn.number === told || turn.answer.text.length < 100) return;
  told = turn.number;
  console.log("half");
});
client.open();
await created;
for (let number = 0; number < 3; number++) {
  const text = Array.from({ length: 40 }, (_, place) => `${number}.${place}`).join(" ");
  const answered = new Promise((resolve) => {
    client.addEventListener("answered", ({ detail: { turn } }) => resolve(turn.answer), { once: true });
  });
  await client.write(text);
  const answer = await answered;
  console.log(answer.text === text ? answer.state : JSON.stringify(answer));
}
client.close();
"""
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


@pytest.mark.slow
@pytest.mark.real_time
async def test_the_client_of_pages_goes_on_where_its_server_died(tmp_path: Path) -> None:
    node = await node_command()
    script = tmp_path / "ask.mjs"
    script.write_text(ASK.replace("PACKAGE", str(PACKAGE)), encoding="utf-8")
    replica = Replica("a", tmp_path, store=f"sqlite:{tmp_path / 'store' / 'sessions.db'}", word_ms=WORD_MS)
    lines: list[str] = []
    try:
        await replica.start()
        command = [*node, str(script), f"http://127.0.0.1:{replica.port}/"]
        async with running(*command, stdout=asyncio.subprocess.PIPE) as client:
            assert client.stdout is not None
            async for line in client.stdout:
                lines.append(line.decode().strip())
                if lines.count("half") == 1 and lines[-1] == "half":
                    await replica.kill()
                    await replica.start()
                elif lines.count("half") == 2 and lines[-1] == "half":
                    assert await replica.end() == 0
                    await replica.start()
    finally:
        await replica.kill()
    assert lines == ["created", "half", "resumed", "done", "half", "resumed", "done", "half", "done"]

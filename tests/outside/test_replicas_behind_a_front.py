"""Two replicas behind nginx and HAProxy, as ``deploy/`` configures them.

``make test-outside`` installs both; elsewhere, and where one is missing, these tests are skipped.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.live_server import LiveServer, live_server
from support.mode_b_client import EVENTS, JSON, SESSIONS, text
from support.outside import FRONTS, front, tool
from support.patience import PATIENCE_SEC
from support.raw_http import call, chunked, raw_client, request
from support.tcp_relay import Cut, Direction, tcp_relay

from benchmarks.fleet.processes import fleet_of
from omni_ws.client import ClientSession, Final, Resumed, TextChunk, connect
from omni_ws.errors import ShuttingDown

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("kind", FRONTS)]

STREAMING = ("X-Streaming-Input: true", "Transfer-Encoding: chunked", EVENTS)
FIRST = b'{"start_policy":"on_first_chunk"}\n{"modality":"text","text":"one"}\n'
KEEPS = {"resume_grace_sec": 30}
USERS = 8
#: Turns of each user between two restarts, and words of each turn.
TURNS, WORDS = 3, 12


@pytest.fixture(autouse=True)
def _outside() -> None:
    """Some are long, and need not run with all others again."""
    tool("OUTSIDE_PYTHON")


@pytest.fixture
async def replicas() -> AsyncIterator[list[LiveServer]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(live_server(replica_id=one, streaming_input=KEEPS)) for one in "ab"]


def url(port: int) -> str:
    return f"ws://127.0.0.1:{port}/v1/streaming_input"


async def test_a_body_and_its_answer_go_through_as_they_come(
    kind: str, replicas: list[LiveServer], tmp_path: Path
) -> None:
    """The second word is sent once the first has been answered: neither way is anything held back."""
    async with front(kind, tmp_path, [one.port for one in replicas]) as port, raw_client(port) as client:
        await client.send(request("POST", "/v1/chat/completions", *STREAMING), chunked(FIRST, end=False))
        assert (await client.head())[1] == 200
        said = ""
        while "one" not in said:
            said += (await client.chunk()).decode()
        await client.send(chunked(b'{"modality":"text","text":" two","end_of_input":true}\n'))
        async for piece in client.chunks():
            said += piece.decode()
    assert said.rstrip().endswith("data: [DONE]")
    assert " two" in said


async def test_a_websocket_goes_through_as_it_comes(kind: str, replicas: list[LiveServer], tmp_path: Path) -> None:
    async with (
        front(kind, tmp_path, [one.port for one in replicas]) as port,
        connect(url(port), config={"start_policy": "on_first_chunk", "modalities": ["text"]}) as session,
    ):
        await session.send_text("one")
        reasons: list[str] = []
        async for event in session.response():
            match event:
                case TextChunk(text="one"):
                    await session.send_text(" two", end=True)
                case Final(finish_reason=reason):
                    reasons.append(reason)
    assert reasons == ["stop"]


async def test_a_session_over_several_requests_stays_at_its_replica(
    kind: str, replicas: list[LiveServer], tmp_path: Path
) -> None:
    holders = Counter[str]()
    async with front(kind, tmp_path, [one.port for one in replicas]) as port:
        ids: list[str] = []
        for _ in range(6):
            created = await call(port, "POST", SESSIONS, {"start_policy": "on_first_chunk"})
            assert created.status == 201, created.body
            ids.append(created.json()["session_id"])
            holders[ids[-1][0]] += 1
        for number, word in enumerate(("one", " two", " three")):
            for one in ids:
                answer = await call(port, "POST", f"{SESSIONS}/{one}/chunks", text(word, number))
                assert answer.status == 202, answer.body
        for one in ids:
            assert (await call(port, "POST", f"{SESSIONS}/{one}/finish")).status == 200
            whole = await call(port, "GET", f"{SESSIONS}/{one}/result?wait=15", None, JSON)
            assert whole.json()["choices"][0]["message"]["content"] == "one two three"
            events = await call(port, "GET", f"{SESSIONS}/{one}/result", None, EVENTS)
            assert events.body.rstrip().endswith(b"data: [DONE]")
            assert (await call(port, "DELETE", f"{SESSIONS}/{one}")).status == 204
    assert set(holders) == {"a", "b"}, holders


async def test_a_session_whose_connection_is_cut_resumes_at_its_replica(
    kind: str, replicas: list[LiveServer], tmp_path: Path
) -> None:
    ids: list[str] = []
    async with (
        front(kind, tmp_path, [one.port for one in replicas]) as port,
        tcp_relay(port) as proxy,
        AsyncExitStack() as open_sessions,
    ):
        for reset in (True, False, True, False):
            # After the handshake and some of the answer.
            proxy.cuts.append(Cut(Direction.TO_CLIENT, 4000, reset=reset))
            session = await open_sessions.enter_async_context(
                connect(url(proxy.port), reconnect=True, config={"modalities": ["text"]})
            )
            ids.append(session.session_id)
            wanted = " ".join(f"word{number}" for number in range(200))
            await session.send_text(wanted, end=True)
            events = [event async for event in session.response()]
            assert "".join(event.text for event in events if isinstance(event, TextChunk)) == wanted
            assert sum(isinstance(event, Resumed) for event in events) == 1
            assert session.session_id == ids[-1]
        assert proxy.made == 4
    assert {one[0] for one in ids} == {"a", "b"}


@dataclass
class Count:
    """What all users together have said and heard, and how."""

    sent: int = 0
    heard: int = 0
    turns: int = 0
    #: A turn that was refused because its replica drains, and said again.
    said_again: int = 0
    #: Fresh sessions in place of those whose replica drained.
    moved: int = 0
    holders: Counter[str] = field(default_factory=Counter)


class User:
    """Says words, one chunk each, and compares what comes back, until told to stop."""

    def __init__(self, name: int, port: int, count: Count) -> None:
        self._name = name
        self._port = port
        self._count = count
        self._said = 0
        self._session_id = ""
        self.turns = 0
        self.turn_over = asyncio.Condition()
        self.stop = False

    async def run(self) -> None:
        async with connect(url(self._port), reconnect=True, config={"modalities": ["text"]}) as session:
            self._session_id = session.session_id
            while not self.stop:
                words = [f"u{self._name}w{self._said + number}" for number in range(WORDS)]
                self._said += WORDS
                self._count.sent += WORDS
                heard = await self._heard(session, words)
                assert heard == words
                self._count.heard += len(heard)
                self._count.turns += 1
                self._count.holders[session.session_id[0]] += 1
                self._count.moved += session.session_id != self._session_id
                self._session_id = session.session_id
                async with self.turn_over:
                    self.turns += 1
                    self.turn_over.notify_all()

    async def _heard(self, session: ClientSession, words: list[str]) -> list[str]:
        while True:
            try:
                for number, word in enumerate(words):
                    await session.send_text(f"{word} ", end=number == WORDS - 1)
                return (await session.answer()).text.split()
            except ShuttingDown:
                self._count.said_again += 1

    async def after(self, turns: int) -> None:
        async with self.turn_over:
            wanted = self.turns + turns
            await self.turn_over.wait_for(lambda: self.turns >= wanted)


@pytest.mark.real_time
async def test_a_rolling_restart_loses_no_word(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    count = Count()
    async with (
        fleet_of(2, tmp_path, store="memory", word_ms=0) as (replicas, _),
        front(kind, tmp_path, [one.port for one in replicas]) as port,
    ):
        users = [User(number, port, count) for number in range(USERS)]

        async def everybody_goes_on() -> None:
            await asyncio.gather(*(user.after(TURNS) for user in users))

        async with asyncio.timeout(PATIENCE_SEC), asyncio.TaskGroup() as group:
            for user in users:
                group.create_task(user.run())
            await everybody_goes_on()
            for replica in replicas:
                assert await replica.end() == 0
                await replica.start()
                await everybody_goes_on()
            for user in users:
                user.stop = True
    with capsys.disabled():
        print(f"\n{kind}: {count}")
    assert count.heard == count.sent
    assert count.moved >= USERS
    assert set(count.holders) == {"a", "b"}

"""``omni-ws serve`` with a store of sessions in a file: killed in the middle of an answer, it goes on with it."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import sys
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.commands import running
from support.mode_b_client import EVENTS, ModeBSession, arriving, create, text
from support.native_client import NativeClient, connecting, native_client
from support.patience import PATIENCE_SEC
from support.raw_http import DONE, Event, content, raw_client, request

pytestmark = [pytest.mark.real_time, pytest.mark.slow]

#: An answer that goes on as the input does: the engine echoes what it is given.
ECHOES = {"modalities": ["text"], "start_policy": "on_first_chunk", "after_start": "extend"}


@dataclass
class Serving:
    process: Process
    port: int

    @property
    def websocket_url(self) -> str:
        return f"ws://127.0.0.1:{self.port}/v1/streaming_input"


@contextlib.asynccontextmanager
async def serving(store: Path) -> AsyncIterator[Serving]:
    """``omni-ws serve`` over a store in this file."""
    command = (sys.executable, "-m", "omni_ws", "serve", "--engine", "fake", "--port", "0")
    options: dict[str, Any] = {"stderr": asyncio.subprocess.PIPE}
    kept = (f"--sessions.store=sqlite:{store}", "--sessions.store-slow-sec=60")
    async with running(*command, *kept, **options) as process:
        assert process.stderr is not None
        said = ""
        async with asyncio.timeout(PATIENCE_SEC):
            while "in a browser" not in said:
                said = (await process.stderr.readline()).decode()
                assert said
        (port,) = re.findall(r":(\d+) in a browser", said)
        yield Serving(process, int(port))


@contextlib.asynccontextmanager
async def resumed(server: Serving, created: dict[str, Any], before: NativeClient) -> AsyncIterator[NativeClient]:
    """The client ``before``, back over another connection."""
    last_output = before.guarantees.next_output - 1
    session_id, token = before.created["session_id"], created["resume_token"]
    query = f"?session_id={session_id}&resume_token={token}&last_output={last_output}"
    async with connecting(server, query) as connection:
        client = NativeClient(connection)
        client.guarantees = before.guarantees
        client.created = before.created
        client.frames.append(await client.receive())
        assert client.frames[-1]["type"] == "session_resumed", client.frames
        client.next_sequence_id = client.frames[-1]["next_sequence_id"]
        yield client


async def words(client: NativeClient, whole: str, said: list[str]) -> None:
    """Wait until the whole text that the client has heard is ``whole``."""
    while "".join(said) != whole:
        frame = await client.until("output_chunk")
        assert not frame.get("final"), "the answer ended early"
        said.append(frame["text"])
        assert whole.startswith("".join(said)), said


async def test_a_server_that_is_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    store = tmp_path / "private" / "sessions.sqlite"
    said: list[str] = []
    sent = ["one ", "two ", "three ", "four ", "five ", "six "]
    async with serving(store) as server, native_client(server) as client:
        await client.configure(**ECHOES)
        for word in sent[:3]:
            await client.chunk(word)
        await words(client, "one two three ", said)
        server.process.kill()
        await server.process.wait()
    assert store.stat().st_mode & 0o777 == 0o600
    assert store.parent.stat().st_mode & 0o777 == 0o700
    async with serving(store) as server:
        async with resumed(server, client.created, client) as again:
            assert again.next_sequence_id in range(4)
            resent = sent[again.next_sequence_id : 3]
            for word in [*resent, *sent[3:5]]:
                await again.chunk(word)
            await words(again, "one two three four five ", said)
            token = again.frames[0]
            server.process.send_signal(signal.SIGTERM)  # it hands the session over at once
            closing = await again.until("session_closing")
            assert (closing["reason"], closing["resume"], closing["time_left_ms"]) == ("shutting_down", "now", 0)
            assert await again.closed() == 1012
            assert await server.process.wait() == 0
        async with serving(store) as last, resumed(last, token, again) as end:
            await end.chunk("six ", end=True)
            while not (frame := await end.until("output_chunk")).get("final"):
                said.append(frame["text"])
            assert "".join(said) == "".join(sent)
            assert frame["finish_reason"] == "stop"


class Reader:
    """A reader of a session over several requests, who is sent each event once, whatever becomes of the servers."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    @property
    def said(self) -> str:
        return content([one for one in self.events if one.data != DONE.data])

    async def read(self, session: ModeBSession, words: str) -> None:
        """Read on from the last event until what was said is ``words``."""
        last = (f"Last-Event-ID: {self.events[-1].id}",) if self.events else ()
        async with raw_client(session.server.port) as client, asyncio.timeout(PATIENCE_SEC):
            await client.send(request("GET", session.path + "/result", EVENTS, *last))
            assert (await client.head())[1] == 200
            async for event in arriving(client):
                self.events.append(event)
                assert words.startswith(self.said)
                if self.said == words and not session.created["input_ended"]:
                    return
        assert self.said == words
        assert [one.id for one in self.events] == list(range(1, len(self.events) + 1))


async def test_an_answer_over_several_requests_goes_on_behind_what_was_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, reader = tmp_path / "private" / "sessions.sqlite", Reader()
    sent = ["one ", "two ", "three ", "four "]
    async with serving(store) as server:
        session = await create(server, {**ECHOES, "chunks": [text(word, i) for i, word in enumerate(sent[:2])]})
        await session.append(text(sent[2], 2))
        await reader.read(session, "one two three ")
        server.process.kill()
        await server.process.wait()
    async with serving(store) as server:
        began = time.monotonic()
        session = ModeBSession(server, session.created)
        async with asyncio.timeout(PATIENCE_SEC):
            while (answer := await session.call("GET")).status == 409:  # who died counts as alive for a while
                assert answer.json()["error"]["code"] == "session_conflict"
                await asyncio.sleep(float(answer.headers["retry-after"]))
        assert answer.json()["next_sequence_id"] == 3
        session.created = await session.append(text(sent[3], 3, end_of_input=True))
        await reader.read(session, "".join(sent))
        with capsys.disabled():
            print(f"\nMode B: the rest of the answer {time.monotonic() - began:.2f} s after the server's start")
        assert reader.events[-1].data == DONE.data
        assert await session.content() == "".join(sent)

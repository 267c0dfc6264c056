"""Long talks are summed up in the background: when, in whose way not, and what becomes of it."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.live_server import LiveServer, live_server
from support.native_client import NativeClient, native_client
from support.raw_http import call
from support.scripted_engines import ActingEngine

from omni_ws.config.keys import ApiKey
from omni_ws.core.chunks import FinishReason, Usage
from omni_ws.core.history import NOTES_HEAD
from omni_ws.engine.base import Finished, GenerationRequest, OutputWriter, TextOutput
from omni_ws.errors import EngineOverloaded
from omni_ws.service.conversation import summing
from omni_ws.service.sessions.factory import RETRY_SEC

#: The words of a history that requests see. It is summed up from 64 on, down to 32.
ROOM = 128
#: What a turn has: ten words of the user, and two of the assistant.
TURNS = 6
KEY = "a key of twenty characters"


class Rememberer(ActingEngine):
    """Notes what the user said first in each portion. ``gate`` holds its notes back, ``answering`` its answers.

    ``gate`` also holds back what it computes ahead, if it shares the cores.
    """

    def __init__(self, **changes: Any) -> None:
        super().__init__("rememberer", **{"sums_up": True, **changes})
        self.gate = asyncio.Event()
        self.gate.set()
        self.answering = asyncio.Event()
        self.answering.set()
        #: The questions for notes, and for shorter notes.
        self.noted: list[str] = []
        self.condensed: list[str] = []
        #: The requests in which it computes ahead.
        self.ahead: list[GenerationRequest] = []
        #: What is raised in place of the next notes.
        self.failure: Exception | None = None
        self.notes: Callable[[str], str] = lambda talk: f"- It began with {talk.split('User: ')[1].split()[0]}"

    async def act(self, request: GenerationRequest, out: OutputWriter) -> None:
        asked = "".join([chunk.payload.decode() async for chunk in request.input])
        if request.instructions.startswith(summing.INSTRUCTIONS):
            self.noted.append(asked)
            await self.gate.wait()
            if (failure := self.failure) is not None:
                self.failure = None
                raise failure
            out.write(TextOutput(self.notes(asked)))
        elif request.instructions == summing.CONDENSING:
            self.condensed.append(asked)
            out.write(TextOutput("- All of it"))
        elif asked == "…":
            self.ahead.append(request)
            await self.gate.wait()
        else:
            await self.answering.wait()
            out.write(TextOutput("Yes indeed."))
        out.write(Finished(FinishReason.STOP, Usage(input_tokens=len(asked.split()), output_tokens=2)))

    @property
    def talk(self) -> list[GenerationRequest]:
        """The requests of users."""
        return [one for one in self.requests if not one.instructions and one not in self.ahead]


async def say(client: NativeClient, number: int) -> None:
    await client.say(f"word{number} and then some more of it all in all")
    await client.answer()


async def talk(client: NativeClient, turns: int = TURNS, *, first: int = 0) -> None:
    for number in range(first, first + turns):
        await say(client, number)


async def tell_in_russian(client: NativeClient) -> None:
    """Talk in a language of which the rules know nothing, so that the model is asked in any case."""
    for number in range(TURNS):
        await client.say(f"слово{number} и потом ещё несколько слов в конце концов так")
        await client.answer()


@asynccontextmanager
async def talking(engine: Rememberer, **fields: Any) -> AsyncIterator[tuple[LiveServer, NativeClient]]:
    limits = {"max_history_tokens": ROOM, **fields.pop("limits", {})}
    async with live_server(engine, limits=limits, **fields) as server, native_client(server) as client:
        await client.configure(modalities=["text"])
        yield server, client


def history_of(server: LiveServer) -> Any:
    found = [one.ledger.history for one in server.app.sessions.conversations]
    return max(found, key=lambda one: len(one.items))


async def noted(server: LiveServer) -> None:
    await server.until(lambda: bool(history_of(server).notes), "a summary")


async def outcome(server: LiveServer, name: str) -> float:
    text = (await call(server.port, "GET", "/metrics")).body.decode()
    line = f'omni_ws_summaries_total{{outcome="{name}"}} '
    return next((float(one.removeprefix(line)) for one in text.splitlines() if one.startswith(line)), 0.0)


async def test_the_older_part_of_a_talk_is_summed_up_in_a_pause() -> None:
    engine = Rememberer()
    async with talking(engine) as (server, client):
        await talk(client)
        await noted(server)
        await server.until(lambda: server.app.summaries.idle)
        await say(client, 99)
        assert await outcome(server, "written") == 1
    last = engine.talk[-1].history
    assert last[0].text.startswith(f"{NOTES_HEAD}- It began with word0")
    assert sum(len(one.text.split()) for one in last[1:]) < ROOM / 2
    assert "word0" not in " ".join(one.text for one in last[1:])


async def test_it_gives_way_to_the_user_and_begins_again() -> None:
    engine = Rememberer()
    engine.gate.clear()
    async with talking(engine) as (server, client):
        await talk(client)
        await server.until(lambda: len(engine.noted) == 1)
        await say(client, 100)
        await server.until(lambda: engine.aborted == 1)
        await server.until(lambda: len(engine.noted) == 2)
        assert engine.noted[1].startswith(engine.noted[0].partition("\n\nWrite one")[0])
        assert await outcome(server, "dropped") == 1
        engine.gate.set()
        await noted(server)


async def test_notes_on_portions_that_are_finished_are_kept() -> None:
    engine = Rememberer()

    def last_for_now(talk: str) -> str:
        engine.gate.clear()
        return talk.split("User: ")[1].split()[0]

    engine.notes = last_for_now
    async with talking(engine, limits={"max_history_tokens": 16 * ROOM}) as (server, client):
        await talk(client, 86)
        await server.until(lambda: len(engine.noted) == 2)
        assert history_of(server).notes == "", "all that is due takes effect at once"
        await say(client, 86)
        await server.until(lambda: len(engine.noted) == 3)
        engine.notes = lambda talk: talk.split("User: ")[1].split()[0]
        engine.gate.set()
        await noted(server)
        assert history_of(server).notes == "- word0\n- word33"
    firsts = [one.split("User: ")[1].split()[0] for one in engine.noted]
    assert firsts == ["word0", "word33", "word33"]


@pytest.mark.parametrize("shares", [True, False])
async def test_it_gives_way_to_others_where_they_share_the_cores(shares: bool) -> None:
    engine = Rememberer(shares_cores=shares)
    engine.gate.clear()
    async with talking(engine) as (server, client):
        await talk(client)
        await server.until(lambda: len(engine.noted) + len(engine.ahead) == 1)
        async with native_client(server) as other:
            await other.configure(modalities=["text"])
            engine.answering.clear()
            await other.say("hello")
            await server.until(lambda: engine.active_requests == (1 if shares else 2))
            await server.until(lambda: engine.aborted == shares)
            engine.answering.set()
            await other.answer()
        engine.gate.set()
        await server.until(lambda: server.app.summaries.idle)
        assert await outcome(server, "written") == 1
        assert len(engine.noted) == (0 if shares else 1), "a small model is not asked for notes"


async def test_it_gives_way_to_a_request_over_http() -> None:
    engine = Rememberer(shares_cores=True)
    engine.gate.clear()
    async with talking(engine) as (server, client):
        await tell_in_russian(client)
        await server.until(lambda: len(engine.noted) == 1)
        body = {"model": "any", "messages": [{"role": "user", "content": "hello"}], "modalities": ["text"]}
        answer = await call(server.port, "POST", "/v1/chat/completions", body)
        assert answer.status == 200
        await server.until(lambda: engine.aborted == 1)
        engine.gate.set()
        await noted(server)


async def test_notes_that_became_too_long_are_made_shorter() -> None:
    engine = Rememberer()
    engine.notes = lambda talk: "\n".join(f"- {talk.split('User: ')[1].split()[0]} fact {n} is so" for n in range(9))
    async with talking(engine) as (server, client):
        await talk(client)
        await server.until(lambda: history_of(server).notes == "- All of it")
        assert engine.condensed


async def test_rules_select_where_the_model_shares_the_cores_and_it_computes_ahead() -> None:
    engine = Rememberer(shares_cores=True)
    told = ["My sister Marta lives in Bergen.", "I am allergic to peanuts, so keep that in mind."]
    async with talking(engine) as (server, client):
        for text in (*told, *(f"Why do people like topic {number} so very much, then?" for number in range(9))):
            await client.say(text)
            await client.answer()
        await noted(server)
        await server.until(lambda: server.app.summaries.idle)
        assert await outcome(server, "written") >= 1
        await client.say("What am I allergic to?")
        await client.answer()
    assert engine.noted == []
    last = engine.talk[-1]
    first = last.history[0].text.removeprefix(NOTES_HEAD).splitlines()
    assert first[:2] == [f'- "{text}"' for text in told]
    began = [one for one in engine.ahead if one.history == last.history[: len(one.history)]]
    assert began, "what it computed ahead is the beginning of what was asked"
    assert (began[0].instructions, began[0].conversation) == (last.instructions, last.conversation)


async def test_selected_notes_that_became_too_long_lose_those_of_the_least_weight() -> None:
    engine = Rememberer(shares_cores=True)
    async with talking(engine) as (server, client):
        for number in range(24):
            said = f"I saw tree {number} then." if number else "My sister Marta has her birthday on May 1."
            await client.say(said)
            await client.answer()
            await server.until(lambda: server.app.summaries.idle)
        notes = history_of(server).notes.splitlines()
        kept = history_of(server)
        assert kept.notes_tokens <= ROOM / 4
    assert notes[0] == '- "My sister Marta has her birthday on May 1."'
    assert engine.noted == engine.condensed == []


async def test_what_fails_is_tried_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Rememberer()
    engine.failure = EngineOverloaded("no room")
    async with talking(engine) as (server, client):
        await talk(client)
        await server.until(lambda: engine.failure is None and server.app.summaries.idle)
        assert await outcome(server, "failed") == 1
        await say(client, 50)
        assert (len(engine.noted), history_of(server).notes) == (1, ""), f"not before {RETRY_SEC} seconds"
        server.app.summaries._not_before.clear()
        await say(client, 51)
        await noted(server)


async def test_a_session_may_end_while_it_is_summed_up() -> None:
    engine = Rememberer()
    engine.gate.clear()
    async with talking(engine) as (server, client):
        await talk(client)
        await server.until(lambda: len(engine.noted) == 1)
    assert engine.aborted == 1


async def test_a_truncation_meanwhile_is_heeded() -> None:
    engine = Rememberer()
    engine.gate.clear()
    async with talking(engine) as (server, client):
        await talk(client)
        await server.until(lambda: len(engine.noted) == 1)
        first = client.seen("response_started")[0]["request_id"]
        await client.send("history_truncate", request_id=first)
        await client.until("history_truncated")
        engine.gate.set()
        await server.until(lambda: server.app.summaries.idle)
        assert history_of(server).notes == ""
        await say(client, 1)
    assert engine.talk[-1].history == ()


async def test_off_by_the_client_and_without_a_model() -> None:
    engine = Rememberer()
    async with talking(engine) as (server, client):
        assert (await client.configure())["history_summary"] is True
        updated = await client.configure(history_summary=False)
        assert updated["history_summary"] is False
        await talk(client)
        assert (engine.noted, server.app.summaries.idle) == ([], True)
    echo = Rememberer(sums_up=False)
    async with talking(echo) as (server, client):
        assert (await client.configure())["history_summary"] is False
        await client.send("session_config", history_summary=True)
        error = await client.error()
        assert (error["code"], error["param"]) == ("unsupported_parameter", "history_summary")
        await talk(client)
        assert echo.noted == []


async def test_summaries_count_for_the_key_of_the_session() -> None:
    engine = Rememberer()
    keys = (ApiKey(name="ada", key_sha256=hashlib.sha256(KEY.encode()).digest(), tokens_per_day=1_000_000),)
    limits = {"max_history_tokens": ROOM}
    headers = {"Authorization": f"Bearer {KEY}"}
    async with (
        live_server(engine, limits=limits, keys=keys) as server,
        native_client(server, additional_headers=headers) as client,
    ):
        await client.configure(modalities=["text"])
        await talk(client)
        await noted(server)
        await server.until(lambda: server.app.summaries.idle)
    assert {one.owner for one in engine.requests} == {"ada"}


async def test_a_long_talk_that_a_client_gives_is_summed_up_at_once() -> None:
    engine = Rememberer()
    items = [{"role": role, "content": f"word{n} is said"} for n in range(20) for role in ("user", "assistant")]
    async with talking(engine) as (server, client):
        await client.configure(history_items=items)
        await noted(server)
        assert len(engine.noted) == 1
        await say(client, 1)
    assert engine.talk[-1].history[0].text.startswith(f"{NOTES_HEAD}- It began with word0")


async def test_a_transcription_is_not_summed_up() -> None:
    engine = Rememberer()
    async with talking(engine) as (server, client):
        await client.configure(task="transcribe")
        await talk(client)
        assert (engine.noted, server.app.summaries.idle) == ([], True)

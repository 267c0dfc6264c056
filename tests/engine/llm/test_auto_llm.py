"""A server answers by rules at once, and by a model as soon as there is one: in the middle of conversations."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from support.engine_answers import asking, collect
from support.growing_llm import BEGINS, OFFERED, REFUSED, Mind, TextModel, auto
from support.live_server import LiveServer, live_server
from support.native_client import NativeClient, native_client
from support.patience import PATIENCE_SEC, until
from support.raw_http import call, post, raw_client
from support.realtime_client import realtime_client
from support.scripted_engines import ToneEngine, WordEngine

from omni_ws.client import connect
from omni_ws.config.keys import ApiKey, digest
from omni_ws.core.chunks import InputChunk, InputMode, Modality
from omni_ws.core.history import Message
from omni_ws.engine.base import AnswerOptions, EngineState
from omni_ws.engine.composed.engine import ComposedEngine
from omni_ws.engine.composed.parts import ComingState
from omni_ws.engine.llm import auto_llm as module
from omni_ws.engine.llm.auto_llm import AutoLlm, Found, Plan
from omni_ws.engine.llm.rules_engine import RulesFirst
from omni_ws.errors import EngineFailed, SessionConflict
from omni_ws.weights import (
    Progress,
    WeightsError,
)


@asynccontextmanager
async def serving(mind: Mind, *, parts: bool = False, **options: Any) -> AsyncIterator[tuple[LiveServer, AutoLlm]]:
    llm = auto(mind)
    asr, tts = (WordEngine(), ToneEngine()) if parts else (None, None)
    async with live_server(ComposedEngine(llm, asr=asr, tts=tts, model="omni-embedded"), **options) as server:
        yield server, llm


async def coming(server: LiveServer) -> dict[str, Any] | None:
    llm: dict[str, Any] = (await call(server.port, "GET", "/health")).json()["parts"]["llm"]
    found: dict[str, Any] | None = llm.get("coming")
    return found


async def asked(client: NativeClient, text: str) -> str:
    await client.say(text)
    return (await client.answer()).text


# The switch


async def test_a_conversation_goes_on_with_the_model_which_knows_its_first_turn() -> None:
    mind = Mind()
    async with serving(mind) as (server, _), native_client(server) as client:
        assert client.created["parts"]["llm"]["name"] == "rules"
        assert "image" in client.created["capabilities"]["input_modalities"]
        assert await asked(client, "what is three plus four") == "That makes 7."
        mind.go_on.set()
        told = await client.until("session_updated")
        assert told["parts"]["llm"] == {"name": "gguf", "model": "a model"}
        assert told["capabilities"]["input_modalities"] == ["text"]
        assert told["advice"] is None
        assert await asked(client, "tell me about foxes") == "As the model says."
        (request,) = mind.made.requests
        assert [(one.role, one.text) for one in request.history] == [
            ("user", "what is three plus four"),
            ("assistant", "That makes 7."),
        ]
        # What rules know exactly they go on answering; clients know the model under the same name as before.
        assert await asked(client, "what is four plus four") == "That makes 8."
        assert (await client.configure(model=client.created["model"]))["model"] == "omni-embedded"
        assert (await call(server.port, "GET", "/health")).json()["parts"]["llm"] == {
            "name": "gguf",
            "model": "a model",
        }
        assert (await client.configure(model="rules"))["model"] == "omni-embedded"  # its name in earlier versions
        await client.chunk(b"GIF89a", modality="image")
        assert (await client.error())["code"] == "unsupported_modality"
        assert client.seen("error")[1:] == []


async def test_a_realtime_session_is_told_when_no_request_runs() -> None:
    mind = Mind()
    async with serving(mind) as (server, _), realtime_client(server) as client:
        mind.go_on.set()
        told = await client.until("session.updated")
        assert told["parts"] == {"asr": None, "llm": {"name": "gguf", "model": "a model"}, "tts": None}
        assert told["session"] == client.received[0]["session"]


async def test_a_request_keeps_the_engine_it_began_with_and_its_session_is_told_after_it() -> None:
    mind = Mind()
    async with serving(mind) as (server, llm), native_client(server) as client:
        await client.configure(start_policy="on_first_chunk")
        await client.chunk("what is three ")
        await client.until("response_started")
        mind.go_on.set()
        await until(lambda: llm.name == "gguf")
        await client.chunk("plus four", end=True)
        assert (await client.answer()).text == "That makes 7."
        assert mind.made.requests == []
        assert "capabilities" in await client.until("session_updated")
        assert await asked(client, "tell me about foxes") == "As the model says."


async def test_a_client_that_was_away_is_told_when_it_returns() -> None:
    mind = Mind()
    async with serving(mind, streaming_input={"resume_grace_sec": PATIENCE_SEC}) as (server, llm):
        async with native_client(server) as client:
            assert await asked(client, "what is three plus four") == "That makes 7."
            last, created = client.guarantees.next_output - 1, client.created
            client.gone()
        await until(lambda: server.native.sessions_away == 1)
        mind.go_on.set()
        await until(lambda: llm.name == "gguf")
        query = f"?session_id={created['session_id']}&resume_token={created['resume_token']}&last_output={last}"
        async with native_client(server, query=query, greeted=False) as client:
            client.guarantees.next_output, client.next_sequence_id = last + 1, 1
            assert (await client.until("session_updated"))["parts"]["llm"]["name"] == "gguf"
            assert await asked(client, "tell me about foxes") == "As the model says."
            assert len(mind.made.requests[0].history) == 2


async def test_speech_is_answered_by_the_model_too() -> None:
    mind = Mind()
    async with serving(mind, parts=True) as (server, _), native_client(server) as client:
        mind.go_on.set()
        able = (await client.until("session_updated"))["capabilities"]
        assert able["input_modalities"] == ["audio", "text"]
        assert able["output_modalities"] == ["audio", "text", "transcript"]
        answer = await _spoken(client)
        assert (answer.text, bool(answer.audio)) == ("As the model says.", True)


async def _spoken(client: NativeClient) -> Any:
    await client.chunk(b"fox.", end=True, modality="audio")
    return await client.answer()


async def test_new_sessions_and_http_get_the_model() -> None:
    mind = Mind()
    async with serving(mind) as (server, llm):
        mind.go_on.set()
        await until(lambda: llm.name == "gguf")
        async with native_client(server) as client:
            assert client.created["parts"]["llm"]["name"] == "gguf"
            assert client.created["model"] == "omni-embedded"
        asks = {"model": "omni-embedded", "messages": [{"role": "user", "content": "tell me about foxes"}]}
        answer = await post(server.port, "/v1/chat/completions", asks)
        assert answer.json()["choices"][0]["message"]["content"] == "As the model says."
        # What the model cannot do, and rules could, they still do.
        answer = await post(server.port, "/v1/completions", {"model": "omni-embedded", "prompt": "three plus four"})
        assert (answer.status, answer.json()["choices"][0]["text"]) == (200, "That makes 7.")


async def test_the_client_library_tells_a_change_from_a_reply() -> None:
    mind = Mind()
    async with serving(mind) as (server, llm), connect(server.websocket_url) as session:
        mind.go_on.set()
        await until(lambda: llm.name == "gguf")
        updated = await session.configure(instructions="Be brief.")
        assert not updated.is_unasked
        assert updated.instructions == "Be brief."
        assert (await session.ask_text("tell me about foxes")).text == "As the model says."
        assert session.config is not None


async def test_what_a_client_set_and_the_model_lacks_does_not_end_its_session() -> None:
    mind = Mind(TextModel(sampling=frozenset(), sampling_no_ops=frozenset()))
    async with serving(mind) as (server, _), native_client(server) as client:
        await client.configure(sampling={"seed": 5}, instructions="Be brief.")
        mind.go_on.set()
        told = await client.until("session_updated")
        assert (told["sampling"], told["capabilities"]["sampling"]) == ({}, [])
        assert told["instructions"] == "Be brief."
        assert await asked(client, "tell me about foxes") == "As the model says."
        # Of what a later change does not name, nothing is said.
        assert (await client.configure(instructions="Be kind."))["instructions"] == "Be kind."
        await client.send("session_config", sampling={"seed": 6})
        assert (await client.error())["code"] == "unsupported_parameter"


# The engine alone


async def test_what_was_shown_before_the_switch_is_still_looked_at() -> None:
    mind = Mind()
    llm = auto(mind)
    mind.go_on.set()
    await llm.start()
    try:
        await until(lambda: llm.name == "gguf")
        assert llm.capabilities.extend
        request = asking("tell me about foxes", input_mode=InputMode.EXTEND)
        assert (await collect(llm, request)).text == "As the model says."
        assert mind.made.requests[0].input_mode is InputMode.SNAPSHOT
        picture = InputChunk(Modality.IMAGE, _png())
        assert "picture" in (await collect(llm, asking(picture))).text
        earlier = (Message("user", "Look.", picture=picture), Message("assistant", "I do."))
        for history in (earlier, (Message("user", "Look.", more=earlier[:1]), earlier[1])):
            said = (await collect(llm, asking("tell me about foxes", history=history))).text
            assert said not in ("", "As the model says.")
        assert len(mind.made.requests) == 1
    finally:
        await llm.stop()
    assert mind.made.stopped
    assert llm.name == "rules"


def _png() -> bytes:
    import io

    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(file, "PNG")
    return file.getvalue()


async def test_rules_answer_while_the_model_does_not_run(caplog: pytest.LogCaptureFixture) -> None:
    mind = Mind()
    llm = auto(mind)
    mind.go_on.set()
    await llm.start()
    try:
        await until(lambda: llm.name == "gguf")
        mind.made.state = EngineState.UNHEALTHY
        assert llm.state is EngineState.OK
        # The metrics tell that the part is down.
        composed = ComposedEngine(llm)
        assert (composed.part_states["llm"], llm.engine.state) == (EngineState.UNHEALTHY, EngineState.UNHEALTHY)
        for _ in range(2):
            assert (await collect(llm, asking("good morning"))).text != "As the model says."
        assert [one.message for one in caplog.records if one.levelname == "WARNING"] == [
            "a model does not run: rules answer"
        ]
        # What takes a model fails as it does without one.
        mind.made.failure = EngineFailed("it has died", fatal=True)
        tools = ({"type": "function", "function": {"name": "look"}},)
        with pytest.raises(EngineFailed, match="it has died"):
            await collect(llm, asking("good morning", tools=tools))
        logprobs = replace(asking("hello"), options=AnswerOptions(logprobs=1))
        with pytest.raises(EngineFailed, match="it has died"):
            await collect(llm, logprobs)
    finally:
        await llm.stop()


async def test_a_session_goes_on_by_rules_behind_an_answer_in_which_the_model_died() -> None:
    mind = Mind()
    async with serving(mind) as (server, _), native_client(server) as client:
        mind.go_on.set()
        await client.until("session_updated")
        mind.made.failure = EngineFailed("the process of the model has died", fatal=True)
        await client.say("tell me about foxes")
        assert (await client.error())["code"] == "engine_failed"
        mind.made.state = EngineState.UNHEALTHY
        assert await asked(client, "good morning") != "As the model says."
        mind.made.failure, mind.made.state = None, EngineState.OK
        assert await asked(client, "tell me about foxes") == "As the model says."


# What was found


async def test_a_server_that_was_found_answers_from_the_start() -> None:
    found = TextModel()

    async def find() -> Found:
        return Found(RulesFirst(found), ("Ollama on this machine answers",))

    llm = auto(mind := Mind(), find)
    await llm.start()
    await llm.start()
    try:
        assert (llm.name, llm.model, llm.coming) == ("gguf", "a model", None)
        assert llm.describe()[0] == "Ollama on this machine answers"
        assert (await collect(llm, asking("tell me about foxes"))).text == "As the model says."
        with pytest.raises(SessionConflict, match="a language model answers already"):
            await llm.fetch()
    finally:
        await llm.stop()
    assert found.stopped
    assert mind.fetches == 0


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_server_that_was_found_and_cannot_be_used_is_told(hangs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FOUND_SEC", 0.01 if hangs else 60)

    class Broken(TextModel):
        async def start(self) -> None:
            if hangs:
                await asyncio.Event().wait()
            raise EngineFailed("it has no model")

    found = Broken()

    async def find() -> Found:
        return Found(found, ("Ollama on this machine answers",))

    llm = auto(Mind(planned=OFFERED), find)
    await llm.start()
    try:
        first, offer = llm.describe()
        assert first.startswith("the server that was found cannot be used: it ")
        assert offer == OFFERED.why
        assert (llm.name, found.stopped) == ("rules", True)
    finally:
        await llm.stop()


# The fetch


async def test_the_progress_is_in_health_and_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    tenths = tuple(Progress("qwen", "model", done * 100, 1000) for done in range(11))
    mind = Mind(told=(Progress("qwen", "unpacking"), *tenths))
    with caplog.at_level("INFO", "omni_ws.engine.llm.auto_llm"):
        async with serving(mind) as (server, llm):
            await until(lambda: llm.coming is not None and llm.coming.bytes_done == 1000)
            assert await coming(server) == {
                "model": "a model",
                "state": "fetching",
                "why": BEGINS.why,
                "bytes_done": 1000,
                "bytes_total": 1000,
            }
            assert server.app.sessions.advise() is None  # as nobody has set it; the server does
            assert llm.advice == (BEGINS.why,)
            mind.go_on.set()
            await until(lambda: llm.name == "gguf")
            assert await coming(server) is None
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == BEGINS.why  # before all else
    assert len([line for line in said if "GB were fetched" in line]) == 10
    assert said[-1] == "a model answers from now on; rules go on answering what is exact"


@pytest.mark.parametrize(
    ("failure", "broken", "reason"),
    [
        (WeightsError("no source has it"), None, "no source has it"),
        (OSError(28, "No space left on device"), None, "No space left on device"),
        (None, EngineFailed("llama.cpp does not load it"), "llama.cpp does not load it"),
        (KeyError("a bug"), None, "KeyError"),
    ],
)
async def test_a_model_that_cannot_be_had_is_told_and_rules_go_on(
    failure: Exception | None, broken: EngineFailed | None, reason: str
) -> None:
    mind = Mind(failure=failure)
    mind.made.broken = broken
    mind.go_on.set()
    async with serving(mind, expect_errors=True) as (server, llm), native_client(server) as client:
        await until(lambda: llm.coming is not None and llm.coming.state is ComingState.FAILED)
        told = await coming(server)
        assert told is not None
        assert told["why"].startswith("a model does not answer, and rules do: ")
        assert reason in told["why"]
        assert await asked(client, "what is three plus four") == "That makes 7."
        assert mind.made.stopped is (broken is not None)
        # It can be asked for again.
        mind.failure = mind.made.broken = None
        answer = await call(server.port, "POST", "/fetch_llm")
        assert (answer.status, answer.json()["coming"]["state"]) == (202, "fetching")
        await until(lambda: llm.name == "gguf")
        assert mind.fetches == 2


@pytest.mark.parametrize("ends", [False, True])
async def test_who_asks_as_the_model_begins_to_answer_or_the_server_ends_is_refused(ends: bool) -> None:
    class Planned(Mind):
        def plan(self) -> Plan:
            if looked.is_set():
                asyncio.run_coroutine_threadsafe(meanwhile(), loop).result(PATIENCE_SEC)
            return OFFERED

    async def meanwhile() -> None:
        """While one looks what there is, another has it fetched and loaded, or the server ends."""
        looked.clear()
        await (llm.stop() if ends else llm.fetch())
        await until(lambda: ends or llm.name == "gguf")

    loop, looked = asyncio.get_running_loop(), asyncio.Event()
    mind = Planned(planned=OFFERED)
    mind.go_on.set()
    llm = auto(mind)
    await llm.start()
    try:
        looked.set()
        with pytest.raises(SessionConflict, match="a language model answers meanwhile, or the server ends"):
            await llm.fetch()
        assert (mind.fetches, llm.coming) == (0 if ends else 1, None)
    finally:
        await llm.stop()


async def test_the_end_of_the_server_stops_the_fetch() -> None:
    mind = Mind()
    async with serving(mind):
        await until(lambda: mind.fetches == 1)
    assert mind.given_up.is_set()


async def test_a_model_that_is_being_loaded_at_the_end_of_the_server_is_stopped() -> None:
    class Slow(TextModel):
        async def start(self) -> None:
            starting.set()
            await asyncio.Event().wait()

    starting = asyncio.Event()
    mind = Mind(Slow())
    mind.go_on.set()
    async with serving(mind) as (_, llm):
        await starting.wait()
        assert llm.coming is not None
        assert llm.coming.state is ComingState.LOADING
    assert mind.made.stopped


# Who may have it fetched


async def test_only_somebody_at_this_machine_has_it_fetched() -> None:
    mind = Mind(planned=OFFERED)
    async with serving(mind, allow_origin=("https://friend.example", "*")) as (server, llm):
        own = "Origin: http://localhost"
        refused = [
            await call(server.port, "POST", "/fetch_llm", None, header)
            for header in (
                "Origin: https://friend.example",
                "Origin: null",
                "X-Forwarded-For: 127.0.0.1",
                "Forwarded: for=127.0.0.1",
                "X-Real-IP: 127.0.0.1",
                "Via: 1.1 proxy",
            )
        ]
        assert [(one.status, one.error["code"]) for one in refused] == [
            (403, "origin_not_allowed"),
            (403, "origin_not_allowed"),
            *[(401, "unauthenticated")] * 4,
        ]
        assert (await call(server.port, "GET", "/fetch_llm")).status == 405
        assert mind.fetches == 0
        assert await coming(server) == {
            "model": "a model",
            "state": "offered",
            "why": OFFERED.why,
            "can_begin": True,
        }
        for _ in range(2):  # the second changes nothing
            answer = await call(server.port, "POST", "/fetch_llm", None, own)
            assert (answer.status, answer.json()["coming"]["state"]) == (202, "fetching")
        mind.go_on.set()
        await until(lambda: llm.name == "gguf")
        assert mind.fetches == 1


@pytest.mark.parametrize("keys", [(), (ApiKey(name="a", key_sha256=digest("secret")),)], ids=["no keys", "keys"])
async def test_only_somebody_at_this_machine_is_told_about_its_folders(keys: tuple[ApiKey, ...]) -> None:
    async with serving(Mind(planned=OFFERED), keys=keys) as (server, _):
        told = [
            (await call(server.port, "GET", "/health", None, *header)).json()["parts"]["llm"]["coming"]
            for header in ((), ("X-Forwarded-For: 127.0.0.1",))
        ]
    stranger = {"model": "a model", "state": "offered", "can_begin": True}
    assert told == [stranger if keys else {**stranger, "why": OFFERED.why}, stranger]


async def test_a_page_of_another_origin_cannot_have_it_fetched() -> None:
    mind = Mind(planned=OFFERED)
    async with serving(mind) as (server, _):
        answer = await call(server.port, "POST", "/fetch_llm", None, "Origin: http://evil.example")
        assert (answer.status, answer.error["code"]) == (403, "origin_not_allowed")
        assert "access-control-allow-origin" not in str(answer).lower()
        async with raw_client(server.port) as client:  # a page whose own name leads to this machine
            own = "Host: evil.example\r\nOrigin: http://evil.example"
            await client.send(f"POST /fetch_llm HTTP/1.1\r\n{own}\r\n\r\n".encode())
            answer = await client.response()
        assert (answer.status, answer.error["code"]) == (403, "origin_not_allowed")
        assert mind.fetches == 0


async def test_nobody_has_it_fetched_where_there_are_keys() -> None:
    mind = Mind(planned=OFFERED)
    async with serving(mind, keys=(ApiKey(name="a", key_sha256=digest("secret"), admin=True),)) as (server, _):
        answer = await call(server.port, "POST", "/fetch_llm", None, "Authorization: Bearer secret")
        assert (answer.status, answer.error["code"]) == (401, "unauthenticated")
        assert mind.fetches == 0


async def test_what_this_machine_cannot_do_is_refused_with_the_reason() -> None:
    mind = Mind(planned=REFUSED)
    async with serving(mind) as (server, _):
        answer = await call(server.port, "POST", "/fetch_llm")
        assert (answer.status, answer.error["message"]) == (409, REFUSED.why)
    async with live_server() as server:
        answer = await call(server.port, "POST", "/fetch_llm")
        assert answer.status == 409

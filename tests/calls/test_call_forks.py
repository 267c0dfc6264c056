"""Forks of recorded calls: another answer to a turn, as a recorded call of its own, by the server itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from support.call_sound import NoiseEngine, noise, tracks
from support.live_server import LiveServer, live_server
from support.made_calls import Said, write_call
from support.native_client import native_client
from support.raw_http import RawResponse
from support.raw_http import call as raw_call
from support.recordings import recordings
from support.speech_clips import as_pcm16

from omni_ws.audio.pcm import resampled
from omni_ws.calls.lines import CallFolder
from omni_ws.config.keys import ApiKey, digest
from omni_ws.engine.base import GenerationRequest, OutputWriter
from omni_ws.transport.routes import calls

KEYS = (
    ApiKey(name="boss", key_sha256=digest("boss-key"), admin=True),
    ApiKey(name="user", key_sha256=digest("user-key")),
)
QUESTION = noise(77, 0.4, 16_000)


class KeepingEngine(NoiseEngine):
    """Keeps the sound of each request; answers no request while ``held``."""

    def __init__(self) -> None:
        super().__init__(0.3)
        self.heard: list[bytes] = []
        self.held: asyncio.Event | None = None

    async def act(self, request: GenerationRequest, out: OutputWriter) -> None:
        if self.held is not None:
            await self.held.wait()
        await super().act(request, out)


@asynccontextmanager
async def talk(folder: Path, **fields: Any) -> AsyncIterator[tuple[LiveServer, str, KeepingEngine]]:
    """A server with a recorded call of three turns: typed, spoken, typed."""
    engine = KeepingEngine()
    async with live_server(engine, record=folder, **fields) as server:
        headers: dict[str, Any] = (
            {"additional_headers": {"Authorization": "Bearer user-key"}} if fields.get("keys") else {}
        )
        async with native_client(server, **headers) as client:
            await client.configure(modalities=["text", "audio"], instructions="Be kind.", greeting="")
            await client.say("My name is Ada.")
            await client.answer()
            await client.chunk(as_pcm16(QUESTION), modality="audio", end=True)
            await client.answer()
            await client.say("And now?")
            await client.answer()
        await server.check_empty()
        await server.until(lambda: any(b'"event":"end"' in path.read_bytes() for path in recordings(folder)))
        yield server, client.created["session_id"], engine


async def fork(server: LiveServer, call_id: str, body: Any, *headers: str) -> RawResponse:
    data = orjson.dumps(body)
    sent = ("Content-Type: application/json", f"Content-Length: {len(data)}", *headers)
    return await raw_call(server.port, "POST", f"/calls/{call_id}/fork", data, *sent)


async def forked(server: LiveServer, call_id: str, body: Any) -> str:
    answered = await fork(server, call_id, body)
    assert answered.status == 200, answered.body
    found: str = answered.json()["id"]
    return found


async def described(server: LiveServer, call_id: str, *headers: str) -> dict[str, Any]:
    answer = await raw_call(server.port, "GET", f"/calls/{call_id}/call.json", None, *headers)
    found: dict[str, Any] = answer.json()
    return found


TALK = (
    Said("My name is Ada.", "Nice to meet you, Ada."),
    Said("Tell me a story.", "Once upon a time there was a keeper.", heard=4),
    Said("What is my name?", "I do not know."),
)


async def test_a_turn_is_answered_again_with_what_came_before(tmp_path: Path) -> None:
    folder = tmp_path / "calls"
    opening = orjson.dumps({"type": "session_config", "instructions": "Be kind.", "greeting": "Hi."}).decode()
    write_call(folder, TALK, call_id="sess_talk", frame=opening)
    engine = KeepingEngine()
    async with live_server(engine, record=folder) as server:
        call = await described(server, "sess_talk")
        assert (call["can_fork"], call["fork_choices"]) == (True, {"voice": [*engine.capabilities.voices]})
        other = await forked(server, "sess_talk", {"turn": 3})
        request = engine.requests[-1]
        assert request.instructions == "Be kind."
        # Of an answer that was interrupted, the words that were heard.
        assert [(one.role, one.text) for one in request.history] == [
            ("user", "My name is Ada."),
            ("assistant", "Nice to meet you, Ada."),
            ("user", "Tell me a story."),
            ("assistant", "Once upon a time"),
        ]
        again = await described(server, other)
        assert (again["can_fork"], again["recorded"]["complete"]) == (True, True)
        [turn] = again["turns"]
        assert (turn["answer"]["text"], turn["finish_reason"]) == ("This is noise 1.", "stop")
        assert turn["answer"]["end_ms"] - turn["answer"]["start_ms"] == pytest.approx(300, abs=1)
        # The fork of a fork has the same history.
        await forked(server, other, {"turn": 1, "instructions": "Be short."})
        assert engine.requests[-1].history == request.history
        assert engine.requests[-1].instructions == "Be short."
        assert engine.requests[-1].voice == request.voice


async def test_what_was_typed_is_typed_again(tmp_path: Path) -> None:
    async with talk(tmp_path / "calls") as (server, call_id, engine):
        other = await forked(server, call_id, {"turn": 3})
        assert [one.text for one in engine.requests[-1].history if one.role == "user"] == ["My name is Ada."]
        [turn] = (await described(server, other))["turns"]
        assert turn["user"]["text"] == "And now?"


async def test_a_spoken_turn_is_said_again_at_its_pace(tmp_path: Path) -> None:
    folder = tmp_path / "calls"
    async with talk(folder) as (server, call_id, _):
        other = await forked(server, call_id, {"turn": 2})
        [turn] = (await described(server, other))["turns"]
        found = CallFolder(folder).find(other)
        assert found is not None
        left, right, rate = tracks(found)
        said, answer = resampled(QUESTION, 16_000, rate), resampled(noise(4, 0.3), 24_000, rate)
        places = []
        for track, wanted in ((left, said), (right, answer)):
            place = int(np.argmax(np.correlate(track, wanted, "valid")))
            assert np.corrcoef(track[place : place + len(wanted)], wanted)[0, 1] > 0.99
            places.append(place)
        # The answer is heard behind the question, as it was.
        assert places[1] >= places[0] + len(said) - rate // 100
        assert abs(places[1] - turn["answer"]["start_ms"] * rate / 1000) < rate / 100


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "turn"),
        ({"turn": "1"}, 400, "turn"),
        ({"turn": True}, 400, "turn"),
        ({"turn": 0}, 400, "turn"),
        ({"turn": 4}, 400, "turn"),
        ({"turn": 1, "llm": "other"}, 400, "llm"),
        ({"turn": 1, "voice": 7}, 400, "voice"),
        ({"turn": 1, "voice": "x" * (calls.MAX_VOICE + 1)}, 400, "voice"),
        ({"turn": 1, "instructions": "x" * (calls.MAX_INSTRUCTIONS + 1)}, 400, "instructions"),
        ({"turn": 1, "instructions": "x" * calls.MAX_INSTRUCTIONS}, 200, None),
    ],
)
async def test_what_cannot_be_forked_is_refused(tmp_path: Path, body: Any, status: int, param: str | None) -> None:
    folder = tmp_path / "calls"
    write_call(folder, [Said("hello", "hi")], call_id="sess_made", sparse=True)
    async with live_server(KeepingEngine(), record=folder) as server:
        answered = await fork(server, "sess_made", body)
        assert answered.status == status, answered.body
        if param is not None:
            assert answered.json()["error"]["param"] == param
        await server.check_empty()


async def test_a_call_without_content_cannot_be_forked(tmp_path: Path) -> None:
    folder = tmp_path / "calls"
    write_call(folder, [Said("hello", "hi")], call_id="sess_made", payloads=False)
    async with live_server(KeepingEngine(), record=folder) as server:
        assert (await described(server, "sess_made"))["can_fork"] is False
        refused = await fork(server, "sess_made", {"turn": 1})
        assert (refused.status, refused.json()["error"]["code"]) == (400, "unsupported_parameter")


async def test_one_fork_at_a_time_and_no_longer_than_it_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with talk(tmp_path / "calls") as (server, call_id, engine):
        engine.held = asyncio.Event()
        begun = len(engine.requests)
        first = asyncio.create_task(fork(server, call_id, {"turn": 1}))
        await server.until(lambda: len(engine.requests) > begun)
        second = await fork(server, call_id, {"turn": 1})
        assert (second.status, second.json()["error"]["code"]) == (429, "rate_limited")
        assert int(second.headers["retry-after"]) > 0
        engine.held.set()
        assert (await first).status == 200
        engine.held = asyncio.Event()
        monkeypatch.setattr(calls, "ANSWER_SEC", 0.1)
        late = await fork(server, call_id, {"turn": 1})
        assert (late.status, late.json()["error"]["code"]) == (503, "engine_overloaded")
        engine.held.set()
        await server.check_empty()
        monkeypatch.undo()
        assert (await fork(server, call_id, {"turn": 1})).status == 200


async def test_only_operators_fork_calls_and_no_other_page(tmp_path: Path) -> None:
    folder = tmp_path / "calls"
    async with talk(folder, keys=KEYS, record_keys=["user"]) as (server, call_id, engine):
        count = len(engine.requests)
        for headers in ((), ("Authorization: Bearer user-key",), ("Authorization: Bearer wrong",)):
            assert (await fork(server, call_id, {"turn": 1}, *headers)).status == 401
        boss = "Authorization: Bearer boss-key"
        for foreign in ("Origin: https://other.example", "Sec-Fetch-Site: cross-site"):
            refused = await fork(server, call_id, {"turn": 1}, boss, foreign)
            assert refused.status == 403
            assert "access-control-allow-origin" not in refused.headers
        assert (await fork(server, "sess_none", {"turn": 1}, boss)).status == 404
        assert len(engine.requests) == count
        # The operator has asked for it: it is recorded though calls of this key are not.
        answered = await fork(server, call_id, {"turn": 1}, boss)
        assert answered.status == 200
        assert (await described(server, answered.json()["id"], boss))["key"] == "boss"


async def test_where_nothing_is_recorded_nothing_is_forked() -> None:
    async with live_server(KeepingEngine()) as server:
        assert (await fork(server, "sess_made", {"turn": 1})).status == 404


async def test_what_a_resume_repeats_takes_no_question_away(tmp_path: Path) -> None:
    folder = tmp_path / "calls"
    async with live_server(KeepingEngine(), record=folder, streaming_input={"resume_grace_sec": 30}) as server:
        async with native_client(server) as client:
            await client.say("My name is Ada.")
            await client.until("response_started")
            client.gone()
        token = f"?session_id={client.created['session_id']}&resume_token={client.created['resume_token']}"
        async with native_client(server, query=f"{token}&last_output=-1", greeted=False) as again:
            assert await again.until("response_started")  # once more
            again.next_sequence_id = client.next_sequence_id
            await again.say("My name is Ada.", number=0)  # which is harmless
            await again.answer()
            await again.connection.close()
        await server.until(lambda: any(b'"event":"end"' in path.read_bytes() for path in recordings(folder)))
        [entry] = (await raw_call(server.port, "GET", "/calls")).json()["calls"]
        assert (entry["turns"], entry["first_words"]) == (1, "My name is Ada.")
        [turn] = (await described(server, entry["id"]))["turns"]
        assert turn["user"]["text"] == "My name is Ada."
        await forked(server, entry["id"], {"turn": 1})


async def test_errors_that_a_resume_repeats_are_listed_once(tmp_path: Path) -> None:
    """Those behind the last output that the client has are sent again, and no others."""
    folder = tmp_path / "calls"
    async with live_server(KeepingEngine(), record=folder, streaming_input={"resume_grace_sec": 30}) as server:
        async with native_client(server) as client:
            await client.send("session_config", speed="fast")
            await client.until("error")
            await client.say("My name is Ada.")
            await client.answer()
            last = client.frames[-1]["sequence_id"]
            for speed in ("fast", "slow"):
                await client.send("session_config", speed=speed)
                await client.until("error")
            client.gone()
        token = f"?session_id={client.created['session_id']}&resume_token={client.created['resume_token']}"
        query = f"{token}&last_output={last}"
        async with native_client(server, query=query, greeted=False) as again:
            for _ in range(2):
                await again.until("error")
            await again.send("session_config", speed="fast")
            await again.until("error")
            await again.connection.close()
        await server.until(lambda: any(b'"event":"end"' in path.read_bytes() for path in recordings(folder)))
        [entry] = (await raw_call(server.port, "GET", "/calls")).json()["calls"]
        assert len((await described(server, entry["id"]))["errors"]) == 4


async def test_what_was_dropped_from_the_history_is_not_in_that_of_a_fork(tmp_path: Path) -> None:
    folder, engine = tmp_path / "calls", KeepingEngine()
    async with live_server(engine, record=folder) as server:
        async with native_client(server) as client:
            for question in ("My name is Ada.", "My nmae is Eve.", "And now?"):
                await client.say(question)
                await client.answer()
            dropped = client.guarantees.finished[1]
            for _ in range(2):  # repeated, it drops nothing more
                await client.send("history_truncate", request_id=dropped)
                await client.until("history_truncated")
            await client.say("My name is Eve.")
            await client.answer()
            await client.send("history_truncate", request_id=dropped)
            await client.until("history_truncated")
            await client.say("And now?")
            await client.answer()
        wanted = [one.text for one in engine.requests[-1].history if one.role == "user"]
        await server.until(lambda: any(b'"event":"end"' in path.read_bytes() for path in recordings(folder)))
        [entry] = (await raw_call(server.port, "GET", "/calls")).json()["calls"]
        assert wanted == ["My name is Ada.", "My name is Eve."]
        for turn, questions in ((5, wanted), (3, ["My name is Ada.", "My nmae is Eve."])):  # which was still there
            await forked(server, entry["id"], {"turn": turn})
            assert [one.text for one in engine.requests[-1].history if one.role == "user"] == questions


async def test_a_configuration_that_was_refused_is_not_that_of_a_fork(tmp_path: Path) -> None:
    folder, engine = tmp_path / "calls", KeepingEngine()
    async with live_server(engine, record=folder) as server:
        async with native_client(server) as client:
            await client.send("session_config", instructions="Be kind.")
            await client.send("session_config", voice="nobody", instructions="Be rude.")
            assert (await client.error())["param"] == "voice"
            await client.configure(sampling={"temperature": 0.5})
            await client.say("My name is Ada.")
            await client.answer()
            await client.send("session_config", voice="nobody")  # it is about what follows
            await client.error()
        await server.until(lambda: any(b'"event":"end"' in path.read_bytes() for path in recordings(folder)))
        [entry] = (await raw_call(server.port, "GET", "/calls")).json()["calls"]
        await forked(server, entry["id"], {"turn": 1})
        request = engine.requests[-1]
        assert (request.instructions, request.sampling["temperature"]) == ("Be kind.", 0.5)

"""``/v1/live/sessions``: how a session starts, is refused, counts its time, and ends."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from support.inline_workers import inline
from support.inline_workers import loud_24k as loud
from support.inline_workers import quiet_24k as quiet
from support.live_server import live_server, read
from support.realtime_client import LiveClient, live_client
from support.recordings import lines, recordings
from support.scripted_engines import Talker
from websockets.exceptions import InvalidStatus

from omni_ws.config.keys import ApiKey, digest
from omni_ws.core.chunks import Modality
from omni_ws.engine.base import AudioOutput, TextOutput

pytestmark = pytest.mark.virtual_clock

KEYS = (ApiKey(name="a", key_sha256=digest("secret")),)
#: A turn, and the silence behind it.
TURN = quiet(96) + loud(320) + quiet(640)


async def spoken_turn(client: LiveClient) -> str:
    """Says something. Returns the first words of the answer, which shows that the session works."""
    await client.append(TURN)
    text: str = (await client.until("session.output_transcript.delta"))["delta"]
    return text


# The start


async def test_a_spoken_turn_is_answered() -> None:
    engine = Talker("go forward")
    async with live_server(engine) as server, live_client(inline(server)) as client:
        session = await client.start(instructions="Be brief.", safety_identifier="user-1")
        assert session["id"].startswith("live_")
        assert (session["status"], session["store"], session["delegation"]) == ("active", False, {"type": "client"})
        assert session["audio"]["format"] == {"type": "audio/pcm", "rate": 24_000}
        assert (session["instructions"], session["safety_identifier"]) == ("Be brief.", "user-1")
        await client.append(TURN)
        while client.said() != "You said go forward":
            await client.receive()
        assert client.heard() == "go forward"
        assert engine.requests[0].instructions.startswith("Be brief.\n\n")
        closed = await client.end()
        assert (closed["reason"], closed["session"]) == ("close_requested", session)


async def test_instructions_may_be_left_to_the_server() -> None:
    engine = Talker("yes")
    async with live_server(engine) as server, live_client(inline(server)) as client:
        assert "instructions" not in await client.start()
        await spoken_turn(client)
        own = server.app.config.spoken_instructions_with_tools
        assert engine.requests[0].instructions.startswith(own)


async def test_the_query_is_ignored() -> None:
    async with live_server(Talker("yes")) as server, live_client(inline(server), query="?model=x&a=b") as client:
        await client.start()
        assert await spoken_turn(client) == "You"


async def test_a_model_without_tools_is_offered_none() -> None:
    engine = Talker("yes", tools=False)
    async with live_server(engine) as server, live_client(inline(server)) as client:
        await client.start(instructions="Be brief.")
        await spoken_turn(client)
        assert (engine.requests[0].instructions, engine.requests[0].tools) == ("Be brief.", ())


async def test_the_history_is_given_to_the_model() -> None:
    engine = Talker("and now")
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Her name is Ann."}]},
        {"role": "user", "content": [{"text": "Hello"}], "id": "item_1", "status": "completed"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Hi"}]},
    ]
    async with live_server(engine) as server, live_client(inline(server)) as client:
        assert (await client.start(input=items))["input"] == items
        await spoken_turn(client)
        told = [(one.role, one.text) for one in engine.requests[0].history]
        assert told == [("system", "Her name is Ann."), ("user", "Hello"), ("assistant", "Hi")]


#: What a start is refused for: the fields of the session, the code and the parameter.
WRONG_STARTS: list[tuple[dict[str, Any], str, str | None]] = [
    ({"model": None}, "invalid_value", "session.model"),
    ({"turn_detection": {}}, "unknown_parameter", "session.turn_detection"),
    ({"idle_timeout_s": 3}, "unknown_parameter", "session.idle_timeout_s"),
    ({"audio": {"input": {}}}, "unknown_parameter", "session.audio.input"),
    ({"audio": {"format": {"type": "audio/pcm", "rate": 8000}}}, "invalid_value", "session.audio.format.rate"),
    ({"audio": {"format": {"type": "audio/opus", "rate": 8000}}}, "invalid_value", "session.audio.format.type"),
    ({"audio": {"format": {"type": "audio/pcmu"}}}, "missing_required_parameter", "session.audio.format.rate"),
    ({"store": True}, "unsupported_parameter", "session.store"),
    ({"triggers": [{"type": "decisions"}]}, "unsupported_parameter", "session.triggers"),
    ({"client": {"data_channel": {}}}, "unsupported_parameter", "session.client"),
    ({"delegation": {"type": "decisions"}}, "unsupported_parameter", "session.delegation.type"),
    ({"delegation": {"type": "nobody"}}, "invalid_value", "session.delegation.type"),
    ({"delegation": {"type": "responses"}}, "missing_required_parameter", "session.delegation.responses"),
    ({"input": [{"role": "user", "content": []}]}, "invalid_value", "session.input[0].content"),
    ({"input": [{"role": "tool", "content": []}]}, "invalid_value", "session.input[0].role"),
]


@pytest.mark.parametrize(("fields", "code", "param"), WRONG_STARTS)
async def test_a_wrong_start_is_refused_by_name(fields: dict[str, Any], code: str, param: str) -> None:
    async with live_server(Talker()) as server, live_client(inline(server)) as client:
        error = await client.failed("session.start", session={"model": "gpt-live-1", **fields})
        assert (error["code"], error["param"], error["type"]) == (code, param, "invalid_request_error")
        assert (await client.closed())[0] == 1008


async def test_a_start_needs_a_session() -> None:
    async with live_server(Talker()) as server, live_client(inline(server)) as client:
        assert (await client.failed("session.start", session={}))["param"] == "session.model"
        assert (await client.closed())[0] == 1008


async def test_another_model_is_refused_where_names_are_strict() -> None:
    async with live_server(Talker(), strict_model_names=True) as server, live_client(inline(server)) as client:
        error = await client.failed("session.start", session={"model": "gpt-live-1"})
        assert (error["code"], error["param"]) == ("invalid_model", "session.model")


async def test_rules_alone_are_no_model() -> None:
    engine = Talker()
    engine.name = "rules"
    async with live_server(engine) as server, live_client(inline(server)) as client:
        error = await client.failed("session.start", session={"model": "gpt-live-1"})
        assert (error["code"], error["param"]) == ("invalid_model", "session.model")
        assert "--llm" in error["message"]
        assert (await client.closed())[0] == 1008


async def test_an_engine_that_does_not_hear_is_refused() -> None:
    text = frozenset({Modality.TEXT})
    async with live_server(Talker(input_modalities=text)) as server, live_client(inline(server)) as client:
        error = await client.failed("session.start", session={"model": "gpt-live-1"})
        assert (error["code"], error["param"]) == ("unsupported_parameter", "session")


async def test_only_a_start_may_come_first() -> None:
    async with live_server(Talker("yes")) as server, live_client(inline(server)) as client:
        await client.append(loud(400))  # which nobody hears
        error = await client.failed("session.input_audio.mute")
        assert (error["code"], error["message"]) == ("invalid_value", "the first event must be session.start")
        await client.start()
        error = await client.failed("session.start", session={"model": "gpt-live-1"})
        assert error["message"] == "the session has already started"
        assert await spoken_turn(client) == "You"
        assert len(client.seen("session.input_transcript.delta")) == 1


async def test_a_session_that_never_starts_is_closed() -> None:
    async with live_server(Talker()) as server, live_client(inline(server)) as client:
        await client.send("session.close")
        assert (await client.closed())[0] == 1000
        assert not client.received


async def test_a_client_that_sends_nothing_is_closed() -> None:
    async with live_server(Talker()) as server, live_client(inline(server)) as client:
        assert (await client.closed())[0] == 4408


# The door


async def test_a_key_is_needed() -> None:
    async with live_server(Talker("yes"), keys=KEYS) as server:
        with pytest.raises(InvalidStatus) as refused:
            async with live_client(server):
                pass
        assert refused.value.response.status_code == 401
        async with live_client(inline(server), additional_headers={"Authorization": "Bearer secret"}) as client:
            await client.start()
            assert await spoken_turn(client) == "You"


async def test_a_session_beyond_the_limit_is_told_so() -> None:
    async with live_server(Talker(), limits={"max_sessions": 1}) as server, live_client(inline(server)) as client:
        await client.start()
        await client.append(quiet(20))
        async with live_client(server) as other:
            error = (await other.until("error"))["error"]
            assert error["code"] == "engine_overloaded"
            assert (await other.closed())[0] == 1013


async def test_metrics_know_the_sessions() -> None:
    async with live_server(Talker("yes")) as server, live_client(inline(server)) as client:
        await client.start()
        await spoken_turn(client)
        await client.end()
        assert read(server).value("sessions_opened_total", origin="live") == 1


# Mistakes after the start


async def test_no_mistake_ends_a_session() -> None:
    async with live_server(Talker("yes")) as server, live_client(inline(server)) as client:
        await client.start()
        await client.connection.send("{")
        assert (await client.until("error"))["error"]["code"] == "invalid_event"
        await client.connection.send(b"\x00\x01")
        assert (await client.until("error"))["error"]["message"] == "events are text messages"
        await client.connection.send("[]")
        assert (await client.until("error"))["error"]["code"] == "invalid_event"
        await client.connection.send('{"event_id": "e"}')
        assert (await client.until("error"))["error"]["param"] == "type"
        assert (await client.failed("session.dance"))["code"] == "invalid_event"
        for kind in ("response.create", "response.item.create"):
            assert (await client.failed(kind))["code"] == "unsupported_parameter"
        for kind in ("decision.create", "decision.item.create", "transport.dtmf.send"):
            assert (await client.failed(kind))["message"] == f"{kind} is not offered here"
        assert await spoken_turn(client) == "You"


@pytest.mark.parametrize("audio", ["", "AA==", "AAA=AA", "%", None, 3])
async def test_wrong_audio_is_refused(audio: Any) -> None:
    async with live_server(Talker("yes")) as server, live_client(inline(server)) as client:
        await client.start()
        error = await client.failed("session.input_audio.append", audio=audio)
        assert (error["code"], error["param"]) == ("invalid_audio", "audio")
        assert await spoken_turn(client) == "You"


async def test_a_byte_is_a_sample_of_mu_law() -> None:
    formats = {"audio": {"format": {"type": "audio/pcmu", "rate": 8000}}}
    async with live_server(Talker()) as server, live_client(inline(server)) as client:
        await client.start(**formats)
        await client.send("session.input_audio.append", audio="/w==")
        await client.end()
        assert not client.seen("error")


async def test_the_limit_of_a_chunk_holds() -> None:
    limit = {"max_chunk_bytes": 9600}
    async with live_server(Talker(), streaming_input=limit) as server, live_client(inline(server)) as client:
        await client.start()
        await client.append(quiet(200), size=9600)
        await client.failed("session.dance")
        await client.append(quiet(400), size=9602)
        assert (await client.until("error"))["error"]["code"] == "payload_too_large"
        assert (await client.closed())[0] == 1009
        assert not client.seen("session.closed")


# Changes


async def test_an_update_changes_the_delegation_alone() -> None:
    async with live_server(Talker()) as server, live_client(inline(server)) as client:
        session = await client.start()
        delegation = {"type": "client", "acknowledgement_delay_ms": 300}
        await client.send("session.update", event_id="u", session={"delegation": delegation})
        updated = await client.until("session.updated")
        assert (updated["client_event_id"], updated["session"]) == ("u", {**session, "delegation": delegation})
        await client.send("session.update", session={"delegation": {"type": "client"}})
        assert (await client.until("session.updated"))["session"]["delegation"] == delegation
        await client.send("session.update", session={"triggers": []})
        await client.until("session.updated")
        for fields, code, param in (
            ({"instructions": "New"}, "immutable_field_update", "session.instructions"),
            ({"audio": {}}, "immutable_field_update", "session.audio"),
            ({"tone": 1}, "unknown_parameter", "session.tone"),
            ({"delegation": {"type": "responses"}}, "immutable_field_update", "session.delegation.type"),
            ({"delegation": {"type": "decisions"}}, "unsupported_parameter", "session.delegation.type"),
            ({"triggers": [{}]}, "unsupported_parameter", "session.triggers"),
        ):
            error = await client.failed("session.update", session=fields)
            assert (error["code"], error["param"]) == (code, param)


# Time


async def test_usage_is_told_and_never_decreases() -> None:
    async with live_server(Talker()) as server, live_client(inline(server)) as client:
        await client.start()
        for seconds in (15, 30, 45):
            await client.append(quiet(100))
            assert (await client.until("session.usage.updated"))["usage"] == {"seconds": seconds}
        assert (await client.end())["usage"]["seconds"] >= 45


async def test_a_session_without_audio_expires() -> None:
    async with live_server(Talker()) as server, live_client(inline(server)) as client:
        await client.start()
        await asyncio.sleep(29)
        await client.append(quiet(100))
        await client.until("session.usage.updated")  # at 15 s
        closed = await client.until("session.closed")
        assert (closed["reason"], closed["usage"]) == ("expired", {"seconds": 59})
        assert (await client.closed())[0] == 1000


@pytest.mark.parametrize(("of_server", "of_key", "lasts"), [(20, None, 20), (20, 10, 10), (10, 20, 10)])
async def test_a_long_session_expires(of_server: float, of_key: float | None, lasts: int) -> None:
    key = ApiKey(name="a", key_sha256=digest("secret"), max_session_sec=of_key)
    headers = {"Authorization": "Bearer secret"}
    async with (
        live_server(Talker(), keys=(key,), live={"max_session_sec": of_server}) as server,
        live_client(inline(server), additional_headers=headers) as client,
    ):
        await client.start()
        closed = await client.until("session.closed")
        assert closed["reason"] == "expired"
        assert closed["usage"]["seconds"] in (lasts - 1, lasts)
        assert (await client.closed())[0] == 1000
        assert not client.seen("error")


async def test_a_server_that_ends_closes_its_sessions() -> None:
    async with live_server(Talker(), still_answers=False) as server, live_client(inline(server)) as client:
        await client.start()
        await client.append(quiet(20))
        draining = asyncio.create_task(server.running.drain(60))
        assert (await client.until("session.closed"))["reason"] == "expired"
        assert (await client.closed())[0] == 1000
        await draining


async def test_a_server_that_drains_lets_the_answer_be_heard() -> None:
    sound = AudioOutput(np.full(2 * 24_000, 0.25, np.float32), 24_000)
    engine = Talker("Hello.", reply=lambda said: [TextOutput("Once there was a king."), sound])
    async with live_server(engine, still_answers=False) as server, live_client(inline(server)) as client:
        await client.start()
        await client.speak()
        while not np.frombuffer(client.sound, "<i2").any():
            await client.take()
        draining = asyncio.create_task(server.running.drain(60))
        assert (await client.until("session.closed"))["reason"] == "expired"
        assert np.count_nonzero(np.frombuffer(client.sound, "<i2")) >= 2 * 24_000 - 10
        assert client.said().strip() == "Once there was a king."
        await draining


async def test_a_client_that_does_not_read_misses_silence_and_nothing_piles_up() -> None:
    loop = asyncio.get_running_loop()
    async with live_server(Talker("yes")) as server, live_client(inline(server)) as client:
        await client.start()
        began = loop.time()
        (connection,) = server.connections
        client.connection.transport.pause_reading()
        while not connection.paused:
            await client.append(quiet(100))
            await asyncio.sleep(10)
        waiting = connection.transport.get_write_buffer_size()
        for _ in range(5):
            await client.append(quiet(100))
            await asyncio.sleep(10)
        assert connection.transport.get_write_buffer_size() - waiting < 2000  # usage alone
        client.connection.transport.resume_reading()
        assert await spoken_turn(client) == "You"
        assert len(client.sound) / 48_000 < loop.time() - began - 45


async def test_what_is_said_and_sent_is_recorded(tmp_path: Path) -> None:
    async with live_server(Talker("yes"), record=tmp_path) as server, live_client(inline(server)) as client:
        await client.start()
        await spoken_turn(client)
        await client.end()
        await server.until(lambda: not server.sessions)
    (path,) = recordings(tmp_path)
    written = lines(path)
    assert written[0]["kind"] == "live"
    texts = [orjson.loads(line["text"])["type"] for line in written if line.get("text")]
    assert texts[:2] == ["session.start", "session.started"]
    assert texts[-1] == "session.closed"

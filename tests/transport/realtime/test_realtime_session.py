"""The session of ``/v1/realtime``: its fields, by their names of today and of the beta version; what is no event."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import numpy as np
import pytest
from support.inline_workers import inline
from support.live_server import live_server
from support.realtime_client import RealtimeClient, failed, realtime_client, text_of
from support.scripted_engines import CapableEngine, HearingEngine, RetortEngine, said

from omni_ws.audio.pcm import decode_mu_law
from omni_ws.core.chunks import Hearing
from omni_ws.engine.base import AudioOutput, TextOutput, TranscriptOutput
from omni_ws.engine.fake import ScriptedEngine
from omni_ws.transport.realtime.session import RealtimeConnection

TOOL = {"type": "function", "name": "look", "description": "Looks.", "parameters": {"type": "object"}}


async def refused(client: RealtimeClient, **session: Any) -> dict[str, Any]:
    """The error that a change of the session is refused with."""
    await client.send("session.update", event_id="mine", session={"type": "realtime", **session})
    error: dict[str, Any] = (await client.until("error"))["error"]
    assert error["event_id"] == "mine"
    return error


async def test_errors_name_the_event_that_they_are_about() -> None:
    deep: dict[str, Any] = {}
    for _ in range(100):
        deep = {"inside": deep}
    async with live_server() as server, realtime_client(inline(server)) as client:
        for event in ({}, {"type": 5}, {"type": "none.such"}, {"type": "session.update", "session": deep}):
            await client.connection.send(json.dumps({**event, "event_id": "mine"}))
            assert (await client.until("error"))["error"]["event_id"] == "mine"
        assert await failed(client, "none.such", event_id="other") == {
            "type": "invalid_request_error",
            "code": "invalid_event",
            "message": "unknown event type 'none.such'",
            "param": "type",
            "event_id": "other",
        }


async def test_a_session_begins_with_what_is_in_effect() -> None:
    async with live_server() as server, realtime_client(inline(server)) as client:
        session = client.received[0]["session"]
        assert session["id"].startswith("sess_")
        assert (session["object"], session["expires_at"]) == ("realtime.session", None)
        assert session["audio"] == {
            "input": {
                "format": {"type": "audio/pcm", "rate": 24000},
                "transcription": None,
                "noise_reduction": None,
                "turn_detection": {
                    "type": "server_vad",
                    "threshold": 0.5,
                    "prefix_padding_ms": 300,
                    "silence_duration_ms": 500,
                    "create_response": True,
                    "interrupt_response": True,
                    "idle_timeout_ms": None,
                },
            },
            "output": {"format": {"type": "audio/pcm", "rate": 24000}, "voice": "echo", "speed": 1.0},
        }
        assert (session["output_modalities"], session["max_output_tokens"]) == (["audio"], "inf")


async def test_echo_and_noise_are_taken_out_if_they_are_asked_for() -> None:
    pytest.importorskip("pywebrtc_audio")
    async with live_server() as server, realtime_client(inline(server)) as client:
        heard = {"echo": "server", "noise_reduction": {"type": "far_field"}}
        session = await client.update(audio={"input": heard})
        assert session["audio"]["input"]["echo"] == "server"
        assert session["audio"]["input"]["noise_reduction"] == {"type": "far_field"}
        listener = server.app.sessions
        [conversation] = listener.conversations
        assert conversation.configuration.effective.max_lead_ms == 5000
        assert conversation.configuration.listening.noise == "far_field"
        session = await client.update(audio={"input": {"echo": None, "noise_reduction": None}})
        assert session["audio"]["input"]["noise_reduction"] is None
        assert "echo" not in session["audio"]["input"]
        error = await refused(client, audio={"input": {"noise_reduction": {"type": "much"}}})
        assert (error["code"], error["param"]) == ("invalid_value", "session.audio.input.noise_reduction.type")


async def test_without_the_library_noise_stays_and_echo_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omni_ws.service.listening.has_library", lambda: False)
    async with live_server() as server, realtime_client(inline(server)) as client:
        session = await client.update(audio={"input": {"noise_reduction": {"type": "near_field"}}})
        assert session["audio"]["input"]["noise_reduction"] is None
        error = await refused(client, audio={"input": {"echo": "server"}})
        assert (error["code"], error["param"]) == ("unsupported_parameter", "session.audio.input.echo")


async def test_fields_are_merged_and_null_is_a_value() -> None:
    async with live_server(CapableEngine()) as server, realtime_client(inline(server)) as client:
        session = await client.update(
            instructions="Be brief.",
            tools=[TOOL],
            tool_choice={"type": "function", "name": "look"},
            max_output_tokens=20,
            audio={"input": {"transcription": {"model": "whisper-1"}}, "output": {"voice": "marin"}},
            tracing="auto",
            truncation="disabled",
            include=None,
        )
        assert (session["instructions"], session["tools"]) == ("Be brief.", [TOOL])
        assert session["tool_choice"] == {"type": "function", "name": "look"}
        assert (session["max_output_tokens"], session["audio"]["output"]["voice"]) == (20, "echo")
        session = await client.update(audio={"input": {"turn_detection": None}}, tools=[], tool_choice="auto")
        assert (session["instructions"], session["tools"]) == ("Be brief.", [])
        assert session["audio"]["input"]["turn_detection"] is None
        assert session["audio"]["input"]["transcription"] == {"model": "whisper-1"}


async def test_the_prompt_of_a_transcription_is_what_the_engine_expects() -> None:
    engine = HearingEngine([said("yes")], heard=[said("yes")], keywords=True)
    async with live_server(engine) as server, realtime_client(server) as client:
        for transcription in ({"prompt": "Ng"}, {"language": "en"}, None, {"prompt": "a" * 4096}):
            session = await client.update(audio={"input": {"transcription": transcription}})
            assert session["audio"]["input"]["transcription"] == transcription
            await client.say("x")
            await client.respond()
        for prompt in ("a" * 4097, 5):
            error = await failed(
                client, "session.update", session={"audio": {"input": {"transcription": {"prompt": prompt}}}}
            )
            assert (error["code"], error["param"]) == ("invalid_value", "session.audio.input.transcription.prompt")
    assert [request.expected for request in engine.requests] == ["Ng", "", "", "a" * 4096]


async def test_without_a_language_of_the_transcription_it_is_detected() -> None:
    heard = [TranscriptOutput("sí", hearing=Hearing("spanish")), said("yes")]
    engine = HearingEngine([said("yes")], heard=heard, languages=frozenset({"en", "es"}))
    async with live_server(engine) as server, realtime_client(server) as client:
        for language in ("es-MX", None, "fr", "en"):
            await client.update(audio={"input": {"transcription": {"language": language}, "turn_detection": None}})
            await client.send("input_audio_buffer.append", audio=base64.b64encode(bytes(4800)).decode())
            await client.send("input_audio_buffer.commit")
            await client.respond()
        completed = client.seen("conversation.item.input_audio_transcription.completed")
        assert len(completed) == 4
    assert [request.language for request in engine.requests] == ["es", None, None, "en"]
    assert {event["language"] for event in completed} == {"es"}


async def test_a_prompt_for_an_engine_that_can_expect_nothing_has_no_effect() -> None:
    engine = HearingEngine([said("yes")])
    async with live_server(engine) as server, realtime_client(server) as client:
        await client.update(audio={"input": {"transcription": {"prompt": "Ng"}}})
        await client.say("x")
        await client.respond()
    assert [request.expected for request in engine.requests] == [""]


async def test_fields_of_the_beta_version_are_taken() -> None:
    async with live_server() as server, realtime_client(inline(server)) as client:
        await client.send(
            "session.update",
            session={
                "modalities": ["text"],
                "voice": "alloy",
                "input_audio_format": "g711_ulaw",
                "output_audio_format": "g711_alaw",
                "turn_detection": {"type": "server_vad", "silence_duration_ms": 200, "create_response": True},
                "input_audio_transcription": {"model": "whisper-1"},
                "max_response_output_tokens": "inf",
                "temperature": 0.8,
            },
        )
        session = (await client.until("session.updated"))["session"]
        assert session["output_modalities"] == ["text"]
        assert session["audio"]["input"]["format"] == {"type": "audio/pcmu"}
        assert session["audio"]["output"]["format"] == {"type": "audio/pcma"}
        assert session["audio"]["input"]["turn_detection"]["silence_duration_ms"] == 200
        assert session["audio"]["input"]["transcription"] == {"model": "whisper-1"}


@pytest.mark.parametrize(("eagerness", "silence"), [("low", 1000), ("auto", 500), ("medium", 500), ("high", 300)])
async def test_without_a_model_semantic_vad_is_a_silence(eagerness: str, silence: int) -> None:
    async with live_server() as server, realtime_client(inline(server)) as client:
        detection = {"type": "semantic_vad", "eagerness": eagerness, "interrupt_response": False}
        found = (await client.update(audio={"input": {"turn_detection": detection}}))["audio"]["input"][
            "turn_detection"
        ]
        assert (found["type"], found["silence_duration_ms"]) == ("server_vad", silence)
        assert found["interrupt_response"] is False


async def test_an_engine_that_only_writes_says_so() -> None:
    async with live_server(RetortEngine("yes")) as server, realtime_client(server) as client:
        session = await client.update(output_modalities=["audio"])
        assert session["output_modalities"] == ["text"]
        assert session["audio"]["input"]["turn_detection"] is None
        await client.say("is it so?")
        assert text_of(await client.respond()) == "yes"


REFUSED_CHANGES: list[tuple[Any, str, str]] = [
    ({"audio": {"output": {"voice": "nobody"}}}, "invalid_value", "session.audio.output.voice"),
    ({"audio": {"output": {"speed": 9}}}, "invalid_value", "session.audio.output.speed"),
    (
        {"audio": {"input": {"format": {"type": "audio/opus"}}}},
        "unsupported_format",
        "session.audio.input.format.type",
    ),
    ({"audio": {"input": 5}}, "invalid_value", "session.audio.input"),
    (
        {"audio": {"input": {"turn_detection": {"type": "none"}}}},
        "invalid_value",
        "session.audio.input.turn_detection.type",
    ),
    (
        {"audio": {"input": {"turn_detection": {"type": "semantic_vad", "eagerness": "so"}}}},
        "invalid_value",
        "session.audio.input.turn_detection.eagerness",
    ),
    ({"output_modalities": ["video"]}, "invalid_value", "session.output_modalities"),
    ({"tools": [{"type": "mcp"}]}, "unsupported_parameter", "session.tools[0].type"),
    ({"tools": [TOOL]}, "unsupported_parameter", "session.tools"),
    ({"tools": "all"}, "invalid_value", "session.tools"),
    ({"max_output_tokens": 0}, "invalid_value", "session.max_output_tokens"),
    ({"instructions": 5}, "invalid_value", "session.instructions"),
    ({"instructions": "x" * (1 << 20)}, "invalid_value", "session"),
]


async def test_a_refused_change_names_its_field_and_changes_nothing() -> None:
    async with live_server() as server:
        for session, code, param in REFUSED_CHANGES:
            async with realtime_client(inline(server)) as client:
                error = await refused(client, **session)
                assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", code, param), session
                assert await client.update() == client.received[0]["session"], session


NO_EVENTS: list[tuple[str, str]] = [
    ("{", "invalid_event"),
    ("[]", "invalid_event"),
    ('{"type": 5}', "invalid_event"),
    ('{"type": "session.destroy"}', "invalid_event"),
    ('{"type": "input_audio_buffer.append", "audio": "?"}', "invalid_value"),
    ('{"type": "input_audio_buffer.append"}', "invalid_value"),
    ('{"type": "session.update", "session": 1}', "invalid_value"),
    ('{"type": "session.update", "session": ' + 80 * "[" + 80 * "]" + "}", "invalid_value"),
    (500 * '{"type":' + "0" + 500 * "}", "invalid_event"),
]


async def test_what_is_no_event_is_an_error_and_the_session_goes_on() -> None:
    async with live_server() as server:
        for data, code in NO_EVENTS:
            async with realtime_client(server) as client:
                await client.connection.send(data)
                assert (await client.until("error"))["error"]["code"] == code, data
                await client.say("hello")
                assert text_of(await client.respond()) == "hello", data


async def test_events_may_be_binary_messages() -> None:
    async with live_server() as server, realtime_client(server) as client:
        await client.connection.send(b'{"type": "input_audio_buffer.clear"}')
        await client.until("input_audio_buffer.cleared")


@pytest.mark.virtual_clock
async def test_g711_both_ways() -> None:
    tone = AudioOutput(np.full(2400, 0.25, np.float32), 24_000)
    engine = ScriptedEngine([tone])
    async with live_server(engine) as server, realtime_client(server) as client:
        g711 = {"format": {"type": "audio/pcmu"}}
        await client.update(audio={"input": {**g711, "turn_detection": None}, "output": g711})
        await client.append(b"\xff" * 1600)
        await client.send("input_audio_buffer.commit")
        response = await client.respond()
        heard = decode_mu_law(client.heard(response["id"]))
        assert len(heard) == pytest.approx(800, abs=8)
        assert np.median(heard) == pytest.approx(0.25, abs=0.02)
        assert engine.requests[0].input_audio.encoding == "pcmu"
        assert engine.requests[0].input_audio.sample_rate == 8000


@pytest.mark.virtual_clock
async def test_pcm_has_other_rates_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("support.realtime_client.check", lambda event: None)  # OpenAI's types know one rate
    engine = ScriptedEngine([AudioOutput(np.full(2400, 0.25, np.float32), 24_000)])
    async with live_server(engine) as server, realtime_client(server) as client:
        heard, spoken = ({"type": "audio/pcm", "rate": rate} for rate in (16_000, 48_000))
        await client.update(audio={"input": {"format": heard, "turn_detection": None}, "output": {"format": spoken}})
        await client.append(b"\0\0" * 1600)
        await client.send("input_audio_buffer.commit")
        response = await client.respond()
        assert len(client.heard(response["id"])) == pytest.approx(2 * 4800, abs=96)
        assert response["audio"]["output"]["format"] == spoken
        assert engine.requests[0].input_audio.sample_rate == 16_000
        await client.say("And now?")
        own = {"type": "audio/pcm", "rate": 32_000}
        response = await client.respond(audio={"output": {"format": own}})
        assert len(client.heard(response["id"])) == pytest.approx(2 * 3200, abs=96)
        assert response["audio"]["output"]["format"] == own


@pytest.mark.virtual_clock
async def test_a_transcription_session_has_transcripts_only() -> None:
    async with (
        live_server(ScriptedEngine([TranscriptOutput("go forward")])) as server,
        realtime_client(server) as client,
    ):
        await client.send(
            "session.update", session={"type": "transcription", "audio": {"input": {"turn_detection": None}}}
        )
        assert (await client.receive())["session"]["type"] == "transcription"
        await client.send("input_audio_buffer.append", audio=base64.b64encode(bytes(4800)).decode())
        await client.send("input_audio_buffer.commit")
        completed = await client.until("conversation.item.input_audio_transcription.completed")
        assert (completed["transcript"], completed["usage"]) == ("go forward", {"type": "duration", "seconds": 0.1})
        await client.send("response.create")
        assert (await client.until("error"))["error"]["code"] == "invalid_value"
        assert not client.seen("response.created")


async def test_output_that_can_no_longer_be_sent_is_not_tried_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """While an engine takes its time to end the answer of a client that has gone."""
    tries = 0
    flush = RealtimeConnection._flush

    def counted(connection: RealtimeConnection) -> None:
        nonlocal tries
        tries += 1
        flush(connection)

    monkeypatch.setattr(RealtimeConnection, "_flush", counted)
    monkeypatch.setattr("omni_ws.transport.realtime.session.WRITE_BATCH_MESSAGES", 1)  # so that much is left
    ending, may_end = asyncio.Event(), asyncio.Event()

    async def ends_late() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ending.set()
            await may_end.wait()

    engine = ScriptedEngine((*(TextOutput("word ") for _ in range(2000)), ends_late))
    async with live_server(engine) as server, realtime_client(server) as client:
        await client.update(output_modalities=["text"])
        await client.say("hello")
        await client.send("response.create")
        await client.until("response.output_text.delta")
        await client.connection.close()
        await ending.wait()
        before = tries
        for _ in range(100):
            await asyncio.sleep(0)
        may_end.set()
        assert tries <= before + 1

"""``session_config`` and what the handshake settles: what is asked for is what the next request gets, or an error."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from support.live_server import live_server
from support.native_client import native_client
from support.scripted_engines import PlayingEngine, RetortEngine

from omni_ws.audio.codec import AudioDecoder
from omni_ws.config.keys import ApiKey, digest
from omni_ws.core.chunks import AudioEncoding, AudioFormat, InputMode, Modality, OutputModality, Task
from omni_ws.engine.base import TextOutput
from omni_ws.engine.fake import ScriptedEngine
from omni_ws.service.conversation.configuration import (
    MAX_CONFIGURATION_BYTES,
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
)

RATE = 16_000
SPEECH = (np.sin(np.arange(RATE) * 2 * np.pi * 440 / RATE) * 8000).astype("<i2").tobytes()


async def test_effective_values_come_back() -> None:
    async with live_server() as server, native_client(server) as client:
        updated = await client.configure(
            instructions="be brief", input_audio={"sample_rate": 8000}, sampling={"max_tokens": 5, "stop": ["a"]}
        )
        assert updated["model"] == "fake"
        assert updated["voice"] == "echo"
        assert updated["modalities"] == ["text", "audio"]
        assert updated["instructions"] == "be brief"
        assert updated["input_audio"] == {"format": "pcm16", "sample_rate": 8000, "channels": 1}
        assert updated["sampling"] == {"max_tokens": 5, "stop": ["a"]}
        assert (updated["overlap"], updated["task"], updated["history"]) == ("wait", "chat", True)
        assert (updated["turn_detection"], updated["max_lead_ms"]) == (None, None)


@pytest.mark.parametrize("lead_ms", [5000, 5001, None])
async def test_the_server_takes_out_its_echo_of_what_it_sends_a_little_ahead(lead_ms: int | None) -> None:
    pytest.importorskip("pywebrtc_audio")
    async with live_server() as server, native_client(server) as client:
        updated = await client.configure(
            input_audio={"echo": "server", "noise_reduction": "far_field"},
            turn_detection={"type": "server_vad"},
            max_lead_ms=lead_ms,
        )
        assert updated["input_audio"]["echo"] == "server"
        assert updated["input_audio"]["noise_reduction"] == "far_field"
        assert updated["max_lead_ms"] == (400 if lead_ms is None else 5000)
        updated = await client.configure(input_audio={"echo": "client", "noise_reduction": None}, max_lead_ms=9000)
        assert (updated["input_audio"]["echo"], updated["max_lead_ms"]) == ("client", 9000)
        assert "noise_reduction" not in updated["input_audio"]


async def test_echo_of_compressed_answers_and_unknown_cleaning_are_refused() -> None:
    pytest.importorskip("pywebrtc_audio")
    async with live_server() as server, native_client(server) as client:
        turns = {"type": "server_vad"}
        for fields, code, param in [
            ({"input_audio": {"echo": "server"}, "output_audio": {"format": "wav"}}, "unsupported_format", "echo"),
            ({"input_audio": {"echo": "both"}}, "invalid_value", "echo"),
            ({"input_audio": {"noise_reduction": "loud"}}, "invalid_value", "noise_reduction"),
        ]:
            await client.send("session_config", turn_detection=turns, **fields)
            error = await client.error()
            assert (error["code"], error["param"]) == (code, f"input_audio.{param}")


@pytest.mark.parametrize("fields", [{"echo": "server"}, {"noise_reduction": "near_field"}])
async def test_cleaning_without_the_library_is_refused_with_the_line_that_installs_it(
    fields: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omni_ws.service.listening.has_library", lambda: False)
    async with live_server() as server, native_client(server) as client:
        await client.send("session_config", input_audio=fields)
        error = await client.error()
        assert (error["code"], error["param"]) == ("unsupported_parameter", f"input_audio.{next(iter(fields))}")
        assert "pip install omni-ws" in error["message"]
        updated = await client.configure(input_audio={"echo": "client"})
        assert updated["input_audio"]["echo"] == "client"


async def test_patches_merge_and_null_restores() -> None:
    async with live_server() as server, native_client(server) as client:
        await client.configure(
            input_audio={"sample_rate": 8000}, start_policy={"type": "on_min_length", "min_bytes": 4}
        )
        updated = await client.configure(
            input_audio={"channels": 2}, start_policy={"type": "on_min_length", "min_chunks": 9}
        )
        assert updated["input_audio"] == {"format": "pcm16", "sample_rate": 8000, "channels": 2}
        assert updated["start_policy"] == {"type": "on_min_length", "min_bytes": 4, "min_chunks": 9}
        updated = await client.configure(input_audio={"sample_rate": None}, start_policy=None)
        assert updated["input_audio"] == {"format": "pcm16", "sample_rate": 16_000, "channels": 2}
        assert updated["start_policy"] == "on_min_length"
        updated = await client.configure(input_audio=None)
        assert updated["input_audio"]["channels"] == 1


async def test_the_operators_start_policy_is_the_default_and_a_client_merges_into_it() -> None:
    operators = {"type": "on_min_length", "min_text_chars": 3}
    async with live_server(streaming_input={"start_policy": operators}) as server, native_client(server) as client:
        assert client.created["start_policy"] == operators
        await client.chunk("ab")
        await client.barrier()
        assert client.seen("response_started") == []
        await client.chunk("c", end=True)
        assert (await client.until("response_started"))["trigger"] == "min_length"
        updated = await client.configure(start_policy={"min_chunks": 9})
        assert updated["start_policy"] == {**operators, "min_chunks": 9}
        updated = await client.configure(start_policy={"min_text_chars": 1, "min_chunks": None})
        assert updated["start_policy"] == {"type": "on_min_length", "min_text_chars": 1}
        assert (await client.configure(start_policy="on_end_only"))["start_policy"] == "on_end_only"
        assert (await client.configure(start_policy=None))["start_policy"] == operators


async def test_the_operators_policy_may_be_a_modality() -> None:
    operators = {"type": "on_modality", "modality": "text"}
    async with live_server(streaming_input={"start_policy": operators}) as server, native_client(server) as client:
        await client.chunk("Listen:")
        await client.barrier()
        assert client.seen("response_started") == []
        await client.binary(bytes(640))
        assert (await client.until("response_started"))["trigger"] == "modality"
        await client.chunk(end=True)
        await client.answer()


async def test_unknown_fields_are_ignored() -> None:
    async with live_server() as server, native_client(server) as client:
        updated = await client.configure(colour="red", input_audio={"colour": "red"}, instructions="x")
        assert "colour" not in updated
        assert "colour" not in updated["input_audio"]


BAD_PATCHES: list[tuple[dict[str, Any], str, str | None]] = [
    ({"input_audio": {"sample_rate": 7999}}, "invalid_value", "input_audio.sample_rate"),
    ({"input_audio": {"sample_rate": 192_001}}, "invalid_value", "input_audio.sample_rate"),
    ({"input_audio": {"channels": 0}}, "invalid_value", "input_audio.channels"),
    ({"input_audio": {"format": "pcm24"}}, "invalid_value", "input_audio.format"),
    ({"input_audio": "pcm16"}, "invalid_value", "input_audio"),
    ({"output_audio": {"format": "mp3"}}, "unsupported_format", "output_audio.format"),
    ({"output_audio": {"sample_rate": True}}, "invalid_value", "output_audio.sample_rate"),
    ({"modalities": ["video"]}, "invalid_value", "modalities[0]"),
    ({"modalities": []}, "invalid_value", "modalities"),
    ({"voice": "nobody"}, "invalid_value", "voice"),
    ({"voice": 3}, "invalid_value", "voice"),
    ({"model": "gpt-9"}, "model_not_found", "model"),
    ({"start_policy": "soon"}, "invalid_value", "start_policy"),
    ({"start_policy": {"type": "on_modality"}}, "invalid_value", "start_policy.modality"),
    ({"start_policy": {"type": "on_min_length", "min_chunks": 0}}, "invalid_value", "start_policy.min_chunks"),
    ({"sampling": {"stop": [1]}}, "invalid_value", "sampling.stop[0]"),
    ({"sampling": {"stop": ["x"] * (MAX_STOPS + 1)}}, "invalid_value", "sampling.stop"),
    ({"sampling": {"stop": "x" * (MAX_STOP_CHARACTERS + 1)}}, "invalid_value", "sampling.stop"),
    ({"sampling": {"max_tokens": 0}}, "invalid_value", "sampling.max_tokens"),
    ({"sampling": {"top_k": 4}}, "unsupported_parameter", "sampling.top_k"),
    ({"turn_detection": {}}, "invalid_value", "turn_detection.type"),
    ({"turn_detection": {"type": "server_vad", "threshold": -0.1}}, "invalid_value", "turn_detection.threshold"),
    (
        {"turn_detection": {"type": "server_vad", "prefix_padding_ms": 2001}},
        "invalid_value",
        "turn_detection.prefix_padding_ms",
    ),
    (
        {"turn_detection": {"type": "server_vad", "silence_duration_ms": 10_001}},
        "invalid_value",
        "turn_detection.silence_duration_ms",
    ),
    ({"turn_detection": {"type": "magic"}}, "invalid_value", "turn_detection.type"),
    ({"tools": [{"type": "function"}]}, "unsupported_parameter", "tools"),
    ({"tool_choice": "required"}, "unsupported_parameter", "tool_choice"),
    ({"stage_params": {"fake": {"speed": 3}}}, "unsupported_parameter", "stage_params.fake.speed"),
    ({"stage_params": {"talker": {"x": 3}}}, "unsupported_parameter", "stage_params.talker.x"),
    ({"stage_params": {"fake": 3}}, "invalid_value", "stage_params"),
    ({"history": "yes"}, "invalid_value", "history"),
    ({"overlap": "mix"}, "invalid_value", "overlap"),
    ({"max_lead_ms": -1}, "invalid_value", "max_lead_ms"),
    ({"instructions": "x" * MAX_CONFIGURATION_BYTES}, "invalid_value", None),
]


async def test_bad_patch_changes_nothing() -> None:
    async with live_server() as server:
        for patch, code, param in BAD_PATCHES:
            async with native_client(server) as client:
                before = await client.configure(instructions="before")
                await client.send("session_config", **{**patch, "task": "speech"})
                error = await client.error()
                assert (error["code"], error["retryable"]) == (code, False), patch
                assert (error.get("param") or "").startswith(param or ""), patch
                assert len(error["message"]) < 1000, patch
                assert await client.configure() == before, patch


async def test_names_that_stock_clients_send() -> None:
    aliases = ("gpt-realtime", "whisper-1", "local-model", "fake")
    async with live_server() as server, native_client(server) as client:
        for model, voice in zip(aliases, ("alloy", "marin", "default", "echo"), strict=True):
            updated = await client.configure(model=model, voice=voice)
            assert (updated["model"], updated["voice"]) == ("fake", "echo")


async def test_unknown_nested_fields_do_not_pile_up() -> None:
    async with live_server() as server, native_client(server) as client:
        for number in range(20):
            await client.send("session_config", sampling={f"unknown_{number}": "x" * 100_000})
        await client.barrier()
        refused = [frame["error"]["code"] for frame in client.seen("error")]
        assert len(refused) == 10
        assert set(refused) == {"invalid_value"}


async def test_configuration_is_for_the_next_request() -> None:
    async with live_server() as server, native_client(server) as client:
        await client.chunk("one two ")
        await client.until("output_chunk")
        await client.configure(sampling={"max_tokens": 1}, modalities=["text"], start_policy="on_end_only")
        await client.chunk("three four", end=True)
        first = await client.answer()
        said = [frame["text"] for frame in client.seen("output_chunk") if "text" in frame]
        assert ("".join(said), first.reason) == ("one two three four", "stop")
        await client.say("one two")
        second = await client.answer()
        assert (second.text, second.reason) == ("one", "length")
        assert second.started is not None
        assert second.started["trigger"] == "end_of_input"


async def test_what_the_engine_is_asked() -> None:
    engine = ScriptedEngine([TextOutput("x")])
    async with live_server(engine) as server, native_client(server) as client:
        await client.configure(
            task="speech",
            voice="coral",
            instructions="whisper",
            modalities=["audio"],
            after_start="snapshot",
            input_audio={"format": "f32", "sample_rate": 48_000, "channels": 2},
            sampling={"temperature": 0.5, "seed": 7, "stop": "end", "max_tokens": 3},
            stage_params={"fake": {"fail_after_chunks": 9}},
        )
        await client.say("hello")
        await client.answer()
        request = engine.requests[0]
        assert request.request_id == client.seen("response_started")[0]["request_id"]
        assert (request.task, request.voice, request.instructions) == (Task.SPEECH, "echo", "whisper")
        assert request.modalities == {OutputModality.AUDIO}
        assert request.input_mode is InputMode.SNAPSHOT
        assert request.input_audio == AudioFormat(AudioEncoding.F32, 48_000, 2)
        assert request.sampling == {"temperature": 0.5, "seed": 7, "stop": "end", "max_tokens": 3}
        assert request.stage_params == {"fake": {"fail_after_chunks": 9}}


# sampling


@pytest.mark.parametrize(
    ("sampling", "text", "reason"),
    [
        ({"max_tokens": 2}, "one two", "length"),
        ({"max_tokens": 3}, "one two three", "stop"),
        ({"stop": "two"}, "one ", "stop"),
        ({"stop": ["e t", "two"]}, "on", "stop"),
        ({"stop": ["x" * MAX_STOP_CHARACTERS] * (MAX_STOPS - 1) + ["two"]}, "one ", "stop"),
        ({"stop": "", "temperature": 0, "top_p": 0.1, "seed": 1}, "one two three", "stop"),
    ],
)
@pytest.mark.parametrize("cut", [1, 4, 100])
async def test_max_tokens_and_stop(sampling: dict[str, Any], text: str, reason: str, cut: int) -> None:
    async with live_server() as server, native_client(server) as client:
        await client.configure(sampling=sampling)
        said = "one two three"
        for start in range(0, len(said), cut):
            await client.chunk(said[start : start + cut])
        await client.send("finish")
        answer = await client.answer()
        assert (answer.text, answer.reason) == (text, reason)
        assert answer.final["usage"]["input_tokens"] == 3
        assert answer.final["usage"]["output_tokens"] == len(text.split())


# audio


@pytest.mark.parametrize(
    ("encoding", "sample_rate"),
    [
        *(("pcm16", rate) for rate in (8_000, 16_000, 22_050, 24_000, 44_100, 48_000)),
        *((encoding, 22_050) for encoding in ("f32", "pcmu", "pcma", "wav")),
    ],
)
async def test_output_formats_and_rates(encoding: str, sample_rate: int) -> None:
    async with live_server() as server, native_client(server) as client:
        await client.configure(output_audio={"format": encoding, "sample_rate": sample_rate})
        for start in range(0, len(SPEECH), 6400):
            await client.binary(SPEECH[start : start + 6400])
        await client.send("finish")
        answer = await client.answer()
        assert {(chunk["format"], chunk["sample_rate"]) for chunk in answer.chunks} == {(encoding, sample_rate)}
        decoder = AudioDecoder(AudioFormat(AudioEncoding(encoding), sample_rate), sample_rate=sample_rate)
        samples = np.concatenate([decoder.decode(answer.audio), decoder.flush()])
        decoder.close()
        assert abs(len(samples) - sample_rate) <= 2
        crossings = np.count_nonzero(np.diff(np.signbit(samples)))
        assert crossings == pytest.approx(880, abs=4)  # a tone of 440 Hz for a second
        starts = [chunk["start_ms"] for chunk in answer.chunks]
        assert starts[0] == 0
        assert starts == sorted(starts)
        assert starts[-1] < 1000
        assert answer.final["usage"]["output_audio_ms"] == pytest.approx(1000, abs=10)


@pytest.mark.parametrize(
    ("input_audio", "chunk_format"),
    [
        ({"format": "f32", "sample_rate": RATE}, None),
        ({}, "f32"),
        ({"sample_rate": 8000}, "audio/pcm;rate=16000"),
    ],
)
async def test_input_format_of_the_session_or_the_chunk(input_audio: dict[str, Any], chunk_format: str | None) -> None:
    f32 = chunk_format == "f32" or input_audio.get("format") == "f32"
    sent = (np.frombuffer(SPEECH, "<i2") / 32768).astype("<f4").tobytes() if f32 else SPEECH
    async with live_server() as server, native_client(server) as client:
        await client.configure(input_audio=input_audio, output_audio={"sample_rate": RATE})
        fields: dict[str, Any] = {} if chunk_format is None else {"format": chunk_format}
        await client.chunk(sent, end=True, **fields)
        assert (await client.answer()).audio == SPEECH


async def test_wav_input() -> None:
    head = b"RIFF" + struct.pack("<I", 36 + len(SPEECH)) + b"WAVEfmt "
    head += struct.pack("<IHHIIHH", 16, 1, 1, RATE, RATE * 2, 2, 16) + b"data" + struct.pack("<I", len(SPEECH))
    async with live_server() as server, native_client(server) as client:
        await client.configure(input_audio={"format": "wav"}, output_audio={"sample_rate": RATE})
        for start in range(0, len(head + SPEECH), 5000):
            await client.binary((head + SPEECH)[start : start + 5000])
        await client.send("finish")
        assert (await client.answer()).audio == SPEECH


# what an engine cannot do


#: An engine that hears speech and writes text, once it has everything.
LIMITED: dict[str, Any] = {
    "input_modalities": frozenset({Modality.AUDIO, Modality.TEXT}),
    "output_modalities": frozenset({OutputModality.TEXT}),
    "tasks": frozenset({Task.CHAT}),
    "extend": False,
    "voices": (),
}


async def test_engine_that_cannot_extend() -> None:
    async with live_server(PlayingEngine([TextOutput("answer")], **LIMITED)) as server, native_client(server) as client:
        assert (client.created["start_policy"], client.created["after_start"]) == ("on_end_only", "snapshot")
        updated = await client.configure(start_policy="on_first_chunk")
        assert (updated["start_policy"], updated["after_start"]) == ("on_first_chunk", "snapshot")
        assert (updated["modalities"], updated["voice"]) == (["text"], None)
        for patch, code, param in (
            ({"after_start": "extend"}, "unsupported_parameter", "after_start"),
            ({"modalities": ["text", "audio"]}, "unsupported_parameter", "modalities"),
            ({"task": "speech"}, "unsupported_parameter", "task"),
            ({"voice": "someone"}, "invalid_value", "voice"),
        ):
            await client.send("session_config", **patch)
            error = await client.error()
            assert (error["code"], error["param"]) == (code, param)
        await client.chunk(b"jpeg", modality="image", number=0)
        error = await client.error()
        assert (error["code"], error["sequence_id"], error["param"]) == ("unsupported_modality", 0, "modality")
        await client.say("hello")
        answer = await client.answer()
        assert (answer.text, answer.started and answer.started["input_mode"]) == ("answer", "snapshot")


async def test_a_bare_end_of_input_has_no_modality_to_be_refused() -> None:
    engine = RetortEngine("answer", input_modalities=frozenset({Modality.TEXT}))
    async with live_server(engine) as server, native_client(server) as client:
        await client.chunk("hello")
        await client.chunk(end=True)
        answer = await client.answer()
        assert (answer.text, answer.errors, answer.reason) == ("answer", [], "stop")
        await client.chunk(b"\x00\x00")
        assert (await client.error())["code"] == "unsupported_modality"


# the handshake


@pytest.mark.parametrize(
    ("offered", "chosen"),
    [
        (None, None),
        (["omni.v1+json"], "omni.v1+json"),
        (["omni.v1+binary"], "omni.v1+binary"),
        (["omni.v1+json", "omni.v1+binary"], "omni.v1+json"),
        (["realtime", "omni.v1+binary", "omni.v1+json"], "omni.v1+binary"),
        (["realtime", "omni-api-key.secret"], None),
        (["omni-api-key.secret", "omni.v1+binary"], "omni.v1+binary"),
        (["openai-insecure-api-key.secret", "omni.v1+json"], "omni.v1+json"),
    ],
)
async def test_subprotocols(offered: list[str] | None, chosen: str | None) -> None:
    keyed = any(".secret" in entry for entry in offered or ())
    keys = (ApiKey(name="one", key_sha256=digest("secret")),) if keyed else ()
    async with live_server(keys=keys) as server, native_client(server, subprotocols=offered) as client:
        assert client.connection.subprotocol == chosen
        await client.configure(output_audio={"sample_rate": RATE})
        await client.binary(SPEECH[:3200], end=True)
        answer = await client.answer()
        assert answer.audio == SPEECH[:3200]
        assert [chunk.get("binary", False) for chunk in answer.chunks] == [chosen == "omni.v1+binary"]


async def test_only_audio_is_binary() -> None:
    async with live_server() as server, native_client(server, subprotocols=["omni.v1+binary"]) as client:
        await client.configure(output_audio={"sample_rate": RATE})
        await client.chunk("text")
        await client.binary(SPEECH[:6400])
        await client.send("finish")
        answer = await client.answer()
        assert [(chunk["modality"], chunk.get("binary", False)) for chunk in answer.chunks] == [
            ("text", False),
            ("audio", True),
            ("audio", True),
        ]
        assert [chunk["start_ms"] for chunk in answer.chunks[1:]] == [0, 100]

"""The life of a request on the native WebSocket, from its first chunk to its one final."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from support.embedded_engine import EmbeddedEngine
from support.live_server import live_server
from support.native_client import native_client
from support.parts_of_sessions import weighed
from support.raw_http import events_of, post
from support.scripted_engines import CapableEngine
from support.speech_clips import clip_bytes

from omni_ws.client import connect
from omni_ws.core.chunks import FinishReason, Modality, UrlCitation, Usage, Word, context_full
from omni_ws.engine.base import AudioOutput, Engine, EngineOutput, Finished, OutputWriter, TextOutput, TranscriptOutput
from omni_ws.engine.fake import EchoEngine, EchoSettings, ScriptedEngine

NO_LIMITS: dict[str, Any] = {"output_audio": {"sample_rate": 16_000}, "start_policy": "on_first_chunk"}
TONE = np.arange(-800, 800, dtype="<i2").tobytes()


async def test_session_created_says_what_there_is() -> None:
    async with live_server() as server, native_client(server) as client:
        created = client.created
        assert created["session_id"].startswith("sess_")
        assert created["resume_token"] is None
        assert (created["expires_in"], created["model"]) == (300, "fake")
        assert created["input_audio"] == {"format": "pcm16", "sample_rate": 16_000, "channels": 1}
        assert created["output_audio"] == {"format": "pcm16", "sample_rate": 24_000}
        assert (created["start_policy"], created["after_start"]) == ("on_min_length", "extend")
        assert created["capabilities"]["input_modalities"] == ["audio", "image", "text", "video"]
        assert created["parts"] == {"asr": None, "llm": {"name": "fake", "model": "fake"}, "tts": None}
        assert created["capabilities"]["extend"] is True
        assert (created["capabilities"]["turn_detection"], created["capabilities"]["resume"]) == (True, False)
        assert created["limits"] == {
            "max_chunk_bytes": 4 << 20,
            "max_payload_per_session": 64 << 20,
            "reorder_window_chunks": 256,
            "reorder_timeout_sec": 10,
            "max_pending_requests": 4,
        }
        async with native_client(server) as other:
            assert other.created["session_id"] != created["session_id"]


async def test_operators_settings_are_announced() -> None:
    async with (
        live_server(
            served_model_name=("voice-1", "voice-2"),
            streaming_input={"start_policy": "on_end_only", "after_start": "snapshot", "session_timeout_sec": 20},
        ) as server,
        native_client(server) as client,
    ):
        created = client.created
        assert (created["model"], created["start_policy"], created["after_start"], created["expires_in"]) == (
            "voice-1",
            "on_end_only",
            "snapshot",
            20,
        )


async def test_text_comes_back() -> None:
    async with live_server() as server, native_client(server) as client:
        await client.say("hello wide world")
        answer = await client.answer()
        assert answer.text == "hello wide world"
        assert len(answer.chunks) > 1
        assert answer.started is not None
        assert answer.started["request_id"] == answer.final["request_id"]
        assert answer.started["request_id"].startswith("req_")
        assert answer.reason == "stop"
        assert answer.final["usage"] == {
            "input_tokens": 3,
            "output_tokens": 3,
            "total_tokens": 6,
            "input_audio_ms": 0,
            "output_audio_ms": 0,
            "input_after_start_bytes": 0,
        }


@pytest.mark.parametrize("cached", [0, 2, None])
async def test_usage_tells_what_was_cached(cached: int | None) -> None:
    """It is left out where the engine does not tell it."""
    usage = Usage(input_tokens=3, output_tokens=1, cached_tokens=cached)
    engine = ScriptedEngine((TextOutput("hello"), Finished(FinishReason.STOP, usage)))
    async with live_server(engine) as server, native_client(server) as client:
        await client.say("hello")
        assert (await client.answer()).final["usage"].get("cached_tokens") == cached
        async with connect(server.websocket_url, config={"modalities": ["text"]}) as session:
            assert (await session.ask_text("hello")).usage == usage


@pytest.mark.parametrize("binary", [False, True])
async def test_audio_comes_back(binary: bool) -> None:
    async with live_server() as server, native_client(server) as client:
        await client.configure(**NO_LIMITS)
        send = client.binary if binary else client.chunk
        await send(TONE[:1001])  # half a sample at the end of a chunk is completed by the next
        await send(TONE[1001:], end=True)
        answer = await client.answer()
        assert answer.audio == TONE
        assert {(chunk["format"], chunk["sample_rate"]) for chunk in answer.chunks} == {("pcm16", 16_000)}
        assert answer.final["usage"]["input_audio_ms"] == answer.final["usage"]["output_audio_ms"] == 100
        assert answer.final["usage"]["input_after_start_bytes"] == len(TONE) - 1001


async def test_half_a_sample_at_the_end_is_dropped() -> None:
    async with live_server() as server, native_client(server) as client:
        await client.configure(**NO_LIMITS)
        await client.binary(TONE + b"x", end=True)
        assert (await client.answer()).audio == TONE


async def test_images_video_and_text_in_one_request() -> None:
    async with live_server() as server, native_client(server) as client:
        await client.chunk(b"\x89PNG", modality="image", format="image/png")
        await client.binary(b"\xff\xd8", Modality.IMAGE)
        await client.binary(b"frame", Modality.VIDEO, timestamp_ms=40)
        await client.binary(b"what is", Modality.TEXT)
        await client.chunk(b" this?", modality="text", end=True)
        answer = await client.answer()
        assert answer.text == "what is this?Received 2 images and 1 video chunk."


async def test_characters_may_be_split_between_chunks() -> None:
    async with live_server() as server, native_client(server) as client:
        data = "Zürich – 東京".encode()
        for byte in range(len(data)):
            await client.binary(data[byte : byte + 1], Modality.TEXT)
        await client.send("finish")
        answer = await client.answer()
        assert answer.text == "Zürich – 東京"
        assert answer.final["usage"]["input_tokens"] == answer.final["usage"]["output_tokens"] == 3


async def test_several_requests_one_after_the_other() -> None:
    async with live_server() as server, native_client(server) as client:
        finals = []
        for turn in range(5):
            await client.say(f"turn {turn}")
            answer = await client.answer()
            assert answer.text == f"turn {turn}"
            finals.append(answer.final)
        assert len({final["request_id"] for final in finals}) == 5
        assert [final["sequence_id"] for final in finals] == [2, 5, 8, 11, 14]


# start policies


START_POLICIES: list[tuple[Any, list[str | bytes], str, int]] = [
    ("on_first_chunk", ["", "a", "b"], "first_chunk", 1),
    ("on_end_only", ["a", "b", "c"], "end_of_input", 3),
    ("on_min_length", ["a", "b", "c"], "min_length", 0),
    ({"type": "on_min_length", "min_text_chars": 3}, ["ä", "ö", "ü"], "min_length", 2),
    ({"type": "on_min_length", "min_text_chars": 9}, ["a", "b", "c"], "end_of_input", 3),
    ({"type": "on_min_length", "min_bytes": 4}, ["ä", "ö", "ü"], "min_length", 1),
    ({"type": "on_min_length", "min_chunks": 3}, ["a", "", "b", "c"], "min_length", 3),
    ({"type": "on_min_length", "min_audio_ms": 50}, [TONE[:1600], TONE[1600:]], "min_length", 0),
    ({"type": "on_min_length", "min_audio_ms": 50.1}, [TONE[:1600], TONE[1600:]], "min_length", 1),
    ("on_min_length", [bytes(12_798), b"\0\0", b"\0\0"], "min_length", 1),
    ({"type": "on_modality", "modality": "text"}, ["a", "b", TONE], "modality", 2),
    ({"type": "on_modality", "modality": "audio", "min_audio_ms": 60}, [TONE[:1600], TONE[1600:]], "modality", 1),
    ({"type": "on_modality", "modality": "video"}, ["a", TONE], "end_of_input", 2),
]


async def test_start_policies() -> None:
    async with live_server() as server:
        for policy, chunks, trigger, fired_by in START_POLICIES:
            async with native_client(server) as client:
                await client.configure(start_policy=policy, modalities=["text"])
                for chunk in chunks:
                    await client.chunk(chunk)
                await client.chunk(end=True)
                answer = await client.answer()
                assert answer.started is not None, policy
                assert (answer.started["trigger"], answer.started["sequence_id"]) == (trigger, fired_by), policy
                assert answer.reason == "stop", policy


@pytest.mark.parametrize(
    ("own", "bytes_per_second"), [("f32", 64_000), ("audio/pcmu;rate=8000", 8_000), ("opus", 8_000), (None, 32_000)]
)
async def test_a_chunk_is_as_long_as_its_own_format_says(own: str | None, bytes_per_second: int) -> None:
    async with live_server() as server, native_client(server) as client:
        await client.configure(start_policy={"type": "on_min_length", "min_audio_ms": 100}, modalities=["text"])
        fields: dict[str, Any] = {} if own is None else {"format": own}
        for size in (bytes_per_second // 10 - 4, 4, 4):
            await client.chunk(bytes(size), **fields)
        await client.chunk(end=True)
        assert (await client.until("response_started"))["sequence_id"] == 1


async def test_min_video_frames_count_images_and_video() -> None:
    async with live_server() as server, native_client(server) as client:
        await client.configure(start_policy={"type": "on_min_length", "min_video_frames": 2})
        await client.binary(b"image", Modality.IMAGE)
        await client.binary(b"frame", Modality.VIDEO)
        started = await client.until("response_started")
        assert (started["trigger"], started["sequence_id"]) == ("min_length", 1)
        await client.send("finish")
        assert (await client.answer()).reason == "stop"


async def test_bare_finish_starts_without_a_number() -> None:
    async with live_server() as server, native_client(server) as client:
        await client.configure(start_policy="on_end_only")
        await client.chunk("hello")
        await client.send("finish")
        started = await client.until("response_started")
        assert (started["trigger"], started["sequence_id"]) == ("end_of_input", None)
        assert (await client.answer()).text == "hello"


async def test_operator_forces_a_policy() -> None:
    async with (
        live_server(streaming_input={"force_start_policy": "on_end_only"}) as server,
        native_client(server) as client,
    ):
        updated = await client.configure(start_policy="on_first_chunk")
        assert updated["start_policy"] == "on_end_only"
        await client.chunk("a")
        await client.barrier()
        assert client.seen("response_started") == []
        await client.send("finish")
        assert (await client.answer()).text == "a"


# after the start


async def test_extend_answers_while_the_input_arrives() -> None:
    async with live_server() as server, native_client(server) as client:
        await client.chunk("one ")
        started = await client.until("response_started")
        assert started["input_mode"] == "extend"
        assert (await client.until("output_chunk"))["text"] == "one "
        await client.chunk("two")
        assert (await client.until("output_chunk"))["text"] == "two"
        await client.chunk(end=True)
        answer = await client.answer()
        assert answer.final["usage"]["input_after_start_bytes"] == 3


async def test_snapshot_counts_later_chunks_and_does_not_use_them() -> None:
    async with live_server() as server, native_client(server) as client:
        await client.configure(after_start="snapshot", start_policy={"type": "on_min_length", "min_chunks": 2})
        await client.chunk("one ")
        await client.chunk("two ")
        await client.chunk("three ")
        await client.chunk("four", end=True)
        answer = await client.answer()
        assert answer.text == "one two "
        assert answer.started is not None
        assert answer.started["input_mode"] == "snapshot"
        assert answer.final["usage"]["input_after_start_bytes"] == 10


async def test_snapshot_is_answered_while_its_input_is_open() -> None:
    engine = ScriptedEngine([TextOutput("answer")])
    async with live_server(engine) as server, native_client(server) as client:
        await client.configure(after_start="snapshot", start_policy="on_first_chunk")
        await client.chunk("one")
        assert (await client.until("output_chunk"))["text"] == "answer"
        await server.until(lambda: engine.active_requests == 0)
        await client.chunk("accepted and counted")
        await client.barrier()
        assert client.guarantees.finished == []
        await client.send("finish")
        answer = await client.answer()
        assert (answer.reason, answer.final["usage"]["input_after_start_bytes"]) == ("stop", 20)
        await client.chunk("a cancelled one")
        await client.until("output_chunk")
        await client.send("cancel")
        assert (await client.answer()).reason == "cancelled"


async def test_rest_of_an_answer_that_ended_early_is_swallowed() -> None:
    async with live_server() as server, native_client(server) as client:
        await client.configure(sampling={"max_tokens": 2})
        await client.chunk("one two three")
        await client.chunk("four", end=True)
        answer = await client.answer()
        assert (answer.text, answer.reason) == ("one two", "length")
        await client.say("a b")
        assert (await client.answer()).text == "a b"


# the end of input


async def test_finish_is_idempotent() -> None:
    async with live_server() as server, native_client(server) as client:
        await client.send("finish")
        await client.chunk("hello")
        for _ in range(3):
            await client.send("finish")
        assert (await client.answer()).text == "hello"
        await client.send("finish")
        await client.barrier()
        assert client.seen("error") == []
        assert len(client.guarantees.finished) == 1


async def test_finish_keeps_its_place_behind_a_gap() -> None:
    async with live_server() as server, native_client(server) as client:
        await client.chunk("b ", number=1)
        await client.chunk("c ", number=2)
        await client.send("finish")
        await client.chunk("d", number=3, end=True)
        await client.chunk("a ", number=0)
        assert (await client.answer()).text == "a b c "
        assert (await client.answer()).text == "d"


@pytest.mark.parametrize("with_chunk", [True, False])
async def test_empty_request(with_chunk: bool) -> None:
    async with live_server() as server, native_client(server) as client:
        if with_chunk:
            await client.chunk("")
            await client.send("finish")
        else:
            await client.chunk(end=True)
        answer = await client.answer()
        assert [error["code"] for error in answer.errors] == ["empty_input"]
        assert answer.errors[0]["request_id"] == answer.final["request_id"]
        assert (answer.started, answer.reason) == (None, "error")
        await client.say("next")
        assert (await client.answer()).text == "next"


# cancelling


class Gate:
    """A step of a script that waits until a test lets it go."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.opened = asyncio.Event()

    async def __call__(self) -> None:
        self.reached.set()
        await self.opened.wait()


@pytest.mark.parametrize("by_name", [False, True])
async def test_cancel_a_running_answer(by_name: bool) -> None:
    gate = Gate()
    engine = ScriptedEngine([TextOutput("said "), gate, TextOutput("never said")])
    async with live_server(engine) as server, native_client(server) as client:
        await client.say("hello there")
        started = await client.until("response_started")
        await client.until("output_chunk")
        await gate.reached.wait()
        await client.send("cancel", **({"request_id": started["request_id"]} if by_name else {}))
        answer = await client.answer()
        assert (answer.reason, answer.chunks, answer.errors) == ("cancelled", [], [])
        assert answer.final["usage"]["input_tokens"] == 2
        assert answer.final["usage"]["output_tokens"] == 1
        await server.until(lambda: engine.active_requests == 0)
        gate.opened.set()
        await client.say("again")
        assert (await client.answer()).text == "said never said"


async def test_cancel_before_the_start() -> None:
    async with live_server() as server, native_client(server) as client:
        await client.configure(start_policy="on_end_only")
        await client.chunk("never ")
        await client.chunk("answered")
        await client.send("cancel")
        answer = await client.answer()
        assert (answer.started, answer.reason, answer.errors) == (None, "cancelled", [])
        await client.say("a new request")
        assert (await client.answer()).text == "a new request"


async def test_cancel_while_the_input_is_open_closes_it() -> None:
    async with live_server() as server, native_client(server) as client:
        await client.chunk("one ")
        await client.until("output_chunk")
        await client.send("cancel")
        assert (await client.answer()).reason == "cancelled"
        await client.chunk("two", end=True)
        assert (await client.answer()).text == "two"


async def test_late_and_unknown_cancels_do_nothing() -> None:
    async with live_server() as server, native_client(server) as client:
        await client.send("cancel")
        await client.send("cancel", request_id="req_nobody")
        await client.say("hello")
        answer = await client.answer()
        await client.send("cancel")
        await client.send("cancel", request_id=answer.final["request_id"])
        await client.send("cancel", request_id=None)
        await client.barrier()
        assert client.seen("error") == []
        await client.say("again")
        assert (await client.answer()).text == "again"


async def test_cancel_drops_what_waits_behind_a_gap() -> None:
    async with live_server() as server, native_client(server) as client:
        await client.chunk("a", number=0)
        await client.until("response_started")
        await client.chunk("dropped", number=3, end=True)
        await client.send("cancel")
        answer = await client.answer()
        assert answer.reason == "cancelled"
        assert (await client.until("input_ack"))["next_sequence_id"] == 4
        await client.chunk("too late", number=1)
        assert (await client.until("input_ack"))["next_sequence_id"] == 4
        await client.chunk("next", number=4, end=True)
        assert (await client.answer()).text == "next"
        (conversation,) = server.app.sessions.conversations
        assert server.held_bytes == weighed(conversation.ledger)


async def test_a_bare_cancel_leaves_what_waits_with_a_whole_input() -> None:
    gate = Gate()
    engine = ScriptedEngine([gate, TextOutput("answer")])
    async with live_server(engine) as server, native_client(server) as client:
        await client.configure(start_policy="on_end_only")
        await client.say("one")
        await client.until("response_started")
        await client.say("two")
        await client.chunk("three")
        await client.barrier()
        # The first is being answered, and the third is open.
        await client.send("cancel")
        assert [(await client.answer()).reason for _ in range(2)] == ["cancelled", "cancelled"]
        gate.opened.set()
        second = await client.answer()
        assert (second.reason, second.text) == ("stop", "answer")


async def test_cancel_stops_the_newest_when_none_is_answered() -> None:
    async with live_server() as server, native_client(server) as client:
        await client.configure(start_policy="on_end_only")
        await client.chunk("open")
        await client.barrier()
        await client.send("cancel")
        assert (await client.answer()).reason == "cancelled"


# several at once


async def test_waiting_requests_are_answered_in_order() -> None:
    gate = Gate()
    async with live_server(ScriptedEngine([gate, TextOutput("x")])) as server, native_client(server) as client:
        for turn in range(5):
            await client.say(f"turn {turn}")
        await client.barrier()
        gate.opened.set()
        answers = [await client.answer() for _ in range(5)]
        assert [answer.reason for answer in answers] == ["stop"] * 5
        assert [answer.started["sequence_id"] for answer in answers if answer.started] == [0, 1, 2, 3, 4]


async def test_one_request_too_many_is_refused_and_the_session_goes_on() -> None:
    gate = Gate()
    async with live_server(ScriptedEngine([gate, TextOutput("x")])) as server, native_client(server) as client:
        for turn in range(5):
            await client.say(f"turn {turn}")
        await client.barrier()
        assert client.guarantees.finished == []
        await client.chunk("one too many, ")
        await client.chunk("and its rest", end=True)
        refused = await client.answer()
        assert [error["code"] for error in refused.errors] == ["engine_overloaded"]
        assert refused.errors[0]["retryable"] is True
        assert refused.errors[0]["retry_after_ms"] == 1000
        assert refused.errors[0]["request_id"] == refused.final["request_id"]
        assert refused.reason == "error"
        gate.opened.set()
        assert [(await client.answer()).reason for _ in range(5)] == ["stop"] * 5
        await client.say("now there is room")
        assert (await client.answer()).reason == "stop"


async def test_overlap_interrupt_cancels_what_is_answered() -> None:
    gate = Gate()
    async with live_server(ScriptedEngine([TextOutput("begun "), gate])) as server, native_client(server) as client:
        await client.configure(overlap="interrupt")
        await client.say("one")
        first = await client.until("response_started")
        await client.until("output_chunk")
        await client.chunk("two")
        answer = await client.answer()
        assert (answer.final["request_id"], answer.reason) == (first["request_id"], "cancelled")
        gate.opened.set()
        await client.chunk(end=True)
        assert (await client.answer()).reason == "stop"


async def test_overlap_wait_takes_the_next_input_meanwhile() -> None:
    gate = Gate()
    async with live_server(ScriptedEngine([gate, TextOutput("x")])) as server, native_client(server) as client:
        await client.say("one")
        await client.until("response_started")
        await client.chunk("two, ")
        await client.chunk("said at leisure", end=True)
        ack = await client.until("input_ack")
        while ack["next_sequence_id"] < 3:
            ack = await client.until("input_ack")
        gate.opened.set()
        assert (await client.answer()).reason == "stop"
        assert (await client.answer()).reason == "stop"


# history


async def test_earlier_turns_are_handed_to_the_engine() -> None:
    engine = ScriptedEngine([TranscriptOutput("heard"), TextOutput("said "), TextOutput("so")])
    async with live_server(engine) as server, native_client(server) as client:
        await client.say("first")
        await client.answer()
        await client.say("second")
        await client.answer()
        await client.configure(history=False)
        await client.say("third")
        await client.answer()
        histories = [[(message.role, message.text) for message in r.history] for r in engine.requests]
        turn_1, turn_2 = ("user", "first heard"), ("assistant", "said so")
        assert histories == [[], [turn_1, turn_2], []]


async def test_history_is_bounded() -> None:
    engine = ScriptedEngine([TextOutput("one two three")])
    async with live_server(engine, limits={"max_history_tokens": 4}) as server, native_client(server) as client:
        for _ in range(3):
            await client.say("hello")
            await client.answer()
        assert [[message.text for message in request.history] for request in engine.requests] == [
            [],
            ["hello", "one two three"],
            ["hello", "one two three"],
        ]


async def test_requests_that_failed_are_no_history() -> None:
    engine = EchoEngine(EchoSettings(fail_after_chunks=1))
    seen: list[tuple[str, ...]] = []

    class Watching(EchoEngine):
        async def generate(self, request: Any, out: OutputWriter) -> None:
            seen.append(tuple(message.text for message in request.history))
            await super().generate(request, out)

    engine = Watching(EchoSettings(fail_after_chunks=1))
    async with live_server(engine) as server, native_client(server) as client:
        await client.say("one two")
        assert (await client.answer()).reason == "error"
        await client.configure(stage_params={"fake": {"fail_after_chunks": None}})
        await client.say("three")
        await client.answer()
        assert seen == [(), ()]


# what engines say


async def test_transcripts_words_and_audio_times() -> None:
    words = (Word("hi", 0, 200), Word("there", 210, 500))
    silence = np.zeros(2400, dtype=np.float32)
    script: list[EngineOutput] = [
        TranscriptOutput("hel", interim=True, start_ms=20),
        TranscriptOutput("hello", start_ms=20, words=(Word("hello", 20, 400),)),
        AudioOutput(silence, 24_000, words=words),
        AudioOutput(silence, 24_000),
        Finished(FinishReason.LENGTH, Usage(input_tokens=7, output_tokens=9, input_audio_ms=400)),
    ]
    async with live_server(ScriptedEngine(script)) as server, native_client(server) as client:
        await client.chunk(TONE, end=True)
        answer = await client.answer()
        interim, settled, first, second = answer.chunks
        assert (interim["modality"], interim["interim"], interim["text"]) == ("transcript", True, "hel")
        assert "interim" not in settled
        assert settled["words"] == [{"text": "hello", "start_ms": 20, "end_ms": 400}]
        assert [word["text"] for word in first["words"]] == ["hi", "there"]
        assert "words" not in second
        assert (first["start_ms"], second["start_ms"]) == (0, 100)
        assert answer.reason == "length"
        assert (answer.final["usage"]["total_tokens"], answer.final["usage"]["output_audio_ms"]) == (16, 200)


async def test_only_wanted_modalities_go_out() -> None:
    script: list[EngineOutput] = [
        TextOutput("text"),
        AudioOutput(np.zeros(240, dtype=np.float32), 24_000),
        TranscriptOutput("heard"),
    ]
    async with live_server(ScriptedEngine(script)) as server, native_client(server) as client:
        for modalities in (["text"], ["audio"], ["text", "audio"]):
            await client.configure(modalities=modalities)
            await client.say("x")
            found = [chunk["modality"] for chunk in (await client.answer()).chunks]
            assert found == [m for m in ("text", "audio") if m in modalities] + ["transcript"]


# finals


@pytest.mark.parametrize("times", [1, 20])
async def test_exactly_one_final_when_cancel_races_the_answer(times: int) -> None:
    async with live_server() as server, native_client(server) as client:
        for turn in range(times):
            await client.chunk("hello wide world", end=True)
            for _ in range(turn % 4):
                await asyncio.sleep(0)
            await client.send("cancel")
            await client.send("cancel")
        while len(client.guarantees.finished) < times:
            await client.receive()
        await client.barrier()
        assert len(set(client.guarantees.finished)) == times


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("modality", ["text", "audio"])
async def test_ends_may_be_repeated(modality: str, turns: bool) -> None:
    async with live_server() as server, native_client(server) as client:
        if turns:
            await client.configure(turn_detection={"type": "server_vad"})
        await client.say("one")
        assert (await client.answer()).text == "one"
        for number in (1, 2):
            await client.chunk(end=True, modality=modality)
            ack = await client.until("input_ack")
            assert ack["next_sequence_id"] == number + 1
        await client.chunk(end=True, number=0)
        assert (await client.until("input_ack"))["next_sequence_id"] == 3
        await client.say("two")
        assert (await client.answer()).text == "two"
        assert not client.seen("error")
        assert len(client.guarantees.finished) == 2


@pytest.mark.parametrize("make", [EchoEngine, EmbeddedEngine])
async def test_usage_is_that_of_the_whole_input_when_chunks_come_after_the_start(make: type[Engine]) -> None:
    spoken = clip_bytes("cards_001")
    async with live_server(make()) as server, native_client(server) as client:
        await client.configure(start_policy="on_first_chunk", modalities=["text"])
        await client.chunk("Tell me,")
        await client.until("response_started")
        for start in range(0, len(spoken), 6400):
            await client.binary(spoken[start : start + 6400])
        await client.chunk(" is it so", end=True)
        answer = await client.answer()
        usage = answer.final["usage"]
        settled = [chunk for chunk in answer.chunks if chunk["modality"] == "transcript" and not chunk.get("interim")]
        heard = sum(len(chunk["text"].split()) for chunk in settled)
        assert bool(heard) is (make is EmbeddedEngine)
        assert usage["input_audio_ms"] == round(len(spoken) / 32)
        assert usage["input_tokens"] == 5 + heard
        assert usage["input_after_start_bytes"] == len(spoken) + len(" is it so")


async def test_what_was_done_otherwise_than_asked_is_told_with_the_final() -> None:
    engine = ScriptedEngine(
        [TextOutput("It goes on"), Finished(FinishReason.LENGTH, Usage(), warnings=(context_full(100),))]
    )
    async with live_server(engine) as server, native_client(server) as client:
        await client.say("Tell me all.")
        answer = await client.answer()
        assert (answer.reason, answer.errors) == ("length", [])
        (warning,) = answer.final["warnings"]
        assert (warning["code"], warning["param"], "100 tokens" in warning["message"]) == (
            "context_length_exceeded",
            None,
            True,
        )
        body = {"messages": [{"role": "user", "content": "Tell me all."}]}
        whole = (await post(server.port, "/v1/chat/completions", body)).json()
        assert (whole["choices"][0]["finish_reason"], whole["warnings"]) == ("length", [warning])
        streamed = events_of(await post(server.port, "/v1/chat/completions", {**body, "stream": True}))
        assert streamed[-2].json()["warnings"] == [warning]


async def test_the_pages_that_an_answer_is_taken_from_are_told_with_the_final() -> None:
    mars = UrlCitation("Mars", "https://example.com/Mars", 0, 8, "CC-BY-SA-4.0")
    moon = UrlCitation("<Moon>", "https://example.com/Moon", 9, 17)
    engine = ScriptedEngine(
        [TextOutput("It is so and so."), Finished(FinishReason.STOP, Usage(), citations=(mars, moon))]
    )
    flat = [
        {"title": "Mars", "url": mars.url, "start_index": 0, "end_index": 8, "license": "CC-BY-SA-4.0"},
        {"title": "<Moon>", "url": moon.url, "start_index": 9, "end_index": 17},
    ]
    annotations = [{"type": "url_citation", "url_citation": one} for one in flat]
    async with live_server(engine) as server, native_client(server) as client:
        await client.say("What is it?")
        answer = await client.answer()
        assert answer.final["annotations"] == [{"type": "url_citation", **one} for one in flat]
        async with connect(server.websocket_url) as session:
            assert (await session.ask_text("What is it?")).citations == (mars, moon)
        body = {"messages": [{"role": "user", "content": "What is it?"}]}
        whole = (await post(server.port, "/v1/chat/completions", body)).json()
        assert whole["choices"][0]["message"]["annotations"] == annotations
        streamed = events_of(await post(server.port, "/v1/chat/completions", {**body, "stream": True}))
        (last,) = streamed[-2].json()["choices"]
        assert (last["delta"], last["finish_reason"]) == ({"annotations": annotations}, "stop")


async def test_an_answer_from_nowhere_has_no_annotations() -> None:
    async with live_server(ScriptedEngine([TextOutput("yes")])) as server, native_client(server) as client:
        await client.say("Is it?")
        assert "annotations" not in (await client.answer()).final
        body = {"messages": [{"role": "user", "content": "Is it?"}]}
        whole = (await post(server.port, "/v1/chat/completions", body)).json()
        assert "annotations" not in whole["choices"][0]["message"]


async def test_each_of_several_answers_has_the_pages_that_it_is_taken_from() -> None:
    pages = tuple(UrlCitation(f"{choice}", "https://example.com/", 0, 1, choice=choice) for choice in range(2))
    reasons = (FinishReason.STOP,) * 2
    engine = CapableEngine(
        [
            TextOutput("a"),
            TextOutput("b", choice=1),
            Finished(FinishReason.STOP, Usage(), reasons, citations=pages),
        ]
    )
    async with live_server(engine) as server:
        body = {"messages": [{"role": "user", "content": "Is it?"}], "n": 2}
        whole = (await post(server.port, "/v1/chat/completions", body)).json()
        titles = [
            [one["url_citation"]["title"] for one in choice["message"]["annotations"]] for choice in whole["choices"]
        ]
        assert titles == [["0"], ["1"]]

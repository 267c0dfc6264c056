"""Fields of ``/v1/realtime``: what each does, beyond being shown; ``wire/realtime_parity.toml`` names these tests."""

from __future__ import annotations

import asyncio
import base64
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from support.inline_workers import LoudnessDetector, inline
from support.inline_workers import loud_24k as loud
from support.inline_workers import quiet_24k as quiet
from support.live_server import live_server
from support.realtime_client import RealtimeClient, failed, realtime_client, text_of
from support.scripted_engines import CapableEngine, HearingEngine, PlayingEngine, said, tool_call

from omni_ws.audio.pcm import Samples
from omni_ws.config.model import LimitsConfig
from omni_ws.core.chunks import FinishReason, InputChunk, Modality, Usage
from omni_ws.engine.base import AudioOutput, Finished, TextOutput, TranscriptOutput
from omni_ws.engine.fake import ScriptedEngine

FIND = {"type": "function", "name": "find", "description": "Finds.", "parameters": {"type": "object"}}
LOOK = {"type": "function", "name": "look", "description": "Looks.", "parameters": {"type": "object"}}
SPEECH = AudioOutput(np.full(24_000, 0.25, np.float32), 24_000)
#: What an item of a response does not have yet when it begins.
EMPTY: dict[str, dict[str, Any]] = {"message": {"content": []}, "function_call": {"arguments": ""}}
#: How the same tool is told in the chat API.
CHAT_FIND = {"type": "function", "function": {name: value for name, value in FIND.items() if name != "type"}}


def text(chunks: list[InputChunk]) -> str:
    return b"".join(chunk.payload for chunk in chunks if chunk.modality is Modality.TEXT).decode()


def history(engine: PlayingEngine) -> list[tuple[str, str]]:
    """What the newest request saw of the conversation."""
    return [(message.role, message.text) for message in engine.requests[-1].history]


async def talk(client: RealtimeClient, *texts: str, **response: Any) -> None:
    for one in texts:
        await client.say(one)
        await client.respond(**response)


# the session and a response


async def test_what_a_session_asks_of_the_model() -> None:
    engine = CapableEngine([said("yes")])
    async with live_server(engine) as server, realtime_client(server) as client:
        choice = {"type": "function", "name": "find"}
        await client.update(
            instructions="Be brief.", tools=[FIND], tool_choice=choice, max_output_tokens=7, temperature=0.7
        )
        await client.say("Is it hot?")
        await client.respond()
        await client.update(output_modalities=["text"])
        await client.say("And now?")
        assert (await client.respond())["output_modalities"] == ["text"]
    request, written = engine.requests
    assert (sorted(request.modalities), sorted(written.modalities)) == (["audio", "text"], ["text"])
    assert (request.instructions, request.tools) == ("Be brief.", (CHAT_FIND,))
    assert request.tool_choice == {"type": "function", "function": {"name": "find"}}
    assert request.sampling == {"max_tokens": 7, "temperature": 0.7}


async def test_what_a_response_asks_of_the_model() -> None:
    engine = CapableEngine([said("yes")])
    async with live_server(engine) as server, realtime_client(server) as client:
        await client.update(tools=[LOOK], tool_choice="none")
        await client.say("Is it hot?")
        choice = {"type": "function", "name": "find"}
        await client.respond(tools=[FIND], tool_choice=choice, output_modalities=["text"], temperature=0.3)
        await client.say("And now?")
        await client.respond()
    own, usual = engine.requests
    assert own.tools == (CHAT_FIND,)
    assert own.tool_choice == {"type": "function", "function": {"name": "find"}}
    assert (sorted(own.modalities), dict(own.sampling)) == (["text"], {"temperature": 0.3})
    assert [one["function"]["name"] for one in usual.tools] == ["look"]
    assert (usual.tool_choice, sorted(usual.modalities), dict(usual.sampling)) == ("none", ["audio", "text"], {})


async def test_tools_may_have_the_form_of_chat() -> None:
    engine = CapableEngine([said("yes")])
    async with live_server(engine) as server, realtime_client(server) as client:
        session = await client.update(tools=[CHAT_FIND])
        assert session["tools"] == [FIND]
        assert "warnings" not in client.received[-1]
        await talk(client, "Is it hot?")
        await client.update(tools=[])
        await talk(client, "And now?", tools=[CHAT_FIND])
    assert [one.tools for one in engine.requests] == [(CHAT_FIND,)] * 2


async def test_a_model_is_told_of_parallel_calls_and_effort() -> None:
    engine = CapableEngine([said("yes")], upstream=frozenset({"reasoning_effort"}))
    async with live_server(engine) as server, realtime_client(server) as client:
        session = await client.update(parallel_tool_calls=False, reasoning={"effort": "low"})
        assert (session["parallel_tool_calls"], session["reasoning"]) == (False, {"effort": "low"})
        assert "warnings" not in client.received[-1]
        await talk(client, "Is it hot?")
        await talk(client, "And now?", parallel_tool_calls=True, reasoning={"effort": "high"})
        await talk(client, "And then?")
        await client.update(parallel_tool_calls=None, reasoning=None)
        await talk(client, "And here?")
        error = await failed(client, "session.update", session={"reasoning": {"effort": "much"}})
        assert (error["code"], error["param"]) == ("invalid_value", "session.reasoning.effort")
        error = await failed(client, "response.create", response={"parallel_tool_calls": "no"})
        assert (error["code"], error["param"]) == ("invalid_value", "response.parallel_tool_calls")
    options = [one.options for one in engine.requests]
    assert [one.parallel_tool_calls for one in options] == [False, True, False, True]
    assert [dict(one.upstream) for one in options] == [
        {"reasoning_effort": "low"},
        {"reasoning_effort": "high"},
        {"reasoning_effort": "low"},
        {},
    ]


async def test_a_model_without_tools_or_effort_is_not_told_of_them() -> None:
    engine = CapableEngine([said("yes")], tools=False)
    async with live_server(engine) as server, realtime_client(server) as client:
        session = await client.update(parallel_tool_calls=False, reasoning={"effort": "low"})
        assert (session["parallel_tool_calls"], session["reasoning"]) == (False, {"effort": "low"})
        named = [one["param"] for one in client.received[-1]["warnings"]]
        assert named == ["session.parallel_tool_calls", "session.reasoning.effort"]
        await client.say("Is it hot?")
        assert (await client.respond(reasoning={"effort": "high"}))["status"] == "completed"
        (created,) = client.seen("response.created")
        assert [one["param"] for one in created["warnings"]] == ["response.reasoning.effort"]
    assert dict(engine.requests[0].options.upstream) == {}


async def test_how_a_session_speaks() -> None:
    engine = CapableEngine([said("yes")], voices=("echo", "deep", "high"), speed=True)
    async with live_server(engine) as server, realtime_client(server) as client:
        for voice, speed in (("deep", 1.5), ({"id": "high"}, 0.25)):
            await client.update(audio={"output": {"voice": voice, "speed": speed}})
            await client.say("Is it hot?")
            await client.respond()
        (warning,) = client.seen("session.updated")[-1]["warnings"]
        assert (warning["code"], warning["param"]) == ("not_in_effect", "session.audio.output.speed")
        for speed in (0.24, 1.51):
            error = await failed(client, "session.update", session={"audio": {"output": {"speed": speed}}})
            assert (error["code"], error["param"]) == ("invalid_value", "session.audio.output.speed")
    assert [(one.voice, one.speed) for one in engine.requests] == [("deep", 1.5), ("high", 0.5)]


async def test_a_voice_that_is_not_here_is_the_one_that_is_shown() -> None:
    async with live_server() as server, realtime_client(server) as client:
        session = await client.update(audio={"output": {"voice": "marin"}})
        assert session["audio"]["output"]["voice"] == "echo"
        (warning,) = client.received[-1]["warnings"]
        assert (warning["code"], warning["param"]) == ("not_in_effect", "session.audio.output.voice")


async def test_a_name_with_dots_is_the_name_of_no_field() -> None:
    """One of 200 KB is warned of in the time that it takes to read it."""
    names = {"audio.output": {"voice": "echo"}, "tracing.": 1, "a." * 100_000: 1}
    async with live_server() as server, realtime_client(server) as client:
        await client.update(**names)
        warnings = [(one["code"], one["param"]) for one in client.received[-1]["warnings"]]
        assert warnings == [("unknown_parameter", f"session.{name}"[:128]) for name in names]


async def test_a_response_has_a_voice_and_a_format_of_its_own() -> None:
    engine = CapableEngine([said("yes"), SPEECH], voices=("echo", "deep", "high"))
    async with live_server(engine) as server, realtime_client(server) as client:
        sizes = []
        for output in ({"voice": "deep", "format": {"type": "audio/pcmu"}}, {"voice": {"id": "high"}}):
            await client.say("Is it hot?")
            response = await client.respond(audio={"output": output})
            sizes.append(len(client.heard(response["id"])))
            shown = response["audio"]["output"]
            assert shown["voice"] == engine.requests[-1].voice
        assert (sizes, shown["format"]) == ([8000, 48_000], {"type": "audio/pcm", "rate": 24_000})
        assert client.seen("response.done")[0]["response"]["audio"]["output"]["format"] == {"type": "audio/pcmu"}
        assert [one.voice for one in engine.requests] == ["deep", "high"]
        error = await failed(
            client, "response.create", response={"audio": {"output": {"format": {"type": "audio/opus"}}}}
        )
        assert (error["code"], error["param"]) == ("unsupported_format", "response.audio.output.format.type")


async def test_a_response_shows_its_metadata() -> None:
    async with live_server() as server, realtime_client(server) as client:
        await client.say("hello")
        response = await client.respond(metadata={"topic": "1"})
        assert response["metadata"] == {"topic": "1"}
        (created,) = client.seen("response.created")
        assert created["response"]["metadata"] == {"topic": "1"}
        assert (await client.respond())["metadata"] is None


async def test_what_a_response_shows() -> None:
    usage = Usage(input_tokens=11, output_tokens=3, cached_tokens=4)
    script = [said("so "), *tool_call("find", "{", "}"), SPEECH, Finished(FinishReason.TOOL_CALLS, usage)]
    engine = CapableEngine(script)
    async with live_server(engine) as server, realtime_client(server) as client:
        await client.update(tools=[FIND])
        await client.say("Find it.")
        spoken = await client.respond()
        audio = client.heard(spoken["id"])
        assert np.frombuffer(audio, "<i2") == pytest.approx(np.full(24_000, 0.25 * 32_767), abs=1)
        await client.say("Write it.")
        written = await client.respond(output_modalities=["text"])
        place = {"response_id": spoken["id"], "item_id": spoken["output"][0]["id"], "output_index": 0}
        at = {**place, "content_index": 0}
        call = spoken["output"][1]
        called = {"response_id": spoken["id"], "item_id": call["id"], "output_index": 1, "call_id": call["call_id"]}
        text_at = {**at, "response_id": written["id"], "item_id": written["output"][0]["id"]}
        expected = {
            "response.output_item.added": [(0, "message", "in_progress"), (1, "function_call", "in_progress")],
            "response.output_item.done": [(0, "message", "completed"), (1, "function_call", "completed")],
        }
        for kind, items in expected.items():
            events = [one for one in client.seen(kind) if one["response_id"] == spoken["id"]]
            shown = [(one["output_index"], one["item"]["type"], one["item"]["status"]) for one in events]
            assert shown == items
        for kind, fields in {
            "response.content_part.added": {**at, "part": {"type": "audio", "transcript": ""}},
            "response.content_part.done": {**at, "part": {"type": "audio", "transcript": "so "}},
            "response.output_audio_transcript.delta": {**at, "delta": "so "},
            "response.output_audio_transcript.done": {**at, "transcript": "so "},
            "response.output_audio.delta": {**at, "delta": base64.b64encode(audio).decode()},
            "response.output_audio.done": at,
            "response.output_text.delta": {**text_at, "delta": "so "},
            "response.output_text.done": {**text_at, "text": "so "},
            "response.function_call_arguments.delta": {**called, "delta": "{"},
            "response.function_call_arguments.done": {**called, "name": "find", "arguments": "{}"},
        }.items():
            event = client.seen(kind)[0]
            assert {name: event[name] for name in fields} == fields, kind
        for step, text in (("added", ""), ("done", "so ")):
            parts = [one["part"] for one in client.seen(f"response.content_part.{step}")]
            assert parts[1] == {"type": "text", "text": text}
        begun = [{**one, "status": "in_progress", **EMPTY[one["type"]]} for one in spoken["output"]]
        for step, expected_items in (("added", begun), ("done", spoken["output"])):
            events = client.seen(f"response.output_item.{step}")
            assert [one["item"] for one in events if one["response_id"] == spoken["id"]] == expected_items
    assert (spoken["object"], spoken["status"]) == ("realtime.response", "completed")
    assert (spoken["output_modalities"], written["output_modalities"]) == (["audio"], ["text"])
    assert spoken["conversation_id"] == written["conversation_id"]
    assert spoken["conversation_id"].startswith("conv_")
    assert spoken["usage"] == {
        "total_tokens": 14,
        "input_tokens": 11,
        "output_tokens": 3,
        "input_token_details": {
            "text_tokens": 11,
            "audio_tokens": 0,
            "image_tokens": 0,
            "cached_tokens": 4,
            "cached_tokens_details": {"text_tokens": 4, "audio_tokens": 0, "image_tokens": 0},
        },
        "output_token_details": {"text_tokens": 3, "audio_tokens": 0},
    }


async def test_clearing_the_output_cancels_the_response() -> None:
    endless = ScriptedEngine([TextOutput("one "), SPEECH, lambda: asyncio.Event().wait()])
    async with live_server(endless) as server, realtime_client(server) as client:
        await client.say("hello")
        await client.send("response.create")
        await client.until("response.output_audio.delta")
        await client.send("output_audio_buffer.clear")
        cleared = await client.until("output_audio_buffer.cleared")
        response = await client.response()
        assert (response["id"], response["status"]) == (cleared["response_id"], "cancelled")


# spoken turns


class Unsure(LoudnessDetector):
    """Takes each loud window for speech with a probability of 0.6."""

    def process(self, samples: Samples) -> list[float]:
        return [0.6 * one for one in super().process(samples)]


@pytest.mark.virtual_clock
async def test_how_turns_are_detected() -> None:
    engine = HearingEngine(heard=[TranscriptOutput("go"), said("I go")])
    async with live_server(engine) as server:
        inline(server).app.sessions.speech_workers.new_detector = Unsure
        async with realtime_client(server) as client:
            for detection in ({"threshold": 0.7}, {}, {"prefix_padding_ms": 32}, {"silence_duration_ms": 160}):
                await client.update(audio={"input": {"turn_detection": {"type": "server_vad", **detection}}})
                await client.append(quiet(640) + loud(320) + quiet(1280))
                if "threshold" not in detection:
                    await client.response()
            first = client.seen("input_audio_buffer.speech_started")[0]
            stopped = client.seen("input_audio_buffer.speech_stopped")[0]
            assert first["item_id"] == stopped["item_id"]
            # The first speech was none: it was less likely than the threshold.
            assert first["audio_start_ms"] == pytest.approx(2240 + 640, abs=33)
            assert stopped["audio_end_ms"] == pytest.approx(2240 + 640 + 320, abs=65)
    usual, padded, soon = (sum(len(chunk.payload) for chunk in chunks) / 48 for chunks in engine.inputs)
    assert usual - padded == pytest.approx(300 - 32, abs=33)
    assert usual - soon == pytest.approx(500 - 160, abs=33)


async def test_audio_of_an_item_is_heard() -> None:
    engine = HearingEngine([said("no")], heard=[TranscriptOutput("go"), said("I go")])
    async with live_server(engine) as server, realtime_client(server) as client:
        audio = base64.b64encode(loud(100)).decode()
        content = [{"type": "input_audio", "audio": audio}]
        await client.send("conversation.item.create", item={"type": "message", "role": "user", "content": content})
        assert text_of(await client.respond()) == "I go"
        assert b"".join(chunk.payload for chunk in engine.inputs[0]) == loud(100)
        content = [{"type": "output_audio", "audio": audio, "transcript": "I went"}]
        await client.send("conversation.item.create", item={"type": "message", "role": "assistant", "content": content})
        added = await client.until("conversation.item.added")
        assert added["item"]["content"] == [{"type": "output_audio", "transcript": "I went"}]
        assert [one["param"] for one in added["warnings"]] == ["item.content[0].audio"]
        await client.say("And now?")
        assert text_of(await client.respond()) == "no"
        assert history(engine)[-1] == ("assistant", "I go I went")


@pytest.mark.virtual_clock
async def test_a_transcript_has_the_length_of_its_speech() -> None:
    engine = ScriptedEngine((TranscriptOutput("go forward"), TextOutput("I go")))
    async with live_server(engine) as server, realtime_client(inline(server)) as client:
        await client.update(audio={"input": {"transcription": {}, "turn_detection": None}})
        await client.append(loud(300))
        await client.send("input_audio_buffer.commit")
        await client.respond()
        (completed,) = client.seen("conversation.item.input_audio_transcription.completed")
        assert completed["usage"] == {"type": "duration", "seconds": 0.3}


def idle(ms: Any, kind: str = "server_vad") -> dict[str, Any]:
    return {"input": {"transcription": {}, "turn_detection": {"type": kind, "idle_timeout_ms": ms}}}


@pytest.mark.virtual_clock
async def test_a_silence_behind_a_response_is_answered() -> None:
    engine = HearingEngine([said("Are you there?"), SPEECH])
    async with live_server(engine) as server, realtime_client(inline(server)) as client:
        session = await client.update(audio=idle(6000))
        assert session["audio"]["input"]["turn_detection"]["idle_timeout_ms"] == 6000
        loop = asyncio.get_running_loop()
        with pytest.raises(TimeoutError):  # there was no response yet
            async with asyncio.timeout(60):
                await client.receive()
        await client.say("Hello.")
        await client.respond()
        ended = loop.time()
        await client.append(quiet(320))
        begin = len(client.received)
        for _ in range(2):  # the answer to the silence is a response, too
            triggered = await client.until("input_audio_buffer.timeout_triggered")
            assert loop.time() - ended == pytest.approx(7, abs=0.1)  # its second of speech is played first
            response = await client.response()
            ended = loop.time()
        assert text_of(response) == "Are you there?"
        assert client.kinds(since=begin)[:5] == [
            "input_audio_buffer.timeout_triggered",
            "input_audio_buffer.committed",
            "conversation.item.added",
            "conversation.item.done",
            "conversation.item.input_audio_transcription.completed",
        ]
        committed = client.seen("input_audio_buffer.committed")[-1]
        assert committed["item_id"] == triggered["item_id"]
        assert (triggered["audio_start_ms"], triggered["audio_end_ms"]) == (0, 288)  # as far as detection is
        assert [text(one) for one in engine.inputs[1:]] == ["(The user has said nothing for 6 seconds.)"] * 2
        assert history(engine) == [("user", "Hello."), ("assistant", "Are you there? Are you there?")]
        await client.update(audio=idle(None))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60):
                await client.receive()


@pytest.mark.virtual_clock
async def test_a_silence_is_answered_where_turns_are_not() -> None:
    engine = HearingEngine([said("Are you there?")])
    async with live_server(engine) as server, realtime_client(inline(server)) as client:
        audio = idle(5000)
        audio["input"]["turn_detection"]["create_response"] = False
        await client.update(audio=audio)
        await client.say("Hello.")
        await client.respond()
        await client.until("input_audio_buffer.timeout_triggered")
        assert text_of(await client.response()) == "Are you there?"
        await client.send("session.update", session={"type": "transcription"})
        await client.until("session.updated")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60):
                await client.receive()


async def test_the_limits_of_an_idle_timeout() -> None:
    async with live_server() as server, realtime_client(inline(server)) as client:
        for limit in (5000, 30_000):
            session = await client.update(audio=idle(limit))
            assert session["audio"]["input"]["turn_detection"]["idle_timeout_ms"] == limit
        for ms, kind in ((4999, "server_vad"), (30_001, "server_vad"), ("5000", "server_vad"), (6000, "semantic_vad")):
            error = await failed(client, "session.update", session={"audio": idle(ms, kind)})
            assert (error["code"], error["param"]) == (
                "invalid_value",
                "session.audio.input.turn_detection.idle_timeout_ms",
            )


# the conversation


async def test_an_item_goes_behind_the_one_that_is_named() -> None:
    engine = CapableEngine([said("yes")])
    async with live_server(engine) as server, realtime_client(server) as client:
        await client.say("one", id="one")
        answer = (await client.respond())["output"][0]["id"]
        await client.say("three", id="three")

        async def put(text: str, after: str | None, role: str = "user", **item: Any) -> str | None:
            kind = "output_text" if role == "assistant" else "input_text"
            content = [{"type": kind, "text": text}]
            fields = {"type": "message", "role": role, "content": content, "id": text, **item}
            await client.send("conversation.item.create", item=fields, previous_item_id=after)
            previous: str | None = (await client.until("conversation.item.added"))["previous_item_id"]
            await client.until("conversation.item.done")
            return previous

        assert await put("half", "one") == "one"
        assert await put("zero", "root", role="system") is None
        assert await put("two", answer) == answer
        assert await put("four", None) == "three"
        assert await put("quarter", "one") == "one"
        error = await failed(
            client,
            "conversation.item.create",
            item={"type": "message", "role": "user", "content": []},
            previous_item_id="nobody",
        )
        assert (error["code"], error["param"]) == ("item_create_invalid_previous_item_id", "previous_item_id")
        await client.respond()
        before = [("system", "zero"), ("user", "one quarter half"), ("assistant", "yes")]
        assert history(engine) == before
        assert text(engine.inputs[-1]) == "two\nthree\nfour"
        await put("no", "three", role="assistant")
        await client.send("conversation.item.delete", item_id="quarter")
        await client.until("conversation.item.deleted")
        await client.say("five")
        await client.respond()
        # What was answered together is one message, so that nothing comes between its parts.
        before = [("system", "zero"), ("user", "one half"), ("assistant", "yes no"), ("user", "two\nthree\nfour")]
        assert history(engine) == [*before, ("assistant", "yes")]


def long(number: int) -> str:
    """Ten tokens, by the history's estimate."""
    return f"{number} a b c d e f g h i"


async def test_a_conversation_is_cut_to_a_share_of_its_limit() -> None:
    engine = CapableEngine([said("a b c d e f g h i j")])
    seen: dict[float, list[int]] = {}
    async with live_server(engine) as server:
        for ratio in (0.8, 0.2):
            async with realtime_client(server) as client:
                truncation = {
                    "type": "retention_ratio",
                    "retention_ratio": ratio,
                    "token_limits": {"post_instructions": 200},
                }
                session = await client.update(truncation=truncation)
                assert session["truncation"] == truncation
                assert "warnings" not in client.received[-1]
                before = len(engine.requests)
                await talk(client, *map(long, range(20)))
                seen[ratio] = [len(one.history) for one in engine.requests[before:]]
                await client.update(truncation="auto")
                await talk(client, long(20))
                assert len(engine.requests[-1].history) > max(seen[ratio])
    for ratio, sizes in seen.items():
        most = max(sizes)
        after = [size for one, size in pairwise(sizes) if size < one]
        assert sizes[-1] < 40
        assert after, sizes
        assert min(after) == pytest.approx(ratio * most, abs=2), sizes


async def test_a_limit_beyond_that_of_the_server_is_told() -> None:
    async with live_server(limits=LimitsConfig(max_history_tokens=300)) as server, realtime_client(server) as client:
        for tokens, warned in ((300, False), (301, True)):
            limits = {"post_instructions": tokens}
            await client.update(truncation={"type": "retention_ratio", "retention_ratio": 0.5, "token_limits": limits})
            assert ("warnings" in client.received[-1]) is warned
        for wrong, param in (
            ("never", "truncation"),
            ({"type": "never", "retention_ratio": 1}, "truncation.type"),
            ({"type": "retention_ratio"}, "truncation.retention_ratio"),
            ({"type": "retention_ratio", "retention_ratio": 1.01}, "truncation.retention_ratio"),
            (
                {"type": "retention_ratio", "retention_ratio": 1, "token_limits": {"post_instructions": 0}},
                "truncation.token_limits.post_instructions",
            ),
        ):
            error = await failed(client, "session.update", session={"truncation": wrong})
            assert (error["code"], error["param"]) == ("invalid_value", f"session.{param}")


@pytest.mark.parametrize("times", [1.5, 2.5])
async def test_a_message_beyond_the_limit_is_refused_however_long(times: float) -> None:
    engine = CapableEngine([said("yes")])
    limits = LimitsConfig(max_history_tokens=100)
    async with live_server(engine, limits=limits) as server, realtime_client(server) as client:
        await client.update(truncation="disabled")
        item = await client.say(" ".join(map(long, range(round(times * 10)))))
        error = await failed(client, "response.create")
        assert (error["code"], error["param"]) == ("context_length_exceeded", "session.truncation")
        await client.send("conversation.item.delete", item_id=item["id"])
        await client.until("conversation.item.deleted")
        await talk(client, "short")
        assert text(engine.inputs[-1]) == "short"


@pytest.mark.virtual_clock
async def test_a_conversation_beyond_its_limit_is_refused_if_it_is_not_to_be_cut() -> None:
    engine = HearingEngine([said("a b c d e f g h i j")], heard=[TranscriptOutput("go"), said("I go")])
    limits = LimitsConfig(max_history_tokens=100)
    async with live_server(engine, limits=limits) as server, realtime_client(inline(server)) as client:
        await client.update(truncation="disabled")
        ids = []
        for number in range(20):
            ids.append((await client.say(long(number)))["id"])
            await client.send("response.create")
            if (await client.until("response.done", "error"))["type"] == "error":
                break
        refused = client.received[-1]["error"]
        assert (refused["code"], refused["param"]) == ("context_length_exceeded", "session.truncation")
        answered = len(engine.requests)
        await client.append(quiet(96) + loud(320) + quiet(640))
        response = await client.response()
        assert (response["status"], response["status_details"]["error"]["code"]) == (
            "failed",
            "context_length_exceeded",
        )
        for item_id in ids:
            await client.send("conversation.item.delete", item_id=item_id)
            await client.until("conversation.item.deleted")
        await client.say("short")
        assert (await client.respond())["status"] == "completed"
        await client.update(truncation="auto")
        await talk(client, *map(long, range(20)))
        assert len(engine.requests) >= answered + 21

"""Spoken turns over ``/v1/realtime``: detected or committed, transcribed, answered, interrupted."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from support import inline_workers
from support.inline_workers import HeldWorkers, inline
from support.live_server import live_server
from support.patience import until
from support.realtime_client import RealtimeClient, realtime_client, text_of
from support.scripted_engines import CapableEngine, Ears, HearingEngine, RetortEngine, interim

from omni_ws.core.chunks import FinishReason, Usage, Word
from omni_ws.engine.base import AudioOutput, EngineOutput, Finished, TextOutput, TranscriptOutput
from omni_ws.engine.composed.engine import ComposedEngine
from omni_ws.engine.fake import ScriptedEngine
from omni_ws.errors import EngineFailed

PNG = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNk+M8AAAMBAQDJ/pLvAAAAAElFTkSuQmCC")
TRANSCRIBED: dict[str, Any] = {"transcription": {"model": "gpt-4o-mini-transcribe"}}
HEARD_AND_ANSWERED = (
    TranscriptOutput("go forward"),
    TextOutput("I go"),
    AudioOutput(np.full(2400, 0.25, np.float32), 24_000),
)


loud, quiet = partial(inline_workers.loud, khz=24), partial(inline_workers.quiet, khz=24)


async def speak(client: RealtimeClient, ms: int = 320) -> None:
    """A turn, and the silence behind it."""
    await client.append(quiet(96) + loud(ms) + quiet(640))


@pytest.mark.virtual_clock
async def test_a_detected_turn_is_an_item_and_is_answered() -> None:
    async with live_server(ScriptedEngine(HEARD_AND_ANSWERED)) as server, realtime_client(inline(server)) as client:
        await client.update(audio={"input": TRANSCRIBED})
        begin = len(client.received)
        await speak(client)
        response = await client.response()
        assert text_of(response) == "I go"
        assert len(client.heard(response["id"])) == 4800
        times = response["times"]
        assert times["speech_ended"] == 0
        assert {"turn_decided", "transcript_settled", "first_token", "first_audio_sent", "last_audio_sent"} <= set(
            times
        )
        assert "first_audio_played" not in times, "nobody reports it here"
        assert times["turn_decided_audio_ms"] > 0
        assert client.kinds(since=begin) == [
            "input_audio_buffer.speech_started",
            "input_audio_buffer.speech_stopped",
            "input_audio_buffer.committed",
            "conversation.item.added",
            "conversation.item.done",
            "response.created",
            "rate_limits.updated",
            "conversation.item.input_audio_transcription.delta",
            "conversation.item.input_audio_transcription.completed",
            "response.output_item.added",
            "conversation.item.added",
            "response.content_part.added",
            "response.output_audio_transcript.delta",
            "response.output_audio.delta",
            "response.output_audio.done",
            "response.output_audio_transcript.done",
            "response.content_part.done",
            "response.output_item.done",
            "conversation.item.done",
            "response.done",
        ]
        assert client.seen("rate_limits.updated")[0]["rate_limits"] == []
        (started,) = client.seen("input_audio_buffer.speech_started")
        (completed,) = client.seen("conversation.item.input_audio_transcription.completed")
        place = {"item_id": started["item_id"], "content_index": 0}
        (delta,) = client.seen("conversation.item.input_audio_transcription.delta")
        assert {name: delta[name] for name in (*place, "delta")} == {**place, "delta": "go forward"}
        assert {name: completed[name] for name in (*place, "transcript")} == {**place, "transcript": "go forward"}


@pytest.mark.virtual_clock
async def test_a_committed_turn_waits_for_its_response() -> None:
    engine = ScriptedEngine((*HEARD_AND_ANSWERED, Finished(FinishReason.STOP, Usage(output_tokens=2))))
    async with live_server(engine) as server, realtime_client(inline(server)) as client:
        session = await client.update(audio={"input": {"turn_detection": None, **TRANSCRIBED}})
        assert session["audio"]["input"]["turn_detection"] is None
        await client.say("Listen.", id="before")
        await client.append(loud(300))
        await client.send("input_audio_buffer.commit")
        committed = await client.until("input_audio_buffer.committed")
        assert committed["previous_item_id"] == "before"
        await client.until("conversation.item.done")
        assert not client.seen("input_audio_buffer.speech_started")
        assert not engine.requests
        response = await client.respond()
        assert text_of(response) == "I go"
        (completed,) = client.seen("conversation.item.input_audio_transcription.completed")
        assert (completed["item_id"], completed["transcript"]) == (committed["item_id"], "go forward")


@pytest.mark.virtual_clock
async def test_clear_drops_what_was_appended() -> None:
    async with live_server() as server, realtime_client(inline(server)) as client:
        await client.update(audio={"input": {"turn_detection": None}})
        await client.append(loud(300))
        await client.send("input_audio_buffer.clear")
        await client.until("input_audio_buffer.cleared")
        await client.send("input_audio_buffer.commit", event_id="e1")
        error = (await client.until("error"))["error"]
        assert (error["code"], error["event_id"]) == ("input_audio_buffer_commit_empty", "e1")


@pytest.mark.virtual_clock
async def test_speech_cancels_the_response() -> None:
    endless = (TextOutput("word "), AudioOutput(np.full(24_000, 0.25, np.float32), 24_000), lambda: _never())
    async with live_server(ScriptedEngine(endless)) as server, realtime_client(inline(server)) as client:
        await speak(client)
        await client.until("response.output_audio.delta")
        await speak(client)
        response = await client.response()
        assert response["status"] == "cancelled"
        assert response["status_details"] == {"type": "cancelled", "reason": "turn_detected"}
        assert client.kinds()[-1] == "response.done"


async def _never() -> None:
    await asyncio.Event().wait()


@pytest.mark.virtual_clock
async def test_a_turn_without_a_response_is_transcribed_and_answered_on_request() -> None:
    engine = ScriptedEngine(HEARD_AND_ANSWERED)
    async with live_server(engine) as server, realtime_client(inline(server)) as client:
        detection = {"type": "server_vad", "create_response": False}
        session = await client.update(audio={"input": {"turn_detection": detection}})
        assert session["audio"]["input"]["turn_detection"]["create_response"] is False
        await speak(client)
        completed = await client.until("conversation.item.input_audio_transcription.completed")
        assert completed["transcript"] == "go forward"
        assert not client.seen("response.created")
        assert text_of(await client.respond()) == "I go"
        assert [one.task for one in engine.requests] == ["transcribe", "chat"]
        assert not engine.requests[1].history


@pytest.mark.virtual_clock
@pytest.mark.parametrize("creates", [True, False])
@pytest.mark.parametrize("clears", [True, False])
async def test_of_a_response_that_is_done_and_stopped_the_history_has_what_was_heard(
    creates: bool, clears: bool
) -> None:
    words = tuple(Word(f"word{n}", 100 * n, 100 * n + 100) for n in range(50))
    sound = AudioOutput(np.full(5 * 24_000, 0.25, np.float32), 24_000, words=words)
    engine = CapableEngine([TranscriptOutput("go"), TextOutput(" ".join(word.text for word in words)), sound])
    async with live_server(engine) as server, realtime_client(inline(server)) as client:
        detection = {"type": "server_vad", "create_response": creates}
        await client.update(audio={"input": {"turn_detection": detection}})
        await client.say("hello")
        assert (await client.respond())["status"] == "completed"
        await asyncio.sleep(2)
        if clears:
            await client.send("output_audio_buffer.clear")
            await asyncio.sleep(10)
        await speak(client)
        if not creates:
            await client.until("conversation.item.input_audio_transcription.completed")
            await client.send("response.create")
        await client.response()
        assert engine.requests[-1].history[1].text == " ".join(word.text for word in words[:20])


@pytest.mark.virtual_clock
@pytest.mark.parametrize(
    ("query", "kind"),
    [
        ("", "transcription_session.update"),
        ("intent=transcription", "session.update"),
        ("intent=transcription", None),
        ("intent=transcription&model=x", "transcription_session.update"),
    ],
)
@pytest.mark.parametrize("detects", [True, False])
async def test_a_session_for_transcription_transcribes_and_nobody_answers(
    query: str, kind: str | None, detects: bool
) -> None:
    engine = ScriptedEngine(HEARD_AND_ANSWERED)
    async with live_server(engine) as server, realtime_client(inline(server), query=query) as client:
        detection = {"type": "server_vad"} if detects else None
        if kind is not None:  # in the names of the beta, as its clients still send them
            wanted = {"input_audio_transcription": {"model": "whisper-1"}, "turn_detection": detection}
            await client.send(kind, session=wanted)
            await client.until("session.updated" if kind == "session.update" else "transcription_session.updated")
        await speak(client)
        if kind is not None and not detects:
            await client.send("input_audio_buffer.commit")
        completed = await client.until("conversation.item.input_audio_transcription.completed")
        assert completed["transcript"] == "go forward"
        await client.send("response.create")
        assert (await client.until("error"))["error"]["code"] == "invalid_value"
    assert not [name for name in client.kinds() if name.startswith("response.")]
    assert {request.task for request in engine.requests} == {"transcribe"}


@pytest.mark.virtual_clock
async def test_a_response_waits_for_the_transcript_of_the_turn() -> None:
    transcribed = asyncio.Event()
    engine = CapableEngine([lambda: transcribed.wait(), *HEARD_AND_ANSWERED])
    async with live_server(engine) as server, realtime_client(inline(server)) as client:
        detection = {"type": "server_vad", "create_response": False, "interrupt_response": False}
        await client.update(audio={"input": {"turn_detection": detection}})
        await speak(client)
        await client.until("input_audio_buffer.committed")
        await client.send("response.create")
        await server.until(lambda: bool(engine.inputs))
        assert not client.seen("response.created")
        transcribed.set()
        assert text_of(await client.response()) == "I go"
        assert b"".join(chunk.payload for chunk in engine.inputs[1]) == b"go forward"


@pytest.mark.virtual_clock
async def test_a_turn_that_is_deleted_before_its_transcript_is_complete_stays_deleted() -> None:
    transcribed = asyncio.Event()
    engine = CapableEngine([lambda: transcribed.wait(), *HEARD_AND_ANSWERED])
    async with live_server(engine) as server, realtime_client(inline(server)) as client:
        await client.update(audio={"input": {"turn_detection": {"type": "server_vad", "create_response": False}}})
        await speak(client)
        item_id = (await client.until("input_audio_buffer.committed"))["item_id"]
        await client.send("conversation.item.delete", item_id=item_id)
        await client.until("conversation.item.deleted")
        transcribed.set()
        await client.until("conversation.item.input_audio_transcription.completed")
        await client.say("Hello.")
        await client.respond()
        assert b"".join(chunk.payload for chunk in engine.inputs[1]) == b"Hello."
        assert not engine.requests[1].history


@pytest.mark.virtual_clock
async def test_what_was_heard_of_an_answer_stays_in_the_history() -> None:
    words: list[EngineOutput] = [
        TextOutput("one two three four"),
        AudioOutput(np.full(24_000, 0.25, np.float32), 24_000),
    ]
    engine = ScriptedEngine(words)
    async with live_server(engine) as server, realtime_client(inline(server)) as client:
        await speak(client)
        (item,) = (await client.response())["output"]
        await client.send("conversation.item.truncate", item_id=item["id"], content_index=0, audio_end_ms=520)
        truncated = await client.until("conversation.item.truncated")
        assert (truncated["item_id"], truncated["audio_end_ms"]) == (item["id"], 520)
        await client.send("conversation.item.retrieve", item_id=item["id"])
        retrieved = (await client.until("conversation.item.retrieved"))["item"]
        assert retrieved["content"] == [{"type": "output_audio", "transcript": "one two"}]
        await client.say("And then?")
        await client.respond()
        assert engine.requests[1].history[-1].text == "one two"


@pytest.mark.virtual_clock
async def test_an_interrupted_answer_was_heard_by_the_clock() -> None:
    script: list[EngineOutput] = [
        TextOutput("one two three four"),
        AudioOutput(np.full(4 * 24_000, 0.25, np.float32), 24_000),
    ]
    engine = ScriptedEngine(script)
    async with live_server(engine) as server, realtime_client(inline(server)) as client:
        await speak(client)
        await client.response()
        await asyncio.sleep(2.1)  # of four
        await speak(client)
        await client.response()
        assert engine.requests[1].history[-1].text == "one two"


@pytest.mark.virtual_clock
async def test_a_truncation_at_nothing_or_beyond_the_end_is_answered() -> None:
    engine = CapableEngine(HEARD_AND_ANSWERED)
    async with live_server(engine) as server, realtime_client(inline(server)) as client:
        await speak(client)
        (item,) = (await client.response())["output"]
        for end_ms in (100_000, 0, 0):
            cut = {"item_id": item["id"], "content_index": 0, "audio_end_ms": end_ms}
            await client.send("conversation.item.truncate", **cut)
            truncated = await client.until("conversation.item.truncated")
            assert {name: truncated[name] for name in cut} == cut
        assert not client.seen("error")
        await client.send("conversation.item.truncate", **{**cut, "content_index": 1})
        error = (await client.until("error", "conversation.item.truncated"))["error"]
        assert (error["code"], error["param"]) == ("invalid_value", "content_index")
        await client.say("And then?")
        await client.respond()
        assert engine.requests[1].history == ()
        assert b"".join(chunk.payload for chunk in engine.inputs[1]).endswith(b"And then?")


@pytest.mark.virtual_clock
async def test_clear_takes_back_what_is_being_spoken() -> None:
    async with live_server(ScriptedEngine(HEARD_AND_ANSWERED)) as server, realtime_client(inline(server)) as client:
        await client.append(quiet(96) + loud(320))
        await client.until("input_audio_buffer.speech_started")
        await client.send("input_audio_buffer.clear")
        await client.until("input_audio_buffer.cleared")
        await client.append(quiet(640))
        await client.until("input_audio_buffer.speech_stopped")
        begin = len(client.received)
        await speak(client)
        await client.response()
        assert client.kinds(since=begin)[:3] == [
            "input_audio_buffer.speech_started",
            "input_audio_buffer.speech_stopped",
            "input_audio_buffer.committed",
        ]
        assert len(client.seen("response.created")) == 1
        assert len(client.seen("input_audio_buffer.committed")) == 1


@pytest.mark.virtual_clock
async def test_speech_that_has_no_request_does_not_take_that_of_the_next() -> None:
    workers = HeldWorkers()
    workers.listen()
    async with live_server(ScriptedEngine(HEARD_AND_ANSWERED)) as server, realtime_client(inline(server)) as client:
        server.app.sessions.speech_workers = workers
        await client.update(audio={"input": TRANSCRIBED})
        await client.append(quiet(96) + loud(320))
        await client.until("input_audio_buffer.speech_started")
        # The end of that, and more speech, which the detector has not got to as they are taken back.
        workers.hold()
        await client.append(quiet(640) + loud(320))
        await client.send("input_audio_buffer.clear")
        await client.until("input_audio_buffer.cleared")
        workers.listen()
        await client.append(quiet(640))
        await speak(client)
        await client.response()
        assert transcriptions(client) == [("item", "failed", None), ("item", "completed", "go forward")]


@pytest.mark.virtual_clock
async def test_commit_ends_the_turn_that_is_being_spoken() -> None:
    async with live_server(ScriptedEngine(HEARD_AND_ANSWERED)) as server, realtime_client(inline(server)) as client:
        await client.append(quiet(96) + loud(320))
        await client.until("input_audio_buffer.speech_started")
        await client.send("input_audio_buffer.commit")
        assert text_of(await client.response()) == "I go"
        assert len(client.seen("input_audio_buffer.committed")) == 1
        await client.send("input_audio_buffer.commit")
        assert (await client.until("error"))["error"]["code"] == "input_audio_buffer_commit_empty"


@pytest.mark.virtual_clock
async def test_a_turn_in_which_detection_is_turned_off_is_answered() -> None:
    async with live_server(ScriptedEngine(HEARD_AND_ANSWERED)) as server, realtime_client(inline(server)) as client:
        await client.append(quiet(96) + loud(320))
        await client.until("input_audio_buffer.speech_started")
        await client.update(audio={"input": {"turn_detection": None}})
        assert text_of(await client.response()) == "I go"
        await client.append(loud(100))
        await client.send("input_audio_buffer.commit")
        assert text_of(await client.respond()) == "I go"


@pytest.mark.virtual_clock
async def test_an_image_is_seen_with_the_next_turn() -> None:
    engine = CapableEngine(HEARD_AND_ANSWERED)
    async with live_server(engine) as server, realtime_client(inline(server)) as client:
        url = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
        content = [{"type": "input_image", "image_url": url}]
        item = {"type": "message", "role": "user", "content": content}
        await client.send("conversation.item.create", item=item)
        await client.append(quiet(96) + loud(320))
        await client.until("input_audio_buffer.speech_started")
        await client.append(quiet(640))
        await client.response()
        assert {chunk.modality for chunk in engine.inputs[0]} == {"audio", "image"}


@pytest.mark.virtual_clock
async def test_a_failed_recognition_is_told_of_its_item() -> None:
    engine = ScriptedEngine([EngineFailed("no", param="asr")])
    async with live_server(engine, expect_errors=True) as server, realtime_client(inline(server)) as client:
        await client.update(audio={"input": TRANSCRIBED})
        await speak(client)
        response = await client.response()
        assert response["status"] == "failed"
        (failure,) = client.seen("conversation.item.input_audio_transcription.failed")
        (started,) = client.seen("input_audio_buffer.speech_started")
        assert (failure["item_id"], failure["content_index"]) == (started["item_id"], 0)
        message = failure["error"].pop("message")
        assert message.startswith("no; error id err_")
        assert failure["error"] == {"type": "server_error", "code": "engine_failed", "param": "asr"}
        assert not client.seen("error")


@pytest.mark.virtual_clock
async def test_speech_may_spare_the_response() -> None:
    going = asyncio.Event()
    engine = ScriptedEngine([*HEARD_AND_ANSWERED, lambda: going.wait()])
    async with live_server(engine) as server, realtime_client(inline(server)) as client:
        detection = {"type": "server_vad", "interrupt_response": False}
        await client.update(audio={"input": {"turn_detection": detection}})
        await speak(client)
        await client.until("response.output_audio.delta")
        await speak(client, 640)
        await client.until("input_audio_buffer.committed")
        going.set()
        assert [(await client.response())["status"] for _ in range(2)] == ["completed", "completed"]


@pytest.mark.virtual_clock
async def test_speech_that_becomes_no_request_leaves_the_next_turn_its_own() -> None:
    """What is still being judged when a response is cancelled is dropped."""
    engine = CapableEngine([TextOutput("one "), lambda: _never()])
    workers = HeldWorkers()
    async with live_server(engine) as server:
        server.app.sessions.speech_workers = workers
        async with realtime_client(server) as client:
            await client.update(audio={"input": {**TRANSCRIBED, "turn_detection": {"type": "server_vad"}}})
            await client.append(quiet(96) + loud(640))
            await client.say("hello")
            await client.send("response.create")
            await client.until("response.output_audio_transcript.delta")
            engine.script = HEARD_AND_ANSWERED
            await client.send("output_audio_buffer.clear")
            await client.until("output_audio_buffer.cleared")
            workers.listen()
            await client.until("input_audio_buffer.speech_started")
            await client.append(quiet(640))
            workers.listen()
            await client.until("input_audio_buffer.speech_stopped")
            await speak(client)
            workers.listen()
            completed = await client.until("conversation.item.input_audio_transcription.completed")
            assert completed["item_id"] == client.seen("input_audio_buffer.speech_started")[-1]["item_id"]


@pytest.mark.virtual_clock
async def test_turns_that_follow_at_once_have_items_of_their_own() -> None:
    engine = CapableEngine(HEARD_AND_ANSWERED)
    async with live_server(engine) as server, realtime_client(inline(server)) as client:
        await client.update(audio={"input": {**TRANSCRIBED, "turn_detection": {"type": "server_vad"}}})
        await client.append(3 * (quiet(96) + loud(320) + quiet(640)), size=1 << 20)
        while len(client.seen("input_audio_buffer.committed")) < 3:
            await client.receive()
        response = await client.response()
        while response["status"] == "cancelled":
            response = await client.response()
        heard = [one["item_id"] for one in client.seen("conversation.item.input_audio_transcription.completed")]
        committed = [one["item_id"] for one in client.seen("input_audio_buffer.committed")]
        assert heard == [one for one in committed if one in heard]
        assert committed[-1] == heard[-1]


@pytest.mark.virtual_clock
async def test_a_response_is_announced_as_it_was_made() -> None:
    """The page is muted in the middle of a sentence: the answer to that is the last one with sound."""
    async with live_server(ScriptedEngine(HEARD_AND_ANSWERED)) as server, realtime_client(inline(server)) as client:
        await client.update(audio={"input": TRANSCRIBED})
        await client.append(quiet(96) + loud(320))
        await client.until("input_audio_buffer.speech_started")
        await client.update(output_modalities=["text"])
        await client.append(quiet(640))
        response = await client.response()
        assert response["output_modalities"] == ["audio"]
        assert response["output"][0]["content"][0]["type"] == "output_audio"
        await speak(client)
        response = await client.response()
        assert (response["output_modalities"], response["output"][0]["content"][0]["type"]) == (["text"], "output_text")


@pytest.mark.virtual_clock
async def test_answers_are_played_one_behind_the_other_by_the_clock() -> None:
    """Two answers of four words, a second each; speech 2.5 s later finds the first one in its third word."""

    def counted(*words: str) -> list[Any]:
        times = tuple(Word(word, 1000 * index, 1000 * index + 900) for index, word in enumerate(words))
        return [TextOutput(" ".join(words)), AudioOutput(np.zeros(24_000 * len(words), np.float32), 24_000, times)]

    engine = HearingEngine(heard=[TranscriptOutput("stop"), TextOutput("ok")])
    async with live_server(engine) as server, realtime_client(inline(server)) as client:
        for words in (("one", "two", "three", "four"), ("A", "B", "C", "D")):
            engine.script = tuple(counted(*words))
            await client.say("count")
            await client.respond()
        await asyncio.sleep(2.5)
        await speak(client)
        await client.response()
        said = [message.text for message in engine.requests[-1].history if message.role == "assistant"]
        assert said == ["one two three"]


# a speaker who pauses


@contextlib.asynccontextmanager
async def conversation(*turns: list[Any], **session: Any) -> AsyncIterator[tuple[RealtimeClient, Ears]]:
    """A session over an ASR that hears ``turns``, and an LLM that repeats what it was told."""
    ears = Ears(*turns)
    engine = ComposedEngine(RetortEngine(speech_in_history=False), asr=ears)
    async with (
        live_server(engine, expect_errors=True) as server,
        realtime_client(inline(server)) as client,
    ):
        await client.update(output_modalities=["text"], audio={"input": {**TRANSCRIBED, **session}})
        yield client, ears


async def first_turn(client: RealtimeClient, ears: Ears) -> None:
    """Until the ASR, which takes the turns as it begins with them, has begun."""
    await speak(client)
    await client.until("input_audio_buffer.speech_stopped")
    await until(lambda: ears.begun == 1)


def transcriptions(client: RealtimeClient) -> list[tuple[str, str, str | None]]:
    """How the transcription of each item ended, in the order in which the items were committed."""
    kind = "conversation.item.input_audio_transcription."
    ends = {
        event["item_id"]: (event["type"].removeprefix(kind), event.get("transcript"))
        for event in client.received
        if event["type"] in (kind + "completed", kind + "failed")
    }
    committed = [event["item_id"] for event in client.seen("input_audio_buffer.committed")]
    return [("item", *ends[item_id]) if item_id in ends else ("item", "none", None) for item_id in committed]


@pytest.mark.virtual_clock
@pytest.mark.parametrize("seconds", [1.0, 5.0], ids=["before its final", "late"])
async def test_both_parts_are_transcribed_and_answered_as_one(seconds: float) -> None:
    known = asyncio.Event()
    async with conversation([known.wait, "My name is Robert."], ["What is my name?"]) as (client, ears):
        await first_turn(client, ears)
        await speak(client)
        asyncio.get_running_loop().call_later(seconds, known.set)
        while (response := await client.response())["status"] == "cancelled":
            pass
        assert text_of(response) == "You said My name is Robert. What is my name?"
        assert transcriptions(client) == [
            ("item", "completed", "My name is Robert."),
            ("item", "completed", "What is my name?"),
        ]


@pytest.mark.virtual_clock
@pytest.mark.parametrize(
    ("steps", "ended"),
    [
        ([EngineFailed("broken")], ("failed", None)),
        ([interim("My name"), EngineFailed("broken")], ("completed", "My name")),
        ([], ("completed", "")),
    ],
    ids=["failed", "settled for the interim", "no words"],
)
@pytest.mark.parametrize("late", [False, True])
async def test_every_committed_item_is_told_how_its_transcription_ended(
    steps: list[Any], ended: tuple[str, str | None], late: bool
) -> None:
    known = asyncio.Event()
    async with conversation([*steps[:-1], known.wait, *steps[-1:]], ["And?"]) as (client, ears):
        await first_turn(client, ears)
        await speak(client)
        asyncio.get_running_loop().call_later(5.0 if late else 1.0, known.set)
        while (await client.response())["status"] == "cancelled":
            pass
        assert transcriptions(client) == [("item", *ended), ("item", "completed", "And?")]


@pytest.mark.virtual_clock
async def test_a_turn_that_waits_for_its_response_is_whole() -> None:
    """``create_response: false``: turns are transcribed alone, and the response answers them all."""
    detection = {"type": "server_vad", "create_response": False}
    known = asyncio.Event()
    turns: list[list[Any]] = [[known.wait, "My name is Robert."], ["What is my name?"]]
    async with conversation(*turns, turn_detection=detection) as (client, ears):
        await first_turn(client, ears)
        await speak(client)
        await client.until("input_audio_buffer.speech_stopped")
        asyncio.get_running_loop().call_later(5.0, known.set)
        await client.send("response.create")
        response = await client.response()
        assert sorted(text_of(response).replace("?", ".").split(". ")) == sorted(
            ["You said My name is Robert.\nWhat is my name."]
        )
        assert [end for _, end, _ in transcriptions(client)] == ["completed", "completed"]

"""Sessions of ``type`` ``transcription`` over ``/v1/realtime``: dictation, and what recognisers are told."""

from __future__ import annotations

from typing import Any

import pytest
from support.inline_workers import HeldWorkers, inline
from support.inline_workers import loud_24k as loud
from support.inline_workers import quiet_24k as quiet
from support.live_server import live_server
from support.realtime_client import RealtimeClient, realtime_client
from support.scripted_engines import CapableEngine, Ears, RetortEngine, WordEngine, takes

from omni_ws.core.chunks import FinishReason, Hearing, Modality, Usage
from omni_ws.engine.base import Finished, TextOutput, TranscriptOutput
from omni_ws.engine.composed.engine import ComposedEngine
from omni_ws.errors import EngineFailed
from omni_ws.transport.realtime.items import Turn, spoken_item

pytestmark = [pytest.mark.virtual_clock]

PLACE = "conversation.item.input_audio_transcription."
#: As long as it takes for an engine to begin (on_min_length): 300 ms at 24 kHz.
BEGINS = 14_400
HEARD = (TranscriptOutput("go forward"), TextOutput("go forward"))


def ears(engine: WordEngine) -> ComposedEngine:
    """A server's engine that hears by ``engine``."""
    return ComposedEngine(RetortEngine(), asr=engine)


def words(text: str) -> bytes:
    """Audio in which a WordEngine hears ``text``."""
    return text.encode().ljust(BEGINS)


async def transcribe(client: RealtimeClient, **audio_input: Any) -> dict[str, Any]:
    """Makes the session one that transcribes. Returns what is in effect of ``audio.input``."""
    await client.send("session.update", session={"type": "transcription", "audio": {"input": audio_input}})
    shown: dict[str, Any] = (await client.until("session.updated"))["session"]
    assert (shown["type"], shown["object"]) == ("transcription", "realtime.transcription_session")
    audio: dict[str, Any] = shown["audio"]["input"]
    return audio


async def commit(client: RealtimeClient, event_id: str) -> None:
    await client.send("input_audio_buffer.commit", event_id=event_id)


async def say(client: RealtimeClient, *texts: str) -> None:
    for text in texts:
        await client.append(words(text), size=BEGINS)


# Dictation.


async def test_dictation_is_told_as_it_is_spoken() -> None:
    async with (
        live_server(ears(WordEngine())) as server,
        realtime_client(server, query="intent=transcription") as client,
    ):
        assert client.received[0]["session"]["object"] == "realtime.transcription_session"
        await transcribe(client, turn_detection=None)
        await say(client, "go", "forward", "ten")
        first = await client.until(PLACE + "delta")
        assert not client.seen("input_audio_buffer.committed")
        await say(client, "meters.", "Now", "stop")
        while len(client.seen(PLACE + "delta")) < 3:
            await client.until(PLACE + "delta")
        await commit(client, "c1")
        completed = await client.until(PLACE + "completed")
        assert completed["transcript"] == "go forward ten meters. Now stop"
        assert completed["usage"] == {"type": "duration", "seconds": 1.8}
        deltas = client.seen(PLACE + "delta")
        assert "".join(one["delta"] for one in deltas) == completed["transcript"]
        assert first["delta"] == "go"
        (committed,) = client.seen("input_audio_buffer.committed")
        assert {one["item_id"] for one in (*deltas, completed)} == {committed["item_id"]}
        # The next utterance is another item.
        await say(client, "again")
        await commit(client, "c2")
        second = await client.until(PLACE + "completed")
        assert (second["transcript"], second["item_id"] != committed["item_id"]) == ("again", True)
        await commit(client, "c3")
        error = (await client.until("error"))["error"]
        assert (error["code"], error["event_id"]) == ("input_audio_buffer_commit_empty", "c3")
    assert not [name for name in client.kinds() if name.startswith("response.")]


def test_words_are_told_once_and_never_taken_back() -> None:
    turn = Turn(spoken_item(), answered=False)
    texts = ["go for", "go forward ten", "go forward then", "go forward then meters", "go on then meters please"]
    assert [turn.preview(text) for text in texts] == ["", "go", " forward", " then", ""]
    assert turn.hear("go forward ten meters", language=None) == " meters"
    assert [turn.preview(" now"), turn.preview(" now stop"), turn.hear(" now", language="en")] == ["", " now", ""]
    assert turn.hear(" and then", language=None) == " and then"
    assert turn.text == "go forward ten meters now and then"


async def test_what_is_cleared_is_not_transcribed() -> None:
    engine = WordEngine()
    async with live_server(ears(engine)) as server, realtime_client(server) as client:
        await transcribe(client, turn_detection=None)
        await say(client, "never", "mind", "this")
        await client.until(PLACE + "delta")
        await client.send("input_audio_buffer.clear")
        await client.until("input_audio_buffer.cleared")
        await say(client, "listen")
        await commit(client, "c1")
        assert (await client.until(PLACE + "completed"))["transcript"] == "listen"
    assert len(client.seen("input_audio_buffer.committed")) == 1


async def test_a_failure_while_dictating_is_told_at_the_commit() -> None:
    engine = WordEngine()
    async with live_server(ears(engine)) as server, realtime_client(server) as client:
        await transcribe(client, turn_detection=None)
        engine.failure = EngineFailed("out of order", param="asr")
        await say(client, "go", "forward")
        await server.until(lambda: bool(engine.requests) and not engine.active_requests, "the failure")
        engine.failure = None
        await say(client, "ten")  # belongs to the utterance that failed
        await commit(client, "c1")
        failed = await client.until(PLACE + "failed")
        assert failed["error"]["message"].startswith("out of order")
        (committed,) = client.seen("input_audio_buffer.committed")
        assert failed["item_id"] == committed["item_id"]
        await say(client, "again")
        await commit(client, "c2")
        assert (await client.until(PLACE + "completed"))["transcript"] == "again"


async def test_dictation_that_no_room_is_left_for_fails_at_the_commit() -> None:
    async with live_server(ears(WordEngine())) as server, realtime_client(server) as client:
        await transcribe(client, turn_detection=None)
        (conversation,) = server.app.sessions.conversations
        conversation.drain()
        await say(client, "go")
        await commit(client, "c1")
        assert (await client.until(PLACE + "failed"))["error"]["type"] == "server_error"


async def test_audio_of_a_conversation_becomes_dictation() -> None:
    async with live_server(ears(WordEngine())) as server, realtime_client(server) as client:
        await client.update(audio={"input": {"turn_detection": None}})
        await say(client, "go")
        await transcribe(client)
        await say(client, "on")
        await commit(client, "c1")
        assert (await client.until(PLACE + "completed"))["transcript"] == "go on"
        await say(client, "lost")
        await client.update(type="realtime")
        await transcribe(client)
        await commit(client, "c2")
        assert (await client.until("error"))["error"]["code"] == "input_audio_buffer_commit_empty"


# Turn detection, by the server and by the client.


@pytest.mark.parametrize(
    ("model", "given", "detects"),
    [
        ("gpt-live-transcribe", {}, False),
        ("gpt-realtime-whisper", {}, False),
        ("gpt-live-transcribe", {"turn_detection": {"type": "server_vad"}}, True),
        ("gpt-4o-transcribe", {}, True),
        ("whisper-1", {"turn_detection": None}, False),
    ],
)
async def test_models_that_hear_all_the_time_have_no_turn_detection(
    model: str, given: dict[str, Any], detects: bool
) -> None:
    async with live_server(ears(WordEngine())) as server, realtime_client(inline(server)) as client:
        shown = await transcribe(client, transcription={"model": model}, **given)
        assert (shown["turn_detection"] is not None) is detects
        assert shown["transcription"] == {"model": model}


async def test_a_client_that_detects_turns_more_slowly_may_commit_what_the_server_has_committed() -> None:
    async with live_server(CapableEngine(HEARD)) as server, realtime_client(inline(server)) as client:
        await transcribe(client, turn_detection={"type": "server_vad"})
        await client.append(quiet(96) + loud(320) + quiet(640))
        await client.until("input_audio_buffer.committed")
        await commit(client, "late")
        await commit(client, "again")
        error = (await client.until("error"))["error"]
        assert (error["code"], error["event_id"]) == ("input_audio_buffer_commit_empty", "again")
        assert len(client.seen("input_audio_buffer.committed")) == 1
        await client.append(loud(320) + quiet(640))
        await client.until("input_audio_buffer.speech_stopped")
        await client.send("input_audio_buffer.clear")
        await commit(client, "cleared")
        assert (await client.until("error"))["error"]["event_id"] == "cleared"
        assert not any(event["error"]["event_id"] == "late" for event in client.seen("error"))


@pytest.mark.parametrize("kind", ["transcription", "realtime"])
async def test_turns_that_nobody_answers_are_transcribed_each_by_itself(kind: str) -> None:
    """Also if the next begins before the one before is written down, as a file that is sent at once has it."""
    detection = {"type": "server_vad", "create_response": False}
    asr = Ears([takes(1), "one"], [takes(1), "two"], ["three"])
    async with (
        live_server(ComposedEngine(RetortEngine(), asr=asr)) as server,
        realtime_client(inline(server)) as client,
    ):
        await client.update(type=kind, audio={"input": {"turn_detection": detection}})
        await client.append((quiet(96) + loud(320) + quiet(640)) * 3)
        while len(heard := client.seen(PLACE + "completed")) < 3:
            await client.until(PLACE + "completed", PLACE + "failed")
    assert [one["transcript"] for one in heard] == ["one", "two", "three"]
    assert {chunk.modality for heard in asr.inputs for chunk in heard} == {Modality.AUDIO}


async def test_in_a_conversation_a_late_commit_is_an_error() -> None:
    engine = CapableEngine([TextOutput("yes"), Finished(FinishReason.STOP, Usage())])
    async with live_server(engine) as server, realtime_client(inline(server)) as client:
        await client.append(quiet(96) + loud(320) + quiet(640))
        await client.response()
        await commit(client, "late")
        assert (await client.until("error"))["error"]["event_id"] == "late"


async def test_a_commit_is_about_the_audio_before_it_also_if_that_is_not_judged_yet() -> None:
    """A client that sends a whole file at once, then its end."""
    workers = HeldWorkers()
    async with live_server(CapableEngine(HEARD)) as server:
        server.app.sessions.speech_workers = workers
        async with realtime_client(server) as client:
            await transcribe(client, turn_detection={"type": "server_vad"})
            await client.append(quiet(96) + loud(640))
            await commit(client, "end")
            await client.send("input_audio_buffer.clear")
            await client.send("conversation.item.retrieve", item_id="none")
            await client.until("error")  # all of it has arrived
            assert not client.seen("input_audio_buffer.cleared")
            workers.listen()
            await client.until("input_audio_buffer.cleared")
            await client.until(PLACE + "completed")
    kinds = client.kinds()
    assert kinds.index("input_audio_buffer.committed") < kinds.index("input_audio_buffer.cleared")
    assert len(client.seen("error")) == 1


# What recognition is told, and tells.


async def test_keywords_and_languages_are_what_the_engine_is_told() -> None:
    engine = CapableEngine(
        [TranscriptOutput("Hallo", hearing=Hearing("german"))], languages=frozenset({"en", "de", "fr"})
    )
    async with live_server(engine) as server, realtime_client(server) as client:
        given: tuple[dict[str, Any], ...] = (
            {"languages": ["de-AT", "fr", "tlh"], "keywords": ["Ng", "Grüße"], "prompt": "A talk."},
            {"languages": ["de"], "keywords": [], "delay": "low"},
            {"languages": ["tlh"], "language": None},
            {"languages": ["fr"], "language": "en"},
        )
        for transcription in given:
            shown = await transcribe(client, transcription=transcription, turn_detection=None)
            assert shown["transcription"] == transcription
            await client.append(bytes(4800))
            await commit(client, "c")
            completed = await client.until(PLACE + "completed")
            assert (completed["language"], completed["languages"]) == ("de", [{"code": "de"}])
    assert [request.expected for request in engine.requests] == ["A talk. Ng, Grüße.", "", "", ""]
    assert [request.language for request in engine.requests] == [None, "de", None, "en"]
    assert [request.languages for request in engine.requests] == [{"de", "fr"}, set(), set(), set()]


@pytest.mark.parametrize(
    ("name", "value"),
    [("keywords", ["a"] * 101), ("keywords", ["a" * 65]), ("keywords", "a"), ("languages", "de"), ("languages", [5])],
)
async def test_wrong_words_and_languages_are_named(name: str, value: Any) -> None:
    async with live_server(CapableEngine(HEARD)) as server, realtime_client(server) as client:
        await transcribe(client, transcription={"keywords": ["a" * 64] * 100})  # at the limits
        wanted = {"type": "transcription", "audio": {"input": {"transcription": {name: value}}}}
        await client.send("session.update", session=wanted)
        error = (await client.until("error"))["error"]
        assert error["code"] == "invalid_value"
        assert error["param"].startswith(f"session.audio.input.transcription.{name}")


async def test_an_engine_that_can_expect_nothing_is_told_nothing() -> None:
    engine = WordEngine()
    async with live_server(ears(engine)) as server, realtime_client(server) as client:
        transcription = {"keywords": ["Ng"], "languages": ["de", "fr"], "prompt": "A talk."}
        assert (await transcribe(client, transcription=transcription, turn_detection=None))["transcription"]
        await say(client, "go")
        await commit(client, "c")
        assert "languages" not in await client.until(PLACE + "completed")
    (request,) = engine.requests
    assert (request.expected, request.language, request.languages) == ("", None, frozenset())


async def test_the_event_of_the_beta_is_answered_in_its_form() -> None:
    async with live_server(CapableEngine(HEARD)) as server, realtime_client(inline(server)) as client:
        wanted = {
            "input_audio_format": "g711_ulaw",
            "input_audio_transcription": {"model": "whisper-1", "prompt": "Ng"},
            "turn_detection": {"type": "server_vad", "silence_duration_ms": 600},
        }
        await client.send("transcription_session.update", session=wanted)
        session = (await client.until("transcription_session.updated"))["session"]
        assert session["input_audio_format"] == "g711_ulaw"
        assert session["input_audio_transcription"] == wanted["input_audio_transcription"]
        assert session["turn_detection"]["silence_duration_ms"] == 600
        assert session["input_audio_noise_reduction"] is None
        assert "audio" not in session

"""Uncertain onsets over real sockets: a sound over an answer is confirmed or dismissed, exactly one of the two."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest
from support.inline_workers import MS, InlineWorkers, LoudnessDetector, loud, quiet
from support.live_server import LiveServer, live_server, read
from support.native_client import NativeClient, native_client
from support.scripted_engines import HearingEngine

from omni_ws.audio import speech_watch
from omni_ws.audio.pcm import Samples
from omni_ws.core.chunks import FinishReason, Hearing, Modality, Task, Usage, Word
from omni_ws.engine.base import (
    AudioOutput,
    EngineOutput,
    Finished,
    GenerationRequest,
    OutputWriter,
    PartFailed,
    TextOutput,
    TranscriptGuess,
    TranscriptOutput,
    WordsComplete,
)
from omni_ws.errors import EngineFailed
from omni_ws.service.conversation.onsets import LIKELY_WAIT_SEC, LIMIT_SEC, WAIT_SEC
from omni_ws.wire.session_config import SessionConfig

pytestmark = pytest.mark.virtual_clock

FRAME = 20 * MS
RATE = 16_000
PIECES, PIECE_MS = 60, 100
#: A sound of an acknowledgement's length, and the quiet behind it that lets it be judged.
SHORT, QUIET = loud(320), quiet(192)
#: What ends a turn.
PAUSE = quiet(640)


def spoken_answer(text: str = "") -> list[EngineOutput]:
    """A sentence, and its sound in pieces of 100 ms, a word each."""
    words = (text.split() + [f"word{number}" for number in range(PIECES)])[:PIECES]
    script: list[EngineOutput] = [TextOutput(" ".join(words))]
    ramp = np.arange(RATE * PIECE_MS // 1000) / RATE
    for number, word in enumerate(words):
        begins = number * PIECE_MS
        sound = (ramp + number / 100).astype(np.float32)
        script.append(AudioOutput(sound, RATE, (Word(word, begins, begins + 90),)))
    return script


def hearing(*heard: Any, script: Sequence[Any] = (), **changes: Any) -> HearingEngine:
    return HearingEngine(script or spoken_answer(), heard=heard, **changes)


@pytest.fixture(autouse=True)
def probability(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The probability that every sound is a backchannel, by its sound; the test may change it."""
    probabilities = [0.95]
    monkeypatch.setattr(speech_watch, "backchannel_probability", lambda samples: probabilities[-1])
    return probabilities


@contextlib.asynccontextmanager
async def conversation(
    engine: HearingEngine, *, turns: dict[str, Any] | None = None, **fields: Any
) -> AsyncIterator[tuple[LiveServer, NativeClient]]:
    async with live_server(engine, **fields) as server:
        server.app.sessions.speech_workers = InlineWorkers()
        async with native_client(server) as client:
            await client.configure(
                turn_detection={"type": "server_vad", "duck": True, **(turns or {})},
                output_audio={"sample_rate": RATE},
            )
            yield server, client


async def stream(client: NativeClient, audio: bytes) -> None:
    for start in range(0, len(audio), FRAME):
        await client.binary(audio[start : start + FRAME])


async def playing(client: NativeClient, *, until_ms: float = 500) -> str:
    """Asks, and waits until the answer sounds. Returns its request."""
    await client.say("talk to me")
    request_id: str = (await client.until("response_started"))["request_id"]
    while (await client.until("output_chunk")).get("start_ms", 0) < until_ms:
        pass
    return request_id


async def onset(client: NativeClient, sound: bytes = SHORT) -> dict[str, Any]:
    """Sounds over the answer: the uncertain onset."""
    await stream(client, quiet(96) + sound)
    frame = await client.until("speech_started")
    assert (frame["certain"], frame["request_id"]) == (False, None)
    return frame


def speech_frames(client: NativeClient) -> list[str]:
    return [frame["type"] for frame in client.frames if frame["type"].startswith("speech_")]


async def goes_on(client: NativeClient, request_id: str) -> None:
    """The answer comes whole, without a gap and nothing twice, and nothing of the sound is anywhere."""
    assert (await client.answer()).reason == "stop"
    pieces = [frame["start_ms"] for frame in client.seen("output_chunk") if "start_ms" in frame]
    assert pieces == [number * PIECE_MS for number in range(PIECES)]
    assert {frame["request_id"] for frame in client.seen("output_chunk")} == {request_id}
    assert not client.seen("error")


async def test_a_backchannel_is_dismissed_and_the_answer_goes_on() -> None:
    engine = hearing(TranscriptOutput("Mm-hm."), TextOutput("Pardon?"))
    async with conversation(engine) as (server, client):
        assert client.created["capabilities"]["duck"] is True
        request_id = await playing(client)
        began = await onset(client)
        await stream(client, QUIET)
        assert await client.until("speech_dismissed") == {
            "type": "speech_dismissed",
            "turn_id": began["turn_id"],
            "audio_ms": began["audio_ms"],
        }
        await stream(client, PAUSE)
        await goes_on(client, request_id)
        assert speech_frames(client) == ["speech_started", "speech_dismissed"]
        await server.until(lambda: engine.active_requests == 0, "the end of the recognition")
        counted = read(server)
        assert counted.value("requests_total", **counted.labels("requests_total")[0]) == 1
        assert len(counted.labels("requests_total")) == 1
        assert (counted.value("speech_turns_total"), counted.value("input_audio_seconds_total")) == (0, 0)
        await client.configure(turn_detection=None, overlap=None)
        await client.say("and?")
        await client.answer()
        assert [message.role for message in engine.requests[-1].history] == ["user", "assistant"]


async def test_words_are_confirmed_and_interrupt() -> None:
    engine = hearing(TranscriptOutput("What time is it?"), TextOutput("Noon."))
    async with conversation(engine) as (_, client):
        request_id = await playing(client)
        began = await onset(client, loud(900))
        confirmed = await client.until("speech_confirmed")
        assert (confirmed["turn_id"], confirmed["audio_ms"]) == (began["turn_id"], began["audio_ms"])
        cut = await client.answer()
        assert (cut.final["request_id"], cut.reason) == (request_id, "cancelled")
        await stream(client, PAUSE)
        answer = await client.answer()
        assert (answer.final["request_id"], answer.text) == (confirmed["request_id"], "Noon.")
        assert answer.final["turn_id"] == began["turn_id"]
        assert speech_frames(client) == ["speech_started", "speech_confirmed", "speech_stopped"]
        await client.configure(turn_detection=None, overlap=None)
        await client.say("and?")
        await client.answer()
        roles = [(one.role, one.text) for one in engine.requests[-1].history]
        assert [role for role, _ in roles] == ["user", "assistant", "user", "assistant"]
        assert roles[2:] == [("user", "What time is it?"), ("assistant", "Noon.")]


# limits


@pytest.mark.parametrize(("voiced_ms", "judged"), [(672, True), (704, False)])
async def test_the_sound_is_judged_up_to_700_ms(voiced_ms: int, judged: bool) -> None:
    """In windows of 32 ms. The sound alone decides about the one; the other waits for words, and none come."""
    async with conversation(hearing()) as (_, client):
        await playing(client)
        await onset(client, loud(voiced_ms))
        quiet_since = asyncio.get_running_loop().time()
        await stream(client, QUIET)
        told = await client.until("speech_confirmed", "speech_dismissed")
        waited = asyncio.get_running_loop().time() - quiet_since
        assert told["type"] == ("speech_dismissed" if judged else "speech_confirmed")
        assert waited == pytest.approx(0 if judged else WAIT_SEC, abs=0.05)


@pytest.mark.parametrize(("voiced_ms", "confirmed"), [(800, False), (832, True)])
async def test_more_than_800_ms_of_voice_interrupt(voiced_ms: int, confirmed: bool) -> None:
    async with conversation(hearing()) as (_, client):
        await playing(client)
        await onset(client, loud(voiced_ms))
        await asyncio.sleep(0.5)  # less audio than is worth a thread waits for so long
        await client.barrier()
        assert bool(client.seen("speech_confirmed")) == confirmed


@pytest.mark.parametrize(("quiet_ms", "decided"), [(128, False), (160, True)])
async def test_the_quiet_that_ends_a_sound(quiet_ms: int, decided: bool) -> None:
    """200 ms less the lag of the detector (64 ms), in whole windows."""
    async with conversation(hearing()) as (_, client):
        await playing(client)
        await onset(client)
        await stream(client, quiet(quiet_ms))
        await asyncio.sleep(0.5)  # less audio than is worth a thread waits for so long
        await client.barrier()
        assert bool(client.seen("speech_dismissed")) == decided


@pytest.mark.parametrize(("sound_ms", "sees"), [(64, False), (96, True)])
async def test_the_bar_of_an_uncertain_onset_is_the_ordinary_one(sound_ms: int, sees: bool) -> None:
    """A click goes unnoticed; what is a little longer ducks, and is dismissed: it is not clear enough to interrupt."""
    async with conversation(hearing(TranscriptOutput("What?"), TextOutput("Hm."))) as (_, client):
        request_id = await playing(client)
        await stream(client, quiet(96) + loud(sound_ms) + PAUSE)
        await goes_on(client, request_id)
        assert speech_frames(client) == (["speech_started", "speech_dismissed"] if sees else [])


async def test_a_sound_that_is_never_clear_does_not_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the answer's own echo: for a while behind it, the bar is raised."""
    monkeypatch.setattr(LoudnessDetector, "process", faint)
    async with conversation(hearing(TranscriptOutput("What?"), TextOutput("Hm."))) as (_, client):
        request_id = await playing(client)
        await stream(client, quiet(96) + loud(2400) + PAUSE)
        await goes_on(client, request_id)
        assert speech_frames(client) == ["speech_started", "speech_dismissed"]


def faint(detector: LoudnessDetector, samples: Samples) -> list[float]:
    return [0.6 * probability for probability in loudness(detector, samples)]


loudness = LoudnessDetector.process


# what decides


@pytest.mark.parametrize(
    ("likely", "verdict", "waited"),
    [(0.5, "speech_dismissed", LIKELY_WAIT_SEC), (0.49, "speech_confirmed", WAIT_SEC)],
    ids=["likely", "less so"],
)
async def test_without_words_the_probability_alone_decides(
    probability: list[float], likely: float, verdict: str, waited: float
) -> None:
    recognised = asyncio.Event()
    probability.append(likely)
    async with conversation(hearing(recognised.wait)) as (_, client):
        await playing(client)
        await onset(client)
        await stream(client, PAUSE)
        began = asyncio.get_running_loop().time()
        assert (await client.until("speech_confirmed", "speech_dismissed"))["type"] == verdict
        assert asyncio.get_running_loop().time() - began == pytest.approx(waited, abs=0.05)
        recognised.set()


@pytest.mark.parametrize(("text", "ends"), [("Yeah.", False), ("Stop.", True)])
async def test_an_answer_that_can_be_held_waits_for_words_that_come_late(
    probability: list[float], text: str, ends: bool
) -> None:
    """A busy server does not miss "stop", even if its sound is rather that of a backchannel."""
    recognised = asyncio.Event()
    probability.append(0.6)
    engine = hearing(recognised.wait, TranscriptOutput(text))
    async with conversation(engine, turns={"interrupt_resume": True}) as (_, client):
        request_id = await playing(client)
        await onset(client)
        await stream(client, PAUSE)
        assert (await client.until("speech_confirmed", "speech_dismissed"))["type"] == "speech_confirmed"
        recognised.set()
        answers = [await client.answer(), await client.answer()]
        assert {answer.final["request_id"]: answer.reason for answer in answers}[request_id] == (
            "cancelled" if ends else "stop"
        )


async def test_an_interim_text_of_a_sound_that_has_ended_is_not_all_of_it(probability: list[float]) -> None:
    """ "Got it" may be spelled as "God" before: the whole is waited for."""
    probability.append(0.45)
    async with conversation(GuessingEngine(TranscriptOutput("God", interim=True), after_ms=400)) as (_, client):
        await playing(client)
        await onset(client)
        began = asyncio.get_running_loop().time()
        await stream(client, QUIET)
        await client.until("speech_confirmed")
        assert asyncio.get_running_loop().time() - began == pytest.approx(WAIT_SEC, abs=0.05)


@pytest.mark.parametrize(
    ("words", "verdict"),
    [
        ([TranscriptOutput("Yeah.")], "speech_dismissed"),
        ([TranscriptOutput("Louder.")], "speech_confirmed"),
        ([TranscriptOutput("yeah", interim=True)], "speech_dismissed"),
        ([TextOutput("I have heard nothing.")], "speech_dismissed"),
        ([PartFailed(EngineFailed("deaf", param="asr"))], "speech_confirmed"),
        ([EngineFailed("broken")], "speech_confirmed"),
    ],
    ids=["acknowledgement", "words", "interim", "no words", "deaf", "broken"],
)
async def test_an_unsure_sound_waits_for_its_words(
    probability: list[float], words: Sequence[Any], verdict: str
) -> None:
    probability.append(0.45)
    async with conversation(hearing(*words), turns={"silence_duration_ms": 224}, expect_errors=True) as (_, client):
        await playing(client)
        await onset(client)
        await stream(client, PAUSE)
        assert (await client.until("speech_confirmed", "speech_dismissed"))["type"] == verdict


async def test_after_a_question_yeah_is_an_answer() -> None:
    text = "It will rain. Shall I read on for you? Then " + " ".join(["so"] * 40)
    engine = hearing(TranscriptOutput("Yeah."), TextOutput("Very well."), script=spoken_answer(text))
    async with conversation(engine) as (_, client):
        await playing(client, until_ms=1300)
        await client.send("output_ack", sequence_id=client.guarantees.next_output - 1, played_ms=850)
        await onset(client)
        await stream(client, PAUSE)
        await client.until("speech_confirmed")
        assert (await client.answer()).reason == "cancelled"
        assert (await client.answer()).text == "Very well."


async def test_stop_ends_the_answer_and_is_not_answered(probability: list[float]) -> None:
    probability.append(0.2)
    engine = hearing(TranscriptOutput("Stop."), TextOutput("Stop what?"))
    async with conversation(engine) as (_, client):
        request_id = await playing(client)
        await onset(client)
        await stream(client, PAUSE)
        confirmed = await client.until("speech_confirmed")
        cut = await client.answer()
        assert (cut.final["request_id"], cut.reason) == (request_id, "cancelled")
        turn = await client.answer()
        assert (turn.final["request_id"], turn.reason, turn.text) == (confirmed["request_id"], "stop", "")
        assert [chunk["text"] for chunk in turn.chunks] == ["Stop."]
        await client.configure(turn_detection=None, overlap=None)
        await client.say("and?")
        await client.answer()
        assert [chunk.payload for chunk in engine.inputs[-1] if chunk.payload] == [b"Stop.", b" and?"]


async def test_stop_has_its_final_before_the_model_says_anything(probability: list[float]) -> None:
    probability.append(0.2)
    engine = hearing(TranscriptOutput("Stop."), WordsComplete(), asyncio.Event().wait)
    async with conversation(engine) as (_, client):
        await playing(client)
        await onset(client)
        await stream(client, PAUSE)
        confirmed = await client.until("speech_confirmed")
        assert (await client.answer()).reason == "cancelled"
        turn = await client.answer()
        assert (turn.final["request_id"], turn.reason, turn.text) == (confirmed["request_id"], "stop", "")


async def test_a_new_onset_decides_the_one_before(probability: list[float]) -> None:
    """The first has ended and is unsure when the second begins."""
    probability.append(0.45)
    recognised = asyncio.Event()
    async with conversation(hearing(recognised.wait), turns={"silence_duration_ms": 224}) as (_, client):
        await playing(client)
        await stream(client, quiet(96) + SHORT + quiet(224) + loud(160))
        await client.until("speech_confirmed")
        recognised.set()
        await stream(client, PAUSE)
        await client.barrier()
        assert speech_frames(client)[:3] == ["speech_started", "speech_confirmed", "speech_stopped"]


async def test_a_voice_that_goes_on_ends_the_wait(probability: list[float]) -> None:
    probability.append(0.45)
    recognised = asyncio.Event()
    async with conversation(hearing(recognised.wait)) as (_, client):
        await playing(client)
        await onset(client, SHORT + quiet(192) + loud(96))
        await asyncio.sleep(WAIT_SEC + 0.1)
        await client.barrier()
        assert speech_frames(client) == ["speech_started"]
        await stream(client, loud(448))
        await client.until("speech_confirmed")
        recognised.set()


# whatever happens


async def test_audio_that_stops_coming_leaves_nothing_uncertain() -> None:
    async with conversation(hearing()) as (_, client):
        await playing(client)
        await onset(client)
        began = asyncio.get_running_loop().time()
        await client.until("speech_confirmed", "speech_dismissed")
        assert asyncio.get_running_loop().time() - began == pytest.approx(LIMIT_SEC, abs=0.3)


async def test_a_cancel_dismisses_it_and_tells_nothing_of_the_rest() -> None:
    async with conversation(hearing(TranscriptOutput("What?"), TextOutput("Hm."))) as (_, client):
        request_id = await playing(client)
        await onset(client)
        await client.send("cancel")
        assert (await client.until("speech_dismissed", "speech_confirmed"))["type"] == "speech_dismissed"
        cut = await client.answer()
        assert (cut.final["request_id"], cut.reason) == (request_id, "cancelled")
        await stream(client, loud(900) + PAUSE)
        await client.barrier()
        assert speech_frames(client) == ["speech_started", "speech_dismissed"]
        assert client.guarantees.finished == [request_id]
        await stream(client, loud(500) + PAUSE)
        assert (await client.answer()).text == "Hm."


@pytest.mark.parametrize("what", ["end_of_input", "text"])
async def test_other_input_confirms_it(what: str) -> None:
    engine = hearing(TranscriptOutput("What?"), TextOutput("Hm."))
    async with conversation(engine) as (_, client):
        request_id = await playing(client)
        await onset(client)
        if what == "text":
            await client.chunk("look at this")
        else:
            await client.chunk(end=True)
        await client.until("speech_confirmed")
        cut = await client.answer()
        assert (cut.final["request_id"], cut.reason) == (request_id, "cancelled")
        await stream(client, PAUSE)
        assert (await client.answer()).text == "Hm."


async def test_the_end_of_the_answer_decides_nothing() -> None:
    async with conversation(hearing(script=spoken_answer()[:12])) as (_, client):
        await client.say("talk to me")
        await client.answer()
        await stream(client, quiet(96) + SHORT)
        assert (await client.until("speech_started"))["certain"] is False
        await asyncio.sleep(1.5)  # it has been played
        await client.barrier()
        assert speech_frames(client) == ["speech_started"]
        await stream(client, QUIET)
        await client.until("speech_dismissed")


async def test_new_settings_wait_for_it() -> None:
    async with conversation(hearing()) as (_, client):
        await playing(client)
        await onset(client)
        await client.configure(turn_detection=None)
        assert speech_frames(client) == ["speech_started"]
        await stream(client, QUIET)
        await client.until("speech_dismissed")


@pytest.mark.parametrize("way", ["leaves", "vanishes"])
async def test_nothing_is_left_of_a_client_that_goes(way: str) -> None:
    async with conversation(hearing()) as (_, client):
        await playing(client)
        await onset(client)
        if way == "vanishes":
            client.gone()
    await asyncio.sleep(0)  # ``live_server`` has found nothing left


async def test_a_lost_connection_decides_nothing_and_a_resume_tells_it_again() -> None:
    async with conversation(hearing(), streaming_input={"resume_grace_sec": 60}) as (server, client):
        request_id = await playing(client)
        began = await onset(client)
        created, last = client.created, client.guarantees.next_output - 1
        client.gone()
        await server.until(lambda: not server.connections, "the loss")
        await asyncio.sleep(2 * LIMIT_SEC)
        query = f"?session_id={created['session_id']}&resume_token={created['resume_token']}&last_output={last}"
        async with native_client(server, query=query, greeted=False) as again:
            await again.until("session_resumed")
            again.guarantees.next_output = last + 1
            again.guarantees._running = request_id
            told = await again.until("speech_confirmed", "speech_dismissed")
            assert told["turn_id"] == began["turn_id"]


async def test_input_goes_on_behind_a_dismissed_sound_that_the_engine_was_behind_with(
    probability: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    probability.append(0.6)
    monkeypatch.setattr("omni_ws.service.conversation.request.INPUT_QUEUE_BYTES", 1000 * MS)
    async with conversation(BusyEngine(spoken_answer()), turns={"silence_duration_ms": 5000}) as (_, client):
        request_id = await playing(client)
        await onset(client)
        begin = asyncio.get_running_loop().time()
        await stream(client, quiet(3000))
        await client.until("speech_dismissed")
        await client.barrier()
        assert asyncio.get_running_loop().time() - begin == pytest.approx(LIKELY_WAIT_SEC, abs=0.2)
        await goes_on(client, request_id)


async def test_a_sound_behind_a_dismissed_one_in_the_same_chunk_is_a_turn(probability: list[float]) -> None:
    probability.append(0.05)
    engine = hearing(TranscriptOutput("Louder."), TextOutput("Very well."))
    async with conversation(engine, turns={"silence_duration_ms": 224}) as (_, client):
        await playing(client)
        await client.binary(quiet(96) + loud(128) + quiet(224) + loud(320))
        await client.until("speech_dismissed")
        await stream(client, PAUSE)
        assert (await client.answer()).reason == "cancelled"
        assert (await client.answer()).text == "Very well."
        kinds = ["speech_started", "speech_dismissed", "speech_started", "speech_confirmed", "speech_stopped"]
        assert speech_frames(client) == kinds


async def test_a_session_follows_another_engine_behind_a_dismissed_sound() -> None:
    engine = hearing()
    async with conversation(engine) as (server, client):
        await playing(client)
        await client.answer()
        await onset(client)
        (conversation_,) = server.app.sessions.conversations
        told: list[SessionConfig] = []
        conversation_.followed = told.append
        conversation_.follow(conversation_.configuration.rules)
        assert told == []
        await stream(client, QUIET)
        await client.until("speech_dismissed")
        assert len(told) == 1


async def test_a_dismissed_sound_does_not_answer_whether_the_user_is_there() -> None:
    """It may be the echo of the question."""
    engine = hearing(tasks=frozenset({Task.CHAT, Task.SPEECH}))
    async with conversation(engine) as (_, client):
        await client.configure(idle_prompt={"after_sec": 5, "closes_after_sec": 10, "text": "Hello?"})
        assert (await client.until("response_started"))["trigger"] == "idle"
        while (await client.until("output_chunk")).get("start_ms", 0) < 500:
            pass
        await onset(client)
        await stream(client, QUIET)
        await client.until("speech_dismissed")
        assert (await client.until("session_closing"))["reason"] == "session_timeout"
        assert len(client.seen("response_started")) == 1
        assert await client.closed() == 4408


async def test_without_duck_a_hum_that_is_spelled_as_words_lets_the_answer_go_on(probability: list[float]) -> None:
    engine = hearing(TranscriptOutput("My hammer."), TextOutput("Which one?"))
    async with conversation(engine, turns={"duck": False, "interrupt_resume": True}) as (_, client):
        request_id = await playing(client)
        await stream(client, quiet(96) + SHORT + PAUSE)
        turn = await client.answer()
        assert (turn.reason, turn.chunks, turn.started) == ("stop", [], None)
        assert (await client.answer()).final["request_id"] == request_id
        assert [frame.get("certain") for frame in client.seen("speech_started")] == [None]


@pytest.mark.parametrize("turns", [{"interrupt_response": False}, {"duck": False}])
async def test_where_it_does_not_act_onsets_are_sure(turns: dict[str, Any]) -> None:
    async with conversation(hearing(TranscriptOutput("What?")), turns=turns) as (_, client):
        await playing(client)
        await stream(client, quiet(96) + SHORT + PAUSE)
        assert "certain" not in await client.until("speech_started")
        assert (await client.until("speech_stopped"))["turn_id"]
        assert not {"speech_confirmed", "speech_dismissed"} & set(speech_frames(client))


class BusyEngine(HearingEngine):
    """Takes nothing of speech."""

    async def act(self, request: GenerationRequest, out: OutputWriter) -> None:
        async for chunk in request.input:
            if chunk.modality is Modality.AUDIO:
                await asyncio.Event().wait()
        for output in self.script:
            out.write(output)
            await out.drain()
        out.write(Finished(FinishReason.STOP, Usage()))


class GuessingEngine(HearingEngine):
    """Tells an interim text, or a guess at the pause, once it has heard so much; it settles nothing."""

    def __init__(self, words: TranscriptOutput | TranscriptGuess, *, after_ms: int, **changes: Any) -> None:
        super().__init__(spoken_answer(), **changes)
        self.words = words
        self.after_ms = after_ms

    async def act(self, request: GenerationRequest, out: OutputWriter) -> None:
        heard = 0
        async for chunk in request.input:
            before, heard = heard, heard + len(chunk.payload) * (chunk.modality is Modality.AUDIO)
            if before < self.after_ms * MS <= heard:
                out.write(self.words)
        for output in () if heard else self.script:
            out.write(output)
            await out.drain()
        out.write(Finished(FinishReason.STOP, Usage()))


@pytest.mark.parametrize(("language", "dismissed"), [("es", True), ("en", False)])
async def test_a_guess_is_in_the_language_that_the_client_named(
    probability: list[float], language: str, dismissed: bool
) -> None:
    probability.append(0.45)
    engine = GuessingEngine(TranscriptGuess("Claro."), after_ms=480, languages=frozenset({"en", "es"}))
    async with conversation(engine) as (_, client):
        await client.configure(input_audio={"language": language})
        await playing(client)
        await onset(client)
        await stream(client, QUIET + quiet(96))
        await client.until("speech_dismissed" if dismissed else "speech_confirmed")


@pytest.mark.parametrize(
    ("text", "other", "verdict"),
    [
        ("Yeah.", "Yes.", "speech_dismissed"),
        ("God it.", "Got it.", "speech_dismissed"),
        ("God it.", "God in.", "speech_confirmed"),
    ],
)
async def test_a_guess_at_the_pause_decides_what_the_sound_leaves_open(
    probability: list[float], text: str, other: str, verdict: str
) -> None:
    probability.append(0.45)
    guess = TranscriptGuess(text, Hearing(others=(other,)))
    async with conversation(GuessingEngine(guess, after_ms=480)) as (_, client):
        await playing(client)
        await onset(client)
        began = asyncio.get_running_loop().time()
        await stream(client, QUIET)
        assert (await client.until("speech_confirmed", "speech_dismissed"))["type"] == verdict
        assert asyncio.get_running_loop().time() - began < WAIT_SEC


@pytest.mark.parametrize(
    ("text", "at_once"), [("stop", True), ("what is the time", True), ("my hammer", False), ("yeah", False)]
)
async def test_words_while_the_voice_goes_on(text: str, at_once: bool) -> None:
    words = TranscriptOutput(text, interim=True)
    async with conversation(GuessingEngine(words, after_ms=400)) as (_, client):
        await playing(client)
        await onset(client, loud(512))
        await asyncio.sleep(0.5)
        await client.barrier()
        assert bool(client.seen("speech_confirmed")) == at_once


@pytest.mark.parametrize(("text", "goes_on"), [("Yes, yes.", True), ("Louder.", False)])
async def test_a_held_answer_goes_on_at_a_guess_of_an_acknowledgement(text: str, goes_on: bool) -> None:
    """A sound of more than 800 ms is held; what is guessed at its pause tells before its turn has ended."""
    engine = GuessingEngine(TranscriptGuess(text), after_ms=1200)
    async with conversation(engine, turns={"interrupt_resume": True}) as (_, client):
        request_id = await playing(client)
        await onset(client, loud(960))
        await client.until("speech_confirmed")
        before = len(client.frames)
        await stream(client, quiet(320))
        await asyncio.sleep(0.5)
        await client.barrier()
        resumed = [frame for frame in client.frames[before:] if frame.get("request_id") == request_id]
        assert bool(resumed) == goes_on
        assert not client.seen("speech_stopped")

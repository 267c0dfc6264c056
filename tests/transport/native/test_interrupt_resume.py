"""Answers that go on after speech without words, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest
from support.inline_workers import MS, InlineWorkers, loud, quiet
from support.live_server import LiveServer, live_server
from support.native_client import Answer, NativeClient, native_client
from support.scripted_engines import HearingEngine

from omni_ws.audio import speech_watch
from omni_ws.client import AudioChunk, connect
from omni_ws.client.events import AnswerCollector
from omni_ws.core import ledger
from omni_ws.core.chunks import Hearing, ToolCallFragment, Word
from omni_ws.engine.base import (
    AudioOutput,
    EngineOutput,
    PartFailed,
    TextOutput,
    ToolCallOutput,
    TranscriptOutput,
)
from omni_ws.engine.fake import CAPABILITIES
from omni_ws.errors import EngineFailed
from omni_ws.service.conversation.interrupted import MAX_HOLD_SEC, WORDS_DUE_SEC

pytestmark = pytest.mark.virtual_clock

FRAME = 20 * MS
RATE = 16_000
#: What turn detection takes for speech while an answer plays, and the silence behind it.
COUGH, PAUSE = quiet(96) + loud(320), quiet(640)
PIECES, PIECE_MS = 30, 100
HEARD_MS = 850


@pytest.fixture(autouse=True)
def sounds_like_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its sound alone, nothing here is an acknowledgement."""
    monkeypatch.setattr(speech_watch, "backchannel_probability", lambda samples: 0.1)


def spoken_answer() -> list[EngineOutput]:
    """A sentence, and its sound in pieces of 100 ms, a word each."""
    script: list[EngineOutput] = [TextOutput(" ".join(f"word{number}" for number in range(PIECES)))]
    ramp = np.arange(RATE * PIECE_MS // 1000) / RATE
    for number in range(PIECES):
        begins = number * PIECE_MS
        script.append(
            AudioOutput((ramp + number / 100).astype(np.float32), RATE, (Word(f"word{number}", begins, begins + 90),))
        )
    return script


def hearing(script: Sequence[Any] = (), *, heard: Sequence[Any] = (), **changes: Any) -> HearingEngine:
    return HearingEngine(script or spoken_answer(), heard=heard, **changes)


@contextlib.asynccontextmanager
async def conversation(
    engine: HearingEngine, *, turns: dict[str, Any] | None = None, binary: bool = False, **fields: Any
) -> AsyncIterator[tuple[LiveServer, NativeClient]]:
    async with live_server(engine, **fields) as server:
        server.app.sessions.speech_workers = InlineWorkers()
        async with native_client(server, subprotocols=["omni.v1+binary"] if binary else None) as client:
            await client.configure(
                turn_detection={"type": "server_vad", "interrupt_resume": True, **(turns or {})},
                output_audio={"sample_rate": RATE},
            )
            yield server, client


async def stream(client: NativeClient, audio: bytes) -> None:
    for start in range(0, len(audio), FRAME):
        await client.binary(audio[start : start + FRAME])


async def played(client: NativeClient, *, until_ms: float = HEARD_MS) -> str:
    """Asks, and reports what was heard of the answer. Returns its request."""
    await client.say("talk to me")
    request_id: str = (await client.until("response_started"))["request_id"]
    while (frame := await client.until("output_chunk")).get("start_ms", 0) < until_ms:
        pass
    await client.send("output_ack", sequence_id=frame["sequence_id"], played_ms=until_ms)
    await client.barrier()
    return request_id


async def cough(client: NativeClient) -> None:
    await stream(client, COUGH)
    await client.until("speech_started")
    await stream(client, PAUSE)


def sound(frames: Sequence[dict[str, Any]], *, upto_ms: float | None = None) -> bytes:
    """The audio of these frames, and of what went before a place on its time line."""
    audio = b"".join(frame["audio"] for frame in frames if "audio" in frame)
    return audio if upto_ms is None else audio[: round(upto_ms * 2 * RATE / 1000)]


async def whole_sound(engine: HearingEngine) -> bytes:
    async with conversation(engine) as (_, client):
        await client.say("talk to me")
        return (await client.answer()).audio


async def cut_answer(client: NativeClient, request_id: str) -> Answer:
    """Speech with words interrupted: the cancelled final, and the answer to the speech."""
    cut = await client.answer()
    assert (cut.final["request_id"], cut.reason) == (request_id, "cancelled")
    assert cut.audio == b""
    return await client.answer()


# it goes on


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize(
    "heard",
    [
        (),
        (TranscriptOutput("", interim=True), TranscriptOutput(" ")),
        (TextOutput("I have heard nothing."), AudioOutput(np.zeros(1600, np.float32), RATE)),
    ],
    ids=["nothing", "blank transcripts", "an answer to silence"],
)
async def test_the_answer_goes_on_where_it_was_heard_to(heard: Sequence[Any], binary: bool) -> None:
    whole = await whole_sound(hearing())
    engine = hearing(heard=heard)
    async with conversation(engine, binary=binary) as (_, client):
        request_id = await played(client)
        before = len(client.frames)
        await cough(client)
        turn = await client.answer()
        assert (turn.reason, turn.chunks, turn.started) == ("stop", [], None)
        assert turn.final["request_id"] != request_id
        rest = await client.answer()
        assert (rest.final["request_id"], rest.reason, rest.text) == (request_id, "stop", "")
        assert rest.chunks[0]["start_ms"] == HEARD_MS
        assert sound(client.frames[:before], upto_ms=HEARD_MS) + rest.audio == whole
        assert rest.final["usage"]["output_audio_ms"] == PIECES * PIECE_MS
        await client.barrier()
        assert not client.seen("error")
        # What was said in all counts in the history, and the cough left nothing.
        await client.configure(turn_detection=None, overlap=None)
        await client.say("and?")
        await client.answer()
        roles = [(message.role, message.text) for message in engine.requests[-1].history]
        assert roles == [("user", "talk to me"), ("assistant", spoken_answer()[0].text)]  # type: ignore[union-attr]


@pytest.mark.parametrize("binary", [False, True])
async def test_an_answer_of_the_client_library_has_its_sound_once(binary: bool) -> None:
    whole = await whole_sound(hearing())
    config = {
        "turn_detection": {"type": "server_vad", "interrupt_resume": True},
        "output_audio": {"format": "pcm16", "sample_rate": RATE},
    }
    async with live_server(hearing()) as server:
        server.app.sessions.speech_workers = InlineWorkers()
        async with connect(server.websocket_url, binary=binary, config=config) as session:
            await session.send_text("talk to me", end=True, ref="asked")
            collector = AnswerCollector()
            async for event in session.events():
                collector.add(event)
                if isinstance(event, AudioChunk) and event.start_ms == HEARD_MS // PIECE_MS * PIECE_MS:
                    await session.acknowledge_output(played_ms=HEARD_MS, request_id=event.request_id)
                    for start in range(0, len(COUGH + PAUSE), FRAME):
                        await session.send_audio((COUGH + PAUSE)[start : start + FRAME])
                if (answer := collector.take("asked")) is not None:
                    break
    assert answer is not None
    assert answer.audio == whole
    assert len(answer.words) == (0 if binary else PIECES)


async def test_the_result_of_a_tool_does_not_end_it_and_is_answered_behind_it() -> None:
    gate = asyncio.Event()
    call = ToolCallOutput(ToolCallFragment(0, id="call_1", name="look", arguments="{}"))
    engine = hearing([call, *spoken_answer()], heard=[gate.wait], tools=True)
    async with conversation(engine) as (_, client):
        request_id = await played(client)
        await cough(client)
        await client.until("speech_stopped")
        await client.chunk("noon", role="tool", tool_call_id="call_1", end=True)
        await client.barrier()
        gate.set()
        assert (await client.answer()).chunks == []  # of the cough
        rest = await client.answer()
        assert (rest.final["request_id"], rest.reason) == (request_id, "stop")
        told = await client.answer()
        assert told.started is not None
        assert (told.started["trigger"], told.reason) == ("end_of_input", "stop")


async def test_it_goes_on_after_every_cough() -> None:
    whole = await whole_sound(hearing())
    async with conversation(hearing()) as (_, client):
        request_id = await played(client)
        begin = len(client.frames)
        await cough(client)
        assert (await client.answer()).reason == "stop"
        while (frame := await client.until("output_chunk")).get("start_ms", 0) < 2 * HEARD_MS:
            pass
        await client.send("output_ack", sequence_id=frame["sequence_id"], played_ms=2 * HEARD_MS)
        await client.barrier()
        middle = len(client.frames)
        await cough(client)
        assert (await client.answer()).final["request_id"] != request_id
        rest = await client.answer()
        assert (rest.final["request_id"], rest.reason) == (request_id, "stop")
        first = sound(client.frames[:begin], upto_ms=HEARD_MS)
        second = sound(client.frames[begin:middle], upto_ms=HEARD_MS)
        assert first + second + rest.audio == whole


async def test_without_reports_it_goes_on_where_the_clock_says_that_it_was() -> None:
    async with conversation(hearing()) as (_, client):
        await client.say("talk to me")
        await client.until("response_started")
        while (await client.until("output_chunk")).get("start_ms", 0) < HEARD_MS:
            pass
        await cough(client)
        sent_ms = max(frame.get("start_ms", 0) for frame in client.seen("output_chunk"))
        await client.answer()
        rest = await client.answer()
        begins = rest.chunks[0]["start_ms"]
        assert HEARD_MS - 401 <= begins <= sent_ms + PIECE_MS
        assert len(rest.audio) == (PIECES * PIECE_MS - begins) * 2 * RATE // 1000


async def test_the_last_report_may_come_with_the_interruption() -> None:
    async with conversation(hearing()) as (_, client):
        await played(client)
        last = client.seen("output_chunk")[-1]["sequence_id"]
        await stream(client, COUGH)
        await client.until("speech_started")
        await client.send("output_ack", sequence_id=last, played_ms=900)
        await stream(client, PAUSE)
        await client.answer()
        assert (await client.answer()).chunks[0]["start_ms"] == 900


async def test_an_answer_of_which_nothing_was_sent_comes_whole() -> None:
    thinking = asyncio.Event()
    whole = await whole_sound(hearing())
    engine = hearing((thinking.wait, *spoken_answer()))
    async with conversation(engine) as (_, client):
        await client.say("talk to me")
        request_id = (await client.until("response_started"))["request_id"]
        await stream(client, COUGH)
        await client.until("speech_started")
        thinking.set()
        await stream(client, PAUSE)
        assert (await client.answer()).final["request_id"] != request_id
        answer = await client.answer()
        assert (answer.text, answer.audio) == (spoken_answer()[0].text, whole)  # type: ignore[union-attr]


async def test_what_fails_meanwhile_is_told_once_it_goes_on() -> None:
    broken = asyncio.Event()
    engine = hearing((*spoken_answer()[:12], broken.wait, EngineFailed("broken")))
    async with conversation(engine, expect_errors=True) as (_, client):
        request_id = await played(client)
        await stream(client, COUGH)
        await client.until("speech_started")
        broken.set()
        await client.barrier()
        assert not client.seen("error")
        await stream(client, PAUSE)
        assert (await client.answer()).final["request_id"] != request_id
        answer = await client.answer()
        assert (answer.final["request_id"], answer.reason) == (request_id, "error")
        assert [error["request_id"] for error in answer.errors] == [request_id]


@pytest.mark.parametrize(
    "heard",
    [
        [TranscriptOutput("Yeah", interim=True), TranscriptOutput("Yeah.")],
        [TranscriptOutput("Okay."), TranscriptOutput(" I see.")],
        [TranscriptOutput("Mm-hmm."), TextOutput("Pardon?")],
    ],
    ids=["yeah", "in two pieces", "mm-hm"],
)
async def test_it_goes_on_after_a_mere_acknowledgement(heard: Sequence[Any]) -> None:
    whole = await whole_sound(hearing())
    engine = hearing(heard=heard)
    async with conversation(engine) as (_, client):
        request_id = await played(client)
        before = len(client.frames)
        await cough(client)
        turn = await client.answer()
        assert (turn.reason, turn.chunks, turn.started) == ("stop", [], None)
        rest = await client.answer()
        assert (rest.final["request_id"], rest.reason) == (request_id, "stop")
        assert sound(client.frames[:before], upto_ms=HEARD_MS) + rest.audio == whole
        await client.configure(turn_detection=None, overlap=None)
        await client.say("and?")
        await client.answer()
        assert [message.role for message in engine.requests[-1].history] == ["user", "assistant"]


# it does not


def question(text: str) -> list[EngineOutput]:
    """The answer with other words, the ninth of which ends at the place that is heard."""
    words = text.split()
    script = spoken_answer()
    for index, output in enumerate(script):
        if isinstance(output, AudioOutput):
            (word,) = output.words
            spoken = words[index - 1] if index <= len(words) else "so"
            script[index] = AudioOutput(output.samples, RATE, (Word(spoken, word.start_ms, word.end_ms),))
    script[0] = TextOutput(" ".join([*words, *["so"] * (PIECES - len(words))]))
    return script


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ("It will rain. Shall I read on for you? Then", True),
        ("It will rain. I shall read on for you. Then", False),
    ],
)
async def test_an_acknowledgement_answers_a_question(text: str, ends: bool) -> None:
    engine = hearing(question(text), heard=[TranscriptOutput("Yeah."), TextOutput("Very well.")])
    async with conversation(engine) as (_, client):
        request_id = await played(client)
        await cough(client)
        answer = await client.answer()
        assert (answer.final["request_id"] == request_id, answer.reason) == (ends, "cancelled" if ends else "stop")
        if ends:
            assert (await client.answer()).text == "Very well."


@pytest.mark.parametrize(
    ("text", "heard", "counts"),
    [
        ("Genau.", Hearing("german"), True),
        ("Genau.", Hearing("english"), False),
        ("God it.", Hearing("english", others=("God in.", "Got it.")), True),
    ],
)
async def test_an_acknowledgement_as_it_was_heard(text: str, heard: Hearing, counts: bool) -> None:
    engine = hearing(heard=[TranscriptOutput(text, hearing=heard), TextOutput("Gut.")])
    async with conversation(engine) as (_, client):
        request_id = await played(client)
        await cough(client)
        if counts:
            assert (await client.answer()).chunks == []
        else:
            assert (await cut_answer(client, request_id)).text == "Gut."


@pytest.mark.parametrize(("language", "counts"), [("es", True), ("en", False)])
async def test_an_acknowledgement_in_a_language_that_the_client_named(language: str, counts: bool) -> None:
    heard = [TranscriptOutput("Claro."), TextOutput("Vale.")]
    async with conversation(hearing(heard=heard, languages=frozenset({"en", "es"}))) as (_, client):
        await client.configure(input_audio={"language": language})
        request_id = await played(client)
        await cough(client)
        if counts:
            assert (await client.answer()).chunks == []
        else:
            assert (await cut_answer(client, request_id)).text == "Vale."


async def test_what_was_passed_over_as_an_acknowledgement_is_told_with_the_words_behind_it() -> None:
    heard = [TranscriptOutput("Okay."), TranscriptOutput(" Louder please."), TextOutput("Very well.")]
    engine = hearing(heard=heard)
    async with conversation(engine) as (_, client):
        request_id = await played(client)
        await cough(client)
        answer = await cut_answer(client, request_id)
        assert [chunk["text"] for chunk in answer.chunks] == ["Okay.", " Louder please.", "Very well."]


async def test_without_resuming_an_acknowledgement_is_a_turn_like_any_other() -> None:
    engine = hearing(heard=[TranscriptOutput("Yeah."), TextOutput("Very well.")])
    async with conversation(engine, turns={"interrupt_resume": False}) as (_, client):
        await played(client)
        await stream(client, COUGH + PAUSE)
        assert [(await client.answer()).reason, (await client.answer()).text] == ["cancelled", "Very well."]


@pytest.mark.parametrize("interim", [False, True])
async def test_words_end_it_as_ever(interim: bool) -> None:
    heard = [TranscriptOutput("no", interim=True)] if interim else []
    engine = hearing(heard=[*heard, TranscriptOutput("no louder"), TextOutput("Very well.")])
    async with conversation(engine) as (_, client):
        request_id = await played(client)
        await cough(client)
        answer = await cut_answer(client, request_id)
        assert answer.started is not None
        assert answer.final["request_id"] == answer.started["request_id"]
        assert (answer.text, answer.reason) == ("Very well.", "stop")
        assert [c["text"] for c in answer.chunks if c["modality"] == "transcript"][-1] == "no louder"
        # The engine answers it with what was heard, and so does what follows.
        was_heard = " ".join(f"word{number}" for number in range(9))
        before = [("user", "talk to me"), ("assistant", was_heard)]
        assert [(message.role, message.text) for message in engine.requests[-1].history] == before
        await client.configure(turn_detection=None, overlap=None)
        await client.say("and?")
        await client.answer()
        after = [*before, ("user", "no louder"), ("assistant", "Very well.")]
        assert [(message.role, message.text) for message in engine.requests[-1].history] == after


@pytest.mark.parametrize(
    ("heard", "changes"),
    [
        ([TextOutput("Pardon?")], {"transcribes_first": False}),
        ([PartFailed(EngineFailed("deaf", param="asr")), TextOutput("Pardon?")], {}),
    ],
    ids=["an answer before its transcript", "nobody knows the words"],
)
async def test_what_may_have_words_ends_it(heard: Sequence[Any], changes: dict[str, Any]) -> None:
    async with conversation(hearing(heard=heard, **changes), expect_errors=True) as (_, client):
        request_id = await played(client)
        await cough(client)
        assert (await cut_answer(client, request_id)).text == "Pardon?"


async def test_a_turn_that_fails_ends_it() -> None:
    engine = hearing(heard=[EngineFailed("broken")])
    async with conversation(engine, expect_errors=True) as (_, client):
        request_id = await played(client)
        await cough(client)
        answer = await cut_answer(client, request_id)
        assert (answer.reason, len(answer.errors)) == ("error", 1)
        assert answer.started is not None


async def test_an_error_that_is_held_back_is_dropped_by_words() -> None:
    broken = asyncio.Event()
    engine = hearing((*spoken_answer()[:12], broken.wait, EngineFailed("broken")), heard=[TranscriptOutput("stop")])
    async with conversation(engine, expect_errors=True) as (_, client):
        request_id = await played(client)
        await stream(client, COUGH)
        await client.until("speech_started")
        broken.set()
        await stream(client, PAUSE)
        assert (await cut_answer(client, request_id)).reason == "stop"
        assert not client.seen("error")


@pytest.mark.parametrize(
    ("turns", "changes"),
    [
        ({"interrupt_resume": False}, {}),
        ({}, {"output_modalities": CAPABILITIES.output_modalities}),
    ],
    ids=["not asked for", "no transcripts"],
)
async def test_where_it_does_not_apply_speech_ends_the_answer_at_once(
    turns: dict[str, Any], changes: dict[str, Any]
) -> None:
    async with conversation(hearing(**changes), turns=turns) as (_, client):
        request_id = await played(client)
        await stream(client, COUGH)
        cut = await client.answer()
        assert (cut.final["request_id"], cut.reason) == (request_id, "cancelled")
        await stream(client, PAUSE)
        assert (await client.answer()).started is not None


async def test_under_snapshot_it_does_not_apply() -> None:
    async with conversation(hearing()) as (_, client):
        request_id = await played(client)
        await client.configure(after_start="snapshot")
        await stream(client, COUGH)
        assert (await client.answer()).final["request_id"] == request_id
        await stream(client, PAUSE)
        await client.answer()


async def test_an_answer_that_has_had_its_final_is_over() -> None:
    engine = hearing()
    async with conversation(engine) as (_, client):
        await client.say("talk to me")
        answer = await client.answer()
        await client.send("output_ack", sequence_id=answer.final["sequence_id"], played_ms=2700)
        await cough(client)
        assert (await client.answer()).started is not None
        await client.configure(turn_detection=None, overlap=None)
        await client.say("and?")
        await client.answer()
        assert engine.requests[-1].history[-1].text == " ".join(f"word{number}" for number in range(27))


@pytest.mark.parametrize("past", [False, True])
async def test_more_unheard_audio_than_is_kept_does_not_go_on(past: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    piece = RATE * PIECE_MS // 1000 * 2 + 128  # with what a message costs
    monkeypatch.setattr(ledger, "MAX_UNHEARD_BYTES", 22 * piece - past)
    # The first pieces were heard when the others were sent.
    rest = asyncio.Event()
    script = spoken_answer()
    engine = hearing((*script[:9], rest.wait, *script[9:], asyncio.Event().wait))
    async with conversation(engine) as (_, client):
        await client.configure(max_lead_ms=60_000)
        await client.say("talk to me")
        while (frame := await client.until("output_chunk")).get("start_ms", 0) < 700:
            pass
        await client.send("output_ack", sequence_id=frame["sequence_id"], played_ms=800)
        await client.barrier()
        rest.set()
        while (frame := await client.until("output_chunk")).get("start_ms", 0) < (PIECES - 1) * PIECE_MS:
            pass
        await cough(client)
        reason = (await client.answer()).reason
        assert reason == ("cancelled" if past else "stop")


@contextlib.asynccontextmanager
async def held_for_long(
    heard: Sequence[Any] = (), script: Sequence[Any] = (), *, ends: bool = True
) -> AsyncIterator[tuple[NativeClient, str, asyncio.Event]]:
    """An answer that goes on since no words are known yet; what is ``heard`` becomes known with the event.

    ``ends``: the turn ends, and its words are being written down.
    """
    listening = asyncio.Event()
    async with conversation(hearing(script, heard=[listening.wait, *heard])) as (_, client):
        request_id = await played(client)
        await stream(client, COUGH)
        await client.until("speech_started")
        held_since = asyncio.get_running_loop().time()
        if ends:
            await stream(client, PAUSE)
        while (await client.until("output_chunk")).get("start_ms") != HEARD_MS:
            pass
        longest = MAX_HOLD_SEC + (WORDS_DUE_SEC if ends else 0)
        assert asyncio.get_running_loop().time() - held_since == pytest.approx(longest, abs=0.5)
        yield client, request_id, listening


async def test_it_is_held_for_so_long_and_goes_on() -> None:
    async with held_for_long(ends=False) as (client, request_id, _):
        assert client.frames[-1]["request_id"] == request_id


async def test_while_words_are_written_down_it_is_held_for_longer() -> None:
    async with held_for_long() as (client, request_id, listening):
        rest = await client.answer()
        assert (rest.final["request_id"], rest.reason) == (request_id, "stop")
        listening.set()
        turn = await client.answer()
        assert (turn.reason, turn.chunks, turn.started) == ("stop", [], None)


async def test_a_turn_without_words_changes_nothing_once_it_goes_on() -> None:
    async with held_for_long() as (client, request_id, listening):
        listening.set()
        turn = await client.answer()
        assert (turn.reason, turn.started, turn.final["request_id"] != request_id) == ("stop", None, True)
        rest = await client.answer()
        assert (rest.final["request_id"], rest.reason) == (request_id, "stop")
        assert rest.final["usage"]["output_audio_ms"] == PIECES * PIECE_MS


async def test_words_that_become_known_late_still_end_it() -> None:
    async with held_for_long([TranscriptOutput("wait")]) as (client, request_id, listening):
        listening.set()
        cut = await client.answer()
        assert (cut.final["request_id"], cut.reason) == (request_id, "cancelled")
        answer = await client.answer()
        assert (answer.chunks[0]["modality"], answer.chunks[0]["text"]) == ("transcript", "wait")
        assert answer.started is not None


async def test_words_that_become_known_after_its_end_are_answered() -> None:
    async with held_for_long([TranscriptOutput("wait")]) as (client, request_id, listening):
        rest = await client.answer()
        assert (rest.final["request_id"], rest.reason) == (request_id, "stop")
        listening.set()
        answer = await client.answer()
        assert (answer.chunks[0]["modality"], answer.chunks[0]["text"]) == ("transcript", "wait")
        assert answer.started is not None


# what else may happen while it is held


@contextlib.asynccontextmanager
async def held(
    *, recognised: asyncio.Event | None = None, heard: Sequence[Any] = (), **fields: Any
) -> AsyncIterator[tuple[LiveServer, NativeClient, str, HearingEngine]]:
    """An answer is held, and the speech, without an end, or recognised when that is set, has no words yet."""
    begun = asyncio.Event()

    async def recognition() -> None:
        begun.set()
        if recognised is not None:
            await recognised.wait()

    engine = hearing(heard=[recognition, *heard])
    async with conversation(engine, **fields) as (server, client):
        request_id = await played(client)
        await stream(client, COUGH)
        await client.until("speech_started")
        if recognised is not None:
            await stream(client, PAUSE)
            await client.until("speech_stopped")
            await begun.wait()
        yield server, client, request_id, engine


@pytest.mark.parametrize("phase", ["speaking", "recognising"])
async def test_cancel_ends_both(phase: str) -> None:
    async with held(recognised=asyncio.Event() if phase == "recognising" else None) as (_, client, request_id, _):
        await client.send("cancel")
        cut, turn_end = await client.answer(), await client.answer()
        assert (cut.final["request_id"], cut.reason, turn_end.reason) == (request_id, "cancelled", "cancelled")
        await client.send("cancel")
        await stream(client, PAUSE)
        await client.barrier()
        assert len(client.guarantees.finished) == 2


async def test_cancel_of_the_held_answer_leaves_the_turn() -> None:
    async with held(heard=[TextOutput("Pardon?")]) as (_, client, request_id, _):
        await client.send("cancel", request_id=request_id)
        assert (await client.answer()).final["request_id"] == request_id
        await stream(client, PAUSE)
        answer = await client.answer()
        assert (answer.reason, answer.text) == ("stop", "Pardon?")


@pytest.mark.parametrize("overlap", ["wait", "interrupt"])
async def test_another_request_ends_it(overlap: str) -> None:
    recognised = asyncio.Event()
    async with held(recognised=recognised, heard=[TextOutput("Pardon?")]) as (_, client, request_id, engine):
        await client.configure(overlap=overlap)
        engine.script = (TextOutput("Hello."),)
        await client.say("hello")
        cut = await client.answer()
        assert (cut.final["request_id"], cut.reason) == (request_id, "cancelled")
        recognised.set()
        turn = await client.answer()
        assert turn.started is not None
        assert (turn.reason, turn.text) == (("stop", "Pardon?") if overlap == "wait" else ("cancelled", ""))
        assert (await client.answer()).text == "Hello."


async def test_text_within_the_turn_ends_it() -> None:
    async with held(heard=[TextOutput("I see.")]) as (_, client, request_id, _):
        await client.chunk("look at this")
        await stream(client, PAUSE)
        assert (await cut_answer(client, request_id)).text == "I see."


@pytest.mark.parametrize("phase", ["speaking", "recognising"])
@pytest.mark.parametrize("way", ["leaves", "vanishes"])
async def test_nothing_is_left_of_a_client_that_goes(phase: str, way: str) -> None:
    async with held(recognised=asyncio.Event() if phase == "recognising" else None) as (server, client, _, _):
        assert server.held_bytes > 0
        if way == "vanishes":
            client.gone()
    await asyncio.sleep(0)  # ``live_server`` has found nothing left


async def test_a_drain_lets_it_go_on() -> None:
    recognised = asyncio.Event()
    async with held(recognised=recognised, still_answers=False) as (server, client, request_id, _):
        draining = asyncio.create_task(server.running.drain(30))
        await client.until("session_closing")
        recognised.set()
        assert (await client.answer()).final["request_id"] != request_id
        answer = await client.answer()
        assert (answer.final["request_id"], answer.reason) == (request_id, "stop")
        assert await client.closed() == 1012
        await draining


@pytest.mark.parametrize("back_in_time", [True, False])
async def test_a_client_that_comes_back_hears_the_rest(back_in_time: bool) -> None:
    recognised = asyncio.Event()
    async with held(recognised=recognised, streaming_input={"resume_grace_sec": 60}) as (
        server,
        client,
        request_id,
        engine,
    ):
        created, last = client.created, client.guarantees.next_output - 1
        client.gone()
        await server.until(lambda: not server.connections, "the loss")
        if not back_in_time:
            await asyncio.sleep(MAX_HOLD_SEC + WORDS_DUE_SEC + 1)
            assert engine.active_requests == 1
        recognised.set()
        query = f"?session_id={created['session_id']}&resume_token={created['resume_token']}&last_output={last}"
        async with native_client(server, query=query, greeted=False) as again:
            await again.until("session_resumed")
            again.guarantees.next_output = last + 1
            again.guarantees._running = request_id
            ends = [await again.answer(), await again.answer()]
            finals = [(end.final["request_id"] == request_id, end.reason) for end in ends]
            assert finals == [(False, "stop"), (True, "stop")]
            assert min(chunk["start_ms"] for end in ends for chunk in end.chunks) == HEARD_MS
            again.gone()
            await server.until(lambda: not server.connections, "the loss")
        await asyncio.sleep(61)


@pytest.mark.parametrize("cut", ["pcm16", "wav"])
async def test_other_formats_go_on(cut: str) -> None:
    """Raw samples are cut where they were heard to; what has a header, at a chunk."""
    async with conversation(hearing()) as (_, client):
        await client.configure(output_audio={"format": cut})
        await played(client)
        await cough(client)
        await client.answer()
        begins = (await client.answer()).chunks[0]["start_ms"]
        assert begins == HEARD_MS if cut == "pcm16" else HEARD_MS - PIECE_MS < begins <= HEARD_MS

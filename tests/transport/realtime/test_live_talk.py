"""What is said in a Live session: its endless sound, transcripts, interruption, mute, context and delegation."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from support import inline_workers
from support.inline_workers import inline
from support.inline_workers import loud_24k as loud
from support.inline_workers import quiet_24k as quiet
from support.live_server import live_server
from support.realtime_client import live_client
from support.scripted_engines import SPOKEN_MS, Talker, delegates, interim, spoken

from omni_ws.audio.pcm import encode_a_law, encode_mu_law
from omni_ws.core.chunks import FinishReason, Usage
from omni_ws.engine.base import Finished, GenerationRequest, OutputWriter, TextOutput, TranscriptOutput
from omni_ws.errors import EngineFailed, InvalidValue
from omni_ws.service.conversation.interrupted import MAX_HOLD_SEC
from omni_ws.transport.realtime.live_parts import (
    DELEGATE_RULE,
    LEAD_MS,
    MAX_DELEGATIONS,
    ClientDelegations,
)
from omni_ws.wire.live_session import MAX_APPEND_TOKENS, MAX_INSTRUCTIONS_TOKENS, ClientDelegation

pytestmark = pytest.mark.virtual_clock

SILENT_MS = 640
TURN = quiet(96) + loud(320) + quiet(SILENT_MS)
MS = 48
SIX = "One is here. Two is here. Three is here. Four is here. Five is here. Six is here."


# The sound


@pytest.mark.parametrize("timed", [True, False])
async def test_sound_and_silence_are_as_long_as_the_session(timed: bool) -> None:
    loop = asyncio.get_running_loop()
    engine = Talker("hello", reply=lambda said: spoken("One two three. Four five six.", timed=timed))
    async with live_server(engine) as server, live_client(inline(server)) as client:
        await client.start()
        began = loop.time()
        speaking = asyncio.create_task(client.speak())
        while loop.time() < began + 5:
            await client.take()
            ahead_ms = len(client.sound) / MS - (loop.time() - began) * 1000
            assert -200 <= ahead_ms <= LEAD_MS + 1
        await speaking
        sounding = [index for index in range(0, len(client.sound), MS) if any(client.sound[index : index + MS])]
        begin, end = sounding[0] // MS, sounding[-1] // MS
        assert end - begin == 6 * SPOKEN_MS - 1
        assert not any(client.sound[: begin * MS])
        assert client.said() == "One two three. Four five six."
        deltas = client.seen("session.output_transcript.delta")
        assert len(deltas) >= 5
        assert deltas[0]["start_ms"] == pytest.approx(begin, abs=2)
        assert deltas[-1]["end_ms"] == pytest.approx(end, abs=101)
        assert [one["delta"] for one in deltas][:2] == ["One", " two"] or not timed


@pytest.mark.parametrize(
    ("kind", "rate", "frame", "silence"),
    [("pcm", 24_000, 4800, 0), ("pcm", 16_000, 3200, 0), ("pcmu", 8000, 800, 0xFF), ("pcma", 8000, 800, 0xD5)],
)
async def test_each_format_has_its_silence(kind: str, rate: int, frame: int, silence: int) -> None:
    async with live_server(Talker()) as server, live_client(inline(server)) as client:
        session = await client.start(audio={"format": {"type": f"audio/{kind}", "rate": rate}})
        assert session["audio"]["format"] == {"type": f"audio/{kind}", "rate": rate}
        await client.take_for(1.05)
        assert client.deltas == [frame] * 10
        assert set(client.sound) == {silence}


@pytest.mark.parametrize("kind", ["pcmu", "pcma"])
async def test_a_telephone_can_talk(kind: str) -> None:
    async with live_server(Talker("yes")) as server, live_client(inline(server)) as client:
        await client.start(audio={"format": {"type": f"audio/{kind}", "rate": 8000}})
        audio = inline_workers.quiet(96, khz=8) + inline_workers.loud(320, khz=8) + inline_workers.quiet(640, khz=8)
        await client.append(encoded(audio, kind), size=800)
        await client.until_said("You said yes")


def encoded(pcm16: bytes, kind: str) -> bytes:
    samples = np.frombuffer(pcm16, "<i2")
    return encode_mu_law(samples) if kind == "pcmu" else encode_a_law(samples)


async def test_silence_may_be_left_out() -> None:
    async with live_server(Talker("yes"), live={"silence": False}) as server, live_client(inline(server)) as client:
        await client.start()
        await client.speak()
        await client.until_said("You said yes")
        await client.take_for(2)
        assert len(client.sound) == 3 * SPOKEN_MS * MS
        assert all(any(client.sound[index : index + MS]) for index in range(0, len(client.sound), MS))


# Interruption


@pytest.mark.parametrize("timed", [True, False])
async def test_speech_silences_the_answer_and_the_rest_is_not_in_the_transcript(timed: bool) -> None:
    replies = iter((SIX, "Yes."))
    engine = Talker("count", "and what about Paris", reply=lambda said: spoken(next(replies), timed=timed))
    async with live_server(engine) as server, live_client(inline(server)) as client:
        await client.start()
        await client.speak()
        while len(client.said().split()) < 3:
            await client.receive()
        speaking = asyncio.create_task(client.speak(ms=960))
        await client.until_said("Yes.")
        await speaking
        await client.take_for(1)
        first, _, rest = client.said().rpartition(" Yes.")
        assert SIX.startswith(first)
        assert 3 <= len(first.split()) <= 12, first
        assert not rest
        told = [one.text for one in engine.requests[1].history if one.role == "assistant"]
        assert len(told) == 1
        assert first.startswith(told[0])  # the model knows nothing that was not heard
        sounds = [any(client.sound[index : index + 100 * MS]) for index in range(0, len(client.sound), 100 * MS)]
        assert sum(sounds) * 100 <= (len(first.split()) + 2) * SPOKEN_MS + SPOKEN_MS + 300


async def test_what_is_no_interruption_lets_the_answer_go_on() -> None:
    """Speech without words: the answer goes on where it was cut, and nothing is heard twice."""
    engine = Talker("count", "", reply=lambda said: spoken(SIX))
    async with live_server(engine) as server, live_client(inline(server)) as client:
        await client.start()
        await client.speak()
        while len(client.said().split()) < 3:
            await client.receive()
        speaking = asyncio.create_task(client.speak(ms=1000))
        await client.until_said("Six is here.")
        await speaking
        await client.take_for(1)
        assert client.said() == SIX
        sounding = sum(any(client.sound[index : index + MS]) for index in range(0, len(client.sound), MS))
        assert sounding == pytest.approx(len(SIX.split()) * SPOKEN_MS, abs=1)


# Mute


async def test_muted_audio_is_never_heard() -> None:
    engine = Talker("yes", "no")
    async with live_server(engine) as server, live_client(inline(server)) as client:
        await client.start()
        await client.send("session.input_audio.mute", event_id="m")
        assert (await client.until("session.input_audio.muted"))["client_event_id"] == "m"
        await client.speak()
        await client.send("session.input_audio.unmute", event_id="u")
        assert (await client.until("session.input_audio.unmuted"))["client_event_id"] == "u"
        assert not engine.requests
        await client.speak()
        await client.until_said("You said yes")
        (heard,) = client.seen("session.input_transcript.delta")
        assert heard["start_ms"] > 1000  # the time of the muted audio counts
        audio = b"".join(chunk.payload for chunk in engine.inputs[0])
        assert len(audio) < len(TURN)


async def test_output_goes_on_while_the_input_is_muted() -> None:
    async with live_server(Talker("yes")) as server, live_client(inline(server)) as client:
        await client.start()
        await client.append(TURN)
        await client.send("session.input_audio.mute")
        await client.until_said("You said yes")


# Context


async def test_commentary_passes_through_the_model_and_is_told_once() -> None:
    engine = Talker("hello", reply=lambda said: spoken("Hello Ann." if "Greet" in said else "You are back."))
    async with live_server(engine) as server, live_client(inline(server)) as client:
        await client.start()
        await client.send("session.commentary.append", event_id="c", delegation_id=None, content="Greet Ann.")
        appended = await client.until("session.commentary.appended")
        assert appended["client_event_id"] == "c"
        assert 0 <= appended["start_ms"] <= appended["end_ms"]
        await client.until_said("Hello Ann.")
        assert not client.heard()
        await client.speak()
        await client.until_said("You are back.")
        await client.take_for(5)
        assert client.said() == "Hello Ann. You are back."
        assert sum("Greet Ann." in one for one in engine.asked) == 1


async def test_commentary_waits_while_the_user_speaks() -> None:
    engine = Talker("hello", reply=lambda said: spoken("News." if "parcel" in said else "Hi."))
    async with live_server(engine) as server, live_client(inline(server)) as client:
        await client.start()
        await client.append(quiet(96) + loud(960))
        await client.send("session.commentary.append", delegation_id=None, content="The parcel is here.")
        await asyncio.sleep(1)
        assert not engine.requests or len(engine.requests) == 1
        await client.append(quiet(SILENT_MS))
        await client.until_said("News.")
        assert client.said() == "Hi. News."


async def test_commentary_that_nobody_heard_is_told_again() -> None:
    engine = Talker("and what about Paris", reply=lambda said: spoken("News it is." if "parcel" in said else "Fine."))
    slow = asyncio.Event()

    def reply(said: str) -> Iterable[Any]:
        if "parcel" in said and not slow.is_set():
            yield slow.wait
        yield from spoken("News it is." if "parcel" in said else "Fine.")

    engine.reply = reply
    async with live_server(engine) as server, live_client(inline(server)) as client:
        await client.start()
        await client.send("session.commentary.append", delegation_id=None, content="The parcel is here.")
        await client.until("session.commentary.appended")
        await client.speak(ms=960)
        slow.set()
        await client.until_said("News it is.")
        await client.take_for(3)
        assert client.said() == "Fine. News it is.", engine.asked
        assert len(client.seen("session.commentary.appended")) == 1


async def test_commentary_does_not_begin_while_somebody_speaks_however_long_without_words() -> None:
    """No word is known until the end of the turn, which lasts for longer than other answers are held."""
    ready = asyncio.Event()

    def reply(said: str) -> Iterable[Any]:
        if "parcel" in said:
            yield ready.wait
        yield from spoken("News it is." if "parcel" in said else "Fine.")

    async with live_server(Talker("hello", reply=reply)) as server, live_client(inline(server)) as client:
        await client.start()
        await client.send("session.commentary.append", delegation_id=None, content="The parcel is here.")
        await client.until("session.commentary.appended")
        speaking = asyncio.create_task(client.speak(ms=int(2000 * MAX_HOLD_SEC)))
        await client.take_for(0.6)
        ready.set()
        await client.take_for(2 * MAX_HOLD_SEC - 0.6)
        assert not any(client.sound)
        await speaking
        await client.until_said("News it is.")
        assert client.said() == "Fine. News it is."


async def test_facts_and_rules_are_silent() -> None:
    engine = Talker("hello")
    async with live_server(engine) as server, live_client(inline(server)) as client:
        await client.start(instructions="Be brief.")
        for kind, text in (("thinking", "It is raining."), ("instructions", "Be polite.")):
            await client.send(f"session.{kind}.append", event_id=kind, delegation_id=None, content=text)
            appended = await client.until(f"session.{kind}.appended")
            assert appended["client_event_id"] == kind
        await client.take_for(3)
        assert not engine.requests
        await client.speak()
        await client.until_said("You said hello")
        (request,) = engine.requests
        assert request.instructions == f"Be brief.\n\n{DELEGATE_RULE}\n\nBe polite."
        given = [*(one.text.encode() for one in request.history), *(one.payload for one in engine.inputs[0])]
        assert any(b"It is raining." in one for one in given)


async def test_appends_are_checked() -> None:
    async with live_server(Talker()) as server, live_client(inline(server)) as client:
        await client.start()
        long = "word " * MAX_APPEND_TOKENS
        for kind in ("commentary", "thinking", "instructions"):
            name = f"session.{kind}.append"
            for fields, code, param in (
                ({"content": "x"}, "missing_required_parameter", "delegation_id"),
                ({"delegation_id": None}, "missing_required_parameter", "content"),
                ({"delegation_id": None, "content": 3}, "invalid_value", "content"),
                ({"delegation_id": None, "content": " "}, "invalid_value", "content"),
                ({"delegation_id": None, "content": f"{long}word"}, "invalid_value", "content"),
                ({"delegation_id": 3, "content": "x"}, "invalid_value", "delegation_id"),
                ({"delegation_id": "call_9", "content": "x"}, "invalid_value", "delegation_id"),
            ):
                error = await client.failed(name, **fields)
                assert (error["code"], error["param"]) == (code, param)
            assert error["message"] == "Unknown client delegation."
            await client.send(name, delegation_id=None, content=long)
            await client.until(f"{name}ed")


async def test_too_many_appends_are_refused_and_the_session_goes_on() -> None:
    engine = Talker("hello")
    async with live_server(engine) as server, live_client(inline(server)) as client:
        await client.start()
        await client.append(quiet(96) + loud(320))  # the user speaks
        for number in range(65):
            fields = {"delegation_id": None, "content": f"News {number}."}
            await client.send("session.commentary.append", event_id=f"c{number}", **fields)
        error = (await client.until("error"))["error"]
        assert (error["code"], error["client_event_id"]) == ("engine_overloaded", "c64")
        await client.send("session.close")
        refused = [(await client.until("error"))["error"]["client_event_id"] for _ in range(64)]
        assert refused == [f"c{number}" for number in range(64)]
        assert (await client.receive())["type"] == "session.closed"
        assert (await client.closed())[0] == 1000


# Delegation


async def test_work_is_handed_over_and_told_once_while_the_talk_goes_on() -> None:
    def reply(said: str) -> Iterable[Any]:
        if "parcel?" in said:
            return delegates("One moment.")
        return spoken("It is in Lisbon." if "Lisbon" in said else f"Sure, {said}.")

    engine = Talker("Where is my parcel?", "what time", "how much", reply=reply)
    async with live_server(engine) as server, live_client(inline(server)) as client:
        await client.start()
        await client.speak()
        created = await client.until("session.delegation.created")
        assert created["delegation"] == {"id": "call_1", "type": "delegation", "target": "client"}
        assert created["offset_ms"] > 0
        await client.until_said("One moment.")
        for question in ("what time", "how much"):
            await client.speak()
            await client.until_said(f"Sure, {question}.")
        fields = {"delegation_id": "call_1", "content": "The parcel is in Lisbon."}
        await client.send("session.commentary.append", **fields)
        await client.until_said("It is in Lisbon.")
        await client.take_for(20)
        assert client.said() == "One moment. Sure, what time. Sure, how much. It is in Lisbon."
        assert len(client.seen("session.delegation.created")) == 1


@pytest.mark.parametrize(("delay_ms", "expected_ms"), [(None, 1500), (0, 0), (4000, 4000)])
async def test_work_that_is_handed_over_without_a_word_is_acknowledged(delay_ms: int | None, expected_ms: int) -> None:
    engine = Talker("Where is my parcel?", reply=lambda said: delegates("") if "parcel" in said else spoken(said))
    delegation = {"type": "client", **({} if delay_ms is None else {"acknowledgement_delay_ms": delay_ms})}
    async with live_server(engine) as server, live_client(inline(server)) as client:
        await client.start()
        await client.send("session.update", session={"delegation": delegation})
        await client.speak()
        handed_over = (await client.until("session.delegation.created"))["offset_ms"]
        await client.take_for(20)
        assert client.said() == "One moment."
        said = client.seen("session.output_transcript.delta")[0]["start_ms"]
        assert said - handed_over == pytest.approx(expected_ms, abs=101)


@pytest.mark.parametrize(
    ("kind", "told"), [("commentary", "It is in Lisbon."), ("thinking", ""), ("instructions", "One moment.")]
)
async def test_news_of_the_work_come_in_place_of_its_acknowledgement(kind: str, told: str) -> None:
    def reply(said: str) -> Iterable[Any]:
        if "parcel?" in said:
            return delegates("")
        return spoken("It is in Lisbon." if "Lisbon" in said else said)

    engine = Talker("Where is my parcel?", reply=reply)
    async with live_server(engine) as server, live_client(inline(server)) as client:
        await client.start()
        await client.speak()
        await client.until("session.delegation.created")
        delegation_id = "call_1" if kind == "commentary" else None
        content = "The parcel is in Lisbon."
        await client.send(f"session.{kind}.append", delegation_id=delegation_id, content=content)
        await client.take_for(20)
        assert client.said() == told


async def test_an_interrupted_answer_hands_nothing_over() -> None:
    """The call comes at the end of an answer that is cancelled before."""
    replies = iter((delegates(SIX), spoken("Fine.")))
    engine = Talker("go", "and what about Paris", reply=lambda said: next(replies))
    never = asyncio.Event()

    def reply(said: str) -> Iterable[Any]:
        if said == "go":
            yield from delegates(SIX)[:-2]
            yield never.wait
        yield from spoken("Fine.")

    engine.reply = reply
    async with live_server(engine) as server, live_client(inline(server)) as client:
        await client.start()
        await client.speak()
        while len(client.said().split()) < 3:
            await client.receive()
        await client.speak(ms=960)
        await client.until_said("Fine.")
        assert not client.seen("session.delegation.created")


async def test_delegations_are_remembered_up_to_a_limit() -> None:
    """The latest may still be told of, one long ago not."""
    numbers = iter(range(1, MAX_DELEGATIONS + 2))
    opened: list[Any] = []

    class Dialect:
        now_ms = 5

        def send(self, events: list[Any]) -> None:
            opened.extend(events)

    delegations = ClientDelegations(Dialect(), ClientDelegation())  # type: ignore[arg-type]
    for number in numbers:
        delegations.opened(f"call_{number}", "{}")
    assert len(opened) == MAX_DELEGATIONS + 1
    delegations.check("call_2")
    with pytest.raises(InvalidValue):
        delegations.check("call_1")


# Transcripts


async def test_input_is_told_while_the_user_speaks() -> None:
    """Words on which two interim texts agree come before the end of the turn, and nothing is told twice."""

    class Writer(Talker):
        async def act(self, request: GenerationRequest, out: OutputWriter) -> None:
            words, count = "where is my parcel now", 0
            async for _ in request.input:
                count += 1
                out.write(interim(" ".join(words.split()[: 1 + count // 3])))
            out.write(TranscriptOutput(words))
            for step in spoken("Here."):
                out.write(step)
            out.write(Finished(FinishReason.STOP, Usage()))

    async with live_server(Writer()) as server, live_client(inline(server)) as client:
        await client.start()
        await client.speak(ms=1500)
        await client.until_said("Here.")
        deltas = client.seen("session.input_transcript.delta")
        assert len(deltas) > 1
        assert client.heard() == "where is my parcel now"
        assert deltas[0]["end_ms"] < 1500
        assert all(one["end_ms"] == two["start_ms"] for one, two in pairwise(deltas))


async def test_a_second_turn_begins_behind_a_blank() -> None:
    async with live_server(Talker("one", "two")) as server, live_client(inline(server)) as client:
        await client.start()
        for heard in ("one", "two"):
            await client.speak()
            await client.until_said(f"You said {heard}")
        assert client.heard() == "one two"
        first, second = client.seen("session.input_transcript.delta")
        assert second["start_ms"] - first["end_ms"] > 800


# Failures


async def test_an_answer_that_fails_is_an_error_and_the_session_goes_on() -> None:
    def reply(said: str) -> Iterable[Any]:
        if said == "fail":
            yield EngineFailed("the model is gone", param="llm")
        yield from spoken("Back.")

    async with live_server(Talker("fail", "again", reply=reply)) as server, live_client(inline(server)) as client:
        await client.start()
        await client.speak()
        error = (await client.until("error"))["error"]
        assert (error["type"], error["code"]) == ("server_error", "engine_failed")
        await client.speak()
        await client.until_said("Back.")


async def test_rules_have_a_limit_together() -> None:
    async with live_server(Talker()) as server, live_client(inline(server)) as client:
        await client.start()
        rule = "word " * MAX_APPEND_TOKENS
        for _ in range(MAX_INSTRUCTIONS_TOKENS // MAX_APPEND_TOKENS):
            await client.send("session.instructions.append", delegation_id=None, content=rule)
            await client.until("session.instructions.appended")
        fields = {"delegation_id": None, "content": "word " * (MAX_INSTRUCTIONS_TOKENS % MAX_APPEND_TOKENS + 1)}
        assert (await client.failed("session.instructions.append", **fields))["code"] == "invalid_value"
        fields["content"] = "word " * (MAX_INSTRUCTIONS_TOKENS % MAX_APPEND_TOKENS)
        await client.send("session.instructions.append", **fields)
        await client.until("session.instructions.appended")


async def test_rules_for_which_there_was_no_room_do_not_count() -> None:
    async with live_server(Talker()) as server, live_client(inline(server)) as client:
        await client.start()
        fields = {"delegation_id": None, "content": "word " * MAX_APPEND_TOKENS}
        budget = server.app.sessions.budget
        budget.charge(budget.capacity)
        assert (await client.failed("session.instructions.append", **fields))["code"] == "engine_overloaded"
        budget.give(budget.capacity)
        for _ in range(MAX_INSTRUCTIONS_TOKENS // MAX_APPEND_TOKENS):
            await client.send("session.instructions.append", **fields)
            await client.until("session.instructions.appended")


async def test_text_that_is_not_spoken_is_told_as_it_is_final() -> None:
    """A voice that says nothing leaves the words."""
    reply = lambda said: [TextOutput("Only "), TextOutput("text.")]  # noqa: E731
    async with live_server(Talker("hello", reply=reply)) as server, live_client(inline(server)) as client:
        await client.start()
        await client.speak()
        (delta,) = [await client.until("session.output_transcript.delta")]
        assert delta["delta"] == "Only text."
        assert delta["start_ms"] > 500


async def test_characters_are_told_without_blanks_between() -> None:
    class Writer(Talker):
        async def act(self, request: GenerationRequest, out: OutputWriter) -> None:
            text, count = "你好吗我很好", 0
            async for _ in request.input:
                count += 1
                out.write(interim(text[: 1 + count // 2]))
            out.write(TranscriptOutput(text))
            out.write(Finished(FinishReason.STOP, Usage()))

    async with live_server(Writer()) as server, live_client(inline(server)) as client:
        await client.start()
        await client.speak(ms=1500)
        while len(client.heard()) < 6:
            await client.receive()
        assert len(client.seen("session.input_transcript.delta")) > 1
        assert client.heard() == "你好吗我很好"

"""One loudspeaker a session: what a request sees of answers that were played, cut, or waited behind others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.live_server import live_server
from support.native_client import NativeClient, native_client
from support.scripted_engines import HearingEngine, tool_call

from omni_ws.core.chunks import Word
from omni_ws.engine.base import AudioOutput, EngineOutput, TextOutput

RATE = 16_000


def spoken(text: str, *, timed: bool = True, second: float = 1.0) -> list[EngineOutput]:
    """A word a second, in one piece."""
    words = text.split()
    ms = round(1000 * second)
    times = tuple(Word(word, ms * index, ms * index + ms - 100) for index, word in enumerate(words))
    samples = np.zeros(round(RATE * second) * len(words), np.float32)
    return [TextOutput(text), AudioOutput(samples, RATE, times if timed else ())]


async def ask(client: NativeClient, engine: HearingEngine, answer: list[EngineOutput], text: str = "ask") -> Any:
    engine.script = tuple(answer)
    await client.say(text)
    return await client.answer()


def audio_number(answer: Any) -> int:
    number: int = next(chunk["sequence_id"] for chunk in answer.chunks if chunk["modality"] == "audio")
    return number


async def seen(client: NativeClient, engine: HearingEngine) -> list[tuple[str, str]]:
    """What the next request, which interrupts, sees; what was asked last, and not answered, begins its own input."""
    engine.script = (TextOutput("ok"),)
    await client.configure(overlap="interrupt")
    await client.say("Stop.")
    await client.until("response_started")
    await client.answer()
    return [(message.role, message.text) for message in engine.requests[-1].history]


@pytest.mark.parametrize("modalities", [["text", "audio"], ["audio"], ["text"]])
async def test_the_text_of_an_answer_is_in_the_history_whatever_was_sent(modalities: list[str]) -> None:
    engine = HearingEngine()
    async with live_server(engine) as server, native_client(server) as client:
        await client.configure(modalities=modalities)
        await ask(client, engine, spoken("Blue is my favourite."), "Which colour?")
        await ask(client, engine, [TextOutput("ok")], "Why?")
    seen_by_last = [(message.role, message.text) for message in engine.requests[-1].history]
    assert seen_by_last == [("user", "Which colour?"), ("assistant", "Blue is my favourite.")]


async def test_an_audio_only_answer_is_cut_where_it_was_heard() -> None:
    engine = HearingEngine()
    async with live_server(engine) as server, native_client(server) as client:
        await client.configure(modalities=["audio"])
        answer = await ask(client, engine, spoken("one two three"))
        await client.send("output_ack", request_id=answer.final["request_id"], played_ms=1500)
        assert await seen(client, engine) == [("user", "ask"), ("assistant", "one two")]


@pytest.mark.parametrize("named", [True, False])
async def test_an_answer_that_waits_behind_another_was_not_heard(named: bool) -> None:
    engine = HearingEngine()
    async with live_server(engine) as server, native_client(server) as client:
        first = await ask(client, engine, spoken("Let me look that up now"), "Is my train late?")
        second = await ask(client, engine, spoken("It leaves at nine"), "And?")
        name: dict[str, Any] = {"request_id": first.final["request_id"]} if named else {}
        # Without a name it is about the answer that plays, although output of the second was received, too.
        await client.send("output_ack", sequence_id=audio_number(second), played_ms=1000, **name)
        assert await seen(client, engine) == [("user", "Is my train late?"), ("assistant", "Let")]


async def test_of_three_answers_in_a_row_the_first_is_cut() -> None:
    engine = HearingEngine()
    async with live_server(engine) as server, native_client(server) as client:
        first = await ask(client, engine, spoken("Let me look that up now please wait"))
        for _ in range(2):
            await ask(client, engine, [TextOutput("")], "more")
        await client.send("output_ack", sequence_id=audio_number(first), played_ms=1500)
        assert await seen(client, engine) == [("user", "ask"), ("assistant", "Let me")]


async def test_a_report_about_the_second_answer_says_that_the_first_was_heard() -> None:
    engine = HearingEngine()
    async with live_server(engine) as server, native_client(server) as client:
        await ask(client, engine, spoken("one two three"))
        second = await ask(client, engine, spoken("four five six"), "more")
        await client.send("output_ack", request_id=second.final["request_id"], played_ms=1000)
        history = await seen(client, engine)
        assert history == [("user", "ask"), ("assistant", "one two three"), ("user", "more"), ("assistant", "four")]


async def test_a_report_behind_the_cut_says_where_it_was() -> None:
    engine = HearingEngine()
    async with live_server(engine) as server, native_client(server) as client:
        answer = await ask(client, engine, spoken("one two three four"))
        name = answer.final["request_id"]
        await client.send("output_ack", request_id=name, played_ms=900)
        await client.send("cancel")
        await client.send("output_ack", request_id=name, played_ms=1100)
        assert await seen(client, engine) == [("user", "ask"), ("assistant", "one two")]
        await client.send("output_ack", request_id=name, played_ms=3900)  # a request has read the history
        assert (await seen(client, engine))[1] == ("assistant", "one two")


async def test_reports_that_go_back_or_name_nobody_change_nothing() -> None:
    engine = HearingEngine()
    async with live_server(engine) as server, native_client(server) as client:
        answer = await ask(client, engine, spoken("one two three four"))
        name = answer.final["request_id"]
        await client.send("output_ack", request_id=name, played_ms=1900)
        await client.send("output_ack", request_id=name, played_ms=100)
        await client.send("output_ack", request_id="req_nobody", played_ms=3900)
        await client.send("output_ack", sequence_id=audio_number(answer) - 1, played_ms=3900)
        assert await seen(client, engine) == [("user", "ask"), ("assistant", "one two")]


async def test_an_acknowledgement_names_an_output_or_a_request() -> None:
    async with live_server(HearingEngine()) as server, native_client(server) as client:
        await client.send("output_ack", request_id="req_1")
        await client.send("output_ack", played_ms=5)
        assert (await client.error())["param"] == "sequence_id"
        await client.send("output_ack", request_id=7, played_ms=5)
        assert (await client.error())["param"] == "request_id"


@pytest.mark.virtual_clock
async def test_without_word_times_no_more_counts_than_its_sound_can_have_been() -> None:
    """Of a minute of speech 3 s were heard, 7 of 150 words, and 3.4 s were sent: what was sent is no measure."""
    text = " ".join(f"w{number}" for number in range(150))
    script = [TextOutput(text), *[AudioOutput(np.zeros(2400, np.float32), 24_000) for _ in range(600)]]
    engine = HearingEngine(script)
    async with live_server(engine) as server, native_client(server) as client:
        await client.configure(max_lead_ms=400, overlap="interrupt")
        await client.say("tell me a story")
        while (frame := await client.until("output_chunk")).get("start_ms", 0) < 3300:
            pass
        await client.send("output_ack", sequence_id=frame["sequence_id"], played_ms=3000)
        heard = (await seen(client, engine))[-1][1].split()
        assert heard == [f"w{number}" for number in range(len(heard))]
        assert 5 <= len(heard) <= 12


async def test_where_all_of_the_sound_is_there_words_share_it() -> None:
    engine = HearingEngine()
    async with live_server(engine) as server, native_client(server) as client:
        answer = await ask(client, engine, spoken("aaa bbb ccc ddd eee fff ggg hhh iii jjj", timed=False))
        await client.send("output_ack", request_id=answer.final["request_id"], played_ms=3500)
        assert (await seen(client, engine))[-1] == ("assistant", "aaa bbb ccc")


@pytest.mark.parametrize(
    ("text", "first"), [("¿Cómo estás?", "Cómo"), ("**Note** that", "Note"), ("(Laughs) Sure.", "Laughs")]
)
async def test_marks_before_the_first_word_were_not_heard(text: str, first: str) -> None:
    engine = HearingEngine()
    async with live_server(engine) as server, native_client(server) as client:
        words = (Word(first, 80, 400),)
        answer = await ask(client, engine, [TextOutput(text), AudioOutput(np.zeros(RATE, np.float32), RATE, words)])
        await client.send("output_ack", request_id=answer.final["request_id"], played_ms=40)
        assert await seen(client, engine) == []


async def test_an_answer_that_was_cancelled_by_name_leaves_the_one_behind_it() -> None:
    engine = HearingEngine()
    async with live_server(engine) as server, native_client(server) as client:
        first = await ask(client, engine, spoken("one two three"))
        second = await ask(client, engine, spoken("four five six"), "more")
        await client.send("output_ack", request_id=first.final["request_id"], played_ms=1000)
        await client.send("cancel", request_id=first.final["request_id"])
        await client.send("output_ack", request_id=second.final["request_id"], played_ms=2000)
        history = await seen(client, engine)
        assert history == [("user", "ask"), ("assistant", "one"), ("user", "more"), ("assistant", "four five")]


# results of tools


def calling(*names: str) -> list[EngineOutput]:
    return [one for index, name in enumerate(names) for one in tool_call(name, "{}", index=index)]


def tooled(**changes: Any) -> HearingEngine:
    return HearingEngine(tools=True, **changes)


async def test_a_result_without_its_call_is_refused_and_opens_nothing() -> None:
    engine = tooled()
    async with live_server(engine) as server, native_client(server) as client:
        await client.chunk("42", end=True, role="tool", tool_call_id="call_x")
        error = await client.error()
        assert (error["code"], error["param"], error["sequence_id"]) == ("session_conflict", "tool_call_id", 0)
        await ask(client, engine, [TextOutput("ok")])  # its number was used
        assert [message.text for message in engine.requests[-1].history] == []


async def test_a_refused_result_ends_what_is_open() -> None:
    engine = tooled(script=[TextOutput("ok")])
    async with live_server(engine) as server, native_client(server) as client:
        await client.chunk("begin")
        await client.chunk("42", end=True, role="tool", tool_call_id="call_x")
        assert (await client.error())["param"] == "tool_call_id"
        assert (await client.answer()).text == "ok"


async def test_results_end_their_request_when_all_calls_have_theirs() -> None:
    engine = tooled()
    async with live_server(engine) as server, native_client(server) as client:
        await ask(client, engine, calling("a", "b"))
        engine.script = (TextOutput("done"),)
        await client.chunk("1", role="tool", tool_call_id="call_b_1")
        await client.chunk("1 again", role="tool", tool_call_id="call_b_1")  # a duplicate
        await client.chunk("2", role="tool", tool_call_id="call_a_0")
        started = await client.until("response_started")
        assert started["trigger"] == "end_of_input"
        assert (await client.answer()).text == "done"
        await ask(client, engine, [TextOutput("ok")], "next")
        history = [(one.role, one.text, one.tool_call_id) for one in engine.requests[-1].history]
        assert history[2:4] == [("tool", "1", "call_b_1"), ("tool", "2", "call_a_0")]


async def test_what_joins_results_makes_an_ordinary_request() -> None:
    engine = tooled()
    async with live_server(engine) as server, native_client(server) as client:
        await ask(client, engine, calling("a", "b"))
        engine.script = (TextOutput("done"),)
        await client.chunk("1", role="tool", tool_call_id="call_a_0")
        await client.chunk("and hurry")
        assert (await client.until("response_started"))["trigger"] == "min_length"
        await client.chunk("2", role="tool", tool_call_id="call_b_1")
        await client.chunk(end=True)
        assert (await client.answer()).text == "done"


async def test_an_answer_to_results_does_not_interrupt() -> None:
    engine = tooled()
    async with live_server(engine) as server, native_client(server) as client:
        await client.configure(overlap="interrupt")
        answer = await ask(client, engine, [*spoken("one two three"), *calling("a")])
        await client.send("output_ack", request_id=answer.final["request_id"], played_ms=1000)
        engine.script = (TextOutput("done"),)
        await client.chunk("42", end=True, role="tool", tool_call_id="call_a_0")
        assert (await client.answer()).text == "done"
        assert [one.text for one in engine.requests[-1].history] == ["ask", "one two three"]


async def test_a_call_moves_to_before_its_late_result() -> None:
    engine = tooled()
    async with live_server(engine) as server, native_client(server) as client:
        await ask(client, engine, [TextOutput("I will tell you."), *calling("a")], "search")
        await ask(client, engine, [TextOutput("Fine.")], "how are you")
        engine.script = (TextOutput("found"),)
        await client.chunk("Bonn", end=True, role="tool", tool_call_id="call_a_0")
        await client.answer()
        shown = [(one.text, [call.id for call in one.tool_calls]) for one in engine.requests[-1].history]
        assert shown[1::2] == [("I will tell you.", []), ("Fine.", ["call_a_0"])]
        await ask(client, engine, [TextOutput("ok")], "thanks")
        roles = [one.role for one in engine.requests[-1].history]
        assert roles == ["user", "assistant", "user", "assistant", "tool", "assistant"]


async def test_a_result_stays_known_when_the_words_before_its_call_are_silenced() -> None:
    engine = tooled()
    async with live_server(engine) as server, native_client(server) as client:
        answer = await ask(client, engine, [*spoken("one two three"), *calling("a", "b")])
        name = answer.final["request_id"]
        await client.send("output_ack", request_id=name, played_ms=1000)
        for call, following in (("call_a_0", calling("c")), ("call_c_0", [TextOutput("first")])):
            engine.script = tuple(following)
            await client.chunk("1", end=True, role="tool", tool_call_id=call)
            await client.answer()
        await client.send("cancel", request_id=name)
        engine.script = (TextOutput("both"),)
        await client.chunk("1 again", role="tool", tool_call_id="call_a_0")  # a duplicate
        await client.chunk("2", role="tool", tool_call_id="call_b_1")  # the last of both
        assert (await client.answer()).text == "both"
        assert [chunk.payload for chunk in engine.inputs[-1]] == [b"2"]


async def test_a_truncated_call_takes_no_result() -> None:
    engine = tooled()
    async with live_server(engine) as server, native_client(server) as client:
        answer = await ask(client, engine, calling("a"))
        await client.send("history_truncate", request_id=answer.final["request_id"])
        await client.until("history_truncated")
        await client.chunk("42", end=True, role="tool", tool_call_id="call_a_0")
        assert (await client.error())["code"] == "session_conflict"

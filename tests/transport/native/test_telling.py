"""Tools that work while the talk goes on: their results are told at the next pause, and once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from support.inline_workers import InlineWorkers, loud, quiet
from support.live_server import LiveServer, live_server
from support.native_client import Answer, NativeClient, native_client
from support.scripted_engines import ActingEngine
from support.scripted_upstream import delta, finish, remote_llm, says, streams, upstream

from omni_ws.core.chunks import FinishReason, Modality, OutputModality, Task, ToolCallFragment, Usage
from omni_ws.engine.base import AudioOutput, Finished, GenerationRequest, OutputWriter, TextOutput, ToolCallOutput
from omni_ws.errors import EngineFailed, EngineOverloaded
from omni_ws.service.conversation.conversation import Conversation
from omni_ws.service.conversation.unasked import (
    FACT,
    MAX_TELLING_BYTES,
    MAX_TELLINGS,
    MAX_TRIES,
    PAUSE_SEC,
    RETRY_SEC,
    WORKING,
    Telling,
    phrases,
)

pytestmark = pytest.mark.virtual_clock

RATE = 24_000
WORD_SEC = 0.5
JUST = 0.1
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
LATER = [{**TOOL, "async": True}]
TURNS: dict[str, Any] = {"turn_detection": {"type": "server_vad"}}


class Talker(ActingEngine):
    """Calls the tool for a question with "find" in it, says what it is given to tell, and echoes the rest, by voice.

    ``words`` are said before a call; ``fails`` requests of what is to be told fail.
    """

    def __init__(self, words: str = "Let me look", *, fails: int = 0) -> None:
        super().__init__(
            "talker",
            input_modalities=frozenset({Modality.TEXT, Modality.AUDIO}),
            output_modalities=frozenset({OutputModality.TEXT, OutputModality.AUDIO}),
            tasks=frozenset({Task.CHAT, Task.SPEECH}),
            languages=frozenset({"en"}),
            speech_languages=frozenset({"en"}),
            voices=("someone",),
            voice_languages={"someone": "en"},
            tools=True,
        )
        self.words, self.fails, self.tool = words, fails, "find"
        self.asked: list[str] = []
        #: Set while it may begin to speak of what it is given to tell.
        self.may_tell = asyncio.Event()
        self.may_tell.set()
        #: Set while an answer may end behind its calls.
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def act(self, request: GenerationRequest, out: OutputWriter) -> None:
        text = "".join([one.payload.decode() async for one in request.input if one.modality is Modality.TEXT])
        self.asked.append(text)
        news = text.startswith("[This is not from the user")
        if "find" in text and request.task is Task.CHAT and not news:
            await self.say(self.words, out)
            for number in range(text.count("find")):
                call_id = f"call_{len(self.asked)}_{number}"
                out.write(ToolCallOutput(ToolCallFragment(number, id=call_id, name=self.tool, arguments="{}")))
            await self.may_end.wait()
            out.write(Finished(FinishReason.TOOL_CALLS, Usage()))
            return
        if news:
            await self.may_tell.wait()
            if self.fails:
                self.fails -= 1
                raise EngineFailed("no model today")
        await self.say(text.rpartition("]\n")[2] or "you spoke", out)
        out.write(Finished(FinishReason.STOP, Usage()))

    async def say(self, text: str, out: OutputWriter) -> None:
        if text:
            out.write(TextOutput(text))
        for _ in text.split():
            out.write(AudioOutput(np.full(int(RATE * WORD_SEC), 0.1, dtype=np.float32), RATE))
            await out.drain()

    @property
    def told(self) -> list[str]:
        """What it was given to tell, in order."""
        return [text.rpartition("]\n")[2] for text in self.asked if text.startswith("[This is not")]


@dataclass
class Talk:
    """A client in a talk, and the conversation behind it."""

    client: NativeClient
    server: LiveServer

    @property
    def conversation(self) -> Conversation:
        (living,) = self.server.native._live._living.values()
        return living.session.conversation

    async def ask(self, text: str = "find it") -> list[str]:
        """Ask something that calls tools; returns the ids of the calls."""
        await self.client.say(text)
        answer = await self.client.answer()
        assert answer.reason == "tool_calls"
        return [chunk["id"] for chunk in answer.chunks if chunk["modality"] == "tool_call"]

    async def result(self, call: str, text: str = "found") -> None:
        await self.client.chunk(text, role="tool", tool_call_id=call)

    async def telling(self) -> tuple[float, Answer]:
        """What is told next, and when."""
        started = await self.client.until("response_started")
        assert (started["trigger"], started["sequence_id"]) == ("telling", None)
        at, before = now(), len(self.client.frames) - 1
        while not self.client.frames[-1].get("final"):
            await self.client.receive()
        return at, Answer(self.client.frames[before:])

    async def silent_for(self, seconds: float) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.client.until("response_started")


def now() -> float:
    return asyncio.get_running_loop().time()


def seconds_of(text: str) -> float:
    return len(text.split()) * WORD_SEC


@asynccontextmanager
async def talk(engine: Any = None, *, tools: Any = LATER, **fields: Any) -> AsyncIterator[Talk]:
    async with live_server(engine or Talker()) as server:
        server.app.sessions.speech_workers = InlineWorkers()
        async with native_client(server) as client:
            await client.configure(max_lead_ms=400, tools=tools, **fields)
            yield Talk(client, server)


async def test_two_questions_are_answered_while_a_tool_works_for_twenty_seconds() -> None:
    engine = Talker()
    async with talk(engine) as one:
        (call,) = await one.ask()
        begin = now()
        for question in ("how are you", "and the weather"):
            await asyncio.sleep(5)
            await one.client.say(question)
            assert (await one.client.answer()).text == question
        await asyncio.sleep(begin + 20 - now())
        await one.result(call, "it is in Lisbon")
        at, answer = await one.telling()
        assert answer.text == "it is in Lisbon"
        assert at - begin == pytest.approx(20, abs=JUST)
        await one.silent_for(60)
    assert engine.told == ["it is in Lisbon"]
    history = engine.requests[-1].history
    assert [message.role for message in history] == ["user", "assistant", "tool", *["user", "assistant"] * 2]
    assert history[2].text == WORKING
    assert "find({})" in engine.asked[-1]


async def test_the_result_until_then_is_no_request_that_a_truncation_counts() -> None:
    async with talk() as one:
        await one.client.say("find it")
        request_id = (await one.client.answer()).final["request_id"]
        await one.client.say("how are you")
        await one.client.answer()
        await one.client.send("history_truncate", request_id=request_id)
        assert (await one.client.until("history_truncated"))["dropped_requests"] == 2


async def test_what_the_model_sees_of_a_tool_has_no_field_of_the_session() -> None:
    engine = Talker()
    async with talk(engine) as one:
        await one.client.say("hello")
        await one.client.answer()
        assert engine.requests[0].tools == (TOOL,)
        assert one.client.seen("session_updated")[-1]["tools"] == LATER


async def test_a_silent_call_has_one_sentence_of_the_server_and_no_more() -> None:
    async with talk(Talker(words="")) as one:
        await one.ask()
        started = await one.client.until("response_started")
        assert started["trigger"] == "filler"
        assert (await one.client.answer()).text in phrases()["en"].filler
        await one.silent_for(60)


async def test_a_call_of_an_async_tool_does_not_end_the_sentences_about_another_tool() -> None:
    look = {**TOOL, "function": {**TOOL["function"], "name": "look"}}
    engine = Talker(words="")
    async with talk(engine, tools=[look, *LATER]) as one:
        engine.tool = "look"
        await one.ask()
        engine.tool = "find"
        await one.ask()
        for _ in range(3):
            assert (await one.client.until("response_started"))["trigger"] == "filler"
            await one.client.answer()


async def test_after_words_of_the_model_nothing_fills_the_silence() -> None:
    async with talk() as one:
        await one.ask()
        await one.silent_for(60)


async def test_a_question_meanwhile_takes_the_place_of_that_sentence() -> None:
    async with talk(Talker(words="")) as one:
        await one.ask()
        await one.client.say("hello")
        await one.client.answer()
        await one.silent_for(60)


async def test_a_result_waits_until_an_answer_was_heard() -> None:
    async with talk() as one:
        (call,) = await one.ask()
        await asyncio.sleep(5)
        await one.client.say("a b c d")
        await one.client.until("response_started")
        begin = now()
        await one.result(call)
        assert (await one.client.answer()).text == "a b c d"
        at, _ = await one.telling()
        assert at - begin == pytest.approx(seconds_of("a b c d") + PAUSE_SEC, abs=JUST)


async def test_a_result_that_comes_while_the_user_speaks_waits() -> None:
    async with talk(**TURNS) as one:
        (call,) = await one.ask()
        await one.client.binary(loud(400))
        await one.client.until("speech_started")
        await one.result(call)
        await one.silent_for(10)
        await one.client.binary(quiet(2000))
        assert (await one.client.answer()).text == "you spoke"
        assert (await one.telling())[1].text == "found"


@pytest.mark.parametrize("named", [True, False])
async def test_a_result_waits_no_longer_than_what_a_cancel_has_silenced(named: bool) -> None:
    async with talk() as one:
        (call,) = await one.ask()
        await one.client.configure(max_lead_ms=None)
        await one.client.say("word " * 60)
        request_id = (await one.client.answer()).final["request_id"]  # which sounds for half a minute
        await asyncio.sleep(2)
        await one.client.send("cancel", **({"request_id": request_id} if named else {}))
        await one.client.barrier()
        begin = now()
        await one.result(call)
        at, _ = await one.telling()
        assert at - begin == pytest.approx(PAUSE_SEC, abs=JUST)


async def test_interrupted_before_anything_was_heard_it_is_told_again() -> None:
    engine = Talker()
    async with talk(engine, **TURNS) as one:
        (call,) = await one.ask()
        engine.may_tell.clear()
        await one.result(call)
        await one.client.until("response_started")
        await one.client.binary(loud(400))
        await one.client.binary(quiet(2000))
        interrupted = await one.client.answer()
        assert (interrupted.reason, interrupted.text) == ("cancelled", "")
        engine.may_tell.set()
        assert (await one.client.answer()).text == "you spoke"
        assert (await one.telling())[1].text == "found"
        await one.client.say("thanks")
        await one.client.answer()
        await one.silent_for(30)
    # The first attempt has left nothing that the model could tell again.
    assert sum("found" in message.text for message in engine.requests[-1].history) == 2
    assert engine.told == ["found", "found"]


async def test_whole_but_cut_before_anything_was_heard_it_is_told_again() -> None:
    async with talk(**TURNS) as one:
        (call,) = await one.ask()
        asked = one.client.frames[-1]["request_id"]
        await one.client.send("output_ack", request_id=asked, played_ms=1000 * seconds_of("Let me look"))
        await one.client.configure(max_lead_ms=10_000)
        await one.result(call)
        _, told = await one.telling()
        assert (told.reason, told.text) == ("stop", "found")
        await one.client.binary(loud(400))
        await one.client.binary(quiet(2000))
        assert (await one.client.answer()).text == "you spoke"
        assert (await one.telling())[1].text == "found"


async def test_it_does_not_begin_while_the_user_speaks_even_if_speech_interrupts_nothing() -> None:
    engine = Talker()
    async with talk(engine, turn_detection={"type": "server_vad", "interrupt_response": False}) as one:
        (call,) = await one.ask()
        engine.may_tell.clear()
        await one.result(call)
        await one.client.until("response_started")
        await one.client.binary(loud(400))
        async with asyncio.timeout(5):
            assert (await one.client.answer()).reason == "cancelled"
        engine.may_tell.set()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await one.client.until("output_chunk")
        await one.client.binary(quiet(2000))
        assert (await one.client.answer()).text == "you spoke"
        assert (await one.telling())[1].text == "found"


async def test_interrupted_after_something_was_heard_it_is_told() -> None:
    engine = Talker()
    async with talk(engine, **TURNS) as one:
        (call,) = await one.ask()
        await one.result(call, "a b c d e f g h")
        await one.client.until("response_started")
        await asyncio.sleep(2 * WORD_SEC)
        await one.client.binary(loud(400))
        await one.client.binary(quiet(2000))
        assert (await one.client.answer()).reason == "cancelled"
        await one.client.answer()
        await one.silent_for(30)
    assert engine.told == ["a b c d e f g h"]


async def test_a_client_that_cancels_it_has_it_after_the_next_turn() -> None:
    engine = Talker()
    async with talk(engine) as one:
        (call,) = await one.ask()
        engine.may_tell.clear()
        await one.result(call)
        started = await one.client.until("response_started")
        await one.client.send("cancel", request_id=started["request_id"])
        assert (await one.client.answer()).reason == "cancelled"
        engine.may_tell.set()
        await one.silent_for(30)
        await one.client.say("go on")
        assert (await one.client.answer()).text == "go on"
        assert (await one.telling())[1].text == "found"


async def test_the_result_of_a_cancelled_request_is_not_told() -> None:
    engine = Talker()
    async with talk(engine) as one:
        await one.client.say("find it")
        while (await one.client.receive()).get("modality") != "tool_call":
            pass
        request_id, call = one.client.seen("response_started")[-1]["request_id"], one.client.frames[-1]["id"]
        await one.client.answer()
        await asyncio.sleep(5)
        await one.client.send("cancel", request_id=request_id)
        await one.result(call)
        await one.silent_for(30)
    assert engine.told == []


async def test_a_result_that_waits_is_withdrawn_with_its_request() -> None:
    engine = Talker()
    async with talk(engine) as one:
        (call,) = await one.ask()
        request_id = one.client.seen("response_started")[-1]["request_id"]
        await asyncio.sleep(5)
        await one.client.say("a b c d")
        await one.client.until("response_started")
        await one.result(call)
        await one.client.send("cancel", request_id=request_id)
        await one.client.answer()
        await one.silent_for(30)
    assert engine.told == []


async def test_an_application_learns_that_a_result_will_not_be_told() -> None:
    engine, dropped = Talker(), list[str]()
    async with talk(engine) as one:
        (call,) = await one.ask()
        request_id = one.client.seen("response_started")[-1]["request_id"]
        await asyncio.sleep(5)
        await one.client.say("a b c d")
        await one.client.until("response_started")
        one.conversation.tell(Telling("found", about=call, dropped=lambda: dropped.append("waiting")))
        assert not dropped
        await one.client.send("cancel", request_id=request_id)
        await one.client.answer()
        one.conversation.tell(Telling("found", about=call, dropped=lambda: dropped.append("late")))
        assert dropped == ["waiting", "late"]
        await one.silent_for(30)
    assert engine.told == []


async def test_two_at_once_are_told_one_after_the_other() -> None:
    engine = Talker()
    async with talk(engine) as one:
        first, second = await one.ask("find a and find b")
        await one.result(second, "b is red")
        await one.result(first, "a is blue")
        (began, answer), (at, other) = await one.telling(), await one.telling()
        assert (answer.text, other.text) == ("b is red", "a is blue")
        assert at - began == pytest.approx(seconds_of("b is red") + PAUSE_SEC, abs=JUST)
        await one.silent_for(30)


async def test_beside_a_tool_that_is_waited_for() -> None:
    engine = Talker()
    other = {"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}}
    async with talk(engine, tools=[*LATER, other]) as one:
        (call,) = await one.ask()
        await one.result(call)
        await one.result(call, "again")  # a second result of a call counts for nothing
        await one.telling()
        await one.silent_for(30)
    assert engine.told == ["found"]


async def test_a_result_before_the_end_of_the_answer_is_told_after_it() -> None:
    engine = Talker(words="a b c d e f")
    engine.may_end.clear()
    async with talk(engine) as one:
        await one.client.say("find it")
        await one.client.until("response_started")
        while (frame := await one.client.receive()).get("modality") != "tool_call":
            pass
        await one.result(frame["id"])
        await one.client.barrier()
        engine.may_end.set()
        assert (await one.client.answer()).reason == "tool_calls"
        assert (await one.telling())[1].text == "found"
        await one.result(frame["id"], "again")
        await one.silent_for(30)


async def test_a_failure_is_tried_again_and_then_left_to_the_next_answer() -> None:
    engine = Talker(fails=MAX_TRIES)
    async with talk(engine) as one:
        (call,) = await one.ask()
        await one.result(call)
        times = []
        for _ in range(MAX_TRIES):
            at, answer = await one.telling()
            assert answer.reason == "error"
            times.append(at)
        assert np.diff(times) == pytest.approx([RETRY_SEC] * (MAX_TRIES - 1), abs=JUST)
        await one.silent_for(30)
        await one.client.say("and")
        await one.client.answer()
    assert engine.asked[-1].endswith("found and")


async def test_one_that_is_never_admitted_is_left_to_the_next_answer_and_has_entered() -> None:
    def refuse() -> None:
        raise EngineOverloaded("not now", retry_after_ms=1000)

    engine, entered = Talker(), list[float]()
    async with talk(engine) as one:
        admits, one.conversation.admit = one.conversation.admit, refuse
        one.conversation.tell(Telling("found", entered=lambda: entered.append(now())))
        await asyncio.sleep(MAX_TRIES * RETRY_SEC)
        assert len(entered) == 1
        one.conversation.admit = admits
        await one.client.say("and")
        while not (engine.asked and engine.asked[-1].endswith("found and")):
            await one.client.receive()


async def test_a_result_that_is_no_text_is_refused_and_may_be_sent_again() -> None:
    async with talk() as one:
        (call,) = await one.ask()
        await one.client.chunk(b"\xff", modality="text", role="tool", tool_call_id=call)
        assert (await one.client.until("error"))["error"]["code"] == "invalid_value"
        await one.result(call)
        assert (await one.telling())[1].text == "found"


# what the server's own code has told


async def test_an_application_has_something_told() -> None:
    engine = Talker()
    async with talk(engine) as one:
        seen: list[str] = []
        one.conversation.tell(Telling("tea is ready", entered=lambda: seen.append("entered"), told=seen.append))
        _, answer = await one.telling()
        assert answer.text == "tea is ready"
        await one.silent_for(5)
        assert seen == ["entered", answer.final["request_id"]]


async def test_a_fact_and_a_rule_are_known_and_not_told() -> None:
    engine = Talker()
    async with talk(engine, instructions="Be kind.") as one:
        one.conversation.note("It rains.", "user")
        one.conversation.note("Be brief.", "system")
        await one.silent_for(5)
        await one.client.say("hello")
        await one.client.answer()
        assert engine.asked[-1] == f"{FACT}It rains. hello"
        assert "Be kind.\n\nBe brief." in engine.requests[-1].instructions


async def test_so_many_wait_and_no_more() -> None:
    async with talk() as one:
        await one.client.chunk("I am still writing")
        await one.client.until("input_ack")
        for _ in range(MAX_TELLINGS):
            one.conversation.tell(Telling("x"))
        with pytest.raises(EngineOverloaded):
            one.conversation.tell(Telling("x"))


@pytest.mark.parametrize("beyond", [0, 1])
async def test_so_much_waits_and_no_more(beyond: int) -> None:
    async with talk() as one:
        await one.client.chunk("I am still writing")
        await one.client.until("input_ack")
        before = one.conversation.account.used
        text = "x" * (MAX_TELLING_BYTES - Telling("").size + beyond)
        if beyond:
            with pytest.raises(EngineOverloaded):
                one.conversation.tell(Telling(text))
        else:
            one.conversation.tell(Telling(text))
        assert one.conversation.account.used - before == (0 if beyond else MAX_TELLING_BYTES)


async def test_a_model_by_url_gets_the_placeholder_and_then_the_result() -> None:
    function = {"name": "find", "arguments": '{"what": "parcel"}'}
    call = delta(tool_calls=[{"index": 0, "id": "call_1", "function": function}])
    script = [streams(delta(content="One moment."), call, finish("tool_calls")), says("Sunny."), says("In Lisbon.")]
    async with upstream(*script) as llm, remote_llm(llm) as engine, talk(engine, modalities=["text"]) as one:
        assert await one.ask("where is my parcel") == ["call_1"]
        await one.client.say("and the weather")
        assert (await one.client.answer()).text == "Sunny."
        await one.result("call_1", '{"city": "Lisbon"}')
        assert (await one.telling())[1].text == "In Lisbon."
    assert llm.requests[0]["tools"] == [TOOL]
    assert llm.requests[1]["messages"][-2] == {"role": "tool", "content": WORKING, "tool_call_id": "call_1"}
    last = llm.requests[2]["messages"][-1]
    assert last["role"] == "user"
    assert last["content"].endswith(']\n{"city": "Lisbon"}')
    assert 'find({"what": "parcel"})' in last["content"]


async def test_the_answer_to_a_result_has_the_name_that_the_client_gave_it() -> None:
    async with talk() as one:
        (call,) = await one.ask()
        await one.client.chunk("found", role="tool", tool_call_id=call, ref="mine", end_of_input=True)
        _, answer = await one.telling()
        assert answer.started is not None
        assert (answer.started["ref"], answer.final["ref"]) == ("mine", "mine")


async def test_a_result_ends_no_input_that_is_open() -> None:
    async with talk(start_policy="on_end_only") as one:
        (call,) = await one.ask()
        await one.client.chunk("how ")
        await one.client.chunk("found", role="tool", tool_call_id=call, end_of_input=True)
        await one.silent_for(5)
        await one.client.say("are you")
        assert (await one.client.answer()).text == "how are you"
        assert (await one.telling())[1].text == "found"


async def test_a_call_whose_answer_was_interrupted_still_brings_its_result() -> None:
    class Interrupted(Talker):
        async def act(self, request: GenerationRequest, out: OutputWriter) -> None:
            if self.asked:
                await super().act(request, out)
                return
            self.asked.append("".join([chunk.payload.decode() async for chunk in request.input]))
            out.write(TextOutput("I look"))
            out.write(ToolCallOutput(ToolCallFragment(0, id="call_1", name="find", arguments="{}")))
            await asyncio.Event().wait()

    engine = Interrupted()
    async with talk(engine, overlap="interrupt", modalities=["text"]) as one:
        await one.client.say("find it")
        while (await one.client.receive()).get("modality") != "tool_call":
            pass
        await one.client.say("hello")
        assert (await one.client.answer()).reason == "cancelled"
        assert (await one.client.answer()).text == "hello"
        assert engine.requests[-1].history[-1].text == WORKING
        await one.result("call_1")
        assert (await one.telling())[1].text == "found"

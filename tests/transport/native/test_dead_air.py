"""No silence while a tool works, results at the right time, and the question whether anybody is still there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from support.inline_workers import InlineWorkers, loud, quiet
from support.live_server import live_server
from support.moving_session import MovingClient, sessions_of
from support.native_client import Answer, NativeClient, native_client
from support.patience import until
from support.raw_http import raw_client, request
from support.scripted_engines import ActingEngine

from omni_ws.core.chunks import (
    FinishReason,
    InputChunk,
    Modality,
    OutputModality,
    StartTrigger,
    Task,
    ToolCallFragment,
    Usage,
)
from omni_ws.core.history import Message
from omni_ws.engine.base import AudioOutput, Finished, GenerationRequest, OutputWriter, TextOutput, ToolCallOutput
from omni_ws.errors import ShuttingDown
from omni_ws.service.conversation.output_log import ServerMessage
from omni_ws.service.conversation.unasked import (
    FIRST_FILLER_SEC,
    MOST_FILLERS,
    NEXT_FILLER_SEC,
    phrases,
)
from omni_ws.wire.server_frames import ResponseStartedFrame

pytestmark = pytest.mark.virtual_clock

RATE = 24_000
#: Of a word that is spoken.
WORD_SEC = 0.5
#: Timers are armed a few passes of the loop later.
JUST = 0.1
TURNS: dict[str, Any] = {"turn_detection": {"type": "server_vad"}}
ENGLISH, SPANISH = phrases()["en"], phrases()["es"]


class Worker(ActingEngine):
    """Calls ``calls`` tools for every question with "find" in it, and tells results and echoes the rest, by voice.

    ``words`` are said before the calls.
    """

    def __init__(self, *, calls: int = 1, words: str = "", **changes: Any) -> None:
        able: dict[str, Any] = {
            "input_modalities": frozenset({Modality.TEXT, Modality.AUDIO}),
            "output_modalities": frozenset({OutputModality.TEXT, OutputModality.AUDIO}),
            "tasks": frozenset({Task.CHAT, Task.SPEECH}),
            "languages": frozenset({"en", "es", "fi"}),
            "speech_languages": frozenset({"en", "es"}),
            "voices": ("someone",),
            "voice_languages": {"someone": "en"},
            "tools": True,
        }
        super().__init__("worker", **{**able, **changes})
        self.calls, self.words = calls, words
        self.speaks = asyncio.Event()

    async def act(self, request: GenerationRequest, out: OutputWriter) -> None:
        taken = [chunk async for chunk in request.input]
        text = b" and ".join(chunk.payload for chunk in taken if chunk.modality is Modality.TEXT).decode()
        if "find" in text and request.task is Task.CHAT:
            if self.words:
                await self.say(self.words, request, out)
            for number in range(self.calls):
                call_id = f"call_{len(self.requests)}_{number}"
                out.write(ToolCallOutput(ToolCallFragment(number, id=call_id, name="find", arguments="{}")))
            out.write(Finished(FinishReason.TOOL_CALLS, Usage()))
            return
        await self.say(text or "you spoke", request, out)
        out.write(Finished(FinishReason.STOP, Usage()))

    async def say(self, text: str, request: GenerationRequest, out: OutputWriter) -> None:
        if request.task is Task.CHAT:
            out.write(TextOutput(text))
        for _ in text.split():
            if OutputModality.AUDIO in request.modalities:
                out.write(AudioOutput(np.full(int(RATE * WORD_SEC), 0.1, dtype=np.float32), RATE))
                await out.drain()


def now() -> float:
    return asyncio.get_running_loop().time()


def seconds_of(text: str) -> float:
    return len(text.split()) * WORD_SEC


@asynccontextmanager
async def conversation(
    engine: Worker, *, llm: dict[str, Any] | None = None, **fields: Any
) -> AsyncIterator[NativeClient]:
    options: dict[str, Any] = {} if llm is None else {"llm": llm}
    async with live_server(engine, **options) as server:
        server.app.sessions.speech_workers = InlineWorkers()
        async with native_client(server) as client:
            await client.configure(max_lead_ms=400, **fields)
            yield client


async def ask(client: NativeClient) -> list[str]:
    """Ask something that calls tools; returns the ids of the calls."""
    await client.say("find it")
    answer = await client.answer()
    assert answer.reason == "tool_calls"
    return [chunk["id"] for chunk in answer.chunks if chunk["modality"] == "tool_call"]


async def tell(client: NativeClient, call: str, text: str = "found") -> None:
    await client.chunk(text, role="tool", tool_call_id=call)


async def silent_for(client: NativeClient, seconds: float) -> None:
    """Nothing is said for so long."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(seconds):
            await client.until("response_started")


async def remark(client: NativeClient, *, why: str = "filler") -> tuple[float, Answer]:
    """The next thing that is said, and when; it is said unasked."""
    started = await client.until("response_started")
    assert (started["trigger"], started["sequence_id"], started["input_mode"]) == (why, None, "snapshot")
    at, before = now(), len(client.frames) - 1
    while not client.frames[-1].get("final"):
        await client.receive()
    answer = Answer(client.frames[before:])
    assert answer.final["request_id"] == started["request_id"]
    return at, answer


# while a tool works


async def test_a_tool_of_half_a_minute_is_never_silent_for_long() -> None:
    engine = Worker()
    async with conversation(engine) as client:
        (call,) = await ask(client)
        quiet_from, begin, said, silences = now(), now(), [], []
        while quiet_from + NEXT_FILLER_SEC < begin + 30:
            at, answer = await remark(client)
            assert answer.reason == "stop"
            assert len(answer.audio) == int(seconds_of(answer.text) * RATE) * 2
            silences.append(at - quiet_from)
            quiet_from = at + seconds_of(answer.text)
            said.append(answer.text)
        await tell(client, call)
        assert (await client.answer()).text == "found"
    assert silences[0] == pytest.approx(FIRST_FILLER_SEC, abs=JUST)
    assert silences[1:] == pytest.approx([NEXT_FILLER_SEC] * (len(silences) - 1), abs=JUST)
    assert said[0] in ENGLISH.filler
    assert len(said) == len(set(said)) == 3
    assert set(said[1:]) <= set(ENGLISH.again)


async def test_what_is_said_meanwhile_never_reaches_the_model() -> None:
    engine = Worker()
    async with conversation(engine) as client:
        (call,) = await ask(client)
        await remark(client)
        await tell(client, call)
        await client.answer()
        await client.say("thanks")
        await client.answer()
        roles = [message.role for message in engine.requests[-1].history]
        assert roles == ["user", "assistant", "tool", "assistant"]
        texts = [message.text for message in engine.requests[-1].history]
        assert texts == ["find it", "", "found", "found"]


async def test_a_quick_tool_needs_nothing_said() -> None:
    async with conversation(Worker()) as client:
        (call,) = await ask(client)
        await asyncio.sleep(FIRST_FILLER_SEC - 2 * JUST)
        await tell(client, call)
        started = await client.until("response_started")
        assert started["trigger"] == "end_of_input"
        await silent_for(client, 30)


async def test_words_of_the_model_take_the_place_of_the_first_sentence() -> None:
    async with conversation(Worker(words="Let me look")) as client:
        begin = now()
        await ask(client)
        at, answer = await remark(client)
        assert at - begin == pytest.approx(seconds_of("Let me look") + NEXT_FILLER_SEC, abs=JUST)
        assert answer.text in ENGLISH.filler


async def test_a_result_waits_for_the_end_of_the_sentence() -> None:
    async with conversation(Worker()) as client:
        (call,) = await ask(client)
        await client.until("response_started")
        await tell(client, call)
        answers = [await client.answer(), await client.answer()]
        assert [answer.reason for answer in answers] == ["stop", "stop"]
        assert answers[1].text == "found"
        await silent_for(client, 30)


async def test_between_two_results_the_silence_is_filled() -> None:
    async with conversation(Worker(calls=2)) as client:
        first, second = await ask(client)
        await tell(client, first, "one")
        assert (await remark(client))[1].text in ENGLISH.filler
        assert (await remark(client))[1].text in ENGLISH.again
        await tell(client, second, "two")
        assert (await client.answer()).text == "one and two"


async def test_a_result_that_never_comes_is_waited_for_no_longer_than_a_minute() -> None:
    async with conversation(Worker()) as client:
        await ask(client)
        for _ in range(MOST_FILLERS):
            await remark(client)
        await silent_for(client, 60)
        await ask(client)  # the next tool counts anew
        await remark(client)


@pytest.mark.parametrize(
    ("llm", "fields", "heard"),
    [
        (None, {"tool_filler": False}, None),
        (None, {"modalities": ["text"]}, None),
        ({"tool_filler": ""}, {}, None),
        (None, {"input_audio": {"language": "fi"}}, None),
        (None, {"input_audio": {"language": "es"}}, SPANISH.filler),
        ({"tool_filler": "Hang on."}, {}, ["Hang on."]),
        ({"tool_filler": "Hetki vain."}, {"input_audio": {"language": "fi"}}, ["Hetki vain."]),
    ],
)
async def test_who_says_what(llm: dict[str, Any] | None, fields: dict[str, Any], heard: list[str] | None) -> None:
    engine = Worker()
    async with conversation(engine, llm=llm, **fields) as client:
        await ask(client)
        if heard is None:
            await silent_for(client, 30)
            return
        assert (await remark(client))[1].text in heard
        language = fields.get("input_audio", {}).get("language", "en")
        own = heard is not None and llm is not None
        assert engine.requests[-1].speech_language == (None if own else language)
        again = {"en": ENGLISH.again, "es": SPANISH.again, "fi": heard}[language]
        assert (await remark(client))[1].text in again


async def test_an_engine_that_does_not_read_aloud_says_nothing() -> None:
    async with conversation(Worker(tasks=frozenset({Task.CHAT}))) as client:
        await ask(client)
        await silent_for(client, 30)


async def test_a_cancel_of_the_sentence_stops_it_and_all_later_ones() -> None:
    async with conversation(Worker()) as client:
        (call,) = await ask(client)
        await client.until("response_started")
        await client.send("cancel")
        assert (await client.answer()).reason == "cancelled"
        await silent_for(client, 30)
        await tell(client, call)
        assert (await client.answer()).text == "found"


async def test_a_cancel_of_the_sentence_at_another_server_stops_all_later_ones_too() -> None:
    engine = Worker()
    await engine.start()
    client = MovingClient(lambda received: len(fillers(received)) == 1)
    sessions = sessions_of(engine)
    session = sessions.open(None)
    token = session.new_token()
    assert token is not None
    client.come(sessions, session)
    session.attach(client)
    tool = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
    session.conversation.configure({"max_lead_ms": 400, "tools": [tool]})
    session.conversation.receive_chunk(InputChunk(Modality.TEXT, b"find it", 0, end_of_input=True), now=now())
    data = await client.data
    sessions.end_all(ShuttingDown("the server is shutting down"))
    await sessions.wait_closed()
    sessions = sessions_of(engine)
    sessions.restore(data, None)
    session = sessions.claim(session.session_id, token, None)
    client.come(sessions, session)
    session.resume(client, client.last_output)
    client.output_ready()
    session.conversation.cancel()
    await asyncio.sleep(60)
    assert len(fillers(client.received)) == 1
    sessions.end_all(ShuttingDown("the server is shutting down"))
    await sessions.wait_closed()


def fillers(received: list[ServerMessage]) -> list[ServerMessage]:
    return [one for one in received if isinstance(one, ResponseStartedFrame) and one.trigger is StartTrigger.FILLER]


async def test_speech_interrupts_the_sentence_and_is_answered_and_the_tool_still_works() -> None:
    engine = Worker()
    async with conversation(engine, **TURNS) as client:
        (call,) = await ask(client)
        await client.until("response_started")
        await client.chunk(loud(400))
        assert (await client.answer()).reason == "cancelled"
        await client.chunk(quiet(700))
        assert (await client.answer()).text == "you spoke"
        answered = now()
        at, _ = await remark(client)
        assert at - answered == pytest.approx(NEXT_FILLER_SEC + seconds_of("you spoke"), abs=0.5)
        await tell(client, call)
        assert (await client.answer()).text == "found"


async def test_the_model_sees_nothing_of_a_sentence_that_speech_may_interrupt() -> None:
    engine = Worker()
    turns: dict[str, Any] = {"turn_detection": {"type": "server_vad", "duck": True}, "start_policy": "on_first_chunk"}
    async with conversation(engine, **turns) as client:
        await ask(client)
        await client.until("response_started")
        await client.chunk(loud(320))
        await client.until("speech_started")
        await until(lambda: len(engine.requests) == 3)  # it listens
        await client.chunk(loud(700))
        await client.chunk(quiet(700))
        assert (await client.answer()).reason == "cancelled"
        assert (await client.answer()).text == "you spoke"
    assert [(one.role, one.text) for one in engine.requests[-1].history] == [("user", "find it"), ("assistant", "")]


# results that come late


async def test_a_result_is_told_behind_the_answer_that_the_user_asked_for_meanwhile() -> None:
    """It waits behind an answer that speech interrupts, and is neither lost nor told twice."""
    engine = Worker()
    async with conversation(engine, **TURNS) as client:
        (call,) = await ask(client)
        await client.say("tell me a long story about the sea")
        await client.until("response_started")
        await tell(client, call)
        await client.barrier()
        await client.chunk(loud(400))
        assert (await client.answer()).reason == "cancelled"  # the story
        await client.chunk(quiet(700))
        assert (await client.answer()).text == "you spoke"
        told = await client.answer()
        assert (told.text, told.reason) == ("found", "stop")
        await silent_for(client, 30)
        results = [message for message in engine.requests[-1].history if message.role == "tool"]
        assert results == []  # it is the input of this request
        await client.say("thanks")
        await client.answer()
        assert Message("tool", "found", tool_call_id=call) in engine.requests[-1].history


async def test_the_result_of_a_cancelled_request_is_not_told() -> None:
    engine = Worker()
    async with conversation(engine) as client:
        (call,) = await ask(client)
        await client.send("cancel", request_id=client.frames[-1]["request_id"])
        await silent_for(client, 30)
        await tell(client, call)
        await client.say("thanks")  # its number follows that of the result
        assert (await client.answer()).text == "thanks"
        await silent_for(client, 30)


async def test_who_silences_the_words_before_a_call_still_gets_its_result() -> None:
    async with conversation(Worker(words="Let me look into that for you now")) as client:
        (call,) = await ask(client)
        await client.send("cancel", request_id=client.frames[-1]["request_id"])
        await client.barrier()
        await tell(client, call)
        assert (await client.answer()).text == "found"


# whether anybody is still there


async def test_after_a_long_silence_it_asks_once_and_then_ends_the_session() -> None:
    engine = Worker()
    async with conversation(engine, idle_prompt={"after_sec": 20, "closes_after_sec": 10}) as client:
        begin = now()
        at, answer = await remark(client, why="idle")
        assert at - begin == pytest.approx(20, abs=JUST)
        assert answer.text == ENGLISH.idle
        closing = await client.until("session_closing")
        assert (closing["reason"], closing["retryable"]) == ("session_timeout", False)
        assert now() - at == pytest.approx(10 + seconds_of(ENGLISH.idle), abs=JUST)
        assert await client.closed() == 4408


async def test_whoever_answers_is_asked_again_only_after_the_next_silence() -> None:
    engine = Worker()
    async with conversation(engine, idle_prompt={"after_sec": 20}) as client:
        await remark(client, why="idle")
        await silent_for(client, 100)
        await client.say("yes")
        assert (await client.answer()).text == "yes"
        assert engine.requests[-1].history == (Message("assistant", ENGLISH.idle),)
        answered = now()
        at, _ = await remark(client, why="idle")
        assert at - answered == pytest.approx(20 + seconds_of("yes"), abs=0.5)


async def test_the_silence_begins_where_a_cancel_has_stopped_the_playback() -> None:
    async with conversation(Worker(), idle_prompt={"after_sec": 20}) as client:
        await client.configure(max_lead_ms=None)
        await client.say("word " * 60)
        request_id = (await client.answer()).final["request_id"]  # which sounds for half a minute
        await asyncio.sleep(2)
        await client.send("cancel", request_id=request_id)
        await client.barrier()
        begin = now()
        at, _ = await remark(client, why="idle")
        assert at - begin == pytest.approx(20, abs=JUST)


async def test_silence_in_front_of_an_open_microphone_is_silence() -> None:
    async with conversation(Worker(), idle_prompt={"after_sec": 2, "text": "Hello?"}, **TURNS) as client:
        begin = now()
        for _ in range(15):
            await client.chunk(quiet(100))
            await asyncio.sleep(0.1)
        await client.chunk(loud(300))
        await client.until("speech_started")
        await asyncio.sleep(30)  # somebody speaks
        await client.barrier()
        assert "idle" not in {frame["trigger"] for frame in client.seen("response_started")}
        await client.chunk(quiet(700))
        await client.answer()
        assert now() - begin > 30
        assert (await remark(client, why="idle"))[1].text == "Hello?"


async def test_nobody_is_asked_while_a_tool_works() -> None:
    async with conversation(Worker(), idle_prompt={"after_sec": 1}) as client:
        await remark(client, why="idle")
        (call,) = await ask(client)
        await remark(client)
        await remark(client)
        await tell(client, call)
        await client.answer()
        await remark(client, why="idle")


@pytest.mark.parametrize("fields", [{"tool_filler": False}, {"modalities": ["text"]}])
async def test_nobody_is_asked_while_a_tool_works_of_which_nothing_is_said(fields: dict[str, Any]) -> None:
    async with conversation(Worker(), idle_prompt={"after_sec": 5, "closes_after_sec": 5}, **fields) as client:
        (call,) = await ask(client)
        await silent_for(client, MOST_FILLERS * NEXT_FILLER_SEC - 10)
        await tell(client, call)
        await client.answer()
        (call,) = await ask(client)  # its result never comes
        await remark(client, why="idle")


async def test_the_operator_may_have_it_asked_and_a_client_may_refuse() -> None:
    engine = Worker()
    streaming = {"idle_prompt_sec": 20, "idle_close_sec": 5}
    async with live_server(engine, streaming_input=streaming) as server:
        async with native_client(server) as client:
            told = await client.configure()
            assert told["idle_prompt"] == {"after_sec": 20, "closes_after_sec": 5, "text": ""}
            await remark(client, why="idle")
            assert await client.closed() == 4408
        async with native_client(server) as client:
            await client.configure(idle_prompt={"after_sec": 0})
            await silent_for(client, 60)


@pytest.mark.parametrize(
    ("idle_prompt", "refused"),
    [
        ({"after_sec": 3600, "closes_after_sec": 1, "text": "x" * 4096}, None),
        ({"after_sec": 3601}, "idle_prompt.after_sec"),
        ({"after_sec": 1, "closes_after_sec": 0}, "idle_prompt.closes_after_sec"),
        ({"after_sec": 1, "text": "x" * 4097}, "idle_prompt.text"),
    ],
)
async def test_limits(idle_prompt: dict[str, Any], refused: str | None) -> None:
    async with live_server(Worker()) as server, native_client(server) as client:
        if refused is None:
            assert (await client.configure(idle_prompt=idle_prompt))["idle_prompt"] == idle_prompt
            return
        await client.send("session_config", idle_prompt=idle_prompt)
        assert (await client.error())["param"] == refused


async def test_an_engine_that_cannot_ask_says_so() -> None:
    engine = Worker(tasks=frozenset({Task.CHAT}))
    async with live_server(engine) as server, native_client(server) as client:
        await client.send("session_config", modalities=["audio"], idle_prompt={"after_sec": 9})
        error = await client.error()
        assert (error["code"], error["param"]) == ("unsupported_parameter", "idle_prompt")


async def test_nobody_is_asked_over_http() -> None:
    body = b'{"idle_prompt": {"after_sec": 9}}'
    async with live_server(Worker()) as server, raw_client(server.port) as client:
        headers = ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        await client.send(request("POST", "/v1/streaming_input/sessions", *headers) + body)
        answer = await client.response()
        assert (answer.status, answer.error["param"]) == (400, "idle_prompt")

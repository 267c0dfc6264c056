"""A GGUF model that the server runs itself: SmolLM2's real weights in a real process, its death, and its end."""

from __future__ import annotations

import asyncio
import os
import signal
import struct
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Never

import httpx
import jsonschema
import orjson
import pytest
import pytest_asyncio
from support.engine_answers import Answer, Input, answered, collect, open_input, request_of, streamed, text
from support.live_server import LiveServer, live_server
from support.patience import PATIENCE_SEC, until
from support.raw_http import raw_client
from support.raw_http import request as http_request
from support.real_models import TOOLS_TEMPLATE, smollm2_file

from omni_ws.client import TextChunk, connect
from omni_ws.client.events import AnswerBuilder
from omni_ws.core.chunks import FinishReason
from omni_ws.core.history import Message
from omni_ws.engine.base import AnswerOptions, EngineState, Finished, StructuredOutput, TextOutput
from omni_ws.engine.child import Child
from omni_ws.engine.child_main import encode_message
from omni_ws.engine.composed.engine import ComposedEngine
from omni_ws.engine.llm import gguf_engine
from omni_ws.engine.llm.gguf_engine import GgufEngine, GgufSettings, RunningModel
from omni_ws.engine.llm.gguf_server import Order
from omni_ws.engine.llm.rules_engine import RulesFirst
from omni_ws.engine.remote.settings import RemoteLlmSettings
from omni_ws.errors import EngineFailed, EngineOverloaded

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

QUESTION = text("What is the capital of France?")
GREEDY = {"temperature": 0, "max_tokens": 8}
#: Of one conversation, in tokens.
CONTEXT = 256
#: An answer that does not end by itself for a while.
LONG = {"temperature": 0, "max_tokens": 180, "seed": 1}
TOOLS = ({"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}},)
STORY = text("Tell a very long story about a fox.")


def settings(**fields: Any) -> GgufSettings:
    return GgufSettings(file=smollm2_file(), name="SmolLM2", context=CONTEXT, parallel=2, threads=1, **fields)


@asynccontextmanager
async def running(wanted: GgufSettings) -> AsyncIterator[GgufEngine]:
    engine = GgufEngine(wanted)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.stop()


@pytest.fixture(scope="module")
def llm() -> GgufEngine:
    return GgufEngine(settings())


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def server(llm: GgufEngine) -> AsyncIterator[LiveServer]:
    """A server with the model, which starts again at once where it dies."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("omni_ws.engine.child.FIRST_BACKOFF_SEC", 0.01)
        async with live_server(ComposedEngine(llm), expect_errors=True) as server:
            yield server


@pytest.fixture(scope="module")
def engine(llm: GgufEngine, server: LiveServer) -> GgufEngine:
    """The model of the server."""
    return llm


def pid(engine: GgufEngine) -> int:
    assert engine.process is not None
    return engine.process.pid


def is_gone(process: int) -> bool:
    """Whether a process has ended; one that nobody has waited for yet counts."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].startswith("Z")
    except FileNotFoundError:
        return True


async def ended(process: int) -> None:
    """Waits for the end of a process, which need not be a child of this one."""
    descriptor = os.pidfd_open(process)
    gone = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, gone.set)
    try:
        await gone.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def seen_in(process: int, place: str) -> str:
    """What the system tells of a process."""
    return Path(f"/proc/{process}/{place}").read_bytes().decode(errors="replace")


def sleeps(process: int) -> bool:
    """Whether the main thread of a process waits in the kernel."""
    return seen_in(process, "stat").rpartition(")")[2].split()[0] == "S"


# What it can do


async def test_what_it_says_of_itself(engine: GgufEngine) -> None:
    assert engine.describe() == (
        "SmolLM2 runs on 1 thread, with a context of 256 tokens for each of 2 conversations at a time; its chat "
        "template leaves tools out, so they are refused",
    )
    able = engine.capabilities
    assert (able.tools, able.logprobs, able.structured_output, able.choices) == (False, True, True, False)
    assert (able.sums_up, able.context, able.shares_cores) == (True, 256, True)


async def test_the_same_answer_each_time(engine: GgufEngine) -> None:
    first, second = [await answered(engine, QUESTION, sampling=GREEDY) for _ in range(2)]
    assert first.text.strip()
    assert first.text == second.text
    assert engine.active_requests == 0


async def test_log_probabilities(engine: GgufEngine) -> None:
    answer = await answered(engine, QUESTION, sampling=GREEDY, options=AnswerOptions(logprobs=2))
    tokens = [one for output in answer.outputs if isinstance(output, TextOutput) for one in output.logprobs]
    assert "".join(one.token for one in tokens) == answer.text
    for one in tokens:
        assert one.logprob is not None
        assert one.logprob <= 0
        assert len(one.top) == 2
        assert one.top[0].logprob == pytest.approx(one.logprob)  # the likeliest was taken


async def test_an_answer_in_json(engine: GgufEngine) -> None:
    properties = {"city": {"type": "string", "maxLength": 20}, "inhabitants": {"type": "integer", "maximum": 99}}
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    answer = await answered(
        engine,
        text("Describe the capital of France."),
        sampling={"temperature": 0, "max_tokens": 100},
        options=AnswerOptions(structure=StructuredOutput(schema=schema)),
    )
    assert answer.finished.reason is FinishReason.STOP
    jsonschema.validate(orjson.loads(answer.text), schema)


async def test_a_prompt_is_computed_once(engine: GgufEngine) -> None:
    history = (
        Message("user", "The sun shines on the garden, where the cat sleeps. " * 6),
        Message("assistant", "How nice."),
    )
    for turn in (QUESTION, text("And of Italy?")):
        answer = await answered(engine, turn, sampling=GREEDY, history=history)
    usage = answer.finished.usage
    assert usage.cached_tokens is not None
    assert usage.cached_tokens > 0.8 * usage.input_tokens


async def test_a_talk_that_was_summed_up_is_computed_ahead(server: LiveServer) -> None:
    """The first answer after that waits for the new words alone."""
    said = [
        "My dog is called Biscuit.",
        "I live in Trondheim.",
        *(f"What is topic {n} about, and why?" for n in range(9)),
    ]
    items = [{"role": who, "content": one} for line in said for who, one in (("user", line), ("assistant", "It is."))]
    async with connect(server.websocket_url) as session:
        await session.configure(sampling=GREEDY, history_items=items)
        await server.until(lambda: server.app.summaries.idle)
        (notes, *_) = await session.history()
        assert notes["content"].startswith('- "My dog is called Biscuit."\n- "I live in Trondheim."\nTopics: What is')
        usage = (await session.ask_text("What is my dog called?")).usage
    assert usage is not None
    assert usage.cached_tokens is not None
    assert usage.input_tokens is not None
    assert usage.cached_tokens > 0.8 * usage.input_tokens


async def test_what_rules_have_answered_is_computed_ahead(engine: GgufEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omni_ws.engine.llm.rules_engine.SPOKEN_SEC", 0)
    monkeypatch.setattr("omni_ws.engine.llm.rules_engine.COMPUTED_WORDS", 5)
    rules = RulesFirst(engine)
    joke = await answered(rules, text("Tell me a joke."), conversation="C")
    await asyncio.gather(*rules._ahead.values())
    heard = (Message("user", "Tell me a joke."), Message("assistant", joke.text.rpartition(" ")[0]))
    answer = await answered(rules, text("And?"), history=heard, conversation="C", sampling=GREEDY)
    usage = answer.finished.usage
    assert usage.cached_tokens is not None
    assert usage.cached_tokens > 0.7 * usage.input_tokens, "also of an answer that was interrupted"


async def test_a_prompt_that_is_computed_ahead_gives_way(engine: GgufEngine) -> None:
    """Also where its slot is that of the conversation that is answered."""
    long = (Message("user", "The sun shines on the garden, where the cat sleeps. " * 15), Message("assistant", "Yes."))
    out = Answer()
    fields: dict[str, Any] = {"conversation": "D", "sampling": LONG, "computes_only": True}
    ahead = asyncio.create_task(engine.generate(request_of(Input("…"), history=long, **fields), out))
    await until(lambda: engine.active_requests == 1)
    answer = await answered(engine, QUESTION, conversation="D", sampling=GREEDY)
    assert answer.finished.usage.output_tokens == GREEDY["max_tokens"]
    with pytest.raises(EngineOverloaded, match="an answer goes before"):
        await ahead
    assert not any(isinstance(one, Finished) for one in out.outputs)
    assert engine.active_requests == 0


async def test_conversations_that_alternate_keep_what_was_computed(engine: GgufEngine) -> None:
    """Also where they are more than the places: llama.cpp swaps what it has of them."""
    said = {name: f"I am {name}. " + f"{name} likes the sun. " * 20 for name in ("Ada", "Bob", "Eve")}
    talks = [(Message("user", words), Message("assistant", "Hello.")) for words in said.values()]
    for number, talk in enumerate(talks * 2):
        usage = (await answered(engine, QUESTION, sampling=GREEDY, history=talk)).finished.usage
        assert usage.cached_tokens is not None
        assert (usage.cached_tokens > 0.8 * usage.input_tokens) is (number >= len(talks))


async def test_conversations_with_the_same_instructions_keep_what_was_computed() -> None:
    """Also where these are longer than the talks, and the talks more than the places."""
    instructions = "You are a voice. " + "Answer in one short sentence, in plain words. " * 12
    said = {
        name: (Message("user", f"I am {name}. " + "I like it. " * 12), Message("assistant", "Hello.")) for name in "ABC"
    }
    cached: dict[int, list[float]] = {0: [], 1: []}
    async with running(settings(instructions=instructions)) as engine:
        for round_ in cached:
            for name, talk in said.items():
                fields: dict[str, Any] = {"instructions": instructions, "history": talk, "conversation": name}
                usage = (await answered(engine, QUESTION, sampling=GREEDY, **fields)).finished.usage
                assert usage.cached_tokens is not None
                cached[round_].append(usage.cached_tokens / usage.input_tokens)
    assert min(cached[0]) > 0.5  # the instructions
    assert min(cached[1]) > 0.9


async def test_a_conversation_longer_than_the_context_of_one(engine: GgufEngine) -> None:
    """The context is divided between conversations, and the oldest turns of a long one are left out."""
    turn = (Message("user", "The sun is bright today. " * 20), Message("assistant", "Yes."))
    answer = await answered(engine, QUESTION, sampling=GREEDY, history=turn * 5)
    assert answer.text
    assert answer.finished.usage.input_tokens < CONTEXT


async def test_only_who_has_the_key_may_ask(engine: GgufEngine) -> None:
    process = engine.process
    assert process is not None
    assert engine._running is not None
    key = engine._running.llm.settings.api_key
    assert key
    assert not [place for place in ("cmdline", "environ") if key in seen_in(process.pid, place)]
    async with httpx.AsyncClient(base_url=process.served.address, trust_env=False, timeout=PATIENCE_SEC) as stranger:
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
        for headers in ({}, {"Authorization": "Bearer guessed"}):
            assert (await stranger.post("/v1/chat/completions", json=body, headers=headers)).status_code == 401
            assert (await stranger.get("/props", headers=headers)).status_code == 401


async def test_tools_and_thought_are_those_of_the_template() -> None:
    """This one leaves it open whether to think: then not, since speech would wait for it, unless the operator asks."""
    prompts = []
    for think in (False, True):
        async with running(settings(chat_template=TOOLS_TEMPLATE, think=think)) as engine:
            assert engine.capabilities.tools
            assert "tools" not in engine.describe()[0]
            prompts.append((await answered(engine, QUESTION, sampling=GREEDY)).finished.usage.input_tokens)
            await stopped_in_the_middle_of_an_answer(engine)  # and once more by the block
    assert prompts[0] > prompts[1]  # an empty thought is put before the answer


async def test_it_does_not_repeat_itself_unless_it_is_asked_to() -> None:
    """A client that names any penalty gets that one alone, and JSON has to repeat its marks."""
    ask, long = text("List a hundred names of fish."), {"temperature": 0, "max_tokens": 60}
    # What a process has kept of earlier prompts changes its sums a little, and its words: this one has nothing.
    async with running(settings()) as engine:
        free = (await answered(engine, ask, sampling={**long, "repetition_penalty": 1.0})).text.split()
        held = (await answered(engine, ask, sampling=long)).text.split()
        assert len(set(free)) / len(free) < 0.5 < len(set(held)) / len(held)
        named = {"frequency_penalty": 0.0}
        assert (await answered(engine, ask, sampling={**long, **named})).text.split() == free


async def test_a_context_in_eight_bits() -> None:
    async with running(settings(eight_bits=True)) as engine:
        assert "Paris" in (await answered(engine, QUESTION, sampling=GREEDY)).text


async def test_instructions_and_examples_are_computed_at_the_start() -> None:
    """The examples belong to the instructions: who gives other ones gets no examples."""
    instructions, example = "You are a friendly voice. Answer briefly.", ("What is it?", "It is a long example. " * 12)
    async with running(settings(instructions=instructions, examples=(example,))) as engine:
        first = await answered(engine, QUESTION, sampling=GREEDY, instructions=instructions)
        other = await answered(engine, QUESTION, sampling=GREEDY, instructions=f"{instructions} Be kind.")
    usage = first.finished.usage
    assert usage.cached_tokens is not None
    assert usage.cached_tokens > 0.6 * usage.input_tokens
    assert other.finished.usage.input_tokens < usage.input_tokens - 60


async def test_a_request_with_tools_gets_no_examples() -> None:
    """What says that the model cannot do something would keep it from the tool that can."""
    own = "You are a voice. You cannot know the weather."
    example = ("Will it rain?", "I'm sorry, I can't see the weather. " * 12)
    fields: dict[str, Any] = {"tools": TOOLS, "sampling": GREEDY}
    begun = settings(instructions=own, examples=(example,), chat_template=TOOLS_TEMPLATE)
    async with running(replace(begun, context=512)) as engine:
        shorter, usual, longer = [
            (await answered(engine, QUESTION, instructions=given, **fields)).finished.usage.input_tokens
            for given in ("You are a voice.", own, f"{own} Be kind.")
        ]
    assert shorter < usual < longer  # nobody's instructions are changed


async def test_sampling_for_who_sets_none() -> None:
    """A parameter that a client sets counts."""
    async with running(settings(sampling={"temperature": 0, "max_tokens": 3})) as engine:
        usual = [await answered(engine, STORY) for _ in range(2)]
        longer = await answered(engine, STORY, sampling={"max_tokens": 5})
    assert usual[0].text == usual[1].text
    assert [one.finished.usage.output_tokens for one in (*usual, longer)] == [3, 3, 5]


async def test_it_leaves_the_processor_to_the_ears(engine: GgufEngine) -> None:
    niceness = os.getpriority(os.PRIO_PROCESS, pid(engine))
    assert niceness == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 5)


async def test_weights_are_held_once(engine: GgufEngine) -> None:
    """A file that is mapped would stay in memory beside the copy that the processor works with."""
    assert str(engine.settings.file) not in seen_in(pid(engine), "maps")


# Several conversations


async def test_two_conversations_at_once(engine: GgufEngine) -> None:
    order: list[int] = []

    async def ask(number: int) -> Answer:
        source = open_input(STORY)
        source.close()
        outputs = []
        sampling = {"temperature": 0, "max_tokens": 40}
        async with aclosing(streamed(engine, request_of(source, sampling=sampling))) as answer:
            async for output in answer:
                order.append(number)
                outputs.append(output)
        return Answer(outputs)

    first, second = await asyncio.gather(ask(0), ask(1))
    assert first.text
    assert second.text
    # Neither waits for the end of the other.
    assert order.index(1) < len(order) - 1 - order[::-1].index(0)
    assert order.index(0) < len(order) - 1 - order[::-1].index(1)


async def test_one_conversation_too_many(engine: GgufEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omni_ws.engine.llm.gguf_engine.PLACE_SEC", 0.05)
    speaking = asyncio.create_task(collect(engine, still_speaking := open_input(QUESTION), sampling=GREEDY))
    answering = [await begun(engine) for _ in range(2)]
    with pytest.raises(EngineOverloaded) as refused:
        await answered(engine, QUESTION, sampling=GREEDY)
    assert refused.value.message == "the model answers 2 conversations at a time; retry later"
    assert refused.value.retry_after_ms == 1000
    await answering.pop().aclose()
    assert (await answered(engine, QUESTION, sampling=GREEDY)).text
    await answering.pop().aclose()
    # Who only speaks takes no place.
    still_speaking.close()
    assert (await speaking).text
    assert engine.active_requests == 0


async def begun(engine: GgufEngine) -> Any:
    """A long answer that has begun."""
    source = open_input(STORY)
    source.close()
    answer = streamed(engine, request_of(source, sampling=LONG))
    assert not isinstance(await anext(answer), Finished)
    return answer


# Its death, and its end


async def test_a_death_in_the_middle_of_answers(server: LiveServer, engine: GgufEngine) -> None:
    """Each is told, a WebSocket also which part died; another process answers the next ones."""
    async with running(settings()) as fresh:  # which has kept nothing of earlier prompts, as the one behind the death
        before = await answered(fresh, QUESTION, sampling=GREEDY)
    assert engine.process is not None
    first, address = pid(engine), engine.process.served
    config = {"modalities": ["text"], "sampling": LONG}
    async with connect(server.websocket_url, config=config, reconnect=False) as session:
        answering, builder = await begun(engine), AnswerBuilder()
        await session.send_text("Tell a very long story about a fox.", end=True)
        async for event in session.response():
            builder.add(event)
            if isinstance(event, TextChunk) and not is_gone(first):
                os.kill(first, signal.SIGKILL)
                with pytest.raises(EngineFailed, match="the process of the model has died") as failed:
                    async for _ in answering:
                        pass
                assert failed.value.fatal
                assert engine.state is EngineState.UNHEALTHY
        answer = builder.build()
        assert answer.text
    (error,) = answer.errors
    assert isinstance(error, EngineFailed)
    assert (error.param, answer.finish_reason) == ("llm", FinishReason.ERROR)
    assert error.message.startswith("LLM (gguf): the process of the model has died")
    assert engine.active_requests == 0
    await until(lambda: engine.state is EngineState.OK)
    assert engine.process is not None
    assert (pid(engine), engine.process.served) != (first, address)
    assert (await answered(engine, QUESTION, sampling=GREEDY)).text == before.text
    async with connect(server.websocket_url, config={**config, "sampling": GREEDY}) as session:
        assert (await session.ask_text("What is the capital of France?")).text
    async with raw_client(server.port) as client:
        await client.send(http_request("GET", "/health", "Connection: close"))
        health = (await client.response()).json()
    assert health["parts"]["llm"] == {"name": "gguf", "model": "SmolLM2"}


async def test_a_process_that_hangs_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_engine, "LOOK_SEC", 0.1)
    monkeypatch.setattr("omni_ws.engine.child.FIRST_BACKOFF_SEC", 0.01)
    usual = gguf_engine._settings_of

    def impatient(*arguments: Any, **fields: Any) -> RemoteLlmSettings:
        return replace(usual(*arguments, **fields), health_interval=0.1, connect_timeout=0.5)

    monkeypatch.setattr(gguf_engine, "_settings_of", impatient)
    async with running(settings(first_byte_timeout=30)) as engine:
        first = pid(engine)
        with monkeypatch.context() as only_now:  # the second process may be slow on a busy machine
            only_now.setattr(gguf_engine, "HANG_SEC", 0.2)
            os.kill(first, signal.SIGSTOP)
            with pytest.raises(EngineFailed, match="the process of the model has died"):
                await answered(engine, QUESTION)
        await until(lambda: engine.state is EngineState.OK)
        assert pid(engine) != first
        assert (await answered(engine, QUESTION, sampling=GREEDY)).text


async def test_requests_while_it_is_down(
    engine: GgufEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is tried again, later and later, also where it cannot be started meanwhile."""
    there, program = engine.settings, sys.executable
    try:
        engine.settings = replace(there, file=Path("/nowhere.gguf"))
        os.kill(pid(engine), signal.SIGKILL)
        await until(lambda: engine.process is None)
        with pytest.raises(EngineFailed, match="is being started again") as failed:
            await answered(engine, QUESTION)
        assert failed.value.fatal
        assert engine.state is EngineState.UNHEALTHY
        await until(lambda: "llama.cpp does not start again: cannot read /nowhere.gguf" in caplog.text)
        monkeypatch.setattr(sys, "executable", "/nowhere")
        engine.settings = there
        await until(lambda: "No such file or directory: '/nowhere'" in caplog.text)
    finally:
        engine.settings = there
        monkeypatch.setattr(sys, "executable", program)
    await until(lambda: engine.state is EngineState.OK)
    assert (await answered(engine, QUESTION, sampling=GREEDY)).text


async def stopped_in_the_middle_of_an_answer(engine: GgufEngine) -> None:
    process = pid(engine)
    answering = await begun(engine)
    await engine.stop()
    with pytest.raises(EngineFailed):
        async for _ in answering:
            pass
    assert is_gone(process)
    assert engine.state is EngineState.STARTING


async def test_a_start_that_is_cancelled_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[RunningModel] = []

    async def cancelled(model: RunningModel, *_: object) -> None:
        begun.append(model)
        assert model.llm.upstreams
        raise asyncio.CancelledError

    monkeypatch.setattr(RunningModel, "compute", cancelled)
    engine = GgufEngine(settings(instructions="Be kind."))
    with pytest.raises(asyncio.CancelledError):
        await engine.start()
    (model,) = begun
    assert is_gone(model.pid)
    assert not model.llm.upstreams
    assert engine.state is EngineState.STARTING


async def test_it_ends_with_its_server_also_while_it_loads(tmp_path: Path) -> None:
    """A server that is killed cannot end anybody, and while the model loads no thread of Python's can run."""
    # Nobody writes to this pipe, so opening it never ends.
    os.mkfifo(pipe := tmp_path / "pipe.gguf")
    order = Order(file=str(pipe), name="m", key="k", context=256, parallel=1, threads=1)
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _PARENT, encode_message(order).hex()), stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    child = int(await parent.stdout.readline())
    await until(lambda: "xllamacpp" in seen_in(child, "maps") and sleeps(child))
    parent.kill()
    await parent.wait()
    await ended(child)


#: Starts the process, gives it an order, and waits for its own end alone.
_PARENT = """
import signal, subprocess, sys
module = "omni_ws.engine.llm.gguf_server"
process = subprocess.Popen([sys.executable, "-m", module], stdin=subprocess.PIPE)
process.stdin.write(bytes.fromhex(sys.argv[1]))
process.stdin.flush()
print(process.pid, flush=True)
signal.pause()
"""


# What cannot be run


def gguf(tmp_path: Path, content: bytes) -> Path:
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    return file


async def refusal(wanted: GgufSettings) -> str:
    engine = GgufEngine(wanted)
    with pytest.raises(EngineFailed) as failed:
        await engine.start()
    await engine.stop()
    assert failed.value.fatal
    assert "\n" not in failed.value.message
    return failed.value.message


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot read {file}: No such file or directory"),
        (b"", "{file} is not a GGUF file: it does not begin with GGUF"),
        (b"<!doctype html>", "{file} is not a GGUF file: it does not begin with GGUF"),
        (struct.pack("<4sI", b"GGUF", 1), "{file} is of a version of GGUF that llama.cpp does not read"),
    ],
)
async def test_a_file_that_is_no_model(content: bytes | None, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    if content is not None:
        file.write_bytes(content)
    assert await refusal(GgufSettings(file=file, name="model")) == reason.format(file=file)


async def test_a_folder_is_no_model(tmp_path: Path) -> None:
    assert await refusal(GgufSettings(file=tmp_path, name="model")) == f"{tmp_path} is not a file"


async def test_a_system_that_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: Any, **__: Any) -> Never:
        raise OSError("no memory")

    monkeypatch.setattr(Child, "start", refuse)
    with pytest.raises(EngineFailed, match=r"llama\.cpp does not start"):
        await GgufEngine(settings()).start()


async def test_half_a_file(tmp_path: Path) -> None:
    half = gguf(tmp_path, smollm2_file().read_bytes()[: 4 << 20])
    assert (await refusal(replace(settings(), file=half))).startswith(f"llama.cpp does not load {half}: ")


async def test_a_model_that_is_larger_than_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omni_ws.engine.llm.gguf_engine.available_memory", lambda: 50_000_000)
    reason = "is too large for this machine: 0.1 GB of weights, 0.1 GB of memory free"
    assert (await refusal(settings())).endswith(reason)


async def test_all_files_of_a_model_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (1, 2):
        part = tmp_path / f"big-0000{number}-of-00002.gguf"
        part.write_bytes(struct.pack("<4sI", b"GGUF", 3))
        os.truncate(part, 600_000_000)
    monkeypatch.setattr("omni_ws.engine.llm.gguf_engine.available_memory", lambda: 1_000_000_000)
    reason = await refusal(GgufSettings(file=tmp_path / "big-00001-of-00002.gguf", name="big"))
    assert reason.endswith("1.2 GB of weights, 1.0 GB of memory free")


@pytest.mark.parametrize("template", [None, "{% if %}"])
async def test_a_template_that_cannot_be_used(template: str | None, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    if template is not None:
        file.write_text(template)
    assert "template" in await refusal(settings(chat_template=file))

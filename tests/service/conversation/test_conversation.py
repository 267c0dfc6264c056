"""A conversation that is cancelled at any step leaves nothing behind, and each request has exactly one final."""

from __future__ import annotations

import asyncio
import inspect
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from support.engine_answers import written
from support.patience import until

from omni_ws.core.chunks import (
    FinalChunk,
    FinishReason,
    InputChunk,
    Modality,
    OutputChunk,
    ToolCall,
    ToolCallFragment,
    Usage,
)
from omni_ws.core.history import Message
from omni_ws.core.input_stream import StreamLimits
from omni_ws.core.quota import ByteBudget
from omni_ws.engine.base import GenerationRequest, OutputWriter, TextOutput, ToolCallOutput
from omni_ws.engine.fake import CAPABILITIES, EchoEngine, ScriptedEngine
from omni_ws.errors import (
    EngineFailed,
    EngineOverloaded,
    InvalidValue,
    OmniError,
    PayloadTooLarge,
    UnsupportedParameter,
)
from omni_ws.service.conversation import conversation, request
from omni_ws.service.conversation.configuration import Configuration, ConfigurationRules, ServedModel
from omni_ws.service.conversation.conversation import Conversation
from omni_ws.service.conversation.output_log import (
    ConversationLimits,
    OutputLog,
    ServerMessage,
)
from omni_ws.wire.server_frames import ResponseStartedFrame
from omni_ws.wire.session_config import SessionConfig


class Slow(EchoEngine):
    """Yields to the loop around each output, and while it is closed."""

    async def generate(self, request: GenerationRequest, out: OutputWriter) -> None:
        try:
            async with aclosing(written(partial(super().generate, request))) as outputs:
                async for output in outputs:
                    await asyncio.sleep(0)
                    out.write(output)
                    await out.drain()
                    await asyncio.sleep(0)
        finally:
            await asyncio.sleep(0)


class Session:
    """A conversation without a transport."""

    def __init__(
        self,
        engine: EchoEngine | ScriptedEngine,
        *,
        capacity: int = 1 << 20,
        outbox: type[OutputLog] = OutputLog,
        account: ByteBudget | None = None,
    ) -> None:
        self.engine = engine
        self.budget = ByteBudget(1 << 20)
        now = asyncio.get_running_loop().time
        rules = ConfigurationRules(
            capabilities=CAPABILITIES, model=ServedModel(("fake",)), output_formats=frozenset({"pcm16"})
        )
        self.outbox = outbox(capacity, write_timeout=30, now=now)
        self.conversation = Conversation(
            engine,
            Configuration(rules, account),
            self.outbox,
            limits=ConversationLimits(stream=StreamLimits(max_held_bytes=1000)),
            budget=self.budget,
            now=now,
        )
        self.number = 0
        self.messages: list[ServerMessage] = []

    def chunk(self, text: str, *, end: bool = False, result_of: str | None = None) -> None:
        chunk = InputChunk(Modality.TEXT, text.encode(), self.number, end_of_input=end, tool_call_id=result_of)
        self.conversation.receive_chunk(chunk, now=asyncio.get_running_loop().time())
        self.number += 1

    def take(self) -> list[ServerMessage]:
        while (message := self.outbox.take()) is not None:
            self.messages.append(message)
        return self.messages

    @property
    def finals(self) -> list[FinalChunk]:
        return [message for message in self.take() if isinstance(message, FinalChunk)]

    def check_nothing_left(self) -> None:
        assert self.engine.active_requests == 0
        assert self.budget.used == 0
        assert self.conversation.stream.held_bytes == 0
        assert not self.conversation.busy
        ids = [final.request_id for final in self.finals]
        assert len(ids) == len(set(ids))
        over: set[str] = set()
        for message in self.messages:
            if isinstance(message, OutputChunk | ResponseStartedFrame | FinalChunk):
                assert message.request_id not in over
            if isinstance(message, FinalChunk):
                over.add(message.request_id)
        numbers = [m.sequence_id for m in self.messages if isinstance(m, OutputChunk | FinalChunk)]
        assert numbers == list(range(len(numbers)))


async def passes(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("reason", [FinishReason.CANCELLED, FinishReason.ERROR])
@pytest.mark.parametrize("capacity", [1, 1 << 20])
async def test_cancelled_at_any_step(reason: FinishReason, capacity: int) -> None:
    before = asyncio.all_tasks()
    for step in range(60):
        session = Session(Slow(), capacity=capacity)
        if reason is FinishReason.ERROR:
            session.conversation.end_in_error(EngineFailed("the test"))
        work = session.conversation.run()
        running = asyncio.create_task(work)
        session.chunk("one two ")
        await passes(step // 2)
        session.chunk("three", end=True)
        session.chunk("four", end=True)
        session.chunk("five")
        await passes(step - step // 2)
        if capacity == 1:
            session.take()
            await passes(2)
        never_ran = inspect.getcoroutinestate(work) == inspect.CORO_CREATED
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        if never_ran:
            session.conversation.end()  # as its owner has to
        assert len(session.finals) == 3, step
        assert session.finals[-1].finish_reason is reason
        session.check_nothing_left()
        assert asyncio.all_tasks() == before


@pytest.mark.parametrize("requests", [1, 3])
async def test_request_cancelled_at_any_step(requests: int) -> None:
    for step in range(40):
        session = Session(Slow())
        running = asyncio.create_task(session.conversation.run())
        for _ in range(requests):
            session.chunk("one ")
            session.chunk("two", end=True)
        await passes(step)
        session.conversation.cancel()
        session.chunk("next", end=True)
        session.conversation.close()
        await running
        assert len(session.finals) == requests + 1
        assert session.finals[-1].finish_reason is FinishReason.STOP
        assert sum(final.finish_reason is FinishReason.CANCELLED for final in session.finals) <= 1
        session.check_nothing_left()


async def test_cancelled_twice_while_it_winds_up() -> None:
    """The task that waits for the end may be cancelled itself."""
    for step in range(8):
        session = Session(Slow())

        async def owner(session: Session = session) -> None:
            running = asyncio.create_task(session.conversation.run())
            try:
                await asyncio.Event().wait()
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)

        owning = asyncio.create_task(owner())
        await passes(50)
        session.chunk("one two three")
        await passes(6)
        owning.cancel()
        await passes(step)
        owning.cancel()
        await asyncio.gather(owning, return_exceptions=True)
        await until(lambda: not session.engine.active_requests and not session.budget.used)  # noqa: B023 - called here
        session.check_nothing_left()


async def test_an_unexpected_failure_is_sent_and_raised() -> None:
    class Broken(OutputLog):
        def put_nowait(self, message: ServerMessage) -> None:
            if isinstance(message, ResponseStartedFrame):
                raise RuntimeError("broken")
            super().put_nowait(message)

    session = Session(EchoEngine(), outbox=Broken)
    running = asyncio.create_task(session.conversation.run())
    session.chunk("hello", end=True)
    session.chunk("waiting", end=True)
    with pytest.raises(OmniError) as raised:
        await running
    assert raised.value.code == "engine_failed"
    assert [message.code for message in session.take() if isinstance(message, OmniError)] == ["engine_failed"]
    assert [final.finish_reason for final in session.finals] == [FinishReason.ERROR] * 2
    session.check_nothing_left()


async def test_refused_chunk_leaves_the_conversation_as_it_was() -> None:
    session = Session(EchoEngine())
    session.conversation.configure({"start_policy": "on_end_only"})
    running = asyncio.create_task(session.conversation.run())
    session.chunk("x" * 900)
    with pytest.raises(PayloadTooLarge):
        session.chunk("x" * 101)
    session.chunk("y", end=True)
    session.conversation.close()
    await running
    texts = [message.text for message in session.take() if isinstance(message, OutputChunk)]
    assert "".join(texts) == "x" * 900 + "y"
    session.check_nothing_left()


@pytest.mark.parametrize("policy", ["on_end_only", "on_first_chunk"])
async def test_a_request_has_a_limit_of_tool_results(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are kept until it ends, and an empty one has no bytes to be charged with."""
    most = 100
    for module in (conversation, request):
        monkeypatch.setattr(module, "MAX_TOOL_RESULTS", most)
    gate = asyncio.Event()
    session = Session(ScriptedEngine((gate.wait,)))
    session.conversation.configure({"start_policy": policy})
    running = asyncio.create_task(session.conversation.run())
    names = [f"call_{number}" for number in range(most)] + ["one too many", "another"]
    session.conversation.ledger.place(
        [Message("assistant", "", tool_calls=tuple(ToolCall(n, "f", "{}") for n in names))]
    )
    for number in range(most):
        session.chunk("", result_of=f"call_{number}")
    with pytest.raises(PayloadTooLarge, match="tool results"):
        session.chunk("", result_of="one too many")
    session.conversation.cancel()
    gate.set()
    session.conversation.close()
    await running
    session.check_nothing_left()


async def test_close_waits_for_the_last_answer() -> None:
    gate = asyncio.Event()
    session = Session(ScriptedEngine([gate.wait, TextOutput("done")]))
    running = asyncio.create_task(session.conversation.run())
    session.chunk("hello", end=True)
    session.conversation.close()
    await passes(10)
    assert not running.done()
    gate.set()
    await running
    assert [final.finish_reason for final in session.finals] == [FinishReason.STOP]
    session.check_nothing_left()


async def test_requests_that_open_while_draining_are_refused() -> None:
    gate = asyncio.Event()
    session = Session(ScriptedEngine([gate.wait]))
    running = asyncio.create_task(session.conversation.run())
    session.chunk("first", end=True)
    await passes(3)
    session.conversation.drain()
    session.conversation.close()
    session.chunk("second")
    session.chunk("its rest", end=True)
    gate.set()
    await running
    errors = [message for message in session.take() if isinstance(message, OmniError)]
    assert [error.code for error in errors] == ["shutting_down"]
    reasons = {final.request_id: final.finish_reason for final in session.finals}
    assert reasons.pop(errors[0].request_id or "") is FinishReason.ERROR
    assert list(reasons.values()) == [FinishReason.STOP]
    session.check_nothing_left()


@pytest.mark.parametrize("error", [EngineFailed("gone", fatal=True), EngineOverloaded("busy"), InvalidValue("odd")])
async def test_a_failure_behind_a_cancelled_answer_is_ignored(error: OmniError) -> None:
    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise error

    engine = ScriptedEngine([TextOutput("a"), wait])
    session = Session(engine)
    running = asyncio.create_task(session.conversation.run())
    session.chunk("one", end=True)
    await passes(10)
    session.conversation.cancel()
    engine.script = (TextOutput("b"),)
    session.chunk("two", end=True)
    session.conversation.close()
    await running
    assert [final.finish_reason for final in session.finals] == [FinishReason.CANCELLED, FinishReason.STOP]
    assert not any(isinstance(message, OmniError) for message in session.messages)
    session.check_nothing_left()


WHOLE = ToolCallOutput(ToolCallFragment(0, "call_0", "look", '{"at": "this"}'))
BEGUN = ToolCallOutput(ToolCallFragment(1, "call_1", "look", '{"at": '))


@pytest.mark.parametrize(("written", "kept"), [(0, ()), (1, ()), (2, ("call_0",)), (3, ("call_0",))])
async def test_history_has_the_calls_that_were_sent_whole(written: int, kept: tuple[str, ...]) -> None:
    """No engine takes half a call, and no client answers one that it never saw."""
    engine = ScriptedEngine([WHOLE, BEGUN, asyncio.Event().wait])
    session = Session(engine)
    running = asyncio.create_task(session.conversation.run())
    session.chunk("one", end=True)
    await passes(100)
    session.messages += filter(None, (session.outbox.take() for _ in range(written)))
    session.conversation.cancel()
    engine.script = ()
    session.chunk("two", end=True)
    session.conversation.close()
    await running
    calls = [call.id for message in engine.requests[-1].history for call in message.tool_calls]
    assert tuple(calls) == kept
    session.check_nothing_left()


class Metered(ScriptedEngine):
    """Counts tokens while it works."""

    def __init__(self, used: Usage | None) -> None:
        super().__init__([TextOutput("one two three"), asyncio.Event().wait])
        self.used = used

    async def generate(self, request: GenerationRequest, out: OutputWriter) -> None:
        request.meter.read = lambda: self.used
        await super().generate(request, out)


@pytest.mark.parametrize(
    ("used", "counted"), [(Usage(input_tokens=40, output_tokens=7), (40, 7)), (None, (2, 3))], ids=["tokens", "words"]
)
async def test_usage_of_a_cancelled_answer_is_in_tokens_where_they_are_known(
    used: Usage | None, counted: tuple[int, int]
) -> None:
    session = Session(Metered(used))
    running = asyncio.create_task(session.conversation.run())
    session.chunk("some words", end=True)
    await passes(100)
    session.take()
    session.conversation.cancel()
    session.conversation.close()
    await running
    (final,) = session.finals
    assert final.finish_reason is FinishReason.CANCELLED
    assert (final.usage.input_tokens, final.usage.output_tokens) == counted
    session.check_nothing_left()


# Another engine


def other(**changes: Any) -> ConfigurationRules:
    """The rules of an engine that can do less."""
    able = replace(CAPABILITIES, **{"sampling": frozenset(), "sampling_no_ops": frozenset(), **changes})
    return ConfigurationRules(capabilities=able, model=ServedModel(("fake",)), output_formats=frozenset({"pcm16"}))


async def test_what_another_engine_refuses_is_forgotten_and_the_rest_stays() -> None:
    session = Session(EchoEngine())
    told: list[SessionConfig] = []
    session.conversation.followed = told.append
    session.conversation.configure({"sampling": {"seed": 5}, "instructions": "Be brief."})
    session.conversation.follow(other())
    (config,) = told
    assert (config.sampling.seed, config.instructions) == (None, "Be brief.")
    assert session.conversation.configuration.wanted == {"instructions": "Be brief."}
    assert session.conversation.configure({"instructions": "Be kind."}).instructions == "Be kind."
    with pytest.raises(UnsupportedParameter) as refused:
        session.conversation.configure({"sampling": {"seed": 6}})
    assert refused.value.param == "sampling.seed"


async def test_a_session_follows_another_engine_once_there_is_memory(caplog: pytest.LogCaptureFixture) -> None:
    account = ByteBudget(1 << 20)
    session = Session(EchoEngine(), account=account)
    told: list[SessionConfig] = []
    session.conversation.followed = told.append
    session.conversation.configure({"instructions": "x" * 100_000})
    account.take(taken := account.capacity - account.held)
    with caplog.at_level("WARNING"):
        session.conversation.follow(rules := other())
    assert "a session does not follow the engine yet: " in caplog.text
    assert told == []
    account.give(taken)
    session.chunk("hello", end=True)
    running = asyncio.create_task(session.conversation.run())
    await until(lambda: bool(session.take() and told))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert session.conversation.configuration.rules is rules
    assert len(told[0].instructions or "") == 100_000

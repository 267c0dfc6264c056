"""The queue of requests: their order, what ends them, and what they leave in the outbox."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

import pytest
from support.parts_of_sessions import end_input, give_input, make_request
from support.patience import until
from support.scripted_engines import HEARS, PlayingEngine

from omni_ws.core.chunks import FinalChunk, FinishReason, InputChunk, InputMode, Modality, OutputChunk, StartTrigger
from omni_ws.core.ledger import Ledger
from omni_ws.core.quota import ByteBudget
from omni_ws.core.request_input import GenerationStarted
from omni_ws.engine.base import EngineOutput, EngineState, TextOutput, TranscriptOutput
from omni_ws.engine.fake import ScriptedEngine
from omni_ws.errors import EngineFailed, InvalidValue, OmniError
from omni_ws.service.conversation.onsets import Onset
from omni_ws.service.conversation.output_log import OutputLog, ServerMessage
from omni_ws.service.conversation.request import Request, RequestState
from omni_ws.service.conversation.request_queue import RequestQueue
from omni_ws.service.observing.observer import ObservedSession
from omni_ws.wire.server_frames import ResponseStartedFrame


class Bench:
    """A queue with an outbox, and the owner of both."""

    def __init__(self, *script: EngineOutput | Exception | Callable[[], object]) -> None:
        now = asyncio.get_running_loop().time
        self.engine: ScriptedEngine | PlayingEngine = ScriptedEngine(script)
        self.engine.state = EngineState.OK
        self.outbox = OutputLog(1 << 20, write_timeout=30, now=now)
        self.ledger = Ledger(1000, ByteBudget(1 << 20))
        self.observed = ObservedSession.unobserved(now)
        self.queue = self.new_queue()
        self.ended: list[str] = []
        self.progress = 0
        self.messages: list[ServerMessage] = []

    def new_queue(self) -> RequestQueue:
        return RequestQueue(
            self.engine,
            self.outbox,
            ledger=self.ledger,
            observed=self.observed,
            progressed=self._progressed,
            ended=lambda request: self.ended.append(request.request_id),
        )

    def _progressed(self) -> None:
        self.progress += 1

    def open(self, request_id: str, *, mode: InputMode = InputMode.EXTEND) -> Request:
        request = make_request(request_id, mode=mode, observed=self.observed, ledger=self.ledger)
        self.queue.open(request)
        self.queue.append(request)
        return request

    def ask(self, *request_ids: str) -> list[Request]:
        """Open requests whose input is complete."""
        requests = [self.open(request_id) for request_id in request_ids]
        for request in requests:
            give_input(request, request.request_id)
        self.queue.wake()
        return requests

    def take(self) -> list[ServerMessage]:
        while (message := self.outbox.take()) is not None:
            self.messages.append(message)
        return self.messages

    @property
    def finals(self) -> list[tuple[str, str]]:
        finals = [message for message in self.take() if isinstance(message, FinalChunk)]
        return [(final.request_id, final.finish_reason.value) for final in finals]

    @property
    def errors(self) -> list[OmniError]:
        return [message for message in self.take() if isinstance(message, OmniError)]

    @property
    def texts(self) -> list[str]:
        return [message.text for message in self.take() if isinstance(message, OutputChunk)]

    @property
    def started(self) -> list[str]:
        return [message.request_id for message in self.take() if isinstance(message, ResponseStartedFrame)]


@asynccontextmanager
async def running(bench: Bench) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(bench.queue.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert bench.engine.active_requests == 0


def numbers(messages: Iterable[ServerMessage]) -> list[int]:
    return [message.sequence_id for message in messages if isinstance(message, OutputChunk | FinalChunk)]


def winding_up(released: asyncio.Event) -> Callable[[], object]:
    """The step of an engine that answers until it is cancelled, and then takes its time."""

    async def answer() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await released.wait()

    return answer


# order


async def test_requests_are_answered_in_the_order_of_their_opening() -> None:
    bench = Bench(TextOutput("answer"))
    async with running(bench) as run:
        first, second = bench.open("req_1"), bench.open("req_2")
        give_input(second, "later opened, first complete")
        bench.queue.wake()
        await asyncio.sleep(0)
        assert bench.started == []
        give_input(first, "hello")
        bench.queue.wake()
        bench.queue.close()
        await run
    assert bench.started == ["req_1", "req_2"]
    assert bench.finals == [("req_1", "stop"), ("req_2", "stop")]
    assert bench.ended == ["req_1", "req_2"]
    assert numbers(bench.messages) == [0, 1, 2, 3]


async def test_one_request_is_answered_at_a_time() -> None:
    gate = asyncio.Event()
    bench = Bench(gate.wait, TextOutput("answer"))
    async with running(bench) as run:
        first, second = bench.ask("req_1", "req_2")
        await until(lambda: bench.engine.active_requests == 1)
        assert (first.state, second.state) == (RequestState.ANSWERING, RequestState.WAITING)
        answered = [bench.queue.current]
        gate.set()
        bench.queue.close()
        await run
    assert [*answered, bench.queue.current] == [first, None]
    assert len(bench.engine.requests) == 2


async def test_what_a_request_leaves_is_history_for_the_next() -> None:
    bench = Bench(TextOutput("answer"))
    async with running(bench) as run:
        bench.ask("req_1", "req_2")
        bench.queue.close()
        await run
    assert bench.engine.requests[0].history == ()
    assert [message.text for message in bench.engine.requests[1].history] == ["req_1", "answer"]


async def test_a_request_is_found_by_its_id() -> None:
    bench = Bench(TextOutput("answer"))
    async with running(bench):
        bench.open("req_1")
        second = bench.open("req_2")
        assert (bench.queue.find("req_2"), bench.queue.find("req_3")) == (second, None)


async def test_the_request_that_waits_for_no_other_runs() -> None:
    bench = Bench(asyncio.Event().wait)
    async with running(bench):
        found = [bench.queue.stopped_by_cancel]
        first, second = bench.open("req_1"), bench.open("req_2")
        found.append(bench.queue.stopped_by_cancel)  # its input is open
        give_input(first, "hello")
        give_input(second, "hello")
        found.append(bench.queue.stopped_by_cancel)
        bench.queue.wake()
        await until(lambda: first.answering)
        found.append(bench.queue.stopped_by_cancel)
        bench.queue.cancel(first)
        found.append(bench.queue.stopped_by_cancel)  # the second waits until the engine has released the first
        await until(lambda: second.answering)
        assert [*found, bench.queue.stopped_by_cancel] == [None, None, first, first, None, second]


# cancellation and interruption


async def test_a_request_that_is_cancelled_before_it_is_answered_never_reaches_the_engine() -> None:
    bench = Bench(TextOutput("answer"))
    async with running(bench) as run:
        first, _ = bench.ask("req_1", "req_2")
        bench.queue.cancel(first)
        assert bench.finals == []
        bench.queue.close()
        await run
    assert bench.finals == [("req_1", "cancelled"), ("req_2", "stop")]
    assert bench.started == ["req_2"]
    assert len(bench.engine.requests) == 1


async def test_a_request_that_is_cancelled_while_it_waits_has_its_final_in_its_order() -> None:
    gate = asyncio.Event()
    bench = Bench(gate.wait, TextOutput("answer"))
    async with running(bench) as run:
        first, second = bench.ask("req_1", "req_2")
        await until(lambda: first.answering)
        bench.queue.cancel(second)
        bench.queue.cancel(second)
        await asyncio.sleep(0)
        assert bench.finals == []
        gate.set()
        bench.queue.close()
        await run
    assert bench.finals == [("req_1", "stop"), ("req_2", "cancelled")]


async def test_a_request_that_is_cancelled_while_it_is_answered_has_its_final_at_once() -> None:
    bench = Bench(TextOutput("sent"), asyncio.Event().wait)
    async with running(bench):
        (request,) = bench.ask("req_1")
        await until(lambda: len(bench.outbox) == 2)
        bench.take()
        bench.queue.cancel(request)
        assert bench.finals == [("req_1", "cancelled")]
        assert request.state is RequestState.FINISHED
        assert not bench.queue.requests
    assert numbers(bench.messages) == [0, 1]
    assert [message.text for message in bench.ledger.messages(now=0)] == ["req_1", "sent"]


async def test_a_cancellation_takes_back_what_was_not_sent() -> None:
    bench = Bench(TextOutput("one"), TextOutput("two"), asyncio.Event().wait)
    async with running(bench):
        (request,) = bench.ask("req_1")
        await until(lambda: len(bench.outbox) == 3)
        bench.messages += filter(None, [bench.outbox.take(), bench.outbox.take()])
        bench.queue.cancel(request)
    assert bench.texts == ["one"]
    assert numbers(bench.messages) == [0, 1]
    assert bench.ledger.messages(now=0)[-1].text == "one"


@pytest.mark.parametrize("session_ends", [False, True])
async def test_a_cancellation_settles_the_last_interim_transcript(session_ends: bool) -> None:
    bench = Bench(TranscriptOutput("so f", interim=True), asyncio.Event().wait)
    async with running(bench):
        (request,) = bench.ask("req_1")
        await until(lambda: len(bench.outbox) == 2)
        if session_ends:
            bench.queue.end_all(None)
        else:
            bench.queue.cancel(request)
    transcripts = [message for message in bench.take() if isinstance(message, OutputChunk)]
    assert [(one.text, one.interim) for one in transcripts] == [("so f", True), ("so f", False)]


async def test_the_words_of_an_answer_that_is_cut_as_it_begins_are_announced() -> None:
    bench = Bench()
    bench.engine = PlayingEngine([TranscriptOutput("some words")], **HEARS, hears_on=True)
    bench.engine.state = EngineState.OK
    bench.queue = bench.new_queue()
    async with running(bench):
        await asyncio.sleep(0)
        first = bench.open("req_1")
        first.spoke = True
        give_input(first, "typed, too")
        bench.queue.wake()
        await until(lambda: first.answering)
        assert bench.take() == [], "its task has not run"
        second = make_request("req_2", by_speech=True, observed=bench.observed, ledger=bench.ledger)
        bench.queue.open(second)
        bench.queue.interrupt(by=second)
        bench.queue.append(second)
        await until(lambda: bench.ended == ["req_1"])
    kinds = [type(message) for message in bench.take()]
    assert kinds[:3] == [ResponseStartedFrame, OutputChunk, FinalChunk]
    assert bench.started == ["req_1"]
    assert bench.texts == ["some words"]


async def test_the_next_request_waits_until_the_engine_has_released_a_cancelled_one() -> None:
    released = asyncio.Event()
    bench = Bench(winding_up(released))
    async with running(bench) as run:
        first, second = bench.ask("req_1", "req_2")
        await until(lambda: first.answering)
        await until(lambda: bench.engine.active_requests == 1)
        bench.queue.cancel(first)
        for _ in range(10):
            await asyncio.sleep(0)
        assert second.state is RequestState.WAITING
        bench.engine.script = ()
        released.set()
        bench.queue.close()
        await run
    assert bench.finals == [("req_1", "cancelled"), ("req_2", "stop")]


async def test_an_interruption_cancels_all_earlier_requests() -> None:
    bench = Bench(asyncio.Event().wait)
    async with running(bench) as run:
        first, second = bench.ask("req_1", "req_2")
        await until(lambda: first.answering)
        third = make_request("req_3", by_speech=True, observed=bench.observed)
        bench.queue.open(third)
        bench.queue.interrupt(by=third)
        bench.queue.append(third)
        assert bench.finals == [("req_1", "cancelled"), ("req_2", "cancelled")]
        bench.engine.script = ()
        give_input(third, "hello")
        bench.queue.wake()
        bench.queue.close()
        await run
    assert bench.finals == [("req_1", "cancelled"), ("req_2", "cancelled"), ("req_3", "stop")]
    for request in (first, second):
        (cancellation,) = request.timeline.cancellations
        assert (cancellation.by, cancellation.cause.value) == ("req_3", "speech")


async def test_interrupting_requests_do_not_pile_up_while_the_engine_winds_up() -> None:
    released = asyncio.Event()
    bench = Bench(winding_up(released))
    async with running(bench) as run:
        (first,) = bench.ask("req_0")
        await until(lambda: first.answering and bench.engine.active_requests == 1)
        requests = [first]
        for number in range(1, 100):
            newest = make_request(f"req_{number}", observed=bench.observed)
            bench.queue.open(newest)
            bench.queue.interrupt(by=newest)
            bench.queue.append(newest)
            give_input(newest, "hello")
            bench.queue.wake()
            requests.append(newest)
            await asyncio.sleep(0)
            assert bench.queue.requests == [newest]
        assert bench.engine.active_requests == 1
        assert bench.finals == [(f"req_{number}", "cancelled") for number in range(99)]
        assert [len(request.timeline.cancellations) for request in requests] == [1] * 99 + [0]
        bench.engine.script = ()
        released.set()
        bench.queue.close()
        await run
    assert bench.finals[99:] == [("req_99", "stop")]


async def test_a_request_that_waits_is_cancelled_once() -> None:
    gate = asyncio.Event()
    bench = Bench(gate.wait)
    async with running(bench) as run:
        first, second = bench.ask("req_1", "req_2")
        await until(lambda: first.answering)
        for _ in range(3):
            bench.queue.cancel(second)
        assert bench.finals == [], "in its order"
        gate.set()
        bench.queue.close()
        await run
    assert bench.finals == [("req_1", "stop"), ("req_2", "cancelled")]
    assert len(second.timeline.cancellations) == 1


# failure


async def test_an_error_precedes_the_final_and_the_next_request_is_answered() -> None:
    bench = Bench(EngineFailed("broken"))
    async with running(bench) as run:
        first, _ = bench.ask("req_1", "req_2")
        await until(lambda: first.state is RequestState.FINISHED)
        bench.engine.script = (TextOutput("answer"),)
        bench.queue.close()
        await run
    assert [(error.code, error.request_id) for error in bench.errors] == [("engine_failed", "req_1")]
    places = [type(message).__name__ for message in bench.messages]
    assert places.index("EngineFailed") == places.index("FinalChunk") - 1
    assert bench.finals == [("req_1", "error"), ("req_2", "stop")]
    assert [message.text for message in bench.engine.requests[1].history] == []


async def test_an_exception_of_the_engine_is_an_error_with_an_id() -> None:
    bench = Bench(ValueError("a bug"))
    async with running(bench) as run:
        bench.ask("req_1")
        bench.queue.close()
        await run
    (error,) = bench.errors
    assert error.code == "engine_failed"
    assert isinstance(error, EngineFailed)
    assert error.error_id
    assert "a bug" not in error.message


async def test_an_error_that_ends_the_session_is_raised_after_the_final() -> None:
    bench = Bench(EngineFailed("gone", fatal=True))
    async with running(bench) as run:
        bench.ask("req_1", "req_2")
        with pytest.raises(EngineFailed):
            await run
        assert bench.finals == [("req_1", "error")]


async def test_a_request_that_failed_before_its_start_has_its_error_in_its_order() -> None:
    gate = asyncio.Event()
    bench = Bench(gate.wait)
    async with running(bench) as run:
        first = bench.ask("req_1")[0]
        second = bench.open("req_2")
        second.fail(InvalidValue("odd"))
        bench.queue.wake()
        await until(lambda: first.answering)
        assert bench.finals == []
        gate.set()
        bench.queue.close()
        await run
    assert bench.finals == [("req_1", "stop"), ("req_2", "error")]
    assert len(bench.engine.requests) == 1


async def test_what_fails_behind_a_cancellation_is_not_reported() -> None:
    async def fail() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise EngineFailed("gone", fatal=True)

    bench = Bench(fail)
    async with running(bench) as run:
        (request,) = bench.ask("req_1")
        await until(lambda: bench.engine.active_requests == 1)
        bench.queue.cancel(request)
        bench.queue.close()
        await run
    assert (bench.errors, request.error) == ([], None)
    assert request.timeline.engine_end is not None
    assert request.timeline.engine_end.status == "engine_failed"


# frozen input, and the end


async def test_the_final_of_frozen_input_waits_for_its_end() -> None:
    bench = Bench(TextOutput("answer"))
    async with running(bench) as run:
        request = bench.open("req_1", mode=InputMode.SNAPSHOT)
        request.start(GenerationStarted(StartTrigger.FIRST_CHUNK, 0, (InputChunk(Modality.TEXT, b"hello", 0),)))
        bench.queue.wake()
        await until(lambda: request.state is RequestState.ANSWERED)
        assert bench.progress == 2
        assert (bench.texts, bench.finals) == (["answer"], [])
        end_input(request)
        bench.queue.close()
        await run
    assert bench.finals == [("req_1", "stop")]


async def test_a_closed_queue_answers_what_waits_and_returns() -> None:
    bench = Bench(TextOutput("answer"))
    async with running(bench) as run:
        bench.ask("req_1", "req_2", "req_3")
        bench.queue.close()
        await run
    assert [reason for _, reason in bench.finals] == ["stop"] * 3


async def test_an_empty_queue_returns_at_once_when_it_is_closed() -> None:
    bench = Bench()
    async with running(bench) as run:
        await asyncio.sleep(0)
        bench.queue.close()
        await run


async def test_the_end_of_a_session_ends_requests_in_any_state_once() -> None:
    bench = Bench(asyncio.Event().wait)
    async with running(bench) as run:
        first, second = bench.ask("req_1", "req_2")
        third = bench.open("req_3")
        await until(lambda: first.answering)
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)
        for request in (first, second, third, first):
            bench.queue.end(request, FinishReason.ERROR)
    assert bench.finals == [("req_1", "error"), ("req_2", "error"), ("req_3", "error")]
    assert not bench.queue.requests


async def test_a_cancel_means_the_next_request_while_a_withdrawn_one_winds_up() -> None:
    bench = Bench(TextOutput("hello"))
    async with running(bench):
        aside = make_request("sound", by_speech=True, observed=bench.observed, ledger=bench.ledger)
        bench.queue.open(aside)
        aside.is_aside(Onset("turn_1", 0, after_question=False, waits=bool, decide=lambda onset: None))
        bench.queue.listen_aside(aside)
        give_input(aside, "hm")
        bench.queue.wake()
        assert aside.answering
        (first,) = bench.ask("first")
        assert first.state is RequestState.WAITING
        stopped = [bench.queue.stopped_by_cancel]
        bench.queue.withdraw(aside)
        stopped.append(bench.queue.stopped_by_cancel)
        assert stopped == [None, first]
        await until(lambda: bench.finals == [("first", "stop")])

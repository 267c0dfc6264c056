"""A StepModel in a process of its own: sessions over the real socket, its death, its hanging, and its end."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from support.patience import PATIENCE_SEC, until
from support.step_models import REFUSED_TOKEN, SAMPLES_PER_FRAME

from omni_ws.engine import child
from omni_ws.engine.base import EngineState
from omni_ws.engine.child_main import HEAD_BYTES
from omni_ws.engine.omni import step_process
from omni_ws.engine.omni.step_process import (
    ROWS_PER_MESSAGE,
    AnswerEnd,
    AnswerRows,
    Codes,
    PromptReset,
    PromptRows,
    StepProcess,
    StepSession,
    VocoderInput,
)
from omni_ws.errors import EngineFailed, EngineOverloaded, InvalidValue

pytestmark = pytest.mark.asyncio(loop_scope="module")

TALKER = "support.step_models:row_talker"
TESTS = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _found_and_restarted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "FIRST_BACKOFF_SEC", 0.01)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS.parent), str(TESTS)]))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def talker() -> AsyncIterator[StepProcess]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(TESTS))
        process = StepProcess("Talker", TALKER, {"slots": 4})
        await process.start()
    yield process
    await process.stop()


def prompt(*tokens: int, states: int = 0) -> PromptRows:
    marked = np.arange(len(tokens)) < states
    positions = np.zeros((3, len(tokens)), np.int64)
    return PromptRows(np.array(tokens, np.int64), positions, marked, np.ones((states, 8), np.float32))


def rows(*tokens: int) -> AnswerRows:
    return AnswerRows(np.array(tokens, np.int64), np.zeros((0, 8), np.float32))


async def spoken(session: StepSession) -> list[list[int]]:
    return [frame for codes in [codes async for codes in session] for frame in codes.codes.tolist()]


async def next_codes(session: StepSession) -> Codes:
    return await anext(aiter(session))


async def test_a_session_makes_what_it_was_granted_of_what_it_was_fed(talker: StepProcess) -> None:
    async with talker.open({}) as session:
        await session.feed(prompt(5, 6))
        await session.feed(PromptReset())
        await session.feed(prompt(1, 2))
        await session.feed(prompt(3))
        await session.feed(rows(10, 11))
        assert (await talker.occupation()).busy is False
        session.grant(1)
        codes = await next_codes(session)
        assert (codes.codes.tolist(), codes.rows_used, codes.end) == ([[10, 6]], 1, None)
        assert (await talker.occupation()).busy is False
        session.grant(100)
        await session.feed(AnswerEnd())
        assert await spoken(session) == [[11, 6]]
    occupation = await talker.occupation()
    assert (occupation.sessions, occupation.busy, talker.open_sessions) == (0, False, 0)


@pytest.mark.parametrize("count", [ROWS_PER_MESSAGE, ROWS_PER_MESSAGE + 1, 900])
async def test_long_items_arrive_whole(talker: StepProcess, count: int) -> None:
    async with talker.open({}) as session:
        session.grant(count + 1)
        await session.feed(prompt(*range(count), states=count // 2))
        await session.feed(rows(*range(count)))
        await session.feed(AnswerEnd())
        total = sum(range(count))
        assert await spoken(session) == [[token, total] for token in range(count)]


async def test_sessions_at_the_same_time_do_not_mix(talker: StepProcess) -> None:
    async def speak(number: int) -> list[list[int]]:
        async with talker.open({}) as session:
            await session.feed(prompt(number))
            for token in range(20):
                await session.feed(rows(token))
                session.grant(1)
            await session.feed(AnswerEnd())
            return await spoken(session)

    answers = await asyncio.gather(*(speak(number) for number in range(4)))
    assert answers == [[[token, number] for token in range(20)] for number in range(4)]


async def test_one_session_more_than_slots_is_refused_as_overloaded(talker: StepProcess) -> None:
    async with talker.open({}), talker.open({}), talker.open({}), talker.open({}):
        with pytest.raises(EngineOverloaded, match="all 4 sessions of the Talker") as refusal:
            async with talker.open({}):
                pass
        assert refusal.value.retry_after_ms == 1000
    async with talker.open({}):
        pass


async def test_want_of_a_slot_in_the_process_is_the_same_refusal(talker: StepProcess) -> None:
    async with talker.open({}), talker.open({}), talker.open({}), talker.open({}):
        taken = dict(talker._sessions)
        talker._sessions.clear()
        with pytest.raises(EngineOverloaded):
            async with talker.open({}):
                pass
        talker._sessions.update(taken)


async def test_refused_settings_are_told_to_the_client(talker: StepProcess) -> None:
    with pytest.raises(InvalidValue, match="no such voice"):
        async with talker.open({"refuse": "no such voice"}):
            pass
    assert talker.open_sessions == 0


async def test_refused_input_ends_its_session_alone(talker: StepProcess) -> None:
    async with talker.open({}) as other, talker.open({}) as session:
        await session.feed(prompt(REFUSED_TOKEN))
        with pytest.raises(InvalidValue, match="nobody can say"):
            await next_codes(session)
        with pytest.raises(InvalidValue, match="nobody can say"):
            await session.feed(prompt(1))
        session.grant(1)
        assert (await talker.occupation()).sessions == 1
        await other.feed(rows(7))
        other.grant(1)
        assert (await next_codes(other)).codes.tolist() == [[7, 0]]


async def test_input_waits_while_too_much_is_on_its_way(talker: StepProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_process, "INPUT_BYTES", 4096)
    assert talker.pid is not None
    async with talker.open({}) as session:
        os.kill(talker.pid, signal.SIGSTOP)
        try:
            feeding = asyncio.create_task(feed_many(session))
            for _ in range(200):
                await asyncio.sleep(0)
            assert not feeding.done()
            (inner,) = talker._sessions.values()
            assert 4096 <= inner._on_the_way < 8192
        finally:
            os.kill(talker.pid, signal.SIGCONT)
        await asyncio.wait_for(feeding, PATIENCE_SEC)


async def feed_many(session: StepSession) -> None:
    for _ in range(100):
        await session.feed(prompt(*range(60)))


async def test_60_cancellations_at_any_moment_leave_nothing(talker: StepProcess) -> None:
    chance = random.Random(7)

    async def speak() -> None:
        async with talker.open({}) as session:
            await session.feed(prompt(1))
            session.grant(1000)
            while True:
                await session.feed(rows(*range(50)))
                await next_codes(session)

    for _ in range(60):
        task = asyncio.create_task(speak())
        for _ in range(chance.randrange(40)):
            await asyncio.sleep(0)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    occupation = await talker.occupation()
    assert (occupation.sessions, occupation.busy, talker.open_sessions) == (0, False, 0)


async def test_death_fails_all_sessions_and_another_process_serves(talker: StepProcess) -> None:
    before = talker.pid
    assert before is not None
    async with talker.open({}) as session, talker.open({}) as waiting:
        reading = [asyncio.create_task(spoken(one)) for one in (session, waiting)]
        await talker.occupation()
        os.kill(before, signal.SIGKILL)
        for task in reading:
            with pytest.raises(EngineFailed, match="the Talker died") as failure:
                await asyncio.wait_for(task, PATIENCE_SEC)
            assert (failure.value.fatal, failure.value.param) == (True, "tts")
        with pytest.raises(EngineFailed):
            await session.feed(prompt(1))
        session.grant(1)
        assert talker.state is EngineState.UNHEALTHY
        with pytest.raises(EngineFailed, match="not available"):
            async with talker.open({}):
                pass
        with pytest.raises(EngineFailed, match="not available"):
            await talker.occupation()
    await until(lambda: talker.state is EngineState.OK)
    assert talker.pid != before
    async with talker.open({}) as session:
        await session.feed(rows(3))
        session.grant(1)
        assert (await next_codes(session)).codes.tolist() == [[3, 0]]


async def test_a_process_that_does_not_come_back_is_tried_again(
    talker: StepProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = talker._load
    talker._load = type(load)(load.factory, {"fails": "defect"})
    assert talker.pid is not None
    failures: list[str] = []
    monkeypatch.setattr(child.log, "error", lambda text, *values: failures.append(text % values))
    os.kill(talker.pid, signal.SIGKILL)
    await until(lambda: any("ZeroDivisionError: a defect" in failure for failure in failures))
    talker._load = load
    await until(lambda: talker.state is EngineState.OK)


async def test_a_process_that_hangs_is_killed(talker: StepProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_process, "WATCH_SEC", 0.01)
    monkeypatch.setattr(step_process, "SILENCE_SEC", 0.2)
    pid = talker.pid
    assert pid is not None
    # The process's own watch is on its longer round still.
    watch = asyncio.create_task(talker._watch())
    async with talker.open({}) as session:
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(EngineFailed, match="the Talker died"):
            await asyncio.wait_for(spoken(session), PATIENCE_SEC)
    watch.cancel()
    await until(lambda: talker.state is EngineState.OK)


async def test_bytes_that_are_no_message_end_the_process(talker: StepProcess) -> None:
    assert talker._child is not None
    stdout = talker._child._process.stdout
    assert stdout is not None
    stdout.feed_data(b"\xff" * HEAD_BYTES)
    await until(lambda: talker.state is EngineState.UNHEALTHY)
    await until(lambda: talker.state is EngineState.OK)


async def test_stopping_fails_sessions_and_leaves_no_process() -> None:
    process = StepProcess("Talker", TALKER, {})
    await process.start()
    pid = process.pid
    assert pid is not None
    async with process.open({}) as session:
        reading = asyncio.create_task(anext(session.made))
        await asyncio.sleep(0)
        await process.stop()
        with pytest.raises(EngineFailed, match="has stopped"):
            await reading
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert process.state is EngineState.STARTING
    await process.stop()


async def test_a_model_that_cannot_be_loaded_says_why() -> None:
    process = StepProcess("Talker", TALKER, {"fails": "unusable"})
    with pytest.raises(EngineFailed, match="not for you"):
        await process.start()
    assert process.pid is None
    await process.stop()


async def test_a_process_that_ends_while_it_starts_says_so() -> None:
    process = StepProcess("Talker", "os:_exit", {"status": 3})
    with pytest.raises(EngineFailed, match="its process ended"):
        await process.start()


async def test_a_server_that_is_killed_takes_the_process_along() -> None:
    """Also one that is in the middle of loading."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        script = f"""
            import asyncio
            from omni_ws.engine.omni.step_process import StepProcess
            asyncio.run(StepProcess("Talker", "support.step_models:connect_and_wait", {{"port": {port}}}).start())
        """
        server = await asyncio.create_subprocess_exec(sys.executable, "-c", textwrap.dedent(script))
        listener.setblocking(False)
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(PATIENCE_SEC):
            connection, _ = await loop.sock_accept(listener)
            with connection:
                server.kill()
                await server.wait()
                # The process has ended, and with it its connection.
                assert await loop.sock_recv(connection, 1) == b""


async def test_a_vocoder_decodes_and_measures_itself() -> None:
    process = StepProcess("vocoder", "support.step_models:level_vocoder", {})
    await process.start()
    assert process.ms_per_frame == 0
    async with process.open({}) as session:
        samples = await session.decode(VocoderInput(np.array([[1], [2]], np.int64)))
        assert len(samples) == 2 * SAMPLES_PER_FRAME
        assert samples[[0, -1]].tolist() == pytest.approx([0.001, 0.002])
        measured = process.ms_per_frame
        assert measured > 0
        assert not len(await session.decode(VocoderInput(np.zeros((0, 1), np.int64), last=True)))
        assert process.ms_per_frame == measured
        with pytest.raises(InvalidValue, match="not negative"):
            await session.decode(VocoderInput(np.array([[-1]], np.int64)))
    await process.stop()

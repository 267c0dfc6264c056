"""A model in several parts, on this machine and behind TCP, and two servers of one model."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import shlex
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support.commands import forked_command, forked_vllm_command, says_it_listens, until_nothing_is_left
from support.engine_answers import Input
from support.patience import until
from support.vllm_engine import STARTS_WITHIN_SEC, answer, llm_of, request, running_engine, until_state

from benchmarks.server_process import free_port
from omni_ws.config.model import VllmConfig
from omni_ws.engine.base import EngineState
from omni_ws.engine.vllm.engine import VllmEngine
from omni_ws.errors import EngineFailed

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

LONG: Mapping[str, Any] = {"temperature": 0.0, "max_tokens": 400}
#: Takes longer than a death takes to be noticed.
LONGEST: Mapping[str, Any] = {"temperature": 0.0, "max_tokens": 1900}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from support.tiny_models import build_text_model

    return build_text_model(tmp_path_factory.mktemp("text-model"))


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A core for each part."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def alone(model: Path) -> str:
    """What the model answers as one process."""
    from support.tiny_models import ENGINE_ARGS

    async with running_engine(model, ENGINE_ARGS) as engine:
        text, _ = await answer(engine, Input("Hello"))
    return text


def at_work(engine: VllmEngine) -> set[int]:
    """The copies that have a request."""
    busy = llm_of(engine).engine_core.reqs_in_flight.values()
    return {int.from_bytes(copy, "little") for copy in busy}


async def both_work(engine: VllmEngine, sampling: Mapping[str, Any]) -> list[asyncio.Task[tuple[str, Any]]]:
    """Answers that run, of each copy at least one: vLLM may give two that come at once to the same copy."""
    asking: list[asyncio.Task[tuple[str, Any]]] = []

    def given() -> bool:
        return len(llm_of(engine).engine_core.reqs_in_flight) >= sum(not one.done() for one in asking)

    while at_work(engine) != {0, 1}:
        asking.append(asyncio.create_task(answer(engine, Input("Hello"), sampling=sampling)))
        await until(given)
    return [one for one in asking if not one.done()]


async def both_answer(engine: VllmEngine, alone: str) -> None:
    """Both copies give answers, and each says what one process says."""
    for text, _ in await asyncio.gather(*await both_work(engine, LONG)):
        assert text.startswith(alone)


async def test_two_parts_of_a_model_answer_as_one(model: Path, alone: str) -> None:
    from support.tiny_models import ENGINE_ARGS

    async with running_engine(model, {**ENGINE_ARGS, "tensor_parallel_size": 2}) as engine:
        assert (await answer(engine, Input("Hello")))[0] == alone


async def test_two_copies_of_a_model_share_the_answers_and_the_death_of_one(model: Path, alone: str) -> None:
    from support.tiny_models import ENGINE_ARGS

    async with running_engine(model, {**ENGINE_ARGS, "data_parallel_size": 2}) as engine:
        await both_answer(engine, alone)
        asking = await both_work(engine, LONGEST)
        os.kill(llm_of(engine).engine_core.resources.engine_manager.processes[1].pid, signal.SIGKILL)
        ends = await asyncio.gather(*asking, return_exceptions=True)
        failures = [end for end in ends if isinstance(end, BaseException)]
        assert failures  # an answer of the other copy may end before the death is noticed
        for failure in failures:
            assert isinstance(failure, EngineFailed)
            assert failure.fatal
            assert str(failure).startswith(("the Thinker died", "the Thinker is not available"))
        await until_state(engine, EngineState.OK)
        await both_answer(engine, alone)


def behind_tcp(port: int) -> dict[str, Any]:
    from support.tiny_models import ENGINE_ARGS

    elsewhere = {"data_parallel_size": 2, "data_parallel_size_local": 1, "data_parallel_rpc_port": port}
    return {**ENGINE_ARGS, **elsewhere, "data_parallel_address": "127.0.0.1"}


async def line_to_type(caplog: pytest.LogCaptureFixture, times: int = 1) -> list[str]:
    """The line that the log gives for the other machine, in the ``times``-th start."""

    def told() -> list[str]:
        messages = [record.getMessage() for record in caplog.records]
        return [one for one in messages if one.startswith("the Thinker waits for 1 of its 2 copies")]

    await until(lambda: len(told()) >= times, seconds=STARTS_WITHIN_SEC)
    where, _, line = told()[-1].partition("; type there: ")
    assert "tcp://127.0.0.1:" in where
    program, *arguments = shlex.split(line)
    assert (program, arguments[0]) == ("omni-ws", "vllm-node")
    return arguments


@contextmanager
def node(arguments: list[str], log: Path) -> Iterator[BaseProcess]:
    """The other machine."""
    process = forked_command(arguments, log)
    try:
        yield process
    finally:
        process.kill()
        process.join()


@pytest.fixture
def engine_behind_tcp(model: Path) -> Callable[[int], VllmEngine]:
    return lambda port: VllmEngine(VllmConfig(model=str(model), args=behind_tcp(port)))


async def test_a_copy_here_and_one_behind_tcp(
    engine_behind_tcp: Callable[[int], VllmEngine],
    alone: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The other machine is waited for, is lost and is found again; and it waits for the next server itself."""
    port = free_port()
    first = engine_behind_tcp(port)
    starting = asyncio.create_task(first.start())
    try:
        arguments = await line_to_type(caplog)
        with node(arguments, tmp_path / "first") as lost:
            await starting
            assert "copy 1 of the Thinker has come, and loads" in caplog.messages
            await both_answer(first, alone)
            asking = await both_work(first, LONGEST)
            lost.kill()
            # An answer of the copy here may end before the loss of the other is known.
            ends = await asyncio.gather(*asking, return_exceptions=True)
            died = [end for end in ends if isinstance(end, BaseException)]
            assert {type(end) for end in died} == {EngineFailed}
            assert "the Thinker died" in {str(end) for end in died}
            assert first.state is EngineState.UNHEALTHY
            await until_nothing_is_left(lost)
        assert await line_to_type(caplog, times=2) == arguments
        with node(arguments, tmp_path / "second") as found:
            await until_state(first, EngineState.OK)
            await both_answer(first, alone)
            await first.stop()
            second = engine_behind_tcp(port)
            try:
                await second.start()
                await both_answer(second, alone)
            finally:
                await second.stop()
            found.terminate()
            await asyncio.to_thread(found.join)
            assert found.exitcode == 0
            await until_nothing_is_left(found)
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await first.stop()


async def test_a_start_that_waits_can_be_given_up(
    engine_behind_tcp: Callable[[int], VllmEngine], caplog: pytest.LogCaptureFixture
) -> None:
    others = set(multiprocessing.active_children())
    engine = engine_behind_tcp(free_port())
    starting = asyncio.create_task(engine.start())
    await line_to_type(caplog)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert engine.state is EngineState.STARTING
    await until(lambda: not set(multiprocessing.active_children()) - others)
    await until(lambda: not any(thread.name == "Thinker start" for thread in threading.enumerate()))


@asynccontextmanager
async def two_servers(model: Path, folder: Path) -> AsyncIterator[list[tuple[BaseProcess, str]]]:
    """Two servers of one model, and their addresses."""
    servers = [forked_vllm_command(folder, model, folder / f"errors-{number}") for number in range(2)]
    try:
        found = []
        for number, server in enumerate(servers):
            errors = folder / f"errors-{number}"
            await until(partial(says_it_listens, errors), seconds=STARTS_WITHIN_SEC)
            found.append((server, errors.read_text().partition("listens on ")[2].split()[0].rstrip(",;") + "/v1"))
        yield found
    finally:
        for server in servers:
            server.kill()
            await asyncio.to_thread(server.join)


async def test_of_two_upstreams_the_death_of_one_ends_its_own_answers_only(
    model: Path, alone: str, tmp_path: Path
) -> None:
    pytest.importorskip("httpx", reason="the remote engine's client is not installed")
    from support.engine_answers import said, streamed

    from omni_ws.config.model import RemoteConfig
    from omni_ws.engine.base import TextOutput
    from omni_ws.engine.remote.engine import RemoteEngine

    async with two_servers(model, tmp_path) as servers:
        engine = RemoteEngine(RemoteConfig(upstreams=tuple(address for _, address in servers)))
        await engine.start()
        try:
            begun = [streamed(engine, request(Input("Hello"), sampling=LONGEST)) for _ in range(4)]
            for one in begun:
                assert isinstance(await anext(one), TextOutput)
            ends = [asyncio.create_task(rest(one)) for one in begun]
            servers[0][0].kill()
            await asyncio.to_thread(servers[0][0].join)
            async with aclosing(streamed(engine, request(Input("Hello"), sampling=LONG))) as new:
                outputs = [output async for output in new]
            assert said(outputs).startswith(alone)
            failed = [one for one in await asyncio.gather(*ends, return_exceptions=True)]
            assert [isinstance(one, EngineFailed) for one in failed].count(True) == 2
            assert failed.count(1900) == 2
        finally:
            await engine.stop()


async def rest(outputs: AsyncIterator[Any]) -> int:
    """The tokens of an answer that is read to its end."""
    from support.engine_answers import final

    tokens: int = final([output async for output in outputs]).usage.output_tokens
    return tokens


def test_what_is_waited_for_and_where(model: Path) -> None:
    from omni_ws.config import load
    from omni_ws.engine.vllm.language_model import LanguageModel, elsewhere

    def needed(**args: Any) -> str:
        given = {"model": str(model), **args}
        return str(elsewhere(LanguageModel("Thinker", given, setting="vllm.args").engine_args(), given))

    assert needed() == needed(data_parallel_size=2) == needed(tensor_parallel_size=2) == "None"
    assert needed(data_parallel_size=2, data_parallel_size_local=1, data_parallel_hybrid_lb=True) == "None"
    assert needed(data_parallel_size=2, data_parallel_size_local=1, data_parallel_backend="ray") == "None"
    nodes = needed(nnodes=2, tensor_parallel_size=2, master_addr="10.0.0.1")
    assert nodes.startswith("another machine at tcp://10.0.0.1:29501; type there: omni-ws vllm-node --model ")
    assert nodes.endswith(" --vllm.args.master_addr 10.0.0.1 --vllm.args.node_rank 1")
    here = needed(data_parallel_size=4, data_parallel_size_local=1)
    assert here.startswith("3 of its 4 copies, on another machine, at tcp://127.0.0.1:29550 (which only this machine")
    given = {"served_model_name": "4", "limit_mm_per_prompt": {"image": 2}, "enforce_eager": True, "dtype": "float32"}
    reached = {"data_parallel_address": "10.0.0.1", "data_parallel_rpc_port": 7000}
    where, _, line = needed(**given, **reached, data_parallel_size=4, data_parallel_size_local=1).partition("; type")
    assert where.endswith("at tcp://10.0.0.1:7000")
    vllm = load(shlex.split(line)[3:], {}).config.vllm
    local = {"data_parallel_size": 4, "data_parallel_size_local": 3, "data_parallel_start_rank": 1}
    assert (vllm.model, vllm.args) == (str(model), {**given, **reached, **local})

"""The death of a model's process."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from support.engine_answers import Input
from support.live_server import LiveServer, live_server
from support.patience import PATIENCE_SEC, until
from support.raw_http import post, raw_client
from support.raw_http import request as http_request
from support.vllm_engine import answer, core_process, plain_answer, running_engine, unfinished, until_state

from omni_ws.engine.base import EngineState
from omni_ws.engine.vllm.engine import VllmEngine
from omni_ws.errors import EngineFailed

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from support.tiny_models import build_text_model

    return build_text_model(tmp_path_factory.mktemp("text-model"))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine(model: Path) -> AsyncIterator[VllmEngine]:
    from support.tiny_models import ENGINE_ARGS

    async with running_engine(model, ENGINE_ARGS) as engine:
        yield engine


async def test_a_request_of_a_process_that_hangs_can_be_left_and_the_next_one_is_answered(engine: VllmEngine) -> None:
    """As the time-out of the first byte leaves it. vLLM is told then, and does not have to reply."""
    before = await plain_answer(engine, "user: Hello\nassistant:")
    os.kill(core_process(engine), signal.SIGSTOP)
    try:
        for source in (Input("Hello"), Input("I am still speaking", open_end=True)):
            asking = asyncio.create_task(answer(engine, source))
            await until(lambda: unfinished(engine) == 1)
            asking.cancel()
            async with asyncio.timeout(PATIENCE_SEC):
                await asyncio.gather(asking, return_exceptions=True)
            assert (engine.active_requests, unfinished(engine)) == (0, 0)
    finally:
        os.kill(core_process(engine), signal.SIGCONT)
    assert engine.state is EngineState.OK
    text, _ = await answer(engine, Input("Hello"))
    assert text == before


async def test_a_death_while_answering_fails_the_answer_and_the_next_ones_until_it_is_back(engine: VllmEngine) -> None:
    before = await plain_answer(engine, "user: Hello\nassistant:")
    task = asyncio.create_task(answer(engine, Input("Hello"), sampling={"temperature": 0.0}))
    speech = Input("I am still speaking", open_end=True)
    waiting = asyncio.create_task(answer(engine, speech))
    await until(lambda: unfinished(engine) == 2)
    os.kill(core_process(engine), signal.SIGKILL)
    await until_state(engine, EngineState.UNHEALTHY)
    speech.close()  # where all of it was computed before, nothing else asks the dead process
    for failing in (task, waiting):
        with pytest.raises(EngineFailed) as failure:
            await asyncio.wait_for(failing, PATIENCE_SEC)
        assert failure.value.fatal
    assert engine.state is EngineState.UNHEALTHY
    with pytest.raises(EngineFailed) as failure:
        await answer(engine, Input("Hello"))
    assert failure.value.fatal
    assert engine.active_requests == 0

    await until_state(engine, EngineState.OK)
    text, _ = await answer(engine, Input("Hello"))
    assert text == before
    assert engine._shared is not None
    assert engine._shared.budget.slots == 4


async def test_a_death_is_noticed_while_nothing_runs(engine: VllmEngine) -> None:
    os.kill(core_process(engine), signal.SIGKILL)
    await until_state(engine, EngineState.UNHEALTHY)
    await until_state(engine, EngineState.OK)
    await answer(engine, Input("Hello"))


async def test_the_server_tells_of_it_and_stopping_leaves_no_process(engine: VllmEngine) -> None:
    async with live_server(engine, expect_errors=True, still_answers=False) as server:
        assert await health(server) == (200, "ok")
        os.kill(core_process(engine), signal.SIGKILL)
        await until_state(engine, EngineState.UNHEALTHY)
        assert await health(server) == (503, "unhealthy")
        refused = await post(server.port, "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]})
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        await until_state(engine, EngineState.OK)
        assert await health(server) == (200, "ok")
        pid = core_process(engine)
        os.kill(pid, 0)
        answering = asyncio.create_task(answer(engine, Input("Hello"), sampling={"temperature": 0.0}))
        await until(lambda: unfinished(engine) == 1)
        await engine.stop()
        with pytest.raises(EngineFailed):
            await asyncio.wait_for(answering, PATIENCE_SEC)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert engine.state is EngineState.STARTING
    await engine.stop()


async def health(server: LiveServer) -> tuple[int, str]:
    async with raw_client(server.port) as client:
        await client.send(http_request("GET", "/health", "Connection: close"))
        response = await client.response()
    return response.status, response.json()["status"]


async def test_answers_that_are_no_numbers_end_where_vllm_was_asked_to_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model starts well; a single character makes its logits NaN."""
    from safetensors.torch import load_file, save_file
    from support.tiny_models import ENGINE_ARGS, build_text_model
    from transformers import AutoTokenizer

    folder = build_text_model(tmp_path / "model")
    (letter,) = AutoTokenizer.from_pretrained(folder).encode("~", add_special_tokens=False)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][letter] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    for name in ("VLLM_COMPUTE_NANS_IN_LOGITS", "VLLM_RAISE_ON_LOGIT_NANS"):
        monkeypatch.setenv(name, "1")
    async with running_engine(folder, ENGINE_ARGS) as engine:
        before, _ = await answer(engine, Input("Hello"))
        with pytest.raises(EngineFailed) as failure:
            await answer(engine, Input("Hello ~"))
        assert failure.value.fatal
        await until_state(engine, EngineState.OK)
        assert (await answer(engine, Input("Hello")))[0] == before


async def test_a_process_that_ends_just_as_it_is_killed_leaves_nothing(model: Path) -> None:
    """vLLM's own shutdown fails where the process is gone before its children are counted."""
    from psutil import NoSuchProcess, pid_exists
    from support.tiny_models import ENGINE_ARGS

    before = asyncio.all_tasks()
    async with running_engine(model, ENGINE_ARGS) as engine:
        process = core_process(engine)

        def gone(timeout: float) -> None:
            raise NoSuchProcess(process)

        engine._thinker.llm.shutdown = gone
    assert not pid_exists(process)
    assert not asyncio.all_tasks() - before

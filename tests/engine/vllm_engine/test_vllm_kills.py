"""What is left of a server with a model of several parts when it is killed."""

from __future__ import annotations

import asyncio
import random
import sys
from functools import partial
from pathlib import Path

import pytest
from support.commands import (
    forked_vllm_command,
    left_of,
    running,
    says_it_listens,
    until_nothing_is_left,
    vllm_configuration,
)
from support.patience import until
from support.vllm_engine import STARTS_WITHIN_SEC

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

KILLS = 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from support.tiny_models import build_text_model

    return build_text_model(tmp_path_factory.mktemp("text-model"))


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A core for each part."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")


async def test_a_server_that_is_killed_at_any_moment_leaves_no_process(model: Path, tmp_path: Path) -> None:
    """Half of the moments are in the start, the others soon after it."""
    loop, moments = asyncio.get_running_loop(), random.Random(42)
    took = 0.0
    for number in range(KILLS):
        errors = tmp_path / f"errors-{number}"
        began = loop.time()
        server = forked_vllm_command(tmp_path, model, errors, data_parallel_size=2)
        try:
            if number % 2:
                await asyncio.sleep(moments.uniform(0, took))
            else:
                await until(partial(says_it_listens, errors), seconds=STARTS_WITHIN_SEC)
                took = loop.time() - began
                assert server.pid is not None
                assert len(left_of(server.pid)) >= 5, "the server, two copies, what counts their requests, the reaper"
                await asyncio.sleep(moments.uniform(0, 0.2))
        finally:
            server.kill()
            await asyncio.to_thread(server.join)
        await until_nothing_is_left(server)


async def test_the_parts_of_a_model_that_loads_die_with_the_server(model: Path, tmp_path: Path) -> None:
    """With a fresh interpreter for each process, as the server itself starts them."""
    configuration = vllm_configuration(tmp_path, model, tensor_parallel_size=2)
    with (tmp_path / "errors").open("wb") as errors:
        command = (sys.executable, "-m", "omni_ws", "serve", "--config", configuration)
        async with running(*command, start_new_session=True, stderr=errors, stdout=errors) as server:

            def parts() -> list[str]:
                return [title for title in left_of(server.pid).values() if title.startswith("VLLM::Worker")]

            await until(lambda: len(parts()) == 2 or server.returncode is not None, seconds=STARTS_WITHIN_SEC)
            assert server.returncode is None, (tmp_path / "errors").read_text()
            server.kill()
            await server.wait()
            await until_nothing_is_left(server)

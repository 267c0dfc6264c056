"""A failed start gives the reason and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.commands import forked_vllm_command, run_command
from support.patience import PATIENCE_SEC, until
from support.vllm_engine import STARTS_WITHIN_SEC

from omni_ws.config.model import VllmConfig
from omni_ws.config.values import ConfigurationError
from omni_ws.engine.base import EngineState
from omni_ws.engine.vllm.engine import VllmEngine
from omni_ws.engine.vllm.language_model import _in_daemon_thread
from omni_ws.errors import EngineFailed


def test_a_model_is_needed() -> None:
    with pytest.raises(ConfigurationError, match="model"):
        VllmEngine(VllmConfig())


def test_settings_of_a_talker_need_a_talker() -> None:
    with pytest.raises(ConfigurationError, match="talker"):
        VllmEngine(VllmConfig(model="some/model", talker_args={"dtype": "float32"}))


@pytest.mark.parametrize(("model", "name"), [("some/model", "some/model"), (".", "")])
def test_a_folder_is_announced_by_its_name(model: str, name: str) -> None:
    assert VllmEngine(VllmConfig(model=model)).model == name


@pytest.mark.parametrize(("args", "by_priority"), [({}, True), ({"scheduling_policy": "fcfs"}, False)])
def test_the_order_of_work_is_by_priority_unless_the_operator_says_otherwise(
    args: dict[str, Any], by_priority: bool
) -> None:
    assert VllmEngine(VllmConfig(model="some/model", args=args)).capabilities.priority is by_priority


@pytest.mark.parametrize("parser", [None, "hermes"])
def test_tools_are_there_where_a_parser_is(parser: str | None) -> None:
    assert VllmEngine(VllmConfig(model="some/model", tool_parser=parser)).capabilities.tools is (parser is not None)


def test_the_stages_of_an_answer() -> None:
    assert VllmEngine(VllmConfig(model="some/model")).capabilities.stages == ("thinker",)
    speaking = VllmEngine(VllmConfig(model="some/model", talker="canopylabs/orpheus-3b-0.1-ft"))
    assert speaking.capabilities.stages == ("thinker", "talker", "code2wav")


@pytest.mark.parametrize("passes", [0, 1], ids=["before the result is told", "in the same pass"])
async def test_what_is_made_for_a_start_that_is_cancelled_is_discarded(passes: int) -> None:
    made, discarded, results = threading.Event(), threading.Event(), list[str]()

    def make() -> str:
        made.set()
        return "process"

    def discard(process: str) -> None:
        results.append(process)
        discarded.set()

    starting = asyncio.create_task(_in_daemon_thread(make, discard, lambda thread: None, name="start of a test"))
    await asyncio.sleep(0)
    for thread in threading.enumerate():
        if thread.name == "start of a test":
            thread.join(PATIENCE_SEC)  # which keeps the loop from its next pass
    assert made.is_set()
    for _ in range(passes):
        await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert await asyncio.to_thread(discarded.wait, PATIENCE_SEC)
    assert results == ["process"]


async def test_a_start_that_fails_in_the_pass_in_which_it_is_cancelled_is_cancelled() -> None:
    def fail() -> str:
        raise OSError("no memory")

    starting = asyncio.create_task(_in_daemon_thread(fail, print, print, name="start of a test"))
    await asyncio.sleep(0)
    for thread in threading.enumerate():
        if thread.name == "start of a test":
            thread.join(PATIENCE_SEC)  # which keeps the loop from its next pass
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting


@pytest.mark.vllm
@pytest.mark.slow
class TestWithVllm:
    async def failure(self, model: Path | str, args: dict[str, Any]) -> Exception:
        engine = VllmEngine(VllmConfig(model=str(model), args=args))
        with pytest.raises((EngineFailed, ConfigurationError)) as failure:
            await engine.start()
        assert engine.state is EngineState.STARTING
        assert engine._thinker._running is None
        assert engine._decoding is None
        return failure.value

    async def test_arguments_that_vllm_does_not_know(self, tmp_path: Path) -> None:
        error = await self.failure(tmp_path, {"max_modle_len": 5})
        assert "vllm.args.max_modle_len: unknown vLLM argument; did you mean max_model_len?" in str(error)

    async def test_a_model_that_is_not_there(self, tmp_path: Path) -> None:
        error = await self.failure(tmp_path / "nowhere", {})
        assert isinstance(error, EngineFailed)
        assert "the Thinker failed to start" in error.message

    async def test_weights_that_give_no_numbers(self, tmp_path: Path) -> None:
        from safetensors.torch import load_file, save_file
        from support.tiny_models import ENGINE_ARGS, build_text_model

        folder = build_text_model(tmp_path / "model")
        weights = load_file(folder / "model.safetensors")
        weights["model.norm.weight"][0] = float("nan")
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        error = await self.failure(folder, dict(ENGINE_ARGS))
        assert isinstance(error, EngineFailed)
        assert "NaN" in error.message

    @pytest.mark.parametrize(
        ("content", "what"),
        [
            (None, "cannot be read: No such file or directory"),
            (b"\xff", "is not valid UTF-8"),
            (b"{# a comment #}" + b" " * (1 << 20), "must not exceed 1048576 bytes"),
            (b"one\n{% for m in messages %}", "is not a valid chat template: line 2: "),
            (b"{{ messages[7].content.text }}", "is not a valid chat template: "),
            (b"Answer!", "does not render the user's message"),
        ],
    )
    async def test_a_bad_chat_template_is_refused_before_the_model_is_loaded(
        self, tmp_path: Path, content: bytes | None, what: str
    ) -> None:
        template = tmp_path / "chat.jinja"
        if content is not None:
            template.write_bytes(content)
        engine = VllmEngine(VllmConfig(model=str(tmp_path / "nowhere"), chat_template=template))
        with pytest.raises(ConfigurationError) as failure:
            await engine.start()
        (problem,) = failure.value.problems
        assert problem.startswith(f"vllm.chat_template: {template} ")
        assert what in problem
        assert engine._decoding is None

    def test_a_chat_template_of_just_the_largest_size(self, tmp_path: Path) -> None:
        from omni_ws.engine.vllm.checkpoint import MAX_BYTES, read_chat_template

        written = "{{ bos_token + messages[0]['content'] }}".ljust(MAX_BYTES)
        (tmp_path / "chat.jinja").write_text(written)
        assert read_chat_template(tmp_path / "chat.jinja") == written

    async def test_the_command_ends_with_status_1_and_says_why(self, tmp_path: Path) -> None:
        from support.tiny_models import build_text_model

        model = build_text_model(tmp_path / "model")
        (model / "model.safetensors").write_bytes(b"no weights")
        process = forked_vllm_command(tmp_path, model, tmp_path / "errors")
        try:
            await asyncio.to_thread(process.join, STARTS_WITHIN_SEC)
        finally:
            process.kill()
        errors = (tmp_path / "errors").read_text()
        assert process.exitcode == 1, errors
        assert "omni-ws serve: error: LLM (vllm): the Thinker failed to start" in errors
        assert "listens on" not in errors
        assert process.pid is not None
        await until(partial(is_gone, process.pid))

    async def test_the_command_ends_with_status_2_where_a_setting_is_wrong(self, tmp_path: Path) -> None:
        settings = ["--model", str(tmp_path / "nowhere"), "--vllm.chat-template", str(tmp_path / "absent")]
        command = [sys.executable, "-m", "omni_ws", "serve", "--engine", "vllm", "--port", "0", "--grpc-port", "0"]
        ended = await run_command(*command, *settings)
        assert ended.status == 2
        assert "vllm.chat_template" in ended.errors
        assert "Traceback" not in ended.errors


def is_gone(group: int) -> bool:
    """Whether no process of the group is alive."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False

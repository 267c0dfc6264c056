"""What ``omni-ws vllm-node`` refuses, before vLLM is looked at."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import pytest
from support.commands import run_here

from omni_ws.cli import main


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "a model is needed: --model NAME-OR-FOLDER"),
        (["--model", "some/model", "--no-such-flag"], "unknown flag --no-such-flag"),
        (["--config", "/no/such/file.toml"], "/no/such/file.toml"),
    ],
)
def test_wrong_usage(arguments: Sequence[str], problem: str) -> None:
    ended = run_here(main, "vllm-node", *arguments)
    assert ended.status == 2
    assert ended.errors.startswith("omni-ws vllm-node: error: ")
    assert problem in ended.errors


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_it_says_how_to_install_vllm() -> None:
    ended = run_here(main, "vllm-node", "--model", "some/model")
    assert ended.status == 2
    assert "the vllm engine needs vLLM: 'make serve ENGINE=vllm" in ended.errors


def test_help() -> None:
    ended = run_here(main, "vllm-node", "--help")
    assert ended.status == 0
    assert "--vllm.args.<name> VALUE" in ended.output

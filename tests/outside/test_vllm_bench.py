"""``vllm bench serve`` as a load client of both text routes, where vLLM is installed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support.commands import run_command
from support.live_server import live_server

from omni_ws.engine.fake import EchoEngine, EchoSettings

CLIENT = Path(__file__).parent / "clients" / "vllm_bench.py"
TESTS = Path(__file__).parents[1]
REPLY = "one two three four five six seven eight"
QUIET = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}

pytestmark = [pytest.mark.slow]


async def run(python: str, *arguments: str) -> None:
    environment = {**os.environ, **QUIET, "PYTHONPATH": str(TESTS)}
    ended = await run_command(python, *arguments, environment=environment)
    assert ended.status == 0, (ended.output + ended.errors)[-3000:]


@pytest.mark.parametrize(
    ("backend", "endpoint"), [("openai-chat", "/v1/chat/completions"), ("openai", "/v1/completions")]
)
async def test_every_request_is_answered_with_every_token(backend: str, endpoint: str, tmp_path: Path) -> None:
    python = os.environ.get("OUTSIDE_VLLM")
    if python is None:
        pytest.skip("OUTSIDE_VLLM is not set: make test-outside sets it where vLLM is installed")
    build = "import sys; from pathlib import Path; from support.tiny_models import build_text_model as build; "
    await run(python, "-c", f"{build}build(Path(sys.argv[1]))", str(tmp_path / "model"))
    async with live_server(EchoEngine(EchoSettings(reply=REPLY))) as server:
        await run(
            *(python, str(CLIENT), "--backend", backend, "--endpoint", endpoint, "--model", "fake"),
            *("--base-url", f"http://127.0.0.1:{server.port}", "--tokenizer", str(tmp_path / "model")),
            *("--dataset-name", "random", "--random-input-len", "12", "--random-output-len", "8"),
            *("--num-prompts", "40", "--max-concurrency", "8", "--disable-tqdm"),
            *("--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json"),
        )
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert (result["completed"], result["failed"]) == (40, 0)
    assert result["total_output_tokens"] == 40 * len(REPLY.split())

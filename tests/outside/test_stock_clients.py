"""Software that others made for OpenAI's API, against this server, each in an environment of its own.

``make test-outside`` makes the environments and names them; without them these tests are skipped.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.live_server import live_server
from support.obliging_engine import ObligingEngine
from support.outside import run_in_node, run_outside, tool

from omni_ws.engine.base import Engine
from omni_ws.engine.fake import EchoEngine

HERE = Path(__file__).parent
RECORDING = HERE.parent / "data" / "goforward.wav"
SNIPPETS = sorted(path.name for path in (HERE / "snippets").iterdir())

pytestmark = pytest.mark.slow


async def test_the_openai_package_of_python() -> None:
    python = tool("OUTSIDE_PYTHON")
    async with live_server(ObligingEngine()) as server:
        url = f"http://127.0.0.1:{server.port}/v1"
        output = await run_outside(python, str(HERE / "clients" / "openai_python.py"), url, str(RECORDING))
    assert output.count("passed") == 8


async def test_the_openai_package_of_node(tmp_path: Path) -> None:
    async with live_server(ObligingEngine()) as server:
        url = f"http://127.0.0.1:{server.port}/v1"
        output = await run_in_node(HERE / "clients" / "openai_node.mjs", tmp_path, url, str(RECORDING))
    assert output == "all passed\n"


@pytest.mark.parametrize("name", SNIPPETS)
@pytest.mark.parametrize("engine", [EchoEngine, ObligingEngine])
async def test_snippets_run_as_they_are_printed(name: str, engine: type[Engine], tmp_path: Path) -> None:
    if name == "tools.sh" and engine is EchoEngine:
        pytest.skip("the echo has no tools")
    async with live_server(engine()) as server:
        source = (HERE / "snippets" / name).read_text(encoding="utf-8")
        script = tmp_path / name
        script.write_text(source.replace(":8080/", f":{server.port}/"), encoding="utf-8")
        match script.suffix:
            case ".sh":
                output = await run_outside("bash", str(script))
            case ".py":
                output = await run_outside(tool("OUTSIDE_PYTHON"), str(script))
            case _:
                output = await run_in_node(script, tmp_path)
    if script.suffix == ".sh":
        assert output.endswith("data: [DONE]\n\n")
        assert ('"finish_reason":"tool_calls"' in output) is (name == "tools.sh")
        assert "event:" not in output
    else:
        assert output == "Hello!"


async def test_a_reader_of_events_sees_the_error() -> None:
    """As EventSource would: by the type of the event, with curl for a transport."""
    body = '{"messages":[{"role":"user","content":"please break now"}],"stream":true}'
    async with live_server(ObligingEngine()) as server:
        url = f"http://127.0.0.1:{server.port}/v1/chat/completions"
        output = await run_outside("curl", "-sSN", url, "-H", "content-type: application/json", "-d", body)
    blocks = output.strip().split("\n\n")
    assert blocks[-1].startswith("event: error\ndata: {")
    assert "[DONE]" not in output


async def test_schemathesis(tmp_path: Path) -> None:
    """Requests made from the server's own description, good and bad: answers are as it says, and never a 500."""
    python = tool("OUTSIDE_PYTHON")
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    # It leaves sessions behind, which must be gone when the server is looked at.
    async with live_server(EchoEngine(), streaming_input={"session_timeout_sec": 1}) as server:
        output = await run_outside(
            str(Path(python).with_name("schemathesis")),
            *("run", f"http://127.0.0.1:{server.port}/openapi.json", "--checks", checks),
            *(
                "--phases",
                "coverage,fuzzing,stateful",
                "--max-examples",
                "10",
                "--seed",
                "7",
                "--no-color",
                "--suppress-health-check",
                "all",
            ),
            cwd=tmp_path,
        )
    assert re.search(r"(\d{3,}) generated, \1 passed", output), output[-3000:]

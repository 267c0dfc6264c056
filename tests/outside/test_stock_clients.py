"""Software that others made for OpenAI's API, against this server, each in an environment of its own.

``make test-outside`` makes the environments and names them; without them these tests are skipped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.live_server import live_server
from support.outside import run_in_node, run_outside, tool
from support.scripted_engines import PlayingEngine, ToneEngine, finished, token, tool_call

from omni_ws.core.chunks import FinishReason, InputChunk, Modality, Task, Usage, Word
from omni_ws.engine.base import (
    Engine,
    EngineOutput,
    Finished,
    GenerationRequest,
    OutputWriter,
    TextOutput,
    TranscriptOutput,
)
from omni_ws.engine.fake import EchoEngine
from omni_ws.errors import EngineFailed

PERSON = {"name": "Ann", "age": 30}
HEARD = "go forward"


class ObligingEngine(PlayingEngine):
    """A text with "break" in it makes it fail after its first word, whatever it was asked for."""

    def __init__(self) -> None:
        able: dict[str, Any] = dict.fromkeys(("tools", "logprobs", "structured_output", "choices", "word_times"), True)
        super().__init__(**able, languages=frozenset({"en"}))
        self._speaker = ToneEngine()

    async def act(self, request: GenerationRequest, out: OutputWriter) -> None:
        speaks = request.task is Task.SPEECH or "audio" in request.modalities
        await (self._speaker.generate(request, out) if speaks else super().act(request, out))

    def steps(self, request: GenerationRequest, taken: list[InputChunk]) -> Iterable[Any]:
        if request.task is Task.TRANSCRIBE:
            heard = TranscriptOutput(HEARD, start_ms=0, words=(Word("go", 0, 200), Word("forward", 200, 700)))
            ended = Finished(FinishReason.STOP, Usage(output_tokens=2, input_audio_ms=700))
            return [heard, TextOutput("go"), TextOutput(" forward"), ended]
        if request.tools and taken[-1].tool_call_id is None:
            return [*tool_call("get_weather", '{"', "city", '":"Tokyo"}'), finished(FinishReason.TOOL_CALLS)]
        return self._answer(request, "".join(one.payload.decode() for one in taken if one.modality is Modality.TEXT))

    def _answer(self, request: GenerationRequest, text: str) -> Iterator[EngineOutput | Exception]:
        options = request.options
        if options.structure is not None:
            text = json.dumps(PERSON)
        words = text.split(" ")[: request.sampling.get("max_tokens")]
        for index, word in enumerate(words):
            if index and "break" in text:
                yield EngineFailed("the engine broke, as it was told to")
            piece = word if index == 0 else f" {word}"
            logprobs = (token(piece, -0.5, "other"),) if options.logprobs is not None else ()
            for choice in range(options.choices):
                yield TextOutput(piece, logprobs=logprobs, choice=choice)
        reasons = (FinishReason.STOP,) * options.choices
        yield Finished(FinishReason.STOP, Usage(input_tokens=1, output_tokens=len(words)), reasons)


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

"""The server as it is started without naming parts: with all weights, without them, and without their packages."""

from __future__ import annotations

import os
import re
import sys
from asyncio import create_subprocess_exec, create_task, subprocess, timeout
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.patience import PATIENCE_SEC
from support.real_models import fetched
from support.speech_clips import WORDS, clip_bytes

from omni_ws.client import Answer, ClientSession, connect
from omni_ws.scenarios.speech import word_errors

pytestmark = [pytest.mark.slow, pytest.mark.real_time]

CLIP = "librivox_ss_0870"


@dataclass(frozen=True)
class Started:
    url: str
    said: str


@asynccontextmanager
async def serve(*, cache: Path | None = None, hidden: tuple[str, ...] = (), folder: Path) -> AsyncIterator[Started]:
    """``omni-ws serve``, with the weights in ``cache`` (None: the user's), and as where ``hidden`` is not installed."""
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({hidden!r}))\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OMNI_WS_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [environment.get("PYTHONPATH")])])
    if cache is not None:
        environment["XDG_CACHE_HOME"] = str(cache)
    process = await create_subprocess_exec(
        *(sys.executable, "-m", "omni_ws", "serve", "--port", "0", "--engine", "embedded"),
        stderr=subprocess.PIPE,
        env=environment,
    )
    assert process.stderr is not None
    said = ""
    try:
        async with timeout(PATIENCE_SEC):
            while "in a browser" not in said:
                line = (await process.stderr.readline()).decode()
                assert line, said
                said += line
        reading = create_task(process.stderr.read())  # else its log would fill the pipe
        (port,) = re.findall(r":(\d+) in a browser", said)
        yield Started(f"ws://127.0.0.1:{port}/v1/streaming_input", said)
        process.terminate()
        await reading
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def answered(session: ClientSession) -> Answer:
    """The answer to a sentence of a novel that was heard about right."""
    await session.send_audio(clip_bytes(CLIP), end=True)
    answer = await session.answer()
    heard = re.sub(r"[^a-z ]", "", answer.transcript.lower())
    assert word_errors(WORDS[CLIP], heard).wrong <= len(WORDS[CLIP].split()) / 3
    assert len(answer.audio) > 24_000
    return answer


async def test_with_all_weights_the_parts_are_those_of_today(tmp_path: Path) -> None:
    for name in ("whisper-tiny-en", "hibari", "smart-turn"):
        fetched(name)
    # hibari's package asks for onnxruntime, which `make serve` leaves out.
    async with serve(hidden=("onnxruntime",), folder=tmp_path) as server, connect(server.url) as session:
        parts = session.created.parts
        assert parts.asr is not None
        assert parts.tts is not None
        assert (parts.asr.name, parts.tts.name) == ("whisper", "hibari")
        assert "instead of" not in server.said
        assert (await answered(session)).transcript.strip()[0] == "A"
        assert session.created.advice is None


async def test_without_their_weights_text_is_answered_and_the_start_says_why(tmp_path: Path) -> None:
    async with serve(cache=tmp_path / "cache", folder=tmp_path) as server, connect(server.url) as session:
        parts = session.created.parts
        assert parts.asr is None
        assert parts.tts is not None
        assert parts.tts.name == "espeak-ng"
        answer = await session.ask_text("what is three plus four")
        assert answer.text == "That makes 7."
        assert len(answer.audio) > 16_000
        ears = "the weights of Whisper tiny.en are not here; fetch them with: "
        assert f"No audio input: ASR (whisper): {ears}" in server.said
        assert "espeak-ng instead of hibari: no voice hibari: its weights are not on this machine" in server.said
        # The page tells it, too.
        assert (session.created.advice or "").startswith("No audio input: ASR (whisper): ")


@pytest.mark.parametrize(
    ("hidden", "names", "said"),
    [
        (
            "ctranslate2",
            (None, "hibari"),
            "No audio input: ASR (whisper): Whisper needs the package ctranslate2: ",
        ),
        (
            "hibari",
            ("whisper", "espeak-ng"),
            "espeak-ng instead of hibari: no voice hibari: its packages are not installed",
        ),
    ],
)
async def test_one_part_may_be_there_without_the_package_of_the_other(
    hidden: str, names: tuple[str | None, str], said: str, tmp_path: Path
) -> None:
    for name in ("whisper-tiny-en", "hibari"):
        fetched(name)
    async with serve(hidden=(hidden,), folder=tmp_path) as server, connect(server.url) as session:
        parts = session.created.parts
        assert tuple(part and part.name for part in (parts.asr, parts.tts)) == names
        assert said in server.said

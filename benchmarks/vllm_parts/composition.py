"""Speech to speech with a text model of real weights: from the end of speech to the first text and the first audio."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from support.live_server import LiveServer, live_server
from support.native_client import NativeClient, native_client
from support.real_models import smollm2
from support.speech_clips import SAMPLE_RATE, WORDS, clip_bytes

from benchmarks.vllm_parts.report import Report, Size, milliseconds
from omni_ws.client.pacing import paced, pieces
from omni_ws.client.wav import Pcm16
from omni_ws.config.model import VllmConfig
from omni_ws.engine.asr.pocketsphinx_engine import PocketSphinxEngine
from omni_ws.engine.composed.engine import ComposedEngine
from omni_ws.engine.tts.synthesis_engine import SynthesisEngine
from omni_ws.engine.vllm.engine import VllmEngine

MOST_UNTIL_TEXT_SEC: Final = 0.080
MOST_UNTIL_AUDIO_SEC: Final = 0.400
CONVERSATIONS: Final = (1, 4, 8)
CLIP: Final = "goforward"
CLIP_SEC: Final = 2.8
PIECE_MS: Final = 20
#: Of one turn: the clip, its answer, and a pause.
TURN_SEC: Final = 6.0
ENGINE_ARGS: Final = {
    "enforce_eager": True,
    "kv_cache_memory_bytes": 512 << 20,
    "max_model_len": 1024,
    "max_num_seqs": 16,
    "use_tqdm_on_load": False,
}
CONFIG: Final[dict[str, Any]] = {
    "modalities": ["text", "audio"],
    "instructions": "You are a friendly assistant. Answer in one short sentence.",
    "sampling": {"temperature": 0, "max_tokens": 40},
    "history": False,
}


class Turn(NamedTuple):
    """Seconds from the end of the audio to the first text and to the first audio of the answer."""

    text: float
    audio: float


async def measure(report: Report, size: Size, models: Path) -> None:
    report.table(
        f"{CLIP_SEC:g} s of speech in real time to PocketSphinx, SmolLM2-135M on vLLM, and the synthesiser: "
        "from the end of the audio, ms",
        *("conversations", "turns", "first text", "first audio", "target"),
    )
    async with _server() as server:
        await _conversation(server, 1, delay=0)
        for count in CONVERSATIONS:
            turns = max(2, size.rounds)
            # As people do, they do not all end a sentence at once.
            delays = [TURN_SEC * index / count for index in range(count)]
            found = await asyncio.gather(*(_conversation(server, turns, delay=delay) for delay in delays))
            _add(report, count, [turn for conversation in found for turn in conversation])


def _add(report: Report, count: int, turns: Sequence[Turn]) -> None:
    text, audio = ([turn[place] for turn in turns] for place in (0, 1))
    middle = len(turns) // 2
    met = sorted(text)[middle] <= MOST_UNTIL_TEXT_SEC and sorted(audio)[middle] <= MOST_UNTIL_AUDIO_SEC
    limits = f"medians ≤ {MOST_UNTIL_TEXT_SEC * 1000:g} and ≤ {MOST_UNTIL_AUDIO_SEC * 1000:g}"
    report.row(
        *(str(count), str(len(turns)), milliseconds(text), milliseconds(audio), limits if count == 1 else ""),
        met=met if count == 1 else None,
    )


@asynccontextmanager
async def _server() -> AsyncIterator[LiveServer]:
    llm = VllmEngine(VllmConfig(model=str(smollm2()), args=ENGINE_ARGS))
    async with live_server(ComposedEngine(llm, asr=PocketSphinxEngine(), tts=SynthesisEngine())) as server:
        yield server


async def _conversation(server: LiveServer, turns: int, *, delay: float) -> list[Turn]:
    """Each turn begins a fixed time after the one before, or when that has been answered."""
    await asyncio.sleep(delay)
    measured: list[Turn] = []
    async with native_client(server) as client:
        await client.configure(**CONFIG)
        for _ in range(turns):
            next_turn = asyncio.get_running_loop().time() + TURN_SEC
            measured.append(await _turn(client))
            await asyncio.sleep(next_turn - asyncio.get_running_loop().time())
    return measured


async def _turn(client: NativeClient) -> Turn:
    audio = Pcm16(clip_bytes(CLIP), SAMPLE_RATE)
    async for piece in paced(pieces(audio, piece_ms=PIECE_MS), interval=PIECE_MS / 1000):
        await client.binary(piece)
    await client.chunk(end=True)
    ended = time.perf_counter()
    first: dict[str, float] = {}
    heard = ""
    while not (frame := await client.until("output_chunk", "error")).get("final"):
        if frame["type"] == "error":
            raise RuntimeError(f"the server refused: {frame}")
        if frame["modality"] == "transcript" and not frame.get("interim"):
            heard += frame["text"]
        first.setdefault(frame["modality"], time.perf_counter() - ended)
    if heard.strip() != WORDS[CLIP]:
        raise RuntimeError(f"heard {heard!r}")
    return Turn(first["text"], first["audio"])

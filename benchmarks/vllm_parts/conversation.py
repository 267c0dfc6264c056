"""Speech to speech with a text model of real weights: from the end of speech to the first text and the first audio."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from support.live_server import LiveServer, live_server
from support.real_models import smollm2
from support.speech_clips import SAMPLE_RATE, clip_bytes

from benchmarks.vllm_parts.report import Report, Size, milliseconds
from omni_ws.caller.answers import TimedAnswer
from omni_ws.caller.script import say
from omni_ws.client import ClientSession, connect
from omni_ws.client.audio import Pcm16
from omni_ws.config.model import VllmConfig
from omni_ws.engine.asr.recogniser_engine import RecogniserEngine
from omni_ws.engine.asr.whisper import WhisperRecogniser
from omni_ws.engine.composed.engine import ComposedEngine
from omni_ws.engine.composed.parts import AheadLoad
from omni_ws.engine.tts.speech_engine import SpeechEngine
from omni_ws.engine.tts.voice_process import VoiceProcess
from omni_ws.engine.vllm.engine import VllmEngine

MOST_UNTIL_TEXT_SEC: Final = 0.080
MOST_UNTIL_AUDIO_SEC: Final = 0.400
CONVERSATIONS: Final = (1, 4, 8)
CLIP: Final = "goforward"
HEARD: Final = "Go forward 10 meters."
CLIP_SEC: Final = 2.8
#: Of one turn: the clip, its answer, and a pause.
TURN_SEC: Final = 6.0
TURNS_OF_BLOCK: Final = 2
#: A difference of medians that says nothing.
SAME_SEC: Final = 0.010
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
        f"{CLIP_SEC:g} s of speech in real time to Whisper, SmolLM2-135M on vLLM, and the synthesiser: "
        "from the end of the audio, ms",
        *("conversations", "begun at the pause", "turns", "first text", "first audio"),
        *("answers begun at a pause", "target"),
    )
    engine = ComposedEngine(
        VllmEngine(VllmConfig(model=str(smollm2()), args=ENGINE_ARGS)),
        asr=RecogniserEngine(WhisperRecogniser()),
        tts=SpeechEngine(VoiceProcess()),
    )
    outcomes: Counter[str] = Counter()
    async with live_server(engine) as server:
        engine.on_speculation = lambda outcome: outcomes.update([outcome.value])  # in the place of the metric
        await _block(server, 1)
        for count in CONVERSATIONS:
            turns: dict[bool, list[Turn]] = {False: [], True: []}
            outcomes.clear()
            load = AheadLoad()
            for _ in range(max(2, size.rounds)):
                for ahead in turns:
                    # The same parts either way, in turn, so that other load affects both.
                    engine._ahead_load = load if ahead else None
                    turns[ahead] += await _block(server, count)
            _add(report, count, turns, outcomes)


def _add(report: Report, count: int, turns: Mapping[bool, Sequence[Turn]], outcomes: Counter[str]) -> None:
    text, audio = ({ahead: [turn[place] for turn in found] for ahead, found in turns.items()} for place in (0, 1))
    for ahead, found in turns.items():
        limits, met = "", None
        if count == 1:
            limits = f"medians ≤ {MOST_UNTIL_TEXT_SEC * 1000:g} and ≤ {MOST_UNTIL_AUDIO_SEC * 1000:g}"
            met = median(text[ahead]) <= MOST_UNTIL_TEXT_SEC and median(audio[ahead]) <= MOST_UNTIL_AUDIO_SEC
        elif ahead:
            limits = "no later than without"
            met = all(median(either[True]) <= median(either[False]) + SAME_SEC for either in (text, audio))
        told = ", ".join(f"{times} {outcome}" for outcome, times in sorted(outcomes.items())) if ahead else ""
        cells = ("yes" if ahead else "no", str(len(found)), milliseconds(text[ahead]), milliseconds(audio[ahead]))
        report.row(str(count), *cells, told, limits, met=met)


async def _block(server: LiveServer, count: int) -> list[Turn]:
    """A turn of each conversation. As people do, they do not all end a sentence at once."""
    delays = [TURN_SEC * index / count for index in range(count)]
    found = await asyncio.gather(*(_conversation(server, TURNS_OF_BLOCK, delay=delay) for delay in delays))
    return [turn for conversation in found for turn in conversation]


async def _conversation(server: LiveServer, turns: int, *, delay: float) -> list[Turn]:
    """Each turn begins a fixed time after the one before, or when that has been answered."""
    await asyncio.sleep(delay)
    measured: list[Turn] = []
    async with connect(server.websocket_url, config=CONFIG) as session:
        for _ in range(turns):
            next_turn = asyncio.get_running_loop().time() + TURN_SEC
            measured.append(await _turn(session))
            await asyncio.sleep(next_turn - asyncio.get_running_loop().time())
    return measured


async def _turn(session: ClientSession) -> Turn:
    await say(session, Pcm16(clip_bytes(CLIP), SAMPLE_RATE))
    await session.finish()
    answer = TimedAnswer()
    ended = time.perf_counter()
    async for event in session.response():
        answer.hear(event, time.perf_counter() - ended)
    if answer.errors:
        raise RuntimeError(f"the server refused: {answer.error_codes}")
    if answer.heard.strip() != HEARD:
        raise RuntimeError(f"heard {answer.heard!r}")
    if answer.first_text_at is None or answer.first_audio_at is None:
        raise RuntimeError("an answer without text or audio")
    return Turn(answer.first_text_at, answer.first_audio_at)

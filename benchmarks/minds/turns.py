"""``python -m benchmarks.minds.turns [--llm MIND]``: how soon a mind that is a model answers aloud, on a quiet machine.

Another voice than the one that answers says twenty of the facts of ``sentences.toml`` in real time, each in a
conversation of its own. Speech ends with the last 20 ms whose level is within 26 dB of the loudest. CPU time is counted
from the beginning of the speech to the first audio: that of all processes of the server, and that of the model alone,
which is taken to be the child process that uses most. Rules answer some of the facts, without the model. Memory (PSS)
is that of all processes, at the end.
"""

from __future__ import annotations

import asyncio
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.embedded import SAMPLE_RATE, Clip, Report, percentile, speak
from benchmarks.minds.__main__ import SENTENCES
from benchmarks.minds.spoken import SPEECH_RATE, parser_of, read_aloud, serving
from benchmarks.server_process import child_processes, cpu_seconds, proportional_gb
from omni_ws.audio.pcm import SampleLayout, pcm16_from_samples, resampled, samples_from_bytes

TURNS: Final = 20
#: Targets: seconds by the part of the turns; GB.
MAX_FIRST_AUDIO: Final = {0.5: 1.2, 0.9: 2.0}
MAX_MEMORY: Final = 1.9


def clip_of(file: str) -> Clip:
    samples = samples_from_bytes(Path(file).read_bytes(), SampleLayout.S16)
    heard = resampled(samples, SPEECH_RATE, SAMPLE_RATE)
    return Clip(Path(file).stem, pcm16_from_samples(heard).tobytes())


async def measure(url: str, pid: int, clips: Sequence[Clip]) -> bool:
    processes = (pid, *child_processes(pid))
    await speak(url, clips[0])  # warm-up
    report = Report()
    waited: list[float] = []
    spent: list[list[float]] = []
    for clip in clips:
        before = [cpu_seconds(one) for one in processes]
        waited.append((await speak(url, clip)).first_audio)
        spent.append([cpu_seconds(one) - was for one, was in zip(processes, before, strict=True)])
    for at, limit in MAX_FIRST_AUDIO.items():
        report.row("end of speech → first audio", waited, target=limit, at=at)
    model = max(range(1, len(processes)), key=lambda number: sum(turn[number] for turn in spent))
    report.row("CPU time to the first audio, all processes", [sum(turn) for turn in spent])
    report.row("CPU time to the first audio, the model", [turn[model] for turn in spent])
    memory = proportional_gb(pid)
    met = report.met and memory <= MAX_MEMORY
    print(f"\nmemory, all processes: {memory:.2f} GB (≤ {MAX_MEMORY}); slowest turn {percentile(waited, 1):.2f} s")
    return met


def main(arguments: Sequence[str] | None = None) -> bool:
    options = parser_of(name="turns", about=__doc__).parse_args(arguments)
    asked = [row["say"] for row in tomllib.loads(SENTENCES.read_text("utf-8"))["fact"][:TURNS]]
    with tempfile.TemporaryDirectory() as folder:
        clips = [clip_of(file) for file in read_aloud(asked, options.voice, Path(folder), silence=(0, 0))]
    with serving("--llm", options.llm, "--tts", options.tts) as (port, pid):
        return asyncio.run(measure(f"ws://127.0.0.1:{port}/v1/streaming_input", pid, clips))


if __name__ == "__main__":
    raise SystemExit(0 if main() else 1)

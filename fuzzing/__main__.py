"""``python -m fuzzing [SECONDS] [TARGET …]``: every target, one after the other; fails when one found something."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
TARGETS = tuple(sorted(path.stem for path in FOLDER.glob("fuzz_*.py")))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzzing", description="Fuzz what reads the wire.")
    parser.add_argument("seconds", nargs="?", type=int, default=60, help="for each target (default: 60)")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)} (default: all)")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.targets) - set(TARGETS))
    if arguments.seconds < 1 or unknown:
        parser.error(f"no such target: {', '.join(unknown)}" if unknown else "at least one second is needed")
    failed = []
    for target in arguments.targets or TARGETS:
        print(f"=== {target}, {arguments.seconds} s", flush=True)
        command = [sys.executable, str(FOLDER / f"{target}.py"), f"-max_total_time={arguments.seconds}"]
        if subprocess.run([*command, "-verbosity=0", "-print_final_stats=1"], check=False).returncode:
            failed.append(target)
    print(f"found something: {', '.join(failed)}" if failed else "nothing found")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

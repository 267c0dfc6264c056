"""``python -m fuzzing.keep [TARGET …]`` keeps in ``corpus/`` the fewest inputs that reach what fuzzing reached here."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from fuzzing import harness
from fuzzing.__main__ import FOLDER, TARGETS


def main() -> None:
    for target in sys.argv[1:] or TARGETS:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, str(FOLDER / f"{target}.py"), "-merge=1", folder, str(harness.STATE / target)]
            subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
            count = harness.keep(target, (path.read_bytes() for path in Path(folder).iterdir()))
        print(f"{target}: {count} inputs, {(harness.KEPT / target).with_suffix('.zip').stat().st_size} bytes")


if __name__ == "__main__":
    main()

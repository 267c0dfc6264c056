"""``python -m support.bare_machine COMMAND…`` runs it as where there is only what `make serve` installs, and Chromium.

What else a machine happens to have must never be why a test passes. The command's PATH has nothing but links to the
programs named here; libraries that the package loads by name are hidden behind empty files of that name, which the
loader of Linux finds first and refuses; settings in the environment are gone. It does not start where something that
should be hidden can still be found.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

#: What the start script of Chromium needs, and Chromium.
PROGRAMS: Final = (
    *("sh", "uname", "grep", "find", "rm", "expr", "tr", "cut", "sed", "dirname", "readlink", "mktemp", "cat"),
    *("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"),
)
LIBRARIES: Final = tuple(
    name
    for library, version in (("espeak-ng", 1), ("portaudio", 2))
    for name in (f"lib{library}.so", f"lib{library}.so.{version}")
)

_FIND: Final = """
import ctypes, shutil, sys
for name in sys.argv[1:]:
    try:
        ctypes.CDLL(name)
    except OSError:
        continue
    sys.exit(f"{name} can still be loaded")
found = [name for name in ("espeak-ng", "espeak", "ffmpeg", "ffprobe", "sox") if shutil.which(name)]
if found:
    sys.exit(f"{found[0]} can still be found")
"""


def bare_environment(folder: Path) -> dict[str, str]:
    """The environment for the command; ``folder`` is filled, and has to stay as long as it runs."""
    programs, libraries = folder / "programs", folder / "libraries"
    programs.mkdir()
    libraries.mkdir()
    for name in PROGRAMS:
        if (found := shutil.which(name)) is not None:
            (programs / name).symlink_to(found)
    for name in LIBRARIES:
        (libraries / name).touch()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OMNI_WS_")}
    library_path = os.pathsep.join(filter(None, (str(libraries), kept.get("LD_LIBRARY_PATH"))))
    return {
        **kept,
        "PATH": str(programs),
        "LD_LIBRARY_PATH": library_path,
        "PYTHONNOUSERSITE": "1",
    }


def main(command: list[str]) -> int:
    if sys.platform != "linux":
        print("only the loader of Linux lets libraries be hidden this way", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="bare-machine-") as folder:
        environment = bare_environment(Path(folder))
        found = subprocess.run([sys.executable, "-c", _FIND, *LIBRARIES], env=environment, check=False)
        return found.returncode or subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

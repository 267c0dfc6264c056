"""ProcessReaper: kills the model's processes when the server is killed. vLLM's would not notice, and occupy the GPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Final

#: The pipe to the server closes without data when the server dies; ``dismiss`` writes a byte first.
_SCRIPT: Final = """
import os, signal, sys
if not sys.stdin.buffer.read(1):
    for process in map(int, sys.argv[1:]):
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
            pass
"""


class ProcessReaper:
    """A small process that kills ``processes`` when this one dies, until ``dismiss`` is called.

    They have to have ended by then, lest it kill other processes with the same IDs later.
    """

    def __init__(self, processes: Sequence[int]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _SCRIPT, *map(str, processes)],
            stdin=subprocess.PIPE,
            # In a session of its own, so that Ctrl-C in the terminal does not reach it.
            start_new_session=True,
        )

    def dismiss(self) -> None:
        """End the process without killing anything. Idempotent; blocks briefly."""
        if self._process.poll() is None:
            self._process.communicate(b".")

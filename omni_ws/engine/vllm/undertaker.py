"""Ends the processes of an engine whose server was killed, which vLLM's own do not notice: they would hold the GPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Final

#: The end of the input without a word before it is the death of the server.
_SCRIPT: Final = """
import os, signal, sys
if not sys.stdin.buffer.read(1):
    for process in map(int, sys.argv[1:]):
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
            pass
"""


class Undertaker:
    """A small process that waits beside ``processes``, which must end before ``dismiss`` is called, or with it."""

    def __init__(self, processes: Sequence[int]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _SCRIPT, *map(str, processes)],
            stdin=subprocess.PIPE,
            # Away from the terminal, whose Ctrl-C is not meant for it.
            start_new_session=True,
        )

    def dismiss(self) -> None:
        """Idempotent; blocks for a moment."""
        if self._process.poll() is None:
            self._process.communicate(b".")

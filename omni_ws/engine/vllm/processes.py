"""The processes that vLLM starts: none of them outlives the process that started the first one, the server.

vLLM's processes do not notice the death of the server, keep the GPU and hold ports. They are of several kinds, some of
which vLLM starts from others, and they start long before vLLM tells their IDs. So all are marked from their first
moment, and a small process (``reaper``) kills those with the mark when the server has ended, in whatever way.
"""

from __future__ import annotations

import os
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from omni_ws.engine.vllm import reaper

#: The environment variable with the mark.
MARK: Final = "_MODEL_OF_OMNI_WS"

_lock = threading.Lock()
#: The process whose reaper runs, and the mark that it looks for.
_server = 0
_mark = ""
#: How many blocks of ``marked_processes`` run now.
_starts = 0


@contextmanager
def marked_processes() -> Iterator[None]:
    """Mark all processes that are started during the block: they are killed when this process has ended.

    Processes that run other programs inherit the mark in their environment, forks an open file of this name.
    Raises OSError.
    """
    global _starts
    with _lock:
        mark = _watched_mark()
        _starts += 1
        os.environ[MARK] = mark
    try:
        file = os.memfd_create(mark)
        try:
            yield
        finally:
            os.close(file)
    finally:
        with _lock:
            _starts -= 1
            if not _starts:
                del os.environ[MARK]


def _watched_mark() -> str:
    """Return the mark of this process; the first call, also the first in a fork, starts the reaper."""
    global _mark, _server, _starts
    if _server != os.getpid():
        mark = f"omni-ws-{uuid.uuid4().hex}"
        command = [sys.executable, "-I", "-S", str(Path(reaper.__file__)), str(os.getpid()), mark]
        # Not by subprocess, which warns of processes that are left. In a session of its own: Ctrl-C is not for it.
        os.posix_spawn(sys.executable, command, os.environ, setsid=True)
        _server, _mark, _starts = os.getpid(), mark, 0
    return _mark

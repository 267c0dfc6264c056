"""The program of a worker process: ``python -m omni_ws.workers.process CHANNEL COUNTS``, with two open descriptors."""

from __future__ import annotations

import os
import signal
import socket
import sys

from omni_ws.cli import exit_status, with_usage_errors
from omni_ws.engine.threads import share_cores
from omni_ws.server import run_worker
from omni_ws.workers.worker import (
    Worker,
    WorkerStart,
    first_payload,
    shared_counts,
)


def main(arguments: list[str]) -> int:
    """Run a worker until it ends, and return the exit status."""
    channel, counts = map(int, arguments)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # SIGHUP is for the supervisor, which replaces its workers
    for descriptor in (channel, counts):
        os.set_inheritable(descriptor, False)
    end = socket.socket(fileno=channel)
    start: WorkerStart = first_payload(end)
    share_cores(start.wanted)
    with open(counts, "r+b", buffering=0) as file:
        shared = shared_counts(file, start.config, start.keys, start.wanted)

        def serve() -> int:
            return run_worker(start.config, start.keys, lambda: Worker(start, shared, end))

        return with_usage_errors(lambda: exit_status(start.config, serve))


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(status)

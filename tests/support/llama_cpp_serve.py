"""llama.cpp's own HTTP server in a process of its own, from the package xllamacpp, with SmolLM2's weights."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pytest
from support.real_models import fetched

CONTEXT: Final = 1024


@contextmanager
def llama_cpp_server(context: int = CONTEXT) -> Iterator[int]:
    """The port of one. Skips the test where the package or the weights cannot be had."""
    if find_spec("xllamacpp") is None:
        pytest.skip("llama.cpp's server needs the package xllamacpp, which is there for Linux on x86-64")
    model = next(fetched("smollm2").glob("*.gguf"))
    process = subprocess.Popen(
        [sys.executable, "-m", "support.llama_cpp_serve", str(model), str(context)],
        cwd=Path(__file__).parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline()
            assert address.startswith("http://"), "llama.cpp's server did not start"
            yield int(address.rpartition(":")[2])
            assert process.poll() is None, f"llama.cpp's server ended by itself, status {process.returncode}"
        finally:
            process.kill()


def main() -> None:
    """Serve the model of the arguments until killed."""
    import xllamacpp

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    parameters = xllamacpp.CommonParams()
    parameters.model.path, parameters.n_ctx = sys.argv[1], int(sys.argv[2])
    parameters.hostnames, parameters.port = ["127.0.0.1"], port
    parameters.n_parallel = 1
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 2
    parameters.verbosity, parameters.ui, parameters.model_alias = -1, False, {"smollm2"}
    server = xllamacpp.Server(parameters)
    print(server.listening_address, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()

"""Processes for models that are forked off one that has imported vLLM, which takes a model's start most of its time.

What the server itself does, a fresh interpreter for each model, is what the tests of its command run.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import multiprocessing
import os
import signal
import socket
import stat
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing import connection, context, forkserver, resource_tracker, util
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Self
from unittest.mock import patch

import pytest

from omni_ws.engine.omni import worker
from omni_ws.engine.omni.step_process import WORKER_MODULE
from omni_ws.engine.vllm.language_model import LanguageModel, prepare_environment
from omni_ws.engine.vllm.processes import MARK

_MODULES = [
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.structured_output.backend_xgrammar",
    "vllm.v1.core.sched.scheduler",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.models.llama",
    "omni_ws.engine.omni.slot_talker",
]


#: The modules that start processes of vLLM: copies of the model, what counts their requests, and the parts of a copy.
_STARTING = ("vllm.v1.engine.utils", "vllm.v1.engine.coordinator", "vllm.v1.executor.multiproc_executor")


def _start_in(processes: context.BaseContext, put: Callable[[Any, str, Any], None] = setattr) -> None:
    """Let vLLM start its processes by ``processes``."""
    for module in _STARTING:
        put(import_module(module), "get_mp_context", lambda: processes)


def _start_fork_server() -> None:
    """Python's, but for its start: it is this process at that moment, and nothing is imported twice."""
    server = _no_fork_server()
    with patch.object(util, "spawnv_passfds", _fork_instead):
        server.ensure_running()


def _no_fork_server() -> Any:
    """Python's, as if it had not been started: one that was belongs to the process that this was forked off."""
    server: Any = vars(forkserver)["_forkserver"]
    server.__init__()
    return server


def _fork_instead(path: str, arguments: Sequence[str], kept: Sequence[int]) -> int:
    """In place of what would start an interpreter, which gets a socket and the end of a pipe."""
    if (pid := os.fork()) == 0:
        _run_alone(lambda: _serve(*kept[:2]))
    return pid


def _run_alone(work: Callable[[], None]) -> None:
    """What a child does instead of going on with the tests; it ends with ``work``."""
    status = 1
    try:
        work()
        status = 0
    except SystemExit:
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _serve(listener: int, alive: int) -> None:
    """Fork whenever the tests ask for it, until they end."""
    tracker: Any = resource_tracker
    kept = {listener, alive, tracker._resource_tracker._fd}
    for one in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        # The others are the tests' own connections, whose ends must be seen though this process lives.
        with suppress(OSError):
            kind = os.fstat(one).st_mode
            if one > 2 and one not in kept and (stat.S_ISSOCK(kind) or stat.S_ISFIFO(kind)):
                os.close(one)
    gc.freeze()  # nothing of the tests is ever cleared up here
    warnings.resetwarnings()
    warnings.simplefilter("ignore")
    logging.getLogger().handlers.clear()
    # Those of pytest belong to the test that runs now.
    sys.stdout, sys.stderr = (os.fdopen(number, "w", 1, closefd=False) for number in (1, 2))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    _no_fork_server()
    serving: Any = forkserver
    serving.main(listener, alive, [])


class _Process(context.ForkServerProcess):
    """With the environment of the process that starts it, as a fresh interpreter has it."""

    def start(self) -> None:
        self._environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        if MARK in os.environ:
            os.memfd_create(os.environ[MARK])  # as if the server itself had forked it, and is never closed
        _start_in(multiprocessing.get_context("fork"))
        super().run()


class _Context(context.ForkServerContext):
    Process = _Process


def forked(work: Callable[..., None], *arguments: Any) -> BaseProcess:
    """Start a process that does ``work``, within ``models_in_forked_processes``."""
    process = _Context().Process(target=work, args=arguments)
    process.start()
    return process


def become_command(arguments: Sequence[str], output: Path) -> None:
    """Make this forked process a command: with a session of its own, and ``output`` for what it says.

    A model's processes are forked off what it is now: later it has threads, which may hold locks when it forks.
    """
    os.setsid()
    with output.open("wb") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    sys.argv = [*arguments]
    _start_fork_server()
    _start_in(_Context())


class _StepWorker:
    """The process of a StepModel, as if asyncio had started it; its input is a socket, which ends as a pipe does."""

    stderr = None

    def __init__(self, process: BaseProcess, stdin: asyncio.StreamWriter, stdout: asyncio.StreamReader) -> None:
        self._process, self.stdin, self.stdout = process, stdin, stdout
        self.pid = self._process.pid
        self.returncode: int | None = None
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._process.sentinel, self._note_end)

    @classmethod
    async def start(cls, limit: int) -> Self:
        ours, theirs = socket.socketpair()
        reads, writes = multiprocessing.Pipe(duplex=False)
        with theirs, writes:
            process = forked(_work, theirs, writes)
        _, stdin = await asyncio.open_connection(sock=ours)
        stdout = asyncio.StreamReader(limit)
        with reads:
            output = os.fdopen(os.dup(reads.fileno()), "rb")
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdout), output)
        return cls(process, stdin, stdout)

    def _note_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        self._process.join()
        self.returncode = self._process.exitcode
        self._ended.set()

    async def wait(self) -> int | None:
        await self._ended.wait()
        return self.returncode

    def kill(self) -> None:
        self._process.kill()


def _work(stdin: socket.socket, stdout: connection.Connection) -> None:
    with stdin, stdout:
        os.dup2(stdin.fileno(), 0)
        os.dup2(stdout.fileno(), 1)
    worker.main()


@contextmanager
def models_in_forked_processes() -> Iterator[None]:
    """For every LanguageModel and every StepProcess that is started in the block."""
    prepare_environment()
    gc.disable()  # what is imported stays, and no later garbage collection need look at it
    for module in _MODULES:
        import_module(module)
    gc.freeze()
    gc.enable()
    creating = LanguageModel._create
    processes = _Context()
    _start_fork_server()
    with pytest.MonkeyPatch.context() as changed:

        def created(self: LanguageModel) -> Any:
            _start_in(processes, changed.setattr)
            return creating(self)

        executing = asyncio.create_subprocess_exec

        async def started(*command: str, **options: Any) -> Any:
            if WORKER_MODULE not in command:
                return await executing(*command, **options)
            return await _StepWorker.start(options["limit"])

        changed.setattr(LanguageModel, "_create", created)
        changed.setattr(asyncio, "create_subprocess_exec", started)
        yield
    vars(forkserver)["_forkserver"]._stop()

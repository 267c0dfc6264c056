"""Commands, in processes of their own and in this one, servers among them; what they send, and what is left of them."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import re
import subprocess
import sys
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, Any

import msgspec
import orjson
from support.patience import PATIENCE_SEC, PERIOD_SEC, until
from support.raw_http import call

from omni_ws.cli import main
from omni_ws.engine.child_main import HEAD_BYTES, decode_header, decode_lengths


@dataclass(frozen=True)
class Ended:
    status: int
    output: str
    errors: str

    @property
    def report(self) -> dict[str, Any]:
        """What the command printed, if that is one line of JSON."""
        (line,) = self.output.splitlines()
        report: dict[str, Any] = orjson.loads(line)
        return report


def run_here(
    main: Callable[[Sequence[str], Mapping[str, str]], int], *arguments: str, environ: Mapping[str, str] | None = None
) -> Ended:
    """What became of a command in this process, which spares the start of another.

    Beside a server of this loop it runs in a thread, on a loop of its own.
    """
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            status = main(arguments, environ or {})
        except SystemExit as end:
            status = int(end.code or 0)
    return Ended(status, output.getvalue(), errors.getvalue())


@contextlib.asynccontextmanager
async def running(*command: str | Path, at_once: bool = True, **options: Any) -> AsyncIterator[Process]:
    """A process until the block is left; then it is killed, or asked to end (not ``at_once``)."""
    process = await asyncio.create_subprocess_exec(*command, **options)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            (process.kill if at_once else process.terminate)()
        await process.communicate()


async def run_command(*command: str, environment: Mapping[str, str] | None = None, cwd: Path | None = None) -> Ended:
    """What became of a command, which must end by itself."""
    pipes: dict[str, Any] = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE}
    async with running(*command, cwd=cwd, env=environment, **pipes) as process, asyncio.timeout(PATIENCE_SEC):
        output, errors = await process.communicate()
    assert process.returncode is not None
    return Ended(process.returncode, output.decode(), errors.decode())


def vllm_configuration(folder: Path, model: Path, **changes: Any) -> Path:
    """A file in ``folder`` that makes ``omni-ws serve`` serve a tiny model; ``changes`` are arguments of vLLM."""
    from support.tiny_models import ENGINE_ARGS

    args = "".join(f"{name} = {json.dumps(value)}\n" for name, value in {**ENGINE_ARGS, **changes}.items())
    configuration = folder / "serve.toml"
    # On a busy machine the answer to a test of SIGTERM takes longer than the usual 30 s.
    configuration.write_text(
        f'engine = "vllm"\nport = 0\ndrain_timeout_sec = 500\n'
        f"[vllm]\nmodel = {json.dumps(str(model))}\n[vllm.args]\n{args}"
    )
    return configuration


def forked_vllm_command(folder: Path, model: Path, errors: Path, **changes: Any) -> BaseProcess:
    """``omni-ws serve`` over a tiny model, forked off a process that has imported vLLM, in a session of its own.

    It is configured in ``folder``, with ``changes`` of vLLM's arguments; what it says goes to ``errors``.
    """
    return forked_command(["serve", "--config", str(vllm_configuration(folder, model, **changes))], errors)


def says_it_listens(errors: Path) -> bool:
    """Whether a server whose log this is has started."""
    return errors.exists() and b"listens on" in errors.read_bytes()


def forked_command(arguments: Sequence[str], errors: Path) -> BaseProcess:
    """``omni-ws`` with ``arguments``, forked off a process that has imported vLLM, in a session of its own.

    What it says goes to ``errors``.
    """
    from support.imported_already import forked

    return forked(_command, [*arguments], errors)


def _command(arguments: Sequence[str], errors: Path) -> None:
    from support.imported_already import become_command

    become_command(["omni-ws", *arguments], errors)
    sys.exit(main(arguments))


def read_message(source: IO[bytes], kinds: Any) -> tuple[Any, bytes]:
    """The header and the body of the next message; its header is of ``kinds``."""
    header_bytes, body_bytes = decode_lengths(source.read(HEAD_BYTES))
    return decode_header(msgspec.json.Decoder(kinds), source.read(header_bytes)), source.read(body_bytes)


def left_of(leader: int) -> dict[int, str]:
    """The processes that live in the session of ``leader``, and its reaper, by what they are called."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            title = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state != "Z" and (int(session) == leader or f"processes.py {leader} " in title):
            found[int(folder.name)] = title
    return found


async def until_nothing_is_left(process: BaseProcess | asyncio.subprocess.Process) -> None:
    """Waits for the end of all processes of a command, but for those that its parent has not yet waited for."""
    assert process.pid is not None
    leader = process.pid
    await until(lambda: not left_of(leader))


class WorkerServer:
    """The command ``omni-ws serve`` with workers and the fake engine."""

    def __init__(self, log: IO[bytes], *flags: str) -> None:
        command = [sys.executable, "-m", "omni_ws", "serve", "--engine", "fake", "--port", "0", *flags]
        self.process = subprocess.Popen(command, stderr=log)
        self._log = Path(log.name)
        self.port = 0

    @property
    def said(self) -> str:
        """Its log so far."""
        return self._log.read_text(encoding="utf-8")

    def line(self, pattern: str) -> re.Match[str]:
        """The first match in the log, once it is there. Blocks."""
        end = time.monotonic() + PATIENCE_SEC
        while True:
            goes_on = self.process.poll() is None and time.monotonic() < end
            if (match := re.search(pattern, self.said)) is not None:
                return match
            assert goes_on, f"no line like {pattern!r} in:\n{self.said}"
            time.sleep(PERIOD_SEC)

    async def logged(self, pattern: str) -> re.Match[str]:
        return await asyncio.to_thread(self.line, pattern)

    @property
    def websocket_url(self) -> str:
        return f"ws://127.0.0.1:{self.port}/v1/streaming_input"

    def pid_of(self, worker: str) -> int:
        return int(self.line(rf"started worker {worker} \(process (\d+)\)")[1])

    @property
    def workers(self) -> set[int]:
        """The numbers of the workers that were started and have not ended. With two, a successor's is higher by two."""
        said = self.said
        started = re.findall(r"started worker w(\d+) ", said)
        ended = re.findall(r"worker w(\d+) \(.* has ended", said)
        return {*map(int, started)} - {*map(int, ended)}

    async def get(self, path: str) -> Any:
        return await call(self.port, "GET", path)


@contextlib.contextmanager
def server_process(*flags: str) -> Iterator[WorkerServer]:
    """A server that listens. Whatever the test does, none of its processes is left."""
    with NamedTemporaryFile() as log:
        server = WorkerServer(log, *flags)
        try:
            server.port = int(server.line(r"listens on http://127\.0\.0\.1:(\d+)")[1])
            yield server
        finally:
            for _ in range(2):  # drain, and at once
                server.process.terminate()
            try:
                server.process.wait(PATIENCE_SEC)
            finally:
                server.process.kill()


@contextlib.contextmanager
def worker_server(*flags: str) -> Iterator[WorkerServer]:
    """A server whose two workers are ready."""
    with server_process("--workers", "2", *flags) as server:
        server.line("all 2 workers are ready")
        yield server

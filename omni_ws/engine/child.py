"""The server's side of the child processes of engines: starting, messages, ending, and restarting after a crash.

``child_main`` is the child's side, and defines the form of the messages.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, NoReturn, Self

import msgspec

import omni_ws
from omni_ws.engine.child_main import HEAD_BYTES, BrokenMessage, decode_header, decode_lengths, encode_message
from omni_ws.errors import OmniError

log = logging.getLogger(__name__)

#: How long a process may take to end by itself, in seconds.
STOP_SEC: Final = 2.0
#: The first and the longest wait before a process that died is started again, in seconds. Each death doubles the wait.
FIRST_BACKOFF_SEC: Final = 0.05
MAX_BACKOFF_SEC: Final = 30.0
#: After a process has run for so long, in seconds, its death counts as the first one again.
STABLE_AFTER_SEC: Final = 60.0

_READ_BYTES: Final = 1 << 20
#: How many of the last lines of a process's log are kept, to find the reason if the process ends.
_LAST_LINES: Final = 5
#: How many characters of a line are kept. llama.cpp quotes templates and prompts, which may be long.
_MOST_CHARACTERS: Final = 500


class ChildEnded(Exception):
    """Raised when a child process has ended, or sends no more messages."""


class Child:
    """A child process of the server, which log and error messages call ``name``.

    The server writes messages to the process's standard input, and reads messages from the process's standard output.
    The process ends when its standard input is closed.
    """

    def __init__(self, name: str, process: asyncio.subprocess.Process, *, kinds: Any) -> None:
        self.name = name
        self._process = process
        self._headers = msgspec.json.Decoder(kinds)
        self._said: deque[str] = deque(maxlen=_LAST_LINES)
        self._log = None if process.stderr is None else asyncio.create_task(self._listen(process.stderr), name=name)

    @classmethod
    async def start(cls, name: str, module: str, *arguments: str, kinds: Any, keeps_log: bool = False) -> Self:
        """Start ``python -m module arguments``. ``kinds`` are the types of the headers of its messages. Raises OSError.

        The process shares the server's standard error; with ``keeps_log``, its standard error goes to ``last_words``
        and the debug log instead.
        """
        process = await asyncio.create_subprocess_exec(
            # Without the current folder, whose files may have the names of modules, such as queue.py.
            *(sys.executable, "-P", "-m", module, *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE if keeps_log else None,
            env=_environment(),
            limit=_READ_BYTES,
            # Ctrl-C in a terminal is for the server, whose answers in progress still need the process.
            start_new_session=True,
        )
        return cls(name, process, kinds=kinds)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._process.returncode is not None

    @property
    def last_words(self) -> str:
        """The last lines of the process's log; empty if there are none, or without ``keeps_log``."""
        return "; ".join(self._said)

    def send(self, header: msgspec.Struct, body: bytes = b"") -> None:
        """Send a message, without waiting. Does nothing if the process has ended; ``receive`` reports that.

        Raises BrokenMessage for a message that is too long.
        """
        stdin = self._process.stdin
        if stdin is not None and not stdin.is_closing():
            stdin.write(encode_message(header, body))

    async def receive(self) -> tuple[Any, bytes]:
        """Return the header and the body of the next message.

        Raises ChildEnded if the process has ended. A process that sends invalid bytes is killed first.
        """
        assert self._process.stdout is not None
        try:
            return await receive_message(self._process.stdout, self._headers)
        except asyncio.IncompleteReadError:
            raise ChildEnded from None
        except BrokenMessage:
            log.exception("%s sends something else than messages", self.name)
            self.kill()
            raise ChildEnded from None

    def kill(self) -> None:
        """Kill the process, without waiting for its end."""
        if not self.ended:
            self._process.kill()

    async def wait(self) -> int:
        """Wait for the end of the process; return its exit status, or minus the number of the signal that ended it."""
        return await self._process.wait()

    async def end(self) -> int:
        """Close the input of the process, and kill the process if it does not end within STOP_SEC. Idempotent.

        Returns what ``wait`` returns. If the call is cancelled, it kills the process immediately.
        """
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            async with asyncio.timeout(STOP_SEC):
                await self.wait()
        except TimeoutError:
            log.warning("%s does not end by itself and is killed", self.name)
        finally:
            self.kill()
            status = await self.wait()
            if self._log is not None:
                await self._log
        return status

    async def _listen(self, stderr: asyncio.StreamReader) -> None:
        while True:
            try:
                line = await stderr.readline()
            except ValueError:  # too long to be held: so much of it is left out
                continue
            if not line:
                return
            if text := line.decode(errors="replace").strip()[:_MOST_CHARACTERS]:
                self._said.append(text)
                log.debug("%s: %s", self.name, text)


async def receive_message(reader: asyncio.StreamReader, headers: msgspec.json.Decoder[Any]) -> tuple[Any, bytes]:
    """Return the header and the body of the next message.

    Raises IncompleteReadError at the end of ``reader``, BrokenMessage for bytes that are no message.
    """
    header_bytes, body_bytes = decode_lengths(await reader.readexactly(HEAD_BYTES))
    header = decode_header(headers, await reader.readexactly(header_bytes))
    return header, await reader.readexactly(body_bytes)


def _environment() -> dict[str, str]:
    """Return the environment of a child process, which has it import this package from the server's folder."""
    package_folder = str(Path(omni_ws.__file__).parent.parent)
    path = os.pathsep.join(filter(None, (package_folder, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}


class Backoff:
    """The growing waits between restarts, in seconds."""

    def __init__(self) -> None:
        self._last = 0.0

    def next(self) -> float:
        """Return the next wait: the first wait, or twice the last one, up to the longest."""
        self._last = min(2 * self._last or FIRST_BACKOFF_SEC, MAX_BACKOFF_SEC)
        return self._last

    def reset(self) -> None:
        """Make the next wait the first one again, because the last restart succeeded."""
        self._last = 0.0


async def keep_running(
    name: str, until_death: Callable[[], Awaitable[str]], start: Callable[[], Awaitable[None]], backoff: Backoff
) -> NoReturn:
    """Restart a process whenever it dies, forever.

    ``until_death`` waits for the death of the process, cleans up, and returns the reason for the log. ``start`` starts
    the next process, and is called until it succeeds. ``backoff`` returns the wait before each call of ``start``; after
    a process that ran for longer than STABLE_AFTER_SEC, it begins again. Errors of ``start`` other than OmniError,
    OSError and ValueError are passed on.
    """
    loop = asyncio.get_running_loop()
    while True:
        began = loop.time()
        how = await until_death()
        if loop.time() - began > STABLE_AFTER_SEC:
            backoff.reset()
        log.warning("%s died (%s); starting it again", name, how)
        while True:
            await asyncio.sleep(backoff.next())
            try:
                await start()
            except (OmniError, OSError, ValueError) as error:  # also where the system has no memory for it
                log.error("%s does not start again: %s", name, error)
            else:
                break
        log.warning("%s was started again", name)

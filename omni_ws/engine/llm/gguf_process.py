"""GgufProcess: the engine's side of the process that runs a GGUF model."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections import deque
from dataclasses import asdict
from typing import Any, Final

from omni_ws.engine.child import child_environment
from omni_ws.engine.llm.gguf_server import Order, Ready
from omni_ws.errors import EngineFailed

logger = logging.getLogger(__name__)

_MODULE: Final = "omni_ws.engine.llm.gguf_server"
#: The newest lines of its log, which are kept for the reason of its end.
_LAST_LINES: Final = 5
#: What is kept of a line. llama.cpp quotes templates and prompts, which may be long.
_MOST_CHARACTERS: Final = 500


class GgufProcess:
    """One process, from ``launch`` to ``end`` or to its own end."""

    #: What it serves; set by ``launch``.
    ready: Ready

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._said: deque[str] = deque(maxlen=_LAST_LINES)
        self._listening = asyncio.create_task(self._listen(), name="log of llama.cpp")

    @classmethod
    async def launch(cls, order: Order) -> GgufProcess:
        """Start a process, and return it when it has loaded its model. Raises EngineFailed."""
        process = cls(
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", _MODULE),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=_environment(),
                # Ctrl-C in a terminal is for the server, whose answers in progress still need the model.
                start_new_session=True,
            )
        )
        try:
            process.ready = await process._give(order)
        except BaseException:
            await process.end()
            raise
        return process

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._process.returncode is not None

    @property
    def last_words(self) -> str:
        """The end of its log; empty where it said nothing."""
        return "; ".join(self._said)

    async def wait(self) -> int:
        """Wait for its end; return its exit status, or minus the signal that ended it."""
        return await self._process.wait()

    async def end(self) -> None:
        """End it at once: it has nothing to lose. Idempotent."""
        if not self.ended:
            self._process.kill()
        await self._process.wait()
        await self._listening

    async def _give(self, order: Order) -> Ready:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            # By the pipe, since other users see command lines. It stays open: its end would end the process.
            stdin.write(json.dumps(asdict(order)).encode() + b"\n")
            await stdin.drain()
        except ConnectionError:
            pass  # it ended, which the next line says
        answer: dict[str, Any] = json.loads(await stdout.readline() or b"{}")
        if "address" in answer:
            return Ready(**answer)
        status = await self._process.wait()
        await self._listening
        # The package only says that it failed; why is in the log of llama.cpp.
        reason = self.last_words or answer.get("reason") or _end(status)
        raise EngineFailed(f"llama.cpp does not load {order.file}: {reason}", fatal=True)

    async def _listen(self) -> None:
        stderr = self._process.stderr
        assert stderr is not None
        while True:
            try:
                line = await stderr.readline()
            except ValueError:  # too long to be held: so much of it is left out
                continue
            if not line:
                return
            if text := line.decode(errors="replace").strip()[:_MOST_CHARACTERS]:
                self._said.append(text)
                logger.debug("llama.cpp: %s", text)


def _end(status: int) -> str:
    if status == -9:
        return "it was killed, perhaps because memory ran out"
    return f"it ended by itself, status {status}"


def _environment() -> dict[str, str]:
    # In Google's containers llama.cpp would listen where this one says.
    return {name: value for name, value in child_environment().items() if name != "AIP_MODE"}

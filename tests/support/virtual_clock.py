"""An event loop whose clock jumps: where nothing is ready, time moves to the next timer at once.

Minutes of time-outs run in milliseconds over real loopback sockets, and a deadlock becomes an error instead of a
hanging test. Two things it cannot do: it does not wait for threads (work in an executor looks like idleness, and time
jumps over it, but for the farthest jumps), and it cannot wrap uvloop, which has no selector.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
import time
from pathlib import Path

#: Real time given to the kernel before the clock jumps: on a loaded machine, loopback bytes may still be on their way.
_SETTLE_SEC = 0.002
#: Before a jump that ends sessions and connections (_FAR_SEC of virtual time or more), what a busy kernel may need.
_SETTLE_FAR_SEC = 0.02
_FAR_SEC = 1.0
#: Before a jump as far as the time-outs of sessions, while threads or children work: a timer of theirs stays armed
#: while an answer is made in a thread.
_SETTLE_FARTHEST_SEC = 1.0
_FARTHEST_SEC = 60.0
#: Real time after which a loop with no timer and nothing to read counts as a deadlock.
_DEADLOCK_SEC = 5.0

_Ready = list[tuple[selectors.SelectorKey, int]]


class Deadlock(RuntimeError):
    """Every task waits, no timer is armed, and no socket has anything to say."""


class JumpingSelector(selectors.DefaultSelector):
    """Selects without waiting; what it would have waited is added to ``now`` (virtual seconds)."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        #: How often nothing but the time woke anybody.
        self.jumps = 0

    def select(self, timeout: float | None = None) -> _Ready:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            ready = super().select(_DEADLOCK_SEC)
            if not ready:
                raise Deadlock("every task waits, and nothing is left to wake one")
            return ready
        ready = super().select(_SETTLE_SEC if timeout < _FAR_SEC else _SETTLE_FAR_SEC)
        if not ready and timeout >= _FARTHEST_SEC:
            ready = self._others_done()
        if not ready:
            self.now += timeout
            self.jumps += 1
        return ready

    def _others_done(self) -> _Ready:
        """What is ready when no thread works any more, or after a while."""
        end = time.monotonic() + _SETTLE_FARTHEST_SEC
        while _others_work() and time.monotonic() < end:
            if ready := super().select(_SETTLE_FAR_SEC):
                return ready
        return super().select(0)


def _others_work() -> bool:
    """Whether another thread runs or could run, or there is a child, of which no more is known."""
    own = str(threading.get_native_id())
    threads = list(Path("/proc/self/task").glob("*"))
    if any(_read(thread / "children") for thread in threads):
        return True
    states = (_read(thread / "stat").rpartition(")")[2].split()[:1] for thread in threads if thread.name != own)
    return not threads or any(state in (["R"], ["D"]) for state in states)


def _read(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except OSError:  # the thread has ended
        return ""


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """Use it by ``@pytest.mark.virtual_clock`` on an asynchronous test."""

    def __init__(self) -> None:
        self._jumping = JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now

    @property
    def jumps(self) -> int:
        """How often nothing but a timer woke anybody."""
        return self._jumping.jumps

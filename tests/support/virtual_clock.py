"""An event loop whose clock jumps: where nothing is ready, time moves to the next timer at once.

Minutes of time-outs run in milliseconds over real loopback sockets, and a deadlock becomes an error instead of a
hanging test. Before it jumps over a time-out, it lets threads finish what they work at. It cannot wrap uvloop, which
has no selector.
"""

from __future__ import annotations

import asyncio
import os
import selectors
import threading
import time

#: Real time given to the kernel before the clock jumps: on a loaded machine, loopback bytes may still be on their way.
_SETTLE_SEC = 0.002
#: Before a jump that ends sessions and connections (_FAR_SEC of virtual time or more), what a busy kernel may need.
_SETTLE_FAR_SEC = 0.02
_FAR_SEC = 1.0
#: Before a jump over the time-outs of sessions (_FARTHEST_SEC or more): few tests want one, and one that nobody wants
#: ends the session.
_SETTLE_FARTHEST_SEC = 0.2
#: Jumps as far as any time-out wait for threads that work: a timer stays armed while an answer is made in a thread. The
#: shorter ones are the pace of sound.
_TIMEOUT_SEC = 0.1
#: Those of _FARTHEST_SEC or more wait for children, too, of which no more is known than that they live.
_FARTHEST_SEC = 60.0
#: How long, in real time.
_WORK_SEC = 5.0
#: Real time after which a loop with no timer and nothing to read counts as a deadlock.
_DEADLOCK_SEC = 5.0
_TASKS = "/proc/self/task"

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
        ready = super().select(_settling(timeout))
        if not ready and timeout >= _TIMEOUT_SEC:
            ready = self._others_done(children=timeout >= _FARTHEST_SEC)
        if not ready:
            self.now += timeout
            self.jumps += 1
        return ready

    def _others_done(self, *, children: bool) -> _Ready:
        """What is ready when no thread works any more, or after a while."""
        end = time.monotonic() + _WORK_SEC
        while (_threads_work() or (children and _children())) and time.monotonic() < end:
            if ready := super().select(_SETTLE_SEC):
                return ready
        return super().select(0)


def _settling(jump: float) -> float:
    if jump >= _FARTHEST_SEC:
        return _SETTLE_FARTHEST_SEC
    return _SETTLE_FAR_SEC if jump >= _FAR_SEC else _SETTLE_SEC


def _threads_work() -> bool:
    """Whether another thread runs or could run."""
    own = str(threading.get_native_id())
    return any(
        _read(f"{name}/stat").rpartition(b")")[2][1:2] in (b"R", b"D") for name in os.listdir(_TASKS) if name != own
    )


def _children() -> bool:
    return any(_read(f"{name}/children") for name in os.listdir(_TASKS))


def _read(name: str) -> bytes:
    try:
        with open(f"{_TASKS}/{name}", "rb") as file:
            return file.read()
    except OSError:  # the thread has ended
        return b""


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

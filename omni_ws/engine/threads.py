"""The cores of the machine, and the threads in which blocking work runs."""

from __future__ import annotations

import asyncio
import enum
import heapq
import logging
import os
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, Final, NamedTuple, ParamSpec, TypeAlias, TypeVar

from omni_ws.audio.pcm import Samples

T = TypeVar("T")
P = ParamSpec("P")

log = logging.getLogger(__name__)

_MEMBERSHIPS: Final = Path("/proc/self/cgroup")
_CGROUPS: Final = Path("/sys/fs/cgroup")

_processes = 1


def share_cores(processes: int) -> None:
    """From now on count only this process's share of the cores: ``processes`` of them do the same work."""
    global _processes
    _processes = processes


def cores() -> int:
    """Return how many cores this process may use, at least 1.

    A container or ``taskset`` may leave a process fewer than the machine has. A quota of CPU
    time counts as so many whole cores: more threads than that would stall one another.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min(allowed, _quota(_MEMBERSHIPS, _CGROUPS))) // _processes)


def _quota(memberships: Path, cgroups: Path) -> float:
    """Return the cores whose time the control groups of this process leave it, of either version; infinite if all."""
    try:
        lines = memberships.read_text("utf-8").splitlines()
    except OSError:  # no Linux
        return float("inf")
    quotas = [float("inf")]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, read = cgroups, _quota_of_version_2
        elif "cpu" in controllers.split(","):
            root, read = cgroups / "cpu", _quota_of_version_1
        else:
            continue
        # A group above limits its members, too. A container may see the path that the group has outside of it.
        inside = PurePosixPath(path.lstrip("/"))
        for group in (inside, *inside.parents):
            with suppress(OSError, ValueError, ZeroDivisionError):  # no such group, or none that has a quota
                quotas.append(read(root / group))
    return min(quotas)


def _quota_of_version_2(group: Path) -> float:
    quota, period = (group / "cpu.max").read_text("utf-8").split()
    return float("inf") if quota == "max" else int(quota) / int(period)


def _quota_of_version_1(group: Path) -> float:
    quota = int((group / "cpu.cfs_quota_us").read_text("utf-8"))
    return float("inf") if quota < 0 else quota / int((group / "cpu.cfs_period_us").read_text("utf-8"))


# Blocking calls run in threads: each kind of work in its own, and so that a cancellation leaves none running. The event
# loop's default executor is left to look-ups of names and to what begins and ends with the server.


class Work(enum.Enum):
    """The kinds of short work that are done off the event loop, and how many threads each has.

    None waits for another: a body of 20 MB must not delay the next 20 ms of a call, nor a slow disk either of them.
    (What decodes audio and detects speech is in ListeningThreads.)
    """

    #: JSON of large bodies, and of what is made of them: holds the GIL, so that more threads would gain nothing.
    BODIES = 2
    #: The audio of calls, a packet at a time.
    CALLS = 1
    #: The audio of other answers, where it is compressed or long.
    ENCODING = 4
    #: Files that a request names, and pages of metrics.
    FILES = 3


@cache
def _threads(work: Work) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(work.value, thread_name_prefix=work.name.lower())


async def run_work(work: Work, call: Callable[..., T], *arguments: object) -> T:
    """Run ``call(*arguments)`` in the threads for ``work`` and return its result."""
    return await asyncio.wrap_future(_threads(work).submit(call, *arguments))


async def run_in_thread(executor: Executor, call: Callable[..., T], *arguments: object) -> T:
    """Run ``call(*arguments)`` in ``executor`` and return its result.

    On cancellation, a call that has not started is dropped, and a running one is awaited before the CancelledError
    continues: resources that the call uses can then be closed. Calls should therefore be short.
    """
    work = executor.submit(call, *arguments)
    try:
        return await asyncio.wrap_future(work)
    except asyncio.CancelledError:
        if not work.cancel():
            await _wait_until_done(asyncio.wrap_future(work))
        raise


async def release_in_thread(executor: Executor, call: Callable[[], None]) -> None:
    """Run ``call``, which releases a resource, to completion, even when cancelled."""
    try:
        work = executor.submit(call)
    except RuntimeError:
        # The executor was shut down and has waited for its threads, so nothing else uses the resource.
        call()
        return
    try:
        await asyncio.shield(asyncio.wrap_future(work))
    except asyncio.CancelledError:
        await _wait_until_done(asyncio.wrap_future(work))
        raise


async def _wait_until_done(work: asyncio.Future[T]) -> None:
    """Wait until ``work`` is done, however often the waiting task is cancelled meanwhile."""
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError:
            continue
    if not work.cancelled():
        work.exception()


# The threads in which a server decodes audio and detects speech.

#: Decoded audio of a slice. Detecting speech in it takes some 5 ms, decoding it less.
SLICE_SEC: Final = 1.0
#: What each slice counts at least: a thread was woken for it.
LEAST_SEC: Final = 0.03
#: What is done together has no more: the pieces of eight sessions in which nobody speaks.
MOST_TOGETHER_SEC: Final = 3.0
MAX_THREADS: Final = 4

#: Does pieces of work that follow one another. Must not raise.
Run: TypeAlias = Callable[[list[Any]], None]


class _Slice(NamedTuple):
    """Work that waits. Ordered by where it ends on the queue's clock, then by arrival."""

    ends: float
    number: int
    begins: float
    run: Run
    work: Any
    at_most: int

    @property
    def seconds(self) -> float:
        return self.ends - self.begins


class ListeningThreads:
    """Decodes audio and detects speech, with threads that all sessions share fairly. Thread-safe.

    Work is done in slices of about ``SLICE_SEC`` of decoded audio, and each session, by its Lane, gets the same share
    of decoded seconds. It is a fair queue (start-time fair queueing, Goyal, Vin and Cheng, 1996) on a clock that counts
    these seconds: a slice begins where the last one of its lane ended, or now if that is past, and the slice that would
    end first is done first. So a session that asks for little is served at once, whatever others have sent, and waits
    for nothing but the slices that are being done; one that asks for more than its share is late by its own backlog and
    by no other's.

    Threads start when they are first needed.
    """

    def __init__(self, threads: int | None = None) -> None:
        self._most = threads
        self._executor: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._waiting: list[_Slice] = []
        self._number = 0
        #: Threads that work, or are about to.
        self._active = 0
        #: The queue's clock: where the last slice begins that was taken.
        self.now = 0.0

    def put(self, lane: Lane, seconds: float, run: Run, work: Any, *, at_most: int = 1, wake: bool = True) -> None:
        """Have ``run`` called in a thread with ``work`` of ``lane``, which is about so many seconds of audio.

        ``run`` gets up to ``at_most`` pieces of work at once that are next and have the same ``run``. Without ``wake``
        no thread begins before the next call of ``wake``.
        """
        with self._lock:
            begins = max(self.now, lane.served)
            lane.served = ends = begins + max(LEAST_SEC, seconds)
            self._number += 1
            heapq.heappush(self._waiting, _Slice(ends, self._number, begins, run, work, at_most))
        if wake:
            self.wake()

    def wake(self) -> None:
        """Let one more thread begin, where there is one and it has something to do."""
        with self._lock:
            if self._executor is None:
                self._most = self._most or min(MAX_THREADS, cores())
                self._executor = ThreadPoolExecutor(self._most, thread_name_prefix="listening")
            assert self._most is not None
            if not self._waiting or self._active >= self._most:
                return
            self._active += 1
        self._executor.submit(self._work)

    def charge(self, lane: Lane, seconds: float) -> None:
        """A slice of ``lane`` had so many more seconds than were told before; fewer, if negative."""
        with self._lock:
            lane.served += seconds

    def _work(self) -> None:
        while taken := self._take():
            try:
                taken[0].run([each.work for each in taken])
            except Exception:
                log.exception("listening failed")

    def _take(self) -> list[_Slice]:
        """The slices to be done next, together. None: the thread is no longer active."""
        with self._lock:
            if not self._waiting:
                self._active -= 1
                return []
            taken = [heapq.heappop(self._waiting)]
            first, seconds = taken[0], taken[0].seconds
            while len(taken) < first.at_most and self._waiting and self._waiting[0].run == first.run:
                seconds += self._waiting[0].seconds
                if seconds > MOST_TOGETHER_SEC:
                    break
                taken.append(heapq.heappop(self._waiting))
            self.now = max(self.now, *(each.begins for each in taken))
            return taken


#: Those of this process. A worker process has its share of the cores.
_ALL: Final = ListeningThreads()


class Lane(Executor):
    """The place of one session in the threads: an executor whose calls are slices of about ``SLICE_SEC``."""

    def __init__(self, threads: ListeningThreads = _ALL) -> None:
        self.threads = threads
        #: Where its last slice ends on the clock of the threads.
        self.served = 0.0

    def submit(self, call: Callable[P, T], /, *arguments: P.args, **named: P.kwargs) -> Future[T]:
        """Run a call in a thread. ``charge`` says afterwards how much audio it was."""
        done: Future[T] = Future()

        def work() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                result = call(*arguments, **named)
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(result)

        self.threads.put(self, SLICE_SEC, _run_all, work)
        return done

    def charge(self, seconds: float) -> None:
        """A call of ``submit`` has decoded ``seconds`` of audio."""
        self.threads.charge(self, max(LEAST_SEC, seconds) - SLICE_SEC)


def _run_all(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()


async def decoded_in_slices(
    lane: Lane, pieces: Iterator[Samples], sample_rate: int
) -> AsyncGenerator[list[Samples], None]:
    """Yield what a decoder yields, slice by slice. It goes on with the next slice only when that is asked for."""
    more = True
    while more:
        taken, more = await run_in_thread(lane, _one_slice, pieces, int(SLICE_SEC * sample_rate))
        lane.charge(sum(map(len, taken)) / sample_rate)
        yield taken


def _one_slice(pieces: Iterator[Samples], samples: int) -> tuple[list[Samples], bool]:
    taken: list[Samples] = []
    for piece in pieces:
        taken.append(piece)
        samples -= len(piece)
        if samples <= 0:
            return taken, True
    return taken, False

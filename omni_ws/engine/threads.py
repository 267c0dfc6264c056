"""The machine's cores and memory, threads for blocking work, the limits on decoded media, and the end of tasks."""

from __future__ import annotations

import asyncio
import enum
import heapq
import logging
import os
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any, Final, NamedTuple, ParamSpec, Self, TypeAlias, TypeVar

from omni_ws.audio.pcm import Samples
from omni_ws.core.quota import ByteBudget
from omni_ws.errors import EngineOverloaded, PayloadTooLarge

T = TypeVar("T")
P = ParamSpec("P")

log = logging.getLogger(__name__)

_MEMBERSHIPS: Final = Path("/proc/self/cgroup")
_CGROUPS: Final = Path("/sys/fs/cgroup")

_processes = 1


def share_cores(processes: int) -> None:
    """Have ``cores`` return an equal share of the machine's cores, which ``processes`` worker processes share."""
    global _processes
    _processes = processes


def cores() -> int:
    """Return how many cores this process may use, at least 1.

    A container or ``taskset`` may leave a process fewer cores than the machine has. A quota of CPU time is rounded down
    to whole cores: more threads would stall one another.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min(allowed, _quota())) // _processes)


def free_cores() -> int:
    """Return how many of ``cores`` were idle on average over the last five minutes, at least 1.

    Over five minutes, the load of the server's own start, such as a download, hardly counts.
    """
    try:
        busy = os.getloadavg()[1] / (os.cpu_count() or 1)
    except (OSError, AttributeError):  # the system does not tell
        busy = 0.0
    return max(1, round(cores() * (1 - busy)))


def _quota() -> float:
    """Return the CPU quota of this process's control groups (version 1 or 2), in cores; infinite without a quota."""
    quotas = [float("inf")]
    for version, group in _control_groups():
        with suppress(OSError, ValueError, ZeroDivisionError):  # no such group, or no quota
            quotas.append(_quota_of_version_2(group) if version == 2 else _quota_of_version_1(group))
    return min(quotas)


def _control_groups() -> Iterator[tuple[int, Path]]:
    """Yield version and folder of the control groups that may limit this process, with their parents.

    In a container, a path may be the one outside of the container, and not exist.
    """
    try:
        lines = _MEMBERSHIPS.read_text("utf-8").splitlines()
    except OSError:  # no Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            version, root = 2, _CGROUPS
        elif "cpu" in controllers.split(","):
            version, root = 1, _CGROUPS / "cpu"
        else:
            continue
        inside = PurePosixPath(path.lstrip("/"))
        for group in (inside, *inside.parents):
            yield version, root / group


def _quota_of_version_2(group: Path) -> float:
    quota, period = (group / "cpu.max").read_text("utf-8").split()
    return float("inf") if quota == "max" else int(quota) / int(period)


def _quota_of_version_1(group: Path) -> float:
    quota = int((group / "cpu.cfs_quota_us").read_text("utf-8"))
    return float("inf") if quota < 0 else quota / int((group / "cpu.cfs_period_us").read_text("utf-8"))


def available_memory() -> int | None:
    """Return how many bytes of memory may be used; None if the system does not report it.

    This is the machine's available memory (where only the total is reported, the total), or what the limit of the
    container (cgroup v2) leaves if that is less.
    """
    return min((*_free_of_machine(), *_free_of_groups()), default=None)


def _free_of_machine() -> Iterator[int]:
    with suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                yield int(value.split()[0]) * 1024
                return
    with suppress(OSError, ValueError, AttributeError):
        yield os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _free_of_groups() -> Iterator[int]:
    """Yield how many bytes each limit of this process's control groups (version 2) leaves.

    Cached files that the kernel can drop count as free.
    """
    for version, group in _control_groups():
        if version == 2:
            with suppress(OSError, ValueError, KeyError):  # no such group, or no limit
                limit, used = (int((group / name).read_text("ascii")) for name in ("memory.max", "memory.current"))
                kinds = dict(line.split() for line in (group / "memory.stat").read_text("ascii").splitlines())
                yield max(0, limit - used + int(kinds["inactive_file"]))


# Blocking calls run in threads, each kind of work in its own pool. The event loop's default executor is only for name
# look-ups and for work at the start and the end of the server.


class Work(enum.Enum):
    """The kinds of short work that run off the event loop; the value is the number of threads of a kind.

    Kinds do not wait for one another: a body of 20 MB must not delay the next 20 ms of a call, and a slow disk must
    delay neither. (Decoding of audio and speech detection run in ListeningThreads.)
    """

    #: Parsing and writing JSON of large bodies. It holds the GIL, so more threads would gain nothing.
    BODIES = 2
    #: Encoding the audio of calls, a packet at a time.
    CALLS = 1
    #: Encoding the audio of other answers, if it is compressed or long.
    ENCODING = 4
    #: Reading files that a request names, and writing pages of metrics.
    FILES = 3


@cache
def _threads(work: Work) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(work.value, thread_name_prefix=work.name.lower())


async def run_work(work: Work, call: Callable[..., T], *arguments: object) -> T:
    """Run ``call(*arguments)`` in the threads for ``work`` and return its result."""
    return await asyncio.wrap_future(_threads(work).submit(call, *arguments))


class SoleThread(ThreadPoolExecutor):
    """An executor with a single thread, for calls that must not run concurrently."""

    def __init__(self, name: str) -> None:
        super().__init__(1, thread_name_prefix=name)
        self._last: Future[Any] | None = None

    def submit(self, call: Callable[P, T], /, *arguments: P.args, **options: P.kwargs) -> Future[T]:
        self._last = future = super().submit(call, *arguments, **options)
        return future

    @property
    def idle(self) -> bool:
        """Whether no call runs or waits, so that the owner may run a call in the owner's thread.

        False also if the last call was cancelled, since this call may still be running.
        """
        return self._last is None or (self._last.done() and not self._last.cancelled())


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
    """Run ``call``, which releases a resource, to completion, even if the waiting task is cancelled."""
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


async def end_tasks(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel those of ``tasks`` that run, and wait for the end of all; their results and errors are dropped."""
    ending = [task for task in tasks if task is not None]
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


# The threads in which a server decodes audio and detects speech.

#: The decoded audio of a slice. Speech detection in it takes about 5 ms, decoding less.
SLICE_SEC: Final = 1.0
#: The minimum that a slice counts as, since a thread is woken for it.
LEAST_SEC: Final = 0.03
#: The limit on slices that are passed to ``run`` together: about the slices of eight sessions without speech.
MOST_TOGETHER_SEC: Final = 3.0
MAX_THREADS: Final = 4

#: A function that does several pieces of work in a row. Must not raise.
Run: TypeAlias = Callable[[list[Any]], None]


class _Slice(NamedTuple):
    """A queued slice of work. Slices are ordered by their end on the queue's clock, then by arrival."""

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
    """The threads that decode audio and detect speech, which all sessions share fairly. Thread-safe.

    Work is done in slices of about ``SLICE_SEC`` of decoded audio. Each session has a Lane, and all lanes get the same
    share of decoded seconds, by fair queueing (start-time fair queueing, Goyal, Vin and Cheng, 1996). Its clock counts
    decoded seconds: a slice begins where the previous slice of its lane ends, but not before the current time of the
    clock, and the slice with the earliest end is done first. So a session with little audio waits only for the slices
    that are in progress, however much audio others have sent; a session with more than its share is delayed only by its
    own backlog.

    Threads start when they are first needed.
    """

    def __init__(self, threads: int | None = None) -> None:
        self._most = threads
        self._executor: ThreadPoolExecutor | None = None
        self.lock = threading.Lock()
        self._waiting: list[_Slice] = []
        self._number = 0
        #: The number of threads that work, or are about to.
        self._active = 0
        #: The queue's clock: the begin of the slice taken last.
        self.now = 0.0

    def put(self, lane: Lane, seconds: float, run: Run, work: Any, *, at_most: int = 1, wake: bool = True) -> None:
        """Queue ``work`` of about ``seconds`` seconds of audio; a thread will call ``run`` with it.

        ``run`` gets a list with the work of up to ``at_most`` consecutive slices that have the same ``run``. With
        ``wake`` False no thread starts for this work before the next call of the method ``wake``.
        """
        with self.lock:
            begins, ends = lane.book(seconds)
            self._number += 1
            heapq.heappush(self._waiting, _Slice(ends, self._number, begins, run, work, at_most))
        if wake:
            self.wake()

    def wake(self) -> None:
        """Start work on one more thread, if work waits and a thread is free."""
        with self.lock:
            if self._executor is None:
                self._most = self._most or min(MAX_THREADS, cores())
                self._executor = ThreadPoolExecutor(self._most, thread_name_prefix="listening")
            assert self._most is not None
            if not self._waiting or self._active >= self._most:
                return
            self._active += 1
        self._executor.submit(self._work)

    def _work(self) -> None:
        while taken := self._take():
            try:
                taken[0].run([each.work for each in taken])
            except Exception:
                log.exception("listening failed")

    def _take(self) -> list[_Slice]:
        """Remove and return the slices that a thread does next, in one call of ``run``; [] ends the thread's work."""
        with self.lock:
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


#: The threads of this process. A worker process has its share of the cores.
_ALL: Final = ListeningThreads()


class Lane(Executor):
    """One session's share of the ListeningThreads: an executor, each of whose calls counts as a slice of SLICE_SEC."""

    def __init__(self, threads: ListeningThreads = _ALL) -> None:
        self.threads = threads
        #: The end of the last slice on the clock of the threads.
        self._booked = 0.0

    def book(self, seconds: float) -> tuple[float, float]:
        """Return begin and end, on the queue's clock, of a new slice of about ``seconds``.

        Called by ListeningThreads, which holds its lock.
        """
        begins = max(self.threads.now, self._booked)
        self._booked = begins + max(LEAST_SEC, seconds)
        return begins, self._booked

    def submit(self, call: Callable[P, T], /, *arguments: P.args, **named: P.kwargs) -> Future[T]:
        """Run a call in a thread. Afterwards the caller passes the duration of the decoded audio to ``charge``."""
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
        """Correct the cost of a call of ``submit`` from SLICE_SEC to the ``seconds`` of audio that the call decoded."""
        with self.threads.lock:
            self._booked += max(LEAST_SEC, seconds) - SLICE_SEC


def _run_all(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()


async def decoded_in_slices(
    lane: Lane, pieces: Iterator[Samples], sample_rate: int
) -> AsyncGenerator[list[Samples], None]:
    """Yield the ``pieces`` of a decoder in lists of about SLICE_SEC of audio, each decoded when it is requested."""
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


# MediaRoom: limits the memory of decoded media, since an image of a few kilobytes may have 100 MB of pixels.


#: How many images and videos are decoded at the same time.
DECODING_SLOTS: Final = max(1, min(3, cores() // 2))
#: The longest wait for a slot, in seconds.
MAX_WAIT_SEC: Final = 30.0
_RETRY_MS: Final = 1000
#: The budget of an engine that runs outside a server.
_DEFAULT_BYTES: Final = 1 << 30


class MediaRoom:
    """A limit on the memory of decoded media, and on concurrent decodings of pictures, for all requests of a server.

    A request reserves memory in ``budget`` through its MediaShare. Decoding an image or video waits for one of the
    *decoding slots* and for memory; decoding text and audio reserves memory without waiting. ``take`` and ``give`` may
    be called in any thread, other methods only on the event loop.
    """

    def __init__(self, budget: ByteBudget | None = None, *, slots: int = DECODING_SLOTS) -> None:
        self.budget = budget or ByteBudget(_DEFAULT_BYTES)
        self._lock = threading.Lock()
        self._free_slots = slots
        self._waiting: deque[_Waiting] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None

    def share(self) -> MediaShare:
        """Return a new share, for one request."""
        return MediaShare(self)

    def take(self, size: int) -> None:
        """Reserve ``size`` bytes. Raises EngineOverloaded, and reserves nothing, if this exceeds the budget."""
        with self._lock:
            if self.budget.held + size > self.budget.capacity:
                raise EngineOverloaded(
                    "the server's memory for decoded media is full; retry later", retry_after_ms=_RETRY_MS
                )
            self.budget.charge_decoded(size)

    def give(self, size: int) -> None:
        """Return ``size`` reserved bytes."""
        with self._lock:
            self.budget.charge_decoded(-size)
        if self._waiting and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._admit)

    @asynccontextmanager
    async def slot(self, share: MediaShare, size: int) -> AsyncIterator[None]:
        """Hold a decoding slot for the block, and reserve ``size`` bytes in ``share``, which stay reserved after it.

        Requests wait for slots and memory in the order of their calls, but one that needs no memory overtakes those
        that wait for memory. Raises EngineOverloaded after ``MAX_WAIT_SEC``, or immediately if no other request holds
        decoded media that it could release; PayloadTooLarge, see ``MediaShare.take``.
        """
        await self._enter(share, size)
        try:
            yield
        finally:
            self._free_slots += 1
            self._admit()

    async def _enter(self, share: MediaShare, size: int) -> None:
        self._loop = asyncio.get_running_loop()
        waiting = _Waiting(share, size, self._loop.create_future())
        self._waiting.append(waiting)
        self._admit()
        try:
            async with asyncio.timeout(MAX_WAIT_SEC):
                await waiting.admitted
        except BaseException as error:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            elif not waiting.admitted.cancelled() and waiting.admitted.exception() is None:
                share.give(size)
                self._free_slots += 1
            self._admit()
            if isinstance(error, TimeoutError):
                message = f"the media waited more than {MAX_WAIT_SEC:g} s for decoding; retry later"
                raise EngineOverloaded(message, retry_after_ms=_RETRY_MS) from None
            raise

    def _admit(self) -> None:
        """Grant slots to waiting requests, in order of arrival, while there are slots and memory."""
        blocked = False
        for one in tuple(self._waiting):
            if not self._free_slots:
                return
            # A request that needs no memory overtakes the others, which may be waiting for the memory that it holds.
            if blocked and one.size:
                continue
            if self._try_admit(one):
                self._waiting.remove(one)
            else:
                blocked = True

    def _try_admit(self, one: _Waiting) -> bool:
        """Grant or refuse a slot to ``one``; return False if it has to wait for memory."""
        if one.admitted.done():  # cancelled, but its task has not run since
            return True
        try:
            one.share.take(one.size)
        except EngineOverloaded as error:
            if self.budget.decoded > one.share.size:
                return False  # other requests hold memory that they will release
            one.admitted.set_exception(error)
        except PayloadTooLarge as error:
            one.admitted.set_exception(error)
        else:
            self._free_slots -= 1
            one.admitted.set_result(None)
        return True


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """A request that waits for a slot. ``admitted`` gets a result if the slot is granted, an exception if refused."""

    share: MediaShare
    size: int
    admitted: asyncio.Future[None]


class MediaShare:
    """One request's reservations in a MediaRoom; the end of the share's ``with`` block returns them all."""

    def __init__(self, room: MediaRoom) -> None:
        self.size = 0
        self._room = room
        self._lock = threading.Lock()
        self._closed = False

    def slot(self, size: int) -> AbstractAsyncContextManager[None]:
        """Hold a decoding slot, see ``MediaRoom.slot``."""
        return self._room.slot(self, size)

    def take(self, size: int) -> None:
        """Reserve ``size`` bytes, in any thread.

        Raises PayloadTooLarge if this request alone would exceed the server's budget, EngineOverloaded if all requests
        together would.
        """
        with self._lock:
            if self.size + size > self._room.budget.capacity:
                raise PayloadTooLarge(
                    f"the decoded media of this request exceed the {self._room.budget.capacity} bytes"
                    " that the server can hold"
                )
            if not self._closed:
                self._room.take(size)
                self.size += size

    def give(self, size: int) -> None:
        """Return ``size`` reserved bytes, in any thread."""
        with self._lock:
            if not self._closed:
                self._room.give(size)
                self.size -= size

    def close(self) -> None:
        """Return all reserved bytes. Later calls, by threads that still decode, have no effect. Idempotent."""
        with self._lock:
            size, self.size, self._closed = self.size, 0, True
        self._room.give(size)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

"""ListeningThreads: the threads in which a server decodes audio and detects speech, shared fairly by all sessions.

Work is done in slices of about ``SLICE_SEC`` of decoded audio, and each session, by its Lane, gets the same share of
decoded seconds. It is a fair queue (start-time fair queueing, Goyal, Vin and Cheng, 1996) on a clock that counts these
seconds: a slice begins where the last one of its lane ended, or now if that is past, and the slice that would end first
is done first. So a session that asks for little is served at once, whatever others have sent, and waits for nothing but
the slices that are being done; one that asks for more than its share is late by its own backlog and by no other's.
"""

from __future__ import annotations

import heapq
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, Final, NamedTuple, ParamSpec, TypeAlias, TypeVar

from omni_ws.audio.samples import Samples
from omni_ws.engine.cores import cores
from omni_ws.engine.threads import run_in_thread

P = ParamSpec("P")
T = TypeVar("T")

#: Decoded audio of a slice. Detecting speech in it takes some 5 ms, decoding it less.
SLICE_SEC: Final = 1.0
#: What each slice counts at least: a thread was woken for it.
LEAST_SEC: Final = 0.03
#: What is done together has no more: the pieces of eight sessions in which nobody speaks.
MOST_TOGETHER_SEC: Final = 3.0
MAX_THREADS: Final = 4

log = logging.getLogger(__name__)

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
    """Does the work of all lanes. Threads start when they are first needed. Thread-safe."""

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

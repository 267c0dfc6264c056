"""SpeechWorkers: the threads that detect the speech of all sessions of a server."""

from __future__ import annotations

import asyncio
import importlib.util
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Final, TypeAlias

from omni_ws.audio.speech_watch import PauseJudge, StreamPiece, Watched, hear_together
from omni_ws.audio.vad import PACKAGE, SpeechDetector
from omni_ws.engine.cores import cores
from omni_ws.metrics import Metrics
from omni_ws.wire.session_config import TurnDetectionType

MAX_THREADS: Final = 4
#: How long audio that is not urgent waits for a round. Long enough to collect several windows, and far below the
#: default silence that ends a turn.
ROUND_SEC: Final = 0.24
#: Sessions in one round. Eight of them occupy a thread for about 5 ms; more would gain little.
MAX_IN_ROUND: Final = 8

#: Takes the outcome of a piece, on the event loop.
Done: TypeAlias = Callable[[Watched | Exception], None]


class SpeechWorkers:
    """Runs speech detection in worker threads, in rounds that serve several sessions at once.

    Waking a thread, and the event loop again when it is done, costs as much as detecting speech in a window, and the
    network takes half the time for a window when it judges those of eight sessions at once. Sessions without urgent
    audio therefore join a round: when it begins, all of them submit their pieces, and one thread takes them together.

    Threads are created when they are first needed.
    """

    def __init__(self, metrics: Metrics | None = None, *, judge: PauseJudge | None = None) -> None:
        #: Makes the detector of a session.
        self.new_detector: Callable[[], SpeechDetector] = SpeechDetector
        #: Says whether speakers have finished; None without a model for that.
        self.judge = judge
        self._metrics = metrics or Metrics()
        self._executor: ThreadPoolExecutor | None = None
        #: Callbacks of the sessions in the next round.
        self._next_round: list[Callable[[], None]] = []
        #: Pieces that no thread has taken yet.
        self._waiting: deque[tuple[StreamPiece, Done]] = deque()
        #: Whether a round is beginning, whose pieces wait for one another.
        self._in_round = False
        self._closed = False

    @property
    def available(self) -> bool:
        """Whether the detector's package is installed."""
        return importlib.util.find_spec(PACKAGE) is not None

    @property
    def turn_detection_types(self) -> tuple[TurnDetectionType, ...]:
        """The kinds of turn detection that there are here."""
        if not self.available:
            return ()
        return ("server_vad",) if self.judge is None else ("server_vad", "semantic_vad")

    def submit(self, piece: StreamPiece, done: Done) -> None:
        """Hear ``piece`` in a thread, then call ``done`` with the outcome on the event loop of the caller.

        ``done`` must not raise. It is not called for pieces that no thread has taken by ``close``, nor once the loop is
        closed. This takes a callback because a future for each piece of audio would cost as much as the piece itself.
        """
        self._waiting.append((piece, done))
        if not self._in_round:
            self._wake_thread()

    def when_answered(self, question: Future[float], done: Callable[[], None]) -> None:
        """Call ``done``, which must not raise, on the event loop of the caller once ``question`` has its answer."""
        loop = asyncio.get_running_loop()

        def tell(_: Future[float]) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(done)

        question.add_done_callback(tell)

    def join_round(self, begins: Callable[[], None]) -> None:
        """Call ``begins`` within ``ROUND_SEC``. All work submitted by the callbacks of a round runs in one thread."""
        if len(self._next_round) == MAX_IN_ROUND:
            self._next_round = []
        if not self._next_round:
            asyncio.get_running_loop().call_later(ROUND_SEC, self._begin_round, self._next_round)
        self._next_round.append(begins)

    def _begin_round(self, sessions: list[Callable[[], None]]) -> None:
        if sessions is self._next_round:
            self._next_round = []
        self._in_round = True
        try:
            for begins in sessions:
                begins()
        finally:  # a session that fails does not discard the work of the others
            self._in_round = False
            if self._waiting:
                self._wake_thread()

    def _wake_thread(self) -> None:
        if self._closed:
            return
        if self._executor is None:
            threads = min(MAX_THREADS, cores())
            self._executor = ThreadPoolExecutor(threads, thread_name_prefix="speech")
        self._executor.submit(self._run, asyncio.get_running_loop())

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        """Runs in a worker thread: hears the pieces that wait, of a round or because all threads were busy."""
        begun = time.monotonic()
        taken: list[tuple[StreamPiece, Done]] = []
        with suppress(IndexError):  # another thread has taken the last
            while len(taken) < MAX_IN_ROUND:
                taken.append(self._waiting.popleft())
        if not taken:
            return
        outcomes = hear_together([piece for piece, _ in taken])
        self._metrics.listening_pieces.inc(len(taken))
        self._metrics.listening_seconds.inc(time.monotonic() - begun)
        with suppress(RuntimeError):  # the loop is closed
            for (_, done), outcome in zip(taken, outcomes, strict=True):
                loop.call_soon_threadsafe(done, outcome)

    def close(self) -> None:
        """Wait for running work, some milliseconds a thread, and free the threads. Idempotent."""
        self._closed = True
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(cancel_futures=True)
        if self.judge is not None:
            self.judge.close()

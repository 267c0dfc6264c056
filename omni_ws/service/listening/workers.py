"""SpeechWorkers: detects the speech of all sessions of a server, in the threads that they share."""

from __future__ import annotations

import asyncio
import importlib.util
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Final, TypeAlias

from omni_ws.audio.speech_watch import PauseJudge, StreamPiece, Watched, hear_together
from omni_ws.audio.vad import PACKAGE, SpeechDetector
from omni_ws.engine.threads import Lane, ListeningThreads
from omni_ws.metrics import Metrics
from omni_ws.wire.session_config import TurnDetectionType

#: How long audio that is not urgent waits for a round. Long enough to collect several windows, and far below the
#: default silence that ends a turn.
ROUND_SEC: Final = 0.24
#: Sessions in one round. Eight of them occupy a thread for about 5 ms; more would gain little.
MAX_IN_ROUND: Final = 8

#: Takes the outcome of a piece, on the event loop.
Done: TypeAlias = Callable[[Watched | Exception], None]
_Work: TypeAlias = tuple[StreamPiece, Done, asyncio.AbstractEventLoop]


class SpeechWorkers:
    """Runs speech detection in the ListeningThreads, in rounds that serve several sessions at once.

    Waking a thread, and the event loop again when it is done, costs as much as detecting speech in a window, and the
    network takes half the time for a window when it judges those of eight sessions at once. Sessions without urgent
    audio therefore join a round: when it begins, all of them submit their pieces, and one thread takes them together.
    """

    def __init__(self, metrics: Metrics | None = None, *, judge: PauseJudge | None = None) -> None:
        #: Makes the detector of a session.
        self.new_detector: Callable[[], SpeechDetector] = SpeechDetector
        #: Says whether speakers have finished; None without a model for that.
        self.judge = judge
        self._metrics = metrics or Metrics()
        #: Callbacks of the sessions in the next round.
        self._next_round: list[Callable[[], None]] = []
        #: Whether a round is beginning, whose pieces wait for one another.
        self._in_round = False
        #: The threads that have work of that round, and were not told.
        self._asleep: ListeningThreads | None = None
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

    def submit(self, piece: StreamPiece, done: Done, lane: Lane) -> None:
        """Hear a slice of ``piece`` in a thread, then call ``done`` with the outcome on the event loop of the caller.

        ``done`` must not raise. It is not called for pieces that no thread has taken by ``close``, nor once the loop is
        closed. This takes a callback because a future for each piece of audio would cost as much as the piece itself.
        """
        if self._closed:
            return
        if self._in_round:
            self._asleep = lane.threads
        work: _Work = (piece, done, asyncio.get_running_loop())
        lane.threads.put(lane, piece.seconds, self._run, work, at_most=MAX_IN_ROUND, wake=not self._in_round)

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
            threads, self._asleep = self._asleep, None
            if threads is not None:
                threads.wake()

    def _run(self, taken: Sequence[_Work]) -> None:
        """Runs in a thread: hears the pieces that wait, of a round or because all threads were busy."""
        if self._closed:
            return
        begun = time.monotonic()
        outcomes = hear_together([piece for piece, _, _ in taken])
        self._metrics.listening_pieces.inc(len(taken))
        self._metrics.listening_seconds.inc(time.monotonic() - begun)
        for (_, done, loop), outcome in zip(taken, outcomes, strict=True):
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(done, outcome)

    def close(self) -> None:
        """Begin no more work. Idempotent."""
        self._closed = True
        if self.judge is not None:
            self.judge.close()

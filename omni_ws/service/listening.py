"""Parts of turn detection: the threads that all sessions share, the input of each, and the judge of pauses."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Final, Protocol, TypeAlias

from msgspec.structs import replace

from omni_ws.audio.container import parse_audio_format
from omni_ws.audio.echo import NoiseReduction, has_library
from omni_ws.audio.pcm import Samples
from omni_ws.audio.speech_watch import LIKELY, StreamPiece, Watched, hear_together
from omni_ws.audio.vad import SpeechDetector, has_detector
from omni_ws.core.chunks import SAMPLE_BYTES, AudioFormat, InputChunk, Modality
from omni_ws.engine.threads import Lane, ListeningThreads
from omni_ws.metrics import Metrics
from omni_ws.wire.session_config import TurnDetectionConfig, TurnDetectionType

log = logging.getLogger(__name__)

#: How long audio that is not urgent waits for a round at most. Long enough to collect several windows, and far below
#: the default silence that ends a turn.
ROUND_SEC: Final = 0.24
#: Sessions in one round. Eight of them occupy a thread for about 5 ms; more would gain little.
MAX_IN_ROUND: Final = 8

#: A callback that gets the outcome of a piece, on the event loop.
Done: TypeAlias = Callable[[Watched | Exception], None]
_Work: TypeAlias = tuple[StreamPiece, Done, asyncio.AbstractEventLoop]


class SpeechWorkers:
    """Detects speech in the audio of all sessions, in the ListeningThreads, in rounds that serve several sessions.

    Waking a thread, and the event loop again when it is done, costs as much as detecting speech in a window, and the
    detector's model takes half the time for a window when it judges those of eight sessions together. Sessions without
    urgent audio therefore join a round: when it begins, all of them submit their pieces, and one thread judges them
    together.
    """

    def __init__(self, metrics: Metrics | None = None, *, judge: TurnJudge | None = None) -> None:
        #: Creates the speech detector of a session.
        self.new_detector: Callable[[], SpeechDetector] = SpeechDetector
        #: Tells in pauses whether the speaker has finished; None without a model for that.
        self.judge = judge
        self._metrics = metrics or Metrics()
        #: Callbacks of the sessions in the next round.
        self._next_round: list[Callable[[], None]] = []
        #: Whether the callbacks of a round are running: the threads are woken after the last one.
        self._in_round = False
        #: The threads that got work of that round and are still to be woken; None if there are none.
        self._asleep: ListeningThreads | None = None
        self._closed = False

    @cached_property
    def available(self) -> bool:
        """Whether the detector can run: with its package, or with a runtime and fetched weights. Checked once."""
        return has_detector()

    @property
    def cleans_audio(self) -> bool:
        """Whether the library that removes echo and noise is installed."""
        return has_library()

    @property
    def turn_detection_types(self) -> tuple[TurnDetectionType, ...]:
        """The kinds of turn detection that this server supports."""
        if not self.available:
            return ()
        return ("server_vad",) if self.judge is None else ("server_vad", "semantic_vad")

    def submit(self, piece: StreamPiece, done: Done, lane: Lane) -> None:
        """Judge a slice of ``piece`` in a thread, then call ``done`` with the outcome on the event loop of the caller.

        ``lane`` is the session's place in the threads. ``done`` must not raise. After ``close``, pieces that no thread
        has begun are dropped, and their ``done`` is not called; nor is any once the loop is closed. A callback is used
        because a future for each piece of audio would cost as much as the piece itself.
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
        """Call ``begins`` within ``ROUND_SEC``. One thread judges together what the callbacks of a round submit."""
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
        """Judge pieces together, in a thread: those of a round, or those that waited while all threads were busy."""
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
        """Begin no more work, and close the judge, which blocks until its present question is answered. Idempotent."""
        self._closed = True
        if self.judge is not None:
            self.judge.close()


# Ordered input that waits for turn detection.

_AUDIO: Final = Modality.AUDIO  # compared for every chunk: found faster than a member of an enum

#: Charged for an item besides its payload.
ITEM_OVERHEAD_BYTES: Final = 128
#: Input that has waited less than this when a round begins joins the next round, which finds more audio to process.
MIN_WAIT_SEC: Final = ROUND_SEC / 2

#: A longer chunk is cut, so that no session occupies a thread for long.
MAX_PIECE_BYTES: Final = 64 * 1024


@dataclass(frozen=True, slots=True)
class Reached:
    """A mark in the input: ``call`` is called once all audio before it has been judged."""

    call: Callable[[], None]


@dataclass(frozen=True, slots=True)
class ListeningSettings:
    """Settings of turn detection, and the default audio format. ``turns`` is None while turn detection is off.

    ``echo``: the echo of what the client plays is removed from its audio. ``noise``: the suppression of noise in the
    detector's input; the audio of requests keeps its noise.
    """

    turns: TurnDetectionConfig | None
    audio: AudioFormat
    echo: bool = False
    noise: NoiseReduction | None = None


#: Input, settings that apply from here on, a mark, or None for an end of input without a chunk.
Item: TypeAlias = InputChunk | ListeningSettings | Reached | None


@dataclass(frozen=True, slots=True)
class AudioPiece:
    """Consecutive audio that is judged together: of one format and one ``ref`` (the client's name for its request)."""

    source: AudioFormat
    payload: bytes
    first: InputChunk
    last: InputChunk
    #: The positions in ``payload`` where the client's chunks begin, and the numbers of these chunks.
    borders: tuple[int, ...]
    numbers: tuple[int | None, ...]
    #: When the piece was taken from the queue, on the loop's clock.
    came: float

    def number_at(self, position: int) -> int | None:
        """Return the number of the chunk in which the byte at ``position`` came; None if that chunk has no number."""
        behind = bisect_right(self.borders, position)
        return self.numbers[behind - 1] if behind else self.first.sequence_id

    def as_chunk(self) -> InputChunk:
        """Return the piece as one chunk, with the number of its last chunk and the timestamp of its first.

        The chunk does not end the input, even if the last one of the piece does.
        """
        first = self.first
        return replace(
            self.last, payload=self.payload, timestamp_ms=first.timestamp_ms, format=first.format, end_of_input=False
        )


class ListeningQueue:
    """The input of one session that waits for turn detection, in order, with its bytes and milliseconds counted.

    A session that stops sending in the middle of a window must not wait forever: the queue joins the rounds of
    ``workers`` while it holds audio. If it has not been empty for ``MIN_WAIT_SEC`` when a round begins, ``overdue`` is
    set, and ``on_overdue`` is called.
    """

    def __init__(self, workers: SpeechWorkers, on_overdue: Callable[[], None]) -> None:
        self._workers = workers
        self._on_overdue = on_overdue
        #: Whether the first item has waited long enough to be processed, however little audio there is.
        self.overdue = False
        #: When the queue last ceased to be empty, on the loop's clock.
        self._waiting_since = 0.0
        self._in_round = False
        #: The default format, changed by ``expect``. The length of all audio is computed in this format.
        self.audio = AudioFormat()
        #: Payloads and overhead of all items.
        self.waiting_bytes = 0
        #: Length of all audio.
        self.waiting_ms = 0.0
        #: Items that make the audio before them urgent: anything but audio, and audio that ends the input.
        self.urgent = 0
        self._items: deque[Item] = deque()

    def expect(self, audio: AudioFormat) -> None:
        """Set the format of chunks that do not name one."""
        self.audio = audio

    def __len__(self) -> int:
        return len(self._items)

    @property
    def input(self) -> list[InputChunk | None]:
        """The items except settings and marks; None stands for an end of input without a chunk."""
        return [item for item in self._items if item is None or isinstance(item, InputChunk)]

    def before(self, call: Callable[[], None]) -> int:
        """Return how many items of ``input`` are before the last mark that calls ``call``; 0 without one."""
        marks = [place for place, item in enumerate(self._items) if isinstance(item, Reached) and item.call == call]
        before = islice(self._items, max(marks, default=0))
        return sum(item is None or isinstance(item, InputChunk) for item in before)

    @property
    def audio_is_next(self) -> bool:
        """Whether the next item is audio."""
        return bool(self._items) and _is_audio(self._items[0])

    def ends_file(self, source: AudioFormat | None) -> bool:
        """Whether the next item ends a file of format ``source``: an end of the input, or audio of another format."""
        if not self._items:
            return False
        item = self._items[0]
        if not isinstance(item, InputChunk):
            return item is None
        return self._source_of(item) != source if item.modality is _AUDIO else item.end_of_input

    def put(self, item: Item) -> None:
        """Append an item. An audio chunk of more than ``MAX_PIECE_BYTES`` is split."""
        if not isinstance(item, InputChunk) or len(item.payload) <= MAX_PIECE_BYTES or not _is_audio(item):
            self._append(item)
            return
        payload = item.payload
        for end in range(MAX_PIECE_BYTES, len(payload), MAX_PIECE_BYTES):
            piece, begins = payload[end - MAX_PIECE_BYTES : end], end == MAX_PIECE_BYTES
            self._append(replace(item, payload=piece, end_of_input=False, continues=item.continues or not begins))
        self._append(replace(item, payload=payload[end:], continues=True))

    def _append(self, item: Item) -> None:
        if not self._items:
            self._waiting_since = asyncio.get_running_loop().time()
        self._items.append(item)
        self._count(item, 1)
        if self.waiting_ms and not self._in_round:
            self._join_round()

    def take(self) -> Item:
        """Remove the next item and return it. Raises IndexError if the queue is empty."""
        item = self._items.popleft()
        self.overdue = False
        self._count(item, -1)
        if not self._items:
            self.waiting_ms = 0.0  # items counted before ``audio`` changed leave a difference
        return item

    def take_piece(self) -> AudioPiece:
        """Remove audio from the head of the queue and return it. Requires ``audio_is_next``.

        The piece has one format, one ``ref``, and less than twice ``MAX_PIECE_BYTES``. A chunk that ends the input ends
        the piece.
        """
        first = self._items[0]
        assert isinstance(first, InputChunk)
        source = self._source_of(first)
        chunks: list[InputChunk] = []
        borders: list[int] = []
        numbers: list[int | None] = []
        size = 0
        while self._items and size < MAX_PIECE_BYTES:
            chunk = self._items[0]
            if not isinstance(chunk, InputChunk) or chunk.modality is not _AUDIO:
                break
            if chunk.format != first.format and self._source_of(chunk) != source:
                break
            if chunk.ref != first.ref:
                break
            self.take()
            chunks.append(chunk)
            if not chunk.continues:
                borders.append(size)
                numbers.append(chunk.sequence_id)
            size += len(chunk.payload)
            if chunk.end_of_input:
                break
        payload = first.payload if len(chunks) == 1 else b"".join(chunk.payload for chunk in chunks)
        came = asyncio.get_running_loop().time()
        return AudioPiece(source, payload, first, chunks[-1], tuple(borders), tuple(numbers), came)

    def _source_of(self, chunk: InputChunk) -> AudioFormat:
        return self.audio if chunk.format is None else parse_audio_format(chunk.format, self.audio)

    def withdraw(self) -> int:
        """Remove all input that is not audio, and return the bytes of its payloads. Settings and marks stay."""
        items, size = [self.take() for _ in range(len(self))], 0
        for item in items:
            if item is None or (isinstance(item, InputChunk) and not _is_audio(item)):
                size += 0 if item is None else len(item.payload)
            else:
                self.put(item)
        return size

    def clear(self) -> None:
        while self._items:
            self.take()

    def _join_round(self) -> None:
        self._in_round = True
        self._workers.join_round(self._round_begins)

    def _round_begins(self) -> None:
        self._in_round = False
        if not self._items:
            return
        if asyncio.get_running_loop().time() < self._waiting_since + MIN_WAIT_SEC:
            self._join_round()
            return
        self.overdue = True
        self._on_overdue()

    def _count(self, item: Item, sign: int) -> None:
        size = len(item.payload) if isinstance(item, InputChunk) else 0
        self.waiting_bytes += sign * (size + ITEM_OVERHEAD_BYTES)
        if isinstance(item, InputChunk) and item.modality is _AUDIO and not item.end_of_input:
            self.waiting_ms = max(0.0, self.waiting_ms + sign * self.audio.duration_ms(size))
        else:
            self.urgent += sign


def _is_audio(item: Item) -> bool:
    return isinstance(item, InputChunk) and item.modality is _AUDIO


# The judge of pauses.

#: Questions that may wait for the judge. One takes some 60 ms, and meanwhile the input of its session waits.
MAX_WAITING: Final = 8


class TurnModel(Protocol):
    """A model that judges from the sound of speech whether the speaker has finished."""

    def finished(self, turn: Samples) -> float:
        """Return the probability that the speaker of ``turn`` (at 16 kHz) has finished. Called from one thread."""


class TurnJudge:
    """Judges pauses of all sessions, in a thread of its own: whether the speaker has finished. Thread-safe.

    While ``MAX_WAITING`` questions wait, further ones are answered with 0 immediately: these turns end by silence.
    """

    def __init__(self, model: TurnModel, metrics: Metrics | None = None) -> None:
        self._model = model
        self._metrics = metrics or Metrics()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="turns")
        self._room = threading.BoundedSemaphore(MAX_WAITING)

    def ask(self, turn: Samples) -> Future[float]:
        """Ask for the probability that the speaker of ``turn``, which ends in a pause, has finished. Does not block.

        The answer is 0 if too many questions wait, after ``close``, and if the model fails.
        """
        if not self._room.acquire(blocking=False):
            self._count("skipped")
            return _no()
        try:
            question = self._executor.submit(self._answer, turn)
        except RuntimeError:  # closed
            self._room.release()
            return _no()
        question.add_done_callback(lambda _: self._room.release())
        return question

    def close(self) -> None:
        """Block until the present question is answered, and cancel those that wait. Idempotent."""
        self._executor.shutdown(cancel_futures=True)

    def _answer(self, turn: Samples) -> float:
        begun = time.monotonic()
        try:
            probability = self._model.finished(turn)
        except Exception:
            log.exception("a question of turn detection failed; the turn ends by silence")
            self._count("failed")
            return 0.0
        self._metrics.turn_question_seconds.inc(time.monotonic() - begun)
        self._count("finished" if probability > LIKELY else "unfinished")
        return probability

    def _count(self, answer: str) -> None:
        self._metrics.turn_questions.labels(answer).inc()


def _no() -> Future[float]:
    answer: Future[float] = Future()
    answer.set_result(0.0)
    return answer


# AudioRing: the latest audio of a stream, buffered until turn detection assigns it to a turn.


class AudioRing:
    """A queue of raw audio that can be cut at any sample, regardless of chunk boundaries.

    Times are milliseconds on the stream's time line; ``start_ms`` is the time of the first sample. ``audio`` must be a
    raw format. A cut is rounded down to a whole frame (one sample of each channel).
    """

    def __init__(self, audio: AudioFormat, *, start_ms: float = 0) -> None:
        self.audio = audio
        self._start_ms = start_ms
        self._frame_bytes = SAMPLE_BYTES[audio.encoding] * audio.channels
        self._pieces: deque[InputChunk] = deque()
        #: The stream offsets, in bytes, of the first byte held and of the byte after the last.
        self._begin = 0
        self._end = 0
        #: How many of the next bytes are dropped as they arrive: the rest of a frame whose beginning was dropped.
        self._dropped = 0

    @property
    def held_bytes(self) -> int:
        return self._end - self._begin

    @property
    def begin_ms(self) -> float:
        """The time of the first sample that is held, or of the next one that arrives."""
        return self._start_ms + self.audio.duration_ms(self._begin)

    @property
    def chunks(self) -> list[InputChunk]:
        """All audio that is buffered."""
        return list(self._pieces)

    def append(self, chunk: InputChunk) -> int:
        """Add ``chunk`` at the end of the stream. Return how many of its bytes were dropped (see ``drop``)."""
        dropped = min(self._dropped, len(chunk.payload))
        if dropped:
            self._dropped -= dropped
            self._begin += dropped
            self._end += dropped
            chunk = replace(chunk, payload=chunk.payload[dropped:])
        if chunk.payload:
            self._pieces.append(chunk)
            self._end += len(chunk.payload)
        return dropped

    def cut(self) -> int:
        """Discard an incomplete frame at the end, so that the next chunk begins a new frame.

        Returns how many bytes were removed: fewer than the incomplete frame has if its beginning was taken before.
        """
        incomplete = self._end % self._frame_bytes
        removed = 0
        while self._pieces and removed < incomplete:
            last = self._pieces.pop()
            kept = last.payload[: max(0, len(last.payload) - (incomplete - removed))]
            removed += len(last.payload) - len(kept)
            if kept:
                self._pieces.append(replace(last, payload=kept))
        self._end -= incomplete
        self._begin = min(self._begin, self._end)
        self._dropped = 0
        return removed

    def drop(self) -> int:
        """Discard all audio. The rest of a frame that is incomplete now is discarded as it arrives.

        Returns the number of bytes that were discarded now.
        """
        size = self.forget()
        self._dropped = -self._end % self._frame_bytes
        return size

    def take(self, until_ms: float | None = None) -> list[InputChunk]:
        """Remove and return the audio before ``until_ms``, or all audio if that is None.

        If a chunk is cut, both parts keep its fields, but the second gets a later ``timestamp_ms`` and no ``ref``, as
        the first has named the request already.
        """
        taken = self._remove(until_ms)
        rest = self._pieces[0] if taken and self._pieces else None
        if rest is not None and rest.ref is not None and rest.sequence_id == taken[-1].sequence_id:
            self._pieces[0] = replace(rest, ref=None)
        return taken

    def _remove(self, until_ms: float | None) -> list[InputChunk]:
        until = self._end if until_ms is None else min(self._end, self._offset(until_ms))
        taken: list[InputChunk] = []
        while self._pieces and self._begin < until:
            piece = self._pieces.popleft()
            wanted = until - self._begin
            if len(piece.payload) > wanted:
                piece, rest = self._cut(piece, wanted)
                self._pieces.appendleft(rest)
            taken.append(piece)
            self._begin += len(piece.payload)
        return taken

    def forget(self, until_ms: float | None = None) -> int:
        """Discard the audio before ``until_ms``, or all audio if that is None; return its size in bytes."""
        return sum(len(piece.payload) for piece in self._remove(until_ms))

    def _offset(self, time_ms: float) -> int:
        frames = int(max(0.0, time_ms - self._start_ms) * self.audio.sample_rate / 1000)
        return frames * self._frame_bytes

    def _cut(self, piece: InputChunk, size: int) -> tuple[InputChunk, InputChunk]:
        later = piece.timestamp_ms
        if later is not None:
            later += round(self.audio.duration_ms(size))
        return replace(piece, payload=piece.payload[:size]), replace(
            piece, payload=piece.payload[size:], timestamp_ms=later
        )

"""ContainerReader: feeds a pull parser, such as libav's demuxer, with input that arrives in pieces.

libav reads from a file and blocks until there is data. Here it does so in a thread of its own, in strict alternation
with the caller: ``pieces`` returns when the parser has consumed all input so far and waits for more. The output
therefore depends on the bytes alone, never on timing.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from omni_ws.errors import UnsupportedFormat

T = TypeVar("T")

#: Options of libav: use the stream parameters of the header, instead of probing seconds of input.
STREAMING_OPTIONS = {"probesize": "32", "analyzeduration": "0"}

#: How many samples a decoder's thread may decode in advance of its consumer. The longest block of FLAC has as many.
BURST_SAMPLES = 1 << 16
#: The memory of these samples (float32), doubled because the block that exceeds the limit may be as large again.
BURST_BYTES = 8 * BURST_SAMPLES

#: A few packets that cannot be decoded are common, in recordings cut out of a stream; from this number on they must
#: not outnumber the others.
_BROKEN_PACKETS_ALLOWED = 8


#: An option of ``av.open``: metadata in unknown character sets is replaced instead of raising an error.
LENIENT_METADATA = "replace"


class ByteSource(Protocol):
    """The input of a parser: the part of a file's interface that libav needs."""

    def read(self, size: int, /) -> bytes:
        """Return up to ``size`` bytes, blocking until there are any; ``b""`` at the end of the input."""
        ...


class _Abandoned(Exception):
    """Ends the parser thread when its output is no longer needed."""


class _Exchange(Generic[T]):
    """The state that the parser thread and the caller share.

    It has no reference to its owner, so that the thread does not keep the owner alive.
    """

    def __init__(self, cost: Callable[[T], int], burst: int, block_bytes: int) -> None:
        self._changed = threading.Condition()
        self._block_bytes = block_bytes
        self._cost = cost
        self._burst = burst
        self._input = bytearray()
        self._output: deque[T] = deque()
        self._output_cost = 0
        self._input_ended = False
        #: Whether the parser is blocked waiting for input.
        self._starving = False
        self._abandoned = False
        self._finished = False
        self._error: BaseException | None = None

    # Called from the parser thread:

    def read(self, size: int, /) -> bytes:
        """Return a block of input to the parser, blocking until there is one."""
        # Always a full block, except at the end, so that libav's behaviour does not depend on how the input is cut: a
        # demuxer that seeks back over its header loses its position after a very short read.
        wanted = min(size, self._block_bytes)
        with self._changed:
            while not (len(self._input) >= wanted or self._input_ended or self._abandoned):
                self._starving = True
                self._changed.notify_all()
                self._changed.wait()
            self._starving = False
            # An abandoned parser gets the end of the input, because libav would print an exception raised here.
            block = bytes(self._input[:wanted])
            # Deleting the head of a bytearray does not move the rest.
            del self._input[:wanted]
            return block

    def run(self, parse: Callable[[ByteSource], Iterator[T]]) -> None:
        """Run the parser; the target of the thread."""
        try:
            for item in parse(self):
                self._emit(item)
        except _Abandoned:
            pass
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self._finished = True
                self._changed.notify_all()

    def _emit(self, item: T) -> None:
        """Queue a result, blocking while the queue is full."""
        with self._changed:
            self._output.append(item)
            self._output_cost += self._cost(item)
            while self._output_cost >= self._burst and not self._abandoned:
                self._changed.notify_all()
                self._changed.wait()
            if self._abandoned:
                raise _Abandoned

    # Called by the owner:

    def push(self, data: bytes) -> None:
        """Add input; ignored once the parser has finished."""
        with self._changed:
            if data and not self._finished:
                self._input += data
                self._starving = False
                self._changed.notify_all()

    def end_input(self) -> None:
        """Let the parser reach the end of the input."""
        with self._changed:
            self._input_ended = True
            self._starving = False
            self._changed.notify_all()

    def abandon(self) -> None:
        """Let the parser end without further results."""
        with self._changed:
            self._abandoned = True
            self._input.clear()
            self._changed.notify_all()

    def next_batch(self) -> deque[T]:
        """Return the parser's next results; none when it needs more input or has finished.

        Raises the parser's exception after its last results.
        """
        with self._changed:
            while not (self._starving or self._finished or self._output_cost >= self._burst):
                self._changed.wait()
            batch, self._output = self._output, deque()
            self._output_cost = 0
            self._changed.notify_all()
            if not batch and self._error is not None:
                raise self._error
            return batch


class ContainerReader(Generic[T]):
    """Runs ``parse`` in a thread and feeds it with pushed input.

    The thread starts at the first call of ``pieces`` and ends with the parser, or with ``close``. It also ends when the
    reader is dropped, so ``parse`` must not refer to the owner of the reader.

    ``cost`` measures a result; the parser blocks while the results waiting cost ``burst`` or more. It reads
    ``block_bytes`` at a time: an incomplete block waits for more input.
    """

    def __init__(
        self,
        parse: Callable[[ByteSource], Iterator[T]],
        *,
        cost: Callable[[T], int],
        burst: int,
        block_bytes: int,
        name: str,
    ) -> None:
        self._exchange: _Exchange[T] = _Exchange(cost, burst, block_bytes)
        self._thread = threading.Thread(target=self._exchange.run, args=(parse,), name=name, daemon=True)
        self._finalizer = weakref.finalize(self, self._exchange.abandon)
        self._started = False

    def push(self, data: bytes) -> None:
        """Add input. It is ignored once the parser has finished."""
        self._exchange.push(data)

    def end_input(self) -> None:
        """End the input: the parser sees the end of the file."""
        self._exchange.end_input()

    def pieces(self) -> Iterator[T]:
        """Yield the results for the input so far. Raises the parser's exception after the last of them.

        It has to be exhausted before the next ``push``.
        """
        if not self._started and self._finalizer.alive:
            self._started = True
            self._thread.start()
        while self._started and (batch := self._exchange.next_batch()):
            while batch:
                yield batch.popleft()  # drops the reference: results are large

    def close(self) -> None:
        """End the thread and wait for it. Idempotent."""
        self._finalizer()
        if self._started:
            self._thread.join()
        self._started = False


class PacketTally:
    """Decides whether a stream with undecodable packets is still worth reading.

    A stream is refused when such packets outnumber the others, once there are several of them or at its end.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._good = 0
        self._broken = 0

    def count_good(self) -> None:
        self._good += 1

    def count_broken(self, error: Exception) -> None:
        """Count a packet that cannot be decoded. Raises UnsupportedFormat when there are too many."""
        self._broken += 1
        if self._broken >= _BROKEN_PACKETS_ALLOWED and self._broken > self._good:
            raise UnsupportedFormat(f"{self._what}: the data is corrupt") from error

    def check_at_end(self) -> None:
        """Raise UnsupportedFormat for a stream that had too few good packets."""
        if self._good == 0 or self._broken > self._good:
            raise UnsupportedFormat(f"{self._what}: no usable packet; the data may be corrupt")

"""Containers of which only the beginning is here yet: a parser that pulls, fed by pushing.

libav asks a file for bytes and waits for them. Here it does so in a thread of its own, in strict alternation with the
pusher: ``pieces`` returns when the parser has consumed everything pushed so far and waits for more, so the outcome
depends on the bytes alone, never on timing.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from omni_ws.errors import UnsupportedFormat

T = TypeVar("T")

#: Of libav: take the streams as the header tells them instead of collecting seconds of input to guess.
STREAMING_OPTIONS = {"probesize": "32", "analyzeduration": "0"}

#: A few broken packets are common (a recording cut out of a stream); more broken than good ones are garbage.
_BROKEN_PACKETS_ALLOWED = 8


#: Of ``av.open``: tags in unknown character sets are nobody's concern here.
LENIENT_METADATA = "replace"


class ByteSource(Protocol):
    """What a parser reads from; libav needs no more of a file."""

    def read(self, size: int, /) -> bytes:
        """Waits until there is something; ``b""`` at the end of the input."""
        ...


class _Abandoned(Exception):
    """Ends the parser when nobody wants its result any more."""


class _Exchange(Generic[T]):
    """What the two threads share. Knows nothing of its owner, so that the owner can be dropped."""

    def __init__(self, cost: Callable[[T], int], burst: int, block_bytes: int) -> None:
        self._changed = threading.Condition()
        self._block_bytes = block_bytes
        self._cost = cost
        self._burst = burst
        self._input = bytearray()
        self._output: deque[T] = deque()
        self._output_cost = 0
        self._input_ended = False
        #: The parser waits for input, and there is none.
        self._starving = False
        self._abandoned = False
        self._finished = False
        self._error: BaseException | None = None

    # On the side of the parser:

    def read(self, size: int, /) -> bytes:
        # Always a full block, except at the end. libav must not see how the input was cut: a demuxer that goes back
        # over its header loses its place after a very short read.
        wanted = min(size, self._block_bytes)
        with self._changed:
            while not (len(self._input) >= wanted or self._input_ended or self._abandoned):
                self._starving = True
                self._changed.notify_all()
                self._changed.wait()
            self._starving = False
            # To an abandoned parser the input has ended; an exception through libav's callback would be printed.
            block = bytes(self._input[:wanted])
            # A bytearray forgets its head without moving the rest.
            del self._input[:wanted]
            return block

    def run(self, parse: Callable[[ByteSource], Iterator[T]]) -> None:
        """The life of the thread."""
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
        with self._changed:
            self._output.append(item)
            self._output_cost += self._cost(item)
            while self._output_cost >= self._burst and not self._abandoned:
                self._changed.notify_all()
                self._changed.wait()
            if self._abandoned:
                raise _Abandoned

    # On the side of the pusher:

    def push(self, data: bytes) -> None:
        with self._changed:
            if data and not self._finished:
                self._input += data
                self._starving = False
                self._changed.notify_all()

    def end_input(self) -> None:
        with self._changed:
            self._input_ended = True
            self._starving = False
            self._changed.notify_all()

    def abandon(self) -> None:
        with self._changed:
            self._abandoned = True
            self._input.clear()
            self._changed.notify_all()

    def next_batch(self) -> deque[T]:
        """Waits for the parser; empty when it wants more input or is at its end."""
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
    """``parse`` runs in a thread from the first byte on until the end of the input, an error or ``close``.

    ``parse`` must not refer to the owner of the reader: a reader that is dropped ends its thread. ``cost`` measures a
    result; the parser is halted while results worth ``burst`` have not been taken. It reads ``block_bytes`` at a time:
    what is short of a block waits for more.
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
        """What comes after the parser's end is ignored."""
        self._exchange.push(data)

    def end_input(self) -> None:
        self._exchange.end_input()

    def pieces(self) -> Iterator[T]:
        """What the parser makes of the input so far; raises what it raised, once the good results are out."""
        if not self._started and self._finalizer.alive:
            self._started = True
            self._thread.start()
        while self._started and (batch := self._exchange.next_batch()):
            while batch:
                yield batch.popleft()  # not held any longer than its taker holds it

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        self._finalizer()
        if self._started:
            self._thread.join()
        self._started = False


class PacketTally:
    """Whether a stream whose packets fail to decode now and then is still worth reading."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._good = 0
        self._broken = 0

    def count_good(self) -> None:
        self._good += 1

    def count_broken(self, error: Exception) -> None:
        """Raises UnsupportedFormat when it has been too many."""
        self._broken += 1
        if self._broken >= _BROKEN_PACKETS_ALLOWED and self._broken > self._good:
            raise UnsupportedFormat(f"{self._what}: the data is damaged") from error

    def check_at_end(self) -> None:
        if self._good == 0 or self._broken > self._good:
            raise UnsupportedFormat(f"{self._what}: nothing in it could be decoded")

"""Any sequence of calls of an InputStream, checked against a model (tests/support/checked_input_stream.py).

The first byte tells whether the session takes a single request. Every two bytes are a call: which one, and its
argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import harness

with harness.instrumented():
    from support.checked_input_stream import BUDGET_BYTES, LIMITS, CheckedInputStream

    from omni_ws.core.chunks import InputMode

SECONDS: Final = (0.0, 0.05, 0.1, 3.0, 9.0, 10.0, 29.0, 30.0)
#: Range of sequence numbers relative to the next one: from a few before it to one past the window.
_BEHIND: Final = 3
_OFFSETS: Final = _BEHIND + LIMITS.reorder_window + 1


def check(data: bytes) -> None:
    stream = CheckedInputStream(single_request=data[:1] > b"\x7f")
    last_next = 0
    for place in range(1, len(data) - 1, 2):
        CALLS[data[place] % len(CALLS)](stream, data[place + 1])
        assert stream.model.next >= last_next
        last_next = stream.model.next
    stream.check_forgotten()


def _number(stream: CheckedInputStream, argument: int) -> int:
    return max(0, stream.model.next + argument % _OFFSETS - _BEHIND)


def _payload(argument: int) -> bytes:
    return bytes(argument // _OFFSETS % (LIMITS.max_chunk_bytes + 2))


def _next(stream: CheckedInputStream, argument: int) -> None:
    stream.receive(stream.model.next, bytes(argument % (LIMITS.max_chunk_bytes + 2)), end_of_input=argument > 200)


def _receive(stream: CheckedInputStream, argument: int) -> None:
    stream.receive(_number(stream, argument), _payload(argument))


def _receive_end(stream: CheckedInputStream, argument: int) -> None:
    stream.receive(_number(stream, argument), _payload(argument), end_of_input=True)


CALLS: Final[tuple[Callable[[CheckedInputStream, int], None], ...]] = (
    _next,
    _receive,
    _receive_end,
    lambda stream, argument: stream.receive(None, bytes(argument % 8), end_of_input=argument > 200),
    lambda stream, argument: stream.refuse(_number(stream, argument)),
    lambda stream, _: stream.finish(),
    lambda stream, _: stream.cancel(),
    lambda stream, _: stream.drop_waiting(),
    lambda stream, argument: stream.abandon(argument % 8),
    lambda stream, argument: stream.take(argument % 8, argument // 8),
    lambda stream, argument: stream.forget(argument % 8),
    lambda stream, argument: stream.other_sessions_hold(argument % (BUDGET_BYTES + 1)),
    lambda stream, argument: stream.set_mode(tuple(InputMode)[argument % len(InputMode)]),
    lambda stream, argument: stream.set_reject(bool(argument % 2)),
    lambda stream, argument: stream.set_answering(bool(argument % 2)),
    lambda stream, _: stream.touch(),
    lambda stream, _: stream.take_ack(),
    lambda stream, argument: stream.advance(SECONDS[argument % len(SECONDS)]),
    lambda stream, argument: stream.close() if argument > 250 else None,
)


def seeds() -> Iterator[bytes]:
    two_ends = bytes([2, _BEHIND + 1, 4, _BEHIND + 3, 5, 0, 1, _BEHIND + 2])
    in_order = bytes([0, 4] * 6 + [0, 204] + [16, 0])
    with_a_gap = bytes([1, _BEHIND + 1, 2, _BEHIND + 2, 5, 0, 1, _BEHIND + 4, 17, 3, 0, 3, 0, 2, 9, 8, 10, 0])
    yield b"\0" + in_order * 2
    yield b"\0" + with_a_gap
    yield b"\xff" + in_order + with_a_gap
    yield b"\xff" + two_ends + in_order
    yield b"\0" + bytes([14, 1, 13, 1]) + with_a_gap + bytes([13, 0, 12, 1]) + with_a_gap + bytes([6, 0]) + in_order
    yield b"\0" + bytes([3, 5, 17, 7, 0, 9, 11, 40]) + in_order + bytes([8, 0, 0, 7, 18, 255]) + in_order


if __name__ == "__main__":
    harness.fuzz(check, seeds)

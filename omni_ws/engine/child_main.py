"""The child's side of a process that the server started: messages to and from the server, exiting, and memory.

The module does not import asyncio, which takes memory and time. The server's side is in ``child``.
"""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import struct
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, BinaryIO, Final, NoReturn

import msgspec

if sys.platform == "linux":
    import fcntl

# Messages, in either direction: the lengths of a header and of a body (u32 each, little-endian), the header, which is
# JSON of a msgspec struct or of one of several that are tagged, and the body, which is bytes.

_LENGTHS: Final = struct.Struct("<II")
HEAD_BYTES: Final = _LENGTHS.size
#: The limit on the length of a header, and of a body. A larger length shows that the bytes are no messages.
MAX_PART_BYTES: Final = 1 << 30


#: The size of the buffer of the input pipe, in bytes.
_INPUT_BYTES: Final = 1 << 20


class BrokenMessage(Exception):
    """Raised for bytes that are no message, and for a message that is too long."""


def encode_message(header: msgspec.Struct, body: bytes = b"") -> bytes:
    """Return the bytes of a message. Raises BrokenMessage if ``body`` is longer than MAX_PART_BYTES."""
    if len(body) > MAX_PART_BYTES:
        raise BrokenMessage(f"a message of {len(body)} bytes")
    encoded = msgspec.json.encode(header)
    return b"".join((_LENGTHS.pack(len(encoded), len(body)), encoded, body))


def decode_lengths(head: bytes) -> tuple[int, int]:
    """Return the lengths of the header and the body, from the first bytes of a message. Raises BrokenMessage."""
    lengths: tuple[int, int] = _LENGTHS.unpack(head)
    if max(lengths) > MAX_PART_BYTES:
        raise BrokenMessage(f"a message of {sum(lengths)} bytes")
    return lengths


def decode_header(headers: msgspec.json.Decoder[Any], data: bytes) -> Any:
    """Return the header that ``data`` encodes. Raises BrokenMessage for a header that ``headers`` does not know."""
    try:
        return headers.decode(data)
    except msgspec.MsgspecError as error:
        raise BrokenMessage(f"a header that nobody knows: {error}") from error


class ServerLink:
    """The connection of a child process to the server: messages on standard input, and on standard output.

    ``kinds`` are the types of the server's headers. The process exits at the end of its input, whatever it is doing:
    the server closes the input to end the process, and the input also closes when the server dies. A thread reads the
    messages, and calls ``at_once`` with each header as it arrives. If ``at_once`` returns True, the message is done:
    ``receive`` does not return it.

    The output of C libraries goes to standard error. Signals to the whole process group are ignored.
    """

    def __init__(self, kinds: Any, *, at_once: Callable[[Any], bool] = lambda header: False) -> None:
        leave_signals_to_server()
        _widen_input()
        self._target = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)
        self._headers = msgspec.json.Decoder(kinds)
        self._at_once = at_once
        self._received: queue.SimpleQueue[tuple[Any, bytes]] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="messages", daemon=True).start()

    def receive(self) -> tuple[Any, bytes]:
        """Wait for the next message; return its header and its body."""
        return self._received.get()

    def received(self) -> list[tuple[Any, bytes]]:
        """Return the messages that have arrived, without waiting."""
        # Nothing else takes any.
        return [self._received.get() for _ in range(self._received.qsize())]

    def send(self, header: msgspec.Struct, body: bytes = b"", *, more: bool = False) -> None:
        """Send a message; with ``more``, only at the next ``flush``. Blocks while the server is slow to read.

        If the server is gone, the process exits.
        """
        try:
            self._target.write(encode_message(header, body))
            if not more:
                self._target.flush()
        except BrokenPipeError:
            os._exit(0)

    def flush(self) -> None:
        """Send the messages that were sent with ``more``. If the server is gone, the process exits."""
        try:
            self._target.flush()
        except BrokenPipeError:
            os._exit(0)

    def _read(self) -> NoReturn:
        try:
            # Not by sys.stdin, whose lock this thread would keep when the interpreter ends.
            with open(0, "rb", closefd=False) as source:
                while (message := self._next(source)) is not None:
                    if not self._at_once(message[0]):
                        self._received.put(message)
        except BrokenMessage:
            traceback.print_exc()
        # The main thread may be deep inside a C library: nothing is worth waiting for.
        os._exit(0)

    def _next(self, source: BinaryIO) -> tuple[Any, bytes] | None:
        head = source.read(HEAD_BYTES)
        if len(head) < HEAD_BYTES:
            return None
        header_bytes, body_bytes = decode_lengths(head)
        header, body = source.read(header_bytes), source.read(body_bytes)
        return (decode_header(self._headers, header), body) if len(body) == body_bytes else None


def _widen_input() -> None:
    """Enlarge the buffer of the input pipe: by default, both processes would wake for each 64 KiB of a message."""
    if sys.platform == "linux":
        with suppress(OSError):  # others may have so many pipes already
            fcntl.fcntl(0, fcntl.F_SETPIPE_SZ, _INPUT_BYTES)


def leave_signals_to_server() -> None:
    """Ignore the signals that a terminal or a supervisor sends to the whole process group."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


# Memory that was freed: the C library (glibc; others are left alone) keeps most of it, and a part for each thread.

_M_ARENA_MAX: Final = -8


def share_heaps(most: int) -> None:
    """Limit the number of the C library's heaps to ``most``, so that threads reuse memory that other threads freed.

    glibc's default is eight heaps per core. Threads that share a heap wait for one another. To be called before other
    threads start. Has no effect without glibc.
    """
    if (mallopt := _c_function("mallopt")) is not None:
        mallopt(_M_ARENA_MAX, most)


def return_freed_memory() -> None:
    """Return freed memory to the operating system. Blocks for some milliseconds. Has no effect without glibc."""
    if (malloc_trim := _c_function("malloc_trim")) is not None:
        malloc_trim(ctypes.c_size_t(0))


def _c_function(name: str) -> Any:
    """Return the function ``name`` of the C library; None if there is none."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None

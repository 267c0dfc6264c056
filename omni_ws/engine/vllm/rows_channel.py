"""RowsChannel: receives the Thinker's states from vLLM's workers, for the requests whose answers are spoken."""

from __future__ import annotations

import asyncio
import struct
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from omni_ws.engine.vllm.worker_channel import WorkerChannel

#: The header of a worker's message: the length of the key, the number of rows, their width, the bytes of a number. The
#: key follows, then the places of the rows in the request's tokens (int64), their M-RoPE positions (3, rows; int64),
#: and the rows: float32, or bfloat16, the higher halves of that.
ROWS: Final = struct.Struct("<IIIB")
FLOAT32_BYTES: Final = 4
BFLOAT16_BYTES: Final = 2

#: Rows (n, width), as float32 or as the bits of bfloat16.
Rows: TypeAlias = NDArray[np.float32] | NDArray[np.uint16]


class RowsReceiver(Protocol):
    """Who waits for rows."""

    def take_rows(self, places: NDArray[np.int64], positions: NDArray[np.int64], rows: Rows) -> None:
        """Take the places of rows (n,) in the request's tokens, their positions (3, n), and the rows."""
        ...

    def worker_left(self) -> None:
        """Expect no more of them."""
        ...


class RowsChannel(WorkerChannel[RowsReceiver]):
    """The channel. A receiver gets the rows of each step, in pieces."""

    async def read_message(self, reader: asyncio.StreamReader) -> None:
        key_bytes, count, width, number_bytes = ROWS.unpack(await reader.readexactly(ROWS.size))
        key = (await reader.readexactly(key_bytes)).decode()
        places = np.frombuffer(await reader.readexactly(8 * count), np.int64)
        positions = np.frombuffer(await reader.readexactly(3 * 8 * count), np.int64).reshape(3, count)
        numbers = await reader.readexactly(count * width * number_bytes)
        if (receiver := self.receivers.get(key)) is not None:
            kind: Any = np.float32 if number_bytes == FLOAT32_BYTES else np.uint16
            rows: Rows = np.frombuffer(numbers, kind).reshape(count, width)
            receiver.take_rows(places, positions, rows)

    def worker_left(self) -> None:
        for receiver in self.receivers.values():
            receiver.worker_left()


def as_float32(rows: Rows) -> NDArray[np.float32]:
    """Return rows as they came in float32."""
    if rows.dtype == np.float32:
        return rows.astype(np.float32, copy=False)
    return (rows.astype(np.uint32) << 16).view(np.float32)

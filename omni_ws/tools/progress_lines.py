"""How fetching is told to a person."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Final, Self, TextIO

from omni_ws.weights import Progress

_LINE_EVERY_SEC: Final = 2.0
_WRITE_OVER_EVERY_SEC: Final = 0.2
_MB: Final = 1_000_000


class ProgressLines:
    """One line on a terminal, written over; elsewhere a line whenever something else begins, and now and then.

    Leaving the block leaves the terminal's line to what comes next.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._written_over = stream.isatty()
        self._doing = ""
        self._said = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._written_over and self._doing:
            self._write("\r\033[K")

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        doing = f"{progress.name}: {progress.doing}"
        every = _WRITE_OVER_EVERY_SEC if self._written_over else _LINE_EVERY_SEC
        if doing == self._doing and now - self._said < every:
            return
        self._doing, self._said = doing, now
        sizes = " of ".join(f"{size / _MB:.0f}" for size in (progress.done, progress.total) if size is not None)
        line = f"  {doing}, {sizes} MB" if sizes else f"  {doing}"
        self._write(f"\r{line}\033[K" if self._written_over else f"{line}\n")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()

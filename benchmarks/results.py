"""What benchmarks print, kept in RESULTS.md."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Final, TextIO

RESULTS: Final = Path(__file__).with_name("RESULTS.md")


class _Tee(io.StringIO):
    """Keeps what is printed, and prints it."""

    def __init__(self, output: TextIO) -> None:
        super().__init__()
        self._output = output

    def write(self, text: str) -> int:
        self._output.write(text)
        return super().write(text)

    def flush(self) -> None:
        self._output.flush()


@contextmanager
def printed() -> Iterator[io.StringIO]:
    """Yield a buffer of what the block prints."""
    tee = _Tee(sys.stdout)
    with redirect_stdout(tee):
        yield tee


def write_results(command: str, text: str, file: Path = RESULTS) -> None:
    """Replace what ``command`` has written into ``file``; what it writes for the first time is appended.

    Each command has a block between two comments, which do not show. Text outside the blocks is left as it is.
    """
    content = file.read_text(encoding="utf-8")
    begin, end = f"<!-- written by: {command} -->\n", "<!-- end -->\n"
    block = f"{begin}\n{text.strip()}\n\n{end}"
    before, found, behind = content.partition(begin)
    content = before + block + behind.partition(end)[2] if found else f"{content.rstrip()}\n\n{block}"
    file.write_text(content, encoding="utf-8")

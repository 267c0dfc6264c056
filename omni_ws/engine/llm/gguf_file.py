"""What can be told of a GGUF file before it is loaded."""

from __future__ import annotations

import glob
import os
import re
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from omni_ws.errors import EngineFailed

_MAGIC: Final = b"GGUF"
#: The magic and the version, little-endian.
_HEAD: Final = struct.Struct("<4sI")
#: The versions of the format that llama.cpp reads.
_VERSIONS: Final = (2, 3)
#: The name of one of several files that are a model together.
_PART: Final = re.compile(r"(.+-)\d{5}(-of-\d{5}\.gguf)")
_GB: Final = 1_000_000_000


def check_model_file(file: Path) -> None:
    """Raise EngineFailed, in one sentence, for a file that cannot be run."""
    if file.exists() and not file.is_file():
        raise EngineFailed(f"{file} is not a file", fatal=True)
    try:
        with file.open("rb") as opened:
            head = opened.read(_HEAD.size)
        size = sum(part.stat().st_size for part in _parts(file))
    except OSError as error:
        raise EngineFailed(f"cannot read {file}: {error.strerror}", fatal=True) from None
    if len(head) < _HEAD.size or not head.startswith(_MAGIC):
        raise EngineFailed(f"{file} is not a GGUF file: it does not begin with {_MAGIC.decode()}", fatal=True)
    _, version = _HEAD.unpack(head)
    if version not in _VERSIONS:
        raise EngineFailed(f"{file} is of a version of GGUF that llama.cpp does not read", fatal=True)
    free = available_memory()
    if free is not None and size > free:
        raise EngineFailed(
            f"{file} is too large for this machine: {_gigabytes(size)} of weights, {_gigabytes(free)} of memory free",
            fatal=True,
        )


def available_memory() -> int | None:
    """Return the memory that programs can still have, in bytes; None where the system does not tell."""
    return min((*_free_of_machine(), *_limit_of_group()), default=None)


def _parts(file: Path) -> list[Path]:
    """All files of the model of which ``file`` is one."""
    named = _PART.fullmatch(file.name)
    return [file] if named is None else [*file.parent.glob(f"{glob.escape(named[1])}?????{named[2]}")]


def _free_of_machine() -> Iterator[int]:
    with suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                yield int(value.split()[0]) * 1024
                return
    with suppress(OSError, ValueError, AttributeError):
        yield os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _limit_of_group() -> Iterator[int]:
    """The limit of a container (cgroup v2)."""
    with suppress(OSError, ValueError):
        yield int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii"))


def _gigabytes(size: int) -> str:
    return f"{size / _GB:.1f} GB"

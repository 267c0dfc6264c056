"""The folder of recordings: creates and extends its files, and removes old ones. Used by one thread."""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from omni_ws.config.values import ConfigurationError
from omni_ws.service.process import check_space

#: Names of recordings. No other file in the folder is counted or removed.
_OURS: Final = re.compile(r"\d{8}T\d{6}_[A-Za-z0-9_-]+\.ndjson")
#: Permissions that the folder may not give to its group or to others.
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


class NoRoom(Exception):
    """The folder is at its limit, and every recording in it is still being written."""


@dataclass(slots=True)
class _File:
    name: str
    size: int
    #: Wall time of the last write.
    changed: float
    live: bool = field(default=False)


class RecordingFolder:
    """At most ``max_bytes`` of recordings, none older than ``max_age`` seconds (0: of any age)."""

    def __init__(
        self,
        path: Path,
        *,
        max_bytes: int,
        max_age: float,
        wall_clock: Callable[[], float] = time.time,
        owns: Callable[[str], bool] = lambda name: True,
    ) -> None:
        """``owns`` tells the names of files that this process counts and removes, where several share the folder."""
        self._owns = owns
        self._path = path
        self._max_bytes = max_bytes
        self._max_age = max_age
        self._now = wall_clock
        #: Oldest first.
        self._files: dict[str, _File] = {}
        self._total = 0

    @property
    def total(self) -> int:
        """Bytes of all recordings."""
        return self._total

    def prepare(self) -> None:
        """Create the folder, or read what it contains.

        Raises ConfigurationError where it is open to other users, or cannot be written.
        """
        try:
            self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
            mode = self._path.stat().st_mode
            found = sorted(
                entry.name for entry in self._path.iterdir() if _OURS.fullmatch(entry.name) and self._owns(entry.name)
            )
        except OSError as error:
            raise ConfigurationError([f"record: {self._path}: {error.strerror}"]) from error
        if mode & _OTHERS:
            problem = f"record: {self._path} is accessible to other users (mode {stat.S_IMODE(mode):o})"
            raise ConfigurationError(
                [f"{problem}; recordings contain private speech: chmod 700, or choose another folder"]
            )
        try:
            check_space(self._path)
        except OSError as error:
            raise ConfigurationError([f"record: cannot write to {self._path}: {error.strerror}"]) from error
        for name in found:
            status = (self._path / name).lstat()
            if stat.S_ISREG(status.st_mode):
                self._files[name] = _File(name, status.st_size, status.st_mtime)
                self._total += status.st_size

    def create(self, name: str, data: bytes) -> None:
        """Create a file that begins with ``data``. Raises OSError and NoRoom."""
        self.remove_old()
        self._make_room(len(data))
        self._files[name] = _File(name, 0, self._now(), live=True)
        try:
            self._write(self._files[name], data, os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            del self._files[name]
            raise
        except OSError:
            self._remove(self._files[name])  # a full disk has made an empty file
            raise

    def append(self, name: str, data: bytes, *, even_beyond: bool = False) -> None:
        """Append ``data`` to a file; with ``even_beyond``, also beyond the limit of the folder.

        Raises OSError, after which the file is as long as before, and NoRoom.
        """
        if not even_beyond:
            self._make_room(len(data))
        self._write(self._files[name], data, 0)

    def finish(self, name: str) -> None:
        """Nothing more is written to this file, which may be removed from now on."""
        self._files[name].live = False

    def remove_old(self) -> None:
        """Remove the recordings that are older than ``max_age``."""
        if self._max_age:
            oldest = self._now() - self._max_age
            for file in [one for one in self._files.values() if not one.live and one.changed < oldest]:
                self._remove(file)

    def _make_room(self, wanted: int) -> None:
        if self._total + wanted <= self._max_bytes:
            return
        for file in [one for one in self._files.values() if not one.live]:
            self._remove(file)
            if self._total + wanted <= self._max_bytes:
                return
        raise NoRoom

    def _remove(self, file: _File) -> None:
        (self._path / file.name).unlink(missing_ok=True)
        del self._files[file.name]
        self._total -= file.size

    def _write(self, file: _File, data: bytes, flags: int) -> None:
        # Opened for each write: a thousand sessions that are recorded need no thousand open files.
        descriptor = os.open(self._path / file.name, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | flags, 0o600)
        try:
            written = 0
            try:
                while written < len(data):
                    written += os.write(descriptor, data[written:])
            except OSError:
                os.ftruncate(descriptor, file.size)  # half a line is worse than none
                raise
        finally:
            os.close(descriptor)
        file.size += len(data)
        file.changed = self._now()
        self._total += len(data)

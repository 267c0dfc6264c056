"""The file that keeps the daily use of keys over restarts."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Self

import msgspec

from omni_ws.config.keys import ApiKey
from omni_ws.config.model import ServerConfig
from omni_ws.config.values import ConfigurationError, user_cache_folder
from omni_ws.core.quota import DailyLimits, DailyUse, UsedToday
from omni_ws.engine.threads import Work, run_work

logger = logging.getLogger(__name__)

#: Changes of so many seconds are written together; a server that is killed loses them.
WRITE_INTERVAL_SEC: Final = 1.0
#: After a failure it waits twice as long each time, and so long at most.
LONGEST_INTERVAL_SEC: Final = 60.0


class _Content(msgspec.Struct):
    day: int
    keys: dict[str, UsedToday]


class DailyUseFile:
    """Reads the counts at the start, and writes them, as a whole and off the event loop, when they have changed.

    The file belongs to one server at a time: a second one is refused, as it would overwrite what the first counts.
    """

    def __init__(self, path: Path, use: DailyUse) -> None:
        """Raises ConfigurationError if the file cannot be read or belongs to a running server."""
        self.use = use
        self._path = path
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Task[None] | None = None
        self._changed = False
        self._interval = WRITE_INTERVAL_SEC
        self._closing = False
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = _locked(path.with_name(path.name + ".lock"))
            self._read()
        except BlockingIOError:
            raise ConfigurationError(
                [f"auth.usage_file: {path} belongs to another server that is running; name another file"]
            ) from None
        except OSError as error:
            raise ConfigurationError([f"auth.usage_file: cannot use {path}: {error.strerror}"]) from None
        use.changed = self._note_change

    @classmethod
    def configured(cls, config: ServerConfig, keys: Iterable[ApiKey]) -> Self | None:
        """The file of a server with these keys; None if none of them has a limit of the day."""
        limits = daily_limits(keys)
        if not limits:
            return None
        return cls(config.auth.usage_file or user_cache_folder() / "usage.json", DailyUse(limits))

    def _read(self) -> None:
        try:
            content = msgspec.json.decode(self._path.read_bytes(), type=_Content)
        except FileNotFoundError:
            return
        except msgspec.DecodeError as error:
            os.close(self._lock)
            raise ConfigurationError(
                [f"auth.usage_file: {self._path} holds no counts of keys ({error}); remove it to begin at 0"]
            ) from None
        self.use.day, self.use.used = content.day, content.keys

    def _note_change(self) -> None:
        self._changed = True
        if self._timer is None and self._writing is None and not self._closing:
            self._timer = asyncio.get_running_loop().call_later(self._interval, self._begin_to_write)

    def _begin_to_write(self) -> None:
        self._timer = None
        self._writing = asyncio.create_task(self._write(), name="daily use of keys")

    async def _write(self) -> None:
        self._changed = False
        content = msgspec.json.encode(_Content(self.use.day, self.use.used))
        try:
            await run_work(Work.FILES, _replace, self._path, content)
            self._interval = WRITE_INTERVAL_SEC
        except OSError as error:
            if self._interval == WRITE_INTERVAL_SEC:
                logger.warning("cannot write the daily use of keys to %s: %s", self._path, error.strerror)
            self._interval = min(2 * self._interval, LONGEST_INTERVAL_SEC)
            self._changed = True
        finally:
            self._writing = None
        if self._changed:
            self._note_change()

    async def close(self) -> None:
        """Writes what has changed, and gives the file up."""
        self._closing = True
        if self._writing is not None:
            await self._writing
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._changed:
            await self._write()
        os.close(self._lock)


def daily_limits(keys: Iterable[ApiKey]) -> dict[str, DailyLimits]:
    """The limits of those keys that have any, by their names."""
    return {
        key.name: DailyLimits(key.tokens_per_day, key.audio_seconds_per_day)
        for key in keys
        if key.tokens_per_day is not None or key.audio_seconds_per_day is not None
    }


def _locked(path: Path) -> int:
    """The descriptor of a lock file, which is free again when its process ends. Raises BlockingIOError if taken."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    if sys.platform != "win32":
        import fcntl

        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise
    return descriptor


def _replace(path: Path, content: bytes) -> None:
    descriptor, name = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise

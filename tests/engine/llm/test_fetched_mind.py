"""Which model a server fetches or loads by itself, what allows it, and what remains if it is broken off."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.exhausted import full_disk
from support.file_server import FileServer, file_server

from omni_ws.config import load
from omni_ws.engine.base import Engine
from omni_ws.engine.llm import auto_llm as module
from omni_ws.engine.llm.auto_llm import FetchedMind
from omni_ws.weights import (
    Fetching,
    OfficialSource,
    PinnedWeights,
    WeightsCache,
    WeightsError,
    read_lock,
)

MODEL = b"GGUF" + bytes(range(256)) * 2000
NAMES = ("qwen", "qwen3-1.7b", "qwen2.5-1.5b", "qwen3-0.6b")
NONE_OF_IT = "for rules alone: --llm rules, or make serve LLM=rules"


def pinned(url: str) -> Mapping[str, PinnedWeights]:
    pin = f'{{ bytes = {len(MODEL)}, sha256 = "{hashlib.sha256(MODEL).hexdigest()}" }}'
    return read_lock(
        "".join(
            f'["{name}"]\nabout = ""\nlicence = ""\nattribution = ""\nofficial = "{url}"\n'
            f'["{name}".files]\n"model.gguf" = {pin}\n'
            for name in NAMES
        )
    )


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    """Where the model is published; this machine has room for it, and the package that runs it."""
    monkeypatch.setenv("no_proxy", "*")
    with file_server({"/model.gguf": MODEL}) as served:
        weights = pinned(served.url)
        monkeypatch.setattr(module, "pinned_weights", lambda: weights)
        monkeypatch.setattr(module, "_PACKAGES", ())
        machine(monkeypatch)
        yield served


def machine(
    patch: pytest.MonkeyPatch, *, memory: int | None = 4_000_000_000, cores: int = 2, disk: int = 3_000_000_000
) -> None:
    patch.setattr(module, "available_memory", lambda: memory)
    patch.setattr(module, "cores", lambda: cores)
    patch.setattr(module, "_free_disk", lambda folder: disk)


def mind(folder: Path, *argv: str, environ: Mapping[str, str] | None = None, fetch: bool = True) -> FetchedMind:
    def make(name: str) -> Engine:
        raise AssertionError(name)

    config = load((*argv, "--llm.fetch", str(fetch).lower())).config
    cache = WeightsCache(folder, (OfficialSource(open_sec=60, stall_sec=60),))
    titles = {name: name.title() for name in NAMES}
    return FetchedMind(config, make, titles=titles, environ=environ or {}, cache=cache)


def keep(folder: Path, name: str, content: bytes = MODEL) -> Path:
    """The file of a model that was fetched before."""
    file = folder / pinned("http://localhost/")[name].key / "model.gguf"
    file.parent.mkdir()
    file.write_bytes(content)
    return file


# What is allowed


def test_the_fetch_begins_by_itself_and_its_line_says_what_it_costs(server: FileServer, tmp_path: Path) -> None:
    plan = mind(tmp_path).plan()
    assert plan.begins
    assert plan.why == (
        "rules answer at once, and Qwen as soon as it is fetched (0.0 GB, in the background, once); " + NONE_OF_IT
    )
    assert server.asked == []


@pytest.mark.parametrize(
    ("argv", "environ", "reason"),
    [
        (("--workers", "2"), {}, "several workers choose none"),
        (("--api-key", "secret"), {}, "with keys configured nothing is fetched"),
        (("--keys-file", "keys.toml"), {}, "with keys configured nothing is fetched"),
        ((), {"CI": "true"}, "with CI in the environment none is chosen"),
    ],
)
def test_where_nobody_asked_for_it_the_line_to_type_is_told(
    argv: tuple[str, ...], environ: dict[str, str], reason: str, server: FileServer, tmp_path: Path
) -> None:
    plan = mind(tmp_path, *argv, environ=environ).plan()
    assert (plan.begins, plan.can_begin) == (False, False)
    assert plan.why.startswith("to talk with the language model Qwen, start with --llm qwen")
    assert plan.why.endswith(reason)


def test_without_the_flag_it_is_offered(server: FileServer, tmp_path: Path) -> None:
    plan = mind(tmp_path, fetch=False).plan()
    assert (plan.begins, plan.can_begin) == (False, True)
    assert plan.why.endswith("start with --llm qwen (0.0 GB), or with --fetch")


@pytest.mark.parametrize(
    ("lacking", "reason"),
    [
        ({"memory": 3_999_999_999}, "by itself it takes 4 GB of free memory"),
        ({"cores": 1}, "by itself it takes 2 cores"),
        ({"disk": 2_999_999_999, "cores": 1}, "by itself it takes 2 cores and 3 GB of free disk in {folder}"),
    ],
)
def test_a_small_machine_is_left_alone(
    lacking: dict[str, Any], reason: str, server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, **lacking)
    plan = mind(tmp_path).plan()
    assert (plan.begins, plan.can_begin) == (False, False)
    assert plan.why.endswith(reason.format(folder=tmp_path))
    machine(monkeypatch, memory=None)  # the system does not tell
    assert mind(tmp_path).plan().begins


def test_a_home_that_may_not_be_read_has_no_room(tmp_path: Path) -> None:
    (home := tmp_path / "home").mkdir()
    home.chmod(0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        assert module._free_disk(home / ".cache" / "omni_ws") == 0
    finally:
        os.seteuid(user)
        home.chmod(0o700)
    assert module._free_disk(home / ".cache" / "omni_ws") > 0


def test_what_an_earlier_fetch_has_left_counts_as_room(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / f".{pinned(server.url)['qwen'].key}.fetching"
    left.mkdir()
    (left / "model.gguf.part").write_bytes(MODEL[:1000])
    machine(monkeypatch, disk=module.LEAST_DISK - 1000)
    assert mind(tmp_path).plan().begins
    machine(monkeypatch, disk=module.LEAST_DISK - 1001)
    assert not mind(tmp_path).plan().begins


def test_a_model_without_what_runs_it_is_not_fetched(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in an image without llama.cpp."""
    assert mind(tmp_path).plan().begins
    monkeypatch.setattr(module, "_PACKAGES", ("sys", "not_installed"))
    for fetched in (False, True):
        if fetched:
            keep(tmp_path, "qwen")
        plan = mind(tmp_path).plan()
        assert (plan.begins, plan.can_begin) == (False, False)
        assert plan.why.endswith("-m pip install omni-ws")


def test_what_was_fetched_before_is_loaded_the_best_first(server: FileServer, tmp_path: Path) -> None:
    for name, model in (("qwen3-0.6b", "Qwen3-0.6B"), ("qwen3-1.7b", "Qwen3-1.7B")):
        keep(tmp_path, name)
        found = mind(tmp_path, "--api-key", "secret", fetch=False)
        plan = found.plan()
        assert found.model == model
        assert plan.begins
        assert plan.why == f"{model}, which was fetched before, is being loaded, and answers soon; {NONE_OF_IT}"


@pytest.mark.parametrize("content", [None, MODEL[:-1], b"other" + MODEL[5:]], ids=["missing", "truncated", "changed"])
@pytest.mark.parametrize("argv", [(), ("--api-key", "secret")])
def test_what_is_damaged_is_not_fetched_unasked(
    content: bytes | None, argv: tuple[str, ...], server: FileServer, tmp_path: Path
) -> None:
    file = keep(tmp_path, "qwen", content or b"")
    if content is None:
        file.unlink()
    damaged = mind(tmp_path, *argv, fetch=False)
    plan = damaged.plan()
    if plan.begins:  # what the file holds is not read before
        assert not plan.fetches
        with pytest.raises(WeightsError, match=r"its files have changed; fetch them with: .* weights fetch qwen$"):
            damaged.fetch(Fetching(), weights=plan.fetches)
        plan = damaged.plan()
    assert (plan.begins, plan.can_begin) == (False, not argv)
    assert server.asked == []
    if plan.can_begin:  # whoever is asked for it may fetch it
        damaged.fetch(Fetching(), weights=plan.fetches)
        assert file.read_bytes() == MODEL


@pytest.mark.parametrize("content", [MODEL[:-1], b"other" + MODEL[5:]], ids=["truncated", "changed"])
def test_a_whole_model_is_used_before_a_better_one_that_is_damaged(
    content: bytes, server: FileServer, tmp_path: Path
) -> None:
    keep(tmp_path, "qwen", content)
    keep(tmp_path, "qwen3-1.7b")
    found = mind(tmp_path, fetch=False)
    plan = found.plan()
    assert (plan.begins, plan.fetches) == (True, False)
    found.fetch(Fetching(), weights=plan.fetches)
    assert found.model == "Qwen3-1.7B"
    assert server.asked == []


# The fetch


def test_the_bytes_are_checked_before_they_are_used(server: FileServer, tmp_path: Path) -> None:
    server.files["/model.gguf"] = b"other" + MODEL[5:]
    with pytest.raises(WeightsError, match="not the file that was pinned"):
        mind(tmp_path).fetch(Fetching(), weights=True)
    assert mind(tmp_path).plan().fetches
    server.files["/model.gguf"] = MODEL
    mind(tmp_path).fetch(Fetching(), weights=True)
    assert "which was fetched before" in mind(tmp_path).plan().why
    # Damage is noticed, and what was damaged is fetched again.
    file = tmp_path / pinned(server.url)["qwen"].key / "model.gguf"
    file.write_bytes(b"other" + MODEL[5:])
    mind(tmp_path).fetch(Fetching(), weights=True)
    assert file.read_bytes() == MODEL


def test_a_publisher_that_is_gone_is_told(server: FileServer, tmp_path: Path) -> None:
    server.files.clear()
    with pytest.raises(WeightsError, match=r"qwen cannot be fetched; official: .* answered 404"):
        mind(tmp_path).fetch(Fetching(), weights=True)


def test_a_full_disk_is_told(server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with full_disk(tmp_path / "full", monkeypatch) as folder, pytest.raises(WeightsError, match="MiB of room"):
        mind(folder).fetch(Fetching(), weights=True)
    assert server.asked == []


@pytest.mark.slow
def test_a_fetch_that_was_killed_goes_on_where_it_stopped(server: FileServer, tmp_path: Path) -> None:
    half = len(MODEL) // 2
    script = tmp_path / "fetch.py"
    script.write_text(
        "import os, signal, sys\n"
        f"sys.path.insert(0, {os.fspath(Path(__file__).parents[2])!r})\n"
        "from pathlib import Path\n"
        "from engine.llm import test_fetched_mind as test\n"
        "from omni_ws.weights import Fetching\n"
        f"weights = test.pinned({server.url!r})\n"
        "test.module.pinned_weights = lambda: weights\n"
        f"kill = lambda told: told.done and told.done >= {half} and os.kill(os.getpid(), signal.SIGKILL)\n"
        f"test.mind(Path({os.fspath(tmp_path / 'cache')!r})).fetch(Fetching(kill), weights=True)\n"
    )
    killed = subprocess.run(
        [sys.executable, str(script)], env={**os.environ, "no_proxy": "*"}, capture_output=True, check=False
    )
    assert killed.returncode == -9, killed.stderr.decode()
    assert mind(tmp_path / "cache").plan().fetches
    server.asked.clear()
    mind(tmp_path / "cache").fetch(Fetching(), weights=True)
    ((_, range_),) = server.asked
    assert range_ is not None
    assert half <= int(range_.removeprefix("bytes=").removesuffix("-")) < len(MODEL)
    assert "which was fetched before" in mind(tmp_path / "cache").plan().why

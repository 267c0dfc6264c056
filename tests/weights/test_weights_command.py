"""The command ``omni-ws weights``."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from support.file_server import FileServer, file_server

from omni_ws.cli import main
from omni_ws.tools import weights
from omni_ws.weights import (
    PinnedWeights,
    pinned_weights,
    read_lock,
)


def lock(name: str, url: str) -> Mapping[str, PinnedWeights]:
    return read_lock(
        f'[{name}]\nabout = "a model"\nlicence = "MIT"\nattribution = "(c) nobody"\nofficial = "{url}{name}/"\n'
        f'[{name}.files]\n"model.bin" = {{ bytes = 5, sha256 = "{hashlib.sha256(b"bytes").hexdigest()}" }}\n'
    )


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    """Two models are pinned, and the server has one of them."""
    monkeypatch.setenv("no_proxy", "*")
    with file_server({"/one/model.bin": b"bytes"}) as served:
        pinned = {**lock("one", served.url), **lock("two", served.url)}
        monkeypatch.setattr(weights, "pinned_weights", lambda: pinned)
        yield served


def run(*arguments: str) -> int:
    try:
        return main(["weights", *arguments], {})
    except SystemExit as end:
        return int(end.code or 0)


def test_what_there_is(server: FileServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--folder", str(tmp_path)) == 0
    shown = capsys.readouterr().out
    assert shown.count("not fetched") == 2
    assert run("fetch", "one", "--folder", str(tmp_path)) == 0
    assert run("list", "--folder", str(tmp_path)) == 0
    one, two, *_ = capsys.readouterr().out.splitlines()[1:]
    assert "not fetched" not in one
    assert "not fetched" in two


def test_a_fetch_tells_the_folder(server: FileServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("fetch", "one", "--folder", str(tmp_path)) == 0
    said = capsys.readouterr()
    name, _, folder = said.out.strip().partition(": ")
    assert name == "one"
    assert (Path(folder) / "model.bin").read_bytes() == b"bytes"
    assert "model.bin, 0 of 0 MB" in said.err


def test_a_fetch_that_fails_tells_why_and_goes_on(
    server: FileServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.files["/two/model.bin"] = server.files.pop("/one/model.bin")
    assert run("fetch", "one", "two", "--folder", str(tmp_path)) == 1
    said = capsys.readouterr()
    assert "omni-ws weights: error: one cannot be fetched; official: " in said.err
    assert "answered 404; packages: there are none" in said.err
    assert "'omni-ws weights show one'" in said.err
    assert said.out.startswith("two: ")


def test_without_a_name_only_what_a_default_server_uses_is_fetched(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(weights, "wanted_weights", lambda config: lock("one", server.url).values())
    assert run("fetch", "--folder", str(tmp_path)) == 0
    said = capsys.readouterr()
    assert said.out.startswith("one: ")
    assert "two" not in said.out + said.err


def test_only_the_sources_that_were_chosen(
    server: FileServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("fetch", "one", "--from", "packages", "--folder", str(tmp_path)) == 1
    assert "error: one cannot be fetched; packages: there are none" in capsys.readouterr().err
    assert server.asked == []


def test_a_check_reads_what_was_fetched(server: FileServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("fetch", "one", "--folder", str(tmp_path)) == 0
    assert run("check", "--folder", str(tmp_path)) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["one: as pinned"]
    assert run("check", "two", "--folder", str(tmp_path)) == 1
    assert capsys.readouterr().out == "two: model.bin is not there\n"
    (damaged,) = tmp_path.glob("one-*/model.bin")
    damaged.write_bytes(b"other")
    assert run("check", "--folder", str(tmp_path)) == 1
    assert capsys.readouterr().out == "one: model.bin is not the file that was pinned\n"


def test_where_the_real_ones_are_published(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("show", "smart-turn") == 0
    shown = capsys.readouterr().out
    (file,) = pinned_weights()["smart-turn"].files
    assert f"{file.size} bytes, SHA-256 {file.sha256}" in shown
    assert f"{pinned_weights()['smart-turn'].official}{file.name}" in shown
    assert "BSD-2-Clause" in shown


def test_a_model_has_its_name_in_full_too(capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for name in ("qwen", "qwen2.5-coder-1.5b"):
        assert run("show", name) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    assert shown[0].startswith("qwen: Qwen2.5-Coder-1.5B-Instruct")


@pytest.mark.parametrize("arguments", [("burn",), ("fetch", "nothing"), ("fetch", "--from", "elsewhere")])
def test_wrong_usage(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == 2
    assert "usage: omni-ws weights" in capsys.readouterr().err

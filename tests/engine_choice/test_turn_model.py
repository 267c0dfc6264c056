"""Which model tells whether speakers have finished: the operator's file, else fetched weights, else none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.real_models import fetched

from omni_ws.audio.smart_turn import SmartTurn
from omni_ws.config import load
from omni_ws.config.values import ConfigurationError, user_cache_folder
from omni_ws.engine.fake import EchoEngine
from omni_ws.engine_choice import (
    turn_lines,
    turn_model,
)


def test_without_weights_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert turn_model(load(()).config) is None


def test_a_file_that_is_no_network_is_named(tmp_path: Path) -> None:
    path = tmp_path / "turn.onnx"
    path.write_text("no network")
    config = load(("--embedded.turn-path", str(path))).config
    with pytest.raises(ConfigurationError, match=r"embedded\.turn_path: .*turn\.onnx is not a network of Smart Turn"):
        turn_model(config)


@pytest.mark.slow
def test_fetched_weights_are_found_and_a_file_of_ones_own_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fetched("smart-turn") / "smart-turn-v3.2-cpu.onnx"
    assert isinstance(turn_model(load(()).config), SmartTurn)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert isinstance(turn_model(load(("--embedded.turn-path", str(path))).config), SmartTurn)


def test_the_start_says_how_turns_end() -> None:
    engine = EchoEngine()
    assert list(turn_lines(engine, ("server_vad", "semantic_vad"))) == ["end of turns: Smart Turn (semantic_vad)"]
    (line,) = turn_lines(engine, ("server_vad",))
    assert line.endswith("-m omni_ws weights fetch smart-turn")
    assert not list(turn_lines(engine, ()))


@pytest.mark.skipif(sys.platform == "win32", reason="there users have no numbers")
def test_a_user_whom_the_system_does_not_know_has_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs as a number. The root of the file system stands in for a home."""

    def unknown(number: int) -> object:
        raise KeyError(number)

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    assert user_cache_folder() == Path("/.cache/omni_ws")
    turn_model(load(()).config)

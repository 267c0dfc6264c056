"""Whether Whisper can be used here, and what is said where it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from omni_ws.engine.asr.recogniser_engine import RecogniserEngine
from omni_ws.engine.asr.whisper import (
    WhisperRecogniser,
    whisper_folder,
    whisper_problem,
)
from omni_ws.engine.base import EngineState
from omni_ws.errors import EngineFailed


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A user who has fetched nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(("model", "weights"), [("tiny.en", "whisper-tiny-en"), ("base", "whisper-base")])
async def test_without_weights_the_start_says_how_to_fetch_them(model: str, weights: str) -> None:
    pytest.importorskip("ctranslate2")
    engine = RecogniserEngine(WhisperRecogniser(model))
    message = rf"the weights of Whisper {model} are not here; fetch them with: .+ -m omni_ws weights fetch {weights}$"
    with pytest.raises(EngineFailed, match=message):
        await engine.start()
    assert engine.state is EngineState.STARTING
    assert engine.capabilities.languages == {"en"}


async def test_without_the_package_the_start_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omni_ws.engine.asr.whisper.find_spec", lambda name: None)
    with pytest.raises(EngineFailed, match=r"Whisper needs the package ctranslate2: .+ -m pip install omni-ws$"):
        await RecogniserEngine(WhisperRecogniser()).start()
    assert (whisper_problem() or "").startswith("Whisper needs the package")


def test_a_folder_needs_no_pinned_weights(tmp_path: Path) -> None:
    assert whisper_folder(str(tmp_path)) == tmp_path
    with pytest.raises(EngineFailed, match=r"there is no folder .*/none; Whisper is tiny\.en, base, or a folder"):
        whisper_folder(str(tmp_path / "none"))

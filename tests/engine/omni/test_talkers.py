"""Both Talkers against transformers' generate, repaired: the same codes, in whatever pieces the rows arrive."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed (make test-vllm)")
pytest.importorskip("transformers", reason="transformers is not installed (make test-vllm)")

from support.omni_reference import (  # noqa: E402  # noqa: E402
    CASE,
    CODEC_FRAMES,
    ENDING,
    LONGEST,
    Spoken,
    greedy,
    of,
    speak,
    spoken,
    talker,
)
from support.tiny_models import Family, omni_checkpoint  # noqa: E402

from omni_ws.engine.omni.slot_talker import load_talker  # noqa: E402
from omni_ws.engine.omni.step_process import AnswerEnd, CodesEnd, TalkerItem  # noqa: E402

pytestmark = pytest.mark.vllm

FAMILIES = pytest.mark.parametrize("family", Family)


def cut(answer: Spoken, *, seed: int, count: int = 4) -> list[TalkerItem]:
    """Prompt and answer in random pieces."""
    rng = np.random.default_rng(seed)

    def pieces(length: int) -> list[tuple[int, int]]:
        return list(pairwise(sorted({0, length, *rng.integers(0, length + 1, count).tolist()})))

    prompt: list[TalkerItem] = [answer.prompt_rows(*piece) for piece in pieces(len(answer.tokens))]
    rows = [answer.answer_rows(*piece) for piece in pieces(len(answer.answer) - 1)]
    return [*prompt, *rows, AnswerEnd()]


@FAMILIES
@pytest.mark.parametrize("case", CASE)
def test_an_answer_that_is_cut_has_the_codes_of_transformers(family: Family, case: str) -> None:
    answer = spoken(family, case)
    settings = greedy(family, max_tokens=CODEC_FRAMES)
    for items in (answer.items(), cut(answer, seed=1)):
        codes, end = speak(of(answer, ends=False), items, settings)
        assert np.array_equal(codes, answer.codes)
        assert end is CodesEnd.LENGTH


@FAMILIES
@pytest.mark.parametrize("case", ENDING)
def test_an_answer_that_ends_by_itself_has_the_codes_of_transformers(family: Family, case: str) -> None:
    answer = spoken(family, case, ends=True)
    for items in (answer.items(), cut(answer, seed=3)):
        codes, end = speak(of(answer, ends=True), items, greedy(family))
        assert np.array_equal(codes, answer.codes)
        assert end is CodesEnd.STOP


def test_only_codes_that_the_vocoder_reads_are_drawn(tmp_path: Path) -> None:
    """Qwen2.5's Talker has more codes than Token2Wav has sounds."""
    released = omni_checkpoint(Family.QWEN25).resolve()
    for file in released.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((released / "config.json").read_text())
    config["token2wav_config"]["dit_config"]["num_embeds"] = 20
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    answer = spoken(Family.QWEN25, "text")
    settings = {"max_tokens": 60, "temperature": 5, "top_k": 0, "top_p": 1, "seed": 1}
    few, _ = speak(load_talker(tmp_path, slots=1, longest=LONGEST), answer.items(), settings)
    all_of_them, _ = speak(talker(Family.QWEN25), answer.items(), settings)
    assert few.max() <= 20 < all_of_them.max()

"""The reference itself: each fault of transformers' generate(return_audio=True) is there, and is repaired."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed (make test-vllm)")
pytest.importorskip("transformers", reason="transformers is not installed (make test-vllm)")

from support.omni_reference import CASE, CASES, CODEC_FRAMES, ENDING, TEXT_TOKENS, Fault, reference, spoken  # noqa: E402  # noqa: E402
from support.tiny_models import Family  # noqa: E402

pytestmark = pytest.mark.vllm

FAMILIES = pytest.mark.parametrize("family", Family)


@FAMILIES
@pytest.mark.parametrize("case", CASE)
def test_an_answer_is_cut(family: Family, case: str) -> None:
    cut = spoken(family, case)
    assert len(cut.answer) == TEXT_TOKENS
    assert len(cut.codes) == CODEC_FRAMES
    assert cut.text_end not in cut.answer
    assert cut.codec_end not in cut.codes[:, 0]
    # Otherwise hardly anything that a Talker may do wrong would show.
    assert len(set(cut.answer.tolist())) > 5
    assert len(set(cut.codes[:, 0].tolist())) > 10


@FAMILIES
@pytest.mark.parametrize("case", ENDING)
def test_an_answer_ends_by_itself(family: Family, case: str) -> None:
    ended = spoken(family, case, ends=True)
    assert len(ended.answer) < TEXT_TOKENS
    assert ended.answer[-1] == ended.text_end
    assert len(ended.codes) < CODEC_FRAMES
    assert ended.codec_end not in ended.codes[:, 0]


@FAMILIES
def test_what_the_talker_reads_fits_together(family: Family) -> None:
    for case in CASE:
        whole = spoken(family, case)
        prompt, answer, _ = whole.items()
        assert whole.states.shape == (len(whole.tokens) + len(whole.answer) - 1, 128)
        assert whole.positions.shape == (3, len(whole.tokens))
        assert prompt.hidden.shape == (prompt.states.sum(), 128)
        assert len(answer.tokens) == TEXT_TOKENS - 1
        pieces = [whole.prompt_rows(0, 7), whole.prompt_rows(7)]
        assert np.array_equal(np.concatenate([piece.hidden for piece in pieces]), prompt.hidden)
        if family is Family.QWEN3:
            assert prompt.states.any() == (case != "text")
            assert answer.hidden.shape == (0, 128)
        else:
            assert prompt.states.all()
            assert answer.hidden.shape == (TEXT_TOKENS - 1, 128)


@FAMILIES
def test_a_declared_end_of_codes_is_where_generation_stops(family: Family) -> None:
    ended = spoken(family, "text", ends=True)
    again = reference(family).speak(CASE["text"], text_end=ended.text_end, codec_end=ended.codec_end)
    assert np.array_equal(again.codes, ended.codes)


@pytest.mark.parametrize("case", ["text", "mixed"])
def test_qwen25s_talker_loses_its_mask(case: str) -> None:
    faulty = reference(Family.QWEN25).speak(CASE[case], unrepaired={Fault.LOST_MASK})
    right = spoken(Family.QWEN25, case)
    assert np.array_equal(faulty.answer, right.answer)
    assert not np.array_equal(faulty.codes, right.codes)


@pytest.mark.parametrize("case", ["image", "video"])
def test_qwen25s_talker_refuses_pixels(case: str) -> None:
    with pytest.raises(ValueError, match="pixel_values"):
        reference(Family.QWEN25).speak(CASE[case], unrepaired={Fault.PIXELS_FOR_TALKER})
    assert len(spoken(Family.QWEN25, case).codes) == CODEC_FRAMES


def test_qwen3s_talker_lacks_the_setting_for_sound_beside_a_picture() -> None:
    with pytest.raises(AttributeError, match="audio_config"):
        reference(Family.QWEN3).speak(CASE["mixed"], unrepaired={Fault.NO_AUDIO_CONFIG})
    assert len(spoken(Family.QWEN3, "mixed").codes) == CODEC_FRAMES


@FAMILIES
def test_an_answer_that_ends_at_once_fails(family: Family) -> None:
    model = reference(family)
    end = int(spoken(family, "text").answer[0])
    with pytest.raises((RuntimeError, IndexError, ValueError)):
        model.speak(CASE["text"], text_end=end, unrepaired={Fault.NOTHING_TO_SAY})
    silent = model.speak(CASE["text"], text_end=end)
    assert silent.answer.tolist() == [end]
    assert silent.codes.shape == (0, 1 if family is Family.QWEN25 else 16)
    assert silent.answer_rows().tokens.shape == (0,)


def test_a_first_code_that_ends_the_answer_fails_for_qwen3() -> None:
    model = reference(Family.QWEN3)
    end = int(spoken(Family.QWEN3, "text").codes[0, 0])
    with pytest.raises(RuntimeError, match="non-empty"):
        model.speak(CASE["text"], codec_end=end, unrepaired={Fault.NOTHING_TO_SAY})
    assert model.speak(CASE["text"], codec_end=end).codes.shape == (0, 16)


def test_chunks_of_qwen3s_decoder_lose_their_ends() -> None:
    model = reference(Family.QWEN3)
    codes = np.random.default_rng(0).integers(0, 64, (70, 16))
    whole = model.code2wav(codes)
    with torch.no_grad():  # chunks of 300 frames, unless told otherwise
        chunked = model.model.code2wav.chunked_decode(torch.from_numpy(codes.T[None]), chunk_size=60)[0, 0].numpy()
    assert len(whole) - len(chunked) == 555
    first = 60 * 1920 - 555
    assert np.abs(chunked[:first] - whole[:first]).max() <= 1e-5
    assert np.abs(chunked[first:] - whole[first + 555 :]).max() > 1e-3


def test_qwen3s_last_frame_is_lost_when_it_is_cut() -> None:
    short = reference(Family.QWEN3).speak(CASE["text"], unrepaired={Fault.LAST_FRAME})
    whole = spoken(Family.QWEN3, "text")
    assert len(short.codes) == CODEC_FRAMES - 1
    assert np.array_equal(short.codes, whole.codes[:-1])
    assert len(whole.codes) == CODEC_FRAMES


def test_every_case_has_its_name() -> None:
    assert [*CASE] == [case.name for case in CASES]

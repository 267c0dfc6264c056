"""The real codec in a tiny version: the rates, strides, dilations and kernels of the released one, random weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed (make test-vllm)")
SNAC = pytest.importorskip("snac", reason="the codec is not installed (make test-vllm)").SNAC

from support.tiny_models import build_codec, codec_config  # noqa: E402

from omni_ws.audio.pcm import Samples  # noqa: E402
from omni_ws.engine.omni.talker_network import normal_at  # noqa: E402
from omni_ws.engine.vllm.snac_decoder import SnacDecoder  # noqa: E402
from omni_ws.engine.vllm.talker import (  # noqa: E402
    CodecWindow,
    Codes,
    FrameLayout,
    StreamState,
)
from omni_ws.errors import EngineFailed  # noqa: E402

pytestmark = pytest.mark.vllm

LAYOUT = FrameLayout(first_token=263, codebook_size=64)
FRAME = 2048
#: The tolerance relative to the peak of the whole.
EXACT = 1e-5


def random_codes(frames: int, seed: int = 0) -> Codes:
    return np.random.default_rng(seed).integers(0, 64, (frames, 7), dtype=np.int32)


def new_snac(*, noise: bool) -> Any:
    torch.manual_seed(1)
    return SNAC(**codec_config(noise=noise)).eval()


@pytest.fixture(scope="module", params=["noise", "no noise"])
def decoder(request: pytest.FixtureRequest) -> SnacDecoder:
    return SnacDecoder(new_snac(noise=request.param == "noise"), LAYOUT, device="cpu", noise_seed=7)


def whole(decoder: SnacDecoder, codes: Codes) -> Samples:
    return decoder.decode([CodecWindow(codes, 0, 0, len(codes))])[0]


def windows_of(codes: Codes, chunk: int, **context: int) -> Iterator[CodecWindow]:
    state = StreamState.start(codes.shape[1], **context)
    for frame in range(len(codes)):
        state = state.received(codes[frame : frame + 1], last=frame == len(codes) - 1)
        while state.ready >= chunk or (state.ended and state.ready):
            window, state = state.take(min(chunk, state.ready))
            yield window


def difference(streamed: Samples, expected: Samples) -> float:
    assert streamed.shape == expected.shape
    return float(np.abs(streamed - expected).max() / np.abs(expected).max())


def test_without_noise_it_is_snac_itself() -> None:
    decoder = SnacDecoder(new_snac(noise=False), LAYOUT, device="cpu")
    codes = random_codes(9)
    with torch.inference_mode():
        books = [torch.from_numpy(book)[None] for book in LAYOUT.books(codes)]
        expected = new_snac(noise=False).decode(books)[0, 0].numpy()
    assert difference(whole(decoder, codes), expected) <= EXACT
    assert decoder.sample_rate == 24_000
    assert decoder.frame_samples == FRAME == len(expected) // 9
    assert decoder.frame_ms == pytest.approx(85.333, abs=1e-3)


@pytest.mark.parametrize("frames", [1, 2, 3, 4, 6, 9, 16])
@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_windows_are_exact_for_every_length(decoder: SnacDecoder, frames: int, chunk: int) -> None:
    codes = random_codes(frames, frames)
    pieces = [decoder.decode([window])[0] for window in windows_of(codes, chunk)]
    assert difference(np.concatenate(pieces), whole(decoder, codes)) <= EXACT


@pytest.mark.parametrize("context", [{"left": 2}, {"right": 2}])
def test_less_context_is_heard(decoder: SnacDecoder, context: dict[str, int]) -> None:
    codes = random_codes(20)
    pieces = [decoder.decode([window])[0] for window in windows_of(codes, 1, **context)]
    assert difference(np.concatenate(pieces), whole(decoder, codes)) > EXACT


def test_sessions_that_are_decoded_together_do_not_hear_each_other(decoder: SnacDecoder) -> None:
    windows = [window for seed in range(4) for window in windows_of(random_codes(11, seed), 1 + seed % 2)]
    together = decoder.decode(windows)
    for window, samples in zip(windows, together, strict=True):
        alone = decoder.decode([window])[0]
        assert samples.shape == (window.keep * FRAME,)
        assert difference(samples, alone) <= EXACT


def test_noise_is_of_the_seed_and_is_there() -> None:
    codes = random_codes(6)
    heard = {
        seed: whole(SnacDecoder(new_snac(noise=True), LAYOUT, device="cpu", noise_seed=seed), codes)
        for seed in (1, 2, None)
    }
    again = whole(SnacDecoder(new_snac(noise=True), LAYOUT, device="cpu", noise_seed=1), codes)
    assert np.array_equal(heard[1], again)
    assert difference(heard[1], heard[2]) > 0.01
    assert difference(heard[1], heard[None]) > 0.01


@pytest.mark.parametrize("seed", [0, 1, 1009, 2**40])
def test_the_noise_is_normal(seed: int) -> None:
    drawn = normal_at(torch.arange(200_000)[None], seed)[0].double()
    assert abs(float(drawn.mean())) < 0.01
    assert abs(float(drawn.std()) - 1) < 0.01
    assert abs(float((drawn**4).mean()) - 3) < 0.1
    for lag in (1, 2, 7, 64):
        assert abs(float((drawn[lag:] * drawn[:-lag]).mean())) < 0.01
    elsewhere = normal_at(torch.arange(200_000)[None], seed + 1)[0].double()
    assert abs(float((drawn * elsewhere).mean())) < 0.01


def test_the_noise_of_a_place_does_not_depend_on_where_one_begins() -> None:
    assert torch.equal(normal_at(torch.arange(1000), 5)[300:], normal_at(torch.arange(300, 1000), 5))


def test_a_codec_from_a_folder(tmp_path: Path) -> None:
    build_codec(tmp_path / "codec")
    decoder = SnacDecoder.load(str(tmp_path / "codec"), LAYOUT, device="cpu")
    codes = random_codes(3)
    expected = whole(SnacDecoder(new_snac(noise=True), LAYOUT, device="cpu"), codes)
    assert difference(whole(decoder, codes), expected) <= EXACT


def test_codecs_that_do_not_fit(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(EngineFailed, match="failed to load the codec"):
        SnacDecoder.load(str(tmp_path), LAYOUT)
    with pytest.raises(EngineFailed, match="do not match the slots"):
        SnacDecoder(new_snac(noise=False), FrameLayout(first_token=0, codebook_size=64, slots=(0, 1, 1)))
    with pytest.raises(EngineFailed, match="must have 4096 codes per codebook, got 64"):
        SnacDecoder(new_snac(noise=False), FrameLayout(first_token=0))
    with_attention = SNAC(**{**codec_config(), "attn_window_size": 32})
    with pytest.raises(EngineFailed, match="attention"):
        SnacDecoder(with_attention, LAYOUT)

"""Audio, images and video with the real AsyncLLM and models of random weights."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from dataclasses import fields, replace

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from support.engine_answers import Input, text
from support.patience import until
from support.vllm_engine import answer, llm_of, plain_answer

from omni_ws.core.chunks import AudioFormat, InputChunk, InputMode, Modality
from omni_ws.core.history import WORDS_UNKNOWN, Message, Speech
from omni_ws.engine.base import AnswerOptions
from omni_ws.engine.vllm.engine import VllmEngine
from omni_ws.errors import InvalidValue
from omni_ws.media import MediaLimits

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

RATE = 16_000
HEARD = "<|audio_bos|><|AUDIO|><|audio_eos|>"
SEEN = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.fixture
def hearing(hearing_engine: VllmEngine) -> VllmEngine:
    return hearing_engine


@pytest.fixture
def seeing(seeing_engine: VllmEngine) -> VllmEngine:
    return seeing_engine


def noise(seconds: float, seed: int = 0) -> NDArray[np.int16]:
    generator = np.random.default_rng(seed)
    return (generator.standard_normal(int(seconds * RATE)) * 3000).astype(np.int16)


def chunks_of(samples: NDArray[np.int16], size: int = RATE // 50) -> list[InputChunk]:
    return [
        InputChunk(Modality.AUDIO, samples[start : start + size].tobytes()) for start in range(0, len(samples), size)
    ]


def heard(samples: NDArray[np.int16]) -> NDArray[np.float32]:
    return (samples / 32768).astype(np.float32)


async def test_hears_what_the_model_hears(hearing: VllmEngine) -> None:
    assert hearing.capabilities.input_modalities == {Modality.TEXT, Modality.AUDIO}
    samples = noise(0.9)
    text, final = await answer(hearing, Input(*chunks_of(samples)), input_mode=InputMode.SNAPSHOT)
    prompt = {
        "prompt": f"user: Audio 1: {HEARD}\nassistant:",
        "multi_modal_data": {"audio": (heard(samples), RATE)},
    }
    assert text == await plain_answer(hearing, prompt)
    assert final.usage.input_audio_ms == 900
    assert final.usage.input_tokens > len("user: Audio 1: \nassistant:") + 20

    other, _ = await answer(hearing, Input(*chunks_of(noise(0.9, seed=1))), input_mode=InputMode.SNAPSHOT)
    assert other != text


async def test_parts_keep_their_order(hearing: VllmEngine) -> None:
    samples = noise(0.5)
    source = Input("Before", *chunks_of(samples), "after")
    text, _ = await answer(hearing, source, input_mode=InputMode.SNAPSHOT)
    prompt = {
        "prompt": f"user: Before\nAudio 1: {HEARD}\nafter\nassistant:",
        "multi_modal_data": {"audio": (heard(samples), RATE)},
    }
    assert text == await plain_answer(hearing, prompt)


@pytest.mark.parametrize("stop", [None, "~"], ids=["streamed", "warmed"])
async def test_speech_is_heard_while_it_lasts_and_answered_as_if_it_came_at_once(
    hearing: VllmEngine, stop: str | None
) -> None:
    """Two segments, cut in the pause, then a text: the answer does not depend on how they arrive."""
    pause = np.zeros(int(0.6 * RATE), np.int16)
    speech = np.concatenate([noise(1.2), pause, noise(0.8, seed=1)])
    sampling = {"temperature": 0.0, "max_tokens": 16, **({} if stop is None else {"stop": stop})}
    at_once, final = await answer(
        hearing, Input(*chunks_of(speech), "What?"), input_mode=InputMode.SNAPSHOT, sampling=sampling
    )

    source = Input(open_end=True)
    answering = asyncio.create_task(answer(hearing, source, sampling=sampling))
    for chunk in chunks_of(speech):
        source.send(chunk)
        await source.taken()
    source.send(text("What?"))
    source.close()
    live, live_final = await answering
    assert live == at_once
    # Cached tokens are reported for prompts that were submitted at once.
    assert live_final.usage == replace(final.usage, cached_tokens=live_final.usage.cached_tokens)

    # The first pause is from 1.2 to 1.8 s; it is cut after 300 ms, in the middle of these.
    cut = int(1.36 * RATE)
    prompt = {
        "prompt": f"user: Audio 1: {HEARD}\nAudio 2: {HEARD}\nWhat?\nassistant:",
        "multi_modal_data": {"audio": [(heard(speech[:cut]), RATE), (heard(speech[cut:]), RATE)]},
    }
    assert at_once == await plain_answer(hearing, prompt, **sampling)


async def test_a_sound_that_found_no_room_before_the_end_is_heard_after_it(hearing: VllmEngine) -> None:
    """vLLM sends media once: the answer would fail if it assumed that the first attempt had delivered them."""
    samples = noise(0.7, seed=5)
    at_once, final = await answer(hearing, Input(*chunks_of(samples), "What?"), input_mode=InputMode.SNAPSHOT)
    await llm_of(hearing).reset_mm_cache()
    assert hearing._shared is not None
    budget = hearing._shared.budget
    others, budget.tokens = budget.tokens - 20, 20
    source = Input(*chunks_of(samples), open_end=True)
    source.send("What?")
    answering = asyncio.create_task(answer(hearing, source))
    try:
        slots = budget.slots
        await until(lambda: budget.slots < slots)
        await until(lambda: budget.slots == slots)
    finally:
        source.close()
        budget.tokens += others
    live, live_final = await answering
    assert live == at_once
    assert live_final.usage == replace(final.usage, cached_tokens=live_final.usage.cached_tokens)


def spoken(samples: NDArray[np.int16]) -> Speech:
    return Speech((InputChunk(Modality.AUDIO, samples.tobytes()),), AudioFormat(), len(samples) / 16)


@pytest.mark.parametrize("live", [False, True])
async def test_hears_earlier_turns(hearing: VllmEngine, live: bool) -> None:
    assert hearing.capabilities.speech_in_history
    history = (
        Message("user", "Listen", speech=spoken(noise(0.5))),
        Message("assistant", "Indeed."),
        Message("user", "", speech=spoken(noise(0.4, seed=1))),
        Message("assistant", "Yes."),
    )
    now = noise(0.6, seed=2)
    if live:
        source = Input(open_end=True)
        answering = asyncio.create_task(answer(hearing, source, history=history))
        for chunk in chunks_of(now):
            source.send(chunk)
            await source.taken()
        source.close()
        text, _ = await answering
    else:
        text, _ = await answer(hearing, Input(*chunks_of(now)), history=history, input_mode=InputMode.SNAPSHOT)
    prompt = {
        "prompt": f"user: Listen\nAudio 1: {HEARD}\nassistant: Indeed.\nuser: Audio 2: {HEARD}\nassistant: Yes.\n"
        f"user: Audio 3: {HEARD}\nassistant:",
        "multi_modal_data": {"audio": [(heard(one), RATE) for one in (noise(0.5), noise(0.4, seed=1), now)]},
    }
    assert text == await plain_answer(hearing, prompt)


async def test_earlier_turns_that_cannot_be_heard_any_more(hearing: VllmEngine) -> None:
    """Audio that turns out far longer than estimated is not decoded to its end."""
    speech = Speech((InputChunk(Modality.AUDIO, noise(2.0).tobytes()),), AudioFormat(), 100)
    history = (Message("user", "", speech=speech), Message("assistant", "Yes."))
    text, _ = await answer(hearing, Input("What?"), history=history, input_mode=InputMode.SNAPSHOT)
    prompt = f"user: {WORDS_UNKNOWN}\nassistant: Yes.\nuser: What?\nassistant:"
    assert text == await plain_answer(hearing, prompt)


async def test_sees_pictures(seeing: VllmEngine, early_steps: Callable[[], int]) -> None:
    assert seeing.capabilities.input_modalities == {Modality.TEXT, Modality.IMAGE, Modality.VIDEO}
    first, second = picture(1), picture(2)
    text, _ = await answer(seeing, Input("Look", png(first), png(second), "well"), input_mode=InputMode.SNAPSHOT)
    prompt = {
        "prompt": f"user: Look\n{SEEN}\n{SEEN}\nwell\nassistant:",
        "multi_modal_data": {"image": [first, second]},
    }
    assert text == await plain_answer(seeing, prompt)
    swapped, _ = await answer(seeing, Input("Look", png(second), png(first), "well"), input_mode=InputMode.SNAPSHOT)
    assert swapped != text

    source = Input("Look", png(first), open_end=True)
    answering = asyncio.create_task(answer(seeing, source))
    await until(lambda: early_steps() > 0)
    source.send(png(second))
    source.send("well")
    await source.taken()
    source.close()
    live, _ = await answering
    assert live == text


async def test_a_picture_is_made_smaller_where_the_client_says_so(seeing: VllmEngine) -> None:
    assert seeing.capabilities.media_limits == {field.name for field in fields(MediaLimits)}
    pixels = 60 * 80
    options = AnswerOptions(media_limits={"image_max_pixels": pixels})
    text, final = await answer(
        seeing, Input("Look", png(picture(1)), "well"), input_mode=InputMode.SNAPSHOT, options=options
    )
    small = Image.fromarray(MediaLimits(image_max_pixels=pixels).fit_image(np.asarray(picture(1))))
    assert small.size == (80, 60)
    prompt = {"prompt": f"user: Look\n{SEEN}\nwell\nassistant:", "multi_modal_data": {"image": [small]}}
    assert text == await plain_answer(seeing, prompt)
    _, large = await answer(seeing, Input("Look", png(picture(1)), "well"), input_mode=InputMode.SNAPSHOT)
    assert final.usage.input_tokens < large.usage.input_tokens


async def test_too_many_pictures(seeing: VllmEngine) -> None:
    with pytest.raises(InvalidValue, match="image"):
        await answer(seeing, Input(*[png(picture(number)) for number in range(3)]), input_mode=InputMode.SNAPSHOT)


async def test_frames_of_a_camera(seeing: VllmEngine) -> None:
    frames = [
        InputChunk(Modality.VIDEO, png(picture(number)).payload, timestamp_ms=500 * number) for number in range(4)
    ]
    text, final = await answer(seeing, Input(*frames, "What moves?"), input_mode=InputMode.SNAPSHOT)
    assert text
    still, _ = await answer(seeing, Input(*[frames[0]] * 4, "What moves?"), input_mode=InputMode.SNAPSHOT)
    assert still != text
    assert final.usage.input_tokens > len("user: \nWhat moves?\nassistant:")


def picture(seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 255, (120, 160, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def png(image: Image.Image) -> InputChunk:
    file = io.BytesIO()
    image.save(file, "PNG")
    return InputChunk(Modality.IMAGE, file.getvalue())

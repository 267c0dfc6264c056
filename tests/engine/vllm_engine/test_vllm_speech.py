"""The whole engine with a voice: Thinker, Talker and Code2Wav on two real AsyncLLMs and a real codec, all tiny."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest
from support.engine_answers import Answer, Input, final, said, streamed
from support.patience import PATIENCE_SEC
from support.vllm_engine import GREEDY, answer, request, speaking, until_state

from omni_ws.audio.pcm import Samples
from omni_ws.core.chunks import FinishReason, OutputModality, Task
from omni_ws.engine.base import AudioOutput, EngineOutput, EngineState, TextOutput
from omni_ws.engine.composed.engine import ComposedEngine
from omni_ws.engine.llm.rules_engine import RulesEngine
from omni_ws.engine.spoken.speakable_text import SpeakableText
from omni_ws.engine.tts.speech_engine import SpeechEngine
from omni_ws.engine.vllm.engine import VllmEngine
from omni_ws.engine.vllm.talker import Speaker
from omni_ws.errors import EmptyInput, EngineFailed, InvalidValue, UnsupportedParameter

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

BOTH = frozenset({OutputModality.TEXT, OutputModality.AUDIO})
AUDIO = frozenset({OutputModality.AUDIO})
SEED = {"talker": {"seed": 11}}


@pytest.fixture
def engine(voice_engine: VllmEngine) -> VllmEngine:
    return voice_engine


async def outputs_of(engine: VllmEngine, source: Input, **changes: Any) -> list[EngineOutput]:
    changes.setdefault("stage_sampling", SEED)
    return [output async for output in streamed(engine, request(source, **changes))]


def sound_of(outputs: Sequence[EngineOutput]) -> Samples:
    return np.concatenate(
        [np.empty(0, np.float32), *(output.samples for output in outputs if isinstance(output, AudioOutput))]
    )


async def spoken_at_once(engine: VllmEngine, text: str, *, being_written: bool = False) -> Samples:
    """Speak the same text with the same Talker, and decode each clause at once."""
    from omni_ws.engine.channel import Channel
    from omni_ws.engine.vllm.talker import (
        CodecFrames,
        CodecWindow,
    )

    assert engine._speaker is not None
    talker, _ = engine._speaker.stages("reference", sampling=SEED["talker"], being_written=being_written)
    frames: Channel[CodecFrames] = Channel(1e9, cost=lambda _: 1)

    async def source() -> AsyncIterator[str]:
        yield text

    await talker.run(source(), frames, Answer())
    frames.close()
    items = [item async for item in frames]
    decoder = engine._speaker._decoder
    assert decoder is not None
    sound = []
    for number in range(items[-1].clause + 1):
        codes = np.concatenate([item.codes for item in items if item.clause == number])
        sound += decoder.decode([CodecWindow(codes, 0, 0, len(codes))])
    return np.concatenate(sound)


def assert_same_sound(heard: Samples, expected: Samples) -> None:
    assert heard.shape == expected.shape
    assert np.abs(heard - expected).max() <= 1e-5 * np.abs(expected).max()


async def test_what_it_can_do(engine: VllmEngine) -> None:
    can = engine.capabilities
    assert can.output_modalities == BOTH
    assert can.tasks == {Task.CHAT, Task.SPEECH}
    assert can.voices == ("ada", "bob")
    assert can.lexicon
    assert {"talker.temperature", "talker.seed", "talker.max_tokens"} <= can.stage_sampling
    assert {"code2wav.first_frames", "talker.first_longest"} <= can.stage_params


async def test_an_answer_in_text_and_in_sound(engine: VllmEngine) -> None:
    outputs = await outputs_of(engine, Input("Hello."), modalities=BOTH)
    text = said(outputs)
    assert text == (await answer(engine, Input("Hello.")))[0]
    sound = sound_of(outputs)
    assert_same_sound(sound, await spoken_at_once(engine, text))
    last = final(outputs)
    assert last.usage.output_tokens == GREEDY["max_tokens"]
    assert last.usage.output_audio_ms == round(len(sound) / 24)


async def test_an_answer_in_sound_alone(engine: VllmEngine) -> None:
    outputs = await outputs_of(engine, Input("Hello."), modalities=AUDIO)
    assert not any(isinstance(output, TextOutput) for output in outputs)
    text, _ = await answer(engine, Input("Hello."))
    assert_same_sound(sound_of(outputs), await spoken_at_once(engine, text))


async def test_words_are_said_as_a_lexicon_says_and_written_as_they_are(engine: VllmEngine) -> None:
    text, _ = await answer(engine, Input("Hello."))
    word = next(word for word in re.findall(r"\w+", text) if word.isascii())
    lexicon = {word: "quite another word"}
    speakable = SpeakableText("", literal=True, lexicon=lexicon)
    spoken = "".join(piece.text for piece in (*speakable.feed(text), *speakable.rest()))
    assert "quite another word" in spoken
    outputs = await outputs_of(engine, Input("Hello."), modalities=BOTH, lexicon=lexicon)
    assert said(outputs) == text
    assert_same_sound(sound_of(outputs), await spoken_at_once(engine, spoken))
    ends = [output.text_end for output in outputs if isinstance(output, AudioOutput) and output.text_end is not None]
    assert ends == sorted(ends)
    assert ends[-1] == len(text.rstrip())


async def test_it_speaks_while_it_still_writes(engine: VllmEngine) -> None:
    outputs = await outputs_of(
        engine,
        Input("Hello."),
        modalities=BOTH,
        sampling={**GREEDY, "max_tokens": 400},
        stage_params={"talker": {"first_longest": 5}},
        stage_sampling={"talker": {"seed": 11, "max_tokens": 7 * 20}},
    )
    kinds = [type(output) for output in outputs]
    assert kinds.index(AudioOutput) < len(kinds) - 1 - kinds[::-1].index(TextOutput)
    assert len(sound_of(outputs)) == 20 * 2048


async def test_text_is_read_aloud_as_it_comes(engine: VllmEngine) -> None:
    source = Input("Well, this is ", "the first. This ", open_end=True)
    outputs: list[EngineOutput] = []
    sentences = streamed(engine, request(source, task=Task.SPEECH, modalities=AUDIO, stage_sampling=SEED))
    async for output in sentences:
        if not outputs:
            # The first sentence is spoken before the second one is complete.
            source.send("is the second.")
            source.close()
        outputs.append(output)
    assert final(outputs).reason in (FinishReason.STOP, FinishReason.LENGTH)
    whole = "Well, this is the first. This is the second."
    assert_same_sound(sound_of(outputs), await spoken_at_once(engine, whole, being_written=True))


async def test_a_sentence_is_spoken_though_nothing_follows(engine: VllmEngine) -> None:
    source = Input("This is all.", open_end=True)
    heard = 0
    async with asyncio.timeout(PATIENCE_SEC):
        async for output in streamed(engine, request(source, task=Task.SPEECH, modalities=AUDIO)):
            heard += isinstance(output, AudioOutput)
            source.close()
    assert heard


async def test_many_at_once_do_not_mix(engine: VllmEngine) -> None:
    texts = [f"Voice {number}." for number in range(5)]
    answers = await asyncio.gather(
        *(outputs_of(engine, Input(text), task=Task.SPEECH, modalities=AUDIO) for text in texts)
    )
    for text, outputs in zip(texts, answers, strict=True):
        assert_same_sound(sound_of(outputs), await spoken_at_once(engine, text))


async def test_the_talker_speaks_for_another_llm(engine: VllmEngine) -> None:
    talker = engine._talker
    assert talker is not None
    assert talker.capabilities.tasks == {Task.SPEECH}
    assert talker.capabilities.voices == engine.capabilities.voices
    llm = RulesEngine()
    await llm.start()
    try:
        whole = ComposedEngine(llm, tts=talker)
        asked = request(Input("what is two plus two?"), modalities=BOTH, stage_sampling=SEED, sampling={})
        outputs = [output async for output in streamed(whole, asked)]
    finally:
        await llm.stop()
    assert said(outputs)
    assert_same_sound(sound_of(outputs), await spoken_at_once(engine, said(outputs)))
    assert final(outputs).usage.output_audio_ms > 0


async def test_a_talker_only_speaks(engine: VllmEngine) -> None:
    talker = engine._talker
    assert talker is not None
    with pytest.raises(UnsupportedParameter) as refused:
        await anext(streamed(talker, request(Input("Hello."), task=Task.SPEECH)))
    assert refused.value.param == "modalities"
    stopped = SpeechEngine(Speaker("orpheus"))
    assert stopped.state is EngineState.STARTING
    with pytest.raises(EngineFailed, match="not running"):
        await anext(streamed(stopped, request(Input("Hello."), task=Task.SPEECH, modalities=AUDIO)))


async def test_nothing_to_say(engine: VllmEngine) -> None:
    with pytest.raises(EmptyInput):
        await outputs_of(engine, Input(" \n"), task=Task.SPEECH, modalities=AUDIO)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"voice": "eve"}, "voice"),
        ({"stage_sampling": {"talker": {"temperature": -1}}}, "stage_sampling.talker.temperature"),
        ({"stage_params": {"code2wav": {"first_frames": "1"}}}, "stage_params.code2wav.first_frames"),
    ],
)
async def test_what_is_refused(engine: VllmEngine, changes: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        await outputs_of(engine, Input("Hello."), modalities=BOTH, **changes)
    assert caught.value.param == param


async def test_leaving_frees_all_stages(engine: VllmEngine) -> None:
    """Before the call that leaves has returned."""
    outputs = streamed(engine, request(Input("a word " * 60), task=Task.SPEECH, modalities=AUDIO))
    assert isinstance(await anext(outputs), AudioOutput)
    await outputs.aclose()
    assert speaking(engine) == 0
    assert engine.active_requests == 0


async def test_the_talker_dies_and_comes_back(engine: VllmEngine) -> None:
    assert engine._speaker is not None
    process = engine._speaker.talker.llm.engine_core.resources.engine_manager.processes[0]
    before = sound_of(await outputs_of(engine, Input("Again."), task=Task.SPEECH, modalities=AUDIO))

    async def killed_while_it_speaks() -> None:
        asked = request(Input("a word " * 60), task=Task.SPEECH, modalities=AUDIO, stage_sampling=SEED)
        outputs = streamed(engine, asked)
        await anext(outputs)
        os.kill(process.pid, signal.SIGKILL)
        async for _ in outputs:
            pass

    with pytest.raises(EngineFailed) as failure:
        await killed_while_it_speaks()
    assert failure.value.fatal
    assert engine.state is EngineState.UNHEALTHY
    await until_state(engine, EngineState.OK)
    after = sound_of(await outputs_of(engine, Input("Again."), task=Task.SPEECH, modalities=AUDIO))
    assert_same_sound(after, before)

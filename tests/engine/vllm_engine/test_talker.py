"""Talker and Code2Wav with a real AsyncLLM and a real codec, both tiny."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed (make test-vllm)")
pytest.importorskip("snac", reason="the codec is not installed (make test-vllm)")

from support.engine_answers import reading
from support.tiny_models import CODEC_BASE, ENGINE_ARGS, build_codec, write_talker_profile
from vllm import SamplingParams

from omni_ws.audio.pcm import Samples
from omni_ws.config.values import ConfigurationError
from omni_ws.engine.base import AudioOutput, EngineState, OutputWriter
from omni_ws.engine.channel import Channel, pipeline
from omni_ws.engine.vllm.engine import VllmEngine
from omni_ws.engine.vllm.talker import (
    CodecFrames,
    CodecWindow,
    Codes,
    Speaker,
    Talker,
)
from omni_ws.errors import EngineFailed, InvalidValue

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="session"),
    # Warnings that vLLM and PyTorch raise when they are loaded.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning:zmq"),
]

TEXT = "Well, I have thought about it, and Dr. Smith says no. It costs 3.5 dollars! Shall we?"
CLAUSES = ["Well, I have thought about it,", "and Dr. Smith says no.", "It costs 3.5 dollars!", "Shall we?"]
#: The number of concurrent requests of the Talker's model.
SLOTS = 4


@pytest.fixture
def speaker(voice_engine: VllmEngine) -> Speaker:
    assert voice_engine._speaker is not None
    return voice_engine._speaker


async def words(text: str) -> AsyncIterator[str]:
    """Text in pieces, as a Thinker generates it."""
    for start in range(0, len(text), 4):
        yield text[start : start + 4]
        await asyncio.sleep(0)


class Tap:
    """A stage that records the frames it passes on."""

    name = "tap"

    def __init__(self) -> None:
        self.frames: list[CodecFrames] = []

    async def run(self, source: AsyncIterator[CodecFrames], sink: Channel[Any] | None, outputs: OutputWriter) -> None:
        assert sink is not None
        async for item in source:
            self.frames.append(item)
            await sink.put(item)

    def clauses(self) -> list[Codes]:
        count = 1 + max((item.clause for item in self.frames), default=-1)
        return [
            np.concatenate([item.codes for item in self.frames if item.clause == number]) for number in range(count)
        ]


async def speak(speaker: Speaker, text: str, request_id: str, **options: Any) -> tuple[list[AudioOutput], Tap, Talker]:
    talker, code2wav = speaker.stages(request_id, **options)
    tap = Tap()
    _, link = speaker.links
    async with reading(partial(pipeline, words(text), [talker, tap, code2wav], [link, link])) as outputs:
        audio = [output async for output in outputs if isinstance(output, AudioOutput)]
    assert code2wav.audio_ms == pytest.approx(sum(len(output.samples) for output in audio) / 24)
    return audio, tap, talker


def one_shot(speaker: Speaker, clauses: Sequence[Codes]) -> Samples:
    decoder, _ = speaker._started()
    return np.concatenate([decoder.decode([CodecWindow(codes, 0, 0, len(codes))])[0] for codes in clauses])


def active(speaker: Speaker) -> int:
    return int(speaker.talker.llm.output_processor.get_num_unfinished_requests())


async def test_the_sound_is_that_of_the_codes(speaker: Speaker) -> None:
    audio, tap, talker = await speak(speaker, TEXT, "whole", sampling={"seed": 3})
    clauses = tap.clauses()
    assert len(clauses) == len(CLAUSES)
    assert [item.clause for item in tap.frames if item.last] == [0, 1, 2, 3]
    assert [TEXT[: item.text_end].split()[-1] for item in tap.frames if item.last] == [
        clause.split()[-1] for clause in CLAUSES
    ]
    streamed = np.concatenate([output.samples for output in audio])
    expected = one_shot(speaker, clauses)
    assert streamed.shape == expected.shape == (2048 * sum(map(len, clauses)),)
    assert np.abs(streamed - expected).max() <= 1e-5 * np.abs(expected).max()
    assert {output.sample_rate for output in audio} == {24_000}
    assert talker.frames == sum(map(len, clauses)) > 20
    assert talker.tokens >= 7 * talker.frames
    assert talker.prompt_tokens == sum(len("ada: ") + len(clause) + 4 for clause in CLAUSES)
    assert active(speaker) == 0


async def test_words_of_a_lexicon_are_said_in_the_place_of_those_that_are_written(speaker: Speaker) -> None:
    text = "Well, nginx says no. So be it."
    _, tap, talker = await speak(speaker, text, "lexicon", lexicon={"nginx": "engine x", "so": "thus"})
    assert talker.prompt_tokens == sum(len(f"ada: {said}") + 4 for said in ("Well, engine x says no.", "thus be it."))
    assert [text[: item.text_end] for item in tap.frames if item.last] == ["Well, nginx says no.", text]


@pytest.mark.parametrize("text", ["", "   ", "...", "—\n"])
async def test_nothing_to_say(speaker: Speaker, text: str) -> None:
    audio, tap, talker = await speak(speaker, text, "nothing")
    assert (audio, tap.frames, talker.tokens) == ([], [], 0)


@pytest.mark.parametrize("frames", [1, 2, 4, 7, 9])
async def test_answers_that_end_at_every_boundary(speaker: Speaker, frames: int) -> None:
    sampling = {"seed": frames, "max_tokens": 7 * frames + frames % 7, "temperature": 0.0}
    audio, tap, talker = await speak(speaker, "Yes", f"end-{frames}", sampling=sampling)
    expected = one_shot(speaker, tap.clauses())
    streamed = np.concatenate([output.samples for output in audio])
    assert talker.frames == len(expected) // 2048 == min(frames, 7)
    # The clause itself allows 4 frames and one for each letter.
    assert talker.cut
    assert np.abs(streamed - expected).max() <= 1e-5 * np.abs(expected).max()


async def test_max_tokens_are_those_of_the_whole_answer(speaker: Speaker) -> None:
    _, tap, talker = await speak(speaker, TEXT, "limited", sampling={"temperature": 0.0, "max_tokens": 7 * 40})
    assert talker.frames == 40
    assert talker.cut
    assert len(tap.clauses()) == 2


async def test_seeds_voices_and_greedy_answers(speaker: Speaker) -> None:
    async def codes(**options: Any) -> list[list[list[int]]]:
        options["sampling"]["max_tokens"] = 7 * 6
        _, tap, _ = await speak(speaker, "One two three.", f"seed-{options}", **options)
        return [clause.tolist() for clause in tap.clauses()]

    seeded = await codes(sampling={"seed": 1}, voice="ada")
    assert await codes(sampling={"seed": 1}) == seeded
    assert await codes(sampling={"seed": 2}) != seeded
    assert await codes(sampling={"seed": 1}, voice="bob") != seeded
    assert await codes(sampling={"temperature": 0}) == await codes(sampling={"temperature": 0})


async def test_requests_with_and_without_a_pattern_share_a_step(speaker: Speaker) -> None:
    async def free() -> list[int]:
        params = SamplingParams(max_tokens=70, temperature=1, seed=1, detokenize=False, ignore_eos=True)
        tokens: list[int] = []
        async with aclosing(speaker.talker.generate({"prompt_token_ids": [5, 6]}, params, "free")) as outputs:
            async for output in outputs:
                tokens = list(output.outputs[0].token_ids)
        return tokens

    (_, tap, talker), tokens = await asyncio.gather(speak(speaker, "Hello there.", "patterned"), free())
    assert talker.frames == sum(map(len, tap.clauses())) > 0
    slots = [(token - CODEC_BASE) // 64 for token in tokens]
    assert len(tokens) == 70
    assert sum(slot == place % 7 for place, slot in enumerate(slots)) < 40


async def test_stages_take_their_parameters(speaker: Speaker) -> None:
    parameters = {"code2wav": {"first_frames": 3, "largest_frames": 5}, "talker": {"first_comma_after": 2}}
    sampling = {"seed": 1, "max_tokens": 7 * 20}
    audio, tap, _ = await speak(speaker, TEXT, "parameters", parameters=parameters, sampling=sampling)
    # The first piece may be longer where the Talker was far ahead of it.
    assert len(audio[0].samples) >= 3 * 2048
    assert max(len(output.samples) for output in audio) <= 5 * 2048
    assert len(tap.clauses()[0]) <= 4 + len("Well,")


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"voice": "eve"}, "voice"),
        ({"sampling": {"temperature": -1}}, "stage_sampling.talker.temperature"),
        ({"sampling": {"top_p": "much"}}, "stage_sampling.talker"),
        ({"sampling": {"seed": "x"}}, "stage_sampling.talker"),
        ({"sampling": {"max_tokens": 0}}, "stage_sampling.talker.max_tokens"),
        ({"sampling": {"max_tokens": "7"}}, "stage_sampling.talker"),
        ({"sampling": {"beams": 2}}, "stage_sampling.talker.beams"),
        ({"parameters": {"code2wav": {"first_frames": 0}}}, "stage_params.code2wav.first_frames"),
        ({"parameters": {"code2wav": {"first_frames": 9, "largest_frames": 8}}}, "stage_params.code2wav.first_frames"),
        ({"parameters": {"talker": {"x": 1}}}, "stage_params.talker.x"),
    ],
)
async def test_what_is_refused(speaker: Speaker, options: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        speaker.stages("refused", **options)
    assert caught.value.param == param


async def test_a_talker_that_leaves_the_pattern_fails_the_answer_and_frees_its_slot(
    speaker: Speaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Talker._parameters

    def without_pattern(talker: Talker, **limits: Any) -> SamplingParams:
        parameters = kept(talker, **limits)
        parameters.extra_args = None
        return parameters

    monkeypatch.setattr(Talker, "_parameters", without_pattern)
    with pytest.raises(EngineFailed, match="outside its codec pattern") as failure:
        await speak(speaker, TEXT, "babble", sampling={"seed": 1})
    assert not failure.value.fatal
    assert active(speaker) == 0


async def test_cancelling_frees_the_slots_of_the_engine(speaker: Speaker) -> None:
    # With greedy sampling this Talker never stops by itself.
    long, sampling = "a word " * 40, {"temperature": 0}
    _, tap, _ = await speak(speaker, long, "long", sampling={**sampling, "max_tokens": 7 * 31})
    assert len(tap.clauses()[0]) == 31

    async def first_audio(request_id: str, heard: asyncio.Event) -> None:
        talker, code2wav = speaker.stages(request_id, sampling=sampling)
        async with reading(partial(pipeline, words(long), [talker, code2wav], [speaker.links[1]])) as outputs:
            async for _ in outputs:
                heard.set()
                await asyncio.Event().wait()

    for round_ in range(2):
        events = [asyncio.Event() for _ in range(SLOTS)]
        tasks = [asyncio.create_task(first_audio(f"cancel-{round_}-{i}", event)) for i, event in enumerate(events)]
        await asyncio.gather(*(event.wait() for event in events))
        assert active(speaker) == SLOTS
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert active(speaker) == 0
        # All slots were taken: this request can only be served because they were released.
        audio, _, _ = await speak(speaker, "Yes.", f"after-{round_}")
        assert audio


async def test_the_first_clause_is_heard_before_the_second_is_written(speaker: Speaker) -> None:
    """The rest of the text comes only once the first sound is there."""
    heard = asyncio.Event()

    async def thinker() -> AsyncIterator[str]:
        yield "Well, I have thought about it, "
        await heard.wait()
        for piece in ("and so on ", "for a while, ", "until it ends. "):
            yield piece

    # The clause has 30 letters, and so 34 frames at most.
    talker, code2wav = speaker.stages("first", sampling={"seed": 1, "max_tokens": 7 * 40})
    async with reading(partial(pipeline, thinker(), [talker, code2wav], [speaker.links[1]])) as outputs:
        async for output in outputs:
            assert isinstance(output, AudioOutput)
            heard.set()
    assert code2wav.audio_ms > 0


async def test_a_talker_that_cannot_start(tmp_path: Path) -> None:
    profile = write_talker_profile(tmp_path / "tiny.toml", build_codec(tmp_path / "codec"))
    with pytest.raises(ConfigurationError, match="talker_profile"):
        Speaker("some/model", profile=str(tmp_path / "absent.toml"))
    absent = write_talker_profile(tmp_path / "lost.toml", tmp_path / "no-codec")
    lost = Speaker("some/model", profile=str(absent), device="cpu")
    with pytest.raises(EngineFailed, match="failed to load the codec"):
        await lost.start()
    with pytest.raises(EngineFailed, match="not available"):
        lost.stages("early")
    modelless = Speaker(str(tmp_path / "no-model"), profile=str(profile), device="cpu", args=ENGINE_ARGS)
    with pytest.raises(EngineFailed, match="the Talker failed to start"):
        await modelless.start()
    assert modelless.state is not EngineState.OK

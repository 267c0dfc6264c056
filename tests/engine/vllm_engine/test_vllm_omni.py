"""An omni model with its own voice: Thinker on vLLM, Talker and vocoder in their processes, over the whole engine."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import random
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from support.engine_answers import Input, final, said, streamed
from support.live_server import live_server
from support.native_client import native_client
from support.patience import PATIENCE_SEC, until
from support.raw_http import post
from support.vllm_engine import (
    STARTS_WITHIN_SEC,
    core_process,
    request,
    running_engine,
    unfinished,
    until_idle,
    until_state,
)

from omni_ws.audio.pcm import Samples
from omni_ws.core.chunks import FinishReason, Modality, OutputModality, Task
from omni_ws.core.history import Message
from omni_ws.engine import child
from omni_ws.engine.base import AudioOutput, EngineOutput, EngineState, PartFailed, TextOutput
from omni_ws.engine.omni.step_process import StepProcess
from omni_ws.engine.vllm.engine import OmniVoice, TorchTrace, VllmEngine
from omni_ws.engine.vllm.thinker import Thinker
from omni_ws.errors import EngineFailed, EngineOverloaded, InvalidValue
from omni_ws.profiler.report import build_report
from omni_ws.profiler.report import read as read_events

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

BOTH = frozenset({OutputModality.TEXT, OutputModality.AUDIO})
AUDIO = frozenset({OutputModality.AUDIO})
CLIP = Path(__file__).parents[2] / "data" / "goforward.wav"
#: What a voice that is left to chance says has no limit.
BRIEF = {"talker": {"max_tokens": 12}}
GREEDY_VOICE = {"talker": {"temperature": 0.0, "max_tokens": 12}}
#: Does not end by itself, which a voice that is left to chance may at once.
LONG_SPEECH = {"talker": {"temperature": 0.0, "max_tokens": 150}}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def started() -> AsyncIterator[VllmEngine]:
    from support.omni_thinker import ARGS
    from support.tiny_models import Family, omni_checkpoint

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child, "FIRST_BACKOFF_SEC", 0.01)
        model = omni_checkpoint(Family.QWEN3).resolve()
        async with running_engine(model, ARGS, omni_sessions=3, omni_positions=1024) as engine:
            yield engine


@pytest_asyncio.fixture(loop_scope="module")
async def engine(started: VllmEngine) -> AsyncIterator[VllmEngine]:
    """The running engine; checks afterwards that nothing of any answer is left in any process."""
    yield started
    await until_idle(started)
    assert await is_silent(started)
    assert not voice_of(started).rows.channel.receivers


def voice_of(engine: VllmEngine) -> OmniVoice:
    assert engine._voice is not None
    return engine._voice


def process_of(engine: VllmEngine, role: str) -> StepProcess:
    (found,) = (process for process in voice_of(engine).processes if process.role == role)
    return found


async def is_silent(engine: VllmEngine) -> bool:
    """Whether Talker and vocoder have nothing to do, and no session."""
    occupations = [await process.occupation() for process in voice_of(engine).processes]
    return not any(each.sessions or each.busy for each in occupations) and not voice_of(engine).open_sessions


async def until_voice(engine: VllmEngine) -> None:
    """As long as it takes on a busy machine to start Talker or vocoder."""
    await until(lambda: engine.part_states["tts"] is EngineState.OK, seconds=STARTS_WITHIN_SEC)


async def outputs_of(engine: VllmEngine, source: Input, **changes: Any) -> list[EngineOutput]:
    fields = {"modalities": BOTH, "stage_sampling": GREEDY_VOICE, **changes}
    return [output async for output in streamed(engine, request(source, **fields))]


def sound_of(outputs: Sequence[EngineOutput]) -> Samples:
    return np.concatenate(
        [np.empty(0, np.float32), *(output.samples for output in outputs if isinstance(output, AudioOutput))]
    )


async def test_it_says_what_it_is(engine: VllmEngine) -> None:
    capabilities = engine.capabilities
    assert capabilities.voices == ("ethan", "aiden", "chelsie")
    assert capabilities.stages == ("thinker", "talker", "code2wav")
    assert capabilities.output_modalities == BOTH
    assert capabilities.input_modalities == {Modality.TEXT, Modality.AUDIO, Modality.IMAGE, Modality.VIDEO}
    assert {"talker.seed", "talker.max_tokens"} <= capabilities.stage_sampling
    assert capabilities.stage_params == {"code2wav.first_frames", "code2wav.largest_frames"}
    assert capabilities.tasks == {Task.CHAT, Task.SPEECH}
    assert engine.part_states == {"llm": EngineState.OK, "tts": EngineState.OK}
    assert any("ethan, aiden, chelsie; 3 answers at a time" in line for line in engine.describe())


async def test_token_sessions_see_though_the_configuration_does_not_name_what_ends_an_image(engine: VllmEngine) -> None:
    vision = engine.tokens.vision_tokens
    assert vision is not None
    known = engine._thinker.llm.get_tokenizer().get_vocab()
    names = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
    assert (vision.start, vision.pad, vision.end) == tuple(known[name] for name in names)


async def test_the_sound_is_that_of_transformers(engine: VllmEngine) -> None:
    """From the words to the last sample: greedily, through three processes and in chunks of any size."""
    from support.omni_reference import CASE, CODEC_FRAMES, SPEAKER, TEXT_TOKENS, reference, spoken
    from support.tiny_models import Family

    expected = spoken(Family.QWEN3, "text")
    outputs = await outputs_of(
        engine,
        Input(CASE["text"].user),
        instructions="You are kind.",
        voice=SPEAKER[Family.QWEN3],
        sampling={"temperature": 0.0, "max_tokens": TEXT_TOKENS},
        stage_sampling={"talker": {"temperature": 0.0, "max_tokens": CODEC_FRAMES}},
    )
    sound, whole = sound_of(outputs), reference(Family.QWEN3).code2wav(expected.codes)
    assert len(sound) == len(whole)
    assert np.abs(sound - whole).max() <= 1e-5 * np.abs(whole).max()
    assert final(outputs).usage.output_audio_ms == round(1000 * len(sound) / 24_000)


async def test_sound_begins_while_the_text_is_being_written(engine: VllmEngine) -> None:
    outputs = await outputs_of(engine, Input("Hello"), sampling={"temperature": 0.0, "max_tokens": 200})
    kinds = [type(output) for output in outputs]
    assert kinds.index(AudioOutput) < len(kinds) - 1 - kinds[::-1].index(TextOutput)
    last = final(outputs)
    assert (last.reason, last.usage.output_tokens) == (FinishReason.LENGTH, 200)
    assert len(said(outputs)) > 0


async def test_seeds_make_the_same_speech_again(engine: VllmEngine) -> None:
    async def sound(seed: int) -> Samples:
        sampling = {"talker": {"seed": seed, "max_tokens": 12}}
        return sound_of(await outputs_of(engine, Input("Hello"), stage_sampling=sampling))

    first, second, other = await sound(1), await sound(1), await sound(2)
    assert np.abs(first - second).max() <= 1e-5 * np.abs(first).max()
    assert len(other) != len(first) or np.abs(other - first).max() > 0.01


async def test_a_history_too_long_for_the_voice_is_shortened(engine: VllmEngine) -> None:
    """It fits into the Thinker's context of 2048 tokens, and not into the Talker's 1024 positions."""
    history = [Message("user" if turn % 2 == 0 else "assistant", 60 * chr(97 + turn)) for turn in range(24)]
    outputs = await outputs_of(engine, Input("Hello"), history=tuple(history))
    assert len(sound_of(outputs)) > 0
    assert 256 < final(outputs).usage.input_tokens <= 768


async def test_a_history_is_shortened_too_when_the_input_is_read_early(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Talker reads along, but has no room for both: 570 tokens of history and 600 of input."""
    takes_more: list[bool] = []
    extend = Thinker._extend

    async def noted(self: Thinker, *arguments: Any) -> bool:
        takes_more.append(await extend(self, *arguments))
        return takes_more[-1]

    monkeypatch.setattr(Thinker, "_extend", noted)
    turns = [(Message("user", 60 * chr(97 + turn)), Message("assistant", "no")) for turn in range(8)]
    source = Input(open_end=True)
    asking = asyncio.create_task(outputs_of(engine, source, history=tuple(chain(*turns))))
    await until(lambda: takes_more == [True])
    source.send(60 * "one two   ")
    await until(lambda: takes_more[-1] is False or asking.done())
    source.close()
    outputs = await asking
    assert len(sound_of(outputs)) > 0
    assert 256 < final(outputs).usage.input_tokens <= 768


async def test_text_alone_leaves_the_voice_alone(engine: VllmEngine) -> None:
    outputs = await outputs_of(engine, Input("Hello"), modalities=frozenset({OutputModality.TEXT}))
    assert said(outputs)
    assert not len(sound_of(outputs))


async def test_a_text_is_read_the_same_however_it_arrives(engine: VllmEngine) -> None:
    text = "One two three, and a rather long word: Donaudampfschifffahrt."
    voice = {"talker": {"temperature": 0.0, "max_tokens": 40}}
    asked = {"task": Task.SPEECH, "modalities": AUDIO, "sampling": {}, "stage_sampling": voice}
    whole = sound_of(await outputs_of(engine, Input(text), **asked))
    source = Input(open_end=True)
    reading = asyncio.create_task(outputs_of(engine, source, **asked))
    for start in range(0, len(text), 7):
        source.send(text[start : start + 7])
        await source.taken()
    source.close()
    outputs = await reading
    assert np.abs(sound_of(outputs) - whole).max() <= 1e-5 * np.abs(whole).max()
    assert final(outputs).usage.output_tokens == 40
    assert final(outputs).reason is FinishReason.LENGTH


@pytest.mark.parametrize("written", ["Well, ", "My dear frie", "One two three "])
async def test_a_text_is_spoken_while_it_is_being_written(engine: VllmEngine, written: str) -> None:
    """From its first clause on, or from a pause."""
    source = Input(written, open_end=True)
    asked = request(source, task=Task.SPEECH, modalities=AUDIO, stage_sampling=LONG_SPEECH)
    async with aclosing(streamed(engine, asked)) as outputs:
        assert isinstance(await anext(outputs), AudioOutput)
        source.send("nd, goes on.")
        source.close()
        assert final([output async for output in outputs]).usage.output_audio_ms > 0


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"stage_sampling": {"talker": {"temperature": -1}}}, "stage_sampling.talker.temperature"),
        ({"stage_sampling": {"talker": {"top_k": 1.5}}}, "stage_sampling.talker.top_k"),
        ({"voice": "nobody"}, None),
        ({"stage_params": {"code2wav": {"first_frames": 0}}}, "stage_params.code2wav.first_frames"),
    ],
)
async def test_settings_that_the_voice_refuses(engine: VllmEngine, changes: dict[str, Any], param: str | None) -> None:
    with pytest.raises(InvalidValue) as refusal:
        await outputs_of(engine, Input("Hello"), **changes)
    assert refusal.value.param == param


async def test_one_answer_more_than_the_voice_has_room_for(engine: VllmEngine) -> None:
    long = {"sampling": {"temperature": 0.0, "max_tokens": 400}, "stage_sampling": LONG_SPEECH}
    asking = [asyncio.create_task(outputs_of(engine, Input("Hello"), **long)) for _ in range(3)]
    await until(lambda: process_of(engine, "Talker").open_sessions == 3)
    with pytest.raises(EngineOverloaded, match="all 3 sessions of the Talker"):
        await outputs_of(engine, Input("Hello"), modalities=AUDIO)
    outputs = await outputs_of(engine, Input("Hello"))
    (lost,) = [output.error for output in outputs if isinstance(output, PartFailed)]
    assert isinstance(lost, EngineOverloaded)
    assert said(outputs)
    assert not len(sound_of(outputs))
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)


async def test_an_interruption_ends_all_work(engine: VllmEngine) -> None:
    """Before the call that interrupts has returned; both processes learn of it before they are asked."""
    asked = request(Input("Hello"), modalities=BOTH, sampling={"temperature": 0.0, "max_tokens": 400})
    async with aclosing(streamed(engine, asked)) as outputs:
        async for output in outputs:
            if isinstance(output, AudioOutput):
                break
    assert not unfinished(engine)
    assert await is_silent(engine)


async def test_cancellations_at_any_moment_leave_nothing(engine: VllmEngine) -> None:
    chance = random.Random(3)
    for number in range(45):
        source = Input("Hello", open_end=number % 3 == 0)
        task = asyncio.create_task(
            outputs_of(engine, source, sampling={"temperature": 0.0, "max_tokens": 100}, stage_sampling={})
        )
        for _ in range(chance.choice((1, 5, 20, 100, 400))):
            await asyncio.sleep(0)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("role", ["Talker", "vocoder"])
async def test_without_its_voice_an_answer_goes_on_as_text_or_fails(engine: VllmEngine, role: str) -> None:
    """One that is written goes on; one that is only spoken fails."""
    long = {"sampling": {"temperature": 0.0, "max_tokens": 120}, "stage_sampling": LONG_SPEECH}
    expected = said(await outputs_of(engine, Input("Hello"), **long, modalities=frozenset({OutputModality.TEXT})))
    process = process_of(engine, role)
    pid = process.pid
    assert pid is not None
    speaking = asyncio.create_task(outputs_of(engine, Input("Hello"), **long, modalities=AUDIO))
    await until(lambda: process_of(engine, "vocoder").open_sessions == 1)
    outputs: list[EngineOutput] = []
    async for output in streamed(engine, request(Input("Hello"), modalities=BOTH, **long)):
        if isinstance(output, AudioOutput) and process.pid == pid:
            os.kill(pid, signal.SIGKILL)
            await until(lambda: process.state is EngineState.UNHEALTHY)
            assert (engine.state, engine.part_states["tts"]) == (EngineState.OK, EngineState.UNHEALTHY)
        outputs.append(output)
    assert said(outputs) == expected
    (failed,) = {output.error.message for output in outputs if isinstance(output, PartFailed)}
    assert failed == f"the {role} died"
    with pytest.raises(EngineFailed) as failure:
        await asyncio.wait_for(speaking, PATIENCE_SEC)
    assert failure.value.param == "tts"
    await until_voice(engine)
    assert len(sound_of(await outputs_of(engine, Input("Hello"))))


async def test_the_death_of_the_thinker_is_mended(engine: VllmEngine) -> None:
    asking = asyncio.create_task(outputs_of(engine, Input("Hello"), sampling={"max_tokens": 400}))
    await until(lambda: process_of(engine, "Talker").open_sessions == 1)
    os.kill(core_process(engine), signal.SIGKILL)
    with pytest.raises(EngineFailed, match="the Thinker died"):
        await asyncio.wait_for(asking, PATIENCE_SEC)
    await until_state(engine, EngineState.OK)
    assert len(sound_of(await outputs_of(engine, Input("Hello"))))


async def test_a_trace_of_talker_and_vocoder(engine: VllmEngine, tmp_path: Path) -> None:
    trace = TorchTrace(tmp_path, [], lambda: voice_of(engine).processes)
    few = {"sampling": {"max_tokens": 2}, "stage_sampling": {"talker": {"temperature": 0.0, "max_tokens": 2}}}
    for run in ("first", "second"):
        await trace.start(tmp_path / run / "trace")
        await outputs_of(engine, Input("Hello."), **few)
        files = await trace.stop()
        assert [path.name for path in files] == [
            f"trace_{role}_rank0.pt.trace.json.gz" for role in ("talker", "vocoder")
        ]
        for path in files:
            traced = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
            assert any("aten::" in event.get("name", "") for event in traced)
    talker = process_of(engine, "Talker")
    await talker.trace(tmp_path / "nowhere" / "trace.json.gz")
    with pytest.raises(EngineFailed, match="tracing the Talker failed"):
        await talker.trace(None)
    assert await outputs_of(engine, Input("Hello."), **few)


async def test_a_spoken_turn_over_the_websocket_and_over_http(started: VllmEngine, tmp_path: Path) -> None:
    """The server stops the engine at its end, so this test is the last."""
    import wave

    with wave.open(str(CLIP)) as clip:
        spoken_words = clip.readframes(clip.getnframes())
    async with live_server(started, profiler={"root": tmp_path}) as server:
        await post(server.port, "/start_request_profile", {"run_id": "spoken"})
        async with native_client(server) as client:
            settings: dict[str, Any] = {"sampling": {"max_tokens": 12}, "stage_sampling": GREEDY_VOICE}
            await client.configure(modalities=["text", "audio"], voice="chelsie", **settings)
            for _ in range(2):  # the second has the first in its history
                for start in range(0, len(spoken_words), 9_600):
                    piece = spoken_words[start : start + 9_600]
                    await client.chunk(piece, modality="audio", end=start + 9_600 >= len(spoken_words))
                answer = await client.answer()
                assert (answer.reason, bool(answer.text)) == ("length", True)
                assert len(answer.audio) > 24_000
                assert answer.final["usage"]["input_audio_ms"] > 2_000
        chat = {
            "modalities": ["text", "audio"],
            "audio": {"voice": "aiden", "format": "wav"},
            "max_tokens": 8,
            "stage_sampling": BRIEF,
            "messages": [{"role": "user", "content": "Hello"}],
        }
        answered = await post(server.port, "/v1/chat/completions", chat)
        assert answered.status == 200
        assert answered.json()["choices"][0]["message"]["content"]
        reading = {"input": "Hello", "voice": "ethan", "response_format": "pcm", "talker_max_tokens": 12}
        read = await post(server.port, "/v1/audio/speech", reading)
        # How much it says is left to chance; random weights may end at once.
        assert (read.status, len(read.body) % 2) == (200, 0)
        stopped = (await post(server.port, "/stop_request_profile", {})).json()
        report = build_report(read_events([Path(name) for name in stopped["event_files"]]))
        assert (report["request_count"], report["partial_requests"]) == (4, 0)
        assert {"thinker", "talker", "code2wav"} <= {row["stage"] for row in report["stage_breakdown"]}
        hops = {(row["src"], row["dst"]) for row in report["hop_breakdown"]}
        assert hops >= {("thinker", "talker"), ("talker", "code2wav")}
        unknown = await post(server.port, "/v1/audio/speech", {"input": "Hello", "voice": "nobody"})
        assert unknown.status == 400

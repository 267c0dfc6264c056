"""The vocoder's stage with a Talker, a vocoder and a player in simulated time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from support.engine_answers import Answer, reading

from omni_ws.engine.base import AudioOutput
from omni_ws.engine.channel import (
    Channel,
    ChunkPolicy,
    frames_link,
    pipeline,
)
from omni_ws.engine.omni.step_process import Codes, CodesEnd, StepProcess, VocoderInput, VocoderStage
from omni_ws.errors import EngineFailed, InvalidValue
from omni_ws.profiler import events

RATE, FRAME_MS = 1000, 80.0
FRAME_SAMPLES, HELD = 80, 23

pytestmark = [pytest.mark.virtual_clock, pytest.mark.usefixtures("no_task_left")]


def sound(codes: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return what frames settle: all but the last 23 samples."""
    whole = np.repeat(codes.sum(1), FRAME_SAMPLES) + np.tile(np.arange(FRAME_SAMPLES) / 100, len(codes))
    return whole[: max(0, len(whole) - HELD)].astype(np.float32)


@dataclass
class Vocoder:
    """In place of a StepProcess, whose decoding takes ``fixed_ms`` and ``frame_ms_taken`` for each frame."""

    fixed_ms: float = 4.0
    each_ms: float = 1.0
    frame_ms: float = FRAME_MS
    context_frames: int = 4
    ms_per_frame: float = 1.0
    items: list[VocoderInput] = field(default_factory=list)
    settings: Mapping[str, Any] | None = None
    is_open: bool = False
    decoding: asyncio.Event = field(default_factory=asyncio.Event)
    error: Exception | None = None
    #: In fixed windows, as Qwen2.5's: nothing is settled before so many frames have come.
    window: int = 1

    @property
    def facts(self) -> dict[str, Any]:
        return {"sample_rate": RATE, "frame_ms": self.frame_ms, "context_frames": self.context_frames}

    @asynccontextmanager
    async def open(self, settings: Mapping[str, Any]) -> AsyncIterator[_Session]:
        assert not self.is_open
        self.is_open, self.settings = True, settings
        try:
            yield _Session(self)
        finally:
            self.is_open = False


class _Session:
    def __init__(self, vocoder: Vocoder) -> None:
        self._vocoder = vocoder
        self._codes = np.zeros((0, 2), np.int64)
        self._sent = 0
        self._busy = False

    async def decode(self, item: VocoderInput) -> NDArray[np.float32]:
        vocoder = self._vocoder
        assert vocoder.is_open
        assert not self._busy
        self._busy = True
        vocoder.items.append(item)
        vocoder.decoding.set()
        await asyncio.sleep((vocoder.fixed_ms + vocoder.each_ms * len(item.codes)) / 1000)
        if vocoder.error is not None:
            raise vocoder.error
        self._busy = False
        self._codes = np.concatenate((self._codes, item.codes)) if len(item.codes) else self._codes
        frames = len(self._codes) if item.last else len(self._codes) // vocoder.window * vocoder.window
        settled = sound(self._codes[:frames])[self._sent :]
        self._sent += len(settled)
        return settled


def made(frames: int, seed: int = 0) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, 64, (frames, 2))


def items(codes: NDArray[np.int64], size: int = 1, *, end_alone: bool = False) -> list[Codes]:
    cut = [Codes(codes[at : at + size]) for at in range(0, len(codes), size)]
    if end_alone or not cut:
        return [*cut, Codes(codes[:0], CodesEnd.STOP)]
    return [*cut[:-1], Codes(cut[-1].codes, CodesEnd.STOP)]


async def talker(parts: Sequence[Codes], intervals_ms: Iterable[float] = ()) -> AsyncIterator[Codes]:
    waits = iter(intervals_ms)
    for part in parts:
        await asyncio.sleep(next(waits, 0.0) / 1000)
        yield part


@dataclass
class Played:
    """What came, and when: (milliseconds, samples)."""

    chunks: list[tuple[float, NDArray[np.float32]]] = field(default_factory=list)

    @property
    def sound(self) -> NDArray[np.float32]:
        return np.concatenate([np.zeros(0, np.float32), *(samples for _, samples in self.chunks)])

    @property
    def first_ms(self) -> float:
        return self.chunks[0][0]

    @property
    def pauses_ms(self) -> float:
        """How long a player that starts with the first chunk is silent before the end, all in all."""
        silent, played_to = 0.0, self.first_ms
        for arrived, samples in self.chunks:
            silent += max(0.0, arrived - played_to)
            played_to = max(arrived, played_to) + len(samples) * 1000 / RATE
        return silent


def stage(vocoder: Vocoder, **options: Any) -> VocoderStage:
    return VocoderStage(cast("StepProcess", vocoder), clock=asyncio.get_running_loop().time, **options)


async def play(work: VocoderStage, source: AsyncIterator[Codes], played: Played | None = None) -> Played:
    loop = asyncio.get_running_loop()
    began = loop.time()
    played = played or Played()
    async with reading(partial(pipeline, source, [work], [])) as outputs:
        async for output in outputs:
            assert isinstance(output, AudioOutput)
            assert output.sample_rate == RATE
            played.chunks.append(((loop.time() - began) * 1000, np.asarray(output.samples)))
    return played


class TestSound:
    @pytest.mark.parametrize("frames", [1, 2, 5, 30, 90])
    @pytest.mark.parametrize("size", [1, 3, 100])
    @pytest.mark.parametrize("end_alone", [False, True])
    async def test_it_is_that_of_all_frames(self, frames: int, size: int, end_alone: bool) -> None:
        vocoder = Vocoder()
        work = stage(vocoder)
        codes = made(frames)
        played = await play(work, talker(items(codes, size, end_alone=end_alone), [5.0] * frames))
        assert np.array_equal(played.sound, sound(codes))
        assert work.audio_ms == pytest.approx(frames * FRAME_MS - HELD)
        assert [item.last for item in vocoder.items] == [False] * (len(vocoder.items) - 1) + [True]
        assert not vocoder.is_open

    @pytest.mark.parametrize("parts", [[], [Codes(made(0), CodesEnd.STOP)]])
    async def test_an_answer_without_codes_has_none(self, parts: list[Codes]) -> None:
        vocoder = Vocoder()
        work = stage(vocoder)
        assert (await play(work, talker(parts))).chunks == []
        assert vocoder.items == []
        assert work.audio_ms == 0

    async def test_settings_reach_the_session_once_there_are_codes(self) -> None:
        vocoder = Vocoder()
        link: Channel[Codes] = Channel(1000, cost=lambda _: 1)
        running = asyncio.create_task(play(stage(vocoder, settings={"speaker": "Chelsie"}), aiter(link)))
        await asyncio.sleep(1)
        assert not vocoder.is_open
        link.put_nowait(Codes(made(3), CodesEnd.STOP))
        await vocoder.decoding.wait()
        assert vocoder.settings == {"speaker": "Chelsie"}
        link.close()
        await running

    async def test_codes_cut_off_without_an_end_are_heard(self) -> None:
        codes = made(9)
        vocoder = Vocoder()
        played = await play(stage(vocoder), talker([Codes(codes)]))
        assert np.array_equal(played.sound, sound(codes))
        assert vocoder.items[-1].last


class TestChunks:
    async def test_the_first_frame_is_heard_at_once(self) -> None:
        vocoder = Vocoder()
        # A first frame lasts 57 ms.
        played = await play(stage(vocoder), talker(items(made(60)), [50.0] * 60))
        assert len(vocoder.items[0].codes) == 1
        assert played.first_ms == pytest.approx(50 + 4 + 1)
        assert played.pauses_ms == 0

    async def test_chunks_grow_while_the_player_has_enough(self) -> None:
        vocoder = Vocoder()
        await play(stage(vocoder), talker(items(made(200)), [10.0] * 200))
        sizes = [len(item.codes) for item in vocoder.items]
        assert max(sizes) == ChunkPolicy().largest
        assert all(after <= 2 * before for before, after in pairwise(sizes))

    async def test_a_policy_sets_first_and_largest(self) -> None:
        vocoder = Vocoder()
        policy = ChunkPolicy.asked({"code2wav": {"first_frames": 4, "largest_frames": 6}})
        await play(stage(vocoder, policy=policy), talker(items(made(80)), [10.0] * 80))
        sizes = [len(item.codes) for item in vocoder.items]
        assert sizes[0] == 4
        assert max(sizes) == 6

    async def test_slow_decoding_makes_the_first_chunk_larger(self) -> None:
        """Decoding at 1.5 times real time for single frames, and 0.7 for long chunks."""
        vocoder = Vocoder(fixed_ms=80.0, each_ms=45.0, ms_per_frame=45.0, context_frames=2)
        played = await play(stage(vocoder), talker(items(made(120)), [20.0] * 120))
        assert len(vocoder.items[0].codes) > 1
        assert played.pauses_ms == 0


class TestStarving:
    """A Talker that waits for the Thinker's tokens: 12.5 a second for Qwen3, 50 for Qwen2.5."""

    async def test_a_pause_of_the_thinker_is_ridden_over_by_what_was_sent_ahead(self) -> None:
        # Twice as fast as speech for 2 s, then nothing for 1.5 s.
        intervals = [40.0] * 50 + [1500.0] + [40.0] * 50
        played = await play(stage(Vocoder()), talker(items(made(101)), intervals))
        assert played.pauses_ms == 0

    async def test_a_thinker_that_is_always_too_slow_costs_no_more_than_what_it_lacks(self) -> None:
        # 10 tokens a second where 12.5 are spoken: 20 ms are lacking for each frame.
        played = await play(stage(Vocoder()), talker(items(made(100)), [100.0] * 100))
        assert played.pauses_ms <= 100 * 20 + 40

    async def test_a_pause_longer_than_the_lead_is_heard_once(self) -> None:
        intervals = [40.0] * 25 + [2000.0] + [40.0] * 50
        played = await play(stage(Vocoder()), talker(items(made(76)), intervals))
        # 26 frames last 2,080 ms; the 27th comes 3,040 ms after the start.
        assert 900 < played.pauses_ms < 1_050

    async def test_fifty_codes_a_second_in_blocks(self) -> None:
        vocoder = Vocoder(frame_ms=20.0, window=12)
        played = await play(stage(vocoder, block=12), talker(items(made(240)), [19.0] * 240))
        assert played.sound.shape == sound(made(240)).shape
        assert played.first_ms < 12 * 19 + 20


class TestBlocks:
    async def test_codes_are_handed_on_at_once_in_order(self) -> None:
        vocoder = Vocoder(window=12)
        codes = made(100)
        played = await play(stage(vocoder, block=12), talker(items(codes, 7), [1.0] * 100))
        assert np.array_equal(np.concatenate([item.codes for item in vocoder.items]), codes)
        assert max(len(item.codes) for item in vocoder.items) == 12
        assert np.array_equal(played.sound, sound(codes))

    async def test_the_end_is_told_after_the_last_codes(self) -> None:
        vocoder = Vocoder(window=12)
        codes = made(5)
        played = await play(stage(vocoder, block=12), talker(items(codes, 5, end_alone=True), [1.0, 500.0]))
        assert [(len(item.codes), item.last) for item in vocoder.items] == [(5, False), (0, True)]
        assert np.array_equal(played.sound, sound(codes))
        # What a window lacks is heard when the end is known, not before.
        assert played.first_ms > 500


class TestEnds:
    async def test_a_slow_vocoder_pauses_the_talker(self) -> None:
        vocoder = Vocoder(fixed_ms=10_000.0)
        link = frames_link(FRAME_MS, capacity_ms=10 * FRAME_MS)
        channel: Channel[Codes] = Channel(link.capacity, cost=link.cost)
        outputs = Answer()
        work = stage(vocoder, policy=ChunkPolicy(first=1, largest=4))
        running = asyncio.create_task(work.run(aiter(channel), None, outputs))
        put = 0

        async def speak() -> None:
            nonlocal put
            for item in items(made(100)):
                await channel.put(item)
                put += len(item.codes)
            channel.close()

        speaking = asyncio.create_task(speak())
        await asyncio.sleep(9.0)
        # The frames of two chunks, those in the link, and the one being put.
        assert 16 <= put <= 2 * 4 + 10 + 1
        speaking.cancel()
        running.cancel()
        await asyncio.gather(speaking, running, return_exceptions=True)

    async def test_cancelling_closes_the_session_at_once(self) -> None:
        vocoder = Vocoder(fixed_ms=10_000.0)
        loop = asyncio.get_running_loop()
        running = asyncio.create_task(play(stage(vocoder), talker(items(made(50)))))
        await vocoder.decoding.wait()
        cancelled = loop.time()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert not vocoder.is_open
        assert loop.time() - cancelled < 0.05

    @pytest.mark.parametrize("error", [InvalidValue("code 64"), EngineFailed("the vocoder's process ended")])
    async def test_an_error_of_the_vocoder_reaches_the_client(self, error: Exception) -> None:
        vocoder = Vocoder(error=error)
        with pytest.raises(type(error), match=str(error)):
            await play(stage(vocoder), talker(items(made(50))))
        assert not vocoder.is_open

    async def test_an_error_of_the_talker_comes_after_what_it_said(self) -> None:
        codes = made(7)

        async def broken() -> AsyncIterator[Codes]:
            yield Codes(codes)
            raise EngineFailed("gone")

        played = Played()
        with pytest.raises(EngineFailed, match="gone"):
            await play(stage(Vocoder()), broken(), played)
        assert np.array_equal(played.sound, sound(codes))


async def test_the_profile_shows_what_was_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = events.EventRecorder("run-1", tmp_path)
    monkeypatch.setattr(events, "recorder", recorder)
    token = events.current_request.set("req-1")
    try:
        await play(stage(Vocoder()), talker(items(made(40)), [20.0] * 40))
    finally:
        events.current_request.reset(token)
        recorder.close()
    (file,) = (path for path in recorder.paths if "code2wav" in path.name)
    lines = [msgspec.json.decode(line, type=events.ProfileEvent) for line in file.read_bytes().splitlines()]
    names = [line.event_name for line in lines]
    assert names.count("code2wav_first_audio") == 1
    assert names.count("code2wav_decode_start") == names.count("code2wav_decode_end") > 2
    decoded = sum(line.metadata["frames"] for line in lines if line.event_name == "code2wav_decode_start")
    assert decoded == 40

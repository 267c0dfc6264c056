"""The stage and its queue, with a decoder that sums neighbouring frames; test_snac_decoder has the real codec."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray
from support.engine_answers import Answer, reading
from support.patience import PATIENCE_SEC

from omni_ws.audio.pcm import Samples
from omni_ws.engine.base import AudioOutput
from omni_ws.engine.channel import (
    Channel,
    ChunkPolicy,
    frames_link,
    pipeline,
)
from omni_ws.engine.vllm.talker import (
    Code2Wav,
    CodecFrames,
    CodecWindow,
    Codes,
    DecodeQueue,
)
from omni_ws.errors import EngineFailed

RATE, FRAME_MS = 100, 40.0
FRAME_SAMPLES = 4


def sound(codes: Codes) -> NDArray[np.float32]:
    padded = np.pad(codes.sum(1).astype(np.float32) + 1, 3)
    return np.repeat(np.convolve(padded, np.arange(1, 8), "valid")[: len(codes)], FRAME_SAMPLES).astype(np.float32)


class Decoder:
    """Records its windows, and blocks while ``gate`` is closed."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.windows: list[CodecWindow] = []
        self.entered = threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None

    def __call__(self, windows: Sequence[CodecWindow]) -> list[Samples]:
        self.calls.append(len(windows))
        self.windows += windows
        self.entered.set()
        assert self.gate.wait(PATIENCE_SEC)
        if self.error is not None:
            raise self.error
        return [
            sound(window.codes)[window.skip * FRAME_SAMPLES : (window.skip + window.keep) * FRAME_SAMPLES]
            for window in windows
        ]


@pytest.fixture
def decoder() -> Decoder:
    return Decoder()


@pytest.fixture
async def queue(decoder: Decoder) -> AsyncIterator[DecodeQueue]:
    queue = DecodeQueue(decoder, batch=4)
    yield queue
    decoder.gate.set()
    await queue.close()


def stage(queue: DecodeQueue, policy: ChunkPolicy | None = None) -> Code2Wav:
    return Code2Wav(queue, sample_rate=RATE, frame_ms=FRAME_MS, slots=7, policy=policy)


def clause(frames: int, seed: int = 0) -> Codes:
    return np.random.default_rng(seed).integers(0, 64, (frames, 7), dtype=np.int32)


def items(*clauses: Codes, size: int = 1) -> list[CodecFrames]:
    made = []
    for number, codes in enumerate(clauses):
        made += [
            CodecFrames(number, codes[start : start + size], False, 10 * number) for start in range(0, len(codes), size)
        ]
        made.append(CodecFrames(number, codes[:0], True, 10 * number))
    return made


async def source(parts: Sequence[CodecFrames]) -> AsyncIterator[CodecFrames]:
    for part in parts:
        yield part


async def run(work: Code2Wav, parts: Sequence[CodecFrames]) -> list[AudioOutput]:
    async with reading(partial(pipeline, source(parts), [work], [])) as outputs:
        return [output async for output in outputs if isinstance(output, AudioOutput)]


def heard(outputs: Sequence[AudioOutput]) -> NDArray[np.float32]:
    return np.concatenate([np.empty(0, np.float32), *(output.samples for output in outputs)])


@pytest.mark.usefixtures("no_task_left")
class TestStage:
    @pytest.mark.parametrize("frames", [0, 1, 2, 3, 4, 5, 7, 8, 30, 31, 80])
    @pytest.mark.parametrize("size", [1, 3, 100])
    async def test_the_sound_is_that_of_the_whole_clause(self, queue: DecodeQueue, frames: int, size: int) -> None:
        work = stage(queue)
        codes = clause(frames)
        outputs = await run(work, items(codes, size=size))
        assert np.array_equal(heard(outputs), sound(codes))
        assert all(output.sample_rate == RATE and len(output.samples) for output in outputs)
        assert work.audio_ms == frames * FRAME_MS

    async def test_clauses_follow_each_other_without_a_gap(self, queue: DecodeQueue) -> None:
        clauses = [clause(frames, frames) for frames in (9, 1, 40, 3)]
        outputs = await run(stage(queue), items(*clauses, size=2))
        assert np.array_equal(heard(outputs), np.concatenate([sound(codes) for codes in clauses]))
        assert list(dict.fromkeys(output.text_end for output in outputs)) == [0, 10, 20, 30]

    async def test_a_clause_that_was_cut_off_is_still_heard(self, queue: DecodeQueue) -> None:
        codes = clause(10)
        assert np.array_equal(heard(await run(stage(queue), [CodecFrames(0, codes, False, 0)])), sound(codes))

    async def test_the_first_chunk_is_small(self, queue: DecodeQueue) -> None:
        outputs = await run(stage(queue), items(clause(60)))
        assert len(outputs[0].samples) == FRAME_SAMPLES

    async def test_no_more_is_taken_from_the_talker_than_two_chunks_need(
        self, queue: DecodeQueue, decoder: Decoder
    ) -> None:
        decoder.gate.clear()
        link = frames_link(FRAME_MS, capacity_ms=10 * FRAME_MS)
        talker: Channel[CodecFrames] = Channel(link.capacity, cost=link.cost)
        answer = Answer()
        policy = ChunkPolicy(first=1, largest=4)
        work = asyncio.create_task(stage(queue, policy).run(aiter(talker), None, answer))
        codes = clause(100)
        put = 0

        async def speak() -> None:
            nonlocal put
            for item in items(codes):
                await talker.put(item)
                put += len(item.codes)
            talker.close()

        speaking = asyncio.create_task(speak())
        assert await asyncio.to_thread(decoder.entered.wait, PATIENCE_SEC)
        before = -1
        while put != before:
            before = put
            for _ in range(20):
                await asyncio.sleep(0)
        # The frames of two chunks, those in the link, and the one being put.
        assert 20 <= put <= (2 * 4 + 3) + 10 + 1
        decoder.gate.set()
        await asyncio.gather(speaking, work)
        assert np.array_equal(heard(answer.audio), sound(codes))

    async def test_cancelling_does_not_wait_for_the_decoder(self, queue: DecodeQueue, decoder: Decoder) -> None:
        decoder.gate.clear()
        answer = Answer()
        work = asyncio.create_task(stage(queue).run(source(items(clause(20))), None, answer))
        assert await asyncio.to_thread(decoder.entered.wait, PATIENCE_SEC)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        assert answer.outputs == []
        decoder.gate.set()
        assert np.array_equal(await queue.decode(CodecWindow(clause(5), 0, 0, 5)), sound(clause(5)))

    async def test_an_error_of_the_talker_comes_after_what_it_said(self, queue: DecodeQueue) -> None:
        async def broken() -> AsyncIterator[CodecFrames]:
            yield CodecFrames(0, clause(5), False, 0)
            raise EngineFailed("gone")

        got: list[AudioOutput] = []
        with pytest.raises(EngineFailed, match="gone"):
            async with reading(partial(pipeline, broken(), [stage(queue)], [])) as outputs:
                got += [output async for output in outputs if isinstance(output, AudioOutput)]

    async def test_an_error_of_the_decoder_reaches_the_client(self, queue: DecodeQueue, decoder: Decoder) -> None:
        decoder.error = RuntimeError("out of memory")
        with pytest.raises(RuntimeError, match="out of memory"):
            await run(stage(queue), items(clause(20)))


@pytest.mark.usefixtures("no_task_left")
class TestQueue:
    async def test_what_waits_together_is_decoded_together(self, queue: DecodeQueue, decoder: Decoder) -> None:
        decoder.gate.clear()
        first = asyncio.create_task(queue.decode(CodecWindow(clause(3), 0, 0, 3)))
        assert await asyncio.to_thread(decoder.entered.wait, PATIENCE_SEC)
        others = [asyncio.create_task(queue.decode(CodecWindow(clause(3 + seed, seed), 0, 1, 2))) for seed in range(6)]
        dropped = asyncio.create_task(queue.decode(CodecWindow(clause(3), 0, 0, 3)))
        await asyncio.sleep(0)
        dropped.cancel()
        await asyncio.gather(dropped, return_exceptions=True)
        decoder.gate.set()
        assert np.array_equal(await first, sound(clause(3)))
        for seed, samples in enumerate(await asyncio.gather(*others)):
            assert np.array_equal(samples, sound(clause(3 + seed, seed))[FRAME_SAMPLES : 3 * FRAME_SAMPLES])
        assert decoder.calls == [1, 4, 2]

    async def test_an_error_reaches_all_who_were_decoded_together(self, queue: DecodeQueue, decoder: Decoder) -> None:
        decoder.error = ValueError("no")
        results = await asyncio.gather(
            *(queue.decode(CodecWindow(clause(3), 0, 0, 3)) for _ in range(2)), return_exceptions=True
        )
        assert [type(result) for result in results] == [ValueError, ValueError]
        decoder.error = None
        assert len(await queue.decode(CodecWindow(clause(3), 0, 0, 3))) == 3 * FRAME_SAMPLES

    async def test_closing_fails_what_waits(self, queue: DecodeQueue, decoder: Decoder) -> None:
        decoder.gate.clear()
        first = asyncio.create_task(queue.decode(CodecWindow(clause(3), 0, 0, 3)))
        assert await asyncio.to_thread(decoder.entered.wait, PATIENCE_SEC)
        second = asyncio.create_task(queue.decode(CodecWindow(clause(3), 0, 0, 3)))
        await asyncio.sleep(0)
        closing = asyncio.create_task(queue.close())
        with pytest.raises(EngineFailed, match="closed"):
            await second
        decoder.gate.set()
        await closing
        assert len(await first) == 3 * FRAME_SAMPLES
        with pytest.raises(EngineFailed, match="closed"):
            await queue.decode(CodecWindow(clause(3), 0, 0, 3))
        await queue.close()

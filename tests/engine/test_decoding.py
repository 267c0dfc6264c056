import asyncio
import io
import statistics
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.patience import PATIENCE_SEC, until

from omni_ws.audio.codec import AudioDecoder
from omni_ws.core.chunks import AudioEncoding, AudioFormat, InputChunk, Modality
from omni_ws.engine import decoding
from omni_ws.engine.channel import Channel
from omni_ws.engine.decoding import (
    AT_ONCE_BYTES,
    AudioPart,
    DecodedPart,
    ImagePart,
    TextPart,
    ToolResultPart,
    VideoPart,
    decode_input,
)
from omni_ws.engine.threads import Lane, MediaRoom
from omni_ws.errors import InvalidValue, OmniError, UnsupportedFormat
from omni_ws.media import (
    MediaLimits,
    decode_image,
)

PCM = np.arange(-1600, 1600, dtype="<i2").tobytes()


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as threads:
        yield threads


def source(*chunks: InputChunk, open_end: bool = False) -> Channel[InputChunk]:
    channel: Channel[InputChunk] = Channel(1 << 20, cost=lambda chunk: len(chunk.payload))
    for chunk in chunks:
        channel.put_nowait(chunk)
    if not open_end:
        channel.close()
    return channel


def audio(payload: bytes, **fields: object) -> InputChunk:
    return InputChunk(Modality.AUDIO, payload, **fields)  # type: ignore[arg-type]


def text(payload: bytes, **fields: object) -> InputChunk:
    return InputChunk(Modality.TEXT, payload, **fields)  # type: ignore[arg-type]


def png(colour: str, size: tuple[int, int] = (4, 3)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, colour).save(buffer, "png")
    return buffer.getvalue()


async def decoded(
    executor: ThreadPoolExecutor, *chunks: InputChunk, sample_rate: int = 16_000
) -> tuple[list[DecodedPart], OmniError | None]:
    parts: list[DecodedPart] = []
    try:
        async for part in decode_input(
            source(*chunks), audio=AudioFormat(), sample_rate=sample_rate, executor=executor, share=MediaRoom().share()
        ):
            parts.append(part)
    except OmniError as error:
        return parts, error
    return parts, None


def samples_of(parts: list[DecodedPart]) -> np.ndarray:
    return np.concatenate([part.samples for part in parts if isinstance(part, AudioPart)])


async def test_audio_frames_that_wait_together_are_one_part(executor: ThreadPoolExecutor) -> None:
    frames = [audio(PCM[start : start + 640]) for start in range(0, len(PCM), 640)]
    parts, error = await decoded(executor, *frames)
    assert error is None
    assert len(parts) == 1
    assert np.array_equal(samples_of(parts) * 32768, np.arange(-1600, 1600))


async def test_a_sample_may_be_cut_in_two(executor: ThreadPoolExecutor) -> None:
    parts, _ = await decoded(executor, audio(PCM[:1001]), audio(PCM[1001:]))
    assert np.array_equal(samples_of(parts) * 32768, np.arange(-1600, 1600))


async def test_audio_is_resampled_to_the_wanted_rate(executor: ThreadPoolExecutor) -> None:
    parts, _ = await decoded(executor, audio(PCM), sample_rate=8_000)
    assert len(samples_of(parts)) == 1600


async def test_a_change_of_format_opens_a_new_part(executor: ThreadPoolExecutor) -> None:
    parts, _ = await decoded(
        executor, audio(PCM), audio(PCM, format="pcm16"), audio(bytes(800), format="audio/pcma;rate=8000")
    )
    assert [part.part for part in parts] == sorted(part.part for part in parts)
    assert {part.part for part in parts} == {0, 1}
    assert len(samples_of(parts)) == 3200 * 2 + 1600


async def test_another_modality_in_between_opens_a_new_part(executor: ThreadPoolExecutor) -> None:
    parts, _ = await decoded(executor, audio(PCM), text(b"hello"), audio(PCM))
    assert [(type(part), part.part) for part in parts] == [(AudioPart, 0), (TextPart, 1), (AudioPart, 2)]


async def test_images_are_pixels_each_a_part(executor: ThreadPoolExecutor) -> None:
    parts, _ = await decoded(
        executor, InputChunk(Modality.IMAGE, png("red")), InputChunk(Modality.IMAGE, png("blue", (2, 5)))
    )
    assert [(type(part), part.part) for part in parts] == [(ImagePart, 0), (ImagePart, 1)]
    first, second = parts
    assert isinstance(first, ImagePart)
    assert isinstance(second, ImagePart)
    assert first.pixels.shape == (3, 4, 3)
    assert first.pixels[0, 0].tolist() == [255, 0, 0]
    assert second.pixels.shape == (5, 2, 3)


async def test_images_in_a_video_are_its_frames(executor: ThreadPoolExecutor) -> None:
    frames = [InputChunk(Modality.VIDEO, png("red"), timestamp_ms=40 * place) for place in range(3)]
    parts, _ = await decoded(executor, *frames)
    assert [type(part) for part in parts] == [VideoPart]
    assert isinstance(parts[0], VideoPart)
    assert [frame.timestamp_ms for frame in parts[0].frames] == [0, 40, 80]


@pytest.mark.parametrize(
    "chunk",
    [
        InputChunk(Modality.IMAGE, b"no image", 7),
        InputChunk(Modality.AUDIO, b"no flac" * 100, 7, "flac"),
        InputChunk(Modality.VIDEO, b"no video, not at all", 7),
        InputChunk(Modality.AUDIO, PCM, 7, "audio/unheard-of"),
    ],
)
async def test_what_cannot_be_decoded_names_its_chunk(executor: ThreadPoolExecutor, chunk: InputChunk) -> None:
    parts, error = await decoded(executor, text(b"before", sequence_id=6), chunk)
    assert isinstance(error, UnsupportedFormat)
    assert error.sequence_id == 7
    assert parts == [TextPart("before", 0)]


async def test_empty_chunks_are_nothing(executor: ThreadPoolExecutor) -> None:
    assert await decoded(executor, audio(b""), audio(b"", end_of_input=True)) == ([], None)


async def test_what_the_source_raises_comes_after_what_it_gave(executor: ThreadPoolExecutor) -> None:
    channel = source(text(b"hello"), open_end=True)
    channel.fail(InvalidValue("broken off"))
    async with aclosing(
        decode_input(channel, audio=AudioFormat(), sample_rate=16_000, executor=executor, share=MediaRoom().share())
    ) as parts:
        assert await anext(parts) == TextPart("hello", 0)
        with pytest.raises(InvalidValue, match="broken off"):
            await anext(parts)


async def test_parts_come_while_the_input_is_open(executor: ThreadPoolExecutor) -> None:
    channel = source(text(b"one"), open_end=True)
    async with aclosing(
        decode_input(channel, audio=AudioFormat(), sample_rate=16_000, executor=executor, share=MediaRoom().share())
    ) as parts:
        assert await anext(parts) == TextPart("one", 0)
        channel.put_nowait(text(b"two"))
        assert await anext(parts) == TextPart("two", 0)
        channel.close()
        assert [part async for part in parts] == []


async def test_little_is_taken_from_the_source_ahead_of_need(executor: ThreadPoolExecutor) -> None:
    taken = 0

    async def endless() -> AsyncIterator[InputChunk]:
        nonlocal taken
        while True:
            taken += 1
            yield audio(bytes(16 * 1024))

    async with aclosing(
        decode_input(endless(), audio=AudioFormat(), sample_rate=16_000, executor=executor, share=MediaRoom().share())
    ) as parts:
        await anext(parts)
        for _ in range(100):
            await asyncio.sleep(0)
        assert taken * 16 * 1024 <= 3 * decoding.WAITING_BYTES


async def test_decoding_is_not_done_on_the_loop(executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[str] = set()
    original = decode_image

    def spying(data: bytes, **settings: Any) -> object:
        threads.add(threading.current_thread().name)
        return original(data, **settings)

    monkeypatch.setattr("omni_ws.engine.decoding.decode_image", spying)
    await decoded(executor, InputChunk(Modality.IMAGE, png("red")))
    assert threads
    assert threading.current_thread().name not in threads


class CountingLane(Lane):
    """Remembers the calls that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Future[Any]] = []

    def submit(self, *arguments: Any, **named: Any) -> Any:
        call = super().submit(*arguments, **named)
        self.calls.append(call)
        return call


async def fed(lane: CountingLane, chunks: Sequence[InputChunk], format: AudioFormat, rate: int) -> list[DecodedPart]:
    """The parts of ``chunks``, each of which arrives when the one before is decoded."""

    async def collect() -> list[DecodedPart]:
        share = MediaRoom().share()
        stream = decode_input(channel, audio=format, sample_rate=rate, executor=lane, share=share, lane=lane)
        async with aclosing(stream) as parts:
            return [part async for part in parts]

    channel = source(open_end=True)
    task = asyncio.create_task(collect())
    for chunk in chunks:
        channel.put_nowait(chunk)
        for _ in range(10):
            await asyncio.sleep(0)
        await asyncio.gather(*map(asyncio.wrap_future, lane.calls))
        for _ in range(10):
            await asyncio.sleep(0)
    channel.close()
    return await task


@pytest.mark.parametrize(
    ("format", "frame", "rate"),
    [
        (AudioFormat(AudioEncoding.PCM16, 16_000), 640, 16_000),
        (AudioFormat(AudioEncoding.PCM16, 48_000), 1920, 16_000),
        (AudioFormat(AudioEncoding.PCMU, 8_000), 160, 24_000),
    ],
)
async def test_of_short_raw_audio_only_the_first_piece_takes_a_thread(
    format: AudioFormat, frame: int, rate: int
) -> None:
    data = (PCM * 10)[: frame * 20]
    lane = CountingLane()
    parts = await fed(lane, [audio(data[start : start + frame]) for start in range(0, len(data), frame)], format, rate)
    assert len(lane.calls) == 1
    decoder = AudioDecoder(format, sample_rate=rate)
    assert np.array_equal(samples_of(parts), np.concatenate([decoder.decode(data), decoder.flush()]))


@pytest.mark.parametrize(
    ("chunk", "calls"),
    [
        (audio(bytes(AT_ONCE_BYTES)), 0),
        (audio(bytes(AT_ONCE_BYTES + 2)), 1),
        (audio(bytes(160), format="audio/pcm;rate=8000"), 1),
        (text(b"x" * AT_ONCE_BYTES), 0),
        (text(b"x" * (AT_ONCE_BYTES + 1)), 1),
        (InputChunk(Modality.IMAGE, png("red")), 2),  # up to where it needs a slot, and with one
    ],
)
async def test_what_is_long_or_of_another_kind_takes_a_thread(chunk: InputChunk, calls: int) -> None:
    lane = CountingLane()
    parts = await fed(lane, [audio(PCM), chunk], AudioFormat(), 16_000)
    assert len(parts) >= 2
    assert len(lane.calls) == 1 + calls  # one for the audio that comes first


@pytest.mark.parametrize("encoding", [AudioEncoding.PCM16, AudioEncoding.PCMU, AudioEncoding.F32])
@pytest.mark.parametrize("rate", [8_000, 48_000])
def test_what_is_decoded_on_the_loop_takes_it_less_than_a_millisecond(encoding: AudioEncoding, rate: int) -> None:
    decoder = AudioDecoder(AudioFormat(encoding, rate), sample_rate=24_000)
    data = bytes(AT_ONCE_BYTES)
    decoder.decode(data)
    times = []
    for _ in range(20):
        begun = time.thread_time()
        decoder.decode(data)
        times.append(time.thread_time() - begun)
    assert statistics.median(times) < 0.001


class _ClosableDecoder:
    """Replaces the audio decoder: its call blocks until the test releases it."""

    started = threading.Event()
    go_on = threading.Event()
    in_use = False
    closed_while_in_use: bool | None = None
    unpacks = False

    def __init__(self, source: AudioFormat, *, sample_rate: int, room: object) -> None:
        self.source = source
        self.sample_rate = sample_rate

    def pieces(self, data: bytes, *, begins_chunk: bool) -> Iterator[np.ndarray]:
        cls = type(self)
        cls.in_use = True
        cls.started.set()
        assert cls.go_on.wait(PATIENCE_SEC)
        cls.in_use = False
        yield np.zeros(10, np.float32)

    def take_stray(self) -> None:
        pass

    def close(self) -> None:
        cls = type(self)
        cls.closed_while_in_use = cls.in_use


async def test_cancelling_waits_for_the_thread_and_closes_the_decoder(
    executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    _ClosableDecoder.started.clear()
    monkeypatch.setattr("omni_ws.engine.decoding.AudioDecoder", _ClosableDecoder)
    channel = source(audio(PCM), open_end=True)
    task = asyncio.create_task(_drain(channel, executor))
    await until(_ClosableDecoder.started.is_set)
    task.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done()
    _ClosableDecoder.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert _ClosableDecoder.closed_while_in_use is False


async def _drain(channel: Channel[InputChunk], executor: ThreadPoolExecutor) -> None:
    async with aclosing(
        decode_input(channel, audio=AudioFormat(), sample_rate=16_000, executor=executor, share=MediaRoom().share())
    ) as parts:
        async for _ in parts:
            pass


async def test_images_and_frames_keep_to_their_limits(executor: ThreadPoolExecutor) -> None:
    limits = MediaLimits(image_max_pixels=12, video_max_pixels=48, video_fps=10)
    frames = [InputChunk(Modality.VIDEO, png("red", (16, 12)), timestamp_ms=time) for time in (0, 50, 100)]
    chunks = source(InputChunk(Modality.IMAGE, png("blue", (8, 6))), *frames)
    async with aclosing(
        decode_input(
            chunks, audio=AudioFormat(), sample_rate=16_000, executor=executor, limits=limits, share=MediaRoom().share()
        )
    ) as decoding_parts:
        image, *rest = [part async for part in decoding_parts]
    assert isinstance(image, ImagePart)
    assert image.pixels.shape == (3, 4, 3)
    seen = [frame for part in rest if isinstance(part, VideoPart) for frame in part.frames]
    assert [(frame.timestamp_ms, frame.pixels.shape) for frame in seen] == [(0, (6, 8, 3)), (100, (6, 8, 3))]


async def test_results_of_tools_are_parts_of_their_own(executor: ThreadPoolExecutor) -> None:
    parts, error = await decoded(
        executor,
        text(b"R", tool_call_id="call_1"),
        text("é".encode(), tool_call_id="call_1"),
        text(b"", tool_call_id="call_2"),
        text(b"And now?"),
        text(b""),
    )
    assert error is None
    assert parts == [ToolResultPart("Ré", "call_1", 0), ToolResultPart("", "call_2", 1), TextPart("And now?", 2)]


async def test_frames_are_chosen_when_the_whole_video_is_there(executor: ThreadPoolExecutor) -> None:
    limits = MediaLimits(video_max_frames=3, video_total_pixels=3 * 48)
    frames = [InputChunk(Modality.VIDEO, png("red", (16, 12)), timestamp_ms=time) for time in range(0, 500, 100)]
    chunks = source(*frames, text(b"and"), frames[0])
    share = MediaRoom().share()
    async with aclosing(
        decode_input(chunks, audio=AudioFormat(), sample_rate=16_000, executor=executor, limits=limits, share=share)
    ) as decoding_parts:
        parts = [part async for part in decoding_parts]
    assert share.size == 0
    videos = [part.frames for part in parts if isinstance(part, VideoPart)]
    assert [[frame.timestamp_ms for frame in frames] for frames in videos] == [[0, 200, 400], [0]]
    assert [[frame.pixels.shape[:2] for frame in frames] for frames in videos] == [[(6, 8)] * 3, [(10, 13)]]

"""Decoded media are reserved before they are allocated, and only for as long as they exist."""

import asyncio
import io
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import cache, partial

import av
import numpy as np
import pytest
from PIL import Image
from support.patience import until

from omni_ws.audio.codec import encode_file
from omni_ws.core.chunks import AudioEncoding, AudioFormat, InputChunk, Modality
from omni_ws.core.quota import ByteBudget
from omni_ws.engine.channel import Channel
from omni_ws.engine.decoding import AudioPart, DecodedPart, ImagePart, VideoPart, decode_input
from omni_ws.engine.threads import (
    MediaRoom,
    MediaShare,
)
from omni_ws.errors import EngineOverloaded, OmniError, PayloadTooLarge, UnsupportedFormat
from omni_ws.media import decode_image

RATE = 16_000
#: All but those of MP4, which are for input only: no encoder of the server's makes them.
FORMATS = tuple(one for one in AudioEncoding if one not in (AudioEncoding.M4A, AudioEncoding.MP4, AudioEncoding.MOV))


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as threads:
        yield threads


class WatchedShare(MediaShare):
    """Records the largest reservation."""

    most = 0

    def take(self, size: int) -> None:
        super().take(size)
        self.most = max(self.most, self.size)


def image_chunk(size: tuple[int, int] = (400, 300), mode: str = "1", format: str = "PNG") -> InputChunk:
    file = io.BytesIO()
    Image.new(mode, size).save(file, format)
    return InputChunk(Modality.IMAGE, file.getvalue())


@cache
def video_data(container: str, codec: str, frames: int = 30, *, streamed: bool = True) -> bytes:
    file = io.BytesIO()
    options = {"movflags": "frag_keyframe+empty_moov"} if streamed and container == "mp4" else {}
    with av.open(file, "w", format=container, options=options) as output:
        stream = output.add_stream(codec, rate=10)
        assert isinstance(stream, av.VideoStream)
        stream.width, stream.height, stream.pix_fmt = 320, 240, "yuv420p"
        for index in range(frames):
            pixels = np.full((240, 320, 3), index * 5, np.uint8)
            output.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        output.mux(stream.encode(None))
    return file.getvalue()


def audio_chunk(encoding: AudioEncoding, seconds: float = 20) -> InputChunk:
    noise = np.random.default_rng(1).uniform(-0.5, 0.5, int(RATE * seconds)).astype(np.float32)
    return InputChunk(
        Modality.AUDIO, encode_file(noise, source_rate=RATE, target=AudioFormat(encoding, RATE)), format=encoding.value
    )


async def decoded(
    executor: ThreadPoolExecutor, share: MediaShare, *chunks: InputChunk
) -> tuple[list[DecodedPart], OmniError | None]:
    """Yield the parts; while one is in use, at least its size is reserved."""
    parts: list[DecodedPart] = []
    try:
        async with aclosing(
            decode_input(_source(*chunks), audio=AudioFormat(), sample_rate=RATE, executor=executor, share=share)
        ) as decoding:
            async for part in decoding:
                parts.append(part)
                assert share.size >= size_of(part)
    except OmniError as error:
        return parts, error
    return parts, None


def size_of(part: DecodedPart) -> int:
    match part:
        case ImagePart(pixels=pixels):
            return pixels.nbytes
        case VideoPart(frames=frames):
            return sum(frame.pixels.nbytes for frame in frames)
        case AudioPart(samples=samples):
            return samples.nbytes
    return 0


def _source(*chunks: InputChunk) -> Channel[InputChunk]:
    channel: Channel[InputChunk] = Channel(1 << 30, cost=lambda chunk: len(chunk.payload))
    for chunk in chunks:
        channel.put_nowait(chunk)
    channel.close()
    return channel


def images(mode: str = "1", format: str = "PNG") -> tuple[InputChunk, ...]:
    return (image_chunk(mode=mode, format=format),)


@cache
def sounds(encoding: AudioEncoding) -> tuple[InputChunk, ...]:
    return (audio_chunk(encoding),)


def video_chunks(data: bytes, size: int = 1000) -> tuple[InputChunk, ...]:
    return tuple(InputChunk(Modality.VIDEO, data[start : start + size]) for start in range(0, len(data), size))


#: Made when a test needs them: encoding takes longer than collecting all tests of this folder.
INPUTS: dict[str, Callable[[], tuple[InputChunk, ...]]] = {
    **{f"{format} image": partial(images, format=format) for format in ("PNG", "GIF", "BMP")},
    **{f"{format} image": partial(images, mode="RGB", format=format) for format in ("JPEG", "WEBP")},
    "stills": lambda: tuple(InputChunk(Modality.VIDEO, image_chunk().payload, timestamp_ms=40 * n) for n in range(5)),
    "webm": lambda: video_chunks(video_data("webm", "libvpx")),
    "mp4": lambda: video_chunks(video_data("mp4", "mpeg4")),
    "mp4, index last": lambda: video_chunks(video_data("mp4", "mpeg4", streamed=False)),
    **{f"{encoding} audio": partial(sounds, encoding) for encoding in FORMATS},
    "several": lambda: (*sounds(AudioEncoding.MP3), *images(), *sounds(AudioEncoding.PCM16), *images()),
}


@pytest.fixture
def chunks(request: pytest.FixtureRequest) -> tuple[InputChunk, ...]:
    return INPUTS[request.param]()


@pytest.mark.parametrize("chunks", INPUTS, indirect=True)
async def test_at_the_limit_and_one_byte_past_it(executor: ThreadPoolExecutor, chunks: tuple[InputChunk, ...]) -> None:
    watched = WatchedShare(MediaRoom())
    whole, error = await decoded(executor, watched, *chunks)
    assert error is None
    assert whole
    assert watched.most >= max(map(size_of, whole))
    assert watched.size == 0
    # How far the decoder thread works ahead depends on scheduling; a limit far below that never suffices.
    ahead = chunks[0].payload.startswith((b"\x1a\x45", b"OggS", b"fLaC", b"ID3"))
    few = watched.most // 8 if ahead else watched.most
    budget = ByteBudget(few - 1)
    with MediaRoom(budget).share() as share:
        parts, error = await decoded(executor, share, *chunks)
        assert isinstance(error, PayloadTooLarge)
        assert len(parts) <= len(whole)
    assert budget.held == 0
    if few == watched.most:
        with MediaRoom(ByteBudget(few)).share() as share:
            parts, error = await decoded(executor, share, *chunks)
            assert (error, share.size) == (None, 0)


@pytest.mark.parametrize("chunks", INPUTS, indirect=True)
async def test_what_others_hold_makes_it_wait_for_another_time(
    executor: ThreadPoolExecutor, chunks: tuple[InputChunk, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omni_ws.engine.threads.MAX_WAIT_SEC", 0.05)
    room = MediaRoom()
    with room.share() as other, room.share() as share:
        other.take(room.budget.capacity - 1000)
        _, error = await decoded(executor, share, *chunks)
        assert isinstance(error, EngineOverloaded)
        assert error.retry_after_ms
    assert room.budget.held == 0


async def test_a_picture_is_refused_before_it_is_unpacked(executor: ThreadPoolExecutor) -> None:
    """Its pixels would take 100 MB, above a limit of 100 kB: refused by its header alone."""
    chunk = image_chunk((8192, 4096))
    whole = InputChunk(Modality.IMAGE, chunk.payload[: len(chunk.payload) // 2])  # could not be decoded anyway
    with MediaRoom(ByteBudget(100_000)).share() as share:
        _, error = await decoded(executor, share, whole)
        assert isinstance(error, PayloadTooLarge)
        assert share.size == 0


@pytest.mark.parametrize("kind", ["image", "video"])
async def test_what_is_damaged_is_counted_no_more(executor: ThreadPoolExecutor, kind: str) -> None:
    damaged = {
        "image": (InputChunk(Modality.IMAGE, image_chunk((800, 600), "RGB", "BMP").payload[:9000]),),
        "video": video_chunks(video_data("webm", "libvpx")[:300] + b"\xff" * 5000),
    }[kind]
    room = MediaRoom()
    with room.share() as share:
        _, error = await decoded(executor, share, *damaged)
        assert isinstance(error, UnsupportedFormat)
    assert room.budget.held == 0


async def test_leaving_early_gives_everything_back(executor: ThreadPoolExecutor) -> None:
    room = MediaRoom()
    data = video_chunks(video_data("webm", "libvpx"))

    async def endless() -> AsyncIterator[InputChunk]:
        for chunk in data:
            yield chunk
        await asyncio.Event().wait()

    with room.share() as share:
        decoding = decode_input(endless(), audio=AudioFormat(), sample_rate=RATE, executor=executor, share=share)
        async with aclosing(decoding) as parts:
            assert isinstance(await anext(parts), VideoPart)
            assert room.budget.held > 320 * 240 * 3
    assert room.budget.held == 0


async def test_no_more_pictures_are_unpacked_at_a_time_than_there_are_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inside, most = 0, 0
    original = decode_image

    def counting(data: bytes) -> object:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        try:
            return original(data)
        finally:
            inside -= 1

    monkeypatch.setattr("omni_ws.engine.decoding.decode_image", counting)
    room = MediaRoom(slots=2)
    with ThreadPoolExecutor(8) as threads:
        chunk = image_chunk((1000, 1000), "RGB")
        done = await asyncio.gather(*(decoded(threads, room.share(), chunk, chunk) for _ in range(20)))
    assert all(error is None and len(parts) == 2 for parts, error in done)
    assert 1 <= most <= 2


async def test_audio_and_text_need_no_slot(executor: ThreadPoolExecutor) -> None:
    room = MediaRoom(slots=1)
    async with room.share().slot(0):
        parts, error = await decoded(
            executor, room.share(), audio_chunk(AudioEncoding.WEBM, 1), InputChunk(Modality.TEXT, b"hello")
        )
        assert error is None
        assert len(parts) == 2
        waiting = asyncio.create_task(decoded(executor, room.share(), image_chunk()))
        await until(lambda: bool(room._waiting))
        assert not waiting.done()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    assert not room._waiting
    assert (await decoded(executor, room.share(), image_chunk()))[1] is None

from __future__ import annotations

import gc
import io
import struct
import threading
from contextlib import closing
from functools import cache
from itertools import pairwise

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from support.patience import PATIENCE_SEC

from omni_ws.audio.codec import encode_file
from omni_ws.core.chunks import AudioEncoding, AudioFormat
from omni_ws.errors import UnsupportedFormat
from omni_ws.media.video import VideoDecoder, VideoFrame

FRAMES = 20
RATE = 10
#: name: libav's container, codec, options, whether it can seek back while it writes
KINDS: dict[str, tuple[str, str, dict[str, str], bool]] = {
    "webm": ("webm", "libvpx-vp9", {"cluster_time_limit": "200"}, False),
    "mkv": ("matroska", "mpeg4", {"cluster_time_limit": "200"}, False),
    "fragmented mp4": ("mp4", "mpeg4", {"movflags": "frag_keyframe+empty_moov+default_base_moof"}, False),
    "faststart mp4": ("mp4", "mpeg4", {"movflags": "faststart"}, True),
    "plain mp4": ("mp4", "mpeg4", {}, True),
    "mpegts": ("mpegts", "mpeg2video", {}, False),
}


class Sink:
    """An output that cannot seek."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: bytes) -> int:
        self.data += data
        return len(data)


def picture(index: int, width: int = 64, height: int = 48) -> np.ndarray[tuple[int, int, int], np.dtype[np.uint8]]:
    pixels = np.zeros((height, width, 3), dtype=np.uint8)
    pixels[:, :, 0] = 200
    if width > 64:
        # Make larger files non-trivial, too.
        pixels[:, :, 1] = np.random.default_rng(index).integers(0, 100, (height, width))
    pixels[:, : index * width // FRAMES] = (0, 0, 200)
    return pixels


@cache
def video(kind: str, width: int = 64, height: int = 48) -> bytes:
    container_name, codec, options, seekable = KINDS[kind]
    sink: io.BytesIO | Sink = io.BytesIO() if seekable else Sink()
    if kind == "faststart mp4":
        return with_index_first(video("plain mp4", width, height))
    with av.open(sink, "w", format=container_name, options=options) as container:
        rate = 25 if codec == "mpeg2video" else RATE
        speed = {"deadline": "realtime", "cpu-used": "8"} if codec == "libvpx-vp9" else {}
        stream = container.add_stream(codec, rate=rate, options=speed)
        assert isinstance(stream, av.VideoStream)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.codec_context.gop_size = 5
        stream.codec_context.bit_rate = 2_000_000
        for index in range(FRAMES):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture(index, width, height), format="rgb24")))
        container.mux(stream.encode(None))
    return sink.getvalue() if isinstance(sink, io.BytesIO) else bytes(sink.data)


def with_index_first(data: bytes) -> bytes:
    """Move ``moov`` before ``mdat`` and adjust the chunk offsets in ``stco``, as packaging tools do."""
    boxes: list[tuple[bytes, bytes]] = []
    position = 0
    while position < len(data):
        size, kind = struct.unpack_from(">I4s", data, position)
        boxes.append((kind, data[position : position + size]))
        position += size
    moov = bytearray(next(body for kind, body in boxes if kind == b"moov"))
    place = moov.index(b"stco") + 8
    (count,) = struct.unpack_from(">I", moov, place)
    for index in range(count):
        at = place + 4 + 4 * index
        struct.pack_into(">I", moov, at, struct.unpack_from(">I", moov, at)[0] + len(moov))
    others = [(kind, body) for kind, body in boxes if kind != b"moov"]
    assert others[0][0] == b"ftyp"
    return others[0][1] + bytes(moov) + b"".join(body for _, body in others[1:])


def decoded(data: bytes, borders: list[int], start_ms: int | None = None) -> list[VideoFrame]:
    with closing(VideoDecoder()) as decoder:
        borders = [0, *sorted(min(border, len(data)) for border in borders), len(data)]
        parts = [list(decoder.frames(data[a:b], start_ms)) for a, b in pairwise(borders)]
        return [frame for part in [*parts, list(decoder.last_frames())] for frame in part]


def video_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "decode-video"]


def still(colour: str = "red", size: tuple[int, int] = (8, 6), format: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, format)
    return file.getvalue()


@pytest.mark.parametrize("kind", KINDS)
def test_every_container(kind: str) -> None:
    frames = decoded(video(kind), [], 5000)
    assert len(frames) == FRAMES
    step = 1000 / (25 if kind == "mpegts" else RATE)
    assert [frame.timestamp_ms for frame in frames] == pytest.approx([5000 + i * step for i in range(FRAMES)], abs=1)
    for index, frame in enumerate(frames):
        assert frame.pixels.shape == (48, 64, 3)
        assert frame.pixels.dtype == np.uint8
        assert np.abs(frame.pixels.astype(int) - picture(index)).mean() < 12


@pytest.mark.parametrize("kind", KINDS)
@given(borders=st.lists(st.integers(0, 40_000), max_size=20))
@settings(deadline=None, max_examples=8)
def test_cutting_makes_no_difference(kind: str, borders: list[int]) -> None:
    for frame, expected in zip(decoded(video(kind), borders), decoded(video(kind), []), strict=True):
        assert frame.timestamp_ms == expected.timestamp_ms
        assert np.array_equal(frame.pixels, expected.pixels)


@pytest.mark.parametrize("kind", ["webm", "mkv", "fragmented mp4", "faststart mp4", "mpegts"])
def test_frames_come_while_the_bytes_still_arrive(kind: str) -> None:
    data = video(kind, 320, 240)
    with closing(VideoDecoder()) as decoder:
        assert list(decoder.frames(data[: len(data) * 3 // 4]))


def test_an_mp4_with_its_index_at_the_end_waits_for_the_end() -> None:
    data = video("plain mp4")
    with closing(VideoDecoder(max_buffered_bytes=len(data))) as decoder:
        assert list(decoder.frames(data)) == []
        assert len(list(decoder.last_frames())) == FRAMES
    with (
        closing(VideoDecoder(max_buffered_bytes=len(data) - 1)) as decoder,
        pytest.raises(UnsupportedFormat, match="index"),
    ):
        list(decoder.frames(data))


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_a_chunk_that_is_an_image_is_a_frame(format: str) -> None:
    with closing(VideoDecoder()) as decoder:
        for time in (0, 40, 80):
            (frame,) = list(decoder.frames(still(format=format), time))
            assert frame.timestamp_ms == time
            assert frame.pixels.shape == (6, 8, 3)
        assert list(decoder.last_frames()) == []


def test_the_limit_of_frames_and_one_past_it() -> None:
    with closing(VideoDecoder(max_frames=FRAMES)) as decoder:
        assert len(list(decoder.frames(video("webm"))) + list(decoder.last_frames())) == FRAMES
    decoder = VideoDecoder(max_frames=FRAMES - 1)
    with pytest.raises(UnsupportedFormat, match="at most 19 frames"):
        _ = list(decoder.frames(video("webm"))) + list(decoder.last_frames())
    assert not video_threads()
    with closing(VideoDecoder(max_frames=1)) as decoder:
        list(decoder.frames(still()))
        with pytest.raises(UnsupportedFormat, match="at most 1 frames"):
            list(decoder.frames(still()))


@pytest.mark.parametrize("kind", KINDS)
def test_the_limit_of_pixels_and_one_past_it(kind: str) -> None:
    with closing(VideoDecoder(max_pixels=64 * 48)) as decoder:
        assert list(decoder.frames(video(kind))) + list(decoder.last_frames())
    with closing(VideoDecoder(max_pixels=64 * 48 - 1)) as decoder, pytest.raises(UnsupportedFormat, match="64x48"):
        _ = list(decoder.frames(video(kind))) + list(decoder.last_frames())
    assert not video_threads()


@pytest.mark.parametrize("kind", ["plain mp4", "mpegts"])
def test_frames_of_far_too_many_pixels_are_refused_before_they_are_made(kind: str) -> None:
    with closing(VideoDecoder(max_pixels=1)) as decoder, pytest.raises(UnsupportedFormat, match="pixels"):
        _ = list(decoder.frames(video(kind, 1920, 1080))) + list(decoder.last_frames())


def test_the_pixel_limit_of_stills() -> None:
    with closing(VideoDecoder(max_pixels=48)) as decoder:
        list(decoder.frames(still(size=(8, 6))))
        with pytest.raises(UnsupportedFormat, match="7x7"):
            list(decoder.frames(still(size=(7, 7))))


def test_thinning() -> None:
    with closing(VideoDecoder(frames_per_second=2)) as decoder:
        frames = list(decoder.frames(video("webm"))) + list(decoder.last_frames())
    assert [frame.timestamp_ms for frame in frames] == [0, 500, 1000, 1500]
    with closing(VideoDecoder(frames_per_second=2)) as decoder:
        times = [frame.timestamp_ms for time in range(0, 2000, 100) for frame in list(decoder.frames(still(), time))]
    assert times == [0, 500, 1000, 1500]


def test_a_turned_video_is_put_upright() -> None:
    data = bytearray(video("plain mp4"))
    # The matrix of the track header, 40 bytes after the version: (a b u; c d v; x y w), 16.16 and 2.30 fixed point.
    matrix = data.index(b"tkhd") + 4 + 40
    # A quarter turn clockwise, as phones held upright write it.
    struct.pack_into(">9i", data, matrix, 0, 1 << 16, 0, -(1 << 16), 0, 0, 48 << 16, 0, 1 << 30)
    frame = decoded(bytes(data), [])[10]
    assert frame.pixels.shape == (64, 48, 3)
    # The blue left side is now the top.
    assert frame.pixels[10, 24, 2] > 150
    assert frame.pixels[54, 24, 0] > 150


def test_a_container_without_pictures_is_refused() -> None:
    silence = np.zeros(16000, dtype=np.float32)
    data = encode_file(silence, source_rate=16000, target=AudioFormat(AudioEncoding.WEBM, 16000))
    with pytest.raises(UnsupportedFormat, match="no video stream"):
        decoded(data, [])


@pytest.mark.parametrize("beginning", [b"", b"\x1a\x45\xdf\xa3", b"\0\0\0\x18ftypisom", b"\0\0\0\x18moov", b"\x47"])
@pytest.mark.parametrize("size", [1, 50, 200_000])
def test_garbage_is_refused(beginning: bytes, size: int) -> None:
    garbage = beginning + np.random.default_rng(size).bytes(size)
    with pytest.raises(UnsupportedFormat):
        decoded(garbage, [])
    assert not video_threads()


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(deadline=None, max_examples=25)
def test_damage_is_survived_or_refused(kind: str, data: st.DataObject) -> None:
    damaged = bytearray(video(kind))
    for _ in range(data.draw(st.integers(1, 5))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        frames = decoded(bytes(damaged), [2000])
    except UnsupportedFormat:
        frames = []
    assert len(frames) <= FRAMES + 5
    assert not video_threads()


def test_nothing_in_nothing_out() -> None:
    with closing(VideoDecoder()) as decoder:
        assert list(decoder.frames(b"")) == []
        assert list(decoder.last_frames()) == []
        assert list(decoder.last_frames()) == []
        with pytest.raises(ValueError, match="already flushed"):
            list(decoder.frames(still()))


def test_the_thread_ends_with_close_and_with_the_last_reference() -> None:
    first, second = VideoDecoder(), VideoDecoder()
    for decoder in (first, second):
        list(decoder.frames(video("webm")[:1000]))
    assert len(video_threads()) == 2
    first.close()
    (left,) = video_threads()
    del second, decoder
    gc.collect()
    left.join(PATIENCE_SEC)
    assert not video_threads()

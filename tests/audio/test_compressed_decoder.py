from __future__ import annotations

import gc
import io
import threading
import wave
from functools import cache
from itertools import pairwise
from pathlib import Path

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.patience import PATIENCE_SEC

from omni_ws.audio.codec import AudioDecoder, AudioEncoder, encode_file
from omni_ws.audio.pcm import Samples
from omni_ws.core.chunks import AudioEncoding, AudioFormat
from omni_ws.errors import UnsupportedFormat

SPEECH = Path(__file__).parent.parent / "data" / "goforward.wav"
COMPRESSED = [
    *(AudioEncoding.WEBM, AudioEncoding.OGG, AudioEncoding.OPUS, AudioEncoding.MP3, AudioEncoding.FLAC),
    AudioEncoding.AAC,
]
#: Samples that files of these formats have in front of the sound, and how many they have too many at most.
EXTRA = {AudioEncoding.MP3: (0, 800), AudioEncoding.AAC: (1024, 2048)}


@cache
def speech() -> Samples:
    with wave.open(str(SPEECH)) as file:
        pcm = file.readframes(file.getnframes())
    return np.frombuffer(pcm, dtype="<i2").astype(np.float32) / np.float32(32768)


@cache
def compressed(encoding: AudioEncoding, channels: int = 1) -> bytes:
    return encode_file(speech(), source_rate=16000, target=AudioFormat(encoding, 16000, channels))


@cache
def streamed(encoding: AudioEncoding) -> bytes:
    """A file as a live encoder writes it: without lengths or an index."""
    encoder = AudioEncoder(AudioFormat(encoding, 16000), source_rate=16000)
    pieces = [encoder.encode(speech()[start : start + 320]) for start in range(0, len(speech()), 320)]
    return b"".join([*pieces, encoder.flush()])


def decoded(data: bytes, encoding: AudioEncoding, borders: list[int], sample_rate: int = 16000) -> Samples:
    with AudioDecoder(AudioFormat(encoding), sample_rate=sample_rate) as decoder:
        borders = [0, *sorted(min(border, len(data)) for border in borders), len(data)]
        parts = [decoder.decode(data[a:b]) for a, b in pairwise(borders)]
        return np.concatenate([*parts, decoder.flush()])


@cache
def in_one_piece(encoding: AudioEncoding) -> Samples:
    return decoded(streamed(encoding), encoding, [])


def drive(decoder: AudioDecoder, data: bytes) -> None:
    for start in range(0, len(data), 10_000):
        decoder.decode(data[start : start + 10_000])
    decoder.flush()


def decoder_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("decode-")]


@pytest.mark.slow
@given(encoding=st.sampled_from(COMPRESSED), borders=st.lists(st.integers(0, 50_000), max_size=30))
@settings(deadline=None, max_examples=60)
def test_cutting_makes_no_difference(encoding: AudioEncoding, borders: list[int]) -> None:
    assert np.array_equal(decoded(streamed(encoding), encoding, borders), in_one_piece(encoding))


@pytest.mark.parametrize("encoding", COMPRESSED)
def test_byte_by_byte(encoding: AudioEncoding) -> None:
    data = streamed(encoding)
    head = [*range(3000), *range(3000, len(data), 509)]
    assert np.array_equal(decoded(data, encoding, head), in_one_piece(encoding))


@pytest.mark.parametrize("encoding", COMPRESSED)
@pytest.mark.parametrize("channels", [1, 2])
def test_speech_survives(encoding: AudioEncoding, channels: int) -> None:
    result = decoded(compressed(encoding, channels), encoding, [])
    # MP3 pads the last frame, and AAC has no place for its delay; the other formats have an exact length.
    ahead, longest = EXTRA.get(encoding, (0, 0))
    assert 0 <= len(result) - len(speech()) <= longest
    result = result[ahead:]
    assert np.square(result).sum() == pytest.approx(np.square(speech()).sum(), rel=0.15)
    window = slice(4000, 40000)
    likeness = np.corrcoef(result[window], speech()[window])[0, 1]
    assert likeness > 0.95


def test_flac_is_lossless() -> None:
    assert np.array_equal(decoded(compressed(AudioEncoding.FLAC), AudioEncoding.FLAC, []), speech())


@pytest.mark.parametrize("encoding", COMPRESSED)
def test_audio_comes_while_the_bytes_still_arrive(encoding: AudioEncoding) -> None:
    data = streamed(encoding)
    with AudioDecoder(AudioFormat(encoding), sample_rate=16000) as decoder:
        early = decoder.decode(data[: len(data) // 2])
        assert len(early) > len(speech()) / 8


def test_webm_is_nearly_live() -> None:
    data = streamed(AudioEncoding.WEBM)
    with AudioDecoder(AudioFormat(AudioEncoding.WEBM), sample_rate=16000) as decoder:
        assert len(decoder.decode(data[:2000])) > 320


def test_the_first_bytes_tell_the_container() -> None:
    """Browsers declare opus and send WebM or Ogg."""
    for encoding in (AudioEncoding.WEBM, AudioEncoding.OGG):
        assert np.array_equal(decoded(streamed(encoding), AudioEncoding.OPUS, []), in_one_piece(encoding))


@pytest.mark.parametrize("encoding", COMPRESSED)
@pytest.mark.parametrize("beginning", [b"", b"OggS", b"\x1a\x45\xdf\xa3", b"fLaC", b"ID3\x04\0\0\0\0\0\0", b"RIFF"])
def test_garbage_is_refused(encoding: AudioEncoding, beginning: bytes) -> None:
    for size in (1, 3, 100, 100_000):
        garbage = beginning + np.random.default_rng(size).bytes(size)
        decoder = AudioDecoder(AudioFormat(encoding), sample_rate=16000)
        with pytest.raises(UnsupportedFormat):
            drive(decoder, garbage)
        with pytest.raises(UnsupportedFormat):
            decoder.decode(b"more")
        assert not decoder_threads(), size


@pytest.mark.parametrize("encoding", COMPRESSED)
@given(data=st.data())
@settings(deadline=None, max_examples=40)
def test_damage_is_survived_or_refused(encoding: AudioEncoding, data: st.DataObject) -> None:
    damaged = bytearray(streamed(encoding))
    for _ in range(data.draw(st.integers(1, 5))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        result = decoded(bytes(damaged), encoding, [5000, 10_000])
    except UnsupportedFormat:
        pass
    else:
        assert np.isfinite(result).all()
        assert np.abs(result).max(initial=0) <= 1
    assert not decoder_threads()


def test_tags_that_are_not_utf_8_do_no_harm() -> None:
    frame = b"TIT2" + (4).to_bytes(4, "big") + b"\0\0" + b"\x03\xff\xfe\x80"
    tag = b"ID3\x03\0\0" + bytes([0, 0, 0, len(frame)]) + frame
    result = decoded(tag + compressed(AudioEncoding.MP3), AudioEncoding.MP3, [])
    assert np.array_equal(result, decoded(compressed(AudioEncoding.MP3), AudioEncoding.MP3, []))


@pytest.mark.parametrize("encoding", COMPRESSED)
def test_a_cut_off_end_costs_only_the_end(encoding: AudioEncoding) -> None:
    data = streamed(encoding)
    result = decoded(data[: len(data) * 4 // 5], encoding, [])
    assert len(result) > len(speech()) / 2


def test_a_container_without_audio_is_refused() -> None:
    file = io.BytesIO()
    with av.open(file, "w", format="webm") as container:
        stream = container.add_stream("libvpx-vp9", rate=10)
        assert isinstance(stream, av.VideoStream)
        stream.width = stream.height = 32
        stream.pix_fmt = "yuv420p"
        container.mux(stream.encode(av.VideoFrame(32, 32, "yuv420p")))
        container.mux(stream.encode(None))
    with pytest.raises(UnsupportedFormat, match="no audio stream"):
        decoded(file.getvalue(), AudioEncoding.WEBM, [])


def test_a_rate_outside_the_range_is_refused() -> None:
    file = io.BytesIO()
    with av.open(file, "w", format="flac") as container:
        stream = container.add_stream("flac", rate=4000)
        assert isinstance(stream, av.AudioStream)
        stream.codec_context.layout = "mono"
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 4000), dtype=np.int16), format="s16", layout="mono")
        frame.sample_rate = 4000
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    with pytest.raises(UnsupportedFormat, match="got 4000"):
        decoded(file.getvalue(), AudioEncoding.FLAC, [])


def silent_bomb() -> bytes:
    """Two hours of silence in a few dozen kilobytes."""
    file = io.BytesIO()
    with av.open(file, "w", format="flac") as container:
        stream = container.add_stream("flac", rate=8000, options={"frame_size": "65535"})
        assert isinstance(stream, av.AudioStream)
        stream.codec_context.layout = "mono"
        for _ in range(120):
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 480_000), dtype=np.int16), format="s16", layout="mono")
            frame.sample_rate = 8000
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()


@pytest.mark.slow
def test_a_bomb_is_refused_whole_and_flat_in_pieces() -> None:
    bomb = silent_bomb()
    assert len(bomb) < 60_000
    with AudioDecoder(AudioFormat(AudioEncoding.FLAC), sample_rate=8000) as decoder:
        with pytest.raises(UnsupportedFormat, match="decoded audio is too long"):
            decoder.decode(bomb)
        assert not decoder_threads()
    with AudioDecoder(AudioFormat(AudioEncoding.FLAC), sample_rate=8000) as decoder:
        lengths = [len(piece) for piece in decoder.pieces(bomb)]
        assert max(lengths) <= 65535
        assert sum(lengths) + len(decoder.flush()) == 120 * 480_000


@pytest.mark.parametrize("encoding", COMPRESSED)
def test_the_thread_ends_with_close_and_with_the_last_reference(encoding: AudioEncoding) -> None:
    first, second = (AudioDecoder(AudioFormat(encoding), sample_rate=16000) for _ in range(2))
    for decoder in (first, second):
        decoder.decode(streamed(encoding)[:6000])
    assert len(decoder_threads()) == 2
    first.close()
    first.close()
    (left,) = decoder_threads()
    del second, decoder
    gc.collect()
    left.join(PATIENCE_SEC)
    assert not decoder_threads()


def test_the_thread_ends_with_the_input() -> None:
    decoder = AudioDecoder(AudioFormat(AudioEncoding.OPUS), sample_rate=16000)
    decoder.decode(streamed(AudioEncoding.OPUS))
    decoder.flush()
    assert not decoder_threads()


def test_a_close_between_two_pieces() -> None:
    decoder = AudioDecoder(AudioFormat(AudioEncoding.FLAC), sample_rate=192_000)
    pieces = decoder.pieces(silent_bomb())
    assert len(next(pieces))
    decoder.close()
    assert not decoder_threads()


MP4_FILES: dict[str, tuple[str, str, dict[str, str], AudioEncoding]] = {
    "as Safari records": ("mp4", "aac", {"movflags": "frag_keyframe+empty_moov+default_base_moof"}, AudioEncoding.MP4),
    "a fragment for each frame": ("mp4", "aac", {"movflags": "frag_every_frame+empty_moov"}, AudioEncoding.MP4),
    "index first": ("ipod", "aac", {"movflags": "faststart"}, AudioEncoding.M4A),
    "index last": ("ipod", "aac", {}, AudioEncoding.M4A),
    "ALAC": ("ipod", "alac", {}, AudioEncoding.M4A),
    "QuickTime": ("mov", "pcm_s16be", {}, AudioEncoding.MOV),
    "named wrongly": ("mp4", "aac", {}, AudioEncoding.MP3),
}


def mp4(folder: Path, container: str, codec: str, options: dict[str, str]) -> bytes:
    path = folder / "file"  # libav opens it again to move the index
    with av.open(str(path), "w", format=container, options=options) as muxer:
        stream = muxer.add_stream(codec, rate=16_000, layout="mono")
        assert isinstance(stream, av.AudioStream)
        pcm = (speech() * 32768).astype(np.int16)
        frame = av.AudioFrame.from_ndarray(pcm[None, :], format="s16", layout="mono")
        frame.sample_rate = 16_000
        for packet in (*stream.encode(frame), *stream.encode(None)):
            muxer.mux(packet)
    return path.read_bytes()


@pytest.mark.parametrize("kind", MP4_FILES)
def test_kinds_of_mp4(kind: str, tmp_path: Path) -> None:
    container, codec, options, named = MP4_FILES[kind]
    data = mp4(tmp_path, container, codec, options)
    whole = decoded(data, named, [])
    assert np.array_equal(decoded(data, named, [*range(0, 3000, 7), *range(3000, len(data), 700)]), whole)
    assert len(whole) == pytest.approx(len(speech()), abs=2048)
    length = min(len(whole), len(speech()))
    lag = int(np.argmax(np.correlate(whole[:length], speech()[: length - 2048], "valid")))
    error = whole[lag : lag + length - 2048] - speech()[: length - 2048]
    assert np.mean(error**2) < 0.05 * np.mean(speech() ** 2)


def test_a_fragmented_mp4_is_heard_as_it_arrives(tmp_path: Path) -> None:
    container, codec, options, named = MP4_FILES["as Safari records"]
    data = mp4(tmp_path, container, codec, {**options, "frag_duration": "200000"})
    with AudioDecoder(AudioFormat(named), sample_rate=16000) as decoder:
        assert len(decoder.decode(data[: len(data) // 2])) > len(speech()) // 3


def test_an_index_at_the_end_is_waited_for_up_to_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = mp4(tmp_path, "ipod", "aac", {})
    monkeypatch.setattr("omni_ws.audio.compressed.MAX_UNACCOUNTED_BYTES", len(data))
    assert len(decoded(data, AudioEncoding.M4A, [5000])) > 0
    monkeypatch.setattr("omni_ws.audio.compressed.MAX_UNACCOUNTED_BYTES", len(data) - 1)
    with pytest.raises(UnsupportedFormat, match="index"):
        decoded(data, AudioEncoding.M4A, [5000])


def test_adts_with_a_checksum_and_behind_a_tag() -> None:
    plain = compressed(AudioEncoding.AAC)
    protected, at = b"", 0
    while at < len(plain):
        size = (plain[at + 3] & 3) << 11 | plain[at + 4] << 3 | plain[at + 5] >> 5
        longer = size + 2
        head = bytearray(plain[at : at + 7])
        head[1] &= 0xFE
        head[3] = head[3] & 0xFC | longer >> 11
        head[4], head[5] = longer >> 3 & 0xFF, head[5] & 0x1F | (longer & 7) << 5
        protected += bytes(head) + b"\0\0" + plain[at + 7 : at + size]
        at += size
    whole = decoded(plain, AudioEncoding.AAC, [])
    tag = b"ID3\x04\0\0\0\0\x02\x00" + bytes(256)
    for data, named in ((protected, AudioEncoding.AAC), (tag + plain, AudioEncoding.MP3), (plain, AudioEncoding.FLAC)):
        assert np.array_equal(decoded(data, named, [3, 500, 5000]), whole)

"""Buffered audio is cut at samples, regardless of chunk boundaries."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from omni_ws.core.chunks import AudioEncoding, AudioFormat, InputChunk, Modality
from omni_ws.service.listening import AudioRing

STEREO = AudioFormat(AudioEncoding.PCM16, 8_000, 2)  # 32 bytes per millisecond


def ring_of(payloads: list[bytes], *, start_ms: float = 0) -> AudioRing:
    ring = AudioRing(STEREO, start_ms=start_ms)
    for number, payload in enumerate(payloads):
        ring.append(InputChunk(Modality.AUDIO, payload, number, timestamp_ms=1000))
    return ring


def joined(chunks: list[InputChunk]) -> bytes:
    return b"".join(chunk.payload for chunk in chunks)


@given(
    st.lists(st.binary(max_size=100), max_size=10),
    st.lists(st.floats(0, 30), max_size=6).map(sorted),
    st.booleans(),
)
def test_whatever_the_cuts_nothing_is_lost_and_frames_stay_whole(
    payloads: list[bytes], times: list[float], forget: bool
) -> None:
    stream = b"".join(payloads)
    ring = ring_of(payloads, start_ms=5)
    position = 0
    for time_ms in times:
        end = max(position, min(len(stream), int(max(0.0, time_ms - 5) * 8) * 4))
        if forget:
            assert ring.forget(time_ms) == end - position
        else:
            assert joined(ring.take(time_ms)) == stream[position:end]
        position = end
        assert ring.held_bytes == len(stream) - position
    assert joined(ring.take()) == stream[position:]
    assert ring.held_bytes == 0


def test_the_second_part_of_a_chunk_has_its_own_time_and_the_same_number() -> None:
    ring = ring_of([bytes(320)])
    (first,) = ring.take(4)
    (second,) = ring.take()
    assert (len(first.payload), first.timestamp_ms, first.sequence_id) == (128, 1000, 0)
    assert (len(second.payload), second.timestamp_ms, second.sequence_id) == (192, 1004, 0)


def test_a_drop_within_a_frame_drops_its_rest_too() -> None:
    ring = AudioRing(AudioFormat(channels=2))
    assert ring.append(InputChunk(Modality.AUDIO, b"aaaabb", 0)) == 0
    assert ring.drop() == 6
    assert ring.append(InputChunk(Modality.AUDIO, b"b", 1)) == 1
    assert ring.append(InputChunk(Modality.AUDIO, b"bcccc", 2)) == 1
    assert ring.held_bytes == 4
    assert [chunk.payload for chunk in ring.take()] == [b"cccc"]
    assert ring.drop() == 0
    assert ring.append(InputChunk(Modality.AUDIO, b"dddd", 3)) == 0


def test_a_cut_drops_the_incomplete_frame_alone() -> None:
    ring = AudioRing(AudioFormat(channels=2))
    for payload in (b"aaaa", b"b", b"bb"):
        ring.append(InputChunk(Modality.AUDIO, payload, 0))
    assert ring.cut() == 3
    assert ring.cut() == 0
    ring.append(InputChunk(Modality.AUDIO, b"cccc", 1))
    assert b"".join(chunk.payload for chunk in ring.take()) == b"aaaacccc"
    ring.append(InputChunk(Modality.AUDIO, b"dd", 2))
    assert len(ring.take()) == 1
    assert ring.cut() == 0  # it was taken already
    ring.append(InputChunk(Modality.AUDIO, b"eeee", 3))
    assert b"".join(chunk.payload for chunk in ring.take()) == b"eeee"

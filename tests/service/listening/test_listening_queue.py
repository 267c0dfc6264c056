"""The listening queue: what it counts, what makes audio urgent, and how it is cut into pieces."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.inline_workers import MS, InlineWorkers, quiet

from omni_ws.core.chunks import AudioEncoding, AudioFormat, InputChunk, Modality
from omni_ws.service.listening import (
    ITEM_OVERHEAD_BYTES,
    MAX_PIECE_BYTES,
    MIN_WAIT_SEC,
    ROUND_SEC,
    Item,
    ListeningQueue,
    ListeningSettings,
    Reached,
)

pytestmark = pytest.mark.virtual_clock

MONO = AudioFormat(AudioEncoding.PCM16, 16_000)
SETTINGS = ListeningSettings(None, MONO)
MARK = Reached(lambda: None)


def make(overdue: list[float] | None = None) -> ListeningQueue:
    """Adds the times at which the queue was overdue to ``overdue``."""
    times = [] if overdue is None else overdue
    queue = ListeningQueue(InlineWorkers(), lambda: times.append(asyncio.get_running_loop().time()))
    queue.audio = MONO
    return queue


def audio(ms: int, number: int = 0, *, end: bool = False, form: str | None = None) -> InputChunk:
    return InputChunk(Modality.AUDIO, quiet(ms), number, format=form, timestamp_ms=number * 20, end_of_input=end)


def counts(queue: ListeningQueue) -> tuple[int, int]:
    """All items, and those that are urgent."""
    return len(queue), queue.urgent


def text(content: bytes = b"x") -> InputChunk:
    return InputChunk(Modality.TEXT, content, 0)


async def test_it_counts_bytes_and_audio() -> None:
    queue = make()
    for item in (audio(20), text(b"abc"), SETTINGS, MARK, None):
        queue.put(item)
    assert len(queue) == 5
    assert queue.waiting_bytes == 20 * MS + 3 + 5 * ITEM_OVERHEAD_BYTES
    assert queue.waiting_ms == 20
    assert [queue.take() for _ in range(5)] == [audio(20), text(b"abc"), SETTINGS, MARK, None]
    assert (queue.waiting_bytes, queue.waiting_ms, queue.urgent) == (0, 0, 0)


async def test_everything_but_open_audio_is_urgent() -> None:
    for item in (text(), SETTINGS, MARK, None, audio(20, end=True)):
        queue = make()
        queue.put(audio(20))
        assert counts(queue) == (1, 0)
        queue.put(item)
        assert counts(queue) == (2, 1)


async def test_audio_counted_in_a_format_that_changed_leaves_nothing() -> None:
    queue = make()
    queue.put(audio(20))
    queue.put(audio(20))
    queue.audio = AudioFormat(AudioEncoding.PCM16, 8000)
    queue.take()
    assert queue.waiting_ms == 0  # never negative, though 40 ms were counted and 40 ms of the new format taken
    queue.take()
    assert queue.waiting_ms == 0


async def test_cancelled_input_is_withdrawn_and_audio_stays() -> None:
    queue = make()
    kept: list[Item] = [audio(20, 1), SETTINGS, MARK, audio(20, 5, end=True)]
    items = [kept[0], text(b"abc"), kept[1], None, kept[2], InputChunk(Modality.IMAGE, b"\x89PNG", 4), kept[3]]
    for item in items:
        queue.put(item)
    assert queue.withdraw() == 3 + 4
    assert [queue.take() for _ in range(len(queue))] == kept


async def test_a_piece_is_one_chunk_of_audio() -> None:
    queue = make()
    for number in range(3):
        queue.put(audio(20, number))
    queue.put(text())
    queue.put(audio(20, 4))
    piece = queue.take_piece()
    assert (piece.source, piece.payload) == (MONO, quiet(20) * 3)
    chunk = piece.as_chunk()
    assert (chunk.sequence_id, chunk.timestamp_ms, chunk.payload) == (2, 0, quiet(20) * 3)
    assert queue.take() == text()
    assert queue.take_piece().first.sequence_id == 4


async def test_audio_is_next_or_not() -> None:
    expected = [(None, False), (text(), False), (audio(20), True)]
    for item, is_audio in expected:
        queue = make()
        queue.put(item)
        assert queue.audio_is_next is is_audio
    assert not make().audio_is_next


async def test_a_piece_ends_with_the_input() -> None:
    queue = make()
    queue.put(audio(20, 0, end=True))
    queue.put(audio(20, 1))
    piece = queue.take_piece()
    assert piece.last.end_of_input
    assert not piece.as_chunk().end_of_input
    assert len(queue) == 1


async def test_a_piece_is_of_one_format() -> None:
    queue = make()
    other = "audio/pcm;rate=8000"
    forms = [None, "audio/pcm;rate=16000", other, other, None]
    for number, form in enumerate(forms):
        queue.put(audio(20, number, form=form))
    pieces = [queue.take_piece() for _ in range(3)]
    assert [piece.source.sample_rate for piece in pieces] == [16_000, 8000, 16_000]
    assert [(piece.first.sequence_id, piece.last.sequence_id) for piece in pieces] == [(0, 1), (2, 3), (4, 4)]


async def test_a_long_chunk_is_cut_and_keeps_its_end() -> None:
    queue = make()
    payload = bytes(2 * MAX_PIECE_BYTES + 10)
    queue.put(InputChunk(Modality.AUDIO, payload, 7, end_of_input=True))
    assert queue.waiting_bytes == len(payload) + 3 * ITEM_OVERHEAD_BYTES
    pieces = [queue.take_piece() for _ in range(3)]
    assert [len(piece.payload) for piece in pieces] == [MAX_PIECE_BYTES, MAX_PIECE_BYTES, 10]
    assert [(piece.last.sequence_id, piece.last.end_of_input) for piece in pieces] == [
        (7, False),
        (7, False),
        (7, True),
    ]
    queue.put(InputChunk(Modality.IMAGE, payload, 8))
    assert len(queue) == 1


async def test_each_byte_of_a_long_chunk_is_copied_once() -> None:
    copied = 0

    class Payload(bytes):
        def __getitem__(self, place: Any) -> Any:
            nonlocal copied
            piece = super().__getitem__(place)
            copied += len(piece)
            return Payload(piece)

    payload = Payload(20 * MAX_PIECE_BYTES)
    make().put(InputChunk(Modality.AUDIO, payload))
    assert copied == len(payload)


async def test_audio_is_overdue_once_it_has_waited() -> None:
    times: list[float] = []
    queue = make(times)
    began = asyncio.get_running_loop().time()
    queue.put(audio(20))
    queue.put(audio(20))
    await asyncio.sleep(ROUND_SEC + 0.01)
    assert [round(when - began, 3) for when in times] == [ROUND_SEC]
    assert queue.overdue
    queue.take()
    assert not queue.overdue


async def test_audio_that_was_taken_in_time_is_never_overdue() -> None:
    times: list[float] = []
    queue = make(times)
    queue.put(audio(20))
    queue.clear()
    await asyncio.sleep(2 * ROUND_SEC)
    assert not times
    # And what has waited for less than half a round joins the next.
    queue.put(audio(20))
    await asyncio.sleep(ROUND_SEC - MIN_WAIT_SEC / 2)
    queue.take()
    queue.put(audio(20))
    await asyncio.sleep(MIN_WAIT_SEC)
    assert not times
    await asyncio.sleep(ROUND_SEC)
    assert len(times) == 1


async def test_input_without_audio_joins_no_round() -> None:
    times: list[float] = []
    queue = make(times)
    queue.put(text())
    await asyncio.sleep(2 * ROUND_SEC)
    assert not times

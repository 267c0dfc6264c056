"""Rounds of speech workers: who joins one, and in which thread its work runs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

import pytest
from support.speech_clips import clip_bytes, silence

from omni_ws.audio.codec import AudioDecoder
from omni_ws.audio.speech_watch import ORDINARY_BAR, SpeechOnset, SpeechWatch, StreamPiece, Watched
from omni_ws.audio.vad import SpeechDetector
from omni_ws.core.chunks import AudioEncoding, AudioFormat
from omni_ws.engine.threads import Lane
from omni_ws.errors import UnsupportedFormat
from omni_ws.service.listening import (
    MAX_IN_ROUND,
    ROUND_SEC,
    SpeechWorkers,
)

RAW = AudioFormat(AudioEncoding.PCM16, 16_000)


@pytest.fixture
async def workers() -> AsyncIterator[SpeechWorkers]:
    speech_workers = SpeechWorkers()
    yield speech_workers
    speech_workers.close()


def piece(data: bytes, source: AudioFormat = RAW) -> StreamPiece:
    """The first of a stream."""
    watch = SpeechWatch(SpeechDetector(), threshold=0.5, silence_duration_ms=500)
    return StreamPiece(watch, data, source, ORDINARY_BAR)


async def outcomes(workers: SpeechWorkers, pieces: Sequence[StreamPiece]) -> list[Watched | Exception]:
    """The outcomes of pieces that are submitted within one round."""
    loop = asyncio.get_running_loop()
    heard: list[asyncio.Future[Watched | Exception]] = [loop.create_future() for _ in pieces]
    for each, found in zip(pieces, heard, strict=True):
        workers.join_round(partial(workers.submit, each, found.set_result, Lane()))
    return await asyncio.gather(*heard)


async def test_a_round_runs_in_order_in_one_thread(workers: SpeechWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    decode = AudioDecoder.decode

    def observed(decoder: AudioDecoder, *data: Any, **options: Any) -> object:
        threads.append(threading.get_ident())
        return decode(decoder, *data, **options)

    monkeypatch.setattr(AudioDecoder, "decode", observed)
    lengths = [32 * (1 + number) for number in range(MAX_IN_ROUND)]
    found = await outcomes(workers, [piece(silence(length / 1000)) for length in lengths])
    assert [one.judged_ms for one in found if isinstance(one, Watched)] == lengths
    assert len(threads) == MAX_IN_ROUND
    assert len(set(threads)) == 1
    assert threads[0] != threading.get_ident()


async def test_streams_of_one_round_are_heard_as_each_would_be_alone(workers: SpeechWorkers) -> None:
    recordings = [silence(0.7) + clip_bytes(name) for name in ("goforward", "cards_001", "cards_005")]
    streams = [piece(recording) for recording in recordings]
    found: list[list[object]] = [[] for _ in streams]
    size = 11_111  # bytes: no whole number of windows
    for start in range(0, max(map(len, recordings)), size):
        pieces = [
            StreamPiece(stream.watch, recording[start : start + size], RAW, ORDINARY_BAR)
            for stream, recording in zip(streams, recordings, strict=True)
        ]
        for events, outcome in zip(found, await outcomes(workers, pieces), strict=True):
            assert isinstance(outcome, Watched)
            events += outcome.events
    assert found == [list(piece(b"").watch.hear(recording, RAW, ORDINARY_BAR).events) for recording in recordings]
    assert all(isinstance(events[0], SpeechOnset) for events in found)


async def test_a_failure_in_a_round_reaches_its_own_session_alone(workers: SpeechWorkers) -> None:
    garbage = piece(b"no wav at all " * 100, AudioFormat(AudioEncoding.WAV, 16_000))
    first, second, third = await outcomes(workers, [piece(silence(0.32)), garbage, piece(silence(0.64))])
    assert [one.judged_ms for one in (first, third) if isinstance(one, Watched)] == [320, 640]
    assert isinstance(second, UnsupportedFormat)


async def test_pieces_that_wait_for_busy_threads_are_all_heard(workers: SpeechWorkers) -> None:
    heard: asyncio.Queue[Watched | Exception] = asyncio.Queue()
    for _ in range(5 * MAX_IN_ROUND):
        workers.submit(piece(silence(0.32)), heard.put_nowait, Lane())
    found = [await heard.get() for _ in range(5 * MAX_IN_ROUND)]
    assert [one.judged_ms for one in found if isinstance(one, Watched)] == [320] * (5 * MAX_IN_ROUND)


@pytest.mark.virtual_clock
async def test_the_wait_for_a_round_and_its_size_are_limited(workers: SpeechWorkers) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    times: list[float] = []

    def begins() -> None:
        times.append(round(loop.time() - began, 3))

    for _ in range(MAX_IN_ROUND):
        workers.join_round(begins)
    await asyncio.sleep(ROUND_SEC / 4)
    workers.join_round(begins)  # one too many
    await asyncio.sleep(ROUND_SEC / 4)
    workers.join_round(begins)
    await asyncio.sleep(ROUND_SEC)
    assert times == [ROUND_SEC] * MAX_IN_ROUND + [ROUND_SEC * 5 / 4] * 2


@pytest.mark.virtual_clock
async def test_a_round_that_begins_after_close_does_nothing() -> None:
    workers = SpeechWorkers()
    done: list[Watched | Exception] = []
    workers.join_round(partial(workers.submit, piece(silence(0.32)), done.append, Lane()))
    workers.close()
    await asyncio.sleep(2 * ROUND_SEC)
    assert not done

"""Events, answers assembled from them, and the event queue."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from omni_ws.client.events import (
    EVENT_OVERHEAD_BYTES,
    AnswerBuilder,
    AudioChunk,
    Closing,
    Event,
    EventQueue,
    Reconnected,
    TextChunk,
    ToolCallChunk,
    TranscriptChunk,
    TranscriptView,
    event_bytes,
    output_event,
)
from omni_ws.core.chunks import ToolCall
from omni_ws.errors import InvalidFrame
from omni_ws.wire.server_frames import OutputChunkFrame


def heard(text: str, *, interim: bool = False) -> TranscriptChunk:
    return TranscriptChunk("req", 0, text, interim)


def test_an_interim_replaces_the_one_before_it() -> None:
    view = TranscriptView()
    for chunk, shown in [
        (heard("he", interim=True), "he"),
        (heard("hello", interim=True), "hello"),
        (heard("hello"), "hello"),
        (heard(" yo", interim=True), "hello yo"),
        (heard("", interim=True), "hello"),
        (heard(" you"), "hello you"),
    ]:
        view.add(chunk)
        assert view.text == shown
    assert (view.settled, view.interim) == ("hello you", "")
    view.clear()
    assert view.text == ""


def test_a_fresh_session_voids_half_an_answer() -> None:
    builder = AnswerBuilder()
    events: list[Event] = [
        TextChunk("req_a", 0, "half"),
        AudioChunk("req_a", 1, b"12", "pcm16", 24_000),
        heard("he"),
        Reconnected("sess", 1),
        TextChunk("req_b", 0, "whole"),
    ]
    for event in events:
        builder.add(event)
    answer = builder.build()
    assert (answer.text, answer.audio, answer.transcript, answer.sample_rate) == ("whole", b"", "", None)


def test_audio_is_not_printed() -> None:
    builder = AnswerBuilder()
    chunk = AudioChunk("req_1", 0, b"\1\2" * 50_000, "pcm16", 24_000)
    builder.add(chunk)
    for shown in (repr(chunk), repr(builder.build())):
        assert "24000" in shown
        assert len(shown) < 500


@pytest.mark.parametrize(
    "frame",
    [
        OutputChunkFrame(request_id="r", sequence_id=0, modality="text"),
        OutputChunkFrame(request_id="r", sequence_id=0, modality="audio", payload=b""),
        OutputChunkFrame(request_id="r", sequence_id=0, final=True),
        OutputChunkFrame(request_id="r", sequence_id=0, final=True, finish_reason="boredom"),
    ],
)
def test_output_that_lacks_something_is_refused(frame: OutputChunkFrame) -> None:
    with pytest.raises(InvalidFrame):
        output_event(frame)


async def test_the_queue_waits_at_its_bound() -> None:
    queue = EventQueue(2 * EVENT_OVERHEAD_BYTES)
    closing = Closing("x", True, 0)
    await queue.put(closing)
    await queue.put(closing)
    third = asyncio.create_task(queue.put(closing))
    await asyncio.sleep(0)
    assert not third.done()
    assert await queue.get() == closing
    await third
    assert queue.queued == 2 * EVENT_OVERHEAD_BYTES


async def test_the_end_of_the_queue() -> None:
    queue = EventQueue(EVENT_OVERHEAD_BYTES)
    closing = Closing("x", True, 0)
    await queue.put(closing)
    blocked = asyncio.create_task(queue.put(closing))
    await asyncio.sleep(0)
    queue.close()
    await blocked
    assert [await queue.get(), await queue.get(), await queue.get()] == [closing, None, None]


async def test_a_waiting_reader_sees_the_end() -> None:
    queue = EventQueue(EVENT_OVERHEAD_BYTES)
    reader = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    queue.close()
    assert await reader is None


async def test_discarding_makes_room() -> None:
    queue = EventQueue(EVENT_OVERHEAD_BYTES)
    await queue.put(TextChunk("req_a", 0, ""))
    blocked = asyncio.create_task(queue.put(TextChunk("req_b", 1, "")))
    await asyncio.sleep(0)
    queue.discard(lambda event: isinstance(event, TextChunk) and event.request_id == "req_a")
    await blocked
    assert await queue.get() == TextChunk("req_b", 1, "")


def test_pieces_of_tool_calls_become_whole_calls() -> None:
    builder = AnswerBuilder()
    pieces: list[dict[str, Any]] = [
        {"index": 0, "id": "call_a", "name": "weather", "arguments": '{"city"'},
        {"index": 1, "id": "call_b", "name": "clock"},
        {"index": 0, "arguments": ': "Oslo"}'},
        {"index": 1, "arguments": "{}"},
    ]
    for number, fields in enumerate(pieces):
        event = output_event(OutputChunkFrame(request_id="req", sequence_id=number, modality="tool_call", **fields))
        assert isinstance(event, ToolCallChunk)
        assert event_bytes(event) >= EVENT_OVERHEAD_BYTES + len(event.call.arguments)
        builder.add(event)
    assert builder.build().tool_calls == (
        ToolCall("call_a", "weather", '{"city": "Oslo"}'),
        ToolCall("call_b", "clock", "{}"),
    )


def test_a_tool_call_says_which_it_is() -> None:
    with pytest.raises(InvalidFrame):
        output_event(OutputChunkFrame(request_id="req", sequence_id=0, modality="tool_call", name="clock"))

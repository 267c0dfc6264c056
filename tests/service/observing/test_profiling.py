"""What a real server reports to its observers, and the profiler events made of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.live_server import LiveServer, live_server
from support.native_client import native_client
from support.raw_http import post
from support.recordings import event_lines
from support.scripted_engines import HearingEngine

from omni_ws.engine.base import TranscriptOutput
from omni_ws.engine.fake import EchoEngine, EchoSettings
from omni_ws.profiler import events
from omni_ws.profiler.events import EventRecorder
from omni_ws.service.observing import observer
from omni_ws.service.observing.observer import Observation, RequestReached, SessionIdentity
from omni_ws.service.observing.profiling import ProfileEvents


class Recorded:
    """Keeps what is reported to it."""

    def __init__(self) -> None:
        self.observed: list[tuple[SessionIdentity, Observation]] = []

    def observe(self, session: SessionIdentity, observation: Observation) -> None:
        self.observed.append((session, observation))

    @property
    def names(self) -> list[str]:
        return [
            observation.step.upper() if isinstance(observation, RequestReached) else type(observation).__name__
            for _, observation in self.observed
        ]


class Events:
    def __init__(self, recorder: EventRecorder) -> None:
        self._recorder = recorder

    def lines(self) -> list[dict[str, Any]]:
        return event_lines(self._recorder)

    def of(self, name: str) -> list[dict[str, Any]]:
        return [
            line["metadata"] | {"request_id": line["request_id"]} for line in self.lines() if line["event_name"] == name
        ]


@contextmanager
def recording(server: LiveServer, folder: Path) -> Iterator[Events]:
    events.recorder = EventRecorder("run", folder)
    server.app.sessions.observers.add(ProfileEvents(events.recorder))
    try:
        yield Events(events.recorder)
    finally:
        events.recorder.close()
        events.recorder = None


async def test_the_life_of_a_request_over_a_websocket() -> None:
    recorded = Recorded()
    async with live_server() as server:
        server.app.sessions.observers.add(recorded, every_chunk=True)
        async with native_client(server) as client:
            await client.say("hello")
            await client.answer()
        await server.until(lambda: "SessionEnded" in recorded.names)
    expected = ["SessionOpened", "InputReceived", "OPENED", "POLICY_FIRED", "InputAccepted", "INPUT_ENDED"]
    assert recorded.names[:6] == expected
    rest = [
        "ENGINE_STARTED",
        "OutputBegan",
        "OutputMade",
        "ENGINE_ENDED",
        "RequestEnded",
        "OutputWritten",
        "SessionEnded",
    ]
    assert sorted(set(recorded.names[6:]) - {"InputAccepted"}) == sorted(rest)
    (identity,) = {session for session, _ in recorded.observed}
    assert (identity.session_id, identity.origin) == (client.created["session_id"], observer.Origin.WEBSOCKET)


async def test_chunks_are_reported_on_request_only() -> None:
    recorded = Recorded()
    async with live_server() as server:
        server.app.sessions.observers.add(recorded)
        async with native_client(server) as client:
            await client.say("hello")
            await client.answer()
    assert "InputReceived" not in recorded.names


async def test_an_observer_that_fails_is_logged_once_and_removed(caplog: pytest.LogCaptureFixture) -> None:
    class Failing:
        def observe(self, session: SessionIdentity, observation: Observation) -> None:
            raise ValueError("no")

    async with live_server(expect_errors=True) as server:
        server.app.sessions.observers.add(Failing())
        with caplog.at_level(logging.ERROR):
            async with native_client(server) as client:
                await client.say("hello")
                assert (await client.answer()).text == "hello"
        assert not server.app.sessions.observers.listening_to_outputs  # only those who keep the accounts are left
    assert [record.message for record in caplog.records] == ["Failing failed and was removed"]


async def test_the_events_of_a_request_with_reordered_input(tmp_path: Path) -> None:
    async with live_server() as server:
        with recording(server, tmp_path) as found:
            async with native_client(server) as client:
                for number in (0, 2, 3):
                    await client.chunk(str(number), number=number)
                await client.barrier()  # what comes in one piece comes at one time
                for number in (1, 1):
                    await client.chunk(str(number), number=number)
                await client.chunk("4", number=4, end=True)
                assert (await client.answer()).text == "01234"
        lines = found.lines()
        received = found.of("input_received")
    assert len({line["request_id"] for line in lines}) == 1
    names = [(line["stage"], line["event_name"]) for line in lines]
    assert names[:2] == [("coordinator", "request_admission"), ("input", "stage_input_received")]
    for pair in (
        ("input", "policy_fired"),
        ("queue", "stage_complete"),
        ("engine", "model_path_start"),
        ("engine", "model_path_end"),
        ("answer", "stage_stream_chunk_sent"),
        ("transport", "stage_stream_chunk_received"),
        ("transport", "first_byte_written"),
        ("coordinator", "terminal_response"),
    ):
        assert pair in names
    assert names[-1] == ("transport", "response_written")
    assert names.count(("input", "stage_complete")) == names.count(("transport", "first_byte_written")) == 1
    totals = {
        key: sum(event.get(key, 0) for event in received) for key in ("chunks", "bytes", "duplicates", "reordered")
    }
    assert totals == {"chunks": 5, "bytes": 5, "duplicates": 1, "reordered": 2}
    assert (
        sum(event.get("reorder_wait_ms", 0) for event in received)
        > sum(event.get("gap_ms", 0) for event in received)
        > 0
    )


async def test_an_interruption_names_both_requests(tmp_path: Path) -> None:
    engine = EchoEngine(EchoSettings(first_chunk_delay_ms=60_000))
    async with live_server(engine) as server:
        with recording(server, tmp_path) as found:
            async with native_client(server) as client:
                await client.configure(overlap="interrupt")
                await client.say("one")
                await client.until("response_started")
                await client.say("two")
                assert (await client.answer()).reason == "cancelled"
                await client.until("response_started")
            await server.check_empty()
        admitted = [event["request_id"] for event in found.of("request_admission")]
        (interrupt,) = found.of("interrupt")
        ends = {event["request_id"]: event["finish_reason"] for event in found.of("terminal_response")}
        engine_ends = {event["request_id"]: event["status"] for event in found.of("model_path_end")}
    first, second = admitted
    assert (interrupt["request_id"], interrupt["by"]) == (first, second)
    assert ends == {first: "cancelled", second: "cancelled"}
    assert engine_ends == {first: "cancelled", second: "cancelled"}


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_over_http_have_the_same_events(stream: bool, tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "stream": stream}
    async with live_server() as server:
        with recording(server, tmp_path) as found:
            assert (await post(server.port, "/v1/chat/completions", body)).status == 200
            await server.until(lambda: not server.sessions)
        names = [(line["stage"], line["event_name"]) for line in found.lines()]
        (admission,) = found.of("request_admission")
    assert admission["origin"] == "http"
    assert names[0] == ("coordinator", "request_admission")
    assert names[-1] == ("transport", "response_written")
    assert ("transport", "first_byte_written") in names


async def test_stages_of_speech_that_is_cancelled_before_the_engine_gets_it_end_once(tmp_path: Path) -> None:
    engine = HearingEngine(heard=[TranscriptOutput("some words")])
    async with live_server(engine) as server:
        with recording(server, tmp_path) as profile:
            async with native_client(server) as client:
                await client.chunk(bytes(3200), end=True)
                await client.send("cancel")
                await client.answer()
                await server.until(lambda: len(engine.inputs) == 1)
                await client.barrier()
            await server.until(lambda: not server.sessions)
            lines = profile.lines()
    ends = [line["stage"] for line in lines if line["event_name"] == events.STAGE_END]
    assert sorted(ends) == ["input", "queue"]
    assert len([line for line in lines if line["event_name"] == "model_path_end"]) == 1


async def test_a_request_that_is_refused_as_it_opens_has_a_beginning_and_an_end(tmp_path: Path) -> None:
    async with live_server() as server:
        with recording(server, tmp_path) as found:
            async with native_client(server) as client:
                await client.chunk(end=True)
                assert (await client.answer()).reason == "error"
        (end,) = found.of("terminal_response")
        names = [line["event_name"] for line in found.lines()]
    assert end["error"] == "empty_input"
    assert names.count("stage_complete") == names.count("stage_input_received") == 1


async def test_a_request_that_was_open_before_has_no_events(tmp_path: Path) -> None:
    async with live_server() as server, native_client(server) as client:
        await client.chunk("hel")
        await client.barrier()
        with recording(server, tmp_path) as found:
            await client.chunk("lo", end=True)
            await client.answer()
            await client.say("again")
            await client.answer()
        lines = found.lines()
    admitted = {line["request_id"] for line in lines if line["event_name"] == "request_admission"}
    assert len(admitted) == 1
    assert {line["request_id"] for line in lines if line["stage"] in ("input", "queue", "engine")} == admitted

"""The parts of workers that need no process: the sum of metrics, the channel, and what is refused."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile

import pytest
from support.exhausted import no_more_files
from support.live_server import live_server
from support.native_client import native_client
from support.patience import PATIENCE_SEC, until
from support.raw_http import call
from support.webrtc_client import webrtc_call

from omni_ws.config import ConfigurationError, check_available
from omni_ws.config.model import ServerConfig
from omni_ws.metrics import Metrics, rendered
from omni_ws.service.sessions.shared_counts import KNOW_SECRET, METRICS, WorkerRow
from omni_ws.workers.supervisor import Member, Questions, Supervisor
from omni_ws.workers.worker import (
    Family,
    MessageKind,
    ProcessChannel,
    Worker,
    WorkerMessage,
    WorkerStart,
    as_families,
    as_metrics,
    growing,
    shared_counts,
    summed,
)


def families(sessions: int, requests: int, up: int) -> list[Family]:
    metrics = Metrics()
    metrics.sessions_active.set(sessions)
    metrics.sessions_limit.set(7)
    metrics.engine_up.labels("fake").set(up)
    metrics.store_up.labels("sqlite").set(up)
    metrics.store_records.set(10)
    for _ in range(requests):
        metrics.requests.labels("http", "stop", "").inc()
        metrics.first_output_seconds.labels("http").observe(0.2)
    return as_families(metrics.registry.collect())


def shown(found: list[Family]) -> str:
    text, _ = rendered(as_metrics(found), "")()
    return text.decode()


def test_amounts_add_up_and_states_do_not() -> None:
    text = shown(summed([families(1, 2, 1), families(3, 4, 0)]))
    for line in (
        "omni_ws_sessions_active 4.0",
        "omni_ws_sessions_limit 7.0",
        'omni_ws_engine_up{engine="fake"} 0.0',
        'omni_ws_store_up{store="sqlite"} 0.0',
        "omni_ws_store_records 10.0",
        'omni_ws_requests_total{code="",finish_reason="stop",origin="http"} 6.0',
        'omni_ws_time_to_first_output_seconds_bucket{le="0.15",origin="http"} 0.0',
        'omni_ws_time_to_first_output_seconds_bucket{le="0.2",origin="http"} 6.0',
        'omni_ws_time_to_first_output_seconds_count{origin="http"} 6.0',
    ):
        assert f"{line}\n" in text
    assert text.count("# TYPE omni_ws_sessions_active gauge") == 1


def test_what_an_ended_worker_counted_stays_and_what_it_had_does_not() -> None:
    text = shown(summed([families(1, 2, 1), growing(families(3, 4, 0))]))
    assert "omni_ws_sessions_active 1.0\n" in text
    assert 'omni_ws_engine_up{engine="fake"} 1.0\n' in text
    assert 'omni_ws_requests_total{code="",finish_reason="stop",origin="http"} 6.0\n' in text


async def test_messages_and_connections_arrive_whole_and_in_order() -> None:
    """Far more than the socket holds at once, in both directions of time: large, small, with a file and without."""
    ours, theirs = socket.socketpair()
    found: list[WorkerMessage] = []
    complete, room, gone = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def received(message: WorkerMessage) -> None:
        found.append(message)
        if message.kind is MessageKind.READY:
            complete.set()

    sender = ProcessChannel(ours, received=lambda message: None, closed=lambda: None, on_room=room.set)
    receiver = ProcessChannel(theirs, received=received, closed=gone.set)
    names = []
    for number in range(300):
        descriptor = None
        if number % 3 == 0:
            descriptor, writing = os.pipe()
            os.write(writing, b"%d" % number)
            os.close(writing)
        names.append((number, descriptor is not None))
        sender.send(MessageKind.CONNECTION, number, b"x" * (number * 100), descriptor=descriptor)
    assert sender.waiting
    sender.send(MessageKind.READY)
    await complete.wait()
    await room.wait()
    assert [(one.number, one.descriptor is not None) for one in found[:-1]] == names
    for one in found[:-1]:
        assert len(one.payload) == one.number * 100
        if one.descriptor is not None:
            assert os.read(one.descriptor, 9) == b"%d" % one.number
            os.close(one.descriptor)
    sender.close()
    await gone.wait()
    receiver.close()


async def test_a_connection_for_which_no_descriptor_is_left_takes_no_other_ones() -> None:
    ours, theirs = socket.socketpair()
    found: list[WorkerMessage] = []
    both = asyncio.Event()

    def received(message: WorkerMessage) -> None:
        found.append(message)
        if len(found) == 2:
            both.set()

    sender = ProcessChannel(ours, received=lambda message: None, closed=lambda: None)
    receiver = ProcessChannel(theirs, received=received, closed=lambda: None)
    (first, written), (second, writing) = os.pipe(), os.pipe()
    os.write(writing, b"second")
    # More than many reads take, so that the end of the one and the beginning of the other may come together.
    sender.send(MessageKind.CONNECTION, 1, b"x" * 8_000_000, descriptor=first)
    sender.send(MessageKind.CONNECTION, 2, descriptor=second)
    with no_more_files():
        for _ in range(3):  # in which the first part is read
            await asyncio.sleep(0)
    await both.wait()
    assert [one.number for one in found] == [1, 2]
    assert found[0].descriptor is None
    assert found[1].descriptor is not None
    assert os.read(found[1].descriptor, 9) == b"second"
    for descriptor in (found[1].descriptor, writing, written):
        os.close(descriptor)
    sender.close()
    receiver.close()


async def test_a_connection_that_cannot_be_sent_is_closed() -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    gone = asyncio.Event()
    channel = ProcessChannel(ours, received=lambda message: None, closed=gone.set)
    for _ in range(2):  # the first finds out
        reading, writing = os.pipe()
        channel.send(MessageKind.CONNECTION, descriptor=writing)
        assert os.read(reading, 1) == b""
        os.close(reading)
    await gone.wait()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"engine": "fake", "ssl_certfile": Path("cert.pem")}, "terminate TLS in a proxy"),
        ({"engine": "fake", "telephony": {"audiosocket_port": 9092}}, "AudioSocket"),
        ({"engine": "fake", "wyoming": {"port": 10300}}, "Wyoming"),
        ({"engine": "fake", "wyoming": {"satellites": ("kitchen:10700",)}}, "Wyoming"),
        ({"engine": "vllm", "vllm": {"model": "m"}}, "--engine remote --remote.upstreams"),
        ({"llm": {"use": "vllm:m"}}, "--engine remote --remote.upstreams"),
    ],
)
def test_what_workers_cannot_share_is_refused(fields: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        check_available(ServerConfig(workers=2, **fields))  # type: ignore[arg-type]
    assert any(named in problem for problem in refused.value.problems)
    with pytest.raises(ValueError, match="workers"):
        ServerConfig(workers=0)
    with pytest.raises(ValueError, match="workers"):
        ServerConfig(workers=65)


@pytest.mark.real_time
@pytest.mark.parametrize("replica_id", ["", "a"])
async def test_what_a_worker_that_drains_still_serves(tmp_path: Path, replica_id: str) -> None:
    """It has what is open; the rest it leaves to others."""
    before = f"{replica_id}_" if replica_id else ""
    store = {"store": f"sqlite:{tmp_path / 'store' / 'sessions.db'}"}
    async with live_server(replica_id=replica_id, sessions=store) as server:
        async with native_client(server) as client, webrtc_call(server) as caller:
            native_id = client.created["session_id"].removeprefix(before)
            call_id = caller.location.rpartition("/rtc_")[2]
            assert server.app.serves(native_id)
            assert server.app.serves(call_id)
            made = await call(server.port, "POST", "/v1/streaming_input/sessions")
            mode_b = made.json()["session_id"].removeprefix(before)
            await server.until(lambda: not server.app.serves(mode_b))  # at rest it is in the store alone
        await server.until(lambda: not server.app.serves(native_id))
        await server.until(lambda: not server.app.serves(call_id))


class _FailingStarts(Supervisor):
    """Its starts fail, but for the last of ``starts``. After the first one, ``meanwhile`` happens."""

    def __init__(self, starts: int, meanwhile: Callable[[_FailingStarts], object]) -> None:
        super().__init__(ServerConfig(workers=2), ())
        self.left, self._meanwhile = starts, meanwhile
        self.dead, self.successor = (make_member(self._counts.take_row(serial)) for serial in (1, 3))
        self._seated[0] = self.dead

    async def _start_member(self, seat: int) -> Member:
        self.left -= 1
        if self.left:
            self._loop.call_soon(self._meanwhile, self)
            raise BlockingIOError("fork: no more processes")
        return self.successor


def make_member(row: WorkerRow) -> Member:
    start = WorkerStart(config=ServerConfig(), keys=(), serial=1, wanted=2, row=row.index, port=0)
    return Member(start, row, lambda member, message: None, on_room=lambda: None)


@pytest.mark.parametrize(
    ("meanwhile", "left"),
    [
        (lambda supervisor: None, 0),
        (lambda supervisor: supervisor._seated.update({0: supervisor.successor}), 2),
        (lambda supervisor: supervisor._stop.set(), 2),
    ],
    ids=["nothing", "a successor is seated", "the server stops"],
)
async def test_a_worker_that_cannot_be_started_is_tried_again_while_its_seat_is_free(
    monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[_FailingStarts], object], left: int
) -> None:
    monkeypatch.setattr("omni_ws.engine.child.MAX_BACKOFF_SEC", 0.001)
    supervisor = _FailingStarts(3, meanwhile)
    await supervisor._start_again(supervisor.dead)
    assert supervisor.left == left
    await supervisor._close()


async def test_a_worker_that_begins_to_listen_as_a_question_is_asked_learns_it_too() -> None:
    supervisor = _FailingStarts(1, lambda supervisor: None)
    asker, late = supervisor.dead, supervisor.successor
    supervisor._members += [asker, late]
    asker.listens()
    told: asyncio.Queue[WorkerMessage] = asyncio.Queue()
    ends: list[ProcessChannel] = []
    for member in (asker, late):
        ours, theirs = socket.socketpair()
        member.channel = ProcessChannel(ours, received=lambda message: None, closed=lambda: None)
        ends += [ProcessChannel(theirs, received=told.put_nowait, closed=lambda: None), member.channel]
    secret = (KNOW_SECRET, (time.time() + 60, "digest", "secret"))
    supervisor._receive(asker, WorkerMessage(MessageKind.QUESTION, 1, pickle.dumps(secret)))
    supervisor._receive(late, WorkerMessage(MessageKind.LISTENING))
    message = await asyncio.wait_for(told.get(), PATIENCE_SEC)
    assert (message.kind, pickle.loads(message.payload)) == (MessageKind.ASKED, secret)
    supervisor._receive(late, WorkerMessage(MessageKind.REPLY, message.number, pickle.dumps(None)))
    assert (await asyncio.wait_for(told.get(), PATIENCE_SEC)).kind is MessageKind.ANSWERS
    for end in ends:
        end.close()
    await supervisor._close()


class _Asked(Member):
    """Notes what it is asked and answered, in place of a process that is."""

    def __init__(self, row: WorkerRow) -> None:
        start = WorkerStart(config=ServerConfig(), keys=(), serial=row.serial, wanted=3, row=row.index, port=0)
        super().__init__(start, row, lambda member, message: None, on_room=lambda: None)
        self.channel = self  # type: ignore[assignment]
        self.sent: list[tuple[MessageKind, int, bytes]] = []

    def send(self, kind: MessageKind, number: int, payload: bytes) -> None:
        self.sent.append((kind, number, payload))


async def test_what_a_worker_counted_that_ends_while_others_answer_counts_once() -> None:
    with TemporaryFile() as file:
        counts = shared_counts(file, ServerConfig(), (), 3)
        asker, quick, slow = (_Asked(counts.take_row(serial)) for serial in (1, 2, 3))
        questions = Questions()
        payload = pickle.dumps((METRICS, families(0, 1, 1)))
        asking = asyncio.create_task(questions.ask(asker, 7, payload, [quick, slow]))
        await until(lambda: bool(quick.sent and slow.sent))
        questions.answered(quick.sent[0][1], pickle.dumps(families(0, 2, 1)))
        await until(lambda: bool(quick.counted))
        quick.ended.set()
        questions.ended(quick)
        questions.answered(slow.sent[0][1], pickle.dumps(families(0, 4, 1)))
        await asking
        ((kind, number, answers),) = asker.sent
        assert (kind, number) == (MessageKind.ANSWERS, 7)
        text = shown(summed(pickle.loads(answers)))
        assert 'omni_ws_requests_total{code="",finish_reason="stop",origin="http"} 6.0\n' in text


async def test_an_earlier_report_does_not_replace_the_last_metrics_of_a_worker() -> None:
    """Both are read at once, and the task that waits for the earlier one runs after that."""
    supervisor = Supervisor(ServerConfig(workers=2), ())
    asker, ending = _Asked(supervisor._counts.take_row(1)), _Asked(supervisor._counts.take_row(2))
    asking = asyncio.create_task(
        supervisor._questions.ask(asker, 7, pickle.dumps((METRICS, families(0, 1, 1))), [ending])
    )
    await until(lambda: bool(ending.sent))
    reply = WorkerMessage(MessageKind.REPLY, ending.sent[0][1], pickle.dumps(families(0, 2, 1)))
    last = WorkerMessage(MessageKind.LAST_METRICS, payload=pickle.dumps(families(0, 5, 1)))
    for message in (reply, last):
        supervisor._receive(ending, message)
    await asking
    assert ending.counted == growing(families(0, 5, 1))
    await supervisor._close()


async def test_a_worker_without_its_supervisor_waits_for_no_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "kill", lambda *signalled: None)
    ours, theirs = socket.socketpair()
    with TemporaryFile() as file:
        counts = shared_counts(file, ServerConfig(), (), 2)
        row = counts.take_row(1)
        start = WorkerStart(config=ServerConfig(), keys=(), serial=1, wanted=2, row=row.index, port=0)
        worker = Worker(start, counts, ours)
        asked = asyncio.create_task(worker.ask_others(METRICS))
        await asyncio.sleep(0)
        theirs.close()
        assert await asyncio.wait_for(asked, PATIENCE_SEC) == []
        assert await asyncio.wait_for(worker.ask_others(METRICS), PATIENCE_SEC) == []


async def test_a_worker_whose_seat_was_taken_while_it_started_ends_again(monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = _FailingStarts(1, lambda supervisor: None)
    started = make_member(supervisor.successor.row)
    signals: list[int] = []
    monkeypatch.setattr(started, "signal", signals.append)

    async def while_a_successor_is_seated(seat: int) -> Member:
        supervisor._seated[seat] = supervisor.successor
        return started

    monkeypatch.setattr(supervisor, "_start_member", while_a_successor_is_seated)
    await supervisor._start_again(supervisor.dead)
    assert supervisor._seated[0] is supervisor.successor
    assert (started.leaving, signals) == (True, [signal.SIGTERM])
    await supervisor._close()

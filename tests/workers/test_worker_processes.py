"""Two workers behind one port, as processes: what finds its worker, what is counted together, and who survives what."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from support.commands import WorkerServer, worker_server
from support.live_server import LiveServer
from support.native_client import NativeClient, RawWebSocket, native_client
from support.patience import PATIENCE_SEC
from support.raw_http import RawClient, RawResponse, raw_client, request, websocket_upgrade
from support.webrtc_client import webrtc_call
from websockets.exceptions import ConnectionClosed

from omni_ws.transport.http.connections import MAX_TURNED_AWAY
from omni_ws.workers.worker import _ID

pytestmark = [pytest.mark.slow, pytest.mark.real_time]

SESSIONS = "/v1/streaming_input/sessions"
CHAT = b'{"model": "local-model", "messages": [{"role": "user", "content": "hi"}]}'


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerServer]:
    """A server for the tests that leave its workers alone."""
    flags = ("--limits.max-sessions", "4", "--streaming-input.resume-grace-sec", "30")
    with worker_server(*flags, "--profiler.root", str(tmp_path_factory.mktemp("profiles"))) as server:
        yield server


@pytest.fixture(scope="module")
def changing() -> Iterator[WorkerServer]:
    """A server for the tests that end workers, each of which leaves it with two that are ready."""
    with worker_server("--fake.first-chunk-delay-ms", "50") as server:
        yield server
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE_SEC) == 0


@pytest.fixture(scope="module")
def hanging() -> Iterator[WorkerServer]:
    """A server for the tests that stop workers, each of which leaves it with two that are ready."""
    flags = ("--worker-hang-timeout-sec", "3", "--limits.max-connections", "20")
    with worker_server("--fake.first-chunk-delay-ms", "50", *flags) as server:
        yield server
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE_SEC) == 0


@pytest.fixture(scope="module")
def keyed() -> Iterator[WorkerServer]:
    """The same with a key."""
    with worker_server("--api-key", "the-key") as server:
        yield server


async def mode_b_session(client: RawClient) -> str:
    """Opens a session on the worker that serves this connection."""
    await client.send(request("POST", SESSIONS, body=b'{"chunks": [{"modality": "text", "text": "to be continued"}]}'))
    answer = await client.response()
    assert answer.status == 201
    session_id: str = answer.json()["session_id"]
    return session_id


async def delete(server: WorkerServer, *ids: str) -> None:
    for one in ids:
        async with raw_client(server.port) as client:
            await client.send(request("DELETE", f"{SESSIONS}/{one}", "Connection: close"))
            assert (await client.response()).status == 204


def worker_of(session_id: str) -> str:
    return session_id.partition("_")[0]


@asynccontextmanager
async def two_workers(server: WorkerServer) -> AsyncIterator[tuple[RawClient, RawClient, str, str]]:
    """A connection to each worker, and a session that was opened by each.

    A worker may still count connections that were closed just now, so that the other one gets several in a row.
    """
    async with AsyncExitStack() as stack:
        found: dict[str, tuple[RawClient, str]] = {}
        while len(found) < 2:
            client = await stack.enter_async_context(raw_client(server.port))
            session_id = await mode_b_session(client)
            if worker_of(session_id) in found:
                await delete(server, session_id)
            else:
                found[worker_of(session_id)] = client, session_id
        (first, one), (second, other) = found.values()
        assert {int(worker[1:]) % 2 for worker in found} == {0, 1}
        yield first, second, one, other


async def test_requests_of_a_session_find_its_worker_from_any_connection(shared: WorkerServer) -> None:
    async with two_workers(shared) as (first, second, one, other):
        # The connection goes to the other worker with the request, and back with the next one, body and all.
        for wanted in (other, one, other):
            body = b'{"chunks": [{"modality": "text", "text": " and on"}]}'
            await first.send(request("PATCH", f"{SESSIONS}/{wanted}", body=body))
            answer = await first.response()
            assert (answer.status, answer.json()["session_id"]) == (202, wanted)
        # Pipelined behind a request for this worker, and in two pieces.
        whole = request("GET", f"{SESSIONS}/{one}") + request("GET", f"{SESSIONS}/{other}")
        await second.send(whole[:-20])
        assert (await second.response()).json()["session_id"] == one
        await second.send(whole[-20:])
        assert (await second.response()).json()["session_id"] == other
        await delete(shared, one, other)


async def test_a_session_of_no_worker_is_not_found(shared: WorkerServer) -> None:
    for worker in ("w1", "w2", "w9", "w999999999"):
        answer = await shared.get(f"{SESSIONS}/{worker}_sess_{'0' * 24}")
        assert (answer.status, answer.json()["error"]["code"]) == (404, "session_not_found")


async def test_a_websocket_resumes_through_the_other_worker(shared: WorkerServer) -> None:
    async with two_workers(shared) as (first, second, *ids):
        async with native_client(shared) as client:
            await client.say("before")
            assert (await client.answer()).text == "before"
            created = client.created
            client.connection.transport.abort()
        wrong = first if worker_of(ids[0]) != worker_of(created["session_id"]) else second
        query = f"?session_id={created['session_id']}&resume_token={created['resume_token']}"
        await wrong.send(websocket_upgrade(f"/v1/streaming_input{query}"))
        assert (await wrong.head())[1] == 101
        resumed = await RawWebSocket(wrong).until("session_resumed")
        assert resumed["session_id"] == created["session_id"]
        await delete(shared, *ids)
        wrong.reset()
    async with native_client(shared, query=query, greeted=False) as late:
        # The token is good until the server hears from the client, and ends with its connection.
        assert (await late.receive())["type"] == "session_resumed"


async def test_a_sideband_finds_the_worker_of_its_call(shared: WorkerServer) -> None:
    async with two_workers(shared) as (first, second, *ids):
        async with webrtc_call(cast("LiveServer", shared)) as caller:
            call_id = caller.location.rpartition("/")[2]
            for client in (first, second):
                await client.send(websocket_upgrade(f"/v1/realtime?call_id={call_id}"))
                assert (await client.head())[1] == 101
                created = await RawWebSocket(client).until("session.created")
                assert created["session"]["id"] == caller.received[0]["session"]["id"]
        await delete(shared, *ids)


def test_the_ids_of_sessions_name_their_worker() -> None:
    for prefix in ("w2_sess_", "w2_live_", "rtc_w2_"):
        found = _ID.search(f"/v1/some/path/{prefix}{24 * 'a'}/attach?x=1".encode())
        assert found is not None
        assert found[1] == b"2"


async def test_a_profile_is_that_of_all_workers(shared: WorkerServer) -> None:
    async with two_workers(shared) as (first, second, *ids):
        await first.send(request("POST", "/start_request_profile", body=b'{"run_id": "both"}'))
        started = (await first.response()).json()
        assert len(set(started["event_files"])) == 2
        await second.send(request("POST", "/stop_profile", body=b'{"run_id": "both"}'))
        stopped = (await second.response()).json()
        assert (stopped["stopped"], sorted(stopped["event_files"])) == (True, sorted(started["event_files"]))
        await second.send(request("POST", "/stop_profile", body=b'{"run_id": "both"}'))
        assert (await second.response()).json()["stopped"] is False
        await delete(shared, *ids)


async def test_the_limit_of_sessions_is_that_of_the_server(shared: WorkerServer) -> None:
    async with two_workers(shared) as (first, second, *ids):
        ids += [await mode_b_session(one) for one in (first, second)]
        assert (await shared.get("/health")).json()["sessions"] == 4
        for client in (first, second):
            await client.send(request("POST", SESSIONS, body=b"{}"))
            answer = await client.response()
            assert (answer.status, answer.json()["error"]["code"]) == (503, "engine_overloaded")
        await delete(shared, ids.pop())
        ids.append(await mode_b_session(first))
        await delete(shared, *ids)
    assert (await shared.get("/health")).json()["sessions"] == 0


async def samples(server: WorkerServer) -> dict[str, float]:
    text = (await server.get("/metrics")).body.decode()
    return {name: float(value) for name, value in re.findall(r"(?m)^(\w+(?:\{.*\})?) (\S+)$", text)}


async def test_the_metrics_are_those_of_all_workers(shared: WorkerServer) -> None:
    opened = 'omni_ws_sessions_opened_total{origin="sessions"}'
    before = await samples(shared)
    async with two_workers(shared) as (_, _, *ids):
        after = await samples(shared)
        assert after[opened] - before.get(opened, 0) >= 2
        assert (after["omni_ws_sessions_active"], after["omni_ws_sessions_limit"]) == (2, 4)
        assert after['omni_ws_engine_up{engine="fake"}'] == 1
        await delete(shared, *ids)


async def says(client: NativeClient, text: str) -> str:
    await client.say(text)
    return (await client.answer()).text


async def test_a_worker_that_is_killed_takes_its_own_sessions_only_and_comes_back(changing: WorkerServer) -> None:
    async with AsyncExitStack() as clients:
        sides: dict[str, NativeClient] = {}
        while len(sides) < 2:
            client = await clients.enter_async_context(native_client(changing))
            sides[worker_of(client.created["session_id"])] = client
        (killed, dead), (_, alive) = sides.items()
        ended = 'omni_ws_requests_total{code="",finish_reason="stop",origin="websocket"}'
        before = (await samples(changing)).get(ended, 0)
        assert [await says(one, "one two") for one in (dead, alive)] == ["one two"] * 2
        assert (await samples(changing))[ended] == before + 2
        successor = f"w{int(killed[1:]) + 2}"
        os.kill(changing.pid_of(killed), signal.SIGKILL)
        with pytest.raises(ConnectionClosed):
            await dead.receive()
        assert await says(alive, "three") == "three"
        query = f"?session_id={dead.created['session_id']}&resume_token={dead.created['resume_token']}"
        async with native_client(changing, query=query, greeted=False) as gone:
            assert (await gone.error())["code"] == "session_not_found"
        await changing.logged(rf"started worker {successor} ")
        await changing.logged(rf"worker {successor} is ready")
        assert (await changing.get("/health")).json()["workers"] == {"ready": 2, "wanted": 2}
        async with AsyncExitStack() as stack:  # the new worker is as good as the other one
            more = [await stack.enter_async_context(native_client(changing)) for _ in range(3)]
            assert successor in {worker_of(one.created["session_id"]) for one in more}
            assert [await says(one, "four") for one in more] == ["four"] * 3
        assert (await samples(changing))[ended] == before + 6
        assert await says(alive, "five") == "five"


async def test_a_connection_that_a_killed_worker_had_not_taken_goes_to_the_other(changing: WorkerServer) -> None:
    async with AsyncExitStack() as clients:
        killed = max(changing.workers)
        os.kill(changing.pid_of(f"w{killed}"), signal.SIGSTOP)
        asked = [await clients.enter_async_context(raw_client(changing.port)) for _ in range(6)]
        for client in asked:
            await client.send(request("GET", "/health"))
        answers = [asyncio.create_task(client.response()) for client in asked]
        await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
        assert not all(one.done() for one in answers), "the stopped worker was given none"
        os.kill(changing.pid_of(f"w{killed}"), signal.SIGKILL)
        assert [(await one).status for one in answers] == [200] * 6
        await changing.logged(rf"worker w{killed + 2} is ready")


class Talker:
    """A client that says one word after the other, and says a word again only where the server refused it."""

    def __init__(self, server: WorkerServer, name: str) -> None:
        self.server = server
        self.name = name
        self.said = 0
        self.workers: set[str] = set()
        self.stop = False
        self.closes: list[int | None] = []

    async def talk(self) -> None:
        while not self.stop:
            async with native_client(self.server) as client:
                self.workers.add(worker_of(client.created["session_id"]))
                await self._session(client)

    async def _session(self, client: NativeClient) -> None:
        while not self.stop:
            word = f"{self.name}{self.said}"
            try:
                await client.say(word)
                answer = await client.answer()
            except ConnectionClosed as closed:
                self.closes.append(None if closed.rcvd is None else closed.rcvd.code)
                return
            if answer.errors:
                assert {error["code"] for error in answer.errors} == {"shutting_down"}
                assert answer.text == ""
                return
            assert answer.text == word, "a word was lost"
            self.said += 1


async def test_a_rolling_restart_under_load_loses_no_word(changing: WorkerServer) -> None:
    before, logged = changing.workers, len(changing.said)
    talkers = [Talker(changing, name) for name in "abcdef"]
    tasks = [asyncio.create_task(one.talk()) for one in talkers]
    for worker in before:  # as where all processes of the service get it
        os.kill(changing.pid_of(f"w{worker}"), signal.SIGHUP)
    changing.process.send_signal(signal.SIGHUP)
    await changing.logged("all workers have been replaced")
    for one in talkers:
        one.stop = True
    await asyncio.gather(*tasks)
    assert all(one.said for one in talkers)
    seen = {int(worker.removeprefix("w")) for one in talkers for worker in one.workers}
    assert seen & before
    assert seen & {worker + 2 for worker in before}
    assert {code for one in talkers for code in one.closes} <= {1012}
    assert not re.search(r"Traceback|ERROR", changing.said[logged:])
    answer = await changing.get("/health")
    assert (answer.status, json.loads(answer.body)["workers"]) == (200, {"ready": 2, "wanted": 2})


async def test_a_kept_session_goes_on_elsewhere_while_its_worker_drains(tmp_path: Path) -> None:
    """The worker has an answer to finish, for as long as that takes, and has given the session to the store."""
    store = ("--sessions.store", f"sqlite:{tmp_path / 'store' / 'sessions.db'}")
    slow = ("--fake.first-chunk-delay-ms", str(round(1000 * PATIENCE_SEC)), "--drain-timeout-sec", str(PATIENCE_SEC))
    with worker_server(*store, *slow) as server:
        async with two_workers(server) as (first, second, one, other), AsyncExitStack() as stack:
            busy = first if worker_of(one) == "w1" else second  # the one that is replaced first
            await busy.send(request("POST", "/v1/chat/completions", body=CHAT))
            client = await stack.enter_async_context(native_client(server))
            while worker_of(client.created["session_id"]) != "w1":
                client = await stack.enter_async_context(native_client(server))
            server.process.send_signal(signal.SIGHUP)
            while (told := await client.receive())["type"] != "session_closing":
                pass
            assert told["resume"] == "now"
            query = f"?session_id={client.created['session_id']}&resume_token={client.created['resume_token']}"
            async with native_client(server, query=query, greeted=False) as again:
                assert (await again.receive())["type"] == "session_resumed"
            mode_b = one if worker_of(one) == "w1" else other
            assert (await server.get(f"{SESSIONS}/{mode_b}")).status == 200
            assert 1 in server.workers, "it was done with its answer"
            busy.reset()


async def secret_of(server: WorkerServer) -> str:
    async with raw_client(server.port) as maker:
        key = "Authorization: Bearer the-key"
        await maker.send(request("POST", "/v1/realtime/client_secrets", key, body=b"{}"))
        secret: str = (await maker.response()).json()["value"]
    return secret


async def check_secrets(server: WorkerServer, *secrets: tuple[str, int]) -> None:
    """Each is answered with its status, on connections that are open together, so that each worker gets some."""
    async with AsyncExitStack() as stack:
        for value, status in secrets:
            user = await stack.enter_async_context(raw_client(server.port))
            bearer = f"Authorization: Bearer {value}"
            await user.send(websocket_upgrade("/v1/realtime?model=local-model", bearer))
            assert (await user.head())[1] == status


async def test_a_client_secret_is_good_at_every_worker(keyed: WorkerServer) -> None:
    secret = await secret_of(keyed)
    await check_secrets(keyed, (secret, 101), (secret, 101), (secret, 101), (f"{secret}0", 401))


async def test_a_worker_that_was_starting_knows_a_client_secret_too(keyed: WorkerServer) -> None:
    killed = max(keyed.workers)
    os.kill(keyed.pid_of(f"w{killed}"), signal.SIGKILL)
    await keyed.logged(rf"started worker w{killed + 2} ")
    os.kill(keyed.pid_of(f"w{killed + 2}"), signal.SIGSTOP)
    secret = await secret_of(keyed)
    os.kill(keyed.pid_of(f"w{killed + 2}"), signal.SIGCONT)
    await keyed.logged(rf"worker w{killed + 2} is ready")
    await check_secrets(keyed, *[(secret, 101)] * 4)


async def test_a_spoken_answer_is_known_to_every_worker(keyed: WorkerServer) -> None:
    key = "Authorization: Bearer the-key"

    async def ask(client: RawClient, *messages: dict[str, Any], **body: Any) -> RawResponse:
        body = {"messages": messages, "modalities": ["text", "audio"], "audio": {"format": "wav"}, **body}
        await client.send(request("POST", "/v1/chat/completions", key, body=json.dumps(body).encode()))
        return await client.response()

    hello = {"role": "user", "content": "hello"}
    async with AsyncExitStack() as stack:  # connections that are open together, so that each worker gets some
        clients = [await stack.enter_async_context(raw_client(keyed.port)) for _ in range(6)]
        audio_id = (await ask(clients[0], hello)).json()["choices"][0]["message"]["audio"]["id"]
        for client in clients:
            answer = await ask(client, hello, {"role": "assistant", "audio": {"id": audio_id}}, hello)
            assert answer.status == 200, answer.body
        unknown = await ask(clients[0], {"role": "assistant", "audio": {"id": f"{audio_id}0"}}, hello)
        assert (unknown.status, unknown.error["param"]) == (400, "messages[0].audio.id")


# workers that hang


async def health(server: WorkerServer) -> dict[str, Any]:
    """What the server says, by the worker that is not stopped, whichever gets the connection first."""
    patience = 0.5
    async with asyncio.timeout(PATIENCE_SEC):
        while True:
            async with raw_client(server.port) as client:
                await client.send(request("GET", "/health"))
                with contextlib.suppress(TimeoutError, ConnectionError, asyncio.IncompleteReadError):
                    async with asyncio.timeout(patience):
                        answer = await client.response()
                        if answer.status == 200:  # and the connection is not one too many
                            found: dict[str, Any] = answer.json()
                            return found
            patience += 0.1  # a busy machine needs longer
            await asyncio.sleep(0.05)


async def until_replaced(server: WorkerServer, pid: int) -> None:
    await server.logged(rf"process {pid}\) has ended with signal 9")
    while (found := await health(server))["workers"]["ready"] < 2 or "hung" in found["workers"]:  # noqa: ASYNC110 - no event
        await asyncio.sleep(0.05)
    assert found["status"] == "ok"


async def test_a_worker_that_hangs_is_told_and_replaced(hanging: WorkerServer) -> None:
    """With the sessions that it has, as after a crash; what others count does not wait for it."""
    async with two_workers(hanging) as (first, second, one, other):
        await delete(hanging, other)
        serial = int(worker_of(one)[1:])
        pid = hanging.pid_of(worker_of(one))
        os.kill(pid, signal.SIGSTOP)
        while (found := await health(hanging))["status"] != "degraded":  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.05)
        assert found["workers"] == {"ready": 1, "wanted": 2, "hung": [serial]}
        await delete(hanging, await mode_b_session(second))
        await until_replaced(hanging, pid)
        assert await first.rest() == b""
        answer = await hanging.get(f"{SESSIONS}/{one}")
        assert (answer.status, answer.json()["error"]["code"]) == (404, "session_not_found")


async def test_connections_for_a_worker_that_hangs_are_bounded(hanging: WorkerServer) -> None:
    """Passed on by the other worker, and never taken: they count where they are."""
    async with two_workers(hanging) as (_, second, one, other):
        await delete(hanging, other)
        pid = hanging.pid_of(worker_of(one))
        os.kill(pid, signal.SIGSTOP)
        before = len(os.listdir(f"/proc/{hanging.process.pid}/fd"))
        async with AsyncExitStack() as stack:
            for _ in range(150):
                client = await stack.enter_async_context(raw_client(hanging.port))
                with contextlib.suppress(ConnectionError):
                    await client.send(request("GET", f"{SESSIONS}/{one}"))
            more = await mode_b_session(second)  # which goes on meanwhile
            assert len(os.listdir(f"/proc/{hanging.process.pid}/fd")) <= before + 20 + MAX_TURNED_AWAY
        await until_replaced(hanging, pid)
        await delete(hanging, more)


async def test_a_worker_that_hangs_as_it_starts_is_replaced(hanging: WorkerServer) -> None:
    async with two_workers(hanging) as (_, _, one, other):
        pid = hanging.pid_of(worker_of(one))
        os.kill(pid, signal.SIGKILL)
        successor = f"w{int(worker_of(one)[1:]) + 2}"
        await hanging.logged(f"started worker {successor} ")
        starting = hanging.pid_of(successor)
        os.kill(starting, signal.SIGSTOP)
        await until_replaced(hanging, starting)
        await delete(hanging, other)

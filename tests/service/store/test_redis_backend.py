"""The store on a server: when it is killed, full, paused, or wants a password; on a cluster, and behind sentinels."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.fake_store import kept_by
from support.patience import until
from support.redis_server import redis_server

from benchmarks.server_process import free_port
from omni_ws.config.values import ConfigurationError, StoreAddress
from omni_ws.service.store.records import Change, ChangeOutcome, ClearPart, StoreEnd, StoreError
from omni_ws.service.store.redis_backend import RedisBackend
from omni_ws.service.store.session_store import Lease, SessionStore

CLEAR = ClearPart("1", "native", "anna", (), False)


def snapshot(session_id: str, data: bytes, *, holder: str = "", serial: int = 1, end: StoreEnd | None = None) -> Change:
    return Change(session_id, 1, holder, serial, CLEAR, data, None, 0, end)


@asynccontextmanager
async def opened(url: str, *, max_age_sec: float = 60) -> AsyncIterator[RedisBackend]:
    backend = RedisBackend(StoreAddress.parse(url), max_age_sec=max_age_sec)
    await backend.open()
    try:
        yield backend
    finally:
        await backend.close()


@asynccontextmanager
async def started(url: str) -> AsyncIterator[SessionStore]:
    store = kept_by(RedisBackend(StoreAddress.parse(url), max_age_sec=60))
    await store.start()
    try:
        yield store
    finally:
        await store.stop()


class Holder:
    """A session that writes a snapshot whenever it is asked."""

    def __init__(self, store: SessionStore, lease: Lease) -> None:
        self.store, self.lease = store, lease
        self.told: list[str] = []
        lease.holder = self
        self.snapshot()

    def lease_lost(self, *, deleted: bool) -> None:
        self.told.append("deleted" if deleted else "lost")

    def store_degraded(self) -> None:
        self.told.append("degraded")

    def store_wants_snapshot(self) -> None:
        self.told.append("wanted")
        self.snapshot()

    def snapshot(self) -> None:
        self.store.snapshot(self.lease, b"state", tokens=(), away=False)


async def kept(store: SessionStore, session_id: str = "sess_1") -> Holder:
    holder = Holder(store, store.begin(session_id, kind="native", owner="anna"))
    await store.settle(holder.lease)
    return holder


async def test_a_server_that_is_killed_has_what_was_settled(tmp_path: Path) -> None:
    """With its append-only file on. Sessions are told, and kept again once it is back."""
    async with redis_server(tmp_path) as server, started(server.url) as store:
        holder = await kept(store)
        for number in range(50):
            store.append(holder.lease, b"%d" % number)
            await store.settle(holder.lease)
        await server.kill()
        store.append(holder.lease, b"not kept")
        await store.settle(holder.lease)
        assert (store.degraded, store.reason, holder.told) == (True, "gone", ["degraded"])
        with pytest.raises(StoreError):
            await store.peek("sess_1")
        await server.start()
        async with opened(server.url) as other:
            contents = await other.read("sess_1")
            assert contents is not None
            assert len(contents.log) == 50 or contents.log == ()  # before or behind the snapshot that mends it
        await until(lambda: not store.degraded)
        await until(lambda: holder.lease.whole)
        await store.settle(holder.lease)
        assert await store.read("sess_1") == (b"state", ())


async def test_a_restart_between_two_commits_goes_unnoticed(tmp_path: Path) -> None:
    """The connection is opened anew, and the scripts are loaded anew."""
    async with redis_server(tmp_path) as server, started(server.url) as store:
        holder = await kept(store)
        other = await kept(store, "sess_2")
        await server.kill()
        await server.start()
        for one in (holder, other):
            store.append(one.lease, b"a")
        await asyncio.gather(store.settle(holder.lease), store.settle(other.lease))
        if not store.degraded:  # the heartbeat may have met the server while it was gone
            assert await store.read("sess_1") == (b"state", (b"a",))
            assert (await store.peek("sess_2")) is not None


async def test_scripts_are_loaded_again_where_the_server_forgot_them(tmp_path: Path) -> None:
    async with redis_server(tmp_path) as server, opened(server.url) as backend:
        await backend.commit([snapshot("sess_1", b"x")])
        for _ in range(2):
            assert await server.ask("SCRIPT", "FLUSH") == b"+OK"
            assert await backend.find("sess_1") is not None
            assert await server.ask("SCRIPT", "FLUSH") == b"+OK"
            outcomes = await backend.commit([snapshot("sess_1", b"x", serial=2), snapshot("sess_2", b"x")])
            assert [*outcomes] == [ChangeOutcome.KEPT] * 2


async def test_a_server_that_lost_its_data_is_mended_by_snapshots(tmp_path: Path) -> None:
    async with redis_server(tmp_path) as server, started(server.url) as store:
        holder = await kept(store)
        assert await server.ask("FLUSHALL") == b"+OK"
        store.append(holder.lease, b"a")
        await store.settle(holder.lease)
        assert holder.told == ["wanted"]
        assert await store.read("sess_1") == (b"state", ())


async def test_a_paused_server_makes_the_store_slow(tmp_path: Path) -> None:
    async with redis_server(tmp_path) as server, started(server.url) as store:
        holder = await kept(store)
        server.signal(signal.SIGSTOP)
        store.append(holder.lease, b"a")
        await store.settle(holder.lease)
        assert (store.degraded, store.reason) == (True, "slow")
        server.signal(signal.SIGCONT)
        await until(lambda: not store.degraded)
        await until(lambda: holder.lease.whole)


async def test_a_server_without_memory_is_full_and_records_stay_whole(tmp_path: Path) -> None:
    async with redis_server(tmp_path, "--maxmemory-policy", "noeviction") as server, opened(server.url) as backend:
        element = Change("sess_1", 1, "", 1, None, None, b"a", 0, None)
        await backend.commit([snapshot("sess_1", b"whole"), element])
        assert await server.ask("CONFIG", "SET", "maxmemory", "1") == b"+OK"
        refused = (
            backend.commit([snapshot("sess_1", b"newer", serial=2)]),
            backend.commit([Change("sess_1", 1, "", 1, None, None, b"b", 1, None)]),
            backend.commit([snapshot("sess_2", b"x"), snapshot("sess_3", b"x")]),
            backend.take("sess_1", fence=1, holder="b"),
            backend.probe(),
        )
        for call in refused:
            with pytest.raises(StoreError) as raised:
                await call
            assert raised.value.reason == "full"
        contents = await backend.read("sess_1")
        assert contents is not None
        assert (contents.snapshot, contents.log) == (b"whole", (b"a",))
        # Deleting needs no memory.
        assert await backend.erase("sess_1")
        assert await server.ask("CONFIG", "SET", "maxmemory", "0") == b"+OK"
        assert [*await backend.commit([snapshot("sess_1", b"x", serial=9)])] == [ChangeOutcome.DELETED]


async def test_records_and_tombstones_expire(tmp_path: Path) -> None:
    async with redis_server(tmp_path) as server, opened(server.url, max_age_sec=0.05) as backend:
        await backend.commit([snapshot("sess_1", b"x"), Change("sess_1", 1, "", 1, None, None, b"a", 0, None)])
        for key in ("omni_ws:{sess_1}:record", "omni_ws:{sess_1}:log"):
            while await server.ask("EXISTS", key) == b":1":
                assert int((await server.ask("PTTL", key))[1:]) >= 0 or await server.ask("EXISTS", key) == b":0"
        await backend.commit([snapshot("sess_2", b"x", end=StoreEnd.DELETE)])
        left = int((await server.ask("PTTL", "omni_ws:{sess_2}:record"))[1:])
        assert 3_500_000 < left <= 3_600_000


async def test_pruning_leaves_the_living_and_what_is_of_others(tmp_path: Path) -> None:
    async with redis_server(tmp_path) as server, opened(server.url) as backend:
        assert await server.ask("SET", "omni_ws_is_not_the_prefix", "x") == b"+OK"
        await backend.beat("living")
        await backend.commit([snapshot("alive", bytes(10_000), holder="living")])
        for number in range(0, 1200, 100):
            few = range(number, number + 100)
            await backend.commit([snapshot(f"sess_{one}", bytes(1000), holder="dead") for one in few])
        size = await backend.prune(max_age_sec=60, max_bytes=1 << 40)
        assert size.records == 1201
        assert 1_210_000 < size.bytes < 1_300_000
        # Once a minute for all processes: another one is told what that found.
        async with opened(server.url) as other:
            assert await other.prune(max_age_sec=60, max_bytes=0) == size
        assert await server.ask("DEL", "omni_ws:pruning") == b":1"
        size = await backend.prune(max_age_sec=60, max_bytes=100_000)
        assert size.bytes <= 90_000
        assert await backend.find("alive") is not None
        assert (await server.ask("EXISTS", "omni_ws_is_not_the_prefix")) == b":1"


async def test_a_password_is_asked_for_and_never_shown(tmp_path: Path) -> None:
    async with redis_server(tmp_path, "--requirepass", "s3cret") as server:
        with_password = server.url.replace("//", "//:s3cret@")
        async with opened(with_password) as backend:
            assert "s3cret" not in backend.name
            await backend.commit([snapshot("sess_1", b"x")])
        for wrong in (server.url, server.url.replace("//", "//:wr0ng@")):
            store = kept_by(RedisBackend(StoreAddress.parse(wrong), max_age_sec=60))
            with pytest.raises(ConfigurationError, match="the server refuses user or password") as raised:
                await store.start()
            assert "wr0ng" not in str(raised.value)


async def test_records_of_a_cluster_are_changed_together(tmp_path: Path) -> None:
    """Of one server, which has all slots."""
    async with redis_server(tmp_path, "--cluster-enabled", "yes", "--cluster-port", str(free_port())) as server:
        assert await server.ask("CLUSTER", "ADDSLOTSRANGE", "0", "16383") == b"+OK"
        while await server.ask("SET", "probe", "x") != b"+OK":  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.01)
        async with opened(f"valkey://127.0.0.1:{server.port}?cluster=1") as backend:
            await backend.beat("a")
            changes = [snapshot(f"sess_{number}", b"%d" % number, holder="a") for number in range(20)]
            assert [*await backend.commit(changes)] == [ChangeOutcome.KEPT] * 20
            assert await server.ask("SCRIPT", "FLUSH") == b"+OK"
            more = [Change(f"sess_{n}", 1, "a", 1, None, None, b"x", n % 2, None) for n in range(20)]
            assert [*await backend.commit(more)] == [ChangeOutcome.KEPT, ChangeOutcome.GAP] * 10
            found = await backend.find("sess_3")
            assert found is not None
            assert found.held
            contents = await backend.take("sess_4", fence=1, holder="b")
            assert contents is not None
            assert (contents.snapshot, contents.log) == (b"4", (b"x",))
            assert (await backend.prune(max_age_sec=60, max_bytes=1 << 40)).records == 20
            await backend.probe()
            await backend.leave("a")


async def test_sentinels_name_the_server(tmp_path: Path) -> None:
    async with redis_server(tmp_path) as server:
        configuration = tmp_path / "sentinel.conf"
        configuration.write_text(f"sentinel monitor talks 127.0.0.1 {server.port} 1\n")
        (tmp_path / "sentinel").mkdir()
        async with (
            redis_server(tmp_path / "sentinel", "--sentinel", configuration=configuration) as sentinel,
            opened(f"redis://127.0.0.1:{sentinel.port}/0?sentinel=talks") as backend,
        ):
            await backend.commit([snapshot("sess_1", b"x")])
            assert await server.ask("EXISTS", "omni_ws:{sess_1}:record") == b":1"


async def test_a_record_of_unknown_form_is_as_if_absent(tmp_path: Path) -> None:
    async with redis_server(tmp_path) as server, opened(server.url) as backend:
        await backend.commit([snapshot("sess_1", b"one"), snapshot("sess_2", b"two")])
        await backend._client.hset("omni_ws:{sess_1}:record", "clear", b"\xc0")
        assert await backend.find("sess_1") is None
        assert await backend.find("sess_2") is not None

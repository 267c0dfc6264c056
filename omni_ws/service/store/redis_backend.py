"""The store of sessions on a Redis or Valkey server, for many machines; also on a cluster, or behind sentinels.

A record is a hash, and beside it a list, the log. Both have the session's id as their hash tag, so a cluster keeps them
together. A script does every step that compares and then changes. The server's own expiry deletes old records. Only
keys that begin with ``omni_ws:`` are touched. To measure and limit the size, one of the processes goes through all keys
once a minute.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    RedisClusterException,
    RedisError,
)

from omni_ws.config.values import ConfigurationError, StoreAddress
from omni_ws.service.store.records import (
    FULL,
    GONE,
    HOLDER_EXPIRY_SEC,
    TOMBSTONE_SEC,
    Change,
    ChangeOutcome,
    ClearPart,
    Contents,
    FoundRecord,
    StoreError,
    StoreSize,
    read_clear,
    write_clear,
)

_PREFIX: Final = "omni_ws:"
_PRUNING: Final = f"{_PREFIX}pruning"
_SIZE: Final = f"{_PREFIX}size"
#: Time for one command, and for a connection.
_TIMEOUT_SEC: Final = 2.0
#: Between two prunings by any process; less than each process waits between two.
_PRUNED_EVERY_SEC: Final = 50.0
_SCANNED_TOGETHER: Final = 500
_PROBE_BYTES: Final = 64 << 10
#: What pruning leaves of ``max_bytes`` when there is more.
_ROOM: Final = 0.9

# A server without memory refuses the first command that needs some, if nothing was written before: so each script
# begins with one.

#: ARGV: fence, serial, place, holder, clear, snapshot, element, end, away, expiry and expiry of a tombstone (ms).
_COMMIT: Final = """
local record, log = KEYS[1], KEYS[2]
local fence, serial = tonumber(ARGV[1]), tonumber(ARGV[2])
local clear, snapshot, element, last = ARGV[5], ARGV[6], ARGV[7], ARGV[8]
local held = redis.call('HMGET', record, 'fence', 'serial', 'gone', 'away')
local before = tonumber(held[1] or '0')
if before > fence then
  if held[3] == '1' then return 3 end
  return 1
end
if clear ~= '' then
  if before == fence and tonumber(held[2]) >= serial then return 0 end
  local now = redis.call('TIME')[1]
  local away = ''
  if ARGV[9] == '1' then
    away = now
    if held[4] and held[4] ~= '' then away = held[4] end
  end
  redis.call('HSET', record, 'fence', ARGV[1], 'serial', ARGV[2], 'holder', ARGV[4], 'clear', clear,
    'snapshot', snapshot, 'away', away, 'changed', now, 'size', #clear + #snapshot, 'gone', '0')
  redis.call('DEL', log)
  redis.call('PEXPIRE', record, ARGV[10])
elseif element ~= '' then
  if held[3] ~= '0' or before ~= fence or tonumber(held[2]) ~= serial then return 2 end
  if redis.call('LLEN', log) ~= tonumber(ARGV[3]) then return 2 end
end
if element ~= '' then
  if redis.call('RPUSH', log, element) == 1 then redis.call('PEXPIRE', log, ARGV[10]) end
  redis.call('HINCRBY', record, 'size', #element)
end
if last == 'delete' and redis.call('EXISTS', record) == 1 then
  redis.call('DEL', record, log)
  redis.call('HSET', record, 'fence', ARGV[1], 'serial', ARGV[2], 'gone', '1')
  redis.call('PEXPIRE', record, ARGV[11])
elseif last == 'release' and before == fence then
  redis.call('HSET', record, 'holder', '')
end
return 0
"""
_FIND: Final = """
local held = redis.call('HMGET', KEYS[1], 'clear', 'fence', 'holder', 'away', 'gone')
held[6] = redis.call('TIME')[1]
return held
"""
#: ARGV: fence, holder, clear.
_TAKE: Final = """
local held = redis.call('HMGET', KEYS[1], 'fence', 'gone', 'clear')
if held[1] ~= ARGV[1] or held[2] ~= '0' then return false end
if ARGV[3] ~= '' and held[3] ~= ARGV[3] then return false end
redis.call('HINCRBY', KEYS[1], 'fence', 1)
redis.call('HSET', KEYS[1], 'serial', '0', 'holder', ARGV[2])
return {redis.call('HGET', KEYS[1], 'snapshot'), redis.call('LRANGE', KEYS[2], 0, -1)}
"""
_READ: Final = """
local held = redis.call('HMGET', KEYS[1], 'snapshot', 'gone')
if held[2] ~= '0' then return false end
return {held[1], redis.call('LRANGE', KEYS[2], 0, -1)}
"""
#: ARGV: expiry of the tombstone (ms). Returns who had the record.
_ERASE: Final = """
local held = redis.call('HMGET', KEYS[1], 'fence', 'gone', 'holder')
if held[2] ~= '0' then return false end
redis.call('DEL', KEYS[1], KEYS[2])
redis.call('HSET', KEYS[1], 'fence', tonumber(held[1]) + 1, 'serial', '0', 'gone', '1')
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return held[3]
"""
#: ARGV: the fence number that was seen.
_DROP: Final = """
if redis.call('HGET', KEYS[1], 'fence') ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1], KEYS[2])
"""

#: How long a process that sleeps may still be told which of its records were deleted, and how many at a time.
_UNTOLD_MS: Final = 60_000
_TOLD_TOGETHER: Final = 1000


class RedisBackend:
    """A store on a Redis or Valkey server; see the module docstring."""

    def __init__(self, address: StoreAddress, *, max_age_sec: float) -> None:
        self.name = "redis"
        self._address = address
        self._expiry_ms = round(max_age_sec * 1000)
        self._client: Any = None
        #: The digests of the scripts, as the server knows them.
        self._scripts: dict[str, str] = {}

    # StoreBackend

    async def open(self) -> None:
        if self._client is None:
            self._client = _client(self._address)
        async with _mapped():
            try:
                if self._address.cluster:
                    await self._client.initialize()
                for script in (_COMMIT, _FIND, _TAKE, _READ, _ERASE, _DROP):
                    await self._load(script)
            except (AuthenticationError, AuthorizationError, NoPermissionError) as error:
                raise ConfigurationError([f"sessions.store: the server refuses user or password: {error}"]) from None

    async def close(self) -> None:
        if self._client is not None:
            async with _mapped():
                await self._client.aclose()
                if self._address.sentinel is not None:
                    for sentinel in self._client.connection_pool.sentinel_manager.sentinels:
                        await sentinel.aclose()

    async def commit(self, changes: Sequence[Change]) -> Sequence[ChangeOutcome]:
        async with _mapped():
            results = await self._run_together([self._commit_arguments(change) for change in changes])
        return [*map(ChangeOutcome, results)]

    async def find(self, session_id: str) -> FoundRecord | None:
        async with _mapped():
            clear, fence, holder, away, gone, now = await self._run(_FIND, session_id)
            if clear is None or gone != b"0":
                return None
            held = bool(holder) and bool(await self._client.exists(_holder_key(holder.decode())))
        if (read := read_clear(clear, away=bool(away))) is None:
            return None
        return FoundRecord(
            read,
            fence=int(fence),
            holder=holder.decode(),
            held=held,
            away_sec=max(0.0, float(now) - float(away)) if away else None,
        )

    async def read(self, session_id: str) -> Contents | None:
        async with _mapped():
            return _contents(await self._run(_READ, session_id))

    async def take(
        self, session_id: str, *, fence: int, holder: str, clear: ClearPart | None = None
    ) -> Contents | None:
        seen = b"" if clear is None else write_clear(clear)
        async with _mapped():
            return _contents(await self._run(_TAKE, session_id, str(fence), holder, seen))

    async def erase(self, session_id: str) -> bool:
        async with _mapped():
            holder = await self._run(_ERASE, session_id, _TOMBSTONE_MS)
            if holder:
                untold = _untold_key(holder.decode())
                await self._client.sadd(untold, session_id)
                await self._client.pexpire(untold, _UNTOLD_MS)
            return holder is not None

    async def beat(self, holder: str) -> Sequence[str]:
        async with _mapped():
            await self._client.set(_holder_key(holder), b"1", px=round(HOLDER_EXPIRY_SEC * 1000))
            return [erased.decode() for erased in await self._client.spop(_untold_key(holder), _TOLD_TOGETHER)]

    async def leave(self, holder: str) -> None:
        async with _mapped():
            await self._client.delete(_holder_key(holder))

    async def probe(self) -> None:
        async with _mapped():
            await self._client.set(f"{_PREFIX}probe", bytes(_PROBE_BYTES), px=1000)
            await self._client.delete(f"{_PREFIX}probe")

    async def prune(self, *, max_age_sec: float, max_bytes: int) -> StoreSize:
        async with _mapped():
            if await self._client.set(_PRUNING, b"1", nx=True, px=round(_PRUNED_EVERY_SEC * 1000)):
                size = await self._prune(max_bytes)
                await self._client.set(_SIZE, f"{size.records} {size.bytes}", px=round(4 * _PRUNED_EVERY_SEC * 1000))
                return size
            records, size_bytes = (await self._client.get(_SIZE) or b"0 0").split()
            return StoreSize(int(records), int(size_bytes))

    # scripts

    async def _load(self, script: str) -> None:
        digest = await self._client.script_load(script)
        self._scripts[script] = digest.decode() if isinstance(digest, bytes) else digest

    def _arguments(self, script: str, session_id: str, *values: str | bytes | int) -> tuple[str | bytes | int, ...]:
        keys = (f"{_PREFIX}{{{session_id}}}:record", f"{_PREFIX}{{{session_id}}}:log")
        return ("EVALSHA", self._scripts[script], len(keys), *keys, *values)

    async def _run(self, script: str, session_id: str, *values: str | bytes | int) -> Any:
        arguments = self._arguments(script, session_id, *values)
        try:
            return await self._client.execute_command(*arguments)
        except NoScriptError:  # the server was started anew, or another one has taken over
            await self._load(script)
            return await self._client.execute_command(*arguments)

    async def _run_together(self, commands: Sequence[tuple[str | bytes | int, ...]]) -> list[Any]:
        """Run ``_COMMIT`` for several records in one pipeline. Raises the first error of any of them."""
        results = await self._pipelined(commands)
        missed = [place for place, result in enumerate(results) if isinstance(result, NoScriptError)]
        if missed:
            await self._load(_COMMIT)
            again = await self._pipelined([commands[place] for place in missed])
            for place, result in zip(missed, again, strict=True):
                results[place] = result
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results

    async def _pipelined(self, commands: Sequence[tuple[str | bytes | int, ...]]) -> list[Any]:
        if len(commands) == 1:
            try:
                return [await self._client.execute_command(*commands[0])]
            except NoScriptError as error:
                return [error]
        pipeline = self._client.pipeline(transaction=False) if not self._address.cluster else self._client.pipeline()
        for command in commands:
            pipeline.execute_command(*command)
        results: list[Any] = await pipeline.execute(raise_on_error=False)
        return results

    def _commit_arguments(self, change: Change) -> tuple[str | bytes | int, ...]:
        clear = change.clear
        return self._arguments(
            _COMMIT,
            change.session_id,
            change.fence,
            change.serial,
            change.place,
            change.holder,
            b"" if clear is None else write_clear(clear),
            change.snapshot or b"",
            change.element or b"",
            "" if change.end is None else change.end.value,
            int(clear is not None and clear.away),
            self._expiry_ms,
            _TOMBSTONE_MS,
        )

    # size

    async def _prune(self, max_bytes: int) -> StoreSize:
        """Measure all records.

        If they exceed ``max_bytes``, delete the oldest of those that no living process holds.
        """
        found: list[tuple[int, int, str, str, str]] = []
        async for some in self._records():
            found += some
        total = sum(size for _, size, *_ in found)
        living: dict[str, bool] = {"": False}
        deleted = 0
        if total > max_bytes:
            for _, size, session_id, fence, holder in sorted(found):
                if holder not in living:
                    living[holder] = bool(await self._client.exists(_holder_key(holder)))
                if not living[holder] and await self._run(_DROP, session_id, fence):
                    total -= size
                    deleted += 1
                if total <= max_bytes * _ROOM:
                    break
        return StoreSize(len(found) - deleted, total)

    async def _records(self) -> AsyncIterator[list[tuple[int, int, str, str, str]]]:
        """Yield records, some at a time, as tuples of time of change, size, session id, fence number and holder."""
        keys: list[bytes] = []
        pattern = f"{_PREFIX}{{*}}:record"
        async for key in self._client.scan_iter(match=pattern, count=_SCANNED_TOGETHER):
            keys.append(key)
            if len(keys) == _SCANNED_TOGETHER:
                yield await self._described(keys)
                keys = []
        if keys:
            yield await self._described(keys)

    async def _described(self, keys: Sequence[bytes]) -> list[tuple[int, int, str, str, str]]:
        commands = [("HMGET", key, "changed", "size", "fence", "holder", "gone") for key in keys]
        described = []
        for key, found in zip(keys, await self._pipelined(commands), strict=True):
            if isinstance(found, list) and found[4] == b"0":
                session_id = key.decode().removeprefix(f"{_PREFIX}{{").removesuffix("}:record")
                changed, size, fence, holder = (one.decode() for one in found[:4])
                described.append((int(changed), int(size), session_id, fence, holder))
        return described


_TOMBSTONE_MS: Final = round(TOMBSTONE_SEC * 1000)


def _holder_key(holder: str) -> str:
    return f"{_PREFIX}holder:{holder}"


def _untold_key(holder: str) -> str:
    """The key under which the ids of deleted records of ``holder`` are kept until the holder is told of them."""
    return f"{_PREFIX}deleted:{holder}"


def _contents(found: Any) -> Contents | None:
    return None if found is None else Contents(found[0], tuple(found[1]))


def _client(address: StoreAddress) -> Any:
    """Return a client of the library, which connects at its first use."""
    times: dict[str, Any] = {
        "socket_timeout": _TIMEOUT_SEC,
        "socket_connect_timeout": _TIMEOUT_SEC,
        # A connection that the server closed is opened anew, once. A change may be made twice; see ``records``.
        "retry": Retry(NoBackoff(), 1),
    }
    if not address.cluster and address.sentinel is None:
        return Redis.from_url(address.url, **times)
    options = {**parse_url(address.url), **times}
    if options.pop("connection_class", None) is not None:
        options["ssl"] = True
    if address.cluster:
        nodes = [ClusterNode(host, port) for host, port in address.hosts]
        return RedisCluster(startup_nodes=nodes, **_without(options, "host", "port", "db"))
    options = _without(options, "host", "port")
    theirs = _without(options, "db", *(() if address.sentinel_auth else ("username", "password")))
    return Sentinel(address.hosts, sentinel_kwargs=theirs, **options).master_for(address.sentinel or "")


def _without(options: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in names}


@asynccontextmanager
async def _mapped() -> AsyncIterator[None]:
    """Turn errors of the library in the block into StoreError."""
    try:
        yield
    except (RedisError, RedisClusterException, OSError) as error:
        full = isinstance(error, OutOfMemoryError) or any(word in str(error) for word in ("OOM ", "MISCONF "))
        raise StoreError(FULL if full else GONE, f"{type(error).__name__}: {error}") from error

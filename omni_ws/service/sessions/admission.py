"""Admission: limits on sessions, rates and daily use, by key and address; addresses of clients behind proxies."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import math
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Protocol, Self

import msgspec

from omni_ws.config.keys import ApiKey
from omni_ws.config.model import ServerConfig
from omni_ws.config.values import Address, ConfigurationError, Network, literal_address, replace_file, user_cache_folder
from omni_ws.core.chunks import Usage
from omni_ws.core.quota import DailyLimits, DailyUse, TokenBucket, UsedToday
from omni_ws.engine.threads import Work, run_work
from omni_ws.errors import EngineOverloaded, OmniError, RateLimited, ShuttingDown
from omni_ws.metrics import Metrics
from omni_ws.service.observing.observer import Observation, RequestEnded, SessionIdentity

logger = logging.getLogger(__name__)

#: One subscriber gets at least a /64 (RFC 6177), so all addresses of a /64 count as one client.
_IPV6_CLIENT_PREFIX: Final = 64


class Addresses:
    """Determines the address of a client behind trusted proxies, and the key under which limits count the client.

    ``trusted_proxies`` are networks in CIDR notation or single addresses; anything else raises ValueError.
    """

    def __init__(self, trusted_proxies: Iterable[str] = ()) -> None:
        self._trusted: tuple[Network, ...] = tuple(ipaddress.ip_network(one, strict=False) for one in trusted_proxies)

    def client(self, peer: str, forwarded: Sequence[str]) -> str:
        """Return the address of the client for whom ``peer`` connected: ``peer`` itself, unless it is a trusted proxy.

        ``forwarded`` are the members of ``X-Forwarded-For``. Each proxy appends the address of its own peer, so the
        list is read from the end, and only for as long as the writer of a member is a trusted proxy; anything further
        to the front may be forged.
        """
        address = parse_address(peer) if self._trusted and forwarded else None
        for member in reversed(forwarded):
            if address is None or not self._is_trusted(address):
                break
            before = parse_address(member)
            if before is None:
                break
            address = before
        return peer if address is None else str(address)

    def counted(self, client: str) -> str | None:
        """Return the key under which per-client limits count ``client``: its IPv4 address, or its IPv6 network (/64).

        None exempts the client from these limits: loopback and trusted proxies, which stand for many clients, and peers
        without an IP address (Unix sockets).
        """
        address = parse_address(client)
        if address is None or address.is_loopback or self._is_trusted(address):
            return None
        if isinstance(address, ipaddress.IPv6Address):
            return str(ipaddress.ip_network((int(address), _IPV6_CLIENT_PREFIX), strict=False))
        return str(address)

    def _is_trusted(self, address: Address) -> bool:
        return any(address in network for network in self._trusted)


def parse_address(text: str) -> Address | None:
    """Parse an address as proxies write it: with or without port, brackets and quotes.

    IPv4-mapped IPv6 becomes IPv4. Returns None if ``text`` is no IP address.
    """
    text = text.strip().strip('"')
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    return literal_address(text)


class Hosts:
    """Decides whether a ``Host`` field may name this server: a defence against DNS rebinding.

    ``allowed`` are names besides ``localhost`` and IP addresses, which are always accepted; ``*`` accepts all.
    """

    def __init__(self, allowed: Iterable[str]) -> None:
        self._allowed = frozenset(_name(one) for one in allowed)

    def answers_to(self, host: str) -> bool:
        """Return whether ``host`` is an IP address, ``localhost`` (or below it), or an allowed name, with any port.

        In a DNS rebinding attack a web page resolves its own name to this server, so that its requests pass as
        same-origin: only the ``Host`` field, which has the page's name, betrays them. A page that connects to an
        address or to localhost instead is a foreign origin and subject to the check of ``Origin``.
        """
        name = _name(host)
        if "*" in self._allowed or name in self._allowed:
            return True
        return name == "localhost" or name.endswith(".localhost") or _is_address(name)


def _name(host: str) -> str:
    """Return ``host`` in lower case without port and trailing dot; an IPv6 address keeps its brackets."""
    name, colon, port = host.strip().lower().rpartition(":")
    if not colon or not (port == "" or port.isdecimal()) or (name.startswith("[") and not name.endswith("]")):
        name = host.strip().lower()
    return name.removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        if name.startswith("["):
            return name.endswith("]") and ipaddress.IPv6Address(name[1:-1]) is not None
        return ipaddress.IPv4Address(name) is not None
    except ValueError:
        return False


#: When a client that finds no slot is advised to retry, since nobody can predict when one becomes free.
SLOT_RETRY_MS: Final = 1000
#: How much input a key may send at once after a silence, in seconds of its rate.
INPUT_BURST_SEC: Final = 1.0
#: A session that has been open for so long without any content may lose its slot to another.
EMPTY_SEC: Final = 10.0
WHY_EVICTED: Final = "the session was evicted: all sessions were in use, and it had no input yet"

#: How long before the time limit of its key a session is announced to close; at most half of that limit.
CLOSING_NOTICE_SEC: Final = 10.0

#: A function that counts received bytes, and returns the seconds for which no more should be read.
InputPace = Callable[[int], float]


class EmptySession(Protocol):
    """A session that admission may evict while it has had no content from its client. Compared by identity."""

    @property
    def has_content(self) -> bool:
        """Whether any content from the client has arrived. If so, the session keeps its slot."""
        ...

    def evict(self) -> None:
        """End the session, and release its slot immediately."""


class Slot:
    """A place among the server's sessions, taken by one session. Compared by identity."""

    def __init__(self, admission: Admission, key: ApiKey | None, holder: str | None) -> None:
        self._admission = admission
        self.key = key
        #: The key or address that the slot counts against; None if it counts against the server alone.
        self.holder = holder

    def keep(self) -> None:
        """Make a lent slot the session's own.

        If the slot was evicted, take another, and raise what ``Admission.take`` raises. Idempotent.
        """
        self._admission.keep(self)

    def release(self) -> None:
        """Give the slot back, for another session. Idempotent."""
        self._admission.release(self)


class Admission:
    """Admits or refuses sessions and requests.

    A session takes a slot with ``session`` and releases it when the block ends, or with ``take`` and ``Slot.release``.
    A session of a single request counts as that request; a session of many requests calls ``request`` for each. Rates
    belong to a key, across all of its sessions, and outlive them.

    A *holder* is a key, or the address of a client without a key. While at least half of the slots are taken, a holder
    may have at most a fair share of them: the slots divided by one more than the number of holders, or by the number of
    keys if that is less. This leaves room for the next holder. A key with ``max_sessions`` has that limit instead.

    When all slots are taken, a new session evicts another one: the oldest with a *lent* slot, which is lent until the
    session calls ``Slot.keep``; otherwise the oldest session without content whose patience has passed
    (``opened_empty``). ``room`` waits until there is one.
    """

    def __init__(
        self,
        *,
        max_sessions: int,
        metrics: Metrics | None = None,
        addresses: Addresses | None = None,
        keys: Iterable[ApiKey] = (),
        daily_use: DailyUse | None = None,
        counts: SlotCounts | None = None,
    ) -> None:
        """``counts`` are the counts of the whole server, if this process is one of its workers."""
        self.max_sessions = max_sessions
        keys = tuple(keys)
        #: Names of the keys that may use priorities below 0.
        self._preferred = frozenset(key.name for key in keys if key.priority)
        #: Whether the server refuses new sessions because it shuts down.
        self.draining = False
        #: The number of keys, beyond which there can be no more holders; None if clients need no key.
        self.known_keys = len(keys) or None
        #: Sessions that may have had no content, with the time of their opening, oldest first; by the seconds for which
        #: such a session keeps its slot, 0 or EMPTY_SEC. A session with content is dropped when it is looked at.
        self._empty: dict[float, dict[EmptySession, float]] = {0.0: {}, EMPTY_SEC: {}}
        #: Set one by one, in order, as slots become free.
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._metrics = metrics or Metrics()
        self._addresses = addresses or Addresses()
        self._daily_use = daily_use
        self._taken: set[Slot] = set()
        #: The slots that are lent, oldest first.
        self._lent: dict[Slot, None] = {}
        self._counts = counts or SlotCounts()
        self._requests: dict[str, TokenBucket] = {}
        self._input: dict[str, TokenBucket] = {}
        self._no_sessions = asyncio.Event()
        self._no_sessions.set()

    def drain(self) -> None:
        """Refuse new sessions from now on, including those that wait for a slot."""
        self.draining = True
        while self._waiting:
            self._wake_next()

    @property
    def sessions(self) -> int:
        """The number of slots that sessions of this process have taken."""
        return len(self._taken)

    @property
    def all_sessions(self) -> int:
        """The number of slots taken on the whole server."""
        return self._counts.total

    async def wait_empty(self) -> None:
        """Wait until no session of this process has a slot."""
        await self._no_sessions.wait()

    @contextmanager
    def session(
        self, key: ApiKey | None, *, client: str = "", many_requests: bool = False, lent: bool = False
    ) -> Iterator[Slot]:
        """Take a slot for the block. Raises what ``take`` raises."""
        slot = self.take(key, client=client, many_requests=many_requests, lent=lent)
        try:
            yield slot
        finally:
            slot.release()

    def take(self, key: ApiKey | None, *, client: str = "", many_requests: bool = False, lent: bool = False) -> Slot:
        """Take a slot. If none is free, another session may be evicted for it.

        ``client`` is the address of the peer. Without ``many_requests``, the session is also counted as a request. A
        ``lent`` slot can be evicted until ``Slot.keep`` is called. Raises ShuttingDown; EngineOverloaded when the
        server is full; RateLimited when the holder has its share, and what ``request`` raises.
        """
        holder = self._holder(key, client)
        slot = Slot(self, key, holder)
        self._check(key, holder)
        if not many_requests:
            self.request(key)
        self._evict()
        self._take(slot)
        if lent:
            self._lent[slot] = None
        return slot

    def check(self, key: ApiKey | None, *, client: str = "") -> None:
        """Raise what ``take`` would raise now, except for the rate of requests. Takes no slot."""
        self._check(key, self._holder(key, client))

    async def room(self, key: ApiKey | None, *, client: str = "") -> None:
        """If all slots are taken, wait for one, provided that a session without content may soon be evicted.

        At most as many callers wait as there are sessions without content. Raises what ``check`` raises.
        """
        holder = self._holder(key, client)
        until = _now() + EMPTY_SEC
        while isinstance(self._refusal(key, holder), EngineOverloaded):
            due = self._next_eviction()
            if due is None or due > until or len(self._waiting) >= sum(map(len, self._empty.values())):
                break
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            try:
                async with asyncio.timeout_at(due):
                    await waiter
            except TimeoutError:
                pass
            except asyncio.CancelledError:
                if not waiter.cancelled():  # it was woken for a free slot, which the next one may have now
                    self._wake_next()
                raise
            finally:
                if waiter in self._waiting:
                    self._waiting.remove(waiter)
        self._check(key, holder)

    def _wake_next(self) -> None:
        if self._waiting and not (waiter := self._waiting.popleft()).done():
            waiter.set_result(None)

    def opened_empty(self, session: EmptySession, *, patience: float = EMPTY_SEC) -> None:
        """Note a session without content. After ``patience`` seconds (0 or EMPTY_SEC) it may be evicted."""
        self._empty[patience][session] = _now()

    def ended(self, session: EmptySession) -> None:
        """Forget a session that ``opened_empty`` noted. Idempotent."""
        for sessions in self._empty.values():
            sessions.pop(session, None)

    def _oldest_empty(self) -> Iterator[tuple[float, EmptySession, float]]:
        """Yield (opening time, session, eviction time) of the oldest empty session for each value of ``patience``."""
        for patience, sessions in self._empty.items():
            while sessions:
                session, opened = next(iter(sessions.items()))
                if not session.has_content:
                    yield opened, session, opened + patience
                    break
                del sessions[session]

    def _next_eviction(self) -> float | None:
        return min((due for *_, due in self._oldest_empty()), default=None)

    def _evictable(self) -> EmptySession | None:
        """Return the oldest session that may be evicted now; None if there is none."""
        found = [(opened, session) for opened, session, due in self._oldest_empty() if due <= _now()]
        return min(found, key=lambda one: one[0])[1] if found else None

    def keep(self, slot: Slot) -> None:
        """Make a lent slot the session's own; see ``Slot.keep``."""
        self._lent.pop(slot, None)
        if slot not in self._taken:
            self._check(slot.key, slot.holder)
            self._evict()
            self._take(slot)

    def _holder(self, key: ApiKey | None, client: str) -> str | None:
        return self._addresses.counted(client) if key is None else f"key {key.name}"

    def _take(self, slot: Slot) -> None:
        self._taken.add(slot)
        self._no_sessions.clear()
        self._counts.add(slot.holder)
        if self._counts.total > self.max_sessions:  # another process has taken the last one at the same time
            self.release(slot)
            raise self._refused("session", self._overloaded())

    def release(self, slot: Slot) -> None:
        """Release a slot; see ``Slot.release``. Does nothing if it was evicted before."""
        self._lent.pop(slot, None)
        if slot not in self._taken:
            return
        self._taken.remove(slot)
        if not self._taken:
            self._no_sessions.set()
        self._counts.remove(slot.holder)
        self._wake_next()

    def _evict(self) -> None:
        """If no slot is free, evict a session, if one may be evicted."""
        if self._counts.total < self.max_sessions:
            return
        if self._lent:
            self.release(next(iter(self._lent)))
        elif (empty := self._evictable()) is not None:
            self.ended(empty)
            empty.evict()

    def _check(self, key: ApiKey | None, holder: str | None) -> None:
        refusal = self._refusal(key, holder)
        if refusal is not None:
            raise self._refused("session", refusal)

    def _refusal(self, key: ApiKey | None, holder: str | None) -> OmniError | None:
        """Return the error that refuses a session now; None if it can have a slot."""
        if self.draining:
            return ShuttingDown("the server is shutting down", retry_after_ms=SLOT_RETRY_MS)
        own_limit = None if key is None else key.max_sessions
        if own_limit is not None and holder is not None and self._counts.held(holder) >= own_limit:
            return RateLimited(
                f"at most {own_limit} concurrent sessions per key; retry later", retry_after_ms=SLOT_RETRY_MS
            )
        if self._counts.total >= self.max_sessions and not self._lent and self._evictable() is None:
            return self._overloaded()
        if own_limit is None and holder is not None and self._is_crowded and self._has_share(holder):
            held = self._counts.held(holder)
            whose = "this address" if key is None else "this key"
            message = f"{whose} already has its fair share of sessions ({held}); retry later"
            return RateLimited(message, retry_after_ms=SLOT_RETRY_MS)
        return None

    def _overloaded(self) -> EngineOverloaded:
        message = f"all {self.max_sessions} sessions are in use; retry later"
        return EngineOverloaded(message, retry_after_ms=SLOT_RETRY_MS)

    @property
    def _is_crowded(self) -> bool:
        """Whether so many slots are taken that each holder is limited to its share."""
        return 2 * self._counts.total >= self.max_sessions

    def _has_share(self, holder: str) -> bool:
        """Return whether ``holder`` has all the slots that it may have while the server is crowded."""
        holders = self._counts.holders(beside=holder) + 1
        share = self.max_sessions // (holders if self.known_keys is None else min(holders, self.known_keys))
        return self._counts.held(holder) >= max(1, share)

    def _refused(self, what: str, error: OmniError) -> OmniError:
        self._metrics.refused.labels(what, error.code).inc()
        return error

    def request(self, key: ApiKey | None) -> None:
        """Count a request against the rate of ``key``; None has no rate.

        Raises RateLimited, and counts nothing, if the rate is exceeded, or the key has used up a daily limit.
        """
        if key is None:
            return
        if self._daily_use is not None and (refusal := self._daily_use.refusal(key.name, _unix_time())) is not None:
            raise self._refused("request", refusal)
        if key.requests_per_sec is None:
            return
        now = _now()
        bucket = self._requests.get(key.name)
        if bucket is None:
            capacity = max(1.0, key.requests_per_sec) if key.burst is None else key.burst
            bucket = self._counts.bucket("requests", key.name, rate=key.requests_per_sec, capacity=capacity, now=now)
            self._requests[key.name] = bucket
        if wait := bucket.try_take(now=now):
            message = f"at most {key.requests_per_sec:g} requests per second for this key; retry later"
            raise self._refused("request", RateLimited(message, retry_after_ms=math.ceil(wait * 1000)))

    def reserve(self, owner: str | None) -> None:
        """Reserve RESERVED_TOKENS and RESERVED_AUDIO_MS of a key's daily limits, for a request that begins now.

        ``owner`` is the name of the key. ``spent`` releases the reservation. Raises RateLimited, and reserves nothing,
        if the limits are used up or reserved.
        """
        if self._daily_use is not None:
            try:
                self._daily_use.reserve(owner, _unix_time())
            except RateLimited as refusal:
                raise self._refused("request", refusal) from None

    def spent(self, owner: str | None, *, tokens: int, audio_ms: int, reserved: bool) -> None:
        """Count what an ended request of the key named ``owner`` has used.

        ``reserved``: ``reserve`` admitted this request, so that its reservation is released.
        """
        if self._daily_use is not None:
            self._daily_use.add(owner, tokens=tokens, audio_ms=audio_ms, now=_unix_time(), reserved=reserved)

    def observe(self, session: SessionIdentity, observation: Observation) -> None:
        """Count the use of a request when it has ended, however it ended. Other observations are ignored.

        Of a request with which another process goes on, only the reservation is released.
        """
        if isinstance(observation, RequestEnded):
            usage = Usage() if observation.timeline.moved else observation.outcome.final.usage
            self.spent(
                session.owner,
                tokens=usage.input_tokens + usage.output_tokens,
                audio_ms=usage.input_audio_ms + usage.output_audio_ms,
                reserved=observation.timeline.admitted,
            )

    def priority(self, owner: str | None, wanted: int) -> int:
        """Return ``wanted``, raised to 0 unless the key named ``owner`` may use priorities below 0."""
        return wanted if owner in self._preferred else max(0, wanted)

    def input_pace(self, key: ApiKey | None) -> InputPace | None:
        """Return the pace at which to read from all connections of ``key`` together; None if the key has no limit."""
        if key is None or key.input_bytes_per_sec is None:
            return None
        bucket = self._input.get(key.name)
        if bucket is None:
            rate = key.input_bytes_per_sec
            bucket = self._counts.bucket("input", key.name, rate=rate, capacity=rate * INPUT_BURST_SEC, now=_now())
            self._input[key.name] = bucket
        found = bucket
        return lambda size: found.spend(size, now=_now())


def session_too_long(limit: float) -> RateLimited:
    """Return the error that ends a session after ``limit`` seconds. The client may then open another session."""
    return RateLimited(
        f"a session of this key may last {limit:g} seconds; open another one", retry_after_ms=SLOT_RETRY_MS
    )


def _unix_time() -> float:
    return time.time()


def _now() -> float:
    return asyncio.get_running_loop().time()


# Counts of the slots that sessions have taken, by holder.


class SlotCounts:
    """Counts of the taken slots of a server with a single process; the base class of the counts of several workers.

    A slot of no holder (None) counts only in the total.
    """

    def __init__(self) -> None:
        self._total = 0
        self._held: Counter[str] = Counter()

    @property
    def total(self) -> int:
        """The number of slots that are taken."""
        return self._total

    def held(self, holder: str) -> int:
        """Return how many slots ``holder`` has taken."""
        return self._held[holder]

    def holders(self, beside: str) -> int:
        """Return how many holders have a slot, counting ``beside`` even if it has none."""
        return len(self._held.keys() | {beside})

    def add(self, holder: str | None) -> None:
        """Count a slot that this process has given to ``holder``."""
        self._total += 1
        if holder is not None:
            self._held[holder] += 1

    def remove(self, holder: str | None) -> None:
        """Undo ``add``: a slot of ``holder`` was released."""
        self._total -= 1
        if holder is not None:
            self._held[holder] -= 1
            if not self._held[holder]:
                del self._held[holder]

    def bucket(self, kind: str, key: str, *, rate: float, capacity: float, now: float) -> TokenBucket:
        """Return the token bucket for a rate of a key.

        ``kind`` is ``requests`` or ``input``. Called once for each bucket.
        """
        return TokenBucket(rate=rate, capacity=capacity, now=now)


# What keys use in a day.

#: Changes of so many seconds are written together; a server that is killed loses them.
WRITE_INTERVAL_SEC: Final = 1.0
#: After each failure to write, the interval doubles, up to this.
LONGEST_INTERVAL_SEC: Final = 60.0


class _Content(msgspec.Struct):
    day: int
    keys: dict[str, UsedToday]


class DailyUseFile:
    """The file that keeps the daily use of keys over restarts.

    The counts are read at the start. When they have changed, all are written, in a worker thread. The file belongs to
    one server at a time: a second server is refused, as it would overwrite the counts of the first.
    """

    def __init__(self, path: Path, use: DailyUse) -> None:
        """Lock the file, read it into ``use``, and write it whenever ``use`` changes.

        Raises ConfigurationError if the file is unusable or belongs to a running server.
        """
        self.use = use
        self._path = path
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Task[None] | None = None
        self._changed = False
        self._interval = WRITE_INTERVAL_SEC
        self._closing = False
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = _locked(path.with_name(path.name + ".lock"))
            self._read()
        except BlockingIOError:
            raise ConfigurationError(
                [f"auth.usage_file: {path} belongs to another server that is running; name another file"]
            ) from None
        except OSError as error:
            raise ConfigurationError([f"auth.usage_file: cannot use {path}: {error.strerror}"]) from None
        use.changed = self._note_change

    @classmethod
    def configured(cls, config: ServerConfig, keys: Iterable[ApiKey]) -> Self | None:
        """Return the file of a server with these keys, locked; None if no key has a daily limit.

        Raises ConfigurationError.
        """
        limits = daily_limits(keys)
        if not limits:
            return None
        return cls(config.auth.usage_file or user_cache_folder() / "usage.json", DailyUse(limits))

    def _read(self) -> None:
        try:
            content = msgspec.json.decode(self._path.read_bytes(), type=_Content)
        except FileNotFoundError:
            return
        except msgspec.DecodeError as error:
            os.close(self._lock)
            raise ConfigurationError(
                [f"auth.usage_file: {self._path} holds no counts of keys ({error}); remove it to begin at 0"]
            ) from None
        self.use.replace(content.day, content.keys)

    def _note_change(self) -> None:
        self._changed = True
        if self._timer is None and self._writing is None and not self._closing:
            self._timer = asyncio.get_running_loop().call_later(self._interval, self._begin_to_write)

    def _begin_to_write(self) -> None:
        self._timer = None
        self._writing = asyncio.create_task(self._write(), name="daily use of keys")

    async def _write(self) -> None:
        self._changed = False
        content = msgspec.json.encode(_Content(self.use.day, self.use.used))
        try:
            await run_work(Work.FILES, replace_file, self._path, content)
            self._interval = WRITE_INTERVAL_SEC
        except OSError as error:
            if self._interval == WRITE_INTERVAL_SEC:
                logger.warning("cannot write the daily use of keys to %s: %s", self._path, error.strerror)
            self._interval = min(2 * self._interval, LONGEST_INTERVAL_SEC)
            self._changed = True
        finally:
            self._writing = None
        if self._changed:
            self._note_change()

    async def close(self) -> None:
        """Write counts that have changed, and unlock the file for other servers. A failure to write is only logged."""
        self._closing = True
        if self._writing is not None:
            await self._writing
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._changed:
            await self._write()
        os.close(self._lock)


def daily_limits(keys: Iterable[ApiKey]) -> dict[str, DailyLimits]:
    """Return the daily limits by key name, for keys that have any."""
    return {
        key.name: DailyLimits(key.tokens_per_day, key.audio_seconds_per_day)
        for key in keys
        if key.tokens_per_day is not None or key.audio_seconds_per_day is not None
    }


def _locked(path: Path) -> int:
    """Lock a file until this process ends or closes it.

    Returns its descriptor. Raises BlockingIOError if it is locked. On Windows nothing is locked.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    if sys.platform != "win32":
        import fcntl

        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise
    return descriptor

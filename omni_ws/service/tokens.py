"""Token sessions: each is a list of tokens that its client extends and lets the engine continue."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Final, cast

from omni_ws.config.keys import ApiKey, key_name
from omni_ws.core.quota import ByteBudget
from omni_ws.core.token_session import TOKEN_BYTES, TokenImage, TokenRanges, TokenSession
from omni_ws.engine.base import (
    NOWHERE,
    HasTokens,
    TokenEngine,
    TokenEvent,
    TokenGeneration,
    TokenOutput,
    TokenSampling,
    TokensFinished,
    TokenStop,
)
from omni_ws.errors import InvalidValue, ReadoutsOff, SessionBusy, SessionNotFound
from omni_ws.service import new_id
from omni_ws.service.sessions.admission import Admission, Slot
from omni_ws.service.sessions.factory import SessionFactory

#: Bytes of an image besides its data, in each session that has it.
IMAGE_OVERHEAD_BYTES: Final = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCall:
    """The arguments of ``generate``: what to append (see ``TokenSession.begin``), and what to compute.

    Ranges are positions in the list of tokens after the append.
    """

    tokens: Sequence[int] = ()
    offset: int = 0
    truncating: bool = False
    images: tuple[TokenImage, ...] = ()
    max_tokens: int = 0
    sampling: TokenSampling = field(default_factory=TokenSampling)
    logprob_ranges: TokenRanges = NOWHERE
    logprob_top_k: int = 0
    readout_ranges: TokenRanges = NOWHERE
    priority: int = 0


@dataclass(frozen=True, slots=True)
class TokensDone:
    """The last event of a ``generate`` call. ``prompt_tokens`` is the length of the token list after the append."""

    prompt_tokens: int
    completion_tokens: int
    reason: TokenStop


class TokenSessions:
    """Keeps token sessions by id, each for the key that opened it, and runs one call of a session at a time.

    A session is closed ``ttl_sec`` after its last use, and at the time limit of its key. Each session takes a slot of
    ``admission``. Tokens and images are charged to ``budget``; an image that several sessions share is charged once.
    ``check_ready`` raises an error while the engine cannot work.
    """

    def __init__(
        self,
        engine: TokenEngine,
        *,
        ttl_sec: float,
        budget: ByteBudget,
        admission: Admission,
        check_ready: Callable[[], None],
    ) -> None:
        self.engine = engine
        self._ttl_sec = ttl_sec
        self._budget = budget
        self._admission = admission
        self._check_ready = check_ready
        self._entries: dict[str, _OpenSession] = {}
        self._busy = 0
        self._all_idle = asyncio.Event()
        self._all_idle.set()
        #: The number of sessions that hold an image.
        self._holders: Counter[TokenImage] = Counter()

    def __len__(self) -> int:
        return len(self._entries)

    def open(self, key: ApiKey | None, *, client: str = "") -> str:
        """Open an empty session and return its id. ``client`` is the peer's address.

        Raises what ``SessionFactory.check_ready`` and ``Admission.take`` raise.
        """
        self._check_ready()
        engine = self.engine
        session = TokenSession(
            max_length=engine.max_model_len, vocabulary=engine.vocabulary_size, vision=engine.vision_tokens
        )
        return self._add(session, key, client)

    def close(self, session_id: str, key: ApiKey | None) -> None:
        """Close a session and stop its call. Does nothing for a session that is unknown or belongs to another key."""
        entry = self._entries.get(session_id)
        if entry is not None and entry.owner == key_name(key):
            self._remove(session_id)

    async def wait_idle(self) -> None:
        """Wait until no session runs a call."""
        await self._all_idle.wait()

    def close_all(self) -> None:
        """Close every session, as the server ends."""
        for session_id in tuple(self._entries):
            self._remove(session_id)

    def fork(self, session_id: str, key: ApiKey | None, *, at: int, client: str = "") -> str:
        """Open a session with the first ``at`` tokens of another, and return its id.

        Raises SessionNotFound, SessionBusy, InvalidValue for a position beyond the end, OffsetMismatch for one inside
        an image, EngineOverloaded if there is no memory, and what ``Admission.take`` raises.
        """
        entry = self._idle(session_id, key)
        return self._add(entry.session.fork(at), key, client)

    def dump(self, session_id: str, key: ApiKey | None) -> Sequence[int]:
        """Return the tokens of a session; of a busy one, only those that are committed. Raises SessionNotFound."""
        entry = self._find(session_id, key)
        if entry.running is None:
            entry.expire_in(self._ttl_sec)
        return entry.session.committed()

    async def generate(
        self, session_id: str, key: ApiKey | None, call: TokenCall
    ) -> AsyncGenerator[TokenOutput | TokensDone, None]:
        """Append tokens, have the engine compute them and decode new ones, and yield the engine's output.

        An error before the first event leaves the session unchanged. A decoded token joins the session when it is
        yielded. If the session is closed meanwhile, the call ends with CANCELLED.

        Raises SessionNotFound, SessionBusy, RateLimited, ReadoutsOff, EngineOverloaded if there is no memory,
        InvalidValue for ``max_tokens`` in an empty session, and the errors of ``check_ready``, ``TokenSession.begin``
        and the engine.
        """
        entry = self._idle(session_id, key)
        self._check_ready()
        self._admission.request(key)
        if call.readout_ranges and not self.engine.readout_manifest.concepts:
            raise ReadoutsOff("readouts are disabled on this server", param="readout_ranges")
        entry.session.begin(call.tokens, offset=call.offset, truncating=call.truncating, images=call.images)
        entry.begin_call()
        task = entry.running
        length, written, ended, reserved = len(entry.session), 0, False, False
        self._busy += 1
        self._all_idle.clear()
        try:
            self._admission.reserve(entry.owner)
            reserved = True
            self._charge(entry)
            priority = self._admission.priority(entry.owner, call.priority)
            async with aclosing(entry.run(self.engine, call, priority=priority)) as events:
                async for event in events:
                    match event:
                        case TokensDone():
                            ended = True
                        case TokenOutput(is_prefill=False):
                            written += 1
                    yield event
                    if entry.closed:
                        break
        except asyncio.CancelledError:
            if not entry.closed or task is None:
                raise
            task.uncancel()
        finally:
            # A failure takes the append back, and nothing was computed for it.
            taken = 0 if entry.session.pending else len(call.tokens)
            self._admission.spent(entry.owner, tokens=taken + written, audio_ms=0, reserved=reserved)
            entry.session.rollback()
            entry.end_call()
            self._busy -= 1
            if not self._busy:
                self._all_idle.set()
            if entry.closed:
                self._release(entry)
            else:
                self._charge(entry, anyway=True)
                entry.expire_in(self._ttl_sec)
        if entry.closed and not ended:
            yield TokensDone(length, written, TokenStop.CANCELLED)

    # bookkeeping

    def _add(self, session: TokenSession, key: ApiKey | None, client: str) -> str:
        slot = self._admission.take(key, client=client, many_requests=True)
        session_id = new_id("toks_")
        entry = _OpenSession(session, key_name(key), slot, evict=partial(self._remove, session_id))
        try:
            self._charge(entry)
        except BaseException:
            slot.release()
            raise
        self._entries[session_id] = entry
        self._admission.opened_empty(entry)
        if key is not None and key.max_session_sec is not None:
            entry.last(key.max_session_sec)
        entry.expire_in(self._ttl_sec)
        return session_id

    def _find(self, session_id: str, key: ApiKey | None) -> _OpenSession:
        entry = self._entries.get(session_id)
        if entry is None or entry.owner != key_name(key):
            raise SessionNotFound("session not found; it may have expired or been closed", param="session_id")
        return entry

    def _idle(self, session_id: str, key: ApiKey | None) -> _OpenSession:
        entry = self._find(session_id, key)
        if entry.running is not None:
            raise SessionBusy(
                "the session is busy with another call; retry later", param="session_id", retry_after_ms=100
            )
        entry.expire_in(self._ttl_sec)
        return entry

    def _remove(self, session_id: str) -> None:
        entry = self._entries.pop(session_id)
        self._admission.ended(entry)
        entry.close()
        if entry.running is None:
            self._release(entry)
        elif entry.awaits_engine:
            entry.running.cancel()  # the call releases the session as it ends
        # Otherwise the call ends once its client reads or disconnects. Cancelled while it writes, it could not report
        # CANCELLED to the client.

    def _release(self, entry: _OpenSession) -> None:
        self._budget.give(entry.held)
        self._hold(entry, -entry.held, ())
        entry.slot.release()

    def _charge(self, entry: _OpenSession, *, anyway: bool = False) -> None:
        """Charge what the session holds now.

        Raises EngineOverloaded if that exceeds the budget, unless ``anyway`` is set.
        """
        images = len(entry.session.images) * IMAGE_OVERHEAD_BYTES
        more = len(entry.session) * TOKEN_BYTES + images - entry.held
        new = sum(len(image.data) for image in entry.session.images if not self._holders[image])
        if more + new > 0 and not anyway:
            self._budget.take(more + new)
            self._budget.give(new)
        else:
            self._budget.charge(more)
        self._hold(entry, more, entry.session.images)

    def _hold(self, entry: _OpenSession, more: int, images: tuple[TokenImage, ...]) -> None:
        """Charge a session for ``images`` in place of its previous images.

        An image that several sessions hold is charged once. ``more`` is how many other bytes are charged for the
        session, beyond those charged at the last call.
        """
        for image in images:
            if not self._holders[image]:
                self._budget.charge(len(image.data))
            self._holders[image] += 1
        for image in entry.images:
            self._holders[image] -= 1
            if not self._holders[image]:
                self._budget.give(len(image.data))
                del self._holders[image]
        entry.hold(more, images)


class _OpenSession:
    """An open session: its slot, the call in progress, the timers that end it, and the bytes charged for it.

    ``evict`` closes the session.
    """

    def __init__(self, session: TokenSession, owner: str | None, slot: Slot, *, evict: Callable[[], None]) -> None:
        self.session = session
        self.owner = owner
        self.slot = slot
        self.evict = evict
        #: Whether it has had a call, or tokens from the beginning.
        self.has_content = len(session) > 0
        #: The task of the call in progress.
        self.running: asyncio.Task[object] | None = None
        #: Whether that task waits for the engine, rather than for its client to read.
        self.awaits_engine = False
        self.closed = False
        #: Bytes charged for tokens and images, without the data of the images.
        self.held = 0
        #: The images charged.
        self.images: tuple[TokenImage, ...] = ()
        self._expiry: asyncio.TimerHandle | None = None
        self._longest: asyncio.TimerHandle | None = None

    def last(self, seconds: float) -> None:
        """Set the session's time limit: it is closed ``seconds`` from now, even if it is in use until then."""
        self._longest = asyncio.get_running_loop().call_later(seconds, self.evict)

    def expire_in(self, seconds: float) -> None:
        """Close the session ``seconds`` from now, unless it is used before."""
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry = asyncio.get_running_loop().call_later(seconds, self.evict)

    def begin_call(self) -> None:
        """Note that the current task runs a call, during which the session does not expire."""
        self.running = asyncio.current_task()
        self.awaits_engine = True
        self.has_content = self.has_content or len(self.session) > 0
        if self._expiry is not None:
            self._expiry.cancel()

    def end_call(self) -> None:
        """Note that the call has ended, so that another may begin."""
        self.running = None

    def hold(self, more: int, images: tuple[TokenImage, ...]) -> None:
        """Note that ``more`` additional bytes are charged, and which images are."""
        self.held += more
        self.images = images

    def close(self) -> None:
        """Note that the session is closed, and stop its timers."""
        self.closed = True
        for timer in (self._expiry, self._longest):
            if timer is not None:
                timer.cancel()

    async def run(
        self, engine: TokenEngine, call: TokenCall, *, priority: int
    ) -> AsyncGenerator[TokenOutput | TokensDone, None]:
        """Yield the engine's output for ``call``. The first output commits the tokens that the call appends.

        Raises InvalidValue for ``max_tokens`` in an empty session, and the errors of the engine.
        """
        session = self.session
        length = len(session)
        if not length and call.max_tokens:
            raise InvalidValue("max_tokens requires a session with at least one token", param="max_tokens")
        max_tokens = min(call.max_tokens, session.max_length - length)
        begins = (ranges.first for ranges in (call.logprob_ranges, call.readout_ranges))
        covers = any(first is not None and first < length for first in begins)
        if not (call.tokens or max_tokens or covers):
            session.commit()
            self.awaits_engine = False
            yield TokensDone(length, 0, TokenStop.LENGTH)
            return
        if call.images:
            await engine.check_images(call.images)
        generation = TokenGeneration(
            request_id=new_id("tok_"),
            tokens=session.tokens,
            images=session.images,
            max_tokens=max_tokens,
            sampling=call.sampling,
            logprob_ranges=call.logprob_ranges,
            logprob_top_k=call.logprob_top_k,
            readout_ranges=call.readout_ranges,
            priority=priority,
            owner=self.owner,
        )
        outputs: AsyncGenerator[TokenEvent, None]
        async with aclosing(engine.generate_tokens(generation)) as outputs:  # type: ignore[type-var,assignment]
            async for output in outputs:
                session.commit()
                self.awaits_engine = False
                if isinstance(output, TokensFinished):
                    yield TokensDone(length, len(session) - length, output.reason)
                    return
                if not output.is_prefill:
                    session.decoded(output.id)
                yield output
                self.awaits_engine = True


def token_sessions(factory: SessionFactory) -> TokenSessions:
    """Create the token sessions of an engine that has started and implements ``HasTokens``."""
    return TokenSessions(
        cast("HasTokens", factory.engine).tokens,
        ttl_sec=factory.config.grpc.session_ttl_sec,
        budget=factory.budget,
        admission=factory.admission,
        check_ready=factory.check_ready,
    )

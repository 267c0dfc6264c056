"""The token sessions of a server."""

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
from omni_ws.core.token_session import TOKEN_BYTES, TokenAppend, TokenImage, TokenRanges, TokenSession
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
from omni_ws.service.failure import new_id
from omni_ws.service.sessions.admission import Admission, Slot
from omni_ws.service.sessions.factory import SessionFactory

#: What an image takes in memory besides its data, in each session that has it.
IMAGE_OVERHEAD_BYTES: Final = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCall:
    """The arguments of ``generate``. Ranges are positions in the list of tokens after the append."""

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
    """The last event of a call. ``prompt_tokens`` is the length of the list of tokens after the append."""

    prompt_tokens: int
    completion_tokens: int
    reason: TokenStop


@dataclass(slots=True, eq=False)
class _Entry:
    session: TokenSession
    owner: str | None
    slot: Slot
    #: The task of the call in progress.
    running: asyncio.Task[object] | None = None
    #: Whether that task waits for the engine, rather than for its client to read.
    waiting: bool = False
    closed: bool = False
    #: Ends a session that is as long as its key allows.
    length: asyncio.TimerHandle | None = None
    expiry: asyncio.TimerHandle | None = None
    #: Bytes charged for tokens and images, without the data of the latter.
    held: int = 0
    #: The images charged.
    images: tuple[TokenImage, ...] = field(default=())
    #: Whether it has had a call, or tokens from the beginning.
    has_content: bool = False
    evict: Callable[[], None] = field(init=False)


class TokenSessions:
    """Keeps token sessions by id, each for the key that opened it, and runs one call of a session at a time.

    A session expires ``ttl_sec`` after its last call has ended. Each holds a slot of ``admission``. Tokens and images
    are charged to ``budget``; an image that several sessions share is charged once.
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
        self._entries: dict[str, _Entry] = {}
        self._busy = 0
        self._all_idle = asyncio.Event()
        self._all_idle.set()
        #: The number of sessions that hold an image.
        self._holders: Counter[TokenImage] = Counter()

    def __len__(self) -> int:
        return len(self._entries)

    def open(self, key: ApiKey | None, *, client: str = "") -> str:
        """Open an empty session and return its id. ``client`` is the peer's address.

        Raises as ``SessionFactory.check_ready`` and ``Admission.session``.
        """
        self._check_ready()
        engine = self.engine
        session = TokenSession(
            max_length=engine.max_model_len, vocabulary=engine.vocabulary_size, vision=engine.vision_tokens
        )
        return self._add(session, key, client)

    def close(self, session_id: str, key: ApiKey | None) -> None:
        """Close a session and stop its call. An unknown session is no error."""
        entry = self._entries.get(session_id)
        if entry is not None and entry.owner == key_name(key):
            self._remove(session_id)

    async def wait_idle(self) -> None:
        """Wait until no session is busy."""
        await self._all_idle.wait()

    def close_all(self) -> None:
        """Close every session, as the server ends."""
        for session_id in tuple(self._entries):
            self._remove(session_id)

    def fork(self, session_id: str, key: ApiKey | None, *, at: int, client: str = "") -> str:
        """Open a session with the first ``at`` tokens of another, and return its id.

        Raises SessionNotFound, SessionBusy, InvalidValue beyond the end, OffsetMismatch inside an image, and as
        ``Admission.session``.
        """
        entry = self._idle(session_id, key)
        return self._add(entry.session.fork(at), key, client)

    def dump(self, session_id: str, key: ApiKey | None) -> Sequence[int]:
        """Return the tokens; of a busy session, those that no failure can take back. Raises SessionNotFound."""
        entry = self._find(session_id, key)
        if entry.running is None:
            self._touch(session_id, entry)
        return entry.session.committed()

    async def generate(
        self, session_id: str, key: ApiKey | None, call: TokenCall
    ) -> AsyncGenerator[TokenOutput | TokensDone, None]:
        """Append tokens, let the engine compute and decode, and yield its output.

        An error before the first event leaves the session unchanged. A decoded token joins the session when it is
        yielded. If the session is closed meanwhile, the call ends with CANCELLED. Raises SessionNotFound, SessionBusy,
        RateLimited, ReadoutsOff, and the errors of ``TokenSession.begin`` and of the engine.
        """
        entry = self._idle(session_id, key)
        self._check_ready()
        self._admission.request(key)
        if call.readout_ranges and not self.engine.readout_manifest.concepts:
            raise ReadoutsOff("readouts are disabled on this server", param="readout_ranges")
        append = entry.session.begin(call.tokens, offset=call.offset, truncating=call.truncating, images=call.images)
        entry.has_content = entry.has_content or len(entry.session) > 0
        task = entry.running = asyncio.current_task()
        if entry.expiry is not None:
            entry.expiry.cancel()
        length, written, ended, reserved = len(entry.session), 0, False, False
        self._busy += 1
        self._all_idle.clear()
        try:
            self._admission.reserve(entry.owner)
            reserved = True
            self._charge(entry)
            async with aclosing(self._run(entry, call, append)) as events:
                entry.waiting = True
                async for event in events:
                    entry.waiting = False
                    match event:
                        case TokensDone():
                            ended = True
                        case TokenOutput(is_prefill=False):
                            written += 1
                    yield event
                    if entry.closed:
                        break
                    entry.waiting = True
        except asyncio.CancelledError:
            if not entry.closed or task is None:
                raise
            task.uncancel()
        finally:
            # A failure takes the append back, and nothing was computed for it.
            taken = 0 if append.pending else len(call.tokens)
            self._admission.spent(entry.owner, tokens=taken + written, audio_ms=0, reserved=reserved)
            append.rollback()
            entry.running = None
            self._busy -= 1
            if not self._busy:
                self._all_idle.set()
            if entry.closed:
                self._release(entry)
            else:
                self._charge(entry, anyway=True)
                self._touch(session_id, entry)
        if entry.closed and not ended:
            yield TokensDone(length, written, TokenStop.CANCELLED)

    async def _run(
        self, entry: _Entry, call: TokenCall, append: TokenAppend
    ) -> AsyncGenerator[TokenOutput | TokensDone, None]:
        session = entry.session
        length = len(session)
        if not length and call.max_tokens:
            raise InvalidValue("max_tokens requires a session with at least one token", param="max_tokens")
        max_tokens = min(call.max_tokens, session.max_length - length)
        if not (call.tokens or max_tokens or call.logprob_ranges or call.readout_ranges) or not length:
            append.commit()
            yield TokensDone(length, 0, TokenStop.LENGTH)
            return
        if call.images:
            await self.engine.check_images(call.images)
        generation = TokenGeneration(
            request_id=new_id("tok_"),
            tokens=session.tokens,
            images=session.images,
            max_tokens=max_tokens,
            sampling=call.sampling,
            logprob_ranges=call.logprob_ranges,
            logprob_top_k=call.logprob_top_k,
            readout_ranges=call.readout_ranges,
            priority=self._admission.priority(entry.owner, call.priority),
            owner=entry.owner,
        )
        outputs: AsyncGenerator[TokenEvent, None]
        async with aclosing(self.engine.generate_tokens(generation)) as outputs:  # type: ignore[type-var,assignment]
            async for output in outputs:
                append.commit()
                if isinstance(output, TokensFinished):
                    yield TokensDone(length, len(session) - length, output.reason)
                    return
                if not output.is_prefill:
                    session.decoded(output.id)
                yield output

    # bookkeeping

    def _add(self, session: TokenSession, key: ApiKey | None, client: str) -> str:
        slot = self._admission.take(key, client=client, many_requests=True)
        entry = _Entry(session, key_name(key), slot)
        try:
            self._charge(entry)
        except BaseException:
            slot.release()
            raise
        session_id = new_id("toks_")
        self._entries[session_id] = entry
        entry.has_content = len(session) > 0
        entry.evict = partial(self._remove, session_id)
        self._admission.opened_empty(entry)
        if key is not None and key.max_session_sec is not None:
            loop = asyncio.get_running_loop()
            entry.length = loop.call_later(key.max_session_sec, self._remove, session_id)
        self._touch(session_id, entry)
        return session_id

    def _find(self, session_id: str, key: ApiKey | None) -> _Entry:
        entry = self._entries.get(session_id)
        if entry is None or entry.owner != key_name(key):
            raise SessionNotFound("session not found; it may have expired or been closed", param="session_id")
        return entry

    def _idle(self, session_id: str, key: ApiKey | None) -> _Entry:
        entry = self._find(session_id, key)
        if entry.running is not None:
            raise SessionBusy(
                "the session is busy with another call; retry later", param="session_id", retry_after_ms=100
            )
        self._touch(session_id, entry)
        return entry

    def _touch(self, session_id: str, entry: _Entry) -> None:
        if entry.expiry is not None:
            entry.expiry.cancel()
        entry.expiry = asyncio.get_running_loop().call_later(self._ttl_sec, self._remove, session_id)

    def _remove(self, session_id: str) -> None:
        entry = self._entries.pop(session_id)
        self._admission.ended(entry)
        entry.closed = True
        for timer in (entry.expiry, entry.length):
            if timer is not None:
                timer.cancel()
        if entry.running is None:
            self._release(entry)
        elif entry.waiting:
            entry.running.cancel()  # the call releases the session as it ends
        # Otherwise the call ends once its client reads or disconnects. Cancelled while it writes, it could not report
        # CANCELLED to the client.

    def _release(self, entry: _Entry) -> None:
        self._budget.give(entry.held)
        entry.held = 0
        self._hold_images(entry, ())
        entry.slot.release()

    def _charge(self, entry: _Entry, *, anyway: bool = False) -> None:
        """Charge what the session holds now. Raises EngineOverloaded beyond the budget, unless ``anyway`` is set."""
        images = len(entry.session.images) * IMAGE_OVERHEAD_BYTES
        more = len(entry.session) * TOKEN_BYTES + images - entry.held
        new = sum(len(image.data) for image in entry.session.images if not self._holders[image])
        if more + new > 0 and not anyway:
            self._budget.take(more + new)
            self._budget.give(new)
        else:
            self._budget.charge(more)
        entry.held += more
        self._hold_images(entry, entry.session.images)

    def _hold_images(self, entry: _Entry, images: tuple[TokenImage, ...]) -> None:
        for image in images:
            if not self._holders[image]:
                self._budget.charge(len(image.data))
            self._holders[image] += 1
        for image in entry.images:
            self._holders[image] -= 1
            if not self._holders[image]:
                self._budget.give(len(image.data))
                del self._holders[image]
        entry.images = images


def token_sessions(factory: SessionFactory) -> TokenSessions:
    """Create the token sessions of an engine that has started and implements ``HasTokens``."""
    return TokenSessions(
        cast("HasTokens", factory.engine).tokens,
        ttl_sec=factory.config.grpc.session_ttl_sec,
        budget=factory.budget,
        admission=factory.admission,
        check_ready=factory.check_ready,
    )

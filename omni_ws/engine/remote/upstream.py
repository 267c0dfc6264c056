"""The upstream servers: Pool, the servers of one model; Upstream, one server; ContextWindow, the model's context."""

from __future__ import annotations

import asyncio
import difflib
import logging
import socket
import ssl
import struct
import zlib
from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from itertools import count
from typing import Any, Final
from urllib.parse import urlsplit

import httpx

from omni_ws import __version__
from omni_ws.config.loading import is_loopback
from omni_ws.core.json_values import json_or_none
from omni_ws.engine.base import EngineState
from omni_ws.engine.remote.event_stream import (
    EventReader,
    ServerSentEvent,
    refusal,
    retry_after_seconds,
    says_no_tools,
)
from omni_ws.engine.remote.settings import (
    BY_OWNER,
    OLLAMA_CONTEXT,
    Dialect,
    UpstreamSettings,
    context_in_lm_studio,
    context_in_props,
    context_in_ps,
    context_in_show,
    context_listed,
    first_model,
    listed_models,
    opens_thoughts_in_props,
)
from omni_ws.engine.threads import end_tasks
from omni_ws.errors import EngineFailed, OmniError

logger = logging.getLogger(__name__)


# Pool: which upstreams can be used, and which of them gets a request.

#: Seconds before a lost upstream is checked again: doubled each time, up to the longest.
FIRST_BACKOFF: Final = 0.5
LONGEST_BACKOFF: Final = 30.0
#: Seconds before the second try at the same upstream, doubled for each further one.
RETRY_DELAY: Final = 0.2
#: If an upstream's Retry-After exceeds so many seconds, the request fails instead of waiting.
LONGEST_WAIT: Final = 5.0
#: After so many successive checks that time out, an upstream counts as lost; before, it may only be busy.
SLOW_CHECKS: Final = 2
#: Limits for the suggestion of a model in an error: on the length of names, and on the number of models searched.
_MOST_NAME_CHARACTERS: Final = 100
_MOST_MODELS: Final = 1000


class Pool:
    """The upstreams of one part (LLM, ASR or TTS). The pool checks which can be used, and sends each request to one.

    A pool can be started again after ``stop``. With ``reads_context``, checks also request the context of the model.
    """

    def __init__(self, settings: UpstreamSettings, *, reads_context: bool = False) -> None:
        #: The upstreams' name for the model. If the settings have none, it is known after the start.
        self.model = settings.model
        #: Empty unless the pool is running.
        self.upstreams: tuple[Upstream, ...] = ()
        #: The hosts in the upstreams' URLs, except this machine.
        names = [urlsplit(url).hostname or "" for url in settings.urls]
        self.hosts = tuple(dict.fromkeys(name for name in names if not is_loopback(name)))
        self._settings = settings
        self._reads_context = reads_context
        self._started = False
        self._watchers: list[asyncio.Task[None]] = []
        self._troubled: defaultdict[Upstream, asyncio.Event] = defaultdict(asyncio.Event)
        #: The number of successive checks that timed out.
        self._slow_checks: defaultdict[Upstream, int] = defaultdict(int)
        self._turns = count()
        #: The number of the last request of each upstream that has had one.
        self._last_turn: dict[Upstream, int] = {}
        #: The time, by the event loop's clock, until which an upstream has asked to get no requests (Retry-After).
        self._rests_until: defaultdict[Upstream, float] = defaultdict(float)

    @property
    def state(self) -> EngineState:
        """OK while at least one upstream can be used."""
        if not self._started:
            return EngineState.STARTING
        return EngineState.OK if any(one.is_up for one in self.upstreams) else EngineState.UNHEALTHY

    @property
    def context(self) -> int | None:
        """The smallest context that the upstreams report, in tokens; None if none does."""
        return min((one.context for one in self.upstreams if one.is_up and one.context is not None), default=None)

    def describe(self, prefix: str = "") -> tuple[str, ...]:
        """Return a line for each upstream; empty before the start."""
        return tuple(
            f"{prefix}upstream {upstream.name} "
            f"{f'serves {self.model}' if upstream.is_up else f'is lost: {upstream.problem}'}"
            for upstream in (self.upstreams if self._started else ())
        )

    # life

    async def start(self) -> None:
        """Wait until an upstream can be used. Raises EngineFailed after the start time-out, or if waiting is futile."""
        if self._started:
            return
        settings = self._settings
        self.model = settings.model
        self.upstreams = tuple(Upstream(url, settings) for url in settings.urls)
        try:
            await self._wait_for_one(asyncio.get_running_loop().time() + settings.start_timeout)
        except BaseException:
            await self.stop()
            raise
        for upstream in self.upstreams:
            self._watchers.append(asyncio.create_task(self._watch(upstream), name=f"watch {upstream.name}"))
        self._started = True

    async def _wait_for_one(self, deadline: float) -> None:
        backoff, told = FIRST_BACKOFF, ""
        while not await self._look_at_all():
            now = asyncio.get_running_loop().time()
            if now >= deadline:
                raise EngineFailed(f"no upstream can be used: {'; '.join(self._problems())}", fatal=True)
            if (problems := "; ".join(self._problems())) != told:
                logger.info("waiting for an upstream: %s", problems)
                told = problems
            await asyncio.sleep(min(backoff, deadline - now))
            backoff = min(2 * backoff, LONGEST_BACKOFF)

    async def stop(self) -> None:
        """Stop checking the upstreams, and close all connections. Idempotent."""
        self._started = False
        upstreams, self.upstreams = self.upstreams, ()
        watchers, self._watchers = self._watchers, []
        await end_tasks(*watchers)
        for kept in (self._troubled, self._slow_checks, self._last_turn, self._rests_until):
            kept.clear()
        for upstream in upstreams:
            await upstream.close()

    async def _look_at_all(self) -> bool:
        """Check all upstreams; return whether any can be used. Raises EngineFailed if waiting cannot help."""
        failures = await asyncio.gather(*(self._look_at(upstream) for upstream in self.upstreams))
        if self.model is None:
            listed = (model for upstream in self.upstreams if upstream.is_up for model in upstream.models)
            self.model = first_model(listed)
            for upstream in self.upstreams:
                self._judge_model(upstream)
            await asyncio.gather(*(self._read_context(upstream) for upstream in self.upstreams))
        if not any(one.is_up for one in self.upstreams) and all(
            failure is not None and failure.lasting for failure in failures
        ):
            raise EngineFailed(f"no upstream can be used: {'; '.join(self._problems())}", fatal=True)
        return any(one.is_up for one in self.upstreams)

    def _problems(self) -> list[str]:
        return [f"{upstream.name}: {upstream.problem}" for upstream in self.upstreams]

    # health

    async def _watch(self, upstream: Upstream) -> None:
        """Check an upstream periodically, immediately after a failed request, and ever less often while it is lost."""
        backoff = FIRST_BACKOFF
        while True:
            lost = not upstream.is_up
            try:
                async with asyncio.timeout(backoff if lost else self._settings.health_interval):
                    await self._troubled[upstream].wait()
                self._troubled[upstream].clear()
                if not upstream.is_up:
                    continue  # lost just now: give it a moment
            except TimeoutError:
                pass
            await self._look_at(upstream)
            backoff = min(2 * backoff, LONGEST_BACKOFF) if lost else FIRST_BACKOFF

    async def _look_at(self, upstream: Upstream) -> Unusable | None:
        try:
            await upstream.check()
        except Unusable as problem:
            self._slow_checks[upstream] += 1
            if not problem.slow or not upstream.is_up or self._slow_checks[upstream] >= SLOW_CHECKS:
                self._lose(upstream, str(problem))
            return problem
        self._slow_checks[upstream] = 0
        was_up, was_seen = upstream.is_up, upstream.problem != NOT_SEEN
        upstream.set_problem("")
        wrong_model = self._judge_model(upstream, tell=was_up)
        if not was_up and wrong_model is None and was_seen:
            logger.info("upstream %s is back", upstream.name)
        await self._read_context(upstream)
        return wrong_model

    async def _read_context(self, upstream: Upstream) -> None:
        if self._reads_context and upstream.is_up and self.model is not None:
            await upstream.read_context(self.model)

    def _judge_model(self, upstream: Upstream, *, tell: bool = True) -> Unusable | None:
        """Mark an upstream as lost if it lists models but not the configured one; return the problem, or None.

        ``tell``: whether to log the loss.
        """
        if not upstream.is_up or self.model is None or not upstream.models or upstream.serves(self.model):
            return None
        listed = [name[:_MOST_NAME_CHARACTERS] for name in upstream.models[:_MOST_MODELS]]
        near = difflib.get_close_matches(self.model[:_MOST_NAME_CHARACTERS], listed, n=3)
        known = ", ".join(near or listed[:8])
        meant = f"did you mean {known}?" if near else f"it serves {known}"
        problem = Unusable(f"it does not serve {self.model}; {meant}", lasting=True)
        self._lose(upstream, str(problem), tell=tell)
        return problem

    def _lose(self, upstream: Upstream, problem: str, *, tell: bool = True) -> None:
        if tell and upstream.is_up:
            logger.warning("upstream %s is lost: %s", upstream.name, problem)
        upstream.set_problem(problem)

    # requests

    @asynccontextmanager
    async def post(
        self, path: str, body: bytes, *, headers: Mapping[str, str] | None = None
    ) -> AsyncGenerator[UpstreamAnswer, None]:
        """Send a request to an upstream, and yield its response, which is closed at the end of the block.

        A request that an upstream did not process is sent again, up to ``retries`` times. Raises the error for the last
        refusal, and EngineFailed if no upstream can be reached, or if one fails.
        """
        tried: list[Upstream] = []
        for attempt in count():
            upstream = self._choose(tried)
            tried.append(upstream)
            self._last_turn[upstream] = next(self._turns)
            try:
                async with upstream.post(path, body, headers=headers or {}) as answer:
                    yield answer
                    return
            except NotTaken as refused:
                self._note(upstream, refused)
                delay = self._delay_before_next(attempt, tried, refused)
                if delay is None:
                    raise refused.error from None
            except EngineFailed:
                self._troubled[upstream].set()
                raise
            await asyncio.sleep(delay)

    def _choose(self, tried: Sequence[Upstream]) -> Upstream:
        """Return the best upstream that can be used.

        The criteria are, in this order: not in ``tried``, no pause requested (Retry-After), fewest active requests,
        longest time since the last request.
        """
        now = asyncio.get_running_loop().time()
        # If none can be used, upstreams that were lost by this very request may get another chance.
        candidates = [upstream for upstream in self.upstreams if upstream.is_up] or tried
        if not candidates:
            raise EngineFailed("no upstream can be reached")
        return min(
            candidates,
            key=lambda upstream: (
                upstream in tried,
                self._rests_until[upstream] > now,
                upstream.active,
                self._last_turn.get(upstream, -1),
            ),
        )

    def _note(self, upstream: Upstream, refused: NotTaken) -> None:
        if refused.unreachable:
            self._lose(upstream, "it cannot be reached")
            self._troubled[upstream].set()
        elif refused.status == 502:
            self._troubled[upstream].set()
        elif refused.delay is not None:
            self._rests_until[upstream] = asyncio.get_running_loop().time() + refused.delay

    def _delay_before_next(self, attempt: int, tried: Sequence[Upstream], refused: NotTaken) -> float | None:
        """Return the seconds until the request is to be sent again; None if it is not to be sent again."""
        if attempt >= self._settings.retries:
            return None
        now = asyncio.get_running_loop().time()
        if any(
            upstream.is_up and upstream not in tried and self._rests_until[upstream] <= now
            for upstream in self.upstreams
        ):
            return 0.0
        if refused.status == 429 and refused.delay is None:
            return None
        delay = RETRY_DELAY * 2**attempt if refused.delay is None else refused.delay
        return delay if delay <= LONGEST_WAIT else None


class OnUpstreams:
    """Base class of a language model, recogniser or voice whose work is done by upstreams; it has their Pool.

    ``says`` is the beginning of its lines for the operator, such as "speech ".
    """

    name = "remote"

    def __init__(self, settings: UpstreamSettings, *, says: str = "", reads_context: bool = False) -> None:
        #: The name of the model. If the settings have none, it is known after the start.
        self.model = settings.model or self.name
        self.pool = Pool(settings, reads_context=reads_context)
        self.hosts = self.pool.hosts
        self._says = says

    @property
    def state(self) -> EngineState:
        return self.pool.state

    def describe(self) -> tuple[str, ...]:
        return self.pool.describe(self._says)

    async def start(self) -> None:
        """Wait until an upstream can be used. Idempotent. Raises EngineFailed if none can."""
        await self.pool.start()
        self.model = self.pool.model or self.model

    async def stop(self) -> None:
        await self.pool.stop()


# Upstream: a single server.

#: Idle connections are closed after so many seconds, before the server does so, which might lose a request.
_KEEPALIVE_SEC: Final = 2.0
#: Connections are closed with a reset: a server may take an ordinary close for a half-closed connection, and continue
#: its work for nobody. Nothing is lost, since a response was read to its end or is no longer wanted.
_CLOSE_BY_RESET: Final = (socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
#: The limit on the body of an error, in bytes.
_MAX_ERROR_BYTES: Final = 64 * 1024
_ERROR_BODY_SEC: Final = 5.0
#: How long to wait for the end of the body after the last event, so that the connection can be used again.
_LAST_BYTES_SEC: Final = 0.25
#: After so many answers without a thought, text is no longer held back for one.
_WAITS_IN_VAIN: Final = 3
#: The limit on the body of a response about the upstream itself, in bytes: lists of models are long.
_MAX_REPLY_BYTES: Final = 8 * 1024 * 1024
#: How many bytes are inflated at a time, and the parameter of zlib for gzip and zlib data.
_INFLATED_BYTES: Final = 64 * 1024
_ANY_WINDOW: Final = 32 + zlib.MAX_WBITS
#: The exceptions of a connection that is lost before the first byte of a response.
_LOST: Final = (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError)
#: The status codes after which a request may be sent again, because it was not processed.
_RETRYABLE: Final = frozenset({429, 502, 503})


#: The problem of an upstream before its first check.
NOT_SEEN: Final = "not looked at yet"


class NotTaken(Exception):
    """Raised if an upstream did not process a request, so that the request may be sent again.

    ``unreachable``: no connection could be made. ``delay`` is the upstream's Retry-After in seconds, or None.
    """

    def __init__(self, error: OmniError, *, delay: float | None, unreachable: bool, status: int | None) -> None:
        super().__init__(error.message)
        self.error = error
        self.delay = delay
        self.unreachable = unreachable
        self.status = status


class Unusable(Exception):
    """Raised if an upstream cannot be used. ``lasting``: waiting will not help; ``slow``: it may only be busy."""

    def __init__(self, problem: str, *, lasting: bool = False, slow: bool = False) -> None:
        super().__init__(problem)
        self.lasting = lasting
        self.slow = slow


def normalised(url: str) -> str:
    """Return the base URL ``url`` without a final slash; if it has no path, with the path ``/v1``."""
    url = url.rstrip("/")
    return url if urlsplit(url).path else url + "/v1"


class Upstream:
    """One upstream server: its state by the last check, and requests to it.

    ``name`` is the server's address without credentials, for logs. ``active`` is the number of requests in progress.
    """

    def __init__(self, url: str, settings: UpstreamSettings) -> None:
        self.url = normalised(url)
        parts = urlsplit(self.url)
        self.name = parts.netloc.rpartition("@")[2] + parts.path.removesuffix("/v1")
        #: Why it cannot be used; empty if it can.
        self.problem = NOT_SEEN
        self.active = 0
        self.models: tuple[str, ...] = ()
        self.owner = ""
        self.dialect = Dialect.OPENAI
        #: The context of the model, in tokens, if the server reports it; see ``read_context``.
        self.context: int | None = None
        #: Whether its answers include transcripts of the input, as those of omni_ws can.
        self.transcribes = False
        #: Whether its chat template contains the opening tag of thoughts, so that answers contain only the closing tag.
        self.opens_thoughts = False
        self._template_opens_thoughts = False
        self._waited_in_vain = 0
        #: Whether it has refused a request since its model takes no tools. It may be another one after a loss.
        self.refuses_tools = False
        self._settings = settings
        key, key_variable = settings.api_key, settings.key_variable or f"OMNI_WS_{settings.section.upper()}__API_KEY"
        self._where_key = f"{'set' if key is None else 'look at'} {key_variable}"
        self._health: bool = True
        self._listed: list[Mapping[str, Any]] = []
        #: Whether it is Ollama, which the list of models does not show; None before the check.
        self._is_ollama: bool | None = None
        headers = {"User-Agent": f"omni_ws/{__version__}", "Accept-Encoding": "identity"}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        is_secure, ca_file = parts.scheme == "https", None if settings.ca_file is None else str(settings.ca_file)
        self._client = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(None, connect=settings.connect_timeout),
            transport=httpx.AsyncHTTPTransport(
                verify=ssl.create_default_context(cafile=ca_file) if is_secure else False,
                limits=httpx.Limits(
                    max_connections=None, max_keepalive_connections=100, keepalive_expiry=_KEEPALIVE_SEC
                ),
                # No proxies and passwords from the environment: only the configuration decides.
                trust_env=False,
                socket_options=[_CLOSE_BY_RESET],
            ),
            trust_env=False,
        )

    @property
    def is_up(self) -> bool:
        """Whether the upstream can be used, by the last check."""
        return not self.problem

    def set_problem(self, problem: str) -> None:
        """Set the reason why the upstream cannot be used; empty if it can."""
        self.problem = problem
        if problem:
            self.refuses_tools = False

    @property
    def is_local(self) -> bool:
        """Whether the upstream runs on this machine."""
        return is_loopback(urlsplit(self.url).hostname or "")

    async def close(self) -> None:
        await self._client.aclose()

    # health

    async def check(self) -> None:
        """Request the server's health and its list of models, and set what follows from the list. Raises Unusable."""
        try:
            async with asyncio.timeout(self._settings.connect_timeout):
                await self._check_health()
                await self._read_models()
        except (TimeoutError, httpx.TimeoutException):
            raise Unusable(f"no answer within {self._settings.connect_timeout:g} s", slow=True) from None
        except httpx.HTTPError as error:
            raise Unusable(_reason(error)) from None

    async def _ask(self, method: str, url: str, json: object = None) -> tuple[int, object]:
        """Send a request about the upstream itself; return the status and the body's JSON, or None for other bodies.

        Raises Unusable if the body is too long, and the exceptions of httpx.
        """
        body = bytearray()
        async with self._client.stream(method, url, json=json) as response:
            try:
                async for piece in inflated(response):
                    body += piece
                    if len(body) > _MAX_REPLY_BYTES:
                        most = _MAX_REPLY_BYTES >> 20
                        raise Unusable(f"its answer to {urlsplit(url).path} has more than {most} MiB")
            except EngineFailed as error:
                raise Unusable(error.message) from None
        return response.status_code, json_or_none(body) if response.is_success else None

    async def _check_health(self) -> None:
        if not self._health:
            return
        status, _ = await self._ask("GET", self._root + "/health")
        if status >= 500:
            raise Unusable(f"its health is {status}")
        # A server without this route is from now on only checked by its list of models.
        self._health = httpx.codes.is_success(status)

    async def _read_models(self) -> None:
        status, content = await self._ask("GET", self.url + "/models")
        if status == 404 and await self._asks_ollama():
            status, content = await self._ask("GET", self._root + "/api/tags")
        if status in (401, 403):
            raise Unusable(f"it does not accept the key (status {status}): {self._where_key}", lasting=True)
        if not httpx.codes.is_success(status):
            raise Unusable(f"its list of models is {status}", lasting=status == 404)
        listed = listed_models(content)
        if listed is None:
            raise Unusable("its list of models cannot be read: is this an OpenAI-compatible server?", lasting=True)
        self._listed = listed
        self.models = tuple(entry["id"] for entry in listed)
        self.owner = str(listed[0].get("owned_by", "")) if listed else ""
        self.transcribes = bool(listed) and listed[0].get("transcripts") is True
        self.dialect = BY_OWNER.get(self.owner, Dialect.OPENAI)
        if self.dialect is Dialect.OPENAI and await self._asks_ollama():
            self.dialect = Dialect.OLLAMA

    async def _asks_ollama(self) -> bool:
        """Find out whether the server is Ollama. Only the first call sends a request."""
        if self._is_ollama is None:
            _, content = await self._ask("GET", self._root + "/api/version")
            self._is_ollama = isinstance(content, dict) and isinstance(content.get("version"), str)
        return self._is_ollama

    def serves(self, model: str) -> bool:
        """Whether the server lists ``model``. For Ollama, ``model`` may lack the tag (":latest")."""
        return model in self.models or (self.dialect is Dialect.OLLAMA and f"{model}:latest" in self.models)

    async def read_context(self, model: str) -> None:
        """Request the context of ``model``, and set ``context``: to None if the server does not report it.

        If the request fails, nothing changes. From llama.cpp, ``opens_thoughts`` is learnt, too.
        """
        with suppress(TimeoutError, httpx.HTTPError, Unusable):
            async with asyncio.timeout(self._settings.connect_timeout):
                self.context = await self._context(model)

    async def _context(self, model: str) -> int | None:
        listed = next((context_listed(entry) for entry in self._listed if entry["id"] == model), None)
        match self.dialect:
            case Dialect.LLAMA_CPP:
                _, props = await self._ask("GET", self._root + "/props")
                self._template_opens_thoughts = opens_thoughts_in_props(props)
                self.opens_thoughts = self.opens_thoughts or self._template_opens_thoughts
                return context_in_props(props) or listed
            case Dialect.LM_STUDIO:
                _, about = await self._ask("GET", f"{self._root}/api/v0/models/{model}")
                return context_in_lm_studio(about)
            case Dialect.OLLAMA:
                _, running = await self._ask("GET", self._root + "/api/ps")
                if (context := context_in_ps(running, model)) is not None:
                    return context
                _, shown = await self._ask("POST", self._root + "/api/show", json={"model": model})
                return context_in_show(shown) or OLLAMA_CONTEXT
        return listed

    def note_thoughts(self, unopened: bool, *, waited: bool) -> None:
        """Learn from a complete answer whether the model's answers have closing tags of thoughts without opening tags.

        ``unopened``: this answer had such a tag; ``waited``: its text was held back in case of such a tag. After
        several successive answers without such a tag, text is not held back any more.
        """
        if unopened:
            self.opens_thoughts, self._waited_in_vain = True, 0
        elif waited and self.opens_thoughts and not self._template_opens_thoughts:
            self._waited_in_vain += 1
            if self._waited_in_vain == _WAITS_IN_VAIN:
                self.opens_thoughts, self._waited_in_vain = False, 0

    @property
    def _root(self) -> str:
        return self.url.removesuffix("/v1")

    # requests

    @asynccontextmanager
    async def post(self, path: str, body: bytes, *, headers: Mapping[str, str]) -> AsyncGenerator[UpstreamAnswer, None]:
        """Send a request, and yield the response if its status is 200; the end of the block closes the response.

        Raises NotTaken, the error for the upstream's refusal, or EngineFailed if there is no response.
        """
        self.active += 1
        try:
            response = await self._respond(path, body, headers)
            try:
                yield response
            finally:
                await response.aclose()
        finally:
            self.active -= 1

    async def _respond(self, path: str, body: bytes, headers: Mapping[str, str]) -> UpstreamAnswer:
        """Send a request; send it again if it was lost with a connection that had been used before.

        A server may close an idle connection while a request is on its way (RFC 9112, section 9.5).
        """
        deadline = asyncio.get_running_loop().time() + self._settings.first_byte_timeout
        while (response := await self._send(path, body, headers, deadline=deadline)) is None:
            logger.info("upstream %s: it closed a connection that was used again", self.name)
        if response.status_code == 200:
            return UpstreamAnswer(response, self, deadline=deadline, idle=self._settings.idle_timeout)
        raise await self._refusal(response)

    async def _send(
        self, path: str, body: bytes, headers: Mapping[str, str], *, deadline: float
    ) -> httpx.Response | None:
        """Send a request once; return None if it was lost with a connection that had been used before."""
        is_new = False

        async def note(event: str, _: Mapping[str, Any]) -> None:
            nonlocal is_new
            is_new |= event.startswith("connection.connect_")

        request = self._client.build_request(
            "POST",
            f"{self.url}/{path}",
            content=body,
            headers={"Content-Type": "application/json", **headers},
            extensions={"trace": note},
        )
        try:
            async with asyncio.timeout_at(deadline):
                return await self._client.send(request, stream=True)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            failed = EngineFailed("the upstream cannot be reached")
            logger.warning("upstream %s: %s", self.name, _reason(error))
            raise NotTaken(failed, delay=None, unreachable=True, status=None) from None
        except TimeoutError:
            logger.warning("upstream %s: no answer within %g s", self.name, self._settings.first_byte_timeout)
            raise EngineFailed(
                f"the upstream did not answer within {self._settings.first_byte_timeout:g} seconds"
            ) from None
        except httpx.HTTPError as error:
            if not is_new and isinstance(error, _LOST):
                return None
            logger.warning("upstream %s: %s", self.name, _reason(error))
            raise EngineFailed("the upstream broke the connection before its answer") from None

    async def _refusal(self, response: httpx.Response) -> Exception:
        status, retry_after = response.status_code, response.headers.get("retry-after")
        try:
            body = await _error_body(response)
        finally:
            await response.aclose()
        self.refuses_tools = self.refuses_tools or says_no_tools(body)
        error = refusal(
            status,
            body,
            retry_after=retry_after,
            upstream=self.name,
            log_content=self._settings.log_content,
            where_key=self._where_key,
        )
        if status not in _RETRYABLE:
            return error
        return NotTaken(error, delay=retry_after_seconds(retry_after), unreachable=False, status=status)


class UpstreamAnswer:
    """A response whose body is still arriving; ``aclose`` drops the connection if the body is incomplete.

    ``deadline``, on the event loop's clock, is for the first output; ``idle`` is the time-out after it, in seconds.
    """

    def __init__(self, response: httpx.Response, server: Upstream, *, deadline: float, idle: float) -> None:
        self.server = server
        self.upstream = server.name
        self._begun = self._shows_work = True
        self.content_type: str = response.headers.get("content-type", "")
        self._response = response
        self._deadline = deadline
        self._idle = idle

    def note(self, *, begun: bool = True, shows_work: bool = True) -> None:
        """Note what kind of data the body had so far; this determines how long ``chunks`` waits for more.

        ``begun``: the answer has begun, so that the idle timeout applies instead of the time-out for the first output.
        ``shows_work``: the last bytes were part of an answer, rather than a comment that keeps the connection open.
        """
        self._begun, self._shows_work = begun, shows_work

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the body as it arrives. Raises EngineFailed if it is cut off, or if nothing arrives for too long."""
        loop = asyncio.get_running_loop()
        pieces = inflated(self._response)
        deadline = self._deadline
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    piece = await anext(pieces)
            except StopAsyncIteration:
                return
            except TimeoutError:
                logger.warning("upstream %s fell silent", self.upstream)
                where = "in the middle of" if self._begun else "before"
                raise EngineFailed(f"the upstream fell silent {where} its answer") from None
            except httpx.HTTPError as error:
                logger.warning("upstream %s: %s", self.upstream, _reason(error))
                raise EngineFailed("the upstream broke off in the middle of its answer") from None
            yield piece
            if self._begun and self._shows_work:
                deadline = loop.time() + self._idle

    async def events(self) -> AsyncGenerator[tuple[list[ServerSentEvent], bool], None]:
        """Yield, for each piece of the body, the events that are complete, and whether part of a further event arrived.

        The end of the body may complete an event, too. Raises the errors of ``chunks``.
        """
        reader = EventReader()
        async with aclosing(self.chunks()) as chunks:
            async for chunk in chunks:
                yield reader.feed(chunk), reader.grows
        if last := reader.finish():
            yield last, False

    async def finish(self, events: AsyncGenerator[Any, None]) -> None:
        """After the last event, wait briefly for the end of the body, which is read through ``events``."""
        with suppress(TimeoutError, EngineFailed):
            async with asyncio.timeout(_LAST_BYTES_SEC):
                async for _ in events:
                    pass

    async def aclose(self) -> None:
        await self._response.aclose()


async def inflated(response: httpx.Response) -> AsyncGenerator[bytes, None]:
    """Yield the body in pieces of bounded size. A body that the server has compressed unasked is inflated.

    A compressed kilobyte may expand to a megabyte. Raises EngineFailed for a body that cannot be inflated.
    """
    coding = response.headers.get("content-encoding", "identity").strip().lower()
    if coding in ("identity", ""):
        async for piece in response.aiter_raw():
            yield piece
        return
    if coding not in ("gzip", "x-gzip", "deflate"):
        raise EngineFailed("the upstream's answer is compressed in a way that is not read")
    stream, is_first = zlib.decompressobj(_ANY_WINDOW), True
    async for piece in response.aiter_raw():
        while piece:
            try:
                out = stream.decompress(piece, _INFLATED_BYTES)
            except zlib.error:
                if not is_first:
                    raise EngineFailed("the upstream's answer cannot be inflated") from None
                stream, is_first = zlib.decompressobj(-zlib.MAX_WBITS), False  # "deflate" without its header
                continue
            is_first = False
            piece = stream.unconsumed_tail
            if stream.eof and (piece := stream.unused_data):
                stream = zlib.decompressobj(_ANY_WINDOW)
            if out:
                yield out
                await asyncio.sleep(0)


async def _error_body(response: httpx.Response) -> bytes:
    body = bytearray()
    with suppress(TimeoutError, httpx.HTTPError, EngineFailed):
        async with asyncio.timeout(_ERROR_BODY_SEC):
            async for piece in inflated(response):
                body += piece
                if len(body) > _MAX_ERROR_BYTES:
                    break
    return bytes(body)


def _reason(error: Exception) -> str:
    """Return a description of an error for the operator."""
    name = type(error).__name__
    return f"{name}: {error}" if str(error) else name


# How much of the history to send to an upstream with a limited context.

#: The assumed tokens per byte of UTF-8 until an upstream has reported a count: more than in most texts.
_FIRST_RATE: Final = 0.3
#: Counts of prompts of fewer bytes are ignored, since they depend more on the chat template than on the text.
_LEAST_COUNTED_BYTES: Final = 200
#: The factor by which an estimate may be wrong.
_MARGIN: Final = 1.05
#: The number of tokens that are kept free for an answer without a limit.
_ANSWER_RESERVE: Final = 256
#: At most so many attempts for one request; each has fewer turns than the one before, the last has none.
MOST_TRIES: Final = 5


class ContextWindow:
    """The context of a model in tokens, and an estimate of the tokens per byte of text.

    The context is known from the upstreams' reports and refusals, the estimate from their token counts for earlier
    prompts.
    """

    def __init__(self) -> None:
        self._told: int | None = None
        self._learnt: int | None = None
        self._rate = _FIRST_RATE

    @property
    def limit(self) -> int | None:
        """The context in tokens, for prompt and answer together; None while it is unknown."""
        known = [limit for limit in (self._told, self._learnt) if limit is not None]
        return min(known, default=None)

    def tell(self, limit: int | None) -> None:
        """Set the context that the upstreams report now. If it has changed, a limit learnt from refusals is dropped."""
        if limit != self._told:
            self._told, self._learnt = limit, None

    def count(self, tokens: int, size: int) -> None:
        """Learn from an upstream's count of the tokens in a text prompt of ``size`` bytes.

        Ignored for a short prompt, and for one that fills the context, which the upstream may have cut.
        """
        cut = self.limit is not None and tokens > 0.9 * self.limit  # Ollama cuts, and counts what is left
        if size >= _LEAST_COUNTED_BYTES and not cut:
            self._rate = tokens / size

    def refuse(self, limit: int | None, tokens: int | None, size: int) -> None:
        """Learn from the refusal of a prompt of ``size`` bytes: the context, and the prompt's tokens, if reported."""
        if limit is not None:
            self._learnt = limit
        if tokens is not None and size >= _LEAST_COUNTED_BYTES:
            self._rate = tokens / size

    def left_out(self, turns: Sequence[int], *, fixed: int, answer: int | None) -> int:
        """Return how many of the oldest turns have to be dropped.

        ``turns`` are the sizes of the turns, ``fixed`` is the size of everything else in the prompt, both in bytes;
        ``answer`` is the limit on the answer in tokens. The result is 0 while the context is unknown.
        """
        if self.limit is None:
            return 0
        room = self.limit - min(answer or _ANSWER_RESERVE, self.limit // 2)
        size = fixed + sum(turns)
        for left_out, turn in enumerate(turns):
            if size * self._rate * _MARGIN <= room:
                return left_out
            size -= turn
        return len(turns)

    def left_out_next(self, tried: int, turns: Sequence[int], *, fixed: int, answer: int | None, attempt: int) -> int:
        """Return how many of the oldest turns to drop after a prompt without ``tried`` turns was refused.

        ``attempt`` is the number of the refused attempt, counted from 1; for the other arguments see ``left_out``.
        """
        if attempt >= MOST_TRIES - 1:
            return len(turns)
        half = tried + max(1, (len(turns) - tried) // 2)
        estimated = self.left_out(turns, fixed=fixed, answer=answer)
        return max(tried + 1, estimated) if self.limit is not None and estimated > tried else half

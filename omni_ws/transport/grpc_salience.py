"""The gRPC port: salience.v1, which offers token sessions, and the standard services for health and reflection."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import os
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final, NoReturn, TypeAlias, TypeVar, cast
from urllib.parse import unquote

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from omni_ws.config.keys import ApiKey
from omni_ws.config.model import GrpcConfig
from omni_ws.core.quota import ByteBudget, Share
from omni_ws.core.token_session import TokenImage, TokenRanges
from omni_ws.engine.base import MAX_TOP_LOGPROBS, TokenOutput, TokenSampling, TokenStop
from omni_ws.errors import (
    EngineFailed,
    EngineOverloaded,
    InvalidValue,
    ModelNotFound,
    OmniError,
    SessionTimeout,
    ShuttingDown,
)
from omni_ws.generated import salience_pb2, salience_pb2_grpc
from omni_ws.generated import salience_pb2 as messages
from omni_ws.generated.salience_pb2_grpc import SalienceServicer
from omni_ws.metrics import Metrics
from omni_ws.service import (
    identified,
    unexpected,
)
from omni_ws.service.conversation.configuration import ServedModel
from omni_ws.service.observing.accounts import write_line
from omni_ws.service.sessions.admission import SLOT_RETRY_MS
from omni_ws.service.tokens import (
    TokenCall,
    TokensDone,
    TokenSessions,
)
from omni_ws.transport.http.access import Authenticator


def has_more_fields(message: bytes, limit: int) -> bool:
    """Return whether ``message`` has more than ``limit`` fields, not counting those of nested messages.

    Call it before parsing: a parser turns a field of two bytes into an object of dozens of bytes. Counting stops at a
    truncated or malformed field, as a parser does.
    """
    position = 0
    try:
        for _ in range(limit + 1):
            if position >= len(message):
                return False
            tag, position = _varint(message, position)
            match tag & 7:
                case 0:
                    _, position = _varint(message, position)
                case 1:
                    position += 8
                case 2:
                    size, position = _varint(message, position)
                    position += size
                case 3 | 4:  # start or end of a group, whose fields count like the others
                    pass
                case 5:
                    position += 4
                case _:
                    return False
    except IndexError:
        return False
    return True


def _varint(message: bytes, position: int) -> tuple[int, int]:
    """Return the varint at ``position`` and the position after it.

    Raises IndexError if the message ends within it, or if it has more than ten bytes.
    """
    value = 0
    for shift in range(0, 70, 7):
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise IndexError("a varint has more than ten bytes")


Answer = TypeVar("Answer")
CallContext: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

#: The most ranges, stop tokens or images in a call. They are checked on the event loop.
MAX_ENTRIES: Final = 16_384

_REASONS: Final = {
    TokenStop.EOS: messages.GenerateDone.FINISH_REASON_EOS,
    TokenStop.LENGTH: messages.GenerateDone.FINISH_REASON_LENGTH,
    TokenStop.CANCELLED: messages.GenerateDone.FINISH_REASON_CANCELLED,
}


class Salience(SalienceServicer):
    """The servicer of salience.v1: answers its six calls.

    Calls are refused until ``begin``, which creates the token sessions: an engine supports them only once it has
    started. ``model`` returns the served model; it is called for each new session, since an engine may learn the
    model's name late.
    """

    def __init__(
        self,
        make_sessions: Callable[[], TokenSessions],
        authenticator: Authenticator,
        model: Callable[[], ServedModel],
    ) -> None:
        self._make_sessions = make_sessions
        self._begun: TokenSessions | None = None
        self._authenticator = authenticator
        self._model = model
        self._refuses_calls = False

    async def OpenSession(  # named by the protocol
        self, request: messages.OpenSessionRequest, context: CallContext
    ) -> messages.OpenSessionResponse:
        def open_session(key: ApiKey | None) -> messages.OpenSessionResponse:
            if not request.model:
                raise ModelNotFound("model is required", param="model")
            self._model().check(request.model)
            session_id = self._sessions.open(key, client=peer_address(context.peer()))
            return messages.OpenSessionResponse(
                session_id=session_id, max_model_len=self._sessions.engine.max_model_len
            )

        return await self._answer(context, open_session)

    async def CloseSession(
        self, request: messages.CloseSessionRequest, context: CallContext
    ) -> messages.CloseSessionResponse:
        def close(key: ApiKey | None) -> messages.CloseSessionResponse:
            self._sessions.close(request.session_id, key)
            return messages.CloseSessionResponse()

        return await self._answer(context, close)

    async def ForkSession(
        self, request: messages.ForkSessionRequest, context: CallContext
    ) -> messages.ForkSessionResponse:
        def fork(key: ApiKey | None) -> messages.ForkSessionResponse:
            child = self._sessions.fork(
                request.session_id, key, at=request.at_position, client=peer_address(context.peer())
            )
            return messages.ForkSessionResponse(session_id=child)

        return await self._answer(context, fork)

    async def GetReadoutManifest(
        self, request: messages.GetReadoutManifestRequest, context: CallContext
    ) -> messages.ReadoutManifest:
        def manifest(key: ApiKey | None) -> messages.ReadoutManifest:
            known = self._sessions.engine.readout_manifest
            return messages.ReadoutManifest(
                concepts=known.concepts, layers=known.layers, hidden_size=known.hidden_size, dtype=known.dtype
            )

        return await self._answer(context, manifest)

    async def DumpSession(
        self, request: messages.DumpSessionRequest, context: CallContext
    ) -> messages.DumpSessionResponse:
        def dump(key: ApiKey | None) -> messages.DumpSessionResponse:
            return messages.DumpSessionResponse(tokens=self._sessions.dump(request.session_id, key))

        return await self._answer(context, dump)

    async def Generate(
        self, request: messages.GenerateRequest, context: CallContext
    ) -> AsyncIterator[messages.GenerateEvent]:
        try:
            key = self.key(context)
            events = self._sessions.generate(request.session_id, key, token_call(request, self._sessions))
            async with aclosing(events):
                async for event in events:
                    yield _done(event) if isinstance(event, TokensDone) else _token(event)
        except OmniError as error:
            await refuse(context, error)
        except Exception as error:
            await refuse(context, unexpected(error, where="a token session"))

    @property
    def _sessions(self) -> TokenSessions:
        if self._begun is None:
            raise EngineOverloaded("the engine is still starting; retry later", retry_after_ms=SLOT_RETRY_MS)
        return self._begun

    def begin(self) -> None:
        """Create the token sessions and accept calls from now on. Call it once the engine has started."""
        self._begun = self._make_sessions()

    def refuse_calls(self) -> None:
        """Refuse new calls with UNAVAILABLE from now on. Running calls continue."""
        self._refuses_calls = True

    async def wait_idle(self) -> None:
        """Wait until no session is generating."""
        if self._begun is not None:
            await self._begun.wait_idle()

    def close_sessions(self) -> None:
        """Close all sessions, so that they release their slots. Call it when no calls arrive any more."""
        if self._begun is not None:
            self._begun.close_all()

    def key(self, context: CallContext) -> ApiKey | None:
        """Authenticate a call. Returns its key; None if no keys are configured.

        Raises Unauthenticated and ShuttingDown.
        """
        metadata = {name: value for name, value in context.invocation_metadata() or ()}
        authorization = metadata.get("authorization")
        if isinstance(authorization, bytes):
            authorization = authorization.decode("latin-1")
        key = self._authenticator.authenticate_header(authorization)
        if self._refuses_calls:
            raise ShuttingDown("the server is shutting down", retry_after_ms=SLOT_RETRY_MS)
        return key

    async def _answer(self, context: CallContext, call: Callable[[ApiKey | None], Answer]) -> Answer:
        try:
            return call(self.key(context))
        except OmniError as error:
            await refuse(context, error)
        except Exception as error:
            await refuse(context, unexpected(error, where="a token session"))


def peer_address(peer: str) -> str:
    """Return the address and port in gRPC's name of a peer, such as ``ipv4:192.0.2.1:4711``; "" for other peers.

    Brackets of IPv6 addresses are percent-encoded: ``ipv6:%5B2001:db8::1%5D:4711``.
    """
    kind, _, address = unquote(peer).partition(":")
    return address if kind in ("ipv4", "ipv6") else ""


def token_call(request: messages.GenerateRequest, sessions: TokenSessions) -> TokenCall:
    """Translate a request to a TokenCall. Raises InvalidValue, naming the field, if no session accepts a value."""
    if request.logprob_top_k > MAX_TOP_LOGPROBS:
        raise InvalidValue(f"logprob_top_k must be at most {MAX_TOP_LOGPROBS}", param="logprob_top_k")
    for param in ("logprobs_ranges", "readout_ranges", "stop_token_ids", "images"):
        if len(getattr(request, param)) > MAX_ENTRIES:
            raise InvalidValue(f"at most {MAX_ENTRIES} entries in {param}", param=param)
    return TokenCall(
        tokens=request.append_tokens,
        offset=request.offset,
        truncating=request.truncating,
        images=tuple(_images(request.images)),
        max_tokens=request.max_tokens,
        sampling=_sampling(request, sessions.engine.vocabulary_size),
        logprob_ranges=_ranges(request.logprobs_ranges, "logprobs_ranges"),
        logprob_top_k=request.logprob_top_k,
        readout_ranges=_ranges(request.readout_ranges, "readout_ranges"),
        priority=request.priority,
    )


def _images(attachments: Iterable[messages.ImageAttachment]) -> Iterable[TokenImage]:
    for index, one in enumerate(attachments):
        if not one.mime.lower().startswith("image/"):
            raise InvalidValue(f"expected an image media type, got {one.mime[:64]!r}", param=f"images[{index}].mime")
        yield TokenImage(one.bytes, one.mime, one.pad_range_start, one.pad_range_end)


def _ranges(ranges: Iterable[messages.PositionRange], param: str) -> TokenRanges:
    return TokenRanges(((one.start, one.end) for one in ranges), param=param)


def _sampling(request: messages.GenerateRequest, vocabulary: int) -> TokenSampling:
    temperature = request.temperature or 1.0
    top_p = request.top_p or 1.0
    if not (math.isfinite(temperature) and temperature > 0):
        raise InvalidValue("temperature must be a positive number, or 0 for 1.0", param="temperature")
    if not 0 < top_p <= 1:
        raise InvalidValue("top_p must be greater than 0 and at most 1, or 0 for 1.0", param="top_p")
    stops = frozenset(request.stop_token_ids)
    if stops and max(stops) >= vocabulary:
        raise InvalidValue(f"token ids must be less than {vocabulary}", param="stop_token_ids")
    return TokenSampling(temperature=temperature, top_p=top_p, top_k=request.top_k, stop_token_ids=stops)


def _token(output: TokenOutput) -> messages.GenerateEvent:
    token = messages.Token(
        id=output.id,
        position=output.position,
        is_prefill=output.is_prefill,
        sampled_logprob=output.logprob,
        has_sampled_logprob=output.logprob is not None,
    )
    if len(output.readout):
        token.readout.extend(output.readout)
    for one, logprob in output.logprobs:
        token.logprobs.add(id=one, logprob=logprob)
    return messages.GenerateEvent(token=token)


def _done(event: TokensDone) -> messages.GenerateEvent:
    return messages.GenerateEvent(
        done=messages.GenerateDone(
            prompt_tokens=event.prompt_tokens,
            completion_tokens=event.completion_tokens,
            total_tokens=event.prompt_tokens + event.completion_tokens,
            finish_reason=_REASONS[event.reason],
        )
    )


# How messages are read.

#: Seconds after which a message that is still incomplete counts as slow; see MessageIntake.
PROMPT_SEC: Final = 0.5
#: Time-out of the message of a call without a key. Longer than the event loop of a loaded server is ever blocked.
KEYLESS_SEC: Final = 5.0
#: Concurrent calls without a key (health checks and reflection), counted apart from other calls.
MAX_KEYLESS_CALLS: Final = 64
#: Messages up to this size are not charged: a call takes as much anyway, and closing a session must be possible when
#: the budget is exhausted.
SMALL_BYTES: Final = 64 * 1024
#: Fields of a message that is not small. 64 MiB can hold 32 million fields, which take seconds and gigabytes to parse.
MAX_FIELDS: Final = 65_536


class MessageIntake(grpc.aio.ServerInterceptor):
    """An interceptor that bounds the memory and the time for receiving the messages of calls.

    It authenticates calls of ``service`` before it reads their message, and charges a message of more than
    ``SMALL_BYTES`` to ``budget`` until the call ends. It refuses calls beyond ``max_calls`` at a time.

    gRPC assembles messages internally and reports neither the length of a message nor how much of it has arrived. But
    it buffers at most 64 KiB of a message that is not being read. The interceptor therefore limits how many messages
    are read simultaneously: as many as fit into ``budget`` if each has ``max_message_bytes``. Half of these places are
    for fast messages: a call waits for such a place, and leaves it after at most ``PROMPT_SEC``. The other half are
    for messages that take longer, each for up to ``timeout_sec``; if none of them is free, the slow message is refused.

    Calls of other services, such as health checks, need no key. Their messages time out after ``KEYLESS_SEC``.
    """

    def __init__(
        self,
        *,
        service: str,
        check_key: Callable[[CallContext], object],
        budget: ByteBudget,
        max_message_bytes: int,
        timeout_sec: float,
        max_calls: int,
    ) -> None:
        self._prefix = f"/{service}/"
        self._check_key = check_key
        self._budget = budget
        self._timeout_sec = timeout_sec
        self._max_calls = max_calls
        slots = max(1, budget.capacity // (2 * max_message_bytes))
        self._prompt = asyncio.Semaphore(slots)
        self._slow = asyncio.Semaphore(slots)
        #: The number of current calls without a key, and with one.
        self._calls = [0, 0]
        #: Never cancelled, since gRPC writes into the buffer of a read until the call ends, which ends the read too.
        self._reading: set[asyncio.Task[Any]] = set()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        has_key = handler_call_details.method.startswith(self._prefix)
        # Registered as streaming requests, calls arrive here before their message does.
        if handler.response_streaming:

            async def stream(_: object, context: Any) -> AsyncIterator[Any]:
                with self._call(has_key) as share:
                    if handler.request_streaming:
                        events = handler.stream_stream(self._read_requests(context, handler), context)
                    else:
                        request = await self._read_request(context, handler, share, has_key=has_key)
                        events = handler.unary_stream(request, context)
                    if inspect.isawaitable(events):  # a handler that writes to the context itself
                        await events
                        return
                    async with aclosing(events):
                        async for event in events:
                            yield event

            return grpc.stream_stream_rpc_method_handler(stream, None, handler.response_serializer)

        async def answer(_: object, context: Any) -> Any:
            with self._call(has_key) as share:
                request = await self._read_request(context, handler, share, has_key=has_key)
                return await handler.unary_unary(request, context)

        return grpc.stream_unary_rpc_method_handler(answer, None, handler.response_serializer)

    @contextmanager
    def _call(self, has_key: bool) -> Iterator[Share]:
        share = Share(self._budget)
        self._calls[has_key] += 1
        try:
            yield share
        finally:
            self._calls[has_key] -= 1
            share.resize(0)

    async def _read_request(self, context: CallContext, handler: Any, share: Share, *, has_key: bool) -> Any:
        try:
            if has_key:
                self._check_key(context)
            self._check_room(has_key)
            message = await (self._read_message(context) if has_key else self._read_keyless_message(context))
            if message is grpc.aio.EOF:
                raise InvalidValue("the call has no message")
            if len(message) > SMALL_BYTES:
                share.resize(len(message))
                if has_more_fields(message, MAX_FIELDS):
                    raise InvalidValue(f"at most {MAX_FIELDS} fields per message; pack append_tokens into one")
            try:
                return handler.request_deserializer(message)
            except DecodeError:
                raise InvalidValue("the message cannot be decoded as the request of this call") from None
        except OmniError as error:
            share.resize(0)
            await refuse(context, error)

    def _check_room(self, has_key: bool) -> None:
        """Raise EngineOverloaded if there are more concurrent calls than the limit allows."""
        most = self._max_calls if has_key else MAX_KEYLESS_CALLS
        if self._calls[has_key] > most:
            raise EngineOverloaded(f"at most {most} concurrent calls; retry later", retry_after_ms=SLOT_RETRY_MS)

    async def _read_message(self, context: CallContext) -> Any:
        async with self._prompt:
            reading = self._read(context)
            await asyncio.wait({reading}, timeout=PROMPT_SEC)
        if not reading.done():
            if self._slow.locked():
                raise EngineOverloaded(
                    "too many calls are still sending their message; retry later", retry_after_ms=SLOT_RETRY_MS
                )
            async with self._slow:
                await asyncio.wait({reading}, timeout=self._timeout_sec)
        return self._result(reading, self._timeout_sec)

    async def _read_keyless_message(self, context: CallContext) -> Any:
        reading = self._read(context)
        await asyncio.wait({reading}, timeout=KEYLESS_SEC)
        return self._result(reading, KEYLESS_SEC)

    async def _read_requests(self, context: CallContext, handler: Any) -> AsyncGenerator[Any, None]:
        """Yield the messages of a streaming call without a key, until a message times out."""
        try:
            self._check_room(has_key=False)
        except EngineOverloaded as error:
            await refuse(context, error)
        try:
            while (message := await self._read_keyless_message(context)) is not grpc.aio.EOF:
                yield handler.request_deserializer(message)
        except SessionTimeout:
            return

    def _read(self, context: CallContext) -> asyncio.Task[Any]:
        reading: asyncio.Task[Any] = asyncio.create_task(context.read(), name="gRPC message")
        self._reading.add(reading)
        reading.add_done_callback(self._read_done)
        return reading

    def _read_done(self, reading: asyncio.Task[Any]) -> None:
        self._reading.discard(reading)
        if not reading.cancelled():
            reading.exception()  # retrieved, so that it is not logged: the call has ended

    @staticmethod
    def _result(reading: asyncio.Task[Any], limit: float) -> Any:
        if not reading.done():
            raise SessionTimeout(f"the message was incomplete after {limit:g} seconds")
        return reading.result()


# How calls are refused.

#: Trailing metadata: the code in the specification's table of errors, and the time to wait before a retry.
CODE_METADATA: Final = "omni-error-code"
RETRY_METADATA: Final = "retry-after-ms"


async def refuse(context: CallContext, error: OmniError) -> NoReturn:
    """End the call with the status of ``error``, by raising gRPC's own exception."""
    identified(error, where="a token call")
    name = error.wire.grpc_status or "INTERNAL"
    if isinstance(error, EngineFailed) and error.fatal:
        name = "UNAVAILABLE"  # the engine restarts, and the session is not lost
    message = f"{error.param}: {error.message}" if error.param else error.message
    metadata = [(CODE_METADATA, error.code)]
    if error.retry_after_ms is not None:
        metadata.append((RETRY_METADATA, str(error.retry_after_ms)))
    await context.abort(grpc.StatusCode[name], message, tuple(metadata))


HEALTH_SERVICE: Final = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
SERVICE: Final = salience_pb2.DESCRIPTOR.services_by_name["Salience"].full_name
#: Grace period of running calls when the server closes.
CLOSE_TIMEOUT_SEC: Final = 1.0


class GrpcListener:
    """A gRPC server that listens on a port: accepts calls, drains and closes."""

    def __init__(self, server: grpc.aio.Server, port: int, servicer: Salience, health: Health) -> None:
        #: The port that was bound, even if port 0 was asked for.
        self.port = port
        self._servicer = servicer
        self._server = server
        self._health = health
        #: Grace period of running calls when the server closes, in seconds.
        self._close_timeout = CLOSE_TIMEOUT_SEC
        #: The stop that a drain began.
        self._stopping: asyncio.Future[None] | None = None

    def hurry(self, timeout: float) -> None:
        """Set how long ``close`` waits for running calls, in seconds. Called after a second signal to stop."""
        self._close_timeout = timeout

    def begin(self) -> None:
        """Accept calls from now on. Call it once the engine has started."""
        self._servicer.begin()
        self._health.set_serving(True)

    async def drain(self, timeout: float) -> None:
        """Refuse new calls, let running calls finish within ``timeout`` seconds, then stop and close all sessions."""
        self._health.set_serving(False)
        self._servicer.refuse_calls()
        grace: float | None = self._close_timeout
        try:
            async with asyncio.timeout(timeout):
                await self._servicer.wait_idle()
        except TimeoutError:
            grace = None
        # Not before: a call that arrives while gRPC stops fails with CANCELLED instead of UNAVAILABLE. The grace period
        # is short, because calls that watch health never end by themselves.
        self._stopping = asyncio.ensure_future(self._server.stop(grace))
        # A second signal may cancel the drain. Were gRPC's stop cancelled, each later one would be, too.
        await asyncio.shield(self._stopping)
        self._servicer.close_sessions()

    async def close(self) -> None:
        """Stop and close all sessions, even if a drain is under way.

        Running calls have ``CLOSE_TIMEOUT_SEC`` to finish, or the time set by ``hurry``.
        """
        await self._server.stop(self._close_timeout)
        if self._stopping is not None:
            await self._stopping
        self._servicer.close_sessions()


@asynccontextmanager
async def listen(
    servicer: Salience,
    *,
    host: str,
    port: int,
    settings: GrpcConfig,
    max_connections: int,
    budget: ByteBudget,
    metrics: Metrics,
    credentials: grpc.ServerCredentials | None = None,
) -> AsyncIterator[GrpcListener]:
    """Serve gRPC while the block runs. Calls are refused until ``GrpcListener.begin``.

    Raises OSError, with advice, if the port cannot be bound. Without ``credentials``, there is no TLS.
    """
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    advice = "stop the process that uses the port, or choose another with --grpc-port (0: any)"
    try:
        _try_port(host, port)
    except OSError as error:
        raise OSError(f"gRPC cannot listen on {address}, {error.strerror}: {advice}") from error
    intake = MessageIntake(
        service=SERVICE,
        check_key=servicer.key,
        budget=budget,
        max_message_bytes=settings.max_message_bytes,
        timeout_sec=settings.message_timeout_sec,
        max_calls=max_connections,
    )
    server = grpc.aio.server(
        interceptors=[CallAccounts(metrics, service=SERVICE), intake],
        options=[
            ("grpc.max_allowed_incoming_connections", max_connections),
            ("grpc.max_concurrent_streams", max_connections),
            ("grpc.max_receive_message_length", settings.max_message_bytes),
            # With it gRPC would buffer megabytes of messages that nothing reads.
            ("grpc.http2.bdp_probe", 0),
            ("grpc.max_send_message_length", -1),
            # A port in use is an error; by default it would be shared.
            ("grpc.so_reuseport", 0),
        ],
    )
    salience_pb2_grpc.add_SalienceServicer_to_server(servicer, server)
    health = Health((SERVICE,))
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    reflection.enable_server_reflection((SERVICE, HEALTH_SERVICE, reflection.SERVICE_NAME), server)
    try:
        if credentials is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise OSError(f"gRPC cannot listen on {address}: {advice}") from error
    await server.start()
    running = GrpcListener(server, bound, servicer, health)
    try:
        yield running
    finally:
        await running.close()


def _try_port(host: str, port: int) -> None:
    """Raise OSError, with the reason, if ``port`` cannot be bound.

    gRPC itself raises an error without the reason, and writes a line to the log.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        if os.name == "posix":  # as servers set it; elsewhere it would share the port
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)


def tls(certificate: Path, key: Path | None) -> grpc.ServerCredentials:
    """Load TLS credentials from PEM files. Without ``key``, the certificate's file holds the private key too.

    Raises OSError for a file that cannot be read.
    """
    chain = certificate.read_bytes()
    return grpc.ssl_server_credentials([(chain if key is None else key.read_bytes(), chain)])


# Accounts.

logger = logging.getLogger("omni_ws.grpc")

#: Statuses that are faults of the server, and logged as errors.
_SERVER_FAULTS: Final = frozenset({"INTERNAL", "UNKNOWN", "DATA_LOSS"})


class CallAccounts(grpc.aio.ServerInterceptor):
    """An interceptor that counts and logs the calls of ``service``.

    Calls of other services are ignored, since clients can invent names. Install it before ``MessageIntake``, so that it
    also counts the calls refused there.
    """

    def __init__(self, metrics: Metrics, *, service: str) -> None:
        self._metrics = metrics
        self._prefix = f"/{service}/"

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler: Any = await continuation(handler_call_details)
        path = handler_call_details.method
        if handler is None or not path.startswith(self._prefix):
            return cast("Handler | None", handler)
        method = path.removeprefix(self._prefix)
        if handler.response_streaming:

            async def stream(requests: Any, context: Any) -> AsyncIterator[Any]:
                with self._counted(method, context):
                    async with aclosing(handler.stream_stream(requests, context)) as events:
                        async for event in events:
                            yield event

            return grpc.stream_stream_rpc_method_handler(stream, None, handler.response_serializer)

        async def answer(requests: Any, context: Any) -> Any:
            with self._counted(method, context):
                return await handler.stream_unary(requests, context)

        return grpc.stream_unary_rpc_method_handler(answer, None, handler.response_serializer)

    @contextmanager
    def _counted(self, method: str, context: Any) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        outcome = "UNKNOWN"
        try:
            yield
            outcome = "OK"
        except (asyncio.CancelledError, GeneratorExit):
            outcome = "CANCELLED"
            raise
        finally:
            code = context.code()  # 0 if the servicer has set none
            status = code.name if isinstance(code, grpc.StatusCode) else outcome
            seconds = loop.time() - begun
            self._metrics.grpc_calls.labels(method, status).inc()
            self._metrics.grpc_call_seconds.labels(method).observe(seconds)
            level = logging.ERROR if status in _SERVER_FAULTS else logging.INFO
            write_line(logger, level, "grpc call", method=method, status=status, seconds=round(seconds, 4))


# Health.

_Status = health_pb2.HealthCheckResponse


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # without types
    """The standard service grpc.health.v1, with one status for ``services`` and the whole server.

    The status is NOT_SERVING at first. The servicer of the package ``grpc_health`` is not used: its change of the
    status waits until every watching client has read the new status.
    """

    def __init__(self, services: Collection[str]) -> None:
        self._services = {"", *services}
        self._status = _Status.NOT_SERVING
        self._changed = asyncio.Event()

    def set_serving(self, serving: bool) -> None:
        """Change the status, and wake all watchers."""
        self._status = _Status.SERVING if serving else _Status.NOT_SERVING
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(self, request: Any, context: Any) -> Any:  # named by the protocol
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return _Status(status=self._status)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        sent = None
        while True:
            changed = self._changed
            status = self._status if request.service in self._services else _Status.SERVICE_UNKNOWN
            if status != sent:
                sent = status
                yield _Status(status=status)
            else:
                await changed.wait()

"""Salience: the six calls of salience.v1, translated to token sessions and back."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import aclosing
from typing import Final, TypeVar
from urllib.parse import unquote

from omni_ws.config.keys import ApiKey
from omni_ws.core.token_session import TokenImage, TokenRanges
from omni_ws.engine.base import MAX_TOP_LOGPROBS, TokenOutput, TokenSampling, TokenStop
from omni_ws.errors import EngineOverloaded, InvalidValue, ModelNotFound, OmniError, ShuttingDown
from omni_ws.generated import salience_pb2 as messages
from omni_ws.generated.salience_pb2_grpc import SalienceServicer
from omni_ws.service.conversation.configuration import ServedModel
from omni_ws.service.failure import unexpected
from omni_ws.service.sessions.admission import SLOT_RETRY_MS
from omni_ws.service.tokens.sessions import TokenCall, TokensDone, TokenSessions
from omni_ws.transport.grpc_salience.refusals import CallContext, refuse
from omni_ws.transport.http.access import Authenticator

Answer = TypeVar("Answer")

#: The most ranges, stop tokens or images in a call. They are checked on the event loop.
MAX_ENTRIES: Final = 16_384

_REASONS: Final = {
    TokenStop.EOS: messages.GenerateDone.FINISH_REASON_EOS,
    TokenStop.LENGTH: messages.GenerateDone.FINISH_REASON_LENGTH,
    TokenStop.CANCELLED: messages.GenerateDone.FINISH_REASON_CANCELLED,
}


class Salience(SalienceServicer):
    """Serves the calls of salience.v1.

    Calls are refused until ``begin``, which creates the token sessions: an engine supports them only once it has
    started. ``model`` is called for each new session, since an engine may learn the name of its model late.
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
        """Accept calls. The engine has started."""
        self._begun = self._make_sessions()

    def refuse_calls(self) -> None:
        """Refuse new calls with UNAVAILABLE from now on. Running calls continue."""
        self._refuses_calls = True

    async def wait_idle(self) -> None:
        """Wait until no session is generating."""
        if self._begun is not None:
            await self._begun.wait_idle()

    def close_sessions(self) -> None:
        """Close all sessions, so that they release their slots. For when no call can reach them any more."""
        if self._begun is not None:
            self._begun.close_all()

    def key(self, context: CallContext) -> ApiKey | None:
        """Authenticate a call and return its key. Raises Unauthenticated and ShuttingDown."""
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
    """Return address and port of gRPC's name of a peer, such as ``ipv4:192.0.2.1:4711``; "" for another kind of peer.

    Brackets of IPv6 addresses are percent-encoded: ``ipv6:%5B2001:db8::1%5D:4711``.
    """
    kind, _, address = unquote(peer).partition(":")
    return address if kind in ("ipv4", "ipv6") else ""


def token_call(request: messages.GenerateRequest, sessions: TokenSessions) -> TokenCall:
    """Translate a request. Raises InvalidValue, naming the field, for values that no session accepts."""
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
    token = messages.Token(id=output.id, position=output.position, is_prefill=output.is_prefill)
    if len(output.readout):
        token.readout.extend(output.readout)
    for one, logprob in output.logprobs:
        token.logprobs.add(id=one, logprob=logprob)
    if output.logprob is not None:
        token.sampled_logprob = output.logprob
        token.has_sampled_logprob = True
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

"""Base class of the routes that generate answers: admission, request bodies, sessions and responses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from msgspec.structs import replace

from omni_ws.audio.codec import encode_file
from omni_ws.audio.pcm import SampleLayout, samples_from_bytes
from omni_ws.config.keys import ApiKey, key_name
from omni_ws.core.chunks import AudioFormat, InputChunk, Modality
from omni_ws.core.quota import Share
from omni_ws.engine.threads import Work, run_work
from omni_ws.errors import OmniError
from omni_ws.service.conversation.conversation import Conversation
from omni_ws.service.conversation.openai_requests import configure, ended_on_error
from omni_ws.service.sessions.admission import session_too_long
from omni_ws.service.sessions.factory import FILE_FORMATS, SessionFactory
from omni_ws.transport.http.access import Authenticator
from omni_ws.transport.http.application import FrontEnd
from omni_ws.transport.http.exchange import HttpExchange, read_json_object, to_thread_if_large
from omni_ws.transport.native.endpoint import check_enabled
from omni_ws.transport.routes.body_slot import slot_for_body
from omni_ws.transport.routes.http_session import HttpSession, feed_all
from omni_ws.transport.routes.mode_a import HEADER, StreamingBody, is_streaming_input
from omni_ws.transport.routes.response_stream import AnswerSource, EventEncoder, respond_error_event, write_events
from omni_ws.wire.openai_fields import ConfigurationPatch

#: Feeds a session with its input, to the end.
InputSource = Callable[[HttpSession], Awaitable[None]]
Request = TypeVar("Request")


@dataclass(frozen=True, slots=True)
class JsonBody:
    """An ordinary request body: the fields of its object, and its size in bytes."""

    fields: dict[str, Any]
    size: int

    async def read(self, read: Callable[[Mapping[str, Any]], Request]) -> Request:
        """Return what ``read`` makes of the fields; run it in a worker thread where they are large."""
        return await to_thread_if_large(self.size, partial(read, self.fields))


class GenerationRoutes(FrontEnd):
    """Base class of front ends whose handlers run one session for each request.

    Attributes:
        sessions: Opens the sessions.
        authenticator: Checks the keys.
        config: The server's configuration.
    """

    def __init__(self, sessions: SessionFactory, authenticator: Authenticator) -> None:
        self.sessions = sessions
        self.authenticator = authenticator
        self.config = sessions.config

    @asynccontextmanager
    async def admitted(self, exchange: HttpExchange) -> AsyncIterator[str | None]:
        """Authenticate a request, and hold a session's slot for it until the block ends. Yields the name of its key.

        Raises Unauthenticated, and what admission refuses a session for.
        """
        key = self.authenticator.authenticate(exchange.request)
        admission = self.sessions.admission
        async with slot_for_body(exchange, admission, key, live=is_streaming_input(exchange.request)):
            self.sessions.check_ready()
            exchange.input_pace = admission.input_pace(key)
            exchange.input_share = Share(self.sessions.budget)
            with limited(exchange, key):
                yield key_name(key)

    def streaming_body(self, exchange: HttpExchange) -> StreamingBody:
        """The body of a Mode A request. Raises NotFound where streaming input is disabled."""
        streaming = self.config.streaming_input
        check_enabled(streaming)
        return StreamingBody(
            exchange, max_chunk_bytes=streaming.max_chunk_bytes, session_timeout_sec=streaming.session_timeout_sec
        )

    @asynccontextmanager
    async def json_body(
        self, exchange: HttpExchange, wants_events: Callable[[Mapping[str, Any]], bool]
    ) -> AsyncIterator[JsonBody]:
        """Read an ordinary body and yield it; errors in the block are sent as ``errors_as_events`` describes.

        ``wants_events`` reads from the fields whether the response is to be a stream of events.
        """
        fields, size = await read_json_object(
            exchange, self.config.http.max_body_bytes, hint=f"; streaming input requires {HEADER}"
        )
        async with self.errors_as_events(exchange, wanted=wants_events(fields)):
            yield JsonBody(fields, size)

    @asynccontextmanager
    async def errors_as_events(self, exchange: HttpExchange, *, wanted: bool) -> AsyncIterator[None]:
        """Send errors of the block as an event, where the client has ``wanted`` events and does not accept JSON.

        OpenAI's SDKs accept JSON also when they stream; they get a status. Other clients read errors from events only.
        """
        try:
            yield
        except OmniError as error:
            accepted = ",".join(exchange.request.headers.get_all("accept")).lower()
            if exchange.head_sent or not wanted or "application/json" in accepted:
                raise
            await respond_error_event(exchange, error)

    def source_of(self, chunks: Iterable[InputChunk]) -> InputSource:
        """The source of a session whose whole input is at hand."""
        return lambda session: feed_all(session, self.split(chunks))

    def split(self, chunks: Iterable[InputChunk]) -> Iterator[InputChunk]:
        """Split chunks to the size that sessions accept; images stay whole."""
        size = self.config.streaming_input.max_chunk_bytes
        for chunk in chunks:
            if chunk.modality is Modality.IMAGE:
                yield chunk
                continue
            for start in range(0, max(1, len(chunk.payload)), size):
                yield replace(chunk, payload=chunk.payload[start : start + size])

    def open_session(
        self,
        exchange: HttpExchange,
        patch: ConfigurationPatch,
        *,
        owner: str | None,
        samples: bool,
        streaming_input: bool,
        prepare: Callable[[Conversation], None] = lambda conversation: None,
    ) -> tuple[HttpSession, AudioFormat]:
        """Open a session, to be run by the caller. Returns it, and the audio format that the client asked for.

        Raises an InvalidRequest that names the field of the body.

        Args:
            patch: The session's configuration, as far as the request sets it.
            owner: Name of the key.
            samples: Whether the session produces pcm16, for audio that is sent as whole files.
            streaming_input: Whether the input is still arriving.
            prepare: Called with the conversation before the session runs; may raise.
        """
        conversation = self.sessions.open(
            output_formats=FILE_FORMATS,
            single_request=True,
            any_model=True,
            streamed_body=streaming_input,
            owner=owner,
        )
        exchange.session_id = conversation.observed.identity.session_id
        with ended_on_error(conversation):
            target = configure(conversation, patch, samples=samples, whole_input=not streaming_input)
            prepare(conversation)
        session = HttpSession(conversation, conversation.outbox)
        exchange.interrupts.append(session.interrupt)
        return session, target

    async def stream_events(
        self,
        exchange: HttpExchange,
        session: AnswerSource,
        encoder: EventEncoder,
        *,
        head_at_start: bool,
        done: bool = True,
    ) -> None:
        """Write the answer of ``session`` as events; see ``write_events``."""
        await write_events(
            exchange,
            session,
            encoder,
            head_at_start=head_at_start,
            done=done,
            heartbeat_sec=self.config.sse_heartbeat_sec,
        )


@contextmanager
def limited(exchange: HttpExchange, key: ApiKey | None) -> Iterator[None]:
    """End what runs for the request when the block takes longer than a session of the key may."""
    if key is None or key.max_session_sec is None:
        yield
        return
    error = session_too_long(key.max_session_sec)

    def end() -> None:
        for interrupt in exchange.interrupts:
            interrupt(error)

    timer = asyncio.get_running_loop().call_later(key.max_session_sec, end)
    try:
        yield
    finally:
        timer.cancel()


async def encode_audio_file(pcm: bytes, target: AudioFormat) -> bytes:
    """Encode pcm16 as a whole file of ``target``, in a worker thread; both have the sample rate of ``target``."""

    def encode() -> bytes:
        return encode_file(samples_from_bytes(pcm, SampleLayout.S16), source_rate=target.sample_rate, target=target)

    return await run_work(Work.ENCODING, encode)

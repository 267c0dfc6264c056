"""What every route that answers has in common: who may ask, how a body is read, and the session behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from msgspec.structs import replace

from omni_ws.audio.encoder import encode_file
from omni_ws.audio.pcm import SampleLayout, samples_from_bytes
from omni_ws.core.audio_format import AudioFormat
from omni_ws.core.chunks import InputChunk, Modality
from omni_ws.core.quota import Share
from omni_ws.errors import NotFound, OmniError
from omni_ws.service.conversation.conversation import Conversation
from omni_ws.service.conversation.openai_requests import configure, ended_on_error
from omni_ws.service.sessions.factory import FILE_FORMATS, SessionFactory
from omni_ws.transport.http.authentication import Authenticator
from omni_ws.transport.http.exchange import HttpExchange
from omni_ws.transport.http.front_end import FrontEnd
from omni_ws.transport.http.json_body import read_json_object, to_thread_if_large
from omni_ws.transport.routes.body_slot import slot_for_body
from omni_ws.transport.routes.event_output import Answering, EventEncoder, write_error_event, write_events
from omni_ws.transport.routes.mode_a import StreamingBody, is_streaming_input
from omni_ws.transport.routes.session import HttpSession, feed_all
from omni_ws.wire.openai_fields import ConfigurationPatch

Source = Callable[[HttpSession], Awaitable[None]]
Request = TypeVar("Request")


@dataclass(frozen=True, slots=True)
class OrdinaryBody:
    fields: dict[str, Any]
    size: int

    async def read(self, read: Callable[[Mapping[str, Any]], Request]) -> Request:
        return await to_thread_if_large(self.size, partial(read, self.fields))


class GenerationRoutes(FrontEnd):
    """The base of the objects whose methods are handlers; one of each a server."""

    def __init__(self, sessions: SessionFactory, authenticator: Authenticator) -> None:
        self.sessions = sessions
        self.authenticator = authenticator
        self.config = sessions.config

    @asynccontextmanager
    async def admitted(self, exchange: HttpExchange) -> AsyncIterator[str | None]:
        """For as long as a request takes it is a session of its key, whose name is yielded, and of the server."""
        key = self.authenticator.authenticate(exchange.request)
        admission = self.sessions.admission
        with slot_for_body(exchange, admission, key, live=is_streaming_input(exchange.request)):
            self.sessions.check_ready()
            exchange.input_pace = admission.input_pace(key)
            exchange.input_share = Share(self.sessions.budget)
            yield None if key is None else key.name

    def streaming_body(self, exchange: HttpExchange) -> StreamingBody:
        streaming = self.config.streaming_input
        if not streaming.enabled:
            raise NotFound("streaming input is turned off on this server")
        return StreamingBody(
            exchange, max_chunk_bytes=streaming.max_chunk_bytes, session_timeout_sec=streaming.session_timeout_sec
        )

    @asynccontextmanager
    async def ordinary(
        self, exchange: HttpExchange, wants_events: Callable[[Mapping[str, Any]], bool]
    ) -> AsyncIterator[OrdinaryBody]:
        """An ordinary body, and the form in which its client hears what goes wrong before the answer began."""
        fields, size = await read_json_object(
            exchange, self.config.http.max_body_bytes, hint="; a stream of input needs X-Streaming-Input: true"
        )
        async with self.errors_as_wanted(exchange, events=wants_events(fields)):
            yield OrdinaryBody(fields, size)

    @asynccontextmanager
    async def errors_as_wanted(self, exchange: HttpExchange, *, events: bool) -> AsyncIterator[None]:
        """``events``: the client asked for an answer in events.

        OpenAI's SDKs accept JSON even when they stream, and get a status; readers of events alone get the error as an
        event, without a role frame before it.
        """
        try:
            yield
        except OmniError as error:
            accepted = ",".join(exchange.request.headers.get_all("accept")).lower()
            if exchange.head_sent or not events or "application/json" in accepted:
                raise
            await write_error_event(exchange, error)

    def feed(self, chunks: Iterable[InputChunk]) -> Source:
        return lambda session: feed_all(session, self.pieces(chunks))

    def pieces(self, chunks: Iterable[InputChunk]) -> Iterator[InputChunk]:
        """Chunks of a size that sessions take; an image stays whole."""
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
        """A session with this configuration, and the format that its client wants.

        ``prepare`` does what else is to be done before it runs, and may refuse to. For an answer that goes out as
        files, one or one a piece, the audio is made as ``samples``.
        """
        new = self.sessions.open(
            output_formats=FILE_FORMATS,
            single_request=True,
            any_model=True,
            streamed_body=streaming_input,
            owner=owner,
        )
        exchange.session_id = new.conversation.observed.identity.session_id
        with ended_on_error(new.conversation):
            target = configure(new.conversation, patch, samples=samples, whole_input=not streaming_input)
            prepare(new.conversation)
        session = HttpSession(new.conversation, new.outbox)
        exchange.interrupts.append(session.interrupt)
        return session, target

    async def events(
        self,
        exchange: HttpExchange,
        session: Answering,
        encoder: EventEncoder,
        *,
        head_at_start: bool,
        done: bool = True,
    ) -> None:
        await write_events(
            exchange,
            session,
            encoder,
            head_at_start=head_at_start,
            done=done,
            heartbeat_sec=self.config.sse_heartbeat_sec,
        )


async def encode_audio_file(pcm: bytes, target: AudioFormat) -> bytes:
    """Encode pcm16 as a whole file of ``target``, in a worker thread; both have the sample rate of ``target``."""

    def encode() -> bytes:
        return encode_file(samples_from_bytes(pcm, SampleLayout.S16), source_rate=target.sample_rate, target=target)

    return await asyncio.to_thread(encode)

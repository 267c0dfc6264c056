"""``/v1/chat/completions``: a chat request in a JSON body, or with input that is still arriving (Mode A)."""

from __future__ import annotations

from functools import partial

from omni_ws.service.conversation.openai_requests import chat_options, prepare_answer
from omni_ws.service.sessions.factory import SessionFactory
from omni_ws.transport.http.authentication import Authenticator
from omni_ws.transport.http.exchange import HttpExchange
from omni_ws.transport.http.router import Router
from omni_ws.transport.routes.generation import GenerationRoutes, InputSource, encode_audio_file
from omni_ws.transport.routes.mode_a import has_streaming_input
from omni_ws.transport.routes.named_media import MediaReader
from omni_ws.transport.routes.response_stream import charging, collect_answer
from omni_ws.wire.openai_chat_response import ChatCompletion, ChatStream
from omni_ws.wire.openai_request import ChatRequest, chat_wants_events, read_chat


class ChatRoutes(GenerationRoutes):
    """The handler of ``/v1/chat/completions``."""

    def __init__(self, sessions: SessionFactory, authenticator: Authenticator) -> None:
        super().__init__(sessions, authenticator)
        self._media = MediaReader(sessions.config.http)

    def register(self, router: Router) -> None:
        router.add("POST", "/v1/chat/completions", self.chat_completions)

    async def chat_completions(self, exchange: HttpExchange) -> None:
        """Respond with a chat completion, or with its chunks as events.

        Streaming input is answered with events unless its parameters say ``"stream": false``.
        """
        async with self.admitted(exchange) as owner:
            if await has_streaming_input(exchange, self.config):
                stream = self.streaming_body(exchange)
                request = read_chat(await stream.parameters(), input_follows=True)
                await self._respond(exchange, request, stream.feed, owner=owner, streaming_input=True)
                return
            async with self.json_body(exchange, chat_wants_events) as body:
                request = await body.read(partial(read_chat, input_follows=False))
                chunks = await self._media.read(request.input, lambda size: exchange.charge(body.size + size))
                await self._respond(exchange, request, self.source_of(chunks), owner=owner)

    async def _respond(
        self,
        exchange: HttpExchange,
        request: ChatRequest,
        source: InputSource,
        *,
        owner: str | None,
        streaming_input: bool = False,
    ) -> None:
        streamed = streaming_input if request.stream is None else request.stream
        session, target = self.open_session(
            exchange,
            request.patch,
            owner=owner,
            samples=not streamed,
            streaming_input=streaming_input,
            prepare=partial(prepare_answer, request=request, read_whole=not streamed),
        )
        options = chat_options(request, model=self.sessions.model.names[0])
        if streamed:
            async with session.running(partial(source, session)):
                await self.stream_events(exchange, session, ChatStream(options), head_at_start=streaming_input)
            return
        with charging(self.sessions.budget) as charge:
            async with session.running(partial(source, session)):
                outputs, final = await collect_answer(session, charge)
            completion = ChatCompletion(options)
            for output in outputs:
                completion.output(output)
            audio = await encode_audio_file(completion.audio, target) if request.wants_audio else b""
            await exchange.respond_json(200, completion.final(final, audio=audio))

"""``/v1/chat/completions``: a chat request in a JSON body, or with input that is still arriving (Mode A)."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from itertools import islice

from omni_ws.core.chunks import InputChunk, Modality, OutputModality, Task
from omni_ws.core.history import WORDS_UNKNOWN, Message
from omni_ws.errors import InvalidValue, UnsupportedModality, UnsupportedParameter
from omni_ws.service.conversation.openai_requests import chat_options, earlier_message, prepare_answer
from omni_ws.service.sessions.factory import SessionFactory
from omni_ws.transport.http.access import Authenticator
from omni_ws.transport.http.application import Router
from omni_ws.transport.http.exchange import HttpExchange
from omni_ws.transport.routes.generation import GenerationRoutes, InputSource, encode_audio_file
from omni_ws.transport.routes.mode_a import has_streaming_input
from omni_ws.transport.routes.named_media import MediaReader
from omni_ws.transport.routes.response_stream import charging, collect_answer
from omni_ws.transport.routes.spoken_answers import SpokenAnswers
from omni_ws.wire.openai_fields import ConfigurationPatch
from omni_ws.wire.openai_requests import ChatRequest, chat_wants_events, read_chat
from omni_ws.wire.openai_responses import ChatCompletion, ChatStream, audio_id


class ChatRoutes(GenerationRoutes):
    """The handler of ``/v1/chat/completions``."""

    def __init__(self, sessions: SessionFactory, authenticator: Authenticator) -> None:
        super().__init__(sessions, authenticator)
        self._media = MediaReader(sessions.config.http)
        self._spoken = SpokenAnswers(sessions.group, lambda: asyncio.get_running_loop().time())

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
                history, _ = await self._content(exchange, request, 0, owner)
                await self._respond(exchange, request, stream.feed, history, owner=owner, streaming_input=True)
                return
            async with self.json_body(exchange, chat_wants_events) as body:
                request = await body.read(partial(read_chat, input_follows=False))
                history, chunks = await self._content(exchange, request, body.size, owner)
                await self._respond(exchange, request, self.source_of(chunks), history, owner=owner)

    async def _content(
        self, exchange: HttpExchange, request: ChatRequest, size: int, owner: str | None
    ) -> tuple[list[Message], list[InputChunk]]:
        """The earlier messages and the input, with the media that they refer to. ``size`` is that of the body."""
        named = [part for message in request.history for part in message.parts]
        read = await self._media.read([*named, *request.input], lambda more: exchange.charge(size + more))
        earlier = iter(read[: len(named)])
        spoken = await self._spoken.find((one.audio_id for one in request.history if one.audio_id), key=owner)
        history: list[Message] = []
        for message in request.history:
            if message.audio_id is not None:
                if message.audio_id not in spoken:
                    raise InvalidValue("there is no audio of this id", param=f"{message.place}.audio.id")
                message = replace(message, text=spoken[message.audio_id])
            parts = islice(earlier, len(message.parts))
            chunks = [await self._usable(exchange, chunk, message.place, owner) for chunk in parts]
            history.append(earlier_message(message, chunks))
        return history, read[len(named) :]

    async def _usable(self, exchange: HttpExchange, chunk: InputChunk, place: str, owner: str | None) -> InputChunk:
        """A part of an earlier message as the engine takes it: speech is written down where the model does not hear.

        Raises UnsupportedParameter or UnsupportedModality, naming the message.
        """
        able = self.sessions.engine.capabilities
        if chunk.modality is Modality.TEXT:
            return chunk
        if chunk.modality not in able.input_modalities:
            raise UnsupportedModality(f"{chunk.modality} input is not supported by this engine", param=place)
        if chunk.modality is Modality.AUDIO:
            if able.speech_in_history:
                return chunk
            if Task.TRANSCRIBE in able.tasks:
                return InputChunk(Modality.TEXT, (await self._words(exchange, chunk, owner)).encode())
        elif chunk.modality in able.pictures_in_history:
            return chunk
        raise UnsupportedParameter(f"{chunk.modality} in earlier messages is not supported by this engine", param=place)

    async def _words(self, exchange: HttpExchange, chunk: InputChunk, owner: str | None) -> str:
        """What is said in an earlier message."""
        patch = ConfigurationPatch({"task": "transcribe", "modalities": ["text"]})
        session, _ = self.open_session(exchange, patch, owner=owner, samples=False, streaming_input=False)
        with charging(self.sessions.budget) as charge:
            async with session.running(partial(self.source_of([chunk]), session)):
                outputs, _ = await collect_answer(session, charge)
        text = "".join(output.text for output in outputs if output.modality is OutputModality.TEXT)
        return text.strip() or WORDS_UNKNOWN

    async def _respond(
        self,
        exchange: HttpExchange,
        request: ChatRequest,
        source: InputSource,
        history: list[Message],
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
            prepare=partial(prepare_answer, request=request, history=history, read_whole=not streamed),
        )
        options = chat_options(request, model=self.sessions.model.names[0])
        if streamed:
            async with session.running(partial(source, session)):
                stream = ChatStream(options)
                await self.stream_events(exchange, session, stream, head_at_start=streaming_input)
            if request.wants_audio:
                self._spoken.keep(audio_id(options), stream.spoken, key=owner)
            return
        with charging(self.sessions.budget) as charge:
            async with session.running(partial(source, session)):
                outputs, final = await collect_answer(session, charge)
            completion = ChatCompletion(options)
            for output in outputs:
                completion.output(output)
            audio = await encode_audio_file(completion.audio, target) if request.wants_audio else b""
            if request.wants_audio:
                self._spoken.keep(audio_id(options), completion.spoken, key=owner)
            await exchange.respond_json(200, completion.final(final, audio=audio))

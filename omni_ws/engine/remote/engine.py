"""The remote engine: streaming input in front of any server that speaks the OpenAI API."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from typing import Any, Final, TypeVar

from pydantic import SecretStr

from omni_ws.config.model import RemoteConfig
from omni_ws.core.chunks import FinishReason, Modality, OutputModality, Task, Usage
from omni_ws.engine.answer_limit import count_words
from omni_ws.engine.base import (
    NO_SINK,
    EngineCapabilities,
    EngineOutput,
    EngineState,
    Finished,
    GenerationRequest,
    OutputSink,
    TextOutput,
)
from omni_ws.engine.channel import Channel
from omni_ws.engine.clauses import ClauseSplitter, clauses_of, is_speakable
from omni_ws.engine.pipeline import StageLink, pipeline
from omni_ws.engine.remote.answer_stream import ChatAnswer
from omni_ws.engine.remote.pool import Pool
from omni_ws.engine.remote.request_body import Prompt, Text, chat_body, read_prompt
from omni_ws.engine.remote.server_sent_events import EventReader, ServerSentEvent
from omni_ws.engine.remote.speech import RemoteVoice
from omni_ws.engine.remote.upstream import Timeouts, Upstream, UpstreamAnswer, normalised
from omni_ws.engine.text_pieces import CooperativePieces
from omni_ws.engine.threads import run_in_thread
from omni_ws.errors import EngineFailed, UnsupportedModality, UnsupportedParameter
from omni_ws.wire.openai_media_limits import MediaLimitFields

T = TypeVar("T")

#: Threads that decode audio, and write and read large JSON.
_THREADS: Final = 4
#: More than this, in bytes, is written and read in a thread: less takes less time than the way there.
_INLINE_BYTES: Final = 256 * 1024
#: Text that was written and not spoken yet, in characters: beyond it the chat waits for the voice.
_UNSPOKEN_CHARACTERS: Final = 2000
#: The owner that our own servers name for their models.
_OWN_KIND: Final = "omni_ws"


class RemoteEngine:
    """Frozen prompts only: an upstream takes a request whole, so nothing can join it once it has been sent."""

    name = "remote"

    def __init__(self, config: RemoteConfig) -> None:
        self.config = config
        #: The upstreams' own name for it; where the configuration names none it is known after the start.
        self.model = config.model or self.name
        self.active_requests = 0
        self._chat: Pool | None = None
        self._speech: Pool | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._capabilities = _capabilities(config, upstreams=())

    @property
    def capabilities(self) -> EngineCapabilities:
        return self._capabilities

    @property
    def state(self) -> EngineState:
        if self._chat is None:
            return EngineState.STARTING
        return EngineState.OK if self._chat.available else EngineState.UNHEALTHY

    def describe(self) -> tuple[str, ...]:
        chat = () if self._chat is None else self._chat.describe()
        speech = () if self._speech is None else tuple(f"speech {line}" for line in self._speech.describe())
        return chat + speech

    # life

    async def start(self) -> None:
        """Returns when at least one upstream, and the speech upstream where there is one, can be used. Idempotent."""
        if self._chat is not None:
            return
        config = self.config
        async with AsyncExitStack() as undo:
            chat = self._pool(config.upstreams, _secret(config.api_key), config.model)
            undo.push_async_callback(chat.stop)
            speech = self._speech_pool()
            if speech is not None:
                undo.push_async_callback(speech.stop)
                await speech.start()
            await chat.start()
            if chat.model is None:
                raise EngineFailed("the upstreams list no model; name one with remote.model", fatal=True)
            undo.pop_all()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="remote")
        self._capabilities = _capabilities(config, upstreams=[one for one in chat.upstreams if one.models])
        self._chat, self._speech = chat, speech
        self.model = chat.model

    async def stop(self) -> None:
        chat, self._chat = self._chat, None
        speech, self._speech = self._speech, None
        threads, self._threads = self._threads, None
        for pool in (chat, speech):
            if pool is not None:
                await pool.stop()
        if threads is not None:
            threads.shutdown(wait=False, cancel_futures=True)

    def _speech_pool(self) -> Pool | None:
        config = self.config
        if config.speech_upstream is None:
            return None
        key = _secret(config.speech_api_key)
        if key is None and normalised(config.speech_upstream) in map(normalised, config.upstreams):
            # The same server knows the same key; no other server may hear it.
            key = _secret(config.api_key)
        return self._pool((config.speech_upstream,), key, config.speech_model)

    def _pool(self, urls: tuple[str, ...], key: str | None, model: str | None) -> Pool:
        config = self.config
        timeouts = Timeouts(
            connect=config.connect_timeout_sec, first_byte=config.first_byte_timeout_sec, idle=config.idle_timeout_sec
        )
        ca_file = None if config.ca_file is None else str(config.ca_file)
        return Pool(
            [Upstream(url, key=key, timeouts=timeouts, ca_file=ca_file) for url in urls],
            model=model,
            retries=config.retries,
            health_interval=config.health_interval_sec,
            start_timeout=config.start_timeout_sec,
        )

    # requests

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[EngineOutput, None]:
        if self._chat is None or self._threads is None:
            raise EngineFailed("the engine is not running", fatal=True)
        self.active_requests += 1
        try:
            with request.media_room.share() as share:
                prompt = await read_prompt(
                    request, executor=self._threads, max_bytes=self.config.max_request_bytes, share=share
                )
                async with aclosing(self._outputs(request, prompt)) as outputs:
                    async for output in outputs:
                        yield output
        finally:
            self.active_requests -= 1

    def _outputs(self, request: GenerationRequest, prompt: Prompt) -> AsyncGenerator[EngineOutput, None]:
        if OutputModality.AUDIO in request.modalities and request.options.choices > 1:
            raise UnsupportedParameter("one answer alone can be spoken", param="n")
        if request.task is Task.SPEECH:
            return self._read_aloud(request, prompt)
        if OutputModality.AUDIO not in request.modalities:
            return self._answer(request, prompt, audio=False, sink=request.sink)
        if OutputModality.AUDIO.value in self.config.modalities:
            return self._answer(request, prompt, audio=True, sink=request.sink)
        return self._spoken_answer(request, prompt)

    async def _read_aloud(self, request: GenerationRequest, prompt: Prompt) -> AsyncGenerator[EngineOutput, None]:
        if prompt.tool_results or any(not isinstance(part, Text) for part in prompt.parts):
            raise UnsupportedModality("task speech takes text", param="modality")
        if OutputModality.AUDIO not in request.modalities:
            raise UnsupportedParameter("task speech answers with audio: name it in modalities", param="modalities")
        voice = self._voice(request)
        async with aclosing(clauses_of(prompt.text)) as clauses:
            async for clause in clauses:
                if not is_speakable(clause):
                    continue
                async with aclosing(voice.speak(clause)) as outputs:
                    async for output in outputs:
                        if not request.sink.offer(output):
                            yield output
        usage = Usage(input_tokens=prompt.words, output_audio_ms=round(voice.output_ms))
        yield Finished(FinishReason.STOP, usage)

    async def _spoken_answer(self, request: GenerationRequest, prompt: Prompt) -> AsyncGenerator[EngineOutput, None]:
        """The chat writes, another server (or another route of the same) speaks, a clause behind."""
        chat = _ChatStage(self._answer(request, prompt, audio=False, sink=NO_SINK))
        voice = self._voice(request)
        links = [StageLink(_UNSPOKEN_CHARACTERS, cost=len)]
        async with pipeline(_nothing(), [chat, _SpeechStage(voice)], links, sink=request.sink) as outputs:
            async for output in outputs:
                yield output
        finished = chat.finished
        if finished is None:
            raise EngineFailed("the answer has no end")
        yield replace(finished, usage=replace(finished.usage, output_audio_ms=round(voice.output_ms)))

    def _voice(self, request: GenerationRequest) -> RemoteVoice:
        if self._speech is None:
            raise UnsupportedParameter("this server has no voice", param="modalities")
        return RemoteVoice(
            self._speech,
            sample_rate=self.config.audio_sample_rate,
            voice=request.voice,
            request_id=request.request_id,
        )

    async def _answer(
        self, request: GenerationRequest, prompt: Prompt, *, audio: bool, sink: OutputSink
    ) -> AsyncGenerator[EngineOutput, None]:
        """The upstream's answer; what ``sink`` takes is not yielded."""
        pool = self._chat
        assert pool is not None
        assert pool.model is not None
        body = await self._run(
            prompt.size,
            lambda: chat_body(request, prompt, model=pool.model or "", config=self.config, audio=audio),
        )
        # Naming JSON asks for refusals with a status of their own, before a stream of events has begun.
        headers = {"X-Request-Id": request.request_id, "Accept": "application/json, text/event-stream"}
        async with pool.post("chat/completions", body, headers=headers) as upstream:
            if not upstream.content_type.startswith("text/event-stream"):
                raise EngineFailed("the upstream does not stream its answer")
            answer = ChatAnswer(
                sample_rate=self.config.audio_sample_rate,
                upstream=upstream.upstream,
                choices=request.options.choices,
            )
            async with aclosing(self._events(upstream, answer, sink)) as outputs:
                async for output in outputs:
                    yield output
        history = sum(count_words(message.text) for message in request.history)
        yield answer.finished(input_words=prompt.words + history, input_audio_ms=prompt.audio_ms)

    async def _events(
        self, upstream: UpstreamAnswer, answer: ChatAnswer, sink: OutputSink
    ) -> AsyncGenerator[EngineOutput, None]:
        reader = EventReader()
        async with aclosing(upstream.chunks()) as chunks:
            async for chunk in chunks:
                for event in reader.feed(chunk):
                    for output in await self._read(answer, event):
                        if not sink.offer(output):
                            yield output
                if answer.done:
                    await upstream.finish(chunks)
                    return
            for event in reader.finish():
                for output in await self._read(answer, event):
                    if not sink.offer(output):
                        yield output
        if not answer.done:
            raise EngineFailed("the upstream's answer ended before its end")

    async def _read(self, answer: ChatAnswer, event: ServerSentEvent) -> list[EngineOutput]:
        return await self._run(len(event.data), lambda: answer.read(event))

    async def _run(self, size: int, work: Callable[[], T]) -> T:
        """Work on ``size`` bytes: here where they are few, else in a thread."""
        if size <= _INLINE_BYTES:
            return work()
        assert self._threads is not None
        return await run_in_thread(self._threads, work)


class _ChatStage:
    """Text goes to the client as it comes, and on to the voice clause by clause."""

    name = "chat"

    def __init__(self, answer: AsyncGenerator[EngineOutput, None]) -> None:
        self.finished: Finished | None = None
        self._answer = answer

    async def run(self, source: AsyncIterator[None], sink: Channel[Any] | None, outputs: Channel[EngineOutput]) -> None:
        assert sink is not None
        splitter = ClauseSplitter()
        async with aclosing(self._answer) as answer:
            async for output in answer:
                if isinstance(output, Finished):
                    self.finished = output
                    continue
                await outputs.put(output)
                if isinstance(output, TextOutput):
                    async for piece in CooperativePieces(output.text):
                        for clause in splitter.feed(piece):
                            await sink.put(clause)
        if rest := splitter.rest():
            await sink.put(rest)


class _SpeechStage:
    name = "speech"

    def __init__(self, voice: RemoteVoice) -> None:
        self._voice = voice

    async def run(self, source: AsyncIterator[str], sink: Channel[Any] | None, outputs: Channel[EngineOutput]) -> None:
        async for clause in source:
            if not is_speakable(clause):
                continue
            async with aclosing(self._voice.speak(clause)) as speech:
                async for output in speech:
                    await outputs.put(output)


async def _nothing() -> AsyncIterator[None]:
    """The source of a first stage that brings its own."""
    nothing: tuple[None, ...] = ()
    for item in nothing:
        yield item


def _secret(value: SecretStr | None) -> str | None:
    return None if value is None else value.get_secret_value()


def _capabilities(config: RemoteConfig, *, upstreams: Sequence[Upstream]) -> EngineCapabilities:
    speech = config.speech_upstream is not None
    transcribes = bool(upstreams) and all(upstream.transcribes for upstream in upstreams)
    outputs = {OutputModality.TEXT} | ({OutputModality.TRANSCRIPT} if transcribes else set())
    if speech or OutputModality.AUDIO.value in config.modalities:
        outputs.add(OutputModality.AUDIO)
    return EngineCapabilities(
        input_modalities=frozenset(map(Modality, config.input_modalities)),
        output_modalities=frozenset(outputs),
        tasks=frozenset({Task.CHAT, Task.SPEECH} if speech else {Task.CHAT}),
        extend=False,
        voices=config.voices if OutputModality.AUDIO in outputs else (),
        sampling=frozenset(config.sampling),
        stage_params=frozenset(config.stage_params),
        stage_sampling=frozenset(config.stage_sampling),
        tools="tools" in config.options,
        logprobs="logprobs" in config.options,
        structured_output="response_format" in config.options,
        choices="n" in config.options,
        priority="priority" in config.options,
        # Our own kind takes nothing but text in earlier messages.
        speech_in_history=Modality.AUDIO.value in config.input_modalities
        and not any(upstream.owner == _OWN_KIND for upstream in upstreams),
        media_limits=frozenset(MediaLimitFields.__struct_fields__) & frozenset(config.options),
    )

"""The embedded engine: it hears, answers by rules, and speaks, with nothing but packages on a CPU."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import fields
from datetime import datetime

from omni_ws.core.chunks import FinishReason, Modality, OutputModality, Task, Usage
from omni_ws.engine.asr.pocketsphinx_engine import PocketSphinxEngine
from omni_ws.engine.base import EngineCapabilities, EngineOutput, EngineState, Finished, GenerationRequest
from omni_ws.engine.decoding import DECODING_THREADS
from omni_ws.engine.embedded.config import EmbeddedConfig
from omni_ws.engine.embedded.intake import Intake
from omni_ws.engine.embedded.reply import Reply
from omni_ws.engine.embedded.tasks import chat, read_aloud, transcribe
from omni_ws.engine.incident import incident
from omni_ws.engine.tts.synthesis_engine import SynthesisEngine
from omni_ws.errors import EngineFailed, OmniError, UnsupportedParameter
from omni_ws.media.limits import MediaLimits

log = logging.getLogger(__name__)


class EmbeddedEngine:
    """Deterministic: the same input gives the same text."""

    name = "embedded"

    def __init__(
        self,
        config: EmbeddedConfig | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.config = config or EmbeddedConfig()
        self.model = self.config.model
        self.active_requests = 0
        self._clock = clock
        self._now = now
        self.asr = PocketSphinxEngine(
            max_recognisers=self.config.max_recognisers, warm_recognisers=self.config.warm_recognisers, clock=clock
        )
        self.tts = SynthesisEngine(self.config.voice, default_voice=self.config.default_voice)
        self._voice = self.tts.voice
        self._started = False
        self._decoding: ThreadPoolExecutor | None = None

    @property
    def state(self) -> EngineState:
        if not self._started:
            return EngineState.STARTING
        return EngineState.OK if self._voice.healthy else EngineState.UNHEALTHY

    @property
    def capabilities(self) -> EngineCapabilities:
        speech = {OutputModality.AUDIO} if self._voice.voices else set()
        return EngineCapabilities(
            input_modalities=frozenset(Modality),
            output_modalities=frozenset({OutputModality.TEXT, OutputModality.TRANSCRIPT, *speech}),
            tasks=frozenset(Task) if speech else frozenset({Task.CHAT, Task.TRANSCRIBE}),
            extend=True,
            voices=self._voice.voices,
            sampling=frozenset({"max_tokens", "stop"}),
            sampling_no_ops=frozenset({"temperature", "top_p", "seed"}),
            raw_prompts=True,  # there is no template that could stand around them
            languages=frozenset({"en"}),
            word_times=True,
            media_limits=frozenset(field.name for field in fields(MediaLimits)),
        )

    def describe(self) -> tuple[str, ...]:
        return (self.describe_voice(),)

    def describe_voice(self) -> str:
        """One line for the person who starts the server: what speaks, or how to get something that does."""
        return self._voice.describe()

    async def start(self) -> None:
        """Loads the recognisers and finds a voice. Idempotent."""
        if self._started:
            return
        self._decoding = ThreadPoolExecutor(DECODING_THREADS, thread_name_prefix="decoder")
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.tts.start())
                group.create_task(self.asr.start())
        except BaseExceptionGroup as errors:
            await self.stop()
            raise _first(errors) from errors
        except BaseException:
            await self.stop()
            raise
        self._started = True

    async def stop(self) -> None:
        self._started = False
        decoding, self._decoding = self._decoding, None
        await asyncio.gather(self.tts.stop(), self.asr.stop())
        if decoding is not None:
            await asyncio.to_thread(decoding.shutdown)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[EngineOutput, None]:
        listening, decoding = self.asr.listening, self._decoding
        if not self._started or listening is None or decoding is None:
            raise EngineFailed("the engine is not running", fatal=True)
        self._check(request)
        share = request.media_room.share()
        intake = Intake(request, listening, executor=decoding, clock=self._clock, share=share)
        reply = Reply(
            request,
            self._voice,
            writes=OutputModality.TEXT in request.modalities and request.task is not Task.SPEECH,
            speaks=OutputModality.AUDIO in request.modalities and request.task is not Task.TRANSCRIBE,
        )
        self.active_requests += 1
        try:
            async with aclosing(self._outputs(request, intake, reply)) as outputs:
                async for output in outputs:
                    yield output
            usage = Usage(
                input_tokens=intake.words,
                output_tokens=reply.words,
                input_audio_ms=intake.audio_ms,
                output_audio_ms=reply.audio_ms,
            )
            yield Finished(reply.reached or FinishReason.STOP, usage)
        except OmniError:
            raise
        except Exception as error:
            raise incident("the embedded engine failed", error, request_id=request.request_id) from error
        finally:
            try:
                await intake.close()
            finally:
                share.close()
                self.active_requests -= 1

    def _check(self, request: GenerationRequest) -> None:
        if request.task is Task.TRANSCRIBE:
            return
        wants_speech = OutputModality.AUDIO in request.modalities or request.task is Task.SPEECH
        if wants_speech and not self._voice.voices:
            param = "task" if request.task is Task.SPEECH else "modalities"
            raise UnsupportedParameter(f"this server has no voice; {self._voice.describe()}", param=param)
        if request.task is Task.SPEECH and OutputModality.AUDIO not in request.modalities:
            raise UnsupportedParameter("task speech answers with audio: name it in modalities", param="modalities")
        if request.voice is not None and self._voice.voices:
            self._voice.check(request.voice)

    def _outputs(self, request: GenerationRequest, intake: Intake, reply: Reply) -> AsyncGenerator[EngineOutput, None]:
        match request.task:
            case Task.CHAT:
                return chat(intake, reply, history=request.history, now=self._now)
            case Task.SPEECH:
                latin_only = self._voice.facts is not None and self._voice.facts.latin_only
                return read_aloud(intake, reply, latin_only=latin_only)
            case Task.TRANSCRIBE:
                return transcribe(intake, reply)


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Groups may be nested; the start fails with one error."""
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error

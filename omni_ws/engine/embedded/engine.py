"""The embedded engine: it hears, answers by rules, and speaks, with nothing but packages on a CPU."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import fields
from datetime import datetime

import numpy as np

from omni_ws.audio.vad import load_detector
from omni_ws.core.chunks import FinishReason, Modality, OutputModality, Task, Usage
from omni_ws.engine.base import EngineCapabilities, EngineOutput, EngineState, Finished, GenerationRequest
from omni_ws.engine.embedded.config import TALKERS_PER_CORE, EmbeddedConfig
from omni_ws.engine.embedded.intake import Intake
from omni_ws.engine.embedded.listener import Hearing
from omni_ws.engine.embedded.recogniser import SAMPLE_RATE, Recogniser
from omni_ws.engine.embedded.recogniser_pool import Scribes, Seats
from omni_ws.engine.embedded.reply import Reply
from omni_ws.engine.embedded.tasks import chat, read_aloud, transcribe
from omni_ws.engine.embedded.voice import Voice
from omni_ws.engine.incident import incident
from omni_ws.engine.loan_pool import LoanPool
from omni_ws.engine.threads import run_in_thread
from omni_ws.errors import EngineFailed, OmniError, UnsupportedParameter
from omni_ws.media.limits import MediaLimits

log = logging.getLogger(__name__)

#: Threads for decoding input and looking at pictures, besides one for every listening request.
DECODING_THREADS = 4

#: Threads that load recognisers while every seat is taken.
LOADING_THREADS = 2

#: Utterances that are written down at the same time: one a core, each with a recogniser of its own.
MAX_SCRIBES = 8


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
        self._voice = Voice(self.config.voice, default_voice=self.config.default_voice)
        self._started = False
        self._hearing: Hearing | None = None
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
        cores = os.cpu_count() or 1
        seats = self.config.max_recognisers or TALKERS_PER_CORE * cores
        listening = ThreadPoolExecutor(seats + LOADING_THREADS, thread_name_prefix="listener")
        self._decoding = ThreadPoolExecutor(DECODING_THREADS, thread_name_prefix="decoder")
        self._hearing = Hearing(
            Seats(seats),
            LoanPool(Recogniser),
            Scribes(min(cores, MAX_SCRIBES)),
            executor=listening,
        )
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._voice.start())
                group.create_task(self._warm(self._hearing, seats))
        except BaseExceptionGroup as errors:
            await self.stop()
            raise _first(errors) from errors
        except BaseException:
            await self.stop()
            raise
        self._started = True

    async def stop(self) -> None:
        self._started = False
        hearing, self._hearing = self._hearing, None
        decoding, self._decoding = self._decoding, None
        await self._voice.stop()
        if hearing is not None:
            await asyncio.to_thread(_close, hearing)
        if decoding is not None:
            await asyncio.to_thread(decoding.shutdown)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[EngineOutput, None]:
        hearing, decoding = self._hearing, self._decoding
        if not self._started or hearing is None or decoding is None:
            raise EngineFailed("the engine is not running", fatal=True)
        self._check(request)
        share = request.media_room.share()
        intake = Intake(request, hearing, executor=decoding, clock=self._clock, share=share)
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

    async def _warm(self, hearing: Hearing, seats: int) -> None:
        """Loads what the first speaker needs. Raises EngineFailed where recognition cannot work."""
        silence = np.zeros(SAMPLE_RATE // 2, np.int16)
        scribe = hearing.scribes.transcribe(silence)
        await run_in_thread(hearing.executor, load_detector)
        await run_in_thread(hearing.executor, hearing.recognisers.fill, 1)
        await asyncio.wrap_future(scribe)
        # The rest comes while people may already speak.
        hearing.executor.submit(hearing.recognisers.fill, min(self.config.warm_recognisers, seats))


def _close(hearing: Hearing) -> None:
    """Waits for the threads, then frees what they used. Blocks for a second at most."""
    hearing.executor.shutdown(cancel_futures=True)
    hearing.scribes.close()
    hearing.recognisers.close()


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Groups may be nested; the start fails with one error."""
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error

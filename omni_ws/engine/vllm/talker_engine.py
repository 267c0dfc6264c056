"""TalkerEngine: reads text aloud with a Talker and its codec (``Task.SPEECH``), while the text still arrives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from typing import Any

from omni_ws.core.chunks import FinishReason, Modality, OutputModality, Task, Usage
from omni_ws.engine.base import EngineCapabilities, EngineOutput, EngineState, Finished, GenerationRequest
from omni_ws.engine.decoding import decode_request
from omni_ws.engine.incident import incident
from omni_ws.engine.media_room import MediaShare
from omni_ws.engine.pipeline import pipeline
from omni_ws.engine.single_task import check_is_heard
from omni_ws.engine.vllm.code2wav import Code2Wav
from omni_ws.engine.vllm.read_aloud import ReadAloud
from omni_ws.engine.vllm.speaker import Speaker
from omni_ws.engine.vllm.talker import Talker
from omni_ws.errors import EngineFailed, OmniError


class TalkerEngine:
    """A Speaker as an engine. ``talker`` is a model's name or folder, ``args`` are vLLM's engine arguments for it.

    ``profile`` is the name or file of the Talker's profile, None to recognise it. Raises ConfigurationError.
    """

    name = "talker"
    measures_memory = True

    def __init__(self, talker: str, *, profile: str | None = None, args: Mapping[str, Any] | None = None) -> None:
        self.model = Path(talker).name if Path(talker).is_dir() else talker
        self.active_requests = 0
        self.speaker = Speaker(talker, profile=profile, args=args)
        self._decoding: ThreadPoolExecutor | None = None

    @property
    def state(self) -> EngineState:
        return EngineState.STARTING if self._decoding is None else self.speaker.state

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(
            input_modalities=frozenset({Modality.TEXT}),
            output_modalities=frozenset({OutputModality.AUDIO}),
            tasks=frozenset({Task.SPEECH}),
            extend=True,
            stages=(Talker.name, Code2Wav.name),
            voices=self.speaker.voices,
            stage_sampling=self.speaker.sampling_names,
            stage_params=self.speaker.parameter_names,
            priority=self.speaker.model.by_priority,
        )

    def describe(self) -> tuple[str, ...]:
        return ()

    async def start(self) -> None:
        """Load the Talker and the codec. Idempotent."""
        if self._decoding is None:
            await self.speaker.start()
            self._decoding = ThreadPoolExecutor(1, thread_name_prefix="text decoder")

    async def stop(self) -> None:
        decoding, self._decoding = self._decoding, None
        await self.speaker.stop()
        if decoding is not None:
            await asyncio.to_thread(decoding.shutdown)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[EngineOutput, None]:
        if self._decoding is None or self.state is not EngineState.OK:
            raise EngineFailed("the Talker is not running", fatal=True)
        check_is_heard(request)
        self.active_requests += 1
        try:
            with request.media_room.share() as share:
                async with aclosing(self._read_aloud(request, self._decoding, share)) as outputs:
                    async for output in outputs:
                        yield output
        except OmniError:
            raise
        except Exception as error:
            raise incident("the Talker failed", error, request_id=request.request_id) from error
        finally:
            self.active_requests -= 1

    async def _read_aloud(
        self, request: GenerationRequest, decoding: ThreadPoolExecutor, share: MediaShare
    ) -> AsyncGenerator[EngineOutput, None]:
        talker, code2wav = stages = self.speaker.stages(
            request.request_id,
            voice=request.voice,
            sampling=request.stage_sampling.get(Talker.name),
            parameters=request.stage_params,
            priority=request.options.priority if self.speaker.model.by_priority else 0,
        )

        def usage() -> Usage:
            audio_ms = round(code2wav.audio_ms)
            return Usage(input_tokens=talker.prompt_tokens, output_tokens=talker.tokens, output_audio_ms=audio_ms)

        request.meter.read = lambda: usage() if talker.prompt_tokens else None
        decoded = decode_request(request, {Modality.TEXT}, executor=decoding, share=share)
        chain = pipeline(decoded, [ReadAloud(), *stages], self.speaker.links, sink=request.sink)
        # Leaving the pipeline cancels its stages, which abort their requests in vLLM.
        async with aclosing(decoded), chain as outputs:
            async for output in outputs:
                yield output
        yield Finished(FinishReason.LENGTH if talker.cut else FinishReason.STOP, usage())

"""TalkerEngine: reads text aloud with a Talker and its codec (``Task.SPEECH``), while the text still arrives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

from omni_ws.core.chunks import Modality, OutputModality, Task
from omni_ws.engine.base import EngineCapabilities, EngineOutput, EngineState, GenerationRequest
from omni_ws.engine.clauses import is_being_written
from omni_ws.engine.single_task import check_is_heard
from omni_ws.engine.vllm.code2wav import Code2Wav
from omni_ws.engine.vllm.reading import ReadingStages, read_request
from omni_ws.engine.vllm.speaker import Speaker
from omni_ws.engine.vllm.talker import Talker
from omni_ws.errors import EngineFailed


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
            async with aclosing(read_request(request, partial(self._stages, request), self._decoding)) as outputs:
                async for output in outputs:
                    yield output
        finally:
            self.active_requests -= 1

    def _stages(self, request: GenerationRequest) -> ReadingStages:
        """Raises InvalidValue."""
        talker, code2wav = self.speaker.stages(
            request.request_id,
            voice=request.voice,
            sampling=request.stage_sampling.get(Talker.name),
            parameters=request.stage_params,
            priority=request.options.priority if self.speaker.model.by_priority else 0,
            being_written=is_being_written(request.input),
        )
        return ReadingStages(talker, code2wav, self.speaker.links)

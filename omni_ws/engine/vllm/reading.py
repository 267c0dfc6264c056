"""Runs a request to read text aloud (``Task.SPEECH``), while the text still arrives: with any Talker and vocoder."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Executor
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from omni_ws.core.chunks import FinishReason, Modality, Usage
from omni_ws.engine.base import EngineOutput, Finished, GenerationRequest
from omni_ws.engine.decoding import decode_request
from omni_ws.engine.incident import incident
from omni_ws.engine.media_room import MediaShare
from omni_ws.engine.omni.stages import OmniTalker, VocoderStage
from omni_ws.engine.pipeline import Stage, StageLink, pipeline
from omni_ws.engine.vllm.code2wav import Code2Wav
from omni_ws.engine.vllm.read_aloud import ReadAloud
from omni_ws.engine.vllm.talker import Talker
from omni_ws.errors import OmniError


@dataclass(frozen=True, slots=True)
class ReadingStages:
    """The stages of one request, which follow ReadAloud, and the links between all of them."""

    talker: Talker | OmniTalker
    vocoder: Code2Wav | VocoderStage
    links: Sequence[StageLink]
    #: What makes the Talker's input of the text.
    before: Sequence[Stage[Any]] = ()

    @property
    def usage(self) -> Usage:
        talker, audio_ms = self.talker, round(self.vocoder.audio_ms)
        return Usage(input_tokens=talker.prompt_tokens, output_tokens=talker.tokens, output_audio_ms=audio_ms)


async def read_request(
    request: GenerationRequest, make_stages: Callable[[], ReadingStages], decoding: Executor
) -> AsyncGenerator[EngineOutput, None]:
    """Read the text of ``request``, which ``decoding`` decodes."""
    try:
        with request.media_room.share() as share:
            async with aclosing(_outputs(request, make_stages(), decoding, share)) as outputs:
                async for output in outputs:
                    yield output
    except OmniError:
        raise
    except Exception as error:
        raise incident("the Talker failed", error, request_id=request.request_id) from error


async def _outputs(
    request: GenerationRequest, stages: ReadingStages, decoding: Executor, share: MediaShare
) -> AsyncGenerator[EngineOutput, None]:
    talker, vocoder = stages.talker, stages.vocoder
    request.meter.read = lambda: stages.usage if talker.prompt_tokens else None
    decoded = decode_request(request, {Modality.TEXT}, executor=decoding, share=share)
    chain = pipeline(decoded, [ReadAloud(), *stages.before, talker, vocoder], stages.links, sink=request.sink)
    # Leaving the pipeline cancels its stages, which abort what they have asked for.
    async with aclosing(decoded), chain as outputs:
        async for output in outputs:
            yield output
    yield Finished(FinishReason.LENGTH if talker.cut else FinishReason.STOP, stages.usage)

"""Reads text aloud with an omni model's own voice (``Task.SPEECH``), while the text still arrives."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from omni_ws.core.chunks import FinishReason, Modality, Usage
from omni_ws.engine.base import EngineOutput, Finished, GenerationRequest
from omni_ws.engine.decoding import decode_request
from omni_ws.engine.incident import incident
from omni_ws.engine.media_room import MediaShare
from omni_ws.engine.pipeline import pipeline
from omni_ws.engine.vllm.forced_answer import ForcedAnswer
from omni_ws.engine.vllm.omni_voice import OmniVoice
from omni_ws.engine.vllm.read_aloud import ReadAloud
from omni_ws.engine.vllm.talker import TEXT_LINK
from omni_ws.engine.vllm.thinker import ThinkerParts
from omni_ws.errors import OmniError


async def read_aloud(
    request: GenerationRequest, voice: OmniVoice, parts: ThinkerParts
) -> AsyncGenerator[EngineOutput, None]:
    """Read the text of ``request``."""
    try:
        with request.media_room.share() as share:
            async with aclosing(_outputs(request, voice, parts, share)) as outputs:
                async for output in outputs:
                    yield output
    except OmniError:
        raise
    except Exception as error:
        raise incident("the Talker failed", error, request_id=request.request_id) from error


async def _outputs(
    request: GenerationRequest, voice: OmniVoice, parts: ThinkerParts, share: MediaShare
) -> AsyncGenerator[EngineOutput, None]:
    talker, vocoder = voice.stages(
        voice=request.voice, sampling=request.stage_sampling.get("talker"), parameters=request.stage_params
    )

    def usage() -> Usage:
        audio_ms = round(vocoder.audio_ms)
        return Usage(input_tokens=talker.prompt_tokens, output_tokens=talker.tokens, output_audio_ms=audio_ms)

    request.meter.read = lambda: usage() if talker.prompt_tokens else None
    decoded = decode_request(request, {Modality.TEXT}, executor=parts.decoding, share=share)
    text = ForcedAnswer(parts, voice.rows, request)
    chain = pipeline(decoded, [ReadAloud(), text, talker, vocoder], (TEXT_LINK, *voice.links), sink=request.sink)
    async with aclosing(decoded), chain as outputs:
        async for output in outputs:
            yield output
    yield Finished(FinishReason.LENGTH if talker.cut else FinishReason.STOP, usage())

"""What an engine hears in a recording, without a server, and what it takes of the CPU."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from support.engine_answers import streamed

from omni_ws.audio.pcm import Samples, pcm16_from_samples
from omni_ws.core.chunks import AudioFormat, InputChunk, InputMode, Modality, OutputModality, Task, heard_language
from omni_ws.engine.asr.recogniser import SAMPLE_RATE
from omni_ws.engine.asr.recogniser_engine import RecogniserEngine
from omni_ws.engine.base import GenerationRequest, TranscriptOutput
from omni_ws.engine.channel import Channel

_PIECE: Final = SAMPLE_RATE // 10
#: Behind a recording, so that its last word ends in a pause as others do.
_TRAILING_SEC: Final = 0.5


@dataclass(frozen=True, slots=True)
class Heard:
    """The settled transcript of ``seconds`` of sound, and what this process took of the CPU meanwhile."""

    text: str
    cpu_sec: float
    seconds: float
    #: The language that was detected last (RFC 5646); None if none was.
    language: str | None = None


async def hear(engine: RecogniserEngine, samples: Samples, **fields: Any) -> Heard:
    """What the whole engine makes of a recording that is sent at once: voice activity, utterances, recognition.

    ``fields`` are those of the GenerationRequest, such as its language.
    """
    began = time.process_time()
    pcm = pcm16_from_samples(np.concatenate([samples, np.zeros(int(_TRAILING_SEC * SAMPLE_RATE), np.float32)]))
    pieces = (pcm[start : start + _PIECE].tobytes() for start in range(0, len(pcm), _PIECE))
    chunks = (InputChunk(Modality.AUDIO, piece) for piece in pieces)
    request = replace(whole_request(Task.TRANSCRIBE, chunks), **fields)
    settled, language = [], None
    async with aclosing(streamed(engine, request)) as outputs:
        async for output in outputs:
            if isinstance(output, TranscriptOutput) and not output.interim:
                settled.append(output.text)
                language = heard_language(output.hearing) if output.hearing is not None else language
    return Heard("".join(settled).strip(), time.process_time() - began, len(samples) / SAMPLE_RATE, language)


def whole_request(task: Task, chunks: Iterable[InputChunk]) -> GenerationRequest:
    """A request whose input is complete: audio at 16 kHz for its transcript, or text for speech."""
    source: Channel[InputChunk] = Channel(1 << 30, cost=lambda chunk: len(chunk.payload))
    for chunk in chunks:
        source.put_nowait(chunk)
    source.close()
    return GenerationRequest(
        request_id="req_1",
        task=task,
        input=source,
        input_mode=InputMode.EXTEND,
        input_audio=AudioFormat(sample_rate=SAMPLE_RATE),
        modalities=frozenset({OutputModality.AUDIO if task is Task.SPEECH else OutputModality.TRANSCRIPT}),
    )

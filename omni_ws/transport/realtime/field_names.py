"""Names of the fields of ``session_config`` in OpenAI's session object, for errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from omni_ws.errors import InvalidRequest

#: The path of each field of ``session_config`` in OpenAI's session object, for errors.
_FIELDS: Final = {
    "voice": "audio.output.voice",
    "speed": "audio.output.speed",
    "modalities": "output_modalities",
    "sampling.max_tokens": "max_output_tokens",
    "sampling.temperature": "temperature",
    "input_audio.sample_rate": "audio.input.format.rate",
    "input_audio.prompt": "audio.input.transcription.prompt",
    "input_audio.keywords": "audio.input.transcription.keywords",
    "input_audio.languages": "audio.input.transcription.languages",
    "input_audio.echo": "audio.input.echo",
    "input_audio.noise_reduction": "audio.input.noise_reduction.type",
    "output_audio.sample_rate": "audio.output.format.rate",
    "idle_prompt": "audio.input.turn_detection.idle_timeout_ms",
    "output_audio.format": "audio.output.format.type",
    "task": "audio.input.turn_detection.create_response",
    **{
        f"turn_detection.{name}": f"audio.input.turn_detection.{name}"
        for name in ("threshold", "prefix_padding_ms", "silence_duration_ms", "interrupt_response", "eagerness", "duck")
    },
}


@contextmanager
def naming(place: str) -> Iterator[None]:
    """Inside the block, let errors name the field as OpenAI does, in ``place``: ``session`` or ``response``."""
    try:
        yield
    except InvalidRequest as error:
        if error.param is not None and not error.param.startswith(f"{place}."):
            name, bracket, rest = error.param.partition("[")
            error.about(param=f"{place}.{_FIELDS.get(name, name)}{bracket}{rest}")
        raise

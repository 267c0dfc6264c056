"""What the server says about the parts of its engine when it has started."""

from __future__ import annotations

from collections.abc import Iterator

from omni_ws.core.chunks import Modality, OutputModality
from omni_ws.engine.base import Engine
from omni_ws.engine.composed.parts import HasParts


def part_lines(engine: Engine) -> Iterator[str]:
    """Yield a line for each part of an engine that is composed: its name and its model, or that it is missing."""
    if not isinstance(engine, HasParts):
        return
    able = engine.capabilities
    instead = {
        "asr": "the LLM hears by itself" if Modality.AUDIO in able.input_modalities else "none",
        "tts": "the LLM speaks by itself" if OutputModality.AUDIO in able.output_modalities else "none",
    }
    for role, part in engine.parts.items():
        if part is None:
            yield f"{role.upper()}: {instead[role]}"
        else:
            yield f"{role.upper()}: {part.name}" + (f" ({part.model})" if part.model != part.name else "")

"""Who listens, answers and speaks on the server: the parts of its engine, by names that people read."""

from __future__ import annotations

from itertools import groupby

from omni_ws.wire.server_frames import Part, SessionCreatedFrame

#: Engines whose name says less than that of their model.
NAMELESS = ("remote", "vllm", "talker")


def sentence(created: SessionCreatedFrame) -> str:
    """Returns one as ``heard by whisper, answered by rules, spoken by hibari``; empty if the server does not tell."""
    parts, can = created.parts, created.capabilities
    model = parts.llm.model if parts.llm else None
    told = [
        ("heard", _name(parts.asr) or (model if "audio" in can.input_modalities else None)),
        ("answered", model),
        ("spoken", _name(parts.tts) or (model if "audio" in can.output_modalities else None)),
    ]
    by_name = groupby((work for work in told if work[1] is not None), key=lambda work: work[1])
    return ", ".join(f"{' and '.join(verb for verb, _ in works)} by {name}" for name, works in by_name)


def _name(part: Part | None) -> str | None:
    if part is None:
        return None
    return part.model if part.name in NAMELESS else part.name

"""What an operator can set on the embedded engine."""

from __future__ import annotations

from dataclasses import dataclass

from omni_ws.config.model import VoiceChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedConfig:
    """``default_voice`` is a name of the chosen voice's list, None for its usual one."""

    #: Requests with audio that may be open at once; each may hold a recogniser of about 90 MB while someone speaks.
    #: None: as many as the cores carry.
    max_recognisers: int | None = None
    #: Recognisers loaded at start; more are loaded when they are needed, which takes half a second each.
    warm_recognisers: int = 2
    voice: VoiceChoice = VoiceChoice.AUTO
    default_voice: str | None = None
    model: str = "omni-embedded"

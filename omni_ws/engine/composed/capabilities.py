"""What a composition can do: what its LLM can, widened by what the other parts can."""

from __future__ import annotations

from dataclasses import replace

from omni_ws.core.chunks import Modality, OutputModality, Task
from omni_ws.engine.base import Engine, EngineCapabilities
from omni_ws.engine.composed.parts import Role


def hears(engine: Engine | None) -> bool:
    """Whether an engine can be the ASR. It may turn out only when it has started."""
    return engine is not None and Task.TRANSCRIBE in engine.capabilities.tasks


def speaks(engine: Engine | None) -> bool:
    """Whether an engine can be the TTS. It may turn out only when it has started, as where no voice is installed."""
    return engine is not None and Task.SPEECH in engine.capabilities.tasks


def composed_capabilities(llm: Engine, *, asr: Engine | None, tts: Engine | None) -> EngineCapabilities:
    """Derive the capabilities of a composition."""
    able = llm.capabilities
    if asr is not None and hears(asr):
        ears = asr.capabilities
        able = replace(
            able,
            input_modalities=able.input_modalities | {Modality.AUDIO},
            output_modalities=able.output_modalities | {OutputModality.TRANSCRIPT},
            tasks=able.tasks | {Task.TRANSCRIBE},
            languages=ears.languages,
            word_times=ears.word_times,
            translates=ears.translates,
            stage_params=able.stage_params | ears.stage_params,
            stage_sampling=able.stage_sampling | ears.stage_sampling,
            # The whole input is read before the LLM has to have it: what it cannot take late, it gets in time.
            extend=able.extend or ears.extend,
            # An LLM that hears does not wait for them.
            transcribes_first=Modality.AUDIO not in able.input_modalities,
            hears_on=True,
        )
    if tts is not None and speaks(tts):
        voice = tts.capabilities
        able = replace(
            able,
            output_modalities=able.output_modalities | {OutputModality.AUDIO},
            tasks=able.tasks | {Task.SPEECH},
            voices=voice.voices,
            voice_aliases=voice.voice_aliases,
            voice_languages=voice.voice_languages,
            speed=voice.speed,
            stage_params=able.stage_params | voice.stage_params,
            stage_sampling=able.stage_sampling | voice.stage_sampling,
        )
    return replace(able, stages=_stages(llm, asr=asr, tts=tts))


def _stages(llm: Engine, *, asr: Engine | None, tts: Engine | None) -> tuple[str, ...]:
    stages: list[str] = []
    able = ((Role.ASR, asr if hears(asr) else None), (Role.LLM, llm), (Role.TTS, tts if speaks(tts) else None))
    for role, engine in able:
        if engine is not None:
            stages += engine.capabilities.stages or (role.value,)
    return tuple(dict.fromkeys(stages))

"""RemoteEngine: streaming input in front of any server that speaks the OpenAI API, as ``remote.*`` configures it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace

from omni_ws.config.model import RemoteConfig
from omni_ws.core.chunks import OutputModality, Task
from omni_ws.engine.base import EngineOutput, GenerationRequest
from omni_ws.engine.composed.engine import ComposedEngine
from omni_ws.engine.composed.parts import Role
from omni_ws.engine.remote.llm_engine import RemoteLlmEngine
from omni_ws.engine.remote.settings import RemoteLlmSettings, RemoteTtsSettings, key_of, patience
from omni_ws.engine.remote.tts_engine import RemoteTtsEngine
from omni_ws.engine.remote.upstream import normalised


class RemoteEngine(ComposedEngine):
    """A RemoteLlmEngine, and a RemoteTtsEngine where there is a speech upstream.

    A model that speaks by itself speaks its answers also beside a speech upstream, which then only reads aloud.
    """

    def __init__(
        self, config: RemoteConfig, *, log_content: bool = False, max_spoken_tokens: int | None = None
    ) -> None:
        self.config = config
        self.llm = RemoteLlmEngine(replace(_llm_settings(config), log_content=log_content))
        self._speaks_itself = OutputModality.AUDIO.value in config.modalities
        tts = None
        if config.speech_upstream is not None:
            tts = RemoteTtsEngine(replace(_tts_settings(config, config.speech_upstream), log_content=log_content))
        super().__init__(
            self.llm, tts=tts, name="remote", first_byte_timeout_sec=None, max_spoken_tokens=max_spoken_tokens
        )

    def generate(self, request: GenerationRequest) -> AsyncGenerator[EngineOutput, None]:
        if request.task is Task.CHAT and self._speaks_itself:
            return self._alone(Role.LLM, self.llm, self._within_speech(request))
        return super().generate(request)


def _llm_settings(config: RemoteConfig) -> RemoteLlmSettings:
    return RemoteLlmSettings(
        urls=config.upstreams,
        model=config.model,
        api_key=key_of(config.api_key),
        input_modalities=config.input_modalities,
        modalities=config.modalities,
        options=config.options,
        sampling=config.sampling,
        stage_params=config.stage_params,
        stage_sampling=config.stage_sampling,
        voices=config.voices,
        audio_format=config.audio_format,
        audio_sample_rate=config.audio_sample_rate,
        **patience(config),
    )


def _tts_settings(config: RemoteConfig, url: str) -> RemoteTtsSettings:
    key = key_of(config.speech_api_key)
    if key is None and normalised(url) in map(normalised, config.upstreams):
        # The same server knows the same key; no other server may hear it.
        key = key_of(config.api_key)
    return RemoteTtsSettings(
        urls=(url,),
        model=config.speech_model,
        api_key=key,
        key_variable="OMNI_WS_REMOTE__SPEECH_API_KEY",
        voices=config.voices,
        audio_sample_rate=config.audio_sample_rate,
        **patience(config),
    )

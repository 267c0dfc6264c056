"""What engines that do a single task share: the capabilities of an ASR, and what every TTS refuses."""

from __future__ import annotations

from collections.abc import Iterable

from omni_ws.core.chunks import Modality, OutputModality, Task
from omni_ws.engine.base import EngineCapabilities, GenerationRequest
from omni_ws.errors import UnsupportedParameter


def asr_capabilities(
    *, sampling: Iterable[str], sampling_no_ops: Iterable[str] = (), languages: Iterable[str], word_times: bool
) -> EngineCapabilities:
    """Returns the capabilities of an engine that writes speech down as it arrives."""
    return EngineCapabilities(
        input_modalities=frozenset({Modality.AUDIO}),
        output_modalities=frozenset({OutputModality.TEXT, OutputModality.TRANSCRIPT}),
        tasks=frozenset({Task.TRANSCRIBE}),
        extend=True,
        sampling=frozenset(sampling),
        sampling_no_ops=frozenset(sampling_no_ops),
        languages=frozenset(languages),
        word_times=word_times,
    )


def check_is_heard(request: GenerationRequest) -> None:
    """Refuses a request for speech whose answer may have no audio. Raises UnsupportedParameter."""
    if OutputModality.AUDIO not in request.modalities:
        raise UnsupportedParameter("task speech answers with audio: name it in modalities", param="modalities")

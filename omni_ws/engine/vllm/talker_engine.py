"""Speaker: a voice made of a Talker on vLLM and a neural codec. ``staged_speech`` reads aloud with any Talker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from omni_ws.config.values import ConfigurationError
from omni_ws.core.chunks import FinishReason, Usage
from omni_ws.engine.base import EngineCapabilities, EngineState, Finished, GenerationRequest, OutputWriter, incident
from omni_ws.engine.channel import Stage, StageLink, pipeline
from omni_ws.engine.clauses import BEGIN_AFTER, is_being_written
from omni_ws.engine.frame_chunks import CODE2WAV_PARAMETERS, ChunkPolicy, frames_link, whole_numbers
from omni_ws.engine.omni.stages import OmniTalker, VocoderStage
from omni_ws.engine.spoken.lexicon import prepare
from omni_ws.engine.tts.speech_engine import speech_capabilities
from omni_ws.engine.vllm.code2wav import Code2Wav, CodecWindow, DecodeQueue
from omni_ws.engine.vllm.talker import (
    FIRST_COMMA_AFTER,
    FIRST_LONGEST,
    TALKER_SAMPLING,
    TEXT_LINK,
    Talker,
    TalkerModel,
    TalkerProfile,
    find_profile,
)
from omni_ws.errors import EngineFailed, OmniError

if TYPE_CHECKING:
    from omni_ws.engine.vllm.snac_decoder import SnacDecoder


async def staged_speech(
    request: GenerationRequest,
    text: AsyncIterator[str],
    out: OutputWriter,
    stages: Sequence[Stage[Any]],
    links: Sequence[StageLink],
) -> None:
    """Speak ``text``, and count the usage. The last two ``stages`` are a Talker and its vocoder."""
    talker, vocoder = stages[-2:]
    assert isinstance(talker, Talker | OmniTalker)
    assert isinstance(vocoder, Code2Wav | VocoderStage)

    def usage() -> Usage:
        audio_ms = round(vocoder.audio_ms)
        return Usage(input_tokens=talker.prompt_tokens, output_tokens=talker.tokens, output_audio_ms=audio_ms)

    request.meter.read = lambda: usage() if talker.prompt_tokens else None
    try:
        await pipeline(text, stages, links, out)
    except OmniError:
        raise
    except Exception as error:
        raise incident("the Talker failed", error, request_id=request.request_id) from error
    out.write(Finished(FinishReason.LENGTH if talker.cut else FinishReason.STOP, usage()))


#: The names in ``stage_params.talker``: the limits of the first clause in characters.
_TALKER_PARAMETERS: Final = frozenset({"first_comma_after", "first_longest"})
#: Window lengths, in frames, that the first chunks of an answer typically have.
_WARM_UP_FRAMES: Final = (4, 5, 7, 8, 10, 14, 22, 30)


class Speaker:
    """A Voice that can also speak the answers of a Thinker. Owns the Talker's model and the codec's decoder.

    ``talker`` is a model's name or folder, ``args`` are vLLM's engine arguments for it; ``profile`` is the name or file
    of its profile (None to recognise it). ``device`` is where the codec runs, by default PyTorch's choice. Raises
    ConfigurationError.
    """

    name = Talker.name
    hosts: tuple[str, ...] = ()
    measures_memory = True

    def __init__(
        self,
        talker: str,
        *,
        profile: str | None = None,
        args: Mapping[str, Any] | None = None,
        device: str | None = None,
    ) -> None:
        self.model = Path(talker).name if Path(talker).is_dir() else talker
        try:
            self.profile: TalkerProfile = find_profile(profile, talker)
        except EngineFailed as error:
            raise ConfigurationError([f"vllm.talker_profile: {error.message}"]) from error
        self.talker = TalkerModel("Talker", {"model": talker, **(args or {})}, setting="vllm.talker_args")
        self._device = device
        self._decoder: SnacDecoder | None = None
        self._queue: DecodeQueue | None = None

    @property
    def state(self) -> EngineState:
        return self.talker.state

    @property
    def capabilities(self) -> EngineCapabilities:
        return speech_capabilities(
            self.voices,
            stages=(Talker.name, Code2Wav.name),
            stage_sampling=self.sampling_names,
            stage_params=self.parameter_names,
            priority=self.talker.by_priority,
        )

    def describe(self) -> tuple[str, ...]:
        return ()

    @property
    def voices(self) -> tuple[str, ...]:
        """The names of the voices, the default first."""
        return tuple(self.profile.voices)

    @property
    def sampling_names(self) -> frozenset[str]:
        """The names for ``EngineCapabilities.stage_sampling``."""
        return frozenset(f"talker.{name}" for name in TALKER_SAMPLING)

    @property
    def parameter_names(self) -> frozenset[str]:
        """The names for ``EngineCapabilities.stage_params``."""
        names = {"talker": _TALKER_PARAMETERS, "code2wav": CODE2WAV_PARAMETERS}
        return frozenset(f"{stage}.{name}" for stage in names for name in names[stage])

    @property
    def links(self) -> tuple[StageLink, StageLink]:
        """The links before the Talker and before Code2Wav."""
        return TEXT_LINK, frames_link(self._started()[0].frame_ms)

    async def start(self) -> None:
        """Load and warm up both models. Raises ConfigurationError or EngineFailed."""
        try:
            self._decoder = await asyncio.to_thread(self._load_decoder)
            self._queue = DecodeQueue(self._decoder.decode)
            await self._warm_up(self._queue)
            await self.talker.start()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Release both models. Idempotent."""
        queue, self._queue, self._decoder = self._queue, None, None
        if queue is not None:
            await queue.close()
        await self.talker.stop()

    async def speak(self, request: GenerationRequest, text: AsyncIterator[str], out: OutputWriter) -> None:
        if self.state is not EngineState.OK:
            raise EngineFailed("the Talker is not running", fatal=True)
        await prepare(request.lexicon)
        stages = self.stages(
            request.request_id,
            voice=request.voice,
            sampling=request.stage_sampling.get(Talker.name),
            parameters=request.stage_params,
            priority=request.options.priority if self.talker.by_priority else 0,
            being_written=is_being_written(request.input),
            lexicon=request.lexicon,
        )
        await staged_speech(request, text, out, stages, self.links[1:])

    def stages(
        self,
        request_id: str,
        *,
        voice: str | None = None,
        sampling: Mapping[str, Any] | None = None,
        parameters: Mapping[str, Mapping[str, Any]] | None = None,
        priority: int = 0,
        being_written: bool = False,
        lexicon: Mapping[str, str] | None = None,
    ) -> tuple[Talker, Code2Wav]:
        """Return the Talker and Code2Wav of one request; the Talker takes pieces of text.

        ``sampling`` is ``stage_sampling.talker``, ``parameters`` all of ``stage_params``. ``being_written``: see
        ``is_being_written``. Raises InvalidValue.
        """
        decoder, queue = self._started()
        limits = whole_numbers("talker", _TALKER_PARAMETERS, parameters)
        talker = Talker(
            self.talker,
            self.profile,
            request_id=request_id,
            voice=voice,
            sampling=sampling,
            priority=priority,
            comma_after=limits.get("first_comma_after", 0 if being_written else FIRST_COMMA_AFTER),
            longest=limits.get("first_longest", FIRST_LONGEST),
            begin_after_sec=BEGIN_AFTER if being_written else None,
            lexicon=lexicon,
        )
        code2wav = Code2Wav(
            queue,
            sample_rate=decoder.sample_rate,
            frame_ms=decoder.frame_ms,
            slots=len(self.profile.layout.slots),
            policy=ChunkPolicy.asked(parameters),
        )
        return talker, code2wav

    def _started(self) -> tuple[SnacDecoder, DecodeQueue]:
        if self._decoder is None or self._queue is None:
            raise EngineFailed("the Talker is not available", fatal=True)
        return self._decoder, self._queue

    def _load_decoder(self) -> SnacDecoder:
        try:
            from omni_ws.engine.vllm.snac_decoder import SnacDecoder
        except ImportError as error:
            raise EngineFailed(f"speech output requires the package snac: {error}") from error
        return SnacDecoder.load(self.profile.codec, self.profile.layout, device=self._device)

    async def _warm_up(self, queue: DecodeQueue) -> None:
        """Decode windows of typical lengths; also measures the decoding time, which determines the first chunk."""
        # Twice, because PyTorch compiles for a shape when it occurs for the second time.
        for frames in _WARM_UP_FRAMES * 2:
            codes = np.zeros((frames, len(self.profile.layout.slots)), np.int32)
            await queue.decode(CodecWindow(codes, 0, 0, frames))
        queue.measure_anew()
        for frames in _WARM_UP_FRAMES:
            codes = np.zeros((frames, len(self.profile.layout.slots)), np.int32)
            await queue.decode(CodecWindow(codes, 0, 0, frames))

"""VllmRecogniser: speech recognition by a model on vLLM, such as Whisper or Voxtral."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from omni_ws.audio.pcm import Pcm16, Samples, samples_from_pcm16
from omni_ws.config.values import ConfigurationError
from omni_ws.engine.asr.recogniser import (
    SAMPLE_RATE,
    ListenerSlots,
    Recognised,
    StretchedText,
    UtteranceLimits,
    asr_capabilities,
)
from omni_ws.engine.base import EngineCapabilities, GenerationRequest
from omni_ws.engine.vllm.language_model import LanguageModel
from omni_ws.errors import EngineFailed

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM


#: How many requests may be listened to simultaneously; a lower ``max_num_seqs`` takes precedence.
MAX_TALKERS: Final = 64
#: How much speech, in samples, the first interim text of an utterance needs.
FIRST_INTERIM_SAMPLES: Final = SAMPLE_RATE // 2
#: For each further interim text the utterance has to be this many times as long as for the previous one, because the
#: model reads an utterance from its beginning every time.
INTERIM_GROWTH: Final = 1.3
#: The share of time that may be spent on interim texts.
INTERIM_SHARE: Final = 0.5
#: The priority of interim texts in vLLM's queue; final texts have 0, which goes first.
INTERIM_PRIORITY: Final = 1


def interim_gap_sec(read_sec: float, took_sec: float) -> float:
    """Return how many seconds of speech must be added before the next interim text is made.

    The previous interim text covered ``read_sec`` seconds of speech, and took ``took_sec`` seconds to compute.
    """
    return max((INTERIM_GROWTH - 1) * read_sec, took_sec / INTERIM_SHARE)


#: The longest utterance for models that name no limit, in seconds; Whisper's limit.
_LONGEST_SEC: Final = 30
#: An utterance is cut at the first pause that comes less than this before the longest utterance, in seconds.
_CUT_BEFORE_SEC: Final = 8
#: The limit on the tokens of an utterance, as models that hear no words may repeat the same words for ever. Fast speech
#: has 6 tokens a second in English, and up to 15 in scripts where each character takes one or two.
_TOKENS_PER_SEC: Final = 20
_LEAST_TOKENS: Final = 32
#: Audio is not cached, as no utterance comes twice. A step has to take the audio of a whole utterance, which is 1,500
#: tokens for Whisper.
_DEFAULT_ARGS: Final[Mapping[str, Any]] = {"mm_processor_cache_gb": 0, "max_num_batched_tokens": 4096}
#: The most characters of an expected text that are tokenised: more than a model has room for.
_MOST_EXPECTED_CHARACTERS: Final = 2000
#: The room for the tokens before and after that text.
_TOKENS_AROUND: Final = 8
_ENGLISH_ONLY: Final = "<|startoftranscript|><|notimestamps|>"


class VllmRecogniser(LanguageModel):
    """A Recogniser: Whisper, Voxtral, or any other model for which vLLM supports transcription.

    ``args`` are vLLM's engine arguments. Interim texts come at growing intervals, because for each of them the model
    reads the utterance from its beginning. Texts have no times of words. The model's languages, limits and abilities
    are known after ``start``, which raises ConfigurationError for a model that cannot transcribe speech at SAMPLE_RATE.
    """

    name = "vllm"
    hosts: tuple[str, ...] = ()

    def __init__(self, model: str, args: Mapping[str, Any]) -> None:
        super().__init__("ASR", {**_DEFAULT_ARGS, **args, "model": model}, setting="asr.args")
        self.model = Path(model).name if Path(model).is_dir() else model
        self.slots = ListenerSlots(min(MAX_TALKERS, args.get("max_num_seqs", MAX_TALKERS)))
        self.limits = UtteranceLimits(0, 0)
        self._languages: frozenset[str] = frozenset()
        self._class: Any = None
        self._config: Any = None
        self._english_only = False
        self._expects = False

    @property
    def capabilities(self) -> EngineCapabilities:
        able = asr_capabilities(
            keywords=self._expects,
            sampling=("max_tokens", "stop"),
            sampling_no_ops=("temperature", "top_p", "seed"),
            languages=self._languages,
            word_times=False,
            transcript_guesses=True,
        )
        # Of the models that vLLM runs, a multilingual Whisper writes English whatever is spoken.
        return replace(able, translates=self._class is not None and self.detects_language)

    def describe(self) -> tuple[str, ...]:
        return ()

    def transcriber(self, request: GenerationRequest) -> VllmTranscriber:
        return VllmTranscriber(
            self, language=request.language, translate=request.options.translate, expected=request.expected
        )

    async def transcribe(
        self, pcm: Pcm16, *, language: str | None, translate: bool = False, expected: str = "", priority: int = 0
    ) -> str:
        """Return the text of an utterance of at most ``limits.longest`` samples; with ``translate``, in English.

        With ``language`` None the language is detected, if the model does that (``detects_language``). ``expected`` is
        a text with the names and terms to expect, for Whisper only. In vLLM's queue, a lower ``priority`` comes first.
        Raises OmniErrors.
        """
        if language is None and self.detects_language:
            language = await self.language_of(pcm, priority=priority)
        most = _LEAST_TOKENS + _TOKENS_PER_SEC * len(pcm) // SAMPLE_RATE
        output = await self._output(
            self._prompt(samples_from_pcm16(pcm), language, translate, expected),
            self._parameters(most),
            priority=priority,
        )
        text: str = self._class.post_process_output(output.text)
        return text.strip()

    @property
    def detects_language(self) -> bool:
        """Whether a language that is not given has to be detected before the transcription. Known after ``start``."""
        return bool(self._class.supports_explicit_language_detection) and not self._english_only

    async def language_of(self, pcm: Pcm16, *, priority: int = 0) -> str:
        """Return the language that is spoken in ``pcm``, as a code such as ``en``. Only if ``detects_language``."""
        tokenizer = self.llm.get_tokenizer()
        parameters = self._parameters(1, allowed=self._class.get_language_token_ids(tokenizer))
        prompt = self._class.get_language_detection_prompt(samples_from_pcm16(pcm), self._config)
        output = await self._output(prompt, parameters, priority=priority)
        language: str = self._class.parse_language_detection_output(list(output.token_ids), tokenizer)
        return language

    async def _warm_up(self, llm: AsyncLLM) -> None:
        """Read the properties of the model, and transcribe a second of noise. Raises ConfigurationError."""
        await asyncio.to_thread(self._read, llm)
        noise = np.random.default_rng(0).integers(-300, 300, SAMPLE_RATE, dtype=np.int16)
        await self.transcribe(noise, language="en" if "en" in self._languages else min(self._languages))

    def _read(self, llm: AsyncLLM) -> None:
        from vllm.model_executor.model_loader import get_model_cls
        from vllm.model_executor.models.interfaces import supports_transcription
        from vllm.model_executor.models.whisper import WhisperForConditionalGeneration

        model_config = llm.model_config
        self._class = get_model_cls(model_config)
        if not supports_transcription(self._class):
            raise ConfigurationError([f"{model_config.model} does not write speech down"])
        self._config = self._class.get_speech_to_text_config(model_config, "transcribe")
        if round(self._config.sample_rate) != SAMPLE_RATE:
            raise ConfigurationError([f"{model_config.model} needs audio at {self._config.sample_rate} Hz"])
        # Other models use a prompt in other ways; for some it replaces the instruction to transcribe.
        self._expects = issubclass(self._class, WhisperForConditionalGeneration)
        self._english_only = model_config.try_get_generation_config().get("is_multilingual") is False
        self._languages = frozenset({"en"} if self._english_only else self._class.supported_languages)
        longest = min(self._config.max_audio_clip_s or _LONGEST_SEC, _LONGEST_SEC)
        self.limits = UtteranceLimits(
            cut_after=max(longest - _CUT_BEFORE_SEC, longest // 2) * SAMPLE_RATE, longest=longest * SAMPLE_RATE
        )

    def _prompt(self, samples: Samples, language: str | None, translate: bool = False, expected: str = "") -> Any:
        from vllm.config.speech_to_text import SpeechToTextParams

        prompt = self._class.get_generation_prompt(
            SpeechToTextParams(
                audio=samples,
                stt_config=self._config,
                model_config=self.llm.model_config,
                language="en" if self._english_only else language,
                task_type="translate" if translate else "transcribe",
                to_language="en" if translate else None,
            )
        )
        if self._english_only:  # such models were not trained with tokens for languages and tasks
            prompt["decoder_prompt"]["prompt"] = _ENGLISH_ONLY
        if expected:
            prompt["decoder_prompt"]["prompt"] = self._before(expected) + prompt["decoder_prompt"]["prompt"]
        return prompt

    def _before(self, expected: str) -> str:
        """Return a prompt that makes Whisper expect the names and terms in ``expected``.

        If the text is longer than the room for it, its end is used. Special tokens in it are read as plain text.
        """
        tokenizer = self.llm.get_tokenizer()
        text = expected[-_MOST_EXPECTED_CHARACTERS:].replace("<|", "< |")
        room = self.llm.model_config.max_model_len // 2 - _TOKENS_AROUND
        tokens = tokenizer.encode(f" {text.strip()}", add_special_tokens=False)[-room:]
        return f"<|startofprev|>{tokenizer.decode(tokens)}"

    def _parameters(self, max_tokens: int, *, allowed: list[int] | None = None) -> SamplingParams:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        longest = self.llm.model_config.max_model_len // 2
        return SamplingParams(
            temperature=0,
            max_tokens=min(max_tokens, longest),
            allowed_token_ids=allowed,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    async def _output(self, prompt: Any, parameters: SamplingParams, *, priority: int) -> Any:
        from vllm.renderers.inputs.preprocess import parse_model_prompt

        rendered = await self.render(parse_model_prompt(self.llm.model_config, prompt))
        generated = self.generate(rendered, parameters, f"asr-{uuid.uuid4().hex}", priority=priority)
        async with aclosing(generated) as outputs:
            async for output in outputs:
                return output.outputs[0]
        raise EngineFailed("the ASR ended without an output")


class VllmTranscriber:
    """A Transcriber on vLLM.

    Without a given ``language``, it detects the first utterance's language, and keeps it, if ``model`` can detect it.
    """

    speculates = True

    def __init__(self, model: VllmRecogniser, *, language: str | None, translate: bool, expected: str) -> None:
        self.limits = model.limits
        self._model = model
        self._loop = asyncio.get_running_loop()
        self._language = language
        self._translate = translate
        self._expected = expected

    def live_text(self) -> StretchedText:
        return StretchedText(self._interim, time.monotonic, first=FIRST_INTERIM_SAMPLES, gap=interim_gap_sec)

    def transcribe(
        self,
        pcm: Pcm16,
        *,
        waited_for: bool,
        tell: Callable[[str], None],
        tell_untimed: Callable[[Recognised], None],
    ) -> asyncio.Task[Recognised]:
        return asyncio.create_task(self._settled(pcm), name="transcript")

    async def _settled(self, pcm: Pcm16) -> Recognised:
        if self._language is None and self._model.detects_language:
            self._language = await self._model.language_of(pcm)
        return Recognised(await self._transcribed(pcm))

    def _interim(self, pcm: Pcm16) -> Future[str]:
        return asyncio.run_coroutine_threadsafe(self._transcribed(pcm, priority=INTERIM_PRIORITY), self._loop)

    def _transcribed(self, pcm: Pcm16, *, priority: int = 0) -> Coroutine[Any, Any, str]:
        return self._model.transcribe(
            pcm, language=self._language, translate=self._translate, expected=self._expected, priority=priority
        )

"""VllmEngine: an engine with a Thinker, which reads text and media, and optionally a voice, which speaks.

OmniVoice is the voice of an omni model; with ForcedAnswer, this voice reads a text aloud that the Thinker did not
write.
"""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import fields
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from omni_ws.config.model import VllmConfig
from omni_ws.config.values import ConfigurationError
from omni_ws.core.chunks import Modality, OutputModality, Task, Usage
from omni_ws.engine.base import (
    EngineCapabilities,
    EngineState,
    Finished,
    GenerationRequest,
    OutputWriter,
    ReadoutManifest,
    incident,
)
from omni_ws.engine.channel import (
    CODE2WAV_PARAMETERS,
    Channel,
    ChunkPolicy,
    Stage,
    StageLink,
    frames_link,
    pipeline,
)
from omni_ws.engine.clauses import BEGIN_AFTER, is_being_written, last_border, with_pauses
from omni_ws.engine.composed.parts import PartDescription, Role
from omni_ws.engine.decoding import DECODING_THREADS, decode_input
from omni_ws.engine.omni.step_process import (
    OMNI_TALKER_SAMPLING,
    ROWS_LINK,
    OmniTalker,
    SpeechPart,
    StepProcess,
    VocoderStage,
    wrong_settings,
)
from omni_ws.engine.threads import MediaShare, SoleThread, end_tasks, run_in_thread
from omni_ws.engine.tts.speech_engine import SpeechEngine, read_aloud
from omni_ws.engine.vllm.checkpoint import (
    SHARE,
    Checkpoint,
    OmniFamily,
    OmniModel,
    check_omni_fits,
    find_omni_model,
    lacks_chat_template,
    memory_shares,
    omni_sizes,
    read_chat_template,
    read_checkpoint,
    thinker_share,
    weights_bytes,
)
from omni_ws.engine.vllm.early_input import EarlyBudget, EarlyOrigin
from omni_ws.engine.vllm.language_model import LanguageModel, prepare_environment, use_first_model_runner
from omni_ws.engine.vllm.prompt import Excerpt, PromptContext
from omni_ws.engine.vllm.readouts import Readouts, TokenGenerator
from omni_ws.engine.vllm.sampling import SAMPLING, TokenBytes, check_parsers, load_parser, prefill_parameters
from omni_ws.engine.vllm.talker import (
    Code2Wav,
    Speaker,
    Talker,
    staged_speech,
)
from omni_ws.engine.vllm.thinker import LEAST_EARLY_TOKENS, Thinker, ThinkerParts
from omni_ws.engine.vllm.thinker_rows import TalkerFeed, ThinkerRows
from omni_ws.errors import EngineFailed, InvalidValue, OmniError, UnsupportedParameter
from omni_ws.media import MediaLimits

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


logger = logging.getLogger(__name__)

_TALKER: Final = "omni_ws.engine.omni.slot_talker:talker"
_VOCODER: Final = "omni_ws.engine.omni.slot_talker:vocoder"


class OmniVoice:
    """An omni model's own voice: it owns the processes of Talker and vocoder, and makes the stages of an answer.

    ``sessions`` is the limit on concurrently spoken answers; a further answer is refused, or is text only (SpeechPart).
    ``positions`` limits the prompt and the speech of an answer together, in positions of the Talker. ``kept_bytes``
    limits the memory of the hidden states that are kept for conversations.
    """

    def __init__(self, model: OmniModel, *, sessions: int, positions: int, kept_bytes: int) -> None:
        self.model = model
        #: The Thinker's hidden states, for the Talker.
        self.rows = ThinkerRows(model.config, kept_bytes=kept_bytes, positions=positions)
        self._sessions = sessions
        self._positions = positions
        #: The names of the voices, the default first; known once started.
        self.voices: tuple[str, ...] = ()
        #: The processes of Talker and vocoder, once started.
        self.processes: tuple[StepProcess, ...] = ()

    @property
    def state(self) -> EngineState:
        """OK while both processes are ready; STARTING before ``start`` and after ``stop``; UNHEALTHY if one died."""
        states = {process.state for process in self.processes}
        if not states or EngineState.STARTING in states:
            return EngineState.STARTING
        return EngineState.UNHEALTHY if EngineState.UNHEALTHY in states else EngineState.OK

    @property
    def memory_bytes(self) -> int:
        """The memory of both models, in bytes: weights, slots and buffers. A process that does not run counts 0."""
        return sum(process.ready.memory_bytes for process in self.processes if process.ready is not None)

    @property
    def open_sessions(self) -> int:
        """The sum of the open sessions in both processes; an answer that is being spoken has up to one in each."""
        return sum(process.open_sessions for process in self.processes)

    @property
    def sampling_names(self) -> frozenset[str]:
        """The names for ``EngineCapabilities.stage_sampling``."""
        return frozenset(f"{OmniTalker.name}.{name}" for name in OMNI_TALKER_SAMPLING)

    @property
    def parameter_names(self) -> frozenset[str]:
        """The names for ``EngineCapabilities.stage_params``; none for Qwen2.5, whose windows cannot be changed."""
        if self.model.family is OmniFamily.QWEN25:
            return frozenset()
        return frozenset(f"{VocoderStage.name}.{name}" for name in CODE2WAV_PARAMETERS)

    @property
    def links(self) -> tuple[StageLink, StageLink]:
        """The links before the Talker and before the vocoder. Raises EngineFailed before ``start``."""
        return ROWS_LINK, frames_link(self._started()[1].facts["frame_ms"])

    def describe(self) -> tuple[str, ...]:
        """Return lines for the operator; none before ``start``."""
        if not self.voices:
            return ()
        at_once = f"{self._sessions} answer{'s' if self._sessions > 1 else ''} at a time"
        return (f"{self.model.name} speaks with its own voice: {', '.join(self.voices)}; {at_once}",)

    async def start(self) -> None:
        """Start both processes at the same time, and open the channel for hidden states. Downloads missing files.

        Raises ConfigurationError for a model that cannot be read or does not fit into memory, EngineFailed if a process
        does not start.
        """
        prepare_environment()
        use_first_model_runner()
        folder = await asyncio.to_thread(self.model.folder)
        await asyncio.to_thread(self._check_memory, folder)
        await self._start_processes(folder)
        await self.rows.channel.start()

    async def _start_processes(self, folder: Path) -> None:
        where = {"folder": str(folder), "slots": self._sessions}
        talker = StepProcess("Talker", _TALKER, {**where, "positions": self._positions})
        vocoder = StepProcess("vocoder", _VOCODER, where)
        processes = (talker, vocoder)
        starting = [asyncio.create_task(process.start(), name=f"start of the {process.role}") for process in processes]
        try:
            await asyncio.gather(*starting)
        except BaseException:
            await end_tasks(*starting)
            await asyncio.gather(*(process.stop() for process in processes))
            raise
        self.voices = tuple(talker.facts["voices"])
        self.processes = processes
        for process in processes:
            assert process.ready is not None
            took = process.ready.memory_bytes / 1e9
            logger.info("the %s takes %.2f GB and serves %d answers at a time", process.role, took, process.ready.slots)

    async def stop(self) -> None:
        """End both processes, and close the channel for hidden states. Idempotent."""
        processes, self.processes = self.processes, ()
        await asyncio.gather(*(process.stop() for process in processes))
        await self.rows.channel.stop()

    def thinker_share(self) -> float | None:
        """Return the share (0 to 1) of a GPU's memory that the processes leave for the Thinker. Blocks.

        Returns None without a GPU, or if the operator set the share. Call it after ``start``. Raises ConfigurationError
        if the processes leave nothing: ``start`` does not check the size of a model that vLLM quantises.
        """
        total = _gpu_bytes()
        if total is None or SHARE in self.model.args:
            return None
        share = thinker_share(self.memory_bytes, total=total)
        logger.info("the Thinker uses up to %.0f %% of a GPU's memory", 100 * share)
        return share

    def _check_memory(self, folder: Path) -> None:
        """Raise ConfigurationError if the model does not fit into memory.

        Not checked without a GPU, if the operator set the Thinker's share, or if vLLM quantises the model.
        """
        total = _gpu_bytes()
        if total is None or SHARE in self.model.args or self.model.args.get("quantization") is not None:
            return
        sizes = omni_sizes(self.model, folder, sessions=self._sessions, positions=self._positions)
        gpus = int(self.model.args.get("tensor_parallel_size") or 1)
        check_omni_fits(self.model.name, **sizes, total=total, gpus=gpus)

    def stages(
        self,
        *,
        voice: str | None = None,
        sampling: Mapping[str, Any] | None = None,
        parameters: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> tuple[OmniTalker, VocoderStage]:
        """Return the Talker and the vocoder of one request; the Talker takes TalkerItems.

        ``voice`` None is the default voice. ``sampling`` is ``stage_sampling.talker``, ``parameters`` all of
        ``stage_params``, which Qwen2.5 ignores. Raises InvalidValue, and EngineFailed before ``start``.
        """
        talker, vocoder = self._started()
        asked = dict(sampling or {})
        for name, reason in wrong_settings(asked).items():
            raise InvalidValue(f"{name} {reason}", param=f"stage_sampling.{OmniTalker.name}.{name}")
        settings = {} if voice is None else {"voice": voice}
        speaking = OmniTalker(talker, settings | asked, frame_ms=vocoder.facts["frame_ms"])
        if self.model.family is OmniFamily.QWEN25:
            seed = {} if asked.get("seed") is None else {"seed": asked["seed"]}
            return speaking, VocoderStage(vocoder, settings=settings | seed, block=vocoder.facts["block"])
        return speaking, VocoderStage(vocoder, policy=ChunkPolicy.asked(parameters))

    def _started(self) -> tuple[StepProcess, ...]:
        if not self.processes:
            raise EngineFailed("the Talker is not available", param="tts", fatal=True)
        return self.processes


def own_voice(config: VllmConfig, model: OmniModel | None) -> OmniVoice | None:
    """Return the own voice of ``model``; None if it is no omni model, has no Talker, or is not to speak.

    Raises ConfigurationError for settings with which the model cannot speak.
    """
    if model is None or not model.speaks or not config.omni_speech:
        return None
    problems: list[str] = []
    if config.talker is not None:
        problems.append(f"vllm.talker: {model.name} speaks with its own voice")
    if config.args.get("enable_lora"):
        problems.append("vllm.args.enable_lora: the voice of an omni model cannot follow an adapter of its Thinker")
    if (config.args.get("mm_processor_kwargs") or {}).get("use_audio_in_video"):
        problems.append("vllm.args.mm_processor_kwargs: the sound inside videos is not supported (use_audio_in_video)")
    try:
        ThinkerRows.check_args(config.args)
    except ConfigurationError as error:
        problems += error.problems
    if problems:
        raise ConfigurationError([f"{problem}; --vllm.omni-speech false serves text alone" for problem in problems])
    return OmniVoice(
        model,
        sessions=config.omni_sessions,
        positions=config.omni_positions,
        kept_bytes=config.omni_kept_bytes,
    )


def _gpu_bytes() -> int | None:
    """Return the memory of a GPU in bytes; None if vLLM runs on a CPU. Blocks while vLLM looks for GPUs."""
    from vllm.platforms import current_platform

    return None if current_platform.is_cpu() else int(current_platform.get_device_total_memory())


#: A position between words, before the white space: both parts of the text have the same tokens as the whole text.
_BORDER: Final = re.compile(r"(?<=\S)\s+(?=\S)")
_CLAUSE_END: Final = re.compile(r"[.!?;:,]\s|\n")
#: How much text without white space is held back, in characters.
_LONGEST_WORD: Final = 200


class ForcedAnswer:
    """A Stage: pieces of text in, TalkerItems out, as if the Thinker had written the text as its answer.

    The Thinker computes the hidden states of the text in steps, as its answer to an empty message. While the text still
    arrives, a step has at least LEAST_EARLY_TOKENS tokens; text that a client is writing is also computed at the end of
    a clause and at a pause. If the Talker reads no hidden states of answers (Qwen3), there are no steps. An empty text
    yields no items. Raises ContextLengthExceeded if the Thinker has to compute a text that is too long for it.
    """

    name = "spoken text"

    def __init__(self, parts: ThinkerParts, rows: ThinkerRows, request: GenerationRequest) -> None:
        self._parts = parts
        self._rows = rows
        self._request = request
        self._prompt: list[int] = []
        #: The tokens of the text that were handed on, and those that follow.
        self._said: list[int] = []
        self._new: list[int] = []
        self._steps = 0

    async def run(self, source: AsyncIterator[str], sink: Channel[Any] | None, outputs: OutputWriter) -> None:
        """Put the rows of an empty prompt into ``sink``, then the tokens (Qwen2.5: and hidden states) of the text."""
        assert sink is not None, "this stage requires a Talker after it"
        form = self._parts.form
        head, tail = await self._in_thread(form.frame, PromptContext())
        self._prompt = await self._in_thread(form.tokens, head + tail)
        with TalkerFeed(self._rows, sink, conversation=None, salt=None) as feed:
            held = ""
            # Text that is being written is computed clause by clause, and at pauses, so that speech goes on meanwhile.
            being_written = is_being_written(self._request.input)
            async with aclosing(with_pauses(source, lambda: BEGIN_AFTER if being_written else None)) as pieces:
                async for piece in pieces:
                    held += piece or ""
                    ended = piece is None or (being_written and _CLAUSE_END.search(held) is not None)
                    whole, held = whole_words(held, ended=ended)
                    await self._say(whole)
                    if len(self._new) >= LEAST_EARLY_TOKENS or (ended and self._new):
                        await self._compute(feed)
            await self._say(held)
            if self._new:
                await self._compute(feed)
            if self._said:
                await feed.finish()

    async def _say(self, text: str) -> None:
        form = self._parts.form
        self._new += await self._in_thread(form.tokens, form.plain(text))

    async def _compute(self, feed: TalkerFeed) -> None:
        if not self._said:
            feed.replace({"prompt_token_ids": self._prompt})
        feed.say(enumerate(self._new, len(self._said)))
        self._said += self._new
        self._new = []
        if not self._rows.every_state:
            return
        self._steps += 1
        origin = EarlyOrigin(
            model=self._parts.model,
            request_id=self._request.request_id,
            cache_salt=feed.salt(media=False),
            priority=self._request.options.priority,
        )
        parameters = feed.with_rows(prefill_parameters())
        step = await origin.at_once(Excerpt([*self._prompt, *self._said]), parameters, f"-text-{self._steps}")
        async with aclosing(step) as outputs:
            async for _ in outputs:
                pass
        await feed.all_handed_on()

    async def _in_thread(self, call: Callable[..., Any], *arguments: object) -> Any:
        return await run_in_thread(self._parts.thread, call, *arguments)


def whole_words(text: str, *, ended: bool = False) -> tuple[str, str]:
    """Split ``text`` into whole words and its last word, which may be incomplete.

    With ``ended``, a last word that white space follows counts as whole, too. So does any word of more than
    _LONGEST_WORD characters.
    """
    borders = [found.start() for found in _BORDER.finditer(text)]
    cut = last_border(text) if ended else borders[-1] if borders else 0
    if len(text) - cut > _LONGEST_WORD:
        cut = len(text)
    return text[:cut], text[cut:]


# RequestStages are the stages of one request. TorchTrace traces torch's operations in the processes of the models.


def _owner_of(request: GenerationRequest) -> str | None:
    """Return the cache salt of a request, its API key's name: otherwise response times would reveal others' prompts."""
    return request.owner


class VllmEngine:
    """The vLLM engine: it chats, serves token sessions and, with a voice, reads aloud.

    Requests of the same API key share cached prefixes. ``readouts`` enables readouts of the residual stream for token
    sessions. ``trace_root`` is the folder for traces of torch's profiler; None disables them. The constructor may ask
    the model hub for config.json, and so block for seconds. Raises ConfigurationError for missing or contradictory
    settings.

    ``start`` loads models on vLLM one after the other, since each measures the free memory of the device when it
    starts. ``capabilities`` are complete after ``start``, which raises ConfigurationError or EngineFailed.
    """

    name = "vllm"

    def __init__(
        self,
        config: VllmConfig,
        *,
        readouts: Readouts | None = None,
        trace_root: Path | None = None,
    ) -> None:
        if config.model is None:
            raise ConfigurationError(["the vllm engine requires a model: --model NAME-OR-FOLDER"])
        self.config = config
        self.model = Path(config.model).name if Path(config.model).is_dir() else config.model
        self._chats = 0
        args = {"model": config.model, **config.args}
        if readouts is not None:
            readouts.check_args(config.args)
            args |= readouts.engine_args
        if config.reasoning_parser is not None:
            args = {"reasoning_parser": config.reasoning_parser, **args}  # so that grammars apply behind the thought
        self._readouts = readouts
        #: None if the model is not an omni model.
        self._omni = find_omni_model(config.model, config.args)
        #: The omni model's own voice; None if it does not speak.
        self._voice = own_voice(config, self._omni)
        if self._voice is not None:
            args |= self._voice.rows.engine_args
        self._thinker = LanguageModel(
            "Thinker", traced_arguments(args, trace_root, "Thinker"), setting="vllm.args", prepare=self._prepare
        )
        traced: list[tuple[LanguageModel, Mapping[str, Any]]] = [(self._thinker, args)]
        #: A separate Talker: the engine for the task ``speech``, and the speaker whose stages speak answers.
        self._talker: SpeechEngine | None = None
        self._speaker: Speaker | None = None
        if config.talker is not None:
            talker_args = traced_arguments(config.talker_args, trace_root, "Talker")
            self._speaker = Speaker(config.talker, profile=config.talker_profile, args=talker_args)
            self._talker = SpeechEngine(self._speaker)
            traced.append((self._speaker.talker, config.talker_args))
        elif config.talker_profile is not None or config.talker_args:
            raise ConfigurationError(["vllm.talker_profile and vllm.talker_args require vllm.talker"])
        self._trace = TorchTrace(trace_root, traced, lambda: () if self._voice is None else self._voice.processes)
        self._checkpoint: Checkpoint | None = None
        self._shared: ThinkerParts | None = None
        self._decoding: ThreadPoolExecutor | None = None
        self._tokenizing: SoleThread | None = None
        self._tokens: TokenGenerator | None = None
        self.capabilities = self._found_capabilities()

    @property
    def tokens(self) -> TokenGenerator:
        """The generator for token sessions. Raises EngineFailed before ``start`` and after ``stop``."""
        if self._tokens is None:
            raise EngineFailed("the engine is not running", fatal=True)
        return self._tokens

    @property
    def state(self) -> EngineState:
        # Without its own voice an omni model still writes.
        states = {self._thinker.state} | ({self._speaker.state} if self._speaker is not None else set())
        if self._shared is None or EngineState.STARTING in states:
            return EngineState.STARTING
        return EngineState.UNHEALTHY if EngineState.UNHEALTHY in states else EngineState.OK

    @property
    def parts(self) -> dict[str, PartDescription | None]:
        """The model and its Talker, by role; None for speech recognition, and without a Talker."""
        talker = None if self._talker is None else PartDescription(self._talker.name, self._talker.model)
        if self._voice is not None:
            talker = PartDescription(Talker.name, self.model)
        llm = PartDescription(self.name, self.model)
        return {Role.ASR.value: None, Role.LLM.value: llm, Role.TTS.value: talker}

    @property
    def part_states(self) -> dict[str, EngineState]:
        """The states of the model and, if there is one, its Talker, by role."""
        voice = self._voice or self._talker
        return {Role.LLM.value: self._thinker.state} | ({} if voice is None else {Role.TTS.value: voice.state})

    def _found_capabilities(self) -> EngineCapabilities:
        """Return the capabilities; before the start, without those that depend on the checkpoint."""
        speaker = self._voice or self._speaker
        thinker = frozenset(f"{Thinker.name}.{name}" for name in SAMPLING)
        media = self._checkpoint.media if self._checkpoint is not None else frozenset()
        voices = speaker.voices if speaker else ()
        return EngineCapabilities(
            input_modalities=media | {Modality.TEXT},
            output_modalities=frozenset({OutputModality.TEXT} | ({OutputModality.AUDIO} if speaker else set())),
            tasks=frozenset({Task.CHAT, Task.SPEECH} if speaker else {Task.CHAT}),
            extend=True,
            # Thought precedes an answer, and a voice of the model needs all of the answer's hidden states.
            continues=frozenset({OutputModality.TEXT} if self.config.reasoning_parser is None else ()),
            stages=(Thinker.name, *((Talker.name, Code2Wav.name) if speaker else ())),
            token_sessions=True,
            voices=voices,
            voice_aliases={name.lower(): name for name in voices if name.lower() not in voices},
            sampling=SAMPLING,
            max_tokens=None if self._checkpoint is None else self._checkpoint.sampling.get("max_tokens"),
            stage_sampling=thinker | (speaker.sampling_names if speaker else frozenset()),
            stage_params=speaker.parameter_names if speaker else frozenset(),
            tools=self.config.tool_parser is not None,
            logprobs=True,
            structured_output=True,
            choices=True,
            raw_prompts=True,
            token_prompts=True,
            echo=True,
            input_roles=frozenset({"user", "system", "assistant"}),
            chat_refusal=self._chat_refusal,
            priority=self._thinker.by_priority,
            template_arguments=True,
            media_limits=frozenset(field.name for field in fields(MediaLimits)),
            speech_in_history=Modality.AUDIO in media,
            lexicon=isinstance(speaker, Speaker),  # an omni model speaks as it writes
            sums_up=not self._chat_refusal,
            context=None if self._checkpoint is None else self._checkpoint.context,
        )

    @property
    def _chat_refusal(self) -> str:
        if self._checkpoint is None or self._checkpoint.chats:
            return ""
        return f"{self.model} has no chat template, which chat requires; set one with --vllm.chat-template FILE"

    def describe(self) -> tuple[str, ...]:
        if self._checkpoint is None:
            return ()
        takes = ", ".join(sorted({Modality.TEXT, *self._checkpoint.media}))
        lines = [f"{self.model} accepts {takes}; its context has {self._checkpoint.context} tokens"]
        if self._voice is not None:
            lines += self._voice.describe()
        elif self._omni is not None and not self._omni.speaks:
            lines.append(f"{self.model} has no Talker, as Thinking variants have none: it has no voice of its own")
        if self._chat_refusal:
            lines.append(f"{self._chat_refusal}; /v1/completions and token sessions work without it")
        if self.config.tool_parser is not None and self._checkpoint.chats and not self._checkpoint.describes_tools:
            lines.append(
                f"the chat template of {self.model} ignores tools, so the model will not know of them; set another "
                "with --vllm.chat-template FILE"
            )
        return tuple(lines)

    async def start(self) -> None:
        """Load an omni model's own voice, the Thinker, then a separate Talker; if one fails, stop all. Idempotent."""
        if self._shared is not None:
            return
        self._decoding = ThreadPoolExecutor(DECODING_THREADS, thread_name_prefix="decoder")
        self._tokenizing = SoleThread("tokenizer")
        parsers, template = (self.config.tool_parser, self.config.reasoning_parser), self.config.chat_template
        chat_template = None
        try:
            if template is not None:
                chat_template = await asyncio.to_thread(read_chat_template, template)
            if any(parsers):
                await asyncio.to_thread(check_parsers, *parsers)
            if template is None and await asyncio.to_thread(lacks_chat_template, self.config.model or ""):
                logger.warning("%s has no chat template; it will serve raw prompts and token sessions only", self.model)
            if self._readouts is not None:
                use_first_model_runner()
                await self._readouts.channel.start()
            if self._voice is not None:
                await self._voice.start()
                if (share := await asyncio.to_thread(self._voice.thinker_share)) is not None:
                    self._thinker.take_defaults({SHARE: share})
            if self._speaker is not None:
                await asyncio.to_thread(self._share_memory, self._speaker)
            await self._thinker.start()
            if self._talker is not None:
                await self._talker.start()
            self._checkpoint = await asyncio.to_thread(
                read_checkpoint,
                self._thinker,
                chat_template=chat_template,
                arguments=self.config.chat_template_kwargs,
            )
            parser = await asyncio.to_thread(load_parser, self._thinker, *parsers) if any(parsers) else None
            self.capabilities = self._found_capabilities()
        except BaseException:
            await self.stop()
            raise
        self._tokens = TokenGenerator(
            self._thinker,
            channel=None if self._readouts is None else self._readouts.channel,
            manifest=ReadoutManifest() if self._readouts is None else self._readouts.manifest,
            decoding=self._decoding,
        )
        self._shared = ThinkerParts(
            model=self._thinker,
            form=self._checkpoint.form,
            budget=EarlyBudget.of(self._thinker),
            thread=self._tokenizing,
            sampling=self._checkpoint.sampling,
            sample_rate=self._checkpoint.sample_rate,
            shortest_segment_ms=self.config.audio_segment_ms,
            most_audio=self._checkpoint.most_audio,
            decoding=self._decoding,
            parser=parser,
            template_arguments=self.config.chat_template_kwargs,
            token_bytes=cache(lambda: TokenBytes(self._thinker.llm.get_tokenizer())),
            cache_salt=_owner_of,
        )

    async def _prepare(self, llm: AsyncLLM) -> None:
        """Tell vLLM's workers which readouts and hidden states they have to send."""
        if self._readouts is not None:
            await self._readouts.install(llm)
        if self._voice is not None:
            await self._voice.rows.install(llm)

    def _share_memory(self, speaker: Speaker) -> None:
        """Set the shares of the GPU's memory for both models. Blocks while the checkpoints' sizes are determined."""
        assert self.config.model is not None
        assert self.config.talker is not None
        sizes = weights_bytes(self.config.model), weights_bytes(self.config.talker)
        shares = memory_shares(*sizes, self.config.args, self.config.talker_args)
        for model, share, size in zip((self._thinker, speaker.talker), shares, sizes, strict=True):
            model.take_defaults({SHARE: share})
            weights = "weights of unknown size" if size is None else f"{size / 1e9:.1f} GB of weights"
            logger.info("the %s uses up to %.0f %% of a GPU's memory (%s)", model.role, 100 * share, weights)

    async def stop(self) -> None:
        self._shared = self._tokens = None
        executors = [executor for executor in (self._decoding, self._tokenizing) if executor is not None]
        self._decoding = self._tokenizing = None
        models = (self._thinker, self._talker, self._voice)
        await asyncio.gather(*(model.stop() for model in models if model is not None))
        if self._readouts is not None:
            await self._readouts.channel.stop()
        for executor in executors:
            await asyncio.to_thread(executor.shutdown)

    @property
    def can_trace(self) -> bool:
        return self._trace.possible

    async def start_trace(self, template: Path) -> None:
        await self._trace.start(template)

    async def stop_trace(self) -> tuple[Path, ...]:
        return await self._trace.stop()

    @property
    def active_requests(self) -> int:
        return self._chats + (self._talker.active_requests if self._talker is not None else 0)

    async def generate(self, request: GenerationRequest, out: OutputWriter) -> None:
        if request.task is Task.SPEECH and self._talker is not None:
            await self._talker.generate(request, out)
        elif request.task is Task.SPEECH and self._voice is not None:
            await self._read(request, out, self._voice)
        else:
            await self._chat(request, out)

    async def _read(self, request: GenerationRequest, out: OutputWriter, voice: OmniVoice) -> None:
        shared = self._shared
        if shared is None or self.state is not EngineState.OK:
            raise EngineFailed("the engine is not running", fatal=True)
        self._chats += 1
        try:
            await read_aloud(request, out, partial(_forced_speech, request, voice, shared))
        finally:
            self._chats -= 1

    async def _chat(self, request: GenerationRequest, out: OutputWriter) -> None:
        shared, decoding = self._shared, self._decoding
        if shared is None or decoding is None or self.state is not EngineState.OK:
            raise EngineFailed("the engine is not running", fatal=True)
        share = request.media_room.share()
        run = RequestStages(shared, self._voice or self._speaker, request, share)
        request.meter.read = lambda: run.usage if run.usage.input_tokens else None
        decoded = decode_input(
            request.input,
            audio=request.input_audio,
            sample_rate=shared.sample_rate,
            executor=decoding,
            share=share,
            lane=request.lane,
            limits=MediaLimits(**request.options.media_limits),  # type: ignore[arg-type]  # checked on the wire
            warn=request.warn,
        )
        self._chats += 1
        try:
            async with aclosing(decoded):
                await pipeline(decoded, run.stages, run.links, out)
            out.write(run.finished())
        except OmniError:
            raise
        except Exception as error:
            raise incident("the vllm engine failed", error, request_id=request.request_id) from error
        finally:
            share.close()
            self._chats -= 1


async def _forced_speech(
    request: GenerationRequest, voice: OmniVoice, parts: ThinkerParts, text: AsyncIterator[str], out: OutputWriter
) -> None:
    """Read ``text`` aloud with an omni model's own voice, see ForcedAnswer. Raises InvalidValue."""
    speaking = voice.stages(
        voice=request.voice, sampling=request.stage_sampling.get("talker"), parameters=request.stage_params
    )
    await staged_speech(request, text, out, (ForcedAnswer(parts, voice.rows, request), *speaking), voice.links)


class RequestStages:
    """The stages of one chat request (``stages``, ``links``), and their results.

    ``voice`` is the voice that speaks the answer: a separate Talker, or the omni model's own voice. ``share`` accounts
    for the memory of media. Raises UnsupportedParameter for options that the engine does not support, and InvalidValue
    for invalid sampling or stage parameters.
    """

    def __init__(
        self, shared: ThinkerParts, voice: Speaker | OmniVoice | None, request: GenerationRequest, share: MediaShare
    ) -> None:
        speaks = OutputModality.AUDIO in request.modalities
        if request.task is not Task.CHAT:
            raise UnsupportedParameter(f"task {request.task} is not supported by this engine", param="task")
        if speaks and voice is None:
            raise UnsupportedParameter(
                "audio output requires a Talker, which this server does not have", param="modalities"
            )
        if speaks and request.options.choices > 1:
            raise UnsupportedParameter("n must be 1 for audio output", param="n")
        writes = OutputModality.TEXT in request.modalities
        rows = voice.rows if speaks and isinstance(voice, OmniVoice) else None
        self._thinker = Thinker(shared, request, writes=request.tells_text, share=share, rows=rows)
        self._vocoder: Code2Wav | VocoderStage | None = None
        self.stages: list[Stage[Any]] = [self._thinker]
        self.links: tuple[StageLink, ...] = ()
        if speaks and voice is not None:
            self.links = voice.links
            self.stages += self._speaking(voice, request, goes_on=writes)

    def _speaking(
        self, voice: Speaker | OmniVoice, request: GenerationRequest, *, goes_on: bool
    ) -> tuple[Stage[Any], Stage[Any]]:
        """Return the Talker's and vocoder's stages. ``goes_on``: the text goes on if an omni model's voice fails."""
        sampling, parameters = request.stage_sampling.get("talker"), request.stage_params
        if isinstance(voice, Speaker):
            talker, self._vocoder = voice.stages(
                request.request_id,
                voice=request.voice,
                sampling=sampling,
                parameters=parameters,
                priority=request.options.priority if voice.talker.by_priority else 0,
                lexicon=request.lexicon,
            )
            return talker, self._vocoder
        own, vocoder = voice.stages(voice=request.voice, sampling=sampling, parameters=parameters)
        self._vocoder = vocoder
        return (SpeechPart(own), SpeechPart(vocoder)) if goes_on else (own, vocoder)

    def finished(self) -> Finished:
        """Return the Finished of the request, after all answers have ended."""
        reasons = self._thinker.finish_reasons
        several = reasons if len(reasons) > 1 else ()
        return Finished(reasons[0], self.usage, several, warnings=self._thinker.warnings)

    @property
    def usage(self) -> Usage:
        audio_ms = round(self._vocoder.audio_ms) if self._vocoder is not None else 0
        return Usage(
            input_tokens=self._thinker.prompt_tokens - self._thinker.begun_tokens,
            output_tokens=self._thinker.answer_tokens + self._thinker.begun_tokens,
            input_audio_ms=self._thinker.input_audio_ms,
            output_audio_ms=audio_ms,
            cached_tokens=self._thinker.cached_tokens,
        )


#: The folder, below the root of all profiles, to which vLLM writes. The folder is fixed when vLLM starts, so traces are
#: moved from there to their destination.
_TRACE_FOLDER: Final = ".torch"
_PROFILER_SETTING: Final = "profiler_config"


def traced_arguments(args: Mapping[str, Any], root: Path | None, role: str) -> dict[str, Any]:
    """Return vLLM's arguments, with its profiler set to trace to a folder of ``role`` below ``root``.

    ``args`` are returned unchanged if ``root`` is None (no profiles), or if the operator has configured the profiler.
    """
    if root is None or _PROFILER_SETTING in args:
        return dict(args)
    setting = {
        "profiler": "torch",
        "torch_profiler_dir": str(_trace_folder(root, role)),
        # The front end is this server's process, all of which would be traced, and slowed down.
        "ignore_frontend": True,
        "torch_profiler_with_stack": False,
        "torch_profiler_dump_cuda_time_total": False,
    }
    return {**args, _PROFILER_SETTING: setting}


class TorchTrace:
    """A tracer with torch's profiler, of all ``models`` and ``processes`` together, for one trace at a time.

    ``models`` are pairs of a model and the operator's arguments for vLLM; the models were started with
    ``traced_arguments``. ``root`` is the folder for traces, None if tracing is disabled.
    """

    def __init__(
        self,
        root: Path | None,
        models: Sequence[tuple[LanguageModel, Mapping[str, Any]]],
        processes: Callable[[], Sequence[StepProcess]] = tuple,
    ) -> None:
        self._root = root
        self._processes = processes
        self._models = [model for model, _ in models]
        self._set_by_operator = any(_PROFILER_SETTING in args for _, args in models)
        self._name = ""
        self._template = Path()
        self._tracing: list[LanguageModel | StepProcess] = []

    @property
    def possible(self) -> bool:
        """Whether ``profiler.root`` is set, and the operator did not set ``vllm.args.profiler_config``."""
        return self._root is not None and not self._set_by_operator

    async def start(self, template: Path) -> None:
        """Start a trace; the paths of its files will begin with ``template``.

        Raises EngineFailed if a model or process cannot be traced; the others then stop tracing.
        """
        self._name, self._template = uuid.uuid4().hex, template
        model: LanguageModel | StepProcess
        try:
            for model in self._models:
                await model.llm.start_profile(self._name)
                self._tracing.append(model)
            for model in self._processes():
                await model.trace(await asyncio.to_thread(self._file, model.role))
                self._tracing.append(model)
        except Exception as error:
            await self.stop()
            raise incident(f"tracing the {model.role} failed", error) from error

    async def stop(self) -> tuple[Path, ...]:
        """Stop the trace and return its files; takes seconds.

        If any file could not be written, raises EngineFailed; the other files are kept.
        """
        tracing, self._tracing = self._tracing, []
        outcomes = await asyncio.gather(*(_stopped(model) for model in tracing), return_exceptions=True)
        try:
            files = await asyncio.to_thread(self._move, [model.role for model in tracing])
        except OSError as error:
            raise incident("moving the traces failed", error) from error
        for model, outcome in zip(tracing, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                raise incident(f"writing the trace of the {model.role} failed", outcome) from outcome
        return files

    def _file(self, role: str) -> Path:
        """Return the path for the trace of a StepProcess, named as vLLM names its own; create the path's folder."""
        assert self._root is not None
        folder = _trace_folder(self._root, role)
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{self._name}_rank0.pt.trace.json.gz"

    def _move(self, roles: Sequence[str]) -> tuple[Path, ...]:
        """Move the traces of the models and processes ``roles`` to their destination; return the new paths."""
        assert self._root is not None
        found: list[Path] = []
        self._template.parent.mkdir(parents=True, exist_ok=True)
        for role in roles:
            for path in sorted(_trace_folder(self._root, role).glob(f"{self._name}_*")):
                name = f"{self._template.name}_{role.lower()}_{path.name.removeprefix(f'{self._name}_')}"
                found.append(path.rename(self._template.with_name(name)))
        return tuple(found)


async def _stopped(model: LanguageModel | StepProcess) -> None:
    """End the trace of a model or process, and wait until the trace is written."""
    if isinstance(model, StepProcess):
        await model.trace(None)
    else:
        await model.llm.stop_profile()


def _trace_folder(root: Path, role: str) -> Path:
    return root.expanduser().resolve() / _TRACE_FOLDER / role.lower()

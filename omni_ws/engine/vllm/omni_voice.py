"""OmniVoice: the voice of an omni model, its Talker and its vocoder, each in a process of its own.

ForcedAnswer makes the voice read a text aloud that the Thinker did not write.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any, Final

from omni_ws.config.model import VllmConfig
from omni_ws.config.values import ConfigurationError
from omni_ws.engine.base import EngineState, GenerationRequest, OutputWriter
from omni_ws.engine.channel import Channel, StageLink
from omni_ws.engine.clauses import BEGIN_AFTER, is_being_written, last_border, with_pauses
from omni_ws.engine.frame_chunks import CODE2WAV_PARAMETERS, ChunkPolicy, frames_link
from omni_ws.engine.omni.stages import (
    OMNI_TALKER_SAMPLING,
    ROWS_LINK,
    OmniTalker,
    VocoderStage,
)
from omni_ws.engine.omni.step_process import StepProcess, wrong_settings
from omni_ws.engine.threads import end_tasks, run_in_thread
from omni_ws.engine.vllm.checkpoint import SHARE, OmniFamily, OmniModel, check_omni_fits, omni_sizes, thinker_share
from omni_ws.engine.vllm.early_input import EarlyOrigin
from omni_ws.engine.vllm.language_model import prepare_environment, use_first_model_runner
from omni_ws.engine.vllm.prompt import Excerpt, PromptContext
from omni_ws.engine.vllm.sampling import prefill_parameters
from omni_ws.engine.vllm.thinker import LEAST_EARLY_TOKENS, ThinkerParts
from omni_ws.engine.vllm.thinker_rows import TalkerFeed, ThinkerRows
from omni_ws.errors import EngineFailed, InvalidValue

logger = logging.getLogger(__name__)

_TALKER: Final = "omni_ws.engine.omni.slot_talker:talker"
_VOCODER: Final = "omni_ws.engine.omni.slot_talker:vocoder"


class OmniVoice:
    """The owner of the processes of Talker and vocoder, which creates the stages that speak an answer.

    ``sessions`` is how many answers can be spoken at the same time. ``positions`` limits the prompt and the speech of
    an answer together, in positions of the Talker. ``kept_bytes`` limits the memory of the hidden states that are kept
    for conversations.
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
        """OK while both processes are running and ready."""
        states = {process.state for process in self.processes}
        if not states or EngineState.STARTING in states:
            return EngineState.STARTING
        return EngineState.UNHEALTHY if EngineState.UNHEALTHY in states else EngineState.OK

    @property
    def memory_bytes(self) -> int:
        """The memory of both processes, in bytes: weights, slots and buffers."""
        return sum(process.ready.memory_bytes for process in self.processes if process.ready is not None)

    @property
    def open_sessions(self) -> int:
        """How many sessions are open in both processes, for answers that are being spoken."""
        return sum(process.open_sessions for process in self.processes)

    @property
    def sampling_names(self) -> frozenset[str]:
        """The names for ``EngineCapabilities.stage_sampling``."""
        return frozenset(f"{OmniTalker.name}.{name}" for name in OMNI_TALKER_SAMPLING)

    @property
    def parameter_names(self) -> frozenset[str]:
        """The names for ``EngineCapabilities.stage_params``. The windows of Token2Wav cannot be changed."""
        if self.model.family is OmniFamily.QWEN25:
            return frozenset()
        return frozenset(f"{VocoderStage.name}.{name}" for name in CODE2WAV_PARAMETERS)

    @property
    def links(self) -> tuple[StageLink, StageLink]:
        """The links before the Talker and before the vocoder."""
        return ROWS_LINK, frames_link(self._started()[1].facts["frame_ms"])

    def describe(self) -> tuple[str, ...]:
        """Return lines for the operator."""
        if not self.voices:
            return ()
        at_once = f"{self._sessions} answer{'s' if self._sessions > 1 else ''} at a time"
        return (f"{self.model.name} speaks with its own voice: {', '.join(self.voices)}; {at_once}",)

    async def start(self) -> None:
        """Start both processes, and open the channel for hidden states. Downloads missing files.

        Raises ConfigurationError for a model that cannot be read or does not fit into memory, and EngineFailed.
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
        """Return the share of a GPU's memory for the Thinker; None without a GPU, or if the operator set it. Blocks."""
        total = _gpu_bytes()
        if total is None or SHARE in self.model.args:
            return None
        share = thinker_share(self.memory_bytes, total=total)
        logger.info("the Thinker uses up to %.0f %% of a GPU's memory", 100 * share)
        return share

    def _check_memory(self, folder: Path) -> None:
        """Raise ConfigurationError if the model does not fit. Not checked if vLLM quantises it when it loads."""
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

        ``sampling`` is ``stage_sampling.talker``, ``parameters`` all of ``stage_params``. Raises InvalidValue.
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
    """Return the voice of ``model`` if it is an omni model that is to speak. Raises ConfigurationError."""
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
    """Return the memory of a GPU; None where vLLM runs on a CPU. Blocks while vLLM looks."""
    from vllm.platforms import current_platform

    return None if current_platform.is_cpu() else int(current_platform.get_device_total_memory())


#: A position between words, before the white space: both parts of the text have the same tokens as the whole text.
_BORDER: Final = re.compile(r"(?<=\S)\s+(?=\S)")
_CLAUSE_END: Final = re.compile(r"[.!?;:,]\s|\n")
#: How much text without white space is held back, in characters.
_LONGEST_WORD: Final = 200


class ForcedAnswer:
    """A Stage: pieces of text in, TalkerItems out, as if the Thinker had written the text as its answer.

    The Thinker computes hidden states of the text as its answer to an empty message. A step has at least
    LEAST_EARLY_TOKENS tokens while the text still arrives; text that a client is writing is also computed at the end of
    a clause and at a pause. A Talker that reads no states of the answer needs no steps. A text without words has no
    items. Raises ContextLengthExceeded for a text that is too long for the Thinker.
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
        """Hand on an empty prompt, then the tokens and hidden states of the text."""
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
    """Split ``text`` before its last word, which may not be complete; a very long word is not held back.

    With ``ended``, a last word followed by white space is complete.
    """
    borders = [found.start() for found in _BORDER.finditer(text)]
    cut = last_border(text) if ended else borders[-1] if borders else 0
    if len(text) - cut > _LONGEST_WORD:
        cut = len(text)
    return text[:cut], text[cut:]

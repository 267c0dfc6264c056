"""The Talker: the text of the answer becomes codec frames, clause by clause, on an AsyncLLM of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from omni_ws.engine.base import EngineOutput
from omni_ws.engine.channel import Channel
from omni_ws.engine.clauses import ClauseSplitter, clauses_as_they_come, is_speakable
from omni_ws.engine.pipeline import StageLink
from omni_ws.engine.vllm.codec_frames import CodecFrames, FrameAssembler, OffPattern
from omni_ws.engine.vllm.language_model import LanguageModel
from omni_ws.engine.vllm.talker_profile import TalkerProfile
from omni_ws.errors import EngineFailed, InvalidValue
from omni_ws.profiler import events

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

#: What ``stage_sampling.talker`` may hold. ``max_tokens`` counts the codec tokens of the whole answer.
TALKER_SAMPLING: Final = frozenset(
    {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "max_tokens"}
)

#: The link from the Thinker, in characters: two minutes of speech. Items are pieces of the answer's text.
TEXT_LINK: Final = StageLink(2_000, len)


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstClause:
    """Limits of the first clause in characters, smaller than those of the others: it is what the listener waits for."""

    comma_after: int = 12
    longest: int = 90


class TalkerModel(LanguageModel):
    """A speech language model that vLLM runs, and that keeps its requests to their codec pattern."""

    def _open(self, args: AsyncEngineArgs) -> AsyncLLM:
        from vllm.v1.engine.async_llm import AsyncLLM

        from omni_ws.engine.vllm.codec_pattern import processor_name

        config = args.create_engine_config()
        # Only now is it known which model runner will run.
        config.model_config.logits_processors = [
            *(config.model_config.logits_processors or ()),
            processor_name(config),
        ]
        return AsyncLLM.from_vllm_config(config, disable_log_stats=args.disable_log_stats)


class Talker:
    """A Stage: pieces of text in, CodecFrames out. One for each request.

    ``sampling`` is ``stage_sampling.talker`` of the request. Making one raises
    InvalidValue for a voice that there is not and for sampling that vLLM refuses. While it speaks a clause, later text
    waits in the link.
    """

    name = "talker"

    def __init__(
        self,
        model: TalkerModel,
        profile: TalkerProfile,
        *,
        request_id: str,
        voice: str | None = None,
        sampling: Mapping[str, Any] | None = None,
        priority: int = 0,
        first_clause: FirstClause | None = None,
    ) -> None:
        #: Tokens read and written, and whole frames, for the usage of the request.
        self.prompt_tokens = 0
        self.tokens = 0
        self.frames = 0
        #: Whether speech was cut: by ``max_tokens``, or because a clause would not end.
        self.cut = False
        self._model = model
        self._profile = profile
        self._request_id = request_id
        self._voice = voice
        self._priority = priority
        self._first_clause = first_clause or FirstClause()
        asked = dict(sampling or {})
        if unknown := asked.keys() - TALKER_SAMPLING:
            raise InvalidValue("the Talker does not know this parameter", param=f"stage_sampling.talker.{min(unknown)}")
        self._tokens_left: int | None = asked.pop("max_tokens", None)
        self._sampling = {**profile.sampling, **asked}
        self._clauses = 0
        profile.spoken_text("", voice)
        self._parameters(max_tokens=1 if self._tokens_left is None else self._tokens_left)

    async def run(self, source: AsyncIterator[str], sink: Channel[Any] | None, outputs: Channel[EngineOutput]) -> None:
        assert sink is not None, "what the Talker makes is no output"
        limits = self._first_clause
        splitter = ClauseSplitter(first_comma_after=limits.comma_after, first_longest=limits.longest)
        async with aclosing(clauses_as_they_come(source, splitter)) as clauses:
            async for clause in clauses:
                await self._speak(clause, sink)

    async def _speak(self, clause: str, sink: Channel[CodecFrames]) -> None:
        if not is_speakable(clause):
            return
        slots = len(self._profile.layout.slots)
        most = self._profile.most_frames(clause) * slots
        if self._tokens_left is not None:
            most = min(most, self._tokens_left - self._tokens_left % slots)
            if most <= 0:
                self.cut = True
                return
        number, self._clauses = self._clauses, self._clauses + 1
        prompt = self._prompt(clause)
        self.prompt_tokens += len(prompt)
        assembler = FrameAssembler(self._profile.layout)
        parameters = self._parameters(max_tokens=most, clause=number)
        generation = self._model.generate(
            {"prompt_token_ids": prompt},
            parameters,
            f"{self._request_id}-talker-{number}",
            priority=self._priority,
        )
        # Closing it is what aborts the request in the engine.
        async with aclosing(generation):
            async for output in events.generated(self.name, generation):
                tokens = [token for token in output.outputs[0].token_ids if token not in self._profile.stop]
                self._count(len(tokens))
                try:
                    codes = assembler.feed(tokens)
                except OffPattern as error:
                    raise EngineFailed("the Talker left the pattern of its codec") from error
                if output.finished:
                    self._look_at_end(output.outputs[0].finish_reason)
                if len(codes) or output.finished:
                    self.frames += len(codes)
                    await sink.put(CodecFrames(number, codes, output.finished))

    def _prompt(self, clause: str) -> list[int]:
        text = self._profile.spoken_text(clause, self._voice)
        tokens = self._model.llm.get_tokenizer().encode(text, add_special_tokens=False)
        return self._profile.prompt(tokens)

    def _count(self, tokens: int) -> None:
        self.tokens += tokens
        if self._tokens_left is not None:
            self._tokens_left -= tokens

    def _look_at_end(self, reason: str | None) -> None:
        if reason == "length":
            self.cut = True
        elif reason != "stop":
            raise EngineFailed(f"the Talker's engine ended its request with {reason!r}")

    def _parameters(self, *, max_tokens: int, clause: int = 0) -> SamplingParams:
        """Raises InvalidValue."""
        from vllm.exceptions import VLLMClientError
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        from omni_ws.engine.vllm.codec_pattern import Pattern, extra_arguments

        layout = self._profile.layout
        pattern = Pattern(layout.first_token, layout.codebook_size, len(layout.slots), self._profile.stop[0])
        sampling = dict(self._sampling)
        try:
            if sampling.get("seed") is not None:
                sampling["seed"] += clause
            return SamplingParams(
                **sampling,
                max_tokens=max_tokens,
                stop_token_ids=list(self._profile.stop),
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
                extra_args=extra_arguments(pattern),
            )
        except (TypeError, ValueError, VLLMClientError) as error:
            field = getattr(error, "parameter", None)
            place = f"stage_sampling.talker.{field}" if field in TALKER_SAMPLING else "stage_sampling.talker"
            raise InvalidValue(f"the Talker cannot sample so: {error}", param=place) from error

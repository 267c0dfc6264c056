"""Talker: generates codec frames for the text of an answer, clause by clause, with a model of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from omni_ws.engine.base import EngineOutput
from omni_ws.engine.channel import Channel
from omni_ws.engine.clauses import ClauseSplitter, TextClause, clauses_as_they_come, is_speakable
from omni_ws.engine.pipeline import StageLink
from omni_ws.engine.vllm.codec_frames import CodecFrames, FrameAssembler, InvalidCodecToken
from omni_ws.engine.vllm.language_model import LanguageModel
from omni_ws.engine.vllm.talker_profile import TalkerProfile
from omni_ws.errors import EngineFailed, InvalidValue
from omni_ws.profiler import events

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

#: The names in ``stage_sampling.talker``. ``max_tokens`` limits the codec tokens of the whole answer.
TALKER_SAMPLING: Final = frozenset(
    {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "max_tokens"}
)

#: The link from the Thinker, whose items are pieces of text: 2,000 characters, or about two minutes of speech.
TEXT_LINK: Final = StageLink(2_000, len)


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstClause:
    """The limits of the first clause in characters (see ClauseSplitter).

    They are smaller than those of other clauses, because the first clause determines the time to first audio.
    """

    comma_after: int = 12
    longest: int = 90
    #: See ``clauses_as_they_come``.
    begin_after_sec: float | None = None


class TalkerModel(LanguageModel):
    """A speech language model in vLLM, with the logits processor that constrains it to the codec pattern."""

    def _open(self, args: AsyncEngineArgs) -> AsyncLLM:
        from vllm.v1.engine.async_llm import AsyncLLM

        from omni_ws.engine.vllm.codec_pattern import processor_name

        config = args.create_engine_config()
        # The configuration decides which model runner is used, and so which processor.
        config.model_config.logits_processors = [
            *(config.model_config.logits_processors or ()),
            processor_name(config),
        ]
        return AsyncLLM.from_vllm_config(config, disable_log_stats=args.disable_log_stats)


class Talker:
    """A Stage of one request: pieces of text in, CodecFrames out.

    Each clause is one request to vLLM, so its prosody is that of a complete utterance. While a clause is generated,
    further text waits in the link.

    ``sampling`` is ``stage_sampling.talker``. Raises InvalidValue for an unknown voice, and for sampling that vLLM
    refuses.
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
        #: Prompt tokens, generated tokens and whole frames, for the usage of the request.
        self.prompt_tokens = 0
        self.tokens = 0
        self.frames = 0
        #: Whether speech was cut off by ``max_tokens`` or by the limit of a clause.
        self.cut = False
        self._model = model
        self._profile = profile
        self._request_id = request_id
        self._voice = voice
        self._priority = priority
        self._first_clause = first_clause or FirstClause()
        asked = dict(sampling or {})
        if unknown := asked.keys() - TALKER_SAMPLING:
            raise InvalidValue(
                "unknown sampling parameter of the Talker", param=f"stage_sampling.talker.{min(unknown)}"
            )
        self._tokens_left: int | None = asked.pop("max_tokens", None)
        self._sampling = {**profile.sampling, **asked}
        self._clauses = 0
        profile.spoken_text("", voice)
        self._parameters(max_tokens=1 if self._tokens_left is None else self._tokens_left)

    async def run(self, source: AsyncIterator[str], sink: Channel[Any] | None, outputs: Channel[EngineOutput]) -> None:
        """Speak clause by clause, each as soon as its text is complete."""
        assert sink is not None, "the Talker requires a stage after it"
        limits = self._first_clause
        splitter = ClauseSplitter(first_comma_after=limits.comma_after, first_longest=limits.longest)
        come = clauses_as_they_come(source, splitter, begin_after_sec=limits.begin_after_sec)
        async with aclosing(come) as clauses:
            async for clause in clauses:
                await self._speak(clause, sink)

    async def _speak(self, clause: TextClause, sink: Channel[CodecFrames]) -> None:
        """Generate the frames of one clause.

        Their number is limited by the length of the text, since a model may fail to end its speech.
        """
        if not is_speakable(clause.text):
            return
        slots = len(self._profile.layout.slots)
        most = self._profile.most_frames(clause.text) * slots
        if self._tokens_left is not None:
            most = min(most, self._tokens_left - self._tokens_left % slots)
            if most <= 0:
                self.cut = True
                return
        number, self._clauses = self._clauses, self._clauses + 1
        prompt = self._prompt(clause.text)
        self.prompt_tokens += len(prompt)
        assembler = FrameAssembler(self._profile.layout)
        parameters = self._parameters(max_tokens=most, clause=number)
        generation = self._model.generate(
            {"prompt_token_ids": prompt},
            parameters,
            f"{self._request_id}-talker-{number}",
            priority=self._priority,
        )
        # Closing the generator aborts the request in vLLM.
        async with aclosing(generation):
            async for output in events.generated(self.name, generation):
                tokens = [token for token in output.outputs[0].token_ids if token not in self._profile.stop]
                self._count(len(tokens))
                try:
                    codes = assembler.feed(tokens)
                except InvalidCodecToken as error:
                    raise EngineFailed("the Talker generated a token outside its codec pattern") from error
                if output.finished:
                    self._note_end(output.outputs[0].finish_reason)
                if len(codes) or output.finished:
                    self.frames += len(codes)
                    await sink.put(CodecFrames(number, codes, output.finished, clause.end))

    def _prompt(self, clause: str) -> list[int]:
        text = self._profile.spoken_text(clause, self._voice)
        tokens = self._model.llm.get_tokenizer().encode(text, add_special_tokens=False)
        return self._profile.prompt(tokens)

    def _count(self, tokens: int) -> None:
        self.tokens += tokens
        if self._tokens_left is not None:
            self._tokens_left -= tokens

    def _note_end(self, reason: str | None) -> None:
        """Note whether the clause was cut off. Raises EngineFailed if vLLM ended it for another reason."""
        if reason == "length":
            self.cut = True
        elif reason != "stop":
            raise EngineFailed(f"unexpected finish reason of the Talker: {reason!r}")

    def _parameters(self, *, max_tokens: int, clause: int = 0) -> SamplingParams:
        """Return the sampling parameters of a clause. Raises InvalidValue."""
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
                skip_clone=True,
                extra_args=extra_arguments(pattern),
            )
        except (TypeError, ValueError, VLLMClientError) as error:
            field = getattr(error, "parameter", None)
            place = f"stage_sampling.talker.{field}" if field in TALKER_SAMPLING else "stage_sampling.talker"
            raise InvalidValue(f"sampling parameters not supported by the Talker: {error}", param=place) from error

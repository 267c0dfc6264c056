"""From what a request asks of its answer to the sampling parameters of vLLM."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from omni_ws.engine.base import AnswerOptions, GenerationRequest, StructuredOutput
from omni_ws.engine.vllm.language_model import LanguageModel
from omni_ws.errors import InvalidValue

if TYPE_CHECKING:
    from vllm import SamplingParams

#: What clients may set.
SAMPLING: Final = frozenset(
    {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "max_tokens",
        "stop",
        "seed",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
    }
)
#: Parameters of vLLM that come from elsewhere in a request.
_FIELDS: Final = {"n": "n", "logprobs": "logprobs", "prompt_logprobs": "logprobs"}
#: A schema becomes a grammar of several times its size, between two steps of the model.
MAX_SCHEMA_BYTES: Final = 1 << 16


class AskedSampling(NamedTuple):
    """``values`` by vLLM's names; ``places`` says where the client named each, for what is refused."""

    values: Mapping[str, Any]
    places: Mapping[str, str]

    @classmethod
    def of(cls, request: GenerationRequest, stage: str) -> Self:
        """Those of the stage win."""
        staged = request.stage_sampling.get(stage, {})
        places = {name: f"sampling.{name}" for name in request.sampling}
        places |= {name: f"stage_sampling.{stage}.{name}" for name in staged}
        return cls({**request.sampling, **staged}, places)

    def place(self, parameter: str | None) -> str | None:
        """Of a parameter of vLLM that is refused: the client's field behind it, None where there is none."""
        return self.places.get(parameter or "") or _FIELDS.get(parameter or "")


def answer_parameters(asked: AskedSampling, defaults: Mapping[str, Any], options: AnswerOptions) -> SamplingParams:
    """``defaults`` are those of the checkpoint. Without ``max_tokens`` the answer may fill the context.

    Raises InvalidValue for what vLLM refuses.
    """
    from vllm import SamplingParams
    from vllm.exceptions import VLLMClientError
    from vllm.sampling_params import RequestOutputKind

    values = {"max_tokens": None, **defaults, **asked.values}
    if "logit_bias" in values:
        values["logit_bias"] = {int(token): bias for token, bias in values["logit_bias"].items()}
    if options.choices > 1 and values.get("temperature") == 0:
        raise InvalidValue("without a temperature all answers are the same one", param="n")
    try:
        return SamplingParams(
            **values,
            n=options.choices,
            logprobs=options.logprobs,
            # Named here and not later: with them vLLM computes the whole prompt, whatever is cached of it.
            prompt_logprobs=options.logprobs if options.echo else None,
            structured_outputs=None if options.structure is None else _constraint(options.structure),
            output_kind=RequestOutputKind.DELTA,
        )
    except (TypeError, ValueError, VLLMClientError) as error:
        place = asked.place(getattr(error, "parameter", None))
        raise InvalidValue(f"the model cannot sample so: {error}", param=place) from error


def _constraint(structure: StructuredOutput) -> Any:
    from vllm.sampling_params import StructuredOutputsParams

    if structure.schema is None:
        return StructuredOutputsParams(json_object=True)
    schema = json.dumps(structure.schema)
    if len(schema) > MAX_SCHEMA_BYTES:
        raise InvalidValue(f"a schema has at most {MAX_SCHEMA_BYTES} bytes", param="response_format")
    return StructuredOutputsParams(json=schema)


def check_parameters(
    model: LanguageModel, parameters: SamplingParams, asked: AskedSampling, *, constraint: str
) -> None:
    """Blocks for milliseconds where the answer has to keep to a grammar.

    Raises InvalidValue for what this model, or the backend of its structured outputs, cannot do. ``constraint`` is the
    field of the request that a grammar comes from.
    """
    from vllm.exceptions import VLLMClientError

    llm = model.llm
    config = llm.vllm_config
    try:
        parameters.verify(
            llm.model_config, config.speculative_config, config.structured_outputs_config, llm.get_tokenizer()
        )
    except (ValueError, VLLMClientError) as error:
        place = asked.place(getattr(error, "parameter", None))
        if place is None and parameters.structured_outputs is not None:
            place = constraint
        reason = " ".join(str(error).split())
        raise InvalidValue(f"the model cannot answer so: {reason[:500]}", param=place) from error


def prefill_parameters() -> SamplingParams:
    """For prompts that are only to be computed: vLLM answers with one token at least, which nobody gets."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(max_tokens=1, temperature=0, output_kind=RequestOutputKind.DELTA)


def survives_streaming(parameters: SamplingParams) -> bool:
    """Whether a prompt that was streamed in gives the same answer as one that was sent at once.

    vLLM refuses stop strings and several answers there, makes no random generator for a seed that comes with a later
    piece, and neither reads a grammar nor changes what it tells of tokens after the first piece.
    """
    return (
        not parameters.stop
        and (parameters.seed is None or parameters.temperature == 0)
        and parameters.n == 1
        and parameters.logprobs is None
        and parameters.prompt_logprobs is None
        and not parameters.logit_bias
        and parameters.structured_outputs is None
        and parameters.skip_special_tokens
    )

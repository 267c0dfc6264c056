"""Converts the options of a request to vLLM's sampling parameters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from omni_ws.engine.base import AnswerOptions, GenerationRequest, StructuredOutput
from omni_ws.engine.vllm.language_model import LanguageModel
from omni_ws.errors import InvalidValue

if TYPE_CHECKING:
    from vllm import SamplingParams

#: The sampling parameters that clients may set.
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
#: Parameters of vLLM that stem from other fields of a request, with the names of these.
_FIELDS: Final = {"n": "n", "logprobs": "logprobs", "prompt_logprobs": "logprobs"}
#: The limit on JSON Schemas. vLLM compiles them between two steps, to grammars of several times their size.
MAX_SCHEMA_BYTES: Final = 1 << 16


class AskedSampling(NamedTuple):
    """The sampling parameters of a request by vLLM's names, and the field that set each, for error messages."""

    values: Mapping[str, Any]
    fields: Mapping[str, str]

    @classmethod
    def of(cls, request: GenerationRequest, stage: str) -> Self:
        """Collect the parameters of ``stage``; ``stage_sampling`` takes precedence over ``sampling``."""
        staged = request.stage_sampling.get(stage, {})
        fields = {name: f"sampling.{name}" for name in request.sampling}
        fields |= {name: f"stage_sampling.{stage}.{name}" for name in staged}
        return cls({**request.sampling, **staged}, fields)

    def field(self, parameter: str | None) -> str | None:
        """Return the client's field for a parameter that vLLM refuses, or None."""
        return self.fields.get(parameter or "") or _FIELDS.get(parameter or "")


def answer_parameters(asked: AskedSampling, defaults: Mapping[str, Any], options: AnswerOptions) -> SamplingParams:
    """Return the sampling parameters of an answer. ``defaults`` are those of the checkpoint.

    Without ``max_tokens`` the answer may fill the context. The parameters are for one request, as vLLM does not copy
    them. Raises InvalidValue for what vLLM refuses.
    """
    from vllm import SamplingParams
    from vllm.exceptions import VLLMClientError
    from vllm.sampling_params import RequestOutputKind

    values = {"max_tokens": None, **defaults, **asked.values}
    if "logit_bias" in values:
        values["logit_bias"] = {int(token): bias for token, bias in values["logit_bias"].items()}
    if options.choices > 1 and values.get("temperature") == 0:
        raise InvalidValue("n must be 1 when temperature is 0, since all answers would be identical", param="n")
    try:
        return SamplingParams(
            **values,
            n=options.choices,
            logprobs=options.logprobs,
            # Only set for an echo: it makes vLLM compute the whole prompt, even if it is cached.
            prompt_logprobs=options.logprobs if options.echo else None,
            structured_outputs=None if options.structure is None else _constraint(options.structure),
            output_kind=RequestOutputKind.DELTA,
            skip_clone=True,
        )
    except (TypeError, ValueError, VLLMClientError) as error:
        field = asked.field(getattr(error, "parameter", None))
        raise InvalidValue(f"sampling parameters not supported: {error}", param=field) from error


def _constraint(structure: StructuredOutput) -> Any:
    from vllm.sampling_params import StructuredOutputsParams

    if structure.schema is None:
        return StructuredOutputsParams(json_object=True)
    schema = json.dumps(structure.schema)
    if len(schema) > MAX_SCHEMA_BYTES:
        raise InvalidValue(f"at most {MAX_SCHEMA_BYTES} bytes per schema", param="response_format")
    return StructuredOutputsParams(json=schema)


def check_parameters(
    model: LanguageModel, parameters: SamplingParams, asked: AskedSampling, *, constraint: str
) -> None:
    """Validate ``parameters`` for this model. Blocks for milliseconds if the answer is constrained by a grammar.

    Raises InvalidValue for what the model, or its backend for structured outputs, does not support. ``constraint`` is
    the field of the request that set the grammar.
    """
    from vllm.exceptions import VLLMClientError

    llm = model.llm
    config = llm.vllm_config
    try:
        parameters.verify(
            llm.model_config, config.speculative_config, config.structured_outputs_config, llm.get_tokenizer()
        )
    except (ValueError, VLLMClientError) as error:
        field = asked.field(getattr(error, "parameter", None))
        if field is None and parameters.structured_outputs is not None:
            field = constraint
        reason = " ".join(str(error).split())
        raise InvalidValue(
            f"sampling parameters or constraint not supported by the model: {reason[:500]}", param=field
        ) from error


def prefill_parameters() -> SamplingParams:
    """Return parameters for one prompt that is only computed; vLLM generates at least one token, which is discarded."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(max_tokens=1, temperature=0, output_kind=RequestOutputKind.DELTA, skip_clone=True)


def survives_streaming(parameters: SamplingParams) -> bool:
    """Whether a streamed prompt gives the same answer as one submitted at once.

    For streamed prompts vLLM rejects stop strings and several answers, creates no generator for a seed, and ignores
    grammars and token options that are not part of the first piece.
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

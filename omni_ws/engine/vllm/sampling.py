"""From the sampling parameters of a request to those of vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

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
    }
)


def answer_parameters(asked: Mapping[str, Any], defaults: Mapping[str, Any]) -> SamplingParams:
    """``defaults`` are those of the checkpoint. Without ``max_tokens`` the answer may fill the context.

    Raises InvalidValue for what vLLM refuses.
    """
    from vllm import SamplingParams
    from vllm.exceptions import VLLMClientError
    from vllm.sampling_params import RequestOutputKind

    values = {"max_tokens": None, **defaults, **asked}
    try:
        return SamplingParams(**values, output_kind=RequestOutputKind.DELTA)
    except (TypeError, ValueError, VLLMClientError) as error:
        raise InvalidValue(f"the model cannot sample so: {error}", param="sampling") from error


def prefill_parameters() -> SamplingParams:
    """For prompts that are only to be computed: vLLM answers with one token at least, which nobody gets."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(max_tokens=1, temperature=0, output_kind=RequestOutputKind.DELTA)


def survives_streaming(parameters: SamplingParams) -> bool:
    """Whether a prompt that was streamed in gives the same answer as one that was sent at once.

    vLLM refuses stop strings there, and makes no random generator for a seed that comes with a later piece.
    """
    return not parameters.stop and (parameters.seed is None or parameters.temperature == 0)

"""Request bodies of ``/v1/completions``: bare prompts, as text or token IDs, without a chat template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from omni_ws.errors import EmptyInput, InvalidValue, UnsupportedParameter
from omni_ws.wire.openai_fields import (
    NEVER_AVAILABLE,
    CommonBody,
    ConfigurationPatch,
    StreamOptions,
    configuration_patch,
    convert_body,
    refuse_unavailable,
    usage_places,
)
from omni_ws.wire.openai_options import MAX_CHOICES, AnswerFields, Choices, Priority, completion_logprobs

#: OpenAI's default.
DEFAULT_MAX_TOKENS: Final = 16
#: Longer than the context of any model; the engine checks the limit of its own.
MAX_PROMPT_TOKENS: Final = 1 << 20
#: Beyond any vocabulary; the engine checks that of its own model.
MAX_TOKEN_ID: Final = 1 << 31

_NOT_AVAILABLE: Final[Mapping[str, tuple[Any, ...]]] = {**NEVER_AVAILABLE, "suffix": ("",)}
#: The fields of ``session_config`` that apply to completions.
_CONFIGURED: Final = frozenset({"model", "sampling", "stage_sampling", "stage_params"})


#: Text, or token IDs.
CompletionPrompt: TypeAlias = str | tuple[int, ...]


class CompletionBody(CommonBody, frozen=True, kw_only=True):
    """The fields of a completion body that are validated one by one."""

    prompt: str | list[Any] | None = None
    n: Choices | None = None
    best_of: int | None = None
    echo: bool | None = None
    logprobs: bool | int | None = None
    stream_options: StreamOptions | None = None
    usage_on_final_chunk: bool | None = None
    priority: Priority | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """A completion request: each of ``prompts`` gets ``answer.choices`` answers.

    ``only_echo`` asks for the prompt and its log-probabilities without generation (``echo`` with ``max_tokens`` 0).
    """

    patch: ConfigurationPatch
    prompts: tuple[CompletionPrompt, ...]
    #: The JSON path of each prompt.
    places: tuple[str, ...]
    answer: AnswerFields
    echo: bool
    only_echo: bool
    stream: bool
    request_id: str | None
    include_usage: bool
    usage_on_final_chunk: bool


def read_completion(body: Mapping[str, Any]) -> CompletionRequest:
    """Parse a body. Raises InvalidValue, UnsupportedParameter or EmptyInput, naming the field."""
    refuse_unavailable(body, _NOT_AVAILABLE)
    fields = convert_body(body, CompletionBody)
    choices = fields.n or 1
    if fields.best_of not in (None, choices):
        raise UnsupportedParameter("best_of must be equal to n", param="best_of")
    places, prompts = zip(*_prompts(fields.prompt), strict=True)
    if len(prompts) * choices > MAX_CHOICES:
        raise InvalidValue(f"at most {MAX_CHOICES} answers per request", param="prompt")
    patch = configuration_patch(body, fields, input_field="prompt")
    for name in patch.fields.keys() - _CONFIGURED:
        del patch.fields[name]
    patch.fields["modalities"] = ["text"]
    patch.fields["sampling"] = {"max_tokens": DEFAULT_MAX_TOKENS, **patch.fields["sampling"]}
    own_chunk, final_chunk = usage_places(fields.stream_options, on_final_chunk=fields.usage_on_final_chunk)
    echo = fields.echo is True
    return CompletionRequest(
        patch=patch,
        prompts=prompts,
        places=places,
        answer=AnswerFields(
            choices=choices,
            logprobs=completion_logprobs(fields.logprobs),
            priority=fields.priority or 0,
        ),
        echo=echo,
        only_echo=echo and fields.max_tokens == 0 and not fields.max_completion_tokens,
        stream=fields.stream is True,
        request_id=fields.request_id,
        include_usage=own_chunk,
        usage_on_final_chunk=final_chunk,
    )


def _prompts(prompt: str | list[Any] | None) -> list[tuple[str, CompletionPrompt]]:
    """Return each prompt with its JSON path. A list of numbers is one prompt of token IDs."""
    if not prompt and prompt != "":
        raise InvalidValue("prompt must be a string, a list of token ids, or a list of either", param="prompt")
    if isinstance(prompt, str) or _is_number(prompt[0]):
        return [("prompt", _prompt(prompt, "prompt"))]
    if len(prompt) > MAX_CHOICES:
        raise InvalidValue(f"at most {MAX_CHOICES} answers per request", param="prompt")
    places = [f"prompt[{index}]" for index in range(len(prompt))]
    return [(place, _prompt(one, place)) for place, one in zip(places, prompt, strict=True)]


def _prompt(prompt: Any, place: str) -> CompletionPrompt:
    if not isinstance(prompt, (str, list)):
        raise InvalidValue("a prompt must be a string or a list of token ids", param=place)
    if not prompt:
        raise EmptyInput("the prompt is empty", param=place)
    if isinstance(prompt, str):
        return prompt
    if len(prompt) > MAX_PROMPT_TOKENS:
        raise InvalidValue(f"at most {MAX_PROMPT_TOKENS} token ids per prompt, got {len(prompt)}", param=place)
    for index, one in enumerate(prompt):
        if not _is_number(one) or not 0 <= one < MAX_TOKEN_ID:
            raise InvalidValue(
                f"a token id must be a whole number from 0 to {MAX_TOKEN_ID - 1}", param=f"{place}[{index}]"
            )
    return tuple(prompt)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)

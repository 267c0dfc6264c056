"""Bodies of ``/v1/completions``: prompts as they stand, without a chat around them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from omni_ws.errors import EmptyInput, InvalidValue, UnsupportedParameter
from omni_ws.wire.openai_fields import (
    NEVER_AVAILABLE,
    CommonBody,
    ConfigurationPatch,
    StreamOptions,
    configuration_patch,
    convert_body,
    refuse_unavailable,
)
from omni_ws.wire.openai_options import MAX_CHOICES, AnswerFields, Choices, Priority, completion_logprobs

#: What OpenAI's interface says for a body that does not.
DEFAULT_MAX_TOKENS: Final = 16

_NOT_AVAILABLE: Final[Mapping[str, tuple[Any, ...]]] = {**NEVER_AVAILABLE, "echo": (False,), "suffix": ("",)}
#: The fields of ``session_config`` that mean something to a prompt.
_CONFIGURED: Final = frozenset({"model", "sampling", "stage_sampling", "stage_params"})


class CompletionBody(CommonBody, frozen=True, kw_only=True):
    prompt: str | list[Any] | None = None
    n: Choices | None = None
    best_of: int | None = None
    logprobs: bool | int | None = None
    stream_options: StreamOptions | None = None
    usage_on_final_chunk: bool | None = None
    priority: Priority | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """``answer`` is asked of each prompt."""

    patch: ConfigurationPatch
    prompts: tuple[str, ...]
    answer: AnswerFields
    stream: bool
    request_id: str | None
    include_usage: bool
    usage_on_final_chunk: bool


def read_completion(body: Mapping[str, Any]) -> CompletionRequest:
    """Raises InvalidValue, UnsupportedParameter or EmptyInput, naming the field."""
    refuse_unavailable(body, _NOT_AVAILABLE)
    fields = convert_body(body, CompletionBody)
    choices = fields.n or 1
    if fields.best_of not in (None, choices):
        raise UnsupportedParameter("as many answers are made as are given", param="best_of")
    prompts = _prompts(fields.prompt)
    if len(prompts) * choices > MAX_CHOICES:
        raise InvalidValue(f"at most {MAX_CHOICES} answers at a time", param="prompt")
    whole = configuration_patch(body, fields)
    patch = ConfigurationPatch({name: whole.fields[name] for name in _CONFIGURED & whole.fields.keys()}, whole.names)
    patch.fields["modalities"] = ["text"]
    patch.fields["sampling"] = {"max_tokens": DEFAULT_MAX_TOKENS, **patch.fields["sampling"]}
    options = fields.stream_options or StreamOptions()
    return CompletionRequest(
        patch=patch,
        prompts=prompts,
        answer=AnswerFields(
            choices=choices,
            logprobs=completion_logprobs(fields.logprobs),
            priority=fields.priority or 0,
        ),
        stream=fields.stream is True,
        request_id=fields.request_id,
        include_usage=options.include_usage is True,
        usage_on_final_chunk=fields.usage_on_final_chunk is True,
    )


def _prompts(prompt: str | list[Any] | None) -> tuple[str, ...]:
    prompts = [prompt] if isinstance(prompt, str) else prompt
    if not prompts:
        raise InvalidValue("prompt is a text, or a list of texts", param="prompt")
    for index, one in enumerate(prompts):
        place = "prompt" if isinstance(prompt, str) else f"prompt[{index}]"
        if isinstance(one, (int, list)) and not isinstance(one, bool):
            raise UnsupportedParameter("prompts are texts here, not tokens", param=place)
        if not isinstance(one, str):
            raise InvalidValue("a prompt is a text", param=place)
        if not one:
            raise EmptyInput("there is nothing to complete", param=place)
    return tuple(prompts)

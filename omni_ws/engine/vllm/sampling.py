"""The sampling parameters of a request, and vLLM's parsers for tool calls and thought."""

from __future__ import annotations

import copy
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import msgspec

from omni_ws.config.values import ConfigurationError
from omni_ws.core.chunks import ToolCallFragment
from omni_ws.engine.base import AnswerOptions, GenerationRequest, StructuredOutput
from omni_ws.engine.vllm.language_model import LanguageModel, prepare_environment
from omni_ws.errors import InvalidValue
from omni_ws.wire.openai_fields import check_tools

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
#: Parameters of vLLM that are set by another field of a request, with the name of that field.
_FIELD_OF: Final = {"n": "n", "logprobs": "logprobs", "prompt_logprobs": "logprobs"}
#: The limit on JSON Schemas. vLLM compiles them between two steps, to grammars of several times their size.
MAX_SCHEMA_BYTES: Final = 1 << 16


class AskedSampling(NamedTuple):
    """The sampling parameters of a request, by vLLM's names, and the request's field for each, for error messages."""

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
        """Return the request's field for a parameter that vLLM refuses, or None."""
        return self.fields.get(parameter or "") or _FIELD_OF.get(parameter or "")


def answer_parameters(asked: AskedSampling, defaults: Mapping[str, Any], options: AnswerOptions) -> SamplingParams:
    """Return the sampling parameters of an answer. ``defaults`` are those of the checkpoint.

    Without ``max_tokens`` the answer may fill the context. The result is for one request only, as vLLM modifies it.
    Raises InvalidValue for values that vLLM refuses.
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
    schema = msgspec.json.encode(structure.schema).decode()
    if len(schema) > MAX_SCHEMA_BYTES:
        raise InvalidValue(f"at most {MAX_SCHEMA_BYTES} bytes per schema", param="response_format")
    return StructuredOutputsParams(json=schema)


def check_parameters(
    model: LanguageModel, parameters: SamplingParams, asked: AskedSampling, *, constraint: str
) -> None:
    """Validate ``parameters`` for this model. Blocks for milliseconds if the answer is constrained by a grammar.

    Raises InvalidValue for parameters that the model, or its backend for structured outputs, does not support.
    ``constraint`` is the field of the request that set the grammar.
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
    """Return parameters for a prompt without an answer; vLLM generates at least one token, which is discarded."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(max_tokens=1, temperature=0, output_kind=RequestOutputKind.DELTA, skip_clone=True)


def survives_streaming(parameters: SamplingParams) -> bool:
    """Whether a streamed prompt gets the same answer as a prompt that is submitted at once.

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


# Each family of models writes tool calls, and its thought before the answer, in a format of its own. vLLM has a parser
# for each format, which also provides the grammar that forces a call.


def check_parsers(tools: str | None, reasoning: str | None) -> None:
    """Raise ConfigurationError if vLLM has no parser of a name, None for no parser. Blocks while vLLM is imported."""
    prepare_environment()
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    for setting, name, manager in (
        ("tool_parser", tools, ToolParserManager),
        ("reasoning_parser", reasoning, ReasoningParserManager),
    ):
        known = manager.list_registered()
        if name is not None and name not in known:
            raise ConfigurationError([f"vllm.{setting}: unknown parser {name!r}; available: {', '.join(known)}"])


def load_parser(model: LanguageModel, tools: str | None, reasoning: str | None) -> Any:
    """Return vLLM's parser class. Raises ConfigurationError if it does not work with the model's tokenizer."""
    from vllm.parser import ParserManager

    llm = model.llm
    try:
        return ParserManager.get_parser(
            tool_parser_name=tools,
            reasoning_parser_name=reasoning,
            enable_auto_tools=True,
            model_name=llm.model_config.model,
            tokenizer=llm.get_tokenizer(),
        )
    except Exception as error:
        named = " and ".join(filter(None, (tools, reasoning)))
        setting = "tool_parser" if tools is not None else "reasoning_parser"
        raise ConfigurationError([f"vllm.{setting}: {named} does not work with the model: {error}"]) from error


@dataclass(frozen=True, slots=True)
class ParserUse:
    """The parser of one request, with its tools, in the form that vLLM expects."""

    parser: Any
    model: LanguageModel
    #: vLLM's own request object, possibly modified by the parser.
    request: Any
    parallel: bool
    #: The arguments of the chat template, which tell some parsers whether the model thinks.
    arguments: Mapping[str, Any]

    @property
    def constraint(self) -> Any:
        """The constraint on the answer, as vLLM's structured outputs; None if there is none."""
        return _with_few_blanks(self.request.extract_structured_outputs(), self.model)

    @property
    def skip_special_tokens(self) -> bool:
        """Whether special tokens are removed from the text; some parsers need them to find calls."""
        skip: bool = self.request.skip_special_tokens
        return skip

    def splitter(self) -> AnswerSplitter:
        """Return a splitter for one answer, for use on the event loop, with vLLM's own tokenizer."""
        return AnswerSplitter(self, self.new_parser(self.model.llm.get_tokenizer()))

    def new_parser(self, tokenizer: Any) -> Any:
        """Return an instance of the parser."""
        return self.parser(
            tokenizer,
            self.request.tools,
            model_config=self.model.llm.model_config,
            chat_template_kwargs=dict(self.arguments),
        )


def parser_use(
    parser: Any, model: LanguageModel, request: GenerationRequest, *, arguments: Mapping[str, Any], tokenizer: Any
) -> ParserUse | None:
    """Return the use of a parser for a request, or None if it has nothing to find. Blocks for milliseconds.

    ``tokenizer`` must not be in use by another thread. Raises InvalidValue for invalid tools or an unknown choice.
    """
    check_tools(request.tools, request.tool_choice)
    if request.options.raw_prompt or not (request.tools or parser.reasoning_parser_cls):
        return None
    choice = request.tool_choice or "auto"
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    fields: dict[str, Any] = {
        "messages": [{"role": "user", "content": ""}],
        "chat_template_kwargs": dict(arguments),
        "parallel_tool_calls": request.options.parallel_tool_calls,
        "response_format": _response_format(request.options),
    }
    if request.tools:
        fields["tools"] = [_own(tool, strict=choice not in ("none", "auto")) for tool in request.tools]
        fields["tool_choice"] = choice
    try:
        asked = ChatCompletionRequest.model_validate(fields)
        use = ParserUse(parser, model, asked, request.options.parallel_tool_calls, arguments)
        if choice != "none":
            asked = use.new_parser(tokenizer).adjust_request(request=asked)
    except (ValueError, TypeError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise InvalidValue(f"tools not supported by the model: {reason[:500]}", param="tools") from error
    return replace(use, request=asked)


def _with_few_blanks(constraint: Any, model: LanguageModel) -> Any:
    """Return the constraint with at most one blank between the parts of its JSON, if the backend supports that.

    If any number of blanks is allowed, a model that prefers a blank at temperature 0 writes blanks for ever.
    """
    if constraint is None or model.llm.vllm_config.structured_outputs_config.backend not in ("auto", "xgrammar"):
        return constraint
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.structured_output.backend_xgrammar import has_xgrammar_unsupported_json_features

    if constraint.structural_tag is not None:
        tag = msgspec.json.decode(constraint.structural_tag)
    elif constraint.json is not None:
        schema = msgspec.json.decode(constraint.json) if isinstance(constraint.json, str) else constraint.json
        if has_xgrammar_unsupported_json_features(schema):
            return constraint
        tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    else:
        return constraint
    _limit_blanks(tag)
    return StructuredOutputsParams(structural_tag=msgspec.json.encode(tag).decode())


def _limit_blanks(tag: Any) -> None:
    """Modify a structural tag so that every JSON Schema in it allows at most one blank between parts."""
    if isinstance(tag, list):
        for inner in tag:
            _limit_blanks(inner)
    elif isinstance(tag, dict):
        if "json_schema" in tag and tag.get("max_whitespace_cnt") is None:
            tag["max_whitespace_cnt"] = 1
        for name, inner in tag.items():
            if name != "json_schema":
                _limit_blanks(inner)


def _own(tool: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
    """Return a copy of the tool, as vLLM modifies it. A forced call is constrained to the function's parameters."""
    function = copy.deepcopy(dict(tool["function"]))
    if strict and function.get("strict") is None:
        function["strict"] = True
    return {**tool, "function": function}


def _response_format(options: AnswerOptions) -> dict[str, Any] | None:
    if options.structure is None:
        return None
    if options.structure.schema is None:
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": dict(options.structure.schema)}}


class AnswerParts(NamedTuple):
    """The text, thought and tool calls in a piece of an answer."""

    text: str = ""
    thought: str = ""
    calls: tuple[ToolCallFragment, ...] = ()


class AnswerSplitter:
    """A splitter of one answer, while it is generated, into its text, its tool calls and its thought."""

    def __init__(self, use: ParserUse, parser: Any) -> None:
        self._use = use
        self._parser = parser
        self._begun: set[int] = set()
        #: Whether text may be preceded by thought.
        self.thinks: bool = parser.reasoning_parser is not None

    @property
    def called(self) -> bool:
        """Whether a tool call has begun."""
        return bool(self._begun)

    def read(self, text: str, tokens: Sequence[int], prompt: Sequence[int], *, finished: bool) -> AnswerParts:
        """Return the text, thought and tool calls in the next piece of the answer."""
        delta = self._parser.parse_delta(text, list(tokens), self._use.request, list(prompt), finished=finished)
        if delta is None:
            return AnswerParts()
        return AnswerParts(delta.content or "", delta.reasoning or "", tuple(self._fragments(delta.tool_calls or ())))

    def _fragments(self, deltas: Sequence[Any]) -> Iterator[ToolCallFragment]:
        for delta in deltas:
            if delta.index and not self._use.parallel:
                continue
            function = delta.function
            arguments = (function.arguments if function is not None else None) or ""
            if delta.index not in self._begun:
                if function is None or not function.name:
                    continue  # a call begins with its name
                self._begun.add(delta.index)
                identifier = delta.id or f"call_{uuid.uuid4().hex[:24]}"
                yield ToolCallFragment(delta.index, identifier, function.name, arguments)
            elif arguments:
                yield ToolCallFragment(delta.index, arguments=arguments)

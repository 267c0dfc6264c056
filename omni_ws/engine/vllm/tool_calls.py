"""Tool calls with vLLM's parsers: the constraint on sampling, and the calls in the generated text.

Each family of models writes tool calls in its own format. vLLM has a parser for each, which also provides the grammar
that forces a call.
"""

from __future__ import annotations

import copy
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omni_ws.config.error import ConfigurationError
from omni_ws.core.chunks import ToolCallFragment
from omni_ws.engine.base import AnswerOptions, GenerationRequest
from omni_ws.engine.vllm.language_model import LanguageModel, prepare_environment
from omni_ws.errors import InvalidValue
from omni_ws.wire.tools import check_tools


def check_tool_parser(name: str) -> None:
    """Raise ConfigurationError if vLLM has no parser of this name. Blocks while vLLM is imported."""
    prepare_environment()
    from vllm.tool_parsers import ToolParserManager

    known = ToolParserManager.list_registered()
    if name not in known:
        raise ConfigurationError([f"vllm.tool_parser: unknown parser {name!r}; available: {', '.join(known)}"])


def load_tool_parser(name: str, model: LanguageModel) -> Any:
    """Return vLLM's parser class. Raises ConfigurationError if it does not work with the model's tokenizer."""
    from vllm.parser import ParserManager

    llm = model.llm
    try:
        return ParserManager.get_parser(
            tool_parser_name=name,
            enable_auto_tools=True,
            model_name=llm.model_config.model,
            tokenizer=llm.get_tokenizer(),
        )
    except Exception as error:
        raise ConfigurationError([f"vllm.tool_parser: {name} does not work with the model: {error}"]) from error


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one request, in the form that vLLM's parser expects."""

    parser: Any
    model: LanguageModel
    #: vLLM's own request object, possibly modified by the parser.
    request: Any
    parallel: bool

    @property
    def constraint(self) -> Any:
        """The constraint on the answer, as vLLM's structured outputs; None if there is none."""
        return self.request.extract_structured_outputs()

    @property
    def skip_special_tokens(self) -> bool:
        """Whether special tokens are removed from the text; some parsers need them to find calls."""
        skip: bool = self.request.skip_special_tokens
        return skip

    def reader(self) -> ToolCallReader:
        """Return a reader for one answer, for use on the event loop, with vLLM's own tokenizer."""
        return ToolCallReader(self, self.new_parser(self.model.llm.get_tokenizer()))

    def new_parser(self, tokenizer: Any) -> Any:
        """Return an instance of the parser."""
        return self.parser(
            tokenizer, self.request.tools, model_config=self.model.llm.model_config, chat_template_kwargs={}
        )


def tool_use(parser: Any, model: LanguageModel, request: GenerationRequest, *, tokenizer: Any) -> ToolUse | None:
    """Return the tools of a request, or None if it has none. Blocks for milliseconds.

    ``tokenizer`` must not be in use by another thread. Raises InvalidValue for invalid tools or an unknown choice.
    """
    check_tools(request.tools, request.tool_choice)
    if not request.tools:
        return None
    choice = request.tool_choice or "auto"
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    fields: dict[str, Any] = {
        "messages": [{"role": "user", "content": ""}],
        "tools": [_own(tool, strict=choice not in ("none", "auto")) for tool in request.tools],
        "tool_choice": choice,
        "parallel_tool_calls": request.options.parallel_tool_calls,
        "response_format": _response_format(request.options),
    }
    try:
        asked = ChatCompletionRequest.model_validate(fields)
        use = ToolUse(parser, model, asked, request.options.parallel_tool_calls)
        if choice != "none":
            asked = use.new_parser(tokenizer).adjust_request(request=asked)
    except (ValueError, TypeError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise InvalidValue(f"tools not supported by the model: {reason[:500]}", param="tools") from error
    return ToolUse(parser, model, asked, request.options.parallel_tool_calls)


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


class ToolCallReader:
    """Separates the text of one answer from its tool calls, while it is being generated."""

    def __init__(self, use: ToolUse, parser: Any) -> None:
        self._use = use
        self._parser = parser
        self._begun: set[int] = set()

    @property
    def called(self) -> bool:
        """Whether a call has begun."""
        return bool(self._begun)

    def read(
        self, text: str, tokens: Sequence[int], prompt: Sequence[int], *, finished: bool
    ) -> tuple[str, tuple[ToolCallFragment, ...]]:
        """Return the text in the next piece of the answer, and the fragments of calls."""
        delta = self._parser.parse_delta(text, list(tokens), self._use.request, list(prompt), finished=finished)
        if delta is None:
            return "", ()
        return delta.content or "", tuple(self._fragments(delta.tool_calls or ()))

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

"""Tools on vLLM: what they ask of the sampling, and how its parsers find the calls in what the model writes.

Every family of models writes calls in a form of its own; vLLM has a parser for each, and forces a call by a grammar in
that form.
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
    """Blocks while vLLM is imported. Raises ConfigurationError for a name that vLLM does not have."""
    prepare_environment()
    from vllm.tool_parsers import ToolParserManager

    known = ToolParserManager.list_registered()
    if name not in known:
        raise ConfigurationError([f"vllm.tool_parser: vLLM has no parser {name!r}; there are: {', '.join(known)}"])


def load_tool_parser(name: str, model: LanguageModel) -> Any:
    """vLLM's parser class. Raises ConfigurationError where it cannot work with this model's tokenizer."""
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
        raise ConfigurationError([f"vllm.tool_parser: {name} does not fit the model: {error}"]) from error


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What one request says of tools, as vLLM's parser wants to know it."""

    parser: Any
    model: LanguageModel
    #: vLLM's own form of a request, which the parser may have changed.
    request: Any
    parallel: bool

    @property
    def constraint(self) -> Any:
        """The grammar that the answer has to keep to, in vLLM's terms; None for none."""
        return self.request.extract_structured_outputs()

    @property
    def skip_special_tokens(self) -> bool:
        """Calls may be written with control tokens, which are no text otherwise."""
        skip: bool = self.request.skip_special_tokens
        return skip

    def reader(self) -> ToolCallReader:
        """For the event loop, where vLLM's own tokenizer is used."""
        return ToolCallReader(self, self.new_parser(self.model.llm.get_tokenizer()))

    def new_parser(self, tokenizer: Any) -> Any:
        return self.parser(
            tokenizer, self.request.tools, model_config=self.model.llm.model_config, chat_template_kwargs={}
        )


def tool_use(parser: Any, model: LanguageModel, request: GenerationRequest, *, tokenizer: Any) -> ToolUse | None:
    """None where the request knows no tools. Blocks for milliseconds; ``tokenizer`` is one that is free meanwhile.

    Raises InvalidValue for tools that are none, and for a choice that is not among them.
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
        raise InvalidValue(f"these tools cannot be used: {reason[:500]}", param="tools") from error
    return ToolUse(parser, model, asked, request.options.parallel_tool_calls)


def _own(tool: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
    """A copy, because vLLM changes it. Where a call is forced, its arguments are forced to be those of the function."""
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
    """Divides one answer into what is said and what is called, while it is written."""

    def __init__(self, use: ToolUse, parser: Any) -> None:
        self._use = use
        self._parser = parser
        self._begun: set[int] = set()

    @property
    def called(self) -> bool:
        return bool(self._begun)

    def read(
        self, text: str, tokens: Sequence[int], prompt: Sequence[int], *, finished: bool
    ) -> tuple[str, tuple[ToolCallFragment, ...]]:
        """What the next piece of the answer says, and pieces of the calls in it."""
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

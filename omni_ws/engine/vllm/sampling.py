"""The conversion of a request to vLLM's sampling parameters and parsers, and of vLLM's output to an answer."""

from __future__ import annotations

import codecs
import copy
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, Self, TypeAlias, TypeVar

import msgspec

from omni_ws.config.values import ConfigurationError
from omni_ws.core.chunks import FinishReason, TokenLogprob, ToolCallFragment
from omni_ws.engine.base import (
    AnswerOptions,
    GenerationRequest,
    StructuredOutput,
    TextOutput,
    ThoughtOutput,
    ToolCallOutput,
)
from omni_ws.engine.vllm.language_model import LanguageModel, prepare_environment
from omni_ws.errors import EngineFailed, InvalidValue
from omni_ws.wire.openai_fields import check_tools

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import CompletionOutput


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
#: The seeds of vLLM's workers are below this number; a larger one ends the process, and with it all requests.
SEEDS: Final = 1 << 63


class AskedSampling(NamedTuple):
    """The sampling parameters of a request: ``values`` by vLLM's names, and the request's ``fields`` for errors."""

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
        """Return the request's field for a parameter of vLLM that was refused; None if it is not known."""
        return self.fields.get(parameter or "") or _FIELD_OF.get(parameter or "")


def answer_parameters(asked: AskedSampling, defaults: Mapping[str, Any], options: AnswerOptions) -> SamplingParams:
    """Return the sampling parameters for an answer. ``defaults`` are the checkpoint's values.

    ``asked`` takes precedence over them. Without ``max_tokens`` the answer may fill the context. The result must be
    used for one request only, because vLLM modifies it. Raises InvalidValue for values that vLLM refuses, a JSON Schema
    above MAX_SCHEMA_BYTES, and several answers at temperature 0.
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
        if values.get("seed") is not None:  # vLLM adds the index of the answer
            values["seed"] = min(values["seed"], SEEDS - options.choices)
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
    """Return parameters for a prompt without an answer. vLLM still generates one token, which the caller discards."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(max_tokens=1, temperature=0, output_kind=RequestOutputKind.DELTA, skip_clone=True)


def survives_streaming(parameters: SamplingParams) -> bool:
    """Whether a StreamedPrompt with ``parameters`` gets the same answer as a prompt that is submitted as a whole.

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
    """Check that vLLM has parsers with these names (None: no parser). Blocks while vLLM is imported.

    Raises ConfigurationError.
    """
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
    """Return vLLM's parser class for the named parsers of tool calls and thought (None: no such parser). Blocks.

    Raises ConfigurationError if the class does not work with the model's tokenizer.
    """
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
    """The parser class for one request, with the request's tools in vLLM's form."""

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
        """Whether special tokens are removed from the text. Some parsers need these tokens to find tool calls."""
        skip: bool = self.request.skip_special_tokens
        return skip

    def splitter(self) -> AnswerSplitter:
        """Return a splitter for one answer, for use on the event loop, with vLLM's own tokenizer."""
        return AnswerSplitter(self, self.new_parser(self.model.llm.get_tokenizer()))

    def new_parser(self, tokenizer: Any) -> Any:
        """Return an instance of the parser class."""
        return self.parser(
            tokenizer,
            self.request.tools,
            model_config=self.model.llm.model_config,
            chat_template_kwargs=dict(self.arguments),
        )


def parser_use(
    parser: Any, model: LanguageModel, request: GenerationRequest, *, arguments: Mapping[str, Any], tokenizer: Any
) -> ParserUse | None:
    """Return the ParserUse for a request; None if its answer can have neither tool calls nor thought.

    ``parser`` is vLLM's parser class. ``tokenizer`` must not be in use by another thread. Blocks for milliseconds.
    Raises the errors of ``check_tools``, and InvalidValue for tools that the model does not support.
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
    """Return the constraint with at most one blank between the parts of its JSON; unchanged if that is not possible.

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
    """Return a copy of the tool for vLLM, which modifies it; ``strict``: calls must match the function's parameters."""
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
        """Return the text, thought and tool calls in the next piece of the answer: ``text`` and its ``tokens``."""
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


# AnswerReader: converts vLLM's output for one answer to text, thought, tool calls and log-probabilities.
#
# AlignedTokens holds back an item for each token until the token's text is sent; AnswerReader and SpokenTokens use it.


AnswerOutput: TypeAlias = TextOutput | ThoughtOutput | ToolCallOutput

_REASONS: Final = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "repetition": FinishReason.STOP}


class AnswerReader:
    """A reader of one answer to a request, piece by piece; ``choice`` is the answer's index.

    ``splitter`` finds tool calls and thought in the text. ``logprobs`` assigns tokens to text, and ``name_token`` makes
    the TokenLogprob of a token from vLLM's entry; both are None if log-probabilities are not requested. With
    ``names_end`` the log-probabilities include the token that ends the answer. With ``wanted`` False the content is
    dropped and the finish reason is LENGTH: vLLM generates at least one token even if a request only wants an echo of
    its prompt.
    """

    def __init__(
        self,
        choice: int,
        *,
        logprobs: AlignedTokens[TokenLogprob] | None = None,
        name_token: Callable[[int, Mapping[int, Any]], TokenLogprob] | None = None,
        splitter: AnswerSplitter | None,
        names_end: bool = False,
        wanted: bool = True,
    ) -> None:
        self.choice = choice
        self._wanted = wanted
        #: Whether outputs only have to be converted to text.
        self._plain = wanted and logprobs is None and splitter is None
        self._names_end = names_end
        self.tokens = 0
        self.finish_reason: FinishReason | None = None
        self._logprobs = logprobs
        self._name_token = name_token
        self._splitter = splitter
        self._thinking = splitter is not None and splitter.thinks
        #: Generated text that was not yielded: the tool parser holds back text that may become a call.
        self._held_text = ""

    def read(self, piece: CompletionOutput, prompt: Sequence[int]) -> Iterable[AnswerOutput]:
        """Return the content of vLLM's next output; ``prompt`` is the prompt's tokens.

        The output is processed during the iteration, which must be finished before the next call. The last output sets
        ``finish_reason``. Raises EngineFailed for an unknown finish reason.
        """
        if self._plain and piece.finish_reason is None:
            self.tokens += len(piece.token_ids)
            return (TextOutput(piece.text, (), self.choice),) if piece.text else ()
        return self._read(piece, prompt) if self._wanted else self._skip(piece)

    def _read(self, piece: CompletionOutput, prompt: Sequence[int]) -> Iterator[AnswerOutput]:
        self.tokens += len(piece.token_ids)
        finished = piece.finish_reason is not None
        if self._logprobs is not None:
            self._note_tokens(self._logprobs, piece, prompt)
        parts = AnswerParts(piece.text)
        if self._splitter is not None and (piece.text or piece.token_ids or finished):
            parts = self._splitter.read(piece.text, piece.token_ids, prompt, finished=finished)
        tokens = self._tokens_of(parts, piece)
        if parts.thought:
            yield ThoughtOutput(parts.thought, self.choice)
        if parts.text or tokens:
            yield TextOutput(parts.text, tokens, self.choice)
        for call in parts.calls:
            yield ToolCallOutput(call, self.choice)
        if piece.finish_reason is not None:
            self.finish_reason = self._reason(piece.finish_reason)

    def _skip(self, piece: CompletionOutput) -> tuple[()]:
        if piece.finish_reason is not None:
            self._reason(piece.finish_reason)
            self.finish_reason = FinishReason.LENGTH
        return ()

    def _note_tokens(
        self, logprobs: AlignedTokens[TokenLogprob], piece: CompletionOutput, prompt: Sequence[int]
    ) -> None:
        tokens = list(piece.token_ids)
        ends = piece.finish_reason == "stop" and not isinstance(piece.stop_reason, str)
        if tokens and ends and not self._names_end:
            tokens.pop()  # the end token is not part of the text
        assert self._name_token is not None
        logprobs.add(tokens, map(self._name_token, tokens, piece.logprobs or ()), prompt)

    def _tokens_of(self, parts: AnswerParts, piece: CompletionOutput) -> tuple[TokenLogprob, ...]:
        if self._logprobs is None:
            return ()
        self._held_text += piece.text
        text = parts.text
        if self._thinking:
            # Everything before the text of the answer is thought.
            begins = self._held_text.rfind(text) if text else len(self._held_text) - _MOST_HELD_BACK
            self._logprobs.take(max(0, begins))
            self._held_text = self._held_text[max(0, begins) :]
            if not text:
                return ()
            self._thinking = False
        if not self._held_text.startswith(text) or (self._splitter is not None and self._splitter.called):
            self._logprobs = None  # the rest is a tool call, whose tokens are not text
            return ()
        self._held_text = self._held_text[len(text) :]
        tokens = self._logprobs.take(len(text))
        if piece.finish_reason is not None:
            tokens += self._logprobs.rest(cut=isinstance(piece.stop_reason, str))
        return tokens

    def _reason(self, reason: str) -> FinishReason:
        if reason not in _REASONS:
            raise EngineFailed(f"unexpected finish reason of the Thinker: {reason!r}")
        called = self._splitter is not None and self._splitter.called
        return FinishReason.TOOL_CALLS if called and reason == "stop" else _REASONS[reason]


T = TypeVar("T")


class AlignedTokens(Generic[T]):
    """A queue with an item for each token of one answer, such as a log-probability; it waits for the token's text.

    vLLM reports a token when it is sampled, but its text later if several tokens form a character, or if a stop string
    may have begun. vLLM's own detokenizer shows where the text of each token ends.
    """

    def __init__(self, tokenizer: Any, parameters: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._parameters = parameters
        self._detokenizer: Any = None
        #: The items that were not returned, as (start, end, item) with the range of the token's text in the answer.
        self._waiting: deque[tuple[int, int, T]] = deque()
        self._given = 0

    def add(self, tokens: Sequence[int], items: Iterable[T], prompt: Sequence[int]) -> None:
        """Add sampled tokens, with an item for each. ``prompt`` is the prompt's tokens."""
        if self._detokenizer is None:
            self._detokenizer = self._new_detokenizer(prompt)
        for token, item in zip(tokens, items, strict=True):
            begins = len(self._detokenizer.output_text)
            self._detokenizer.update([token], False)
            self._waiting.append((begins, len(self._detokenizer.output_text), item))

    def take(self, length: int) -> tuple[T, ...]:
        """Remove and return the items of tokens that end within the next ``length`` characters of the answer."""
        self._given += length
        count = 0
        for number, (begins, ends, _) in enumerate(self._waiting, 1):
            # A token that completes no character is returned with the one that does.
            if begins < ends <= self._given:
                count = number
        return tuple(self._waiting.popleft()[2] for _ in range(count))

    def rest(self, *, cut: bool) -> tuple[T, ...]:
        """Remove and return the remaining items, at the end of the answer.

        ``cut``: a stop string has cut the text, so only the items of tokens that begin before the cut are returned.
        """
        rest = tuple(one for begins, _, one in self._waiting if not cut or begins < self._given)
        self._waiting.clear()
        return rest

    def _new_detokenizer(self, prompt: Sequence[int]) -> Any:
        from vllm.v1.engine.detokenizer import IncrementalDetokenizer

        parameters = self._parameters.clone()
        parameters.stop = []
        request = SimpleNamespace(
            request_id="", sampling_params=parameters, prompt_token_ids=list(prompt), prompt_embeds=None
        )
        return IncrementalDetokenizer.from_new_request(self._tokenizer, request)  # type: ignore[arg-type,unused-ignore]


class TokenBytes:
    """The bytes of each of a tokenizer's tokens; a token may be a part of a character.

    If xgrammar does not support the tokenizer, the bytes are those of the token's text, with U+FFFD for such a part.
    """

    def __init__(self, tokenizer: Any) -> None:
        import xgrammar

        self._tokenizer = tokenizer
        try:
            self._vocabulary: list[bytes] = xgrammar.TokenizerInfo.from_huggingface(tokenizer).decoded_vocab
        except (ValueError, RuntimeError):
            self._vocabulary = []  # an unsupported tokenizer, which can only decode to text

    def __getitem__(self, token: int) -> bytes:
        if token < len(self._vocabulary):
            return self._vocabulary[token]
        text: str = self._tokenizer.decode([token])
        return text.encode()

    def logprob(self, token: int, entry: Mapping[int, Any] | None, top: int) -> TokenLogprob:
        """Return a token with its log-probability, and the ``top`` most probable tokens at its position.

        ``entry`` is vLLM's log-probabilities by token for this position; None for the first token of a prompt, which
        has no log-probability.
        """
        if entry is None:
            return self._named(token, None)
        # vLLM's entry also contains the token itself, whatever its rank.
        likeliest = sorted((item for item in entry.items() if item[1].rank <= top), key=lambda item: item[1].rank)
        return self._named(
            token, entry[token].logprob, tuple(self._named(other, one.logprob) for other, one in likeliest)
        )

    def _named(self, token: int, logprob: float | None, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
        data = self[token]
        return TokenLogprob(data.decode("utf-8", "replace"), data, logprob, top)


#: The index of a token in the answer, and the token.
Placed: TypeAlias = tuple[int, int]

#: Text that a parser may hold back before it is known to be the answer's, in characters.
_MOST_HELD_BACK: Final = 1024


class SpokenTokens:
    """A filter that finds the spoken tokens of one answer: tokens whose text is passed on as text of the answer.

    Tool calls and thought, which ``splitter`` takes out of the text, are not spoken; neither is text that a stop string
    cuts off. A token is held back while its text is held back. The last token of an answer is never spoken: it is the
    end token, or the model has not computed its hidden state, which the Talker of Qwen2.5 reads.
    """

    def __init__(self, tokenizer: Any, parameters: SamplingParams, splitter: AnswerSplitter | None) -> None:
        self._splitter = splitter
        self._thinking = splitter is not None and splitter.thinks
        #: None if all text is passed on immediately.
        self._aligned: AlignedTokens[Placed] | None = None
        if splitter is not None or parameters.stop:
            self._aligned = AlignedTokens(tokenizer, parameters)
        self._count = 0
        #: Generated text that was neither passed on nor taken out.
        self._held = ""

    def read(self, piece: CompletionOutput, prompt: Sequence[int], text: str) -> Iterable[Placed]:
        """Return the tokens of ``text``, the text that is passed on now; ``piece`` is vLLM's next output."""
        tokens: list[Placed] = list(enumerate(piece.token_ids, self._count))
        self._count += len(tokens)
        finished = piece.finish_reason is not None
        if finished and tokens:
            tokens.pop()
        if self._aligned is None:
            return tokens
        self._aligned.add([token for _, token in tokens], tokens, prompt)
        self._held += piece.text
        spoken = self._of_text(self._aligned, text)
        if finished and not isinstance(piece.stop_reason, str) and not self._takes_out:
            spoken += self._aligned.rest(cut=False)
        return spoken

    @property
    def _takes_out(self) -> bool:
        """Whether the model is generating thought or a tool call, which ``splitter`` takes out of the text."""
        return self._thinking or (self._splitter is not None and self._splitter.called)

    def _of_text(self, aligned: AlignedTokens[Placed], text: str) -> tuple[Placed, ...]:
        if not text:
            if self._takes_out:
                self._give_up(aligned, len(self._held) - _MOST_HELD_BACK)
            return ()
        begins = 0
        if self._takes_out or not self._held.startswith(text):
            # The parser took something out before ``text``.
            begins = self._held.rfind(text)
        if begins < 0:
            return ()
        self._give_up(aligned, begins)
        self._thinking = False
        self._held = self._held[len(text) :]
        return aligned.take(len(text))

    def _give_up(self, aligned: AlignedTokens[Placed], characters: int) -> None:
        if characters > 0:
            aligned.take(characters)
            self._held = self._held[characters:]


#: The number of tokens in a piece of a PromptEcho.
PIECE_TOKENS: Final = 256


class PromptEcho:
    """The prompt as the beginning of the answer, in pieces of text with their tokens.

    ``text`` is the prompt if it was given as text; a prompt of token IDs is decoded. ``top`` is the number of most
    probable tokens to report for each position; None reports no log-probabilities.
    """

    def __init__(
        self, tokenizer: Any, data: TokenBytes, tokens: Sequence[int], *, text: str | None, top: int | None
    ) -> None:
        self._data = data
        self._tokens = tokens
        self._top = top
        self._parts = [text] if text is not None and top is None else _texts_of_tokens(tokenizer, data, tokens, text)

    def pieces(
        self, entries: Sequence[Mapping[int, Any] | None] | None
    ) -> Iterator[tuple[str, tuple[TokenLogprob, ...]]]:
        """Yield pieces of the prompt's text, each with its tokens; without log-probabilities, one piece without tokens.

        ``entries`` is vLLM's ``prompt_logprobs``.
        """
        if self._top is None or entries is None:
            yield "".join(self._parts), ()
            return
        for start in range(0, len(self._tokens), PIECE_TOKENS):
            places = range(start, min(start + PIECE_TOKENS, len(self._tokens)))
            named = tuple(
                replace(
                    self._data.logprob(self._tokens[place], entries[place], self._top),
                    data=self._parts[place].encode(),
                )
                for place in places
            )
            yield "".join(self._parts[place] for place in places), named


def _texts_of_tokens(tokenizer: Any, data: TokenBytes, tokens: Sequence[int], text: str | None) -> list[str]:
    """Return the text of each token; a character that several tokens form is the text of one of them.

    If ``text`` is given, the tokenizer determines where its tokens end; special tokens that the tokenizer adds have no
    text.
    """
    if text is not None and tokenizer.is_fast:
        encoded = tokenizer(text, return_offsets_mapping=True)
        ends = [*accumulate((end for _, end in encoded["offset_mapping"]), max, initial=0)]
        ends[-1] = len(text)
        return [text[start:end] for start, end in pairwise(ends)]
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    parts = [decoder.decode(data[token]) for token in tokens]
    parts[-1] += decoder.decode(b"", True)
    return parts

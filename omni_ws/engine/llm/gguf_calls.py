"""Tool calls of a GGUF model that llama.cpp does not make by itself.

llama.cpp holds the arguments of a call to their schema once a model has begun the call as its chat template has it. But
a model that must call may go on in words, a tool that the client chose is not chosen, and a call in another form is
text. So calls that the client requires, and calls that are begun in another form, are answers in JSON here: a list
that is held to a schema with the tools, which CallsInJson converts to calls.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import orjson

from omni_ws.core.chunks import FinishReason, ToolCallFragment
from omni_ws.engine.base import (
    EngineOutput,
    Finished,
    GenerationRequest,
    OutputFilter,
    OutputWriter,
    StructuredOutput,
    TextOutput,
    ThoughtOutput,
    ToolCallOutput,
)

#: The text from the end of one call to the arguments of the next; ``name`` comes first, as in ``schema_of_calls``.
_HEAD: Final = re.compile(r'[\s\[,}]*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*')
#: Brackets and quotes of JSON, and escaped characters with their backslash.
_MARKS: Final = re.compile(r'\\.?|["{}\[\]]', re.DOTALL)

#: The beginning of a call in a form that models write instead of their template's: JSON, perhaps in a fence or a tag,
#: perhaps with two braces for one, as an often copied template of Qwen2.5 shows it.
_WRITTEN: Final = re.compile(
    r'\s*(?:```\w*|<tools?(?:_call)?>|\s)*\[?\s*\{{1,2}\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:'
)
#: The first characters of such a beginning, and how many characters are held back while a text may be one.
_MAY_BEGIN: Final = ("{", "[", "`", "<")
_MOST_HELD: Final = 200


class CallWritten(Exception):
    """Raised by CallWatch when the model has begun a call as text."""


def must_call(request: GenerationRequest) -> bool:
    """Whether the client requires a call, of any tool or of the one that it names."""
    return bool(request.tools) and request.tool_choice not in (None, "auto", "none")


def in_json(request: GenerationRequest) -> GenerationRequest:
    """Return ``request`` with an answer of calls in JSON: at least one, of the named tool if there is one."""
    choice = request.tool_choice
    named = choice["function"]["name"] if isinstance(choice, Mapping) else None
    wanted = [_function(tool) for tool in request.tools if named in (None, _function(tool)["name"])]
    one = named is not None or not request.options.parallel_tool_calls
    structure = StructuredOutput(schema=schema_of_calls(wanted, one=one))
    return replace(request, tool_choice=None, options=replace(request.options, structure=structure, logprobs=None))


def schema_of_calls(functions: Sequence[Mapping[str, Any]], *, one: bool) -> dict[str, Any]:
    """Return the schema of a list of calls; ``one``: of one call only."""
    definitions: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for number, function in enumerate(functions):
        # References begin at the root of a schema, which is a definition now.
        place = f"#/$defs/{number}"
        definitions[str(number)] = {**_moved(function.get("parameters") or {}, place), "type": "object"}
        properties = {"name": {"const": function["name"]}, "arguments": {"$ref": place}}
        call = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
        calls.append(call)
    items = calls[0] if len(calls) == 1 else {"anyOf": calls}
    most = {"maxItems": 1} if one else {}
    return {"type": "array", "items": items, "minItems": 1, **most, "$defs": definitions}


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function: Mapping[str, Any] = tool["function"]
    return function


def _moved(value: Any, place: str) -> Any:
    """Return a copy of a schema whose references to parts of it begin with ``place``."""
    if isinstance(value, list):
        return [_moved(one, place) for one in value]
    if not isinstance(value, Mapping):
        return value
    return {
        name: place + one[1:] if name == "$ref" and isinstance(one, str) and one.startswith("#") else _moved(one, place)
        for name, one in value.items()
    }


class CallsInJson(OutputFilter):
    """An OutputWriter that converts the text of calls in JSON to calls, in pieces.

    ``before`` is given where the answer is begun again: the tokens that the first one had when it ended. The usage
    counts both answers, so the prompt twice. The thought was written already, and is dropped.
    """

    def __init__(self, out: OutputWriter, *, before: int | None = None) -> None:
        super().__init__(out)
        self._before = before
        self._count = 0
        #: The text that precedes arguments, as far as it has come.
        self._held = ""
        #: How many brackets are open in the arguments; 0 outside of them.
        self._depth = 0
        self._in_string = self._escaped = False

    def write(self, output: EngineOutput) -> None:
        match output:
            case TextOutput(text=text):
                for fragment in self._read(text):
                    self._out.write(ToolCallOutput(fragment))
            case ThoughtOutput() if self._before is not None:
                pass
            case Finished(reason=reason, usage=usage):
                if self._count and reason is FinishReason.STOP:
                    reason = FinishReason.TOOL_CALLS
                if self._before is not None:
                    tokens = {
                        "input_tokens": 2 * usage.input_tokens,
                        "output_tokens": usage.output_tokens + self._before,
                    }
                    usage = replace(usage, **tokens)
                self._out.write(replace(output, reason=reason, usage=usage))
            case _:
                self._out.write(output)

    def _read(self, text: str) -> Iterator[ToolCallFragment]:
        while text:
            if self._depth:
                end = self._end_of_arguments(text)
                yield ToolCallFragment(self._count - 1, arguments=text[:end])
                text = text[end:]
                continue
            self._held += text
            head = _HEAD.match(self._held)
            if head is None or head.end() == len(self._held):
                return  # the bracket of the arguments is still to come
            text, self._held = self._held[head.end() :], ""
            self._count += 1
            name, end = orjson.loads(head[1]), self._end_of_arguments(text)
            yield ToolCallFragment(self._count - 1, f"call_{uuid.uuid4().hex[:24]}", name, text[:end])
            text = text[end:]

    def _end_of_arguments(self, text: str) -> int:
        """Return the place in ``text`` behind the arguments, and note what is open there."""
        start = 0
        if self._escaped:
            self._escaped, start = False, 1
        for mark in _MARKS.finditer(text, start):
            if mark[0][0] == "\\":
                self._escaped = len(mark[0]) == 1
            elif mark[0] == '"':
                self._in_string = not self._in_string
            elif not self._in_string:
                self._depth += 1 if mark[0] in "{[" else -1
                if not self._depth:
                    return mark.end()
        return len(text)


class CallWatch(OutputFilter):
    """An OutputWriter that raises CallWritten if the answer begins with a call of a tool as text.

    While the text may be the beginning of one, it is held back, up to 200 characters. Only the name of a tool of the
    request makes it a call. If the client wants one call alone, further ones are dropped.
    """

    def __init__(self, out: OutputWriter, request: GenerationRequest) -> None:
        super().__init__(out)
        self._names = frozenset(_function(tool)["name"] for tool in request.tools)
        self._one = not request.options.parallel_tool_calls
        self._waits = True
        #: The pieces of the answer so far, of a token each.
        self.tokens = 0
        self._held: list[TextOutput] = []

    def write(self, output: EngineOutput) -> None:
        self.tokens += 1
        match output:
            case ToolCallOutput(call=call) if self._one and call.index > 0:
                return
            case TextOutput() if self._waits:
                self._held.append(output)
                if not self._may_be_call("".join(held.text for held in self._held)):
                    self._let_go()
                return
            case ToolCallOutput() | Finished():
                self._let_go()
        self._out.write(output)

    def _may_be_call(self, text: str) -> bool:
        """Whether the text so far may be the beginning of a call. Raises CallWritten if it is one."""
        begun = text.lstrip()
        if begun and not begun.startswith(_MAY_BEGIN):
            return False
        written = _WRITTEN.match(text)
        if written is not None and written[1] in self._names:
            raise CallWritten
        return written is None and len(text) <= _MOST_HELD

    def _let_go(self) -> None:
        held, self._held, self._waits = self._held, [], False
        for output in held:
            self._out.write(output)

"""Tool definitions in the form of OpenAI's chat API, and the tool choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from omni_ws.errors import InvalidValue, UnsupportedParameter
from omni_ws.wire.openai_options import check_depth
from omni_ws.wire.session_config import invalid_value

MAX_TOOLS = 128


class FunctionBody(Struct, frozen=True, kw_only=True):
    """OpenAI's ``function`` of a tool; ``parameters`` is a JSON Schema."""

    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(Struct, frozen=True, kw_only=True):
    """A tool of OpenAI's ``tools``."""

    type: Literal["function"]
    function: FunctionBody


class _NamedFunction(Struct, frozen=True, kw_only=True):
    name: str


class _NamedTool(Struct, frozen=True, kw_only=True):
    type: Literal["function"]
    function: _NamedFunction


def check_tools(tools: Sequence[Mapping[str, Any]], choice: str | Mapping[str, Any] | None) -> None:
    """Validate ``tools`` and ``tool_choice``. Raises InvalidValue or UnsupportedParameter, naming the JSON path."""
    if len(tools) > MAX_TOOLS:
        raise InvalidValue(f"at most {MAX_TOOLS} tools per request, got {len(tools)}", param="tools")
    names: set[str] = set()
    for index, tool in enumerate(tools):
        place = f"tools[{index}]"
        check_depth(tool, place)
        name = _converted(tool, ToolBody, place).function.name
        if name in names:
            raise InvalidValue(f"duplicate tool {name!r}", param=f"{place}.function.name")
        names.add(name)
    _check_choice(choice, names)


def _check_choice(choice: str | Mapping[str, Any] | None, names: set[str]) -> None:
    if choice in (None, "none", "auto"):
        return
    if choice == "required":
        if not names:
            raise InvalidValue("tool_choice required needs at least one tool", param="tool_choice")
        return
    if not isinstance(choice, Mapping):
        raise InvalidValue("tool_choice must be none, auto, required or a function", param="tool_choice")
    if choice.get("type") in ("allowed_tools", "custom"):
        raise UnsupportedParameter(
            "tool_choice must name one function; other types are not supported", param="tool_choice.type"
        )
    wanted = _converted(choice, _NamedTool, "tool_choice").function.name
    if wanted not in names:
        raise InvalidValue(f"unknown tool {wanted[:64]!r}", param="tool_choice.function.name")


def _converted(value: Mapping[str, Any], kind: type[Struct], place: str) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        refused = invalid_value(error)
        refused.param = place if refused.param is None else f"{place}.{refused.param}"
        raise refused from None

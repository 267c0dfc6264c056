"""Options of an answer besides its sampling: choices, log-probabilities, JSON schemas, priority."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct

from omni_ws.errors import InvalidValue, UnsupportedParameter
from omni_ws.wire.session_config import MAX_DEPTH

#: OpenAI's limits.
MAX_CHOICES: Final = 128
MAX_TOP_LOGPROBS: Final = 20
MAX_COMPLETION_LOGPROBS: Final = 5

_FORMS: Final = (
    'response_format must be {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": '
    '{"name": "…", "schema": {…}}}'
)

#: What the server itself passes to chat templates, and what would replace them.
_NO_TEMPLATE_ARGUMENTS: Final = frozenset(
    {
        "messages",
        "conversation",
        "tools",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "return_dict",
        "return_tensors",
        "padding",
        "truncation",
        "max_length",
        "tokenizer_kwargs",
    }
)

#: Fields of chat that only another server may honour, with the values that change nothing elsewhere.
UPSTREAM_FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "service_tier": ("auto", "default"),
}

Word = Annotated[str, Meta(pattern=r"^[a-z_]{1,32}$")]
Choices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
Priority = Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)]


class JsonSchemaBody(Struct, frozen=True, kw_only=True):
    """OpenAI's ``response_format.json_schema``."""

    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormatBody(Struct, frozen=True, kw_only=True):
    """OpenAI's ``response_format``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaBody | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerForm:
    """A constraint on the answer: JSON that matches ``schema``, or any JSON object when that is None."""

    schema: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFields:
    """Options of the answer that OpenAI bodies set outside ``session_config``.

    ``logprobs`` is the number of most probable tokens to report besides each sampled one; None reports none at all. A
    request with a lower ``priority`` runs first.
    """

    choices: int = 1
    logprobs: int | None = None
    form: AnswerForm | None = None
    priority: int = 0
    parallel_tool_calls: bool = True
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    #: Keyed by the field names of ``MediaLimitFields``.
    media_limits: Mapping[str, float] = field(default_factory=dict)
    #: Of ``UPSTREAM_FIELDS``, those that the client sent.
    upstream: Mapping[str, str] = field(default_factory=dict)


def upstream_fields(body: Struct) -> Mapping[str, str]:
    """Return ``AnswerFields.upstream`` of a chat body."""
    given = {name: getattr(body, name) for name in UPSTREAM_FIELDS}
    return {name: value for name, value in given.items() if value is not None}


def chat_logprobs(wanted: bool | None, top: int | None) -> int | None:
    """Return ``AnswerFields.logprobs`` for ``logprobs`` and ``top_logprobs`` of a chat body. Raises InvalidValue."""
    if top and not wanted:
        raise InvalidValue("top_logprobs requires logprobs: true", param="top_logprobs")
    return (top or 0) if wanted else None


def completion_logprobs(wanted: bool | int | None) -> int | None:
    """Return ``AnswerFields.logprobs`` for ``logprobs`` of a completion body; true means 1. Raises InvalidValue."""
    if wanted is None or wanted is False:
        return None
    if wanted is True:
        return 1
    if not 0 <= wanted <= MAX_COMPLETION_LOGPROBS:
        raise InvalidValue(f"logprobs must be a number from 0 to {MAX_COMPLETION_LOGPROBS}", param="logprobs")
    return wanted


def with_format_hint(error: InvalidValue) -> InvalidValue:
    """Append the valid forms to an error that is about ``response_format``."""
    if error.param is not None and error.param.partition(".")[0] == "response_format":
        error.message = f"{error.message}; {_FORMS}"
    return error


def template_arguments(given: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return ``chat_template_kwargs`` of a chat body. Raises InvalidValue for what is not the client's to set."""
    given = given or {}
    for name in _NO_TEMPLATE_ARGUMENTS & given.keys():
        raise InvalidValue(f"{name} cannot be set here", param=f"chat_template_kwargs.{name}")
    check_depth(given, "chat_template_kwargs")
    return given


def answer_form(wanted: ResponseFormatBody | None) -> AnswerForm | None:
    """Return the constraint that ``response_format`` sets. Raises InvalidValue, naming the field."""
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return AnswerForm()
    if wanted.json_schema is None:
        raise with_format_hint(InvalidValue("json_schema is missing", param="response_format.json_schema"))
    place = "response_format.json_schema.schema"
    check_depth(wanted.json_schema.schema, place)
    _check_references(wanted.json_schema.schema, place)
    return AnswerForm(schema=wanted.json_schema.schema)


def check_depth(value: Any, param: str) -> None:
    """Raise InvalidValue for a value so deeply nested that recursion over it might exhaust the stack."""
    level = [value]
    for _ in range(2 * MAX_DEPTH):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return
    raise InvalidValue(f"nested more than {2 * MAX_DEPTH} deep", param=param)


def _check_references(schema: Any, param: str) -> None:
    """Raise UnsupportedParameter for a ``$ref`` to another document, which engines would silently ignore."""
    if isinstance(schema, Mapping):
        reference = schema.get("$ref")
        if isinstance(reference, str) and not reference.startswith("#"):
            raise UnsupportedParameter(
                "external references are not supported: $ref must begin with #", param=f"{param}.$ref"
            )
    for inner in _inside(schema):
        _check_references(inner, param)


def _inside(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, list) else []

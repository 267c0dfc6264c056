"""Fields that the bodies of all OpenAI-compatible routes share, and their conversion to ``session_config``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta, Struct

from omni_ws.errors import InvalidValue, UnsupportedParameter
from omni_ws.wire.session_config import FIELDS, SamplingConfig, invalid_value

Body = TypeVar("Body", bound=Struct)

#: OpenAI fields that the server does not support, with the values that are accepted because they change nothing.
NEVER_AVAILABLE: Final[Mapping[str, tuple[Any, ...]]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "prediction": (),
    "web_search_options": (),
}

#: Top-level fields that set ``stage_sampling.talker``, and their names there.
_TALKER_SAMPLING: Final = {
    f"talker_{name}": name for name in ("temperature", "top_p", "top_k", "repetition_penalty", "max_tokens", "seed")
}

#: Default values; clients send them even to engines that do not support the parameter, so they are dropped.
_NEUTRAL_SAMPLING: Final[Mapping[str, Any]] = {
    "logit_bias": {},
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "min_p": 0,
    "top_k": -1,
}


class StreamOptions(Struct, frozen=True, kw_only=True):
    """OpenAI's ``stream_options``."""

    include_usage: bool | None = None


class CommonBody(Struct, frozen=True, kw_only=True):
    """The fields that all OpenAI-compatible routes share."""

    stream: bool | None = None
    model: str | None = None
    request_id: Annotated[str, Meta(max_length=128)] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None


#: The fields of a chunk of input.
_CHUNK_FIELDS: Final = frozenset(
    {"sequence_id", "offset", "modality", "payload", "text", "url", "format", "timestamp_ms", "end_of_input"}
    | {"role", "tool_call_id"}
)
_ROOT: Final = re.compile(r"[^.\[]*")


def usage_places(options: StreamOptions | None, *, on_final_chunk: bool | None) -> tuple[bool, bool]:
    """Return whether a stream reports usage in a chunk of its own, and whether on its final chunk.

    The first is OpenAI's way, for clients that set ``include_usage``; the second is the default for the others.
    """
    wanted = None if options is None else options.include_usage
    if wanted is False:
        return False, False
    if on_final_chunk or (wanted is None and on_final_chunk is None):
        return False, True
    return wanted is True, False


@dataclass(frozen=True, slots=True)
class ConfigurationPatch:
    """The ``session_config`` of one request, as its body sets it.

    ``fields`` are in the form of ``session_config``; ``names`` maps their paths to the names in the body where these
    differ. ``sent`` are the names of all fields of the body. ``input`` is the field that contains the input, None where
    chunks do.
    """

    fields: dict[str, Any]
    names: dict[str, str] = field(default_factory=dict)
    sent: frozenset[str] = frozenset()
    input: str | None = None

    def name_in_body(self, param: str | None) -> str | None:
        """Translate an error's ``param`` to the body's name: ``sampling.stop[0]`` to ``stop[0]``.

        Returns None for a field that the client did not send, which an error must not name.
        """
        if param is None:
            return None
        for ours, theirs in self.names.items():
            if param == ours or param.startswith((f"{ours}.", f"{ours}[")):
                return theirs + param.removeprefix(ours)
        root = _ROOT.match(param)
        if root is not None and root[0] in _CHUNK_FIELDS:
            return self.input or param
        return param if root is not None and root[0] in self.sent else None


def convert_body(body: Mapping[str, Any], kind: type[Body]) -> Body:
    """Convert ``body`` to the struct ``kind``. Raises InvalidValue, naming the field."""
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise invalid_value(error) from None


def refuse_unavailable(body: Mapping[str, Any], unavailable: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise UnsupportedParameter for the first of the fields that has another than a harmless value."""
    for name, harmless in unavailable.items():
        value = body.get(name)
        if value is not None and not any(value == one and type(value) is type(one) for one in harmless):
            raise UnsupportedParameter(f"{name} is not supported here", param=name)


def configuration_patch(
    body: Mapping[str, Any], fields: CommonBody, *, input_field: str | None = None
) -> ConfigurationPatch:
    """Return the ``session_config`` of a body, collected from both its own fields and OpenAI's top-level ones.

    ``input_field`` is the field that contains the input; None where chunks do.
    """
    patch = {name: body[name] for name in FIELDS if name in body}
    patch.pop("max_lead_ms", None)  # only applies to sessions: HTTP responses are not paced
    names = {name: name for name in SamplingConfig.__struct_fields__ if body.get(name) is not None}
    sampling = {name: body[name] for name in names}
    # Clients that send 0 mean "no limit".
    limit = fields.max_completion_tokens or fields.max_tokens
    sampling.pop("max_tokens", None)
    if limit:
        sampling["max_tokens"] = limit
        names["max_tokens"] = "max_completion_tokens" if fields.max_completion_tokens else "max_tokens"
    for name, neutral in _NEUTRAL_SAMPLING.items():
        if sampling.get(name) == neutral and not isinstance(sampling[name], bool):
            del sampling[name]
    patch["sampling"] = {**object_field(body, "sampling"), **sampling}
    talker = {field: name for field, name in _TALKER_SAMPLING.items() if body.get(field) is not None}
    if talker:
        stages = object_field(patch, "stage_sampling")
        given = {name: body[field] for field, name in talker.items()}
        patch["stage_sampling"] = {**stages, "talker": {**object_field(stages, "talker"), **given}}
    fields_of = {f"sampling.{ours}": theirs for ours, theirs in names.items()}
    fields_of |= {f"stage_sampling.talker.{ours}": theirs for theirs, ours in talker.items()}
    return ConfigurationPatch(patch, fields_of, frozenset(body), input_field)


def object_field(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the object under ``name``, or an empty one. Raises InvalidValue for any other type."""
    value = body.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise InvalidValue(f"{name} must be an object", param=name)
    return value or {}

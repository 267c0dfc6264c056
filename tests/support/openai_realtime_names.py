"""The names of OpenAI's Realtime API, by the types of its Python package: what ``realtime_parity.toml`` must judge."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, get_args

from openai.types.realtime import (
    ConversationItem,
    RealtimeClientEvent,
    RealtimeConnectParams,
    RealtimeResponse,
    RealtimeResponseCreateParams,
    RealtimeServerEvent,
    RealtimeSessionCreateRequest,
    RealtimeSessionCreateResponse,
    RealtimeTranscriptionSessionCreateRequest,
    RealtimeTranscriptionSessionCreateResponse,
    ResponseItemReference,
)
from pydantic import BaseModel

#: Fields of every event; they are judged once.
_ENVELOPE: Final = ("type", "event_id")
#: Objects that are judged in a section of their own, by the classes that describe them.
_ITEMS: Final = (*get_args(get_args(ConversationItem)[0]), ResponseItemReference)
_OF_OWN: Final = {
    "session": (
        RealtimeSessionCreateRequest,
        RealtimeTranscriptionSessionCreateRequest,
        RealtimeSessionCreateResponse,
        RealtimeTranscriptionSessionCreateResponse,
    ),
    "response": (RealtimeResponseCreateParams,),
    "server.response": (RealtimeResponse,),
}
_ELSEWHERE: Final = {one for classes in _OF_OWN.values() for one in classes} | set(_ITEMS)


def openai_names() -> set[str]:
    """Return all names: ``client.EVENT.FIELD``, ``session.FIELD``, ``response.FIELD``, ``item.TYPE.FIELD`` ….

    The fields of a list's elements follow its name, and the fields of several forms of one object are joined.
    """
    names = {f"query.{name}" for name in RealtimeConnectParams.__annotations__}
    for side, union in (("client", RealtimeClientEvent), ("server", RealtimeServerEvent)):
        names |= {f"{side}.{name}" for name in _ENVELOPE}
        for event in get_args(get_args(union)[0]):
            for kind in get_args(event.model_fields["type"].annotation):
                names |= {f"{side}.{kind}", *_fields(event, f"{side}.{kind}", without=_ENVELOPE)}
    for place, classes in _OF_OWN.items():
        for one in classes:
            names |= set(_fields(one, place))
    for one in _ITEMS:
        (kind,) = get_args(one.model_fields["type"].annotation) or get_args(
            get_args(one.model_fields["type"].annotation)[0]
        )
        names |= {f"item.{kind}", *_fields(one, f"item.{kind}", without=("type",))}
    return names


def _fields(model: type[BaseModel], place: str, *, without: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the names of the model's fields, and of the fields of the objects in them."""
    for name, field in model.model_fields.items():
        if name in without:
            continue
        path = f"{place}.{field.alias or name}"
        yield path
        for inner in _models(field.annotation):
            if inner not in _ELSEWHERE:
                yield from _fields(inner, path)


def _models(kind: Any) -> Iterator[type[BaseModel]]:
    """Yield the classes of objects in an annotation: an alternative, an element, or the type itself."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
    for inner in get_args(kind):
        yield from _models(inner)

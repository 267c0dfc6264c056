"""DataChannel: what an untrusted page may send and be sent over the data channel of a Live session."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypeAlias

from msgspec import Meta, Struct

from omni_ws.errors import InvalidValue

#: Entries of a list of permissions, and characters of each.
MAX_PERMITTED: Final = 64
_Kind: TypeAlias = Annotated[str, Meta(min_length=1, max_length=128)]
_RESPONSE_EVENT: Final = "response.event"


class ServerEventSelector(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A type of server events; of ``response.event``, those with this event of the Responses API in them."""

    type: _Kind
    response_event: _Kind | None = None


class DataChannel(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The object ``client.data_channel`` of a session over WebRTC: ``all``, which is the default, or lists of types."""

    allowed_client_events: Literal["all"] | Annotated[list[_Kind], Meta(max_length=MAX_PERMITTED)] | None = None
    allowed_server_events: (
        Literal["all"] | Annotated[list[ServerEventSelector], Meta(max_length=MAX_PERMITTED)] | None
    ) = None

    def check(self) -> None:
        """Raise InvalidValue for a selector that lacks a ``response_event``, or may not have one."""
        for selector in self._selectors or ():
            if (selector.type == _RESPONSE_EVENT) is (selector.response_event is None):
                place = "session.client.data_channel.allowed_server_events"
                raise InvalidValue(f"{_RESPONSE_EVENT}, and it alone, needs a response_event", param=place)

    @property
    def _selectors(self) -> list[ServerEventSelector] | None:
        return self.allowed_server_events if isinstance(self.allowed_server_events, list) else None

    @property
    def restricted(self) -> bool:
        """Whether there is anything that the page may not send or be sent."""
        return self._selectors is not None or isinstance(self.allowed_client_events, list)

    def may_send(self, kind: str) -> bool:
        """Return whether the page may send events of this type."""
        return not isinstance(self.allowed_client_events, list) or kind in self.allowed_client_events

    def may_get(self, event: Mapping[str, Any]) -> bool:
        """Return whether the page is sent this event of the server."""
        selectors = self._selectors
        if selectors is None:
            return True
        nested = event["event"].get("type") if event["type"] == _RESPONSE_EVENT else None
        return any(one.type == event["type"] and one.response_event == nested for one in selectors)


class ClientConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The object ``client`` of a session over WebRTC."""

    data_channel: DataChannel

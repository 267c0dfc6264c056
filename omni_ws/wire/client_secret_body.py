"""Bodies of ``POST /v1/realtime/client_secrets``, and their response."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct

from omni_ws.wire.openai_fields import convert_body

#: Seconds; the limits are OpenAI's.
MIN_LIFETIME: Final = 10
MAX_LIFETIME: Final = 7200
DEFAULT_LIFETIME: Final = 600


class ExpiresAfter(Struct, frozen=True, kw_only=True):
    """When a client secret expires: ``seconds`` after it was created."""

    anchor: Literal["created_at"] | None = None
    seconds: Annotated[int, Meta(ge=MIN_LIFETIME, le=MAX_LIFETIME)] | None = None


class ClientSecretBody(Struct, frozen=True, kw_only=True):
    """What to create a client secret with; ``session`` is in the form of ``session.update``."""

    expires_after: ExpiresAfter | None = None
    session: dict[str, Any] | None = None

    @property
    def lifetime(self) -> int:
        """In seconds."""
        return (self.expires_after.seconds if self.expires_after else None) or DEFAULT_LIFETIME


def read_client_secret(body: Mapping[str, Any]) -> ClientSecretBody:
    """Raises InvalidValue, naming the field."""
    return convert_body(body, ClientSecretBody)

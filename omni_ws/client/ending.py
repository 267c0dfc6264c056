"""Why a connection ended, and whether another one is worth a try."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from websockets.asyncio.client import ClientConnection
from websockets.frames import CloseCode

from omni_ws.client.events import Closing, ErrorEvent
from omni_ws.client.failures import ConnectionLost
from omni_ws.errors import OmniError, PayloadTooLarge, SessionTimeout, ShuttingDown

_REASONS: Final[dict[str, type[OmniError]]] = {"shutting_down": ShuttingDown, "session_timeout": SessionTimeout}
#: Close codes by which a server, or something between, says that it was not the client's fault.
_RETRYABLE_CODES: Final = frozenset(
    {CloseCode.ABNORMAL_CLOSURE, CloseCode.GOING_AWAY, CloseCode.SERVICE_RESTART, CloseCode.TRY_AGAIN_LATER}
)
#: Closes that no error frame belongs to: an error that came before them was another matter.
_UNEXPLAINED: Final = frozenset(
    {CloseCode.NORMAL_CLOSURE, CloseCode.GOING_AWAY, CloseCode.NO_STATUS_RCVD, CloseCode.ABNORMAL_CLOSURE}
)


@dataclass(frozen=True, slots=True)
class Ending:
    """``orderly``: nothing went wrong; ``error`` says why nothing can be sent any more."""

    error: Exception
    orderly: bool
    retryable: bool


def ending_of(websocket: ClientConnection, closing: Closing | None, last_error: ErrorEvent | None) -> Ending:
    """For a connection that is closed."""
    code = websocket.close_code
    if closing is not None:
        kind = _REASONS.get(closing.reason)
        message = f"the server closed the session: {closing.reason}"
        return Ending(kind(message) if kind else ConnectionLost(message), True, closing.retryable)
    if last_error is not None and code not in _UNEXPLAINED:
        return Ending(last_error.error, False, last_error.retryable)
    if code == CloseCode.MESSAGE_TOO_BIG:
        return Ending(PayloadTooLarge("a frame was larger than the server takes"), False, False)
    reason = f" ({websocket.close_reason})" if websocket.close_reason else ""
    error = ConnectionLost(f"the connection was lost with code {code}{reason}")
    return Ending(error, code == CloseCode.NORMAL_CLOSURE, code in _RETRYABLE_CODES)

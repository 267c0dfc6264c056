"""The one exception tree, and the one table that maps it to the wire (protocol/README.md, "Errors").

OmniError
├── InvalidRequest      invalid_frame, invalid_value, unknown_type, unsupported_parameter, empty_input, …
├── Refused             unauthenticated, origin_not_allowed, not_found, method_not_allowed, …
├── SessionError        session_not_found, session_timeout, sequence_gap, payload_too_large, slow_consumer, …
├── Busy                rate_limited, engine_overloaded, shutting_down
└── EngineError         engine_failed

Every leaf is one error code. It carries its own WebSocket close code, HTTP status and gRPC status, so that no
transport decides what a failure looks like. An exception from outside the tree is never shown to a client: the
border turns it into EngineFailed with an id and logs its traceback.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Final


@dataclass(frozen=True, slots=True)
class WireMapping:
    """How one error code looks on each wire.

    ``websocket_close`` is None where the session stays open (or never opened). ``http_status`` and ``grpc_status``
    are None where the error cannot arise on that transport.
    """

    code: str
    websocket_close: int | None
    http_status: int | None
    grpc_status: str | None
    retryable: bool = False
    #: What the table in the specification says beyond the numbers.
    note: str = ""


class OmniError(Exception):
    """Base of the tree; never raised itself.

    ``param`` names the offending field, ``sequence_id`` the input chunk, ``request_id`` the request that it
    belongs to; ``retry_after_ms`` says when a retryable error is worth another try.
    """

    wire: ClassVar[WireMapping]

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        sequence_id: int | None = None,
        request_id: str | None = None,
        retry_after_ms: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.sequence_id = sequence_id
        self.request_id = request_id
        self.retry_after_ms = retry_after_ms

    @property
    def code(self) -> str:
        return self.wire.code


class InvalidRequest(OmniError):
    """The client sent something that cannot be accepted as it is; the session goes on."""


class InvalidFrame(InvalidRequest):
    wire = WireMapping("invalid_frame", None, 400, "INVALID_ARGUMENT", note="not JSON, not an object, bad base64")


class InvalidValue(InvalidRequest):
    wire = WireMapping("invalid_value", None, 400, "INVALID_ARGUMENT", note="a known field with a bad value")


class UnknownType(InvalidRequest):
    wire = WireMapping("unknown_type", None, 400, "INVALID_ARGUMENT")


class UnsupportedParameter(InvalidRequest):
    wire = WireMapping(
        "unsupported_parameter", None, 400, "INVALID_ARGUMENT", note="a known field that this engine cannot honour"
    )


class EmptyInput(InvalidRequest):
    wire = WireMapping("empty_input", None, 400, "INVALID_ARGUMENT", note="the request ends")


class ContextLengthExceeded(InvalidRequest):
    wire = WireMapping("context_length_exceeded", None, 400, "RESOURCE_EXHAUSTED")


class ModelNotFound(InvalidRequest):
    wire = WireMapping("model_not_found", None, 404, "INVALID_ARGUMENT")


class UnsupportedModality(InvalidRequest):
    wire = WireMapping("unsupported_modality", None, 415, "INVALID_ARGUMENT")


class UnsupportedFormat(InvalidRequest):
    wire = WireMapping("unsupported_format", None, 415, "INVALID_ARGUMENT")


class OutOfOrder(InvalidRequest):
    wire = WireMapping("out_of_order", None, 409, None, retryable=True, note="the same id may come again")


class ResyncRequired(InvalidRequest):
    wire = WireMapping("resync_required", None, None, None, note="a fresh session follows")


class OffsetMismatch(InvalidRequest):
    wire = WireMapping("offset_mismatch", None, None, "FAILED_PRECONDITION", note="salience")


class ReadoutsOff(InvalidRequest):
    wire = WireMapping("readouts_off", None, None, "FAILED_PRECONDITION", note="salience")


class SessionBusy(InvalidRequest):
    wire = WireMapping("session_busy", None, None, "ABORTED", retryable=True, note="salience")


class Refused(OmniError):
    """The request never reaches a session."""


class NotFound(Refused):
    wire = WireMapping("not_found", None, 404, None)


class MethodNotAllowed(Refused):
    """``allow`` lists the methods of the path, for the Allow header."""

    wire = WireMapping("method_not_allowed", None, 405, None, note="with Allow")

    def __init__(self, message: str, *, allow: tuple[str, ...]) -> None:
        super().__init__(message)
        self.allow = allow


class UpgradeRequired(Refused):
    wire = WireMapping("upgrade_required", None, 426, None)


class HeaderTooLarge(Refused):
    wire = WireMapping("header_too_large", None, 431, None)


class Unauthenticated(Refused):
    wire = WireMapping("unauthenticated", None, 401, "UNAUTHENTICATED", note="401 on the handshake")


class OriginNotAllowed(Refused):
    wire = WireMapping("origin_not_allowed", None, 403, None, note="403 on the handshake")


class SessionError(OmniError):
    """The session cannot go on, or is not there."""


class SessionNotFound(SessionError):
    wire = WireMapping("session_not_found", 4404, 404, "NOT_FOUND")


class SessionTimeout(SessionError):
    wire = WireMapping("session_timeout", 4408, 408, "DEADLINE_EXCEEDED", note="orderly close")


class SessionExpired(SessionError):
    wire = WireMapping("session_expired", None, 410, "NOT_FOUND", note="Mode B, while remembered")


class SessionConflict(SessionError):
    wire = WireMapping(
        "session_conflict", None, 409, "ABORTED", note="a chunk after the end, a truncation within a request"
    )


class PayloadTooLarge(SessionError):
    wire = WireMapping("payload_too_large", 1009, 413, "RESOURCE_EXHAUSTED", note="session closed")


class SequenceGap(SessionError):
    wire = WireMapping("sequence_gap", 4408, 408, "OUT_OF_RANGE")


class ReorderWindowExceeded(SessionError):
    wire = WireMapping("reorder_window_exceeded", 4422, 422, "OUT_OF_RANGE")


class SlowConsumer(SessionError):
    wire = WireMapping("slow_consumer", 4413, None, None, note="HTTP: connection dropped")


class Busy(OmniError):
    """Nothing is wrong with the request; come again later."""


class RateLimited(Busy):
    wire = WireMapping("rate_limited", 4429, 429, "UNAVAILABLE", retryable=True, note="1013 on /v1/realtime")


class EngineOverloaded(Busy):
    wire = WireMapping("engine_overloaded", 1013, 503, "UNAVAILABLE", retryable=True, note="Retry-After")


class ShuttingDown(Busy):
    wire = WireMapping("shutting_down", 1012, 503, "UNAVAILABLE", retryable=True, note="orderly close")


#: Orderly ends of a session, which its client hears of as such instead of as an error.
ORDERLY_ENDS: Final = (SessionTimeout, ShuttingDown)


class EngineError(OmniError):
    """The engine, or something that it stands on, broke."""


class EngineFailed(EngineError):
    """``fatal`` says that the engine itself is gone: the session is closed with 1011 instead of staying open.

    The message is in words of our own: what an exception from elsewhere says may be anybody's secret, and goes to the
    log, under ``error_id`` where that is set.
    """

    wire = WireMapping(
        "engine_failed",
        None,
        500,
        "INTERNAL",
        retryable=True,
        note="1011 or 503 with Retry-After when the engine is gone",
    )

    def __init__(
        self, message: str, *, request_id: str | None = None, fatal: bool = False, error_id: str | None = None
    ) -> None:
        super().__init__(message if error_id is None else f"{message}; error id {error_id}", request_id=request_id)
        self.fatal = fatal
        self.error_id = error_id

    def identify(self, error_id: str) -> None:
        """Tell the client an id under which the log has more."""
        self.error_id = error_id
        self.message = f"{self.message}; error id {error_id}"


def leaves(base: type[OmniError] = OmniError) -> Iterator[type[OmniError]]:
    """Every error class that stands for a code, in the order of definition."""
    for child in base.__subclasses__():
        if "wire" in vars(child):
            yield child
        yield from leaves(child)


def websocket_close_code(error: OmniError) -> int | None:
    """The code that a WebSocket session is closed with after ``error``, or None where it stays open."""
    if isinstance(error, EngineFailed) and error.fatal:
        return 1011
    return error.wire.websocket_close


def http_status(error: OmniError) -> int | None:
    """The status of an HTTP answer that ``error`` is, or None where it cannot be one."""
    if isinstance(error, EngineFailed) and error.fatal:
        return 503
    return error.wire.http_status

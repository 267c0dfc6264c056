"""Errors of the server, and their form on each wire (protocol/README.md, "Errors").

OmniError
├── InvalidRequest      invalid_frame, invalid_value, unknown_type, unsupported_parameter, empty_input, …
├── Refused             unauthenticated, origin_not_allowed, not_found, method_not_allowed, …
├── Busy                rate_limited, engine_overloaded, shutting_down
├── EngineError         engine_failed, upstream_invalid
└── those of sessions   session_not_found, session_timeout, sequence_gap, payload_too_large, slow_consumer, …

Each leaf is one error code, with its WebSocket close code, HTTP status and gRPC status; transports only look them up.
An exception outside this tree never reaches a client: where it is caught, EngineFailed with an error id is raised
instead, and the traceback is logged with that id.

The docstring of each leaf tells when it is raised, and what the client should do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Final, Self


@dataclass(frozen=True, slots=True)
class WireMapping:
    """An error code and its form on each wire.

    ``websocket_close`` is None if the session stays open (or was never opened). ``http_status`` and ``grpc_status``
    are None if the error cannot occur on that transport.
    """

    code: str
    websocket_close: int | None
    http_status: int | None
    grpc_status: str | None
    retryable: bool = False
    #: Last column of the table in protocol/error_codes.md.
    note: str = ""


class OmniError(Exception):
    """Base class of all errors that a client may see; never raised itself.

    ``param`` names the invalid field, ``sequence_id`` the input chunk and ``request_id`` the request that the error is
    about, if any; ``ref`` is the client's own name for this request, or for the request of the chunk.
    ``retry_after_ms`` is the delay after which a retry may succeed.
    """

    wire: ClassVar[WireMapping]

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        sequence_id: int | None = None,
        request_id: str | None = None,
        ref: str | None = None,
        retry_after_ms: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.sequence_id = sequence_id
        self.request_id = request_id
        self.ref = ref
        self.retry_after_ms = retry_after_ms

    @property
    def code(self) -> str:
        """Error code on the wire."""
        return self.wire.code

    def about(
        self,
        *,
        param: str | None = None,
        sequence_id: int | None = None,
        request_id: str | None = None,
        ref: str | None = None,
        retry_after_ms: int | None = None,
    ) -> Self:
        """Set the given fields; None leaves a field as it is. Return the error."""
        self.param = self.param if param is None else param
        self.sequence_id = self.sequence_id if sequence_id is None else sequence_id
        self.request_id = self.request_id if request_id is None else request_id
        self.ref = self.ref if ref is None else ref
        self.retry_after_ms = self.retry_after_ms if retry_after_ms is None else retry_after_ms
        return self

    def belong_to(self, request_id: str, ref: str | None) -> None:
        """Set the request that the error is about, and the client's name for it, whatever was set before."""
        self.request_id, self.ref = request_id, ref

    def reword(self, message: str) -> Self:
        """Replace the message. Return the error."""
        self.message = message
        return self

    def without_traceback(self) -> Self:
        """Return a copy of the error without traceback and cause, which keep the variables of all frames alive."""
        twin = type(self).__new__(type(self), *self.args)
        twin.__dict__.update(self.__dict__)
        return twin

    def reports_same(self, other: OmniError | None) -> bool:
        """Return whether ``other`` is this error, or a copy of it by ``without_traceback``."""
        return type(other) is type(self) and other.args == self.args and vars(other) == vars(self)


class InvalidRequest(OmniError):
    """The client sent something invalid. The session continues; the client has to correct its message."""


class InvalidFrame(InvalidRequest):
    """A frame, chunk or body cannot be parsed: not JSON, not an object, bad base64. The client has a defect."""

    wire = WireMapping("invalid_frame", None, 400, "INVALID_ARGUMENT", note="not JSON, not an object, bad base64")


class InvalidValue(InvalidRequest):
    """A known field has an invalid value. Correct the field that ``param`` names."""

    wire = WireMapping("invalid_value", None, 400, "INVALID_ARGUMENT", note="a known field with a bad value")


class UnknownType(InvalidRequest):
    """The ``type`` of a frame is unknown. Do not send such frames; the server may be older than the client."""

    wire = WireMapping("unknown_type", None, 400, "INVALID_ARGUMENT")


class UnsupportedParameter(InvalidRequest):
    """A valid field asks for something that the engine cannot do. Omit the field."""

    wire = WireMapping(
        "unsupported_parameter", None, 400, "INVALID_ARGUMENT", note="a known field that this engine cannot honour"
    )


class EmptyInput(InvalidRequest):
    """A request ended without any content. The request is over; send input before its end."""

    wire = WireMapping("empty_input", None, 400, "INVALID_ARGUMENT", note="the request ends")


class ContextLengthExceeded(InvalidRequest):
    """Input, history and the requested output exceed the context of the model. Send less, or shorten the history.

    ``limit`` is the context and ``tokens`` the length of the prompt, where they are known.
    """

    wire = WireMapping("context_length_exceeded", None, 400, "RESOURCE_EXHAUSTED")

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        request_id: str | None = None,
        limit: int | None = None,
        tokens: int | None = None,
    ) -> None:
        super().__init__(message, param=param, request_id=request_id)
        self.limit = limit
        self.tokens = tokens


class ModelNotFound(InvalidRequest):
    """The requested model is not served. Choose one that ``/v1/models`` lists."""

    wire = WireMapping("model_not_found", None, 404, "INVALID_ARGUMENT")


class UnsupportedModality(InvalidRequest):
    """The engine does not take input, or produce output, of this modality. See the capabilities."""

    wire = WireMapping("unsupported_modality", None, 415, "INVALID_ARGUMENT")


class UnsupportedFormat(InvalidRequest):
    """An audio, image or video format, or a content type, is not supported. Convert the data to a supported one."""

    wire = WireMapping("unsupported_format", None, 415, "INVALID_ARGUMENT")


class OutOfOrder(InvalidRequest):
    """A chunk or offset is ahead of the next one, in a session that reorders nothing.

    Send the missing input, then this chunk again with the same number.
    """

    wire = WireMapping("out_of_order", None, 409, None, retryable=True, note="the same id may come again")


class ResyncRequired(InvalidRequest):
    """A resume would need outputs that are no longer in the journal.

    The server opens a fresh session on the same connection; send unfinished requests again.
    """

    wire = WireMapping("resync_required", None, None, None, note="a fresh session follows")


class OffsetMismatch(InvalidRequest):
    """Salience: the offset does not fit the token list of the session. Query the list's length, and continue there."""

    wire = WireMapping("offset_mismatch", None, None, "FAILED_PRECONDITION", note="salience")


class ReadoutsOff(InvalidRequest):
    """Salience: readouts were requested from a server without readout vectors. Do not request readouts."""

    wire = WireMapping("readouts_off", None, None, "FAILED_PRECONDITION", note="salience")


class SessionBusy(InvalidRequest):
    """Salience: another call on the same session is running. Retry once it has ended."""

    wire = WireMapping("session_busy", None, None, "ABORTED", retryable=True, note="salience")


class Refused(OmniError):
    """The request is refused before it reaches a session."""


class NotFound(Refused):
    """No route has this path. Correct the URL."""

    wire = WireMapping("not_found", None, 404, None)


class MethodNotAllowed(Refused):
    """The path exists, but not with this method. ``allow`` lists its methods, for the Allow header."""

    wire = WireMapping("method_not_allowed", None, 405, None, note="with Allow")

    def __init__(self, message: str, *, allow: tuple[str, ...]) -> None:
        super().__init__(message)
        self.allow = allow


class UpgradeRequired(Refused):
    """A WebSocket route was requested without an upgrade, or with a version other than 13. Connect by WebSocket."""

    wire = WireMapping("upgrade_required", None, 426, None)


class HeaderTooLarge(Refused):
    """The request head exceeds ``http.max_header_bytes``. Send fewer or shorter headers."""

    wire = WireMapping("header_too_large", None, 431, None)


class WebrtcOff(Refused):
    """The server does not serve WebRTC. Use the WebSocket, or let the operator install and enable it."""

    wire = WireMapping("webrtc_off", None, 501, None)


class Unauthenticated(Refused):
    """The API key is missing or unknown. Retry with a valid key."""

    wire = WireMapping("unauthenticated", None, 401, "UNAUTHENTICATED", note="401 on the handshake")


class OriginNotAllowed(Refused):
    """The page's origin, or the Host header, is not allowed. The operator has to allow it."""

    wire = WireMapping("origin_not_allowed", None, 403, None, note="403 on the handshake")


class SessionNotFound(OmniError):
    """No session has this id, or the resume token is wrong. Open a new session."""

    wire = WireMapping("session_not_found", 4404, 404, "NOT_FOUND")


class SessionTimeout(OmniError):
    """The client was silent for ``session_timeout_sec``. Open a new session when there is input."""

    wire = WireMapping("session_timeout", 4408, 408, "DEADLINE_EXCEEDED", note="orderly close")


class SessionExpired(OmniError):
    """A Mode B session timed out or made room for another, and its result is gone. Open a new session."""

    wire = WireMapping("session_expired", None, 410, "NOT_FOUND", note="Mode B, while remembered")


class SessionConflict(OmniError):
    """The state of the session forbids this message: its input has ended, or it was cancelled. Do not retry.

    With ``retry_after_ms``, another server holds the session: retry after that time.
    """

    wire = WireMapping(
        *("session_conflict", None, 409, "ABORTED"),
        note="a chunk after the end, a truncation within a request; with `Retry-After`: another server has the session",
    )


class PayloadTooLarge(OmniError):
    """Input exceeds a limit of a chunk, session or body. Send smaller chunks, or less."""

    wire = WireMapping(
        "payload_too_large", 1009, 413, "RESOURCE_EXHAUSTED", note="session closed; a request over its total ends alone"
    )

    def __init__(
        self, message: str, *, param: str | None = None, sequence_id: int | None = None, of_request: bool = False
    ) -> None:
        super().__init__(message, param=param, sequence_id=sequence_id)
        #: Whether all input of one request exceeds a limit: on a WebSocket only that request ends.
        self.of_request = of_request


class SequenceGap(OmniError):
    """A missing chunk did not arrive within ``reorder_timeout_sec``. Open a new session and send all input again."""

    wire = WireMapping("sequence_gap", 4408, 408, "OUT_OF_RANGE")


class ReorderWindowExceeded(OmniError):
    """A chunk is too far ahead of a missing one. Number chunks without gaps, and send them nearly in order."""

    wire = WireMapping("reorder_window_exceeded", 4422, 422, "OUT_OF_RANGE")


class SlowConsumer(OmniError):
    """The client did not read its output for ``write_timeout_sec``. Read faster, or concurrently with sending."""

    wire = WireMapping("slow_consumer", 4413, None, None, note="HTTP: connection dropped")


class Busy(OmniError):
    """The request is valid, but cannot be served now. Retry later, after ``retry_after_ms`` if that is given."""


class RateLimited(Busy):
    """The key, or the address, exceeds its limit of sessions, requests or bytes. Retry more slowly."""

    wire = WireMapping("rate_limited", 4429, 429, "UNAVAILABLE", retryable=True, note="1013 on /v1/realtime")


class EngineOverloaded(Busy):
    """The server is at a limit of sessions, connections or memory. Retry with back-off, or elsewhere."""

    wire = WireMapping("engine_overloaded", 1013, 503, "UNAVAILABLE", retryable=True, note="Retry-After")


class ShuttingDown(Busy):
    """The server drains before it exits. Reconnect; a load balancer chooses another replica."""

    wire = WireMapping("shutting_down", 1012, 503, "UNAVAILABLE", retryable=True, note="orderly close")


#: The ends of a session that are reported by ``session_closing`` instead of ``error``.
ORDERLY_ENDS: Final = (SessionTimeout, ShuttingDown)


class EngineError(OmniError):
    """The engine, or something it depends on, failed."""


class EngineFailed(EngineError):
    """The engine failed on a request. Retry; report ``error_id`` to the operator if it persists.

    ``fatal`` means that the engine itself is gone: the session is closed with 1011, and HTTP answers 503. ``param``
    names the failed part of a composed engine: ``asr``, ``llm`` or ``tts``. The message never quotes an exception of
    another library, which may contain secrets; the log has the exception, under ``error_id``.
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
        self,
        message: str,
        *,
        param: str | None = None,
        request_id: str | None = None,
        fatal: bool = False,
        error_id: str | None = None,
        private: str = "",
        logged: str | None = None,
        keeps_answer: bool = False,
    ) -> None:
        message = message if error_id is None else f"{message}; error id {error_id}"
        super().__init__(message, param=param, request_id=request_id)
        self.fatal = fatal
        #: Whether the history keeps the part of the answer that was sent.
        self.keeps_answer = keeps_answer
        #: Details for the operator, and for a client on this machine.
        self.private = private
        #: The text for the log, if the message may quote a client.
        self.logged = logged
        self.error_id = error_id

    def set_part(self, part: str, engine: str, *, fatal: bool) -> None:
        """Set the part that failed, ``asr``, ``llm`` or ``tts``, unless it is set.

        The message then begins with the part and ``engine``, its engine's name. Without ``fatal``, the error is no
        longer fatal.
        """
        if self.param is None:
            self.param = part
            self.message = f"{part.upper()} ({engine}): {self.message}"
            self.args = (self.message,)
        self.fatal = self.fatal and fatal

    def end_session(self) -> None:
        """Make the error fatal: the engine itself is gone, which ends the session."""
        self.fatal = True

    def tell_private(self) -> None:
        """Add the private details to the message: the client is on this machine."""
        if self.private:
            self.message, self.private = f"{self.message}: {self.private}", ""

    def identify(self, error_id: str) -> None:
        """Set the error id, under which the log has details, and append it to the message."""
        self.error_id = error_id
        self.message = f"{self.message}; error id {error_id}"


class UpstreamInvalid(EngineError):
    """An upstream's answer has no content that can be used. Retry; tell the operator if the error persists."""

    wire = WireMapping("upstream_invalid", None, 502, "INTERNAL", retryable=True, note="an answer that says nothing")


def leaves(base: type[OmniError] = OmniError) -> Iterator[type[OmniError]]:
    """Yield every class with an error code, in the order of definition."""
    for child in base.__subclasses__():
        if "wire" in vars(child):
            yield child
        yield from leaves(child)


def websocket_close_code(error: OmniError) -> int | None:
    """Return the code with which a WebSocket session is closed after ``error``; None if the session stays open."""
    if isinstance(error, EngineFailed) and error.fatal:
        return 1011
    return error.wire.websocket_close


def ends_session(error: OmniError) -> bool:
    """Whether a WebSocket session ends if one of its requests fails with this error.

    A request that finds no capacity fails without ending its session: only a session that cannot be opened at all is
    closed as busy. A request whose input is too large as a whole does not end the session, either.
    """
    if isinstance(error, Busy) or (isinstance(error, PayloadTooLarge) and error.of_request):
        return False
    return websocket_close_code(error) is not None


def http_status(error: OmniError) -> int | None:
    """Return the HTTP status for ``error``; None if the error cannot occur in an HTTP response."""
    if isinstance(error, EngineFailed) and error.fatal:
        return 503
    return error.wire.http_status

"""The error tree matches the table of the specification."""

from __future__ import annotations

from http import HTTPStatus

import pytest

from omni_ws.errors import (
    EngineFailed,
    InvalidRequest,
    InvalidValue,
    MethodNotAllowed,
    OmniError,
    PayloadTooLarge,
    RateLimited,
    leaves,
    websocket_close_code,
)

#: code: WebSocket close code, HTTP status, gRPC status, retryable
TABLE: dict[str, tuple[int | None, int | None, str | None, bool]] = {
    "invalid_frame": (None, 400, "INVALID_ARGUMENT", False),
    "invalid_value": (None, 400, "INVALID_ARGUMENT", False),
    "unknown_type": (None, 400, "INVALID_ARGUMENT", False),
    "unsupported_parameter": (None, 400, "INVALID_ARGUMENT", False),
    "empty_input": (None, 400, "INVALID_ARGUMENT", False),
    "context_length_exceeded": (None, 400, "RESOURCE_EXHAUSTED", False),
    "model_not_found": (None, 404, "INVALID_ARGUMENT", False),
    "unsupported_modality": (None, 415, "INVALID_ARGUMENT", False),
    "unsupported_format": (None, 415, "INVALID_ARGUMENT", False),
    "out_of_order": (None, 409, None, True),
    "resync_required": (None, None, None, False),
    "offset_mismatch": (None, None, "FAILED_PRECONDITION", False),
    "readouts_off": (None, None, "FAILED_PRECONDITION", False),
    "session_busy": (None, None, "ABORTED", True),
    "not_found": (None, 404, None, False),
    "method_not_allowed": (None, 405, None, False),
    "upgrade_required": (None, 426, None, False),
    "header_too_large": (None, 431, None, False),
    "webrtc_off": (None, 501, None, False),
    "unauthenticated": (None, 401, "UNAUTHENTICATED", False),
    "origin_not_allowed": (None, 403, None, False),
    "session_not_found": (4404, 404, "NOT_FOUND", False),
    "session_timeout": (4408, 408, "DEADLINE_EXCEEDED", False),
    "session_expired": (None, 410, "NOT_FOUND", False),
    "session_conflict": (None, 409, "ABORTED", False),
    "payload_too_large": (1009, 413, "RESOURCE_EXHAUSTED", False),
    "sequence_gap": (4408, 408, "OUT_OF_RANGE", False),
    "reorder_window_exceeded": (4422, 422, "OUT_OF_RANGE", False),
    "rate_limited": (4429, 429, "UNAVAILABLE", True),
    "engine_overloaded": (1013, 503, "UNAVAILABLE", True),
    "engine_failed": (None, 500, "INTERNAL", True),
    "upstream_invalid": (None, 502, "INTERNAL", True),
    "shutting_down": (1012, 503, "UNAVAILABLE", True),
    "slow_consumer": (4413, None, None, False),
}
GRPC_STATUSES = {
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "INTERNAL",
    "UNAVAILABLE",
    "UNAUTHENTICATED",
}
LEAVES = tuple(leaves())


def test_every_code_has_one_class_and_every_class_is_in_the_table() -> None:
    codes = [leaf.wire.code for leaf in LEAVES]
    assert len(codes) == len(set(codes))
    assert set(codes) == set(TABLE)


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: leaf.wire.code)
def test_each_error_looks_as_the_table_says(leaf: type[OmniError]) -> None:
    wire = leaf.wire
    row = (wire.websocket_close, wire.http_status, wire.grpc_status, wire.retryable)
    assert row == TABLE[wire.code]
    assert wire.websocket_close is None or wire.websocket_close in {1009, 1012, 1013} | set(range(4000, 5000))
    assert wire.http_status is None or HTTPStatus(wire.http_status) >= HTTPStatus.BAD_REQUEST
    assert wire.grpc_status is None or wire.grpc_status in GRPC_STATUSES


def test_branches_of_the_tree_stand_for_no_code() -> None:
    assert all(not leaf.__subclasses__() for leaf in LEAVES)
    assert {leaf.wire.code for leaf in leaves(InvalidRequest)} < set(TABLE)


def test_an_error_says_what_it_is_about() -> None:
    error = InvalidValue("bad", param="voice", sequence_id=3, request_id="req_1", retry_after_ms=5)
    assert (error.code, str(error), error.message) == ("invalid_value", "bad", "bad")
    assert (error.param, error.sequence_id, error.request_id, error.retry_after_ms) == ("voice", 3, "req_1", 5)
    assert MethodNotAllowed("no", allow=("GET", "POST")).allow == ("GET", "POST")


def test_close_codes() -> None:
    assert websocket_close_code(InvalidValue("bad")) is None
    assert websocket_close_code(PayloadTooLarge("big")) == 1009
    assert websocket_close_code(RateLimited("slow down")) == 4429
    assert websocket_close_code(EngineFailed("broke", request_id="req_1")) is None
    assert websocket_close_code(EngineFailed("gone", fatal=True)) == 1011

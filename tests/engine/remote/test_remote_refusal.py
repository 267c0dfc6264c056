"""What upstreams answer, and what our clients hear of it."""

from __future__ import annotations

import time
from email.utils import formatdate
from typing import Any

import orjson
import pytest

from omni_ws.engine.remote.event_stream import (
    refusal,
    retry_after_seconds,
    says_no_tools,
    stream_error,
)
from omni_ws.errors import (
    ContextLengthExceeded,
    EmptyInput,
    EngineFailed,
    EngineOverloaded,
    InvalidValue,
    ModelNotFound,
    OmniError,
    PayloadTooLarge,
    UnsupportedFormat,
    UnsupportedModality,
    UnsupportedParameter,
)


def refused(status: int, content: Any, retry_after: str | None = None) -> OmniError:
    body = content if isinstance(content, bytes) else orjson.dumps(content)
    return refusal(status, body, retry_after=retry_after, upstream="there")


def openai(message: str, **fields: Any) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None, **fields}}


@pytest.mark.parametrize(
    ("status", "content", "kind", "param"),
    [
        (400, openai("too hot", param="temperature"), InvalidValue, "sampling.temperature"),
        (
            400,
            openai("no min_p here", param="min_p", code="unsupported_parameter"),
            UnsupportedParameter,
            "sampling.min_p",
        ),
        (
            400,
            openai("what is that", param="x", code="unknown_parameter"),
            UnsupportedParameter,
            None,
        ),  # a field that is not the client's
        (400, openai("too long", code="context_length_exceeded"), ContextLengthExceeded, None),
        (
            400,
            {
                "error": {
                    "message": "This model's maximum context length is 64 tokens. However, you requested 99.",
                    "type": "BadRequestError",
                    "param": "input_tokens",
                    "code": 400,
                }
            },
            ContextLengthExceeded,
            None,
        ),
        (400, openai("nothing said", code="empty_input"), EmptyInput, None),
        (415, openai("no video", code="unsupported_modality", param="modality"), UnsupportedModality, None),
        (415, {"detail": "no such type"}, UnsupportedFormat, None),
        (400, {"object": "error", "message": "old style", "type": "BadRequestError", "code": 400}, InvalidValue, None),
        (422, {"detail": [{"loc": ["body", "messages", 0], "msg": "bad", "type": "x"}]}, InvalidValue, None),
        (400, b"<html>Bad Request</html>", InvalidValue, None),
        (404, openai("The model `x` does not exist.", type="NotFoundError", param="model"), ModelNotFound, "model"),
        (413, openai("at most 1 MB"), PayloadTooLarge, None),
    ],
)
def test_the_clients_fault(status: int, content: Any, kind: type[OmniError], param: str | None) -> None:
    error = refused(status, content)
    assert error.wire is kind.wire
    assert error.param == param


def test_the_clients_fault_is_told_in_the_upstreams_words() -> None:
    assert refused(400, openai("temperature must be\n at most 2\0")).message == "temperature must be at most 2"
    assert refused(400, b"secret=1").message == "the upstream refused the request"


@pytest.mark.parametrize("status", [401, 403])
def test_a_key_is_no_fault_of_the_client(status: int) -> None:
    error = refused(status, openai("Incorrect key sk-12345678"))
    assert isinstance(error, EngineFailed)
    assert error.message == "the upstream does not accept the key of this server"
    assert error.private == "Incorrect key ***"  # for the operator


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("Rate limit reached for gpt-4o in organization org-x on tokens per min.", None),
        ("Incorrect API key provided: sk-proj-abc***xyz. You can find yours.", "Incorrect API key provided: ***"),
        ("Bearer abcdefgh is not valid", "Bearer *** is not valid"),
        ("api_key=hush123 is unknown", "api_key=*** is unknown"),
        ('{"x-api-key": "hush123"} refused', '{"x-api-key": "***"} refused'),
        ("AIzaSyA1234567890abcdefghijklmnopqrstuv was leaked", "*** was leaked"),
        ("user 3f2504e0-4f89-41d3-9a0c-0305e82c3301 has no credit", "user *** has no credit"),
        ("0123456789abcdef0123456789abcdef has no credit", "*** has no credit"),
        ("https://me:hush@there.example/v1 is busy", "https://***@there.example/v1 is busy"),
        ("Meta-Llama-3.1-70B-Instruct-Turbo is overloaded; see https://status.example/incidents", None),
    ],
)
def test_what_looks_like_a_key_is_masked(said: str, told: str | None) -> None:
    assert refused(429, openai(said)).message.startswith(told or said)
    assert "hush" not in refused(429, openai(said)).message


def test_long_words_are_cut() -> None:
    error = refused(400, openai("x" * 301, param="stop." + "p" * 129))
    assert error.message == "x" * 299 + "…"
    assert error.param == "sampling.stop." + "p" * 123
    assert refused(400, openai("x" * 300)).message == "x" * 300


@pytest.mark.parametrize("status", [402, 404, 409, 418])
def test_other_refusals_are_told_in_the_upstreams_words(status: int) -> None:
    error = refused(status, openai("Insufficient balance"))
    assert (type(error), error.message) == (EngineFailed, "Insufficient balance")


@pytest.mark.parametrize("status", [301, 401, 403, 500, 501, 502, 504, 529])
def test_everything_else_is_ours_to_mend(status: int) -> None:
    """And what the upstream says of it stays here."""
    for content in (openai("Incorrect key hush-123"), {"detail": "hush-123"}, b"Traceback: hush-123"):
        error = refused(status, content)
        assert type(error) is EngineFailed
        assert "hush" not in error.message
        assert error.retry_after_ms is None


@pytest.mark.parametrize(
    ("retry_after", "milliseconds"),
    [(None, 1000), ("3", 3000), ("0.5", 500), ("-1", 0), ("soon", 1000), ("nan", 1000), ("99999999", 3_600_000)],
)
@pytest.mark.parametrize("status", [429, 503])
def test_no_capacity(status: int, retry_after: str | None, milliseconds: int) -> None:
    error = refused(status, openai("You exceeded your quota"), retry_after)
    assert type(error) is EngineOverloaded
    assert (error.retry_after_ms, error.message) == (milliseconds, "You exceeded your quota")
    assert refused(status, b"<html>").message == "the upstream has no capacity at the moment"


def test_a_date_to_retry_after(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    seconds = retry_after_seconds(formatdate(now + 30, usegmt=True))
    assert seconds is not None
    assert 29 <= seconds <= 30  # a date has whole seconds
    assert retry_after_seconds(formatdate(now - 30, usegmt=True)) == 0
    assert retry_after_seconds(f"Mon, {10**20} Jan 2024 00:00:00 GMT") is None


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        ({"message": "m", "type": "server_error"}, EngineFailed),
        ({"error": {"message": "m", "type": "server_error", "code": None}}, EngineFailed),
        ({"error": {"message": "m", "type": "InternalServerError", "param": None, "code": 500}}, EngineFailed),
        ({"error": "went wrong"}, EngineFailed),
        ({"error": {}}, EngineFailed),
        ({"error": {"message": "m", "type": "BadRequestError", "code": 400}}, InvalidValue),
        ({"error": {"message": "m", "type": "invalid_request_error"}}, InvalidValue),
        ({"message": "m", "type": "invalid_request_error", "code": "invalid_value"}, InvalidValue),
        ({"error": {"message": "m", "code": "unsupported_parameter"}}, UnsupportedParameter),
        ({"error": {"message": "m", "code": "engine_overloaded"}}, EngineOverloaded),
        ({"error": {"message": "m", "type": "rate_limit_error"}}, EngineOverloaded),
        ({"error": {"message": "m", "code": "engine_failed"}}, EngineFailed),
        ({"error": {"message": "m", "code": True}}, EngineFailed),
    ],
)
def test_errors_inside_a_stream(content: Any, kind: type[OmniError]) -> None:
    assert type(stream_error(content, upstream="there")) is kind


@pytest.mark.parametrize(
    ("message", "meant"),
    [
        ("registry.ollama.ai/library/gemma:2b does not support tools", True),
        ('"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set', True),
        ("tools param requires --jinja flag", True),
        ("No endpoints found that support tool use.", True),
        ("tools are not supported by this engine", True),
        ("Function calling is not supported by this model", True),
        ("tools.0.function: field required", False),
        ("tool_choice: no such function", False),
        ("x" * 1000 + " does not support tools", False),
    ],
)
def test_a_model_that_takes_no_tools(message: str, meant: bool) -> None:
    assert says_no_tools(orjson.dumps({"error": {"message": message}})) is meant
    assert not says_no_tools(message.encode())

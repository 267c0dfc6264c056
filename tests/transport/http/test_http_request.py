"""Parsing of request heads, without a socket."""

from __future__ import annotations

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_ws.errors import InvalidFrame, NotFound
from omni_ws.transport.http.request import Headers, HttpRequest, read_request, split_target


def parse(target: str, *headers: tuple[str, str], method: str = "GET") -> HttpRequest:
    event = h11.Request(method=method, target=target, headers=[("Host", "x"), *headers])
    return read_request(event, client="192.0.2.1", secure=False)


@pytest.mark.parametrize(
    ("target", "path", "segments"),
    [
        ("/", "/", ()),
        ("/v1/models", "/v1/models", ("v1", "models")),
        ("/a%20b/%C3%A9", "/a b/é", ("a b", "é")),
        ("/org%2Fname", "/org%2Fname", ("org/name",)),
        ("/100%", "/100%", ("100%",)),
        ("/...", "/...", ("...",)),
        ("http://host:80/v1/x?q=1", "/v1/x", ("v1", "x")),
        ("https://host", "/", ()),
        ("*", "*", ("*",)),
    ],
)
def test_path(target: str, path: str, segments: tuple[str, ...]) -> None:
    request = parse(target)
    assert (request.path, request.segments, request.target) == (path, segments, target)


@pytest.mark.parametrize(
    "target",
    [
        "//",
        "//metrics",
        "/v1//models",
        "/v1/models/",
        "/%6detrics",
        "/v1/start%5Fprofile",
        "/v1/m%2Da",
        "/%4d",
        "/%50",
        "/%30",
    ],
)
def test_a_path_is_written_in_one_way(target: str) -> None:
    """A proxy in front that looks at its letters sees what the router sees."""
    for whole in (target, f"http://host{target}"):
        with pytest.raises(NotFound):
            parse(whole)


def test_query_is_a_multi_dict() -> None:
    query = parse("/?a=1&b=x+y%0Az&a=2&empty=").query
    assert (query.get("a"), query.get_all("a"), query.get("b")) == ("1", ("1", "2"), "x y\nz")
    assert (query.get("empty"), query.get("none"), query.get("A")) == ("", None, None)
    assert list(query) == ["a", "b", "a", "empty"]
    assert "b" in query
    assert len(query) == 4


def test_headers_compare_without_case() -> None:
    headers = parse("/", ("X-One", "a, b"), ("x-ONE", "c ,")).headers
    assert headers.get("x-one") == "a, b"
    assert headers.get_all("X-One") == ("a, b", "c ,")
    assert headers.tokens("X-one") == ("a", "b", "c")
    assert "X-ONE" in headers
    assert 3 not in headers


def test_reprs_do_not_tell_values() -> None:
    assert "secret" not in repr(parse("/", ("Authorization", "Bearer secret")).headers)


def test_content_type_and_length() -> None:
    request = parse("/", ("Content-Type", "Application/JSON; charset=utf-8"), ("Content-Length", "12"), method="POST")
    assert (request.content_type, request.content_length, request.has_body) == ("application/json", 12, True)
    bare = parse("/")
    assert (bare.content_type, bare.content_length, bare.has_body) == ("", None, False)
    assert parse("/", ("Transfer-Encoding", "chunked")).has_body
    assert not parse("/", ("Content-Length", "0")).has_body


def test_offered_subprotocols() -> None:
    request = parse("/", ("Sec-WebSocket-Protocol", "a, b"), ("Sec-WebSocket-Protocol", "c"))
    assert request.offered_subprotocols == ("a", "b", "c")


@given(st.text(alphabet=st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1))
def test_any_target_is_read_or_refused(target: str) -> None:
    try:
        segments, _ = split_target(target)
    except (InvalidFrame, NotFound):
        return
    assert not {"", ".", ".."} & set(segments)
    assert not any(ord(character) < 0x20 or ord(character) == 0x7F for segment in segments for character in segment)


def test_tokens_of_an_absent_field() -> None:
    assert Headers().tokens("connection") == ()

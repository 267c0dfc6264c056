"""Matching of methods, paths and WebSocket handshakes."""

from __future__ import annotations

import h11
import pytest

from omni_ws.errors import MethodNotAllowed, NotFound
from omni_ws.transport.http.application import Router, UpgradeDecision, needs_upgrade
from omni_ws.transport.http.exchange import HttpExchange
from omni_ws.transport.http.request import HttpRequest, read_request


async def one(exchange: HttpExchange) -> None: ...


async def two(exchange: HttpExchange) -> None: ...


async def three(exchange: HttpExchange) -> None: ...


def router() -> Router:
    table = Router()
    table.add("GET", "/", one)
    table.add("GET", "/v1/models/{id}", one)
    table.add("DELETE", "/v1/models/{id}", two)
    table.add("GET", "/v1/models/special", three)
    table.add("POST", "/v1/sessions/{id}/chunks", one)
    table.add("GET", "/files/{name:path}", one)
    table.add("GET", "/files/{folder}/index", two)
    return table


def path(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split("/") if part)


@pytest.mark.parametrize(
    ("method", "target", "handler", "template", "parameters"),
    [
        ("GET", "/", one, "/", {}),
        ("HEAD", "/", one, "/", {}),
        ("GET", "/v1/models/a", one, "/v1/models/{id}", {"id": "a"}),
        ("DELETE", "/v1/models/a", two, "/v1/models/{id}", {"id": "a"}),
        ("GET", "/v1/models/special", three, "/v1/models/special", {}),
        ("POST", "/v1/sessions/s1/chunks", one, "/v1/sessions/{id}/chunks", {"id": "s1"}),
        ("GET", "/files/a/b/c", one, "/files/{name:path}", {"name": "a/b/c"}),
        ("GET", "/files/a", one, "/files/{name:path}", {"name": "a"}),
        ("GET", "/files/a/index", two, "/files/{folder}/index", {"folder": "a"}),
    ],
)
def test_match(method: str, target: str, handler: object, template: str, parameters: dict[str, str]) -> None:
    found = router().match(method, path(target))
    assert found == (handler, template, parameters)


def test_escaped_slash_stays_in_its_segment() -> None:
    assert router().match("GET", ("v1", "models", "org/name"))[2] == {"id": "org/name"}


@pytest.mark.parametrize("target", ["/v1", "/v1/models", "/v1/models/a/b", "/files", "/{id}", "/v1/sessions/s1/chunk"])
def test_not_found(target: str) -> None:
    with pytest.raises(NotFound):
        router().match("GET", path(target))


@pytest.mark.parametrize(
    ("method", "target", "allow"),
    [
        ("PUT", "/v1/models/a", ("DELETE", "GET", "HEAD", "OPTIONS")),
        ("HEAD", "/v1/sessions/s1/chunks", ("OPTIONS", "POST")),
        ("get", "/", ("GET", "HEAD", "OPTIONS")),
    ],
)
def test_method_not_allowed_says_what_is(method: str, target: str, allow: tuple[str, ...]) -> None:
    with pytest.raises(MethodNotAllowed) as refused:
        router().match(method, path(target))
    assert refused.value.allow == allow


def test_allow_of_a_path_and_of_all() -> None:
    table = router()
    assert table.allow(path("/v1/sessions/x/chunks")) == ("OPTIONS", "POST")
    assert table.allow(("*",)) == ("DELETE", "GET", "HEAD", "OPTIONS", "POST")
    with pytest.raises(NotFound):
        table.allow(path("/nowhere"))


def test_one_handler_for_one_route() -> None:
    table = router()
    with pytest.raises(ValueError, match="already"):
        table.add("GET", "/v1/models/{id}", two)


# WebSocket endpoints


def handshake(target: str) -> HttpRequest:
    return read_request(h11.Request(method="GET", target=target, headers=[("Host", "x")]), client="", secure=False)


def test_the_first_endpoint_that_takes_a_handshake_answers_it() -> None:
    special, ordinary = UpgradeDecision(route="special"), UpgradeDecision(route="ordinary")
    table = router()
    table.add("GET", "/ws", needs_upgrade)
    table.add_websocket("/ws", lambda request: special, takes=lambda request: "id" in request.query)
    table.add_websocket("/ws", lambda request: ordinary)
    assert table.upgrade(handshake("/ws?id=1")) is special
    assert table.upgrade(handshake("/ws?x")) is ordinary


@pytest.mark.parametrize("target", ["/", "/nowhere", "/v1/models/a", "/files/ws"])
def test_other_paths_have_no_websocket(target: str) -> None:
    table = router()
    table.add_websocket("/ws", lambda request: UpgradeDecision())
    with pytest.raises(NotFound):
        table.upgrade(handshake(target))


def test_an_endpoint_that_takes_no_such_handshake_refuses_it() -> None:
    table = router()
    table.add("GET", "/ws", needs_upgrade)
    table.add_websocket("/ws", lambda request: UpgradeDecision(), takes=lambda request: False)
    with pytest.raises(NotFound, match="no WebSocket at /ws"):
        table.upgrade(handshake("/ws"))

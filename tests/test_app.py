"""The registry of front ends: what one more takes, and the order in which they end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.raw_http import call, post, raw_client, request
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection
from websockets.exceptions import InvalidStatus

from omni_ws.config.model import EngineName, ServerConfig
from omni_ws.engine.fake import EchoEngine
from omni_ws.errors import OmniError, Unauthenticated
from omni_ws.server import App, create_app, listen
from omni_ws.transport.http.application import FrontEnd, Router, UpgradeDecision, needs_upgrade
from omni_ws.transport.http.request import HttpRequest


class _UppercaseFrontEnd(FrontEnd):
    """A WebSocket of its own, at a path of its own, and nothing else."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self._path = f"/{name}"
        self._name = name
        self._calls = calls

    def register(self, router: Router) -> None:
        router.add("GET", self._path, needs_upgrade)
        router.add_websocket(self._path, self.upgrade)

    def upgrade(self, request: HttpRequest) -> UpgradeDecision:
        if "secret" not in request.query:
            raise Unauthenticated("a secret is needed")
        return UpgradeDecision(serve=self._serve, route=self._path)

    async def _serve(self, connection: ServerConnection) -> None:
        async for message in connection:
            await connection.send(f"{self._name}: {str(message).upper()}")

    def drain(self, time_left: float) -> None:
        self._calls.append(f"{self._name} drain {time_left:g}")

    def end_all(self, error: OmniError) -> None:
        self._calls.append(f"{self._name} end_all {error.code}")

    async def wait_ended(self) -> None:
        self._calls.append(f"{self._name} wait_ended")

    async def wait_closed(self) -> None:
        self._calls.append(f"{self._name} wait_closed")


class _ExtendedApp(App):
    def __init__(self, calls: list[str]) -> None:
        self._calls = calls
        super().__init__(EchoEngine(), ServerConfig(port=0, engine=EngineName.FAKE))

    def _front_ends(self) -> Iterator[FrontEnd]:
        yield from super()._front_ends()
        yield _UppercaseFrontEnd("first", self._calls)
        yield _UppercaseFrontEnd("second", self._calls)


async def test_a_front_end_is_one_class_and_one_line() -> None:
    calls: list[str] = []
    async with listen(_ExtendedApp(calls)) as server:
        async with (
            connect(f"ws://127.0.0.1:{server.port}/first?secret") as one,
            connect(f"ws://127.0.0.1:{server.port}/second?secret") as other,
        ):
            await one.send("hello")
            await other.send("there")
            assert (await one.recv(), await other.recv()) == ("first: HELLO", "second: THERE")
        with pytest.raises(InvalidStatus) as refused:
            await connect(f"ws://127.0.0.1:{server.port}/first")
        assert refused.value.response.status_code == 401
        async with raw_client(server.port) as client:
            await client.send(request("GET", "/first"))
            assert (await client.response()).status == 426
        await server.drain(7)
    assert calls == [
        *("first drain 7", "second drain 7"),
        *("first end_all shutting_down", "second end_all shutting_down"),
        *("first wait_ended", "second wait_ended", "first wait_closed", "second wait_closed"),
    ]


async def test_connections_are_not_kept_by_the_registry() -> None:
    app = _ExtendedApp([])
    async with listen(app) as server:
        for _ in range(3):
            async with connect(f"ws://127.0.0.1:{server.port}/first?secret") as connection:
                await connection.send("x")
                await connection.recv()
        assert not app._serving


@pytest.mark.parametrize(("configured", "announced"), [((), ["mine"]), (("other", "mine"), ["mine", "other"])])
async def test_an_embedded_server_has_the_model_name_that_it_is_given(
    configured: tuple[str, ...], announced: list[str]
) -> None:
    engine = EchoEngine()
    await engine.start()
    config = ServerConfig(engine=EngineName.FAKE, port=0, served_model_name=configured)
    try:
        async with listen(create_app(engine, config, model_name="mine")) as server:
            listed = (await call(server.port, "GET", "/v1/models")).json()["data"]
            assert [model["id"] for model in listed][: len(announced)] == announced
            assert (await call(server.port, "GET", "/health")).json()["model"] == "mine"
            body = {"model": "mine", "messages": [{"role": "user", "content": "hello"}]}
            answered = (await post(server.port, "/v1/chat/completions", body)).json()
            assert (answered["model"], answered["choices"][0]["message"]["content"]) == ("mine", "hello")
    finally:
        await engine.stop()

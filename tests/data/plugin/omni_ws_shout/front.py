from __future__ import annotations

from omni_ws.server import App
from omni_ws.transport.http.application import FrontEnd, Router
from omni_ws.transport.http.exchange import HttpExchange


class Loudness(FrontEnd):
    def __init__(self, app: App) -> None:
        self._app = app

    def register(self, router: Router) -> None:
        router.add("GET", "/v1/loudness", self.answer)

    async def answer(self, exchange: HttpExchange) -> None:
        self._app.authenticator.authenticate(exchange.request)
        await exchange.respond_json(200, {"engine": self._app.sessions.engine.name, "loudness": 11})

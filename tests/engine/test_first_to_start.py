"""The best of several engines that starts on this machine, and what engines for the task speech refuse alike."""

from __future__ import annotations

import pytest
from support.live_server import live_server

from omni_ws.client import connect
from omni_ws.engine.base import EngineState
from omni_ws.engine.composed.engine import FirstToStart
from omni_ws.engine.fake import EchoEngine
from omni_ws.errors import EngineFailed
from omni_ws.wire.server_frames import Part


class _Part(EchoEngine):
    def __init__(self, name: str, problem: Exception | None = None) -> None:
        super().__init__()
        self.name = self.model = name
        self.problem = problem
        self.stops = 0

    def describe(self) -> tuple[str, ...]:
        return (f"this is {self.name}",)

    async def start(self) -> None:
        if self.problem is not None:
            raise self.problem
        await super().start()

    async def stop(self) -> None:
        await super().stop()
        self.stops += 1


async def test_the_best_that_starts_is_all_there_is() -> None:
    good, old = _Part("good"), _Part("old")
    engine = FirstToStart({"Good": good, "Old": old})
    assert engine.state is EngineState.STARTING
    await engine.start()
    assert (engine.name, engine.model, engine.state) == ("good", "good", EngineState.OK)
    assert (engine.why, engine.describe()) == (None, ("this is good",))
    assert old.state is EngineState.STARTING
    await engine.stop()
    assert (good.stops, old.stops) == (1, 0)


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (EngineFailed("its weights are not here"), "its weights are not here"),
        (ImportError("no x"), "ImportError: no x"),
    ],
)
async def test_what_stands_in_says_why(problem: Exception, reason: str) -> None:
    good, old = _Part("good", problem), _Part("old")
    engine = FirstToStart({"Good": good, "Old": old})
    await engine.start()
    assert (engine.name, engine.state) == ("old", EngineState.OK)
    assert engine.why == f"Old instead of Good: {reason}"
    assert engine.describe() == ("this is old", engine.why)
    assert good.stops == 1
    await engine.start()  # idempotent
    assert engine.why is not None
    await engine.stop()
    # A machine may have got what was missing.
    good.problem = None
    await engine.start()
    assert (engine.name, engine.describe()) == ("good", ("this is good",))


async def test_where_none_starts_the_last_says_why() -> None:
    engine = FirstToStart({"Good": _Part("good", EngineFailed("one")), "Old": _Part("old", EngineFailed("two"))})
    with pytest.raises(EngineFailed, match="two"):
        await engine.start()


async def test_requests_are_answered_by_what_started() -> None:
    engine = FirstToStart({"Good": _Part("good", EngineFailed("not here")), "Old": _Part("old")})
    async with live_server(engine) as server, connect(server.websocket_url) as session:
        assert session.created.parts.llm == Part(name="old", model="old")
        assert (await session.ask_text("hello")).text == "hello"

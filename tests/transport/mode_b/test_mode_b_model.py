"""Mode B: the input does not depend on how chunks are spread over bodies and connections, repeated or resent."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.live_server import live_server
from support.mode_b_client import ModeBSession, mode_b, text
from support.raw_http import raw_client, request

pytestmark = pytest.mark.slow

WORDS = st.text("ab é€😀", max_size=5)


@dataclass(frozen=True)
class Delivery:
    """Chunks of one body; with ``cut`` the connection is reset after that many bytes of the request."""

    numbers: tuple[int, ...]
    cut: int | None


@dataclass(frozen=True)
class Plan:
    """``refused`` are numbers of malformed chunks; ``connections`` send at the same time, each in its order."""

    words: tuple[str, ...]
    refused: frozenset[int]
    connections: tuple[tuple[Delivery, ...], ...]
    end: str

    def chunk(self, number: int) -> dict[str, Any]:
        if number in self.refused:
            return {"sequence_id": number, "payload": "no base64"}
        last = number == len(self.words) - 1 and self.end == "chunk"
        return text(self.words[number], number, **({"end_of_input": True} if last else {}))

    @property
    def said(self) -> str:
        return "".join(word for number, word in enumerate(self.words) if number not in self.refused)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    words = tuple(draw(st.lists(WORDS, min_size=1, max_size=12)))
    last = len(words) - 1
    end = draw(st.sampled_from(["chunk", "finish"]))
    refused = draw(st.frozensets(st.integers(0, last), max_size=2)) - ({last} if end == "chunk" else set())
    bodies = st.lists(st.integers(0, last), min_size=1, max_size=4).map(tuple)
    deliveries = st.builds(Delivery, bodies, st.none() | st.none() | st.integers(0, 400))
    connections = st.lists(st.lists(deliveries, max_size=6).map(tuple), min_size=1, max_size=4).map(tuple)
    return Plan(words, frozenset(refused), draw(connections), end)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plan=plans())
def test_the_input_is_the_list(plan: Plan) -> None:
    asyncio.run(_play(plan))


async def _play(plan: Plan) -> None:
    async with live_server() as server, mode_b(server) as session:
        await asyncio.gather(*(_deliver(session, plan, deliveries) for deliveries in plan.connections))
        # A client that does not know what arrived sends everything again.
        for number in range(len(plan.words)):
            await _append(session, plan, (number,))
        if plan.end == "finish":
            await session.finish()
        status = await session.status()
        assert (status["next_sequence_id"], status["buffered_chunks"]) == (len(plan.words), 0)
        assert status["input_ended"]
        if not plan.said:
            response = await session.result()
            assert (response.status, response.error["code"]) == (400, "empty_input")
            return
        assert await session.content() == plan.said
        for number in range(len(plan.words)):
            await _append(session, plan, (number,))
        assert await session.content() == plan.said


async def _deliver(session: ModeBSession, plan: Plan, deliveries: tuple[Delivery, ...]) -> None:
    for delivery in deliveries:
        if delivery.cut is None:
            await _append(session, plan, delivery.numbers)
            continue
        body = orjson.dumps({"chunks": [plan.chunk(number) for number in delivery.numbers]})
        async with raw_client(session.server.port) as client:
            await client.send(request("POST", f"{session.path}/chunks", body=body)[: delivery.cut])
            client.reset()


async def _append(session: ModeBSession, plan: Plan, numbers: tuple[int, ...]) -> None:
    response = await session.call("POST", "/chunks", {"chunks": [plan.chunk(number) for number in numbers]})
    if response.status != 202:
        assert response.status == 400
        if response.error["code"] == "invalid_frame":
            assert plan.refused & {*numbers}
        else:
            assert (response.error["code"], plan.said) == ("empty_input", "")

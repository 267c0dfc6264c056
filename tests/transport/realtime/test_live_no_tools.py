"""Live with a language model by URL that takes no tools: it talks, and hands nothing over."""

from __future__ import annotations

from typing import Any

import pytest
from support.inline_workers import inline
from support.live_server import live_server
from support.raw_http import post
from support.realtime_client import live_client
from support.scripted_engines import Ears, ToneEngine
from support.scripted_upstream import refuses, remote_llm, says, upstream

from omni_ws.engine.composed.engine import ComposedEngine
from omni_ws.transport.realtime.live_parts import DELEGATE_RULE

pytestmark = pytest.mark.virtual_clock

NO_TOOLS = refuses(400, {"error": {"message": "gemma:2b does not support tools"}})
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def asked(request: dict[str, Any]) -> tuple[bool, str]:
    """Whether the model was offered tools, and what it was instructed to do."""
    return "tools" in request, request["messages"][0]["content"]


async def test_a_model_that_takes_no_tools_is_asked_without_them() -> None:
    script = (NO_TOOLS, says("Hello."), says("Again."), NO_TOOLS, says("Back."))
    async with upstream(*script) as model, remote_llm(model, options=("tools",)) as llm:
        engine = ComposedEngine(llm, asr=Ears(["hello"], ["again"], ["back"]), tts=ToneEngine())
        async with live_server(engine) as server, live_client(inline(server)) as client:
            await client.start(instructions="Be brief.")
            await client.speak()
            await client.until_said("Hello.")
            await client.speak()  # the server remembers it
            await client.until_said("Again.")
            (one,) = llm.upstreams
            one.set_problem("it is gone")
            one.set_problem("")  # it may have another model now
            await client.speak()
            await client.until_said("Back.")
            assert not client.seen("error")
    plain, ruled = (False, "Be brief."), (True, f"Be brief.\n\n{DELEGATE_RULE}")
    assert [asked(one) for one in model.requests] == [ruled, plain, plain, ruled, plain]


async def test_another_refusal_is_an_error_and_is_not_repeated() -> None:
    refusal = refuses(400, {"error": {"message": "tools.0.function: field required"}})
    async with upstream(refusal) as model, remote_llm(model, options=("tools",)) as llm:
        engine = ComposedEngine(llm, asr=Ears(["hello"]), tts=ToneEngine())
        async with live_server(engine) as server, live_client(inline(server)) as client:
            await client.start()
            await client.speak()
            await client.until("error")
    assert [asked(one)[0] for one in model.requests] == [True]


async def test_tools_of_a_client_are_never_left_out() -> None:
    async with (
        upstream(NO_TOOLS) as model,
        remote_llm(model, options=("tools",)) as llm,
        live_server(ComposedEngine(llm)) as server,
    ):
        body = {"messages": [{"role": "user", "content": "hello"}], "tools": [LOOK]}
        for _ in range(2):
            answer = await post(server.port, "/v1/chat/completions", body)
            assert (answer.status, answer.error["message"]) == (400, "gemma:2b does not support tools")
    assert [one["tools"] for one in model.requests] == [[LOOK], [LOOK]]

"""Delegation to responses: a second chat does the work, here by the URL of a scripted model, while the talk goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import orjson
import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter
from support.inline_workers import inline
from support.inline_workers import loud_24k as loud
from support.inline_workers import quiet_24k as quiet
from support.live_server import LiveServer, live_server
from support.realtime_client import LiveClient, live_client
from support.scripted_engines import Talker, delegates, spoken
from support.scripted_upstream import (
    Answer,
    ScriptedUpstream,
    delta,
    finish,
    hang,
    refuses,
    says,
    streams,
    upstream,
)

from omni_ws.engine.remote.engine import Backend
from omni_ws.errors import EngineFailed
from omni_ws.transport.realtime.live_parts import (
    FAILED,
    INSTRUCTIONS,
    MAX_BUFFERED_BYTES,
    MAX_BUFFERED_ITEMS,
    NOTHING,
)

pytestmark = pytest.mark.virtual_clock

TOOL = {"type": "function", "name": "find_parcel", "parameters": {"type": "object"}}
_NESTED: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
WHERE = "Where is my parcel?"


def calls(*ids: str, name: str = "find_parcel", arguments: str = '{"of": "me"}') -> Answer:
    """An answer of the model that does the work: it calls a function."""
    made = [
        {"index": index, "id": one, "function": {"name": name, "arguments": arguments}} for index, one in enumerate(ids)
    ]
    return streams(delta(tool_calls=made), finish("tool_calls"))


def replying(said: str) -> Iterable[Any]:
    """What the voice says: it hands over what is asked of a parcel, and tells what it is given to tell."""
    if said.startswith("[This is not from the user"):
        return spoken(said.rpartition("]\n")[2])
    if "parcel" in said:
        return delegates("One moment.", said, number=said.count(" ") + len(said))
    return spoken(f"Sure, {said}.")


@dataclass
class Session:
    client: LiveClient
    llm: ScriptedUpstream
    engine: Talker
    server: LiveServer

    async def nested(self, kind: str) -> tuple[dict[str, Any], str | None]:
        """The next event of this type of the second chat, and its delegation. All are valid by OpenAI's types."""
        while True:
            event = await self.client.until("response.event")
            _NESTED.validate_python(event["event"], strict=False)
            if "response" in event["event"]:
                shown = event["event"]["response"]
                assert (shown["output"], shown["tools"], shown["instructions"]) == ([], [], None)
                assert "input" not in shown
            if event["event"]["type"] == kind:
                return event["event"], event["delegation_id"]

    async def output(self, call_id: str, output: Any = "In Lisbon.") -> None:
        item = {"type": "function_call_output", "call_id": call_id, "output": output}
        await self.client.send("response.item.create", item=item)


@asynccontextmanager
async def session(
    *turns: str, script: Iterable[Answer], reply: Callable[[str], Iterable[Any]] = replying, **responses: Any
) -> AsyncIterator[Session]:
    engine = Talker(*turns, reply=reply)
    async with upstream(*script, models=("worker",)) as llm:
        live = {"backend": llm.url, "backend_model": "worker", "backend_api_key": "sk-worker"}
        async with live_server(engine, live=live) as server, live_client(inline(server)) as client:
            settings = {"model": "gpt-5.6-luna", "tools": [TOOL], **responses}
            shown = await client.start(delegation={"type": "responses", "responses": settings})
            assert shown["delegation"] == {"type": "responses", "responses": settings}
            yield Session(client, llm, engine, server)


async def test_work_of_twenty_seconds_is_told_once_while_two_questions_are_answered() -> None:
    script = [calls("call_a"), says("The parcel is ", "in Lisbon.")]
    async with session(WHERE, "what time", "how much", script=script, instructions="Find parcels.") as one:
        await one.client.speak()
        created = (await one.client.until("session.delegation.created"))["delegation"]
        event, delegation_id = await one.nested("response.created")
        assert (created["target"], created["response_id"]) == ("responses", event["response"]["id"])
        assert delegation_id == created["id"]
        event, _ = await one.nested("response.output_item.done")
        call = event["item"]
        assert (call["type"], call["status"], call["call_id"]) == ("function_call", "completed", "call_a")
        assert (call["name"], call["arguments"]) == ("find_parcel", '{"of": "me"}')
        assert (await one.nested("response.completed"))[0]["response"]["status"] == "completed"
        began = asyncio.get_running_loop().time()
        for question in ("what time", "how much"):
            await one.client.speak()
            await one.client.until_said(f"Sure, {question}.")
        await one.client.take_for(began + 20 - asyncio.get_running_loop().time())
        await one.output("call_a")
        await one.client.send("response.create")
        event, again = await one.nested("response.output_item.done")
        assert (event["item"]["type"], again) == ("message", delegation_id)
        assert event["item"]["content"][0]["text"] == "The parcel is in Lisbon."
        await one.client.until_said("The parcel is in Lisbon.")
        await one.client.take_for(5)
        assert one.client.said() == "One moment. Sure, what time. Sure, how much. The parcel is in Lisbon."
        assert len(one.client.seen("session.delegation.created")) == 1
        first, second = one.llm.requests
    assert one.llm.headers[-1]["authorization"] == "Bearer sk-worker"
    assert (first["model"], first["messages"][0]) == ("worker", {"role": "system", "content": "Find parcels."})
    function = {"name": "find_parcel", "parameters": {"type": "object"}}
    assert first["tools"] == [{"type": "function", "function": function}]
    asked = first["messages"][-1]["content"]
    assert asked.startswith(f"The talk so far:\nUser: {WHERE}")
    assert asked.endswith(f"The task: {WHERE}")
    assert [message["role"] for message in second["messages"]] == ["system", "user", "assistant", "tool"]
    assert second["messages"][-1]["content"] == "In Lisbon."
    # The voice knows of the work, and that it is not done, when it answers the questions.
    (result,) = [message for message in one.engine.requests[1].history if message.role == "tool"]
    assert result.text.startswith("Still working.")


async def test_a_question_waits_no_longer_while_work_is_done() -> None:
    """The model of the work hangs; the answer begins as soon after the turn as without any work."""
    waits = []
    for first in (WHERE, "hello"):
        async with session(first, "what time", script=[hang]) as one:
            await one.client.speak()
            await one.client.until_said("One moment." if first == WHERE else "Sure, hello.")
            assert bool(one.client.seen("session.delegation.created")) == (first == WHERE)
            await one.client.speak()
            end, heard = asyncio.get_running_loop().time(), len(one.client.sound)
            while not any(one.client.sound[heard:]):
                await one.client.take()
            waits.append(asyncio.get_running_loop().time() - end)
    assert waits[0] <= waits[1] + 0.1


async def test_a_result_that_nobody_heard_is_told_again() -> None:
    may_tell = asyncio.Event()

    def reply(said: str) -> Iterable[Any]:
        if said.startswith("[This is not"):
            yield may_tell.wait
        yield from replying(said)

    async with session(WHERE, "what time", script=[says("In Lisbon.")], reply=reply) as one:
        await one.client.speak()
        await one.nested("response.completed")
        while not any("In Lisbon." in asked for asked in one.engine.asked):
            await one.client.take()
        await one.client.speak(ms=960)
        may_tell.set()
        await one.client.until_said("In Lisbon.")
        await one.client.take_for(10)
        assert one.client.said() == "One moment. Sure, what time. In Lisbon."


async def test_a_result_that_comes_while_the_user_speaks_waits() -> None:
    async with session(WHERE, "what time", script=[calls("call_a"), says("In Lisbon.")]) as one:
        await one.client.speak()
        await one.nested("response.completed")
        await one.client.until_said("One moment.")
        await one.client.append(quiet(96) + loud(960))
        await one.client.take_for(0.5)
        await one.output("call_a")
        await one.client.send("response.create")
        await one.nested("response.completed")
        await one.client.append(quiet(640))
        await one.client.until_said("In Lisbon.")
        assert one.client.said() == "One moment. Sure, what time. In Lisbon."


async def test_two_pieces_of_work_do_not_wait_for_each_other() -> None:
    script = [calls("call_a"), calls("call_b"), says("B is red."), says("A is blue.")]
    async with session("parcel a", "and parcel b", script=script) as one:
        ids = []
        for _ in range(2):
            await one.client.speak()
            ids.append((await one.client.until("session.delegation.created"))["delegation"]["id"])
            await one.nested("response.completed")
        assert ids[0] != ids[1]
        await one.output("call_b", "red")
        await one.client.send("response.create")
        assert (await one.nested("response.completed"))[1] == ids[1]
        await one.client.until_said("B is red.")
        await one.output("call_a", {"colour": "blue"})
        await one.client.send("response.create")
        assert (await one.nested("response.completed"))[1] == ids[0]
        await one.client.until_said("A is blue.")
        assert one.llm.requests[-1]["messages"][-1]["content"] == '{"colour":"blue"}'


async def test_a_response_goes_on_with_all_outputs_and_not_before() -> None:
    async with session(WHERE, script=[calls("call_a", "call_b"), says("In Lisbon.")]) as one:
        error = await one.client.failed("response.create")
        assert (error["code"], error["param"]) == ("invalid_value", "type")
        await one.client.speak()
        await one.nested("response.completed")
        assert (await one.client.failed("response.create"))["code"] == "function_call_outputs_required"
        await one.output("call_a")
        assert (await one.client.failed("response.create"))["code"] == "function_call_outputs_required"
        for wrong in ("call_a", "call_c"):
            item = {"type": "function_call_output", "call_id": wrong, "output": "again"}
            error = await one.client.failed("response.item.create", item=item)
            assert (error["code"], error["param"]) == ("invalid_value", "item.call_id")
        await one.output("call_b", "Portugal")
        await one.client.send("response.create")
        await one.client.until_said("In Lisbon.")
        sent = [message["content"] for message in one.llm.requests[-1]["messages"] if message["role"] == "tool"]
        assert sent == ["In Lisbon.", "Portugal"]


async def test_typed_text_begins_a_response_of_no_delegation() -> None:
    async with session(script=[says("It is open.")]) as one:
        for content in ("Is the", [{"type": "input_text", "text": "shop open?"}]):
            item = {"type": "message", "role": "user", "content": content}
            await one.client.send("response.item.create", item=item)
        await one.client.send("response.create")
        assert (await one.nested("response.created"))[1] is None
        await one.client.until_said("It is open.")
        assert one.llm.requests[0]["messages"] == [
            {"role": "system", "content": INSTRUCTIONS},
            {"role": "user", "content": "Is the\nshop open?"},
        ]


@pytest.mark.parametrize(
    ("answer", "status", "told"),
    [
        (refuses(500, {}), "failed", FAILED),
        (streams(delta(content=" "), finish()), "completed", NOTHING),
        (streams(delta(content="It is"), finish("length")), "incomplete", "It is"),
    ],
)
async def test_work_without_a_whole_result_is_told_too(answer: Answer, status: str, told: str) -> None:
    async with session(WHERE, script=[answer]) as one:
        await one.client.speak()
        event, _ = await one.nested(f"response.{status}")
        assert event["response"]["status"] == status
        assert (event["response"]["error"] is not None) == (status == "failed")
        await one.client.until_said(told)
        assert (await one.client.failed("response.create"))["code"] == "invalid_value"


async def test_a_server_that_is_away_fails_the_work_and_is_asked_again() -> None:
    async with session(WHERE, "my parcel now?", script=[says("In Lisbon.")]) as one:
        one.llm.models_answer = refuses(503, {})
        one.llm.health = 503
        await one.client.speak()
        await one.nested("response.failed")
        await one.client.until_said(FAILED)
        one.llm.models_answer, one.llm.health = None, 200
        await one.client.speak()
        await one.client.until_said("In Lisbon.")


async def test_outputs_for_two_responses_come_after_their_chat_has_died(monkeypatch: pytest.MonkeyPatch) -> None:
    script = [calls("call_a"), calls("call_b"), says("A is here."), says("B is here.")]
    async with session("parcel a", "and parcel b", "and parcel c", script=script) as one:
        for _ in range(2):
            await one.client.speak()
            await one.nested("response.completed")
        with monkeypatch.context() as dying:
            dying.setattr(Backend, "generate", dies)
            await one.client.speak()
            await one.nested("response.failed")
        await one.client.until_said(FAILED)
        await one.output("call_a")
        await one.output("call_b")
        await one.client.send("response.create")
        await one.client.until_said("A is here.")
        await one.client.until_said("B is here.")


async def dies(*_: Any) -> None:
    raise EngineFailed("it is gone", fatal=True)


async def test_tools_change_while_the_session_runs() -> None:
    async with session(WHERE, script=[says("In Lisbon.")], instructions="Find parcels.") as one:
        other = {"type": "function", "name": "other"}
        update = {
            "type": "responses",
            "responses": {"tools": [other], "tool_choice": {"type": "function", "name": "other"}},
        }
        await one.client.send("session.update", event_id="u", session={"delegation": update})
        updated = await one.client.until("session.updated")
        assert updated["client_event_id"] == "u"
        shown = updated["session"]["delegation"]["responses"]
        assert (shown["tools"], shown["instructions"], shown["model"]) == ([other], "Find parcels.", "gpt-5.6-luna")
        for wrong, param in (
            ({"tools": [{"type": "web_search"}]}, "session.delegation.responses.tools[0].type"),
            ({"tools": []}, "session.delegation.responses.tool_choice.function.name"),
        ):
            update = {"delegation": {"type": "responses", "responses": wrong}}
            error = await one.client.failed("session.update", session=update)
            assert error["param"] == param
        error = await one.client.failed("session.update", session={"delegation": {"type": "client"}})
        assert error["code"] == "immutable_field_update"
        await one.client.speak()
        await one.client.until_said("In Lisbon.")
        assert [tool["function"]["name"] for tool in one.llm.requests[0]["tools"]] == ["other"]
        await one.client.send(
            "session.update", session={"delegation": {"type": "responses", "responses": {"tool_choice": "none"}}}
        )
        await one.client.until("session.updated")


async def test_tools_that_are_not_offered_are_refused_at_the_start() -> None:
    async with live_server(Talker()) as server, live_client(inline(server)) as client:
        responses = {"model": "gpt-5.6", "tools": [{"type": "web_search"}]}
        start = {"model": "gpt-live-1", "delegation": {"type": "responses", "responses": responses}}
        await client.send("session.start", session=start)
        error = (await client.until("error"))["error"]
        assert (error["code"], error["param"]) == (
            "unsupported_parameter",
            "session.delegation.responses.tools[0].type",
        )


async def test_context_about_a_delegation_is_refused() -> None:
    async with session(WHERE, script=[calls("call_a")]) as one:
        await one.client.speak()
        delegation = (await one.client.until("session.delegation.created"))["delegation"]["id"]
        error = await one.client.failed("session.commentary.append", delegation_id=delegation, content="x")
        assert error["message"] == "Unknown client delegation."


async def test_so_many_items_wait_and_no_more() -> None:
    async with session(script=[says("Fine.")]) as one:
        item = {"type": "message", "role": "user", "content": "x"}
        for _ in range(MAX_BUFFERED_ITEMS):
            await one.client.send("response.item.create", item=item)
        assert (await one.client.failed("response.item.create", item=item))["code"] == "response_input_buffer_full"
        await one.client.send("response.create")
        await one.client.until_said("Fine.")
        await one.client.send("response.item.create", item=item)
        await one.client.take_for(1)
        assert len(one.client.seen("error")) == 1


@pytest.mark.parametrize("beyond", [0, 1])
async def test_so_many_bytes_wait_and_no_more(beyond: int) -> None:
    async with session(script=[says("Fine.")]) as one:
        item = {"type": "message", "role": "user", "content": ""}
        item["content"] = "x" * (MAX_BUFFERED_BYTES - len(orjson.dumps(item)) + beyond)
        await one.client.send("response.item.create", event_id="i", item=item)
        await one.client.take_for(1)
        codes = [error["error"]["code"] for error in one.client.seen("error")]
        assert codes == ["response_input_buffer_full"] * beyond


@pytest.mark.parametrize(
    "item",
    [
        {"type": "message", "role": "assistant", "content": "x"},
        {"type": "message", "role": "user", "content": [{"type": "input_audio", "audio": "AAAA"}]},
        {"type": "reasoning", "summary": []},
    ],
)
async def test_other_items_are_refused_by_name(item: dict[str, Any]) -> None:
    async with session(script=[says("Fine.")]) as one:
        assert (await one.client.failed("response.item.create", item=item))["param"].startswith("item")


async def test_the_session_ends_while_work_is_done() -> None:
    async with session(WHERE, script=[hang]) as one:
        await one.client.speak()
        await one.nested("response.created")
        while not one.llm.requests:
            await one.client.take()
        await one.client.end()
        await one.llm.deserted.wait()


async def test_the_same_model_does_the_work_without_a_backend() -> None:
    def reply(said: str) -> Iterable[Any]:
        return spoken("In Lisbon.") if "The task: find it" in said else replying_once(said)

    def replying_once(said: str) -> Iterable[Any]:
        if said.startswith("[This is not"):
            return spoken(said.rpartition("]\n")[2])
        return delegates("One moment.")

    engine = Talker(WHERE, reply=reply)
    async with live_server(engine) as server, live_client(inline(server)) as client:
        settings = {"model": "gpt-5.6", "tools": [TOOL]}
        await client.start(instructions="Be kind.", delegation={"type": "responses", "responses": settings})
        one = Session(client, ScriptedUpstream(), engine, server)
        await one.client.speak()
        await one.nested("response.completed")
        await one.client.until_said("In Lisbon.")
        work = engine.requests[1]
    assert (work.instructions, work.history) == (INSTRUCTIONS, ())
    assert [tool["function"]["name"] for tool in work.tools] == ["find_parcel"]
    assert [tool["function"]["name"] for tool in engine.requests[0].tools] == ["delegate"]

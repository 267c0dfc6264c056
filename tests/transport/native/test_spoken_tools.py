"""Tools in a spoken conversation: what an interruption leaves of a call, and what a model is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.live_server import live_server
from support.native_client import Answer, NativeClient, native_client
from support.scripted_engines import ReadingEngine, ToolCallingEngine

from omni_ws.config.parts import SPOKEN_INSTRUCTIONS, LlmConfig
from omni_ws.core.chunks import InputChunk, ToolCall
from omni_ws.core.history import Message
from omni_ws.engine.base import GenerationRequest
from omni_ws.engine.composed.engine import ComposedEngine
from omni_ws.errors import EngineOverloaded

CALL = ToolCall("call_1", "local_time", '{"city":"Paris"}')


@asynccontextmanager
async def conversation(llm: ToolCallingEngine, **fields: Any) -> AsyncIterator[NativeClient]:
    engine = ComposedEngine(llm, tts=ReadingEngine())
    async with live_server(engine) as server, native_client(server) as client:
        await client.configure(modalities=["text", "audio"], tool_filler=False, **fields)
        yield client


async def tell(client: NativeClient, result: str, *, of: str = "call_1") -> Answer:
    await client.chunk(result, end=True, role="tool", tool_call_id=of)
    return await client.answer()


def called(answer: Answer) -> str:
    pieces = [chunk for chunk in answer.chunks if chunk["modality"] == "tool_call"]
    return "".join(chunk.get("arguments", "") for chunk in pieces)


async def test_a_call_is_answered_over_the_same_socket() -> None:
    llm = ToolCallingEngine()
    async with conversation(llm) as client:
        await client.say("What time is it in Paris?")
        answer = await client.answer()
        assert (answer.reason, answer.text, called(answer)) == ("tool_calls", "", '{"city":"Paris"}')
        assert not [chunk for chunk in answer.chunks if chunk["modality"] == "audio"]
        assert (await tell(client, "3:05 PM")).text == "It is 3:05 PM."
        assert llm.requests[-1].history[-1].tool_calls == (CALL,)


async def test_whoever_speaks_before_the_result_is_answered_and_the_result_may_still_come() -> None:
    llm = ToolCallingEngine()
    async with conversation(llm, overlap="interrupt") as client:
        await client.say("What time is it in Paris?")
        assert (await client.answer()).reason == "tool_calls"
        await client.say("And in Rome?")
        assert (await client.answer()).reason == "tool_calls"
        assert (await tell(client, "3:05 PM", of="call_1")).text == "It is 3:05 PM."
        calls = [call.id for message in llm.requests[-1].history for call in message.tool_calls]
        assert calls == ["call_2", "call_1"]  # right before its result


async def test_a_result_whose_request_has_failed_may_come_again() -> None:
    class FullAtFirst(ToolCallingEngine):
        def steps(self, request: GenerationRequest, taken: list[InputChunk]) -> Iterable[Any]:
            if len(self.requests) == 2:
                return [EngineOverloaded("the model is busy", retry_after_ms=1000)]
            return super().steps(request, taken)

    async with conversation(FullAtFirst()) as client:
        await client.say("What time is it in Paris?")
        await client.answer()
        assert [error["code"] for error in (await tell(client, "3:05 PM")).errors] == ["engine_overloaded"]
        assert (await tell(client, "3:05 PM")).text == "It is 3:05 PM."
        await client.chunk("4:05 PM", end=True, role="tool", tool_call_id="call_1")  # a duplicate
        await client.say("And in Rome?")
        assert (await client.answer()).reason == "tool_calls"


@pytest.mark.parametrize("by", ["cancel", "request"])
async def test_a_call_that_was_cut_off_leaves_no_trace(by: str) -> None:
    llm = ToolCallingEngine()
    llm.gate = asyncio.Event()
    async with conversation(llm, overlap="interrupt") as client:
        await client.say("What time is it in Paris?")
        while (await client.until("output_chunk")).get("arguments") != '{"city":':
            pass
        if by == "cancel":
            await client.send("cancel")
        llm.gate = None
        await client.say("Never mind.")
        assert (await client.answer()).reason == "cancelled"
        await client.answer()
        assert not [call for message in llm.requests[-1].history for call in message.tool_calls]


async def test_a_result_that_comes_while_the_user_writes_belongs_to_that() -> None:
    llm = ToolCallingEngine()
    async with conversation(llm) as client:
        await client.say("What time is it in Paris?")
        await client.answer()
        await client.chunk("Well, ")
        await client.chunk("3:05 PM", role="tool", tool_call_id="call_1")
        await client.chunk("is it late?", end=True)
        assert (await client.answer()).text == "It is 3:05 PM."
        await client.say("Thanks.")
        await client.answer()
        assert Message("tool", "3:05 PM", tool_call_id="call_1") in llm.requests[-1].history
        assert Message("user", "Well, is it late?") in llm.requests[-1].history


# what a model is told where it is heard

LLM: dict[str, Any] = {"use": "rules"}
AUTO: dict[str, Any] = {"use": "auto"}
TOOLS = [{"type": "function", "function": {"name": "local_time"}}]


@pytest.mark.parametrize(
    ("llm", "fields", "expected"),
    [
        (LLM, {}, SPOKEN_INSTRUCTIONS),
        ({}, {}, ""),
        ({**LLM, "instructions": "Be brief."}, {}, "Be brief."),
        ({**LLM, "instructions": ""}, {}, ""),
        (LLM, {"instructions": ""}, ""),
        (LLM, {"instructions": "Rhyme."}, "Rhyme."),
        (LLM, {"instructions": None}, SPOKEN_INSTRUCTIONS),
        (LLM, {"modalities": ["text"]}, ""),
        (LLM, {"modalities": ["audio"]}, SPOKEN_INSTRUCTIONS),
        (LLM, {"task": "speech"}, ""),
        (LLM, {"tools": TOOLS}, SPOKEN_INSTRUCTIONS),
        (AUTO, {}, LlmConfig(**AUTO).spoken_instructions),
        (AUTO, {"tools": TOOLS}, LlmConfig(**AUTO).spoken_instructions_with_tools),
        ({}, {"tools": TOOLS}, ""),
    ],
)
async def test_instructions_for_spoken_answers(llm: dict[str, Any], fields: dict[str, Any], expected: str) -> None:
    engine = ToolCallingEngine()
    async with live_server(ComposedEngine(engine, tts=ReadingEngine())) as server:
        sessions = server.app.sessions
        sessions.config = sessions.config.model_copy(update={"llm": LlmConfig(**llm)})
        async with native_client(server) as client:
            assert (await client.configure(**fields))["instructions"] == expected
            if "task" not in fields:
                await client.say("Hello")
                await client.answer()
                assert engine.requests[-1].instructions == expected

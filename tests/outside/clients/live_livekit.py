"""LiveKit's plug-in for OpenAI over ``/v1/live/sessions``, its delegation as LIVE_DELEGATION says. See live_call.py.

``responses``, its default, runs a tool of the application for a model of the server; with ``client`` the application
answers by itself.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import aiohttp
from live_call import BASE_URL, GREET, INSTRUCTIONS, RATE, RESULT, Call
from livekit import rtc
from livekit.agents import llm
from livekit.plugins.openai.realtime import GPTLiveModel

DELEGATION: Any = os.environ["LIVE_DELEGATION"]


@llm.function_tool
async def find_parcel() -> str:
    """Where the caller's parcel is."""
    return RESULT


class LiveKitCall(Call):
    """A call over a duplex session, with what the framework does for a tool."""

    def __init__(self, session: Any) -> None:
        super().__init__()
        self.session = session
        self.work: list[asyncio.Task[None]] = []
        self.failures: list[Any] = []
        session.on("openai_server_event_received", self.received)
        session.on("delegation_created", lambda one: self.work.append(asyncio.create_task(self.answer_delegation(one))))
        session.on("function_call", lambda one: self.work.append(asyncio.create_task(self.answer_call(one))))
        session.on("error", self.failures.append)

    async def append(self, audio: bytes) -> None:
        self.session.push_audio(rtc.AudioFrame(audio, RATE, 1, len(audio) // 2))

    async def greet(self) -> None:
        self.session._generate_reply(instructions=GREET)

    async def mute(self, muted: bool) -> None:
        (self.session.mute_input if muted else self.session.unmute_input)()

    async def close(self) -> None:
        await self.session.aclose()

    async def answer_delegation(self, delegation: Any) -> None:
        await self.do_work()
        self.session.append_commentary(RESULT, delegation_id=delegation.id)

    async def answer_call(self, call: llm.FunctionCall) -> None:
        await self.do_work()
        output = llm.FunctionCallOutput(
            call_id=call.call_id, name=call.name, output=await find_parcel(), is_error=False
        )
        await self.session._append_items([output])


async def main() -> None:
    async with aiohttp.ClientSession() as http:
        model = GPTLiveModel(base_url=BASE_URL, api_key="not-needed", delegation=DELEGATION, http_session=http)
        session = model.session()
        call = LiveKitCall(session)
        tools = [find_parcel] if DELEGATION == "responses" else []
        await session._update_session(instructions=INSTRUCTIONS, tools=tools)
        await call.talk()
        assert not call.failures, call.failures


asyncio.run(main())

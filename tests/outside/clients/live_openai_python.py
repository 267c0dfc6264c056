"""The openai package of Python over ``/v1/live/sessions``. See live_call.py."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import openai
from live_call import BASE_URL, GREET, INSTRUCTIONS, RESULT, Call


class OpenAICall(Call):
    """A call over ``client.live``, whose application answers delegations by itself."""

    def __init__(self, connection: Any) -> None:
        super().__init__()
        self.connection = connection
        self.work: list[asyncio.Task[None]] = []

    async def append(self, audio: bytes) -> None:
        await self.connection.session.input_audio.append(audio=base64.b64encode(audio).decode())

    async def greet(self) -> None:
        await self.connection.session.commentary.append(content=GREET, delegation_id=None, event_id="greet")

    async def mute(self, muted: bool) -> None:
        resource = self.connection.session.input_audio
        await (resource.mute(event_id="mute") if muted else resource.unmute(event_id="unmute"))

    async def close(self) -> None:
        await self.connection.session.close(event_id="close")

    async def read(self) -> None:
        async for event in self.connection:
            self.received(event.model_dump(mode="json", exclude_unset=True))
            if event.type == "session.delegation.created":
                self.work.append(asyncio.create_task(self.answer_delegation(event.delegation.id)))

    async def answer_delegation(self, delegation: str) -> None:
        await self.connection.session.thinking.append(
            content="It is being looked up.", delegation_id=delegation, event_id="thinking"
        )
        await self.do_work()
        await self.connection.session.commentary.append(content=RESULT, delegation_id=delegation, event_id="result")


async def main() -> None:
    client = openai.AsyncOpenAI(base_url=BASE_URL, api_key="not-needed", max_retries=0)
    async with client, client.live.connect() as connection:
        call = OpenAICall(connection)
        reading = asyncio.create_task(call.read())
        await connection.session.start(
            event_id="start",
            session={"model": "gpt-live-1", "instructions": INSTRUCTIONS, "audio": {"output": {"voice": "marin"}}},
        )
        await call.talk()
        await reading  # the server closes


asyncio.run(main())

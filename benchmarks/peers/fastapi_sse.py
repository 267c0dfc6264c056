"""The usual way to stream a chat completion: FastAPI, a StreamingResponse, a pydantic object for each chunk."""

from __future__ import annotations

import argparse
import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from typing import Literal

import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

app = FastAPI()
options = argparse.Namespace(interval_ms=0, first_ms=0, stamp=False)


class Message(BaseModel):
    role: str
    content: str


class ChatRequest(BaseModel):
    model: str | None = None
    messages: list[Message]
    stream: bool = False


class Delta(BaseModel):
    role: str | None = None
    content: str | None = None


class Choice(BaseModel):
    index: int = 0
    delta: Delta
    finish_reason: str | None = None


class ChatChunk(BaseModel):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[Choice]


async def tokens(text: str) -> AsyncIterator[str]:
    """Yields the words of the prompt, like an engine."""
    for number, word in enumerate(text.split()):
        await asyncio.sleep((options.interval_ms if number else options.first_ms) / 1000)
        yield f"@{time.monotonic_ns()}" if options.stamp and not number else f"{word} "


async def events(request: ChatRequest) -> AsyncIterator[str]:
    completion_id, created = f"chatcmpl-{uuid.uuid4().hex}", int(time.time())
    model = request.model or "peer"

    def event(delta: Delta, finish_reason: str | None = None) -> str:
        choice = Choice(index=0, delta=delta, finish_reason=finish_reason)
        chunk = ChatChunk(
            id=completion_id, object="chat.completion.chunk", created=created, model=model, choices=[choice]
        )
        return f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n"

    started = False
    async for token in tokens(request.messages[-1].content):
        if not started:
            started = True
            yield event(Delta(role="assistant"))
        yield event(Delta(content=token))
    yield event(Delta(), "stop")
    yield "data: [DONE]\n\n"


@app.post("/v1/chat/completions")
async def chat_completions(request: ChatRequest) -> StreamingResponse:
    return StreamingResponse(events(request), media_type="text/event-stream")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--interval-ms", type=int, required=True)
    parser.add_argument("--first-ms", type=int, required=True)
    parser.add_argument("--stamp", action="store_true", help="the first token carries the time of its creation")
    options = parser.parse_args()
    uvicorn.run(app, host="127.0.0.1", port=options.port, log_level="warning", loop="uvloop")

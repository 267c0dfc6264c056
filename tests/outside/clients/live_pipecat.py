"""Pipecat's service for OpenAI over ``/v1/live/sessions``, a model of its own behind the delegation. See live_call.py.

That model is at LIVE_BACKEND, and is asked once the work is done.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from live_call import BASE_URL, GREET, INSTRUCTIONS, RATE, Call
from loguru import logger
from pipecat.frames.frames import EndFrame, ErrorFrame, Frame, InputAudioRawFrame, LLMRunFrame
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.openai.live import llm as live
from pipecat.services.openai.llm import OpenAILLMService
from pipecat.workers.llm.backend_llm_worker import BackendLLMWorker
from pipecat.workers.runner import WorkerRunner


class Loudspeaker(FrameProcessor):
    """Where the frames end up."""

    def __init__(self) -> None:
        super().__init__()
        self.failures: list[str] = []

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if isinstance(frame, ErrorFrame):
            self.failures.append(str(frame))
        await self.push_frame(frame, direction)


class PipecatCall(Call):
    """A call of a pipeline. It has no way to mute: pipelines leave audio out."""

    can_mute = False

    def __init__(self, worker: PipelineWorker) -> None:
        super().__init__()
        self.worker = worker

    async def append(self, audio: bytes) -> None:
        await self.worker.queue_frame(InputAudioRawFrame(audio=audio, sample_rate=RATE, num_channels=1))

    async def greet(self) -> None:
        pass  # the last message of its context asks for it

    async def close(self) -> None:
        await self.worker.queue_frame(EndFrame())


class Backend(OpenAILLMService):
    """The model behind the delegation."""

    call: Call

    async def get_chat_completions(self, context: Any) -> Any:
        await self.call.do_work()
        return await super().get_chat_completions(context)


def watch(call: Call) -> None:
    """Have the call see each event as it came, before pipecat reads it."""
    parse = live.events.parse_server_event

    def seen(message: str | bytes) -> Any:
        call.received(json.loads(message))
        event = parse(message)
        assert not isinstance(event, live.events.UnknownServerEvent), message
        return event

    live.events.parse_server_event = seen


async def main() -> None:
    logger.remove()
    logger.add(sys.stderr, level="WARNING")
    backend = Backend(api_key="not-needed", base_url=os.environ["LIVE_BACKEND"])
    service = live.OpenAILiveLLMService(
        api_key="not-needed",
        base_url=BASE_URL.replace("http", "ws", 1) + "/live/sessions",
        settings=live.OpenAILiveLLMService.Settings(system_instruction=INSTRUCTIONS),
        delegation=live.OpenAILiveLLMService.ClientDelegation(backend=BackendLLMWorker(llm=backend)),
    )
    user, assistant = LLMContextAggregatorPair(LLMContext([{"role": "developer", "content": GREET}]))
    loudspeaker = Loudspeaker()
    worker = PipelineWorker(Pipeline([user, service, loudspeaker, assistant]))
    call = backend.call = PipecatCall(worker)
    watch(call)
    runner = WorkerRunner(handle_sigint=False)
    running = asyncio.create_task(runner.run(auto_end=False))
    await runner.add_workers(worker)
    await worker.queue_frames([LLMRunFrame()])
    await call.talk()
    await runner.cancel()
    await running
    assert not loudspeaker.failures, loudspeaker.failures


asyncio.run(main())

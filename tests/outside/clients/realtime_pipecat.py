"""Pipecat's service for OpenAI over ``/v1/realtime``. Arguments and output are those of realtime_openai_python.py.

Its pipelines begin with an answer to what their context holds, before anybody speaks.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from loguru import logger
from pipecat.frames.frames import (
    ErrorFrame,
    Frame,
    InputAudioRawFrame,
    InterruptionFrame,
    LLMFullResponseEndFrame,
    LLMRunFrame,
    TTSAudioRawFrame,
    TTSTextFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.llm_service import FunctionCallParams
from pipecat.services.openai.realtime.events import (
    AudioConfiguration,
    AudioInput,
    InputAudioTranscription,
    SemanticTurnDetection,
    SessionProperties,
)
from pipecat.services.openai.realtime.llm import OpenAIRealtimeLLMService
from pipecat.workers.runner import WorkerRunner

ANSWERING, CALLING, *FILES = sys.argv[1:]
FIRST, SECOND = (Path(file).read_bytes() for file in FILES[:2])
FOLDER = Path(FILES[2])
RATE = 24_000
PIECE = 4800
ASKED: list[str] = []


async def get_weather(params: FunctionCallParams, city: str) -> None:
    """The weather in a city.

    Args:
        city: Its name.
    """
    ASKED.append(city)
    await params.result_callback("sunny")


class Loudspeaker(FrameProcessor):
    """Where the frames of the answers end up."""

    def __init__(self) -> None:
        super().__init__()
        self.frames: asyncio.Queue[Frame] = asyncio.Queue()

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        self.frames.put_nowait(frame)
        await self.push_frame(frame, direction)

    async def answer(self) -> tuple[str, bytes]:
        """Text and audio up to the end of an answer."""
        text, audio = "", bytearray()
        while True:
            match await self.frames.get():
                case ErrorFrame() as error:
                    raise AssertionError(error)
                case TTSTextFrame(text=piece):
                    text += piece
                case TTSAudioRawFrame(audio=piece):
                    audio += piece
                case LLMFullResponseEndFrame() if audio:
                    return text, bytes(audio)

    async def until(self, kind: type[Frame]) -> None:
        while not isinstance(await self.frames.get(), kind):
            pass


class Conversation:
    """A pipeline, and what it heard."""

    def __init__(self, url: str, tools: list[Any]) -> None:
        audio = AudioInput(transcription=InputAudioTranscription(), turn_detection=SemanticTurnDetection())
        service = OpenAIRealtimeLLMService(
            api_key="not-needed",
            base_url=url.replace("http", "ws", 1) + "/realtime",
            settings=OpenAIRealtimeLLMService.Settings(
                system_instruction="Be brief.",
                session_properties=SessionProperties(audio=AudioConfiguration(input=audio)),
            ),
        )
        context = LLMContext([{"role": "user", "content": "Hello!"}], tools)
        self.user, self.assistant = LLMContextAggregatorPair(context)
        self.loudspeaker = Loudspeaker()
        self.heard: asyncio.Queue[str] = asyncio.Queue()
        self.worker = PipelineWorker(Pipeline([self.user, service, self.loudspeaker, self.assistant]))

        @self.user.event_handler("on_user_turn_message_added")
        async def on_message(_: Any, message: Any) -> None:
            self.heard.put_nowait(message.content)

    async def begin(self, runner: WorkerRunner) -> None:
        await runner.add_workers(self.worker)
        await self.worker.queue_frames([LLMRunFrame()])
        await self.loudspeaker.answer()

    async def speak(self, audio: bytes) -> None:
        pieces = [audio[start : start + PIECE] for start in range(0, len(audio), PIECE)]
        await self.worker.queue_frames(
            [InputAudioRawFrame(audio=piece, sample_rate=RATE, num_channels=1) for piece in pieces]
        )


async def turn(runner: WorkerRunner) -> dict[str, Any]:
    conversation = Conversation(ANSWERING, [])
    await conversation.begin(runner)
    await conversation.speak(FIRST)
    said, audio = await conversation.loudspeaker.answer()
    heard = await conversation.heard.get()
    (FOLDER / "turn.pcm").write_bytes(audio)
    return {"heard": heard, "said": said}


async def call(runner: WorkerRunner) -> dict[str, Any]:
    conversation = Conversation(CALLING, [get_weather])
    await conversation.begin(runner)
    await conversation.speak(FIRST)
    await conversation.loudspeaker.until(TTSAudioRawFrame)
    await conversation.speak(SECOND)
    await conversation.loudspeaker.until(InterruptionFrame)
    while not ASKED:
        await conversation.loudspeaker.until(Frame)
    told, audio = await conversation.loudspeaker.answer()
    (FOLDER / "told.pcm").write_bytes(audio)
    return {"interrupted": True, "asked": {"city": ASKED[0]}, "told": told}


async def main() -> None:
    logger.remove()
    logger.add(sys.stderr, level="INFO")
    runner = WorkerRunner(handle_sigint=False)
    running = asyncio.create_task(runner.run(auto_end=False))
    result = {**await turn(runner), **await call(runner)}
    await runner.cancel()
    await running
    print(json.dumps(result))


asyncio.run(main())

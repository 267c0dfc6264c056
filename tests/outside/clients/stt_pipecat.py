"""Pipecat's service for transcription by OpenAI over ``/v1/realtime``. Arguments and output as of stt_livekit.py.

With ``client`` the pipeline tells where each recording ends, as a detector in it would.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from loguru import logger
from pipecat.frames.frames import (
    ErrorFrame,
    Frame,
    InputAudioRawFrame,
    InterimTranscriptionFrame,
    TranscriptionFrame,
    VADUserStoppedSpeakingFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.openai.stt import OpenAIRealtimeSTTService
from pipecat.workers.runner import WorkerRunner

URL, WHO, *FILES = sys.argv[1:]
RECORDINGS = [Path(file).read_bytes() for file in FILES]
RATE = 24_000
PIECE = 4800
SILENCE_MS = 1000


class Texts(FrameProcessor):
    """Where the texts end up."""

    def __init__(self) -> None:
        super().__init__()
        self.frames: asyncio.Queue[Frame] = asyncio.Queue()

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        self.frames.put_nowait(frame)
        await self.push_frame(frame, direction)

    async def final(self) -> tuple[str, int]:
        interims = 0
        while True:
            match await self.frames.get():
                case ErrorFrame() as error:
                    raise AssertionError(error)
                case InterimTranscriptionFrame():
                    interims += 1
                case TranscriptionFrame(text=text):
                    return text, interims


async def main() -> None:
    logger.remove()
    logger.add(sys.stderr, level="INFO")
    detection = {"type": "server_vad", "silence_duration_ms": SILENCE_MS} if WHO == "server" else False
    service = OpenAIRealtimeSTTService(
        api_key="not-needed",
        base_url=URL.replace("http", "ws", 1) + "/realtime",
        turn_detection=detection,
        settings=OpenAIRealtimeSTTService.Settings(
            model="gpt-transcribe" if WHO == "server" else "gpt-realtime-whisper"
        ),
    )
    texts = Texts()
    worker = PipelineWorker(Pipeline([service, texts]), params=PipelineParams(audio_in_sample_rate=RATE))
    runner = WorkerRunner(handle_sigint=False)
    running = asyncio.create_task(runner.run(auto_end=False))
    await runner.add_workers(worker)
    while not service._session_ready:  # noqa: ASYNC110 it tells nobody, and what is said before that is lost
        await asyncio.sleep(0.01)
    results = []
    for audio in RECORDINGS:
        pieces = [audio[start : start + PIECE] for start in range(0, len(audio), PIECE)]
        await worker.queue_frames(
            [InputAudioRawFrame(audio=piece, sample_rate=RATE, num_channels=1) for piece in pieces]
        )
        if WHO == "client":
            await worker.queue_frames([VADUserStoppedSpeakingFrame()])
        results.append(await texts.final())
    await runner.cancel()
    await running
    print(json.dumps({"texts": [text for text, _ in results], "interims": [count for _, count in results]}))


asyncio.run(main())

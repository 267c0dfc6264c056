"""A voice server on Pipecat, as its examples build one: FastAPI, a pipeline per connection, its serializer of protobuf.

Speech recognition, answers and voice come from servers with OpenAI's API (``--speech``, ``--model``), by Pipecat's own
services.
``--turns judged`` ends turns as Pipecat recommends, by its Smart Turn; ``silence`` by half a second of silence.
"""

from __future__ import annotations

import argparse

import uvicorn
from fastapi import FastAPI, WebSocket
from loguru import logger
from pipecat.audio.vad.silero import SileroVADAnalyzer
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import (
    LLMContextAggregatorPair,
    LLMUserAggregatorParams,
)
from pipecat.serializers.protobuf import ProtobufFrameSerializer
from pipecat.services.openai.llm import OpenAILLMService
from pipecat.services.openai.stt import OpenAISTTService
from pipecat.services.openai.tts import OpenAITTSService
from pipecat.transports.websocket.fastapi import FastAPIWebsocketParams, FastAPIWebsocketTransport
from pipecat.turns.user_stop import SpeechTimeoutUserTurnStopStrategy
from pipecat.turns.user_turn_strategies import UserTurnStrategies
from pipecat.workers.runner import WorkerRunner

#: With the 0.2 s of silence that the detector of speech waits for as recommended: half a second.
PAUSE_SEC = 0.3
RATE_IN, RATE_OUT = 16_000, 24_000

app = FastAPI()
options = argparse.Namespace()


def turns() -> UserTurnStrategies:
    if options.turns == "judged":
        return UserTurnStrategies()
    return UserTurnStrategies(stop=[SpeechTimeoutUserTurnStopStrategy(user_speech_timeout=PAUSE_SEC)])


@app.websocket("/")
async def converse(websocket: WebSocket) -> None:
    await websocket.accept()
    transport = FastAPIWebsocketTransport(
        websocket,
        FastAPIWebsocketParams(audio_in_enabled=True, audio_out_enabled=True, serializer=ProtobufFrameSerializer()),
    )
    speech = {"api_key": "not-needed", "base_url": options.speech}
    recogniser = OpenAISTTService(**speech, settings=OpenAISTTService.Settings(model="whisper-1"))
    settings = OpenAILLMService.Settings(model="fake")
    model = OpenAILLMService(api_key="not-needed", base_url=options.model, settings=settings)
    voice = OpenAITTSService(**speech, settings=OpenAITTSService.Settings(model="tts-1", voice="alloy"))
    user, assistant = LLMContextAggregatorPair(
        LLMContext(),
        user_params=LLMUserAggregatorParams(vad_analyzer=SileroVADAnalyzer(), user_turn_strategies=turns()),
    )
    pipeline = Pipeline([transport.input(), recogniser, user, model, voice, transport.output(), assistant])
    rates = PipelineParams(audio_in_sample_rate=RATE_IN, audio_out_sample_rate=RATE_OUT)
    worker = PipelineWorker(pipeline, params=rates)

    @transport.event_handler("on_client_disconnected")
    async def on_client_disconnected(*_: object) -> None:
        await worker.cancel()

    runner = WorkerRunner(handle_sigint=False)
    await runner.add_workers(worker)
    await runner.run()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--speech", required=True, help="the base URL of the server that hears and speaks")
    parser.add_argument("--model", required=True, help="the base URL of the server that answers")
    parser.add_argument("--turns", choices=("silence", "judged"), default="silence")
    parser.parse_args(namespace=options)
    logger.remove()
    uvicorn.run(app, host="127.0.0.1", port=options.port, log_level="warning")

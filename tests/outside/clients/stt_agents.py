"""The speech recognition of OpenAI's Agents SDK over ``/v1/realtime``. Arguments and output as of stt_livekit.py.

It sends a recording as fast as it can, and its end right after. With ``client`` the server is to detect no turns.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import numpy as np
from agents import set_tracing_disabled
from agents.voice import StreamedAudioInput, STTModelSettings
from agents.voice.models.openai_stt import OpenAISTTModel
from openai import AsyncOpenAI

URL, WHO, *FILES = sys.argv[1:]
RECORDINGS = [Path(file).read_bytes() for file in FILES]
PIECE = 2400


async def heard(model: OpenAISTTModel, audio: np.ndarray) -> str:
    """All texts of one recording."""
    source = StreamedAudioInput()
    for start in range(0, len(audio), PIECE):
        await source.add_audio(audio[start : start + PIECE])
    await source.add_audio(None)
    session = await model.create_session(source, STTModelSettings(language="en"), False, False)
    return " ".join([text async for text in session.transcribe_turns()])


async def main() -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=URL, websocket_base_url=URL.replace("http", "ws", 1), api_key="not-needed")
    model = OpenAISTTModel("gpt-transcribe" if WHO == "server" else "gpt-live-transcribe", client)
    texts = [await heard(model, np.frombuffer(audio, "<i2")) for audio in RECORDINGS]
    print(json.dumps({"texts": texts, "interims": [0 for _ in texts]}))


asyncio.run(main())

"""LiveKit's speech recognition by OpenAI over ``/v1/realtime``.

Arguments: the base URL, ``server`` or ``client`` (who detects the turns), and files of 24 kHz, pcm16. Writes what was
heard of each file, and how many interim texts came, as JSON. ``client`` is the plug-in's own detector, in real time.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from livekit import rtc
from livekit.agents import inference, stt
from livekit.agents.utils import http_context
from livekit.plugins import openai

URL, WHO, *FILES = sys.argv[1:]
RECORDINGS = [Path(file).read_bytes() for file in FILES]
RATE = 24_000
PIECE = 4800
#: Longer than any pause in the recordings, so that each is one turn.
SILENCE_MS = 1000


def recogniser() -> openai.STT:
    if WHO == "client":
        detector = inference.VAD(model="silero", min_silence_duration=SILENCE_MS / 1000)
        return openai.STT(model="gpt-live-transcribe", base_url=URL, api_key="not-needed", vad=detector)
    return openai.STT(
        model="gpt-4o-mini-transcribe",
        base_url=URL,
        api_key="not-needed",
        use_realtime=True,
        turn_detection={"type": "server_vad", "silence_duration_ms": SILENCE_MS},
    )


async def speak(stream: stt.SpeechStream, audio: bytes) -> None:
    for start in range(0, len(audio), PIECE):
        piece = audio[start : start + PIECE]
        stream.push_frame(rtc.AudioFrame(piece, RATE, 1, len(piece) // 2))
        if WHO == "client":
            await asyncio.sleep(len(piece) / 2 / RATE)


async def heard(model: openai.STT, audio: bytes) -> tuple[str, int]:
    """The final text of one recording, and the number of interim ones."""
    interims = 0
    async with model.stream() as stream:
        speaking = asyncio.create_task(speak(stream, audio))
        async for event in stream:
            if event.type is stt.SpeechEventType.INTERIM_TRANSCRIPT:
                interims += 1
            elif event.type is stt.SpeechEventType.FINAL_TRANSCRIPT:
                await speaking
                return event.alternatives[0].text, interims
    raise AssertionError("the stream ended without a text")


async def main() -> None:
    async with http_context.open():
        model = recogniser()
        results = [await heard(model, audio) for audio in RECORDINGS]
        await model.aclose()
    print(json.dumps({"texts": [text for text, _ in results], "interims": [count for _, count in results]}))


asyncio.run(main())

"""The handler of Hugging Face's speech-to-speech for transcription sessions. Arguments and output as of stt_livekit.py.

The handler alone, without the pipeline around it, which would need PyTorch: the pipeline tells it where turns end.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from queue import Queue
from threading import Event

import numpy as np
import soxr
from speech_to_speech.pipeline.messages import Transcription, VADAudio
from speech_to_speech.STT.streaming_handler import PIPELINE_SAMPLE_RATE, OpenAIRealtimeSTTHandler

URL, _, *FILES = sys.argv[1:]
RATE = 24_000
PIECE = 512


handler = OpenAIRealtimeSTTHandler(
    Event(),
    Queue(),
    Queue(),
    setup_kwargs={
        "base_url": URL,
        "model": "gpt-live-transcribe",
        "audio_sample_rate": RATE,
        "connect_timeout": 60.0,
        "final_timeout": 60.0,
        "language": "en",
    },
)
texts = []
for number, file in enumerate(FILES):
    audio = soxr.resample(np.frombuffer(Path(file).read_bytes(), "<i2"), RATE, PIPELINE_SAMPLE_RATE)
    turn = f"turn-{number}"
    handler.start_turn(turn, 0)
    for start in range(0, len(audio), PIECE):
        handler.append_audio(audio[start : start + PIECE].tobytes())
    (heard,) = handler.process(VADAudio(audio=audio, mode="final", turn_id=turn, turn_revision=0))
    assert isinstance(heard, Transcription), heard
    texts.append(heard.text)

handler.cleanup()
print(json.dumps({"texts": texts, "interims": [0 for _ in texts]}))

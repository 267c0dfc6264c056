"""The pipe between a server and the worker of a voice: its frames, and the worker's end with its server."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from omni_ws.config.model import VoiceChoice
from omni_ws.engine.tts.synthesis_engine import WORKER_MODULE
from omni_ws.engine.tts.synthesiser import (
    HEAD,
    MAX_PAYLOAD,
    BrokenPipeFrame,
    FrameKind,
    decode_head,
    decode_object,
    encode_frame,
    encode_object,
)


def test_the_worker_ends_with_its_server(voice_choice: VoiceChoice) -> None:
    worker = subprocess.Popen(
        [sys.executable, "-m", WORKER_MODULE, voice_choice.value], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert worker.stdin is not None
    assert worker.stdout is not None
    length, kind, _ = decode_head(worker.stdout.read(HEAD.size))
    ready = decode_object(worker.stdout.read(length))
    assert kind is FrameKind.READY
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        worker.send_signal(number)
    text = {
        "voice": ready["voices"][0],
        "speed": 1.0,
        "text": "This is a long sentence for somebody who has left. " * 50,
    }
    worker.stdin.write(encode_object(FrameKind.SPEAK, 1, text))
    worker.stdin.close()
    worker.stdout.close()
    assert worker.wait(10) == 0


def test_frames_that_are_none_are_noticed() -> None:
    assert decode_head(encode_frame(FrameKind.AUDIO, 7, b"abc")[: HEAD.size]) == (3, FrameKind.AUDIO, 7)
    for head in (HEAD.pack(MAX_PAYLOAD + 1, FrameKind.AUDIO, 1), HEAD.pack(1, 99, 1)):
        with pytest.raises(BrokenPipeFrame):
            decode_head(head)

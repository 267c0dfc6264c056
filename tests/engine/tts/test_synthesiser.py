"""The worker of a voice ends with its server, and leaves signals to it."""

from __future__ import annotations

import signal
import subprocess
import sys

from support.commands import read_message
from support.patience import PATIENCE_SEC

from omni_ws.config.model import VoiceChoice
from omni_ws.engine.child_main import encode_message
from omni_ws.engine.tts.synthesiser import FromWorker, Speak, VoiceReady
from omni_ws.engine.tts.voice_process import WORKER_MODULE


def test_the_worker_ends_with_its_server(voice_choice: VoiceChoice) -> None:
    worker = subprocess.Popen(
        [sys.executable, "-m", WORKER_MODULE, voice_choice.value], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert worker.stdin is not None
    assert worker.stdout is not None
    ready, _ = read_message(worker.stdout, FromWorker)
    assert isinstance(ready, VoiceReady)
    assert ready.facts is not None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        worker.send_signal(number)
    text = "This is a long sentence for somebody who has left. " * 50
    worker.stdin.write(encode_message(Speak(1, ready.facts.voices[0], 1.0, text)))
    worker.stdin.close()
    worker.stdout.close()
    assert worker.wait(PATIENCE_SEC) == 0

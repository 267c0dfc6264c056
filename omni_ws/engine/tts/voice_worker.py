"""The process that speaks: ``python -m omni_ws.engine.tts.voice_worker espeak``, or ``hibari FILE``.

A process of its own, because the synthesisers keep global state, may crash, and one of them is GPLv3. It reads jobs
from its standard input, writes speech to its standard output, and ends when its input does, which is also how the
death of the server ends it.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO

from omni_ws.engine.child import leave_signals_to_server, return_freed_memory, share_heaps, take_over_stdout
from omni_ws.engine.tts.espeak import Espeak
from omni_ws.engine.tts.synthesiser import (
    HEAD,
    RATE,
    Frame,
    FrameKind,
    NoVoice,
    SpokenWord,
    Synthesiser,
    decode_head,
    decode_object,
    encode_frame,
    encode_object,
)


class _Inbox:
    """Reads the pipe in a thread of its own, so that a cancellation is seen while a text is being spoken."""

    def __init__(self, source: BinaryIO) -> None:
        self.jobs: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        self._source = source
        #: One job is under way at a time, so the newest cancellation is the only one that can matter.
        self._cancelled = -1
        threading.Thread(target=self._read, name="inbox", daemon=True).start()

    def is_cancelled(self, job: int) -> bool:
        return job == self._cancelled

    def _read(self) -> None:
        while (frame := _read_frame(self._source)) is not None:
            if frame.kind is FrameKind.SPEAK:
                self.jobs.put(frame)
            elif frame.kind is FrameKind.CANCEL:
                self._cancelled = frame.job
        # The server is gone. The main thread may be deep inside a C library: nothing is worth waiting for.
        os._exit(0)


class _Outbox:
    """Sends what one job says."""

    def __init__(self, target: BinaryIO, job: int, inbox: _Inbox) -> None:
        self._target = target
        self._job = job
        self._inbox = inbox

    def audio(self, sample_rate: int, pcm16: bytes) -> bool:
        if self._inbox.is_cancelled(self._job):
            return False
        self._send(encode_frame(FrameKind.AUDIO, self._job, RATE.pack(sample_rate) + pcm16))
        return True

    def words(self, words: list[SpokenWord]) -> None:
        self._send(encode_object(FrameKind.WORDS, self._job, words))

    def done(self) -> None:
        self._send(encode_frame(FrameKind.DONE, self._job))

    def failed(self, message: str) -> None:
        self._send(encode_object(FrameKind.FAILED, self._job, {"message": message}))

    def _send(self, frame: bytes) -> None:
        try:
            self._target.write(frame)
            self._target.flush()
        except BrokenPipeError:
            os._exit(0)


def _read_frame(source: BinaryIO) -> Frame | None:
    head = source.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    length, kind, job = decode_head(head)
    return Frame(kind, job, source.read(length))


def _synthesiser(file: str | None) -> Synthesiser:
    """Hibari, where there is a file for it, else espeak-ng. Raises NoVoice."""
    if file is not None:
        # What hibari needs takes a second to import, which no other voice waits for.
        from omni_ws.engine.tts.hibari import Hibari

        return Hibari(Path(file))
    return Espeak()


def _serve(synthesiser: Synthesiser, inbox: _Inbox, target: BinaryIO) -> None:
    while True:
        frame = inbox.jobs.get()
        outbox = _Outbox(target, frame.job, inbox)
        request = decode_object(frame.payload)
        try:
            if not inbox.is_cancelled(frame.job):
                synthesiser.speak(request["text"], request["voice"], outbox, speed=request["speed"])
        except Exception:  # whose text is for the log of the server, where this goes
            traceback.print_exc()
            outbox.failed("the synthesiser broke on this text")
        else:
            outbox.done()


def main() -> None:
    """Ends with its input."""
    leave_signals_to_server()
    target = take_over_stdout()
    share_heaps(1)
    try:
        synthesiser = _synthesiser(sys.argv[2] if len(sys.argv) > 2 else None)
    except NoVoice as reason:
        target.write(encode_object(FrameKind.READY, 0, {"reason": str(reason)}))
        target.flush()
        return
    target.write(encode_object(FrameKind.READY, 0, asdict(synthesiser.facts)))
    target.flush()
    # Loading takes more than what was loaded.
    return_freed_memory()
    _serve(synthesiser, _Inbox(sys.stdin.buffer), target)


if __name__ == "__main__":
    main()

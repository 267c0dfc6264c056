"""The voice worker, the process that speaks: ``python -m …voice_worker espeak``, ``hibari FILE``, ``kokoro FOLDER …``.

The process is separate because the synthesisers keep global state and may crash, and because espeak-ng is under GPLv3.
The server does not import this module.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Any

from omni_ws.engine.child_main import ServerLink, return_freed_memory, share_heaps
from omni_ws.engine.tts.espeak import Espeak
from omni_ws.engine.tts.synthesiser import (
    Cancel,
    Done,
    NoVoice,
    Pronounce,
    Pronounced,
    Speak,
    SpokenPcm,
    SpokenWord,
    SpokenWords,
    Synthesiser,
    ToWorker,
    VoiceReady,
)


class _Worker:
    """The loop of the worker, which speaks one job at a time. A Cancel takes effect while the job is being spoken."""

    def __init__(self) -> None:
        self.link = ServerLink(ToWorker, at_once=self._note_cancellation)
        #: The job that was cancelled last. One job runs at a time, so earlier cancellations do not matter.
        self._cancelled = 0
        self._job = 0
        self._synthesiser: Synthesiser | None = None

    def run(self, synthesiser: Synthesiser) -> None:
        self._synthesiser = synthesiser
        while True:
            asked, _ = self.link.receive()
            assert isinstance(asked, Speak | Pronounce)
            self._job = asked.job
            try:
                if asked.job != self._cancelled:
                    self._do(asked, synthesiser)
                failure = ""
            except Exception:  # whose text is for the log of the server, where this goes
                traceback.print_exc()
                failure = "the synthesiser broke on this text"
            self.link.send(Done(asked.job, failure))

    def _do(self, asked: Speak | Pronounce, synthesiser: Synthesiser) -> None:
        if isinstance(asked, Pronounce):
            assert isinstance(synthesiser, Espeak)
            self.link.send(Pronounced(asked.job, synthesiser.pronounced(asked.text, asked.voice)))
        else:
            synthesiser.speak(asked, self)

    def audio(self, sample_rate: int, pcm16: bytes) -> bool:
        if self._job == self._cancelled:
            return False
        self.link.send(SpokenPcm(self._job, sample_rate), pcm16)
        return True

    def words(self, words: list[SpokenWord]) -> None:
        self.link.send(SpokenWords(self._job, words))

    def _note_cancellation(self, asked: Any) -> bool:
        if isinstance(asked, Cancel):
            self._cancelled = asked.job
            if self._synthesiser is not None and asked.job == self._job:
                self._synthesiser.interrupt()
            return True
        return False


def _synthesiser(name: str, *files: str) -> Synthesiser:
    """Load the synthesiser ``name`` from ``files``, or espeak-ng if there are no files. Raises NoVoice."""
    if not files:
        return Espeak()
    # What these need takes a second to import, for which no other voice should wait.
    if name == "kokoro":
        from omni_ws.engine.tts.neural import Kokoro

        return Kokoro(*map(Path, files))
    from omni_ws.engine.tts.neural import Hibari

    return Hibari(Path(files[0]))


def main() -> None:
    """Run the voice worker until its standard input ends."""
    share_heaps(1)
    worker = _Worker()
    try:
        synthesiser = _synthesiser(*sys.argv[1:])
    except NoVoice as reason:
        worker.link.send(VoiceReady(None, str(reason)))
        return
    worker.link.send(VoiceReady(synthesiser.facts))
    # Loading takes more memory than the loaded voice.
    return_freed_memory()
    worker.run(synthesiser)


if __name__ == "__main__":
    main()

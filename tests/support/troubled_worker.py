"""A voice worker with a trouble, which the variable TROUBLE names."""

from __future__ import annotations

import os
import signal
import sys

from omni_ws.engine.tts import voice_worker
from omni_ws.engine.tts.synthesiser import NoVoice


class _NotInstalled:
    def __init__(self) -> None:
        raise NoVoice("espeak-ng is not installed")


if __name__ == "__main__":
    if os.environ["TROUBLE"] == "voiceless":
        vars(voice_worker)["Espeak"] = _NotInstalled
    else:  # late: it stops itself before it starts, and a test lets it go on, by SIGCONT
        os.kill(os.getpid(), signal.SIGSTOP)
    sys.exit(voice_worker.main())  # type: ignore[func-returns-value]

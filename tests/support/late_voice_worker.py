"""A voice worker that stops itself before it starts: a test lets it go on, by SIGCONT."""

from __future__ import annotations

import os
import signal

from omni_ws.engine.tts.voice_worker import main

if __name__ == "__main__":
    os.kill(os.getpid(), signal.SIGSTOP)
    main()

"""A voice worker that takes half a second to start."""

from __future__ import annotations

import time

from omni_ws.engine.tts.voice_worker import main

if __name__ == "__main__":
    time.sleep(0.5)
    main()

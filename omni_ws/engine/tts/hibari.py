"""The hibari synthesiser: a neural voice of English. Only in the voice worker, since it is large."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from omni_ws.audio.vad import OnnxNetwork, runtime_library
from omni_ws.engine.tts.hibari_reading import HibariReader, ReadWord
from omni_ws.engine.tts.synthesiser import NoVoice, SpokenWord, SynthesisListener, VoiceFacts
from omni_ws.errors import EngineFailed

SAMPLE_RATE: Final = 24_000
CHUNK_SAMPLES: Final = 2400

#: A part of each sound is noise; with one seed the same text gives the same samples.
_SEED: Final = 0
#: What stays of the silence before the first sound, which the network makes 0.3 s long.
_LEAD_SAMPLES: Final = 480
#: Less is silence: -46 dB.
_AUDIBLE: Final = 0.005
#: What a phoneme is heard before the network says so, as measured at sounds that follow a pause.
_LAG_SAMPLES: Final = 1000
#: The running sum of the lengths of the phonemes, a value inside the network.
_ENDS: Final = "/CumSum_output_0"
_SPECTRA: Final = ("lh", "theta", "ln", "lr", "phi", "f0")
_TRIAL: Final = "Hello."


class Hibari:
    """Speaks at 24 kHz, each clause at once, with word times. The same text gives the same samples.

    Its network is asked for one output more than it has: when each phoneme ends. Where a file has no such value, the
    voice speaks without word times.
    """

    def __init__(self, file: Path) -> None:
        """Load the voice. Raises NoVoice where ``file`` is none of hibari's, or a package is missing."""
        try:
            from hibari import __version__, dsp
            from hibari.voices import VOICES

            self._runtime = runtime_library()
        except (ImportError, EngineFailed) as error:
            raise NoVoice(f"hibari cannot be loaded: {error}") from error
        self._synthesise: Any = dsp.synth
        try:
            content = file.read_bytes()
        except OSError as error:
            raise NoVoice(f"{file} cannot be read: {error.strerror}") from error
        digest = hashlib.sha256(content).hexdigest()
        known = {str(voice["sha256"]): (name, voice) for name, voice in VOICES.items()}
        name, about = known.get(digest, (file.stem, {}))
        self._reader = HibariReader(british=bool(about.get("british")))
        self._network, self._outputs = self._loaded(content, file)
        self._has_times = _ENDS in self._outputs
        language = str(about.get("language", "en")).lower()
        # Of a file that is not known, the licence is not known either.
        notes = (", Apache-2.0" if about else "", "" if self._has_times else ", without word times")
        source = "".join((file.name, *notes))
        self.facts = VoiceFacts(f"hibari {__version__}", source, (name,), {name: language}, latin_only=True)

    def speak(self, text: str, voice: str, listener: SynthesisListener, *, speed: float) -> None:
        spoken = 0
        for piece in self._reader.pieces(text):
            samples, ends = self._samples(self._network, self._outputs, piece.ids, speed)
            begin, end = _audible(samples)
            cut = max(0, begin - _LEAD_SAMPLES)
            if self._has_times:
                heard = np.clip(ends - _LAG_SAMPLES / max(speed, 1.0), begin, end)
                heard[0] = begin  # slow speech is heard long before the network says so
                listener.words(_timed(piece.words, (heard + (spoken - cut)) * (1000 / SAMPLE_RATE)))
            pcm = (np.clip(samples[cut:], -1, 1) * 32767).astype("<i2")
            for start in range(0, len(pcm), CHUNK_SAMPLES):
                if not listener.audio(SAMPLE_RATE, pcm[start : start + CHUNK_SAMPLES].tobytes()):
                    return
            spoken += len(pcm)

    def _loaded(self, content: bytes, file: Path) -> tuple[OnnxNetwork, Sequence[str]]:
        """Return the network and the outputs to ask it for, after it has spoken a word."""
        ids = next(self._reader.pieces(_TRIAL)).ids
        for outputs, content_tried in (((*_SPECTRA, _ENDS), _with_output(content, _ENDS)), (_SPECTRA, content)):
            try:
                network = OnnxNetwork(self._runtime, content_tried)
                samples, ends = self._samples(network, outputs, ids, 1.0)
            # Other networks have other inputs and outputs.
            except Exception as error:
                reason = error
                continue
            if not len(samples) or np.abs(samples).max() < _AUDIBLE:
                raise NoVoice(f"{file} is silent")
            timed = len(ends) == len(ids) and bool(np.all(np.diff(ends) >= 0))
            return network, outputs if timed else _SPECTRA
        raise NoVoice(f"{file} is no voice of hibari: {reason}")

    def _samples(
        self, network: OnnxNetwork, outputs: Sequence[str], ids: Sequence[int], speed: float
    ) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
        """Return the samples, and in them the end of each phoneme, if the network tells them."""
        # Asked to be faster, the network makes many sounds too short to be understood; frames are left out instead.
        inputs: dict[str, NDArray[Any]] = {
            "ids": np.asarray([ids], np.int64),
            "speed": np.asarray([min(speed, 1.0)], np.float32),
        }
        computed = network.computed(outputs, inputs)
        spectra = [spectrum[0] for spectrum in computed[: len(_SPECTRA)]]
        if speed > 1:
            kept = np.arange(0, spectra[0].shape[-1], speed).astype(np.intp)
            spectra = [spectrum[..., kept] for spectrum in spectra]
        samples: NDArray[np.float32] = self._synthesise(*spectra, np.random.default_rng(_SEED))
        if len(computed) == len(_SPECTRA):
            return samples, np.empty(0)
        ends = computed[-1].ravel().astype(np.float64)
        return samples, ends * (len(samples) / ends[-1])


def _timed(words: Sequence[ReadWord], ends_ms: NDArray[np.float64]) -> list[SpokenWord]:
    told, now = list[SpokenWord](), 0
    for word in words:
        start = max(now, round(ends_ms[word.first - 1]))
        now = max(start + 1, round(ends_ms[word.last]))
        told.append(SpokenWord(word.text, start, now))
    return told


def _audible(samples: NDArray[np.float32]) -> tuple[int, int]:
    """Return where the sound begins and ends, in samples."""
    heard = np.flatnonzero(np.abs(samples) > _AUDIBLE)
    return (int(heard[0]), int(heard[-1]) + 1) if len(heard) else (0, len(samples))


def _with_output(model: bytes, name: str) -> bytes:
    """Return an ONNX model with one of its inner values as its last output.

    What is appended to a message of protocol buffers is merged into it; so no package that knows ONNX is needed.
    """
    value_info = _field(1, name.encode())
    graph = _field(12, value_info)
    return model + _field(7, graph)


def _field(number: int, content: bytes) -> bytes:
    """Return a field of a message, of less than 128 bytes."""
    return bytes([number << 3 | 2, len(content)]) + content

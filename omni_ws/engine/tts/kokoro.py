"""The Kokoro synthesiser: many neural voices, of English and other languages. Only in the voice worker: it is large.

Its network takes some fifty times what hibari's does, and has the same phonemes: hibari's package reads English for
it. Other languages come with the phonemes of espeak-ng, from a process of its own.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from omni_ws.engine.tts.hibari import Alphabet, HibariReader, ReadPiece, SpokenPieces, with_output
from omni_ws.engine.tts.synthesiser import NoVoice, PronouncedWord, Speak, SpokenWord, SynthesisListener, VoiceFacts

_NETWORK: Final = "kokoro-v1.0.int8.onnx"
#: The language of a voice, by the first letter of its name; the second is f or m. Voices of other languages are left
#: out. The names are also those of espeak-ng, which reads all but English.
_LANGUAGES: Final = {
    "a": "en-us",
    "b": "en-gb",
    "e": "es",
    "f": "fr-fr",
    "h": "hi",
    "i": "it",
    "p": "pt-br",
}
#: The first is the default, and each is the first of its language.
_FIRST: Final = ("af_heart", "bf_emma")
#: How many frames each phoneme lasts, a value inside the network.
_LENGTHS: Final = "/encoder/Round_output_0"
_FRAME_SAMPLES: Final = 600
#: A voice has a style for each number of phonemes, from one on.
_STYLE_VALUES: Final = 256
#: How fast this machine is, is measured so many times at most: other work makes CPU time longer, never shorter.
_TRIALS: Final = 3
_SPEED_TRIAL: Final = "The capital of Portugal is Lisbon."


class Kokoro:
    """Speaks at 24 kHz, each clause at once, with word times. ``interrupt`` ends what is being computed."""

    def __init__(self, folder: Path, *more: Path) -> None:
        """Load the network in a folder, and measure it; all have voices. Raises NoVoice where it cannot be used."""
        import onnxruntime  # which a machine with hibari's voice alone may lack

        options = onnxruntime.SessionOptions()
        # The other cores are for those who listen to others.
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        try:
            content = with_output((folder / _NETWORK).read_bytes(), _LENGTHS)
            self._network = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # those of the runtime have no class in common
            raise NoVoice(f"{_NETWORK} cannot be loaded: {error}") from error
        self._new_options: Callable[[], Any] = onnxruntime.RunOptions
        self._run_options = self._new_options()
        self._readers = {"en-us": HibariReader(), "en-gb": HibariReader(british=True)}
        self._alphabet = Alphabet()
        self._files = {file.stem: file for place in (folder, *more) for file in place.glob("*.bin")}
        known = [name for name in self._files if name[0] in _LANGUAGES]
        names = sorted(known, key=lambda name: (name[0] not in "ab", name not in _FIRST, name))
        self._languages = {name: _LANGUAGES[name[0]] for name in names}
        source = f"82M, {len(names)} voices, Apache-2.0"
        self.facts = VoiceFacts(
            *("kokoro 1.0", source, tuple(names), self._languages), latin_only=True, pace=self._measured_pace()
        )

    def speak(self, asked: Speak, listener: SynthesisListener) -> None:
        options = self._run_options = self._new_options()
        styles = np.fromfile(self._files[asked.voice], np.float32).reshape(-1, 1, _STYLE_VALUES)
        spoken = SpokenPieces(listener)
        for piece in self._pieces(asked):
            try:
                samples, ends = self._samples(piece.ids, styles, asked.speed, options)
            except Exception:
                if options.terminate:
                    return
                raise
            if not spoken.say(samples, piece.words, ends, asked.speed):
                return

    def _pieces(self, asked: Speak) -> Iterator[ReadPiece]:
        if (reader := self._readers.get(self._languages[asked.voice])) is not None:
            return reader.pieces(asked.text)
        told = pronounced_words(asked.text, asked.pronounced)
        words = [self._alphabet.word(written, phonemes) for written, phonemes in told]
        return self._alphabet.pieces([word for word in words if word.ids])

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
            self.speak(Speak(0, _FIRST[0], 1.0, _SPEED_TRIAL), heard)
            best = min(best, (time.process_time() - began) / heard.sec)
            if best <= 1:
                break
        return best


# From the phonemes of espeak-ng to those of the network

#: Phonemes of espeak-ng that are one sign of the network's, as the network was trained.
_JOINED: Final = {
    "aɪ": "I",
    "aʊ": "W",
    "dz": "ʣ",
    "dʒ": "ʤ",
    "eɪ": "A",
    "oʊ": "O",
    "əʊ": "Q",
    "ss": "S",
    "ts": "ʦ",
    "tʃ": "ʧ",
    "ɔɪ": "Y",
}
_STRESSES: Final = "ˈˌ"
#: espeak-ng tells seven bytes of a name: of Portuguese nasal diphthongs the last tilde is missing.
_TILDE: Final = "\u0303"
_CUT_OFF: Final = tuple(f"{vowel}{_TILDE}{glide}" for vowel in "ɐoueiɛ" for glide in "ʊɪ")
#: The marks of a word that the network knows; others by those.
_SAME_MARKS: Final = str.maketrans("«»„।¿¡–", "“”“.  —")
_KNOWN_MARKS: Final = frozenset(';:,.!?—…"“”()')


def pronounced_words(text: str, pronounced: Sequence[PronouncedWord]) -> Iterator[tuple[str, str]]:
    """Yield the words of a text, which white space parts, each with its phonemes and the marks around it."""
    starts, tokens, at = list[int](), text.split(), 0
    for token in tokens:
        at = text.index(token, at)
        starts.append(at)
        at += len(token)
    spoken: list[list[str]] = [[] for _ in tokens]
    for word in pronounced if tokens else ():
        place = max(0, bisect_right(starts, word.position) - 1)
        if word.position >= starts[place] + len(tokens[place]):
            place = min(place + 1, len(tokens) - 1)
        spoken[place].append("".join(map(_sign, word.phonemes)))
    for token, sounds in zip(tokens, spoken, strict=True):
        marked = token.translate(_SAME_MARKS)
        body = marked.strip("".join({*_KNOWN_MARKS, " ", "'", "-"}))
        before, _, behind = marked.partition(body) if body else (marked, "", "")
        kept = ["".join(mark for mark in marks if mark in _KNOWN_MARKS) for marks in (before, behind)]
        yield token, f"{kept[0]}{' '.join(filter(None, sounds))}{kept[1]}"


def _sign(phoneme: str) -> str:
    """Return a phoneme of espeak-ng, stressed or not, in signs of the network."""
    stress = phoneme[: len(phoneme) - len(phoneme.lstrip(_STRESSES))]
    name = phoneme[len(stress) :].replace("-", "")
    if name in _CUT_OFF:
        name += _TILDE
    return stress + _JOINED.get(name, name)


class _Length:
    """Hears how long a text is."""

    def __init__(self) -> None:
        self.sec = 0.0

    def audio(self, sample_rate: int, pcm16: bytes) -> bool:
        self.sec += len(pcm16) / 2 / sample_rate
        return True

    def words(self, words: list[SpokenWord]) -> None:
        """Nothing is needed of them."""

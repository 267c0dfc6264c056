"""The neural synthesisers Hibari, for English, and Kokoro. Only the voice worker imports them, since they are large."""

from __future__ import annotations

import gzip
import hashlib
import re
import time
import unicodedata
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from omni_ws.audio.pcm import audible_part, pcm16_from_samples
from omni_ws.audio.vad import OnnxNetwork, runtime_library
from omni_ws.engine.tts.synthesiser import NoVoice, PronouncedWord, Speak, SpokenWord, SynthesisListener, VoiceFacts
from omni_ws.errors import EngineFailed

SAMPLE_RATE: Final = 24_000
CHUNK_SAMPLES: Final = 2400

#: A part of each sound is random noise; with a fixed seed the same text gives the same samples.
_SEED: Final = 0
#: How much is kept of the silence before the first sound, which the network makes 0.3 s long.
_LEAD_SAMPLES: Final = 480
#: How much earlier a phoneme is audible than the network says, as measured at sounds after a pause.
_LAG_SAMPLES: Final = 1000
#: The running sum of the lengths of the phonemes, a value inside the network.
_ENDS: Final = "/CumSum_output_0"
_SPECTRA: Final = ("lh", "theta", "ln", "lr", "phi", "f0")
_TRIAL: Final = "Hello."


class Hibari:
    """The Synthesiser of the package hibari-tts: English at 24 kHz, a clause at a time, with word times. Deterministic.

    Word times come from an inner value of the network, the end of each phoneme, which is made an additional output. If
    the network in a file has no such value, the voice speaks without word times.
    """

    def __init__(self, file: Path) -> None:
        """Load the voice. Raises NoVoice if ``file`` is not a voice of hibari, or a package is missing."""
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
        language = str(about.get("language", "en")).lower()
        # Of a file that is not known, the licence is not known either.
        notes = (", Apache-2.0" if about else "", "" if _ENDS in self._outputs else ", without word times")
        source = "".join((file.name, *notes))
        self.facts = VoiceFacts(f"hibari {__version__}", source, (name,), {name: language}, latin_only=True)

    def speak(self, asked: Speak, listener: SynthesisListener) -> None:
        spoken = SpokenPieces(listener)
        for piece in self._reader.pieces(asked.text):
            samples, ends = self._samples(self._network, self._outputs, piece.ids, asked.speed)
            if not spoken.say(samples, piece.words, ends, asked.speed):
                return

    def interrupt(self) -> None:
        """Do nothing: hibari is so fast that an interruption is not needed."""

    def _loaded(self, content: bytes, file: Path) -> tuple[OnnxNetwork, Sequence[str]]:
        """Load the network in ``content``, and let it speak a word as a test.

        Returns the network and the names of the outputs to request. Raises NoVoice.
        """
        ids = next(self._reader.pieces(_TRIAL)).ids
        for outputs, content_tried in (((*_SPECTRA, _ENDS), with_output(content, _ENDS)), (_SPECTRA, content)):
            try:
                network = OnnxNetwork(self._runtime, content_tried)
                samples, ends = self._samples(network, outputs, ids, 1.0)
            # Other networks have other inputs and outputs.
            except Exception as error:
                reason = error
                continue
            if not len(samples) or audible_part(samples) is None:
                raise NoVoice(f"{file} is silent")
            timed = len(ends) == len(ids) and bool(np.all(np.diff(ends) >= 0))
            return network, outputs if timed else _SPECTRA
        raise NoVoice(f"{file} is no voice of hibari: {reason}")

    def _samples(
        self, network: OnnxNetwork, outputs: Sequence[str], ids: Sequence[int], speed: float
    ) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
        """Return the samples, and the index in them at which each phoneme ends; no ends if there are no word times."""
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


class SpokenPieces:
    """A sender of the spoken pieces of a text to a listener, without the silence at the beginning of each piece."""

    def __init__(self, listener: SynthesisListener) -> None:
        self._listener = listener
        self._spoken = 0

    def say(
        self, samples: NDArray[np.float32], words: Sequence[ReadWord], ends: NDArray[np.float64], speed: float
    ) -> bool:
        """Send the next piece to the listener; return whether to go on.

        ``ends`` are the indices in ``samples`` at which its phonemes end; empty if they are not known. The networks of
        hibari and Kokoro report these ends late by the same time, which is corrected here.
        """
        begin, end = audible_part(samples) or (0, len(samples))
        cut = max(0, begin - _LEAD_SAMPLES)
        if len(ends):
            heard = np.clip(ends - _LAG_SAMPLES / max(speed, 1.0), begin, end)
            heard[0] = begin  # slow speech is heard long before the network says so
            self._listener.words(_timed(words, (heard + (self._spoken - cut)) * (1000 / SAMPLE_RATE)))
        pcm = pcm16_from_samples(samples[cut:])
        for start in range(0, len(pcm), CHUNK_SAMPLES):
            if not self._listener.audio(SAMPLE_RATE, pcm[start : start + CHUNK_SAMPLES].tobytes()):
                return False
        self._spoken += len(pcm)
        return True


def _timed(words: Sequence[ReadWord], ends_ms: NDArray[np.float64]) -> list[SpokenWord]:
    told, now = list[SpokenWord](), 0
    for word in words:
        start = max(now, round(ends_ms[word.first - 1]))
        now = max(start + 1, round(ends_ms[word.last]))
        told.append(SpokenWord(word.text, start, now))
    return told


def with_output(model: bytes, name: str) -> bytes:
    """Return an ONNX model with its inner value ``name`` as an additional last output.

    Fields that are appended to a Protocol Buffers message are merged into it, so no ONNX package is needed.
    """
    value_info = _field(1, name.encode())
    graph = _field(12, value_info)
    return model + _field(7, graph)


def _field(number: int, content: bytes) -> bytes:
    """Return an encoded field of a Protocol Buffers message; ``content`` must be shorter than 128 bytes."""
    return bytes([number << 3 | 2, len(content)]) + content


# From text to phonemes

#: The maximum number of phonemes that the network speaks at once: some 13 s, which bounds its memory.
MAX_PHONEMES: Final = 200
#: The package reads at most so many letters of an unknown word.
_MAX_LETTERS: Final = 24
#: The digits of a longer number are read one by one: it is no quantity, and the package fails on very long numbers.
_MAX_DIGITS: Final = 15
_MAX_WORD: Final = 48
_LONG_LETTERS: Final = re.compile(rf"[^\W\d_]{{{_MAX_LETTERS + 1},}}")
_LONG_DIGITS: Final = re.compile(rf"\d{{{_MAX_DIGITS + 1},}}")
_REPEATED_MARKS: Final = re.compile(r"([^\w\s])\1{3,}")
#: The package takes text in brackets for phonemes.
_BRACKETS: Final = str.maketrans("[]{}’‘", "()()''")
#: The beginning and the end of a text are silent phonemes.
_SILENCE: Final = 0
_MARKS: Final = frozenset(';:,.!?—…"“”() ')
_PAUSES: Final = frozenset(";:,.!?—…")
#: The punctuation around a word, which is not reported as part of it.
_AROUND: Final = "\"'`.,:;!?…()[]{}“”‘’«»–—¿¡„।"


class ReadWord(NamedTuple):
    """A written word; ``first`` and ``last`` are the indices of its first and last phoneme in a ReadPiece's ``ids``."""

    text: str
    first: int
    last: int


class ReadPiece(NamedTuple):
    """A part of a text, as input of the network: the IDs of its phonemes, and the words that they form."""

    ids: list[int]
    words: list[ReadWord]


class _Word(NamedTuple):
    """A spoken word: the IDs of its phonemes and punctuation marks.

    ``written`` is its written form; "" if it continues the written word before it, None if it stands for nothing in the
    text. ``sounds`` are the indices of the phonemes in ``ids``. ``pauses``: a pause follows.
    """

    written: str | None
    ids: list[int]
    sounds: list[int]
    pauses: bool


class Alphabet:
    """The IDs of the phonemes and marks that the networks of hibari and Kokoro know; it makes ReadPieces of words."""

    def __init__(self) -> None:
        vocabulary = (resources.files("hibari") / "assets" / "vocab.json").read_bytes()
        self._ids = msgspec.json.decode(vocabulary, type=dict[str, int])

    def word(self, written: str | None, phonemes: str) -> _Word:
        """Return a ``_Word`` of ``phonemes``, which include punctuation marks; unknown characters are left out."""
        known = [phoneme for phoneme in phonemes if phoneme in self._ids]
        sounds = [place for place, phoneme in enumerate(known) if phoneme not in _MARKS]
        ids = [self._ids[phoneme] for phoneme in known]
        return _Word(written, ids, sounds, bool(known) and known[-1] in _PAUSES)

    def pieces(self, words: Sequence[_Word]) -> Iterator[ReadPiece]:
        """Yield ``words`` in pieces of at most MAX_PHONEMES, or of one longer word; skip pieces without sound."""
        for piece in _cut(words):
            if any(word.sounds for word in piece):
                yield self._joined(piece)

    def _joined(self, words: Sequence[_Word]) -> ReadPiece:
        ids, placed = [_SILENCE], list[ReadWord]()
        for word in words:
            if len(ids) > 1:
                ids.append(self._ids[" "])
            if word.sounds:
                first, last = len(ids) + word.sounds[0], len(ids) + word.sounds[-1]
                if word.written == "" and placed:
                    placed[-1] = placed[-1]._replace(last=last)
                elif word.written and (text := word.written.strip(_AROUND)):
                    placed.append(ReadWord(text, first, last))
            ids += word.ids
        return ReadPiece([*ids, _SILENCE], placed)


class HibariReader:
    """A converter of English text to phonemes for the network, with the positions of the words in them.

    It uses the rules and the dictionary of the package hibari-tts; in this class, *the package* is this one.
    """

    def __init__(self, *, british: bool = False) -> None:
        from hibari.g2p.normalize import normalize

        self._g2p = hibari_g2p(british=british)
        self._normalize = normalize
        self._alphabet = Alphabet()

    def pieces(self, text: str) -> Iterator[ReadPiece]:
        """Yield ``text`` in pieces of at most MAX_PHONEMES, or of one longer word; skip text that cannot be spoken."""
        written, plain = _plain_words(text)
        # It joins what marks part.
        normal = [part for word in self._normalize(" ".join(plain)).split() for part in _parts(word, _MAX_WORD)]
        words, silent = list[_Word](), ""
        for told, phonemes in zip(_told_as(written, plain, normal), self._pronounced(normal), strict=True):
            word = self._alphabet.word(silent if told == "" and silent else told, phonemes)
            silent = "" if word.sounds else word.written or ""
            if word.ids:
                words.append(word)
        yield from self._alphabet.pieces(words)

    def _pronounced(self, words: Sequence[str]) -> list[str]:
        """Return the phonemes of each word; "" for a word on which the package fails."""
        try:
            return self._phonemes(words)
        except Exception:
            # The package fails on some that are no words. They are only found if it gets each word alone.
            return [self._alone(word) for word in words]

    def _alone(self, word: str) -> str:
        try:
            return self._phonemes([word])[0]
        except Exception:
            return ""

    def _phonemes(self, words: Sequence[str]) -> list[str]:
        """Return the phonemes of each word.

        Raises the exceptions of the package, and ValueError if the package finds a different number of words.
        """
        spoken, current = [], ""
        for token in self._g2p.phonemize_tokens(self._g2p.tokenize(" ".join(words))):
            current += token.phonemes or ""
            if token.whitespace:
                spoken.append(current.strip())
                current = ""
        if words:
            spoken.append(current.strip())
        if len(spoken) != len(words):
            raise ValueError(f"{len(words)} words are read as {len(spoken)}")
        return spoken


def _plain_words(text: str) -> tuple[list[str], list[str]]:
    """Return the words of ``text`` in two lists: as they are written, and as the package hibari-tts is to read them.

    If a word is split for the package, its first part has the whole written form, and the other parts have "".
    """
    written, plain = [], []
    for word in text.split():
        parts = _plain(word).split()
        written += [word, *([""] * (len(parts) - 1))][: len(parts)]
        plain += parts
    return written, plain


def _plain(word: str) -> str:
    """Return ``word`` for the package hibari-tts: without brackets, unprintable characters and repeated marks.

    Long numbers and words, which the package would read slowly or fail on, are split by blanks.
    """
    word = "".join(filter(str.isprintable, unicodedata.normalize("NFC", word))).translate(_BRACKETS)
    word = _REPEATED_MARKS.sub(r"\1\1\1", word)
    word = _LONG_DIGITS.sub(lambda found: " ".join(found[0]), word)
    word = _LONG_LETTERS.sub(lambda found: " ".join(_parts(found[0], _MAX_LETTERS)), word)
    return " ".join(" ".join(_parts(part, _MAX_WORD)) for part in word.split())


def _parts(word: str, length: int) -> list[str]:
    return [word[start : start + length] for start in range(0, len(word), length)]


def _told_as(written: Sequence[str], plain: Sequence[str], normal: Sequence[str]) -> list[str | None]:
    """Return the written form (see ``_Word``) of each word of ``normal``, the package's normalised form of ``plain``.

    ``written`` has the written forms of the words of ``plain``.
    """
    if plain == normal:
        return list(written)
    told: list[str | None] = [None] * len(normal)
    for kind, start, end, first, last in SequenceMatcher(None, plain, normal, autojunk=False).get_opcodes():
        if kind == "equal":
            told[first:last] = written[start:end]
        elif kind == "replace":
            # "7:30" is read as "seven thirty": which of several words is which is not known.
            told[first:last] = [" ".join(filter(None, written[start:end])), *([""] * (last - first - 1))]
    return told


def _cut(words: Sequence[_Word]) -> Iterator[Sequence[_Word]]:
    """Yield ``words`` in pieces that the network can speak, cut at pauses if possible."""
    begin, pause, length = 0, 0, 0
    for place, word in enumerate(words):
        while length + len(word.ids) > MAX_PHONEMES and place > begin:  # the last pause may have been too early
            end = pause if pause > begin else place
            yield words[begin:end]
            begin, length = end, sum(len(before.ids) + 1 for before in words[end:place])
        length += len(word.ids) + 1
        if word.pauses:
            pause = place + 1
    if words[begin:]:
        yield words[begin:]


# The package's conversion from text to phonemes (G2P), with packed dictionaries: 12 MB of memory instead of 80

#: The key of the last part of the tagger's file, by far the largest.
_TAGGER_WEIGHTS: Final = b',"weights":'


def hibari_g2p(*, british: bool = False) -> Any:
    """Return a ``G2P`` of the package hibari-tts whose dictionaries are PackedEntries; the results are the same."""
    from hibari.g2p import G2P
    from hibari.g2p.lexicon import Lexicon
    from hibari.g2p.tagger import Tagger
    from hibari.g2p.tokenize import Tokenizer

    class PackedG2P(G2P):  # type: ignore[misc,unused-ignore]
        def __init__(self) -> None:
            # Without that of the package, which would read the same files, into dicts.
            accent = "gb" if british else "us"
            gold, silver = (PackedEntries(_unzipped(f"lexicon_{accent}_{part}.json.gz")) for part in ("gold", "silver"))
            self.lexicon = Lexicon(gold, silver, british)
            self.tokenizer = Tokenizer(msgspec.json.decode(_asset("tokenizer_exceptions.json")))
            tagger, _, weights = _unzipped("tagger.json.gz").partition(_TAGGER_WEIGHTS)
            self.tagger = Tagger({**msgspec.json.decode(tagger + b"}"), "weights": PackedEntries(weights)})
            self.british, self.unk = british, ""
            self._oov = _UnknownWords("oov_gb.onnx" if british else "oov.onnx")

    return PackedG2P()


class _UnknownWords:
    """A function that returns the phonemes of a word in no dictionary, by a network that the first call loads."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._network: OnnxNetwork | None = None
        self._pronounce: Any = None

    def __call__(self, word: str) -> str | None:
        if self._network is None:
            from hibari.g2p.oov import OOV

            file = str(resources.files("hibari") / "assets" / self._name)
            self._network = OnnxNetwork(runtime_library(), Path(file))
            self._pronounce = OOV(file, session=self)
        phonemes: str | None = self._pronounce(word)
        return phonemes

    def run(self, _: None, inputs: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
        """Run the network. The package hibari-tts calls this method: this object replaces its ONNX Runtime session."""
        assert self._network is not None
        return self._network.computed(["ids"], inputs)


def _asset(name: str) -> bytes:
    return (resources.files("hibari") / "assets" / name).read_bytes()


def _unzipped(name: str) -> bytes:
    return gzip.decompress(_asset(name))


_JSON_STRING: Final = rb'"[^"\\]*(?:\\.[^"\\]*)*"'
_JSON_ENTRY: Final = re.compile(_JSON_STRING + rb":(?:" + _JSON_STRING + rb"|\{(?:" + _JSON_STRING + rb'|[^"{}])*\})')
#: The number of entries in a block, which is searched linearly.
_BLOCK_ENTRIES: Final = 64
#: The number of decoded values that are cached: most words are used again soon.
_KEPT_VALUES: Final = 2048


class PackedEntries:
    """A read-only mapping over the text of a large JSON object, which takes a sixth of the memory of a dict.

    ``text`` is UTF-8 without white space between the entries, and with only the escapes that JSON requires. Each value
    is a string, or an object of strings and numbers. There is at least one entry. Callers must not change the values
    that ``get`` returns. Not thread-safe.
    """

    def __init__(self, text: bytes) -> None:
        entries = sorted(_JSON_ENTRY.findall(text))
        #: JSON escapes line ends, so they can separate the entries.
        self._blocks = [
            b"\n".join([b"", *entries[start : start + _BLOCK_ENTRIES], b""])
            for start in range(0, len(entries), _BLOCK_ENTRIES)
        ]
        self.get = lru_cache(_KEPT_VALUES)(self._found)

    def _found(self, name: str) -> Any:
        """Return the value of the entry ``name``; None if there is no such entry."""
        try:
            sought = b"\n" + msgspec.json.encode(name) + b":"
        except UnicodeEncodeError:  # half a character is in no dictionary
            return None
        # UTF-8 does not contain the byte FF, so this sorts after every entry of that name.
        block = self._blocks[max(0, bisect_right(self._blocks, sought + b"\xff") - 1)]
        start = block.find(sought)
        if start < 0:
            return None
        start += len(sought)
        return msgspec.json.decode(block[start : block.index(b"\n", start)])


# The Kokoro synthesiser: many neural voices, of English and other languages. Only in the voice worker: it is large.
#
# Its network takes some fifty times what hibari's does, and has the same phonemes: hibari's package reads English for
# it. Other languages come with the phonemes of espeak-ng, from a process of its own.


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
    """The Synthesiser Kokoro, which speaks at 24 kHz, a clause at a time, with word times.

    ``interrupt`` ends the current computation.
    """

    def __init__(self, folder: Path, *more: Path) -> None:
        """Load the network in ``folder``, and measure its speed. Raises NoVoice if it cannot be used.

        ``folder`` and the folders ``more`` have the voices.
        """
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
        """Return the samples, and the index in them at which each phoneme ends."""
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
        """Measure and return the CPU time, in seconds, that a second of speech takes.

        If the first measurement is longer than a second, the best of several counts.
        """
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
    """Yield each whitespace-separated word of ``text``, with its phonemes and the punctuation marks around them.

    ``pronounced`` are the words that espeak-ng found in the text.
    """
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
    """Return a phoneme of espeak-ng, stressed or not, in the network's notation."""
    stress = phoneme[: len(phoneme) - len(phoneme.lstrip(_STRESSES))]
    name = phoneme[len(stress) :].replace("-", "")
    if name in _CUT_OFF:
        name += _TILDE
    return stress + _JOINED.get(name, name)


class _Length:
    """A SynthesisListener that measures the duration of the audio, in seconds."""

    def __init__(self) -> None:
        self.sec = 0.0

    def audio(self, sample_rate: int, pcm16: bytes) -> bool:
        self.sec += len(pcm16) / 2 / sample_rate
        return True

    def words(self, words: list[SpokenWord]) -> None:
        """Ignore the words."""

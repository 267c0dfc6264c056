"""Speech recognition with Whisper on the CPU: WhisperModel, on CTranslate2, and WhisperRecogniser over it."""

from __future__ import annotations

import asyncio
import math
import re
import threading
import time
import unicodedata
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from heapq import heappop, heappush
from importlib.util import find_spec
from itertools import count, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
import numpy as np

from omni_ws.audio.pcm import Pcm16, Samples, samples_from_pcm16
from omni_ws.audio.smart_turn import FRAMES_PER_SEC, log_mel
from omni_ws.audio.vad import SAMPLE_RATE
from omni_ws.core.chunks import HeardSegment, Hearing, Word
from omni_ws.core.history import estimate_tokens
from omni_ws.core.json_values import WHISPER_LANGUAGES, language_name
from omni_ws.engine.asr.recogniser import (
    ListenerSlots,
    Recognised,
    StretchedText,
    UtteranceLimits,
    asr_capabilities,
)
from omni_ws.engine.base import EngineCapabilities, EngineState, GenerationRequest, HeardLanguage
from omni_ws.engine.threads import cores, run_in_thread
from omni_ws.errors import EngineFailed
from omni_ws.installing import fetch_command, install_command
from omni_ws.weights import fetched_folder

if TYPE_CHECKING:
    import ctranslate2


# The weights, and whether Whisper can be used here.

#: The weights that are pinned, by the names of the models.
PINNED: Final[Mapping[str, str]] = {"tiny.en": "whisper-tiny-en", "base": "whisper-base"}
DEFAULT_MODEL: Final = "tiny.en"


def whisper_problem(model: str = DEFAULT_MODEL) -> str | None:
    """Return why Whisper cannot be used here, in a sentence that says what to do; None if it can.

    ``model`` is a name in ``PINNED`` or a folder. The first call checks the files of the weights, which takes 0.1 s.
    """
    if find_spec("ctranslate2") is None:
        return f"Whisper needs the package ctranslate2: {install_command()}"
    try:
        whisper_folder(model)
    except EngineFailed as error:
        return error.message
    return None


def whisper_folder(model: str) -> Path:
    """Return the folder with a model's weights (see ``whisper_problem``). Raises EngineFailed; downloads nothing."""
    name = PINNED.get(model)
    if name is None:
        if (folder := Path(model)).is_dir():
            return folder
        raise EngineFailed(f"there is no folder {model}; Whisper is {', '.join(PINNED)}, or a folder with its files")
    if (found := fetched_folder(name)) is not None:
        return found
    raise EngineFailed(f"the weights of Whisper {model} are not here; fetch them with: {fetch_command(name)}")


# The model.

#: The shortest audio that is encoded; shorter audio is padded with silence: with less, Whisper repeats itself. 30 s, on
#: which it was trained, would cost four times as much and be no better.
LEAST_CONTEXT_SEC: Final = 12
MOST_CONTEXT_SEC: Final = 30
#: Silence that is added after the audio: without it the last word is easily lost.
_SILENCE_SEC: Final = 1.0
#: The longest audio that ``transcribe`` accepts.
LONGEST_SEC: Final = MOST_CONTEXT_SEC - _SILENCE_SEC
#: More tokens than anybody says in a second, which ends an output that repeats itself. A token of English is a word or
#: a part of one; in other languages it may be a part of a letter.
_TOKENS_PER_SEC: Final = 8
_TOKENS_PER_SEC_ELSEWHERE: Final = 24
_TOKENS_AT_LEAST: Final = 12
#: The limit on tokens of a model. CTranslate2 reserves one half of ``max_length`` for the output, and the other half
#: for a prompt, as Whisper does.
_ROOM: Final = 448
#: The most tokens of an expected text that the model reads: half of its room, less the token that begins the text.
_MOST_EXPECTED: Final = _ROOM // 2 - 1
#: The most characters of an expected text that are tokenised: more than the model reads.
_MOST_EXPECTED_CHARACTERS: Final = 2000
_MS_PER_ALIGNED_FRAME: Final = 20
#: Probabilities of languages below it count as it.
_LEAST_CHANCE: Final = 0.001
#: The probability from which a detected language is not doubted, and that from which a language that differs from the
#: one before is tried. For accented or short speech, Whisper often detects a related language with a probability of up
#: to 0.9; therefore such speech is decoded in both languages.
SURE_OF_LANGUAGE: Final = 0.8
POSSIBLE_LANGUAGE: Final = 0.5
#: What counts of a text in one of two languages: the mean log-probability of its tokens, so much of the log-probability
#: of the language, and an addition for the language before. The tokens alone do not tell, since in a wrong language
#: Whisper often translates, in likely words (benchmarks/README.md, How speech is measured).
WEIGHT_OF_DETECTION: Final = 0.05
MARGIN_OF_CHANGE: Final = 0.1
#: Other readings of a beam are told whose mean log-probability is lower by at most this.
ALMOST_AS_LIKELY: Final = 0.4


@dataclass(frozen=True, slots=True)
class WhisperTranscript:
    """The output of the model for one utterance.

    ``words`` are set if they were requested, and also if the text repeats itself at its end: only the times of the
    words show whether the end was said twice. ``no_speech`` is the probability that nothing was said, ``score`` the
    mean log-probability of the tokens. The model makes words even of noise; then ``no_speech`` is high and ``score``
    low. ``others`` are alternative texts that are almost as likely.
    """

    text: str
    words: tuple[Word, ...]
    no_speech: float
    score: float
    tokens: tuple[int, ...] = ()
    #: The language that the model detected; None if it was given, or if the model has only one.
    language: str | None = None
    others: tuple[str, ...] = ()


class WhisperModel:
    """A Whisper that transcribes audio of up to LONGEST_SEC. Thread-safe: up to ``workers`` calls run at the same time.

    ``folder`` holds a Whisper model of any size in CTranslate2's format. Raises EngineFailed if it holds none.
    """

    def __init__(self, folder: Path, *, workers: int = 1) -> None:
        try:
            import ctranslate2
        except ImportError as error:
            raise EngineFailed(f"Whisper needs ctranslate2, which cannot be loaded here: {error}") from error
        try:
            self._vocabulary = _vocabulary(folder)
            self._model: Any = ctranslate2.models.Whisper(
                str(folder), device="cpu", compute_type="int8", intra_threads=1, inter_threads=workers
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise EngineFailed(f"{folder} is not a Whisper model for CTranslate2: {error}") from error
        self._ids = {token: number for number, token in enumerate(self._vocabulary)}

    @property
    def multilingual(self) -> bool:
        """Whether the model transcribes languages other than English."""
        return bool(self._model.is_multilingual)

    @property
    def languages(self) -> frozenset[str]:
        """The codes of the languages that ``transcribe`` accepts, such as ``en``."""
        if not self.multilingual:
            return frozenset({"en"})
        return frozenset(code for code in WHISPER_LANGUAGES if f"<|{code}|>" in self._ids)

    def transcribe(
        self,
        audio: Samples,
        *,
        beam: int = 5,
        words: bool = True,
        language: str | None = "en",
        among: Collection[str] = (),
        before: str | None = None,
        expected: Sequence[int] = (),
        tell: Callable[[WhisperTranscript], None] | None = None,
    ) -> WhisperTranscript:
        """Transcribe audio at 16 kHz. Blocks: 50 ms to 300 ms of one core for the smallest model.

        ``beam`` is the beam size; 1 is greedy decoding: half the work of the decoder, some more errors, and only the
        likeliest language is tried. ``words`` requests the times of words. ``tell`` is called with the transcript
        before these times are known, unless they may change the text. ``language`` is a code such as ``de``; with None
        a multilingual model detects the language, among the codes in ``among`` unless that is empty. ``before`` is the
        language of the previous speech: another language is detected only for more than one word, which must make more
        sense in it (``_clearest``). ``expected`` are the tokens that ``expected_tokens`` returned for a text that could
        precede the speech. Raises ValueError for a language that the model does not know, and for audio that is too
        long.
        """
        seconds = len(audio) / SAMPLE_RATE
        if seconds > LONGEST_SEC:
            raise ValueError(f"{seconds:.1f} s of audio; the model reads {LONGEST_SEC:g} s at once")
        context = min(max(math.ceil(seconds + _SILENCE_SEC), LEAST_CONTEXT_SEC), MOST_CONTEXT_SEC)
        import ctranslate2

        spectrogram = log_mel(audio, context * FRAMES_PER_SEC, bands=self._model.n_mels)
        encoded = self._model.encode(ctranslate2.StorageView.from_array(spectrogram[None]))
        detects = language is None and self.multilingual
        possible = self._possible_languages(encoded, among, before) if detects else {}
        tried: list[str | None] = list(possible) if detects else [language]
        if beam == 1:
            del tried[1:]  # of an interim text, which the next one will correct
        decoded = [self._decoded(encoded, seconds, one, expected=expected, beam=beam) for one in tried]
        best = decoded[0] if len(decoded) == 1 else _clearest(decoded, possible, before)
        heard = WhisperTranscript(
            best.text,
            (),
            best.no_speech,
            best.score,
            tokens=tuple(best.tokens),
            language=best.language if detects else None,
            others=best.others,
        )
        repeats = copied_at_end(best.text.split())
        if tell is not None and not repeats:
            tell(heard)
        timed = best.tokens and (words or repeats)
        return replace(heard, words=self._words(encoded, best.prompt, best.tokens, seconds)) if timed else heard

    def _decoded(
        self,
        encoded: ctranslate2.StorageView,
        seconds: float,
        language: str | None,
        *,
        expected: Sequence[int],
        beam: int,
    ) -> _Decoded:
        prompt = [self._id(token) for token in prompt_tokens(language if self.multilingual else None)]
        read = [*expected, *prompt, self._id("<|notimestamps|>")]
        longest = self._longest_answer(seconds, language)
        (result,) = self._model.generate(
            encoded,
            [read],
            beam_size=beam,
            num_hypotheses=beam,
            max_length=min(_ROOM, longest + max(longest, len(read))),
            return_scores=True,
            return_no_speech_prob=True,
        )
        tokens, *others = (
            [token for token in ids if not self._vocabulary[token].startswith("<|")]
            for ids, score in zip(result.sequences_ids, result.scores, strict=True)
            if score >= result.scores[0] - ALMOST_AS_LIKELY
        )
        text, no_speech, score = self._text(tokens), float(result.no_speech_prob), float(result.scores[0])
        return _Decoded(language, prompt, tokens, text, no_speech, score, tuple(map(self._text, others)))

    def _longest_answer(self, seconds: float, language: str | None) -> int:
        per_sec = _TOKENS_PER_SEC_ELSEWHERE if self.multilingual and language != "en" else _TOKENS_PER_SEC
        return int(seconds * per_sec) + _TOKENS_AT_LEAST

    def _possible_languages(
        self, encoded: ctranslate2.StorageView, among: Collection[str], before: str | None
    ) -> dict[str, float]:
        """Detect the languages that the speech may be in, see ``possible_languages``. Costs one step of the decoder."""
        if len(among) == 1:
            return dict.fromkeys(among, 1.0)
        (found,) = self._model.detect_language(encoded)
        return possible_languages({str(token).strip("<|>"): chance for token, chance in found}, among, before)

    def _id(self, token: str) -> int:
        if token not in self._ids:
            raise ValueError(f"the model has no token {token}")
        return self._ids[token]

    def expected_tokens(self, text: str) -> list[int]:
        """Return a prompt that makes the model expect the names and terms in ``text``: its last 220 or so tokens."""
        text = text.strip()[-_MOST_EXPECTED_CHARACTERS:]
        if not text:
            return []
        return [self._id("<|startofprev|>"), *self.tokens(f" {text}")[-_MOST_EXPECTED:]]

    def tokens(self, text: str) -> list[int]:
        """Return the token IDs of ``text`` by byte-pair encoding: letters are joined in the order of the vocabulary."""
        found: list[int] = []
        for piece in _PIECES.finditer(text):
            letters = [_LETTERS[byte] for byte in piece[0].encode("utf-8", "replace")]
            while len(letters) > 1:
                joined = [self._ids.get(one + other, _NO_TOKEN) for one, other in pairwise(letters)]
                place = min(range(len(joined)), key=joined.__getitem__)
                if joined[place] == _NO_TOKEN:
                    break
                letters[place : place + 2] = [letters[place] + letters[place + 1]]
            found += [self._ids[token] for token in letters]
        return found

    def _words(
        self, encoded: ctranslate2.StorageView, prompt: list[int], tokens: list[int], seconds: float
    ) -> tuple[Word, ...]:
        (aligned,) = self._model.align(encoded, prompt, [tokens], math.ceil(seconds * FRAMES_PER_SEC))
        if not aligned.alignments:
            return ()  # too short to be aligned
        places, frames = np.asarray(aligned.alignments).T
        # Where each token begins, and at last where the text ends.
        begins = frames[np.diff(places, prepend=-1) > 0] * _MS_PER_ALIGNED_FRAME
        found = []
        for start, end in self._spans(tokens):
            if text := self._text(tokens[start:end]):
                found.append(Word(text, int(begins[start]), int(begins[min(end, len(begins) - 1)])))
        return tuple(found)

    def _spans(self, tokens: Sequence[int]) -> list[tuple[int, int]]:
        """Return the start and end of each word in ``tokens``: a word begins at a token that starts with a blank."""
        starts = [place for place, token in enumerate(tokens) if not place or self._vocabulary[token][0] == _BLANK]
        return list(zip(starts, [*starts[1:], len(tokens)], strict=True))

    def _text(self, tokens: Sequence[int]) -> str:
        data = bytes(_BYTES[letter] for token in tokens for letter in self._vocabulary[token])
        return data.decode("utf-8", "replace").strip()


@dataclass(frozen=True, slots=True)
class _Decoded:
    """The decoder's transcript of an utterance in one language. The fields are those of WhisperTranscript."""

    language: str | None
    prompt: list[int]
    tokens: list[int]
    text: str
    no_speech: float
    score: float
    others: tuple[str, ...] = ()


#: Letters of a word of a script without spaces, such as "はい"; longer ones may be sentences.
_LONGEST_UNSPACED_WORD: Final = 4


def _clearest(decoded: Sequence[_Decoded], possible: Mapping[str, float], before: str | None) -> _Decoded:
    """Return the most probable transcript; ``possible`` has the probabilities of the languages, by their codes.

    ``before`` is the language of the previous utterance. The score of its transcript is raised by MARGIN_OF_CHANGE, and
    a single word, such as a name or a greeting, never changes the language.
    """

    def sense(one: _Decoded) -> float:
        detected = WEIGHT_OF_DETECTION * math.log(max(possible[str(one.language)], _LEAST_CHANCE))
        return one.score + detected + (MARGIN_OF_CHANGE if one.language == before else 0)

    best = max(decoded, key=sense)
    if best.language != before and _is_word(best.text):
        return next((one for one in decoded if one.language == before), best)
    return best


def _is_word(text: str) -> bool:
    """Whether a text has at most one word. Up to four letters of a script without spaces count as one word."""
    said = "".join(letter for letter in text if unicodedata.category(letter)[0] not in "PS").strip()
    letters = sum(unicodedata.category(letter)[0] != "M" for letter in said)
    return estimate_tokens(said) <= 1 or (letters <= _LONGEST_UNSPACED_WORD and len(said.split()) == 1)


def possible_languages(
    chances: Mapping[str, float], among: Collection[str] = (), before: str | None = None
) -> dict[str, float]:
    """Return the one or two languages that an utterance may be in, the best guess first, with their probabilities.

    ``chances`` are the probabilities of all languages. If ``among`` is not empty, only the languages in it count (all,
    if none of them is in ``chances``), and their probabilities are scaled to sum to one. ``before`` is the language of
    the previous utterance, if known.
    """
    known = {code: chance for code, chance in chances.items() if not among or code in among} or dict(chances)
    whole = sum(known.values()) or 1
    likeliest, *others = sorted(known, key=known.__getitem__, reverse=True)
    sure = known[likeliest] >= SURE_OF_LANGUAGE * whole
    if before not in known:
        possible = [likeliest] if sure else [likeliest, *others[:1]]
    elif likeliest == before or known[likeliest] < POSSIBLE_LANGUAGE * whole:
        possible = [before]
    else:
        possible = [likeliest, before] if sure else [before, likeliest]
    return {code: known[code] / whole for code in possible}


def prompt_tokens(language: str | None) -> list[str]:
    """Return the tokens with which the decoder starts. ``language`` None stands for an English-only model."""
    return ["<|startoftranscript|>"] + ([] if language is None else [f"<|{language}|>", "<|transcribe|>"])


def _vocabulary(folder: Path) -> list[str]:
    listed = folder / "vocabulary.json"
    if listed.exists():
        return msgspec.json.decode(listed.read_bytes(), type=list[str])
    return (folder / "vocabulary.txt").read_text(encoding="utf-8").removesuffix("\n").split("\n")


def _byte_letters() -> dict[str, int]:
    """Return the byte-level alphabet of GPT-2's vocabulary: from a printable letter to the byte that it stands for."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES: Final = _byte_letters()
_LETTERS: Final = {byte: letter for letter, byte in _BYTES.items()}
#: A piece of text that no token crosses, with the blank before it. Long ones are cut: joining takes quadratic time.
_PIECES: Final = re.compile(r" ?[^\W\d_]{1,64}| ?\d{1,64}| ?(?:[^\w\s]|_){1,64}|\s{1,64}")
_NO_TOKEN: Final = 1 << 31
_BLANK: Final = next(letter for letter, byte in _BYTES.items() if byte == ord(" "))


# Words that were transcribed twice though they were said once, which their times show.


def without_repeats(words: Sequence[Word]) -> Sequence[Word]:
    """Return ``words`` without the repetitions at the end that have no duration.

    The model sometimes repeats a short text ("Location. Location.") or the end of a text, even several times;
    repetitions are removed until none is left. The alignment has no audio left for such words: at least half of them
    begin and end at the same time. What a person says twice has a duration, and stays.
    """
    while copied := copied_at_end([word.text for word in words]):
        untimed = sum(word.start_ms == word.end_ms for word in words[len(words) - copied :])
        if 2 * untimed < copied:
            break
        words = words[:-copied]
    return words


def copied_at_end(words: Sequence[str]) -> int:
    """Return how many words at the end repeat the words before them; the last repetition may be incomplete.

    Case and punctuation are ignored. The time is at most quadratic in the number of words; half a minute of speech has
    about a hundred.
    """
    texts = ["".join(filter(str.isalnum, word)).lower() for word in words]
    for period in range(1, len(texts) // 2 + 1):
        copied = 0
        while copied < len(texts) - period and texts[-1 - copied] == texts[-1 - copied - period]:
            copied += 1
        if copied >= period:
            return copied
    return 0


# WhisperRecogniser: speech recognition with Whisper on the CPU.


T = TypeVar("T")


# One Whisper on the CPU for all requests, with a worker for each core.

#: More speakers than any core can serve.
_MOST_PER_CORE: Final = 32
#: Urgencies: a speaker waits for the final text; interim texts are less urgent, as the next one follows soon;
#: recordings can wait.
_SETTLED: Final = 0
_INTERIM: Final = 1
_RECORDING: Final = 2
_BEAM: Final = 5
#: How much speech the first interim text needs: with less it is mostly wrong.
_FIRST_SAMPLES: Final = 350 * SAMPLE_RATE // 1000
#: How text that the model made of noise is recognised: a high probability of no speech, and a low probability of the
#: words. With greedy decoding the model may repeat itself on noise with high probability.
_NO_SPEECH: Final = 0.6
_UNSURE: Final = -1.0
#: The length of the audio with which the start measures the speed.
_TRIAL_SAMPLES: Final = 4 * SAMPLE_RATE


class WhisperRecogniser:
    """A Recogniser that runs Whisper, and the Transcriber of its requests.

    ``model`` is ``tiny.en``, ``base``, or a folder with a model for CTranslate2; ``load`` replaces the function that
    loads the model. Final texts go before interim ones, and live speech before recordings. Equal samples give equal
    words, whatever the load. The number of requests that are served simultaneously follows from the measured time of
    recognition, and is at most ``max_recognisers``. If a request names no language, a multilingual model detects the
    language of each utterance, among ``languages`` (codes of RFC 5646) unless that is empty; the result is the likely
    language of the next utterance (``possible_languages``).
    """

    name = "whisper"
    hosts: tuple[str, ...] = ()
    state = EngineState.OK
    speculates = True
    #: The model transcribes up to 29 s at once.
    limits = UtteranceLimits(cut_after=20 * SAMPLE_RATE, longest=28 * SAMPLE_RATE)

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        max_recognisers: int | None = None,
        workers: int | None = None,
        languages: Collection[str] = (),
        load: Callable[[], WhisperModel] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        #: How many utterances are transcribed at the same time.
        self.workers = workers or cores()
        self.model = model if model in PINNED else Path(model).resolve().name
        self.cost = RecognitionCost(self.workers)
        self.slots = ListenerSlots(max_recognisers or _MOST_PER_CORE * self.workers, self.cost.talkers)
        self._load = load or partial(_load_model, model, self.workers)
        self._clock = clock
        self._whisper: WhisperModel | None = None
        self._languages = frozenset(languages)
        self._threads: UrgentFirst | None = None
        self._expect("", None, frozenset(), None)

    @property
    def capabilities(self) -> EngineCapabilities:
        return asr_capabilities(
            sampling=("max_tokens", "stop"),
            sampling_no_ops=("temperature", "top_p", "seed"),
            languages=self._known_languages,
            word_times=True,
            keywords=True,
            transcript_guesses=self.speculates,
        )

    @property
    def _known_languages(self) -> frozenset[str]:
        known = frozenset({"en"}) if self._whisper is None else self._whisper.languages
        return known & self._languages or known

    def describe(self) -> tuple[str, ...]:
        if not self._languages - {"en"}:
            return ()
        heard = ", ".join(sorted(language_name(code).title() for code in self._languages))
        return (f"languages: {heard}; {self.model} takes twice the CPU time of tiny.en, which hears English",)

    async def start(self) -> None:
        with ThreadPoolExecutor(1) as thread:
            await run_in_thread(thread, self.load)

    async def stop(self) -> None:
        await asyncio.to_thread(self.close)

    def load(self) -> None:
        """Load the model, and measure its speed on this machine in half a second. Blocks. Raises EngineFailed."""
        self._threads = UrgentFirst(self.workers, name="whisper", patient=_RECORDING)
        self._whisper = self._load()
        if unknown := sorted(self._languages - self._whisper.languages):
            raise EngineFailed(
                f"Whisper {self.model} does not hear {', '.join(map(language_name, unknown))}; name others in languages"
                + (", or a multilingual model: --asr whisper:base" if not self._whisper.multilingual else "")
            )
        noise = np.random.default_rng(0).normal(0, 1000, _TRIAL_SAMPLES).astype(np.int16)
        self._heard(noise, beam=_BEAM, words=True)  # the first time takes longer
        self._settled(noise)
        self._interim(noise)

    def close(self) -> None:
        """Drop the waiting transcriptions, and wait for the running ones. Blocks. Idempotent."""
        if self._threads is not None:
            self._threads.close()
        self._whisper = None

    def transcriber(self, request: GenerationRequest) -> WhisperRecogniser:
        if self._whisper is not None and not self._whisper.multilingual and not request.expected:
            return self
        return self.expecting(
            request.expected, language=request.language, among=request.languages, heard=request.heard_language
        )

    def expecting(
        self,
        expected: str = "",
        *,
        language: str | None = None,
        among: frozenset[str] = frozenset(),
        heard: HeardLanguage | None = None,
    ) -> WhisperRecogniser:
        """Return a recogniser for one request, which shares the model and the threads with this one.

        ``expected`` is a text with the names and terms to expect. ``language`` is the code of the spoken language; with
        None it is detected among the codes in ``among``, or among all languages if that is empty. ``heard`` has the
        language of earlier utterances.
        """
        other = copy(self)
        other._expect(expected, language, among, heard)
        return other

    def _expect(self, expected: str, language: str | None, among: frozenset[str], heard: HeardLanguage | None) -> None:
        """Apply the arguments of ``expecting`` to this recogniser, the copy that ``expecting`` returns."""
        self._expected = expected
        self._expected_tokens: list[int] | None = None
        self._language = language
        self._among = among or self._languages
        self._heard_language = heard or HeardLanguage()

    def live_text(self) -> StretchedText:
        return StretchedText(
            lambda pcm: self._submit(_INTERIM, partial(self._interim, pcm, self._heard_language.now)),
            self._clock,
            first=_FIRST_SAMPLES,
            gap=lambda read_sec, took_sec: interim_gap_sec(took_sec),
        )

    def transcribe(
        self,
        pcm: Pcm16,
        *,
        waited_for: bool = True,
        tell: Callable[[str], None] | None = None,
        tell_untimed: Callable[[Recognised], None] | None = None,
    ) -> Future[Recognised]:
        settled = partial(self._settled, pcm, self._heard_language.now, tell_untimed)
        return self._submit(_SETTLED if waited_for else _RECORDING, settled)

    def _submit(self, urgency: int, call: Callable[[], T]) -> Future[T]:
        assert self._threads is not None
        return self._threads.submit(urgency, call)

    def _settled(
        self, pcm: Pcm16, before: str | None = None, tell_untimed: Callable[[Recognised], None] | None = None
    ) -> Recognised:
        def recognised(heard: WhisperTranscript | None) -> Recognised:
            if heard is None:
                return Recognised()
            return Recognised(heard.text, heard.words, _hearing(heard, len(pcm) * 1000 // SAMPLE_RATE))

        def tell(untimed: WhisperTranscript) -> None:
            if tell_untimed is not None and not _is_noise(untimed, beam=_BEAM):
                tell_untimed(recognised(untimed))

        began = self._clock()
        heard = self._heard(pcm, beam=_BEAM, words=True, before=before, tell=tell)
        self.cost.note_settled(self._clock() - began, len(pcm) / SAMPLE_RATE)
        return recognised(heard)

    def _interim(self, pcm: Pcm16, before: str | None = None) -> str:
        began = self._clock()
        heard = self._heard(pcm, beam=1, words=False, before=before)
        self.cost.note_interim(self._clock() - began)
        return "" if heard is None else heard.text

    def _heard(
        self,
        pcm: Pcm16,
        *,
        beam: int,
        words: bool,
        before: str | None = None,
        tell: Callable[[WhisperTranscript], None] | None = None,
    ) -> WhisperTranscript | None:
        """Return the transcript of ``pcm`` without repeated words; None if nobody spoke."""
        assert self._whisper is not None
        if self._expected_tokens is None:
            self._expected_tokens = self._whisper.expected_tokens(self._expected) if self._expected else []
        heard = self._whisper.transcribe(
            samples_from_pcm16(pcm),
            beam=beam,
            words=words,
            language=self._language,
            among=self._among,
            before=before,
            expected=self._expected_tokens,
            tell=tell,
        )
        if _is_noise(heard, beam=beam):
            return None
        once = without_repeats(heard.words)
        if len(once) == len(heard.words):
            return heard
        return replace(heard, text=" ".join(word.text for word in once), words=tuple(once))


def _is_noise(heard: WhisperTranscript, *, beam: int) -> bool:
    """Whether the transcript was probably made from noise, or contains no words."""
    noise = heard.no_speech > _NO_SPEECH and (beam == 1 or heard.score < _UNSURE)
    return noise or not any(map(str.isalnum, heard.text))


def _load_model(model: str, workers: int) -> WhisperModel:
    if (problem := whisper_problem(model)) is not None:
        raise EngineFailed(problem)
    return WhisperModel(whisper_folder(model), workers=workers)


def _hearing(heard: WhisperTranscript, length_ms: int) -> Hearing:
    data = heard.text.encode()
    segment = HeardSegment(
        heard.text,
        heard.words[0].start_ms if heard.words else 0,
        heard.words[-1].end_ms if heard.words else length_ms,
        tokens=heard.tokens,
        avg_logprob=heard.score,
        compression_ratio=len(data) / len(zlib.compress(data)),
        no_speech_prob=heard.no_speech,
    )
    return Hearing(None if heard.language is None else language_name(heard.language), (segment,), heard.others)


# How long recognition takes on this machine, and so how many speakers it can serve.

#: The shortest and the longest interval between interim texts of a speaker, in seconds.
SHORTEST_GAP_SEC: Final = 0.5
LONGEST_GAP_SEC: Final = 1.5
#: The share of time for which a request's interim texts may occupy a worker, including the wait for it.
_INTERIM_SHARE: Final = 0.3
#: How many final texts are computed for an utterance on average: one at its end, others at earlier pauses.
_SETTLED_TIMES: Final = 1.5
#: The share of the workers' time that speakers may take.
_BUSY: Final = 0.9
#: The factor by which the weight of earlier measurements decreases with each new one.
_KEPT: Final = 0.9


class RecognitionCost:
    """An estimate of how many speakers this machine can serve. Thread-safe.

    It is computed from the recognition times of about the last ten texts, so it decreases while other work slows
    recognition down.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._lock = threading.Lock()
        self._settled_sec = 0.0
        self._settled_audio_sec = 0.0
        self._interim_sec = 0.0
        self._interims = 0.0

    def note_settled(self, took_sec: float, audio_sec: float) -> None:
        """Note that the final text of ``audio_sec`` seconds of audio took ``took_sec`` seconds."""
        with self._lock:
            self._settled_sec = _KEPT * self._settled_sec + took_sec
            self._settled_audio_sec = _KEPT * self._settled_audio_sec + audio_sec

    def note_interim(self, took_sec: float) -> None:
        """Note that an interim text took ``took_sec`` seconds."""
        with self._lock:
            self._interim_sec = _KEPT * self._interim_sec + took_sec
            self._interims = _KEPT * self._interims + 1

    def talkers(self, interims: bool = True) -> int:
        """Return how many users who speak without a pause can be served simultaneously: at least one for each worker.

        Before any measurement, this is one for each worker. With ``interims``, each user gets an interim text every
        LONGEST_GAP_SEC.
        """
        with self._lock:
            settled = self._settled_sec / self._settled_audio_sec if self._settled_audio_sec else 0.0
            interim = self._interim_sec / self._interims if interims and self._interims else 0.0
        share = _SETTLED_TIMES * settled + interim / LONGEST_GAP_SEC
        return max(self._workers, int(_BUSY * self._workers / share)) if share else self._workers


def interim_gap_sec(took_sec: float) -> float:
    """Return the seconds until the next interim text if the last one took ``took_sec``, with its wait in the queue."""
    return min(max(SHORTEST_GAP_SEC, took_sec / _INTERIM_SHARE), LONGEST_GAP_SEC)


# Threads that do the most urgent work first.


class UrgentFirst:
    """An executor that runs the most urgent call first, and calls of equal urgency in their order. Thread-safe.

    The lower the number, the more urgent is the call. A running call is not interrupted; therefore, if there are
    several threads, one of them is reserved for calls more urgent than ``patient``.
    """

    def __init__(self, threads: int, *, name: str, patient: int) -> None:
        self._changed = threading.Condition()
        self._waiting: list[tuple[int, int, Future[Any], Callable[[], Any]]] = []
        self._numbers = count()
        self._closed = False
        self._patient = patient
        self._patient_running = 0
        self._most_patient = max(1, threads - 1)
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}_{number}", daemon=True) for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, urgency: int, call: Callable[[], T]) -> Future[T]:
        """Queue ``call``; its Future can be cancelled until the call begins. Raises RuntimeError after ``close``."""
        future: Future[T] = Future()
        with self._changed:
            if self._closed:
                raise RuntimeError("the threads have ended")
            heappush(self._waiting, (urgency, next(self._numbers), future, call))
            self._changed.notify()
        return future

    def close(self) -> None:
        """Cancel the waiting calls, and wait for the running ones. Blocks. Idempotent."""
        with self._changed:
            self._closed = True
            waiting, self._waiting = self._waiting, []
            self._changed.notify_all()
        for _, _, future, _ in waiting:
            future.cancel()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (next_one := self._take()) is not None:
            urgency, future, call = next_one
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:  # told by the future
                    future.set_exception(error)
            del next_one, future, call  # not kept until there is more to do
            if urgency >= self._patient:
                with self._changed:
                    self._patient_running -= 1
                    self._changed.notify()

    def _take(self) -> tuple[int, Future[Any], Callable[[], Any]] | None:
        with self._changed:
            while not self._may_begin() and not self._closed:
                self._changed.wait()
            if self._closed:
                return None
            urgency, _, future, call = heappop(self._waiting)
            self._patient_running += urgency >= self._patient
            return urgency, future, call

    def _may_begin(self) -> bool:
        if not self._waiting:
            return False
        return self._waiting[0][0] < self._patient or self._patient_running < self._most_patient

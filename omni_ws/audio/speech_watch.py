"""SpeechWatch: detects speech in one audio stream of any format, by the rule in TurnDetector.

Engines and the server's turn detection share the rule, so that they agree on what speech is. A SpeechWatch blocks, so
it is called from worker threads.

*Judge*: the model that estimates whether a speaker who pauses has finished (Smart Turn, ``smart_turn``). A sound or a
turn *over an answer* is one of the user while the server's answer plays.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise
from typing import Final, TypeAlias, TypeVar

import numpy as np

from omni_ws.audio.codec import AudioDecoder
from omni_ws.audio.echo import NoiseSuppressor, OwnEcho
from omni_ws.audio.pcm import NO_SAMPLES, RecentSamples, Samples, pcm16_from_samples, samples_from_pcm16
from omni_ws.audio.smart_turn import HEARD_SAMPLES, backchannel_probability
from omni_ws.audio.sound_levels import (
    CLEAR_MARGIN,
    CLEAR_SPAN,
    CLEAR_WINDOWS,
    HEARD_BEFORE,
    JUDGED_MS,
    KEPT_SOUND,
    QUIET_WINDOWS,
    WARY_WINDOWS,
    NearVoice,
    OnsetMeter,
    SpeechLasts,
    SpeechLull,
    sound_of,
    window_powers,
)
from omni_ws.audio.vad import SAMPLE_RATE, WINDOW_MS, WINDOW_SAMPLES, SpeechDetector, process_together
from omni_ws.core.chunks import AudioFormat
from omni_ws.core.ledger import Playing
from omni_ws.errors import OmniError

# The rule for speech, given the probabilities that ``vad`` computes
#
# Rule and constants were selected in a comparison on recorded speech and noise: white and pink noise, clicks, hum and
# music open no turn, and speech 10 dB above the noise is detected.

#: A turn begins when this many of the last ``START_SPAN`` windows are above the threshold.
START_WINDOWS = 3
START_SPAN = 4
#: The upper limit of ``StartBar.span``.
MAX_START_SPAN = 8

#: The upper limit of a threshold that ``StartBar.margin`` raises; the model rarely reports higher probabilities.
HIGHEST_RAISED_THRESHOLD = 0.95

#: The probabilities above which a speaker is taken to have finished, likely and surely, unless the configuration names
#: others.
LIKELY = 0.5
SURE = 0.9
#: The delay with which the detector notices the end of speech. It counts as silence, so that turns end after the
#: configured silence. Measured on the recorded speech of the tests: 0 to 4 windows, about 2 on average.
DETECTOR_LAG_WINDOWS: Final = 2
DETECTOR_LAG_MS: Final = DETECTOR_LAG_WINDOWS * WINDOW_MS
#: The judge, a model of ends of turns, is asked after 160 ms of silence. If the speaker has surely finished, the turn
#: ends after 256 ms; if likely, after 640 ms (docs/decisions/015).
ASKED_WINDOWS: Final = 160 // WINDOW_MS - DETECTOR_LAG_WINDOWS
FINISHED_WINDOWS: Final = 256 // WINDOW_MS - DETECTOR_LAG_WINDOWS
LIKELY_WINDOWS: Final = 640 // WINDOW_MS - DETECTOR_LAG_WINDOWS

#: If the words are not known when the turn would end, it ends as soon as they are, and after 1,140 ms in any case:
#: they are being recognised, and nothing could be answered sooner.
LATE_WORDS_WINDOWS: Final = 1140 // WINDOW_MS - DETECTOR_LAG_WINDOWS

#: If the speaker has likely finished, and the words are a whole sentence, the turn ends after 416 ms.
WHOLE_WINDOWS: Final = 416 // WINDOW_MS - DETECTOR_LAG_WINDOWS

#: A speaker who has paused within the turn for 416 ms or more takes breaths: unless the judge is sure, only a
#: pause that is half as long again ends the turn.
BREATH_WINDOWS: Final = 416 // WINDOW_MS - DETECTOR_LAG_WINDOWS

#: A listener says "mm-hm" in a pause of 352 ms.
HEARD_BREATH_WINDOWS: Final = 352 // WINDOW_MS - DETECTOR_LAG_WINDOWS

#: A window counts as silence only if it is this far below the threshold, so that a fading voice does not end the turn.
HYSTERESIS = 0.15
LOWEST_SILENCE_THRESHOLD = 0.05


@dataclass(frozen=True, slots=True)
class SpeechOnset:
    """The start of a turn.

    Speech began at ``audio_ms`` in the stream and was detected at ``detected_ms``. ``measured``: as in the StartBar.
    """

    audio_ms: int
    detected_ms: int
    measured: bool = False


@dataclass(frozen=True, slots=True)
class SpeechOffset:
    """The end of a turn.

    Speech ended at ``audio_ms`` in the stream; its end was detected at ``detected_ms``.
    """

    audio_ms: int
    detected_ms: int


@dataclass(frozen=True, slots=True)
class SpeechPause:
    """A pause within a turn, detected at ``detected_ms``, about which the judge is to be asked."""

    detected_ms: int


@dataclass(frozen=True, slots=True)
class SpeechBreath:
    """A pause within a turn, detected at ``detected_ms``, after which the speaker will probably continue."""

    detected_ms: int


TurnEvent: TypeAlias = SpeechOnset | SpeechLull | SpeechLasts | SpeechPause | SpeechBreath | SpeechOffset


class Unfinished(Enum):
    """Whether a speaker who pauses has more to say, judged by the words."""

    NO = "the words are a whole sentence"
    PERHAPS = "the words do not tell"
    YES = "the words go on"


class PauseWords:
    """A recogniser's reports about the words of a turn while it is spoken. Read by other threads.

    This base class stands for a recogniser that reports nothing.
    """

    #: How many times the recogniser has reported the words in a pause, and whether the latest of them are unfinished.
    told = 0
    unfinished = Unfinished.PERHAPS
    #: Whether the speaker has begun to dictate in groups in the turn: a number, a spelling, a list.
    in_groups = False
    #: Whether the sound continues, but the recogniser finds no more words.
    stalled = False

    @property
    def expected(self) -> bool:
        """Whether the recogniser reports the words in each pause."""
        return False


_NO_WORDS: Final = PauseWords()


@dataclass(frozen=True, slots=True)
class StartBar:
    """The condition for the start of a turn.

    At least ``windows`` of the last ``span`` windows have to exceed the threshold by more than ``margin``.
    ``only_near``: sounds that are much softer than the speaker's voice do not count, see NearVoice. ``measured``: an
    OnsetMeter measures the sound with which the turn begins.
    """

    windows: int = START_WINDOWS
    span: int = START_SPAN
    margin: float = 0.0
    only_near: bool = False
    measured: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.windows <= self.span <= MAX_START_SPAN:
            raise ValueError(f"windows must be between 1 and span, and span at most {MAX_START_SPAN}")


ORDINARY_BAR = StartBar()
#: The condition for barge-in, while the server itself speaks: 192 ms of clear voice, so that its echo, a cough or a
#: click does not interrupt it.
BARGE_IN_BAR = StartBar(windows=CLEAR_WINDOWS, span=CLEAR_SPAN, margin=CLEAR_MARGIN, only_near=True)
#: The same, where a sound that is no interruption shall let the answer go on.
MEASURED_BAR: Final = replace(BARGE_IN_BAR, measured=True)
#: The condition while an answer is being made: a television does not withdraw it.
NEAR_BAR = StartBar(only_near=True)
#: The condition for a sound over an answer that may prove no interruption, before it is known to be clear.
UNCERTAIN_BAR: Final = replace(NEAR_BAR, measured=True)


class TurnDetector:
    """Derives starts and ends of turns from the probabilities of speech. No I/O; its clock is the number of windows.

    A turn begins when the probabilities meet the condition ``bar``, or the latest condition that ``demand`` has set. It
    ends after ``silence_duration_ms`` of windows clearly below ``threshold``. With ``sure`` it may end sooner: when
    ``feed`` returns a SpeechPause, the caller asks the judge whether the speaker has finished, and passes the judge's
    probability to ``answer`` before it feeds any window for which ``needs_answer`` is true. The turn ends soonest if
    the probability is above ``sure``, and later if it is above ``LIKELY``.

    If the recogniser reports the ``words`` in each pause, they count as well, from the next window or call of
    ``words_told`` on:

    - If the words are unfinished, the turn ends after ``silence_duration_ms``, whatever the judge says.
    - If they are a whole sentence, it ends sooner where the judge is not sure: after ``whole_silence_ms``.
    - While they are not known, it does not end before LATE_WORDS_WINDOWS, as no answer could begin before they are.
    - If the speaker dictates in groups, and has paused in the turn, it does not end before ``whole_silence_ms``,
      however sure the judge is.

    Where the judge alone does not decide, an end before ``silence_duration_ms`` needs a pause half as long again as the
    longest one before.

    If a far sound (another speaker, a television) fills most of the pause, neither the judge nor the words tell
    anything about the speaker: half of ``whole_silence_ms`` then ends the turn.

    ``breaths``: ``feed`` also reports pauses after which the speaker will probably continue (SpeechBreath).
    """

    def __init__(
        self,
        threshold: float = 0.5,
        silence_duration_ms: float = 480,
        *,
        bar: StartBar = ORDINARY_BAR,
        sure: float | None = None,
        words: PauseWords = _NO_WORDS,
        whole_silence_ms: float = sys.maxsize,
        breaths: bool = False,
    ) -> None:
        if not 0 < threshold < 1:
            raise ValueError("threshold must be between 0 and 1")
        self.threshold = threshold
        #: The condition for the next turn to begin.
        self.bar = bar
        self.silence_threshold = max(LOWEST_SILENCE_THRESHOLD, threshold - HYSTERESIS)
        self.silence_windows = max(1, int(silence_duration_ms // WINDOW_MS))
        self.speaking = False
        #: During a turn, the number of silent windows since the last window of speech.
        self.silent_windows = 0
        #: The number of windows processed so far.
        self.windows = 0
        self._recent: deque[float] = deque(maxlen=MAX_START_SPAN)
        # The judge is not asked if its answer would come too late.
        self._sure = sure if self.silence_windows > FINISHED_WINDOWS else None
        #: The judge's answer about this pause; None without one.
        self._answered: float | None = None
        self._words = words
        #: Whether a SpeechBreath is told.
        self._tells_breaths = breaths
        self._whole_windows = max(1, int(whole_silence_ms // WINDOW_MS))
        #: How often words had been told when the current pause began.
        self._told_before = 0
        #: The longest pause within the turn, in windows, if it is as long as a breath.
        self._breath = 0
        #: The number of windows of the current pause in which somebody else is heard.
        self._beside = 0
        #: The number of the window up to which the bar is MEASURED_BAR, where it is measured.
        self._wary_until = 0
        #: Measures the current turn, if it began by a measured bar.
        self.meter: OnsetMeter | None = None

    @property
    def audio_ms(self) -> int:
        """The duration of the windows processed so far, in milliseconds."""
        return self.windows * WINDOW_MS

    def demand(self, bar: StartBar) -> None:
        """Set the condition for the start of turns, from the next window on."""
        self.bar = bar

    def feed(self, probability: float, *, beside: bool = False, soft: bool = False) -> TurnEvent | None:
        """Process the next window; return the event that it causes, or None.

        ``beside``: the window is a far sound, such as another speaker; ``soft``: the turn is much softer than the
        speaker was before, so its sound does not count as clear.
        """
        self.windows += 1
        self._beside = (self._beside if self.silent_windows else 0) + beside
        return self._while_speaking(probability, soft=soft) if self.speaking else self._while_silent(probability)

    def needs_answer(self, probability: float) -> bool:
        """Return whether the last SpeechPause must be answered before a window with this probability is fed."""
        if self._sure is None or not self.speaking or self._answered is not None:
            return False
        return self.silent_windows + 1 >= FINISHED_WINDOWS and not self._goes_on(probability)

    def answer(self, probability: float) -> None:
        """Answer the last SpeechPause with the probability that the speaker has finished."""
        self._answered = probability

    def words_told(self) -> SpeechOffset | None:
        """Return the end of the turn if words that were reported since the last window end it; None if it goes on."""
        if not self.silent_windows or self.silent_windows < self._needed_windows():
            return None
        return self._ended()

    def end_turn(self) -> None:
        """End the current turn for another reason, such as a length limit; the next window may begin a new one."""
        self.speaking = False
        self.silent_windows = 0
        self._answered = None
        self._breath = 0
        self.meter = None
        self._recent.clear()

    def _while_silent(self, probability: float) -> SpeechOnset | None:
        self._recent.append(probability)
        bar = self.bar
        if bar.measured and self.windows <= self._wary_until:
            bar = MEASURED_BAR
        level = max(self.threshold, min(HIGHEST_RAISED_THRESHOLD, self.threshold + bar.margin))
        if probability <= level:
            return None
        above = [recent > level for recent in self._recent][-bar.span :]
        if sum(above) < bar.windows:
            return None
        first = self.windows - len(above) + above.index(True)
        recent = tuple(self._recent)
        self.end_turn()
        self.speaking = True
        if bar.measured:
            self.meter = OnsetMeter(
                recent,
                voiced=self.windows - first,
                began=first,
                level=min(HIGHEST_RAISED_THRESHOLD, self.threshold + CLEAR_MARGIN),
                quiet_windows=max(1, min(QUIET_WINDOWS, self.silence_windows - 1)),
            )
        return SpeechOnset(first * WINDOW_MS, self.audio_ms, bar.measured)

    def _while_speaking(self, probability: float, *, soft: bool) -> TurnEvent | None:
        event = self._paused_or_ended(probability)
        if self.meter is None or event is not None:
            return event
        measured = self.meter.feed(probability, silent=self.silent_windows, windows=self.windows)
        if measured is not None and soft:
            measured = replace(measured, clear=False)
        if isinstance(measured, SpeechLasts) and not measured.clear:
            self.end_turn()
            self._wary_until = self.windows + WARY_WINDOWS
        return measured

    def _paused_or_ended(self, probability: float) -> SpeechPause | SpeechBreath | SpeechOffset | None:
        if self._goes_on(probability):
            if self.silent_windows >= BREATH_WINDOWS:
                self._breath = max(self._breath, self.silent_windows)
            self.silent_windows = 0
            self._answered = None
            return None
        self.silent_windows += 1
        if self.silent_windows == 1:
            self._told_before = self._words.told
        if self.silent_windows >= self._needed_windows():
            return self._ended()
        if self._sure is not None and self.silent_windows == ASKED_WINDOWS:
            return SpeechPause(self.audio_ms)
        return SpeechBreath(self.audio_ms) if self._takes_breath else None

    def _ended(self) -> SpeechOffset:
        ended = (self.windows - self.silent_windows) * WINDOW_MS
        self.end_turn()
        return SpeechOffset(ended, self.audio_ms)

    @property
    def _takes_breath(self) -> bool:
        """Whether a SpeechBreath is due. It never is in a measured turn, which is one over an answer."""
        if not self._tells_breaths or self.silent_windows != HEARD_BREATH_WINDOWS or self.meter is not None:
            return False
        return self._answered is not None and self._needed_windows() == self.silence_windows

    def _needed_windows(self) -> int:
        """Return the number of silent windows after which the turn ends, if nothing more becomes known."""
        longest, answered, words = self.silence_windows, self._answered, self._words
        if self.silent_windows >= longest or self._sure is None or answered is None:
            return longest
        if 2 * self._beside > self.silent_windows:
            return min(longest, self._whole_windows // 2)
        is_told = words.expected and words.told != self._told_before
        unfinished = words.unfinished if is_told else Unfinished.PERHAPS
        if unfinished is Unfinished.YES:
            return longest
        if answered <= LIKELY:
            needed, breath = self._whole_windows if unfinished is Unfinished.NO else longest, self._breath
        elif words.expected and not is_told:
            needed, breath = LATE_WORDS_WINDOWS, self._breath
        elif words.in_groups and self._breath:
            needed, breath = self._whole_windows, self._breath
        elif answered > self._sure:
            needed, breath = FINISHED_WINDOWS, 0
        else:
            needed, breath = WHOLE_WINDOWS if unfinished is Unfinished.NO else LIKELY_WINDOWS, self._breath
        return min(longest, max(needed, breath * 3 // 2))

    def _goes_on(self, probability: float) -> bool:
        """Return whether the next window of a turn counts as speech.

        Between the two thresholds speech continues, but only a window above the upper one resets the count of silent
        windows: otherwise a breath would keep the turn open.
        """
        return probability > (self.silence_threshold if self.silent_windows == 0 else self.threshold)


class PrefixPadding:
    """A buffer of the last ``padding_ms`` of a stream: a turn includes them, as its start is detected with a delay."""

    def __init__(self, padding_ms: int) -> None:
        self.capacity = padding_ms * SAMPLE_RATE // 1000
        self._blocks: deque[Samples] = deque()
        self._held = 0

    def push(self, samples: Samples) -> None:
        """Add samples and discard those older than the padding."""
        self._blocks.append(samples)
        self._held += len(samples)
        while self._blocks and self._held - len(self._blocks[0]) >= self.capacity:
            self._held -= len(self._blocks.popleft())

    def take(self) -> Samples:
        """Remove and return the padding, oldest sample first."""
        kept: Samples = np.concatenate([*self._blocks, np.empty(0, np.float32)])
        self._blocks.clear()
        self._held = 0
        return kept[max(0, len(kept) - self.capacity) :]


# Streams of any format

T = TypeVar("T")

#: The samples of a piece that are decoded and judged at a time: a second, so that no stream occupies a thread for long,
#: however much audio its bytes contain.
SLICE_SAMPLES: Final = SAMPLE_RATE

_LOOK_BACK: Final = MAX_START_SPAN * WINDOW_SAMPLES


#: Asks the judge how probable it is that the speaker of a turn, whose end is a pause, has finished. Neither raises nor
#: waits.
AskJudge: TypeAlias = Callable[[Samples], Future[float]]


@dataclass(frozen=True, slots=True)
class Watched:
    """The result of a SpeechWatch for one piece of the stream, or a slice of it.

    ``samples`` is the piece or slice at 16 kHz, and begins at ``start_ms``. The stream is judged up to ``judged_ms``;
    the rest is less than a window, or waits until the judge has answered ``question``, after which the caller calls
    ``SpeechWatch.go_on``. ``pausing``: a turn is open, but silent at the end of the judged part. ``more``: the piece
    has further slices; the next StreamPiece must have no data.
    """

    events: tuple[TurnEvent, ...]
    start_ms: float
    judged_ms: int
    samples: Samples
    pausing: bool
    question: Future[float] | None = None
    more: bool = False
    #: The error about bytes of the piece that were dropped, and the offset in the piece at which their chunk begins.
    left_out: OmniError | None = None
    left_out_at: int = 0
    #: How long the sound of a measured turn is voiced so far, and whether it is clear.
    voiced_ms: int = 0
    clear: bool = False

    @property
    def rest_ms(self) -> float:
        """The milliseconds at the end of the stream that are not judged yet."""
        return self.start_ms + len(self.samples) * 1000 / SAMPLE_RATE - self.judged_ms


@dataclass(frozen=True, slots=True)
class _Decoded:
    """A decoded piece at 16 kHz, which begins at ``start_ms``, and the samples that the detector has to process for it.

    ``unjudged`` is ``samples``, after any that the decoder of the previous format held back. ``detected`` are the
    samples for the detector: ``unjudged``, without noise if it is suppressed.
    """

    start_ms: float
    samples: Samples
    unjudged: Samples
    detected: Samples
    more: bool
    left_out: OmniError | None
    left_out_at: int


class SpeechWatch:
    """Decodes a stream, runs voice activity detection on it, and reports starts and ends of speech.

    A turn ends after ``silence_duration_ms`` of silence. With a ``judge`` it ends sooner if the speaker has likely
    finished, and soonest if the probability of that is above ``sure``. The recogniser's reports on the ``words`` count
    as well; for these, ``whole_silence_ms`` and ``breaths`` see TurnDetector. A turn also ends if its sound continues
    but the recogniser finds no more words. ``echo`` removes the echo of the client's loudspeaker from all samples, and
    ``noise`` the noise from the samples that the detector gets. For use by one thread at a time.
    """

    def __init__(
        self,
        detector: SpeechDetector,
        *,
        threshold: float,
        silence_duration_ms: float,
        judge: AskJudge | None = None,
        sure: float = SURE,
        words: PauseWords = _NO_WORDS,
        whole_silence_ms: float = sys.maxsize,
        breaths: bool = False,
        echo: OwnEcho | None = None,
        noise: NoiseSuppressor | None = None,
    ) -> None:
        self.detector = detector
        self._echo = echo
        self._noise = noise
        #: What the client plays as the current piece ends, and whether the input ends then.
        self._playing: Playing | None = None
        self._ends = False
        self._turns = TurnDetector(
            threshold,
            max(0, silence_duration_ms - DETECTOR_LAG_MS),
            sure=None if judge is None else sure,
            words=words,
            whole_silence_ms=max(0, whole_silence_ms - DETECTOR_LAG_MS),
            breaths=breaths,
        )
        self._windows = _Windows(self._turns, words)
        self._pauses = None if judge is None else _Pauses(judge, self._turns)
        #: The latest sound, while turns begin by a measured bar.
        self._recent: RecentSamples[np.float32] | None = None
        self._source: AudioFormat | None = None
        self._decoder: AudioDecoder | None = None
        #: The length of the stream so far, in samples at 16 kHz.
        self._samples = 0
        #: The rest of the current piece: the part that is decoded already, and the part that is not.
        self._block: Samples | None = None
        self._blocks: Iterator[Samples] = iter(())
        #: The error about dropped bytes of the slice, and the offset in the piece at which their chunk begins.
        self._left_out: OmniError | None = None
        self._left_out_at = 0

    def hear(
        self,
        data: bytes,
        source: AudioFormat,
        bar: StartBar,
        *,
        borders: Sequence[int] = (0,),
        ends: bool = False,
    ) -> Watched:
        """Process the next piece of the stream as a whole; a StreamPiece processes it in slices.

        ``bar`` applies from the first window of the piece. ``borders`` are the offsets in ``data`` at which chunks of
        the client begin. ``ends``: the input ends after the piece, so the decoder returns what it still holds. A
        ``source`` that differs from the last one is decoded as a new file that continues the stream. Raises
        UnsupportedFormat for input that cannot be decoded.
        """
        decoded = self._decode(data, source, borders, ends, most=sys.maxsize)
        return self._judge(decoded, self.detector.process(decoded.detected), bar)

    def go_on(self) -> Watched:
        """Process the windows that waited for the judge, which has answered ``question``. Needs no worker thread."""
        return self._watched(self._samples * 1000 / SAMPLE_RATE, NO_SAMPLES)

    def words_told(self) -> Watched | None:
        """Return the end of the turn if the recogniser's new words end it; None if the turn goes on.

        No worker thread may use this SpeechWatch meanwhile.
        """
        if (offset := self._windows.words_told()) is None:
            return None
        if self._pauses is not None:
            self._pauses.note(offset)
        return Watched((offset,), self._samples * 1000 / SAMPLE_RATE, self._turns.audio_ms, NO_SAMPLES, pausing=False)

    def close(self) -> None:
        """End the stream, and release its decoder."""
        if self._decoder is not None:
            self._decoder.close()

    def _decode(
        self,
        data: bytes,
        source: AudioFormat,
        borders: Sequence[int],
        ends: bool,
        *,
        most: int = SLICE_SAMPLES,
        playing: Playing | None = None,
    ) -> _Decoded:
        self._playing, self._ends = playing, ends
        held: Samples | None = None
        if self._decoder is None or source != self._source:
            if self._decoder is not None:
                held = self._decoder.flush()
                self._samples += len(held)
            self._decoder, self._source = AudioDecoder(source, sample_rate=SAMPLE_RATE), source
        decoder = self._decoder
        if source.is_raw:
            self._block = decoder.decode(data)
            if ends:
                self._block, self._decoder = np.concatenate((self._block, decoder.flush())), None
        else:
            self._blocks = self._decoded(decoder, data, borders, ends)
        return self._next_slice(held, most=most)

    def _decoded(self, decoder: AudioDecoder, data: bytes, borders: Sequence[int], ends: bool) -> Iterator[Samples]:
        for start, end in pairwise((0, *(border for border in borders if border), len(data))):
            yield from decoder.pieces(data[start:end], begins_chunk=start in borders)
            self._note_stray(decoder, start)
        if ends:
            yield from decoder.last_pieces()
            self._note_stray(decoder, len(data))
            self._decoder = None

    def _note_stray(self, decoder: AudioDecoder, at: int) -> None:
        if (stray := decoder.take_stray()) is not None and self._left_out is None:
            self._left_out, self._left_out_at = stray, at

    def _next_slice(self, held: Samples | None = None, *, most: int = SLICE_SAMPLES) -> _Decoded:
        start_ms = self._samples * 1000 / SAMPLE_RATE
        taken: list[Samples] = []
        room = most
        if self._block is None:
            self._block = next(self._blocks, None)
        while self._block is not None and room:
            taken.append(self._block[:room])
            self._block = self._block[room:] if len(self._block) > room else next(self._blocks, None)
            room -= len(taken[-1])
        samples = taken[0] if len(taken) == 1 else np.concatenate(taken or [NO_SAMPLES])
        if self._echo is not None:
            samples = self._without_echo(self._echo, samples)
        self._samples += len(samples)
        unjudged = samples if held is None else np.concatenate((held, samples))
        detected = unjudged if self._noise is None else self._noise.process(unjudged)
        left_out, self._left_out = self._left_out, None
        return _Decoded(start_ms, samples, unjudged, detected, self._block is not None, left_out, self._left_out_at)

    def _without_echo(self, echo: OwnEcho, samples: Samples) -> Samples:
        if self._playing is None:
            return np.concatenate((echo.rest(), samples))
        samples = echo.clean(samples, self._playing, behind=0 if self._block is None else len(self._block))
        self._playing = replace(self._playing, sent=())
        if self._ends and self._block is None:
            samples = np.concatenate((samples, echo.rest()))
        return samples

    def _judge(self, decoded: _Decoded, probabilities: Sequence[float], bar: StartBar) -> Watched:
        self._turns.demand(bar)
        self._keep(decoded.unjudged, bar)
        if self._pauses is not None:
            self._pauses.hear(decoded.unjudged)
        self._windows.add(decoded.unjudged, probabilities)
        watched = self._watched(decoded.start_ms, decoded.samples)
        if decoded.left_out is None and not decoded.more:
            return watched
        return replace(watched, more=decoded.more, left_out=decoded.left_out, left_out_at=decoded.left_out_at)

    def _watched(self, start_ms: float, samples: Samples) -> Watched:
        turns, pauses = self._turns, self._pauses
        events: list[TurnEvent] = []
        question: Future[float] | None = None
        for probability in self._windows:
            if pauses is not None and (question := pauses.question_before(probability)) is not None:
                break
            event = self._windows.feed(probability)
            if pauses is not None:
                pauses.note(event)
            if event is not None:
                events.append(event)
        if pauses is not None:
            pauses.forget()
        heard = tuple(events) if self._recent is None else tuple(map(self._with_probability, events))
        watched = Watched(heard, start_ms, turns.audio_ms, samples, turns.silent_windows > 0, question)
        meter = turns.meter
        return (
            watched
            if meter is None
            else replace(watched, voiced_ms=meter.voiced_ms, clear=meter.clear and not self._windows.soft)
        )

    def start_afresh(self) -> None:
        """End the current turn: the next windows may begin a new one."""
        self._turns.end_turn()
        if self._pauses is not None:
            self._pauses.forget_question()

    def _keep(self, samples: Samples, bar: StartBar) -> None:
        """Keep the samples for ``backchannel_probability``, while a sound over an answer is or may be measured."""
        if not bar.measured and self._turns.meter is None:
            self._recent = None
            return
        if self._recent is None:
            self._recent = RecentSamples(np.float32, first=self._samples - len(samples))
        self._recent.add(samples)
        self._recent.forget(self._samples - KEPT_SOUND)

    def _with_probability(self, event: TurnEvent) -> TurnEvent:
        if not isinstance(event, SpeechLull) or self._recent is None or event.voiced_ms > JUDGED_MS:
            return event
        return replace(event, probability=backchannel_probability(sound_of(event, self._recent)))


class _Windows:
    """A queue of the windows that the TurnDetector has to process, with their probabilities of being the speaker's.

    A window that must not be processed before the judge has answered waits here.
    """

    def __init__(self, turns: TurnDetector, words: PauseWords) -> None:
        self._turns = turns
        self._words = words
        self._near = NearVoice()
        #: Whether ``words`` are still those of a turn that was given up, as the next one has begun only in this thread.
        self._gave_up = words.stalled
        #: The samples after the last whole window.
        self._rest: Samples = NO_SAMPLES
        #: The detector's probability and the power of each.
        self._waiting: deque[tuple[float, float]] = deque()
        #: The probability of the next window, if NearVoice has judged it.
        self._next: float | None = None

    @property
    def soft(self) -> bool:
        """Whether the turn is much softer than the speaker was before the turn."""
        return self._near.soft

    def add(self, samples: Samples, probabilities: Sequence[float]) -> None:
        """Add the next samples of the stream, with the detector's probabilities for the windows that they complete."""
        heard = np.concatenate((self._rest, samples))
        self._rest = heard[len(probabilities) * WINDOW_SAMPLES :].copy()
        self._waiting.extend(zip(probabilities, window_powers(heard), strict=False))

    def __iter__(self) -> Iterator[float]:
        """Yield the probability of the next window; the same window is yielded again until ``feed`` is called."""
        while self._waiting:
            if self._next is None:
                probability, power = self._waiting[0]
                turns = self._turns
                self._next = self._near.judge(
                    probability, power, speaking=turns.speaking, only_near=turns.bar.only_near
                )
            yield self._next

    def feed(self, probability: float) -> TurnEvent | None:
        """Pass the next window to the TurnDetector, and return the event that it causes, or None."""
        self._waiting.popleft()
        self._next = None
        event = self._turns.feed(probability, beside=self._near.far, soft=self._near.soft)
        if isinstance(event, SpeechLasts | SpeechLull) and self._near.soft:
            self._near.give_up()
        elif isinstance(event, SpeechOffset):
            self._note_end()
        if event is not None or not self._turns.speaking:
            return event
        stalled = self._words.stalled
        gives_up, self._gave_up = stalled and not self._gave_up, stalled
        if not gives_up:
            return None
        self._near.give_up()
        self._turns.end_turn()
        return SpeechOffset(self._turns.audio_ms, self._turns.audio_ms)

    def words_told(self) -> SpeechOffset | None:
        """Call ``TurnDetector.words_told``. While windows wait, return None: the words count when these are fed."""
        offset = None if self._waiting else self._turns.words_told()
        if offset is not None:
            self._note_end()
        return offset

    def _note_end(self) -> None:
        if self._near.far:
            self._near.end_beside()


class _Pauses:
    """Asks the judge about pauses.

    It keeps the audio that a question would include, in 16 bits: at most ``HEARD_SEC`` seconds during a turn, and
    otherwise a fraction of a second.
    """

    def __init__(self, ask: AskJudge, turns: TurnDetector) -> None:
        self._ask = ask
        self._turns = turns
        self._question: Future[float] | None = None
        #: The index in the stream of the sample at which a question about the current turn begins.
        self._turn_began = 0
        self._heard = RecentSamples(np.int16)

    def hear(self, samples: Samples) -> None:
        """Add the next samples of the stream."""
        self._heard.add(pcm16_from_samples(samples))

    def question_before(self, probability: float) -> Future[float] | None:
        """Return the question that must be answered before a window with this probability is fed; None without one."""
        if self._turns.needs_answer(probability):
            assert self._question is not None
            if not self._question.done():
                return self._question
            self._turns.answer(_answer_to(self._question))
        return None

    def note(self, event: TurnEvent | None) -> None:
        """Ask or withdraw a question after a window was fed, which caused ``event``."""
        if self._turns.silent_windows == 0:  # the speaker has continued, or the turn is over
            self.forget_question()
        match event:
            case SpeechOnset():
                self._turn_began = max(0, event.audio_ms * SAMPLE_RATE // 1000 - HEARD_BEFORE)
            case SpeechPause():
                end = self._turns.windows * WINDOW_SAMPLES
                heard = self._heard.between(max(self._turn_began, end - HEARD_SAMPLES), end)
                self._question = self._ask(samples_from_pcm16(heard))

    def forget_question(self) -> None:
        """Withdraw the question about the current pause, if there is one."""
        if self._question is not None:
            self._question.cancel()
            self._question = None

    def forget(self) -> None:
        """Drop the audio that no later question can include."""
        judged = self._turns.windows * WINDOW_SAMPLES
        self._heard.forget(judged - (HEARD_SAMPLES if self._turns.speaking else HEARD_BEFORE + _LOOK_BACK))


def _answer_to(question: Future[float]) -> float:
    """Return the judge's probability that the speaker has finished; 0 if the judge failed or was closed."""
    try:
        return question.result()
    except (Exception, CancelledError):
        return 0.0


@dataclass(frozen=True, slots=True)
class StreamPiece:
    """The arguments of ``SpeechWatch.hear`` for the next piece of a stream; no ``data``: a slice of the last piece."""

    watch: SpeechWatch
    data: bytes | None
    source: AudioFormat
    bar: StartBar
    borders: Sequence[int] = (0,)
    ends: bool = False
    #: Whether the turn before the piece is over.
    afresh: bool = False
    #: The client's playback at the end of the piece, if its echo is removed.
    playing: Playing | None = None

    @property
    def seconds(self) -> float:
        """The longest duration of the next slice, in seconds."""
        if self.data is None or not self.source.is_raw:
            return SLICE_SAMPLES / SAMPLE_RATE
        return min(SLICE_SAMPLES / SAMPLE_RATE, self.source.duration_ms(len(self.data)) / 1000)

    def decode(self) -> _Decoded:
        if self.afresh:
            self.watch.start_afresh()
        if self.data is None:
            return self.watch._next_slice()
        return self.watch._decode(self.data, self.source, self.borders, self.ends, playing=self.playing)

    def hear(self) -> Watched:
        """Process the next slice of the piece."""
        decoded = self.decode()
        return self.watch._judge(decoded, self.watch.detector.process(decoded.detected), self.bar)


def hear_together(pieces: Sequence[StreamPiece]) -> list[Watched | Exception]:
    """Return, for each piece, the result or the exception of its ``hear``. Each piece is of another stream.

    The detector processes all streams in one batch (``process_together``).
    """
    decoded = [_outcome(piece.decode) for piece in pieces]
    heard = [(piece, each) for piece, each in zip(pieces, decoded, strict=True) if isinstance(each, _Decoded)]
    probabilities: Sequence[list[float] | Exception]
    try:
        probabilities = process_together([(piece.watch.detector, each.detected) for piece, each in heard])
    except Exception:  # each stream gets an exception of its own, or none if it was not at fault
        probabilities = [_outcome(piece.watch.detector.process, each.detected) for piece, each in heard]
    judged = iter(
        found if isinstance(found, Exception) else piece.watch._judge(each, found, piece.bar)
        for (piece, each), found in zip(heard, probabilities, strict=True)
    )
    return [each if isinstance(each, Exception) else next(judged) for each in decoded]


def _outcome(call: Callable[..., T], *arguments: object) -> T | Exception:
    try:
        return call(*arguments)
    except Exception as error:
        return error

"""WebRTC's echo canceller (AEC3) and noise suppressor, by the library pywebrtc-audio, imported on first use.

OwnEcho removes the server's own voice from the audio of a client's microphone, the *near end*. FarEnd supplies the *far
end*: the audio that the client's loudspeaker plays at the same time.

**The far end.** The ledger's playback line, which follows the client's reports, tells which answer the client plays,
and the position in it. Each piece of the near end comes with the position at its end (``Playing``). The near end is
the clock: for each of its samples, one sample of the answer is read, however unevenly the pieces arrive. Reading jumps
to the position of ``Playing`` only if it is further away than the network explains. The far end is read LEAD_MS ahead,
so that the echo is never before it; the echo canceller finds the remaining delay, of up to 300 ms and more.

**Cost.** The echo canceller runs only while the far end has sound, and RUNS_ON_MS longer. Otherwise the near end passes
unchanged. While it runs, the near end is late by DELAY samples and less than a frame; when it starts and stops, no
sample is lost or added.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from omni_ws.audio.codec import AudioDecoder
from omni_ws.audio.pcm import Pcm16, Samples, pcm16_from_samples, samples_from_pcm16
from omni_ws.core.chunks import AudioFormat
from omni_ws.core.ledger import (
    Playing,
    SentPiece,
)
from omni_ws.core.reorder import Lateness

PACKAGE: Final = "pywebrtc_audio"
#: While the loudspeaker sounds, and so long after it, sound of which the canceller leaves less than this is silenced:
#: it is echo that is yet to be learnt, as in the first words of a conversation. A person may be as loud as the echo.
TAIL_MS: Final = 500
LEFT_OVER: Final = 10 ** (-18 / 10)
#: The weight of the energy of 20 ms when the next 20 ms are judged: together they are some 100 ms.
MEMORY: Final = 0.8
#: Quieter samples are no sound.
QUIET: Final = 300

#: The library works in frames of 10 ms, and the server at 16 kHz.
RATE: Final = 16_000
FRAME: Final = RATE // 100
#: The delay of the suppressor's output in samples.
_SUPPRESSOR_DELAY: Final = 96

NoiseReduction: TypeAlias = Literal["near_field", "far_field"]
#: The library's levels: 12 dB for a microphone at the mouth, 18 dB for one in the room.
_LEVELS: Final[dict[NoiseReduction, int]] = {"near_field": 1, "far_field": 2}


@cache
def has_library() -> bool:
    """Whether the library is installed. Cached, since each session asks."""
    return importlib.util.find_spec(PACKAGE) is not None


class EchoRemover:
    """An echo canceller: removes a loudspeaker's sound from a microphone's; both are 16-bit mono at ``sample_rate``.

    It finds the delay of the echo, up to half a second. While the loudspeaker sounds, and TAIL_MS longer, what is left
    is silenced if it has less than the share ``left_over`` of the microphone's energy. For use by one thread at a time.
    Raises ImportError without the library.
    """

    def __init__(self, sample_rate: int, *, left_over: float = LEFT_OVER) -> None:
        import pywebrtc_audio as library

        self._processor: Any = library.AudioProcessor(sample_rate=sample_rate, echo_cancellation=True)
        #: Hum and a constant, which the canceller takes out as well, are no echo.
        self._without_hum: Any = library.AudioProcessor(sample_rate=sample_rate, high_pass_filter=True)
        self._left_over = left_over
        self._samples_per_ms = sample_rate / 1000
        self._tail_ms = 0.0
        #: The recent energy of the microphone's sound, and of the sound that was passed on.
        self._heard = self._kept = 0.0

    def process(self, near: Pcm16, far: Pcm16) -> Pcm16:
        """Return ``near``, of the microphone, without the echo of ``far``, of the loudspeaker; each has 10 or 20 ms."""
        cleaned: Pcm16 = self._processor.process(near, far)
        lasts_ms = len(near) / self._samples_per_ms
        memory = math.pow(MEMORY, lasts_ms / 20)
        self._heard = memory * self._heard + _energy(self._without_hum.process(near))
        self._kept = memory * self._kept + _energy(cleaned)
        self._tail_ms = TAIL_MS if far.max() > QUIET else self._tail_ms - lasts_ms
        if self._tail_ms > 0 and self._kept < self._left_over * self._heard:
            return np.zeros_like(near)
        return cleaned


def _energy(samples: Pcm16) -> float:
    values = samples.astype(np.float32)
    return float(np.dot(values, values))


class NoiseSuppressor:
    """Removes steady noise from audio at 16 kHz. It returns as many samples as it is given, except the last 16 ms.

    For use by one thread at a time. Raises ImportError without the library.
    """

    def __init__(self, kind: NoiseReduction) -> None:
        import pywebrtc_audio as library

        self._processor: Any = library.NoiseSuppressor(sample_rate=RATE, level=_LEVELS[kind])
        self._rest = np.empty(0, np.int16)
        self._skip = _SUPPRESSOR_DELAY

    def process(self, samples: Samples) -> Samples:
        """Return the next samples without noise."""
        waiting = np.concatenate((self._rest, pcm16_from_samples(samples)))
        whole = len(waiting) // FRAME * FRAME
        self._rest = waiting[whole:]
        if not whole:
            return np.empty(0, np.float32)
        quieter: Pcm16 = self._processor.process(waiting[:whole])
        skipped, self._skip = self._skip, max(0, self._skip - whole)
        return samples_from_pcm16(quieter[skipped:])


# The server's own voice.

#: How far the far end is read ahead of the client's assumed position.
LEAD_MS: Final = 50
#: How much later or earlier than that the far end may be read. At the end of the sent audio there is no lead.
LATEST_MS: Final = 60
EARLIEST_MS: Final = 200
#: How long after the last sound the canceller still runs: echo dies away, and the client is behind.
RUNS_ON_MS: Final = 1000
#: The delay of the echo canceller's output in samples.
DELAY: Final = 128
#: The samples of an answer that are kept ahead of playback, and behind it, for a client whose position goes back.
AHEAD: Final = 10 * RATE
BEHIND: Final = 2 * RATE
#: The most answers that are kept: the one that the client plays, and later ones.
MAX_ANSWERS: Final = 4


@dataclass(slots=True)
class _Answer:
    """Sound of an answer at 16 kHz; ``begin`` is the index in the answer of its first sample."""

    audio: AudioFormat
    decoder: AudioDecoder
    begin: int
    #: Where in the answer the next piece begins, in milliseconds.
    next_ms: float
    samples: Pcm16 = field(default_factory=lambda: np.empty(0, np.int16))

    @property
    def end(self) -> int:
        return self.begin + len(self.samples)

    def add(self, piece: SentPiece) -> None:
        """Add the next piece."""
        self.next_ms += piece.audio.duration_ms(len(piece.payload))
        self.samples = np.concatenate((self.samples, pcm16_from_samples(self.decoder.decode(piece.payload))))
        self.forget(0)

    def forget(self, before: int) -> None:
        """Drop the samples before the index ``before``, and the oldest that exceed AHEAD + BEHIND samples in all."""
        dropped = min(len(self.samples), max(0, before - self.begin, len(self.samples) - AHEAD - BEHIND))
        self.samples = self.samples[dropped:]
        self.begin += dropped


class FarEnd:
    """The audio that the client plays, in step with the samples of its microphone."""

    def __init__(self) -> None:
        self._answers: dict[str, _Answer] = {}
        #: The answer that is being read, and the index of its next sample.
        self._answer_id: str | None = None
        self._at = 0
        #: Milliseconds of the microphone so far.
        self._heard_ms = 0.0
        self._lateness = Lateness()

    def take(self, count: int, playing: Playing, *, behind: int = 0) -> Pcm16:
        """Return the far end for the next ``count`` samples of the microphone.

        ``playing`` describes playback at a sample of the microphone ``behind`` samples after these.
        """
        for piece in playing.sent:
            self._add(piece)
        self._heard_ms += count * 1000 / RATE
        late_ms = self._lateness.of(playing.at_ms, self._heard_ms + behind * 1000 / RATE)
        far = np.zeros(count, np.int16)
        if playing.answer_id is None or not playing.sounds:
            return far
        position = playing.position_ms - late_ms + LEAD_MS
        start = round(position * RATE / 1000) - behind - count
        if playing.answer_id != self._answer_id:
            self._answer_id, self._at = playing.answer_id, start
        elif playing.moves and not -LATEST_MS <= (self._at - start) * 1000 / RATE <= EARLIEST_MS:
            self._at = start
        answer = self._answers.get(playing.answer_id)
        if answer is not None:
            self._read(answer, far)
        return far

    def _read(self, answer: _Answer, far: Pcm16) -> None:
        """Fill ``far`` with the next samples of ``answer``, as far as they are kept."""
        end = min(self._at + len(far), answer.end)
        begin = max(self._at, answer.begin)
        if begin < end:
            far[begin - self._at : end - self._at] = answer.samples[begin - answer.begin : end - answer.begin]
        self._at = max(self._at, end)
        answer.forget(self._at - BEHIND)

    def _add(self, piece: SentPiece) -> None:
        answer = self._answers.get(piece.answer_id)
        if answer is None or answer.audio != piece.audio or abs(answer.next_ms - piece.start_ms) > 1:
            answer = _Answer(
                piece.audio,
                AudioDecoder(piece.audio, sample_rate=RATE),
                round(piece.start_ms * RATE / 1000),
                piece.start_ms,
            )
            self._answers[piece.answer_id] = answer
        answer.add(piece)
        while len(self._answers) > MAX_ANSWERS:
            del self._answers[next(iter(self._answers))]


class OwnEcho:
    """Removes the echo of the server's own audio from the audio of one microphone, at 16 kHz. See the module.

    For use by one thread at a time. Raises ImportError without the library.
    """

    def __init__(self) -> None:
        self._far_end = FarEnd()
        self._remover = EchoRemover(RATE)
        #: The number of samples for which the echo canceller still runs; 0: it does not run.
        self._left = 0
        #: The microphone's samples that are not returned yet, and the far end that the canceller has not taken yet.
        self._held = np.empty(0, np.int16)
        self._far = np.empty(0, np.int16)
        #: The number of samples of the canceller's next output that belong to input from before it last stopped.
        self._stale = DELAY

    def clean(self, near: Samples, playing: Playing, *, behind: int = 0) -> Samples:
        """Return the next samples of the microphone without the echo, as far as they are ready.

        ``playing`` describes playback at the sample ``behind`` samples after ``near``.
        """
        far = self._far_end.take(len(near), playing, behind=behind)
        self._left = RUNS_ON_MS * RATE // 1000 if far.any() else max(0, self._left - len(near))
        if not self._left:
            return near if not len(self._held) else np.concatenate((self.rest(), near))
        self._held = np.concatenate((self._held, pcm16_from_samples(near)))
        self._far = np.concatenate((self._far, far))
        whole = len(self._far) // FRAME * FRAME
        first = len(self._held) - len(self._far)
        cleaned = [
            self._remover.process(self._held[first + begin : first + begin + FRAME], self._far[begin : begin + FRAME])
            for begin in range(0, whole, FRAME)
        ]
        self._far = self._far[whole:]
        stale, self._stale = self._stale, max(0, self._stale - whole)
        passed = np.concatenate([np.empty(0, np.int16), *cleaned])[stale:]
        self._held = self._held[len(passed) :]
        return samples_from_pcm16(passed)

    def rest(self) -> Samples:
        """Return the samples that were held back, unchanged, and begin anew with the next ones."""
        rest = samples_from_pcm16(self._held)
        self._held = self._far = np.empty(0, np.int16)
        self._stale = DELAY
        return rest

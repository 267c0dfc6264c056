"""Rows of the table without a server, in the time of the audio: who is let finish, and what stops an answer.

The detector, the two models and the words decide as in the server. The text of a pause is known so many milliseconds
after the recogniser was asked, however busy the machine is. Over an answer all words are known before the verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import numpy as np

from benchmarks.manners.rows import Figure, quantiles, share
from benchmarks.manners.stimuli import RATE, Plan, Planned, Stimulus, noises_of_the_body
from benchmarks.turn_ends import Judge, smart_turn_file
from benchmarks.turn_words import Judged, TextsOf, Turn, events_in, judged
from omni_ws.audio.pcm import Samples
from omni_ws.audio.smart_turn import SmartTurn
from omni_ws.audio.sound_levels import (
    SpeechLasts,
    SpeechLull,
)
from omni_ws.audio.speech_watch import UNCERTAIN_BAR, SpeechWatch
from omni_ws.audio.vad import SpeechDetector
from omni_ws.caller.live_caller import room_noise
from omni_ws.core.chunks import other_readings
from omni_ws.engine.asr.whisper import WhisperRecogniser
from omni_ws.service.conversation.onsets import Verdict
from omni_ws.service.conversation.onsets import judged as judged_over_an_answer
from omni_ws.weights import weights_cache
from omni_ws.wire.session_config import TurnDetectionConfig

#: What is heard before a stimulus, and behind it.
_BEFORE_MS: Final = 500
_AFTER_MS: Final = 3000
_TURNS: Final = TurnDetectionConfig(type="semantic_vad", eagerness="auto")


@dataclass
class AudioTimeBench:
    """The parts of a server that judge, and the notes of what did not go as it should."""

    plan: Plan
    delay_ms: float
    one_reading: bool = False
    notes: list[str] = field(default_factory=list)

    def __enter__(self) -> AudioTimeBench:
        self._recogniser = WhisperRecogniser(workers=1)
        self._recogniser.load()
        self._texts = TextsOf(self._recogniser, delay_ms=self.delay_ms, one_reading=self.one_reading)
        return self

    def __exit__(self, *_: object) -> None:
        self._recogniser.close()

    @cached_property
    def _judge(self) -> Judge:
        return Judge(SmartTurn(smart_turn_file(weights_cache())))

    def said(self, row: str, planned: Sequence[Planned]) -> list[Judged]:
        """Where turns end in which something is said to a session that rests."""
        found = []
        for stimulus in (one.make() for one in planned):
            gaps = tuple((begin + _BEFORE_MS, end + _BEFORE_MS) for begin, end in stimulus.gaps)
            turn = Turn(stimulus.name, _in_a_room(stimulus), gaps, stimulus.end_ms + _BEFORE_MS)
            told = self._texts(turn.samples, self._recogniser.limits)
            found.append(one := judged(_TURNS, self._judge.ask, turn, told))
            if one.cut:
                heard = [each.words.text for each in told]
                self.notes.append(f"{row}: {stimulus.name}: cut {one.cut} times; heard {heard}")
        return found

    def over(self, row: str, stimuli: Sequence[Stimulus], *, meant: bool) -> int:
        """How many of the sounds stop an answer; those on which the verdict is wrong are noted."""
        stopped = 0
        for stimulus in stimuli:
            verdict, heard = self._verdict(stimulus)
            stops = verdict is not Verdict.BACKCHANNEL
            stopped += stops
            if stops is not meant:
                self.notes.append(f"{row}: {stimulus.name}: {verdict.value}; heard as {heard!r}")
        return stopped

    def _verdict(self, stimulus: Stimulus) -> tuple[Verdict, str]:
        samples = _in_a_room(stimulus)
        watch = SpeechWatch(SpeechDetector(), threshold=_TURNS.threshold, silence_duration_ms=_TURNS.silence_ms)
        sounds = [one for one in events_in(watch, samples, UNCERTAIN_BAR) if isinstance(one, SpeechLull | SpeechLasts)]
        words = [one.words for one in self._texts(samples, self._recogniser.limits) if one.settled]
        heard = " ".join(one.text for one in words)
        if not sounds or not sounds[0].clear:
            return Verdict.BACKCHANNEL, heard
        lull = next((one for one in sounds if isinstance(one, SpeechLull)), None)
        verdict = judged_over_an_answer(
            heard,
            None if lull is None else lull.probability,
            "en",
            voiced_ms=0 if lull is None else lull.voiced_ms,
            after_question=False,
            others=other_readings(words[0].hearing) if len(words) == 1 else (),
        )
        return verdict, heard


def _in_a_room(stimulus: Stimulus) -> Samples:
    before, after = (np.zeros(ms * RATE // 1000, np.float32) for ms in (_BEFORE_MS, _AFTER_MS))
    samples = np.concatenate([before, stimulus.samples, after])
    room = np.resize(room_noise(10, -70.0, seed=3), len(samples))
    return np.asarray(np.clip(samples + room, -1, 1), np.float32)


def _sentences(bench: AudioTimeBench) -> list[Figure]:
    paused = bench.said("sentence", bench.plan.pauses)
    whole = bench.said("sentence", bench.plan.wholes)
    ended = [one.late_ms for one in whole]
    return [
        Figure(
            "pauses in a sentence that end the turn",
            *share(sum(one.cut > 0 for one in paused), len(paused), target=15),
        ),
        Figure("sentences with a pause: true end → end of the turn", *quantiles([one.late_ms for one in paused])),
        Figure("whole sentences: true end → end of the turn", *quantiles(ended, p50=450, p90=1200)),
        Figure("sentences whose turn never ends", *share(sum(one is None for one in ended), len(whole), target=0)),
    ]


def _dictations(bench: AudioTimeBench) -> list[Figure]:
    found = bench.said("dictation", bench.plan.dictations)
    gaps = sum(len(one.make().gaps) for one in bench.plan.dictations)
    return [
        Figure("dictated items cut", *share(sum(one.cut > 0 for one in found), len(found), target=10)),
        Figure("… gaps that end the turn", *share(sum(one.cut for one in found), gaps, target=10)),
    ]


def _acknowledgements(bench: AudioTimeBench) -> list[Figure]:
    said, noises = [one.make() for one in bench.plan.acknowledgements], noises_of_the_body()
    stopped = bench.over("acknowledgement", said, meant=False)
    coughs = bench.over("noise of the body", noises, meant=False)
    return [
        Figure("acknowledgements that stop the answer for good", *share(stopped, len(said), target=5)),
        Figure("coughs, clicks and breaths that stop it", *share(coughs, len(noises), target=0)),
    ]


def _interruptions(bench: AudioTimeBench) -> list[Figure]:
    said = [one.make() for one in bench.plan.interruptions]
    stopped = bench.over("interruption", said, meant=True)
    return [Figure("real interruptions that stop", *share(stopped, len(said), target=97, least=True))]


#: The rows that need no server.
AUDIO_TIME_ROWS: Final[dict[str, Callable[[AudioTimeBench], list[Figure]]]] = {
    "acknowledgements": _acknowledgements,
    "interruptions": _interruptions,
    "sentences": _sentences,
    "dictations": _dictations,
}

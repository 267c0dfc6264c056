"""How turns end: in a pause, behind a sentence, between the groups of a number, in front of a television."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from benchmarks.manners.stimuli import RATE, Stimulus
from omni_ws.audio.pcm import Samples
from omni_ws.caller.live_caller import LiveCaller
from omni_ws.caller.script import PIECE_MS
from omni_ws.scenarios.speech import spoken_words

#: How long after the true end a turn, and its answer, are waited for.
_END_MS: Final = 6000
_ANSWER_MS: Final = 3000
#: A turn that ended this long before the true end ended in a pause.
_EARLY_MS: Final = 300


@dataclass(frozen=True, slots=True)
class Said:
    """How the server took what was said. Times are in milliseconds behind the true end; None: it never happened."""

    stimulus: Stimulus
    #: How many turns ended in a pause, and how much of an answer was heard before the true end.
    cuts: int
    cut_in_ms: float
    ended_at: float | None
    answered_at: float | None
    transcripts: tuple[str, ...]
    #: The groups of which no word is in a transcript.
    lost: tuple[str, ...]


async def say_sentence(
    talker: LiveCaller, stimulus: Stimulus, *, beside: Samples | None = None, words: bool = False
) -> Said:
    """Say something to a session that rests, and wait for the end of the turn and for the first sound of the answer.

    ``beside`` sounds from 2 s before it on. With ``words`` the transcript is waited for.
    """
    await talker.wait(600)
    if beside is not None:
        talker.sound(beside)
        await talker.wait(2000)
    said = talker.say(stimulus.samples)
    onset, end = said + int(stimulus.onset_ms / PIECE_MS), said + int(stimulus.end_ms / PIECE_MS)

    def ends() -> list[int]:
        """Ticks at which a turn ended, behind the true end."""
        return [one.tick for one in talker.since(said, "stopped") if not _is_early(one.audio_ms, one.tick, end)]

    def sounds() -> bool:
        return talker.now > end and any(talker.speaker.sounding(end, talker.now))

    await talker.until(lambda: talker.now >= end and bool(ends()), stimulus.end_ms + _END_MS)
    answered = await talker.until(sounds, _ANSWER_MS if beside is None else 9000)
    if words:
        await talker.until(lambda: _missing(talker, stimulus, said) == (), 3000)
    speaker = talker.speaker
    cuts = sum(_is_early(one.audio_ms, one.tick, end) for one in talker.since(said, "stopped"))
    first = next((n for n, heard in enumerate(speaker.sounding(end, talker.now)) if heard), None)
    found = Said(
        stimulus,
        cuts=cuts,
        cut_in_ms=speaker.heard_ms(onset, end),
        ended_at=None if not ends() else (ends()[0] - end) * PIECE_MS,
        answered_at=first * PIECE_MS if answered and first is not None else None,
        transcripts=_transcripts(talker, said),
        lost=_missing(talker, stimulus, said),
    )
    talker.quiet()
    await talker.cancel()
    return found


def _is_early(audio_ms: float | None, tick: int, end: int) -> bool:
    """Whether a turn ended in a pause. Its place in the audio tells, however late its frame came."""
    return (tick * PIECE_MS if audio_ms is None else audio_ms) < end * PIECE_MS - _EARLY_MS


def _transcripts(talker: LiveCaller, since: int) -> tuple[str, ...]:
    return tuple(one.text for one in talker.since(since, "transcript") if one.text.strip())


def _missing(talker: LiveCaller, stimulus: Stimulus, since: int) -> tuple[str, ...]:
    """The groups of which the transcripts have nothing, behind the group before.

    A group of digits may be heard as one number or run into the next: its first letters or digits count.
    """
    heard = _letters(" ".join(_transcripts(talker, since)))
    return tuple(group for group in stimulus.groups if not _is_in(group, heard))


def _letters(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", "".join(spoken_words(text)))


def _is_in(group: str, heard: str) -> bool:
    words = spoken_words(group)
    return any(_letters(word) in heard for word in words if _letters(word))


# Sounds without speech


async def hear_alone(talker: LiveCaller, name: str, sound: Samples, *, seconds: float) -> tuple[int, int]:
    """Turns and answers while this is heard and nothing said."""
    begun = talker.now
    talker.sound(sound[: int(seconds * RATE)])
    await talker.wait(seconds * 1000 + 1000)
    return len(talker.since(begun, "started", "confirmed")), len(talker.since(begun, "response"))

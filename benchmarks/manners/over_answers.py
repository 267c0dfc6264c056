"""What is said over an answer: whether it stops, is lowered or goes on, and what a television or its own echo does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.manners.stimuli import RATE, Stimulus
from omni_ws.audio.pcm import Samples
from omni_ws.caller.live_caller import LiveCaller
from omni_ws.caller.script import PIECE_MS

#: The rules tell nothing longer, and nothing with a question in it, behind which "yeah" would be an answer.
STORY: Final = "Count from one to one hundred."
#: How much of an answer is heard before something is said over it.
_BEFORE_MS: Final = 1500
_FIRST_SOUND_MS: Final = 20_000
#: How long after the end of a sound its outcome is waited for; and, where an answer is held, until that is decided.
_AFTER_MS: Final = 2500
_HELD_MS: Final = 12_000
_ANSWER_MS: Final = 6000


@dataclass(frozen=True, slots=True)
class Over:
    """What a sound over an answer led to. Times are in milliseconds from its onset; None: it did not happen."""

    stimulus: Stimulus
    #: The answer ended.
    stopped: bool
    #: A new answer was begun to the sound.
    answered: bool
    ducked_at: float | None
    silent_at: float | None
    #: The longest time without sound, where the answer went on; and how long it was lowered.
    gap_ms: float
    ducked_ms: float
    #: Milliseconds of the answer that were skipped, and played twice.
    lost_ms: float
    repeated_ms: float
    transcript: str = ""

    @property
    def noticed(self) -> bool:
        return self.stopped or self.ducked_at is not None or self.gap_ms > 0


async def begin_answer(talker: LiveCaller, question: str = STORY, *, heard_ms: float = _BEFORE_MS) -> str | None:
    """Let a long answer begin, and hear some of it. Returns its name; None where none came."""
    await talker.cancel()
    await talker.until(lambda: talker.speaker.idle, 2000)
    await talker.wait(300)
    asked = talker.now
    await talker.type(question)
    begun = await talker.until(lambda: talker.speaker.heard_ms(asked, talker.now) >= heard_ms, _FIRST_SOUND_MS)
    place = talker.speaker.position
    return place[0] if begun and place is not None else None


def final_of(talker: LiveCaller, answer: str) -> str | None:
    """Why an answer ended; None: it has had no final."""
    return next((one.text for one in talker.seen if one.kind == "final" and one.name == answer), None)


def is_over(talker: LiveCaller, answer: str) -> bool:
    return final_of(talker, answer) is not None


def was_stopped(talker: LiveCaller, answer: str, since: int) -> bool:
    """Whether an answer was ended before its last sound, since a tick, and not only held."""
    final = final_of(talker, answer)
    if final is None:
        return False
    if final == "cancelled":
        return True
    # All of it had come, and was dropped by the client.
    dropped = [tick for tick, name in talker.silenced if name == answer and tick >= since]
    return bool(dropped) and not talker.speaker.heard_ms(dropped[-1] + 1, talker.now, [answer])


async def say_over(talker: LiveCaller, stimuli: Sequence[Stimulus], *, is_meant: bool) -> list[Over]:
    """Say each over an answer, one after the other; a new answer is asked for where the last one ended.

    ``is_meant``: they are interruptions, so no answer is expected to go on.
    """
    found: list[Over] = []
    for stimulus in stimuli:
        for _ in range(3):
            answer = await _running(talker)
            if answer is None or (one := await _over(talker, answer, stimulus, is_meant=is_meant)) is None:
                continue  # no answer, or it had been told to its end
            found.append(one)
            break
        if talker.closed is not None:
            break
        if is_meant or (found and found[-1].stopped):
            await talker.cancel()
    return found


async def _running(talker: LiveCaller) -> str | None:
    """The answer that plays, or a new one."""
    place = talker.speaker.position
    if place is not None and _goes_on(talker, place[0]):
        await talker.wait(1000)
        if _goes_on(talker, place[0]):
            return place[0]
    return await begin_answer(talker)


def _goes_on(talker: LiveCaller, answer: str) -> bool:
    """Whether more of an answer is to be heard; natively, whether more of it is to come."""
    return not talker.speaker.idle and not (talker.wire.reports and is_over(talker, answer))


async def _over(talker: LiveCaller, answer: str, stimulus: Stimulus, *, is_meant: bool) -> Over | None:
    said = talker.say(stimulus.samples)
    onset = said + int(stimulus.onset_ms / PIECE_MS)
    end = said + int(stimulus.end_ms / PIECE_MS)

    def is_stopped() -> bool:
        return was_stopped(talker, answer, said)

    await talker.until(lambda: is_stopped() and talker.now > end, stimulus.end_ms + _AFTER_MS)
    if not is_over(talker, answer) and talker.speaker.idle:  # the server holds it, and has not decided yet
        await talker.until(lambda: is_over(talker, answer) or not talker.speaker.idle, _HELD_MS)
    stopped = is_stopped()
    if not stopped and is_over(talker, answer) and talker.speaker.idle:
        return None  # it was told to its end
    answered = False
    if stopped:
        answered = await talker.until(lambda: _others(talker, answer, onset) > 0, _ANSWER_MS if not is_meant else 4000)
        await talker.until(lambda: bool(talker.since(onset, "transcript")), 1000)
    speaker, now = talker.speaker, talker.now
    last = max((one.tick for one in speaker.played if one.answer == answer), default=onset)
    ducked = min((one.tick for one in speaker.played if one.tick >= onset and one.ducked), default=None)
    silent = last + 1 if stopped else None
    lost, repeated = speaker.lost_and_repeated_ms(answer)
    return Over(
        stimulus,
        stopped=stopped,
        answered=answered,
        ducked_at=_since(onset, silent if ducked is None else ducked),
        silent_at=_since(onset, silent),
        gap_ms=0 if stopped else speaker.longest_gap_ms(onset, last + 1),
        ducked_ms=speaker.ducked_ms(onset, now),
        lost_ms=lost,
        repeated_ms=repeated,
        transcript=" ".join(one.text for one in talker.since(onset, "transcript")),
    )


def _since(onset: int, tick: int | None) -> float | None:
    return None if tick is None else (tick - onset) * PIECE_MS


def _others(talker: LiveCaller, answer: str, since: int) -> float:
    """How much of other answers was heard."""
    others = {one.answer for one in talker.speaker.played} - {answer}
    return talker.speaker.heard_ms(since, talker.now, others)


# Sounds that go on for long


@dataclass(frozen=True, slots=True)
class Through:
    """How an answer went while something sounded."""

    name: str
    #: It was still heard at the end of the time, or had been told to its end.
    went_on: bool
    stops: int
    false_turns: int
    silent_ms: float
    longest_gap_ms: float
    minutes: float


async def answer_through(talker: LiveCaller, name: str, sound: Samples | None, *, seconds: float) -> Through:
    """Let an answer be told while ``sound`` (or nothing but the loudspeaker's echo) is heard, for these seconds."""
    answer = await begin_answer(talker, heard_ms=300 if sound is None else _BEFORE_MS)
    begun = talker.now
    if sound is not None:
        talker.sound(sound[: int(seconds * RATE)])
    await talker.until(lambda: answer is not None and is_over(talker, answer) and talker.speaker.idle, seconds * 1000)
    now = talker.now
    final = None if answer is None else final_of(talker, answer)
    names = {one.name for one in talker.since(begun, "final")} | ({answer} if answer is not None else set())
    stops = sum(was_stopped(talker, name, begun) for name in names)
    turns = talker.since(begun, "started", "confirmed")
    sounding = talker.speaker.sounding(begun, now)
    told = final in ("stop", "completed")
    went_on = (
        answer is not None
        and not was_stopped(talker, answer, begun)
        and (told or (final is None and any(sounding[-50:])))
    )
    await talker.cancel()
    talker.quiet()
    return Through(
        name,
        went_on=went_on,
        stops=stops,
        false_turns=len(turns),
        silent_ms=PIECE_MS * sum(not one for one in sounding),
        longest_gap_ms=talker.speaker.longest_gap_ms(begun, now),
        minutes=(now - begun) * PIECE_MS / 60_000,
    )

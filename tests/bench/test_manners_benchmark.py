"""The benchmark of manners: what its loudspeaker keeps, and what its talkers find over a real socket."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import numpy as np
import pytest
from support.inline_workers import InlineWorkers, loud
from support.live_server import live_server
from support.scripted_engines import HearingEngine

from benchmarks.manners.over_answers import say_over
from benchmarks.manners.rows import Bench, quantiles, share
from benchmarks.manners.stimuli import VOICES, Plan, Stimulus, groups_of
from benchmarks.manners.turns import say_sentence
from omni_ws.audio.pcm import SampleLayout, samples_from_bytes
from omni_ws.caller.live_caller import (
    SPEAKER_RATE,
    SPEAKER_TICK,
    Echo,
    LiveCaller,
    Loudspeaker,
    NativeWire,
    RealtimeWire,
    SettingsRefused,
    Wire,
)
from omni_ws.caller.script import Target
from omni_ws.core.chunks import FinishReason, Usage
from omni_ws.engine.base import AudioOutput, Finished, TextOutput, TranscriptOutput

#: Loud enough for the detector, which goes by the level alone.
SAID = Stimulus("said", samples_from_bytes(loud(416), SampleLayout.S16), 0, 416)
STORY = [
    TextOutput("Once upon a time there was a lighthouse, and its keeper never slept."),
    *(AudioOutput(np.full(SPEAKER_RATE // 10, 0.1, np.float32), SPEAKER_RATE) for _ in range(80)),
    Finished(FinishReason.STOP, Usage()),
]


def samples(count: int) -> np.ndarray[tuple[int], np.dtype[np.int16]]:
    return np.full(count, 1000, np.int16)


def test_a_loudspeaker_keeps_what_it_played_and_what_was_missing() -> None:
    speaker = Loudspeaker()
    speaker.put("a", samples(2 * SPEAKER_TICK), 0)
    for _ in range(5):
        speaker.tick()
    speaker.put("a", samples(SPEAKER_TICK), 40)
    assert speaker.tick().tolist() == samples(SPEAKER_TICK).tolist()
    assert speaker.sounding(0, 7) == [True, True, False, False, False, True, False]
    assert (speaker.longest_gap_ms(0, 6), speaker.heard_ms(0, 6), speaker.heard_ms(0, 6, ["b"])) == (60, 60, 0)
    assert speaker.lost_and_repeated_ms("a") == (0, 0)
    assert speaker.position == ("a", 60)


def test_a_loudspeaker_tells_what_was_skipped_and_what_came_twice() -> None:
    speaker = Loudspeaker()
    for start_ms in (0, 40, 20):
        speaker.put("a", samples(SPEAKER_TICK), start_ms)
        speaker.tick()
    assert speaker.lost_and_repeated_ms("a") == (20, 20)


def test_a_lowered_loudspeaker_plays_on_and_a_stopped_one_does_not() -> None:
    speaker = Loudspeaker()
    speaker.put("a", samples(3 * SPEAKER_TICK), 0)
    speaker.ducked = True
    assert speaker.tick().max() == 177  # 1000 less 15 dB
    speaker.ducked = False
    assert speaker.tick().max() == 1000
    speaker.stop()
    assert (speaker.tick().max(), speaker.ducked_ms(0, 3), speaker.idle) == (0, 20, True)


@pytest.mark.parametrize(
    ("count", "least", "met"), [(5, False, True), (6, False, False), (95, True, True), (94, True, False)]
)
def test_a_share_is_met_at_its_target_and_not_past_it(count: int, least: bool, met: bool) -> None:
    value, _, verdict = share(count, 100, target=95 if least else 5, least=least)
    assert (value, verdict) == (f"{count} of 100 ({count} %)", met)
    assert share(0, 0, target=5)[2] is None


def test_quantiles_are_compared_each_with_its_own_bound() -> None:
    assert quantiles([100, None, 200, 300], p50=200, p90=280)[2] is True
    assert quantiles([100, 200, 300], p50=199)[2] is False
    assert quantiles([None], p50=1)[2] is None


def test_a_share_of_the_stimuli_is_always_the_same_and_part_of_all() -> None:
    few, again, whole = Plan.of(0.1), Plan.of(0.1), Plan.of(1)
    assert [one.speech for one in few.pauses] == [one.speech for one in again.pauses]
    counts = [len(kind) for kind in (whole.acknowledgements, whole.interruptions, whole.pauses, whole.wholes)]
    assert counts == [85, 88, 60, 24]
    assert len(whole.dictations) == 40
    assert {one.speech for one in few.dictations} <= {one.speech for one in whole.dictations}


def test_other_sentences_and_other_voices_are_none_of_the_usual() -> None:
    plans = [(*plan.pauses, *plan.wholes, *plan.dictations) for plan in (Plan.of(1), Plan.of_others())]
    usual, others = [{tuple(text for _, text in one.speech) for one in plan} for plan in plans]
    assert others
    assert not usual & others
    assert not {voice for one in plans[1] for voice, _ in one.speech} & set(VOICES)


def test_who_goes_on_is_read_with_a_comma() -> None:
    assert groups_of("Set a timer for | ten, | please.") == ["Set a timer for,", "ten,", "please."]


@contextlib.asynccontextmanager
async def bench(engine: HearingEngine, kind: str = "native") -> AsyncIterator[Bench]:
    async with live_server(engine) as server:
        server.app.sessions.speech_workers = InlineWorkers()
        found = Bench(Target.parse(f"ws://127.0.0.1:{server.port}"), Plan.of(0), 0, kind)
        yield found
        assert not found.closed


class SilenceDetected(NativeWire):
    """The model that judges turns is not there."""

    def __init__(self) -> None:
        super().__init__({"type": "server_vad"})


def wire(kind: str) -> Wire:
    return SilenceDetected() if kind == "native" else RealtimeWire({"type": "server_vad"})


@pytest.mark.virtual_clock
@pytest.mark.parametrize("kind", ["native", "default"])
async def test_words_over_an_answer_stop_it_and_are_answered(kind: str) -> None:
    engine = HearingEngine(STORY, heard=[TranscriptOutput("What time is it?"), *STORY])
    async with bench(engine, kind) as found, LiveCaller(found.target, wire(kind)) as talker:
        (over,) = await say_over(talker, [SAID], is_meant=True)
    assert (over.stopped, over.answered, over.transcript) == (True, True, "What time is it?")
    assert over.silent_at is not None
    assert 100 <= over.silent_at <= 416


@pytest.mark.virtual_clock
async def test_a_cough_over_an_answer_makes_a_gap_and_loses_nothing() -> None:
    async with bench(HearingEngine(STORY)) as found, LiveCaller(found.target, wire("native")) as talker:
        (over,) = await say_over(talker, [SAID], is_meant=False)
    assert (over.stopped, over.answered, over.transcript) == (False, False, "")
    assert (over.lost_ms, over.repeated_ms) == (0, 0)
    assert over.gap_ms >= 500  # the silence that ends a turn


@pytest.mark.virtual_clock
async def test_a_turn_that_ends_in_a_pause_is_a_cut() -> None:
    pause = np.zeros(16_000, np.float32)
    whole = Stimulus(
        "paused", np.concatenate([SAID.samples, pause, SAID.samples]), 0, 1832, ((416, 1416),), ("my number", "seven")
    )
    engine = HearingEngine(STORY, heard=[TranscriptOutput("My number is."), *STORY])
    async with bench(engine) as found, LiveCaller(found.target, wire("native")) as talker:
        said = await say_sentence(talker, whole, words=True)
    assert (said.cuts, said.cut_in_ms > 0, said.lost) == (1, True, ("seven",))
    assert said.ended_at is not None
    assert 400 <= said.ended_at <= 700


@pytest.mark.virtual_clock
async def test_an_echo_comes_as_loud_and_as_late_as_it_is_told() -> None:
    async with bench(HearingEngine(STORY)) as found:
        talker = LiveCaller(found.target, wire("native"), echo=Echo(-20.0, 100))
        played = np.concatenate([np.full(SPEAKER_TICK, 20_000, np.int16), np.zeros(9 * SPEAKER_TICK, np.int16)])
        heard = np.concatenate(
            [talker._heard_again(tick, Echo(-20.0, 100)) for tick in played.reshape(10, SPEAKER_TICK)]
        )
    assert np.abs(heard[: 95 * 16]).max() < 0.01
    assert 0.05 < np.abs(heard[100 * 16 : 120 * 16]).max() < 0.12


@pytest.mark.virtual_clock
async def test_a_server_that_does_not_take_a_setting_is_told_by_its_refusal() -> None:
    async with bench(HearingEngine(STORY)) as found:
        with pytest.raises(SettingsRefused, match="task"):
            async with LiveCaller(found.target, NativeWire({"type": "server_vad"}, {"task": "sing"})):
                pass

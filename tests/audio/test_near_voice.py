"""The near voice: what is far below it counts as no speech."""

from __future__ import annotations

import numpy as np
import pytest

from omni_ws.audio.sound_levels import (
    FADING_WINDOWS,
    FALL_DB,
    FALLEN_MS,
    FAR_DB,
    SILENT_DB,
    FallingVoice,
    NearVoice,
    window_powers,
)
from omni_ws.audio.vad import WINDOW_MS, WINDOW_SAMPLES
from omni_ws.core.chunks import AudioEncoding, AudioFormat


def heard(near: NearVoice, level: float, *, ms: float, speaking: bool = True, only_near: bool = False) -> list[bool]:
    """Whether each window of sound at this level counts as speech."""
    windows, power = int(ms // WINDOW_MS), 10 ** (level / 10)
    return [near.judge(0.9, power, speaking=speaking, only_near=only_near) > 0 for _ in range(windows)]


def spoken(level: float = -20.0) -> NearVoice:
    near = NearVoice()
    assert all(heard(near, level, ms=3200))
    return near


def test_powers_of_whole_windows() -> None:
    loud = np.full(WINDOW_SAMPLES, 0.1, np.float32)
    samples = np.concatenate([loud, np.zeros(WINDOW_SAMPLES, np.float32), loud[:-1]])
    assert 10 * np.log10(window_powers(samples)) == pytest.approx([-20, SILENT_DB])
    assert 10 * np.log10(window_powers(np.full(WINDOW_SAMPLES, np.nan, np.float32))) == [SILENT_DB]
    assert window_powers(samples[:1]) == []


@pytest.mark.parametrize(("below", "counts"), [(FAR_DB, True), (FAR_DB + 0.3, False)])
def test_so_far_below_the_voice_a_sound_keeps_no_turn_open(below: float, counts: bool) -> None:
    near = spoken()
    kept = heard(near, -20 - below, ms=960)
    # A voice has gaps of a quarter of a second, and fades for longer.
    assert kept[: 7 + FADING_WINDOWS] == [True] * (7 + FADING_WINDOWS)
    assert kept[7 + FADING_WINDOWS] is counts


def test_over_an_answer_a_voice_does_not_fade() -> None:
    near = spoken()
    kept = heard(near, -20 - FAR_DB - 0.3, ms=640, only_near=True)
    assert kept == [True] * 7 + [False] * 13


def test_a_voice_that_fades_and_comes_back_fades_anew() -> None:
    near = spoken()
    for _ in range(3):
        assert all(heard(near, -20 - FAR_DB - 1, ms=(7 + FADING_WINDOWS) * WINDOW_MS))
        assert all(heard(near, -20, ms=320))


@pytest.mark.parametrize(("below", "is_far"), [(FAR_DB - 3.1, False), (FAR_DB - 2.9, True)])
def test_behind_a_far_sound_the_voice_is_3_db_louder(below: float, is_far: bool) -> None:
    near = spoken()
    heard(near, -20 - FAR_DB - 1, ms=960)
    assert near.far
    assert heard(near, -20 - below, ms=640)[-1] is not is_far
    assert near.far is is_far


@pytest.mark.parametrize(("below", "soft"), [(FAR_DB - 0.1, False), (FAR_DB + 0.1, True)])
def test_a_turn_that_is_softer_than_those_before_is_soft(below: float, soft: bool) -> None:
    near = spoken()
    assert not near.soft
    heard(near, SILENT_DB, ms=320, speaking=False)
    heard(near, -20 - below, ms=128, speaking=False)
    heard(near, -20 - below, ms=800)
    assert near.soft is soft
    heard(near, SILENT_DB, ms=320, speaking=False)
    assert not near.soft


@pytest.mark.parametrize(("level", "soft"), [(-27.5, False), (-27.7, True)])
def test_the_windows_that_open_a_turn_are_part_of_it(level: float, soft: bool) -> None:
    """Four of them, here in front of seven of which an echo canceller has left nothing."""
    near = spoken(-20)
    heard(near, SILENT_DB, ms=320, speaking=False)
    heard(near, level, ms=4 * WINDOW_MS, speaking=False)
    assert all(heard(near, -90, ms=7 * WINDOW_MS))
    assert near.soft is soft


@pytest.mark.parametrize(("level", "opens"), [(-36.0, False), (-24.0, True)], ids=["the same", "the voice"])
def test_what_is_heard_behind_a_turn_is_background(level: float, opens: bool) -> None:
    near = spoken()
    heard(near, -36, ms=960)
    near.end_beside()
    assert any(heard(near, level, ms=1600, speaking=False)) is opens


@pytest.mark.parametrize(("below", "counts"), [(FAR_DB, True), (FAR_DB + 0.01, False)])
def test_nor_does_it_open_one_over_an_answer(below: float, counts: bool) -> None:
    near = spoken()
    heard(near, SILENT_DB, ms=320, speaking=False)
    assert all(heard(near, -20 - below, ms=640, speaking=False, only_near=False))
    assert all(heard(near, -20 - below, ms=10_000, speaking=False, only_near=True)) is counts


@pytest.mark.parametrize("over_an_answer", [True, False])
def test_what_is_said_over_an_answer_does_not_lower_the_level(over_an_answer: bool) -> None:
    near = spoken(-20)
    for _ in range(4):
        heard(near, SILENT_DB, ms=320, speaking=False)
        heard(near, -28, ms=800, only_near=over_an_answer)
    assert near.level is not None
    assert (near.level == pytest.approx(-20, abs=0.1)) is over_an_answer


def test_before_anything_was_said_all_is_near() -> None:
    assert all(heard(NearVoice(), -60, ms=640, speaking=False, only_near=True))


def test_a_turn_that_begins_softly_is_compared_with_itself() -> None:
    near = spoken()
    heard(near, SILENT_DB, ms=640, speaking=False)
    heard(near, -40, ms=320, speaking=False)
    assert all(heard(near, -40, ms=3200))


def test_a_voice_in_front_of_a_television_ends_where_it_ends() -> None:
    near = NearVoice()
    heard(near, -35, ms=320, speaking=False)
    assert all(heard(near, -35, ms=5000))
    assert all(heard(near, -20, ms=1600))
    assert not any(heard(near, -35, ms=5000)[8 + FADING_WINDOWS :])


def test_half_of_the_difference_is_gone_after_ten_seconds_of_softer_speech() -> None:
    near = spoken(-20)
    for _ in range(2):  # each turn begins softly
        heard(near, SILENT_DB, ms=640, speaking=False)
        heard(near, -40, ms=320, speaking=False)
        heard(near, -40, ms=5000)
    assert near.level == pytest.approx(-30, abs=0.2)


def test_a_bang_does_not_raise_the_level_for_long_speech() -> None:
    near = spoken(-20)
    heard(near, -3, ms=96)
    assert near.level is not None
    assert near.level < -20 + FAR_DB


@pytest.mark.parametrize(
    ("level", "opens"), [(-30.0, False), (-27.1, False), (-26.9, True)], ids=["as before", "little louder", "louder"]
)
def test_what_was_given_up_is_background_until_it_is_louder(level: float, opens: bool) -> None:
    near = spoken(-20)
    heard(near, -30, ms=4000)
    near.give_up()
    assert not any(heard(near, -30, ms=2000, speaking=False))
    assert any(heard(near, level, ms=320, speaking=False)) is opens


@pytest.mark.parametrize(("silent_ms", "opens"), [(448, False), (480, True)])
def test_or_until_it_is_silent(silent_ms: int, opens: bool) -> None:
    near = spoken(-20)
    heard(near, -30, ms=4000)
    near.give_up()
    assert not any(heard(near, -30, ms=64, speaking=False))
    for _ in range(silent_ms // WINDOW_MS):
        near.judge(0.1, 10 ** (-60 / 10), speaking=False, only_near=False)
    assert any(heard(near, -30, ms=32, speaking=False)) is opens


# Where the voice may pause

MONO = AudioFormat()


def chunk(level: float, *, ms: int = 20) -> bytes:
    """Sound at this level, in decibels of full scale."""
    return np.full(16 * ms, round(32768 * 10 ** (level / 20)), "<i2").tobytes()


def fallen(voice: FallingVoice, level: float = -60, *, ms: int = int(FALLEN_MS)) -> bool:
    """Whether the voice falls that was at this level for so long, in frames."""
    return [voice.falls(chunk(level), MONO) for _ in range(ms // 20)][-1]


@pytest.mark.parametrize(("below", "falls"), [(FALL_DB - 0.1, False), (FALL_DB + 0.3, True)])
def test_a_voice_falls_that_is_so_much_softer(below: float, falls: bool) -> None:
    """In FALLEN_MS the level of the voice itself loses a quarter of a decibel."""
    voice = FallingVoice()
    assert not voice.falls(chunk(-20), MONO)
    assert fallen(voice, -20 - below) is falls


@pytest.mark.parametrize(("soft_ms", "falls"), [(100, False), (120, True)])
def test_a_voice_falls_that_has_been_softer_for_so_long(soft_ms: int, falls: bool) -> None:
    voice = FallingVoice()
    voice.falls(chunk(-20), MONO)
    assert fallen(voice, ms=soft_ms) is falls
    assert not voice.falls(chunk(-20), MONO)
    assert fallen(voice, ms=soft_ms) is falls


def test_the_end_of_a_chunk_tells() -> None:
    voice = FallingVoice()
    assert not voice.falls(chunk(-40) + chunk(-20), MONO)
    assert not fallen(voice, ms=100)
    assert voice.falls(chunk(-20) + chunk(-40), MONO)


@pytest.mark.parametrize(("lasted", "falls"), [(1300, True), (1500, False)])
def test_a_voice_that_stays_softer_falls_no_more(lasted: int, falls: bool) -> None:
    """Half of its power is forgotten in 1.4 s: 3 dB."""
    voice = FallingVoice()
    voice.falls(chunk(-20), MONO)
    fallen(voice, ms=lasted)
    assert voice.falls(chunk(-20 - FALL_DB - 3, ms=1), MONO) is falls


def test_what_cannot_be_measured_does_not_fall() -> None:
    """An empty chunk, half a sample, and sound that is no 16-bit samples."""
    voice = FallingVoice()
    assert not voice.falls(b"", MONO)
    assert not voice.falls(b"\0", MONO)
    assert not voice.falls(chunk(-20) + b"\0", MONO)
    voice.falls(chunk(-20), MONO)
    assert not voice.falls(bytes(32_000), AudioFormat(AudioEncoding.OPUS))

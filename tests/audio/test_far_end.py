"""The far end in step with the microphone, and the canceller that comes and goes without a seam."""

from __future__ import annotations

import numpy as np
import pytest
from support.speech_clips import clip_samples, noises

from omni_ws.audio.echo import (
    AHEAD,
    BEHIND,
    EARLIEST_MS,
    LATEST_MS,
    LEAD_MS,
    MAX_ANSWERS,
    RATE,
    RUNS_ON_MS,
    FarEnd,
    NoiseSuppressor,
    OwnEcho,
)
from omni_ws.audio.pcm import Pcm16, Samples, pcm16_from_samples
from omni_ws.core.chunks import AudioEncoding, AudioFormat
from omni_ws.core.ledger import (
    HELD_BYTES,
    MAX_SENT_BYTES,
    Playing,
    SentPiece,
    SentSound,
)
from omni_ws.core.quota import ByteBudget

MS = RATE // 1000
AUDIO = AudioFormat(AudioEncoding.PCM16, RATE)
LEAD = LEAD_MS * MS


def ramp(begin: int, count: int) -> Pcm16:
    """Samples of which each says where in the answer it is."""
    return (np.arange(begin, begin + count) % 30_000 + 1).astype(np.int16)


def piece(answer_id: str, begin_ms: int, lasts_ms: int) -> SentPiece:
    return SentPiece(answer_id, begin_ms, AUDIO, ramp(begin_ms * MS, lasts_ms * MS).tobytes())


def playing(
    at_ms: float,
    position_ms: float,
    *sent: SentPiece,
    answer: str | None = "a",
    sounds: bool = True,
    more: bool = True,
) -> Playing:
    return Playing(at_ms, answer, position_ms, sounds, more, sent)


@pytest.fixture(autouse=True)
def _library() -> None:
    pytest.importorskip("pywebrtc_audio")


# the far end


def test_the_far_end_is_what_plays_and_a_little_ahead() -> None:
    far = FarEnd()
    assert not far.take(20 * MS, playing(20, 0, answer=None)).any()
    begins = far.take(20 * MS, playing(40, 10, piece("a", 0, 400)))
    # As the piece ends, 10 ms have played, and the far end is LEAD_MS ahead.
    assert np.array_equal(begins, ramp(10 * MS + LEAD - 20 * MS, 20 * MS))
    goes_on = far.take(30 * MS, playing(70, 40))
    assert np.array_equal(goes_on, ramp(10 * MS + LEAD, 30 * MS))


def test_an_answer_that_begins_within_a_piece_is_silent_before() -> None:
    far = FarEnd()
    heard = far.take(100 * MS, playing(100, 20, piece("a", 0, 400)))
    silent = 100 * MS - 20 * MS - LEAD
    assert not heard[:silent].any()
    assert np.array_equal(heard[silent:], ramp(0, 20 * MS + LEAD))


def test_pieces_that_come_unevenly_are_read_on_without_a_seam() -> None:
    generator = np.random.default_rng(1)
    far, heard, read, now = FarEnd(), 0, [], 0.0
    sent: tuple[SentPiece, ...] = (piece("a", 0, 5000),)
    far.take(MS, playing(1, 0, answer=None))
    for _ in range(100):
        heard += 20
        now = max(now, 1 + heard + float(generator.uniform(0, 150)))
        read.append(far.take(20 * MS, playing(now, now, *sent)))
        sent = ()
    sound = np.concatenate(read)
    assert np.array_equal(sound, ramp(int(sound[0]) - 1, len(sound)))


@pytest.mark.parametrize("apart_ms", [-LATEST_MS, EARLIEST_MS])
def test_the_place_is_set_anew_only_beyond_what_the_network_explains(apart_ms: int) -> None:
    for beyond in (0, 2 if apart_ms > 0 else -2):
        far = FarEnd()
        far.take(20 * MS, playing(20, 500, piece("a", 0, 2000)))
        # The client says that it is less far, or farther, than the far end was read.
        position = 520 - apart_ms - beyond
        heard = far.take(20 * MS, playing(40, position))
        wanted = position - 20 if beyond else 500
        assert np.array_equal(heard, ramp(wanted * MS + LEAD, 20 * MS))


def test_after_a_pause_of_the_microphone_the_far_end_is_in_step_again() -> None:
    far = FarEnd()
    far.take(20 * MS, playing(20, 20, piece("a", 0, 9000)))
    far.take(20 * MS, playing(5040, 5040))  # it may be late
    for at in range(5060, 7200, 20):
        heard = far.take(20 * MS, playing(at, at))
    assert np.array_equal(heard, ramp((at - 20) * MS + LEAD, 20 * MS))


def test_a_long_piece_is_read_in_slices() -> None:
    whole, sliced = FarEnd(), FarEnd()
    whole_sound = whole.take(400 * MS, playing(400, 300, piece("a", 0, 400)))
    first = sliced.take(250 * MS, playing(400, 300, piece("a", 0, 400)), behind=150 * MS)
    second = sliced.take(150 * MS, playing(400, 300))
    assert np.array_equal(np.concatenate((first, second)), whole_sound)


def test_a_cut_answer_is_silent_and_a_held_one_goes_on_where_it_resumes() -> None:
    far = FarEnd()
    far.take(20 * MS, playing(20, 500, piece("a", 0, 2000)))
    assert not far.take(20 * MS, playing(40, 500, sounds=False)).any()
    for at in range(60, 2020, 20):
        assert not far.take(20 * MS, playing(at, 500, sounds=False)).any()
    resumed = far.take(20 * MS, playing(2020, 220))
    assert np.array_equal(resumed, ramp(200 * MS + LEAD, 20 * MS))


def test_the_end_of_what_was_sent_is_waited_at() -> None:
    far = FarEnd()
    far.take(20 * MS, playing(20, 150, piece("a", 0, 200)))
    far.take(20 * MS, playing(40, 200, more=False))
    assert not far.take(20 * MS, playing(60, 200, more=False)).any()
    later = far.take(20 * MS, playing(80, 220, piece("a", 200, 400)))
    assert np.array_equal(later, ramp(200 * MS, 20 * MS))


def test_the_next_answer_follows() -> None:
    far = FarEnd()
    far.take(20 * MS, playing(20, 180, piece("a", 0, 200)))
    heard = far.take(20 * MS, playing(40, 20, piece("b", 0, 300), answer="b"))
    assert np.array_equal(heard, ramp(LEAD, 20 * MS))


def test_sound_of_which_some_is_missing_is_at_its_place() -> None:
    far = FarEnd()
    far.take(20 * MS, playing(20, 20, piece("a", 0, 100)))
    heard = far.take(20 * MS, playing(40, 600, piece("a", 500, 400)))
    assert np.array_equal(heard, ramp(580 * MS + LEAD, 20 * MS))


def test_other_formats_are_read_at_16_khz() -> None:
    far = FarEnd()
    tone = (np.sin(2 * np.pi * 440 * np.arange(24_000) / 24_000) * 0.5).astype(np.float32)
    sent = SentPiece("a", 0, AudioFormat(AudioEncoding.PCM16, 24_000), pcm16_from_samples(tone).tobytes())
    heard = far.take(400 * MS, playing(400, 500, sent))
    wanted = np.sin(2 * np.pi * 440 * (np.arange(400 * MS) + 100 * MS + LEAD) / RATE) * 0.5 * 32768
    assert np.abs(heard - wanted).max() < 400


def test_what_is_kept_is_bounded() -> None:
    far = FarEnd()
    far.take(20 * MS, playing(20, 0, *(piece("a", begin, 1000) for begin in range(0, 60_000, 1000))))
    assert len(far._answers["a"].samples) == AHEAD + BEHIND
    far.take(20 * MS, playing(40, 20, *(piece(f"b{number}", 0, 100) for number in range(9))))
    assert len(far._answers) == MAX_ANSWERS
    far.take(20 * MS, playing(60, 90, answer="b8"))
    assert len(far._answers["b8"].samples) <= 100 * MS


@pytest.mark.parametrize("beyond", [0, 2])
def test_what_waits_for_the_microphone_is_bounded_and_charged(beyond: int) -> None:
    budget = ByteBudget(1 << 30)
    sound = SentSound(budget)
    first = SentPiece("a", 0, AUDIO, bytes(1000))
    sound.add(first)
    sound.add(SentPiece("a", 31.25, AUDIO, bytes(MAX_SENT_BYTES - 1000 + beyond)))
    assert budget.used == HELD_BYTES + MAX_SENT_BYTES - (1000 - beyond if beyond else 0)
    assert (first in sound.take()) == (not beyond)
    assert budget.used == HELD_BYTES
    assert sound.take() == ()
    sound.close()
    assert budget.used == 0


# the canceller


def heard_and_cleaned(near: Samples, *, sounds: tuple[int, int]) -> Samples:
    """What comes out, in pieces of all lengths, while noise plays from one millisecond to another."""
    generator = np.random.default_rng(0)
    noise = pcm16_from_samples(generator.normal(0, 0.02, (sounds[1] - sounds[0]) * MS).astype(np.float32))
    own, place, cleaned, sent = OwnEcho(), 0, [], False
    while place < len(near):
        count = int(generator.integers(1, 900))
        end = place + len(near[place : place + count])
        position = end / MS - sounds[0]
        now = playing(end / MS, 0, answer=None)
        if position >= 0:
            begins = () if sent else (SentPiece("a", 0, AUDIO, noise.tobytes()),)
            now = playing(end / MS, min(position, sounds[1] - sounds[0]), *begins, more=end / MS < sounds[1])
            sent = True
        cleaned.append(own.clean(near[place:end], now))
        place = end
    return np.concatenate((*cleaned, own.rest()))


def exact(samples: Samples) -> Samples:
    return np.asarray(pcm16_from_samples(samples) / np.float32(32768), np.float32)


def test_no_sample_is_lost_or_added_and_those_in_silence_stay_bit_for_bit() -> None:
    near = exact(np.resize(clip_samples("goforward"), 6 * RATE))
    cleaned = heard_and_cleaned(near, sounds=(1000, 3000))
    assert len(cleaned) == len(near)
    changed = np.flatnonzero(cleaned != near)
    assert changed[0] > 900 * MS
    assert changed[-1] < (3000 + RUNS_ON_MS) * MS
    # In between it is the same sound at the same place, apart from the delay of a filter against hum.
    middle = slice(1500 * MS, 2500 * MS)
    matches = [float(np.dot(np.roll(cleaned, shift)[middle], near[middle])) for shift in range(-160, 161)]
    assert 150 <= int(np.argmax(matches)) <= 170


def test_while_nothing_plays_the_samples_are_not_even_copied() -> None:
    own, near = OwnEcho(), clip_samples("goforward")
    assert own.clean(near, playing(0, 0, answer=None)) is near
    assert own.clean(near, playing(5000, 0, sounds=False)) is near


def test_the_rest_at_an_end_of_the_input_is_not_held_back() -> None:
    own, near = OwnEcho(), exact(clip_samples("goforward"))[: 3 * RATE]
    first = own.clean(near, playing(3000, 3000, piece("a", 0, 4000)))
    assert len(first) < len(near)
    rest = own.rest()
    assert len(first) + len(rest) == len(near)
    assert np.array_equal(rest, near[-len(rest) :])
    assert len(own.rest()) == 0


# noise


@pytest.mark.parametrize(("kind", "least_db"), [("near_field", 8), ("far_field", 12)])
def test_noise_is_weaker_and_speech_stays_in_its_place(kind: str, least_db: float) -> None:
    suppressor = NoiseSuppressor(kind)  # type: ignore[arg-type]
    noise = noises(3)["white noise"]
    pieces = [suppressor.process(part) for part in np.array_split(noise, 97)]
    quieter = np.concatenate(pieces)
    assert 0 < len(noise) - len(quieter) <= 16 * MS
    late = slice(2 * RATE, None)
    assert 20 * np.log10(np.std(noise[late]) / np.std(quieter[late])) > least_db
    speech = clip_samples("goforward")
    kept = NoiseSuppressor(kind).process(speech)  # type: ignore[arg-type]
    matches = [float(np.dot(kept[400 : 2 * RATE], speech[400 + at : 2 * RATE + at])) for at in range(-200, 201)]
    assert abs(int(np.argmax(matches)) - 200) <= 2

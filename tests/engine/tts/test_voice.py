"""The frame of every voice, its process and its jobs, with espeak-ng; and what is espeak-ng's own."""

import asyncio
import itertools
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from support.patience import PATIENCE_SEC, until

from omni_ws.config.model import VoiceChoice
from omni_ws.core.chunks import Word
from omni_ws.engine import child
from omni_ws.engine.base import AudioOutput
from omni_ws.engine.tts import voice_process
from omni_ws.engine.tts.synthesiser import PronouncedWord
from omni_ws.engine.tts.voice_process import VoiceProcess
from omni_ws.errors import EngineFailed, InvalidValue
from omni_ws.installing import install_command

pytestmark = pytest.mark.asyncio(loop_scope="module")

SENTENCE = "Go forward 10 meters, please."


@asynccontextmanager
async def running(choice: VoiceChoice) -> AsyncIterator[VoiceProcess]:
    started = VoiceProcess(choice)
    await started.start()
    yield started
    await started.stop()
    assert started.worker_pid is None


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared(voice_choice: VoiceChoice) -> AsyncIterator[VoiceProcess]:
    async with running(voice_choice) as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def voice(shared: VoiceProcess) -> AsyncIterator[VoiceProcess]:
    """One for all tests, each of which leaves it as it found it, with a worker that may be another."""
    yield shared
    assert shared.healthy
    assert shared.jobs == 0


@pytest_asyncio.fixture(loop_scope="module")
async def voice_alone(voice_choice: VoiceChoice) -> AsyncIterator[VoiceProcess]:
    """One that a test may leave in any state."""
    async with running(voice_choice) as started:
        yield started


async def spoken(voice: VoiceProcess, text: str, name: str | None = None) -> list[AudioOutput]:
    return [piece async for piece in voice.say(text, voice=name)]


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def samples_of(pieces: list[AudioOutput]) -> np.ndarray:
    return np.concatenate([piece.samples for piece in pieces])


def words_of(pieces: list[AudioOutput]) -> list[Word]:
    return [word for piece in pieces for word in piece.words]


async def test_a_sentence_is_spoken_in_pieces_with_its_words(voice: VoiceProcess) -> None:
    pieces = await spoken(voice, SENTENCE)
    rate = pieces[0].sample_rate
    assert rate == 22_050
    assert len(pieces) > 5
    samples = samples_of(pieces)
    assert 1.5 < len(samples) / rate < 5
    assert np.abs(samples).max() > 0.05
    words = words_of(pieces)
    assert [word.text for word in words] == ["Go", "forward", "10", "meters", "please"]
    assert all(0 <= word.start_ms < word.end_ms for word in words)
    assert all(before.end_ms <= after.start_ms for before, after in itertools.pairwise(words))
    # The last one ends with its sound, not with the pause behind the sentence.
    sounding = np.flatnonzero(np.abs(samples) > 1e-3) * 1000 / rate
    assert sounding[-1] - 150 < words[-1].end_ms <= sounding[-1] + 10


async def test_numbers_and_signs_are_words_as_they_are_written(voice: VoiceProcess) -> None:
    text = "Count 21, 22, 1,234 and 3.5 (it's Dr. Smith's)."
    words = words_of(await spoken(voice, text))
    assert [word.text for word in words] == ["Count", "21", "22", "1,234", "and", "3.5", "it's", "Dr", "Smith's"]


async def test_other_voices_speak(voice: VoiceProcess) -> None:
    english = [name for name in voice.voices if voice.languages[name].startswith("en")][:3]
    assert len(english) == 3
    for name in english:
        assert len(samples_of(await spoken(voice, "Yes.", name))) > 1000, name


@pytest.mark.parametrize("speed", [0.5, 2.0])
async def test_speech_is_slower_and_faster_with_its_words(voice: VoiceProcess, speed: float) -> None:
    usual = await spoken(voice, SENTENCE)
    pieces = [piece async for piece in voice.say(SENTENCE, speed=speed)]
    # espeak-ng shortens pauses more than words.
    assert len(samples_of(usual)) / len(samples_of(pieces)) == pytest.approx(speed, rel=0.25)
    for before, after in zip(words_of(usual), words_of(pieces), strict=True):
        assert before.text == after.text
        assert after.end_ms * speed == pytest.approx(before.end_ms, rel=0.15, abs=50)
    # What was set for one text is not kept for the next.
    assert len(samples_of(await spoken(voice, SENTENCE))) == pytest.approx(len(samples_of(usual)), rel=0.02)


async def test_odd_texts_break_nothing(voice: VoiceProcess) -> None:
    worker = voice.worker_pid
    for text in ("", " ", "...", "?!", "\0", "你好", "\x07\x1b[0m", "a" * 300, "1" * 300, "'\"`${}%s%n", "\ud83d"):
        await spoken(voice, text)
    assert len(await spoken(voice, "Yes.")) > 0
    assert voice.worker_pid == worker


async def test_voices_have_names_for_people_and_can_be_named_by_their_languages(voice: VoiceProcess) -> None:
    assert voice.voices[0] == "English (America)"
    assert voice.aliases["de"] == "German"
    assert len(voice.aliases) > 100
    assert {"en-gb", "pt-br", "fr-fr"} <= voice.aliases.keys()
    english = [name.startswith("English") for name in voice.voices]
    assert english == sorted(english, reverse=True)
    for language in list(voice.aliases)[:3]:
        assert len(samples_of(await spoken(voice, "Yes.", language))) > 1000


async def test_an_unknown_voice_is_refused_with_the_list(voice: VoiceProcess) -> None:
    with pytest.raises(InvalidValue, match=re.escape(voice.voices[0])) as refusal:
        await spoken(voice, "hello", "nobody")
    assert refusal.value.param == "voice"


async def test_texts_take_turns(voice: VoiceProcess) -> None:
    order: list[str] = []

    async def speak(name: str) -> None:
        await spoken(voice, SENTENCE)
        order.append(name)

    worker = voice.worker_pid
    assert worker is not None
    os.kill(worker, signal.SIGSTOP)  # no text is over before the last one waits
    async with asyncio.TaskGroup() as group:
        for number, name in enumerate("abc"):
            group.create_task(speak(name))
            await until(lambda: voice.jobs > number)  # noqa: B023 - called here
        os.kill(worker, signal.SIGCONT)
    assert order == ["a", "b", "c"]
    assert voice.jobs == 0


async def test_who_does_not_listen_holds_up_nobody(voice: VoiceProcess) -> None:
    async with aclosing(voice.say("This is heard by somebody who is slow.")) as slow:
        await anext(slow)
        assert len(await spoken(voice, SENTENCE)) > 1


async def test_a_job_can_be_taken_back_before_and_while_it_is_spoken(voice: VoiceProcess) -> None:
    async with aclosing(voice.say(SENTENCE)) as running:
        await anext(running)
        waiting = asyncio.create_task(spoken(voice, "I wait."))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    assert voice.jobs == 0
    assert [word.text for word in words_of(await spoken(voice, "Still here."))] == ["Still", "here"]


async def test_a_killed_worker_costs_its_own_text_only(voice: VoiceProcess) -> None:
    dead = voice.worker_pid
    assert dead is not None
    os.kill(dead, signal.SIGSTOP)
    running = asyncio.create_task(spoken(voice, SENTENCE))
    await until(lambda: voice.jobs == 1)
    waiting = asyncio.create_task(spoken(voice, SENTENCE))
    await until(lambda: voice.jobs == 2)
    os.kill(dead, signal.SIGKILL)
    with pytest.raises(EngineFailed, match="died"):
        await running
    assert len(await waiting) > 5
    assert voice.worker_pid not in (None, dead)
    assert voice.healthy


async def test_a_hanging_worker_is_replaced(voice: VoiceProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(voice_process, "SILENCE_TIMEOUT", 0.05)
    assert voice.worker_pid is not None
    os.kill(voice.worker_pid, signal.SIGSTOP)
    with pytest.raises(EngineFailed, match="died"):
        await spoken(voice, SENTENCE)
    monkeypatch.undo()
    assert len(await spoken(voice, SENTENCE)) > 5


async def test_a_worker_that_never_starts_again_is_reported(
    voice: VoiceProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(voice_process, "WORKER_MODULE", "omni_ws.not_there")
    monkeypatch.setattr(child, "MAX_BACKOFF_SEC", 0.01)
    assert voice.worker_pid is not None
    os.kill(voice.worker_pid, signal.SIGKILL)
    while voice.healthy:
        await asyncio.gather(spoken(voice, SENTENCE), return_exceptions=True)
    with pytest.raises(EngineFailed):
        await spoken(voice, SENTENCE)
    monkeypatch.undo()
    while not voice.healthy:
        await asyncio.gather(spoken(voice, SENTENCE), return_exceptions=True)


async def test_a_worker_may_take_longer_to_start_than_to_speak(
    voice: VoiceProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(voice_process, "WORKER_MODULE", "support.troubled_worker")
    monkeypatch.setenv("TROUBLE", "late")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    dead = voice.worker_pid
    assert dead is not None
    os.kill(dead, signal.SIGKILL)
    await until(lambda: voice.worker_pid not in (None, dead))
    speaking = asyncio.create_task(spoken(voice, SENTENCE))
    starting = voice.worker_pid
    assert starting is not None
    await until(lambda: is_stopped(starting))
    await until(lambda: voice.jobs == 1)
    # Nobody waits for a sign of life yet: only the limit of the start runs.
    assert voice._watchdog is None
    os.kill(starting, signal.SIGCONT)
    assert len(await speaking) > 5
    assert voice._deaths == 0


async def test_however_often_a_worker_has_died_another_one_starts(
    voice_alone: VoiceProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    voice = voice_alone
    monkeypatch.setattr(child, "MAX_BACKOFF_SEC", 0.01)
    voice._deaths = 2000
    dead = voice.worker_pid
    assert dead is not None
    os.kill(dead, signal.SIGKILL)
    await until(lambda: voice.worker_pid not in (None, dead))


async def test_stopping_fails_who_still_waits(voice_alone: VoiceProcess) -> None:
    voice = voice_alone
    assert voice.worker_pid is not None
    os.kill(voice.worker_pid, signal.SIGSTOP)
    running = asyncio.create_task(spoken(voice, SENTENCE))
    await until(lambda: voice.jobs == 1)
    os.kill(voice.worker_pid, signal.SIGCONT)
    await voice.stop()
    with pytest.raises(EngineFailed, match="stopped"):
        await running
    await voice.stop()
    with pytest.raises(EngineFailed, match="no voice"):
        await spoken(voice, SENTENCE)


async def test_stopping_fails_whose_worker_is_ending(
    voice_alone: VoiceProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    voice, ending, end = voice_alone, asyncio.Event(), child.Child.end

    async def slow_end(self: child.Child) -> int:
        try:
            if not ending.is_set():
                ending.set()
                await asyncio.Event().wait()
        finally:
            status = await end(self)
        return status

    monkeypatch.setattr(child.Child, "end", slow_end)
    assert voice.worker_pid is not None
    os.kill(voice.worker_pid, signal.SIGSTOP)
    running = asyncio.create_task(spoken(voice, SENTENCE))
    await until(lambda: voice.jobs == 1)
    os.kill(voice.worker_pid, signal.SIGKILL)
    await ending.wait()
    await voice.stop()
    async with asyncio.timeout(PATIENCE_SEC):
        with pytest.raises(EngineFailed, match="died"):
            await running


async def test_stopping_fails_who_waits_for_the_reader(
    voice_alone: VoiceProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stopped(text: str, language: str) -> list[PronouncedWord]:
        await voice_alone.stop()
        return []

    monkeypatch.setattr(voice_alone, "_read", stopped)
    async with asyncio.timeout(PATIENCE_SEC):
        with pytest.raises(EngineFailed, match="has stopped"):
            await anext(voice_alone.say("Hello."))
    assert voice_alone.jobs == 0


async def test_no_voice_is_told_with_the_way_to_get_one() -> None:
    voice = VoiceProcess(VoiceChoice.NONE)
    await voice.start()
    assert voice.voices == ()
    assert voice.worker_pid is None
    assert voice.describe()[0].endswith(install_command("espeak"))


async def test_a_machine_without_voices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(voice_process, "WORKER_MODULE", "support.troubled_worker")
    monkeypatch.setenv("TROUBLE", "voiceless")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    voice = VoiceProcess()
    await voice.start()
    assert voice.facts is None
    assert "espeak-ng is not installed" in voice.describe()[0]
    named = VoiceProcess(VoiceChoice.ESPEAK)
    with pytest.raises(EngineFailed, match="not installed"):
        await named.start()


async def test_the_default_voice_can_be_chosen(voice_choice: VoiceChoice) -> None:
    for asked, name in (("English (Great Britain)", "English (Great Britain)"), ("de", "German")):
        voice = VoiceProcess(voice_choice, default_voice=asked)
        await voice.start()
        assert voice.voices[0] == name
        assert voice.describe()[0].startswith("voice: espeak-ng ")
        await voice.stop()
    with pytest.raises(EngineFailed, match="no voice 'hal'"):
        await VoiceProcess(voice_choice, default_voice="hal").start()

"""What cuts utterances and talks to requests, with a recogniser that counts instead of recognising."""

import asyncio
import itertools
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing

import numpy as np
import pytest
import pytest_asyncio
from support.engine_answers import answered, audio, collect, open_input, request_of, streamed
from support.patience import PATIENCE_SEC, until
from support.speech_clips import clip_bytes, clip_samples, silence

from omni_ws.audio.pcm import Pcm16
from omni_ws.core.chunks import Task, Word
from omni_ws.engine.asr.recogniser import (
    SAMPLE_RATE,
    ListenerSlots,
    Recognised,
    Utterance,
    UtteranceLimits,
    asr_capabilities,
)
from omni_ws.engine.asr.recogniser_engine import AudioPace, Listener, RecogniserEngine
from omni_ws.engine.asr.whisper import WhisperRecogniser
from omni_ws.engine.base import EngineState, GenerationRequest, TranscriptGuess, TranscriptOutput
from omni_ws.errors import EngineFailed

SPEECH = clip_bytes("goforward")


class CountingRecogniser:
    """Tells the length of utterances, in seconds, also while they are spoken."""

    name, model = "counting", "none"
    hosts: tuple[str, ...] = ()
    state = EngineState.OK
    capabilities = asr_capabilities(sampling=("max_tokens", "stop"), languages={"en"}, word_times=True)
    speculates = True
    readings = 0
    limits = UtteranceLimits(cut_after=SAMPLE_RATE, longest=2 * SAMPLE_RATE)

    def __init__(self) -> None:
        self.works = True
        #: Held back while it is not set.
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.understands = True
        self.slots = ListenerSlots(2)
        self.asked: list[int] = []
        self.futures: list[Future[Recognised]] = []
        self.tell_untimed: list[Callable[[Recognised], None]] = []
        self._threads = ThreadPoolExecutor(1)

    def describe(self) -> tuple[str, ...]:
        return ()

    async def start(self) -> None:
        if not self.works:
            raise EngineFailed("no model")

    async def stop(self) -> None:
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)

    def drop(self) -> None:
        """Drop what waits, as ``close`` does before it waits for the rest."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def transcriber(self, request: GenerationRequest) -> "CountingRecogniser":
        return self

    def live_text(self) -> "CountingRecogniser":
        return self

    def read(self, utterance: Utterance) -> str | None:
        return f"{utterance.length / SAMPLE_RATE:.0f} so far"

    def end(self) -> None:
        pass

    def transcribe(
        self,
        pcm: Pcm16,
        *,
        waited_for: bool = True,
        tell: Callable[[str], None] | None = None,
        tell_untimed: Callable[[Recognised], None] | None = None,
    ) -> Future[Recognised]:
        self.asked.append(len(pcm))
        if tell_untimed is not None:
            self.tell_untimed.append(tell_untimed)
        self.futures.append(self._threads.submit(self._transcribe, pcm))
        return self.futures[-1]

    def _transcribe(self, pcm: Pcm16) -> Recognised:
        assert self.goes_on.wait(PATIENCE_SEC)
        if not self.understands:
            return Recognised()
        text = f"{len(pcm) / SAMPLE_RATE:.0f} s."
        return Recognised(text, (Word(text, 10, 20),))


@pytest.fixture
def recogniser() -> CountingRecogniser:
    return CountingRecogniser()


@pytest_asyncio.fixture
async def engine(recogniser: CountingRecogniser) -> AsyncIterator[RecogniserEngine]:
    # A clock that stands still: all audio is live.
    engine = RecogniserEngine(recogniser, clock=lambda: 0.0)
    await engine.start()
    yield engine
    assert engine.active_requests == 0
    assert engine.recogniser.slots.taken == 0
    await engine.stop()


async def test_the_texts_of_the_recogniser_are_the_transcript(engine: RecogniserEngine) -> None:
    result = await answered(engine, *audio(SPEECH + silence(0.6)), task=Task.TRANSCRIBE)
    settled = [transcript for transcript in result.transcripts if not transcript.interim]
    # Longer than the recogniser allows, so it was cut; the texts together are the transcript.
    assert len(settled) > 1
    assert [each.text.startswith(" ") for each in settled] == [False] + [True] * (len(settled) - 1)
    assert result.text == "".join(each.text for each in settled)
    for each in settled:
        assert each.start_ms is not None
        assert (each.words[0].start_ms, each.words[0].end_ms) == (each.start_ms + 10, each.start_ms + 20)


async def test_interim_text_that_turns_out_to_be_nothing_is_taken_back(
    engine: RecogniserEngine, recogniser: CountingRecogniser
) -> None:
    recogniser.understands = False
    source = open_input(*audio(SPEECH[:40_000], 20))
    source.close()
    result = await collect(engine, source, task=Task.TRANSCRIBE)
    assert result.text == ""
    if any(transcript.interim for transcript in result.transcripts):
        assert result.transcripts[-1] == TranscriptOutput("", start_ms=result.transcripts[-1].start_ms)


async def test_what_was_never_shown_is_not_taken_back(recogniser: CountingRecogniser) -> None:
    """Where guesses are told, a reading without a word is told, too: nothing is shown of it."""
    recogniser.understands = False
    recogniser.read = lambda utterance: ""  # type: ignore[method-assign]
    outputs: list[TranscriptOutput | TranscriptGuess] = []
    with ThreadPoolExecutor(1) as executor:
        listener = live_listener(recogniser, executor, tell_guess=outputs.append)
        for piece in np.array_split(clip_samples("goforward"), 20):
            recogniser.readings += 1
            outputs += [output async for output in listener.hear(piece)]
        outputs += [output async for output in listener.end_part()]
        await listener.close()
    await recogniser.stop()
    texts = [(one.text, one.interim) for one in outputs if isinstance(one, TranscriptOutput)]
    assert set(texts) == {("", True)}


async def test_closing_while_the_recogniser_works_waits_for_nothing(
    engine: RecogniserEngine, recogniser: CountingRecogniser
) -> None:
    recogniser.goes_on.clear()
    source = open_input(*audio(SPEECH))
    source.close()
    async with aclosing(streamed(engine, request_of(source, task=Task.TRANSCRIBE))) as outputs:
        reading = asyncio.ensure_future(anext(outputs))
        await until(lambda: bool(recogniser.asked))
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    assert engine.active_requests == 0
    recogniser.goes_on.set()


async def test_stopping_fails_what_waits_for_the_recogniser(recogniser: CountingRecogniser) -> None:
    engine = RecogniserEngine(recogniser)
    await engine.start()
    recogniser.goes_on.clear()
    requests = []
    for count in (1, 2):
        requests.append(asyncio.create_task(answered(engine, *audio(SPEECH), task=Task.TRANSCRIBE)))
        await until(lambda: len(recogniser.asked) == count)  # noqa: B023 - called here
    stopping = asyncio.create_task(engine.stop())
    with pytest.raises(EngineFailed, match="stopped"):
        await requests[1]
    recogniser.goes_on.set()
    await asyncio.gather(stopping, requests[0], return_exceptions=True)
    assert engine.active_requests == 0


async def test_a_recogniser_that_cannot_start_fails_the_start() -> None:
    recogniser = CountingRecogniser()
    recogniser.works = False
    engine = RecogniserEngine(recogniser)
    with pytest.raises(EngineFailed, match="no model"):
        await engine.start()
    assert engine.state is EngineState.STARTING


@pytest.mark.skipif(sys.platform != "linux", reason="only there a process can be bound to some cores")
def test_cores_that_the_process_may_not_use_carry_nobody() -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        whisper = WhisperRecogniser()
    finally:
        os.sched_setaffinity(0, allowed)
    assert (whisper.workers, whisper.slots.count) == (1, 1)


def live_listener(
    recogniser: CountingRecogniser,
    executor: ThreadPoolExecutor,
    *,
    slots: ListenerSlots | None = None,
    tell_guess: Callable[[TranscriptGuess], None] | None = None,
) -> Listener:
    """A listener to whom every piece comes as it is spoken."""
    clock = itertools.count(0, 10)
    pace = AudioPace(lambda: next(clock))
    return Listener(recogniser, slots or ListenerSlots(1), pace, executor, tell_guess=tell_guess)


@pytest.mark.parametrize("session", ["sess_1", None])
async def test_a_seat_is_free_when_the_input_of_a_turn_is_over(
    engine: RecogniserEngine, recogniser: CountingRecogniser, session: str | None
) -> None:
    """A request by itself keeps it to its end: a file is read faster than it is written down."""
    slots = engine.recogniser.slots
    recogniser.limits = UtteranceLimits(cut_after=20 * SAMPLE_RATE, longest=30 * SAMPLE_RATE)
    recogniser.goes_on.clear()
    source = open_input(*audio(SPEECH))
    running = asyncio.create_task(collect(engine, source, task=Task.TRANSCRIBE, conversation=session))
    await until(lambda: slots.taken == 1)
    source.close()
    if session is not None:
        await until(lambda: slots.taken == 0)
    await until(lambda: bool(recogniser.asked))
    assert not running.done()
    assert slots.taken == (session is None)
    recogniser.goes_on.set()
    assert (await running).text


async def test_parts_of_one_session_are_listened_to_on_one_seat(
    engine: RecogniserEngine, recogniser: CountingRecogniser
) -> None:
    sources = [open_input(*audio(SPEECH)) for _ in range(3)]  # one more than there are slots
    running = [
        asyncio.create_task(collect(engine, source, task=Task.TRANSCRIBE, conversation="sess_1")) for source in sources
    ]
    await until(lambda: engine.recogniser.slots._shared == {"sess_1": 3})
    assert engine.recogniser.slots.taken == 1
    for source in sources:
        source.close()
    assert all([result.text for result in await asyncio.gather(*running)])


@pytest.mark.parametrize("carried", [1, 0])
async def test_where_seats_are_crowded_there_are_no_interim_texts(recogniser: CountingRecogniser, carried: int) -> None:
    recogniser.limits = UtteranceLimits(cut_after=20 * SAMPLE_RATE, longest=30 * SAMPLE_RATE)
    outputs: list[TranscriptOutput | TranscriptGuess] = []
    with ThreadPoolExecutor(1) as executor:
        slots = ListenerSlots(1, lambda interims: carried if interims else 1)
        listener = live_listener(recogniser, executor, slots=slots)
        for piece in np.array_split(clip_samples("goforward"), 40):
            outputs += [output async for output in listener.hear(piece)]
        outputs += [output async for output in listener.end_part()]
        await listener.close()
    await recogniser.stop()
    transcripts = [one for one in outputs if isinstance(one, TranscriptOutput)]
    assert any(one.interim for one in transcripts) is bool(carried)
    assert not transcripts[-1].interim


@pytest.mark.parametrize("asked", [True, False])
async def test_at_a_pause_what_would_be_settled_is_told_to_those_who_ask(
    recogniser: CountingRecogniser, asked: bool
) -> None:
    recogniser.limits = UtteranceLimits(cut_after=20 * SAMPLE_RATE, longest=30 * SAMPLE_RATE)
    outputs: list[TranscriptOutput | TranscriptGuess] = []
    with ThreadPoolExecutor(1) as executor:
        listener = live_listener(recogniser, executor, tell_guess=outputs.append if asked else None)
        words = clip_samples("goforward")[8_000:36_000]
        for _ in range(2):
            for piece in np.array_split(np.concatenate((words, np.zeros(4_800, np.float32))), 20):
                outputs += [output async for output in listener.hear(piece)]
                await asyncio.wrap_future(recogniser.transcribe(piece.astype(np.int16)))  # behind a guess
        outputs += [output async for output in listener.end_part()]
        await listener.close()
    await recogniser.stop()
    guesses = [one.text for one in outputs if isinstance(one, TranscriptGuess)]
    (settled,) = (one.text for one in outputs if isinstance(one, TranscriptOutput) and not one.interim)
    if asked:
        first, taken_back, last = guesses
        assert first != settled
        assert (taken_back, last) == ("", settled)
    else:
        assert guesses == []


async def paused_listener(
    recogniser: CountingRecogniser, executor: ThreadPoolExecutor, tell_guess: Callable[[TranscriptGuess], None]
) -> Listener:
    """A listener in a pause, whose guess is not made yet."""
    recogniser.limits = UtteranceLimits(cut_after=20 * SAMPLE_RATE, longest=30 * SAMPLE_RATE)
    recogniser.goes_on.clear()
    listener = live_listener(recogniser, executor, tell_guess=tell_guess)
    words = np.concatenate((clip_samples("goforward")[8_000:36_000], np.zeros(4_800, np.float32)))
    for piece in np.array_split(words, 20):
        assert all([one.interim async for one in listener.hear(piece)])
    return listener


@pytest.mark.parametrize("untimed", [True, False])
async def test_a_guess_is_told_once_as_soon_as_its_text_is_known(recogniser: CountingRecogniser, untimed: bool) -> None:
    """Before the times of its words, and while no more audio comes."""
    guesses: asyncio.Queue[TranscriptGuess] = asyncio.Queue()
    with ThreadPoolExecutor(1) as executor:
        listener = await paused_listener(recogniser, executor, guesses.put_nowait)
        if untimed:
            await asyncio.to_thread(recogniser.tell_untimed[0], Recognised("2 s."))
        else:
            recogniser.goes_on.set()
        assert await asyncio.wait_for(guesses.get(), PATIENCE_SEC) == TranscriptGuess("2 s.")
        recogniser.goes_on.set()
        (settled,) = [one async for one in listener.end_part()]
        assert (settled.text, len(settled.words)) == ("2 s.", 1)
        assert guesses.empty()
        await listener.close()
    await recogniser.stop()


async def test_what_is_known_of_a_withdrawn_guess_is_not_told(recogniser: CountingRecogniser) -> None:
    guesses: list[TranscriptGuess] = []
    with ThreadPoolExecutor(1) as executor:
        listener = await paused_listener(recogniser, executor, guesses.append)
        for piece in np.array_split(clip_samples("goforward")[8_000:20_000], 10):
            assert all([one.interim async for one in listener.hear(piece)])
        await asyncio.to_thread(recogniser.tell_untimed[0], Recognised("2 s."))
        await asyncio.sleep(0)
        assert guesses == []
        recogniser.goes_on.set()
        await listener.close()
    await recogniser.stop()


@pytest.mark.parametrize("over", [True, False])
async def test_an_utterance_that_breaks_off_is_a_guess_if_the_input_is_over(
    recogniser: CountingRecogniser, over: bool
) -> None:
    """The answer begins before the times of the words are known."""
    recogniser.limits = UtteranceLimits(cut_after=20 * SAMPLE_RATE, longest=30 * SAMPLE_RATE)
    told: list[TranscriptGuess | TranscriptOutput] = []
    with ThreadPoolExecutor(1) as executor:
        listener = live_listener(recogniser, executor, tell_guess=told.append)
        assert all([one.interim async for one in listener.hear(clip_samples("goforward")[8_000:30_000])])
        if over:
            listener.input_over()
        told += [one async for one in listener.end_part()]
        await listener.close()
    await recogniser.stop()
    assert [type(one) for one in told] == [TranscriptGuess] * over + [TranscriptOutput]


async def test_a_pause_is_guessed_at_once_an_outdated_guess_has_ended(recogniser: CountingRecogniser) -> None:
    recogniser.limits = UtteranceLimits(cut_after=20 * SAMPLE_RATE, longest=30 * SAMPLE_RATE)
    recogniser.goes_on.clear()
    guesses: list[TranscriptGuess] = []
    with ThreadPoolExecutor(1) as executor:
        listener = live_listener(recogniser, executor, tell_guess=guesses.append)
        words = np.concatenate((clip_samples("goforward")[8_000:36_000], np.zeros(4_800, np.float32)))
        for piece in np.array_split(np.concatenate((words, words)), 40):
            assert all([one.interim async for one in listener.hear(piece)])
        assert len(recogniser.asked) == 1, "a second guess beside the outdated one"
        outdated = recogniser.futures[0]
        recogniser.goes_on.set()
        await asyncio.wrap_future(outdated)
        assert guesses == []
        assert not [one async for one in listener.hear(np.zeros(160, np.float32))]
        assert len(recogniser.asked) == 2
        (settled,) = [one async for one in listener.end_part()]
        assert settled.text == "4 s."
        assert len(recogniser.asked) == 2
        await listener.close()
    await recogniser.stop()


async def test_a_recogniser_that_stops_in_a_pause_fails_what_is_settled(recogniser: CountingRecogniser) -> None:
    recogniser.limits = UtteranceLimits(cut_after=20 * SAMPLE_RATE, longest=30 * SAMPLE_RATE)
    recogniser.goes_on.clear()
    recogniser.transcribe(np.zeros(1, np.int16))  # so that the guess waits
    with ThreadPoolExecutor(1) as executor:
        listener = live_listener(recogniser, executor, tell_guess=lambda guess: pytest.fail("a guess"))
        words = np.concatenate((clip_samples("goforward")[8_000:36_000], np.zeros(4_800, np.float32)))
        for piece in np.array_split(words, 20):
            assert all([one.interim async for one in listener.hear(piece)])
        assert len(recogniser.asked) == 2
        recogniser.drop()
        assert [one async for one in listener.hear(np.zeros(1, np.float32))] == []
        with pytest.raises(EngineFailed, match="stopped"):
            assert not [one async for one in listener.end_part()]
        await listener.close()
    recogniser.goes_on.set()

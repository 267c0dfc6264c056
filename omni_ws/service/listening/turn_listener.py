"""TurnListener: says which request the audio of an open microphone belongs to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from msgspec.structs import replace

from omni_ws.audio import vad
from omni_ws.audio.mime import media_type, parse_audio_format
from omni_ws.audio.samples import Samples
from omni_ws.audio.speech_watch import SpeechWatch, Watched
from omni_ws.core.audio_format import AudioFormat
from omni_ws.core.audio_ring import AudioRing
from omni_ws.core.chunks import InputChunk, Modality, StartTrigger
from omni_ws.core.input_stream import InputStream
from omni_ws.core.session import StreamingInputSession
from omni_ws.core.stream_events import StreamEvent
from omni_ws.errors import OmniError
from omni_ws.service.failure import unexpected
from omni_ws.service.listening.queue import Item, Listening, ListeningQueue, Mark
from omni_ws.service.listening.workers import SpeechWorkers
from omni_ws.wire.server_frames import SpeechStartedFrame, SpeechStoppedFrame

#: Audio goes to a thread in pieces, since each costs a thread's waking up and a model that is no longer in any cache:
#: while nobody speaks with that of others, or alone where more of it waits than a round brings; in a turn when there is
#: this much; but window by window where it matters at once: when a turn may be about to end, or an answer to be
#: interrupted.
PIECE_MS: Final = 10 * vad.WINDOW_MS
TURN_PIECE_MS: Final = 3 * vad.WINDOW_MS
URGENT_PIECE_MS: Final = vad.WINDOW_MS
#: And in pieces of at most about this many bytes: a long chunk is cut, so that no session keeps a thread for long.
MAX_PIECE_BYTES: Final = 64 * 1024
#: Beyond this much that was not listened to the socket is not read.
MAX_WAITING_BYTES: Final = 1 << 20
#: Compressed audio, which cannot be cut anywhere, goes on as it was decoded for the detector.
DECODED: Final = AudioFormat(sample_rate=vad.SAMPLE_RATE)
#: Beyond these everything would be speech, or nothing.
LOWEST_THRESHOLD, HIGHEST_THRESHOLD = 0.01, 0.99
#: From before the windows that show the speech; no start is looked for further back.
LOOK_BACK_MS: Final = vad.MAX_START_SPAN * vad.WINDOW_MS


class TurnListener:
    """Input comes in order by ``put``, as long as ``stream.diverting``; what belongs to a request is admitted there.

    Everything waits for the audio before it, which is looked at in a worker thread, a piece at a time. Audio in a turn
    is handed on once it was judged, so that a turn is the same audio however that was cut on its way here.
    ``take_events`` hears what the audio means for the requests, ``tell`` what the client is told; ``listened`` is
    called when input that had to wait may come again.
    """

    def __init__(
        self,
        stream: InputStream,
        workers: SpeechWorkers,
        *,
        take_events: Callable[[Sequence[StreamEvent]], None],
        tell: Callable[[SpeechStartedFrame | SpeechStoppedFrame | OmniError], None],
        listened: Callable[[], None],
        server_speaks: Callable[[], bool],
    ) -> None:
        self._stream = stream
        self._workers = workers
        self._take_events = take_events
        self._tell = tell
        self._listened = listened
        self._server_speaks = server_speaks
        self._items = ListeningQueue(workers, lambda: None if self._piece else self._pump())
        self._listening: Listening | None = None
        self._next: Listening | None = None
        self._configured: Listening | None = None
        self._watch: SpeechWatch | None = None
        #: The audio that a thread is looking at.
        self._piece: list[InputChunk] = []
        self._ring: AudioRing | None = None
        self._source: AudioFormat | None = None
        #: Whether the audio of this source could not be decoded.
        self._deaf = False
        #: The request that the speech under way belongs to, if it still takes input.
        self._turn: StreamingInputSession | None = None
        self._speaking = False
        self._pausing = False
        self._judged_ms = 0
        #: Audio behind that which a thread has seen already.
        self._rest_ms = 0.0
        #: How many cancels are waiting for the audio before them: speech in that opens no request.
        self._cancels = 0
        #: Where the time line of the watch begins on that of the session.
        self._offset_ms = 0
        self._closed = False

    @property
    def audio(self) -> AudioFormat | None:
        """The format in which audio goes on into a request; None while nobody listens."""
        if self._listening is None or self._listening.turns is None:
            return None
        return self._listening.audio if self._listening.audio.is_raw else DECODED

    @property
    def full(self) -> bool:
        return self._items.waiting_bytes >= MAX_WAITING_BYTES

    def configure(self, listening: Listening) -> None:
        """Applies behind everything that has come, and not before the open request ends."""
        idle = self._configured is None or self._configured.turns is None
        if listening == self._configured or (idle and listening.turns is None):
            return
        self._configured = listening
        self._stream.diverting = True
        self._put(listening)

    def put(self, chunk: InputChunk | None) -> None:
        """The next chunk in order, or with None a bare end of input."""
        while chunk is not None and chunk.modality is Modality.AUDIO and len(chunk.payload) > MAX_PIECE_BYTES:
            self._put(replace(chunk, payload=chunk.payload[:MAX_PIECE_BYTES], end_of_input=False), pump=False)
            chunk = replace(chunk, payload=chunk.payload[MAX_PIECE_BYTES:])
        self._put(chunk)

    def cancel(self) -> None:
        """Nothing that waits is to be answered; the audio of it is listened to, since speech may go on behind it."""
        if self._items or self._piece:
            self._stream.reweigh(-self._items.withdraw())
            self._cancels += 1
            self._put(Mark.CANCEL)

    def close(self) -> None:
        """The session is over. Idempotent."""
        self._closed = True
        self._items.clear()
        if not self._piece:
            self._give_back_detector()

    # the queue

    def _put(self, item: Item, *, pump: bool = True) -> None:
        self._items.put(item)
        if pump and not self._piece and self._ready:
            self._pump()

    def _pump(self) -> None:
        """Do what can be done without a thread, up to the audio that needs one."""
        while not self._piece and not self._closed:
            self._apply_next()
            if not self._items or not self._ready:
                break
            item = self._items.first
            if self._listens and isinstance(item, InputChunk) and item.modality is Modality.AUDIO:
                self._look_at_next_piece()
            else:
                self._items.take()
                self._pass_on(item)
        if not self._items and not self._piece and not self._listens and self._next is None:
            self._stream.diverting = False

    def _pass_on(self, item: Item) -> None:
        match item:
            case None:
                self._end_input(None)
            case Listening():
                self._next = item
            case Mark.CANCEL:
                self._cancels -= 1
                if self._ring is not None and not self._in_turn:
                    self._forget(None)
            case InputChunk():
                self._take_events(self._stream.admit(item))

    @property
    def _ready(self) -> bool:
        """Whether it is worth while to wake a thread, or something else waits behind the audio."""
        wanted_ms = TURN_PIECE_MS if self._speaking else PIECE_MS
        waiting_ms = self._rest_ms + self._items.waiting_ms
        if self._items.urgent or waiting_ms >= wanted_ms or not self._listens:
            return True
        if self.full or self._items.overdue:
            return True  # nothing more is read, or comes, until this is looked at, however short it is
        return waiting_ms >= URGENT_PIECE_MS and (self._pausing or self._server_speaks())

    @property
    def _listens(self) -> bool:
        return self._listening is not None and self._listening.turns is not None

    def _apply_next(self) -> None:
        if self._next is None or self._stream.current is not None:
            return
        self._stop_watching()
        self._listening, self._next = self._next, None
        self._items.audio = self._listening.audio

    # the thread

    def _look_at_next_piece(self) -> None:
        assert self._listening is not None
        first = self._items.first
        assert isinstance(first, InputChunk)
        source = self._source_of(first)
        size = 0
        while self._items and size < MAX_PIECE_BYTES:
            chunk = self._items.first
            if not isinstance(chunk, InputChunk) or chunk.modality is not Modality.AUDIO:
                break
            if chunk.format != first.format and self._source_of(chunk) != source:
                break
            self._items.take()
            self._piece.append(chunk)
            size += len(chunk.payload)
            if chunk.end_of_input:
                break
        if source != self._source:
            self._source, self._deaf = source, False
        if self._deaf or not size:
            self._skip_piece()
            return
        data = b"".join(chunk.payload for chunk in self._piece)
        bar = vad.BARGE_IN_BAR if self._server_speaks() else vad.ORDINARY_BAR
        self._workers.submit(lambda: self._look_at(data, source, bar), self._looked_at)

    def _source_of(self, chunk: InputChunk) -> AudioFormat:
        assert self._listening is not None
        audio = self._listening.audio
        return audio if chunk.format is None else parse_audio_format(chunk.format, audio)

    def _look_at(self, data: bytes, source: AudioFormat, bar: vad.StartBar) -> Watched:
        """In a thread."""
        if self._watch is None:
            assert self._listening is not None
            turns = self._listening.turns
            assert turns is not None
            self._watch = SpeechWatch(
                self._workers.detectors.borrow(),
                threshold=min(max(turns.threshold, LOWEST_THRESHOLD), HIGHEST_THRESHOLD),
                silence_duration_ms=turns.silence_duration_ms,
            )
        return self._watch.hear(data, source, bar)

    def _looked_at(self, outcome: Watched | Exception) -> None:
        """On the loop again. Nothing may escape: there is nobody to catch it."""
        if self._closed:
            self._give_back_detector()
            return
        try:
            if isinstance(outcome, Exception):
                raise outcome
            self._take_piece(outcome)
        except Exception as error:
            failure = error if isinstance(error, OmniError) else unexpected(error, where="listening for turns")
            self._fail(failure)
        self._pump()
        self._listened()

    # what was heard

    def _take_piece(self, watched: Watched) -> None:
        piece, self._piece = self._piece, []
        assert self._source is not None
        self._hold(_joined(piece), self._source, watched)
        for event in watched.events:
            match event:
                case vad.SpeechOnset():
                    self._start(event)
                case vad.SpeechOffset():
                    self._stop(event)
        self._judged_ms, self._rest_ms, self._pausing = watched.judged_ms, watched.rest_ms, watched.pausing
        self._sort_out(watched.judged_ms)
        if piece[-1].end_of_input:
            self._end_input(piece[-1].sequence_id)

    def _hold(self, chunk: InputChunk, source: AudioFormat, watched: Watched) -> None:
        audio = source
        if not source.is_raw:
            audio, payload = DECODED, _pcm16(watched.samples)
            self._stream.reweigh(len(payload) - len(chunk.payload))
            chunk = replace(chunk, payload=payload, format=media_type(DECODED))
        if self._ring is None or self._ring.audio != audio:
            self._sort_out(None)
            self._ring = AudioRing(audio, start_ms=watched.start_ms)
        self._ring.append(chunk)

    def _start(self, event: vad.SpeechOnset) -> None:
        assert self._ring is not None
        assert self._listening is not None
        assert self._listening.turns is not None
        self._forget(event.audio_ms - self._listening.turns.prefix_padding_ms)
        self._speaking = True
        self._tell(SpeechStartedFrame(audio_ms=self._offset_ms + event.audio_ms))
        if self._cancels:
            return
        self._admit(self._ring.take(event.detected_ms))
        self._turn = self._stream.current

    def _stop(self, event: vad.SpeechOffset) -> None:
        assert self._ring is not None
        last = self._sort_out(event.detected_ms)
        self._tell_stopped(event.audio_ms)
        if self._in_turn:
            self._take_events(self._stream.end_input(StartTrigger.VAD, last))
        self._turn = None

    def _tell_stopped(self, audio_ms: int) -> None:
        self._speaking = False
        self._tell(SpeechStoppedFrame(audio_ms=self._offset_ms + audio_ms))

    @property
    def _in_turn(self) -> bool:
        return self._turn is not None and self._turn is self._stream.current

    def _sort_out(self, until_ms: float | None) -> int | None:
        """Audio up to here goes on into the turn, or is forgotten but for what a turn may begin with.

        None for all there is. Returns the number of the last chunk that went on.
        """
        if self._ring is None:
            return None
        if self._in_turn:
            return self._admit(self._ring.take(until_ms))
        assert self._listening is not None
        turns = self._listening.turns
        if until_ms is not None and not self._speaking and turns is not None:
            until_ms -= turns.prefix_padding_ms + LOOK_BACK_MS
        self._forget(until_ms)
        return None

    def _forget(self, until_ms: float | None) -> None:
        assert self._ring is not None
        self._stream.reweigh(-self._ring.forget(until_ms))

    def _admit(self, chunks: list[InputChunk]) -> int | None:
        for chunk in chunks:
            self._take_events(self._stream.admit(chunk, by_speech=True))
        return chunks[-1].sequence_id if chunks else None

    def _end_input(self, sequence_id: int | None) -> None:
        """The client says where a turn ends. The rest of the speech under way belongs to nobody."""
        self._sort_out(None if self._in_turn else self._judged_ms)
        self._turn = None
        self._take_events(self._stream.end_input(StartTrigger.END_OF_INPUT, sequence_id))

    # ends

    def _skip_piece(self) -> None:
        piece, self._piece = self._piece, []
        self._stream.reweigh(-sum(len(chunk.payload) for chunk in piece))
        if piece[-1].end_of_input:
            self._end_input(piece[-1].sequence_id)

    def _fail(self, error: OmniError) -> None:
        """What cannot be decoded is told once; nothing is heard until audio of another kind comes."""
        piece = self._piece
        if error.sequence_id is None and piece:
            error.sequence_id = piece[-1].sequence_id
        self._tell(error)
        if self._in_turn:
            self._take_events(self._stream.end_input(StartTrigger.VAD, error.sequence_id))
        source = self._source
        self._stop_watching()
        self._source, self._deaf = source, True
        if piece:
            self._skip_piece()

    def _stop_watching(self) -> None:
        """The stream that was listened to ends here."""
        self._turn = None
        if self._ring is not None:
            self._forget(None)
        if self._speaking:
            self._tell_stopped(self._judged_ms)
        self._offset_ms += self._judged_ms
        self._judged_ms, self._rest_ms = 0, 0.0
        self._ring = self._source = None
        self._deaf = self._pausing = False
        self._give_back_detector()

    def _give_back_detector(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            self._workers.detectors.give_back(watch.close())


def _joined(piece: list[InputChunk]) -> InputChunk:
    """One chunk with the number of the last, which is when all of it was there, and the time of the first."""
    payload = piece[0].payload if len(piece) == 1 else b"".join(chunk.payload for chunk in piece)
    return replace(
        piece[-1], payload=payload, timestamp_ms=piece[0].timestamp_ms, format=piece[0].format, end_of_input=False
    )


def _pcm16(samples: Samples) -> bytes:
    return np.rint(np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes()

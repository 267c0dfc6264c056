"""Turns the outputs of an engine into the messages of one answer, encodes its audio, and paces it."""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, TypeAlias

from omni_ws.audio.codec import AudioEncoder
from omni_ws.audio.container import wav_header
from omni_ws.audio.pcm import Pcm16, Samples
from omni_ws.core.chunks import (
    SAMPLE_BYTES,
    AudioEncoding,
    AudioFormat,
    FinalChunk,
    FinishReason,
    OutputChunk,
    OutputModality,
    Task,
    Usage,
    Word,
    WordsKnown,
)
from omni_ws.core.history import Message
from omni_ws.core.ledger import SentPiece
from omni_ws.core.ledger_entry import SentAudio, SpokenSpan, read_all
from omni_ws.engine.answer_limit import not_continued
from omni_ws.engine.base import (
    TOKENS,
    AudioOutput,
    EngineOutput,
    Finished,
    GenerationRequest,
    OutputWriter,
    PartFailed,
    TextComplete,
    TextOutput,
    ThoughtOutput,
    ToolCallOutput,
    TranscriptGuess,
    TranscriptOutput,
    WordsComplete,
)
from omni_ws.engine.channel import OUTPUT_BYTES, output_cost
from omni_ws.engine.clauses import EarlierParts
from omni_ws.engine.spoken.speakable_text import spoken_form
from omni_ws.engine.threads import Work, run_work
from omni_ws.errors import OmniError
from omni_ws.profiler import events
from omni_ws.service import (
    being_cancelled,
    identified,
    unexpected,
)
from omni_ws.service.conversation.begun_answer import RestOfAnswer, restart_of
from omni_ws.service.conversation.output_log import OutputLog, OutputSequencer, RequestWarning, message_cost
from omni_ws.service.conversation.request import Request
from omni_ws.service.observing.observer import ObservedSession, OutputMade
from omni_ws.wire.server_frames import ResponseStartedFrame, unset

_ANSWERS: Final = frozenset({WordsComplete, TextOutput, AudioOutput, ToolCallOutput, ThoughtOutput})
_TEXT: Final = OutputModality.TEXT  # found faster than a member of an enum

#: A function that writes the outputs of an answer: ``Engine.generate``, or one that says a greeting.
Generate: TypeAlias = Callable[[GenerationRequest, OutputWriter], Awaitable[None]]


class AnswerWriter:
    """The OutputWriter that an engine gets for one request: puts the answer into the outbox, output by output.

    An output that need not wait is sent within the engine's own call. An output has to wait while the outbox is full,
    its audio is not due, a thread encodes audio, or an answer is held: this one, or an earlier one that this request
    interrupts. It is then queued, as are all that follow it, and a task sends them. The writer records in the request
    what was sent. It does not send the final: the request queue does, as a cancelled answer has its
    final before the engine's call has ended.
    """

    def __init__(
        self,
        request: Request,
        outbox: OutputLog,
        sequencer: OutputSequencer,
        observed: ObservedSession,
        *,
        transcribes: bool = False,
        transcribes_first: bool = False,
    ) -> None:
        """``transcribes`` and ``transcribes_first``: see EngineCapabilities."""
        self._request = request
        self._transcribes = transcribes
        self._transcribes_first = transcribes_first
        #: Whether the engine transcribes all of the input before it answers, and has not begun to answer.
        self._answers_last = transcribes_first and request.config.task is Task.CHAT
        self._observed = observed
        self._outbox = outbox
        self._sequencer = sequencer
        self._writes = "text" in request.config.modalities
        self._speaks = "audio" in request.config.modalities
        self._audio_format = request.config.output_audio.encoded
        #: Words that are still to be told, with the next audio that is sent; see ``_put_audio``.
        self._untold: tuple[Word, ...] = ()
        #: The time of the first output of each modality.
        self._begun = request.timeline.first_outputs
        #: Outputs that wait, and their cost in bytes. Nothing may overtake them.
        self._waiting: deque[EngineOutput] = deque()
        self._waiting_bytes = 0.0
        #: The task that sends the outputs that wait; None while there are none.
        self._sending: asyncio.Task[None] | None = None
        #: The exception that ended that task.
        self._failure: BaseException | None = None
        #: Set when fewer outputs wait; None while nobody waits for that.
        self._fewer: asyncio.Event | None = None
        #: How the answer ended, and whether it has: no more outputs are accepted then.
        self._finished = Finished(FinishReason.STOP, Usage())
        self._over = False
        #: A time-out around the engine's call, rescheduled to end the call early; None while no call runs.
        self._making: asyncio.Timeout | None = None
        self._context: contextvars.Context | None = None
        #: Milliseconds of the audio that another server has told: they are not sent again.
        self._made_ms = request.entry.made_ms if request.restored else 0
        self._speech = SpeechOutput(
            self._audio_format,
            request.due_ms,
            max_lead_ms=request.config.max_lead_ms,
            released=request.released,
        )

    async def answer(
        self, generate: Generate, history: tuple[Message, ...], *, earlier: EarlierParts | None = None
    ) -> Finished:
        """Run ``generate``, send the whole answer, and return how it ended. Call this once.

        The engine sees ``history``, and the user's message begins with ``earlier``. A failure becomes the error of the
        request, unless the request was cancelled before, and ERROR is returned. If the answer is cut off, nothing more
        of it is sent, but the rest of the user's speech is still transcribed.
        """
        request = self._request
        events.current_request.set(request.request_id)
        self._context = contextvars.copy_context()
        request.timeline.times.awaits_transcript = self._transcribes_first
        request.timeline.mark_engine_started()
        self.write = self._write_first  # type: ignore[method-assign]
        finished: Finished | None = None
        failure: OmniError | None = None
        try:
            wanted = request.generation_request(history, earlier=earlier, warn=self.warn)
            out: OutputWriter = self
            if request.restored:
                wanted, out = self._behind_the_told(wanted)
            finished = await self._write_all(generate(wanted, out))
            request.know_words(WordsKnown.ALL if self._transcribes and not _deaf(request) else WordsKnown.NEVER)
            request.timeline.note_all_sent()
        except OmniError as error:
            failure = error
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and being_cancelled():
                raise
            # The engine failed, or something that it awaited was cancelled; the request was not.
            failure = unexpected(error, where=f"request {request.request_id}")
        finally:
            self._over = True
            request.know_words(WordsKnown.NEVER)
            request.timeline.mark_engine_ended(whole=finished is not None, error=failure)
            if (sending := self._sending) is not None:
                sending.cancel()
                await asyncio.wait([sending])
        await request.released()  # what is held neither ends nor fails
        if failure is not None and request.answering:
            request.fail(failure)
        return finished or Finished(FinishReason.ERROR, Usage())

    def _behind_the_told(self, wanted: GenerationRequest) -> tuple[GenerationRequest, OutputWriter]:
        """Return the request and the writer for an engine that continues an answer that another server began.

        Raises ``not_continued`` if the text sent so far was too long to be kept.
        """
        request, entry = self._request, self._request.entry
        begun = entry.said.joined()
        if len(begun) < entry.said.length:
            raise not_continued("its text is too long to be kept")
        restart = restart_of(entry, from_start=not begun or request.remark is not None)
        wanted = replace(
            wanted, begun=begun, begun_end=request.text_end, voice_from=restart.position, voice_from_ms=restart.ms
        )
        begin_at = partial(self._speech.begin_at, sent_ms=self._made_ms)
        return wanted, RestOfAnswer(self, entry, restart, begin_at=begin_at)

    async def _write_all(self, making: Awaitable[None]) -> Finished:
        """Await ``making``, the engine's call, send all its outputs, and return how the answer ended.

        Raises the exception of the engine's call, or of the task that sends outputs.
        """
        try:
            async with asyncio.timeout(None) as self._making:
                await making
        except TimeoutError:
            if self._making is None or not self._making.expired():
                raise
        finally:
            self._making = None
            while self._sending is not None and not being_cancelled():
                await asyncio.wait([self._sending])
        if self._failure is not None:
            raise self._failure
        self._over = True
        if not self._request.cut.made:
            with events.span("answer"):
                audio = await self._speech.flush()
                await self._request.released()
                if not self._request.cut.made:
                    self._put_audio(audio, last=True)
        return self._finished

    # the OutputWriter of the engine

    @property
    def full(self) -> bool:
        """Whether the engine should pause: the outbox is full, or OUTPUT_BYTES of outputs wait here."""
        if self._outbox.full_since is None and self._waiting_bytes < OUTPUT_BYTES:
            return False
        return not self._over and not self._request.cut.made

    def _write_first(self, output: EngineOutput) -> None:
        """Write an output, and note the time of the first token and of the first audio, unless the engine noted them.

        Stands in for ``write`` until both are noted, so that later outputs do not pay for the checks.
        """
        times = self._request.timeline.times
        if isinstance(output, TOKENS):
            times.mark("first_token", "answer")
        elif isinstance(output, AudioOutput):
            times.mark("first_audio_made", "answer")
        if times.first_audio_made is not None or (times.first_token is not None and not self._speaks):
            vars(self).pop("write", None)
        AnswerWriter.write(self, output)

    def write(self, output: EngineOutput) -> None:
        """Send an output, or queue it if it has to wait; see OutputWriter."""
        if self._request.onset is not None:
            self._request.onset.hear(output, transcribes_first=self._transcribes_first)
        if isinstance(output, TranscriptOutput | TranscriptGuess) and self._only_told(output):
            return
        if self._sending is None and not self._over and self._send_now(output):
            return
        if self._over or not self._wanted:
            return
        self._waiting.append(output)
        self._waiting_bytes += output_cost(output)
        if self._sending is None:
            sending = self._send_waiting()
            self._sending = asyncio.create_task(sending, name="outputs", context=self._context)

    def _only_told(self, output: TranscriptOutput | TranscriptGuess) -> bool:
        """Pass a transcript, or the guess of one, to turn detection. Return whether it is not sent to the client."""
        request = self._request
        request.timeline.note_words(output)
        if request.turn_words is not None and request.speaks:
            request.turn_words.hear(output, language=request.language_of(output) or request.ledger.language)
        if isinstance(output, TranscriptGuess):
            if request.holds is not None:
                request.holds.guess(output)
            return True
        shown = "" if request.interim is None else request.interim.text
        return output.interim and (not output.text.strip() or output.text == shown)

    async def drain(self) -> None:
        """Wait until the writer is no longer ``full``; see OutputWriter."""
        while self.full:
            if self._waiting_bytes >= OUTPUT_BYTES:
                self._fewer = self._fewer or asyncio.Event()
                await self._fewer.wait()
            else:
                await self._outbox.room()
        if self._over:
            await asyncio.sleep(0)  # the engine's call may be about to be cancelled

    async def _send_waiting(self) -> None:
        try:
            while self._waiting:
                output = self._waiting.popleft()
                self._waiting_bytes -= output_cost(output)
                if self._fewer is not None and self._waiting_bytes < OUTPUT_BYTES:
                    self._fewer.set()
                    self._fewer = None
                await self._send(output)
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and being_cancelled():
                raise
            self._failure = error
            self._stop_engine()
        finally:
            self._sending = None

    async def _send(self, output: EngineOutput) -> None:
        """Wait until an output that was queued can be sent, and send it."""
        request = self._request
        while request.onset is not None:
            await request.released()
        if not self._wanted:
            return
        held = request.holds
        if isinstance(output, Finished):
            self._end(output)
            return
        if request.cut.made:
            if self._hear_on(output):
                self._stop_engine()
            return
        if held is not None and not held.decided:
            words = held.judge(output, transcribes_first=self._transcribes_first)
            if words is None:
                return
            if not words:
                self._end(Finished(FinishReason.STOP, request.input_usage))
                self._stop_engine()
                return
            for earlier in held.take_passed_over():
                await self._write(earlier)
        self._note_answer(output)
        if self._over:
            return
        if not self._send_now(output):
            with events.span("answer"):
                await self._write(output)

    def _end(self, finished: Finished) -> None:
        """Accept no more outputs: the answer has ended as ``finished`` says."""
        self._over, self._finished = True, finished
        self._waiting.clear()

    def _stop_engine(self) -> None:
        """Accept no more outputs, and end the engine's call if it has not ended."""
        self._over = True
        self._waiting.clear()
        if self._fewer is not None:
            self._fewer.set()
        if self._making is not None:
            self._making.reschedule(asyncio.get_running_loop().time())

    @property
    def _wanted(self) -> bool:
        """Whether outputs are still wanted: for an answer, even if held, or for the transcript after it was cut off."""
        return self._request.answering or self._request.silent or self._request.cut.made

    def _hear_on(self, output: EngineOutput) -> bool:
        """Handle an output that comes after the answer was cut off: only transcripts and failed parts are noted.

        Returns whether no more transcripts can follow.
        """
        match output:
            case TranscriptOutput():
                self._request.hear(output)
            case PartFailed(error=error):
                self._request.warnings.append(error)
            case TextOutput() | AudioOutput() | ToolCallOutput() | ThoughtOutput():
                # An engine that transcribes all before it answers has done so: its answer begins here, and is unwanted.
                return self._answers_last
        return False

    def _note_answer(self, output: EngineOutput) -> None:
        """If the engine transcribes first, note at an answer's first output that all words of the input are known.

        If these words only ask for silence ("stop"), the answer ends here, empty.
        """
        if self._answers_last and type(output) in _ANSWERS:
            self._answers_last = False
            self._request.know_words(WordsKnown.ALL)
            if self._request.wants_silence:
                self._end(Finished(FinishReason.STOP, self._request.input_usage))
                self._stop_engine()

    def _send_now(self, output: EngineOutput) -> bool:
        """Send an output without waiting. Returns False, having done nothing, if the output has to wait.

        Called only while no other output waits.
        """
        if self._outbox.full_since is not None or not self._request.may_write:
            return False
        if self._request.holds is not None and not self._request.holds.decided:
            return False
        if events.recorder is not None:
            return False  # so that each output has its span
        if self._answers_last:
            self._note_answer(output)
            if self._over:
                return True
        if type(output) is TextOutput:
            self._put_text(output)
            return True
        if type(output) is AudioOutput:
            if self._speaks:
                payload = self._speech.encode_now(output.samples, output.sample_rate)
                if payload is None:
                    return False
                self._put_audio(payload, output.words, output.text_end)
            return True
        if type(output) is Finished:
            self._end(output)
            return True
        if type(output) is TranscriptOutput:
            self._request.hear(output)
        self._put_output(output)
        return True

    async def _write(self, output: EngineOutput) -> None:
        """Wait until the output can be sent, and put it into the outbox."""
        if isinstance(output, AudioOutput):
            if self._speaks:
                payload = await self._speech.encode(output.samples, output.sample_rate)
                if await self._room():
                    self._put_audio(payload, output.words, output.text_end)
            return
        if isinstance(output, TranscriptOutput):
            self._request.hear(output)  # whether it will be sent or not
        if await self._room():
            self._put_output(output)

    async def _room(self) -> bool:
        """Wait until the outbox has room and the answer is not held. Returns whether the answer may still be sent."""
        request, outbox = self._request, self._outbox
        while not request.cut.made and (request.silent or outbox.full):
            await (request.released() if request.silent else outbox.room())
        return request.answering and not request.cut.made

    # Nothing below waits: there is room in the outbox.

    def _put_output(self, output: EngineOutput) -> None:
        """Put an output other than audio into the outbox."""
        request = self._request
        match output:
            case TextOutput():
                self._put_text(output)
            case ToolCallOutput(call=call, choice=choice):
                number = self._sequencer.take_number(request.request_id)
                modality = OutputModality.TOOL_CALL
                self._put(OutputChunk(request.request_id, number, modality, tool_call=call, choice=choice))
                request.entry.call(call)
            case ThoughtOutput(text=text, choice=choice):
                if request.options.thought:
                    number = self._sequencer.take_number(request.request_id)
                    modality = OutputModality.THOUGHT
                    self._put(OutputChunk(request.request_id, number, modality, text, choice=choice))
            case TextComplete(finished=finished):
                request.note_text_end(finished)
                if self._outbox.gate is not None:
                    self._outbox.gate.changed()
            case TranscriptOutput():
                if output in request.unsent:
                    request.unsent.remove(output)
                self._put(transcript_chunk(request, output, sequencer=self._sequencer))
            case PartFailed(error=error):
                error.about(request_id=request.request_id, ref=request.ref)
                request.warnings.append(identified(error, where=f"a part of request {request.request_id}"))
                self._outbox.put_nowait(RequestWarning(error))
            case _:
                pass

    def warn(self, error: OmniError) -> None:
        """Send the client a warning about a part of the input that the request goes on without.

        Later errors of the same type are not sent.
        """
        request = self._request
        if not any(type(warning) is type(error) for warning in request.warnings):
            error.about(request_id=request.request_id, ref=request.session.ref_of(error.sequence_id))
            request.warnings.append(error)
            self._outbox.put_nowait(RequestWarning(error))

    def _put_text(self, output: TextOutput) -> None:
        request, text = self._request, output.text
        request.entry.say(text)
        if self._writes and (text or output.logprobs):
            request_id = request.request_id
            number = self._sequencer.take_number(request_id)
            chunk = OutputChunk(
                request_id,
                number,
                _TEXT,
                text,
                logprobs=output.logprobs,
                choice=output.choice,
                refusal=output.refusal,
            )
            self._put(chunk)
        elif text and self._outbox.gate is not None:
            self._outbox.gate.said(request.request_id, text)

    def _put_audio(
        self, payload: bytes, words: tuple[Word, ...] = (), text_end: int | None = None, *, last: bool = False
    ) -> None:
        """Put audio that ``_speech`` has just encoded into the outbox, except what another server has sent already.

        ``words`` whose audio is not sent now, since the encoder buffers it or the client has it, are sent with the next
        audio. Words that are left over after the ``last`` audio are sent with an empty chunk.
        """
        request, speech, entry = self._request, self._speech, self._request.entry
        if self._untold:
            words, self._untold = self._untold + words, ()
        again = speech.start_ms < self._made_ms
        if again:
            payload = speech.behind(self._made_ms, payload)
            if last and not payload:
                speech.move_to(self._made_ms)
        if not payload and not (last and words):
            self._untold = words
            if text_end is not None and not (again and text_end <= entry.read_end):
                entry.read_to(text_end, speech.start_ms, speech.end_ms)
            return
        if request.unknown_audio:
            number = request.take_unknown()
            request.ledger.send(entry, number, round(speech.start_ms), speech.end_ms, request.timeline.now())
        else:
            start_ms = round(speech.start_ms)
            number = self._sequencer.take_number(request.request_id)
            chunk = OutputChunk(
                request.request_id,
                number,
                OutputModality.AUDIO,
                payload=payload,
                format=self._audio_format,
                start_ms=start_ms,
                words=words,
            )
            self._put(chunk)
            now = request.timeline.now()
            request.ledger.send(entry, number, start_ms, speech.end_ms, now)
            if (sound := request.ledger.sound) is not None:
                sound.add(SentPiece(request.request_id, speech.start_ms, self._audio_format, payload))
            if entry.kept is not None:
                sent = SentAudio(chunk, speech.start_ms, speech.end_ms, message_cost(chunk))
                request.ledger.keep_unheard(entry, sent, now)
        if words:
            entry.pronounce(words)
        elif text_end is not None:
            entry.read_to(text_end, speech.start_ms, speech.end_ms)

    def _put(self, chunk: OutputChunk) -> None:
        if chunk.modality not in self._begun:
            self._request.timeline.mark_output_began(chunk.modality)
        if self._observed.observers.listening_to_outputs:
            self._observed.notify(OutputMade(chunk))
        self._outbox.put_nowait(chunk)


def _deaf(request: Request) -> bool:
    """Return whether speech recognition failed for a request, so that the engine answers without the speech."""
    return any(warning.param == "asr" for warning in request.warnings)


# The messages of an answer.


def started_frame(request: Request) -> ResponseStartedFrame:
    """Return the frame that announces the answer to a request that has started."""
    assert request.started is not None
    return ResponseStartedFrame(
        request_id=request.request_id,
        trigger=request.started.trigger,
        sequence_id=request.started.sequence_id,
        input_mode=request.session.settings.mode,
        ref=unset(request.ref),
        turn_id=unset(request.turn_id),
    )


def transcript_chunk(request: Request, transcript: TranscriptOutput, *, sequencer: OutputSequencer) -> OutputChunk:
    """Return a transcript as an output chunk, with the next number."""
    return OutputChunk(
        request_id=request.request_id,
        sequence_id=sequencer.take_number(request.request_id),
        modality=OutputModality.TRANSCRIPT,
        text=transcript.text,
        interim=transcript.interim,
        start_ms=transcript.start_ms,
        words=transcript.words,
        hearing=transcript.hearing,
        turn_id=request.turn_id,
    )


def late_transcript(request: Request, *, sequencer: OutputSequencer) -> OutputChunk:
    """Return the transcripts that were not sent before the final, joined in one chunk, whose text may be empty.

    Marks the transcripts as sent. The chunk has the next number.
    """
    unsent = request.take_unsent()
    return OutputChunk(
        request_id=request.request_id,
        sequence_id=sequencer.take_late_number(request.request_id),
        modality=OutputModality.TRANSCRIPT,
        text="".join(transcript.text for transcript in unsent),
        start_ms=next((transcript.start_ms for transcript in unsent), None),
        words=tuple(word for transcript in unsent for word in transcript.words),
        hearing=next((one.hearing for one in reversed(unsent) if one.hearing is not None), None),
        late=True,
        failed=request.words is WordsKnown.NEVER,
        turn_id=request.turn_id,
    )


def final_chunk(
    request: Request, reason: FinishReason, finished: Finished | None, *, sequencer: OutputSequencer
) -> FinalChunk:
    """Return the final, with the next number. ``finished`` is the Finished of the engine; None if it wrote none."""
    if finished is None or reason in (FinishReason.CANCELLED, FinishReason.ERROR):
        words = request.words if request.spoke else WordsKnown.ALL
        return FinalChunk(
            request_id=request.request_id,
            sequence_id=sequencer.take_last_number(request.request_id, late=words is WordsKnown.NOT_YET),
            finish_reason=reason,
            usage=request.usage(None),
            words=words,
            ref=request.ref,
            turn_id=request.turn_id,
            times=request.timeline.times.in_ms(),
        )
    return FinalChunk(
        request_id=request.request_id,
        sequence_id=sequencer.take_last_number(request.request_id),
        finish_reason=reason,
        usage=request.usage(finished.usage),
        finish_reasons=finished.reasons,
        foreign_reasons=finished.foreign_reasons,
        warnings=(*request.warnings, *finished.warnings),
        citations=finished.citations,
        ref=request.ref,
        turn_id=request.turn_id,
        times=request.timeline.times.in_ms(),
    )


# The sound of an answer.

#: Longer pieces, and all compressed audio, are encoded in a worker thread. For short raw pieces the switch would cost
#: more than the encoding.
_INLINE_SAMPLES: Final = 24_000
#: Audio that is early by less is sent: clocks round, and a timer may fire a little early.
_LEAST_SLEEP_MS: Final = 0.5


class SpeechOutput:
    """The encoder of one answer's audio: encodes samples as ``target``, tracks positions in the answer, and paces it.

    Audio is returned at most ``max_lead_ms`` before its playback is due; with None, without waiting. ``due_ms`` maps a
    position in the answer, in milliseconds, to the milliseconds until it will be played. ``released`` waits while the
    answer is held.
    """

    def __init__(
        self,
        target: AudioFormat,
        due_ms: Callable[[float], float],
        *,
        max_lead_ms: float | None,
        released: Callable[[], Awaitable[None]],
    ) -> None:
        #: Where in the answer the latest audio begins, and where it ends.
        self.start_ms: float = 0
        self.end_ms: float = 0
        self._target = target
        self._is_raw = target.is_raw
        self._bytes_per_second = target.bytes_per_second
        self._due_ms = due_ms
        self._max_lead_ms = max_lead_ms
        self._released = released
        self._encoder: AudioEncoder | None = None
        self._source_rate = 0
        self._header_left = len(wav_header(sample_rate=target.sample_rate, channels=1, data_bytes=None))
        #: Whether another server has sent the beginning, and the samples before the end of that, in milliseconds.
        self._goes_on = False
        self._skip_ms = 0.0

    def begin_at(self, start_ms: float, *, sent_ms: float) -> None:
        """Begin at ``start_ms`` of an answer of which another server has sent the first ``sent_ms``. Call it first.

        PCM audio is encoded from ``start_ms`` on, and ``behind`` cuts off the part that was sent. Compressed audio is
        encoded only from ``sent_ms`` on, as a new file; what the other server's encoder had buffered is lost (up to 200
        ms with Opus).
        """
        self.move_to(start_ms)
        self._goes_on = True
        if not self._is_pcm:
            self._skip_ms = max(0.0, sent_ms - start_ms)

    def move_to(self, position_ms: float) -> None:
        """Set the position in the answer at which the next audio begins."""
        self.start_ms = self.end_ms = position_ms

    @property
    def _is_pcm(self) -> bool:
        return self._is_raw or self._target.encoding is AudioEncoding.WAV

    def behind(self, position_ms: float, payload: bytes) -> bytes:
        """Return the part of ``payload``, the audio encoded last, that is after ``position_ms``; b"" if there is none.

        Sets ``start_ms`` to the beginning of that part. Compressed audio is returned whole, with ``start_ms`` as it is.
        """
        samples = round((self.end_ms - position_ms) * self._target.sample_rate / 1000)
        if samples <= 0:
            return b""
        if not self._is_pcm:
            return payload
        self.start_ms = self.end_ms - samples * 1000 / self._target.sample_rate
        return payload[-samples * SAMPLE_BYTES.get(self._target.encoding, 2) :]

    def encode_now(self, samples: Samples | Pcm16, sample_rate: int) -> bytes | None:
        """Encode samples as ``encode`` does, without waiting.

        Returns None, having done nothing, if it would have to wait. Raises ValueError as ``encode`` does.
        """
        if not self._is_raw or len(samples) > _INLINE_SAMPLES:
            return None
        if self._max_lead_ms is not None and self._ahead_ms(self.end_ms) >= _LEAST_SLEEP_MS:
            return None
        if sample_rate != self._source_rate:
            self._open(sample_rate)
        assert self._encoder is not None
        payload = self._encoder.encode(samples)
        self.start_ms = self.end_ms
        self.end_ms += len(payload) * 1000 / self._bytes_per_second
        return payload

    async def encode(self, samples: Samples | Pcm16, sample_rate: int) -> bytes:
        """Encode samples, and wait until they are due. Returns b"" while the encoder buffers them all.

        Raises ValueError if the sample rate changes within the answer.
        """
        if sample_rate != self._source_rate:
            self._open(sample_rate)
        assert self._encoder is not None
        if self._skip_ms:
            samples = self._skipped(samples)
        if self._is_raw and len(samples) <= _INLINE_SAMPLES:
            payload = self._encoder.encode(samples)
        else:
            payload = await run_work(Work.ENCODING, self._encoder.encode, samples)
        return await self._place(payload, len(samples) * 1000 / sample_rate)

    def _skipped(self, samples: Samples | Pcm16) -> Samples | Pcm16:
        """Return samples without those that the other server has sent, see ``begin_at``."""
        skipped = min(len(samples), round(self._skip_ms * self._source_rate / 1000))
        skipped_ms = skipped * 1000 / self._source_rate
        self._skip_ms = self._skip_ms - skipped_ms if skipped else 0.0
        self.end_ms += skipped_ms
        return samples[skipped:]

    def _open(self, sample_rate: int) -> None:
        """Create the encoder, at the first samples. Raises ValueError if it exists: the sample rate has changed."""
        if self._encoder is not None:
            raise ValueError("the sample rate must not change within an answer")
        self._encoder = AudioEncoder(self._target, source_rate=sample_rate)
        self._source_rate = sample_rate

    async def flush(self) -> bytes:
        """Encode the samples that the encoder still buffers at the end of the answer, and wait until they are due."""
        if self._encoder is None:
            return b""
        if self._is_raw:
            payload = self._encoder.flush()
        else:
            payload = await run_work(Work.ENCODING, self._encoder.flush)
        return await self._place(payload, 0)

    async def _place(self, payload: bytes, source_ms: float) -> bytes:
        self.start_ms = self.end_ms
        # Raw audio is measured by its bytes, which include the delay of the resampler; compressed audio by its source.
        size = len(payload)
        if self._target.encoding is AudioEncoding.WAV:
            header = min(size, self._header_left)
            self._header_left -= header
            payload = payload[header:] if self._goes_on else payload
            self.end_ms += self._target.duration_ms(size - header)
        else:
            self.end_ms += self._target.duration_ms(size) if self._is_raw else source_ms
        if payload:
            # Again after the sleep: a report, or a hold, may have set the position back meanwhile.
            while (ahead_ms := self._ahead_ms(self.start_ms)) >= _LEAST_SLEEP_MS:
                await asyncio.sleep(ahead_ms / 1000)
                await self._released()
        return payload

    def _ahead_ms(self, start_ms: float) -> float:
        """Return the milliseconds until audio at ``start_ms`` may be sent; 0 or less if it may be sent now."""
        return 0 if self._max_lead_ms is None else self._due_ms(start_ms) - self._max_lead_ms


#: Of a longer text, every character counts as read aloud: to find the parts that are would take too long.
MAX_MEASURED_CHARACTERS: Final = 1 << 15


def read_aloud(text: str) -> Sequence[SpokenSpan]:
    """Return the spans of ``text`` that a voice reads, with their spoken lengths.

    Positions in the text are mapped to times in its audio in proportion to these lengths. Code and addresses are not
    read, and take no time.
    """
    if len(text) > MAX_MEASURED_CHARACTERS:
        return read_all(text)
    return [SpokenSpan(piece.start, piece.end, len(piece.text)) for piece in spoken_form(text, language="")]

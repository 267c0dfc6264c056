"""AnswerWriter: turns the outputs of an engine into the messages of one answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Final, TypeAlias

from omni_ws.core.chunks import FinishReason, OutputModality, Usage, Word
from omni_ws.core.output import FinalChunk, OutputChunk, OutputSequencer
from omni_ws.core.request_input import GenerationStarted
from omni_ws.engine.base import (
    AudioOutput,
    EngineOutput,
    Finished,
    GenerationRequest,
    Message,
    PartFailed,
    TextOutput,
    ThoughtOutput,
    ToolCallOutput,
    TranscriptOutput,
)
from omni_ws.errors import OmniError
from omni_ws.profiler import events
from omni_ws.service.conversation.held_answer import HeldAnswer
from omni_ws.service.conversation.messages import RequestWarning
from omni_ws.service.conversation.outbox import Outbox
from omni_ws.service.conversation.request import Request
from omni_ws.service.conversation.request_state import RequestState
from omni_ws.service.conversation.speech_output import SpeechOutput
from omni_ws.service.failure import being_cancelled, identified, unexpected
from omni_ws.service.observing.observer import ObservedSession, OutputMade
from omni_ws.wire.server_frames import ResponseStartedFrame

#: Words of an answer that are kept, to find out which of them an interrupted client heard: an hour of speech.
MAX_KEPT_WORDS: Final = 1 << 14

_TEXT: Final = OutputModality.TEXT  # found faster than a member of an enum

#: Makes the outputs of an answer: ``Engine.generate``, but for greetings.
Generate: TypeAlias = Callable[[GenerationRequest], AsyncIterator[EngineOutput]]


class AnswerWriter:
    """Writes the answer to one request into the outbox, output by output, and waits while the outbox is full.

    It is the OutputSink of the request: what needs no wait is written inside the engine's own call. It records in the
    request what was sent. The final is the queue's: a cancelled answer gets it before its engine has wound up.
    """

    def __init__(
        self,
        request: Request,
        outbox: Outbox,
        sequencer: OutputSequencer,
        observed: ObservedSession,
        *,
        held: HeldAnswer | None = None,
        transcribes_first: bool = False,
    ) -> None:
        """``held`` is the answer that the request interrupted; until it has words, nothing of its own is written."""
        self._request = request
        self._held = held
        self._transcribes_first = transcribes_first
        self._observed = observed
        self._outbox = outbox
        self._sequencer = sequencer
        self._writes = "text" in request.config.modalities
        self._speaks = "audio" in request.config.modalities
        self._audio_format = request.output_format
        #: By modality, the first output.
        self._begun = request.timeline.first_outputs
        #: Whether an output is waiting, or being encoded. Nothing may overtake it.
        self._busy = False
        self._speech = SpeechOutput(
            self._audio_format,
            request.playback,
            max_lead_ms=request.config.max_lead_ms,
            released=request.released,
        )

    async def answer(self, generate: Generate, history: tuple[Message, ...]) -> Finished:
        """Write the whole answer. A failure becomes the error of the request, unless that was cancelled before."""
        request = self._request
        events.current_request.set(request.request_id)
        request.timeline.mark_engine_started()
        finished: Finished | None = None
        failure: OmniError | None = None
        try:
            finished = await self._write_all(generate(request.generation_request(history, sink=self, warn=self.warn)))
        except OmniError as error:
            failure = error
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and being_cancelled():
                raise
            # The engine failed, or something that it awaited was cancelled; the request was not.
            failure = unexpected(error, where=f"request {request.request_id}")
        finally:
            request.timeline.mark_engine_ended(whole=finished is not None, error=failure)
        await request.released()  # what is held neither ends nor fails
        if failure is not None and request.answering:
            request.fail(failure)
        return finished or Finished(FinishReason.ERROR, Usage())

    async def _write_all(self, outputs: AsyncIterator[EngineOutput]) -> Finished:
        """Write each output up to the Finished, and return that. Raises what the engine raises."""
        finished = Finished(FinishReason.STOP, Usage())
        async with aclosing(outputs):  # type: ignore[type-var]  # an async generator, by the contract of Engine
            async for output in outputs:
                if isinstance(output, Finished):
                    finished = output
                    break
                if self._held is not None and not self._held.decided:
                    words = self._held.judge(output, transcribes_first=self._transcribes_first)
                    if words is None:
                        continue
                    if not words:
                        finished = Finished(FinishReason.STOP, self._request.input_usage)
                        break
                if self.offer(output):
                    continue
                with events.span("answer"):
                    await self._write(output)
        with events.span("answer"):
            self._busy = True
            audio = await self._speech.flush()
            await self._request.released()
            self._put_audio(audio)
        return finished

    def offer(self, output: EngineOutput) -> bool:
        """See OutputSink."""
        if self._busy or self._outbox.full_since is not None or not self._request.answering:
            return False
        if self._held is not None and not self._held.decided:
            return False
        if events.recorder is not None:
            return False  # so that each output has its span
        if type(output) is TextOutput:
            self._put_text(output)
            return True
        if type(output) is AudioOutput:
            if self._speaks:
                payload = self._speech.encode_now(output.samples, output.sample_rate)
                if payload is None:
                    return False
                self._put_audio(payload, output.words)
            return True
        if type(output) is Finished:
            return False
        if type(output) is TranscriptOutput:
            self._hear(output)
        self._put_output(output)
        return True

    async def _write(self, output: EngineOutput) -> None:
        """Wait until the output can be sent, and queue it."""
        self._busy = True
        try:
            if isinstance(output, AudioOutput):
                if self._speaks:
                    payload = await self._speech.encode(output.samples, output.sample_rate)
                    await self._room()
                    self._put_audio(payload, output.words)
                return
            if isinstance(output, TranscriptOutput):
                self._hear(output)
            await self._room()
            self._put_output(output)
        finally:
            self._busy = False

    async def _room(self) -> None:
        """Wait until there is room, and the answer is not held."""
        await self._outbox.room()
        while self._request.state is RequestState.HELD:
            await self._request.released()
            await self._outbox.room()

    def _hear(self, transcript: TranscriptOutput) -> None:
        """Keep what the user said, whether its transcript will be sent or not."""
        if not transcript.interim:
            self._request.heard.append(transcript.text)

    # Nothing below waits: there is room in the outbox.

    def _put_output(self, output: EngineOutput) -> None:
        """Queue an output other than audio."""
        request = self._request
        match output:
            case TextOutput():
                self._put_text(output)
            case ToolCallOutput(call=call, choice=choice):
                number = self._sequencer.take_number(request.request_id)
                modality = OutputModality.TOOL_CALL
                self._put(OutputChunk(request.request_id, number, modality, tool_call=call, choice=choice))
                request.called(call)
            case ThoughtOutput(text=text, choice=choice):
                if request.options.thought:
                    number = self._sequencer.take_number(request.request_id)
                    modality = OutputModality.THOUGHT
                    self._put(OutputChunk(request.request_id, number, modality, text, choice=choice))
            case TranscriptOutput(interim=interim):
                request.interim = output if interim else None
                self._put(transcript_chunk(request, output, sequencer=self._sequencer))
            case PartFailed(error=error):
                error.request_id = request.request_id
                request.warnings.append(identified(error, where=f"a part of request {request.request_id}"))
                self._outbox.put_nowait(RequestWarning(error))
            case _:
                pass

    def warn(self, error: OmniError) -> None:
        """Tell the client, once, of something in its input that the request goes on without."""
        request = self._request
        if not any(type(warning) is type(error) for warning in request.warnings):
            error.request_id = request.request_id
            request.warnings.append(error)
            self._outbox.put_nowait(RequestWarning(error))

    def _put_text(self, output: TextOutput) -> None:
        request, text = self._request, output.text
        if self._writes and (text or output.logprobs):
            request_id = request.request_id
            number = self._sequencer.take_number(request_id)
            chunk = OutputChunk(request_id, number, _TEXT, text, logprobs=output.logprobs, choice=output.choice)
            self._put(chunk)
            request.said.append(text)

    def _put_audio(self, payload: bytes, words: tuple[Word, ...] = ()) -> None:
        """Queue audio that ``_speech`` has just encoded, which may be none."""
        request, speech = self._request, self._speech
        if payload:
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
            request.playback.sending(number, start_ms, speech.end_ms)
            if request.unheard_output is not None:
                heard_ms = request.playback.resume_ms
                request.unheard_output.append(chunk, start_ms=speech.start_ms, end_ms=speech.end_ms, heard_ms=heard_ms)
        if words and len(request.spoken) < MAX_KEPT_WORDS:
            request.spoken += words

    def _put(self, chunk: OutputChunk) -> None:
        if chunk.modality not in self._begun:
            self._request.timeline.mark_output_began(chunk.modality)
        if self._observed.listening_to_outputs:
            self._observed.notify(OutputMade(chunk))
        self._outbox.put_nowait(chunk)


def started_frame(request: Request, event: GenerationStarted) -> ResponseStartedFrame:
    """The frame that announces the answer to a request."""
    return ResponseStartedFrame(
        request_id=request.request_id,
        trigger=event.trigger,
        sequence_id=event.sequence_id,
        input_mode=request.session.settings.mode,
    )


def transcript_chunk(request: Request, transcript: TranscriptOutput, *, sequencer: OutputSequencer) -> OutputChunk:
    """The output of a transcript, with the next number."""
    return OutputChunk(
        request_id=request.request_id,
        sequence_id=sequencer.take_number(request.request_id),
        modality=OutputModality.TRANSCRIPT,
        text=transcript.text,
        interim=transcript.interim,
        start_ms=transcript.start_ms,
        words=transcript.words,
    )


def final_chunk(
    request: Request, reason: FinishReason, finished: Finished | None, *, sequencer: OutputSequencer
) -> FinalChunk:
    """The final, with the next number. The engine's own ``finished`` counts unless the answer was cut short."""
    if finished is None or reason in (FinishReason.CANCELLED, FinishReason.ERROR):
        return sequencer.finish(request.request_id, reason, request.usage(None))
    return sequencer.finish(
        request.request_id,
        reason,
        request.usage(finished.usage),
        finish_reasons=finished.reasons,
        warnings=tuple(request.warnings),
    )


async def over(answer: asyncio.Task[None]) -> None:
    """Wait for the end of an answer's task. Cancelled while it waits, cancel the task and wait on."""
    try:
        await asyncio.wait([answer])
    finally:
        if not answer.done():
            if not answer.cancelling():  # a second time would interrupt its engine as it winds up
                answer.cancel()
            await asyncio.wait([answer])

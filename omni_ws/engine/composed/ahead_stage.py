"""AheadStage: begins the answer while the user pauses, and holds it back until the turn has ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from omni_ws.core.chunks import InputChunk, Usage
from omni_ws.engine.base import EngineOutput, Finished, GenerationRequest, HeardLanguage, UsageMeter
from omni_ws.engine.channel import OUTPUT_BYTES, Channel, ChannelClosed, Outputs, output_cost, pipeline
from omni_ws.engine.composed.parts import AheadLoad, AnswerUnderWay, SpeculationOutcome
from omni_ws.engine.composed.stages import INPUT_LINK, AnswerStages, Guess
from omni_ws.engine.decoding import Chunks
from omni_ws.engine.turn_times import TurnTimes

#: How many answers are begun ahead for one request at most, since a user may pause often.
MOST_TRIES: Final = 8
#: The limit, in bytes, on input that is kept for a second LLM request. With more input no answer is begun ahead: it
#: would be sent, and images decoded, twice.
MAX_KEPT_BYTES: Final = 64 * 1024


class AheadStage:
    """A Stage of one request: chunks and Guesses in; the answer to the client.

    Two answers may be in progress. The *open* answer reads the input as it arrives, as it would without this stage. The
    answer *ahead* was begun at a pause, with the input so far and the guess of the rest; its outputs are held back. If
    the complete input equals the guess, the answer ahead is released and the open one cancelled; otherwise the answer
    ahead is discarded. So nothing that a user sees or hears, nor the history, depends on a guess.
    """

    name = "answer"

    def __init__(
        self,
        answered: Callable[[GenerationRequest], AnswerStages],
        request: GenerationRequest,
        load: AheadLoad,
        *,
        report: Callable[[SpeculationOutcome], None],
    ) -> None:
        #: How the answer ended; None until then.
        self.finished: Finished | None = None
        self._answered = answered
        self._request = request
        self._load = load
        self._report = report
        self._ahead: _Attempt | None = None
        #: The input so far.
        self._given: list[InputChunk] = []
        self._kept_bytes = 0
        self._tries = 0
        #: A timeout that is used to stop reading the input; None while the input is not read.
        self._reading: asyncio.Timeout | None = None

    async def run(self, source: AsyncIterator[InputChunk | Guess], sink: Channel[Any] | None, outputs: Outputs) -> None:
        """Answer the input that ``source`` yields, and write the answer to ``outputs``."""
        prompt: Channel[InputChunk] = Channel(INPUT_LINK.capacity, cost=INPUT_LINK.cost)
        opened = _Attempt(self._answered, replace(self._request, input=prompt), prompt, outputs)
        passing = asyncio.create_task(self._pass_on(opened, outputs), name="open answer")
        try:
            await self._read(source, prompt, outputs)
            if (ahead := self._ahead_of(opened)) is not None:
                passing.cancel()
                opened.cancel()
                await self._use(ahead)
            else:
                await self._drop(SpeculationOutcome.DIFFERED)
                opened.count(self._load.begin(ahead=False))
                prompt.close()
                await passing
                if outputs.closed:
                    raise ChannelClosed
                self.finished = opened.finished
        finally:
            # All are cancelled before the first await: this task may be cancelled again while it waits.
            passing.cancel()
            opened.cancel()
            if self._ahead is not None:
                self._ahead.cancel()
            await self._drop(SpeculationOutcome.FAILED)
            await asyncio.gather(passing, return_exceptions=True)
            await opened.aclose()

    async def _read(
        self, source: AsyncIterator[InputChunk | Guess], prompt: Channel[InputChunk], outputs: Outputs
    ) -> None:
        """Copy the input to ``prompt``, and act on Guesses, until the input or the open answer ends."""
        with suppress(TimeoutError):
            async with asyncio.timeout(None) as self._reading:
                async for item in source:
                    if isinstance(item, Guess):
                        await self._take_guess(item, outputs)
                    else:
                        await self._take(item)
                        await prompt.put(item)
        self._reading = None

    def _ahead_of(self, opened: _Attempt) -> _Attempt | None:
        """Return the answer ahead if it was begun with the whole input, and the open answer has no output yet."""
        ahead = self._ahead
        if ahead is None or ahead.failed or opened.began or ahead.input != tuple(self._given):
            return None
        return ahead if ahead.language == self._request.heard_language.code else None

    async def _pass_on(self, opened: _Attempt, outputs: Outputs) -> None:
        try:
            await opened.release()
            if self._reading is not None:
                self._reading.reschedule(asyncio.get_running_loop().time())
        except Exception as error:
            outputs.fail(error)  # at once: the speaker may say nothing more for a while

    async def _take(self, chunk: InputChunk) -> None:
        self._kept_bytes += len(chunk.payload)
        if self._kept_bytes > MAX_KEPT_BYTES:
            self._given.clear()
            await self._drop(SpeculationOutcome.WENT_ON)
            return
        self._given.append(chunk)
        ahead = self._ahead
        if ahead is not None and ahead.input[: len(self._given)] != tuple(self._given):
            guessed = len(self._given) == len(ahead.input)
            await self._drop(SpeculationOutcome.DIFFERED if guessed else SpeculationOutcome.WENT_ON)

    async def _take_guess(self, guess: Guess, outputs: Outputs) -> None:
        await self._drop(SpeculationOutcome.WENT_ON)
        chunk = guess.chunk
        if chunk is None or self._tries >= MOST_TRIES or self._kept_bytes > MAX_KEPT_BYTES:
            return
        self._tries += 1
        if not self._load.has_room:
            self._report(SpeculationOutcome.SKIPPED)
            return
        given = (*self._given, chunk)
        request_id = f"{self._request.request_id}-ahead{self._tries}"
        heard = self._request.heard_language
        guessed = HeardLanguage(heard.before, code=guess.language or self._request.language or heard.code)
        request = replace(
            self._request,
            request_id=request_id,
            input=Chunks(given),
            meter=UsageMeter(),
            heard_language=guessed,
            times=TurnTimes(),
        )
        self._ahead = _Attempt(self._answered, request, Chunks(given), outputs, given=given)
        self._ahead.count(self._load.begin(ahead=True))

    async def _use(self, ahead: _Attempt) -> None:
        self._report(SpeculationOutcome.USED)
        self._ahead = None
        self._request.meter.read = ahead.read_meter
        self._request.times.take_over(ahead.times)
        try:
            await ahead.release()
            self.finished = ahead.finished
        finally:
            await ahead.aclose()

    async def _drop(self, outcome: SpeculationOutcome) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            self._report(SpeculationOutcome.FAILED if ahead.failed else outcome)
            seconds, usage = ahead.spent()
            self._request.times.discard(seconds, 0 if usage is None else usage.output_tokens)
            await ahead.aclose()


class _Attempt:
    """An answer in progress, and its OutputWriter. Its outputs are held back, up to a limit, until ``release``."""

    def __init__(
        self,
        answered: Callable[[GenerationRequest], AnswerStages],
        request: GenerationRequest,
        source: Any,
        outputs: Outputs,
        *,
        given: tuple[InputChunk, ...] = (),
    ) -> None:
        #: For an answer ahead, the input so far and the guess; otherwise empty.
        self.input = given
        #: The language in which the user spoke, as the answer was told.
        self.language = request.heard_language.code
        #: Whether the answer has any output.
        self.began = False
        self.failed = False
        #: When it took its steps. The open answer marks them in the request's own.
        self.times = request.times
        self._answer = answered(request)
        self._meter = request.meter
        self._loop = asyncio.get_running_loop()
        self._begun_at = self._loop.time()
        self._ended_at: float | None = None
        self._outputs = outputs
        self._held: list[EngineOutput] = []
        self._held_bytes = 0.0
        self._released = asyncio.Event()
        self._error: Exception | None = None
        self._under_way: AnswerUnderWay | None = None
        self._making = asyncio.create_task(self._make(source), name=f"answer {request.request_id}")

    @property
    def finished(self) -> Finished:
        """The Finished of the answer."""
        return self._answer.finished

    def read_meter(self) -> Any:
        """Return the usage so far, or None; see UsageMeter."""
        return self._meter.read()

    def spent(self) -> tuple[float, Usage | None]:
        """Return how long the answer was worked on so far, in seconds, and what it used, if that is known."""
        ended = self._loop.time() if self._ended_at is None else self._ended_at
        return ended - self._begun_at, self._meter.read()

    def count(self, under_way: AnswerUnderWay) -> None:
        """Note that the input is complete: from now on ``under_way`` measures the answer."""
        self._under_way = under_way

    @property
    def full(self) -> bool:
        return self._outputs.full if self._released.is_set() else self._held_bytes >= OUTPUT_BYTES

    def write(self, output: EngineOutput) -> None:
        """See OutputWriter."""
        self.began = True
        if self._under_way is not None:
            self._under_way.note_output()
        if self._released.is_set():
            self._outputs.write(output)
        else:
            self._held.append(output)
            self._held_bytes += output_cost(output)

    async def drain(self) -> None:
        """See OutputWriter."""
        if self._held_bytes >= OUTPUT_BYTES:
            await self._released.wait()
        if self._released.is_set():
            await self._outputs.drain()

    async def release(self) -> None:
        """Pass on the outputs held back, and all later ones; return at the end. Raises the error of the answer."""
        self._released.set()
        if self._under_way is not None:
            self._under_way.used()
        for output in self._held:
            self._outputs.write(output)
        self._held.clear()
        await asyncio.wait([self._making])
        if self._error is not None:
            raise self._error

    async def _make(self, source: Any) -> None:
        try:
            await pipeline(aiter(source), self._answer.stages, self._answer.links, self)
        except Exception as error:
            self.failed = True
            self._error = error
        finally:
            self._ended_at = self._loop.time()
            if self._under_way is not None:
                self._under_way.end()

    def cancel(self) -> None:
        """Cancel the answer, without waiting for its end. Idempotent."""
        self._held.clear()
        if not self._making.done() and not self._making.cancelling():
            self._making.cancel()

    async def aclose(self) -> None:
        """Cancel the answer, and wait for its end. Idempotent."""
        self.cancel()
        await asyncio.gather(self._making, return_exceptions=True)
        if self._under_way is not None:
            self._under_way.end()  # a task that is cancelled before its first step has not done so

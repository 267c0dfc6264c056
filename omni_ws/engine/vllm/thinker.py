"""Thinker: the Stage that builds a prompt while its input arrives, and generates the answer."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from concurrent.futures import Executor
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from omni_ws.audio.pcm import Samples
from omni_ws.core.chunks import AnswerWarning, FinishReason, InputMode, Modality, TokenLogprob, context_full
from omni_ws.core.history import Speech
from omni_ws.engine.base import GenerationRequest, OutputWriter, TextOutput
from omni_ws.engine.channel import Channel
from omni_ws.engine.clauses import earlier_speech
from omni_ws.engine.decoding import DecodedPart, TextPart, ToolResultPart, decode_speech
from omni_ws.engine.threads import MediaShare, SoleThread, end_tasks, run_in_thread
from omni_ws.engine.vllm.early_input import (
    AudioSegmenter,
    EarlyBudget,
    EarlyOrigin,
    EarlyWork,
    InputParts,
    StreamedPrompt,
    WarmedPrefix,
)
from omni_ws.engine.vllm.language_model import LanguageModel, ModelOutputs
from omni_ws.engine.vllm.prompt import (
    BareForm,
    Excerpt,
    Media,
    PromptContext,
    PromptDraft,
    PromptForm,
    PromptLimit,
)
from omni_ws.engine.vllm.sampling import (
    AlignedTokens,
    AnswerReader,
    AskedSampling,
    ParserUse,
    PromptEcho,
    SpokenTokens,
    TokenBytes,
    answer_parameters,
    check_parameters,
    parser_use,
    survives_streaming,
)
from omni_ws.engine.vllm.thinker_rows import TalkerFeed, ThinkerRows
from omni_ws.errors import ContextLengthExceeded, EngineFailed, InvalidValue
from omni_ws.profiler import events

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams


#: Input that is complete within this time is answered without early work; in seconds.
EARLY_AFTER_SEC: Final = 0.02
#: The least text that is worth computing early, in tokens. Each step of the model has a fixed cost, on a CPU that of
#: 20 to 30 tokens: pieces of 16 tokens take 2.9 times the work of the whole prompt, pieces of 64 take 1.4 times.
LEAST_EARLY_TOKENS: Final = 64


#: The characters that become a prompt on the event loop: that takes less time than to wake a thread and the loop again.
AT_ONCE_CHARACTERS: Final = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkerParts:
    """The model and settings that all requests to a Thinker share.

    ``thread`` is the only thread that uses the tokenizer, which is not thread-safe.
    """

    model: LanguageModel
    form: PromptForm
    budget: EarlyBudget
    thread: SoleThread
    #: The checkpoint's default sampling parameters.
    sampling: Mapping[str, Any]
    #: The sample rate of input audio, in Hz.
    sample_rate: int
    #: The least length of a segment of input audio, see AudioSegmenter.
    shortest_segment_ms: int
    #: The maximum number of audio segments in a prompt.
    most_audio: int
    #: The threads that decode input.
    decoding: Executor
    token_bytes: Callable[[], TokenBytes]
    #: vLLM's parser class for tool calls and thought; None without both.
    parser: Any
    #: Arguments of the chat template; those of a request take precedence.
    template_arguments: Mapping[str, Any]
    #: The cache salt of a request: requests with the same value share cached prefixes.
    cache_salt: Callable[[GenerationRequest], str | None]


class Thinker:
    """A Stage of one request: decoded input in; the answer's text to the next stage and, with ``writes``, the client.

    The client always gets thought and tool calls. The Thinker collects the input in a PromptDraft, has the model
    compute stable parts of the prompt early, and generates the answer when the input ends. ``share`` accounts for the
    memory of the media in the prompt. With ``rows``, the next stage is the model's own Talker, which gets TalkerItems
    instead of text. Raises InvalidValue for sampling parameters that vLLM refuses.
    """

    name = "thinker"

    def __init__(
        self,
        parts: ThinkerParts,
        request: GenerationRequest,
        *,
        writes: bool,
        share: MediaShare,
        rows: ThinkerRows | None = None,
    ) -> None:
        #: The length of the prompt; while the input is open, of the part that was computed.
        self.prompt_tokens = 0
        #: The tokens in the prompt that are the beginning of the answer.
        self.begun_tokens = 0
        #: The prompt tokens that earlier requests had computed; None if unknown. Of a streamed prompt only the first
        #: part counts.
        self.cached_tokens: int | None = None
        #: The prompt tokens in the prefix cache that this request computed while its input was open.
        self._own_tokens = 0
        #: The number of parts of the prompt that were computed before the end of the input.
        self.early_steps = 0
        self._shared = parts
        self._request = request
        self._writes = writes
        self._share = share
        self._rows = rows
        self._feed: TalkerFeed | None = None
        self._asked = AskedSampling.of(request, self.name)
        self._parameters: SamplingParams = answer_parameters(self._asked, parts.sampling, request.options)
        #: The limit on the answer that was asked for; None for no limit. vLLM later sets one in the parameters.
        self._most_tokens: int | None = self._parameters.max_tokens
        self._origin = EarlyOrigin(
            model=parts.model,
            request_id=request.request_id,
            cache_salt=parts.cache_salt(request),
            priority=request.options.priority,
            media_sizes=parts.form.media_sizes,
        )
        self._arguments = {**parts.template_arguments, **request.options.template_arguments}
        self._parser: ParserUse | None = None
        self._answers: list[AnswerReader] = []
        self._spoken: SpokenTokens | None = None
        self._speech: dict[Speech, tuple[Media, ...]] = {}
        self._input: InputParts | None = None
        self._changed = asyncio.Event()
        self._input_ended = asyncio.Event()

    @property
    def input_audio_ms(self) -> int:
        """The duration of the input audio, in milliseconds."""
        return round(self._input.audio_ms) if self._input is not None else 0

    @property
    def answer_tokens(self) -> int:
        """The number of generated tokens, of all answers together."""
        return sum(answer.tokens for answer in self._answers)

    @property
    def finish_reasons(self) -> tuple[FinishReason, ...]:
        """The finish reason of each answer, once all have ended."""
        return tuple(answer.finish_reason for answer in self._answers if answer.finish_reason is not None)

    @property
    def warnings(self) -> tuple[AnswerWarning, ...]:
        """A warning if an answer was cut off because it filled the context."""
        context = self._shared.model.llm.model_config.max_model_len
        wanted = math.inf if self._most_tokens is None else self._most_tokens
        full = any(
            answer.finish_reason is FinishReason.LENGTH
            and answer.tokens < wanted
            and self.prompt_tokens + answer.tokens >= context
            for answer in self._answers
        )
        return (context_full(context),) if full else ()

    async def run(self, source: AsyncIterator[DecodedPart], sink: Channel[Any] | None, outputs: OutputWriter) -> None:
        """Build the prompt, and generate the answer.

        If input under ``InputMode.EXTEND`` is still open after EARLY_AFTER_SEC, parts of the prompt are computed early.
        Raises InvalidValue for input or options that the model does not support, ContextLengthExceeded, and the errors
        of ``source`` and of LanguageModel.
        """
        if self._rows is None or sink is None:
            await self._run(source, sink, outputs)
            return
        conversation, salt = self._request.conversation, self._origin.cache_salt
        with TalkerFeed(self._rows, sink, conversation=conversation, salt=salt) as self._feed:
            self._origin = replace(self._origin, feed=self._feed)
            await self._run(source, sink, outputs)

    async def _run(self, source: AsyncIterator[DecodedPart], sink: Channel[Any] | None, outputs: OutputWriter) -> None:
        self._speech = await self._earlier_speech()
        if self._request.without_audio:
            await self._answer_at_once(source, sink, outputs)
            return
        draft, parts = await self._in_thread(self._begin)
        collecting = asyncio.create_task(self._collect(source, parts), name="thinker input")
        early: EarlyWork | None = None
        try:
            if self._request.input_mode is InputMode.EXTEND and not await self._ends_within(EARLY_AFTER_SEC):
                early = self._begin_early()
                await self._work_early(early, draft)
            await collecting
            work = early or WarmedPrefix(self._origin)
            await self._answer(work, draft, await self._in_thread(draft.whole), sink, outputs)
        finally:
            await end_tasks(collecting)
            if early is not None:
                await early.aclose()

    async def _answer_at_once(
        self, source: AsyncIterator[DecodedPart], sink: Channel[Any] | None, outputs: OutputWriter
    ) -> None:
        """Answer input that is complete and has no audio. Successive pieces of text are added in one call.

        A short prompt is built on the event loop, without the tokenizer's thread.
        """
        begun: tuple[PromptDraft, InputParts] | None = None
        texts: list[TextPart | ToolResultPart] = []
        async for decoded in source:
            if isinstance(decoded, TextPart | ToolResultPart):
                texts.append(decoded)
            else:
                begun = await self._in_thread(self._add, begun, [*texts, decoded])
                texts = []

        def complete() -> tuple[PromptDraft, Excerpt]:
            draft, parts = self._add(begun, texts)
            parts.close_part()
            return draft, draft.whole()

        if begun is None and self._shared.thread.idle and self._is_short(texts):
            with events.span(self.name, "scheduler_request_build_start", "scheduler_request_build_end"):
                draft, whole = complete()
        else:
            draft, whole = await self._in_thread(complete)
        await self._answer(WarmedPrefix(self._origin), draft, whole, sink, outputs)

    def _is_short(self, texts: Iterable[TextPart | ToolResultPart]) -> bool:
        """Whether the prompt takes little work: short text, and no tools, grammar, media or long arguments."""
        request, options = self._request, self._request.options
        arguments = options.template_arguments
        if request.tools or options.structure is not None or any(message.tool_calls for message in request.history):
            return False
        history = [part for message in request.history for part in message.parts]
        if any(one.speech or one.picture for one in history):
            return False
        if not all(isinstance(value, int) for value in arguments.values()):
            return False
        characters = sum(map(len, arguments)) + sum(len(one.text) for one in (*history, *texts))
        return len(request.instructions) + len(request.begun) + characters <= AT_ONCE_CHARACTERS

    def _add(
        self, begun: tuple[PromptDraft, InputParts] | None, decoded: Iterable[DecodedPart]
    ) -> tuple[PromptDraft, InputParts]:
        """Add input to the prompt ``begun``, or to a new prompt. Raises the errors of ``_prepare``.

        Called in the tokenizer's thread, unless the input is short.
        """
        draft, parts = begun or self._begin()
        for one in decoded:
            parts.add(one)
        return draft, parts

    def _begin(self) -> tuple[PromptDraft, InputParts]:
        """Return an empty prompt, and the InputParts that add input to it. Raises the errors of ``_prepare``."""
        draft, shared = self._prepare(), self._shared
        self._input = InputParts(
            draft,
            sample_rate=shared.sample_rate,
            shortest_segment_ms=shared.shortest_segment_ms,
            room=self._share,
        )
        return draft, self._input

    def _prepare(self) -> PromptDraft:
        """Return an empty draft. Called in the tokenizer's thread, unless ``_is_short``.

        Raises InvalidValue for options that vLLM does not support, and for a history that the template rejects.
        """
        self._check_options()
        form, request = self._shared.form, self._request
        if request.options.raw_prompt:
            return PromptDraft(BareForm(form, of_tokens=request.options.token_prompt), PromptContext())
        role = request.options.input_role
        context = PromptContext(
            request.instructions, request.history, request.tools, self._arguments, self._speech, role
        )
        if request.begun:
            context = replace(context, begun=request.begun)
            self.begun_tokens = len(form.tokens(form.plain(request.begun)))
            if self._parameters.max_tokens is not None:
                self._parameters.max_tokens = max(1, self._parameters.max_tokens - self.begun_tokens)
        limit = PromptLimit.of(self._shared.model.llm.model_config.max_model_len, self._parameters.max_tokens)
        if self._rows is not None and self._rows.positions is not None:
            # The Talker reads the same history. Its own reserve applies: ``max_tokens`` does not limit speech.
            limit = min(limit, PromptLimit.of(self._rows.positions, None), key=lambda each: each.prompt)
        return PromptDraft(form, context, limit)

    async def _earlier_speech(self) -> dict[Speech, tuple[Media, ...]]:
        """Return the audio segments of earlier speech without a transcript, newest first.

        There are so few that the model's limit on audio leaves at least one segment for the input.
        """
        shared = self._shared
        room = shared.most_audio
        heard: dict[Speech, tuple[Media, ...]] = {}
        for speech in earlier_speech(self._request.history):
            samples = await decode_speech(
                speech,
                sample_rate=shared.sample_rate,
                executor=shared.decoding,
                share=self._share,
                lane=self._request.lane,
            )
            media = () if samples is None else await self._in_thread(self._segments, samples)
            room -= len(media)
            if room < 1:  # leave room for speech in the input
                break
            heard[speech] = media
        return heard

    def _segments(self, samples: Samples) -> tuple[Media, ...]:
        """Cut speech of an earlier request into the same segments as when it was the input."""
        shared = self._shared
        segmenter = AudioSegmenter(shared.sample_rate, shortest_ms=shared.shortest_segment_ms)
        segments = segmenter.feed(samples)
        last = segmenter.finish()
        return tuple(
            Media(Modality.AUDIO, (segment, float(shared.sample_rate)))
            for segment in (segments if last is None else [*segments, last])
        )

    def _check_options(self) -> None:
        shared, options = self._shared, self._request.options
        if shared.parser is not None:
            self._parser = parser_use(
                shared.parser,
                shared.model,
                self._request,
                arguments=self._arguments,
                tokenizer=shared.form.tokenizer,
            )
        if self._parser is not None:
            self._parameters.structured_outputs = self._parser.constraint
            self._parameters.skip_special_tokens = self._parser.skip_special_tokens
        if options.only_echo:
            self._parameters.max_tokens = 1  # vLLM generates at least one
        vocabulary = shared.model.llm.model_config.get_vocab_size()
        if max(self._parameters.logit_bias or (), default=0) >= vocabulary:
            raise InvalidValue(f"token ids must be less than {vocabulary}", param=self._asked.field("logit_bias"))
        if self._parameters.structured_outputs is not None or options.logprobs is not None:
            constraint = "response_format" if options.structure is not None else "tools"
            check_parameters(shared.model, self._parameters, self._asked, constraint=constraint)

    async def _collect(self, source: AsyncIterator[DecodedPart], parts: InputParts) -> None:
        """Add the input to the prompt as it arrives."""
        try:
            async for decoded in source:
                await self._in_thread(parts.add, decoded)
                self._changed.set()
            if parts.is_open:
                await self._in_thread(parts.close_part)
        finally:
            self._input_ended.set()
            self._changed.set()

    async def _ends_within(self, seconds: float) -> bool:
        """Wait for the end of the input, at most ``seconds``; return whether the input has ended."""
        try:
            async with asyncio.timeout(seconds):
                while not self._input_ended.is_set():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            self._changed.set()
        return self._input_ended.is_set()

    def _begin_early(self) -> EarlyWork:
        """Return a StreamedPrompt if possible, otherwise a WarmedPrefix."""
        budget = self._shared.budget
        if survives_streaming(self._parameters) and budget.take_slot():
            return StreamedPrompt(self._origin, budget)
        return WarmedPrefix(self._origin)

    async def _work_early(self, early: EarlyWork, draft: PromptDraft) -> None:
        """Have the model compute stable parts of the prompt until the input ends, or no more can be computed early.

        Input accumulates during a step.
        """
        least = 1  # the head of the prompt is worth a step at any length
        takes_more = True
        while takes_more and not self._input_ended.is_set():
            await self._changed.wait()
            self._changed.clear()
            if self._input_ended.is_set():
                return
            excerpt = await self._in_thread(draft.stable, early.given, least)
            # If the input has ended meanwhile, the excerpt is computed with the rest.
            if excerpt is not None and not self._input_ended.is_set():
                with events.span(self.name, "early_work_start", "early_work_end"):
                    takes_more = await self._extend(early, excerpt, draft)
                self.early_steps += 1
                least = LEAST_EARLY_TOKENS

    async def _extend(self, early: EarlyWork, excerpt: Excerpt, draft: PromptDraft) -> bool:
        """Compute a part of the prompt early; return whether further parts can be computed before the input ends."""
        if draft.costs_history(len(early.given.tokens) + len(excerpt.tokens)):
            return False  # turns of the history will be left out, so the prompt will begin differently
        try:
            takes_more = await early.extend(excerpt)
            self.prompt_tokens = len(early.given.tokens)
            return takes_more
        except ContextLengthExceeded:
            if not draft.context.history:
                raise
            return False  # at the end of the input it is known how many turns have to be left out

    async def _answer(
        self,
        work: EarlyWork,
        draft: PromptDraft,
        whole: Excerpt,
        sink: Channel[Any] | None,
        outputs: OutputWriter,
    ) -> None:
        """Submit the complete prompt, and pass the answers on to ``sink`` and ``outputs``, until all have ended."""
        self._answers = [await self._reader(choice) for choice in range(self._parameters.n)]
        whole, work, submitted = await self._submit(work, draft, whole)
        echo = await self._in_thread(self._prompt_echo, draft, whole.tokens) if self._request.options.echo else None
        while not await self._pass_answer_on(submitted, echo, sink, outputs):
            submitted = await self._origin.at_once(whole, self._parameters)
        if len(self.finish_reasons) < len(self._answers):
            raise EngineFailed("the Thinker ended its answer without a finish reason")
        if self._feed is not None:
            await self._feed.finish()

    async def _pass_answer_on(
        self,
        submitted: ModelOutputs,
        echo: PromptEcho | None,
        sink: Channel[Any] | None,
        outputs: OutputWriter,
    ) -> bool:
        """Pass the answers on and return True. Return False, without output, if the prompt must be submitted again."""
        take = partial(self._take, sink, outputs)
        first = True
        async with aclosing(submitted) as answer:
            async for output in events.generated(self.name, answer):
                if first:
                    first = False
                    if not await self._origin.fed(output):
                        return False
                    self._note_prompt(output)
                    if echo is not None:
                        await self._send_echo(echo, output.prompt_logprobs, outputs)
                await self._wait_for_room(sink, outputs)
                self._pass_on(sink, outputs, output)
                answer.hand_to(take if events.recorder is None else None)
        return True

    async def _submit(
        self, work: EarlyWork, draft: PromptDraft, whole: Excerpt
    ) -> tuple[Excerpt, EarlyWork, ModelOutputs]:
        """Submit the complete prompt; if it turns out to be too long, leave out more of the history.

        Returns the prompt, the EarlyWork that submitted it, and the outputs. Raises ContextLengthExceeded if no history
        is left.
        """
        while True:
            self.prompt_tokens = len(whole.tokens)
            self._check_tokens(whole.tokens)
            try:
                self._origin.check_length(len(whole.tokens))
                submitted = await work.answer(whole, self._parameters)
                self._own_tokens = work.own_tokens
                return whole, work, submitted
            except ContextLengthExceeded:
                # Media turned out to be longer than estimated.
                if not await self._in_thread(draft.shorten):
                    raise
                await work.aclose()
                work = WarmedPrefix(self._origin)
                whole = await self._in_thread(draft.whole)

    def _check_tokens(self, tokens: list[int]) -> None:
        vocabulary = self._shared.model.llm.model_config.get_vocab_size()
        if self._request.options.token_prompt and max(tokens) >= vocabulary:
            raise InvalidValue(f"token ids must be less than {vocabulary}", param="prompt")

    def _prompt_echo(self, draft: PromptDraft, tokens: list[int]) -> PromptEcho:
        options, shared = self._request.options, self._shared
        text = None if options.token_prompt else draft.text
        return PromptEcho(shared.form.tokenizer, shared.token_bytes(), tokens, text=text, top=options.logprobs)

    async def _send_echo(self, echo: PromptEcho, prompt_logprobs: Any, outputs: OutputWriter) -> None:
        """Send the echo of the prompt, once for each answer."""
        pieces = echo.pieces(prompt_logprobs)
        while (piece := await self._in_thread(next, pieces, None)) is not None:
            text, tokens = piece
            for answer in self._answers:
                outputs.write(TextOutput(text, tokens, answer.choice))
                await outputs.drain()

    async def _reader(self, choice: int) -> AnswerReader:
        logprobs = name_token = None
        if (top := self._parameters.logprobs) is not None:
            data: TokenBytes = await self._in_thread(self._shared.token_bytes)
            name_token = partial(data.logprob, top=top)
            logprobs = AlignedTokens[TokenLogprob](self._shared.model.llm.get_tokenizer(), self._parameters)
        splitter = self._parser.splitter() if self._parser is not None else None
        options = self._request.options
        if self._feed is not None:
            self._spoken = SpokenTokens(self._shared.model.llm.get_tokenizer(), self._parameters, splitter)
        return AnswerReader(
            choice,
            logprobs=logprobs,
            name_token=name_token,
            splitter=splitter,
            names_end=options.echo,
            wanted=not options.only_echo,
        )

    def _note_prompt(self, output: RequestOutput) -> None:
        self.prompt_tokens = max(self.prompt_tokens, len(output.prompt_token_ids or ()))
        cached = output.num_cached_tokens
        self.cached_tokens = None if cached is None else max(0, cached - self._own_tokens)

    async def _wait_for_room(self, sink: Channel[Any] | None, outputs: OutputWriter) -> None:
        """Wait until ``outputs`` and ``sink`` have room for an output."""
        await outputs.drain()
        if sink is not None and not sink.closed:
            await sink.room()

    def _take(self, sink: Channel[Any] | None, outputs: OutputWriter, output: RequestOutput) -> bool:
        """Pass an output on, in vLLM's own task, and return True; return False if ``outputs`` or ``sink`` is full."""
        if outputs.full or (sink is not None and sink.full):
            return False
        self._pass_on(sink, outputs, output)
        return True

    def _pass_on(self, sink: Channel[Any] | None, outputs: OutputWriter, output: RequestOutput) -> None:
        prompt = output.prompt_token_ids or ()
        for piece in output.outputs:
            text = ""
            for said in self._answers[piece.index].read(piece, prompt):
                is_text = isinstance(said, TextOutput)
                if self._writes or not is_text:
                    outputs.write(said)
                if is_text:
                    text += said.text
            if self._feed is not None and self._spoken is not None:
                self._feed.note(piece.token_ids)
                self._feed.say(self._spoken.read(piece, prompt, text))
            elif sink is not None and text and not sink.closed:
                sink.put_nowait(text)

    async def _in_thread(self, call: Callable[..., Any], *arguments: object) -> Any:
        """Run a call in the tokenizer's thread."""
        with events.span(self.name, "scheduler_request_build_start", "scheduler_request_build_end"):
            return await run_in_thread(self._shared.thread, call, *arguments)

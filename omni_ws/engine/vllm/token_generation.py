"""TokenGenerator: token sessions on vLLM, with log-probabilities and readouts."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from PIL import Image

from omni_ws.core.token_session import TokenImage, TokenRanges, VisionTokens
from omni_ws.engine.base import (
    ReadoutManifest,
    TokenEngine,
    TokenEvent,
    TokenGeneration,
    TokenOutput,
    TokensFinished,
    TokenStop,
)
from omni_ws.engine.threads import run_in_thread
from omni_ws.engine.vllm.language_model import LanguageModel, ModelOutputs
from omni_ws.engine.vllm.worker_channel import ReadoutCollector, WorkerChannel
from omni_ws.errors import ContextLengthExceeded, EngineFailed, InvalidValue, OmniError, UnsupportedFormat
from omni_ws.media.image import decode_image

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from vllm import RequestOutput, SamplingParams


class _ReadFromCache(Exception):
    """Raised if positions to be read out were found in the prefix cache, and therefore not computed."""


class TokenGenerator(TokenEngine):
    """The TokenEngine of a model that runs on vLLM. ``channel`` is None if readouts are disabled.

    vLLM cannot compute a prompt without generating a token after it, so a list that fills the context is refused.
    """

    def __init__(
        self, model: LanguageModel, *, channel: WorkerChannel | None, manifest: ReadoutManifest, decoding: Executor
    ) -> None:
        config = model.llm.model_config
        self.max_model_len: int = config.max_model_len
        self.vocabulary_size: int = config.get_vocab_size()
        self.vision_tokens = _vision_tokens(config, model.llm.get_tokenizer())
        self.readout_manifest = manifest
        self._model = model
        self._channel = channel
        self._decoding = decoding
        self._ends = _end_tokens(model)
        self._by_priority = model.llm.vllm_config.scheduler_config.policy == "priority"

    async def check_images(self, images: Sequence[TokenImage]) -> None:
        assert self.vision_tokens is not None
        for index, image in enumerate(images):
            try:
                picture = await self._picture(image)
            except OmniError as error:
                error.about(param=f"images[{index}]")
                raise
            block = [self.vision_tokens.start, self.vision_tokens.pad, self.vision_tokens.end]
            # With a unique ID, as vLLM assumes that its engine process has every item that it processed once.
            prompt = {
                "prompt_token_ids": block,
                "multi_modal_data": {"image": [picture]},
                "multi_modal_uuids": {"image": [uuid.uuid4().hex]},
            }
            rendered = await self._model.render(prompt)
            features = list(rendered["prompt_token_ids"]).count(self.vision_tokens.pad)
            if features != image.features:
                raise InvalidValue(
                    f"the image has {features} features, but its vision block has {image.features}",
                    param=f"images[{index}]",
                )

    async def generate_tokens(self, generation: TokenGeneration) -> AsyncGenerator[TokenEvent, None]:
        skip_cache = tried_again = begun = False
        prompt = await self._prompt(generation)
        while True:
            call = _Call(generation, self._ends, self.max_model_len, skip_cache=skip_cache)
            try:
                async with aclosing(self._run(call, prompt)) as events:
                    async for event in events:
                        begun = True
                        yield event
                return
            except _ReadFromCache:
                # Cached positions have no readout: compute everything again.
                if skip_cache:
                    raise EngineFailed("vLLM did not compute the positions to read out") from None
                skip_cache = True
            except EngineFailed as error:
                if begun or tried_again or error.fatal or not generation.images:
                    raise
                # The engine process may lack an image of a call that was cancelled, see forget_media.
                tried_again = True
                await self._model.forget_media()
                prompt = await self._prompt(generation)

    async def _run(self, call: _Call, prompt: Any) -> AsyncGenerator[TokenEvent, None]:
        async with AsyncExitStack() as stack:
            readouts: ReadoutCollector | None = None
            if call.reads_out:
                assert self._channel is not None
                width = len(self.readout_manifest.layers) * len(self.readout_manifest.concepts)
                readouts = stack.enter_context(self._channel.receiving(call.key, ReadoutCollector(width)))
            priority = call.generation.priority if self._by_priority else 0
            outputs = self._model.generate(prompt, call.parameters(), call.key, priority=priority)
            ahead = await stack.enter_async_context(aclosing(ReadAhead(outputs)))
            events = await stack.enter_async_context(aclosing(call.events(ahead, readouts)))
            async for event in events:
                yield event

    async def _prompt(self, generation: TokenGeneration) -> Any:
        """Return the session's tokens as a prompt of vLLM, with the images processed."""
        tokens = list(generation.tokens)
        if len(tokens) >= self.max_model_len:
            raise ContextLengthExceeded(f"at most {self.max_model_len - 1} tokens, got {len(tokens)}")
        prompt: dict[str, Any] = {"prompt_token_ids": tokens}
        if generation.images:
            # vLLM expands a single pad for each image itself.
            prompt["prompt_token_ids"] = _with_single_pads(tokens, generation.images)
            prompt["multi_modal_data"] = {"image": [await self._picture(image) for image in generation.images]}
        if generation.owner is not None:
            prompt["cache_salt"] = generation.owner
        rendered = await self._model.render(prompt)
        if generation.images and list(rendered["prompt_token_ids"]) != tokens:
            raise EngineFailed("the model's tokens for the images differ from those of the session")
        return rendered

    async def _picture(self, image: TokenImage) -> Any:
        return await run_in_thread(self._decoding, _picture, image.data)


@dataclass(slots=True)
class _Call:
    """One TokenGeneration: its parameters for vLLM, and the conversion of vLLM's outputs."""

    generation: TokenGeneration
    model_ends: frozenset[int]
    max_model_len: int
    key: str = ""
    skip_cache: bool = False
    #: The length of the list at the start of the call; the session appends the answer to it.
    length: int = 0
    #: The maximum number of tokens to decode.
    max_tokens: int = 0

    def __post_init__(self) -> None:
        self.key = f"{self.generation.request_id}-{uuid.uuid4().hex[:8]}"
        self.length = len(self.generation.tokens)
        # A token in the last position of the context is never computed, so it has no readout.
        room = self.max_model_len - self.length - self.reads_out_answer
        self.max_tokens = min(self.generation.max_tokens, room)

    @property
    def reads_out(self) -> bool:
        """Whether any readouts are requested."""
        return self.reads_out_prompt or self.reads_out_answer

    @property
    def reads_out_prompt(self) -> bool:
        """Whether readouts of the session's token list are requested."""
        first = self.generation.readout_ranges.first
        return first is not None and first < self.length

    @property
    def reads_out_answer(self) -> bool:
        """Whether readouts of decoded tokens are requested."""
        return self.generation.max_tokens > 0 and self.generation.readout_ranges.reaches(self.length)

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of the list are requested; its first token has none."""
        return any(start < self.length and end > max(start, 1) for start, end in self.generation.logprob_ranges.pairs())

    @property
    def ends(self) -> frozenset[int]:
        """The tokens that end the answer."""
        return self.model_ends | self.generation.sampling.stop_token_ids

    def parameters(self) -> SamplingParams:
        """Return the sampling parameters for vLLM."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        asked, wanted = self.generation, self.generation.sampling
        top = asked.logprob_top_k
        scores_answer = asked.max_tokens > 0 and asked.logprob_ranges.reaches(self.length)
        extra: dict[str, Any] | None = None
        if self.reads_out:
            extra = {"readout": {"key": self.key, "ranges": asked.readout_ranges.pairs()}}
        return SamplingParams(
            temperature=wanted.temperature,
            top_p=wanted.top_p,
            top_k=wanted.top_k,
            # The end token has a readout only if vLLM continues after it, so the end is detected here instead.
            ignore_eos=self.reads_out_answer,
            stop_token_ids=[] if self.reads_out_answer else list(wanted.stop_token_ids),
            # vLLM generates at least one token. The last one is read out in the step that generates the next.
            max_tokens=max(1, self.max_tokens + self.reads_out_answer),
            logprobs=top if scores_answer else None,
            prompt_logprobs=top if self.scores_prompt else None,
            skip_reading_prefix_cache=True if self.skip_cache else None,
            detokenize=False,
            extra_args=extra,
            output_kind=RequestOutputKind.DELTA,
            skip_clone=True,
        )

    async def events(self, outputs: ReadAhead, readouts: ReadoutCollector | None) -> AsyncGenerator[TokenEvent, None]:
        """Yield the events of the call, from vLLM's outputs. Raises _ReadFromCache before the first of them."""
        first = True
        count = 0
        async for output in outputs:
            completion = output.outputs[0]
            if completion.finish_reason in ("error", "abort"):
                raise EngineFailed("vLLM failed to compute the tokens")
            if first:
                first = False
                if self._was_read_from_cache(output):
                    raise _ReadFromCache
                async for token in self._prompt_tokens(output, outputs, readouts):
                    yield token
            for index, token_id in enumerate(completion.token_ids):
                if count == self.max_tokens:
                    break
                entry = completion.logprobs[index] if completion.logprobs else None
                yield await self._token(token_id, self.length + count, entry, outputs, readouts, is_prefill=False)
                count += 1
                if token_id in self.ends:
                    yield TokensFinished(TokenStop.EOS)
                    return
            if completion.finish_reason == "stop" and self.max_tokens:
                yield TokensFinished(TokenStop.EOS)  # an end token that only vLLM knows
                return
            if count == self.max_tokens:
                yield TokensFinished(TokenStop.LENGTH)
                return
        raise EngineFailed("vLLM ended an answer without a finish reason")

    def _was_read_from_cache(self, output: RequestOutput) -> bool:
        covered = self.generation.readout_ranges.first
        return self.reads_out_prompt and covered is not None and (output.num_cached_tokens or 0) > covered

    async def _prompt_tokens(
        self, output: RequestOutput, outputs: ReadAhead, readouts: ReadoutCollector | None
    ) -> AsyncGenerator[TokenEvent, None]:
        generation = self.generation
        entries = output.prompt_logprobs
        for position in _union(generation, self.length):
            yield await self._token(
                generation.tokens[position],
                position,
                entries[position] if entries else None,
                outputs,
                readouts,
                is_prefill=True,
            )

    async def _token(
        self,
        token_id: int,
        position: int,
        entry: Mapping[int, Any] | None,
        outputs: ReadAhead,
        readouts: ReadoutCollector | None,
        *,
        is_prefill: bool,
    ) -> TokenOutput:
        readout: Sequence[float] = ()
        if readouts is not None and position in self.generation.readout_ranges:
            await outputs.until(readouts.arrival(position))
            readout = readouts.take(position).tolist()
        if entry is None or position not in self.generation.logprob_ranges or not position:
            return TokenOutput(id=token_id, position=position, is_prefill=is_prefill, readout=readout)
        top = sorted((one.rank, other, one.logprob) for other, one in entry.items())[: self.generation.logprob_top_k]
        return TokenOutput(
            id=token_id,
            position=position,
            is_prefill=is_prefill,
            readout=readout,
            logprobs=tuple((other, logprob) for _, other, logprob in top),
            logprob=entry[token_id].logprob,
        )


#: How long a readout may take to arrive after vLLM has reported its step, in seconds.
_ARRIVAL_SEC: Final = 10.0


class ReadAhead:
    """An iterator over vLLM's outputs; ``until`` reads one output ahead, and so notices a failure while it waits."""

    def __init__(self, outputs: ModelOutputs) -> None:
        self._outputs = outputs
        self._next: asyncio.Task[RequestOutput | None] | None = None

    async def __aiter__(self) -> AsyncGenerator[RequestOutput, None]:
        while True:
            if self._next is None:
                output = await _anext(self._outputs)
            else:
                await asyncio.wait([self._next])
                output = self._next.result()
                self._next = None
            if output is None:
                return
            yield output

    async def until(self, arrival: asyncio.Future[None]) -> None:
        """Wait for ``arrival``. Raises vLLM's failure meanwhile, or EngineFailed if nothing arrives."""
        if arrival.done():
            return
        if self._next is None:
            self._next = asyncio.create_task(_anext(self._outputs), name="tokens of vLLM")
        await asyncio.wait({self._next, arrival}, return_when=asyncio.FIRST_COMPLETED)
        if arrival.done():
            return
        self._next.result()
        try:
            async with asyncio.timeout(_ARRIVAL_SEC):
                await arrival
        except TimeoutError:
            raise EngineFailed("a readout did not arrive") from None

    async def aclose(self) -> None:
        """Abort the request."""
        if self._next is not None:
            self._next.cancel()
            await asyncio.wait([self._next])
        await self._outputs.aclose()


async def _anext(outputs: ModelOutputs) -> RequestOutput | None:
    return await anext(outputs, None)


def _union(generation: TokenGeneration, length: int) -> Iterator[int]:
    """Yield the positions below ``length`` in any range of log-probabilities or readouts, in order."""
    return TokenRanges([*generation.logprob_ranges.pairs(), *generation.readout_ranges.pairs()]).below(length)


def _with_single_pads(tokens: list[int], images: Sequence[TokenImage]) -> list[int]:
    """Return the token list with a single pad token in each vision block."""
    single: list[int] = []
    copied = 0
    for image in images:
        single += tokens[copied : image.start + 2]
        copied = image.end - 1
    return single + tokens[copied:]


def _picture(data: bytes) -> Any:
    try:
        return Image.fromarray(decode_image(data))
    except UnsupportedFormat as error:
        raise InvalidValue(error.message) from None


#: The tokens of Qwen's models that end the block of an image, for configurations that do not name the token.
_VISION_ENDS: Final = ("<|vision_end|>", "<|vision_eos|>")


def _vision_tokens(config: Any, tokenizer: Any) -> VisionTokens | None:
    """Return the model's vision tokens; for omni models, from the Thinker's configuration."""
    if not config.is_multimodal_model:
        return None
    for part in (config.hf_config, getattr(config.hf_config, "thinker_config", None)):
        start, pad, end = (
            _first_of(part, names)
            for names in (
                ("vision_start_token_id",),
                ("image_token_id", "image_token_index"),
                ("vision_end_token_id",),
            )
        )
        if start is None or pad is None:
            continue
        if end is None:  # in configurations of Qwen3-Omni
            end = next(iter(_ids_of(tokenizer, _VISION_ENDS)), None)
        if end is not None:
            return VisionTokens(start, pad, end)
    return None


def _first_of(part: Any, names: Sequence[str]) -> int | None:
    """Return the value of the first field in ``names`` that is set, or None."""
    return next((value for name in names if (value := getattr(part, name, None)) is not None), None)


def _ids_of(tokenizer: Any, texts: Sequence[str]) -> Iterator[int]:
    """Yield the IDs of the ``texts`` that are tokens."""
    known = tokenizer.get_vocab()
    return (known[text] for text in texts if text in known)


def _end_tokens(model: LanguageModel) -> frozenset[int]:
    """Return the tokens that end an answer according to the checkpoint."""
    ends: set[int] = set()
    generation = model.llm.model_config.try_get_generation_config()
    for named in (generation.get("eos_token_id"), model.llm.get_tokenizer().eos_token_id):
        ends.update(named if isinstance(named, list) else [] if named is None else [named])
    return frozenset(ends)

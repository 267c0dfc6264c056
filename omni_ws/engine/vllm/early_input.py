"""The early computation of a prompt while its input is still arriving, so that little is left when the input ends.

InputParts adds decoded input to the prompt, each part as soon as it is complete; an AudioSegmenter cuts speech in
progress into parts. As soon as a part of the prompt can no longer change (``PromptDraft.stable``), the model computes
this part, in one of two ways. A StreamedPrompt is an open request to which vLLM appends input. It is the faster way,
but it occupies a slot and blocks of the KV cache while the client speaks, and does not support all sampling parameters.
A WarmedPrefix is computed by separate requests whose results stay in vLLM's prefix cache: nothing is occupied between
them, and all sampling parameters work. Both ways give the same answer as the complete prompt, up to rounding.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from omni_ws.audio.pcm import Samples
from omni_ws.core.chunks import Modality
from omni_ws.core.quota import Room
from omni_ws.engine.decoding import AudioPart, DecodedPart, ImagePart, TextPart, ToolResultPart, VideoPart
from omni_ws.engine.vllm.language_model import LanguageModel, ModelOutputs
from omni_ws.engine.vllm.prompt import Excerpt, Given, Media, MediaSizes, PromptDraft
from omni_ws.engine.vllm.sampling import prefill_parameters
from omni_ws.engine.vllm.thinker_rows import TalkerFeed
from omni_ws.errors import ContextLengthExceeded
from omni_ws.media import PILLOW_BYTES
from omni_ws.media.video import VideoFrame

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams


#: The share of vLLM's request slots and KV cache that streamed prompts may occupy. Their input may stay open for a
#: minute. The rest is left to requests that are being answered.
_STREAMED_SHARE: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyOrigin:
    """The sender of one request's prompts to vLLM, both of early parts and of the complete prompt.

    Prompts with the same ``cache_salt`` share cached prefixes. Requests with a lower ``priority`` are scheduled first.
    ``feed`` sends hidden states to the Talker, and chooses the salt for prompts whose states the Talker needs; None if
    the model does not speak the answer. ``media_sizes`` learns from each prompt with media.
    """

    model: LanguageModel
    request_id: str
    cache_salt: str | None = None
    priority: int = 0
    media_sizes: MediaSizes = field(default_factory=MediaSizes)
    feed: TalkerFeed | None = None

    def generate(self, prompt: Any, parameters: SamplingParams, suffix: str = "") -> ModelOutputs:
        """Return vLLM's outputs for a prompt; ``suffix`` is appended to the request ID to make it unique."""
        return self.model.generate(prompt, parameters, self.request_id + suffix, priority=self.priority)

    async def at_once(self, whole: Excerpt, parameters: SamplingParams, suffix: str = "") -> ModelOutputs:
        """Process the media of the prompt ``whole``, and return vLLM's outputs for the prompt.

        The first iteration submits the prompt. The feed gets the prompt, too. Raises ContextLengthExceeded, and the
        errors of ``LanguageModel.render``.
        """
        prompt = await self.render(whole)
        try:
            self.check_length(len(prompt["prompt_token_ids"]))
        except ContextLengthExceeded:
            if whole.media:
                await self.model.forget_media()
            raise
        if self.feed is not None:
            self.feed.replace(prompt)
        return self.generate(prompt, self.with_rows(parameters), suffix)

    def with_rows(self, parameters: SamplingParams) -> SamplingParams:
        """Return ``parameters``, with a request to vLLM's worker for hidden states of the prompt if ``feed`` is set."""
        return parameters if self.feed is None else self.feed.with_rows(parameters)

    async def fed(self, first: RequestOutput) -> bool:
        """Wait until the feed has the hidden states of a prompt; ``first`` is vLLM's first output for the prompt.

        Returns False if the prompt has to be submitted again, and True without a feed. Raises EngineFailed if the
        states do not arrive.
        """
        return self.feed is None or await self.feed.computed(first.num_cached_tokens)

    async def render(self, excerpt: Excerpt) -> Any:
        """Convert the excerpt to vLLM's form, with its media processed."""
        salt = self.cache_salt if self.feed is None else self.feed.salt(media=bool(excerpt.media))
        prompt = await self.model.render(excerpt.for_vllm(salt))
        if excerpt.media:
            self.media_sizes.learn(excerpt.media, prompt.get("mm_placeholders", {}))
        return prompt

    def check_length(self, tokens: int) -> None:
        """Raise ContextLengthExceeded if a prompt with ``tokens`` tokens so far leaves no room for an answer."""
        context = self.model.llm.model_config.max_model_len
        if tokens >= context:
            raise ContextLengthExceeded(
                f"the input has {tokens} tokens, but input and answer must fit into {context} tokens"
            )


@dataclass(slots=True)
class EarlyBudget:
    """The budget for StreamedPrompts: vLLM's slots, and tokens of its KV cache, that are left for them."""

    slots: int
    tokens: int

    @classmethod
    def of(cls, model: LanguageModel) -> EarlyBudget:
        """Return the budget for a running model: the share _STREAMED_SHARE of its slots and cache."""
        config = model.llm.vllm_config
        cache = config.cache_config
        capacity = (cache.num_gpu_blocks or 0) * (cache.block_size or 0)
        return cls(int(config.scheduler_config.max_num_seqs * _STREAMED_SHARE), int(capacity * _STREAMED_SHARE))

    def take_slot(self) -> bool:
        """Take a slot, and return True; return False if there is none."""
        if self.slots <= 0:
            return False
        self.slots -= 1
        return True

    def take_tokens(self, count: int) -> bool:
        """Take ``count`` tokens of the cache, and return True; return False if fewer are left."""
        if self.tokens < count:
            return False
        self.tokens -= count
        return True

    def give_back(self, tokens: int) -> None:
        """Return a slot and its cache tokens to the budget."""
        self.slots += 1
        self.tokens += tokens


class StreamedPrompt:
    """An open vLLM request that is extended with input. It owns a slot, which its creator took from ``budget``."""

    def __init__(self, origin: EarlyOrigin, budget: EarlyBudget) -> None:
        #: The part of the prompt that was accepted. The rest remains in the draft.
        self.given = Given()
        #: How many tokens of the prompt are in the prefix cache because this work, not an earlier request, computed
        #: them: none, unless the answer starts from the complete prompt.
        self.own_tokens = 0
        self._origin = origin
        self._budget = budget
        self._context: int = origin.model.llm.model_config.max_model_len
        self._next: asyncio.Queue[tuple[Any, SamplingParams, bool]] = asyncio.Queue(1)
        self._outputs = origin.generate(self._feed(), prefill_parameters(), "-early")
        #: The tokens submitted, with placeholders expanded.
        self._tokens = 0
        self._holding = True
        #: Whether the last piece has media. They have not reached the model until an output arrives.
        self._media_in_flight = False

    async def extend(self, excerpt: Excerpt) -> bool:
        """Have the model compute ``excerpt``, the part of the prompt after ``given``, and wait until this is done.

        Returns False if no more parts are accepted before the end of the input; then ``excerpt`` was not accepted
        either, and the request is aborted. Raises ContextLengthExceeded, and the errors of LanguageModel.
        """
        prompt = await self._render(excerpt)
        count = len(prompt["prompt_token_ids"])
        if not self._budget.take_tokens(count):
            # The cache is needed by others. The answer will start from the complete prompt.
            await self.aclose()
            return False
        self._tokens += count
        self._tell(prompt)
        if not await self._computed(prompt):
            await self.aclose()
            return False
        self.given.add(excerpt)
        return True

    async def _computed(self, prompt: Any) -> bool:
        """Submit ``prompt``, and wait until the model has computed it; return False if vLLM ended the request.

        If the wait is interrupted, the state of the request is unknown, so its slot is released.
        """
        try:
            await self._next.put((prompt, self._origin.with_rows(prefill_parameters()), False))
            async for output in self._outputs:
                if (reason := output.outputs[0].finish_reason) is not None:
                    return reason in ("length", "stop") and await self._origin.fed(output)
        except BaseException:
            self._release_slot()
            raise
        return False

    async def answer(self, whole: Excerpt, parameters: SamplingParams) -> ModelOutputs:
        """Release the slot, and return vLLM's outputs for the complete prompt.

        Only the part after ``given`` is computed now. If ``whole`` does not start with ``given``, or the slot was
        released before, the whole prompt is submitted anew. Raises ContextLengthExceeded.
        """
        rest = whole.after(self.given)
        if rest is None or not self._holding:
            self.own_tokens = self._tokens
            await self.aclose()
            return await self._origin.at_once(whole, parameters)
        prompt = await self._render(rest)
        self._tell(prompt)
        room = self._context - self._tokens - len(prompt["prompt_token_ids"])
        parameters = self._origin.with_rows(parameters).clone()
        parameters.max_tokens = room if parameters.max_tokens is None else min(parameters.max_tokens, room)
        self._release_slot()
        await self._next.put((prompt, parameters, True))
        return self._outputs

    async def aclose(self) -> None:
        """Abort the request, and release the slot and the blocks of the KV cache. Idempotent."""
        self._release_slot()
        await self._outputs.aclose()
        if self._media_in_flight and not self._outputs.arrived:
            self._media_in_flight = False
            await self._origin.model.forget_media()

    def _tell(self, prompt: Any) -> None:
        """Pass the next piece of the prompt to the TalkerFeed, if there is one."""
        if self._origin.feed is None:
            return
        if self.given.tokens:
            self._origin.feed.append(prompt)
        else:
            self._origin.feed.replace(prompt)

    def _release_slot(self) -> None:
        if self._holding:
            self._holding = False
            self._budget.give_back(self._tokens)

    async def _render(self, excerpt: Excerpt) -> Any:
        prompt = await self._origin.render(excerpt)
        self._media_in_flight = bool(excerpt.media)
        self._outputs.expect_output()
        self._origin.check_length(self._tokens + len(prompt["prompt_token_ids"]))
        return prompt

    async def _feed(self) -> AsyncIterator[Any]:
        """Yield the parts of the prompt to vLLM as they are submitted."""
        from vllm.engine.protocol import StreamingInput

        last = False
        while not last:
            prompt, parameters, last = await self._next.get()
            yield StreamingInput(prompt=prompt, sampling_params=parameters)


class WarmedPrefix:
    """An early computation of parts of a prompt, so that the complete prompt finds them in the prefix cache.

    Its methods are used like those of StreamedPrompt, but ``extend`` accepts every part, and computes text only once it
    fills a block of the cache. Parts that were evicted from the cache meanwhile are computed again.
    """

    def __init__(self, origin: EarlyOrigin) -> None:
        self.given = Given()
        self.own_tokens = 0
        self._origin = origin
        self._steps = 0
        #: The length of the prompt that was computed last.
        self._computed = 0
        block = origin.model.llm.vllm_config.cache_config.block_size or 1
        #: The block size of the cache, in tokens. Only whole blocks are reused.
        self._block: int = block
        self._warmed = 0

    async def extend(self, excerpt: Excerpt) -> bool:
        self.given.add(excerpt)
        so_far = self.given.whole
        if not excerpt.media and len(so_far.tokens) - self._warmed < self._block:
            return True
        self._warmed = len(so_far.tokens)
        self._steps += 1
        warming = await self._origin.at_once(so_far, prefill_parameters(), f"-early-{self._steps}")
        complete = True
        async with aclosing(warming) as outputs:
            async for output in outputs:
                length, cached = len(output.prompt_token_ids or ()), output.num_cached_tokens or 0
                # Other requests computed the cached tokens beyond those of the previous step.
                self.own_tokens += length - max(self._computed, cached)
                self._computed = length
                complete = await self._origin.fed(output)
        return complete

    async def answer(self, whole: Excerpt, parameters: SamplingParams) -> ModelOutputs:
        return await self._origin.at_once(whole, parameters)

    async def aclose(self) -> None:
        """Do nothing: a warmed prefix occupies nothing between two steps."""


#: The early computation of one prompt.
EarlyWork: TypeAlias = StreamedPrompt | WarmedPrefix

#: The maximum number of frames of a video in the prompt, spread evenly over it.
VIDEO_FRAMES: Final = 32


class InputParts:
    """A converter of decoded input to parts of ``draft``; audio, at ``sample_rate`` Hz, is cut by an AudioSegmenter.

    Parts arrive one after the other, so only the last one is incomplete. The memory of media in the prompt is reserved
    in ``room``.
    """

    def __init__(self, draft: PromptDraft, *, sample_rate: int, shortest_segment_ms: int, room: Room) -> None:
        self.audio_ms = 0.0
        self._draft = draft
        self._sample_rate = sample_rate
        self._room = room
        self._shortest_segment_ms = shortest_segment_ms
        self._part: int | None = None
        self._speech: AudioSegmenter | None = None
        self._video: VideoSampler | None = None

    def add(self, decoded: DecodedPart) -> None:
        """Add a piece of decoded input; a new part number completes the previous part.

        Raises InvalidValue for the result of an unknown tool call, UnsupportedModality for media in a raw prompt, and
        the error of ``room`` if it is full.
        """
        if decoded.part != self._part:
            self.close_part()
            self._part = decoded.part
        match decoded:
            case TextPart(text=text, part=part):
                self._draft.add_text(text, part)
            case ToolResultPart(text=text, call_id=call_id):
                self._draft.add_tool_result(call_id, text)
            case AudioPart(samples=samples):
                self.audio_ms += len(samples) * 1000 / self._sample_rate
                if self._speech is None:
                    self._speech = AudioSegmenter(self._sample_rate, shortest_ms=self._shortest_segment_ms)
                self._room.take(samples.nbytes)
                self._add_audio(self._speech.feed(samples))
            case ImagePart(pixels=pixels, part=part):
                self._room.take(PILLOW_BYTES * pixels.size // 3)
                self._draft.add_media(Media(Modality.IMAGE, Image.fromarray(pixels)), part)
            case VideoPart(frames=frames):
                if self._video is None:
                    self._video = VideoSampler(VIDEO_FRAMES, self._room)
                self._video.add(frames)

    @property
    def is_open(self) -> bool:
        """Whether the current part is incomplete, so that ``close_part`` has something to add."""
        return self._speech is not None or self._video is not None

    def close_part(self) -> None:
        """Complete the current part, and add the rest of it to the draft. Raises the errors of ``add``."""
        speech, self._speech = self._speech, None
        video, self._video = self._video, None
        if speech is not None:
            last = speech.finish()
            self._add_audio([] if last is None else [last])
        if video is not None:
            assert self._part is not None
            self._draft.add_media(Media(Modality.VIDEO, video.for_vllm()), self._part)

    def _add_audio(self, segments: Iterable[NDArray[np.float32]]) -> None:
        assert self._part is not None
        for samples in segments:
            self._draft.add_media(Media(Modality.AUDIO, (samples, float(self._sample_rate))), self._part)


class VideoSampler:
    """An even selection of frames from a video of unknown length.

    The sampler keeps fewer than ``2 * most`` frames, and returns at most ``most``. The memory of the kept frames is
    reserved in ``room``.
    """

    def __init__(self, most: int, room: Room) -> None:
        self._most = most
        self._room = room
        self._every = 1
        self._seen = 0
        self._kept: list[VideoFrame] = []

    def add(self, frames: Iterable[VideoFrame]) -> None:
        """Add frames; when too many are kept, drop every other one. Raises the error of ``room`` if it is full."""
        for frame in frames:
            if self._seen % self._every == 0:
                self._room.take(frame.pixels.nbytes)
                self._kept.append(frame)
            self._seen += 1
            if len(self._kept) >= 2 * self._most:
                self._room.give(sum(frame.pixels.nbytes for frame in self._kept[1::2]))
                self._kept = self._kept[::2]
                self._every *= 2

    def for_vllm(self) -> tuple[NDArray[np.uint8], dict[str, Any]]:
        """Return the frames, uint8 of shape (frames, height, width, 3), and the metadata that vLLM expects.

        All frames are scaled to the size of the first one. There must be a frame, and the sampler must not be used
        afterwards. Raises the error of ``room`` if it is full.
        """
        step = -(-len(self._kept) // self._most)
        kept = self._kept[::step]
        height, width, channels = kept[0].pixels.shape
        self._room.take(len(kept) * height * width * channels)
        pixels = np.stack(list(_sized(kept, width, height)))
        self._room.give(sum(frame.pixels.nbytes for frame in self._kept))
        self._kept = []
        duration = max(kept[-1].timestamp_ms - kept[0].timestamp_ms, 1) / 1000
        return pixels, {
            "total_num_frames": len(kept),
            "fps": len(kept) / duration,
            "duration": duration,
            "frames_indices": list(range(len(kept))),
            "video_backend": "omni_ws",
            "do_sample_frames": False,
        }


def _sized(frames: Iterable[VideoFrame], width: int, height: int) -> Iterator[NDArray[np.uint8]]:
    for frame in frames:
        if frame.pixels.shape[:2] == (height, width):
            yield frame.pixels
        else:
            yield np.asarray(Image.fromarray(frame.pixels).resize((width, height)), dtype=np.uint8)


FRAME_MS: Final = 20
#: The maximum length of a segment: models of the Whisper family silently drop audio beyond 30 seconds.
LONGEST_MS: Final = 30_000
#: A pause has at least this length …
PAUSE_MS: Final = 300
#: … and its amplitude (RMS) is at most this fraction, -30 dB, of the loudest frame's in the segment.
PAUSE_RATIO: Final = 10 ** (-30 / 20)


class AudioSegmenter:
    """A splitter of speech in progress into segments that a model can process before the speech ends.

    The splitter cuts one part of the input: mono samples at ``sample_rate`` Hz. A segment ends within the first pause
    after ``shortest_ms`` (at least PAUSE_MS), or after ``longest_ms`` without a pause. The cuts depend on the samples
    alone, not on their times of arrival: a recording is cut like the same audio spoken live, so both get the same
    answer.
    """

    def __init__(self, sample_rate: int, *, shortest_ms: int, longest_ms: int = LONGEST_MS) -> None:
        self._frame = sample_rate * FRAME_MS // 1000
        self._shortest = max(shortest_ms, PAUSE_MS) // FRAME_MS
        self._longest = max(longest_ms // FRAME_MS, self._shortest + 1)
        self._pause = PAUSE_MS // FRAME_MS
        self._blocks: list[Samples] = []
        #: Samples that do not fill a frame yet.
        self._rest: Samples = np.zeros(0, np.float32)
        self._frames = 0
        self._loudest = 0.0
        self._quiet_frames = 0

    def feed(self, samples: Samples) -> list[Samples]:
        """Add ``samples``, and return the segments that are complete."""
        samples = np.concatenate([self._rest, samples]) if len(self._rest) else samples
        count = len(samples) // self._frame
        frames = samples[: count * self._frame].reshape(count, self._frame)
        self._rest = samples[count * self._frame :].copy()
        closed: list[Samples] = []
        begin = 0
        for index, level in enumerate(np.sqrt(np.mean(frames * frames, axis=1, dtype=np.float64)).tolist()):
            self._measure(level)
            cut = self._cut()
            if cut is None:
                continue
            self._blocks.append(frames[begin : index + 1].reshape(-1))
            segment = np.concatenate(self._blocks)
            kept = len(segment) - cut * self._frame
            closed.append(segment[:kept].copy())
            self._restart(segment[kept:])
            begin = index + 1
        if begin < count:
            self._blocks.append(frames[begin:].reshape(-1).copy())
        return closed

    def finish(self) -> Samples | None:
        """End the part; return its last segment, or None if no samples are left. A new part may follow."""
        segment = np.concatenate([*self._blocks, self._rest])
        self._rest = np.zeros(0, np.float32)
        self._restart(self._rest)
        return segment if len(segment) else None

    def _measure(self, level: float) -> None:
        self._frames += 1
        self._loudest = max(self._loudest, level)
        self._quiet_frames = self._quiet_frames + 1 if level <= self._loudest * PAUSE_RATIO else 0

    def _cut(self) -> int | None:
        """Return how many of the last frames belong to the next segment; None if the segment does not end here."""
        if self._frames >= self._longest:
            return 0
        # Leading digital silence is not a pause: nothing has been said yet.
        if self._frames >= self._shortest and self._quiet_frames >= self._pause and self._loudest > 0:
            return self._pause // 2
        return None

    def _restart(self, begun: Samples) -> None:
        self._blocks = [begun] if len(begun) else []
        self._frames = self._quiet_frames = len(begun) // self._frame
        self._loudest = 0.0

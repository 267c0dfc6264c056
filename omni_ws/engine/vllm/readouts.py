"""Token sessions on vLLM, with readouts: projections of the residual stream onto vectors, sent by vLLM's workers.

Readouts installs the vectors in vLLM's workers. ReadoutVectors are read from files, or made from prompts that have a
concept and prompts that do not (``make_vectors``).
"""

from __future__ import annotations

import asyncio
import tomllib
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec
import numpy as np
import orjson
from numpy.typing import NDArray
from PIL import Image

from omni_ws.config.values import ConfigurationError
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
from omni_ws.engine.vllm.language_model import LanguageModel, ModelOutputs, prepare_environment, use_first_model_runner
from omni_ws.engine.vllm.worker_channel import ReadoutCollector, SentReadouts, WorkerChannel
from omni_ws.errors import ContextLengthExceeded, EngineFailed, InvalidValue, OmniError, UnsupportedFormat
from omni_ws.media import decode_image

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from vllm import RequestOutput, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM


class _ReadFromCache(Exception):
    """Raised if positions with requested readouts were in the prefix cache, so that they were not computed."""


class TokenGenerator(TokenEngine):
    """The TokenEngine of a model that runs on vLLM. ``channel`` is None if readouts are disabled.

    vLLM cannot compute a prompt without generating a token after it, so a token list that fills the context is refused.
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
        """Return the session's tokens as a prompt of vLLM, with the images processed.

        Raises ContextLengthExceeded for a list that fills the context, and EngineFailed if the model's tokens for an
        image differ from the session's.
        """
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
        """Whether log-probabilities of the session's token list are requested; its first token has none."""
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
        """Yield the events of the call, made of vLLM's outputs.

        Raises _ReadFromCache before the first event, and EngineFailed if vLLM fails or a readout does not arrive.
        """
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
    """An iterator over vLLM's outputs. ``until`` reads one output ahead, and so notices a failure while it waits."""

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
        """Wait for ``arrival``. Raises vLLM's error if vLLM fails meanwhile.

        Raises EngineFailed if ``arrival`` is not done _ARRIVAL_SEC after vLLM's next output, or after vLLM's end.
        """
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
    """Yield the positions below ``length`` for which log-probabilities or readouts are requested, in order."""
    return TokenRanges([*generation.logprob_ranges.pairs(), *generation.readout_ranges.pairs()]).below(length)


def _with_single_pads(tokens: list[int], images: Sequence[TokenImage]) -> list[int]:
    """Return ``tokens`` with a single pad token in the vision block of each image."""
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
    """Return the value of the first attribute of ``part``, among ``names``, that is set; None if none is."""
    return next((value for name in names if (value := getattr(part, name, None)) is not None), None)


def _ids_of(tokenizer: Any, texts: Sequence[str]) -> Iterator[int]:
    """Yield the token IDs of those of ``texts`` that are tokens."""
    known = tokenizer.get_vocab()
    return (known[text] for text in texts if text in known)


def _end_tokens(model: LanguageModel) -> frozenset[int]:
    """Return the tokens that end an answer according to the checkpoint."""
    ends: set[int] = set()
    generation = model.llm.model_config.try_get_generation_config()
    for named in (generation.get("eos_token_id"), model.llm.get_tokenizer().eos_token_id):
        ends.update(named if isinstance(named, list) else [] if named is None else [named])
    return frozenset(ends)


# Readouts: projections of a model's residual stream onto vectors, for token sessions.
#
# Readouts installs the vectors in vLLM's workers. ReadoutVectors are read from files, or made from prompts that have a
# concept and prompts that do not (``make_vectors``).


#: The values that vLLM's arguments must have. Other values distribute layers, requests or positions over processes,
#: compute tokens that are then rejected, or take the KV cache of some positions from another engine.
ONE_WORKER: Final[Mapping[str, Any]] = {
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "prefill_context_parallel_size": 1,
    "enable_dbo": False,
    "ubatch_size": 0,
    "speculative_config": None,
    "kv_transfer_config": None,
}


def refused_args(args: Mapping[str, Any], required: Mapping[str, Any], *, purpose: str) -> list[str]:
    """Return a message for each of vLLM's arguments that does not have its ``required`` value."""
    return [
        f"vllm.args.{name} must be {value!r} for {purpose}"
        for name, value in required.items()
        if args.get(name, value) != value
    ]


class Readouts:
    """The readouts of one model, which vLLM sends through ``channel``.

    ``engine_args`` are vLLM's arguments that enable readouts and disable compiled graphs.
    """

    engine_args: Mapping[str, Any] = {
        "worker_extension_cls": "omni_ws.engine.vllm.workers.ReadoutWorker",
        "enforce_eager": True,
    }

    def __init__(self, vectors: ReadoutVectors) -> None:
        self.vectors = vectors
        self.manifest = vectors.manifest
        self.channel = WorkerChannel(SentReadouts)

    @staticmethod
    def check_args(args: Mapping[str, Any]) -> None:
        """Raise ConfigurationError for engine arguments that are incompatible with readouts."""
        required = {**ONE_WORKER, **Readouts.engine_args}
        if problems := refused_args(args, required, purpose="readouts"):
            raise ConfigurationError(problems)

    async def install(self, llm: AsyncLLM) -> None:
        """Install the vectors in the workers of an engine that has started; ``channel`` must be open.

        Raises ConfigurationError for vectors that do not fit the model's hidden size or layers.
        """
        manifest = self.manifest
        arguments = (
            self.channel.address,
            list(manifest.layers),
            [matrix.tobytes() for matrix in self.vectors.matrices],
            len(manifest.concepts),
        )
        hidden_size = llm.model_config.get_hidden_size()
        # The first call, without an address, only counts the layers: vectors of the wrong size would break the worker.
        (layers, *_) = await llm.collective_rpc("install_readouts", args=("", *arguments[1:]))
        self.vectors.check_model(hidden_size=hidden_size, layers=layers)
        await llm.collective_rpc("install_readouts", args=arguments)


_DTYPE: Final = "float16"


@dataclass(frozen=True, slots=True)
class ReadoutVectors:
    """Readout vectors: a float32 matrix of shape (concepts, hidden size) for each layer of the manifest.

    Their safetensors file contains ``layer_<index>.vectors``, in float16. The file must not be in the checkpoint's
    folder, where vLLM would load it as weights. The manifest is a separate file.
    """

    manifest: ReadoutManifest
    matrices: tuple[NDArray[np.float32], ...]

    def check_model(self, *, hidden_size: int, layers: int) -> None:
        """Raise ConfigurationError if the vectors are not for a model of this size."""
        problems = []
        if self.manifest.hidden_size != hidden_size:
            problems.append(
                f"the readout vectors are for a hidden size of {self.manifest.hidden_size}; "
                f"the model's is {hidden_size}"
            )
        if beyond := [layer for layer in self.manifest.layers if layer >= layers]:
            problems.append(f"the readout vectors are for layers {beyond}; the model has only {layers} layers")
        if problems:
            raise ConfigurationError(problems)


def load_vectors(vectors: Path, manifest: Path) -> ReadoutVectors:
    """Read vectors from two files. Raises ConfigurationError if the files are missing, malformed or inconsistent."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    described = _read_manifest(manifest)
    try:
        tensors = load_file(vectors)
    except (OSError, SafetensorError, TypeError, KeyError) as error:  # the last two: dtypes that numpy lacks
        raise ConfigurationError([f"cannot read the readout vectors {vectors}: {error}"]) from None
    shape = (len(described.concepts), described.hidden_size)
    matrices = []
    for layer in described.layers:
        name = f"layer_{layer}.vectors"
        tensor = tensors.get(name)
        if tensor is None or tensor.shape != shape:
            found = "nothing" if tensor is None else f"{tensor.shape}"
            raise ConfigurationError([f"{vectors}: {name} must have the shape {shape}, got {found}"])
        if tensor.dtype != np.dtype(_DTYPE):
            raise ConfigurationError([f"{vectors}: {name} must be {_DTYPE}, got {tensor.dtype}"])
        matrix = tensor.astype(np.float32)
        if not np.isfinite(matrix).all():
            raise ConfigurationError([f"{vectors}: {name} contains NaN or infinity"])
        matrices.append(matrix)
    return ReadoutVectors(described, tuple(matrices))


def save_vectors(
    matrices: Mapping[int, NDArray[np.float32]], concepts: Sequence[str], vectors: Path, manifest: Path
) -> None:
    """Write vectors, as float16, to the file ``vectors``, and their description as JSON to the file ``manifest``.

    ``matrices`` has a matrix for each layer, with a row for each of ``concepts``.
    """
    from safetensors.numpy import save_file

    layers = sorted(matrices)
    save_file({f"layer_{layer}.vectors": matrices[layer].astype(np.float16) for layer in layers}, vectors)
    hidden_size = matrices[layers[0]].shape[1]
    described = {"concepts": list(concepts), "layers": layers, "hidden_size": hidden_size, "dtype": _DTYPE}
    manifest.write_bytes(orjson.dumps(described, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def _read_manifest(path: Path) -> ReadoutManifest:
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=ReadoutManifest)
    except msgspec.ValidationError as error:
        required = f"a manifest must have concepts, layers and a hidden_size, and its dtype must be {_DTYPE}"
        raise ConfigurationError([f"{path}: {required}: {error}"]) from None
    except (OSError, ValueError) as error:
        raise ConfigurationError([f"cannot read the readout manifest {path}: {error}"]) from None
    concepts, layers = manifest.concepts, manifest.layers
    if not concepts or not layers or manifest.hidden_size < 1 or min(layers) < 0:
        raise ConfigurationError([f"{path}: a manifest must have concepts, layers and a hidden_size"])
    if len(set(layers)) < len(layers) or len(set(concepts)) < len(concepts):
        raise ConfigurationError([f"{path}: layers and concepts must be unique"])
    if manifest.dtype != _DTYPE:
        raise ConfigurationError([f"{path}: dtype must be {_DTYPE}"])
    return manifest


#: The number of prompts submitted to vLLM at the same time.
_AT_ONCE: Final = 32


#: For each concept, ``positive`` prompts that have it, and similar ``negative`` prompts without it.
Concepts: TypeAlias = Mapping[str, Mapping[str, Sequence[str]]]


def load_concepts(path: Path) -> Concepts:
    """Read a TOML or JSON file that has, for each concept, a table with lists of ``positive`` and ``negative`` prompts.

    Raises ConfigurationError with all problems found.
    """
    try:
        data = path.read_bytes()
        tables = orjson.loads(data) if path.suffix == ".json" else tomllib.loads(data.decode())
    except (OSError, ValueError) as error:
        raise ConfigurationError([f"cannot read the prompts {path}: {error}"]) from None
    if not isinstance(tables, dict) or not tables:
        raise ConfigurationError([f"{path}: no concepts; each must be a table with positive and negative prompts"])
    if problems := [problem for name, table in tables.items() for problem in _problems(name, table)]:
        raise ConfigurationError([f"{path}: {problem}" for problem in problems])
    return tables


def _problems(name: str, table: Any) -> Iterator[str]:
    sides = ("positive", "negative")
    if not isinstance(table, dict) or set(table) != set(sides):
        yield f"{name}: a concept must have exactly positive and negative"
        return
    for side in sides:
        prompts = table[side]
        if not isinstance(prompts, list) or not prompts or not all(isinstance(one, str) and one for one in prompts):
            yield f"{name}.{side} must be a list of at least one prompt, none of them empty"


async def make_vectors(
    concepts: Concepts, layers: Sequence[int], *, model: str, args: Mapping[str, Any]
) -> ReadoutVectors:
    """Start the model, compute the vectors of ``concepts``, and stop the model. ``args`` are vLLM's engine arguments.

    The vector of a concept at a layer is the normalised difference between two means of the residual stream at the
    last token: over prompts that have the concept and over prompts that do not. The stream is read with the readout
    worker, whose "concepts" are then the unit vectors of the stream's dimensions.

    Raises ConfigurationError for layers that the model lacks, for prompts that are empty or too long, and for prompts
    whose means do not differ; and the errors of LanguageModel and TokenGenerator.
    """
    Readouts.check_args(args)
    args = {"model": model, **args, **Readouts.engine_args}
    use_first_model_runner()
    hidden_size = await asyncio.to_thread(_hidden_size, args)
    prompts = dict.fromkeys(text for one in concepts.values() for text in (*one["positive"], *one["negative"]))
    streams = await _last_streams(tuple(prompts), layers, hidden_size, args)
    matrices = []
    for place, layer in enumerate(layers):
        after_layer = {text: stream[place] for text, stream in streams.items()}
        matrices.append(np.stack([_direction(name, one, after_layer, layer) for name, one in concepts.items()]))
    manifest = ReadoutManifest(concepts=tuple(concepts), layers=tuple(layers), hidden_size=hidden_size, dtype=_DTYPE)
    return ReadoutVectors(manifest, tuple(matrices))


def _direction(
    name: str, prompts: Mapping[str, Sequence[str]], streams: Mapping[str, NDArray[np.float32]], layer: int
) -> NDArray[np.float32]:
    """Return the unit vector from the mean of the negative prompts to the mean of the positive prompts."""
    positive = np.mean([streams[text] for text in prompts["positive"]], axis=0, dtype=np.float64)
    negative = np.mean([streams[text] for text in prompts["negative"]], axis=0, dtype=np.float64)
    difference = positive - negative
    length = float(np.linalg.norm(difference))
    if not np.isfinite(length) or length <= 1e-6 * float(np.linalg.norm(positive)):
        raise ConfigurationError([f"{name}: positive and negative prompts do not differ after layer {layer}"])
    return np.asarray(difference / length, np.float32)


def _hidden_size(args: Mapping[str, Any]) -> int:
    prepare_environment()
    from vllm.engine.arg_utils import AsyncEngineArgs

    known = {name: value for name, value in args.items() if name in AsyncEngineArgs.__dataclass_fields__}
    try:
        return int(AsyncEngineArgs(**known).create_model_config().get_hidden_size())
    except (OSError, ValueError) as error:
        raise ConfigurationError([f"cannot read the model {args['model']}: {error}"]) from None


async def _last_streams(
    prompts: Sequence[str], layers: Sequence[int], hidden_size: int, args: Mapping[str, Any]
) -> dict[str, NDArray[np.float32]]:
    """Return the residual stream at the last token of each prompt, of shape (layers, hidden size)."""
    manifest = ReadoutManifest(
        concepts=tuple(str(index) for index in range(hidden_size)),
        layers=tuple(layers),
        hidden_size=hidden_size,
        dtype="float32",
    )
    whole = ReadoutVectors(manifest, tuple(np.eye(hidden_size, dtype=np.float32) for _ in layers))
    readouts = Readouts(whole)
    language_model = LanguageModel("model", args, setting="vllm.args", prepare=readouts.install)
    slots = asyncio.Semaphore(_AT_ONCE)
    await readouts.channel.start()
    try:
        await language_model.start()
        with ThreadPoolExecutor(1) as decoding:
            generator = TokenGenerator(language_model, channel=readouts.channel, manifest=manifest, decoding=decoding)
            tokenizer = language_model.llm.get_tokenizer()

            async def last(number: int, text: str) -> NDArray[np.float32]:
                tokens = tokenizer(text).input_ids
                if not 0 < len(tokens) < generator.max_model_len:
                    most = generator.max_model_len - 1
                    raise ConfigurationError(
                        [f"a prompt must have 1 to {most} tokens, got {len(tokens)}: {text[:64]!r}"]
                    )
                asked = TokenGeneration(
                    request_id=f"prompt-{number}",
                    tokens=tokens,
                    images=(),
                    max_tokens=0,
                    readout_ranges=TokenRanges([(len(tokens) - 1, len(tokens))]),
                )
                async with slots, aclosing(generator.generate_tokens(asked)) as events:
                    async for event in events:
                        if isinstance(event, TokenOutput):
                            return np.asarray(event.readout, np.float32).reshape(len(layers), hidden_size)
                raise AssertionError("no token in the requested range")

            found = await asyncio.gather(*(last(number, text) for number, text in enumerate(prompts)))
    finally:
        await language_model.stop()
        await readouts.channel.stop()
    return dict(zip(prompts, found, strict=True))

"""Readouts: projections of a model's residual stream onto vectors, for token sessions.

Readouts installs the vectors in vLLM's workers. ReadoutVectors are read from files, or made from prompts that have a
concept and prompts that do not (``make_vectors``).
"""

from __future__ import annotations

import asyncio
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec
import numpy as np
import orjson
from numpy.typing import NDArray

from omni_ws.config.values import ConfigurationError
from omni_ws.core.token_session import TokenRanges
from omni_ws.engine.base import ReadoutManifest, TokenGeneration, TokenOutput
from omni_ws.engine.vllm.language_model import LanguageModel, prepare_environment, use_first_model_runner
from omni_ws.engine.vllm.token_generation import TokenGenerator
from omni_ws.engine.vllm.worker_channel import SentReadouts, WorkerChannel

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


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
    """The readouts of one model. ``engine_args`` enable them in vLLM, and disable its compiled graphs."""

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
        """Install the vectors in the workers of an engine that has started.

        Raises ConfigurationError for vectors of another model.
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

    Their safetensors file contains ``layer_<index>.vectors``, in float16. It must not be in the checkpoint's folder,
    where vLLM would load it as weights. The manifest is a file of its own.
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
    """Return the vectors in two files. Raises ConfigurationError if they are missing, malformed or inconsistent."""
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
    """Write vectors to two files. ``matrices`` has a matrix for each layer, with a row for each concept."""
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
    """Read a TOML or JSON file with a table for each concept, of lists of ``positive`` and ``negative`` prompts.

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
    """Start the model, compute the vectors and stop it. ``args`` are vLLM's engine arguments.

    The vector of a concept at a layer is the normalised difference between two means of the residual stream at the
    last token: over prompts that have the concept and over prompts that do not. The stream is read with the readout
    worker itself, using the unit vectors of its dimensions as "concepts".

    Raises ConfigurationError for layers that the model lacks and for prompts whose means do not differ, and what
    LanguageModel raises.
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
                if not 0 < len(tokens) <= generator.max_model_len:
                    raise ConfigurationError(
                        [f"a prompt must have 1 to {generator.max_model_len} tokens, got {len(tokens)}: {text[:64]!r}"]
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

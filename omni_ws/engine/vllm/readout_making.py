"""Computes readout vectors from example prompts.

The vector of a concept at a layer is the normalised difference between two means of the residual stream at the last
token: over prompts that have the concept and over prompts that do not. The stream is read with the readout worker
itself, using the unit vectors of its dimensions as "concepts".
"""

from __future__ import annotations

import asyncio
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from omni_ws.config.values import ConfigurationError
from omni_ws.core.token_session import TokenRanges
from omni_ws.engine.tokens import ReadoutManifest, TokenGeneration, TokenOutput
from omni_ws.engine.vllm.language_model import LanguageModel, prepare_environment
from omni_ws.engine.vllm.readout_vectors import ReadoutVectors
from omni_ws.engine.vllm.readouts import Readouts
from omni_ws.engine.vllm.token_generation import TokenGenerator

#: The number of prompts submitted to vLLM at the same time.
_AT_ONCE: Final = 32


@dataclass(frozen=True, slots=True)
class Concept:
    """Prompts that have a concept, and similar prompts without it."""

    name: str
    positive: tuple[str, ...]
    negative: tuple[str, ...]


def load_concepts(path: Path) -> tuple[Concept, ...]:
    """Read a TOML or JSON file with a table for each concept, of lists of ``positive`` and ``negative`` prompts.

    Raises ConfigurationError with all problems found.
    """
    try:
        data = path.read_bytes()
        tables = json.loads(data) if path.suffix == ".json" else tomllib.loads(data.decode())
    except (OSError, ValueError) as error:
        raise ConfigurationError([f"cannot read the prompts {path}: {error}"]) from None
    if not isinstance(tables, dict) or not tables:
        raise ConfigurationError([f"{path}: no concepts; each must be a table with positive and negative prompts"])
    if problems := [problem for name, table in tables.items() for problem in _problems(name, table)]:
        raise ConfigurationError([f"{path}: {problem}" for problem in problems])
    return tuple(Concept(name, tuple(one["positive"]), tuple(one["negative"])) for name, one in tables.items())


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
    concepts: Sequence[Concept], layers: Sequence[int], *, model: str, args: Mapping[str, Any]
) -> ReadoutVectors:
    """Start the model, compute the vectors and stop it. ``args`` are vLLM's engine arguments.

    Raises ConfigurationError for layers that the model lacks and for prompts whose means do not differ, and what
    LanguageModel raises.
    """
    Readouts.check_args(args)
    args = {"model": model, **args, **Readouts.engine_args}
    Readouts.prepare_environment()
    hidden_size = await asyncio.to_thread(_hidden_size, args)
    prompts = dict.fromkeys(text for one in concepts for text in (*one.positive, *one.negative))
    streams = await _last_streams(tuple(prompts), layers, hidden_size, args)
    matrices = []
    for place, layer in enumerate(layers):
        after_layer = {text: stream[place] for text, stream in streams.items()}
        matrices.append(np.stack([_direction(one, after_layer, layer) for one in concepts]))
    names = tuple(one.name for one in concepts)
    manifest = ReadoutManifest(concepts=names, layers=tuple(layers), hidden_size=hidden_size, dtype="float16")
    return ReadoutVectors(manifest, tuple(matrices))


def _direction(concept: Concept, streams: Mapping[str, NDArray[np.float32]], layer: int) -> NDArray[np.float32]:
    """Return the unit vector from the mean of the negative prompts to that of the positive ones."""
    positive = np.mean([streams[text] for text in concept.positive], axis=0, dtype=np.float64)
    negative = np.mean([streams[text] for text in concept.negative], axis=0, dtype=np.float64)
    difference = positive - negative
    length = float(np.linalg.norm(difference))
    if not np.isfinite(length) or length <= 1e-6 * float(np.linalg.norm(positive)):
        raise ConfigurationError([f"{concept.name}: positive and negative prompts do not differ after layer {layer}"])
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

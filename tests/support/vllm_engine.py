"""Requests to a VllmEngine over tiny checkpoints, and what the models say when they are asked directly."""

from __future__ import annotations

import io
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from support.engine_answers import Input, final, request_of, said, streamed
from support.patience import until

from omni_ws.config.model import VllmConfig
from omni_ws.engine.base import EngineState, Finished, GenerationRequest, ReadoutManifest
from omni_ws.engine.vllm.engine import VllmEngine
from omni_ws.engine.vllm.readouts import Readouts, ReadoutVectors
from omni_ws.generated import salience_pb2 as messages

#: A model of any of the tests, on a machine that does other things too.
STARTS_WITHIN_SEC = 1500.0
#: Greedy, and long enough to differ where anything differs. Random weights know no end, so the length is the end.
GREEDY: Mapping[str, Any] = {"temperature": 0.0, "max_tokens": 24}


@asynccontextmanager
async def running_engine(
    model: Path,
    args: Mapping[str, Any],
    *,
    readouts: Readouts | None = None,
    trace_root: Path | None = None,
    **settings: Any,
) -> AsyncIterator[VllmEngine]:
    config = VllmConfig(model=str(model), args=dict(args), **settings)
    engine = VllmEngine(config, readouts=readouts, trace_root=trace_root)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


@asynccontextmanager
async def left_as_found(engine: VllmEngine) -> AsyncIterator[VllmEngine]:
    """An engine that other tests use too: the test in the block leaves no request in it, and no early input."""
    before = early_budget(engine)
    yield engine
    await until_idle(engine)
    assert early_budget(engine) == before


def early_budget(engine: VllmEngine) -> tuple[int, int]:
    """The requests and tokens that may still be computed before their inputs end."""
    assert engine._shared is not None
    return engine._shared.budget.slots, engine._shared.budget.tokens


def request(source: Input, **changes: Any) -> GenerationRequest:
    return request_of(source, **{"request_id": f"req_{uuid.uuid4().hex}", "sampling": GREEDY, **changes})


async def answer(engine: VllmEngine, source: Input, **changes: Any) -> tuple[str, Finished]:
    """The whole text, and the final."""
    outputs = [output async for output in streamed(engine, request(source, **changes))]
    return said(outputs), final(outputs)


async def plain_answer(engine: VllmEngine, prompt: str | Mapping[str, Any], **sampling: Any) -> str:
    """What the same model answers when it is asked directly, with the whole prompt at once."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    parameters = SamplingParams(**{**GREEDY, **sampling}, output_kind=RequestOutputKind.FINAL_ONLY)
    asked: Any = {"prompt": prompt} if isinstance(prompt, str) else dict(prompt)
    outputs = llm_of(engine).generate(asked, parameters, request_id=uuid.uuid4().hex)
    (text,) = [output.outputs[0].text async for output in outputs]
    return str(text)


def llm_of(engine: VllmEngine) -> Any:
    return engine._thinker.llm


def unfinished(engine: VllmEngine) -> int:
    """Requests that vLLM still works on."""
    count: int = llm_of(engine).get_num_unfinished_requests()
    return count


def speaking(engine: VllmEngine) -> int:
    """Requests that the Talker still works on."""
    if engine._speaker is None:
        return 0
    count: int = engine._speaker.talker.llm.get_num_unfinished_requests()
    return count


def core_process(engine: VllmEngine) -> int:
    """The id of the process that the model runs in."""
    pid: int = llm_of(engine).engine_core.resources.engine_manager.processes[0].pid
    return pid


async def until_idle(engine: VllmEngine) -> None:
    """Nothing of any request is held any more."""
    await until(lambda: not engine.active_requests and not unfinished(engine) and not speaking(engine))


async def until_state(engine: VllmEngine, state: EngineState) -> None:
    """As long as it takes on a busy machine to start a model."""
    await until(lambda: engine.state is state, seconds=STARTS_WITHIN_SEC)


ALL = [{"start": 0, "end": 2**32 - 1}]
#: Of the largest number.
TOLERANCE = 1e-3


class Reference:
    """The same weights in transformers: log-probabilities, and the residual stream after each layer."""

    def __init__(self, model: Path) -> None:
        import torch
        from transformers import LlamaForCausalLM

        self.torch = torch
        self.model: Any = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.streams: dict[int, Any] = {}
        for index, layer in enumerate(self.model.model.layers):
            layer.register_forward_hook(lambda _, __, out, index=index: self.keep(index, out))

    def keep(self, index: int, output: Any) -> None:
        self.streams[index] = (output[0] if isinstance(output, tuple) else output)[0]

    def run(self, tokens: Sequence[int]) -> Any:
        """Log-probabilities of what comes after each position, shape (positions, vocabulary)."""
        with self.torch.no_grad():
            logits = self.model(self.torch.tensor([list(tokens)])).logits[0]
        return logits.log_softmax(-1).numpy()

    def readouts(self, tokens: Sequence[int], vectors: ReadoutVectors) -> np.ndarray[Any, Any]:
        """Shape (positions, layers times concepts)."""
        self.run(tokens)
        parts = [
            self.streams[layer].numpy() @ matrix.T
            for layer, matrix in zip(vectors.manifest.layers, vectors.matrices, strict=True)
        ]
        return np.concatenate(parts, axis=1)


def close(found: Any, wanted: Any) -> bool:
    found, wanted = np.asarray(found), np.asarray(wanted)
    return found.shape == wanted.shape and float(np.abs(found - wanted).max()) <= TOLERANCE * float(
        np.abs(wanted).max()
    )


def readouts(tokens: Sequence[messages.Token]) -> list[list[float]]:
    return [list(token.readout) for token in tokens]


def png(width: int, height: int, colour: str) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(out, "PNG")
    return out.getvalue()


#: Of the tiny text model.
LAYERS = (0, 1)
HIDDEN_SIZE = 128


def random_vectors(concepts: Sequence[str]) -> ReadoutVectors:
    random = np.random.default_rng(5)
    matrices = tuple(random.standard_normal((len(concepts), HIDDEN_SIZE)).astype(np.float32) for _ in LAYERS)
    manifest = ReadoutManifest(concepts=tuple(concepts), layers=LAYERS, hidden_size=HIDDEN_SIZE, dtype="float16")
    return ReadoutVectors(manifest, matrices)

"""Readouts switched on: what vLLM is told at its start, the vectors that its workers get, and the way back."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from omni_ws.config.error import ConfigurationError
from omni_ws.engine.vllm.readout_channel import ReadoutChannel
from omni_ws.engine.vllm.readout_vectors import ReadoutVectors

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

#: What arguments of vLLM have to be: others spread layers, requests or positions over processes that do not see each
#: other's, compute positions of tokens that are then thrown away, or take positions from elsewhere.
_REQUIRED: Final[Mapping[str, Any]] = {
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "prefill_context_parallel_size": 1,
    "enable_dbo": False,
    "ubatch_size": 0,
    "speculative_config": None,
    "kv_transfer_config": None,
}


class Readouts:
    """``engine_args`` switch readouts on at the cost of compiled graphs, which know no hooks."""

    engine_args: Mapping[str, Any] = {
        "worker_extension_cls": "omni_ws.engine.vllm.readout_worker.ReadoutWorker",
        "enforce_eager": True,
    }
    #: vLLM's newer model runner has other insides than the worker looks at.
    environment: Mapping[str, str] = {"VLLM_USE_V2_MODEL_RUNNER": "0"}

    def __init__(self, vectors: ReadoutVectors) -> None:
        self.vectors = vectors
        self.manifest = vectors.manifest
        self.channel = ReadoutChannel(len(self.manifest.layers) * len(self.manifest.concepts))

    @classmethod
    def prepare_environment(cls) -> None:
        """Before vLLM is imported."""
        os.environ.update(cls.environment)

    @staticmethod
    def check_args(args: Mapping[str, Any]) -> None:
        """Raises ConfigurationError for what cannot be had together with readouts."""
        problems = [
            f"vllm.args.{name} is {value!r} where there are readouts"
            for name, value in {**_REQUIRED, **Readouts.engine_args}.items()
            if args.get(name, value) != value
        ]
        if problems:
            raise ConfigurationError(problems)

    async def install(self, llm: AsyncLLM) -> None:
        """Into the workers of an engine that just started. Raises ConfigurationError for vectors of another model."""
        manifest = self.manifest
        arguments = (
            self.channel.address,
            list(manifest.layers),
            [matrix.tobytes() for matrix in self.vectors.matrices],
            len(manifest.concepts),
        )
        hidden_size = llm.model_config.get_hidden_size()
        # Asked first without an address: vectors of another size would break the worker.
        (layers, *_) = await llm.collective_rpc("install_readouts", args=("", *arguments[1:]))
        self.vectors.check_model(hidden_size=hidden_size, layers=layers)
        await llm.collective_rpc("install_readouts", args=arguments)

"""Readouts: the configuration of vLLM for readouts, their vectors, and the channel on which they arrive."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from omni_ws.config.values import ConfigurationError
from omni_ws.engine.vllm.readout_channel import ReadoutChannel
from omni_ws.engine.vllm.readout_vectors import ReadoutVectors

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

#: The values that vLLM's arguments must have. Others would distribute layers, requests or positions over processes,
#: compute tokens that are then rejected, or take the cache of some positions from another engine.
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
    """The readouts of one model. ``engine_args`` enable them, at the cost of compiled graphs."""

    engine_args: Mapping[str, Any] = {
        "worker_extension_cls": "omni_ws.engine.vllm.readout_worker.ReadoutWorker",
        "enforce_eager": True,
    }
    #: The worker relies on internals of vLLM's first model runner.
    environment: Mapping[str, str] = {"VLLM_USE_V2_MODEL_RUNNER": "0"}

    def __init__(self, vectors: ReadoutVectors) -> None:
        self.vectors = vectors
        self.manifest = vectors.manifest
        self.channel = ReadoutChannel(len(self.manifest.layers) * len(self.manifest.concepts))

    @classmethod
    def prepare_environment(cls) -> None:
        """Set the environment that vLLM reads when it is imported. To be called before that."""
        os.environ.update(cls.environment)

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

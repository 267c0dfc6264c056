"""ThinkerRows: what an omni model's vLLM has to tell, so that the model's own Talker can speak its answers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from omni_ws.config.values import ConfigurationError
from omni_ws.engine.vllm.readouts import ONE_WORKER, refused_args
from omni_ws.engine.vllm.row_table import KeptRows
from omni_ws.engine.vllm.rows_channel import RowsChannel

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

#: The places of media in a prompt, by the names of their tokens in the Thinker's configuration, of both families.
_MEDIA: Final = ("audio", "image", "video")


class ThinkerRows:
    """The rows of one omni model, ``config`` of whose checkpoint it reads.

    ``every_state``: the Talker of Qwen2.5 reads the Thinker's state of every token; that of Qwen3 reads those of audio,
    images and video in the prompt. ``kept_bytes`` bounds what is kept of conversations. ``positions`` is how long
    prompt and speech can be together for the Talker; None sets no limit.
    """

    #: The worker has what readouts need as well.
    engine_args: Mapping[str, Any] = {"worker_extension_cls": "omni_ws.engine.vllm.rows_worker.RowsWorker"}
    #: The worker relies on internals of vLLM's first model runner.
    environment: Mapping[str, str] = {"VLLM_USE_V2_MODEL_RUNNER": "0"}

    def __init__(self, config: Mapping[str, Any], *, kept_bytes: int, positions: int | None = None) -> None:
        thinker = config["thinker_config"]
        ids = [thinker.get(f"{name}_token_id", thinker.get(f"{name}_token_index")) for name in _MEDIA]
        self.media_tokens: tuple[int, ...] = tuple(token for token in ids if token is not None)
        self.every_state = "accept_hidden_layer" not in config["talker_config"]
        self.width: int = thinker["text_config"]["hidden_size"]
        self.positions = positions
        self.channel = RowsChannel()
        self.kept = KeptRows(kept_bytes)

    @classmethod
    def prepare_environment(cls) -> None:
        """Set the environment that vLLM reads when it is imported. To be called before that."""
        os.environ.update(cls.environment)

    @staticmethod
    def check_args(args: Mapping[str, Any]) -> None:
        """Raise ConfigurationError for engine arguments with which there are no rows."""
        required = {**ONE_WORKER, **ThinkerRows.engine_args}
        if problems := refused_args(args, required, purpose="a model that speaks itself"):
            raise ConfigurationError(problems)

    async def install(self, llm: AsyncLLM) -> None:
        """Tell the workers of an engine that has started where to send rows."""
        tokens = None if self.every_state else list(self.media_tokens)
        await llm.collective_rpc("install_rows", args=(self.channel.address, tokens))

"""LocalServerLlm: an LLM that a server of models on this machine serves, named by that server alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from omni_ws.config.parts import LOCAL_PORTS
from omni_ws.engine.remote.engine import RemoteLlmEngine
from omni_ws.engine.remote.settings import RemoteLlmSettings
from omni_ws.errors import EngineFailed

#: The names of such servers, and how people get them to answer, with a model.
_HOW_TO_START: Final[Mapping[str, tuple[str, str]]] = {
    "ollama": ("Ollama", "ollama serve; a model: ollama pull llama3.2"),
    "lmstudio": ("LM Studio", "lms server start; a model: lms load"),
    "llamacpp": ("llama.cpp", "llama-server -m FILE.gguf --jinja"),
}


class LocalServerLlm(RemoteLlmEngine):
    """A RemoteLlmEngine whose failure to start says how to start the server."""

    def __init__(self, server: str, settings: RemoteLlmSettings) -> None:
        super().__init__(settings)
        self._server = server

    async def start(self) -> None:
        """Return when the server can be used; raise EngineFailed at once where it is not there."""
        try:
            await super().start()
        except EngineFailed as error:
            name, start = _HOW_TO_START[self._server]
            raise EngineFailed(
                f"{name} on this machine: {error.message} (to start it: {start}; "
                f"another server: --llm http://HOST:{LOCAL_PORTS[self._server]}/v1)",
                fatal=True,
            ) from error

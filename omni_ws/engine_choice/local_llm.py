"""LocalServerLlm: an LLM that a server of models on this machine serves, named by that server alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from omni_ws.config.parts import LOCAL_PORTS
from omni_ws.engine.remote.llm_engine import RemoteLlmEngine
from omni_ws.engine.remote.settings import RemoteLlmSettings
from omni_ws.errors import EngineFailed

#: How people get such a server to answer, with a model.
_HOW_TO_START: Final[Mapping[str, str]] = {
    "ollama": "start it (ollama serve) and give it a model (ollama pull llama3.2)",
    "lmstudio": "start its server (lms server start, or Developer: Start server) and load a model",
    "llamacpp": "start it with a model (llama-server -m FILE.gguf --jinja)",
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
            port = LOCAL_PORTS[self._server]
            advice = (
                f"{_HOW_TO_START[self._server]}, or name the address of another server: --llm http://HOST:{port}/v1"
            )
            raise EngineFailed(f"{error.message}; {advice}", fatal=True) from error

"""One line on what would make the parts of an engine better, for a person who can start the server in another way."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from omni_ws.config.model import ServerConfig
from omni_ws.config.startup import is_loopback
from omni_ws.engine.base import Engine
from omni_ws.engine.composed.parts import HasShortcomings, Role, parts_of

_BETTER_THAN_RULES: Final = (
    "To talk with a language model instead of rules, start the server with --llm ollama, --llm qwen (1.1 GB), "
    "or --llm and a URL"
)


def advice(engine: Engine, config: ServerConfig, suggested: Iterable[str] = ()) -> str | None:
    """Return a line for the users of the server; ``suggested`` are servers of models that were found.

    None for parts that somebody chose by name, and where users are on other machines: they cannot follow it.
    """
    if not is_loopback(config.host):
        return None
    if isinstance(engine, HasShortcomings) and engine.shortcomings:
        return engine.shortcomings[0]
    llm = parts_of(engine)[Role.LLM]
    if config.engine is None and config.llm.use is None and llm is not None and llm.name == "rules":
        return next(iter(suggested), _BETTER_THAN_RULES)
    return None

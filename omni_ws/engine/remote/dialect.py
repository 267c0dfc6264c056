"""What servers with OpenAI's API do in their own way: which one it is, what it ignores, where it tells its context."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, Final

#: The context of a model in Ollama where nothing else is said (its documentation: OLLAMA_CONTEXT_LENGTH).
OLLAMA_CONTEXT: Final = 4096


class Dialect(Enum):
    """A kind of server."""

    #: One that is not known: OpenAI's own API, or any other.
    OPENAI = "openai"
    OMNI_WS = "omni_ws"
    VLLM = "vllm"
    LLAMA_CPP = "llama.cpp"
    LM_STUDIO = "LM Studio"
    OLLAMA = "Ollama"


#: Ollama names no owner of its own; it is known by ``/api/version``.
BY_OWNER: Final[Mapping[str, Dialect]] = {
    "omni_ws": Dialect.OMNI_WS,
    "vllm": Dialect.VLLM,
    "llamacpp": Dialect.LLAMA_CPP,
    "organization_owner": Dialect.LM_STUDIO,
}

#: Servers that close the connection after an answer that they stream, though its head says otherwise. In llama.cpp the
#: last piece ends as cpp-httplib ends an answer that was given up; a request that follows at once is then lost.
CLOSE_AFTER_STREAM: Final = frozenset({Dialect.LLAMA_CPP})

#: Sampling parameters that are accepted without effect there.
IGNORED_SAMPLING: Final[Mapping[Dialect, frozenset[str]]] = {
    Dialect.OLLAMA: frozenset({"top_k", "min_p", "repetition_penalty"}),
    Dialect.LM_STUDIO: frozenset({"min_p"}),
}
#: Sampling parameters that have another name there.
_SAMPLING_NAMES: Final[Mapping[Dialect, Mapping[str, str]]] = {
    Dialect.LLAMA_CPP: {"repetition_penalty": "repeat_penalty"},
    Dialect.LM_STUDIO: {"repetition_penalty": "repeat_penalty"},
}


def sampling_for(dialect: Dialect, sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling parameters by the names of the server."""
    names = _SAMPLING_NAMES.get(dialect, {})
    return {names.get(name, name): value for name, value in sampling.items()}


def is_for_chat(model: str) -> bool:
    """Whether a listed model may be one that answers: LM Studio lists those for embeddings beside the others."""
    return not model.startswith("text-embedding-")


def listed_models(content: object) -> list[Mapping[str, Any]] | None:
    """The entries of ``/v1/models`` or of Ollama's ``/api/tags``, with ``id``; None for what is neither.

    Ollama without models says null.
    """
    if not isinstance(content, Mapping) or not ({"data", "models"} & content.keys()):
        return None
    listed = content["data"] if "data" in content else content["models"]
    if listed is None:
        return []
    if not isinstance(listed, list):
        return None
    entries = [dict(entry) for entry in listed if isinstance(entry, dict)]
    for entry in entries:
        entry.setdefault("id", entry.get("name"))
    return [entry for entry in entries if isinstance(entry["id"], str)]


def context_listed(entry: Mapping[str, Any]) -> int | None:
    """The context that an entry of the list of models tells (vLLM; llama.cpp), in tokens."""
    meta = entry.get("meta")
    return _count(entry.get("max_model_len")) or (_count(meta.get("n_ctx")) if isinstance(meta, dict) else None)


def context_in_props(content: object) -> int | None:
    """The context of one conversation in llama.cpp (``/props``)."""
    settings = content.get("default_generation_settings") if isinstance(content, dict) else None
    return _count(settings.get("n_ctx")) if isinstance(settings, dict) else None


def opens_thoughts_in_props(content: object) -> bool:
    """Whether the chat template of llama.cpp (``/props``) opens a thought where the answer begins, in every case."""
    template = content.get("chat_template") if isinstance(content, dict) else None
    if not isinstance(template, str):
        return False
    prompt = template.rpartition("add_generation_prompt")[2]
    return "<think>" in prompt and "</think>" not in prompt


def context_in_lm_studio(content: object) -> int | None:
    """The context with which a model is loaded (``/api/v0/models/{id}``)."""
    return _count(content.get("loaded_context_length")) if isinstance(content, dict) else None


def context_in_ps(content: object, model: str) -> int | None:
    """The context of ``model`` if Ollama has it loaded (``/api/ps``)."""
    running = content.get("models") if isinstance(content, dict) else None
    for entry in running if isinstance(running, list) else ():
        if isinstance(entry, dict) and model in _ollama_names(entry):
            return _count(entry.get("context_length"))
    return None


def context_in_show(content: object) -> int | None:
    """The context that a model's file asks Ollama for (``num_ctx`` in ``/api/show``)."""
    parameters = content.get("parameters") if isinstance(content, dict) else None
    for line in parameters.splitlines() if isinstance(parameters, str) else ():
        name, _, value = line.strip().partition(" ")
        if name == "num_ctx" and value.strip().isdecimal():
            return _count(int(value))
    return None


def _ollama_names(entry: Mapping[str, Any]) -> Iterator[str]:
    for name in (entry.get("name"), entry.get("model")):
        if isinstance(name, str):
            yield name
            yield name.removesuffix(":latest")


def _count(value: object) -> int | None:
    return value if type(value) is int and value > 0 else None

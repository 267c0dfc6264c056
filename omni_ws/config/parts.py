"""What ``asr.use``, ``llm.use`` and ``tts.use`` may say: a name, a name with a model, or the URL of a server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

#: The form in which any of them names a server.
_URL_FORM: Final = "http://HOST:PORT/v1"

#: The names of each part with the form that its users write. Those with a colon need a model behind it, those with
#: brackets may have one. FILE and FOLDER are models, too.
FORMS: Final[Mapping[str, Mapping[str, str]]] = {
    "asr": {
        "embedded": "embedded",
        "whisper": "whisper[:tiny.en|base|FOLDER]",
        "vllm": "vllm:MODEL",
        "none": "none",
    },
    "llm": {
        "embedded": "embedded",
        "rules": "rules",
        "gguf": "gguf:FILE",
        "qwen": "qwen",
        "smollm2": "smollm2",
        "vllm": "vllm:MODEL",
        "ollama": "ollama[:MODEL]",
        "lmstudio": "lmstudio[:MODEL]",
        "llamacpp": "llamacpp[:MODEL]",
    },
    "tts": {
        "embedded": "embedded",
        "hibari": "hibari[:FILE]",
        "espeak": "espeak",
        "talker": "talker:MODEL",
        "none": "none",
    },
}
#: The name of a choice that is a URL.
SERVER: Final = "server"
#: The ports on which servers of models listen on this machine unless told otherwise.
LOCAL_PORTS: Final[Mapping[str, int]] = {"ollama": 11434, "lmstudio": 1234, "llamacpp": 8080}
#: The names of LLMs that llama.cpp runs in a process of this server.
GGUF_PARTS: Final = frozenset({"gguf", "qwen", "smollm2"})
#: The names of parts on vLLM.
VLLM_PARTS: Final = frozenset({"vllm", "talker"})
#: The names of parts that another server is.
REMOTE_PARTS: Final = frozenset({SERVER, *LOCAL_PORTS})


@dataclass(frozen=True, slots=True)
class PartChoice:
    """One part as chosen: by a name of ``FORMS``, or by a URL, whose ``name`` is ``server``.

    ``implied``: nobody named it, and the server works without it, too.
    """

    name: str
    model: str | None = None
    url: str | None = None
    implied: bool = False


def parse_part(part: str, text: str) -> PartChoice:
    """Parse ``NAME``, ``NAME:MODEL`` or a URL; ``part`` is ``asr``, ``llm`` or ``tts``. Raises ValueError.

    The first colon separates, since names of models contain colons, too. A URL is not checked, only recognised.
    """
    if "://" in text:
        return PartChoice(SERVER, url=text)
    name, colon, model = text.partition(":")
    form = FORMS[part].get(name)
    if form is None:
        if name == "none":
            raise ValueError("no engine works without an LLM; rules is one that needs nothing")
        raise ValueError(f"unknown; known are {', '.join((*FORMS[part].values(), _URL_FORM))}")
    if colon and ":" not in form:
        raise ValueError(f"{name} has no models to choose from: leave out what follows the colon")
    if colon and not model:
        raise ValueError(f"nothing follows the colon; the form is {form}")
    return PartChoice(name, model or None)


def takes_model(part: str, name: str) -> bool:
    """Whether a choice of this name may have a model."""
    return ":" in FORMS[part].get(name, "")


def needs_model(part: str, name: str) -> bool:
    """Whether a choice of this name means nothing without a model."""
    return takes_model(part, name) and "[" not in FORMS[part][name]

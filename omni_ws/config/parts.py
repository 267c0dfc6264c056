"""What ``asr.use``, ``llm.use`` and ``tts.use`` may say: a name, a name with a model, or the URL of a server."""

from __future__ import annotations

import difflib
import re
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
        "openai": "openai:MODEL",
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
#: Where OpenAI answers, and the variable of the environment that its own packages take the key from.
OPENAI_URL: Final = "https://api.openai.com/v1"
OPENAI_KEY: Final = "OPENAI_API_KEY"
#: An address without a scheme, and perhaps a path.
_BARE_ADDRESS: Final = re.compile(r"(?:[\w.-]+|\[[0-9a-fA-F:]+\]):\d{1,5}(?P<path>/\S*)?", re.ASCII)
#: The names of LLMs that llama.cpp runs in a process of this server.
GGUF_PARTS: Final = frozenset({"gguf", "qwen", "smollm2"})
#: The names of parts on vLLM.
VLLM_PARTS: Final = frozenset({"vllm", "talker"})
#: The names of parts that another server is.
REMOTE_PARTS: Final = frozenset({SERVER, "openai", *LOCAL_PORTS})


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
        known = ", ".join((*FORMS[part].values(), _URL_FORM))
        raise ValueError(f"unknown; known are {known}{_meant(part, text)}")
    if colon and ":" not in form:
        raise ValueError(f"{name} has no models to choose from: leave out what follows the colon")
    if colon and not model:
        raise ValueError(f"nothing follows the colon; the form is {form}")
    return PartChoice(name, model or None, url=OPENAI_URL if name == "openai" else None)


def _meant(part: str, text: str) -> str:
    """What somebody probably meant who wrote what is not known; empty where nothing is near."""
    if (address := _BARE_ADDRESS.fullmatch(text)) is not None:
        return f"; did you mean http://{text.rstrip('/')}{'' if (address['path'] or '/') != '/' else '/v1'}?"
    name, colon, model = text.partition(":")
    near = difflib.get_close_matches(name.lower(), FORMS[part], n=1)
    return f"; did you mean {near[0]}{colon}{model}?" if near else ""


def takes_model(part: str, name: str) -> bool:
    """Whether a choice of this name may have a model."""
    return ":" in FORMS[part].get(name, "")


def needs_model(part: str, name: str) -> bool:
    """Whether a choice of this name means nothing without a model."""
    return takes_model(part, name) and "[" not in FORMS[part][name]

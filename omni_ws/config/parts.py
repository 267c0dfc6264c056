"""The engines: plug-ins, and the three parts of a composed engine, ASR, LLM and TTS.

How they are chosen, and the settings of the parts.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, TypeAlias

from pydantic import Field, field_validator

from omni_ws.config.values import ConfigurationError, Count, Key, Seconds, Section, Text, Whole, setting
from omni_ws.errors import OmniError

logger = logging.getLogger(__name__)

#: The groups of entry points. An engine's function is called with the ServerConfig, a front end's with the App.
ENGINES: Final = "omni_ws.engines"
FRONTS: Final = "omni_ws.fronts"
#: The plug-ins of this package, by group. Front ends drain and end in this order.
OWN: Final[Mapping[str, Mapping[str, str]]] = {
    ENGINES: {
        "embedded": "omni_ws.engine_choice:composed_engine",
        "vllm": "omni_ws.engine_choice:composed_engine",
        "remote": "omni_ws.engine_choice:remote_engine",
        "fake": "omni_ws.engine_choice:echo_engine",
    },
    FRONTS: {
        "mode_b_readers": "omni_ws.server:mode_b_readers",
        "streaming_input": "omni_ws.transport.native.endpoint:StreamingInput",
        "realtime": "omni_ws.transport.realtime.session:Realtime",
        "live": "omni_ws.transport.realtime.live:Live",
        "client_secrets": "omni_ws.transport.realtime.session:ClientSecretRoutes",
        "translations": "omni_ws.transport.realtime.translation_sessions:Translations",
        "webrtc": "omni_ws.transport.webrtc.endpoint:WebrtcCalls",
        "telephony": "omni_ws.transport.telephony.media_stream:TelephonyStreams",
        "audiosocket": "omni_ws.transport.telephony.audiosocket:AudioSocketCalls",
        "wyoming": "omni_ws.transport.wyoming.front:WyomingServices",
        "mode_b": "omni_ws.server:mode_b",
        "chat": "omni_ws.server:chat",
        "speech": "omni_ws.transport.routes.openai:SpeechRoutes",
        "completions": "omni_ws.transport.routes.openai:CompletionRoutes",
        "transcriptions": "omni_ws.transport.routes.openai:TranscriptionRoutes",
        "operations": "omni_ws.transport.routes.operations:OperationsRoutes",
        "profiling": "omni_ws.transport.routes.operations:ProfilingRoutes",
        "calls": "omni_ws.transport.routes.calls:CallRoutes",
        "demo": "omni_ws.transport.routes.operations:DemoRoutes",
    },
}


def registered(group: str, name: object) -> EntryPoint:
    """Return the entry point of this name, without importing the plug-in. Raises ValueError for none or several."""
    own = OWN[group]
    if isinstance(name, str) and name in own:
        return EntryPoint(name, own[name], group)
    others = [one for one in entry_points(group=group) if one.name not in own]
    found = [one for one in others if one.name == name]
    if len(found) > 1:
        raise ValueError(f"{' and '.join(sorted(map(_package, found)))} both have this name: uninstall one of them")
    if not found:
        known = (*own, *sorted({one.name for one in others}))
        near = difflib.get_close_matches(str(name).lower(), known, n=1)
        raise ValueError(f"unknown; known are {', '.join(known)}" + (f"; did you mean {near[0]}?" if near else ""))
    return found[0]


def made(group: str, name: str, *, of: object, kind: type[Any]) -> Any:
    """Import the plug-in of this name, call its function with ``of``, and return the result, of type ``kind``.

    Raises ValueError as ``registered`` does, and ConfigurationError if the plug-in fails or returns another type.
    OmniErrors, and all exceptions of this package's own plug-ins, are passed on.
    """
    entry = registered(group, name)
    what = f"{'engine' if group == ENGINES else 'front end'} {name} of {_package(entry)} ({entry.value})"
    try:
        result = entry.load()(of)
    except Exception as error:
        if name in OWN[group] or isinstance(error, OmniError | ConfigurationError):
            raise
        logger.debug("%s cannot be made", what, exc_info=True)
        raise ConfigurationError([f"{what} cannot be made: {type(error).__name__}: {error}"]) from error
    if not isinstance(result, kind):
        raise ConfigurationError([f"{what} returned {type(result).__name__}, which is no {kind.__name__}"])
    return result


def _package(entry: EntryPoint) -> str:
    """Return the name of the package that registers the entry point."""
    return entry.dist.name if entry.dist is not None else "omni_ws"


# The three parts of a composed engine, ASR, LLM and TTS: how they are chosen, and their settings.


# The values of ``use``: a name, a name with a model, or the URL of a server

#: The form of a URL, which chooses a server as any part.
_URL_FORM: Final = "http://HOST:PORT/v1"
#: The names by which each part can be chosen, with the form in which users write the choice. After a colon a model is
#: required (``gguf:FILE``), or optional in brackets (``ollama[:MODEL]``).
FORMS: Final[Mapping[str, Mapping[str, str]]] = {
    "asr": {
        "embedded": "embedded",
        "whisper": "whisper[:tiny.en|base|FOLDER]",
        "vllm": "vllm:MODEL",
        "none": "none",
    },
    "llm": {
        "auto": "auto",
        "embedded": "embedded",
        "rules": "rules",
        "gguf": "gguf:FILE",
        "qwen": "qwen",
        "qwen3-1.7b": "qwen3-1.7b",
        "qwen3-0.6b": "qwen3-0.6b",
        "qwen2.5-1.5b": "qwen2.5-1.5b",
        "qwen2.5-coder-1.5b": "qwen2.5-coder-1.5b",
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
        "kokoro": "kokoro[:VOICE]",
        "espeak": "espeak",
        "talker": "talker:MODEL",
        "none": "none",
    },
}

#: The name of the LLM that the server chooses by itself.
AUTO: Final = "auto"
#: The names of LLMs that can be fetched, which are those of their weights.
FETCHED_LLMS: Final = ("qwen", "qwen3-1.7b", "qwen3-0.6b", "qwen2.5-1.5b", "smollm2")
#: Of these, the one that is for tests alone, and too small to be named in documents.
FOR_TESTS: Final = "smollm2"
#: Their other names, in full.
FULL_NAMES: Final[Mapping[str, str]] = {"qwen2.5-coder-1.5b": "qwen"}
#: The name that a choice has if it is a URL.
SERVER: Final = "server"
#: The default ports of model servers on this machine.
LOCAL_PORTS: Final[Mapping[str, int]] = {"ollama": 11434, "lmstudio": 1234, "llamacpp": 8080}
#: The base URL of OpenAI, and the environment variable from which OpenAI's own packages read the key.
OPENAI_URL: Final = "https://api.openai.com/v1"
OPENAI_KEY: Final = "OPENAI_API_KEY"
#: An address without a scheme, with an optional path.
_BARE_ADDRESS: Final = re.compile(r"(?:[\w.-]+|\[[0-9a-fA-F:]+\]):\d{1,5}(?P<path>/\S*)?", re.ASCII)
#: The names of LLMs that llama.cpp runs in a process of this server.
GGUF_PARTS: Final = frozenset({"gguf", *FETCHED_LLMS})
#: The names of LLMs that may become one of these, and have the same settings.
_MAYBE_GGUF: Final = GGUF_PARTS | {AUTO}
#: The names of the parts that run on vLLM.
VLLM_PARTS: Final = frozenset({"vllm", "talker"})
#: The names of the parts that another server provides.
REMOTE_PARTS: Final = frozenset({SERVER, "openai", *LOCAL_PORTS})
#: The names of the parts that may be given a model.
MODEL_PARTS: Final = REMOTE_PARTS | {name for names in FORMS.values() for name, form in names.items() if ":" in form}


@dataclass(frozen=True, slots=True)
class PartChoice:
    """The choice of one part: by a name of ``FORMS``, or by a URL, for which ``name`` is ``server``.

    ``implied``: the part is a default that nobody chose, and the server also starts without it.
    """

    name: str
    model: str | None = None
    url: str | None = None
    implied: bool = False


def parse_part(part: str, text: str) -> PartChoice:
    """Parse ``NAME``, ``NAME:MODEL`` or a URL; ``part`` is ``asr``, ``llm`` or ``tts``. Raises ValueError.

    The first colon ends the name: names of models contain colons, too. A URL is recognised, but not checked.
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
    url = OPENAI_URL if name == "openai" else None
    return PartChoice(FULL_NAMES.get(name, name), model or None, url=url)


def _meant(part: str, text: str) -> str:
    """Return the end of the message about an unknown name: ``; did you mean rules?``, or "" if no name is similar."""
    if (address := _BARE_ADDRESS.fullmatch(text)) is not None:
        return f"; did you mean http://{text.rstrip('/')}{'' if (address['path'] or '/') != '/' else '/v1'}?"
    name, colon, model = text.partition(":")
    near = difflib.get_close_matches(name.lower(), FORMS[part], n=1)
    return f"; did you mean {near[0]}{colon}{model}?" if near else ""


# Settings

#: The default instructions for an LLM whose answers are spoken, used if neither operator nor client sets any.
SPOKEN_INSTRUCTIONS: Final = (
    "You are talking with the user: they speak, and a voice reads your answers aloud. Answer in one to three short, "
    "plain sentences, as in a conversation, the most important thing first, in the user's language. Write no lists, "
    "headings, tables, Markdown, emoji, links or code: nobody sees them. If there is much to say, say the essence and "
    "offer to go on. The user's words come from speech recognition: if a word makes no sense, think of one that sounds "
    "like it, and ask if you are unsure."
)

#: The same for small models, which follow few instructions, and tend to promise what they cannot do. With longer texts,
#: which asked to warn of dangers or praised the model's knowledge, they answered worse (benchmarks/minds).
_SMALL_MODEL: Final = (
    "You are a friendly voice assistant, a computer program. Your answers are spoken aloud: answer in one or two "
    "short, plain sentences, in the user's language, without lists, Markdown or emoji."
)
_UNSURE: Final = "If you are not sure, say that you are not sure."
_FOR_SMALL_MODELS: Final = (
    f"{_SMALL_MODEL} You cannot see, move, browse the internet, know the time or the weather, or control devices; if "
    f"you are asked to, say so. {_UNSURE}"
)
#: With tools, a model may be able to do what the other text denies.
_FOR_SMALL_MODELS_WITH_TOOLS: Final = f"{_SMALL_MODEL} {_UNSURE}"


def _use(part: str, server: str, *, unset: str = "embedded, beside another part") -> Any:
    """Return the field for the setting ``use`` of ``part``, with its help.

    ``server`` is the help's description of a server that can be this part: ``a server with /v1/audio/speech``.
    """
    forms = ", ".join(f"`{form}`" for name, form in FORMS[part].items() if name != FOR_TESTS)
    return setting(f"{forms}, or the base URL of {server}; unset: {unset}.", short=f"--{part}", often=True)


class PartConfig(Section):
    """Base of the settings of one part."""

    #: The name of the section in the configuration.
    part: ClassVar[str]

    use: Text | None = None
    model: Text | None = setting(
        "Model, unless `use` names it; unset: the first that the server lists.", of=MODEL_PARTS
    )
    api_key: Key | None = setting("API key for the server.", of=REMOTE_PARTS)

    @property
    def choice(self) -> PartChoice:
        """The part that ``use`` chooses, with the model that ``use`` names or else that of the setting ``model``."""
        if self.use is None:
            return PartChoice("embedded", implied=True)
        choice = parse_part(self.part, self.use)
        return choice if choice.model is not None else replace(choice, model=self.model)

    @field_validator("use")
    @classmethod
    def _check_use(cls, text: str | None) -> str | None:
        if text is not None:
            parse_part(cls.part, text)
        return text


class AsrConfig(PartConfig):
    """ASR, the part that hears. Naming one of the three parts composes an engine of them (docs/compose.md)."""

    part = "asr"

    use: Text | None = _use("asr", "a server with /v1/audio/transcriptions")
    languages: tuple[Text, ...] | None = setting(
        "Languages that clients of a server's recognition may name (RFC 5646); unset: those of Whisper.",
        of=REMOTE_PARTS,
    )
    word_times: bool = setting(
        "Ask a server for the times of words; most then stream no interim texts.", False, of=REMOTE_PARTS
    )
    speculate: bool | None = setting(
        "Have a server transcribe at each pause what was said so far, for nothing if the speaker goes on; unset: "
        "unless it is beyond this machine.",
        of=REMOTE_PARTS,
    )
    timeout_sec: Seconds = setting(
        "How long a turn may be written down whose speaker went on, or that was cancelled; after that its interim "
        "text has to do.",
        30,
    )
    args: dict[str, Any] = setting("vLLM's engine arguments, beside `vllm:MODEL`.", {}, of={"vllm"})


class LlmConfig(PartConfig):
    """LLM, the part that answers. One on vLLM also has the settings of `vllm`, a server those of `remote`."""

    part = "llm"

    use: Text | None = _use("llm", "a server with /v1/chat/completions", unset="auto, unless an engine is named")
    fetch: bool = setting(
        "With `auto`: fetch a language model in the background if this machine has none; `--fetch` sets it.",
        False,
        of={AUTO},
    )
    api_key: Key | None = setting("API key for the server.", often=True, of=REMOTE_PARTS)
    first_byte_timeout_sec: Seconds = setting(
        "Time-out of the first output of an answer; `remote.first_byte_timeout_sec` is an older name.", 120
    )
    speculate: bool | None = setting(
        "Begin an answer at the first pause, and throw it away if the speaker goes on; unset: unless the LLM or the "
        "TTS is a server beyond this machine."
    )
    instructions: str | None = setting(
        "Instructions for spoken answers, unless the client gives its own; unset: to write for the ear "
        "(docs/speech.md); empty: none."
    )
    max_spoken_tokens: Whole = setting(
        "About how many tokens a spoken answer has, unless the client names a limit: it ends with a whole sentence, "
        "`finish_reason` `length`. 300 are about a minute and a half; 0: no limit.",
        300,
    )
    tool_filler: str | None = setting(
        "Sentence, such as `One moment.`, that a session by voice says first while the client runs a tool "
        "(docs/manners.md); unset: a built-in one in the language of the talk; empty: nothing is said."
    )
    context: Count = setting(
        "Tokens of context of a GGUF model for each conversation; at most its own.", 4096, ge=256, of=_MAYBE_GGUF
    )
    threads: Count | None = setting(
        "Threads of a GGUF model; unset: as many as cores were idle in the last five minutes, less one if there are "
        "three or more.",
        of=_MAYBE_GGUF,
    )
    parallel: Count | None = setting(
        "Conversations that a GGUF model answers at a time; unset: half of the cores, but 2 to 4.", of=_MAYBE_GGUF
    )
    reasoning_effort: Text | None = setting(
        "How much a model on a server thinks before it answers, as that server calls it (`none`, `low` …; OpenAI, "
        "Ollama), unless the client says: speech begins late then; unset: as the server does.",
        of=REMOTE_PARTS,
    )
    chat_template_kwargs: dict[str, Any] = setting(
        "Arguments of the chat template of a model on a server, such as `enable_thinking false` (vLLM, llama.cpp, "
        "SGLang).",
        {},
        of=REMOTE_PARTS,
    )
    think: bool = setting(
        "Whether a GGUF model that can think does so before it answers: speech begins late then.", False, of=_MAYBE_GGUF
    )
    opens_thoughts: bool | None = setting(
        "Whether the chat template of a server's model opens a thought that its answers only close: streams are then "
        "held back until it is closed; unset: as llama.cpp tells, or an answer has shown.",
        of=REMOTE_PARTS,
    )
    chat_template: Path | None = setting(
        "Chat template (Jinja file) of a GGUF model; unset: that of the file.", of=_MAYBE_GGUF
    )

    @property
    def spoken_instructions(self) -> str:
        """The instructions for spoken answers; "" for none."""
        return self._spoken(_FOR_SMALL_MODELS)

    @property
    def spoken_instructions_with_tools(self) -> str:
        """The instructions for spoken answers of a model with tools; "" for none."""
        return self._spoken(_FOR_SMALL_MODELS_WITH_TOOLS)

    def _spoken(self, for_small_models: str) -> str:
        if self.instructions is not None:
            return self.instructions
        small = self.use is None or self.choice.name == AUTO or self.choice.name.startswith("qwen")
        return for_small_models if small else SPOKEN_INSTRUCTIONS


#: What ``session_config`` takes, too.
LexiconWord: TypeAlias = Annotated[str, Field(pattern=r"\S", max_length=64)]
Pronunciation: TypeAlias = Annotated[str, Field(pattern=r"\S", max_length=128, coerce_numbers_to_str=True)]
#: A language (a primary subtag of RFC 5646), and a voice of a synthesiser.
_LANGUAGE: Final = re.compile(r"[a-z]{2,3}")
_NAMED_VOICE: Final = re.compile(r"(?:kokoro|espeak):\S.*")

#: Stands for a part that nobody has named, among the parts for which a setting has an effect.
IMPLIED: Final = "implied"

#: The TTS parts that have a setting for the voice; a Talker's voices are those of its profile.
_VOICED: Final = {*FORMS["tts"], SERVER} - {"none", "talker"}


class TtsConfig(PartConfig):
    """TTS, the part that speaks. A Talker also has `vllm.talker_profile` and `vllm.talker_args`."""

    part = "tts"

    use: Text | None = _use("tts", "a server with /v1/audio/speech")
    voice: Text | None = setting("Voice unless the client names one; unset: the part's own.", often=True, of=_VOICED)
    lexicon: Annotated[dict[LexiconWord, Pronunciation], Field(max_length=500)] = setting(
        'How words and names are said, such as `nginx = "engine x"`, unless the client says: at most 500 '
        "(protocol/README.md). Without effect where no voice of this server takes it.",
        {},
    )
    voices: dict[str, str] = setting(
        'Voices of languages, such as `{es = "kokoro:ef_dora", de = "espeak:de"}`, unless the client names one that '
        "speaks it; unset: Kokoro in es, fr, hi, it and pt, if it was fetched, else espeak-ng (docs/languages.md).",
        {},
        of={IMPLIED, "embedded", "hibari", "kokoro", "espeak"},
    )

    @field_validator("voices")
    @classmethod
    def _check_voices(cls, voices: dict[str, str]) -> dict[str, str]:
        for language, voice in voices.items():
            if not _LANGUAGE.fullmatch(language):
                raise ValueError(f"{language!r} is no language; the form is es")
            if not _NAMED_VOICE.fullmatch(voice):
                raise ValueError(f"{language}: {voice!r} is no voice; the forms are kokoro:VOICE and espeak:VOICE")
        return voices

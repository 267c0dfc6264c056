"""The engines of this package and their parts, created from the configuration by entry points (``config.plugins``).

Each is imported only when it is created, since engines have heavy dependencies.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from omni_ws.config.model import EngineName, ServerConfig, VllmConfig, VoiceChoice
from omni_ws.config.parts import (
    FETCHED_LLMS,
    LOCAL_PORTS,
    OPENAI_KEY,
    REMOTE_PARTS,
    SERVER,
    PartConfig,
)
from omni_ws.config.plugins import ENGINES, made
from omni_ws.config.startup import is_loopback
from omni_ws.engine.base import Engine
from omni_ws.errors import EngineFailed
from omni_ws.installing import fetch_command

if TYPE_CHECKING:
    from omni_ws.engine.llm.rules_engine import RulesEngine
    from omni_ws.engine.tts.voice_process import VoiceProcess

#: The name under which the embedded engine is served: it has no model of its own.
EMBEDDED_MODEL: Final = "omni-embedded"


def create_engine(config: ServerConfig) -> Engine:
    """Create the configured engine, also one of another package. Raises ConfigurationError if that is not possible."""
    engine: Engine = made(ENGINES, config.engine or EngineName.EMBEDDED, of=config, kind=Engine)
    return engine


def echo_engine(config: ServerConfig) -> Engine:
    from omni_ws.engine.fake import EchoEngine, EchoSettings

    return EchoEngine(EchoSettings(**config.fake.model_dump()))


def remote_engine(config: ServerConfig) -> Engine:
    from omni_ws.engine.remote.engine import RemoteEngine

    remote = config.remote
    if "first_byte_timeout_sec" in config.llm.changed:
        remote = remote.model_copy(update={"first_byte_timeout_sec": config.llm.first_byte_timeout_sec})
    return RemoteEngine(remote, log_content=config.log_content, max_spoken_tokens=config.llm.max_spoken_tokens or None)


def composed_engine(config: ServerConfig) -> Engine:
    """Create an engine of an LLM, an ASR and a TTS: as configured, embedded, or vLLM's model and what it lacks."""
    from omni_ws.engine.composed.engine import ComposedEngine

    llm, whole_vllm = config.llm, config.engine is EngineName.VLLM
    return ComposedEngine(
        vllm_engine(config, config.vllm) if whole_vllm else llm_of(config),
        asr=asr_of(config),
        tts=tts_of(config),
        name=None if whole_vllm else config.engine_name,
        # A model that changes while the server runs keeps its name for clients.
        model=None if whole_vllm or (config.composed and not config.chooses_llm) else EMBEDDED_MODEL,
        where_missing=whole_vllm,
        asr_optional=config.asr.choice.name == "embedded",
        # An LLM on a server has a time-out of its own for the first byte, after which it retries.
        first_byte_timeout_sec=None if llm.choice.name in REMOTE_PARTS else llm.first_byte_timeout_sec,
        max_spoken_tokens=llm.max_spoken_tokens or None,
        think_ahead=_thinks_ahead(config),
    )


def _thinks_ahead(config: ServerConfig) -> bool:
    """Whether to begin answers that may not be needed: by default not with parts on other machines.

    A remote LLM or voice may charge for these answers.
    """
    if config.llm.speculate is not None:
        return config.llm.speculate
    urls = [part.choice.url for part in (config.llm, config.tts) if part.choice.url is not None]
    return all(is_loopback(urlsplit(url).hostname or "") for url in urls)


# The engine of each part, as chosen by ``--asr``, ``--llm`` and ``--tts``

#: The properties of an LLM on a server that are only known if ``remote`` has them.
_FORWARDING: Final = (
    *("input_modalities", "options", "sampling", "stage_params", "stage_sampling"),
    *("voices", "audio_format", "audio_sample_rate"),
)

_RULES_KNOW: Final = "rules answer what they know exactly: time, dates, sums, units, spelling"
#: The models that can be fetched, by their names for ``--llm``: the name of the model, and a remark about it.
_FETCHED_LLMS: Final[Mapping[str, tuple[str, str]]] = {
    "qwen": (
        "Qwen2.5-Coder-1.5B-Instruct",
        f"Qwen answers everyday questions, on two cores hardly faster than one listens; {_RULES_KNOW}",
    ),
    "qwen3-1.7b": ("Qwen3-1.7B", _RULES_KNOW),
    "qwen3-0.6b": ("Qwen3-0.6B", f"Qwen3-0.6B is very small, and often wrong; {_RULES_KNOW}"),
    "qwen2.5-1.5b": ("Qwen2.5-1.5B-Instruct", _RULES_KNOW),
    "smollm2": (
        "SmolLM2-135M-Instruct",
        "SmolLM2 is a very small model for trying things out: its sentences are fluent, and often wrong; --llm qwen, "
        "or --llm gguf:FILE, is better",
    ),
}


#: Sampling of these models, which are more often wrong the more chance they have. They do not repeat themselves, and a
#: penalty for the words of the question, which llama.cpp counts too, would keep them from answering with these.
_SURE: Final[Mapping[str, Any]] = {"temperature": 0.0, "repetition_penalty": 1.0}
#: The examples with which conversations with small models begin, unless somebody gives other instructions: a fact in a
#: short sentence, a refusal of what a voice cannot do, a completed saying, and a comparison that names the difference.
#: With more examples, models answered worse (benchmarks/minds), and each costs time and memory.
_EXAMPLES: Final = (
    ("What is the capital of Japan?", "The capital of Japan is Tokyo."),
    ("Can you open the window?", "I'm sorry, I can't control things in your home."),
    ("Finish this: a bird in the hand", "A bird in the hand is worth two in the bush."),
    (
        "What's the difference between a violin and a cello?",
        "A cello is larger and sounds lower than a violin, and you play it sitting down.",
    ),
)


def asr_of(config: ServerConfig) -> Engine | None:
    """Create the part that recognises speech; None if there is none."""
    choice = config.asr.choice
    if choice.name == "none":
        return None
    from omni_ws.engine.asr.recogniser_engine import RecogniserEngine

    if choice.name == SERVER:
        from omni_ws.engine.remote.recogniser import RemoteRecogniser
        from omni_ws.engine.remote.settings import RemoteAsrSettings

        asr, fields = config.asr, _upstream(config, config.asr)
        if (languages := asr.languages or config.languages) or asr.languages is not None:
            fields["languages"] = languages
        settings = RemoteAsrSettings(**fields, word_times=asr.word_times, speculate=asr.speculate)
        return RecogniserEngine(RemoteRecogniser(settings))
    if choice.name == "vllm":
        from omni_ws.engine.vllm.recogniser import VllmRecogniser

        assert choice.model is not None  # the configuration is refused without a model
        return RecogniserEngine(VllmRecogniser(choice.model, config.asr.args))
    from omni_ws.engine.asr.whisper import WhisperRecogniser

    most = config.embedded.max_recognisers
    return RecogniserEngine(WhisperRecogniser(config.whisper_model, max_recognisers=most, languages=config.languages))


def llm_of(config: ServerConfig) -> Engine:
    """Create the part that answers."""
    if config.chooses_llm:
        return _auto_llm(config)
    choice = config.llm.choice
    match choice.name:
        case "embedded" | "rules":
            return _rules()
        case "vllm":
            return vllm_engine(config, _alone(config.vllm, choice.model, speaks=config.tts.choice.name == "none"))
        case "gguf":
            assert choice.model is not None  # the configuration is refused without a model
            return _gguf(config, Path(choice.model).expanduser())
        case "smollm2":
            return _fetched_llm(config, "smollm2")
        case name if name in FETCHED_LLMS:
            return _with_rules(_fetched_llm(config, name), config)
    return _remote_llm(config)


def _rules() -> RulesEngine:
    from omni_ws.engine.llm.rules_engine import RulesEngine
    from omni_ws.weights.cache import fetched_file

    return RulesEngine(summaries=fetched_file("encyclopedia"))


def _with_rules(llm: Engine, config: ServerConfig, rules: RulesEngine | None = None) -> Engine:
    """Return ``llm`` behind the rules, which answer what they know exactly; ``rules``: with their encyclopedia."""
    from omni_ws.engine.llm.encyclopedia import load_encyclopedia
    from omni_ws.engine.llm.rules_engine import RulesFirst
    from omni_ws.weights.cache import fetched_file

    return RulesFirst(
        llm,
        own_instructions=config.llm.spoken_instructions,
        of_itself=config.llm.instructions is None,
        encyclopedia=lambda: load_encyclopedia(fetched_file("encyclopedia")) if rules is None else rules.encyclopedia,
    )


def _auto_llm(config: ServerConfig) -> Engine:
    """Create the LLM that answers by rules until a language model was found or fetched."""
    from omni_ws.engine.llm.auto_llm import RULES_ALONE, AutoLlm, FetchedMind, Found, why_none
    from omni_ws.engine_choice.available import local_servers

    rules = _rules()

    async def find() -> Found:
        if why_none(config, os.environ) or find_spec("httpx") is None:
            return Found()
        servers = await local_servers(config.port)
        usable = next((one for one in servers if not one.why_not), None)
        if usable is None:
            return Found(lines=tuple(one.suggestion for one in servers))
        chosen = config.llm.model_copy(update={"use": usable.server.use, "model": usable.model, "api_key": None})
        llm = _remote_llm(config.model_copy(update={"llm": chosen}))
        line = f"{usable.server.kind} on this machine answers, with {usable.model}; {RULES_ALONE}"
        return Found(_with_rules(llm, config, rules), (line,))

    titles = {name: title for name, (title, _) in _FETCHED_LLMS.items()}
    mind = FetchedMind(config, lambda name: _with_rules(_fetched_llm(config, name), config, rules), titles=titles)
    return AutoLlm(rules, find=find, mind=mind)


def _remote_llm(config: ServerConfig) -> Engine:
    """Create the LLM that is a server."""
    from omni_ws.engine.remote.engine import LocalServerLlm, RemoteLlmEngine
    from omni_ws.engine.remote.settings import RemoteLlmSettings

    fields = {name: getattr(config.remote, name) for name in _FORWARDING if name in config.remote.changed}
    llm, choice = config.llm, config.llm.choice
    wanted = {"reasoning_effort": llm.reasoning_effort, "chat_template_kwargs": llm.chat_template_kwargs}
    body = {name: value for name, value in wanted.items() if value}
    thoughts = llm.opens_thoughts
    settings = RemoteLlmSettings(**_upstream(config, llm), opens_thoughts=thoughts, **fields, body=body)
    return LocalServerLlm(choice.name, settings) if choice.name in LOCAL_PORTS else RemoteLlmEngine(settings)


def vllm_engine(config: ServerConfig, settings: VllmConfig) -> Engine:
    """Create an engine of vLLM's model alone, with readouts for token sessions and a folder for traces."""
    from omni_ws.engine.vllm.engine import VllmEngine

    readouts = None
    if config.grpc.readout_vectors is not None and config.grpc.readout_manifest is not None:
        from omni_ws.engine.vllm.readouts import Readouts, load_vectors

        readouts = Readouts(load_vectors(config.grpc.readout_vectors, config.grpc.readout_manifest))
    return VllmEngine(settings, readouts=readouts, trace_root=config.profiler.root)


def _fetched_llm(config: ServerConfig, name: str) -> Engine:
    from omni_ws.engine.llm.gguf_engine import QWEN_CODER_TEMPLATE

    model, about = _FETCHED_LLMS[name]
    fields: dict[str, Any] = {"name": model, "about": about}
    if name.startswith("qwen"):
        examples = _EXAMPLES if config.llm.instructions is None else ()
        fields |= {"sampling": _SURE, "examples": examples, "eight_bits": True}
    if name == "qwen" and config.llm.chat_template is None:
        fields["chat_template"] = QWEN_CODER_TEMPLATE
    return _gguf(config, _fetched(name), **fields)


def _gguf(config: ServerConfig, file: Path, **fields: Any) -> Engine:
    from omni_ws.engine.llm.gguf_engine import GgufEngine, GgufSettings

    llm = config.llm
    of_config: dict[str, Any] = {
        "name": file.stem,
        "context": llm.context,
        "threads": llm.threads,
        "parallel": llm.parallel,
        "think": llm.think,
        "chat_template": llm.chat_template,
        "instructions": "" if config.tts.choice.name == "none" else llm.spoken_instructions,
        "first_byte_timeout": llm.first_byte_timeout_sec,
    }
    return GgufEngine(GgufSettings(file=file, **{**of_config, **fields}))


def _fetched(name: str) -> Path:
    """Return the file of weights that were fetched. Raises EngineFailed if it is missing."""
    from omni_ws.weights.cache import fetched_file

    if (file := fetched_file(name)) is None:
        raise EngineFailed(f"the weights of {name} are not here; fetch them with: {fetch_command(name)}", fatal=True)
    return file


def _alone(vllm: VllmConfig, model: str | None, *, speaks: bool) -> VllmConfig:
    """Return the settings of a model without a Talker, which is a separate part; ``speaks``: it may speak itself."""
    own = {"model": model, "omni_speech": vllm.omni_speech and speaks}
    return vllm.model_copy(update={**own, "talker": None, "talker_profile": None, "talker_args": {}})


def tts_of(config: ServerConfig) -> Engine | None:
    """Create the part that speaks; None if there is none."""
    choice = config.tts.choice
    if choice.name == "none":
        return None
    from omni_ws.engine.tts.speech_engine import SpeechEngine

    match choice.name:
        case "talker":
            from omni_ws.engine.vllm.talker_engine import Speaker

            assert choice.model is not None  # the configuration is refused without a model
            talker = Speaker(choice.model, profile=config.vllm.talker_profile, args=config.vllm.talker_args)
            return SpeechEngine(talker)
        case "embedded":
            return _best_voice(config)
        case "hibari" | "kokoro" | "espeak":
            from omni_ws.engine.tts.voice_process import VoiceProcess

            default_voice = config.tts.voice or config.embedded.default_voice
            file = None
            if choice.name == "kokoro":
                default_voice = choice.model or default_voice
            elif choice.model is not None:
                file = Path(choice.model).expanduser()
            return _speaking(config, VoiceProcess(VoiceChoice(choice.name), default_voice=default_voice, file=file))
    from omni_ws.engine.remote.settings import RemoteTtsSettings
    from omni_ws.engine.remote.voice import RemoteVoice

    remote, voice = config.remote, config.tts.voice
    voices = remote.voices if voice is None else (voice, *(one for one in remote.voices if one != voice))
    settings = RemoteTtsSettings(
        **_upstream(config, config.tts), voices=voices, audio_sample_rate=remote.audio_sample_rate
    )
    return SpeechEngine(RemoteVoice(settings))


def _best_voice(config: ServerConfig) -> Engine:
    """Create the voice that ``embedded.voice`` names; by default Hibari, or else espeak-ng."""
    from omni_ws.engine.composed.engine import FirstToStart
    from omni_ws.engine.tts.voice_process import VoiceProcess

    choice, voice = config.embedded.voice, config.tts.voice or config.embedded.default_voice
    chosen = _speaking(config, VoiceProcess(choice, default_voice=voice))
    if choice is not VoiceChoice.AUTO:
        return chosen
    hibari = _speaking(config, VoiceProcess(VoiceChoice.HIBARI, default_voice=voice))
    return FirstToStart({"hibari": hibari, "espeak-ng": chosen})


def _speaking(config: ServerConfig, voice: VoiceProcess) -> Engine:
    """Create the engine that speaks with a voice, and in the configured languages with those that they have."""
    from omni_ws.engine.tts.language_voices import LanguageVoices
    from omni_ws.engine.tts.speech_engine import SpeechEngine
    from omni_ws.engine_choice.available import voice_table

    table = voice_table(config)
    if not table:
        return SpeechEngine(voice)
    without_english = config.languages and "en" not in config.languages and not voice.default_named
    first = config.languages[0] if without_english else ""
    return SpeechEngine(LanguageVoices(voice, table, required=config.tts.voices, first=first))


def live_backend(config: ServerConfig) -> Engine | None:
    """Return the engine of ``live.backend``, which starts by itself; None if the server's own model does its work."""
    live = config.live
    if live.backend is None:
        return None
    from omni_ws.engine.remote.engine import Backend
    from omni_ws.engine.remote.settings import RemoteLlmSettings, key_of, patience

    common = {**patience(config.remote), "start_timeout": 0, "log_content": config.log_content}
    return Backend(
        RemoteLlmSettings(
            urls=(live.backend,),
            model=live.backend_model,
            api_key=key_of(live.backend_api_key),
            section="live",
            key_variable="OMNI_WS_LIVE__BACKEND_API_KEY",
            options=("tools", "reasoning_effort", "verbosity", "service_tier"),
            **common,
        )
    )


def _upstream(config: ServerConfig, part: PartConfig) -> dict[str, Any]:
    """Return the fields of UpstreamSettings for a part on a server."""
    from omni_ws.engine.remote.settings import key_of, patience

    choice, fields = part.choice, patience(config.remote)
    fields["log_content"] = config.log_content
    model, url = choice.model, choice.url
    if url is None:
        url = f"http://127.0.0.1:{LOCAL_PORTS[choice.name]}/v1"
        if "start_timeout_sec" not in config.remote.changed:
            fields["start_timeout"] = 0  # do not wait: the user can start the other server first
        if choice.name == "ollama" and model is not None and ":" not in model.rpartition("/")[2]:
            model += ":latest"  # Ollama completes and lists names in this form
    if part is config.llm and "first_byte_timeout_sec" in part.changed:
        fields["first_byte_timeout"] = config.llm.first_byte_timeout_sec
    key = key_of(part.api_key)
    if choice.name == "openai" and key is None:
        key, fields["key_variable"] = os.environ.get(OPENAI_KEY), OPENAI_KEY
    return {"urls": (url,), "model": model, "api_key": key, "section": part.part, **fields}

"""What the settings compose: the engines of the parts, what they are told, and what the server then says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.live_server import live_server
from support.native_client import native_client
from support.real_models import fetched
from support.scripted_upstream import says, upstream
from support.speech_clips import clip_bytes

from benchmarks.server_process import free_port
from omni_ws.config import ServerConfig, load
from omni_ws.config.parts import FETCHED_LLMS, FULL_NAMES, LOCAL_PORTS, SPOKEN_INSTRUCTIONS
from omni_ws.config.values import ConfigurationError
from omni_ws.engine.asr.recogniser_engine import RecogniserEngine
from omni_ws.engine.asr.whisper import WhisperRecogniser
from omni_ws.engine.base import Engine
from omni_ws.engine.composed.engine import ComposedEngine, FirstToStart
from omni_ws.engine.composed.parts import PartDescription
from omni_ws.engine.llm.auto_llm import AutoLlm
from omni_ws.engine.llm.gguf_engine import QWEN_CODER_TEMPLATE, GgufEngine, GgufSettings
from omni_ws.engine.llm.rules_engine import RulesEngine, RulesFirst
from omni_ws.engine.remote.engine import LocalServerLlm, RemoteEngine, RemoteLlmEngine, RemoteRecogniser, RemoteVoice
from omni_ws.engine.remote.settings import RemoteLlmSettings, RemoteTtsSettings
from omni_ws.engine.tts.speech_engine import SpeechEngine
from omni_ws.engine.tts.voice_process import VoiceProcess
from omni_ws.engine.vllm.engine import VllmEngine
from omni_ws.engine.vllm.recogniser import VllmRecogniser
from omni_ws.engine.vllm.talker import Speaker
from omni_ws.engine_choice import asr_of, create_engine, llm_of, tts_of
from omni_ws.errors import EngineFailed

ORPHEUS = "talker:canopylabs/orpheus-3b-0.1-ft"


def configured(*argv: str) -> ServerConfig:
    return load(argv).config


def settings_of(engine: Engine | None) -> Any:
    part = engine.voice if isinstance(engine, SpeechEngine) else engine
    assert isinstance(part, RemoteLlmEngine | RemoteVoice)
    return part.settings


def kind_of(part: Engine | None) -> type:
    """What does the work of a part."""
    match part:
        case RecogniserEngine(recogniser=recogniser):
            return type(recogniser)
        case SpeechEngine(voice=voice):
            return type(voice)
    return type(part)


@pytest.mark.parametrize(
    ("argv", "kinds"),
    [
        (("--llm", "rules"), (WhisperRecogniser, RulesEngine, FirstToStart)),
        (("--llm", "embedded", "--asr", "none"), (type(None), RulesEngine, FirstToStart)),
        (("--asr", "none", "--tts", "talker:some/orpheus-3b"), (type(None), AutoLlm, Speaker)),
        (("--asr", "whisper:base", "--tts", "none"), (WhisperRecogniser, AutoLlm, type(None))),
        (("--asr", "vllm:whisper-tiny", "--tts", "none"), (VllmRecogniser, AutoLlm, type(None))),
        (("--llm", "auto"), (WhisperRecogniser, AutoLlm, FirstToStart)),
        (("--llm", "ollama"), (WhisperRecogniser, LocalServerLlm, FirstToStart)),
        (("--llm", "gguf:some/model.gguf"), (WhisperRecogniser, GgufEngine, FirstToStart)),
        (("--llm", "http://h/v1", "--tts", "http://h/v1"), (WhisperRecogniser, RemoteLlmEngine, RemoteVoice)),
        (("--asr", "http://h/v1", "--tts", "espeak"), (RemoteRecogniser, AutoLlm, VoiceProcess)),
        (("--asr", "vllm:a/b", "--llm", "vllm:c/d", "--tts", ORPHEUS), (VllmRecogniser, VllmEngine, Speaker)),
        (
            ("--llm", "vllm:c/d", "--tts", ORPHEUS, "--vllm.talker_args.dtype", "half"),
            (WhisperRecogniser, VllmEngine, Speaker),
        ),
        (("--asr", "http://h/v1"), (RemoteRecogniser, AutoLlm, FirstToStart)),
    ],
)
def test_each_part_is_what_its_flag_names(argv: tuple[str, ...], kinds: tuple[type, ...]) -> None:
    config = configured(*argv)
    assert tuple(map(kind_of, (asr_of(config), llm_of(config), tts_of(config)))) == kinds
    engine = create_engine(config)
    assert isinstance(engine, ComposedEngine)
    assert engine.name == "composed"


def test_an_asr_on_a_server_has_its_settings() -> None:
    engine = asr_of(
        configured(
            *("--asr", "http://h/v1", "--asr.model", "whisper", "--asr.api-key", "k", "--asr.languages", "de,en"),
            *("--asr.word-times", "--asr.speculate", "false"),
        )
    )
    assert isinstance(engine, RecogniserEngine)
    assert isinstance(engine.recogniser, RemoteRecogniser)
    settings = engine.recogniser.settings
    assert (settings.urls, settings.model, settings.api_key, settings.section) == (
        ("http://h/v1",),
        "whisper",
        "k",
        "asr",
    )
    assert engine.capabilities.languages == {"de", "en"}
    assert (engine.capabilities.word_times, settings.speculate) == (True, False)
    assert "yue" in asr_of(configured("--asr", "http://h/v1")).capabilities.languages  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("argv", "model", "heard"),
    [
        ((), "tiny.en", {"en"}),
        (("--languages", "en"), "tiny.en", {"en"}),
        (("--languages", "EN-us,es-MX,es"), "base", {"en", "es"}),
        (("--languages", "es", "--asr", "whisper"), "base", {"es"}),
        (("--languages", "es", "--asr", "whisper:tiny.en"), "tiny.en", {"es"}),  # the start refuses it
    ],
)
def test_the_languages_choose_whisper(argv: tuple[str, ...], model: str, heard: set[str]) -> None:
    engine = asr_of(configured(*argv))
    assert isinstance(engine, RecogniserEngine)
    assert isinstance(engine.recogniser, WhisperRecogniser)
    assert engine.recogniser.model == model
    assert engine.recogniser._languages == (heard if argv else set())


def test_the_languages_are_those_of_a_server_too() -> None:
    argv = ("--asr", "http://h/v1", "--languages", "de,en")
    assert asr_of(configured(*argv)).capabilities.languages == {"de", "en"}  # type: ignore[union-attr]
    named = asr_of(configured(*argv, "--asr.languages", "es"))
    assert named is not None
    assert named.capabilities.languages == {"es"}


@pytest.mark.parametrize("language", ["e", "english", "en_US", "en-123456789"])
def test_what_is_no_language_is_refused(language: str) -> None:
    with pytest.raises(ConfigurationError, match="languages"):
        configured("--languages", f"es,{language}")


def test_a_talker_of_the_vllm_engine_is_its_tts() -> None:
    talker = ("--vllm.talker", "canopylabs/orpheus-3b-0.1-ft")
    engine = create_engine(configured("--engine", "vllm", "--model", "a/b", *talker))
    assert isinstance(engine, ComposedEngine)
    assert [*engine.parts.values()][1:] == [
        PartDescription("vllm", "a/b"),
        PartDescription("talker", "canopylabs/orpheus-3b-0.1-ft"),
    ]
    assert set(engine.part_states) == {"asr", "llm", "tts"}


def test_a_part_on_other_machines_names_their_hosts_alone() -> None:
    engine = create_engine(
        configured(
            *("--asr", "http://person:secret@Ears.example:8443/v1", "--llm", "http://127.0.0.1:8000/v1"),
            *("--tts", "http://[2001:db8::7]:9000/v1"),
        )
    )
    assert isinstance(engine, ComposedEngine)
    hosts = {role: part and part.hosts for role, part in engine.parts.items()}
    assert hosts == {"asr": ("ears.example",), "llm": (), "tts": ("2001:db8::7",)}


def test_of_several_upstreams_each_host_is_named_once() -> None:
    urls = ("http://a.example:1/v1", "http://localhost/v1", "https://b.example/v1", "http://a.example:2/v1")
    engine = create_engine(configured("--engine", "remote", "--remote.upstreams", ",".join(urls)))
    assert isinstance(engine, ComposedEngine)
    llm = engine.parts["llm"]
    assert llm is not None
    assert llm.hosts == ("a.example", "b.example")


def test_nothing_named_is_the_embedded_engine() -> None:
    assert create_engine(ServerConfig()).name == "embedded"


@pytest.mark.parametrize(
    ("name", "model", "url"),
    [
        ("ollama", None, "http://127.0.0.1:11434/v1"),
        ("lmstudio", None, "http://127.0.0.1:1234/v1"),
        ("llamacpp", None, "http://127.0.0.1:8080/v1"),
        ("ollama:llama3.2", "llama3.2:latest", "http://127.0.0.1:11434/v1"),
        ("ollama:llama3.2:1b", "llama3.2:1b", "http://127.0.0.1:11434/v1"),
        ("ollama:registry:5000/library/llama3.2", "registry:5000/library/llama3.2:latest", "http://127.0.0.1:11434/v1"),
        ("lmstudio:qwen/qwen3-8b", "qwen/qwen3-8b", "http://127.0.0.1:1234/v1"),
    ],
)
def test_servers_of_this_machine_by_name(name: str, model: str | None, url: str) -> None:
    settings = settings_of(llm_of(configured("--llm", name)))
    assert (settings.urls, settings.model, settings.start_timeout) == ((url,), model, 0)


def test_what_servers_of_parts_are_told() -> None:
    config = configured(
        *("--llm", "https://api.example.org/v1", "--llm.model", "big", "--llm.api-key", "one"),
        *("--llm.first-byte-timeout-sec", "7", "--remote.options", "tools,n", "--remote.connect-timeout-sec", "3"),
        *("--tts", "http://127.0.0.1:8880/v1", "--tts.voice", "af_sky", "--tts.api-key", "two"),
        *("--remote.voices", "af_heart,af_sky", "--remote.audio-sample-rate", "22050"),
    )
    llm, tts = settings_of(llm_of(config)), settings_of(tts_of(config))
    assert isinstance(llm, RemoteLlmSettings)
    assert (llm.urls, llm.model, llm.api_key, llm.section) == (("https://api.example.org/v1",), "big", "one", "llm")
    assert (llm.options, llm.first_byte_timeout, llm.connect_timeout, llm.start_timeout) == (("tools", "n"), 7, 3, 60)
    assert isinstance(tts, RemoteTtsSettings)
    assert (tts.urls, tts.model, tts.api_key, tts.section) == (("http://127.0.0.1:8880/v1",), None, "two", "tts")
    assert (tts.voices, tts.audio_sample_rate) == (("af_sky", "af_heart"), 22_050)
    assert (tts.first_byte_timeout, tts.connect_timeout) == (120, 3)


def test_what_remote_does_not_say_is_known_of_most_servers() -> None:
    settings = settings_of(llm_of(configured("--llm", "http://h/v1")))
    assert settings == RemoteLlmSettings(urls=("http://h/v1",), section="llm")


def test_what_a_model_in_a_file_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    flags = (
        "--llm.context",
        "2048",
        "--llm.threads",
        "3",
        "--llm.parallel",
        "1",
        "--llm.chat-template",
        "t.jinja",
        "--llm.think",
    )
    config = configured("--llm", "gguf:~/a.b.gguf", *flags, "--llm.first-byte-timeout-sec", "7")
    engine = llm_of(config)
    assert isinstance(engine, GgufEngine)
    assert engine.settings == GgufSettings(
        file=Path("/home/me/a.b.gguf"),
        name="a.b",
        context=2048,
        threads=3,
        parallel=1,
        think=True,
        chat_template=Path("t.jinja"),
        instructions=SPOKEN_INSTRUCTIONS,
        first_byte_timeout=7,
    )
    assert config.spoken_instructions_with_tools == SPOKEN_INSTRUCTIONS


@pytest.mark.parametrize("name", FETCHED_LLMS)
def test_weights_that_were_not_fetched(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(EngineFailed, match=rf"not here; fetch them with: .* weights fetch {name}"):
        llm_of(configured("--llm", name))


def test_every_model_that_can_be_fetched_runs_by_llama_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules answer first, but for the smallest."""
    monkeypatch.setattr("omni_ws.weights.fetched_file", lambda name: Path(f"{name}.gguf"))
    models = {}
    for name in (*FETCHED_LLMS, *FULL_NAMES):
        engine = llm_of(configured("--llm", name))
        if name != "smollm2":
            assert isinstance(engine, RulesFirst)
            engine = engine.llm
        assert isinstance(engine, GgufEngine)
        models[name] = (engine.settings.name, engine.settings.file.stem)
    assert models == {
        "qwen": ("Qwen2.5-Coder-1.5B-Instruct", "qwen"),
        "qwen2.5-coder-1.5b": ("Qwen2.5-Coder-1.5B-Instruct", "qwen"),
        "qwen3-1.7b": ("Qwen3-1.7B", "qwen3-1.7b"),
        "qwen3-0.6b": ("Qwen3-0.6B", "qwen3-0.6b"),
        "qwen2.5-1.5b": ("Qwen2.5-1.5B-Instruct", "qwen2.5-1.5b"),
        "smollm2": ("SmolLM2-135M-Instruct", "smollm2"),
    }


@pytest.mark.parametrize(
    ("flags", "template", "examples"),
    [
        ((), QWEN_CODER_TEMPLATE, True),
        (("--llm.chat-template", "t.jinja"), Path("t.jinja"), True),
        (("--llm.instructions", "Speak like a pirate."), QWEN_CODER_TEMPLATE, False),
    ],
)
def test_qwen_has_a_template_and_examples(
    flags: tuple[str, ...], template: Path, examples: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever gives other instructions does not get examples for ours."""
    monkeypatch.setattr("omni_ws.weights.fetched_file", lambda name: Path(f"{name}.gguf"))
    config = configured("--llm", "qwen", *flags)
    first = llm_of(config)
    assert isinstance(first, RulesFirst)
    assert isinstance(first.llm, GgufEngine)
    settings = first.llm.settings
    assert (settings.chat_template, bool(settings.examples)) == (template, examples)
    assert ("You cannot" in settings.instructions) is examples
    assert settings.eight_bits
    assert "You cannot" not in config.spoken_instructions_with_tools
    assert config.spoken_instructions_with_tools.startswith(settings.instructions[:20])
    assert settings.sampling == {"temperature": 0.0, "repetition_penalty": 1.0}
    assert first.of_itself is examples


@pytest.mark.parametrize("section", ["llm", "remote"])
def test_the_time_out_of_a_remote_engine_has_two_names(section: str) -> None:
    argv = ("--engine", "remote", "--remote.upstreams", "http://h/v1", f"--{section}.first-byte-timeout-sec", "7")
    engine = create_engine(configured(*argv))
    assert isinstance(engine, RemoteEngine)
    assert settings_of(engine.llm).first_byte_timeout == 7


@pytest.mark.parametrize(("llm", "patience"), [("rules", 7), ("http://h/v1", None)])
def test_the_composition_waits_for_an_llm_that_does_not_watch_itself(llm: str, patience: float | None) -> None:
    engine = create_engine(configured("--llm", llm, "--llm.first-byte-timeout-sec", "7"))
    assert isinstance(engine, ComposedEngine)
    assert engine._first_byte_timeout_sec == patience


@pytest.mark.parametrize(
    ("argv", "ahead"),
    [
        ((), True),
        (("--llm.speculate", "false"), False),
        (("--llm", "rules"), True),
        (("--llm", "ollama"), True),
        (("--llm", "http://localhost:8000/v1", "--tts", "http://[::1]:8880/v1"), True),
        (("--llm", "https://api.example.org/v1"), False),
        (("--llm", "ollama", "--tts", "https://api.example.org/v1"), False),
        (("--llm", "https://api.example.org/v1", "--llm.speculate"), True),
        (("--llm", "ollama", "--llm.speculate", "false"), False),
    ],
)
def test_answers_are_begun_for_nothing_only_on_this_machine(argv: tuple[str, ...], ahead: bool) -> None:
    engine = create_engine(configured(*argv))
    assert isinstance(engine, ComposedEngine)
    assert (engine._ahead_load is not None) is ahead


async def test_a_model_on_this_machine_that_is_not_running(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOCAL_PORTS, "ollama", free_port())
    engine = create_engine(configured("--llm", "ollama", "--asr", "none", "--tts", "none"))
    with pytest.raises(EngineFailed) as failed:
        await engine.start()
    message = failed.value.message
    assert message.startswith("LLM (remote): Ollama on this machine: no upstream can be used: 127.0.0.1:")
    assert "(to start it: ollama serve; a model: ollama pull llama3.2; another server: --llm http://HOST:" in message
    await engine.stop()


async def test_a_model_that_the_server_of_this_machine_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    async with upstream(models=("llama3.2:latest",)) as behind:
        monkeypatch.setitem(LOCAL_PORTS, "ollama", behind.port)
        engine = create_engine(configured("--llm", "ollama:qwen3", "--asr", "none", "--tts", "none"))
        with pytest.raises(EngineFailed, match=r"not serve qwen3:latest; it serves llama3\.2:latest \(to start it"):
            await engine.start()
        behind.models = ()
        engine = create_engine(configured("--llm", "ollama", "--asr", "none", "--tts", "none"))
        with pytest.raises(EngineFailed, match=r"Ollama on this machine: the upstreams list no model"):
            await engine.start()


@pytest.mark.slow
async def test_a_text_model_on_this_machine_gets_ears_and_a_voice(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched("whisper-tiny-en")
    async with upstream(says("Forward", " we go.")) as behind:
        monkeypatch.setitem(LOCAL_PORTS, "ollama", behind.port)
        config = configured("--asr", "whisper", "--llm", "ollama", "--tts", "espeak", "--port", "0")
        async with live_server(create_engine(config)) as server, native_client(server) as client:
            assert client.created["parts"]["asr"] == {"name": "whisper", "model": "tiny.en"}
            assert client.created["parts"]["llm"] == {"name": "remote", "model": behind.models[0]}
            assert client.created["model"] == behind.models[0]
            await client.chunk(clip_bytes("goforward"), end=True)
            answer = await client.answer()
        assert not answer.errors
        assert answer.audio
        assert answer.text == "Forward we go."
    assert behind.requests[-1]["messages"][-1] == {"role": "user", "content": "Go forward 10 meters."}

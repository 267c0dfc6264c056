"""``--asr``, ``--llm`` and ``--tts``: what they take, and what is wrong with what."""

from __future__ import annotations

import json
from typing import Any

import pytest

from omni_ws.config import ConfigurationError, ServerConfig, check_available, load
from omni_ws.config.parts import FORMS, PartChoice, parse_part
from omni_ws.engine.composed.engine import ComposedEngine
from omni_ws.engine_choice import create_engine


def chosen(*argv: str, environ: dict[str, str] | None = None, toml: str | None = None) -> dict[str, PartChoice]:
    config = load(argv, environ, toml).config
    return {part.part: part.choice for part in (config.asr, config.llm, config.tts)}


IMPLIED = PartChoice("embedded", implied=True)


def test_the_three_flags() -> None:
    argv = ("--asr", "whisper", "--llm=ollama:llama3.2:1b", "--tts", "http://host:8880/v1")
    assert chosen(*argv) == {
        "asr": PartChoice("whisper"),
        "llm": PartChoice("ollama", "llama3.2:1b"),
        "tts": PartChoice("server", url="http://host:8880/v1"),
    }


@pytest.mark.parametrize(
    ("argv", "on_vllm"),
    [
        ((), False),
        (("--llm", "rules", "--tts", "hibari"), False),
        (("--engine", "vllm", "--model", "a/model"), True),
        (("--llm", "vllm:a/model"), True),
        (("--tts", "talker:a/talker"), True),
    ],
)
def test_what_runs_on_vllm(argv: tuple[str, ...], on_vllm: bool) -> None:
    assert load(argv).config.on_vllm == on_vllm


@pytest.mark.parametrize("argv", [(), ("--llm", "auto")])
def test_the_llm_that_nobody_names_takes_the_settings_of_auto(argv: tuple[str, ...]) -> None:
    of_models = ("--llm.threads", "2", "--llm.context", "512", "--llm.think", "true", "--llm.fetch", "true")
    config = load((*argv, *of_models)).config
    check_available(config)
    assert isinstance(create_engine(config), ComposedEngine)


def test_parts_by_variable_and_by_file() -> None:
    environ = {"OMNI_WS_LLM__USE": "ollama", "OMNI_WS_LLM__MODEL": "qwen3"}
    assert chosen(environ=environ, toml='[tts]\nuse = "espeak"\nvoice = "en-gb"') == {
        "asr": IMPLIED,
        "llm": PartChoice("ollama", "qwen3"),
        "tts": PartChoice("espeak"),
    }


def test_parts_that_nobody_names_are_embedded() -> None:
    assert chosen("--llm", "rules") == {"asr": IMPLIED, "llm": PartChoice("rules"), "tts": IMPLIED}
    assert load(("--asr", "none")).config.composed
    assert not load(()).config.composed
    assert not load(("--llm.first-byte-timeout-sec", "5")).config.composed


@pytest.mark.parametrize(
    ("part", "text", "choice"),
    [
        ("llm", "gguf:/models/a:b.gguf", PartChoice("gguf", "/models/a:b.gguf")),
        ("llm", "smollm2", PartChoice("smollm2")),
        ("llm", "qwen3-0.6b", PartChoice("qwen3-0.6b")),
        ("llm", "qwen2.5-coder-1.5b", PartChoice("qwen")),
        ("llm", "vllm:C:/models/qwen", PartChoice("vllm", "C:/models/qwen")),
        ("llm", "https://api.example.org/v1", PartChoice("server", url="https://api.example.org/v1")),
        ("llm", "lmstudio", PartChoice("lmstudio")),
        ("asr", "none", PartChoice("none")),
        ("asr", "whisper", PartChoice("whisper")),
        ("asr", "whisper:tiny.en", PartChoice("whisper", "tiny.en")),
        ("asr", "whisper:C:/models/small", PartChoice("whisper", "C:/models/small")),
        ("asr", "http://host:8000/v1", PartChoice("server", url="http://host:8000/v1")),
        ("llm", "vllm", PartChoice("vllm")),
    ],
)
def test_the_first_colon_separates_except_in_a_url(part: str, text: str, choice: PartChoice) -> None:
    assert parse_part(part, text) == choice


@pytest.mark.parametrize("part", FORMS)
def test_what_is_unknown_is_refused_with_what_is_known(part: str) -> None:
    # Names that other programs have, those of parts that are no more, and typing errors.
    for text in ("gguf-model", "pocketsphinx", "flite", "whispers", "hibaris", "http:/host/v1", "Ollama", ":x"):
        with pytest.raises(ConfigurationError) as caught:
            load((f"--{part}", text))
        message = str(caught.value)
        assert message.startswith(f"{part}.use = {text!r} (command line --{part}.use): unknown; known are ")
        assert "embedded, " in message
        assert all(form in message for form in FORMS[part].values())


@pytest.mark.parametrize(
    ("part", "text", "meant"),
    [
        ("llm", "localhost:11434", "http://localhost:11434/v1"),
        ("llm", "127.0.0.1:8000/", "http://127.0.0.1:8000/v1"),
        ("tts", "[::1]:8880/api/v1", "http://[::1]:8880/api/v1"),
        ("llm", "olama:llama3.2:1b", "ollama:llama3.2:1b"),
        ("llm", "OpenAI:gpt-5", "openai:gpt-5"),
        ("asr", "wisper", "whisper"),
    ],
)
def test_what_was_probably_meant(part: str, text: str, meant: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load((f"--{part}", text))
    assert str(caught.value).endswith(f"; did you mean {meant}?")


def test_openai_takes_its_key_from_the_usual_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(("--llm", "openai:gpt-5-mini")).config
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert "openai needs a key: set OPENAI_API_KEY" in refused(llm={"use": "openai:gpt-5-mini"})
    check_available(load(("--llm", "openai:gpt-5-mini", "--llm.api-key", "hush")).config)
    monkeypatch.setenv("OPENAI_API_KEY", "hush")
    check_available(config)
    llm = create_engine(config)._llm  # type: ignore[attr-defined]
    settings = llm.settings
    assert (settings.urls, settings.model) == (("https://api.openai.com/v1",), "gpt-5-mini")
    assert (settings.api_key, settings.key_variable) == ("hush", "OPENAI_API_KEY")
    assert llm.hosts == ("api.openai.com",)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--llm", "none"), "no engine works without an LLM; rules is one that needs nothing"),
        (("--llm", "rules:x"), "rules has no models to choose from"),
        (("--tts", "none:x"), "none has no models to choose from"),
        (("--llm", "ollama:"), "nothing follows the colon; the form is ollama[:MODEL]"),
        (("--engine", "embedded", "--llm", "rules"), "--engine names the whole engine, and --llm a part of one"),
        (
            ("--engine", "vllm", "--asr", "none", "--tts", "none"),
            "--engine names the whole engine, and --asr and --tts",
        ),
    ],
)
def test_what_cannot_be_meant(argv: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load(argv)
    assert message in str(caught.value)


def refused(**fields: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        check_available(ServerConfig(**fields))
    assert "hush" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"llm": {"use": "vllm"}}, "--llm vllm needs a model: --llm vllm:NAME-OR-FOLDER"),
        ({"llm": {"use": "gguf"}}, "--llm gguf needs a model: --llm gguf:FILE"),
        ({"llm": {"use": "rules", "threads": 2}}, "llm.threads means nothing beside --llm rules"),
        ({"engine": "embedded", "llm": {"threads": 2}}, "llm.threads means nothing without --llm"),
        ({"llm": {"use": "rules", "fetch": True}}, "llm.fetch means nothing beside --llm rules"),
        ({"llm": {"use": "gguf:f", "api_key": "hush"}}, "llm.api_key means nothing beside --llm gguf"),
        ({"llm": {"use": "smollm2", "model": "m"}}, "llm.model means nothing beside --llm smollm2"),
        ({"llm": {"use": "qwen3-1.7b", "model": "m"}}, "llm.model means nothing beside --llm qwen3-1.7b"),
        ({"llm": {"use": "qwen", "reasoning_effort": "low"}}, "llm.reasoning_effort means nothing beside --llm qwen"),
        ({"asr": {"use": "vllm"}}, "--asr vllm needs a model: --asr vllm:NAME-OR-FOLDER"),
        ({"tts": {"use": "talker"}}, "--tts talker needs a model"),
        ({"tts": {"use": "talker:m", "voice": "tara"}}, "tts.voice means nothing beside --tts talker"),
        ({"asr": {"use": "none", "args": {"dtype": "half"}}}, "asr.args means nothing beside --asr none"),
        ({"asr": {"use": "embedded", "languages": ("en",)}}, "asr.languages means nothing beside --asr embedded"),
        ({"asr": {"use": "vllm:m", "word_times": True}}, "asr.word_times means nothing beside --asr vllm"),
        ({"asr": {"speculate": True}}, "asr.speculate means nothing without --asr"),
        ({"tts": {"use": "http://me:hush@"}}, "--tts holds an invalid base URL"),
        ({"llm": {"use": "ftp://me:hush@host/v1"}}, "--llm holds an invalid base URL"),
        ({"llm": {"use": "ollama:a", "model": "b"}}, "--llm names the model a, and llm.model b"),
        ({"llm": {"use": "rules", "model": "b"}}, "llm.model means nothing beside --llm rules"),
        ({"llm": {"use": "vllm:a", "api_key": "hush"}}, "llm.api_key means nothing beside --llm vllm"),
        ({"llm": {"use": "openai", "api_key": "hush"}}, "--llm openai needs a model: --llm openai:NAME"),
        ({"llm": {"use": "rules", "opens_thoughts": True}}, "llm.opens_thoughts means nothing beside --llm rules"),
        ({"asr": {"use": "none", "model": "m"}}, "asr.model means nothing beside --asr none"),
        ({"tts": {"use": "none", "voice": "slt"}}, "tts.voice means nothing beside --tts none"),
        ({"tts": {"voice": "slt"}}, "tts.voice means nothing without --tts"),
        ({"llm": {"use": "rules"}, "tts": {"voice": "slt"}}, "tts.voice means nothing without --tts"),
        ({"llm": {"use": "rules"}, "vllm": {"model": "m"}}, "--model is for --engine vllm: say --llm vllm:m"),
        ({"llm": {"use": "rules"}, "vllm": {"talker": "m"}}, "--vllm.talker is for --engine vllm: say --tts talker:m"),
        ({"llm": {"use": "rules"}, "remote": {"upstreams": ("http://h/v1",)}}, "remote.upstreams is for --engine rem"),
        ({"llm": {"use": "rules"}, "remote": {"api_key": "hush"}}, "remote.api_key is for --engine remote"),
        ({"llm": {"use": "http://h/v1"}, "remote": {"options": ("tool",)}}, "remote.options holds 'tool'; known are"),
        ({"llm": {"use": "rules"}, "grpc": {"port": 1}}, "the LLM rules has no token sessions; remove grpc.port"),
    ],
)
def test_settings_of_parts_that_cannot_work(
    fields: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omni_ws.config.loading.find_spec", lambda name: object())
    assert message in refused(**fields)


def test_llamacpp_has_the_port_of_this_server() -> None:
    assert "give this one --port 8081, or that one --port 8090 and this one --llm http://127.0.0.1:8090/v1" in refused(
        llm={"use": "llamacpp"}
    )
    check_available(ServerConfig(llm={"use": "llamacpp"}, port=8081))  # type: ignore[arg-type]  # pydantic makes it


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"llm": {"use": "vllm:m"}}, "--llm vllm needs vLLM: 'make serve ENGINE=vllm MODEL=…'"),
        ({"llm": {"use": "ollama"}}, r"--llm ollama needs httpx: "),
        ({"tts": {"use": "http://h/v1"}}, r"--tts server needs httpx: "),
        ({"llm": {"use": "gguf:m.gguf"}}, "--llm gguf needs xllamacpp: "),
        ({"llm": {"use": "smollm2"}}, "--llm smollm2 needs xllamacpp: "),
        ({"llm": {"use": "qwen2.5-1.5b"}}, "--llm qwen2.5-1.5b needs xllamacpp: "),
        ({"asr": {"use": "whisper:base"}}, "--asr whisper needs ctranslate2: "),
    ],
)
def test_packages_that_a_named_part_lacks(
    fields: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omni_ws.config.loading.find_spec", lambda name: None)
    assert message in refused(**fields)


def test_voices_of_languages_need_no_named_tts() -> None:
    voices = {"voices": {"es": "kokoro:em_alex", "de": "espeak:de"}}
    for fields in ({}, {"engine": "embedded"}, {"llm": {"use": "rules"}}):
        check_available(ServerConfig(tts=voices, **fields))  # type: ignore[arg-type]  # pydantic makes it
    assert "tts.voices means nothing without --tts" in refused(engine="fake", tts=voices)
    assert "tts.voices means nothing beside --tts none" in refused(tts={"use": "none", **voices})


def test_packages_that_only_implied_parts_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omni_ws.config.loading.find_spec", lambda name: None)
    check_available(ServerConfig(llm={"use": "rules"}))  # type: ignore[arg-type]  # pydantic makes it


def test_everything_that_parts_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omni_ws.config.loading.find_spec", lambda name: object())
    argv = (
        *("--asr", "whisper"),
        *("--llm", "https://api.example.org/v1", "--llm.model", "some/model", "--llm.api-key", "key"),
        *("--tts", "http://127.0.0.1:8880/v1", "--tts.model", "kokoro", "--tts.voice", "af_heart"),
    )
    config = load(argv).config
    check_available(config)
    assert config.llm.choice == PartChoice("server", "some/model", "https://api.example.org/v1")


@pytest.mark.parametrize(
    "argv", [(), ("--llm", "ollama:a"), ("--engine", "remote", "--remote.upstreams", "http://h/v1")]
)
def test_a_printed_configuration_can_be_served(argv: tuple[str, ...]) -> None:
    """It repeats every default."""
    config = load(toml=load(argv).render()).config
    check_available(config)
    assert create_engine(config).capabilities == create_engine(load(argv).config).capabilities


def test_how_words_are_said() -> None:
    toml = '[tts.lexicon]\nnginx = "engine x"\n"New York" = "noo york"\n"v2.0-beta" = "two"'
    argv = ("--tts.lexicon.nginx", "engine ecks", "--tts.lexicon.c3po", "3")
    environ = {"OMNI_WS_TTS__LEXICON__KUBECTL": "cube control"}
    assert load(argv, environ, toml).config.tts.lexicon == {
        "nginx": "engine ecks",
        "New York": "noo york",
        "v2.0-beta": "two",
        "kubectl": "cube control",
        "c3po": "3",
    }
    assert load(()).config.tts.lexicon == {}


@pytest.mark.parametrize(
    ("lexicon", "fits"),
    [
        ({str(number): "a" for number in range(500)}, True),
        ({str(number): "a" for number in range(501)}, False),
        ({"a" * 64: "b" * 128}, True),
        ({"a" * 65: "b"}, False),
        ({"a": "b" * 129}, False),
        ({"a": " "}, False),
        ({" ": "a"}, False),
        ({"a": ["b"]}, False),
    ],
)
def test_the_limits_of_a_lexicon_are_those_of_clients(lexicon: dict[str, Any], fits: bool) -> None:
    toml = "[tts.lexicon]\n" + "\n".join(f'"{word}" = {json.dumps(said)}' for word, said in lexicon.items())
    if fits:
        assert load((), toml=toml).config.tts.lexicon == lexicon
    else:
        with pytest.raises(ConfigurationError, match=r"tts\.lexicon"):
            load((), toml=toml)

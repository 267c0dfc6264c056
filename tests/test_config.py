"""Configuration: precedence of the sources, parsing, and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr, ValidationError

from omni_ws.config import (
    ConfigurationError,
    EngineName,
    GrpcConfig,
    RemoteConfig,
    ServerConfig,
    StreamingInputConfig,
    VllmConfig,
    check_available,
    check_exposure,
    load,
)
from omni_ws.config.loading import SETTINGS, SettingKind
from omni_ws.config.model import SessionsConfig, TelephonyConfig
from omni_ws.config.parts import FORMS, IMPLIED, SERVER, AsrConfig, LlmConfig, TtsConfig
from omni_ws.config.values import StoreAddress, format_size, mark, parse_size
from omni_ws.wire.openai_fields import MediaLimitFields

MIB = 1024**2


def problems(
    argv: list[str] | None = None, environ: dict[str, str] | None = None, toml: str | Path | None = None
) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load(argv or [], environ, toml)
    return str(caught.value)


def test_defaults_are_the_documented_ones() -> None:
    config = load().config
    assert config == ServerConfig()
    assert (config.host, config.port, config.engine_name) == ("127.0.0.1", 8080, EngineName.EMBEDDED)
    streaming = config.streaming_input
    assert streaming.enabled
    assert streaming.session_timeout_sec == 300
    assert streaming.max_payload_per_session == 64 * MIB
    assert streaming.max_chunk_bytes == 4 * MIB
    assert streaming.start_policy == "on_min_length"
    assert (streaming.reorder_window_chunks, streaming.reorder_timeout_sec) == (256, 10)
    assert (config.http.header_timeout_sec, config.http.body_timeout_sec, config.http.keepalive_timeout_sec) == (
        10,
        30,
        75,
    )
    assert config.http.max_header_bytes == 32 * 1024
    assert config.grpc.port is None
    assert config.served_model_alias[0] == "whisper-1"


def test_each_source_overrides_the_one_before_it() -> None:
    toml = "port = 1\nlog_level = 'error'\n[streaming_input]\nsession_timeout_sec = 1\nreorder_window_chunks = 7"
    environ = {"OMNI_WS_PORT": "2", "OMNI_WS_STREAMING_INPUT__SESSION_TIMEOUT_SEC": "2", "PATH": "/bin"}
    loaded = load(["--port", "3"], environ, toml)
    assert loaded.config.port == 3
    assert loaded.config.streaming_input.session_timeout_sec == 2
    assert loaded.config.streaming_input.reorder_window_chunks == 7
    assert loaded.config.log_level == "error"
    assert loaded.config.streaming_input.write_timeout_sec == 30
    assert loaded.origin("port") == "command line --port"
    assert (
        loaded.origin("streaming_input.session_timeout_sec")
        == "environment variable OMNI_WS_STREAMING_INPUT__SESSION_TIMEOUT_SEC"
    )
    assert loaded.origin("log_level") == "configuration file"
    assert loaded.origin("host") == "default"


def test_a_file_is_read_and_named_as_the_origin(tmp_path: Path) -> None:
    file = tmp_path / "omni.toml"
    file.write_text("[limits]\nmax_sessions = 5\n", encoding="utf-8")
    loaded = load(toml=file)
    assert loaded.config.limits.max_sessions == 5
    assert loaded.origin("limits.max_sessions") == str(file)


SAMPLE_TEXT = {
    SettingKind.TEXT: "abc",
    SettingKind.INTEGER: "5",
    SettingKind.NUMBER: "0.5",
    SettingKind.SIZE: "1MiB",
    SettingKind.SWITCH: "true",
    SettingKind.LIST: "https://a.example,https://b.example",
    SettingKind.PATH: "some/file",
    SettingKind.SECRET: "s3cret",
    SettingKind.FREE_FORM: '{"dtype": "half"}',
}
#: Of settings that take no text of their kind but some.
SAMPLE_OF_SETTING = {
    "trusted_proxies": "10.0.0.0/8,::1",
    "webrtc.ice_servers": "stun:a.example:3478,turn:b.example?transport=tcp",
    "asr.use": "whisper",
    "llm.use": "ollama:a:1b",
    "llm.context": "2048",
    "tts.use": "http://127.0.0.1:8880/v1",
    "fronts": "demo,chat",
    "languages": "en,es",
    "http.phone_url": "https://192.0.2.7:8443/",
    "sessions.store": "redis://a.example:6379/0",
    "wyoming.satellites": "a.example:10700,[::1]:10700",
    "tts.voices": '{"es": "kokoro:ef_dora"}',
    "plugins": '{"shout": {"volume": 3}}',
}


@pytest.mark.slow
def test_every_setting_is_a_flag_a_variable_and_a_key() -> None:
    for setting in SETTINGS.values():
        text = setting.choices[-1] if setting.choices else SAMPLE_TEXT[setting.kind]
        text = SAMPLE_OF_SETTING.get(setting.key, text)
        # Alone, a key without a certificate would be refused.
        more = ["--ssl-certfile", "cert.pem"] if setting.key == "ssl_keyfile" else []
        by_variable = load(more, {setting.variable: text})
        for flag in setting.flags:
            assert load([flag, text, *more]).config == by_variable.config, setting.key
            assert load([f"{flag}={text}", *more]).config == by_variable.config, setting.key
            assert load([flag.replace("-", "_").replace("__", "--", 1), text, *more]).config == by_variable.config, (
                setting.key
            )
        rendered = by_variable.render()
        assert f"environment variable {setting.variable}" in rendered, setting.key
        if setting.kind is not SettingKind.SECRET:
            # What is printed is a configuration file that says the same.
            assert load(toml=rendered).config == by_variable.config, setting.key


def test_proxies_are_addresses_or_networks() -> None:
    assert load(["--trusted-proxies", "10.0.0.0/8,2001:db8::1"]).config.trusted_proxies[0] == "10.0.0.0/8"
    with pytest.raises(ConfigurationError, match="is neither an address nor a network"):
        load(["--trusted-proxies", "proxy.example"])


def test_every_setting_has_a_description() -> None:
    assert [setting.key for setting in SETTINGS.values() if not setting.description.endswith(".")] == []


def test_lists_come_separated_repeated_or_as_json() -> None:
    expected = ("a", "b")
    assert load(["--served-model-name", "a,b"]).config.served_model_name == expected
    assert load(["--served-model-name", "a", "--served-model-name", "b"]).config.served_model_name == expected
    assert load(environ={"OMNI_WS_SERVED_MODEL_NAME": '["a", "b"]'}).config.served_model_name == expected
    assert load(toml='served_model_name = ["a", "b"]').config.served_model_name == expected
    assert load(["--served-model-alias", ""]).config.served_model_alias == ()


def test_all_that_is_wrong_on_the_command_line_is_told() -> None:
    message = problems(["--port", "--prot=1", "--allow-origin", "[1", "--log-level", "loud"])
    assert [line.partition(" ")[0] for line in message.splitlines()] == [
        "argument",
        "allow_origin",
        "unknown",
        "log_level",
    ]


def test_what_a_setting_is_for_and_what_a_list_may_hold_exists() -> None:
    known = {SERVER, IMPLIED, *(name for names in FORMS.values() for name in names), *EngineName}
    for group in (AsrConfig, LlmConfig, TtsConfig, RemoteConfig):
        for name, field in group.model_fields.items():
            assert set(mark(field, "of") or ()) <= known, name
            if words := mark(field, "words"):
                assert set(field.default) <= set(words), name


def test_a_switch_stands_alone_or_has_a_value() -> None:
    assert load(["--insecure-no-auth", "--port", "1"]).config.auth.insecure_no_auth
    assert load(["--auth.insecure-no-auth"]).config.auth.insecure_no_auth
    assert not load(["--insecure-no-auth", "false"]).config.auth.insecure_no_auth
    assert not load(["--streaming-input.enabled=no"]).config.streaming_input.enabled


def test_empty_text_unsets_what_is_optional() -> None:
    assert load(environ={"OMNI_WS_FAKE__FAIL_AFTER_CHUNKS": ""}, toml="fake.fail_after_chunks = 3").config.fake == (
        ServerConfig().fake
    )


def test_an_empty_key_is_refused() -> None:
    message = problems(environ={"OMNI_WS_API_KEY": ""})
    assert message.startswith("api_key = ******** (environment variable OMNI_WS_API_KEY): the key is empty; remove")
    assert "remote.api_key = ********" in problems(toml='remote.api_key = ""')
    assert "the key is not UTF-8 text" in problems(environ={"OMNI_WS_API_KEY": "k\udcff"})
    assert load(["--api-key", "k"]).config.api_key == SecretStr("k")


def test_text_that_is_not_utf_8_is_refused_and_a_path_need_not_be() -> None:
    told = "{} ({}): is not UTF-8 text"
    by_variable = problems(environ={"OMNI_WS_LLM__INSTRUCTIONS": "hi \udcff"})
    assert by_variable == told.format("llm.instructions", "environment variable OMNI_WS_LLM__INSTRUCTIONS")
    assert problems(["--fake.reply=\udcff"]) == told.format("fake.reply", "command line --fake.reply")
    loaded = load(["--record", "/tmp/\udcff"])
    assert loaded.config.record == Path("/tmp/\udcff")
    assert 'record = "/tmp/?"' in loaded.render()


def test_free_form_arguments_reach_vllm_as_they_were_meant() -> None:
    loaded = load(
        ["--vllm.args.max-model-len", "4096", "--vllm.args.enforce-eager", "--vllm.args.dtype=bfloat16", "--port", "9"],
        {"OMNI_WS_VLLM__ARGS__GPU_MEMORY_UTILIZATION": "0.5", "OMNI_WS_VLLM__ARGS__DTYPE": "half"},
        '[vllm.args]\nseed = 3\ntokenizer = "x"\n[vllm.talker_args]\nseed = 4',
    )
    assert loaded.config.vllm.args == {
        "max_model_len": 4096,
        "enforce_eager": True,
        "dtype": "bfloat16",
        "gpu_memory_utilization": 0.5,
        "seed": 3,
        "tokenizer": "x",
    }
    assert loaded.config.vllm.talker_args == {"seed": 4}
    assert loaded.config.port == 9
    assert loaded.origin("vllm.args.dtype") == "command line --vllm.args.dtype"
    assert loaded.origin("vllm.args.seed") == "configuration file"


def test_free_form_values_are_json_where_they_are_json() -> None:
    argv = ["--vllm.args.a", '{"b": [1]}', "--vllm.args.c", '"4096"', "--vllm.args.d", "NaN", "--vllm.args.e", "-1"]
    assert load(argv).config.vllm.args == {"a": {"b": [1]}, "c": "4096", "d": "NaN", "e": -1}
    assert load(["--vllm.args.outer.inner", "1"]).config.vllm.args == {"outer": {"inner": 1}}
    assert load(["--vllm.args", '{"a": 1}', "--vllm.args.b", "2"]).config.vllm.args == {"a": 1, "b": 2}
    assert "already has a value" in problems(["--vllm.args.a", "1", "--vllm.args.a.b", "2"])
    assert "takes a JSON object" in problems(["--vllm.args", "7"])


@pytest.mark.parametrize(
    ("text", "size"),
    [("65536", 65536), ("64KiB", 65536), ("64 mib", 64 * MIB), ("1.5MB", 1_500_000), ("2GB", 2 * 10**9), ("7b", 7)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size
    assert load(["--limits.max-held-bytes", text]).config.limits.max_held_bytes == size
    assert parse_size(format_size(size)) == size


@pytest.mark.parametrize("text", ["", "MiB", "64XB", "-1", "1.0001KiB", "0", "1e3"])
def test_bad_sizes(text: str) -> None:
    assert problems([f"--limits.max-held-bytes={text}"]).startswith(f"limits.max_held_bytes = '{text}' (command line")


@pytest.mark.parametrize(
    ("argv", "environ", "toml", "message"),
    [
        (["--prot", "1"], {}, "", "unknown flag --prot; did you mean --port?"),
        (
            ["--session-timeout-sec=1"],
            {},
            "",
            "unknown flag --session-timeout-sec; did you mean --streaming-input.session-timeout-sec?",
        ),
        (["serve"], {}, "", "unknown argument serve"),
        (["--xyzzy-plugh"], {}, "", "unknown flag --xyzzy-plugh"),
        (["--vllm.arg.seed", "1"], {}, "", "unknown flag --vllm.arg.seed"),
        ([], {"OMNI_WS_PROT": "1"}, "", "unknown environment variable OMNI_WS_PROT; did you mean OMNI_WS_PORT?"),
        ([], {"OMNI_WS_VLLM__ARGS__": "1"}, "", "unknown environment variable OMNI_WS_VLLM__ARGS__"),
        ([], {}, "prot = 1", "unknown key prot in configuration file; did you mean port?"),
        ([], {}, "[streaming-input]", "unknown key streaming-input in configuration file"),
        ([], {}, "[limits]\nsessions = 1", "unknown key limits.sessions in configuration file"),
        ([], {}, "limits = 1", "limits (configuration file): is a section"),
        ([], {}, "[host]\na = 1", "host = {'a': 1} (configuration file): input should be a valid string"),
        ([], {}, "port = ", "configuration file is not TOML"),
        (["--port"], {}, "", "argument --port: expected one argument"),
    ],
)
def test_what_nobody_knows_is_an_error(argv: list[str], environ: dict[str, str], toml: str, message: str) -> None:
    assert problems(argv, environ, toml).startswith(message)


def test_unknown_empty_sections_are_errors_too() -> None:
    assert problems(toml="[nonsense]") == "unknown key nonsense in configuration file"


def test_a_start_policy_is_a_name_or_an_object() -> None:
    table = '[streaming_input.start_policy]\ntype = "on_modality"\nmodality = "audio"\nmin_audio_ms = 300\n'
    written = load(toml=table)
    wanted = {"type": "on_modality", "modality": "audio", "min_audio_ms": 300}
    assert written.config.streaming_input.start_policy == wanted
    assert load(toml=written.render()).config == written.config
    # One from another source takes its place as a whole.
    variable = {"OMNI_WS_STREAMING_INPUT__START_POLICY": '{"type": "on_min_length", "min_bytes": 4}'}
    replaced = load((), variable, table)
    assert replaced.config.streaming_input.start_policy == {"type": "on_min_length", "min_bytes": 4}
    assert replaced.origin("streaming_input.start_policy").endswith("OMNI_WS_STREAMING_INPUT__START_POLICY")
    assert load(
        ["--streaming-input.start-policy", "on_end_only"], variable, table
    ).config.streaming_input.start_policy == ("on_end_only")


@pytest.mark.parametrize(
    ("argv", "key"),
    [
        (["--port", "65536"], "port"),
        (["--port", "-1"], "port"),
        (["--port", "8080.5"], "port"),
        (["--streaming-input.session-timeout-sec", "0"], "streaming_input.session_timeout_sec"),
        (["--streaming-input.session-timeout-sec", "inf"], "streaming_input.session_timeout_sec"),
        (["--sse-heartbeat-sec", "-0.1"], "sse_heartbeat_sec"),
        (["--streaming-input.start-policy", "now"], "streaming_input.start_policy"),
        (["--streaming-input.start-policy", "on_modality"], "streaming_input.start_policy"),
        (["--streaming-input.start-policy", '{"type": "on_modality"}'], "streaming_input.start_policy"),
        (["--streaming-input.start-policy", '{"min_bytes": 4}'], "streaming_input.start_policy"),
        (
            ["--streaming-input.start-policy", '{"type": "on_min_length", "min_byte": 4}'],
            "streaming_input.start_policy",
        ),
        (
            ["--streaming-input.start-policy", '{"type": "on_min_length", "min_chunks": 0}'],
            "streaming_input.start_policy",
        ),
        (["--streaming-input.start-policy", '{"type": "on_min_length",'], "streaming_input.start_policy"),
        (["--streaming-input.reorder-window-chunks", "0"], "streaming_input.reorder_window_chunks"),
        (["--streaming-input.enabled", "perhaps"], "streaming_input.enabled"),
        (["--engine", "Embedded"], "engine"),
        (["--host", ""], "host"),
        (["--replica-id", "a_b"], "replica_id"),
        (["--allow-origin", "example.org"], "allow_origin"),
        (["--allow-origin", "https://example.org/"], "allow_origin"),
        (["--allow-origin", '["a"'], "allow_origin"),
    ],
)
def test_a_bad_value_is_named_with_its_origin(argv: list[str], key: str) -> None:
    message = problems(argv)
    assert message.startswith(key)
    assert f"(command line {argv[0]}): " in message


def test_values_at_a_limit_are_taken() -> None:
    argv = [
        "--port=65535",
        "--sse-heartbeat-sec=0",
        "--streaming-input.reorder-window-chunks=1",
        "--replica-id=" + "a" * 32,
    ]
    config = load(argv).config
    assert (config.port, config.sse_heartbeat_sec, config.streaming_input.reorder_window_chunks) == (65535, 0, 1)
    assert load(["--allow-origin", "*,null,https://a.example:8443"]).config.allow_origin[2] == "https://a.example:8443"


def test_a_number_is_not_a_switch() -> None:
    assert problems(toml="port = true").startswith("port = True (configuration file): is a boolean")


def test_everything_wrong_is_told_at_once() -> None:
    message = problems(["--prot=1", "--port=x"], {"OMNI_WS_HOTS": "a"}, "lgo_level = 1")
    assert len(message.splitlines()) == 4


def test_a_key_file_needs_its_certificate() -> None:
    assert "without ssl_certfile" in problems(["--ssl-keyfile", "k"])
    assert load(["--ssl-keyfile", "k", "--ssl-certfile", "c"]).config.ssl_keyfile == Path("k")


def test_a_session_cap_below_the_chunk_cap_needs_no_second_setting() -> None:
    config = load(["--streaming-input.max-payload-per-session", "1"]).config
    assert config.streaming_input.max_payload_per_session == 1


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    assert problems(toml=tmp_path / "none.toml") == f"cannot read {tmp_path / 'none.toml'}: No such file or directory"
    (tmp_path / "latin.toml").write_bytes(b"host = '\xe9'")
    assert problems(toml=tmp_path / "latin.toml").endswith("is not UTF-8 text")


def test_secrets_are_never_shown() -> None:
    loaded = load(
        ["--vllm.args.hf-token", "hush1", "--remote.upstreams", "https://me:hush2@host/v1"],
        {"OMNI_WS_API_KEY": "hush3"},
    )
    assert loaded.config.api_key == SecretStr("hush3")
    assert loaded.config.vllm.args == {"hf_token": "hush1"}
    for shown in (loaded.render(), repr(loaded.config.api_key)):
        assert "hush" not in shown
    assert "# api_key = ********" in loaded.render()
    assert "hush" not in problems(toml='api_key = ["hush"]')


def test_configuration_cannot_change() -> None:
    config = ServerConfig(port=0, streaming_input=StreamingInputConfig(reorder_window_chunks=2))
    with pytest.raises(ValidationError):
        config.port = 1
    with pytest.raises(ValidationError):
        config.streaming_input.reorder_window_chunks = 3


def test_built_in_code_it_ignores_the_process_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNI_WS_PORT", "1")
    monkeypatch.setenv("PORT", "2")
    assert ServerConfig().port == 8080
    assert load().config.port == 8080


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost", "LocalHost", "::ffff:127.0.0.1"]
)
def test_loopback_needs_no_key(host: str) -> None:
    check_exposure(ServerConfig(host=host))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "128.0.0.1", "example.org", "localhost.example.org"])
def test_beyond_loopback_needs_a_key_or_a_word(host: str) -> None:
    with pytest.raises(ConfigurationError, match="--insecure-no-auth"):
        check_exposure(ServerConfig(host=host))
    for argv in (["--api-key", "k"], ["--keys-file", "keys.toml"], ["--insecure-no-auth"]):
        check_exposure(load(["--host", host, *argv]).config)


def test_the_port_of_wyoming_which_has_no_keys_is_opened_in_so_many_words() -> None:
    beyond = ["--wyoming.host", "0.0.0.0", "--api-key", "k"]
    check_exposure(load(beyond).config)  # it listens nowhere
    check_exposure(load(["--wyoming-port", "10300"]).config)
    beyond += ["--wyoming-port", "10300"]
    line = r"with --wyoming-port 10300 --wyoming\.host 0\.0\.0\.0 --insecure-no-auth"
    with pytest.raises(ConfigurationError, match=line):
        check_exposure(load(beyond).config)
    check_exposure(load([*beyond, "--insecure-no-auth"]).config)


@pytest.mark.parametrize("satellite", ["kitchen", ":10700", "kitchen:0", "kitchen:65536", "kitchen:x"])
def test_a_satellite_has_a_host_and_a_port(satellite: str) -> None:
    with pytest.raises(ConfigurationError, match=r"is not an address such as kitchen\.local:10700"):
        load(["--wyoming.satellites", satellite])
    assert load(["--wyoming.satellites", "kitchen:65535"]).config.wyoming.satellites == ("kitchen:65535",)


def test_the_port_of_audiosocket_is_held_to_the_same() -> None:
    beyond = ["--telephony.audiosocket-host", "0.0.0.0"]
    check_exposure(load(beyond).config)  # it listens nowhere
    beyond += ["--telephony.audiosocket-port", "0"]
    with pytest.raises(ConfigurationError, match=r"on --telephony\.audiosocket-host 127\.0\.0\.1"):
        check_exposure(load(beyond).config)
    check_exposure(load([*beyond, "--api-key", "k"]).config)


@pytest.mark.parametrize(
    ("grpc", "problem"),
    [
        (GrpcConfig(port=50051), "the fake engine has no token sessions"),
        (GrpcConfig(readout_vectors=Path("v.safetensors")), "need each other"),
        (GrpcConfig(readout_manifest=Path("v.json")), "need each other"),
        (
            GrpcConfig(readout_vectors=Path("v.safetensors"), readout_manifest=Path("v.json")),
            "the fake engine has no readouts",
        ),
    ],
)
def test_grpc_settings_that_mean_nothing_are_refused(grpc: GrpcConfig, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        check_available(ServerConfig(engine=EngineName.FAKE, grpc=grpc))


@pytest.mark.parametrize(
    ("vllm", "problem"),
    [
        (VllmConfig(), "needs a model"),
        (VllmConfig(model="m", talker_profile="orpheus"), "need a Talker"),
        (VllmConfig(model="m", talker_args={"dtype": "float16"}), "need a Talker"),
    ],
)
def test_what_the_vllm_engine_lacks_is_said_before_it_starts(
    vllm: VllmConfig, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ServerConfig(engine=EngineName.VLLM, vllm=vllm)
    monkeypatch.setattr("omni_ws.config.loading.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="needs vLLM"):
        check_available(config)
    monkeypatch.setattr("omni_ws.config.loading.find_spec", lambda name: object())
    with pytest.raises(ConfigurationError, match=problem):
        check_available(config)
    check_available(ServerConfig(engine=EngineName.VLLM, vllm=VllmConfig(model="m")))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"upstreams": ()}, "needs upstream servers"),
        ({"upstreams": ("127.0.0.1:8000",)}, "remote.upstreams holds an invalid base URL"),
        ({"upstreams": ("ftp://host/v1",)}, "remote.upstreams holds an invalid base URL"),
        ({"upstreams": ("http://host:99999/v1",)}, "remote.upstreams holds an invalid base URL"),
        ({"upstreams": ("http://host/v1?key=hush",)}, "remote.upstreams holds an invalid base URL"),
        ({"speech_upstream": "http://"}, "remote.speech_upstream holds an invalid base URL"),
        ({"modalities": ("audio",)}, "remote.modalities must contain text"),
        ({"modalities": ("text", "smell")}, "remote.modalities holds 'smell'; known are text, audio"),
        ({"input_modalities": ("speech",)}, "remote.input_modalities holds 'speech'"),
        ({"options": ("tool",)}, "remote.options holds 'tool'; known are tools, logprobs,"),
        ({"sampling": ("temprature",)}, "remote.sampling holds 'temprature'"),
        ({"stage_params": ("talker",)}, "remote.stage_params holds 'talker', which does not have the form"),
        ({"audio_sample_rate": 7_999}, "between 8000 and 192000"),
        ({"audio_sample_rate": 192_001}, "between 8000 and 192000"),
    ],
)
def test_remote_settings_that_cannot_work(settings: dict[str, Any], problem: str) -> None:
    remote = RemoteConfig(**{"upstreams": ("http://127.0.0.1:8000/v1",), **settings})
    with pytest.raises(ConfigurationError) as caught:
        check_available(ServerConfig(engine=EngineName.REMOTE, remote=remote))
    assert problem in str(caught.value)
    assert "hush" not in str(caught.value)


def test_remote_settings_that_can_work() -> None:
    remote = RemoteConfig(
        upstreams=("http://127.0.0.1:8000/v1", "https://me:hush@host"),
        speech_upstream="http://127.0.0.1:8001",
        modalities=("text", "audio"),
        input_modalities=("text", "audio", "image", "video"),
        options=("tools", "logprobs", "response_format", "n", "priority", *MediaLimitFields.__struct_fields__),
        stage_params=("talker.temperature",),
        audio_sample_rate=8_000,
    )
    check_available(ServerConfig(engine=EngineName.REMOTE, remote=remote))


@pytest.mark.parametrize("engine", [EngineName.EMBEDDED, EngineName.FAKE])
def test_what_is_there_is_not_refused(engine: EngineName) -> None:
    check_available(ServerConfig(engine=engine))


def test_a_system_on_which_the_server_does_not_run_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omni_ws.config.loading.IS_POSIX", False)
    with pytest.raises(ConfigurationError, match=r"runs on Linux and macOS; on Windows start it in WSL"):
        check_available(ServerConfig(engine=EngineName.FAKE))


def test_the_echo_of_calls_needs_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ServerConfig(engine=EngineName.FAKE, telephony=TelephonyConfig(cancel_echo=True))
    monkeypatch.setattr("omni_ws.config.loading.ECHO_PACKAGE", "asyncio")
    check_available(config)
    monkeypatch.setattr("omni_ws.config.loading.ECHO_PACKAGE", "no_such_package")
    with pytest.raises(ConfigurationError, match=r"cancel_echo needs its library: .*pip install omni-ws$"):
        check_available(config)


def test_tracing_needs_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omni_ws.config.loading.TRACING_PACKAGES", ("asyncio", "asyncio.queues"))
    check_available(ServerConfig(engine=EngineName.FAKE, tracing=True))
    for missing in ("no_such_package.at.all", "asyncio.no_such_module"):
        monkeypatch.setattr("omni_ws.config.loading.TRACING_PACKAGES", ("asyncio", missing))
        with pytest.raises(ConfigurationError, match=r"pip install 'omni-ws\[otel\]'"):
            check_available(ServerConfig(engine=EngineName.FAKE, tracing=True))
        check_available(ServerConfig(engine=EngineName.FAKE))


def test_a_store_needs_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    key = SecretStr("A" * 43 + "=")
    on_a_server = ServerConfig(engine=EngineName.FAKE, sessions=SessionsConfig(store="redis://host"))
    sealed = ServerConfig(engine=EngineName.FAKE, sessions=SessionsConfig(store="sqlite:x.db", store_key=key))
    for config in (on_a_server, sealed):
        check_available(config)
    monkeypatch.setattr("omni_ws.config.loading.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"store needs the client library .*pip install 'omni-ws\[redis\]'"):
        check_available(on_a_server)
    with pytest.raises(ConfigurationError, match=r"store_key needs cryptography: .*pip install omni-ws$"):
        check_available(sealed)
    check_available(ServerConfig(engine=EngineName.FAKE, sessions=SessionsConfig(store="sqlite:x.db")))


def test_a_key_without_a_store_is_refused() -> None:
    key = SecretStr("A" * 43 + "=")
    with pytest.raises(ConfigurationError, match="store_key has nothing to encrypt"):
        check_available(ServerConfig(engine=EngineName.FAKE, sessions=SessionsConfig(store_key=key)))


@pytest.mark.parametrize(
    ("store", "parsed"),
    [
        ("memory", StoreAddress("memory")),
        ("sqlite:a/b.db", StoreAddress("sqlite", path=Path("a/b.db"))),
        ("sqlite:/a.db?fsync=1", StoreAddress("sqlite", path=Path("/a.db"), fsync=True)),
        ("redis://host", StoreAddress("redis", url="redis://host:6379", hosts=(("host", 6379),))),
        (
            "valkeys://me:pw@host:1/2?ssl_ca_certs=/ca.pem",
            StoreAddress("redis", url="rediss://me:pw@host:1/2?ssl_ca_certs=/ca.pem", hosts=(("host", 1),)),
        ),
        ("redis://[::1]:7", StoreAddress("redis", url="redis://[::1]:7", hosts=(("::1", 7),))),
        (
            "valkey://a,b:2?cluster=1",
            StoreAddress("redis", url="redis://a:6379", hosts=(("a", 6379), ("b", 2)), cluster=True),
        ),
        (
            "redis://:pw@a,b:2/3?sentinel=talks&sentinel_auth=1",
            StoreAddress(
                "redis",
                url="redis://:pw@a:26379/3",
                hosts=(("a", 26379), ("b", 2)),
                sentinel="talks",
                sentinel_auth=True,
            ),
        ),
    ],
)
def test_stores(store: str, parsed: StoreAddress) -> None:
    assert SessionsConfig(store=store).address == parsed


@pytest.mark.parametrize(
    ("store", "problem"),
    [
        ("sqlite", "is not a store"),
        ("sqlite:", "names no file"),
        ("sqlite:x?fsync=2", "fsync is 0 or 1"),
        ("sqlite:x?sync=1", "unknown option sync"),
        ("mysql://host", "is not a store"),
        ("redis:host", "is not a store"),
        ("redis://hush:hush@", "HOST or HOST:PORT"),
        ("redis://hush:hush@host:0", "HOST or HOST:PORT"),
        ("redis://hush:hush@host:65536", "HOST or HOST:PORT"),
        ("redis://[::1", "is not a URL"),
        ("redis://hush:hush@host/zero", "number of a database"),
        ("redis://hush:hush@a,b", "several hosts need"),
        ("redis://hush:hush@a?cluster=1&sentinel=x", "exclude each other"),
        ("redis://hush:hush@host?password=x", "unknown option password"),
        ("redis://hush:hush/hush@host/0", "HOST or HOST:PORT"),
        ("redis://hush:hush?hush@host/0", "percent-encode"),
    ],
)
def test_what_is_no_store(store: str, problem: str) -> None:
    told = problems(["--sessions.store", store])
    assert problem in told
    assert "hush" not in told


@pytest.mark.parametrize("password", ["hush1", "hush1@hush3", "hush1 hush3"])
def test_the_password_of_a_store_is_never_shown(password: str) -> None:
    loaded = load(["--sessions.store", f"redis://me:{password}@host/0"], {"OMNI_WS_SESSIONS__STORE_KEY": "hush2"})
    assert "redis://********@host/0" in loaded.render()
    assert "hush" not in loaded.render()

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_ws.core.chunks import MAX_CHANNELS, AudioEncoding, Modality, StartTrigger
from omni_ws.core.start_policy import DEFAULT_MIN_LENGTH, ON_END_ONLY, ON_FIRST_CHUNK, StartPolicy
from omni_ws.errors import InvalidValue
from omni_ws.wire.session_config import (
    MAX_DEPTH,
    SessionConfig,
    effective,
    expected_text,
    has_field,
    invalid_value,
    merge,
    outline,
    start_policy,
)


def test_nothing_asked_for_is_the_default() -> None:
    assert effective({}) == SessionConfig()
    config = SessionConfig()
    assert (config.input_audio.format, config.input_audio.sample_rate, config.input_audio.channels) == (
        "pcm16",
        16_000,
        1,
    )
    assert (config.output_audio.format, config.output_audio.sample_rate) == ("pcm16", 24_000)
    assert (config.modalities, config.history, config.overlap, config.task) == (["text", "audio"], True, "wait", "chat")
    assert (config.out_of_order, config.alignment, config.after_start) == ("buffer", "arrival", "extend")
    assert (config.start_policy, config.turn_detection, config.max_lead_ms) == ("on_min_length", None, None)


def test_defaults_are_not_shared() -> None:
    assert SessionConfig().modalities is not SessionConfig().modalities


# merging


def test_merging_is_deep() -> None:
    base = {"voice": "a", "input_audio": {"format": "pcmu", "channels": 2}}
    patch = {"input_audio": {"sample_rate": 8000}, "model": "m"}
    assert merge(base, patch) == {
        "voice": "a",
        "model": "m",
        "input_audio": {"format": "pcmu", "channels": 2, "sample_rate": 8000},
    }
    assert base == {"voice": "a", "input_audio": {"format": "pcmu", "channels": 2}}


@pytest.mark.parametrize(
    ("base", "patch", "merged"),
    [
        ({"voice": "a"}, {"voice": None}, {}),
        ({}, {"voice": None}, {}),
        ({"input_audio": {"channels": 2}}, {"input_audio": None}, {}),
        ({"input_audio": {"channels": 2}}, {"input_audio": {"channels": None}}, {"input_audio": {}}),
        # Even if the object to remove the null from does not exist yet.
        ({}, {"input_audio": {"channels": None, "format": "pcmu"}}, {"input_audio": {"format": "pcmu"}}),
        ({"start_policy": "on_end_only"}, {"start_policy": {"type": "x"}}, {"start_policy": {"type": "x"}}),
        ({"start_policy": {"type": "x"}}, {"start_policy": "on_end_only"}, {"start_policy": "on_end_only"}),
    ],
)
def test_null_restores_the_default_and_kinds_replace_one_another(
    base: dict[str, Any], patch: dict[str, Any], merged: dict[str, Any]
) -> None:
    assert merge(base, patch) == merged


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels - 1):
        value = {"a": value}
    return value


def test_merging_has_a_depth() -> None:
    assert merge({}, nested(MAX_DEPTH)) == nested(MAX_DEPTH)
    for levels in (MAX_DEPTH + 1, 5000):
        with pytest.raises(InvalidValue, match="nested"):
            merge({}, nested(levels))


OBJECTS = st.recursive(
    st.integers(), lambda inner: st.dictionaries(st.sampled_from("abc"), inner | st.none(), max_size=3), max_leaves=8
).filter(lambda value: isinstance(value, dict))


@given(OBJECTS, OBJECTS)
def test_merging_twice_changes_nothing_more(base: dict[str, Any], patch: dict[str, Any]) -> None:
    once = merge(base, patch)
    assert merge(once, patch) == once
    assert all(once.get(key) is None for key, value in patch.items() if value is None)


# values


@pytest.mark.parametrize(
    ("overrides", "param"),
    [
        ({"voice": 5}, "voice"),
        ({"modalities": ["text", "smell"]}, "modalities[1]"),
        ({"modalities": "text"}, "modalities"),
        ({"input_audio": {"format": "midi"}}, "input_audio.format"),
        ({"input_audio": {"sample_rate": 7_999}}, "input_audio.sample_rate"),
        ({"input_audio": {"sample_rate": 192_001}}, "input_audio.sample_rate"),
        ({"input_audio": {"channels": 0}}, "input_audio.channels"),
        ({"input_audio": {"channels": MAX_CHANNELS + 1}}, "input_audio.channels"),
        ({"input_audio": {"language": "a b"}}, "input_audio.language"),
        ({"input_audio": {"languages": []}}, "input_audio.languages"),
        ({"input_audio": {"languages": ["en"] * 101}}, "input_audio.languages"),
        ({"input_audio": {"languages": ["en", "a b"]}}, "input_audio.languages[1]"),
        ({"input_audio": {"languages": "en"}}, "input_audio.languages"),
        ({"input_audio": {"keywords": ["a"] * 101}}, "input_audio.keywords"),
        ({"input_audio": {"keywords": ["a", "b" * 65]}}, "input_audio.keywords[1]"),
        ({"input_audio": {"keywords": ["a", " "]}}, "input_audio.keywords[1]"),
        ({"input_audio": {"keywords": [""]}}, "input_audio.keywords[0]"),
        ({"input_audio": {"keywords": "Ng"}}, "input_audio.keywords"),
        ({"input_audio": {"keywords": [5]}}, "input_audio.keywords[0]"),
        ({"input_audio": {"prompt": "a" * 4097}}, "input_audio.prompt"),
        ({"input_audio": {"prompt": ["Ng"]}}, "input_audio.prompt"),
        ({"tts": {"lexicon": {str(number): "a" for number in range(501)}}}, "tts.lexicon"),
        ({"tts": {"lexicon": {"a" * 65: "a"}}}, "tts.lexicon"),
        ({"tts": {"lexicon": {" ": "a"}}}, "tts.lexicon"),
        ({"tts": {"lexicon": {"": "a"}}}, "tts.lexicon"),
        ({"tts": {"lexicon": {"a": "b" * 129}}}, "tts.lexicon"),
        ({"tts": {"lexicon": {"a": " "}}}, "tts.lexicon"),
        ({"tts": {"lexicon": {"a": 5}}}, "tts.lexicon"),
        ({"tts": {"lexicon": ["a"]}}, "tts.lexicon"),
        ({"tts": 5}, "tts"),
        ({"output_audio": {"sample_rate": 1}}, "output_audio.sample_rate"),
        ({"start_policy": "soon"}, "start_policy"),
        ({"start_policy": {"type": "soon"}}, "start_policy.type"),
        ({"start_policy": {"type": "on_min_length", "min_bytes": 0}}, "start_policy.min_bytes"),
        ({"start_policy": {"min_bytes": 1}}, "start_policy.type"),
        ({"start_policy": "on_modality"}, "start_policy.modality"),
        ({"turn_detection": {"type": "server_vad", "threshold": 1.1}}, "turn_detection.threshold"),
        ({"turn_detection": {"type": "magic"}}, "turn_detection.type"),
        ({"sampling": {"temperature": 2.1}}, "sampling.temperature"),
        ({"sampling": {"top_p": 0}}, "sampling.top_p"),
        ({"sampling": {"max_tokens": 0}}, "sampling.max_tokens"),
        ({"stage_params": {"talker": 5}}, "stage_params"),
        ({"tools": {}}, "tools"),
        ({"max_lead_ms": -1}, "max_lead_ms"),
        ({"overlap": "shout"}, "overlap"),
        ({"task": "sing"}, "task"),
    ],
)
def test_a_bad_value_is_named(overrides: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        effective(overrides)
    assert caught.value.param == param
    assert caught.value.message.startswith(param) or param == "start_policy.modality"


@pytest.mark.parametrize(
    "overrides",
    [
        {"input_audio": {"sample_rate": 8_000, "channels": MAX_CHANNELS}},
        {"input_audio": {"sample_rate": 192_000, "channels": 1}},
        {"input_audio": {"keywords": ["\U0001f600" * 64] * 100, "prompt": "a" * 4096}},
        {"input_audio": {"keywords": [], "prompt": ""}},
        {"tts": {"lexicon": {f"{number:\U0001f600<64}": "\U0001f600" * 128 for number in range(500)}}},
        {"tts": {"lexicon": {}}},
        {"input_audio": {"languages": ["en"] * 100, "language": "AUTO"}},
        {"sampling": {"temperature": 0, "top_p": 1, "max_tokens": 1, "stop": ["a"], "seed": -1}},
        {"sampling": {"temperature": 2, "stop": "a"}},
        {"turn_detection": {"type": "server_vad", "threshold": 1}},
        {"max_lead_ms": 0},
        {"stage_params": {"talker": {"temperature": 1}}},
        {"color": "red"},
    ],
)
def test_values_at_their_limits_and_unknown_fields(overrides: dict[str, Any]) -> None:
    effective(overrides)


@pytest.mark.parametrize(
    ("audio", "text"),
    [
        ({}, ""),
        ({"keywords": [], "prompt": " "}, ""),
        ({"keywords": ["Jon Dashwoode", "clubs"]}, "Jon Dashwoode, clubs."),
        ({"prompt": "We went on. "}, "We went on."),
        ({"prompt": "We went on.", "keywords": ["Ng"]}, "We went on. Ng."),
    ],
)
def test_what_is_expected_is_one_text(audio: dict[str, Any], text: str) -> None:
    assert expected_text(effective({"input_audio": audio}).input_audio) == text


def test_an_outline_has_nothing_that_is_expected() -> None:
    audio = {"sample_rate": 8000, "keywords": ["Ng"], "prompt": "a"}
    said = {"lexicon": {"a": "b"}}
    assert outline(effective({"input_audio": audio, "tts": said})) == effective({"input_audio": {"sample_rate": 8000}})


def test_what_was_asked_for_is_in_effect() -> None:
    config = effective({"input_audio": {"format": "opus"}, "voice": "bella", "sampling": {"seed": 3}})
    assert config.input_audio.format is AudioEncoding.OPUS
    assert config.input_audio.sample_rate == 16_000
    assert (config.voice, config.sampling.seed) == ("bella", 3)


def test_an_error_without_a_place_names_nothing() -> None:
    error = invalid_value(msgspec.ValidationError("Expected `object`, got `int`"))
    assert error.param is None
    assert error.message == "Expected `object`, got `int`"


# start policies


@pytest.mark.parametrize(
    ("wanted", "policy"),
    [
        ("on_first_chunk", ON_FIRST_CHUNK),
        ("on_end_only", ON_END_ONLY),
        ("on_min_length", DEFAULT_MIN_LENGTH),
        ({"type": "on_first_chunk", "min_bytes": 5}, ON_FIRST_CHUNK),
        ({"type": "on_min_length"}, DEFAULT_MIN_LENGTH),
        ({"type": "on_min_length", "min_audio_ms": 0}, StartPolicy(min_audio_ms=0)),
        (
            {"type": "on_min_length", "min_text_chars": 2, "min_bytes": 3, "min_chunks": 4, "min_video_frames": 5},
            StartPolicy(min_text_chars=2, min_bytes=3, min_chunks=4, min_video_frames=5),
        ),
        (
            {"type": "on_modality", "modality": "image"},
            StartPolicy(trigger=StartTrigger.MODALITY, modality=Modality.IMAGE),
        ),
        (
            {"type": "on_modality", "modality": "audio", "min_audio_ms": 500},
            StartPolicy(trigger=StartTrigger.MODALITY, modality=Modality.AUDIO, min_audio_ms=500),
        ),
    ],
)
def test_start_policies(wanted: object, policy: StartPolicy) -> None:
    assert start_policy(effective({"start_policy": wanted})) == policy


@pytest.mark.parametrize(
    ("path", "there"),
    [
        ("voice", True),
        ("voice.x", False),
        ("sampling.max_tokens", True),
        ("sampling.max_token", False),
        ("turn_detection.threshold", True),
        ("start_policy.min_bytes", True),
        ("stage_params.fake.fail_after_chunks", True),
        ("nonsense", False),
        ("", False),
    ],
)
def test_has_field(path: str, there: bool) -> None:
    assert has_field(path) is there

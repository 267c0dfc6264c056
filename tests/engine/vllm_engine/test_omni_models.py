"""What is known of an omni model before anything is loaded: its kind, what is refused, and whether it fits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from omni_ws.config.model import ServerConfig, VllmConfig
from omni_ws.config.parts import AsrConfig, LlmConfig, TtsConfig
from omni_ws.config.values import ConfigurationError
from omni_ws.core.chunks import OutputModality, Task
from omni_ws.engine.vllm.checkpoint import OmniFamily, check_omni_fits, find_omni_model, thinker_share
from omni_ws.engine.vllm.engine import VllmEngine
from omni_ws.engine_choice import llm_of

GB = 10**9
THINKER: dict[str, Any] = {"audio_token_id": 1, "text_config": {"hidden_size": 8}}
SPEAKING: dict[str, Any] = {
    "model_type": "qwen3_omni_moe",
    "thinker_config": THINKER,
    "talker_config": {"accept_hidden_layer": 2},
    "code2wav_config": {},
}
THINKING: dict[str, Any] = {"model_type": "qwen3_omni_moe", "enable_audio_output": False, "thinker_config": THINKER}


def checkpoint(folder: Path, config: object) -> str:
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return str(folder)


def engine(folder: Path, config: dict[str, Any] = SPEAKING, **settings: Any) -> VllmEngine:
    return VllmEngine(VllmConfig(model=checkpoint(folder, config), **settings))


@pytest.mark.parametrize(
    ("config", "family", "speaks"),
    [
        (SPEAKING, OmniFamily.QWEN3, True),
        ({**SPEAKING, "model_type": "qwen2_5_omni"}, OmniFamily.QWEN25, True),
        ({**SPEAKING, "enable_audio_output": True}, OmniFamily.QWEN3, True),
        ({**SPEAKING, "enable_audio_output": False}, OmniFamily.QWEN3, False),
        (THINKING, OmniFamily.QWEN3, False),
    ],
)
def test_the_kind_is_in_the_configuration(
    tmp_path: Path, config: dict[str, Any], family: OmniFamily, speaks: bool
) -> None:
    model = find_omni_model(checkpoint(tmp_path, config), {})
    assert model is not None
    assert (model.family, model.speaks, model.name) == (family, speaks, tmp_path.name)
    assert model.folder() == tmp_path


@pytest.mark.parametrize("config", [{"model_type": "llama"}, {}, [1], "no json"])
def test_other_models_are_left_to_vllm(tmp_path: Path, config: object) -> None:
    assert find_omni_model(checkpoint(tmp_path, config), {}) is None


def test_a_folder_without_a_configuration_is_left_to_vllm(tmp_path: Path) -> None:
    assert find_omni_model(str(tmp_path), {}) is None


def test_a_model_that_speaks_has_no_other_voice(tmp_path: Path) -> None:
    one = engine(tmp_path)
    assert one.capabilities.output_modalities == {OutputModality.TEXT, OutputModality.AUDIO}
    assert one.capabilities.tasks == {Task.CHAT, Task.SPEECH}
    assert not one.capabilities.lexicon  # it says what it writes
    voice = one.parts["tts"]
    assert voice is not None
    assert (voice.name, voice.model) == ("talker", tmp_path.name)


@pytest.mark.parametrize(("config", "settings"), [(SPEAKING, {"omni_speech": False}), (THINKING, {})])
def test_without_speech_it_writes_alone(tmp_path: Path, config: dict[str, Any], settings: dict[str, Any]) -> None:
    one = engine(tmp_path, config, **settings, args={"enable_lora": True})
    assert one.capabilities.output_modalities == {OutputModality.TEXT}
    assert one.capabilities.stages == ("thinker",)
    assert one.parts["tts"] is None


def test_a_voice_beside_the_model_takes_the_place_of_its_own(tmp_path: Path) -> None:
    model = checkpoint(tmp_path, SPEAKING)
    asr, llm = AsrConfig(use="none"), LlmConfig(use=f"vllm:{model}")
    own = ServerConfig(asr=asr, llm=llm, tts=TtsConfig(use="none"))
    other = ServerConfig(asr=asr, llm=llm, tts=TtsConfig(use="espeak"))
    assert OutputModality.AUDIO in llm_of(own).capabilities.output_modalities
    assert OutputModality.AUDIO not in llm_of(other).capabilities.output_modalities


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"talker": "canopylabs/orpheus"}, "vllm.talker: "),
        ({"args": {"enable_lora": True}}, "vllm.args.enable_lora"),
        ({"args": {"mm_processor_kwargs": {"use_audio_in_video": True}}}, "use_audio_in_video"),
        ({"args": {"pipeline_parallel_size": 2}}, "vllm.args.pipeline_parallel_size must be 1"),
        ({"args": {"data_parallel_size": 2}}, "vllm.args.data_parallel_size must be 1"),
        ({"args": {"speculative_config": {}}}, "vllm.args.speculative_config must be None"),
        ({"args": {"worker_extension_cls": "mine.Worker"}}, "vllm.args.worker_extension_cls must be"),
    ],
)
def test_what_does_not_go_with_its_voice_is_refused_by_name(
    tmp_path: Path, settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        engine(tmp_path, **settings)
    (problem,) = refusal.value.problems
    assert named in problem
    assert "--vllm.omni-speech false" in problem


#: Sums from the released sizes: bfloat16, vocoder in float32, slots for 16 answers of 8192 positions.
QWEN3_30B = {"thinker": 63_400_000_000, "talker": 6_700_000_000 + 16 * 8192 * 20_000, "vocoder": 900_000_000}
QWEN3_30B_FP8 = {**QWEN3_30B, "thinker": 33_000_000_000}
QWEN25_7B = {"thinker": 17_900_000_000, "talker": 2_700_000_000 + 16 * 8192 * 49_000, "vocoder": 1_800_000_000}


@pytest.mark.parametrize(
    ("sizes", "total", "gpus"),
    [(QWEN3_30B, 141 * GB, 1), (QWEN3_30B, 85 * GB, 2), (QWEN3_30B_FP8, 85 * GB, 1), (QWEN25_7B, 85 * GB, 1)],
)
def test_models_that_fit(sizes: dict[str, int], total: int, gpus: int) -> None:
    check_omni_fits("model", **sizes, total=total, gpus=gpus)
    share = thinker_share(sizes["talker"] + sizes["vocoder"], total=total)
    assert sizes["thinker"] / gpus / total < share < 0.92


@pytest.mark.parametrize(("sizes", "total"), [(QWEN3_30B, 85 * GB), (QWEN25_7B, 25 * GB)])
def test_models_that_do_not_fit_are_refused_with_the_sum(sizes: dict[str, int], total: int) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        check_omni_fits("Qwen/model", **sizes, total=total, gpus=1)
    (problem,) = refusal.value.problems
    for size in (*sizes.values(), total):
        assert f"{size / GB:.1f} GB" in problem


def test_the_last_byte_that_fits() -> None:
    total = 100 * GB
    exact = int(0.92 * total) - 3 * 700_000_000 - 8 * GB
    check_omni_fits("model", thinker=exact, talker=0, vocoder=0, total=total, gpus=1)
    with pytest.raises(ConfigurationError):
        check_omni_fits("model", thinker=exact + 1, talker=0, vocoder=0, total=total, gpus=1)
    assert thinker_share(0, total=total) == 0.906


def test_a_voice_that_leaves_nothing_for_a_quantised_thinker_is_refused_with_its_size() -> None:
    assert thinker_share(9_628_000_000, total=12 * GB) == 0.001
    with pytest.raises(ConfigurationError) as refusal:
        thinker_share(9_640_000_000, total=12 * GB)
    (problem,) = refusal.value.problems
    assert "9.6 GB of a GPU of 12.0 GB" in problem
    assert "vllm.omni_sessions" in problem

"""What a Talker refuses: settings, rows and checkpoints; each limit is met, and one past it is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed (make test-vllm)")
pytest.importorskip("transformers", reason="transformers is not installed (make test-vllm)")

from safetensors.torch import load_file, save_file  # noqa: E402
from support.omni_reference import (  # noqa: E402
    LONGEST,
    PRECISE,
    SLOTS,
    Driven,
    greedy,
    long_prompt,
    speak,
    spoken,
    talker,
)
from support.tiny_models import Family, omni_checkpoint  # noqa: E402

from omni_ws.config.values import ConfigurationError  # noqa: E402
from omni_ws.engine.omni.slot_talker import load_talker, talker_memory  # noqa: E402
from omni_ws.engine.omni.step_process import AnswerEnd, AnswerRows, PromptReset, TalkerItem  # noqa: E402  # noqa: E402
from omni_ws.engine.omni.transformer import CheckpointTensors  # noqa: E402
from omni_ws.errors import EngineOverloaded, InvalidValue  # noqa: E402

pytestmark = pytest.mark.vllm

FAMILIES = pytest.mark.parametrize("family", Family)


def opens(family: Family, **settings: Any) -> bool:
    model = talker(family)
    try:
        model.open(0, settings)
    finally:
        model.close(0)
        assert model.free_slots == SLOTS
    return True


@FAMILIES
@pytest.mark.parametrize(
    ("name", "accepted", "refused"),
    [
        ("temperature", [0, 0.5, 100], [-0.01, 100.5, math.nan, math.inf, "1", True]),
        ("top_p", [0.001, 1], [0, 1.001, -1, math.nan]),
        ("top_k", [-1, 0, 1, 10**30], [-2, 1.5, True]),
        ("repetition_penalty", [0.01, 1, 100], [0, -1, 101, math.nan]),
        ("seed", [0, -1, 2**70], [1.5, "a", True]),
        ("max_tokens", [1, 10**9], [0, -1, 2.0]),
        ("voice", ["Chelsie", "ethan", "ETHAN"], ["nobody", "", 3]),
    ],
)
def test_settings_have_limits(family: Family, name: str, accepted: list[Any], refused: list[Any]) -> None:
    for value in accepted:
        assert opens(family, **{name: value})
    assert opens(family, **{name: None})
    for value in refused:
        with pytest.raises(InvalidValue, match=name):
            opens(family, **{name: value})


@FAMILIES
def test_an_unknown_setting_is_refused(family: Family) -> None:
    with pytest.raises(InvalidValue, match="unknown setting of the Talker: top_a"):
        opens(family, top_a=0.1)


@FAMILIES
def test_a_slot_more_is_refused(family: Family) -> None:
    model = talker(family)
    for session in range(SLOTS):
        model.open(session, {})
    with pytest.raises(EngineOverloaded):
        model.open(SLOTS, {})
    with pytest.raises(ValueError, match="open already"):
        model.open(0, {})
    for session in range(SLOTS):
        model.close(session)
    assert model.free_slots == SLOTS


@FAMILIES
def test_a_voice_is_heard_in_any_case(family: Family) -> None:
    answer = spoken(family, "text")
    voices = [
        speak(talker(family), answer.items(), greedy(family, max_tokens=4) | {"voice": voice})[0].tobytes()
        for voice in ("ETHAN", "Ethan", "chelsie")
    ]
    assert voices[0] == voices[1]
    if family is Family.QWEN3:  # the voices of the tiny Qwen2.5 begin with the same token
        assert voices[0] != voices[2]
    first = talker(family).voices[0]
    assert first == ("ethan" if family is Family.QWEN3 else "Chelsie")


def refuse(family: Family, *items: TalkerItem) -> str:
    """Feed ``items``, of which the last must be refused; returns why. The session is closed with it."""
    model = talker(family)
    model.open(0, {})
    for item in items[:-1]:
        model.feed(0, item)
    with pytest.raises(InvalidValue) as refused:
        model.feed(0, items[-1])
    assert model.free_slots == SLOTS
    assert not model.busy
    return str(refused.value)


@FAMILIES
def test_rows_that_do_not_fit_together_are_refused(family: Family) -> None:
    answer = spoken(family, "audio")
    prompt, rows, _ = answer.items()
    vocabulary = talker(family).network.vocabulary
    assert "tokens must be" in refuse(family, replace(prompt, tokens=prompt.tokens[None]))
    assert "tokens must be" in refuse(family, replace(prompt, tokens=prompt.tokens.astype(float)))
    for token in (-1, vocabulary):
        assert "tokens must be" in refuse(family, replace(prompt, tokens=np.full_like(prompt.tokens, token)))
    assert "do not match" in refuse(family, replace(prompt, positions=prompt.positions[:, 1:]))
    assert "do not match" in refuse(family, replace(prompt, positions=prompt.positions[:2]))
    assert "do not match" in refuse(family, replace(prompt, states=prompt.states[1:]))
    assert "do not match" in refuse(family, replace(prompt, states=prompt.states.astype(int)))
    assert "shape" in refuse(family, replace(prompt, hidden=prompt.hidden[1:]))
    assert "shape" in refuse(family, replace(prompt, hidden=prompt.hidden[:, 1:]))
    for wrong in (np.nan, np.inf):
        assert "finite" in refuse(family, replace(prompt, hidden=np.full_like(prompt.hidden, wrong)))
    none = np.zeros_like(prompt.states)
    assert "state" in refuse(family, replace(prompt, states=none, hidden=prompt.hidden[:0]))
    wrong_states = np.zeros((1, 128), np.float32) if family is Family.QWEN3 else rows.hidden[1:]
    assert "shape" in refuse(family, prompt, replace(rows, hidden=wrong_states))
    edge = replace(rows, tokens=np.full_like(rows.tokens, vocabulary))
    assert "tokens must be" in refuse(family, prompt, edge)


@FAMILIES
def test_items_out_of_order_are_refused(family: Family) -> None:
    prompt, rows, end = spoken(family, "text").items()
    assert "after the answer has begun" in refuse(family, prompt, rows, prompt)
    assert "cannot begin anew" in refuse(family, prompt, rows, PromptReset())
    assert "after its end" in refuse(family, prompt, rows, end, rows)
    assert "ended already" in refuse(family, prompt, rows, end, end)


def test_a_prompt_must_end_with_the_assistants_turn() -> None:
    answer = spoken(Family.QWEN3, "text")
    _, rows, _ = answer.items()
    length = len(answer.tokens)
    for end in (0, length - 1, length - 2, length - 3):
        assert "beginning of the assistant's turn" in refuse(Family.QWEN3, answer.prompt_rows(0, end), rows)


@FAMILIES
def test_a_prompt_longer_than_a_slot_is_refused(family: Family) -> None:
    """A row fewer leaves room for a frame (test_talker_batches)."""
    ending = 8 if family is Family.QWEN3 else 1
    rows: AnswerRows = spoken(family, "text").answer_rows()
    assert "too long" in refuse(family, long_prompt(family, LONGEST - ending), rows)
    model = talker(family)
    model.open(0, {})
    model.feed(0, long_prompt(family, LONGEST - 1))  # only what ends the prompt is too much
    model.close(0)
    message = refuse(family, long_prompt(family, LONGEST))
    assert message == f"the prompt is too long for the Talker: {LONGEST} rows, at most {LONGEST - 1}"


@FAMILIES
def test_memory_is_known_beforehand(family: Family) -> None:
    told = talker_memory(omni_checkpoint(family), slots=SLOTS, longest=LONGEST, value_bytes=4)
    taken = talker(family).memory_bytes
    assert told <= taken <= told * 1.01 + 100_000
    more = talker_memory(omni_checkpoint(family), slots=SLOTS, longest=2 * LONGEST, value_bytes=4)
    assert more > told


def copied(folder: Path, family: Family, **changes: Any) -> Path:
    """The checkpoint with other settings in config.json, by their path; None removes one."""
    source = omni_checkpoint(family).resolve()
    config = json.loads((source / "config.json").read_text())
    for path, value in changes.items():
        *above, name = path.split("__")
        here: dict[str, Any] = config
        for part in above:
            here = here[part]
        if value is None:
            del here[name]
        else:
            here[name] = value
    folder.mkdir(exist_ok=True)
    for path_of in source.iterdir():
        if path_of.name != "config.json":
            (folder / path_of.name).symlink_to(path_of)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model_type": "llama"}, "has no Talker here"),
        ({"talker_config": None}, "the model has no Talker"),
        ({"talker_config__codec_bos_id": None}, "codec_bos_id is missing"),
        ({"talker_config__text_config__vocab_size": None}, "vocab_size is missing"),
        ({"talker_config__text_config__num_attention_heads": None}, "num_attention_heads is missing"),
        ({"talker_config__text_config__hidden_act": "gelu"}, "activation 'gelu'"),
        ({"talker_config__text_config__rope_parameters__rope_type": "yarn"}, "'yarn' are not supported"),
        ({"talker_config__text_config__rope_parameters__mrope_section": [1, 2, 3]}, "mrope_section"),
        ({"talker_config__text_config__rope_parameters__mrope_section": None}, "mrope_section is missing"),
        ({"talker_config__text_config__num_hidden_layers": 3}, "no tensor talker.model.layers.2"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path: Path, changes: Mapping[str, Any], problem: str) -> None:
    folder = copied(tmp_path / "changed", Family.QWEN3, **changes)
    with pytest.raises(ConfigurationError, match=problem):
        load_talker(folder, slots=1, longest=64)


def test_a_checkpoint_without_readable_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="not readable"):
        load_talker(tmp_path, slots=1, longest=64)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigurationError, match="not readable"):
        load_talker(tmp_path, slots=1, longest=64)
    with pytest.raises(ConfigurationError, match="no safetensors files"):
        CheckpointTensors(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 40)
    with pytest.raises(ConfigurationError, match="not a readable safetensors checkpoint"):
        CheckpointTensors(tmp_path)


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    """Their sizes are still known."""
    values = {"I8": torch.int8, "F8": torch.float8_e4m3fn, "BF16": torch.bfloat16, "F32": torch.float32}
    made = {f"talker.{name}": torch.ones(5, 3, dtype=dtype) for name, dtype in values.items()}
    save_file(made, tmp_path / "model.safetensors")
    tensors = CheckpointTensors(tmp_path)
    for name in ("talker.BF16", "talker.F32"):
        assert tensors.tensor(name).sum() == 15
    for name in ("talker.I8", "talker.F8"):
        with pytest.raises(ConfigurationError, match="is quantised"):
            tensors.tensor(name)
    assert tensors.bytes_of("talker.") == 15 * (1 + 1 + 2 + 4)
    assert tensors.bytes_of("talker.", 2) == 15 * 4 * 2
    assert tensors.bytes_of("thinker.") == 0


def test_the_older_form_of_rotary_settings_is_the_same(tmp_path: Path) -> None:
    """Released files have rope_scaling and rope_theta, transformers 5 writes rope_parameters."""
    place = "talker_config__text_config__"
    sections = json.loads((omni_checkpoint(Family.QWEN3) / "config.json").read_text())
    rope = sections["talker_config"]["text_config"]["rope_parameters"]
    older = {"mrope_section": rope["mrope_section"], "type": "default", "rope_type": "default"}
    changes = {"rope_parameters": None, "rope_scaling": older, "rope_theta": rope["rope_theta"]}
    folder = copied(tmp_path / "older", Family.QWEN3, **{place + name: value for name, value in changes.items()})
    answer = spoken(Family.QWEN3, "image")
    model = load_talker(folder, slots=1, longest=512, **PRECISE)
    codes, _ = speak(model, answer.items(), greedy(Family.QWEN3, max_tokens=6))
    assert np.array_equal(codes, answer.codes[:6])


def test_a_checkpoint_may_be_in_several_files(tmp_path: Path) -> None:
    tensors = load_file(omni_checkpoint(Family.QWEN3) / "model.safetensors")
    halves: list[dict[str, Any]] = [dict([*tensors.items()][0::2]), dict([*tensors.items()][1::2])]
    index: dict[str, str] = {}
    for number, half in enumerate(halves):
        save_file(half, tmp_path / f"{number}.safetensors")
        index |= dict.fromkeys(half, f"{number}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (tmp_path / "stray.safetensors").write_bytes(b"not one of the model's files")
    (tmp_path / "config.json").write_bytes((omni_checkpoint(Family.QWEN3) / "config.json").read_bytes())
    answer = spoken(Family.QWEN3, "text")
    model = load_talker(tmp_path, slots=1, longest=256, **PRECISE)
    codes, _ = speak(model, answer.items(), greedy(Family.QWEN3, max_tokens=4))
    assert np.array_equal(codes, answer.codes[:4])
    with pytest.raises(ConfigurationError, match=r"no tensor thinker\.unknown"):
        CheckpointTensors(tmp_path).tensor("thinker.unknown")


@FAMILIES
def test_warming_up_leaves_no_trace(family: Family) -> None:
    model = load_talker(omni_checkpoint(family), slots=3, longest=300, **PRECISE)
    model.warm_up()
    answer = spoken(family, "text")
    driven = Driven(model)
    for session in range(3):
        driven.open(session, greedy(family, max_tokens=4))
        for item in (*answer.items()[:2], AnswerEnd()):
            model.feed(session, item)
    driven.run()
    for session in range(3):
        assert np.array_equal(driven.made(session), answer.codes[:4])

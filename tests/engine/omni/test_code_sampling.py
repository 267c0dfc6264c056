"""Drawing codes: the same candidates as transformers, fair noise that only seed, frame and code determine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed (make test-vllm)")
pytest.importorskip("transformers", reason="transformers is not installed (make test-vllm)")

from transformers.generation.logits_process import (  # noqa: E402
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from omni_ws.engine.omni.step_process import TalkerSettings  # noqa: E402
from omni_ws.engine.omni.talker_network import SamplingState, gumbel_noise  # noqa: E402
from omni_ws.engine.omni.transformer import (  # noqa: E402
    BlockShape,
    CheckpointTensors,
    Experts,
)

pytestmark = pytest.mark.vllm

VOCABULARY = 40
DRAWS = 4000


def settings(**changes: Any) -> TalkerSettings:
    return TalkerSettings(voice="", temperature=1.0, top_k=0, top_p=1.0).changed({"seed": 1, **changes}, [""])


def draws(asked: TalkerSettings, logits: Any, *, suppressed: list[int], had: list[int]) -> Any:
    """Draw the same frame's code in many slots, each with a seed of its own."""
    state = SamplingState(DRAWS, VOCABULARY, "cpu", suppressed=suppressed, penalised=had)
    for slot in range(DRAWS):
        state.open(slot, asked.changed({"seed": slot}, [""]))
    frames = torch.zeros(DRAWS, dtype=torch.int64)
    return state.draw(logits.expand(DRAWS, -1), frames, torch.ones(DRAWS, dtype=torch.bool))


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_p": 0.6},
        {"temperature": 1.5, "top_k": 12, "top_p": 0.8, "repetition_penalty": 1.3},
        {"repetition_penalty": 0.5},
        {"top_p": 1e-30},
    ],
)
def test_codes_are_drawn_as_transformers_weighs_them(asked: dict[str, Any]) -> None:
    torch.manual_seed(3)
    logits, suppressed, had = 2 * torch.randn(1, VOCABULARY), [3, 17], [0, 1, 2, 5, 8]
    wanted = settings(**asked)
    scores = logits.clone()
    processors: list[Any] = [
        RepetitionPenaltyLogitsProcessor(wanted.repetition_penalty),
        SuppressTokensLogitsProcessor(suppressed),
        TemperatureLogitsWarper(float(wanted.temperature)),
        *([TopKLogitsWarper(wanted.top_k)] if wanted.top_k else []),
        *([TopPLogitsWarper(wanted.top_p)] if wanted.top_p < 1 else []),
    ]
    for process in processors:
        scores = process(torch.tensor([had]), scores)
    expected = scores.softmax(-1)[0].double().numpy()
    drawn = draws(wanted, logits, suppressed=suppressed, had=had).numpy()
    shares = np.bincount(drawn, minlength=VOCABULARY) / DRAWS
    assert shares[expected == 0].sum() == 0
    # Five standard deviations of a share.
    assert (np.abs(shares - expected) <= 5 * np.sqrt(expected * (1 - expected) / DRAWS) + 1e-9).all()


def test_a_temperature_of_zero_takes_the_likeliest() -> None:
    logits = torch.randn(1, VOCABULARY)
    drawn = draws(settings(temperature=0, repetition_penalty=1), logits, suppressed=[], had=[])
    assert (drawn == logits.argmax()).all()


def test_the_smallest_temperature_is_still_finite() -> None:
    logits = 50 * torch.randn(1, VOCABULARY)
    drawn = draws(settings(temperature=1e-30, repetition_penalty=1), logits, suppressed=[], had=[])
    assert (drawn == logits.argmax()).all()


def test_only_active_slots_note_their_codes() -> None:
    state = SamplingState(2, VOCABULARY, "cpu", suppressed=[])
    for slot in range(2):
        state.open(slot, settings(temperature=0, repetition_penalty=100))
    logits = torch.zeros(2, VOCABULARY)
    logits[:, 4], logits[:, 9] = 5, 4
    first = state.draw(logits, torch.tensor([0, 0]), torch.tensor([True, False]))
    second = state.draw(logits, torch.tensor([1, 1]), torch.tensor([True, True]))
    assert (first.tolist(), second.tolist()) == ([4, 4], [9, 4])
    state.open(0, settings(temperature=0, repetition_penalty=100))
    assert state.draw(logits, torch.tensor([0, 0]), torch.tensor([True, True])).tolist() == [4, 9]


def test_further_codebooks_are_drawn_among_the_likeliest_fifty() -> None:
    state = SamplingState(DRAWS, VOCABULARY, "cpu", suppressed=[])
    for slot in range(DRAWS):
        state.open(slot, settings(seed=slot))
    torch.manual_seed(5)
    logits = torch.randn(1, 200)
    frames = torch.zeros(DRAWS, dtype=torch.int64)
    scores = TopPLogitsWarper(0.8)(None, TopKLogitsWarper(50)(None, logits.clone())).softmax(-1)[0].double().numpy()
    seen = []
    for codebook in (1, 15):
        drawn = state.draw_residual(logits.expand(DRAWS, -1), frames, codebook).numpy()
        shares = np.bincount(drawn, minlength=200) / DRAWS
        assert (np.abs(shares - scores) <= 5 * np.sqrt(scores * (1 - scores) / DRAWS) + 1e-9).all()
        seen.append(drawn)
    assert (seen[0] != seen[1]).mean() > 0.5  # each codebook has noise of its own


def test_noise_is_independent_between_seeds_frames_and_codes() -> None:
    seeds, codes = torch.arange(300), torch.arange(100).expand(300, -1)
    first = gumbel_noise(seeds, torch.zeros(300, dtype=torch.int64), codes)
    second = gumbel_noise(seeds, torch.full((300,), 64), codes)
    assert abs(float(first.mean()) - 0.5772) < 0.03
    assert abs(float(first.var()) - np.pi**2 / 6) < 0.06
    for one, other in ((first, second), (first[:-1], first[1:]), (first[:, :-1], first[:, 1:])):
        assert abs(float(np.corrcoef(one.flatten().numpy(), other.flatten().numpy())[0, 1])) < 0.03
    assert torch.equal(first[7:9], gumbel_noise(seeds[7:9], torch.zeros(2, dtype=torch.int64), codes[:2]))


class MadeTensors(dict[str, Any], CheckpointTensors):
    """Random weights by any name."""

    def tensor(self, name: str) -> Any:
        return self[name]


@pytest.mark.parametrize("normalise", [True, False])
def test_experts_are_mixed_alike_however_they_are_gathered(normalise: bool) -> None:
    torch.manual_seed(1)
    experts, inner, size, chosen = 6, 8, 16, 3
    made = MadeTensors(
        {"mlp.gate.weight": torch.randn(experts, size), "mlp.shared_expert_gate.weight": torch.randn(1, size)}
    )
    for part in [*(f"experts.{number}" for number in range(experts)), "shared_expert"]:
        for name, sizes in (("gate", (inner, size)), ("up", (inner, size)), ("down", (size, inner))):
            made[f"mlp.{part}.{name}_proj.weight"] = torch.randn(sizes)
    shape = BlockShape(
        hidden_size=size, layers=1, heads=1, kv_heads=1, head_dim=size, norm_eps=1e-6, rope_theta=1e4,
        axes=(0,) * (size // 2), experts_per_token=chosen, normalise_experts=normalise,
    )  # fmt: skip
    mixture = Experts.load(made, "mlp", shape, "cpu", torch.float32)
    rows = torch.randn(20, size)

    def feed_forward(part: str, row: Any) -> Any:
        gate, up, down = (made[f"mlp.{part}.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return down @ (torch.nn.functional.silu(gate @ row) * (up @ row))

    for count in (1, 5, 20):  # 3 and 15 pairs are gathered, 60 sorted
        for row, mixed in zip(rows[:count], mixture(rows[:count, None])[:, 0], strict=True):
            weights, best = (made["mlp.gate.weight"] @ row).softmax(-1).topk(chosen)
            weights = weights / weights.sum() if normalise else weights
            parts = [w * feed_forward(f"experts.{int(e)}", row) for w, e in zip(weights, best, strict=True)]
            shared = torch.sigmoid(made["mlp.shared_expert_gate.weight"] @ row) * feed_forward("shared_expert", row)
            assert torch.allclose(mixed, sum(parts) + shared, rtol=1e-4, atol=1e-4)

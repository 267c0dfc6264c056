"""Steps of fixed shapes: each shape once before the first session; from graphs on a GPU, with the same codes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed (make test-vllm)")
pytest.importorskip("transformers", reason="transformers is not installed (make test-vllm)")

from support.omni_reference import (  # noqa: E402
    Driven,
    NothingWaits,
    greedy,
    speak,
    spoken,
)
from support.tiny_models import Family, omni_checkpoint  # noqa: E402

from omni_ws.engine.omni.slot_talker import load_talker  # noqa: E402
from omni_ws.engine.omni.talker_network import StepBuffers  # noqa: E402
from omni_ws.engine.omni.vocoder import StepGraphs  # noqa: E402

pytestmark = pytest.mark.vllm


def test_without_cuda_the_step_itself_is_run() -> None:
    steps: list[tuple[int, int]] = []

    def step(batch: int, window: int) -> Any:
        steps.append((batch, window))
        return torch.full((batch,), window)

    graphs = StepGraphs(step, "cpu")
    graphs.warm_up([(1, 256), (2, 256), (1, 300), (2, 300)])
    assert steps == [(2, 300), (2, 256), (1, 300), (1, 256)]
    assert graphs.run(2, 300).tolist() == [300, 300]
    assert len(steps) == 5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("family", Family)
def test_on_a_gpu_graphs_make_the_codes_of_the_cpu(family: Family) -> None:
    """In float32, where only rounding differs."""
    model = load_talker(omni_checkpoint(family), slots=4, longest=768, device="cuda", dtype="float32")
    model.warm_up()
    driven = Driven(model)
    for session, case in enumerate(("text", "audio", "image", "mixed")):
        driven.open(session, greedy(family, max_tokens=24))
        for item in spoken(family, case).items():
            model.feed(session, item)
        driven.step()
    driven.run()
    for session, case in enumerate(("text", "audio", "image", "mixed")):
        assert np.array_equal(driven.made(session), spoken(family, case).codes[:24])
        model.close(session)
    assert model.memory_bytes > 0


def test_what_waits_is_noticed() -> None:
    values = torch.arange(3)
    for waits in (lambda: int(values[1]), lambda: values[values > 1], lambda: values.nonzero()):
        with pytest.raises(AssertionError), NothingWaits():
            waits()


@pytest.mark.parametrize("family", Family)
def test_a_step_does_not_wait_for_the_device(family: Family) -> None:
    """Otherwise a graph could not hold it; for few rows and for many, which experts treat in two ways."""
    model = load_talker(omni_checkpoint(family), slots=16, longest=512)
    inputs = StepBuffers(model.network.space, model.network.hidden_size, model.codebooks)
    with torch.no_grad(), NothingWaits():
        for batch in (1, 16):
            assert model.network.step(inputs, batch, 256).shape == (batch, model.codebooks)


@pytest.mark.parametrize("family", Family)
def test_bfloat16_is_close_to_float32(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the type of a GPU, the state of the first frame: later ones drift apart once a code differs."""
    states: list[Any] = []
    for dtype in ("bfloat16", "float32"):
        model = load_talker(omni_checkpoint(family), slots=1, longest=512, dtype=dtype)
        frame = model.network._frame

        def recorded(state: Any, *others: Any, frame: Any = frame) -> Any:
            states.append(state)
            return frame(state, *others)

        monkeypatch.setattr(model.network, "_frame", recorded)
        for case in ("text", "audio"):
            codes, _ = speak(model, spoken(family, case).items(), greedy(family, max_tokens=1))
            assert len(codes) == 1
    for rough, exact in zip(states[:2], states[2:], strict=True):
        assert rough.dtype is torch.bfloat16
        assert (rough.float() - exact).norm() < 0.03 * exact.norm()

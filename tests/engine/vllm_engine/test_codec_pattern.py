"""The processor for the second model runner, on tensors of its own, since that runner needs a GPU.

The first one runs with the real engine in test_talker.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed (make test-vllm)")
pytest.importorskip("vllm", reason="vLLM is not installed (make test-vllm)")

from vllm import SamplingParams  # noqa: E402
from vllm.exceptions import VLLMValidationError  # noqa: E402
from vllm.v1.sample.logits_processor import LogitsProcessor as FirstInterface  # noqa: E402
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcRequestState  # noqa: E402
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as SecondInterface  # noqa: E402
from vllm.v1.worker.gpu.sample.logits_processor.loader import (  # noqa: E402
    build_custom_logits_processors_params_validator,
)

from omni_ws.engine.vllm.workers import (  # noqa: E402
    CodecPattern,
    CodecPatternRows,
    Pattern,
    extra_arguments,
    processor_name,
)

pytestmark = pytest.mark.vllm

PATTERN = Pattern(first_token=10, codebook_size=4, slots=3, stop=9)
VOCABULARY = 24


def params(pattern: object | None = PATTERN) -> SamplingParams:
    return SamplingParams(extra_args=None if pattern is None else {"codec_pattern": list(pattern)})  # type: ignore[call-overload]


def allowed(logits: Any) -> list[int]:
    return [int(token) for token in torch.nonzero(torch.isfinite(logits)).flatten()]


def expected(done: int) -> list[int]:
    slot = done % 3
    low = 10 + 4 * slot
    return [*([9] if slot == 0 and done else []), *range(low, low + 4)]


def rows(prompts: list[int]) -> tuple[CodecPatternRows, Any]:
    state = LogitsProcRequestState(
        device=torch.device("cpu"),
        max_num_reqs=len(prompts),
        vocab_size=VOCABULARY,
        all_token_ids=None,
        prompt_len=SimpleNamespace(gpu=torch.tensor(prompts, dtype=torch.int32)),
        prefill_len=None,
        total_len=None,
    )
    return CodecPatternRows(None, state), state


def context(requests: list[int], positions: list[int]) -> LogitsContext:
    mapping = torch.tensor(requests, dtype=torch.int32)
    return LogitsContext(
        expanded_idx_mapping=mapping,
        idx_mapping=mapping,
        idx_mapping_np=np.array(requests),
        expanded_local_pos=torch.zeros(len(requests), dtype=torch.int32),
        input_ids=torch.zeros(len(requests), dtype=torch.int32),
        pos=torch.tensor(positions),
        seq_lens_upper_bound_np=np.array(positions) + 1,
    )


def test_the_processor_follows_the_model_runner() -> None:
    first = processor_name(SimpleNamespace(use_v2_model_runner=False))
    second = processor_name(SimpleNamespace(use_v2_model_runner=True))
    assert first == "omni_ws.engine.vllm.workers:CodecPattern"
    assert second == "omni_ws.engine.vllm.workers:CodecPatternRows"
    assert issubclass(CodecPattern, FirstInterface)
    assert issubclass(CodecPatternRows, SecondInterface)
    # vLLM's own loader accepts it, and validates parameters with it.
    validate = build_custom_logits_processors_params_validator([second])
    validate(params())
    with pytest.raises(VLLMValidationError, match="codec_pattern must be"):
        validate(params((1, 2)))


@pytest.mark.parametrize("wrong", [(1, 2, 3), (1, 2, 3, "4"), (-1, 2, 3, 4), (1, 0, 3, 4), (1, 2, 0, 4), (1, 2, 3, -4)])
def test_patterns_that_are_none(wrong: tuple[object, ...]) -> None:
    for processor in (CodecPattern, CodecPatternRows):
        with pytest.raises(ValueError, match="codec_pattern"):
            processor.validate_params(params(wrong))


def test_both_generations_allow_the_same() -> None:
    processor, _ = rows([5])
    assert processor.add_request(0, params()) is True
    processor.apply_staged_writes()
    one_by_one = CodecPattern(None, torch.device("cpu"), False).new_req_logits_processor(params())
    assert one_by_one is not None
    for done in range(9):
        logits = torch.randn(VOCABULARY)
        kept = one_by_one([0] * done, logits.clone())
        together = processor.apply(logits.clone()[None], context([0], [4 + done]))[0]
        assert allowed(kept) == allowed(together) == expected(done)
        assert torch.equal(kept[allowed(kept)], logits[allowed(kept)])
        assert torch.equal(together, kept)


def test_rows_of_a_step_are_told_apart() -> None:
    processor, _ = rows([5, 2, 7, 1])
    assert processor.add_request(0, params()) is True
    assert processor.add_request(1, params(None)) is False
    assert processor.add_request(3, params()) is True
    processor.apply_staged_writes()
    logits = processor.apply(torch.zeros(4, VOCABULARY), context([3, 1, 0, 3], [1, 9, 4, 2]))
    assert [allowed(row) for row in logits] == [expected(1), list(range(VOCABULARY)), expected(0), expected(2)]


def test_a_slot_forgets_the_request_before() -> None:
    processor, _ = rows([5])
    processor.add_request(0, params())
    processor.apply_staged_writes()
    processor.add_request(0, params(None))
    processor.apply_staged_writes()
    assert allowed(processor.apply(torch.zeros(1, VOCABULARY), context([0], [5]))[0]) == list(range(VOCABULARY))
    processor.add_request(0, params())
    processor.apply_staged_writes()
    assert allowed(processor.apply(torch.zeros(1, VOCABULARY), context([0], [5]))[0]) == expected(1)


def test_requests_without_a_pattern_are_left_alone() -> None:
    processor = CodecPattern(None, torch.device("cpu"), False)
    assert processor.new_req_logits_processor(params(None)) is None
    assert extra_arguments(PATTERN) == {"codec_pattern": [10, 4, 3, 9]}

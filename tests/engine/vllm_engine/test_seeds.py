"""Seeds of answers and clauses, which follow one another: on a GPU, more than 64 bits end vLLM's worker."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed (make test-vllm)")

from omni_ws.engine.base import AnswerOptions
from omni_ws.engine.vllm.sampling import AskedSampling, answer_parameters
from omni_ws.engine.vllm.talker import ORPHEUS, Talker, TalkerModel

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning:zmq"),
]

LARGEST = 2**63 - 1


@pytest.mark.parametrize("seed", [LARGEST, -LARGEST - 1, -2, -1, 3])
def test_each_clause_has_a_seed_of_its_own_in_64_bits(seed: int) -> None:
    model: Any = TalkerModel("Talker", {"model": "orpheus"}, setting="vllm.talker_args")
    talker = Talker(model, ORPHEUS, request_id="req", sampling={"seed": seed})
    seeds = [talker._parameters(max_tokens=7, clause=clause).seed for clause in range(3)]
    assert None not in seeds
    assert len(set(np.array(seeds, np.int64).tolist())) == 3


def test_the_seed_of_the_last_answer_fits_too() -> None:
    asked = AskedSampling({"seed": LARGEST, "temperature": 1.0}, {})
    for answers, seed in ((1, LARGEST), (4, LARGEST - 3)):
        assert answer_parameters(asked, {}, AnswerOptions(choices=answers)).seed == seed

"""What llama.cpp makes of SmolLM2: ``python -m support.record_llama_cpp`` writes tests/data/smollm2_llama_cpp.json.

Needs the package xllamacpp, which the tests themselves do not: they compare with what was recorded.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from support.real_models import fetched

RECORDED = Path(__file__).parents[1] / "data" / "smollm2_llama_cpp.json"
_SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
_ASKED = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
_ANSWERED = "{}<|im_end|>\n"
PROMPTS = (
    "Once upon a time",
    "def largest(numbers):\n",
    "Le chat est assis sur – naïve –",
    _SYSTEM + _ASKED.format("Name three primary colors."),
    _SYSTEM
    + _ASKED.format("My sister Ada lives in Lisbon.")
    + _ANSWERED.format("That is lovely.")
    + _ASKED.format("Where does Ada live?"),
)
TOKENS = 32


def main() -> None:
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(next(fetched("smollm2").glob("*.gguf")))
    parameters.n_ctx, parameters.n_parallel, parameters.n_gpu_layers = 1024, 1, 0
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
    parameters.verbosity, parameters.ui = -1, False
    server = xllamacpp.Server(parameters)
    answers = [_answer(server, prompt) for prompt in PROMPTS]
    made_by = f"python -m support.record_llama_cpp, xllamacpp {version('xllamacpp')}, greedy"
    RECORDED.write_text(json.dumps({"made_by": made_by, "answers": answers}, indent=1, ensure_ascii=False) + "\n")


def _answer(server: Any, prompt: str) -> dict[str, Any]:
    body = {"prompt": prompt, "n_predict": TOKENS, "temperature": 0, "n_probs": 1, "cache_prompt": False}
    answer = server.handle_completions(body)
    tokens = answer["choices"][0]["logprobs"]["content"]
    return {
        "prompt": prompt,
        "prompt_tokens": answer["usage"]["prompt_tokens"],
        "tokens": [token["id"] for token in tokens],
        "text": answer["choices"][0]["text"],
        "logprobs": [round(token["logprob"], 4) for token in tokens],
    }


if __name__ == "__main__":
    main()

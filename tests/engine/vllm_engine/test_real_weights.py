"""SmolLM2 on vLLM: what a model that means something says, compared with llama.cpp and with transformers.

Answers are compared by log-probabilities, never word by word: of two words that are nearly as likely, another precision
prefers the other.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio
import soxr
from support.engine_answers import Input, streamed
from support.live_server import LiveServer, live_server
from support.native_client import NativeClient, native_client
from support.patience import PATIENCE_SEC
from support.raw_http import post
from support.real_models import KEY, fetched, llama_cpp_server
from support.speech_clips import SAMPLE_RATE, WORDS, clip_bytes
from support.vllm_engine import request
from support.ways_in import WAYS, is_loud

from omni_ws.config.model import VllmConfig
from omni_ws.core.token_session import TokenRanges
from omni_ws.engine.asr.recogniser_engine import RecogniserEngine
from omni_ws.engine.asr.whisper import WhisperRecogniser
from omni_ws.engine.base import AnswerOptions, ReadoutManifest, TextOutput, TokenGeneration, TokenOutput
from omni_ws.engine.composed.engine import ComposedEngine
from omni_ws.engine.tts.speech_engine import SpeechEngine
from omni_ws.engine.tts.voice_process import VoiceProcess
from omni_ws.engine.vllm.engine import VllmEngine
from omni_ws.engine.vllm.language_model import LanguageModel
from omni_ws.engine.vllm.readouts import Readouts, ReadoutVectors
from omni_ws.scenarios.speech import word_errors

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
]

SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
ASKED = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
PROMPTS = (
    "Once upon a time",
    "def largest(numbers):\n",
    "Le chat est assis sur – naïve –",
    SYSTEM + ASKED.format("Name three primary colors."),
    SYSTEM
    + ASKED.format("My sister Ada lives in Lisbon.")
    + "That is lovely.<|im_end|>\n"
    + ASKED.format("Where does Ada live?"),
)
ARGS = {
    "enforce_eager": True,
    "kv_cache_memory_bytes": 128 << 20,
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "use_tqdm_on_load": False,
}
LAYERS, CONCEPTS, HIDDEN_SIZE = (9, 20), 4, 576
#: Of ``pcm`` of /v1/audio/speech, in Hz.
VOICE_RATE = 24_000
INSTRUCTIONS = "Answer in one short sentence."


@pytest.fixture(scope="module")
def folder() -> Path:
    from support.real_models import smollm2

    return smollm2()


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def vectors() -> ReadoutVectors:
    """Directions at random, of length one."""
    random = np.random.default_rng(5)
    matrices = random.standard_normal((len(LAYERS), CONCEPTS, HIDDEN_SIZE)).astype(np.float32)
    matrices /= np.linalg.norm(matrices, axis=2, keepdims=True)
    manifest = ReadoutManifest(concepts=("a", "b", "c", "d"), layers=LAYERS, hidden_size=HIDDEN_SIZE, dtype="float16")
    return ReadoutVectors(manifest, tuple(matrices))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine(folder: Path, vectors: ReadoutVectors) -> AsyncIterator[VllmEngine]:
    engine = VllmEngine(VllmConfig(model=str(folder), args=ARGS), readouts=Readouts(vectors))
    await engine.start()
    yield engine
    await engine.stop()


async def scores(engine: VllmEngine, tokens: Sequence[int]) -> tuple[list[float], list[bool]]:
    """The log-probability of each token but the first, and whether it was the most probable one."""
    options = AnswerOptions(raw_prompt=True, token_prompt=True, echo=True, only_echo=True, logprobs=1)
    outputs = streamed(engine, request(Input(json.dumps([*tokens])), options=options))
    told = [
        token for output in [o async for o in outputs] if isinstance(output, TextOutput) for token in output.logprobs
    ]
    assert len(told) == len(tokens)
    return [token.logprob or 0.0 for token in told[1:]], [token.logprob == token.top[0].logprob for token in told[1:]]


@pytest.fixture(scope="module")
def llama_cpp() -> Iterator[httpx.Client]:
    with llama_cpp_server() as port:
        headers = {"Authorization": f"Bearer {KEY}"}
        with httpx.Client(base_url=f"http://127.0.0.1:{port}/v1", headers=headers, timeout=PATIENCE_SEC) as client:
            yield client


@pytest.mark.parametrize("prompt_text", PROMPTS, ids=lambda text: text[-20:].strip())
async def test_log_probabilities_are_those_of_llama_cpp(
    engine: VllmEngine, tokenizer: Any, llama_cpp: httpx.Client, prompt_text: str
) -> None:
    """Along llama.cpp's answer, which was greedy. It computes with activations of 8 bits, vLLM in bfloat16."""
    asked = {"prompt": prompt_text, "n_predict": 32, "temperature": 0, "n_probs": 1, "cache_prompt": False}
    answer = (await asyncio.to_thread(llama_cpp.post, "/completions", json=asked)).raise_for_status().json()
    told = answer["choices"][0]["logprobs"]["content"]
    prompt = tokenizer(prompt_text).input_ids
    assert len(prompt) == answer["usage"]["prompt_tokens"]
    found, greedy = await scores(engine, [*prompt, *(token["id"] for token in told)])
    behind = len(prompt) - 1
    apart = np.abs(np.array(found[behind:]) - np.array([token["logprob"] for token in told]))
    assert apart.mean() < 0.1
    assert apart.max() < 0.6
    assert np.mean(greedy[behind:]) > 0.9


async def test_readouts_are_of_the_hidden_states_of_transformers(
    engine: VllmEngine, tokenizer: Any, folder: Path, vectors: ReadoutVectors
) -> None:
    from support.vllm_engine import Reference

    tokens = tokenizer(PROMPTS[4]).input_ids
    reference = Reference(folder)
    wanted = reference.readouts(tokens, vectors)
    call = TokenGeneration(
        request_id="readouts",
        tokens=tokens,
        images=(),
        max_tokens=0,
        readout_ranges=TokenRanges([(0, len(tokens))]),
    )
    events = [event async for event in engine.tokens.generate_tokens(call)]
    found = np.array([event.readout for event in events if isinstance(event, TokenOutput)])
    assert found.shape == wanted.shape
    for index, layer in enumerate(LAYERS):
        part = slice(index * CONCEPTS, (index + 1) * CONCEPTS)
        apart = np.abs(found - wanted)[:, part]
        # The first position is an attention sink, so large that all others would hide in its shade.
        assert apart[1:].max() < 0.02 * np.abs(wanted[1:, part]).max()
        assert apart[0].max() < 0.01 * float(reference.streams[layer][0].norm())


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def server(engine: VllmEngine) -> AsyncIterator[LiveServer]:
    """The embedded parts hear and speak; the model, which is text alone, answers."""
    fetched("whisper-tiny-en")
    async with live_server(
        ComposedEngine(engine, asr=RecogniserEngine(WhisperRecogniser()), tts=SpeechEngine(VoiceProcess()))
    ) as server:
        yield server


async def test_a_spoken_question_by_each_way_in(server: LiveServer) -> None:
    for name, ask in WAYS.items():
        answer = await ask(server)
        assert answer.heard is None or "forward" in answer.heard.lower(), (name, answer.heard)
        assert answer.text, name
        assert is_loud(answer.audio), name


@pytest.fixture
def prompts(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the model is given, piece by piece."""
    given: list[str] = []
    render = LanguageModel.render

    async def noted(self: LanguageModel, prompt: Any) -> Any:
        rendered = await render(self, prompt)
        given.append(tokenizer.decode(rendered["prompt_token_ids"]))
        return rendered

    monkeypatch.setattr(LanguageModel, "render", noted)
    return given


async def spoken_turn(client: NativeClient, audio: bytes) -> tuple[str, str]:
    """What was heard and what was answered; the answer is spoken too."""
    for start in range(0, len(audio), 6400):
        await client.chunk(audio[start : start + 6400])
    await client.chunk(end=True)
    answer = await client.answer()
    assert answer.reason in ("stop", "length")
    assert len(answer.audio) > SAMPLE_RATE
    heard = [chunk["text"] for chunk in answer.chunks if chunk["modality"] == "transcript" and not chunk.get("interim")]
    return "".join(heard).strip(), answer.text


async def likelihood(engine: VllmEngine, tokenizer: Any, messages: list[dict[str, str]], answer: str) -> float:
    """The log-probability of an answer after these messages."""
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    before = tokenizer(prompt).input_ids
    found, _ = await scores(engine, [*before, *tokenizer(answer).input_ids])
    return sum(found[len(before) - 1 :])


async def test_a_spoken_conversation_whose_second_turn_refers_to_the_first(
    engine: VllmEngine, server: LiveServer, tokenizer: Any, prompts: list[str]
) -> None:
    """The voice of the server itself asks the second question."""
    said = await post(server.port, "/v1/audio/speech", {"input": "What did I say to you?", "response_format": "pcm"})
    question = soxr.resample(np.frombuffer(said.body, "<i2"), VOICE_RATE, SAMPLE_RATE).tobytes()
    async with native_client(server) as client:
        await client.configure(
            modalities=["text", "audio"], instructions=INSTRUCTIONS, sampling={"max_tokens": 24, "temperature": 0}
        )
        first, answer = await spoken_turn(client, clip_bytes("goforward"))
        assert word_errors(WORDS["goforward"], re.sub("[^a-z ]", "", first.lower().replace("10", "ten"))).wrong <= 1
        prompts.clear()
        second, _ = await spoken_turn(client, question)
    assert second
    messages = [
        {"role": "system", "content": INSTRUCTIONS},
        {"role": "user", "content": first},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": second},
    ]
    whole = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert "".join(prompts).endswith(whole)

    # It tells from this what was said; without the first turn it would be a guess.
    told = f"You said: {first}."
    knowing = await likelihood(engine, tokenizer, messages, told)
    guessing = await likelihood(engine, tokenizer, [messages[0], messages[3]], told)
    assert knowing > guessing + 10

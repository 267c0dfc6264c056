"""Rarely used options with the real AsyncLLM: log-probabilities, choices, structured answers, priorities."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from support.engine_answers import Input, final, said, streamed
from support.patience import until
from support.vllm_engine import GREEDY, answer, llm_of, plain_answer, request, unfinished

from omni_ws.core.chunks import FinishReason, InputMode, OutputModality, TokenLogprob
from omni_ws.engine.base import AnswerOptions, EngineOutput, StructuredOutput, TextOutput, TokenGeneration
from omni_ws.engine.vllm.engine import VllmEngine
from omni_ws.engine.vllm.sampling import MAX_SCHEMA_BYTES
from omni_ws.errors import InvalidValue, UnsupportedParameter

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

SNAPSHOT = InputMode.SNAPSHOT
#: Half of all bytes are no characters: answers of this kind hold many tokens that make a character together.
NOISY = {"temperature": 2.0, "seed": 3, "max_tokens": 160}
PLACE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 30},
        "tags": {"type": "array", "items": {"enum": ["é", "ß"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["city", "days", "tags"],
    "additionalProperties": False,
}


@pytest.fixture
def engine(text_engine: VllmEngine) -> VllmEngine:
    return text_engine


async def outputs_of(engine: VllmEngine, source: Input, **changes: Any) -> list[EngineOutput]:
    return [output async for output in streamed(engine, request(source, **changes))]


def logprobs_of(outputs: list[EngineOutput], choice: int = 0) -> list[TokenLogprob]:
    texts = (output for output in outputs if isinstance(output, TextOutput) and output.choice == choice)
    return [one for output in texts for one in output.logprobs]


def spelled(tokens: Iterable[TokenLogprob]) -> str:
    """Return the text of the tokens. Control tokens are part of an answer, but not of its text."""
    data = b"".join(one.data for one in tokens if not one.token.startswith("<|"))
    return data.decode("utf-8", "replace")


async def sampled(engine: VllmEngine, prompt: str, logprobs: int, **sampling: Any) -> tuple[str, list[Any], list[int]]:
    """Return vLLM's own text, log-probabilities and tokens."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    parameters = SamplingParams(**sampling, logprobs=logprobs, output_kind=RequestOutputKind.FINAL_ONLY)
    outputs = [output async for output in llm_of(engine).generate({"prompt": prompt}, parameters, "sampled")]
    (completion,) = outputs[-1].outputs
    return completion.text, completion.logprobs, list(completion.token_ids)


async def test_the_engine_says_what_it_can_do(engine: VllmEngine) -> None:
    capabilities = engine.capabilities
    assert capabilities.logprobs
    assert capabilities.structured_output
    assert capabilities.choices
    assert capabilities.priority
    assert capabilities.tools


@pytest.mark.parametrize("top", [0, 3])
@pytest.mark.parametrize("sampling", [GREEDY, NOISY], ids=["letters", "noise"])
async def test_every_token_is_told_once_with_its_text(engine: VllmEngine, top: int, sampling: dict[str, Any]) -> None:
    outputs = await outputs_of(
        engine, Input("Hello"), input_mode=SNAPSHOT, sampling=sampling, options=AnswerOptions(logprobs=top)
    )
    text, places, tokens = await sampled(engine, "user: Hello\nassistant:", top, **sampling)
    told = logprobs_of(outputs)
    assert said(outputs) == text
    assert [one.logprob for one in told] == [
        pytest.approx(place[token].logprob, abs=1e-4) for place, token in zip(places, tokens, strict=True)
    ]
    assert all(len(one.top) == top for one in told)
    for one, place in zip(told, places, strict=True):
        likeliest = sorted(place.values(), key=lambda entry: entry.rank)[:top]
        assert [other.logprob for other in one.top] == [pytest.approx(entry.logprob, abs=1e-4) for entry in likeliest]
    assert [one.token for one in told] == [one.data.decode("utf-8", "replace") for one in told]
    # A token is a byte here, so an answer may end within a character.
    assert spelled(told).rstrip("\ufffd") == text.rstrip("\ufffd")
    # Each output contains the tokens of its own text.
    for output in outputs[:-2]:
        assert isinstance(output, TextOutput)
        assert spelled(output.logprobs) == output.text


async def test_tokens_wait_with_the_text_that_a_stop_string_holds_back(engine: VllmEngine) -> None:
    whole = await plain_answer(engine, "user: Hello\nassistant:")
    stop = whole[12:16]
    sampling = {**GREEDY, "stop": [stop, "x" * 30]}
    outputs = await outputs_of(engine, Input("Hello"), sampling=sampling, options=AnswerOptions(logprobs=0))
    text = said(outputs)
    assert text == whole[: whole.index(stop)]
    assert "".join(one.token for one in logprobs_of(outputs)) == text
    assert final(outputs).reason is FinishReason.STOP


async def test_a_held_back_end_comes_with_its_tokens(engine: VllmEngine) -> None:
    sampling = {**GREEDY, "stop": ["x" * 30]}
    outputs = await outputs_of(engine, Input("Hello"), sampling=sampling, options=AnswerOptions(logprobs=1))
    assert said(outputs) == await plain_answer(engine, "user: Hello\nassistant:")
    assert len(logprobs_of(outputs)) == GREEDY["max_tokens"]


async def test_logprobs_of_an_input_that_comes_in_pieces(engine: VllmEngine, early_steps: Callable[[], int]) -> None:
    source = Input(open_end=True)
    answering = asyncio.create_task(outputs_of(engine, source, options=AnswerOptions(logprobs=1)))
    for pieces in range(1, 5):
        source.send("one two three four five six seven eight " * 4)
        await until(lambda: early_steps() >= pieces)  # noqa: B023 - called before the next piece
    source.close()
    outputs = await answering
    prompt = "user: " + "one two three four five six seven eight " * 16 + "\nassistant:"
    text, places, tokens = await sampled(engine, prompt, 1, **GREEDY)
    assert said(outputs) == text
    expected = [pytest.approx(place[token].logprob, abs=1e-4) for place, token in zip(places, tokens, strict=True)]
    assert [one.logprob for one in logprobs_of(outputs)] == expected


async def test_more_logprobs_than_the_model_tells_are_refused(engine: VllmEngine) -> None:
    with pytest.raises(InvalidValue) as refused:
        await outputs_of(engine, Input("Hello"), options=AnswerOptions(logprobs=21))
    assert refused.value.param == "logprobs"
    assert logprobs_of(await outputs_of(engine, Input("Hello"), options=AnswerOptions(logprobs=20)))


async def test_several_answers_to_one_input(engine: VllmEngine, early_steps: Callable[[], int]) -> None:
    sampling = {"temperature": 1.0, "seed": 5, "max_tokens": 12}
    options = AnswerOptions(choices=3, logprobs=0)
    source = Input(open_end=True)
    answering = asyncio.create_task(outputs_of(engine, source, sampling=sampling, options=options))
    source.send("Say something " * 20)
    await until(lambda: early_steps() > 0)
    source.close()
    outputs = await answering
    texts = [
        "".join(one.text for one in outputs if isinstance(one, TextOutput) and one.choice == choice)
        for choice in range(3)
    ]
    assert len(set(texts)) == 3
    assert [len(logprobs_of(outputs, choice)) for choice in range(3)] == [12, 12, 12]
    last = final(outputs)
    assert last.reasons == (FinishReason.LENGTH,) * 3
    assert last.usage.output_tokens == 36
    assert last.usage.input_tokens == len("user: " + "Say something " * 20 + "\nassistant:")


async def test_several_answers_end_each_for_itself(engine: VllmEngine) -> None:
    sampling = {"temperature": 2.0, "seed": 11, "max_tokens": 40, "stop": ["a", "e", "i"]}
    outputs = await outputs_of(engine, Input("Hello"), sampling=sampling, options=AnswerOptions(choices=4))
    assert len(final(outputs).reasons) == 4
    assert not any(set(one.text) & set("aei") for one in outputs if isinstance(one, TextOutput))


async def test_several_answers_without_chance_are_refused(engine: VllmEngine) -> None:
    with pytest.raises(InvalidValue) as refused:
        await outputs_of(engine, Input("Hello"), options=AnswerOptions(choices=2))
    assert refused.value.param == "n"


async def test_cancelling_several_answers_frees_all_their_places(engine: VllmEngine) -> None:
    sampling = {"temperature": 1.0, "max_tokens": 1000}
    task = asyncio.create_task(outputs_of(engine, Input("Hello"), sampling=sampling, options=AnswerOptions(choices=3)))
    await until(lambda: unfinished(engine) == 3)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert unfinished(engine) == 0


@pytest.mark.parametrize("early", [False, True], ids=["at once", "in pieces"])
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.5, "seed": 2}], ids=["greedy", "random"])
async def test_an_answer_keeps_to_its_schema(
    engine: VllmEngine, sampling: dict[str, Any], early: bool, early_steps: Callable[[], int]
) -> None:
    options = AnswerOptions(structure=StructuredOutput(schema=PLACE))
    source = Input(open_end=True)
    answering = asyncio.create_task(answer(engine, source, sampling={**sampling, "max_tokens": 200}, options=options))
    source.send("Where to? " * 20)
    if early:
        await until(lambda: early_steps() > 0)
    source.close()
    text, final = await answering
    place = json.loads(text)
    assert place.keys() == PLACE["properties"].keys()
    assert place["city"] in ("Oslo", "Rome")
    assert 1 <= place["days"] <= 30
    assert set(place["tags"]) <= {"é", "ß"}
    assert final.reason is FinishReason.STOP


async def test_any_json_object(engine: VllmEngine) -> None:
    sampling = {"temperature": 1.0, "seed": 4, "max_tokens": 1500}
    outputs = await outputs_of(
        engine,
        Input("Hello"),
        sampling=sampling,
        options=AnswerOptions(structure=StructuredOutput(), logprobs=0),
    )
    text = said(outputs)
    assert text.startswith("{")
    assert len(logprobs_of(outputs)) in (
        final(outputs).usage.output_tokens,
        final(outputs).usage.output_tokens - 1,
    )
    if final(outputs).reason is FinishReason.STOP:
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nonsense"},
        {"type": "integer", "multipleOf": 7},
        {"$ref": "#/nowhere"},
        {"type": "string", "pattern": "(["},
        {"enum": ["x" * MAX_SCHEMA_BYTES]},
    ],
    ids=["type", "keyword", "reference", "pattern", "size"],
)
async def test_a_schema_that_nothing_can_keep_to_is_refused(engine: VllmEngine, schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue) as refused:
        await answer(engine, Input("Hello"), options=AnswerOptions(structure=StructuredOutput(schema=schema)))
    assert refused.value.param == "response_format"


async def test_a_schema_of_the_greatest_size(engine: VllmEngine) -> None:
    around = len(json.dumps({"enum": [""]}, separators=(",", ":")))
    schema = {"enum": ["x" * (MAX_SCHEMA_BYTES - around)]}
    options = AnswerOptions(structure=StructuredOutput(schema=schema))
    text, _ = await answer(engine, Input("Hello"), sampling={"temperature": 0.0, "max_tokens": 5}, options=options)
    assert text == '"xxxx'


async def test_the_urgent_request_is_answered_before_those_that_wait(engine: VllmEngine) -> None:
    from support.tiny_models import ENGINE_ARGS

    order: list[str] = []

    async def ask(name: str, priority: int, tokens: int) -> None:
        sampling = {"temperature": 0.0, "max_tokens": tokens}
        await answer(engine, Input(name), sampling=sampling, options=AnswerOptions(priority=priority))
        order.append(name)

    places = ENGINE_ARGS["max_num_seqs"]
    async with asyncio.TaskGroup() as group:
        for number in range(places):
            group.create_task(ask(f"running {number}", 0, 300))
        await until(lambda: unfinished(engine) == places)
        for number in range(3):
            group.create_task(ask(f"waiting {number}", 5, 30))
        await until(lambda: unfinished(engine) == places + 3)
        group.create_task(ask("urgent", -1, 30))
    late = [name for name in order if not name.startswith("running")]
    assert late[0] == "urgent"


async def test_keys_do_not_share_what_was_computed(engine: VllmEngine) -> None:
    from omni_ws.engine.vllm.thinker import Thinker

    cached: list[Any] = []
    original = Thinker._answer

    async def watched(self: Thinker, *arguments: Any) -> None:
        await original(self, *arguments)
        cached.append(self.cached_tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Thinker, "_answer", watched)
        for owner in ("ann", "bob", "ann", None, None):
            await answer(engine, Input("q" * 300), input_mode=SNAPSHOT, owner=owner)
    first, other, again, nobody, nobody_again = cached
    assert (first, other, nobody) == (0, 0, 0)
    assert again > 200
    assert nobody_again > 200


async def test_without_a_voice_several_answers_are_still_text(engine: VllmEngine) -> None:
    with pytest.raises(UnsupportedParameter):
        await answer(engine, Input("Hello"), modalities=frozenset({OutputModality.AUDIO}))


async def test_an_engine_without_readouts_is_not_made_eager(engine: VllmEngine) -> None:
    config = engine._thinker.llm.vllm_config.parallel_config
    assert not config.worker_extension_cls
    asked = TokenGeneration(request_id="any", tokens=[5, 6], images=(), max_tokens=1)
    events = [event async for event in engine.tokens.generate_tokens(asked)]
    assert len(events) == 2

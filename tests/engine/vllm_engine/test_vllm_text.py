"""The Thinker with the real AsyncLLM and a model of random weights: text in, text out."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from support.engine_answers import Answer, Input, reading, said, streamed
from support.patience import until
from support.vllm_engine import GREEDY, answer, early_budget, plain_answer, request, unfinished

from omni_ws.core.chunks import FinishReason, InputMode, Modality, OutputModality, Task
from omni_ws.core.history import Message
from omni_ws.engine.base import AnswerOptions, TextOutput
from omni_ws.engine.vllm.engine import VllmEngine
from omni_ws.errors import ContextLengthExceeded, InvalidValue, UnsupportedParameter

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

WORDS = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
LONG = WORDS * 8


@pytest.fixture
def engine(text_engine: VllmEngine) -> VllmEngine:
    return text_engine


async def early_answer(engine: VllmEngine, pieces: list[str], **changes: Any) -> tuple[str, int]:
    """Return the answer to pieces, each sent after the one before was computed, and how many were computed early.

    The pieces count as one prompt.
    """
    from omni_ws.engine.vllm.thinker import Thinker

    thinkers: list[Thinker] = []
    steps: list[int] = []
    work_early, begin_answer = Thinker._work_early, Thinker._answer

    async def working(self: Thinker, *arguments: Any) -> None:
        thinkers.append(self)
        await work_early(self, *arguments)

    async def answering(self: Thinker, *arguments: Any) -> None:
        steps.append(self.early_steps)
        await begin_answer(self, *arguments)

    source = Input(open_end=True)

    def computed(count: int) -> bool:
        return sum(thinker.early_steps for thinker in thinkers) >= count

    async def speak() -> None:
        for number, piece in enumerate(pieces):
            await until(partial(computed, number))
            source.send(piece)
        source.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Thinker, "_work_early", working)
        patch.setattr(Thinker, "_answer", answering)
        (text, final), _ = await asyncio.gather(answer(engine, source, **changes), speak())
    assert final.usage.input_tokens == len(f"user: {''.join(pieces)}\nassistant:")
    if final.reason is FinishReason.LENGTH:
        assert final.usage.output_tokens == changes.get("sampling", GREEDY)["max_tokens"]
    return text, steps[0]


async def test_says_what_the_model_says(engine: VllmEngine) -> None:
    text, final = await answer(engine, Input("Hello there."), input_mode=InputMode.SNAPSHOT)
    assert text == await plain_answer(engine, "user: Hello there.\nassistant:")
    assert text
    assert final.reason is FinishReason.LENGTH
    assert final.usage.output_tokens == GREEDY["max_tokens"]
    assert final.usage.input_tokens == len("user: Hello there.\nassistant:")


async def test_says_what_the_checkpoint_says_without_vllm(engine: VllmEngine) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = engine.config.model
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer("user: Hello there.\nassistant:", return_tensors="pt", add_special_tokens=False)
    tokens = model.generate(**prompt, max_new_tokens=GREEDY["max_tokens"], do_sample=False)[0]
    expected = tokenizer.decode(tokens[prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    text, _ = await answer(engine, Input("Hello there."))
    assert text == expected


async def test_the_template_holds_instructions_history_and_the_input(engine: VllmEngine) -> None:
    history = (Message("user", "A question"), Message("assistant", "An answer"))
    text, _ = await answer(engine, Input("Another one"), instructions="Be brief.", history=history)
    prompt = "system: Be brief.\nuser: A question\nassistant: An answer\nuser: Another one\nassistant:"
    assert text == await plain_answer(engine, prompt)


@pytest.mark.parametrize(
    ("role", "prompt"),
    [
        ("assistant", "system: Be brief.\nuser: A question\nassistant: Well, I"),
        ("system", "system: Be brief.\nuser: A question\nsystem: Well, I\nassistant:"),
    ],
)
@pytest.mark.parametrize("mode", list(InputMode))
async def test_the_last_message_may_be_anothers(engine: VllmEngine, role: str, prompt: str, mode: InputMode) -> None:
    text, final = await answer(
        engine,
        Input("Well, I"),
        instructions="Be brief.",
        history=(Message("user", "A question"),),
        options=AnswerOptions(input_role=role),
        input_mode=mode,
    )
    assert text == await plain_answer(engine, prompt)
    assert final.usage.input_tokens == len(prompt)


@pytest.mark.parametrize("mode", list(InputMode))
@pytest.mark.parametrize("begun", ["W", "Well, I", "a <|eos|> b"])
async def test_an_answer_that_another_server_began_goes_on(engine: VllmEngine, begun: str, mode: InputMode) -> None:
    prompt = "user: Hello there.\nassistant:"
    text, final = await answer(engine, Input("Hello there."), begun=begun, input_mode=mode)
    if "<" not in begun:  # which is no control token for us
        assert text == await plain_answer(engine, prompt + begun, max_tokens=GREEDY["max_tokens"] - len(begun))
    # A byte is a token here.
    assert final.usage.input_tokens == len(prompt)
    assert final.usage.output_tokens == GREEDY["max_tokens"]
    assert final.reason is FinishReason.LENGTH


async def test_what_a_user_writes_is_no_control_token(engine: VllmEngine) -> None:
    _, final = await answer(engine, Input("<|eos|>"), input_mode=InputMode.SNAPSHOT)
    # A byte is a token here: as a control token there would be six fewer.
    assert final.usage.input_tokens == len("user: <|eos|>\nassistant:")


async def test_text_that_comes_in_pieces_is_computed_early_and_answered_alike(engine: VllmEngine) -> None:
    pieces = [LONG[start : start + 150] for start in range(0, len(LONG), 150)]
    text, early = await early_answer(engine, pieces)
    assert early >= len(pieces) - 1
    assert text == await plain_answer(engine, f"user: {LONG}\nassistant:")


@pytest.mark.parametrize("seed", range(4))
async def test_a_prompt_has_the_same_tokens_however_it_comes(engine: VllmEngine, seed: int) -> None:
    """Random cuts and pauses; the end arrives while a thread or the model is still processing an earlier piece."""
    chance = random.Random(seed)
    expected = len(f"user: {LONG}\nassistant:")

    async def speak(source: Input) -> None:
        cuts = sorted(chance.sample(range(1, len(LONG)), chance.randint(0, 2)))
        for start, end in pairwise([0, *cuts, len(LONG)]):
            source.send(LONG[start:end])
            # Early work begins after 20 ms.
            await asyncio.sleep(chance.uniform(0.015, 0.03))
        source.close()

    async def tokens(**sampling: Any) -> int:
        source = Input(open_end=True)
        asked = {"temperature": 0.0, "max_tokens": 1, **sampling}
        (_, final), _ = await asyncio.gather(answer(engine, source, sampling=asked), speak(source))
        return final.usage.input_tokens

    sampling = [{}, {}, {}, {"stop": "~"}] * 6
    assert await asyncio.gather(*(tokens(**more) for more in sampling)) == [expected] * len(sampling)


async def test_early_work_is_the_same_with_a_stop_string(engine: VllmEngine) -> None:
    """vLLM does not support stop strings with streamed prompts, so the prefix cache is used."""
    pieces = [LONG[start : start + 150] for start in range(0, len(LONG), 150)]
    whole = await plain_answer(engine, f"user: {LONG}\nassistant:")
    stop = whole[len(whole) // 2 :][:2]
    text, early = await early_answer(engine, pieces, sampling={**GREEDY, "stop": stop})
    assert early >= len(pieces) - 1
    assert text == whole[: whole.index(stop)]


async def test_early_work_is_the_same_with_a_seed(engine: VllmEngine) -> None:
    sampling = {"temperature": 1.0, "seed": 7, "max_tokens": 16}
    pieces = [LONG[start : start + 150] for start in range(0, len(LONG), 150)]
    once, _ = await answer(engine, Input(LONG), sampling=sampling, input_mode=InputMode.SNAPSHOT)
    text, early = await early_answer(engine, pieces, sampling=sampling)
    assert early >= len(pieces) - 1
    assert text == once
    other, _ = await answer(engine, Input(LONG), sampling={**sampling, "seed": 8}, input_mode=InputMode.SNAPSHOT)
    assert other != once


async def test_streamed_prompts_leave_half_of_the_places_to_answers(engine: VllmEngine) -> None:
    from support.tiny_models import ENGINE_ARGS

    slots, _ = early_budget(engine)
    assert slots == ENGINE_ARGS["max_num_seqs"] // 2
    sources = [Input(WORDS * 2, open_end=True) for _ in range(slots + 2)]
    answers = [asyncio.create_task(answer(engine, source)) for source in sources]
    await until(lambda: early_budget(engine)[0] == 0)
    # Requests that wait for input do not block others.
    await answer(engine, Input("Hello."))
    for source in sources:
        source.close()
    texts = {text for text, _ in await asyncio.gather(*answers)}
    assert texts == {await plain_answer(engine, f"user: {WORDS * 2}\nassistant:")}


async def test_max_tokens_ends_the_answer(engine: VllmEngine) -> None:
    _, final = await answer(engine, Input("Hello"), sampling={**GREEDY, "max_tokens": 3})
    assert (final.reason, final.usage.output_tokens) == (FinishReason.LENGTH, 3)


async def test_a_stop_string_ends_the_answer_before_it(engine: VllmEngine) -> None:
    whole = await plain_answer(engine, "user: Hello\nassistant:")
    stop = whole[len(whole) // 2 :][:2]
    text, final = await answer(engine, Input("Hello"), sampling={**GREEDY, "stop": [stop]})
    assert text == whole[: whole.index(stop)]
    assert final.reason is FinishReason.STOP


async def test_without_max_tokens_the_answer_fills_the_context(engine: VllmEngine) -> None:
    from support.tiny_models import ENGINE_ARGS

    filling = "x" * (ENGINE_ARGS["max_model_len"] - 50 - len("user: \nassistant:"))
    _, final = await answer(engine, Input(filling), sampling={"temperature": 0.0})
    assert (final.reason, final.usage.output_tokens) == (FinishReason.LENGTH, 50)
    (warning,) = final.warnings
    assert (warning.code, str(ENGINE_ARGS["max_model_len"]) in warning.message) == ("context_length_exceeded", True)
    # A limit of the client's own that ends it is no surprise.
    _, final = await answer(engine, Input(filling), sampling={"temperature": 0.0, "max_tokens": 50})
    assert (final.reason, final.warnings) == (FinishReason.LENGTH, ())


@pytest.mark.parametrize("mode", list(InputMode))
async def test_an_input_over_the_context_is_refused(engine: VllmEngine, mode: InputMode) -> None:
    with pytest.raises(ContextLengthExceeded):
        await answer(engine, Input("x" * 5000), input_mode=mode)


async def test_an_input_that_grows_over_the_context_is_refused_while_it_grows(engine: VllmEngine) -> None:
    source = Input(*[WORDS] * 40, open_end=True)
    with pytest.raises(ContextLengthExceeded):
        await answer(engine, source)


async def test_sampling_that_vllm_refuses_is_the_clients_fault(engine: VllmEngine) -> None:
    with pytest.raises(InvalidValue):
        await answer(engine, Input("Hello"), sampling={"temperature": -1.0})


async def test_stage_sampling_of_the_thinker_counts_over_sampling(engine: VllmEngine) -> None:
    _, final = await answer(engine, Input("Hello"), stage_sampling={"thinker": {"max_tokens": 2}})
    assert final.usage.output_tokens == 2


async def test_without_a_talker_there_is_no_speech(engine: VllmEngine) -> None:
    assert engine.capabilities.output_modalities == {OutputModality.TEXT}
    assert engine.capabilities.tasks == {Task.CHAT}
    assert engine.capabilities.input_modalities == {Modality.TEXT}
    with pytest.raises(UnsupportedParameter):
        await answer(engine, Input("Hello"), modalities=frozenset({OutputModality.AUDIO}))


async def test_closing_an_answer_frees_its_place_at_once(engine: VllmEngine) -> None:
    async with aclosing(streamed(engine, request(Input("Hello"), sampling={"temperature": 0.0}))) as outputs:
        async for output in outputs:
            assert isinstance(output, TextOutput)
            break
        assert unfinished(engine) == 1
    assert unfinished(engine) == 0


@pytest.mark.parametrize("sampling", [GREEDY, {**GREEDY, "stop": "~"}], ids=["streamed", "warmed"])
async def test_cancelling_while_the_input_is_open_frees_everything(engine: VllmEngine, sampling: Any) -> None:
    source = Input(LONG, open_end=True)
    task = asyncio.create_task(answer(engine, source, sampling=sampling))
    await until(lambda: unfinished(engine) > 0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert unfinished(engine) == 0


async def test_many_answers_at_once_are_those_of_each_alone(engine: VllmEngine) -> None:
    questions = [f"Question number {number}" for number in range(6)]
    together = await asyncio.gather(*(answer(engine, Input(question)) for question in questions))
    for question, (text, _) in zip(questions, together, strict=True):
        assert text == await plain_answer(engine, f"user: {question}\nassistant:")


async def test_salts_keep_cached_prefixes_apart(engine: VllmEngine) -> None:
    salts = iter(["ann", "bob", "ann"])
    cached: list[Any] = []
    from omni_ws.engine.vllm.thinker import Thinker

    original = Thinker._answer

    async def watched(self: Thinker, *arguments: Any) -> None:
        await original(self, *arguments)
        cached.append(self.cached_tokens)

    with pytest.MonkeyPatch.context() as patch:
        assert engine._shared is not None
        salted: Any = engine._shared
        patch.setattr(Thinker, "_answer", watched)
        patch.setattr(type(salted), "cache_salt", property(lambda _: lambda _: next(salts)), raising=False)
        for _ in range(3):
            await answer(engine, Input("z" * 300), input_mode=InputMode.SNAPSHOT)
    assert cached[:2] == [0, 0]
    assert cached[2] > 200


async def test_what_a_streamed_prompt_found_in_the_cache_is_told(engine: VllmEngine) -> None:
    cached = []
    for _ in range(2):
        source = Input("Hello", open_end=True)
        answering = asyncio.create_task(answer(engine, source, instructions="r" * 300))
        await until(lambda: unfinished(engine) > 0)
        source.close()
        _, final = await answering
        cached.append(final.usage.cached_tokens)
    assert cached[0] == 0
    assert cached[1] is not None
    assert 200 < cached[1] < final.usage.input_tokens


def _has_gone_on(steps: Callable[[], int], before: int) -> bool:
    return steps() > before


@pytest.mark.parametrize("stop", [None, "zzz"], ids=["streamed", "warmed"])
async def test_what_a_request_has_computed_early_itself_is_not_told_as_cached(
    engine: VllmEngine, early_steps: Callable[[], int], stop: str | None
) -> None:
    sampling = {**GREEDY, **({} if stop is None else {"stop": stop})}
    cached = []
    for _ in range(2):
        source = Input(open_end=True)
        answering = asyncio.create_task(answer(engine, source, sampling=sampling, owner=f"early {stop}"))
        for number in range(3):
            before = early_steps()
            source.send(f"{number} of three. " * 20)
            await until(partial(_has_gone_on, early_steps, before))
        source.close()
        _, final = await answering
        cached.append(final.usage.cached_tokens)
    assert cached[0] == 0
    assert cached[1] is not None
    assert cached[1] > (0 if stop is None else 300)


async def test_an_input_that_is_cancelled_while_open_has_the_models_usage(engine: VllmEngine) -> None:
    asked = request(Input("Hello", open_end=True), instructions="Be brief.")
    reading = asyncio.create_task(anext(streamed(engine, asked)))
    await until(lambda: (usage := asked.meter.read()) is not None and usage.input_tokens > 0)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    usage = asked.meter.read()
    assert usage is not None
    assert usage.input_tokens == len("system: Be brief.\nuser:")


@pytest.mark.parametrize("mode", list(InputMode))
@pytest.mark.parametrize("seed", range(3))
async def test_an_answer_is_the_same_however_it_is_handed_over(engine: VllmEngine, mode: InputMode, seed: int) -> None:
    turns = random.Random(seed)
    client = Answer(halts=(turns.random() < 0.3 for _ in range(1000)))
    await engine.generate(request(Input("Hello"), input_mode=mode), client)
    assert client.text == await plain_answer(engine, "user: Hello\nassistant:")
    assert client.finished.usage.output_tokens == GREEDY["max_tokens"]


async def test_a_client_that_does_not_read_holds_up_its_answer_alone(
    engine: VllmEngine,
) -> None:
    """vLLM goes on; its outputs are merged in its own collector, and read at once later."""
    asked = request(Input("Hello"), sampling={**GREEDY, "max_tokens": 200})
    async with reading(partial(engine.generate, asked)) as outputs:
        taken = [await anext(outputs) for _ in range(5)]
        await until(lambda: unfinished(engine) == 0)
        text, _ = await answer(engine, Input("Hello"))
        taken += [output async for output in outputs]
    assert len(taken) < 30
    whole = said(taken)
    assert whole.startswith(text)
    assert whole == await plain_answer(engine, "user: Hello\nassistant:", max_tokens=200)


async def test_a_client_that_has_gone_is_written_nothing(engine: VllmEngine) -> None:
    client = Answer()
    answering = asyncio.create_task(engine.generate(request(Input("Hello"), sampling={}), client))
    await until(lambda: len(client.outputs) > 3)
    answering.cancel()
    await asyncio.gather(answering, return_exceptions=True)
    taken = len(client.outputs)
    assert unfinished(engine) == 0
    await answer(engine, Input("Hello"))
    assert len(client.outputs) == taken

"""Talkers with many sessions: each has the codes that it has alone, none waits for another, slots are free again."""

from __future__ import annotations

import random
from itertools import count, cycle, islice
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

torch = pytest.importorskip("torch", reason="PyTorch is not installed (make test-vllm)")
pytest.importorskip("transformers", reason="transformers is not installed (make test-vllm)")

from support.omni_reference import (  # noqa: E402
    CASE,
    LONGEST,
    SLOTS,
    Driven,
    greedy,
    long_prompt,
    new_talker,
    speak,
    spoken,
    talker,
)
from support.tiny_models import Family  # noqa: E402

from omni_ws.engine.omni.step_process import (  # noqa: E402
    AnswerEnd,
    CodesEnd,
    PromptReset,
    TalkerItem,
)
from omni_ws.errors import EngineOverloaded  # noqa: E402

pytestmark = pytest.mark.vllm

FAMILIES = pytest.mark.parametrize("family", Family)


@pytest.fixture(autouse=True)
def no_slot_stays_taken() -> Any:
    yield
    for family in Family:
        assert talker(family).free_slots == SLOTS
        assert not talker(family).busy


@pytest.mark.parametrize("read_late", [False, True])
@FAMILIES
def test_eight_sessions_are_as_each_alone(family: Family, read_late: bool) -> None:
    """Of different lengths, opened and closed at different times, each with all that it needs or row by row."""
    driven = Driven(new_talker(family, read_late=read_late))
    plans = dict(zip(range(12), zip(cycle(CASE), count(9, 2), strict=False), strict=False))
    waiting = list(plans)
    rows: dict[int, list[Any]] = {}
    while waiting or rows:
        if waiting and driven.model.free_slots:
            number = waiting.pop(0)
            case, frames = plans[number]
            driven.open(number, greedy(family, max_tokens=frames))
            answer = spoken(family, case)
            driven.model.feed(number, answer.prompt_rows())
            pieces = [answer.answer_rows(k, k + 1) for k in range(len(answer.answer) - 1)]
            rows[number] = [*pieces, AnswerEnd()] if number % 2 else [*answer.items()[1:]]
        for number, left in [*rows.items()]:
            if left:
                driven.model.feed(number, left.pop(0))
            if number in driven.ends:
                driven.model.close(number)
                del rows[number]
        driven.step()
    for number, (case, frames) in plans.items():
        assert np.array_equal(driven.made(number), spoken(family, case).codes[:frames])
        assert driven.ends[number] is CodesEnd.LENGTH


@FAMILIES
def test_a_seed_gives_the_same_codes_whoever_else_speaks(family: Family) -> None:
    model = talker(family)
    answer = spoken(family, "text")

    def sampled(**settings: Any) -> NDArray[np.int64]:
        return speak(model, answer.items(), {"max_tokens": 12, **settings})[0]

    alone = {seed: sampled(seed=seed) for seed in range(3)}
    assert len({codes.tobytes() for codes in alone.values()}) == 3
    assert not np.array_equal(sampled(), sampled())  # without a seed, each answer is another
    driven = Driven(model)
    # Seed 0 in another slot than before, among others that sample in other ways or not at all.
    others: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 3, "top_k": 0, "top_p": 1}, {"top_k": 2}]
    for number, settings in enumerate([*others, *({"seed": seed} for seed in alone)]):
        driven.open(number, {"max_tokens": 12, **settings})
        for item in answer.items():
            model.feed(number, item)
        driven.step()
    driven.run()
    for number in driven.codes:
        model.close(number)
    for seed, codes in alone.items():
        assert np.array_equal(driven.made(len(others) + seed), codes)
    assert np.array_equal(driven.made(0), answer.codes[:12])


@FAMILIES
def test_a_frame_needs_a_row_and_a_grant(family: Family) -> None:
    model, answer = talker(family), spoken(family, "text")
    driven = Driven(model)
    driven.open(0, greedy(family), frames=3)
    made = []
    model.feed(0, answer.prompt_rows())
    for row in range(5):
        driven.run()
        made.append(len(driven.codes[0]))
        model.feed(0, answer.answer_rows(row, row + 1))
    driven.run()
    assert [*made, len(driven.codes[0])] == [0, 1, 2, 3, 3, 3]  # a frame for each row, up to the grant
    assert [item.rows_used for item in driven.items[0]] == [1, 2, 3]
    assert not model.busy
    model.grant(0, 7)
    driven.run()
    assert len(driven.codes[0]) == 5  # no row left, and the answer goes on
    model.feed(0, AnswerEnd())
    driven.run()
    assert len(driven.codes[0]) == 10
    assert driven.items[0][-1].rows_used == 5
    assert np.array_equal(driven.made(0)[:5], answer.codes[:5])
    model.close(0)


@FAMILIES
def test_a_long_prompt_does_not_stop_those_who_speak(family: Family) -> None:
    model, answer = new_talker(family, piece=64), spoken(family, "audio")
    driven = Driven(model)
    driven.open(0, greedy(family))
    for item in answer.items():
        model.feed(0, item)
    driven.run(until=lambda: bool(driven.codes[0]))
    driven.open(1, greedy(family))
    driven.open(2, greedy(family))
    for session in (1, 2):
        model.feed(session, long_prompt(family, 640))
    for item in answer.items()[1:]:
        model.feed(2, item)
    spoke_at, steps = len(driven.codes[0]), 0
    while not driven.codes[2]:
        driven.step()
        steps += 1
        assert len(driven.codes[0]) == spoke_at + steps
    # The one that is to speak comes first: its own pieces, one of them with the rows that end the prompt.
    assert steps == 640 // 64 + 1
    for session in range(3):
        model.close(session)
    assert not model.busy


@FAMILIES
def test_a_prompt_may_begin_anew(family: Family) -> None:
    answer = spoken(family, "mixed")
    before: list[TalkerItem] = [spoken(family, "image").prompt_rows(0, 40), PromptReset()]
    before += [answer.prompt_rows(0, 20), PromptReset()]
    codes, _ = speak(talker(family), [*before, *answer.items()], greedy(family, max_tokens=9))
    assert np.array_equal(codes, answer.codes[:9])


@FAMILIES
def test_an_answer_without_rows_is_empty(family: Family) -> None:
    for before in ([], [spoken(family, "text").prompt_rows()]):
        codes, end = speak(talker(family), [*before, AnswerEnd()], greedy(family))
        assert codes.shape == (0, talker(family).codebooks)
        assert end is CodesEnd.STOP


@FAMILIES
def test_a_first_code_that_is_the_end_makes_an_empty_answer(family: Family) -> None:
    answer = spoken(family, "text")
    codes, end = speak(talker(family, int(answer.codes[0, 0])), answer.items(), greedy(family))
    assert codes.shape == (0, talker(family).codebooks)
    assert end is CodesEnd.STOP


@FAMILIES
def test_what_comes_after_the_end_is_ignored(family: Family) -> None:
    model, answer = talker(family), spoken(family, "text")
    driven = Driven(model)
    driven.open(0, greedy(family, max_tokens=2))
    model.feed(0, answer.prompt_rows())
    model.feed(0, answer.answer_rows(0, 5))
    driven.run()
    assert driven.ends[0] is CodesEnd.LENGTH
    model.feed(0, answer.answer_rows(5, 9))
    model.feed(0, AnswerEnd())
    assert not model.busy
    model.close(0)
    model.close(0)
    model.feed(0, AnswerEnd())
    model.grant(0, 1)
    assert not model.busy


@FAMILIES
def test_a_closed_session_frees_its_slot_at_once(family: Family) -> None:
    model, answer = new_talker(family, piece=16, read_late=True), spoken(family, "text")
    driven = Driven(model)
    for session in range(SLOTS):
        driven.open(session, greedy(family))
        model.feed(session, answer.prompt_rows())
    with pytest.raises(EngineOverloaded):
        model.open(SLOTS, greedy(family))
    driven.step()
    model.close(3)  # while its prompt is being computed
    driven.open(SLOTS, greedy(family, max_tokens=9))
    for item in answer.items():
        model.feed(SLOTS, item)
    driven.run(until=lambda: len(driven.codes[SLOTS]) == 5)
    model.close(SLOTS)  # while a frame is on its way
    driven.open(SLOTS + 1, greedy(family, max_tokens=9))
    for item in answer.items():
        model.feed(SLOTS + 1, item)
    driven.run()
    assert len(driven.codes[SLOTS]) == 5
    assert np.array_equal(driven.made(SLOTS + 1), answer.codes[:9])
    for session in islice(count(), SLOTS + 2):
        model.close(session)
    assert model.free_slots == SLOTS


@FAMILIES
def test_cancellations_leave_all_slots_free(family: Family) -> None:
    model, chance = talker(family), random.Random(7)
    driven, numbers, opened = Driven(model), count(), []
    for _ in range(60):
        number = next(numbers)
        driven.open(number, {"seed": number}, frames=chance.choice([0, 2, 1000]))
        opened.append(number)
        answer = spoken(family, chance.choice([*CASE]))
        for item in answer.items()[: chance.randint(0, 3)]:
            model.feed(number, item)
        for _ in range(chance.randint(0, 3)):
            driven.step()
        while len(opened) > chance.randint(0, SLOTS - 1):
            model.close(opened.pop(chance.randrange(len(opened))))
    for number in opened:
        model.close(number)
    assert model.free_slots == SLOTS
    assert not model.busy
    answer = spoken(family, "mixed")
    assert np.array_equal(speak(model, answer.items(), greedy(family, max_tokens=9))[0], answer.codes[:9])


@FAMILIES
def test_a_prompt_may_leave_room_for_one_frame(family: Family) -> None:
    """The room is the slot's positions; the rows that end a prompt take eight of them, one for Qwen2.5."""
    model, answer = talker(family), spoken(family, "text")
    most = LONGEST - 1 - (8 if family is Family.QWEN3 else 1)
    _, rows, ended = answer.items()
    for spare in (0, 1):
        codes, end = speak(model, [long_prompt(family, most - spare), rows, ended], greedy(family))
        assert (len(codes), end) == (1 + spare, CodesEnd.LENGTH)

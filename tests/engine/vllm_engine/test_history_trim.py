"""The oldest turns of a conversation go, whole and in strides, until a prompt fits; and what is never left out."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest
from support.word_prompts import WordTokenizer, form, render

from omni_ws.core.chunks import AudioFormat, Modality, ToolCall
from omni_ws.core.history import Message, Speech
from omni_ws.engine.vllm.prompt import HistoryTrim, Media, PromptContext, PromptDraft, PromptLimit

LIMIT = PromptLimit(prompt=200, input_reserve=20, stride=50)


def size(message: Message) -> int:
    return len(message.text.split())


def turn(number: int, words: int = 10) -> tuple[Message, Message]:
    """A question and its answer, of ``words`` words each."""
    return Message("user", f"ask{number} " * words), Message("assistant", f"tell{number} " * words)


def turns(count: int, words: int = 10) -> tuple[Message, ...]:
    return tuple(message for number in range(count) for message in turn(number, words))


def first_words(history: tuple[Message, ...]) -> list[str]:
    return [message.text.split()[0] for message in history]


def test_what_fits_is_kept_without_counting() -> None:
    def uncounted(message: Message) -> int:
        raise AssertionError("nothing has to be left out")

    trim = HistoryTrim(turns(3), 50, uncounted)
    assert trim.kept() == turns(3)


def test_whole_turns_go_and_more_than_needed() -> None:
    trim = HistoryTrim(turns(10), 50, size)
    assert trim.leave_out(1)
    assert first_words(trim.kept())[:2] == ["ask3", "tell3"]
    assert trim.leave_out(45)
    assert first_words(trim.kept())[0] == "ask8"
    assert trim.leave_out(1000)
    assert trim.kept() == ()
    assert not trim.leave_out(1)


def test_a_turn_longer_than_a_stride_goes_at_once() -> None:
    history = (*turn(0, 200), *turn(1))
    trim = HistoryTrim(history, 50, size)
    assert trim.leave_out(1)
    assert first_words(trim.kept()) == ["ask1", "tell1"]


def test_instructions_and_open_calls_stay() -> None:
    call = ToolCall("call_1", "f", "{}")
    rules = Message("system", "rules " * 30)
    asked = (Message("user", "weather"), Message("assistant", "", tool_calls=(call,)))
    trim = HistoryTrim((*turns(2), rules, *asked), 50, size)
    assert trim.open_calls == ("call_1",)
    while trim.leave_out(1):
        pass
    assert trim.kept(trim.open_calls) == (rules, *asked)
    assert trim.kept() == (rules,)
    result = Message("tool", "rain", tool_call_id="call_1")
    assert HistoryTrim((*asked, result), 50, size).open_calls == ("call_1",)
    assert HistoryTrim((*asked, result, Message("assistant", "Rain.")), 50, size).open_calls == ()
    assert HistoryTrim((), 50, size).open_calls == ()


def test_the_reserves_follow_the_context_and_the_answer() -> None:
    assert PromptLimit.of(1024, 100) == PromptLimit(prompt=924, input_reserve=128, stride=256)
    assert PromptLimit.of(1024, None) == PromptLimit(prompt=768, input_reserve=128, stride=256)
    assert PromptLimit.of(1 << 17, None) == PromptLimit(prompt=(1 << 17) - 2048, input_reserve=1024, stride=1 << 15)


# in a prompt


def ask(history: tuple[Message, ...], question: str, tokenizer: WordTokenizer) -> tuple[list[int], PromptDraft]:
    draft = PromptDraft(form(tokenizer), PromptContext("Be brief.", history), LIMIT)
    draft.add_text(question, 0)
    return draft.whole().tokens, draft


def test_prompts_of_a_long_conversation_fit_and_mostly_begin_alike() -> None:
    tokenizer = WordTokenizer()
    prompts = []
    for count in range(60):
        tokens, draft = ask(turns(count, 2), "and now", tokenizer)
        assert len(tokens) <= LIMIT.prompt
        assert tokenizer.decode(tokens).startswith("<|end|>system\nBe brief.<|end|>user\n")
        if count:  # the last turn is always there
            assert draft.context.history[-2:] == turn(count - 1, 2)
        prompts.append(tokens)
    # Of the prompt before, all but its question stands at the beginning of the next, except where a stride is cut.
    moved = [before[: len(before) - 6] != after[: len(before) - 6] for before, after in pairwise(prompts)]
    assert 5 <= sum(moved) <= 15


def test_a_long_input_pushes_out_more() -> None:
    tokenizer = WordTokenizer()
    few, draft = ask(turns(4), "and now", tokenizer)
    assert len(draft.context.history) == 8
    many, draft = ask(turns(4), "word " * 170, tokenizer)
    assert len(few) <= len(many) <= LIMIT.prompt
    assert draft.context.history == ()
    over, draft = ask(turns(4), "word " * 210, tokenizer)
    assert len(over) > LIMIT.prompt  # the caller refuses it
    assert draft.context.history == ()
    assert not draft.shorten()


def test_texts_without_blanks_count_by_their_tokens() -> None:
    class Characters(WordTokenizer):
        def encode(
            self, text: str, *, add_special_tokens: bool = True, split_special_tokens: bool = False
        ) -> list[int]:
            return [self._number(letter) for letter in text]

    history = tuple(Message(role, "在" * 90) for _ in range(4) for role in ("user", "assistant"))
    draft = PromptDraft(form(Characters()), PromptContext(history=history), PromptLimit.of(1024, 100))
    draft.add_text("你好", 0)
    assert len(draft.whole().tokens) <= 924
    assert draft.context.history == history[-4:]


def test_a_turn_whose_calls_the_input_answers_stays() -> None:
    call = ToolCall("call_1", "f", "{}")
    asked = (Message("user", "weather"), Message("assistant", "", tool_calls=(call,)))
    tokenizer = WordTokenizer()
    draft = PromptDraft(form(tokenizer), PromptContext(history=(*turns(3), *asked, *turns(10))), LIMIT)
    assert asked[1] not in draft.context.history
    draft.add_tool_result("call_1", "rain")
    text = tokenizer.decode(draft.whole().tokens)
    assert "<|end|>user\nweather<|end|>assistant\n[call_1 {}]<|end|>user\n" in text
    assert text.endswith("<|end|>tool\nraincall_1<|end|>assistant\n")
    again = tokenizer.decode(draft.whole().tokens)
    assert again == text


def test_media_count_and_are_numbered_anew() -> None:
    spoken = [Speech((), AudioFormat(), 40) for _ in range(4)]
    sounds = {speech: (Media(Modality.AUDIO, (range(1600 * 20), 16_000.0)),) for speech in spoken}
    history = tuple(
        message
        for number, speech in enumerate(spoken)
        for message in (Message("user", "", speech=speech), Message("assistant", f"tell{number}"))
    )
    tokenizer = WordTokenizer()
    draft = PromptDraft(form(tokenizer), PromptContext(history=history, speech=sounds), LIMIT)
    assert draft.media == [sounds[speech][0] for speech in spoken[2:]]  # 50 tokens each
    new = Media(Modality.AUDIO, (range(1600 * 40), 16_000.0))
    draft.add_text("this", 0)
    draft.add_media(new, 1)
    draft.add_text("that", 2)
    whole = draft.whole()
    assert whole.media == (*(sounds[speech][0] for speech in spoken[-1:]), new)
    assert tokenizer.decode(whole.tokens).endswith(
        "<|end|>user\nSound 1: <|sound|><|end|>assistant\ntell3"
        "<|end|>user\nthis\nSound 2: <|sound|>\nthat<|end|>assistant\n"
    )
    assert draft.shorten()
    assert draft.whole().media == (new,)


@pytest.mark.parametrize("strict", [False, True])
def test_a_template_without_history_is_no_obstacle(strict: bool) -> None:
    """What a template adds to a message is then unknown, and counts nothing."""
    from omni_ws.engine.vllm.prompt import PromptForm
    from omni_ws.errors import InvalidValue

    def refusing(messages: list[dict[str, Any]], tools: list[dict[str, Any]], arguments: Mapping[str, Any]) -> str:
        if strict and len(messages) == 3:
            raise InvalidValue("no history")
        return render(messages, tools, arguments)

    def placeholder(modality: Modality, number: int) -> str:
        return "<|sound|>"

    template_tokens = 0 if strict else 3
    form_ = PromptForm(WordTokenizer(), refusing, placeholder)
    assert form_.size(Message("user", "one two"), {}) == 2 + template_tokens

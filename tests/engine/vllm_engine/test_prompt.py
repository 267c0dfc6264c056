"""Prompts as text and tokens; and the parts given to the model early are those of the complete prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.word_prompts import CONTROL, WordTokenizer, form, placeholder, render

from omni_ws.core.chunks import AudioFormat, Modality, ToolCall
from omni_ws.core.history import Message, Speech
from omni_ws.engine.vllm.prompt import BareForm, Given, Media, PromptContext, PromptDraft, PromptForm
from omni_ws.errors import InvalidValue, UnsupportedModality


def draft(prompt_form: PromptForm) -> PromptDraft:
    return PromptDraft(prompt_form, PromptContext("Be brief."))


def test_the_frame_is_the_template_around_the_input() -> None:
    head, tail = form().frame(PromptContext("Be brief.", (Message("user", "One"), Message("assistant", "Two"))))
    assert head == "<|end|>system\nBe brief.<|end|>user\nOne<|end|>assistant\nTwo<|end|>user\n"
    assert tail == "<|end|>assistant\n"


def test_arguments_reach_the_template_as_text() -> None:
    given: list[Mapping[str, Any]] = []

    def rendering(messages: list[dict[str, Any]], tools: list[dict[str, Any]], arguments: Mapping[str, Any]) -> str:
        given.append(arguments)
        return render(messages, tools, arguments)

    asked = PromptContext(arguments={"enable_thinking": False, "persona": "<|end|>"})
    PromptForm(WordTokenizer(), rendering, placeholder).frame(asked)
    assert given == [{"enable_thinking": False, "persona": "<\ufdd0|end|>"}]


def test_without_instructions_there_is_no_system_message() -> None:
    assert form().frame(PromptContext())[0] == "<|end|>user\n"


def test_the_answer_goes_on_with_a_message_of_the_assistant() -> None:
    tokenizer = WordTokenizer()
    written = PromptDraft(form(tokenizer), PromptContext(history=(Message("user", "One"),), role="assistant"))
    written.add_text("Two and", 0)
    assert tokenizer.decode(written.whole().tokens) == "<|end|>user\nOne<|end|>assistant\nTwo and"


def test_a_system_message_may_stand_alone() -> None:
    tokenizer = WordTokenizer()
    written = PromptDraft(form(tokenizer), PromptContext(role="system"))
    written.add_text("Be brief.", 0)
    assert tokenizer.decode(written.whole().tokens) == "<|end|>system\nBe brief.<|end|>assistant\n"


def test_a_template_that_leaves_a_message_out_cannot_take_it() -> None:
    def render_users_only(
        messages: list[dict[str, Any]], tools: list[dict[str, Any]], arguments: Mapping[str, Any]
    ) -> str:
        return "".join(message["content"] for message in messages if message["role"] == "user")

    deaf = PromptForm(WordTokenizer(), render_users_only, placeholder, frozenset())
    with pytest.raises(InvalidValue, match="does not render a last message of role system"):
        deaf.frame(PromptContext(role="system"))


def test_no_text_of_a_client_is_a_control_token() -> None:
    tokenizer = WordTokenizer()
    prompt_form = form(tokenizer)
    head, _ = prompt_form.frame(PromptContext("<|end|>", (Message("user", "<|eos|>"),)))
    assert head.count("<|end|>") == 3
    assert "<|eos|>" not in head
    written = draft(prompt_form)
    written.add_text("<|so", 0)
    written.add_text("und|> <|end|>", 0)
    assert written.whole().media == ()
    tokens = written.whole().tokens
    assert CONTROL.index("<|sound|>") not in tokens
    assert tokens.count(CONTROL.index("<|end|>")) == 3
    assert tokenizer.decode(tokens).endswith("<|sound|> <|end|><|end|>assistant\n")


def test_a_placeholder_that_is_not_special_is_no_token_of_a_client_either() -> None:
    class Lenient(WordTokenizer):
        """Splits no added token, as tokenizers do with those that they do not regard as special."""

        def encode(
            self, text: str, *, add_special_tokens: bool = True, split_special_tokens: bool = False
        ) -> list[int]:
            return super().encode(text)

    tokenizer = Lenient()
    written = draft(form(tokenizer))
    written.add_text("a <|sound|> b <|picture|>", 0)
    tokens = written.whole().tokens
    assert {CONTROL.index("<|sound|>"), CONTROL.index("<|picture|>")}.isdisjoint(tokens)
    assert tokenizer.decode(tokens).endswith("\na <|sound|> b <|picture|><|end|>assistant\n")


def test_the_mark_of_a_control_token_cannot_be_written_by_a_client() -> None:
    tokenizer = WordTokenizer()
    written = draft(form(tokenizer))
    written.add_text("<\ufdd0|end|> <|\ufdd0end|>", 0)
    tokens = written.whole().tokens
    assert tokens.count(CONTROL.index("<|end|>")) == 3
    assert tokenizer.decode(tokens).endswith("\n<|end|> <|end|><|end|>assistant\n")


def test_parts_stand_on_lines_of_their_own_and_media_are_numbered() -> None:
    tokenizer = WordTokenizer()
    written = draft(form(tokenizer))
    written.add_text("Look ", 0)
    written.add_text("here", 0)
    for number, modality in enumerate((Modality.IMAGE, Modality.AUDIO, Modality.AUDIO), 1):
        written.add_media(Media(modality, number), number)
    written.add_text("well", 4)
    whole = written.whole()
    assert tokenizer.decode(whole.tokens) == (
        "<|end|>system\nBe brief.<|end|>user\n"
        "Look here\n<|picture|>\nSound 1: <|sound|>\nSound 2: <|sound|>\nwell<|end|>assistant\n"
    )
    assert whole.for_vllm("ann") == {
        "prompt_token_ids": whole.tokens,
        "multi_modal_data": {"image": [1], "audio": [2, 3]},
        "cache_salt": "ann",
    }


def test_vllm_gets_a_list_of_its_own() -> None:
    written = draft(form())
    written.add_text("Hello", 0)
    whole = written.whole()
    assert whole.for_vllm(None)["prompt_token_ids"] is not whole.tokens


Step = tuple[str, Any]
TEXTS = st.text(st.sampled_from(list("ab <|end>\n")), max_size=12)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("text"), TEXTS),
        st.tuples(st.just("new text part"), TEXTS),
        st.tuples(st.just("media"), st.sampled_from([Modality.AUDIO, Modality.IMAGE])),
        st.tuples(st.just("take"), st.integers(1, 4)),
    ),
    max_size=30,
)


@settings(max_examples=400, deadline=None)
@given(STEPS, st.booleans())
def test_early_work_and_the_rest_are_the_whole_or_are_known_not_to_be(steps: list[Step], divisible: bool) -> None:
    tokenizer = WordTokenizer(divisible=divisible)
    written = draft(form(tokenizer))
    part, items = 0, 0
    given_early = Given()
    for step, value in steps:
        match step:
            case "text":
                written.add_text(value, part)
            case "new text part":
                part += 1
                written.add_text(value, part)
            case "media":
                part += 1
                written.add_media(Media(value, items), part)
                part += 1
                items += 1
            case "take":
                stable = written.stable(given_early, value)
                # Searching has no side effect: what is not given is found again.
                assert written.stable(given_early, value) == stable
                if stable is not None:
                    given_early.add(stable)
                    signs = tokenizer.decode(stable.tokens)
                    # A placeholder and its media belong to the same excerpt.
                    assert signs.count("<|sound|>") + signs.count("<|picture|>") == len(stable.media)
    whole = written.whole()
    rest = whole.after(given_early)
    if rest is None:
        assert whole.tokens[: len(given_early.tokens)] != given_early.tokens
    else:
        assert given_early.tokens + rest.tokens == whole.tokens
        assert (*given_early.media, *rest.media) == whole.media
    assert [item.data for item in whole.media] == list(range(items))


def give(written: PromptDraft, given_early: Given) -> list[int]:
    stable = written.stable(given_early, 1)
    assert stable is not None
    given_early.add(stable)
    return stable.tokens


def test_text_is_given_up_to_its_last_word() -> None:
    tokenizer = WordTokenizer()
    written, given_early = draft(form(tokenizer)), Given()
    written.add_text("one two thr", 0)
    assert tokenizer.decode(give(written, given_early)).endswith("one two")
    written.add_text("ee four", 0)
    assert tokenizer.decode(give(written, given_early)) == " three"
    assert written.stable(given_early, 1) is None
    rest = written.whole().after(given_early)
    assert rest is not None
    assert tokenizer.decode(rest.tokens) == " four<|end|>assistant\n"


def test_little_text_is_not_worth_a_step() -> None:
    written, given_early = draft(form()), Given()
    give(written, given_early)
    written.add_text("one two three", 0)
    assert written.stable(given_early, 16) is None
    written.add_media(Media(Modality.IMAGE, None), 1)
    stable = written.stable(given_early, 16)
    assert stable is not None
    assert len(stable.media) == 1


def test_a_template_that_refuses_is_the_clients_fault() -> None:
    def refuse(messages: list[dict[str, Any]], tools: list[dict[str, Any]], arguments: Mapping[str, Any]) -> str:
        raise InvalidValue("roles must alternate")

    with pytest.raises(InvalidValue):
        PromptForm(WordTokenizer(), refuse, placeholder).frame(PromptContext())


def test_a_greeting_follows_an_empty_question_where_the_user_has_to_begin() -> None:
    def alternating(messages: list[dict[str, Any]], tools: list[dict[str, Any]], arguments: Mapping[str, Any]) -> str:
        spoken = [message["role"] for message in messages if message["role"] != "system"]
        if spoken != (["user", "assistant"] * len(spoken))[: len(spoken)]:
            raise InvalidValue("roles must alternate")
        return render(messages, tools, arguments)

    strict = PromptForm(WordTokenizer(), alternating, placeholder)
    greeted = PromptContext("Be brief.", (Message("assistant", "Good morning!"),))
    head, _ = strict.frame(greeted)
    assert head == "<|end|>system\nBe brief.<|end|>user\n<|end|>assistant\nGood morning!<|end|>user\n"
    assert form().frame(greeted)[0] == "<|end|>system\nBe brief.<|end|>assistant\nGood morning!<|end|>user\n"
    with pytest.raises(InvalidValue, match="must alternate"):
        strict.frame(PromptContext(history=(Message("user", "One"), Message("user", "Two"))))


CALLS = (ToolCall("call_1", "f", '{"a": "<|end|>"}'), ToolCall("call_2", "g", '{"cut'))


def test_calls_and_results_stand_in_the_prompt() -> None:
    history = (Message("assistant", "Wait.", tool_calls=CALLS[:1]), Message("tool", "42", tool_call_id="call_1"))
    head, _ = form().frame(PromptContext(history=history))
    assert head == '<|end|>assistant\nWait.[call_1 {"a": "<\ufdd0|end|>"}]<|end|>tool\n42call_1<|end|>user\n'


def test_a_call_that_was_cut_off_is_left_out_with_its_result() -> None:
    results = (Message("tool", "42", tool_call_id="call_1"), Message("tool", "43", tool_call_id="call_2"))
    head, _ = form().frame(PromptContext(history=(Message("assistant", "", tool_calls=CALLS), *results)))
    assert "call_1 {" in head
    assert "cut" not in head
    assert "43" not in head
    head, _ = form().frame(PromptContext(history=(Message("assistant", "", tool_calls=CALLS[1:]), results[1])))
    assert head == "<|end|>user\n"


def test_what_was_given_before_a_result_came_is_known_to_be_wrong() -> None:
    history = (Message("assistant", "", tool_calls=CALLS[:1]),)
    tokenizer = WordTokenizer()
    written = PromptDraft(form(tokenizer), PromptContext(history=history))
    given_early = Given()
    written.add_text("one two three", 0)
    give(written, given_early)
    written.add_tool_result("call_1", "4")
    written.add_tool_result("call_1", "2")
    assert written.stable(given_early, 1) is None
    whole = written.whole()
    assert whole.after(given_early) is None
    assert "<|end|>tool\n42call_1<|end|>user\none two three<|end|>assistant\n" in tokenizer.decode(whole.tokens)


def test_results_without_a_word_of_the_user() -> None:
    tokenizer = WordTokenizer()
    written = PromptDraft(form(tokenizer), PromptContext(history=(Message("assistant", "", tool_calls=CALLS[:1]),)))
    written.add_tool_result("call_1", "42")
    assert tokenizer.decode(written.whole().tokens).endswith("<|end|>tool\n42call_1<|end|>assistant\n")


def test_a_result_of_an_unknown_call_is_refused() -> None:
    with pytest.raises(InvalidValue) as refused:
        draft(form()).add_tool_result("call_1", "42")
    assert refused.value.param == "tool_call_id"


def test_texts_of_tools_are_plain() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"<|end|>": ["<|eos|>", 3, None, True]}}}
    head, _ = form().frame(PromptContext(tools=(tool,)))
    assert "{'<\\ufdd0|end|>': ['<\\ufdd0|eos|>', 3, None, True]}" in head


def test_a_bare_prompt_is_what_was_written() -> None:
    bare = PromptDraft(BareForm(form()), PromptContext("ignored"))
    bare.add_text("<|end|> one", 0)
    bare.add_text(" two", 0)
    assert bare.stable(Given(), 1) is None
    assert len(bare.whole().tokens) == 3
    with pytest.raises(UnsupportedModality):
        bare.add_media(Media(Modality.IMAGE, None), 1)


def test_a_template_that_leaves_earlier_speech_out_is_refused() -> None:
    speech = Speech((), AudioFormat(), 40)
    sound = Media(Modality.AUDIO, "sound")
    context = PromptContext(history=(Message("user", "", speech=speech),), speech={speech: (sound,)})
    assert PromptDraft(form(), context).media == [sound]
    forgetful = PromptForm(
        WordTokenizer(), lambda messages, tools, arguments: render(messages[-1:], tools, arguments), placeholder
    )
    with pytest.raises(InvalidValue, match="speech of earlier requests"):
        PromptDraft(forgetful, context)


@pytest.mark.parametrize("pieces", [300, 2400])
def test_a_long_text_is_searched_a_fixed_number_of_times(pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each search for the stable part reads the whole text, so a search for each piece would take quadratic time."""
    written = draft(form())
    searched = 0
    original = PromptForm.last_border

    def counting(self: PromptForm, text: str, start: int) -> int:
        nonlocal searched
        searched += len(text)
        return original(self, text, start)

    monkeypatch.setattr(PromptForm, "last_border", counting)
    piece = "word " * 100
    given = Given()
    for _ in range(pieces):
        written.add_text(piece, 0)
        if (excerpt := written.stable(given, 1)) is not None:
            given.add(excerpt)
    assert searched < 12 * pieces * len(piece)
    assert len(given.tokens) > pieces * 100 * 0.8
    assert written.whole().tokens[: len(given.tokens)] == given.tokens

"""What vLLM's Thinker hands on to the Talker of an omni model, against the states that transformers computes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import pytest_asyncio
from support.patience import PATIENCE_SEC, until

from omni_ws.core.chunks import AudioEncoding, AudioFormat, InputChunk, InputMode, Modality
from omni_ws.core.history import Message, Speech
from omni_ws.engine.channel import Channel
from omni_ws.engine.decoding import AudioPart, DecodedPart, ImagePart, TextPart, VideoPart
from omni_ws.engine.omni.step_process import AnswerEnd, AnswerRows, PromptReset, PromptRows
from omni_ws.engine.vllm.engine import ForcedAnswer
from omni_ws.engine.vllm.sampling import ParserUse, load_parser
from omni_ws.engine.vllm.thinker_rows import RowTable
from omni_ws.errors import ContextLengthExceeded
from omni_ws.media.video import VideoFrame

if TYPE_CHECKING:
    from support.omni_reference import Spoken
    from support.omni_thinker import Heard, OmniThinker

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

KIND = "You are kind."
#: The largest difference from transformers, of the largest value, in float32. Both families compute text to less than
#: 1e-5; the random weights of Qwen2.5's encoders make more of rounding, how much depends on the machine.
ROUNDING = 1e-4


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=["qwen3-omni", "qwen2.5-omni"])
async def started(request: pytest.FixtureRequest) -> AsyncIterator[OmniThinker]:
    from support.omni_thinker import OmniThinker
    from support.tiny_models import Family, omni_checkpoint

    thinker = OmniThinker(omni_checkpoint(Family(request.param)))
    await thinker.start()
    yield thinker
    await thinker.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def thinker(started: OmniThinker) -> AsyncIterator[OmniThinker]:
    """The running Thinker; checks afterwards that no request has left anything."""
    yield started
    await until(lambda: not started.model.llm.get_num_unfinished_requests())
    assert not started.rows.channel.receivers


@dataclass(frozen=True)
class Case:
    """Parts of an input, which the prompt has on lines of their own; what precedes it; and both for transformers."""

    parts: Sequence[str]
    history: tuple[Message, ...] = ()

    def decoded(self) -> list[DecodedPart]:
        from support import omni_reference as media

        def part(place: int, name: str) -> DecodedPart:
            match name:
                case "{audio}":
                    return AudioPart(media.sound(), place)
                case "{image}":
                    return ImagePart(media.picture(), place)
                case "{video}":
                    frames = tuple(VideoFrame(1000 * index, pixels) for index, pixels in enumerate(media.film()))
                    return VideoPart(frames, place)
                case text:
                    return TextPart(text, place)

        return [part(place, name) for place, name in enumerate(self.parts)]

    def spoken(self, thinker: OmniThinker, *, codec_frames: int = 1) -> Spoken:
        """What transformers makes of it. The codes, which take it longest, are only made where they matter."""
        from support.omni_reference import OmniCase, reference

        history = tuple((message.role, message.text) for message in self.history)
        case = OmniCase("", "\n".join(self.parts), history)
        return reference(family(thinker)).speak(case, codec_frames=codec_frames)


CASES = {
    "text": Case(["Say something."]),
    "audio": Case(["{audio}", "What is it?"]),
    "image": Case(["{image}", "Who?"]),
    "video": Case(["{video}", "Why?"]),
    "mixed": Case(
        ["two", "{audio}", "{image}", "and"], history=(Message("user", "Hi"), Message("assistant", "Hello."))
    ),
}


def family(thinker: OmniThinker) -> Any:
    from support.tiny_models import Family

    return Family.QWEN25 if thinker.rows.every_state else Family.QWEN3


async def answered(thinker: OmniThinker, case: Case, **changes: Any) -> Heard:
    from support.omni_thinker import DecodedInput

    changes = {"instructions": KIND, "history": case.history, **changes}
    return await thinker.answer(DecodedInput(*case.decoded()), **changes)


def assert_same(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> None:
    assert one.shape == other.shape
    if other.size:
        assert np.abs(one - other).max() <= ROUNDING * np.abs(other).max()


def assert_heard(heard: Heard, expected: Spoken) -> None:
    """Transformers would say the same, from the same rows."""
    prompt, answer = expected.prompt_rows(), expected.answer_rows()
    np.testing.assert_array_equal(heard.tokens, prompt.tokens)
    np.testing.assert_array_equal(heard.positions, prompt.positions)
    np.testing.assert_array_equal(heard.marked, prompt.states)
    assert_same(heard.states, prompt.hidden)
    np.testing.assert_array_equal(heard.spoken, answer.tokens)
    assert_same(heard.answer_states, answer.hidden)


def assert_spoken(heard: Heard, expected: Spoken) -> None:
    """The Talker makes the same codes of the rows as in transformers."""
    from support.omni_reference import CODEC_FRAMES, greedy, speak, talker

    model = talker(expected.family)
    codes, _ = speak(model, heard.items, greedy(expected.family, max_tokens=CODEC_FRAMES))
    np.testing.assert_array_equal(codes, expected.codes)
    assert len(codes) == CODEC_FRAMES


@pytest.mark.parametrize("name", CASES)
async def test_rows_and_positions_are_those_of_transformers(thinker: OmniThinker, name: str) -> None:
    from support.omni_reference import CODEC_FRAMES

    heard = await answered(thinker, CASES[name], input_mode=InputMode.SNAPSHOT)
    mixed = name == "mixed"  # all of what the others have, so the codes of one will do
    expected = CASES[name].spoken(thinker, codec_frames=CODEC_FRAMES if mixed else 1)
    assert_heard(heard, expected)
    if mixed:
        assert_spoken(heard, expected)
    assert len(heard.text) == len(heard.spoken) + 1, "the last token is written, not spoken"


async def test_a_picture_that_is_computed_in_several_steps(
    thinker: OmniThinker, monkeypatch: pytest.MonkeyPatch
) -> None:
    from support import omni_reference

    wide = np.random.default_rng(3).integers(0, 255, (96, 1120, 3), dtype=np.uint8)
    monkeypatch.setattr(omni_reference, "picture", lambda: wide)
    heard = await answered(thinker, CASES["image"])
    media = np.flatnonzero(np.isin(heard.tokens, thinker.rows.media_tokens))
    assert media[0] < thinker.args["max_num_batched_tokens"] <= media[-1]
    assert_heard(heard, CASES["image"].spoken(thinker))


@pytest.mark.parametrize("sampling", [{}, {"stop": ["\n never"]}], ids=["streamed", "warmed"])
async def test_rows_of_input_that_comes_in_pieces(thinker: OmniThinker, sampling: dict[str, Any]) -> None:
    """The prompt reaches the Talker while the input is open."""
    from support.omni_thinker import DecodedInput, heard
    from support.vllm_engine import GREEDY

    long = "one two three four five six seven eight nine ten " * 4
    case = Case([long + "end", "{image}", "{audio}", "What?"])
    text, image, audio, question = case.decoded()
    assert isinstance(text, TextPart)
    source = DecodedInput(open_end=True)
    asked = {"instructions": KIND, "sampling": {**GREEDY, **sampling}, "conversation": f"pieces {sampling}"}
    async with thinker.asked(source, **asked) as (stage, sink, answer):
        items: list[Any] = []

        async def until_early(tokens: int) -> None:
            """The Talker has got ``tokens`` of the prompt, before the input has ended."""
            while sum(len(item.tokens) for item in items) < tokens:
                items.append(await anext(sink))

        source.put_nowait(TextPart(long[:120], 0))
        await until_early(80)
        source.put_nowait(TextPart(long[120:] + "end", 0))
        source.put_nowait(image)
        source.put_nowait(audio)
        await until_early(220)
        source.put_nowait(question)
        source.close()
        items += [item async for item in sink]
        said = answer.text
    assert stage.early_steps >= 2
    assert not any(isinstance(item, PromptReset) for item in items)
    assert_heard(heard(items, said, stage), case.spoken(thinker))


async def test_a_conversation_finds_its_rows_again(thinker: OmniThinker) -> None:
    """What vLLM has in its cache is not computed, so its rows are kept; and other conversations do not share it."""
    chunk = InputChunk(Modality.AUDIO, (_sound() * 32767).astype(np.int16).tobytes())
    speech = Speech((chunk,), AudioFormat(AudioEncoding.PCM16, 16_000, 1), 2000.0)
    before = (Message("user", "", speech=speech), Message("assistant", "Yes."))
    first = Case(["one " * 20 + "two"], history=before)
    asked = {"conversation": "found again", "owner": "somebody"}
    begun = await answered(thinker, first, **asked)
    assert begun.thinker.cached_tokens == 0
    second = Case(["And then?"], (*before, Message("user", first.parts[0]), Message("assistant", begun.text)))
    went_on = await answered(thinker, second, **asked)
    assert (went_on.thinker.cached_tokens or 0) > 100
    assert not went_on.skipped_cache
    alone = await answered(thinker, second, owner="somebody")
    assert alone.thinker.cached_tokens == 0
    for one, other in ((went_on.states, alone.states), (went_on.answer_states, alone.answer_states)):
        assert_same(one, other)
    np.testing.assert_array_equal(went_on.positions, alone.positions)
    np.testing.assert_array_equal(went_on.spoken, alone.spoken)
    assert went_on.text == alone.text


async def test_rows_that_are_not_kept_are_computed_again(thinker: OmniThinker, monkeypatch: pytest.MonkeyPatch) -> None:
    # What is there is taken together, also on a busy machine: a shorter first part would have nothing in the cache.
    monkeypatch.setattr("omni_ws.engine.vllm.thinker.EARLY_AFTER_SEC", 1.0)
    asked = {"conversation": "with a gap"}
    case = Case(["{audio}", "a" * 40])
    await answered(thinker, case, **asked)
    kept = thinker.rows.kept.take("with a gap")
    kept.table = RowTable()
    kept.identity = kept.identity[:0]
    thinker.rows.kept.keep("with a gap", kept)
    again = await answered(thinker, case, **asked)
    assert again.skipped_cache
    assert again.thinker.cached_tokens == 0
    assert_heard(again, case.spoken(thinker))


async def test_a_streamed_prompt_with_a_gap_is_computed_again(
    thinker: OmniThinker, monkeypatch: pytest.MonkeyPatch
) -> None:
    from support.omni_thinker import DecodedInput, heard

    monkeypatch.setattr("omni_ws.engine.vllm.thinker.EARLY_AFTER_SEC", 1.0)  # see above
    case = Case(["{audio}", "b" * 40, "{image}", "c"])
    asked = {"conversation": "with a gap, streamed", "instructions": KIND}
    await answered(thinker, case, **asked)
    kept = thinker.rows.kept.take("with a gap, streamed")
    kept.table = RowTable()
    kept.identity = kept.identity[:0]
    thinker.rows.kept.keep("with a gap, streamed", kept)
    source = DecodedInput(*case.decoded()[:3], open_end=True)
    async with thinker.asked(source, **asked) as (stage, sink, answer):
        await until(lambda: stage.early_steps > 0)
        source.put_nowait(case.decoded()[3])
        source.close()
        items = [item async for item in sink]
        said = answer.text
    again = heard(items, said, stage)
    assert again.skipped_cache
    assert_heard(again, case.spoken(thinker))


async def test_another_picture_in_the_same_place_is_another_prompt(thinker: OmniThinker) -> None:
    """The tokens are the same, so only the content tells them apart."""
    from support.omni_thinker import DecodedInput

    asked = {"conversation": "pictures", "instructions": KIND}
    image, question = CASES["image"].decoded()
    assert isinstance(image, ImagePart)
    other = ImagePart(255 - image.pixels, 0)
    first = await thinker.answer(DecodedInput(other, question), **asked)
    second = await thinker.answer(DecodedInput(image, question), **asked)
    assert np.abs(first.states - second.states).max() > 1e-3
    assert_heard(second, CASES["image"].spoken(thinker))


async def test_an_aborted_answer_leaves_its_conversation_whole(thinker: OmniThinker) -> None:
    from support.omni_thinker import DecodedInput

    case, asked = CASES["audio"], {"conversation": "interrupted", "instructions": KIND}
    async with thinker.asked(DecodedInput(*case.decoded()), **asked) as (_, sink, _):
        async for item in sink:
            if isinstance(item, AnswerRows):
                break
    assert not thinker.rows.channel.receivers
    assert_heard(await answered(thinker, case, **asked), case.spoken(thinker))


async def test_an_answer_that_ends_by_itself(thinker: OmniThinker) -> None:
    """Its end is not spoken. Random weights know no end, so one of its tokens is declared to be it."""
    whole = await answered(thinker, CASES["text"])
    tokens = whole.spoken.tolist()
    place = next(index for index, token in enumerate(tokens) if index >= 8 and token not in tokens[:index])
    letter = thinker.model.llm.get_tokenizer().decode([tokens[place]])
    ended = await answered(thinker, CASES["text"], sampling={"temperature": 0.0, "max_tokens": 24, "stop": [letter]})
    assert ended.text == whole.text[:place]
    assert ended.spoken.tolist() == tokens[:place]


async def test_what_a_stop_string_cuts_off_is_not_spoken(thinker: OmniThinker) -> None:
    whole = await answered(thinker, CASES["text"])
    stop = whole.text[12:16]
    assert whole.text.find(stop) == 12
    cut = await answered(thinker, CASES["text"], sampling={"temperature": 0.0, "max_tokens": 24, "stop": [stop]})
    assert cut.text == whole.text[:12]
    assert cut.spoken.tolist() == whole.spoken.tolist()[:12]
    assert_same(cut.answer_states, whole.answer_states[: len(cut.answer_states)])


WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL = r'Let me see\. <tool_call>\n\{"name": "weather", "arguments": \{"city": "Oslo"\}\}\n</tool_call>'


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The model is forced to write this where it is free to choose."""
    from vllm.sampling_params import StructuredOutputsParams

    form: list[str] = []
    monkeypatch.setattr(ParserUse, "constraint", property(lambda _: StructuredOutputsParams(regex=form[0])))
    return form


async def test_tool_calls_are_not_spoken(thinker: OmniThinker, writes: list[str]) -> None:
    from support.omni_thinker import DecodedInput

    writes.append(CALL)
    parser = await asyncio.to_thread(load_parser, thinker.model, "hermes", None)
    heard = await thinker.answer(
        DecodedInput(TextPart("Hello", 0)),
        parser=parser,
        tools=(WEATHER,),
        sampling={"temperature": 0.0, "max_tokens": 200},
    )
    said = thinker.model.llm.get_tokenizer().decode(heard.spoken.tolist())
    assert heard.text.strip() == said.strip() == "Let me see."


TEXT = "There was a lighthouse on a rock, and a keeper who lived in it alone. " * 3 + "<|im_end|>Nobody came."


@pytest.mark.parametrize("pieces", [[TEXT], [TEXT[:90], TEXT[90:95], TEXT[95:], " "]], ids=["whole", "in pieces"])
async def test_a_text_is_read_as_if_it_were_the_answer(thinker: OmniThinker, pieces: list[str]) -> None:
    import torch
    from support.omni_reference import reference

    items = await forced(thinker, pieces)
    tokenizer = thinker.model.llm.get_tokenizer()
    prompt = tokenizer.encode("<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n")
    spoken = np.concatenate([item.tokens for item in items if isinstance(item, AnswerRows)]).tolist()
    assert tokenizer.decode(spoken) == "".join(pieces)
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") not in spoken
    given = [item for item in items if isinstance(item, PromptRows)]
    assert np.concatenate([item.tokens for item in given]).tolist() == prompt
    np.testing.assert_array_equal(np.concatenate([item.positions for item in given], 1)[0], np.arange(len(prompt)))
    hidden = np.concatenate([item.hidden for item in items if isinstance(item, PromptRows | AnswerRows)])
    if not thinker.rows.every_state:
        assert len(hidden) == 0
        return
    with torch.no_grad():
        model = reference(family(thinker)).model.thinker
        states = model(input_ids=torch.tensor([prompt + spoken]), output_hidden_states=True).hidden_states[-1][0]
    assert_same(hidden, states.numpy())
    assert items[-1] == AnswerEnd()


@pytest.mark.parametrize("pieces", [[], ["", ""]])
async def test_a_text_without_words_has_no_items(thinker: OmniThinker, pieces: list[str]) -> None:
    assert await forced(thinker, pieces) == []


async def test_a_text_that_is_too_long_for_the_thinker(thinker: OmniThinker) -> None:
    text = "a" * 3000
    if not thinker.rows.every_state:
        assert sum(len(item.tokens) for item in await forced(thinker, [text]) if isinstance(item, AnswerRows)) == 3000
        return
    with pytest.raises(ContextLengthExceeded):
        await forced(thinker, [text])


async def forced(thinker: OmniThinker, pieces: Sequence[str]) -> list[Any]:
    from support.engine_answers import Answer, Input
    from support.vllm_engine import request

    source: Channel[str] = Channel(1 << 16, cost=len)
    for piece in pieces:
        source.put_nowait(piece)
    source.close()
    items: Channel[Any] = Channel(1 << 16, cost=lambda _: 1)
    await ForcedAnswer(thinker.parts, thinker.rows, request(Input())).run(source, items, Answer())
    items.close()
    return [item async for item in items]


async def test_readouts_and_rows_of_the_same_worker(thinker: OmniThinker) -> None:
    """vLLM has one extension of its worker; token sessions are read out beside spoken answers."""
    from omni_ws.engine.vllm.worker_channel import SentReadouts, WorkerChannel

    hidden = thinker.rows.width
    channel = WorkerChannel(SentReadouts)
    await channel.start()
    try:
        matrix = np.ones((1, hidden), np.float32).tobytes()
        (layers,) = await thinker.model.llm.collective_rpc("install_readouts", args=(channel.address, [1], [matrix], 1))
        assert layers in (3, 4)
        assert_heard(await answered(thinker, CASES["audio"]), CASES["audio"].spoken(thinker))
        await _read_out(thinker, channel)
    finally:
        await channel.stop()


async def _read_out(thinker: OmniThinker, channel: Any) -> None:
    from vllm import SamplingParams

    from omni_ws.engine.vllm.worker_channel import ReadoutCollector

    with channel.receiving("read", ReadoutCollector(1)) as collector:
        asked = {"readout": {"key": "read", "ranges": [(0, 5)]}}
        parameters = SamplingParams(max_tokens=1, temperature=0, extra_args=asked)
        async for _ in thinker.model.llm.generate({"prompt_token_ids": [1, 2, 3, 4, 5]}, parameters, "read"):
            pass
        await asyncio.wait_for(collector.arrival(4), PATIENCE_SEC)
        assert [len(collector.take(place)) for place in range(5)] == [1] * 5


async def test_states_of_a_prompt_are_all_or_those_of_media(thinker: OmniThinker) -> None:
    """Qwen3's Talker reads nothing else, so a conversation in text costs nothing and keeps nothing."""
    asked = {"conversation": "text alone", "owner": "anybody"}
    heard = await answered(thinker, CASES["text"], **asked)
    kept = thinker.rows.kept.take("text alone")
    if family(thinker) == "qwen3-omni":
        assert not heard.marked.any()
        assert kept.nbytes < 5000
        again = await answered(thinker, CASES["text"], conversation="another", owner="anybody")
        assert (again.thinker.cached_tokens or 0) > 0, "the ordinary salt, that of the owner"
    else:
        assert heard.marked.all()
        assert kept.nbytes > 5000


def _sound() -> Any:
    from support.omni_reference import sound

    return sound()

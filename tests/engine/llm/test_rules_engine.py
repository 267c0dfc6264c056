import asyncio
import io
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any

import pytest
import pytest_asyncio
from PIL import Image
from support.engine_answers import answered, collect, open_input, text

from omni_ws.core.chunks import FinishReason, InputChunk, Modality, OutputModality, Task
from omni_ws.core.history import Message
from omni_ws.engine.base import EngineState
from omni_ws.engine.llm.rules_engine import UNSEEN, RulesEngine
from omni_ws.errors import EmptyInput, EngineFailed, UnsupportedModality

NOW = datetime(2031, 3, 4, 15, 7)


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[RulesEngine]:
    engine = RulesEngine(now=lambda: NOW)
    await engine.start()
    yield engine
    assert engine.active_requests == 0
    await engine.stop()


def image(colour: str, size: tuple[int, int] = (64, 48)) -> InputChunk:
    buffer = io.BytesIO()
    Image.new("RGB", size, colour).save(buffer, "png")
    return InputChunk(Modality.IMAGE, buffer.getvalue())


async def test_text_is_answered(engine: RulesEngine) -> None:
    result = await answered(engine, text("What time"), text(" is it?"))
    assert result.text == "It is 3:07 PM."
    assert result.finished.reason is FinishReason.STOP
    assert (result.finished.usage.input_tokens, result.finished.usage.output_tokens) == (4, 4)


async def test_a_long_text_is_said_back_as_it_is_whatever_pieces_it_comes_in(engine: RulesEngine) -> None:
    words = " ".join(f"word{number}" for number in range(2000)) + "."
    chunks = [text(words[start : start + 1500]) for start in range(0, len(words), 1500)]
    result = await answered(engine, text("repeat after me "), *chunks)
    assert result.text == words
    assert result.finished.usage.input_tokens == 2003
    assert result.finished.usage.output_tokens == 2000


async def test_history_is_known_and_counted(engine: RulesEngine) -> None:
    history = (Message("user", "my name is Ann"), Message("assistant", "Nice to meet you, Ann."))
    result = await answered(engine, text("what did I say"), history=history)
    assert result.text == "I heard: my name is Ann."
    assert result.finished.usage.input_tokens == 4 + 4 + 5


async def test_whoever_goes_on_before_an_answer_is_answered_in_one(engine: RulesEngine) -> None:
    answered_before = (Message("user", "hello"), Message("assistant", "Hello!"))
    begun = (Message("user", "what is"), Message("user", "three plus"))
    result = await answered(engine, text("four"), history=(*answered_before, *begun))
    assert result.text == (await answered(engine, text("what is three plus four"))).text
    # What was answered is over.
    apart = await answered(engine, text("four"), history=(*begun, Message("assistant", "Yes?")))
    assert apart.text == (await answered(engine, text("four"))).text != result.text


async def test_any_history_is_taken(engine: RulesEngine) -> None:
    turns = [Message("user", "hello " * 400), Message("assistant", "Hello. " * 400)] * 500
    result = await answered(engine, text("what time is it"), history=tuple(turns))
    assert result.text == "It is 3:07 PM."
    assert result.finished.usage.input_tokens == 400_000 + 4


@pytest.mark.parametrize(
    ("sampling", "answer", "reason"),
    [
        ({"max_tokens": 4}, "1, 2, 3, 4,", FinishReason.LENGTH),
        ({"max_tokens": 12}, "1, 2, 3, 4, 5, 6, 7, 8, 9, 10. 11, 12.", FinishReason.STOP),
        ({"max_tokens": 11}, "1, 2, 3, 4, 5, 6, 7, 8, 9, 10. 11,", FinishReason.LENGTH),
        ({"stop": ["5"]}, "1, 2, 3, 4, ", FinishReason.STOP),
        ({"stop": "10. 11"}, "1, 2, 3, 4, 5, 6, 7, 8, 9, ", FinishReason.STOP),
        ({"stop": ["never"], "temperature": 0, "top_p": 1, "seed": 3}, None, FinishReason.STOP),
    ],
)
async def test_limits_of_the_answer(
    engine: RulesEngine, sampling: dict[str, Any], answer: str | None, reason: FinishReason
) -> None:
    result = await answered(engine, text("count to twelve"), sampling=sampling)
    assert result.text == (answer or "1, 2, 3, 4, 5, 6, 7, 8, 9, 10. 11, 12.")
    assert result.finished.reason is reason
    assert result.finished.usage.output_tokens == len(result.text.split())


async def test_a_seed_decides_what_is_drawn(engine: RulesEngine) -> None:
    rolled = [(await answered(engine, text("roll a die"), sampling={"seed": seed})).text for seed in (*range(20), 3)]
    assert rolled[3] == rolled[-1]
    assert len({*rolled}) > 2


async def test_an_image_is_described_plainly(engine: RulesEngine) -> None:
    result = await answered(engine, image("red"))
    described = f"The image is 64 by 48 pixels, mostly red, and of medium brightness. {UNSEEN}"
    assert result.text == described
    for asked in ("What do you see?", "Who painted this?", "describe the picture"):
        assert (await answered(engine, image("red"), text(asked))).text == described
    result = await answered(engine, image("black"), text("what time is it"))
    assert result.text.endswith(f"mostly black, and dark. {UNSEEN} It is 3:07 PM.")
    sightless = "I can't see. Of a picture that is sent to me I can tell its size and its main color, no more."
    assert (await answered(engine, text("What do you see?"))).text == sightless


async def test_many_images_are_counted(engine: RulesEngine) -> None:
    result = await answered(engine, *(image("blue") for _ in range(9)))
    assert "Image 8 is" in result.text
    assert "Image 9" not in result.text
    assert result.text.endswith(f"There are 9 images in all. {UNSEEN}")


async def test_a_video_of_images_is_described(engine: RulesEngine) -> None:
    colours = ["red", "blue"] * 3
    frames = [InputChunk(Modality.VIDEO, image(each).payload, timestamp_ms=500 * at) for at, each in enumerate(colours)]
    result = await answered(engine, *frames)
    assert result.text.startswith("The video has 6 frames over 2.5 seconds, mostly ")
    assert result.text.endswith(f"and there is much motion. {UNSEEN}")


async def test_texts_around_a_picture_are_one_message(engine: RulesEngine) -> None:
    result = await answered(engine, text("repeat after me: one"), image("red"), text("two"))
    assert result.text.endswith(f"of medium brightness. {UNSEEN} one two.")


async def test_nothing_and_what_it_does_not_take(engine: RulesEngine) -> None:
    with pytest.raises(EmptyInput):
        await answered(engine)
    assert (await answered(engine, text("  "))).text == "The message is empty."
    with pytest.raises(UnsupportedModality, match="not audio"):
        await answered(engine, InputChunk(Modality.AUDIO, bytes(640)))


async def test_text_that_nobody_asked_for_is_not_sent(engine: RulesEngine) -> None:
    result = await answered(engine, text("hello"), modalities=frozenset())
    assert (result.text, result.finished.usage.output_tokens) == ("", 6)


async def test_cancelling_at_every_step_frees_everything(engine: RulesEngine) -> None:
    steps = 1.0
    while True:
        source = open_input(image("red"), text("count to fifty"))
        source.close()
        task = asyncio.create_task(collect(engine, source))
        for _ in range(int(steps)):
            if task.done():
                break
            await asyncio.sleep(0)
        if task.done():
            return
        task.cancel()
        await asyncio.wait([task])
        assert engine.active_requests == 0
        steps *= 1.2


async def test_what_it_says_about_itself() -> None:
    engine = RulesEngine()
    assert engine.state is EngineState.STARTING
    with pytest.raises(EngineFailed, match="not running"):
        await answered(engine, text("hello"))
    capabilities = engine.capabilities
    assert capabilities.tasks == {Task.CHAT}
    assert capabilities.input_modalities == {Modality.TEXT, Modality.IMAGE, Modality.VIDEO}
    assert capabilities.output_modalities == {OutputModality.TEXT}
    assert capabilities.sampling == {"max_tokens", "seed", "stop"}
    assert capabilities.sampling_no_ops == {"temperature", "top_p"}
    assert capabilities.raw_prompts
    assert (capabilities.tools, capabilities.logprobs, capabilities.structured_output) == (False, False, False)

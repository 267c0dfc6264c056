"""What a Talker is given of a prompt and an answer, and when, without a model: the test sends the rows."""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from omni_ws.config.values import ConfigurationError
from omni_ws.engine.channel import Channel
from omni_ws.engine.child_main import encode_message
from omni_ws.engine.omni.step_process import AnswerEnd, AnswerRows, PromptReset, PromptRows, TalkerItem
from omni_ws.engine.vllm.thinker_rows import TalkerFeed, ThinkerRows
from omni_ws.engine.vllm.worker_channel import SentRows
from omni_ws.errors import EngineFailed

WIDTH = 4
#: The token of a sound.
PAD = 90
THINKER = {"text_config": {"hidden_size": WIDTH}, "audio_token_id": PAD, "image_token_id": 91, "video_token_id": 92}

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("no_task_left")]


def qwen3(kept_bytes: int = 1 << 20) -> ThinkerRows:
    """Of which the Talker reads the states of media."""
    return ThinkerRows({"thinker_config": THINKER, "talker_config": {"accept_hidden_layer": 2}}, kept_bytes=kept_bytes)


def qwen25(kept_bytes: int = 1 << 20) -> ThinkerRows:
    """Of which the Talker reads every state."""
    thinker = {"text_config": {"hidden_size": WIDTH}, "audio_token_index": PAD}
    return ThinkerRows({"thinker_config": thinker, "talker_config": {}}, kept_bytes=kept_bytes)


class Fed:
    """A feed, and the items that it made."""

    def __init__(self, rows: ThinkerRows, feed: TalkerFeed, sink: Channel[TalkerItem]) -> None:
        self.rows = rows
        self.feed = feed
        self.sink = sink

    def prompt(self, *tokens: int, sounds: Sequence[tuple[int, int, str]] = (), more: bool = False) -> None:
        """Tell a prompt; a sound has its first place, its length and its content."""
        rendered: dict[str, Any] = {"prompt_token_ids": list(tokens)}
        if sounds:
            rendered["mm_hashes"] = {"audio": [content for *_, content in sounds]}
            rendered["mm_placeholders"] = {"audio": [_Place(offset, length) for offset, length, _ in sounds]}
        (self.feed.append if more else self.feed.replace)(rendered)

    def compute(self, *places: int) -> None:
        """Rows that tell their places arrive, as the model has computed these."""
        (receiver,) = self.rows.channel.receivers.values()
        found = np.array(places)
        receiver.take_rows(
            found, np.stack([found, found + 10, found + 20]), np.tile(found[:, None], (1, WIDTH)).astype(np.float32)
        )

    def items(self) -> list[TalkerItem]:
        """Those made since this was last called."""
        made = []
        while (item := self.sink.take_nowait()) is not None:
            made.append(item)
        return made


class _Place:
    """As vLLM has it."""

    def __init__(self, offset: int, length: int) -> None:
        self.offset = offset
        self.length = length


@contextmanager
def fed(rows: ThinkerRows, conversation: str | None = None) -> Iterator[Fed]:
    sink: Channel[TalkerItem] = Channel(math.inf, cost=lambda _: 1)
    with TalkerFeed(rows, sink, conversation=conversation, salt="the owner's") as feed:
        yield Fed(rows, feed, sink)
    assert not rows.channel.receivers


def told(items: Sequence[TalkerItem]) -> list[Any]:
    """Items in a form that can be compared: their tokens, and the places that the states tell."""
    short: list[Any] = []
    for item in items:
        if isinstance(item, PromptRows | AnswerRows):
            short.append((type(item).__name__[0], item.tokens.tolist(), item.hidden[:, 0].astype(int).tolist()))
        else:
            short.append(type(item))
    return short


async def test_text_is_handed_on_at_once_and_media_when_their_rows_come() -> None:
    with fed(qwen3()) as talker:
        talker.prompt(1, 2, PAD, PAD, 3, 4, sounds=[(2, 2, "a")])
        assert told(talker.items()) == [("P", [1, 2], [])]
        talker.feed.say([(0, 7)])
        assert talker.items() == [], "the answer is behind the prompt"
        talker.compute(2)
        talker.compute(3)
        items = talker.items()
        assert told(items) == [("P", [PAD], [2]), ("P", [PAD, 3, 4], [3]), ("A", [7], [])]
        # Text goes on behind the largest position before it.
        assert isinstance(items[1], PromptRows)
        assert items[1].positions.tolist() == [[3, 24, 25], [13, 24, 25], [23, 24, 25]]
        assert items[1].states.tolist() == [True, False, False]
        await talker.feed.finish()
        assert talker.items() == [AnswerEnd()]


async def test_text_goes_on_behind_a_picture_that_came_in_pieces() -> None:
    """The largest position is that of its right edge, which the last piece does not reach."""
    pieces = [[[1, 1, 1], [1, 1, 1], [1, 2, 3]], [[1, 1], [2, 2], [1, 2]]]
    with fed(qwen3()) as talker:
        talker.prompt(5, *[91] * 5, 6, 7)
        (receiver,) = talker.rows.channel.receivers.values()
        receiver.take_rows(np.arange(1, 4), np.array(pieces[0]), np.zeros((3, WIDTH), np.float32))
        receiver.take_rows(np.arange(4, 6), np.array(pieces[1]), np.zeros((2, WIDTH), np.float32))
        positions = np.concatenate([item.positions for item in talker.items() if isinstance(item, PromptRows)], axis=1)
    assert positions[:, -2:].tolist() == [[4, 5]] * 3


async def test_an_answer_waits_for_the_states_of_its_tokens() -> None:
    with fed(qwen25()) as talker:
        talker.prompt(1, 2)
        talker.feed.say([(0, 7), (2, 8)])  # what is between them is not spoken
        talker.compute(0, 1)
        assert told(talker.items()) == [("P", [1, 2], [0, 1])]
        talker.compute(2, 3)
        assert told(talker.items()) == [("A", [7], [2])]
        finishing = asyncio.create_task(talker.feed.finish())
        await asyncio.sleep(0)
        assert not finishing.done()
        talker.compute(4)
        await finishing
        assert told(talker.items()) == [("A", [8], [4]), AnswerEnd]


async def test_a_prompt_that_turns_out_otherwise_begins_anew() -> None:
    with fed(qwen3()) as talker:
        talker.prompt(1, 2, PAD, sounds=[(2, 1, "a")])
        talker.compute(2)
        talker.prompt(3, 4, more=True)
        assert told(talker.items()) == [("P", [1, 2], []), ("P", [PAD], [2]), ("P", [3, 4], [])]
        (late,) = talker.rows.channel.receivers
        # Without an earlier turn: the sound is at another place.
        talker.prompt(1, PAD, 5, sounds=[(1, 1, "a")])
        assert late not in talker.rows.channel.receivers, "rows of the prompt before do not count"
        assert told(talker.items()) == [PromptReset, ("P", [1], [])]
        talker.compute(1)
        assert told(talker.items()) == [("P", [PAD, 5], [1])]


async def test_a_prompt_that_goes_on_does_not_begin_anew() -> None:
    with fed(qwen3()) as talker:
        talker.prompt(1, 2)
        talker.prompt(1, 2, 3)
        assert told(talker.items()) == [("P", [1, 2], []), ("P", [3], [])]


async def test_another_sound_of_the_same_length_is_another_prompt() -> None:
    rows = qwen3()
    with fed(rows, "session") as talker:
        talker.prompt(1, PAD, sounds=[(1, 1, "a")])
        talker.compute(1)
    for content in ("b", "a"):  # after which the first one is no longer kept either
        with fed(rows, "session") as talker:
            talker.prompt(1, PAD, sounds=[(1, 1, content)])
            assert told(talker.items()) == [("P", [1], [])]
            talker.compute(1)
    with fed(rows, "session") as talker:
        talker.prompt(1, PAD, sounds=[(1, 1, "a")])
        assert told(talker.items()) == [("P", [1, PAD], [1])]


async def test_what_is_in_the_cache_and_not_kept_has_to_be_computed_again() -> None:
    from types import SimpleNamespace

    parameters: Any = SimpleNamespace(extra_args=None, skip_reading_prefix_cache=None)
    parameters.clone = lambda: SimpleNamespace(extra_args=None, skip_reading_prefix_cache=None)
    with fed(qwen3()) as talker:
        talker.prompt(1, PAD, 2, sounds=[(1, 1, "a")])
        assert talker.feed.with_rows(parameters).skip_reading_prefix_cache is None
        assert not await talker.feed.computed(2)
        assert talker.feed.with_rows(parameters).skip_reading_prefix_cache
        talker.compute(1)
        assert await talker.feed.computed(0)


async def test_the_cache_may_end_where_the_rows_begin() -> None:
    with fed(qwen3()) as talker:
        talker.prompt(1, PAD, sounds=[(1, 1, "a")])
        waiting = asyncio.create_task(talker.feed.computed(1))
        await asyncio.sleep(0)
        talker.compute(1)
        assert await waiting


async def test_text_alone_asks_for_nothing_and_has_the_ordinary_salt() -> None:
    with fed(qwen3(), "session") as talker:
        talker.prompt(1, 2)
        parameters: Any = object()
        assert talker.feed.with_rows(parameters) is parameters
        assert talker.feed.salt(media=False) == "the owner's"
        assert talker.feed.salt(media=True) != "the owner's"
    assert len(talker.rows.kept) == 0


async def test_every_conversation_with_states_has_a_salt_of_its_own() -> None:
    rows = qwen25()
    salts = []
    for conversation in ("one", "one", "other", None, None):
        with fed(rows, conversation) as talker:
            talker.prompt(1)
            talker.compute(0)
            salts.append(talker.feed.salt(media=False))
    assert salts[0] == salts[1]
    assert len(set(salts)) == 4


async def test_a_talker_that_has_ended_gets_nothing_more() -> None:
    with fed(qwen3()) as talker:
        talker.prompt(1)
        talker.sink.discard()
        talker.feed.say([(0, 7)])
        await talker.feed.finish()
        assert talker.items() == []


async def test_a_long_prompt_that_is_kept_is_handed_on_in_several_passes() -> None:
    rows = qwen25()
    with fed(rows, "session") as talker:
        talker.prompt(*range(1300))
        talker.compute(*range(1300))
    with fed(rows, "session") as talker:
        talker.prompt(*range(1301))
        assert [len(item.tokens) for item in talker.items() if isinstance(item, PromptRows)] == [512]
        talker.feed.say([(0, 7)])
        assert talker.items() == []
        waiting = asyncio.create_task(talker.feed.computed(1300))  # all of these are kept
        await asyncio.sleep(0)
        talker.compute(1300, 1301)
        assert await waiting
        items = talker.items()
        assert [len(item.tokens) for item in items if isinstance(item, PromptRows)] == [512, 277]
        assert told(items[-1:]) == [("A", [7], [1301])]


@pytest.mark.virtual_clock
async def test_rows_that_do_not_come_are_an_error() -> None:
    with fed(qwen25()) as talker:
        talker.prompt(1)
        with pytest.raises(EngineFailed, match="did not arrive"):
            await talker.feed.computed(0)


@pytest_asyncio.fixture
async def connection() -> AsyncIterator[tuple[ThinkerRows, asyncio.StreamWriter]]:
    rows = qwen25()
    await rows.channel.start()
    _, writer = await asyncio.open_unix_connection(rows.channel.address)
    yield rows, writer
    writer.close()
    await writer.wait_closed()
    await rows.channel.stop()


async def test_rows_reach_the_request_that_asked(
    connection: tuple[ThinkerRows, asyncio.StreamWriter],
) -> None:
    """Those of a request that has ended are passed over."""
    rows, writer = connection
    with fed(rows) as talker:
        talker.prompt(1, 2)
        (key,) = rows.channel.receivers
        for receiver in ("ended", key):
            body = struct.pack("<8q", *[0, 1] * 4) + np.full((2, WIDTH), 5, np.float32).tobytes()
            writer.write(encode_message(SentRows(receiver, 2, WIDTH, bfloat16=False), body))
        assert await talker.feed.computed(0)
        assert told(talker.items()) == [("P", [1, 2], [5, 5])]


async def test_the_end_of_the_worker_ends_the_wait(connection: tuple[ThinkerRows, asyncio.StreamWriter]) -> None:
    rows, writer = connection
    with fed(rows) as talker:
        talker.prompt(1)
        waiting = asyncio.create_task(talker.feed.computed(0))
        await asyncio.sleep(0)
        writer.close()
        with pytest.raises(EngineFailed, match="died") as failed:
            await waiting
        assert failed.value.fatal


@pytest.mark.parametrize(
    ("name", "value"), [("pipeline_parallel_size", 2), ("worker_extension_cls", "theirs"), ("data_parallel_size", 2)]
)
async def test_arguments_with_which_there_are_no_rows_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"vllm.args.{name} must be .* for a model that speaks itself"):
        ThinkerRows.check_args({name: value})
    ThinkerRows.check_args({"tensor_parallel_size": 2})

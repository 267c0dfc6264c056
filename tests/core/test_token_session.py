"""Offsets, truncation, forks and images of a token session, and ranges of positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_ws.core.token_session import TokenImage, TokenRanges, TokenSession, VisionTokens
from omni_ws.errors import ContextLengthExceeded, InvalidValue, OffsetMismatch, OmniError

START, PAD, END = 90, 91, 92
BLOCK = [START, PAD, PAD, END]


def session(*tokens: int, max_length: int = 64) -> TokenSession:
    made = TokenSession(max_length=max_length, vocabulary=100, vision=VisionTokens(START, PAD, END))
    made.begin(tokens, offset=0)
    made.commit()
    return made


def image(start: int, end: int) -> TokenImage:
    return TokenImage(b"pixels", "image/png", start, end)


def with_image() -> TokenSession:
    """1, the block at [1, 5), 2."""
    made = session()
    made.begin([1, *BLOCK, 2], offset=0, images=[image(1, 5)])
    made.commit()
    return made


def test_tokens_are_appended_at_the_end() -> None:
    made = session(1, 2)
    made.begin([3], offset=2)
    made.commit()
    made.decoded(4)
    assert list(made.tokens) == [1, 2, 3, 4]
    assert len(made) == 4


@pytest.mark.parametrize(("offset", "truncating"), [(1, False), (3, False), (3, True), (2**32 - 1, True)])
def test_a_wrong_offset_changes_nothing(offset: int, truncating: bool) -> None:
    made = session(1, 2)
    with pytest.raises(OffsetMismatch, match="2 tokens") as refusal:
        made.begin([9], offset=offset, truncating=truncating)
    assert refusal.value.param == "offset"
    assert list(made.tokens) == [1, 2]
    made.begin([3], offset=2)
    made.commit()


@pytest.mark.parametrize("offset", [0, 1, 2])
def test_truncation_rewrites_from_the_offset(offset: int) -> None:
    made = session(1, 2)
    made.begin([9], offset=offset, truncating=True)
    made.commit()
    assert list(made.tokens) == [*[1, 2][:offset], 9]


def test_an_append_can_be_taken_back() -> None:
    made = with_image()
    made.begin([7, 8], offset=5, truncating=True)
    assert list(made.tokens) == [1, *BLOCK, 7, 8]
    assert list(made.committed()) == [1, *BLOCK, 2]
    made.rollback()
    made.commit()
    assert list(made.tokens) == list(made.committed()) == [1, *BLOCK, 2]
    assert len(made.images) == 1


def test_what_was_confirmed_stays() -> None:
    made = session(1)
    made.begin([2], offset=1)
    made.commit()
    made.rollback()
    assert list(made.committed()) == [1, 2]


def test_a_truncation_that_drops_an_image_can_be_taken_back() -> None:
    made = with_image()
    made.begin([], offset=1, truncating=True)
    assert not made.images
    made.rollback()
    assert [(one.start, one.end) for one in made.images] == [(1, 5)]


def test_the_list_may_be_as_long_as_the_model_reads_and_no_longer() -> None:
    made = session(*range(3), max_length=5)
    with pytest.raises(ContextLengthExceeded):
        made.begin([1, 2, 3], offset=3)
    made.begin([1, 2], offset=3)
    made.commit()
    assert len(made) == 5
    made.begin([1], offset=4, truncating=True)
    made.commit()


def test_token_ids_are_below_the_vocabulary() -> None:
    made = session()
    with pytest.raises(InvalidValue, match="less than 100"):
        made.begin([99, 100], offset=0)
    made.begin([99], offset=0)
    made.commit()


# images


def test_images_at_and_after_a_truncation_are_dropped() -> None:
    made = with_image()
    made.begin([3], offset=5, truncating=True)
    made.commit()
    assert len(made.images) == 1
    made.begin([3], offset=1, truncating=True)
    made.commit()
    assert not made.images


@pytest.mark.parametrize("offset", [2, 3, 4])
def test_no_cut_goes_through_an_image(offset: int) -> None:
    made = with_image()
    with pytest.raises(OffsetMismatch, match="inside the image"):
        made.begin([3], offset=offset, truncating=True)
    with pytest.raises(OffsetMismatch, match="inside the image"):
        made.fork(offset)
    assert list(made.tokens) == [1, *BLOCK, 2]


@pytest.mark.parametrize(
    ("tokens", "images"),
    [
        (BLOCK, []),
        ([1], [image(0, 1)]),
        ([START, END], [image(0, 2)]),
        ([START, PAD, 1, END], [image(0, 4)]),
        ([START, PAD, PAD, 1], [image(0, 4)]),
        ([1, PAD, PAD, END], [image(0, 4)]),
        ([*BLOCK, *BLOCK], [image(0, 4)]),
        (BLOCK, [image(0, 4), image(0, 4)]),
        (BLOCK, [image(0, 5)]),
        (BLOCK, [image(4, 8)]),
        ([*BLOCK, PAD], [image(0, 4)]),
        ([*BLOCK, END], [image(0, 4)]),
    ],
    ids=str,
)
def test_blocks_and_images_that_do_not_fit_are_refused(tokens: list[int], images: list[TokenImage]) -> None:
    made = session()
    with pytest.raises(InvalidValue):
        made.begin(tokens, offset=0, images=images)
    assert len(made) == 0
    assert made.images == ()


def test_an_image_lies_within_what_is_appended() -> None:
    made = with_image()
    with pytest.raises(InvalidValue, match="appended"):
        made.begin([3], offset=6, images=[image(1, 5)])


def test_two_images_in_any_order() -> None:
    made = session()
    made.begin([*BLOCK, 5, *BLOCK], offset=0, images=[image(5, 9), image(0, 4)])
    made.commit()
    assert [one.start for one in made.images] == [0, 5]
    assert [one.features for one in made.images] == [2, 2]


def test_a_model_that_sees_nothing_takes_no_images() -> None:
    made = TokenSession(max_length=8, vocabulary=100)
    with pytest.raises(InvalidValue, match="not supported by this model"):
        made.begin(BLOCK, offset=0, images=[image(0, 4)])
    made.begin(BLOCK, offset=0)  # ordinary tokens for a model without images
    made.commit()


# forks


@pytest.mark.parametrize("at", [0, 1, 5, 6])
def test_a_fork_has_the_first_tokens_and_the_images_in_them(at: int) -> None:
    parent = with_image()
    child = parent.fork(at)
    assert list(child.tokens) == [1, *BLOCK, 2][:at]
    assert child.images == (parent.images if at >= 5 else ())
    child.begin([3], offset=at)
    child.commit()
    assert list(parent.tokens) == [1, *BLOCK, 2]


def test_a_fork_beyond_the_end_is_refused() -> None:
    with pytest.raises(InvalidValue) as refusal:
        session(1).fork(2)
    assert refusal.value.param == "at_position"


# ranges

SOME_RANGES = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda pair: (min(pair), max(pair))))


@given(SOME_RANGES, st.integers(0, 40))
def test_ranges_are_the_union_of_what_they_cover(ranges: list[tuple[int, int]], limit: int) -> None:
    wanted = {position for start, end in ranges for position in range(start, end)}
    union = TokenRanges(ranges)
    assert {position for position in range(40) if position in union} == wanted
    assert list(union.below(limit)) == sorted(position for position in wanted if position < limit)
    assert union.reaches(limit) == any(position >= limit for position in wanted)
    assert bool(union) == bool(wanted)
    assert union.first == min(wanted, default=None)


def test_a_range_that_ends_before_it_starts_is_named() -> None:
    with pytest.raises(InvalidValue) as refusal:
        TokenRanges([(0, 1), (3, 2)], param="logprobs_ranges")
    assert refusal.value.param == "logprobs_ranges[1]"


def test_everything_costs_no_time() -> None:
    assert (2**32 - 2) in TokenRanges([(0, 2**32 - 1)])
    assert list(TokenRanges([(0, 2**32 - 1)]).below(3)) == [0, 1, 2]


# any order of calls, against a plain list


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["commit", "rollback", "decoded", "fork"]),
        st.lists(st.integers(0, 110), max_size=6),
        st.integers(0, 20),
        st.booleans(),
    ),
    max_size=20,
)


@given(OPERATIONS)
def test_a_session_is_a_list_and_refusals_leave_it_alone(
    operations: list[tuple[str, list[int], int, bool]],
) -> None:
    made = TokenSession(max_length=16, vocabulary=100)
    plain: list[int] = []

    def refused(call: Callable[[], object]) -> bool:
        try:
            call()
        except OmniError:
            return True
        return False

    for name, tokens, offset, truncating in operations:
        if name == "decoded":
            made.decoded(7)
            plain.append(7)
        elif name == "fork":
            assert refused(lambda at=offset: made.fork(at)) == (offset > len(plain))  # type: ignore[misc]
        else:
            try:
                made.begin(tokens, offset=offset, truncating=truncating)
            except OmniError:
                assert list(made.tokens) == plain
                continue
            assert offset == len(plain) or (truncating and offset < len(plain))
            getattr(made, name)()
            if name == "commit":
                plain = plain[:offset] + tokens
        assert list(made.tokens) == list(made.committed()) == plain


def test_too_many_tokens_are_refused_without_a_look_at_them() -> None:
    class Millions(list[int]):
        def __len__(self) -> int:
            return 40_000_000

        def __iter__(self) -> Iterator[int]:
            raise AssertionError("this takes seconds")

    made = session(5, 6)
    with pytest.raises(ContextLengthExceeded, match="got 40000002"):
        made.begin(Millions(), offset=2)
    assert list(made.tokens) == [5, 6]

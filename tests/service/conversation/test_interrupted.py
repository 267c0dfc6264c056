"""When the finals and the late transcripts of turns are due whose answer was cut off."""

from __future__ import annotations

import pytest
from support.parts_of_sessions import make_request

from omni_ws.service.conversation.interrupted import FINAL_WAITS_SEC, MOST_WRITTEN_DOWN, CutTurns, Due
from omni_ws.service.conversation.request import Request

PATIENCE = 30.0


class Bench:
    """Does what is due at once, and counts it."""

    def __init__(self) -> None:
        self.turns = CutTurns(PATIENCE)
        self.requests: list[Request] = []

    def cut(self, *, now: float = 0, known: bool = False, at_once: bool = False) -> Request:
        request = make_request(f"req_{len(self.requests)}")
        request.number = len(self.requests)
        self.requests.append(request)
        self.turns.add(request, known=known, at_once=at_once, now=now)
        return request

    def later(self) -> Request:
        """A request that is opened behind them."""
        request = make_request("req_later")
        request.number, request.conversation = len(self.requests), "sess_1"
        return request

    def due(self, now: float) -> list[tuple[Due, int]]:
        found = []
        for due, request in self.turns.due(now=now):
            found.append((due, request.number))
            request.remembered = request.remembered or due is Due.WORDS
        return found


def test_words_in_time_come_before_the_final() -> None:
    bench = Bench()
    request = bench.cut()
    assert (bench.due(1), bench.turns.get_timer()) == ([], FINAL_WAITS_SEC)
    assert bench.turns.known(request)
    assert bench.due(1) == [(Due.WORDS, 0), (Due.FINAL, 0)]
    assert (len(bench.turns), bench.turns.get_timer()) == (0, None)
    assert not bench.turns.known(request)


@pytest.mark.parametrize("past", [False, True])
def test_the_final_waits_for_so_long(past: bool) -> None:
    bench = Bench()
    request = bench.cut()
    assert bench.due(FINAL_WAITS_SEC if past else FINAL_WAITS_SEC - 0.001) == ([(Due.FINAL, 0)] if past else [])
    bench.turns.known(request)
    last = [(Due.WORDS, 0), (Due.LATE_WORDS, 0)] if past else [(Due.WORDS, 0), (Due.FINAL, 0)]
    assert bench.due(FINAL_WAITS_SEC) == last


@pytest.mark.parametrize("past", [False, True])
def test_words_are_given_up_after_so_long(past: bool) -> None:
    bench = Bench()
    bench.cut(at_once=True)
    assert bench.due(0) == [(Due.FINAL, 0)]
    assert bench.turns.get_timer() == PATIENCE
    given_up = [(Due.GIVE_UP, 0), (Due.WORDS, 0), (Due.LATE_WORDS, 0)]
    assert bench.due(PATIENCE if past else PATIENCE - 0.001) == (given_up if past else [])


def test_finals_come_in_the_order_of_the_requests() -> None:
    bench = Bench()
    first, _, third = bench.cut(), bench.cut(known=True), bench.cut(now=1)
    bench.turns.known(third)
    assert bench.due(2) == []
    assert bench.due(FINAL_WAITS_SEC) == [(Due.FINAL, 0), (Due.FINAL, 1), (Due.FINAL, 2)]
    bench.turns.known(first)
    # Only the first has words that its final did not bring.
    assert bench.due(4) == [(Due.WORDS, 0), (Due.LATE_WORDS, 0), (Due.WORDS, 1), (Due.WORDS, 2)]
    assert len(bench.turns) == 0


def test_words_enter_the_history_in_the_order_of_the_requests() -> None:
    bench = Bench()
    first, typed, later = bench.cut(), bench.cut(known=True), bench.later()
    assert bench.due(1) == []
    assert bench.turns.pending_before(later) == [first, typed]
    bench.turns.known(first)
    assert bench.due(1) == [(Due.WORDS, 0), (Due.WORDS, 1), (Due.FINAL, 0), (Due.FINAL, 1)]
    assert bench.turns.pending_before(later) == []


def test_a_final_that_comes_at_once_takes_those_before_it_along() -> None:
    bench = Bench()
    bench.cut()
    bench.cut(at_once=True, now=1)
    bench.cut(now=1)
    assert bench.due(1) == [(Due.FINAL, 0), (Due.FINAL, 1)]
    assert bench.turns.get_timer() == 1 + FINAL_WAITS_SEC


@pytest.mark.parametrize("sees", [True, False])
def test_what_comes_next_waits_for_finals_and_where_it_sees_them_for_words(sees: bool) -> None:
    bench = Bench()
    request, later = bench.cut(), bench.later()
    later.context = None if sees else ()
    assert bench.turns.before(later)
    bench.due(FINAL_WAITS_SEC)
    assert bench.turns.before(later) is sees
    assert bench.turns.pending_before(later) == [request]
    bench.turns.known(request)
    bench.due(FINAL_WAITS_SEC)
    assert not bench.turns.before(later)
    assert bench.turns.pending_before(later) == []


@pytest.mark.parametrize("past", [False, True])
def test_so_many_are_written_down_at_the_same_time(past: bool) -> None:
    bench = Bench()
    for _ in range(MOST_WRITTEN_DOWN + past):
        bench.cut(now=1)
    assert [due for due, _ in bench.due(1)] == ([Due.GIVE_UP, Due.WORDS, Due.FINAL] if past else [])


def test_at_the_end_of_a_session_nothing_is_waited_for() -> None:
    bench = Bench()
    bench.cut()
    bench.turns.give_all_up(now=1)
    assert bench.due(1) == [(Due.GIVE_UP, 0), (Due.WORDS, 0), (Due.FINAL, 0)]

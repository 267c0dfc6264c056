import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from omni_ws.engine.loan_pool import LoanPool
from omni_ws.errors import EngineFailed


class _Item:
    closed = False

    def close(self) -> None:
        self.closed = True


def test_what_comes_back_is_lent_again() -> None:
    pool = LoanPool(_Item)
    first, second = pool.borrow(), pool.borrow()
    assert first is not second
    assert (pool.loaded, pool.borrowed) == (2, 2)
    pool.give_back(first)
    assert pool.borrow() is first
    assert pool.loaded == 2


def test_a_failed_load_leaves_no_trace() -> None:
    def broken() -> _Item:
        raise EngineFailed("no memory")

    pool = LoanPool(broken)
    for call in (pool.borrow, lambda: pool.fill(1)):
        with pytest.raises(EngineFailed, match="no memory"):
            call()
    assert (pool.loaded, pool.borrowed) == (0, 0)


def test_a_borrower_takes_what_is_just_being_loaded() -> None:
    loading, go_on = threading.Event(), threading.Event()

    def slow() -> _Item:
        loading.set()
        assert go_on.wait(10)
        return _Item()

    pool = LoanPool(slow)
    with ThreadPoolExecutor(2) as threads:
        filling = threads.submit(pool.fill, 1)
        assert loading.wait(10)
        assert pool.borrow_ready() is None
        borrowing = threads.submit(pool.borrow)
        go_on.set()
        filling.result(10)
        borrowing.result(10)
    assert (pool.loaded, pool.borrowed) == (1, 1)
    assert pool.borrow_ready() is not None
    assert pool.loaded == 2


def test_closing_frees_all_also_what_comes_back_later() -> None:
    pool = LoanPool(_Item)
    early, late = pool.borrow(), pool.borrow()
    pool.give_back(early)
    pool.close()
    assert [early.closed, late.closed] == [True, False]
    pool.give_back(late)
    assert [early.closed, late.closed] == [True, True]
    assert pool.loaded == 0
    with pytest.raises(EngineFailed):
        pool.borrow()
    pool.close()

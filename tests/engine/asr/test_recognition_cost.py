"""How many talkers recognition carries, by what it took."""

from __future__ import annotations

import pytest

from omni_ws.engine.asr.whisper import RecognitionCost, interim_gap_sec


def measured(workers: int, *, settled: float, interim: float) -> RecognitionCost:
    """After a settled text of three seconds, and an interim one."""
    cost = RecognitionCost(workers)
    cost.note_settled(settled, 3)
    cost.note_interim(interim)
    return cost


def test_before_anything_was_measured_there_is_one_for_each_worker() -> None:
    assert RecognitionCost(2).talkers() == 2


@pytest.mark.parametrize(
    ("workers", "settled", "interim", "talkers"),
    [
        (1, 0.17, 0.15, 4),  # one core of a server of today
        (2, 0.17, 0.15, 9),
        (1, 0.34, 0.33, 2),  # a larger model
        (4, 3.0, 3.0, 4),  # too slow for anybody, and still one for each worker
    ],
)
def test_talkers_follow_the_cost(workers: int, settled: float, interim: float, talkers: int) -> None:
    assert measured(workers, settled=settled, interim=interim).talkers() == talkers


@pytest.mark.parametrize(("settled", "talkers"), [(0.17, 21), (3.0, 2)])
def test_without_interim_texts_more_are_carried(settled: float, talkers: int) -> None:
    assert measured(2, settled=settled, interim=0.15).talkers(False) == talkers


def test_the_newest_work_counts_most() -> None:
    cost = measured(2, settled=0.17, interim=0.15)
    for _ in range(30):
        cost.note_settled(0.51, 3)
        cost.note_interim(0.45)
    assert cost.talkers() == 3
    cost.note_interim(0.15)  # one fast reading says little
    assert cost.talkers() == 3


@pytest.mark.parametrize(("took", "gap"), [(0.0, 0.5), (0.14, 0.5), (0.3, 1.0), (0.44, 1.4667), (4.0, 1.5)])
def test_interim_texts_come_less_often_when_they_take_long(took: float, gap: float) -> None:
    assert interim_gap_sec(took) == pytest.approx(gap, abs=0.001)

"""When a step hangs, and who is behind."""

from __future__ import annotations

import threading

from qwen_edit_zero.cluster.pulse import Position, Seen
from qwen_edit_zero.cluster.watchdog import Watchdog, behind


def seen(rank: int, step: int, count: int, doing: str = "summing losses over ranks") -> Seen:
    return Seen(rank, f"node{rank // 2}", 100 + rank, step, count, doing)


def test_the_usual_is_the_median_once_there_are_steps_enough() -> None:
    watchdog = Watchdog(lambda text: None, factor=5, extra_seconds=60, first_seconds=1800)
    limits = []
    for seconds in (300.0, 2.0, 2.0, 2.0, 400.0, 2.0):
        watchdog.stepped(seconds)
        limits.append(watchdog.limit())
    assert limits == [1800, 1800, 1800, 1800, 70, 70]


def test_a_step_that_takes_too_long_raises_one_alarm_and_what_is_between_steps_none() -> None:
    raised, told, place = threading.Event(), list[str](), Position()

    def alarm(text: str) -> None:
        told.append(text)
        raised.set()

    with Watchdog(alarm, factor=2, extra_seconds=0.1, first_seconds=0.2, place=place) as watchdog:
        assert not raised.wait(1.0), "no step has begun"
        place.begin(1)
        assert raised.wait(30)
        watchdog._thread.join(30)
    assert len(told) == 1
    assert told[0].startswith("step 1 has not ended after ")


def test_the_rank_that_is_behind_is_named() -> None:
    others = [seen(rank, 7, 5) for rank in range(3)]
    culprit, text = behind([*others, seen(3, 7, 1, "waiting for the data of micro-batch 1 of 2")])
    assert culprit is not None
    assert culprit.rank == 3
    assert text == (
        "behind: rank 3 (node1, process 103), step 7, waiting for the data of micro-batch 1 of 2; "
        "the others: step 7, summing losses over ranks"
    )
    assert behind(others) == (None, "all ranks are at the same place: summing losses over ranks")
    assert behind([*others, seen(3, 6, 9), seen(4, 6, 9)])[0] is None
    assert behind([])[0] is None

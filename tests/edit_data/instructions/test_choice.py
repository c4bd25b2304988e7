"""The text of a draw is a pure function, uniform over the texts, and dropped as often as the setting says."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen_edit_zero.edit_data.instructions.choice import choose

IDS = [f"sample-{i}" for i in range(20_000)]


def test_every_text_is_chosen_equally_often_and_captions_are_dropped_at_the_rate() -> None:
    counts = Counter(choose(0, i, 3, 0, 5, 0.1) for i in IDS)
    assert counts[4] == pytest.approx(2000, abs=170)  # 4 standard deviations of a binomial
    for text in range(4):
        assert counts[text] == pytest.approx(4500, abs=240)


@pytest.mark.parametrize("vary", ["seed", "id", "epoch", "draw"])
def test_seed_id_epoch_and_draw_each_draw_anew(vary: str) -> None:
    draws = []
    for k in range(4000):
        seed, name, epoch, draw = (k if vary == v else 0 for v in ("seed", "id", "epoch", "draw"))
        draws.append(choose(seed, f"s{name}", epoch, draw, 4, 0.0))
    counts = Counter(draws)
    assert all(counts[i] == pytest.approx(1000, abs=110) for i in range(4))
    pairs = Counter(pairwise(draws))
    assert all(pairs[i, j] == pytest.approx(250, abs=62) for i in range(4) for j in range(4))


def test_more_paraphrases_do_not_change_whether_a_caption_is_dropped() -> None:
    for name in IDS[:2000]:
        assert (choose(1, name, 0, 0, 2, 0.3) == 1) == (choose(1, name, 0, 0, 7, 0.3) == 6)


@given(
    seed=st.integers(0, 2**63),
    name=st.text(),
    epoch=st.integers(0, 10**9),
    draw=st.integers(0, 10**6),
    n=st.integers(2, 50),
    dropout=st.sampled_from([0.0, 1e-9, 0.5, 1.0]),
)
def test_the_index_is_one_of_the_texts(seed: int, name: str, epoch: int, draw: int, n: int, dropout: float) -> None:
    index = choose(seed, name, epoch, draw, n, dropout)
    assert 0 <= index < n
    if dropout == 1.0:
        assert index == n - 1
    assert index == choose(seed, name, epoch, draw, n, dropout)


def test_another_process_chooses_the_same() -> None:
    script = (
        "from qwen_edit_zero.edit_data.instructions.choice import choose;"
        "print([choose(7, str(i), i % 3, i % 2, 5, 0.2) for i in range(50)])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == str([choose(7, str(i), i % 3, i % 2, 5, 0.2) for i in range(50)])


def test_resumed_runs_keep_the_texts_of_this_release() -> None:
    assert [choose(0, "a", epoch, 0, 6, 0.1) for epoch in range(8)] == [2, 2, 3, 4, 2, 5, 2, 1]


def test_no_text_left_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="leave no text"):
        choose(0, "a", 0, 0, 1, 0.5)

"""How steps fall to ranks and micro-batches."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_edit_zero.edit_data.batches.cost import SampleCosts
from qwen_edit_zero.edit_data.batches.schedule import StepPlan
from qwen_edit_zero.edit_data.batches.split import StepShare, share_of_step
from qwen_edit_zero.planning.passes.flops import training_flops

lengths = st.lists(st.integers(20, 2000), min_size=1, max_size=70)


def costs(lengths: list[int], *, width: int = 3072) -> SampleCosts:
    """Of samples of one bucket with prompts of these lengths."""
    count = len(lengths)
    return SampleCosts(width, np.array([8192]), np.zeros(count, np.int32), np.array(lengths, np.int32))


def split(lengths: list[int] | None, total: int, world_size: int, micro_size: int) -> list[StepShare]:
    plan = StepPlan(0, 0, tuple(range(total)), tuple(i % 3 for i in range(total)))
    known = None if lengths is None else costs(lengths)
    return [
        share_of_step(plan, rank=r, world_size=world_size, micro_size=micro_size, costs=known)
        for r in range(world_size)
    ]


@settings(max_examples=300)
@given(lengths, st.booleans(), st.integers(1, 9), st.integers(1, 9))
def test_shares_of_ranks_are_the_step_and_need_the_same_number_of_forwards(
    lengths: list[int], known: bool, world_size: int, micro_size: int
) -> None:
    total = len(lengths)
    shares = [s.micro_batches for s in split(lengths if known else None, total, world_size, micro_size)]
    assert len({len(share) for share in shares}) == 1
    largest_share = math.ceil(total / world_size)
    assert len(shares[0]) == math.ceil(largest_share / micro_size), "no more forwards than sizes ask for"
    assert all(1 <= len(m.indices) <= micro_size for share in shares for m in share)
    real = [[m for m in share if not m.filler] for share in shares]
    assert sorted(i for share in real for m in share for i in m.indices) == list(range(total))
    assert all(m.draws == tuple(i % 3 for i in m.indices) for share in shares for m in share)
    if total >= world_size:
        assert all(real)
    for share in shares:
        assert [m.filler for m in share] == sorted(m.filler for m in share), "fillers come last"


@given(lengths, st.integers(1, 9), st.integers(1, 9))
def test_rounds_are_of_neighbours_in_length_and_fillers_are_the_shortest(
    lengths: list[int], world_size: int, micro_size: int
) -> None:
    shares = [s.micro_batches for s in split(lengths, len(lengths), world_size, micro_size)]
    for share in shares:
        for m in share:
            if m.filler:
                assert [lengths[i] for i in m.indices] == [min(lengths)]
    batches = [[lengths[i] for i in m.indices] for share in shares for m in share if not m.filler]
    ranges = sorted((min(batch), max(batch)) for batch in batches)
    assert all(longest <= shortest for (_, longest), (shortest, _) in itertools.pairwise(ranges))


@settings(max_examples=300)
@given(st.integers(1, 5), st.integers(1, 9), st.data())
def test_no_rank_computes_much_more_than_another(rounds: int, world_size: int, data: st.DataObject) -> None:
    """With one sample a micro-batch, loads differ by less than the dearest sample: the bound of greedy assignment."""
    total = rounds * world_size
    lengths = data.draw(st.lists(st.integers(20, 2000), min_size=total, max_size=total))
    flop = costs(lengths).flop(np.array(lengths) + 8192)
    shares = split(lengths, total, world_size, 1)
    loads = [sum(flop[i] for m in share.micro_batches for i in m.indices) for share in shares]
    assert max(loads) - min(loads) <= max(flop) - min(flop)
    assert [share.imbalance for share in shares] == pytest.approx(
        [max(loads) / np.mean(loads) - 1] * world_size, abs=1e-9
    )


def test_assignment_by_cost_beats_assignment_in_order() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(200, 2000, 64).tolist()
    flop = costs(lengths).flop(np.array(lengths) + 1024)
    in_order = flop.reshape(8, 8).sum(axis=1)
    assert split(lengths, 64, 8, 1)[0].imbalance < 0.2 * (in_order.max() / in_order.mean() - 1)


def test_imbalance_counts_fillers_and_padding() -> None:
    assert split(None, 8, 8, 1)[0].imbalance == 0
    assert split(None, 1, 8, 1)[0].imbalance == pytest.approx(7)
    assert split([500, 100], 2, 1, 1)[0].imbalance == pytest.approx(0)
    flop = costs([]).flop(np.array([8692, 8292]))
    padded = split([500, 100], 2, 1, 2)[0].imbalance
    assert padded == pytest.approx(2 * flop[0] / flop.sum() - 1)


def test_costs_are_in_proportion_to_what_the_model_computes() -> None:
    config = {"num_attention_heads": 24, "attention_head_dim": 128, "num_layers": 60, "in_channels": 64,
              "out_channels": 16, "joint_attention_dim": 3584}  # fmt: skip
    flop = costs([]).flop(np.array([8192 + 200, 8192 + 2000]))
    exact = [training_flops(config, image_tokens=8192, text_tokens=text, checkpointing=False) for text in (200, 2000)]
    assert flop[1] / flop[0] == pytest.approx(exact[1] / exact[0], rel=1e-3)

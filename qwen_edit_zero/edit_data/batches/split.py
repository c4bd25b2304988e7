"""How a step falls to ranks and micro-batches. What is trained does not depend on it: losses are summed.

All ranks must run the same number of micro-batches, and with sharded weights they run each together: a *round* takes as
long as its slowest micro-batch. A step is of one bucket, so samples differ by the length of their prompts only. So
samples are sorted by cost and cut into micro-batches of neighbours, which pads little; micro-batches of a round are
neighbours too, which makes them alike; and in every round the dearest goes to the rank that has the least so far
(longest processing time first). A rank with nothing left in the last round runs a *filler*: the cheapest sample of the
step, with weight 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from qwen_edit_zero.edit_data.batches.cost import Costs, SampleCosts
from qwen_edit_zero.edit_data.batches.schedule import StepPlan
from qwen_edit_zero.edit_data.batches.shuffle import Longs


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples of one forward of one rank, and how often each came before in the epoch. A filler must weigh nothing."""

    indices: tuple[int, ...]
    draws: tuple[int, ...]
    filler: bool = False


@dataclass(frozen=True)
class StepShare:
    """What one rank computes of a step.

    Attributes:
        micro_batches: in the order in which they run; as many on every rank.
        imbalance: of the whole step, the same on every rank: what the rank with the most to do computes, padding and
            fillers included, over what the step's samples cost at their own lengths divided by the number of ranks,
            minus 1. 0: nothing is wasted. 7: eight ranks wait for a step of a single sample.
    """

    micro_batches: tuple[MicroBatch, ...]
    imbalance: float


def share_of_step(
    plan: StepPlan, *, rank: int, world_size: int, micro_size: int, costs: SampleCosts | None = None
) -> StepShare:
    """One rank's share of a step divided over ranks and micro-batches of at most `micro_size` samples.

    There are no more rounds than the most even division by number needs. Without `costs` all samples cost the same.
    """
    assert 0 <= rank < world_size
    assert micro_size > 0
    indices = np.asarray(plan.indices, np.int64)
    count = len(indices)
    assert count > 0
    tokens = costs.tokens(indices) if costs is not None else np.ones(count, np.int64)
    order = np.argsort(-tokens, kind="stable")
    largest_share = -(-count // world_size)
    rounds = -(-largest_share // micro_size)
    used = min(count, rounds * world_size)  # micro-batches with samples
    sizes = np.full(used, count // used)
    sizes[used - count % used :] += 1  # the larger ones where samples are cheaper
    starts = np.cumsum(sizes) - sizes
    padded = tokens[order[starts]]  # the longest of each comes first
    cost_of_sample = costs.flop(tokens) if costs is not None else tokens.astype(np.float64)
    cost = (costs.flop(padded) if costs is not None else padded.astype(np.float64)) * sizes
    places, loads = _deal(cost, world_size, rounds, filler=float(cost_of_sample[order[-1]]))

    def micro_batch(number: int) -> MicroBatch:
        members = order[-1:] if number < 0 else order[starts[number] : starts[number] + sizes[number]]
        drawn = tuple(plan.draws[i] for i in members) if plan.draws else (0,) * len(members)
        return MicroBatch(tuple(plan.indices[i] for i in members), drawn, filler=number < 0)

    share = tuple(micro_batch(number) for number in places[:, rank].tolist())
    return StepShare(share, float(loads.max() * world_size / cost_of_sample.sum()) - 1)


def _deal(cost: Costs, world_size: int, rounds: int, *, filler: float) -> tuple[Longs, Costs]:
    """(rounds, ranks) which micro-batch each rank runs in each round, -1 for a filler; and the ranks' costs."""
    dearest_first = np.argsort(-cost, kind="stable")
    places = np.full((rounds, world_size), -1, np.int64)
    loads = np.zeros(world_size)
    for number in range(rounds):
        dealt = dearest_first[number * world_size : (number + 1) * world_size]
        ranks = np.argsort(loads, kind="stable")
        places[number, ranks[: len(dealt)]] = dealt
        loads[ranks[: len(dealt)]] += cost[dealt]
        loads[ranks[len(dealt) :]] += filler
    return places, loads

"""Candidates of `plan --recommend`: loaded as training would load them, so that what fits is also accepted.

Of each engine the least recomputation that fits is taken, for each micro-batch; ranks share samples only where nothing
fits without, or where the batch has too few samples. That leaves a few hundred candidates at most, most of which are
out by a bound that is cheap: what is held and what autograd keeps, without buffers and gathered parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from qwen_edit_zero.errors import SettingsError
from qwen_edit_zero.planning.advice.variants import (
    MICRO,
    SEQUENCE,
    Family,
    Recompute,
    families,
    micro_sizes,
    recomputations,
    splits,
)
from qwen_edit_zero.planning.engines.kinds import Phase, total
from qwen_edit_zero.planning.engines.state import state
from qwen_edit_zero.planning.jobs.job import make_job
from qwen_edit_zero.planning.jobs.wish import Wish
from qwen_edit_zero.planning.passes.activations import activations
from qwen_edit_zero.planning.plan import Plan, Verdict, spare
from qwen_edit_zero.settings.load import LoadedSettings, load_settings

ROOMY = 0.85  # of a GPU's memory at most: room for what the planner does not know
# A larger micro-batch must be so much faster, at both ends of the range, than the next smaller: it needs more memory,
# and padding wastes more of it than the planner, which sees samples of one size, can tell.
_FASTER = 1.05
MAX_REFERENCES = "data.max_references"
_KNOWN = (Phase.ENCODE, Phase.LOAD)  # what these take does not depend on samples to come


@dataclass(frozen=True)
class Option:
    """A way to run the recipe.

    Attributes:
        overrides: what makes the recipe this one, besides the engine and the user's own.
        is_for_room: it was looked for since it leaves much of the memory free.
        why: what it does, and why not less.
    """

    family: Family
    overrides: tuple[str, ...]
    loaded: LoadedSettings
    plan: Plan
    recompute: Recompute | None
    is_for_room: bool = False
    why: tuple[str, ...] = ()

    @property
    def samples_per_second(self) -> float:
        """Middle of the range."""
        assert self.plan.timing is not None
        low, high = self.plan.timing.samples_per_s
        return (low + high) / 2

    @property
    def fits(self) -> bool:
        """With what should stay free."""
        return not self.is_hopeless and self.plan.verdict is Verdict.FITS

    @property
    def is_roomy(self) -> bool:
        """Whether it takes `ROOMY` of a GPU's memory at most, filling the cache and loading apart."""
        assert self.plan.accelerator is not None
        grows = [sum(kinds.values()) for phase, kinds in self.plan.memory.device.items() if phase not in _KNOWN]
        return self.fits and max(grows) <= ROOMY * self.plan.accelerator.memory

    def is_faster(self, other: Option) -> bool:
        """Than one with a smaller micro-batch, by so much that it is worth its memory."""
        mine, others = self.plan.timing, other.plan.timing
        assert mine is not None
        assert others is not None
        return all(a >= _FASTER * b for a, b in zip(mine.samples_per_s, others.samples_per_s, strict=True))

    @cached_property
    def at_least(self) -> int:
        """A part of what it takes in training, bytes: what is held, and what autograd keeps. Quickly computed."""
        computing = activations(self.plan.job)
        return total(state(self.plan.job).device) + max(computing.forward_peak, computing.backward_peak)

    @property
    def is_hopeless(self) -> bool:
        """Whether that is too much already."""
        assert self.plan.accelerator is not None
        return self.at_least > self.plan.accelerator.memory - spare(self.plan.accelerator.memory)


def families_of(wish: Wish) -> Iterator[Family]:
    """The engines to look at; none whose options the user has said otherwise."""
    gpus = wish.gpus
    for family in families(world=gpus.world, gpus_per_node=gpus.gpus_per_node, engine=wish.engine, ds=wish.ds):
        said = {option.partition("=")[0] for option in family.options}
        if not said & wish.pinned:
            yield family


def best_of(wish: Wish, family: Family, *, roomy: bool = False) -> Option | None:
    """The fastest of a family that fits: of each micro-batch the one that recomputes least is looked at.

    Args:
        roomy: only of those that leave much of the memory free.
    """
    found: Option | None = None
    for split in splits_of(wish):
        ways = recomputations(wish.pinned)
        first = 0
        for micro in micros(wish, split):
            is_too_large = True
            for index in range(first, len(ways)):
                option = candidate(wish, family, split, micro, ways[index])
                if not isinstance(option, Option):
                    continue
                if option.is_hopeless:
                    continue
                if found is not None and not option.is_faster(found):  # quicker to see than whether it fits
                    is_too_large = False
                    break
                if option.is_roomy if roomy else option.fits:
                    found, first = option, index  # a larger micro-batch needs no less recomputation
                    is_too_large = False
                    break
            if is_too_large:
                break
        if found is not None:
            break
    return found


def splits_of(wish: Wish) -> Sequence[int | None]:
    """How many ranks may share a sample; None: as the recipe says."""
    gpus = wish.gpus
    return splits(heads=wish.model.heads, world=gpus.world, gpus_per_node=gpus.gpus_per_node, pinned=wish.pinned)


def micros(wish: Wish, split: int | None) -> Sequence[int | None]:
    """Micro-batches that divide the batch, if `split` ranks share each sample; none if no number does."""
    size = wish.base.settings.engine.sequence_parallel if split is None else split
    return micro_sizes(
        global_size=wish.base.settings.batch.global_size, shares=wish.gpus.world // size, pinned=wish.pinned
    )


def least(wish: Wish, family: Family) -> Option | str:
    """What of a family takes the least memory; in words, why there is none."""
    ways = recomputations(wish.pinned)
    reason = (
        f"batch.global_size {wish.base.settings.batch.global_size} does not divide over {wish.gpus.world} GPUs, "
        "shared or not"
    )
    for split in reversed(splits_of(wish)):
        for micro in micros(wish, split)[:1]:
            option = candidate(wish, family, split, micro, ways[-1])
            if isinstance(option, Option):
                return option
            reason = option
    return reason


def candidate(wish: Wish, family: Family, split: int | None, micro: int | None, way: Recompute | None) -> Option | str:
    """A candidate; in words, why training would not take it."""
    chosen = [override for override in family.overrides if override.partition("=")[0] not in wish.pinned]
    if split is not None:
        chosen.append(f"{SEQUENCE}={split}")
    if micro is not None:
        chosen.append(f"{MICRO}={micro}")
    if way is not None:
        chosen += way.overrides
    # A sample with more references would not have the memory.
    said = wish.shape.references
    if said is not None and said != wish.base.settings.data.max_references and MAX_REFERENCES not in wish.pinned:
        chosen.append(f"{MAX_REFERENCES}={said}")
    try:
        loaded = load_settings(
            wish.recipe,
            overrides=(*chosen, *wish.overrides),
            ds=family.ds,
            engine=None if family.ds is not None else family.backend,
            world_size=wish.gpus.world,
        )
        job = make_job(
            loaded.settings,
            cluster_world=wish.gpus.world,
            gpus_per_node=wish.gpus.gpus_per_node,
            sample=wish.sample,
            config=wish.config,
        )
    except SettingsError as error:
        return " ".join(str(error).split())
    model = loaded.settings.model
    if job.kind == "zero3" and (model.compile or model.activation_checkpointing == "selective"):
        what = "model.compile" if model.compile else "model.activation_checkpointing=selective"
        return f"ZeRO-3 does not go with {what}"
    plan = Plan(job, wish.gpus, wish.known_samples, wish.price)
    return Option(family, tuple(chosen), loaded, plan, way)

"""Candidates of `plan --recommend`: loaded as training would load them, so that what fits is also accepted.

Of each engine the least recomputation that fits is taken, for each micro-batch; ranks share samples only where nothing
fits without, or where the batch has too few samples. That leaves a few hundred candidates at most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
from qwen_edit_zero.planning.engines.kinds import Phase
from qwen_edit_zero.planning.jobs.job import make_job
from qwen_edit_zero.planning.jobs.wish import Wish
from qwen_edit_zero.planning.plan import Plan
from qwen_edit_zero.settings.load import LoadedSettings, load_settings

MARGIN = 0.03  # of a GPU's memory is left free, beside what is counted for fragmentation


@dataclass(frozen=True)
class Option:
    """A way to run the recipe.

    Attributes:
        overrides: what makes the recipe this one, besides the engine and the user's own.
        why: what it does, and why not less.
    """

    family: Family
    overrides: tuple[str, ...]
    loaded: LoadedSettings
    plan: Plan
    recompute: Recompute | None
    why: tuple[str, ...] = ()

    @property
    def samples_per_second(self) -> float:
        """Middle of the range."""
        assert self.plan.timing is not None
        low, high = self.plan.timing.samples_per_s
        return (low + high) / 2

    @property
    def lack(self) -> tuple[Phase, int, int]:
        """(phase, its bytes, how many of them are more than may be used) where most is lacking; the last is negative
        where everything fits. Loading needs no margin: what it takes is known, and nothing grows."""
        accelerator = self.plan.accelerator
        assert accelerator is not None
        limits = {Phase.LOAD: accelerator.memory}
        usual = int((1 - MARGIN) * accelerator.memory)
        sizes = {phase: sum(kinds.values()) for phase, kinds in self.plan.memory.device.items()}
        phase = max(sizes, key=lambda phase: sizes[phase] - limits.get(phase, usual))
        return phase, sizes[phase], sizes[phase] - limits.get(phase, usual)

    @property
    def fits(self) -> bool:
        """With the margin."""
        return bool(self.plan.fits) and self.lack[2] <= 0


def families_of(wish: Wish) -> Iterator[Family]:
    """The engines to look at; none whose options the user has said otherwise."""
    gpus = wish.gpus
    for family in families(world=gpus.world, gpus_per_node=gpus.gpus_per_node, engine=wish.engine, ds=wish.ds):
        said = {option.partition("=")[0] for option in family.options}
        if not said & wish.pinned:
            yield family


def fitting(wish: Wish, family: Family) -> list[Option]:
    """What fits of a family: of each micro-batch, the one that recomputes least."""
    found: list[Option] = []
    for split in _splits(wish):
        ways = recomputations(wish.pinned)
        first = 0
        for micro in micros(wish, split):
            index = first
            for index in range(first, len(ways)):
                option = candidate(wish, family, split, micro, ways[index])
                if isinstance(option, Option) and option.fits:
                    found.append(option)
                    break
            else:
                break
            first = index  # a larger micro-batch needs no less recomputation
        if found:
            break
    return found


def _splits(wish: Wish) -> Sequence[int | None]:
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
    for split in reversed(_splits(wish)):
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

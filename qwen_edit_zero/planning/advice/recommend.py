"""`plan --recommend`: which ways to run a recipe fit a cluster, which of them are fastest, and why not the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from qwen_edit_zero.errors import SettingsError, UserError
from qwen_edit_zero.planning.advice.search import (
    ROOMY,
    Option,
    best_of,
    candidate,
    families_of,
    least,
    micros,
    splits_of,
)
from qwen_edit_zero.planning.advice.variants import GLOBAL, MICRO, RESET, Recompute, recomputations
from qwen_edit_zero.planning.hardware.clusters import Accelerator, Cluster, known_accelerators
from qwen_edit_zero.planning.jobs.wish import Wish
from qwen_edit_zero.planning.plan import Verdict, spare
from qwen_edit_zero.planning.wording.quantities import show_bytes
from qwen_edit_zero.planning.wording.units import show_range, show_times
from qwen_edit_zero.planning.words import host_lack, sample_line
from qwen_edit_zero.settings.load import load_settings
from qwen_edit_zero.settings.render import inline

_SHOWN = 4
_ALIKE = 0.99  # of the fastest's rate: the simpler is named first, since times are not as exact
_MOST_GPUS = 1024
_HELPS = 0.99  # of a peak must be left at most for twice the GPUs to be a way to make it fit


@dataclass(frozen=True)
class Recommendation:
    """The few best, fastest first, each of another family; and a line on each of the others."""

    best: tuple[Option, ...]
    others: tuple[str, ...]


@dataclass(frozen=True)
class _Refused:
    """Why a family is out; how many of these GPUs it would fit on, and the least of it, if there is any."""

    why: str
    gpus: int | None = None
    smallest: Option | None = None


def recommend(wish: Wish) -> Recommendation:
    """Search. Raises UserError if nothing fits, saying what is the least that would; if the batch does not divide."""
    _check_batch(wish)
    everything = list(families_of(wish))
    best: list[Option] = []  # of each family
    refused: dict[str, _Refused] = {}
    lines: list[str] = []
    for tier in sorted({family.tier for family in everything}):
        looked_at = [family for family in everything if family.tier == tier]
        if best:
            names = ", ".join(family.name for family in looked_at)
            since = "AdamW in fp32 fits on the GPUs" if tier > 1 else "one GPU has nothing to share, and DDP is simpler"
            lines.append(f"{names}: not looked at, since {since}")
            continue
        for family in looked_at:
            if (option := best_of(wish, family)) is not None:
                best.append(option)
                continue
            smallest = least(wish, family)
            refused[family.name] = _Refused(smallest) if isinstance(smallest, str) else _too_much(wish, smallest)
    if not best:
        raise UserError(_nothing_fits(wish, refused))
    best = _ordered(best)
    shown = [*best[:1], *_roomy(wish, best), *best[1:]][:_SHOWN]
    slower = [_slower(option, best[0]) for option in best if option not in shown]
    others = [*slower, *(f"{name}: {out.why}" for name, out in refused.items()), *lines]
    return Recommendation(tuple(_explained(wish, option) for option in shown), tuple(others))


def _check_batch(wish: Wish) -> None:
    """Raises what training would say of a batch that does not divide, however many ranks share a sample."""
    if not any(micros(wish, split) for split in splits_of(wish)):
        _check_settings(wish)


def _check_settings(wish: Wish) -> None:
    """Raises what training would say of the recipe as it is."""
    load_settings(wish.recipe, overrides=wish.overrides, engine=wish.engine, ds=wish.ds, world_size=wish.gpus.world)


def _ordered(options: Sequence[Option]) -> list[Option]:
    """Fastest first; of those that are about as fast the simplest, by the order in which families come, then the one
    that needs less memory."""
    left = list(options)
    found: list[Option] = []
    while left:
        fastest = max(option.samples_per_second for option in left)
        alike = [option for option in left if option.samples_per_second >= _ALIKE * fastest]
        first = min(alike, key=lambda option: (options.index(option), option.plan.memory.peak[1]))
        found.append(first)
        left.remove(first)
    return found


def _roomy(wish: Wish, best: Sequence[Option]) -> list[Option]:
    """The fastest that leaves much of the memory free, where the fastest of all does not, and no other is shown."""
    if any(option.is_roomy for option in best[:_SHOWN]):
        return []
    found = [option for first in best if (option := best_of(wish, first.family, roomy=True)) is not None]
    return [replace(_ordered(found)[0], is_for_room=True)] if found else []


def _too_much(wish: Wish, smallest: Option) -> _Refused:
    """`81.1 GiB at its peak ..., 2.0 GiB more than may be used; fits on 16 of these GPUs`."""
    phase, peak, over = smallest.plan.lack
    parts = [f"{show_bytes(peak)} at its peak ({phase}) at the very least"]
    if over > 0:
        but = ": it fits, but tightly" if smallest.plan.verdict is Verdict.TIGHT else ""
        parts.append(f"{show_bytes(over)} more than may be used{but}")
    if smallest.plan.host_lack > 0:
        parts.append(host_lack(smallest.plan))
    gpus = _gpus_needed(wish, smallest)
    more = f"fits on {gpus} of these GPUs" if gpus else "more of these GPUs do not help"
    return _Refused(f"{', '.join(parts)}; {more}", gpus, smallest)


def _gpus_needed(wish: Wish, smallest: Option) -> int | None:
    """The least number of GPUs, this one doubled, on which a family fits; None: on none, as more do not help."""
    cluster, family = wish.gpus, smallest.family
    so_far = smallest.plan
    while "hybrid" not in family.name and (world := cluster.world * 2) <= _MOST_GPUS:
        nodes = cluster.nodes * 2 if cluster.nodes > 1 or cluster.gpus_per_node >= 8 else 1
        cluster = _resized(cluster, nodes, world // nodes)
        more = least(_on(wish, cluster), family)
        if not isinstance(more, Option):
            return None
        if more.fits:
            return world
        helps = more.plan.lack[1] <= _HELPS * so_far.lack[1] or 0 < more.plan.host_lack < so_far.host_lack
        if not helps:
            return None
        so_far = more.plan
    return None


def _resized(cluster: Cluster, nodes: int, gpus_per_node: int, kind: Accelerator | None = None) -> Cluster:
    """Another number of GPUs, of another `kind` perhaps; nodes have as much host memory as was said, or as is usual."""
    here = cluster.accelerator
    kind = kind or here
    was_said = cluster.host_memory != here.host_memory * cluster.gpus_per_node
    host = cluster.host_memory if was_said else kind.host_memory * gpus_per_node
    network = cluster.network if kind is here else kind.network
    return Cluster(nodes, gpus_per_node, kind, network, host)


def _on(wish: Wish, cluster: Cluster) -> Wish:
    """The same on another cluster, with a batch that divides over it if this one does not."""
    size = wish.base.settings.batch.global_size
    if size % cluster.world == 0:
        return replace(wish, cluster=cluster)
    size = -(-size // cluster.world) * cluster.world
    kept = tuple(override for override in wish.overrides if not override.startswith((f"{GLOBAL}=", f"{MICRO}=")))
    return replace(wish, cluster=cluster, overrides=(*kept, f"{GLOBAL}={size}", f"{MICRO}=1"))


def _slower(option: Option, best: Option) -> str:
    rate = option.samples_per_second / best.samples_per_second
    return f"{option.family.name}: {_peak(option)}, {1 - rate:.0%} slower than {best.family.name}"


def _explained(wish: Wish, option: Option) -> Option:
    """With the reasons for what it does."""
    settings = option.loaded.settings
    why = [option.family.why]
    if option.is_for_room:
        why.append(f"the fastest that takes at most {ROOMY:.0%} of the memory in training, if the first should not fit")
    ways = recomputations(wish.pinned)
    split, micro = settings.engine.sequence_parallel, settings.batch.micro_size
    if option.recompute is not None:
        before = list(ways).index(option.recompute) - 1
        text = option.recompute.name
        while before >= 0:
            other = candidate(wish, option.family, split, micro, ways[before])
            if isinstance(other, Option):
                much = f"more than {show_bytes(other.at_least)}" if other.is_hopeless else _peak(other)
                text += f", as {much} would be needed if {_if(ways[before])}"
                break
            before -= 1
        why.append(text)
    if split > 1:
        size = settings.batch.global_size
        too_few = f"the batch has {size} samples for {wish.gpus.world} GPUs"
        why.append(f"{split} GPUs share each sample, as {'one has not the memory' if micros(wish, 1) else too_few}")
    if micro > 1:
        why.append(f"{micro} samples in a forward: 5% faster or more, at both ends of the range")
    return replace(option, why=tuple(why))


def _if(way: Recompute | None) -> str:
    assert way is not None
    return way.name.replace(" is recomputed", " were recomputed").replace(" are recomputed", " were recomputed")


def _nothing_fits(wish: Wish, refused: Mapping[str, _Refused]) -> str:
    """What was tried, and the least that would fit."""
    alone = {out.why for out in refused.values()}
    if len(alone) == 1 and all(out.smallest is None for out in refused.values()):
        _check_settings(wish)
        raise SettingsError(alone.pop())  # nothing to do with the GPUs
    lines = [f"nothing fits on {wish.gpus.name} (GPUs of {show_bytes(wish.gpus.accelerator.memory)}):"]
    lines += [f"  {name}: {out.why}" for name, out in refused.items()]
    enough = [(out.gpus, name) for name, out in refused.items() if out.gpus is not None]
    if enough:
        gpus, name = min(enough, key=lambda found: found[0])
        lines.append(f"the least of these GPUs that would do: {gpus}, with {name}")
    smallest = sorted(
        (out.smallest for out in refused.values() if out.smallest is not None),
        key=lambda option: option.plan.memory.peak[1],
    )
    for kind in sorted(known_accelerators().values(), key=lambda kind: kind.memory):
        if kind.memory <= wish.gpus.accelerator.memory:
            continue
        if (named := next(filter(None, (_on_kind(wish, option, kind) for option in smallest)), None)) is not None:
            lines.append(f"the smallest GPUs that would do, as many: {named}")
            break
    return "\n".join(lines)


def _on_kind(wish: Wish, smallest: Option, kind: Accelerator) -> str | None:
    """`2xH100 with FSDP2`, if the least of a family fits on as many GPUs of this kind; else None.

    Nodes have as much host memory as was said, or as is usual for the kind.
    """
    here = wish.gpus
    if smallest.plan.memory.peak[1] > kind.memory:
        return None  # hardly changes with the kind
    cluster = _resized(here, here.nodes, here.gpus_per_node, kind)
    option = least(replace(wish, cluster=cluster), smallest.family)
    return f"{cluster.name}, with {smallest.family.name}" if isinstance(option, Option) and option.fits else None


def summary(option: Option) -> str:
    """`61.3 GiB (77%) at its peak (backward); 5.8-8.2 s a step; 7.8-11 samples/s`; and host memory, where used."""
    timing = option.plan.timing
    assert timing is not None
    assert option.plan.accelerator is not None
    rate = show_range(*timing.samples_per_s, "samples/s")
    host = f", {show_bytes(option.plan.host_needed[1])} of host memory a node" if _uses_host(option) else ""
    phase, peak = option.plan.memory.peak
    gpu = f"{show_bytes(peak)} ({peak / option.plan.accelerator.memory:.0%}) at its peak ({phase})"
    return f"{gpu}{host}; {show_times(*timing.step_s)} a step; {rate}"


def _peak(option: Option) -> str:
    return show_bytes(option.plan.memory.peak[1])


def _uses_host(option: Option) -> bool:
    return option.loaded.settings.model.offload_activations or option.plan.job.name.endswith("with offloading")


def recommendation_text(wish: Wish, found: Recommendation) -> str:
    """For a terminal: the best first, then the others in a line each."""
    first = found.best[0]
    lines = [
        f"best on {wish.gpus.name}: {first.family.name}; {summary(first)}",
        sample_line(wish.sample, wish.sample_is_from),
        "",
    ]
    for number, option in enumerate(found.best, 1):
        lines.append(f"{number}. {option.family.name}: {summary(option)}")
        lines += [f"   - {reason}" for reason in option.why]
        lines.append(f"   {' '.join(arguments_of(wish, option))}")
    if found.others:
        lines += ["", "why not the others", *(f"  {line}" for line in found.others)]
    lines += [
        "",
        f"{show_bytes(spare(wish.gpus.accelerator.memory))} of each GPU's memory stay free in training. Times are "
        "ranges of assumptions: trust their order where they are far apart, and measure where they are not.",
    ]
    return "\n".join(lines)


def arguments_of(wish: Wish, option: Option) -> list[str]:
    """The options and overrides that make the recipe this one, without those that change nothing."""
    usual = {f"{key}={value}" for key, value in RESET.items()}
    engine = [f"--ds {option.family.ds}"] if option.family.ds is not None else [f"--engine {option.family.backend}"]
    changed = [override for override in option.overrides if override not in usual and not _is_so(wish, override)]
    return engine + changed


def _is_so(wish: Wish, override: str) -> bool:
    """Whether the recipe says so already."""
    name, _, value = override.partition("=")
    section, key = name.split(".")
    return inline(getattr(getattr(wish.base.settings, section), key)) == value

"""`plan --recommend`: which ways to run a recipe fit a cluster, which of them are fastest, and why not the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from qwen_edit_zero.errors import UserError
from qwen_edit_zero.planning.advice.search import MARGIN, Option, candidate, families_of, fitting, least, micros
from qwen_edit_zero.planning.advice.variants import GLOBAL, MICRO, RESET, Recompute, recomputations
from qwen_edit_zero.planning.hardware.clusters import Cluster, known_accelerators
from qwen_edit_zero.planning.jobs.wish import Wish
from qwen_edit_zero.planning.wording.quantities import show_bytes
from qwen_edit_zero.planning.wording.units import show_range, show_times
from qwen_edit_zero.settings.render import inline

_SHOWN = 4
_MOST_GPUS = 1024
_HELPS = 0.99  # of a peak must be left at most for twice the GPUs to be a way to make it fit


@dataclass(frozen=True)
class Recommendation:
    """The few best, fastest first, each of another family; and a line on each of the others."""

    best: tuple[Option, ...]
    others: tuple[str, ...]


@dataclass(frozen=True)
class _Refused:
    """Why a family is out; how many of these GPUs it would fit on, and its least peak in bytes, if any."""

    why: str
    gpus: int | None = None
    peak: int | None = None


def recommend(wish: Wish) -> Recommendation:
    """Search. Raises UserError if nothing fits, saying what is the least that would."""
    everything = list(families_of(wish))
    best: list[Option] = []  # of each family
    refused: dict[str, _Refused] = {}
    lines: list[str] = []
    for last_resort in (False, True):
        looked_at = [family for family in everything if family.last_resort == last_resort]
        if best and looked_at:
            names = ", ".join(family.name for family in looked_at)
            lines.append(f"{names}: not looked at, since AdamW in fp32 fits on the GPUs")
            break
        for family in looked_at:
            smallest = least(wish, family)
            if isinstance(smallest, str):
                refused[family.name] = _Refused(smallest)
            elif not smallest.fits:
                refused[family.name] = _too_much(wish, smallest)
            else:
                best.append(max(fitting(wish, family), key=lambda option: option.samples_per_second))
    best.sort(key=lambda option: -option.samples_per_second)
    if not best:
        raise UserError(_nothing_fits(wish, refused))
    slower = [_slower(option, best[0]) for option in best[_SHOWN:]]
    others = [*slower, *(f"{name}: {out.why}" for name, out in refused.items()), *lines]
    return Recommendation(tuple(_explained(wish, option) for option in best[:_SHOWN]), tuple(others))


def _too_much(wish: Wish, smallest: Option) -> _Refused:
    """`81.1 GiB at its peak ..., 2.0 GiB more than may be used; fits on 16 of these GPUs`."""
    phase, peak, over = smallest.lack
    text = f"{show_bytes(peak)} at its peak ({phase}) at the very least"
    text += f", {show_bytes(over)} more than may be used" if over > 0 else ", and more host memory than there is"
    gpus = _gpus_needed(wish, smallest)
    text += f"; fits on {gpus} of these GPUs" if gpus else "; more of these GPUs do not help"
    return _Refused(text, gpus, peak)


def _gpus_needed(wish: Wish, smallest: Option) -> int | None:
    """The least number of GPUs, this one doubled, on which a family fits; None: on none, as more do not help."""
    cluster, family = wish.gpus, smallest.family
    peak = smallest.lack[1]
    while "hybrid" not in family.name and (world := cluster.world * 2) <= _MOST_GPUS:
        nodes = cluster.nodes * 2 if cluster.nodes > 1 or cluster.gpus_per_node >= 8 else 1
        cluster = cluster.of(nodes, world // nodes)
        more = least(_on(wish, cluster), family)
        if not isinstance(more, Option):
            return None
        if more.fits:
            return world
        if more.lack[1] > _HELPS * peak:
            return None
        peak = more.lack[1]
    return None


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
    peak = show_bytes(option.plan.memory.peak[1])
    return f"{option.family.name}: {peak}, {1 - rate:.0%} slower than {best.family.name}"


def _explained(wish: Wish, option: Option) -> Option:
    """With the reasons for what it does."""
    settings = option.loaded.settings
    why = [option.family.why]
    ways = recomputations(wish.pinned)
    split, micro = settings.engine.sequence_parallel, settings.batch.micro_size
    if option.recompute is not None:
        before = list(ways).index(option.recompute) - 1
        text = option.recompute.name
        while before >= 0:
            other = candidate(wish, option.family, split, micro, ways[before])
            if isinstance(other, Option):
                text += f", as {show_bytes(other.plan.memory.peak[1])} would be needed if {_if(ways[before])}"
                break
            before -= 1
        why.append(text)
    if split > 1:
        size = settings.batch.global_size
        too_few = f"the batch has {size} samples for {wish.gpus.world} GPUs"
        why.append(f"{split} GPUs share each sample, as {'one has not the memory' if micros(wish, 1) else too_few}")
    if micro > 1:
        why.append(f"{micro} samples in a forward, so that messages are fewer")
    return replace(option, why=tuple(why))


def _if(way: Recompute | None) -> str:
    assert way is not None
    return way.name.replace(" is recomputed", " were recomputed").replace(" are recomputed", " were recomputed")


def _nothing_fits(wish: Wish, refused: Mapping[str, _Refused]) -> str:
    """What was tried, and the least that would fit."""
    lines = [f"nothing fits on {wish.gpus.name} (GPUs of {show_bytes(wish.gpus.accelerator.memory)}):"]
    lines += [f"  {name}: {out.why}" for name, out in refused.items()]
    enough = [(out.gpus, name) for name, out in refused.items() if out.gpus is not None]
    if enough:
        gpus, name = min(enough, key=lambda found: found[0])
        lines.append(f"the least of these GPUs that would do: {gpus}, with {name}")
    peaks = [(out.peak, name) for name, out in refused.items() if out.peak is not None]
    for kind in sorted(known_accelerators().values(), key=lambda kind: kind.memory):
        if peaks and min(peaks)[0] <= (1 - MARGIN) * kind.memory and kind.memory > wish.gpus.accelerator.memory:
            as_many = replace(wish.gpus, accelerator=kind).name
            lines.append(f"the smallest GPUs that would do, as many: {as_many}, with {min(peaks)[1]}")
            break
    return "\n".join(lines)


def summary(option: Option) -> str:
    """`61.3 GiB; 5.8-8.2 s a step; 7.8-11 samples/s`."""
    timing = option.plan.timing
    assert timing is not None
    rate = show_range(*timing.samples_per_s, "samples/s")
    peak = show_bytes(option.plan.memory.peak[1])
    return f"{peak} at its peak; {show_times(*timing.step_s)} a step; {rate}"


def recommendation_text(wish: Wish, found: Recommendation) -> str:
    """For a terminal: the best first, then the others in a line each."""
    first = found.best[0]
    lines = [f"best on {wish.gpus.name}: {first.family.name}; {summary(first)}", ""]
    for number, option in enumerate(found.best, 1):
        lines.append(f"{number}. {option.family.name}: {summary(option)}")
        lines += [f"   - {reason}" for reason in option.why]
        lines.append(f"   {' '.join(_said(wish, option))}")
    if found.others:
        lines += ["", "why not the others", *(f"  {line}" for line in found.others)]
    lines += [
        "",
        f"{MARGIN:.0%} of each GPU's memory is left free. Times are ranges of assumptions: trust their order where "
        "they are far apart, and measure where they are not.",
    ]
    return "\n".join(lines)


def _said(wish: Wish, option: Option) -> list[str]:
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

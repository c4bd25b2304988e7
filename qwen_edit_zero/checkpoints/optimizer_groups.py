"""Which parameters the optimizer treats alike, as `run_state.json` says it, and what a run would change of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from qwen_edit_zero.checkpoints.manifest import Json
from qwen_edit_zero.settings.models import OptimizerSettings

GROUPS = "optimizer_groups"  # the member of run_state.json
_SHOWN = 3  # names in a line


@dataclass(frozen=True)
class OptimizerGroup:
    """Parameters with options of their own.

    Attributes:
        weight_decay: decoupled, times the learning rate.
        lr_factor: times the learning rate of the schedule.
        parameters: their names; None: all trained ones that no other group lists.
    """

    weight_decay: float
    lr_factor: float = 1.0
    parameters: tuple[str, ...] | None = None

    def __str__(self) -> str:
        named = self.parameters
        who = "all others that train" if named is None else f"{len(named)} parameters ({shown_names(named)})"
        return f"weight decay {self.weight_decay:g}, learning rate x {self.lr_factor:g}: {who}"

    def json(self) -> dict[str, Json]:
        """As it is stored."""
        names = None if self.parameters is None else list(self.parameters)
        return {"weight_decay": self.weight_decay, "lr_factor": self.lr_factor, "parameters": names}


def groups_of(settings: OptimizerSettings) -> tuple[OptimizerGroup, ...]:
    """How a run with these settings treats its parameters: all alike."""
    return (OptimizerGroup(settings.weight_decay),)


def shown_names(names: Sequence[str]) -> str:
    """The first few."""
    return f"{', '.join(names[:_SHOWN])}{' ...' * (len(names) > _SHOWN)}"


def saved_groups(run_state: Mapping[str, Json]) -> tuple[OptimizerGroup, ...]:
    """The groups of a checkpoint; none if it does not tell."""
    return tuple(
        OptimizerGroup(g["weight_decay"], g["lr_factor"], None if g["parameters"] is None else tuple(g["parameters"]))
        for g in run_state.get(GROUPS, ())
    )


def group_changes(there: Sequence[OptimizerGroup], here: Sequence[OptimizerGroup], trained: Iterable[str]) -> list[str]:
    """One line for each option that differs, with the number of `trained` parameters for which it does and a few names.

    Nothing if the groups of one side are not known.
    """
    changed: dict[tuple[str, float, float], list[str]] = {}
    was, now = _by_name(there), _by_name(here)
    for name in trained:
        one, other = was.get(name, was.get(None)), now.get(name, now.get(None))
        if one is not None and other is not None:
            for option in ("weight_decay", "lr_factor"):
                if getattr(one, option) != getattr(other, option):
                    key = (option, getattr(one, option), getattr(other, option))
                    changed.setdefault(key, []).append(name)
    return [
        f"{_WORDS[option]} of {len(names)} parameters ({shown_names(names)}): {before:g} there, {after:g} here"
        for (option, before, after), names in changed.items()
    ]


_WORDS = {"weight_decay": "optimizer.weight_decay", "lr_factor": "learning rate, times that of the schedule,"}


def _by_name(groups: Sequence[OptimizerGroup]) -> dict[str | None, OptimizerGroup]:
    found: dict[str | None, OptimizerGroup] = {}
    for group in groups:
        for name in (None,) if group.parameters is None else group.parameters:
            found[name] = group
    return found

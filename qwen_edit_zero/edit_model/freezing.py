"""Which parameters train."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch

from qwen_edit_zero.errors import SettingsError


@dataclass(frozen=True)
class TrainableReport:
    """What trains, in elements and tensors; `str()` is a line for the user.

    Attributes:
        groups: trained and frozen elements by kind of layer: names up to the second level below a block, numbers of
            blocks replaced by `*`, in the model's order.
    """

    trained: int
    trained_tensors: int
    frozen: int
    frozen_tensors: int
    groups: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def __str__(self) -> str:
        total = self.trained + self.frozen
        share = f"{self.trained / total:.2%}, {self.trained_tensors} tensors"
        line = f"{self.trained:,} of {total:,} parameters train ({share})"
        return line if not self.frozen else f"{line}; {self.frozen_tensors} tensors are frozen"

    def lines(self, *, compute_bytes: int, masters_apart: bool) -> list[str]:
        """What trains, what is frozen and what freezing saves in one copy of the state.

        Where an engine shards a kind of it, that is over the ranks together; where it replicates one, on each of them.

        A frozen element needs no moments (8 bytes), no gradient (4) and no fp32 master; it is kept in the compute
        precision of `compute_bytes`. Where masters lie apart from the weights that compute (ZeRO) that saves 4 bytes,
        elsewhere (DDP, FSDP2) the difference.
        """
        width = max(map(len, self.groups), default=0)
        lines = []
        for name, (moving, still) in self.groups.items():
            does = "trains" if not still else "frozen" if not moving else "partly"
            lines.append(f"  {name:{width}}  {does}  {moving + still:>14,}")
        masters = 4 if masters_apart else 4 - compute_bytes
        kinds = {"moments": 8, "gradients": 4, "master weights": masters}
        saved = ", ".join(f"{self.frozen * size / 1e9:.3g} GB of {kind}" for kind, size in kinds.items() if size)
        return [*lines, f"  freezing saves {saved} in every copy of the state"]


def freeze(module: torch.nn.Module, patterns: Sequence[str]) -> TrainableReport:
    """Freeze every parameter whose name matches one of the shell patterns (`transformer_blocks.[0-9].*`, `*_mod.*`).

    Works on any module, partitioned or on the meta device. Raises SettingsError for a pattern that matches nothing,
    and if nothing would train.
    """
    parameters = dict(module.named_parameters())
    for pattern in patterns:
        matched = [name for name in parameters if fnmatchcase(name, pattern)]
        if not matched:
            near = difflib.get_close_matches(pattern.rstrip(".*"), sorted(set(_names(parameters))), n=3, cutoff=0.5)
            raise SettingsError(
                f"model.freeze: no parameter matches {pattern!r}; "
                + (
                    f"the nearest names are {', '.join(near)}"
                    if near
                    else f"a name looks like {next(iter(parameters))}"
                )
                + ". Patterns are matched against whole names, so a module's parameters are `MODULE.*`"
            )
        for name in matched:
            parameters[name].requires_grad_(False)
    trained = [_numel(p) for p in parameters.values() if p.requires_grad]
    frozen = [_numel(p) for p in parameters.values() if not p.requires_grad]
    if not trained:
        raise SettingsError(f"model.freeze: {', '.join(patterns)} freezes every parameter, so nothing would train")
    groups: dict[str, tuple[int, int]] = {}
    for name, parameter in parameters.items():
        moving, still = groups.get(_group(name), (0, 0))
        count = _numel(parameter)
        groups[_group(name)] = (moving + count, still) if parameter.requires_grad else (moving, still + count)
    return TrainableReport(sum(trained), len(trained), sum(frozen), len(frozen), groups)


def _group(name: str) -> str:
    """`transformer_blocks.3.attn.to_q.weight` -> `transformer_blocks.*.attn`; `img_in.weight` -> `img_in`."""
    parts = ["*" if part.isdigit() else part for part in name.split(".")[:-1]]
    return ".".join(parts[:3] if "*" in parts[:2] else parts[:1])


def full_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Shape of the whole parameter, also while ZeRO-3 has it partitioned (it then looks like shape (0,))."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _numel(parameter: torch.Tensor) -> int:
    return torch.Size(full_shape(parameter)).numel()


def _names(parameters: dict[str, torch.nn.Parameter]) -> Iterator[str]:
    for name in parameters:
        parts = name.split(".")
        yield from (".".join(parts[: i + 1]) for i in range(len(parts)))

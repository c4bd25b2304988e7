"""Training state as flat ranges: the one form in which engines, checkpoints and model folders exchange tensors.

Every tensor (a parameter, an optimizer moment) is seen flattened to one dimension in row-major order. What a rank owns
or wants is a set of contiguous ranges of it. DDP (anything), FSDP2 (dim-0 shards), ZeRO-3 (per-parameter slices) and
ZeRO-1/2 (slices of a flattened group) are all of this form, so state moves between them without ever being whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

PARAM = "param"  # the kind of a weight; optimizer moments use the optimizer's own names ("exp_avg", "exp_avg_sq")
EMA = "ema"  # of the running average of a trained weight
FROZEN = "frozen"  # of a weight that does not train


@dataclass(frozen=True)
class FlatRange:
    """Elements `start .. start + values.numel()` of the flattened tensor `name` of kind `kind`.

    Attributes:
        name: parameter name as in the unwrapped module (`transformer_blocks.0.attn.to_q.weight`).
        kind: `"param"` or the optimizer's name of a moment.
        shape: shape of the whole tensor; `()` for a 0-d one.
        start: index of the first element held.
        values: 1-D tensor on any device; fp32 for trained state.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    start: int
    values: torch.Tensor


class TensorSource(Protocol):
    """Random access to flat ranges of named tensors; a checkpoint or a model folder."""

    def names(self, kind: str = PARAM) -> Iterable[str]:
        """Names of all tensors of this kind."""
        ...

    def shape(self, name: str, kind: str = PARAM) -> tuple[int, ...]:
        """Shape of the whole tensor. Raises KeyError if it is not there."""
        ...

    def read(self, name: str, start: int, length: int, kind: str = PARAM) -> torch.Tensor:
        """Elements `start .. start + length`, as a 1-D CPU tensor in the stored dtype.

        Reads only these bytes (rounded to pages). Raises a UserError naming the file if they cannot be had.
        """
        ...

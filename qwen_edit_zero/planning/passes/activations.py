"""Memory that the transformer's forward pass leaves for its backward pass, of one micro-batch.

Derived by running the model, sizes only, on a model of autograd (`trace.py`): what each operation keeps is in
`operations.py` and `attention_cost.py`. Compiled blocks may keep less, which is not modelled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from qwen_edit_zero.planning.autograd.computing import computing
from qwen_edit_zero.planning.autograd.trace import Trace, trace
from qwen_edit_zero.planning.jobs.job import Job


@dataclass(frozen=True)
class Activations:
    """Bytes on the rank with the most. Parameters, their gradients and the batch are not in here.

    Attributes:
        saved: what all blocks keep from forward to backward.
        outside: the same of embedders, rotary positions, output and loss.
        weight_copies: the copies in the compute precision that autocast (DDP) makes of weights, kept to backward.
        block_peak: the most that is there beside these three in the backward pass: a block that is recomputed, and the
            gradients of its activations and of one layer's weights.
        forward_peak: the most that is there in the forward pass, all of these together. Autocast holds copies of all
            weights that train until it ends, also of blocks that are recomputed.
        host: inputs of recomputed blocks in host memory (`model.offload_activations`), page-locked: each rounded up to
            a power of two, as torch does.
        by_operation: what is in `saved` and `outside`, by what keeps it.
    """

    saved: int
    outside: int
    weight_copies: int
    block_peak: int
    forward_peak: int
    host: int
    by_operation: Mapping[str, int]

    @property
    def kept(self) -> int:
        """All that is there between forward and backward."""
        return self.saved + self.outside + self.weight_copies

    @property
    def backward_peak(self) -> int:
        """The most that is there in the backward pass."""
        return self.kept + self.block_peak


def activations(job: Job, *, on_gpu: bool = True, masked: bool | None = None) -> Activations:
    """Of one micro-batch of the job.

    Args:
        on_gpu: with PyTorch's rules for GPUs, and an attention kernel (flash, cuDNN or memory-efficient).
        masked: prompts of the micro-batch differ in length; None: as the job says.
    """
    found = trace_of(job, on_gpu=on_gpu, masked=masked)
    kept = found.saved + found.weight_copies
    return Activations(
        saved=found.saved - found.outside,
        outside=found.outside,
        weight_copies=found.weight_copies,
        block_peak=found.backward_peak - kept,
        forward_peak=found.forward_peak,
        host=sum(count * (1 << (size - 1).bit_length()) for size, count in found.host_tensors if size),
        by_operation=found.by_operation,
    )


def trace_of(job: Job, *, on_gpu: bool = True, masked: bool | None = None) -> Trace:
    """One micro-batch of the job, forward and backward."""
    return trace(
        job.model,
        job.sample,
        computing(job, on_gpu=on_gpu),
        trained=frozenset(p.name for p in job.trained),
        adapted=adapted_of(job),
        batch=job.micro,
        masked=job.masked if masked is None else masked,
    )


def adapted_of(job: Job) -> tuple[int, frozenset[str]] | None:
    """(rank, names of modules with an adapter); None without adapters."""
    lora = job.settings.model.lora
    if lora is None:
        return None
    names = (p.name for p in job.model.adapters(lora.rank, lora.targets))
    return lora.rank, frozenset(name.split(".lora_")[0] for name in names)

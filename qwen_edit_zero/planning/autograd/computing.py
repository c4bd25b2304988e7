"""How an engine lets the transformer compute: all about a forward and backward pass but the sizes of the sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qwen_edit_zero.planning.jobs.job import Job

Dtypes = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True)
class Computing:
    """Dtypes, kernels, and what is computed again.

    Attributes:
        dtype: of the compute precision.
        autocast: weights that train are fp32 and cast when used (DDP); otherwise all of them have `dtype`.
        on_gpu: PyTorch's rules for GPUs (autocast computes norms in fp32; attention is as `attention` says).
        attention: "fused": one kernel; "math": single matrix products, where no kernel takes the inputs.
        norms_return_input_dtype: queries and keys are cast to the values' dtype, for other packages' kernels.
        checkpointing: as `model.activation_checkpointing`.
        checkpoint_every: every n-th block is recomputed.
        early_stop: recomputation ends with the last tensor that backward needs (all but ZeRO-3).
        linears_remember: linear layers keep their input whatever trains (ZeRO-3).
        to_host: inputs of recomputed blocks go to host memory.
        sequence: ranks that split the tokens of a sample.
        loss_mask: the loss of tokens is weighted.
    """

    dtype: Dtypes = "bf16"
    autocast: bool = False
    on_gpu: bool = True
    attention: Literal["fused", "math"] = "fused"
    norms_return_input_dtype: bool = False
    checkpointing: Literal["none", "block", "selective"] = "block"
    checkpoint_every: int = 1
    early_stop: bool = True
    linears_remember: bool = False
    to_host: bool = False
    sequence: int = 1
    loss_mask: bool = False

    @property
    def autocast_dtype(self) -> str | None:
        """What autocast casts to, if it is on."""
        return self.dtype if self.autocast and self.dtype != "fp32" else None

    def weight_dtype(self, trains: bool) -> str:
        """Of a parameter when it computes: frozen ones are kept in the compute precision."""
        return "fp32" if trains and self.autocast else self.dtype


def computing(job: Job, *, on_gpu: bool = True) -> Computing:
    """How the job's engine computes. Compiled code, which may keep less, is treated as if it were not compiled."""
    model, backend = job.settings.model, job.attention
    return Computing(
        dtype=job.settings.precision.mode,
        autocast=job.kind == "ddp",
        on_gpu=on_gpu,
        attention="math" if backend == "native_math" else "fused",
        norms_return_input_dtype=backend != "auto" and not backend.startswith("native"),
        checkpointing=model.activation_checkpointing,
        checkpoint_every=model.checkpoint_every,
        early_stop=job.kind != "zero3",
        linears_remember=job.kind == "zero3",
        to_host=model.offload_activations and model.activation_checkpointing != "none",
        sequence=job.sequence,
        loss_mask=job.settings.data.mask_weight != 1.0,
    )

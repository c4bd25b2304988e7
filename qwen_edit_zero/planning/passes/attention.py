"""Time that attention takes beyond its arithmetic: with a mask, and without a kernel of its own.

PyTorch's flash kernel takes no mask, so padded prompts get its memory-efficient one, unless the GPU is of a kind on
which PyTorch prefers cuDNN's (`Accelerator.masked_attention`). The math way writes and reads tokens x tokens numbers.
"""

from __future__ import annotations

from qwen_edit_zero.planning.hardware.clusters import Accelerator
from qwen_edit_zero.planning.jobs.job import Job
from qwen_edit_zero.planning.passes.flops import attention_flops

Range = tuple[float, float]

# Of the math way, bytes for an element of an fp32 matrix of tokens x tokens. Forward: a product writes it, softmax
# reads and writes, the next product reads. Backward: a product writes a gradient, softmax's reads two and writes one,
# three products read. A mask: added once.
_MATH_FORWARD, _MATH_BACKWARD, _MATH_MASK = 4 * 4, 4 * 7, 2 * 4
# backends that PyTorch chooses a kernel for
_CHOSEN = frozenset({"auto", "native"})


def extra_seconds(job: Job, gpu: Accelerator, *, rates: Range, fp32_rates: Range, bandwidths: Range) -> Range:
    """Seconds of a step that attention takes beyond its FLOP at `rates`, (low, high).

    Args:
        rates, fp32_rates: (low, high) FLOP a second that products reach in the compute precision and in fp32.
        bandwidths: (low, high) bytes a second that long reads and writes reach.
    """
    if job.attention == "native_math":
        flops, size = attention_flops(job).all / job.world, _matrix_bytes(job)
        low, high = (flops * max(0.0, 1 / fp32_rates[end] - 1 / rates[end]) + size / bandwidths[end] for end in (1, 0))
        return low, high
    # In fp32 the memory-efficient kernel is taken with and without a mask.
    if not job.masked or job.attention not in _CHOSEN or job.settings.precision.mode == "fp32":
        return 0.0, 0.0
    flops = attention_flops(job).all / job.world
    factors = gpu.masked_attention
    return (factors[0] - 1) * flops / rates[1], (factors[1] - 1) * flops / rates[0]


def _matrix_bytes(job: Job) -> float:
    """Of a rank in a step."""
    model = job.settings.model
    recomputed = 0 if model.activation_checkpointing == "none" else -(-job.model.blocks // model.checkpoint_every)
    forward = _MATH_FORWARD + (_MATH_MASK if job.masked else 0)
    a_matrix = job.micro * job.model.heads * job.sample.tokens**2 / job.sequence
    return job.accumulation * a_matrix * ((job.model.blocks + recomputed) * forward + job.model.blocks * _MATH_BACKWARD)

"""What a rank holds of the model between steps: parameters, masters, gradients, moments, average. To the byte.

The formulas of docs/engines.md, with the padding of each library. N trained elements, F frozen ones, c bytes an element
in the compute precision, W ranks, S ranks in a shard group:

- DDP: 16 N + c F, gradients included: DDP's buckets are the gradients, and they stay.
- ZeRO-1, -2: c (N + F) + 12 N/W.
- ZeRO-3: c (N + F)/W + 16 N/W, one bucket of fp32 gradients, and what is always gathered.
- FSDP2: 12 N/S + c F/S.
"""

from __future__ import annotations

from collections.abc import Sequence

from qwen_edit_zero.planning.engines.kinds import Holding, Kind, added, page_locked
from qwen_edit_zero.planning.engines.layout import (
    flat_elements,
    persistent,
    rows_part,
    slice_part,
    sub_groups,
)
from qwen_edit_zero.planning.jobs.job import Job

FP32 = 4
STEP_COUNTER = 4  # bytes; AdamW has one for each tensor it updates
SMALLEST_8BIT, BLOCK_8BIT = 4096, 256  # elements of a tensor whose moments are quantised; elements that share a scale
_CODE_MAPS = 2 * 256 * FP32
_SMALLEST_ON_NVME = 1 << 20  # bytes below which a partition stays in host memory though parameters are on NVMe


def state(job: Job) -> Holding:
    """Bytes by kind between steps, of the rank that holds most."""
    match job.kind:
        case "ddp":
            parts = [p.elements for p in job.trained]
            return Holding(device=added([_local(job, parts), _frozen(job, 1), {Kind.GRADIENTS: FP32 * sum(parts)}]))
        case "fsdp2":
            return _fsdp2(job)
        case "zero3":
            return _zero3(job)
        case _:
            return _zero12(job)


def moment_bytes(parts: Sequence[int], *, eight_bit: bool) -> int:
    """Both moments of tensors of these numbers of elements, with the counters of steps."""
    if not eight_bit:
        return sum(2 * FP32 * part + STEP_COUNTER for part in parts)
    sizes = [
        2 * FP32 * part if part < SMALLEST_8BIT else 2 * part + 2 * FP32 * -(-part // BLOCK_8BIT) for part in parts
    ]
    return sum(sizes) + (_CODE_MAPS if any(part >= SMALLEST_8BIT for part in parts) else 0)


def _local(job: Job, parts: Sequence[int]) -> dict[Kind, int]:
    """Masters, moments and average of DDP and FSDP2, which step each parameter's part by itself."""
    held = sum(parts)
    return {
        Kind.MASTERS: FP32 * held,
        Kind.MOMENTS: moment_bytes(parts, eight_bit=job.settings.optimizer.kind == "adamw_8bit"),
        Kind.EMA: FP32 * held if job.settings.optimizer.ema is not None else 0,
    }


def _frozen(job: Job, shards: int) -> dict[Kind, int]:
    return {Kind.PARAMETERS: job.compute_bytes * sum(rows_part(p, shards) for p in job.frozen)}


def _fsdp2(job: Job) -> Holding:
    parts = [rows_part(p, job.shard_size) for p in job.trained]
    held = added([_local(job, parts), _frozen(job, job.shard_size)])
    if not job.settings.engine.cpu_offload:
        return Holding(device=held)
    if pins_memory(job):
        held[Kind.MASTERS] = sum(page_locked(FP32 * part) for part in parts)
        if job.frozen:
            sizes = (job.compute_bytes * rows_part(p, job.shard_size) for p in job.frozen)
            held[Kind.PARAMETERS] = sum(map(page_locked, sizes))
    return Holding(host=held)


def pins_memory(job: Job) -> bool:
    """FSDP2 with offloading: whether shards lie in page-locked memory."""
    return job.settings.engine.pin_memory and job.settings.engine.device != "cpu"


def _zero12(job: Job) -> Holding:
    zero, cast = job.zero, job.compute_bytes
    assert zero is not None
    flat = flat_elements(job.trained, job.world)
    part = flat // job.world
    held = {
        Kind.MASTERS: FP32 * part,
        Kind.MOMENTS: moment_bytes([part], eight_bit=False),
        Kind.EMA: FP32 * min(part, job.trained_elements) if job.settings.optimizer.ema is not None else 0,
    }
    parameters = {Kind.PARAMETERS: cast * (flat + job.frozen_elements)}
    if zero.offload_optimizer is None:
        return Holding(device=added([parameters, held]))
    largest = cast * max(p.elements for p in job.trained)
    lock = page_locked if zero.pin_optimizer and job.settings.engine.device != "cpu" else int
    host = {
        Kind.MASTERS: lock(FP32 * part),
        Kind.GRADIENTS: lock(FP32 * part),
        Kind.BUCKETS: lock(cast * part) + lock(largest),  # bf16 values on their way back; one gradient on its way
    }
    return Holding(device=added([parameters, {Kind.BUCKETS: largest}]), host=added([held | host]))


def _zero3(job: Job) -> Holding:
    zero, cast = job.zero, job.compute_bytes
    assert zero is not None
    groups = sub_groups(job)
    part, frozen = sum(groups), sum(slice_part(p, job.world) for p in job.frozen)
    on_device = job.settings.engine.device != "cpu"
    masters = {
        Kind.MASTERS: FP32 * part,
        Kind.MOMENTS: moment_bytes(groups, eight_bit=False),
        Kind.EMA: FP32 * part if job.settings.optimizer.ema is not None else 0,
    }
    small = persistent(job.trained + job.frozen, zero)
    device = {
        Kind.BUCKETS: FP32 * zero.reduce_bucket if zero.contiguous_gradients else 0,
        Kind.GATHERED: cast * sum(slice_part(p, job.world) for p in small) * job.world if job.world > 1 else 0,
    }
    host: dict[Kind, int] = {}
    if zero.offload_optimizer is None:
        device |= masters | {Kind.GRADIENTS: FP32 * part}
    else:
        lock = page_locked if zero.pin_optimizer and on_device else int
        # Twice: beside the masters for the step, and in one buffer where micro-batches are added up.
        host |= masters | {Kind.GRADIENTS: sum(lock(FP32 * group) for group in groups) + lock(FP32 * part)}
    lock = page_locked if zero.pin_param and on_device else int
    if zero.offload_param is None:
        device[Kind.PARAMETERS] = cast * (part + frozen)
    elif zero.offload_param == "cpu":
        host[Kind.PARAMETERS] = page_locked(cast * part) if on_device else cast * part
        kept = {p.name for p in small}
        host[Kind.PARAMETERS] += sum(lock(cast * slice_part(p, job.world)) for p in job.frozen if p.name not in kept)
        device[Kind.PARAMETERS] = cast * sum(slice_part(p, job.world) for p in job.frozen if p.name in kept)
    else:
        slices = (cast * slice_part(p, job.world) for p in job.trained)
        host[Kind.PARAMETERS] = sum(size for size in slices if size < _SMALLEST_ON_NVME)
        host[Kind.BUCKETS] = lock(zero.nvme_buffer_count * zero.nvme_buffer_size * cast)
    return Holding(device=added([device]), host=added([host]))

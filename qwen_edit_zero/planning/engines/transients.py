"""What engines hold beside the state in each phase: gathered parameters, gradients, buckets. Read from their code.

Activations are not in here. Peaks of several kinds are added up, though they may come at different moments of a block.
"""

from __future__ import annotations

from collections.abc import Mapping

from qwen_edit_zero.planning.engines.fsdp_units import units
from qwen_edit_zero.planning.engines.gathering import gathering
from qwen_edit_zero.planning.engines.kinds import Holding, Kind, Phase, added, page_locked
from qwen_edit_zero.planning.engines.layout import flat_elements, rows_part, slice_part, sub_groups
from qwen_edit_zero.planning.engines.state import FP32, pins_memory
from qwen_edit_zero.planning.jobs.job import Job
from qwen_edit_zero.planning.jobs.trainable import without_gradient

FP64 = 8  # DeepSpeed takes norms of gradients, one tensor after the other, in fp64


def transients(job: Job) -> Mapping[Phase, Holding]:
    """Bytes beside `state(job)` while loading, in forward, backward and step; phases without any are left out."""
    match job.kind:
        case "ddp":
            return _ddp(job)
        case "fsdp2":
            return _fsdp2(job)
        case "zero3":
            return _zero3(job)
        case _:
            return _zero12(job)


def _gradient_elements(job: Job) -> int:
    dead = sum(p.elements for p in without_gradient(job.trained, job.model.blocks))
    return job.trained_elements - dead


def _ddp(job: Job) -> Mapping[Phase, Holding]:
    # While micro-batches are added up without reduction, gradients are not yet in the buckets, which stay beside them.
    beside = FP32 * _gradient_elements(job) if job.accumulation > 1 else 0
    gradients = Holding(device=added([{Kind.GRADIENTS: beside}]))
    missing = FP32 * (job.trained_elements - _gradient_elements(job))  # get a gradient of zeros
    step = Holding(device=added([{Kind.GRADIENTS: missing}]))
    # in forward from the second micro-batch on
    return {Phase.FORWARD: gradients, Phase.BACKWARD: gradients, Phase.STEP: step}


def _fsdp2(job: Job) -> Mapping[Phase, Holding]:
    root, blocks = units(job)
    engine, cast, shards = job.settings.engine, job.compute_bytes, job.shard_size
    gathered = max(block.gathered for block in blocks)
    all_blocks = sum(block.gathered for block in blocks)
    # While a block's parameters are copied out of the buffer they came in, the buffer of the block before is still
    # there; so are those gathered ahead. One rank alone gathers nothing.
    ahead = max(engine.prefetch_blocks or 1, 1) if shards > 1 else 0
    forward = gathered * ((2 + ahead) if shards > 1 else 1)
    backward = gathered * (1 + ahead)
    if not engine.reshard_after_forward:
        forward = all_blocks + (2 * gathered if shards > 1 else 0)
        backward = all_blocks - gathered  # the last block is released before anything waits to be reduced
    if engine.cpu_offload and job.settings.engine.device != "cpu":
        casting = max(block.part for block in blocks) * (FP32 + cast) // cast  # fp32 shards come over, then are cast
        forward, backward = forward + casting, backward + casting
    # What is reduced of the block before, while this block's gradients come up in the compute precision.
    buckets = FP32 * max(block.reduced for block in blocks) + cast * max(block.gradients for block in blocks)
    buckets = max(buckets, FP32 * root.reduced + cast * root.gradients)
    held = _fsdp2_gradients(job)
    accumulates = job.accumulation > 1
    whole = accumulates and not engine.reduce_every_micro_batch
    gradients = held
    if whole:  # shards come up as whole gradients go
        gradients = FP32 * (root.gradients + sum(block.gradients for block in blocks))
    elif engine.cpu_offload:
        gradients = FP32 * max(block.reduced for block in blocks) // shards  # on their way to the host
    missing = FP32 * sum(rows_part(p, shards) for p in without_gradient(job.trained, job.model.blocks))
    from_before = {
        Kind.GRADIENTS: gradients if accumulates and (whole or not engine.cpu_offload) else 0,
        Kind.BUCKETS: FP32 * root.reduced if accumulates and not whole else 0,  # kept until the next backward pass
    }
    on_host = added([{Kind.GRADIENTS: held}]) if engine.cpu_offload else {}
    in_step = added([{Kind.GRADIENTS: held + missing}])
    found = {
        Phase.FORWARD: [from_before, {Kind.GATHERED: cast * (root.gathered + forward)}],
        Phase.BACKWARD: [
            {Kind.GRADIENTS: gradients, Kind.BUCKETS: buckets, Kind.GATHERED: cast * (root.gathered + backward)}
        ],
        Phase.STEP: [] if engine.cpu_offload else [in_step],
    }
    host = {
        Phase.FORWARD: on_host if accumulates and not whole else {},
        Phase.BACKWARD: on_host,
        Phase.STEP: in_step if engine.cpu_offload else {},
    }
    return {phase: Holding(device=added(parts), host=host[phase]) for phase, parts in found.items()}


def _fsdp2_gradients(job: Job) -> int:
    """Shards of gradients that were reduced; page-locked ones are rounded up."""
    dead = set(without_gradient(job.trained, job.model.blocks))
    sizes = [FP32 * rows_part(p, job.shard_size) for p in job.trained if p not in dead]
    locked = job.settings.engine.cpu_offload and pins_memory(job)
    return sum(map(page_locked, sizes)) if locked else sum(sizes)


def _zero12(job: Job) -> Mapping[Phase, Holding]:
    zero, cast = job.zero, job.compute_bytes
    assert zero is not None
    flat = flat_elements(job.trained, job.world)
    part = flat // job.world
    largest = max(p.elements for p in job.trained)
    bucket, message = zero.reduce_bucket, min(zero.reduce_bucket, max(part, largest), job.trained_elements)
    accumulated = FP32 * _gradient_elements(job)
    if job.kind == "zero1":
        # fp32 sums of whole gradients, from which buckets are filled in the last micro-batch. With overlapping they
        # are emptied one by one, so that a single micro-batch never has all of them.
        whole = accumulated if job.accumulation > 1 or not zero.overlap else 0
        staged, sent = FP32, FP32 * message
    else:
        whole, staged = 0, cast
        sent = cast * message + (FP32 * message if cast < FP32 else 0)  # joined, and turned to fp32
    buffers = (2 if zero.overlap else 1) * staged * bucket if zero.contiguous_gradients else staged * message
    own = FP32 * part
    if cast == FP32:
        # Gradients of all parameters that the part touches, whole; those of the micro-batches before beside them.
        own += 2 * FP32 * min(largest, job.trained_elements)
        own *= 2 if job.accumulation > 1 and job.kind == "zero2" else 1
    norm = FP64 * min(largest, part)
    backward = {Kind.GRADIENTS: whole + own, Kind.BUCKETS: buffers + sent}
    forward = {Kind.GRADIENTS: 0}
    if job.accumulation > 1:
        forward = {Kind.GRADIENTS: own}
        if job.kind == "zero1":  # buckets stay until they are reduced
            forward = {Kind.GRADIENTS: whole, Kind.BUCKETS: buffers}
    step = {Kind.GRADIENTS: own + (FP32 * part if cast == FP32 else 0), Kind.BUCKETS: norm}
    if job.kind == "zero1":
        # Gradients of other ranks' parts are views of buckets, or, larger than those, as they were.
        step[Kind.BUCKETS] += buffers + FP32 * sum(p.elements for p in job.trained if p.elements > bucket)
    if zero.offload_optimizer is not None:
        backward[Kind.BUCKETS] += norm
        step = {Kind.GRADIENTS: own}
    flattening = cast * (job.trained_elements + job.frozen_elements + flat)
    return {
        Phase.LOAD: Holding(device={Kind.PARAMETERS: flattening}),
        Phase.FORWARD: Holding(device=added([forward])),
        Phase.BACKWARD: Holding(device=added([backward])),
        Phase.STEP: Holding(device=added([step])),
    }


def _zero3(job: Job) -> Mapping[Phase, Holding]:
    zero, cast = job.zero, job.compute_bytes
    assert zero is not None
    found = gathering(job)
    secondary = 0
    if zero.hpz > 1:
        secondary = cast * sum(-(-p.elements // zero.hpz) for p in job.trained + job.frozen)
    largest = max(p.elements for p in job.trained)
    # A bucket's gradients are joined in the order of ranks to be sent.
    message = FP32 * min(max(zero.reduce_bucket, largest), job.trained_elements)
    norm = FP64 * slice_part(max(job.trained, key=lambda p: p.elements), job.world)
    buckets = message if zero.contiguous_gradients else 2 * message
    forward = {Kind.GATHERED: cast * found.forward_peak + secondary}
    backward = {Kind.GATHERED: cast * found.backward_peak + secondary, Kind.BUCKETS: buckets}
    step = {Kind.GATHERED: secondary, Kind.BUCKETS: norm}
    if zero.offload_optimizer is None and len(job.trained) > 1:
        step[Kind.BUCKETS] += FP32 * max(sub_groups(job))  # a group's gradients, laid end to end
    return {
        Phase.FORWARD: Holding(device=added([forward])),
        Phase.BACKWARD: Holding(device=added([backward])),
        Phase.STEP: Holding(device=added([step])),
    }

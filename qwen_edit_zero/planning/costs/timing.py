"""How long a step takes, as a range: what is known is computed, and what is assumed has a low and a high end.

- Matrix products and attention: their FLOP over the share of the GPU's peak that such work reaches (`reached`).
- Of attention, what it takes longer with a mask (prompts are padded), or without a kernel for it.
- Everything else of a pass: its bytes (`elementwise`) over the GPU's memory bandwidth; or, where tensors are small, the
  time in which Python starts the kernels.
- Communication: bytes over links; from "as much hidden behind computing as there is computing" to "none hidden".
- AdamW: bytes of its state over memory bandwidth, of the GPU or, offloaded, of the host.

What the ends stand on: docs/plan_evidence.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from qwen_edit_zero.planning.costs.disk import cache_size, checkpoint_bytes
from qwen_edit_zero.planning.engines.communication import traffic
from qwen_edit_zero.planning.hardware.clusters import Accelerator, Cluster
from qwen_edit_zero.planning.jobs.job import Job
from qwen_edit_zero.planning.passes.activations import activations
from qwen_edit_zero.planning.passes.attention import extra_seconds
from qwen_edit_zero.planning.passes.elementwise import elementwise_bytes
from qwen_edit_zero.planning.passes.encoding import encoding_flops
from qwen_edit_zero.planning.passes.flops import step_flops

Range = tuple[float, float]

# Shares of a data sheet's rate that long transfers reach, (low, high). Assumptions, from published all-reduce tests.
_OF_MEMORY, _OF_HOST_LINK, _OF_NETWORK = (0.65, 0.9), (0.4, 0.85), (0.6, 0.92)
# AdamW over two thousand sharded tensors. Low: 0.14 s with clipping for 2.6 B elements of 14 bytes on an H100, as NeMo
# Automodel measured (QWEN_IMAGE_EDIT_2511_PERF_SWEEP.md).
_OF_MEMORY_STEPPING = (0.2, 0.85)
_OF_LINK = {"NVLink": (0.6, 0.82), "PCIe": (0.35, 0.75)}
_OF_OTHER_LINK = (0.4, 0.75)
# Of the compute rate in bf16: TF32 is half; fp32 without tensor cores a sixteenth (A100, H100).
_OF_TF32, _OF_FP32 = 1 / 2, 1 / 16
# AdamW, bytes an element: reads weight, gradient and moments, writes weight and moments. Then the norm reads, clipping
# reads and writes, and zeroing writes gradients; ZeRO casts copies.
_ADAMW: Range = (28.0 + 4.0, 28.0 + 22.0)
_ADAMW_8BIT: Range = (16.0 + 4.0, 16.0 + 22.0)
_EMA_BYTES = 12.0
# AdamW on CPUs, bytes a second of a node. The low end is DeepSpeed's in https://github.com/microsoft/DeepSpeed/pull/7474
# (3 B parameters in under 2.4 s on 128 cores); the high end half of what two sockets with 8 channels of DDR5 have.
_HOST_ADAMW: Range = (40e9, 300e9)
# Kernels that a block starts in eager mode, forward and backward, and seconds in which the host starts one.
_KERNELS, _LAUNCH = (130, 250), (4e-6, 9e-6)
_COMPILED_KERNELS = 0.4
_OF_ENCODERS = (0.4, 0.9)  # of `reached`: the text encoder sees a few hundred tokens at a time
DISK = 2e9  # bytes a second of a node, assumed: a local NVMe disk, or its share of a parallel file system


@dataclass(frozen=True)
class Timing:
    """Seconds of a step and what follows; every pair is (low, high).

    Attributes:
        compute_s: forward, backward and recomputation, of which `elementwise_s` are not products.
        communication_s, exposed_s: all transfers, and what of them computing does not hide.
        optimizer_s: AdamW, norm and clipping, with transfers of what is offloaded.
        offload_s: copies of activations to the host and back.
        save_s: what a checkpoint adds to a step, spread over the steps between two.
        step_s: all of these.
        mfu: share of the GPUs' peak that the step's useful arithmetic is.
        encode_s: filling the cache with one sample, over all ranks.
        save_stall_s, save_write_s: how long a step waits for a checkpoint, and until it is on the disk.
        loader_limit: samples a second that can be read from the cache at `disk`.
        why: sentences on what was assumed.
    """

    compute_s: Range
    elementwise_s: Range
    communication_s: Range
    exposed_s: Range
    optimizer_s: Range
    offload_s: Range
    save_s: Range
    step_s: Range
    samples_per_s: Range
    mfu: Range
    encode_s: Range
    save_stall_s: Range
    save_write_s: Range
    loader_limit: float
    why: tuple[str, ...]


def timing(job: Job, cluster: Cluster, *, disk: float = DISK) -> Timing:
    """Of a step of `job` on `cluster`, which must have as many GPUs as the job has ranks.

    Args:
        disk: bytes a second that a node reads from the cache and writes checkpoints with.
    """
    assert job.world == cluster.world
    gpu = cluster.accelerator
    flops = step_flops(job)
    peak = _peak(job, gpu)
    rates, bandwidths = _times(gpu.reached, peak), _times(_OF_MEMORY, gpu.memory_bandwidth)
    products = _over((flops.useful + flops.recomputed) / job.world, rates)
    fp32_rates = _times(gpu.reached, _fp32_peak(job, gpu))
    longer = extra_seconds(job, gpu, rates=rates, fp32_rates=fp32_rates, bandwidths=bandwidths)
    elementwise = _over(elementwise_bytes(job), bandwidths)
    launches = _launches(job)
    compute = _most(_sum((products, longer, elementwise)), launches)
    hidden, never_hidden = _communication(job, cluster)
    exposed = _sum(((max(0.0, hidden[0] - compute[0]), hidden[1]), never_hidden))
    optimizer = _optimizer(job, cluster)
    host = _times(_OF_HOST_LINK, gpu.host_link)
    offload = _over(2 * activations(job).host * job.accumulation, host)
    stall, write = _saving(job, cluster, disk)
    every = job.settings.checkpoint.every or job.settings.run.max_steps or 0
    save = _times(stall if job.settings.checkpoint.asynchronous else write, 1 / every) if every else (0.0, 0.0)
    step = _sum((compute, exposed, optimizer, offload, save))
    batch = job.settings.batch.global_size
    sample_bytes = cache_size(job).sample
    loader_limit = cluster.nodes * disk / sample_bytes
    encode = _over(encoding_flops(job) / job.world, (gpu.reached[0] * _OF_ENCODERS[0] * gpu.bf16_flops,
                                                     gpu.reached[1] * _OF_ENCODERS[1] * gpu.bf16_flops))  # fmt: skip
    rate = batch / step[1], batch / step[0]
    useful = flops.useful / job.world / peak
    why = [
        f"products and attention reach {gpu.reached[0]:.0%} to {gpu.reached[1]:.0%} of {gpu.name}'s "
        f"{peak / 1e12:,.0f} TFLOP/s; assumed, as in published trainings",
        "of the communication, from as much as possible to none is hidden behind computing",
    ]
    if longer[1] > 0.02 * compute[1]:
        why.append(_why_longer(job, gpu))
    if launches[1] >= compute[1]:
        why.append("tensors are so small that the time goes into starting kernels; a larger micro-batch costs little")
    if loader_limit < rate[1]:
        why.append(
            f"the cache is read with {disk / 1e9:g} GB/s a node (assumed), which feeds {loader_limit:.3g} samples/s: "
            "less than the GPUs may need"
        )
    if every and write[1] > every * step[0]:
        why.append("a checkpoint may not be written when the next is due")
    return Timing(
        compute, elementwise, _sum((hidden, never_hidden)), exposed, optimizer, offload, save, step, rate,
        (useful / step[1], useful / step[0]), encode, stall, write, loader_limit, tuple(why),
    )  # fmt: skip


def _peak(job: Job, gpu: Accelerator) -> float:
    return gpu.bf16_flops if job.settings.precision.mode != "fp32" else _fp32_peak(job, gpu)


def _fp32_peak(job: Job, gpu: Accelerator) -> float:
    return gpu.bf16_flops * (_OF_TF32 if job.settings.precision.tf32 else _OF_FP32)


def _why_longer(job: Job, gpu: Accelerator) -> str:
    if job.attention == "native_math":
        return "model.attention is _native_math: matrices of tokens x tokens go through the GPU's memory, in fp32"
    low, high = gpu.masked_attention
    return (
        f"prompts of a micro-batch are padded, so attention has a mask, with which it takes {low:g} to {high:g} times "
        f"as long on {gpu.name} (assumed); one sample at a time has none"
    )


def _launches(job: Job) -> Range:
    """Seconds in which the host starts a step's kernels: no step is faster."""
    forward, backward = _KERNELS
    recomputed = 0 if job.settings.model.activation_checkpointing == "none" else 1 / job.settings.model.checkpoint_every
    kernels = job.accumulation * job.model.blocks * (forward * (1 + recomputed) + backward)
    return _times(_LAUNCH, kernels * (_COMPILED_KERNELS if job.settings.model.compile else 1.0))


def _communication(job: Job, cluster: Cluster) -> tuple[Range, Range]:
    """Seconds of transfers that run beside computing, and of those that nothing runs beside."""
    kind = cluster.accelerator.link_kind.split(" ")[0]
    within = _times(_OF_LINK.get(kind, _OF_OTHER_LINK), cluster.accelerator.link)
    between = _times(_OF_NETWORK, cluster.network)
    beside: list[Range] = []
    alone: list[Range] = []
    for (operation, group), moved in traffic(job).items():
        # Both kinds of links work at once; the slower one decides.
        seconds = _most(_over(moved.within, within), _over(moved.between, between))
        waits = group == "sequence" or (operation == "all_gather" and job.kind in ("zero1", "zero2"))
        (alone if waits else beside).append(seconds)
    return _sum(beside), _sum(alone)


def _optimizer(job: Job, cluster: Cluster) -> Range:
    """AdamW on what a rank holds, with what moves between device and host for it."""
    elements = job.trained_elements / job.shard_size
    low, high = _ADAMW_8BIT if job.settings.optimizer.kind == "adamw_8bit" else _ADAMW
    more = _EMA_BYTES if job.settings.optimizer.ema is not None else 0.0
    zero = job.zero
    offloaded = job.settings.engine.cpu_offload if zero is None else zero.offload_optimizer is not None
    if not offloaded:
        rate = _times(_OF_MEMORY_STEPPING, cluster.accelerator.memory_bandwidth)
        return elements * (low + more) / rate[1], elements * (high + more) / rate[0]
    on_node = elements * job.ranks_on_node
    stepped = on_node * (low + more) / _HOST_ADAMW[1], on_node * (high + more) / _HOST_ADAMW[0]
    # fp32 gradients to the host once a micro-batch; parameters to the device in every pass, or once a step.
    passes = 2 * job.accumulation if zero is None or zero.offload_param else 1
    each = (4.0 if zero is None else 2.0) * passes + 4.0 * job.accumulation
    host = _times(_OF_HOST_LINK, cluster.accelerator.host_link)
    copies = _over(elements * each, host)
    return _sum((stepped, (0.0 if job.kind == "fsdp2" else copies[0], copies[1])))


def _saving(job: Job, cluster: Cluster, disk: float) -> tuple[Range, Range]:
    """Seconds until all ranks have copied their share to host memory, and until it is on the disk."""
    size = checkpoint_bytes(job)
    stall = _over(size / job.world, _times(_OF_HOST_LINK, cluster.accelerator.host_link))
    write = size / (disk * cluster.nodes)
    return stall, (write, 2 * write)


def _over(amount: float, rate: Range) -> Range:
    """Seconds, the fastest first."""
    return amount / rate[1], amount / rate[0]


def _times(pair: Range, factor: float) -> Range:
    return pair[0] * factor, pair[1] * factor


def _sum(pairs: Iterable[Range]) -> Range:
    listed = list(pairs)
    return sum(low for low, _ in listed), sum(high for _, high in listed)


def _most(first: Range, second: Range) -> Range:
    return max(first[0], second[0]), max(first[1], second[1])

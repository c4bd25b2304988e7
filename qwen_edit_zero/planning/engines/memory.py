"""Memory of the worst rank by kind, at the peak of each phase of a run.

State is exact. Transients are read from the engines' code, activations derived operation by operation. Assumptions are:
the CUDA context (`Accelerator.context`), NCCL's buffers (`communicators.py`), fragmentation of the allocator, what a
Python process with torch takes of host memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from qwen_edit_zero.planning.engines.communicators import communicator_bytes
from qwen_edit_zero.planning.engines.kinds import Bytes, Holding, Kind, Phase, added, page_locked, total
from qwen_edit_zero.planning.engines.state import FP32, state
from qwen_edit_zero.planning.engines.transients import transients
from qwen_edit_zero.planning.hardware.clusters import Accelerator
from qwen_edit_zero.planning.jobs.job import Job
from qwen_edit_zero.planning.passes.activations import activations
from qwen_edit_zero.planning.passes.encoding import encoding, sampling

LATENT_CHANNELS = 64  # elements of a token of a latent
SLAB = 64 * 2**20  # host memory of a checkpoint's copy comes in such pieces
PROCESS = 3 << 30  # assumed: a rank's Python with torch and CUDA, in host memory
# Assumed shares of what is not state: segments that grow leave little between tensors, those of fixed size more.
FRAGMENTATION, FRAGMENTATION_OF_FIXED_SEGMENTS = 0.04, 0.15

_TRAINING = (Phase.FORWARD, Phase.BACKWARD, Phase.STEP, Phase.SAVE, Phase.SAMPLE)


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by phase and kind of the worst rank.

    Attributes:
        device: on its GPU.
        host: in host memory; a node needs that of all of its ranks.
    """

    device: Mapping[Phase, Bytes]
    host: Mapping[Phase, Bytes]

    @property
    def peak(self) -> tuple[Phase, int]:
        """Most memory of the device, and when."""
        phase = max(self.device, key=lambda phase: total(self.device[phase]))
        return phase, total(self.device[phase])

    def fits(self, accelerator: Accelerator) -> bool:
        """Whether the peak is within a GPU's memory."""
        return self.peak[1] <= accelerator.memory


def memory(job: Job, accelerator: Accelerator | None = None) -> MemoryPlan:
    """Of a run of `job`; on a known GPU with its CUDA context, and moves to the host that depend on its memory."""
    held, beside = state(job), transients(job)
    nothing = Holding()
    batch = _batch_bytes(job)
    computing = activations(job)
    inputs = {Kind.INPUTS: (job.settings.data.prefetch + 1) * batch}
    device: dict[Phase, Bytes] = {}
    host: dict[Phase, Bytes] = {}

    cache = encoding(job)
    device[Phase.ENCODE] = {Kind.WEIGHTS_OF_OTHERS: cache.weights, Kind.ACTIVATIONS: cache.activations}
    host[Phase.ENCODE] = {}
    device[Phase.LOAD], host[Phase.LOAD] = _loading(job, held, beside.get(Phase.LOAD, nothing), accelerator)

    forward = {Kind.ACTIVATIONS: computing.forward_peak}
    backward = {Kind.ACTIVATIONS: computing.backward_peak}
    for phase, more in ((Phase.FORWARD, forward), (Phase.BACKWARD, backward), (Phase.STEP, {})):
        found = beside.get(phase, nothing)
        device[phase] = added([held.device, found.device, inputs, more])
        host[phase] = added([held.host, found.host])
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        host[phase] = added([host[phase], {Kind.ACTIVATIONS: computing.host}])
    device[Phase.SAVE], host[Phase.SAVE] = added([held.device, inputs]), dict(held.host)
    if job.settings.sampling.count:
        picture = sampling(job)
        gathered = beside.get(Phase.FORWARD, nothing).device.get(Kind.GATHERED, 0)
        denoising = {Kind.GATHERED: gathered, Kind.ACTIVATIONS: picture.forward_peak}
        decoding = {Kind.WEIGHTS_OF_OTHERS: picture.vae, Kind.ACTIVATIONS: picture.decode_peak}
        device[Phase.SAMPLE] = added([held.device, inputs, max(denoising, decoding, key=total)])
        host[Phase.SAMPLE] = dict(held.host)
    return _with_surroundings(job, accelerator, held, batch, device, host)


def _loading(
    job: Job, held: Holding, beside: Holding, accelerator: Accelerator | None
) -> tuple[Mapping[Kind, int], Mapping[Kind, int]]:
    """ZeRO-1/2 lay parameters end to end before there are masters: on the GPU if both copies fit, else on the host."""
    flattening = beside.device.get(Kind.PARAMETERS, 0)
    if flattening <= total(held.device):
        return held.device, held.host
    if accelerator is not None and flattening + accelerator.context + communicator_bytes(job) > accelerator.memory:
        # Each rank's parameters and the buffer; the GPU gets the buffer alone.
        return held.device, added([held.host, {Kind.PARAMETERS: flattening}])
    return beside.device, held.host


def _batch_bytes(job: Job) -> int:
    """A micro-batch as it is read from the cache, in the compute precision."""
    sample = job.sample.image_tokens * LATENT_CHANNELS + job.sample.text_tokens * job.model.text_width
    return job.micro * sample * job.compute_bytes


def saved_bytes(job: Job) -> int:
    """This rank's share of a checkpoint: masters, moments and average in fp32, every element once over all ranks."""
    kinds = 4 if job.settings.optimizer.ema is not None else 3
    return -(-FP32 * kinds * job.trained_elements // job.world)


def _with_surroundings(
    job: Job,
    accelerator: Accelerator | None,
    held: Holding,
    batch: int,
    device: dict[Phase, Bytes],
    host: dict[Phase, Bytes],
) -> MemoryPlan:
    """Adds what is there beside tensors, and in host memory whatever the engine."""
    checkpoint, data = job.settings.checkpoint, job.settings.data
    on_gpu = job.settings.engine.device != "cpu"
    # Kept for the next checkpoint once it is made.
    copy = -(-saved_bytes(job) // SLAB) * SLAB if checkpoint.asynchronous else 0
    inputs = (data.prefetch + 1) * (page_locked(batch) if on_gpu else batch)
    share = FRAGMENTATION if job.settings.gpu.expandable_segments else FRAGMENTATION_OF_FIXED_SEGMENTS
    for phase in device:
        later = phase in _TRAINING and (checkpoint.every is not None or phase is Phase.SAVE)
        more = {Kind.CONTEXT: PROCESS, Kind.SAVE: copy if later else 0}
        more[Kind.INPUTS] = inputs if phase in _TRAINING else 0
        host[phase] = added([host[phase], more])
        if on_gpu:
            apart = total(device[phase]) - min(total(held.device), total(device[phase]))
            more = {Kind.FRAGMENTATION: round(share * apart)}
            if accelerator is not None:
                more |= {Kind.CONTEXT: accelerator.context, Kind.COMMUNICATORS: communicator_bytes(job)}
            device[phase] = added([device[phase], more])
    return MemoryPlan(device, host)

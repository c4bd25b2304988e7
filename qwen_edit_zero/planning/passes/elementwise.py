"""Bytes that a GPU's memory moves for everything in a pass but matrix products and attention: norms, modulation, casts.

These operations take the time that their bytes take, not their arithmetic. Per element of a block's streams (tokens x
width) they read and write what `_OF_A_BLOCK` says: counted from the operators that PyTorch dispatches for diffusers'
block, inputs and outputs of each (tests/planning/test_elementwise.py counts again).
"""

from __future__ import annotations

from typing import NamedTuple

from qwen_edit_zero.planning.jobs.job import Job

# Assumed: compiled, chains of them are one kernel each, which moves a third of the bytes.
_COMPILED = 1 / 3
_CAST_OF_WEIGHT = 6  # autocast reads a parameter's 4 bytes and writes 2, forward and again for its gradient


class Moved(NamedTuple):
    """Bytes for an element, in the forward and in the backward pass of a block."""

    forward: float
    backward: float


_OF_A_BLOCK = {"fp32": Moved(217.6, 496.9), "low": Moved(181.6, 370.9), "autocast": Moved(185.6, 394.9)}
_OF_ADAPTERS = {"fp32": Moved(180.0, 112.0), "low": Moved(90.0, 56.0), "autocast": Moved(192.0, 148.0)}
_OF_TWO_TIMES = Moved(32.0, 68.0)  # more for an element of the image stream where pictures have two times (2511)


def moved(job: Job) -> Moved:
    """For an element of the streams, in the way that the job's engine computes."""
    precision = job.settings.precision.mode
    way = "fp32" if precision == "fp32" else "autocast" if job.kind == "ddp" else "low"
    parts = [_OF_A_BLOCK[way]]
    if job.settings.model.lora is not None:
        parts.append(_OF_ADAPTERS[way])
    if job.model.zero_cond_t:
        share = job.sample.image_tokens / job.sample.tokens
        parts.append(Moved(*(share * of for of in _OF_TWO_TIMES)))
    factor = _COMPILED if job.settings.model.compile else 1.0
    return Moved(*(factor * sum(of) for of in zip(*parts, strict=True)))


def elementwise_bytes(job: Job) -> float:
    """Of a rank in a step, recomputation included; what lies outside of the blocks is left out (1 block in 60)."""
    per_element = moved(job)
    model = job.settings.model
    recomputed = 0 if model.activation_checkpointing == "none" else -(-job.model.blocks // model.checkpoint_every)
    forwards = job.model.blocks + recomputed
    elements = job.micro * job.sample.tokens * job.model.width / job.sequence
    a_pass = elements * (forwards * per_element.forward + job.model.blocks * per_element.backward)
    if job.kind == "ddp" and job.settings.precision.mode != "fp32":
        a_pass += _CAST_OF_WEIGHT * job.trained_elements * (forwards / job.model.blocks + 1)
    return job.accumulation * a_pass

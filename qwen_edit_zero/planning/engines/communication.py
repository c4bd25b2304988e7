"""What a rank sends in a step, by operation and group of ranks: payloads to the byte, and links by NCCL's rings.

A payload is what a collective is about: an all-gather's output, a reduce-scatter's input, the tensor that is reduced.
Of it a ring moves (n - 1)/n through each of n ranks, twice for an all-reduce. Norms and flags (tens of bytes) are left
out. Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from qwen_edit_zero.planning.engines.fsdp_units import units
from qwen_edit_zero.planning.engines.gathering import gathering
from qwen_edit_zero.planning.engines.layout import elements, flat_elements, persistent, slice_part
from qwen_edit_zero.planning.engines.modules import first_backward_block
from qwen_edit_zero.planning.engines.state import FP32
from qwen_edit_zero.planning.jobs.job import Job
from qwen_edit_zero.planning.jobs.trainable import without_gradient

Operation = Literal["all_gather", "reduce_scatter", "all_reduce", "reduce", "all_to_all"]
Group = Literal["shard", "replica", "world", "sequence"]


@dataclass(frozen=True)
class Bytes:
    """Of one kind of collective, in a step.

    Attributes:
        payload: what they are about.
        within: bytes that a rank sends to ranks of its node, averaged over the rings.
        between: bytes that it sends to other nodes; with a network card for each GPU, through that card.
    """

    payload: int
    within: int
    between: int


def traffic(job: Job) -> Mapping[tuple[str, str], Bytes]:
    """By (operation, group); what sends nothing is left out.

    Operations: all_gather, reduce_scatter, all_reduce, reduce, all_to_all. Groups: "shard", ranks that hold one copy of
    the state (with hpZ: those inside of which backward gathers); "replica", ranks that hold the same part of it;
    "world"; "sequence".
    """
    payloads = _payloads(job) | _sequence(job)
    found = {key: _on_links(job, *key, payload) for key, payload in payloads.items() if payload}
    return {key: moved for key, moved in found.items() if moved.within or moved.between}


def _payloads(job: Job) -> dict[tuple[Operation, Group], int]:
    match job.kind:
        case "ddp":
            # and a number for each tensor: whether any rank used it
            return {("all_reduce", "world"): FP32 * (job.trained_elements + len(job.trained))}
        case "fsdp2":
            return _fsdp2(job)
        case "zero3":
            return _zero3(job)
        case _:
            reduced = job.trained_elements - elements(without_gradient(job.trained, job.model.blocks))
            times = job.accumulation if job.kind == "zero2" else 1
            return {
                ("reduce", "world"): FP32 * reduced * times,
                ("all_gather", "world"): job.compute_bytes * flat_elements(job.trained, job.world),
            }


def _fsdp2(job: Job) -> dict[tuple[Operation, Group], int]:
    root, blocks = units(job)
    engine = job.settings.engine
    gathered = root.gathered + sum(block.gathered for block in blocks)
    if engine.reshard_after_forward:
        gathered += sum(block.gathered for block in blocks if block.in_backward)
    reduced = root.reduced + sum(block.reduced for block in blocks)
    times = job.accumulation if engine.reduce_every_micro_batch else 1
    return {
        ("all_gather", "shard"): job.compute_bytes * gathered * job.accumulation,
        ("reduce_scatter", "shard"): FP32 * reduced * times,
        ("all_reduce", "replica"): FP32 * reduced // job.shard_size * times,
    }


def _zero3(job: Job) -> dict[tuple[Operation, Group], int]:
    zero, cast = job.zero, job.compute_bytes
    assert zero is not None
    found = gathering(job)
    dead = set(without_gradient(job.trained, job.model.blocks))
    reduced = sum(slice_part(p, job.world) for p in job.trained if p not in dead) * job.world
    small = sum(slice_part(p, job.world) for p in persistent(job.trained + job.frozen, zero)) * job.world
    backward: Group = "shard" if zero.hpz > 1 else "world"
    payloads: dict[tuple[Operation, Group], int] = {
        ("all_gather", "world"): cast * (found.forward * job.accumulation + small),
        ("reduce_scatter", "world"): FP32 * reduced * job.accumulation,
    }
    key: tuple[Operation, Group] = ("all_gather", backward)
    payloads[key] = payloads.get(key, 0) + cast * found.backward * job.accumulation
    return payloads


def _sequence(job: Job) -> dict[tuple[Operation, Group], int]:
    """Ulysses: two exchanges a block in forward, as many in backward and when it is recomputed; the output's tokens."""
    ranks, model, settings = job.sequence, job.model, job.settings.model
    if ranks == 1:
        return {}
    image, text = (-(-tokens // ranks) for tokens in (job.sample.image_tokens, job.sample.text_tokens))
    exchange = 4 * max(image + text, -(-job.sample.tokens // ranks)) * model.width
    first = first_backward_block(job.trained, model.blocks)
    times = model.blocks + (model.blocks - first)
    if settings.activation_checkpointing != "none":
        times += sum(n % settings.checkpoint_every == 0 for n in range(first, model.blocks))
    output = image * ranks * model.patch_size**2 * model.out_channels
    each = job.compute_bytes * job.micro * job.accumulation
    return {("all_to_all", "sequence"): exchange * times * each, ("all_gather", "sequence"): output * each}


def _on_links(job: Job, operation: Operation, group: Group, payload: int) -> Bytes:
    size, on_node = _group(job, group)
    if size == 1:
        return Bytes(payload, 0, 0)
    sent = payload * (size - 1) / size * (2 if operation == "all_reduce" else 1)
    if on_node >= size:
        return Bytes(payload, round(sent), 0)
    if operation == "all_to_all":  # to every rank as much
        between = payload * (size - on_node) / size
        return Bytes(payload, round(sent - between), round(between))
    # As many rings as the group has ranks on a node, each leaving the node through another rank's network card.
    return Bytes(payload, round(sent * (on_node - 1) / on_node), round(sent / on_node))


def _group(job: Job, group: Group) -> tuple[int, int]:
    """(ranks of a group, of which on one node)."""
    node = job.gpus_per_node
    match group:
        case "world":
            return job.world, min(job.world, node)
        case "sequence":
            return job.sequence, min(job.sequence, node)
        case "shard":
            size = job.zero.hpz if job.zero is not None else job.shard_size
            return size, min(size, node)
        case "replica":  # every shard_size-th rank
            return job.replicas, max(1, min(job.replicas, node // job.shard_size))

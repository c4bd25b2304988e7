"""Memory that NCCL takes for the groups of ranks that a job communicates in.

Assumptions; what they stand on: docs/plan_evidence.md.
"""

from __future__ import annotations

from qwen_edit_zero.planning.jobs.job import Job

A_COMMUNICATOR = 600 << 20  # of rings and trees
ALL_TO_ALL, _PEERS = 3 << 30, 7  # of exchanges with so many others; fewer take a share, more no more


def communicators(job: Job) -> int:
    """Groups of several ranks that each rank is in and that move data.

    Everyone, for losses and norms if for nothing else; under FSDP2 hybrid those that share the state and those that
    hold the same part of it; hpZ's; those that share a sample.
    """
    if job.world == 1:
        return 0
    hybrid = job.kind == "fsdp2" and job.shard_size < job.world
    shares = (job.shard_size > 1) + (job.replicas > 1) if hybrid else 0
    hpz = job.zero is not None and 1 < job.zero.hpz < job.world
    return 1 + shares + hpz + (job.sequence > 1)


def communicator_bytes(job: Job) -> int:
    """Of a rank."""
    exchanged = ALL_TO_ALL * min(job.sequence - 1, _PEERS) // _PEERS if job.sequence > 1 else 0
    return A_COMMUNICATOR * communicators(job) + exchanged

"""A job's plan: memory, arithmetic, traffic and, on a known cluster, time and cost. Each is computed when asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from qwen_edit_zero.planning.costs.cost import Cost, cost
from qwen_edit_zero.planning.costs.timing import Timing, timing
from qwen_edit_zero.planning.engines.communication import Bytes, traffic
from qwen_edit_zero.planning.engines.kinds import Kind, Phase
from qwen_edit_zero.planning.engines.memory import MemoryPlan, memory
from qwen_edit_zero.planning.hardware.clusters import Accelerator, Cluster
from qwen_edit_zero.planning.jobs.job import Job
from qwen_edit_zero.planning.passes.flops import Flops, step_flops


@dataclass(frozen=True)
class Plan:
    """What a run will need.

    Attributes:
        cluster: None where GPUs are not known: then there is no time and no price.
        samples: of the data set, if it is known.
        price: of a GPU-hour, in whatever currency.
    """

    job: Job
    cluster: Cluster | None = None
    samples: int | None = None
    price: float | None = None

    @property
    def accelerator(self) -> Accelerator | None:
        """The kind of GPU."""
        return None if self.cluster is None else self.cluster.accelerator

    @cached_property
    def memory(self) -> MemoryPlan:
        """Of the worst rank."""
        return memory(self.job, self.accelerator)

    @cached_property
    def host_peak(self) -> tuple[Phase, int]:
        """Most host memory of a node, and when."""
        ranks = self.job.ranks_on_node
        peaks = {phase: sum(kinds.values()) * ranks for phase, kinds in self.memory.host.items()}
        phase = max(peaks, key=lambda phase: peaks[phase], default=Phase.STEP)
        return phase, peaks.get(phase, 0)

    @cached_property
    def host_needed(self) -> tuple[Phase, int]:
        """The same without the copy of a checkpoint, without room for which training waits while one is written."""
        ranks = self.job.ranks_on_node
        peaks = {
            phase: sum(size for kind, size in kinds.items() if kind is not Kind.SAVE) * ranks
            for phase, kinds in self.memory.host.items()
        }
        phase = max(peaks, key=lambda phase: peaks[phase], default=Phase.STEP)
        return phase, peaks.get(phase, 0)

    @cached_property
    def fits(self) -> bool | None:
        """Whether the peaks are within a GPU's memory and a node's; None: not known."""
        if self.cluster is None:
            return None
        on_gpu, on_node = self.memory.peak[1], self.host_needed[1]
        return on_gpu <= self.cluster.accelerator.memory and on_node <= self.cluster.host_memory

    @cached_property
    def flops(self) -> Flops:
        """Of a step, all ranks together."""
        return step_flops(self.job)

    @cached_property
    def traffic(self) -> Mapping[tuple[str, str], Bytes]:
        """Of a step, a rank."""
        return traffic(self.job)

    @cached_property
    def timing(self) -> Timing | None:
        """None without a cluster."""
        return None if self.cluster is None else timing(self.job, self.cluster)

    @cached_property
    def cost(self) -> Cost | None:
        """None without a cluster."""
        return None if self.cluster is None else cost(self.job, self.cluster, samples=self.samples, price=self.price)

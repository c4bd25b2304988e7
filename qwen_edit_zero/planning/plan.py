"""A job's plan: memory, arithmetic, traffic and, on a known cluster, time and cost. Each is computed when asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from qwen_edit_zero.planning.costs.cost import Cost, cost
from qwen_edit_zero.planning.costs.timing import Timing, timing
from qwen_edit_zero.planning.engines.communication import Bytes, traffic
from qwen_edit_zero.planning.engines.kinds import Kind, Phase
from qwen_edit_zero.planning.engines.memory import MemoryPlan, memory
from qwen_edit_zero.planning.hardware.clusters import Accelerator, Cluster
from qwen_edit_zero.planning.jobs.job import Job
from qwen_edit_zero.planning.passes.flops import Flops, step_flops
from qwen_edit_zero.planning.wording.quantities import GIB

# Assumed: of a GPU's memory this much should stay free, for what differs between machines and grows while training.
_SPARE_SHARE, _SPARE_LEAST = 0.06, 3 * GIB // 2


class Verdict(StrEnum):
    """Whether a run fits."""

    FITS = "fits"
    TIGHT = "fits, but tight"
    NOT = "does not fit"


def spare(memory: int) -> int:
    """Bytes of a GPU's `memory` that should stay free: 6% of it, or 1.5 GiB where that is more."""
    return max(round(_SPARE_SHARE * memory), _SPARE_LEAST)


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
        """Whether the peaks are within a GPU's memory and a node's, however tightly; None: not known."""
        if self.cluster is None:
            return None
        return self.memory.peak[1] <= self.cluster.accelerator.memory and self.host_lack <= 0

    @cached_property
    def verdict(self) -> Verdict | None:
        """The same, and whether enough stays free; None: not known."""
        if self.cluster is None:
            return None
        return Verdict.NOT if not self.fits else Verdict.TIGHT if self.lack[2] > 0 else Verdict.FITS

    @cached_property
    def lack(self) -> tuple[Phase, int, int]:
        """(phase, its bytes, how many of them are more than may be used) where most is lacking on the GPU.

        The last is negative where enough stays free. Loading needs nothing to spare: what it takes is known. Only on
        known GPUs.
        """
        assert self.accelerator is not None
        most = self.accelerator.memory
        limits = {Phase.LOAD: most}
        sizes = {phase: sum(kinds.values()) for phase, kinds in self.memory.device.items()}
        over = {phase: size - limits.get(phase, most - spare(most)) for phase, size in sizes.items()}
        phase = max(over, key=lambda phase: over[phase])
        return phase, sizes[phase], over[phase]

    @property
    def host_lack(self) -> int:
        """Bytes by which a node's memory is too small; negative where it is not. Only on known GPUs."""
        assert self.cluster is not None
        return self.host_needed[1] - self.cluster.host_memory

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

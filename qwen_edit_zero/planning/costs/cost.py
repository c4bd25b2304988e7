"""What a whole run takes: days, GPU-hours, money and disks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from qwen_edit_zero.planning.costs.disk import CacheSize, cache_size, checkpoint_bytes, checkpoints_kept
from qwen_edit_zero.planning.costs.timing import Range, Timing, timing
from qwen_edit_zero.planning.hardware.clusters import Cluster
from qwen_edit_zero.planning.jobs.job import Job

_SECONDS_A_DAY, _SECONDS_AN_HOUR = 86_400.0, 3_600.0


@dataclass(frozen=True)
class Cost:
    """Of a run from an empty folder to its last step; pairs are (low, high).

    Attributes:
        steps: None if the run's length is in epochs and the number of samples is not known: then the next three are
            None, too.
        days: of training and of filling the cache.
        gpu_hours: `days` on all GPUs.
        price: in the unit of the price of a GPU-hour that was given; None without one.
        encode_days: part of `days` in which the cache is filled; None if the number of samples is not known.
        checkpoint: bytes of one.
        checkpoints: most that lie there at once.
        cache: of the data set.
        disk: bytes of checkpoints and cache; None without `steps` or the number of samples.
    """

    steps: int | None
    days: Range | None
    gpu_hours: Range | None
    price: Range | None
    encode_days: Range | None
    checkpoint: int
    checkpoints: int | None
    cache: CacheSize
    disk: int | None


def run_steps(job: Job, samples: int | None) -> int | None:
    """Optimizer steps of the run, by `run.max_steps` and `run.epochs`, whichever is less; None if not known.

    Epochs are counted as if all samples fell into one bucket; each further bucket may add a short step to an epoch.
    """
    run, batch = job.settings.run, job.settings.batch.global_size
    if run.epochs is None or samples is None:
        return run.max_steps
    by_epochs = run.epochs * math.ceil(samples / batch)
    return by_epochs if run.max_steps is None else min(run.max_steps, by_epochs)


def cost(
    job: Job,
    cluster: Cluster,
    *,
    samples: int | None = None,
    price: float | None = None,
    measured: Timing | None = None,
) -> Cost:
    """Of the run that `job` is, on `cluster`.

    Args:
        samples: of the data set.
        price: of a GPU-hour.
        measured: instead of what `timing` says.
    """
    time = timing(job, cluster) if measured is None else measured
    steps = run_steps(job, samples)
    encode = None
    if samples is not None:
        texts = samples * job.settings.data.variants
        encode = time.encode_s[0] * texts / _SECONDS_A_DAY, time.encode_s[1] * texts / _SECONDS_A_DAY
    days = hours = money = None
    if steps is not None:
        first = encode or (0.0, 0.0)
        days = tuple(steps * t / _SECONDS_A_DAY + e for t, e in zip(time.step_s, first, strict=True))
        hours = tuple(d * _SECONDS_A_DAY / _SECONDS_AN_HOUR * cluster.world for d in days)
        money = None if price is None else tuple(h * price for h in hours)
    size, cache = checkpoint_bytes(job), cache_size(job, samples)
    kept = None if steps is None else checkpoints_kept(job.settings.checkpoint, steps)
    disk = None if kept is None or cache.total is None else kept * size + cache.total
    return Cost(steps, _pair(days), _pair(hours), _pair(money), encode, size, kept, cache, disk)


def _pair(values: tuple[float, ...] | None) -> Range | None:
    return None if values is None else (values[0], values[1])

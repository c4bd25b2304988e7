"""A plan as text: the answer in a line, the three lines of a run's start, and the whole page."""

from __future__ import annotations

from collections.abc import Mapping

from qwen_edit_zero.planning.engines.kinds import Kind, Phase
from qwen_edit_zero.planning.jobs.tokens import SampleShape
from qwen_edit_zero.planning.plan import Plan, Verdict, spare
from qwen_edit_zero.planning.wording.quantities import GIB, show_bytes
from qwen_edit_zero.planning.wording.units import show_data, show_flops, show_number, show_range, show_times, table

_GROUPS = {"shard": "shard group", "replica": "replicas", "world": "all ranks", "sequence": "sequence group"}


def headline(plan: Plan) -> str:
    """The answer: `fits: 61.3 of 79.1 GiB at backward; 5.8-8.2 s a step; 7.8-11 samples/s; ...`."""
    return "; ".join([_fit(plan), *_rates(plan)])


def _fit(plan: Plan) -> str:
    phase, peak = plan.memory.peak
    if plan.accelerator is None:
        return f"needs {show_bytes(peak)} a GPU at its peak ({phase})"
    memory = plan.accelerator.memory
    of = f"{_gib(peak)} of {show_bytes(memory)}"
    if peak > memory:
        return f"does not fit: {of} at its peak ({phase}), {show_bytes(peak - memory)} too much"
    if not plan.fits:
        return f"does not fit: {host_lack(plan)}"
    text = f"{plan.verdict}: {of} at its peak ({phase})"
    return text if plan.verdict is Verdict.FITS else f"{text}, and {show_bytes(spare(memory))} should stay free"


def host_lack(plan: Plan) -> str:
    """What of host memory is needed, what was taken for granted, and where to say otherwise."""
    assert plan.cluster is not None
    phase, needed = plan.host_needed
    return (
        f"{show_bytes(needed)} of host memory a node at its peak ({phase}), and {show_bytes(plan.cluster.host_memory)} "
        f"are there or assumed; if a node has more, say so: --gpus {plan.cluster.name},host={_round_gib(needed)}GiB"
    )


def _round_gib(size: int) -> int:
    """Whole GiB, upwards."""
    return -(-size // GIB)


def _rates(plan: Plan) -> list[str]:
    timing, cost = plan.timing, plan.cost
    if timing is None:
        return []
    parts = [f"{show_times(*timing.step_s)} a step", f"{show_range(*timing.samples_per_s)} samples/s"]
    if cost is not None and cost.days is not None and cost.gpu_hours is not None:
        days = [day * 86_400 for day in cost.days]
        parts.append(f"{cost.steps:,} steps in {show_times(*days)}, {show_range(*cost.gpu_hours)} GPU-hours")
        if cost.price is not None:
            parts.append(f"price {show_range(*cost.price)}")
    return parts


def three_lines(plan: Plan) -> list[str]:
    """What a run says when it starts: memory, work, time; fewer where there is nothing to say."""
    peaks = ", ".join(f"{phase} {show_bytes(sum(kinds.values()))}" for phase, kinds in _phases(plan).items())
    of = "" if plan.accelerator is None else f" of {show_bytes(plan.accelerator.memory)}"
    lines = [f"plan: memory a rank{of}: {peaks}"]
    flops = plan.flops
    work = f"plan: a step is {show_flops(flops.useful)}"
    if flops.recomputed:
        work += f" and {show_flops(flops.recomputed)} of recomputation"
    sent = _sent(plan)
    lines.append(f"{work}; a rank sends {sent}" if sent else f"{work}; nothing is sent")
    if plan.timing is not None and plan.cluster is not None:
        low, high = plan.timing.mfu
        lines.append(
            f"plan: {', '.join(_rates(plan))} on {plan.cluster.name}, {low:.0%}-{high:.0%} of its peak (assumed)"
        )
    return lines


def page(plan: Plan, *, sample_is_from: str = "") -> str:
    """Everything, for a terminal; the first line is the answer."""
    parts = [headline(plan), "", *_what(plan, sample_is_from), "", *_memory(plan), "", *_work(plan)]
    if plan.timing is not None:
        parts += ["", *_time(plan)]
    if plan.cost is not None:
        parts += ["", *_disks(plan)]
    return "\n".join(parts)


def _what(plan: Plan, sample_is_from: str) -> list[str]:
    job = plan.job
    trained, frozen = job.trained_elements, job.frozen_elements
    where = f"{job.world} rank{'s' if job.world > 1 else ''}" if plan.cluster is None else plan.cluster.name
    shared = f", {job.sequence} ranks to a sample" if job.sequence > 1 else ""
    batch = (
        f"{job.settings.batch.global_size} = {job.micro} x {job.data_ranks} x {job.accumulation} micro-batches"
        if job.accumulation > 1
        else f"{job.settings.batch.global_size} = {job.micro} x {job.data_ranks}"
    )
    return [
        f"{job.settings.model.path} on {where} under {job.name}, {job.settings.precision.mode}",
        f"  {trained:,} parameters train" + (f", {frozen:,} are frozen" if frozen else ""),
        f"  batch {batch}{shared}; {_checkpointing(plan)}",
        f"  {sample_line(job.sample, sample_is_from)}",
    ]


def sample_line(sample: SampleShape, is_from: str = "") -> str:
    """`largest sample: target 1024x1024, references 1024x1024, 273 text tokens: 8,465 tokens (assumed: ...)`."""
    pictures = ", ".join(f"{rows * 16}x{columns * 16}" for rows, columns in sample.references)
    return (
        f"largest sample: target {sample.target[0] * 16}x{sample.target[1] * 16}, references {pictures or 'none'}, "
        f"{sample.text_tokens:,} text tokens: {sample.tokens:,} tokens"
    ) + (f" ({is_from})" if is_from else "")


def _checkpointing(plan: Plan) -> str:
    model = plan.job.settings.model
    if model.activation_checkpointing == "none":
        return "no block is recomputed"
    every = "each block is" if model.checkpoint_every == 1 else f"every {model.checkpoint_every} blocks one is"
    but = " but for attention" if model.activation_checkpointing == "selective" else ""
    where = ", from inputs in host memory" if model.offload_activations else ""
    return f"{every} recomputed{but}{where}"


def _phases(plan: Plan) -> Mapping[Phase, Mapping[Kind, int]]:
    return {phase: kinds for phase, kinds in plan.memory.device.items() if kinds}


def _memory(plan: Plan) -> list[str]:
    lines = [
        "memory a GPU" if plan.accelerator else "memory a rank's device",
        _by_kind(_phases(plan), plan.memory.peak[0]),
    ]
    host = {phase: kinds for phase, kinds in plan.memory.host.items() if kinds}
    if host:
        ranks = plan.job.ranks_on_node
        lines += [
            f"host memory a node ({ranks} rank{'s' if ranks > 1 else ''})",
            _by_kind(host, plan.host_peak[0], ranks),
        ]
        if plan.cluster is not None and plan.host_peak[1] > plan.cluster.host_memory and plan.host_lack <= 0:
            lines.append(
                f"  a node has {show_bytes(plan.cluster.host_memory)}: no room for the copy for a checkpoint, so "
                f"training waits while one is written; {show_bytes(plan.host_needed[1])} are needed without it"
            )
    return lines


def _by_kind(phases: Mapping[Phase, Mapping[Kind, int]], peak: Phase, times: int = 1) -> str:
    """Kinds down, phases across, GiB; the phase of the peak is marked."""
    kinds = [kind for kind in Kind if any(found.get(kind) for found in phases.values())]
    headings = ["GiB", *(f"*{phase}*" if phase is peak else str(phase) for phase in phases)]
    rows = [
        [str(kind), *(_gib(found[kind] * times) if found.get(kind) else "" for found in phases.values())]
        for kind in kinds
    ]
    rows.append(["together", *(_gib(sum(found.values()) * times) for found in phases.values())])
    return table(headings, rows)


def _gib(size: float) -> str:
    value = size / (1 << 30)
    return f"{value:.1f}" if value >= 0.1 else f"{value:.3f}"


def _work(plan: Plan) -> list[str]:
    flops, job = plan.flops, plan.job
    lines = [
        "a step",
        f"  arithmetic: {show_flops(flops.useful)} of all ranks"
        + (f", and {show_flops(flops.recomputed)} of recomputation" if flops.recomputed else ""),
    ]
    moved = [
        [f"{_operation(operation)}, {_GROUPS.get(group, group)}", show_data(found.within), show_data(found.between)]
        for (operation, group), found in plan.traffic.items()
        if found.within + found.between
    ]
    if moved:
        lines += ["  a rank sends", table(["", "inside of its node", "to other nodes"], moved, indent="    ")]
    elif job.world == 1:
        lines.append("  nothing is sent")
    return lines


def _operation(name: str) -> str:
    return name.replace("_", "-")


def _sent(plan: Plan) -> str:
    within = sum(found.within for found in plan.traffic.values())
    between = sum(found.between for found in plan.traffic.values())
    parts = [f"{show_data(within)} inside of its node"] if within else []
    return " and ".join(parts + ([f"{show_data(between)} to other nodes"] if between else []))


def _time(plan: Plan) -> list[str]:
    timing, cost = plan.timing, plan.cost
    assert timing is not None
    assert cost is not None
    rows = [
        ["forward and backward", show_times(*timing.compute_s)],
        ["communication not hidden", show_times(*timing.exposed_s)],
        ["optimizer", show_times(*timing.optimizer_s)],
    ]
    rows += [["activations to host and back", show_times(*timing.offload_s)]] if timing.offload_s[1] else []
    rows += [["checkpoints, spread over steps", show_times(*timing.save_s)]] if timing.save_s[1] else []
    rows.append(["a step", show_times(*timing.step_s)])
    low, high = timing.mfu
    lines = ["time, from the best to the worst that is likely", table([], rows)]
    lines.append(f"  {show_range(*timing.samples_per_s)} samples/s, {low:.0%}-{high:.0%} of the GPUs' peak")
    if cost.days is not None and cost.gpu_hours is not None:
        days = [day * 86_400 for day in cost.days]
        price = f", price {show_range(*cost.price)}" if cost.price is not None else ""
        lines.append(f"  {cost.steps:,} steps: {show_times(*days)}, {show_range(*cost.gpu_hours)} GPU-hours{price}")
    if cost.encode_days is not None:
        filling = [day * 86_400 for day in cost.encode_days]
        lines.append(f"  of it {show_times(*filling)} to fill the cache with {plan.samples:,} samples")
    else:
        lines.append(
            f"  filling the cache: {show_times(*timing.encode_s)} a sample over all GPUs (--samples N: in all)"
        )
    lines.append(f"  the cache, read from disks, is the limit at {show_number(timing.loader_limit)} samples/s")
    return lines + [f"  {reason}" for reason in timing.why]


def _disks(plan: Plan) -> list[str]:
    timing, cost = plan.timing, plan.cost
    assert timing is not None
    assert cost is not None
    kept = f", {cost.checkpoints} at most at once" if cost.checkpoints is not None else ""
    lines = [
        "on disks",
        f"  a checkpoint: {show_data(cost.checkpoint)}{kept}; training waits {show_times(*timing.save_stall_s)} for "
        f"it, and it is written after {show_times(*timing.save_write_s)}",
        f"  the cache: {show_data(cost.cache.sample)} a sample"
        + (f", {show_data(cost.cache.total)} in all" if cost.cache.total is not None else ""),
    ]
    return lines + ([f"  together {show_data(cost.disk)}"] if cost.disk is not None else [])

"""The parts of the check, most wanted first, as far as time and memory go."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.gpu_check import contract, steps, vae
from benchmarks.gpu_check.budget import Budget
from benchmarks.gpu_check.memory import release
from benchmarks.gpu_check.model import FULL, TINY, Subject, step_memory
from benchmarks.gpu_check.report import Report
from tests.gpu.checks import all_checks

# About what the parts take of an H100's time, in seconds; slower GPUs leave out more.
FIRST_STEPS, ATTENTION, CHECK, OTHER_ENGINE, COMPILING, VAE = 60.0, 20.0, 15.0, 60.0, 120.0, 20.0
WORKING = 80  # tensors of (tokens, width) that a block may need to be differentiated, to be on the safe side


def check(device: torch.device, *, tiny: bool, seconds: float, names: Sequence[str] | None, compiled: bool) -> Report:
    """Measure and check what fits into `seconds`; `names` chooses checks of the contract, `compiled` what compiles."""
    subject = TINY if tiny else FULL
    scale = 0.02 if tiny else 1.0
    report = Report(torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU", subject)
    budget = Budget(seconds)
    usable, report.attention_refused = steps.usable_attention(subject, device)
    plan = steps.Plan(device)

    def run_steps(part: str, takes: float, kind: str, **options: bool | Sequence[str]) -> None:
        if (lack := lacking(subject, kind, device)) is not None:
            report.left_out.append(f"{part}: {lack}")
        elif budget.allows(part, takes * scale):
            say(part)
            more = lambda: budget.allows(f"{part}, other attention", ATTENTION * scale)  # noqa: E731
            report.steps += steps.measure(subject, kind, plan, more=more, **options)  # type: ignore[arg-type]

    run_steps("LoRA steps under DDP", FIRST_STEPS, "ddp", attention=usable)
    chosen = [n for n in all_checks() if compiled or not n.endswith("compiled")] if names is None else names
    say(f"contract: {len(chosen)} checks")
    later = scale * (OTHER_ENGINE + VAE + (COMPILING if compiled else 0))  # worth more than the last of the checks
    report.contract = contract.run_checks(
        device, chosen, allows=lambda part: budget.allows(part, CHECK * scale, keep=later)
    )
    run_steps("LoRA steps under FSDP2", OTHER_ENGINE, "fsdp2")
    if budget.allows("VAE", VAE * scale):
        say("VAE")
        report.encodings = vae.measure(device, pixels=subject.pixels, released_size=not tiny)
    if compiled:
        run_steps("LoRA steps under DDP, compiled", COMPILING, "ddp", compiled=True)
    report.left_out += budget.left_out
    return report


def lacking(subject: Subject, kind: str, device: torch.device) -> str | None:
    """Why the model does not fit on this device, or None."""
    if device.type != "cuda":
        return None
    release(device)
    needed = step_memory(subject, kind) + WORKING * subject.tokens * subject.width * 2
    there = torch.cuda.mem_get_info(device)[0]
    if needed <= there:
        return None
    return (
        f"needs about {needed / 1e9:.0f} GB, and {torch.cuda.get_device_name(device)} has {there / 1e9:.0f} GB free; "
        "use a GPU of 80 GB or more, end what else is running on it, or add --tiny"
    )


def say(part: str) -> None:
    """Tell what is being done: some parts take minutes."""
    print(f"... {part}", flush=True)

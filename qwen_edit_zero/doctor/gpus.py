"""The GPUs of ranks and nodes: kind, driver, memory, who else uses them, and whether they are well."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from qwen_edit_zero.doctor.findings import Finding, Level
from qwen_edit_zero.doctor.nodes import Node, listed, odd_nodes, told_apart
from qwen_edit_zero.edit_data.wording import byte_count

_OWN = 3 << 30  # bytes that contexts and libraries of the ranks themselves may hold by then
_SECONDS = 10  # for nvidia-smi, which hangs where a GPU does
_THROTTLE = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")
_FIELDS = (
    "index",
    "driver_version",
    "ecc.errors.uncorrected.volatile.total",
    *(f"clocks_throttle_reasons.{t}" for t in _THROTTLE),
)


@dataclass(frozen=True)
class Gpu:
    """A rank's GPU; memory in bytes."""

    host: str
    name: str
    total: int
    free: int
    capability: str
    bf16: bool


@dataclass(frozen=True)
class Health:
    """What nvidia-smi says of a node. `faults` in words, by GPU; `error`: why it says nothing."""

    driver: str = ""
    count: int = 0
    faults: tuple[str, ...] = ()
    error: str = ""


def look(device: torch.device) -> Gpu | None:
    """This rank's GPU; None on CPUs."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    capability = f"{properties.major}.{properties.minor}"
    return Gpu(socket.gethostname(), properties.name, total, free, capability, bf16)


def health() -> Health:
    """What nvidia-smi tells of all GPUs of this node."""
    if shutil.which("nvidia-smi") is None:
        return Health(error="there is no nvidia-smi")
    command = ["nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return Health(faults=(f"nvidia-smi gives no answer within {_SECONDS} s",))
    except OSError as error:
        return Health(error=f"nvidia-smi: {error.strerror}")
    if done.returncode:
        return Health(error=f"nvidia-smi: {(done.stdout + done.stderr).strip().splitlines()[-1:]}")
    return parse_health(done.stdout)


def parse_health(text: str) -> Health:
    """Health from lines of `nvidia-smi --query-gpu`; what a GPU does not tell ([N/A]) is no fault."""
    faults, driver, count = [], "", 0
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(_FIELDS):
            continue
        index, driver, errors, *throttles = cells
        count += 1
        if errors.isdigit() and int(errors):
            faults.append(f"GPU {index} has {errors} uncorrected memory errors")
        slowed = [name for name, cell in zip(_THROTTLE, throttles, strict=True) if cell == "Active"]
        if slowed:
            faults.append(f"GPU {index} is slowed down ({', '.join(slowed)})")
    return Health(driver, count, tuple(faults))


def judge(
    gpus: Sequence[Gpu | None], healths: Mapping[str, Health], nodes: Sequence[Node], *, precision: str
) -> list[Finding]:
    """Findings about GPUs; `gpus` by rank, `healths` by node. Without any, one finding that says so."""
    there = [(rank, gpu) for rank, gpu in enumerate(gpus) if gpu is not None]
    if not there:
        return [Finding("machines", "GPUs", Level.UNCHECKED, "ranks compute on CPUs (engine.device)")]
    names = {node.name: " + ".join(sorted({g.name for r in node.ranks if (g := gpus[r])})) for node in nodes}
    found = [_alike("GPUs", names, "ranks wait for the slowest; losses may differ in the last bits")]
    drivers = {name: told.driver for name, told in healths.items() if told.driver}
    if drivers:
        found.append(_alike("driver", drivers, "install one driver on all nodes"))
    used = [
        f"{byte_count(gpu.total - gpu.free)} of {byte_count(gpu.total)} of the GPU of rank {rank} ({gpu.host}) are used"
        for rank, gpu in there
        if gpu.total - gpu.free > _OWN
    ]
    if used:
        more = f", and {len(used) - 3} more" if len(used) > 3 else ""
        found.append(Finding("machines", "GPU memory", Level.WARNING, f"{'; '.join(used[:3])}{more}", "see nvidia-smi"))
    else:
        least = min(gpu.free for _, gpu in there)
        found.append(Finding("machines", "GPU memory", Level.OK, f"at least {byte_count(least)} free"))
    without = [gpu.host for _, gpu in there if not gpu.bf16]
    if precision == "bf16" and without:
        text = f"the GPUs of {listed(list(dict.fromkeys(without)))} cannot compute in bf16"
        found.append(Finding("machines", "bf16", Level.FAILURE, text, "set precision=fp16, or fp32"))
    faults = [f"{name}: {fault}" for name, told in healths.items() for fault in told.faults]
    silent = {name: told.error for name, told in healths.items() if told.error}
    if faults:
        advice = "reset or replace the GPU, see `nvidia-smi -q`"
        found.append(Finding("machines", "GPU health", Level.WARNING, "; ".join(faults[:6]), advice))
    elif silent:
        text = f"{next(iter(silent.values()))} (on {listed(list(silent))})"
        found.append(Finding("machines", "GPU health", Level.UNCHECKED, text))
    else:
        found.append(Finding("machines", "GPU health", Level.OK, "no memory errors, none slowed down"))
    return found


def _alike(name: str, values: Mapping[str, str], advice: str) -> Finding:
    if odd_nodes(values):
        return Finding("machines", name, Level.WARNING, told_apart(values), advice)
    return Finding("machines", name, Level.OK, next(iter(values.values())))

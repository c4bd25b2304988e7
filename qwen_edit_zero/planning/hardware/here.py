"""The GPUs of this machine, as nvidia-smi says, without torch."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping

from qwen_edit_zero.planning.hardware.clusters import Accelerator, Cluster, accelerator_of_device

_QUERY = ["--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
_MIB = 1 << 20


def gpus_here(table: Mapping[str, Accelerator] | None = None, *, seconds: float = 1.0) -> Cluster | str:
    """The GPUs of this machine as a cluster of one node; in words, why they are not known."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return "there is no nvidia-smi on this machine"
    try:
        done = subprocess.run([program, *_QUERY], capture_output=True, text=True, timeout=seconds, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi does not answer ({type(error).__name__})"
    lines = [line.rpartition(",") for line in done.stdout.splitlines() if "," in line]
    if done.returncode or not lines:
        return "nvidia-smi finds no GPU"
    names = {name.strip() for name, _, _ in lines}
    if len(names) > 1:
        return f"this machine has different GPUs ({', '.join(sorted(names))})"
    name, _, memory = lines[0]
    kind = accelerator_of_device(name.strip(), table, memory=int(memory) * _MIB if memory.strip().isdigit() else None)
    if kind is None:
        return f"{name.strip()}, which this machine has, is not in the table of accelerators (--accelerators FILE)"
    return Cluster(1, len(lines), kind, kind.network, kind.host_memory * len(lines))

"""Consolidation is a stream: its memory does not depend on the model's size, and it needs no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from qwen_edit_zero.checkpoints.manifest import ModelReference
from qwen_edit_zero.flat_state import FlatRange
from tests.checkpoints.states import save

SIZE = 48 * 2**20  # elements; 192 MiB in fp32

_SCRIPT = """
import json, sys
from dataclasses import dataclass
from pathlib import Path
from qwen_edit_zero.checkpoints.consolidate import consolidate

def memory(field):
    return int(next(l for l in open("/proc/self/status") if l.startswith(field)).split()[1]) * 1024

@dataclass(frozen=True)
class Tensor:
    path: Path; dtype: str; shape: tuple; offset: int; nbytes: int

@dataclass(frozen=True)
class Shards:
    tensors: dict

@dataclass(frozen=True)
class Model:
    path: Path; fingerprint: str; transformer_config: dict; shards: dict

def open_model(path):
    size = int(sys.argv[3])
    offset = 8 + int.from_bytes(open(path, "rb").read(8), "little")
    tensors = {n: Tensor(Path(path), "BF16", (size,), offset + 2 * size * i, 2 * size) for i, n in enumerate("ab")}
    return Model(Path(path).parent, "f", {}, {"transformer": Shards(tensors)})

before = memory("VmRSS")
consolidate(Path(sys.argv[1]), Path(sys.argv[2]), dtype="bf16", open_model=open_model, components="none")
print(json.dumps({"grown": memory("VmHWM") - before, "torch": "torch" in sys.modules}))
"""


def test_memory_stays_far_below_the_models_size(tmp_path: Path) -> None:
    frozen = torch.randn(SIZE).bfloat16()
    save_file({"a": torch.zeros(SIZE, dtype=torch.bfloat16), "b": frozen}, tmp_path / "base.safetensors")
    weights = torch.randn(SIZE)
    reference = ModelReference(path=str(tmp_path / "base.safetensors"), fingerprint="f", config={}, frozen=("b",))
    half = SIZE // 2 + 1
    parts = [
        FlatRange("a", "param", (SIZE,), 0, weights[:half]),
        FlatRange("a", "param", (SIZE,), half, weights[half:]),
    ]
    path = save(tmp_path / "checkpoints", 1, ranges=parts, model=reference)
    command = [sys.executable, "-c", _SCRIPT, str(path), str(tmp_path / "out"), str(SIZE)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    told = json.loads(done.stdout.splitlines()[-1])
    assert not told["torch"]
    assert told["grown"] < 48 * 2**20, f"{told['grown'] / 2**20:.0f} MiB for 192 MiB of weights"
    from safetensors import safe_open

    with safe_open(tmp_path / "out" / "transformer" / "diffusion_pytorch_model.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("a"), weights.bfloat16())
        assert torch.equal(file.get_tensor("b"), frozen)

"""What GPUs are checked with holds on CPUs, so that what fails on a GPU is the GPU's."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.engines import memory as engine_memory
from benchmarks.engines import problem as benchmark
from benchmarks.gpu_check.budget import Budget
from benchmarks.gpu_check.devices import dense_bf16_tflops
from benchmarks.gpu_check.expected import state_bytes, step_bytes
from benchmarks.gpu_check.model import FULL, RandomWeights, step_memory
from qwen_edit_zero.edit_model.transformer import build_transformer
from tests.engines.harness import CPU, REPOSITORY
from tests.gpu.checks import Finding, all_checks
from tests.ranks import run_ranks

# Each function once; the contract tests try every engine on CPUs.
NAMES = ("fsdp2 fp32", "zero3 bf16", "ddp fp16", "zero2 memory", "zero1 checkpointing",
         "ddp 8-bit AdamW", "fused AdamW", "attention", "pinned batches")  # fmt: skip


def several_checks(rank: int, world: int) -> dict[str, list[Finding]]:
    return {name: all_checks()[name](CPU) for name in NAMES}


@pytest.mark.slow
def test_the_checks_hold_on_two_ranks() -> None:
    for report in run_ranks(several_checks, 2, timeout=500):
        for name in NAMES:
            assert report[name], name
            assert [(name, finding) for finding in report[name] if not finding.holds] == []


def gpu_check(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPOSITORY / "benchmarks" / "gpu_check" / "run.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=500)


def finite(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(finite, value.values()))
    if isinstance(value, list):
        return all(map(finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def test_the_whole_check_runs_on_a_cpu_and_measures_finite_numbers(tmp_path: Path) -> None:
    done = gpu_check("--tiny", "--device", "cpu", "--no-compile", "--out", str(tmp_path), "--checks", "pinned batches")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "gpu_check.json").read_text(encoding="utf-8"))
    assert finite(found)
    steps = {(row["engine"], row["attention"]): row for row in found["steps"]}
    assert {("ddp", "native"), ("ddp", "_native_flash"), ("fsdp2", "native")} <= steps.keys()
    losses = [row["first_loss"] for row in found["steps"]]
    assert max(losses) < min(losses) * 1.02
    assert all(min(row["seconds"]) > 0 and row["tflops"] > 0 and row["peak_bytes"] > 0 for row in found["steps"])
    assert [row["passed"] for row in found["contract"]] == [True]
    assert {row["channels_last"] for row in found["vae"]} == {False, True}
    assert found["left_out"] == []
    assert (tmp_path / "gpu_check.md").read_text(encoding="utf-8") in done.stdout


def test_without_time_every_part_is_named_as_left_out(tmp_path: Path) -> None:
    done = gpu_check("--tiny", "--device", "cpu", "--minutes", "0", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    for part in ("LoRA steps under DDP", "contract: zero3 bf16", "VAE"):
        assert part in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    done = gpu_check()
    assert done.returncode == 2
    assert "no GPU that torch can use" in done.stderr
    assert "--tiny --device cpu" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "zero1", "zero2", "zero3"])
def test_formulas_are_those_that_the_engine_benchmarks_hold(kind: str) -> None:
    sizes = benchmark.sizes(engine_memory.CONFIG)
    expected = state_bytes(
        kind, trained=sizes.whole, frozen=0, ranks=4, bucket=benchmark.BUCKET, persistent=sizes.persistent
    )
    assert expected == engine_memory.formulas(kind, 4)[engine_memory.STEP][1]


def test_lora_of_the_released_model_fits_80_gb() -> None:
    """41 GB of frozen weights, 16 bytes for each of 236 M adapter values, and the inputs of 60 blocks."""
    with torch.device("meta"):
        module = build_transformer(FULL.folder)
    frozen = sum(p.numel() for p in module.parameters())
    assert frozen == 20_430_401_088
    assert FULL.tokens == 2 * 4096 + 256
    kept = 60 * FULL.tokens * 3072 * 2
    found = step_memory(FULL, "ddp")
    assert found > 2 * frozen + kept
    assert (found - 2 * frozen - kept) % 16 == 0
    assert found < 50e9


def test_sharding_divides_all_but_what_is_gathered() -> None:
    sizes = {"trained": 10, "frozen": 100, "blocks": 2, "tokens": 5, "width": 3, "largest_block": 40}
    one, four = (step_bytes("fsdp2", ranks=ranks, outside_blocks=30, **sizes) for ranks in (1, 4))
    gathered = 2 * (30 + 2 * 40) + 2 * 5 * 3 * 2
    assert (one - gathered) / 4 == four - gathered == (16 * 10 + 2 * 100) / 4
    with pytest.raises(ValueError, match="no formula"):
        state_bytes("other", trained=1, frozen=0, ranks=1)


def test_random_weights_do_not_depend_on_the_cut() -> None:
    module = torch.nn.Linear(3000, 3000)  # more than one page
    source = RandomWeights(module, CPU)
    whole = source.read("weight", 0, 9_000_000)
    assert whole.float().std().item() == pytest.approx(0.5 / math.sqrt(3000), rel=0.01)
    for start, length in ((0, 10), (4_194_300, 10), (8_999_990, 10)):
        assert source.read("weight", start, length).equal(whole[start : start + length])
    assert not source.read("bias", 5, 10).any()


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L40S", 362.0),
        ("Tesla T4", None),
    ],
)
def test_peaks_go_by_the_name_of_the_device(name: str, tflops: float | None) -> None:
    assert dense_bf16_tflops(name) == tflops


def test_what_does_not_fit_into_the_time_is_left_out() -> None:
    now = [100.0]
    budget = Budget(60, clock=lambda: now[0])
    assert budget.allows("first", 50)
    now[0] += 45
    assert not budget.allows("second", 20)
    assert budget.allows("third", 10)
    assert budget.left == 15
    assert not budget.allows("fourth", 10, keep=10)
    assert budget.left_out == [
        "second (needs about 20 s, 15 s are left)",
        "fourth (needs about 10 s, 15 s are left, 10 s of them for later parts)",
    ]

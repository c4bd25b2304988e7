"""What must hold on every device: functions that run on all ranks and return what they found beside what is allowed.

Tests and `benchmarks/gpu_check` run them on GPUs; the suite runs the same functions on a CPU.
"""

from __future__ import annotations

import functools
import math
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.engines import problem as benchmark
from benchmarks.gpu_check.expected import state_bytes
from benchmarks.gpu_check.memory import DeviceMemory, release
from benchmarks.gpu_check.model import RandomWeights
from qwen_edit_zero.edit_data.batches.loader import BatchLoader
from qwen_edit_zero.edit_data.batches.schedule import SampleSchedule
from qwen_edit_zero.edit_data.cache.store import CachedSample
from qwen_edit_zero.edit_data.manifests.samples import Sample
from qwen_edit_zero.edit_data.storage.local import LocalPlace
from qwen_edit_zero.edit_model.attention import resolve_attention
from qwen_edit_zero.edit_model.transformer import build_transformer
from qwen_edit_zero.engines.base import StepResult
from qwen_edit_zero.engines.factory import make_engine
from qwen_edit_zero.errors import SettingsError
from qwen_edit_zero.training.task import EditTask
from tests.edit_data.filled import filled_cache
from tests.engines import harness, problem
from tests.engines.harness import MemorySource
from tests.engines.problem import ALL_STEPS, OPTIMIZER, POISONED_STEP

MICRO = 2
# Relative deviations. Kernels of GPUs sum in other orders than the plain loop's, which sees one sample at a time.
FP32, SAME = 1e-4, 1e-6
ATTENTION = ("_native_flash", "_native_efficient", "_native_cudnn", "_native_math", "flash", "_flash_3", "xformers")


@dataclass(frozen=True)
class Finding:
    """A measured fact: it holds if `found` is at most `limit`. Statements count their exceptions; 0 are allowed."""

    what: str
    found: float
    limit: float = 0.0

    @property
    def holds(self) -> bool:
        """Whether it does; NaN does not."""
        return self.found <= self.limit


def exceptions(*statements: bool) -> float:
    """How many of them are false."""
    return float(sum(not statement for statement in statements))


@contextmanager
def exact() -> Iterator[None]:
    """fp32 as it is, by kernels that give the same twice where there are such."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*determinis.*")
            yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


@functools.cache
def plain(device: torch.device, autocast: torch.dtype | None = None) -> tuple[list[float], list[float], dict[str, Any]]:
    """Losses, gradient norms and weights of the plain loop on this device."""
    model = problem.make_model().to(device)
    losses, norms = problem.train_plainly(model, OPTIMIZER, autocast=autocast)
    return losses, norms, {name: tensor.cpu() for name, tensor in problem.weights_of(model).items()}


def summed(losses: Sequence[float], device: torch.device) -> list[float]:
    """Losses of the steps from every rank's share of them. Collective."""
    total = torch.tensor(losses, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return total.tolist()


def furthest(found: Sequence[float], expected: Sequence[float]) -> float:
    """Largest relative deviation."""
    return max(map(problem.relative, found, expected))


def start_weights() -> MemorySource:
    """Those that every engine starts from."""
    return MemorySource.of_weights(problem.weights_of(problem.make_model()))


def applied_rightly(results: Sequence[StepResult]) -> bool:
    """Every step but the poisoned one moved the weights."""
    return [r.applied for r in results] == [step != POISONED_STEP for step in ALL_STEPS]


# Engines --------------------------------------------------------------------------------------------------------------


def fp32_equals_plain_loop(device: torch.device, kind: str, **settings: Any) -> list[Finding]:
    """Losses, norms and weights; and a state saved in the middle leads to the same end."""
    start = start_weights()
    with exact():
        losses, norms, weights = plain(device)
        engine = harness.build(kind, start, device=device, **settings)
        loaded = dict(engine.full_weights())
        last = dist.get_world_size() - 1
        own, results = problem.train_with(engine, micro=MICRO, steps=ALL_STEPS[:3], poisoned_rank=last)
        state, scalars = harness.whole_state(engine), engine.scalars()
        more, more_results = problem.train_with(engine, micro=MICRO, steps=ALL_STEPS[3:])
        end = dict(engine.full_weights())
        engine.close()
        other = harness.build(kind, start, device=device, **settings)
        other.load_state(state, scalars)
        kept = harness.whole_state(other) == state and other.scalars() == scalars
        problem.train_with(other, micro=MICRO, steps=ALL_STEPS[3:])
        again = dict(other.full_weights())
        other.close()
    results += more_results
    found_norms = [r.grad_norm for r in results if r.applied]
    right_norms = [norm for step, norm in enumerate(norms) if step != POISONED_STEP]
    whole = MemorySource.of_weights(loaded) == start
    return [
        Finding("losses", furthest(summed(own + more, device), losses), FP32),
        Finding("gradient norms", furthest(found_norms, right_norms), FP32),
        Finding("weights", problem.largest_deviation(end, weights), FP32),
        Finding("weights loaded, step skipped, state kept", exceptions(whole, applied_rightly(results), kept)),
        Finding("weights after resuming", problem.largest_deviation(again, end), SAME),
    ]


def bf16_is_near_fp32(device: torch.device, kind: str, **settings: Any) -> list[Finding]:
    """Not further from fp32 than a few times the plain autocast loop is; masters are exact and in fp32."""
    start = start_weights()
    with exact():
        losses = plain(device)[0]
        by_autocast = plain(device, torch.bfloat16)[0]
        engine = harness.build(kind, start, device=device, precision="bf16", **settings)
        masters = MemorySource.of_weights(dict(engine.full_weights())) == start
        own, results = problem.train_with(engine, micro=MICRO, poisoned_rank=0)
        state_in_fp32 = all(r.values.dtype is torch.float32 for r in engine.local_state())
        engine.close()
    return [
        Finding("losses", furthest(summed(own, device), losses), 3 * furthest(by_autocast, losses)),
        Finding(
            "masters exact and in fp32, step skipped", exceptions(masters, state_in_fp32, applied_rightly(results))
        ),
    ]


def fp16_scales_losses(device: torch.device, kind: str) -> list[Finding]:
    """The scale halves after a step that was not finite and doubles after two good ones; losses stay near fp32's."""
    if kind.startswith("zero") and device.type == "cpu":
        # Where CPUs lack fp16 instructions DeepSpeed refuses fp16, which torch computes all the same.
        from deepspeed.accelerator import get_accelerator

        get_accelerator().is_fp16_supported = lambda: True  # type: ignore[method-assign]
    with exact():
        losses = plain(device)[0]
        fp16 = {"mode": "fp16", "initial_loss_scale": 2.0**20, "loss_scale_window": 2}
        engine = harness.build(kind, start_weights(), device=device, precision=fp16)
        own, results = problem.train_with(engine, micro=MICRO, poisoned_rank=0)
        left = engine.scalars()["loss_scale"]
        engine.close()
    scale, good, right = 2.0**20, 0, True
    for result in results:
        right = right and result.loss_scale == scale
        good = good + 1 if result.applied else 0
        scale = scale * 2 if good == 2 else scale if result.applied else scale / 2
        good %= 2
    first_skipped = next(i for i, result in enumerate(results) if not result.applied)
    # Until a step is skipped for its own sake the curve is fp32's.
    finite = all(math.isfinite(loss) for loss in own)
    return [
        Finding("rule of the scale, finite losses", exceptions(right, left == scale, finite)),
        Finding("steps skipped", sum(not r.applied for r in results), len(results) / 2),
        Finding(
            "losses until one is skipped",
            furthest(summed(own, device)[: first_skipped + 1], losses[: first_skipped + 1]),
            1e-2,
        ),
    ]


def eight_bit_stays_near_adamw(device: torch.device, kind: str) -> list[Finding]:
    """Losses of six steps; moments are quantised where parameters are large enough."""
    losses = []
    for optimizer in (OPTIMIZER, OPTIMIZER.model_copy(update={"kind": "adamw_8bit"})):
        with exact():
            engine = make_engine(harness.engine_settings(kind), device=device)
            engine.setup(problem.make_model(heads=8), optimizer=optimizer, weights=None)
            own, _ = problem.train_with(engine, micro=MICRO, steps=range(6), poisoned_rank=0)
            engine.close()
        losses.append(summed(own, device))
    return [Finding("losses", furthest(losses[1], losses[0]), 1e-3)]


def adamw_is_fused(device: torch.device) -> list[Finding]:
    """One kernel for all parameters, with parameters, gradients and moments on the device."""
    findings = []
    for kind in ("ddp", "fsdp2"):
        engine: Any = harness.build(kind, start_weights(), device=device)
        tensors = [t for state in engine._optimizer.state.values() for t in state.values()]
        there = all(t.device.type == device.type for t in tensors) and bool(tensors)
        findings.append(
            Finding(f"{kind}: not fused, or elsewhere", exceptions(engine._optimizer.defaults["fused"], there))
        )
        engine.close()
    return findings


def checkpointing_changes_nothing(device: torch.device, kind: str) -> list[Finding]:
    """Blocks recomputed, all or every second, selectively, or with their inputs in (pinned) host memory."""
    ways: list[tuple[str, dict[str, Any]]] = [
        ("block", {"checkpointing": "block"}),
        ("every second", {"checkpointing": "block", "model": {"checkpoint_every": 2}}),
        ("offloaded", {"checkpointing": "block", "model": {"offload_activations": True}}),
    ]
    if kind != "zero3":
        ways.append(("selective", {"checkpointing": "selective"}))
    found: dict[str, tuple[list[float], list[float]]] = {}
    for name, options in [("none", {"checkpointing": "none"}), *ways]:
        with exact():
            engine = harness.build(kind, start_weights(), device=device, **options)
            losses, results = problem.train_with(engine, micro=MICRO, steps=range(2))
            engine.close()
        found[name] = losses, [r.grad_norm for r in results]
    return [Finding(name, max(furthest(found[name][i], found["none"][i]) for i in (0, 1)), SAME) for name, _ in ways]


def compiling_changes_nothing(device: torch.device, kind: str) -> list[Finding]:
    """Compiled blocks give the eager result."""
    found = []
    for compiled in (False, True):
        with exact():
            engine = harness.build(kind, start_weights(), device=device, compiled=compiled)
            losses, results = problem.train_with(engine, micro=MICRO, steps=range(4), poisoned_rank=0)
            engine.close()
        torch._dynamo.reset()
        found.append((summed(losses, device), [r.grad_norm for r in results if r.applied]))
    return [Finding("losses and norms", max(furthest(found[1][i], found[0][i]) for i in (0, 1)), FP32)]


# Model and data -------------------------------------------------------------------------------------------------------


def attention_backends_agree(device: torch.device, names: Sequence[str] = ATTENTION) -> list[Finding]:
    """Loss and gradient of the transformer in bf16, with every backend that can train here, under FSDP2 and DDP."""
    config = benchmark.transformer_config(width=128, layers=2, head_dim=64)
    folder = benchmark.model_folder(config)
    batch = benchmark.batches(0, 0, 1)[0].to(device)
    usable = []
    for name in names:
        try:
            usable.append(resolve_attention(name, device=device, dtype=torch.bfloat16, head_dim=64, masked=False))
        except SettingsError:
            continue
    findings = []
    for kind in ("fsdp2", "ddp"):
        expected: tuple[float, float] | None = None
        for name in ("native", *usable):
            run = benchmark.settings(kind)
            engine = make_engine(run, device=device)
            with engine.init_context():
                module = build_transformer(folder, attention=name)
            engine.setup(module, optimizer=run.optimizer, weights=RandomWeights(module, device))
            with engine.micro_step(is_last=True):
                losses = EditTask(folder, run).losses(engine.forward, batch)
                engine.backward(losses.sum())
            found = float(losses.detach().sum()), engine.step(lr=1e-4).grad_norm
            engine.close()
            expected = expected or found
            findings.append(Finding(f"{kind}: {name}", furthest(found, expected), 2e-2))
    return findings


def loader_brings_batches(device: torch.device) -> list[Finding]:
    """Batches are on the device as they were in the cache, though copied beside what it computes; a copy's memory is
    not given to the next batch while a kernel that was queued before still reads it."""
    with tempfile.TemporaryDirectory() as name:
        made = [_entry(i) for i in range(16)]
        cache, keys = filled_cache(Path(name), made)
        entries = dict(zip(keys, made, strict=True))
        samples = [Sample(str(i), LocalPlace(Path(name)), ("reference.png",), "edit", "target.png") for i in range(16)]
        schedule = SampleSchedule(np.zeros(16, np.int32), seed=0, global_size=2)
        busy = torch.randn(2048, 2048, device=device) if device.type == "cuda" else torch.randn(64, 64)
        wrong, seen = 0, []
        with BatchLoader(
            samples, cache, lambda i, *_: keys[i], schedule, rank=0, world_size=1, micro_size=1, device=device
        ) as loader:
            for _, batches in loader.steps(0, 24):
                for batch in batches:
                    wrong += any(tensor.device != device for tensor in batch.tensors())
                    for _ in range(20):
                        busy = busy @ busy / busy.norm()
                    read = [batch.target_latents[0] + 0, batch.prompt_embeds[0] + 0]  # queued behind the products
                    seen.append((keys[int(batch.sample_ids[0])], read))
                    del batch
        for key, (latent, prompt) in seen:
            wrong += not latent.cpu().equal(entries[key].target_latent)
            wrong += not prompt.cpu().equal(entries[key].prompt_embeds)
    return [Finding("batches not on the device or not equal", wrong)]


def _entry(number: int) -> CachedSample:
    generator = torch.Generator().manual_seed(number)
    latents = [torch.randn(16, 8, 8, generator=generator) for _ in range(2)]
    return CachedSample(latents[0], (latents[1],), torch.randn(5, 12, generator=generator))


def memory_is_as_the_formula_says(device: torch.device, kind: str) -> list[Finding]:
    """After setup and after two steps, in bf16; rounding to the allocator's blocks included."""
    config = benchmark.transformer_config(width=256, layers=4)
    sizes = benchmark.sizes(config)
    folder, run = benchmark.model_folder(config), benchmark.settings(kind)
    task, batch = EditTask(folder, run), benchmark.batches(0, 0, 1)[0].to(device)
    _ = float((batch.prompt_embeds[0] @ batch.prompt_embeds[0].T).sum())  # the libraries' own workspaces
    memory = DeviceMemory(device)
    engine = make_engine(run, device=device)
    with engine.init_context():
        module = build_transformer(folder)
    engine.setup(module, optimizer=run.optimizer, weights=RandomWeights(module, device))
    expected = state_bytes(
        kind,
        trained=sizes.whole,
        frozen=0,
        ranks=dist.get_world_size(),
        bucket=benchmark.BUCKET,
        persistent=sizes.persistent,
    )
    after_setup = memory.allocated()
    for _ in range(2):
        benchmark.run_backward(engine, task, batch, is_last=True)
        engine.step(lr=1e-4)
    after_steps = memory.allocated()
    engine.close()
    del engine, module
    release(device)
    # Workspaces of kernels first used in a step stay: up to 32 MB a library and stream.
    workspaces = 2**26 / expected if device.type == "cuda" else 0.0
    findings = [Finding("after steps", max(after_steps / expected - 1, 0.0), 0.02 + workspaces)]
    if kind != "ddp" or device.type == "cuda":  # Python sees DDP's buckets, once they are gradients, but no sooner
        findings.append(Finding("after setup", abs(after_setup / expected - 1), 0.02))
    return findings


KINDS = harness.EVERY_ENGINE
Check = Callable[[torch.device], list[Finding]]


def all_checks() -> dict[str, Check]:
    """Every check by the name it has in tables."""
    checks: dict[str, Check] = {}
    for kind in KINDS:
        checks[f"{kind} fp32"] = functools.partial(fp32_equals_plain_loop, kind=kind)
        checks[f"{kind} bf16"] = functools.partial(bf16_is_near_fp32, kind=kind)
        checks[f"{kind} fp16"] = functools.partial(fp16_scales_losses, kind=kind)
        checks[f"{kind} memory"] = functools.partial(memory_is_as_the_formula_says, kind=kind)
        checks[f"{kind} checkpointing"] = functools.partial(checkpointing_changes_nothing, kind=kind)
    checks["fsdp2 fp32, offloaded"] = functools.partial(fp32_equals_plain_loop, kind="fsdp2", cpu_offload=True)
    checks["fused AdamW"] = adamw_is_fused
    checks["ddp 8-bit AdamW"] = functools.partial(eight_bit_stays_near_adamw, kind="ddp")
    checks["fsdp2 8-bit AdamW"] = functools.partial(eight_bit_stays_near_adamw, kind="fsdp2")
    checks["attention"] = attention_backends_agree
    checks["pinned batches"] = loader_brings_batches
    for kind in ("ddp", "fsdp2", "zero2"):
        checks[f"{kind} compiled"] = functools.partial(compiling_changes_nothing, kind=kind)
    return checks

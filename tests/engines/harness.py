"""Building engines in tests, and carrying state between them in memory."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from qwen_edit_zero.engines.base import ParallelEngine
from qwen_edit_zero.engines.factory import make_engine
from qwen_edit_zero.flat_state import PARAM, FlatRange
from qwen_edit_zero.settings.models import OptimizerSettings, Settings
from tests.engines import problem

CPU = torch.device("cpu")
REPOSITORY = Path(__file__).parents[2]
EVERY_ENGINE = ("ddp", "fsdp2", "zero1", "zero2", "zero3")


def _without_auto(values: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_auto(value) if isinstance(value, dict) else value
        for key, value in values.items()
        if value != "auto"
    }


class MemorySource:
    """A TensorSource over whole tensors in memory that counts the elements read."""

    def __init__(self, tensors: dict[str, dict[str, torch.Tensor]]) -> None:
        self.tensors = tensors
        self.elements_read = 0

    @classmethod
    def of_weights(cls, weights: dict[str, torch.Tensor]) -> MemorySource:
        return cls({PARAM: weights})

    @classmethod
    def of_ranges(cls, ranges: Iterable[FlatRange]) -> MemorySource:
        """Assemble ranges of all ranks; asserts that they cover every element exactly once."""
        whole: dict[str, dict[str, torch.Tensor]] = {}
        covered: dict[tuple[str, str], torch.Tensor] = {}
        for r in ranges:
            tensor = whole.setdefault(r.kind, {}).setdefault(r.name, torch.full(r.shape, math.nan)).view(-1)
            seen = covered.setdefault((r.kind, r.name), torch.zeros(tensor.numel(), dtype=torch.int))
            end = r.start + r.values.numel()
            tensor[r.start : end] = r.values
            seen[r.start : end] += 1
        for key, seen in covered.items():
            assert bool((seen == 1).all()), f"{key} is not covered exactly once"
        return cls(whole)

    def __eq__(self, other: object) -> bool:
        """Whether the tensors are the same to the bit."""
        if not isinstance(other, MemorySource) or self.tensors.keys() != other.tensors.keys():
            return False
        return all(
            tensors.keys() == other.tensors[kind].keys()
            and all(torch.equal(tensors[name], other.tensors[kind][name]) for name in tensors)
            for kind, tensors in self.tensors.items()
        )

    def names(self, kind: str = PARAM) -> Iterable[str]:
        return self.tensors.get(kind, {}).keys()

    def shape(self, name: str, kind: str = PARAM) -> tuple[int, ...]:
        return tuple(self.tensors[kind][name].shape)

    def read(self, name: str, start: int, length: int, kind: str = PARAM) -> torch.Tensor:
        flat = self.tensors[kind][name].view(-1)
        assert 0 <= start <= start + length <= flat.numel()
        self.elements_read += length
        return flat[start : start + length].clone()


def engine_settings(
    kind: str, *, precision: Any = "fp32", checkpointing: str = "block", compiled: bool = False, **engine: Any
) -> Settings:
    """Settings for "ddp", "fsdp2", "fsdp2-hybrid" (groups of 2), "zero1", "zero2-offload", ...

    Buckets are small, so that several are used.
    """
    options: dict[str, Any] = dict(engine)
    if kind.startswith("zero"):
        shipped = json.loads((REPOSITORY / "ds_configs" / f"{kind.replace('-', '_')}.json").read_text())
        config = _without_auto(shipped)
        zero = config["zero_optimization"]
        zero |= {key: 2000 for key in ("reduce_bucket_size", "allgather_bucket_size") if key in zero}
        if zero["stage"] == 3:
            zero |= {"stage3_param_persistence_threshold": 100, "sub_group_size": 3000}
        zero |= options.pop("zero", {})
        options |= {"backend": "deepspeed", "deepspeed": config}
    else:
        options["backend"] = kind.split("-")[0]
        if kind == "fsdp2-hybrid":
            options["shard_size"] = 2
    model = {"activation_checkpointing": checkpointing, "compile": compiled, **options.pop("model", {})}
    sections = {"run": {"max_steps": 1}, "model": model, "precision": precision, "engine": options}
    return Settings.model_validate(sections)


def packed(value: Any) -> bytes:
    """What a rank returns: tensors would travel as shared memory that ends with the rank."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpacked(value: bytes) -> Any:
    return torch.load(io.BytesIO(value), weights_only=False)


def build(
    kind: str,
    source: MemorySource | None,
    *,
    frozen: bool = False,
    device: torch.device = CPU,
    optimizer: OptimizerSettings = problem.OPTIMIZER,
    **settings: Any,
) -> ParallelEngine:
    """An engine that is set up; without a source it keeps the values of `problem.make_model()`."""
    engine = make_engine(engine_settings(kind, **settings), device=device)
    module = problem.make_engine_model(engine, frozen=frozen) if source else problem.make_model(frozen=frozen)
    engine.setup(module, optimizer=optimizer, weights=source)
    return engine


def whole_state(engine: ParallelEngine) -> MemorySource:
    """The state of all ranks put together; collective."""
    own = [FlatRange(r.name, r.kind, r.shape, r.start, r.values.cpu().clone()) for r in engine.local_state()]
    gathered: list[list[FlatRange]] = [[]] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return MemorySource.of_ranges(r for ranges in gathered for r in ranges)


def same_on_all_ranks(value: object) -> bool:
    """Whether all ranks hold an equal value; collective."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return all(other == value for other in gathered)

"""Everything the planner's formulas need, from the same settings that training uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from qwen_edit_zero.errors import SettingsError
from qwen_edit_zero.planning.jobs.deepspeed import ZeroOptions
from qwen_edit_zero.planning.jobs.known import known_config, takes_several_references
from qwen_edit_zero.planning.jobs.model import Parameter, TransformerShape
from qwen_edit_zero.planning.jobs.tokens import SampleShape
from qwen_edit_zero.planning.jobs.trainable import split
from qwen_edit_zero.settings.batch import derive_accumulation
from qwen_edit_zero.settings.models import Settings

Kind = Literal["ddp", "zero1", "zero2", "zero3", "fsdp2"]
_NAMES: dict[Kind, str] = {"ddp": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3", "fsdp2": "FSDP2"}

# diffusers backends that raise an error for a mask, without their leading mark.
_WITHOUT_MASK = frozenset({"flash", "flash_3", "native_flash", "sage"})


@dataclass(frozen=True)
class Job:
    """A run on `world` ranks, `gpus_per_node` of them on each node, over samples of one shape.

    Attributes:
        padded: whether prompts of a micro-batch differ in length; None: they do where it has several samples.
    """

    settings: Settings
    model: TransformerShape
    sample: SampleShape
    world: int
    gpus_per_node: int
    padded: bool | None = None

    @cached_property
    def kind(self) -> Kind:
        """The engine, ZeRO stages apart."""
        backend = self.settings.engine.backend
        if backend != "deepspeed":
            return backend
        zero = self.zero
        assert zero is not None
        return {1: "zero1", 2: "zero2", 3: "zero3"}[zero.stage]  # type: ignore[return-value]

    @cached_property
    def name(self) -> str:
        """For people: `FSDP2 hybrid (groups of 8)`."""
        name = _NAMES[self.kind]
        if self.kind == "fsdp2" and self.shard_size < self.world:
            name += f" hybrid (groups of {self.shard_size})"
        zero = self.zero
        offloads = self.settings.engine.cpu_offload if zero is None else zero.offload_optimizer or zero.offload_param
        if offloads:
            name += " with offloading"
        return name

    @cached_property
    def zero(self) -> ZeroOptions | None:
        """What the DeepSpeed JSON says, with DeepSpeed's defaults for the rest; None under other engines."""
        if self.settings.engine.backend != "deepspeed":
            return None
        return ZeroOptions.from_json(self.settings.engine.deepspeed or {}, self.world)

    @cached_property
    def shard_size(self) -> int:
        """Ranks over which masters and moments are spread."""
        if self.kind == "ddp":
            return 1
        return self.settings.engine.shard_size or self.world if self.kind == "fsdp2" else self.world

    @property
    def replicas(self) -> int:
        """Groups of ranks that hold the same state."""
        return self.world // self.shard_size

    @property
    def sequence(self) -> int:
        """Ranks that split the tokens of each sample; 1: none do."""
        return self.settings.engine.sequence_parallel

    @property
    def data_ranks(self) -> int:
        """Shares of the samples of a step."""
        return self.world // self.sequence

    @property
    def micro(self) -> int:
        """Samples of one forward of one rank (of one sequence group)."""
        return self.settings.batch.micro_size

    @property
    def masked(self) -> bool:
        """Whether attention gets a mask, since prompts are padded."""
        return self.micro > 1 if self.padded is None else self.padded

    @property
    def attention(self) -> str:
        """`model.attention` without the mark of names that diffusers keeps to itself."""
        return self.settings.model.attention.removeprefix("_")

    @property
    def accumulation(self) -> int:
        """Micro-batches of a step."""
        return self.settings.batch.global_size // (self.micro * self.data_ranks)

    @property
    def nodes(self) -> int:
        """Nodes that the ranks fill."""
        return -(-self.world // self.gpus_per_node)

    @property
    def ranks_on_node(self) -> int:
        """Ranks that share a node's memory."""
        return min(self.world, self.gpus_per_node)

    @property
    def trained(self) -> tuple[Parameter, ...]:
        """Parameters that get gradients, in the order of the module."""
        return split(self.model, self.settings.model)[0]

    @property
    def frozen(self) -> tuple[Parameter, ...]:
        """The others."""
        return split(self.model, self.settings.model)[1]

    @cached_property
    def trained_elements(self) -> int:
        """N of the formulas in docs/engines.md."""
        return sum(p.elements for p in self.trained)

    @cached_property
    def frozen_elements(self) -> int:
        """Elements that never change."""
        return sum(p.elements for p in self.frozen)

    @property
    def compute_bytes(self) -> int:
        """Bytes of an element in the compute precision: 2 or 4."""
        return 4 if self.settings.precision.mode == "fp32" else 2


def make_job(
    settings: Settings,
    *,
    cluster_world: int,
    gpus_per_node: int,
    sample: SampleShape | None = None,
    config: Mapping[str, Any] | None = None,
    padded: bool | None = None,
) -> Job:
    """The job of these settings on `cluster_world` ranks.

    Args:
        sample: default: one reference, square, of `data.vae_area` and `data.condition_area`.
        config: the transformer's configuration; default: that of `model.path`.
        padded: as of `Job`.

    Raises:
        SettingsError: settings contradict each other or the number of ranks.
        ModelFolderError: there is no configuration under the name `model.path`.
    """
    model = TransformerShape.from_config(known_config(settings.model.path) if config is None else config)
    if sample is None:
        data = settings.data
        small = config is not None or takes_several_references(settings.model.path)
        sample = SampleShape.of(data.vae_area, condition_area=data.condition_area if small else data.vae_area)
    job = Job(settings, model, sample, cluster_world, gpus_per_node, padded)
    _check(job)
    return job


def _check(job: Job) -> None:
    _ = job.kind, job.trained  # refuse what cannot be
    engine = job.settings.engine
    if job.world % job.shard_size:
        raise SettingsError(
            f"engine.shard_size is {job.shard_size}, which does not divide the {job.world} ranks of this run into "
            f"equal shard groups. Sizes that do: {_divisors(job.world)}."
        )
    if job.world % job.sequence:
        raise SettingsError(
            f"engine.sequence_parallel is {job.sequence}, which does not divide the {job.world} ranks of this run into "
            f"equal groups. Sizes that do: {_divisors(job.world)}."
        )
    if job.model.heads % job.sequence:
        raise SettingsError(
            f"engine.sequence_parallel is {job.sequence}, which does not divide the {job.model.heads} attention heads "
            f"of the model. Sizes that do: {_divisors(job.model.heads)}."
        )
    if job.kind.startswith("zero") and job.settings.optimizer.kind != "adamw":
        raise SettingsError("optimizer.kind is adamw_8bit, which DeepSpeed's flat masters cannot be saved with")
    if engine.cpu_offload and job.kind != "fsdp2":
        raise SettingsError(f"engine.cpu_offload is for FSDP2, and the engine is {job.name}")
    if job.micro > 1 and job.attention in _WITHOUT_MASK:
        raise SettingsError(
            f"model.attention is {job.settings.model.attention}, which takes no mask, and with batch.micro_size "
            f"{job.micro} prompts are padded, so there is one; training would refuse it. Use auto, or a micro_size of 1"
        )
    derive_accumulation(job.settings.batch, job.world, sequence_parallel=job.sequence)


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)

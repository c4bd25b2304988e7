"""The settings of a run, section by section. Pure data: loading, sources and messages live beside this file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]


class Section(BaseModel):
    """A section: unknown keys are errors, values do not change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True)


class RunSettings(Section):
    """What is run, where its files go (`dir/name`), and for how long."""

    name: str = Field(default="demo", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    dir: Path = Path("runs")
    seed: NonNegative = 0
    max_steps: Positive | None = None
    epochs: Positive | None = None
    log_every: Positive = 1
    tensorboard: bool = True


class LoraSettings(Section):
    """Low-rank adapters instead of full fine-tuning; `targets` are module-name endings."""

    rank: Positive = 32
    alpha: Positive | None = None  # None: equal to rank
    targets: tuple[str, ...] = (
        "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0",
        "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out",
        "img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2",
    )  # fmt: skip


class ModelSettings(Section):
    """Which model, which of its parameters train, and how it is computed."""

    path: str = "tiny"  # "tiny" or a diffusers-layout folder
    freeze: tuple[str, ...] = ()  # shell patterns over parameter names
    activation_checkpointing: Literal["none", "block"] = "block"
    attention: str = "auto"  # a diffusers attention backend name; auto: the best of this device
    compile: bool = False  # regional compilation of the repeated block
    lora: LoraSettings | None = None


class DataSettings(Section):
    """The triplets. Areas are in pixels: each picture is resized to that area, keeping its aspect."""

    manifest: str = "demo"  # "demo" or a JSONL file
    validation: str | None = None  # None: the demo's own for "demo", else no validation
    vae_area: Annotated[int, Field(ge=32 * 32)] = 1024 * 1024
    condition_area: Annotated[int, Field(ge=28 * 28)] = 384 * 384
    cache_dir: Path | None = None  # None: RUN/cache
    max_references: Annotated[int, Field(ge=1)] = 3
    on_error: Literal["stop", "skip"] = "stop"


class BatchSettings(Section):
    """Samples of an optimizer step over all ranks, and of one forward of one rank."""

    global_size: Positive = 8
    micro_size: Positive = 1


class OptimizerSettings(Section):
    """AdamW and gradient clipping (`clip_norm` None: no clipping)."""

    lr: Annotated[float, Field(gt=0)] = 1e-5
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    clip_norm: Annotated[float, Field(gt=0)] | None = 1.0
    max_skipped: NonNegative = 10  # consecutive steps skipped for non-finite gradients before the run stops


class ScheduleSettings(Section):
    """Learning rate over steps: linear warm-up, then constant, cosine or linear decay to `final_fraction` of lr."""

    kind: Literal["constant", "cosine", "linear"] = "constant"
    warmup_steps: NonNegative = 0
    final_fraction: Annotated[float, Field(ge=0, le=1)] = 0.0


class FlowSettings(Section):
    """Flow matching: how sigma is drawn, shifted and weighted."""

    sigma_distribution: Literal["logit_normal", "uniform", "mode"] = "logit_normal"
    logit_mean: float = 0.0
    logit_std: Annotated[float, Field(gt=0)] = 1.0
    mode_scale: float = 1.29
    shift: Literal["dynamic", "none"] | float = "dynamic"  # a number: that constant shift
    weighting: Literal["none", "bell"] = "none"


class PrecisionSettings(Section):
    """Compute precision; weights and moments are kept in fp32 whatever it is."""

    mode: Literal["bf16", "fp16", "fp32"] = "bf16"
    tf32: bool = True
    initial_loss_scale: Annotated[float, Field(gt=0)] = 2.0**16  # fp16 only, as are the next two
    loss_scale_window: Positive = 1000
    min_loss_scale: Annotated[float, Field(gt=0)] = 1.0


class EngineSettings(Section):
    """Which engine, and its own options."""

    backend: Literal["ddp", "fsdp2", "deepspeed"] = "fsdp2"
    shard_size: Positive | None = None  # FSDP2: ranks in a shard group; None: all. Fewer: hybrid sharding
    reshard_after_forward: bool = True  # FSDP2
    deepspeed: dict[str, Any] | None = None  # the DeepSpeed JSON, merged and complete, when backend is deepspeed
    timeout_seconds: Positive = 1800  # a collective that takes longer ends the job


class CheckpointSettings(Section):
    """When checkpoints are written and how many stay."""

    every: Positive | None = 500  # optimizer steps; None: only at the end
    keep: Positive | None = 3  # newest ones kept; None: all
    asynchronous: bool = False
    backup: str | None = None  # a second place that gets a verified copy


class SamplingSettings(Section):
    """Sample pictures from the held-out set during training."""

    every: Positive | None = None  # optimizer steps; None: only at the end
    count: NonNegative = 12  # held-out samples pictured; 0: none
    steps: Positive = 20
    guidance: Annotated[float, Field(ge=1)] = 4.0
    negative_prompt: str = " "


class Settings(Section):
    """All settings of a run."""

    run: RunSettings = RunSettings()
    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    batch: BatchSettings = BatchSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    flow: FlowSettings = FlowSettings()
    precision: PrecisionSettings = PrecisionSettings()
    engine: EngineSettings = EngineSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    sampling: SamplingSettings = SamplingSettings()

    @field_validator("precision", mode="before")
    @classmethod
    def _mode_alone(cls, value: Any) -> Any:
        """`precision: bf16` is short for `precision: {mode: bf16}`."""
        return {"mode": value} if isinstance(value, str) else value

    @field_validator("schedule", mode="before")
    @classmethod
    def _kind_alone(cls, value: Any) -> Any:
        """`schedule: cosine` is short for `schedule: {kind: cosine}`."""
        return {"kind": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _has_an_end(self) -> Settings:
        if self.run.max_steps is None and self.run.epochs is None:
            raise ValueError("run.max_steps and run.epochs are both unset, so the run would never end; set one of them")
        return self

"""The settings of a run, section by section. Pure data: loading, sources and messages live beside this file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
VaeArea = Annotated[int, Field(ge=32 * 32, le=4096 * 4096)]
ConditionArea = Annotated[int, Field(ge=28 * 28, le=4096 * 4096)]


class Section(BaseModel):
    """A section: unknown keys are errors, values do not change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class GuardSettings(Section):
    """What is done about a step whose loss or gradient norm is far above what is usual; see docs/staying_alive.md."""

    # skip: the step is not applied; rollback: the run goes back to its newest checkpoint, and leaves the samples out
    action: Literal["off", "skip", "rollback"] = "off"
    threshold: Annotated[float, Field(ge=3)] = 8.0  # robust deviations above the median that make a spike
    window: Annotated[int, Field(ge=20)] = 100  # applied steps of which median and deviation are taken
    leave_out: Positive = 1  # rollback: steps that led up to the spike, it included, whose samples are left out
    most: Positive = 10  # spikes after which the run ends


class RunSettings(Section):
    """What is run, where its files go (`dir/name`), and for how long."""

    name: str = Field(default="demo", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")  # the run's folder inside `dir`
    dir: Path = Path("runs")  # where runs are kept
    seed: NonNegative = 0  # of the order of samples, noise and sigmas
    max_steps: Positive | None = None  # optimizer steps after which the run ends
    epochs: Positive | None = None  # passes over the data after which the run ends; whichever of the two comes first
    log_every: Positive = 1  # optimizer steps between progress lines
    tensorboard: bool = True  # write TensorBoard files beside metrics.jsonl
    # a rank that gives no sign of life for so long while steps are trained (killed, frozen, cut off) ends the job
    silent_seconds: Annotated[float, Field(ge=5)] = 20.0
    hang_factor: Annotated[float, Field(ge=2)] = 5.0  # a step may take so many times the usual, and hang_seconds more
    # lower batch.micro_size where the ranks of a start, fewer or more than before, need it; global_size stays
    elastic: bool = False
    stragglers_every: Positive | None = 50  # steps after which ranks are compared for speed; null: never
    # steps after which what all ranks hold, and the losses of one micro-batch, are compared to the bit; null: never
    replay_every: Positive | None = None
    replay_differs: Literal["warn", "stop"] = "warn"  # what a difference between ranks does
    guard: GuardSettings = GuardSettings()  # against loss spikes
    hang_seconds: Annotated[float, Field(gt=0)] = 60.0  # see hang_factor; a step that takes longer ends the job


class LoraSettings(Section):
    """Low-rank adapters instead of full fine-tuning; `targets` are module-name endings."""

    rank: Positive = 32  # rank of the two factors of every adapter
    alpha: Positive | None = None  # scale of the adapters, times 1 / rank; None: equal to rank
    targets: tuple[str, ...] = (  # endings of the names of modules that get an adapter
        "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0",
        "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out",
        "img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2",
    )  # fmt: skip


class ModelSettings(Section):
    """Which model, which of its parameters train, and how it is computed."""

    path: str = "tiny"  # "tiny" or a diffusers-layout folder
    freeze: tuple[str, ...] = ()  # shell patterns over parameter names
    # block: recompute each block in backward; selective: all of it but attention
    activation_checkpointing: Literal["none", "block", "selective"] = "block"
    checkpoint_every: Positive = 1  # n: only every n-th block is recomputed
    offload_activations: bool = False  # keep the inputs of recomputed blocks in host memory
    attention: str = "auto"  # a diffusers attention backend name; auto: the best of this device
    compile: bool = False  # regional compilation of the repeated block
    lora: LoraSettings | None = None  # None: full fine-tuning


class AugmentSettings(Section):
    """Chance in the cached variants of a sample's pictures but the first, one draw for all of them (docs/data.md)."""

    flip: bool = False  # mirror half of the variants left to right, unless the instruction names a side or writing
    crop: Annotated[float, Field(gt=0, le=1)] = 1.0  # least share of each side that a random crop keeps; 1: no crop
    colour: Annotated[float, Field(ge=0, le=0.5)] = 0.0  # brightness and contrast change by up to this share


class StorageSettings(Section):
    """Data on object stores (`s3://`, `oss://`, ...); credentials come from the environment, never from here."""

    retries: Annotated[int, Field(ge=0, le=100)] = 5  # after a failure that may pass, each after twice the wait
    timeout_seconds: Annotated[float, Field(gt=0)] = 30.0  # to connect, and without a byte of the answer
    cache_dir: Path | None = None  # folder on a disk of the node where its processes keep objects; None: none kept
    cache_gb: Annotated[float, Field(gt=0)] = 20.0  # the folder holds up to so many 10^9 bytes, the last used ones


class DataSettings(Section):
    """The triplets. Areas are in pixels: each picture is resized to that area, keeping its aspect."""

    manifest: str = "demo"  # "demo", or a file, folder or pattern of a format that docs/data.md lists
    # of data.manifest; auto: told by content
    format: Literal["auto", "jsonl", "diffsynth", "musubi", "ai_toolkit", "imagefolder", "parquet", "webdataset"] = (
        "auto"
    )
    # for formats without fixed names, as in {source: [before, style], target: after}; None: by usual names
    columns: dict[str, str | list[str]] | None = None
    split: str | None = None  # use only rows of this split, where "train" has those without any; None: all rows
    outside: list[str] = []  # folders and URLs besides the manifest's own folder that pictures may lie in
    # held-out samples; None: the demo's own for "demo", data.manifest if validation_split is given, else none
    validation: str | None = None
    validation_split: str | None = None  # as split, of the held-out samples
    vae_area: VaeArea = 1024 * 1024  # of targets, and of references as the VAE sees them
    condition_area: ConditionArea = 384 * 384  # of references as the text encoder sees them
    cache_dir: Path | None = None  # latents and embeddings, computed once; None: RUN/cache
    max_references: Annotated[int, Field(ge=1)] = 3  # a sample with more of them is refused
    max_samples: Positive | None = None  # use the first so many rows only, for trials; None: all
    on_error: Literal["stop", "skip"] = "stop"  # what a bad sample does
    storage: StorageSettings = StorageSettings()  # how pictures on object stores are fetched
    # of categories in an epoch; sqrt: by roots of sizes; uniform: all alike; {name: n}: n times as often as others
    balance: Literal["none", "sqrt", "uniform"] | dict[str, Annotated[float, Field(gt=0)]] = "none"
    weights: Literal["loss", "repeat"] = "loss"  # of rows: factors of the loss, or how often they come in an epoch
    workers: Positive = 2  # threads a rank that read latents and embeddings while the step before is computed
    prefetch: Positive = 4  # micro-batches a rank that they are ahead; each takes memory on the device
    # of references nearly of the target's size; none: each is stretched to its grid; crop: cut, centred, to one size
    align: Literal["none", "crop"] = "none"
    variants: Positive = 1  # cached versions of a sample's pictures; the first is plain, the others by `augment`
    augment: AugmentSettings = AugmentSettings()  # how variants differ
    mask_weight: Annotated[float, Field(gt=0, le=1000)] = 1.0  # of the loss where a row's mask is white; black: 1
    normalise: bool | Path = False  # instructions to canonical forms; true: by the shipped rules, or by a YAML file
    safety: Literal["off", "flag", "block"] = "off"  # what the word filter does; block: matching rows are refused
    safety_rules: Path | None = None  # YAML file of the word filter; None: the shipped rules
    safety_classifier: str | None = None  # "module:function", asked about each row too, once; docs/instructions.md
    paraphrases: bool = False  # train on a row's paraphrases too, each as often as its instruction
    # for rows without paraphrases; true: made by the shipped templates, or by those of a YAML file
    paraphrase_templates: bool | Path = False
    caption_dropout: Annotated[float, Field(ge=0, le=1)] = 0.0  # share of draws trained with an empty instruction


class BatchSettings(Section):
    """Samples of an optimizer step over all ranks, and of one forward of one rank."""

    global_size: Positive = 8  # samples of an optimizer step, all ranks together
    micro_size: Positive = 1  # samples of one forward of one rank; accumulation follows from the two and the ranks


class OptimizerSettings(Section):
    """AdamW and gradient clipping."""

    kind: Literal["adamw", "adamw_8bit"] = "adamw"  # 8bit: moments take 2 bytes a parameter, not 8 (DDP, FSDP2)
    lr: Annotated[float, Field(gt=0, le=10)] = 1e-5  # peak learning rate
    # decay of the running means of the gradient and of its square
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    eps: Annotated[float, Field(gt=0)] = 1e-8  # added to the root of the second moment
    weight_decay: Annotated[float, Field(ge=0)] = 0.01  # decoupled, times the learning rate
    clip_norm: Annotated[float, Field(gt=0)] | None = 1.0  # global L2 norm of the gradient; None: no clipping
    # decay of a running average of the weights, kept beside them and taken further by every step (0.9999); None: none
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    ema_warmup: bool = False  # let the decay begin at 0.1 and rise to `ema`: (1 + n) / (10 + n) after n steps at most
    max_skipped: NonNegative = 10  # consecutive steps skipped for non-finite gradients before the run stops


class ScheduleSettings(Section):
    """Learning rate over steps: linear warm-up, then constant, cosine or linear decay to `final_fraction` of lr."""

    kind: Literal["constant", "cosine", "linear"] = "constant"  # how lr goes on after warm-up
    warmup_steps: NonNegative = 0  # optimizer steps from 0 to lr
    final_fraction: Annotated[float, Field(ge=0, le=1)] = 0.0  # of lr, reached at the last step (cosine, linear)


class FlowSettings(Section):
    """Flow matching: how sigma is drawn, shifted and weighted."""

    sigma_distribution: Literal["logit_normal", "uniform", "mode"] = "logit_normal"  # of the noise level
    logit_mean: float = 0.0  # logit_normal only
    logit_std: Annotated[float, Field(gt=0)] = 1.0  # logit_normal only
    mode_scale: float = 1.29  # mode only
    shift: Literal["dynamic", "none"] | Annotated[float, Field(gt=0)] = "dynamic"  # by target size; a number: constant
    weighting: Literal["none", "bell"] = "none"  # of the loss over noise levels


class PrecisionSettings(Section):
    """Compute precision; weights and moments are kept in fp32 whatever it is."""

    mode: Literal["bf16", "fp16", "fp32"] = "bf16"  # of forward and backward
    tf32: bool = True  # fp32 matrix products and convolutions in TF32 where the GPU can
    initial_loss_scale: Annotated[float, Field(gt=0)] = 2.0**16  # fp16 only, as are the next two
    loss_scale_window: Positive = 1000  # steps without overflow after which the loss scale doubles
    min_loss_scale: Annotated[float, Field(gt=0)] = 1.0  # the loss scale never falls below it


class GpuSettings(Section):
    """What is set for a GPU as a whole; see docs/engines.md. Nothing of it matters on CPUs."""

    expandable_segments: bool = True  # GPU memory in segments that grow, unless PYTORCH_ALLOC_CONF says otherwise
    cudnn_benchmark: bool = False  # let cuDNN time its convolutions for each size; the bits of latents then vary
    channels_last: bool = False  # the VAE's tensors with channels innermost, which may be faster


class EngineSettings(Section):
    """Which engine, and its own options."""

    backend: Literal["ddp", "fsdp2", "deepspeed"] = "fsdp2"  # --engine and --ds choose it too
    device: Literal["auto", "cuda", "cpu"] = "auto"  # auto: GPUs where there are any
    shard_size: Positive | None = None  # FSDP2: ranks in a shard group; None: all. Fewer: hybrid sharding
    reshard_after_forward: bool = True  # FSDP2: free gathered weights after forward; False: faster, more memory
    prefetch_blocks: Positive | None = None  # FSDP2: blocks gathered ahead of the computing one; None: one
    cpu_offload: bool = False  # FSDP2: parameters, gradients and moments in host memory, AdamW on the CPU
    # FSDP2, cpu_offload: page-locked, for copies beside computing; torch rounds each tensor up to a power of two
    pin_memory: bool = True
    reduce_every_micro_batch: bool = True  # FSDP2: keep only shards of gradients; False: less traffic, whole gradients
    sequence_parallel: Positive = 1  # ranks that split the tokens of each sample between them; 1: none
    deepspeed: dict[str, Any] | None = None  # the DeepSpeed JSON, merged and complete, when backend is deepspeed
    timeout_seconds: Positive = 1800  # a collective that takes longer ends the job


class CheckpointSettings(Section):
    """When checkpoints are written and how many stay."""

    every: Positive | None = 500  # optimizer steps; None: only at the end
    keep: Positive | None = 3  # newest ones kept; None: all
    keep_every: Positive | None = None  # those of a multiple of this many steps stay for ever
    keep_best: Positive | None = None  # how many of the best by best_metric stay as well
    # what is lowest in the best; loss: mean since the last checkpoint; step_loss, validation: of its own step
    best_metric: Literal["loss", "step_loss", "validation"] = "loss"
    asynchronous: bool = True  # write while training goes on, from a copy in host memory
    when_busy: Literal["wait", "skip"] = "wait"  # if one is due while another is still being written
    on_failure: Literal["stop", "warn"] = "stop"  # if one cannot be written; warn: train on, but the last one must be
    # reference: frozen parameters stay in the model folder, and are named; full: they are in every checkpoint, too
    frozen: Literal["reference", "full"] = "reference"
    backup: str | None = None  # a folder or fsspec URL that gets verified copies, in a folder run.name


class ValidationSettings(Section):
    """The loss on held-out samples, which are not trained on; see docs/run_folder.md."""

    # optimizer steps between values, beside those before the first step and after the last; None: no such loss
    every: Positive | None = None
    samples: Positive = 64  # held-out samples taken at most, by a hash of their ids
    sigmas: Positive = 4  # noise levels at which each is looked at, one from each of as many equal parts of (0, 1)
    weights: Literal["model", "ema"] = "model"  # whose loss it is; ema: that of their running average
    seed: NonNegative = 0  # of the choice of samples, noise and noise levels; runs are compared under the same


class SamplingSettings(Section):
    """Sample pictures from the held-out set during training."""

    every: Positive | None = None  # optimizer steps; None: only at the end
    count: NonNegative = 12  # held-out samples pictured; 0: none
    steps: Annotated[int, Field(ge=2)] = 20  # denoising steps of a picture; the scheduler has no noise levels for one
    guidance: Annotated[float, Field(ge=1)] = 4.0  # classifier-free guidance scale; 1: none
    weights: Literal["model", "ema"] = "model"  # with which pictures are drawn; ema: their running average
    negative_prompt: str = " "  # what guidance leads away from


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
    gpu: GpuSettings = GpuSettings()
    engine: EngineSettings = EngineSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    validation: ValidationSettings = ValidationSettings()
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

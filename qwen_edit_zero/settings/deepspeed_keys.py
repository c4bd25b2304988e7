"""The keys of a DeepSpeed JSON (DeepSpeed 0.19.8): their types, and those that cannot work here with the reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from qwen_edit_zero.settings.layers import Path, dotted
from qwen_edit_zero.settings.names import nearest
from qwen_edit_zero.settings.problems import in_words, shown_value


@dataclass(frozen=True)
class Key:
    """What may stand at a key. `recipe` names the setting that decides when the value is "auto"."""

    kind: Literal["bool", "int", "float", "text", "list", "object"]
    minimum: float = 0
    choices: tuple[Any, ...] = ()
    recipe: str = ""
    keys: dict[str, Key | str] | None = None  # of an object; None: not looked into


_BOOL, _INT, _FLOAT, _TEXT, _LIST = Key("bool"), Key("int"), Key("float"), Key("text"), Key("list")
_MONITOR = "the run writes metrics.jsonl and TensorBoard files itself"
_UNPROVEN = "it changes the arithmetic of training, which has to be the same under every engine"
_REMOVED = "DeepSpeed 0.19.8 no longer has it"

_OFFLOAD_PARAM: dict[str, Key | str] = {
    "device": Key("text", choices=("none", "cpu", "nvme")),
    "nvme_path": _TEXT, "buffer_count": _INT, "buffer_size": _INT, "max_in_cpu": _INT, "pin_memory": _BOOL,
}  # fmt: skip
_OFFLOAD_OPTIMIZER: dict[str, Key | str] = {
    "device": Key("text", choices=("none", "cpu", "nvme")),
    "nvme_path": _TEXT, "buffer_count": _INT, "pin_memory": _BOOL,
    "pipeline_read": _BOOL, "pipeline_write": _BOOL, "fast_init": _BOOL,
    "ratio": Key("float"), "super_offload": "it needs a Superchip", "cpuadam_cores_perc": "it goes with super_offload",
}  # fmt: skip

ZERO_KEYS: dict[str, Key | str] = {
    "stage": Key("int", choices=(1, 2, 3)),
    "contiguous_gradients": _BOOL, "reduce_scatter": _BOOL, "reduce_bucket_size": Key("int", minimum=1),
    "use_multi_rank_bucket_allreduce": _BOOL, "allgather_partitions": _BOOL, "allgather_bucket_size": _INT,
    "overlap_comm": _BOOL, "sub_group_size": _INT, "round_robin_gradients": _BOOL, "parameter_alignment": _BOOL,
    "ignore_unused_parameters": Key("bool", choices=(True,)),
    "offload_param": Key("object", keys=_OFFLOAD_PARAM),
    "offload_optimizer": Key("object", keys=_OFFLOAD_OPTIMIZER),
    "stage3_prefetch_bucket_size": _INT, "stage3_param_persistence_threshold": _INT,
    "stage3_model_persistence_threshold": _INT, "stage3_max_live_parameters": _INT, "stage3_max_reuse_distance": _INT,
    "stage3_gather_16bit_weights_on_model_save": _BOOL, "stage3_module_granularity_threshold": _INT,
    "stage3_use_all_reduce_for_fetch_params": _BOOL, "stage3_allgather_sequential": _BOOL,
    "zero_hpz_partition_size": _INT, "memory_efficient_linear": _BOOL, "override_module_apply": _BOOL,
    "log_trace_cache_warnings": _BOOL, "enable_sanity_checks": _BOOL, "load_from_fp32_weights": _BOOL,
    "leaf_module": Key("object"),
    "compute_grad_norm": Key("bool", choices=(True,)),
    "zero_quantized_weights": _UNPROVEN, "zero_quantized_nontrainable_weights": _UNPROVEN,
    "zero_quantized_gradients": _UNPROVEN, "zenflow": _UNPROVEN,
    "legacy_stage1": "its state cannot be read for checkpoints", "elastic_checkpoint": "checkpoints are our own",
    "pipeline_loading_checkpoint": "checkpoints are our own",
    "save_muon_momentum_buffer_in_memory": "the optimizer is AdamW",
    "cpu_offload": "it is deprecated; write offload_optimizer",
    "cpu_offload_param": "it is deprecated; write offload_param",
    "cpu_offload_use_pin_memory": "it is deprecated; write pin_memory in offload_optimizer or offload_param",
    "stage3_gather_fp16_weights_on_model_save": "it is deprecated; remove it, consolidation needs no such option",
    "mics_shard_size": _REMOVED, "mics_hierarchical_params_gather": _REMOVED, "zeropp_loco_param": _REMOVED,
}  # fmt: skip

BF16_KEYS: dict[str, Key | str] = {
    "enabled": Key("bool", recipe="precision.mode"),
    "immediate_grad_update": _BOOL,
    "check_grad_overflow": Key("bool", choices=(True,)),
    "bf16_master_weights_and_grads": "weights and moments are kept in fp32",
    "bf16_optimizer_states": "weights and moments are kept in fp32",
}
FP16_KEYS: dict[str, Key | str] = {
    "enabled": Key("bool", recipe="precision.mode"),
    "loss_scale": Key("float", choices=(0,)),
    "initial_scale_power": Key("int", recipe="precision.initial_loss_scale"),
    "loss_scale_window": Key("int", minimum=1, recipe="precision.loss_scale_window"),
    "min_loss_scale": Key("float", minimum=1, recipe="precision.min_loss_scale"),
    "hysteresis": Key("int", minimum=1),
    "consecutive_hysteresis": _BOOL,
    "auto_cast": Key("bool", choices=(False,)),
    "fp16_master_weights_and_grads": "weights and moments are kept in fp32",
}
OPTIMIZER_KEYS: dict[str, Key | str] = {
    "type": Key("text", choices=("AdamW",)),
    "params": Key(
        "object",
        keys={
            "lr": Key("float", recipe="optimizer.lr"),
            "betas": Key("list", recipe="optimizer.betas"),
            "eps": Key("float", recipe="optimizer.eps"),
            "weight_decay": Key("float", recipe="optimizer.weight_decay"),
            "torch_adam": _BOOL,
            "adam_w_mode": Key("bool", choices=(True,)),
        },
    ),
}
TOP_KEYS: dict[str, Key | str] = {
    "train_batch_size": Key("int", minimum=1, recipe="batch.global_size"),
    "train_micro_batch_size_per_gpu": Key("int", minimum=1, recipe="batch.micro_size"),
    "gradient_accumulation_steps": Key("int", minimum=1, recipe="batch.global_size"),
    "gradient_clipping": Key("float", recipe="optimizer.clip_norm"),
    "zero_optimization": Key("object", keys=ZERO_KEYS),
    "bf16": Key("object", keys=BF16_KEYS),
    "fp16": Key("object", keys=FP16_KEYS),
    "optimizer": Key("object", keys=OPTIMIZER_KEYS),
    "zero_allow_untested_optimizer": Key("bool", choices=(True,)),
    "zero_force_ds_cpu_optimizer": _BOOL,
    "communication_data_type": Key("text", choices=("fp32",)),  # the same reduction under every engine
    "data_types": Key("object", keys={"grad_accum_dtype": Key("text", choices=("fp32",))}),
    "steps_per_print": _INT,
    "wall_clock_breakdown": _BOOL,
    "memory_breakdown": _BOOL,
    "dump_state": _BOOL,
    "disable_allgather": _BOOL,
    "disable_python_gc": _BOOL,
    "log_level": _TEXT,
    "aio": Key("object"),
    "comms_logger": Key("object"),
    "flops_profiler": Key("object"),
    "timers": Key("object"),
    "scheduler": "the `schedule` section of the recipe sets the learning rate of every step; remove this section",
    "activation_checkpointing": "model.activation_checkpointing of the recipe decides; remove this section",
    "checkpoint": "checkpoints are our own, see the `checkpoint` section of the recipe; remove this section",
    "managed_gradient_accumulation": "the training loop decides about accumulation; remove this key",
    "prescale_gradients": "gradients are summed and divided once, by the samples of the step; remove this key",
    "gradient_predivide_factor": "gradients are summed and divided once, by the samples of the step; remove this key",
    "gradient_allreduce_op": "gradients are summed and divided once, by the samples of the step; remove this key",
    "sparse_gradients": "the model has no sparse gradients; remove this key",
    "amp": "precision.mode decides; remove this section",
    "torch_autocast": "precision.mode decides; remove this section",
    "compile": "model.compile of the recipe decides; remove this section",
    "tensorboard": f"{_MONITOR}; remove this section",
    "wandb": f"{_MONITOR}; remove this section",
    "csv_monitor": f"{_MONITOR}; remove this section",
    "comet": f"{_MONITOR}; remove this section",
    "data_efficiency": "the order of samples is the run's own; remove this section",
    "dataloader_drop_last": "the order of samples is the run's own; remove this key",
    "seq_parallel_communication_data_type": "remove this key; tokens travel in the compute precision",
    "sequence_parallel_size": "set engine.sequence_parallel instead, and remove this key",
    "tensor_parallel": "there is no tensor parallelism here; remove this section",
    "pipeline": "there is no pipeline parallelism here; remove this section",
    "expert_parallel": "the model has no experts; remove this section",
    "use_data_before_expert_parallelism": "the model has no experts; remove this key",
    "hybrid_engine": "it is for reinforcement learning; remove this section",
    "compression_training": f"{_UNPROVEN}; remove this section",
    "weight_quantization": f"{_UNPROVEN}; remove this section",
    "autotuning": "a run does not tune itself; remove this section",
    "datastates_ckpt": "checkpoints are our own; remove this section",
    "bfloat16": "it is the old name; write bf16",
    "eigenvalue": _REMOVED,
    "sparse_attention": _REMOVED,
    "elasticity": _REMOVED,
    "graph_harvesting": _REMOVED,
    "curriculum_learning": _REMOVED,
    "progressive_layer_drop": _REMOVED,
}


def check_keys(values: dict[str, Any], keys: dict[str, Key | str], path: Path = ()) -> dict[Path, str]:
    """Return what is wrong with the keys and types of `values`, by path. Values "auto" pass where a type is known."""
    problems: dict[Path, str] = {}
    for name, value in values.items():
        at = (*path, name)
        key = keys.get(name)
        if key is None:
            known = [known for known, spec in keys.items() if isinstance(spec, Key)]
            near = nearest(name, known)
            problems[at] = f"{dotted(at)} is not a DeepSpeed key" + (f"; did you mean {near}?" if near else "")
        elif isinstance(key, str):
            problems[at] = f"{dotted(at)} cannot be used here: {key}"
        elif wrong := _wrong(key, value):
            problems[at] = f"{dotted(at)} is {shown_value(value)}; it must be {wrong}"
        elif key.keys is not None and isinstance(value, dict):
            problems |= check_keys(value, key.keys, at)
    return problems


def _wrong(key: Key, value: Any) -> str | None:
    """What a value of this key must be, if `value` is not that."""
    if value == "auto" and (key.recipe or not key.choices):
        return None
    text = ", and it is a text (leave out the quotes)" if isinstance(value, str) else ""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    fits = {
        "bool": isinstance(value, bool),
        "int": number and float(value).is_integer(),
        "float": number,
        "text": isinstance(value, str),
        "list": isinstance(value, list),
        "object": isinstance(value, dict),
    }[key.kind]
    if not fits:
        words = {"bool": "true or false", "int": "a whole number", "float": "a number", "text": "a text"}
        return words.get(key.kind, "a list" if key.kind == "list" else "an object {...}") + text
    if key.choices and value not in key.choices:
        return in_words([shown_value(choice) for choice in key.choices])
    if key.kind in ("int", "float") and value < key.minimum:
        return f"at least {key.minimum:g}"
    return None


def normalised(values: dict[str, Any], keys: dict[str, Key | str]) -> dict[str, Any]:
    """`values`, checked before, without "auto" (DeepSpeed's own default then) and with whole numbers as integers."""
    result: dict[str, Any] = {}
    for name, value in values.items():
        key = keys[name]
        assert isinstance(key, Key)
        if value == "auto":
            continue
        if key.kind == "int":
            result[name] = int(value)
        elif key.keys is not None:
            result[name] = normalised(value, key.keys)
        else:
            result[name] = value
    return result

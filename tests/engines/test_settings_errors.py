"""Settings that an engine cannot work with are refused in words, and what DeepSpeed gets is complete."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from qwen_edit_zero.engines.factory import make_engine
from qwen_edit_zero.engines.zero.config import complete_config
from qwen_edit_zero.engines.zero.library import refuse_stale_lock
from qwen_edit_zero.errors import CheckpointError, SettingsError
from qwen_edit_zero.settings.models import Settings
from tests.engines import harness, problem
from tests.engines.harness import MemorySource
from tests.ranks import run_ranks


def settings_of(**sections: Any) -> Settings:
    return Settings.model_validate({"run": {"max_steps": 1}} | sections)


def zero(**options: Any) -> dict[str, Any]:
    return {"backend": "deepspeed", "deepspeed": {"zero_optimization": options}}


REFUSED = {
    "sizes": ({"engine": {"backend": "fsdp2", "shard_size": 2}}, r"shard_size is 2.*3 ranks.*Sizes that do: 1, 3\."),
    "no json": ({"engine": {"backend": "deepspeed"}}, "give --ds FILE"),
    "stage": ({"engine": zero(stage=0)}, "stage is 0"),
    "selective": (
        {"engine": zero(stage=3), "model": {"activation_checkpointing": "selective"}},
        "selective under ZeRO-3",
    ),
    "compile": ({"engine": zero(stage=3), "model": {"compile": True}}, "ZeRO-3"),
    "fp16": ({"engine": zero(stage=1), "precision": "fp16"}, "fp16, which DeepSpeed does not offer"),
}


def refusals(rank: int, world: int) -> dict[str, str]:
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: False  # type: ignore[method-assign]
    messages = {}
    for name, (sections, _) in REFUSED.items():
        with pytest.raises(SettingsError) as error:
            make_engine(settings_of(**sections), device=torch.device("cpu"))
        messages[name] = str(error.value)
    return messages


def test_settings_that_cannot_work_are_refused() -> None:
    for messages in run_ranks(refusals, 3):
        for name, (_, pattern) in REFUSED.items():
            assert re.search(pattern, messages[name]), messages[name]


def test_the_lock_of_a_killed_compilation_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    refuse_stale_lock("cpu_adam")
    (lock,) = (folder / "lock" for folder in tmp_path.rglob("cpu_adam"))
    lock.touch()
    refuse_stale_lock("cpu_adam")  # somebody may be compiling
    os.utime(lock, (0, 0))
    with pytest.raises(SettingsError, match=r"cpu_adam/lock is .* minutes old.*Delete that file"):
        refuse_stale_lock("cpu_adam")


@pytest.mark.parametrize(
    ("offload", "pattern"), [({"device": "nvme"}, "NVMe"), ({"device": "cpu", "ratio": 0.5}, "ratio is 0.5")]
)
def test_state_that_cannot_be_checkpointed_is_refused(offload: dict[str, Any], pattern: str) -> None:
    settings = settings_of(engine=zero(stage=3, offload_optimizer=offload))
    with pytest.raises(SettingsError, match=pattern):
        complete_config(settings, settings.optimizer, 2)


@pytest.mark.parametrize(("clip", "written"), [(None, 0.0), (0.5, 0.5)])
def test_deepspeed_is_told_everything_that_changes_results(clip: float | None, written: float) -> None:
    """A missing `gradient_clipping` means 1.0, a missing reduction means a mean, in bf16, all-reduced."""
    settings = settings_of(engine=zero(stage=2), optimizer={"clip_norm": clip}, precision="bf16")
    config = complete_config(settings, settings.optimizer, 6)
    assert config["gradient_clipping"] == written
    assert config["gradient_allreduce_op"] == "sum"
    assert config["communication_data_type"] == config["data_types"]["grad_accum_dtype"] == "fp32"
    assert config["zero_optimization"]["use_multi_rank_bucket_allreduce"] is False
    assert config["bf16"] == {"enabled": True, "check_grad_overflow": True}
    assert not config["fp16"]["enabled"]
    batch = (config[k] for k in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"))
    assert tuple(batch) == (6, 1, 1)
    assert settings.engine.deepspeed == {"zero_optimization": {"stage": 2}}, "the settings themselves stay as they are"


def unfitting_states(rank: int, world: int) -> list[str]:
    engine = harness.build("fsdp2", None)
    state = harness.whole_state(engine)
    assert state.tensors.keys() == {"param", "exp_avg", "exp_avg_sq"}

    def without(kind: str, name: str) -> MemorySource:
        return MemorySource(
            {k: {n: t for n, t in tensors.items() if (k, n) != (kind, name)} for k, tensors in state.tensors.items()}
        )

    surplus = MemorySource({k: tensors | {"stranger": torch.ones(2)} for k, tensors in state.tensors.items()})
    reshaped = without("", "")
    reshaped.tensors["exp_avg"]["gain"] = torch.ones(3)
    wanting = [(without("exp_avg_sq", "before.bias"), {"optimizer_steps": 1}), (surplus, {"optimizer_steps": 1}),
               (reshaped, {"optimizer_steps": 1}), (state, {})]  # fmt: skip
    messages = []
    for source, scalars in wanting:
        with pytest.raises(CheckpointError) as error:
            engine.load_state(source, scalars)
        messages.append(str(error.value))
    problem.train_with(engine, micro=6, steps=range(1))  # nothing was half loaded
    return messages


def test_states_that_do_not_fit_are_refused_with_the_tensor_named() -> None:
    missing, surplus, reshaped, uncounted = run_ranks(unfitting_states, 1)[0]
    assert "no exp_avg_sq of 'before.bias'" in missing
    assert "param of 'stranger'" in surplus
    assert "exp_avg of 'gain' has shape (3,)" in reshaped
    assert "optimizer_steps" in uncounted

"""A run that averages its weights and keeps frozen ones in its checkpoints, through its whole life."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import QwenImageTransformer2DModel

from qwen_edit_zero.checkpoints.reader import CheckpointReader
from qwen_edit_zero.cli import main
from qwen_edit_zero.edit_model.folder import open_model_folder
from tests.end_to_end.commands import ENGINE, losses, run

LORA = ["model.lora={rank: 4, targets: [attn.to_q, img_mlp.net.2]}", "optimizer.ema=0.5", "checkpoint.frozen=full"]


def transformer(folder: Path) -> dict[str, torch.Tensor]:
    model = QwenImageTransformer2DModel.from_pretrained(folder / "transformer", torch_dtype=torch.float32)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def adapter(reader: CheckpointReader, kind: str, name: str) -> torch.Tensor:
    shape = reader.shape(name, kind)
    return reader.read(name, 0, torch.Size(shape).numel(), kind).view(shape)


@pytest.mark.slow
def test_adapters_are_averaged_and_the_models_weights_are_never_needed_again(recipe: str, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(open_model_folder("tiny").path, base)
    common = [recipe, f"run.dir={tmp_path}", f"model.path={base}", *LORA]
    ended = run("python", *common, *ENGINE["ddp"], "run.name=whole", cwd=tmp_path)
    assert ended.status == 0, ended.text
    ended = run("python", *common, *ENGINE["ddp"], "run.name=moved", "run.max_steps=2", cwd=tmp_path)
    assert ended.status == 0, ended.text
    starting = transformer(base)
    for file in (base / "transformer").glob("*.safetensors*"):
        file.unlink()

    ended = run("python", *common, *ENGINE["ddp"], "run.name=new", cwd=tmp_path)
    assert ended.status == 2
    assert "is incomplete; not there: transformer/diffusion_pytorch_model*.safetensors" in ended.error
    ended = run("python", *common, *ENGINE["ddp"], "run.name=moved", "checkpoint.frozen=reference", cwd=tmp_path)
    assert ended.status == 2
    assert "there are no weights of the transformer" in ended.error
    ended = run(
        "torchrun", *common, *ENGINE["zero3"], "run.name=moved", "sampling.weights=ema", "sampling.guidance=1.0",
        cwd=tmp_path,
    )  # fmt: skip
    assert ended.status == 0, ended.text
    assert "averaged weights" not in ended.output  # the average goes on without a word
    expected = losses(tmp_path / "whole")
    assert losses(tmp_path / "moved") == pytest.approx(expected, rel=1e-4)

    outs = {}
    for name in ("whole", "moved"):
        checkpoint = tmp_path / name / "checkpoints" / "step-00000004"
        arguments = ["--dtype", "fp32", "--weights", "ema", "--components", "none"]
        assert main(["consolidate", str(checkpoint), str(tmp_path / f"{name}-out"), *arguments]) == 0
        outs[name] = transformer(tmp_path / f"{name}-out")
    with CheckpointReader(checkpoint) as reader:
        assert reader.run_state["engine"] == {"optimizer_steps": 4, "ema_updates": 4}
        assert reader.run_state["optimizer_groups"] == [{"weight_decay": 0.01, "lr_factor": 1.0, "parameters": None}]
        module = "transformer_blocks.0.attn.to_q"
        a, b = (adapter(reader, "ema", f"{module}.lora_{x}.default.weight") for x in "AB")
        assert not a.equal(adapter(reader, "param", f"{module}.lora_A.default.weight"))
    right = starting[f"{module}.weight"] + b @ a
    torch.testing.assert_close(outs["moved"][f"{module}.weight"], right, rtol=1e-6, atol=1e-6)
    for name, weight in outs["whole"].items():
        torch.testing.assert_close(outs["moved"][name], weight, rtol=1e-4, atol=1e-6)
        if ".attn.to_q." not in name and "img_mlp.net.2" not in name:
            assert weight.equal(starting[name])
    assert json.loads((tmp_path / "moved-out" / "consolidated.json").read_text())["weights"] == "ema"
    exported = tmp_path / "adapter"
    assert main(["consolidate", str(checkpoint), str(exported), "--lora", "export", "--weights", "ema"]) == 0
    assert (exported / "pytorch_lora_weights.safetensors").exists()

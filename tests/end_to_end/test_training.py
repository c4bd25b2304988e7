"""The commands of the README: they train, agree, resume anywhere, and end in a model that diffusers loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image, ImageChops

from qwen_edit_zero.planning.engines.kinds import Kind
from qwen_edit_zero.planning.evidence.compare import compare_run
from tests.end_to_end.commands import BIN, ENGINE, ROOT, Ended, losses, metrics, run

STARTS = {  # one of each launcher and each engine
    "single": ("console", "ddp"),
    "deepspeed": ("deepspeed", "zero2"),
    "torchrun": ("torchrun", "fsdp2"),
    "zero3": ("deepspeed", "zero3"),
}


@pytest.fixture(scope="module")
def runs(recipe: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder of four steps for each of STARTS, begun in a working directory that is not the repository."""
    folder = tmp_path_factory.mktemp("runs")
    for name, (launcher, engine) in STARTS.items():
        ended = run(launcher, *ENGINE[engine], recipe, f"run.dir={folder}", f"run.name={name}", cwd=folder)
        assert ended.status == 0, ended.text
        assert "Traceback" not in ended.text
    return folder


@pytest.mark.parametrize("name", [n for n in STARTS if n != "single"])
def test_every_launcher_and_engine_gives_the_losses_of_a_single_process(runs: Path, name: str) -> None:
    assert losses(runs / name) == pytest.approx(losses(runs / "single"), rel=1e-5)
    norms = [[m["grad_norm"] for m in metrics(runs / n)] for n in (name, "single")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_ranks_that_split_sequences_give_the_losses_and_pictures_of_a_single_process(runs: Path, recipe: str) -> None:
    arguments = [recipe, f"run.dir={runs}", "run.name=split", "engine.sequence_parallel=2"]
    ended = run("torchrun", *ENGINE["fsdp2"], *arguments, cwd=runs)
    assert ended.status == 0, ended.text
    split, single = metrics(runs / "split"), metrics(runs / "single")
    for name in ("loss", "grad_norm", "samples_seen"):
        assert [m[name] for m in split] == pytest.approx([m[name] for m in single], rel=1e-5)
    drawn = sorted((runs / "single" / "samples" / "step-00000004").glob("*.png"))
    assert drawn
    for file in drawn:
        pair = [Image.open(f).convert("RGB") for f in (file, runs / "split" / file.relative_to(runs / "single"))]
        assert max(high for _, high in ImageChops.difference(*pair).getextrema()) <= 2
    ended = run("torchrun", *ENGINE["fsdp2"], recipe, f"run.dir={runs}", "engine.sequence_parallel=4", cwd=runs)
    assert ended.status != 0
    assert "engine.sequence_parallel 4 (override) does not divide 2 ranks; sizes that do: 1, 2" in ended.error


def test_metrics_hold_what_is_promised(runs: Path) -> None:
    promised = {
        "step", "epoch", "samples_seen", "loss", "grad_norm", "lr", "step_seconds", "samples_per_second",
        "data_seconds", "tflops_per_device", "memory_peak_bytes",
    }  # fmt: skip
    lines = metrics(runs / "deepspeed")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(promised <= line.keys() and line["memory_peak_bytes"] > 1e8 for line in lines)
    settings = (runs / "deepspeed" / "settings.yaml").read_text(encoding="utf-8")
    assert "torch:" in settings
    assert "override" in settings


@pytest.mark.parametrize("name", STARTS)
def test_what_ranks_hold_is_what_the_planner_said(runs: Path, name: str) -> None:
    found = compare_run(runs / name)
    assert found.job.kind == STARTS[name][1]
    assert {row.what for row in found.state} >= {Kind.MASTERS, Kind.MOMENTS}
    for row in (*found.state, found.total):
        assert abs(row.error) < 0.01, row
    assert found.measured.times is not None
    assert found.measured.times.count == 2
    said = (runs / name / "logs" / "rank-00000.log").read_text(encoding="utf-8")
    assert "plan: memory a rank: " in said
    assert "measured: state " in said


def test_a_run_goes_on_under_another_engine_and_number_of_ranks_as_if_it_had_not_stopped(
    runs: Path, recipe: str
) -> None:
    folder = runs / "moved"
    arguments = [recipe, f"run.dir={runs}", "run.name=moved"]
    first = run("torchrun", *ENGINE["fsdp2"], *arguments, "run.max_steps=2", cwd=runs)
    assert first.status == 0, first.text
    second = run("python", *ENGINE["zero1"], *arguments, "run.max_steps=3", cwd=runs)
    assert second.status == 0, second.text
    third = run("deepspeed", *ENGINE["zero3"], *arguments, cwd=runs)
    assert third.status == 0, third.text
    assert "going on from" in third.output
    assert [m["step"] for m in metrics(folder)] == [1, 2, 3, 4]
    assert [m["samples_seen"] for m in metrics(folder)] == [m["samples_seen"] for m in metrics(runs / "single")]
    assert losses(folder) == pytest.approx(losses(runs / "single"), rel=1e-5)


def test_a_damaged_checkpoint_is_never_gone_on_from_whatever_the_number_of_ranks(runs: Path, recipe: str) -> None:
    import shutil

    folder = Path(shutil.copytree(runs / "single", runs / "damaged"))
    file = folder / "checkpoints" / "step-00000004" / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    ended = run("torchrun", recipe, *ENGINE["fsdp2"], f"run.dir={runs}", "run.name=damaged", cwd=runs)
    assert ended.status == 0, ended.text
    assert "passing over checkpoint step-00000004" in ended.output
    assert "(step 2, written by ddp)" in ended.output
    assert losses(folder) == pytest.approx(losses(runs / "single"), rel=1e-5)

    for broken in (folder / "checkpoints").glob("step-*/rank-00000.safetensors"):
        broken.write_bytes(broken.read_bytes()[:-1])
    ended = run("python", recipe, *ENGINE["ddp"], f"run.dir={runs}", "run.name=damaged", cwd=runs)
    assert ended.status == 2
    assert "can be used; starting from the base" in ended.error
    assert len(metrics(folder)) == 4


def test_a_finished_run_says_so_and_trains_no_further(runs: Path, recipe: str) -> None:
    again = run("python", *ENGINE["ddp"], recipe, f"run.dir={runs}", "run.name=single", cwd=runs)
    assert again.status == 0
    assert "is complete" in again.output
    assert len(metrics(runs / "single")) == 4
    place = runs / "copies"
    arguments = [recipe, f"run.dir={runs}", "run.name=single", f"checkpoint.backup={place}"]
    again = run("torchrun", *ENGINE["ddp"], *arguments, cwd=runs)
    assert again.status == 0, again.text
    names = [[p.name for p in sorted(f.iterdir())] for f in (place / "single", runs / "single" / "checkpoints")]
    assert names[0] == names[1], "copies that were missing are made"


def test_a_checkpoint_of_other_data_is_refused_with_what_differs(runs: Path, recipe: str) -> None:
    ended = run("python", *ENGINE["ddp"], recipe, f"run.dir={runs}", "run.name=single", "run.seed=5", cwd=runs)
    assert ended.status == 2
    assert "run.seed: 0 there, 5 here" in ended.error


def test_starting_over_keeps_what_the_earlier_run_left(runs: Path, recipe: str) -> None:
    arguments = ["--fast-dev-run", *ENGINE["ddp"], recipe, f"run.dir={runs}", "run.name=over"]
    assert run("python", *arguments, cwd=runs).status == 0
    ended = run("python", *arguments, "--resume", "none", cwd=runs)
    assert ended.status == 0, ended.text
    (aside,) = runs.glob("over-fast-dev-run-before-*")
    assert len(metrics(aside)) == len(metrics(runs / "over-fast-dev-run")) == 2


def test_the_consolidated_model_loads_in_diffusers_and_samples_as_the_run_did(runs: Path) -> None:
    import numpy as np
    import torch
    from diffusers import QwenImageEditPlusPipeline, QwenImageTransformer2DModel
    from PIL import Image

    from qwen_edit_zero.cli import main
    from qwen_edit_zero.edit_model.components import load_processor
    from qwen_edit_zero.edit_model.flow import sample_generator
    from qwen_edit_zero.edit_model.folder import open_model_folder

    out = runs / "model"
    assert main(["consolidate", str(runs / "zero3"), str(out), "--dtype", "fp32"]) == 0
    transformer = QwenImageTransformer2DModel.from_pretrained(out / "transformer")
    assert sum(p.numel() for p in transformer.parameters()) > 5e6
    pipeline = QwenImageEditPlusPipeline.from_pretrained(
        out, torch_dtype=torch.float32, processor=load_processor(open_model_folder(out))
    )
    pipeline.set_progress_bar_config(disable=True)

    told = json.loads((runs / "zero3" / "samples" / "step-00000004" / "000.json").read_text(encoding="utf-8"))
    folder = runs / "zero3" / "samples" / "step-00000004"
    drawn = Image.open(folder / told["output"]).convert("RGB")
    with pytest.MonkeyPatch.context() as patch:
        module = "diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus"
        patch.setattr(f"{module}.CONDITION_IMAGE_SIZE", 56 * 56)
        patch.setattr(f"{module}.VAE_IMAGE_SIZE", 128 * 128)
        picture = pipeline(
            image=[Image.open(folder / name).convert("RGB") for name in told["references"]],
            prompt=told["instruction"],
            width=drawn.width,
            height=drawn.height,
            num_inference_steps=2,
            true_cfg_scale=1.0,
            generator=sample_generator(0, told["id"], 0, "sampling"),
        ).images[0]
    difference = np.abs(np.asarray(picture, int) - np.asarray(drawn, int))
    assert difference.mean() < 1.0, "the pipeline draws another picture than the run did"


def test_the_report_draws_the_pictures(runs: Path) -> None:
    from qwen_edit_zero.cli import main

    assert main(["report", str(runs / "torchrun")]) == 0
    for name in ("contact_sheet.png", "loss.png"):
        assert (runs / "torchrun" / name).read_bytes().startswith(b"\x89PNG")


def test_the_hostfile_command_names_the_nodes_that_cannot_be_reached() -> None:
    import subprocess

    done = subprocess.run(
        [
            BIN / "deepspeed",
            "--hostfile",
            "hostfiles/8node",
            "qwen_edit_zero/train.py",
            "--ds",
            "ds_configs/zero2.json",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    ended = Ended(done.returncode, done.stdout, done.stderr, 0.0)
    assert ended.status != 0
    assert "node1" in ended.text
    assert "Traceback" not in ended.text


def test_an_adapter_is_exported_as_a_file_that_the_pipeline_loads(runs: Path, recipe: str) -> None:
    from diffusers import QwenImageTransformer2DModel
    from safetensors.torch import load_file

    from qwen_edit_zero.cli import main

    arguments = [recipe, f"run.dir={runs}", "run.name=adapter", "model.lora={rank: 2, alpha: 4}", "run.max_steps=2"]
    ended = run("torchrun", *ENGINE["fsdp2"], *arguments, cwd=runs)
    assert ended.status == 0, ended.text
    assert main(["consolidate", str(runs / "adapter"), str(runs / "adapter-out"), "--adapter"]) == 0
    file = runs / "adapter-out" / "pytorch_lora_weights.safetensors"
    assert any(float(t.abs().max()) > 0 for name, t in load_file(file).items() if "lora_B" in name)
    transformer = QwenImageTransformer2DModel.from_pretrained(runs / "model" / "transformer")
    transformer.load_lora_adapter(load_file(file), prefix="transformer")
    assert transformer.peft_config["default_0"].r == 2

"""`qwen-edit-zero plan`: answers without torch, the same numbers as text and as JSON, and says what cannot be."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qwen_edit_zero.commands.plan import plan
from qwen_edit_zero.errors import UserError
from qwen_edit_zero.planning.hardware import here
from qwen_edit_zero.planning.jobs.dataset import data_facts
from qwen_edit_zero.settings.models import DataSettings

ROOT = Path(__file__).parents[2]
FULL = "recipes/full_finetune.yaml"
GPUS = ("--gpus", "8xA100-80")


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert plan(list(arguments)) == 0
    return capsys.readouterr().out


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(said(capsys, *arguments, "--json"))
    return found


@pytest.mark.parametrize("more", [[], ["--recommend"], ["--sweep", "gpus=8,16"]], ids=str)
def test_no_torch_and_no_numpy_are_imported(more: list[str]) -> None:
    script = (
        "import sys; from qwen_edit_zero.cli import main\n"
        f"status = main(['plan', {FULL!r}, *{GPUS!r}, *{more!r}])\n"
        "print(status, sorted({'torch', 'deepspeed', 'diffusers', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"


def test_the_first_line_is_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, FULL, *GPUS)
    first = said(capsys, FULL, *GPUS).splitlines()[0]
    gib = found["peak"]["bytes"] / 2**30
    assert first.startswith(f"fits: {gib:.1f} of 79.1 GiB at its peak ({found['peak']['phase']})")
    assert "samples/s" in first
    assert "GPU-hours" in first


def test_what_does_not_fit_ends_with_2_and_tight_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert plan([FULL, "--gpus", "8x4090"]) == 2
    assert capsys.readouterr().out.startswith("does not fit: ")
    found = as_json(capsys, FULL, *GPUS)
    assert (found["fits"], found["verdict"]) == (True, "fits")
    tight = found["peak"]["bytes"] / 0.97 / 2**30
    table = {
        "Tight": {"memory": f"{tight:.2f}GiB", "bf16": "312TFLOP/s", "memory_bandwidth": "2TB/s", "link": "300GB/s"}
    }
    file = tmp_path / "gpus.yaml"
    file.write_text(json.dumps(table), encoding="utf-8")
    text = said(capsys, FULL, "--gpus", "8xTight,host=2TB", "--accelerators", str(file))
    assert text.startswith("fits, but tight: ")
    assert "should stay free" in text.splitlines()[0]


def test_the_host_memory_that_is_shown_and_needed(capsys: pytest.CaptureFixture[str]) -> None:
    offloading = (FULL, "--engine", "fsdp2", "engine.cpu_offload=true", "checkpoint.every=100")
    found = as_json(capsys, *offloading, *GPUS)
    needed, shown = found["host_needed"]["bytes_a_node"], found["host_peak"]["bytes_a_node"]
    assert needed < shown, "the copy for a checkpoint can wait"
    between = (needed + shown) // 2 // 2**30
    text = said(capsys, *offloading, "--gpus", f"8xA100-80,host={between}GiB")
    assert "no room for the copy for a checkpoint, so training waits" in text
    less = needed // 2**30 - 1
    assert plan([*offloading, "--gpus", f"8xA100-80,host={less}GiB"]) == 2
    assert f"host={less + 2}GiB" in capsys.readouterr().out.splitlines()[0]


def test_the_peak_is_the_largest_sum_of_a_column(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, FULL, *GPUS)
    sums = {phase: sum(kinds.values()) for phase, kinds in found["memory"].items()}
    assert found["peak"] == {"phase": max(sums, key=lambda p: sums[p]), "bytes": max(sums.values())}
    assert found["timing"]["step_s"][0] < found["timing"]["step_s"][1]
    assert found["cost"]["checkpoint"] == 12 * found["parameters"]["trained"] == 12 * 20_430_401_088


def test_overrides_and_options_are_those_of_training(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(
        capsys, FULL, "--gpus", "2x8xH100-SXM", "--ds", "ds_configs/zero3.json", "batch.micro_size=2",
        "--references", "2", "--text-tokens", "500", "--aspect", "16:9", "--samples", "6400", "--price", "2",
        "run.max_steps=null", "run.epochs=3",
    )  # fmt: skip
    assert (found["engine"], found["ranks"], found["batch"]["accumulation"]) == ("zero3", 16, 2)
    assert found["sample"]["text_tokens"] == 500
    assert found["sample"]["target"] == found["sample"]["references"][1] == [48, 86], "1376 x 768 pixels"
    assert found["cost"]["steps"] == 300
    assert found["cost"]["price"] == pytest.approx([2 * hours for hours in found["cost"]["gpu_hours"]])


def test_without_gpus_memory_is_said_and_why_not_more(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(here.shutil, "which", lambda name: None)
    text = said(capsys, FULL)
    assert text.startswith("for one rank, memory only: there is no nvidia-smi on this machine")
    assert "samples/s" not in text
    found = as_json(capsys, FULL)
    assert (found["ranks"], found["timing"], found["fits"]) == (1, None, None)
    assert found["peak"]["bytes"] > 16 * 20_430_401_088


def test_gpus_of_this_machine_are_taken(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nfor i in 1 2 3 4; do echo 'NVIDIA A100-SXM4-80GB, 81920'; done\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setattr(here.shutil, "which", lambda name: str(program))
    found = as_json(capsys, "recipes/lora.yaml", "--references", "1")
    assert (found["ranks"], found["gpu"]) == (4, {"name": "A100-80", "memory": 81920 << 20})
    program.write_text("#!/bin/sh\necho 'Abacus 9000, 4096'\n", encoding="utf-8")
    assert "Abacus 9000, which this machine has, is not in the table" in said(capsys, FULL)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([FULL, "--gpus", "8xAbacus"], "is not in the table of accelerators"),
        ([FULL, "--gpus", "8xH999"], "is not in the table of accelerators"),
        ([FULL, "--gpus", "7xA100-80"], "does not divide over 7 ranks"),
        ([FULL, *GPUS, "engine.sequence_parallel=5"], "sizes that do: 1, 2, 4, 8"),
        ([FULL, *GPUS, "engine.shard_size=3"], "engine.shard_size 3"),
        ([FULL, *GPUS, "model.path=nowhere"], "no model whose configuration is known"),
        ([FULL, *GPUS, "optimizer.lrr=1"], "optimizer.lr"),
        ([FULL, "recipes/lora.yaml"], "there is one recipe"),
        ([FULL, *GPUS, "--recomend"], "did you mean --recommend"),
        ([FULL, *GPUS, "--recommend", "--sweep", "gpus=8"], "one of them at a time"),
        ([FULL, *GPUS, "--write", "x"], "--write goes with --recommend"),
        ([FULL, *GPUS, "--recommend", "--force"], "--force goes with --write"),
        ([FULL, *GPUS, "--aspect", "0:1"], "is no aspect"),
        ([FULL, *GPUS, "--price", "-1"], "is no price"),
        ([FULL, *GPUS, "--references", "0"], "is no whole number"),
        ([FULL, *GPUS, "--accelerators", "nowhere.yaml"], "nowhere.yaml"),
        (["--compare", "nowhere"], "nowhere is no folder"),
        (["--compare", "recipes"], "has no measured.json"),
        (["--compare", "recipes", FULL], "takes a run folder alone"),
    ],
)
def test_what_cannot_be_is_said(arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError, match=f"(?s){words}"):
        plan(arguments)


def test_a_damaged_measurement_is_said(tmp_path: Path) -> None:
    for text in ("", "[]", "{}", '{"version": 1, "times": null}', '{"version": 99}'):
        (tmp_path / "measured.json").write_text(text, encoding="utf-8")
        with pytest.raises(UserError, match="train a few steps"):
            plan(["--compare", str(tmp_path)])


def test_the_largest_sample_is_that_of_the_manifest(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    manifest = tmp_path / "train.jsonl"
    rows: list[dict[str, Any]] = [
        {"source": "a.png", "instruction": "make it red", "target": "b.png"},
        {"source": ["a.png", "c.png"], "instruction": "把图1的裙子放到图2的场景里", "target": "b.png"},
        {"source": ["a.png"] * 9, "instruction": "word " * 999, "target": "b.png"},  # more than is allowed
    ]
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows) + "not json\n", encoding="utf-8")
    facts = data_facts(DataSettings(manifest=str(manifest)))
    assert facts is not None
    assert (facts.rows, facts.is_all, facts.references, facts.instruction_tokens) == (2, True, 2, 15)
    found = as_json(capsys, FULL, *GPUS, f"data.manifest={manifest}", "run.epochs=1", "run.max_steps=null")
    assert len(found["sample"]["references"]) == 2
    assert found["cost"]["steps"] == 1
    assert "the most references of a row" in said(capsys, FULL, *GPUS, f"data.manifest={manifest}")
    assumed = as_json(capsys, FULL, *GPUS, f"data.manifest={tmp_path}/gone.jsonl")
    assert len(assumed["sample"]["references"]) == 3, "data.max_references"
    one = as_json(capsys, FULL, *GPUS, "model.path=Qwen-Image-Edit")
    assert len(one["sample"]["references"]) == 1, "the first model takes one"

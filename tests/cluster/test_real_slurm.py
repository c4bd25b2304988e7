"""srun and our batch scripts on a real Slurm."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.lab.nodes import Nodes
from tests.cluster.lab.slurm import Slurm
from tests.cluster.launched import TRAIN, Reference, assert_good
from tests.end_to_end.commands import BIN, ROOT, losses, run

TWO = ["--nodes", "2", "--gpus-per-node", "1"]

# Stands in for Python: tells who it is, and in the first run waits to be told to save
RANK = """#!/bin/bash
echo "task $SLURM_PROCID of $SLURM_NTASKS at $MASTER_ADDR, start ${SLURM_RESTART_COUNT:-0}, [$CARRIED] [${*: -1}]"
[[ $* == *fail* ]] && exit 7
[[ $* == *wait* && ${SLURM_RESTART_COUNT:-0} == 0 ]] || exit 0
trap 'echo "task $SLURM_PROCID saves"; exit 75' USR1 TERM
for second in {1..100}; do sleep 1 & wait $!; done
"""


Submit = Callable[..., tuple[str, Path]]


@pytest.fixture
def submit(slurm: Slurm, tmp_path: Path) -> Submit:
    """Submits slurm/train.sbatch with tasks that do not train; returns the job's id and the file it writes to."""
    rank = tmp_path / "rank"
    rank.write_text(RANK)
    rank.chmod(0o755)

    def submitted(*words: str, options: tuple[str, ...] = ("--gpus-per-node=2",), **variables: str) -> tuple[str, Path]:
        how = ["--nodes=2", f"--output={tmp_path}/%A-%a.out", *options, "slurm/train.sbatch", *words]
        job = slurm.submit(*how, cwd=ROOT, environment={"PYTHON": str(rank), **variables})
        return job, tmp_path / f"{job}-{2**32 - 2}.out"  # so Slurm calls the task of a job that is no array

    return submitted


def wait_for(file: Path, words: str, count: int) -> None:
    """Until a job has written `words` so often."""
    deadline = time.monotonic() + 120
    while not file.exists() or file.read_text().count(words) < count:
        assert time.monotonic() < deadline, file.read_text() if file.exists() else f"{file} is not there"
        time.sleep(0.2)


def test_the_batch_script_starts_a_task_a_gpu_and_passes_words_variables_and_the_status_on(
    slurm: Slurm, submit: Submit
) -> None:
    job, out = submit("fail", "a $b;c", CARRIED="d $e")
    told = slurm.wait(job)
    assert (told["JobState"], told["ExitCode"], told["Restarts"]) == ("FAILED", "7:0", "0")
    wait_for(out, "Exited", 1)
    for task in range(4):
        assert f"task {task} of 4 at node1, start 0, [d $e] [a $b;c]" in out.read_text()


def test_a_job_that_is_told_to_save_comes_back_and_a_cancelled_one_does_not(slurm: Slurm, submit: Submit) -> None:
    job, out = submit("wait")
    wait_for(out, "start 0", 4)
    assert slurm.run("scancel", "--signal=USR1", "--batch", job).status == 0
    wait_for(out, "start 1", 4)
    told = slurm.wait(job)
    assert (told["JobState"], told["ExitCode"], told["Restarts"]) == ("COMPLETED", "0:0", "1")
    assert out.read_text().count("saves") == 4
    job, out = submit("wait")
    wait_for(out, "start 0", 4)
    assert slurm.run("scancel", "--signal=TERM", job).status == 0  # to the ranks alone
    wait_for(out, "start 1", 4)
    assert slurm.wait(job)["JobState"] == "COMPLETED"
    job, out = submit("wait")
    wait_for(out, "start 0", 4)
    assert slurm.run("scancel", job).status == 0
    assert slurm.wait(job)["JobState"] == "CANCELLED"
    wait_for(out, "saves", 4)
    wait_for(out, "the job is cancelled", 1)
    assert "back into the queue" not in out.read_text()
    assert slurm.job(job)["Restarts"] == "0"


def test_an_array_takes_a_line_of_a_sweep_a_task(slurm: Slurm, submit: Submit, tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    sweep.write_text("run.name=hot optimizer.lr=1e-3\n'data.columns={target: a b}'\n")
    job, _ = submit("go", options=("--gpus-per-node=1", "--array=1-3", "--mem=100"), SWEEP=str(sweep))
    states = [slurm.wait(f"{job}_{task}") for task in (1, 2, 3)]
    assert [told["JobState"] for told in states] == ["COMPLETED", "COMPLETED", "FAILED"]
    assert "[optimizer.lr=1e-3]" in (tmp_path / f"{job}-1.out").read_text()
    assert f"[run.name=qwen-edit-{job}-2]" in (tmp_path / f"{job}-2.out").read_text()
    assert "has no line 3" in (tmp_path / f"{job}-3.out").read_text()


def test_a_made_script_is_submitted_as_it_is_shown(slurm: Slurm, reference: Reference, tmp_path: Path) -> None:
    """Only as far as the first check of the script, which a PYTHON that is not there fails."""
    how = ["--nodes", "2", "--gpus-per-node", "1", "--launcher", "sbatch", f"--option=--output={tmp_path}/%j.out"]
    arguments = [*how, "--", "--engine", "ddp", *reference.arguments("made")[1:]]
    done = slurm.run(
        BIN / "qwen-edit-zero", "launch", reference.recipe, *arguments, cwd=ROOT, environment={"PYTHON": "/nowhere"}
    )
    assert done.status == 0, done.text
    job = done.text.split()[-1]  # Submitted batch job N
    told = slurm.wait(job)
    assert (told["JobState"], told["ExitCode"], told["NumNodes"]) == ("FAILED", "2:0", "2")
    assert "there is no Python at /nowhere" in (tmp_path / f"{job}.out").read_text()


@pytest.mark.usefixtures("own_names_are_loopback")
def test_srun_over_two_nodes(nodes: Nodes, slurm: Slurm, reference: Reference) -> None:
    command = ["srun", "--nodes=2", "--ntasks-per-node=1", BIN / "python", TRAIN, "--engine", "ddp"]
    ended = slurm.run(*command, *reference.arguments("srun"), cwd=ROOT)
    assert_good(nodes, ended)
    assert "2 ranks, started by slurm, meet at node1:" in ended.text
    reference.check("srun")
    ended = slurm.run(*command, *reference.arguments("srun"), "run.nonsense=1", cwd=ROOT)
    assert ended.status == 2, ended.text


def test_sbatch_trains_on_two_nodes_and_consolidates(
    nodes: Nodes, slurm: Slurm, reference: Reference, tmp_path: Path
) -> None:
    out = ["--output", tmp_path / "%j.out"]
    job = slurm.submit(*TWO, *out, "slurm/train.sbatch", "--engine", "fsdp2", *reference.arguments("job"), cwd=ROOT)
    told, text = slurm.wait(job), (tmp_path / f"{job}.out").read_text()
    assert (told["JobState"], told["ExitCode"]) == ("COMPLETED", "0:0"), text
    assert f"2 ranks, started by slurm, meet at node1:{15000 + int(job)}" in text
    assert not nodes.left()
    reference.check("job")
    made = tmp_path / "model"
    job = slurm.submit(*out, "slurm/consolidate.sbatch", reference.folder / "job", made, cwd=ROOT)
    told, text = slurm.wait(job), (tmp_path / f"{job}.out").read_text()
    assert (told["JobState"], told["ExitCode"]) == ("COMPLETED", "0:0"), text
    assert json.loads((made / "model_index.json").read_text())["_class_name"] == "QwenImageEditPlusPipeline"


@pytest.mark.slow
def test_a_sweep_trains_each_of_its_runs(slurm: Slurm, reference: Reference, tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    sweep.write_text("run.name=slow optimizer.lr=1e-4\nrun.name=same\n")
    how = ["--nodes=1", "--gpus-per-node=1", "--mem=100", "--array=1-2", f"--output={tmp_path}/%A-%a.out"]
    arguments = [reference.recipe, f"run.dir={reference.folder}", "--engine", "ddp"]
    job = slurm.submit(*how, "slurm/train.sbatch", *arguments, cwd=ROOT, environment={"SWEEP": str(sweep)})
    for task in (1, 2):
        told = slurm.wait(f"{job}_{task}")
        assert told["JobState"] == "COMPLETED", (tmp_path / f"{job}-{task}.out").read_text()
    reference.check("same")
    assert losses(reference.folder / "slow") != losses(reference.folder / "same")


@pytest.mark.slow
def test_a_job_that_is_preempted_twice_ends_with_the_losses_of_one_that_is_not(
    nodes: Nodes, slurm: Slurm, reference: Reference, tmp_path: Path
) -> None:
    steps = "run.max_steps=60"
    single = run("python", "--engine", "ddp", *reference.arguments("single60"), steps, cwd=ROOT)
    assert single.status == 0, single.text
    out = tmp_path / "job.out"
    how = [*TWO, f"--output={out}", "slurm/train.sbatch", "--engine", "fsdp2"]
    job = slurm.submit(*how, *reference.arguments("preempted"), steps, cwd=ROOT)
    for start in (1, 2):
        wait_for(out, "samples in", start)  # training begins
        steps_before = out.read_text().count("0: step ")
        wait_for(out, "0: step ", steps_before + 4)
        assert slurm.run("scancel", "--signal=USR1", "--batch", job).status == 0
        wait_for(out, "back into the queue", start)
    told = slurm.wait(job)
    assert (told["JobState"], told["ExitCode"], told["Restarts"]) == ("COMPLETED", "0:0", "2"), out.read_text()
    assert out.read_text().count("going on from") == 2
    assert not nodes.left()
    assert losses(reference.folder / "preempted") == pytest.approx(losses(reference.folder / "single60"), rel=1e-4)

"""What is lost on real nodes, under real launchers: all ends within a minute, in words, and nothing is spoiled."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from qwen_edit_zero.checkpoints.layout import checkpoint_folders
from qwen_edit_zero.checkpoints.validity import verify_checkpoint
from qwen_edit_zero.edit_model.tiny import materialise_tiny_model
from tests.cluster.lab import missing
from tests.cluster.lab.nodes import Nodes
from tests.cluster.lab.slurm import Slurm
from tests.cluster.launched import TRAIN, ZERO2, Reference
from tests.end_to_end.commands import BIN, ROOT, losses, metrics, run

GONE_SECONDS = 60.0
DEEPSPEED = [BIN / "deepspeed", "--hostfile", "hostfiles/2node", "--num_gpus", "1", TRAIN, *ZERO2]
ENDLESS = ["run.max_steps=1000000", "checkpoint.every=5"]
Started = list[subprocess.Popen[str]]


def by_pdsh(nodes: Nodes, *arguments: str) -> Started:
    """From node3, which no fault touches."""
    return [nodes.start("node3", *DEEPSPEED, *arguments, cwd=ROOT)]


def by_torchrun(nodes: Nodes, *arguments: str, names: tuple[str, str] = ("node1", "node2")) -> Started:
    """An agent on each node."""
    meeting = ["--nproc_per_node", "1", "--master_addr", nodes.address(names[0]), "--master_port", "29520"]
    command = [BIN / "torchrun", "--nnodes", "2", *meeting, "--node_rank"]
    words = [TRAIN, "--engine", "fsdp2", *arguments]
    return [nodes.start(name, *command, str(i), *words, cwd=ROOT) for i, name in enumerate(names)]


def rank_on(nodes: Nodes, name: str) -> int:
    """The process of the rank that runs on a node, as seen from here."""
    launchers = ("launcher.launch", "torchrun", "/deepspeed ", "mpirun", "srun", "bash ")
    lines = nodes.processes(name)
    found = {pid: line.partition("train.py") for pid, line in lines.items()}
    return next(pid for pid, (how, script, _) in found.items() if script and not any(w in how for w in launchers))


def train_until(folder: Path, step: int, started: Started | None = None) -> None:
    """Until a run has recorded a step."""
    deadline = time.monotonic() + 240
    while not (folder / "metrics.jsonl").exists() or f'"step": {step},' not in (folder / "metrics.jsonl").read_text():
        assert time.monotonic() < deadline, f"no step {step} in {folder}"
        for process in started or []:
            assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)


def written(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of every file below a folder."""
    found = {}
    for path in folder.rglob("*"):
        if path.is_file():
            found[str(path.relative_to(folder))] = path.stat().st_size, path.stat().st_mtime_ns
    return found


def all_gone(nodes: Nodes, *names: str, but: str = "-") -> None:
    """Wait until no launcher and no rank runs on these nodes, or none whose command does not begin with `but`."""
    began = time.monotonic()

    def running(name: str) -> list[str]:
        return [line for line in nodes.processes(name).values() if not line.startswith(but)]

    while left := {name: lines for name in names if (lines := running(name))}:
        assert time.monotonic() - began < GONE_SECONDS, left
        time.sleep(0.2)


@contextmanager
def healthy_afterwards(nodes: Nodes, *names: str) -> Iterator[None]:
    """Whatever happens to nodes inside, they are as before."""
    try:
        yield
    finally:
        nodes.sweep()
        for name in names:
            if not nodes.everything(name):
                nodes.revive(name)
            nodes.resume(name)
            nodes.heal(name)
        nodes.sweep()


def kill(nodes: Nodes) -> None:
    os.kill(rank_on(nodes, "node2"), signal.SIGKILL)


def freeze(nodes: Nodes) -> None:
    os.kill(rank_on(nodes, "node2"), signal.SIGSTOP)


def pull_the_cable(nodes: Nodes) -> None:
    nodes.cut("node2")


def crash(nodes: Nodes) -> None:
    nodes.crash("node2")


SILENT = "no sign of life for 20 s|ended without a word|Timed out|timed out"
CAUSES = {kill: "ended without a word", freeze: SILENT, pull_the_cable: SILENT, crash: "ended without a word"}
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("launcher", "fault"),
    [
        pytest.param(by_pdsh, kill),
        pytest.param(by_pdsh, freeze, marks=slow),
        pytest.param(by_pdsh, pull_the_cable, marks=slow),
        pytest.param(by_pdsh, crash, marks=slow),
        pytest.param(by_torchrun, kill, marks=slow),
        pytest.param(by_torchrun, freeze, marks=slow),
        pytest.param(by_torchrun, pull_the_cable, marks=slow),
        pytest.param(by_torchrun, crash, marks=slow),
    ],
)
def test_all_processes_end_within_a_minute_and_say_why(
    nodes: Nodes, reference: Reference, launcher: Callable[..., Started], fault: Callable[[Nodes], None]
) -> None:
    name = f"{launcher.__name__}-{fault.__name__}"
    with healthy_afterwards(nodes, "node2"):
        started = launcher(nodes, *reference.arguments(name), *ENDLESS)
        train_until(reference.folder / name, 7, started)
        fault(nodes)
        all_gone(nodes, "node1", "node2", "node3")
        ended = [nodes.end(process, timeout=10) for process in started]
    assert all(one.status for one in ended)
    text = ended[0].text
    told = re.findall(r"error on rank 1 \(node2\) at step (\d+): (.*)", text)
    assert told, text
    assert re.search(CAUSES[fault], told[-1][1]), told
    assert re.search(rf"{name} failed on rank 1 \(node2\) at step \d+ after [\d:]+, exit status 1", text), text
    folder = reference.folder / name
    steps = [row["step"] for row in metrics(folder)]
    assert steps == list(range(1, len(steps) + 1))
    # Of a rank that left no word its last sign of life is told, which is up to a second old
    assert 1 <= int(told[-1][0]) <= len(steps) + 1
    for checkpoint in checkpoint_folders(folder / "checkpoints"):
        assert not verify_checkpoint(checkpoint)


@slow
def test_a_paused_rank_that_comes_back_writes_nothing(nodes: Nodes, reference: Reference) -> None:
    """Rank 0's node stops as a whole and loses its cable; the run goes on elsewhere and is done when it comes back."""
    arguments, folder = reference.arguments("stale"), reference.folder / "stale"
    with healthy_afterwards(nodes, "node1"):
        first = by_torchrun(nodes, *arguments, *ENDLESS)
        train_until(folder, 7, first)
        nodes.cut("node1")
        nodes.pause("node1")
        all_gone(nodes, "node2")
        assert nodes.processes("node1")
        done = len(metrics(folder))
        again = [*arguments, "--take-over", f"run.max_steps={done + 3}", "checkpoint.every=5"]
        for process in by_torchrun(nodes, *again, names=("node2", "node3")):
            ended = nodes.end(process)
            assert ended.status == 0, ended.text
        before = written(folder)
        nodes.resume("node1")
        nodes.heal("node1")
        all_gone(nodes, "node1")
        texts = [nodes.end(process, timeout=10) for process in first]
        assert all(one.status for one in texts)
        # Its own old log is the one file it may still write: the newer start has given it another name
        after = written(folder)
        changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
        assert all(re.fullmatch(r"logs/(rank-\d+\.log\.\d|hang-.*)", name) for name in changed), changed


@pytest.fixture
def model(nodes: Nodes, tmp_path: Path) -> Iterator[tuple[Path, Callable[[str], None]]]:
    """A copy of the tiny model, and a function that hides it from a node, as where nobody has copied it."""
    folder = shutil.copytree(materialise_tiny_model(), tmp_path / "model")
    hidden: list[str] = []

    def hide(name: str) -> None:
        assert nodes.run(name, "mount", "-t", "tmpfs", "none", folder, cwd=tmp_path).status == 0
        hidden.append(name)

    yield folder, hide
    for name in hidden:
        assert nodes.run(name, "umount", folder, cwd=tmp_path).status == 0


def mpirun(*arguments: str) -> list[str | Path]:
    return [
        "mpirun", "--allow-run-as-root", "--host", "node1:1,node2:1", BIN / "python", TRAIN, "--engine", "ddp",
        *arguments,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("launcher", "bad"),
    [
        pytest.param("pdsh", "node1"),
        pytest.param("pdsh", "node2", marks=slow),
        pytest.param("torchrun", "node1", marks=slow),
        pytest.param("torchrun", "node2", marks=slow),
        pytest.param("mpirun", "node1", marks=slow),
        pytest.param("mpirun", "node2", marks=slow),
    ],
)
def test_a_node_that_fails_alone_before_the_ranks_have_met_holds_nobody_up(
    nodes: Nodes, reference: Reference, model: tuple[Path, Callable[[str], None]], launcher: str, bad: str
) -> None:
    folder, hide = model
    hide(bad)
    arguments = [*reference.arguments(f"alone-{launcher}-{bad}"), f"model.path={folder}"]
    began = time.monotonic()
    if launcher == "mpirun":
        if lacking := missing.packages(missing.OPENMPI):
            pytest.skip(lacking)
        ended = [nodes.run("node1", *mpirun(*arguments), cwd=ROOT)]
    else:
        started = by_pdsh(nodes, *arguments) if launcher == "pdsh" else by_torchrun(nodes, *arguments)
        ended = [nodes.end(process, timeout=150) for process in started]
    assert time.monotonic() - began < 150  # ranks wait 300 s for one that is silent
    assert all(one.status for one in ended)
    assert launcher == "torchrun" or ended[0].status == 2
    text = "".join(one.text for one in ended)
    told = re.findall(rf"^(?:\S+: )?error.*{re.escape(str(folder))}", text, re.MULTILINE)
    assert len(told) == 1 or (bad == "node2" and len(told) == 2), text  # on rank 0's terminal, too
    assert not nodes.left()


@slow
def test_mpirun_tells_a_mistake_of_all_nodes_once(nodes: Nodes, reference: Reference) -> None:
    if lacking := missing.packages(missing.OPENMPI):
        pytest.skip(lacking)
    ended = nodes.run("node1", *mpirun(*reference.arguments("wrong"), "run.nonsense=1"), cwd=ROOT)
    assert ended.status == 2
    assert ended.text.count("run.nonsense is not a setting") == 1, ended.text


@slow
def test_a_lost_node_s_job_is_requeued_by_slurm_and_its_stale_copy_writes_nothing(
    nodes: Nodes, slurm: Slurm, reference: Reference, tmp_path: Path
) -> None:
    steps = "run.max_steps=60"
    single = run("python", "--engine", "ddp", *reference.arguments("lost-single"), steps, cwd=ROOT)
    assert single.status == 0, single.text
    out, folder = tmp_path / "job.out", reference.folder / "lost"
    # The job is to begin on node2, so that Slurm itself, which is on node1, lives on
    holder = slurm.submit("--nodes=1", "--nodelist=node1", "--exclusive", "--wrap", "sleep 1000", cwd=tmp_path)
    slurm.wait(holder, states=["RUNNING"])
    with healthy_afterwards(nodes, "node2"):
        how = ["--nodes=2", "--gpus-per-node=1", f"--output={out}", "slurm/train.sbatch", "--engine", "fsdp2"]
        job = slurm.submit(*how, *reference.arguments("lost"), steps, "checkpoint.every=5", cwd=ROOT)
        assert slurm.wait(job, states=["RUNNING"], timeout=60)["NodeList"] == "node[2-3]"
        train_until(folder, 12)
        assert slurm.run("scancel", holder).status == 0
        nodes.cut("node2")
        nodes.pause("node2")
        told = slurm.wait(job, timeout=420)
        assert (told["JobState"], told["Restarts"], told["NodeList"]) == ("COMPLETED", "1", "node[1,3]"), told
        before = written(folder)
        assert nodes.processes("node2")
        nodes.resume("node2")
        nodes.heal("node2")
        all_gone(nodes, "node2", but="srun ")  # which Slurm itself ends in its own time
        after = written(folder)
        changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
        assert all(re.fullmatch(r"logs/(rank-\d+\.log\.\d|hang-.*)", name) for name in changed), changed
    assert losses(folder) == pytest.approx(losses(reference.folder / "lost-single"), rel=1e-4)
    slurm.wait_until_idle(timeout=240)

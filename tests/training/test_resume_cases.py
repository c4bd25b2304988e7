"""Interrupted anywhere, a run goes on as if it had not been: every case of `cases/resume.json`, by its name.

The order of samples, checkpoints and the way back are those of training; only the arithmetic of a step is left out.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen_edit_zero.checkpoints.shared_reading import opened_together
from qwen_edit_zero.checkpoints.writer import save_checkpoint
from qwen_edit_zero.edit_data.batches.schedule import SampleSchedule
from qwen_edit_zero.edit_data.batches.split import share_of_step
from qwen_edit_zero.edit_model.flow import sample_generator
from qwen_edit_zero.errors import CheckpointError
from qwen_edit_zero.settings.models import ScheduleSettings
from qwen_edit_zero.training.loading import load_checkpoint
from qwen_edit_zero.training.lr import lr_at
from qwen_edit_zero.training.resume import CheckpointChoice, RunIdentity, check_identity, run_state
from tests.checkpoints.states import MODEL, save
from tests.engines import harness, problem
from tests.engines.harness import MemorySource
from tests.ranks import run_ranks

CASES = {case["name"]: case for case in json.loads((Path(__file__).parent / "cases" / "resume.json").read_text())}
SEED = 3


@dataclass
class Run:
    """A run of the training command, as far as samples and steps go. A checkpoint after every step.

    Attributes:
        done: (step, epoch, its samples in the order of ranks) of every step of this process, from 0.
        begun: samples of micro-batches whose step was not finished when the process ended.
        told: what its user saw.
    """

    folder: Path
    samples: int
    global_size: int
    done: list[tuple[int, int, tuple[int, ...]]] = field(default_factory=list)
    begun: list[int] = field(default_factory=list)
    told: list[str] = field(default_factory=list)

    def train(
        self, *, ranks: int, micro: int, steps: int, stop_after_micro: float = math.inf, accept: bool = False
    ) -> None:
        """To `steps` steps, or until every rank has computed so many micro-batches and the process is killed."""
        schedule = SampleSchedule(np.zeros(self.samples, np.int64), seed=SEED, global_size=self.global_size)
        identity = RunIdentity("model", "data", self.global_size, SEED, None, [])
        first, micros = 0, 0
        checkpoint = CheckpointChoice("auto", self.folder, self.told.append, rank=0).next()
        if checkpoint is not None:
            with opened_together(checkpoint) as reader:
                check_identity(reader, identity, accept=accept, say=self.told.append)
                first = reader.step
        for step in range(first, steps):
            plan, self.begun = schedule.step(step), []
            shares = [share_of_step(plan, rank=r, world_size=ranks, micro_size=micro) for r in range(ranks)]
            by_rank = [share.micro_batches for share in shares]
            for batches in zip(*by_rank, strict=True):
                if micros == stop_after_micro:
                    return
                micros += 1
                self.begun += [i for batch in batches if not batch.filler for i in batch.indices]
            self.done.append((step, plan.epoch, tuple(sorted(self.begun))))
            state = run_state(
                identity, step=step + 1, epoch=plan.epoch, samples_seen=schedule.samples_before(step + 1),
                engine={"optimizer_steps": step + 1},
            )  # fmt: skip
            save(self.folder, step + 1, run_state=state)

    def of_epoch(self, epoch: int) -> list[int]:
        """Samples of the finished steps of an epoch, in order."""
        return [i for _, of, samples in self.done if of == epoch for i in samples]


def interrupted_and_not(case: dict[str, Any], tmp_path: Path, *, global_size: int, steps: int) -> tuple[Run, Run, int]:
    """The run of a case, killed and started again, one that was not, and how many steps were done at the kill."""
    ranks = case["ranks"]
    micro = case.get("micro", math.gcd(global_size // ranks, case.get("new_ranks", 1)))
    run = Run(tmp_path / "run", case["samples"], global_size)
    run.train(ranks=ranks, micro=micro, steps=steps, stop_after_micro=case["stop_after_micro"])
    done = len(run.done)
    run.train(ranks=case.get("new_ranks", ranks), micro=1 if "new_ranks" in case else micro, steps=steps)
    other = Run(tmp_path / "other", case["samples"], global_size)
    other.train(ranks=ranks, micro=micro, steps=steps)
    return run, other, done


def test_every_case_has_its_test() -> None:
    tested = [name.removeprefix("test_case_") for name in globals() if name.startswith("test_case_")]
    assert sorted(tested) == sorted(CASES)


def test_case_mid_epoch(tmp_path: Path) -> None:
    case = CASES["mid_epoch"]
    run, other, done = interrupted_and_not(case, tmp_path, global_size=2 * 2 * 2, steps=8)
    assert done == 2  # 5 micro-batches of 2 a step: two steps, and one micro-batch that is lost
    assert run.done == other.done
    assert sorted(run.of_epoch(0)) == list(range(64))


def test_case_skip_only_once(tmp_path: Path) -> None:
    run, other, done = interrupted_and_not(CASES["skip_only_once"], tmp_path, global_size=2, steps=30)
    assert done == 3
    assert run.done == other.done
    for epoch in range(3):
        assert sorted(run.of_epoch(epoch)) == list(range(20))


def test_case_inside_accumulation(tmp_path: Path) -> None:
    case = CASES["inside_accumulation"]
    run = Run(tmp_path, case["samples"], 4)
    run.train(ranks=1, micro=1, steps=16, stop_after_micro=case["stop_after_micro"])
    lost = run.begun
    assert len(run.done) == 1
    assert len(lost) == 2  # micro-batches 4 and 5, which docs/checkpoints.md says are repeated
    run.train(ranks=1, micro=1, steps=16)
    assert set(lost) <= set(run.done[1][2])
    assert sorted(run.of_epoch(0)) == list(range(64))


def _changed_ranks(name: str, tmp_path: Path) -> Run:
    run, other, done = interrupted_and_not(CASES[name], tmp_path, global_size=12, steps=8)
    assert done > 0
    assert run.done == other.done  # the same samples in the same steps, the global step going on
    assert [step for step, *_ in run.done] == list(range(8))
    assert len(set(run.of_epoch(0))) == len(run.of_epoch(0))
    streams = {sample_generator(SEED, f"{i}", 0).initial_seed() for i in run.of_epoch(0)}
    assert len(streams) == len(run.of_epoch(0))  # noise hangs on the sample: no two ranks can have the same stream
    return run


def test_case_more_ranks(tmp_path: Path) -> None:
    _changed_ranks("more_ranks", tmp_path)


def test_case_fewer_ranks(tmp_path: Path) -> None:
    run = _changed_ranks("fewer_ranks", tmp_path)
    changed = replace(run, global_size=9, told=[])
    with pytest.raises(CheckpointError, match=r"batch\.global_size: 12 there, 9 here"):
        changed.train(ranks=3, micro=1, steps=12)
    changed.train(ranks=3, micro=1, steps=9, accept=True)
    assert "batch.global_size: 12 there, 9 here" in changed.told[0]
    assert "samples of this epoch may repeat or be left out" in changed.told[0]


def test_case_at_epoch_end(tmp_path: Path) -> None:
    run, other, done = interrupted_and_not(CASES["at_epoch_end"], tmp_path, global_size=4, steps=9)
    assert done == 3
    assert run.done == other.done
    assert run.done[3][:2] == (3, 1)
    assert [epoch for _, epoch, _ in run.done] == [0] * 3 + [1] * 3 + [2] * 3


@pytest.mark.parametrize("ranks", [1, 4])
def test_case_lr_position(ranks: int, tmp_path: Path) -> None:
    stop = CASES["lr_position"]["stop_step"]
    schedule = ScheduleSettings(kind="cosine", warmup_steps=10)

    def lr(applied: int) -> float:
        return lr_at(applied, peak=1e-3, total_steps=100, schedule=schedule)

    uninterrupted = [lr(step) for step in range(100)]
    run = Run(tmp_path, 400, 4)
    run.train(ranks=ranks, micro=1, steps=stop)
    path = CheckpointChoice("auto", tmp_path, print, rank=0).next()
    assert path is not None
    with opened_together(path) as reader:
        first, applied = reader.step, reader.run_state["engine"]["optimizer_steps"]
    assert (first, applied) == (37, 37)
    assert lr(applied) == uninterrupted[37]  # that of step 38
    assert uninterrupted[36] > uninterrupted[37] > uninterrupted[38]


def test_case_rng_file_missing_rank1(tmp_path: Path) -> None:
    """There are no files of generators: noise is a function of seed, sample and epoch. Any file of a rank is missed."""
    run_ranks(_save_two, 2, tmp_path)
    (tmp_path / "step-00000002" / "rank-00001.safetensors").unlink()
    told: list[str] = []
    assert CheckpointChoice("auto", tmp_path, told.append, rank=0).next() == tmp_path / "step-00000001"
    assert "step-00000002" in told[0]
    assert told[0].endswith("misses rank-00001.safetensors")


def _save_two(rank: int, world: int, folder: Path) -> None:
    for step in (1, 2):
        save(folder, step, rank=rank, world=world)


def _stage_2(rank: int, world: int, folder: Path) -> list[float]:
    engine = harness.build("zero2", MemorySource.of_weights(problem.weights_of(problem.make_model())))
    problem.train_with(engine, micro=2, steps=range(2))
    save_checkpoint(
        folder, step=2, ranges=engine.local_state, run_state={"engine": engine.scalars()}, settings={}, model=MODEL,
        engine=engine.name,
    )  # fmt: skip
    losses, _ = problem.train_with(engine, micro=2, steps=range(2, 5))
    engine.close()
    return losses


def _stage_3(rank: int, world: int, folder: Path) -> list[float]:
    engine = harness.build("zero3", MemorySource.of_weights(problem.weights_of(problem.make_model())))
    path = CheckpointChoice("auto", folder, print, rank=rank).next()
    assert path is not None
    with opened_together(path) as reader:
        load_checkpoint(engine, reader, print)
    losses, _ = problem.train_with(engine, micro=2, steps=range(2, 5))
    engine.close()
    return losses


def test_case_stage_changed(tmp_path: Path) -> None:
    """Our checkpoints do not know stages, so there is nothing to refuse. DeepSpeed's own are refused, with the way."""
    expected = [sum(shares) for shares in zip(*run_ranks(_stage_2, 2, tmp_path / "run"), strict=True)]
    found = [sum(shares) for shares in zip(*run_ranks(_stage_3, 2, tmp_path / "run"), strict=True)]
    assert found == pytest.approx(expected, rel=1e-5)
    own = tmp_path / "deepspeed" / "global_step2"
    own.mkdir(parents=True)
    (own / "zero_pp_rank_0_mp_rank_00_optim_states.pt").touch()
    for given in (own, own.parent):
        with pytest.raises(
            CheckpointError, match="written by DeepSpeed itself; qwen-edit-zero checkpoint import brings"
        ):
            CheckpointChoice(str(given), tmp_path / "run", print, rank=0).next()

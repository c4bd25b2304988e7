"""Checkpoints of a run: when they are written, while training waits or goes on, and what becomes of them."""

from __future__ import annotations

import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from qwen_edit_zero.checkpoints.background import be_nice
from qwen_edit_zero.checkpoints.backup import backup_of_run
from qwen_edit_zero.checkpoints.caretaker import Caretaker
from qwen_edit_zero.checkpoints.coordination import Coordinator
from qwen_edit_zero.checkpoints.disk import bytes_text
from qwen_edit_zero.checkpoints.frozen import FrozenShare
from qwen_edit_zero.checkpoints.manifest import LoraReference, ModelReference
from qwen_edit_zero.checkpoints.optimizer_groups import GROUPS, groups_of
from qwen_edit_zero.checkpoints.placement import make_folder
from qwen_edit_zero.checkpoints.rank_file import stream_ranges
from qwen_edit_zero.checkpoints.retention import Retention
from qwen_edit_zero.checkpoints.snapshot import HostSnapshot, available_host_bytes, ranks_on_this_node
from qwen_edit_zero.checkpoints.writer import Contents, PlannedSave, plan_save, write_save
from qwen_edit_zero.cluster.collectives import sum_over_ranks
from qwen_edit_zero.edit_model.folder import ModelFolder
from qwen_edit_zero.engines.base import ParallelEngine
from qwen_edit_zero.errors import StorageError
from qwen_edit_zero.settings.models import CheckpointSettings, LoraSettings, Settings
from qwen_edit_zero.training.backups import finish_copies
from qwen_edit_zero.training.metrics import StepMetrics
from qwen_edit_zero.training.resume import RunIdentity, run_state

WRITING_SECONDS = 6 * 3600  # the most by which ranks may differ in writing their files

Describe = Callable[[StepMetrics, Mapping[str, float]], Contents]


@dataclass(frozen=True)
class _Flight:
    """A save that is being written while training goes on."""

    step: int
    is_last: bool
    result: Future[Path]


class CheckpointHook:
    """Writes checkpoints every `settings.every` steps and after the last one. A hook of the trainer, on every rank.

    A save is planned and copied to host memory by all ranks in the same step; in the background a thread of each rank
    writes that rank's file. The threads agree through a process group of their own, never through that of training:
    collectives of two threads on one group would mix. After each step all ranks learn together whether the save is
    done everywhere, so that what follows from it happens in the same step on all of them.

    Args:
        folder: the run's `checkpoints` folder; rank 0 makes it now, and it must then stay.
        describe: the contents of a checkpoint after a step, given the metrics recorded with it.
        say: prints on rank 0.
        frozen: what this rank writes of the frozen parameters; streamed from where they are, not copied to memory.
        may_write: asked on rank 0 before anything in `folder` changes; raises if it belongs to another run now.
        saved: told on every rank of each checkpoint that is whole: its step and folder.
        recorded: metrics of a step that are recorded with its checkpoint beside those of training.

    Raises SettingsError if `checkpoint.backup` cannot be understood. Collective.
    """

    def __init__(
        self,
        engine: ParallelEngine,
        folder: Path,
        settings: CheckpointSettings,
        describe: Describe,
        say: Callable[[str], None],
        frozen: FrozenShare | None = None,
        may_write: Callable[[], None] = lambda: None,
        saved: Callable[[int, Path], None] = lambda step, path: None,
        recorded: Callable[[int], Mapping[str, float]] = lambda step: {},
    ) -> None:
        self._engine, self._folder, self._settings, self._describe, self._say = engine, folder, settings, describe, say
        self._may_write, self._saved, self._last_saved = may_write, saved, -1
        self._frozen, self._recorded = frozen, recorded
        self._ranks = Coordinator()
        self._losses = _MeanLoss()
        self._caretaker: Caretaker | None = None
        place = None if settings.backup is None else backup_of_run(settings.backup, folder)
        with self._ranks.together(f"making {folder}"):
            if self._ranks.rank == 0:
                may_write()
                make_folder(folder)
                self._caretaker = Caretaker(folder, Retention.of(settings), place, may_write)
                self._caretaker.catch_up()
        self._flight: _Flight | None = None
        self._thread: ThreadPoolExecutor | None = None
        if settings.asynchronous:
            group = None
            if dist.is_initialized() and dist.get_world_size() > 1:
                group = dist.new_group(backend="gloo", timeout=timedelta(seconds=WRITING_SECONDS))
            self._background_ranks = Coordinator(group)
            self._snapshot = HostSnapshot(pinned=engine.device.type == "cuda")
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint", initializer=be_nice)
            self._restore_signal = _end_by_exception_on_sigterm()

    def after_step(self, metrics: StepMetrics, *, is_last: bool) -> None:
        """Save if it is due; learn of a save that has ended meanwhile. Raises its error, the same on every rank."""
        self._losses.add(metrics)
        if self._flight is not None and self._ended_everywhere():
            self._land()
        if is_last or (self._settings.every is not None and metrics.step % self._settings.every == 0):
            self._save(metrics, is_last)
        self._pass_on()

    def save_now(self, metrics: StepMetrics) -> None:
        """Save the state of this step, unless that is done, and wait until it is whole: the run is to end here.

        Does not wait for copies in the backup, which the next start makes. Raises StorageError. Collective.
        """
        if self._flight is not None:
            self._land()
        if self._last_saved != metrics.step:
            self._save(metrics, is_last=True, may_wait=True)
        self._pass_on()

    def finish(self) -> None:
        """Wait for the save that is being written and for the backup. Raises the save's error."""
        if self._flight is not None:
            self._land()
        finish_copies(self._caretaker, self._ranks, self._say)

    def close(self) -> None:
        """Also after an error: let the save that is being written end first. Does not raise but for a signal."""
        if self._flight is not None:
            self._say(f"waiting for the checkpoint of step {self._flight.step}, which is being written")
            try:
                self._land()
            except Exception as error:  # the one that led here is the one to be told
                self._say(f"warning: {error}")
        if self._thread is not None:
            self._thread.shutdown()
            self._restore_signal()
        if self._caretaker is not None:
            self._caretaker.abandon()
        self._pass_on()

    def _save(self, metrics: StepMetrics, is_last: bool, *, may_wait: bool = False) -> None:
        if self._flight is not None:
            busy = f"the checkpoint of step {self._flight.step} is still being written"
            if self._settings.when_busy == "skip" and not is_last:
                self._say(f"step {metrics.step}: no checkpoint, since {busy}")
                return
            self._say(f"step {metrics.step}: waiting, since {busy}")
            self._land()
        if self._caretaker is not None:
            self._caretaker.settle()
        recorded = {**self._losses.take(metrics), **self._recorded(metrics.step)}
        contents = self._describe(metrics, self._finite(metrics.step, recorded))
        try:
            save = plan_save(
                self._folder, contents, self._engine.local_state, self._ranks, self._frozen, self._may_write
            )
            if self._thread is not None and not may_wait and self._host_memory_suffices(save):
                self._take_off(save, is_last)
                return
            path = write_save(save, stream_ranges(save.changing, self._engine.local_state), self._ranks)
        except StorageError as error:
            self._failed(metrics.step, is_last, error)
        else:
            self._landed(metrics.step, path)

    def _finite(self, step: int, recorded: Mapping[str, float]) -> dict[str, float]:
        """The metrics that a checkpoint can have: without one it is not among the best, but no less whole."""
        lost = [name for name, value in recorded.items() if not math.isfinite(value)]
        if lost:
            self._say(
                f"warning: step {step}: not finite, and so not recorded with this checkpoint, which cannot be among "
                f"the best by it: {', '.join(f'{name} {recorded[name]}' for name in lost)}"
            )
        return {name: value for name, value in recorded.items() if name not in lost}

    def _host_memory_suffices(self, save: PlannedSave) -> bool:
        """Whether every node has room for the copies of its ranks; told to the user if not."""
        needed, available = self._snapshot.grows_by(save.changing) * ranks_on_this_node(), available_host_bytes()
        short = needed > 0 and available is not None and needed > available
        told = self._ranks.gather((needed, available) if short else None)
        for rank, found in enumerate(told):
            if found is not None:
                self._say(
                    f"step {save.contents.step}: training waits while the checkpoint is written; to go on meanwhile "
                    f"would take {bytes_text(found[0])} of host memory on the node of rank {rank}, which has "
                    f"{bytes_text(found[1] or 0)} left"
                )
                return False
        return True

    def _take_off(self, save: PlannedSave, is_last: bool) -> None:
        assert self._thread is not None
        began = time.monotonic()
        with self._ranks.together(f"copying the state of step {save.contents.step} to host memory"):
            self._snapshot.take(save.changing, self._engine.local_state)
        result = self._thread.submit(write_save, save, self._snapshot.chunks(save.changing), self._background_ranks)
        self._flight = _Flight(save.contents.step, is_last, result)
        self._say(
            f"step {save.contents.step}: writing a checkpoint of {bytes_text(save.size)} while training goes on "
            f"(waited {time.monotonic() - began:.2f} s for the copy)"
        )

    def _ended_everywhere(self) -> bool:
        assert self._flight is not None
        ended = torch.tensor([float(self._flight.result.done())])
        return int(sum_over_ranks(ended, self._engine.device)) == self._ranks.world_size

    def _land(self) -> None:
        """Wait for the save in flight and act on how it went: every thread ends with the same result."""
        assert self._flight is not None
        flight = self._flight
        try:
            path = flight.result.result()
        except StorageError as error:
            self._flight = None
            self._failed(flight.step, flight.is_last, error)
        except Exception:  # but not a signal: then it is still in flight
            self._flight = None
            raise
        else:
            self._flight = None
            self._landed(flight.step, path)

    def _landed(self, step: int, path: Path) -> None:
        self._say(f"step {step}: wrote {path}")
        self._last_saved = step
        self._saved(step, path)
        if self._caretaker is not None:
            self._caretaker.look_after(path)

    def _failed(self, step: int, is_last: bool, error: StorageError) -> None:
        if self._settings.on_failure == "stop" or is_last:
            raise error
        self._say(f"warning: step {step} has no checkpoint, and training goes on: {error}")

    def _pass_on(self) -> None:
        if self._caretaker is not None:
            for message in self._caretaker.messages():
                self._say(message)


def checkpoint_contents(
    settings: Settings,
    folder: ModelFolder,
    engine: ParallelEngine,
    identity: RunIdentity,
    more: Callable[[], Mapping[str, Any]] = dict,
) -> Describe:
    """What describes the checkpoints of a run; `engine` must be set up. `more` is added to the run state of each."""
    lora = settings.model.lora
    model = ModelReference(
        path=settings.model.path if settings.model.path == "tiny" else str(folder.path),
        fingerprint=identity.model_fingerprint,
        config=folder.transformer_config,
        frozen=tuple(sorted(name for name, p in engine.module.named_parameters() if not p.requires_grad)),
        frozen_stored=settings.checkpoint.frozen == "full"
        and not all(p.requires_grad for p in engine.module.parameters()),
        lora=lora and lora_reference(lora),
    )

    def describe(metrics: StepMetrics, recorded: Mapping[str, float]) -> Contents:
        state = run_state(
            identity,
            step=metrics.step,
            epoch=metrics.epoch,
            samples_seen=metrics.samples_seen,
            engine=engine.scalars(),
        ) | {GROUPS: [group.json() for group in groups_of(settings.optimizer)], **more()}
        return Contents(metrics.step, state, settings.model_dump(mode="json"), model, engine.name, recorded)

    return describe


def lora_reference(lora: LoraSettings) -> LoraReference:
    """The adapters of a run, as checkpoints record them."""
    return LoraReference(rank=lora.rank, alpha=lora.alpha or lora.rank, targets=lora.targets)


class _MeanLoss:
    """Mean loss over the steps since the last checkpoint; skipped steps do not count."""

    def __init__(self) -> None:
        self._sum, self._count = 0.0, 0

    def add(self, metrics: StepMetrics) -> None:
        if not metrics.skipped:
            self._sum, self._count = self._sum + metrics.loss, self._count + 1

    def take(self, metrics: StepMetrics) -> dict[str, float]:
        """What is recorded with a checkpoint, and begin anew."""
        found = {} if not self._count else {"loss": self._sum / self._count}
        self._sum, self._count = 0.0, 0
        return found if metrics.skipped else found | {"step_loss": metrics.loss}


def _end_by_exception_on_sigterm() -> Callable[[], None]:
    """Let SIGTERM end the program as an error does, so that a save can end first; returns what undoes this.

    A handler that somebody else has set stays.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return lambda: None

    def leave(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one ends it at once
        sys.exit(128 + number)

    def restore() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, leave)
    return restore

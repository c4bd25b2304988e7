"""The steps of a run: a loader, the hooks and the trainer, from one checkpoint to the end or to a reason to stop."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from qwen_edit_zero.checkpoints.frozen import FrozenShare
from qwen_edit_zero.cluster import failure, signals
from qwen_edit_zero.cluster.pulse import position
from qwen_edit_zero.cluster.watchdog import Watchdog
from qwen_edit_zero.edit_data.batches.loader import BatchLoader
from qwen_edit_zero.edit_model.folder import ModelFolder
from qwen_edit_zero.engines.base import ParallelEngine
from qwen_edit_zero.settings.models import Settings
from qwen_edit_zero.training import run_folder
from qwen_edit_zero.training.chronicle import Chronicle
from qwen_edit_zero.training.conditioning import Conditioned
from qwen_edit_zero.training.guard import STATE, SpikeGuard
from qwen_edit_zero.training.hooks import ChronicleHook, DrawnHook, MetricsHook, PeriodicHook
from qwen_edit_zero.training.lr import lr_at
from qwen_edit_zero.training.measured import MeasuredHook, Measurements
from qwen_edit_zero.training.metrics import MetricsWriter, StepMetrics
from qwen_edit_zero.training.order import SampleOrder
from qwen_edit_zero.training.planned import tell_comparison
from qwen_edit_zero.training.progress import LateProgress, Progress
from qwen_edit_zero.training.replay import ReplayHook
from qwen_edit_zero.training.resume import RunIdentity
from qwen_edit_zero.training.samples import SamplePictures
from qwen_edit_zero.training.saving import CheckpointHook, checkpoint_contents
from qwen_edit_zero.training.stragglers import LastStep, StragglerHook
from qwen_edit_zero.training.task import EditTask
from qwen_edit_zero.training.trainer import Hook, Trainer
from qwen_edit_zero.training.validation import HeldOutMeasure
from qwen_edit_zero.training.validation_hook import ValidationHook


@dataclass(frozen=True)
class Fitting:
    """What the steps of a run need; `path` is the run's folder."""

    settings: Settings
    folder: ModelFolder
    conditioned: Conditioned
    order: SampleOrder
    identity: RunIdentity
    frozen: FrozenShare | None
    guard: SpikeGuard
    chronicle: Chronicle
    path: Path

    def fit(self, engine: ParallelEngine, first: int, total_steps: int) -> StepMetrics | None:
        """Train steps `first` up to `total_steps`; `engine` has the state after step `first`.

        Returns None when that is done, else the step after which a signal asked for the end, which is saved then.
        Raises RollBack for the guard, UserError and RunError.
        """
        settings, conditioned, order, guard = self.settings, self.conditioned, self.order, self.guard
        data, schedule = conditioned.training, order.schedule
        say = self.chronicle.say
        rank, world = engine.ranks.rank, engine.ranks.world_size
        size = engine.ranks.sequence_size
        shared = "" if size == 1 else f", {size} to a sample"
        say(
            f"{len(data.samples)} samples in {len(data.prepared.buckets)} buckets, "
            f"{'' if schedule.is_constant else 'about '}{schedule.steps_per_epoch} steps an epoch; "
            f"training steps {first + 1} to {total_steps} under {engine.name} on {world} "
            f"{'rank' if world == 1 else 'ranks'}{shared} ({engine.device.type}, {settings.precision.mode})"
        )
        order.announce(say)
        progress = Progress("step", total_steps, rank=rank, initial=first, every=settings.run.log_every)
        writer = MetricsWriter(self.path, first_step=first, tensorboard=settings.run.tensorboard) if rank == 0 else None
        pictures = SamplePictures(engine, self.folder, conditioned, settings)
        samples_folder = self.path / run_folder.SAMPLES
        validation = self._validation(engine, progress, writer)

        def saved(step: int, path: Path) -> None:
            guard.has_checkpoint = True
            self.chronicle.event("save", step=step, path=path)

        checkpoints = CheckpointHook(
            engine,
            self.path / run_folder.CHECKPOINTS,
            settings.checkpoint,
            checkpoint_contents(
                settings, self.folder, engine, self.identity, lambda: {STATE: guard.state()} if guard.on else {}
            ),
            progress.say,
            self.frozen,
            self.chronicle.may_write,
            saved,
            (lambda step: {}) if validation is None else validation.recorded,
        )
        watchdog = Watchdog(
            failure.alarm,
            factor=settings.run.hang_factor,
            extra_seconds=settings.run.hang_seconds,
            first_seconds=max(settings.engine.timeout_seconds, settings.run.hang_seconds),
        )
        measurements = Measurements(engine)
        measured = MeasuredHook(
            measurements,
            self.path,
            rank=rank,
            config=self.folder.transformer_config,
            first=first,
            tell=lambda record: tell_comparison(settings, record, progress.say),
        )
        drawing = PeriodicHook(
            settings.sampling.every, lambda m: pictures.draw(samples_folder / f"step-{m.step:08d}"), progress.say
        )
        computing: list[Hook] = [] if validation is None else [validation]
        hooks: list[Hook] = [
            ChronicleHook(self.chronicle, watchdog, settings.run.silent_seconds),
            MetricsHook(progress, writer),
            measured,
            DrawnHook(order.distribution, progress, writer),
            *computing,
            checkpoints,
            drawing,
        ]
        task, last = EditTask(self.folder, settings), LastStep()
        if settings.run.stragglers_every is not None and world > 1:
            hooks.append(StragglerHook(last, engine.device, settings.run.stragglers_every, self.chronicle.slow, rank))
        if settings.run.replay_every is not None and world > 1:
            stop = settings.run.replay_differs == "stop"
            hooks.append(
                ReplayHook(engine, task.losses, last, settings.run.replay_every, self.chronicle.differs, stop=stop)
            )
        try:
            with (
                signals.deferred(),
                watchdog,
                BatchLoader(
                    data.samples,
                    conditioned.cache,
                    data.key_of,
                    schedule,
                    rank=engine.dp_rank,
                    world_size=engine.dp_size,
                    micro_size=settings.batch.micro_size,
                    weights=order.loss_weights,
                    costs=order.costs,
                    prefetch=settings.data.prefetch,
                    workers=settings.data.workers,
                    device=engine.device,
                ) as loader,
            ):
                if validation is not None:
                    validation.begin(first)
                stopped = Trainer(
                    engine,
                    task,
                    steps=loader.steps,
                    lr_at=lambda step: lr_at(
                        step, peak=settings.optimizer.lr, total_steps=total_steps, schedule=settings.schedule
                    ),
                    sample_ids=lambda plan: [data.samples[i].id for i in plan.indices],
                    max_skipped=settings.optimizer.max_skipped,
                    min_loss_scale=settings.precision.min_loss_scale if settings.precision.mode == "fp16" else None,
                    guard=guard,
                    last=last,
                    measurements=measurements,
                    asked_to_end=lambda: signals.requested() is not None,
                    hooks=hooks,
                    can_wait=[*computing, drawing],
                ).fit(first, total_steps, samples_seen=schedule.samples_before(first))
                measured.write()
                position.end("saving")
                if stopped is None:
                    checkpoints.finish()
                else:
                    checkpoints.save_now(stopped)
            return stopped
        finally:
            checkpoints.close()
            progress.close()
            if writer is not None and not self.chronicle.shut_out:
                writer.close()

    def _validation(
        self, engine: ParallelEngine, progress: Progress, writer: MetricsWriter | None
    ) -> ValidationHook | None:
        """What computes the held-out loss; None if there is to be none."""
        settings, samples = self.settings.validation, self.conditioned.validation
        if settings.every is None or samples is None:
            return None
        measure = HeldOutMeasure(
            engine,
            self.conditioned.cache,
            samples,
            settings,
            micro_size=self.settings.batch.micro_size,
            new_bar=lambda title, total: LateProgress(title, total, rank=engine.ranks.rank),
        )
        return ValidationHook(measure, settings.every, progress, writer, self.chronicle.event)

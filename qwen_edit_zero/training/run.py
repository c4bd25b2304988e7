"""A training run from settings to its last checkpoint: everything is built here, in order, and the trainer started."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch

from qwen_edit_zero.checkpoints.reader import DamagedError
from qwen_edit_zero.checkpoints.shared_reading import opened_together
from qwen_edit_zero.cluster import process_group, signals
from qwen_edit_zero.cluster.collectives import barrier, gather_objects
from qwen_edit_zero.cluster.device_setup import set_numerics
from qwen_edit_zero.cluster.identity import Identity
from qwen_edit_zero.edit_data.batches.schedule import SampleSchedule
from qwen_edit_zero.edit_model.attention import resolve_attention
from qwen_edit_zero.edit_model.folder import ModelFolder, open_model_folder
from qwen_edit_zero.edit_model.freezing import freeze
from qwen_edit_zero.edit_model.sequence_parallel import check_heads, split_sequences
from qwen_edit_zero.edit_model.transformer import build_transformer
from qwen_edit_zero.engines.adamw import check_optimizer
from qwen_edit_zero.engines.base import ParallelEngine
from qwen_edit_zero.engines.factory import make_engine
from qwen_edit_zero.engines.precision import DTYPES
from qwen_edit_zero.errors import START_AGAIN, RunError
from qwen_edit_zero.settings.load import LoadedSettings
from qwen_edit_zero.settings.models import Settings
from qwen_edit_zero.settings.render import settings_yaml
from qwen_edit_zero.training import resume as resuming
from qwen_edit_zero.training import run_folder
from qwen_edit_zero.training.backups import catch_up_backup, probe_backup
from qwen_edit_zero.training.base_weights import base_fingerprint, frozen_share, starting_weights
from qwen_edit_zero.training.chronicle import Chronicle
from qwen_edit_zero.training.conditioning import Conditioned, condition
from qwen_edit_zero.training.fitting import Fitting
from qwen_edit_zero.training.guard import STATE, RollBack, SpikeGuard
from qwen_edit_zero.training.loading import check_whole, load_checkpoint
from qwen_edit_zero.training.metrics import StepMetrics
from qwen_edit_zero.training.order import order_identity, sample_order
from qwen_edit_zero.training.planned import tell_plan
from qwen_edit_zero.training.saving import lora_reference


def train(
    loaded: LoadedSettings,
    identity: Identity,
    resume: str,
    *,
    accept_changes: bool = False,
    take_over: bool = False,
    check: Callable[[ModelFolder], None] | None = None,
) -> int:
    """Run training on this rank to its end; returns the exit status: 0, or START_AGAIN if a signal asked for the end
    and the state is saved. `check` looks at all ranks' nodes when they have met. Raises UserError and RunError."""
    settings = loaded.settings
    # Before ranks meet: a wrong path then costs nobody a time-out.
    folder = open_model_folder(settings.model.path, without_weights=resume != resuming.NONE)
    check_optimizer(settings.optimizer)
    check_heads(settings.engine.sequence_parallel, int(folder.transformer_config["num_attention_heads"]))
    device = process_group.start(
        identity, timeout_seconds=settings.engine.timeout_seconds, device=settings.engine.device
    )
    set_numerics(settings, device)
    try:
        if check is not None:
            check(folder)
        text = settings_yaml(loaded)
        return _Run(settings, text, folder, identity, device, resume, accept_changes, take_over).go()
    finally:
        process_group.stop()


class _Run:
    def __init__(
        self,
        settings: Settings,
        settings_text: str,
        folder: ModelFolder,
        rank: Identity,
        device: torch.device,
        resume: str,
        accept_changes: bool,
        take_over: bool,
    ) -> None:
        self.settings, self.settings_text, self.folder = settings, settings_text, folder
        self.rank, self.world, self.device, self.resume = rank.rank, rank.world_size, device, resume
        self.accept_changes, self.take_over = accept_changes, take_over
        self.launcher = rank.launcher
        self.chronicle: Chronicle  # from when the run folder is taken
        self.path = run_folder.run_folder(settings)
        self.checkpoints = self.path / run_folder.CHECKPOINTS

    def say(self, message: str) -> None:
        if self.rank == 0:
            print(message, flush=True)

    def go(self) -> int:
        with run_folder.take(self.path, take_over=self.take_over) if self.rank == 0 else nullcontext() as lock:
            if lock is not None and lock.taken_from is not None:
                self.say(f"taking {self.path} over from {lock.taken_from}")
            engine = make_engine(self.settings, device=self.device)
            try:
                probe_backup(self.settings.checkpoint, self.checkpoints)
                module = self._module(engine)  # shows what cannot work before an earlier run is moved or data encoded
                if self.rank == 0 and self.resume == resuming.NONE:
                    aside = run_folder.set_aside(self.path)
                    if aside is not None:
                        self.say(f"starting over: what the earlier run {self.settings.run.name} left is now in {aside}")
                barrier()
                with Chronicle(self.path, self.rank, None if lock is None else lock.fence) as self.chronicle:
                    self.chronicle.begin(ranks=self.world, engine=engine.name, launcher=self.launcher)
                    try:
                        status = self._go(engine, module)
                    except FileNotFoundError:
                        self.chronicle.may_write()  # tells it better if the run's folder is gone
                        raise
                    signals.ignore()  # launchers end the ranks that are left when the first has gone
                    return status
            finally:
                engine.close()

    def _go(self, engine: ParallelEngine, module: torch.nn.Module) -> int:
        settings = self.settings
        choice = resuming.CheckpointChoice(self.resume, self.checkpoints, self.say, rank=self.rank)
        checkpoint = choice.next()
        conditioned = condition(
            settings,
            self.folder,
            cache_folder=run_folder.cache_folder(settings),
            work=self.path / run_folder.WORK,
            left_out=self.path / run_folder.LEFT_OUT,
            device=self.device,
            rank=self.rank,
            world_size=self.world,
        )
        with conditioned.cache:
            return self._train(engine, module, conditioned, choice, checkpoint)

    def _train(
        self,
        engine: ParallelEngine,
        module: torch.nn.Module,
        conditioned: Conditioned,
        choice: resuming.CheckpointChoice,
        checkpoint: Path | None,
    ) -> int:
        settings, data = self.settings, conditioned.training
        config = self.folder.transformer_config
        order = sample_order(
            settings,
            bucket_codes=data.prepared.bucket_codes,
            image_tokens=data.image_tokens(),
            category_codes=data.samples.category_codes,
            categories=data.samples.categories,
            weights=data.samples.weights,
            text_tokens=data.prepared.text_tokens(),
            width=int(config["num_attention_heads"]) * int(config["attention_head_dim"]),
        )
        total_steps = _total_steps(settings, order.schedule)
        identity = resuming.RunIdentity(
            model_fingerprint=base_fingerprint(settings, self.folder, checkpoint),
            data_fingerprint=data.fingerprint,
            content=data.prepared.content(),
            global_size=settings.batch.global_size,
            seed=settings.run.seed,
            order=order_identity(settings),
            lora=lora_reference(settings.model.lora).model_dump(mode="json") if settings.model.lora else None,
            frozen=list(settings.model.freeze),
        )
        guard = SpikeGuard(settings.run.guard)
        first, is_set_up = 0, False
        while checkpoint is not None:
            try:
                with opened_together(checkpoint) as reader:
                    resuming.check_identity(reader, identity, accept=self.accept_changes, say=self.say)
                    changed = resuming.changed_settings(reader, settings.model_dump(mode="json"))
                    if changed := [*changed, *resuming.changed_groups(reader, settings.optimizer)]:
                        self.say("settings changed since the checkpoint was written:\n  " + "\n  ".join(changed))
                    if reader.step >= total_steps:
                        check_whole(reader, self.device, self.say)
                        return self._complete(checkpoint, total_steps)
                    if not is_set_up:
                        self._set_up(engine, module)
                        is_set_up = True
                    load_checkpoint(engine, reader, self.say, frozen=not self.folder.has_weights)
                    choice.went_on_from(checkpoint)
                    first = reader.step
                    guard.load(reader.run_state.get(STATE, {}))
                    guard.has_checkpoint = True
                    self.say(f"going on from {reader.path} (step {first}, written by {reader.manifest.engine})")
                    self.chronicle.event("resumed", step=first, checkpoint=reader.path)
                break
            except DamagedError as error:
                choice.refuse(checkpoint, error.fault)
                checkpoint = choice.next()
        if checkpoint is None and not self.folder.has_weights:
            raise self.folder.no_weights()
        if not is_set_up:
            self._set_up(engine, module)
        frozen = frozen_share(settings, self.folder, module, checkpoint, rank=self.rank, world=self.world)
        self.chronicle.may_write()
        if self.rank == 0:
            run_folder.write_settings(self.path, self.settings_text)
        tell_plan(settings, self.folder, data, engine, self.say)
        fitting = Fitting(settings, self.folder, conditioned, order, identity, frozen, guard, self.chronicle, self.path)
        while True:
            try:
                stopped = fitting.fit(engine, first, total_steps)
                break
            except RollBack as back:
                first = self._go_back(engine, guard, back)
        if stopped is not None:
            return self._preempted(stopped)
        self.chronicle.end("finished", 0)
        self.say(f"finished {total_steps} {'step' if total_steps == 1 else 'steps'}; everything is in {self.path}")
        return 0

    def _go_back(self, engine: ParallelEngine, guard: SpikeGuard, back: RollBack) -> int:
        """Load the newest checkpoint from before a spike; returns the steps done then. Collective."""
        guard.leave_out(back.step)
        choice = resuming.CheckpointChoice(resuming.AUTO, self.checkpoints, self.say, rank=self.rank)
        while (checkpoint := choice.next()) is not None:
            try:
                with opened_together(checkpoint) as reader:
                    if reader.step >= back.step:
                        choice.refuse(checkpoint, f"it is not older than the spike at step {back.step}")
                        continue
                    load_checkpoint(engine, reader, self.say)
                    guard.load(reader.run_state.get(STATE, {}), keep=True)
                    self.chronicle.event(
                        "rolled_back", step=back.step, to=reader.step, reason=back.why, left_out=sorted(guard.left_out)
                    )
                    self.say(f"step {back.step}: {back.why}. Going back to step {reader.step}")
                    return reader.step
            except DamagedError as error:
                choice.refuse(checkpoint, error.fault)
        raise RunError(f"the loss spiked at step {back.step} ({back.why}), and there is no checkpoint to go back to")

    def _preempted(self, stopped: StepMetrics) -> int:
        """Tell who was asked to end. Collective."""
        told = enumerate(gather_objects((signals.requested(), socket.gethostname())))
        asked = [(rank, name, host) for rank, (name, host) in told if name is not None]
        rank, name, host = asked[0]
        where = "" if len(asked) == self.world else f" (rank {rank}, {host})"
        self.chronicle.event("preempted", step=stopped.step, signal=name, rank=rank)
        self.chronicle.end(f"preempted by {name}", START_AGAIN)
        self.say(
            f"{self.path.name} was asked to end by {name}{where}: step {stopped.step} is saved, and the same command "
            f"goes on from there; exit status {START_AGAIN}"
        )
        return START_AGAIN

    def _complete(self, checkpoint: Path, total_steps: int) -> int:
        """Nothing is left to train; copies that are missing in the backup are made."""
        self.say(
            f"{self.path} is complete: its checkpoint {checkpoint.name} has all {total_steps} steps. For more, "
            "raise run.max_steps or run.epochs; for another run, set run.name; to start over, use --resume none"
        )
        catch_up_backup(self.settings.checkpoint, self.checkpoints, self.say)
        self.chronicle.end("complete before it began", 0)
        return 0

    def _module(self, engine: ParallelEngine) -> torch.nn.Module:
        """The model without values, frozen or with adapters as the settings say."""
        settings = self.settings
        attention = resolve_attention(
            settings.model.attention,
            device=self.device,
            dtype=DTYPES[settings.precision.mode],
            head_dim=int(self.folder.transformer_config["attention_head_dim"]),
            masked=settings.batch.micro_size > 1,
        )
        with engine.init_context():
            module: torch.nn.Module = build_transformer(self.folder, attention=attention, lora=settings.model.lora)
        if engine.ranks.sequence_group is not None:
            split_sequences(module, engine.ranks.sequence_group)
        trained = freeze(module, settings.model.freeze)
        self.say(f"{self.folder.variant} from {self.folder.path}: {trained}")
        if settings.model.freeze:
            compute_bytes = DTYPES[settings.precision.mode].itemsize
            masters_apart = settings.engine.backend == "deepspeed"
            self.say("\n".join(trained.lines(compute_bytes=compute_bytes, masters_apart=masters_apart)))
        return module

    def _set_up(self, engine: ParallelEngine, module: torch.nn.Module) -> None:
        """The model sharded, with the base model's weights."""
        settings = self.settings
        engine.setup(
            module,
            optimizer=settings.optimizer,
            weights=starting_weights(self.folder, module, seed=settings.run.seed),
        )


def _total_steps(settings: Settings, schedule: SampleSchedule) -> int:
    epochs = settings.run.epochs
    limits = [settings.run.max_steps, None if epochs is None else schedule.steps_before_epoch(epochs)]
    return min((limit for limit in limits if limit is not None), default=sys.maxsize)

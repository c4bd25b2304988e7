"""A checkpoint of DeepSpeed or torch (DCP), moments included, written again in our own format, as a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch

from qwen_edit_zero.checkpoints import layout
from qwen_edit_zero.checkpoints.base_model import BaseModel
from qwen_edit_zero.checkpoints.coordination import Coordinator
from qwen_edit_zero.checkpoints.foreign.prefixes import resolve
from qwen_edit_zero.checkpoints.foreign.recognise import is_foreign, open_foreign
from qwen_edit_zero.checkpoints.foreign.source import ForeignSource, ForeignState
from qwen_edit_zero.checkpoints.manifest import ModelReference
from qwen_edit_zero.checkpoints.optimizer_groups import GROUPS, OptimizerGroup
from qwen_edit_zero.checkpoints.precision import FLOATS, Bytes, to_float32
from qwen_edit_zero.checkpoints.same_as_base import compare_frozen, frozen_bytes
from qwen_edit_zero.checkpoints.writer import Contents, plan_save, write_save
from qwen_edit_zero.errors import CheckpointError
from qwen_edit_zero.flat_state import PARAM, FlatRange

MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW; the only optimizer there is here
_RANGE = 16 * 2**20  # elements of a stored range
_WINDOW = 4 * 2**20  # bytes
Hold = Callable[[Path], AbstractContextManager[object]]


@dataclass(frozen=True)
class _Plan:
    """Names here -> names in the source, for what trains and for what did not; `frozen` are all that do not train."""

    trained: Mapping[str, str]
    untrained: Mapping[str, str]
    frozen: tuple[str, ...]


def import_checkpoint(
    source: Path,
    run: Path,
    *,
    base: BaseModel,
    trust_frozen: bool = False,
    hold: Hold = nullcontext,
    say: Callable[[str], None] = print,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write `run/checkpoints/step-XXXXXXXX` from a DeepSpeed or DCP folder, so that a run goes on under any engine.

    Trained parameters and moments are stored in fp32. Frozen parameters are not stored: they must be those of `base`,
    with which every element is compared.
    A parameter that trains but has no moments, since it never had a gradient, gets moments of zero.

    Args:
        source: a DeepSpeed folder (or a folder of its tags), or a DCP folder.
        run: the folder of a run; must hold no checkpoints.
        base: the model that was trained from.
        trust_frozen: do not compare frozen parameters with the base model.
        hold: keeps runs out of the run's folder while this lasts, and makes it if need be; its errors are passed on.
        say: told what was found, and what the format could not tell.
        progress: told the bytes compared and written so far and in all.

    Returns the checkpoint's folder. Raises CheckpointError before anything is written if the source is not whole, has
    no AdamW state, or does not fit the model; StorageError if writing fails.
    """
    if not is_foreign(source):
        if source.is_dir() and ((source / layout.MANIFEST).exists() or layout.holds_checkpoints(source)):
            raise CheckpointError(f"{source} is of this package and needs no import: train with --resume {source}")
        raise CheckpointError(f"{source} is no checkpoint of DeepSpeed or torch (DCP): {layout.looks_like(source)}")
    checkpoints = run / layout.CHECKPOINTS
    with ExitStack() as until_written:
        if is_there := run.is_dir():  # a run that is going on there is met before anything is read
            until_written.enter_context(hold(run))
        _check_empty(checkpoints)
        state = open_foreign(source)
        if state.step is None or state.optimizer_steps is None:
            raise CheckpointError(
                f"{state.path} holds no optimizer state, so training cannot go on from it; consolidate it, and start "
                "from the model that gives"
            )
        opened = until_written.enter_context(ForeignSource(state))
        plan = _plan(opened, base, say)
        count = _Counter(opened, plan, 0 if trust_frozen else frozen_bytes(opened, plan.untrained), progress)
        _check_frozen(opened, plan, base, trust_frozen, count, say)
        step, config = state.step, dict(base.transformer_config)
        scale = {} if state.loss_scale is None else {"loss_scale": state.loss_scale, "loss_scale_good_steps": 0}
        contents = Contents(
            step=step,
            run_state={
                "step": step,
                "epoch": 0,
                "samples_seen": state.samples_seen,
                "identity": {"model_fingerprint": base.fingerprint},
                "engine": {"optimizer_steps": state.optimizer_steps, **_parameter_steps(state, plan), **scale},
                GROUPS: [group.json() for group in _groups(state, plan)],
            },
            settings={"imported": {"path": str(state.path.absolute()), "format": state.format}},
            model=ModelReference(
                path=str(base.path), fingerprint=base.fingerprint, config=config, frozen=plan.frozen, lora=None
            ),
            engine=state.format,
        )
        if not is_there:
            until_written.enter_context(hold(run))
            _check_empty(checkpoints)
        checkpoints.mkdir(parents=True, exist_ok=True)
        ranks = Coordinator(None)
        save = plan_save(checkpoints, contents, lambda: _ranges(opened, plan), ranks)
        written = write_save(save, _data(opened, plan, count), ranks)
    say(f"the order of samples and the learning rate of step {step} are those of the recipe you go on with")
    return written


def _check_empty(checkpoints: Path) -> None:
    if there := layout.checkpoint_folders(checkpoints):
        raise CheckpointError(
            f"{checkpoints.parent} has checkpoints already ({there[-1].name}); give a run folder without"
        )


def _check_frozen(
    source: ForeignSource,
    plan: _Plan,
    base: BaseModel,
    trust: bool,
    count: _Counter,
    say: Callable[[str], None],
) -> None:
    """Make sure that frozen parameters are the base model's, unless they are trusted. Raises CheckpointError."""
    if not plan.untrained:
        return
    if trust:
        say(f"{len(plan.untrained)} frozen parameters are taken to be those of {base.path}, without a look at them")
        return
    compare_frozen(source, plan.untrained, base.shards["transformer"].tensors, count.add)
    say(f"{len(plan.untrained)} frozen parameters are those of {base.path}, every element compared")


def _parameter_steps(state: ForeignState, plan: _Plan) -> dict[str, dict[str, int]]:
    """The counts of parameters that have done fewer steps than the others, for the engine's counters."""
    if state.parameter_steps is None:  # one count for all
        return {}
    counts = {was: state.optimizer_steps for kind, was in state.tensors if kind in MOMENTS} | state.parameter_steps
    done = {name: counts.get(was) or 0 for name, was in plan.trained.items()}
    fewer = {name: steps for name, steps in done.items() if steps != state.optimizer_steps}
    return {"parameter_steps": fewer} if fewer else {}


def _groups(state: ForeignState, plan: _Plan) -> list[OptimizerGroup]:
    """The optimizer's groups by the names here. Learning rates are told as parts of the largest."""
    largest = max((group.lr for group in state.groups), default=0.0)
    found = []
    for group in state.groups:
        members = set(group.names)
        names = tuple(name for name, was in plan.trained.items() if was in members)
        if names:
            found.append(OptimizerGroup(group.weight_decay, group.lr / largest if largest else 1.0, names))
    return found


def _plan(source: ForeignSource, base: BaseModel, say: Callable[[str], None]) -> _Plan:
    """Match names and shapes. Raises CheckpointError."""
    state, expected = source.state, base.shards["transformer"].tensors
    for note in state.notes:
        say(f"note: {note}")
    renaming = resolve([*source.names(), *state.tied], expected.keys())
    for note in renaming.notes:
        say(note)
    found = {name: state.tied.get(was, was) for was, name in renaming.names.items()}
    for name, was in found.items():
        if source.shape(was) != tuple(expected[name].shape):
            raise CheckpointError(
                f"{source.path}: {was} has shape {list(source.shape(was))}, but {name} {list(expected[name].shape)} in "
                f"{base.path}"
            )
    kinds = set(source.kinds()) - {PARAM}
    if kinds != set(MOMENTS):
        raise CheckpointError(
            f"{source.path} holds the moments {', '.join(sorted(kinds)) or 'of no optimizer'}; AdamW has "
            f"{' and '.join(MOMENTS)}, and training goes on with it alone"
        )
    moved = {name for kind, name in state.tensors if kind in MOMENTS}
    trained = {n: was for n, was in found.items() if was in moved or source.tensor(was).role == "trained"}
    if lost := sorted(moved - set(trained.values())):
        raise CheckpointError(f"{source.path} trained {', '.join(lost[:5])}, which {base.path} does not have")
    for was in trained.values():
        if source.dtype(was) not in FLOATS:
            raise CheckpointError(f"{source.path}: {was} is stored as {source.dtype(was)}, which cannot be trained")
    if still := [name for name, was in trained.items() if was not in moved]:
        say(f"{len(still)} parameters never had a gradient and get moments of zero: {', '.join(still[:5])}")
    frozen = tuple(name for name in expected if name not in trained)
    if absent := [name for name in frozen if name not in found]:
        say(f"{len(absent)} parameters are not in {source.path} and are those of {base.path}: {', '.join(absent[:5])}")
    return _Plan(trained, {name: found[name] for name in frozen if name in found}, frozen)


def _pieces(plan: _Plan, source: ForeignSource) -> Iterator[tuple[str, str, str, int, int]]:
    """Kind, name, name in the source, start and length of every range, in the order of writing."""
    for name, was in plan.trained.items():
        count = prod(source.shape(was))
        for kind in (PARAM, *MOMENTS):
            for start in range(0, count, _RANGE):
                yield kind, name, was, start, min(_RANGE, count - start)


def _ranges(source: ForeignSource, plan: _Plan) -> Iterator[FlatRange]:
    """The layout alone: values without memory."""
    for kind, name, was, start, length in _pieces(plan, source):
        values = torch.empty(length, dtype=torch.float32, device="meta")
        yield FlatRange(name, kind, source.shape(was), start, values)


def _data(source: ForeignSource, plan: _Plan, count: _Counter) -> Iterator[Iterable[memoryview]]:
    for kind, _, was, start, length in _pieces(plan, source):
        yield _windows(source, kind, was, start, length, count)
    source.finish()


def _windows(
    source: ForeignSource, kind: str, was: str, start: int, length: int, count: _Counter
) -> Iterator[memoryview]:
    if (kind, was) not in source.state.tensors:
        for done in range(0, length, _WINDOW // 4):
            yield count.passed(np.zeros(min(_WINDOW // 4, length - done) * 4, dtype=np.uint8))
        return
    stored = source.dtype(was, kind)
    for window in source.stream(was, start, length, kind, window=_WINDOW):
        yield count.passed(to_float32(window, stored).view(np.uint8))


class _Counter:
    """Bytes done of those to be compared and written."""

    def __init__(
        self, source: ForeignSource, plan: _Plan, compared: int, progress: Callable[[int, int], None] | None
    ) -> None:
        elements = sum(prod(source.shape(was)) for was in plan.trained.values())
        self._done, self._progress = 0, progress
        self._total = compared + elements * 4 * (1 + len(MOMENTS))

    def add(self, count: int) -> None:
        self._done += count
        if self._progress is not None:
            self._progress(self._done, self._total)

    def passed(self, data: Bytes) -> memoryview:
        """Count bytes that are about to be written."""
        self.add(len(data))
        return data.data

"""Which checkpoints stay."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from qwen_edit_zero.checkpoints import layout
from qwen_edit_zero.checkpoints.given_up import given_up
from qwen_edit_zero.checkpoints.in_use import deletion_lock
from qwen_edit_zero.checkpoints.manifest import ManifestHead
from qwen_edit_zero.checkpoints.placement import delete_checkpoint
from qwen_edit_zero.checkpoints.validity import check_checkpoint
from qwen_edit_zero.errors import CheckpointError
from qwen_edit_zero.settings.models import CheckpointSettings


@dataclass(frozen=True)
class Retention:
    """The newest `keep` checkpoints stay, and those whose step is a multiple of `every`, and the `best` best ones.

    Attributes:
        keep: None: all stay.
        every: optimizer steps; None: age alone counts.
        best: how many of the lowest in `metric` stay; a checkpoint without that metric is none of them.
        metric: a key of the manifest's `metrics`.
    """

    keep: int | None = None
    every: int | None = None
    best: int = 0
    metric: str = "loss"

    def __post_init__(self) -> None:
        assert self.keep is None or self.keep >= 1, "a run without any checkpoint cannot be resumed"

    @classmethod
    def of(cls, settings: CheckpointSettings) -> Retention:
        """As the settings say."""
        return cls(settings.keep, settings.keep_every, settings.keep_best or 0, settings.best_metric)


def prune(folder: Path, retention: Retention, *, newest: Path | None = None, hold: Collection[Path] = ()) -> list[Path]:
    """Delete the checkpoints older (by step) than `newest` that need not stay beside it; returns those gone.

    Later steps are never touched: another thread may just have written them, or an earlier run that went further.
    Only valid ones are counted, and only valid ones are deleted: a damaged folder neither pushes out a good one nor
    disappears before somebody has looked at it. Those that the run has given up do not count either. One that is being
    read, on this node or (where the file system knows locks) on another, goes at a later call. Symbolic links and
    folders of other names are left alone.

    Args:
        newest: None: the newest valid one.
        hold: neither deleted nor counted.

    Raises OSError.
    """
    if retention.keep is None:
        return []
    candidates = [path for path in reversed(layout.checkpoint_folders(folder)) if path not in hold]
    valid, left = _Heads(), given_up(folder)
    first = next(filter(valid, candidates), None) if newest is None else newest
    if first is None:
        return []
    limit = _step(first)
    candidates = [path for path in candidates if _step(path) <= limit]
    counted = (path for path in candidates if (head := valid.of(path)) is not None and head.save_id not in left)
    staying = set(itertools.islice(counted, retention.keep))
    if retention.best:
        staying |= set(_best(candidates, valid, retention))
    gone = []
    for path in candidates:
        step = _step(path)
        for_ever = retention.every is not None and step % retention.every == 0
        if step == limit or path in staying or for_ever or path.is_symlink() or not valid(path):
            continue
        with deletion_lock(path) as lock:
            if lock.free:
                delete_checkpoint(path, unnamed=lock.release)
                gone.append(path)
    return gone


def _step(path: Path) -> int:
    step = layout.step_of(path)
    assert step is not None, path
    return step


class _Heads:
    """Tells whether a checkpoint is valid; looks at each once, since that means all files of it."""

    def __init__(self) -> None:
        self._seen: dict[Path, ManifestHead | None] = {}

    def __call__(self, path: Path) -> bool:
        return self.of(path) is not None

    def of(self, path: Path) -> ManifestHead | None:
        """The manifest's head; None if it is not valid."""
        if path not in self._seen:
            try:
                self._seen[path] = check_checkpoint(path)
            except CheckpointError:
                self._seen[path] = None
        return self._seen[path]


def _best(paths: Iterable[Path], heads: _Heads, retention: Retention) -> list[Path]:
    """The best by the metric; of equal ones the later."""
    ranked: list[tuple[float, int, Path]] = []
    for path in paths:
        head = heads.of(path)
        if head is not None and retention.metric in head.metrics:
            ranked.append((head.metrics[retention.metric], -head.step, path))
    return [path for *_, path in sorted(ranked)[: retention.best]]

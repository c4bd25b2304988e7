"""The folder of a run: `run.dir/run.name`, what lies in it, and what happens when it is there already.

RUN/settings.yaml     resolved settings, where each value came from, versions
RUN/metrics.jsonl     one line an optimizer step
RUN/drawn.jsonl       one line an epoch: how many samples of each category it drew
RUN/measured.json     memory by kind and phase, and the time of steps, to be compared with the plan
RUN/tensorboard/
RUN/checkpoints/step-00000200/
RUN/samples/step-00000200/
RUN/left_out.jsonl    rows of the manifests that were refused, under data.on_error=skip
RUN/events.jsonl      starts, saves, preemptions, skipped steps, how each start ended
RUN/logs/             what each rank printed, and where it was when the run hung
RUN/.lock             held by the run that is going on
RUN/.fence            which start may write into this folder
RUN/.columns/         what the run knows of its samples, while it is going on
RUN/cache/            latents and embeddings, unless data.cache_dir says otherwise
"""

from __future__ import annotations

import errno
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from qwen_edit_zero.cluster.fencing import FENCE_FILE
from qwen_edit_zero.errors import SettingsError
from qwen_edit_zero.settings.models import Settings
from qwen_edit_zero.training.run_lock import LOCK_FILE, RunLock

CHECKPOINTS, SAMPLES, CACHE, SETTINGS_FILE = "checkpoints", "samples", "cache", "settings.yaml"
LEFT_OUT = "left_out.jsonl"
WORK = ".columns"
_KEPT_ON_RESTART = {
    CACHE,
    LOCK_FILE,
    FENCE_FILE,
}  # the cache is keyed by content, so as right for the new run as for the old one
_VERSIONS = ("qwen-edit-zero", "torch", "deepspeed", "diffusers", "transformers", "peft", "safetensors", "numpy")


def run_folder(settings: Settings) -> Path:
    """Absolute path of the run's folder."""
    return (settings.run.dir / settings.run.name).expanduser().absolute()


def cache_folder(settings: Settings) -> Path:
    """Where latents and embeddings of the run lie."""
    chosen = settings.data.cache_dir
    return chosen.expanduser().absolute() if chosen else run_folder(settings) / CACHE


def take(folder: Path, *, take_over: bool = False) -> RunLock:
    """Make the run folder and hold it against other runs. For rank 0 only. Raises SettingsError.

    `take_over`: also if a run holds it that the user knows to be gone; see `RunLock`.
    """
    with _understood(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if os.statvfs(folder).f_flag & os.ST_RDONLY:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(folder))
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
        return RunLock(folder, take_over=take_over)


def set_aside(folder: Path) -> Path | None:
    """Move what an earlier run of this name left to a folder beside it, for a run that starts over.

    Returns that folder, or None if there was nothing to move. For rank 0 only. Raises SettingsError.
    """
    with _understood(folder):
        leftovers = [p for p in folder.iterdir() if p.name not in _KEPT_ON_RESTART]
        if not leftovers:
            return None
        aside = folder.with_name(f"{folder.name}-before-{time.strftime('%Y%m%d-%H%M%S')}")
        aside.mkdir()
        for path in leftovers:
            path.rename(aside / path.name)
        return aside


@contextmanager
def _understood(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SettingsError(
            f"the run folder {folder} cannot be prepared: {error.strerror or error}. Choose another with "
            "run.dir=FOLDER, or make it writable"
        ) from error


def versions() -> dict[str, str]:
    """Versions of Python and of the packages on which results depend."""
    found = {"python": platform.python_version()}
    for package in _VERSIONS:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def write_settings(folder: Path, text: str) -> None:
    """Write `settings.yaml`: the resolved settings as printed by `--print-settings`, then the versions."""
    lines = [text.rstrip("\n"), "", "# versions"] + [f"#   {name}: {value}" for name, value in versions().items()]
    temporary = folder / f".{SETTINGS_FILE}.partial"
    temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")
    os.replace(temporary, folder / SETTINGS_FILE)

"""The folder that a consolidation makes: refused, locked, written under another name, and named once it is whole."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from qwen_edit_zero import __version__
from qwen_edit_zero.checkpoints.disk import advice, bytes_text, sync_folder, write_file
from qwen_edit_zero.errors import CheckpointError, StorageError

PROVENANCE = "consolidated.json"


class OutFolder:
    """OUT while it is made, in `partial` beside it. See `claim`.

    After an error `partial` is deleted, unless `keep_after_failure` is set and it was the disk that failed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.partial = path.with_name(f".{path.name}.partial")
        self.keep_after_failure = False

    def spare(self, model: Path) -> None:
        """Refuse to replace the model folder that the run was trained from: it could not go on without, nor be merged.

        Raises CheckpointError.
        """
        if self.path.is_dir() and model.resolve().is_relative_to(self.path):
            where = "is" if model.resolve() == self.path else "holds"
            raise CheckpointError(
                f"{self.path} {where} the model that the checkpoint was trained from, which is needed to go on from it "
                "or to consolidate it again; choose a new folder"
            )

    def make_room(self, keep: Path | None, need: int) -> None:
        """Empty `partial`, but for `keep`, a folder in it or itself; StorageError unless `need` bytes are free then."""
        try:
            if keep is None:
                shutil.rmtree(self.partial, ignore_errors=True)
            elif keep != self.partial:
                for path in self.partial.iterdir():
                    if path.is_symlink() or not path.is_dir():
                        path.unlink()
                    elif path != keep:
                        shutil.rmtree(path)
            free = shutil.disk_usage(self.path.parent).free
        except OSError as error:
            raise StorageError(_failure(self.path, error)) from error
        if free < need:
            raise StorageError(
                f"{self.path} needs {bytes_text(need)} more, and the file system of {self.path.parent} has "
                f"{bytes_text(free)} free"
            )

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Clean up after an error (a kill leaves `partial` to the next call); StorageError in place of OSError."""
        try:
            yield
        except OSError as error:
            rest = "nothing is left of it"
            if self.keep_after_failure:
                rest = f"the weights are whole and stay in {self.partial}: the same command goes on from there"
            else:
                shutil.rmtree(self.partial, ignore_errors=True)
            raise StorageError(f"{_failure(self.path, error)}; {rest}") from error
        except Exception:
            shutil.rmtree(self.partial, ignore_errors=True)
            raise

    def finish(self, provenance: Mapping[str, object], journal: Path | None = None) -> None:
        """Say in `consolidated.json` what was written from what, bring all to the disk, and give `partial` its name.

        `journal` is deleted last of all: until then, the next call can go on from here.
        """
        files = _names(self.partial) - {PROVENANCE}
        if journal is not None:
            files.remove(str(journal.relative_to(self.partial)))
        content = {"written_by": f"qwen-edit-zero {__version__}", **provenance, "files": sorted(files)}
        write_json(self.partial / PROVENANCE, content)
        _sync_tree(self.partial)
        if journal is not None:
            journal.unlink()
            sync_folder(journal.parent)
        old = _set_aside(self.path)
        if self.path.exists() and any(self.path.iterdir()):
            self.path.rename(old)
        self.partial.rename(self.path)
        sync_folder(self.path.parent)
        shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def claim(out: Path, source: Path, *, overwrite: bool, say: Callable[[str], None]) -> Iterator[OutFolder]:
    """Refuse an OUT that must not be written, and keep every other process from making the same one meanwhile.

    An exclusive lock (flock) on `.NAME.lock` beside OUT ends with this process, whatever happens to it; file systems
    without locks give none. If a call was killed while it replaced OUT, what it had set aside gets its name back.
    Raises CheckpointError if OUT is in `source`, in use or holds something else; StorageError if it cannot be made.
    """
    path = out.resolve()
    _refuse_place(path, source)
    missing = [folder for folder in path.parents if not folder.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = _lock(path)
    except OSError as error:
        raise StorageError(_failure(path, error)) from error
    try:
        _recover(path, say)
        _refuse_content(path, overwrite)
        yield OutFolder(path)
    finally:
        with contextlib.suppress(OSError):
            _lock_file(path).unlink()
        os.close(lock)
        for folder in missing:  # made above, and empty if nothing was written
            with contextlib.suppress(OSError):
                folder.rmdir()


def write_json(path: Path, value: object) -> None:
    """Write it for people to read, too, and sync it."""
    write_file(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def _lock_file(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")


def _set_aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.replaced")


def _lock(path: Path) -> int:
    while True:
        fd = os.open(_lock_file(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise CheckpointError(
                f"another consolidation is writing {path} now; wait until it has ended, or choose another folder"
            ) from None
        except OSError:
            return fd
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), _lock_file(path).stat()):
                return fd
        os.close(fd)  # its holder deleted it before it let go: a lock on it excludes nobody


def _recover(path: Path, say: Callable[[str], None]) -> None:
    """Undo or finish what a call that was killed between its last renames had begun."""
    old = _set_aside(path)
    if not old.exists():
        return
    if path.exists() and any(path.iterdir()):
        shutil.rmtree(old, ignore_errors=True)
    else:
        old.rename(path)
        say(f"{path} is back, which an interrupted call had set aside")


def _refuse_place(path: Path, source: Path) -> None:
    if path.is_relative_to(source.resolve()):
        raise CheckpointError(f"{path} lies inside the checkpoint {source}; choose a folder outside")
    if Path.cwd().is_relative_to(path):
        raise CheckpointError(
            f"{path} is the folder you are in, or holds it, and a finished model replaces its folder; give a new one, "
            "such as ./model"
        )
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"{path} is a file; choose a new folder")


def _refuse_content(path: Path, overwrite: bool) -> None:
    if not path.exists() or not any(path.iterdir()):
        return
    if not overwrite:
        raise CheckpointError(f"{path} is not empty: choose a new folder, or use --overwrite to replace it")
    if not (path / PROVENANCE).exists():
        raise CheckpointError(
            f"{path} is not empty: it has no {PROVENANCE}, so it was not written by this command and is not replaced"
        )
    if others := sorted(_names(path) - _written(path) - {PROVENANCE}):
        raise CheckpointError(
            f"{path} holds {others[0]} ({len(others)} such), which this command did not write and would delete with "
            "the rest; move it away, or choose a new folder"
        )


def _names(folder: Path) -> set[str]:
    """Everything in a folder but the folders in it, by relative path."""
    return {
        str(Path(root, name).relative_to(folder))
        for root, folders, files in os.walk(folder)
        for name in [*files, *(name for name in folders if Path(root, name).is_symlink())]
    }


def _written(path: Path) -> set[str]:
    """What the call that made this folder wrote into it."""
    try:
        return set(json.loads((path / PROVENANCE).read_text(encoding="utf-8"))["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path / PROVENANCE} does not say which files this command wrote ({error}); choose a new folder"
        ) from error


def _sync_tree(folder: Path) -> None:
    """Bring every file of a folder, and the names in it, to the disk."""
    for root, _, files in os.walk(folder):
        for name in files:
            fd = os.open(Path(root, name), os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(Path(root, name))) from None
            finally:
                os.close(fd)
        sync_folder(Path(root))


def _failure(path: Path, error: OSError) -> str:
    where = f" ({error.filename})" if error.filename else ""
    return f"writing {path} failed: {error.strerror or error}{where}{advice(error)}"

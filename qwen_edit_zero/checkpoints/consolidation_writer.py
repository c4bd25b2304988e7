"""Writing weight files in parallel, at offsets known beforehand, with a small window for each thread."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from qwen_edit_zero.checkpoints.consolidation_journal import Journal
from qwen_edit_zero.checkpoints.consolidation_output import OutputFile, OutputTensor, Part
from qwen_edit_zero.checkpoints.disk import sync_folder
from qwen_edit_zero.checkpoints.precision import OverflowingValue
from qwen_edit_zero.errors import CheckpointError
from qwen_edit_zero.safetensors_file import ITEM_SIZE

Progress = Callable[[int, int], None]  # bytes written, bytes in all

_NOTED_EVERY = 5.0  # seconds; so much work at most is done again after an interruption
_MOST_THREADS = 4


@dataclass(frozen=True)
class _Job:
    number: int
    fd: int
    offset: int
    tensor: OutputTensor
    part: Part

    @property
    def size(self) -> int:
        return self.part.length * ITEM_SIZE[self.tensor.dtype]


def default_threads() -> int:
    """As many as there are processors for this process, up to a few: more only wait for the disk."""
    return max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0))))


def write_files(
    folder: Path, files: Sequence[OutputFile], journal: Journal, *, threads: int, progress: Progress
) -> None:
    """Write all files, but for the parts that the journal has; synced to disk and in the journal at the end.

    What the journal has of a file that is missing or too short is written again.
    Raises OSError naming the file, CheckpointError if a value does not fit the output type, and what the parts raise.
    """
    with ExitStack() as opened:
        _forget_lost(folder, files, journal)
        fds = []
        for file in files:
            fds.append(_create(folder / file.name, file))
            opened.callback(os.close, fds[-1])
        sync_folder(folder)  # the journal counts on these names
        jobs = list(_jobs(files, fds))
        total = sum(job.size for job in jobs)
        counter = _Counter(total, progress)
        for job in jobs:
            if job.number in journal.done:
                job.part.skip()
        counter.add(sum(job.size for job in jobs if job.number in journal.done))
        left = (job for job in jobs if job.number not in journal.done)
        last = _run(left, fds, journal, threads, counter)
        for file, fd in zip(files, fds, strict=True):
            _sync(fd, folder / file.name)
        journal.add(last)


def _forget_lost(folder: Path, files: Sequence[OutputFile], journal: Journal) -> None:
    lost, number = set[int](), 0
    for file in files:
        count = sum(len(tensor.parts) for tensor, _ in file.tensors)
        path = folder / file.name
        if not path.exists() or path.stat().st_size != file.size:
            lost |= set(range(number, number + count))
        number += count
    if lost & journal.done:
        journal.forget(lost)


def _create(path: Path, file: OutputFile) -> int:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        os.ftruncate(fd, file.size)
        _write(fd, file.header, 0, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    return fd


def _jobs(files: Sequence[OutputFile], fds: Sequence[int]) -> Iterator[_Job]:
    number = 0
    for file, fd in zip(files, fds, strict=True):
        for tensor, offset in file.tensors:
            for part in tensor.parts:
                yield _Job(number, fd, offset + part.start * ITEM_SIZE[tensor.dtype], tensor, part)
                number += 1


def _run(jobs: Iterator[_Job], fds: Sequence[int], journal: Journal, threads: int, counter: _Counter) -> list[int]:
    """Keep the threads busy with few jobs waiting, and note from time to time what is finished.

    Returns what is finished and not noted.
    """
    running: dict[Future[None], int] = {}
    finished: list[int] = []
    noted = time.monotonic()
    stop = threading.Event()
    with ThreadPoolExecutor(threads, thread_name_prefix="consolidate") as pool:
        try:
            more = True
            while more or running:
                while more and len(running) < 2 * threads:
                    job = next(jobs, None)
                    more = job is not None
                    if job is not None:
                        running[pool.submit(_do, job, counter, stop)] = job.number
                for done in wait(running, return_when=FIRST_COMPLETED).done if running else ():
                    finished.append(running.pop(done))
                    done.result()
                if time.monotonic() - noted > _NOTED_EVERY and finished:
                    for fd in fds:
                        os.fdatasync(fd)
                    journal.add(finished)
                    finished.clear()
                    noted = time.monotonic()
        except BaseException:
            stop.set()
            for future in running:
                future.cancel()
            raise
    return finished


def _do(job: _Job, counter: _Counter, stop: threading.Event) -> None:
    position = job.offset
    try:
        for window in job.part.windows():
            if stop.is_set():
                return
            _write(job.fd, window.data, position, None)
            position += len(window)
            counter.add(len(window))
    except OverflowingValue as error:
        raise CheckpointError(
            f"{job.tensor.name} holds {error.value:g}, which is beyond the range of {job.tensor.dtype}; "
            "use --dtype bf16 or fp32"
        ) from None
    assert position - job.offset == job.size, job.tensor.name


def _write(fd: int, data: bytes | memoryview, position: int, path: Path | None) -> None:
    view = memoryview(data)
    while len(view):
        written = os.pwrite(fd, view, position)
        view, position = view[written:], position + written


def _sync(fd: int, path: Path) -> None:
    try:
        os.fsync(fd)  # some file systems tell only here that the disk is full
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


class _Counter:
    """Bytes written by all threads."""

    def __init__(self, total: int, progress: Progress) -> None:
        self._lock, self._done, self._total, self._progress = threading.Lock(), 0, total, progress

    def add(self, count: int) -> None:
        if count:
            with self._lock:
                self._done += count
                self._progress(self._done, self._total)

"""Rows examined by several processes at once: decoding takes processors, and a decoder that crashes takes only its own.

The processes are started afresh, so that nothing is shared but the columns on disk. They end with this one, however it
ends: what they wait on is then closed.
"""

from __future__ import annotations

import contextlib
import heapq
import multiprocessing
import os
import signal
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import qwen_edit_zero.errors as errors
from qwen_edit_zero.edit_data.check.columns import REFUSED, RowColumns
from qwen_edit_zero.edit_data.check.findings import about
from qwen_edit_zero.edit_data.check.rows import CheckJob, Examined, Examiner
from qwen_edit_zero.errors import QwenEditError, RunError

ROWS = 32  # examined together; what a killed check loses of each process
_FEW = 64  # rows for which no processes are started
_AHEAD = 8  # pieces of work a process may be ahead of the slowest
_Piece = tuple[int, int]  # first row, and the one after the last


def processors() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0))


def examine_all(job: CheckJob, workers: int | None = None) -> Iterator[Examined]:
    """Examine all rows of a job; what is found comes in the order of rows.

    Args:
        workers: processes; 0: this one. None: one a processor, or this one for a few rows.

    Raises:
        QwenEditError: as `Examiner.examine`.
        RunError: a process ended where no picture can be at fault.
    """
    rows = len(job.table)
    count = workers if workers is not None else 0 if rows <= _FEW else processors()
    if count == 0:
        with Examiner(job) as examiner:
            for first in range(0, rows, ROWS):
                yield examiner.examine(first, min(first + ROWS, rows))
        return
    crew = _Crew(job, min(count, -(-rows // ROWS)))
    try:
        yield from crew.work()
    finally:
        crew.end()


@dataclass
class _Worker:
    process: BaseProcess
    connection: Connection
    piece: _Piece | None = None
    ready: bool = False  # it has said that it can begin


class _Crew:
    def __init__(self, job: CheckJob, count: int) -> None:
        self._job, self._rows = job, len(job.table)
        self._context = multiprocessing.get_context("spawn")
        self._workers = [self._start() for _ in range(count)]
        self._next = 0  # first row that nobody has been given
        self._again: list[_Piece] = []  # of processes that ended, cut into rows
        self._results: dict[int, tuple[int, Examined]] = {}

    def work(self) -> Iterator[Examined]:
        due = 0  # first row whose result has not been given away
        while due < self._rows:
            for worker in self._workers:
                if worker.piece is None and (piece := self._piece(due)) is not None:
                    worker.piece = piece
                    with contextlib.suppress(OSError):  # it has ended, which is seen below
                        worker.connection.send(piece)
            busy = {worker.connection: worker for worker in self._workers if worker.piece is not None}
            for connection in wait(list(busy)):
                self._take(busy[connection])  # type: ignore[index]
            while due in self._results:
                last, examined = self._results.pop(due)
                yield examined
                due = last

    def _piece(self, due: int) -> _Piece | None:
        if self._again:
            return heapq.heappop(self._again)
        if self._next >= self._rows or self._next >= due + _AHEAD * len(self._workers) * ROWS:
            return None
        first = self._next
        self._next = min(first + ROWS, self._rows)
        return first, self._next

    def _take(self, worker: _Worker) -> None:
        piece = worker.piece
        assert piece is not None
        try:
            kind, value = worker.connection.recv()
        except (EOFError, OSError):
            self._replace(worker, piece)
            return
        if kind == "error":
            name, text = value
            raise getattr(errors, name, RunError)(text)
        if kind == "ready":
            worker.ready = True
            return
        worker.piece = None
        self._results[piece[0]] = (piece[1], value)

    def _replace(self, worker: _Worker, piece: _Piece) -> None:
        """A process has ended: go on with another one, row by row, to find the row at which it did."""
        worker.process.join(5)
        how = _how(worker.process.exitcode)
        if not worker.ready:
            raise RunError(f"a process that examines rows ended before it had begun ({how}); its output says why")
        if piece[1] - piece[0] == 1:
            self._results[piece[0]] = (piece[1], self._fatal(piece[0], how))
        else:
            for row in range(*piece):
                heapq.heappush(self._again, (row, row + 1))
        worker.connection.close()
        self._workers[self._workers.index(worker)] = self._start()

    def _fatal(self, row: int, how: str) -> Examined:
        sample = self._job.table[row]
        columns = RowColumns(self._job.columns, self._rows, self._job.references, new=False)
        columns.state[row] = REFUSED
        text = f"looking at its pictures ended the process ({how}): one of them is damaged, or takes too much memory"
        return Examined(1, [about("picture", row, sample, self._job.table.where(sample.line), text)])

    def _start(self) -> _Worker:
        ours, theirs = self._context.Pipe()
        before = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"  # each process has its processor
        try:
            process = self._context.Process(target=_work, args=(theirs, self._job), name="data-check", daemon=True)
            process.start()
        finally:
            if before is None:
                del os.environ["OMP_NUM_THREADS"]
            else:
                os.environ["OMP_NUM_THREADS"] = before
        theirs.close()
        return _Worker(process, ours)

    def end(self) -> None:
        """Ask all to end, which saves what they have measured; those that are in the middle of rows are ended."""
        for worker in self._workers:
            worker.connection.close()
        for worker in self._workers:
            worker.process.join(0.5 if worker.piece is not None else 10)
            if worker.process.is_alive():
                worker.process.terminate()
                worker.process.join(5)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()


def _work(connection: Connection, job: CheckJob) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process says what is to be done
    try:
        with Examiner(job) as examiner:
            connection.send(("ready", None))
            while True:
                try:
                    first, last = connection.recv()
                except EOFError:
                    return
                connection.send(("done", examiner.examine(first, last)))
    except BrokenPipeError:
        return
    except QwenEditError as error:
        _tell(connection, (type(error).__name__, str(error)))
    except BaseException as error:
        _tell(connection, ("RunError", f"{error}\n{traceback.format_exc()}"))


def _tell(connection: Connection, what: Any) -> None:
    with contextlib.suppress(OSError):
        connection.send(("error", what))


def _how(status: int | None) -> str:
    if status is not None and status < 0:
        with contextlib.suppress(ValueError):
            name = signal.Signals(-status).name
            return f"{name}, perhaps for lack of memory" if name == "SIGKILL" else name
    return f"exit status {status}"

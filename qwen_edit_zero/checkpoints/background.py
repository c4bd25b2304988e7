"""A thread for work that training does not wait for."""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
from collections.abc import Callable

NICE = 10  # so that it takes no core from training

Job = Callable[[], None]


class BackgroundThread:
    """Does one job after another. A daemon: it never keeps the process from ending.

    `failed` is told what a job raised; the next job is done nevertheless.
    """

    def __init__(self, name: str, failed: Callable[[Exception], None]) -> None:
        self._failed = failed
        self._jobs: queue.Queue[Job | None] = queue.Queue()
        self._abandoned = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether a job is being done or waits."""
        return self._jobs.unfinished_tasks > 0

    @property
    def abandoned(self) -> bool:
        """Whether a job that has several parts should begin no further one."""
        return self._abandoned

    def submit(self, job: Job) -> None:
        """Do this after what was submitted before."""
        self._jobs.put(job)

    def wait(self, seconds: float | None = None) -> bool:
        """Until all jobs are done, or `seconds` have passed; whether they are done."""
        with self._jobs.all_tasks_done:  # what Queue.join waits for, which knows no limit
            return self._jobs.all_tasks_done.wait_for(lambda: not self.busy, seconds)

    def finish(self) -> None:
        """Wait for all jobs and end the thread. Idempotent."""
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join()

    def abandon(self) -> None:
        """Begin nothing further; returns at once. What is under way goes on as long as the process does."""
        self._abandoned = True
        self._jobs.put(None)

    def _work(self) -> None:
        be_nice()
        while True:
            job = self._jobs.get()
            try:
                if job is None:
                    return
                if not self._abandoned:
                    job()
            except Exception as error:
                self._failed(error)
            finally:
                self._jobs.task_done()


def be_nice() -> None:
    """Lower the priority of the calling thread, where the system can do so for one thread alone (Linux)."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)

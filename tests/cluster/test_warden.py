"""The process beside each rank that ends a frozen one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys, time
from qwen_edit_zero.cluster import warden
warden.MARGIN_SECONDS = 1.0
beside = warden.Warden("rank 3 (here)", 1.0)
for beat in range(int(sys.argv[1])):
    time.sleep(0.3)
    beside.alive(1.0)
    print(beat, flush=True)
beside.close()
print("closed", flush=True)
time.sleep(3)
"""


def start(beats: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(beats)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_frozen_process_is_ended_and_named() -> None:
    with start(1000) as process:
        assert process.stdout is not None
        process.stdout.readline()
        os.kill(process.pid, signal.SIGSTOP)
        assert process.wait(timeout=60) == -signal.SIGKILL
        assert process.stderr is not None
        assert process.stderr.read() == "rank 3 (here) was frozen for 2 s, and has been killed\n"


def test_one_that_gives_signs_or_has_closed_it_is_left_alone() -> None:
    with start(5) as process:
        said, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (0, "")
    assert said.endswith("closed\n")


def test_a_job_that_is_suspended_as_a_whole_is_left_alone() -> None:
    with start(12) as process:
        assert process.stdout is not None
        process.stdout.readline()
        beside = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        for pid in (process.pid, *map(int, beside)):
            os.kill(pid, signal.SIGSTOP)
        time.sleep(4)
        for pid in (*map(int, beside), process.pid):
            os.kill(pid, signal.SIGCONT)
        said, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (0, "")
    assert said.endswith("closed\n")

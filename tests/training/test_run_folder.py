"""The folder of a run belongs to one run at a time, and to the next one once that has ended, however it ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from qwen_edit_zero.errors import SettingsError
from qwen_edit_zero.training.run_folder import set_aside, take

HOLD = "import sys, time; from pathlib import Path; from qwen_edit_zero.training.run_folder import take; "
HOLD += "lock = take(Path(sys.argv[1])); print('held', flush=True); time.sleep(60)"


def test_a_second_run_in_a_folder_is_refused_and_one_killed_leaves_it_free(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    assert first.stdout.readline() == "held\n"
    with pytest.raises(SettingsError, match=rf"in use by process {first.pid} on .*choose another run\.name"):
        take(folder)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    take(folder).release()


def test_starting_over_moves_what_is_there_but_for_the_cache_and_the_lock(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with take(folder):
        (folder / "cache").mkdir()
        (folder / "metrics.jsonl").write_text("{}")
        aside = set_aside(folder)
        assert aside is not None
        assert [p.name for p in aside.iterdir()] == ["metrics.jsonl"]
        assert {p.name for p in folder.iterdir()} == {"cache", ".lock", ".fence"}
        assert set_aside(folder) is None
        with pytest.raises(SettingsError, match="in use"):
            take(folder)

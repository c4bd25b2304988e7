"""`slurm/consolidate.sbatch` builds the right command: run on a real checkpoint, with an srun that runs it here."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "slurm" / "consolidate.sbatch"
SRUN = '#!/bin/bash\nprintf "%s\\n" "$@" >"$ARGUMENTS"\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n'
Submit = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def submit(tmp_path: Path) -> Submit:
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "srun").write_text(SRUN)
    (tools / "srun").chmod(0o755)

    def submit(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        known = {
            "PATH": f"{tools}:{os.environ['PATH']}", "HOME": os.environ.get("HOME", str(tmp_path)),
            "SLURM_SUBMIT_DIR": str(ROOT), "PYTHON": sys.executable, "ARGUMENTS": str(tmp_path / "arguments"),
        }  # fmt: skip
        copy = tmp_path / "slurm_script"  # Slurm runs a copy of the script, somewhere else
        copy.write_bytes(SCRIPT.read_bytes())
        command = ["bash", str(copy), *arguments]
        return subprocess.run(
            command, cwd="/", env=known | environment, capture_output=True, text=True, timeout=120, check=False
        )

    return submit


def test_the_script_consolidates_a_run_in_one_task(submit: Submit, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "the model"
    done = submit(str(run), str(out), "--dtype", "fp32", "--components", "none")
    assert done.returncode == 0, done.stderr
    told = (tmp_path / "arguments").read_text().splitlines()
    assert told[:2] == ["--ntasks=1", sys.executable]
    assert told[2:5] == ["-m", "qwen_edit_zero.cli", "consolidate"]
    assert told[5:7] == [str(run), str(out)]  # words with spaces stay whole
    assert (out / "transformer" / "config.json").exists()
    assert (out / "consolidated.json").exists()


def test_its_status_is_that_of_the_command(submit: Submit, tmp_path: Path) -> None:
    done = submit(str(tmp_path / "nothing"), str(tmp_path / "out"))
    assert done.returncode == 2
    assert "is not a checkpoint: it does not exist" in done.stderr
    assert "Traceback" not in done.stderr


def test_it_says_what_it_misses(submit: Submit, tmp_path: Path) -> None:
    done = submit("only-a-source")
    assert done.returncode == 2
    assert done.stderr.startswith("usage: sbatch slurm/consolidate.sbatch SOURCE OUT")
    done = submit("a", "b", PROJECT=str(tmp_path), PYTHON="")
    assert done.returncode == 2
    assert f"there is no Python at {tmp_path}/.venv/bin/python" in done.stderr


def test_what_it_asks_slurm_for_is_one_task_and_little_memory() -> None:
    subprocess.run(["bash", "-n", SCRIPT], check=True)
    asked = [line.split()[1] for line in SCRIPT.read_text().splitlines() if line.startswith("#SBATCH")]
    assert {"--nodes=1", "--ntasks=1"} <= set(asked)
    assert not any("gpu" in option or "gres" in option for option in asked)

"""The cache is filled by the ranks of a launcher, is killed, goes on, and then serves another number of ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

from qwen_edit_zero.edit_data.cache.shard import RECORD
from tests.end_to_end.commands import LAUNCHERS, run
from tests.ranks import free_port


def entries_on_disk(cache: Path) -> int:
    return sum(f.stat().st_size // RECORD.itemsize for s in ("index", "journal") for f in cache.glob(f"*/shards/*.{s}"))


def test_ranks_that_are_killed_while_they_fill_a_cache_lose_almost_nothing(recipe: str, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    arguments = [recipe, f"data.cache_dir={cache}", f"run.dir={tmp_path}", "run.name=filling", "--engine", "ddp"]
    command = [str(free_port()) if word == "PORT" else word for word in LAUNCHERS["torchrun"]]
    job = subprocess.Popen(
        [*command, *arguments, "--cache-only"],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + 200
    while entries_on_disk(cache) < 20:
        assert job.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(job.pid, signal.SIGKILL)
    job.wait()
    time.sleep(0.5)
    made = entries_on_disk(cache)

    ended = run("torchrun", *arguments, "--cache-only", cwd=tmp_path)
    assert ended.status == 0, ended.text
    total = 21 + 2 + entries_of_pictures(cache)
    left = int(ended.output.rsplit("; ", 1)[1].split()[0].replace(",", ""))
    assert left <= total - made, "what the killed ranks had made was made again"
    assert "21 samples in 4 buckets are ready" in ended.output
    again = run("console", *arguments, cwd=tmp_path)
    assert again.status == 0, again.text
    assert "encoding" not in again.output


def entries_of_pictures(cache: Path) -> int:
    return sum(f.stat().st_size // RECORD.itemsize for f in cache.glob("latent-*/shards/*.index"))

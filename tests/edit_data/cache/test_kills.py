"""Filling a cache while processes are killed, and while another job fills the same folder."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from qwen_edit_zero.edit_data.cache.shard import HEADER_ROOM, RECORD
from tests.edit_data.builders import row, save_pictures, write_manifest
from tests.edit_data.cache.filling import Encoders, equal_samples, fill

ROWS = [row(i, references=1 + i % 3) for i in range(14)]
TOTAL = sum(2 + len(r["source"]) for r in ROWS)
_context = multiprocessing.get_context("fork")


class Slow(Encoders):
    def latent(self, picture: Any) -> torch.Tensor:
        time.sleep(0.02)
        return super().latent(picture)

    def prompt(self, references: Any, instruction: str) -> torch.Tensor:
        time.sleep(0.02)
        return super().prompt(references, instruction)


def _fill_slowly(manifest: Path, folder: Path, pipe: Any) -> None:
    filled = fill(manifest, folder, new_encoders=Slow)
    pipe.send((filled.latents, len(filled.prompts)))


def start(manifest: Path, folder: Path) -> tuple[BaseProcess, Any]:
    receiver, sender = _context.Pipe(duplex=False)
    process = _context.Process(target=_fill_slowly, args=(manifest, folder, sender))
    process.start()
    sender.close()
    return process, receiver


def entries_on_disk(folder: Path) -> int:
    """Whole entries, those in partial shards included."""
    found = 0
    for suffix in ("index", "journal"):
        for file in folder.glob(f"*/shards/*.{suffix}"):
            found += file.stat().st_size // RECORD.itemsize
    return found


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    save_pictures(tmp_path, ROWS)
    return write_manifest(tmp_path, ROWS)


@pytest.mark.parametrize("seed", range(3))
def test_a_killed_job_goes_on_where_it_was(seed: int, manifest: Path, tmp_path: Path) -> None:
    chance, folder, made = random.Random(seed), tmp_path / "c", 0
    for _ in range(3):
        process, _ = start(manifest, folder)
        time.sleep(0.25 + 0.4 * chance.random())
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
        now = entries_on_disk(folder)
        assert now >= made, "what was whole stays"
        made = now
    filled = fill(manifest, folder, ranks=2)
    assert filled.latents + len(filled.prompts) <= TOTAL - made
    assert not list(folder.glob("*/shards/*.partial"))
    fresh = fill(manifest, tmp_path / "fresh")
    assert all(equal_samples(a, b) for a, b in zip(filled.samples, fresh.samples, strict=True))
    assert fill(manifest, folder).set.made == 0


def test_two_jobs_may_fill_one_folder(manifest: Path, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    jobs = [start(manifest, folder) for _ in range(2)]
    for process, receiver in jobs:
        latents, prompts = receiver.recv()
        assert latents + prompts <= TOTAL
        process.join()
        assert process.exitcode == 0
    filled = fill(manifest, folder, ranks=3)
    assert filled.set.made == 0
    fresh = fill(manifest, tmp_path / "fresh")
    assert all(equal_samples(a, b) for a, b in zip(filled.samples, fresh.samples, strict=True))


def test_the_shard_of_a_job_that_goes_on_is_not_taken_from_it(manifest: Path, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    process, receiver = start(manifest, folder)
    deadline = time.monotonic() + 20
    while not any(f.stat().st_size > HEADER_ROOM for f in folder.glob("*/shards/*.partial")):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    other = fill(manifest, folder)
    assert other.latents + len(other.prompts) > 0
    assert sum(receiver.recv()) == TOTAL
    process.join()
    assert process.exitcode == 0
    assert fill(manifest, folder).set.made == 0

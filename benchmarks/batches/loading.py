"""Reading batches of entries of real size: ours, and torch's DataLoader over a file a sample."""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.engines.tables import Table
from qwen_edit_zero.edit_data.batches.batch import EditBatch, collate
from qwen_edit_zero.edit_data.batches.cost import SampleCosts
from qwen_edit_zero.edit_data.batches.loader import BatchLoader
from qwen_edit_zero.edit_data.batches.schedule import SampleSchedule
from qwen_edit_zero.edit_data.cache.ranks import Ranks
from qwen_edit_zero.edit_data.cache.store import CachedSample, ConditioningCache, SampleKey, entry_kind

SAMPLES, GLOBAL = 96, 8
WORKERS, PREFETCH = 2, 4
COMPUTE_SECONDS = 0.1  # a sample; an H100 needs more than a second for one of the full model at 1024 x 1024
ROUNDS = 5


@dataclass(frozen=True)
class Named:
    """A sample."""

    id: str


def entry(number: int) -> CachedSample:
    """Target and two references of 1024 x 1024, and a prompt of 3 to 9 MB."""
    generator = torch.Generator().manual_seed(number)
    latents = [torch.randn(16, 128, 128, generator=generator).bfloat16() for _ in range(3)]
    tokens = 430 + number * 127 % 860
    return CachedSample(latents[0], tuple(latents[1:]), torch.randn(tokens, 3584, generator=generator).bfloat16())


class Files(Dataset[CachedSample]):
    """A file of torch.save a sample, as trainers that cache embeddings commonly have it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> CachedSample:
        tensors = torch.load(self.folder / f"{index}.pt", weights_only=True)
        return CachedSample(tensors[0], tuple(tensors[1:3]), tensors[3])


def plain_collate(entries: Sequence[CachedSample]) -> EditBatch:
    """Without order, ids or weights."""
    return collate(entries, weights=[1.0] * len(entries), sample_ids=["a"] * len(entries), epoch=0)


@contextmanager
def data() -> Iterator[tuple[ConditioningCache, list[SampleKey], Files, list[int]]]:
    """The same entries in our cache and as files, both in the page cache."""
    folder = Path(tempfile.mkdtemp(prefix="qwen-edit-zero-batches-"))
    try:
        kinds = entry_kind("latent", {}), entry_kind("prompt", {})
        with ConditioningCache(folder / "cache", *kinds, Ranks(), work=folder / "work") as cache:
            (folder / "files").mkdir()
            keys, tokens = [], []
            with cache.latents.writer() as latents, cache.prompts.writer() as prompts:
                for number in range(SAMPLES):
                    made = entry(number)
                    names = [f"{number:014x}{part:02x}".encode() for part in range(4)]
                    for name, latent in zip(names, (made.target_latent, *made.reference_latents), strict=False):
                        latents.put(name, latent)
                    prompts.put(names[3], made.prompt_embeds)
                    keys.append(SampleKey(names[0], (names[1], names[2]), names[3]))
                    tokens.append(len(made.prompt_embeds))
                    torch.save(
                        [made.target_latent, *made.reference_latents, made.prompt_embeds],
                        folder / "files" / f"{number}.pt",
                    )
            for entries in cache.kinds:
                entries.refresh(Ranks())
            yield cache, keys, Files(folder / "files"), tokens
    finally:
        shutil.rmtree(folder)


def timed(batches: Iterator[EditBatch], compute_seconds: float) -> tuple[float, float]:
    """Samples a second over an epoch, and the share of the time that the consumer waited."""
    waited, samples = 0.0, 0
    began = time.perf_counter()
    while samples < SAMPLES:
        asked = time.perf_counter()
        batch = next(batches)
        waited += time.perf_counter() - asked
        samples += len(batch)
        time.sleep(compute_seconds * len(batch))  # the device computes, the host is free
    seconds = time.perf_counter() - began
    return samples / seconds, waited / seconds


def measure() -> list[Table]:
    """Epochs of each contestant in turn; the median after the first, which compares our checksums."""
    rows: list[tuple[str, ...]] = []
    with data() as (cache, keys, files, tokens):
        schedule = SampleSchedule(np.zeros(SAMPLES, np.int32), seed=0, global_size=GLOBAL)
        costs = SampleCosts(3072, np.array([3 * 4096]), np.zeros(SAMPLES, np.int32), np.array(tokens, np.int32))
        named = [Named(str(number)) for number in range(SAMPLES)]

        def ours(micro: int) -> Generator[EditBatch, None, None]:
            with BatchLoader(
                named, cache, lambda i, *_: keys[i], schedule, rank=0, world_size=1, micro_size=micro,
                costs=costs, prefetch=PREFETCH, workers=WORKERS,
            ) as loader:  # fmt: skip
                for _, batches in loader.steps(0):
                    yield from batches

        def torchs(workers: int) -> Callable[[int], Generator[EditBatch, None, None]]:
            def epochs(micro: int) -> Generator[EditBatch, None, None]:
                loader = DataLoader(
                    files, micro, shuffle=True, num_workers=workers, collate_fn=plain_collate,
                    persistent_workers=workers > 0, prefetch_factor=PREFETCH // 2 if workers else None,
                )  # fmt: skip
                while True:
                    yield from loader

            return epochs

        contestants: dict[str, Callable[[int], Generator[EditBatch, None, None]]] = {
            f"BatchLoader, {WORKERS} threads": ours,
            f"DataLoader, {WORKERS} processes": torchs(WORKERS),
            "DataLoader, no workers": torchs(0),
        }
        for micro in (1, 4):
            batches = {name: make(micro) for name, make in contestants.items()}
            first = {name: timed(them, 0.0)[0] for name, them in batches.items()}
            free: dict[str, list[float]] = {name: [] for name in batches}
            busy: dict[str, list[float]] = {name: [] for name in batches}
            for _ in range(ROUNDS):  # in turn, so that what else the machine does hits all alike
                for name, them in batches.items():
                    free[name].append(timed(them, 0.0)[0])
                    busy[name].append(timed(them, COMPUTE_SECONDS)[1])
            for name, them in batches.items():
                them.close()
                speed, waited = statistics.median(free[name]), statistics.median(busy[name])
                rows.append((name, str(micro), f"{first[name]:.0f}", f"{speed:.0f}", f"{waited:.2%}"))
    size = statistics.mean(tokens) * 3584 * 2 / 1e6 + 3 * 16 * 128 * 128 * 2 / 1e6
    columns = ("loader", "micro-batch", "samples/s, first epoch", "samples/s, later", "waited, at 0.1 s a sample")
    return [
        Table(
            f"Reading {SAMPLES} samples of {size:.1f} MB on average, files in the page cache",
            columns,
            rows,
            "The first epoch of BatchLoader compares every checksum; DataLoader compares none, and starts its workers.",
        )
    ]

"""How long a run with a warm cache takes to begin, and what memory: `python -m benchmarks.cache.run 10000 1000000`.

Rows are synthetic, with two pictures each: hard links to one file a folder, so that every picture must be asked about
as if it were one of its own, and facts with a digest of their own. Latents and embeddings are tiny; their number is the
true one.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import resource
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from qwen_edit_zero.edit_data.cache.facts import FACT, NAMED_FACT, Facts, name_key
from qwen_edit_zero.edit_data.cache.files import stamp_hash
from qwen_edit_zero.edit_data.cache.needs import Making, needs_of
from qwen_edit_zero.edit_data.cache.prepared import prepare_sets
from qwen_edit_zero.edit_data.cache.ranks import Ranks
from qwen_edit_zero.edit_data.cache.sets import SetSpec
from qwen_edit_zero.edit_data.cache.store import ConditioningCache, entry_kind
from qwen_edit_zero.edit_data.cache.survey import Surveyor
from qwen_edit_zero.edit_data.manifests.opening import open_manifest
from qwen_edit_zero.edit_data.manifests.table import SampleTable
from qwen_edit_zero.edit_data.pictures.decode import RULES_VERSION
from qwen_edit_zero.edit_data.pictures.prepare import Areas
from qwen_edit_zero.edit_data.storage.local import LocalFile

KINDS = entry_kind("latent", {"vae": "benchmark"}), entry_kind("prompt", {"text_encoder": "benchmark"})
MAKING = Making(Areas(1024 * 1024, 384 * 384))
A_FOLDER = 10_000  # links


class Bar:
    """Nothing is shown."""

    def __init__(self, title: str, total: int) -> None: ...
    def advance(self, units: int = 1) -> None: ...
    def close(self) -> None: ...


def make(folder: Path, rows: int) -> Path:
    """Pictures, manifest, facts and entries of so many rows."""
    with (folder / "rows.jsonl").open("w", encoding="utf-8") as out:
        for i in range(rows):
            names = [f"{i // A_FOLDER}/{i}{part}.png" for part in "st"]
            if i % A_FOLDER == 0:
                one = folder / str(i // A_FOLDER) / "one.png"
                one.parent.mkdir()
                Image.new("RGB", (1024, 768)).save(one)
            for name in names:
                os.link(one, folder / name)
            row = {"source": names[0], "target": names[1], "instruction": f"change the colour of thing {i} to red"}
            out.write(json.dumps(row) + "\n")
    return folder / "rows.jsonl"


def note_facts(folder: Path, rows: int) -> None:
    """As if every picture had been read, and were another one."""
    with Facts(folder / "cache" / "facts", Ranks()) as facts:
        for start in range(0, rows, A_FOLDER):
            numbers = range(start, min(start + A_FOLDER, rows))
            stamp = stamp_hash(LocalFile(folder / str(start // A_FOLDER) / "one.png").stamp())
            names = [str(folder / f"{i // A_FOLDER}/{i}{part}.png") for i in numbers for part in "st"]
            noted = np.zeros(len(names), NAMED_FACT)
            fact = np.zeros(1, FACT)
            fact["stamp"], fact["width"], fact["height"], fact["rules"] = stamp, 1024, 768, RULES_VERSION
            noted["fact"] = fact[0]
            noted["name"] = np.frombuffer(b"".join(map(name_key, names)), np.uint8).reshape(-1, 16)
            digests = b"".join(hashlib.blake2b(name.encode(), digest_size=16).digest() for name in names)
            noted["fact"]["digest"] = np.frombuffer(digests, np.uint8).reshape(-1, 16)
            facts.note(noted)


def make_entries(folder: Path, table: SampleTable) -> None:
    """All that the rows need."""
    tensors = torch.zeros(16, 1, 1), torch.zeros(7, 4)
    with (
        ConditioningCache(folder / "cache", *KINDS, Ranks(), work=folder / "work") as cache,
        Surveyor(cache.facts, references=1) as surveyor,
        cache.latents.writer() as latents,
        cache.prompts.writer() as prompts,
    ):
        for chunk in surveyor.chunks(table, range(len(table))):
            needs = needs_of(chunk, MAKING)
            for key in needs.latents.reshape(-1, 16):
                latents.put(key.tobytes(), tensors[0])
            for key in needs.prompts:
                prompts.put(key.tobytes(), tensors[1])


def begin(folder: Path) -> dict[str, Any]:
    """What a run does before it builds its model."""
    times: dict[str, Any] = {}
    began = time.perf_counter()
    table = open_manifest(folder / "rows.jsonl", max_references=1, index_folder=folder / "cache" / "manifests")
    times["manifest"], last = time.perf_counter() - began, time.perf_counter()
    with ConditioningCache(folder / "cache", *KINDS, Ranks(), work=folder / "work") as cache:
        times["cache"], last = time.perf_counter() - last, time.perf_counter()
        encoders: Any = None  # nothing is missing, so nobody asks for them
        spec = SetSpec("train", table, MAKING)
        (prepared,) = prepare_sets([spec], cache, encoders, references=1, on_error="stop", new_bar=Bar)
        times["samples"] = time.perf_counter() - last
        assert prepared.made == 0
        assert len(prepared) == len(table)
        work = sum(file.stat().st_size for file in (folder / "work").iterdir())
        last = time.perf_counter()
        for i in range(0, len(table), max(1, len(table) // 1000)):
            cache.get(prepared.key(i))
        times["read 1000"] = time.perf_counter() - last
    times["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    times["columns"] = work
    return times


def measured(work: Any, *arguments: Any) -> Any:
    """Run in a process of its own, for its memory."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, arguments)


def prepare(folder: Path, rows: int) -> None:
    make(folder, rows)
    time.sleep(2.1)  # files as young as that are not remembered
    note_facts(folder, rows)
    table = open_manifest(folder / "rows.jsonl", max_references=1, index_folder=folder / "cache" / "manifests")
    make_entries(folder, table)


def main(counts: list[int]) -> None:
    print(
        "| rows | manifest | cache | samples | rows/s | peak memory | columns on disk |\n|---|---|---|---|---|---|---|"
    )
    for rows in counts:
        folder = Path(tempfile.mkdtemp(prefix="cache-benchmark-"))
        try:
            measured(prepare, folder, rows)
            measured(begin, folder)  # facts and indexes of the entries are merged by the first start
            got = measured(begin, folder)
            print(
                f"| {rows:,} | {got['manifest']:.2f} s | {got['cache']:.2f} s | {got['samples']:.1f} s "
                f"| {rows / got['samples']:,.0f} | {got['peak'] / 1e6:,.0f} MB | {got['columns'] / 1e6:,.0f} MB |",
                flush=True,
            )
        finally:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or [10_000])

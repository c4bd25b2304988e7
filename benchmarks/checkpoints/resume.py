"""Time and memory to load a checkpoint of 2 ranks on 2 and on 4: ours, torch DCP, DeepSpeed and its universal one.

The state is made of values that follow from name, kind and index, so that every element can be compared after loading,
on any number of ranks. Before each load, model and optimizer are filled with NaN.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import io
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.checkpoints.peers import (
    Dcp,
    DeepSpeed,
    computing_weights,
    deepspeed_ranges,
    folder_bytes,
    publish,
)
from benchmarks.engines import problem
from benchmarks.engines.tables import Table
from qwen_edit_zero.checkpoints.manifest import ModelReference
from qwen_edit_zero.checkpoints.reader import CheckpointReader
from qwen_edit_zero.checkpoints.shared_reading import opened_together
from qwen_edit_zero.checkpoints.writer import save_checkpoint
from qwen_edit_zero.flat_state import FlatRange
from qwen_edit_zero.training.loading import load_checkpoint
from qwen_edit_zero.training.resume import CheckpointChoice
from tests.ranks import run_ranks

CONFIG = problem.transformer_config(width=640, layers=5)
KINDS = ("fsdp2", "zero2", "zero3")
WRITTEN_ON, LOADED_ON = 2, (2, 4)
ROUNDS, CONVERSIONS = 5, 3
MIB = 1 << 20
CHUNK = 1 << 20  # elements
_CONVERT = "import sys; from benchmarks.checkpoints.resume import convert; convert(*sys.argv[1:])"
OURS, THEIRS, CONVERTED = "step-00000001", "theirs", "universal"


@dataclass
class _Found:
    """Seconds (the slowest rank) with a warm and a cold page cache, bytes beyond the state (the largest rank)."""

    warm: list[float] = field(default_factory=list)
    cold: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    differing: int = 0
    compared: int = 0
    size: int = 0


@dataclass(frozen=True)
class _Contender:
    """How a checkpoint is loaded, and what the loaded state then is."""

    path: Path
    load: Callable[[], object]
    ranges: Callable[[], Iterable[FlatRange]]
    computing: Callable[[], Iterable[tuple[torch.Tensor, torch.Tensor]]] = lambda: ()


def measure(rounds: int = ROUNDS, config: dict[str, Any] = CONFIG) -> list[Table]:
    """Medians over rounds, for each engine and number of ranks."""
    loads: list[list[object]] = []
    conversions: list[list[object]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        run_ranks(_write_ours, WRITTEN_ON, folder, config, timeout=1200)
        for kind in KINDS:
            run_ranks(_write_theirs, WRITTEN_ON, kind, folder, config, timeout=1200)
            for world in LOADED_ON:
                converting = None
                if kind != "fsdp2" and world != WRITTEN_ON:
                    converting, row = _conversion(kind, folder, min(rounds, CONVERSIONS))
                    conversions.append(row)
                found = run_ranks(_race, world, kind, folder, rounds, config, timeout=3000)[0]
                for name, f in found.items():
                    warm, cold = statistics.median(f.warm), statistics.median(f.cold)
                    if converting and name.startswith("DeepSpeed"):  # what was just converted is in the page cache
                        warm, cold = converting["warm"] + warm, converting["cold"] + warm
                    loads.append(
                        [
                            kind,
                            f"{WRITTEN_ON} to {world}",
                            name,
                            f"{f.size / 1e6:,.0f}",
                            f"{warm:.2f}",
                            f"{cold:.2f}",
                            f"{statistics.median(f.memory) / MIB:,.0f}",
                            f"{f.differing:,} of {f.compared / 1e6:,.0f} M",
                        ]
                    )
            for name in (THEIRS, CONVERTED):
                shutil.rmtree(folder / name, ignore_errors=True)
    s = problem.sizes(config)
    notes = (
        f"{s.whole / 1e6:.0f} M parameters (N) on {os.cpu_count()} cores, fp32 weights and two moments, 12 N = "
        f"{12 * s.whole / 1e6:,.0f} MB. The model is built and its optimizer has its state before; contenders in "
        f"turns, medians of {rounds} rounds after one that warms up; the slowest rank, the largest rank. MB: all files "
        "of the checkpoint that is loaded. Cold: its pages were dropped (POSIX_FADV_DONTNEED) first. Memory: the peak "
        "of anonymous resident memory of a rank while it loads, less what it held before, which includes the whole "
        "state. Differing: of all elements of weights and moments on all ranks, after the first and after the last "
        "load; with ZeRO also of the bf16 weights that compute, which must be the rounded masters. Ours is one "
        "checkpoint, written by FSDP2, for all rows. As a run does: every byte is compared with its checksum first, "
        "which nobody else does. DeepSpeed refuses another number of ranks; there the time is that of ds_to_universal "
        "(below) and then of the load, which finds the new files in the page cache."
    )
    columns = ["engine", "ranks", "contender", "MB", "warm, s", "cold, s", "beyond the state, MiB a rank", "differing"]
    tables = [Table("Loading a checkpoint", columns, loads, notes)]
    notes = (
        "In a process that has imported torch and DeepSpeed already (from a shell, about 10 s more), with DeepSpeed's "
        f"own numbers of workers; medians of {min(rounds, CONVERSIONS)}. Its files are not synced. Memory: "
        "proportional anonymous memory of the process and its workers together, at its peak. It needs a second copy of "
        "the checkpoint on the disk, and a third while it runs. Stage 2 needs `--inject_missing_state` with a model "
        "that is not Megatron's."
    )
    columns = ["engine", "read, MB", "written, MB", "warm, s", "cold, s", "peak, MiB"]
    return [*tables, Table("DeepSpeed's conversion, part of the rows above", columns, conversions, notes)]


def _race(rank: int, world: int, kind: str, folder: Path, rounds: int, config: dict[str, Any]) -> dict[str, _Found]:
    contenders = _contenders(kind, folder, config)
    found: dict[str, _Found] = defaultdict(_Found)
    for number in range(rounds + 1):
        for name, contender in contenders.items():
            found[name].size = folder_bytes(contender.path)
            for cache in ("warm", "cold"):
                _one_load(contender, cache, found[name] if number else _Found())
                if cache == "warm" and number in (0, rounds):
                    differing, compared = _differing(contender)
                    found[name].differing += differing
                    found[name].compared = compared
    return dict(found)


def _one_load(contender: _Contender, cache: str, found: _Found) -> None:
    for item in contender.ranges():
        item.values.fill_(float("nan"))
    for weights, _ in contender.computing():
        weights.fill_(float("nan"))
    if cache == "cold" and dist.get_rank() == 0:
        drop_pages(contender.path)
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what earlier loads freed counts again
    dist.barrier()
    with AnonymousPeak() as peak:
        began = time.perf_counter()
        contender.load()
        seconds = time.perf_counter() - began
    told = torch.tensor([seconds, float(peak.beyond)], dtype=torch.float64)
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    getattr(found, cache).append(told[0].item())
    found.memory.append(int(told[1]))


def _differing(contender: _Contender) -> tuple[int, int]:
    """Elements that are not as they were written, and all, on all ranks."""
    wrong = total = 0
    for item in contender.ranges():
        for offset, expected in _expected(item):
            wrong += int((item.values[offset : offset + expected.numel()] != expected).sum())
        total += item.values.numel()
    for weights, masters in contender.computing():
        wrong += int((weights != masters.to(weights.dtype)).sum())
        total += weights.numel()
    told = torch.tensor([wrong, total])
    dist.all_reduce(told)
    return int(told[0]), int(told[1])


def _expected(item: FlatRange) -> Iterator[tuple[int, torch.Tensor]]:
    """Offsets into a range and the values from there on: 24 bits of a product, in [0, 1), as moments may be."""
    seed = zlib.crc32(f"{item.kind} {item.name}".encode()) & 0x7FFFFFFF
    for offset in range(0, item.values.numel(), CHUNK):
        end = min(offset + CHUNK, item.values.numel())
        index = torch.arange(item.start + offset, item.start + end, dtype=torch.int32)
        yield offset, index.mul_(1_103_515_245).add_(seed).bitwise_and_(0xFFFFFF).float().mul_(2.0**-24)


def _fill(ranges: Iterable[FlatRange]) -> None:
    for item in ranges:
        for offset, values in _expected(item):
            item.values[offset : offset + values.numel()].copy_(values)


def _write_ours(rank: int, world: int, folder: Path, config: dict[str, Any]) -> None:
    engine = problem.build(problem.model_folder(config), problem.settings("fsdp2"))
    _fill(engine.local_state())
    save_checkpoint(
        folder / "ours",
        step=1,
        ranges=engine.local_state,
        run_state={"engine": {**engine.scalars(), "optimizer_steps": 1}},
        settings={},
        model=ModelReference(path="tiny", fingerprint="f", config={}),
        engine=engine.name,
    )
    engine.close()


def _write_theirs(rank: int, world: int, kind: str, folder: Path, config: dict[str, Any]) -> None:
    peer = _peer(kind, config)
    _fill(peer.ranges())
    if isinstance(peer, DeepSpeed):
        publish(peer._engine, int(kind[-1]))
    peer.save(folder / THEIRS)


def _peer(kind: str, config: dict[str, Any]) -> Dcp | DeepSpeed:
    model, run = problem.model_folder(config), problem.settings(kind, bucket=2_000_000)
    if kind == "fsdp2":
        return Dcp(model, run)
    peer = DeepSpeed(model, run, int(kind[-1]))
    peer.step(0, problem.batches(0, dist.get_rank(), 1))  # makes the moments
    return peer


def _contenders(kind: str, folder: Path, config: dict[str, Any]) -> dict[str, _Contender]:
    engine: Any = problem.build(problem.model_folder(config), problem.settings(kind, bucket=2_000_000))
    peer = _peer(kind, config)
    path = folder / "ours" / OURS
    same = dist.get_world_size() == WRITTEN_ON

    def load() -> None:
        with CheckpointReader(path) as reader:
            scalars: Any = reader.run_state["engine"]
            engine.load_state(reader, scalars)

    def check_and_load() -> None:
        found = CheckpointChoice(str(path), path.parent, lambda _: None, rank=dist.get_rank()).next()
        assert found == path
        with opened_together(path) as reader:
            load_checkpoint(engine, reader, lambda _: None)

    if isinstance(peer, Dcp):
        theirs = _Contender(folder / THEIRS, lambda: peer.load(folder / THEIRS), peer.ranges)
        return {
            "ours, as a run does": _Contender(path, check_and_load, engine.local_state),
            "ours, the load alone": _Contender(path, load, engine.local_state),
            "DCP load": theirs,
        }
    stage = int(kind[-1])
    place = folder / (THEIRS if same else CONVERTED)

    def ranges() -> Iterator[FlatRange]:
        return deepspeed_ranges(engine._engine, stage)

    def computing() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return computing_weights(engine._engine, stage)

    return {
        "ours, as a run does": _Contender(path, check_and_load, ranges, computing),
        "ours, the load alone": _Contender(path, load, ranges, computing),
        "DeepSpeed" if same else "DeepSpeed, converted and loaded": _Contender(
            place,
            lambda: peer.load(place, universal=not same),
            peer.ranges,
            lambda: computing_weights(peer._engine, stage),
        ),
    }


def _conversion(kind: str, folder: Path, rounds: int) -> tuple[dict[str, float], list[object]]:
    """Median seconds by state of the page cache, and a row of the table; the last result stays."""
    seconds: dict[str, list[float]] = {"warm": [], "cold": []}
    peaks = []
    for number in range(rounds + 1):
        for cache in ("warm", "cold"):
            shutil.rmtree(folder / CONVERTED, ignore_errors=True)
            if cache == "cold":
                drop_pages(folder / THEIRS)
            done = subprocess.run(
                [sys.executable, "-c", _CONVERT, str(folder / THEIRS), str(folder / CONVERTED)],
                cwd=problem.ROOT,
                check=True,
                capture_output=True,
                text=True,
                timeout=1200,
            )
            took, peak = done.stdout.splitlines()[-1].split()[1:]
            if number:
                seconds[cache].append(float(took))
                peaks.append(int(peak))
    medians = {cache: statistics.median(found) for cache, found in seconds.items()}
    return medians, [
        kind,
        f"{folder_bytes(folder / THEIRS) / 1e6:,.0f}",
        f"{folder_bytes(folder / CONVERTED) / 1e6:,.0f}",
        f"{medians['warm']:.2f}",
        f"{medians['cold']:.2f}",
        f"{statistics.median(peaks) / MIB:,.0f}",
    ]


def convert(source: str, target: str) -> None:
    """Convert in this process and print seconds and bytes of memory; its workers are forked, as DeepSpeed means it."""
    from deepspeed.checkpoint.ds_to_universal import main

    arguments = argparse.Namespace(
        input_folder=source,
        output_folder=target,
        num_extract_workers=4,
        num_merge_workers=2,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    with AnonymousPeak(with_children=True) as peak:
        began = time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            main(arguments)
        seconds = time.perf_counter() - began
    print(f"\nconverted {seconds} {peak.beyond}")


class AnonymousPeak:
    """The most anonymous memory that this process (and those it started) had within the context, beyond that before."""

    def __init__(self, *, with_children: bool = False) -> None:
        self._with_children = with_children
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.beyond = 0

    def __enter__(self) -> AnonymousPeak:
        self._before = self._now()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            self.beyond = max(self.beyond, self._now() - self._before)
            if self._done.wait(0.1 if self._with_children else 0.005):
                return

    def _now(self) -> int:
        if not self._with_children:
            return _field("/proc/self/status", "RssAnon:")
        return sum(_field(f"/proc/{pid}/smaps_rollup", "Pss_Anon:") for pid in _family(os.getpid()))


def _family(pid: int) -> list[int]:
    """A process and all that it started."""
    found = [pid]
    with contextlib.suppress(OSError):  # it has ended
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in children.read_text(encoding="ascii").split():
                found += _family(int(child))
    return found


def _field(file: str, name: str) -> int:
    """A size in a file of the kernel's, in bytes; 0 if the process has ended."""
    text = ""
    with contextlib.suppress(OSError):
        text = Path(file).read_text(encoding="ascii")
    return next((1024 * int(line.split()[1]) for line in text.splitlines() if line.startswith(name)), 0)


def drop_pages(path: Path) -> None:
    """Drop a folder's files from the page cache; they are synced first, else nothing is dropped."""
    for file in path.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)

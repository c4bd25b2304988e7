"""Peak resident memory of a rank that loads a folder of half a billion parameters."""

from __future__ import annotations

import gc
import re
import tempfile
import time
from pathlib import Path

from benchmarks.engines import problem
from benchmarks.engines.folder import make_folder
from benchmarks.engines.tables import Table
from qwen_edit_zero.edit_model.folder import open_model_folder
from qwen_edit_zero.edit_model.initial import initial_source
from qwen_edit_zero.edit_model.transformer import build_transformer
from qwen_edit_zero.engines.factory import make_engine
from tests.ranks import run_ranks

CONFIG = problem.transformer_config(width=1024, layers=13, head_dim=128)
BUCKET = 5_000_000
MIB = 1 << 20


def measure() -> list[Table]:
    """FSDP2 and ZeRO-3 on 2 and 4 ranks."""
    path = Path(tempfile.gettempdir()) / "qwen-edit-zero-benchmark" / "half-billion"
    make_folder(path, CONFIG)
    s = problem.sizes(CONFIG)
    block = s.blocks // CONFIG["num_layers"]
    rows: list[list[object]] = []
    for kind, share_bytes, formula in (("fsdp2", 12, "12 N/W"), ("zero3", 18, "18 N/W + 4 B")):
        for ranks in (2, 4):
            found = run_ranks(load, ranks, kind, str(path), timeout=600)
            peak = max(rank["peak"] for rank in found)
            held = max(rank["held"] for rank in found)
            share = share_bytes * s.whole / ranks + (4 * BUCKET if kind == "zero3" else 0)
            over = peak - share
            rows.append(
                [
                    kind,
                    ranks,
                    f"{peak / MIB:,.0f}",
                    f"{held / MIB:,.0f}",
                    f"{formula} = {share / MIB:,.0f}",
                    f"{over / MIB:+,.0f}",
                    f"{over / (4 * block):+.1f}",
                    f"{max(rank['seconds'] for rank in found):.1f}",
                ]
            )
    notes = (
        f"N = {s.whole / 1e6:.0f} M parameters in {CONFIG['num_layers']} blocks of {4 * block / MIB:.0f} MiB (fp32), "
        f"a folder of {2 * s.whole / MIB:,.0f} MiB in bf16, B = {BUCKET:,} elements in a bucket. Peak of the resident "
        f"set from before the model is built to after setup, less what was resident before; the largest rank. The "
        f"whole model in fp32 would be {4 * s.whole / MIB:,.0f} MiB. All of the optimizer's state is there at the end."
    )
    columns = ["engine", "ranks", "peak, MiB", "held after", "a rank's share", "peak beyond it", "in blocks", "seconds"]
    return [Table("Memory while loading", columns, rows, notes)]


def load(rank: int, world: int, kind: str, path: str) -> dict[str, float]:
    """Bytes of resident memory that loading adds at its peak, and that it leaves."""
    folder = open_model_folder(path)
    run = problem.settings(kind, bucket=BUCKET)
    engine = make_engine(run, device=problem.CPU)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak counts from now
    before, _ = _resident()
    began = time.perf_counter()
    with engine.init_context():
        module = build_transformer(folder)
    engine.setup(module, optimizer=run.optimizer, weights=initial_source(folder, module, seed=0))
    seconds = time.perf_counter() - began
    after, peak = _resident()
    engine.close()
    return {"peak": peak - before, "held": after - before, "seconds": seconds}


def _resident() -> tuple[int, int]:
    """Bytes resident in this process: now, and at the peak."""
    status = Path("/proc/self/status").read_text(encoding="ascii")

    def kilobytes(field: str) -> int:
        found = re.search(rf"{field}:\s+(\d+) kB", status)
        assert found
        return 1024 * int(found[1])

    return kilobytes("VmRSS"), kilobytes("VmHWM")

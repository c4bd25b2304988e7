"""One conversion of one folder, in a process of its own; prints the seconds it took without imports.

python -m benchmarks.consolidation.contestants NAME SOURCE OUT
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

Conversion = Callable[[Path, Path], None]


def _ours(dtype: str) -> Conversion:
    from qwen_edit_zero.checkpoints.consolidate import consolidate
    from qwen_edit_zero.edit_model.folder import open_model_folder

    def convert(source: Path, out: Path) -> None:
        consolidate(source, out, dtype=dtype, open_model=open_model_folder, say=lambda _: None)  # type: ignore[arg-type]

    return convert


def _zero_to_fp32() -> Conversion:
    from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict

    def convert(source: Path, out: Path) -> None:
        convert_zero_checkpoint_to_fp32_state_dict(str(source), str(out), safe_serialization=True)
        _sync(out)

    return convert


def _dcp_to_torch_save() -> Conversion:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    def convert(source: Path, out: Path) -> None:
        out.mkdir()
        dcp_to_torch_save(source, out / "whole.pt")
        _sync(out)

    return convert


def _cp() -> Conversion:
    def convert(source: Path, out: Path) -> None:
        out.mkdir()
        if os.spawnlp(os.P_WAIT, "cp", "cp", "--reflink=never", str(source), str(out / "copy")):
            raise SystemExit(f"cp of {source} failed")
        _sync(out)

    return convert


def _sync(folder: Path) -> None:
    """Ours ends with its bytes on the disk, so the others do too."""
    for path in folder.rglob("*"):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


CONTESTANTS: dict[str, Callable[[], Conversion]] = {
    "ours-fp32": lambda: _ours("fp32"),
    "ours-bf16": lambda: _ours("bf16"),
    "zero_to_fp32": _zero_to_fp32,
    "dcp_to_torch_save": _dcp_to_torch_save,
    "cp": _cp,
    "bare": lambda: lambda source, out: None,
}

if __name__ == "__main__":
    name, source, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    conversion = CONTESTANTS[name]()
    began = time.perf_counter()
    conversion(source, out)
    print(f"seconds {time.perf_counter() - began:.4f}")

"""Check one GPU in eight minutes: `python benchmarks/gpu_check/run.py`. See README.md beside this file."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from qwen_edit_zero.cluster.device_setup import choose_allocator, set_numerics  # noqa: E402
from qwen_edit_zero.cluster.identity import Identity  # noqa: E402
from qwen_edit_zero.errors import QwenEditError  # noqa: E402
from qwen_edit_zero.settings.models import Settings  # noqa: E402


def main(given: Sequence[str]) -> int:
    """Run the parts in the order of their worth; 0 if every check holds, 1 if not, 2 if it cannot be run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of two narrow blocks in place of the released one")
    parser.add_argument("--minutes", type=float, default=8.0, help="parts that do not fit any more are left out")
    parser.add_argument("--checks", nargs="*", metavar="NAME", help="run only these checks of the contract")
    parser.add_argument("--no-compile", action="store_true", help="leave out what compiles")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "benchmarks" / "gpu_check")
    arguments = parser.parse_args(given)
    if arguments.device == "cpu" and not arguments.tiny:
        parser.error("the full-size model is too large for a CPU; add --tiny")
    began = time.monotonic()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as in training
    defaults = Settings.model_validate({"run": {"max_steps": 1}})
    choose_allocator(defaults)

    from benchmarks.gpu_check.parts import check
    from qwen_edit_zero.cluster import process_group

    try:
        alone = Identity(0, 0, 1, 1, "single", "127.0.0.1", 0)
        device = process_group.start(alone, timeout_seconds=600, device=arguments.device)
    except QwenEditError as error:
        print(f"{error}\n(--tiny --device cpu runs the same code on a small model)", file=sys.stderr)
        return 2
    set_numerics(defaults, device)
    try:
        report = check(
            device,
            tiny=arguments.tiny,
            seconds=60 * arguments.minutes - (time.monotonic() - began),
            names=arguments.checks,
            compiled=not arguments.no_compile,
        )
    finally:
        process_group.stop()
    report.write(arguments.out)
    print(f"\n{report.markdown()}\n({time.monotonic() - began:.0f} s; also in {arguments.out})")
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

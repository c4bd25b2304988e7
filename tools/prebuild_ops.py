"""Compile, once at installation, the op that DeepSpeed otherwise compiles in the first training run on a CPU.

It takes one to two minutes with g++; the build is kept in torch's extension folder and found there by later runs.
"""

from __future__ import annotations

import os
import time

os.environ.setdefault("DS_ACCELERATOR", "cpu")


def main() -> None:
    """Build `deepspeed_shm_comm` on machines without a GPU; do nothing elsewhere."""
    import torch

    if torch.cuda.is_available():
        return
    from deepspeed.accelerator import get_accelerator

    builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
    if builder is None:
        return
    began = time.monotonic()
    print("Building DeepSpeed's shared-memory op for CPU ranks (one to two minutes, once) ...", flush=True)
    builder.load(verbose=False)
    print(f"Built in {time.monotonic() - began:.0f} s.")


if __name__ == "__main__":
    main()

"""`qwen-edit-zero doctor`: the training command with --doctor, and its own help."""

from __future__ import annotations

from collections.abc import Sequence

from qwen_edit_zero import train as train_script

PROG = "qwen-edit-zero doctor"
_HELP = f"""\
usage: {PROG} [RECIPE.yaml] [section.key=value ...] [--ds FILE.json] [--engine ENGINE]
                             [--timeout SECONDS] [--json FILE]

Look at everything that can be told before the first step, in under half a minute: code, packages, settings, data and
model the same on all nodes; shared folders; disk, memory, GPUs; the network, by pairs of nodes. Takes all options of
the training command. Exit status: 0 ready to train (perhaps with warnings), 2 something must be mended.

On several ranks it is started as training is, with --doctor:
  deepspeed --hostfile hostfiles/8node qwen_edit_zero/train.py RECIPE.yaml --ds ds_configs/zero2.json --doctor
  torchrun --nproc_per_node 8 qwen_edit_zero/train.py RECIPE.yaml --engine fsdp2 --doctor
  srun ... python qwen_edit_zero/train.py RECIPE.yaml --doctor

  --timeout SECONDS  wait so long for ranks, then name those that have not come (default 30)
  --json FILE        write what was found, and all measurements, on rank 0
"""


def run(given: Sequence[str]) -> int:
    """Examine this machine, or all ranks of a launcher; returns the exit status."""
    if {"-h", "--help"} & set(given):
        print(_HELP, end="")
        return 0
    return train_script.main([*given, "--doctor"], prog=PROG)

"""Help the `torchrun` command start this package's training script so that restarts and preemption work."""

from __future__ import annotations

from collections.abc import MutableMapping

SAVING_SECONDS = 300  # that ranks are given to save when torchrun is told to end; torch's own default is 30


def prepare(environ: MutableMapping[str, str]) -> None:
    """Set what torchrun reads from its environment, unless the user has.

    With the store of the rendezvous shared by one attempt after another, `--max-restarts` does not recover (torch
    2.13): ranks find addresses of the attempt before.
    """
    environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SAVING_SECONDS))


def is_torchrun(command: str) -> bool:
    """Whether the running command's first word is torchrun, also as `python -m torch.distributed.run`."""
    return command.endswith(("/torchrun", "/torch/distributed/run.py")) or command == "torchrun"

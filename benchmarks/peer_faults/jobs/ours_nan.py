"""Our training command, with the loss of one step made not a number on rank 0: NAN_STEP of the environment."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[3])
from qwen_edit_zero.train import main  # noqa: E402


def break_step(step: int) -> None:
    from qwen_edit_zero.cluster.pulse import position
    from qwen_edit_zero.training import task

    losses = task.EditTask.losses

    def broken(self: Any, *arguments: Any) -> Any:
        found = losses(self, *arguments)
        return found * math.nan if position.step == step and os.environ.get("RANK", "0") == "0" else found

    task.EditTask.losses = broken  # type: ignore[method-assign]


if __name__ == "__main__":
    break_step(int(os.environ.pop("NAN_STEP")))
    sys.exit(main())

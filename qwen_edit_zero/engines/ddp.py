"""DistributedDataParallel: every rank holds everything; gradients are all-reduced while backward runs."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from qwen_edit_zero.engines.parameters import replace_parameters
from qwen_edit_zero.engines.torch_engine import TorchEngine
from qwen_edit_zero.settings.models import Settings


class DDPEngine(TorchEngine):
    """Parameters, gradients and moments in fp32 on every rank; bf16 and fp16 by autocast."""

    name = "ddp"

    def __init__(self, settings: Settings, device: torch.device) -> None:
        super().__init__(settings, device)
        self._ddp: DistributedDataParallel | None = None

    def _wrap(self, module: torch.nn.Module) -> None:
        replace_parameters(module, lambda _, meta: torch.empty_like(meta, device=self.device))

    def _after_values(self, module: torch.nn.Module) -> torch.nn.Module:
        # The last block's text branch gets no gradient. `find_unused_parameters` walks the graph of the last
        # micro-batch once; `static_graph` would not allow the number of micro-batches to change between steps.
        self._ddp = DistributedDataParallel(
            module,
            find_unused_parameters=True,
            gradient_as_bucket_view=True,
            init_sync=False,  # every rank has read all weights; broadcasting them would move the whole model once more
        )
        self._ddp.register_comm_hook(None, _sum_over_ranks)
        return self._ddp

    def _local(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def _start(self, parameter: torch.nn.Parameter) -> int:
        return 0

    def _is_replicated(self, parameter: torch.nn.Parameter) -> bool:
        return True

    def forward(self, **inputs: Any) -> Any:
        with torch.autocast(self.device.type, self._dtype, enabled=self._dtype is not torch.float32):
            return super().forward(**inputs)

    def micro_step(self, *, is_last: bool) -> AbstractContextManager[None]:
        assert self._ddp is not None, "setup comes first"
        return nullcontext() if is_last else self._ddp.no_sync()

    def close(self) -> None:
        super().close()
        self._ddp = None


# DDP inspects these annotations, so they must be the types themselves: no `from __future__ import annotations` here.
def _sum_over_ranks(
    state: object,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """All-reduce a bucket. DDP's default divides by the number of ranks; here gradients are sums."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    total: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda future: future.value()[0])
    return total

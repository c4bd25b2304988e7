"""Copies of GPU memory are of the moment they were taken at."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from qwen_edit_zero.checkpoints.rank_file import plan_rank_file
from qwen_edit_zero.checkpoints.snapshot import HostSnapshot
from qwen_edit_zero.flat_state import FlatRange


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_copy_holds_what_was_there_though_the_original_changes_at_once() -> None:
    count = 40 * 2**20 + 3  # elements; over several slabs
    values, strided = torch.randn(count, device="cuda"), torch.randn(2 * 1001, device="cuda")[::2]
    host = torch.randn(1001)

    def ranges() -> Iterator[FlatRange]:
        for name, tensor in (("strided", strided), ("large", values), ("offloaded", host)):
            yield FlatRange(name, "param", (tensor.numel(),), 0, tensor)

    expected = [tensor.cpu().clone() for tensor in (strided, values, host)]
    plan, snapshot = plan_rank_file(ranges, {}), HostSnapshot(pinned=True)
    for _ in range(2):  # the second uses the memory of the first again
        for tensor, was in zip((strided, values, host), expected, strict=True):
            tensor.copy_(was)
        snapshot.take(plan, ranges)
        for tensor in (strided, values, host):
            tensor.zero_()
        for chunks, was in zip(snapshot.chunks(plan), expected, strict=True):
            assert b"".join(bytes(chunk) for chunk in chunks) == was.numpy().tobytes()
    assert all(slab.is_pinned() for slab in snapshot._slabs)

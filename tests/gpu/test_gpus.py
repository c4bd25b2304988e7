"""The engine contract on all GPUs of this machine, under NCCL: `python -m pytest -m gpu`."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.checks import Finding, all_checks
from tests.ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that torch can use"),
]


def one_check(rank: int, world: int, name: str) -> list[Finding]:
    return all_checks()[name](torch.device("cuda", rank))


@pytest.mark.parametrize("name", list(all_checks()))
def test_it_holds_on_every_gpu(name: str) -> None:
    for findings in run_ranks(one_check, torch.cuda.device_count(), name, device="cuda", timeout=500):
        assert findings
        assert [finding for finding in findings if not finding.holds] == []

"""The arithmetic of batches: global = micro x accumulation x ranks (or groups of ranks that split sequences)."""

from __future__ import annotations

from collections.abc import Mapping

from qwen_edit_zero.errors import SettingsError
from qwen_edit_zero.settings.models import BatchSettings

_MOST = 4096  # no micro size or number of ranks above this is suggested


def derive_accumulation(
    batch: BatchSettings, world_size: int, sources: Mapping[str, str] | None = None, *, sequence_parallel: int = 1
) -> int:
    """Return the micro-batches that each of `world_size` ranks runs in an optimizer step.

    Of the ranks, groups of `sequence_parallel`, which divides `world_size`, run the same micro-batches.
    Raises SettingsError listing sizes that fit if `global_size` is not a multiple of `micro_size` x the groups.
    """
    assert world_size >= 1
    assert world_size % sequence_parallel == 0
    shares = world_size // sequence_parallel
    per_round = batch.micro_size * shares
    if batch.global_size % per_round == 0:
        return batch.global_size // per_round
    where = sources or {}
    share, rest = divmod(batch.global_size, shares)
    micro = [n for n in range(1, min(share, _MOST) + 1) if share % n == 0] if rest == 0 else []
    below = batch.global_size // per_round * per_round
    sizes = [size for size in (below - per_round, below, below + per_round, below + 2 * per_round) if size > 0]
    counts = [n for n in range(1, min(batch.global_size, _MOST) + 1) if batch.global_size % (n * batch.micro_size) == 0]
    worlds = [n * sequence_parallel for n in counts]
    who = (
        _ranks(shares) if sequence_parallel == 1 else f"{shares} group{'s' * (shares > 1)} of {sequence_parallel} ranks"
    )
    raise SettingsError(
        f"batch.global_size {batch.global_size}{_from(where, 'batch.global_size')} does not divide over "
        f"{who} with batch.micro_size {batch.micro_size}{_from(where, 'batch.micro_size')}: "
        f"it must be a multiple of {shares} x {batch.micro_size} = {per_round}\n"
        f"  global sizes that fit: {_listed(sizes)}\n"
        f"  micro sizes that fit global size {batch.global_size}: "
        + (_listed(micro) if micro else f"none, as it is no multiple of {shares}")
        + f"\n  numbers of ranks that fit both as they are: {_listed(worlds) if worlds else 'none'}"
    )


def _ranks(count: int) -> str:
    return f"{count} rank{'s' if count > 1 else ''}"


def _from(sources: Mapping[str, str], name: str) -> str:
    return f" ({sources[name]})" if name in sources else ""


def _listed(numbers: list[int]) -> str:
    shown = [str(n) for n in numbers]
    return ", ".join(shown if len(shown) <= 12 else [*shown[:8], "...", *shown[-3:]])

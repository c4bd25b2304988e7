"""A micro-batch of cached samples of one bucket, padded and ready for a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch.nn.utils.rnn import pad_sequence

from qwen_edit_zero.edit_data.cache.store import CachedSample

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class EditBatch:
    """B samples with the same target size and the same ordered reference sizes.

    Attributes:
        target_latents: (B, 16, h, w).
        reference_latents: (B, 16, h_i, w_i), one a reference, in order.
        prompt_embeds: (B, L, D), padded with zeros on the right to the longest prompt.
        prompt_mask: (B, L) bool, True at real positions; None where nothing is padded, which fast attention needs.
        weights: (B,) fp32; factor of each sample's loss, 0 in a filler.
        sample_ids: B ids; with seed and epoch they determine noise and sigma.
        epoch: epoch the samples belong to, from 0.
    """

    target_latents: torch.Tensor
    reference_latents: tuple[torch.Tensor, ...]
    prompt_embeds: torch.Tensor
    prompt_mask: torch.Tensor | None
    weights: torch.Tensor
    sample_ids: tuple[str, ...]
    epoch: int

    def __len__(self) -> int:
        return len(self.sample_ids)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> EditBatch:
        """The batch on another device; `non_blocking` overlaps the copy if the batch is pinned."""
        return self._map(lambda t: t.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> EditBatch:
        """The batch in page-locked host memory. Needs a CUDA device."""
        return self._map(torch.Tensor.pin_memory)

    def _map(self, move: Callable[[torch.Tensor], torch.Tensor]) -> EditBatch:
        return replace(
            self,
            target_latents=move(self.target_latents),
            reference_latents=tuple(move(t) for t in self.reference_latents),
            prompt_embeds=move(self.prompt_embeds),
            prompt_mask=None if self.prompt_mask is None else move(self.prompt_mask),
            weights=move(self.weights),
        )


def collate(
    entries: Sequence[CachedSample], *, weights: Sequence[float], sample_ids: Sequence[str], epoch: int
) -> EditBatch:
    """Stack entries of one bucket. An entry's prompt is padded by zeros only, so padding never mixes into values."""
    assert entries
    assert len(entries) == len(weights) == len(sample_ids)
    shapes = {tuple(tuple(t.shape) for t in (e.target_latent, *e.reference_latents)) for e in entries}
    assert len(shapes) == 1, f"samples {list(sample_ids)} are of different buckets: {sorted(shapes)}"
    lengths = torch.tensor([len(e.prompt_embeds) for e in entries])
    longest = int(lengths.max())
    return EditBatch(
        target_latents=torch.stack([e.target_latent for e in entries]),
        reference_latents=tuple(torch.stack(r) for r in zip(*(e.reference_latents for e in entries), strict=True)),
        prompt_embeds=pad_sequence([e.prompt_embeds for e in entries], batch_first=True),
        prompt_mask=None if bool((lengths == longest).all()) else torch.arange(longest) < lengths[:, None],
        weights=torch.tensor(list(weights), dtype=torch.float32),
        sample_ids=tuple(sample_ids),
        epoch=epoch,
    )

"""A micro-batch of cached samples of one bucket, padded and ready for a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch.nn.utils.rnn import pad_sequence


class Entry(Protocol):
    """What the encoders made of a sample, on the CPU.

    Attributes:
        target_latent: (16, h, w), normalised.
        reference_latents: (16, h_i, w_i) each, in the sample's order.
        prompt_embeds: (L, D), without padding.
        mask: (h, w) uint8, 255 where the edit is; None if the sample has none.
    """

    @property
    def target_latent(self) -> torch.Tensor: ...
    @property
    def reference_latents(self) -> tuple[torch.Tensor, ...]: ...
    @property
    def prompt_embeds(self) -> torch.Tensor: ...
    @property
    def mask(self) -> torch.Tensor | None: ...


@dataclass(frozen=True)
class EditBatch:
    """B samples of one bucket: with the same target size and the same ordered reference sizes.

    The transformer takes its rotary positions from the first sample of a batch, so all of a batch must have one grid.

    Attributes:
        target_latents: (B, 16, h, w).
        reference_latents: (B, 16, h_i, w_i), one a reference, in order.
        prompt_embeds: (B, L, D), padded with zeros on the right to the longest prompt.
        prompt_mask: (B, L) bool, True at real positions; None where nothing is padded, which fast attention needs.
        weights: (B,) fp32; factor of each sample's loss, 0 in a filler.
        sample_ids: B ids; with seed, epoch and draw they determine noise and sigma.
        epoch: epoch the samples belong to, from 0.
        draws: how often each sample came before in the epoch; empty: never.
        mask: (B, h, w) fp32 in [0, 1], 1 where the edit is; None if no sample has a mask. All 0 for a sample without.
        filler: whether the batch is there only because other ranks have one: it counts for nothing.
    """

    target_latents: torch.Tensor
    reference_latents: tuple[torch.Tensor, ...]
    prompt_embeds: torch.Tensor
    prompt_mask: torch.Tensor | None
    weights: torch.Tensor
    sample_ids: tuple[str, ...]
    epoch: int
    draws: tuple[int, ...] = ()
    mask: torch.Tensor | None = None
    filler: bool = False

    def __len__(self) -> int:
        return len(self.sample_ids)

    def tensors(self) -> Iterator[torch.Tensor]:
        """All that travel to a device."""
        yield from (self.target_latents, *self.reference_latents, self.prompt_embeds, self.weights)
        yield from (tensor for tensor in (self.prompt_mask, self.mask) if tensor is not None)

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
            mask=None if self.mask is None else move(self.mask),
        )


def collate(
    entries: Sequence[Entry],
    *,
    weights: Sequence[float],
    sample_ids: Sequence[str],
    epoch: int,
    draws: Sequence[int] = (),
    filler: bool = False,
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
        draws=tuple(draws),
        mask=_masks(entries),
        filler=filler,
    )


def _masks(entries: Sequence[Entry]) -> torch.Tensor | None:
    masks = [entry.mask for entry in entries]
    if all(mask is None for mask in masks):
        return None
    shape = entries[0].target_latent.shape[-2:]
    assert all(mask is None or mask.shape == shape for mask in masks), "masks lie on the grid of the target's latent"
    return torch.stack([torch.zeros(shape) if mask is None else mask.float() / 255 for mask in masks])

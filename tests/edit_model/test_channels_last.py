"""The VAE in the other layout."""

from __future__ import annotations

from pathlib import Path

import torch

from qwen_edit_zero.edit_model.components import load_vae
from qwen_edit_zero.edit_model.folder import open_model_folder


def test_channels_last_changes_the_layout_of_convolutions_and_only_rounding_of_results(plus_path: Path) -> None:
    folder = open_model_folder(plus_path)
    plain, last = load_vae(folder), load_vae(folder, channels_last=True)
    weights = {name: p for name, p in last.named_parameters() if name.endswith("weight") and p.ndim in (4, 5)}
    assert {p.ndim for p in weights.values()} == {4, 5}
    assert all(p.stride(1) == 1 for p in weights.values())
    picture = torch.rand(1, 3, 1, 64, 96, generator=torch.Generator().manual_seed(0)) * 2 - 1
    with torch.no_grad():
        latents = [vae.encode(picture).latent_dist.mode() for vae in (plain, last)]
        pictures = [vae.decode(latents[0]).sample for vae in (plain, last)]
    for expected, found in (latents, pictures):
        assert (found - expected).norm() < 1e-5 * expected.norm()

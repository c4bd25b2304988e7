"""Sizes of pictures, latents and token grids."""

from __future__ import annotations

from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import calculate_dimensions

from qwen_edit_zero.errors import DataError

VAE_FACTOR = 8  # pixels a latent cell, each way
PATCH = 2  # latent cells a token, each way
_MAX_ASPECT = 200  # limit of the vision-language model's own resizing


def size_at_area(size: tuple[int, int], area: int) -> tuple[int, int]:
    """(width, height) of about `area` pixels with the aspect of `size`, each rounded to 32: the pipeline's own rule.

    Raises DataError for a picture so narrow that a side would round to nothing, or that the vision-language model
    refuses.
    """
    width, height = size
    if min(size) < 1 or max(size) > _MAX_ASPECT * min(size):
        raise DataError(
            f"a picture of {width}x{height} pixels cannot be used: the model takes sides of at most {_MAX_ASPECT}:1. "
            "Crop it or leave it out"
        )
    new_width, new_height = calculate_dimensions(area, width / height)
    if min(new_width, new_height) < 32 or max(new_width, new_height) > _MAX_ASPECT * min(new_width, new_height):
        raise DataError(
            f"a picture of {width}x{height} pixels cannot be used: resized to {area} pixels it would be "
            f"{new_width}x{new_height}. Crop it, leave it out, or raise data.vae_area and data.condition_area"
        )
    return int(new_width), int(new_height)


def latent_size(size: tuple[int, int], area: int) -> tuple[int, int]:
    """(h, w) of the latent of a picture of `size` = (width, height) at `area` pixels. Raises DataError as above."""
    width, height = size_at_area(size, area)
    return height // VAE_FACTOR, width // VAE_FACTOR


def token_grid(latent: tuple[int, ...]) -> tuple[int, int, int]:
    """(frames, rows, columns) of tokens of a latent whose last two dimensions are (h, w): an entry of `img_shapes`."""
    return 1, latent[-2] // PATCH, latent[-1] // PATCH


def token_count(*latents: tuple[int, ...]) -> int:
    """Image tokens of latents of these shapes together."""
    return sum(rows * columns for _, rows, columns in map(token_grid, latents))

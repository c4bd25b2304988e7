"""The tiny model: a complete Qwen-Image-Edit-2509 folder, small enough to train on a CPU.

Shipped are its configs, tokenizer and the trained VAE (`qwen_edit_zero/assets/tiny`). The text encoder and the
transformer have random weights, which follow from a fixed seed and are therefore written on first use, not shipped.
Nothing else treats this folder as special: diffusers' `QwenImageEditPlusPipeline.from_pretrained` loads it.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import shutil
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwen_edit_zero.assets import asset_path

if TYPE_CHECKING:
    import torch

_SEED = 2509
_VAE_WEIGHTS = "vae/last_time_slice.safetensors"
_TOKENIZER_FILES = ("vocab.json", "merges.txt", "tokenizer_config.json")


def materialise_tiny_model(cache_dir: Path | None = None) -> Path:
    """Path of the complete tiny model folder, which is written first where it does not exist yet.

    Any number of processes may call this at once: each writes a folder of its own and the first to finish wins. The
    folder's name holds a fingerprint of all that decides its content, so an old one is never taken for a new one.

    Args:
        cache_dir: where to keep it. Default: `$QWEN_EDIT_ZERO_CACHE`, else `~/.cache/qwen_edit_zero`.

    Raises:
        FileNotFoundError: the package was installed without its assets.
        OSError: the cache folder cannot be written.
    """
    parent = cache_dir or Path(os.environ.get("QWEN_EDIT_ZERO_CACHE") or Path.home() / ".cache/qwen_edit_zero")
    parent = parent.expanduser().absolute()
    folder = parent / f"tiny-{_fingerprint()}"
    if folder.is_dir():
        return folder
    parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=parent))
    try:
        _write(unfinished)
        unfinished.chmod(0o755)  # mkdtemp and safetensors make theirs private
        for path in unfinished.rglob("*.safetensors"):
            path.chmod(0o644)
        try:
            unfinished.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


@functools.cache
def _fingerprint() -> str:
    """Digest of the template and of this file, which has the rules for the weights."""
    template = asset_path("tiny")
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for path in sorted(p for p in template.rglob("*") if p.is_file()):
        digest.update(path.relative_to(template).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:12]


def _write(folder: Path) -> None:
    import torch
    from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
    from safetensors.torch import load_file
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # a bar for each of a few small files, from every process

    shutil.copytree(asset_path("tiny"), folder, dirs_exist_ok=True)
    for name in _TOKENIZER_FILES:
        shutil.copyfile(folder / "tokenizer" / name, folder / "processor" / name)

    with torch.device("meta"):
        text_encoder = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig.from_pretrained(folder / "text_encoder"))
        transformer = QwenImageTransformer2DModel.from_config(
            _config(QwenImageTransformer2DModel, folder / "transformer")
        )
        vae = AutoencoderKLQwenImage.from_config(_config(AutoencoderKLQwenImage, folder / "vae"))

    def fill(module: torch.nn.Module, values: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
        module.load_state_dict({name: value.to(dtype) for name, value in values.items()}, assign=True)

    text_shapes = {name: tuple(p.shape) for name, p in text_encoder.state_dict().items()}
    fill(text_encoder, {n: text_encoder_tensor(n, s) for n, s in text_shapes.items()}, torch.bfloat16)
    text_encoder.save_pretrained(folder / "text_encoder")

    shapes = {name: tuple(p.shape) for name, p in transformer.state_dict().items()}
    axes = transformer.config.axes_dims_rope
    fill(transformer, {n: transformer_tensor(n, s, axes) for n, s in shapes.items()}, torch.bfloat16)
    transformer.save_pretrained(folder / "transformer", max_shard_size="5MB")

    slices = load_file(folder / _VAE_WEIGHTS)
    (folder / _VAE_WEIGHTS).unlink()
    fill(vae, to_video_weights(slices, {n: tuple(p.shape) for n, p in vae.state_dict().items()}), torch.float32)
    vae.save_pretrained(folder / "vae")


def _config(cls: Any, folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = cls.load_config(folder)
    return config


def to_video_weights(
    slices: Mapping[str, torch.Tensor], shapes: Mapping[str, Sequence[int]]
) -> dict[str, torch.Tensor]:
    """Weights of a 2-D autoencoder in the shapes of the causal 3-D `AutoencoderKLQwenImage`.

    With one frame a causal 3-D convolution sees nothing but zeros in all time slices of its kernel except the last. So
    2-D kernels go to the last slice, and the temporal resampling convolutions, which one frame skips, stay zero.

    Args:
        slices: name -> 2-D kernels (out, in, h, w), biases (out,) and gains (channels, 1, 1).
        shapes: name -> shape in the 3-D class; a superset of the names of `slices`.
    """
    import torch

    assert set(slices) <= set(shapes), f"not in the 3-D class: {sorted(set(slices) - set(shapes))}"
    weights = {name: torch.zeros(tuple(shape)) for name, shape in shapes.items()}
    for name, value in slices.items():
        full = weights[name]
        if full.ndim == 5:
            full[:, :, -1] = value.float()
        else:
            full.copy_(value.float().reshape(full.shape))
    return weights


def _normal(name: str, shape: Sequence[int], std: float) -> torch.Tensor:
    """Gaussian values that depend on the tensor's name and shape only."""
    import numpy as np
    import torch

    rng = np.random.default_rng([_SEED, zlib.crc32(name.encode())])
    return torch.from_numpy(rng.standard_normal(tuple(shape), dtype=np.float32) * np.float32(std))


def _fan_in(shape: Sequence[int]) -> int:
    return math.prod(shape[1:])


def text_encoder_tensor(name: str, shape: Sequence[int]) -> torch.Tensor:
    """Random weight of the text encoder.

    Token embeddings have unit variance and every layer adds less than that, so that the last hidden states keep telling
    tokens, hence instructions, apart; picture tokens leave the vision tower with about the same variance.
    """
    import torch

    if len(shape) == 1:
        return torch.zeros(*shape) if name.endswith("bias") else torch.ones(*shape)
    if name.endswith("embed_tokens.weight"):
        return _normal(name, shape, 1.0)
    gain = 1.7 if ".merger." in name else 0.7
    return _normal(name, shape, gain / math.sqrt(_fan_in(shape)))


def transformer_tensor(name: str, shape: Sequence[int], axes: Sequence[int]) -> torch.Tensor:
    """Initial weight of the transformer, made to be trained from scratch in minutes.

    - Residual branches start half open and hardly modulated by the time step, the output near zero.
    - Some heads start local, as in ConViT (d'Ascoli et al., 2021): see `_place_bias`. What they find is copied rather
      than scrambled, their output projection being the transpose of their value projection.

    Args:
        axes: the config's `axes_dims_rope`; their sum is the width of a head.
    """
    import torch

    width = sum(axes)
    if name.endswith(("attn.to_q.bias", "attn.to_k.bias")):
        offsets = (*_HEAD_OFFSETS, *[None] * (shape[0] // width))[: shape[0] // width]
        query = name.endswith("to_q.bias")
        return torch.cat([_place_bias(axes, offset if query or offset is None else 0) for offset in offsets])
    if name.endswith("_mod.1.bias"):
        shift_scale_gate = torch.tensor([0.0, 0.0, 0.5]).repeat(2)
        return shift_scale_gate.repeat_interleave(shape[0] // 6)
    if len(shape) == 1:
        value = _LOCAL_SHARPNESS if name.endswith(("attn.norm_q.weight", "attn.norm_k.weight")) else 1.0
        return torch.zeros(*shape) if name.endswith("bias") else torch.full(tuple(shape), value)
    if name.endswith("attn.to_out.0.weight"):
        return transformer_tensor(name.replace("to_out.0", "to_v"), shape[::-1], axes).T.contiguous()
    gain = 1.0
    if name == "proj_out.weight":
        gain = 0.1
    elif "_mod.1." in name or name.startswith("norm_out."):
        gain = 0.3
    weight = _normal(name, shape, gain / math.sqrt(_fan_in(shape)))
    if name.endswith(("attn.to_q.weight", "attn.to_k.weight")):
        weight[: len(_HEAD_OFFSETS) * width] *= 0.5
    return weight


# Pictures are numbered along RoPE's first axis: 0 is the target, 1 to 3 are the references. For each local head, how
# far ahead its target tokens look.
_HEAD_OFFSETS = (1, 1, 2, 3, 0)
_LOCAL_SHARPNESS = 1.8


def _place_bias(axes: Sequence[int], offset: int | None) -> torch.Tensor:
    """Constant part of a head's queries (with the head's offset) or keys (offset 0); zeros for None.

    RoPE turns pair i of an axis by position * theta_i. For the same constant in query and key, the score between two
    places is therefore a sum of cos(distance * theta_i): largest at the same place. Turning the query's pairs of the
    first axis by offset * theta_i in advance moves that maximum to the picture `offset` further on.
    """
    import torch

    pairs: list[tuple[float, float]] = []
    for axis, width in enumerate(axes):
        fast, slow = (4.8, 1.2) if axis == 0 else (4.0, 2.0)
        for i in range(width // 2):
            size = 0.0 if offset is None else (fast, slow)[i] if i < 2 else 0.0
            angle = (offset or 0) * 10000 ** (-2 * i / width) if axis == 0 else 0.0
            pairs.append((size * math.cos(angle), size * math.sin(angle)))
    return torch.tensor(pairs).flatten()

"""A 2-D twin of diffusers' `AutoencoderKLQwenImage`, for training it on single pictures.

With one frame, a causal 3-D convolution sees zeros in all but the last time slice of its kernel, and the temporal
resampling convolutions are skipped. The 2-D network below computes the same function with a third of the arithmetic.
Parameter names are those of the diffusers class; only shapes differ, see `to_video_weights` in
`qwen_edit_zero.edit_model.tiny`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ChannelNorm(nn.Module):
    """Root-mean-square norm over channels with a gain (`QwenImageRMS_norm`)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.scale = channels**0.5
        self.gamma = nn.Parameter(torch.ones(channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=1) * (self.gamma * self.scale)


class ResidualBlock(nn.Module):
    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__()
        self.norm1 = ChannelNorm(c_in)
        self.conv1 = nn.Conv2d(c_in, c_out, 3, padding=1)
        self.norm2 = ChannelNorm(c_out)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, padding=1)
        self.conv_shortcut: nn.Module = nn.Conv2d(c_in, c_out, 1) if c_in != c_out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))
        return h + self.conv_shortcut(x)


class Attention(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = ChannelNorm(channels)
        self.to_qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.proj = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.to_qkv(self.norm(x)).flatten(2).transpose(1, 2).unsqueeze(1).chunk(3, dim=-1)
        h = F.scaled_dot_product_attention(q, k, v).squeeze(1).transpose(1, 2)
        return x + self.proj(h.reshape(x.shape))


class Middle(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.resnets = nn.ModuleList([ResidualBlock(channels, channels), ResidualBlock(channels, channels)])
        self.attentions = nn.ModuleList([Attention(channels)])

    def forward(self, x: Tensor) -> Tensor:
        return self.resnets[1](self.attentions[0](self.resnets[0](x)))  # type: ignore[no-any-return]


class Down(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.resample = nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(channels, channels, 3, stride=2))

    def forward(self, x: Tensor) -> Tensor:
        return self.resample(x)  # type: ignore[no-any-return]


class Up(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.resample = nn.Sequential(
            nn.Upsample(scale_factor=2.0, mode="nearest-exact"), nn.Conv2d(channels, channels // 2, 3, padding=1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.resample(x)  # type: ignore[no-any-return]


class UpBlock(nn.Module):
    def __init__(self, c_in: int, c_out: int, blocks: int, up: bool) -> None:
        super().__init__()
        self.resnets = nn.ModuleList([ResidualBlock(c_in if i == 0 else c_out, c_out) for i in range(blocks)])
        self.upsamplers = nn.ModuleList([Up(c_out)]) if up else None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.resnets:
            x = block(x)
        return x if self.upsamplers is None else self.upsamplers[0](x)


class Encoder(nn.Module):
    def __init__(self, dims: Sequence[int], z_out: int, blocks: int) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(3, dims[0], 3, padding=1)
        layers: list[nn.Module] = []
        for i, (c_in, c_out) in enumerate(pairwise(dims)):
            layers += [ResidualBlock(c_in if j == 0 else c_out, c_out) for j in range(blocks)]
            if i != len(dims) - 2:
                layers.append(Down(c_out))
        self.down_blocks = nn.ModuleList(layers)
        self.mid_block = Middle(dims[-1])
        self.norm_out = ChannelNorm(dims[-1])
        self.conv_out = nn.Conv2d(dims[-1], z_out, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for layer in self.down_blocks:
            x = layer(x)
        return self.conv_out(F.silu(self.norm_out(self.mid_block(x))))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    def __init__(self, dims: Sequence[int], z_dim: int, blocks: int) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(z_dim, dims[0], 3, padding=1)
        self.mid_block = Middle(dims[0])
        stages = list(pairwise(dims))
        self.up_blocks = nn.ModuleList(
            [
                UpBlock(c_in if i == 0 else c_in // 2, c_out, blocks + 1, up=i != len(stages) - 1)
                for i, (c_in, c_out) in enumerate(stages)
            ]
        )
        self.norm_out = ChannelNorm(dims[-1])
        self.conv_out = nn.Conv2d(dims[-1], 3, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        x = self.mid_block(self.conv_in(z))
        for block in self.up_blocks:
            x = block(x)
        return self.conv_out(F.silu(self.norm_out(x)))  # type: ignore[no-any-return]


class ImageVAE(nn.Module):
    """Encoder and decoder of the twin; pictures are (B, 3, H, W) in [-1, 1], latents (B, z_dim, H/8, W/8)."""

    def __init__(self, base_dim: int, z_dim: int, dim_mult: Sequence[int], num_res_blocks: int) -> None:
        super().__init__()
        widths = [base_dim * m for m in dim_mult]
        self.encoder = Encoder([base_dim, *widths], 2 * z_dim, num_res_blocks)
        self.quant_conv = nn.Conv2d(2 * z_dim, 2 * z_dim, 1)
        self.post_quant_conv = nn.Conv2d(z_dim, z_dim, 1)
        self.decoder = Decoder([widths[-1], *reversed(widths)], z_dim, num_res_blocks)

    def encode(self, pictures: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log-variance of the posterior, each (B, z_dim, H/8, W/8)."""
        mean, logvar = self.quant_conv(self.encoder(pictures)).chunk(2, dim=1)
        return mean, logvar.clamp(-30.0, 20.0)

    def decode(self, latents: Tensor) -> Tensor:
        """Pictures, not clamped."""
        return self.decoder(self.post_quant_conv(latents))  # type: ignore[no-any-return]

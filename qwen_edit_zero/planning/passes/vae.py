"""Memory and arithmetic of the VAE, `AutoencoderKLQwenImage`, on one picture: encoding it, and decoding a latent.

It is run, sizes only, on the tape that also runs the transformer; nothing needs gradients. Two of its ways take memory:
each of its causal convolutions pads the picture with two empty frames, so three frames lie in memory; and each keeps a
copy of its input for a next frame that never comes, until the picture is done. Workspace of kernels is not in here.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qwen_edit_zero.planning.autograd.operations import (
    activation,
    add,
    chunk,
    copy,
    multiply,
    plus_one,
    times,
    to,
    view,
)
from qwen_edit_zero.planning.autograd.tape import Shape, Tape, Value

RELEASED_VAE: Mapping[str, Any] = {"base_dim": 96, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2,
                                   "temperal_downsample": [False, True, True], "z_dim": 16}  # fmt: skip


@dataclass(frozen=True)
class VaeShape:
    """Sizes of the VAE: channels at each scale, blocks at each, which steps halve time too, channels of a latent."""

    base: int
    multipliers: tuple[int, ...]
    blocks: int
    in_time: tuple[bool, ...]
    latent: int

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> VaeShape:
        """Read a `vae/config.json`; what it leaves out is as in the class."""
        config = {**RELEASED_VAE, **config}
        return cls(
            int(config["base_dim"]), tuple(config["dim_mult"]), int(config["num_res_blocks"]),
            tuple(config["temperal_downsample"]), int(config["z_dim"]),
        )  # fmt: skip


@dataclass(frozen=True)
class OnePicture:
    """What one picture costs one half of the VAE.

    Attributes:
        elements: of the weights of that half.
        peak: bytes that are there at most, the picture and the result included, weights not.
        flops: of convolutions and attention, 2 a multiply-add.
    """

    elements: int
    peak: int
    flops: int


@functools.lru_cache(maxsize=64)
def encoding_of_picture(shape: VaeShape, width: int, height: int, dtype: str) -> OnePicture:
    """From a picture of `width` x `height` pixels, multiples of 8, to its latent."""
    run = _Run(dtype)
    picture = run.given((1, 3, 1, height, width))
    x = run.caching(picture, shape.base)
    for scale, multiplier in enumerate(shape.multipliers):
        for _ in range(shape.blocks):
            x = run.residual(x, shape.base * multiplier)
        if scale + 1 < len(shape.multipliers):
            x = run.halve(x, in_time=shape.in_time[scale])
    x = run.middle(x)
    x = run.head(x, 2 * shape.latent)
    run.conversion(x)
    return run.result()


@functools.lru_cache(maxsize=64)
def decoding_of_picture(shape: VaeShape, width: int, height: int, dtype: str) -> OnePicture:
    """From a latent to its picture of `width` x `height` pixels."""
    run = _Run(dtype)
    scales = len(shape.multipliers) - 1
    latent = run.given((1, shape.latent, 1, height >> scales, width >> scales))
    z = run.conversion(latent)
    x = run.caching(z, shape.base * shape.multipliers[-1])
    x = run.middle(x)
    for scale, multiplier in enumerate(reversed(shape.multipliers)):
        x = run.residuals(x, shape.blocks + 1, shape.base * multiplier)
        if scale < scales:
            x = run.double(x, in_time=shape.in_time[::-1][scale])
    x = run.head(x, 3)
    run.clamp(x)
    return run.result()


class _Run:
    """The parts of both halves; variables are kept as long as in diffusers."""

    def __init__(self, dtype: str) -> None:
        self._tape, self._dtype, self._elements = Tape(autocast=None, on_gpu=True), dtype, 0
        self._caches: list[Value] = []

    def result(self) -> OnePicture:
        return OnePicture(self._elements, self._tape.peak, self._tape.outer_flops)

    def given(self, shape: Shape) -> Value:
        return Value(shape, self._dtype, self._tape.new(shape, self._dtype))

    def _convolved(self, x: Value, shape: Shape, kernel: int) -> Value:
        """`kernel` taps; weights and a bias."""
        outputs = shape[1]
        self._elements += outputs * (x.shape[1] * kernel + 1)
        out = self.given(shape)
        self._tape.compute(2 * out.elements * x.shape[1] * kernel)
        return out

    def _causal(self, x: Value, outputs: int, kernel: int = 3) -> Value:
        """A causal 3-D convolution: padding on each side, and two empty frames in front."""
        batch, channels, frames, height, width = x.shape
        more = kernel - 1
        padded = self.given((batch, channels, frames + more, height + more, width + more))
        return self._convolved(padded, (batch, outputs, frames, height, width), kernel**3)

    def caching(self, x: Value, outputs: int) -> Value:
        self._caches.append(copy(self._tape, x))
        return self._causal(x, outputs)

    def conversion(self, x: Value) -> Value:
        return self._causal(x, x.shape[1], kernel=1)

    def _norm(self, x: Value) -> Value:
        tape, dtype = self._tape, x.dtype
        self._elements += x.shape[1]
        in_fp32 = to(tape, x, "fp32")
        norm = Value((1, 1, *x.shape[2:]), "fp32", tape.new((1, 1, *x.shape[2:]), "fp32"))
        normalized = multiply(tape, in_fp32, norm, "norm")
        del in_fp32, norm
        normalized = to(tape, normalized, dtype)
        return plus_one(tape, times(tape, times(tape, normalized)))  # scale, gamma, bias

    def residual(self, x: Value, outputs: int) -> Value:
        tape = self._tape
        h = x if x.shape[1] == outputs else self._causal(x, outputs, kernel=1)
        x = self._norm(x)
        x = activation(tape, x, "silu")
        x = self.caching(x, outputs)
        x = self._norm(x)
        x = activation(tape, x, "silu")
        x = self.caching(x, outputs)
        return add(tape, x, h)

    def residuals(self, x: Value, count: int, outputs: int) -> Value:
        """The caller's `x` stays until they are through."""
        for _ in range(count):
            x = self.residual(x, outputs)
        return x

    def attention(self, x: Value) -> Value:
        tape, identity = self._tape, x
        batch, channels, _, height, width = x.shape
        x = self._norm(x)
        qkv = self._convolved(x, (batch, 3 * channels, 1, height, width), 1)
        qkv = copy(tape, qkv)
        q, k, v = chunk(tape, view(tape, qkv, (batch, 1, height * width, 3 * channels)), 3, 3)
        tokens = height * width
        tape.compute(4 * tokens**2 * channels)
        logarithms = tape.new((batch, tokens), "fp32")
        x = self.given((batch, channels, 1, height, width))
        del logarithms
        x = self._convolved(x, x.shape, 1)
        out = add(tape, x, identity)
        del q, k, v
        return out

    def middle(self, x: Value) -> Value:
        x = self.residual(x, x.shape[1])
        x = self.attention(x)
        return self.residual(x, x.shape[1])

    def head(self, x: Value, outputs: int) -> Value:
        x = self._norm(x)
        x = activation(self._tape, x, "silu")
        return self.caching(x, outputs)

    def halve(self, x: Value, *, in_time: bool) -> Value:
        batch, channels, _, height, width = x.shape
        padded = self.given((batch, channels, 1, height + 1, width + 1))
        x = self._convolved(padded, (batch, channels, 1, height // 2, width // 2), 9)
        del padded
        if in_time:
            self._caches.append(copy(self._tape, x))
            self._elements += channels * (3 * channels + 1)  # not used on a single frame
        return x

    def double(self, x: Value, *, in_time: bool) -> Value:
        tape = self._tape
        batch, channels, _, height, width = x.shape
        larger = (batch, channels, 1, 2 * height, 2 * width)
        in_fp32 = to(tape, x, "fp32")
        grown = Value(larger, "fp32", tape.new(larger, "fp32"))
        del in_fp32
        grown = to(tape, grown, self._dtype)
        if in_time:
            self._elements += 2 * channels * (3 * channels + 1)
        return self._convolved(grown, (batch, channels // 2, 1, 2 * height, 2 * width), 9)

    def clamp(self, x: Value) -> Value:
        return times(self._tape, x)

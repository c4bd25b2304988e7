"""Moments in 8 bits, as bitsandbytes keeps them: codes, a map from codes to numbers, and a scale for every 256 of them.

Source of the format: Dettmers et al., 8-bit Optimizers via Block-wise Quantization, arXiv:2110.02861.
"""

from __future__ import annotations

import torch

BLOCK = 256  # elements that share a scale
SMALLEST = 4096  # elements of a parameter whose moments are quantised; smaller ones stay in fp32
_CHUNK = BLOCK * 2**14  # elements quantised at once, which bounds the temporary memory


class QuantizedMoment:
    """One moment of one parameter: element i is `code_map[codes[i]] * scales[i // 256]`.

    It is read in slices, in fp32, and written whole. What was read gives the same numbers when it is written again.
    """

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor, code_map: torch.Tensor) -> None:
        """Wrap (and alias) an optimizer's state.

        Args:
            codes: uint8, any shape, contiguous.
            scales: fp32, shape (blocks,), of consecutive blocks of the flattened codes.
            code_map: fp32, shape (256,), rising; its first number is 0, or negative for signed moments; its last is 1.
        """
        self._codes, self._scales, self._map = codes.view(-1), scales, code_map

    def numel(self) -> int:
        """Number of elements."""
        return self._codes.numel()

    def __getitem__(self, wanted: slice) -> torch.Tensor:
        """Elements of the flattened moment in fp32, a copy."""
        low, high, _ = wanted.indices(self.numel())
        first, last = low // BLOCK, -(-high // BLOCK)
        scales = self._scales[first:last].repeat_interleave(BLOCK)[low - first * BLOCK : high - first * BLOCK]
        return self._map.index_select(0, self._codes[low:high].int()) * scales

    def copy_(self, values: torch.Tensor) -> None:
        """Quantise as many values as there are elements."""
        assert values.numel() == self.numel()
        for low in range(0, self.numel(), _CHUNK):
            chunk = values.view(-1)[low : low + _CHUNK].to(self._codes.device, torch.float32)
            codes, scales = quantize(chunk, self._map)
            self._codes[low : low + _CHUNK] = codes
            self._scales[low // BLOCK : low // BLOCK + scales.numel()] = scales


def quantize(values: torch.Tensor, code_map: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (uint8, as many as values) and scales (fp32, one for every 256) that are nearest to `values` (fp32, 1-D).

    The scale of a block is its largest magnitude. The signed map has 1 but not -1, so a block whose largest element
    is negative comes back a little smaller, and would shrink each time it is saved and loaded. There the scale that
    gives the largest element exactly is tried too, with its neighbours, and the best is taken: for values that were
    quantised before, the one that gives all of them exactly.
    """
    padded = torch.nn.functional.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    largest = padded.abs().amax(1)
    candidates = [largest]
    if code_map[0] < 0:
        shrunk = largest / -code_map[0]
        infinity = torch.full_like(shrunk, torch.inf)
        candidates += [shrunk, torch.nextafter(shrunk, infinity), torch.nextafter(shrunk, -infinity)]
    middles = (code_map[1:] + code_map[:-1]) / 2
    best_codes, best_scales, best_error = torch.empty(0), largest, torch.empty(0)
    for scales in candidates:
        divisors = scales.where(scales > 0, torch.ones_like(scales)).view(-1, 1)
        codes = torch.bucketize(padded / divisors, middles, out_int32=True)
        found = code_map.index_select(0, codes.view(-1)).view_as(padded) * scales.view(-1, 1)
        error = (found - padded).double().square().sum(1)
        if scales is largest:
            best_codes, best_scales, best_error = codes, scales, error
            continue
        better = error < best_error
        best_codes = codes.where(better.view(-1, 1), best_codes)
        best_scales, best_error = scales.where(better, best_scales), error.where(better, best_error)
    return best_codes.view(-1)[: values.numel()].to(torch.uint8), best_scales

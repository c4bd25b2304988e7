"""Rounding is torch's rounding, for every kind of value."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qwen_edit_zero.checkpoints.precision import OverflowingValue, convert, output_dtype

TORCH = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


def _awkward_floats() -> np.ndarray:
    """Every sign, exponent and leading mantissa, each with lower bits around the rounding ties of bf16 and fp16."""
    upper = np.arange(2**16, dtype=np.uint32) << np.uint32(16)
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x0FFF, 0x1000, 0x1001, 0x3000, 0xF000], dtype=np.uint32)
    return (upper[:, None] | lower).ravel().view(np.float32)


@pytest.mark.parametrize("target", ["BF16", "F16"])
def test_fp32_is_rounded_as_torch_rounds(target: str) -> None:
    values = torch.from_numpy(_awkward_floats())
    right = values.to(TORCH[target])
    fits = ~(right.isinf() & values.isfinite())  # the others are refused; see below
    values, right = values[fits], right[fits]
    got = torch.from_numpy(convert(values.numpy().view(np.uint8), "F32", target)).view(TORCH[target])
    nan = right.isnan()
    assert torch.equal(got.isnan(), nan)
    assert torch.equal(got[~nan].view(torch.int16), right[~nan].view(torch.int16))


@pytest.mark.parametrize("source", ["BF16", "F16", "F64"])
@pytest.mark.parametrize("target", ["BF16", "F16", "F32"])
def test_other_types_are_converted_as_torch_converts(source: str, target: str) -> None:
    if source == "F64":
        values = torch.randn(5000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 100
    else:
        values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(TORCH[source])
        values = values[values.isnan() | (values.float().abs() < 65000) | values.isinf()]
    right = values.to(torch.float32).to(TORCH[target])
    data = values.view(torch.uint8).numpy()
    got = torch.from_numpy(convert(data, source, target).copy()).view(TORCH[target])
    assert torch.equal(got[~right.isnan()], right[~right.isnan()])
    assert torch.equal(got.isnan(), right.isnan())


def test_equal_types_keep_every_bit() -> None:
    payloads = np.array([0x7F800001, 0xFFC12345, 0x80000000], dtype=np.uint32).view(np.uint8)
    assert np.array_equal(convert(payloads, "F32", "F32"), payloads)


@pytest.mark.parametrize(
    ("value", "target"), [(65520.0, "F16"), (-1e9, "F16"), (float(np.float32(3.4e38)), "BF16")], ids=str
)
def test_a_finite_value_never_becomes_infinite_silently(value: float, target: str) -> None:
    data = np.array([1.0, value, np.inf], dtype=np.float32)
    with pytest.raises(OverflowingValue) as caught:
        convert(data.view(np.uint8), "F32", target)
    assert caught.value.value == value
    convert(data[[0, 2]].view(np.uint8), "F32", target)


def test_only_floating_point_tensors_change_type() -> None:
    assert [output_dtype(d, "BF16") for d in ("F32", "F64", "F16", "I64", "BOOL", "F8_E4M3")] == [
        "BF16", "BF16", "BF16", "I64", "BOOL", "F8_E4M3"
    ]  # fmt: skip

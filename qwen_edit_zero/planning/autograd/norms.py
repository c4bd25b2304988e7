"""Normalisation: what its operations keep for their backward pass."""

from __future__ import annotations

from collections.abc import Sequence

from qwen_edit_zero.planning.autograd.operations import fresh, multiply, node_of, plus_one, to
from qwen_edit_zero.planning.autograd.tape import Storage, Tape, Value


def layer_norm(tape: Tape, value: Value) -> Value:
    """Without weights: keeps its input, mean and 1 / standard deviation. Autocast computes it in fp32 on GPUs."""
    if tape.autocast and tape.on_gpu:
        value = to(tape, value, "fp32")
    statistics = "fp32" if tape.on_gpu else value.dtype
    of_row = (*value.shape[:-1], 1)
    mean, deviation = tape.new(of_row, statistics), tape.new(of_row, statistics)
    node = node_of(tape, "layer norm", [value])
    if node is not None:
        for storage in (value.storage, mean, deviation):
            tape.save(node, storage)
        size, kind = value.shape, value.dtype
        node.backward = lambda _: [tape.new(size, kind)]
    return Value(value.shape, value.dtype, tape.new(value.shape, value.dtype), node)


def rms_norm(tape: Tape, value: Value, weight: Value) -> Value:
    """diffusers' RMSNorm, in single operations: the square in fp32, the product in the input's dtype or fp32."""
    in_fp32 = to(tape, value, "fp32")
    square = node_of(tape, "rms norm", [in_fp32])
    if square is not None:
        tape.save(square, in_fp32.storage)
        size = in_fp32.shape

        def squared(_: Sequence[Storage | None]) -> list[Storage | None]:
            parts: list[Storage | None] = [tape.new(size, "fp32") for _ in range(3)]  # x, 2 x, times the gradient
            return parts[2:]

        square.backward = squared
    squares = Value(in_fp32.shape, "fp32", tape.new(in_fp32.shape, "fp32"), square)
    del in_fp32
    of_row = (*value.shape[:-1], 1)
    variance = plus_one(tape, fresh(tape, "rms norm", squares, of_row, "fp32"))
    del squares
    root = fresh(tape, "rms norm", variance, of_row, "fp32")
    if root.node is not None:
        tape.save(root.node, root.storage)
    value = multiply(tape, value, root, "rms norm")
    del root
    if weight.dtype != "fp32":
        value = to(tape, value, weight.dtype)
    return multiply(tape, value, weight, "rms norm")

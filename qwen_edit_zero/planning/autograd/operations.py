"""The operations the transformer consists of: what each computes, keeps for its backward pass, and allocates there.

What is kept follows torch's `derivatives.yaml`: an operand is kept if the gradient of another needs it. Views share the
storage they look at. Sizes are in elements unless a name says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from qwen_edit_zero.planning.autograd.tape import BYTES, Node, Shape, Storage, Tape, Value, promoted

_Grad = Storage | None


def node_of(tape: Tape, name: str, operands: Sequence[Value], outputs: int = 1) -> Node | None:
    """The node of an operation; None if no operand needs a gradient."""
    if not tape.grad_enabled or not any(v.needs_grad for v in operands):
        return None
    return Node(tape, name, [None if v.node is None else (v.node, v.output) for v in operands], outputs)


def fresh(tape: Tape, name: str, operand: Value, shape: Shape, dtype: str, keeps: bool = False) -> Value:
    """A new tensor from one operand, whose gradient is a new tensor of the operand's size."""
    node = node_of(tape, name, [operand])
    if node is not None:
        if keeps:
            tape.save(node, operand.storage)
        size, kind = operand.shape, operand.dtype
        node.backward = lambda _: [tape.new(size, kind)]
    return Value(shape, dtype, tape.new(shape, dtype), node)


def view(tape: Tape, value: Value, shape: Shape, dtype: str | None = None) -> Value:
    """The same memory, looked at otherwise; so is its gradient's."""
    node = node_of(tape, "view", [value])
    if node is not None:
        node.backward = list
    return Value(shape, dtype or value.dtype, value.storage, node)


def copy(tape: Tape, value: Value, shape: Shape | None = None) -> Value:
    """Contiguous memory of its own."""
    node = node_of(tape, "copy", [value])
    if node is not None:
        node.backward = list
    shape = shape or value.shape
    return Value(shape, value.dtype, tape.new(shape, value.dtype), node)


def to(tape: Tape, value: Value, dtype: str) -> Value:
    """The value itself if it has the dtype already."""
    return value if value.dtype == dtype else fresh(tape, "cast", value, value.shape, dtype)


def rows(tape: Tape, value: Value, count: int, dim: int = 1) -> Value:
    """A slice along `dim`, whose gradient is the whole, filled with zeros."""
    shape = (*value.shape[:dim], count, *value.shape[dim + 1 :])
    node = node_of(tape, "slice", [value])
    if node is not None:
        size, kind = value.shape, value.dtype
        node.backward = lambda _: [tape.new(size, kind)]
    return Value(shape, value.dtype, value.storage, node)


def chunk(tape: Tape, value: Value, parts: int, dim: int) -> list[Value]:
    """Equal views along `dim`; their gradients are concatenated."""
    shape = (*value.shape[:dim], value.shape[dim] // parts, *value.shape[dim + 1 :])
    node = node_of(tape, "chunk", [value], parts)
    if node is not None:
        size, kind = value.shape, value.dtype
        node.backward = lambda _: [tape.new(size, kind)]
    return [Value(shape, value.dtype, value.storage, node, i) for i in range(parts)]


def cat(tape: Tape, values: Sequence[Value], dim: int) -> Value:
    """A new tensor, of whose gradient each part's is a view."""
    dtype = promoted(*(v.dtype for v in values))
    shape = list(values[0].shape)
    shape[dim] = sum(v.shape[dim] for v in values)
    node = node_of(tape, "concatenation", values)
    if node is not None:
        count = len(values)
        node.backward = lambda grads: [grads[0]] * count
    return Value(tuple(shape), dtype, tape.new(tuple(shape), dtype), node)


def stack(tape: Tape, values: Sequence[Value], shape: Shape) -> Value:
    """A new tensor of all elements of `values`, laid out anew."""
    joined = cat(tape, [view(tape, v, (v.elements,)) for v in values], 0)
    return view(tape, joined, shape)


def plus_one(tape: Tape, value: Value) -> Value:
    """1 + value, or value + a constant."""
    node = node_of(tape, "addition", [value])
    if node is not None:
        node.backward = list
    return Value(value.shape, value.dtype, tape.new(value.shape, value.dtype), node)


def times(tape: Tape, value: Value) -> Value:
    """value x a number."""
    return fresh(tape, "scale", value, value.shape, value.dtype)


def _broadcast(left: Value, right: Value) -> tuple[Shape, str]:
    longest = max(len(left.shape), len(right.shape))
    shapes = [(1,) * (longest - len(v.shape)) + v.shape for v in (left, right)]
    return tuple(max(a, b) for a, b in zip(*shapes, strict=True)), promoted(left.dtype, right.dtype)


def _as_operand(tape: Tape, gradient: Storage, size: int, dtype: str, of: tuple[int, str]) -> Storage:
    """A gradient of `size` elements, summed and cast to those of the operand."""
    if size == of[0] and dtype == of[1]:
        return gradient
    if size != of[0]:
        gradient = Storage(tape, of[0] * BYTES[dtype])
    return gradient if dtype == of[1] else Storage(tape, of[0] * BYTES[of[1]])


def add(tape: Tape, left: Value, right: Value) -> Value:
    """Keeps nothing."""
    shape, dtype = _broadcast(left, right)
    node = node_of(tape, "addition", [left, right])
    if node is not None:
        size, operands = math.prod(shape), [(left.elements, left.dtype), (right.elements, right.dtype)]
        needed = [left.needs_grad, right.needs_grad]

        def backward(grads: Sequence[_Grad]) -> list[_Grad]:
            assert grads[0] is not None
            return [
                _as_operand(tape, grads[0], size, dtype, of) if needs else None
                for of, needs in zip(operands, needed, strict=True)
            ]

        node.backward = backward
    return Value(shape, dtype, tape.new(shape, dtype), node)


def multiply(tape: Tape, left: Value, right: Value, name: str) -> Value:
    """Keeps an operand if the other needs a gradient."""
    shape, dtype = _broadcast(left, right)
    node = node_of(tape, name, [left, right])
    if node is not None:
        if right.needs_grad:
            tape.save(node, left.storage)
        if left.needs_grad:
            tape.save(node, right.storage)
        operands = [(left.elements, left.dtype), (right.elements, right.dtype)]
        needed = [left.needs_grad, right.needs_grad]

        def backward(_: Sequence[_Grad]) -> list[_Grad]:
            whole: list[_Grad] = [tape.new(shape, dtype) if needs else None for needs in needed]
            return [
                None if g is None else _as_operand(tape, g, math.prod(shape), dtype, of)
                for g, of in zip(whole, operands, strict=True)
            ]

        node.backward = backward
    return Value(shape, dtype, tape.new(shape, dtype), node)


def activation(tape: Tape, value: Value, name: str) -> Value:
    """SiLU, GELU, clipping: keeps its input."""
    return fresh(tape, name, value, value.shape, value.dtype, keeps=True)


def select(tape: Tape, condition: Value, first: Value, second: Value, name: str) -> Value:
    """`torch.where` of a condition (B, S, 1) on two (B, 1, d): keeps the condition."""
    shape = (*condition.shape[:-1], first.shape[-1])
    node = node_of(tape, name, [first, second])
    dtype, of = first.dtype, (first.elements, first.dtype)
    if node is not None:
        tape.save(node, condition.storage)

        def backward(_: Sequence[_Grad]) -> list[_Grad]:
            whole = [tape.new(shape, dtype) for _ in range(2)]
            return [_as_operand(tape, g, math.prod(shape), dtype, of) for g in whole]

        node.backward = backward
    return Value(shape, dtype, tape.new(shape, dtype), node)


def rotate(tape: Tape, value: Value, positions: Value) -> Value:
    """Rotary positions, as complex numbers in fp32: keeps only the positions, which all blocks share."""
    dtype, shape = value.dtype, value.shape
    pairs = (*shape[:-1], shape[-1] // 2)
    complex_ = view(tape, to(tape, value, "fp32"), pairs, "complex64")
    turned = multiply(tape, complex_, positions, "rotary positions")
    return to(tape, view(tape, turned, shape, "fp32"), dtype)


def cast_by_autocast(tape: Tape, value: Value) -> Value:
    """In the compute dtype, for products and attention: a copy each time, unless it has it already."""
    return to(tape, value, tape.autocast) if tape.autocast and value.dtype == "fp32" else value


def _cast_parameter(tape: Tape, value: Value, name: str) -> Value:
    """Autocast makes the copy of a weight that trains once; others are in the compute dtype already."""
    if not tape.autocast or value.dtype != "fp32":
        return value

    def make() -> Value:
        cast = cast_by_autocast(tape, value)
        cast.storage.kind = "weight copy"
        return cast

    return tape.cast_weight(name, make) if value.needs_grad else cast_by_autocast(tape, value)


def linear(
    tape: Tape, value: Value, weight: Value, bias: Value | None, name: str, *, remembers_always: bool = False
) -> Value:
    """x W^T + b: keeps x if the weight needs a gradient, and the weight if x does.

    2 x rows x inputs x outputs FLOP forward, and as many for each of the two gradients.
    With `remembers_always` as ZeRO-3's own function, which keeps x whatever needs a gradient.
    """
    value = cast_by_autocast(tape, value)
    weight = _cast_parameter(tape, weight, f"{name}.weight")
    if bias is not None:
        bias = _cast_parameter(tape, bias, f"{name}.bias")
    operands = [value, weight] if bias is None else [value, weight, bias]
    outputs = weight.shape[0]
    shape = (*value.shape[:-1], outputs)
    flops = 2 * value.elements * outputs
    node = node_of(tape, "linear", operands)
    if node is not None:
        if remembers_always:
            tape.compute(flops)
        if remembers_always or weight.needs_grad:
            tape.save(node, value.storage)
        if remembers_always or value.needs_grad:
            tape.save(node, weight.storage)
        if remembers_always and bias is not None:
            tape.save(node, bias.storage)
        needed, sizes, dtype = [v.needs_grad for v in operands], [v.shape for v in operands], value.dtype

        def backward(_: Sequence[_Grad]) -> list[_Grad]:
            tape.count_backward(flops * sum(needed[:2]))
            return [tape.new(size, dtype) if needs else None for needs, size in zip(needed, sizes, strict=True)]

        node.backward = backward
    if node is None or not remembers_always:
        tape.compute(flops)
    return Value(shape, value.dtype, tape.new(shape, value.dtype), node)


def exchange(tape: Tape, value: Value, shape: Shape) -> Value:
    """All ranks of a sequence group trade shares: nothing is kept, the gradient is traded back."""
    return fresh(tape, "exchange", value, shape, value.dtype)


def mean_square(tape: Tape, error: Value) -> Value:
    """(B, n, c) -> (B, n)."""
    square = fresh(tape, "loss", error, error.shape, error.dtype, keeps=True)
    return fresh(tape, "loss", square, error.shape[:-1], error.dtype)


def total(tape: Tape, value: Value, shape: Shape = ()) -> Value:
    """A sum or mean."""
    return fresh(tape, "loss", value, shape, value.dtype)

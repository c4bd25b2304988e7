"""What attention costs: in one kernel (flash, cuDNN, memory-efficient) and as matrix products (math).

A fused kernel keeps query, key, value, its output and a logarithm of a sum for each row and head, and computes the
scores again in its backward pass. The math way keeps the probabilities, samples x heads x tokens^2 of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from qwen_edit_zero.planning.autograd.operations import cast_by_autocast, copy, node_of, to
from qwen_edit_zero.planning.autograd.tape import Storage, Tape, Value


def attention(tape: Tape, inputs: tuple[Value, Value, Value], mask: Value | None, *, math: bool) -> Value:
    """Three (B, S, heads, head width) -> the same; the mask is (B, S) of booleans."""
    query, key, value = (cast_by_autocast(tape, v) for v in inputs)
    del inputs
    if math:
        return _as_products(tape, query, key, value, mask)
    batch, tokens, heads, _ = query.shape
    flops = 4 * tokens * query.elements
    node = node_of(tape, "attention", [query, key, value])
    kept = tape.frame.kept if tape.frame is not None and tape.keeps_attention else None
    if node is not None:
        for operand in (query, key, value):
            tape.save(node, operand.storage)
        if mask is not None:
            tape.save(node, tape.new((batch, tokens), query.dtype))  # as numbers to add
        shape, dtype = query.shape, query.dtype

        def backward(_: Sequence[Storage | None]) -> list[Storage | None]:
            tape.count_backward(5 * flops // 2, scores=flops // 2)
            return [tape.new(shape, dtype) for _ in range(3)]

        node.backward = backward
    if kept is not None and tape.recomputes:
        out, logarithms = kept.pop(0)
    else:
        tape.compute(flops)
        out, logarithms = tape.new(query.shape, query.dtype), tape.new((batch, heads, tokens), "fp32")
        if kept is not None:
            out.label = out.label or "attention"
            kept.append((out, logarithms))
    if node is not None:
        tape.save(node, out)
        tape.save(node, logarithms)
    return Value(query.shape, query.dtype, out, node)


def _as_products(tape: Tape, query: Value, key: Value, value: Value, mask: Value | None) -> Value:
    """As torch's `_scaled_dot_product_attention_math`: in fp32, whatever the inputs are."""
    batch, tokens, heads, width = query.shape
    dtype = query.dtype
    query, key, value = (to(tape, v, "fp32") for v in (query, key, value))
    query, key = (copy(tape, v) for v in (query, key))  # times the root of the scale
    if batch > 1:
        value = copy(tape, value)  # heads beside samples
    scores = _product(tape, query, key, (batch, heads, tokens, tokens), width)
    if mask is not None:
        scores = copy(tape, scores)
    probabilities = copy(tape, scores)
    del scores
    if probabilities.node is not None:
        tape.save(probabilities.node, probabilities.storage)
        shape = probabilities.shape
        probabilities.node.backward = lambda _: [tape.new(shape, "fp32")]
    out = _product(tape, probabilities, value, query.shape, tokens)
    return to(tape, copy(tape, out), dtype)


def _product(tape: Tape, left: Value, right: Value, shape: tuple[int, ...], inner: int) -> Value:
    out = tape.new(shape, "fp32")
    flops = 2 * out.bytes // 4 * inner
    node = node_of(tape, "attention", [left, right])
    if node is not None:
        if right.needs_grad:
            tape.save(node, left.storage)
        if left.needs_grad:
            tape.save(node, right.storage)
        needed, sizes = [v.needs_grad for v in (left, right)], [v.shape for v in (left, right)]

        def backward(_: Sequence[Storage | None]) -> list[Storage | None]:
            tape.count_backward(flops * sum(needed))
            return [tape.new(size, "fp32") if needs else None for needs, size in zip(needed, sizes, strict=True)]

        node.backward = backward
    tape.compute(flops)
    return Value(shape, "fp32", out, node)

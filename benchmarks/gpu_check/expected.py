"""How much memory a rank should need: the formulas of docs/engines.md, as functions of counts alone."""

from __future__ import annotations

# Bytes of an element of a frozen or gathered parameter; trained ones are kept in fp32 in every precision.
COMPUTE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


def state_bytes(
    kind: str, *, trained: int, frozen: int, ranks: int, precision: str = "bf16", bucket: int = 0, persistent: int = 0
) -> float:
    """Bytes a rank holds between steps.

    Args:
        kind: "ddp", "fsdp2", "zero1", "zero2" or "zero3".
        trained, frozen: numbers of parameters.
        ranks: over which state is sharded.
        bucket: elements of a ZeRO-3 bucket; it keeps one of trained values and one of gradients.
        persistent: elements that ZeRO-3 keeps gathered.
    """
    c = COMPUTE_BYTES[precision]
    match kind:
        case "ddp":
            return 16 * trained + c * frozen  # its buckets are the gradients, and they stay
        case "fsdp2":
            return (12 * trained + c * frozen) / ranks
        case "zero1" | "zero2":
            return (c + 12 / ranks) * trained + c * frozen
        case "zero3":
            return (16 + c) * trained / ranks + c * frozen / ranks + 4 * bucket + c * persistent
    raise ValueError(f"no formula for {kind!r}")


def step_bytes(
    kind: str,
    *,
    trained: int,
    frozen: int,
    ranks: int,
    blocks: int,
    tokens: int,
    width: int,
    largest_block: int,
    outside_blocks: int,
    precision: str = "bf16",
) -> float:
    """Bytes of state, gradients, gathered parameters and kept block inputs while a step with block checkpointing runs.

    Without what one block needs to be recomputed and differentiated, which depends on kernels and compilation.

    Args:
        blocks: repeated blocks, each of which keeps its inputs of (tokens, width).
        tokens: of all pictures and the prompt together, in a micro-batch.
        largest_block, outside_blocks: parameters of a block, and of everything outside of blocks.
    """
    c = COMPUTE_BYTES[precision]
    total = state_bytes(kind, trained=trained, frozen=frozen, ranks=ranks, precision=precision)
    total += blocks * tokens * width * c
    if kind == "fsdp2":
        # gradients; what is outside of blocks stays gathered, and two blocks are while one computes
        total += 4 * trained / ranks + c * (outside_blocks + 2 * largest_block)
    return total

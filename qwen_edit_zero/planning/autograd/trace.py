"""One micro-batch forward and backward, run on the model of autograd in `tape.py`."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from weakref import ref

from qwen_edit_zero.planning.autograd.computing import Computing
from qwen_edit_zero.planning.autograd.frame import Frame
from qwen_edit_zero.planning.autograd.network import Network, Positions
from qwen_edit_zero.planning.autograd.tape import Node, Region, Saved, Storage, Tape, Value
from qwen_edit_zero.planning.jobs.model import TransformerShape
from qwen_edit_zero.planning.jobs.tokens import SampleShape


@dataclass(frozen=True)
class Trace:
    """Sizes in bytes, of the rank with the most; arithmetic in FLOP, of one rank of a sequence group.

    Attributes:
        saved: what is kept from forward to backward, but for copies of weights.
        outside: of that, what is made or kept outside of the blocks.
        weight_copies: weights that autocast has cast and that are kept.
        by_operation: `saved` by what keeps it.
        host: inputs of recomputed blocks in host memory; `host_tensors`: how large each is, and how often it is there.
        forward_peak, backward_peak: everything alive at once, copies of weights included.
        forward_flops, recomputed_flops, backward_flops: of matrix products and attention.
        scores_again: of `backward_flops`, attention's scores computed a second time in its kernel.
    """

    saved: int
    outside: int
    weight_copies: int
    host: int
    forward_peak: int
    backward_peak: int
    forward_flops: int
    recomputed_flops: int
    backward_flops: int
    scores_again: int
    by_operation: dict[str, int] = field(default_factory=dict)
    host_tensors: tuple[tuple[int, int], ...] = ()


@functools.lru_cache(maxsize=512)
def trace(
    model: TransformerShape,
    sample: SampleShape,
    how: Computing,
    *,
    trained: frozenset[str],
    adapted: tuple[int, frozenset[str]] | None = None,
    batch: int = 1,
    masked: bool = False,
) -> Trace:
    """Run one micro-batch of `batch` samples. Of blocks that do the same, one is run and counted for all.

    Args:
        trained: names of the parameters that train, adapters among them.
        adapted: (rank, names of modules with an adapter); None without adapters.
        masked: prompts of the micro-batch differ in length, so there is a mask.
    """
    tape = Tape(autocast=how.autocast_dtype, on_gpu=how.on_gpu)
    tape.keeps_attention = how.checkpointing == "selective" and how.attention == "fused"
    network = Network(tape, model, sample, how, trained=trained, adapted=adapted, batch=batch, masked=masked)
    hidden, text, time, mask, positions = network.embed()
    index = network.modulated_pictures()
    patterns = _patterns(model, trained, adapted)
    regions: dict[tuple[object, ...], Region] = {}
    frames: list[ref[Frame]] = []
    for number in range(model.blocks):
        recomputed = how.checkpointing != "none" and number % how.checkpoint_every == 0
        is_last = number == model.blocks - 1
        key = (patterns[number], recomputed, hidden.needs_grad, text.needs_grad, hidden.dtype, is_last, number == 0)
        if key in regions:
            regions[key].count += 1
            continue
        tape.region = regions[key] = Region()
        hidden.storage.region = text.storage.region = tape.region
        if recomputed:
            text, hidden = _checkpointed(tape, network, number, hidden, text, time, positions, mask, index, frames)
        else:
            text, hidden = network.block(number, hidden, text, time, positions, mask, index)
        tape.region = None
    hidden.storage.region = None
    held = [text]  # which nothing uses; the last block's part of it is kept until the model's forward ends
    del text
    loss = network.losses(hidden, time, held)
    del hidden, time, positions, index, mask
    kept = _kept(loss)
    activations = [s for s in kept if s.kind == "activation"]
    by_operation: dict[str, int] = {}
    storage: Storage | None
    for storage in activations:
        by_operation[storage.label] = by_operation.get(storage.label, 0) + _counted(storage)
    saved, outside = sum(map(_counted, activations)), sum(s.bytes for s in activations if s.region is None)
    copies = sum(_counted(s) for s in kept if s.kind == "weight copy")
    # The blocks that were not run would have kept as much as those like them that were.
    not_run = saved - sum(s.bytes for s in activations)
    copies_not_run = copies - sum(s.bytes for s in kept if s.kind == "weight copy")
    forward_peak, tape.peak = tape.peak, tape.live
    host = [(size, frame.region.count) for frame in _alive(frames) if frame.region for size in frame.host_sizes]
    kept.clear()
    activations.clear()
    storage = None
    tape.backward(loss)
    return Trace(
        saved=saved,
        outside=outside,
        weight_copies=copies,
        host=sum(size * count for size, count in host),
        forward_peak=forward_peak + not_run + tape.cached_not_run,
        backward_peak=tape.peak + not_run + copies_not_run,
        forward_flops=tape.outer_flops + sum(region.count * region.flops for region in regions.values()),
        recomputed_flops=tape.recomputed_flops,
        backward_flops=tape.backward_flops,
        scores_again=tape.scores_again,
        by_operation=by_operation,
        host_tensors=tuple(host),
    )


@functools.lru_cache(maxsize=64)
def forward_only(
    model: TransformerShape,
    sample: SampleShape,
    how: Computing,
    *,
    trained: frozenset[str],
    adapted: tuple[int, frozenset[str]] | None = None,
) -> tuple[int, int]:
    """(bytes at most, FLOP) of a forward pass of one sample without gradients; arguments as of `trace`."""
    tape = Tape(autocast=how.autocast_dtype, on_gpu=how.on_gpu)
    tape.grad_enabled = False
    network = Network(tape, model, sample, how, trained=trained, adapted=adapted, batch=1, masked=False)
    hidden, text, time, mask, positions = network.embed()
    index = network.modulated_pictures()
    regions: dict[frozenset[str], Region] = {}
    for number, pattern in enumerate(_patterns(model, trained, adapted)):
        if pattern in regions:
            regions[pattern].count += 1
            continue
        tape.region = regions[pattern] = Region()
        text, hidden = network.block(number, hidden, text, time, positions, mask, index)
        tape.region = None
    network.losses(hidden, time, [text])
    flops = tape.outer_flops + sum(region.count * region.flops for region in regions.values())
    return tape.peak + tape.cached_not_run, flops


def _counted(storage: Storage) -> int:
    return storage.bytes * (1 if storage.region is None else storage.region.count)


def _alive(frames: Iterable[ref[Frame]]) -> Iterator[Frame]:
    """Those that something is kept for."""
    for reference in frames:
        if (frame := reference()) is not None:
            yield frame


def _patterns(
    model: TransformerShape, trained: frozenset[str], adapted: tuple[int, frozenset[str]] | None
) -> list[frozenset[str]]:
    """What distinguishes blocks: the names, within the block, of what trains and of what has an adapter."""
    found: list[set[str]] = [set() for _ in range(model.blocks)]
    for name in [*trained, *(f"{name} adapted" for name in (adapted[1] if adapted else ()))]:
        if name.startswith("transformer_blocks."):
            _, number, rest = name.split(".", 2)
            found[int(number)].add(rest)
    return [frozenset(names) for names in found]


def _checkpointed(
    tape: Tape,
    network: Network,
    number: int,
    hidden: Value,
    text: Value,
    time: Value,
    positions: Positions,
    mask: Value | None,
    index: Value | None,
    frames: list[ref[Frame]],
) -> tuple[Value, Value]:
    """A block of which only the inputs are kept."""
    given = [value for value in (mask, index) if value is not None]

    def run(hidden: Value, text: Value, time: Value, *rest: Value) -> tuple[Value, Value]:
        more = iter(rest)
        of_mask = None if not network.masked else next(more)
        return network.block(number, hidden, text, time, positions, of_mask, next(more, None))

    how = network.how
    inputs = [hidden, text, time, *given]
    constants = [positions[0].storage]  # not among the arguments that go to host memory
    frame = Frame(tape, run, inputs, constants, early_stop=how.early_stop, host=how.to_host)
    frames.append(ref(frame))
    with tape.checkpoint(frame):
        return network.block(number, hidden, text, time, positions, mask, index)


def _kept(loss: Value) -> list[Storage]:
    """The storages that the graph behind `loss` keeps, each once."""
    found: dict[int, Storage] = {}
    seen: set[Node] = set()
    waiting = [loss.node]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [edge[0] for edge in node.inputs if edge is not None]
        for saved in node.saved:
            for storage, label in _held(saved):
                storage.label = storage.label or label
                found[id(storage)] = storage
    return [storage for storage in found.values() if storage.kind != "given"]


def _held(saved: Saved) -> list[tuple[Storage, str]]:
    frame = saved.frame
    if frame is None:
        return [] if saved.storage is None else [(saved.storage, "")]
    inputs = [(value.storage, "input of a recomputed block") for value in frame.inputs or ()]
    inputs += [(storage, "rotary positions") for storage in frame.constants]
    return inputs + [(storage, "attention") for pair in frame.kept for storage in pair]

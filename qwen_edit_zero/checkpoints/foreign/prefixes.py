"""Names that wrappers gave to parameters, brought back to the model's own, as path segments and never by length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from qwen_edit_zero.errors import CheckpointError

# modules of these names exist in no model: FSDP, torch.compile, activation checkpointing, Lightning
WRAPPERS = frozenset({"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module", "_forward_module"})
# these may be a model's own; taken off only from the front, and only if all names begin so
_HEADS = ("module", "model", "state_dict")


@dataclass(frozen=True)
class Renaming:
    """`names`: stored name -> the model's; `left_out`: stored names of something else; `notes`: in words."""

    names: Mapping[str, str]
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def clean(name: str) -> str:
    """The name without the segments that only wrappers have."""
    return ".".join(s for s in name.split(".") if s not in WRAPPERS)


def resolve(names: Iterable[str], expected: Collection[str] | None = None) -> Renaming:
    """Bring stored names back to the model's.

    With `expected`, the model's own names, whatever stands in front of most of them is taken off, and names that are
    still unknown then are left out. Without, `module.` and the like are taken off if every name has them.
    Raises CheckpointError naming both if two names become one.
    """
    stored = list(names)
    cleaned = {name: clean(name) for name in stored}
    head = _head(cleaned.values(), expected) if expected is not None else _common_head(cleaned.values())
    result, left_out = {}, []
    for name, short in cleaned.items():
        if head and short.startswith(head):
            short = short.removeprefix(head)
        elif head:
            left_out.append(name)
            continue
        if expected is not None and short not in expected:
            left_out.append(name)
            continue
        result[name] = short
    own = result if expected is not None else {}
    _refuse_collisions({name: own.get(name) or _bare(cleaned[name]) for name in stored}, result)
    notes = []
    if wrappers := sorted({s for name in stored for s in name.split(".") if s in WRAPPERS}):
        notes.append(f"wrappers taken out of the names: {', '.join(wrappers)}")
    if head:
        notes.append(f"taken off the front of the names: {head}")
    return Renaming(result, tuple(left_out), tuple(notes))


def _head(names: Collection[str], expected: Collection[str]) -> str:
    """What stands before most of the expected names, with its dot."""
    heads: Counter[str] = Counter()
    for name in names:
        rest, taken = name, ""
        while True:
            if rest in expected:
                heads[taken] += 1
            segment, dot, rest = rest.partition(".")
            if not dot:
                break
            taken += segment + dot
    return max(heads, key=lambda h: (heads[h], -len(h)), default="")


def _common_head(names: Collection[str]) -> str:
    head, rest = "", list(names)
    while rest:
        first = rest[0].split(".")[0]
        if first not in _HEADS or not all(name.startswith(f"{first}.") for name in rest):
            break
        head += f"{first}."
        rest = [name.removeprefix(f"{first}.") for name in rest]
    return head


def _bare(name: str) -> str:
    """The name without `module.` and the like in front."""
    while (parts := name.split(".", 1))[0] in _HEADS and len(parts) == 2:
        name = parts[1]
    return name


def _refuse_collisions(names: Mapping[str, str], result: Mapping[str, str]) -> None:
    """`names`: what each stored name might be besides what `result` says; two that are the same parameter are wrong."""
    seen: dict[str, str] = {}
    for name, short in result.items():
        if short in seen:
            raise CheckpointError(f"{seen[short]} and {name} are both the model's {short}; keep one of them")
        seen[short] = name
    for name, short in names.items():
        if seen.get(short, name) != name:
            raise CheckpointError(f"{seen[short]} and {name} are both the model's {short}; keep one of them")

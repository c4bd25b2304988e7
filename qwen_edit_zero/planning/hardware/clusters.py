"""What GPUs and clusters can do: the table `accelerators.yaml`, and `--gpus 8x8xA100-80`."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from qwen_edit_zero.errors import UserError
from qwen_edit_zero.planning.wording.quantities import GIB, read_bytes, read_bytes_per_second, read_flops
from qwen_edit_zero.settings.files import read_text
from qwen_edit_zero.settings.names import nearest

MOST_RANKS = 16_384
_USUAL_NODE = 8
_MOST_TIMES = 100
# By the name without maker and punctuation: Volta, Turing and what was before.
_WITHOUT_BF16 = re.compile(r"(v100|t4|p100|p40|p4|k80|m40|m60|titan|(quadro)?rtx(20|[4568]000(?!ada))|gtx)", re.ASCII)
_CONTEXT = GIB // 2  # assumed, of a process that has used cuBLAS and cuDNN
_MASKED_ATTENTION = (1.5, 2.2)  # docs/plan_evidence.md
_TABLE = Path(__file__).parent / "accelerators.yaml"


@dataclass(frozen=True)
class Accelerator:
    """A kind of GPU. Where figures come from is in `source`; what each means in `accelerators.yaml`.

    Attributes:
        memory: bytes that a program can have.
        bf16_flops: dense, a second.
        memory_bandwidth, link, host_link, network: bytes a second; the last three each way.
        host_memory: usual bytes of a node's memory, a GPU.
        context: bytes of `memory` that the CUDA context and libraries take beside torch's tensors, NCCL's buffers not
            included (an assumption).
        reached: share of `bf16_flops` that matrix products and attention reach, (low, high).
        masked_attention: how many times as long attention takes where prompts are padded, (low, high).
        device_names: parts of the name by which a device calls itself.
    """

    name: str
    memory: int
    bf16_flops: float
    memory_bandwidth: float
    link: float
    link_kind: str
    host_link: float
    network: float
    host_memory: int
    reached: tuple[float, float]
    source: str
    device_names: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    note: str = ""
    context: int = _CONTEXT
    masked_attention: tuple[float, float] = _MASKED_ATTENTION


@dataclass(frozen=True)
class Cluster:
    """Nodes of one kind of GPU.

    Attributes:
        network: bytes a second between nodes, each way, a GPU.
        host_memory: bytes of a node.
    """

    nodes: int
    gpus_per_node: int
    accelerator: Accelerator
    network: float
    host_memory: int

    @property
    def world(self) -> int:
        """GPUs of all nodes."""
        return self.nodes * self.gpus_per_node

    @property
    def name(self) -> str:
        """As for `--gpus`: `8xH100`, `8x8xH100`."""
        nodes = f"{self.nodes}x" if self.nodes > 1 or self.gpus_per_node > _USUAL_NODE else ""
        return f"{nodes}{self.gpus_per_node}x{self.accelerator.name}"

    def of(self, nodes: int, gpus_per_node: int) -> Cluster:
        """Another number of the same GPUs; a node's memory is what it was."""
        return dataclasses.replace(self, nodes=nodes, gpus_per_node=gpus_per_node)


@functools.cache
def known_accelerators() -> Mapping[str, Accelerator]:
    """The table that is shipped, by name."""
    return _read_table(_TABLE.read_text(encoding="utf-8"), _TABLE.name)


def load_accelerators(path: Path) -> Mapping[str, Accelerator]:
    """The shipped table with the entries of a file of the same form. Raises UserError for a file that is wrong."""
    return {**known_accelerators(), **_read_table(read_text(path, shown=str(path)), str(path))}


def accelerator_of_device(
    device_name: str, table: Mapping[str, Accelerator] | None = None, *, memory: int | None = None
) -> Accelerator | None:
    """The kind of a device that calls itself so, or None. With `memory` (bytes) the entry gets that of the device."""
    fits = [
        (len(part), accelerator)
        for accelerator in (table or known_accelerators()).values()
        for part in accelerator.device_names
        if re.search(rf"(?<![A-Za-z0-9]){re.escape(part)}(?![A-Za-z0-9])", device_name, re.IGNORECASE)
    ]
    if not fits:
        return None
    found = max(fits, key=lambda fit: fit[0])[1]
    return found if memory is None else dataclasses.replace(found, memory=memory)


def find_accelerator(name: str, table: Mapping[str, Accelerator] | None = None) -> Accelerator:
    """The entry of this name or alias, in any case and with any punctuation.

    Raises UserError if there is none, with near names and how to add one, or if the name leaves open which is meant.
    """
    table = table or known_accelerators()
    by_plain = {_plain(said): entry for entry in table.values() for said in (entry.name, *entry.aliases)}
    plain = _plain(name)
    if plain in by_plain:
        return by_plain[plain]
    begin_so = sorted({entry.name for said, entry in by_plain.items() if plain and said.startswith(plain)})
    if len(begin_so) == 1:
        return table[begin_so[0]]
    if begin_so:
        raise UserError(f"--gpus: {name!r} leaves open which is meant; say {' or '.join(begin_so)}")
    if _WITHOUT_BF16.match(plain):
        raise UserError(
            f"--gpus: {name.strip()} has no bf16, which came with the generation of the A100; trainings here are meant "
            "for bf16, and nothing is known of their speed on it. Use a GPU of that generation or a later one: "
            f"{', '.join(table)}"
        )
    near = nearest(plain, list(by_plain))
    did_you = f" Did you mean {by_plain[near].name}?" if near else ""
    raise UserError(
        f"--gpus: {name!r} is not in the table of accelerators.{did_you} There are: {', '.join(table)}. To add one, "
        "write a YAML file with figures of its data sheet (bf16 without sparsity, link each way) in place of N, for "
        "--accelerators FILE, as in\n"
        f"    {name.strip() or 'NAME'}: {{memory: N GiB, bf16: N TFLOP/s, memory_bandwidth: N GB/s, link: N GB/s}}"
    )


def parse_gpus(text: str, table: Mapping[str, Accelerator] | None = None) -> Cluster:
    """A cluster from `[[NODESx]GPUSx]KIND[,net=RATE][,host=SIZE]`.

    `A100-80` is one GPU, `8xA100-80` a node of 8, `8x8xA100-80` eight such nodes; more than 8 GPUs without a number of
    nodes are nodes of 8. `net` is the network's rate each way, a GPU; `host` a node's memory.

    Raises UserError for anything else.
    """
    kind_text, *options = (part.strip() for part in text.strip().replace("×", "x").split(","))
    numbers: list[int] = []
    rest = kind_text
    while len(numbers) < 2 and (found := re.match(r"\s*(-?\d+)\s*[xX*]\s*(?=\S)", rest)):
        numbers.append(int(found[1]))
        rest = rest[found.end() :]
    if re.match(r"\s*-?\d+\s*[xX*]", rest) or not rest.strip():
        raise UserError(f"--gpus: {text!r} names no cluster; write [NODESx]GPUSxKIND, such as 8xA100-80 or 8x8xH100")
    if any(number < 1 for number in numbers):
        raise UserError(f"--gpus: {text!r} has a number of {min(numbers)}; nodes and GPUs must be 1 or more")
    accelerator = find_accelerator(rest, table)
    nodes, gpus = _nodes_and_gpus(numbers, text, accelerator.name)
    if nodes * gpus > MOST_RANKS:
        raise UserError(f"--gpus: {text!r} are {nodes * gpus:,} GPUs; the planner is meant for up to {MOST_RANKS:,}")
    cluster = Cluster(nodes, gpus, accelerator, accelerator.network, accelerator.host_memory * gpus)
    return functools.reduce(lambda so_far, option: _with_option(so_far, option, text), options, cluster)


def _nodes_and_gpus(numbers: list[int], text: str, name: str) -> tuple[int, int]:
    if len(numbers) == 2:
        return numbers[0], numbers[1]
    gpus = numbers[0] if numbers else 1
    if gpus <= _USUAL_NODE:
        return 1, gpus
    if gpus % _USUAL_NODE:
        raise UserError(
            f"--gpus: {text!r} are no whole nodes of {_USUAL_NODE}; say how many nodes there are and how many GPUs "
            f"each has, such as 1x{gpus}x{name}"
        )
    return gpus // _USUAL_NODE, _USUAL_NODE


def _with_option(cluster: Cluster, option: str, text: str) -> Cluster:
    key, equals, value = option.partition("=")
    try:
        match key.strip().lower() if equals else "":
            case "net" | "network":
                return dataclasses.replace(cluster, network=read_bytes_per_second(value))
            case "host":
                return dataclasses.replace(cluster, host_memory=read_bytes(value))
    except ValueError as error:
        raise UserError(f"--gpus: in {text!r}, {key.strip()}: {error}") from None
    raise UserError(f"--gpus: in {text!r}, {option!r} is no option; there are net=25GB/s (a GPU) and host=1TB (a node)")


def _plain(name: str) -> str:
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    return re.sub(r"^(nvidia|geforce|tesla|amd|instinct)+", "", plain).removesuffix("gb")


def _pair(value: Any) -> tuple[float, float]:
    if not (isinstance(value, list) and len(value) == 2 and all(isinstance(n, int | float) for n in value)):
        raise ValueError(f"{value!r} is no pair; write [low, high]")
    return float(value[0]), float(value[1])


def _shares(value: Any) -> tuple[float, float]:
    low, high = _pair(value)
    if not 0 < low <= high <= 1:
        raise ValueError(f"{value!r} must be shares above 0 and up to 1, the lower first")
    return low, high


def _factors(value: Any) -> tuple[float, float]:
    low, high = _pair(value)
    if not 1 <= low <= high <= _MOST_TIMES:
        raise ValueError(f"{value!r} must be factors from 1 to {_MOST_TIMES}, the lower first")
    return low, high


def _words(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{value!r} is no list")
    return tuple(map(str, value))


# name in the file -> (field, how to read it); the first four must be there
_FIELDS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "memory": ("memory", lambda value: read_bytes(str(value))),
    "bf16": ("bf16_flops", lambda value: read_flops(str(value))),
    "memory_bandwidth": ("memory_bandwidth", lambda value: read_bytes_per_second(str(value))),
    "link": ("link", lambda value: read_bytes_per_second(str(value))),
    "link_kind": ("link_kind", str),
    "host_link": ("host_link", lambda value: read_bytes_per_second(str(value))),
    "network": ("network", lambda value: read_bytes_per_second(str(value))),
    "host_memory": ("host_memory", lambda value: read_bytes(str(value))),
    "reached": ("reached", _shares),
    "masked_attention": ("masked_attention", _factors),
    "source": ("source", str),
    "names": ("device_names", _words),
    "aliases": ("aliases", _words),
    "note": ("note", str),
    "context": ("context", lambda value: read_bytes(str(value))),
}
_NEEDED = 4
# Of an entry of the user's that does not say.
_USUAL: dict[str, Any] = {
    "link_kind": "link", "host_link": 32e9, "network": 3.1e9, "host_memory": 128 * GIB, "reached": (0.4, 0.7),
    "source": "given by the user",
}  # fmt: skip


def _read_table(text: str, shown: str) -> dict[str, Accelerator]:
    try:
        content = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError as error:
        raise UserError(f"{shown} is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict) or not content:
        raise UserError(f"{shown} holds no accelerators; write NAME: {{memory: ..., bf16: ..., ...}} for each")
    return {str(name): _entry(str(name), entry, shown) for name, entry in content.items()}


def _entry(name: str, entry: Any, shown: str) -> Accelerator:
    needed = list(_FIELDS)[:_NEEDED]
    if not isinstance(entry, dict):
        raise UserError(f"{shown}: {name} is no mapping; it must have {', '.join(needed)}")
    for key in entry:
        if key not in _FIELDS:
            near = nearest(str(key), list(_FIELDS))
            hint = f"did you mean {near}?" if near else f"there are {', '.join(_FIELDS)}"
            raise UserError(f"{shown}: {name} has {key!r}, which is not known; {hint}")
    if missing := [key for key in needed if key not in entry]:
        raise UserError(f"{shown}: {name} lacks {', '.join(missing)}")
    values = dict(_USUAL)
    for key, value in entry.items():
        field, read = _FIELDS[key]
        try:
            values[field] = read(value)
        except ValueError as error:
            raise UserError(f"{shown}: {name}.{key}: {error}") from None
    return Accelerator(name=name, **values)

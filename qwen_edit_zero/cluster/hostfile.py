"""Read hostfiles strictly: `node1 slots=8`, one host a line, rank 0 on the first.

The form is DeepSpeed's; Open MPI's `max_slots` is accepted and ignored. What DeepSpeed would quietly read as something
else (`slots=8.5`, a byte order mark, a comment behind the slots) is read rightly or refused.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qwen_edit_zero.errors import ClusterError
from qwen_edit_zero.settings.names import nearest

MAX_SLOTS = 1024
_MAX_BYTES = 1 << 22
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_USER = re.compile(r"[A-Za-z_][A-Za-z0-9._-]*")
_IGNORED = {"max_slots", "max-slots"}


@dataclass(frozen=True)
class Host:
    """One line of a hostfile: `user` is for ssh only, `name` is what ranks and addresses are called."""

    name: str
    slots: int
    line: int
    user: str | None = None


def parse_hostfile(path: Path) -> list[Host]:
    """Return the hosts of a hostfile in its order.

    Raises ClusterError naming the file and the line if it cannot be read, names no host, names one twice, or has a
    line that is not `HOST slots=N`.
    """
    text = read_hostfile(path)
    hosts: list[Host] = []
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.split("#", 1)[0].strip()
        if not content:
            continue
        host = parse_line(content, number, f"{path}:{number}: {line.strip()!r}")
        twin = next((other for other in hosts if other.name == host.name), None)
        if twin is not None:
            raise ClusterError(f"{path}:{number}: {host.name} is named a second time (first in line {twin.line})")
        hosts.append(host)
    if not hosts:
        raise ClusterError(f"{path} names no hosts; write one line a node, such as: node1 slots=8")
    return hosts


def read_hostfile(path: Path) -> str:
    """Return the text of a list of hosts, without a byte order mark. Raises ClusterError if it is not text."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ClusterError(f"{path} has {path.stat().st_size} bytes; that is not a hostfile")
        data = path.read_bytes()
    except OSError as error:
        raise ClusterError(f"the hostfile {path} cannot be read: {error.strerror or error}") from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if any(ord(char) < 32 and char not in "\t\n\r" for char in text):
        raise ClusterError(f"{path} is not a text file; a hostfile has one line a node, such as: node1 slots=8")
    return text


def parse_line(content: str, number: int, shown: str) -> Host:
    """Return what one line, without comment, says; `shown` begins the messages of the ClusterErrors that are raised."""
    if re.search(r"\s=|=\s", content):
        raise ClusterError(f"{shown} has blanks round '='; write {re.sub(r'[ ]*=[ ]*', '=', content)}")
    name, *fields = content.split()
    slots: int | None = None
    for field in fields:
        key, sign, value = field.partition("=")
        if key in _IGNORED and sign:
            continue
        if key != "slots" or not sign:
            hint = f"; did you mean slots={value}?" if sign and nearest(key, ["slots"]) else ""
            raise ClusterError(f"{shown}: {field} is not slots=N{hint}")
        if slots is not None:
            raise ClusterError(f"{shown} has slots twice")
        slots = _slots(value, shown)
    user, _, host = name.rpartition("@")
    if "@" in name and not _USER.fullmatch(user):
        raise ClusterError(f"{shown}: {user!r} is not a user name")
    _check_name(host, shown, slots)
    if slots is None:
        raise ClusterError(f"{shown} does not say how many ranks run there; write {name} slots=8")
    return Host(host, slots, number, user or None)


def _slots(value: str, shown: str) -> int:
    if not (value.isascii() and value.isdigit()):
        raise ClusterError(f"{shown}: slots is {value!r}; it must be a whole number")
    if len(value) > 9 or not 0 < int(value) <= MAX_SLOTS:
        raise ClusterError(f"{shown}: slots is {value}; it must be from 1 to {MAX_SLOTS} (leave out hosts without any)")
    return int(value)


def _check_name(host: str, shown: str, slots: int | None) -> None:
    try:
        ipaddress.ip_address(host)
        return
    except ValueError:
        pass
    if re.fullmatch(r"[^:]+:[0-9]+", host):
        name, count = host.split(":")
        if slots is not None:
            raise ClusterError(
                f"{shown}: {host} names an ssh port; write {name} slots={slots}, and put ports into ~/.ssh/config"
            )
        raise ClusterError(
            f"{shown}: {host} is the form of MPICH, or names an ssh port; write {name} slots={count} if {count} is the "
            "number of ranks, and put ports into ~/.ssh/config"
        )
    if not _NAME.fullmatch(host):
        raise ClusterError(f"{shown}: {host!r} is not a host name")


def filter_hosts(hosts: Sequence[Host], *, include: str = "", exclude: str = "") -> dict[str, list[int]]:
    """Return the slot ids of each host that DeepSpeed's `--include` or `--exclude` leaves, in the order of the file.

    A filter is `HOST[:ID[,ID...]]` joined by `@`; ids count from 0 and are sorted. Raises ClusterError if both are
    given, if a host or id does not exist, or if nothing is left.
    """
    if include and exclude:
        raise ClusterError("--include and --exclude are both given; only one of them can be")
    everything = {host.name: list(range(host.slots)) for host in hosts}
    if not include and not exclude:
        return everything
    option = "--include" if include else "--exclude"
    chosen: dict[str, set[int]] = {}
    for part in (include or exclude).split("@"):
        name, ids = _parse_filter(part.strip(), everything, option)
        chosen.setdefault(name, set()).update(ids)
    if include:
        left = {name: sorted(chosen[name]) for name in everything if name in chosen}
    else:
        left = {name: [i for i in ids if i not in chosen.get(name, set())] for name, ids in everything.items()}
    left = {name: ids for name, ids in left.items() if ids}
    if not left:
        raise ClusterError(f"{option} {exclude or include} leaves no slot of any host")
    return left


def _parse_filter(part: str, everything: dict[str, list[int]], option: str) -> tuple[str, list[int]]:
    if part in everything:
        return part, everything[part]
    name, colon, listed = part.rpartition(":")
    name = (name if colon else part).strip()
    if name not in everything:
        near = nearest(name, list(everything))
        hint = f"; did you mean {near}?" if near else f"; it has {', '.join(list(everything)[:8])}"
        raise ClusterError(f"{option} {part!r}: {name!r} is not in the hostfile{hint}")
    ids: list[int] = []
    for text in listed.split(","):
        if re.fullmatch(r"\s*[0-9]+\s*-\s*[0-9]+\s*", text):
            raise ClusterError(f"{option} {part!r}: {text} is a range, which DeepSpeed does not know; list the ids")
        if not re.fullmatch(r"\s*[0-9]{1,9}\s*", text):
            raise ClusterError(f"{option} {part!r}: {text!r} is not a slot id; write {name}:0,1 or {name} alone")
        if int(text) not in everything[name]:
            last = len(everything[name]) - 1
            raise ClusterError(f"{option} {part!r}: {name} has slots 0-{last}; the number is an id, not a count")
        ids.append(int(text))
    return name, ids

"""The network interface over which ranks of different nodes talk."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from qwen_edit_zero.cluster.interfaces import interface_addresses, name_resolves_to_loopback, outward_interface
from qwen_edit_zero.doctor.findings import Finding, Level
from qwen_edit_zero.doctor.nodes import listed, odd_nodes, told_apart

_SYS = Path("/sys/class/net")
_SIOCGIFMTU = 0x8921  # Linux: the largest packet of an interface
_LAST = ("docker", "lo")  # that NCCL takes only if there is nothing else


@dataclass(frozen=True)
class Interface:
    """`speed` in Mbit/s and `mtu` in bytes, 0 if unknown. `loopback_name`: the node's own name means loopback."""

    name: str
    address: str
    mtu: int
    speed: int
    loopback_name: bool

    @property
    def is_loopback(self) -> bool:
        """Whether no other node can be reached over it."""
        with contextlib.suppress(ValueError):
            return ipaddress.ip_address(self.address).is_loopback
        return self.name == "lo"


def look(backend: str, environ: Mapping[str, str]) -> Interface:
    """The interface of this node that `backend`, nccl or gloo, will use; an empty name if there is none."""
    addresses = interface_addresses()
    chosen = nccl_choice(environ, addresses) if backend == "nccl" else _gloo_choice(environ, addresses)
    name = chosen or outward_interface() or ""
    return Interface(name, addresses.get(name, ""), _mtu(name), _speed(name), name_resolves_to_loopback())


def nccl_choice(environ: Mapping[str, str], addresses: Mapping[str, str]) -> str | None:
    """The first interface that NCCL takes for sockets: by NCCL_SOCKET_IFNAME (`=eth0` exactly, `^docker` not, else
    beginnings of names), else ib*, else any but docker* and lo, else those."""
    wish = environ.get("NCCL_SOCKET_IFNAME", "")
    names = list(addresses)
    if wish:
        exact, but = wish.startswith("="), wish.startswith("^")
        words = [word for word in wish.lstrip("=^").split(",") if word]
        exact = exact or wish.startswith("^=")

        def fits(name: str) -> bool:
            return name in words if exact else name.startswith(tuple(words))

        return next((name for name in names if fits(name) != but), None)
    groups = (
        [name for name in names if name.startswith("ib")],
        [name for name in names if not name.startswith(_LAST)],
        names,
    )
    return next((group[0] for group in groups if group), None)


def _gloo_choice(environ: Mapping[str, str], addresses: Mapping[str, str]) -> str | None:
    if wish := environ.get("GLOO_SOCKET_IFNAME"):
        return wish.split(",")[0]
    with contextlib.suppress(OSError):
        own = socket.gethostbyname(socket.gethostname())
        return next((name for name, address in addresses.items() if address == own), None)
    return None


def judge(interfaces: Mapping[str, Interface], backend: str) -> list[Finding]:
    """Findings about the interfaces of several nodes."""
    variable = f"{backend.upper()}_SOCKET_IFNAME"
    found = []
    names = {name: face.name for name, face in interfaces.items()}
    first = next(iter(interfaces))
    lost = [name for name, face in interfaces.items() if not face.address]
    if lost:
        text = f"{listed(lost)} has no interface with an IPv4 address that {backend} would use"
        found.append(Finding("network", "interface", Level.WARNING, text, f"set {variable} if ranks do not meet"))
    elif odd_nodes(names):
        advice = f"right if they are one network; else set {variable}"
        found.append(Finding("network", "interface", Level.WARNING, told_apart(names), advice))
    else:
        text = f"{backend} uses {names[first]} on all nodes ({interfaces[first].address} on {first})"
        found.append(Finding("network", "interface", Level.OK, text))
    for what, values in (
        ("MTU", {name: face.mtu for name, face in interfaces.items() if face.mtu}),
        ("link speed", {name: face.speed for name, face in interfaces.items() if face.speed}),
    ):
        if not values:
            found.append(Finding("network", what, Level.UNCHECKED, "the interfaces do not tell"))
        elif odd_nodes(values):
            advice = (
                "packets of odd sizes may be lost: set one MTU" if what == "MTU" else "look at the cable and switch"
            )
            found.append(Finding("network", what, Level.WARNING, told_apart(values), advice))
        else:
            unit = " bytes" if what == "MTU" else " Mbit/s"
            found.append(Finding("network", what, Level.OK, f"{next(iter(values.values()))}{unit}"))
    if strange := [name for name, face in interfaces.items() if face.loopback_name]:
        text = f"the own name of {listed(strange)} is unknown there or means loopback; gloo is told the interface here"
        advice = "in /etc/hosts, give the name the node's address in place of 127.0.1.1"
        found.append(Finding("network", "host names", Level.WARNING, text, advice))
    else:
        found.append(Finding("network", "host names", Level.OK, "every node's own name means an address others reach"))
    return found


def _mtu(name: str) -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFMTU, struct.pack("16si240x", name.encode()[:15], 0))
        except OSError:
            return 0
    return int(struct.unpack("16si", answer[:20])[1])


def _speed(name: str) -> int:
    """Mbit/s; 0 if it does not tell, or if /sys, in a container, is about the interfaces of another network."""
    try:
        if int((_SYS / name / "ifindex").read_text(encoding="utf-8")) != socket.if_nametoindex(name):
            return 0
        return max(0, int((_SYS / name / "speed").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return 0
